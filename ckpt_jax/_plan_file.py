"""A plan's file: what a cluster, its failures and its saves are, as TOML with units (no JAX)."""

import dataclasses
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import _units, _values, plan
from ._units import DAY, YEAR
from .errors import CheckpointError, Fault

LARGEST = 16_000  # Bytes of a file: of long dotted keys Python's reader takes a time that grows with their square.
SIZE = ("state.parameters", "state.bytes")  # Either says how large a checkpoint is.
CLASSES = ("process", "node", "rack")  # What fails, and with it what it holds: memory, a disk, several disks.


@dataclass(frozen=True, slots=True)
class Saves:
    """How saves to one tier go. None for what is not said.

    Attributes:
        interval: seconds between the beginnings of two.
        pause: seconds in which training stands still; None if it waits for all of it.
        write: seconds that the rest takes behind the training.
        restart: seconds from a failure's notice until the run trains on from there.
        covers: the classes of failures that it survives.
        within: seconds in which the write is to be done.
        rate: bytes a second, where `write` was made of them.
    """

    interval: float | None = None
    pause: float | None = None
    write: float | None = None
    restart: float = 0.0
    covers: tuple[str, ...] = CLASSES
    within: tuple[float, ...] = ()
    rate: float | None = None

    @property
    def blocks(self) -> float:
        """Seconds for which training stands still."""
        return self.pause if self.pause is not None else self.write or 0.0

    @property
    def behind(self) -> float:
        """Seconds that go on behind the training."""
        return (self.write or 0.0) if self.pause is not None else 0.0


@dataclass(frozen=True, slots=True)
class Setup:
    """All that a plan is made from. None for what is not said.

    Attributes:
        name: what it is called.
        size: bytes of a checkpoint.
        parameters, recipe: what that was made from.
        devices, per_node: how many there are, and in one node.
        price: of a device for an hour, in `currency`.
        length: seconds of the run.
        mtbf: seconds between failures of any class; None if they are not counted in.
        observed: failures, seconds and devices that it was made from.
        shares: the part of each class in the failures.
        detection: seconds until a failure is noticed.
        shared: saves to where every node can read them.
        local: saves to where only the node itself can.
        last, daily: which checkpoints stay: how many of the newest, and for how many days one a day.
        notices: seconds of warning before a preemption.
    """

    name: str = ""
    size: float | None = None
    parameters: float | None = None
    recipe: Mapping[str, float] = field(default_factory=dict)
    devices: int | None = None
    per_node: int = 8
    price: float | None = None
    currency: str = "$"
    length: float | None = None
    mtbf: float | None = None
    observed: tuple[float, float, float] | None = None
    shares: Mapping[str, float] = field(default_factory=lambda: {"process": 1.0})
    detection: float = 0.0
    shared: Saves = field(default_factory=Saves)
    local: Saves | None = None
    last: int | None = None
    daily: int = 0
    notices: tuple[float, ...] = ()

    @property
    def nodes(self) -> int | None:
        return None if self.devices is None else -(-self.devices // self.per_node)

    def mtbf_of(self, classes: Iterable[str]) -> float | None:
        """Seconds between failures of some classes; None if failures are not counted in, or there are none such."""
        share = sum(self.shares.get(name, 0.0) for name in classes)
        return self.mtbf / share if self.mtbf is not None and share > 0 else None


def scaled(setup: Setup, factor: float) -> Setup:
    """The same cluster, so many times larger: more devices, which fail as often each; the same state and storage.

    A write that each node does for itself takes so much less time.
    """
    local = setup.local
    larger = dataclasses.replace(setup, devices=setup.devices and max(1, round(setup.devices * factor)))
    if setup.devices is not None and larger.devices is not None:
        factor = larger.devices / setup.devices
    if local is not None and local.write is not None and setup.nodes is not None and larger.nodes is not None:
        local = dataclasses.replace(local, write=local.write * setup.nodes / larger.nodes)
    words = f"{factor:,g} times larger" if factor > 1 else f"{1 / factor:,g} times smaller"
    return dataclasses.replace(
        larger,
        name=f"{setup.name or 'plan'}, {words}",
        mtbf=setup.mtbf and setup.mtbf / factor,
        observed=None,
        local=local,
    )


def load(path: str) -> Setup:
    """A plan from its file.

    Raises:
        CheckpointError: it is no TOML, or keys are unknown, missing or absurd: tells all of them.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise CheckpointError(f"{path} is no plan", [Fault(path, f"{_values.human(LARGEST)} at most", "more")])
    return loads(data, path)


def loads(data: bytes, path: str) -> Setup:
    """As `load`, from the bytes of a file."""
    try:
        tables = tomllib.loads(data.decode("utf-8-sig"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{path} is no TOML", [Fault(path, "TOML in UTF-8", f"{error}")]) from error
    reader = _Reader(tables)
    setup = _setup(reader)
    reader.unknown()
    if reader.faults:
        many = _units.several(len(reader.faults), "place")
        raise CheckpointError(
            f"{path} is no plan, in {many}", reader.faults, hint="docs/plan.md lists all keys, with their units"
        )
    return setup


def _plain(text: str) -> str:
    """A text of which a stranger may have written a part, without what a terminal would obey."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[:500])


class _Reader:
    """Takes values out of tables, and remembers what was wrong with them and what nobody asked for."""

    def __init__(self, tables: dict[str, Any]):
        self.tables, self.faults = tables, list[Fault]()
        self._known: dict[str, set[str]] = {"": set()}
        self.given = set[str]()

    def has(self, section: str) -> bool:
        return bool(self._section(section))

    def _section(self, section: str) -> dict[str, Any]:
        self._known.setdefault(section, set())
        found: Any = self.tables
        for name in section.split("."):
            found = found.get(name, {}) if isinstance(found, dict) else {}
        return found if isinstance(found, dict) else {}

    def _take(self, section: str, key: str) -> Any:
        self._known.setdefault(section, set()).add(key)
        value = (self._section(section) if section else self.tables).get(key)
        if value is not None:
            self.given.add(f"{section}.{key}")
        return value

    def fault(self, place: str, expected: str, found: object) -> None:
        told = found if isinstance(found, str) else _values.shown(found)
        self.faults.append(Fault(*(_plain(text) for text in (place, expected, told))))

    def number(self, section: str, key: str, kind: _units.Kind, low: float, high: float) -> float | None:
        """A quantity between two bounds; None if it is not there, or wrong."""
        value = self._take(section, key)
        return None if value is None else self._quantity(f"{section}.{key}", value, kind, low, high)

    def numbers(self, section: str, key: str, kind: _units.Kind, low: float, high: float) -> tuple[float, ...]:
        value = self._take(section, key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        found = [self._quantity(f"{section}.{key}", item, kind, low, high) for item in items]
        return tuple(item for item in found if item is not None)

    def _quantity(self, place: str, value: object, kind: _units.Kind, low: float, high: float) -> float | None:
        what = {"seconds": "a duration", "bytes": "a size", "bytes/s": "a rate", "count": "a number"}[kind]
        shown: Callable[[float], str] = {
            "seconds": _units.duration,
            "bytes": _values.human,
            "bytes/s": lambda rate: f"{_values.human(rate)}/s",
            "count": lambda count: f"{count:,.15g}",
        }[kind]
        bounds = f"{what} between {shown(low)} and {shown(high)}, such as {_units.EXAMPLES[kind]}"
        try:
            number = _units.parse(value, kind)
        except ValueError:
            return self.fault(place, bounds, value)
        return number if low <= number <= high else self.fault(place, bounds, value)

    def whole(self, section: str, key: str, low: int, high: int) -> int | None:
        value = self._take(section, key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
            return value
        return self.fault(f"{section}.{key}", f"a whole number between {low:,} and {high:,}", value)

    def text(self, section: str, key: str, most: int = 200) -> str | None:
        value = self._take(section, key)
        if value is None or (isinstance(value, str) and len(value) <= most and value.isprintable()):
            return value
        return self.fault(f"{section}.{key}".lstrip("."), f"a text of one line, {most} characters at most", value)

    def table(self, section: str, key: str) -> dict[str, Any] | None:
        value = self._take(section, key)
        if value is None or isinstance(value, dict):
            return value
        return self.fault(f"{section}.{key}", "a table", value)

    def needs(self, expected: str, *places: str) -> None:
        """A fault if none of these keys is there. One that is there and wrong has its fault already."""
        if not self.given.intersection(places):
            self.fault(places[0], expected, "missing")

    def unknown(self) -> None:
        """Faults for what nobody asked for: a key that is misspelt would be passed over in silence."""
        for section, known in self._known.items():
            table = self._section(section) if section else self.tables
            sections = {name.split(".")[0] for name in self._known if name} if not section else set()
            for key, value in table.items():
                if key not in known | sections:
                    allowed = sorted(known | sections)
                    self.fault(f"{section}.{key}".lstrip("."), f"one of {', '.join(allowed)}", "an unknown key")
                elif not section and key in sections - known and not isinstance(value, dict):
                    self.fault(key, f"a table: [{key}]", value)


def _setup(read: _Reader) -> Setup:
    name = read.text("", "name") or ""
    parameters = read.number("state", "parameters", "count", 1, 1e16)
    size = read.number("state", "bytes", "bytes", 1, 1e19)
    recipe = _recipe(read)
    if parameters is not None and size is not None:
        read.fault("state.bytes", "either parameters or bytes", "both")
    if read.has("state"):
        read.needs('the number of parameters, such as "70 B", or state.bytes', *SIZE)
    if parameters is not None:
        size = plan.state_bytes(parameters, recipe)
    devices = read.whole("cluster", "devices", 1, 10**8)
    per_node = read.whole("cluster", "devices_per_node", 1, 10**6) or 8
    price = read.number("cluster", "price", "count", 0, 1e6)
    currency = read.text("cluster", "currency", 8)
    length = read.number("run", "length", "seconds", 60, 20 * YEAR)
    if read.has("cluster"):
        read.needs("the number of devices, such as 1024", "cluster.devices")
    nodes = Setup(devices=devices, per_node=per_node).nodes
    mtbf, observed = _failures(read, devices)
    shared, local = _saves(read, size, nodes)
    last = read.whole("keep", "last", 1, 10**6)
    daily = read.whole("keep", "daily", 0, 10**5)
    notices = read.numbers("preemption", "notice", "seconds", 0, DAY)
    if read.has("keep") or price is not None:
        read.needs('a duration, such as "30 days", by which checkpoints and hours are counted', "run.length")
    if daily:
        read.needs("how many of the newest stay besides: without it all do", "keep.last")
    if read.has("keep"):
        read.needs("the size of a checkpoint, by which those that are kept are counted", *SIZE)
    if shared.within:
        read.needs("the size of a checkpoint, which is to be written within that time", *SIZE)
    if read.has("preemption"):
        read.needs('how long the warning is, such as "120 s"', "preemption.notice")
        read.needs("how long a last save takes", "save.pause", "save.write", "save.bandwidth")
    if not (read.has("state") or read.has("save") or read.has("failures")):
        read.fault("save", "something to plan: [state], [save] or [failures]", "missing")
    return Setup(
        name=name,
        size=size,
        parameters=parameters,
        recipe=recipe if parameters is not None else {},
        devices=devices,
        per_node=per_node,
        price=price,
        currency="$" if currency is None else currency,
        length=length,
        mtbf=mtbf,
        observed=observed,
        shares=_shares(read, local),
        detection=read.number("failures", "detection", "seconds", 0, DAY) or 0.0,
        shared=shared,
        local=local,
        last=last,
        daily=daily or 0,
        notices=notices,
    )


def _recipe(read: _Reader) -> Mapping[str, float]:
    named = read.tables.get("state", {}) if isinstance(read.tables.get("state"), dict) else {}
    if isinstance(named.get("recipe"), dict):
        table = read.table("state", "recipe") or {}
        parts = {part: read.number("state.recipe", part, "count", 0, 64) for part in table}
        if not any(parts.values()):
            read.fault("state.recipe", "bytes a parameter, more than 0 in all", table)
        return {part: count or 0.0 for part, count in parts.items()}
    name = read.text("state", "recipe") or "bf16-adam"
    if name not in plan.RECIPES:
        read.fault("state.recipe", f"one of {', '.join(plan.RECIPES)}, or a table of bytes a parameter", name)
    return plan.RECIPES.get(name, {})


def _failures(read: _Reader, devices: int | None) -> tuple[float | None, tuple[float, float, float] | None]:
    """The time between failures, and what it was made from."""
    mtbf = read.number("failures", "mtbf", "seconds", 1, 1000 * YEAR)
    count = read.number("failures", "count", "count", 1, 1e9)
    over = read.number("failures", "over", "seconds", 60, 100 * YEAR)
    on = read.whole("failures", "devices", 1, 10**8)
    if count is not None:
        read.needs('in which time so many failed, such as "54 days"', "failures.over")
    if over is not None:
        read.needs("how many failures there were in that time", "failures.count")
    if mtbf is not None and count is not None:
        read.fault("failures.count", "either mtbf or count and over", "both")
    if read.has("failures"):
        expected = 'the time between failures, such as "44 h", or failures.count and failures.over'
        read.needs(expected, "failures.mtbf", "failures.count", "failures.over")
    if on is not None:
        read.needs("the number of devices, to which the failures are scaled", "cluster.devices")
    if mtbf is not None and on is not None and devices is not None:
        mtbf *= on / devices  # As it was on so many.
    if count is None or over is None:
        return mtbf, None
    on = on or devices or 1
    return plan.mtbf(count, over, devices=on, to=devices or on), (count, over, on)


def _shares(read: _Reader, local: Saves | None) -> Mapping[str, float]:
    told = read.table("failures", "shares")
    found = {name: read.number("failures.shares", name, "count", 0, 1) for name in CLASSES}
    shares = {name: share for name, share in found.items() if share is not None}
    wrong = told is not None and any(found[name] is None for name in CLASSES if name in told)
    if told is not None and not wrong and abs(sum(shares.values()) - 1) > 1e-6:
        read.fault("failures.shares", "parts that add up to 1", f"{sum(shares.values()):g}")
    small = [name for name, share in shares.items() if 0 < share < 1e-6]
    for name in small:
        read.fault(f"failures.shares.{name}", "0, or a millionth and more", f"{shares[name]:g}")
    if local is not None:
        expected = "the part of process, node and rack in the failures, which are 1 together"
        read.needs(expected, "failures.shares")
    return shares or {"process": 1.0}


def _saves(read: _Reader, size: float | None, nodes: int | None) -> tuple[Saves, Saves | None]:
    """Saves to the shared tier, and to the local one if there is any."""
    restart = read.number("failures", "restart", "seconds", 0, 7 * DAY) or 0.0
    shared = _tier(read, "save", size, "bandwidth")
    share = None if size is None or nodes is None else size / nodes
    local = _tier(read, "local", share, "node_bandwidth") if read.has("local") else None
    covers = read._take("local", "covers")
    if local is not None:
        local_restart = read.number("local", "restart", "seconds", 0, 7 * DAY)
        kinds = covers if isinstance(covers, list) else ["process"] if covers is None else [covers]
        if not kinds or any(kind not in CLASSES for kind in kinds):
            read.fault("local.covers", f"some of {', '.join(CLASSES)}", covers)
            kinds = ["process"]
        covered = tuple(kind for kind in CLASSES if kind in kinds)
        local = dataclasses.replace(local, covers=covered, restart=restart if local_restart is None else local_restart)
        shared = dataclasses.replace(shared, covers=tuple(kind for kind in CLASSES if kind not in covered))
    within = read.numbers("save", "within", "seconds", 0.1, DAY)
    return dataclasses.replace(shared, restart=restart, within=within), local


def _tier(read: _Reader, section: str, size: float | None, rate: str) -> Saves:
    interval = read.number(section, "interval", "seconds", 0.1, 365 * DAY)
    pause = read.number(section, "pause", "seconds", 0, DAY)
    write = read.number(section, "write", "seconds", 0, 7 * DAY)
    speed = read.number(section, rate, "bytes/s", 1e3, 1e16)
    if write is not None and speed is not None:
        read.fault(f"{section}.{rate}", f"either write or {rate}", "both")
    if speed is not None:
        read.needs(f"what {section}.{rate} is to carry", *SIZE)
        if section == "local":
            read.needs(f"what {section}.{rate} is to carry: a node's part", "cluster.devices")
    if speed is not None and size is not None:
        write = size / speed
        if write > 7 * DAY:
            read.fault(f"{section}.{rate}", f"enough for {_values.human(size)} in 7 days", f"{_values.human(speed)}/s")
    blocks = pause if pause is not None else write
    if interval is not None and blocks is not None and interval < blocks:
        at_least = f"at least the {_units.duration(blocks)} for which training stands still"
        read.fault(f"{section}.interval", at_least, _units.duration(interval))
    if read.has(section):
        expected = f'a duration, such as "5 s", or {section}.write, or {section}.{rate}'
        read.needs(expected, *(f"{section}.{key}" for key in ("pause", "write", rate)))
    return Saves(interval, pause, write, rate=speed)
