"""Import: a checkpoint in any format becomes one of ours, chunk by chunk."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from . import _chunks, _commit, _manifest, _processes, _save, _snapshot, _storage, _threads, _values, _verify
from ._chunks import Box
from ._manifest import Leaf, Manifest
from ._view import View
from ._writing import Chunk

LARGE = 64 << 20  # Bytes of a chunk; larger ones are cut.


@dataclass(frozen=True, slots=True)
class Imported:
    """What was imported.

    Attributes:
        path: the checkpoint.
        kind: the format that it was in.
        leaves, bytes: how many, and of their arrays.
        lacks: what that format could not tell.
        seconds: that it took, with reading all of it back.
    """

    path: str
    kind: str
    leaves: int
    bytes: int
    lacks: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        lacks = f"; {self.kind} does not tell {', nor '.join(self.lacks)}" if self.lacks else ""
        size = _values.human(self.bytes)
        return f"{self.path}: {self.leaves:,} leaves, {size}, written and read back in {self.seconds:.1f} s{lacks}"


def progress(
    view: View, path: _storage.PathLike, *, step: int | None = None, overwrite: bool = False
) -> Iterator[tuple[int, int] | Imported]:
    """Writes what a view shows as a checkpoint, and reads all of it back: (bytes done, bytes in all), and the result.

    Killed at any moment and called again it goes on where it was, if the source is the same. Memory is bounded: a few
    chunks at a time are in it.

    Raises:
        Exists: something is there already.
        Corrupt: the source is damaged, as far as its format can tell; or what was written does not read back.
        OSError: storage failed; what was written is gone again.
    """
    started = time.perf_counter()
    target = _storage.folder(path)
    leaves, size = records(view), view.nbytes

    def work(told: Callable[[int, int], None]) -> None:
        group = _processes.group(f"import/{target.name}")
        try:
            manifest = _manifest_of(target, view, leaves, step)
            snapshot = _snapshot.Snapshot(leaves, elsewhere=chunks(view, leaves, told))
            _save.write(target, manifest, snapshot, group, _save.Terms(overwrite, again=again(view, leaves)))
        finally:
            group.part()

    for done, _ in _threads.watched(work):
        yield done, 2 * size
    for found in _verify.progress(path, "chunks"):
        if isinstance(found, tuple):
            yield size + found[0], 2 * size
        else:
            found.check()
    yield Imported(target.url, view.kind, len(leaves), size, view.lacks, time.perf_counter() - started)


def again(view: View, leaves: dict[str, Leaf]) -> str:
    """A name for what is written: the same only if every file comes out the same to the last bit."""
    shapes = [(name, str(leaf), leaf.chunk) for name, leaf in leaves.items()]
    return hashlib.sha256(f"{view.stamp} {shapes}".encode()).hexdigest()[:16]


def records(view: View) -> dict[str, Leaf]:
    """The leaves without what they were in the source: its digests and shardings."""
    leaves = {}
    for name, leaf in view.leaves.items():
        chunk = leaf.chunk
        if leaf.stored and _manifest.chunk_bytes(leaf) > LARGE:
            chunk = _chunks.grid(leaf.shape, leaf.shape, _manifest.itemsize(leaf.dtype))
        leaves[name] = msgspec.structs.replace(leaf, chunk=chunk, digests="", sharding=None)
    return leaves


def _manifest_of(target: _storage.Folder, view: View, leaves: dict[str, Leaf], step: int | None) -> Manifest:
    named = _commit.step_of(target.name)
    if step is None:
        step = view.step if named is None else named
    return Manifest(
        _manifest.FORMAT,
        (_manifest.MAJOR, _manifest.MINOR),
        step=_save.checked_step(target, step),
        tree=view.tree,
        leaves=leaves,
        metrics=view.metrics,
        metadata=_values.pack(view.metadata),
    )


def chunks(view: View, leaves: dict[str, Leaf], told: Callable[[int, int], None]) -> Iterator[Chunk]:
    """The chunks in grid order; each is read by the thread that writes it, which tells the bytes done and in all."""
    done, total, lock = 0, view.nbytes, threading.Lock()

    def reads(name: str, box: Box, size: int) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            nonlocal done
            with lock:
                done += size
                told(done, total)
            return view.read(name, box)

        return read

    for name, leaf in leaves.items():
        counts = leaf.counts
        for coords in _chunks.covering(_chunks.whole(leaf.shape), leaf.chunk) if leaf.stored else ():
            box = _chunks.cell(coords, leaf.chunk, leaf.shape)
            size = _manifest.itemsize(leaf.dtype) * int(np.prod(_chunks.extent(box)))
            yield Chunk(name, _chunks.position(coords, counts), coords, reads(name, box, size))
