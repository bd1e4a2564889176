"""NumPy's files, .npz and .npy, read where they lie, and without pickle (no JAX)."""

import os
import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from . import _chunks, _described, _flat, _manifest, _structure, _view
from ._chunks import Shape
from ._flat import Flat, Source
from ._storage import Folder
from ._view import View
from ._zip import Unpacked, members
from .errors import CheckpointError, Fault, Unsupported

KIND = "NumPy"
MAGIC, SUFFIX = b"\x93NUMPY", ".npy"
DESCRIPTION = f"{_described.KEY}.json"  # The member of an .npz that our own writer adds.
HEAD = 1 << 12  # Bytes in which a header ends, of any array that can be read here.
LOOKED = 10_000  # Entries of a folder and those below it that are looked at for a file of NumPy's.

# The dtypes that NumPy's files name; the others that NumPy can hold, such as bfloat16, become bytes without a meaning.
NAMED = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NAMED += ("float16", "float32", "float64", "complex64", "complex128")
DTYPES = {np.dtype(name).str[1:]: name for name in NAMED}


def is_here(place: Folder) -> bool:
    """Whether a file is .npz or .npy, or a folder or one below it has .npy files; on a file system only.

    A link whose name says so counts: `view` then tells why it is not read.
    """
    if not place.local:
        return False
    if place.is_folder():
        return any(name.endswith(SUFFIX) for name in _names(place))
    if place.name.endswith((SUFFIX, ".npz")):
        return place.exists()
    head = place.parent.read(place.name, 0, len(MAGIC)) or b""
    if not head.startswith(b"PK\3\4"):
        return head == MAGIC
    try:
        return any(member.name.endswith(SUFFIX) for member in members(place.parent, place.name, []))
    except CheckpointError:
        return False


def _names(place: Folder) -> Iterator[str]:
    """The names of some files in a folder and below it."""
    left = LOOKED
    for _, folders, files in os.walk(place.url):
        left -= len(folders) + len(files)
        yield from files
        if left < 0:
            return


def view(place: Folder) -> View:
    """What an .npz file, an .npy file, or a folder of .npy files holds.

    Raises:
        CheckpointError: a file is damaged; tells every fault.
        Unsupported: arrays that are no plain numbers; names all of them.
    """
    if place.is_folder():
        return _folder(place)
    head = place.parent.read(place.name, 0, 4) or b""
    return _zip(place) if head[:2] == b"PK" or place.name.endswith(".npz") else _file(place)


def _file(place: Folder) -> View:
    found = _Found(place)
    for file, size in _flat.sizes(place.parent, [place.name], found.faults).items():
        head = place.parent.read(file, 0, HEAD) or b""
        found.add(_structure.ROOT, file, head, size, (place.parent, file, 0))
    return found.view([place.name], place.parent)


def _folder(place: Folder) -> View:
    found = _Found(place)
    files = [file for file in place.files() if file.endswith(SUFFIX)]
    for file, size in _flat.sizes(place, files, found.faults).items():
        head = place.read(file, 0, HEAD) or b""
        found.add(file.removesuffix(SUFFIX).replace("/", "."), file, head, size, (place, file, 0))
    return found.view(files, place)


def _zip(place: Folder) -> View:
    found = _Found(place)
    folder, file = place.parent, place.name
    inside = list(members(folder, file, found.faults))
    unpacked = Unpacked(folder, file, [member for member in inside if member.deflated])
    description, others = None, []
    for member in inside:
        if not member.name.endswith(SUFFIX):
            if member.name == DESCRIPTION and member.size <= _manifest.LARGEST and not member.deflated:
                description = (folder.read(file, member.start, member.size) or b"").decode("utf-8", "replace")
            elif not member.name.endswith("/"):
                others.append(member.name)
            continue
        name = member.name.removesuffix(SUFFIX).replace("/", ".")
        try:
            head = member.head(folder, file, HEAD)
        except zlib.error as error:
            found.faults.append(Fault(f"{member.name:.80}", "deflated bytes", f"{error}"))
            continue
        place_of = (unpacked, member.name, 0) if member.deflated else (folder, file, member.start)
        found.add(name, member.name, head, member.size, place_of)
    lacks = (f"what it holds besides arrays: {', '.join(others)[:200]}",) if others else ()
    return found.view([file], folder, description, lacks)


class _Found:
    """Arrays as they are found, and what is wrong with them."""

    def __init__(self, place: Folder):
        self.place = place
        self.arrays: dict[str, Flat] = {}
        self.faults: list[Fault] = []
        self.lacking: list[Fault] = []

    def add(self, name: str, at: str, head: bytes, size: int, where: tuple[Source, str, int]) -> None:
        """An array whose .npy file begins with `head` and has `size` bytes.

        Args:
            at: what errors call it.
            where: what gives its bytes, the name in there, and where it begins.
        """
        try:
            name.encode()
            header = _checked(head, size)
        except Unsupported as error:
            self.lacking.append(Fault(f"{at:.80}", "a dtype of plain numbers", error.summary))
        except UnicodeEncodeError:
            self.faults.append(Fault(f"{at!a:.80}", "a name in UTF-8", "another"))
        except ValueError as error:
            self.faults.append(Fault(f"{at:.80}", "an array in NumPy's format", f"{error}"[:200]))
        else:
            if name in self.arrays:
                self.faults.append(Fault(f"{at:.80}", "a name of its own", f"another array is {name:.80} too"))
            source, file, start = where
            self.arrays[name] = Flat(source, file, start + header.length, *header[1:])

    def view(
        self, files: list[str], folder: Folder, description: str | None = None, lacks: tuple[str, ...] = ()
    ) -> View:
        """What was found, if nothing is wrong with it."""
        if self.faults:
            raise _view.refused(self.place.url, "set of NumPy's files", self.faults + self.lacking)
        if self.lacking:
            hint = "save these as numbers; dtypes such as bfloat16 fit in .npy as uint16, or in safetensors as they are"
            raise Unsupported(f"{self.place} has arrays that are no plain numbers", self.lacking, hint)
        arrays = self.arrays
        leaves = {name: _view.array(flat.dtype, flat.shape, _grid(flat)) for name, flat in arrays.items()}
        return _described.view(
            KIND,
            self.place.url,
            leaves,
            lambda name, box: _flat.read(arrays[name], box, name),
            description=description,
            lacks=lacks,
            stamp=_flat.stamp(folder, files),
        )


def _grid(flat: Flat) -> Shape:
    """Chunks that lie in a row in the file, whichever axis runs fastest."""
    order = -1 if flat.fortran else 1
    shape = flat.shape[::order]
    return _chunks.grid(shape, shape, _manifest.itemsize(flat.dtype))[::order]


# --- .npy -------------------------------------------------------------------------------------------------------------


class _Header(NamedTuple):
    length: int
    dtype: str
    shape: Shape
    fortran: bool
    big: bool


# One entry of the header, which is a dict as Python writes it. NumPy evaluates it; that much is not needed.
_ENTRY = re.compile(
    r"""\s*(?P<q>['"])(?P<key>descr|fortran_order|shape)(?P=q)\s*:\s*"""
    r"""(?:['"](?P<text>[^'"]{0,40})['"]|(?P<flag>True|False)|\((?P<shape>[\dL,\s]*)\))\s*(?:,|$)"""
)
_STRUCTURED = re.compile(r"""['"]descr['"]\s*:\s*[\[(]""")
_AXIS = re.compile(r"\s*(\d{1,19})L?\s*")
_KINDS = {"O": "objects, which only pickle reads", "S": "bytes", "U": "text", "a": "bytes", "M": "dates", "m": "times"}
_KINDS |= {"V": "bytes without a meaning (perhaps bfloat16 or another dtype that .npy cannot name)"}


def _checked(head: bytes, size: int) -> _Header:
    """The header of an .npy file of `size` bytes; a ValueError where they are not as many as it says."""
    header = _header(head)
    leaf = _view.array(header.dtype, header.shape)
    if size != (wanted := header.length + _manifest.nbytes(leaf)):
        raise ValueError(f"{size:,} bytes, where a header and {leaf} take {wanted:,}")
    return header


def _header(head: bytes) -> _Header:
    """What the first bytes of an .npy file say.

    Raises:
        ValueError: they are no header.
        Unsupported: of an array of something else than numbers.
    """
    if not head.startswith(MAGIC) or len(head) < len(MAGIC) + 4:
        raise ValueError(f"{head[:8]!r}")
    major, minor = head[6], head[7]
    if (major, minor) not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {major}.{minor}")
    start = 10 if major == 1 else 12
    length = start + int.from_bytes(head[8:start], "little")
    text = head[start:length].decode("utf-8" if major == 3 else "latin-1", "replace").strip()
    if _STRUCTURED.search(text):
        raise Unsupported("records")
    if length > len(head):
        raise ValueError(f"a header of {length:,} bytes")
    told: dict[str, re.Match[str]] = {}
    rest = text[1:-1] if text[:1] == "{" and text[-1:] == "}" else "?"
    while rest.strip():
        if (entry := _ENTRY.match(rest)) is None or entry["key"] in told:
            raise ValueError(f"{text[:100]!r}")
        told[entry["key"]] = entry
        rest = rest[entry.end() :]
    if len(told) != 3 or told["fortran_order"]["flag"] is None or told["shape"]["shape"] is None:
        raise ValueError(f"{text[:100]!r}")
    dtype = told["descr"]["text"] or ""
    axes = told["shape"]["shape"].strip().removesuffix(",")
    sizes = [_AXIS.fullmatch(axis) for axis in axes.split(",")] if axes else []
    if None in sizes:
        raise ValueError(f"the shape ({axes[:80]})")
    shape = tuple(int(size[1]) for size in sizes if size is not None)
    if dtype[:1] not in ("<", ">", "|", "=") or dtype[1:] not in DTYPES:
        kind = _KINDS.get(dtype.lstrip("<>|=")[:1], "another")
        raise Unsupported(f"{dtype!r}: {kind}")
    big = dtype[0] == ">" and not dtype.endswith("1")
    return _Header(length, DTYPES[dtype[1:]], shape, told["fortran_order"]["flag"] == "True", big)
