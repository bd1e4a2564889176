"""Arrays that lie in a row in a file, and boxes of them (no JAX)."""

import errno
import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import ml_dtypes  # noqa: F401  Registers bfloat16, float8 and the like with NumPy.
import numpy as np

from . import _chunks
from ._chunks import Box, Shape
from ._storage import Folder
from .errors import Corrupt, Fault

ROWS = 4 << 20  # Bytes read at once of which only a part is wanted.


class Source(Protocol):
    """What gives the bytes of files by their names, as a folder does."""

    def read_into(self, name: str, start: int, buffer: memoryview) -> int: ...

    def __truediv__(self, name: str, /) -> object: ...


class Flat(NamedTuple):
    """Where an array lies in a file.

    Attributes:
        folder, file: the file.
        offset: of its first byte.
        dtype, shape: as in a manifest.
        fortran: whether the first axis runs fastest.
        big: whether its bytes are in big-endian order.
        pieces: (bytes, offset) of each part in order, where it lies in several; `offset` is then 0.
    """

    folder: Source
    file: str
    offset: int
    dtype: str
    shape: Shape
    fortran: bool = False
    big: bool = False
    pieces: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def read(flat: Flat, box: Box, name: str) -> np.ndarray:
    """The values of an array in a box; errors tell of the leaf `name`.

    Raises:
        Corrupt: the file ends before.
        OSError: it cannot be read.
    """
    shape, ordered = (flat.shape[::-1], box[::-1]) if flat.fortran else (flat.shape, box)
    values = np.empty(_chunks.extent(ordered), flat.dtype)
    if values.size:
        _fill(values, flat, flat.offset, shape, ordered, name=name)
    if flat.big:
        values = values.byteswap()
    return values.T if flat.fortran else values


def _fill(values: np.ndarray, flat: Flat, offset: int, shape: Shape, box: Box, *, name: str) -> None:
    """Reads what a box needs of the array at an offset: in one go where that lies in a row, or row by row."""
    inner = box[1:]
    row = values.dtype.itemsize * math.prod(shape[1:])
    if not shape or inner == _chunks.whole(shape[1:]):
        start = box[0][0] if box else 0
        _read(flat, offset + start * row, values, name)
        return
    start, stop = box[0]
    step = ROWS // row
    if not step:  # A row of it is itself large.
        for at in range(start, stop):
            _fill(values[at - start], flat, offset + at * row, shape[1:], inner, name=name)
        return
    for at in range(start, stop, step):
        count = min(step, stop - at)
        rows = np.empty((count, *shape[1:]), values.dtype)
        _read(flat, offset + at * row, rows, name)
        values[at - start : at - start + count] = rows[(slice(None), *_chunks.slices(inner))]


def _read(flat: Flat, offset: int, values: np.ndarray, name: str) -> None:
    """Fills an array, which lies in a row in memory too, from a place in the file."""
    data = values.reshape(-1).view(np.uint8).data
    for at, part in _parts(flat, offset, data):
        found = flat.folder.read_into(flat.file, at, part)
        if found != len(part):
            fault = Fault(name, f"{len(part):,} bytes at {at:,}", f"{found:,}")
            raise Corrupt(f"{flat.folder / flat.file} is damaged", [fault])


def _parts(flat: Flat, offset: int, data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Where in the file the parts of some memory lie that holds the array from an offset on."""
    if not flat.pieces:
        yield offset, data
    start = 0  # Of a piece, in the array.
    for size, at in flat.pieces:
        first, last = max(start, offset), min(start + size, offset + len(data))
        if first < last:
            yield at + first - start, data[first - offset : last - offset]
        start += size


def sizes(folder: Folder, files: Iterable[str], faults: list[Fault]) -> dict[str, int]:
    """The sizes of files; adds a fault for each that is not there, or is a link, which leads anywhere."""
    found = folder.sizes(list(files))
    for file in (file for file, size in found.items() if size is None):
        there = "a link: give the file that it leads to, or make a copy" if (folder / file).is_link() else "none"
        faults.append(Fault(file, "a plain file", there))
    return {file: size for file, size in found.items() if size is not None}


def followed(folder: Folder, file: str) -> tuple[Folder, str]:
    """A file, or what it leads to if it is a link: those that Hugging Face's cache gives out are."""
    if not (folder / file).is_link():
        return folder, file
    path = os.path.realpath(f"{folder}/{file}")
    return Folder(os.path.dirname(path)), os.path.basename(path)


def size(folder: Folder, file: str) -> int:
    """Bytes of a file.

    Raises:
        OSError: it is not there, or no plain file.
    """
    found = folder.sizes([file])[file]
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / file))
    return found


def stamp(folder: Folder, files: Iterable[str]) -> str:
    """What changes once some files are others: their names, sizes and times."""
    told = []
    for file in sorted(files):
        found = os.stat(f"{folder}/{file}")
        told.append((file, found.st_size, found.st_mtime_ns))
    return hashlib.sha256(repr((folder.url, told)).encode()).hexdigest()
