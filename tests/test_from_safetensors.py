"""Safetensors files of others, read where they lie; and hostile ones."""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_jax import _flat, _from_safetensors, _manifest, _structure, _view
from ckpt_jax._storage import Folder, folder
from ckpt_jax._view import View
from ckpt_jax.errors import CheckpointError, Corrupt, Unsupported
from tests.bounded import bounded
from tests.views import memory, same_arrays, sample, values

DTYPES = sorted(_from_safetensors.DTYPES.values())


def read(path: Path) -> View:
    assert _from_safetensors.is_here(folder(path))
    return _from_safetensors.view(folder(path))


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def tensor(begin: int, end: int, dtype: str = "U8", shape: tuple[Any, ...] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else list(shape), "data_offsets": [begin, end]}


def faults(path: Path, kind: type[CheckpointError] = CheckpointError) -> dict[str, str]:
    """What is wrong with a file, by place."""
    with bounded(), pytest.raises(kind) as caught:
        read(path)
    assert str(path) in str(caught.value)
    return {fault.place: str(fault) for fault in caught.value.faults}


# --- files as others write them ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_the_format_is_read_in_every_bit(tmp_path, dtype):
    wanted = {"x": sample(dtype, (3, 5)), "none": sample(dtype, (0, 4)), "one": sample(dtype, ())}
    safetensors.numpy.save_file(wanted, tmp_path / "a")
    found = read(tmp_path / "a")
    assert same_arrays(values(found), wanted)
    assert {str(leaf) for leaf in found.leaves.values()} == {f"{dtype}[3,5]", f"{dtype}[0,4]", f"{dtype}[]"}


def test_dots_in_names_become_containers(tmp_path):
    wanted = {f"model.layers.{at}.w": sample("float32", (2, at)) for at in range(12)} | {"head": sample("int8", (1,))}
    safetensors.numpy.save_file(wanted, tmp_path / "m.safetensors", metadata={"format": "np", "who": "tëst"})
    found = read(tmp_path / "m.safetensors")
    assert same_arrays(values(found), wanted)
    assert isinstance(found.tree, _structure.Node)
    assert sorted(found.tree.keys) == ["head", "model"]
    assert {node.type for node in found.tree.children if isinstance(node, _structure.Node)} == {_structure.UNTOLD}
    assert found.metadata == {"format": "np", "who": "tëst"}
    assert "digests" in found.lacks
    assert list(_structure.names(found.tree)) == list(found.leaves)


def test_a_name_that_is_also_the_beginning_of_another_keeps_its_dots(tmp_path):
    wanted = {"a": sample("int8", (1,)), "a.b": sample("int8", (2,)), "": sample("int8", (3,))}
    safetensors.numpy.save_file(wanted, tmp_path / "a")
    found = read(tmp_path / "a")
    assert list(found.leaves) == ["%", "a", "a%2Eb"] or set(found.leaves) == {"%", "a", "a%2Eb"}
    assert same_arrays(values(found), {"%": wanted[""], "a": wanted["a"], "a%2Eb": wanted["a.b"]})


def test_names_of_very_many_levels_are_not_taken_apart(tmp_path):
    deep = ".".join("a" * 100_000)
    safetensors.numpy.save_file({deep: sample("int8", (1,)), "b.c": sample("int8", (2,))}, tmp_path / "a")
    with bounded():
        assert set(read(tmp_path / "a").leaves) == {_structure.escape(deep), "b%2Ec"}


def test_names_of_very_many_containers_are_not_taken_apart():
    names = [".".join(f"{at}{level}" for level in range(200)) for at in range(2000)]
    with bounded():
        assert _view.split(names) == {name: (name,) for name in names}


def test_a_file_of_very_many_leaves_is_read(tmp_path):
    wanted = {f"layer.{at // 100}.p{at}": np.full(at % 3, at, np.int32) for at in range(20_000)}
    safetensors.numpy.save_file(wanted, tmp_path / "a")
    assert same_arrays(values(read(tmp_path / "a")), wanted)


def test_a_part_is_read_of_a_large_array_alone(tmp_path):
    wanted = sample("float32", (3000, 3000))
    safetensors.numpy.save_file({"x": wanted}, tmp_path / "a")
    found = read(tmp_path / "a")
    assert found.leaves["x"].chunks == 3
    with memory(3 * _flat.ROWS):
        assert np.array_equal(found.read("x", ((7, 2900), (5, 6))), wanted[7:2900, 5:6], equal_nan=True)


def test_a_file_without_arrays_is_an_empty_tree(tmp_path):
    safetensors.numpy.save_file({}, tmp_path / "a")
    assert read(tmp_path / "a").leaves == {}


def test_the_stamp_changes_with_the_file(tmp_path):
    safetensors.numpy.save_file({"x": sample("int8", (4,))}, tmp_path / "a")
    before = read(tmp_path / "a").stamp
    assert read(tmp_path / "a").stamp == before
    safetensors.numpy.save_file({"x": sample("int8", (5,))}, tmp_path / "a")
    assert read(tmp_path / "a").stamp != before


def test_other_files_are_not_taken_for_it(tmp_path):
    (tmp_path / "text").write_text("{}")
    (tmp_path / "long").write_bytes(b"\xff" * 8 + b"{}")
    (tmp_path / "empty").touch()
    assert not any(_from_safetensors.is_here(folder(tmp_path / name)) for name in ("text", "long", "empty", "none"))
    assert not _from_safetensors.is_here(folder(tmp_path))
    assert not _from_safetensors.is_here(Folder("memory://somewhere"))


# --- shards -----------------------------------------------------------------------------------------------------------

ONE, TWO, INDEX = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"


def shards(place: Path, weights: dict[str, str] | None = None) -> dict[str, np.ndarray]:
    """Two shards as Hugging Face lays them down, with an index that may say something else."""
    found = {"a.w": sample("bfloat16", (4, 2)), "a.b": sample("float16", (3,)), "c": sample("int64", ())}
    safetensors.numpy.save_file({"a.w": found["a.w"]}, place / ONE, {"format": "pt"})
    safetensors.numpy.save_file({"a.b": found["a.b"], "c": found["c"]}, place / TWO, {"format": "pt"})
    weights = {"a.w": ONE, "a.b": TWO, "c": TWO} if weights is None else weights
    (place / INDEX).write_text(json.dumps({"metadata": {"total_size": 30}, "weight_map": weights}))
    return found


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_one_tree_with_an_index_or_without(tmp_path, index):
    wanted = shards(tmp_path)
    if not index:
        (tmp_path / INDEX).unlink()
    found = read(tmp_path)
    assert same_arrays(values(found), wanted)
    assert found.metadata == {"format": "pt"}


def test_what_the_index_does_not_name_is_left_alone(tmp_path):
    wanted = shards(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"broken")
    assert same_arrays(values(read(tmp_path)), wanted)


def test_all_in_which_index_and_shards_differ_is_told(tmp_path):
    shards(tmp_path, {"a.w": TWO, "d": ONE, "c": TWO})
    assert faults(tmp_path) == {
        "a.w": f"a.w: expected in {TWO}, found in {ONE}",
        "a.b": f"a.b: expected in none of the files, found in {TWO}, not in the index",
        "d": f"d: expected in {ONE}, as {INDEX} says, found in no file",
    }


def test_an_array_in_two_shards_is_told(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        safetensors.numpy.save_file({"x": sample("int8", (1,))}, tmp_path / name)
    assert faults(tmp_path) == {"x": "x: expected in one file, found in a.safetensors, b.safetensors"}


@pytest.mark.parametrize("index", [True, False])
def test_a_shard_that_is_not_there_is_told(tmp_path, index):
    shards(tmp_path)
    (tmp_path / TWO).unlink()
    if index:
        assert faults(tmp_path) == {TWO: f"{TWO}: expected a plain file, found none"}
    else:
        (tmp_path / INDEX).unlink()
        place = "model-…-of-00002.safetensors"
        assert faults(tmp_path) == {place: f"{place}: expected 2 shards, found 1"}


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/out.safetensors", "in/out.safetensors", "..", "", "x\0y"])
def test_an_index_leads_nowhere_else(tmp_path, name):
    shards(tmp_path, {"a.w": name})
    found = faults(tmp_path)[INDEX]
    assert found == f"{INDEX}: expected names of .safetensors files in the same folder, found {name!r}"


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (b"", "truncated"),
        (b"[1]", "Expected `object`"),
        (b"{}", "found none"),
        (b'{"weight_map": {"a": 1}}', "Expected `str`"),
        (b'{"weight_map": {"a": "m.safetensors", "a": "m.safetensors"}}', "expected an entry once, found again"),
        (b"[" * 1_000_000, "expected JSON"),
        (b'{"weight_map": {}, "metadata": {"ckpt_jax": 3}}', "Expected `str`"),
    ],
)
def test_an_index_that_is_none_is_told(tmp_path, index, text):
    (tmp_path / INDEX).write_bytes(index)
    (found,) = faults(tmp_path).values()
    assert text in found
    assert found.startswith(INDEX)


def test_several_indices_are_several_checkpoints(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(Unsupported, match=r"give one of the files.*a\.safetensors"):
        read(tmp_path)


def test_links_to_files_are_followed_as_in_the_caches_of_hugging_face(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    shards(tmp_path / "blobs")
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert list(read(tmp_path / "snapshot").leaves) == list(read(tmp_path / "blobs").leaves)
    assert list(read(tmp_path / "snapshot" / ONE).leaves) == ["a.w"]


def test_pipes_and_links_to_them_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "c.safetensors")
    (tmp_path / "d.safetensors").symlink_to(tmp_path / "c.safetensors")
    (tmp_path / "e.safetensors").symlink_to(tmp_path / "nowhere")
    for name in ("c", "d", "e"):
        assert [text for text in faults(tmp_path / f"{name}.safetensors").values() if "expected a plain file" in text]


# --- hostile files ----------------------------------------------------------------------------------------------------

HEADER = "expected a header of 100,000,000 bytes at most, and its length"
HOSTILE = {
    "nothing": (b"", {"header": f"{HEADER}, found a file of 0 bytes"}),
    "a short file": (b"\1\0\0", {"header": f"{HEADER}, found a file of 3 bytes"}),
    "a huge header": (b"\xff" * 8 + b"{}", {"header": f"{HEADER}, found one of 18,446,744,073,709,551,615"}),
    "a header beyond the file": (b"\x40" + b"\0" * 7 + b"{}", {"header": "expected 64 bytes, found a file of 10"}),
}
ENTRY = "expected a dtype, a shape, and where the data begin and end, found"
CONTENTS = {
    "no JSON": (b"{nonsense}", b"", {"header": "expected JSON, an entry for each array, found JSON is malformed"}),
    "an array of JSON": (b"[1, 2]", b"", {"header": "expected JSON, which begins with {, found b'[1, 2]'"}),
    "no UTF-8": (b'{"\xff": {}}', b"", {"header": "expected JSON, an entry for each array, found"}),
    "levels": (b'{"a":' + b"[" * 1_000_000, b"", {"header": "expected JSON, an entry for each array, found"}),
    "other entries": ({"x": [1], "y": {"dtype": "U8"}, "z": 1}, b"", dict.fromkeys("xyz", ENTRY)),
    "more in an entry": ({"x": tensor(0, 1) | {"more": 1}}, b"1", {"x": "unknown field `more`"}),
    "a repeated name": (
        b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"1",
        {"x": "x: expected an entry once, found again"},
    ),
    "a repeated key": (
        b'{"x":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        b"1",
        {"dtype": "dtype: expected an entry once, found again"},
    ),
    "an overlap": (
        {"x": tensor(0, 4), "y": tensor(2, 6)},
        b"123456",
        {"y": "y: expected data that begin at 4, found 2 to 6: what overlaps another"},
    ),
    "the same bytes": ({"x": tensor(0, 4), "y": tensor(0, 4)}, b"1234", {"y": "found 0 to 4: what overlaps another"}),
    "a hole": ({"x": tensor(0, 1), "y": tensor(2, 3)}, b"123", {"y": "begin at 1, found 2 to 3: a hole"}),
    "more data": ({"x": tensor(0, 1)}, b"123", {"data": "data: expected 1 bytes, as the header says, found 3"}),
    "less data": ({"x": tensor(0, 9)}, b"123", {"data": "data: expected 9 bytes, as the header says, found 3"}),
    "an end before the beginning": (
        {"x": {"dtype": "U8", "shape": [1], "data_offsets": [3, 2]}},
        b"123",
        {"x": "found 3 to 2: an end before it"},
    ),
    "offsets below nothing": ({"x": tensor(-1, 0)}, b"", {"x": f"{ENTRY} Expected `int` >= 0"}),
    "offsets beyond 64 bits": ({"x": tensor(0, 2**64, "U8", (1,))}, b"1", {"x": f"{ENTRY} Expected `int`"}),
    "other bytes than the shape has": (
        {"x": tensor(0, 7, "F32", (2,))},
        b"1234567",
        {"x": "x: expected an array and its bytes, found 7 bytes for float32[2], which is 8"},
    ),
    "a shape below nothing": ({"x": tensor(0, 1, "U8", (-1, -1))}, b"1", {"x": f"{ENTRY} Expected `int` >= 0"}),
    "a shape with points": ({"x": tensor(0, 1, "U8", (1.5,))}, b"1", {"x": f"{ENTRY} Expected `int`, got `float`"}),
    "a shape beyond memory": ({"x": tensor(0, 0, "U8", (2**62, 0))}, b"", {"x": "more than an array can have"}),
    "very many axes": ({"x": tensor(0, 1, "U8", (1,) * 1000)}, b"1", {"x": "length <= 64"}),
    "metadata that is no text": (
        {"__metadata__": {"a": 1}},
        b"",
        {"__metadata__": "text for each key, found Expected"},
    ),
    "a description that is none": (
        {"__metadata__": {"ckpt_jax": "{}"}},
        b"",
        {"ckpt_jax": "expected a description of the arrays, found"},
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_cannot_be_is_told(tmp_path, name):
    data, wanted = HOSTILE[name]
    (tmp_path / "m.safetensors").write_bytes(data)
    found = faults(tmp_path / "m.safetensors")
    assert set(found) == set(wanted)
    assert all(text in found[place] for place, text in wanted.items()), found


@pytest.mark.parametrize("name", CONTENTS)
def test_a_header_that_cannot_be_is_told_at_its_place(tmp_path, name):
    header, data, wanted = CONTENTS[name]
    found = faults(write(tmp_path / "m.safetensors", header, data))
    assert set(wanted) <= set(found)
    assert all(text in found[place] for place, text in wanted.items()), found


def test_all_faults_of_all_shards_are_told_at_once(tmp_path):
    write(tmp_path / "a.safetensors", {"x": tensor(0, 3, "F32", (1,)), "y": tensor(5, 6)}, b"1234")
    write(tmp_path / "b.safetensors", b"{")
    found = faults(tmp_path)
    assert set(found) == {"a.safetensors: x", "a.safetensors: y", "a.safetensors: data", "b.safetensors: header"}


def test_of_a_file_of_nothing_but_faults_not_all_are_told(tmp_path):
    write(tmp_path / "m.safetensors", {f"x{at}": {} for at in range(5000)})
    assert len(faults(tmp_path / "m.safetensors")) == _from_safetensors.TOLD


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2", "F128", "int8", ""])
def test_a_dtype_that_numpy_lacks_is_refused_by_name(tmp_path, dtype):
    write(tmp_path / "a", {"x": tensor(0, 1, dtype, (2,)), "y": tensor(1, 2, dtype)}, b"12")
    found = faults(tmp_path / "a", Unsupported)
    assert found == {name: f"{name}: expected a dtype that NumPy has, found {dtype}" for name in "xy"}


def test_a_file_that_is_cut_off_after_it_was_looked_at_is_corrupt(tmp_path):
    safetensors.numpy.save_file({"x": sample("int32", (100,))}, tmp_path / "a")
    found = read(tmp_path / "a")
    os.truncate(tmp_path / "a", (tmp_path / "a").stat().st_size - 1)
    with pytest.raises(Corrupt, match=r"x: expected 400 bytes at .*, found 399"):
        values(found)


def look(path: Path) -> None:
    """Reads all that there is, or is told in the way that was promised."""
    try:
        if _from_safetensors.is_here(folder(path)):
            values(_from_safetensors.view(folder(path)))
    except (CheckpointError, OSError):
        pass


def test_no_flipped_bits_and_no_truncation_do_more_than_raise(tmp_path):
    wanted = {"a.w": sample("float32", (3, 4)), "b": sample("bool", (5,)), "c": sample("bfloat16", ())}
    whole = safetensors.numpy.save(wanted, {"format": "pt"})
    chance = random.Random(1)
    path = tmp_path / "m.safetensors"
    with bounded(300), memory(10 << 20):
        for cut in range(len(whole)):
            path.write_bytes(whole[:cut])
            with pytest.raises(CheckpointError):
                read(path)
        for _ in range(1000):
            data = bytearray(whole)
            for _ in range(chance.choice((1, 1, 2, 5))):
                data[chance.randrange(len(data))] = chance.randrange(256)
            path.write_bytes(data)
            look(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*_from_safetensors.DTYPES, "F4", "?"]),
        "shape": st.lists(st.integers(-1, 4) | st.integers(), max_size=3),
        "data_offsets": st.lists(st.integers(0, 20) | st.integers(), min_size=2, max_size=2),
    }
)


@given(
    st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), ENTRIES | JSON, max_size=3), st.binary(max_size=20)
)
@settings(deadline=None, max_examples=300)
def test_no_header_does_more_than_raise(tmp_path_factory, header, data):
    path = write(tmp_path_factory.mktemp("hostile") / "m.safetensors", header, data)
    with bounded():
        look(path)


@given(
    st.dictionaries(
        st.text("ab./%é", max_size=6),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    )
)
@settings(deadline=None, max_examples=100)
def test_what_safetensors_wrote_is_read_in_every_bit(tmp_path_factory, arrays):
    wanted = {name: sample(dtype, tuple(shape)) for name, (dtype, shape) in arrays.items()}
    path = tmp_path_factory.mktemp("theirs") / "m.safetensors"
    safetensors.numpy.save_file(wanted, path)
    found = read(path)
    by_path = {".".join(at): name for name, at in _view.split(wanted).items()}
    assert len(by_path) == len(found.leaves) == len(wanted)
    assert sorted(x.tobytes() for x in values(found).values()) == sorted(x.tobytes() for x in wanted.values())
    assert found.nbytes == sum(array.nbytes for array in wanted.values())
    assert all(leaf.dtype in _manifest.ITEMSIZE for leaf in found.leaves.values())
