"""Structures: names of leaves, and containers as plain data (no JAX)."""

import json
import re
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from ._values import DEPTH, shown, unpack
from .errors import Fault

ROOT = "<root>"  # The name of a leaf that is the whole tree.

LEAF = "*"  # Stands for a leaf.
UNTOLD = "?"  # The type of a container of which another format told no more than the names of its children.
NAMES = 1 << 26  # Characters in the names of all containers; one with long keys above it has its name from few bytes.

_NODES = ("dict", "list", "tuple", "none", "named", "unnamed")
_ESCAPED = re.compile(r"[./%\x00-\x1f\x7f\ud800-\udfff]")


class Node(msgspec.Struct, omit_defaults=True, gc=False):
    """A container: a dict, list, tuple or None, or a registered node whose children are `named` or `unnamed`.

    `keys` are a dict's keys or a node's child names, packed. `type` says what class it was;
    nothing is imported to read it. `static` is a digest of an unnamed node's static part.
    """

    kind: str
    children: "list[Node | str]" = []
    keys: list[Any] = []
    type: str = ""
    static: str = ""


def escape(entry: str) -> str:
    """One entry of a path as a part of a name, so that no two paths share a name.

    >>> escape("a.b"), escape("mlp/~/w"), escape("")
    ('a%2Eb', 'mlp%2F~%2Fw', '%')
    """
    if entry.isidentifier():  # Most are, and a regular expression on each took a tenth of a restore.
        return entry
    if not entry:
        return "%"  # Nothing else gives a lone percent sign.
    return _ESCAPED.sub(lambda m: "".join(f"%{byte:02X}" for byte in m[0].encode("utf-8", "surrogatepass")), entry)


def unescape(part: str) -> str:
    """The inverse of `escape`.

    >>> unescape("a%2Eb"), unescape("%")
    ('a.b', '')
    """
    if part == "%":
        return ""
    return urllib.parse.unquote_to_bytes(part).decode("utf-8", "surrogatepass") if "%" in part else part


def part(key: Any) -> str:
    """A dict's key, a position or a field as a part of a name."""
    return escape(json.dumps(key, ensure_ascii=False, separators=(",", ":")) if isinstance(key, tuple) else str(key))


def join(prefix: str, key: Any) -> str:
    """The name of a child: its parent's name, a dot, and its escaped key."""
    return below(prefix, part(key))


def below(prefix: str, entry: str) -> str:
    return f"{prefix}.{entry}" if prefix else entry


def keys_of(node: Node) -> list[Any]:
    """The keys of a node's children, as they are in Python."""
    if node.kind in ("dict", "named"):
        return list(map(unpack, node.keys))
    return list(range(len(node.children)))


def build(structure: Node | str, leaf: Callable[[str], Any], wanted: Callable[[str], bool] = lambda name: True) -> Any:
    """The structure as nested dicts, lists and tuples, with `leaf(name)` for its leaves.

    Leaves that are not `wanted` are left out of dicts, and are None in lists and tuples, whose order means something.
    """
    absent = object()

    def walk(node: Node | str, name: str) -> Any:
        if isinstance(node, str):
            return leaf(name or ROOT) if wanted(name or ROOT) else absent
        if node.kind == "none":
            return None
        items = [(key, walk(child, join(name, key))) for key, child in zip(keys_of(node), node.children, strict=True)]
        if items and all(value is absent for _, value in items):
            return absent
        if node.kind in ("dict", "named"):
            return {key: value for key, value in items if value is not absent}
        values = [None if value is absent else value for _, value in items]
        return tuple(values) if node.kind == "tuple" else values

    tree = walk(structure, "")
    return {} if tree is absent else tree


def differences(
    saved: Node | str, target: Node | str, wanted: Callable[[str], bool]
) -> Iterator[tuple[Literal["missing", "extra", "other"], Fault]]:
    """Where two structures have containers that do not fit each other: `missing` in the checkpoint, `extra` in it, or
    of another kind. Leaves on one side only show in the names, which are the caller's to compare.

    A dict with str keys fits a named node with the same names: names are what leaves are known by. A container whose
    kind was not told fits any that has children of these names.
    """

    def walk(a: Node | str, b: Node | str, name: str) -> Iterator[tuple[Literal["missing", "extra", "other"], Fault]]:
        if not (wanted(name or ROOT) or _any_wanted(a, name, wanted)):
            return
        empty = not _any_leaf(a), not _any_leaf(b)
        if isinstance(a, str) and isinstance(b, str):
            return
        if isinstance(a, str) or isinstance(b, str) or not _fits(a, b):
            yield ("other" if empty[0] == empty[1] else "missing" if empty[0] else "extra"), _fault(name, a, b)
        else:
            ours, theirs = (dict(zip(map(part, keys_of(n)), n.children, strict=True)) for n in (a, b))
            for key, child in ours.items():
                if key in theirs:
                    yield from walk(child, theirs[key], below(name, key))
                elif not _any_leaf(child):
                    yield "extra", Fault(below(name, key), "", "", f"{says(child)} in the checkpoint, not in `like`")
            for key, child in theirs.items():
                if key not in ours and not _any_leaf(child):
                    yield "missing", Fault(below(name, key), "", "", f"{says(child)} in `like`, not in the checkpoint")

    if saved != target:  # Most often they are the same.
        yield from walk(saved, target, "")


def _fits(a: Node, b: Node) -> bool:
    if UNTOLD in (a.type, b.type):
        return "none" not in (a.kind, b.kind)
    if a.kind == b.kind == "dict":
        ours, theirs = ({part(k): type(k) for k in keys_of(n)} for n in (a, b))
        return all(theirs.get(k, t) is t for k, t in ours.items())
    if a.kind == b.kind == "unnamed":
        return not (a.static and b.static) or a.static == b.static
    if {a.kind, b.kind} <= {"dict", "named"}:
        return bool(a.children) == bool(b.children) and all(type(k) is str for n in (a, b) for k in keys_of(n))
    return a.kind == b.kind


def _any_leaf(node: Node | str) -> bool:
    return isinstance(node, str) or any(map(_any_leaf, node.children))


def _any_wanted(node: Node | str, name: str, wanted: Callable[[str], bool]) -> bool:
    if isinstance(node, str):
        return wanted(name or ROOT)
    pairs = zip(keys_of(node), node.children, strict=True)
    return any(_any_wanted(child, join(name, key), wanted) for key, child in pairs)


def _fault(name: str, saved: Node | str, target: Node | str) -> Fault:
    return Fault(name or ROOT, says(target), says(saved), f"checkpoint has {says(saved)}, `like` wants {says(target)}")


def says(node: Node | str) -> str:
    """What a node is, in words."""
    if isinstance(node, str):
        return "a leaf"
    if node.kind == "none":
        return "None"
    if node.type == UNTOLD:
        return f"a container of {len(node.children)}" if node.children else "an empty container"
    kind = node.type.rpartition(".")[2] if node.type else node.kind
    if not node.children:
        return f"an empty {kind}"
    if node.kind == "dict":
        return f"a {kind} with {type(keys_of(node)[0]).__name__} keys"
    return f"a {kind} of {len(node.children)}" + (f" (static part {node.static[:6]})" if node.static else "")


# --- trust ------------------------------------------------------------------------------------------------------------


def names(tree: Node | str) -> Iterator[str]:
    """The names of a structure's leaves, in order.

    Raises:
        ValueError: it is no structure that a tree can have.
    """

    room = NAMES

    def walk(node: Node | str, name: str, depth: int) -> Iterator[str]:
        nonlocal room
        if isinstance(node, str):
            if node != LEAF:
                raise ValueError(f"{node!r:.20} is no node of a tree")
            yield name or ROOT
            return
        if depth > DEPTH:
            raise ValueError(f"more than {DEPTH} levels")
        room -= len(name)
        if room < 0:
            raise ValueError(f"containers whose names have more than {NAMES:,} characters")
        if node.kind not in _NODES or (node.kind == "none" and node.children):
            raise ValueError(f"{node.kind!r:.20} is no kind of node")
        if len(node.keys) != (len(node.children) if node.kind in ("dict", "named") else 0):
            raise ValueError(f"a {node.kind} with {len(node.keys)} keys and {len(node.children)} children")
        parts = [_checked_part(key) for key in keys_of(node)]
        if len(set(parts)) != len(parts):
            raise ValueError(f"a {node.kind} with a key twice")
        for entry, child in zip(parts, node.children, strict=True):
            if child == LEAF:
                yield below(name, entry)
            else:
                yield from walk(child, below(name, entry), depth + 1)

    yield from walk(tree, "", 0)


def _checked_part(key: Any) -> str:
    if not is_key(key):
        raise ValueError(f"{shown(key)} is no key")
    return part(key)


def is_key(key: Any) -> bool:
    """Whether a dict's key can be saved: str, int, bool, None, or a tuple of such."""
    return all(map(is_key, key)) if type(key) is tuple else key is None or type(key) in (str, int, bool)
