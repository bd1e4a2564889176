"""Zip archives, read where they lie; members that were deflated once they are asked for (no JAX)."""

import os
import struct
import tempfile
import threading
import weakref
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from . import _flat, _view
from ._storage import Folder
from .errors import Corrupt, Fault

LARGEST = 1 << 28  # Bytes of a directory: of three million members.
PIECE = 1 << 20  # Packed bytes that are read at once,
GROWN = 1 << 20  # and unpacked ones that are made of them.

_END, _END64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_DIRECTORY, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_FULL, _DEFLATED = 0xFFFFFFFF, 8


class Member(NamedTuple):
    """A file in a zip archive: its bytes' place, there and as they will be."""

    name: str
    start: int
    packed: int
    size: int
    crc: int
    deflated: bool

    def head(self, folder: Folder, file: str, most: int) -> bytes:
        """Its first bytes; a zlib.error where it cannot be unpacked."""
        if not self.deflated:
            return folder.read(file, self.start, min(self.size, most)) or b""
        data = folder.read(file, self.start, min(self.packed, most + 64)) or b""
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, most)


def members(folder: Folder, file: str, faults: list[Fault]) -> Iterator[Member]:
    """The members of a zip archive, each looked at so far that it can be read; adds faults.

    Raises:
        CheckpointError: it is none.
    """
    if (size := _flat.sizes(folder, [file], faults).get(file)) is None:
        return
    try:
        start, length, count = _directory(folder, file, size)
        data = folder.read(file, start, length) or b""
        entries = list(_entries(data, count))
    except (struct.error, ValueError) as error:
        faults = [*faults, Fault(file, "an archive's directory at its end", f"{error}")]
        raise _view.refused(f"{folder / file}", "zip archive", faults) from error
    names: set[str] = set()
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.start):
        at = f"{entry.name:.80}"
        head = folder.read(file, entry.start, _LOCAL.size) or b""
        if len(head) < _LOCAL.size or not head.startswith(b"PK\3\4") or entry.start < end:
            faults.append(Fault(at, f"a member that begins at {end:,} or behind it", f"none at {entry.start:,}"))
            continue
        begin = entry.start + _LOCAL.size + sum(_LOCAL.unpack(head)[-2:])
        end = begin + entry.packed
        if end > start:
            faults.append(Fault(at, f"{entry.packed:,} bytes", f"{max(0, start - begin):,} before the directory"))
        elif entry.name in names:
            faults.append(Fault(at, "a member once", "again"))
        elif entry.name.startswith("/") or ".." in entry.name.split("/") or "\0" in entry.name:
            faults.append(Fault(at, "a name within the file", "one that leads out of it"))
        elif (problem := _unreadable(entry)) is not None:
            faults.append(Fault(at, "a member that is stored or deflated", problem))
        else:
            yield Member(entry.name, begin, entry.packed, entry.size, entry.crc, entry.method == _DEFLATED)
        names.add(entry.name)


class _Entry(NamedTuple):
    """What a zip archive's directory says of a member."""

    name: str
    start: int
    packed: int
    size: int
    crc: int
    method: int
    flags: int


def _unreadable(entry: _Entry) -> str | None:
    if entry.flags & 0x41:
        return "an encrypted one"
    if entry.method not in (0, _DEFLATED):
        return f"one packed by method {entry.method}"
    if entry.method == 0 and entry.packed != entry.size:
        return f"{entry.packed:,} bytes that are to be {entry.size:,}"
    if entry.size > 1032 * entry.packed + 1024:  # Deflate makes at most 258 bytes out of two bits.
        return f"{entry.packed:,} bytes that are to become {entry.size:,}"
    return None


def _directory(folder: Folder, file: str, size: int) -> tuple[int, int, int]:
    """Where the directory of a zip archive begins, its length, and the number of members."""
    first = max(0, size - _END.size - 0xFFFF)
    tail = folder.read(file, first, size - first) or b""
    at = tail.rfind(b"PK\5\6")
    if at < 0:
        raise ValueError("no end of one")
    _, _, _, _, count, length, start, comment = _END.unpack_from(tail, at)
    if at + _END.size + comment != len(tail):
        raise ValueError("an end of one that is not at the end of the file")
    end = first + at
    if _FULL in (length, start) or count == 0xFFFF:
        head = folder.read(file, max(0, end - _LOCATOR.size), _LOCATOR.size) or b""
        if head.startswith(b"PK\6\7"):
            end = _LOCATOR.unpack(head)[2]
            more = folder.read(file, end, _END64.size) or b""
            if not more.startswith(b"PK\6\6"):
                raise ValueError("an end in 64 bits that is not where it should be")
            count, length, start = _END64.unpack(more)[-3:]
    if start + length != end or length > LARGEST:
        raise ValueError(f"one of {length:,} bytes at {start:,}, where {end:,} is its end")
    return start, length, count


def _entries(data: bytes, count: int) -> Iterator[_Entry]:
    at = 0
    if count > len(data) // _DIRECTORY.size:
        raise ValueError(f"one of {len(data):,} bytes for {count:,} members")
    for _ in range(count):
        fields = _DIRECTORY.unpack_from(data, at)
        flags, method, crc, packed, size, start = fields[3], fields[4], *fields[7:10], fields[-1]
        named, extra, comment = fields[10:13]
        at += _DIRECTORY.size
        name = data[at : at + named].decode("utf-8" if flags & 0x800 else "cp437")
        more = _wide(data[at + named : at + named + extra])
        size, packed, start = (next(more) if value == _FULL else value for value in (size, packed, start))
        at += named + extra + comment
        if fields[0] != b"PK\1\2":
            raise ValueError(f"{fields[0]!r} before {name[:80]!r}")
        yield _Entry(name, start, packed, size, crc, method, flags)
    if at != len(data):
        raise ValueError(f"{len(data):,} bytes of one, of which {count:,} members take {at:,}")


def _wide(extra: bytes) -> Iterator[int]:
    """The numbers of 64 bits in the extra field of an entry."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            yield from (number for (number,) in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8]))
        at += 4 + length
    while True:
        yield _FULL


class Unpacked:
    """The deflated members of an archive, each unpacked once it is asked for, in one file without a name."""

    def __init__(self, folder: Folder, file: str, members: list[Member]):
        self._folder, self._file = folder, file
        self._members: dict[str, tuple[Member, int, threading.Lock]] = {}
        self._done: set[str] = set()
        at = 0
        for member in members:
            self._members[member.name] = member, at, threading.Lock()
            at += member.size
        if members:
            temporary = tempfile.TemporaryFile()  # noqa: SIM115  It lives as long as this.
            self._fd = temporary.fileno()
            weakref.finalize(self, temporary.close)

    def __truediv__(self, name: str) -> str:
        return f"{self._folder / self._file}: {name}"

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        """Fills a buffer from a place in a member; returns how many bytes there were."""
        member, base, lock = self._members[name]
        with lock:
            if name not in self._done:
                self._unpack(member, base)
                self._done.add(name)
        done = 0
        while done < len(buffer) and (count := os.preadv(self._fd, [buffer[done:]], base + start + done)):
            done += count
        return done

    def _unpack(self, member: Member, base: int) -> None:
        """Unpacks a member, and never more of it than it should be."""
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        done, crc, at = 0, 0, 0
        rest = b""
        while not unpacker.eof:
            if not rest:
                rest = self._folder.read(self._file, member.start + at, min(PIECE, member.packed - at)) or b""
                at += len(rest)
            try:
                data = unpacker.decompress(rest, GROWN)
            except zlib.error as error:
                raise self._damaged(member, "deflated bytes", f"{error}") from error
            if not data and not rest:
                break
            rest = unpacker.unconsumed_tail
            if done + len(data) > member.size:
                raise self._damaged(member, f"{member.size:,} bytes", "more")
            view = memoryview(data)
            while view:
                count = os.pwrite(self._fd, view, base + done)
                done, crc, view = done + count, zlib.crc32(view[:count], crc), view[count:]
        if done != member.size or crc != member.crc:
            found = f"{done:,} with {crc:08x}"
            raise self._damaged(member, f"{member.size:,} bytes with the CRC {member.crc:08x}", found)

    def _damaged(self, member: Member, expected: str, found: str) -> Corrupt:
        return Corrupt(f"{self._folder / self._file} is damaged", [Fault(member.name, expected, found)])
