"""A checkpoint that a stranger wrote is refused in words or read as it says, and nothing else is opened.

Promise R-9.
"""

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crc32c
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_jax import _ocdbt, _ocdbt_writer, _storage
from ckpt_jax._ocdbt import Value

from .. import conftest
from . import hostile, nodes, strange
from .hostile import DATA, KEYS, MANIFEST, TREE, Broken, Damage, World, attack
from .nodes import Below, Entry

CORPUS = Path(__file__).parent / "corpus"
REFUSED, EQUAL, AS_TOLD = "CheckpointError", "values equal", "as its manifest says"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One for all: each attack leaves it as it was, which `test_the_attacks_left_…` makes sure of."""
    memory = Path("/dev/shm")
    top = tmp_path_factory.mktemp("hostile")
    if memory.is_dir() and os.access(memory, os.W_OK):
        top = memory / f"hostile-{os.getpid()}"
        shutil.rmtree(top, ignore_errors=True)
        top.mkdir()
    made = hostile.make(top)
    for warm in ({}, {MANIFEST: b""}, {TREE: b""}):  # What is imported or compiled only now is no attack's fault.
        attack(made, warm)
    yield made
    shutil.rmtree(top)


# --- anything ---------------------------------------------------------------------------------------------------------


def test_every_saved_input_is_refused_or_read_as_it_says(world: World, count: conftest.Count) -> None:
    """What fuzzing found to reach ever more of the code: `python -m tests.torture.fuzz`."""
    tally: Counter[tuple[str, str]] = Counter()
    inputs = sorted(path for path in CORPUS.rglob("*") if path.is_file())
    assert len(inputs) >= 100
    for path in inputs:
        damage = strange.damage_of(world, path.read_bytes())
        try:
            tally[strange.kind_of(damage), attack(world, damage)] += 1
        except Broken as broken:
            broken.add_note(f"the input is {path}")
            raise
    for (fault, outcome), number in tally.items():
        count(fault, outcome, number)


def test_any_bytes_at_all_are_refused_or_read_as_they_say(world: World, full: bool, count: conftest.Count) -> None:
    tally: Counter[tuple[str, str]] = Counter()

    def try_one(head: int, change: int, rest: bytes) -> None:
        damage = strange.damage_of(world, bytes([head, change]) + rest)
        tally[strange.kind_of(damage), attack(world, damage)] += 1

    inputs = given(st.sampled_from((3, 3, 1, 0)), st.integers(0, 255), st.binary(max_size=120))
    chosen = settings(
        max_examples=15_000 if full else 400,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    chosen(inputs(try_one))()
    for (fault, outcome), number in tally.items():
        count(fault, outcome, number)


# --- links, pipes, folders --------------------------------------------------------------------------------------------

PLACES = (MANIFEST, KEYS, TREE, DATA, "state/_METADATA", "BAD.json", "state", "state/d", "state/ocdbt.process_0")


def _absolute(world: World, path: str) -> hostile.Make:
    return lambda place: place.symlink_to(world.outside / path)


def _relative(world: World, path: str) -> hostile.Make:
    return lambda place: place.symlink_to(os.path.relpath(world.outside / path, place.parent))


def _to_itself(world: World, path: str) -> hostile.Make:
    return lambda place: place.symlink_to(place.name)


def _endless(world: World, path: str) -> hostile.Make:
    return lambda place: place.symlink_to("/dev/zero")


def _pipe(world: World, path: str) -> hostile.Make:
    return os.mkfifo


def _folder(world: World, path: str) -> hostile.Make:
    return Path.mkdir


def _far_too_large(world: World, path: str) -> hostile.Make:
    def sparse(place: Path) -> None:
        place.touch()
        os.truncate(place, 2**40)

    return sparse


ODD = (_absolute, _relative, _to_itself, _endless, _pipe, _folder, _far_too_large)


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__.strip("_"))
def test_what_is_no_file_is_no_file_and_leads_nowhere(
    world: World, path: str, odd: Callable[[World, str], hostile.Make], count: conftest.Count
) -> None:
    """What a link leads to is whole and right, and is refused all the same: it lies elsewhere."""
    outcome = attack(world, {path: odd(world, path)})
    assert outcome == (EQUAL if path == "BAD.json" else REFUSED)  # That file only says that `steps` leaves it out.
    count("hostile links, pipes and folders", outcome)


def test_a_link_beside_the_files_that_count_changes_nothing(world: World, count: conftest.Count) -> None:
    outcome = attack(world, {"state/d/other": _absolute(world, TREE), "state/pipe": os.mkfifo})
    assert outcome == EQUAL
    count("hostile links, pipes and folders", outcome)


def test_a_file_of_an_honest_size_and_a_terabyte_of_nothing_is_digested_piece_by_piece(world: World) -> None:
    """Its manifest says its size, and a digest: what reads it may not read it as a whole."""
    size = 3 << 30

    def sparse(place: Path) -> None:
        place.touch()
        os.truncate(place, size)

    document = world.document
    document["files"]["state/_METADATA"] = [size, "0" * 32]
    assert attack(world, {"state/_METADATA": sparse, MANIFEST: hostile.sealed(document)}) == EQUAL


# --- paths in the tree of keys ----------------------------------------------------------------------------------------


def _space(world: World, data: bytes, root: Below, height: int, **files: Any) -> Damage:
    """The damage of another tree of keys, of which the manifest tells the truth."""
    changed = {TREE: data, KEYS: nodes.manifest(root, height), **files}
    return {MANIFEST: hostile.sealed(hostile.accounted(world.document, changed)), **changed}


def _entries(world: World) -> list[Entry]:
    return [Entry(key, *msgspec.structs.astuple(value)) for key, value in world.keys.items()]


ELSEWHERE = (
    "../../../outside/{}",
    "@/{}",
    "ocdbt.process_0/../../../../outside/{}",
    "../../50/{}",
    "/../outside/{}",
    "//{}",
    "{}\0",
    "d/../{}",
)


@pytest.mark.parametrize("path", ELSEWHERE)
def test_a_value_that_lies_outside_is_not_read(world: World, path: str, count: conftest.Count) -> None:
    """The bytes there are the right ones, so only where they lie is wrong."""
    to = path.format(DATA).replace("@", str(world.outside))
    data = nodes.leaf([entry._replace(file=to) if entry.data is None else entry for entry in _entries(world)])
    outcome = attack(world, _space(world, data, Below(b"", 0, "d/tree", 0, len(data)), 0))
    assert outcome == REFUSED
    count("hostile OCDBT node", outcome)


@pytest.mark.parametrize("path", ELSEWHERE)
def test_a_tree_whose_root_lies_outside_is_not_read(world: World, path: str, count: conftest.Count) -> None:
    to = path.format(TREE).replace("@", str(world.outside))
    outcome = attack(world, _space(world, world.whole[TREE], Below(b"", 0, to, 0, len(world.whole[TREE])), 0))
    assert outcome == REFUSED
    count("hostile OCDBT node", outcome)


@pytest.mark.parametrize(
    "path", ["../outside/x", "/etc/passwd", "state/../../x", "..", "./x", "state//x", "a\\b", "x\0"]
)
def test_a_file_of_the_manifest_that_lies_outside_is_refused(world: World, path: str, count: conftest.Count) -> None:
    document = world.document
    document["files"][path] = [1]
    outcome = attack(world, {MANIFEST: hostile.sealed(document)})
    assert outcome == REFUSED
    count("hostile manifest", outcome)


@pytest.mark.parametrize("path", ["x" * 300, "/".join(["y" * 200] * 30), "é" * 200, "MANIFEST.json/x"])
def test_a_file_that_no_system_can_have_is_not_there(world: World, path: str, count: conftest.Count) -> None:
    """And hides no other step: `latest` looks at the files of all."""
    document = world.document
    document["files"][path] = [1]
    outcome = attack(world, {MANIFEST: hostile.sealed(document)})
    assert outcome == REFUSED
    count("hostile manifest", outcome)


# --- numbers in the tree of keys --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", strange.NUMBERS)
@pytest.mark.parametrize("field", ["offset", "length"])
def test_a_value_with_any_place_is_refused(world: World, field: str, number: int, count: conftest.Count) -> None:
    entries = [e if e.data is not None else e._replace(**{field: min(number, 2**64 - 1)}) for e in _entries(world)]
    data = nodes.leaf(entries)
    outcome = attack(world, _space(world, data, Below(b"", 0, "d/tree", 0, len(data)), 0))
    assert outcome == REFUSED
    count("hostile OCDBT node", outcome)


@pytest.mark.parametrize("number", [n for n in strange.NUMBERS if n])
@pytest.mark.parametrize("field", ["offset", "length", "height", "below"])
def test_a_node_with_any_place_is_refused(world: World, field: str, number: int, count: conftest.Count) -> None:
    """Unless its length alone is too large: the file ends where the node does."""
    number = min(number, 2**64 - 1)
    data = world.whole[TREE]
    root = Below(b"", 0, "d/tree", 0, len(data))
    if field == "below":  # One floor further down.
        node = nodes.interior(1, [root._replace(offset=number)])
        root, data, height = Below(b"", 0, "d/tree", len(data), len(node)), data + node, 1
    elif field == "height":
        height = number % 256 or 1
    else:
        root, height = root._replace(**{field: number}), 0
    outcome = attack(world, _space(world, data, root, height))
    assert outcome == (EQUAL if field == "length" and len(data) <= number <= _ocdbt.NODE_BYTES else REFUSED)
    count("hostile OCDBT node", outcome)


def test_floors_of_nodes_that_all_point_to_the_same_one_are_walked_once(world: World, count: conftest.Count) -> None:
    """2^40 ways to the values. Some file is gone, so that whoever tells of it asks what lay in each."""
    data, here, width = world.whole[TREE], Below(b"", 0, "d/tree", 0, len(world.whole[TREE])), 16
    for height in range(1, 11):
        node = nodes.interior(height, [here._replace(key=b"%02d" % i if i else b"") for i in range(width)])
        here = Below(b"", 0, "d/tree", len(data), len(node))
        data += node
    outcome = attack(world, _space(world, data, here, 10, **{"commit_success.txt": None}))
    assert outcome == REFUSED
    count("hostile OCDBT node", outcome)


@pytest.mark.parametrize("height", [1, 2, 255])
def test_a_node_that_is_its_own_child_ends_nowhere(world: World, height: int, count: conftest.Count) -> None:
    """Its length does not change with what it says of its length, once it is about right."""
    node = b""
    for _ in range(4):
        node = nodes.interior(height, [Below(b"", 0, "d/tree", 0, len(node))])
    outcome = attack(world, _space(world, node, Below(b"", 0, "d/tree", 0, len(node)), height))
    assert outcome == REFUSED
    count("hostile OCDBT node", outcome)


def test_a_long_beginning_that_many_keys_share_is_not_written_out(world: World, count: conftest.Count) -> None:
    """100 kB that say 3 GB."""
    size, many = 60_000, 50_000
    numbers = [0, many], [size] * (many - 1), [size] + [1] * (many - 1)
    body = [b"\0", *map(nodes.varints, numbers), b"a" * (size + many - 1), nodes.varints([0] * many), bytes(many)]
    data = _ocdbt_writer._framed(_ocdbt.NODE_MAGIC, body)
    outcome = attack(world, _space(world, data, Below(b"", 0, "d/tree", 0, len(data)), 0))
    assert outcome == REFUSED
    count("hostile OCDBT node", outcome)


@pytest.mark.parametrize("path", [TREE, KEYS])
def test_what_says_much_more_once_it_is_unpacked_is_not_unpacked(
    world: World, path: str, count: conftest.Count
) -> None:
    """92 kB of zstd that say 2 GB, at which TensorStore ends the process."""
    many = 2000
    keys = _ocdbt_writer._keys([b"%08d" % i for i in range(many)])
    head = b"".join([b"\0", nodes.varints([0]), keys, nodes.varints([1 << 20] * many), bytes(many)])
    blocks = [(len(head) << 3).to_bytes(3, "little") + head]  # As it is; then zeros, 128 KiB in four bytes.
    blocks += [((1 << 17 << 3) | 2).to_bytes(3, "little") + b"\0"] * (8 * many - 1)
    blocks += [((1 << 17 << 3) | 3).to_bytes(3, "little") + b"\0"]
    inner = b"\0\1" + bytes.fromhex("28b52ffd0038") + b"".join(blocks)
    magic = _ocdbt.NODE_MAGIC if path == TREE else _ocdbt.MANIFEST_MAGIC
    data = magic + (16 + len(inner)).to_bytes(8, "little") + inner
    data += crc32c.crc32c(data).to_bytes(4, "little")
    damage = _space(world, data, Below(b"", 0, "d/tree", 0, len(data)), 0)
    if path == KEYS:
        changed = {KEYS: data}
        damage = {MANIFEST: hostile.sealed(hostile.accounted(world.document, changed)), **changed}
    outcome = attack(world, damage)
    assert outcome == REFUSED
    count("hostile OCDBT node", outcome)


@pytest.mark.parametrize("number", [2**20, 2**31, 2**32, 2**63, 2**64 - 1])
def test_a_node_of_so_many_values_is_refused(world: World, number: int, count: conftest.Count) -> None:
    head = b"\0" + nodes.varints([0, number])
    data = _ocdbt_writer._framed(_ocdbt.NODE_MAGIC, [head, bytes(100)])
    outcome = attack(world, _space(world, data, Below(b"", 0, "d/tree", 0, len(data)), 0))
    assert outcome == REFUSED
    count("hostile OCDBT node", outcome)


def test_a_chunk_that_is_another_chunk_s_bytes_is_refused(world: World, count: conftest.Count) -> None:
    """Places overlap, each within its file and of the right length."""
    first = next(entry for entry in _entries(world) if entry.data is None)
    entries = [e if e.data is not None else first._replace(key=e.key) for e in _entries(world)]
    data = nodes.leaf(entries)
    outcome = attack(world, _space(world, data, Below(b"", 0, "d/tree", 0, len(data)), 0))
    assert outcome == REFUSED
    count("hostile OCDBT node", outcome)


# --- the manifest's names ---------------------------------------------------------------------------------------------


def _tree(children: list[Any], depth: int, letters: int) -> Any:
    """Containers below each other, each under a long key, and the last with many children."""
    tree: Any = {"kind": "list", "children": children}
    for _ in range(depth):
        tree = {"kind": "dict", "children": [tree], "keys": ["k" * letters]}
    return tree


@pytest.mark.parametrize("child", ["*", {"kind": "none"}, {"kind": "dict"}], ids=str)
def test_names_with_a_long_beginning_in_common_are_not_written_out(
    world: World, child: Any, count: conftest.Count
) -> None:
    """A megabyte of JSON that says 20 GB of names."""
    document = world.document
    document["tree"] = _tree([child] * 20_000, 10, 100_000)
    if child != "*":
        document["leaves"] = {}
    outcome = attack(world, {MANIFEST: hostile.sealed(document)})
    assert outcome == REFUSED
    count("hostile manifest", outcome)


@pytest.mark.parametrize(
    "shape", [[2**40], [2**60], [2**30, 2**30], [2**20] * 3, [1] * 63 + [2**60], [2**40, 2**40, 2**40]]
)
@pytest.mark.parametrize("chunk", ["as large", 1])
def test_an_array_of_2_to_the_60_is_never_made(world: World, shape: list[int], chunk: Any, count: Any) -> None:
    cells = shape if chunk == "as large" else [1] * len(shape)
    for size in (0, 2**50, 2**62):  # Also where a file is said to be large enough for it.
        document = world.document
        document["files"]["state/huge"] = [size]
        document["leaves"]["big"] |= {"shape": shape, "chunk": cells, "digests": "0" * 32}
        outcome = attack(world, {MANIFEST: hostile.sealed(document), "state/huge": b""})
        assert outcome == REFUSED
        count("hostile manifest", outcome)


def test_a_manifest_of_spaces_is_refused(world: World, count: conftest.Count) -> None:
    for data in (b" " * (8 << 20), hostile.sealed(b" " * (8 << 20)), hostile.sealed(b"{" + b" " * (8 << 20))):
        assert attack(world, {MANIFEST: data}) == REFUSED
        count("hostile manifest", REFUSED)


# --- the tests themselves ---------------------------------------------------------------------------------------------


def test_opening_what_lies_outside_is_noticed(world: World) -> None:
    """By Python's audit hook, and on Linux where C++ opens it, which Python knows nothing of."""
    with world.watch as opened:
        (world.outside / TREE).read_bytes()
    assert str(world.outside / TREE) in opened
    with world.watch as opened:
        (world.step / TREE).read_bytes()
    assert opened == []
    import tensorstore as ts

    with world.watch as opened:
        ts.KvStore.open({"driver": "file", "path": f"{world.outside}/"}).result().read(KEYS).result()
    assert opened or world.watch.fd < 0


def test_what_breaks_a_promise_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(what: str, look: Callable[[World], Any]) -> str:
        monkeypatch.setattr(hostile, "LOOKS", hostile.LOOKS | {what: look})
        with pytest.raises(Broken) as caught:
            attack(world, {})
        monkeypatch.undo()
        return str(caught.value)

    assert "KeyError" in wrong("steps", lambda world: {}["x"])
    assert "MemoryError" in wrong("steps", lambda world: bytearray(8 << 30))
    assert "MB more than before" in wrong("steps", lambda world: b"x" * (800 << 20) and [50])
    assert "wrong values" in wrong("restore", lambda world: [1])
    assert "is not seen" in wrong("latest", lambda world: None)
    monkeypatch.setattr(hostile, "SECONDS", 1)
    assert "TimeoutError" in wrong("steps", lambda world: time.sleep(100))


def test_the_attacks_left_the_checkpoint_as_it_was(world: World) -> None:
    files = {str(p.relative_to(world.step)): p.read_bytes() for p in world.step.rglob("*") if p.is_file()}
    assert files == world.whole
    assert attack(world, {}) == EQUAL
    place = _storage.folder(world.step / "state")
    assert _ocdbt.Tree(place, place.files()).find("big/c/0") == world.keys[b"big/c/0"]
    assert isinstance(world.keys[b"big/c/0"], Value)
    assert crc32c.crc32c(world.whole[TREE][:-4]).to_bytes(4, "little") == world.whole[TREE][-4:]
