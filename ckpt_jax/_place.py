"""Placing: chunks put together into the pieces that devices hold, and those into an array that owns its memory."""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from . import _arrays, _chunks, _leaves
from ._chunks import Box, Shape
from ._leaves import Target
from ._manifest import Leaf

try:  # One call an array, with weak type and commitment, and a true copy. The public way takes five times as long.
    from jax._src.core import ShapedArray, mem_kind_to_space, update_aval_with_sharding
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    # The memory is only read during the call, so it is copied. With `device_put(may_alias=False)`, which is public,
    # an array still shares aligned NumPy memory on CPU (jax 0.10.2), and what shares it cannot be donated.
    _COPY: Any = xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
    _put: Any = xla_client.batched_device_put  # pyright: ignore[reportPrivateImportUsage]
except (ImportError, AttributeError):  # A later jax; a test goes this way too.
    ShapedArray: Any = None
    mem_kind_to_space: Any = None
    update_aval_with_sharding: Any = None
    _COPY = _put = None


@functools.lru_cache(4096)
def _needs(shape: Shape, chunk: Shape, sharding: Any) -> tuple[list[Box], list[Shape]]:
    """The boxes of an array that this process needs, and the chunks that cover them, each once."""
    if sharding is None:
        boxes = [_chunks.whole(shape)]
    else:
        boxes = list({_chunks.box(i or (), shape): 0 for i in sharding.addressable_devices_indices_map(shape).values()})
    if len(boxes) == 1:
        return boxes, list(_chunks.covering(boxes[0], chunk))
    return boxes, sorted({coords for box in boxes for coords in _chunks.covering(box, chunk)})


Piece = Any  # np.ndarray, or a list of the jax arrays that the devices have of it already.


class Plan:
    """How one leaf is put together: the boxes that this process needs, and the chunks that cover them."""

    __slots__ = ("boxes", "buffers", "coords", "device", "leaf", "left", "pieces", "rented", "want")

    def __init__(self, leaf: Leaf, want: Target, buffers: _arrays.Buffers):
        self.leaf, self.want, self.buffers = leaf, want, buffers
        self.rented: list[np.ndarray] = []
        self.device = want.kind in ("jax", "key")
        self.boxes, self.coords = _needs(leaf.shape, leaf.chunk, want.sharding if self.device else None)
        self.pieces: dict[Box, Piece] = {}
        self.left = len(self.coords)

    def add(self, coords: Shape, data: memoryview) -> Any:
        """Takes one chunk's bytes, which may change afterwards; with the last one the leaf is there, else None."""
        values = np.frombuffer(data, _arrays.little(self.leaf.dtype)).reshape(self.leaf.chunk)
        if self.device and len(self.coords) == 1 == len(self.boxes) and self.leaf.chunk == self.leaf.shape:
            return place({self.boxes[0]: values}, self.want, self.leaf.shape)  # As most leaves of large trees are.
        cell = _chunks.cell(coords, self.leaf.chunk, self.leaf.shape)
        self.left -= 1
        for box in self.boxes:
            if box == cell and self.device:  # Just one piece: no copy but the one to the device.
                piece = values[tuple(map(slice, _chunks.extent(cell)))]
                self.pieces[box] = _shards(piece, box, _home(self.want, self.leaf.shape)) if self.left else piece
            elif (shared := _chunks.overlap(box, cell)) is not None:
                if box not in self.pieces:
                    self.pieces[box] = self._empty(box)
                self.pieces[box][_chunks.slices(shared, box)] = values[_chunks.slices(shared, cell)]
        return None if self.left else self.finish()

    def finish(self) -> Any:
        """The leaf, once all its chunks are there."""
        for box in self.boxes:
            if box not in self.pieces:  # Nothing covers a box without elements.
                self.pieces[box] = self._empty(box)
        value = place(self.pieces, self.want, self.leaf.shape)
        self.buffers.free += self.rented
        self.pieces, self.rented = {}, []
        return value

    def _empty(self, box: Box) -> np.ndarray:
        """Memory for a piece; what goes on to a device is copied there, so its memory serves again."""
        shape, dtype = _chunks.extent(box), np.dtype(self.leaf.dtype)
        if not self.device:
            return np.empty(shape, dtype)
        size = math.prod(shape) * dtype.itemsize
        self.rented.append(self.buffers.take(size))
        return self.rented[-1][:size].view(dtype).reshape(shape)


def place(pieces: dict[Box, Piece], want: Target, shape: Shape) -> Any:
    """A leaf of the kind that is wanted, from its pieces; `shape` is that of a key's data, or the leaf's own."""
    if want.kind in ("jax", "key"):
        array = _on_devices(pieces, want, _home(want, shape))
        if want.kind == "jax":
            return array
        return jax.random.wrap_key_data(array, impl=want.dtype.removeprefix("key<").removesuffix(">"))
    (piece,) = pieces.values()
    if want.kind == "scalar":
        return piece[()].item()
    piece = _typed(piece, want.dtype)
    return piece[()] if want.kind == "generic" else piece


def converted(values: np.ndarray, dtype: str) -> np.ndarray:
    """The values in another dtype, which somebody asked for: what does not fit in it is not worth a warning."""
    with np.errstate(all="ignore"):
        return values.astype(dtype)


@functools.cache
def _canonical(dtype: str, x64: bool) -> str:
    return str(jax.dtypes.canonicalize_dtype(dtype))


class _Home(NamedTuple):
    """Where an array goes: its sharding, its devices here, the box of each, and JAX's abstract value for it."""

    sharding: Any
    devices: list[Any]
    boxes: list[Box]
    shape: Shape
    dtype: str
    aval: Any


def _home(want: Target, shape: Shape) -> _Home:
    dtype = "uint32" if want.kind == "key" else _canonical(want.dtype, _leaves.x64())
    return _destination(want.sharding or _default_device(), shape, dtype, weak=want.weak)


@functools.lru_cache(4096)
def _destination(where: Any, shape: Shape, dtype: str, *, weak: bool) -> _Home:
    sharding = where if isinstance(where, jax.sharding.Sharding) else jax.sharding.SingleDeviceSharding(where)
    indices = sharding.addressable_devices_indices_map(shape)
    boxes = [_chunks.box(index or (), shape) for index in indices.values()]
    aval = None
    if ShapedArray is not None:
        space = mem_kind_to_space(sharding.memory_kind)
        aval = ShapedArray(shape, np.dtype(dtype), weak_type=weak, memory_space=space)
        aval = update_aval_with_sharding(aval, sharding)
    return _Home(sharding, list(indices), boxes, shape, dtype, aval)


def _on_devices(pieces: dict[Box, Piece], want: Target, home: _Home) -> jax.Array:
    """A jax array of its own memory, committed or not, with the weak type that is asked for."""
    if _put is None and not want.committed:
        return jax.numpy.array(_typed(pieces[home.boxes[0]], home.dtype).copy())
    # One call for all, but where some devices share a piece: then jaxlib 0.10.2 raises `bad_function_call`.
    at_once = len(pieces) == len(home.boxes) or home.sharding.is_fully_replicated
    if _put is not None and at_once and all(isinstance(piece, np.ndarray) for piece in pieces.values()):
        values = [_typed(pieces[box], home.dtype) for box in home.boxes]
        return _put(home.aval, home.sharding, values, home.devices, want.committed, False, _COPY)
    shards = {box: iter(p if isinstance(p, list) else _shards(p, box, home)) for box, p in pieces.items()}
    placed = [next(shards[box]) for box in home.boxes]
    if _put is not None:
        return _put(home.aval, home.sharding, placed, home.devices, want.committed)
    return jax.make_array_from_single_device_arrays(home.shape, home.sharding, placed)


def _shards(piece: np.ndarray, box: Box, home: _Home) -> list[jax.Array]:
    """A piece on every device that holds it, each with memory of its own."""
    piece = _typed(piece, home.dtype)
    placed = []
    for device, held in zip(home.devices, home.boxes, strict=True):
        if held != box:
            continue
        where = jax.sharding.SingleDeviceSharding(device, memory_kind=home.sharding.memory_kind)
        if _put is None:
            # A copy on the device: device_put alone may share NumPy's memory, and then nothing can be donated.
            placed.append(jax.numpy.copy(jax.device_put(piece.copy(), where)))
        else:
            one = _destination(where, piece.shape, home.dtype, weak=False)
            placed.append(_put(one.aval, where, [piece], one.devices, True, False, _COPY))
    return placed


def _typed(piece: np.ndarray, dtype: str) -> np.ndarray:
    return piece if piece.dtype == _arrays.little(dtype) else converted(piece, dtype)


def _default_device() -> Any:
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device
