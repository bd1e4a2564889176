"""The manifest: written, read back, merged; and what becomes of one that was written by a stranger."""

import copy
import functools
import hashlib
import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import crc32c
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import random

import ckpt_jax as ck
from ckpt_jax import _manifest, _writing
from ckpt_jax._manifest import File, Leaf, Manifest, Node, Part
from tests.bounded import bounded

HERE = "gs://bucket/run/100"
NAME = "MANIFEST.json"


def make_manifest() -> Manifest:
    return Manifest(
        "ckpt_jax",
        (1, 0),
        step=100,
        time=1.7e9,
        attempt="00ff00ff00ff00ff",
        writers=2,
        tree=Node("dict", ["*", Node("list", ["*", Node("none")]), "*"], ["key", "list", "w"]),
        leaves={
            "key": Leaf("key", "uint32", (2,), (2,), impl="threefry2x32", digests="0" * 32),
            "list.0": Leaf("scalar", "float", value={"$float": "7ff8000000000000"}),
            "w": Leaf("array", "bfloat16", (4, 8), (2, 8), weak=True, sharding=0, digests="a" * 64),
        },
        shardings=[{"type": "NamedSharding", "axes": {"x": 2}}],
        files={"state/manifest.ocdbt": File(120), "state/d/0": File(300), "state/_METADATA": File(4, "f" * 32)},
        seconds={"write": 0.25},
        metadata={"note": {"$tuple": [1, {"$bytes": "aGk="}]}},
    )


def reseal(body: bytes | dict[str, Any]) -> bytes:
    """A manifest with a seal that holds, whatever stands in it."""
    if isinstance(body, dict):
        body = msgspec.json.encode({key: value for key, value in body.items() if key != "seal"})
    body = body.rstrip(b"\n").removesuffix(b"}")
    return body + f',"seal":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


# --- written and read back --------------------------------------------------------------------------------------------


def test_a_manifest_comes_back_as_it_was_written() -> None:
    manifest = make_manifest()
    data = _manifest.dumps(manifest)
    again = _manifest.loads(data, HERE)
    assert again == manifest
    assert _manifest.dumps(again) == data
    assert again.leaves["key"].shape == (2,)
    assert again.leaves["w"].chunks == 2
    assert again.leaves["w"].digest(1) == "a" * 32
    assert again.nbytes == 8 + 64


def test_a_manifest_is_one_line_of_json_that_ends_in_its_seal() -> None:
    data = _manifest.dumps(make_manifest())
    assert json.loads(data)["format"] == "ckpt_jax"
    assert data.startswith(b'{"format":"ckpt_jax","version":[1,0],')
    body, _, seal = data.rpartition(b',"seal":"')
    assert seal == hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    assert data.count(b"\n") == 1
    assert reseal(json.loads(data)) == data, "whoever follows the rules writes the same"


def test_a_manifest_may_lack_what_has_a_default() -> None:
    data = reseal(b'{"format":"ckpt_jax","version":[1,0],"tree":{"kind":"dict"}}')
    manifest = _manifest.loads(data, HERE)
    assert (manifest.step, manifest.leaves, manifest.writers, manifest.state) == (None, {}, 1, "state")


def test_what_a_later_minor_version_adds_is_ignored() -> None:
    document = json.loads(_manifest.dumps(make_manifest()))
    document["version"] = [1, 99]
    document["tiers"] = [{"any": "thing"}]
    document["leaves"]["w"]["parity"] = 5
    document["tree"]["colour"] = "blue"
    document["files"]["state/d/0"] += ["more"]
    again = _manifest.loads(reseal(document), HERE)
    assert again.leaves == make_manifest().leaves
    assert again.files == make_manifest().files


@pytest.mark.parametrize("version", [[2, 0], [2, 7], [999_999_999, 0], [10**15, 0], [10**30, 1]])
@pytest.mark.parametrize("style", ["ours", "spaced", "reordered"])
def test_a_newer_major_version_is_refused_by_name(version: list[int], style: str) -> None:
    document = json.loads(_manifest.dumps(make_manifest())) | {"version": version}
    if style == "reordered":
        document = {"version": version} | document
    body = json.dumps({k: v for k, v in document.items() if k != "seal"}) if style == "spaced" else document
    with pytest.raises(ck.Unsupported) as caught:
        _manifest.loads(reseal(body.encode() if isinstance(body, str) else body), HERE)
    assert str(caught.value) == (
        f"{HERE} is written in format {version[0]}.{version[1]}; this version reads up to 1.x\n"
        "\n"
        "hint: pip install --upgrade ckpt_jax"
    )


def test_a_newer_major_version_may_look_quite_different() -> None:
    with pytest.raises(ck.Unsupported, match=r"format 3\.1"):
        _manifest.loads(b'{"format":"ckpt_jax","version":[3,1],"leaves":"elsewhere","mac":"hmac:00"}', HERE)


@pytest.mark.parametrize(
    "version", [[0, 0], [-1, 0], [1, -1], [1], [1, 0, 0], [], "1.0", 1, None, [True, False], [1.5, 0]]
)
def test_a_version_that_never_was_is_damage(version: Any) -> None:
    document = json.loads(_manifest.dumps(make_manifest())) | {"version": version}
    with pytest.raises(ck.Corrupt):
        _manifest.loads(reseal(document), HERE)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "MANIFEST.json: expected a manifest that ends in its seal, found 0 bytes that do not"),
        (b"x" * 1234, "MANIFEST.json: expected a manifest that ends in its seal, found 1,234 bytes that do not"),
        (
            b'{"x":1,"seal":"' + b"0" * 64 + b'"}\n',
            "expected contents with the seal 000000000000…, found other contents",
        ),
    ],
)
def test_a_manifest_without_a_seal_that_holds_is_damage(data: bytes, text: str) -> None:
    with pytest.raises(ck.Corrupt) as caught:
        _manifest.loads(data, HERE)
    assert str(caught.value).startswith(f"{HERE} is damaged:\n")
    assert text in str(caught.value)
    assert str(caught.value).endswith("\n\nhint: restore an older step: `ckpt-jax ls` on the folder above lists them")


def test_the_names_of_a_million_chunks_load_in_seconds() -> None:
    manifest = make_manifest()
    manifest.leaves["w"] = Leaf("array", "uint8", (1_000_000,), (1,), digests="0123456789abcdef" * 2_000_000)
    manifest.files["state/d/1"] = File(1 << 30)
    data = _manifest.dumps(manifest)
    started = time.perf_counter()
    assert _manifest.loads(data, HERE).leaves["w"].chunks == 1_000_000
    assert time.perf_counter() - started < 5


# --- merged -----------------------------------------------------------------------------------------------------------


def make_parts() -> tuple[dict[str, Leaf], list[Part]]:
    """Two processes that hold halves of `w`, and each a copy of the rest."""
    leaves = {
        "w": Leaf("array", "float32", (4,), (1,)),
        "b": Leaf("array", "float32", (2,), (2,)),
        "empty": Leaf("array", "float32", (0,), (1,)),
        "loader": Leaf("live", type="Loader", value={"processes": [{"at": 0}]}),
        "all": Leaf("live", type="Loader", value={"global": {"at": 7}}),
        "n": Leaf("scalar", "int", value=3),
    }
    parts = [
        Part(
            process=process,
            chunks={"w": {2 * process: f"{process}a" * 16, 2 * process + 1: f"{process}b" * 16}},
            live={"loader": {"at": process}},
            shared={"n": "00", "b": "11"},
            tree="t",
        )
        for process in range(2)
    ]
    parts[1].chunks["b"] = {0: "c" * 32}
    return leaves, parts


def test_parts_make_one_whole() -> None:
    leaves, parts = make_parts()
    _manifest.merge(leaves, parts, HERE)
    assert leaves["w"].digests == "0a" * 16 + "0b" * 16 + "1a" * 16 + "1b" * 16
    assert leaves["b"].digests == "c" * 32
    assert leaves["empty"].digests == ""
    assert leaves["loader"].value == {"processes": [{"at": 0}, {"at": 1}]}
    assert leaves["all"].value == {"global": {"at": 7}}


def fails(change: Callable[[list[Part]], Any], kind: type[ck.CheckpointError]) -> str:
    leaves, parts = make_parts()
    change(parts)
    with pytest.raises(kind) as caught:
        _manifest.merge(leaves, parts, HERE)
    return str(caught.value)


def test_a_chunk_that_no_process_wrote_is_named() -> None:
    def lose(parts: list[Part]) -> None:
        del parts[0].chunks["w"][1]
        del parts[1].chunks["w"][2]
        del parts[1].chunks["b"]

    assert fails(lose, ck.Corrupt).splitlines()[:3] == [
        f"{HERE}: the processes did not write every chunk once; nothing was committed:",
        "  w: expected 4 chunks, found 2 that no process wrote",
        "  b: expected 1 chunks, found 1 that no process wrote",
    ]


def test_a_chunk_that_two_processes_wrote_is_named() -> None:
    def double(parts: list[Part]) -> None:
        parts[1].chunks["w"][0] = "d" * 32

    assert fails(double, ck.Corrupt).splitlines()[:2] == [
        f"{HERE}: the processes did not write every chunk once; nothing was committed:",
        "  w: expected chunk 0 once, found again by process 1",
    ]


def test_processes_with_different_trees_are_told_apart() -> None:
    def other(parts: list[Part]) -> None:
        parts[1].tree = "u"

    assert fails(other, ck.Unsupported) == (
        f"{HERE}: the processes do not hold the same state:\n"
        "  process 1: expected the same tree as process 0, found another structure or shapes\n"
        "\n"
        "hint: host values and fully addressable arrays must be equal everywhere; make the others global arrays"
    )


def test_processes_with_different_values_are_told_apart() -> None:
    def other(parts: list[Part]) -> None:
        parts[1].shared = {"n": "01", "b": "12"}

    assert fails(other, ck.Unsupported) == (
        f"{HERE}: the processes do not hold the same state:\n"
        "  n: expected the same value in every process, found another in process 1\n"
        "  b: expected the same value in every process, found another in process 1\n"
        "\n"
        "hint: host values and fully addressable arrays must be equal everywhere; make the others global arrays"
    )


@pytest.mark.parametrize("change", ["lose", "double"])
def test_what_stops_a_merge_says_what_to_do(change: str) -> None:
    def spoil(parts: list[Part]) -> None:
        parts[1].chunks["w"] = {2: "e" * 32} if change == "lose" else dict.fromkeys(range(4), "e" * 32)

    assert "\n\nhint: " in fails(spoil, ck.Corrupt)


# --- from a stranger --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a checkpoint beside which hostile manifests are put."""
    root = tmp_path_factory.mktemp("hostile")
    ck.save(root / "100", make_tree(), metadata={"note": (1, b"hi")})
    ck.save(root / "50", make_tree())
    return root


def make_tree() -> dict[str, Any]:
    return {
        "a": {"b": jnp.arange(6, dtype="float32").reshape(2, 3), "c": np.arange(5, dtype="int64")},
        "big": np.arange(2000, dtype="float64"),
        "key": random.key(3),
        "list": [1, 2.5, "text", None, {}, (), 2**70],
        "rng": np.random.default_rng(5),
    }


def _look_inside(step: Path) -> None:
    checkpoint = ck.open(step)
    fine = [
        lambda: checkpoint.metadata,
        lambda: checkpoint.tree,
        lambda: repr(checkpoint),
        checkpoint._repr_html_,
        lambda: checkpoint.manifest.nbytes,
        lambda: checkpoint.step,
    ]
    for name in checkpoint:
        fine += [functools.partial(_leaf, checkpoint, name), functools.partial(_value, checkpoint, name)]
    _each(fine)


def _leaf(checkpoint: Any, name: str) -> Any:
    leaf = checkpoint[name]
    return repr(leaf), leaf.shape, leaf.dtype, leaf.nbytes, leaf.size, leaf.sharding, leaf.digest, leaf.impl


def _value(checkpoint: Any, name: str) -> Any:
    return checkpoint[name][...]


def _each(calls: list[Callable[[], Any]]) -> None:
    """All of them, so that a fault in the first hides none in the others."""
    refused = None
    for call in calls:
        try:
            call()
        except ck.CheckpointError as error:
            refused = error
    if refused:
        raise refused


LOOKS: dict[str, Callable[[Path], Any]] = {
    "loads": lambda step: _manifest.loads((step / NAME).read_bytes(), str(step)),
    "open": _look_inside,
    "verify files": lambda step: ck.verify(step, level="files"),
    "verify chunks": lambda step: str(ck.verify(step)),
    "restore": ck.restore,
    "restore like": lambda step: ck.restore(step, make_tree()),
    "restore a part": lambda step: ck.restore(step, only=["list", "a"], on_extra="ignore"),
    "restore loosely": lambda step: ck.restore(step, make_tree(), on_missing="keep", on_extra="ignore", cast=True),
    "diff": lambda step: str(ck.diff(step, step.parent / "50")),
    "diff backwards": lambda step: str(ck.diff(step.parent / "50", step)),
    "steps": lambda step: ck.steps(step.parent),
    "latest": lambda step: ck.latest(step.parent),
}


def attack(root: Path, data: bytes) -> tuple[list[str], list[str]]:
    """Everything that must not come of a manifest; and what refused it in words."""
    step = root / "100"
    good = (step / NAME).read_bytes()
    (step / NAME).write_bytes(data)
    broken, refused = [], []
    try:
        for what, look in LOOKS.items():
            try:
                with bounded():
                    look(step)
            except ck.CheckpointError as error:
                refused.append(what)
                if not str(error) or len(str(error)) > 200_000:
                    broken.append(f"{what}: an error of {len(str(error))} characters")
            except BaseException as error:  # noqa: BLE001  SystemError and MemoryError too.
                broken.append(f"{what}: {type(error).__name__}: {error!s:.150}")
    finally:
        (step / NAME).write_bytes(good)
    return broken, refused


def changed(root: Path, path: str, value: Any) -> bytes:
    """The real manifest with another value at a place: `leaves/w/shape`, say. `DROP` takes it out."""
    document = json.loads((root / "100" / NAME).read_bytes())
    *way, last = path.split("/")
    at = document
    for part in way:
        at = at[int(part) if isinstance(at, list) else part]
    if value is DROP:
        del at[last]
    else:
        at[int(last) if isinstance(at, list) else last] = value
    return reseal(document)


DROP = object()


def nested(depth: int, inner: Any = 0, wrap: Callable[[Any], Any] = lambda value: [value]) -> Any:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def level(node: Any) -> dict[str, Any]:
    return {"kind": "list", "children": [node]}


MUST_REFUSE: list[tuple[str, Any]] = [
    *[
        ("leaves/big/shape", shape)
        for shape in ([2**60], [2**70], [-1], [-2000], [], [2000, 1], [1999], "x", [1.5], [True])
    ],
    *[("leaves/big/shape", shape) for shape in ([2001], [None], None, {}, ["2000"], [2**40], [1] * 100)],
    *[("leaves/big/chunk", chunk) for chunk in ([0], [-1], [-2000], [2**60], [1], [], "x", [2000, 1], [2**70])],
    *[("leaves/a.b/shape", shape) for shape in ([2**31, 2**31], [2**62, 2**62], [2, -3], [-2, -3], [6], [3, 2, 1])],
    *[("leaves/big/digests", digests) for digests in ("", "0" * 31, "0" * 33, "0" * 64, 5, None, [], "é" * 31)],
    *[("leaves/big/digests", digests) for digests in ("z" * 32, "G" * 32, " " * 32, "é" * 32, "A" * 32)],
    *[
        ("leaves/big/dtype", dtype)
        for dtype in ("", "garbage", "object", "O", "S8", "U2", "V8", "datetime64[s]", "f8,f8")
    ],
    *[
        ("leaves/big/dtype", dtype)
        for dtype in (">f8", "float99999999", "float128", "str", "bytes", "int", 5, None, "float64\0")
    ],
    *[
        ("leaves/big/dtype", dtype)
        for dtype in ("float32", "complex128", "void", "timedelta64[ns]", "1000000000i8", "(2,)f4")
    ],
    *[("leaves/big/kind", kind) for kind in ("key", "evil", "", None, 5, "live", "scalar")],
    *[("leaves/key/impl", impl) for impl in ("evil", "", "rbg", None, 5, "os.system")],
    *[("leaves/key/dtype", dtype) for dtype in ("float32", "int32", "uint64", "bool")],
    *[("leaves/key/shape", shape) for shape in ([], [1, 2], [3], [0])],
    *[
        ("leaves/list.0/value", value)
        for value in ("x", 1.5, None, [1], {"$int": "zz"}, {"$int": 5}, {"$evil": 1}, True)
    ],
    *[
        ("leaves/list.0/value", value)
        for value in ({}, {"$dict": 5}, {"$dict": [[[1], 2]]}, {"$bytes": "%"}, {"$int": None})
    ],
    *[
        ("leaves/list.1/value", value)
        for value in ({"$float": "00"}, {"$float": 5}, {"$complex": [1]}, "nan", {"$float": ""})
    ],
    *[("leaves/list.2/value", value) for value in (5, {"$str": "%%"}, {"$str": "/w=="}, None)],
    ("leaves/list.0/value", {"$array": ["object", [1], "AAAAAAAAAAA="], "$scalar": False}),
    ("leaves/list.0/value", {"$array": ["float64", [2**60], ""], "$scalar": False}),
    ("leaves/list.0/value", {"$array": ["float64", [1], "AAAA"], "$scalar": False}),
    ("leaves/list.0/value", {"$array": 5, "$scalar": False}),
    ("leaves/list.0/value", {"$array": ["float64", [0], ""]}),
    *[("leaves/list.0/dtype", dtype) for dtype in ("evil", "", "str", "NoneType", 5)],
    *[
        ("leaves/rng/value", value)
        for value in (None, [], {}, {"processes": []}, {"processes": 5}, "x", {"global": 1}, 5)
    ],
    *[
        ("leaves/rng/value", {"processes": [value]})
        for value in (None, {}, {"$int": "zz"}, {"$evil": 5}, 5, {"$dict": 5})
    ],
    *[("tree", tree) for tree in ("*", "", "x", None, 5, [], {}, {"kind": "evil"}, {"kind": "dict"}, {"kind": "none"})],
    *[("tree/keys/0", key) for key in ("b", {"x": 1}, 1.5, None, ["a"], [[]], "", "a.b", "big", 10**30)],
    *[("tree/keys/0", key) for key in ({"$tuple": ["a"]}, {"$tuple": [1.5]}, {"$bytes": "aGk="}, {"$int": "0x5"})],
    *[("tree/keys/0", key) for key in ({"$tuple": [{"$dict": []}]}, {"$evil": 1}, {"$str": "%%"}, {"$float": "00"})],
    ("tree/keys", []),
    ("tree/keys", None),
    ("tree/kind", "list"),
    ("tree/kind", "tuple"),
    ("tree/kind", "unnamed"),
    ("tree/kind", "none"),
    ("tree/children/1", "**"),
    ("tree/children/1", {"kind": "none", "children": ["*"]}),
    ("tree/children/0/keys", ["b", "b"]),
    ("tree/children/0/keys", ["c", "b"]),
    *[(f"files/{path}", [1, ""]) for path in ("..", "state\0x", "c:\\x")],
    ("files", {"../100/MANIFEST.json": [100, ""]}),
    ("files", {"/etc/passwd": [1, ""]}),
    ("files", {"state/../../x": [10**9, ""]}),
    ("files", {"./state": [10**9, ""]}),
    ("files", {"state//d": [10**9, ""]}),
    ("files", {"": [10**9, ""]}),
    ("files", {"state/": [10**9, ""]}),
    ("files", {"nothing": [10**9, ""]}),
    ("files", {}),
    ("files", []),
    ("files", {"state": [2**62, ""]}),
    ("files", {f"state/{i}": [1000, ""] for i in range(10_000)}),
    ("files/state~manifest.ocdbt", [-1, ""]),
    *[
        ("state", state)
        for state in ("../state", "state/../state", "/etc", "", "state.zz", "state.", ".", "..", "state\n", 5)
    ],
    ("state", "state.00ff"),
    *[("step", step) for step in ("100", 100.5, True, [100], -1, 2**70, 99)],
    *[("time", value) for value in ("now", None, [])],
    *[("writers", value) for value in ("2", None, 1.5)],
    *[("shardings", value) for value in (None, 5, [5], ["x"], {}, [None])],
    *[("leaves/a.b/sharding", value) for value in (99, -99, "x", 1.5, 2**70)],
    *[("seconds", value) for value in ({"write": "x"}, [], 5, {"write": None})],
    ("metrics", []),
    ("attempt", 5),
    ("format", "orbax"),
    ("format", DROP),
    ("version", DROP),
    ("tree", DROP),
    ("leaves", DROP),
    ("leaves", []),
    ("leaves", {}),
    ("leaves/big", DROP),
    ("leaves/big", None),
    ("leaves/big", {}),
    ("leaves/evil", {"kind": "scalar", "dtype": "int", "value": 5}),
    ("files", DROP),
]


def _shown(value: Any) -> str:
    return "gone" if value is DROP else f"{value!s:.30}" if not isinstance(value, int) else f"{value:.3g}"


@pytest.mark.parametrize(("path", "value"), MUST_REFUSE, ids=lambda v: v if isinstance(v, str) and "/" in v else None)
def test_a_manifest_that_cannot_be_is_refused_in_words(real: Path, path: str, value: Any) -> None:
    """Whatever stands in it: never a wrong value, another exception, much time or much memory."""
    way = path.split("/")
    if way[0] == "files" and len(way) == 2:
        data = changed(
            real, "files", json.loads((real / "100" / NAME).read_bytes())["files"] | {way[1].replace("~", "/"): value}
        )
    else:
        data = changed(real, path, value)
    broken, refused = attack(real, data)
    assert broken == []
    assert {"restore", "restore like"} & set(refused) or _reported(real, data)


def _reported(root: Path, data: bytes) -> bool:
    step = root / "100"
    good = (step / NAME).read_bytes()
    (step / NAME).write_bytes(data)
    try:
        return not ck.verify(step).ok
    finally:
        (step / NAME).write_bytes(good)


MAY_WORK: list[tuple[str, Any]] = [
    ("step", DROP),
    ("time", 1e300),
    ("writers", -5),
    ("writers", 10**30),
    ("attempt", "../../x"),
    ("shardings", [{} for _ in range(9)]),
    ("leaves/a.b/type", "os.system"),
    ("leaves/a.b/host", "evil"),
    ("leaves/a.b/host", "scalar"),
    ("leaves/a.b/weak", True),
    ("leaves/rng/type", "os.system"),
    ("leaves/list.2/type", "pathlib.PurePosixPath"),
    ("leaves/big/value", {"$int": "zz"}),
    ("leaves/list.0/shape", [2**60]),
    ("leaves/list.0/chunk", [0]),
    ("leaves/list.0/value", {"$int": "0x" + "f" * 100_000}),
    ("leaves/list.0/value", {"$int": "-0x0"}),
    ("leaves/list.2/value", "x" * 1_000_000),
    ("tree/type", "os.system"),
    ("tree/kind", "named"),
    ("tree/children/3/type", "x" * 100_000),
    ("tree/static", "evil"),
    ("tree/children/0/children/0", "*"),
    ("metadata", {"$evil": 1}),
    ("metadata", {"$int": "zz"}),
    ("metadata", {"$array": ["object", [1], "AAAAAAAAAAA="], "$scalar": False}),
    ("metadata", {"$array": ["float64", [2**40, 0], ""], "$scalar": True}),
    ("metadata", {"$array": ["float64", [], "AAAAAAAAAAA="], "$scalar": False}),
    ("metadata", {"$array": ["S1000000000000", [0], ""], "$scalar": False}),
    ("metadata", {"a": 1, "$int": "0x1"}),
    ("metadata", {"$dict": [[{"$dict": []}, 1]]}),
    ("metadata", {"$tuple": 5}),
    ("metadata", "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace")),
    ("metrics", {"loss": {"$float": "x"}}),
    ("seconds", {"write": -1e308}),
]


@pytest.mark.parametrize(("path", "value"), MAY_WORK)
def test_a_strange_manifest_works_or_is_refused_in_words(real: Path, path: str, value: Any) -> None:
    broken, _ = attack(real, changed(real, path, value))
    assert broken == []


@pytest.mark.parametrize("depth", [60, 100, 200, 300, 400, 500, 700, 900, 1100, 10_000, 1_000_000])
@pytest.mark.parametrize("where", ["metadata", "value", "tuple", "tree", "key", "live"])
def test_deep_nesting_is_refused_in_words(real: Path, where: str, depth: int) -> None:
    """There is a depth that JSON's reader takes and the code behind it does not."""
    document = json.loads((real / "100" / NAME).read_bytes())
    mark = "@@@"
    if where == "metadata":
        document["metadata"], before, after = mark, "[", "]"
    elif where == "value":
        document["leaves"]["list.0"]["value"], before, after = mark, "[", "]"
    elif where == "tuple":
        document["metadata"], before, after = mark, '{"$tuple":[', "]}"
    elif where == "live":
        document["leaves"]["rng"]["value"]["processes"], before, after = [mark], '{"x":', "}"
    elif where == "key":
        document["tree"]["keys"][0], before, after = mark, "[", "]"
    else:
        document["tree"] = {"kind": "list", "children": [mark, *document["tree"]["children"]]}
        before, after = '{"kind":"list","children":[', "]}"
    body = msgspec.json.encode({k: v for k, v in document.items() if k != "seal"}).decode()
    inner = "0" if where != "tree" else '{"kind":"none"}'
    data = reseal(body.replace(f'"{mark}"', before * depth + inner + after * depth).encode())
    broken, _ = attack(real, data)
    assert broken == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"format":"ckpt_jax","version":[1,0],"tree":{"kind":"dict"},"step":1,"step":2}',
        b'{"format":"ckpt_jax","version":[1,0],"leaves":{"a":{"kind":"scalar"},"a":{"kind":"scalar"}},"tree":"*"}',
        b'{"format":"ckpt_jax","version":[1,0],"tree":{"kind":"dict","kind":"list"}}',
        b'{"format":"ckpt_jax","version":[1,0],"version":[2,0],"tree":{"kind":"dict"}}',
        b'{"format":"ckpt_jax","version":[1,0],"attempt":"\xff\xfe","tree":{"kind":"dict"}}',
        b'{"format":"ckpt_jax","version":[1,0],"attempt":"\xed\xa0\x80","tree":{"kind":"dict"}}',
        b'{"format":"ckpt_jax","version":[1,0],"attempt":"\\ud800","tree":{"kind":"dict"}}',
        b'{"format":"ckpt_jax","version":[1,0],"leaves":{"\xff":{"kind":"scalar"}},"tree":"*"}',
        b'{"format":"ckpt_jax","version":[1,0],"time":1e999,"tree":{"kind":"dict"}}',
        b'{"format":"ckpt_jax","version":[1,0],"time":NaN,"tree":{"kind":"dict"}}',
        b'{"format":"ckpt_jax","version":[1,0],"step":' + b"9" * 5000 + b',"tree":{"kind":"dict"}}',
        b'{"format":"ckpt_jax","version":[1,0],"metadata":' + b"9" * 1_000_000 + b',"tree":{"kind":"dict"}}',
        b'{"format":"ckpt_jax","version":[1,0],"tree":{"kind":"dict"}}{}',
        b'[1,{"format":"ckpt_jax","version":[1,0]}',
        b"{}",
        b"null",
        b"",
        b"\x00" * 1000,
        b'{"x":1',
        b'{"format":"ckpt_jax","version":[1,0],"tree":{"kind":"dict"},"seal":"' + b"0" * 64 + b'"}',
    ],
    ids=lambda body: None,
)
def test_raw_bytes_with_a_seal_that_holds_are_refused_in_words(real: Path, body: bytes) -> None:
    broken, _ = attack(real, reseal(body))
    assert broken == []


def test_the_names_in_the_tree_are_those_of_the_leaves(real: Path) -> None:
    document = json.loads((real / "100" / NAME).read_bytes())
    leaves = document["leaves"]
    document["leaves"] = {("elsewhere" if name == "big" else name): leaf for name, leaf in leaves.items()}
    with pytest.raises(ck.Corrupt):
        _manifest.loads(reseal(document), HERE)


@pytest.mark.parametrize("child", ["*", {"kind": "none"}], ids=str)
def test_names_with_a_long_beginning_in_common_are_not_written_out(child: Any) -> None:
    """A megabyte of JSON that says 20 GB of names."""
    tree: Any = {"kind": "list", "children": [child] * 20_000}
    for _ in range(10):
        tree = {"kind": "dict", "children": [tree], "keys": ["k" * 100_000]}
    data = reseal({"format": "ckpt_jax", "version": [1, 0], "tree": tree})
    tracemalloc.start()
    with pytest.raises(ck.Corrupt):
        _manifest.loads(data, HERE)
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()


def test_a_manifest_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    """A sparse file of a terabyte takes no place."""
    (tmp_path / "100").mkdir()
    (tmp_path / "100" / NAME).touch()
    os.truncate(tmp_path / "100" / NAME, 2**40)
    with bounded(), pytest.raises(ck.Corrupt, match="expected a manifest of 1,073,741,824 bytes at most"):
        ck.open(tmp_path / "100")
    assert ck.steps(tmp_path) == []


def test_a_leaf_named_like_a_path_leads_nowhere(real: Path) -> None:
    for name in ("../../../etc/passwd", "/etc/passwd", "a/../../b", "~root", "a\0b", ".."):
        document = json.loads((real / "100" / NAME).read_bytes())
        document["leaves"] = {(name if n == "big" else n): leaf for n, leaf in document["leaves"].items()}
        document["tree"]["keys"][document["tree"]["keys"].index("big")] = name
        broken, refused = attack(real, reseal(document))
        assert broken == []
        assert "restore" in refused


def test_an_array_that_is_said_to_be_huge_is_not_made(real: Path) -> None:
    """Files of which the manifest says that they are large enough are not there, or not so large."""
    document = json.loads((real / "100" / NAME).read_bytes())
    document["leaves"]["big"] |= {"shape": [2**45], "chunk": [2**45]}
    document["files"]["state/d/more"] = [2**50, ""]
    broken, refused = attack(real, reseal(document))
    assert broken == []
    assert {"open", "restore", "restore like"} <= set(refused)
    document["leaves"]["big"] |= {"shape": [2**33], "chunk": [2**33]}
    broken, _ = attack(real, reseal(document))
    assert broken == []


def test_chunks_of_zero_elements_are_refused(real: Path) -> None:
    for shape, chunk in [([0], [0]), ([0, 2**60], [1, 0]), ([2**60, 0], [0, 1])]:
        document = json.loads((real / "100" / NAME).read_bytes())
        document["leaves"]["big"] |= {"shape": shape, "chunk": chunk, "digests": ""}
        with pytest.raises(ck.Corrupt):
            _manifest.loads(reseal(document), HERE)


@pytest.mark.parametrize("shape", [[0, 2**62], [2**70, 0], [0] * 100, [2**40, 2**40, 0]])
def test_an_empty_array_of_absurd_extent_works_or_is_refused(real: Path, shape: list[int]) -> None:
    document = json.loads((real / "100" / NAME).read_bytes())
    document["leaves"]["big"] |= {"shape": shape, "chunk": [1] * len(shape), "digests": ""}
    broken, _ = attack(real, reseal(document))
    assert broken == []


def test_a_store_that_was_made_with_other_settings_is_read(tmp_path: Path) -> None:
    """What a writer chooses must not bind later readers."""
    tree = {"w": np.arange(1000.0), "b": np.ones(3), "n": 5}
    config = {"max_inline_value_bytes": 10, "max_decoded_node_bytes": 4096, "compression": None}
    with mock.patch.object(_writing, "_CONFIG", config):
        ck.save(tmp_path / "1", tree)
    assert ck.verify(tmp_path / "1").faults == ()
    np.testing.assert_array_equal(ck.restore(tmp_path / "1")["w"], tree["w"])
    np.testing.assert_array_equal(ck.open(tmp_path / "1")["b"][:], tree["b"])


def test_a_compressed_tree_of_keys_is_refused_in_words(tmp_path: Path) -> None:
    """Rule F-7. TensorStore would read it, and end this process where it says more than there is memory."""
    ck.save(tmp_path / "1", {"w": np.arange(1000.0)})
    state = tmp_path / "1" / "state"
    raw = (state / "manifest.ocdbt").read_bytes()
    packed = raw[:13] + b"\1" + raw[14:-4]  # The byte that says how the rest is compressed.
    (state / "manifest.ocdbt").write_bytes(packed + crc32c.crc32c(packed).to_bytes(4, "little"))
    for look in (ck.restore, lambda path: ck.open(path)["w"][:], lambda path: ck.verify(path).check()):
        with pytest.raises(ck.Corrupt, match=r"w: .*found a tree of keys that is compressed, or of a later version"):
            look(tmp_path / "1")


# --- fuzz -------------------------------------------------------------------------------------------------------------

atoms = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 31, 32, 33, 2**31, 2**53, 2**60, 2**63, 2**64, 2**70, -(2**63), 1e308, 0.5, -0.0]),
    st.sampled_from(
        [None, True, False, "", "*", "$int", "dict", "list", "named", "key", "array", "scalar", "live", "state"]
    ),
    st.sampled_from(
        ["float32", "bfloat16", "int4", "uint64", "bool", "complex64", "O", "S5", "..", "/etc", "a.b", "0" * 32]
    ),
    st.text(max_size=5),
)
junk = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["kind", "children", "keys", "$dict", "$array", "$tuple", "$scalar", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a document."""
    found = []
    stack = [document]
    while stack:
        at = stack.pop()
        for key in list(at) if isinstance(at, dict) else range(len(at)):
            found.append((at, key))
            if isinstance(at[key], (dict, list)):
                stack.append(at[key])
    return found


@given(data=st.data())
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_change_to_a_manifest_works_or_is_refused_in_words(real: Path, data: st.DataObject) -> None:
    document = json.loads((real / "100" / NAME).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        every = places(document)
        if not every:
            break
        at, key = data.draw(st.sampled_from(range(len(every))).map(every.__getitem__))
        match data.draw(st.sampled_from(["replace", "replace", "delete", "swap", "copy", "nudge"])):
            case "replace":
                at[key] = data.draw(junk)
            case "delete":
                del at[key]
            case "nudge" if isinstance(at[key], int):
                at[key] += data.draw(st.sampled_from([1, -1, 2**32]))
            case "copy":
                if isinstance(at, list):
                    at.insert(key, copy.deepcopy(at[key]))
                else:
                    at[data.draw(st.text(max_size=3))] = copy.deepcopy(at[key])
            case _:
                other, there = data.draw(st.sampled_from(range(len(every))).map(every.__getitem__))
                one, two = copy.deepcopy(at[key]), copy.deepcopy(other[there])
                at[key], other[there] = two, one
    broken, _ = attack(real, reseal(document))
    assert broken == []


@given(data=st.data())
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_change_to_the_bytes_of_a_manifest_works_or_is_refused_in_words(real: Path, data: st.DataObject) -> None:
    body = bytearray((real / "100" / NAME).read_bytes().rpartition(b',"seal":')[0])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        new = data.draw(
            st.sampled_from([b"", b"0", b"9", b"-", b"[", b"{", b"}", b"]", b'"', b",", b"e9", b"\xff", b"\\u0000"])
        )
        body[at : at + data.draw(st.integers(0, 2))] = new
    broken, _ = attack(real, reseal(bytes(body)))
    assert broken == []


def test_the_attacks_left_the_checkpoint_as_it_was(real: Path, tmp_path: Path) -> None:
    assert ck.verify(real / "100").ok
    assert sorted(path.name for path in real.iterdir()) == ["100", "50", "LATEST"]
    shutil.rmtree(tmp_path)
