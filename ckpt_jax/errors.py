"""What can be wrong with a checkpoint: every fault with its place, what was expected, and what was found."""

from collections.abc import Iterable
from dataclasses import dataclass

SHOWN = 100  # Faults printed; all of them stay in `error.faults`.


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, at one place: a leaf's name, a file, or a path."""

    place: str
    expected: str
    found: str
    text: str = ""  # Says it better than "expected …, found …" would, where it does.

    def __str__(self) -> str:
        return f"{self.place}: {self.text or f'expected {self.expected}, found {self.found}'}"


class CheckpointError(Exception):
    """Anything that is wrong with the data; the subclasses say in which way.

    Attributes:
        summary: one sentence.
        faults: every `Fault`, also those that the message leaves out.
        hint: what to do next.
    """

    def __init__(self, summary: str, faults: Iterable[Fault] = (), hint: str = ""):
        faults = tuple(faults)
        super().__init__(summary, faults, hint)
        self.summary, self.faults, self.hint = summary, faults, hint

    def __str__(self) -> str:
        lines = [self.summary.rstrip(":") + (":" if self.faults else "")]
        lines += [f"  {fault}" for fault in self.faults[:SHOWN]]
        if len(self.faults) > SHOWN:
            lines.append(f"  … and {len(self.faults) - SHOWN:,} more (all are in `error.faults`)")
        if self.hint:
            lines += ["", f"hint: {self.hint}"]
        return "\n".join(lines)


class NotFound(CheckpointError):
    """There is no committed checkpoint at that place."""


class Exists(CheckpointError):
    """Something stands where the checkpoint should go; it is left as it is."""


class Mismatch(CheckpointError):
    """The checkpoint does not fit what was asked for; nothing was read."""


class Corrupt(CheckpointError):
    """The bytes are not the ones that were saved."""


class Unsupported(CheckpointError):
    """This cannot be saved, or was written by a newer version."""


class Unhealthy(CheckpointError):
    """The state holds NaN or infinity."""
