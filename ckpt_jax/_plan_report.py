"""What a plan comes to: its sums step by step, in sentences, a table and JSON (no JAX)."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

from . import _values, plan
from ._plan_file import Saves, Setup
from ._units import DAY, HOUR, digits, duration, listed, percent, several
from .plan import Tier

size = functools.partial(_values.human, figures=2)  # As the sums of others are printed.
LEAST = 1.0  # Seconds between two saves that cost nothing.
AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)  # Intervals in the table, in parts of the best one.


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What one interval costs.

    Attributes:
        interval: seconds between the beginnings of two saves to shared storage, as it was asked for.
        every: as it is: where a save takes longer than that, the next is taken once it has ended.
        stall, lost, restart, total: shares of the time, to first order.
        goodput: share of the time in which the run gets ahead: exact for failures without memory; None with two tiers.
        device_hours, money: what is wasted of the run; None where the plan does not tell its length and devices.
        what: "today", "optimum" or "".
    """

    interval: float
    every: float
    stall: float
    lost: float
    restart: float
    total: float
    goodput: float | None
    device_hours: float | None
    money: float | None
    what: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """The checkpoints that stay: how many, and their bytes."""

    checkpoints: float
    bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class Notice:
    """Whether a warning of a preemption is long enough.

    Attributes:
        seconds: of warning.
        least: seconds that a last save takes; None where the plan does not tell how long the write is.
        most: the same where a save has just begun, which must end before.
    """

    seconds: float
    least: float | None
    most: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Sums:
    """All that a plan comes to.

    Attributes:
        setup: what it was made from.
        optimum: seconds between two saves; None if failures are not counted in.
        young, daly: as of `ckpt_jax.plan`; of the failures that shared storage is needed for.
        local: seconds between two saves to the local tier.
        rows: what some intervals cost, in ascending order.
        kept: the checkpoints that stay; None where the plan tells no size, length, or number of them.
        notices: whether each is long enough for a last save.
    """

    setup: Setup
    optimum: float | None
    young: float | None
    daly: float | None
    local: float | None
    rows: tuple[Row, ...]
    kept: Kept | None
    notices: tuple[Notice, ...]

    @property
    def today(self) -> Row | None:
        return next((row for row in self.rows if "today" in row.what), None)

    @property
    def best(self) -> Row | None:
        return next((row for row in self.rows if "optimum" in row.what), None)


def as_json(found: Sums, other: Sums | None = None, run: Any = None) -> dict[str, Any]:
    """The same facts, in seconds, bytes and shares; what is endless is null. `run` is what a run measured."""
    facts = dataclasses.asdict(found)
    if other is not None:
        facts["compared"] = dataclasses.asdict(other)
    if run is not None:
        facts["measured"] = dataclasses.asdict(run)
    return _finite(facts)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- the sums ---------------------------------------------------------------------------------------------------------


def sums(setup: Setup) -> Sums:
    """What a plan comes to."""
    shared = setup.shared
    says = shared.pause is not None or shared.write is not None
    mtbf = setup.mtbf_of(shared.covers)
    best = _best_interval(setup) if says and mtbf is not None else None
    today = shared.interval
    wanted = {factor * best for factor in AROUND if factor * best >= shared.blocks + shared.behind} if best else set()
    wanted |= {today} if today is not None and says else set()
    local = local_interval(setup)
    kept = None
    if setup.size is not None and setup.length is not None and (setup.last is not None or today or best):
        chosen = {"last": setup.last, "daily": setup.daily}
        every = taken(shared, today) if today else best
        held = plan.storage(setup.size, length=setup.length, interval=every, **chosen)
        kept = Kept(held / setup.size, held)
    return Sums(
        setup=setup,
        optimum=best,
        young=None if mtbf is None or not says else plan.young(shared.blocks, mtbf),
        daly=None if mtbf is None or not says else plan.daly(shared.blocks, mtbf),
        local=local,
        rows=tuple(row(setup, interval, best=best) for interval in sorted(wanted)),
        kept=kept,
        notices=tuple(_notice(shared, seconds) for seconds in setup.notices if says),
    )


def local_interval(setup: Setup) -> float | None:
    """Seconds between two saves to the local tier: as is set, or the best."""
    if setup.local is None:
        return None
    mtbf = setup.mtbf_of(setup.local.covers)
    best = None if mtbf is None else plan.optimum(setup.local.blocks, mtbf, write=setup.local.behind, least=LEAST)
    return setup.local.interval or best


def _best_interval(setup: Setup) -> float | None:
    """Seconds between two saves to shared storage that waste the least; None if each costs nothing.

    With two tiers no formula tells it: a crashed process, too, goes on from shared storage where that is newer.
    """
    shared, mtbf = setup.shared, setup.mtbf_of(setup.shared.covers)
    if mtbf is None or not shared.blocks + shared.behind:
        return None
    least = plan.optimum(shared.blocks, mtbf, write=shared.behind, least=LEAST if setup.local else 0.0)
    if setup.local is None:
        return least
    low, best, high = max(shared.blocks + shared.behind, LEAST), least, 4 * least
    for _ in range(3):  # Ever finer.
        steps = [low * (high / low) ** (at / 60) for at in range(61)]
        at = min(range(61), key=lambda at: row(setup, steps[at]).total)
        low, best, high = steps[max(0, at - 1)], steps[at], steps[min(60, at + 1)]
    return best


def _notice(saves: Saves, seconds: float) -> Notice:
    if saves.pause is not None and saves.write is None:
        return Notice(seconds, None, None)
    return Notice(seconds, *plan.last_save(saves.blocks, saves.behind))


def taken(saves: Saves, interval: float) -> float:
    """Seconds between two saves that are taken: one that comes due while another is written is skipped."""
    return interval * max(1, math.ceil((saves.blocks + saves.behind) / interval - 1e-9))


def row(setup: Setup, interval: float, best: float | None = None) -> Row:
    """What one interval between saves to shared storage costs."""
    every = taken(setup.shared, interval)
    shared = _as_tier(setup.shared, every)
    classes: list[tuple[float, list[Tier]]] = [(setup.mtbf_of(setup.shared.covers) or math.inf, [shared])]
    if setup.local is not None and (often := local_interval(setup)) is not None:
        local = _as_tier(setup.local, taken(setup.local, often))
        classes.append((setup.mtbf_of(setup.local.covers) or math.inf, [local, shared]))
    waste = plan.tiered(classes, detection=setup.detection)
    hours = setup.length / HOUR * setup.devices if setup.length is not None and setup.devices is not None else None
    alone = None
    if len(classes) == 1:
        mtbf, at = classes[0][0], setup.detection
        alone = plan.goodput(every, shared.pause, mtbf, write=shared.write, restart=shared.restart, detection=at)
    what = [name for name, at in (("today", setup.shared.interval), ("optimum", best)) if at == interval]
    return Row(
        interval=interval,
        every=every,
        stall=waste.stall,
        lost=waste.lost,
        restart=waste.restart,
        total=waste.total,
        goodput=alone,
        device_hours=None if hours is None else waste.total * hours,
        money=None if hours is None or setup.price is None else waste.total * hours * setup.price,
        what=", ".join(what),
    )


def _as_tier(saves: Saves, interval: float) -> Tier:
    return Tier(interval, saves.blocks, saves.behind, saves.restart)


# --- in words ---------------------------------------------------------------------------------------------------------


def text(found: Sums) -> str:
    """The sums step by step, and the table."""
    setup = found.setup
    parts = [[setup.name or "plan"], [*_state(setup)], [*_failures(setup)], [*_saves(setup)], [*_best(found)]]
    parts += [[*_at(found, each)] for each in (found.today, found.best) if each is not None]
    parts += [
        [*_difference(found)],
        table(found),
        [*_kept(found)],
        [*_rates(found)],
        [*_notices(found)],
        [*_left(found)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _state(setup: Setup) -> Iterator[str]:
    if setup.size is None:
        return
    if setup.parameters is not None:
        each = " + ".join(f"{part} {count:g}" for part, count in setup.recipe.items())
        total = sum(setup.recipe.values())
        yield f"A checkpoint: {_count(setup.parameters)} parameters × {total:g} bytes ({each}) = {size(setup.size)}."
    else:
        yield f"A checkpoint: {size(setup.size)}."
    if setup.devices is not None and setup.nodes is not None:
        shares = f"{size(setup.size / setup.nodes)} a node ({several(setup.nodes, 'node')})"
        yield f"  {shares}, {size(setup.size / setup.devices)} a device ({several(setup.devices, 'device')})."


def _failures(setup: Setup) -> Iterator[str]:
    if setup.mtbf is None:
        return
    if setup.observed is not None:
        count, over, devices = setup.observed
        on = f" on {several(int(devices), 'device')}" if devices and devices != setup.devices else ""
        here = f" on {setup.devices:,}" if on and setup.devices else ""
        many = f"{count:,.0f} in {duration(over)}{on}"
        yield f"Failures: {many}, so {digits(DAY / setup.mtbf)} a day{here}: one every {duration(setup.mtbf)}."
    else:
        yield f"Failures: one every {duration(setup.mtbf)}."
    if setup.local is not None:
        for tier, name in ((setup.local, "its node's own copy"), (setup.shared, "shared storage")):
            mtbf = setup.mtbf_of(tier.covers)
            kinds = [kind for kind in tier.covers if setup.shares.get(kind)]
            if mtbf is not None:
                yield f"  Of a {listed(kinds)}: one every {duration(mtbf)}; the run goes on from {name}."
            else:
                yield f"  None is such that the run goes on from {name}: no best interval follows for that."


def _saves(setup: Setup) -> Iterator[str]:
    named = [("A save", setup.shared)] + ([("A save to the nodes' own disks", setup.local)] if setup.local else [])
    for name, tier in named:
        if tier.pause is None and tier.write is None:
            continue
        if tier.pause is None:
            yield f"{name}: training waits for all of it, {duration(tier.blocks)} (synchronous)."
        elif tier.write is None:
            yield f"{name}: training waits {duration(tier.pause)}; how long the write behind it takes is not said."
        else:
            behind = f"the write takes {duration(tier.write)} behind it (two-stage)"
            yield f"{name}: training waits {duration(tier.pause)}; {behind}."


def _best(found: Sums) -> Iterator[str]:
    setup, shared = found.setup, found.setup.shared
    mtbf = setup.mtbf_of(shared.covers)
    if setup.local is not None and found.local is not None and (often := setup.mtbf_of(setup.local.covers)) is not None:
        root = plan.young(setup.local.blocks, often)
        today = "" if setup.local.interval is None else f"; today {duration(setup.local.interval)}"
        bound = "" if today or found.local <= root else f"; but no save is over before {duration(found.local)}"
        blocks = duration(setup.local.blocks)
        own = f"√(2 × {blocks} × {duration(often)}) = {duration(root)} (Young){today}{bound}"
        yield f"The best interval on the nodes' own disks: {own}."
    if found.optimum is None or found.young is None or found.daly is None or mtbf is None:
        return
    yield (
        f"The best interval: √(2 × {duration(shared.blocks)} × {duration(mtbf)}) = {duration(found.young)} (Young); "
        f"{duration(found.daly)} of training between two saves (Daly)."
    )
    if setup.local is not None:
        yield f"  With what crashed processes take from there too, {duration(found.optimum)} wastes the least."
    elif found.optimum > found.young:
        yield f"  A save takes {duration(found.optimum)}, and the next one begins after it: so that is the best."
    if setup.local is None and (found.optimum > mtbf / 4 or (found.best and _is_rough(found.best))):
        exact, share = exactly_best(setup)
        yield (
            "  Failures come so soon that these sums are too large. By the exact value, the column goodput, every "
            f"{duration(exact)} is best: {percent(share)}."
        )


def exactly_best(setup: Setup) -> tuple[float, float]:
    """The interval with the most goodput by the exact value, in seconds, and that goodput; for one tier."""
    least = max(setup.shared.blocks + setup.shared.behind, 1e-3)
    steps = [least * 10 ** (step / 100) for step in range(400)]
    return max(((step, row(setup, step).goodput or 0.0) for step in steps), key=lambda found: found[1])


def _at(found: Sums, each: Row) -> Iterator[str]:
    setup, shared = found.setup, found.setup.shared
    mtbf = setup.mtbf_of(shared.covers)
    every = duration(each.every)
    yield f"Every {duration(each.interval)}{' (today)' if each is found.today and each is not found.best else ''}:"
    if each.every > each.interval:
        takes = duration(shared.blocks + shared.behind)
        yield f"  A save takes {takes}, and those that come due meanwhile are skipped: it is every {every}."
    if setup.local is not None:
        shares = f"{percent(each.stall)} stall + {percent(each.lost)} lost + {percent(each.restart)} restart"
        yield f"  {shares}, both tiers together"
    else:
        stall = f"{duration(shared.blocks)} / {every} = {percent(each.stall)} stall"
        yield f"  {stall}"
        if mtbf is not None:
            write = f" + {duration(shared.behind)}" if shared.behind else ""
            yield f"  ({every} / 2{write}) / {duration(mtbf)} = {percent(each.lost)} lost"
            if each.restart:
                again = " + ".join(duration(s) for s in (setup.detection, shared.restart) if s)
                again = f"({again})" if " + " in again else again
                yield f"  {again} / {duration(mtbf)} = {percent(each.restart)} restart"
    if each.total >= 1 and (each.goodput is None or each.goodput < 0.001):
        yield "  So such a run never gets ahead."
        return
    if _is_rough(each) and each.goodput is not None:
        ahead = percent(each.goodput)
        yield f"  That is more than it will be: by the exact value the run gets ahead {ahead} of the time."
    cost = f"  {percent(each.total)} in all"
    if each.device_hours is not None and setup.length is not None and setup.devices is not None:
        hours = setup.length / HOUR * setup.devices
        cost += f": {digits(each.device_hours)} of {hours:,.0f} device-hours"
        if each.money is not None and setup.price is not None:
            whole = _money(hours * setup.price, setup.currency, 3)
            cost += f", {_money(each.money, setup.currency)} of {whole}"
    yield cost + "."


def _is_rough(each: Row) -> bool:
    """Whether the sum to first order is far from the exact value."""
    return each.goodput is not None and abs(1 - each.goodput - each.total) > 0.02


def _difference(found: Sums) -> Iterator[str]:
    today, best = found.today, found.best
    if today is None or best is None or today is best or today.total - best.total < 0.0005:
        return
    saved = f"The best interval wastes {percent(best.total)} in place of {percent(today.total)}"
    if today.device_hours is not None and best.device_hours is not None:
        saved += f": {digits(today.device_hours - best.device_hours)} device-hours less"
        if today.money is not None and best.money is not None:
            saved += f", {_money(today.money - best.money, found.setup.currency)}"
    yield saved + "."


def table(found: Sums) -> list[str]:
    """What some intervals cost, a line each."""
    if not found.rows:
        return []
    money = found.setup.currency or "money"
    head = ["interval", "stall", "lost", "restart", "waste", "goodput", "device-hours", money, ""]
    cells = [head]
    for each in found.rows:
        shares = [percent(share) for share in (each.stall, each.lost, each.restart, each.total)]
        exact = "–" if each.goodput is None else f"{100 * each.goodput:.1f} %"
        hours = "–" if each.device_hours is None else digits(each.device_hours, 3)
        cost = "–" if each.money is None else digits(each.money, 3)
        cells.append([duration(each.interval), *shares, exact, hours, cost, each.what])
    used = [at for at, column in enumerate(zip(*cells[1:], strict=True)) if set(column) != {"–"}]
    cells = [[line[at] for at in used] for line in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [
        f"{'  '.join(cell.rjust(width) for cell, width in zip(line[:-1], widths, strict=False))}" for line in cells
    ]
    lines = [f"{line}  {last[-1]}".rstrip() for line, last in zip(right, cells, strict=True)]
    return [*lines, "(waste to first order, goodput exact)"] if "goodput" in cells[0] else lines


def _kept(found: Sums) -> Iterator[str]:
    setup = found.setup
    if found.kept is None or setup.length is None or setup.size is None:
        return
    if setup.last is None:
        policy = f"all of {duration(setup.length)}"
    else:
        days = min(setup.daily, math.ceil(setup.length / DAY))
        policy = f"the last {setup.last}" + f" and one a day for {several(days, 'day')}" * bool(days)
        if found.kept.checkpoints < setup.last + days:
            policy += ", which is all that are made"
    many = f"{found.kept.checkpoints:,.0f} × {size(setup.size)} = {size(found.kept.bytes)}"
    yield f"Storage: {policy}: {many}, and one more while it is written."


def _rates(found: Sums) -> Iterator[str]:
    setup, shared = found.setup, found.setup.shared
    if setup.size is None or (shared.pause is None and shared.write is None):
        return
    needs = [(f"in {duration(seconds)}", seconds) for seconds in shared.within]
    if shared.write:
        needs.append((f"in {duration(shared.write)}", shared.write))
    elif not needs and (every := shared.interval or found.optimum) is not None:
        needs.append((f"before the next one, {duration(every)} later,", every))
    for words, seconds in needs:
        rate = size(plan.bandwidth(setup.size, seconds))
        yield f"Bandwidth: {size(setup.size)} {words} needs {rate}/s, all nodes together."


def _notices(found: Sums) -> Iterator[str]:
    tier = found.setup.shared
    for each in found.notices:
        notice, least, most = each.seconds, each.least, each.most
        if least is None or most is None:
            left = duration(notice - tier.blocks) if notice > tier.blocks else "nothing"
            verdict = f"leaves {left} for the write"
        elif most <= notice:
            verdict = f"is long enough for a last save: {duration(most)} at worst"
        elif least <= notice:
            both = f"where one has just begun, that one must do, as both take {duration(most)}"
            verdict = f"is long enough for a last save ({duration(least)}); {both}"
        else:
            every = tier.interval or found.optimum
            lost = "" if every is None else f", {duration(taken(tier, every) / 2 + tier.behind)} on average"
            verdict = f"is too short for a last save, which takes {duration(least)}"
            verdict += f": the work since the one before is lost{lost}"
        yield f"Preemption: a notice of {duration(notice)} {verdict}."


def _left(found: Sums) -> Iterator[str]:
    """What would have to be said for the best interval."""
    setup, shared = found.setup, found.setup.shared
    if setup.mtbf is None:
        yield "Failures are not counted in: failures.mtbf, or failures.count and failures.over, tell of them."
    if shared.pause is None and shared.write is None:
        yield "What a save takes is not said: save.pause, save.write or save.bandwidth tell it."


def compared(a: Sums, b: Sums) -> str:
    """Two plans side by side: each as it is today, or else at its best."""
    left, right = (found.today or found.best for found in (a, b))
    if left is None or right is None:
        return "There is nothing to compare: one of the two says no interval, and nothing to find the best one from."
    rows = (left, right)
    lines = ["compared"]
    names = [found.setup.name or "plan" for found in (a, b)]
    if names[0] == names[1]:
        names = [f"{name} ({which})" for name, which in zip(names, ("the first", "the second"), strict=True)]
    for found, name, each in zip((a, b), names, rows, strict=True):
        what = "today" if each is found.today else "at its best"
        uncounted = "" if found.setup.mtbf is not None else ", failures not counted in"
        hours = "" if each.device_hours is None else f", {digits(each.device_hours)} device-hours"
        cost = "" if each.money is None else f", {_money(each.money, found.setup.currency)}"
        lines.append(
            f"  {name}: every {duration(each.interval)} ({what}): {percent(each.total)} wasted{hours}{cost}{uncounted}"
        )
    less, more = (1, 0) if rows[1].total <= rows[0].total else (0, 1)
    if abs(rows[0].total - rows[1].total) < 0.0005:
        return "\n".join(
            [*lines, "  Both waste the same."] if (a.setup.mtbf is None) == (b.setup.mtbf is None) else lines
        )
    points = digits(100 * (rows[more].total - rows[less].total))
    words = f"  {names[less]} wastes less: {points} in 100 of the time"
    same = (a.setup.devices, a.setup.length) == (b.setup.devices, b.setup.length)
    if same and rows[0].device_hours is not None and rows[1].device_hours is not None:
        words += f": {digits(abs(rows[0].device_hours - rows[1].device_hours))} device-hours"
        prices = [(each.setup.price, each.setup.currency) for each in (a, b)]
        if rows[0].money is not None and rows[1].money is not None and prices[0] == prices[1]:
            words += f", {_money(abs(rows[0].money - rows[1].money), a.setup.currency)}"
    if (a.setup.mtbf is None) == (b.setup.mtbf is None):
        lines.append(words + ".")
    return "\n".join(lines)


def _count(number: float) -> str:
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:g} {unit}"
    return f"{number:,.0f}"


def _money(amount: float, currency: str, count: int = 2) -> str:
    """An amount, to so many digits.

    >>> _money(43_219, "$"), _money(1_870_000, "$", 3)
    ('$43k', '$1.87M')
    """
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(amount) >= scale:
            return f"{currency}{digits(amount / scale, count)}{unit}"
    return f"{currency}{digits(amount, count)}"
