"""What a soak came to: what was lost, and what a sum says of it; what memory was taken; and how people read it."""

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.torture.soak_trainer import EVERY, MEMORY, RECORD

GROWTH = 24e6  # Bytes that one process may have in use more at its end: a snapshot is 8 MB, and each save makes one.


@dataclass
class Facts:
    """What a soak came to; `faults` is what must not be."""

    seconds: float = 0.0
    blows: Counter[str] = field(default_factory=Counter)
    preempted: int = 0  # Ends by SIGTERM with a last save.
    commits: int = 0
    skipped: int = 0
    resumes: int = 0
    fallbacks: int = 0
    steps: int = 0  # Of the undisturbed run.
    computed: int = 0
    lost: dict[str, list[int]] = field(default_factory=dict)  # Steps, by what struck.
    predicted: float = 0.0  # Steps, for a SIGKILL.
    verified: int = 0  # Bytes.
    memory: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def account(facts: Facts, trainers: Sequence[Path], events: Sequence[dict[str, Any]]) -> None:
    """Fills the facts in from what the trainers left behind, of which the last one was the undisturbed run."""
    kinds = Counter(event["kind"] for event in events)
    facts.commits, facts.skipped, facts.resumes = kinds["committed"], kinds["skipped"], kinds["resumed"]
    for event in events:
        if event["kind"] in ("failed", "rejected", "declined", "warning"):
            facts.faults.append(f"step {event.get('step')} {event['kind']}: {event.get('message')}")
    _lost(facts, trainers[:-1])
    facts.predicted = _predicted([event for event in events if event["kind"] == "committed"])
    if facts.computed != facts.steps + sum(map(sum, facts.lost.values())):
        facts.faults.append(f"{facts.computed} steps were computed, not those of the run and those that were lost")
    if any(facts.lost.get("SIGTERM", ())):
        facts.faults.append(f"SIGTERM cost steps in spite of the last save: {facts.lost['SIGTERM']}")
    _weigh(facts, trainers)


def _lost(facts: Facts, trainers: Sequence[Path]) -> None:
    """From the last step of one trainer to the first of the next; by what struck between the two."""
    at, blows = 0, set[str]()
    for notes in trainers:
        steps = [step for step, *_ in steps_of(notes)]
        facts.computed += len(steps)
        if steps:  # Else it was struck before its first step.
            if steps != list(range(steps[0], steps[0] + len(steps))):
                facts.faults.append(f"{notes.name} left out a step")
            if blows:
                worst = max(blows, key=["SIGTERM", "SIGKILL", "a flipped bit"].index)
                facts.lost.setdefault(worst, []).append(at - steps[0] + 1)
            at, blows = steps[-1], set()
        blow = notes / "blow"
        if blow.exists() and (steps or blow.read_text() == "a flipped bit"):
            blows.add(blow.read_text())


def _predicted(saves: Sequence[dict[str, Any]]) -> float:
    """Half an interval, and what a save takes from its snapshot to its commit: in steps."""
    pairs = [(b["step"] - a["step"], b["time"] - a["time"]) for a, b in itertools.pairwise(saves)]
    near = [(steps, seconds) for steps, seconds in pairs if 0 < steps <= 3 * EVERY and seconds < 3]  # In one trainer.
    if not near:
        return 0.0
    pace = sum(seconds for _, seconds in near) / sum(steps for steps, _ in near)
    write = statistics.mean(event["seconds"]["all"] for event in saves)
    # Where saves were skipped, intervals differ: the longer, the more kills meet it.
    interval = sum(steps * seconds for steps, seconds in near) / sum(seconds for _, seconds in near)
    return interval / 2 + write / pace


def _weigh(facts: Facts, trainers: Sequence[Path]) -> None:
    """Memory from a trainer's fifth commit to its last, and from one trainer to the next."""
    weighed = [_records(notes / "commits", MEMORY) for notes in trainers]
    # The first five take what the next ones take again. Memory goes up and down by what the loop and the writer hold at
    # the moment, by tens of megabytes: hence the least of each third.
    settled = [points[5:] for points in weighed if len(points) >= 11]
    if not settled:
        return
    resident, used = ([[point[which] for point in points] for points in settled] for which in (0, 1))
    growth = [_growth(sizes) for sizes in used]
    least = [min(sizes) for sizes in used]
    facts.memory = {
        "in use after the fifth commit": statistics.median(least),
        "growth of it until the last commit, at most": max(growth),
        f"growth of it in the undisturbed run of {len(weighed[-1])} commits": growth[-1],
        "growth of it from the first trainers to the last": min(least[-3:]) - min(least[:3]),
        "resident after the fifth commit": statistics.median(map(min, resident)),
        # For people: that which malloc keeps in gaps grows for a while.
        "resident, growth of it, at most": max(map(_growth, resident)),
    }
    for what, size in facts.memory.items():
        if what.startswith("growth") and size > GROWTH:
            facts.faults.append(f"memory: {what} is {size / 1e6:.0f} MB")


def _growth(sizes: Sequence[int]) -> int:
    return min(sizes[-(len(sizes) // 3) :]) - min(sizes[: len(sizes) // 3])


def steps_of(notes: Path) -> list[tuple[int, ...]]:
    """Each step that a trainer took: its number, a checksum of its samples, its loss."""
    return _records(notes / "steps", RECORD)


def _records(path: Path, form: Any) -> list[tuple[int, ...]]:
    data = path.read_bytes() if path.exists() else b""
    return [form.unpack_from(data, at) for at in range(0, len(data) - form.size + 1, form.size)]


def table(facts: Facts) -> str:
    """The facts, as people read them."""
    killed = facts.lost.get("SIGKILL", [])
    measured = statistics.mean(killed) if killed else 0.0
    ratio = measured / facts.predicted if facts.predicted else 0.0
    rows = {
        "minutes": f"{facts.seconds / 60:.1f}",
        "blows": ", ".join(f"{number} {blow}" for blow, number in sorted(facts.blows.items())),
        "commits, and saves that were skipped": f"{facts.commits:,}, {facts.skipped:,}",
        "resumes, and fall-backs": f"{facts.resumes}, {facts.fallbacks}",
        "last saves upon SIGTERM": f"{facts.preempted}",
        "steps computed, of the undisturbed run": f"{facts.computed:,}, {facts.steps:,}",
        "steps lost": "; ".join(f"{sum(lost)} by {blow} ({len(lost)} times)" for blow, lost in facts.lost.items()),
        "steps lost by a SIGKILL, predicted, ratio": f"{measured:.1f}, {facts.predicted:.1f}, {ratio:.2f}",
        "bytes verified": f"{facts.verified / 1e9:.2f} GB",
        **{f"memory, {what}": f"{size / 1e6:.0f} MB" for what, size in facts.memory.items()},
        "to the last bit the undisturbed run": "no" if facts.faults else "yes",
    }
    width = max(map(len, rows))
    told = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    return "\n".join(told + [f"FAULT: {fault}" for fault in facts.faults])
