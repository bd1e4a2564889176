"""The checks: what must hold once a run was killed and another one took over, each with what was found."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ckpt_jax

from .._values import human
from . import settings

# Another mesh adds the same numbers in another order, so the losses drift apart by rounding: over ten steps by 7e-7 at
# most. With other dropout keys, and all else the same, they were 7e-3 apart.
ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold, and what was found."""

    holds: bool
    claim: str
    found: str


@dataclass(frozen=True, slots=True)
class Step:
    """One training step, as the trainer told of it."""

    loss: float
    positions: tuple[int, ...]  # Where in the text its samples begin.
    seconds: float


def killed(root: Path, step: int, attempt: Path) -> list[Check]:
    """A kill in the middle of a save leaves the checkpoint before it newest, and whole."""
    left = [path.stat().st_size for path in attempt.rglob("*") if path.is_file()]
    steps = ckpt_jax.steps(root)
    newest = ckpt_jax.latest(root)
    found = [
        Check(
            step not in steps and sum(left) > 0,
            f"step {step} does not exist",
            f"the kill left {attempt.name}, {human(sum(left))} in {len(left)} files",
        ),
        Check(
            bool(steps) and steps[-1] < step and newest == str(root / str(steps[-1])),
            "the step before it is the newest",
            f"there are {', '.join(map(str, steps)) or 'none'}",
        ),
    ]
    if newest is not None:
        report = ckpt_jax.verify(newest)
        what = f"{report.chunks} chunks read back, {human(report.bytes)}"
        found.append(Check(report.ok, "it is whole", "; ".join([what, *map(str, report.faults)])))
    return found


def same_state(saved: Path, resaved: Path, mesh: settings.Mesh) -> list[Check]:
    """What was restored on another mesh, and saved from there, is what was saved first, bit for bit."""
    difference = ckpt_jax.diff(saved, resaved)
    one, two = ckpt_jax.open(saved), ckpt_jax.open(resaved)
    kinds = Counter(leaf.kind for leaf in two.values())
    every = difference.equal and difference.same == len(one) and kinds.keys() == {"array", "key", "scalar", "live"}
    what = (
        f"{kinds['array']} arrays, {kinds['key']} dropout keys, {kinds['scalar']} number, {kinds['live']} data iterator"
    )
    places = [leaf.sharding or {} for leaf in two.values() if leaf.kind == "array"]
    axes = dict(zip(mesh.axes, mesh.shape, strict=True))
    cut = sum(bool(place.get("spec")) for place in places)
    return [
        Check(every, f"all {len(one)} leaves came back, bit for bit", what if difference.equal else str(difference)),
        Check(
            cut > 0 and all(place.get("axes") == axes for place in places),
            f"they were on {mesh}",
            f"{cut} of them in {mesh.devices} pieces, the small ones on every device",
        ),
    ]


def same_run(before: Mapping[int, Step], after: Mapping[int, Step]) -> list[Check]:
    """The steps that both runs took saw the same samples, and came to the same loss."""
    both = sorted(before.keys() & after.keys())
    steps = f"steps {both[0]} to {both[-1]}" if both else "no step"
    pairs = [pair for step in both for pair in zip(before[step].positions, after[step].positions, strict=True)]
    same = sum(a == b for a, b in pairs)
    gap = max((abs(before[step].loss - after[step].loss) for step in both), default=float("inf"))
    return [
        Check(
            0 < same == len(pairs), f"{steps} read the same samples again", f"{same} of {len(pairs)}, in the same order"
        ),
        Check(
            gap < ROUNDING,
            f"{steps} came to the same loss again",
            f"but for {gap:.0e}, as another mesh rounds otherwise",
        ),
    ]
