"""Chunks read from OCDBT key spaces and checked, with bounded memory (no JAX)."""

import collections
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import crc32c
import msgspec
import numpy as np
import tensorstore as ts
import xxhash

from . import _chunks, _threads
from ._manifest import Leaf, chunk_bytes
from ._ocdbt import Tree, Value
from ._storage import Folder, trouble
from ._zarr import CRC

WINDOW = 256 << 20  # Bytes in flight, per process.
READERS = 4  # Threads that read and check.
AHEAD = 1024  # Chunks asked for ahead of the reader, however small.


def open_store(place: Folder) -> ts.KvStore:
    """The key space in a folder, to read from: a process's own, or the one that spans all."""
    return ts.KvStore.open({"driver": "ocdbt", "base": place.spec()}, context=place.context()).result()


class Wanted(msgspec.Struct, gc=False):
    """A chunk to be read; with its crc32c checked too, by which TensorStore and Orbax read, or by its digest alone."""

    name: str
    coords: _chunks.Shape
    size: int
    digest: str
    crc: bool

    @property
    def key(self) -> str:
        return _chunks.key(self.name, self.coords)


def wanted(name: str, leaf: Leaf, coords: Iterable[_chunks.Shape], *, crc: bool = False) -> Iterator[Wanted]:
    """Some chunks of a leaf."""
    size, counts = chunk_bytes(leaf), leaf.counts
    for at in coords:
        yield Wanted(name, at, size, leaf.digest(_chunks.position(at, counts)), crc)


class Source:
    """A key space to read chunks from.

    Args:
        place: its folder.
        files: the files in it that may be opened, and their sizes.
    """

    def __init__(self, place: Folder, files: Mapping[str, int] = {}):
        plain = place.plain(files)
        self.place, self.files = place, {name: size for name, size in files.items() if name in plain}
        # On a file system values are read where the tree says that they lie: `docs/decisions/0005` has the figures.
        self.tree = Tree(place, self.files) if place.local else None

    @functools.cached_property
    def store(self) -> ts.KvStore:
        """The key space as TensorStore reads it."""
        return open_store(self.place)

    def ask(self, key: str) -> Any:
        """A future of what TensorStore finds at a key in a bucket.

        None on a file system: of what is damaged it knows no more than the tree here, and a stranger's it reads too
        trustingly: through links, from pipes, and into any amount of memory, the lack of which ends the process.
        """
        return self.store.read(key) if self.tree is None else None

    @property
    def nothing(self) -> str:
        """What there is at a key where nothing was found."""
        foreign = self.tree is not None and self.tree.foreign
        return "a tree of keys that is compressed, or of a later version" if foreign else "nothing"

    def small(self, key: str) -> Any:
        """What lies at a key that is no chunk's, as an answer (`value_of`)."""
        try:
            return self._small(key)
        except OSError as error:
            return error

    def _small(self, key: str) -> Any:
        value = self.tree.find(key) if self.tree is not None else None
        if value is None or value.data is not None:
            return self.ask(key) if value is None else value.data
        if value.length > WINDOW or value.offset + value.length > self.files.get(value.file, -1):
            return None
        return self.place.read(value.file, value.offset, value.length)

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
Found = str | OSError  # What was found in place of a chunk; or what kept it from being read, which says nothing of it.


def read(
    chunks: Iterable[Wanted],
    sources: list[Source],
    use: Use = lambda chunk, data: True,
    window: int = WINDOW // 2,
    room: Callable[[Wanted, bool], bool] = lambda chunk, force: True,
) -> Iterator[tuple[Wanted, Any, Found]]:
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
        The chunks in order, each with what `use` made of it; or with None, and what was found instead: a text, or
        the OSError that kept it from being read.
    """
    upcoming = iter(chunks)
    queue: collections.deque[tuple[Wanted, Any]] = collections.deque()
    buffers = Buffers(window)
    ahead = 0
    coming = next(upcoming, None)
    with _threads.Pool(READERS) as pool:
        while True:
            while coming and ahead < window and len(queue) < AHEAD and room(coming, not queue):
                queue.append((coming, _ask(coming, sources[0], use, pool, buffers)))
                ahead += coming.size
                coming = next(upcoming, None)
            if not queue:
                return
            chunk, answer = queue.popleft()
            ahead -= chunk.size
            result, found = answer.result() if isinstance(answer, Future) else _used(chunk, sources[0], answer, use)
            for source in sources if result is None else ():
                result, found = _once_more(chunk, source, use)
                if result is not None:
                    break
            yield chunk, result, found or ("" if result is not None else sources[0].nothing)


def _ask(chunk: Wanted, source: Source, use: Use, pool: _threads.Pool, buffers: Buffers) -> Any:
    """A chunk as an answer (`value_of`), or a future of what became of it."""
    try:
        value = source.find(chunk)
    except OSError as error:
        return error
    if value is None:
        return source.ask(chunk.key)
    return pool.submit(_read_file, chunk, source, value, use, buffers) if value.data is None else value.data


def _once_more(chunk: Wanted, source: Source, use: Use) -> tuple[Any, Found]:
    """A chunk from another source, or from the same: storage that was in trouble may be out of it."""
    try:
        value = source.find(chunk)
        if value is None:
            answer = source.ask(chunk.key)
        else:
            answer = source.place.read(value.file, value.offset, value.length) if value.data is None else value.data
    except OSError as error:
        answer = error
    return _used(chunk, source, answer, use)


def _read_file(chunk: Wanted, source: Source, value: Value, use: Use, buffers: Buffers) -> tuple[Any, Found]:
    buffer = buffers.take(value.length)
    data = buffer[: value.length].data
    try:
        answer: Any = data[: source.place.read_into(value.file, value.offset, data)]
    except OSError as error:
        answer = error
    try:
        return _used(chunk, source, answer, use)
    finally:
        buffers.give([buffer])


def _used(chunk: Wanted, source: Source, answer: Any, use: Use) -> tuple[Any, Found]:
    data, found = _check(chunk, source, answer)
    return (None, found) if data is None else (use(chunk, data), "")


def _check(chunk: Wanted, source: Source, answer: Any) -> tuple[memoryview | None, Found]:
    try:
        value = value_of(answer)
    except (ValueError, OSError) as error:  # TensorStore's errors, whatever their kind, are ValueErrors.
        return None, trouble(error, source.place) or short(error)
    if value is None:
        return None, ""
    # OCDBT answers b"" for a value whose data file is gone.
    if len(value) != chunk.size + CRC:
        return None, f"{len(value):,} bytes in place of {chunk.size + CRC:,}"
    data = memoryview(value)[: chunk.size]
    digest = xxhash.xxh3_128_hexdigest(data)
    if digest != chunk.digest:
        return None, f"digest {digest[:12]}… in place of {chunk.digest[:12]}…"
    if chunk.crc and crc32c.crc32c(data) != int.from_bytes(memoryview(value)[chunk.size :], "little"):
        return None, "another crc32c than that of its values, which are right; Orbax will not read it"
    return data, ""


def value_of(answer: Any) -> bytes | memoryview | None:
    """The bytes of an answer, which is bytes, a future of TensorStore's, or None; or the OSError met: it is raised."""
    if isinstance(answer, OSError):
        raise answer
    if answer is None or isinstance(answer, (bytes, memoryview)):
        return answer
    found = answer.result()
    return found.value if found.state == "value" else None


def short(error: BaseException) -> str:
    """An error of TensorStore's without its source locations."""
    return str(error).partition(" [")[0][:300]
