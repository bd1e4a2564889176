"""Events: what happened to a run's checkpoints, one at a time (no JAX)."""

import contextlib
import errno
import json
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ._storage import Folder

FILE = "events.jsonl"
_YEAR_10000 = 253_402_300_800.0  # Later ones, and NaN, are no time of a clock.
LARGEST = 1 << 30  # Bytes of it that are read.

Kind = (
    Literal["started", "snapshot", "written", "committed", "skipped", "declined", "failed", "rejected"]
    | Literal["resumed", "fell back", "warning", "pruned", "preempted", "planned", "closed"]
)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: `started` (a Saver), `snapshot` (taken; training goes on), `written` (this process's part is durable),
            `committed` (the checkpoint exists), `skipped` (a save was due while one was being written), `declined` (a
            process was still writing), `failed`, `rejected` (the state was not healthy), `resumed`, `fell back` (a step
            was damaged), `warning`, `pruned`, `preempted`, `planned` (how often to save from now on), `closed`.
        step: the step that it is about.
        process: in which process.
        time: seconds since 1970.
        bytes: how many were written, or read.
        seconds: how long it took, by phase; `blocked` is the time for which training stood still.
        message: in words, where there is more to say.
        names: the leaves that it is about.
    """

    kind: Kind
    step: int | None = None
    process: int = 0
    time: float = 0.0
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    message: str = ""
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        took = ", ".join(f"{phase} {value:.3g} s" for phase, value in self.seconds.items())
        parts = [self.kind if self.step is None else f"step {self.step} {self.kind}", self.message, took]
        return ": ".join(part for part in parts if part)


def read(root: Folder) -> Iterator[dict[str, Any]]:
    """The events that a run told, as far as they can be read: a crash may have cut a line off."""
    data = b""
    if root.local:
        with contextlib.suppress(OSError):
            data = root.read(FILE, most=LARGEST) or b""
    for line in data.splitlines():
        try:
            event = json.loads(line)
            event |= {"kind": str(event["kind"]), "time": float(event["time"]), "process": int(event.get("process", 0))}
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
        if abs(event["time"]) < _YEAR_10000:
            yield event


class Log:
    """Where a run's events go: to a callback, and from process 0 to a line each in the root's `events.jsonl`."""

    def __init__(self, root: Folder, process: int, callback: Callable[[Event], None] | None):
        self._root, self._process, self._callback = root, process, callback
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._told = False  # That the file cannot be written.

    def add(self, kind: Kind, step: int | None = None, **facts: object) -> None:
        """Tells of an event."""
        self.note(kind, step, **facts)
        self.flush()

    def note(self, kind: Kind, step: int | None = None, **facts: object) -> None:
        """As `add`, but leaves the file alone until the next `flush`: the training loop waits for no storage."""
        event = Event(kind, step, self._process, time.time(), **facts)  # pyright: ignore[reportArgumentType]
        if self._process == 0 and self._root.local:  # A bucket's objects cannot be appended to.
            line = {key: value for key, value in asdict(event).items() if value not in (None, "", {}, ())}
            if not event.bytes:
                del line["bytes"]
            self._lines.put(json.dumps(line).encode() + b"\n")
        self._tell(event)

    def _tell(self, event: Event) -> None:
        if self._callback is None:
            return
        try:
            self._callback(event)
        except BaseException as error:
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C; elsewhere there is a thread to be kept alive, which has checkpoints to write.
            message = f"on_event failed at {event}: {type(error).__name__}: {error}"
            try:
                warnings.warn(message, stacklevel=2)
            except Warning:  # Where warnings are errors.
                print(message, file=sys.stderr)

    def flush(self) -> None:
        """Writes what was noted."""
        lines = []
        with contextlib.suppress(queue.Empty):
            while True:
                lines.append(self._lines.get_nowait())
        if not lines:
            return
        try:
            self._append(b"".join(lines))
        except OSError as error:  # A full disk ends no training: the callback hears of it all the same.
            if not self._told:
                self._told = True
                self._tell(Event("warning", None, self._process, time.time(), message=f"{FILE}: {error}"))

    def _append(self, lines: bytes) -> None:
        self._root.make()
        fd = os.open(f"{self._root.url}/{FILE}", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            count = os.write(fd, lines)  # One call, so that two writers' lines do not mix.
            if count < len(lines):  # The disk is full now: no half line stays, which the next would be glued to.
                os.ftruncate(fd, os.fstat(fd).st_size - count)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{self._root.url}/{FILE}")
        finally:
            os.close(fd)
