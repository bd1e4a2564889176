"""Pytrees taken apart into ordered {name: leaf}, with their structure beside it."""

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import jax

from ._structure import LEAF, ROOT, Node, is_key, join
from ._values import DEPTH, pack
from .errors import Fault, Unsupported

NAME_BYTES = 60_000  # OCDBT keys end at 65,535 bytes, and a chunk's coordinates follow the name.


@dataclass(frozen=True, slots=True)
class Flat:
    """A tree taken apart. `leaves` stand in JAX's order, so that they can be put together again."""

    leaves: dict[str, Any]
    structure: Node | str
    tree: Any

    def unflatten(self, values: dict[str, Any]) -> Any:
        """A tree like the one taken apart, with other leaves."""
        # JAX warns of iterators in a tree unless told that they are leaves, and grain's are such.
        iterators = any(hasattr(type(leaf), "__next__") for leaf in self.leaves.values())
        is_leaf = (lambda node: _one_level(node) is None) if iterators else None
        treedef = jax.tree.structure(self.tree, is_leaf=is_leaf)
        return jax.tree.unflatten(treedef, [values[name] for name in self.leaves])


_one_level = jax.tree_util.default_registry.flatten_one_level_with_keys  # pyright: ignore[reportAttributeAccessIssue]


def flatten(tree: Any) -> Flat:
    """Takes a tree apart.

    Raises:
        Unsupported: a dict has keys that no name can stand for, a name is too long, or the tree has no end.
    """
    leaves: dict[str, Any] = {}
    faults: list[Fault] = []

    def walk(node: Any, name: str, depth: int) -> Node | str:
        if depth > DEPTH:
            raise RecursionError
        try:
            level = _one_level(node)
        except ValueError as error:  # Keys that do not compare: JAX has no order for them.
            faults.append(Fault(name or ROOT, "keys that can be sorted", str(error)))
            return Node("none")
        if level is None:
            name = name or ROOT
            if name in leaves:
                faults.append(Fault(name, "one leaf of this name", "two"))
            if len(name.encode()) > NAME_BYTES:
                faults.append(
                    Fault(name[:60] + "…", f"a name of at most {NAME_BYTES:,} bytes", f"{len(name.encode()):,}")
                )
            leaves[name] = node
            return LEAF
        entries, static = level
        kind, keys, children = _describe(node, entries)
        if bad := [k for k in keys if not is_key(k)]:
            faults.append(Fault(name or ROOT, "keys of str, int, bool, None, or tuples of them", repr(bad[0])[:80]))
        return Node(
            kind,
            [walk(child, join(name, key), depth + 1) for key, child in zip(keys, children, strict=True)],
            list(map(pack, keys)) if kind in ("dict", "named") and not bad else [],
            "" if type(node) in _PLAIN else f"{type(node).__module__}.{type(node).__qualname__}",
            _static_digest(static) if kind == "unnamed" else "",
        )

    try:
        structure = walk(tree, "", 0)
        if not faults:
            return Flat(leaves, structure, tree)
    except RecursionError:
        faults.append(Fault(ROOT, f"a tree of at most {DEPTH} levels", "a deeper one, or one that holds itself"))
    raise Unsupported("this tree cannot be saved", faults, hint="dicts with str or int keys always can")


_PLAIN = (dict, list, tuple, type(None))


def _describe(node: Any, entries: Any) -> tuple[str, list[Any], list[Any]]:
    """A container's kind, its children's keys, and the children."""
    if node is None:
        return "none", [], []
    children = [child for _, child in entries]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        # Not from `entries`: up to jax 0.10 they repeat the first field's name.
        return "named", list(node._fields), children  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(node, (list, tuple)):
        return "list" if isinstance(node, list) else "tuple", list(range(len(children))), children
    keys = [key for key, _ in entries]
    if isinstance(node, dict) or (keys and all(isinstance(k, jax.tree_util.DictKey) for k in keys)):
        return "dict", [k.key for k in keys], children
    if all(isinstance(k, jax.tree_util.GetAttrKey) for k in keys):
        return "named", [k.name for k in keys], children
    return "unnamed", list(range(len(children))), children


def _static_digest(static: Any) -> str:
    """A digest of a node's static part; empty where its repr is not the same in every process."""
    text = repr(static)
    return (
        "" if re.search(r"0x[0-9a-f]{6,}", text) else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
    )
