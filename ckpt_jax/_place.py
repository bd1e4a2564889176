"""Placing: chunks put together into the pieces that devices hold, and those into an array that owns its memory."""

import contextlib
import functools
import math
import threading
from typing import Any, NamedTuple

import jax
import numpy as np

from . import _chunks, _leaves, _reading, _units, _values, _zarr
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
def _needs(shape: Shape, chunk: Shape, sharding: Any) -> tuple[list[Box], dict[Shape, list[Box]], bool]:
    """The boxes of an array that this process needs; the chunks that cover them, box by box, each once; whether it is
    one chunk for one box, which is the whole.
    """
    if sharding is None:
        boxes = [_chunks.whole(shape)]
    else:
        boxes = list({_chunks.box(i or (), shape): 0 for i in sharding.addressable_devices_indices_map(shape).values()})
    covering: dict[Shape, list[Box]] = {}
    for box in boxes:
        for coords in _chunks.covering(box, chunk):
            covering.setdefault(coords, []).append(box)
    return boxes, covering, len(covering) == 1 and boxes == [_chunks.whole(shape)]


# Leaves of so few bytes go to their devices when all has been read, one right after the other: amid the work of reading
# each takes JAX three times as long, and 10,000 of them are a third of the time.
SMALL = 1024

_AS_IT_IS = contextlib.nullcontext()

Piece = Any  # np.ndarray, or a list of the jax arrays that the devices have of it already.


class Staging:
    """Host memory in which pieces for devices are put together of several chunks, of at most so many bytes."""

    def __init__(self, limit: int):
        # Found out here, in the caller's thread: what JAX is set up to may differ from thread to thread.
        self.x64 = _leaves.x64()
        self._limit, self._reserved = limit, 0
        self._buffers = _reading.Buffers(limit)
        self._lock = threading.Lock()

    def reserve(self, size: int, *, force: bool) -> bool:
        """Keeps room for so much, if there is so much left or it must be."""
        with self._lock:
            fits = force or self._reserved + size <= self._limit
            self._reserved += size if fits else 0
            return fits

    def take(self, size: int) -> np.ndarray:
        """uint8[size], of what was reserved."""
        return self._buffers.take(size)

    def give(self, buffer: np.ndarray, size: int) -> None:
        self._buffers.give([buffer])
        with self._lock:
            self._reserved -= size


class Plan:
    """How one leaf is put together: the boxes that this process needs, and the chunks that cover them."""

    __slots__ = (
        "boxes",
        "chunks",
        "home",
        "is_alone",
        "kept",
        "leaf",
        "left",
        "lock",
        "made",
        "open",
        "pieces",
        "rented",
        "staging",
        "want",
    )

    def __init__(self, leaf: Leaf, want: Target, staging: Staging):
        self.leaf, self.want, self.staging = leaf, want, staging
        self.home = _home(want, leaf.shape, staging.x64) if want.kind in ("jax", "key") else None
        needs = _needs(leaf.shape, leaf.chunk, want.sharding if self.home else None)
        self.boxes, self.chunks, self.is_alone = needs
        self.kept: bytes | None = None  # The only chunk of a small leaf, which `finish` makes it of.
        if self.is_alone:  # `_alone` makes the leaf, and needs no more.
            return
        self.pieces: dict[Box, Piece] = {}
        self.rented: dict[Box, np.ndarray] = {}
        self.left = len(self.chunks)
        self.open: dict[Box, int] = {}  # Chunks still to come, of the pieces for which there is memory.
        self.lock = threading.Lock()

    def reserve(self, coords: Shape, *, force: bool) -> bool:
        """Keeps memory for the pieces that a chunk is the first one of, if there is some left or it must be."""
        if self.home is None or self.is_alone:
            return True
        cell = self._cell(coords)
        new = [box for box in self.chunks[coords] if box != cell and box not in self.open]
        if new and not self.staging.reserve(sum(map(self._size, new)), force=force):
            return False
        for box in new:
            self.open[box] = sum(1 for _ in _chunks.covering(box, self.leaf.chunk))
        return True

    def _cell(self, coords: Shape) -> Box:
        return _chunks.cell(coords, self.leaf.chunk, self.leaf.shape)

    def _size(self, box: Box) -> int:
        return math.prod(_chunks.extent(box)) * np.dtype(self.leaf.dtype).itemsize

    def add(self, coords: Shape, data: memoryview) -> bool:
        """Takes one chunk's bytes; says whether the leaf can be finished. Chunks may come in several threads."""
        if self.is_alone:
            if len(data) <= SMALL:
                self.kept = bytes(data)
            else:
                self.made = self._alone(data)
            return True
        with self._as_called():
            return self._add(coords, data)

    def _as_called(self) -> contextlib.AbstractContextManager[Any]:
        """JAX narrows 64-bit values where it is not told otherwise, in every thread anew."""
        return _AS_IT_IS if _leaves.x64() == self.staging.x64 else jax.enable_x64(self.staging.x64)

    def _add(self, coords: Shape, data: memoryview) -> bool:
        values = np.frombuffer(data, _zarr.little(self.leaf.dtype)).reshape(self.leaf.chunk)
        cell = self._cell(coords)
        for box in self.chunks[coords]:
            if box == cell and self.home is not None:  # Just one piece: no copy but the one to the devices.
                self.pieces[box] = _shards(values[_up_to(cell)], box, self.home)
            elif (shared := _chunks.overlap(box, cell)) is not None:
                self._piece(box)[_chunks.slices(shared, box)] = values[_chunks.slices(shared, cell)]
                self._ship(box)
        with self.lock:
            self.left -= 1
            return self.left == 0

    def _ship(self, box: Box) -> None:
        """Sends a piece to its devices once its last chunk is there."""
        if self.home is None:
            return
        with self.lock:
            self.open[box] -= 1
            if self.open[box]:
                return
        self.pieces[box] = _shards(self.pieces[box], box, self.home)
        self.staging.give(self.rented.pop(box), self._size(box))

    def finish(self) -> Any:
        """The leaf, once all its chunks are there."""
        if self.is_alone:
            return self.made if self.kept is None else self._alone(self.kept)
        for box in self.boxes:
            self._piece(box)  # Nothing covers a box without elements.
        return _assembled(self.pieces, self.want, self.home)

    def _alone(self, data: bytes | memoryview) -> Any:
        """The leaf from its only chunk, which is all that this process needs of it: most leaves of most trees."""
        piece = np.frombuffer(data, _zarr.little(self.leaf.dtype)).reshape(self.leaf.chunk)
        if self.leaf.chunk != self.leaf.shape:  # It lies at the array's edge.
            piece = piece[_up_to(self._cell(next(iter(self.chunks))))]
        with self._as_called():
            return _assembled({self.boxes[0]: piece if self.home else piece.copy()}, self.want, self.home)

    def _piece(self, box: Box) -> Piece:
        """What there is of a box. What goes on to a device is copied there, so its memory serves again."""
        with self.lock:
            if box not in self.pieces:
                shape, dtype, size = _chunks.extent(box), np.dtype(self.leaf.dtype), self._size(box)
                if self.home is None:
                    self.pieces[box] = np.empty(shape, dtype)
                else:
                    self.rented[box] = self.staging.take(size)
                    self.pieces[box] = self.rented[box][:size].view(dtype).reshape(shape)
            return self.pieces[box]


def _up_to(cell: Box) -> tuple[Any, ...]:
    """The part of a chunk that lies in the array; never a scalar, which the index `()` would give."""
    return *map(slice, _chunks.extent(cell)), ...


def place(value: np.ndarray, want: Target) -> Any:
    """A leaf of the kind that is wanted, from its whole value."""
    home = _home(want, value.shape, _leaves.x64()) if want.kind == "jax" else None
    return _assembled({_chunks.whole(value.shape): value}, want, home)


def _assembled(pieces: dict[Box, Piece], want: Target, home: "_Home | None") -> Any:
    """A leaf of the kind that is wanted, from its pieces."""
    if home is not None:
        array = _on_devices(pieces, want, home)
        if want.kind == "jax":
            return array
        return jax.random.wrap_key_data(array, impl=want.dtype.removeprefix("key<").removesuffix(">"))
    (piece,) = pieces.values()
    if want.kind == "scalar":
        return piece[()].item()
    piece = _typed(piece, want.dtype)
    return piece[()] if want.kind == "generic" else piece


class Unfit(Exception):
    """Values that the dtype which a cast asks for cannot hold."""


_BLOCK = 1 << 20  # Values checked at a time.


def converted(values: np.ndarray, dtype: str) -> np.ndarray:
    """The values in another dtype, which somebody asked for: rounded (floats to ints towards zero), none of them lost.

    Raises:
        Unfit: some would wrap, or become infinite, or stop being so; says how many, and which is the first.
    """
    if values.dtype == object:  # A Python int of more than 64 bits.
        values = _from_python(values, dtype)
    with np.errstate(all="ignore"):
        result = _astype(values, dtype)
        flat, new = values.reshape(-1), result.reshape(-1)
        count, first = 0, None
        for start in range(0, flat.size, _BLOCK):
            block = flat[start : start + _BLOCK]
            lost = _lost(block, new[start : start + _BLOCK])
            if lost.any():
                first = block[lost][0] if first is None else first
                count += int(lost.sum())
    if count:
        raise Unfit(f"{_units.several(count, 'value')} that {dtype} cannot hold, such as {first}")
    return result


def _from_python(values: np.ndarray, dtype: str) -> np.ndarray:
    value = values.item()
    try:
        if jax.numpy.issubdtype(np.dtype(dtype), np.inexact):
            return np.asarray(float(value)).reshape(values.shape)
    except OverflowError:
        pass
    raise Unfit(f"1 value that {dtype} cannot hold, such as {_values.shown(value)}")


def _astype(values: np.ndarray, dtype: str) -> np.ndarray:
    try:
        return values.astype(dtype)
    except TypeError:  # Between ml_dtypes' own there is not always a way, but from a wide one there is.
        try:
            wide = np.float32 if jax.numpy.issubdtype(values.dtype, np.inexact) else np.int32
            return values.astype(wide).astype(dtype)
        except TypeError as error:
            raise Unfit(f"values of {values.dtype}, which NumPy cannot make {dtype} of") from error


def _lost(values: np.ndarray, result: np.ndarray) -> np.ndarray:
    """Where a value did not survive a cast but by rounding."""
    if np.iscomplexobj(values) and np.iscomplexobj(result):
        return _lost(np.real(values), np.real(result)) | _lost(np.imag(values), np.imag(result))
    if result.dtype == bool:
        return ~np.isin(values, [0, 1])
    integers = values.dtype == bool or jax.numpy.issubdtype(values.dtype, np.integer)
    if jax.numpy.issubdtype(result.dtype, np.integer):
        bounds = jax.numpy.iinfo(result.dtype)
        low, high = int(bounds.min), int(bounds.max)
        if integers:
            whole = values if values.dtype == np.uint64 else values.astype(np.int64)
            own = np.iinfo(whole.dtype)
            return (whole < max(low, int(own.min))) | (whole > min(high, int(own.max)))
        # A float may round up to 2**63 where 2**63 - 1 is meant, hence the comparison from below.
        cut = np.trunc(values.astype(np.float64))
        return ~((cut >= float(low)) & (cut < float(high + 1)))
    bounds = jax.numpy.finfo(result.dtype)
    largest = float(bounds.max)
    # From here on a value is nearer to the next one, which there is none of. Some dtypes clamp without a word.
    limit = largest + math.ldexp(float(bounds.eps), math.frexp(largest)[1] - 2)
    was, now = values.astype(np.float64), np.real(result).astype(np.float64)
    finite = np.isfinite(was)
    return np.where(
        finite, ~np.isfinite(now) | (np.abs(was) >= limit), ~((was == now) | (np.isnan(was) & np.isnan(now)))
    )


@functools.cache
def _canonical(dtype: str, x64: bool) -> str:
    return str(jax.dtypes.canonicalize_dtype(dtype))


class _Home(NamedTuple):
    """Where an array goes: its sharding, its devices here, the box of each, and JAX's abstract value for it.

    At once, in one call for all devices, but where some of them share a piece: then jaxlib 0.10.2 raises
    `bad_function_call`.
    """

    sharding: Any
    devices: list[Any]
    boxes: list[Box]
    shape: Shape
    dtype: str
    aval: Any
    at_once: bool


def _home(want: Target, shape: Shape, x64: bool) -> _Home:
    dtype = "uint32" if want.kind == "key" else _canonical(want.dtype, x64)
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
    at_once = len(set(boxes)) == len(boxes) or sharding.is_fully_replicated
    return _Home(sharding, list(indices), boxes, shape, dtype, aval, at_once)


def _on_devices(pieces: dict[Box, Piece], want: Target, home: _Home) -> jax.Array:
    """A jax array of its own memory, committed or not, with the weak type that is asked for."""
    if _put is None and not want.committed:
        (piece,) = pieces.values()
        return jax.numpy.array(piece[0] if isinstance(piece, list) else _typed(piece, home.dtype).copy())
    if _put is not None and home.at_once and not any(isinstance(piece, list) for piece in pieces.values()):
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
    return piece if piece.dtype == _zarr.little(dtype) else converted(piece, dtype)


def _default_device() -> Any:
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device
