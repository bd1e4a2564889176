"""NumPy's files as NumPy writes them, read where they lie; and hostile ones."""

import io
import os
import random
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_jax import _flat, _from_numpy, _structure, _zip
from ckpt_jax._storage import Folder, folder
from ckpt_jax._view import View
from ckpt_jax.errors import CheckpointError, Corrupt, Unsupported
from tests.bounded import bounded
from tests.views import memory, same_arrays, sample, values

SAVE = {"stored": np.savez, "deflated": np.savez_compressed}


def read(path: Path) -> View:
    assert _from_numpy.is_here(folder(path))
    return _from_numpy.view(folder(path))


def npy(array: Any, header: bytes | None = None, version: tuple[int, int] = (1, 0)) -> bytes:
    """An array as a file, perhaps with another header."""
    if header is None:
        file = io.BytesIO()
        np.save(file, array)
        return file.getvalue()
    length = len(header).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + header + array.tobytes()


def archive(path: Path, members: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in members:
            file.writestr(name, data)
    return path


def faults(path: Path, kind: type[CheckpointError] = CheckpointError) -> dict[str, str]:
    """What is wrong with a file, by place."""
    with bounded(), pytest.raises(kind) as caught:
        values(read(path))
    assert str(path) in str(caught.value)
    return {fault.place: str(fault) for fault in caught.value.faults}


# --- files as NumPy writes them ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", SAVE)
@pytest.mark.parametrize("dtype", _from_numpy.NAMED)
def test_every_dtype_of_numbers_is_read_in_every_bit(tmp_path, dtype, save):
    wanted = {"x": sample(dtype, (3, 5)), "none": sample(dtype, (0, 4)), "one": sample(dtype, ())}
    SAVE[save](tmp_path / "a.npz", **wanted)
    found = read(tmp_path / "a.npz")
    assert same_arrays(values(found), wanted)
    assert {str(leaf) for leaf in found.leaves.values()} == {f"{dtype}[3,5]", f"{dtype}[0,4]", f"{dtype}[]"}
    np.save(tmp_path / "a.npy", wanted["x"])
    assert same_arrays(values(read(tmp_path / "a.npy")), {_structure.ROOT: wanted["x"]})


@pytest.mark.parametrize("save", SAVE)
@pytest.mark.parametrize("dtype", _from_numpy.NAMED)
def test_big_endian_and_fortran_order_are_read_in_every_bit(tmp_path, dtype, save):
    wanted = {"x": sample(dtype, (3, 4, 5)), "y": sample(dtype, (7,)), "z": sample(dtype, (2, 0))}
    turned = {name: np.asfortranarray(x).astype(np.dtype(dtype).newbyteorder(">")) for name, x in wanted.items()}
    SAVE[save](tmp_path / "a.npz", **turned)
    found = read(tmp_path / "a.npz")
    assert same_arrays(values(found), wanted)
    assert np.array_equal(
        found.read("x", ((1, 2), (0, 4), (2, 5))), wanted["x"][1:2, :, 2:], equal_nan=dtype[0] in "fc"
    )


def test_a_large_array_in_fortran_order_is_cut_where_it_lies_in_a_row(tmp_path):
    wanted = sample("float32", (3000, 3000))
    np.save(tmp_path / "a.npy", np.asfortranarray(wanted))
    found = read(tmp_path / "a.npy")
    (leaf,) = found.leaves.values()
    assert leaf.chunk == (3000, 1000)
    assert same_arrays(values(found), {_structure.ROOT: wanted})


def test_folders_and_dots_in_names_become_containers(tmp_path):
    wanted = {"a.b.c": sample("int8", (1,)), "a.b.d": sample("int8", (2,)), "e": sample("int8", (3,))}
    archive(tmp_path / "a.npz", [(name, npy(wanted[name])) for name in wanted])
    (tmp_path / "a/b").mkdir(parents=True)
    for file, name in (("a/b/c.npy", "a.b.c"), ("a/b.d.npy", "a.b.d"), ("e.npy", "e")):
        np.save(tmp_path / file, wanted[name])
    (tmp_path / "a/notes.txt").write_text("other files are left alone")
    archive(tmp_path / "z", [(f, (tmp_path / f).read_bytes()) for f in ("a/b/c.npy", "a/b.d.npy", "e.npy")])
    for path in (tmp_path, tmp_path / "z"):
        found = read(path)
        assert same_arrays(values(found), wanted)
        assert isinstance(found.tree, _structure.Node)
        assert sorted(found.tree.keys) == ["a", "e"]
        assert "digests" in found.lacks


def test_a_stored_array_is_read_in_place_and_a_deflated_one_is_unpacked_once(tmp_path, monkeypatch):
    wanted = {"x": np.zeros((1000, 3000), np.float32), "y": sample("int8", (10,))}
    unpacked: list[str] = []
    unpack = _zip.Unpacked._unpack

    def noted(self: _zip.Unpacked, member: _zip.Member, base: int) -> None:
        unpacked.append(member.name)
        unpack(self, member, base)

    monkeypatch.setattr(_zip.Unpacked, "_unpack", noted)
    np.savez(tmp_path / "a.npz", **wanted)
    assert same_arrays(values(read(tmp_path / "a.npz")), wanted)
    assert unpacked == []
    np.savez_compressed(tmp_path / "b.npz", **wanted)
    found = read(tmp_path / "b.npz")
    assert unpacked == []
    with memory(8 << 20):
        for at in range(100):
            assert not found.read("x", ((at, at + 1), (0, 3000))).any()
    assert unpacked == ["x.npy"]
    assert same_arrays(values(found), wanted)
    assert unpacked == ["x.npy", "y.npy"]


def test_an_archive_of_very_many_members_is_read(tmp_path):
    data = npy(np.arange(2))
    archive(tmp_path / "a.npz", [(f"p{at}.npy", data) for at in range(66_000)])  # Their number takes more than 16 bits.
    found = read(tmp_path / "a.npz")
    assert len(found.leaves) == 66_000
    assert found.read("p65999", ((0, 2),)).tolist() == [0, 1]


def test_headers_as_other_tools_write_them_are_read(tmp_path):
    wanted = np.arange(6, dtype=np.int32)
    headers = [
        (b"{'shape': (2, 3), 'descr': '<i4', 'fortran_order': False}", (1, 0)),
        (b'{"descr": "<i4", "fortran_order": False, "shape": (2L, 3L), }   \n', (2, 0)),
        (b"{'descr':'<i4','fortran_order':False,'shape':( 2 , 3 , ),}\n", (3, 0)),
    ]
    for header, version in headers:
        (tmp_path / "a.npy").write_bytes(npy(wanted, header, version))
        assert same_arrays(values(read(tmp_path / "a.npy")), {_structure.ROOT: wanted.reshape(2, 3)})


def test_what_is_no_array_in_an_archive_is_named(tmp_path):
    archive(tmp_path / "a.npz", [("x.npy", npy(np.arange(3))), ("notes.txt", b"hi"), ("sub/", b"")])
    found = read(tmp_path / "a.npz")
    assert list(found.leaves) == ["x"]
    assert "what it holds besides arrays: notes.txt" in found.lacks


def test_other_files_are_not_taken_for_it(tmp_path):
    (tmp_path / "text").write_text("x.npy")
    archive(tmp_path / "pt", [("archive/data.pkl", b"x"), ("archive/data/0", b"y")])
    (tmp_path / "broken").write_bytes(b"PK\3\4" + b"x.npy" * 20)
    assert not any(_from_numpy.is_here(folder(tmp_path / name)) for name in ("text", "pt", "broken", "none"))
    assert not _from_numpy.is_here(folder(tmp_path))
    assert not _from_numpy.is_here(Folder("memory://somewhere"))


def test_a_file_is_known_by_what_it_holds(tmp_path):
    archive(tmp_path / "a", [("x.npy", npy(np.arange(3)))])
    (tmp_path / "b").write_bytes(npy(np.arange(3)))
    assert same_arrays(values(read(tmp_path / "a")), {"x": np.arange(3)})
    assert same_arrays(values(read(tmp_path / "b")), {_structure.ROOT: np.arange(3)})


def test_the_stamp_changes_with_the_file(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(3))
    before = read(tmp_path).stamp
    assert read(tmp_path).stamp == before
    np.save(tmp_path / "a.npy", np.arange(4))
    assert read(tmp_path).stamp != before


# --- what is refused --------------------------------------------------------------------------------------------------

OTHERS = {
    "objects": np.array([{}, 1], dtype=object),
    "text": np.array(["a", "b"]),
    "bytes": np.array([b"a", b"b"]),
    "dates": np.array(["2020-01-01"], "M8[D]"),
    "times": np.array([3], "m8[s]"),
    "records": np.zeros(2, [("a", "<f4"), ("b", "<i4")]),
    "bytes without a meaning": np.zeros(2, "V2"),
}


def test_what_is_no_plain_number_is_refused_by_name_all_at_once_and_never_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", allow_pickle=True, x=np.arange(3), **OTHERS)
    found = faults(tmp_path / "a.npz", Unsupported)
    assert set(found) == {f"{name}.npy" for name in OTHERS}
    for name in OTHERS:
        assert "expected a dtype of plain numbers" in found[f"{name}.npy"]
        assert name in found[f"{name}.npy"].partition("found")[2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4"])
@pytest.mark.filterwarnings("ignore:Custom dtypes are saved")
def test_a_dtype_that_npy_cannot_name_is_refused(tmp_path, dtype):
    np.save(tmp_path / "a.npy", sample(dtype, (3,)))
    assert "a.npy" in faults(tmp_path / "a.npy", Unsupported)


def test_longdouble_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(2, np.longdouble))
    assert "found '<f16': another" in faults(tmp_path / "a.npy", Unsupported)["a.npy"]


HEADERS = {
    "no dict": b"(1, 2)",
    "a call": b"{'descr': '<i4', 'fortran_order': False, 'shape': (exit(),)}",
    "an expression": b"{'descr': '<i4', 'fortran_order': False, 'shape': (1+1,)}",
    "a key too many": b"{'descr': '<i4', 'fortran_order': False, 'shape': (2,), 'more': 1}",
    "a key twice": b"{'descr': '<i4', 'descr': '<i4', 'fortran_order': False, 'shape': (2,)}",
    "a key too few": b"{'descr': '<i4', 'shape': (2,)}",
    "another order": b"{'descr': '<i4', 'fortran_order': 'no', 'shape': (2,)}",
    "a shape below nothing": b"{'descr': '<i4', 'fortran_order': False, 'shape': (-2,)}",
    "a shape beyond 64 bits": b"{'descr': '<i4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
    "a shape beyond memory": b"{'descr': '<i4', 'fortran_order': False, 'shape': (4611686018427387904, 0)}",
    "a shape with holes": b"{'descr': '<i4', 'fortran_order': False, 'shape': (1,,2)}",
    "very many axes": b"{'descr': '<i4', 'fortran_order': False, 'shape': (" + b"1," * 65 + b")}",
    "parentheses": b"{'descr': '<i4', 'fortran_order': False, 'shape': " + b"(" * 3000 + b"}",
    "more elements than bytes": b"{'descr': '<i4', 'fortran_order': False, 'shape': (3,)}",
    "fewer elements than bytes": b"{'descr': '<i4', 'fortran_order': False, 'shape': (1,)}",
    "a long header": b" " * 60000,
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("save", SAVE)
def test_a_header_that_cannot_be_is_told(tmp_path, name, save):
    data = npy(np.arange(2, dtype=np.int32), HEADERS[name])
    (tmp_path / "a.npy").write_bytes(data)
    assert "expected an array in NumPy's format, found " in faults(tmp_path / "a.npy")["a.npy"]
    path = archive(tmp_path / "a.npz", [("x.npy", data)], {"stored": 0, "deflated": 8}[save])
    assert "expected an array in NumPy's format, found " in faults(path)["x.npy"]


@pytest.mark.parametrize("version", [(0, 0), (1, 1), (4, 0), (255, 255)])
def test_another_version_is_told(tmp_path, version):
    header = b"{'descr': '<i4', 'fortran_order': False, 'shape': (2,)}"
    (tmp_path / "a.npy").write_bytes(npy(np.arange(2, dtype=np.int32), header, version))
    assert f"found version {version[0]}.{version[1]}" in faults(tmp_path / "a.npy")["a.npy"]


def test_all_faults_of_a_folder_are_told_at_once(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "a.npy").write_bytes(b"")
    (tmp_path / "in/b.npy").write_bytes(b"\x93NUMPY\1")
    (tmp_path / "c.npy").write_bytes(npy(np.arange(3))[:-1])
    np.save(tmp_path / "in/d.npy", np.arange(2))
    np.save(tmp_path / "in.d.npy", np.arange(2))
    np.save(tmp_path / "e.npy", np.array(["text"]))
    (tmp_path / "f.npy").symlink_to(tmp_path / "c.npy")
    os.mkfifo(tmp_path / "g.npy")
    found = faults(tmp_path)
    assert set(found) == {"a.npy", "in/b.npy", "c.npy", "in/d.npy", "e.npy", "f.npy", "g.npy"}
    assert "found a link: give the file that it leads to, or make a copy" in found["f.npy"]
    assert found["in/d.npy"] == "in/d.npy: expected a name of its own, found another array is in.d too"


def test_a_name_that_is_no_utf8_is_told(tmp_path):
    (tmp_path / os.fsdecode(b"\xff.npy")).write_bytes(npy(np.arange(3)))
    assert "expected a name in UTF-8" in faults(tmp_path)[r"'\udcff.npy'"]


def test_links_to_folders_are_not_followed(tmp_path):
    (tmp_path / "to").mkdir()
    np.save(tmp_path / "to/a.npy", np.arange(3))
    (tmp_path / "from").mkdir()
    np.save(tmp_path / "from/b.npy", np.arange(3))
    (tmp_path / "from/link").symlink_to(tmp_path / "to")
    assert list(read(tmp_path / "from").leaves) == ["b"]


# --- hostile archives -------------------------------------------------------------------------------------------------


def edited(path: Path, **fields: int | bytes) -> Path:
    """An archive of one member, of which its directory says something else."""
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\1\2")
    places = {"flags": (8, "<H"), "method": (10, "<H"), "crc": (16, "<L"), "packed": (20, "<L"), "size": (24, "<L")}
    places |= {"start": (42, "<L")}
    for name, value in fields.items():
        struct.pack_into(places[name][1], data, at + places[name][0], value)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"flags": 1}, "expected a member that is stored or deflated, found an encrypted one"),
        ({"method": 12}, "found one packed by method 12"),
        ({"size": 1000}, "found 152 bytes that are to be 1,000"),
        ({"packed": 100_000, "size": 100_000}, "expected 100,000 bytes, found 152 before the directory"),
        ({"packed": 140, "size": 140}, "found 140 bytes, where a header and int64[3] take 152"),
        ({"packed": 100, "size": 100}, "found a header of 128 bytes"),
        ({"start": 5}, "expected a member that begins at 0 or behind it, found none at 5"),
        ({"start": 2**32 - 1}, "expected a member that begins at 0 or behind it, found none at 4,294,967,295"),
        ({"packed": 2**32 - 1, "size": 2**32 - 1}, "expected 4,294,967,295 bytes, found 152"),
    ],
)
def test_a_directory_that_lies_is_told(tmp_path, fields, text):
    path = archive(tmp_path / "a.npz", [("x.npy", npy(np.arange(3)))])
    assert len(npy(np.arange(3))) == 152
    assert text in faults(edited(path, **fields))["x.npy"]


def test_deflated_bytes_that_become_more_than_they_should_are_not_unpacked_further(tmp_path):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000,)}"
    bomb = npy(np.zeros(50 << 20, np.uint8), header)
    path = archive(tmp_path / "a.npz", [("x.npy", bomb)], zipfile.ZIP_DEFLATED)
    assert "52,428" in faults(path)["x.npy"]  # The directory tells its true size, its header does not.
    edited(path, size=len(header) + 10 + 1000)
    written = 0

    def counted(fd: int, data: bytes, at: int) -> int:
        nonlocal written
        written += len(data)
        return write(fd, data, at)

    write, os.pwrite = os.pwrite, counted
    try:
        assert faults(path)["x.npy"] == "x.npy: expected 1,068 bytes, found more"
    finally:
        os.pwrite = write
    assert written <= 1068


def test_a_size_that_no_deflated_bytes_can_have_is_told_before_they_are_unpacked(tmp_path):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (4000000000,)}"
    path = archive(tmp_path / "a.npz", [("x.npy", npy(np.zeros(9, np.uint8), header))], zipfile.ZIP_DEFLATED)
    edited(path, size=len(header) + 10 + 4_000_000_000)
    assert "bytes that are to become 4,000,000,074" in faults(path)["x.npy"]


def test_deflated_bytes_that_become_less_or_others_are_told(tmp_path):
    array = sample("uint8", (100_000,))
    data = npy(array)
    path = archive(tmp_path / "a.npz", [("x.npy", data)], zipfile.ZIP_DEFLATED)
    edited(path, crc=0)
    found = faults(path)["x.npy"]
    assert (
        found
        == f"x.npy: expected {len(data):,} bytes with the CRC 00000000, found {len(data):,} with {zlib.crc32(data):08x}"
    )
    short = npy(np.zeros(100, np.uint8), b"{'descr': '|u1', 'fortran_order': False, 'shape': (200,)}")
    path = archive(tmp_path / "b.npz", [("x.npy", short)], zipfile.ZIP_DEFLATED)
    edited(path, size=len(short) + 100)
    assert f"found {len(short):,} with" in faults(path)["x.npy"]


def test_deflated_bytes_that_are_damaged_are_told(tmp_path):
    path = archive(tmp_path / "a.npz", [("x.npy", npy(sample("uint8", (100_000,)) % 7))], zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    data[20_000:20_100] = bytes(100)
    path.write_bytes(data)
    assert "x.npy" in faults(path)


@pytest.mark.parametrize(
    ("file", "name"), [("../x.npy", "../x.npy"), ("/etc/x.npy", "/etc/x.npy"), ("a/../x.npy", "a/../x.npy")]
)
def test_names_that_lead_out_are_told(tmp_path, file, name):
    path = archive(tmp_path / "a.npz", [("y.npy", npy(np.arange(3))), (file, npy(np.arange(3)))])
    assert faults(path) == {name: f"{name}: expected a name within the file, found one that leads out of it"}


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_is_there_twice_is_told(tmp_path):
    path = archive(tmp_path / "a.npz", [("x.npy", npy(np.arange(3))), ("x.npy", npy(np.arange(4)))])
    assert faults(path) == {"x.npy": "x.npy: expected a member once, found again"}
    path = archive(tmp_path / "b.npz", [("x/y.npy", npy(np.arange(3))), ("x.y.npy", npy(np.arange(4)))])
    assert faults(path) == {"x.y.npy": "x.y.npy: expected a name of its own, found another array is x.y too"}


def test_members_that_share_bytes_are_told(tmp_path):
    path = archive(tmp_path / "a.npz", [("x.npy", npy(np.arange(3))), ("y.npy", npy(np.arange(3)))])
    edited(path, start=0)
    assert "expected a member that begins at 187 or behind it, found none at 0" in faults(path)["y.npy"]


@pytest.mark.parametrize("data", [b"", b"PK", b"PK\3\4", b"PK\5\6" + bytes(17), b"x" * 100_000])
def test_what_is_no_archive_is_told(tmp_path, data):
    (tmp_path / "a.npz").write_bytes(data)
    assert "a.npz: expected an archive's directory at its end, found" in faults(tmp_path / "a.npz")["a.npz"]


def test_a_directory_of_a_wrong_length_is_told(tmp_path):
    path = archive(tmp_path / "a.npz", [("x.npy", npy(np.arange(3)))])
    whole = path.read_bytes()
    for at, value in ((-10, 2**31), (-6, 2**31), (-12, 9), (-14, 0)):
        data = bytearray(whole)
        struct.pack_into("<L" if at > -12 else "<H", data, len(data) + at, value)
        if at == -14:
            struct.pack_into("<H", data, len(data) - 12, 0)
        path.write_bytes(data)
        assert "expected an archive's directory" in faults(path)["a.npz"]


def look(path: Path) -> None:
    """Reads all that there is, or is told in the way that was promised."""
    try:
        if _from_numpy.is_here(folder(path)):
            values(_from_numpy.view(folder(path)))
    except (CheckpointError, OSError):
        pass


@pytest.mark.parametrize("save", SAVE)
def test_no_flipped_bits_and_no_truncation_do_more_than_raise(tmp_path, save):
    path = tmp_path / "a.npz"
    SAVE[save](path, **{"a.w": sample("float32", (3, 4)), "b": sample("bool", (5,)), "c": sample("int16", ())})
    whole = path.read_bytes()
    chance = random.Random(1)
    with bounded(300), memory(10 << 20):
        for cut in range(0, len(whole), 3):
            path.write_bytes(whole[:cut])
            with pytest.raises(CheckpointError):
                values(read(path))
        for _ in range(700):
            data = bytearray(whole)
            for _ in range(chance.choice((1, 1, 2, 5))):
                data[chance.randrange(len(data))] = chance.randrange(256)
            path.write_bytes(data)
            look(path)


def test_no_flipped_bits_in_one_array_do_more_than_raise(tmp_path):
    whole = npy(sample("float32", (3, 4)))
    chance = random.Random(1)
    with bounded(300):
        for _ in range(700):
            data = bytearray(whole)
            for _ in range(chance.choice((1, 1, 2, 5))):
                data[chance.randrange(128)] = chance.randrange(256)
            (tmp_path / "a.npy").write_bytes(data)
            look(tmp_path / "a.npy")


@given(st.binary(max_size=200) | st.text("{}()[]'\":, descrfotanhp<>i48TFL1", max_size=100).map(str.encode))
@settings(deadline=None, max_examples=300)
def test_no_header_does_more_than_raise(tmp_path_factory, header):
    path = tmp_path_factory.mktemp("hostile") / "a.npy"
    path.write_bytes(npy(np.arange(2), header))
    with bounded():
        look(path)


@given(
    st.dictionaries(
        st.text("ab.é", min_size=1, max_size=6),
        st.tuples(st.sampled_from(_from_numpy.NAMED), st.lists(st.integers(0, 3), max_size=3), st.booleans()),
        max_size=5,
    ),
    st.sampled_from(sorted(SAVE)),
)
@settings(deadline=None, max_examples=100)
def test_what_numpy_wrote_is_read_in_every_bit(tmp_path_factory, arrays, save):
    wanted = {name: sample(dtype, tuple(shape)) for name, (dtype, shape, _) in arrays.items()}
    turned = {n: np.asfortranarray(x).reshape(x.shape) if arrays[n][2] and x.ndim else x for n, x in wanted.items()}
    path = tmp_path_factory.mktemp("theirs") / "a.npz"
    SAVE[save](path, **turned)
    found = read(path)
    assert len(found.leaves) == len(wanted)
    assert sorted(x.tobytes() for x in values(found).values()) == sorted(x.tobytes() for x in wanted.values())


def test_a_file_that_is_cut_off_after_it_was_looked_at_is_corrupt(tmp_path):
    np.save(tmp_path / "a.npy", sample("int32", (100,)))
    found = read(tmp_path / "a.npy")
    os.truncate(tmp_path / "a.npy", 500)
    with pytest.raises(Corrupt, match="expected 400 bytes at 128, found 372"):
        values(found)


def test_a_part_is_read_of_a_large_array_alone(tmp_path):
    wanted = sample("float32", (3000, 3000))
    np.savez(tmp_path / "a.npz", x=wanted)
    found = read(tmp_path / "a.npz")
    with memory(3 * _flat.ROWS):
        assert np.array_equal(found.read("x", ((7, 2900), (5, 6))), wanted[7:2900, 5:6], equal_nan=True)
