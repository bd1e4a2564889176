"""Properties: what holds for every tree, sharding, value, name and grid that Hypothesis can think of."""

import functools
import itertools
import json
import math
import struct
import time
import uuid
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt_jax as ck
from ckpt_jax import _chunks, _manifest, _open, _snapshot, _storage, _structure, _tree, _values, _zarr
from ckpt_jax._leaves import Encoded
from ckpt_jax._manifest import Leaf, Part

from .cells import cells_of
from .trees import same

DEVICES = jax.devices()

pytestmark = pytest.mark.skipif(len(DEVICES) < 8, reason="needs 8 devices")


def tries(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


# --- arrays on meshes -------------------------------------------------------------------------------------------------

JAX_DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "int32",
    "uint8",
    "int8",
    "uint32",
    "bool",
    "complex64",
    "float8_e4m3fn",
)
NUMPY_DTYPES = (*JAX_DTYPES, "float64", "int64", "uint64", "complex128", "int16", "float8_e5m2", "int4")


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Up to eight devices, in any order, on up to three axes."""
    shape = draw(
        st.sampled_from([(1,), (2,), (3,), (4,), (8,), (2, 2), (4, 2), (2, 4), (1, 8), (3, 2), (2, 2, 2), (7,)])
    )
    order = draw(st.permutations(range(8)))
    devices = np.array([DEVICES[i] for i in order[: math.prod(shape)]]).reshape(shape)
    return Mesh(devices, draw(st.permutations(["a", "b", "c"]))[: len(shape)])


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> jax.sharding.Sharding | None:
    """Any sharding of a shape: over each axis any of a mesh's axes that divide it, singly or several at once."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from([None, jax.sharding.SingleDeviceSharding(DEVICES[3])]))
    mesh = draw(meshes())
    free = list(draw(st.permutations(mesh.axis_names)))
    spec: list[Any] = []
    for n in shape:
        taken: list[str] = []
        while free and len(taken) < 2 and draw(st.booleans()):
            if n % (math.prod(mesh.shape[axis] for axis in taken) * mesh.shape[free[-1]]) == 0:
                taken.append(free.pop())
            else:
                break
        spec.append(None if not taken else taken[0] if len(taken) == 1 else tuple(taken))
    return NamedSharding(mesh, PartitionSpec(*spec))


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 0]), max_size=3).map(tuple)


def filled(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """An array of any bits: NaNs of every kind, infinities, denormals, negative zeros."""
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    if dtype == "bool":
        raw &= 1
    if dtype == "int4":
        return (raw[..., 0] % 16).astype(np.int8).astype(ml_dtypes.int4)
    return np.ascontiguousarray(raw).view(dtype)[..., 0] if shape else raw.view(dtype)[0]


def put(values: Any, sharding: jax.sharding.Sharding | None) -> jax.Array:
    return jnp.asarray(values) if sharding is None else jax.device_put(values, sharding)


@st.composite
def arrays(draw: st.DrawFn) -> tuple[Any, Any]:
    """A leaf of arrays, and another of the same kind on another sharding."""
    shape, seed = draw(shapes), draw(st.integers(0, 2**32))
    kind = draw(st.sampled_from(["jax", "jax", "jax", "key", "numpy", "generic"]))
    if kind == "numpy":
        dtype = draw(st.sampled_from(NUMPY_DTYPES))
        value = np.asarray(filled(shape, dtype, seed)).reshape(shape)
        return value, np.zeros(shape, dtype)
    if kind == "generic":
        dtype = draw(st.sampled_from(NUMPY_DTYPES[:-1]))
        return filled((), dtype, seed), np.zeros((), dtype)[()]
    one, two = draw(shardings(shape)), draw(shardings(shape))
    if kind == "key":
        impl = draw(st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"]))
        size = {"threefry2x32": 2}.get(impl, 4)
        data = filled((*shape, size), "uint32", seed)
        keys = [jax.random.wrap_key_data(jnp.asarray(d), impl=impl) for d in (data, np.zeros_like(data))]
        return tuple(k if s is None else jax.device_put(k, s) for k, s in zip(keys, (one, two), strict=True))
    dtype = draw(st.sampled_from(JAX_DTYPES))
    return put(filled(shape, dtype, seed), one), put(np.zeros(shape, dtype), two)


scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(codec=None), max_size=6),
    st.binary(max_size=6),
)
leaves = arrays() | scalars.map(lambda value: (value, type(value)()))
keys_of_dicts = st.text(st.sampled_from("ab.%/é~\x00 "), max_size=3)


def dicts(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(keys_of_dicts, children, max_size=4) | st.dictionaries(
        st.integers(-3, 12), children, max_size=3
    )


class _Tuple(list):
    """Marks what is to become a tuple: here tuples are pairs of leaves."""


trees = st.recursive(
    leaves | st.none(),
    lambda children: st.one_of(
        dicts(children),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(_Tuple),
    ),
    max_leaves=8,
)


def side(pairs: Any, which: int) -> Any:
    """The tree as it is saved (0), or as it is asked for (1)."""
    if isinstance(pairs, dict):
        return {key: side(value, which) for key, value in pairs.items()}
    if isinstance(pairs, list):
        made = [side(value, which) for value in pairs]
        return tuple(made) if isinstance(pairs, _Tuple) else made
    return pairs if pairs is None else pairs[which]


def moved(saved: Any, like: Any) -> Any:
    """What must come back: the saved values, on the shardings of the target."""

    def on(value: Any, target: Any) -> Any:
        if isinstance(target, jax.Array) and target.committed:
            return jax.device_put(value, target.sharding)
        return value

    return jax.tree.map(on, saved, like)


def _placed(tree: Any) -> list[Any]:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return [(leaf.committed, leaf.sharding if leaf.committed else None) for leaf in arrays]


@given(tree=trees, cell=st.sampled_from([8, 64, 1024, 16 << 20]))
@tries(150)
def test_restoring_onto_any_other_sharding_is_the_identity(tree: Any, cell: int) -> None:
    saved, like = side(tree, 0), side(tree, 1)
    place = f"memory://{uuid.uuid4()}/1"
    with cells_of(cell):
        ck.save(place, saved)
    try:
        restored = ck.restore(place, like)
        same(restored, moved(saved, like))
        assert _placed(restored) == _placed(like)
        same(ck.restore(place, saved), saved)
        same(jax.tree.leaves(ck.restore(place)), [_hosted(leaf) for leaf in jax.tree.leaves(saved)])
        assert ck.verify(place).ok
    finally:
        _storage.folder(place).remove()


def _hosted(leaf: Any) -> Any:
    """A leaf as it comes back without a target."""
    is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(leaf) if isinstance(leaf, jax.Array) and not is_key else leaf


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8,), ("a",)),
        ((8,), ("b",)),
        ((0,), ("a",)),
        ((8, 0), (None, "a")),
        ((0, 4), ("a", "b")),
        ((0,), ()),
        ((8,), ()),
    ],
)
def test_devices_that_hold_the_same_box_each_get_a_copy(shape: tuple[int, ...], spec: tuple[str | None, ...]) -> None:
    """Some of the eight, all of them, or all because there is nothing to hold."""
    sharding = NamedSharding(jax.make_mesh((4, 2), ("a", "b")), PartitionSpec(*spec))
    array = jax.device_put(filled(shape, "float32", 1), sharding)
    place = f"memory://{uuid.uuid4()}/1"
    ck.save(place, {"x": array})
    restored = ck.restore(place, {"x": jnp.zeros_like(array)})
    same(restored, {"x": array})
    assert restored["x"].sharding == sharding


@given(data=st.data(), shape=shapes, cell=st.sampled_from([8, 64, 16 << 20]))
@tries(60)
def test_any_slice_of_a_saved_array_is_that_slice(data: st.DataObject, shape: tuple[int, ...], cell: int) -> None:
    values = filled(shape, "float32", 0)
    place = f"memory://{uuid.uuid4()}/1"
    with cells_of(cell):
        ck.save(place, {"x": put(values, data.draw(shardings(shape)))})
    index = data.draw(hnp.basic_indices(shape, allow_newaxis=False))
    found = ck.open(place)["x"][index]
    assert type(found) is type(values[index])
    assert found.shape == values[index].shape
    assert found.tobytes() == values[index].tobytes()
    _storage.folder(place).remove()


# --- chunks -----------------------------------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape, the shape of its even shards, and the chunk shape for them."""
    shard = draw(st.lists(st.integers(0, 12), max_size=3).map(tuple))
    shape = tuple(n * draw(st.sampled_from([1, 1, 2, 3])) for n in shard)
    itemsize, writers = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 9))
    with mock.patch.object(_chunks, "SHARE_BYTES", draw(st.sampled_from([1, 16, 1 << 20]))):
        return shape, shard, _chunks.grid(shape, shard, itemsize, writers, draw(st.sampled_from([1, 7, 16, 64, 4096])))


@given(cut=cuts())
@tries(300)
def test_chunks_tile_the_shape(cut: tuple[tuple[int, ...], ...]) -> None:
    shape, _, chunk = cut
    hits = np.zeros(shape, int)
    for coords in itertools.product(*map(range, _chunks.counts(shape, chunk))):
        cell = _chunks.cell(coords, chunk, shape)
        assert all(start < stop for start, stop in cell), "no chunk is empty"
        hits[_chunks.slices(cell)] += 1
    assert (hits == 1).all()
    assert all(c >= 1 for c in chunk)
    assert len(chunk) == len(shape)


@given(cut=cuts())
@tries(300)
def test_no_chunk_crosses_the_border_of_a_shard(cut: tuple[tuple[int, ...], ...]) -> None:
    """Or two processes would write one chunk."""
    shape, shard, chunk = cut
    assume(0 not in shape)
    for n, c, whole in zip(shard, chunk, shape, strict=True):
        assert n == whole or n % c == 0
    for coords in _chunks.covering(_chunks.whole(shape), chunk):
        cell = _chunks.cell(coords, chunk, shape)
        homes = {tuple(at // n for at, n in zip(corner, shard, strict=True)) for corner in _corners(cell)}
        assert len(homes) == 1


def _corners(cell: _chunks.Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*((start, stop - 1) for start, stop in cell)))


@given(cut=cuts(), itemsize=st.sampled_from([1, 4]), limit=st.sampled_from([4, 16, 50]))
@tries(200)
def test_a_chunk_is_at_most_twice_as_large_as_asked(cut: Any, itemsize: int, limit: int) -> None:
    """Twice, because a short axis may not divide well: of four rows, three parts have two rows each."""
    shape, shard, _ = cut
    assume(0 not in shape)
    assert itemsize * math.prod(_chunks.grid(shape, shard, itemsize, 1, limit)) <= max(2 * limit, itemsize)


@given(data=st.data(), cut=cuts())
@tries(300)
def test_the_chunks_that_cover_a_box_are_those_that_share_something_with_it(data: st.DataObject, cut: Any) -> None:
    shape, _, chunk = cut
    ends = [data.draw(st.tuples(st.integers(0, n), st.integers(0, n))) for n in shape]
    box = tuple((min(pair), max(pair)) for pair in ends)
    every = itertools.product(*map(range, _chunks.counts(shape, chunk)))
    expected = [c for c in every if _chunks.overlap(box, _chunks.cell(c, chunk, shape)) is not None]
    assert list(_chunks.covering(box, chunk)) == expected


@given(counts=st.lists(st.integers(1, 9), max_size=4).map(tuple))
@tries(100)
def test_positions_and_coordinates_are_each_others_inverse(counts: tuple[int, ...]) -> None:
    every = list(itertools.product(*map(range, counts)))
    assert [_chunks.position(coords, counts) for coords in every] == list(range(len(every)))
    assert [_chunks.coordinates(at, counts) for at in range(len(every))] == every


@given(
    holders=st.sets(st.integers(0, 300), min_size=1, max_size=40).map(sorted),
    cells=st.integers(1, 100),
    turn=st.integers(0, 10_000),
)
@tries(300)
def test_every_chunk_of_a_box_has_one_owner_among_its_holders(holders: list[int], cells: int, turn: int) -> None:
    owners = [_chunks.owner(holders, number, cells, turn) for number in range(cells)]
    assert set(owners) <= set(holders)
    counts = [owners.count(holder) for holder in holders]
    assert max(counts) - min(counts) <= 1, "and they share the work evenly"


@given(data=st.data(), shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6))
@tries(400)
def test_a_basic_index_means_what_it_means_to_numpy(data: st.DataObject, shape: tuple[int, ...]) -> None:
    values = np.arange(math.prod(shape)).reshape(shape)
    index = data.draw(hnp.basic_indices(shape, allow_newaxis=False) | loose_indices(len(shape)))
    try:
        expected = values[index]
    except IndexError:
        with pytest.raises(IndexError, match=r"^leaf"):
            _open.basic_index(index, shape, "leaf")
        return
    box, rest = _open.basic_index(index, shape, "leaf")
    assert all(0 <= start <= stop <= n for (start, stop), n in zip(box, shape, strict=True))
    found = values[_chunks.slices(box)][rest]
    assert type(found) is type(expected)
    np.testing.assert_array_equal(found, expected)
    if np.size(expected):
        event("something")
        assert math.prod(_chunks.extent(box)) <= max(1, values.size)


@pytest.mark.parametrize(
    "index", [np.array([0, 1]), [0, 1], True, np.True_, None, "a", 1.0, (0, None), np.array([True, False]), (..., ...)]
)
def test_an_index_that_is_not_basic_is_refused(index: Any) -> None:
    with pytest.raises(IndexError, match=r"^leaf"):
        _open.basic_index(index, (2, 3), "leaf")


def test_the_length_of_an_axis_costs_no_time() -> None:
    """A slice of a hundred million rows is three numbers, not a hundred million."""
    started = time.perf_counter()
    assert _open.basic_index(slice(None, None, -3), (10**8,), "leaf") == (((0, 10**8),), (slice(None, None, -3),))
    assert time.perf_counter() - started < 0.1


@st.composite
def loose_indices(draw: st.DrawFn, ndim: int) -> Any:
    """Indices that may be out of range, too many, or of NumPy's integers."""
    ints = st.integers(-9, 9)
    entry = st.one_of(
        ints,
        ints.map(np.int64),
        st.builds(slice, ints | st.none(), ints | st.none(), ints.filter(bool) | st.none()),
        st.just(Ellipsis),
    )
    found = draw(st.lists(entry, max_size=ndim + 1).map(tuple))
    assume(sum(e is Ellipsis for e in found) <= 1)
    return found[0] if len(found) == 1 and draw(st.booleans()) else found


# --- several processes, made up ---------------------------------------------------------------------------------------


class _Device:
    platform = "cpu"

    def __init__(self, process: int):
        self.process_index = process


class _Sharding:
    """What a snapshot asks of a sharding, for devices that belong to processes as we say."""

    memory_kind = None

    def __init__(self, real: jax.sharding.Sharding, devices: dict[Any, _Device], process: int):
        self.devices = {device: devices[device] for device in real.device_set}
        self.real, self.num_devices = real, len(self.devices)
        self.addressable_devices = {device for device in self.devices.values() if device.process_index == process}

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[_Device, Any]:
        return {self.devices[d]: index for d, index in self.real.devices_indices_map(shape).items()}

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> Any:
        return {d: index for d, index in self.devices_indices_map(shape).items() if d in self.addressable_devices}

    @property
    def is_fully_addressable(self) -> bool:
        return len(self.addressable_devices) == len(self.devices)

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.real.shard_shape(shape)


class _Array:
    """A global array as one process sees it."""

    def __init__(self, values: np.ndarray, sharding: _Sharding):
        self.shape, self.dtype, self.ndim = values.shape, values.dtype, values.ndim
        self.sharding = sharding
        self.data = [values[index] for index in sharding.addressable_devices_indices_map(values.shape).values()]
        self.is_fully_addressable = sharding.is_fully_addressable
        self.is_fully_replicated = sharding.real.is_fully_replicated

    def addressable_data(self, index: int) -> np.ndarray:
        return self.data[index]

    def is_deleted(self) -> bool:
        return False


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[tuple[np.ndarray, jax.sharding.NamedSharding]], dict[Any, _Device]]:
    """A number of processes, which device belongs to which, and some sharded arrays on them."""
    count = draw(st.sampled_from([2, 3, 4, 8]))
    homes = [*range(count), *draw(st.lists(st.integers(0, count - 1), min_size=8 - count, max_size=8 - count))]
    homes = draw(st.permutations(homes))
    devices = {device: _Device(home) for device, home in zip(DEVICES, homes, strict=True)}
    arrays = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.sampled_from([2, 4, 8, 16, 6]), min_size=1, max_size=3).map(tuple) | shapes)
        mesh_shape = draw(st.sampled_from([(8,), (4, 2), (2, 2, 2), (4,), (2, 2), (3, 2)]))
        order = draw(st.permutations(range(8)))[: math.prod(mesh_shape)]
        mesh = Mesh(np.array([DEVICES[i] for i in order]).reshape(mesh_shape), ("a", "b", "c")[: len(mesh_shape)])
        spec, free = [], list(mesh.axis_names)
        for n in shape:
            fitting = [axis for axis in free if n % mesh.shape[axis] == 0]
            axis = draw(st.sampled_from([None, *fitting]))
            spec.append(axis)
            if axis is not None:
                free.remove(axis)
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        if len({devices[device].process_index for device in sharding.device_set}) > 1:  # Else it is one process's own.
            arrays.append((filled(shape, "int32", len(arrays)), sharding))
    return count, arrays, devices


@given(run=runs(), share=st.sampled_from([1, 16, 1 << 20]), cell=st.sampled_from([16 << 20, 64, 8]))
@tries(300)
def test_every_chunk_is_written_by_just_one_process(run: Any, share: int, cell: int) -> None:
    count, arrays, devices = run
    snapshots = []
    with cells_of(cell, share=share):
        for process in range(count):
            encoded = {
                f"x{i}": Encoded(Leaf("array", dtype="int32", shape=v.shape), _seen(v, sharding, devices, process))
                for i, (v, sharding) in enumerate(arrays)
            } | {"host": Encoded(Leaf("array", dtype="int64", shape=(50,), host="numpy"), np.arange(50))}
            snapshots.append(_snapshot.take(encoded, process, count))
    first = snapshots[0].leaves
    for name, values in {**{f"x{i}": v for i, (v, _) in enumerate(arrays)}, "host": np.arange(50)}.items():
        leaf = first[name]
        assert all(snapshot.leaves[name].chunk == leaf.chunk for snapshot in snapshots), "all cut it alike"
        written = [c for snapshot in snapshots for c in snapshot.chunks if c.name == name]
        assert sorted(c.position for c in written) == list(range(leaf.chunks))
        again = np.empty(values.shape, values.dtype)
        for c in written:
            assert c.position == _chunks.position(c.coords, leaf.counts)
            again[_chunks.slices(_chunks.cell(c.coords, leaf.chunk, leaf.shape))] = c.values
        np.testing.assert_array_equal(again, values)
    parts = [
        Part(i, _digests(snapshot), snapshot.live, snapshot.shared, "tree") for i, snapshot in enumerate(snapshots)
    ]
    _manifest.merge(first, parts, "here")
    assert all(len(leaf.digests) == 32 * leaf.chunks for leaf in first.values())


def test_processes_that_hold_boxes_of_unlike_numbers_of_copies_cut_alike() -> None:
    """Three processes: the first two hold the halves of the array twice over, the last holds one of them alone."""
    values = np.arange(16, dtype=np.int32)
    mesh = Mesh(np.array(DEVICES[:6]).reshape(2, 3), ("a", "b"))
    homes = {0: 0, 1: 1, 2: 0, 3: 2, 4: 2, 5: 2}
    devices = {device: _Device(homes[i]) for i, device in enumerate(DEVICES[:6])}
    with cells_of(share=1):
        arrays = [_seen(values, NamedSharding(mesh, PartitionSpec("a")), devices, process) for process in range(3)]
        encoded = [{"x": Encoded(Leaf("array", dtype="int32", shape=(16,)), array)} for array in arrays]
        snapshots = [_snapshot.take(item, process, 3) for process, item in enumerate(encoded)]
    assert {snapshot.leaves["x"].chunk for snapshot in snapshots} == {(4,)}
    assert sorted(c.position for snapshot in snapshots for c in snapshot.chunks) == [0, 1, 2, 3]


def _seen(values: np.ndarray, sharding: NamedSharding, devices: dict[Any, _Device], process: int) -> Any:
    return _Array(values, _Sharding(sharding, devices, process))


def _digests(snapshot: _snapshot.Snapshot) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = {}
    for chunk in snapshot.chunks:
        found.setdefault(chunk.name, {})[chunk.position] = "0" * 32
    return found


# --- names ------------------------------------------------------------------------------------------------------------

entries = st.text(st.sampled_from("a0.%/2Eé\x00\x7f\ud800~ "), max_size=4) | st.text(
    st.characters(codec=None), max_size=4
)


@given(one=st.lists(entries, min_size=1, max_size=4), two=st.lists(entries, min_size=1, max_size=4))
@tries(500)
@example(one=["a.b"], two=["a", "b"])
@example(one=[""], two=["%"])
@example(one=["%25"], two=["%"])
@example(one=["", ""], two=[""])
def test_no_two_paths_share_a_name(one: list[str], two: list[str]) -> None:
    names = [functools.reduce(_structure.join, path, "") for path in (one, two)]
    assert (names[0] == names[1]) == (one == two)
    assert all(name and "/" not in name and name.isprintable() is not None for name in names)
    assert all("\0" not in name and name.encode() for name in names), "and each can be a key of the store"


@given(tree=trees)
@tries(100)
def test_a_tree_taken_apart_and_put_together_is_the_same(tree: Any) -> None:
    tree = side(tree, 0)
    flat = _tree.flatten(tree)
    same(flat.unflatten(flat.leaves), tree)
    rebuilt = _structure.build(flat.structure, flat.leaves.__getitem__)
    same(rebuilt, {} if tree is None and rebuilt == {} else tree)
    packed = msgspec.json.decode(msgspec.json.encode(flat.structure), type=_manifest.Node | str)
    same(_structure.build(packed, flat.leaves.__getitem__), rebuilt)


# --- values -----------------------------------------------------------------------------------------------------------


def _exactly(value: Any) -> Any:
    """A value as something that is equal only where type and every bit are."""
    if isinstance(value, (list, tuple)):
        return type(value), [_exactly(v) for v in value]
    if isinstance(value, dict):
        return dict, [(_exactly(k), _exactly(v)) for k, v in value.items()]
    if type(value) is float:
        return float, struct.pack(">d", value)
    if type(value) is complex:
        return complex, struct.pack(">dd", value.real, value.imag)
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value), value.dtype, value.shape, value.tobytes()
    return type(value), value


floats = st.floats() | st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", struct.pack(">Q", bits))[0])
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**80), 2**80),
    st.sampled_from([2**53 - 1, 2**53, -(2**53), 2**63, -(2**64)]),
    floats,
    st.builds(complex, floats, floats),
    st.binary(max_size=20),
    st.text(st.characters(codec=None), max_size=8),
)
numpy_values = st.sampled_from(
    ["bool", "int8", "uint16", "int64", "uint64", "float16", "float64", "complex64"]
).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))
hashable = st.recursive(atoms.filter(lambda v: v == v), lambda inner: st.lists(inner, max_size=3).map(tuple))  # noqa: PLR0124
values = st.recursive(
    atoms | numpy_values | numpy_values.filter(lambda a: a.ndim == 0).map(lambda a: a[()]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4) | st.sampled_from(["$int", "$array", "$x", "$"]), inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=3),
    ),
    max_leaves=12,
)


@given(value=values)
@tries(500)
@example(value={"$int": "0x5"})
@example(value={"$array": ["int64", [1], ""], "$scalar": False})
@example(value=-0.0)
@example(value=1e300)
@example(value="\ud800")
@example(value={(1, ("a", None)): {1.5: b""}})
def test_any_plain_value_comes_back_from_json_as_it_was(value: Any) -> None:
    packed = _values.pack(value)
    raw = msgspec.json.encode(packed)
    assert _exactly(_values.unpack(msgspec.json.decode(raw))) == _exactly(value)
    assert _exactly(_values.unpack(json.loads(raw))) == _exactly(value), "whoever decodes the JSON"


@given(value=values)
@tries(60)
def test_any_plain_value_comes_back_as_metadata(value: Any) -> None:
    manifest = _manifest.Manifest(
        "ckpt_jax", (1, 0), leaves={}, tree=_manifest.Node("dict"), metadata=_values.pack(value)
    )
    again = _manifest.loads(_manifest.dumps(manifest), "here")
    assert _exactly(_values.unpack(again.metadata)) == _exactly(value)


@given(value=atoms)
@tries(100)
def test_any_scalar_comes_back_from_a_checkpoint(value: Any) -> None:
    assume(value is not None)
    place = f"memory://{uuid.uuid4()}/1"
    ck.save(place, {"x": value})
    for found in (ck.restore(place)["x"], ck.restore(place, {"x": type(value)()})["x"], ck.open(place)["x"][()]):
        assert _exactly(found) == _exactly(value)
    _storage.folder(place).remove()


@given(dtype=st.sampled_from(NUMPY_DTYPES))
@tries(len(NUMPY_DTYPES))
def test_a_manifest_knows_how_many_bytes_an_element_takes(dtype: str) -> None:
    assert _manifest.itemsize(dtype) == np.dtype(dtype).itemsize
    assert json.loads(_zarr.zarr_json(Leaf("array", dtype=dtype)))["node_type"] == "array"
