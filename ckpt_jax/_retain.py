"""A root of checkpoints: which steps are there, and which may go (no JAX)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from . import _commit, _storage, _values
from .errors import CheckpointError, Corrupt, Fault

DAY = 86_400.0  # Seconds.


def steps(root: _storage.PathLike, *, bad: bool = False) -> list[int]:
    """The committed steps in a root, in ascending order.

    A step counts if its manifest is whole and records the step that the folder's name says. Folders that look like
    steps and hold nothing committed are left out, as are steps that were found damaged.

    Args:
        root: a folder of checkpoints, one for each step. None are found where there is no such folder.
        bad: list the steps that were marked as damaged instead.

    >>> import numpy as np, ckpt_jax as ck
    >>> for step in (100, 200):
    ...     _ = ck.save(f"memory://docs/steps/{step}", {"w": np.zeros(3)})
    >>> ck.steps("memory://docs/steps")
    [100, 200]
    """
    return _commit.steps(_storage.folder(root), bad=bad)


def latest(root: _storage.PathLike) -> str | None:
    """The path of the newest committed step whose files are all there; None if there is none.

    >>> import numpy as np, ckpt_jax as ck
    >>> ck.latest("memory://docs/nothing") is None
    True
    >>> _ = ck.save("memory://docs/latest/300", {"w": np.zeros(3)})
    >>> ck.latest("memory://docs/latest")
    'memory://docs/latest/300'
    """
    found = _commit.latest(_storage.folder(root))
    return found.url if found is not None else None


# --- which may go -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Best:
    """The steps at which a metric was best.

    Attributes:
        metric: its name in the `metrics` that were given to `Saver.step`.
        count: how many of them to keep.
        mode: whether the smallest or the largest value is best. NaN never is.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise TypeError(f"metric is a metric's name, not {self.metric!r}")
        _count("count", self.count)
        if self.mode not in ("min", "max"):
            raise ValueError(f'mode is "min" or "max", not {self.mode!r}')


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints stay: a step stays if any of these asks for it. The newest good one always does.

    Attributes:
        last: the newest so many; 0 for no more than the newest.
        daily: of each of the last so many days (UTC) that have checkpoints, the newest one.
        every: all steps that this divides.
        best: those at which a metric was best.
        milestones: steps that stay for ever, as do those that were saved with `milestone=True`.

    >>> import ckpt_jax as ck
    >>> ck.Keep(last=3, daily=14, every=10_000, best=ck.Best("loss", count=2))
    Keep(last=3, daily=14, every=10000, best=Best(metric='loss', count=2, mode='min'), milestones=())
    """

    last: int = 3
    daily: int = 0
    every: int | None = None
    best: Best | None = None
    milestones: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _count("last", self.last, least=0)
        _count("daily", self.daily, least=0)
        if self.every is not None:
            _count("every", self.every)
        if self.best is not None and not isinstance(self.best, Best):
            raise TypeError(f'best is a ckpt_jax.Best, such as Best("loss"), not {self.best!r}')
        if not isinstance(self.milestones, Iterable):
            raise TypeError(f"milestones is a tuple of steps, such as (50_000,), not {self.milestones!r}")
        object.__setattr__(self, "milestones", tuple(self.milestones))
        for step in self.milestones:
            _count("a milestone", step, least=0)


def _count(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is an int, not {value!r}")
    if value < least:
        raise ValueError(f"{name} is {least} or more, not {value}")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a committed step: when it was saved, how its metrics stood, whether it is a milestone."""

    time: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    milestone: bool = False


def kept(facts: Mapping[int, Facts], keep: Keep, also: Iterable[int] = ()) -> list[int]:
    """The steps that stay, of those that are there; those in `also` do, whatever `keep` says.

    >>> kept({step: Facts() for step in (1, 2, 3, 4)}, Keep(last=2))
    [3, 4]
    """
    found = sorted(facts)
    stay = set(also) & set(found) | set(found[-max(1, keep.last) :])
    stay |= {step for step in found if keep.every is not None and step % keep.every == 0}
    stay |= {step for step in found if step in keep.milestones or facts[step].milestone}
    stay |= set(_newest_of_days(facts, keep.daily))
    if keep.best is not None:
        stay |= set(_best(facts, keep.best))
    return sorted(stay)


def _newest_of_days(facts: Mapping[int, Facts], days: int) -> Sequence[int]:
    newest: dict[int, int] = {}
    for step in sorted(facts, key=lambda step: (facts[step].time, step)):
        newest[int(facts[step].time // DAY)] = step
    return [newest[day] for day in sorted(newest)[-days:]] if days else []


def _best(facts: Mapping[int, Facts], best: Best) -> Sequence[int]:
    values = {step: _number(known.metrics.get(best.metric)) for step, known in facts.items()}
    sign = 1 if best.mode == "min" else -1
    # Of equal ones the later: it has seen more.
    ranked = sorted((sign * value, -step) for step, value in values.items() if not math.isnan(value))
    return [-step for _, step in ranked[: best.count]]


def _number(value: Any) -> float:
    """A metric as a number; NaN for what is none."""
    if hasattr(value, "dtype") and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # An int beyond the largest float.
        return math.inf if value > 0 else -math.inf


def prune(root: _storage.PathLike, keep: Keep, *, also: Iterable[int] = (), dry_run: bool = False) -> list[int]:
    """Deletes the checkpoints that `keep` does not ask for, and what killed saves left behind.

    The newest good step always stays. Steps that are damaged, or were marked as such, are neither counted nor deleted;
    nor are those that cannot be read now, which are told at the end.
    A deletion that is interrupted leaves nothing that looks like a checkpoint; the next `prune` or save removes it.

    Args:
        root: a folder of checkpoints.
        keep: which stay.
        also: steps that stay besides, such as the one that a run which went back to an older step has just committed.
        dry_run: delete nothing.

    Returns:
        The steps that were deleted (or would be), in ascending order.

    Raises:
        CheckpointError: no checkpoint has the metric of `keep.best`, and nothing was deleted; or some could not be
            deleted: it tells which, and the others are.
        Corrupt: all but the newest would go, and that is damaged; nothing was deleted.

    >>> import numpy as np, ckpt_jax as ck
    >>> for step in (100, 200, 300):
    ...     _ = ck.save(f"memory://docs/prune/{step}", {"w": np.zeros(3)})
    >>> ck.prune("memory://docs/prune", ck.Keep(last=1, every=200))
    [100]
    >>> ck.steps("memory://docs/prune")
    [200, 300]
    """
    if not isinstance(keep, Keep):
        raise TypeError(f"keep is a ckpt_jax.Keep, such as Keep(last=3), not {keep!r}")
    place = _storage.folder(root)
    go, faults = swept(place, keep, also=also, dry_run=dry_run)
    if faults:
        raise CheckpointError(
            f"{place} is pruned in part; deleted: {', '.join(map(str, go)) or 'nothing'}",
            faults,
            hint="once its cause is gone, the same prune does the rest",
        )
    return go


def swept(
    place: _storage.Folder, keep: Keep, *, also: Iterable[int] = (), dry_run: bool = False
) -> tuple[list[int], list[Fault]]:
    """As `prune`: the steps that were deleted, and those that could not be."""
    if not dry_run:
        _commit.clear_all(place)  # First: of a replacement that was killed midway it puts the old one back.
    unread: dict[int, OSError] = {}
    found = facts_of(place, unread)
    _check_metric(place, found, keep.best)
    stay = set(kept(found, keep, also))
    go = [step for step in found if step not in stay]
    if dry_run:
        return go, []
    faults = [Fault(str(step), "to be read, before it is counted or deleted", str(e)) for step, e in unread.items()]
    _check_newest(place, found, go)
    gone = []
    for step in go:
        try:
            error = _commit.delete(place / str(step))
            gone.append(step)
        except OSError as failure:
            error = failure
        if error is not None:
            faults.append(Fault(str(step), "to be deleted, and its space freed", str(error)))
    return gone, faults


def _check_metric(root: _storage.Folder, found: Mapping[int, Facts], best: Best | None) -> None:
    """Raises CheckpointError for a metric that no checkpoint has, such as one that is misspelt."""
    there = {str(name) for facts in found.values() for name in facts.metrics}
    if best is not None and found and best.metric not in there:
        raise CheckpointError(
            f"no checkpoint in {root} has the metric {best.metric!r}; nothing was deleted",
            [
                Fault(
                    "best",
                    f"one of {', '.join(sorted(there))}" if there else "metrics, given to `Saver.step`",
                    best.metric,
                )
            ],
        )


def _check_newest(root: _storage.Folder, found: Mapping[int, Facts], go: Sequence[int]) -> None:
    """Reads the newest step, and raises Corrupt, before the last other one is deleted: then all hangs on it."""
    if go and len(found) - len(go) == 1:
        from . import _verify  # Here, because listing a root is to import no array library.

        _verify.verify((root / str(max(found))).url).check()


def facts_of(root: _storage.Folder, unread: dict[int, OSError] | None = None) -> dict[int, Facts]:
    """What the manifests of all good steps tell: whole, with all their files, not marked as damaged.

    Those that cannot be read are noted in `unread`, or else are an error.
    """
    return {
        step: Facts(manifest.time, _values.unpack(manifest.metrics), manifest.milestone)
        for step, manifest in sorted(_commit.good(root, unread), key=lambda found: found[0])
    }


def rollback(root: _storage.PathLike, step: int) -> list[str]:
    """Makes an earlier step the newest again. Later ones are put aside under another name, not deleted.

    Args:
        root: a folder of checkpoints.
        step: the step to go back to; it must be a good one.

    Returns:
        The names that the later steps have now, such as `"1300.rolled-back-20261130-041500"`; rename one to its
        number, and it counts again. In a bucket they keep their names, and are marked as damaged.

    Raises:
        NotFound: there is no such step in the root.
        Corrupt: it is damaged, or marked as such; nothing was moved.
        CheckpointError: a later step could not be put aside; tells which were before it.
    """
    place = _storage.folder(root)
    _commit.clear_all(place)  # First: a later step that it puts back would be the newest again.
    _check_good(place / str(step))
    moved: list[str] = []
    # The newest first: wherever this ends, what is left is a shorter run, and going on with it is to call it again.
    for later in reversed([found for found in _commit.steps(place) if found > step]):
        try:
            moved.insert(0, _put_aside(place, later, step))
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"{place} is rolled back in part; put aside: {', '.join(moved) or 'nothing'}",
                [Fault(str(later), "to be put aside", f"{error}")],
                hint="once its cause is gone, the same rollback does the rest",
            ) from error
    _commit.point_back(place / str(step))
    return moved


def _check_good(place: _storage.Folder) -> None:
    from . import _verify  # Here, because listing a root is to import no array library.

    _commit.load(place)
    if (mark := place.read(_commit.BAD)) is not None:
        raise Corrupt(
            f"{place} is not to be gone back to: it is marked as damaged",
            [Fault(_commit.BAD, "no such file", mark.decode(errors="replace").strip()[:200])],
            hint=f"`ckpt-jax verify {place}` reads it; if it is good, delete its {_commit.BAD}",
        )
    _verify.verify(place.url, level="files").check()


def _put_aside(root: _storage.Folder, later: int, step: int) -> str:
    """Makes a step count no longer; its name from now on."""
    place = root / str(later)
    if not root.local:
        _commit.mark_bad(place, f"rolled back to step {step}")
        if not _commit.is_bad(place):
            raise OSError(f"{_commit.BAD} could not be written")
        return str(later)
    return _commit.aside(place, "rolled-back").name
