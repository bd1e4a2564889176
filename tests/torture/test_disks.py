"""Disks that fill up or stall in each phase of a run's save: training goes on, and a later save succeeds.

Promises R-11 and R-12.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt_jax as ck
from ckpt_jax import _commit
from tests.conftest import Count
from tests.torture.syscalls import Answer, Decide, Hold, Operation, needs_linux, watch

pytestmark = needs_linux

# A run that saves at each step. Of the first save it waits for the end, of the others as it is told.
RUN = """
import json, os, sys
import jax, jax.numpy as jnp
import ckpt_jax as ck

root, last, waits = sys.argv[1], int(sys.argv[2]), "waits" in sys.argv
def say(**facts):
    os.write(1, json.dumps(facts).encode() + b"\\n")  # At once: two threads tell.
train = jax.jit(lambda state: {"w": state["w"] * 0.999 + 1}, donate_argnums=0)
state = {"w": jnp.zeros((128, 256))}
saver = ck.Saver(root, every=ck.Every(steps=1), max_failures=100,
                 on_event=lambda event: say(event=event.kind, step=event.step, why=event.message))
for step in range(1, last + 1):
    state = train(state)
    saver.step(step, state)
    if step == 1 or waits: saver._idle.wait()
    say(trained=step)
saver._idle.wait()
say(skipped=saver.skipped)
saver.save(last + 1, train(state))
saver.close()
say(over=True)
"""
STEP_2 = f"run/2{_commit.TMP}"
# The first operation of each phase of the second save: what it does, and what is in its path, or in that it is to have.
PHASES = {
    "open": ("mkdir", STEP_2),
    "write": ("create", "/ocdbt.process_0/d/"),
    "merge": ("create", "/manifest.ocdbt_"),
    "describe": ("create", "/_METADATA"),
    "manifest": ("create", "/MANIFEST.json"),
    "rename": ("rename", "run/2"),
    "point": ("create", "run/LATEST.tmp"),
}
COMMITTED = ("rename", "point")  # When these are reached all that takes space has been written.


def _is_reached(phase: str) -> Callable[[Operation], bool]:
    """Says of each operation whether it is the one with which the second save comes to a phase."""
    kind, within = PHASES[phase]
    left = 0

    def reached(operation: Operation) -> bool:
        nonlocal left
        if _said(operation).get("trained") == 1:
            left = 1
        path = operation.to or operation.path
        here = operation.kind == kind and (path == within if kind == "rename" else within in path)
        left -= (found := here and left > 0)
        return found

    return reached


def _said(operation: Operation) -> dict[str, Any]:
    return json.loads(operation.data) if operation.data.startswith(b'{"') and operation.kind == "say" else {}


def _run(root: Path, decide: Decide, last: int, *waits: str) -> list[dict[str, Any]]:
    """What a run of so many steps says."""
    watched = watch(RUN, root, decide, str(root / "run"), str(last), *waits)
    out, _ = watched.child.communicate()
    assert watched.code == 0, out
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def _events(said: list[dict[str, Any]], kind: str) -> list[int]:
    return [line["step"] for line in said if line.get("event") == kind]


# --- full -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    at = tmp_path / "disk"
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", at], check=True)
    yield at
    subprocess.run(["umount", "-l", at], check=True)


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(b"\1" * 4096):
            pass


def _files(step: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in step.rglob("*") if path.is_file()}


@pytest.mark.skipif(sys.platform == "linux" and os.geteuid() != 0, reason="only root may mount a small disk")
@pytest.mark.parametrize("phase", PHASES)
def test_a_disk_that_fills_up_costs_the_saves_for_which_there_is_no_room(
    phase: str, small_disk: Path, count: Count
) -> None:
    """From a phase of one save to the end of two more; then someone makes room."""
    reached, first = _is_reached(phase), dict[str, bytes]()

    def decide(operation: Operation) -> Answer:
        if reached(operation):
            first.update(_files(small_disk / "run" / "1"))
            _fill(small_disk / "ballast")
        if _said(operation).get("trained") == 4:
            (small_disk / "ballast").unlink()
        return None

    said = _run(small_disk, decide, 4, "waits")
    assert [line["trained"] for line in said if "trained" in line] == [1, 2, 3, 4]
    committed = [1, 2, 5] if phase in COMMITTED else [1, 5]
    assert _events(said, "committed") == ck.steps(small_disk / "run") == committed
    assert _events(said, "failed") == sorted({1, 2, 3, 4, 5} - set(committed))
    assert all("No space left" in line["why"] for line in said if line.get("event") == "failed")
    assert said[-1] == {"over": True}
    assert _files(small_disk / "run" / "1") == first
    assert all(ck.verify(small_disk / "run" / str(step)).ok for step in committed)
    assert sorted(os.listdir(small_disk / "run")) == [*map(str, committed), "LATEST", "events.jsonl"]
    count("disk full from a phase of a save on, until there is room", "saves fail until then, and leave no litter")


# --- stalled ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_a_disk_that_stalls_holds_up_no_step(phase: str, tmp_path: Path, count: Count) -> None:
    """The disk does nothing more until 50 steps are trained: if one of them waited for it, all would stand still."""
    reached, trained, stalled = _is_reached(phase), threading.Event(), threading.Event()
    missed: list[Operation] = []

    def decide(operation: Operation) -> Answer:
        if _said(operation).get("trained") == 50:
            trained.set()
        if reached(operation):
            stalled.set()
        held = stalled.is_set() and operation.kind != "say"
        return Hold(lambda: trained.wait(60) or missed.append(operation)) if held else None

    said = _run(tmp_path, decide, 50)
    assert stalled.is_set()
    assert not missed
    skipped = next(line["skipped"] for line in said if "skipped" in line)
    assert skipped == len(_events(said, "skipped")) > 40
    assert ck.steps(tmp_path / "run") == _events(said, "committed")
    assert 51 in _events(said, "committed")
    assert not _events(said, "failed")
    assert all(ck.verify(tmp_path / "run" / str(step)).ok for step in ck.steps(tmp_path / "run"))
    count(
        "disk stalled from a phase of a save on, for 48 steps", "no step waits; the saves that are skipped are counted"
    )
