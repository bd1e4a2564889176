"""Name maps: a checkpoint under other names, and cut, joined, transposed and cast on the way."""

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_jax as ck
from ckpt_jax import _chunks, _from_own, _names, _rules, _storage

from .trees import same

LAYERS = 12
TREE: dict[str, Any] = {
    "h": {str(i): {"w": np.arange(12.0).reshape(3, 4) + 100 * i, "ln": np.arange(4.0) + i} for i in range(LAYERS)},
    "qkv": np.arange(36, dtype=np.float32).reshape(4, 9),
    "opt": (np.ones(2), None, (), {}),
    "a.b/c": np.ones(1),
    "n": 5,
    "key": jax.random.key(3),
}


@pytest.fixture
def saved(tmp_path) -> Path:
    ck.save(tmp_path / "1", TREE)
    return tmp_path / "1"


def renamed(path: Path, *rules: dict[str, Any]) -> _names.Renamed:
    return _names.renamed(_from_own.view(_storage.folder(path)), _rules.load(list(rules)))


def test_a_leaf_gets_another_name(saved):
    found = ck.restore(saved, rename=[{"match": "h.*.w", "to": "blocks.{1}.kernel"}])
    assert same(found["blocks"]["11"]["kernel"], TREE["h"]["11"]["w"])
    assert "w" not in found["h"]["11"]


def test_a_regular_expression_matches_whole_names(saved):
    found = ck.restore(saved, rename=[{"regex": r"h\.(\d+)\.(w|ln)", "to": "x.{2}.{1}"}])
    assert same(found["x"]["ln"]["3"], TREE["h"]["3"]["ln"])
    with pytest.raises(ck.Mismatch, match="no leaf for some of the rules"):
        ck.restore(saved, rename=[{"regex": r"h\.(\d+)", "to": "x.{1}"}])


def test_one_star_is_one_entry_and_two_are_any_number(saved):
    assert [step.target for step in renamed(saved, {"match": "*.ln", "to": "x", "optional": True}).steps] == []
    assert len(renamed(saved, {"match": "**.ln", "to": "{1}.scale"}).steps) == LAYERS
    assert renamed(saved, {"match": "?kv", "to": "{1}"}).steps[0].target == "q"


def test_the_first_rule_that_matches_counts(saved):
    rules = [{"match": "h.0.w", "to": "first"}, {"match": "h.*.w", "to": "rest.{1}"}]
    found = renamed(saved, *rules)
    assert [step.target for step in found.steps if step.sources == ("h.0.w",)] == ["first"]


def test_leaves_are_stacked_in_the_order_of_their_numbers(saved):
    for axis in (0, 1, 2):
        found = ck.restore(saved, rename=[{"match": "h.*.w", "to": "w", "stack": axis}])
        assert same(found["w"], np.stack([TREE["h"][str(i)]["w"] for i in range(LAYERS)], axis))


def test_a_leaf_is_split_into_equal_parts_or_into_such_as_are_told(saved):
    found = ck.restore(saved, rename=[{"match": "qkv", "to": ["q", "k", "v"], "split": 1}])
    assert same([found[name] for name in "qkv"], np.split(TREE["qkv"], 3, 1))
    found = ck.restore(saved, rename=[{"match": "qkv", "to": ["q", "k"], "split": 1, "sizes": [7, 2]}])
    assert same(found["k"], TREE["qkv"][:, 7:].copy())


def test_a_leaf_is_transposed_before_it_is_split(saved):
    found = ck.restore(saved, rename=[{"match": "qkv", "to": ["q", "k", "v"], "transpose": True, "split": 0}])
    assert same([found[name] for name in "qkv"], [part.copy() for part in np.split(TREE["qkv"].T, 3)])
    found = ck.restore(saved, rename=[{"match": "h.*.w", "to": "w.{1}", "transpose": [1, 0]}])
    assert same(found["w"]["2"], TREE["h"]["2"]["w"].T.copy())


def test_a_cast_rounds_and_refuses_what_would_overflow(saved, tmp_path):
    found = ck.restore(saved, rename=[{"match": "qkv", "cast": "bfloat16"}])
    assert same(found["qkv"], TREE["qkv"].astype(jnp.bfloat16))
    ck.save(tmp_path / "2", {"w": np.array([1e30])})
    with pytest.raises(ck.Unsupported, match="1 value that float16 cannot hold"):
        ck.restore(tmp_path / "2", rename=[{"match": "w", "cast": "float16"}])


def test_what_a_rule_drops_is_left_out(saved):
    found = ck.restore(saved, rename=[{"match": "h.**", "drop": True}, {"match": "opt.**", "drop": True}])
    assert sorted(found) == ["a.b/c", "key", "n", "qkv"]


def test_empty_containers_and_odd_keys_go_along(saved):
    found = ck.restore(saved, rename=[{"match": "opt.**", "to": "state.opt.{1}"}, {"match": "n", "to": "x%2Ey"}])
    assert same(found["state"]["opt"], {"0": np.ones(2), "1": None, "2": (), "3": {}})
    like = {"state": {"opt": (np.zeros(2), None, (), {})}}
    rules = [{"match": "opt.**", "to": "state.opt.{1}"}]
    assert same(ck.restore(saved, like, rename=rules, on_extra="ignore")["state"]["opt"], TREE["opt"])
    assert same(found["a.b/c"], np.ones(1))
    assert found["x.y"] == 5


def test_what_was_renamed_comes_back_in_the_structure_and_on_the_sharding_of_like(saved):
    mesh = jax.make_mesh((4,), ("x",))
    across = NamedSharding(mesh, PartitionSpec("x"))
    like = {"w": jax.ShapeDtypeStruct((LAYERS, 3, 4), jnp.float32, sharding=across), "ln": [np.zeros(4)] * LAYERS}
    rules = [{"match": "h.*.w", "to": "w", "stack": 0, "cast": "float32"}, {"match": "h.*.ln", "to": "ln.{1}"}]
    found = ck.restore(saved, like, rename=rules, on_extra="ignore")
    assert found["w"].sharding == across
    assert same(np.asarray(found["w"]), np.stack([TREE["h"][str(i)]["w"] for i in range(LAYERS)]).astype(np.float32))
    assert same(found["ln"], [TREE["h"][str(i)]["ln"] for i in range(LAYERS)])


def test_rules_are_read_from_a_file(saved, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nmatch = "h.*.w"\nto = "w"\nstack = 0\n\n[[rule]]\nmatch = "n"\ndrop = true\n')
    assert ck.restore(saved, rename=rules)["w"].shape == (LAYERS, 3, 4)


WRONG = {
    "nothing": ([], "rule: expected at least one"),
    "no table": ([3], "rule 1: rule: expected a table"),
    "a key that is misspelt": ([{"match": "n", "too": "m"}], "rule 1: too: expected one of match, regex"),
    "two patterns": ([{"match": "n", "regex": "n"}], "rule 1: match: expected either"),
    "no pattern": ([{"to": "n"}], "rule 1: match: expected either"),
    "no regular expression": ([{"regex": "("}], "rule 1: regex: expected a regular expression"),
    "a star too few": ([{"match": "h.*", "to": "{2}"}], "rule 1: to: expected {0} to {1}"),
    "an empty name": ([{"match": "n", "to": ""}], "rule 1: to: expected a name"),
    "a split without names": ([{"match": "qkv", "to": "q", "split": 0}], "rule 1: split: expected an axis, and a list"),
    "names without a split": ([{"match": "qkv", "to": ["q", "k"]}], "rule 1: split: expected an axis, and a list"),
    "sizes of fewer parts": ([{"match": "qkv", "to": ["q", "k"], "split": 0, "sizes": [1]}], "rule 1: sizes"),
    "a negative axis": ([{"match": "qkv", "to": "q", "stack": -1}], "rule 1: stack: expected an axis"),
    "no order of axes": ([{"match": "qkv", "transpose": [0, 2]}], "rule 1: transpose: expected true, or an order"),
    "no dtype": ([{"match": "qkv", "cast": "fp8"}], "rule 1: cast: expected a dtype"),
    "a drop that does more": ([{"match": "n", "drop": True, "to": "m"}], "rule 1: drop: expected nothing else"),
    "a drop that is no bool": ([{"match": "n", "drop": 1}], "rule 1: drop: expected true or false"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_rule_is_told_with_its_place(saved, what):
    rules, text = WRONG[what]
    with pytest.raises(ck.CheckpointError) as caught:
        ck.restore(saved, rename=rules)
    assert text in str(caught.value)


@pytest.mark.parametrize("data", [b"\xff", b"a = ", b"rule = 3", b"[rules]\nx = 1", b"#" * 1_000_001])
def test_what_is_no_file_of_rules_is_told(saved, tmp_path, data):
    (tmp_path / "rules.toml").write_bytes(data)
    with pytest.raises(ck.CheckpointError):
        ck.restore(saved, rename=str(tmp_path / "rules.toml"))


UNFIT = {
    "two leaves of one name": ({"match": "h.*.w", "to": "w"}, "w: expected one leaf for each name"),
    "a leaf where others lie": ({"match": "qkv", "to": "h"}, "h: expected a leaf, or a container of others"),
    "a split that does not come out": (
        {"match": "qkv", "to": ["q", "k"], "split": 1},
        "is not cut into 2 parts of 4, 4",
    ),
    "an axis that is not there": ({"match": "qkv", "to": ["q", "k"], "split": 2}, "has no axis 2"),
    "an order of other axes": ({"match": "qkv", "transpose": [0, 2, 1]}, "has 2 axes and not 3"),
    "others in one stack": ({"match": "h.0.*", "to": "x", "stack": 0}, "float64[3,4]"),
    "a new axis far out": ({"match": "h.*.ln", "to": "x", "stack": 2}, "can have no new axis 2"),
    "a number that is transposed": ({"match": "n", "transpose": True}, "a scalar leaf, which nobody can transpose"),
    "a key that is cast": ({"match": "key", "cast": "int32"}, "a key leaf, which nobody can cast"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_rule_that_does_not_fit_is_told_with_its_leaf(saved, what):
    rule, text = UNFIT[what]
    with pytest.raises(ck.CheckpointError) as caught:
        ck.restore(saved, rename=[rule])
    assert text in str(caught.value)


def test_the_report_tells_what_matched_and_what_did_not(saved):
    rules = [{"match": "h.*.w", "to": "w", "stack": 0}, {"match": "h.*.ln", "drop": True}, {"match": "zz", "to": "y"}]
    told = str(renamed(saved, *rules)).splitlines()
    assert told[:2] == [
        "1 leaf under a rule:",
        "  h.0.w + … 10 more … + h.11.w -> w: 12 × float64[3,4] -> float64[12,3,4], stacked",
    ]
    assert told[2] == "left out (12):"
    assert "not matched by a rule, and left as they are (5):" in told
    assert told[-2:] == ["rules that match nothing (1):", "  zz"]


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_box_of_what_a_rule_makes_is_that_of_the_whole(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=3)))
    count = data.draw(st.integers(1, 3))
    arrays = [np.random.default_rng(i).integers(0, 99, shape).astype(np.int32) for i in range(count)]
    order = data.draw(st.permutations(range(len(shape))))
    axis = data.draw(st.integers(0, len(shape)))
    path = f"memory://names/{data.draw(st.integers(0, 10**12))}"
    ck.save(path, {str(i): array for i, array in enumerate(arrays)}, overwrite=True)
    rule = {"match": "*", "to": "x", "stack": axis, "transpose": list(order)}
    view = _names.apply(_from_own.view(_storage.folder(path)), [rule])
    whole = np.stack([array.transpose(order) for array in arrays], axis)
    box = tuple(tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in whole.shape)
    assert same(np.ascontiguousarray(view.read("x", box)), whole[_chunks.slices(box)].copy())
