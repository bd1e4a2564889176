"""A snapshot: this process's share of a state, in host memory."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import msgspec
import numpy as np
import xxhash

from . import _chunks
from ._chunks import Box, Shape
from ._leaves import Encoded
from ._manifest import Leaf
from ._writing import Chunk

ON_HOST = True  # A test says False, and CPU devices are treated like those of an accelerator.


class _Share(msgspec.Struct, gc=False):
    """This process's cells of one box of a leaf, and where their values are."""

    name: str
    source: Any
    box: Box
    cells: list[tuple[Shape, int, Box]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is to be written.

    Attributes:
        leaves: every leaf's record, without digests.
        shares: this process's share of their values.
        shardings: how the arrays were sharded, as plain data, each once.
        live: this process's state of the live leaves that each process has its own of.
        shared: digests of the values that every process holds for itself.
        elsewhere: of what is no state in memory, its chunks.
    """

    leaves: dict[str, Leaf]
    shares: list[_Share] = field(default_factory=list)
    shardings: list[dict[str, Any]] = field(default_factory=list)
    live: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    elsewhere: Iterable[Chunk] = ()

    @property
    def chunks(self) -> Iterator[Chunk]:
        """This process's chunks; waits for the copies to the host, one by one."""
        yield from self.elsewhere
        for share in self.shares:
            values = np.asarray(share.source)
            for coords, at, cell in share.cells:
                part = values if cell == share.box else values[_chunks.slices(cell, share.box)]
                yield Chunk(share.name, at, coords, part)


@dataclass(frozen=True, slots=True)
class _Layout:
    """How arrays of one shape and sharding are cut: the same for all of them, and in each save."""

    chunk: Shape
    # (which of the shards here, None for the array itself; box; the processes that hold it; its cells)
    boxes: list[tuple[int | None, Box, Sequence[int], list[tuple[Shape, int, Box]]]]
    on_cpu: bool  # Whether it is JAX's memory on the host; elsewhere a copy has to be made.


def take(encoded: dict[str, Encoded], process: int = 0, processes: int = 1, *, hold: bool = False) -> Snapshot:
    """This process's chunks of every leaf; with `hold`, nothing that the caller does afterwards changes them.

    On the CPU backend the chunks are views: while one is held, JAX copies instead of donating, so the values stay.
    Elsewhere all copies to the host are started before the first is waited for, and with `hold` they are made in host
    memory that JAX keeps by itself, where there is such. NumPy's memory is copied with `hold`.
    """
    snapshot = Snapshot({name: item.leaf for name, item in encoded.items()})
    known: dict[Any, int] = {}
    for turn, (name, item) in enumerate(encoded.items()):
        leaf, array = item.leaf, item.array
        if leaf.kind == "live" and "global" not in leaf.value:
            snapshot.live[name] = leaf.value["processes"][0]
        elif leaf.kind == "live" and processes > 1:
            snapshot.shared[name] = xxhash.xxh3_128_hexdigest(msgspec.json.encode(leaf.value))
        if array is None:
            continue
        alone = processes > 1 and (isinstance(array, np.ndarray) or array.is_fully_addressable)
        if alone:
            snapshot.shared[name] = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).tobytes())
        sharding = None if isinstance(array, np.ndarray) else array.sharding
        layout = _layout(sharding, leaf.shape, array.dtype.itemsize, processes, alone=alone or sharding is None)
        on_host = ON_HOST and layout.on_cpu
        leaf.chunk = layout.chunk
        if sharding is not None:
            if sharding not in known:
                known[sharding] = len(snapshot.shardings)
                snapshot.shardings.append(plain(sharding))
            leaf.sharding = known[sharding]
        for at, box, holders, cells in layout.boxes:
            mine = cells
            if processes > 1:
                mine = [c for i, c in enumerate(cells) if _chunks.owner(holders, i, len(cells), turn) == process]
            if mine:
                # `addressable_shards` has the same order, and takes eight times as long.
                source: Any = array if at is None else array.addressable_data(at)  # pyright: ignore[reportAttributeAccessIssue]
                source = np.asarray(source) if on_host else _started(source, hold=hold)
                snapshot.shares.append(_Share(name, source, box, mine))
    for share in snapshot.shares if hold else ():
        if not isinstance(share.source, np.ndarray) and not _staged(share.source):
            share.source = np.asarray(share.source)  # Donation would delete it: here its copy has to be waited for.
    return snapshot


def _started(source: Any, *, hold: bool) -> Any:
    """The values themselves, or a copy of them that is under way."""
    if isinstance(source, np.ndarray):
        return source.copy() if hold else source
    if hold and (staging := _staging(source)) is not None:
        return jax.device_put(source, staging)
    source.copy_to_host_async()
    return source


def _staging(source: jax.Array) -> Any:
    """A sharding in the host memory that the array's device writes to, if it has such."""
    (device,) = source.sharding.addressable_devices
    kinds = {memory.kind for memory in device.addressable_memories()}
    return source.sharding.with_memory_kind("pinned_host") if "pinned_host" in kinds else None


def _staged(source: jax.Array) -> bool:
    return source.sharding.memory_kind == "pinned_host"


@functools.lru_cache(4096)
def _layout(sharding: Any, shape: Shape, itemsize: int, processes: int, *, alone: bool) -> _Layout:
    """Boxes go by their index, never by device order, which a mesh may permute.

    Args:
        sharding: None for NumPy's arrays.
        shape, itemsize: the array's.
        processes: how many there are.
        alone: whether every process has an array of its own, with the same values.
    """
    everyone = range(processes) if alone else None
    here: Mapping[Box, int | None]
    if sharding is None:
        shard, here, on_cpu = shape, {_chunks.whole(shape): None}, False
    else:
        shard = sharding.shard_shape(shape)
        indices = list(sharding.addressable_devices_indices_map(shape).values())  # In the order of `addressable_data`.
        here = {_chunks.box(index or (), shape): i for i, index in reversed(list(enumerate(indices)))}
        if sharding.is_fully_addressable and sharding.num_devices == 1:
            here = dict.fromkeys(here, None)  # The array itself: its only shard would be another object to make.
        on_cpu = all(device.platform == "cpu" for device in sharding.addressable_devices)
    holders: dict[Box, Sequence[int]] = dict.fromkeys(here, everyone or (0,))
    found: dict[Box, set[int]] = {}
    if sharding is not None and everyone is None and processes > 1:
        for device, index in sharding.devices_indices_map(shape).items():
            found.setdefault(_chunks.box(index, shape), set()).add(device.process_index)
        holders = {box: sorted(found[box]) for box in here}
    # Over all boxes, not just those here: every process must find the same grid.
    writers = max(map(len, found.values())) if found else len(everyone or (0,))
    chunk = _chunks.grid(shape, shard, itemsize, writers)
    counts = _chunks.counts(shape, chunk)
    boxes = []
    for box, at in here.items():
        cells = [
            (coords, _chunks.position(coords, counts), _chunks.cell(coords, chunk, shape))
            for coords in _chunks.covering(box, chunk)
        ]
        boxes.append((at, box, holders[box], cells))
    return _Layout(chunk, boxes, on_cpu)


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
