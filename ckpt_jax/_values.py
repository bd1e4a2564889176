"""Values in JSON: Python values packed so that they come back exactly, and sizes in words (no JAX)."""

import base64
import math
import struct
from typing import Any

DEPTH = 250  # Levels of a tree or a value: what Python can walk, wherever it is called from.
_EXACT = 2**53  # JSON readers in other languages hold integers exactly up to here.


def pack(value: Any) -> Any:
    """A Python value as JSON that says exactly which value it was.

    Raises:
        TypeError: it holds something that is neither plain data nor an array of numbers.

    >>> pack({"n": 2**70, "x": float("nan"), "b": b"hi"})
    {'n': {'$int': '0x400000000000000000'}, 'x': {'$float': '7ff8000000000000'}, 'b': {'$bytes': 'aGk='}}
    """
    if value is None or isinstance(value, bool):
        return value
    kind = type(value)
    if kind is int:
        return value if abs(value) < _EXACT else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is complex:
        return {"$complex": [pack(value.real), pack(value.imag)]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is str:
        return _pack_str(value)
    if kind is list:
        return [pack(v) for v in value]
    if kind is tuple:
        return {"$tuple": [pack(v) for v in value]}
    if kind is dict:
        if all(type(k) is str and not k.startswith("$") and _pack_str(k) is k for k in value):
            return {k: pack(v) for k, v in value.items()}
        return {"$dict": [[pack(k), pack(v)] for k, v in value.items()]}
    return _pack_array(value)


def _pack_str(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # Lone surrogates, which no JSON in UTF-8 holds.
        return {"$str": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    return value


def _pack_array(value: Any) -> Any:
    import numpy as np

    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        little = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"))
        raw = base64.b64encode(little.tobytes()).decode()
        return {"$array": [value.dtype.name, list(value.shape), raw], "$scalar": isinstance(value, np.generic)}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not plain data: {value!r:.80}")


def unpack(value: Any) -> Any:
    """The inverse of `pack`.

    Raises:
        ValueError: it is nothing that `pack` writes.
    """
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    if not any(k.startswith("$") for k in value):
        return {k: unpack(v) for k, v in value.items()}
    try:
        (tag, data), *_ = value.items()
        if tag == "$array":
            return _unpack_array(*data, scalar=value["$scalar"])
        return _UNPACK[tag](data)
    except (LookupError, TypeError, ValueError, OverflowError, MemoryError, struct.error) as error:
        raise ValueError(f"not a packed value: {shown(value)}") from error


def _unpack_array(dtype: str, shape: list[int], raw: str, *, scalar: bool) -> Any:
    import numpy as np

    array = np.frombuffer(_from_base64(raw), np.dtype(dtype)).reshape(shape).copy()
    return array[()] if scalar else array


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_UNPACK = {
    "$int": lambda v: int(v, 16),
    "$float": lambda v: struct.unpack(">d", bytes.fromhex(v))[0],
    "$complex": lambda v: complex(unpack(v[0]), unpack(v[1])),
    "$bytes": _from_base64,
    "$str": lambda v: _from_base64(v).decode("utf-8", "surrogatepass"),
    "$tuple": lambda v: tuple(unpack(x) for x in v),
    "$dict": lambda v: {unpack(k): unpack(x) for k, x in v},
}


def human(size: float, figures: int = 3) -> str:
    """A size in bytes for people, to two or three figures.

    >>> human(1_490_000_000), human(7.66e9, 2), human(980e9, 2)
    ('1.49 GB', '7.7 GB', '980 GB')
    """
    units = iter(("B", "kB", "MB", "GB", "TB", "PB", "EB"))
    while (unit := next(units)) != "EB" and size >= 999.5:
        size /= 1000
    return f"{size:.{figures}g} {unit}" if size < 10**figures - 0.5 else f"{size:,.0f} {unit}"


def shown(value: Any) -> str:
    """A value for people, in some 80 characters."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python writes no int of more than 4,300 digits.
        return f"a {type(value).__name__} of very many digits"
    except RecursionError:
        return f"a {type(value).__name__} nested very deep"


def too_deep(value: Any) -> bool:
    """Whether a packed value has more levels than can be walked."""
    level = [value]
    for _ in range(DEPTH):
        level = [
            child
            for node in level
            for child in (node if isinstance(node, list) else node.values() if isinstance(node, dict) else ())
        ]
        if not level:
            return False
    return True
