"""What users met: leaf types, containers, keys, and structures, shapes or dtypes that do not fit."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import psutil
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt_jax as ck
from tests import trees
from tests.trees import same


class Empty(NamedTuple):
    pass


@flax.struct.dataclass
class TrainState:
    step: int
    ema: Any = None


@jax.tree_util.register_pytree_with_keys_class
class Bag(dict[str, Any]):
    """A dict's subclass that is a pytree of its own."""

    def tree_flatten_with_keys(self) -> Any:
        keys = sorted(self)
        return [(jax.tree_util.DictKey(key), self[key]) for key in keys], tuple(keys)

    @classmethod
    def tree_unflatten(cls, keys: Any, children: Any) -> "Bag":
        return cls(zip(keys, children, strict=True))


# --- leaf types and containers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [
        {},
        (),
        [],
        None,
        Empty(),
        {"a": {}, "b": (), "c": [], "d": None, "e": Empty()},
        {"x": {"y": {}}},
        [None, (None, {}), Bag()],
        Bag(a=Bag(), b=None, c=1),
    ],
    ids=repr,
)
def test_c001_empty_containers_and_none(tree: Any, root: str):
    """Every kind of emptiness survives as just that kind, at the root as well as deep inside."""
    ck.save(f"{root}/1", tree)
    restored = ck.restore(f"{root}/1", like=tree)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    assert type(restored) is type(tree)
    assert same(restored, tree)
    ck.restore(f"{root}/1")
    assert ck.verify(f"{root}/1").ok


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_c003_typed_keys(impl: str, root: str):
    """Keys come back as typed keys with the same stream: with a target, with an abstract one, and without."""
    model = nnx.state(nnx.Dropout(0.5, rngs=nnx.Rngs(jax.random.key(3, impl=impl))))
    keys = {
        "k": jax.random.key(7, impl=impl),
        "b": jax.random.split(jax.random.key(1, impl=impl), 4),
        "nested": [{"k": (jax.random.key(2, impl=impl),)}],
        "model": model,
    }
    ck.save(f"{root}/1", keys)
    for like in (trees.zeros(keys), jax.eval_shape(lambda: keys)):
        restored = ck.restore(f"{root}/1", like=like)
        assert same(restored, keys)
        assert restored["k"].dtype == keys["k"].dtype
        assert same(jax.random.bits(restored["k"], (8,)), jax.random.bits(keys["k"], (8,)))
    bare = ck.restore(f"{root}/1")
    assert same([bare["k"], bare["b"], bare["nested"]], [keys["k"], keys["b"], keys["nested"]])


def test_c005_numpy_generator_state(root: str):
    """Ints of 128 bits, names and small ints come back exact and as the same Python types."""
    state = np.random.default_rng(42).bit_generator.state
    ck.save(f"{root}/1", {"np_rng": state, "w": np.ones(2), "big": 2**70, "name": np.str_("x")})
    for like in (None, {"np_rng": state, "w": np.zeros(2), "big": 0, "name": np.str_("")}):
        restored = ck.restore(f"{root}/1", like=like)
        assert same(restored, {"np_rng": state, "w": np.ones(2), "big": 2**70, "name": np.str_("x")})
        rng = np.random.default_rng(0)
        rng.bit_generator.state = restored["np_rng"]
        assert rng.integers(0, 1 << 30, 5).tolist() == np.random.default_rng(42).integers(0, 1 << 30, 5).tolist()


@pytest.mark.parametrize(
    "make",
    [lambda: jnp.array(1), lambda: np.arange(3.0), lambda: 2.5, lambda: "s", lambda: jax.random.key(0)],
    ids=["jax", "numpy", "float", "str", "key"],
)
def test_c007_a_bare_leaf_as_the_whole_tree(make: Callable[[], Any], root: str):
    """A tree may be a single leaf, and messages call it <root>."""
    tree = make()
    ck.save(f"{root}/1", tree)
    assert same(ck.restore(f"{root}/1", like=tree), tree)
    with pytest.raises(ck.Mismatch, match="<root>"):
        ck.restore(f"{root}/1", like=np.zeros((7, 7)))


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "int2", "uint4", "float16", "complex64", "bool"]
)
def test_c008_small_dtypes_stay_bit_exact(dtype: str, root: str, mesh42: Mesh):
    """The dtype and every bit are the same afterwards: negative ints of four bits, NaN payloads, -0.0; sharded too."""
    if dtype in ("int4", "int2", "uint4", "bool"):
        values = np.array([0, -1, 1, -2, 1, 0, -1, 0]).astype(dtype)
    else:
        patterns = np.array([0x8000_7FC1, 0xFFC3_0000, 0x0080_FF81, 0x7C01_FE02] * 4, np.uint32)
        values = patterns.view(dtype)[:8]
    tree = {"a": jnp.asarray(values), "s": jax.device_put(values, NamedSharding(mesh42, P("data"))), "n": values}
    assert tree["a"].dtype == dtype
    ck.save(f"{root}/1", tree)
    restored = ck.restore(f"{root}/1", like=tree)
    assert same(restored, tree)
    assert all(np.asarray(leaf).tobytes() == values.tobytes() for leaf in restored.values())
    assert same(ck.restore(f"{root}/1"), dict.fromkeys("asn", values))


def test_c012_numpy_layouts(root: str, tmp_path: Path):
    """Big-endian, Fortran-order, strided, read-only and memory-mapped arrays: equal values, in native order."""
    mapped = np.memmap(tmp_path / "data", np.float32, "w+", shape=(5, 3))
    mapped[:] = np.arange(15).reshape(5, 3)
    mapped.flush()
    arrays = {
        "big": np.arange(6, dtype=">f4").reshape(2, 3).T,
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "broadcast": np.broadcast_to(np.float32(2), (4, 5)),
        "strided": np.arange(10)[::-2],
        "mapped": np.memmap(tmp_path / "data", np.float32, "r", shape=(5, 3)),
    }
    for array in arrays.values():
        array.flags.writeable = False
    before = {name: array.tobytes() for name, array in arrays.items()}
    ck.save(f"{root}/1", arrays)
    assert before == {name: array.tobytes() for name, array in arrays.items()}
    for restored in (ck.restore(f"{root}/1"), ck.restore(f"{root}/1", like=arrays)):
        for name, array in arrays.items():
            assert type(restored[name]) is np.ndarray
            assert np.array_equal(restored[name], array)
            assert restored[name].dtype == array.dtype.newbyteorder("=")
            assert restored[name].flags.writeable
    assert ck.open(f"{root}/1")["big"].dtype == np.float32


def test_c012_a_broadcast_view_is_not_blown_up(tmp_path: Path):
    """A view of one number as a gigabyte is saved chunk by chunk, not as a copy of a gigabyte."""
    view = np.broadcast_to(np.float32(2), (1 << 14, 1 << 14))
    before = psutil.Process().memory_info().rss
    ck.save(tmp_path / "a", {"a": view[:, :1024], "b": view[:1, :1]})
    assert psutil.Process().memory_info().rss - before < 512 << 20
    assert ck.verify(tmp_path / "a").ok


def test_c013_unsupported_leaves_are_refused(root: str):
    """Save refuses before it writes, naming every leaf, its type, and what to do; nothing is ever stored as None."""
    iterator = iter([1, 2, 3])
    with pytest.raises(ck.Unsupported) as caught:
        ck.save(f"{root}/0", {"w": np.ones(2), "opt": {"it": iterator, "fn": len, "file": os.devnull and object()}})
    assert [fault.place for fault in caught.value.faults] == ["opt.file", "opt.fn", "opt.it"]
    for text in ("opt.it", "list_iterator", "opt.fn", "builtin_function_or_method", "opt.file", "register_leaf"):
        assert text in str(caught.value)
    assert ck.latest(root) is None
    assert list(iterator) == [1, 2, 3]


def test_c020_dataclass_with_frozen_dict_and_lazy_fields(root: str):
    """The target's containers win; a subtree against None is a mismatch, unless it is explicitly left out."""
    ck.save(f"{root}/1", TrainState(3, flax.core.freeze({"w": np.ones(2)})))
    restored = ck.restore(f"{root}/1", like=TrainState(0, flax.core.freeze({"w": np.zeros(2)})))
    assert isinstance(restored.ema, flax.core.FrozenDict)
    assert same(restored, TrainState(3, flax.core.freeze({"w": np.ones(2)})))
    with pytest.raises(ck.Mismatch, match="ema"):
        ck.restore(f"{root}/1", like=TrainState(0, None))
    assert ck.restore(f"{root}/1", like=TrainState(0, None), on_extra="ignore") == TrainState(3, None)
    ck.save(f"{root}/2", TrainState(3, None))
    with pytest.raises(ck.Mismatch, match="ema"):
        ck.restore(f"{root}/2", like=TrainState(0, flax.core.freeze({"w": np.zeros(2)})))
    kept = ck.restore(f"{root}/2", like=TrainState(0, flax.core.freeze({"w": np.zeros(2)})), on_missing="keep")
    assert same(kept, TrainState(3, flax.core.freeze({"w": np.zeros(2)})))


def test_c022_equinox_modules_and_skeletons(root: str):
    """The arrays of a module round-trip, a skeleton is a target, and another depth is a mismatch, never a shift."""
    key = jax.random.key(0)
    model = eqx.nn.MLP(2, 2, 4, 1, key=key)
    arrays, static = eqx.partition(model, eqx.is_array)
    ck.save(f"{root}/1", arrays)
    x = jnp.ones((3, 2))
    expected = jax.vmap(model)(x)
    assert same(jax.vmap(eqx.combine(ck.restore(f"{root}/1", like=arrays), static))(x), expected)
    skeleton = eqx.filter(eqx.filter_eval_shape(eqx.nn.MLP, 2, 2, 4, 1, key=key), lambda leaf: hasattr(leaf, "shape"))
    assert same(jax.vmap(eqx.combine(ck.restore(f"{root}/1", like=skeleton), static))(x), expected)
    deeper = eqx.filter_eval_shape(eqx.nn.MLP, 2, 2, 4, 3, key=key)
    with pytest.raises(ck.Mismatch) as caught:
        ck.restore(f"{root}/1", like=eqx.filter(deeper, lambda leaf: hasattr(leaf, "shape")))
    assert {"layers.2.weight", "layers.3.weight"} <= {fault.place for fault in caught.value.faults}


def test_c022_functions_in_a_module_are_refused_by_path(memory: str):
    """A module saved whole says which of its leaves are functions."""
    with pytest.raises(ck.Unsupported, match="activation"):
        ck.save(memory, eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)))


def _optimizers() -> dict[str, optax.GradientTransformation]:
    labels = {"a": "t", "b": "f"}
    return {
        "sgd": optax.sgd(0.1),
        "adamw": optax.adamw(0.1),
        "chain": optax.chain(optax.clip(1.0), optax.adam(0.1), optax.scale_by_schedule(lambda count: count * 0.1)),
        "masked": optax.masked(optax.adam(0.1), {"a": True, "b": False}),
        "multi_transform": optax.multi_transform({"t": optax.adam(0.1), "f": optax.set_to_zero()}, labels),
        "adafactor": optax.adafactor(0.1),
    }


@pytest.mark.parametrize("name", _optimizers())
def test_c024_optax_states(name: str, root: str):
    """Optimizer states with few or no arrays restore onto init's structure, and the next update is the same."""
    tx = _optimizers()[name]
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
    grads = {"a": jnp.full((3, 2), 0.3), "b": jnp.full(2, -0.2)}
    update = jax.jit(tx.update)
    state = update(grads, tx.init(params), params)[1]
    ck.save(f"{root}/1", state)
    for like in (tx.init(params), jax.eval_shape(tx.init, params)):
        restored = ck.restore(f"{root}/1", like=like)
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        assert same(restored, state)
        assert same(update(grads, restored, params), update(grads, state, params))


def test_c027_tied_leaves(root: str):
    """Both paths of a tied array are there and equal, and each can be donated on its own."""
    w = jnp.ones((4, 4))
    ck.save(f"{root}/1", {"emb": w, "head": w})
    restored = ck.restore(f"{root}/1", like={"emb": w, "head": w})
    assert (restored["emb"] == restored["head"]).all()
    out = jax.jit(lambda a, b: (a + 1, b + 2), donate_argnums=(0, 1))(restored["emb"], restored["head"])
    assert restored["emb"].is_deleted()
    assert restored["head"].is_deleted()
    assert same(list(out), [w + 1, w + 2])


def test_c028_rank_is_part_of_a_shape(root: str, mesh42: Mesh):
    """(), (1,), (1, 1) and (1, 3, 1) are four shapes: through save, restore, and onto a mesh."""
    tree = {"a": jnp.ones(()), "b": jnp.ones((1,)), "c": jnp.ones((1, 1)), "d": jnp.ones((1, 3, 1))}
    shapes = [(), (1,), (1, 1), (1, 3, 1)]
    ck.save(f"{root}/1", tree)
    for options in ({}, {"like": tree}, {"sharding": NamedSharding(mesh42, P())}):
        assert [leaf.shape for leaf in jax.tree.leaves(ck.restore(f"{root}/1", **options))] == shapes
    with pytest.raises(ck.Mismatch) as caught:
        ck.restore(f"{root}/1", like={"a": tree["b"], "b": tree["a"], "c": tree["b"], "d": jnp.ones((3, 1))})
    assert {fault.place for fault in caught.value.faults} == set("abcd")


# --- keys and the identity of structures ------------------------------------------------------------------------------


def test_c014_keys_with_slashes(root: str):
    """Keys are data: any string works and comes back unchanged."""
    tree = {"mlp/~/linear_0": {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}, "a/b/c": jnp.ones(1), "a": {"b": {"c": 2}}}
    ck.save(f"{root}/1", tree)
    assert same(ck.restore(f"{root}/1", like=tree), tree)
    assert same(ck.restore(f"{root}/1"), jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, tree))


def test_c016_int_keys(root: str):
    """Int keys stay ints, in the order of numbers, and are not the strings that look like them."""
    tree = {i: np.full(1, i, np.float32) for i in range(12)}
    ck.save(f"{root}/1", tree)
    restored = ck.restore(f"{root}/1")
    assert list(restored) == list(range(12))
    assert all(type(key) is int for key in restored)
    assert same(restored, tree)
    assert same(ck.restore(f"{root}/1", like=trees.zeros(tree)), tree)
    with pytest.raises(ck.Mismatch, match="int keys"):
        ck.restore(f"{root}/1", like={str(i): value for i, value in tree.items()})


@pytest.mark.parametrize("keys", [[True, False], [None], [(1, "a"), (1, "b")], [-1, 0, 2**80]], ids=repr)
def test_c016_other_keys_keep_their_type(keys: list[Any], root: str):
    """Bools, None and tuples are keys too, and come back as what they were."""
    tree = {"d": {key: np.full(1, number) for number, key in enumerate(keys)}}
    ck.save(f"{root}/1", tree)
    restored = ck.restore(f"{root}/1")
    assert same(restored, tree)
    assert {key: type(key) for key in restored["d"]} == {key: type(key) for key in keys}
    with pytest.raises(ck.Mismatch, match="d"):
        ck.restore(f"{root}/1", like={"d": {str(key): value for key, value in tree["d"].items()}})


def test_c018_odd_but_legal_keys(tmp_path: Path):
    """Any key works, none leaves the folder, and no file's name grows beyond 255 bytes."""
    (tmp_path / "beside").write_text("untouched")
    odd = [
        "a b",
        "ü日本",
        "100%",
        "~",
        "",
        "..",
        "/etc/x",
        "../../beside",
        "k" * 400,
        "é" * 200,
        ".hidden",
        "CON",
        "a\nb",
    ]
    tree = {key: np.full(1, number) for number, key in enumerate(odd)} | {"deep": {key: {key: 1} for key in odd}}
    ck.save(tmp_path / "run" / "1", tree)
    assert same(ck.restore(tmp_path / "run" / "1"), tree)
    assert same(ck.restore(tmp_path / "run" / "1", like=trees.zeros(tree)), tree)
    names = [name for _, folders, files in os.walk(tmp_path) for name in (*folders, *files)]
    assert max(len(os.fsencode(name)) for name in names) <= 255
    assert sorted(os.listdir(tmp_path)) == ["beside", "run"]
    assert sorted(os.listdir(tmp_path / "run")) == ["1", "LATEST"]
    assert (tmp_path / "beside").read_text() == "untouched"


# --- structures, shapes and dtypes that do not fit --------------------------------------------------------------------


def test_c029_a_checkpoint_of_twelve_layers_into_sixteen(root: str):
    """Strict by default: every missing layer is named, and nothing is read, filled with zeros or left abstract."""
    ck.save(f"{root}/1", {"layers": [np.ones(2, np.float32)] * 12, "mlp": np.ones((2, 8))})
    for like in (np.zeros(2, np.float32), jax.ShapeDtypeStruct((2,), "float32")):
        with pytest.raises(ck.Mismatch) as caught:
            ck.restore(f"{root}/1", like={"layers": [like] * 16, "mlp": np.ones((2, 16))})
        assert all(f"layers.{i}: in `like`, not in the checkpoint" in str(caught.value) for i in (12, 13, 14, 15))
        assert "mlp: checkpoint has float64[2,8], `like` wants float64[2,16]" in str(caught.value)
        assert len(caught.value.faults) == 5
    hollow = {"layers": [jax.ShapeDtypeStruct((2,), "float32")] * 16}
    with pytest.raises(ck.Mismatch, match=r"layers\.12"):
        ck.restore(f"{root}/1", like=hollow, on_missing="keep", on_extra="ignore", cast=True)


def test_c029_nothing_is_read_before_everything_fits(tmp_path: Path):
    """A mismatch is found without the arrays: it is reported even where they are gone."""
    ck.save(tmp_path / "1", {"layers": [np.ones(1000)] * 2})
    for at, _, files in os.walk(tmp_path / "1" / "state"):
        for name in files:
            os.unlink(os.path.join(at, name))
    with pytest.raises(ck.Mismatch, match=r"layers\.2"):
        ck.restore(tmp_path / "1", like={"layers": [np.ones(1000)] * 3})


def test_c031_a_part_of_a_checkpoint_of_either_generation(tmp_path: Path):
    """The parameters alone come back from old and new files, reading little more than their bytes."""
    params = {"w": np.random.default_rng(0).random((512, 1024))}
    opt = optax.EmptyState(), {"mu": np.ones((4, 512, 1024)), "nu": np.ones((4, 512, 1024))}
    ck.save(tmp_path / "1", {"params": params, "opt": opt})
    ck.save(tmp_path / "2", {"params": params, "opt": opt, "last_batch": np.ones((64, 1024))})
    for step in "12":
        before = psutil.Process().io_counters().read_chars
        restored = ck.restore(tmp_path / step, like={"params": trees.zeros(params)}, only="params")
        assert psutil.Process().io_counters().read_chars - before < 1.2 * params["w"].nbytes
        assert same(restored, {"params": params})
        with pytest.raises(ck.Mismatch, match="opt"):
            ck.restore(tmp_path / step, like={"params": params})
    whole = {"params": params, "opt": opt, "last_batch": np.zeros((64, 1024))}
    assert not ck.restore(tmp_path / "1", like=whole, on_missing="keep")["last_batch"].any()
    assert ck.restore(tmp_path / "2", like=whole, on_missing="keep")["last_batch"].all()
    wrong = {**whole, "opt": (optax.EmptyState(), {"mu": opt[1]["mu"], "nu": np.ones(3)})}
    with pytest.raises(ck.Mismatch, match=r"opt\.1\.nu"):
        ck.restore(tmp_path / "2", like=wrong, on_missing="keep")


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros(5, np.float32),
        lambda: np.zeros(2, np.float32),
        lambda: jax.ShapeDtypeStruct((5,), jnp.float32),
        lambda: jnp.zeros(2),
        lambda: np.float32(0),
        lambda: np.zeros((3, 1), np.float32),
    ],
    ids=["longer", "shorter", "abstract", "jax", "scalar", "rank"],
)
def test_c032_shapes_are_checked_whatever_the_kind(make: Callable[[], Any], root: str):
    """Every leaf's shape is checked before anything is read; none is padded, cut or broadcast."""
    ck.save(f"{root}/1", {"w": np.ones(3, np.float32)})
    with pytest.raises(ck.Mismatch, match=r"w: checkpoint has float32\[3\]"):
        ck.restore(f"{root}/1", like={"w": make()})


def test_c034_dtypes_never_narrow_silently(root: str):
    """Another dtype is an error, and a cast is something that has to be asked for, leaf by leaf if need be."""
    ck.save(f"{root}/1", {"n": np.int32(16777217), "w": np.array([1.001], np.float32)})
    with pytest.raises(ck.Mismatch) as caught:
        ck.restore(f"{root}/1", like={"n": np.float32(0), "w": jnp.zeros(1, jnp.bfloat16)})
    assert {fault.place for fault in caught.value.faults} == {"n", "w"}
    like = {"n": np.int32(0), "w": jnp.zeros(1, jnp.bfloat16)}
    restored = ck.restore(f"{root}/1", like=like, cast=True)
    assert same(restored["n"], np.int32(16777217))
    assert same(np.asarray(restored["w"]), np.array([1.001], np.float32).astype(ml_dtypes.bfloat16))
    only_w = ck.restore(f"{root}/1", like={"n": np.float32(0), "w": like["w"]}, only="w", cast=True)
    assert same(only_w["n"], np.float32(0))
    for saved, target in ((0.1, jnp.float32(0)), (2**40, jnp.int32(0)), (16777217, jnp.float32(0))):
        ck.save(f"{root}/2", {"x": saved}, overwrite=True)
        with pytest.raises(ck.Mismatch, match="x"):
            ck.restore(f"{root}/2", like={"x": target})


def test_c036_the_message_says_which_side_is_wrong(root: str):
    """One message with everything: paths, both shapes, which side lacks what; and the same as data."""
    ck.save(f"{root}/1", {"a": np.ones(2), "b": np.ones(3), "c": np.int32(1)})
    with pytest.raises(ck.Mismatch) as caught:
        ck.restore(f"{root}/1", like={"a": np.ones(2), "b": np.ones(4), "d": 0})
    faults = {fault.place: (fault.found, fault.expected) for fault in caught.value.faults}
    assert faults["b"] == ("float64[3]", "float64[4]")
    assert faults.keys() == {"b", "c", "d"}
    text = str(caught.value)
    assert "b: checkpoint has float64[3], `like` wants float64[4]" in text
    assert "c: int32[] in the checkpoint, not in `like`" in text
    assert "d: in `like`, not in the checkpoint" in text
    assert "in 3 places" in text
