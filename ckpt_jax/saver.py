"""The Saver: a training run's checkpoints, written while it trains on."""

import atexit
import collections
import contextlib
import functools
import itertools
import os
import platform
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from . import _agree, _pace, _preempt, _processes, _resume, _retain, _save, _snapshot, _storage
from ._events import Event, Log
from ._health import Health
from ._manifest import Manifest
from ._pace import Every
from ._retain import Keep
from .errors import CheckpointError, Exists, Mismatch, Unhealthy

Tree = TypeVar("Tree")
_HEALTHY = Health()
_numbers = itertools.count()  # Every process makes the same Savers in the same order.


class _Job(NamedTuple):
    """A save that is due to be written."""

    step: int
    manifest: Manifest
    snapshot: _snapshot.Snapshot
    group: _processes.Group
    terms: _save.Terms
    blocked: float


class _Resumed(NamedTuple):
    """What a run went on from: the step, and where its iterators stood."""

    step: int
    positions: dict[str, Any]


class Saver:
    """Saves a run's state as it trains, and resumes it.

    `step` returns as soon as this process's share of the state is safe from whatever the next train step does; one
    thread writes it. A save that comes due while one is being written is skipped, and reported. A save that fails ends
    no training by itself: it is an event, and `last_error`; after `max_failures` in a row `step` raises.

    With several processes all make a `Saver` alike and call it at the same steps.

    Args:
        root: the run's folder, `gs://…`, `s3://…` or `memory://…`. Each step is a folder in it.
        every: how often `step` saves; None for only when `save` is called.
        keep: which checkpoints stay; None for all.
        health: what a state must fulfil to be committed; None to not look.
        grace: seconds between a preemption's notice (SIGTERM) and the end, in which the last save must fit.
        max_failures: so many failed saves in a row are an error.
        timeout: seconds for which process 0 waits for the others to write their parts; they wait twice as long for it,
            and so hear which one is missing.
        on_event: is called with every `Event`, also from the writer's thread.
        debug: compare each snapshot, when it is written, with a copy that was made before `step` returned.

    Attributes:
        preempted: whether the run is to end now: a preemption was noticed, and its last save is committed or known not
            to fit. Turns true only within `step`.
        last_error: what befell the last save that failed, until one is committed.
        skipped: how many saves came due while one was being written.

    >>> import jax.numpy as jnp, ckpt_jax as ck
    >>> state = {"w": jnp.zeros(3)}
    >>> with ck.Saver("memory://docs/saver", every=ck.Every(steps=2), keep=ck.Keep(last=1)) as saver:
    ...     state, step = saver.resume(state)
    ...     while step < 4 and not saver.preempted:
    ...         state = {"w": state["w"] + 1}
    ...         step += 1
    ...         _ = saver.step(step, state, metrics={"loss": 1 / step})
    ...         saver.wait()  # Not needed; here, so that no save is skipped.
    >>> ck.steps("memory://docs/saver")
    [4]
    """

    def __init__(
        self,
        root: _storage.PathLike,
        *,
        every: Every | None = None,
        keep: Keep | None = None,
        health: Health | None = _HEALTHY,
        grace: float = 30.0,
        max_failures: int = 3,
        timeout: float = _processes.TIMEOUT,
        on_event: Callable[[Event], None] | None = None,
        debug: bool = False,
    ):
        for name, value, kind in (("every", every, Every), ("keep", keep, Keep), ("health", health, Health)):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} is a ckpt_jax.{kind.__name__} or None, not {value!r}")
        for name, value, least in (
            ("grace", grace, 0.0),
            ("timeout", timeout, 0.001),
            ("max_failures", max_failures, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int if name == "max_failures" else (int, float)):
                raise TypeError(f"{name} is a number, not {value!r}")
            if not least <= value <= 1e9:
                raise ValueError(f"{name} is between {least:g} and 1e9, not {value!r}")
        if on_event is not None and not callable(on_event):
            raise TypeError(f"on_event is a function of an Event, not {on_event!r}")
        self._root = _storage.folder(root)
        self._every, self._keep, self._health = every, keep, health
        self._grace, self._max_failures, self._timeout, self._debug = grace, max_failures, timeout, debug
        self.preempted = False
        self.last_error: BaseException | None = None
        self.skipped = 0
        self._index, self._count = _processes.here()
        self._log = Log(self._root, self._index, on_event)
        self._notice = _preempt.Notice(grace)
        self._told = False  # Whether the others have been told of it.
        by_clock = every is not None and every.by_clock
        agrees = by_clock or not self._notice.service
        client = _processes.client() if agrees else None
        self._meeting = _agree.Meeting(client, self._index, self._count, f"ckpt_jax/saver/{next(_numbers)}", self._warn)
        self._failures: list[BaseException] = []
        self._newest = collections.deque[int](maxlen=max(1, keep.last) if keep is not None else 1)  # Committed here.
        self._start_step = self._seen = 0  # Where it was resumed, and the last step that it was told of.
        self._took: float | None = None  # Seconds of the last write.
        self._before: Mapping[str, Any] = {}
        self._declined: list[_processes.Group] = []
        self._resumed: _Resumed | None = None
        self._refused: _resume.Refusals = {}  # Some of which could not be marked.
        self._pid, self._closed = os.getpid(), False
        self._work: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._starter: threading.Thread | None = None  # Who has that lock.
        _open.add(self)
        _at_the_end_of_a_worker()
        several = f", process {self._index} of {self._count}" if self._count > 1 else ""
        self._log.add("started", message=f"pid {self._pid} on {platform.node()}{several}")
        self._pace = None  # Of the process that looks at the clock. It reads the events: also that of this start.
        if every is not None and by_clock and self._index == 0:
            self._pace = _pace.Pace(every, self._root, functools.partial(self._log.add, "planned"))

    # --- the run ---

    def resume(self, like: Tree) -> tuple[Tree, int]:
        """The newest state that can be read, and the step to go on with; `(like, 0)` if there is none.

        A step that turns out damaged is marked, told of, and passed over; all processes agree. One that storage does
        not give just now is passed over unmarked; when the run comes to that step again, it is put aside under another
        name. Leftovers of killed saves are removed. A checkpoint that is whole but does not fit `like` is an error.

        Raises:
            CheckpointError: there are checkpoints, and none of them can be read; Corrupt, if all are damaged.
            Mismatch: `like` has another structure, shape or dtype.
        """
        self._check_open()
        self._wait_for_writer()
        started = time.perf_counter()
        self._failures = []
        self._refused = {}
        group = _processes.group("resume", self._timeout)
        try:
            state, manifest, self._refused = _resume.resume(self._root, like, group, self._log)
        except Mismatch as error:
            error.add_note("cast=, only=, on_missing= and on_extra= are options of ckpt_jax.restore")
            raise
        finally:
            group.part()
        if manifest is None:
            return state, 0
        assert manifest.step is not None
        self._before = manifest.health
        seconds = {"read": time.perf_counter() - started}
        self._log.add("resumed", manifest.step, bytes=manifest.nbytes, seconds=seconds)
        _resume.check_counts(manifest, state, self._log)
        self._meeting.back_to(manifest.step)
        self._resumed = _Resumed(manifest.step, _resume.positions(manifest, state, self._index))
        self._start_step = self._seen = manifest.step
        self._begun()
        return state, manifest.step

    def step(
        self,
        step: int,
        state: Any,
        *,
        metrics: dict[str, Any] | None = None,
        metadata: Any = None,
        milestone: bool = False,
    ) -> bool:
        """Says that a step is completed, and saves if a save is due; to be called after every step.

        Args:
            step: the number of completed updates.
            state: any tree that `save` takes. It may be donated, changed or deleted afterwards.
            metrics: numbers that stand in the manifest, by which `Keep.best` chooses.
            metadata: plain data that stands in the manifest.
            milestone: whether this checkpoint stays for ever.

        Returns:
            Whether a snapshot was taken.

        Raises:
            CheckpointError: the last `max_failures` saves failed; tells all causes.
        """
        self._check_open()
        self._check_failures()
        step = self._seen = _save.as_step(step)
        agreed = self._agreed(step)
        if "stop" in agreed:
            return self._last_save(step, state, metrics, metadata, milestone=milestone)
        if not self._due(step, agreed):
            return False
        return self._start(step, state, metrics, metadata, milestone=milestone)

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: dict[str, Any] | None = None,
        metadata: Any = None,
        milestone: bool = False,
    ) -> None:
        """Saves now, whatever `every` says; waits for the save under way first, but not for this one.

        After the notice of a preemption it saves as `step` would: if there is time.
        """
        self._check_open()
        step = self._seen = _save.as_step(step)
        self._check_thread()
        if "stop" in self._agreed(step):
            self._last_save(step, state, metrics, metadata, milestone=milestone)
        else:
            self._start(step, state, metrics, metadata, milestone=milestone, wait=True)

    def wait(self) -> None:
        """Waits for the save under way; raises what befell it."""
        self._wait_for_writer()
        if self.last_error is not None:
            raise self.last_error

    def _wait_for_writer(self) -> None:
        self._check_thread()
        self._idle.wait()

    def _check_thread(self) -> None:
        if threading.current_thread() in (self._thread, self._starter):
            raise RuntimeError("on_event is called in the middle of a save: it cannot wait for one, nor begin one")

    def close(self) -> None:
        """Finishes the save under way.

        Raises:
            CheckpointError, OSError: the last save was lost, and nothing newer is committed.
        """
        self._close("")

    def _close(self, why: str) -> None:
        if self._closed or os.getpid() != self._pid:  # A forked child has the object, but not the thread.
            return
        self._wait_for_writer()
        self._end(why)
        if self.last_error is not None:
            raise self.last_error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._close("" if error is None else f"after {type(error).__name__}: {error!s:.200}")
        except BaseException:
            if error is None:  # What ended the `with` itself is more to the point.
                raise

    def _end(self, why: str) -> None:
        self._closed = True
        self._meeting.close()
        self._notice.close()
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
        _open.discard(self)
        newest = self._newest[-1] if self._newest else self._start_step
        unsaved = (
            f"what came after step {newest} is not saved; the last was {self._seen}" if self._seen > newest else ""
        )
        self._log.add("closed", message="; ".join(filter(None, [why, unsaved])))

    # --- when ---

    def _agreed(self, step: int) -> set[str]:
        """What all processes do at this step."""
        if self._notice.at is not None and not self._told and not self._notice.service:
            self._told = True
            self._meeting.call("stop")
        if self._pace is not None and self._pace.is_due(writing=not self._idle.is_set()):
            self._pace.begun()
            self._meeting.call("save")
        return self._meeting.passed(step) | ({"stop"} if self._notice.reached(step) else set())

    def _due(self, step: int, agreed: set[str]) -> bool:
        if "save" in agreed:
            return True
        steps = self._every.steps if self._every is not None else None
        return steps is not None and step % steps == 0

    def _last_save(
        self, step: int, state: Any, metrics: dict[str, Any] | None, metadata: Any, *, milestone: bool
    ) -> bool:
        """Preempted: one more save if it fits in what is left of the grace."""
        end = (self._notice.at or time.monotonic()) + self._grace
        busy = not self._idle.wait(max(0.0, end - time.monotonic()))
        left = end - time.monotonic()
        fits = not busy and not self._is_saved(step) and (self._took is None or self._took < left)
        if self._count > 1:  # The answer must be the same everywhere.
            fits = self._all_say(fits)
        if fits:
            self._start(step, state, metrics, metadata, milestone=milestone)
            over = self._idle.wait(max(0.0, end - time.monotonic()))
            done = over and self._is_saved(step)
            why = self.last_error if over else "it is still being written"
            message = "the last save is committed" if done else f"the last save did not succeed: {why}"
        elif self._is_saved(step):
            message = "this step is committed already"
        else:
            took = "another process has no time" if self._took is None else f"the last one took {self._took:.1f} s"
            why = "the save before is still being written" if busy else took
            message = f"no time for a last save: {left:.1f} s are left, and {why}"
        self._log.add("preempted", step, message=message)
        self.preempted = True
        return fits

    def _is_saved(self, step: int) -> bool:
        return bool(self._newest) and self._newest[-1] == step

    def _all_say(self, here: bool) -> bool:
        group = _processes.group("fits", self._timeout)
        try:
            group.publish(f"fits/{self._index}", "yes" if here else "no")
            phase = "say whether a last save fits"
            return all(group.wait(f"fits/{i}", process=i, phase=phase) == "yes" for i in range(self._count))
        finally:
            group.part()

    # --- a save ---

    def _start(
        self,
        step: int,
        state: Any,
        metrics: dict[str, Any] | None,
        metadata: Any,
        *,
        milestone: bool,
        wait: bool = False,
    ) -> bool:
        """The part of a save that training waits for; False if it is declined, unless it is to wait for its turn."""
        self._check_thread()
        with self._starting:
            self._starter = threading.current_thread()
            try:
                if wait:
                    self._idle.wait()
                return self._started(step, state, metrics, metadata, milestone=milestone)
            finally:
                self._starter = None

    def _started(
        self, step: int, state: Any, metrics: dict[str, Any] | None, metadata: Any, *, milestone: bool
    ) -> bool:
        started = time.perf_counter()
        group = _processes.group(f"save/{step}", self._timeout)
        self._begun()
        if not self._idle.is_set():
            self._decline(step, group)
            return False
        try:
            manifest, snapshot = _save.prepare(
                self._root / str(step),
                state,
                group,
                step=step,
                metadata=metadata,
                metrics=metrics,
                milestone=milestone,
                hold=True,
            )
            expected = _save.fingerprints(state, group) if self._debug else None
        except BaseException as error:
            _save.abstain(group, f"failed: {error}")
            group.part()
            raise
        self._warn_of_stalled(step, manifest)
        terms = _save.Terms(
            health=self._health,
            before=self._before,
            expected=expected,
            written=lambda size: self._log.add(
                "written", step, bytes=size, seconds={"write": manifest.seconds["write"]}
            ),
        )
        if self._thread is None:  # One for the Saver's whole life: each new one leaves its malloc arena behind.
            thread = threading.Thread(target=self._write_all, name="ckpt_jax writer", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # There is no room for one more: a save that fails as others do.
                _save.abstain(group, f"failed: {error}")
                group.part()
                self._failed(step, error)
                return False
            self._thread = thread
        blocked = time.perf_counter() - started
        try:
            self._idle.clear()
            self._log.note("snapshot", step, seconds={"blocked": blocked})
            self._work.put(_Job(step, manifest, snapshot, group, terms, blocked))
        except BaseException as error:  # Ctrl-C while `on_event` ran.
            self._idle.set()
            _save.abstain(group, f"failed: {error!r}")
            group.part()
            raise
        return True

    def _begun(self) -> None:
        if self._pace is not None:
            self._pace.begun()

    def _warn_of_stalled(self, step: int, manifest: Manifest) -> None:
        """Once, at the first save after a resume: an iterator that only remembers its state starts the data anew."""
        resumed, self._resumed = self._resumed, None
        if resumed is None or step <= resumed.step:
            return
        if names := _resume.stalled(resumed.positions, manifest):
            message = (
                f"{', '.join(names)}: as it was resumed at step {resumed.step}; either nothing was read from it "
                "since, or its state does not say where it is, and each resume repeats the data"
            )
            self._log.note("warning", step, message=message, names=names)

    def _decline(self, step: int, group: _processes.Group) -> None:
        self.skipped += 1
        if self._count == 1:
            self._log.note("skipped", step, message="the save before is still being written")
            return
        _save.abstain(group, f"declined: process {self._index} is still writing the checkpoint before")
        self._declined.append(group)
        self._log.note("declined", step, message="the save before is still being written here")

    def _write_all(self) -> None:
        while (job := self._work.get()) is not None:
            try:
                self._write(job)
            except BaseException as error:  # noqa: BLE001  Such as a service that is gone. The thread has more to write.
                self.last_error = error
            finally:
                del job  # And with it the snapshot's memory.
                self._idle.set()

    def _write(self, job: _Job) -> None:
        """The rest of it, in the writer's thread."""
        started = time.perf_counter()
        target = self._root / str(job.step)
        try:
            self._log.flush()
            refused = self._refused.get(job.step)
            terms = job.terms._replace(refused=refused.what if refused is not None else "")
            manifest = _save.write(target, job.manifest, job.snapshot, job.group, terms)
        except BaseException as error:  # noqa: BLE001  Told at `wait`, `close`, or after so many in a row.
            self._failed(job.step, error)
        else:
            self._took = time.perf_counter() - started
            self._before = manifest.health
            self._failures, self.last_error = [], None
            self._newest.append(job.step)
            self._refused.pop(job.step, None)
            seconds = {"blocked": job.blocked, **manifest.seconds, "all": self._took}
            self._log.add("committed", job.step, bytes=manifest.nbytes, seconds=seconds)
            if self._pace is not None:
                self._pace.learn(job.blocked, self._took)
            self._prune()
        finally:
            declined, self._declined = self._declined, []
            for group in (job.group, *declined):  # After it is told: the farewell waits for those that are gone.
                with contextlib.suppress(CheckpointError):
                    group.part()

    def _failed(self, step: int, error: BaseException) -> None:
        if isinstance(error, _save.Declined):
            self._log.add("declined", step, message=str(error))
            return
        if isinstance(error, Exists):  # There is no `overwrite` here.
            error.hint = "a root is for one run: does another save there, or did this one not begin with `resume`?"
        self.last_error = error
        self._failures.append(error)
        rejected = isinstance(error, Unhealthy)
        names = tuple(fault.place for fault in error.faults) if isinstance(error, CheckpointError) else ()
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        self._log.add("rejected" if rejected else "failed", step, message=text, names=names)

    def _prune(self) -> None:
        if self._keep is None or self._index != 0:
            return
        try:
            # Those of this run too, where a root has later ones: it went on from an earlier step.
            gone, faults = _retain.swept(self._root, self._keep, also=self._newest)
        except Exception as error:  # noqa: BLE001  The checkpoint is committed, and the thread has more to write.
            self._log.add("warning", message=f"could not prune: {error}")
            return
        for step in gone:
            self._log.add("pruned", step)
        for fault in faults:
            self._log.add("warning", message=f"could not prune: {fault}")

    def _warn(self, message: str) -> None:
        self._log.note("warning", message=message)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this Saver is closed")
        if os.getpid() != self._pid:
            raise ValueError("this Saver belongs to the process that this one was forked from")

    def _check_failures(self) -> None:
        if len(self._failures) < self._max_failures:
            return
        causes = self._failures
        self._failures = []
        try:
            hint = f"the newest good checkpoint is {_retain.latest(self._root.url) or 'none'}"
        except OSError as error:  # It may be what ails the saves, too.
            hint = f"the root cannot be read: {error}"
        raise CheckpointError(
            f"the last {len(causes)} saves failed:\n" + "\n".join(f"  {type(e).__name__}: {e}" for e in causes),
            hint=hint,
        ) from causes[-1]


def open_savers() -> list[Saver]:
    """Those of this process that were not closed yet."""
    return list(_open)


_open: set[Saver] = set()  # Those that were not closed yet: one that is dropped still has its save to finish.


def _at_the_end_of_a_worker() -> None:
    """A worker of `multiprocessing` that was forked ends without `atexit`, but runs what it is given this way."""
    module = sys.modules.get("multiprocessing.process")
    if module is not None and module.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, _finish_all, exitpriority=0)


@atexit.register
def _finish_all() -> None:
    """The process ends and nobody called `close`: finish what is under way, and say what was lost."""
    lost = False
    for saver in list(_open):
        if os.getpid() != saver._pid:
            continue
        try:
            saver.close()
        except BaseException as error:  # noqa: BLE001
            print(f"ckpt_jax: the last save was lost: {type(error).__name__}: {error}", file=sys.stderr)
            lost = True
    if lost:  # An atexit handler cannot change the exit code in any other way.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)
