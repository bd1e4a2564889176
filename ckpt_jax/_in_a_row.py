"""Files written strictly from front to back: one that was left unfinished is gone on with (no JAX, no threads).

What is there already is compared with what belongs there, not trusted: an unfinished file counts as far as it is the
same, whoever left it, of whatever source, and whether or not the disk kept all of it. So nothing needs to be noted
beside it, and what comes out is the same byte for byte, however often the writing was interrupted.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from . import _manifest, _storage
from ._chunks import Box, Shape
from ._storage import Folder
from ._view import View
from .errors import Corrupt, Exists, Fault, Unsupported

PARTIAL = ".partial"
PIECE = 16 << 20  # Bytes that are written, compared and read back at once.
BAND = 256 << 20  # Bytes of an array that are held at most, so that chunks which lie side by side are read only once.
SYNCED = 256 << 20  # Bytes between two calls of fsync: what a crash of the machine can cost.

Told = Callable[[int, int], None]  # Bytes done, of how many.


class Segment(NamedTuple):
    """A part of a file.

    Attributes:
        name: what errors call it.
        length: of all its pieces.
        pieces: gives its bytes, the same each time. It is called once those before it were given to the end.
    """

    name: str
    length: int
    pieces: Callable[[], Iterable[bytes | memoryview]]


@dataclass(frozen=True, slots=True)
class Written:
    """What was written.

    Attributes:
        path: the file, or the folder.
        files: all files.
        bytes: of all files.
        arrays: how many arrays lie in them.
        only_described: the names of leaves that are no arrays, which ckpt_jax alone reads again: scalars, live states.
    """

    path: str
    files: tuple[str, ...]
    bytes: int
    arrays: int
    only_described: tuple[str, ...]


def quiet(done: int, total: int) -> None:
    """Tells nobody."""


def check(dst: Folder) -> None:
    """Raises Exists if something stands where a file or folder should go, Unsupported if it could not be renamed."""
    if not dst.local:
        raise Unsupported(f"{dst} is not on a file system", hint="write it to a disk, and copy it from there")
    if dst.exists():
        raise Exists(f"something is at {dst} already; it is left as it is", hint="give another path, or remove it")


def file(dst: Folder, segments: list[Segment], told: Told = quiet) -> int:
    """Writes a file as `<dst>.partial`, reads it back, and gives it its name; returns its size.

    Raises:
        Exists: there is one already, or another process writes it just now.
        Corrupt: the disk does not give back what was written, or the source gave other lengths than it should.
        OSError: as storage says. What was written so far stays, to be gone on with.
    """
    check(dst)
    dst.parent.make()
    partial = dst.parent / (dst.name + PARTIAL)
    total = sum(segment.length for segment in segments)
    with _opened(partial, os.O_RDWR | os.O_CREAT) as fd:
        _fill(fd, partial, segments, lambda done: told(done, total))
        _rename(partial, dst)
    return total


def files(dst: Folder, contents: Mapping[str, list[Segment]], suffixes: tuple[str, ...], told: Told = quiet) -> int:
    """Writes files as `file` does, one after the other in a folder `<dst>.partial`; returns the bytes of all.

    Args:
        suffixes: how the names of files end that such a writing may have left there.

    Raises:
        Exists: there is one already, or another process writes it just now, or the unfinished one holds other things.
    """
    check(dst)
    partial = dst.parent / (dst.name + PARTIAL)
    partial.make()
    total = sum(segment.length for segments in contents.values() for segment in segments)
    with _opened(partial, os.O_RDONLY | os.O_DIRECTORY):
        _clear(partial, contents, suffixes)
        before = 0
        for name, segments in contents.items():
            with _opened(partial / name, os.O_RDWR | os.O_CREAT) as fd:
                _fill(fd, partial / name, segments, lambda done, before=before: told(before + done, total))
            before += sum(segment.length for segment in segments)
        partial.sync()
        _rename(partial, dst)
    return total


def array(view: View, name: str) -> Segment:
    """The values of a leaf, the last axis fastest, in little-endian order."""

    def pieces() -> Iterator[memoryview]:
        for box in bands(leaf.shape, leaf.chunk, _manifest.itemsize(leaf.dtype)):
            data = np.ascontiguousarray(view.read(name, box)).reshape(-1).view(np.uint8)
            for at in range(0, data.size, PIECE):
                yield data[at : at + PIECE].data

    leaf = view.leaves[name]
    return Segment(name, _manifest.nbytes(leaf), pieces)


def bands(shape: Shape, chunk: Shape, itemsize: int) -> Iterator[Box]:
    """Boxes of an array of which each lies in a row behind the one before: as many chunks as may be held at once.

    >>> list(bands((5, 4), (2, 2), 8))
    [((0, 5), (0, 4))]
    """
    if 0 in shape:
        return
    if not shape:
        yield ()
        return
    row = itemsize * int(np.prod(shape[1:], dtype=object))
    if row > BAND:
        for at in range(shape[0]):
            yield from (((at, at + 1), *inner) for inner in bands(shape[1:], chunk[1:], itemsize))
        return
    rows = chunk[0] * max(1, PIECE // (chunk[0] * row)) if chunk[0] * row <= BAND else BAND // row
    for at in range(0, shape[0], rows):
        yield ((at, min(at + rows, shape[0])), *((0, n) for n in shape[1:]))


# --- one file ---------------------------------------------------------------------------------------------------------


def _fill(fd: int, place: Folder, segments: list[Segment], told: Callable[[int], None]) -> None:
    """Makes a file consist of segments, durably, and reads it back."""
    kept = os.fstat(fd).st_size  # As far as it may be what belongs there.
    at, synced = 0, 0
    digests: list[str] = []
    for segment in segments:
        begin, digest = at, xxhash.xxh3_128()
        for piece in segment.pieces():
            digest.update(piece)
            if at < kept and os.pread(fd, len(piece), at) != bytes(piece):
                os.ftruncate(fd, at)
                kept = at
            if at >= kept:
                _write(fd, piece, at, place)
            at += len(piece)
            if at - synced >= SYNCED:
                os.fsync(fd)
                synced = at
            told(at)
        if at - begin != segment.length:
            fault = Fault(segment.name, f"{segment.length:,} bytes of the source", f"{at - begin:,}")
            raise Corrupt(f"{place} was not finished: its source contradicts itself", [fault])
        digests.append(digest.hexdigest())
    os.ftruncate(fd, at)
    os.fsync(fd)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # What is read back shall come from the disk.
    faults = [
        Fault(segment.name, f"contents with the digest {digest}", found)
        for segment, digest, found in zip(segments, digests, _read_back(fd, segments), strict=True)
        if found != digest
    ]
    if faults:
        raise Corrupt(f"{place} does not hold what was written to it", faults, hint="do not trust this disk")


def _write(fd: int, piece: bytes | memoryview, at: int, place: Folder) -> None:
    rest = memoryview(piece)
    try:
        while rest:
            count = os.pwrite(fd, rest, at)
            rest, at = rest[count:], at + count
    except OSError as error:
        kept = "what was written stays, and the same command goes on with it; remove it if you do not"
        raise OSError(error.errno, f"{error.strerror}: {kept}", place.url) from error


def _read_back(fd: int, segments: list[Segment]) -> Iterator[str]:
    at = 0
    for segment in segments:
        digest, end = xxhash.xxh3_128(), at + segment.length
        while at < end and (piece := os.pread(fd, min(PIECE, end - at), at)):
            digest.update(piece)
            at += len(piece)
        at = end
        yield digest.hexdigest()


# --- names ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(place: Folder, flags: int) -> Iterator[int]:
    """A file or folder that no other process may write meanwhile.

    Raises:
        Exists: another process does, or it is a link or another thing that no writing left there.
    """
    try:
        fd = os.open(place.url, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO):
            raise _in_the_way(place) from error
        raise
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISDIR(mode) if flags & os.O_DIRECTORY else stat.S_ISREG(mode)):
            raise _in_the_way(place)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Exists(f"another process is writing {place}", hint="wait for it, or give another path") from error
        except OSError:
            pass  # No locks here (NFS, Lustre).
        if place.identity() != f"{(found := os.fstat(fd)).st_dev}:{found.st_ino}":
            raise Exists(f"another process has just finished {place}", hint="use what it wrote, or give another path")
        yield fd
    finally:
        os.close(fd)


def _in_the_way(place: Folder) -> Exists:
    return Exists(f"{place} is no unfinished file or folder of ours", hint="give another path, or remove it")


def _clear(partial: Folder, contents: Mapping[str, list[Segment]], suffixes: tuple[str, ...]) -> None:
    """Removes the files of another unfinished writing of this kind: there may have been more of them."""
    others = [name for name in partial.entries() if name not in contents]
    odd = [name for name in others if not name.endswith(suffixes) or not partial.plain([name])]
    if odd:
        faults = [Fault(name, "files of an unfinished export", "another thing") for name in odd]
        raise Exists(f"{partial} holds what no export has written", faults, hint="give another path, or remove it")
    for name in others:
        partial.unlink(name)


def _rename(partial: Folder, dst: Folder) -> None:
    """Gives the finished file or folder its name, durably."""
    check(dst)
    os.rename(partial.url, dst.url)
    _storage._fsync(dst.parent.url)
