"""Placing: chunks put together into the pieces that devices hold, and those into an array that owns its memory."""

import functools
from collections.abc import Sequence
from typing import Any

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


class Plan:
    """How one leaf is put together: the boxes that this process needs, and the chunks that cover them."""

    __slots__ = ("boxes", "coords", "device", "leaf", "left", "pieces", "want")

    def __init__(self, leaf: Leaf, want: Target):
        self.leaf, self.want = leaf, want
        self.device = want.kind in ("jax", "key")
        self.boxes, self.coords = _needs(leaf.shape, leaf.chunk, want.sharding if self.device else None)
        self.pieces: dict[Box, np.ndarray] = {}
        self.left = len(self.coords)

    def add(self, coords: Shape, data: memoryview) -> bool:
        """Takes one chunk's bytes; says whether that was the last."""
        values = np.frombuffer(data, _arrays.little(self.leaf.dtype)).reshape(self.leaf.chunk)
        cell = _chunks.cell(coords, self.leaf.chunk, self.leaf.shape)
        for box in self.boxes:
            if box == cell and self.device:  # Just one piece: no copy but the one to the device.
                self.pieces[box] = values[tuple(map(slice, _chunks.extent(cell)))]
            elif (shared := _chunks.overlap(box, cell)) is not None:
                if box not in self.pieces:
                    self.pieces[box] = np.empty(_chunks.extent(box), self.leaf.dtype)
                self.pieces[box][_chunks.slices(shared, box)] = values[_chunks.slices(shared, cell)]
        self.left -= 1
        return self.left == 0

    def finish(self) -> Any:
        """The leaf, once all its chunks are there."""
        for box in self.boxes:
            if box not in self.pieces:  # Nothing covers a box without elements.
                self.pieces[box] = np.empty(_chunks.extent(box), self.leaf.dtype)
        value = place(self.pieces, self.want)
        self.pieces = {}
        return value


def place(pieces: dict[Box, np.ndarray], want: Target) -> Any:
    """An array of the kind that is wanted, from its pieces."""
    if want.kind == "key":
        data = _on_devices(pieces, want, "uint32", (*want.shape, _trailing(pieces)))
        return jax.random.wrap_key_data(data, impl=want.dtype.removeprefix("key<").removesuffix(">"))
    if want.kind == "jax":
        return _on_devices(pieces, want, _canonical(want.dtype, _leaves.x64()), want.shape)
    (piece,) = pieces.values()
    if want.kind == "scalar":
        return piece[()].item()
    piece = piece if piece.dtype == _arrays.little(want.dtype) else converted(piece, want.dtype)
    return piece[()] if want.kind == "generic" else piece


def converted(values: np.ndarray, dtype: str) -> np.ndarray:
    """The values in another dtype, which somebody asked for: what does not fit in it is not worth a warning."""
    with np.errstate(all="ignore"):
        return values.astype(dtype)


@functools.cache
def _canonical(dtype: str, x64: bool) -> str:
    return str(jax.dtypes.canonicalize_dtype(dtype))


def _trailing(pieces: dict[Box, np.ndarray]) -> int:
    return next(iter(pieces))[-1][1]


def _on_devices(pieces: dict[Box, np.ndarray], want: Target, dtype: str, shape: Shape) -> jax.Array:
    """A jax array of its own memory, committed or not, with the weak type that is asked for."""
    sharding, devices, boxes, aval = _destination(want.sharding or _default_device(), shape, dtype, weak=want.weak)
    if next(iter(pieces.values())).dtype != _arrays.little(dtype):
        pieces = {box: converted(piece, dtype) for box, piece in pieces.items()}
    if _put is None:
        return _public([pieces[box] for box in boxes], devices, sharding, want, shape)
    if len(pieces) < len(boxes) and not sharding.is_fully_replicated:
        # One call for each device: handed the same memory for some of them, jaxlib 0.10.2 raises `bad_function_call`.
        homes = [
            _destination(device, _chunks.extent(box), dtype, weak=False)
            for device, box in zip(devices, boxes, strict=True)
        ]
        values = [
            _put(h[3], h[0], [pieces[box]], h[1], True, False, _COPY) for h, box in zip(homes, boxes, strict=True)
        ]
        return _put(aval, sharding, values, devices, want.committed)
    return _put(aval, sharding, [pieces[box] for box in boxes], devices, want.committed, False, _COPY)


@functools.lru_cache(4096)
def _destination(where: Any, shape: Shape, dtype: str, *, weak: bool) -> tuple[Any, list[Any], list[Box], Any]:
    """A sharding, its devices, the box of each, and JAX's abstract value for the array."""
    sharding = where if isinstance(where, jax.sharding.Sharding) else jax.sharding.SingleDeviceSharding(where)
    indices = sharding.addressable_devices_indices_map(shape)
    boxes = [_chunks.box(index or (), shape) for index in indices.values()]
    aval = None
    if ShapedArray is not None:
        space = mem_kind_to_space(sharding.memory_kind)
        aval = ShapedArray(shape, np.dtype(dtype), weak_type=weak, memory_space=space)
        aval = update_aval_with_sharding(aval, sharding)
    return sharding, list(indices), boxes, aval


def _public(
    values: Sequence[np.ndarray], devices: Sequence[Any], sharding: Any, want: Target, shape: Shape
) -> jax.Array:
    if not want.committed:
        return jax.numpy.array(values[0])
    kind = sharding.memory_kind
    homes = [jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for device in devices]
    # A copy on the device: device_put alone may share NumPy's memory, and then nothing can be donated.
    placed = [jax.numpy.copy(jax.device_put(v, h)) for v, h in zip(values, homes, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def _default_device() -> Any:
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device
