"""The format: a reader that uses TensorStore and JSON alone, and files of every released version."""

import hashlib
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  Registers bfloat16 and the like with NumPy.
import numpy as np
import pytest
import tensorstore as ts
import xxhash
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt_jax as ck
from tests import golden
from tests.trees import same

GOLDEN = Path(__file__).parent / "golden"


def read_as_a_stranger(folder: Path) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint, by docs/format.md, with nothing of ckpt_jax."""
    data = (folder / "MANIFEST.json").read_bytes()
    body, _, tail = data.rpartition(b',"seal":"')  # F-21
    assert hashlib.sha256(body).hexdigest() == tail.decode().removesuffix('"}\n')
    manifest = json.loads(data)
    assert manifest["format"] == "ckpt_jax"  # F-20
    assert manifest["version"][0] == 1
    for path, (size, *_) in manifest["files"].items():  # F-2, F-24
        assert (folder / path).stat().st_size == size
    arrays = {}
    for name, leaf in manifest.get("leaves", {}).items():
        if leaf["kind"] not in ("array", "key"):
            continue
        base = f"file://{folder}/{manifest.get('state', 'state')}/"
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"},  # F-5
            "fill_missing_data_reads": False,  # F-10
        }
        array = ts.open(spec, open=True).result().read().result()
        arrays[name] = array if array.dtype.name == leaf["dtype"] else array.view(leaf["dtype"])  # F-8
        assert digests(arrays[name], leaf.get("chunk", [])) == leaf.get("digests", "")  # F-27
    return arrays


def digests(array: np.ndarray, chunk: list[int]) -> str:
    """F-27, with edges filled up as F-6 says."""
    found = ""
    for at in np.ndindex(*(-(-n // c) for n, c in zip(array.shape, chunk, strict=True))):
        cell = array[tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, chunk, strict=True))]
        whole = np.zeros(chunk, array.dtype)
        whole[tuple(map(slice, cell.shape))] = cell
        found += xxhash.xxh3_128_hexdigest(whole.tobytes())
    return found


def test_a_stranger_reads_what_we_wrote(tmp_path, mesh42):
    """F-5 to F-10, F-20 to F-28: TensorStore and JSON are enough."""
    w = np.arange(64, dtype=np.float32).reshape(8, 8)
    tree = {
        "w": jax.device_put(w, NamedSharding(mesh42, P("data", "model"))),
        "half": jnp.linspace(0, 1, 7, dtype=jnp.bfloat16),
        "u4": jnp.arange(5, dtype=jnp.uint4),
        "zero": np.float64(-0.0),
        "nothing": np.zeros((0, 3), np.int16),
        "key": jax.random.split(jax.random.key(3), 4),
    }
    ck.save(tmp_path / "1", tree)
    arrays = read_as_a_stranger(tmp_path / "1")
    np.testing.assert_array_equal(arrays["w"], w)
    np.testing.assert_array_equal(arrays["key"], jax.random.key_data(tree["key"]))
    for name in ("half", "u4", "zero", "nothing"):
        assert arrays[name].tobytes() == np.asarray(tree[name]).tobytes()
        assert arrays[name].dtype == tree[name].dtype


def test_a_stranger_notices_a_flipped_bit(tmp_path):
    """F-7: zarr's crc32c codec guards each chunk without anything of ours."""
    ck.save(tmp_path / "1", {"w": np.arange(5000.0)})
    data = max((tmp_path / "1/state/ocdbt.process_0/d").iterdir(), key=lambda p: p.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 3] ^= 1
    data.write_bytes(raw)
    with pytest.raises(ValueError, match="Digest mismatch"):
        read_as_a_stranger(tmp_path / "1")


def test_chunks_of_zeros_are_written(tmp_path):
    """F-10: a missing chunk is damage, so even zeros are there."""
    ck.save(tmp_path / "1", {"z": np.zeros(100)})
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/1/state/"}).result()
    assert store.read("z/c/0").result().state == "value"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ({"a.b": 1}, "a%2Eb"),
        ({"a": {"b": 1}}, "a.b"),
        ({"": 1}, "%"),
        ({"mlp/~/w": 1}, "mlp%2F~%2Fw"),
        ({"100%": 1}, "100%25"),
        ({"a\nb": 1}, "a%0Ab"),
        ({3: [1]}, "3.0"),
        ({("a", 1): 1}, '["a",1]'),
        (7, "<root>"),
    ],
)
def test_names_are_escaped(memory, path, name):
    """F-11 to F-13."""
    assert list(ck.save(memory, path).leaves) == [name]


def test_a_manifest_begins_and_ends_as_it_must(tmp_path):
    """F-20, F-21."""
    manifest = ck.save(tmp_path / "5", {"a": 1})
    text = (tmp_path / "5/MANIFEST.json").read_text()
    assert text.startswith('{"format":"ckpt_jax","version":[1,0],"step":5,')
    assert text.endswith(f',"seal":"{manifest.seal}"}}\n')
    assert text.count("\n") == 1


def test_the_rules_are_numbered_and_cited():
    """Every rule stands once in docs/format.md, and every citation names one that is there."""
    here = Path(__file__).parent
    rules = re.findall(r"\*\*(F-\d+)\*\*", (here.parent / "docs/format.md").read_text())
    assert len(rules) == len(set(rules))
    cited = {rule for test in here.glob("*.py") for rule in re.findall(r"\bF-\d+\b", test.read_text())}
    assert cited <= set(rules)


@pytest.mark.parametrize("version", sorted(p.name for p in GOLDEN.glob("v*")))
def test_what_older_versions_wrote_is_read(version):
    """F-22: golden files are added, never edited, and read for ever."""
    expected = golden.tree()
    expected["big"] = expected["big"].astype("=i4")  # It was saved from a big-endian array; values come back native.
    assert same(ck.restore(GOLDEN / version, like=expected), expected)
    assert ck.verify(GOLDEN / version).ok
    assert ck.open(GOLDEN / version).metadata == golden.METADATA
    arrays = read_as_a_stranger(GOLDEN / version)
    np.testing.assert_array_equal(arrays["params.w"], np.asarray(expected["params"]["w"]))
