"""torch's files and folders are read without torch; golden ones from torch 2.14 (`tests/golden_torch.py`)."""

import contextlib
import io
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_jax import _from_torch, _structure, _torch_file, _values, _zipped
from ckpt_jax._storage import Folder
from ckpt_jax._view import View
from ckpt_jax.errors import CheckpointError, Corrupt, Unsupported

from .bounded import bounded
from .rss import extra

GOLDEN = Path(__file__).parent / "golden" / "torch"
with np.load(GOLDEN / "expected.npz") as _file:
    EXPECTED = {tuple(key.split("|")): _file[key].tobytes() for key in _file.files}


def view(path: Path) -> View:
    return _from_torch.view(Folder(str(path)))


def whole(found: View, name: str) -> np.ndarray:
    return found.read(name, tuple((0, n) for n in found.leaves[name].shape))


def plain(found: View) -> Any:
    """All of a view as nested containers, with `dtype[shape]` for its arrays."""

    def leaf(name: str) -> Any:
        leaf = found.leaves[name]
        return str(leaf) if leaf.stored else _values.unpack(leaf.value)

    return _structure.build(found.tree, leaf)


# --- what torch wrote -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["dtypes.pt", "views.pt", "training.pt", "dcp"])
def test_every_tensor_comes_back_bit_for_bit(file: str):
    found = view(GOLDEN / file)
    wanted = {name: (dtype, shape, raw) for (of, name, dtype, shape), raw in EXPECTED.items() if of == file}
    assert wanted
    assert {name for name, leaf in found.leaves.items() if leaf.stored} == set(wanted)
    for name, (dtype, shape, raw) in wanted.items():
        leaf, values = found.leaves[name], whole(found, name)
        assert (leaf.dtype, str(list(leaf.shape))) == (dtype, shape)
        assert (values.dtype.name, values.shape, values.tobytes()) == (dtype, leaf.shape, raw), name


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_box_is_the_slice_however_a_tensor_lies(data: st.DataObject):
    found = view(GOLDEN / data.draw(st.sampled_from(["views.pt", "dcp"])))
    name = data.draw(st.sampled_from([name for name, leaf in found.leaves.items() if leaf.stored]))
    values = whole(found, name)
    box = tuple(tuple(sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))) for n in values.shape)
    assert found.read(name, box).tobytes() == values[tuple(slice(*b) for b in box)].tobytes()


def test_strided_tensors_are_read_in_small_parts_too(monkeypatch: pytest.MonkeyPatch):
    found = view(GOLDEN / "views.pt")
    wanted = {name: whole(found, name).tobytes() for name in found.leaves}
    monkeypatch.setattr(_torch_file._flat, "ROWS", 8)
    assert {name: whole(found, name).tobytes() for name in found.leaves} == wanted


def test_a_training_checkpoint_keeps_its_values_and_containers():
    found = plain(view(GOLDEN / "training.pt"))
    assert found["optimizer"]["param_groups"][0] == {
        "lr": 0.125,
        "betas": (0.5, 0.75),
        "eps": 1e-08,
        "weight_decay": 0.01,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
        "params": [0, 1, 2, 3, 4, 5],
    }
    assert found["optimizer"]["state"][0]["exp_avg"] == "float32[4,3]"
    assert found["model"]["1"]["running_mean"] == "float32[4]"
    rest = {key: value for key, value in found.items() if key not in ("model", "optimizer", "parameter", "rng")}
    assert rest == {
        "epoch": 3,
        "loss": 0.5,
        "done": False,
        "name": "naïve ✓",
        "blob": b"\x00\xff",
        "nothing": None,
        "huge": -(2**100),
        "complex": complex(-0.0, 1.5),
        "size": (2, 3),
        "by int": {0: [1, (2.0, "x")], 1: {}},
    }


def test_a_folder_of_two_processes_has_its_values_and_sequences():
    found = view(GOLDEN / "dcp")
    assert plain(found) == {
        "model": {"rows": "float32[7,5]", "columns": "bfloat16[4,6]"},
        "opt": {"state": [{"mu": "float64[6]"}, {"mu": "int64[]"}], "lr": 0.125},
        "whole": "uint16[3]",
        "words": ["a", ["b", 2]],
        "none": None,
    }
    assert found.lacks == ("digests", "sharding", "empty containers", "which sequences were tuples")
    assert found.leaves["model.rows"].chunk == (4, 5)


def test_what_torch_wrote_is_known_by_what_it_holds(tmp_path: Path):
    for name in ("dtypes.pt", "legacy.pt", "odd.pt", "script.pt", "dcp"):
        assert _from_torch.is_here(Folder(str(GOLDEN / name)))
    (tmp_path / "pickle").write_bytes(pickle.dumps({"a": 1}))
    with zipfile.ZipFile(tmp_path / "zip", "w") as file:
        file.writestr("a/b", "c")
    for name in ("pickle", "zip", "none", ""):
        assert not _from_torch.is_here(Folder(str(tmp_path / name)))
    assert not _from_torch.is_here(Folder(str(GOLDEN / "expected.npz")))
    assert not _from_torch.is_here(Folder("memory://a/b"))


def test_everything_that_is_no_tensor_is_refused_at_once_by_name():
    with pytest.raises(Unsupported) as caught:
        view(GOLDEN / "odd.pt")
    places = ["module", "sparse", "set", "meta", "half", "dtype", "conj", "quantized"]
    assert [fault.place for fault in caught.value.faults] == places
    assert "module: expected a tensor or a plain value, found an object of torch.nn.modules.linear.Linear" in str(
        caught.value
    )
    assert "hint: save plain tensors and values, as in torch.save(model.state_dict(), path)" in str(caught.value)


@pytest.mark.parametrize(("file", "says"), [("legacy.pt", "is too old"), ("script.pt", "is a program")])
def test_other_formats_of_torch_are_refused_by_name(file: str, says: str):
    with pytest.raises(Unsupported, match=says) as caught:
        view(GOLDEN / file)
    assert caught.value.hint


# --- files by hand ----------------------------------------------------------------------------------------------------


class Raw:
    """Something that pickles as a call, with names that need not exist."""

    def __init__(self, name: str, *args: Any):
        self.name, self.args = name, args


class Stored:
    """A storage, as torch's pickles know it."""

    def __init__(self, kind: str, key: str, count: int):
        self.id = ("storage", Raw(kind), key, "cpu", count)


def pickled(value: Any) -> bytes:
    """A value as an old protocol's stream, of which calls and storages are parts."""
    if isinstance(value, Raw):
        module, _, name = value.name.rpartition(".")
        head = b"c" + module.encode() + b"\n" + name.encode() + b"\n"
        return head + pickled(value.args) + b"R" if value.args else head
    if isinstance(value, Stored):
        return pickled(value.id) + b"Q"
    if isinstance(value, (tuple, list)):
        inner = b"".join(map(pickled, value))
        return b"(" + inner + b"t" if isinstance(value, tuple) else b"](" + inner + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(pickled(key) + pickled(child) for key, child in value.items()) + b"u"
    return pickle.dumps(value, 2)[2:-1]


def tensor(
    shape: Any, strides: Any, offset: Any = 0, count: int = 6, *, kind: str = "FloatStorage", key: str = "0"
) -> Raw:
    storage = Stored(f"torch.{kind}", key, count)
    return Raw("torch._utils._rebuild_tensor_v2", storage, offset, shape, strides, False, {})


def zipped(value: Any, *, storages: dict[str, bytes] | None = None, **members: bytes) -> bytes:
    """A file like torch's."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("x/data.pkl", b"\x80\x02" + (value if isinstance(value, bytes) else pickled(value) + b"."))
        for key, raw in (storages if storages is not None else {"0": np.arange(6, dtype=np.float32).tobytes()}).items():
            file.writestr(f"x/data/{key}", raw)
        for name, raw in members.items():
            file.writestr(f"x/{name}", raw)
    return data.getvalue()


def written(path: Path, data: bytes) -> Folder:
    path.write_bytes(data)
    return Folder(str(path))


def test_a_file_by_hand_is_read(tmp_path: Path):
    found = _from_torch.view(written(tmp_path / "x", zipped({"a": tensor((2, 3), (3, 1)), "b": [tensor((3,), (2,))]})))
    assert whole(found, "a").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert whole(found, "b.0").tolist() == [0, 2, 4]


def test_big_endian_files_are_read(tmp_path: Path):
    data = {"0": np.arange(6, dtype=">f4").tobytes()}
    place = written(
        tmp_path / "x",
        zipped({"a": tensor((2, 3), (3, 1)), "t": tensor((3, 2), (1, 3))}, storages=data, byteorder=b"big"),
    )
    found = _from_torch.view(place)
    assert whole(found, "a").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert whole(found, "t").tolist() == [[0, 3], [1, 4], [2, 5]]


def test_what_follows_a_zip64_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    found = _from_torch.view(written(tmp_path / "x", zipped({"a": tensor((6,), (1,))})))
    assert whole(found, "a").tolist() == [0, 1, 2, 3, 4, 5]


def test_names_with_dots_are_containers_unless_one_begins_another(tmp_path: Path):
    value = {"a": {"l.0.w": 1, "l.1": 2}, "b": {"l": 1, "l.w": 2}, "c": {5: 1, "x.y": 2}}
    found = plain(_from_torch.view(written(tmp_path / "x", zipped(value))))
    assert found == {"a": {"l": {"0": {"w": 1}, "1": 2}}, "b": {"l": 1, "l.w": 2}, "c": {5: 1, "x.y": 2}}


EVIL = [
    b"cos\nsystem\n(U\x04trueU%s\x85R.",
    b"}(U\x01acos\nsystem\n(U%stRu.",
    b"(U%sios\nsystem\n.",
    b"cbuiltins\neval\n(U%stR.",
    b"ctorch._utils\n_rebuild_tensor_v2\n(cos\nsystem\n(U%stRK\x00)))t\x85R.",
    b"ccollections\nOrderedDict\n)Rcos\nsystem\n(U%stRb.",
    b"ctorch.storage\n_load_from_bytes\n(U%stR.",
]


@pytest.mark.parametrize("stream", EVIL)
def test_code_in_a_file_is_refused_and_never_runs(stream: bytes, tmp_path: Path):
    victim = tmp_path / "made"
    command = f"touch {victim}".encode()
    place = written(tmp_path / "x", zipped(stream.replace(b"%s", bytes([len(command)]) + command)))
    assert _from_torch.is_here(place)
    with pytest.raises(CheckpointError):
        _from_torch.view(place)
    assert not victim.exists()


def test_the_code_above_runs_where_it_is_unpickled(tmp_path: Path):
    victim = tmp_path / "made"
    command = f"touch {victim}".encode()
    pickle.loads(EVIL[1].replace(b"%s", bytes([len(command)]) + command))
    assert victim.exists()


def test_code_in_a_folder_is_refused_and_never_runs(tmp_path: Path):
    victim = tmp_path / "made"
    stream = f"ctorch.distributed.checkpoint.metadata\nMetadata\n)R(cos\nsystem\n(S'touch {victim}'\ntRtb."
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + stream.encode())
    assert _from_torch.is_here(Folder(str(tmp_path)))
    with pytest.raises(CheckpointError, match="a tuple where a dict should be"):
        view(tmp_path)
    assert not victim.exists()


# --- hostile files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (tensor((7,), (1,)), "7 elements in a storage that has 6"),
        (tensor((2,), (6,)), "7 elements in a storage that has 6"),
        (tensor((2,), (1,), 5), "2 elements in a storage that has 1"),
        (tensor((2,), (1,), 2**70), "elements in a storage that has"),
        (tensor((2,), (1,), -1), "a tensor of the shape"),
        (tensor((-2,), (1,)), "an odd shape"),
        (tensor((2,), (-1,)), "an odd shape"),
        (tensor((True,), (1,)), "an odd shape"),
        (tensor((2**40, 2**40), (0, 0)), "is more than an array can have"),
        (tensor((2, 3), (3,)), "with the strides"),
        (tensor((1,) * 65, (1,) * 65), "without a shape"),
        (tensor("ab", (1,)), "without a shape"),
        (tensor((2,), (1,), count=7), "28 bytes, where there are 24"),
        (tensor((2,), (1,), count=-1), "without a storage"),
        (tensor((2,), (1,), key="1"), "where there are none"),
        (tensor((2,), (1,), key="../../0"), "where there are none"),
        (tensor((2**33,), (0,)), "very many times"),
        (tensor((2,), (1,), kind="QInt8Storage"), "torch.QInt8Storage"),
        (tensor((2,), (1,), kind="OtherStorage"), "torch.OtherStorage"),
        (Raw("torch._utils._rebuild_tensor_v2", 1, 0, (1,), (1,), False, {}), "without a storage"),
        (Raw("torch._utils._rebuild_tensor_v2", 1), "an object of torch._utils._rebuild_tensor_v2"),
        (Raw("torch._utils._rebuild_unheard_of", 1), "an object of torch._utils._rebuild_unheard_of"),
        (Raw("torch.storage._load_from_bytes", b"x"), "an object of torch.storage._load_from_bytes"),
        ({"a": Stored("torch.FloatStorage", "0", 6)}, "a storage without a tensor"),
        ({(1, Raw("a.b", 1)): 2}, "a dict with a key that is a tuple"),
        (b"]q\x00h\x00a.", "contains itself"),
        (b"]" * 10_000 + b"a" * 9_999 + b".", "levels"),
        (b"]q\x00" + b"".join(b"0](h%ch%ceq%c" % (n, n, n + 1) for n in range(100)) + b".", "values"),
        (b"](X\x00\x00\x10\x00" + b"x" * (1 << 20) + b"q\x00" + b"h\x00" * 1000 + b"e.", "bytes of text"),
        (b"no pickle", "what torch.save writes"),
        (b"", "what torch.save writes"),
    ],
)
def test_a_hostile_value_is_refused_in_bounded_time(value: Any, says: str, tmp_path: Path):
    place = written(tmp_path / "x", zipped(value))
    with bounded(), pytest.raises(CheckpointError) as caught:
        _from_torch.view(place)
    assert says in str(caught.value)
    assert str(place) in str(caught.value)


def test_text_that_is_decoded_many_times_is_refused(tmp_path: Path):
    """Bytes in an old protocol are text and a call: one text, and a megabyte for each three bytes of the stream."""
    text = b"X\x00\x00\x10\x00" + b"x" * (1 << 20) + b"q\x00X\x06\x00\x00\x00latin1\x86q\x010"
    stream = text + b"0](" + b"c_codecs\nencode\nq\x02h\x01R" + b"h\x02h\x01R" * 5000 + b"e."
    with bounded(), pytest.raises(CheckpointError, match="in all"):
        _from_torch.view(written(tmp_path / "x", zipped(stream.replace(b"q\x010", b"q\x01", 1))))


def directory(**changed: int) -> bytes:
    """A file whose directory says something else."""
    data = bytearray(zipped({"a": tensor((6,), (1,))}))
    entry, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    second = data.index(b"PK\x01\x02", entry + 1)
    places = {"method": ("<H", entry + 10), "size": ("<I", second + 20), "flags": ("<H", entry + 8)}
    places |= {"header": ("<I", second + 42), "count": ("<H", end + 10), "start": ("<I", end + 16)}
    places |= {"named": ("<H", second + 28), "bytes": ("<I", end + 12)}
    for name, value in changed.items():
        struct.pack_into(places[name][0], data, places[name][1], value)
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        directory(method=8),
        directory(flags=1),
        directory(size=2**31),
        directory(size=4),
        directory(header=2**31),
        directory(header=0),
        directory(count=9),
        directory(count=65535),
        directory(start=2**31),
        directory(start=0),
        directory(named=65535),
        directory(bytes=2**31),
        zipped({"a": 1})[:-1],
        zipped({"a": 1}) + b"x",
        zipped({"a": 1}).replace(b"x/data/0", b"../../0x"),
        zipped({"a": 1}).replace(b"x/data/0", b"x/data/\0"),
        zipped({"a": 1}, byteorder=b"middle"),
        zipped({"a": 1}, byteorder=b"x" * 100),
        zipped({"a": tensor((6,), (1,))}).replace(b"x/data/0", b"x/data/9", 1),
    ],
)
def test_a_hostile_zip_is_refused_with_its_place(data: bytes, tmp_path: Path):
    place = written(tmp_path / "x", data)
    with bounded():
        _from_torch.is_here(place)
        with pytest.raises(CheckpointError) as caught:
            _from_torch.view(place)
    assert str(place) in str(caught.value)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_twice_is_refused(tmp_path: Path):
    data = io.BytesIO(zipped({"a": 1}))
    with zipfile.ZipFile(data, "a") as file:
        file.writestr("x/data/0", b"other")
    with pytest.raises(CheckpointError, match="two members 'x/data/0'"):
        _from_torch.view(written(tmp_path / "x", data.getvalue()))


def test_two_trees_in_a_file_are_refused(tmp_path: Path):
    data = io.BytesIO(zipped({"a": 1}))
    with zipfile.ZipFile(data, "a") as file:
        file.writestr("y/data.pkl", b"N.")
    place = written(tmp_path / "x", data.getvalue())
    assert not _from_torch.is_here(place)
    with pytest.raises(CheckpointError, match=r"no data.pkl in it, or several"):
        _from_torch.view(place)


def test_a_directory_of_gigabytes_is_not_read(tmp_path: Path):
    """A sparse file, of which the end says that nearly all of it is the directory."""
    size = 3 << 30
    with open(tmp_path / "x", "wb") as file:
        file.write(zipped({"a": 1})[:100])
        file.seek(size)
        file.write(struct.pack("<4s4HIIH", b"PK\x05\x06", 0, 0, 9, 9, size - 100, 100, 0))
    with bounded(extra=256 << 20), pytest.raises(CheckpointError, match="a directory of 3,221,225,372 bytes"):
        view(tmp_path / "x")


def test_links_and_pipes_are_not_opened(tmp_path: Path):
    shutil.copy(GOLDEN / "views.pt", tmp_path / "x")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    os.mkfifo(tmp_path / "pipe")
    with bounded():
        for name in ("link", "pipe"):
            assert not _from_torch.is_here(Folder(str(tmp_path / name)))
            with pytest.raises(OSError, match="No such file"):
                view(tmp_path / name)


def test_a_file_that_became_shorter_is_damaged(tmp_path: Path):
    place = written(tmp_path / "x", zipped({"a": tensor((2, 3), (3, 1)), "t": tensor((3, 2), (1, 3))}))
    found = _from_torch.view(place)
    os.truncate(tmp_path / "x", 150)
    for name in ("a", "t"):
        with pytest.raises(Corrupt, match=f"{name}: expected"):
            whole(found, name)


def test_another_file_has_another_stamp(tmp_path: Path):
    first = _from_torch.view(written(tmp_path / "x", zipped({"a": 1}))).stamp
    assert first == view(tmp_path / "x").stamp
    assert first != _from_torch.view(written(tmp_path / "x", zipped({"abc": 1}))).stamp


@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_flipped_and_cut_files_end_in_errors_in_words(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    changed = bytearray((GOLDEN / data.draw(st.sampled_from(["views.pt", "training.pt", "odd.pt"]))).read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(changed) - 1), max_size=6)):
        changed[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(0, len(changed))) :]
    place = written(tmp_path_factory.mktemp("flip") / "x", bytes(changed))
    with contextlib.suppress(CheckpointError):
        _from_torch.is_here(place)
        found = _from_torch.view(place)
        for name, leaf in found.leaves.items():
            if leaf.stored and np.prod(leaf.shape) < 1 << 20:
                whole(found, name)


def test_a_large_file_is_read_with_the_memory_of_a_box(tmp_path: Path):
    """100 MB, of which the view takes some, a row its own, and a column of it little more."""
    value = {
        "a": tensor((100, 1 << 18), (1 << 18, 1), count=100 << 18),
        "t": tensor((1 << 18, 100), (1, 1 << 18), count=100 << 18),
    }
    written(tmp_path / "x", zipped(value, storages={"0": np.ones(100 << 18, np.float32).tobytes()}))
    before = "import numpy, ckpt_jax._from_torch as m; from ckpt_jax._storage import Folder"
    code = f"v = m.view(Folder({str(tmp_path / 'x')!r})); assert v.read('a', ((3, 4), (0, 1 << 18))).all()\n"
    code += "assert v.read('t', ((5, 8), (0, 100))).all(); assert v.read('a', ((0, 100), (7, 8))).all()"
    assert extra(before, code) < 30 << 20


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "dcp", tmp_path / "dcp"))


def test_a_file_that_is_gone_is_named(folder: Path):
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: expected a file, found none"):
        view(folder)


def test_a_file_behind_a_link_is_not_read(folder: Path):
    (folder / "__0_0.distcp").rename(folder / "other")
    (folder / "__0_0.distcp").symlink_to(folder / "other")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: expected a file, found none"):
        view(folder)


def test_a_file_that_is_cut_off_is_named_with_the_chunks_in_it(folder: Path):
    os.truncate(folder / "__1_0.distcp", 5000)
    with pytest.raises(CheckpointError, match=r"bytes [\d,]+ to [\d,]+ of __1_0.distcp, found 5,000") as caught:
        view(folder)
    assert len(caught.value.faults) > 1


def test_a_chunk_of_another_tensor_is_damage(folder: Path):
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    at = data.index(b"FloatStorage")
    data[at : at + 12] = b"IntStorage\n\x00"
    (folder / "__0_0.distcp").write_bytes(data)
    found = view(folder)
    with pytest.raises(Corrupt, match=r"__0_0.distcp is damaged:\n  model.rows at byte 0: expected float32\[4, 5\]"):
        whole(found, "model.rows")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"__0_0.distcp", b"../_0.distcp", "which leads out of the folder"),
        (b"__0_0.distcp", b"/_0_0.distcp", "which leads out of the folder"),
        (b"MetadataIndex", b"MetadataOther", "no MetadataIndex"),
        (b"TensorStorageMetadata", b"TensorStorageMetadatb", "no TensorStorageMetadata"),
        (b"float32", b"complex", "the dtype torch.complex"),
    ],
)
def test_metadata_that_says_something_else_is_refused(old: bytes, new: bytes, says: str, folder: Path):
    data = (folder / ".metadata").read_bytes()
    assert old in data
    (folder / ".metadata").write_bytes(data.replace(old, new))
    with pytest.raises(CheckpointError) as caught:
        view(folder)
    assert says in str(caught.value)


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_folders_end_in_errors_in_words(data: st.DataObject, folder: Path):
    name = data.draw(st.sampled_from([".metadata", ".metadata", "__0_0.distcp", "__1_0.distcp"]))
    whole_file = (GOLDEN / "dcp" / name).read_bytes()
    changed = bytearray(whole_file)
    for at in data.draw(st.lists(st.integers(0, len(changed) - 1), max_size=6)):
        changed[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(0, len(changed))) :]
    (folder / name).write_bytes(changed)
    try:
        with contextlib.suppress(CheckpointError):
            _from_torch.is_here(Folder(str(folder)))
            found = view(folder)
            for leaf in (leaf for leaf in found.leaves if found.leaves[leaf].stored):
                if np.prod(found.leaves[leaf].shape) < 1 << 20:
                    whole(found, leaf)
    finally:
        (folder / name).write_bytes(whole_file)


def test_a_members_place_is_asked_of_itself_too(tmp_path: Path):
    part = _zipped.whole(Folder(str(GOLDEN)), "views.pt")
    members = _zipped.members(part)
    for name, member in members.items():
        assert part.read(member.header + 30, len(name)) == name.encode()
        assert _zipped.offset(part, name, member) % 64 == 0
