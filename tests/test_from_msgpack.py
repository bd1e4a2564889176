"""Flax's msgpack files are read as Flax reads them, array by array, and refused in words where they are damaged."""

import contextlib
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_jax import _from_msgpack, _manifest, _structure, _values
from ckpt_jax._storage import Folder
from ckpt_jax._view import View
from ckpt_jax.errors import CheckpointError, Corrupt, Unsupported

from .bounded import bounded
from .rss import extra


def write(path: Path, value: Any) -> Folder:
    path.write_bytes(flax.serialization.msgpack_serialize(value))
    return Folder(str(path))


def plain(view: View) -> Any:
    """All of a view as nested containers."""

    def leaf(name: str) -> Any:
        found = view.leaves[name]
        return view.read(name, whole(view, name)) if found.stored else _values.unpack(found.value)

    return _structure.build(view.tree, leaf)


def whole(view: View, name: str) -> Any:
    return tuple((0, n) for n in view.leaves[name].shape)


def same(a: Any, b: Any) -> bool:
    if isinstance(b, dict):
        return isinstance(a, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(b, (np.ndarray, np.generic)):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return type(a) is type(b) and a == b


DTYPES = sorted(_manifest.ITEMSIZE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(dtype: str, tmp_path: Path):
    values = np.arange(24).reshape(2, 3, 4).astype(np.dtype(dtype))
    place = write(tmp_path / "x", {"a": values, "b": values[0, 0, 0]})
    view = _from_msgpack.view(place)
    assert same(plain(view), {"a": values, "b": np.asarray(values[0, 0, 0])})
    assert (view.leaves["a"].host, view.leaves["b"].host) == ("", "scalar")


def test_a_nested_tree_is_what_flax_restores(tmp_path: Path):
    tree = {
        "params": {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(3, jnp.bfloat16)},
        "list": [1, 2.5, {"x": None}],
        "tuple": (np.int8(-3), "text ✓", b"\x00\xff", True, 1.5 - 2j),
        "ints": [0, -1, -33, 127, 128, 255, 256, 2**16, 2**32, -(2**31) - 1, 2**64 - 1, -(2**63)],
        "empty": [(), {}],
        "zero": np.zeros((0, 3), np.int16),
        "scalar": np.array(7),
        "long": "x" * 70_000,
        "many": {f"key{n}": n for n in range(70)},
    }
    (tmp_path / "x").write_bytes(flax.serialization.to_bytes(tree))
    place = Folder(str(tmp_path / "x"))
    assert _from_msgpack.is_here(place)
    view = _from_msgpack.view(place)
    assert same(plain(view), flax.serialization.msgpack_restore((tmp_path / "x").read_bytes()))
    assert view.lacks == ("digests", "sharding", "which containers were lists or tuples")


def test_a_train_state_is_read_at_its_names(tmp_path: Path):
    params = {"dense": {"kernel": jnp.ones((2, 3))}}
    state = {"params": params, "opt": optax.adam(1e-3).init(params), "step": 5}
    (tmp_path / "x").write_bytes(flax.serialization.to_bytes(state))
    view = _from_msgpack.view(Folder(str(tmp_path / "x")))
    assert list(view.leaves) == [
        "params.dense.kernel",
        "opt.0.count",
        "opt.0.mu.dense.kernel",
        "opt.0.nu.dense.kernel",
        "step",
    ]


def test_a_single_array_is_a_file_too(tmp_path: Path):
    place = write(tmp_path / "x", np.arange(6.0).reshape(2, 3))
    assert _from_msgpack.is_here(place)
    view = _from_msgpack.view(place)
    assert view.tree == "*"
    np.testing.assert_array_equal(view.read("<root>", ((1, 2), (0, 2))), [[3, 4]])


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_box_is_the_slice(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    shape = data.draw(st.lists(st.integers(0, 6), max_size=4))
    values = np.arange(np.prod(shape, dtype=int), dtype=np.int16).reshape(shape)
    view = _from_msgpack.view(write(tmp_path_factory.mktemp("box") / "x", {"before": "x", "a": values}))
    box = tuple(tuple(sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))) for n in shape)
    np.testing.assert_array_equal(view.read("a", box), values[tuple(slice(*b) for b in box)])


def test_arrays_in_pieces_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 40)
    values = {"a": np.arange(105, dtype=np.float32).reshape(7, 5, 3), "b": np.arange(3), "n": {"c": np.arange(11)}}
    view = _from_msgpack.view(write(tmp_path / "x", values))
    assert same(plain(view), values)
    np.testing.assert_array_equal(view.read("a", ((2, 5), (1, 3), (0, 2))), values["a"][2:5, 1:3, :2])


@pytest.mark.parametrize(
    "pieces",
    [
        {"shape": {"0": 4}, "chunks": {"0": np.arange(3)}},
        {"shape": {"0": 4}, "chunks": {"0": np.arange(2), "2": np.arange(2)}},
        {"shape": {"0": 3}, "chunks": {"0": np.arange(2), "1": np.arange(1.0)}},
        {"shape": {"0": -3}, "chunks": {"0": np.arange(3)}},
        {"shape": {}, "chunks": {}},
        {"shape": 3, "chunks": {"0": 5}},
        {},
    ],
)
def test_pieces_that_do_not_make_an_array_are_refused_by_name(pieces: dict[str, Any], tmp_path: Path):
    place = write(tmp_path / "x", {"ok": 1, "a": {"__msgpack_chunked_array__": True, **pieces}})
    with pytest.raises(Unsupported) as caught:
        _from_msgpack.view(place)
    assert [fault.place for fault in caught.value.faults] == ["a"]


def test_a_step_of_flax_is_found_in_its_folder(tmp_path: Path):
    for step in (5, 10, 9):
        write(tmp_path / f"checkpoint_{step}", {"a": np.full(2, step)})
    assert _from_msgpack.is_here(Folder(str(tmp_path)))
    view = _from_msgpack.view(Folder(str(tmp_path)))
    assert view.step == 10
    assert view.read("a", ((0, 2),)).tolist() == [10, 10]


def test_orbaxs_first_files_are_read_and_what_lies_elsewhere_is_refused_by_name(tmp_path: Path):
    write(tmp_path / "checkpoint", {"a": np.arange(2), "s": 3})
    view = _from_msgpack.view(Folder(str(tmp_path)))
    assert list(view.leaves) == ["a", "s"]
    write(tmp_path / "checkpoint", {"a": "PLACEHOLDER://params.a", "b": {"c": "PLACEHOLDER://c"}, "s": 3})
    with pytest.raises(Unsupported) as caught:
        _from_msgpack.view(Folder(str(tmp_path)))
    assert [fault.place for fault in caught.value.faults] == ["a", "b.c"]
    assert "an array elsewhere, 'params.a'" in str(caught.value)


def test_a_folder_of_orbax_is_left_to_it(tmp_path: Path):
    write(tmp_path / "checkpoint", {"a": 1})
    (tmp_path / "_METADATA").write_text("{}")
    assert not _from_msgpack.is_here(Folder(str(tmp_path)))


def test_tuples_of_orbax_are_tuples(tmp_path: Path):
    inner = msgpack.packb([1, "x"])
    (tmp_path / "x").write_bytes(msgpack.packb({"t": msgpack.ExtType(4, inner)}))
    assert plain(_from_msgpack.view(Folder(str(tmp_path / "x")))) == {"t": (1, "x")}


def test_int_keys_come_back_as_ints(tmp_path: Path):
    (tmp_path / "x").write_bytes(msgpack.packb({1: "a", "b": {-2: None}}))
    assert plain(_from_msgpack.view(Folder(str(tmp_path / "x")))) == {1: "a", "b": {-2: None}}


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{}",
        b"PK\x03\x04",
        b"\x80\x02}q\x00.",
        b"\x93NUMPY\x01\x00",
        struct.pack("<Q", 0xA181) + b'{"__metadata__":{}}',
        struct.pack("<Q", 0x41A181) + b'{"__metadata__":{}}',
        b"\x81\xa1",
        b"\xc1\xc1",
        b"\x81\x90\x01",
    ],
)
def test_other_files_are_not_taken_for_it(head: bytes, tmp_path: Path):
    (tmp_path / "x").write_bytes(head)
    assert not _from_msgpack.is_here(Folder(str(tmp_path / "x")))


def test_nothing_there_is_not_here(tmp_path: Path):
    assert not _from_msgpack.is_here(Folder(str(tmp_path / "none")))
    assert not _from_msgpack.is_here(Folder(str(tmp_path)))
    assert not _from_msgpack.is_here(Folder("memory://x/y"))


def test_a_link_and_a_pipe_are_not_opened(tmp_path: Path):
    write(tmp_path / "x", {"a": 1})
    (tmp_path / "link").symlink_to(tmp_path / "x")
    os.mkfifo(tmp_path / "pipe")
    with bounded():
        for name in ("link", "pipe"):
            assert not _from_msgpack.is_here(Folder(str(tmp_path / name)))
            with pytest.raises(CheckpointError):
                _from_msgpack.view(Folder(str(tmp_path / name)))


def array(shape: Any, dtype: Any, data: Any) -> bytes:
    return msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb((shape, dtype, data)))})


HOSTILE = {
    "empty": b"",
    "cut off in a map": b"\x82\xa1a\x01",
    "more behind": b"\x81\xa1a\x01\x00",
    "a map of four billion": b"\xdf\xff\xff\xff\xff",
    "a list of four billion": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "a text of four billion": b"\x81\xa1a\xdb\xff\xff\xff\xff",
    "bytes of four billion": b"\x81\xa1a\xc6\xff\xff\xff\xff",
    "an extension of four billion": b"\x81\xa1a\xc9\xff\xff\xff\xff\x01",
    "a code that is none": b"\x81\xa1a\xc1",
    "a key twice": b"\x82\xa1a\x01\xa1a\x02",
    "a key that is a list": b"\x81\x90\x01",
    "a key that is a number": b"\x81\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x01",
    "two keys that make one name": b"\x82\xa11\x01\x01\x02",
    "no text": b"\x81\xa1a\xa1\xff",
    "deep lists": b"\x81\xa1a" + b"\x91" * 100_000 + b"\x01",
    "deep maps": b"\x81\xa1a" * 100_000 + b"\x01",
    "deep tuples": b"\x81\xa1a" + b"\xd4\x04" * 5000,
    "an array of others' bytes": array((3,), "int32", b"x" * 11),
    "an array of more than it has": array((2**40,), "int32", b"x" * 16),
    "an array without a shape": array(3, "int32", b"x" * 12),
    "an array of text": array(("3",), "int32", b"x" * 12),
    "an array of 100 axes": array((1,) * 100, "int8", b"x"),
    "an array without bytes": array((3,), "int32", [1, 2, 3]),
    "an array of four": msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(((1,), "int8", b"x", 4)))}),
    "an array and more": msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(((1,), "int8", b"x")) + b"x")}),
    "a complex of text": msgpack.packb({"a": msgpack.ExtType(2, msgpack.packb(("x", "y")))}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_with_its_place(case: str, tmp_path: Path):
    (tmp_path / "x").write_bytes(HOSTILE[case])
    place = Folder(str(tmp_path / "x"))
    with bounded(extra=256 << 20):
        _from_msgpack.is_here(place)
        with pytest.raises(CheckpointError) as caught:
            _from_msgpack.view(place)
    assert str(tmp_path / "x") in str(caught.value)
    assert all(fault.place.startswith("x") and fault.expected and fault.found for fault in caught.value.faults)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (array((1,), "object", b"x" * 8), "'object' is no dtype"),
        (array((1,), "str32", b"x" * 4), "'str32' is no dtype"),
        (array((-1,), "int8", b"x"), "is no shape"),
        (msgpack.packb({"a": msgpack.ExtType(9, b"zz")}), "an extension of msgpack, number 9"),
    ],
)
def test_what_is_no_array_is_refused_by_name(value: bytes, says: str, tmp_path: Path):
    (tmp_path / "x").write_bytes(value)
    with pytest.raises(Unsupported, match=says) as caught:
        _from_msgpack.view(Folder(str(tmp_path / "x")))
    assert [fault.place for fault in caught.value.faults] == ["a"]


def test_long_names_above_many_leaves_are_refused(tmp_path: Path):
    """A tenth of a gigabyte of names out of a few hundred kilobytes of file."""
    (tmp_path / "x").write_bytes(msgpack.packb({"k" * 200_000: [0] * 100_000}))
    with bounded(), pytest.raises(CheckpointError, match=r"names of more than|text"):
        _from_msgpack.view(Folder(str(tmp_path / "x")))


def test_a_file_that_became_shorter_is_damaged(tmp_path: Path):
    place = write(tmp_path / "x", {"a": np.arange(100)})
    view = _from_msgpack.view(place)
    os.truncate(tmp_path / "x", 200)
    with pytest.raises(Corrupt, match=r"a: expected 800 bytes at \d+, found"):
        view.read("a", ((0, 100),))


def test_another_file_has_another_stamp(tmp_path: Path):
    place = write(tmp_path / "x", {"a": np.arange(100)})
    first = _from_msgpack.view(place).stamp
    assert first == _from_msgpack.view(place).stamp
    write(tmp_path / "x", {"a": np.arange(101)})
    assert first != _from_msgpack.view(place).stamp


class State(NamedTuple):
    a: Any
    b: Any


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_flipped_and_cut_files_end_in_errors_in_words(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    tree = {
        "p": State(np.arange(6).reshape(2, 3), "x"),
        "l": [1, None, 2.5],
        "c": 1j,
        "s": np.float16(1),
        "z": np.zeros(0),
    }
    changed = bytearray(flax.serialization.to_bytes(tree))
    del changed[data.draw(st.integers(0, len(changed))) :]
    for at in data.draw(st.lists(st.integers(0, len(changed) - 1), max_size=4)) if changed else ():
        changed[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("flip") / "x"
    path.write_bytes(changed)
    place = Folder(str(path))
    with contextlib.suppress(CheckpointError):
        _from_msgpack.is_here(place)
        plain(_from_msgpack.view(place))


def test_a_large_file_is_read_with_the_memory_of_a_box(tmp_path: Path):
    """100 MB, of which the view takes some, and a row its own."""
    write(tmp_path / "x", {"a": np.ones((25, 1 << 20), np.float32), "b": np.arange(3)})
    before = "import numpy, ckpt_jax._from_msgpack as m; from ckpt_jax._storage import Folder"
    code = f"v = m.view(Folder({str(tmp_path / 'x')!r})); assert v.read('a', ((3, 4), (0, 1 << 20))).all()"
    assert extra(before, code) < 30 << 20


def test_jax_is_what_wrote_and_not_what_reads(tmp_path: Path):
    view = _from_msgpack.view(write(tmp_path / "x", {"a": jax.random.normal(jax.random.key(0), (3,), jnp.bfloat16)}))
    assert view.read("a", ((0, 3),)).dtype == ml_dtypes.bfloat16
