"""Preemption: the notice that this machine will be taken away."""

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from . import _processes


class Notice:
    """Hears of a preemption.

    One process, or several without JAX's preemption service: by SIGTERM; the handler only notes it, and calls the one
    that was there before. A later one, once the grace is over, ends the process. With JAX's service SIGTERM is JAX's,
    and a second handler would disable it.
    """

    def __init__(self, grace: float) -> None:
        self.at: float | None = None  # When it came, by the monotonic clock.
        self._grace = grace
        self._before: Any = None
        self._pid, self._closed = os.getpid(), False
        self.service = _processes.preemption_service()
        if not self.service and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        ours = not self._closed and os.getpid() == self._pid
        late = self.at is not None and time.monotonic() > self.at + self._grace  # Told again: it seems to hang.
        if ours and self.at is None:
            self.at = time.monotonic()
        if callable(self._before):
            self._before(number, frame)
        elif (late or not ours) and self._before != signal.SIG_IGN:  # Or a forked child, or past the run.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def reached(self, step: int) -> bool:
        """Whether JAX's service says that all processes stop after this step; every process asks at every step."""
        if not self.service:
            return False
        from jax.experimental import multihost_utils

        if multihost_utils.reached_preemption_sync_point(step):
            self.at = self.at or time.monotonic()
            return True
        return False

    def close(self) -> None:
        """Gives the signal back to whoever had it."""
        self._closed = True
        if signal.getsignal(signal.SIGTERM) == self._note:  # Else a later one has it, and comes here when it is called.
            with contextlib.suppress(ValueError, TypeError):  # Not the main thread; or C code's handler.
                signal.signal(signal.SIGTERM, self._before)
