"""Which checkpoints stay: the pure rule by a table, and what deletes by it."""

import errno
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import ckpt_jax as ck
from ckpt_jax import _commit, _health, _leaves, _retain
from ckpt_jax._retain import DAY, Facts, kept


def facts(*steps: int, loss: dict[int, float] | None = None, days: dict[int, float] | None = None):
    loss, days = loss or {}, days or {}
    return {s: Facts(days.get(s, 0) * DAY, {"loss": loss[s]} if s in loss else {}, False) for s in steps}


NAN = math.nan


@pytest.mark.parametrize(
    ("found", "keep", "stay"),
    [
        ({}, ck.Keep(), []),
        (facts(1), ck.Keep(last=0), [1]),
        (facts(1, 2, 3, 4, 5), ck.Keep(last=0), [5]),
        (facts(1, 2, 3, 4, 5), ck.Keep(last=3), [3, 4, 5]),
        (facts(1, 2), ck.Keep(last=3), [1, 2]),
        (facts(10, 20, 30, 40, 50), ck.Keep(last=1, every=20), [20, 40, 50]),
        (facts(0, 5, 7), ck.Keep(last=1, every=5), [0, 5, 7]),
        (facts(1, 2, 3, 4), ck.Keep(last=1, milestones=(2, 99)), [2, 4]),
        # The newest of each of the last days that have checkpoints; days without any do not count.
        (facts(1, 2, 3, 4, 5, days={1: 0.1, 2: 0.9, 3: 1.5, 4: 8.2, 5: 8.3}), ck.Keep(last=1, daily=2), [3, 5]),
        (facts(1, 2, 3, days={1: 0.1, 2: 0.9, 3: 1.5}), ck.Keep(last=1, daily=14), [2, 3]),
        # A metric that gets worse: the newest stays, the best stay (C096).
        (facts(1, 2, 3, 4, loss={1: 0.1, 2: 0.2, 3: 0.9, 4: 0.95}), ck.Keep(1, best=ck.Best("loss", 2)), [1, 2, 4]),
        (
            facts(1, 2, 3, 4, loss={1: 0.9, 2: 0.8, 3: 0.1, 4: 0.05}),
            ck.Keep(last=1, best=ck.Best("loss", 2, mode="max")),
            [1, 2, 4],
        ),
        # NaN is never best, nor is a step without the metric.
        (facts(1, 2, 3, loss={1: NAN, 2: 5.0}), ck.Keep(last=1, best=ck.Best("loss")), [2, 3]),
        (facts(1, 2, 3, loss={1: NAN, 2: NAN}), ck.Keep(last=1, best=ck.Best("loss")), [3]),
        (facts(1, 2, 3, loss={1: NAN, 2: 5.0}), ck.Keep(1, best=ck.Best("loss", 9, mode="max")), [2, 3]),
        (facts(1, 2, 3, loss={1: math.inf, 2: 5.0}), ck.Keep(1, best=ck.Best("loss")), [2, 3]),
        # Of equal ones the later.
        (facts(1, 2, 3, loss={1: 1.0, 2: 1.0}), ck.Keep(last=1, best=ck.Best("loss")), [2, 3]),
    ],
)
def test_what_stays(found, keep, stay):
    assert kept(found, keep) == stay


def test_c096_the_best_do_not_push_out_the_newest(root):
    """A metric that only gets worse: a run keeps its best two, and the step that it resumes from."""
    with ck.Saver(root, every=ck.Every(steps=1), keep=ck.Keep(last=1, best=ck.Best("acc", 2, mode="max"))) as saver:
        for step, accuracy in enumerate([0.9, 0.8, 0.1, 0.05], start=1):
            saver.step(step, {"w": np.full(3, step)}, metrics={"acc": accuracy})
            saver.wait()
    assert ck.steps(root) == [1, 2, 4]
    assert ck.latest(root) == f"{root}/4"


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (np.float32(2.5), 2.5),
        (np.int64(3), 3.0),
        (np.array(2.5), 2.5),
        (np.array([2.5]), None),
        (np.bool_(True), None),
        (True, None),
        ("2", None),
        (10**400, math.inf),
        (-(10**400), -math.inf),
    ],
)
def test_what_counts_as_a_number(value, number):
    found = _retain._number(value)
    assert math.isnan(found) if number is None else found == number


@pytest.mark.parametrize("odd", [{"$x": 1}, {1: 2}, {"loss32": np.float32(1)}, {"huge": 10**400}])
def test_the_best_is_found_among_metrics_of_any_names_and_kinds(root, odd):
    for step, loss in enumerate((0.1, 0.2, 0.3), start=1):
        with ck.Saver(root) as saver:
            saver.save(step, {"w": np.zeros(3)}, metrics={"loss": np.float32(loss)} | odd)
    assert ck.prune(root, ck.Keep(last=1, best=ck.Best("loss"))) == [2]
    huge = ck.Keep(last=1, best=ck.Best("huge"))
    if "huge" in odd:
        assert ck.prune(root, huge) == [1]
    else:
        with pytest.raises(ck.CheckpointError, match="has the metric 'huge'; nothing was deleted"):
            ck.prune(root, huge)


def test_steps_that_a_caller_names_stay_too(root):
    """A run that went on from step 2 has just committed step 3, and older runs' steps are later."""
    filled(root, 1, 2, 3, 8, 9)
    assert kept(facts(1, 2, 3, 8, 9), ck.Keep(last=2), also=[3, 77]) == [3, 8, 9]
    assert ck.prune(root, ck.Keep(last=2), also=[3, 77]) == [1, 2]
    assert ck.steps(root) == [3, 8, 9]


def test_milestones_may_come_from_a_generator():
    assert ck.Keep(milestones=(step for step in (1, 2))).milestones == (1, 2)  # pyright: ignore[reportArgumentType]


def test_a_milestone_that_was_said_at_the_save_stays():
    found = facts(1, 2, 3) | {2: Facts(milestone=True)}
    assert kept(found, ck.Keep(last=1)) == [2, 3]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: ck.Keep(last=-1), "last is 0 or more, not -1"),
        (lambda: ck.Keep(last=True), "last is an int, not True"),
        (lambda: ck.Keep(every=0), "every is 1 or more, not 0"),
        (lambda: ck.Keep(best="loss"), 'best is a ckpt_jax.Best, such as Best\\("loss"\\)'),
        (lambda: ck.Keep(milestones=5), "milestones is a tuple of steps, such as \\(50_000,\\), not 5"),
        (lambda: ck.Keep(milestones=(1, -2)), "a milestone is 0 or more, not -2"),
        (lambda: ck.Health(finite="no"), "finite is True or False, not 'no'"),
        (lambda: ck.Health(norm_jump="x"), "norm_jump is a number, not 'x'"),
        (lambda: ck.Health(norm_jump=True), "norm_jump is a number, not True"),
        (lambda: ck.Health(norm_jump=0.5), "norm_jump is a factor above 1, not 0.5"),
        (lambda: ck.Health(allow=None), "allow is a tuple of globs, such as .*, not None"),
        (lambda: ck.Health(allow=(1,)), "allow is a tuple of globs, such as .*, not \\(1,\\)"),
        (lambda: ck.Health(allow="opt.*"), "allow is a tuple of globs, such as .*, not 'opt.*'"),
        (lambda: ck.Best("loss", mode="least"), 'mode is "min" or "max"'),
        (lambda: ck.prune("x", 3), "keep is a ckpt_jax.Keep"),
    ],
)
def test_absurd_rules_are_refused(make, error):
    with pytest.raises((TypeError, ValueError), match=error):
        make()


def filled(root: str, *steps: int) -> None:
    for step in steps:
        ck.save(f"{root}/{step}", {"w": np.full(2000, step)})


def test_prune_deletes_the_others_and_nothing_on_a_dry_run(root):
    filled(root, 1, 2, 3, 4)
    assert ck.prune(root, ck.Keep(last=2), dry_run=True) == [1, 2]
    assert ck.steps(root) == [1, 2, 3, 4]
    assert ck.prune(root, ck.Keep(last=2)) == [1, 2]
    assert ck.steps(root) == [3, 4]
    assert ck.prune(root, ck.Keep(last=2)) == []
    assert ck.verify(f"{root}/4").ok


def test_prune_neither_counts_nor_deletes_what_is_damaged(tmp_path):
    filled(str(tmp_path), 1, 2, 3)
    (next((tmp_path / "3").rglob("d/*"))).unlink()
    _commit.mark_bad(_retain._storage.folder(tmp_path / "2"), "a test says so")
    assert ck.prune(tmp_path, ck.Keep(last=1)) == []
    assert ck.steps(tmp_path) == [1, 3]
    assert ck.steps(tmp_path, bad=True) == [2]
    assert ck.latest(tmp_path) == str(tmp_path / "1")


def test_prune_reads_the_newest_before_all_hangs_on_it(tmp_path):
    filled(str(tmp_path), 1, 2)
    data = max((tmp_path / "2").rglob("d/*"), key=lambda path: path.stat().st_size)
    whole = bytearray(data.read_bytes())
    whole[5000] ^= 1
    data.write_bytes(whole)
    with pytest.raises(ck.Corrupt):
        ck.prune(tmp_path, ck.Keep(last=1))
    assert ck.verify(tmp_path / "1").ok


def test_c100_what_was_deleted_by_hand_is_no_error(tmp_path):
    filled(str(tmp_path), 1, 2, 3)
    shutil.rmtree(tmp_path / "1")
    assert ck.prune(tmp_path, ck.Keep(last=1)) == [2]


def test_a_deletion_that_is_killed_leaves_no_half_checkpoint(tmp_path):
    """At any of the removals: what is half gone is not there, and the next prune takes the rest."""
    for kill_at in (0, 1, 3):
        root = tmp_path / str(kill_at)
        filled(str(root), 1, 2, 3)
        script = f"""
import os, signal
import ckpt_jax as ck
unlink, count = os.unlink, 0
def counting(*a, **k):
    global count
    if count == {kill_at}: os.kill(os.getpid(), signal.SIGKILL)
    count += 1
    return unlink(*a, **k)
os.unlink = counting
ck.prune({str(root)!r}, ck.Keep(last=2))
"""
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
        assert ck.steps(root) == [2, 3]
        assert ck.prune(root, ck.Keep(last=2)) == []
        assert sorted(os.listdir(root)) == ["2", "3", "LATEST"]


def test_c098_rollback_makes_an_earlier_step_the_newest_and_destroys_nothing(root):
    filled(root, 1, 2, 3)
    moved = _retain.rollback(root, 1)
    assert ck.steps(root) == [1]
    assert ck.latest(root) == f"{root}/1"
    assert len(moved) == 2
    for name, step in zip(moved, (2, 3), strict=True):
        assert (ck.restore(f"{root}/{name}")["w"] == step).all()
    with pytest.raises(ck.NotFound):
        _retain.rollback(root, 7)


def test_a_rollback_to_a_damaged_step_is_refused_and_moves_nothing(root):
    filled(root, 1, 2, 3, 4)
    place = _retain._storage.folder(root)
    _commit.mark_bad(place / "1", "a test says so")
    with pytest.raises(ck.Corrupt, match=r"(?s)it is marked as damaged.*a test says so.*delete its BAD\.json"):
        _retain.rollback(root, 1)
    data = next(path for path in (place / "2").files() if "/d/" in path)
    (place / "2").unlink(data)
    with pytest.raises(ck.Corrupt, match="no such file"):
        _retain.rollback(root, 2)
    assert ck.steps(root) == [2, 3, 4]
    assert [_retain.rollback(root, 3)[0].partition(".")[0]] == ["4"]


@pytest.mark.parametrize("how", ["rollback", "prune"])
def test_what_a_killed_replacement_hid_counts_again_before_anything_goes(tmp_path, how):
    """Where two folders cannot be exchanged; put back later, it would be the newest in spite of the rollback."""
    filled(str(tmp_path), 1, 2, 3)
    (tmp_path / "3").rename(tmp_path / f"3{_commit.TMP}{_commit._OLD}")
    assert ck.steps(tmp_path) == [1, 2]
    if how == "rollback":
        assert [name.partition(".")[0] for name in _retain.rollback(tmp_path, 1)] == ["2", "3"]
    else:
        assert ck.prune(tmp_path, ck.Keep(last=1)) == [1, 2]
    with ck.Saver(tmp_path) as saver:
        assert saver.resume({"w": np.zeros(2000, int)})[1] == (1 if how == "rollback" else 3)


def test_two_rollbacks_in_one_second_do_not_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(_commit.time, "strftime", lambda *_: "20261130-041500")
    aside = []
    for _ in range(3):
        filled(str(tmp_path), *({1, 2} - set(ck.steps(tmp_path))))
        aside += _retain.rollback(tmp_path, 1)
    assert aside == [f"2.rolled-back-20261130-041500{more}" for more in ("", "-2", "-3")]
    assert all((ck.restore(tmp_path / name)["w"] == 2).all() for name in aside)


def test_a_rollback_that_fails_midway_says_how_far_it_came(tmp_path, monkeypatch):
    filled(str(tmp_path), 1, 2, 3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", _failing_at(tmp_path / "3"))
        with pytest.raises(ck.CheckpointError, match=r"(?s)in part; put aside: 4\.rolled-back.*3: .*Read-only.*rest"):
            _retain.rollback(tmp_path, 1)
    assert ck.steps(tmp_path) == [1, 2, 3]
    assert len(_retain.rollback(tmp_path, 1)) == 2
    assert ck.steps(tmp_path) == [1]


def test_what_cannot_be_deleted_is_told_and_the_others_go(tmp_path, monkeypatch):
    filled(str(tmp_path), 1, 2, 3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", _failing_at(tmp_path / "2"))
        with pytest.raises(ck.CheckpointError, match=r"(?s)pruned in part; deleted: 1, 3.*2: .*Read-only.*the rest"):
            ck.prune(tmp_path, ck.Keep(last=1))
    assert ck.steps(tmp_path) == [2, 4]
    assert ck.prune(tmp_path, ck.Keep(last=1)) == [2]


def test_what_cannot_be_read_is_neither_counted_nor_deleted_and_keeps_nothing_else(tmp_path, monkeypatch):
    filled(str(tmp_path), 1, 2, 3, 4)
    opened = os.open

    def failing(path, *rest, **named):
        if str(path) == str(tmp_path / "2" / "MANIFEST.json"):
            raise OSError(errno.EIO, "Input/output error", path)
        return opened(path, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        with pytest.raises(ck.CheckpointError, match=r"(?s)deleted: 1, 3:.*2: expected to be read.*Input"):
            ck.prune(tmp_path, ck.Keep(last=1))
        with pytest.raises(ck.NotFound):  # The advice that it comes with needs no other step.
            ck.restore(tmp_path / "99")
    assert ck.steps(tmp_path) == [2, 4]


def test_what_is_deleted_and_frees_no_space_is_told(tmp_path, monkeypatch):
    filled(str(tmp_path), 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: (_ for _ in ()).throw(OSError(errno.EBUSY, "busy", path)))
        with pytest.raises(ck.CheckpointError, match=r"(?s)deleted: 1:.*1: .* and its space freed"):
            ck.prune(tmp_path, ck.Keep(last=1))
    assert ck.steps(tmp_path) == [2]
    assert ck.prune(tmp_path, ck.Keep(last=1)) == []
    assert sorted(os.listdir(tmp_path)) == ["2", "LATEST"]


def _failing_at(path):
    rename = os.rename

    def fail(a, b):
        if str(a) == str(path):
            raise OSError(errno.EROFS, "Read-only file system")
        rename(a, b)

    return fail


def test_a_mark_that_a_bucket_does_not_take_is_told(memory, monkeypatch):
    filled(memory, 1, 2)
    monkeypatch.setattr(_commit, "mark_bad", lambda *_: None)
    with pytest.raises(ck.CheckpointError, match=r"2: .*BAD\.json could not be written"):
        _retain.rollback(memory, 1)


def test_python_floats_that_are_not_finite_are_found():
    leaves = {
        name: _leaves.encode(value).leaf
        for name, value in {"nan": math.nan, "i": complex(0, math.inf), "lr": 0.1, "n": 10**400, "s": "nan"}.items()
    }
    assert _health.of_scalars(leaves) == {"nan": (0.0, 1), "i": (0.0, 1)}
