"""Preemption: the notice that this machine will be taken away."""

import contextlib
import signal
import threading
import time
from types import FrameType
from typing import Any

from . import _processes


class Notice:
    """Hears of a preemption.

    One process, or several without JAX's preemption service: by SIGTERM; the handler only notes it, and calls the one
    that was there before. With JAX's service SIGTERM is JAX's, and a second handler would disable it.
    """

    def __init__(self) -> None:
        self.at: float | None = None  # When it came, by the monotonic clock.
        self._before: Any = None
        self._installed = False
        self.service = _processes.preemption_service()
        if not self.service and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._installed = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.at is None:
            self.at = time.monotonic()
        if callable(self._before):
            self._before(number, frame)

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
        if self._installed and signal.getsignal(signal.SIGTERM) == self._note:
            with contextlib.suppress(ValueError, TypeError):  # Not the main thread; or C code's handler.
                signal.signal(signal.SIGTERM, self._before)
        self._installed = False
