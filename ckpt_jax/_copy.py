"""Copy: which checkpoints go to another root, and what came of it (no JAX)."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from . import _commit, _copy_one, _storage, _units, _values
from ._manifest import Manifest
from ._storage import Folder
from .errors import SHOWN, CheckpointError, Fault, NotFound


@dataclass(frozen=True, slots=True)
class Copied:
    """What `progress` came to.

    Attributes:
        source, target: from where to where.
        copied: the steps that are there now and were not before; of a checkpoint that is no step, its name.
        skipped: those for which there was nothing to do, each with why.
        faults: what kept others from being copied; empty if nothing did.
        bytes: of the files that were written.
        seconds: how long it took.
    """

    source: str
    target: str
    copied: tuple[int | str, ...]
    skipped: tuple[tuple[int | str, str], ...]
    faults: tuple[Fault, ...]
    bytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        names = ", ".join(map(str, self.copied)) or "nothing"
        lines = [f"{self.target}: copied {names} ({_values.human(self.bytes)}, {self.seconds:.1f} s)"]
        for why in dict.fromkeys(why for _, why in self.skipped):
            lines.append(f"{why}: {', '.join(str(step) for step, because in self.skipped if because == why)}")
        if self.faults:
            lines.append(f"not all that is in {self.source} is there; {_units.several(len(self.faults), 'fault')}:")
            lines += [f"  {fault}" for fault in self.faults[:SHOWN]]
            more = len(self.faults) - SHOWN
            lines += [f"  … and {more:,} more (`--json` has them all)"] if more > 0 else []
        return "\n".join(lines)


def progress(
    source: _storage.PathLike,
    target: _storage.PathLike,
    *,
    steps: Sequence[int] | None = None,
    last: int | None = None,
) -> Iterator[tuple[int, int] | Copied]:
    """Copies the checkpoints of a root to another one, or one checkpoint to a path.

    Every file that a manifest lists is copied as it is, and the manifest last, with the same bytes: the seal is the
    same. Before that each chunk of the copy was read back. Where a process was killed, the next call goes on with what
    it left. The newest step is the first. One that cannot be copied stops no other.

    Args:
        source: a root, or a checkpoint.
        target: a root, or the path of the checkpoint to be.
        steps: copy these alone.
        last: copy the newest so many.

    Yields:
        (bytes done, bytes in all), where each byte counts as it is written and as it is read back; a `Copied` at the
        end.

    Raises:
        NotFound: there is no checkpoint, or none of a step that is named; nothing was copied.
    """
    started = time.perf_counter()
    place, to = _storage.folder(source), _storage.folder(target)
    plan = _single(place, to, steps, last) if _commit.data_of(place) is not None else _chosen(place, to, steps, last)
    sums = _copy_one.Sums(sum(job.work for job in plan.jobs))
    copied: list[int | str] = []
    full: OSError | None = None
    for job in plan.jobs:
        end = sums.done + job.work
        try:
            if (yield from _copy_one.copy(job.source, job.target, sums, full)):
                copied.insert(0, job.name)
            else:
                plan.skipped.append((job.name, "there already"))
        except CheckpointError as error:
            plan.faults += _told(job, error)
        except OSError as error:
            full = error if full is None and error.errno in _copy_one.FULL else full
            plan.faults.append(Fault(str(job.name), "to be copied", str(error)))
        yield sums.more(end - sums.done)
    seconds = time.perf_counter() - started
    skipped = tuple(sorted(plan.skipped))
    yield Copied(place.url, to.url, tuple(copied), skipped, tuple(plan.faults), sums.written, seconds)


def _told(job: "_Job", error: CheckpointError) -> list[Fault]:
    head = Fault(str(job.name), "to be copied", f"{type(error).__name__}: {error.summary.rstrip(':')}")
    return [
        head,
        *(Fault(f"{job.name}: {fault.place}", fault.expected, fault.found, fault.text) for fault in error.faults),
    ]


# --- which ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    """A checkpoint to be copied, and the bytes that this takes: to be written, and to be read back."""

    name: int | str
    source: Folder
    target: Folder
    work: int


@dataclass(slots=True)
class _Plan:
    jobs: list[_Job] = field(default_factory=list)
    skipped: list[tuple[int | str, str]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def _job(source: Folder, target: Folder, manifest: Manifest) -> _Job:
    named = _commit.step_of(source.name)
    work = sum(file.bytes for file in manifest.files.values()) + manifest.nbytes
    return _Job(source.name if named is None else named, source, target, work)


def _single(source: Folder, target: Folder, steps: Sequence[int] | None, last: int | None) -> _Plan:
    """The plan for one checkpoint."""
    if steps is not None or last is not None:
        raise ValueError(f"{source} is one checkpoint: there are no steps in it to choose from")
    manifest = _commit.load(source)
    named = _commit.step_of(target.name)
    if named is not None and manifest.step != named:
        raise ValueError(f"{source} is of step {manifest.step}, and {target} would be of another by its name")
    plan = _Plan([_job(source, target, manifest)])
    if _commit.is_bad(source):
        return _Plan(faults=[_marked(plan.jobs[0].name)])
    return plan


def _marked(name: int | str) -> Fault:
    return Fault(str(name), "a checkpoint that is good", f"one that is marked as damaged, by its {_commit.BAD}")


def _chosen(root: Folder, to: Folder, steps: Sequence[int] | None, last: int | None) -> _Plan:
    """The plan for a root: the newest first, so that whoever must stop midway has what is worth the most."""
    if steps is not None and last is not None:
        raise ValueError("either steps are named, or the last so many are taken")
    plan, found = _Plan(), set()
    for step in _commit.candidates(root):
        if (steps is not None and step not in steps) or len(plan.jobs) == last:
            continue
        place = root / str(step)
        try:
            manifest = _commit.load_data(place)
            _commit.check_step(place, manifest)
        except NotFound:
            continue  # Not committed.
        except (CheckpointError, OSError) as error:
            told = error.summary if isinstance(error, CheckpointError) else str(error)
            plan.faults.append(Fault(str(step), "to be copied", f"{type(error).__name__}: {told}"))
        else:
            if not _commit.is_bad(place):
                plan.jobs.append(_job(place, to / str(step), manifest))
            elif steps is None:
                plan.skipped.append((step, "not copied, as it is marked as damaged"))
            else:
                plan.faults.append(_marked(step))
        found.add(step)
    if missing := sorted(set(steps or ()) - found):
        faults = [Fault(str(step), "a checkpoint", "none") for step in missing]
        raise NotFound(f"{root} has not all the steps that are named", faults, hint=f"`ckpt-jax ls {root}` lists them")
    if not found:
        there = root.exists()
        raise NotFound(f"there are no checkpoints in {root}" if there else f"there is nothing at {root}")
    return plan
