"""The checks: what must hold once a run was killed and another one took over, each with what was found."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ckpt_jax

from .._manifest import human
from . import settings

# Another mesh adds the same numbers in another order: the losses drift apart by rounding, of which training makes more.
# Over ten steps 2e-6 to 2e-4 was seen. Dropout with another key moves a single step's loss by 1e-2 or more.
ROUNDING = 2e-3


@dataclass(frozen=True, slots=True)
class Check:
    holds: bool
    says: str


@dataclass(frozen=True, slots=True)
class Step:
    """One training step, as the trainer told of it."""

    loss: float
    positions: tuple[int, ...]  # Where in the text its samples begin.
    seconds: float


def killed(root: Path, step: int, attempt: Path) -> list[Check]:
    """A kill in the middle of a save leaves the previous checkpoint newest, and whole."""
    left = [path.stat().st_size for path in attempt.rglob("*") if path.is_file()]
    there = ckpt_jax.steps(root)
    newest = ckpt_jax.latest(root)
    found = [
        Check(
            step not in there and sum(left) > 0,
            f"step {step} does not exist: the kill left {attempt.name} ({len(left)} files, {human(sum(left))})",
        ),
        Check(
            bool(there) and there[-1] < step and newest == str(root / str(there[-1])),
            f"the steps are {', '.join(map(str, there))}; newest is {newest}",
        ),
    ]
    if newest is not None:
        report = ckpt_jax.verify(newest)
        what = f"{report.chunks} chunks read back, {human(report.bytes)}"
        found.append(Check(report.ok, f"it is whole: {what}" + "".join(f"\n  {fault}" for fault in report.faults)))
    return found


def same_state(saved: Path, resaved: Path, mesh: settings.Mesh) -> list[Check]:
    """What was restored on another mesh, and saved from there, is what was saved first, bit for bit."""
    difference = ckpt_jax.diff(saved, resaved)
    here, there = ckpt_jax.open(saved), ckpt_jax.open(resaved)
    kinds = Counter(leaf.kind for leaf in there.values())
    kept = (
        f"{kinds['array']} arrays, {kinds['key']} dropout keys, {kinds['scalar']} number, {kinds['live']} data iterator"
    )
    complete = all(kinds[kind] for kind in ("array", "key", "scalar", "live"))
    wanted = dict(zip(mesh.axes, mesh.shape, strict=True))
    meshes = [leaf.sharding["axes"] for leaf in there.values() if leaf.kind == "array" and leaf.sharding]
    cut = [leaf for leaf in there.values() if leaf.sharding and leaf.sharding.get("spec")]
    return [
        Check(
            difference.equal and complete and difference.same == len(here),
            f"all {difference.same} of {len(here)} leaves came back bit for bit: {kept}"
            if difference.equal
            else str(difference),
        ),
        Check(
            bool(cut) and all(axes == wanted for axes in meshes),
            f"they came back on {mesh}, {len(cut)} of them cut in pieces over all",
        ),
    ]


def same_run(before: Mapping[int, Step], after: Mapping[int, Step]) -> list[Check]:
    """The steps that both runs took saw the same samples, and came to the same loss."""
    both = sorted(before.keys() & after.keys())
    same = [step for step in both if before[step].positions == after[step].positions]
    samples = sum(len(after[step].positions) for step in same)
    gap = max((abs(before[step].loss - after[step].loss) for step in both), default=float("inf"))
    steps = f"steps {both[0]} to {both[-1]}" if both else "no step"
    return [
        Check(bool(both) and same == both, f"{steps}: the same {samples} samples, position for position"),
        Check(gap < ROUNDING, f"{steps}: the same loss, to {gap:.0e} (rounding: another mesh adds in another order)"),
    ]
