"""Leaves: what each becomes on disk, and what comes back for it."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import ml_dtypes  # noqa: F401  Registers bfloat16, float8 and the like with NumPy.
import msgspec
import numpy as np

from . import _manifest, _values
from ._manifest import Leaf
from .errors import Fault, Unsupported

_SCALARS = (int, float, bool, str, bytes, complex)
_NUMPY_TEXT = {"str_": np.str_, "bytes_": np.bytes_}
_KINDS = "biufcV"  # NumPy's kinds of numbers; V are ml_dtypes' ones, and structured ones, which _dtype_name refuses.
# Of another size on each platform; and JAX's "no gradient".
_UNPORTABLE = (np.longdouble, np.clongdouble, jax.dtypes.float0.type)
_ADDRESS = re.compile(r"\bat (0x[0-9a-f]{6,16})\b")  # As in "<function f at 0x7f3a5c0d2e80>".


class Encoded(msgspec.Struct, gc=False):
    """A leaf ready to be saved: its record, and the array it lies in, if it lies in one."""

    leaf: Leaf
    array: jax.Array | np.ndarray | None = None


# --- registered types -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Registered:
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_REGISTERED: dict[type, _Registered] = {}


def register_leaf(type: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Teaches ckpt_jax to save leaves of one more type.

    Args:
        type: the exact class; subclasses have to be registered themselves.
        encode: turns such an object into a leaf that can be saved: an array, a key, or a Python int, float, bool,
            complex, str or bytes.
        decode: turns that leaf back into an object.

    Raises:
        TypeError: `type` is no class, or JAX already knows how to take it apart.

    >>> import pathlib, ckpt_jax as ck
    >>> ck.register_leaf(pathlib.PurePosixPath, encode=str, decode=pathlib.PurePosixPath)
    >>> _ = ck.save("memory://docs/register_leaf", {"corpus": pathlib.PurePosixPath("/data/books")})
    >>> ck.restore("memory://docs/register_leaf")
    {'corpus': PurePosixPath('/data/books')}
    """
    if not isinstance(type, _TYPE):
        raise TypeError(f"register_leaf takes a class, not {type!r}")
    if type in (*_SCALARS, np.ndarray, dict, list, tuple):
        raise TypeError(f"ckpt_jax already saves {type.__name__}")
    _REGISTERED[type] = _Registered(encode, decode)


_TYPE = type


def type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


# --- to disk ----------------------------------------------------------------------------------------------------------


def encode_all(leaves: dict[str, Any]) -> dict[str, Encoded]:
    """Every leaf ready to be saved.

    Raises:
        Unsupported: names every leaf that cannot be, its type, and what to do.
    """
    encoded: dict[str, Encoded] = {}
    faults: list[Fault] = []
    for name, value in leaves.items():
        try:
            encoded[name] = encode(value)
        except _Refused as refused:
            faults.append(Fault(name, "a leaf that can be saved", str(refused)))
    if faults:
        raise Unsupported(
            "nothing was saved: some leaves cannot be",
            faults,
            hint="ckpt_jax.register_leaf(type, encode, decode) teaches a type; or keep such leaves out of the tree",
        )
    return encoded


class _Refused(Exception):
    """Why one leaf cannot be saved."""


def encode(value: Any) -> Encoded:
    """One leaf ready to be saved; a record without chunks and digests yet."""
    if isinstance(value, jax.core.Tracer):
        raise _Refused(f"a traced value ({type_name(value)}): call save outside of jit, grad and vmap")
    if isinstance(value, jax.Array):
        return _encode_jax(value)
    kind = type(value)
    if kind in _SCALARS:
        return Encoded(Leaf("scalar", dtype=kind.__name__, value=_values.pack(value)))
    if isinstance(value, (np.str_, np.bytes_)):
        return Encoded(Leaf("scalar", dtype=kind.__name__, value=_values.pack(value.item())))
    if isinstance(value, np.generic):
        return Encoded(Leaf("array", dtype=_dtype_name(value.dtype), host="scalar"), np.asarray(value))
    if kind in (np.ndarray, np.memmap):
        return Encoded(Leaf("array", dtype=_dtype_name(value.dtype), shape=value.shape, host="numpy"), value)
    if kind in _REGISTERED:
        plain = _REGISTERED[kind].encode(value)
        if type(plain) in _REGISTERED:
            raise _Refused(f"a {type_name(value)}, whose `encode` gives a {type_name(plain)}, which is registered too")
        try:
            inner = encode(plain)
        except _Refused as refused:
            raise _Refused(f"a {type_name(value)}, whose `encode` gives {refused}") from refused
        inner.leaf.type = type_name(value)
        return inner
    if is_live(value):
        return Encoded(_encode_live(value))
    raise _Refused(_why_not(value))


def _why_not(value: Any) -> str:
    if isinstance(value, jax.ShapeDtypeStruct):
        return "a ShapeDtypeStruct, which has no values"
    if type(value).__module__.partition(".")[0] == "grain" and hasattr(value, "__iter__"):
        return f"a {type_name(value)}, which has no position; its iterator has: iter(…) gives it"
    if isinstance(value, np.ndarray):
        return f"a {type_name(value)}, of which a plain array would keep only a part"
    if isinstance(value, _SCALARS):
        return f"a {type_name(value)}, which is more than the {type(value).__mro__[1].__name__} it derives from"
    return f"a {type_name(value)}"


def _dtype_name(dtype: np.dtype) -> str:
    if dtype.kind not in _KINDS or dtype.names or dtype.subdtype or dtype.type in _UNPORTABLE:
        raise _Refused(f"an array of dtype {dtype}")
    try:
        native = dtype if dtype.isnative else dtype.newbyteorder("=")
        if dtype.name in _manifest.ITEMSIZE and np.dtype(dtype.name) == native:
            return dtype.name  # Only then does the name bring it back.
    except TypeError:
        pass
    raise _Refused(f"an array of dtype {dtype}")


def _encode_jax(value: jax.Array) -> Encoded:
    if value.is_deleted():
        raise _Refused("an array that was deleted or donated: its values are gone")
    weak = bool(getattr(value, "weak_type", False))
    if not is_key_dtype(value.dtype):
        return Encoded(Leaf("array", dtype=name_of(value.dtype), shape=value.shape, weak=weak), value)
    impl = jax.random.key_impl(value)
    data = jax.random.key_data(value)
    if not isinstance(impl, str) or data.ndim != value.ndim + 1:
        raise _Refused(f"a PRNG key of an implementation that JAX does not name: {impl!r:.60}")
    return Encoded(Leaf("key", dtype=data.dtype.name, shape=data.shape, impl=impl), data)


def is_key_dtype(dtype: Any) -> bool:
    return not isinstance(dtype, np.dtype) and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def x64() -> bool:
    """Whether JAX holds 64-bit values now."""
    return bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def name_of(dtype: np.dtype) -> str:
    """`dtype.name`, which NumPy works out anew each time."""
    return dtype.name


# --- live leaves ------------------------------------------------------------------------------------------------------


def is_live(value: Any) -> bool:
    """Whether it is an object whose state is read and set: a grain iterator, a NumPy generator."""
    return isinstance(value, np.random.Generator) or (
        callable(getattr(value, "get_state", None)) and callable(getattr(value, "set_state", None))
    )


def get_state(value: Any) -> Any:
    return value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state()


def set_state(value: Any, state: Any) -> None:
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    else:
        value.set_state(state)


def _encode_live(value: Any) -> Leaf:
    try:
        found = get_state(value)
    except Exception as error:
        raise _Refused(f"a {type_name(value)} that cannot say its state: {type(error).__name__}: {error}") from error
    try:
        state = _values.pack(found)
    except (TypeError, ValueError) as error:
        raise _Refused(f"a {type_name(value)} whose state is not plain data: {error}") from error
    except RecursionError as error:
        raise _Refused(f"a {type_name(value)} whose state holds itself") from error
    if _values.too_deep(state):
        raise _Refused(f"a {type_name(value)} whose state is nested too deep")
    if address := _ADDRESS.search(str(state)):
        raise _Refused(
            f"a {type_name(value)} whose state holds an object's address ({address[1]}), which differs by process"
        )
    scope = "global" if getattr(value, "global_state", False) else "processes"
    return Leaf("live", type=type_name(value), value={scope: state if scope == "global" else [state]})


def live_state(leaf: Leaf, process: int, processes: int) -> Any:
    """The state that a live leaf had in this process.

    Raises:
        ValueError: it was saved by another number of processes, and each had its own.
    """
    states = _manifest.states(leaf)
    if states is None:
        return _values.unpack(leaf.value["global"])
    if len(states) != processes:
        raise ValueError(f"one state for each of {len(states)} processes, and there are {processes} now")
    return states[process]


# --- from disk --------------------------------------------------------------------------------------------------------


class Target(msgspec.Struct, frozen=True, gc=False):
    """What a leaf should come back as.

    Attributes:
        kind: `jax`, `key`, `numpy`, `generic` (a NumPy scalar), `scalar` or `live`.
        dtype: the dtype's name, or the Python type's.
        shape: the shape; a key's does not include the axis of its data.
        sharding: where a `jax` or `key` leaf goes; None is JAX's default device, uncommitted.
        committed, weak: as the leaf that stands in the target.
        like: that leaf itself.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...] = ()
    sharding: jax.sharding.Sharding | None = None
    committed: bool = True
    weak: bool = False
    like: Any = None

    def __str__(self) -> str:
        if self.kind in ("scalar", "live"):
            return self.dtype
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def target(value: Any) -> Target:
    """What the leaf of a `like` tree asks for.

    Raises:
        _Refused: nothing can come back as such a thing.
    """
    kind = type(value)
    if kind in _REGISTERED:
        return msgspec.structs.replace(target(_REGISTERED[kind].encode(value)), like=value)
    if isinstance(value, jax.core.Tracer):
        raise _Refused("a traced value: call restore outside of jit, or give it ShapeDtypeStructs")
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        sharding = value.sharding
        committed = value.committed if isinstance(value, jax.Array) else sharding is not None
        if is_key_dtype(value.dtype):
            return Target("key", f"key<{_impl(value.dtype)}>", value.shape, sharding, committed, like=value)
        weak = bool(getattr(value, "weak_type", False))
        return Target("jax", name_of(value.dtype), value.shape, sharding, committed, weak, value)
    if kind in _SCALARS or isinstance(value, (np.str_, np.bytes_)):
        return Target("scalar", kind.__name__, like=value)
    if isinstance(value, np.generic):
        return Target("generic", _dtype_name(value.dtype), like=value)
    if isinstance(value, np.ndarray):
        return Target("numpy", _dtype_name(value.dtype), value.shape, like=value)
    if is_live(value):
        return Target("live", type_name(value), like=value)
    raise _Refused(_why_not(value))


def _impl(dtype: Any) -> str:
    """The name of a key dtype's implementation; JAX has no public way to it without a key."""
    return dtype._impl.name


def targets(leaves: dict[str, Any]) -> tuple[dict[str, Target], list[Fault]]:
    found: dict[str, Target] = {}
    faults: list[Fault] = []
    for name, value in leaves.items():
        try:
            found[name] = target(value)
        except _Refused as refused:
            faults.append(Fault(name, "a leaf that can be restored", str(refused)))
    return found, faults


def default_target(leaf: Leaf, sharding: jax.sharding.Sharding | None) -> Target:
    """What a leaf comes back as when nothing was asked for: NumPy arrays, typed keys, Python values."""
    if leaf.kind == "key":
        return Target("key", f"key<{leaf.impl}>", leaf.shape[:-1], sharding, committed=sharding is not None)
    if leaf.kind != "array":
        return Target(leaf.kind, leaf.dtype or leaf.type)
    if sharding is not None:
        return Target("jax", leaf.dtype, leaf.shape, sharding, weak=leaf.weak)
    return Target("generic" if leaf.host == "scalar" else "numpy", leaf.dtype, leaf.shape)


def scalar(leaf: Leaf) -> Any:
    """A scalar leaf's Python value."""
    value = _manifest.scalar(leaf)
    return _NUMPY_TEXT[leaf.dtype](value) if leaf.dtype in _NUMPY_TEXT else value


@functools.cache
def impl_width(impl: str) -> int | None:
    """The length of the last axis of a PRNG implementation's key data; None if JAX knows none of that name."""
    try:
        return jax.random.key_data(jax.random.key(0, impl=impl)).shape[-1]
    except (ValueError, TypeError):
        return None


def is_registered(value: Any) -> bool:
    return type(value) in _REGISTERED


def decode_registered(value: Any, leaf: Leaf, want: Target) -> Any:
    """The object of a registered type that `value` was encoded from, if one is wanted."""
    if want.like is not None:
        registered = _REGISTERED.get(type(want.like))
        return registered.decode(value) if registered else value
    by_name = {f"{t.__module__}.{t.__qualname__}".removeprefix("builtins."): r for t, r in _REGISTERED.items()}
    return by_name[leaf.type].decode(value) if leaf.type in by_name else value
