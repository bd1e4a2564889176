"""Chunks written into OCDBT key spaces, each with its digest (no JAX)."""

import collections
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import crc32c
import msgspec
import numpy as np
import tensorstore as ts
import xxhash

from . import _chunks, _threads
from ._manifest import Leaf, chunk_bytes
from ._ocdbt import Value
from ._ocdbt_writer import write_tree
from ._storage import Folder, failures
from ._zarr import CRC, little, zarr_json

# Several files, so that several fsyncs run at once: one of 2 GiB took four times as long.
DATA_FILE = 64 << 20
WRITERS = 4  # Threads that check and write, each a file.
INLINE = 1024  # Values of at most so many bytes lie in the tree's nodes.

_CONFIG = {"compression": None, "max_inline_value_bytes": INLINE, "max_decoded_node_bytes": 8 << 20}


# `gc=False` on what there is one of for each chunk: with 10,000 of them the collector's rounds took a third.
class Chunk(msgspec.Struct, gc=False):
    """A chunk to be written.

    Attributes:
        name, position, coords: its place.
        values: less than the chunk shape at an array's edge; or what reads them, in the thread that writes them.
    """

    name: str
    position: int
    coords: _chunks.Shape
    values: np.ndarray | Callable[[], np.ndarray]

    @property
    def array(self) -> np.ndarray:
        return self.values if isinstance(self.values, np.ndarray) else self.values()


class Written(NamedTuple):
    """What was written: the digests by leaf and position, and the sizes of the data files."""

    digests: dict[str, dict[int, str]]
    files: dict[str, int]


def write(place: Folder, leaves: dict[str, Leaf], chunks: Iterable[Chunk], *, head: bool, again: str = "") -> Written:
    """Writes chunks durably.

    TensorStore would copy each value twice more: `docs/decisions/0006` has the figures.

    Args:
        place: this process's own folder.
        leaves: the records, with chunk shapes.
        chunks: what to write, in order.
        head: whether to write every array's zarr.json too.
        again: of what is written from the same source each time, a name for that: files of the same name that are whole
            were written by one who was killed, and stay.
    """
    values: dict[bytes, Value] = {}
    done = Written({}, {})
    if head:
        stored = ((name, leaf) for name, leaf in leaves.items() if leaf.stored)
        values = {f"{name}/zarr.json".encode(): Value("", data=zarr_json(leaf)) for name, leaf in stored}

    def note(chunk: Chunk, value: Value, digest: str) -> None:
        done.digests.setdefault(chunk.name, {})[chunk.position] = digest
        values[_chunks.key(chunk.name, chunk.coords).encode()] = value
        if value.data is None:
            done.files[value.file] = max(done.files.get(value.file, 0), value.offset + value.length)

    # Names that no other save has: a file of another step is never taken for one of this.
    nonce = again or os.urandom(12).hex()
    names = (f"d/{nonce}{number:08x}" for number in itertools.count())
    place.make("d")
    files: collections.deque[Future[list[tuple[Chunk, Value, str]]]] = collections.deque()
    with _threads.Pool(WRITERS) as pool:  # After an error nothing may still write.
        for batch in _batches(leaves, chunks, note):
            if len(files) > WRITERS:  # What is to be written is in memory until it is.
                for found in files.popleft().result():
                    note(*found)
            files.append(pool.submit(_file if again else _write_file, place, next(names), leaves, batch))
        for file in files:
            for found in file.result():
                note(*found)
    limits = _CONFIG["max_inline_value_bytes"], _CONFIG["max_decoded_node_bytes"]
    write_tree(place, next(names), values, *limits)
    return done


def _batches(
    leaves: dict[str, Leaf], chunks: Iterable[Chunk], note: Callable[[Chunk, Value, str], None]
) -> Iterator[list[Chunk]]:
    """The chunks for each data file; small ones are noted with their bytes, which lie in the tree."""
    batch: list[Chunk] = []
    total = 0
    for chunk in chunks:
        size = chunk_bytes(leaves[chunk.name])
        if size + CRC <= INLINE:
            data, digest, crc = _encoded(chunk, leaves[chunk.name], bytearray(size))
            note(chunk, Value("", data=bytes(data) + crc), digest)
            continue
        batch.append(chunk)
        total += size
        if total >= DATA_FILE:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _file(place: Folder, name: str, leaves: dict[str, Leaf], chunks: list[Chunk]) -> list[tuple[Chunk, Value, str]]:
    """As `_write_file`, unless the file is there already and whole: each chunk has its crc32c behind it."""
    there = memoryview(place.read(name) or b"")
    if len(there) != sum(chunk_bytes(leaves[chunk.name]) + CRC for chunk in chunks):
        return _write_file(place, name, leaves, chunks)
    found, at = [], 0
    for chunk in chunks:
        end = at + chunk_bytes(leaves[chunk.name])
        data, crc = there[at:end], there[end : end + CRC]
        if crc32c.crc32c(data).to_bytes(CRC, "little") != crc:
            return _write_file(place, name, leaves, chunks)
        found.append((chunk, Value(name, at, len(data) + CRC), xxhash.xxh3_128_hexdigest(data)))
        at = end + CRC
    return found


def _write_file(
    place: Folder, name: str, leaves: dict[str, Leaf], chunks: Iterable[Chunk]
) -> list[tuple[Chunk, Value, str]]:
    """Writes chunks to a data file, durably; where each of them lies, and its digest."""
    found = []
    buffer = bytearray()
    with place.writing(name) as file:
        at = 0
        for chunk in chunks:
            leaf = leaves[chunk.name]
            size = chunk_bytes(leaf)
            if len(buffer) != size:
                buffer = bytearray(size)
            data, digest, crc = _encoded(chunk, leaf, buffer)
            file.write(data)
            file.write(crc)
            found.append((chunk, Value(name, at, size + CRC), digest))
            at += size + CRC
    return found


def _encoded(chunk: Chunk, leaf: Leaf, buffer: bytearray) -> tuple[memoryview, str, bytes]:
    """A chunk's bytes as they lie on disk, in the buffer; their digest, and their crc32c."""
    data = _laid_out(chunk.array, leaf, buffer)
    return data, xxhash.xxh3_128_hexdigest(data), crc32c.crc32c(data).to_bytes(CRC, "little")


def _laid_out(values: np.ndarray, leaf: Leaf, buffer: bytearray) -> memoryview:
    """A chunk's bytes without their crc32c; zeros where it is beyond the array.

    Always a copy: also JAX's arrays may share their memory with NumPy's, which others change, and then what is digested
    would not be what is written.
    """
    whole = np.frombuffer(buffer, little(leaf.dtype)).reshape(leaf.chunk)
    if values.shape != leaf.chunk:
        whole.fill(0)
    # A bool's byte may be any but 0 in NumPy; in zarr it is 1.
    whole[tuple(map(slice, values.shape))] = values.view(np.uint8) != 0 if values.dtype == bool else values
    return memoryview(buffer)


def digests(leaves: dict[str, Leaf], chunks: Iterable[Chunk]) -> dict[tuple[str, int], str]:
    """The digests that chunks would be written with, by leaf and position."""
    found = {}
    for chunk in chunks:
        leaf = leaves[chunk.name]
        data = _laid_out(chunk.array, leaf, bytearray(chunk_bytes(leaf)))
        found[chunk.name, chunk.position] = xxhash.xxh3_128_hexdigest(data)
    return found


def merge(place: Folder, parts: list[Folder]) -> None:
    """Makes one key space of the processes' own: metadata only, their data files stay where they are."""
    context = place.context()  # Copying a range needs the same context on both sides.

    def open_in(folder: Folder, **more: Any) -> ts.KvStore:
        return ts.KvStore.open({"driver": "ocdbt", "base": folder.spec(), **more}, context=context).result()

    with failures(place):
        transaction = ts.Transaction(atomic=True)
        target = open_in(place, config=_CONFIG).with_transaction(transaction)
        for future in [open_in(part).experimental_copy_range_to(target) for part in parts]:
            future.result()
        transaction.commit_async().result()
