"""The checks: what must hold once a run was killed and others took over, each with what was found."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ckpt_jax

from .._values import human
from . import settings
from .children import Cut

# Another mesh adds the same numbers in another order, so the losses drift apart by rounding: over 18 steps by 1e-6 at
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
    """One training step, as the trainers told of it."""

    loss: float
    positions: tuple[int, ...]  # Where in the text its samples begin, in all processes.
    seconds: float


def killed(root: Path, cut: Cut, said: str) -> list[Check]:
    """A kill in the middle of a save leaves the checkpoint before it newest, and whole; the survivor says who died."""
    steps = ckpt_jax.steps(root)
    newest = ckpt_jax.latest(root)
    found = [
        Check(
            cut.step not in steps and cut.bytes > 0,
            f"step {cut.step} does not exist",
            f"{human(cut.bytes)} of it were written, in {cut.files} files",
        ),
        Check(
            bool(steps) and steps[-1] < cut.step and newest == str(root / str(steps[-1])),
            "the step before it is the newest",
            f"there are {', '.join(map(str, steps)) or 'none'}",
        ),
    ]
    if newest is not None:
        found.append(whole(Path(newest)))
    named = "process 1 did not get through the phase `write`"
    found.append(Check(named in said, "process 0 knows why its save failed", named if named in said else said))
    return found


def whole(path: Path) -> Check:
    """Every chunk has the digest that its manifest says."""
    report = ckpt_jax.verify(path)
    what = f"{report.chunks} chunks read back, {human(report.bytes)}"
    return Check(report.ok, f"step {path.name} is whole", "; ".join([what, *map(str, report.faults)]))


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
    """The steps that both runs took saw the same samples, and came to the same loss, but for rounding."""
    both = sorted(before.keys() & after.keys())
    gap = max((abs(before[step].loss - after[step].loss) for step in both), default=float("inf"))
    return [
        _same_samples(before, after),
        Check(
            gap < ROUNDING,
            f"{_steps(both)} came to the same loss again",
            f"but for {gap:.0e}, as another mesh rounds otherwise",
        ),
    ]


def same_losses(before: Mapping[int, Step], after: Mapping[int, Step]) -> list[Check]:
    """The steps that both runs took, on the same mesh, saw the same samples, and came to the same loss, bit for bit."""
    both = sorted(before.keys() & after.keys())
    same = sum(before[step].loss == after[step].loss for step in both)
    return [
        _same_samples(before, after),
        Check(0 < same == len(both), f"{_steps(both)} came to the very same loss", f"{same} of {len(both)}"),
    ]


def same_checkpoint(saved: Path, again: Path) -> list[Check]:
    """Two runs left the same checkpoint, bit for bit."""
    difference = ckpt_jax.diff(saved, again)
    one, two = ckpt_jax.open(saved), ckpt_jax.open(again)
    others = one.manifest.attempt != two.manifest.attempt  # Each save draws a number: these are two, not one copied.
    every = others and difference.equal and difference.same == len(one)
    return [
        Check(
            every,
            f"step {saved.name} is the undisturbed run's, bit for bit",
            f"{difference.same} of {len(one)} leaves" if every else str(difference),
        ),
        whole(again),
    ]


def _same_samples(before: Mapping[int, Step], after: Mapping[int, Step]) -> Check:
    both = sorted(before.keys() & after.keys())
    pairs = [pair for step in both for pair in zip(before[step].positions, after[step].positions, strict=True)]
    same = sum(a == b for a, b in pairs)
    return Check(
        0 < same == len(pairs), f"{_steps(both)} read the same samples", f"{same} of {len(pairs)}, in the same order"
    )


def _steps(both: list[int]) -> str:
    return f"steps {both[0]} to {both[-1]}" if both else "no step"
