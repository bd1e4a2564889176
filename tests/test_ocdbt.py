"""The tree of keys, read here as TensorStore reads it."""

import os
import string
import tracemalloc
from unittest import mock

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_jax import _ocdbt, _reading, _storage, _writing
from ckpt_jax._manifest import Leaf
from ckpt_jax._ocdbt import NODE_MAGIC, Tree, Value
from ckpt_jax._ocdbt_writer import _framed, _varints, write_tree


def written(path, values: dict[bytes, bytes], **config) -> tuple[ts.KvStore, Tree]:
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}, "config": {"compression": None} | config}
    store = ts.KvStore.open(spec).result()
    with ts.Transaction() as transaction:
        for key, value in values.items():
            store.with_transaction(transaction)[key] = value
    place = _storage.folder(path)
    return store, Tree(place, place.files())


def agree(path, store: ts.KvStore, tree: Tree) -> int:
    """Whether all values are found where they are; gives the number of keys."""
    keys = store.list().result()
    assert {key.decode() for key in keys} == dict(tree.files()).keys()
    for key in keys:
        value = tree.find(key.decode())
        assert value is not None
        data = value.data
        if data is None:
            data = (path / value.file).read_bytes()[value.offset : value.offset + value.length]
        assert data == store[key]
    return len(keys)


@pytest.mark.parametrize("node_bytes", [8 << 20, 2000, 300], ids=["one node", "some", "a deep tree"])
@pytest.mark.parametrize("inline", [0, 100, 1000])
def test_every_value_is_found_where_tensorstore_has_it(tmp_path, node_bytes, inline):
    values = {f"layer{i}/{'w' * (i % 7)}/c/{i}".encode(): bytes([i % 256]) * (i % 300) for i in range(600)}
    store, tree = written(tmp_path, values, max_inline_value_bytes=inline, max_decoded_node_bytes=node_bytes)
    assert agree(tmp_path, store, tree) == 600
    for key in ("", "a", "layer", "layer0/c/", "layer0//c/1", "layer1/w/c/1x", "zzz"):
        assert tree.find(key) is None


def test_what_was_overwritten_or_deleted_is_not_found(tmp_path):
    store, _ = written(tmp_path, {b"a": b"1", b"b": b"2", b"c": b"3" * 500})
    store[b"a"] = b"another"
    del store[b"b"]
    place = _storage.folder(tmp_path)
    tree = Tree(place, place.files())
    assert agree(tmp_path, store, tree) == 2
    assert tree.find("b") is None


def test_an_empty_tree_has_nothing(tmp_path):
    store, _ = written(tmp_path, {b"a": b"1"})
    del store[b"a"]
    place = _storage.folder(tmp_path)
    assert Tree(place, place.files()).find("a") is None
    assert Tree(_storage.folder(tmp_path / "nowhere"), []).find("a") is None


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(string.printable + "éß", min_size=1, max_size=12), st.binary(max_size=40), min_size=1))
def test_any_keys(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("tree")
    values = {key.encode(): value for key, value in values.items()}
    store, tree = written(path, values, max_inline_value_bytes=20, max_decoded_node_bytes=200)
    assert agree(path, store, tree) == len(values)


def test_what_is_compressed_is_not_read(tmp_path):
    _, tree = written(tmp_path, {b"a" * 100: b"b" * 90}, compression={"id": "zstd"})
    assert tree.find("a" * 100) is None
    assert list(tree.files()) == []
    assert tree.foreign


def test_several_processes_trees_are_one(tmp_path):
    """Their data files keep their places: `ocdbt.process_N/d/…`."""
    for process in range(3):
        values = {b"%d/%d" % (process, i): b"x" * 2000 for i in range(50)}
        written(tmp_path / f"ocdbt.process_{process}", values, **_writing._CONFIG)
    place = _storage.folder(tmp_path)
    _writing.merge(place, [place / f"ocdbt.process_{i}" for i in range(3)])
    tree = Tree(place, place.files())
    assert agree(tmp_path, _reading.open_store(place), tree) == 150
    value = tree.find("2/7")
    assert value is not None
    assert value.file.startswith("ocdbt.process_2/d/")


def test_no_file_is_opened_but_those_that_it_may(tmp_path):
    """A stranger's tree may point anywhere."""
    written(tmp_path, {b"a": b"1" * 4096}, max_inline_value_bytes=0)
    assert Tree(_storage.folder(tmp_path), ["manifest.ocdbt"]).find("a") is None


@pytest.mark.parametrize("file", ["manifest", "data"])
def test_no_flip_or_cut_gives_a_wrong_value(tmp_path, file):
    store, tree = written(tmp_path, {f"k{i}".encode(): os.urandom(30) for i in range(40)}, max_decoded_node_bytes=400)
    expected = {f"k{i}": tree.find(f"k{i}").data for i in range(40)}  # pyright: ignore[reportOptionalMemberAccess]
    assert agree(tmp_path, store, tree) == 40
    place = _storage.folder(tmp_path)
    paths = [tmp_path / "manifest.ocdbt"] if file == "manifest" else sorted(tmp_path.glob("d/*"))
    seen = 0
    for path in paths:
        whole = path.read_bytes()
        damaged = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole))]
        damaged += [whole[:at] for at in range(0, len(whole), 7)]
        for data in damaged:
            path.write_bytes(data)
            tree = Tree(place, place.files())
            for key, value in expected.items():
                found = tree.find(key)
                assert found is None or found.data == value
                seen += found is None
        path.write_bytes(whole)
    assert seen > 100


def test_a_long_beginning_that_many_keys_share_is_not_written_out(tmp_path):
    """100 kB that say 3 GB."""
    size, many = 60_000, 50_000
    counts = [_varints(numbers) for numbers in ([0, many], [size] * (many - 1), [size] + [1] * (many - 1))]
    node = _framed(NODE_MAGIC, [b"\0", *counts, b"a" * (size + many - 1), _varints([0] * many), bytes(many)])
    (tmp_path / "tree").write_bytes(node)
    tracemalloc.start()
    with pytest.raises(ValueError, match="more than a node holds"):
        _ocdbt._node(node, _ocdbt._Reference("tree", "", 0, len(node), 0))
    assert tracemalloc.get_traced_memory()[1] < 3 * _ocdbt.NODE_BYTES
    tracemalloc.stop()


def test_an_offset_that_no_system_call_takes_is_not_asked_for(tmp_path):
    place = _storage.folder(tmp_path)
    (tmp_path / "tree").write_bytes(b"")
    for offset in (2**63 - 1, 2**63, 2**64 - 1):
        assert Tree(place, ["tree"])._node(_ocdbt._Reference("tree", "", offset, 100, 0)) is None


def test_what_many_nodes_point_to_is_listed_once(tmp_path, monkeypatch):
    """Ten floors of ten nodes that are all the same one: ten billion ways, eleven nodes."""
    written(tmp_path, {b"a": b"1"})
    place = _storage.folder(tmp_path)
    tree = Tree(place, place.files())
    leaf = tree._root
    monkeypatch.setattr(tree, "_root", _ocdbt._Reference("d/x", "", 0, 0, 10))
    load = tree._load

    def below(at):
        if at.height == 0:
            return load(leaf)
        child = _ocdbt._Reference("d/x", "", 0, 0, at.height - 1)
        return _ocdbt._Interior([b"%d" % i for i in range(10)], [b""] * 10, [child] * 10)

    monkeypatch.setattr(tree, "_load", below)
    assert [key for key, _ in tree.files()] == ["a"]


# --- written ----------------------------------------------------------------------------------------------------------


def write(path, values: dict[bytes, bytes], *, inline=20, node_bytes=8 << 20) -> None:
    """Values in two data files and in the tree."""
    place = _storage.folder(path)
    place.make("d")
    where, files = {}, [b"", b""]
    for number, (key, value) in enumerate(values.items()):
        if len(value) > inline:
            where[key] = Value(f"d/{number % 2}", len(files[number % 2]), len(value))
            files[number % 2] += value
        else:
            where[key] = Value("", data=value)
    for number, data in enumerate(files):
        place.write(f"d/{number}", data)
    write_tree(place, "d/tree", where, inline, node_bytes)


KEYS = st.text(string.printable + "éß", min_size=1, max_size=12).map(str.encode)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KEYS, st.binary(max_size=40)), st.sampled_from([40, 200, 8 << 20]))
def test_tensorstore_reads_what_we_write(tmp_path_factory, values, node_bytes):
    """In one node, and in a tree of two floors; as it is, and merged."""
    top = tmp_path_factory.mktemp("tree")
    path = top / "ocdbt.process_0"
    write(path, values, node_bytes=node_bytes)
    place = _storage.folder(path)
    store = ts.KvStore.open({"driver": "ocdbt", "base": place.spec()}).result()
    assert {key: store[key] for key in store.list().result()} == values
    assert agree(path, store, Tree(place, place.files())) == len(values)
    with mock.patch.dict(_writing._CONFIG, max_inline_value_bytes=20, max_decoded_node_bytes=node_bytes):
        _writing.merge(_storage.folder(top), [place])
    merged = ts.KvStore.open({"driver": "ocdbt", "base": _storage.folder(top).spec()}).result()
    assert {key: merged[key] for key in merged.list().result()} == values


def test_a_key_space_that_we_wrote_can_be_written_on_by_tensorstore(tmp_path):
    """Its generation, statistics and limits are such that it goes on from them."""
    values = {b"%04d" % i: bytes([i % 256]) * (i % 50) for i in range(300)}
    write(tmp_path, values, node_bytes=2000)
    store = ts.KvStore.open({"driver": "ocdbt", "base": _storage.folder(tmp_path).spec()}).result()
    store[b"0007"] = b"another"
    del store[b"0008"]
    again = ts.KvStore.open({"driver": "ocdbt", "base": _storage.folder(tmp_path).spec()}).result()
    del values[b"0008"]
    assert {key: again[key] for key in again.list().result()} == values | {b"0007": b"another"}


def test_large_numbers_are_written_as_they_are_read(tmp_path):
    """Offsets beyond 2^32 need no file of that size to be told."""
    place = _storage.folder(tmp_path)
    place.make("d")
    far = {f"k{i}".encode(): Value("d/0", 2**i, 2**i - 1) for i in range(1, 63)}
    write_tree(place, "d/tree", far, 0, 8 << 20)
    tree = Tree(place, ["manifest.ocdbt", "d/tree"])
    assert {key: tree.find(key.decode()) for key in far} == far


# --- a chunk's bytes --------------------------------------------------------------------------------------------------


def test_what_others_may_change_is_copied_before_it_is_digested():
    """Else what is digested may not be what is written, and the checkpoint could not be read."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    leaf = Leaf("array", dtype="float32", shape=(2, 3), chunk=(2, 3))
    data = _writing._laid_out(values, leaf, bytearray(24))
    assert bytes(data) == values.tobytes()
    assert not np.shares_memory(np.frombuffer(data, np.uint8), values)


def test_a_bool_is_0_or_1_on_disk():
    """NumPy takes any byte; TensorStore refuses a whole array for one that is another."""
    values = np.array([0, 1, 2, 255], np.uint8).view(bool)
    leaf = Leaf("array", dtype="bool", shape=(4,), chunk=(4,))
    assert bytes(_writing._laid_out(values, leaf, bytearray(4))) == bytes([0, 1, 1, 1])


@pytest.mark.parametrize(
    "values",
    [
        np.arange(6, dtype=np.float32).reshape(3, 2).T,
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2],
        np.arange(4, dtype=np.float32).reshape(2, 2),
    ],
    ids=["Fortran order", "big-endian", "strided", "an edge"],
)
def test_what_lies_otherwise_than_on_disk_is_laid_out(values):
    leaf = Leaf("array", dtype="float32", shape=(2, 3), chunk=(2, 3))
    data = _writing._laid_out(values, leaf, bytearray(b"x" * 24))
    expected = np.zeros((2, 3), "<f4")
    expected[:, : values.shape[1]] = values
    assert bytes(data) == expected.tobytes()
