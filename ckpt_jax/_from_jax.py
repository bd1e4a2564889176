"""What JAX's own `array_serialization.pytree_serialization.save` wrote (no JAX, no flatbuffers)."""

import base64
import json
import re
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from . import _flat, _values, _view
from ._chunks import Box
from ._manifest import Leaf
from ._storage import Folder
from ._structure import LEAF, UNTOLD, Node
from ._view import View
from ._zarr_arrays import Arrays
from .errors import Corrupt, Fault

KIND = "checkpoint of JAX"
TREE, STORE = "pytreedef.json", "array_store"
LARGEST = 1 << 28  # Bytes of the JSON.
_ARRAY = re.compile(r"Array\((\w+)\[([0-9, ]*)\]\)")
_NONE = (None, "null")  # How a leaf that is None is written.


def is_here(place: Folder) -> bool:
    """Whether a folder has JAX's description of a tree."""
    return b'"__jax_pytreedef_repr"' in (place.read(TREE, 0, 4096) or b"")


def view(place: Folder) -> View:
    """What a folder of JAX's holds.

    A registered class of which JAX does not write the children's names fits any container of so many children.

    Raises:
        CheckpointError: it is damaged.
        OSError: it cannot be read.
    """
    buffer, told = _description(place)
    classes: set[str] = set()
    try:
        tree = _Tree(buffer, told, classes).root()
        names = _view.names(tree)
    except (ValueError, struct.error, RecursionError) as error:
        raise _view.refused(place.url, KIND, [Fault(TREE, "a tree", str(error))]) from error
    numbers = [number for number, each in enumerate(told) if each not in _NONE]
    where = dict(zip(names, map(str, numbers), strict=True))
    arrays = _opened(place / STORE, where)
    leaves: dict[str, Leaf] = {}
    faults = []
    for (name, number), wanted in zip(where.items(), (told[number] for number in numbers), strict=True):
        try:
            leaf = leaves[name] = arrays.leaf(number)
        except ValueError as error:
            faults.append(Fault(name, "an array", str(error)))
        else:
            if (says := _says(wanted)) != (leaf.dtype, leaf.shape):
                faults.append(Fault(name, f"{wanted!r:.80}, as {TREE} says" if says else "an array", str(leaf)))
    if faults:
        raise _view.refused(place.url, KIND, faults)

    def read(name: str, box: Box) -> np.ndarray:
        return arrays.read(where[name], box, name)

    # JAX writes no chunk of zeros, so that one that is lost reads as zeros.
    lacks = ["digests", "sharding", "whether a chunk of zeros was lost"]
    lacks += [f"the names of what is in a {name}" for name in sorted(classes)]
    stamp = _flat.stamp(place, [TREE, f"{STORE}/manifest.ocdbt"] if where else [TREE]) if place.local else ""
    return View(KIND, place.url, tree, leaves, read, lacks=tuple(lacks), stamp=stamp)


def _description(place: Folder) -> tuple[bytes, list[Any]]:
    """The tree as JAX serialises it, and what each leaf is."""
    try:
        found = msgspec.json.decode(place.read(TREE, most=LARGEST) or b"", type=dict[str, Any])
        buffer, told = found["__jax_pytreedef_repr"], found["__jax_leaf_ids"]
        if not isinstance(told, list) or not all(isinstance(each, (str, type(None))) for each in told):
            raise ValueError("leaves that are not told")  # noqa: TRY301
        return base64.b64decode(buffer, validate=True), told
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        fault = Fault(TREE, "a tree and its leaves in JSON", f"{type(error).__name__}: {error}"[:200])
        raise _view.refused(place.url, KIND, [fault]) from error


def _says(wanted: str) -> tuple[str, tuple[int, ...]] | None:
    """The dtype and shape that the description of a leaf tells."""
    found = _ARRAY.fullmatch(wanted)
    return (found[1], tuple(int(n) for n in found[2].split(",") if n.strip())) if found else None


def _opened(store: Folder, where: dict[str, str]) -> Arrays:
    """The arrays, of zarr's version 3 unless whoever saved asked for 2.

    Raises:
        CheckpointError: some are not there.
    """
    faults: list[Fault] = []
    for zarr3 in (True, False):
        arrays = Arrays(store, ocdbt=True, zarr3=zarr3, fill=True)
        found = arrays.open(where.values())
        if not found:
            return arrays
        if not faults or len(found) < len(faults):
            faults = found
    names = {number: name for name, number in where.items()}
    raise Corrupt(f"{store} is damaged", [Fault(names[each.place], each.expected, each.found) for each in faults])


# --- the tree, in flatbuffers (https://flatbuffers.dev/internals; jax/_src/export/serialization.fbs) ------------------

_KINDS = ("leaf", "none", "tuple", "list", "dict", "custom")
_KIND, _CHILDREN, _NAMES, _CLASS, _AUX = range(5)  # The fields of a node.


class _Tree:
    """A serialised `PyTreeDef`: tables that point at others."""

    def __init__(self, data: bytes, told: list[Any], classes: set[str]):
        self.data, self.classes = data, classes
        self._leaves = iter(told)
        # A table and a text take bytes; such as share theirs could be without end.
        self._room, self._text_room = min(_view.ITEMS, len(data)), _view.TEXT

    def root(self) -> Node | str:
        tree = self.node(self._at("<I", 0), 0)
        if (left := sum(1 for _ in self._leaves)) != 0:
            raise ValueError(f"{left:,} leaves that have no place in it")
        return tree

    def _at(self, form: str, at: int) -> int:
        if at < 0:
            raise ValueError("a table that begins before the file")
        return struct.unpack_from(form, self.data, at)[0]

    def _field(self, table: int, number: int) -> int | None:
        """Where a field of a table lies."""
        known = table - self._at("<i", table)
        entry = 4 + 2 * number
        offset = self._at("<H", known + entry) if entry + 2 <= self._at("<H", known) else 0
        return table + offset if offset else None

    def _vector(self, table: int, number: int) -> tuple[int, int]:
        """Where a vector begins, and how many entries it has."""
        at = self._field(table, number)
        if at is None:
            return 0, 0
        start = at + self._at("<I", at)
        return start + 4, self._at("<I", start)

    def _bytes(self, start: int, size: int) -> bytes:
        if start + size > len(self.data):
            raise ValueError(f"{size:,} bytes where there are {len(self.data) - start:,}")
        self._text_room -= size + 1
        if self._text_room < 0:
            raise ValueError(f"text of more than {_view.TEXT:,} bytes")
        return self.data[start : start + size]

    def _targets(self, table: int, number: int) -> Iterator[int]:
        """Where the things lie that the entries of a vector point at."""
        start, count = self._vector(table, number)
        if count > len(self.data) // 4:
            raise ValueError(f"a node of {count:,} children")
        for at in range(start, start + 4 * count, 4):
            yield at + self._at("<I", at)

    def node(self, table: int, depth: int) -> Node | str:
        """A node, and all that is below it."""
        self._room -= 1
        if depth > _values.DEPTH or self._room < 0:
            raise ValueError(f"more than {_values.DEPTH} levels, or the same one in many places")
        field = self._field(table, _KIND)
        number = 0 if field is None else self._at("<B", field)
        if number >= len(_KINDS):
            raise ValueError(f"a node of the kind {number}, which JAX did not have")
        kind = _KINDS[number]
        children = [self.node(child, depth + 1) for child in self._targets(table, _CHILDREN)]
        if kind == "leaf":
            told = next(self._leaves, self)
            if told is self or children:
                raise ValueError("more leaves than it tells of")
            return Node("none") if told in _NONE else LEAF
        if kind == "custom":
            return self._custom(table, children)
        keys = [self._text(at) for at in self._targets(table, _NAMES)]
        return Node(kind, children, keys)

    def _text(self, at: int) -> str:
        return self._bytes(at + 4, self._at("<I", at)).decode("utf-8")

    def _custom(self, table: int, children: list[Node | str]) -> Node:
        """A registered class; JAX's own and those of named tuples tell their children's names in JSON."""
        name = self._bytes(*self._vector(table, _CLASS)).decode("utf-8")
        try:
            keys = json.loads(self._bytes(*self._vector(table, _AUX)))
        except (ValueError, RecursionError):
            keys = None
        if isinstance(keys, list) and len(keys) == len(children) and all(isinstance(key, str) for key in keys):
            return Node("named", children, keys, name)
        self.classes.add(name)
        return Node("unnamed", children, type=UNTOLD)
