"""Rules: how the leaves of one checkpoint are named in another, as TOML (no JAX)."""

import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from . import _manifest, _units
from ._storage import PathLike
from .errors import CheckpointError, Fault

LARGEST = 1_000_000  # Bytes of a file of rules.
_KEYS = ("match", "regex", "to", "transpose", "split", "sizes", "stack", "cast", "drop", "optional")
_GLOB = re.compile(r"\*\*|\*|\?|[^*?]+")
_GLOBS = {"**": "(.*)", "*": "([^.]*)", "?": "([^.])"}

Rules = PathLike | Sequence[Mapping[str, Any]]  # A TOML file of them, or the same as plain data.


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of the leaves whose names match.

    Attributes:
        text: as it was written.
        pattern: must match a whole name.
        to: the new name, or one for each part of a split; `{1}` is what the first `*` or group stood for; empty for
            the name that it has.
        transpose: True reverses the axes; a tuple is their new order.
        split: the axis that is cut, and the sizes of the parts; all alike where there are none.
        stack: the new axis along which all leaves with the same new name lie, in the order of their names.
        cast: the new dtype.
        drop: whether they are left out.
        optional: whether it may match nothing.
    """

    text: str
    pattern: re.Pattern[str]
    to: tuple[str, ...] = ()
    transpose: bool | tuple[int, ...] = False
    split: int | None = None
    sizes: tuple[int, ...] = ()
    stack: int | None = None
    cast: str = ""
    drop: bool = False
    optional: bool = False


def load(rules: Rules) -> tuple[Rule, ...]:
    """Rules from a TOML file with a `[[rule]]` for each, or from a list of dicts.

    Raises:
        CheckpointError: they are none; tells all places.
        OSError: the file cannot be read.
    """
    if isinstance(rules, Sequence) and not isinstance(rules, (str, bytes)):
        return parse(rules, "rename")
    path = str(rules)
    with open(path, "rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise CheckpointError(f"{path} holds no rules", [Fault(path, "1 MB at most", "more")])
    try:
        tables = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no TOML", [Fault(path, "TOML in UTF-8", f"{error}")]) from error
    found = tables.get("rule", [])
    faults = [Fault(key, "[[rule]]", "an unknown key") for key in tables if key != "rule"]
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        faults, found = [*faults, Fault("rule", "[[rule]] tables", "another value")], []
    if faults:
        raise CheckpointError(f"{path} holds no rules", faults)
    return parse(found, path)


def parse(rules: Sequence[Mapping[str, Any]], path: str) -> tuple[Rule, ...]:
    """As `load`, from plain data."""
    faults: list[Fault] = []
    made = [_rule(rule, f"rule {number}", faults) for number, rule in enumerate(rules, 1)]
    if not rules:
        faults.append(Fault("rule", "at least one [[rule]]", "none"))
    if faults:
        many = _units.several(len(faults), "place")
        raise CheckpointError(f"{path} is no map of names, in {many}", faults, hint="docs/interop.md tells how one is")
    return tuple(made)


def _rule(rule: Any, place: str, faults: list[Fault]) -> Rule:
    def fault(key: str, expected: str, found: object) -> None:
        faults.append(Fault(f"{place}: {key}", expected, found if isinstance(found, str) else f"{found!r:.100}"))

    if not isinstance(rule, Mapping):
        fault("rule", "a table", rule)
        return Rule("", re.compile(""))
    for key in rule:
        if key not in _KEYS:
            fault(str(key), f"one of {', '.join(_KEYS)}", "an unknown key")
    texts = [rule[key] for key in ("match", "regex") if key in rule]
    pattern = re.compile("")
    if len(texts) != 1 or not isinstance(texts[0], str):
        fault("match", "either match (a glob) or regex, a text", texts)
    else:
        try:
            pattern = re.compile(rule["regex"] if "regex" in rule else _regex(rule["match"]), re.DOTALL)
        except re.error as error:
            fault("regex", "a regular expression", f"{error}")
    given = rule.get("to", [])
    to: list[str] = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else []
    if not all(isinstance(each, str) and each for each in to) or ("to" in rule and not to):
        fault("to", "a name, or a list of them for a split", given)
        to = []
    for each in to:
        for number in re.findall(r"\{([^}]*)\}", each):
            if not number.isdigit() or not 0 <= int(number) <= pattern.groups:
                fault("to", f"{{0}} to {{{pattern.groups}}}: what the pattern's parts stood for", each)
    order = rule.get("transpose", False)
    if not isinstance(order, bool) and not (_are_ints(order) and sorted(order) == list(range(len(order)))):
        fault("transpose", "true, or an order of axes such as [1, 0]", order)
        order = False
    axes = {key: rule.get(key) for key in ("split", "stack")}
    for key, axis in axes.items():
        if axis is not None and (not _are_ints([axis]) or axis < 0):
            fault(key, "an axis: 0, 1, …", axis)
            axes[key] = None
    sizes = rule.get("sizes", ())
    if not _are_ints(sizes) or (sizes and (len(sizes) != len(to) or min(sizes) < 0)):
        fault("sizes", "the size of each part of a split", sizes)
        sizes = ()
    if (axes["split"] is None) != (len(to) < 2):
        fault("split", "an axis, and a list of two names or more in `to`", rule.get("split", "none"))
    if axes["stack"] is not None and (axes["split"] is not None or not to):
        fault("stack", "a name in `to`, and no split", rule["stack"])
    cast = rule.get("cast", "")
    if cast and cast not in _manifest.ITEMSIZE:
        fault("cast", "a dtype, such as bfloat16", cast)
    for key in ("drop", "optional"):
        if not isinstance(rule.get(key, False), bool):
            fault(key, "true or false", rule[key])
    if rule.get("drop") is True and set(rule) - {"match", "regex", "drop", "optional"}:
        fault("drop", "nothing else", ", ".join(rule))
    return Rule(
        text=str(texts[0]) if texts else "",
        pattern=pattern,
        to=tuple(to),
        transpose=order if isinstance(order, bool) else tuple(order),
        split=axes["split"],
        sizes=tuple(sizes),
        stack=axes["stack"],
        cast=cast,
        drop=rule.get("drop") is True,
        optional=rule.get("optional") is True,
    )


def _are_ints(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(n, int) and not isinstance(n, bool) for n in value)


def _regex(glob: str) -> str:
    """A glob as a regular expression: `*` is one entry of a name, `**` any number.

    >>> re.fullmatch(_regex("h.*.w"), "h.12.w")[1]
    '12'
    """
    return "".join(_GLOBS.get(part) or re.escape(part) for part in _GLOB.findall(glob))
