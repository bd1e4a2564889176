"""Copies: the same seal at another root, verified before it counts, and gone on with after a kill."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1

import ckpt_jax as ck
from ckpt_jax import _commit, _copy, _copy_one, _manifest, _storage, _verify
from ckpt_jax._copy import Copied
from ckpt_jax._storage import folder
from tests import test_processes
from tests.test_cli import as_json, run
from tests.test_storage import at_once, holding, leftovers
from tests.trees import same

TREE = {
    "w": np.random.default_rng(0).random((300, 500)),
    "b": jnp.arange(7, dtype=jnp.bfloat16),
    "key": jax.random.key(3),
    "n": 2**70,
    "name": "a",
    "none": None,
}


def copied(source: Any, target: Any, **options: Any) -> Copied:
    *_, result = _copy.progress(str(source), str(target), **options)
    assert isinstance(result, Copied)
    return result


def seal(path: Any) -> str:
    return ck.open(path).manifest.seal


def flip(path: Path, at: int = 100) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def largest(step: Path) -> Path:
    """The file that holds most of the chunks."""
    return max(step.glob("state*/ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)


def inodes(at: Path) -> dict[str, tuple[int, int]]:
    """Which file each name stands for, and when it was written."""
    stats = {path.relative_to(at): path.lstat() for path in at.rglob("*") if not path.is_dir()}
    return {str(path): (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


def attempt_of(source: Path, target: Path) -> Path:
    return target.parent / f"{target.name}{_commit.TMP}{seal(source)[:16]}"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A root with three steps."""
    for step in (100, 200, 300):
        ck.save(tmp_path / "from" / str(step), TREE | {"n": step}, metadata={"step": step})
    return tmp_path / "from"


def place(kind: str, tmp_path: Path, name: str) -> str:
    return str(tmp_path / name) if kind == "file" else f"memory://{uuid.uuid4()}/{name}"


# --- to any root ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["file", "memory"])
@pytest.mark.parametrize("of", ["file", "memory"])
def test_a_copy_is_the_same_checkpoint(of: str, to: str, tmp_path: Path) -> None:
    """F-38: its seal, its bits, its root's hint; and it can be copied again, replaced and pruned like any other."""
    source, target, third = place(of, tmp_path, "a"), place(to, tmp_path, "b"), str(tmp_path / "c")
    for step in (1, 2):
        ck.save(f"{source}/{step}", TREE | {"n": step}, metadata="told")
    found = copied(source, target)
    assert (found.copied, found.skipped, found.faults) == ((1, 2), (), ())
    assert ck.steps(target) == [1, 2]
    for step in (1, 2):
        assert folder(f"{source}/{step}").read(_manifest.NAME) == folder(f"{target}/{step}").read(_manifest.NAME)
        assert ck.verify(f"{target}/{step}").ok
        assert ck.diff(f"{source}/{step}", f"{target}/{step}").equal
        assert same(ck.restore(f"{target}/{step}", like=TREE | {"n": 0}), TREE | {"n": step})
    assert json.loads(folder(target).read(_commit.LATEST) or b"") == {"step": 2, "seal": seal(f"{source}/2")}
    assert folder(target).read("events.jsonl") is None
    assert copied(target, third).copied == (1, 2), "and what lies beside the arrays is no foreigner's"
    assert seal(f"{third}/2") == seal(f"{source}/2")
    for at in (target, third):
        ck.save(f"{at}/2", {"x": np.ones(3)}, overwrite=True)
        assert ck.verify(f"{at}/2").ok
        assert ck.prune(at, ck.Keep(last=1)) == [1]
        assert ck.steps(at) == [2]


@pytest.mark.parametrize("to", ["file", "memory"])
def test_an_overwritten_checkpoint_of_a_bucket_keeps_the_name_of_its_arrays(
    to: str, memory: str, tmp_path: Path
) -> None:
    ck.save(f"{memory}/5", {"w": np.zeros(9)})
    ck.save(f"{memory}/5", TREE, overwrite=True)
    target = place(to, tmp_path, "b")
    assert copied(memory, target).ok
    assert ck.open(f"{target}/5").manifest.state == ck.open(f"{memory}/5").manifest.state != "state"
    assert same(ck.restore(f"{target}/5", like=TREE), TREE)
    assert ck.verify(f"{target}/5").ok


@pytest.mark.filterwarnings("ignore")  # Orbax warns of its own deprecations.
@pytest.mark.parametrize("of", ["file", "memory"])
def test_orbax_reads_a_copy(of: str, tmp_path: Path) -> None:
    source = place(of, tmp_path, "a")
    ck.save(f"{source}/7", {"w": TREE["w"], "b": np.arange(3)})
    assert copied(source, tmp_path / "b").ok
    state = "state" if of == "file" else ck.open(tmp_path / "b" / "7").manifest.state
    found = v1.load_checkpointables(tmp_path / "b" / "7")[state]
    assert np.array_equal(found["w"], TREE["w"])
    assert np.array_equal(found["b"], np.arange(3))


def test_what_two_processes_wrote_is_copied(tmp_path: Path) -> None:
    test_processes.run(test_processes.SAVE, tmp_path / "run", 2)
    assert copied(tmp_path / "run", tmp_path / "copy").copied == (7,)
    assert ck.open(tmp_path / "copy/7").manifest.writers == 2
    assert ck.diff(tmp_path / "run/7", tmp_path / "copy/7").equal


def test_one_checkpoint_is_copied_to_a_path(runs: Path, memory: str, tmp_path: Path) -> None:
    assert copied(runs / "200", tmp_path / "final").copied == (200,)
    assert seal(tmp_path / "final") == seal(runs / "200")
    assert copied(tmp_path / "final", f"{memory}/200").copied == ("final",)
    assert ck.steps(memory) == [200]
    with pytest.raises(ValueError, match=r"is of step 200, and .*/7 would be of another by its name"):
        copied(runs / "200", tmp_path / "7")
    with pytest.raises(ValueError, match="is one checkpoint"):
        copied(runs / "200", tmp_path / "8", last=1)
    assert not (tmp_path / "7").exists()


def test_progress_counts_each_byte_as_written_and_as_read_back(runs: Path, tmp_path: Path) -> None:
    *steps, result = _copy.progress(str(runs), str(tmp_path / "b"))
    assert isinstance(result, Copied)
    done = [step[0] for step in steps if isinstance(step, tuple)]
    work = sum(
        m.nbytes + sum(file.bytes for file in m.files.values())
        for m in (ck.open(runs / str(step)).manifest for step in (100, 200, 300))
    )
    assert done == sorted(done)
    assert steps[-1] == (work, work)
    assert result.bytes == work - sum(ck.open(runs / str(step)).manifest.nbytes for step in (100, 200, 300))


# --- which ------------------------------------------------------------------------------------------------------------


def test_only_the_steps_that_are_asked_for_are_copied(runs: Path, tmp_path: Path) -> None:
    assert copied(runs, tmp_path / "a", steps=[100, 300]).copied == (100, 300)
    assert copied(runs, tmp_path / "b", last=2).copied == (200, 300)
    assert ck.steps(tmp_path / "a") == [100, 300]
    assert ck.steps(tmp_path / "b") == [200, 300]
    with pytest.raises(ck.NotFound, match="400: expected a checkpoint, found none"):
        copied(runs, tmp_path / "c", steps=[100, 400])
    assert not (tmp_path / "c").exists()
    with pytest.raises(ValueError, match="either"):
        copied(runs, tmp_path / "c", steps=[100], last=1)


def test_what_is_there_already_is_skipped_and_another_is_left_alone(runs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    ck.save(other / "100", {"mine": np.ones(3)})
    copied(runs, other, steps=[200])
    before = inodes(other / "200")
    found = copied(runs, other)
    assert found.copied == (300,)
    assert found.skipped == ((200, "there already"),)
    assert str(found.faults[0]).startswith(
        f"100: expected to be copied, found Exists: another checkpoint is at {other}"
    )
    assert inodes(other / "200") == before
    assert list(ck.restore(other / "100")) == ["mine"]


def test_what_is_there_already_but_not_whole_is_told(runs: Path, tmp_path: Path) -> None:
    copied(runs, tmp_path / "b")
    largest(tmp_path / "b/100").unlink()
    _commit.mark_bad(folder(tmp_path / "b/200"), "a test")
    faults = [str(fault) for fault in copied(runs, tmp_path / "b").faults]
    assert any(fault.startswith("100: ") and "there already, and damaged" in fault for fault in faults)
    assert any(fault.startswith("200: ") and "marked as damaged" in fault for fault in faults)


def test_marked_steps_are_not_copied(runs: Path, tmp_path: Path) -> None:
    _commit.mark_bad(folder(runs / "300"), "a test")
    found = copied(runs, tmp_path / "b", last=1)
    assert found.copied == (200,), "the newest good one"
    assert found.skipped == ((300, "not copied, as it is marked as damaged"),)
    named = copied(runs, tmp_path / "c", steps=[100, 300])
    assert named.copied == (100,)
    assert "300: expected a checkpoint that is good" in str(named.faults[0])
    assert not copied(runs / "300", tmp_path / "d").ok
    assert ck.steps(tmp_path / "c") == [100]
    assert not (tmp_path / "d").exists()


def test_what_is_not_committed_is_ignored(runs: Path, tmp_path: Path) -> None:
    (runs / "400").mkdir()
    (runs / f"500{_commit.TMP}00").mkdir()
    (runs / "events.jsonl").write_text("{}\n")
    assert copied(runs, tmp_path / "b").copied == (100, 200, 300)
    assert sorted(os.listdir(tmp_path / "b")) == ["100", "200", "300", "LATEST"]


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["file", "memory"])
@pytest.mark.parametrize("how", ["flipped", "cut off", "gone", "a small one", "the tree", "a link", "behind a link"])
def test_a_damaged_source_is_named_and_stops_no_other(runs: Path, how: str, to: str, tmp_path: Path) -> None:
    file = largest(runs / "200")
    if how == "flipped":
        flip(file)
    elif how == "cut off":
        os.truncate(file, 1000)
    elif how == "gone":
        file.unlink()
    elif how == "a small one":
        file = runs / "200/_CHECKPOINT_METADATA"
        flip(file, 5)
    elif how == "the tree":
        file = runs / "200/state/manifest.ocdbt"
        flip(file, 20)
    elif how == "a link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        shutil.move(runs / "200/state", tmp_path / "elsewhere")
        (runs / "200/state").symlink_to(tmp_path / "elsewhere")
    target = place(to, tmp_path, "b")
    found = copied(runs, target)
    assert found.copied == (100, 300)
    told = "\n".join(map(str, found.faults))
    assert f"200: expected to be copied, found Corrupt: {runs}/200 is damaged in" in told
    assert str(file.relative_to(runs / "200")) in told
    if how == "flipped":
        assert "200: w: expected chunk [0, 0] in state/ocdbt.process_0/d/" in told
    assert ck.steps(target) == [100, 300]
    if to == "file":
        assert leftovers(tmp_path / "b") == []


def test_a_step_whose_manifest_is_damaged_is_told(runs: Path, tmp_path: Path) -> None:
    flip(runs / "200" / _manifest.NAME, 200)
    shutil.copytree(runs / "100", runs / "150")
    found = copied(runs, tmp_path / "b")
    assert found.copied == (100, 300)
    assert [fault.place for fault in found.faults] == ["200", "150"]
    assert "is damaged" in str(found.faults[0])
    assert "another step's manifest" in str(found.faults[1])


def test_a_manifest_that_lists_itself_is_refused(memory: str, runs: Path) -> None:
    """In a bucket it would count before all is there."""
    manifest = ck.open(runs / "100").manifest
    manifest.files[_manifest.NAME] = _manifest.File(1)
    (runs / "100" / _manifest.NAME).write_bytes(_manifest.dumps(manifest))
    found = copied(runs, memory, steps=[100])
    assert "contradicts itself" in str(found.faults[0])
    assert folder(memory).entries() == []


def _damages(monkeypatch: pytest.MonkeyPatch, times: int, what: Callable[[str, int], bool]) -> list[str]:
    """So many files arrive otherwise than they were sent; the names of all that were sent."""
    plain, sent, left = _copy_one._pieces, [], [times]

    def pieces(source: Any, path: str, size: int) -> Iterator[memoryview]:
        sent.append(path)
        if left[0] and what(path, size):
            left[0] -= 1
            for piece in plain(source, path, size):
                data = bytearray(piece)
                data[len(data) // 2] ^= 1
                yield memoryview(data)
        else:
            yield from plain(source, path, size)

    monkeypatch.setattr(_copy_one, "_pieces", pieces)
    return sent


KINDS = {
    "a data file": lambda path, size: "/ocdbt.process_" in path and size > 100_000,
    "the tree": lambda path, size: path.endswith("manifest.ocdbt"),
    "a node": lambda path, size: path.startswith(("state/d/", "state.")) and "/d/" in path and "process" not in path,
    "a small file": lambda path, size: path.endswith("_METADATA"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_arrives_damaged_is_copied_once_more(
    root: str, kind: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = _damages(monkeypatch, 1, KINDS[kind])
    assert copied(runs, root, steps=[200]).copied == (200,)
    assert ck.verify(f"{root}/200").ok
    again = {path for path in sent if sent.count(path) > 1}
    assert any(KINDS[kind](path, 10**6) for path in again)
    if kind in ("a data file", "a small file"):
        assert len(again) == 1, "and nothing else"


def test_storage_that_damages_what_it_is_given_is_told(root: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _damages(monkeypatch, 9, KINDS["a data file"])
    found = copied(runs, root, steps=[200])
    assert "comes back as something else, twice: state/ocdbt.process_0/d/" in str(found.faults[0])
    assert ck.steps(root) == []


def test_nothing_is_committed_before_it_was_read_back(root: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = _verify.contents

    def looking(place: Any, *arguments: Any) -> Iterator[int]:
        assert ck.steps(root) == []
        assert place.read(_manifest.NAME) is None
        yield from contents(place, *arguments)
        looked.append(place)

    looked: list[Any] = []
    monkeypatch.setattr(_verify, "contents", looking)
    assert copied(runs, root, steps=[200]).copied == (200,)
    assert len(looked) == 1


def test_a_file_is_copied_in_pieces(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, asked = _storage.Folder.read_into, []

    def reads(place: Any, name: str, start: int, buffer: memoryview) -> int:
        asked.append(len(buffer))
        return plain(place, name, start, buffer)

    monkeypatch.setattr(_copy_one, "PIECE", 1000)
    monkeypatch.setattr(_verify, "contents", lambda *_: iter(()))  # Which reads a chunk at a time.
    monkeypatch.setattr(_storage.Folder, "read_into", reads)
    assert copied(runs / "100", tmp_path / "b").ok
    assert max(asked) == 1000
    monkeypatch.undo()
    assert ck.verify(tmp_path / "b").ok


def test_a_source_that_cannot_be_read_just_now_loses_nothing(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told by its name, and what was copied stays for the next time."""
    bad = largest(runs / "300")
    plain = _storage.Folder.read_into

    def reads(place: Any, name: str, start: int, buffer: memoryview) -> int:
        if f"{place}/{name}" == str(bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(place, name, start, buffer)

    monkeypatch.setattr(_copy_one, "WORKERS", 1)
    monkeypatch.setattr(_storage.Folder, "read_into", reads)
    found = copied(runs, tmp_path / "b", last=1)
    assert [fault.found for fault in found.faults] == [f"[Errno 5] Input/output error: '{bad}'"]
    assert ck.steps(tmp_path / "b") == []
    assert attempt_of(runs / "300", tmp_path / "b/300").exists()
    monkeypatch.undo()
    assert copied(runs, tmp_path / "b").ok
    assert leftovers(tmp_path / "b") == []


# --- killed -----------------------------------------------------------------------------------------------------------

KILLED = """
    import os, signal, sys
    from ckpt_jax import _commit, _copy, _copy_one, _storage, _verify

    module, _, name = sys.argv[3].rpartition(".")
    holder = {"commit": _commit, "copy": _copy_one, "Folder": _storage.Folder, "verify": _verify}[module]
    plain, left = getattr(holder, name), int(sys.argv[4])

    def dies(*arguments, **named):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return plain(*arguments, **named)

    def half(*arguments):
        global left
        for piece in plain(*arguments):
            if left == 0:
                yield piece[: len(piece) // 2]
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            yield piece

    setattr(holder, name, half if name == "_pieces" else dies)
    _copy_one.WORKERS = 1
    for _ in _copy.progress(*sys.argv[1:3]):
        pass
"""
POINTS = [("copy._copy_file", count) for count in (0, 1, 3, 6)] + [
    ("copy._pieces", 0),
    ("copy._pieces", 2),
    ("verify.contents", 0),
    ("commit.commit", 0),
    ("Folder.sync", 0),
    ("Folder.rename", 0),
    ("commit.point", 0),
    ("commit.point", 1),
]


def killed(source: Path, target: Path, function: str, count: int) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(source), str(target), function, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(("function", "count"), POINTS)
def test_after_a_kill_the_next_copy_goes_on(runs: Path, function: str, count: int, tmp_path: Path) -> None:
    """Nothing half is visible, and what was whole is not copied again."""
    target = tmp_path / "b"
    killed(runs, target, function, count)
    assert all(ck.verify(target / str(step)).ok for step in ck.steps(target))
    attempt = attempt_of(runs / "300", target / "300")
    left = inodes(attempt) if attempt.exists() else {}
    files = ck.open(runs / "300").manifest.files
    whole = {name for name in left if name in files and (attempt / name).stat().st_size == files[name].bytes}
    if function == "copy._copy_file":
        assert len(whole) >= count
    found = copied(runs, target)
    assert found.ok
    assert ck.steps(target) == [100, 200, 300]
    assert leftovers(target) == []
    assert all(ck.diff(runs / str(step), target / str(step)).equal for step in (100, 200, 300))
    now = inodes(target / "300")
    assert {name: now[name] for name in whole} == {name: left[name] for name in whole}
    assert json.loads((target / "LATEST").read_text())["step"] == 300


def test_what_a_killed_copy_left_is_checked_and_made_durable(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that flipped between two runs; a link and a file that another put there; and files of no fsync."""
    target = tmp_path / "b/300"
    killed(runs / "300", target, "commit.commit", 0)
    attempt = attempt_of(runs / "300", target)
    flip(largest(attempt))
    (attempt / "foreign").write_text("x")
    (attempt / "state/_sharding").unlink()
    (tmp_path / "outside").write_text("mine")
    (attempt / "state/_sharding").symlink_to(tmp_path / "outside")
    before = inodes(attempt)
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.fstat(fd).st_ino), fsync(fd))[1])
    assert copied(runs / "300", target).ok
    assert ck.diff(runs / "300", target).equal
    after = inodes(target)
    changed = {name for name in after if before.get(name) != after[name]}
    assert changed == {str(largest(target).relative_to(target)), "state/_sharding", _manifest.NAME}
    assert {inode for inode, _ in after.values()} <= synced
    assert (tmp_path / "outside").read_text() == "mine"
    assert "foreign" not in after


def test_a_link_in_place_of_a_leftover_leads_nowhere(runs: Path, tmp_path: Path) -> None:
    """The name of an attempt can be foretold."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "b").mkdir()
    attempt_of(runs / "100", tmp_path / "b/100").symlink_to(tmp_path / "outside")
    attempt_of(runs / "200", tmp_path / "b/200").mkdir()
    (attempt_of(runs / "200", tmp_path / "b/200") / "state").symlink_to(tmp_path / "outside")
    attempt_of(runs / "300", tmp_path / "b/300").write_text("a file")
    assert copied(runs, tmp_path / "b").copied == (100, 200, 300)
    assert os.listdir(tmp_path / "outside") == []
    assert all(ck.verify(tmp_path / "b" / str(step)).ok for step in (100, 200, 300))


def test_leftovers_of_other_attempts_go_and_a_living_writers_stays(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "b" / f"100{_commit.TMP}dead").mkdir(parents=True)
    (tmp_path / "b" / f"100{_commit.TMP}alive").mkdir()
    with holding(tmp_path / "b" / f"100{_commit.TMP}alive"):
        assert copied(runs, tmp_path / "b").ok
        assert leftovers(tmp_path / "b") == [f"100{_commit.TMP}alive"]


def test_a_copy_that_is_interrupted_can_be_gone_on_with(runs: Path, tmp_path: Path) -> None:
    steps = _copy.progress(str(runs), str(tmp_path / "b"))
    for _ in range(6):
        next(steps)
    steps.close()  # pyright: ignore[reportAttributeAccessIssue]
    attempt = attempt_of(runs / "300", tmp_path / "b/300")
    before = inodes(attempt)
    assert before
    assert not folder(attempt).in_use()
    assert copied(runs, tmp_path / "b").ok
    assert before.items() <= inodes(tmp_path / "b/300").items()


def test_a_bucket_that_has_some_of_it_is_given_the_rest(runs: Path, memory: str) -> None:
    steps = _copy.progress(str(runs / "300"), f"{memory}/300")
    for _ in range(6):
        next(steps)
    steps.close()  # pyright: ignore[reportAttributeAccessIssue]
    there = sum(folder(f"{memory}/300").files().values())
    assert there
    assert ck.steps(memory) == []
    whole = sum(file.bytes for file in ck.open(runs / "300").manifest.files.values())
    assert copied(runs / "300", f"{memory}/300").bytes == whole - there
    assert ck.verify(f"{memory}/300").ok


# --- two at once, and what vanishes -----------------------------------------------------------------------------------


def test_of_two_copies_of_one_step_the_second_says_who_is_at_it(runs: Path, tmp_path: Path) -> None:
    first = _copy.progress(str(runs), str(tmp_path / "b"))
    next(first)  # It has begun with 300.
    found = copied(runs, tmp_path / "b")
    assert found.copied == (100, 200)
    assert f"found Exists: another process writes {tmp_path}/b/300 at this moment" in str(found.faults[0])
    *_, result = first
    assert isinstance(result, Copied)
    assert result.copied == (300,)
    assert result.skipped == ((100, "there already"), (200, "there already"))
    assert all(ck.verify(tmp_path / "b" / str(step)).ok for step in (100, 200, 300))


def test_several_copies_at_once_leave_whole_checkpoints(root: str, runs: Path) -> None:
    found: list[Copied] = []
    assert at_once(4, lambda _: found.append(copied(runs, root))) == []
    assert ck.steps(root) == [100, 200, 300]
    assert all(ck.diff(runs / str(step), f"{root}/{step}").equal for step in (100, 200, 300))
    faults = [str(fault) for one in found for fault in one.faults if fault.place.isdigit()]
    assert all("found Exists: another process writes" in fault for fault in faults)
    assert copied(runs, root).ok


def test_a_checkpoint_that_comes_to_be_meanwhile_is_kept(
    root: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = _commit.commit

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(_commit, "commit", commit)
        ck.save(f"{root}/300", {"mine": np.ones(3)})
        commit(*arguments)

    monkeypatch.setattr(_commit, "commit", late)
    found = copied(runs, root)
    assert found.copied == (100, 200)
    assert "came to be" in str(found.faults[0])
    assert list(ck.restore(f"{root}/300")) == ["mine"]


@pytest.mark.parametrize("how", ["deleted", "replaced"])
@pytest.mark.parametrize("of", ["file", "memory"])
def test_a_step_that_goes_while_it_is_copied_is_not_found(
    of: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = place(of, tmp_path, "a")
    for step in (1, 2):
        ck.save(f"{source}/{step}", TREE)
    plain, lock, gone = _copy_one._copy_file, threading.Lock(), []

    def goes(place: Any, *arguments: Any) -> int:
        with lock:
            if place.name == "2" and not gone:
                gone.append(place)
                if how == "deleted":
                    _commit.delete(place)
                else:
                    ck.save(place.url, {"w": np.ones(3)}, overwrite=True)
        return plain(place, *arguments)

    monkeypatch.setattr(_copy_one, "_copy_file", goes)
    found = copied(source, tmp_path / "b")
    assert found.copied == (1,)
    assert f"2: expected to be copied, found NotFound: {source}/2 was replaced or deleted" in str(found.faults[0])
    assert sorted(os.listdir(tmp_path / "b")) == ["1", "LATEST"]


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    at = tmp_path / "disk"
    at.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", at], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)


def test_a_full_disk_is_told_and_its_space_is_freed(runs: Path, small_disk: Path) -> None:
    """There is room for two of the three steps of 1.2 MB; that disk has one of them already."""
    copied(runs, small_disk / "run", steps=[100])
    ck.save(runs / "400", TREE)
    found = copied(runs, small_disk / "run")
    assert found.copied == (400,)
    assert found.skipped == ((100, "there already"),)
    assert [fault.place for fault in found.faults] == ["300", "200"]
    assert os.strerror(errno.ENOSPC) in str(found.faults[0])
    assert "not tried, as the disk is full" in str(found.faults[1])
    assert sorted(os.listdir(small_disk / "run")) == ["100", "400", "LATEST"]
    assert ck.verify(small_disk / "run/400").ok


def test_a_file_that_may_not_grow_is_told_and_its_space_is_freed(runs: Path, tmp_path: Path) -> None:
    ck.save(runs / "50", {"w": np.ones(10)})
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        found = copied(runs, tmp_path / "b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert found.copied == (50,)
    assert [fault.place for fault in found.faults] == ["300", "200", "100"]
    assert all(os.strerror(errno.EFBIG) in str(fault) for fault in found.faults)
    assert sorted(os.listdir(tmp_path / "b")) == ["50", "LATEST"]


def test_no_more_values_of_a_bucket_are_held_than_some(memory: str, tmp_path: Path) -> None:
    """Also to ask their sizes."""
    store = _storage._kv(folder(memory))
    for number in range(20):
        store.write(f"{number}", bytes(number)).result()
    held, most = set(), []

    class Watched:
        def read(self, name: str) -> Any:
            held.add(name)
            most.append(len(held))
            future = store.read(name)

            class Future:
                def result(self) -> Any:
                    held.discard(name)
                    return future.result()

            return Future()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_storage, "_kv", lambda _: Watched())
        sizes = folder(memory).sizes([*map(str, range(20)), "none"])
    assert sizes == {str(number): number for number in range(20)} | {"none": None}
    assert max(most) == _storage.VALUES


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_did_and_exits_by_it(runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "b"
    assert run("copy", runs, target, "--last", 1).stdout.startswith(f"{target}: copied 300 (1.2 MB, ")
    again = run("copy", runs, target, "--steps", "100, 300").stdout.splitlines()
    assert again[0].startswith(f"{target}: copied 100 (")
    assert again[1] == "there already: 300"
    flip(largest(runs / "200"))
    out = run("copy", runs, target, code=1).stdout.splitlines()
    assert out[0].startswith(f"{target}: copied nothing (")
    assert out[1:3] == ["there already: 100, 300", f"not all that is in {runs} is there; 2 faults:"]
    assert out[3] == f"  200: expected to be copied, found Corrupt: {runs}/200 is damaged in 1 place"
    assert out[4].startswith("  200: w: expected chunk [0, 0] in state/ocdbt.process_0/d/")


def test_the_command_tells_the_same_as_json(runs: Path, tmp_path: Path) -> None:
    _commit.mark_bad(folder(runs / "300"), "a test")
    flip(runs / "100/_CHECKPOINT_METADATA", 5)
    found = as_json("copy", runs, tmp_path / "b", code=1)
    assert (found["source"], found["target"], found["copied"]) == (str(runs), str(tmp_path / "b"), [200])
    assert found["skipped"] == [{"step": 300, "why": "not copied, as it is marked as damaged"}]
    assert [fault["place"] for fault in found["faults"]] == ["100", "100: _CHECKPOINT_METADATA"]
    assert found["bytes"] > 2 * 1_200_000 - 100_000, "and those of the one that failed"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--steps", "100,x"], "steps are numbers with commas between"),
        (["--steps", ""], "steps are numbers with commas between"),
        (["--steps", "100", "--last", "1"], "either steps are named, or the last so many"),
        (["--steps", "101"], "101: expected a checkpoint, found none"),
        (["--last", "0"], "Invalid value for '--last'"),
    ],
)
def test_wrong_usage_copies_nothing(runs: Path, options: list[str], told: str, tmp_path: Path) -> None:
    assert told in " ".join(run("copy", runs, tmp_path / "b", *options, code=2).stderr.replace("│", " ").split())
    assert not (tmp_path / "b").exists()


def test_where_there_is_nothing_to_copy_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "there are no checkpoints in" in run("copy", tmp_path / "empty", tmp_path / "b", code=2).stderr
    assert "there is nothing at" in run("copy", tmp_path / "none", tmp_path / "b", code=2).stderr
    assert not (tmp_path / "b").exists()
