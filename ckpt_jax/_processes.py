"""Which of the run's processes this one is, and small messages between them."""

import itertools
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError, Fault, Unsupported

TIMEOUT = 600.0  # Seconds for which one process waits for another before it reports it.

_calls = itertools.count()  # Every process saves the same checkpoints in the same order: this numbers them.


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of this run, seen from one of them, for the length of one save."""

    index: int = 0
    count: int = 1
    client: Any = None
    tag: str = ""

    def publish(self, key: str, message: str) -> None:
        if self.client is not None:
            self.client.key_value_set(f"{self.tag}/{key}", message)

    def wait(self, key: str, *, process: int, phase: str, timeout: float = TIMEOUT) -> str:
        """Another process's message.

        Raises:
            CheckpointError: it did not come in time; names the process and the phase.
        """
        try:
            return self.client.blocking_key_value_get(f"{self.tag}/{key}", int(timeout * 1000))
        except Exception as error:
            raise CheckpointError(
                f"process {process} did not get through the phase `{phase}` within {timeout:g} s",
                [Fault(f"process {process}", f"a message after `{phase}`", str(error).partition("\n")[0][:200])],
                hint="see that process's own log; nothing was committed",
            ) from error

    def forget(self, key: str) -> None:
        """Deletes a message once everyone has read it: a month of saves must leave nothing in the service."""
        if self.client is not None:
            self.client.key_value_delete(f"{self.tag}/{key}")


def here() -> tuple[int, int]:
    """This process's index, and the number of processes. Does not open a device before `jax.distributed` has."""
    state = _distributed()
    if state.client is not None:
        return state.process_id, state.num_processes
    import jax

    return jax.process_index(), jax.process_count()


def group() -> Group:
    """The group for one save.

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
    return Group(index, count, client, f"ckpt_jax/{next(_calls)}")


def _distributed() -> Any:
    from jax._src import distributed  # The one private import for this: JAX has no public key-value client.

    return distributed.global_state
