"""Placing: chunks put together into the pieces that devices hold, and those into an array that owns its memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from . import _chunks
from ._chunks import Box, Shape
from ._leaves import Target
from ._manifest import Leaf

try:  # One call an array, with weak type and commitment, and a true copy. The public way takes five times as long.
    from jax._src.core import ShapedArray, update_aval_with_sharding
    from jax._src.lib import xla_client

    _put = xla_client.batched_device_put
except (ImportError, AttributeError):  # pragma: no cover  A later jax; tests run this way too.
    _put = None


@dataclass
class Plan:
    """How one leaf is put together: the boxes this process needs, and the chunks that cover them."""

    leaf: Leaf
    want: Target
    boxes: list[Box] = field(init=False)
    coords: list[Shape] = field(init=False)
    pieces: dict[Box, np.ndarray] = field(init=False, default_factory=dict)
    left: int = field(init=False)

    def __post_init__(self) -> None:
        shape, chunk = self.leaf.shape, self.leaf.chunk
        if self.want.kind in ("jax", "key") and self.want.sharding is not None:
            indices = self.want.sharding.addressable_devices_indices_map(shape).values()
            self.boxes = list(dict.fromkeys(_chunks.box(index or (), shape) for index in indices))
        else:
            self.boxes = [_chunks.whole(shape)]
        if len(self.boxes) == 1:
            self.coords = list(_chunks.covering(self.boxes[0], chunk))
        else:
            self.coords = sorted({coords for box in self.boxes for coords in _chunks.covering(box, chunk)})
        self.left = len(self.coords)

    def add(self, coords: Shape, data: memoryview) -> bool:
        """Takes one chunk's bytes; says whether that was the last."""
        dtype = np.dtype(self.leaf.dtype)
        values = np.frombuffer(data, dtype.newbyteorder("<")).reshape(self.leaf.chunk)
        cell = _chunks.cell(coords, self.leaf.chunk, self.leaf.shape)
        for box in self.boxes:
            if box == cell and self.want.kind in ("jax", "key"):  # Just one piece: no copy but the one to the device.
                self.pieces[box] = values[tuple(map(slice, _chunks.extent(cell)))]
            elif (shared := _chunks.overlap(box, cell)) is not None:
                if box not in self.pieces:
                    self.pieces[box] = np.empty(_chunks.extent(box), dtype)
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
        return _on_devices(pieces, want, str(jax.dtypes.canonicalize_dtype(want.dtype)), want.shape)
    (piece,) = pieces.values()
    if want.kind == "scalar":
        return piece[()].item()
    piece = piece.astype(want.dtype, copy=False)
    return piece[()] if want.kind == "generic" else piece


def _trailing(pieces: dict[Box, np.ndarray]) -> int:
    return next(iter(pieces))[-1][1]


def _on_devices(pieces: dict[Box, np.ndarray], want: Target, dtype: str, shape: Shape) -> jax.Array:
    """A jax array of its own memory, committed or not, with the weak type that is asked for."""
    sharding = want.sharding or jax.sharding.SingleDeviceSharding(_default_device())
    cast = {box: piece.astype(dtype, copy=False) for box, piece in pieces.items()}
    if len(cast) == 1:
        devices = [*sharding.addressable_devices_indices_map(shape)] if want.sharding else [_default_device()]
        values: Sequence[np.ndarray] = list(cast.values()) * len(devices)
    else:
        indices = sharding.addressable_devices_indices_map(shape)
        devices = list(indices)
        values = [cast[_chunks.box(index or (), shape)] for index in indices.values()]
    if _put is not None:
        aval = update_aval_with_sharding(ShapedArray(shape, np.dtype(dtype), weak_type=want.weak), sharding)
        # force_copy: the public device_put(may_alias=False) still aliases aligned NumPy memory on CPU (jax 0.10.2).
        return _put(aval, sharding, values, devices, want.committed, True)
    return _public(values, devices, sharding, want, shape)


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
