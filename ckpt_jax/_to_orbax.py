"""Orbax's checkpoints, written from what a view shows: what Orbax itself would have written, and no manifest."""

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from . import _chunks, _commit, _import, _manifest, _orbax, _save, _storage, _values, _writing, _zarr
from ._from_orbax import Item
from ._manifest import Leaf, Manifest
from ._view import View
from .errors import Corrupt, Fault, Unsupported


def check(view: View) -> None:
    """Raises Unsupported where Orbax cannot hold a leaf; names all of them."""
    faults = []
    for name, leaf in view.leaves.items():
        if leaf.stored and leaf.dtype not in _zarr.ZARR:
            faults.append(Fault(name, "a dtype that zarr has", leaf.dtype))
        elif not leaf.stored and not _orbax.holds(leaf):
            faults.append(Fault(name, "an array, a key, a text or a number of 64 bits", f"{leaf.kind} {leaf}"))
    if faults:
        hint = "leave them out with --only, or by a rule with drop = true; a rule's cast changes a dtype"
        raise Unsupported(f"{view.path} holds what Orbax does not", faults, hint=hint)


def write(view: View, target: _storage.Folder, *, told: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Writes an Orbax checkpoint with the item `state`, and reads it back; a killed one is gone on with.

    Raises:
        Exists: something is there already.
        Unsupported: a leaf is not of Orbax's kinds; nothing was written.
        OSError: storage failed; what was written is gone again.
    """
    check(view)
    leaves = _import.records(view)
    again = _import.again(view, leaves)
    attempt = _save.taken_up(target, again, state="state")
    try:
        place = attempt.process(0)
        place.make()
        extra = _save.numbers(leaves)
        numbers = (_writing.Chunk(name, 0, (), value) for name, (_, value) in extra.items())
        records = leaves | {name: leaf for name, (leaf, _) in extra.items()}
        chunks = itertools.chain(_import.chunks(view, leaves, told), numbers)
        written = _writing.write(place, records, chunks, head=True, again=again)
        _writing.merge(attempt.folder / attempt.state, [place])
        for file, data in _sidecars(view, leaves).items():
            attempt.folder.write(file, data)
        _check_back(attempt.folder / attempt.state, records, written.digests)
        attempt.folder.write("commit_success.txt", b"Exported by ckpt_jax.\n")  # The last: in a bucket it counts then.
        if target.local:
            attempt.folder.sync()
            attempt.folder.rename(target)
            attempt.placed = True
    except KeyboardInterrupt:
        attempt.close()
        raise
    except BaseException:
        _commit.discard(attempt)
        raise
    attempt.close()


def _sidecars(view: View, leaves: dict[str, Leaf]) -> dict[str, bytes]:
    manifest = Manifest(_manifest.FORMAT, (_manifest.MAJOR, _manifest.MINOR), tree=view.tree, leaves=leaves)
    files = _orbax.sidecars(manifest, "cpu:0")
    told = json.loads(files["_CHECKPOINT_METADATA"])
    told["custom_metadata"] = _plain(view.metadata) | _orbax.ESCAPED
    told["metrics"] = view.metrics
    del files["commit_success.txt"]
    return files | {"_CHECKPOINT_METADATA": json.dumps(told).encode()}


def _plain(metadata: Any) -> dict[str, Any]:
    packed = _values.pack(metadata)
    if isinstance(packed, dict) and not {"metadata", *_orbax.ESCAPED}.intersection(packed):
        return packed
    return {} if packed is None else {"metadata": packed}


def _check_back(place: _storage.Folder, leaves: dict[str, Leaf], digests: Mapping[str, Mapping[int, str]]) -> None:
    """Raises Corrupt where what was written does not read back, by way of TensorStore as Orbax does."""
    item, faults = Item(place), []
    view = View("Orbax", place.url, "", leaves, lambda name, box: item.read(name, box, name))
    for name, found in digests.items():
        for at, digest in found.items():
            data = view.cell(name, _chunks.coordinates(at, leaves[name].counts))
            if xxhash.xxh3_128_hexdigest(data) != digest:
                faults.append(Fault(name, f"chunk {at} as it was written", "another"))
    if faults:
        raise Corrupt(f"{place} does not read back as it was written", faults, hint="is the disk or the memory faulty?")
