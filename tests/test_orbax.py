"""Orbax reads what we wrote, by each of its doors (F-40 to F-43)."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import ckpt_jax as ck

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax warns of its own deprecations.


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("x", "y"))


@pytest.fixture(scope="module")
def state(mesh):
    params = {
        "w": jax.device_put(jnp.arange(64.0, dtype=jnp.bfloat16).reshape(8, 8), NamedSharding(mesh, P("x", "y"))),
        "b": jnp.arange(3.0),
    }
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "step": 7,
        "lr": 0.5,
        "flag": True,
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1), 4),
        "host": np.arange(4),
        "list": [jnp.ones(2), jnp.zeros(2)],
        "empty": {},
        "none": None,
        "nothing": jnp.zeros((0, 2)),
        "float8": jnp.ones(3, jnp.float8_e5m2),
    }


@pytest.fixture(scope="module")
def root(state, tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    ck.save(root / "7", state)
    return root


@pytest.fixture(scope="module")
def target(state):
    def abstract(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x

    return jax.tree.map(abstract, state)


def manager(root):
    return ocp.CheckpointManager(root)


def composite(**arguments):
    return ocp.args.Composite(state=ocp.args.StandardRestore(**arguments))


def restore_arguments(target):
    return ocp.checkpoint_utils.construct_restore_args(target)


WITH_TARGET = {
    "v1.load": lambda root, target: v1.load(root / "7", target),
    "StandardCheckpointer": lambda root, target: ocp.StandardCheckpointer().restore(root / "7/state", target),
    "PyTreeCheckpointer": lambda root, target: ocp.PyTreeCheckpointer().restore(
        root / "7/state", item=target, restore_args=restore_arguments(target)
    ),
    "CheckpointManager": lambda root, target: manager(root).restore(7, args=composite(item=target)).state,
}
WITHOUT_TARGET = {
    "v1.load": lambda root: v1.load(root / "7"),
    "StandardCheckpointer": lambda root: ocp.StandardCheckpointer().restore(root / "7/state"),
    "PyTreeCheckpointer": lambda root: ocp.PyTreeCheckpointer().restore(root / "7/state"),
    "CheckpointManager": lambda root: manager(root).restore(7).state,
    "CheckpointManager with arguments": lambda root: manager(root).restore(7, args=composite()).state,
}


def raw(x):
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return str(x.dtype), np.asarray(jax.random.key_data(x)).tobytes()
    return np.asarray(x).dtype.name, np.asarray(x).tobytes()


@pytest.mark.parametrize("door", WITH_TARGET)
def test_orbax_restores_into_a_target(door, root, target, state):
    """F-40: every leaf, bit for bit, on the target's sharding."""
    found = WITH_TARGET[door](root, target)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert found["params"]["w"].sharding == state["params"]["w"].sharding
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        if isinstance(ours, int | float):
            assert theirs == ours
            continue
        assert raw(theirs) == raw(ours)


@pytest.mark.parametrize("door", WITHOUT_TARGET)
def test_orbax_restores_without_a_target(door, root, state):
    """F-41: arrays come without the devices that saved them, numbers and keys as what they were."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = WITHOUT_TARGET[door](root)
    assert found["step"] == 7
    assert type(found["step"]) is int
    assert (found["lr"], found["flag"], found["none"], found["empty"]) == (0.5, True, None, {})
    for name in ("key", "keys", "host", "nothing", "float8"):
        assert raw(found[name]) == raw(state[name])
    assert raw(found["params"]["w"]) == raw(state["params"]["w"])
    assert raw(found["list"][0]) == raw(state["list"][0])


def test_orbax_sees_our_steps(root, state):
    ck.save(root / "12", {"w": state["host"]})
    assert list(manager(root).all_steps()) == [7, 12]
    assert manager(root).latest_step() == 12


def test_orbax_reads_strings(tmp_path):
    """F-41."""
    ck.save(tmp_path / "1", {"name": "naïve ✓", "w": np.ones(2)})
    assert v1.load(tmp_path / "1")["name"] == "naïve ✓"


def test_orbax_sees_escaped_keys(tmp_path):
    """F-42: no leaf is lost, whatever its key."""
    ck.save(tmp_path / "1", {"a.b": np.ones(1), "a": {"b": np.zeros(2)}})
    found = v1.load(tmp_path / "1")
    assert found["a%2Eb"].shape == (1,)
    assert found["a"]["b"].shape == (2,)


def test_orbax_restores_the_rest_where_it_cannot_hold_a_leaf(tmp_path):
    """F-43: such leaves are in our manifest only; Orbax reads all others."""
    tree = {"big": 2**70, "blob": b"x", "nan": float("nan"), "rng": np.random.default_rng(0), "w": np.arange(3)}
    ck.save(tmp_path / "1", tree)
    found = v1.load(tmp_path / "1")
    assert list(found) == ["w"]
    np.testing.assert_array_equal(found["w"], tree["w"])


def test_orbax_itself_notices_a_flipped_bit(tmp_path):
    """F-7: the crc32c codec works for Orbax too, whose own checkpoints have none."""
    ck.save(tmp_path / "1", {"w": np.arange(5000.0)})
    data = max((tmp_path / "1/state/ocdbt.process_0/d").iterdir(), key=lambda p: p.stat().st_size)
    bytes_ = bytearray(data.read_bytes())
    bytes_[len(bytes_) // 3] ^= 1
    data.write_bytes(bytes_)
    with pytest.raises(Exception, match=r"(?i)digest|mismatch|corrupt|crc"):
        v1.load(tmp_path / "1")


def test_an_overwritten_checkpoint_is_still_orbaxs(tmp_path):
    ck.save(tmp_path / "1", {"w": np.zeros(3)})
    ck.save(tmp_path / "1", {"w": np.ones(4)}, overwrite=True)
    np.testing.assert_array_equal(v1.load(tmp_path / "1")["w"], np.ones(4))
