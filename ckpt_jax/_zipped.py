"""Where the members of a zip file lie, which may itself be a part of a file."""

import struct
from typing import NamedTuple

from . import _flat
from ._storage import Folder

_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_ENTRY, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"
_ENCRYPTED = 1
LARGEST = 64 << 20  # Bytes of a directory.
_TEXT = (1 << 16) - 1  # Bytes of the longest comment.
_LONG = 0xFFFFFFFF  # A number that stands elsewhere, in eight bytes.


class Part(NamedTuple):
    """A part of a file, or all of it."""

    folder: Folder
    file: str
    start: int
    size: int

    def read(self, at: int, size: int) -> bytes:
        """Some of its bytes.

        Raises:
            ValueError: there are none such.
        """
        if not 0 <= at <= at + size <= self.size:
            raise ValueError(f"bytes {at:,} to {at + size:,} of a part of {self.size:,}")
        buffer = bytearray(size)
        if self.folder.read_into(self.file, self.start + at, memoryview(buffer)) != size:
            raise ValueError(f"bytes {at:,} to {at + size:,}, which the file does not have")
        return bytes(buffer)


class Member(NamedTuple):
    """A member: where its bytes begin in the part, and whether they are stored as they are."""

    header: int
    size: int
    stored: bool


def whole(folder: Folder, file: str) -> Part:
    return Part(folder, file, 0, _flat.size(folder, file))


def is_here(part: Part) -> bool:
    return part.size >= 22 and part.read(0, 4) == _LOCAL


def members(part: Part) -> dict[str, Member]:
    """The members by their names, as the directory at the end tells.

    Raises:
        ValueError: there is no such directory, or it contradicts itself.
        OSError: the file cannot be read.
    """
    start, size, count = _directory(part)
    if size > LARGEST:
        raise ValueError(f"a directory of {size:,} bytes")
    data, at = part.read(start, size), 0
    found: dict[str, Member] = {}
    for _ in range(count):
        if data[at : at + 4] != _ENTRY or at + 46 > size:
            raise ValueError(f"{count:,} members, and entries for {len(found):,}")
        flags, method, packed, unpacked, named, extra, comment, header = struct.unpack_from("<8xHH8xIIHHH8xI", data, at)
        if at + 46 + named + extra + comment > size:
            raise ValueError(f"an entry that goes on beyond the directory, of {size:,} bytes")
        name = data[at + 46 : at + 46 + named].decode("utf-8", "replace")
        more = data[at + 46 + named : at + 46 + named + extra]
        unpacked, packed, header = _longs(more, [unpacked, packed, header])
        _check_name(name, found)
        if header + 30 + packed > start:
            raise ValueError(f"the member {name!r:.80}, of {packed:,} bytes at {header:,}, beyond its end")
        stored = method == 0 and packed == unpacked and not flags & _ENCRYPTED
        found[name] = Member(header, packed, stored)
        at += 46 + named + extra + comment
    return found


def _check_name(name: str, found: dict[str, Member]) -> None:
    if name in found:
        raise ValueError(f"two members {name!r:.80}")
    if ".." in name.split("/") or name.startswith("/") or "\\" in name or "\0" in name:
        raise ValueError(f"the member {name!r:.80}, which leads out of it")


def offset(part: Part, name: str, member: Member) -> int:
    """Where a member's bytes begin, in the part.

    Raises:
        ValueError: it is packed, or not there.
    """
    if not member.stored:
        raise ValueError(f"the member {name!r:.80}, which is compressed or encrypted")
    head = part.read(member.header, 30)
    named, extra = struct.unpack_from("<HH", head, 26)
    at = member.header + 30 + named + extra
    if head[:4] != _LOCAL or part.read(member.header + 30, named).decode("utf-8", "replace") != name:
        raise ValueError(f"another member where {name!r:.80} should be")
    if at + member.size > part.size:
        raise ValueError(f"the member {name!r:.80}, beyond its end")
    return at


def _directory(part: Part) -> tuple[int, int, int]:
    """Where the directory begins, its bytes, and how many members it has."""
    tail = part.read(max(0, part.size - 22 - _TEXT), min(part.size, 22 + _TEXT))
    at = len(tail) - 22
    while at >= 0:
        at = tail.rfind(_END, 0, at + 4)
        if at < 0 or (at + 22 <= len(tail) and at + 22 + struct.unpack_from("<H", tail, at + 20)[0] == len(tail)):
            break
        at -= 1
    if at < 0:
        raise ValueError("no directory at its end: it is cut off")
    count, size, start = struct.unpack_from("<10xHII", tail, at)
    end = part.size - len(tail) + at
    if at >= 20 and tail[at - 20 : at - 16] == _LOCATOR:
        end = struct.unpack_from("<Q", tail, at - 20 + 8)[0]
        long = part.read(end, 56)
        if long[:4] != _END64:
            raise ValueError(f"no directory at {end:,}")
        count, size, start = struct.unpack_from("<32xQQQ", long)
    if start + size > end or count > size // 46:
        raise ValueError(f"a directory of {count:,} members in {size:,} bytes at {start:,}, which ends at {end:,}")
    return start, size, count


def _longs(extra: bytes, numbers: list[int]) -> list[int]:
    """Numbers that do not fit in four bytes, from where they stand."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        field = extra[at + 4 : at + 4 + size]
        if kind == 1:
            longs = iter(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
            return [next(longs, _LONG) if number == _LONG else number for number in numbers]
        at += 4 + size
    return numbers
