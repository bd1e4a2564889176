"""Flax's msgpack files, with their arrays as they lie there (no JAX, no Flax, no msgpack)."""

import math
import struct
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  Registers bfloat16, float8 and the like with NumPy.
import numpy as np

from . import _commit, _flat, _manifest, _values, _view
from ._chunks import Box
from ._flat import Flat
from ._manifest import Leaf
from ._storage import Folder
from ._structure import UNTOLD
from ._view import View
from .errors import CheckpointError, Fault, Unsupported

KIND = "msgpack file of Flax"
AGGREGATE = "checkpoint"  # The file in the folders of the first Orbax, and the beginning of Flax's own names.
WINDOW = 1 << 16  # Bytes read at once; arrays are stepped over.
_ARRAY, _COMPLEX, _SCALAR, _TUPLE = 1, 2, 3, 4  # Types of extension: the last is Orbax's.
_CHUNKED = "__msgpack_chunked_array__"
_ELSEWHERE = "PLACEHOLDER://"


def is_here(place: Folder) -> bool:
    """Whether a file, or a folder's `checkpoint`, begins as Flax's do: a map whose first key is a word, or an array."""
    found = _file(place)
    if found is None:
        return False
    head = found[0].read(found[1], 0, 256) or b""
    stream = _Stream(*found, len(head))
    try:
        code = stream.take(1)[0]
        if code in (0xC7, 0xC8, 0xC9):
            return stream.number("BHI"[code - 0xC7]) > 0 and stream.take(1)[0] == _ARRAY
        if not 0x80 < code <= 0x8F and code not in (0xDE, 0xDF):
            return code == 0x80 and _flat.size(*found) == 1
        if code > 0x8F:
            stream.number("HI"[code - 0xDE])
        key = _decode(stream, 0)
    except CheckpointError:
        return False
    # The length that a safetensors file begins with may look like a map.
    return isinstance(key, int) or (isinstance(key, str) and key.isprintable() and head[5:9] != b"\0\0\0{")


def view(place: Folder) -> View:
    """What a file of Flax's holds: `flax.serialization.to_bytes`, or a step of `flax.training.checkpoints`.

    Flax makes dicts of lists and tuples; so each container fits any other with the same names.

    Raises:
        CheckpointError: it is damaged.
        Unsupported: it holds what no array is; names all of it.
    """
    found = _file(place)
    if found is None:
        raise _view.refused(place.url, KIND, [Fault(place.url, "a file", "none")])
    folder, file = found
    stream = _Stream(folder, file, _flat.size(folder, file))
    value = _decode(stream, 0)
    if stream.at != stream.end:
        raise stream.odd("the end of the file", f"{stream.end - stream.at:,} more bytes")
    try:
        tree, held = _view.contained(_joined(value), UNTOLD)
    except ValueError as error:
        raise _view.refused(str(folder / file), KIND, [Fault(file, "a tree", str(error))]) from error
    faults = [fault for name, each in held.items() if (fault := _fault(name, each)) is not None]
    if faults:
        raise Unsupported(f"{folder / file} holds what cannot be read in {len(faults)} places", faults)
    arrays = {name: each.flat for name, each in held.items() if isinstance(each, _Array)}

    def read(name: str, box: Box) -> np.ndarray:
        return _flat.read(arrays[name], box, name)

    return View(
        KIND,
        str(folder / file),
        tree,
        {name: _leaf(each) for name, each in held.items()},
        read,
        step=_step(file),
        lacks=("digests", "sharding", "which containers were lists or tuples"),
        stamp=_flat.stamp(folder, [file]),
    )


def _file(place: Folder) -> tuple[Folder, str] | None:
    """The file that a place is, or that lies in it: `checkpoint`, or the newest `checkpoint_<step>`."""
    if not place.local:
        return None
    if not place.is_folder():
        return (place.parent, place.name) if place.parent.plain([place.name]) else None
    entries = place.entries()
    if "_METADATA" in entries:  # Then it is Orbax's to read.
        return None
    steps = {step: name for name in entries if (step := _step(name)) is not None}
    name = AGGREGATE if AGGREGATE in entries else steps[max(steps)] if steps else ""
    return (place, name) if name and place.plain([name]) else None


def _step(file: str) -> int | None:
    return _commit.step_of(file.removeprefix(f"{AGGREGATE}_")) if file.startswith(f"{AGGREGATE}_") else None


# --- leaves -----------------------------------------------------------------------------------------------------------


class _Array(NamedTuple):
    """An array, or a scalar of NumPy's, where it lies."""

    flat: Flat
    scalar: bool


class _Odd(NamedTuple):
    """What has no place in a checkpoint, in words."""

    says: str


def _fault(name: str, value: Any) -> Fault | None:
    """Why something can be no leaf."""
    if isinstance(value, str) and value.startswith(_ELSEWHERE):
        return Fault(name, "its values in this file", f"an array elsewhere, {value[len(_ELSEWHERE) :]!r:.80}")
    return Fault(name, "an array or a plain value", value.says) if isinstance(value, _Odd) else None


def _leaf(value: Any) -> Leaf:
    if isinstance(value, _Array):
        return _view.array(value.flat.dtype, value.flat.shape, host="scalar" if value.scalar else "")
    return _view.scalar(value)


def _joined(value: Any) -> Any:
    """The same with each array that was cut into pieces as one."""
    if isinstance(value, dict) and _CHUNKED in value:
        return _join(value)
    if isinstance(value, dict):
        return {key: _joined(child) for key, child in value.items()}
    return type(value)(map(_joined, value)) if type(value) in (list, tuple) else value


def _join(value: dict[Any, Any]) -> "_Array | _Odd":
    shape, pieces = _row(value.get("shape")), _row(value.get("chunks"))
    if shape is None or not pieces or not all(isinstance(each, _Array) for each in pieces):
        return _Odd("an array in pieces that are none")
    flats = [each.flat for each in pieces]
    try:
        _view.array(flats[0].dtype, shape)
    except ValueError as error:
        return _Odd(f"an array in pieces, and {error}")
    flat = flats[0]._replace(offset=0, shape=tuple(shape), pieces=tuple((each.nbytes, each.offset) for each in flats))
    if {each.dtype for each in flats} != {flat.dtype} or sum(each.nbytes for each in flats) != flat.nbytes:
        return _Odd(f"an array in pieces that do not make one of the shape {flat.shape}")
    return _Array(flat, scalar=False)


def _row(value: Any) -> list[Any] | None:
    """A sequence as Flax lays it down: a dict by positions."""
    if not isinstance(value, dict) or set(value) != {str(at) for at in range(len(value))}:
        return None
    return [value[str(at)] for at in range(len(value))]


# --- msgpack (https://github.com/msgpack/msgpack/blob/master/spec.md) -------------------------------------------------


class _Stream:
    """A file that is read from its beginning, a window at a time."""

    def __init__(self, folder: Folder, file: str, end: int):
        self.folder, self.file, self.end, self.at = folder, file, end, 0
        self.items, self.text = _view.ITEMS, _view.TEXT  # What is still allowed.
        self._window, self._start = b"", 0

    def odd(self, expected: str, found: str) -> CheckpointError:
        return _view.refused(
            str(self.folder / self.file), KIND, [Fault(f"{self.file}, byte {self.at:,}", expected, found)]
        )

    def skip(self, size: int) -> int:
        """Where the next bytes begin, which are passed over."""
        if size > self.end - self.at:
            raise self.odd(f"{size:,} bytes", f"{self.end - self.at:,}")
        self.at += size
        return self.at - size

    def take(self, size: int) -> bytes:
        at = self.skip(size)
        if not self._start <= at <= at + size <= self._start + len(self._window):
            buffer = bytearray(min(max(size, WINDOW), self.end - at))
            found = self.folder.read_into(self.file, at, memoryview(buffer))
            self._window, self._start = bytes(buffer[:found]), at
        taken = self._window[at - self._start : at - self._start + size]
        if len(taken) != size:
            raise self.odd(f"{size:,} bytes", "the end of the file, which became shorter")
        return taken

    def number(self, form: str) -> Any:
        return struct.unpack(f">{form}", self.take(struct.calcsize(form)))[0]

    def words(self, size: int) -> bytes:
        self.text -= size
        if self.text < 0:
            raise self.odd(f"at most {_view.TEXT:,} bytes that are not arrays", "more")
        return self.take(size)


_NUMBERS = dict(zip(range(0xCA, 0xD4), "fdBHIQbhiq", strict=True))
_SIZED = {  # By its code, what it is, and how its size stands there.
    **{0xC4: ("bin", "B"), 0xC5: ("bin", "H"), 0xC6: ("bin", "I")},
    **{0xC7: ("ext", "B"), 0xC8: ("ext", "H"), 0xC9: ("ext", "I")},
    **{0xD9: ("str", "B"), 0xDA: ("str", "H"), 0xDB: ("str", "I")},
    **{0xDC: ("array", "H"), 0xDD: ("array", "I"), 0xDE: ("map", "H"), 0xDF: ("map", "I")},
}


def _head(stream: _Stream) -> tuple[str, Any]:
    """What comes next: its kind, and its value or its size."""
    code = stream.take(1)[0]
    if code < 0x80 or code >= 0xE0:
        return "value", code if code < 0x80 else code - 256
    if code < 0xC0:
        return ("map", code & 15) if code < 0x90 else ("array", code & 15) if code < 0xA0 else ("str", code & 31)
    if code in (0xC0, 0xC2, 0xC3):
        return "value", None if code == 0xC0 else code == 0xC3
    if code in _NUMBERS:
        return "value", stream.number(_NUMBERS[code])
    if 0xD4 <= code <= 0xD8:
        return "ext", 1 << (code - 0xD4)
    if code in _SIZED:
        kind, form = _SIZED[code]
        return kind, stream.number(form)
    raise stream.odd("a value", f"the code 0x{code:02x}, which stands for nothing")


def _decode(stream: _Stream, depth: int) -> Any:
    """One value, and all that is in it.

    Raises:
        CheckpointError: it is none that Flax writes.
    """
    stream.items -= 1
    if depth > _values.DEPTH or stream.items < 0:
        raise stream.odd(f"at most {_values.DEPTH} levels and {_view.ITEMS:,} values", "more")
    kind, found = _head(stream)
    if kind == "str":
        try:
            return stream.words(found).decode("utf-8")
        except UnicodeDecodeError as error:
            raise stream.odd("text", "bytes that are no UTF-8") from error
    if kind == "bin":
        return stream.words(found)
    if kind in ("array", "map"):
        if found > stream.end - stream.at:  # Each takes a byte at least.
            raise stream.odd(f"{found:,} values", f"{stream.end - stream.at:,} bytes")
        if kind == "map":
            return _map(stream, found, depth)
        return [_decode(stream, depth + 1) for _ in range(found)]
    return _extension(stream, found, depth) if kind == "ext" else found


def _map(stream: _Stream, count: int, depth: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for _ in range(count):
        key = _decode(stream, depth + 1)
        if not isinstance(key, (str, int)) or key in found:
            raise stream.odd("a key of its own", _values.shown(key))
        found[key] = _decode(stream, depth + 1)
    return found


def _extension(stream: _Stream, size: int, depth: int) -> Any:
    code = stream.take(1)[0]
    if size > stream.end - stream.at:
        raise stream.odd(f"{size:,} bytes", f"{stream.end - stream.at:,}")
    end = stream.at + size
    if code in (_ARRAY, _SCALAR):
        value: Any = _array(stream, end, scalar=code == _SCALAR)
    elif code in (_COMPLEX, _TUPLE):
        value = _decode(stream, depth + 1)
        if not isinstance(value, list) or (code == _COMPLEX and [type(v) for v in value] != [float, float]):
            raise stream.odd("a complex number or a tuple", _values.shown(value))
        value = complex(*value) if code == _COMPLEX else tuple(value)
    else:
        stream.skip(size)
        value = _Odd(f"an extension of msgpack, number {code}, that Flax does not have")
    if stream.at != end:
        raise stream.odd(f"an extension that ends at {end:,}", f"one that ends at {stream.at:,}")
    return value


def _array(stream: _Stream, end: int, *, scalar: bool) -> "_Array | _Odd":
    """An array: its shape, the name of its dtype, and its bytes, which stay where they are."""
    head = _head(stream), _head(stream)
    if head[0] != ("array", 3) or head[1][0] != "array" or head[1][1] > _manifest.AXES:
        raise stream.odd("an array", "something else")
    shape = tuple(_head(stream) for _ in range(head[1][1]))
    kind, length = _head(stream)
    if kind not in ("str", "bin") or any(at[0] != "value" or type(at[1]) is not int for at in shape):
        raise stream.odd("an array's shape and dtype", "something else")
    dtype = stream.words(length).decode("utf-8", "replace")
    kind, size = _head(stream)
    if kind not in ("str", "bin"):  # Old ones have text that is none.
        raise stream.odd("an array's bytes", "something else")
    offset = stream.skip(size)
    if stream.at != end:
        raise stream.odd(f"an array that ends at {end:,}", f"one that ends at {stream.at:,}")
    shape = tuple(n for _, n in shape)
    try:
        leaf = _view.array(dtype, shape)
    except ValueError as error:
        return _Odd(f"an array, and {error}")
    if size != _manifest.itemsize(dtype) * math.prod(leaf.shape):
        raise stream.odd(f"an array of {leaf}", f"one of {size:,} bytes")
    return _Array(Flat(stream.folder, stream.file, offset, dtype, leaf.shape), scalar)
