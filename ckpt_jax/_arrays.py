"""Chunks in zarr arrays inside OCDBT: written, read back and checked, with bounded memory (no JAX)."""

import collections
import contextlib
import functools
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import crc32c
import ml_dtypes  # noqa: F401  Registers bfloat16, float8 and the like with NumPy.
import msgspec
import numpy as np
import tensorstore as ts
import xxhash

from . import _chunks
from ._manifest import Leaf, chunk_bytes
from ._ocdbt import Tree, Value
from ._storage import Folder, failures

WINDOW = 256 << 20  # Bytes in flight, per process.
# Several files, so that several fsyncs run at once: one of 2 GiB took four times as long.
DATA_FILE = 64 << 20
CRC = 4  # Bytes of the crc32c that zarr's codec of that name appends.

INLINE = 1024  # Values of at most so many bytes lie in the tree's nodes.
READERS = 4  # Threads that read and check.
AHEAD = 1024  # Chunks asked for ahead of the reader, however small.

_CONFIG = {"compression": None, "max_inline_value_bytes": INLINE, "max_decoded_node_bytes": 8 << 20}
# The dtypes that TensorStore's zarr3 driver has. Others are stored as uint8; the manifest has the true one.
_ZARR = frozenset(
    {
        *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn"),
        *("float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    }
)


def open_store(place: Folder, *, new: bool = False) -> ts.KvStore:
    """The key space in a folder; one for a process to write, or the one that spans all."""
    spec = {"driver": "ocdbt", "base": place.spec()}
    if new:  # To a reader these would be demands, and a checkpoint made with others could not be read.
        spec |= {"config": _CONFIG, "target_data_file_size": DATA_FILE}
    return ts.KvStore.open(spec, context=place.context()).result()


def zarr_json(leaf: Leaf) -> bytes:
    """An array's zarr v3 metadata: raw little-endian bytes and their crc32c, nothing compressed."""
    return _zarr_json(leaf.dtype if leaf.dtype in _ZARR else "uint8", leaf.shape, leaf.chunk)


@functools.lru_cache(1024)
def _zarr_json(dtype: str, shape: _chunks.Shape, chunk: _chunks.Shape) -> bytes:
    fill: Any = [0.0, 0.0] if dtype.startswith("complex") else 0.0 if "float" in dtype else 0
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": False if dtype == "bool" else fill,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        }
    ).encode()


@functools.cache
def little(dtype: str) -> np.dtype:
    """A dtype as it lies on disk."""
    native = np.dtype(dtype)
    # Not `newbyteorder` alone: a bfloat16 that is little-endian by name is another dtype to JAX, and crashes it.
    return native if sys.byteorder == "little" else native.newbyteorder("<")


# --- writing ----------------------------------------------------------------------------------------------------------


# `gc=False` on what there is one of for each chunk: with 10,000 of them the collector's rounds took a third.
class Chunk(msgspec.Struct, gc=False):
    """A chunk to be written: its place, and its values (less than the chunk shape at an array's edge)."""

    name: str
    position: int
    coords: _chunks.Shape
    values: np.ndarray


class _Writing(msgspec.Struct, gc=False):
    future: Any
    size: int


class _Window:
    """Writes under way, of at most so many bytes."""

    def __init__(self, store: ts.KvStore, limit: int = WINDOW):
        self.store, self.limit, self.bytes = store, limit, 0
        self.queue: collections.deque[_Writing] = collections.deque()

    def write(self, key: str, data: bytes | bytearray) -> None:
        while self.queue and self.bytes + len(data) > self.limit:
            oldest = self.queue.popleft()
            oldest.future.result()
            self.bytes -= oldest.size
        future = self.store.write(key, data)  # pyright: ignore[reportArgumentType]  It takes bytearrays, undeclared.
        self.queue.append(_Writing(future, len(data)))
        self.bytes += len(data)

    def finish(self) -> None:
        while self.queue:
            self.queue.popleft().future.result()

    def settle(self) -> None:
        """Waits for what is under way, whatever comes of it: after an error nothing may still write."""
        while self.queue:
            with contextlib.suppress(ValueError, OSError):
                self.queue.popleft().future.result()


def write(place: Folder, leaves: dict[str, Leaf], chunks: Iterable[Chunk], *, head: bool) -> dict[str, dict[int, str]]:
    """Writes chunks durably; returns their digests by leaf and position.

    Args:
        place: this process's own folder.
        leaves: the records, with chunk shapes.
        chunks: what to write, in order.
        head: whether to write every array's zarr.json too.
    """
    with failures(place):
        return _write(_Window(open_store(place, new=True)), leaves, chunks, head=head)


def _write(
    window: _Window, leaves: dict[str, Leaf], chunks: Iterable[Chunk], *, head: bool
) -> dict[str, dict[int, str]]:
    digests: dict[str, dict[int, str]] = {}
    buffer = bytearray()
    try:
        if head:
            for name, leaf in leaves.items():
                if leaf.stored:
                    window.write(f"{name}/zarr.json", zarr_json(leaf))
        for chunk in chunks:
            size = chunk_bytes(leaves[chunk.name])
            if len(buffer) != size + CRC:
                buffer = bytearray(size + CRC)  # TensorStore copies it, so one serves every chunk of this size.
            data = _laid_out(chunk.values, leaves[chunk.name], buffer)
            digests.setdefault(chunk.name, {})[chunk.position] = xxhash.xxh3_128_hexdigest(data)
            buffer[size:] = crc32c.crc32c(data).to_bytes(CRC, "little")
            window.write(_chunks.key(chunk.name, chunk.coords), buffer)
        window.finish()
    finally:
        window.settle()
    return digests


def _laid_out(values: np.ndarray, leaf: Leaf, buffer: bytearray) -> memoryview:
    """A chunk's bytes as they lie on disk, without their crc32c; zeros where it is beyond the array."""
    dtype, size = little(leaf.dtype), chunk_bytes(leaf)
    whole = np.frombuffer(buffer, dtype, size // dtype.itemsize).reshape(leaf.chunk)
    if values.shape != leaf.chunk:
        whole.fill(0)
    whole[tuple(map(slice, values.shape))] = values
    return memoryview(buffer)[:size]


def digests(leaves: dict[str, Leaf], chunks: Iterable[Chunk]) -> dict[tuple[str, int], str]:
    """The digests that chunks would be written with, by leaf and position."""
    found = {}
    for chunk in chunks:
        leaf = leaves[chunk.name]
        data = _laid_out(chunk.values, leaf, bytearray(chunk_bytes(leaf)))
        found[chunk.name, chunk.position] = xxhash.xxh3_128_hexdigest(data)
    return found


def merge(place: Folder, parts: list[Folder]) -> None:
    """Makes one key space of the processes' own: metadata only, their data files stay where they are."""
    context = place.context()  # Copying a range needs the same context on both sides.

    def open_in(folder: Folder) -> ts.KvStore:
        spec = {"driver": "ocdbt", "base": folder.spec(), "config": _CONFIG}
        return ts.KvStore.open(spec, context=context).result()

    with failures(place):
        transaction = ts.Transaction(atomic=True)
        target = open_in(place).with_transaction(transaction)
        for future in [open_in(part).experimental_copy_range_to(target) for part in parts]:
            future.result()
        transaction.commit_async().result()


# --- reading ----------------------------------------------------------------------------------------------------------


class Wanted(msgspec.Struct, gc=False):
    """A chunk to be read."""

    name: str
    coords: _chunks.Shape
    size: int
    digest: str

    @property
    def key(self) -> str:
        return _chunks.key(self.name, self.coords)


def wanted(name: str, leaf: Leaf, coords: Iterable[_chunks.Shape]) -> Iterator[Wanted]:
    """Some chunks of a leaf."""
    size, counts = chunk_bytes(leaf), leaf.counts
    for at in coords:
        yield Wanted(name, at, size, leaf.digest(_chunks.position(at, counts)))


class Source:
    """A key space to read chunks from.

    Args:
        place: its folder.
        files: the files in it that may be opened, and their sizes.
    """

    def __init__(self, place: Folder, files: Mapping[str, int] = {}):
        self.place, self.files, self.store = place, files, open_store(place)
        # On a file system values are read where the tree says that they lie: `docs/decisions/0005` has the figures.
        self.tree = Tree(place, files) if place.local else None

    def find(self, chunk: Wanted) -> Value | None:
        """Where a chunk lies, if it is in a file that may be opened and of the size that is wanted."""
        value = self.tree.find(chunk.key) if self.tree is not None else None
        if value is None or value.data is not None:
            return value
        fits = value.length == chunk.size + CRC and value.offset + value.length <= self.files.get(value.file, -1)
        return value if fits else None


class Buffers:
    """Memory of at most `limit` bytes, used again: touching fresh memory may take longer than reading a file."""

    def __init__(self, limit: int = WINDOW // 2):
        self._limit, self._total = limit, 0
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray:
        """uint8[size or more]."""
        with self._lock:
            for at, buffer in enumerate(self._free):
                if size <= len(buffer) <= 2 * size:
                    return self._free.pop(at)
            while self._free and self._total + size > self._limit:
                self._total -= len(self._free.pop(0))
            self._total += size
        return np.empty(size, np.uint8)

    def give(self, buffers: Iterable[np.ndarray]) -> None:
        with self._lock:
            self._free.extend(buffers)


Use = Callable[[Wanted, memoryview], Any]


def read(
    chunks: Iterable[Wanted],
    sources: list[Source],
    use: Use = lambda chunk, data: True,
    window: int = WINDOW // 2,
    room: Callable[[Wanted, bool], bool] = lambda chunk, force: True,
) -> Iterator[tuple[Wanted, Any, str]]:
    """Reads chunks, ahead of the reader by at most `window` bytes, and gives them to `use`, some at a time.

    A chunk from any source counts if its digest is the right one; else the next source is asked.

    Args:
        chunks: what to read, in order.
        sources: where, in order.
        use: takes a chunk's uncompressed bytes, which are gone when it returns; runs in several threads.
        window: bytes in flight.
        room: keeps memory for what will become of a chunk; if there is none, says False, and those before it are
            finished first. Where none is before it, it is forced.

    Yields:
        The chunks in order, each with what `use` made of it; or with None, and what was found instead.
    """
    upcoming = iter(chunks)
    queue: collections.deque[tuple[Wanted, Any]] = collections.deque()
    buffers = Buffers(window)
    ahead = 0
    coming = next(upcoming, None)
    pool = ThreadPoolExecutor(READERS)
    try:
        while True:
            while coming and ahead < window and len(queue) < AHEAD and room(coming, not queue):
                queue.append((coming, _ask(coming, sources[0], use, pool, buffers)))
                ahead += coming.size
                coming = next(upcoming, None)
            if not queue:
                return
            chunk, answer = queue.popleft()
            ahead -= chunk.size
            result, found = answer.result() if isinstance(answer, Future) else _used(chunk, answer, use)
            for source in sources if result is None else ():
                result, found = _used(chunk, source.store.read(chunk.key), use)
                if result is not None:
                    break
            yield chunk, result, found
    finally:
        pool.shutdown(cancel_futures=True)


def _ask(chunk: Wanted, source: Source, use: Use, pool: ThreadPoolExecutor, buffers: Buffers) -> Any:
    """A chunk's bytes, a future of them, or a future of what became of them."""
    value = source.find(chunk)
    if value is None:
        return source.store.read(chunk.key)
    return pool.submit(_read_file, chunk, source.place, value, use, buffers) if value.data is None else value.data


def _read_file(chunk: Wanted, place: Folder, value: Value, use: Use, buffers: Buffers) -> tuple[Any, str]:
    buffer = buffers.take(value.length)
    data = buffer[: value.length].data
    try:
        return _used(chunk, data[: place.read_into(value.file, value.offset, data)], use)
    except OSError as error:
        return None, str(error)
    finally:
        buffers.give([buffer])


def _used(chunk: Wanted, answer: Any, use: Use) -> tuple[Any, str]:
    data, found = _check(chunk, answer)
    return (None, found) if data is None else (use(chunk, data), "")


def _check(chunk: Wanted, answer: Any) -> tuple[memoryview | None, str]:
    try:
        value = answer if isinstance(answer, (bytes, memoryview)) else _value(answer)
    except (ValueError, OSError) as error:  # TensorStore's errors, whatever their kind, are ValueErrors.
        return None, short(error)
    if value is None:
        return None, "nothing"
    # OCDBT answers b"" for a value whose data file is gone.
    if len(value) != chunk.size + CRC:
        return None, f"{len(value):,} bytes in place of {chunk.size + CRC:,}"
    data = memoryview(value)[: chunk.size]
    digest = xxhash.xxh3_128_hexdigest(data)
    if digest != chunk.digest:
        return None, f"digest {digest[:12]}… in place of {chunk.digest[:12]}…"
    return data, ""


def _value(future: Any) -> bytes | None:
    answer = future.result()
    return answer.value if answer.state == "value" else None


def short(error: BaseException) -> str:
    """An error of TensorStore's without its source locations."""
    return str(error).partition(" [")[0][:300]
