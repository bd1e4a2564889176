"""Quantities as people write them: durations, sizes, rates and counts, with their units (no JAX)."""

import math
import re
from collections.abc import Iterable
from typing import Literal

Kind = Literal["seconds", "bytes", "bytes/s", "count"]

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0  # Seconds.
MONTH, YEAR = 365.25 / 12 * DAY, 365.25 * DAY

_TIMES = {
    "s": 1.0,
    "min": MINUTE,
    "h": HOUR,
    "d": DAY,
    "month": MONTH,
    "year": YEAR,
    "ms": 1e-3,
} | dict.fromkeys(("sec", "second"), 1.0)
_TIMES |= {"minute": MINUTE, "hour": HOUR, "day": DAY, "week": 7 * DAY}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

EXAMPLES: dict[Kind, str] = {
    "seconds": '"90 s", "15 min", "44 h", "30 days" or seconds as a bare number',
    "bytes": '"980 GB", "64 GiB" or bytes as a bare number',
    "bytes/s": '"5 GB/s" or bytes a second as a bare number',
    "count": '"70 B" (billions), "405e9" or a number',
}
LONGEST = 100  # Characters of a quantity.
# Commas stand between groups of three digits only: "1,5 h" is not 15 h.
_NUMBER = re.compile(
    r"\s*([+-]?(?:\d{1,3}(?:[,_]\d{3})+|\d+)(?:\.\d*)?(?:[eE][+-]?\d+)?|[+-]?\.\d+(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*"
)


def parse(value: object, kind: Kind) -> float:
    """A quantity in seconds, bytes, bytes a second or as a bare number.

    Raises:
        ValueError: it is none; tells how one is written.

    >>> parse("44h", "seconds"), parse("980 GB", "bytes"), parse("5 GB/s", "bytes/s"), parse("70B", "count")
    (158400.0, 980000000000.0, 5000000000.0, 70000000000.0)
    """
    number: float | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value) if abs(value) < 1e300 else math.inf
    elif isinstance(value, str) and len(value) <= LONGEST and (found := _NUMBER.fullmatch(value)) is not None:
        scale = _scale(found[2], kind)
        number = None if scale is None else float(re.sub("[_,]", "", found[1])) * scale
    if number is None or not math.isfinite(number):
        told = f"{value!r:.{LONGEST}}" if isinstance(value, (str, float, bool)) else f"a {type(value).__name__}"
        raise ValueError(f"{told} is not of the form {EXAMPLES[kind]}")
    return number


def _scale(unit: str, kind: Kind) -> float | None:
    """What a unit stands for; None if it is none of this kind. A text without one is a slip of the pen."""
    if kind == "count":
        return _COUNTS.get(unit)
    if kind == "seconds":
        return _TIMES.get(unit) or (_TIMES.get(unit[:-1]) if unit.endswith("s") and len(unit) > 3 else None)
    unit = unit.removesuffix("/s") if kind == "bytes/s" and unit.endswith("/s") else unit if kind == "bytes" else ""
    return (_PREFIXES | _BINARY).get(unit.removesuffix("B")) if unit.endswith("B") else None


def listed(words: Iterable[str]) -> str:
    """Words as people list them.

    >>> listed(["process", "node", "rack"])
    'process, node or rack'
    """
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def digits(value: float, count: int = 2) -> str:
    """A number with so many significant digits, and no exponent.

    >>> digits(50789.3), digits(2.7228), digits(0.0689, 3)
    ('51,000', '2.7', '0.0689')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = count - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)  # It may have a digit more now: 99.7 is 100.
    places = count - 1 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:,.{max(0, places)}f}"


def duration(seconds: float) -> str:
    """A duration for people.

    >>> [duration(s) for s in (0.0042, 5, 90, 196, 300, 5820, 9803, 160_200, 2_592_000)]
    ['0.0042 s', '5 s', '90 s', '196 s', '5 min', '97 min', '2.7 h', '44 h', '30 days']
    """
    for unit, name, least in ((DAY, "days", 3 * DAY), (HOUR, "h", 2 * HOUR), (MINUTE, "min", 5 * MINUTE)):
        if seconds >= least or (unit == MINUTE and seconds >= 2 * MINUTE and seconds % MINUTE == 0):
            value = seconds / unit
            return f"{digits(value) if value < 99.5 else f'{value:,.0f}'} {name}".replace(".0 ", " ")
    return f"{digits(seconds, 3) if seconds >= 10 else digits(seconds)} s".replace(".0 ", " ")


def percent(share: float) -> str:
    """A share for people.

    >>> percent(0.0689), percent(0.25), percent(0.00012), percent(0)
    ('6.9 %', '25.0 %', '0.012 %', '0 %')
    """
    if share == 0:
        return "0 %"
    return f"{100 * share:.1f} %" if share >= 0.001 else f"{digits(100 * share)} %"


def several(count: int, noun: str, plural: str = "") -> str:
    """So many of something.

    >>> several(1, "place"), several(1024, "device"), several(2, "leaf", "leaves")
    ('1 place', '1,024 devices', '2 leaves')
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
