"""Our own checkpoints as views: boxes of their arrays, every chunk checked against its digest (no JAX)."""

import threading

import numpy as np

from . import _chunks, _commit, _faults, _reading, _values, _zarr
from ._chunks import Box
from ._manifest import Manifest
from ._storage import Folder
from ._view import View


def view(place: Folder, manifest: Manifest | None = None) -> View:
    """What a checkpoint holds.

    Raises:
        NotFound: nothing is committed there.
        Corrupt: its manifest is damaged.
    """
    manifest = manifest or _commit.load(place)
    lock = threading.Lock()
    sources: list[_reading.Source] = []

    def source() -> _reading.Source:
        with lock:
            if not sources:
                if place.local and (faults := _faults.of_files(place, manifest)):
                    raise _faults.damaged(place, faults)  # Or an array might be larger than what could fill it.
                sources.append(_reading.Source(place / manifest.state, manifest.state_files))
            return sources[0]

    def read(name: str, box: Box) -> np.ndarray:
        leaf, store = manifest.leaves[name], source()
        values = np.empty(_chunks.extent(box), leaf.dtype)
        requests = _reading.wanted(name, leaf, _chunks.covering(box, leaf.chunk))

        def use(chunk: _reading.Wanted, data: memoryview) -> bool:
            cell = _chunks.cell(chunk.coords, leaf.chunk, leaf.shape)
            if (shared := _chunks.overlap(box, cell)) is not None:
                found = np.frombuffer(data, _zarr.little(leaf.dtype)).reshape(leaf.chunk)
                values[_chunks.slices(shared, box)] = found[_chunks.slices(shared, cell)]
            return True

        bad = [(chunk, found) for chunk, done, found in _reading.read(requests, [store], use) if done is None]
        if bad:
            raise _faults.unreadable(place, manifest, bad)
        return values

    return View(
        "ckpt_jax",
        place.url,
        manifest.tree,
        manifest.leaves,
        read,
        step=manifest.step,
        metadata=_values.unpack(manifest.metadata),
        metrics=_values.unpack(manifest.metrics),
        stamp=manifest.seal,
    )
