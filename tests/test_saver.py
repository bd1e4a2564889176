"""A run's checkpoints in one process: taken at the call, written behind, resumed to the bit."""

import ctypes
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ckpt_jax as ck
from ckpt_jax import _agree, _commit, _restore, _save, _snapshot, _storage, _threads, _writing
from ckpt_jax._events import Event
from tests.bounded import bounded
from tests.forked import Child
from tests.trees import same


class Gate:
    """Holds the writer back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.open, self.waiting = threading.Event(), threading.Event()
        write = _writing.write

        def slow(*arguments: Any, **named: Any) -> Any:
            self.waiting.set()
            assert self.open.wait(60)
            return write(*arguments, **named)

        monkeypatch.setattr(_writing, "write", slow)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def test_the_loop_of_the_readme_resumes_where_it_was(root):
    def train(total: int) -> list[float]:
        values = []
        with ck.Saver(root, every=ck.Every(steps=2), keep=ck.Keep(last=2)) as saver:
            state, step = saver.resume({"w": jnp.zeros(3), "key": jax.random.key(0), "step": 0})
            while step < total and not saver.preempted:
                key, draw = jax.random.split(state["key"])
                step += 1
                state = {"w": state["w"] + jax.random.normal(draw, 3), "key": key, "step": step}
                values.append(float(state["w"].sum()))
                saver.step(step, state, metrics={"sum": values[-1]})
                saver.wait()
        return values

    first = train(5)
    assert ck.steps(root) == [2, 4]
    second = train(8)
    assert len(second) == 4, "it goes on with step 5"
    assert first[4] == second[0]
    assert ck.steps(root) == [6, 8]
    assert ck.open(f"{root}/8").manifest.metrics == {"sum": second[-1]}


# --- snapshots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_host", [True, False], ids=["views", "copies to the host"])
def test_c053_c054_nothing_done_to_the_state_afterwards_is_saved(memory, mesh42, monkeypatch, gate, on_host):
    """Donated, changed in place, deleted, dropped: the checkpoint has the values at the call."""
    monkeypatch.setattr(_snapshot, "ON_HOST", on_host)
    sharded = jax.sharding.NamedSharding(mesh42, jax.sharding.PartitionSpec("data"))
    numpy = np.arange(1000.0)
    state = {
        "sharded": jax.device_put(jnp.arange(4096.0), sharded),
        "alone": jnp.arange(100),
        "numpy": numpy,
        "list": [1, 2],
        "key": jax.random.key(3),
        "generator": np.random.default_rng(1),
    }
    expected = {
        "sharded": np.arange(4096, dtype=np.float32),
        "alone": np.arange(100, dtype=np.int32),
        "numpy": numpy.copy(),
        "list": [1, 2],
        "key": jax.random.key(3),
    }
    draws = np.random.default_rng(1).random(3)
    with ck.Saver(memory, debug=True) as saver:
        saver.save(1, state)
        assert gate.waiting.wait(60)
        donate = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
        jax.block_until_ready(donate({"sharded": state["sharded"], "alone": state["alone"]}))
        state["key"].delete()
        numpy += 1
        state["generator"].random(100)
        state["list"].append(3)
        state["new"] = 1
        del state
        gate.open.set()
        saver.wait()
    like = expected | {"generator": np.random.default_rng(9)}
    restored = ck.restore(f"{memory}/1", like)
    assert (restored.pop("generator").random(3) == draws).all()
    assert same(restored, expected)


def test_a_snapshot_that_something_wrote_to_is_found_in_debug_mode(memory, gate, monkeypatch):
    """Whoever breaks JAX's promise that arrays are constant is told so, and nothing is committed."""
    value = jnp.arange(5000.0)
    with ck.Saver(memory, debug=True) as saver:
        saver.save(1, {"good": jnp.ones(3), "w": value})
        assert gate.waiting.wait(60)
        view = np.asarray(value)
        ctypes.cast(view.ctypes.data, ctypes.POINTER(ctypes.c_float))[17] = -1
        gate.open.set()
        with pytest.raises(ck.CheckpointError, match="the snapshot changed before it was written") as caught:
            saver.wait()
        assert [fault.place for fault in caught.value.faults] == ["w"]
        saver.save(2, {"w": value})
    assert ck.steps(memory) == [2]


def test_c054_a_leaf_that_is_gone_is_refused_at_the_call(memory):
    gone = jnp.ones(3)
    gone.delete()
    with ck.Saver(memory) as saver:
        with pytest.raises(ck.Unsupported, match="donated"):
            saver.save(1, {"a": gone})
        saver.save(2, {"a": jnp.ones(3)})
    assert ck.steps(memory) == [2]


# --- one at a time ----------------------------------------------------------------------------------------------------


def test_c060_a_save_that_comes_due_meanwhile_is_skipped_and_told(memory, gate):
    events: list[Event] = []
    with ck.Saver(memory, every=ck.Every(steps=1), on_event=events.append) as saver:
        assert saver.step(1, {"a": 1})
        assert gate.waiting.wait(60)
        assert not saver.step(2, {"a": 2})
        assert not saver.step(3, {"a": 3})
        assert saver.skipped == 2
        gate.open.set()
        saver.wait()
        assert saver.step(4, {"a": 4})
    assert ck.steps(memory) == [1, 4]
    assert kinds(events) == [
        "started",
        "snapshot",
        "skipped",
        "skipped",
        "written",
        "committed",
        "snapshot",
        "written",
        "committed",
        "closed",
    ]
    assert [event.step for event in events if event.kind == "skipped"] == [2, 3]


def test_save_waits_for_the_one_before(root):
    with ck.Saver(root) as saver:
        for step in (1, 2, 3):
            saver.save(step, {"a": np.full(1000, step)})
    assert ck.steps(root) == [1, 2, 3]
    assert (ck.restore(f"{root}/2")["a"] == 2).all()


def test_every_minutes(memory, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with ck.Saver(memory, every=ck.Every(minutes=10)) as saver:
        for step in range(1, 31):
            now[0] += 60
            saver.step(step, {"a": step})
            saver._idle.wait()
    assert ck.steps(memory) == [10, 20, 30]


# --- failures ---------------------------------------------------------------------------------------------------------


def _failing(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    write, left = _writing.write, [times]

    def fail(*arguments: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        return write(*arguments, **named)

    monkeypatch.setattr(_writing, "write", fail)


def test_c056_a_failed_save_is_told_and_training_goes_on(root, monkeypatch):
    events: list[Event] = []
    with ck.Saver(root, every=ck.Every(steps=1), on_event=events.append) as saver:
        saver.step(1, {"a": 1})
        saver.wait()
        _failing(monkeypatch, 1)
        saver.step(2, {"a": 2})
        with pytest.raises(OSError, match="No space left"):
            saver.wait()
        assert isinstance(saver.last_error, OSError)
        assert ck.steps(root) == [1]
        saver.step(3, {"a": 3})
        saver.wait()
        assert saver.last_error is None
    assert ck.steps(root) == [1, 3]
    assert [e.step for e in events if e.kind == "failed"] == [2]


def test_so_many_failures_in_a_row_are_an_error(memory, monkeypatch):
    _failing(monkeypatch, 3)
    saver = ck.Saver(memory, every=ck.Every(steps=1), max_failures=3)
    for step in (1, 2, 3):
        saver.step(step, {"a": step})
        saver._idle.wait()
    with pytest.raises(ck.CheckpointError, match=r"the last 3 saves failed:\n  OSError.*\n  OSError.*\n  OSError"):
        saver.step(4, {"a": 4})
    saver.step(4, {"a": 4})
    saver.close()
    assert ck.steps(memory) == [4]


def test_close_raises_if_the_last_save_was_lost(memory, monkeypatch):
    _failing(monkeypatch, 1)
    saver = ck.Saver(memory)
    saver.save(1, {"a": 1})
    with pytest.raises(OSError, match="No space"):
        saver.close()
    saver.close()
    with pytest.raises(ValueError, match="this Saver is closed"):
        saver.step(2, {"a": 1})


def test_with_does_not_hide_what_ended_it(memory, monkeypatch):
    _failing(monkeypatch, 1)
    with pytest.raises(ZeroDivisionError), ck.Saver(memory) as saver:
        saver.save(1, {"a": 1 / (saver.save(2, {"a": 1}) or 0)})


def test_c060_a_step_that_failed_can_be_saved_again(root, monkeypatch):
    _failing(monkeypatch, 1)
    with ck.Saver(root) as saver:
        saver.save(7, {"a": 1})
        saver.save(7, {"a": 2})
    assert ck.restore(f"{root}/7") == {"a": 2}


def test_c098_a_step_that_is_there_is_not_replaced_and_told(root):
    events: list[Event] = []
    ck.save(f"{root}/7", {"a": 1})
    with ck.Saver(root, on_event=events.append) as saver:
        saver.save(7, {"a": 2})
        with pytest.raises(ck.Exists):
            saver.wait()
        saver.save(5, {"a": 5})
    assert ck.restore(f"{root}/7") == {"a": 1}
    assert ck.steps(root) == [5, 7]


# --- resume -----------------------------------------------------------------------------------------------------------


def _flip(step: Path) -> None:
    data = max(step.rglob("d/*"), key=lambda path: path.stat().st_size)
    whole = bytearray(data.read_bytes())
    whole[len(whole) // 2] ^= 1
    data.write_bytes(whole)


def _truncate(step: Path) -> None:
    manifest = step / "MANIFEST.json"
    manifest.write_bytes(manifest.read_bytes()[:-40])


def _remove(step: Path) -> None:
    max(step.rglob("d/*"), key=lambda path: path.stat().st_size).unlink()


@pytest.mark.parametrize("damage", [_flip, _truncate, _remove])
def test_resume_passes_over_what_is_damaged_and_marks_it(tmp_path, damage):
    for step in (1, 2, 3):
        ck.save(tmp_path / str(step), {"w": np.full(5000, step, np.float32), "step": step})
    damage(tmp_path / "3")
    events: list[Event] = []
    like = {"w": np.zeros(5000, np.float32), "step": 0}
    with ck.Saver(tmp_path, on_event=events.append) as saver:
        with pytest.warns(UserWarning, match="step 3 cannot be read, and the one before is taken: "):
            state, step = saver.resume(like)
        assert (step, state["step"]) == (2, 2)
        assert [e.step for e in events if e.kind == "fell back"] == [3]
        assert ck.steps(tmp_path) == [1, 2]
        # Nobody picks it again, and training on writes it anew.
        assert saver.resume(like)[1] == 2
        saver.save(3, {"w": np.full(5000, 33, np.float32), "step": 3})
    assert ck.steps(tmp_path) == [1, 2, 3]
    assert ck.verify(tmp_path / "3").ok
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in told] == kinds(events)
    assert not (tmp_path / "3" / "BAD.json").exists()


def test_resume_passes_over_a_step_that_lost_its_manifest_and_says_so(tmp_path):
    """In a folder, which is renamed when all is there, no dead attempt looks like that."""
    like = {"w": np.zeros(50, int)}
    for step in (1, 2):
        ck.save(tmp_path / str(step), {"w": np.full(50, step)})
    (tmp_path / "3").mkdir()  # What holds nothing was never a checkpoint.
    (tmp_path / "2" / "MANIFEST.json").unlink()
    events: list[Event] = []
    with ck.Saver(tmp_path, on_event=events.append) as saver:
        with pytest.warns(UserWarning, match="step 2 cannot be read, and the one before is taken: .*MANIFEST.json"):
            assert saver.resume(like)[1] == 1
        assert [event.step for event in events if event.kind == "fell back"] == [2]
        (tmp_path / "1" / "MANIFEST.json").unlink()
        with pytest.raises(ck.Corrupt, match="all 2 of them are damaged"):
            saver.resume(like)


def test_what_cannot_be_marked_is_passed_over_all_the_same(tmp_path):
    """The root may be read-only; here something stands where the mark would go."""
    for step in (1, 2):
        ck.save(tmp_path / str(step), {"w": np.full(5000, step)})
    _flip(tmp_path / "2")
    (tmp_path / "2" / "BAD.json" / "in the way").mkdir(parents=True)
    with ck.Saver(tmp_path) as saver, pytest.warns(UserWarning, match="step 2 cannot be read"):
        assert saver.resume({"w": np.zeros(5000, int)})[1] == 1


@pytest.mark.parametrize("part", ["d/*", "manifest.ocdbt", "MANIFEST.json"])
def test_resume_passes_over_what_cannot_be_read_and_does_not_mark_it(tmp_path, monkeypatch, part):
    """A file server that is in trouble for a minute costs an interval, and not the step for good."""
    for step in (1, 2):
        ck.save(tmp_path / str(step), {"w": np.full(5000, step)})
    files = [str(path) for path in (tmp_path / "2").rglob(part)]
    with monkeypatch.context() as patch:
        _unreadable(patch, files)
        with ck.Saver(tmp_path) as saver, pytest.warns(UserWarning, match="step 2 cannot be read, and the one before"):
            assert saver.resume({"w": np.zeros(5000, int)})[1] == 1
    assert files
    assert ck.steps(tmp_path, bad=True) == []
    with ck.Saver(tmp_path) as saver:
        assert saver.resume({"w": np.zeros(5000, int)})[1] == 2


def _unreadable(patch: pytest.MonkeyPatch, files: list[str]) -> None:
    """From here on these cannot be opened; until they are taken from the list."""
    opened = os.open
    patch.setattr(os, "open", lambda path, *rest, **named: opened(_tell(path, files), *rest, **named))


def _tell(path, files):
    if str(path) in files:
        raise OSError(errno.EIO, "Input/output error", path)
    return path


def test_a_process_that_can_open_no_more_files_damages_no_run(tmp_path):
    """Nothing can be read by it: no step is marked, and the run does not begin anew."""
    for step in (1, 2):
        ck.save(tmp_path / str(step), {"w": np.full(5000, step)})
    code = """
        import os, resource, sys
        import numpy as np, ckpt_jax as ck
        like = {"w": np.zeros(5000, int)}
        saver = ck.Saver(sys.argv[1])
        saver.resume(like)
        taken = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        try:
            while True: taken.append(os.open("/", os.O_RDONLY))
        except OSError:
            pass
        try:
            saver.resume(like)
        except (ck.CheckpointError, OSError) as error:
            print(type(error).__name__, error)
        for fd in taken: os.close(fd)
        print("then", saver.resume(like)[1])
    """
    process = Child(textwrap.dedent(code), str(tmp_path))
    out, _ = process.communicate()
    assert "Too many open files" in out, out
    assert "then 2" in out
    assert ck.steps(tmp_path, bad=True) == []


def test_where_none_can_be_read_now_that_is_not_called_damage(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        ck.save(tmp_path / str(step), {"w": np.full(5000, step)})
    _flip(tmp_path / "2")
    files = [str(path) for step in "13" for path in (tmp_path / step).rglob("d/*")]
    with monkeypatch.context() as patch:
        _unreadable(patch, files)
        with (
            ck.Saver(tmp_path) as saver,
            pytest.raises(
                ck.CheckpointError, match=r"(?s)all 3 .* damaged or cannot be read now.*once storage"
            ) as caught,
        ):
            saver.resume({"w": np.zeros(5000, int)})
    assert not isinstance(caught.value, ck.Corrupt)
    assert ck.steps(tmp_path, bad=True) == [2]
    with ck.Saver(tmp_path) as saver:
        assert saver.resume({"w": np.zeros(5000, int)})[1] == 3


ODD = [
    "no mark",
    "no manifest",
    "a manifest that is a link",
    "a state that is a file",
    "unreadable",
    "Orbax's",
    "a user's",
]


@pytest.mark.parametrize("what", ODD)
def test_a_run_that_comes_past_a_step_that_it_refused_puts_it_aside(tmp_path, monkeypatch, what):
    """Also where that could not be marked: else that step would lose its save each time. Nothing is deleted."""
    for step in (1, 2):
        ck.save(tmp_path / str(step), {"w": np.full(5000, step)})
    files, two = [], tmp_path / "2"
    if what == "no mark":
        _flip(two)
        monkeypatch.setattr(_commit, "mark_bad", lambda *_: None)  # As on a disk without an inode left.
    elif what == "no manifest":
        (two / "MANIFEST.json").unlink()
    elif what == "a manifest that is a link":
        (two / "MANIFEST.json").rename(tmp_path / "elsewhere")
        (two / "MANIFEST.json").symlink_to(tmp_path / "elsewhere")
    elif what == "unreadable":
        files = [str(path) for path in two.rglob("*") if path.is_file()]
    else:
        shutil.rmtree(two)
        if what == "Orbax's":
            pytest.importorskip("orbax.checkpoint", reason="the floors of the core are without Orbax")
            from orbax.checkpoint import v1

            v1.save(two, {"w": np.full(5000, 2)})
            (two / "state" / "manifest.ocdbt").unlink()  # Else it is gone on from.
        elif what == "a user's":
            two.mkdir()
            (two / "state").write_text("mine")
        else:
            ck.save(two, {"w": np.full(5000, 2)})
            shutil.rmtree(two / "state")
            (two / "state").write_text("a file")
    there = {str(path.relative_to(two)): path.is_file() for path in two.rglob("*")}
    with monkeypatch.context() as patch, ck.Saver(tmp_path) as saver:
        _unreadable(patch, files)
        with pytest.warns(UserWarning, match="step 2 cannot be read"):
            assert saver.resume({"w": np.zeros(5000, int)})[1] == 1
        files.clear()
        saver.save(2, {"w": np.full(5000, 22)})
        saver.wait()
        assert ck.steps(tmp_path) == [1, 2]
        assert ck.restore(tmp_path / "2")["w"][0] == 22
        saver.save(2, {"w": np.full(5000, 23)})
        saver._idle.wait()
        assert isinstance(saver.last_error, ck.Exists)  # It is now a step like others.
        saver.save(3, {"w": np.full(5000, 3)})
    marked = what in ("a state that is a file", "Orbax's")
    (aside,) = tmp_path.glob("2.set-aside-*")
    left = {str(path.relative_to(aside)): path.is_file() for path in aside.rglob("*")}
    assert {name: kind for name, kind in left.items() if name != "BAD.json" or not marked} == there
    if what == "unreadable":
        assert ck.verify(aside).ok


@pytest.mark.parametrize("when", ["before the save", "while it is written"])
@pytest.mark.parametrize("refusal", ["no manifest", "unreadable"])
def test_what_another_wrote_since_a_step_was_refused_is_not_replaced(tmp_path, monkeypatch, refusal, when):
    for step in (1, 2):
        ck.save(tmp_path / str(step), {"w": np.full(5000, step)})
    files, events = [], []
    if refusal == "no manifest":
        (tmp_path / "2" / "MANIFEST.json").unlink()
    else:
        files = [str(path) for path in (tmp_path / "2").rglob("*") if path.is_file()]
    commit = _commit.commit

    def another(*_: Any) -> None:
        monkeypatch.setattr(_commit, "commit", commit)
        shutil.move(tmp_path / "2", tmp_path / "old")
        ck.save(tmp_path / "2", {"w": np.full(5000, 33)})

    with ck.Saver(tmp_path, on_event=events.append) as saver:
        with monkeypatch.context() as patch:
            _unreadable(patch, files)
            with pytest.warns(UserWarning, match="step 2 cannot be read"):
                assert saver.resume({"w": np.zeros(5000, int)})[1] == 1
        if when == "before the save":
            another()
        else:
            monkeypatch.setattr(_commit, "commit", lambda *given: (another(), commit(*given)))
        saver.save(2, {"w": np.full(5000, 22)})
        saver._idle.wait()
        assert isinstance(saver.last_error, ck.Exists)
        assert ck.restore(tmp_path / "2")["w"][0] == 33
        # Who comes too late is told so before anything is written.
        assert ("written" in kinds(events)) == (when == "while it is written")
        saver.save(3, {"w": np.full(5000, 3)})


@pytest.mark.parametrize(
    "odd", ["a link", "a folder", "a pipe", "a step that is a link to nowhere", "nothing but sidecars"]
)
def test_where_the_only_checkpoint_cannot_be_taken_for_one_the_run_does_not_begin_anew(tmp_path, odd):
    ck.save(tmp_path / "run" / "1", {"w": np.zeros(3)})
    manifest = tmp_path / "run" / "1" / "MANIFEST.json"
    if odd == "a step that is a link to nowhere":  # A disk that is not mounted.
        (tmp_path / "run" / "1").rename(tmp_path / "disk")
        (tmp_path / "run" / "1").symlink_to(tmp_path / "not mounted")
    else:
        manifest.rename(tmp_path / "elsewhere")
        if odd == "a link":
            manifest.symlink_to(tmp_path / "elsewhere")
        elif odd == "a folder":
            manifest.mkdir()
        elif odd == "a pipe":
            os.mkfifo(manifest)
        else:
            shutil.rmtree(tmp_path / "run" / "1" / "state")
    (tmp_path / "run" / "2024").mkdir()
    (tmp_path / "run" / "2024" / "notes.txt").write_text("A folder of a user's, which was never a checkpoint.")
    with ck.Saver(tmp_path / "run") as saver, pytest.raises(ck.Corrupt, match="the only one is damaged"):
        saver.resume({"w": np.zeros(3)})


def test_a_step_that_is_being_replaced_is_neither_passed_over_nor_called_damaged(tmp_path, monkeypatch):
    """Without an exchange nothing is there between two renames; and then the new one is."""
    for step in (1, 2):
        ck.save(tmp_path / str(step), {"w": np.full(5000, step)})
    load, away = _commit.load, []

    def replaced(place):
        if place.name == "2" and not away:
            away.append((tmp_path / "2").rename(tmp_path / "away"))
            try:
                return load(place)
            finally:
                away[0].rename(tmp_path / "2")
        return load(place)

    monkeypatch.setattr(_commit, "load", replaced)
    with ck.Saver(tmp_path) as saver:
        assert saver.resume({"w": np.zeros(5000, int)})[1] == 2
    assert away


def test_what_is_put_aside_and_not_durably_so_is_no_committed_step(tmp_path, monkeypatch):
    for step in (1, 2):
        ck.save(tmp_path / str(step), {"w": np.full(5000, step)})
    (tmp_path / "2" / "MANIFEST.json").unlink()
    with ck.Saver(tmp_path) as saver:
        with pytest.warns(UserWarning, match="step 2 cannot be read"):
            saver.resume({"w": np.zeros(5000, int)})
        rename, fsync = os.rename, _storage._fsync

        def unsure(path: str) -> None:
            if list(tmp_path.glob("2.set-aside-*")):
                _tell(path, [str(tmp_path)])
            fsync(path)

        with monkeypatch.context() as patch:
            patch.setattr(_storage, "_fsync", unsure)
            patch.setattr(os, "rename", lambda a, b: rename(_tell(a, [str(a)] if str(b).endswith("/2") else []), b))
            saver.save(2, {"w": np.full(5000, 22)})
            saver._idle.wait()
        assert "Input/output" in str(saver.last_error)
        assert ck.steps(tmp_path) == [1]
        assert not [name for name in os.listdir(tmp_path) if _commit.TMP in name]
        saver.save(2, {"w": np.full(5000, 22)})
    assert ck.steps(tmp_path) == [1, 2]
    assert not [name for name in os.listdir(tmp_path) if _commit.TMP in name]


def test_the_causes_of_failed_saves_are_told_also_where_the_root_cannot_be_read(tmp_path, monkeypatch):
    ck.save(tmp_path / "1", {"w": np.zeros(3)})
    files = [str(tmp_path / "1" / "MANIFEST.json")]
    with ck.Saver(tmp_path, max_failures=1) as saver:
        with monkeypatch.context() as patch:
            _unreadable(patch, files)
            patch.setattr(os, "mkdir", lambda path, *a: _tell(path, [str(path)]))
            saver.save(2, {"w": np.zeros(3)})
            saver._idle.wait()
            with pytest.raises(ck.CheckpointError, match=r"(?s)the last 1 saves failed.*the root cannot be read: "):
                saver.step(3, {"w": np.zeros(3)})
        saver.save(3, {"w": np.zeros(3)})


def test_a_link_that_leads_to_itself_stands_in_no_runs_way(tmp_path):
    ck.save(tmp_path / "1", {"w": np.full(5000, 1)})
    (tmp_path / "5").symlink_to("5")
    with ck.Saver(tmp_path, keep=ck.Keep(last=1)) as saver:
        with pytest.warns(UserWarning, match="step 5 cannot be read, .* is a link that leads nowhere"):
            assert saver.resume({"w": np.zeros(5000, int)})[1] == 1
        saver.save(2, {"w": np.full(5000, 2)})
    assert ck.steps(tmp_path) == [2]


def test_what_cannot_be_pruned_keeps_nothing_else(tmp_path, monkeypatch):
    events: list[Event] = []
    for step in (1, 2, 3):
        ck.save(tmp_path / str(step), {"w": np.zeros(3)})
    rename = os.rename

    def failing(a, b):
        if str(a) == str(tmp_path / "1"):
            raise OSError(errno.EXDEV, "Invalid cross-device link", a, None, b)
        rename(a, b)

    monkeypatch.setattr(os, "rename", failing)
    with ck.Saver(tmp_path, keep=ck.Keep(last=1), on_event=events.append) as saver:
        saver.save(4, {"w": np.zeros(3)})
    assert ck.steps(tmp_path) == [1, 4]
    assert [event.step for event in events if event.kind == "pruned"] == [2, 3]
    assert any(
        "could not prune: 1: expected to be deleted, and its space freed, found " in event.message for event in events
    )


def test_where_nothing_can_be_read_the_run_does_not_begin_anew(tmp_path):
    """Neither at the first try, nor once all are marked."""
    for step in (1, 2):
        ck.save(tmp_path / str(step), {"w": np.full(5000, step)})
        _flip(tmp_path / str(step))
    for _ in range(2):
        with ck.Saver(tmp_path) as saver, pytest.raises(ck.Corrupt, match="all 2 of them are damaged"):
            saver.resume({"w": np.zeros(5000, int)})
    assert ck.steps(tmp_path, bad=True) == [1, 2]


def test_a_step_that_is_replaced_while_it_is_read_is_taken_as_it_is_then(tmp_path, monkeypatch):
    for step in (1, 2):
        ck.save(tmp_path / str(step), {"w": np.full(5000, step)})
    fetch = _restore.fetch

    def late(*arguments, **named):
        monkeypatch.setattr(_restore, "fetch", fetch)
        ck.save(tmp_path / "2", {"w": np.full(5000, 22)}, overwrite=True)
        return fetch(*arguments, **named)

    monkeypatch.setattr(_restore, "fetch", late)
    with ck.Saver(tmp_path) as saver:
        state, step = saver.resume({"w": np.zeros(5000, int)})
    assert (step, state["w"][0]) == (2, 22)
    assert ck.steps(tmp_path, bad=True) == []


def test_a_mark_says_why(tmp_path):
    ck.save(tmp_path / "1", {"w": np.zeros(5000)})
    _flip(tmp_path / "1")
    with ck.Saver(tmp_path) as saver, pytest.raises(ck.Corrupt):
        saver.resume({"w": np.zeros(5000)})
    told = json.loads((tmp_path / "1" / "BAD.json").read_text())
    assert told["why"].startswith("w: expected chunk [0] in state/ocdbt.process_0/d/")
    assert told["pid"] == os.getpid()


def test_another_tree_is_the_users_error_and_no_damage(root):
    ck.save(f"{root}/1", {"w": np.zeros(3)})
    with ck.Saver(root) as saver, pytest.raises(ck.Mismatch, match="does not fit `like`"):
        saver.resume({"w": np.zeros(4)})
    assert ck.steps(root) == [1]


def test_resume_on_nothing_gives_the_state_back(root):
    state = {"w": np.zeros(3)}
    with ck.Saver(root) as saver:
        assert saver.resume(state) == (state, 0)


def test_resume_removes_what_killed_saves_left(tmp_path):
    ck.save(tmp_path / "1", {"w": 1})
    leftover = tmp_path / "2.orbax-checkpoint-tmp-0123456789abcdef"
    (leftover / "state").mkdir(parents=True)
    with ck.Saver(tmp_path) as saver:
        assert saver.resume({"w": 0}) == ({"w": 1}, 1)
    assert not leftover.exists()


def test_resume_waits_for_the_save_under_way(memory, gate):
    with ck.Saver(memory) as saver:
        saver.save(1, {"w": 1})
        threading.Timer(0.2, gate.open.set).start()
        assert saver.resume({"w": 0}) == ({"w": 1}, 1)


def test_c091_counts_that_disagree_are_warned_of(memory):
    optimizer = optax.adam(1e-3)
    opt = optimizer.init({"w": jnp.zeros(2)})
    batches = ck.data.global_batches(range(8), 2, seed=0)
    next(batches)
    with ck.Saver(memory) as saver:
        saver.save(3, {"opt": opt, "data": batches, "step": 3})
        saver.wait()
        with pytest.warns(UserWarning, match=r"step 3 was resumed, but .*opt.*count is 0"):
            saver.resume({"opt": opt, "data": batches, "step": 0})


# --- health -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "complex64", "float8_e4m3fn"])
def test_an_unhealthy_state_is_not_committed_and_the_leaf_is_named(memory, dtype):
    events: list[Event] = []
    bad = np.ones(3000, jnp.dtype(dtype))
    bad[1234] = np.nan
    with ck.Saver(memory, on_event=events.append) as saver:
        saver.save(1, {"ok": np.ones(3), "bad": bad, "ints": np.ones(3, int)})
        with pytest.raises(ck.Unhealthy, match="bad: expected finite values, found 1 NaN or infinite"):
            saver.wait()
        assert ck.steps(memory) == []
        saver.save(2, {"ok": np.ones(3), "bad": np.ones(3000, jnp.dtype(dtype)), "ints": np.ones(3, int)})
    assert [(e.kind, e.names) for e in events if e.kind == "rejected"] == [("rejected", ("bad",))]
    assert ck.steps(memory) == [2]
    health = ck.open(f"{memory}/2").manifest.health
    assert health.keys() == {"ok", "bad"}
    assert health["bad"].norm == pytest.approx(np.sqrt(3000), rel=1e-5)


def test_what_is_excepted_may_be_nan(memory):
    with ck.Saver(memory, health=ck.Health(allow=("metrics",))) as saver:
        saver.save(1, {"metrics": {"best": np.float32("inf")}, "w": np.ones(2)})
        saver.wait()
    with ck.Saver(memory, health=None) as saver:
        saver.save(2, {"w": np.full(2, np.nan)})
    assert ck.steps(memory) == [1, 2]


def test_a_norm_that_jumps_is_refused(memory):
    with ck.Saver(memory, health=ck.Health(norm_jump=10.0)) as saver:
        saver.save(1, {"w": np.ones(4), "z": np.zeros(3)})
        saver.save(2, {"w": np.full(4, 5.0), "z": np.ones(3)})
        saver.save(3, {"w": np.full(4, 51.0), "z": np.ones(3)})
        with pytest.raises(ck.Unhealthy, match="w: expected a norm within 10 times 10, found 102"):
            saver.wait()
        saver.save(4, {"w": np.full(4, 49.0), "z": np.ones(3)})
    assert ck.steps(memory) == [1, 2, 4]


def test_large_finite_values_are_healthy(memory):
    tree = {"f32": np.full(10**6, 3e38, np.float32), "f64": np.full(10, 1e300), "h": np.full(9, 65504, np.float16)}
    with ck.Saver(memory) as saver:
        saver.save(1, tree)
    assert ck.open(f"{memory}/1").manifest.health["f32"].nonfinite == 0


# --- live leaves ------------------------------------------------------------------------------------------------------


def test_host_rng_generators_and_grain_iterators_go_on_where_they_were(root):
    loader = grain.MapDataset.range(50).shuffle(seed=1).batch(5).to_iter_dataset()
    data, generator = iter(loader), np.random.default_rng(5)
    next(data)
    random.seed(1)
    np.random.seed(2)
    with ck.Saver(root) as saver:
        saver.save(1, {"rng": ck.HostRNG(), "data": data, "generator": generator})
        expected = [random.random(), np.random.rand(), generator.random(), next(data).tolist()]
        saver.wait()
        state, _ = saver.resume({"rng": ck.HostRNG(), "data": iter(loader), "generator": np.random.default_rng()})
    found = [random.random(), np.random.rand(), state["generator"].random(), next(state["data"]).tolist()]
    assert found == expected


# --- the end of a process ---------------------------------------------------------------------------------------------

CHILD = """
import os, sys, time, signal
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np, ckpt_jax as ck
from ckpt_jax import _writing
root = sys.argv[1]
write = _writing.write
def slow(*a, **k):
    time.sleep(0.7)
    return write(*a, **k)
_writing.write = slow
state = {"w": np.arange(10.0)}
"""


def child(body: str, root: Path, **named: Any) -> subprocess.CompletedProcess[str]:
    script = CHILD + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", script, str(root)], capture_output=True, text=True, timeout=120, check=False, **named
    )


@pytest.mark.parametrize(
    ("end", "code", "there"),
    [("sys.exit(0)", 0, True), ("raise ValueError('x')", 1, True), ("", 0, True), ("os._exit(0)", 0, False)],
)
def test_c058_a_process_that_ends_finishes_its_save(tmp_path, end, code, there):
    """One of several data files: its threads begin when the main thread is over."""
    state = "state = {str(i): np.full(5_000_000, i) for i in range(4)}\n"
    done = child(f"{state}saver = ck.Saver(root)\nsaver.save(5, state)\n{end}\n", tmp_path)
    assert done.returncode == code, done.stderr
    assert ck.steps(tmp_path) == ([5] if there else [])
    assert not there or ck.verify(tmp_path / "5").ok


def test_a_thread_trains_on_when_the_main_one_is_over(tmp_path):
    """Python lets it: it waits for the others."""
    done = child(
        """
        import threading
        def train():
            time.sleep(0.5)
            with ck.Saver(root) as saver:
                for step in (1, 2):
                    saver.save(step, {"w": np.full(50_000, step)})
                assert saver.resume({"w": np.zeros(50_000, int)})[1] == 2
        threading.Thread(target=train).start()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert ck.steps(tmp_path) == [1, 2]


def test_a_pool_without_threads_has_its_caller_do_the_work(monkeypatch):
    """From Python 3.12 on none is started once the program ends."""

    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with _threads.Pool(2) as pool:
        assert pool.submit(lambda x: x + 1, 1).result() == 2
        assert isinstance(pool.submit(lambda: 1 / 0).exception(), ZeroDivisionError)


def test_what_a_closed_pool_has_not_begun_is_not_done():
    gate, begun, done = threading.Event(), threading.Event(), []

    def work(number):
        begun.set()
        gate.wait(10)
        done.append(number)

    with _threads.Pool(1) as pool:
        futures = [pool.submit(work, number) for number in range(3)]
        begun.wait(10)
        threading.Timer(0.2, gate.set).start()
    assert done == [0]
    assert [future.cancelled() for future in futures] == [False, True, True]


def test_a_save_that_is_lost_at_the_end_is_said_and_is_no_success(tmp_path):
    done = child(
        """
        def fail(*a, **k): raise OSError(28, "No space left on device")
        _writing.write = fail
        saver = ck.Saver(root)
        saver.save(5, state)
        """,
        tmp_path,
    )
    assert done.returncode == 1
    assert "ckpt_jax: the last save was lost" in done.stderr
    assert "No space left" in done.stderr


def test_a_forked_child_has_no_part_in_it(tmp_path):
    done = child(
        """
        saver = ck.Saver(root)
        saver.save(5, state)
        if os.fork() == 0:
            saver.close()
            try:
                saver.step(6, state)
            except ValueError as error:
                print("child:", error, flush=True)
            os._exit(0)
        os.wait()
        saver.close()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "child: this Saver belongs to the process" in done.stdout
    assert ck.steps(tmp_path) == [5]


# --- preemption -------------------------------------------------------------------------------------------------------


def test_a_second_sigterm_after_the_grace_ends_what_hangs(tmp_path):
    """The first is noted; one that comes within the grace is no other."""
    done = child(
        """
        _writing.write = lambda *a, **k: time.sleep(600)
        saver = ck.Saver(root, grace=0.5)
        saver.save(1, state)
        for pause in (0, 0.6):
            os.kill(os.getpid(), signal.SIGTERM)
            print("alive", flush=True)
            time.sleep(pause)
        os.kill(os.getpid(), signal.SIGTERM)
        print("too late", flush=True)
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == "alive\nalive\n"


LOOP = """
events = []
with ck.Saver(root, every=ck.Every(steps=1000), grace={grace}, on_event=lambda e: print(e, flush=True)) as saver:
    state, step = saver.resume({{"w": np.zeros(10), "step": 0}})
    while step < 10**6 and not saver.preempted:
        step += 1
        state = {{"w": state["w"] + 1, "step": step}}
        saver.step(step, state)
        if step == 3: print("running", flush=True)
        time.sleep(0.01)
print("left", step, flush=True)
"""


def preempted(root: Path, grace: float, prelude: str = "") -> tuple[int, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD + prelude + LOOP.format(grace=grace), str(root)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while "running" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def test_c107_sigterm_saves_once_more_and_leaves(tmp_path):
    code, out = preempted(tmp_path, 30)
    assert code == 0
    assert "the last save is committed" in out
    (step,) = ck.steps(tmp_path)
    assert f"left {step}" in out
    assert ck.restore(tmp_path / str(step))["w"][0] == step


def test_a_last_save_that_does_not_fit_is_not_begun(tmp_path):
    """The write before took 0.7 s, and there are 0.3: it says so, and the newest commit is whole."""
    prelude = """
first = ck.Saver(root)
first.save(0, {'w': np.zeros(10), 'step': 0})
first.close()
init = ck.Saver.__init__
def with_time(self, *a, **k):
    init(self, *a, **k)
    self._took = first._took
ck.Saver.__init__ = with_time
"""
    code, out = preempted(tmp_path, 0.3, prelude)
    assert code == 0
    assert "no time for a last save" in out
    assert ck.steps(tmp_path) == [0]


def test_sigterm_goes_on_to_the_handler_that_was_there(tmp_path):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("user"))
    try:
        with ck.Saver(tmp_path) as saver:
            os.kill(os.getpid(), signal.SIGTERM)
            saver.step(1, {"a": 1})
            assert saver.preempted
        assert heard == ["user"]
        assert ck.steps(tmp_path) == [1]
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["user", "user"], "the handler is given back"
    finally:
        signal.signal(signal.SIGTERM, before)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_hundred_saves_leave_memory_flat(tmp_path):
    import psutil

    tree = {"w": jnp.zeros((512, 1024)), "n": np.zeros(10**5)}
    with ck.Saver(tmp_path, keep=ck.Keep(last=1)) as saver:
        for step in range(30):
            saver.save(step, tree)
        saver.wait()
        before = psutil.Process().memory_info().rss
        for step in range(30, 130):
            saver.save(step, tree)
        saver.wait()
        assert psutil.Process().memory_info().rss < 1.05 * before
        assert threading.active_count() < 40


def test_a_callback_that_fails_costs_no_save(memory):
    """It runs in the writer's thread too, which would otherwise be gone, and the next save never written."""

    def on_event(event: Event) -> None:
        if event.kind == "committed":
            raise RuntimeError("a dashboard that is down")

    def saved(step: int) -> None:
        saver.save(step, {"a": step})
        saver.wait()

    with ck.Saver(memory, on_event=on_event) as saver:
        for step in (1, 2):
            with pytest.warns(UserWarning, match=f"on_event failed at step {step} committed.*a dashboard that is down"):
                saved(step)
    assert ck.steps(memory) == [1, 2]


def test_the_events_of_a_save_tell_what_it_cost(memory):
    events: list[Event] = []
    with ck.Saver(memory, on_event=events.append) as saver:
        saver.save(1, {"w": jnp.zeros(1000), "n": np.zeros(3), "step": 1})
    assert kinds(events) == ["started", "snapshot", "written", "committed", "closed"]
    snapshot, written, committed = events[1:4]
    assert snapshot.seconds.keys() == {"blocked"}
    assert written.bytes == committed.bytes == 4000 + 24
    assert written.seconds.keys() == {"write"}
    assert {"blocked", "snapshot", "write", "merge", "all"} <= committed.seconds.keys()


def test_metrics_may_be_arrays_of_one_number(memory):
    with ck.Saver(memory) as saver:
        saver.save(1, {"w": np.zeros(2)}, metrics={"loss": jnp.float32(0.5), "n": np.int64(3), "x": np.array(2.0)})
    assert ck.open(f"{memory}/1").manifest.metrics == {"loss": 0.5, "n": 3, "x": 2.0}


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"metrics": [1.0]}, "metrics is a dict, not list"),
        ({"metrics": {"loss": np.zeros(3)}}, r"the metric 'loss' is a number, not float64\[3\]"),
        ({"metrics": {"loss": object()}}, "metrics: plain data"),
        ({"metrics": {"at": np.datetime64("2026-01-01")}}, "the metric 'at' is a number"),
        ({"milestone": 1}, "milestone is True or False, not 1"),
    ],
)
def test_what_could_not_be_read_again_is_refused_at_the_call(memory, named, message):
    """A manifest that breaks its own rules would be committed, and never be found again."""
    with ck.Saver(memory) as saver:
        with pytest.raises(TypeError, match=message):
            saver.save(1, {"w": np.zeros(2)}, **named)
        saver.save(2, {"w": np.zeros(2)}, milestone=np.bool_(True))
    assert ck.steps(memory) == [2]
    assert ck.open(f"{memory}/2").manifest.milestone is True


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("raised", [OSError("no"), SystemExit("enough"), KeyboardInterrupt()])
def test_whatever_a_callback_raises_the_writer_lives_on(memory, raised, capsys):
    """Also where the warning of it is an error; then it is told on stderr."""

    def fails(event):
        if threading.current_thread() is not threading.main_thread():
            raise raised

    with ck.Saver(memory, on_event=fails) as saver:
        for step in (1, 2, 3):
            saver.save(step, {"w": np.zeros(2)})
    assert ck.steps(memory) == [1, 2, 3]
    assert "on_event failed at step 3 written: write" in capsys.readouterr().err


def test_ctrl_c_in_a_callback_leaves_nothing_to_wait_for(memory):
    def fails(event):
        if event.kind == "snapshot" and event.step == 1:
            raise KeyboardInterrupt

    with ck.Saver(memory, on_event=fails) as saver:
        with pytest.raises(KeyboardInterrupt):
            saver.save(1, {"w": np.zeros(2)})
        saver.save(2, {"w": np.zeros(2)})
    assert ck.steps(memory) == [2]


@pytest.mark.parametrize("method", ["save", "step", "wait", "close"])
@pytest.mark.parametrize("kind", ["snapshot", "committed"])
def test_a_callback_in_the_middle_of_a_save_cannot_wait_for_it(memory, method, kind):
    """In the training loop's thread, and in the writer's."""
    told: list[str] = []

    def calls(event):
        if event.kind == kind:
            try:
                getattr(saver, method)(*([2, {"w": 1}] if method in ("save", "step") else []))
            except RuntimeError as error:
                told.append(str(error))

    with ck.Saver(memory, every=ck.Every(steps=1), on_event=calls) as saver:
        saver.save(1, {"w": np.zeros(2)})
    assert told == ["on_event is called in the middle of a save: it cannot wait for one, nor begin one"]
    assert ck.steps(memory) == [1]


def test_a_manifest_that_could_not_be_read_again_is_not_committed(memory, monkeypatch):
    """Whatever got past the checks at the call."""
    monkeypatch.setattr(_save, "_milestone", lambda milestone: milestone)
    with pytest.raises(ck.Corrupt, match="milestone"), ck.Saver(memory) as saver:
        saver.save(1, {"w": np.zeros(2)}, milestone=1)  # pyright: ignore[reportArgumentType]
    assert ck.steps(memory) == ck.steps(memory, bad=True) == []


def test_what_was_agreed_on_for_a_later_step_comes_after_going_back():
    meeting = _agree.Meeting(None, 0, 1, "", print)
    meeting.passed(250)
    meeting._agreed.add(("save", 251))
    meeting.back_to(100)
    assert meeting.passed(101) == {"save"}


def test_a_run_that_goes_on_from_an_earlier_step_keeps_its_own(memory):
    for step in (800, 900, 1000):
        ck.save(f"{memory}/{step}", {"w": np.zeros(2)})
    with ck.Saver(memory, keep=ck.Keep(last=2)) as saver:
        for step in (500, 600, 700):
            saver.save(step, {"w": np.zeros(2)})
    assert ck.steps(memory) == [600, 700, 900, 1000]


def test_a_python_float_that_is_nan_is_not_committed(memory):
    events: list[Event] = []
    with pytest.raises(ck.Unhealthy, match="scale"), ck.Saver(memory, on_event=events.append) as saver:
        saver.save(1, {"scale": float("nan")})
    assert ck.steps(memory) == []


def test_saves_from_several_threads_are_all_made(memory):
    with ck.Saver(memory) as saver:
        threads = [threading.Thread(target=saver.save, args=(step, {"w": np.zeros(9)})) for step in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert saver.skipped == 0
    assert ck.steps(memory) == list(range(8))


def test_a_notice_of_preemption_counts_after_going_back_too(tmp_path):
    done = child(
        """
        with ck.Saver(root, every=ck.Every(steps=5)) as saver:
            for step in range(1, 21):
                saver.step(step, state)
                saver.wait()
            saver.step(23, state)
            _, step = saver.resume(state)
            os.kill(os.getpid(), signal.SIGTERM)
            saver.step(step + 1, state)
            print(step, saver.preempted)
        """,
        tmp_path,
    )
    assert done.stdout == "20 True\n", done.stdout + done.stderr
    assert ck.steps(tmp_path)[-1] == 21


def test_sigterm_ends_what_is_past_its_run_and_what_was_forked(tmp_path):
    """Savers that are closed in whatever order, and a worker that has a handler from its parent."""
    done = child(
        """
        import multiprocessing
        def work(started):
            started.set()
            time.sleep(60)
        if __name__ == "__main__":
            one, two = ck.Saver(root), ck.Saver(root + "/b")
            with ck.Saver(root + "/c"):
                started = multiprocessing.get_context("fork").Event()
                worker = multiprocessing.get_context("fork").Process(target=work, args=(started,))
                worker.start()
                started.wait()
                worker.terminate()
                worker.join()
                print(worker.exitcode)
            one.close()
            two.close()
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        """,
        tmp_path,
    )
    assert (done.stdout, done.returncode) == ("-15\n", -15), done.stderr


def test_a_forked_worker_finishes_its_save(tmp_path):
    done = child(
        """
        import multiprocessing
        def work():
            ck.Saver(root, every=ck.Every(steps=1)).step(1, {"w": np.zeros(1 << 20)})
        if __name__ == "__main__":
            worker = multiprocessing.get_context("fork").Process(target=work)
            worker.start()
            worker.join()
            print(worker.exitcode, ck.steps(root))
        """,
        tmp_path,
    )
    assert done.stdout == "0 [1]\n", done.stdout + done.stderr


def test_a_last_save_of_a_step_that_is_committed_loses_nothing(tmp_path):
    done = child(
        """
        events = []
        with ck.Saver(root, every=ck.Every(steps=1), on_event=events.append) as saver:
            saver.step(5, state)
            saver.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            saver.step(5, state)
            print(saver.preempted, events[-1].message)
        """,
        tmp_path,
    )
    assert (done.stdout, done.returncode) == ("True this step is committed already\n", 0), done.stderr


@pytest.mark.parametrize(
    ("state", "named"),
    [({"seed": 2**60}, True), ({"hash": "0xdeadbeef01"}, True), ({"f": "<function f at 0x7f3a5c0d2e80>"}, False)],
)
def test_numbers_and_digests_in_a_loaders_state_are_no_addresses(memory, state, named):
    class Loader:
        def get_state(self):
            return state

        def set_state(self, found):
            assert found == state

    if named:
        ck.save(f"{memory}/1", {"data": Loader()})
        ck.restore(f"{memory}/1", {"data": Loader()})
        return
    with pytest.raises(ck.Unsupported, match="holds an object's address"):
        ck.save(f"{memory}/1", {"data": Loader()})


def test_a_loader_that_cannot_say_its_state_is_named(memory):
    class Loader:
        def get_state(self):
            raise RuntimeError("not begun")

        def set_state(self, found):
            pass

    with pytest.raises(ck.Unsupported, match=r"data: .* that cannot say its state: RuntimeError: not begun"):
        ck.save(f"{memory}/1", {"data": Loader()})


@pytest.mark.parametrize(
    ("named", "error"),
    [
        ({"max_failures": 0}, ValueError),
        ({"max_failures": 1.5}, TypeError),
        ({"grace": float("inf")}, ValueError),
        ({"grace": float("nan")}, ValueError),
        ({"grace": "30"}, TypeError),
        ({"timeout": 0}, ValueError),
        ({"on_event": 5}, TypeError),
    ],
)
def test_wrong_numbers_are_told_at_once(memory, named, error):
    with pytest.raises(error, match=next(iter(named))):
        ck.Saver(memory, **named)


def test_step_touches_no_storage(tmp_path):
    """Whatever the storage does, the loop waits for the snapshot alone: also with a save that is skipped."""
    done = child(
        """
        import threading
        touched = None
        def seen(name, arguments):
            storage = name in ("open", "os.mkdir", "os.rename", "os.listdir", "os.remove")
            if touched is not None and storage and threading.current_thread() is threading.main_thread():
                touched.append((name, arguments[0]))
        with ck.Saver(root, every=ck.Every(steps=1)) as saver:
            sys.addaudithook(seen)
            saver.step(1, state)
            saver.wait()
            touched = []
            print(saver.step(2, state), saver.step(3, state), touched)
            touched = None
        """,
        tmp_path,
    )
    assert done.stdout == "True False []\n", done.stdout + done.stderr
    told = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    told = [kind for kind in told if kind != "written"]  # Before or after the step that is skipped.
    assert told == ["started", "snapshot", "committed", "snapshot", "skipped", "committed", "closed"]


def test_the_last_save_keeps_its_milestone(tmp_path):
    with ck.Saver(tmp_path) as saver:
        os.kill(os.getpid(), signal.SIGTERM)
        saver.step(1, {"a": 1}, milestone=True)
        assert saver.preempted
    assert ck.open(tmp_path / "1").manifest.milestone


def test_wrong_arguments_are_told_at_once(memory):
    with pytest.raises(TypeError, match=r"every is a ckpt_jax\.Every or None"):
        ck.Saver(memory, every=100)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Every takes steps=, minutes=, or both"):
        ck.Every()
    with pytest.raises(TypeError, match="steps is an int"):
        ck.Every(steps=1.5)  # pyright: ignore[reportArgumentType]
    with ck.Saver(memory) as saver:
        with pytest.raises(TypeError, match="step is an int"):
            saver.step("7", {})  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match="step is an int"):
            saver.save("7", {})  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match="metrics"):
            saver.save(1, {"a": 1}, metrics={"f": open})


def test_a_memory_mapped_leaf_is_copied(tmp_path):
    mapped = np.memmap(tmp_path / "mapped", np.float32, "w+", shape=(1000,))
    mapped[:] = 1
    with ck.Saver(tmp_path / "run") as saver:
        saver.save(1, {"m": mapped})
        mapped[:] = 2
    assert (ck.restore(tmp_path / "run" / "1")["m"] == 1).all()


@pytest.mark.parametrize("how", ["truncate", "remove"])
def test_what_the_storage_loses_before_the_commit_is_not_committed(tmp_path, how):
    def lose(event):
        if event.kind == "written":
            (file,) = tmp_path.glob("1.*/state/ocdbt.process_0/d/*00000000")
            os.truncate(file, file.stat().st_size - 1) if how == "truncate" else file.unlink()

    saver = ck.Saver(tmp_path, on_event=lose)
    saver.save(1, {f"l{i}": np.ones(50) for i in range(100)} | {"z": np.zeros(400)})
    with pytest.raises(ck.CheckpointError, match="what was just written is gone"):
        saver.close()
    assert ck.steps(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


def test_who_did_not_resume_is_told_what_a_root_is_for(memory):
    ck.save(f"{memory}/1", {"w": np.ones(3)})
    saver = ck.Saver(memory)
    saver.save(1, {"w": np.ones(3)})
    with pytest.raises(ck.errors.Exists, match="a root is for one run"):
        saver.close()


def test_the_end_tells_what_is_not_saved(memory):
    events: list[Event] = []
    with ck.Saver(memory, every=ck.Every(steps=4), on_event=events.append) as saver:
        for step in range(1, 7):
            saver.step(step, {"w": np.ones(3)})
    assert str(events[-1]) == "closed: what came after step 4 is not saved; the last was 6"


def test_an_end_by_an_error_says_so(memory):
    events: list[Event] = []
    with pytest.raises(ZeroDivisionError), ck.Saver(memory, on_event=events.append):
        raise ZeroDivisionError("no")
    assert str(events[-1]) == "closed: after ZeroDivisionError: no"


def test_events_that_cannot_be_written_are_told_once(tmp_path):
    (tmp_path / "events.jsonl").mkdir()
    events: list[Event] = []
    with ck.Saver(tmp_path, on_event=events.append) as saver:
        saver.save(1, {"w": np.ones(3)})
    (warning,) = (event for event in events if event.kind == "warning")
    assert "events.jsonl: " in warning.message
    assert ck.steps(tmp_path) == [1]


def test_a_metric_that_no_checkpoint_has_deletes_nothing(memory):
    events: list[Event] = []
    with ck.Saver(memory, keep=ck.Keep(last=1, best=ck.Best("los")), on_event=events.append) as saver:
        for step in (1, 2):
            saver.save(step, {"w": np.ones(3)}, metrics={"loss": 1.0})
    assert ck.steps(memory) == [1, 2]
    assert any("no checkpoint" in event.message and "one of loss" in event.message for event in events)
    with pytest.raises(ck.CheckpointError, match=r"no checkpoint in .* has the metric 'los'"):
        ck.prune(memory, ck.Keep(last=1, best=ck.Best("los")))


def test_a_writer_that_cannot_start_costs_that_save_only(tmp_path, monkeypatch):
    start = threading.Thread.start

    def refuse(self):
        if self.name == "ckpt_jax writer":
            raise RuntimeError("can't start new thread")
        start(self)

    events: list[Event] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with bounded(), ck.Saver(tmp_path, every=ck.Every(steps=1), on_event=events.append) as saver:
        assert not saver.step(1, {"w": np.ones(3)})
        assert "can't start new thread" in str(saver.last_error)
        monkeypatch.undo()
        assert saver.step(2, {"w": np.ones(3)})
    assert ck.steps(tmp_path) == [2]
    assert [event.kind for event in events if event.step is not None] == ["failed", "snapshot", "written", "committed"]


def test_a_thread_that_nobody_counted_stops_no_pool_from_ending(monkeypatch):
    """Ctrl-C comes when it has started, and before it is counted."""
    start, interrupts = threading.Thread.start, [True]

    def interrupted(self):
        start(self)
        if interrupts and interrupts.pop():
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    before = set(threading.enumerate())
    with bounded(), _threads.Pool(3) as pool:  # Or it would wait for ever.
        with pytest.raises(KeyboardInterrupt):
            pool.submit(int)
        futures = [pool.submit(int) for _ in range(9)]
        assert [future.result(10) for future in futures] == [0] * 9
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before


def test_a_line_of_events_for_which_there_is_half_the_room_is_not_there(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2] if b'"kind"' in data else data))
    with ck.Saver(tmp_path):
        pass
    monkeypatch.undo()
    with ck.Saver(tmp_path):
        pass
    told = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert told == ["started", "closed"]


def test_a_root_that_cannot_be_cleared_can_be_resumed(tmp_path, monkeypatch):
    """Such as one that is mounted to be read only."""
    ck.save(tmp_path / "1", {"w": np.ones(3)})
    (tmp_path / f"2{_commit.TMP}00" / "state").mkdir(parents=True)

    def refuse(path: str, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", path)

    monkeypatch.setattr(os, "rmdir", refuse)
    with ck.Saver(tmp_path) as saver:
        assert saver.resume({"w": np.zeros(3)})[1] == 1
