"""A view's arrays as one .npz file, not compressed, for `numpy.load` (no JAX)."""

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from . import _described, _in_a_row
from ._from_numpy import DESCRIPTION, MAGIC, NAMED, SUFFIX
from ._in_a_row import Segment, Told, Written, quiet
from ._storage import Folder
from ._view import View
from .errors import Fault, Unsupported

WIDE, MANY = 0xFFFFFFFF, 0xFFFF  # From here on a zip archive says sizes, and numbers of members, in 64 bits.
_FULL, _ALL = 0xFFFFFFFF, 0xFFFF  # What stands in the place of the shorter ones then.
LONGEST = 0xFFFF  # Bytes of a name.
_DATE = 0x21  # 1980-01-01, the first day there is for zip: what is written depends on nothing but what it holds.
_OLD, _NEW = 20, 45  # Versions of the format: what a reader must know, without 64 bits and with them.
_UNIX, _MODE = 3 << 8, 0o100644 << 16
_LATER, _UTF8 = 0x8, 0x800  # Flags: the CRC stands behind the data; the name is in UTF-8.


class _Member(NamedTuple):
    """A file in the archive: its bytes, and where it begins."""

    content: Segment
    start: int

    @property
    def file(self) -> bytes:
        return self.content.name.encode()

    @property
    def flags(self) -> int:
        return _LATER | (0 if self.file.isascii() else _UTF8)

    @property
    def wide(self) -> bool:
        return self.content.length >= WIDE


def write(view: View, dst: Folder, *, told: Told = quiet) -> Written:
    """Writes the arrays of a view, each as the member `<name of the leaf>.npy`.

    PRNG keys go out as their uint32 data. What .npz cannot say (structure, kinds of leaves, scalars, live states, step,
    metrics, metadata) lies beside them in the member `ckpt_jax.json`.

    Args:
        dst: the file.
        told: called with the bytes done, and of how many.

    Raises:
        Unsupported: dtypes or names that .npz lacks; nothing was written.
        Exists: something is at `dst`.
        Corrupt: the source is damaged, or the disk does not give back what was written.
        OSError: as storage says; what was written so far is gone on with the next time.
    """
    _in_a_row.check(dst)
    names = [name for name, leaf in view.leaves.items() if leaf.stored]
    _check(view, names)
    described = _described.dumps(view).encode()
    contents = [Segment(DESCRIPTION, len(described), lambda: [described]), *(_array(view, name) for name in names)]
    size = _in_a_row.file(dst, _archive(contents), told)
    only = tuple(name for name, leaf in view.leaves.items() if not leaf.stored)
    return Written(dst.url, (dst.url,), size, len(names), only)


def _check(view: View, names: list[str]) -> None:
    lacking = [
        Fault(name, "a dtype that .npy names", view.leaves[name].dtype)
        for name in names
        if view.leaves[name].dtype not in NAMED
    ]
    lacking += [
        Fault(f"{name:.80}", f"a name of {LONGEST:,} bytes at most", f"{len((name + SUFFIX).encode()):,}")
        for name in names
        if len((name + SUFFIX).encode()) > LONGEST
    ]
    if lacking:
        hint = "cast them by a rule, leave them out with --only, or write safetensors"
        raise Unsupported(f"{len(lacking)} of {len(names)} arrays do not fit in .npz", lacking, hint)


def _array(view: View, name: str) -> Segment:
    """A leaf as an .npy file."""
    values = _in_a_row.array(view, name)
    leaf = view.leaves[name]
    told = {"descr": np.dtype(leaf.dtype).str, "fortran_order": False, "shape": leaf.shape}
    text = f"{told!r}".encode()
    # Not by NumPy, of which another version may leave other room: a file that was begun is gone on with by any.
    text += b" " * (-(len(MAGIC) + 4 + len(text) + 1) % 64) + b"\n"
    head = MAGIC + bytes((1, 0)) + len(text).to_bytes(2, "little") + text

    def pieces() -> Iterator[bytes | memoryview]:
        yield head
        yield from values.pieces()

    return Segment(name + SUFFIX, len(head) + values.length, pieces)


# --- the archive ------------------------------------------------------------------------------------------------------


def _archive(contents: list[Segment]) -> list[Segment]:
    """A zip archive of stored members, each with its CRC behind it, for it is known only then."""
    crcs: dict[str, int] = {}
    segments: list[Segment] = []
    members: list[_Member] = []
    at = 0
    for content in contents:
        member = _Member(content, at)
        head = _local(member)
        tail = len(_behind(member, 0))
        segments += [
            Segment(f"{content.name}: its header", len(head), lambda head=head: [head]),
            Segment(content.name, content.length, lambda content=content: _summed(content, crcs)),
            Segment(
                f"{content.name}: its CRC", tail, lambda member=member: [_behind(member, crcs[member.content.name])]
            ),
        ]
        members.append(member)
        at += len(head) + content.length + tail
    length = len(_directory(members, dict.fromkeys((content.name for content in contents), 0), at))
    segments.append(Segment("directory", length, lambda: [_directory(members, crcs, at)]))
    return segments


def _summed(content: Segment, crcs: dict[str, int]) -> Iterable[bytes | memoryview]:
    crc = 0
    for piece in content.pieces():
        crc = zlib.crc32(piece, crc)
        yield piece
    crcs[content.name] = crc


def _local(member: _Member) -> bytes:
    extra = struct.pack("<2H2Q", 1, 16, 0, 0) if member.wide else b""
    size = _FULL if member.wide else 0
    version = _NEW if member.wide else _OLD
    fields = version, member.flags, 0, 0, _DATE, 0, size, size, len(member.file), len(extra)
    return struct.pack("<4s5H3L2H", b"PK\3\4", *fields) + member.file + extra


def _behind(member: _Member, crc: int) -> bytes:
    size = member.content.length
    return struct.pack("<4sL2Q" if member.wide else "<4s3L", b"PK\7\10", crc, size, size)


def _directory(members: list[_Member], crcs: dict[str, int], start: int) -> bytes:
    """The archive's directory, which begins at `start`, and its end."""
    entries = b"".join(_entry(member, crcs[member.content.name]) for member in members)
    count, length = len(members), len(entries)
    end = b""
    if count >= MANY or length >= WIDE or start >= WIDE:
        fields = 44, _UNIX | _NEW, _NEW, 0, 0, count, count, length, start
        end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", *fields)
        end += struct.pack("<4sLQL", b"PK\6\7", 0, start + length, 1)
        count, length, start = _ALL, _FULL, _FULL
    return entries + end + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, length, start, 0)


def _entry(member: _Member, crc: int) -> bytes:
    size, start = member.content.length, member.start
    wide = [size, size] if member.wide else []
    wide += [start] if start >= WIDE else []
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version = _NEW if wide else _OLD
    size, start = _FULL if member.wide else size, _FULL if start >= WIDE else start
    fields = _UNIX | version, version, member.flags, 0, 0, _DATE, crc, size, size
    more = len(member.file), len(extra), 0, 0, 0, _MODE, start
    return struct.pack("<4s6H3L5H2L", b"PK\1\2", *fields, *more) + member.file + extra
