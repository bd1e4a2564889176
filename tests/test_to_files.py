"""Views written as safetensors and .npz: others read them, we read all of them again, and a kill costs nothing."""

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_jax import (
    _described,
    _formats,
    _from_numpy,
    _from_safetensors,
    _in_a_row,
    _manifest,
    _structure,
    _to_npz,
    _to_safetensors,
)
from ckpt_jax._in_a_row import Written
from ckpt_jax._storage import Folder, folder
from ckpt_jax._view import View
from ckpt_jax.errors import CheckpointError, Corrupt, Exists, Unsupported
from tests.views import Key, Live, Weak, memory, same_arrays, same_views, sample, values, view_of

SAFE = sorted(_from_safetensors.DTYPES.values())
Point = namedtuple("Point", ["x", "y"])

STATE = {
    "params": [Point(sample("float32", (3, 4)), sample("float32", (4,))), (sample("int8", (2,)),)],
    "a.b": {"/%": sample("bool", (5,)), 7: sample("uint16", ()), None: Weak(sample("float32", (0, 3)))},
    "key": Key(sample("uint32", (3, 2))),
    "step": 2**70,
    "lr": float("nan"),
    "name": "tëxt",
    "data": Live({"at": 3, "seen": (1, b"x")}),
    "nothing": None,
    "empty": [(), {}, []],
}
MORE: dict[str, Any] = {
    "step": 12,
    "metadata": {"format": "np", "note": "ü", "lr": 0.1, "of": (1, 2), "ckpt_jax": "mine"},
    "metrics": {"loss": 0.5, "worst": float("inf")},
}

Write = Callable[..., Written]
WRITERS: dict[str, tuple[Write, Callable[[Folder], View], str]] = {
    "safetensors": (_to_safetensors.write, _from_safetensors.view, "a.safetensors"),
    "a folder": (_to_safetensors.write, _from_safetensors.view, "a"),
    "shards": (
        lambda view, dst, **more: _to_safetensors.write(view, dst, shard_bytes=20, **more),
        _from_safetensors.view,
        "a",
    ),
    "npz": (_to_npz.write, _from_numpy.view, "a.npz"),
}


@pytest.fixture(params=WRITERS)
def there_and_back(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[View], View]:
    """Writes a view somewhere, and gives what is read there."""
    write, read, name = WRITERS[request.param]

    def go(view: View) -> View:
        write(view, folder(tmp_path / name))
        return read(folder(tmp_path / name))

    return go


def entries(path: Path) -> dict[str, bytes]:
    """Every file at a path, with its bytes."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return {str(each.relative_to(path)): each.read_bytes() for each in files}


# --- round trips ------------------------------------------------------------------------------------------------------


def test_everything_comes_back(there_and_back):
    wanted = view_of(STATE, **MORE)
    found = there_and_back(wanted)
    assert same_views(found, wanted)
    assert found.lacks == ("digests",)


@pytest.mark.parametrize(
    "tree", [{}, [], None, 3, sample("int8", (3,)), sample("int8", ()), Key(sample("uint32", (2,)))]
)
def test_a_tree_that_is_one_leaf_or_none_comes_back(there_and_back, tree):
    assert same_views(there_and_back(view_of(tree)), view_of(tree))


@pytest.mark.parametrize(
    "metadata", [None, {}, [1, "a"], "text", {"format": "pt"}, {"a": "b"}, {1: 2}, {"x": "\ud800"}]
)
def test_metadata_comes_back_whatever_it_is(there_and_back, metadata):
    wanted = view_of({"x": sample("int8", (2,))}, metadata=metadata)
    assert same_views(there_and_back(wanted), wanted)


NAMES = st.text(st.sampled_from("ab./%é\0 \ud800"), max_size=3)


def trees(dtypes: list[str]) -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda d, s: sample(d, tuple(s)), st.sampled_from(dtypes), st.lists(st.integers(0, 4), max_size=3)
    )
    keys = st.builds(lambda n: Key(sample("uint32", (n, 2)), "rbg"), st.integers(0, 2))
    scalars = st.integers() | st.floats() | st.booleans() | NAMES | st.binary(max_size=3) | st.complex_numbers()
    live = st.builds(Live, st.dictionaries(st.text(max_size=2), st.integers(), max_size=2))

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        keys = NAMES | st.integers(-3, 3)
        dicts = st.dictionaries(keys, inner, max_size=3).filter(lambda d: len(set(map(str, d))) == len(d))
        lists = st.lists(inner, max_size=3)
        return dicts | lists | lists.map(tuple) | st.builds(Point, inner, inner)

    return st.recursive(arrays | keys | scalars | live | st.none(), containers, max_leaves=12)


@pytest.mark.parametrize("kind", WRITERS)
@given(st.data())
@settings(deadline=None, max_examples=60)
def test_any_tree_comes_back(tmp_path_factory, kind, data):
    write, read, name = WRITERS[kind]
    tree = data.draw(trees([*_from_numpy.NAMED] if kind == "npz" else SAFE))
    wanted = view_of(tree, step=data.draw(st.none() | st.integers(0, 10**6)))
    place = folder(tmp_path_factory.mktemp("any") / name)
    told = write(wanted, place)
    assert same_views(read(place), wanted)
    assert told.bytes == sum(os.stat(file).st_size for file in told.files)


@pytest.mark.parametrize("kind", WRITERS)
def test_what_was_read_is_written_the_same_again(tmp_path, kind):
    write, read, name = WRITERS[kind]
    write(view_of(STATE, **MORE), folder(tmp_path / name))
    (tmp_path / "again").mkdir()
    write(read(folder(tmp_path / name)), folder(tmp_path / "again" / name))
    assert entries(tmp_path / name) == entries(tmp_path / "again" / name)


@pytest.mark.parametrize("cut", [(3, 2), (1, 64), (300, 7), (300, 64)])
def test_a_source_in_any_chunks_gives_the_same_file(tmp_path, cut, monkeypatch):
    monkeypatch.setattr(_in_a_row, "PIECE", 4000)
    monkeypatch.setattr(_in_a_row, "BAND", 10_000)
    tree = {"x": sample("float32", (300, 64)), "y": sample("float32", (2, 300, 64))}
    _to_npz.write(view_of(tree, chunk=lambda x: (1, *cut)[-x.ndim :]), folder(tmp_path / "a.npz"))
    _to_npz.write(view_of(tree), folder(tmp_path / "b.npz"))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert same_views(_from_numpy.view(folder(tmp_path / "a.npz")), view_of(tree))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=4), st.integers(1, 300), st.integers(1, 300))
@settings(deadline=None)
def test_the_bands_of_an_array_are_all_of_it_in_a_row(axes, piece, band):
    shape = tuple(n for n, _ in axes)
    chunk = tuple(min(c, max(1, n)) for n, c in axes)
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_in_a_row, "PIECE", piece)
        patch.setattr(_in_a_row, "BAND", max(piece, band))
        boxes = list(_in_a_row.bands(shape, chunk, 8))
    parts = [numbers[(*(slice(*side) for side in box), ...)] for box in boxes]
    assert np.array_equal(np.concatenate([[], *(part.ravel() for part in parts)]), numbers.ravel())
    assert all(part.nbytes <= max(piece, band, 8) for part in parts)


# --- what others read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SAFE)
def test_safetensors_reads_every_dtype_of_the_format(tmp_path, dtype):
    wanted = {"x": sample(dtype, (3, 5)), "none": sample(dtype, (0, 4)), "one": sample(dtype, ())}
    _to_safetensors.write(view_of(wanted), folder(tmp_path / "a.safetensors"))
    found = dict(safetensors.deserialize((tmp_path / "a.safetensors").read_bytes()))
    names = {name: dtype for dtype, name in _from_safetensors.DTYPES.items()}
    for name, array in wanted.items():
        assert found[name] == {"dtype": names[dtype], "shape": list(array.shape), "data": bytearray(array.tobytes())}


def test_safetensors_reads_names_and_metadata_and_arrays_begin_where_their_dtype_must(tmp_path):
    tree = {"a": sample("int8", (3,)), "b": {"c": sample("float64", (2,)), "d": sample("bool", (1,))}, "n": 3}
    told = _to_safetensors.write(view_of(tree, metadata={"who": "me", "n": 1}), folder(tmp_path / "a.safetensors"))
    assert told == Written(str(tmp_path / "a.safetensors"), (str(tmp_path / "a.safetensors"),), told.bytes, 3, ("n",))
    with safetensors.safe_open(tmp_path / "a.safetensors", "numpy") as file:
        assert set(file.keys()) == {"a", "b.c", "b.d"}
        assert {k: v for k, v in file.metadata().items() if k != "ckpt_jax"} == {"format": "pt", "who": "me"}
        assert file.get_tensor("b.c").tobytes() == tree["b"]["c"].tobytes()
    data = (tmp_path / "a.safetensors").read_bytes()
    start = int.from_bytes(data[:8], "little")
    assert start % 8 == 0
    header = json.loads(data[8 : 8 + start])
    assert header["b.c"]["data_offsets"] == [0, 16]
    assert list(header) == ["__metadata__", "a", "b.c", "b.d"]


def test_shards_lie_as_hugging_face_lays_them_down(tmp_path):
    tree = {
        "a": sample("float32", (2,)),
        "b": sample("int8", (7,)),
        "c": sample("float32", (9,)),
        "d": sample("int8", ()),
    }
    told = _to_safetensors.write(view_of(tree), folder(tmp_path / "m"), shard_bytes=16)
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
    files = [f"model-0000{at}-of-00003.safetensors" for at in (1, 2, 3)]
    assert index["weight_map"] == {"a": files[0], "b": files[0], "c": files[1], "d": files[2]}
    assert index["metadata"]["total_size"] == 8 + 7 + 36 + 1
    for name, file in index["weight_map"].items():
        assert safetensors.numpy.load_file(tmp_path / "m" / file)[name].tobytes() == tree[name].tobytes()
    assert [Path(file).name for file in told.files] == [*files, "model.safetensors.index.json"]
    assert sorted(os.listdir(tmp_path / "m")) == sorted(Path(file).name for file in told.files)


def test_a_folder_of_what_fits_in_one_shard_has_no_index(tmp_path):
    _to_safetensors.write(view_of({"a": sample("int8", (3,))}), folder(tmp_path / "in/a/new/m"))
    assert os.listdir(tmp_path / "in/a/new/m") == ["model.safetensors"]


@pytest.mark.parametrize("dtype", _from_numpy.NAMED)
def test_numpy_reads_every_dtype_of_the_format(tmp_path, dtype):
    wanted = {"x": sample(dtype, (3, 5)), "none": sample(dtype, (0, 4)), "one": sample(dtype, ())}
    _to_npz.write(view_of({"é": wanted}), folder(tmp_path / "a.npz"))
    with np.load(tmp_path / "a.npz") as file:
        assert file.files == ["ckpt_jax.json", "é.x", "é.none", "é.one"]
        assert same_arrays({name: file[f"é.{name}"] for name in wanted}, wanted)


def test_zip_tools_find_nothing_wrong(tmp_path):
    told = _to_npz.write(view_of(STATE, **MORE), folder(tmp_path / "a.npz"))
    with zipfile.ZipFile(tmp_path / "a.npz") as file:
        assert file.testzip() is None
        assert len(file.namelist()) == told.arrays + 1
        assert {info.date_time for info in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert told.only_described == ("step", "lr", "name", "data")
    assert json.loads(zipfile.ZipFile(tmp_path / "a.npz").read("ckpt_jax.json"))["format"] == "ckpt_jax"


@pytest.mark.parametrize(("wide", "many"), [(300, 1 << 16), (1 << 32, 3), (300, 3), (1, 1)])
def test_sizes_and_numbers_of_64_bits_are_read_by_numpy_and_by_us(tmp_path, monkeypatch, wide, many):
    """The same code writes them for files beyond 4 GiB; here the limits are lower."""
    monkeypatch.setattr(_to_npz, "WIDE", wide)
    monkeypatch.setattr(_to_npz, "MANY", many)
    wanted = {"a": sample("float64", (100,)), "b": sample("int8", (3,)), "c": sample("float64", (70,))}
    _to_npz.write(view_of(wanted), folder(tmp_path / "a.npz"))
    with np.load(tmp_path / "a.npz") as file:
        assert same_arrays({name: file[name] for name in wanted}, wanted)
    assert same_views(_from_numpy.view(folder(tmp_path / "a.npz")), view_of(wanted))
    ends = (tmp_path / "a.npz").read_bytes().count(b"PK\6\6")
    assert ends == (1 if wide < 1000 or many < 5 else 0)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_dtypes_that_safetensors_lacks_are_refused_by_name_before_anything_is_written(tmp_path):
    lacking = sorted({*_manifest.ITEMSIZE} - {*SAFE})
    tree = {dtype: sample(dtype, (2,)) for dtype in [*lacking, *SAFE]}
    with pytest.raises(Unsupported, match="--only") as caught:
        _to_safetensors.write(view_of(tree), folder(tmp_path / "in/a.safetensors"))
    assert {fault.place: fault.found for fault in caught.value.faults} == {name: name for name in lacking}
    assert "complex128" in lacking
    assert os.listdir(tmp_path) == []


def test_dtypes_that_npy_lacks_are_refused_by_name_before_anything_is_written(tmp_path):
    lacking = sorted({*_manifest.ITEMSIZE} - {*_from_numpy.NAMED})
    tree = {dtype: sample(dtype, (2,)) for dtype in [*lacking, *_from_numpy.NAMED]}
    with pytest.raises(Unsupported, match="--only") as caught:
        _to_npz.write(view_of(tree), folder(tmp_path / "in/a.npz"))
    assert {fault.place: fault.found for fault in caught.value.faults} == {name: name for name in lacking}
    assert "bfloat16" in lacking
    assert os.listdir(tmp_path) == []


def test_a_name_that_the_format_keeps_for_itself_is_refused(tmp_path):
    with pytest.raises(Unsupported, match="__metadata__: expected another name"):
        _to_safetensors.write(view_of({"__metadata__": sample("int8", (1,))}), folder(tmp_path / "a.safetensors"))


def test_a_name_that_is_too_long_for_a_member_is_refused(tmp_path):
    with pytest.raises(Unsupported, match="a name of 65,535 bytes at most, found 70,004"):
        _to_npz.write(view_of({"x" * 70_000: sample("int8", (1,))}), folder(tmp_path / "a.npz"))


def test_a_header_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_to_safetensors, "LARGEST", 1000)
    tree = {f"x{at}": sample("int8", (1,)) for at in range(20)}
    with pytest.raises(Unsupported, match="expected 1,000 bytes at most"):
        _to_safetensors.write(view_of(tree), folder(tmp_path / "a.safetensors"))
    assert os.listdir(tmp_path) == []


def test_metadata_that_json_cannot_tell_is_refused(tmp_path):
    with pytest.raises(Unsupported, match="metadata, metrics: expected plain data, found"):
        _to_npz.write(view_of(STATE, metadata={"x": object()}), folder(tmp_path / "a.npz"))
    assert os.listdir(tmp_path) == []


def test_metadata_with_odd_keys_comes_back(tmp_path):
    odd = {"\ud800": 1, "a": {"$b": 2}}
    for name, write in (("a.npz", _to_npz.write), ("a.safetensors", _to_safetensors.write)):
        write(view_of(STATE, metadata=odd), folder(tmp_path / name))
        assert _formats.view(tmp_path / name).metadata == odd


@pytest.mark.parametrize("kind", WRITERS)
def test_what_is_there_is_left_as_it_is(tmp_path, kind):
    write, _, name = WRITERS[kind]
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(Exists, match="it is left as it is"):
        write(view_of(STATE), folder(tmp_path / name))
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_bucket_is_refused(kind):
    with pytest.raises(Unsupported, match="not on a file system"):
        WRITERS[kind][0](view_of(STATE), Folder("memory://somewhere/a"))


# --- descriptions -----------------------------------------------------------------------------------------------------


def described(path: Path, text: str, **arrays: np.ndarray) -> View:
    safetensors.numpy.save_file(arrays, path, {"ckpt_jax": text})
    return _from_safetensors.view(folder(path))


def told(tree: Any, /, **changes: Any) -> str:
    return json.dumps(json.loads(_described.dumps(view_of(tree))) | changes)


@pytest.mark.parametrize(
    "arrays",
    [
        {"a": sample("int8", (3,))},
        {"a": sample("int8", (3,)), "b": sample("int8", (2,)), "c": sample("int8", (2,))},
        {"a": sample("int8", (3,)), "b": sample("int8", (1, 2))},
        {"a": sample("int8", (3,)), "b": sample("uint8", (2,))},
    ],
)
def test_a_description_that_does_not_fit_gives_way_to_the_arrays(tmp_path, arrays):
    text = told({"a": sample("int8", (3,)), "b": sample("int8", (2,)), "n": 3})
    found = described(tmp_path / "a", text, **arrays)
    assert _described.MISFIT in found.lacks
    assert same_arrays(values(found), arrays)
    assert set(found.leaves) == set(arrays)


LEAF = {"kind": "array", "dtype": "int8", "shape": [2]}
ONE = {"leaves": {"a": LEAF}, "tree": {"kind": "dict", "children": ["*"], "keys": ["a"]}}
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "another format": ({"format": "other"}, "format: expected ckpt_jax from 1.0"),
    "a step below nothing": ({"step": -1}, "step: expected a number of updates, found -1"),
    "a step that is text": ({"step": "1"}, "Expected `int | null`"),
    "other names in the tree": ({"tree": {"kind": "dict", "children": ["*"], "keys": ["b"]}}, "found 'b', not 'a'"),
    "more leaves in the tree": ({"tree": {"kind": "list", "children": ["*", "*"]}}, "found '0', not 'a'"),
    "no kind of node": ({"tree": {"kind": "set", "children": ["*"]}}, "'set' is no kind of node"),
    "a key twice": ({"tree": {"kind": "dict", "children": ["*", "*"], "keys": ["a", "a"]}}, "a dict with a key twice"),
    "another kind of leaf": ({"leaves": {"a": LEAF | {"kind": "code"}}}, "expected array, key, scalar or live"),
    "a key that is no key": ({"leaves": {"a": LEAF | {"kind": "key"}}}, "a: expected a dtype of numbers"),
    "a shape below nothing": ({"leaves": {"a": LEAF | {"shape": [-2]}}}, "a: expected a chunk shape that fits"),
    "a shape beyond memory": ({"leaves": {"a": LEAF | {"shape": [2**62]}}}, "a: expected a shape that an array can"),
    "very many axes": ({"leaves": {"a": LEAF | {"shape": [9] * 300_000}}}, "a: expected a shape that an array can"),
    "no value": ({"leaves": {"a": {"kind": "scalar", "dtype": "int", "value": "x"}}}, "expected the value of a scalar"),
    "no state": ({"leaves": {"a": {"kind": "live", "value": 3}}}, "expected the value of a live"),
    "metadata that is none": ({"metadata": {"$array": ["int8", [2**40], ""]}}, "not a packed value"),
    "metrics that are none": ({"metrics": {"$tuple": []}}, "metrics: expected a value for each name"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_description_that_contradicts_itself_is_damage(tmp_path, name):
    changes, text = LIES[name]
    assert described(tmp_path / "a", told({}, **ONE), a=sample("int8", (2,))).lacks == ("digests",)
    with pytest.raises(Corrupt, match="a description that contradicts itself") as caught:
        described(tmp_path / "a", told({}, **(ONE | changes)), a=sample("int8", (2,)))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "3", "{", "[" * 100_000, '{"tree":' + '{"kind":"list","children":[' * 9000, "\ud800"]
)
def test_a_description_that_is_none_is_damage(text):
    with pytest.raises(Corrupt, match="ckpt_jax: expected a description of the arrays"):
        _described.view("k", "p", {}, lambda name, box: np.zeros(()), description=text)


def test_a_newer_description_is_named(tmp_path):
    with pytest.raises(Unsupported, match=r"described in format 2\.0"):
        described(tmp_path / "a", told({}, version=[2, 0]))


def test_metadata_that_another_tool_has_changed_counts(tmp_path):
    _to_safetensors.write(view_of(STATE, metadata={"a": "1", "n": 2}), folder(tmp_path / "a.safetensors"))
    with safetensors.safe_open(tmp_path / "a.safetensors", "numpy") as file:
        names, metadata = file.keys(), file.metadata()
        arrays = {name: file.get_tensor(name) for name in names}
    safetensors.numpy.save_file(arrays, tmp_path / "b", metadata | {"a": "new", "more": "x"})
    found = _from_safetensors.view(folder(tmp_path / "b"))
    assert found.metadata == {"a": "new", "more": "x", "n": 2}
    assert found.tree == view_of(STATE).tree


# --- interrupted ------------------------------------------------------------------------------------------------------

CHILD = """
import sys, time
from pathlib import Path
import numpy as np
from ckpt_jax import _in_a_row
from ckpt_jax._storage import folder
from tests.test_to_files import WRITERS, large
_in_a_row.PIECE = 1 << 14
write, _, name = WRITERS[sys.argv[1]]
slow = float(sys.argv[3])
def told(done, total):
    Path(sys.argv[2], "done").write_text(str(done))
    time.sleep(slow)
write(large(int(sys.argv[4])), folder(Path(sys.argv[2]) / name), told=told)
"""


def large(seed: int = 0) -> View:
    return view_of({f"p{at}": sample("float32", (100, 100 + at), seed + at) for at in range(8)} | {"n": 1, "k": (1, 2)})


def child(kind: str, place: Path, slow: float = 0, seed: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CHILD, kind, str(place), str(slow), str(seed)])


def killed(kind: str, place: Path, after: int, seed: int = 0) -> None:
    """A process that is killed once it has written so many bytes."""
    (place / "done").write_text("0")
    process = child(kind, place, 0.01, seed)
    while int((place / "done").read_text() or 0) < after:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("kind", WRITERS)
def test_a_writer_that_is_killed_twice_is_gone_on_with_and_the_file_is_the_same(tmp_path, kind):
    write, read, name = WRITERS[kind]
    write(large(), folder(tmp_path / "whole" / name))
    place = tmp_path / "cut"
    place.mkdir()
    for after in (100_000, 250_000):
        killed(kind, place, after)
        assert not (place / name).exists()
        assert sum(map(len, entries(place / f"{name}.partial").values())) >= after
    before = entries(place / f"{name}.partial")
    assert child(kind, place).wait() == 0
    assert entries(place / name) == entries(tmp_path / "whole" / name)
    assert sorted(os.listdir(place)) == [name, "done"]
    assert before.keys() <= entries(place / name).keys()
    assert same_views(read(folder(place / name)), large())


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_left_of_another_source_is_never_taken(tmp_path, kind, seed):
    """Of seed 1, arrays are as long as ours; of seed 2 there are more of them, in more shards."""
    write, _, name = WRITERS[kind]
    other = large(1) if seed == 1 else view_of({f"p{at}": sample("float32", (200, 100), at) for at in range(12)})
    write(large(), folder(tmp_path / "whole" / name))
    write(other, folder(tmp_path / name))
    (tmp_path / name).rename(tmp_path / f"{name}.partial")
    write(large(), folder(tmp_path / name))
    assert entries(tmp_path / name) == entries(tmp_path / "whole" / name)


def test_what_is_there_already_is_not_written_again(tmp_path, monkeypatch):
    _to_npz.write(large(), folder(tmp_path / "a.npz"))
    size = (tmp_path / "a.npz").stat().st_size
    (tmp_path / "a.npz").rename(tmp_path / "a.npz.partial")
    os.truncate(tmp_path / "a.npz.partial", size - 30_000)
    wrote = []
    write = _in_a_row._write
    monkeypatch.setattr(_in_a_row, "_write", lambda fd, piece, *at: (wrote.append(len(piece)), write(fd, piece, *at)))
    monkeypatch.setattr(_in_a_row, "PIECE", 1 << 14)
    _to_npz.write(large(), folder(tmp_path / "a.npz"))
    assert 30_000 <= sum(wrote) < 30_000 + (1 << 14)


def test_damage_in_what_was_left_is_mended(tmp_path):
    _to_npz.write(large(), folder(tmp_path / "a.npz"))
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").unlink()
    for at in (0, 1000, len(whole) // 2, len(whole) - 1):
        (tmp_path / "a.npz.partial").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] + b"more")
        _to_npz.write(large(), folder(tmp_path / "a.npz"))
        assert (tmp_path / "a.npz").read_bytes() == whole
        (tmp_path / "a.npz").unlink()


def test_a_disk_that_gives_back_other_bytes_is_told(tmp_path, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, bytes(len(data)) if at > 100_000 else data, at))
    with pytest.raises(Corrupt, match="does not hold what was written") as caught:
        _to_safetensors.write(large(), folder(tmp_path / "a.safetensors"))
    assert {"p7"} <= {fault.place for fault in caught.value.faults} <= {f"p{at}" for at in range(8)}
    assert os.listdir(tmp_path) == ["a.safetensors.partial"]


def test_a_full_disk_leaves_what_there_is_to_be_gone_on_with(tmp_path, monkeypatch):
    def full(fd: int, data: memoryview, at: int) -> int:
        if at > 100_000:
            raise OSError(28, "No space left on device")
        return write(fd, data, at)

    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        _to_safetensors.write(large(), folder(tmp_path / "a"))
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["a.partial"]
    _to_safetensors.write(large(), folder(tmp_path / "a"))
    assert same_views(_from_safetensors.view(folder(tmp_path / "a")), large())


def test_a_source_of_other_lengths_is_told(tmp_path):
    view = large()
    short = dataclasses.replace(view, read=lambda name, box: view.read(name, box)[:-1])
    with pytest.raises(Corrupt, match="p0: expected 40,000 bytes of the source, found 39,600"):
        _to_safetensors.write(short, folder(tmp_path / "a"))


@pytest.mark.parametrize("kind", WRITERS)
def test_two_writers_of_one_file_do_not_mix(tmp_path, kind):
    write, _, name = WRITERS[kind]
    partial = tmp_path / f"{name}.partial"
    partial.mkdir() if "." not in name else partial.touch()
    fd = os.open(partial, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(Exists, match="another process is writing"):
        write(large(), folder(tmp_path / name))
    os.close(fd)
    write(large(), folder(tmp_path / name))


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("thing", ["link", "pipe", "other"])
def test_what_stands_in_the_way_of_the_unfinished_file_is_left_alone(tmp_path, kind, thing):
    write, _, name = WRITERS[kind]
    partial = tmp_path / f"{name}.partial"
    if thing == "link":
        (tmp_path / "to").mkdir() if "." not in name else (tmp_path / "to").touch()
        partial.symlink_to(tmp_path / "to")
    elif thing == "pipe":
        os.mkfifo(partial)
    else:
        partial.mkdir()
        (partial / "thesis.txt").write_text("mine")
    before = entries(tmp_path) if thing == "other" else os.listdir(tmp_path)
    with pytest.raises((Exists, NotADirectoryError)):
        write(large(), folder(tmp_path / name))
    assert (entries(tmp_path) if thing == "other" else os.listdir(tmp_path)) == before


@pytest.mark.parametrize("kind", WRITERS)
def test_progress_is_told_to_the_end_and_memory_is_bounded(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(_in_a_row, "PIECE", 1 << 16)
    write, _, name = WRITERS[kind]
    view = view_of(
        {"x": np.ones((2000, 1000), np.float32), "y": np.ones((3, 1), np.float32)}, chunk=lambda x: (1, *x.shape[1:])
    )
    found: list[tuple[int, int]] = []
    with memory(2 << 20):
        total = write(view, folder(tmp_path / name), told=lambda done, of: found.append((done, of))).bytes
    assert found[-1] == (total, total)
    assert [done for done, _ in found] == sorted(done for done, _ in found)
    assert {of for _, of in found} == {total}


def test_names_that_only_python_knows_come_back_from_the_file_alone(tmp_path):
    """Without a description, as other tools leave it, names stand for dicts."""
    _to_npz.write(view_of({"a": [sample("int8", (1,)), {"b": sample("int8", (2,))}]}), folder(tmp_path / "a.npz"))
    with np.load(tmp_path / "a.npz") as file:
        np.savez(tmp_path / "b.npz", **{name: file[name] for name in file.files if name != "ckpt_jax.json"})
    found = _from_numpy.view(folder(tmp_path / "b.npz"))
    assert list(found.leaves) == ["a.0", "a.1.b"]
    assert found.tree == _structure.Node(
        "dict",
        [_structure.Node("dict", ["*", _structure.Node("dict", ["*"], ["b"], "?")], ["0", "1"], "?")],
        ["a"],
        "?",
    )
    with pytest.raises(CheckpointError):
        _from_safetensors.view(folder(tmp_path / "b.npz"))
