"""The table of docs/interop.md: what survives in which format, each cell by a file of that format."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

import ckpt_jax as ck
from ckpt_jax import _export, _formats, _import

from .trees import same

GUIDE = (Path(__file__).parent.parent / "docs" / "interop.md").read_text()


def table() -> dict[str, dict[str, str]]:
    rows = [line.strip("| ").split("|") for line in GUIDE.splitlines() if line.startswith("|") and "---" not in line]
    head, *body = [[cell.strip() for cell in row] for row in rows]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in body}


class Pair(NamedTuple):
    """A named tuple in a tree."""

    mu: Any
    nu: Any


STRUCTURE = {"a": (np.ones(1), [np.ones(2), None]), "pair": Pair(np.zeros(1), {}), "7": {3: np.ones(1)}}
SCALARS = {"n": 5, "x": 0.5, "yes": True, "name": "run7"}
DTYPES = {
    **{name: name for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
    **{name: name for name in ("float16", "float32", "float64", "complex64", "complex128")},
    **{name: getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4")},
    "float8_e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
}
LACKING = {
    "safetensors": {"complex128", "int4", "float8_e4m3b11fnuz"},
    "npz": {"bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "float8_e4m3b11fnuz"},
    "orbax": set(),
}


def there_and_back(tmp_path: Path, to: str, tree: Any, **more: Any) -> Path:
    """A tree saved, exported and imported again."""
    ck.save(tmp_path / "a" / "5", tree, **more)
    out = tmp_path / ("out" if to == "orbax" else f"out.{to}")
    *_, _ = _export.progress(_formats.view(tmp_path / "a" / "5"), out, to)
    *_, _ = _import.progress(_formats.view(out), tmp_path / "b" / "5")
    return tmp_path / "b" / "5"


@pytest.mark.parametrize("to", ["safetensors", "npz", "orbax"])
def test_structure_comes_back_into_like(tmp_path, to):
    back = there_and_back(tmp_path, to, STRUCTURE)
    assert same(ck.restore(back, STRUCTURE), STRUCTURE)
    if to != "orbax":  # Ours says what each container was.
        assert isinstance(ck.restore(back)["a"], tuple)


@pytest.mark.parametrize("to", ["safetensors", "npz", "orbax"])
def test_scalars_and_keys_come_back(tmp_path, to):
    saved = SCALARS | {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2)}
    assert same(ck.restore(there_and_back(tmp_path, to, saved)), saved)


@pytest.mark.parametrize("to", ["safetensors", "npz", "orbax"])
def test_live_states_come_back_or_are_refused(tmp_path, to):
    saved = {"w": np.ones(2), "rng": np.random.default_rng(3)}
    if to == "orbax":
        with pytest.raises(ck.Unsupported, match="rng"):
            there_and_back(tmp_path, to, saved)
        return
    found = ck.restore(there_and_back(tmp_path, to, saved), {"w": np.ones(2), "rng": np.random.default_rng(4)})
    assert found["rng"].integers(10**9) == np.random.default_rng(3).integers(10**9)


@pytest.mark.parametrize("to", ["safetensors", "npz", "orbax"])
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_or_is_refused_by_name(tmp_path, to, name):
    saved = {name: np.arange(6).reshape(2, 3).astype(DTYPES[name])}
    if name in LACKING[to]:
        with pytest.raises(ck.Unsupported, match=name):
            there_and_back(tmp_path, to, saved)
    else:
        assert same(ck.restore(there_and_back(tmp_path, to, saved)), saved)


@pytest.mark.parametrize("to", ["safetensors", "npz", "orbax"])
def test_metadata_and_step_come_back(tmp_path, to):
    back = ck.open(there_and_back(tmp_path, to, {"w": np.ones(2)}, metadata={"seed": 7, "name": "a"}))
    assert (back.step, back.metadata) == (5, {"seed": 7, "name": "a"})


@pytest.mark.parametrize("to", ["safetensors", "npz", "orbax"])
def test_what_comes_back_has_digests_and_no_sharding(tmp_path, to):
    mesh = jax.make_mesh((4,), ("x",))
    across = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    back = there_and_back(tmp_path, to, {"w": jax.device_put(np.arange(8.0, dtype=np.float32), across)})
    assert ck.open(tmp_path / "a" / "5")["w"].sharding is not None
    assert ck.open(back)["w"].sharding is None
    assert ck.verify(back).ok


def test_a_copy_is_the_same(tmp_path):
    saved = STRUCTURE | SCALARS | {"key": jax.random.key(3), "rng": np.random.default_rng(3)}
    ck.save(tmp_path / "a" / "5", saved, metadata={"seed": 7})
    command = [sys.executable, "-m", "ckpt_jax.cli", "copy", str(tmp_path / "a"), str(tmp_path / "b")]
    subprocess.run(command, check=True, capture_output=True)
    assert ck.open(tmp_path / "b" / "5").manifest.seal == ck.open(tmp_path / "a" / "5").manifest.seal


def test_flax_msgpack_comes_in(tmp_path):
    flax = pytest.importorskip("flax.serialization")
    saved = {"params": {"w": np.arange(6.0).reshape(2, 3)}, "opt": (np.ones(2), {"n": 3})}
    (tmp_path / "a.msgpack").write_bytes(flax.to_bytes(saved))
    *_, done = _import.progress(_formats.view(tmp_path / "a.msgpack"), tmp_path / "b")
    assert same(ck.restore(tmp_path / "b", saved), saved)
    assert done.kind


def test_jaxs_own_format_comes_in(tmp_path):
    own = pytest.importorskip("jax.experimental.array_serialization.pytree_serialization")
    saved = {"params": [jax.numpy.arange(6.0), (jax.numpy.ones(2), None)]}
    own.save(saved, tmp_path / "a")
    *_, _ = _import.progress(_formats.view(tmp_path / "a"), tmp_path / "b")
    assert same(ck.restore(tmp_path / "b", saved), saved)


TORCH = Path(__file__).parent / "golden" / "torch"
# What is expected of the others lies beside them; their readers' own tests compare it.
SAVED = sorted(path.name for path in TORCH.iterdir() if path.suffix not in (".npz", ".json"))


@pytest.mark.parametrize("name", SAVED)
def test_torchs_files_come_in_without_torch(tmp_path, name):
    path = TORCH / name
    assert "torch" not in sys.modules
    if name in ("legacy.pt", "odd.pt", "script.pt"):  # Of before torch 1.6, of other things than tensors, a program.
        with pytest.raises(ck.Unsupported):
            _formats.view(path)
        return
    view = _formats.view(path)
    *_, _ = _import.progress(view, tmp_path / "b")
    assert ck.verify(tmp_path / "b").ok
    assert list(ck.open(tmp_path / "b")) == list(view.leaves)
    assert "torch" not in sys.modules


def test_files_of_others_have_names_only(tmp_path):
    np.savez(tmp_path / "a.npz", **{"layers.0.w": np.ones(2), "layers.1.w": np.zeros(2)})
    like = {"layers": [{"w": np.zeros(2)}, {"w": np.ones(2)}]}
    *_, _ = _import.progress(_formats.view(tmp_path / "a.npz"), tmp_path / "b")
    assert same(ck.restore(tmp_path / "b", like)["layers"][0]["w"], np.ones(2))
    assert "kinds of containers" in " ".join(_formats.view(tmp_path / "a.npz").lacks)


def test_the_guide_has_a_row_for_each_reader_and_writer():
    rows = table()
    assert len(rows) == len(_formats.READERS) + 1
    assert {name for name, row in rows.items() if row["out"] == "yes"} == {
        "ckpt_jax (`copy`)", "Orbax", "safetensors", ".npz, .npy",
    }  # fmt: skip
    assert set(_export.WRITERS) == {"safetensors", "npz", "orbax"}


def test_the_rules_of_the_guide_are_rules(tmp_path):
    (tmp_path / "rules.toml").write_text(GUIDE.partition("```toml\n")[2].partition("```")[0])
    from ckpt_jax import _rules

    rules = _rules.load(str(tmp_path / "rules.toml"))
    assert [rule.text.split(".")[0] for rule in rules] == ["encoder", "h\\", "blocks", "pooler"]
    assert json.dumps([rule.stack for rule in rules]) == "[null, null, 0, null]"
