"""A snapshot: this process's share of a state, in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import xxhash

from . import _chunks
from ._chunks import Box, Shape
from ._leaves import Encoded
from ._manifest import Leaf


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk that this process writes: its place, and its values (less than the chunk shape at an array's edge)."""

    name: str
    position: int
    coords: Shape
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is to be written; nothing in it changes when the state it was taken from does.

    Attributes:
        leaves: every leaf's record, without digests.
        chunks: this process's chunks.
        shardings: how the arrays were sharded, as plain data, each once.
        live: this process's state of the live leaves that each process has its own of.
        shared: digests of the values that every process holds for itself.
    """

    leaves: dict[str, Leaf]
    chunks: list[Chunk] = field(default_factory=list)
    shardings: list[dict[str, Any]] = field(default_factory=list)
    live: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)


def take(encoded: dict[str, Encoded], process: int = 0, processes: int = 1) -> Snapshot:
    """This process's chunks of every leaf.

    On the CPU backend the chunks are views: while one is held, JAX copies instead of donating, so the values stay.
    Elsewhere all copies to the host are started before the first is waited for.
    """
    snapshot = Snapshot({name: item.leaf for name, item in encoded.items()})
    known: dict[Any, int] = {}
    pending: list[tuple[str, Leaf, Box, Any, list[tuple[Shape, int]]]] = []
    for turn, (name, item) in enumerate(encoded.items()):
        leaf, array = item.leaf, item.array
        if leaf.kind == "live" and "global" not in leaf.value:
            snapshot.live[name] = leaf.value["processes"][0]
        if array is None:
            continue
        alone = processes > 1 and (isinstance(array, np.ndarray) or array.is_fully_addressable)
        if alone:
            snapshot.shared[name] = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).tobytes())
        if isinstance(array, np.ndarray):
            shard, held = array.shape, {_chunks.whole(array.shape): (range(processes), array)}
        else:
            shard, held = _shards(array, range(processes) if alone else None, processes)
            sharding = array.sharding
            if sharding not in known:
                known[sharding] = len(snapshot.shardings)
                snapshot.shardings.append(plain(sharding))
            leaf.sharding = known[sharding]
        writers = max((len(holders) for holders, _ in held.values()), default=1)
        leaf.chunk = _chunks.grid(array.shape, shard, array.dtype.itemsize, writers)
        counts = leaf.counts
        for box, (holders, source) in held.items():
            cells = list(_chunks.covering(box, leaf.chunk))
            mine = [
                (coords, _chunks.position(coords, counts))
                for number, coords in enumerate(cells)
                if _chunks.owner(holders, number, len(cells), turn) == process
            ]
            if mine:
                if isinstance(source, jax.Array):
                    source.copy_to_host_async()
                pending.append((name, leaf, box, source, mine))
    for name, leaf, box, source, mine in pending:
        values = np.asarray(source)
        for coords, position in mine:
            cell = _chunks.cell(coords, leaf.chunk, leaf.shape)
            snapshot.chunks.append(Chunk(name, position, coords, values[_chunks.slices(cell, box)]))
    return snapshot


def _shards(
    array: jax.Array, everyone: Sequence[int] | None, processes: int
) -> tuple[Shape, dict[Box, tuple[Sequence[int], jax.Array]]]:
    """The shape of a device's box, and for each box that is here: the processes that hold it, and its values.

    Boxes go by `shard.index`, never by device order, which a mesh may permute.
    """
    here = {_chunks.box(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    if everyone is None and processes > 1:
        holders: dict[Box, set[int]] = {}
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            holders.setdefault(_chunks.box(index, array.shape), set()).add(device.process_index)
        held = {box: (sorted(holders[box]), data) for box, data in here.items()}
    else:
        held = {box: (everyone or (0,), data) for box, data in here.items()}
    return array.sharding.shard_shape(array.shape), held


def plain(sharding: jax.sharding.Sharding) -> dict[str, Any]:
    """A sharding as plain data, for people and for planning; restoring never needs it."""
    described: dict[str, Any] = {"type": type(sharding).__name__, "devices": sharding.num_devices}
    if sharding.memory_kind not in (None, "device"):
        described["memory_kind"] = sharding.memory_kind
    if isinstance(sharding, jax.sharding.NamedSharding):
        mesh = sharding.mesh
        described |= {
            "axes": dict(mesh.shape),
            "axis_types": [str(t).rpartition(".")[2] for t in mesh.axis_types],
            "spec": [list(part) if isinstance(part, tuple) else _axis(part) for part in sharding.spec],
        }
    return described


def _axis(part: Any) -> str | None:
    return part if part is None or isinstance(part, str) else str(part)


