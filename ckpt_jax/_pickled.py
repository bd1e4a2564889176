"""Pickle streams as inert records: what would be called and built, of which nothing is."""

import pickletools
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from . import _values

LARGEST = 64 << 20  # Bytes of a stream.
STEPS = 1 << 23  # Instructions in it: each costs some two microseconds, and may make an object of some hundred bytes.
INT_BITS = 1 << 16  # Python's sums with larger ones take long.
_KEY_ITEMS, _KEY_BITS, _KEY_DEPTH = 16, 60, 4  # Of a dict's key: larger ones could be made to take long to look up.


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that the stream names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """What lies outside of the stream, by what the stream knows it as."""

    id: Any


@dataclass(slots=True, eq=False)
class Call:
    """An object that unpickling would make: by calling what with what, and what it would then be given.

    Attributes:
        what: a class or a function.
        args: the arguments.
        state: what `__setstate__` would be called with; None if it would not be.
        items: what would be appended to it.
        entries: what would be set in it, in order.
    """

    what: Global
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)
    entries: list[tuple[Any, Any]] = field(default_factory=list)


def loads(data: bytes) -> Any:
    """The value that a stream describes: Python's plain values and containers, and records of all else.

    Nothing is imported, and nothing is called.

    Raises:
        ValueError: it is no such stream, contains itself, or is larger or deeper than any that is read.

    >>> loads(b"cos\\nsystem\\n(S'echo'\\ntR.")
    Call(what=Global(module='os', name='system'), args=('echo',), state=None, items=[], entries=[])
    """
    if len(data) > LARGEST:
        raise ValueError(f"a pickle of {len(data):,} bytes, where {LARGEST:,} are read")
    machine = _Machine()
    try:
        for step, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if step >= STEPS:
                raise ValueError(f"a pickle of more than {STEPS:,} instructions")
            machine.run(opcode.name, argument)
    except (struct.error, OverflowError, LookupError, TypeError, MemoryError, RecursionError, Warning) as error:
        raise ValueError(f"no pickle: {type(error).__name__}: {error}"[:200]) from error
    value = machine.result()
    _check(value)
    return value


def plain(call: Call) -> Any:
    """The plain value that a call would give, where only Python's own types are in it; else the call itself.

    These are what older protocols have no instructions for: bytes, complex numbers, and ordered dicts.
    """
    name = (call.what.module.replace("__builtin__", "builtins"), call.what.name)
    if call.state is not None or call.items:
        return call
    if name == ("collections", "OrderedDict") and not call.args:
        return dict(call.entries)
    if call.entries:
        return call
    if name == ("_codecs", "encode") and len(call.args) == 2 and call.args[1] == "latin1":
        try:
            return call.args[0].encode("latin1") if isinstance(call.args[0], str) else call
        except UnicodeEncodeError:
            return call
    if name == ("builtins", "bytes") and not call.args:
        return b""
    if name == ("builtins", "complex") and [type(part) for part in call.args] == [float, float]:
        return complex(*call.args)
    return call


# --- the machine ------------------------------------------------------------------------------------------------------

_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict}


class _Machine:
    """The stack and the memo of an unpickler."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def result(self) -> Any:
        if len(self.stack) != 1 or self.stack[0] is _MARK:
            raise ValueError("a pickle that does not end with one value")
        return self.stack[0]

    def run(self, name: str, argument: Any) -> None:
        """One instruction."""
        if name in _LITERALS:
            if type(argument) is int and argument.bit_length() > INT_BITS:
                raise ValueError(f"an int of {argument.bit_length():,} bits")
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            self.stack.append(tuple(self._pop(_TUPLES[name])))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = self._top()
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self.stack.append(self.memo[argument])
        elif name == "MARK":
            self.stack.append(_MARK)
        elif name not in ("PROTO", "FRAME", "STOP"):
            self._other(name, argument)

    def _other(self, name: str, argument: Any) -> None:
        match name:
            case "TUPLE":
                self.stack.append(tuple(self._marked()))
            case "LIST":
                self.stack.append(self._marked())
            case "DICT":
                pairs = _pairs(self._marked())
                self.stack.append(dict(pairs))
            case "FROZENSET":
                self.stack.append(Call(Global("builtins", "frozenset"), (self._marked(),)))
            case "EMPTY_SET":
                self.stack.append(Call(Global("builtins", "set"), ()))
            case "APPEND":
                self._append(self._pop(1))
            case "APPENDS" | "ADDITEMS":
                self._append(self._marked())
            case "SETITEM":
                self._set(self._pop(2))
            case "SETITEMS":
                self._set(self._marked())
            case "POP":
                self.stack.pop()
            case "POP_MARK":
                self._marked()
            case "DUP":
                self.stack.append(self._top())
            case "PERSID":
                self.stack.append(Persistent(argument))
            case "BINPERSID":
                self.stack.append(Persistent(*self._pop(1)))
            case "GLOBAL":
                self.stack.append(_named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                self.stack.append(_named(*self._pop(2)))
            case "INST":
                self.stack.append(_call(_named(*argument.split(" ", 1)), tuple(self._marked())))
            case "OBJ":
                what, *args = self._marked()
                self.stack.append(_call(what, tuple(args)))
            case "REDUCE" | "NEWOBJ":
                self.stack.append(_call(*self._pop(2)))
            case "BUILD":
                (state,) = self._pop(1)
                built = self._top()
                if not isinstance(built, Call) or built.state is not None:
                    raise _odd("a state for", built)
                built.state = state
            case _:
                raise ValueError(f"the instruction {name}, which no checkpoint needs")

    def _top(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise ValueError("a pickle that takes from an empty stack")
        return self.stack[-1]

    def _pop(self, count: int) -> list[Any]:
        taken = self.stack[-count:]
        if len(taken) < count or any(each is _MARK for each in taken):
            raise ValueError("a pickle that takes from an empty stack")
        del self.stack[-count:]
        return taken

    def _marked(self) -> list[Any]:
        """What lies above the last mark."""
        at = len(self.stack) - 1
        while at >= 0 and self.stack[at] is not _MARK:
            at -= 1
        if at < 0:
            raise ValueError("a pickle that takes from an empty stack")
        taken = self.stack[at + 1 :]
        del self.stack[at:]
        return taken

    def _append(self, values: list[Any]) -> None:
        top = self._top()
        if not isinstance(top, (list, Call)):
            raise _odd("items for", top)
        (top.items if isinstance(top, Call) else top).extend(values)

    def _set(self, values: list[Any]) -> None:
        pairs, top = _pairs(values), self._top()
        if isinstance(top, Call):
            top.entries.extend(pairs)
        elif isinstance(top, dict):
            top.update(pairs)
        else:
            raise _odd("entries for", top)


def _named(module: Any, name: Any) -> Global:
    if type(module) is not str or type(name) is not str:
        raise ValueError("a class without a name")
    return Global(module, name)


def _call(what: Any, args: Any) -> Call:
    if not isinstance(what, Global) or not isinstance(args, tuple):
        raise _odd("a call of", what)
    return Call(what, args)


def _pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    if len(values) % 2:
        raise ValueError("a key without a value")
    keys = values[::2]
    for key in keys:
        if not _is_key(key, _KEY_DEPTH):
            raise _odd("as a key", key)
    return list(zip(keys, values[1::2], strict=True))


def _is_key(key: Any, depth: int) -> bool:
    """Whether something can be a dict's key, and is quickly looked up, whoever chose it."""
    if type(key) is tuple:
        return depth > 0 and len(key) <= _KEY_ITEMS and all(_is_key(each, depth - 1) for each in key)
    if type(key) is int:
        return key.bit_length() <= _KEY_BITS
    return key is None or isinstance(key, (str, bytes, bool, float, Global, Call, Persistent))


def _odd(what: str, value: Any) -> ValueError:
    """Says what something is, not what it holds: that may be without end."""
    says = str(value.what if isinstance(value, Call) else value) if isinstance(value, (Global, Call)) else ""
    return ValueError(f"{what} {says[:80] or f'a {type(value).__name__}'}")


# --- trust ------------------------------------------------------------------------------------------------------------


def _check(value: Any) -> None:
    """Raises ValueError for what contains itself, or is deeper than can be walked.

    Each object is looked at once, though it stand in many places.
    """
    heights: dict[int, int] = {}
    above: set[int] = set()
    walk = [(value, _children(value))]
    while walk:
        at, children = walk[-1]
        if id(at) not in above:
            above.add(id(at))
        for child in children:
            if id(child) in above:
                raise ValueError("a pickle that contains itself")
            if id(child) not in heights and isinstance(child, (list, tuple, dict, Call, Persistent)):
                walk.append((child, _children(child)))
                if (
                    len(walk) > _values.DEPTH
                ):  # What is deep is told at once; what is deep by way of a shared one, below.
                    raise ValueError(f"a pickle of more than {_values.DEPTH} levels")
                break
        else:
            walk.pop()
            above.discard(id(at))
            heights[id(at)] = 1 + max((heights.get(id(child), 0) for child in _children(at)), default=0)
            if heights[id(at)] > _values.DEPTH:
                raise ValueError(f"a pickle of more than {_values.DEPTH} levels")


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, Persistent):
        yield value.id
    elif isinstance(value, Call):
        yield from (value.args, value.state, value.items)
        for pair in value.entries:
            yield from pair
