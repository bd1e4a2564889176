"""Damage: whatever befalls the bytes of a checkpoint is found and named, or touched nothing that anyone reads.

Promises R-7 and R-8.
"""

import itertools
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

import ckpt_jax as ck
from ckpt_jax import _chunks, _commit, _manifest, _reading, _writing
from tests.cells import cells_of
from tests.conftest import Count
from tests.torture.damage import (
    MANIFEST,
    Tally,
    World,
    chunks_in_files,
    damages,
    fingerprint,
    flipped,
    judge,
    make_world,
    opened,
    same,
)

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    """Chunks of at most 2 kB, data files of 8 kB, tree nodes of 4 kB: a small checkpoint has several of each."""
    config = _writing._CONFIG | {"max_decoded_node_bytes": 4096}
    with mock.patch.multiple(_writing, DATA_FILE=8 << 10, _CONFIG=config), cells_of(2048):
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("damage"))


@pytest.fixture
def copy(world: World, tmp_path: Path) -> World:
    """A copy of the world that a test may break."""
    shutil.copytree(world.root, tmp_path / "root")
    return World(tmp_path / "root", world.trees, world.like, world.expected, world.manifest)


PARTS = 4  # For several to be tried at once.


@pytest.mark.parametrize("part", range(PARTS))
def test_no_damage_is_ever_restored_as_if_it_were_whole(part: int, world: World, full: bool, count: Count) -> None:
    tally = Tally()
    before = {file: (world.step / file).read_bytes() for file in world.files}
    for damage in itertools.islice(damages(world, full=full), part, None, PARTS):
        with damage.do():
            judge(world, damage, tally)
    for (kind, outcome), number in tally.outcomes.items():
        count(f"damage: {kind}", outcome, number)
    assert {file: (world.step / file).read_bytes() for file in world.files} == before, "the test puts all back"
    assert tally.silent == []
    assert tally.wrong_error == []
    assert tally.unseen_by_verify == []
    assert tally.touched == []
    assert tally.tried > (20_000 if full else 3_000) / PARTS
    assert tally.count("detected") > tally.tried / 2
    # What nobody reads: the newline that ends the manifest.
    assert tally.unused.keys() <= {MANIFEST}
    assert tally.unused[MANIFEST] <= 1


# --- damage that every lower check takes for whole --------------------------------------------------------------------


def _chunk_bytes(world: World, name: str, coords: tuple[int, ...], step: int = 200) -> tuple[Path, int, bytes]:
    """The data file in which a chunk lies, where in it, and the chunk with its crc32c."""
    place = chunks_in_files(world.root / str(step))[_chunks.key(name, coords)]
    return place.path, place.offset, place.path.read_bytes()[place.span]


def _overwrite(path: Path, at: int, data: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[at : at + len(data)] = data
    path.write_bytes(whole)


def test_two_chunks_that_changed_places_are_found(copy: World) -> None:
    """Each passes its own crc32c; only the manifest knows which belongs where."""
    (a, at_a, one), (b, at_b, two) = (_chunk_bytes(copy, "w", coords) for coords in [(1, 0), (3, 1)])
    _overwrite(a, at_a, two)
    _overwrite(b, at_b, one)
    with pytest.raises(ck.Corrupt) as caught:
        ck.restore(copy.step)
    assert [(fault.place, fault.expected.partition(" in ")[0]) for fault in caught.value.faults] == [
        ("w", "chunk [1, 0]"),
        ("w", "chunk [3, 1]"),
    ]
    assert len(ck.verify(copy.step).faults) == 2


def test_two_leaves_that_changed_places_are_found(copy: World) -> None:
    (a, at_a, one), (b, at_b, two) = (_chunk_bytes(copy, name, (0, 0)) for name in ("w", "bf16"))
    assert len(one) == len(two)
    _overwrite(a, at_a, two)
    _overwrite(b, at_b, one)
    with pytest.raises(ck.Corrupt) as caught:
        ck.restore(copy.step, copy.like)
    assert [fault.place for fault in caught.value.faults] == ["bf16", "w"]


def test_a_chunk_of_an_older_step_is_found(copy: World) -> None:
    path, at, _ = _chunk_bytes(copy, "host.ints", (2, 0))
    _, _, stale = _chunk_bytes(copy, "host.ints", (2, 0), step=100)
    _overwrite(path, at, stale)
    with pytest.raises(ck.Corrupt, match=r"host\.ints: expected chunk \[2, 0\]"):
        ck.open(copy.step)["host.ints"][25]
    assert not ck.verify(copy.step).ok


@pytest.mark.parametrize("what", ["everything but the manifest", "state", "state/d", "state/ocdbt.process_0"])
def test_a_folder_of_an_older_step_is_found(copy: World, what: str) -> None:
    if what == "everything but the manifest":
        shutil.rmtree(copy.step)
        shutil.copytree(copy.root / "100", copy.step)
        (copy.step / MANIFEST).write_bytes(copy.manifest)
    else:
        shutil.rmtree(copy.step / what)
        shutil.copytree(copy.root / "100" / what, copy.step / what)
    with pytest.raises(ck.Corrupt):
        ck.restore(copy.step)
    with pytest.raises(ck.Corrupt):
        ck.restore(copy.step, copy.like)
    assert not ck.verify(copy.step).ok
    assert not ck.verify(copy.step, level="files").ok
    assert ck.latest(copy.root) == str(copy.root / "100")


@pytest.mark.parametrize("what", ["state", "state/d", "state/ocdbt.process_0", "state/ocdbt.process_0/d"])
def test_a_folder_that_is_gone_is_found(copy: World, what: str) -> None:
    shutil.rmtree(copy.step / what)
    with pytest.raises(ck.Corrupt):
        ck.restore(copy.step)
    assert not ck.verify(copy.step, level="files").ok
    assert not ck.verify(copy.step).ok
    with mock.patch.object(_commit, "missing_files", return_value=[]):
        assert same(opened(copy), copy.expected["open(path)"]), "what lies elsewhere can still be had"


def test_every_key_rewritten_through_tensorstore_is_found(copy: World, tmp_path: Path, full: bool) -> None:
    """Whoever writes to the store leaves every checksum but ours as it should be."""
    state, good = copy.step / "state", tmp_path / "good"
    shutil.copytree(state, good)
    older = _reading.open_store(_commit.Folder(str(copy.root / "100" / "state")))
    keys = [key.decode() for key in older.list().result()]
    leaves = ck.open(copy.step).manifest.leaves
    rng = random.Random(2)
    chunks = [key for key in keys if "/c" in key and key.partition("/")[0] in leaves]
    chunks = [key for key in chunks if leaves[key.partition("/")[0]].stored]
    assert len(chunks) > 30
    if not full:
        chunks = sorted(rng.sample(chunks, 20))
    silent = []
    for key in chunks:
        store = _reading.open_store(_commit.Folder(str(state)))
        old, stale = store.read(key).result().value, older.read(key).result().value
        zeros = bytes(len(old) - 4) + _writing.crc32c.crc32c(bytes(len(old) - 4)).to_bytes(4, "little")
        for new in (None, stale, zeros, old[:-1], old + b"\0", b""):
            if new == old:
                continue
            store.write(key, new).result()
            with mock.patch.object(_commit, "missing_files", return_value=[]):  # Or a file's size would tell.
                for look in (
                    ck.restore,
                    lambda path: ck.restore(path, copy.like),
                    lambda path: ck.verify(path).check(),
                ):
                    try:
                        look(copy.step)
                        silent.append(f"{key}: {new!r:.20}")
                    except ck.Corrupt as error:
                        if f"\n  {key.partition('/')[0]}: " not in str(error):
                            silent.append(f"{key}: {error}")
        shutil.rmtree(state)
        shutil.copytree(good, state)
    assert silent == []
    assert ck.verify(copy.step).ok


def test_an_array_that_describes_itself_otherwise_is_found_by_verify(copy: World) -> None:
    """We never read zarr.json, so our values are right; others would read wrong ones."""
    store = _reading.open_store(_commit.Folder(str(copy.step / "state")))
    was = store.read("w/zarr.json").result().value
    store.write("w/zarr.json", was.replace(b'"float32"', b'"int32"')).result()
    manifest = ck.open(copy.step).manifest  # Whoever did that also told of the files that they wrote.
    now = _commit.Folder(str(copy.step)).files()
    manifest.files = {path: _manifest.File(size) for path, size in now.items() if path != MANIFEST}
    (copy.step / MANIFEST).write_bytes(_manifest.dumps(manifest))
    assert fingerprint(ck.restore(copy.step)) == copy.expected["restore(path)"]
    assert [fault.place for fault in ck.verify(copy.step).faults] == ["w"]


# --- what is said of it -----------------------------------------------------------------------------------------------


def test_the_error_names_leaf_chunk_and_file_and_what_to_do(copy: World) -> None:
    path, at, _ = _chunk_bytes(copy, "w", (1, 0))
    file = path.relative_to(copy.step)
    with flipped(path, at + 17, 3), pytest.raises(ck.Corrupt) as caught:
        ck.restore(copy.step)
    digest = ck.open(copy.step)["w"].digest[2 * 32 : 3 * 32][:12]
    assert re.fullmatch(
        rf"{copy.step} is damaged in 1 place:\n"
        rf"  w: expected chunk \[1, 0\] in {file}: digest {digest}…, "
        rf"found digest [0-9a-f]{{12}}… in place of {digest}…\n"
        rf"\n"
        rf"hint: `ckpt-jax ls {copy.root}` lists older steps; `ckpt-jax verify {copy.step}` checks every chunk",
        str(caught.value),
    )


def test_all_damaged_chunks_are_named_at_once(copy: World) -> None:
    places = [("bf16", (0, 0)), ("host.ints", (1, 0)), ("w", (0, 0)), ("w", (2, 1))]
    for name, coords in places:
        path, at, raw = _chunk_bytes(copy, name, coords)
        _overwrite(path, at, bytes(byte ^ 0xFF for byte in raw))
    for look in (ck.restore, lambda path: ck.restore(path, copy.like), lambda path: ck.verify(path).check()):
        with pytest.raises(ck.Corrupt, match="is damaged in 4 places") as caught:
            look(copy.step)
        for fault, (name, coords) in zip(caught.value.faults, places, strict=True):
            assert fault.place == name
            assert f"chunk {list(coords)} in state/ocdbt.process_0/d/" in fault.expected


def test_a_file_that_is_gone_or_cut_off_is_named_with_the_leaves_in_it(copy: World) -> None:
    gone, *_ = _chunk_bytes(copy, "w", (0, 0))
    cut, *_ = next(found for c in range(8) if (found := _chunk_bytes(copy, "bf16", (c // 4, c % 4)))[0] != gone)
    size = cut.stat().st_size
    cut.write_bytes(cut.read_bytes()[:-7])
    gone.unlink()
    for look in (ck.restore, lambda path: ck.verify(path).check(), lambda path: ck.verify(path, level="files").check()):
        with pytest.raises(ck.Corrupt) as caught:
            look(copy.step)
        by_place = {fault.place: fault for fault in caught.value.faults}
        first, second = (by_place[str(path.relative_to(copy.step))] for path in (gone, cut))
        assert re.fullmatch(r"no such file \(holds .*\bw\b.*\)", first.found)
        assert re.fullmatch(rf"{size - 7:,} bytes \(holds .*\bbf16\b.*\)", second.found)
        assert second.expected == f"{size:,} bytes"


@pytest.mark.parametrize("what", ["a flipped bit", "half of it", "nothing", "another file"])
def test_a_damaged_manifest_says_so(copy: World, what: str) -> None:
    data = copy.manifest
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    new = {"a flipped bit": flipped, "half of it": data[: len(data) // 2], "nothing": b"", "another file": b"{}\n"}[
        what
    ]
    (copy.step / MANIFEST).write_bytes(new)
    for look in (ck.restore, ck.open, lambda path: ck.restore(path, copy.like)):
        with pytest.raises(ck.Corrupt) as caught:
            look(copy.step)
        text = str(caught.value)
        assert text.startswith(f"{copy.step} is damaged:\n  MANIFEST.json: expected ")
        assert text.endswith("hint: restore an older step: `ckpt-jax ls` on the folder above lists them")
    assert [fault.place for fault in ck.verify(copy.step).faults] == [MANIFEST]
    assert ck.steps(copy.root) == [100]
    assert ck.latest(copy.root) == str(copy.root / "100")


def test_a_manifest_that_is_gone_is_no_checkpoint(copy: World) -> None:
    (copy.step / MANIFEST).unlink()
    for look in (ck.restore, ck.open, ck.verify, lambda path: ck.restore(path, copy.like)):
        with pytest.raises(ck.NotFound, match=r"it has no MANIFEST\.json") as caught:
            look(copy.step)
        assert "\nhint: " in str(caught.value)
    assert ck.steps(copy.root) == [100]


def test_what_is_whole_can_still_be_had(copy: World) -> None:
    path, at, _ = _chunk_bytes(copy, "w", (1, 0))
    _overwrite(path, at, b"\xff" * 4)
    checkpoint = ck.open(copy.step)
    with pytest.raises(ck.Corrupt, match=r"chunk \[1, 0\]"):
        checkpoint["w"][()]
    whole = np.asarray(copy.trees[200]["w"])
    assert np.array_equal(checkpoint["w"][16:], whole[16:]), "the rows of other chunks"
    assert np.array_equal(checkpoint["bf16"][()], np.asarray(copy.trees[200]["bf16"]))
    assert np.array_equal(ck.restore(copy.step, only="bf16")["bf16"], np.asarray(copy.trees[200]["bf16"]))


def test_the_hint_which_step_is_newest_is_never_trusted(copy: World) -> None:
    hint = copy.root / "LATEST"
    good = hint.read_bytes()
    for new in [b"", b"{", good[:-3], b"[]", b'{"step": 100}', b'{"step": 10000, "seal": ""}', b"\xff" * 90, None]:
        hint.unlink() if new is None else hint.write_bytes(new)
        assert ck.latest(copy.root) == str(copy.step)
        assert ck.steps(copy.root) == [100, 200]
    for new in (b"", b"\xff", b'{"step": "x"}', b'{"step": -1, "seal": 5}', b"[" * 100_000, b'{"step": 1e999}'):
        hint.write_bytes(new)
        shutil.rmtree(copy.root / "300", ignore_errors=True)
        ck.save(copy.root / "300", {"x": 1})
        assert b'"step": 300' in hint.read_bytes(), "and it is written anew"
