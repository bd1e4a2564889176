"""Pickle streams are read as records: nothing in them is imported, called, or without end."""

import collections
import contextlib
import os
import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_jax import _pickled
from ckpt_jax._pickled import Call, Global, Persistent

from .bounded import bounded

KEYS = st.one_of(st.none(), st.booleans(), st.integers(-(2**59), 2**59), st.text(), st.binary())
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner), st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=200)
@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_values_are_what_pickle_would_make_of_them(value: Any, protocol: int):
    assert _pickled.loads(pickle.dumps(value, protocol)) == value


@settings(deadline=None)
@given(
    st.sampled_from([0, 1, 2]),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(alphabet=st.characters(max_codepoint=127)),
)
def test_old_protocols_are_read_too(protocol: int, number: int, real: float, text: str):
    value = [number, real, text, (), {"a": {1: [None, True]}}]
    assert _pickled.loads(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(6))
def test_what_old_protocols_call_for_is_made_plain(protocol: int):
    for value in (b"\x00\xff", b"", complex(1.5, -2), collections.OrderedDict(b=1, a=[2])):
        found = _pickled.loads(pickle.dumps(value, protocol))
        assert (_pickled.plain(found) if isinstance(found, Call) else found) == value


def test_an_object_is_the_record_of_how_it_would_be_made():
    found = _pickled.loads(pickle.dumps({"x": Fraction(1, 3), "s": {1}, "d": collections.deque([1, 2])}, 2))
    assert found["x"].what == Global("fractions", "Fraction")
    assert found["s"].args == ([1],)
    assert found["d"].items == [1, 2]


class Stated:
    def __init__(self) -> None:
        self.a = 1


def test_a_state_is_told_and_not_set():
    found = _pickled.loads(pickle.dumps([Stated()] * 2))
    assert found[0] is found[1]
    assert (found[0].what.name, found[0].state) == ("Stated", {"a": 1})


def test_what_lies_elsewhere_is_known_by_its_name():
    found = _pickled.loads(b"\x80\x02(X\x01\x00\x00\x00aK\x05tQ.")
    assert isinstance(found, Persistent)
    assert found.id == ("a", 5)


def test_numpy_arrays_are_records_too():
    found = _pickled.loads(pickle.dumps(np.arange(3)))
    assert isinstance(found, Call)
    assert found.state is not None


EVIL = [
    b"cos\nsystem\n(S'touch %s'\ntR.",
    b"(S'touch %s'\nios\nsystem\n.",
    b"(cos\nsystem\nS'touch %s'\no.",
    b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x00(X\x00\x00\x00\x00t0S'touch %s'\n\x85R.",
    b'cbuiltins\nexec\n(S\'open("%s", "w")\'\ntR.',
    b"csubprocess\nPopen\n((lS'touch'\naS'%s'\natR.",
]


@pytest.mark.parametrize("stream", EVIL)
def test_nothing_is_called(stream: bytes, tmp_path: Path):
    victim = tmp_path / "made"
    try:
        found = _pickled.loads(stream.replace(b"%s", os.fsencode(victim)))
    except ValueError:
        found = None
    assert not victim.exists()
    assert found is None or (isinstance(found, Call) and isinstance(_pickled.plain(found), Call))


def test_the_streams_above_do_harm_where_they_are_unpickled(tmp_path: Path):
    victim = tmp_path / "made"
    subprocess.run(
        [sys.executable, "-c", f"import pickle; pickle.loads({EVIL[0].replace(b'%s', os.fsencode(victim))!r})"],
        check=True,
    )
    assert victim.exists()


def test_nothing_is_imported():
    code = "import sys; from ckpt_jax import _pickled; print(_pickled.loads(b'cantigravity\\nfly\\n)R.').what)"
    code += "; print('antigravity' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "antigravity.fly\nFalse\n"


HOSTILE = {
    "empty": b"",
    "cut off": pickle.dumps([1, 2, 3])[:-1],
    "no value": b".",
    "two values": b"NN.",
    "a mark": b"(.",
    "from an empty stack": b"R.",
    "across a mark": b"N(R.",
    "a memo that is not there": b"h\x05.",
    "contains itself": b"]q\x00h\x00a.",
    "contains itself by a call": b"cx\ny\n)Rq\x00h\x00b.",
    "a dict in itself": b"}q\x00K\x01h\x00s.",
    "a key without a value": b"}(K\x01u.",
    "a list as a key": b"}]K\x01s.",
    "a deep key": b"}" + b"K\x01" + b"\x85" * 100_000 + b"K\x01s.",
    "a large key": b"}\x8a\xff" + b"\x7f" * 255 + b"K\x01s.",
    "deep": b"]" * 100_000 + b"a" * 99_999 + b".",
    "deep tuples": b"K\x01" + b"\x85" * 1_000_000 + b".",
    "deep calls": b"cx\ny\n" * 1000 + b")" + b"R\x85" * 1000 + b".",
    "an extension": b"\x82\x01.",
    "a call of a value": b"K\x01)R.",
    "a name that is none": b"K\x01K\x02\x93.",
    "items for a number": b"K\x01K\x02a.",
    "two states": b"cx\ny\n)R}b}b.",
    "a length that lies": b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a long text that lies": b"X\xff\xff\xff\x7f.",
    "digits without end": b"I" + b"9" * 100_000 + b"\n.",
    "no text": b"X\x01\x00\x00\x00\xff.",
    "an escape": b"S'\\q'\nS'\\x'\n.",
    "an unknown opcode": b"\xff.",
    "a buffer": b"\x97.",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_pickle_is_refused(case: str):
    with bounded(), pytest.raises(ValueError, match=r"."):
        _pickled.loads(HOSTILE[case])


def test_what_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_pickled, "LARGEST", 100)
    with pytest.raises(ValueError, match="a pickle of 101 bytes, where 100 are read"):
        _pickled.loads(b"N" * 101)
    monkeypatch.setattr(_pickled, "STEPS", 10)
    with pytest.raises(ValueError, match="more than 10 instructions"):
        _pickled.loads(b"N" * 50)


def test_one_value_in_many_places_is_looked_at_once():
    """2**200 places, were they walked."""
    with bounded():
        stream = b"]q\x00" + b"".join(b"0](h%ch%ceq%c" % (n, n, n + 1) for n in range(200)) + b"."
        found = _pickled.loads(stream)
    assert found[0] is found[1]


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_flipped_and_cut_streams_give_a_value_or_an_error_in_words(data: st.DataObject):
    whole = pickle.dumps(
        {"a": [1, (2.5, "x")], "o": Fraction(1, 2), "b": b"xyz", "n": np.arange(3)}, data.draw(st.sampled_from([2, 4]))
    )
    changed = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for at in data.draw(st.lists(st.integers(0, max(0, len(changed) - 1)), max_size=4)) if changed else ():
        changed[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        _pickled.loads(bytes(changed))
