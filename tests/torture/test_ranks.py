"""Ranks that die, hang, fail, or have a slow disk, in each phase of a save: what the others say, and what stays.

Promise R-10.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import ckpt_jax as ck
from tests.conftest import Count
from tests.forked import Child
from tests.test_run_processes import SAVE, Run, fine
from tests.torture.syscalls import Answer, Hold, Operation, needs_linux, watch

SCRIPT = """
from ckpt_jax import _save, _manifest
victim, phase, how = {victim}, {phase!r}, {how!r}
def at(name):
    if index == victim and phase == name and armed[0]:
        armed[0] = False
        print("now", flush=True)
        if how == "raise": raise OSError(5, "Input/output error")
        if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop": os.kill(os.getpid(), signal.SIGSTOP)
armed = [False]
def before(owner, attribute, name):
    real = getattr(owner, attribute)
    def call(*a, **k):
        at(name)
        return real(*a, **k)
    setattr(owner, attribute, call)
before(_save, "prepare", "snapshot")
before(_commit, "begin" if index == 0 else "join", "open")
before(_writing, "write", "write")
before(_writing, "merge", "merge")
before(_save, "_finish", "manifest")
before(_commit, "_put_in_place", "rename")
publish = _save._processes.Group.publish
def publishing(self, key, message):
    if key.startswith("part"): at("part")
    if key == "outcome": at("publish")
    return publish(self, key, message)
_save._processes.Group.publish = publishing
saver = ck.Saver(root, every=ck.Every(steps=1), timeout={timeout}, on_event=print_event)
saver.step(1, state_at(1))
saver.wait()
barrier("armed")
armed[0] = True
try: saver.step(2, state_at(2))
except OSError as error: print("raised:", error, flush=True)  # Where else than in the writer's thread.
saver._idle.wait(60)
print("survived:", saver.last_error, flush=True)
leave(*[victim] if how in ("kill", "stop") else [])
"""
FIRST = ["snapshot", "open", "write", "merge", "manifest", "rename", "publish"]
OTHER = ["snapshot", "open", "write", "part"]
HOWS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP for longer than the timeout",
    "raise": "an exception",
    "slow": "a disk that takes 0.1 s for each operation",
}


class Case(NamedTuple):
    """Of so many processes, one meets with it in a phase."""

    processes: int
    victim: int
    phase: str
    how: str

    def __str__(self) -> str:
        return f"{self.victim} of {self.processes}, {self.phase}, {self.how}"


def _cases(processes: int) -> list[Case]:
    victims = [(victim, phase) for victim in range(processes) for phase in (OTHER if victim else FIRST)]
    return [Case(processes, victim, phase, how) for victim, phase in victims for how in HOWS]


def _slow_from_now_on() -> Callable[[Operation], Answer]:
    now = False

    def decide(operation: Operation) -> Answer:
        nonlocal now
        now = now or (operation.kind == "say" and b"now" in operation.data)
        return Hold(lambda: time.sleep(0.1)) if now and operation.kind != "say" else None

    return decide


@needs_linux
@pytest.mark.parametrize(
    "case", [*_cases(4), *(pytest.param(case, marks=pytest.mark.full) for case in _cases(2))], ids=str
)
def test_c103_a_rank_that_dies_hangs_or_fails_costs_its_save_only(case: Case, tmp_path: Path, count: Count) -> None:
    """The others say which and in which phase, within the timeout; nothing half is there; the next run goes on."""

    def start(index: int, script: str, *arguments: str) -> Child:
        if case.how == "slow" and index == case.victim:
            return watch(script, tmp_path, _slow_from_now_on(), *arguments).child
        return Child(script, *arguments)

    victim, how = case.victim, case.how
    script = SCRIPT.format(victim=victim, phase=case.phase, how=how, timeout=60 if how == "slow" else 5)
    run = Run(script, tmp_path, case.processes, start=start)
    run.until(victim, "now")
    others = [child for index, child in enumerate(run.children) if index != victim]
    told = [child.communicate(timeout=60)[0] for child in others]
    if how == "stop":
        run.children[victim].send_signal(signal.SIGCONT)
    run.children[victim].communicate(timeout=60)
    steps = ck.steps(tmp_path)
    if case.phase == "publish" or how == "slow":
        assert steps == [1, 2], "published: it was committed before the others heard of it"
    else:
        # One that was stopped may go on, and finish what it was at.
        assert steps in ([[1], [1, 2]] if how == "stop" else [[1]])
    for child, out in zip(others, told, strict=True):
        if how == "slow":
            assert "survived: None" in out
        elif how == "raise":
            assert case.phase == "publish" or "Input/output error" in out
        elif victim == 0 and how == "kill":
            assert child.returncode != 0, "JAX ends what has lost its coordinator"
        else:
            assert f"process {victim} did not get through the phase" in out
    for step in steps:
        assert ck.verify(tmp_path / str(step)).ok
    told = fine(SAVE, tmp_path, 2)
    assert f"resumed {steps[-1]}\n" in told[0]
    assert ck.steps(tmp_path) == ([1, 2, 4] if steps == [1] else [1, 2, 4, 6])
    assert not [name for name in os.listdir(tmp_path) if "tmp" in name]
    told_by = "JAX ended the others" if victim == 0 and how == "kill" else "told by all others"
    came = "committed" if steps == [1, 2] else f"not committed; {told_by}"
    count(f"a rank in a phase of a save: {HOWS[how]}", f"{came}; resumed")
