"""Which of the run's processes this one is, and small messages between them."""

import collections
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError, Fault, Unsupported

TIMEOUT = 600.0  # Seconds for which one process waits for another before it reports it.
FAREWELL = 10.0  # Seconds for which process 0 waits until all have read what became of a save.

_calls: collections.Counter[str] = collections.Counter()  # How often this process had a group of each name.
_late: list[str] = []  # Whose messages still stand in the service, because not all had left in time.


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of this run, seen from one of them, for the length of one save."""

    index: int = 0
    count: int = 1
    client: Any = None
    tag: str = ""
    timeout: float = TIMEOUT

    def publish(self, key: str, message: str) -> None:
        """Tells the others.

        Raises:
            CheckpointError: the service, which process 0 runs, did not take it in time.
        """
        if self.client is None:
            return
        failed: list[Exception] = []

        def tell() -> None:
            try:
                self.client.key_value_set(f"{self.tag}/{key}", message)
            except Exception as error:  # noqa: BLE001  jaxlib has its own kinds; raised below, in the caller's thread.
                failed.append(error)

        # In a thread of its own: the call has no time limit, and process 0 may hang.
        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        thread.join(self.timeout)
        if thread.is_alive():
            raise _silent(0, "listen", self.timeout, "the coordination service does not answer")
        if failed:
            text = str(failed[0]).partition("\n")[0][:200]
            raise CheckpointError(
                f"the coordination service did not take a message: {text}", hint="process 0 runs it; see its log"
            ) from failed[0]

    def wait(self, key: str, *, process: int, phase: str, seconds: float | None = None) -> str:
        """Another process's message; waits for `seconds`, or the group's timeout.

        Raises:
            CheckpointError: it did not come in time; names the process and the phase.
        """
        seconds = self.timeout if seconds is None else seconds
        try:
            return self.client.blocking_key_value_get(f"{self.tag}/{key}", max(1, int(seconds * 1000)))
        except Exception as error:
            raise _silent(process, phase, seconds, str(error).partition("\n")[0][:200]) from error

    def wait_for_all(self, key: str, *, phase: str) -> Iterator[tuple[int, str]]:
        """The message of each process but the first, as they come in, together within the group's timeout.

        Raises:
            CheckpointError: some did not come; names all these.
        """
        end = time.monotonic() + self.timeout
        silent: list[CheckpointError] = []
        for process in range(1, self.count):
            try:
                # Looked for first: once the time is up, those that come after a silent one have had theirs.
                message = self.heard(f"{key}/{process}") or self.wait(
                    f"{key}/{process}", process=process, phase=phase, seconds=end - time.monotonic()
                )
            except CheckpointError as error:
                silent.append(error)
            else:
                yield process, message
        if silent:
            faults = [fault for error in silent for fault in error.faults]
            names = ", ".join(fault.place.removeprefix("process ") for fault in faults)
            who = f"process{'es' * (len(silent) > 1)} {names}"
            raise CheckpointError(
                f"{who} did not get through the phase `{phase}` within {self.timeout:g} s",
                faults,
                hint=silent[0].hint,
            ) from silent[0]

    def heard(self, key: str) -> str | None:
        """A message, if it is there already and the service answers."""
        with contextlib.suppress(Exception):
            return self.client.key_value_try_get(f"{self.tag}/{key}")
        return None

    def part(self) -> None:
        """Ends it here. Once all have, process 0 deletes the messages: a month of saves leaves none in the service."""
        if self.client is None:
            return
        if self.index:
            self.publish(f"parted/{self.index}", "")
            return
        try:
            patience = min(FAREWELL, self.timeout)
            for process in range(1, self.count):
                self.client.blocking_key_value_get(f"{self.tag}/parted/{process}", int(patience * 1000))
        except Exception:  # noqa: BLE001  Someone died or is late: the next one that all leave takes these along.
            _late.append(self.tag)
            return
        # Each process leaves one before the next, so all have left those before this one too.
        for tag in [self.tag, *_late]:
            self.client.key_value_delete(tag)
        _late.clear()


def _silent(process: int, phase: str, timeout: float, why: str) -> CheckpointError:
    return CheckpointError(
        f"process {process} did not get through the phase `{phase}` within {timeout:g} s",
        [Fault(f"process {process}", f"a message after `{phase}`", why)],
        hint="see that process's own log; nothing was committed",
    )


def here() -> tuple[int, int]:
    """This process's index, and the number of processes. Does not open a device before `jax.distributed` has."""
    state = _distributed()
    if state.client is not None:
        return state.process_id, state.num_processes
    import jax

    return jax.process_index(), jax.process_count()


def group(name: str, timeout: float = TIMEOUT) -> Group:
    """The group for one thing that all processes do, such as the save of one step.

    By its name and not by a count of all: a process that leaves one out is missed there, and is back at the next.

    Raises:
        Unsupported: there are several processes and no service through which they could agree.
    """
    index, count = here()
    if count == 1:
        return Group()
    client = _distributed().client
    if client is None:
        raise Unsupported(
            f"{count} processes cannot agree on a checkpoint without JAX's coordination service",
            hint="call jax.distributed.initialize() first",
        )
    number = _calls[name]
    _calls[name] += 1
    return Group(index, count, client, f"ckpt_jax/{number}/{name}", timeout)


def client() -> Any:
    """JAX's coordination service; None where there is just one process."""
    return _distributed().client if here()[1] > 1 else None


def preemption_service() -> bool:
    """Whether JAX itself hears of preemptions, and tells all processes."""
    return here()[1] > 1 and getattr(_distributed(), "preemption_sync_manager", None) is not None


def _distributed() -> Any:
    from jax._src import distributed  # The one private import for this: JAX has no public key-value client.

    return distributed.global_state
