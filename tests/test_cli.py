"""The command line: plain sentences, the same facts as JSON, exit codes, and no device."""

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_jax as ck
from ckpt_jax import _commit, _storage, cli

NO_DEVICE = os.environ | {"JAX_PLATFORMS": "nowhere"}  # A command that opened a device would fail.


def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt_jax.cli", *map(str, arguments)]
    done = subprocess.run(command, env=NO_DEVICE, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def as_json(*arguments: object, code: int = 0):
    return json.loads(run(*arguments, "--json", code=code).stdout)


def damage(folder) -> None:
    data = max((folder / "state/ocdbt.process_0/d").iterdir(), key=lambda p: p.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[10] ^= 1
    data.write_bytes(raw)


@pytest.fixture
def runs(tmp_path):
    """A root with two steps that differ in one leaf."""
    root = tmp_path / "my run ✓"
    ck.save(root / "100", {"w": np.arange(1000.0), "n": 1, "name": "a"}, metadata={"lr": 0.1})
    ck.save(root / "200", {"w": np.arange(1000.0) + (np.arange(1000) == 3), "n": 1, "name": "a"})
    return root


def test_ls(runs):
    (runs / "notes.txt").write_text("mine")
    (runs / "300").mkdir()
    lines = run("ls", runs).stdout.splitlines()
    assert lines[0].split() == ["step", "saved", "leaves", "size", "state"]
    assert [line.split()[0] for line in lines[1:]] == ["100", "200", "300"]
    assert lines[1].endswith("3       8 kB  ok")
    assert lines[3].endswith("not a checkpoint: no MANIFEST.json")
    found = as_json("ls", runs)["checkpoints"]
    assert [row["state"] for row in found] == ["ok", "ok", "not a checkpoint: no MANIFEST.json"]


def test_ls_says_what_is_damaged(runs):
    (runs / "100/commit_success.txt").unlink()
    (runs / "200/MANIFEST.json").write_text("{}")
    first, second = as_json("ls", runs, code=1)["checkpoints"]
    assert first["state"] == "damaged: commit_success.txt: expected 21 bytes, found no such file"
    assert second["state"].startswith("damaged: MANIFEST.json")


def test_show(runs):
    lines = run("show", runs / "100").stdout.splitlines()
    assert lines[0].startswith(f"{runs}/100: step 100, saved 20")
    assert lines[1].startswith("3 leaves, 8 kB in ")
    assert lines[2] == 'metadata: {"lr": 0.1}'
    assert lines[-1].split() == ["w", "float64[1000]", "8", "kB", "1", "on", "the", "host"]
    one = as_json("show", runs / "100", "w")
    assert (one["shape"], one["dtype"], one["bytes"], one["chunks"]) == ([1000], "float64", 8000, 1)
    assert list(as_json("show", runs / "100", "n*")["leaves"]) == ["n", "name"]
    assert run("show", runs / "100", "no.such", code=2).stderr.startswith(f"ckpt-jax: {runs}/100 has no leaf 'no.such'")


def test_verify(runs):
    assert "1 chunks read back, all as they were saved (8 kB" in run("verify", runs / "100").stdout
    assert "all files there" in run("verify", runs / "100", "--level", "files").stdout
    damage(runs / "100")
    out = run("verify", runs / "100", code=1).stdout
    assert out.startswith(f"{runs}/100: damaged in 1 place:\n  w: expected chunk [0] in state/ocdbt.process_0/d/")
    report = as_json("verify", runs / "100", code=1)
    assert (report["ok"], report["faults"][0]["place"]) == (False, "w")
    assert run("verify", runs / "100", "--level", "files").returncode == 0


def test_diff(runs):
    out = run("diff", runs / "100", runs / "200", code=1).stdout.splitlines()
    assert out[0] == f"{runs}/100 (a) and {runs}/200 (b) differ in 1 place; 2 leaves are the same:"
    assert out[1] == "  w: values differ: 1 of 1,000 elements, by at most 1"
    assert "hold the same: 3 leaves, by their digests" in run("diff", runs / "100", runs / "100").stdout
    found = as_json("diff", runs / "100", runs / "200", code=1)
    assert (found["equal"], found["same"], found["changes"][0]["name"]) == (False, 2, "w")


def test_diff_of_a_damaged_checkpoint_says_so(runs):
    """What is not there cannot be the same."""
    for file in (runs / "100/state/ocdbt.process_0/d").iterdir():
        file.unlink()
    assert "is damaged in" in run("diff", runs / "100", runs / "100", code=1).stderr


def test_ls_finds_nothing_in_json_too(tmp_path):
    assert "there is nothing at" in run("ls", tmp_path / "nothing", "--json", code=2).stderr


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_nothing_there(command, tmp_path):
    error = run(command, tmp_path / "nothing", code=2).stderr
    assert error.startswith(f"ckpt-jax: there is nothing at {tmp_path}/nothing")


def test_a_root_in_place_of_a_checkpoint(runs):
    error = run("show", runs, code=2).stderr
    assert error.startswith(f"ckpt-jax: {runs} is a root of 2 checkpoints, not one")
    assert f'its newest is "{runs}/200"' in error


def test_wrong_usage():
    assert "Missing argument" in run("verify", code=2).stderr
    assert "Invalid value" in run("verify", "x", "--level", "all", code=2).stderr
    assert "No such command" in run("frobnicate", code=2).stderr


@pytest.mark.parametrize("command", ["ls", "show", "verify", "diff", "demo"])
def test_help_ends_with_the_exit_codes(command):
    assert run(command, "--help").stdout.split("Exit codes:")[1].split()[:2] == ["0", "fine,"]


def test_looking_at_a_folder_that_is_written_to(tmp_path):
    """Another process saves all the time, until it is killed; every look answers, and what it names is whole."""
    root = tmp_path / "run"
    code = (
        "import itertools, sys, numpy as np, ckpt_jax as ck\n"
        "for step in itertools.count(1): ck.save(f'{sys.argv[1]}/{step}', {'w': np.full((1000, 1000), step)})\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(root)]) as writer:
        try:
            deadline = time.monotonic() + 60
            while len(ck.steps(root)) < 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            for _ in range(3):
                rows = as_json("ls", root)["checkpoints"]
                assert {row["state"] for row in rows} <= {"ok", "being written"}
                newest = ck.latest(root)
                assert newest is not None
                run("show", newest)
                run("verify", newest)
        finally:
            writer.send_signal(signal.SIGKILL)
    assert all(ck.verify(root / str(step)).ok for step in ck.steps(root))


def test_an_attempt_is_told_from_a_leftover(tmp_path):
    target = _storage.folder(tmp_path / "run/5")
    attempt = _commit.begin(target, overwrite=False)
    assert as_json("ls", tmp_path / "run")["checkpoints"][0]["state"] == "being written"
    attempt.close()
    state = as_json("ls", tmp_path / "run")["checkpoints"][0]["state"]
    assert state == "not finished; the next save of that step removes it"


def test_an_attempt_that_has_just_begun_is_no_leftover(tmp_path):
    """Between the making of its folder and its lock; for a while, as it may have been killed there."""
    folder = tmp_path / "run" / "5.orbax-checkpoint-tmp-00"
    folder.mkdir(parents=True)
    assert as_json("ls", tmp_path / "run")["checkpoints"][0]["state"] == "being written"
    os.utime(folder, (0, 0))
    assert as_json("ls", tmp_path / "run")["checkpoints"][0]["state"].startswith("not finished")


def test_an_attempt_that_is_committed_while_it_is_looked_at_is_no_leftover(tmp_path, monkeypatch):
    target = _storage.folder(tmp_path / "run/5")
    attempt = _commit.begin(target, overwrite=False)
    flock = fcntl.flock

    def commits_before(fd, how):
        if attempt.lock is not None:
            os.rename(attempt.folder.url, target.url)
            attempt.close()
        return flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", commits_before)
    assert attempt.folder.in_use()
    assert cli._row(attempt.folder) is None


def test_a_terminal_sees_progress(runs):
    """On a terminal a bar goes to stderr; stdout holds the answer alone."""
    import pty

    master, slave = pty.openpty()
    command = [sys.executable, "-m", "ckpt_jax.cli", "verify", str(runs / "100")]
    with subprocess.Popen(command, env=NO_DEVICE | {"TERM": "xterm"}, stdout=subprocess.PIPE, stderr=slave) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                piece = os.read(master, 4096)
            except OSError:  # The other side is closed.
                break
            if not piece:
                break
            shown += piece
        out = process.stdout.read() if process.stdout else b""
    os.close(master)
    assert b"verifying" in shown
    assert b"verifying" not in out
    assert b"all as they were saved" in out


def test_prune_keeps_by_its_options_and_says_what_it_did(tmp_path):
    for step in (1, 2, 3, 4):
        ck.save(tmp_path / str(step), {"w": np.ones(3)})
    out = run("prune", tmp_path, "--last", 1, "--every", 2, "--dry-run").stdout
    assert out == "would delete: 1, 3\nkept: 2, 4\n"
    assert ck.steps(tmp_path) == [1, 2, 3, 4]
    assert as_json("prune", tmp_path, "--last", 1, "--every", 2)["deleted"] == [1, 3]
    assert ck.steps(tmp_path) == [2, 4]
    assert "there are no checkpoints" in run("prune", tmp_path / "nowhere", code=2).stderr


def test_rollback_says_where_the_later_ones_are(tmp_path):
    for step in (1, 2):
        ck.save(tmp_path / str(step), {"w": np.ones(3)})
    out = run("rollback", tmp_path, 1).stdout
    assert out.startswith("step 1 is the newest now; put aside: 2.rolled-back-")
    assert ck.steps(tmp_path) == [1]
    run("rollback", tmp_path, 7, code=2)


def test_a_rollback_to_a_damaged_step_is_refused(tmp_path):
    for step in (1, 2):
        ck.save(tmp_path / str(step), {"w": np.ones(3)})
    next((tmp_path / "1").rglob("d/*")).unlink()
    assert "no such file" in run("rollback", tmp_path, 1, code=1).stderr
    assert ck.steps(tmp_path) == [1, 2]


def test_prove_without_a_step_to_kill_after_is_wrong_usage():
    assert "steps is 2 or more" in run("prove", "tests.programs:good", "--steps", 0, code=2).stderr


@pytest.mark.parametrize(
    ("program", "code", "told"), [("good", 0, "are the same to the bit"), ("no_key", 1, ": key: ")]
)
def test_prove_prints_the_proof_and_exits_by_it(program, code, told):
    command = [sys.executable, "-m", "ckpt_jax.cli", "prove", f"tests.programs:{program}", "--steps", "5", "--at", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert told in done.stdout


def _reseal(step: Path, **members: object) -> None:
    """Writes other members into a manifest, as a stranger might."""
    path = step / "MANIFEST.json"
    told = json.loads(path.read_text()) | members
    told.pop("seal")
    body = json.dumps(told, separators=(",", ":")).removesuffix("}")
    path.write_text(f'{body},"seal":"{hashlib.sha256(body.encode()).hexdigest()}"}}\n')


def test_a_strangers_clock_and_shardings_do_not_stop_looking(tmp_path):
    ck.save(tmp_path / "1", {"x": jnp.ones(3)})
    _reseal(tmp_path / "1", time=1e300, shardings=[{"kind": "named"}])
    assert " –  " in run("ls", tmp_path).stdout
    assert "?" in run("show", tmp_path / "1").stdout


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1, 1.0), (np.float32(0), np.float32(-0.0))], ids=str)
def test_diff_tells_values_apart_that_only_compare_equal(tmp_path, a, b):
    ck.save(tmp_path / "1", {"x": a})
    ck.save(tmp_path / "2", {"x": b})
    run("diff", tmp_path / "1", tmp_path / "2", code=1)
    run("diff", tmp_path / "1", tmp_path / "1")
