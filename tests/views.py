"""Views made by hand of Python trees, and views compared in every bit."""

import contextlib
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  Registers bfloat16, float8 and the like with NumPy.
import msgspec
import numpy as np

from ckpt_jax import _chunks, _manifest, _structure, _values, _view
from ckpt_jax._chunks import Box, Shape
from ckpt_jax._manifest import Leaf
from ckpt_jax._structure import LEAF, Node
from ckpt_jax._view import View


def boxes(leaf: Leaf) -> Iterator[Box]:
    """The boxes of a leaf's chunks, in grid order."""
    for coords in _chunks.covering(_chunks.whole(leaf.shape), leaf.chunk):
        yield _chunks.cell(coords, leaf.chunk, leaf.shape)


@contextlib.contextmanager
def memory(most: int) -> Iterator[None]:
    """Something that never holds more than so many bytes of Python's memory."""
    tracemalloc.start()
    try:
        yield
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < most


class Key(NamedTuple):
    """A PRNG key."""

    data: np.ndarray
    impl: str = "threefry2x32"


class Live(NamedTuple):
    """An object with a state."""

    state: dict[str, Any]


class Weak(NamedTuple):
    """An array whose dtype JAX regarded as weak."""

    data: np.ndarray


def view_of(tree: Any, *, chunk: Callable[[np.ndarray], Shape] | None = None, **more: Any) -> View:
    """A view of dicts, lists, tuples, named tuples and None of arrays, keys, live states and Python scalars."""
    arrays: dict[str, np.ndarray] = {}
    leaves: dict[str, Leaf] = {}

    def walk(value: Any, name: str) -> Node | str:
        if (leaf := _leaf(value, chunk)) is not None:
            leaves[name or _structure.ROOT] = leaf
            if leaf.stored:
                arrays[name or _structure.ROOT] = value if isinstance(value, np.ndarray) else value.data
            return LEAF
        if value is None:
            return Node("none")
        if isinstance(value, dict):
            keys, kind, children, of = list(value), "dict", list(value.values()), ""
        elif hasattr(value, "_fields"):
            keys, kind, children, of = list(value._fields), "named", list(value), "somewhere.Of"
        else:
            keys, kind, children, of = [], type(value).__name__, list(value), ""
        entries = keys or range(len(children))
        nodes = [walk(child, _structure.join(name, key)) for key, child in zip(entries, children, strict=True)]
        return Node(kind, nodes, list(map(_values.pack, keys)), of)

    structure = walk(tree, "")

    def read(name: str, box: Box) -> np.ndarray:
        return arrays[name][(*_chunks.slices(box), ...)]

    return View("by hand", "nowhere", structure, leaves, read, **more)


def _leaf(value: Any, chunk: Callable[[np.ndarray], Shape] | None) -> Leaf | None:
    if isinstance(value, Key):
        return msgspec.structs.replace(_view.array("uint32", value.data.shape), kind="key", impl=value.impl)
    if isinstance(value, Live):
        return Leaf("live", type="somewhere.Iterator", value={"processes": [_values.pack(value.state)]})
    if isinstance(value, Weak):
        return _view.array(value.data.dtype.name, value.data.shape, weak=True)
    if isinstance(value, np.ndarray):
        cut = chunk(value) if chunk is not None else None
        return _view.array(value.dtype.name, value.shape, cut, host="numpy")
    if type(value) in (int, float, bool, str, bytes, complex):
        return Leaf("scalar", dtype=type(value).__name__, value=_values.pack(value))
    return None


def values(view: View) -> dict[str, np.ndarray]:
    """All arrays of a view, read chunk by chunk in several threads at once."""
    found = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in view.leaves.items() if leaf.stored}

    def fill(name: str, box: Box) -> None:
        values = view.read(name, box)
        assert (values.dtype, values.shape) == (found[name].dtype, _chunks.extent(box))
        found[name][(*_chunks.slices(box), ...)] = values

    with ThreadPoolExecutor(4) as pool:
        pending = [pool.submit(fill, name, box) for name in found for box in boxes(view.leaves[name])]
        for each in pending:
            each.result()
    return found


def same_arrays(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    """True where arrays are the same in every bit; else an AssertionError that says which are not."""
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name
    return True


def same_views(found: View, wanted: View) -> bool:
    """True where two views tell the same, but for where it lies and how it is cut; else an AssertionError."""
    assert found.tree == wanted.tree
    bare = {"chunk": (), "digests": "", "sharding": None}
    ours, theirs = ({n: msgspec.structs.replace(x, **bare) for n, x in v.leaves.items()} for v in (found, wanted))
    assert list(ours.items()) == list(theirs.items())
    for each in ("step", "metadata", "metrics"):
        assert _values.pack(getattr(found, each)) == _values.pack(getattr(wanted, each)), each
    assert list(_structure.names(found.tree)) == list(found.leaves)
    assert list(_manifest._faults(_whole(found))) == []
    return same_arrays(values(found), values(wanted))


def _whole(view: View) -> _manifest.Manifest:
    """A view's manifest as an importer would write it."""
    manifest = view.manifest()
    manifest.format, manifest.version = _manifest.FORMAT, (_manifest.MAJOR, _manifest.MINOR)
    manifest.files = {"all": _manifest.File(1 << 62)}
    for name, leaf in manifest.leaves.items():
        manifest.leaves[name] = msgspec.structs.replace(leaf, digests="0" * (_manifest.DIGEST * leaf.chunks))
    return manifest


def sample(dtype: str, shape: Shape, seed: int = 0) -> np.ndarray:
    """An array of any dtype, of bits that mean something to it."""
    random = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "b" or dtype in SUBBYTE:  # Not every byte is a value.
        return random.integers(0, 2, shape).astype(dtype)
    return np.frombuffer(random.bytes(np.dtype(dtype).itemsize * int(np.prod(shape))) or b"\0" * 16, dtype)[
        : int(np.prod(shape))
    ].reshape(shape)


SUBBYTE = {"int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"}
