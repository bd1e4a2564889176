"""Trees and leaves: what goes in comes back, bit for bit, as the kind of thing that stands in `like`."""

import collections
import datetime
import decimal
import enum
import math
import pathlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ckpt_jax as ck
from tests import trees
from tests.trees import same


class Pair(NamedTuple):
    first: Any
    second: Any


class Nothing(NamedTuple):
    pass


@flax.struct.dataclass
class State:
    step: Any
    params: Any
    name: str = flax.struct.field(pytree_node=False, default="run")


@jax.tree_util.register_dataclass
@dataclass
class Registered:
    w: Any
    b: Any = None


class Unnamed:
    """A registered node that gives its children no names, and has a static part."""

    def __init__(self, *children: Any, order: tuple[str, ...] = ("a", "b")):
        self.children, self.order = children, order


jax.tree_util.register_pytree_node(
    Unnamed, lambda node: (node.children, node.order), lambda order, children: Unnamed(*children, order=order)
)


class Net(eqx.Module):
    layer: eqx.nn.Linear
    scale: jax.Array
    width: int = eqx.field(static=True)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def arrays(seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {"w": jnp.asarray(rng.random((3, 4), np.float32)), "b": jnp.asarray(rng.random(4, np.float32))}


def round_trip(place: str, tree: Any) -> None:
    """Saves, and restores into concrete and abstract targets of other values."""
    ck.save(place, tree)
    assert same(ck.restore(place, like=trees.zeros(tree)), tree)
    assert same(ck.restore(place, like=trees.abstract(tree)), tree)


# --- containers -------------------------------------------------------------------------------------------------------


EMPTY_FROZEN = flax.core.freeze({})

CONTAINERS: dict[str, Callable[[], Any]] = {
    "str keys": lambda: {"b": 1, "a": {"z": 2, "y": jnp.ones(2)}},
    "int keys": lambda: {10: 1, 2: np.ones(2), -3: 4, 2**70: 5, -(2**70): 6},
    "bool keys": lambda: {False: 1, True: 2},
    "None key": lambda: {None: np.ones(2)},
    "tuple keys": lambda: {(1, 2): 1, (1, 3): 2, (0, 9): np.ones(1)},
    "nested tuple keys": lambda: {("a", (1, "b")): 1, ("a", (2, "c")): 2, (): 3},
    "list": lambda: [1, [2, [3.0, []]], np.ones(2)],
    "list of twelve": lambda: [np.full(1, i) for i in range(12)],
    "tuple": lambda: (1, (2, (3.0, ())), np.ones(2)),
    "None among others": lambda: {"a": None, "b": [None, 1, None], "c": (None,)},
    "named tuple": lambda: Pair(1, Pair(np.ones(2), Nothing())),
    "ordered dict": lambda: collections.OrderedDict([("z", 1), ("a", 2)]),
    "default dict": lambda: collections.defaultdict(list, {"a": 1, "b": [2]}),
    "flax struct": lambda: State(3, {"w": np.ones(2)}, name="other"),
    "registered dataclass": lambda: Registered(np.ones(2), Registered(1, None)),
    "frozen dict": lambda: flax.core.freeze({"a": {"b": np.ones(2)}, "empty": {}}),
    "unnamed node": lambda: Unnamed(np.ones(2), {"x": 1}, Unnamed()),
    "equinox module": lambda: Net(eqx.nn.Linear(2, 3, key=jax.random.key(0)), jnp.ones(()), 7),
    "nnx state": lambda: nnx.state(Model(nnx.Rngs(0))),
    "nnx pure dict": lambda: nnx.to_pure_dict(nnx.state(Model(nnx.Rngs(0)))),
    "empties": lambda: {
        "a": {},
        "b": (),
        "c": [],
        "d": None,
        "e": Nothing(),
        "f": flax.core.freeze({}),
        "g": Unnamed(),
    },
    "empties in lists": lambda: [{}, [[], ()], (None, {}), Nothing()],
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_comes_back_as_it_was(kind: str, root: str):
    round_trip(f"{root}/1", CONTAINERS[kind]())


@pytest.mark.parametrize(
    "empty", [{}, (), [], None, Nothing(), flax.core.freeze({}), collections.OrderedDict()], ids=repr
)
def test_a_tree_without_leaves_is_a_checkpoint(empty: Any, root: str):
    manifest = ck.save(f"{root}/1", empty)
    assert not manifest.leaves
    assert same(ck.restore(f"{root}/1", like=empty), empty)
    assert ck.verify(f"{root}/1").ok
    assert ck.steps(root) == [1]


def _optimizers() -> dict[str, optax.GradientTransformation]:
    labels = {"w": "train", "b": "freeze"}
    return {
        "sgd": optax.sgd(0.1),
        "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10))),
        "masked": optax.masked(optax.adam(0.1), {"w": True, "b": False}),
        "multi_transform": optax.multi_transform({"train": optax.adam(0.1), "freeze": optax.set_to_zero()}, labels),
        "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
        "multi_steps": optax.MultiSteps(optax.adam(0.1), every_k_schedule=2).gradient_transformation(),
        "adafactor": optax.adafactor(0.1),
        "lookahead": optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(optax.linear_schedule(0.0, 1.0, 5))),
    }


@pytest.mark.parametrize("name", _optimizers())
def test_an_optax_state_goes_on_as_if_nothing_had_happened(name: str, memory: str):
    tx, params = _optimizers()[name], arrays()
    update = jax.jit(tx.update)
    _, state = update(arrays(1), tx.init(params), params)
    round_trip(memory, state)
    restored = ck.restore(memory, like=jax.eval_shape(tx.init, params))
    assert same(update(arrays(2), restored, params), update(arrays(2), state, params))


@pytest.mark.parametrize(
    "leaf",
    [np.arange(3.0), np.float32(2), 2.5, True, "text", b"bytes", 2**80, 1j],
    ids=lambda x: type(x).__name__,
)
def test_a_bare_leaf_is_a_tree(leaf: Any, root: str):
    round_trip(f"{root}/1", leaf)
    assert list(ck.open(f"{root}/1")) == ["<root>"]
    assert same(ck.restore(f"{root}/1"), leaf)


@pytest.mark.parametrize("make", [lambda: jnp.arange(4), lambda: jax.random.key(7)], ids=["array", "key"])
def test_a_bare_jax_leaf_is_a_tree(make: Callable[[], jax.Array], root: str):
    round_trip(f"{root}/1", make())


ODD_KEYS = [
    *[
        "a.b",
        "a/b",
        "/",
        "//",
        ".",
        "..",
        "...",
        "/etc/passwd",
        "../../x",
        "%",
        "%2E",
        "100%",
        "~",
        " ",
        "a b",
        "",
        "-",
    ],
    *[
        "\n",
        "\t\0\x7f",
        "ü日本",
        "e\u0301",
        "é",
        "\U0001f40d",
        "'\"\\",
        "$dict",
        "*",
        "<root>",
        "c",
        "zarr.json",
        "CON",
    ],
    *["k" * 300, "é" * 300, "." * 300, "x" * 4000, "\ud800", "a\udfffb", "__lock", "None", "True", "0"],
]


def test_any_str_is_a_key(root: str):
    tree = {key: np.full(2, number) for number, key in enumerate(ODD_KEYS)}
    round_trip(f"{root}/1", tree)
    assert same(ck.restore(f"{root}/1"), tree)
    assert ck.verify(f"{root}/1").ok


@pytest.mark.parametrize("key", ODD_KEYS, ids=ascii)
def test_a_key_keeps_its_children_and_neighbours_apart(key: str, memory: str):
    tree = {key: {key: [1, {key: 2}], key + "x": 3}, "a": {"b": {key: 4}}, "a.b": 5, "a/b": 6}
    round_trip(memory, tree)
    assert same(ck.restore(memory), tree)


def test_names_that_would_read_alike_stay_apart(memory: str):
    tree = {"a.b": 1, "a": {"b": 2}, "a%2Eb": 3, "": {"": 4, "%": 5}, "%": {"": 6}, "%25": 7}
    round_trip(memory, tree)
    assert len(ck.open(memory)) == 7


def test_tuple_keys_hold_what_any_key_holds(memory: str):
    tree = {("\ud800", 1): 1, ("a.b", 2): 2, ("ü", 2**70): 3}
    round_trip(memory, tree)
    assert same(ck.restore(memory), tree)


def test_aliases_come_back_as_arrays_of_their_own(root: str):
    w, n = jnp.ones((4, 4)), np.ones(3)
    ck.save(f"{root}/1", {"embed": w, "head": w, "n": n, "m": n})
    restored = ck.restore(f"{root}/1", like={"embed": w, "head": w, "n": n, "m": n})
    assert restored["n"] is not restored["m"]
    assert not np.shares_memory(restored["n"], restored["m"])
    jax.jit(lambda a, b: (a + 1, b + 2), donate_argnums=(0, 1))(restored["embed"], restored["head"])
    assert restored["embed"].is_deleted()
    assert restored["head"].is_deleted()
    assert (np.asarray(w) == 1).all()


def test_without_a_target_nodes_with_names_become_dicts_and_others_lists(memory: str):
    ck.save(memory, {"s": State(1, Pair(2, None)), "u": Unnamed(3, 4), "l": (5, [6]), "f": flax.core.freeze({"x": 7})})
    expected = {
        "s": {"step": 1, "params": {"first": 2, "second": None}},
        "u": [3, 4],
        "l": (5, [6]),
        "f": {"x": 7},
    }
    assert same(ck.restore(memory), expected)


def test_without_a_target_arrays_are_numpys_and_keys_are_keys(root: str, mesh42: Mesh):
    w = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    key = jax.random.key(3, impl="rbg")
    ck.save(
        f"{root}/1",
        {"w": jax.device_put(w, NamedSharding(mesh42, P("data", "model"))), "k": key, "n": np.int16(4), "i": 5},
    )
    assert same(ck.restore(f"{root}/1"), {"w": w, "k": key, "n": np.int16(4), "i": 5})


def test_opening_lists_every_leaf_of_the_tree(memory: str):
    ck.save(memory, {"a.b": [1, {"": np.ones(2)}], "c": {3: jnp.ones(())}, "rng": np.random.default_rng(0)})
    assert set(ck.open(memory)) == {"a%2Eb.0", "a%2Eb.1.%", "c.3", "rng"}


# --- containers that cannot be saved, or do not fit -------------------------------------------------------------------


def test_two_leaves_of_one_name_are_refused(memory: str):
    tree = collections.OrderedDict([(1, np.ones(1)), ("1", np.zeros(1))])
    with pytest.raises(ck.Unsupported, match="one leaf of this name") as caught:
        ck.save(memory, tree)
    assert [fault.place for fault in caught.value.faults] == ["1"]


@pytest.mark.parametrize(
    "tree",
    [
        {"ok": 1, "bad": {1: 2, "x": 3}},
        {"bad": {1.5: 1}},
        {"bad": {b"k": 1}},
        {"bad": {(1, 2.5): 1}},
        {"bad": {enum.Enum("E", "A B").A: 1}},
        {"bad": {np.int32(3): 1}},
    ],
    ids=["unsortable", "float", "bytes", "tuple of a float", "enum", "numpy"],
)
def test_keys_that_no_name_can_stand_for_are_refused_by_place(tree: Any, memory: str):
    with pytest.raises(ck.Unsupported, match="bad") as caught:
        ck.save(memory, tree)
    assert all(fault.place.startswith("bad") for fault in caught.value.faults)
    with pytest.raises(ck.NotFound):
        ck.restore(memory)


def test_a_tree_that_holds_itself_is_refused(memory: str):
    tree: list[Any] = [1]
    tree.append(tree)
    with pytest.raises(ck.Unsupported, match="holds itself"):
        ck.save(memory, tree)


def test_a_tree_deep_but_finite_comes_back(memory: str):
    tree: Any = np.ones(1)
    for _ in range(100):
        tree = {"x": [tree]}
    round_trip(memory, tree)


def test_a_name_too_long_to_be_stored_is_refused(memory: str):
    with pytest.raises(ck.Unsupported, match="at most 60,000 bytes"):
        ck.save(memory, {"x" * 70_000: 1})


LOOK_ALIKES: dict[str, tuple[Any, Any]] = {
    "int and str": ({1: 5}, {"1": 5}),
    "bool and str": ({True: 5}, {"True": 5}),
    "None and str": ({None: 5}, {"None": 5}),
    "tuple and str": ({(1, 2): 5}, {"[1,2]": 5}),
    "list and tuple": ([5], (5,)),
    "list and dict": ([5], {0: 5}),
    "list and dict of str": ([5], {"0": 5}),
    "leaf and dict": (5, {"<root>": 5}),
    "leaf and list": ({"a": 5}, {"a": [5]}),
    "None and leaf": ({"a": None}, {"a": 5}),
    "None and empty": ({"a": None}, {"a": {}}),
    "empty list and tuple": ({"a": []}, {"a": ()}),
    "empty list and dict": ({"a": []}, {"a": {}}),
    "named tuples": (Pair(1, 2), collections.namedtuple("Other", "first third")(1, 2)),
    "places swapped": (Unnamed(1, 2, order=("a", "b")), Unnamed(1, 2, order=("b", "a"))),
    "named and unnamed": ([1, 2], Unnamed(1, 2)),
}


@pytest.mark.parametrize("pair", LOOK_ALIKES)
@pytest.mark.parametrize("turn", [False, True], ids=["", "turned"])
def test_structures_that_only_look_alike_do_not_fit(pair: str, turn: bool, memory: str):
    saved, like = LOOK_ALIKES[pair][:: -1 if turn else 1]
    ck.save(memory, saved)
    with pytest.raises(ck.Mismatch) as caught:
        ck.restore(memory, like=like)
    assert caught.value.faults


def test_names_are_what_fits(memory: str):
    """A dict, a named tuple and a dataclass with the same names can stand for each other."""
    ck.save(memory, {"first": np.ones(2), "second": {"w": 1, "b": 2}})
    like = Pair(np.zeros(2), Registered(0, 0))
    assert same(ck.restore(memory, like=like), Pair(np.ones(2), Registered(1, 2)))


# --- arrays -----------------------------------------------------------------------------------------------------------

DTYPES = sorted(
    {kind.dtype.name for name in dir(jnp) if isinstance(kind := getattr(jnp, name), type(jnp.float32))}, key=str
)
# jax 0.10 names these types, and its CPU backend cannot hold them.
ON_DEVICE = [name for name in DTYPES if name not in ("int1", "uint1", "float6_e2m3fn", "float6_e3m2fn")]


def every_value(dtype: str, shape: tuple[int, ...] = (4, 6)) -> np.ndarray:
    """An array of random bits: NaNs of all payloads, infinities, both zeros, the least and the greatest."""
    kind = np.dtype(dtype)
    count, rng = math.prod(shape), np.random.default_rng(5)
    if dtype == "bool":
        return np.asarray(rng.random(shape) < 0.5)
    width = int("".join(c for c in dtype.partition("_")[0] if c.isdigit()))
    if width < 8:  # In NumPy such a value fills the low bits of a byte.
        codes = rng.integers(0, 1 << width, count).astype(np.uint8)
        if dtype.startswith("int"):
            codes = np.where(codes >> (width - 1), codes | (0xFF << width & 0xFF), codes).astype(np.uint8)
        return codes.view(kind).reshape(shape)
    return np.frombuffer(rng.bytes(count * kind.itemsize), kind).reshape(shape).copy()


def test_the_list_of_dtypes_is_jaxs_own():
    assert {"bool", "int2", "int4", "uint2", "uint64", "bfloat16", "float8_e8m0fnu", "float4_e2m1fn"} <= set(DTYPES)
    assert {"complex64", "complex128", "float16", "float64"} <= set(DTYPES)


@pytest.mark.parametrize("shape", [(4, 6), (), (0, 3), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_arrays_of_every_dtype(dtype: str, shape: tuple[int, ...], memory: str):
    value = every_value(dtype, shape)
    ck.save(memory, value)
    for restored in (ck.restore(memory, like=np.zeros(shape, dtype)), ck.restore(memory)):
        assert same(restored, value)
        assert restored.flags.writeable
        assert restored.flags.owndata


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("shape", [(4, 6), (), (0, 3)], ids=str)
@pytest.mark.parametrize("dtype", ON_DEVICE)
def test_jax_arrays_of_every_dtype(dtype: str, shape: tuple[int, ...], memory: str):
    value = jnp.asarray(every_value(dtype, shape))
    assert value.dtype == dtype
    round_trip(memory, value)
    assert same(ck.restore(memory), np.asarray(value))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", ON_DEVICE)
def test_sharded_arrays_of_every_dtype(dtype: str, memory: str, mesh42: Mesh):
    value = jax.device_put(every_value(dtype, (8, 6)), NamedSharding(mesh42, P("data", "model")))
    round_trip(memory, value)
    other = jax.ShapeDtypeStruct((8, 6), value.dtype, sharding=NamedSharding(mesh42, P(None, "model")))
    assert trees.bits(ck.restore(memory, like=other)) == trees.bits(value)


def test_a_dtype_that_zarr_lacks_is_in_the_file_as_bytes(tmp_path: pathlib.Path):
    ck.save(tmp_path / "a", every_value("uint4"))
    assert ck.open(tmp_path / "a")["<root>"].dtype == ml_dtypes.uint4
    assert same(ck.open(tmp_path / "a")["<root>"][...], every_value("uint4"))


def _layouts() -> dict[str, np.ndarray]:
    base = np.arange(24.0).reshape(2, 3, 4)
    return {
        "transposed": base.T,
        "every other": base[:, ::2, ::-1],
        "fortran": np.asfortranarray(base),
        "broadcast": np.broadcast_to(np.float32(2), (4, 5)),
        "big-endian": base.astype(">f8"),
        "big-endian, transposed": base.astype(">i2").T,
        "big-endian 0-d": np.array(7, ">i4"),
        "little-endian": base.astype("<f4"),
        "zero-size, strided": base[:, 1:1, ::2],
        "negative strides": base[::-1, ::-1],
        "reversed bfloat16": np.arange(5).astype(ml_dtypes.bfloat16)[::-1],
        "unaligned": np.frombuffer(bytes(33), np.uint8)[1:].view(np.float64),
    }


@pytest.mark.parametrize("layout", _layouts())
def test_how_an_array_lies_in_memory_does_not_matter(layout: str, root: str):
    value = _layouts()[layout]
    before = value.copy()
    value.flags.writeable = False
    ck.save(f"{root}/1", {"a": value})
    native = value.astype(value.dtype.newbyteorder("="))
    for restored in (ck.restore(f"{root}/1")["a"], ck.restore(f"{root}/1", like={"a": value})["a"]):
        assert same(restored, np.ascontiguousarray(native).reshape(value.shape))
        assert restored.flags.c_contiguous
        assert restored.flags.writeable
        assert restored.flags.owndata
        assert not np.shares_memory(restored, value)
    assert same(value.copy(), before)


def test_a_restored_numpy_array_is_the_users_alone(root: str):
    ck.save(f"{root}/1", {"a": np.ones((300, 300)), "b": np.ones(3)})
    like = {"a": np.zeros((300, 300)), "b": np.zeros(3)}
    restored = ck.restore(f"{root}/1", like=like)
    restored["a"] += 1
    restored["b"][:] = 5
    assert not like["a"].any()
    assert same(ck.restore(f"{root}/1"), {"a": np.ones((300, 300)), "b": np.ones(3)})


@pytest.mark.parametrize("dtype", [*(d for d in DTYPES if d not in ("int1", "uint1"))])
def test_numpy_scalars_come_back_as_numpy_scalars(dtype: str, memory: str):
    value = every_value(dtype, (3,))[1]
    assert isinstance(value, np.generic)
    ck.save(memory, {"x": value})
    assert same(ck.restore(memory, like={"x": np.dtype(dtype).type(0)}), {"x": value})
    assert same(ck.restore(memory), {"x": value})


@pytest.mark.parametrize("value", [np.str_("ü"), np.str_(""), np.bytes_(b"\0a"), np.bool_(True)], ids=repr)
def test_numpy_text_keeps_its_type(value: Any, memory: str):
    round_trip(memory, {"x": value})
    assert same(ck.restore(memory), {"x": value})


@pytest.mark.parametrize("weak", [False, True])
def test_weak_type_is_as_like_has_it(weak: bool, memory: str):
    value = {"x": jnp.asarray(2.0) if weak else jnp.ones(())}
    assert value["x"].weak_type == weak
    ck.save(memory, value)
    round_trip(f"{memory}.1", value)
    for like in (jnp.asarray(3.0), jnp.zeros(())):
        restored = ck.restore(memory, like={"x": like})["x"]
        assert restored.weak_type == like.weak_type
        assert ck.restore(memory, like={"x": jax.eval_shape(lambda x: x, like)})["x"].weak_type == like.weak_type


def test_a_weak_type_is_kept_without_a_target(memory: str):
    ck.save(memory, {"weak": jnp.asarray(2.0), "strong": jnp.ones(())})
    restored = ck.restore(memory, sharding=SingleDeviceSharding(jax.devices()[0]))
    assert restored["weak"].weak_type
    assert not restored["strong"].weak_type


# --- keys -------------------------------------------------------------------------------------------------------------

IMPLEMENTATIONS = ["threefry2x32", "rbg", "unsafe_rbg"]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,)], ids=str)
def test_keys_of_every_implementation(impl: str, shape: tuple[int, ...], root: str):
    keys = jax.random.split(jax.random.key(7, impl=impl), shape) if shape else jax.random.key(7, impl=impl)
    round_trip(f"{root}/1", {"k": keys})
    assert same(ck.restore(f"{root}/1"), {"k": keys})
    restored = ck.restore(f"{root}/1", like=jax.eval_shape(lambda: {"k": keys}))["k"]
    assert same(restored, keys)
    if keys.size:
        draw = lambda k: jax.random.bits(k.reshape(-1)[0], (8,))  # noqa: E731
        assert same(draw(restored), draw(keys))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_keys(impl: str, axis_type: AxisType, memory: str):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    keys = jax.random.split(jax.random.key(1, impl=impl), (8, 2))
    ck.save(memory, keys)
    for spec in (P(), P("x"), P("x", "y"), P(("x", "y")), P(None, "y")):
        sharding = NamedSharding(mesh, spec)
        placed = jax.device_put(keys, sharding)
        ck.save(memory, placed, overwrite=True)
        for like in (placed, jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=sharding)):
            restored = ck.restore(memory, like=like)
            assert same(restored, placed)
            assert restored.sharding == placed.sharding
            assert restored.aval == placed.aval
        assert same(ck.restore(memory), keys)


def test_old_uint32_keys_are_arrays(memory: str):
    key = jax.random.PRNGKey(42)
    round_trip(memory, {"k": key})
    assert ck.open(memory)["k"].kind == "array"


def test_a_key_of_another_implementation_does_not_fit(memory: str):
    ck.save(memory, {"k": jax.random.key(0), "b": jax.random.split(jax.random.key(0), 3), "u": jax.random.PRNGKey(0)})
    like = {"k": jax.random.key(0, impl="rbg"), "b": jax.random.key(0), "u": jax.random.key(0)}
    with pytest.raises(ck.Mismatch) as caught:
        ck.restore(memory, like=like, cast=True)
    assert {fault.place for fault in caught.value.faults} == {"k", "b", "u"}
    assert "key<threefry2x32>" in str(caught.value)
    assert "key<rbg>" in str(caught.value)


# --- Python values ----------------------------------------------------------------------------------------------------


def _payload(bits: int) -> float:
    return struct.unpack(">d", struct.pack(">Q", bits))[0]


VALUES = {
    "ints": [
        0,
        1,
        -1,
        2**31,
        -(2**31),
        2**53 - 1,
        2**53,
        2**53 + 1,
        2**63 - 1,
        2**63,
        -(2**63) - 1,
        2**64,
        10**40,
        -(10**40),
    ],
    "a huge int": [7**9000],
    "floats": [0.0, -0.0, 1.0, 0.1, 1e22, 1e300, 5e-324, -2.5, 1.7976931348623157e308, math.pi],
    "infinities": [math.inf, -math.inf],
    "nans": [math.nan, -math.nan, _payload(0x7FF8_0000_0000_0123), _payload(0xFFF8_DEAD_BEEF_0001)],
    "bools": [True, False],
    "strs": ["", "text", "ü日本\U0001f40d", '\0\x1f\n"\\', "\ud800", "a\udfff", "$int", "x" * 100_000, "NaN", "1"],
    "bytes": [b"", b"\0\xff", bytes(range(256)), b"x" * 100_000],
    "complexes": [
        0j,
        1 + 2j,
        complex(-0.0, -0.0),
        complex(math.nan, math.inf),
        complex(_payload(0x7FF8_0000_0000_0123), 0),
    ],
}


@pytest.mark.parametrize("kind", VALUES)
def test_python_values_are_exact(kind: str, root: str):
    tree = {"list": list(VALUES[kind])} | {str(number): value for number, value in enumerate(VALUES[kind])}
    round_trip(f"{root}/1", tree)
    assert same(ck.restore(f"{root}/1"), tree)


@pytest.mark.parametrize("saved", [1, 1.0, True, "1", b"1", 1j], ids=repr)
def test_a_python_value_of_another_type_does_not_fit(saved: Any, memory: str):
    ck.save(memory, {"x": saved})
    for like in (0, 0.0, False, "", b"", 0j):
        if type(like) is type(saved):
            continue
        with pytest.raises(ck.Mismatch, match="x"):
            ck.restore(memory, like={"x": like})


# --- leaves that cannot be saved --------------------------------------------------------------------------------------


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


REFUSED: dict[str, Callable[[], Any]] = {
    "object": object,
    "function": lambda: len,
    "class": lambda: int,
    "iterator": lambda: iter([1, 2]),
    "generator": lambda: (i for i in [1]),
    "set": lambda: {1, 2},
    "date": lambda: datetime.date(2024, 1, 1),
    "decimal": lambda: decimal.Decimal("1.5"),
    "path": lambda: pathlib.Path("/a"),
    "bytearray": lambda: bytearray(b"x"),
    "IntEnum": lambda: Level.LOW,
    "str subclass": lambda: Text("x"),
    "object array": lambda: np.array([None, 1], object),
    "str array": lambda: np.array(["a", "b"]),
    "StringDType array": lambda: np.array(["a", "b"], np.dtypes.StringDType()),
    "bytes array": lambda: np.array([b"a", b"b"]),
    "datetime64": lambda: np.datetime64("2024-01-01"),
    "datetime64 array": lambda: np.array(["2024-01-01"], "datetime64[s]"),
    "structured array": lambda: np.zeros(2, [("a", int), ("b", float)]),
    "record array": lambda: np.rec.array([(1, 2.0)]),
    "masked array": lambda: np.ma.masked_array([1, 2], [0, 1]),
    "void": lambda: np.void(b"abc"),
    "long double": lambda: np.longdouble(1),
    "long double array": lambda: np.ones(2, np.longdouble),
    "float0": lambda: np.zeros(2, jax.dtypes.float0),
    "ShapeDtypeStruct": lambda: jax.ShapeDtypeStruct((2,), "float32"),
    "deleted array": lambda: (a := jnp.ones(3)).delete() or a,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_saved_is_refused_by_name_type_and_remedy(kind: str, root: str):
    value = REFUSED[kind]()
    with pytest.raises(ck.Unsupported) as caught:
        ck.save(f"{root}/1", {"ok": np.ones(2), "deep": {"bad": value, "too": [value]}})
    assert [fault.place for fault in caught.value.faults] == ["deep.bad", "deep.too.0"]
    known = isinstance(value, (np.ndarray, np.void, np.datetime64, np.longdouble, jax.Array, jax.ShapeDtypeStruct))
    if not known or isinstance(value, np.ma.MaskedArray):
        assert all(type(value).__name__ in fault.found for fault in caught.value.faults)
    assert "register_leaf" in str(caught.value)
    assert ck.steps(root) == []
    assert not pathlib.Path(root).exists()


def test_a_traced_value_is_refused_with_the_way_out(memory: str):
    def step(x: jax.Array) -> jax.Array:
        ck.save(memory, {"x": x})
        return x

    with pytest.raises(ck.Unsupported, match="outside of jit"):
        jax.jit(step)(jnp.ones(2))


def test_a_traced_target_is_refused_with_the_way_out(memory: str):
    ck.save(memory, {"x": jnp.ones(2)})
    with pytest.raises(ck.Mismatch, match="outside of jit"):
        jax.jit(lambda x: ck.restore(memory, like={"x": x}))(jnp.ones(2))


# --- registered types -------------------------------------------------------------------------------------------------


class Money:
    def __init__(self, cents: int):
        self.cents = cents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and other.cents == self.cents

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Table:
    def __init__(self, rows: Any):
        self.rows = rows


ck.register_leaf(Money, encode=lambda money: money.cents, decode=Money)
ck.register_leaf(Table, encode=lambda table: table.rows, decode=Table)


def test_a_registered_type_comes_back_through_its_decode(root: str):
    ck.save(f"{root}/1", {"m": Money(5), "t": Table(np.arange(3))})
    for restored in (
        ck.restore(f"{root}/1"),
        ck.restore(f"{root}/1", like={"m": Money(0), "t": Table(np.zeros(3, int))}),
    ):
        assert restored["m"] == Money(5)
        assert restored["t"].rows.tolist() == [0, 1, 2]


def test_a_leaf_comes_back_as_what_like_holds_registered_or_not(memory: str):
    """Never something of another type than the one that stands in `like`."""
    ck.save(memory, {"m": Money(5), "n": 5})
    try:
        restored = ck.restore(memory, like={"m": 0, "n": Money(0)})
    except ck.Mismatch as error:
        assert {fault.place for fault in error.faults} == {"m", "n"}  # noqa: PT017  Either is right.
    else:
        assert type(restored["m"]) is int
        assert type(restored["n"]) is Money


# --- live leaves ------------------------------------------------------------------------------------------------------


class Counter:
    def __init__(self, at: int = 0):
        self.at = at

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Stubborn(Counter):
    def set_state(self, state: dict[str, int]) -> None:
        raise ValueError(f"not {state}")


@pytest.mark.parametrize("bits", ["PCG64", "MT19937", "Philox", "SFC64", "PCG64DXSM"])
def test_a_numpy_generator_draws_on(bits: str, root: str):
    rng = np.random.Generator(getattr(np.random, bits)(1))
    rng.random(5)
    ck.save(f"{root}/1", {"rng": rng})
    expected = rng.random(5)
    other = np.random.Generator(getattr(np.random, bits)(2))
    restored = ck.restore(f"{root}/1", like={"rng": other})
    assert restored["rng"] is other
    assert same(other.random(5), expected)


def test_an_old_numpy_random_state_draws_on(memory: str):
    rng = np.random.RandomState(1)
    rng.randn(3)
    ck.save(memory, {"rng": rng})
    expected, other = rng.randn(5), np.random.RandomState(2)
    ck.restore(memory, like={"rng": other})
    assert same(other.randn(5), expected)


def test_a_live_leaf_takes_its_state_and_stays_the_same_object(root: str):
    ck.save(f"{root}/1", {"it": Counter(7), "w": np.ones(2)})
    mine = Counter()
    assert ck.restore(f"{root}/1", like={"it": mine, "w": np.zeros(2)})["it"] is mine
    assert mine.at == 7
    assert ck.restore(f"{root}/1")["it"] == {"at": 7}


def test_a_refused_restore_has_touched_no_live_leaf(memory: str):
    ck.save(memory, {"a": Counter(1), "b": Counter(2), "w": np.ones(2)})
    mine = Counter(50)
    with pytest.raises(ck.Mismatch, match="w"):
        ck.restore(memory, like={"a": mine, "b": Counter(), "w": np.ones(3)})
    with pytest.raises(ck.Mismatch, match="does not take the state"):
        ck.restore(memory, like={"a": mine, "b": Stubborn(), "w": np.ones(2)})
    assert mine.at == 50


def test_a_state_that_holds_an_address_is_refused(memory: str):
    class Loose(Counter):
        def get_state(self) -> Any:
            return {"source": repr(self)}

    with pytest.raises(ck.Unsupported, match="address"):
        ck.save(memory, {"it": Loose()})


def test_a_state_that_is_no_plain_data_is_refused(memory: str):
    class Odd(Counter):
        def get_state(self) -> Any:
            return {"f": len}

    with pytest.raises(ck.Unsupported, match=r"Odd.*not plain data"):
        ck.save(memory, {"it": Odd()})


# --- sharding ---------------------------------------------------------------------------------------------------------


def _shardings() -> dict[str, Callable[[], jax.sharding.Sharding]]:
    def on(shape: tuple[int, ...], axes: tuple[str, ...], spec: P, kind: AxisType = AxisType.Auto, **more: Any) -> Any:
        return lambda: NamedSharding(jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes)), spec, **more)

    some = np.array(jax.devices())[[3, 1, 0, 2]]
    explicit = AxisType.Explicit
    return {
        "replicated": on((4, 2), ("x", "y"), P()),
        "one axis": on((4, 2), ("x", "y"), P("x")),
        "two axes": on((4, 2), ("x", "y"), P("x", "y")),
        "axes turned": on((4, 2), ("x", "y"), P("y", "x")),
        "second dimension": on((4, 2), ("x", "y"), P(None, "x")),
        "two axes on one": on((4, 2), ("x", "y"), P(("x", "y"))),
        "two axes on one, turned": on((4, 2), ("x", "y"), P(None, ("y", "x"))),
        "partly replicated": on((2, 2, 2), ("x", "y", "z"), P("x", "z")),
        "eight": on((8,), ("fsdp",), P("fsdp")),
        "explicit": on((4, 2), ("x", "y"), P("x", "y"), explicit),
        "explicit replicated": on((4, 2), ("x", "y"), P(), explicit),
        "four of eight, permuted": lambda: NamedSharding(Mesh(some.reshape(2, 2), ("a", "b")), P("b", "a")),
        "one of eight": lambda: NamedSharding(Mesh(np.array(jax.devices()[5:6]), ("a",)), P("a")),
        "single device": lambda: SingleDeviceSharding(jax.devices()[3]),
        "pinned host": lambda: SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"),
        "pinned host, sharded": on((4, 2), ("x", "y"), P("x"), explicit, memory_kind="pinned_host"),
        "pinned host, auto": on((4, 2), ("x", "y"), P("x", "y"), memory_kind="pinned_host"),
    }


SHARDINGS = list(_shardings())
W = np.arange(128.0, dtype=np.float32).reshape(8, 16)


def placed(kind: str) -> jax.Array:
    return jax.device_put(W, _shardings()[kind]())


def test_any_sharding_restores_what_any_other_saved(tmp_path: pathlib.Path):
    for number, kind in enumerate(SHARDINGS):
        ck.save(tmp_path / str(number), {"w": placed(kind)})
        for other in SHARDINGS:
            sharding = _shardings()[other]()
            like = {"w": jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=sharding)}
            restored = ck.restore(tmp_path / str(number), like=like)["w"]
            assert restored.sharding == sharding
            assert same(np.asarray(restored), W), (kind, other)
        assert same(ck.restore(tmp_path / str(number)), {"w": W})


@pytest.mark.parametrize("kind", [*SHARDINGS, "uncommitted", "weak"])
@pytest.mark.parametrize("form", ["concrete", "abstract"])
def test_a_restored_array_is_to_jax_what_like_was(kind: str, form: str, memory: str):
    """Sharding, memory, commitment, weak type: so that a jitted step is not traced once more for it."""
    free = {"uncommitted": lambda: jnp.asarray(W), "weak": lambda: jnp.asarray(3.0)}
    value = free[kind]() if kind in free else placed(kind)
    ck.save(memory, {"w": value})
    restored = ck.restore(memory, like={"w": value} if form == "concrete" else trees.abstract({"w": value}))["w"]
    assert same(restored, value)
    assert restored.aval == value.aval
    assert restored.sharding == value.sharding
    assert restored.committed == value.committed
    assert restored.format == value.format
    step = jax.jit(lambda x: x)
    step(value)
    traced = step._cache_size()
    step(restored)
    assert step._cache_size() == traced == 1


@pytest.mark.parametrize("kind", [k for k in SHARDINGS if "pinned" not in k] + ["uncommitted"])
def test_restored_arrays_own_their_memory_and_can_be_donated(kind: str, memory: str):
    value = jnp.asarray(W) if kind == "uncommitted" else placed(kind)
    ck.save(memory, {"w": value, "v": value})
    restored = ck.restore(memory, like={"w": value, "v": value})
    pointers = [shard.data.unsafe_buffer_pointer() for x in restored.values() for shard in x.addressable_shards]
    assert len(set(pointers)) == len(pointers)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    w = step(restored["w"])
    assert restored["w"].is_deleted()
    for _ in range(3):
        w = step(w)
    assert same(np.asarray(w), W + 4)
    assert same(restored["v"], value)
    assert same(ck.restore(memory)["w"], W)


def test_an_array_may_be_donated_as_soon_as_save_returns(root: str, mesh42: Mesh):
    state = {"w": jax.device_put(W, NamedSharding(mesh42, P("data"))), "n": np.ones(3)}
    ck.save(f"{root}/1", state)
    jax.jit(lambda x: x + 1, donate_argnums=0)(state["w"])
    state["n"] += 1
    assert state["w"].is_deleted()
    assert same(ck.restore(f"{root}/1"), {"w": W, "n": np.ones(3)})


def test_whole_states_cost_no_further_trace(memory: str, mesh42: Mesh):
    tx = optax.adamw(optax.cosine_decay_schedule(0.1, 100))
    params = jax.device_put({"w": W, "b": W[0]}, NamedSharding(mesh42, P()))
    params["w"] = jax.device_put(params["w"], NamedSharding(mesh42, P("data", "model")))

    @jax.jit
    def step(state: Any) -> Any:
        params, opt, key = state
        key, sub = jax.random.split(key)
        grads = jax.tree.map(lambda x: x * jax.random.normal(sub), params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, key

    state = (params, jax.jit(tx.init)(params), jax.random.key(0))
    for _ in range(4):  # Until what comes out is placed as what went in.
        state = step(state)
    traced = step._cache_size()
    ck.save(memory, state)
    expected = step(state)
    assert step._cache_size() == traced
    assert same(step(ck.restore(memory, like=state)), expected)
    assert same(step(ck.restore(memory, like=trees.abstract(state))), expected)
    assert step._cache_size() == traced


def test_uncommitted_and_committed_leaves_stay_so(memory: str):
    device = jax.devices()[0]
    tree = {"free": jnp.ones(3), "bound": jax.device_put(jnp.ones(3), device), "key": jax.random.key(0)}
    ck.save(memory, tree)
    restored = ck.restore(memory, like=tree)
    assert {name: leaf.committed for name, leaf in restored.items()} == {"free": False, "bound": True, "key": False}
    moved = jax.device_put(restored["bound"], jax.devices()[1]) + restored["free"]  # Free arrays go where others are.
    assert moved.devices() == {jax.devices()[1]}


def test_the_default_device_is_where_free_arrays_go(memory: str):
    ck.save(memory, {"x": np.arange(3.0, dtype=np.float32), "k": jax.random.key(1)})
    with jax.default_device(jax.devices()[4]):
        restored = ck.restore(memory, like={"x": jax.ShapeDtypeStruct((3,), "float32"), "k": jax.random.key(0)})
    assert restored["x"].devices() == restored["k"].devices() == {jax.devices()[4]}


def test_eval_shape_makes_a_target(memory: str):
    def init() -> Any:
        params = {"w": jnp.ones((2, 3)), "scale": jnp.asarray(1.0)}
        return State(jnp.zeros((), int), params), jax.random.key(0)

    ck.save(memory, init())
    assert same(ck.restore(memory, like=jax.eval_shape(init)), init())


def test_one_sharding_for_all(root: str, mesh42: Mesh):
    ck.save(f"{root}/1", {"w": W, "b": W[:, 0], "n": 3, "k": jax.random.key(0)})
    sharding = NamedSharding(mesh42, P())
    for like in (None, {"w": W, "b": jax.ShapeDtypeStruct((8,), "float32"), "n": 0, "k": jax.random.key(1)}):
        restored = ck.restore(f"{root}/1", like=like, sharding=sharding)
        assert all(restored[name].sharding == sharding for name in "wbk")
        assert same(jax.tree.map(np.asarray, [restored["w"], restored["b"]]), [W, W[:, 0].copy()])
        assert restored["n"] == 3


def test_a_tree_prefix_of_shardings(root: str, mesh42: Mesh):
    ck.save(f"{root}/1", {"p": {"w": W, "v": W}, "n": W, "l": [W, W]})
    rows, columns = NamedSharding(mesh42, P("data")), NamedSharding(mesh42, P(None, "model"))
    for like in (None, {"p": {"w": W, "v": W}, "n": W, "l": [W, W]}):
        restored = ck.restore(f"{root}/1", like=like, sharding={"p": rows, "n": None, "l": [columns, None]})
        assert restored["p"]["w"].sharding == restored["p"]["v"].sharding == rows
        assert restored["l"][0].sharding == columns
        assert type(restored["n"]) is type(restored["l"][1]) is np.ndarray
        assert all(same(np.asarray(leaf), W) for leaf in jax.tree.leaves(restored))


def test_a_function_for_shardings(root: str, mesh42: Mesh):
    seen = {}

    def place(name: str, shape: tuple[int, ...], dtype: Any) -> jax.sharding.Sharding | None:
        seen[name] = shape, np.dtype(dtype)
        return NamedSharding(mesh42, P("data")) if name.startswith("p.") else None

    ck.save(f"{root}/1", {"p": {"w": W}, "n": np.ones(3, np.int8), "step": 4})
    restored = ck.restore(f"{root}/1", sharding=place)
    assert restored["p"]["w"].sharding == NamedSharding(mesh42, P("data"))
    assert same(restored["n"], np.ones(3, np.int8))
    assert seen == {"p.w": ((8, 16), np.float32), "n": ((3,), np.int8)}


def test_like_is_not_moved_by_a_sharding_beside_it(memory: str, mesh42: Mesh):
    like = {"w": placed("one axis")}
    ck.save(memory, like)
    restored = ck.restore(memory, like=like, sharding=NamedSharding(mesh42, P(None, "model")))
    assert restored["w"].sharding.spec == P(None, "model")
    assert like["w"].sharding == _shardings()["one axis"]()


def test_shardings_that_cannot_hold_their_leaves_are_all_named(memory: str, mesh42: Mesh):
    one = np.float32(1)
    ck.save(memory, {"a": np.full(6, one), "b": np.full((2, 3), one), "ok": np.full(8, one), "c": one})
    with pytest.raises(ck.Mismatch) as caught:
        ck.restore(memory, sharding=NamedSharding(mesh42, P("data")))
    assert {fault.place for fault in caught.value.faults} == {"a", "b", "c"}
    assert "cannot be cut as its sharding says" in str(caught.value)


def test_a_sharding_of_the_wrong_kind_is_an_error_at_once(memory: str):
    ck.save(memory, {"a": W})
    with pytest.raises(TypeError, match="sharding for a"):
        ck.restore(memory, sharding=lambda *_: "data")
    with pytest.raises(ck.Mismatch, match="prefix"):
        ck.restore(memory, sharding={"b": None, "c": None})


def test_an_abstract_mesh_is_refused_with_the_way_to_a_concrete_one(memory: str):
    ck.save(memory, {"w": W})
    mesh = jax.sharding.AbstractMesh((4, 2), ("x", "y"))
    like = {"w": jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=NamedSharding(mesh, P("x")))}
    with pytest.raises(ck.Unsupported, match="make_mesh"):
        ck.restore(memory, like=like)


def test_axis_types_stay_as_like_has_them_and_are_on_record(memory: str):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
    value = jax.device_put(W, NamedSharding(mesh, P("x")))
    ck.save(memory, {"w": value})
    assert ck.restore(memory, like={"w": value})["w"].sharding.mesh.axis_types == mesh.axis_types
    recorded = ck.open(memory)["w"].sharding
    assert recorded is not None
    assert recorded["axis_types"] == ["Explicit", "Auto"]
    assert recorded["axes"] == {"x": 4, "y": 2}
    assert recorded["spec"][0] == "x"


# --- what fits what ---------------------------------------------------------------------------------------------------


def test_each_array_comes_back_as_the_kind_that_like_holds(memory: str, mesh42: Mesh):
    saved = {"j": jnp.ones(2), "n": np.ones(2, np.float32), "0": jnp.float32(3), "s": np.float32(4), "p": 5, "f": 0.5}
    like = {
        "j": np.zeros(2, np.float32),
        "n": jax.ShapeDtypeStruct((2,), "float32", sharding=NamedSharding(mesh42, P("model"))),
        "0": np.float32(0),
        "s": jnp.float32(0),
        "p": jnp.int32(0),
        "f": np.zeros((), np.float32),
    }
    ck.save(memory, saved)
    restored = ck.restore(memory, like=like)
    assert same(restored["j"], np.ones(2, np.float32))
    assert isinstance(restored["n"], jax.Array)
    assert restored["n"].sharding == like["n"].sharding
    assert same(restored["0"], np.float32(3))
    assert same(restored["s"], jnp.float32(4))
    assert same(restored["p"], jnp.int32(5))
    assert same(restored["f"], np.array(0.5, np.float32))


def test_arrays_without_axes_come_back_as_python_values_where_like_has_those(memory: str):
    ck.save(
        memory,
        {"i": jnp.int32(3), "f": np.float32(0.5), "b": np.bool_(True), "h": jnp.bfloat16(2), "c": np.complex64(1j)},
    )
    restored = ck.restore(memory, like={"i": 0, "f": 0.0, "b": False, "h": 0.0, "c": 0j})
    assert same(restored, {"i": 3, "f": 0.5, "b": True, "h": 2.0, "c": 1j})


@pytest.mark.parametrize(
    ("saved", "like"),
    [
        (2**31, np.int32(0)),
        (-1, np.uint8(0)),
        (0.1, np.float32(0)),
        (1, np.float32(0)),
        (1.0, np.int32(0)),
        (True, np.int32(0)),
        (np.float32(1), 0),
        (np.int32(1), 0.0),
        (np.int32(1), False),
        (np.ones(1), 0.0),
        ("text", np.int32(0)),
        (2**70, np.int64(0)),
        (b"x", ""),
    ],
    ids=repr,
)
def test_nothing_narrows_or_changes_its_sort_silently(saved: Any, like: Any, memory: str):
    ck.save(memory, {"x": saved})
    with pytest.raises(ck.Mismatch, match="x"):
        ck.restore(memory, like={"x": like})


def test_a_64_bit_target_without_x64_is_a_mismatch_that_tells_the_way_out(memory: str):
    ck.save(memory, {"i": np.arange(3), "f": np.arange(3.0), "p": 2**40})
    like = {
        "i": jax.ShapeDtypeStruct((3,), "int64"),
        "f": jax.ShapeDtypeStruct((3,), "float64"),
        "p": jax.ShapeDtypeStruct((), "int64"),
    }
    with pytest.raises(ck.Mismatch, match="jax_enable_x64") as caught:
        ck.restore(memory, like=like)
    assert {fault.place for fault in caught.value.faults} == {"i", "f", "p"}
    restored = ck.restore(memory, like={"i": like["i"], "f": like["f"]}, only=["i", "f"], cast=True, on_extra="ignore")
    assert same(restored, {"i": jnp.arange(3), "f": jnp.arange(3.0)})
    with jax.enable_x64(True):
        assert same(
            ck.restore(memory, like=like), {"i": jnp.arange(3), "f": jnp.arange(3.0), "p": jnp.asarray(2**40, "int64")}
        )


@pytest.mark.parametrize("x64", [False, True])
def test_sharding_without_a_target_narrows_nothing_either(x64: bool, memory: str):
    ck.save(memory, {"i": np.arange(3)})
    with jax.enable_x64(x64):
        if x64:
            assert ck.restore(memory, sharding=SingleDeviceSharding(jax.devices()[0]))["i"].dtype == "int64"
        else:
            with pytest.raises(ck.Mismatch, match="jax_enable_x64"):
                ck.restore(memory, sharding=SingleDeviceSharding(jax.devices()[0]))


def test_cast_converts_as_numpy_does(memory: str, mesh42: Mesh):
    values = np.linspace(-3, 3, 16, dtype=np.float32)
    ck.save(memory, {"a": values, "b": values, "c": np.arange(4), "d": jnp.int32(16777217), "e": values, "f": 3})
    like = {
        "a": jnp.zeros(16, jnp.bfloat16),
        "b": np.zeros(16, np.float16),
        "c": np.zeros(4, np.float32),
        "d": np.float32(0),
        "e": jax.ShapeDtypeStruct((16,), "bfloat16", sharding=NamedSharding(mesh42, P("data"))),
        "f": jnp.float32(0),
    }
    with pytest.raises(ck.Mismatch, match="cast=True") as caught:
        ck.restore(memory, like=like)
    assert {fault.place for fault in caught.value.faults} == set("abcdef")
    restored = ck.restore(memory, like=like, cast=True)
    assert same(restored["a"], jnp.asarray(values, jnp.bfloat16))
    assert same(restored["b"], values.astype(np.float16))
    assert same(restored["c"], np.arange(4, dtype=np.float32))
    assert same(restored["d"], np.float32(16777216))
    assert same(np.asarray(restored["e"]), values.astype(ml_dtypes.bfloat16))
    assert same(restored["f"], jnp.float32(3))


def test_cast_does_not_bend_shapes(memory: str):
    ck.save(memory, {"a": np.ones((2, 3)), "b": np.ones(1), "c": np.float32(1)})
    with pytest.raises(ck.Mismatch) as caught:
        ck.restore(memory, like={"a": np.ones((3, 2)), "b": np.float64(0), "c": np.ones(1, np.float32)}, cast=True)
    assert {fault.place for fault in caught.value.faults} == {"a", "b", "c"}


@pytest.mark.parametrize("dtype", ["datetime64[s]", "U4", "S4", "O", "longdouble", [("x", "f8")]], ids=str)
@pytest.mark.parametrize("cast", [False, True])
def test_a_target_that_nothing_can_become_is_a_mismatch(dtype: Any, cast: bool, memory: str):
    ck.save(memory, {"a": np.ones(2), "b": 1.0})
    with pytest.raises(ck.Mismatch) as caught:
        ck.restore(memory, like={"a": np.zeros(2, dtype), "b": np.zeros((), dtype)}, cast=cast)
    assert {fault.place for fault in caught.value.faults} == {"a", "b"}


def test_a_cast_that_loses_a_part_of_the_number_is_refused(memory: str):
    ck.save(memory, {"a": np.ones(2, np.complex64), "b": 1j})
    with pytest.raises(ck.Mismatch, match="complex"):
        ck.restore(memory, like={"a": np.zeros(2, np.float32), "b": np.float32(0)}, cast=True)


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float8_e4m3fn", "int32", "uint4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_cast_that_makes_a_number_of_nan_or_infinity_is_refused(value, dtype, memory: str):
    if dtype == "float8_e4m3fn" and np.isnan(value):
        return  # It has NaN, if no infinity.
    ck.save(memory, {"a": np.array([1, value], np.float32)})
    with pytest.raises(ck.Mismatch, match=f"such as {value}"):
        ck.restore(memory, like={"a": np.zeros(2, jnp.dtype(dtype))}, cast=True)


def test_a_cast_for_which_numpy_has_no_way_goes_by_a_wider_dtype(memory: str):
    ck.save(memory, {"a": np.array([3, 7], ml_dtypes.int4), "b": np.array([2, 0.5], ml_dtypes.float8_e4m3fn)})
    like = {"a": np.zeros(2, ml_dtypes.uint4), "b": np.zeros(2, ml_dtypes.float8_e8m0fnu)}
    restored = ck.restore(memory, like=like, cast=True)
    assert restored["a"].astype(int).tolist() == [3, 7]
    assert restored["b"].astype(float).tolist() == [2, 0.5]


def test_a_python_int_that_no_float_holds_is_refused(memory: str):
    ck.save(memory, {"a": 2**200})
    for dtype in ("float32", "float16", "int64"):
        with pytest.raises(ck.Mismatch, match="does not hold"):
            ck.restore(memory, like={"a": np.zeros((), dtype)}, cast=True)
    assert ck.restore(memory, like={"a": np.float64(0)}, cast=True)["a"] == 2.0**200


def test_64_bit_values_come_back_where_only_this_thread_has_them(tmp_path: pathlib.Path):
    """`jax.enable_x64` holds for the thread that says so; chunks are placed in others too."""
    wide = np.arange(3_000_000) + 2**40
    tree = {"few": wide[:9], "many": wide, "floats": wide + 0.3, "complex": wide[:5] + 0.3j}
    ck.save(tmp_path / "1", tree)
    with jax.enable_x64(True):
        like = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in tree.items()}
        restored = ck.restore(tmp_path / "1", like)
        for name, value in tree.items():
            assert restored[name].dtype == value.dtype
            assert (np.asarray(restored[name]) == value).all()


@pytest.mark.parametrize(
    ("values", "dtype", "first"),
    [
        (np.array([1.5, np.nan]), np.int32, "nan"),
        (np.array([1.5, 2.0**31]), np.int32, "2147483648"),
        (np.array([-1.0, 2.0**63]), np.int64, "9.2"),
        (np.array([1.5, -1.0]), np.uint8, "-1"),
        (np.array([3, 300]), np.uint8, "300"),
        (np.array([3, -1]), np.uint64, "-1"),
        (np.array([3, 2**63], np.uint64), np.int64, "9223372036854775808"),
        (np.array([3, 8]), ml_dtypes.int4, "8"),
        (np.array([1.0, 1e39]), np.float32, "1e"),
        (np.array([1.0, 1e6], np.float32), np.float16, "1000000"),
        (np.array([1.0, 1e3], np.float32), ml_dtypes.float8_e4m3fn, "1000"),
        (np.array([1.0, 100.0], np.float32), ml_dtypes.float4_e2m1fn, "100"),
        (np.array([1, 10**6]), np.float16, "1000000"),
        (np.array([1e200 + 1j]), np.complex64, "1e"),
        (np.array([0.0, 0.5]), np.bool_, "0.5"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_cast_that_would_wrap_or_overflow_is_refused(values, dtype, first, memory: str):
    """Rounding is what was asked for; another number is not."""
    ck.save(memory, {"bad": values, "good": np.array([1, 0])})
    like = {"bad": np.zeros(values.shape, dtype), "good": np.zeros(2, dtype)}
    with pytest.raises(ck.Mismatch, match=f"bad: .* 1 value that .* cannot hold, such as .*{first}") as caught:
        ck.restore(memory, like=like, cast=True)
    assert [fault.place for fault in caught.value.faults] == ["bad"]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([1.5, -1.5, 2.0**31 - 1, -(2.0**31)]), np.int32),
        (np.array([-(2.0**63), 2.0**63 - 1024]), np.int64),
        (np.array([np.inf, -np.inf, np.nan, 3.3e38, 1e-60]), np.float32),
        (np.array([65504, -65504, 65519]), np.float16),
        (np.array([2**63 - 1, -(2**63)]), np.float32),
        (np.array([2**63 - 1, -(2**63)]), np.float64),
        (np.array([3e38, 1], np.float32), np.float64),
        (np.array([0, 1, 1]), np.bool_),
        (np.array([True, False]), np.float32),
        (np.array([True, False]), np.int8),
        (np.array([np.inf + 1j, 1e-300]), np.complex64),
        (np.array([448.0, -448.0, 450.0]), ml_dtypes.float8_e4m3fn),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_cast_rounds(values, dtype, memory: str):
    ck.save(memory, {"a": values})
    restored = ck.restore(memory, like={"a": np.zeros(values.shape, dtype)}, cast=True)
    with np.errstate(all="ignore"):
        assert same(restored["a"], values.astype(dtype))


def test_only_takes_names_and_all_below_them(root: str):
    tree = {"params": {"a": {"w": np.ones(2), "b": np.ones(3)}, "ab": np.ones(4)}, "opt": [np.ones(5), 6], "n": 7}
    ck.save(f"{root}/1", tree)

    def got(only: Any) -> Any:
        return ck.restore(f"{root}/1", only=only)

    def names(only: Any) -> set[str]:
        found = jax.tree_util.tree_leaves_with_path(got(only))
        return {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in found}

    assert names("params") == {"params.a.w", "params.a.b", "params.ab"}
    assert names("params.a") == {"params.a.w", "params.a.b"}
    assert names("params.a*") == {"params.a.w", "params.a.b", "params.ab"}
    assert names("*.w") == {"params.a.w"}
    assert names(["n", "opt.1"]) == {"n", "opt.1"}
    assert got("opt.1") == {"opt": [None, 6]}
    assert names("params.?") == {"params.a.w", "params.a.b"}


def test_only_leaves_the_rest_of_like_as_it_is(memory: str):
    ck.save(memory, {"p": np.ones(2), "opt": {"m": np.ones(2), "gone": 1}})
    like = {"p": np.zeros(2), "opt": {"m": np.full(2, 9.0), "new": object()}}
    restored = ck.restore(memory, like=like, only="p")
    assert same(restored["p"], np.ones(2))
    assert restored["opt"]["m"] is like["opt"]["m"]
    assert restored["opt"]["new"] is like["opt"]["new"]
    assert not like["p"].any()


def test_only_is_as_strict_as_ever_within_what_it_names(memory: str):
    ck.save(memory, {"p": {"a": np.ones(2), "b": np.ones(2)}, "q": 1})
    with pytest.raises(ck.Mismatch) as caught:
        ck.restore(memory, like={"p": {"a": np.ones(3), "c": np.ones(2)}}, only="p")
    assert {fault.place for fault in caught.value.faults} == {"p.a", "p.b", "p.c"}


@pytest.mark.parametrize("like", [None, {"params": 0}], ids=["without", "with"])
def test_only_that_names_nothing_is_a_mismatch(like: Any, memory: str):
    """A slip of the pen must not end in a restore that restores nothing."""
    ck.save(memory, {"params": 1})
    with pytest.raises(ck.Mismatch, match="parms"):
        ck.restore(memory, like=like, only=["params", "parms.*"])


def test_what_is_missing_can_be_kept(memory: str):
    ck.save(memory, {"a": np.ones(2)})
    like = {"a": np.zeros(2), "new": {"b": np.full(3, 5.0), "n": 6}, "empty": {}, "none": None}
    with pytest.raises(ck.Mismatch, match="not in the checkpoint") as caught:
        ck.restore(memory, like=like)
    assert {fault.place for fault in caught.value.faults} >= {"new.b", "new.n", "empty", "none"}
    restored = ck.restore(memory, like=like, on_missing="keep")
    assert same(restored, {**like, "a": np.ones(2)})
    assert restored["new"]["b"] is like["new"]["b"]


def test_nothing_abstract_is_ever_returned(memory: str):
    ck.save(memory, {"a": np.ones(2)})
    hollow = jax.ShapeDtypeStruct((3,), "float32")
    for options in ({"on_missing": "keep"}, {"only": "a"}):
        with pytest.raises(ck.Mismatch, match="b"):
            ck.restore(memory, like={"a": np.ones(2), "b": hollow}, **options)


def test_what_is_extra_can_be_left_out(memory: str):
    ck.save(memory, {"a": np.ones(2), "opt": {"m": np.ones(3), "n": 1, "e": ()}, "none": None})
    with pytest.raises(ck.Mismatch, match="not in `like`") as caught:
        ck.restore(memory, like={"a": np.zeros(2)})
    assert {fault.place for fault in caught.value.faults} >= {"opt.m", "opt.n", "none"}
    assert same(ck.restore(memory, like={"a": np.zeros(2)}, on_extra="ignore"), {"a": np.ones(2)})


@pytest.mark.parametrize("value", [5, np.ones(2), {"w": np.ones(2)}], ids=["scalar", "array", "subtree"])
def test_a_field_filled_on_one_side_only_is_extra_or_missing(value: Any, memory: str):
    """None stands for a field that is not there yet, whether it is going to hold one leaf or many."""
    ck.save(f"{memory}/1", {"a": 1, "lazy": value})
    ck.save(f"{memory}/2", {"a": 1, "lazy": None})
    with pytest.raises(ck.Mismatch, match="lazy"):
        ck.restore(f"{memory}/1", like={"a": 0, "lazy": None})
    with pytest.raises(ck.Mismatch, match="lazy"):
        ck.restore(f"{memory}/2", like={"a": 0, "lazy": value})
    assert ck.restore(f"{memory}/1", like={"a": 0, "lazy": None}, on_extra="ignore") == {"a": 1, "lazy": None}
    assert same(ck.restore(f"{memory}/2", like={"a": 0, "lazy": value}, on_missing="keep"), {"a": 1, "lazy": value})


def test_lenience_about_names_is_none_about_shapes(memory: str):
    ck.save(memory, {"a": np.ones(2), "x": 1})
    with pytest.raises(ck.Mismatch) as caught:
        ck.restore(memory, like={"a": np.ones(3), "y": 1}, on_missing="keep", on_extra="ignore")
    assert {fault.place for fault in caught.value.faults} == {"a"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"on_missing": "ignore"}, ValueError),
        ({"on_extra": "keep"}, ValueError),
        ({"only": 3}, TypeError),
        ({"only": [3]}, TypeError),
        ({"sharding": "data"}, (TypeError, ck.Mismatch)),
    ],
    ids=str,
)
def test_wrong_arguments_are_errors_at_once(options: Any, error: Any, memory: str):
    ck.save(memory, {"a": np.ones(2)})
    with pytest.raises(error):
        ck.restore(memory, like={"a": np.ones(2)}, **options)


def test_like_is_never_modified(memory: str, mesh42: Mesh):
    saved = {"j": jax.device_put(W, NamedSharding(mesh42, P("data"))), "n": W, "k": jax.random.key(3), "s": [1, "x"]}
    ck.save(memory, saved)
    like = trees.zeros(saved)
    copy = trees.zeros(saved)
    ck.restore(memory, like=like)
    assert same(like, copy)


# --- what the errors say ----------------------------------------------------------------------------------------------


def test_a_mismatch_lists_everything_at_once_with_both_sides(memory: str):
    ck.save(
        f"{memory}/7",
        {
            "head": {"kernel": np.ones((2, 3), np.float32), "bias": np.ones(3, np.float32)},
            "layers": [np.ones(2), np.ones(2)],
            "step": 5,
            "old": np.ones((), np.int8),
            "key": jax.random.key(0),
        },
    )
    like = {
        "head": {"kernel": jnp.ones((2, 4), jnp.bfloat16), "bias": jnp.ones(3, jnp.bfloat16)},
        "layers": (np.ones(2), np.ones(2), np.ones(2)),
        "step": 5.0,
        "new": np.ones((1, 2)),
        "key": jax.random.PRNGKey(0),
    }
    with pytest.raises(ck.Mismatch) as caught:
        ck.restore(f"{memory}/7", like=like)
    text = str(caught.value)
    assert text.startswith(f"{memory}/7 does not fit `like` in 8 places:\n")
    for line in (
        "head.kernel: checkpoint has float32[2,3], `like` wants bfloat16[2,4]",
        "head.bias: checkpoint has float32[3], `like` wants bfloat16[3] (cast=True converts it)",
        "layers: checkpoint has a list of 2, `like` wants a tuple of 3",
        "layers.2: in `like`, not in the checkpoint",
        "step: checkpoint has int, `like` wants float",
        "old: int8[] in the checkpoint, not in `like`",
        "new: in `like`, not in the checkpoint",
        "key: checkpoint has key<threefry2x32>[], `like` wants uint32[2] "
        "(restore it as a key; jax.random.key_data gives its numbers)",
    ):
        assert f"\n  {line}\n" in text
    assert "\n\nhint: on_extra=" in text
    assert text.endswith(f"`ckpt-jax show {memory}/7` lists what was saved")
    places = {"head.kernel", "head.bias", "layers", "layers.2", "step", "old", "new", "key"}
    assert {fault.place for fault in caught.value.faults} == places
    kernel = next(fault for fault in caught.value.faults if fault.place == "head.kernel")
    assert (kernel.found, kernel.expected) == ("float32[2,3]", "bfloat16[2,4]")


def test_a_long_list_is_cut_with_a_count_and_kept_in_full(memory: str):
    ck.save(memory, {f"l{i}": np.ones(1) for i in range(300)})
    with pytest.raises(ck.Mismatch) as caught:
        ck.restore(memory, like={f"l{i}": np.ones(2) for i in range(300)})
    assert len(caught.value.faults) == 300
    assert "and 200 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 110


def test_unsupported_leaves_are_all_named_in_one_message(memory: str):
    with pytest.raises(ck.Unsupported) as caught:
        ck.save(memory, {"a": object(), "ok": 1, "b": [len, np.ones(2), np.array([None])]})
    assert [fault.place for fault in caught.value.faults] == ["a", "b.0", "b.2"]
    text = str(caught.value)
    assert text.startswith("nothing was saved: some leaves cannot be:\n")
    assert "a: expected a leaf that can be saved, found a object" in text
    assert "b.2: expected a leaf that can be saved, found an array of dtype object" in text
    assert "hint: ckpt_jax.register_leaf(type, encode, decode)" in text


# --- any tree at all --------------------------------------------------------------------------------------------------

_keys = st.text(st.characters(codec=None, exclude_categories=()), max_size=6) | st.sampled_from(ODD_KEYS[:35])
_values = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.complex_numbers(),
    st.sampled_from(["float32", "int8", "bfloat16", "bool", "int4"]).map(lambda d: every_value(d, (2, 3))),
    st.builds(lambda shape: np.zeros(shape, np.int16), st.lists(st.integers(0, 3), max_size=3).map(tuple)),
)
_any_tree = st.recursive(
    _values | st.none(),
    lambda inner: st.one_of(
        st.dictionaries(_keys, inner, max_size=4),
        st.dictionaries(st.integers(), inner, max_size=4),
        st.dictionaries(st.tuples(st.integers(), st.text(max_size=3)), inner, max_size=3),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None, database=None)
@given(_any_tree)
def test_any_tree_comes_back(tree: Any):
    place = "memory://any/tree"
    ck.save(place, tree, overwrite=True)
    assert same(ck.restore(place, like=trees.zeros(tree)), tree)
    assert len(ck.open(place)) == len(jax.tree.leaves(tree))


@settings(max_examples=100, deadline=None, database=None)
@given(_any_tree, _any_tree)
def test_two_trees_fit_only_where_every_leaf_has_its_place(saved: Any, like: Any):
    """Either the restored tree holds just the values that were saved, each at its own path, or it is a Mismatch."""
    place = "memory://any/two"
    saved = [saved]
    ck.save(place, saved, overwrite=True)
    like = [like]  # None as a whole would mean: no target.
    try:
        restored = ck.restore(place, like=like)
    except ck.Mismatch as error:
        assert error.faults  # noqa: PT017
    else:
        assert jax.tree.structure(restored) == jax.tree.structure(like)
        # A Python number may come back as an array of one, where it is the same number.
        ours, theirs = ([trees.bits(_plain(leaf)) for leaf in jax.tree.leaves(tree)] for tree in (saved, restored))
        assert sorted(map(repr, ours)) == sorted(map(repr, theirs))


def _plain(leaf: Any) -> Any:
    is_number = getattr(leaf, "shape", None) == () and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    return leaf.item() if is_number else leaf
