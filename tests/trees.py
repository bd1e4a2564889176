"""Comparing trees bit for bit: structure, types, dtypes, shapes, keys, NaN payloads."""

import struct
from typing import Any

import jax
import numpy as np


def same(a: Any, b: Any) -> bool:
    """True where two trees are the same in every bit; else an AssertionError that lists every difference."""
    found = differences(a, b)
    assert not found, "\n".join(found)
    return True


def differences(a: Any, b: Any) -> list[str]:
    """In what two trees differ, a line for each place."""
    ours, theirs = jax.tree.structure(a), jax.tree.structure(b)
    if ours != theirs:
        return [f"structure: {ours}\n       and {theirs}"]
    leaves = zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True)
    return [f"{jax.tree_util.keystr(path) or 'root'}: {text}" for (path, x), y in leaves if (text := _differ(x, y))]


def _differ(x: Any, y: Any) -> str:
    if type(x) is not type(y):
        return f"{type(x)} and {type(y)}"
    for trait in _traits(x):
        if (one := trait(x)) != (two := trait(y)):
            return f"{one} and {two}"
    return "" if bits(x) == bits(y) else f"{x!r} and {y!r}"


def _traits(x: Any) -> list[Any]:
    if isinstance(x, jax.Array):
        return [lambda v: v.dtype, lambda v: v.shape, lambda v: v.weak_type if not is_key(v) else None]
    if isinstance(x, (np.ndarray, np.generic)):
        return [lambda v: v.dtype, lambda v: v.shape]
    return []


def is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def bits(x: Any) -> Any:
    """What a leaf consists of, so that == compares every bit: NaNs with their payloads, zeros with their signs."""
    if is_key(x):
        return str(jax.random.key_impl(x)), np.asarray(jax.random.key_data(x)).tobytes()
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return np.asarray(x).tobytes()
    if type(x) is float:
        return struct.pack(">d", x)
    if type(x) is complex:
        return struct.pack(">dd", x.real, x.imag)
    return x


def zeros(tree: Any) -> Any:
    """A tree of the same structure, kinds and shardings, with other values: so that nothing can come back by chance."""

    def other(x: Any) -> Any:
        if is_key(x):
            data = np.zeros_like(np.asarray(jax.random.key_data(x)))
            key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
            return jax.device_put(key, x.sharding) if x.committed else key
        if isinstance(x, jax.Array):
            return jax.numpy.zeros_like(x)
        if isinstance(x, np.ndarray):
            return np.zeros(x.shape, x.dtype)
        return type(x)()

    return jax.tree.map(other, tree)


def abstract(tree: Any) -> Any:
    """The tree with a ShapeDtypeStruct for every jax array, sharding and weak type included."""

    def struct_of(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        weak = not is_key(x) and x.weak_type
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else None, weak_type=weak)

    return jax.tree.map(struct_of, tree)
