"""What JAX's own serialiser wrote is read as it reads it, without JAX."""

import base64
import collections
import contextlib
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any, NamedTuple

import flatbuffers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.array_serialization import pytree_serialization
from jax.sharding import NamedSharding, PartitionSpec

from ckpt_jax import _from_jax, _structure
from ckpt_jax._storage import Folder
from ckpt_jax._structure import Node
from ckpt_jax._view import View
from ckpt_jax.errors import CheckpointError, Corrupt

from .bounded import bounded
from .rss import extra


class Moments(NamedTuple):
    count: Any
    mu: Any


jax.export.register_namedtuple_serialization(Moments, serialized_name="tests.Moments")


@jax.tree_util.register_pytree_node_class
class Pair:
    """A class of which JAX does not write the children's names."""

    def __init__(self, *children: Any):
        self.children = children

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Any, ...]) -> "Pair":
        return cls(*children)


jax.export.register_pytree_node_serialization(
    Pair, serialized_name="tests.Pair", serialize_auxdata=lambda aux: b"", deserialize_auxdata=lambda data: None
)


def save(path: Path, tree: Any) -> Folder:
    pytree_serialization.save(tree, path, overwrite=True)
    return Folder(str(path))


def whole(view: View, name: str) -> np.ndarray:
    return view.read(name, tuple((0, n) for n in view.leaves[name].shape))


def tree() -> dict[str, Any]:
    return {
        "params": {
            "w": jnp.arange(12.0).reshape(3, 4),
            "b": jnp.ones(3, jnp.bfloat16),
            "a.b/c": jnp.zeros((), jnp.int8),
        },
        "list": [jnp.int32(1) + 0, None, (jnp.zeros((0, 3)), {})],
        "opt": Moments(jnp.int32(3) + 0, {"w": jnp.full((2, 2), -1.5)}),
        "ordered": collections.OrderedDict(z=jnp.ones(2), a=jnp.zeros(4)),
        "empty": (),
        "uint": jnp.arange(6, dtype=jnp.uint16).reshape(2, 3),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jax") / "saved"
    save(path, tree())
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_the_tree_is_the_one_that_was_saved(saved: Path):
    place = Folder(str(saved))
    assert _from_jax.is_here(place)
    view = _from_jax.view(place)
    built = _structure.build(view.tree, lambda name: whole(view, name))
    wanted = tree()
    assert list(built) == sorted(wanted)
    assert built["list"][1] is None
    assert (built["list"][2][1], built["empty"]) == ({}, ())
    assert list(built["ordered"]) == ["z", "a"]
    flat = jax.tree.leaves(jax.tree.map(np.asarray, wanted))
    assert [a.tobytes() for a in flat] == [whole(view, name).tobytes() for name in view.leaves]
    assert [(a.dtype.name, a.shape) for a in flat] == [(leaf.dtype, leaf.shape) for leaf in view.leaves.values()]
    assert {"opt.count", "opt.mu.w", "params.a%2Eb%2Fc"} <= set(view.leaves)
    assert view.lacks == ("digests", "sharding", "whether a chunk of zeros was lost")


DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"]
DTYPES += ["int4", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"]


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path):
    wanted = {dtype: jnp.arange(6).reshape(2, 3).astype(dtype) for dtype in DTYPES}
    view = _from_jax.view(save(tmp_path / "x", wanted))
    for dtype, array in wanted.items():
        assert view.leaves[dtype].dtype == dtype
        assert whole(view, dtype).tobytes() == np.asarray(array).tobytes()


def test_sharded_arrays_are_whole(tmp_path: Path, mesh42: jax.sharding.Mesh):
    values = np.arange(128, dtype=np.float32).reshape(16, 8)
    array = jax.device_put(values, NamedSharding(mesh42, PartitionSpec("data", "model")))
    view = _from_jax.view(save(tmp_path / "x", [array]))
    np.testing.assert_array_equal(whole(view, "0"), values)
    np.testing.assert_array_equal(view.read("0", ((3, 9), (2, 7))), values[3:9, 2:7])


def test_zarrs_second_version_is_read_too(tmp_path: Path):
    place = save(tmp_path / "x", {"w": jnp.ones(3)})
    shutil.rmtree(tmp_path / "x" / "array_store")
    kvstore = {"driver": "ocdbt", "base": f"file://{tmp_path}/x/array_store/", "path": "0/"}
    store = ts.open({"driver": "zarr", "kvstore": kvstore}, create=True, dtype=ts.float32, shape=[3]).result()
    store.write(np.array([1, 2, 3], np.float32)).result()
    assert whole(_from_jax.view(place), "w").tolist() == [1, 2, 3]


@pytest.mark.parametrize("value", [jnp.arange(3), None, [], {}])
def test_a_tree_of_one_node_is_read(value: Any, tmp_path: Path):
    view = _from_jax.view(save(tmp_path / "x", value))
    assert len(view.leaves) == len(jax.tree.leaves(value))
    assert view.tree == ("*" if view.leaves else Node(type(value).__name__.lower().replace("nonetype", "none")))


def test_children_without_names_are_known_by_their_positions(tmp_path: Path):
    view = _from_jax.view(save(tmp_path / "x", {"p": Pair(jnp.ones(2), [jnp.zeros(1)])}))
    assert list(view.leaves) == ["p.0", "p.1.0"]
    assert view.lacks[-1] == "the names of what is in a tests.Pair"


def test_other_folders_are_not_taken_for_it(tmp_path: Path):
    assert not _from_jax.is_here(Folder(str(tmp_path)))
    (tmp_path / "pytreedef.json").write_text("{}")
    assert not _from_jax.is_here(Folder(str(tmp_path)))
    assert not _from_jax.is_here(Folder(str(tmp_path / "pytreedef.json")))


def test_another_checkpoint_has_another_stamp(tmp_path: Path):
    first = _from_jax.view(save(tmp_path / "x", [jnp.ones(2)])).stamp
    assert first == _from_jax.view(Folder(str(tmp_path / "x"))).stamp
    assert first != _from_jax.view(save(tmp_path / "x", [jnp.ones(2)])).stamp


# --- hostile ----------------------------------------------------------------------------------------------------------


def rewrite(path: Path, **fields: Any) -> Folder:
    told = json.loads((path / "pytreedef.json").read_text())
    (path / "pytreedef.json").write_text(json.dumps(told | fields))
    return Folder(str(path))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"__jax_pytreedef_repr": "%"}, "in JSON"),
        ({"__jax_pytreedef_repr": 5}, "in JSON"),
        ({"__jax_pytreedef_repr": ""}, "a tree"),
        ({"__jax_pytreedef_repr": "AAAA"}, "a tree"),
        ({"__jax_leaf_ids": []}, "more leaves than it tells of"),
        ({"__jax_leaf_ids": "x"}, "in JSON"),
        ({"__jax_leaf_ids": [{}]}, "in JSON"),
        ({"__jax_leaf_ids": [None] * 99}, "leaves that have no place in it"),
    ],
)
def test_a_description_that_is_none_is_refused(fields: dict[str, Any], says: str, copied: Path):
    with bounded(), pytest.raises(CheckpointError, match=says) as caught:
        _from_jax.view(rewrite(copied, **fields))
    assert "pytreedef.json" in str(caught.value)


def test_json_that_is_none_is_refused(copied: Path):
    for text in ("", "[]", "[" * 100_000, '{"__jax_pytreedef_repr": "'):
        (copied / "pytreedef.json").write_text(text)
        with bounded(), pytest.raises(CheckpointError, match="in JSON"):
            _from_jax.view(Folder(str(copied)))


def test_every_array_that_is_not_as_told_is_named(copied: Path):
    told = json.loads((copied / "pytreedef.json").read_text())["__jax_leaf_ids"]
    told[0], told[2] = "Array(float32[7])", "int"
    with pytest.raises(CheckpointError) as caught:
        _from_jax.view(rewrite(copied, __jax_leaf_ids=told))
    assert len(caught.value.faults) == 2
    assert "expected 'Array(float32[7])', as pytreedef.json says, found int32[]" in str(caught.value)


def test_arrays_that_are_gone_are_named(copied: Path):
    shutil.rmtree(copied / "array_store")
    with pytest.raises(Corrupt) as caught:
        _from_jax.view(Folder(str(copied)))
    assert {"params.w", "opt.mu.w"} <= {fault.place for fault in caught.value.faults}


def test_a_data_file_that_is_gone_is_damage(copied: Path):
    shutil.rmtree(copied / "array_store" / "d")
    with pytest.raises(CheckpointError):
        whole(_from_jax.view(Folder(str(copied))), "params.w")


def test_a_pipe_among_the_files_is_refused(copied: Path):
    os.mkfifo(copied / "array_store" / "d" / "pipe")
    with bounded(), pytest.raises(Corrupt, match="a pipe"):
        _from_jax.view(Folder(str(copied)))


def test_a_link_to_a_description_is_none(copied: Path):
    (copied / "pytreedef.json").rename(copied / "other")
    (copied / "pytreedef.json").symlink_to(copied / "other")
    assert not _from_jax.is_here(Folder(str(copied)))
    with pytest.raises(CheckpointError):
        _from_jax.view(Folder(str(copied)))


def serialised(levels: int, times: int, names: list[str] | None = None) -> str:
    """A flatbuffer of lists, or of dicts, in each other, of which each holds the same one some times."""
    builder = flatbuffers.Builder(1024)
    builder.StartObject(5)
    at = builder.EndObject()
    for _ in range(levels):
        texts = []
        if names is not None:
            text = builder.CreateString(names[0])
            texts = [text] * times
            builder.StartVector(4, times, 4)
            for each in texts:
                builder.PrependUOffsetTRelative(each)
            named = builder.EndVector()
        builder.StartVector(4, times, 4)
        for _ in range(times):
            builder.PrependUOffsetTRelative(at)
        children = builder.EndVector()
        builder.StartObject(5)
        builder.PrependInt8Slot(0, 4 if texts else 3, 0)
        builder.PrependUOffsetTRelativeSlot(1, children, 0)
        if texts:
            builder.PrependUOffsetTRelativeSlot(2, named, 0)
        at = builder.EndObject()
    builder.Finish(at)
    return base64.b64encode(builder.Output()).decode()


@pytest.mark.parametrize(
    "told",
    [
        serialised(5000, 1),
        serialised(100, 2),
        serialised(1, 30_000, ["x" * 60_000]),
        serialised(3, 1000, ["k"]),
        base64.b64encode(struct.pack("<I", 4) + b"\xff" * 200).decode(),
        base64.b64encode(struct.pack("<Ii", 4, -(2**31)) + bytes(200)).decode(),
        base64.b64encode(struct.pack("<IiHHHH", 12, 8, 12, 8, 4, 4) + bytes(2000)).decode(),
    ],
)
def test_a_hostile_tree_is_refused_in_bounded_time(told: str, copied: Path):
    with bounded(), pytest.raises(CheckpointError, match="expected a tree"):
        _from_jax.view(rewrite(copied, __jax_pytreedef_repr=told))


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_tree_ends_in_an_error_in_words(data: st.DataObject, copied: Path, saved: Path):
    told = json.loads((saved / "pytreedef.json").read_text())
    changed = bytearray(base64.b64decode(told["__jax_pytreedef_repr"]))
    for at in data.draw(st.lists(st.integers(0, len(changed) - 1), min_size=1, max_size=4)):
        changed[at] = data.draw(st.integers(0, 255))
    del changed[data.draw(st.integers(len(changed) // 2, len(changed))) :]
    place = rewrite(copied, __jax_pytreedef_repr=base64.b64encode(changed).decode())
    with contextlib.suppress(CheckpointError):
        view = _from_jax.view(place)
        for name in view.leaves:
            whole(view, name)


def test_a_large_array_is_read_with_the_memory_of_a_box(tmp_path: Path):
    array = jax.device_put(
        np.ones((32, 800_000), np.float32),
        NamedSharding(jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)), PartitionSpec("x")),
    )
    save(tmp_path / "x", [array])
    before = "import numpy, ckpt_jax._from_jax as m; from ckpt_jax._storage import Folder"
    code = f"v = m.view(Folder({str(tmp_path / 'x')!r})); assert v.read('0', ((3, 4), (0, 800_000))).all()"
    assert extra(before, code) < 60 << 20
