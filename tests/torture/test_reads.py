"""An error at every operation by which a checkpoint is read: nothing is taken for damaged, and no value is wrong.

Promise R-15.
"""

import errno
import functools
import json
import tempfile
from pathlib import Path

import pytest

import ckpt_jax as ck
from tests.conftest import Count
from tests.torture import history
from tests.torture.syscalls import Answer, Operation, Watched, needs_linux, watch

pytestmark = needs_linux

READS = {"open", "read", "list", "stat"}
PARTS = 3  # For several to be tried at once.
NEVER = 10**9
STEPS = (1, 2, 3)

# What reads, and tells by `say` what came of it: a step and whether its values are those of that step.
ACTS = {
    "resume": "saver = ck.Saver(root); state, step = saver.resume(history.tree(0)); say(step, state); saver.close()",
    "restore": "say(3, ck.restore(f'{root}/3', history.tree(0)))",
    "open": "opened = ck.open(f'{root}/3'); say(3, {n: opened[n][...] for n in opened})",
    "verify": "report = ck.verify(f'{root}/3'); print(json.dumps({'ok': report.ok, 'text': str(report)}), flush=True)",
    "latest": "say(int(ck.latest(root).rpartition('/')[2]), None)",
}
SCRIPT = """
import json, sys, warnings
import ckpt_jax as ck
from tests.torture import history
root, = sys.argv[1:]
def say(step, state):
    wrong = state is not None and history.differs(state, step)
    print(json.dumps({"step": step, "wrong": wrong}), flush=True)
try:
    ACT
except (ck.CheckpointError, OSError) as error:
    print(json.dumps({"failed": type(error).__name__, "text": str(error)}), flush=True)
"""


def _root(place: Path) -> Path:
    root = place / "run"
    for step in STEPS:
        ck.save(root / str(step), history.tree(step))
    return root


def _run(root: Path, act: str, at: int, *, on: bool) -> tuple[Watched, dict[str, object]]:
    """An act, with EIO at the read of this number, and at all after it; and what it said."""
    number = -1

    def decide(operation: Operation) -> Answer:
        nonlocal number
        if operation.kind not in READS:
            return None
        number += 1
        return errno.EIO if number == at or (on and number > at) else None

    watched = watch(SCRIPT.replace("ACT", ACTS[act]), root.parent, decide, str(root), reads=True)
    out, _ = watched.child.communicate()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert watched.code == 0, out
    assert len(lines) == 1, out
    return watched, json.loads(lines[0])


@functools.cache
def _reads(act: str) -> int:
    """How many operations it reads by, which may be a few more or less each time."""
    with tempfile.TemporaryDirectory() as place:
        watched, _ = _run(_root(Path(place)), act, NEVER, on=False)
    return sum(operation.kind in READS for operation in watched.operations)


@pytest.mark.parametrize("act", ACTS)
def test_what_reads_is_watched(act: str, tmp_path: Path) -> None:
    """As is what TensorStore reads, if it does; and with nothing in the way all is read."""
    watched, told = _run(_root(tmp_path), act, NEVER, on=False)
    kinds = {operation.kind for operation in watched.operations} & READS
    assert kinds >= {"open", "read", "stat"}
    assert told in ({"step": 3, "wrong": False}, {"ok": True, "text": told.get("text")})


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("fault", ["EIO in a read", "EIO in a read, from then on"])
@pytest.mark.parametrize("act", ACTS)
def test_an_error_in_reading_is_no_damage(
    act: str, fault: str, part: int, *, tmp_path: Path, full: bool, count: Count
) -> None:
    root = _root(tmp_path)
    for at in range(part, _reads(act), PARTS if full else 8 * PARTS):
        watched, told = _run(root, act, at, on="then" in fault)
        if not watched.struck:
            continue  # Threads read in another order, and this time in fewer operations.
        where = f"{fault} at {at}, {watched.struck[0]}: {told}"
        if "failed" in told:
            assert told["failed"] != "Corrupt", where
            outcome = "an error that says so"
        elif "ok" in told:
            assert told["ok"] or "Input/output error" in str(told["text"]), where
            outcome = "as if nothing had happened" if told["ok"] else "told as what cannot be read"
        else:
            assert told["wrong"] is False, where
            assert told["step"] in (STEPS if act == "resume" else (3,)), where
            outcome = "as if nothing had happened" if told["step"] == 3 else "an older step, whole"
        count(fault, outcome, 1)
        assert ck.steps(root, bad=True) == [], where
        assert ck.steps(root) == list(STEPS), where
    with ck.Saver(root) as saver:
        state, step = saver.resume(history.tree(0))
    assert (step, history.differs(state, 3)) == (3, False)
