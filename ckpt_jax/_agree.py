"""Agreement: a step that lies ahead of every process, found while they all train on."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

POLL = 0.5  # Seconds between a thread's looks for a call.
ANSWER = 10.0  # Seconds within which every process's thread must say where it is; training is held for so long.


class Meeting:
    """Answers the question "at which of the coming steps?", alike in every process.

    Whoever wants something to happen at the same step everywhere calls for it. A thread in each process then holds its
    next `passed` back, says which step it is at, and hears the others: the step after the latest of them is the one.
    Training is held for as long as a few messages take; no process waits for another's training.
    """

    def __init__(self, client: Any, index: int, count: int, tag: str, tell: Callable[[str], None]):
        """`tell` hears, in words, of what could not be agreed on."""
        self._client, self._index, self._count, self._tag = client, index, count, tag
        self._tell = tell
        self._lock = threading.Lock()
        self._step = -1
        self._wanted: set[str] = set()  # What this process called for, and has not been agreed on.
        self._agreed: set[tuple[str, int]] = set()
        self._number = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="ckpt_jax meeting", daemon=True)
        if client is not None:
            self._thread.start()

    def call(self, reason: str) -> None:
        """Asks all processes to agree on a step for something."""
        with self._lock:
            if self._client is None:
                self._agreed.add((reason, 0))  # There is nobody to agree with: at the next, whichever it is.
            else:
                self._wanted.add(reason)  # The thread calls: training waits for no service.

    def passed(self, step: int) -> set[str]:
        """Says that this process is at a step; gives what was agreed to happen now."""
        with self._lock:
            self._step = step
            due = {(reason, at) for reason, at in self._agreed if step >= at}
            self._agreed -= due
            return {reason for reason, _ in due}

    def back_to(self, step: int) -> None:
        """The run goes on from an earlier step: what was agreed on for a later one comes at the next."""
        with self._lock:
            self._step = step
            self._agreed = {(reason, min(at, step + 1)) for reason, at in self._agreed}

    def close(self) -> None:
        """Ends the thread: one that is still in the service when Python ends brings the process down."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _listen(self) -> None:
        while not self._closed.wait(POLL):
            with self._lock:
                wanted = next(iter(self._wanted), None)
            if wanted is not None:
                with contextlib.suppress(Exception):  # Another process was first: its call is met now, ours next.
                    self._client.key_value_set(f"{self._tag}/call/{self._number}", wanted)
            # Looked for, not waited for: a call that blocks could not be ended.
            try:
                reason = self._client.key_value_try_get(f"{self._tag}/call/{self._number}")
            except Exception as error:  # noqa: BLE001  jaxlib has its own kinds.
                if "NOT_FOUND" in str(error):
                    continue
                return  # The service is gone, and the run with it.
            try:
                with self._lock:
                    self._wanted.discard(reason)  # Also if nothing comes of it: no second try holds training again.
                    self._meet(reason)
            except Exception as error:  # noqa: BLE001  Somebody did not answer, or the service is gone.
                why = str(error).partition("\n")[0][:200]
                self._tell(f"the processes could not agree on a step to {reason} at: {why}")
            self._number += 1

    def _meet(self, reason: str) -> None:
        here = f"{self._tag}/at/{self._number}"
        self._client.key_value_set(f"{here}/{self._index}", str(self._step))
        steps = [
            int(self._client.blocking_key_value_get(f"{here}/{i}", int(ANSWER * 1000))) for i in range(self._count)
        ]
        self._agreed.add((reason, max(steps) + 1))
        if self._index == 0 and self._number:  # All have answered this one, so they have read the one before.
            for old in ("call", "at"):
                self._client.key_value_delete(f"{self._tag}/{old}/{self._number - 1}")
