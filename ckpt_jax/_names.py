"""Name maps: the leaves of a checkpoint under other names, and cut, joined, transposed or cast on the way."""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import _chunks, _rules, _structure, _units, _view
from ._chunks import Box
from ._manifest import Leaf
from ._rules import Rule, Rules
from ._structure import Node
from ._view import View
from .errors import Fault, Mismatch, Unsupported


class Step(NamedTuple):
    """What became of one leaf, or of several that were stacked."""

    sources: tuple[str, ...]
    target: str
    what: str  # The leaf before, and after.
    rule: str


@dataclasses.dataclass(frozen=True, slots=True)
class Renamed:
    """A checkpoint under other names.

    Attributes:
        view: what can be read of it.
        steps: each leaf that a rule matched.
        dropped: names that a rule left out.
        untouched: names that no rule matched, which stay.
        idle: rules that matched nothing and are not optional.
    """

    view: View
    steps: tuple[Step, ...]
    dropped: tuple[str, ...]
    untouched: tuple[str, ...]
    idle: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"  {' + '.join(_few(step.sources))} -> {step.target}: {step.what}" for step in self.steps]
        lines = [f"{_units.several(len(self.steps), 'leaf', 'leaves')} under a rule:", *lines]
        for what, names in (
            ("left out", self.dropped),
            ("not matched by a rule, and left as they are", self.untouched),
            ("rules that match nothing", self.idle),
        ):
            if names:
                lines += [f"{what} ({len(names):,}):", *(f"  {name}" for name in names)]
        return "\n".join(lines)


def _few(names: tuple[str, ...]) -> tuple[str, ...]:
    return names if len(names) <= 3 else (names[0], f"… {len(names) - 2:,} more …", names[-1])


# --- applied ----------------------------------------------------------------------------------------------------------


class _Made(NamedTuple):
    """A leaf that a rule makes: its record, and how its values are read."""

    leaf: Leaf
    read: Callable[[Box], np.ndarray]
    said: str = ""  # What was done to it.


class _Unfit(Exception):
    """Why a rule cannot be applied to a leaf."""


def renamed(view: View, rules: tuple[Rule, ...]) -> Renamed:
    """A checkpoint under other names. For each name the first rule that matches counts; one that none matches stays.

    Raises:
        Mismatch: a rule does not fit what it matches, or two leaves come to the same name; tells all.
    """
    faults: list[Fault] = []
    made: dict[str, _Made] = {}
    steps: list[Step] = []
    stacks: dict[str, list[tuple[str, _Made, Rule]]] = {}
    dropped, untouched, used = [], [], set[int]()

    def put(sources: tuple[str, ...], target: str, new: _Made, rule: Rule | None) -> None:
        if target in made:
            faults.append(Fault(target, "one leaf for each name", f"another, from {' + '.join(_few(sources))}"))
            return
        made[target] = new
        if rule is not None:
            before = view.leaves[sources[0]]
            many = f"{len(sources):,} × " if rule.stack is not None else ""
            what = f"{many}{before}" if str(before) == str(new.leaf) else f"{many}{before} -> {new.leaf}"
            steps.append(Step(sources, target, what + new.said, rule.text))

    for name, leaf in view.leaves.items():
        number, rule, found = _first(rules, name)
        if rule is None or found is None:
            untouched.append(name)
            put((name,), name, _plain(view, name, leaf), None)
            continue
        used.add(number)
        if rule.drop:
            dropped.append(name)
            continue
        try:
            targets = [_filled(to, found) for to in rule.to] or [name]
            one = _cast(_transposed(_plain(view, name, leaf), rule.transpose), rule.cast if rule.stack is None else "")
            if rule.stack is not None:
                stacks.setdefault(targets[0], []).append((name, one, rule))
                continue
            for target, part in zip(targets, _split(one, rule, len(targets)), strict=True):
                put((name,), target, part, rule)
        except _Unfit as error:
            faults.append(Fault(name, f"a leaf that the rule {rule.text!r} fits", str(error)))
    for target, members in stacks.items():
        members.sort(key=lambda member: _natural(member[0]))
        rule = members[0][2]
        try:
            stacked = _cast(_stacked([one for _, one, _ in members], rule.stack or 0), rule.cast)
            put(tuple(name for name, _, _ in members), target, stacked, rule)
        except _Unfit as error:
            faults.append(Fault(target, f"leaves that the rule {rule.text!r} can stack", str(error)))
    if faults:
        raise Mismatch(f"the rules do not fit {view.path} in {_units.several(len(faults), 'place')}", faults)
    idle = tuple(rule.text for number, rule in enumerate(rules) if number not in used and not rule.optional)
    return Renamed(_view_of(view, made, rules), tuple(steps), tuple(dropped), tuple(untouched), idle)


def apply(view: View, rules: Rules) -> View:
    """A checkpoint under other names.

    Raises:
        Mismatch: also where a rule matches nothing, which is a slip of the pen if it is not marked as optional.
    """
    found = renamed(view, _rules.load(rules))
    if found.idle:
        faults = [Fault(repr(text), "a leaf that it matches", "none") for text in found.idle]
        hint = f"`ckpt-jax show {view.path}` lists the names; optional = true marks a rule that may match nothing"
        raise Mismatch(f"{view.path} has no leaf for some of the rules", faults, hint=hint)
    return found.view


def selected(view: View, patterns: Sequence[str]) -> View:
    """The leaves that globs name, as `only` does in a restore; and no others.

    Raises:
        Mismatch: a glob names nothing.
    """
    asked = {
        pattern: re.compile(f"(?:{fnmatch.translate(pattern)})|(?:{fnmatch.translate(pattern + '.*')})")
        for pattern in patterns
    }
    idle = [pattern for pattern, regex in asked.items() if not any(map(regex.match, view.leaves))]
    if idle:
        faults = [Fault(repr(pattern), "a leaf of this name", "none") for pattern in idle]
        raise Mismatch(f"{view.path} has no leaf that is asked for", faults)
    left = [name for name in view.leaves if not any(regex.match(name) for regex in asked.values())]
    drop = Rule(f"all but {', '.join(patterns)}", re.compile("|".join(map(re.escape, left)) or "(?!)"), drop=True)
    return renamed(view, (drop,)).view


def _first(rules: tuple[Rule, ...], name: str) -> tuple[int, Rule | None, re.Match[str] | None]:
    for number, rule in enumerate(rules):
        if (found := rule.pattern.fullmatch(name)) is not None:
            return number, rule, found
    return -1, None, None


def _filled(to: str, found: re.Match[str]) -> str:
    return re.sub(r"\{(\d+)\}", lambda number: found[int(number[1])] or "", to)


def _natural(name: str) -> list[Any]:
    """Sorts numbers in names as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _plain(view: View, name: str, leaf: Leaf) -> _Made:
    return _Made(leaf, lambda box: view.read(name, box))


def _array(leaf: Leaf, what: str) -> Leaf:
    if leaf.kind != "array":
        raise _Unfit(f"a {leaf.kind} leaf, which nobody can {what}")
    return leaf


def _other(leaf: Leaf, dtype: str, shape: tuple[int, ...]) -> Leaf:
    """The record of an array that was made of another."""
    return _view.array(dtype, shape, host=leaf.host, weak=leaf.weak and dtype == leaf.dtype)


def _transposed(one: _Made, order: bool | tuple[int, ...]) -> _Made:
    if order is False:
        return one
    shape = _array(one.leaf, "transpose").shape
    axes = tuple(reversed(range(len(shape)))) if order is True else order
    if len(axes) != len(shape):
        raise _Unfit(f"{one.leaf}, which has {len(shape)} axes and not {len(axes)}")
    back = tuple(axes.index(axis) for axis in range(len(axes)))
    leaf = _other(one.leaf, one.leaf.dtype, tuple(shape[axis] for axis in axes))
    return _Made(leaf, lambda box: one.read(tuple(box[at] for at in back)).transpose(axes), ", transposed")


def _split(one: _Made, rule: Rule, count: int) -> Iterator[_Made]:
    if rule.split is None:
        yield one
        return
    axis, shape = rule.split, _array(one.leaf, "split").shape
    if axis >= len(shape):
        raise _Unfit(f"{one.leaf}, which has no axis {axis}")
    sizes = rule.sizes or (shape[axis] // count,) * count
    if sum(sizes) != shape[axis]:
        raise _Unfit(f"{one.leaf}, whose axis {axis} is not cut into {count} parts of {', '.join(map(str, sizes))}")
    start = 0
    for size in sizes:
        leaf = _other(one.leaf, one.leaf.dtype, (*shape[:axis], size, *shape[axis + 1 :]))
        yield _Made(leaf, _moved(one.read, axis, start), f"{one.said}, its part from {start:,}")
        start += size


def _moved(read: Callable[[Box], np.ndarray], axis: int, start: int) -> Callable[[Box], np.ndarray]:
    def moved(box: Box) -> np.ndarray:
        low, high = box[axis]
        return read((*box[:axis], (low + start, high + start), *box[axis + 1 :]))

    return moved


def _stacked(members: list[_Made], axis: int) -> _Made:
    first = _array(members[0].leaf, "stack")
    if others := {str(one.leaf) for one in members} - {str(first)}:
        raise _Unfit(f"{first} and {', '.join(sorted(others)[:3])}")
    if axis > len(first.shape):
        raise _Unfit(f"{first}, which can have no new axis {axis}")
    leaf = _other(first, first.dtype, (*first.shape[:axis], len(members), *first.shape[axis:]))

    def read(box: Box) -> np.ndarray:
        low, high = box[axis]
        within = box[:axis] + box[axis + 1 :]
        values = np.empty(_chunks.extent(box), first.dtype)
        for at in range(low, high):
            values[(slice(None),) * axis + (at - low,)] = members[at].read(within)
        return values

    return _Made(leaf, read, f"{members[0].said}, stacked")


def _cast(one: _Made, dtype: str) -> _Made:
    if not dtype or dtype == one.leaf.dtype:
        return one
    leaf = _other(_array(one.leaf, "cast"), dtype, one.leaf.shape)

    def read(box: Box) -> np.ndarray:
        from . import _place  # Here: it imports JAX.

        try:
            return _place.converted(one.read(box), dtype)
        except _place.Unfit as error:
            raise Unsupported(f"a rule's cast to {dtype} would change what is saved: {error}") from error

    return _Made(leaf, read, f"{one.said}, cast")


# --- the tree ---------------------------------------------------------------------------------------------------------


def _view_of(view: View, made: dict[str, _Made], rules: tuple[Rule, ...]) -> View:
    leaves = {name: one.leaf for name, one in made.items()}
    tree = view.tree
    if list(leaves) != list(view.leaves):
        paths: dict[tuple[str, ...], Node | None] = {_path(name): None for name in leaves}
        for name, node in _empties(view.tree, ""):
            _, rule, found = _first(rules, name)
            if rule is None or found is None:
                paths.setdefault(_path(name), node)
            elif not rule.drop and len(rule.to) < 2:
                paths.setdefault(_path(_filled(rule.to[0], found) if rule.to else name), node)
        tree, names = _view.nested(paths, set(_sequences(view.tree, ())).__contains__)
        leaves = {name: leaves[name] for name in names}
    return dataclasses.replace(
        view, tree=tree, leaves=leaves, read=lambda name, box: made[name].read(box), stamp=f"{view.stamp} {rules}"
    )


def _path(name: str) -> tuple[str, ...]:
    return () if name == _structure.ROOT else tuple(map(_structure.unescape, name.split(".")))


def _sequences(node: Node | str, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The paths of the containers of a tree whose entries are positions."""
    if isinstance(node, str):
        return
    if node.kind not in ("dict", "named"):
        yield path
    for key, child in zip(_structure.keys_of(node), node.children, strict=True):
        yield from _sequences(child, (*path, str(key)))


def _empties(node: Node | str, name: str) -> Iterator[tuple[str, Node]]:
    """The empty containers of a tree, by their names."""
    if isinstance(node, str):
        return
    if not node.children:
        yield name or _structure.ROOT, node
    for key, child in zip(_structure.keys_of(node), node.children, strict=True):
        yield from _empties(child, _structure.join(name, key))
