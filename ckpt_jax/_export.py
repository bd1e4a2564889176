"""Export: what a view shows becomes files in another format."""

import importlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from . import _storage, _threads, _values
from ._view import View

# The modules that write them, by the names that users give. Each is imported when it is needed.
WRITERS = {"safetensors": "_to_safetensors", "npz": "_to_npz", "orbax": "_to_orbax"}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was exported.

    Attributes:
        path: where it is.
        to: the format.
        leaves, bytes: how many, and of their arrays.
        described: leaves that are no arrays, and which only ckpt_jax finds there.
        seconds: that it took, with reading all of it back.
    """

    path: str
    to: str
    leaves: int
    bytes: int
    described: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        size = _values.human(self.bytes)
        told = f"{self.path}: {self.leaves:,} leaves, {size}, written and read back in {self.seconds:.1f} s"
        if not self.described:
            return told
        few = ", ".join(self.described[:5]) + (", …" if len(self.described) > 5 else "")
        return f"{told}; no arrays, and in ckpt_jax's own words only: {few}"


def progress(
    view: View, path: _storage.PathLike, to: str, *, shard_bytes: int | None = None
) -> Iterator[tuple[int, int] | Exported]:
    """Writes files of a format, and reads all of them back: (bytes done, bytes in all), and the result.

    Killed at any moment and called again it goes on where it was, if the source is the same. Nothing has the name
    `path` before it is whole.

    Args:
        to: one of `WRITERS`.
        shard_bytes: of a folder of safetensors, how large a file becomes.

    Raises:
        Exists: something is there already.
        Unsupported: the format lacks what some leaves are; names all of them, and nothing was written.
        OSError: storage failed.
    """
    started = time.perf_counter()
    writer = importlib.import_module(f".{WRITERS[to]}", __package__)
    more = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
    yield from _threads.watched(lambda told: writer.write(view, _storage.folder(path), told=told, **more))
    described = () if to == "orbax" else tuple(name for name, leaf in view.leaves.items() if not leaf.stored)
    seconds = time.perf_counter() - started
    yield Exported(_storage.folder(path).url, to, len(view.leaves), view.nbytes, described, seconds)
