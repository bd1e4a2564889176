"""Orbax's checkpoints are opened, restored and gone on from in place, whatever their layout."""

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_jax as ck
from ckpt_jax import _formats, _storage

from .trees import same

ocp = pytest.importorskip("orbax.checkpoint", reason="the floors of the core are without Orbax")
from orbax.checkpoint import v1  # noqa: E402

GOLDEN = Path(ocp.__file__).parent / "experimental/v1/_src/testing/compatibility/checkpoints"
FOUND = sorted(str(path.relative_to(GOLDEN)) for path in GOLDEN.glob("*/*/*/*") if path.is_dir())
# Those that Orbax's own tests have broken on purpose: no description of the tree, no key space, no item.
BROKEN = ("checkpointable_missing_metadata", "missing_pytree_data_dir_d", "missing_pytree_data_file_manifest")
BROKEN = (*BROKEN, "deleted_checkpointable")
ITEMS = [path for path in FOUND if not any(end in path for end in BROKEN)]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """What a format lacks is said once a process; here it has been said, and Orbax says much."""
    monkeypatch.setattr(_formats, "_told", {"Orbax"})
    logging.getLogger("absl").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def view(path: Path | str):
    return _formats.view(path)


def test_the_installed_orbax_ships_the_checkpoints_that_are_tried():
    assert len(FOUND) == 44
    assert len(ITEMS) == 31


@pytest.mark.parametrize("path", ITEMS)
def test_every_golden_checkpoint_that_is_whole_is_read_as_orbax_reads_it(path):
    place = GOLDEN / path
    item = place / "state" if "composite" in path else place
    expected = ocp.StandardCheckpointer().restore(item)
    for each in {item, place} if "dummy" not in path else {item}:
        found = ck.restore(each)
        assert same(found, jax.tree.map(np.asarray, expected))
        assert dict(ck.open(each).items()).keys() == {"a", "b.c"}
    mesh = jax.make_mesh((8,), ("x",))
    like = {"a": jax.ShapeDtypeStruct((8,), expected["a"].dtype, sharding=NamedSharding(mesh, PartitionSpec("x")))}
    like |= {"b": {"c": jax.ShapeDtypeStruct((3,), expected["b"]["c"].dtype)}}
    onto = ck.restore(item, like)
    assert onto["a"].sharding == like["a"].sharding
    assert same(jax.tree.map(np.asarray, onto), jax.tree.map(np.asarray, expected))


@pytest.mark.parametrize("path", [path for path in FOUND if path not in ITEMS])
def test_every_golden_checkpoint_that_is_broken_is_refused(path):
    with pytest.raises(ck.CheckpointError) as caught:
        ck.restore(GOLDEN / path)
    assert caught.value.faults
    assert str(GOLDEN / path) in str(caught.value)


def test_where_one_item_is_damaged_it_is_told_which_others_there_are():
    (path,) = [path for path in FOUND if "dummy" in path]
    with pytest.raises(ck.Corrupt, match="dummy is damaged") as caught:
        ck.open(GOLDEN / path)
    assert caught.value.hint == f"perhaps {GOLDEN / path / 'state'} can be read alone"
    assert set(ck.open(GOLDEN / path / "state")) == {"a", "b.c"}


TREE: dict[str, Any] = {
    "params": {"w": np.arange(24, dtype=np.float32).reshape(4, 6), "b": np.zeros(2, np.int32)},
    "layers": [{"k": np.full(3, 1.5)}, {"k": np.full(3, 2.5)}],
    "step": 7,
    "lr": 0.1,
    "name": "run7",
    "nothing": None,
    "empty": {},
    "none": [],
    "0-d": np.asarray(5, np.int64),
}


def tree() -> dict[str, Any]:
    across = NamedSharding(jax.make_mesh((4, 2), ("x", "y")), PartitionSpec("x", "y"))
    sharded = jax.device_put(jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8), across)
    keys = jax.random.split(jax.random.key(6, impl="rbg"), 3)
    return TREE | {"sharded": sharded, "key": jax.random.key(5), "keys": keys}


def save_pytree(path: Path, tree: Any, **more: bool) -> None:
    handler = ocp.PyTreeCheckpointHandler(**more)
    with ocp.Checkpointer(handler) as writer:
        writer.save(path, tree)


def save_v1(path: Path, tree: Any, **options: Any) -> None:
    with v1.Context(array_options=v1.options.ArrayOptions(saving=v1.options.ArrayOptions.Saving(**options))):
        v1.save(path, tree)


WRITERS = {
    "v0, OCDBT, zarr2": lambda path, tree: save_pytree(path, tree, use_ocdbt=True, use_zarr3=False),
    "v0, OCDBT, zarr3": lambda path, tree: save_pytree(path, tree, use_ocdbt=True, use_zarr3=True),
    "v0, folders, zarr2": lambda path, tree: save_pytree(path, tree, use_ocdbt=False, use_zarr3=False),
    "v0, folders, zarr3": lambda path, tree: save_pytree(path, tree, use_ocdbt=False, use_zarr3=True),
    "v1": v1.save,
    "v1, folders": lambda path, tree: save_v1(path, tree, use_ocdbt=False),
    "v1, no compression": lambda path, tree: save_v1(path, tree, use_compression=False),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_everything_comes_back_from_every_layout(tmp_path, writer):
    saved = tree()
    WRITERS[writer](tmp_path / "100", saved)
    found = ck.restore(tmp_path / "100", saved)
    assert same(found, saved)
    assert found["sharded"].sharding == saved["sharded"].sharding
    other = NamedSharding(jax.make_mesh((2,), ("z",)), PartitionSpec(None, "z"))
    assert same(ck.restore(tmp_path / "100", saved, sharding=lambda n, s, d: other if n == "sharded" else None), saved)
    assert ck.open(tmp_path / "100").step == 100
    assert ck.open(tmp_path / "100")["params.w"][1:3, 2].tolist() == [8.0, 14.0]
    assert same(ck.restore(tmp_path / "100")["layers"], TREE["layers"])


def test_every_dtype_that_orbax_writes_comes_back(tmp_path):
    names = ["bool", "int4", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32"]
    names += ["float8_e4m3fn", "float8_e5m2", "complex64"]
    saved = {name: np.arange(6).reshape(2, 3).astype(jnp.dtype(name)) for name in names}
    saved |= {name: np.arange(6).reshape(2, 3).astype(name) for name in ("int64", "uint64", "float64", "complex128")}
    v1.save(tmp_path / "1", saved)
    assert same(ck.restore(tmp_path / "1", saved), saved)


def test_a_root_of_steps_gives_its_newest(tmp_path):
    options = ocp.CheckpointManagerOptions(step_prefix="run", best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in (9, 100):
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(4, step)}), metrics={"loss": 0.5})
        manager.wait_until_finished()
    opened = ck.open(tmp_path)
    assert (opened.path, opened.step) == (str(tmp_path / "run_100"), 100)
    assert opened["w"][0] == 100
    assert ck.open(tmp_path / "run_9").step == 9
    assert ck.open(tmp_path / "run_9").manifest.metrics == {"loss": 0.5}


def test_items_stand_each_under_its_name(tmp_path):
    args = ocp.args.Composite(params=ocp.args.StandardSave({"w": np.ones(3)}), opt=ocp.args.StandardSave([np.zeros(2)]))
    extra = ocp.args.Composite(**dict(args.items()), notes=ocp.args.JsonSave({"seed": 7}))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=extra)
    opened = ck.open(tmp_path / "3")
    assert list(opened) == ["opt.0", "params.w"] or list(opened) == ["params.w", "opt.0"]
    assert opened.metadata["notes"] == {"seed": 7}
    assert same(ck.restore(tmp_path / "3", {"params": {"w": np.zeros(3)}, "opt": (np.ones(2),)})["opt"], (np.zeros(2),))
    assert list(ck.open(tmp_path / "3" / "params")) == ["w"]


def test_names_that_orbax_wrote_over_each_other_are_told(tmp_path):
    """It keeps one array of the two."""
    save_pytree(tmp_path / "1", {"a.b": np.zeros(2), "a": {"b": np.ones(2)}})
    with pytest.raises(ck.Corrupt, match="Orbax wrote one over the other"):
        ck.open(tmp_path / "1")


def test_what_is_lacking_is_said_once(tmp_path, monkeypatch):
    v1.save(tmp_path / "1", {"w": np.ones(3)})
    monkeypatch.setattr(_formats, "_told", set())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ck.open(tmp_path / "1")
        ck.restore(tmp_path / "1")
    assert [str(each.message) for each in said if "digests" in str(each.message)] == [
        f"{tmp_path}/1 is in the format of Orbax, which has no digests: damage may go unnoticed. "
        "`ckpt-jax import` makes a checkpoint of it that notices. (This is said once.)"
    ]


def test_a_checkpoint_of_ours_that_lost_its_manifest_is_not_read_as_orbax(tmp_path):
    """Rule F-3: without a manifest it does not exist."""
    ck.save(tmp_path / "1", {"w": np.ones(3)})
    (tmp_path / "1" / "MANIFEST.json").unlink()
    for place in (tmp_path / "1", tmp_path / "1" / "state", tmp_path):
        with pytest.raises(ck.NotFound):
            ck.open(place)


def test_a_part_of_a_checkpoint_of_ours_is_not_read_as_orbax(tmp_path):
    ck.save(tmp_path / "1", {"w": np.ones(3)})
    with pytest.raises(ck.NotFound):
        ck.restore(tmp_path / "1" / "state")


def test_what_orbax_did_not_finish_is_not_there(tmp_path):
    v1.save(tmp_path / "1", {"w": np.ones(3)})
    (tmp_path / "1").rename(tmp_path / "1.orbax-checkpoint-tmp")
    with pytest.raises(ck.NotFound, match="was not finished"):
        ck.open(tmp_path / "1.orbax-checkpoint-tmp")
    with pytest.raises(ck.NotFound):
        ck.open(tmp_path)


def _hostile(place: Path, what: str) -> None:
    metadata = place / "_METADATA"
    told = json.loads(metadata.read_text())
    if what == "no JSON":
        metadata.write_text("{")
    elif what == "a name that leads out":
        told["tree_metadata"]["('w',)"]["key_metadata"] = [{"key": "../../w", "key_type": 2}]
    elif what == "no array of that name":
        told["tree_metadata"]["('v',)"] = told["tree_metadata"]["('w',)"] | {
            "key_metadata": [{"key": "v", "key_type": 2}]
        }
    elif what == "a kind that nobody knows":
        told["tree_metadata"]["('w',)"]["value_metadata"]["value_type"] = "os.system"
    elif what == "a pipe":
        os.mkfifo(place / "d" / "pipe")
    elif what == "a leaf and a container":
        told["tree_metadata"]["('w', 'x')"] = {
            "key_metadata": [{"key": "w", "key_type": 2}, {"key": "x", "key_type": 2}],
            "value_metadata": {"value_type": "None"},
        }
    elif what == "records of other types":
        told["tree_metadata"]["('w',)"] = {"key_metadata": [7], "value_metadata": {}}
    if what != "no JSON":
        metadata.write_text(json.dumps(told))


@pytest.mark.parametrize(
    "what",
    [
        "no JSON",
        "a name that leads out",
        "no array of that name",
        "a kind that nobody knows",
        "a pipe",
        "a leaf and a container",
        "records of other types",
    ],
)
def test_what_a_stranger_changed_is_refused(tmp_path, what):
    save_pytree(tmp_path / "1", {"w": np.ones(3)})
    _hostile(tmp_path / "1", what)
    with pytest.raises(ck.CheckpointError) as caught:
        ck.restore(tmp_path / "1")
    assert caught.value.faults


def test_flipped_bits_of_a_description_raise_nothing_else(tmp_path):
    save_pytree(tmp_path / "1", {"w": np.ones(3), "s": "x", "n": 3, "k": jax.random.key(1)})
    rng = np.random.default_rng(7)
    for name in ("_METADATA", "_sharding", "_strings.json", "manifest.ocdbt", "array_metadatas/process_0"):
        whole = (tmp_path / "1" / name).read_bytes()
        for _ in range(30):
            data = bytearray(whole)
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
            (tmp_path / "1" / name).write_bytes(data[: rng.integers(1, len(data) + 1)] if rng.integers(2) else data)
            with contextlib.suppress(ck.CheckpointError, OSError):
                ck.restore(tmp_path / "1")
        (tmp_path / "1" / name).write_bytes(whole)


# --- a run that changes hands -----------------------------------------------------------------------------------------


def run_of_nnx():
    """A flax nnx model and its optimizer, a training step, and what is saved of them."""
    import optax
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(4, 8, rngs=rngs)
            self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.first(x)
            for block in self.blocks:
                x = nnx.relu(block(x))
            return self.dropout(x)

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, gradient = nnx.value_and_grad(lambda model: ((model(x) - 1) ** 2).mean())(model)
        optimizer.update(model, gradient)
        return loss

    def step(number: int) -> float:
        return float(train(model, optimizer, jnp.full((3, 4), number / 10)))

    return (model, optimizer), step


def test_a_run_of_orbax_goes_on_in_a_saver_and_back_again(tmp_path):
    """The losses are those of a run that nobody moved, to the last bit."""
    from flax import nnx

    _, step = run_of_nnx()
    undisturbed = [step(number) for number in range(12)]

    both, step = run_of_nnx()
    losses = [step(number) for number in range(4)]
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(4, args=ocp.args.StandardSave(nnx.state(both)))

    both, step = run_of_nnx()
    with ck.Saver(tmp_path, every=ck.Every(steps=1)) as saver:
        state, start = saver.resume(nnx.state(both))
        assert start == 4
        nnx.update(both, state)
        for number in range(start, 8):
            losses.append(step(number))
            saver.step(number + 1, nnx.state(both))
            saver.wait()
    assert ck.steps(tmp_path)[-1] == 8

    both, step = run_of_nnx()
    with ocp.CheckpointManager(tmp_path, item_names=("state",)) as manager:
        assert manager.latest_step() == 8
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state(both))
        found = manager.restore(8, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))
        nnx.update(both, found["state"])
        losses += [step(number) for number in range(8, 12)]
    assert losses == undisturbed


def test_a_saver_does_not_prune_what_orbax_wrote(tmp_path):
    v1.save(tmp_path / "1", {"w": np.full(3, 1.0)})
    with ck.Saver(tmp_path, keep=ck.Keep(last=1)) as saver:
        state, step = saver.resume({"w": np.zeros(3)})
        assert (state["w"][0], step) == (1.0, 1)
        for later in (2, 3):
            saver.save(later, state)
            saver.wait()
    assert ck.steps(tmp_path) == [3]
    assert ck.open(tmp_path / "1")["w"][0] == 1.0


def test_a_damaged_step_of_orbax_is_passed_over(tmp_path):
    ck.save(tmp_path / "1", {"w": np.full(3, 1.0)})
    v1.save(tmp_path / "2", {"w": np.full(3, 2.0)})
    shutil.rmtree(tmp_path / "2" / "state" / "d")
    with ck.Saver(tmp_path) as saver, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert saver.resume({"w": np.zeros(3)})[1] == 1


def test_orbaxs_checkpoints_can_be_compared(tmp_path):
    v1.save(tmp_path / "1", {"w": np.arange(3.0), "n": 1})
    ck.save(tmp_path / "2", {"w": np.array([0.0, 1.0, 3.0]), "n": 1})
    assert [str(change) for change in ck.diff(tmp_path / "1", tmp_path / "2").changes] == [
        "w: values differ: 1 of 3 elements, by at most 1"
    ]
    ck.save(tmp_path / "3", {"w": np.arange(3.0), "n": 1})
    assert ck.diff(tmp_path / "1", tmp_path / "3").equal


def test_what_has_no_digests_cannot_be_verified(tmp_path):
    v1.save(tmp_path / "1", {"w": np.arange(3.0)})
    with pytest.raises(ck.CheckpointError, match="no digests"):
        ck.verify(tmp_path / "1")


def test_a_folder_is_told_by_what_lies_in_it(tmp_path):
    v1.save(tmp_path / "orbax", {"w": np.arange(3.0)})
    ck.save(tmp_path / "ours", {"w": np.arange(3.0)})
    assert _formats.recognised(_storage.folder(tmp_path / "orbax")) == "orbax"
    assert _formats.recognised(_storage.folder(tmp_path / "ours")) == "ckpt_jax"


def test_orbax_is_not_needed_to_read_it(tmp_path):
    """TensorStore and JSON are; and JAX only where something is restored."""
    save_pytree(tmp_path / "1", {"w": np.arange(3.0), "s": "x", "n": 3, "k": jax.random.key(1)})
    code = f"""
import sys
sys.modules["orbax"] = None
import ckpt_jax as ck
checkpoint = ck.open({str(tmp_path / "1")!r})
print(checkpoint["w"][1:], checkpoint["s"][()], checkpoint["n"][()], checkpoint["k"].impl, "jax" in sys.modules)
print(ck.restore({str(tmp_path / "1")!r})["w"])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[1. 2.] x 3 threefry2x32 False", "[0. 1. 2.]"]


def test_orbaxs_checkpoints_in_buckets_are_read_where_they_were_finished(tmp_path):
    v1.save(tmp_path / "3", {"w": np.arange(4.0), "n": 2, "s": "x"})
    place = _storage.folder("memory://from_orbax/bucket/3")
    for path in (tmp_path / "3").rglob("*"):
        if path.is_file():
            place.write(str(path.relative_to(tmp_path / "3")), path.read_bytes())
    for path in (place.url, place.parent.url):
        assert same(ck.restore(path), {"n": 2, "s": "x", "w": np.arange(4.0)})
    place.unlink("commit_success.txt")
    with pytest.raises(ck.NotFound, match="was not finished"):
        ck.open(place.url)
