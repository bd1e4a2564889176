"""What a run measured of itself: pause, write time, bytes and failures, for a plan (no JAX)."""

import dataclasses
import math
import statistics
from dataclasses import dataclass
from typing import Any

from . import _commit, _events, _storage, _units, _values, plan
from ._plan_file import Setup
from .errors import CheckpointError, Fault

RECENT = 50  # Saves that the medians are of: a run's storage changes over a month.


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run's events and its newest manifest tell.

    Attributes:
        root: the run's folder.
        saves: how many of the newest committed saves the medians are of.
        pause: median seconds for which training stood still.
        write: median seconds that the rest took.
        interval: median seconds between two commits; None where there are none.
        size: bytes of the newest checkpoint.
        failures: how often an error or nothing at all ended the run, in which time, and what follows.
        skipped, failed: saves that were skipped, and that failed.
    """

    root: str
    saves: int
    pause: float
    write: float
    interval: float | None
    size: float
    failures: plan.Fit
    skipped: int
    failed: int


def measured(path: str) -> Measured:
    """What a run measured of itself.

    Raises:
        CheckpointError: there is no run there, or it has committed nothing.
    """
    root = _storage.folder(path)
    if not root.local:
        raise CheckpointError(
            f"{root} is in a bucket, and tells of no run: a Saver writes {_events.FILE} on file systems only",
            [Fault(str(root), "a folder on a file system", "a bucket")],
            hint="give the plan's file the pause, the write and the failures that you know of",
        )
    events = list(_events.read(root))
    commits, gaps, before = list[dict[str, float]](), list[float](), None
    for event in events:
        if event["kind"] == "started":
            before = None  # The time that nothing ran is no interval.
        elif event["kind"] == "committed" and (seconds := _seconds(event)) is not None:
            if before is not None and 0 < event["time"] - before < plan.JUMP:
                gaps.append(event["time"] - before)
            commits.append(seconds)
            before = event["time"]
    newest = next(iter(_commit.good(root)), None)
    if not commits or newest is None:
        found = f"{len(events)} events, {len(commits)} of a commit, {'a' if newest else 'no'} checkpoint"
        raise CheckpointError(
            f"{root} tells of no run that a plan can be made from",
            [Fault(_events.FILE, "events of a Saver that has committed a checkpoint", found)],
            hint="give the folder that a Saver writes to",
        )
    recent, gaps = commits[-RECENT:], gaps[-RECENT:]
    return Measured(
        root=root.url,
        saves=len(recent),
        pause=statistics.median(each["blocked"] for each in recent),
        write=statistics.median(each["all"] for each in recent),
        interval=statistics.median(gaps) if gaps else None,
        size=float(newest[1].nbytes),
        failures=plan.fit_mtbf(events),
        skipped=sum(event["kind"] == "skipped" for event in events),
        failed=sum(event["kind"] == "failed" for event in events),
    )


def _seconds(event: dict[str, Any]) -> dict[str, float] | None:
    try:
        found = event["seconds"]
        seconds = {name: float(found[name]) for name in ("blocked", "all")}
        return seconds if all(0 <= value < math.inf for value in seconds.values()) else None
    except (TypeError, KeyError, ValueError, OverflowError):
        return None


def applied(setup: Setup, found: Measured) -> Setup:
    """A plan with what a run measured in place of what its file says.

    Failures count where there were any: a run in which nothing has failed yet says little of how often it will.
    """
    observed = found.failures.failures > 0 and found.failures.seconds > 0
    local = setup.local
    if local is not None and local.rate is not None and setup.nodes is not None:
        local = dataclasses.replace(local, write=found.size / setup.nodes / local.rate)
    return dataclasses.replace(
        setup,
        name=setup.name or found.root,
        size=found.size or None,
        parameters=None,
        recipe={},
        mtbf=found.failures.mtbf if observed else setup.mtbf,
        observed=(found.failures.failures, found.failures.seconds, setup.devices or 0) if observed else setup.observed,
        local=local,
        shared=dataclasses.replace(
            setup.shared, interval=found.interval or setup.shared.interval, pause=found.pause, write=found.write
        ),
    )


def text(found: Measured) -> str:
    """What a run measured, in sentences."""
    fit, named = found.failures, _units.duration
    every = f"; one every {named(found.interval)}" if found.interval is not None else ""
    lines = [
        f"{found.root}: in the last {_units.several(found.saves, 'save')} the median pause was {named(found.pause)} "
        f"and the median write {named(found.write)}{every}; a checkpoint has {_values.human(found.size)}."
    ]
    if found.skipped or found.failed:
        skipped = f"{_units.several(found.skipped, 'save')} skipped, as the one before was being written"
        lines.append(f"  {skipped}; {found.failed} failed.")
    if fit.failures and not fit.seconds:
        lines.append(f"  {_units.several(fit.failures, 'failure')}, but its clock does not say in which time.")
    elif fit.failures:
        bounds = f"between {named(fit.low)} and {named(fit.high)}, with {fit.confidence:.0%} confidence"
        many = f"{_units.several(fit.failures, 'failure')} in {named(fit.seconds)}"
        lines.append(f"  {many}: one every {named(fit.mtbf)} ({bounds}).")
    else:
        least = (
            f"so a failure is at least {named(fit.low)} from the next, with {(1 + fit.confidence) / 2:.0%} confidence"
        )
        lines.append(f"  Nothing has failed in {named(fit.seconds)}, {least}: too little to plan by.")
    return "\n".join(lines)
