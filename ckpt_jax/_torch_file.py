"""The value in a file of `torch.save`, with its tensors as they lie there (no torch, and nothing in it is called)."""

import math
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  Registers bfloat16, float8 and the like with NumPy.
import numpy as np

from . import _chunks, _flat, _manifest, _pickled, _structure, _view, _zipped
from ._chunks import Box, Shape
from ._flat import Flat
from ._pickled import Call, Global, Persistent
from ._zipped import Part

# torch's dtypes that NumPy has too, by torch's names, and by those of its storages.
DTYPES = {
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
}
_STORAGES = {
    **{"BoolStorage": "bool", "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16"},
    **{"IntStorage": "int32", "LongStorage": "int64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"},
    **{"FloatStorage": "float32", "DoubleStorage": "float64", "UntypedStorage": "uint8"},
    **{"ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128"},
}
EXPANDED = 1 << 30  # Bytes that a tensor may have beyond those of its storage, of which it says some many times.
_PLAIN = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_ODD = {
    "_rebuild_sparse_tensor": "a sparse tensor; `.to_dense()` before it is saved makes it one that can be read",
    "_rebuild_qtensor": "a quantized tensor; save `.int_repr()`, scale and zero point",
    "_rebuild_nested_tensor": "a nested tensor; save its parts",
    "_rebuild_meta_tensor_no_storage": "a tensor on the device `meta`, which has no values",
    "_rebuild_wrapper_subclass": "a tensor of a class of its own; save plain tensors",
}


class Tensor(NamedTuple):
    """A tensor: the storage that it lies in, from its first element on, and the steps along its axes in elements."""

    flat: Flat
    shape: Shape
    strides: Shape


class Odd(NamedTuple):
    """What is neither a tensor nor a plain value, in words."""

    says: str


def load(part: Part) -> Any:
    """The value that was saved: plain values and containers, Tensor and Odd.

    torch names what is in a module with dots, in one dict; here these are dicts in dicts.

    Raises:
        ValueError: it is no such file, or is damaged.
        OSError: it cannot be read.
    """
    return _Reader(part).load()


def root(members: dict[str, Any]) -> str | None:
    """The folder inside the zip file that all lies in."""
    roots = [name.removesuffix("data.pkl") for name in members if name.endswith("/data.pkl")]
    return roots[0] if len(roots) == 1 else None


def read(tensor: Tensor, box: Box, name: str) -> np.ndarray:
    """The values of a tensor in a box; errors tell of the leaf `name`.

    Raises:
        Corrupt: the file ends before.
        OSError: it cannot be read.
    """
    if tensor.strides == _in_a_row(tensor.shape):
        return _flat.read(tensor.flat._replace(shape=tensor.shape), box, name)
    values = np.empty(_chunks.extent(box), tensor.flat.dtype)
    if values.size:
        first = sum(start * stride for (start, _), stride in zip(box, tensor.strides, strict=True))
        _fill(values, tensor, first, name)
    return values


def _fill(values: np.ndarray, tensor: Tensor, first: int, name: str) -> None:
    """Reads a box whose first element is a certain one of the storage: all that it spans, or in halves."""
    spans = [(n - 1) * stride for n, stride in zip(values.shape, tensor.strides, strict=True)]
    span, size = 1 + sum(spans), values.dtype.itemsize
    if span * size <= max(_flat.ROWS, 2 * values.nbytes):
        row = _flat.read(tensor.flat, ((first, first + span),), name)
        steps = [stride * size for stride in tensor.strides]
        values[...] = np.lib.stride_tricks.as_strided(row, values.shape, steps, writeable=False)
        return
    axis = spans.index(max(spans))
    half = values.shape[axis] // 2
    for part, at in zip(np.split(values, [half], axis), (0, half), strict=True):
        _fill(part, tensor, first + at * tensor.strides[axis], name)


def _in_a_row(shape: Shape) -> Shape:
    """The strides of an array that lies in a row."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class _Reader:
    """One file: its members, and what was made of its objects."""

    def __init__(self, part: Part):
        self.part = part
        self.members = _zipped.members(part)
        found = root(self.members)
        if found is None:
            raise ValueError("no data.pkl in it, or several")
        self.root = found
        order = self._bytes("byteorder", 16) if f"{found}byteorder" in self.members else b"little"
        if order not in (b"little", b"big"):
            raise ValueError(f"the byte order {order!r}")
        self.big = order == b"big"
        self._made: dict[int, Any] = {}
        self._text = _view.TEXT

    def _bytes(self, name: str, most: int) -> bytes:
        member = self.members[self.root + name]
        if member.size > most:
            raise ValueError(f"{name} of {member.size:,} bytes")
        return self.part.read(_zipped.offset(self.part, self.root + name, member), member.size)

    def load(self) -> Any:
        value = _pickled.loads(self._bytes("data.pkl", _pickled.LARGEST))
        return self._value(value)

    def _value(self, value: Any) -> Any:
        """A plain value, or a tensor; each object once, since it may stand in many places."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._new(value)
        return self._made[id(value)]

    def _new(self, value: Any) -> Any:
        if isinstance(value, Call):
            return self._call(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._value, value))
        if isinstance(value, dict):
            for key in value:
                if not _structure.is_key(key):
                    raise ValueError(f"a dict with a key that is a {type(key).__name__}")
            return _nested({key: self._value(child) for key, child in value.items()})
        if isinstance(value, Global):
            return Odd(f"{value!s:.80}, a class or a function")
        return Odd("a storage without a tensor" if isinstance(value, Persistent) else f"a {type(value).__name__}")

    def _call(self, call: Call) -> Any:
        name = str(call.what)
        if name == "collections.OrderedDict" and isinstance(call.state, dict) and list(call.state) == ["_metadata"]:
            return self._new(dict(call.entries))  # A module's; these are its classes' versions.
        if name == "torch.Size" and len(call.args) == 1 and call.state is None:
            return self._value(call.args[0])
        if name == "_codecs.encode" and call.args and isinstance(call.args[0], str):
            self._text -= len(call.args[0])
            if self._text < 0:
                raise ValueError(f"bytes of more than {_view.TEXT:,} in all")
        made = _pickled.plain(call)
        if made is call:
            return self._tensor(call)
        # Not by `_value`: what was just made may get the address of what was made, and dropped, before.
        return self._new(made) if isinstance(made, dict) else made

    def _tensor(self, call: Call) -> Any:
        """A tensor, or what else would be built."""
        name, args = call.what.name, call.args
        if str(call.what) == "torch._tensor._rebuild_from_type_v2" and len(args) == 4:
            func, kind, inner, state = args
            if isinstance(func, Global) and isinstance(inner, tuple) and str(kind) in _PLAIN and not state:
                return self._tensor(Call(func, inner))
            return Odd(f"a tensor of the class {kind!s:.80}" if isinstance(kind, Global) else "a tensor with a state")
        if call.what.module != "torch._utils" or call.state is not None or call.items or call.entries:
            return Odd(f"an object of {call.what!s:.80}")
        if name == "_rebuild_parameter" and len(args) == 3:
            return self._value(args[0])
        if name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3") and len(args) >= 4:
            return self._strided(*args[:4], more=args[6:])
        return Odd(_ODD.get(name, f"an object of {call.what!s:.80}"))

    def _strided(self, storage: Any, offset: Any, shape: Any, strides: Any, more: tuple[Any, ...]) -> "Tensor | Odd":
        """A tensor in a storage.

        Raises:
            ValueError: it does not lie in it.
        """
        key, kind, count = _stored(storage)
        if str(kind) not in (f"torch.{kind.name}", f"torch.storage.{kind.name}") or kind.name not in _STORAGES:
            return Odd(f"a tensor in a {kind!s:.80}")
        unit, told = _manifest.itemsize(_STORAGES[kind.name]), _STORAGES[kind.name]
        if more and isinstance(more[0], Global):  # Newer dtypes have no storages of their own.
            told, more = more[0].name, more[1:]
            if told not in DTYPES:
                return Odd(f"a tensor of the dtype torch.{told:.60}")
        if any(more):
            return Odd("a conjugate or negative view; `.resolve_conj()` and `.resolve_neg()` before it is saved")
        shape, strides = sizes(shape), sizes(strides)
        try:
            _view.array(told, shape)
        except ValueError as error:
            return Odd(f"a tensor, and {error}")
        member = self.members.get(f"{self.root}data/{key}")
        if member is None or member.size != unit * count:
            size = "none" if member is None else f"{member.size:,}"
            raise ValueError(f"a storage data/{key:.40} of {count * unit:,} bytes, where there are {size}")
        if type(offset) is not int or offset < 0 or len(shape) != len(strides):
            raise ValueError(f"a tensor of the shape {shape} with the strides {strides}")
        size = _manifest.itemsize(told)
        room, span = member.size // size - offset, 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if 0 not in shape and span > room:
            raise ValueError(f"a tensor of {span:,} elements in a storage that has {room:,} from there on")
        if math.prod(shape) * size > member.size + EXPANDED:
            return Odd("a tensor that says some values very many times; save what it was expanded from")
        at = self.part.start + _zipped.offset(self.part, f"{self.root}data/{key}", member)
        flat = Flat(self.part.folder, self.part.file, at + offset * size, told, (max(0, room),), big=self.big)
        row = _in_a_row(shape)
        if 0 in shape or all(n == 1 or a == b for n, a, b in zip(shape, strides, row, strict=True)):
            strides = row
        return Tensor(flat, shape, strides)


def _nested(values: dict[Any, Any]) -> dict[Any, Any]:
    """A module's state as what its names with dots say: containers in containers."""
    if not all(isinstance(key, str) for key in values) or not any("." in key for key in values):
        return values
    found: dict[Any, Any] = {}
    for name, path in _view.split(values).items():
        at = found
        for entry in path[:-1]:
            at = at.setdefault(entry, {})
        at[path[-1]] = values[name]
    return found


def _stored(storage: Any) -> tuple[str, Global, int]:
    """The name, the class and the number of elements of a storage."""
    match storage:
        case Persistent(("storage", Global() as kind, str() as key, _, int() as count)) if count >= 0:
            return key, kind, count
    raise ValueError("a tensor without a storage")


def sizes(value: Any) -> Shape:
    """A tuple of sizes."""
    if isinstance(value, Call) and str(value.what) == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, (tuple, list)) or len(value) > _manifest.AXES:
        raise ValueError("a tensor without a shape")
    if not all(type(n) is int and 0 <= n < 2**62 for n in value):
        raise ValueError("a tensor of an odd shape")
    return tuple(value)
