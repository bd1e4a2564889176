"""A crash or an error at every operation of a history: what was reported is whole, nothing else is half there.

Promises R-1 to R-5 and R-13.
"""

import errno
import itertools
import random
import shutil
import time
from pathlib import Path

import pytest

from ckpt_jax import _commit
from tests.conftest import Count
from tests.torture import history
from tests.torture.syscalls import KILL, TORN, Answer, Hold, Operation, Watched, needs_linux, watch

pytestmark = needs_linux

# What a full disk refuses: not to delete, and not to rename.
GROWS = {"write", "fsync", "create", "mkdir"}
# What happens at an operation, and whether it goes on so.
FAULTS: dict[str, tuple[Answer, bool]] = {
    "killed": (KILL, False),
    "killed in a write": (TORN, False),
    "EIO": (errno.EIO, False),
    "EIO from then on": (errno.EIO, True),
    "ENOSPC": (errno.ENOSPC, False),
    "ENOSPC from then on": (errno.ENOSPC, True),
}
PARTS = 8  # For several to be tried at once.
NEVER = 10**9


def _fits(fault: str, kind: str) -> bool:
    if fault == "killed in a write":
        return kind == "write"
    return not fault.startswith("ENOSPC") or kind in GROWS


def _run(root: Path, fault: str, at: int) -> tuple[Watched, str]:
    """The history, with a fault at the operation of this number, or the next one that it fits; and what it printed."""
    answer, on = FAULTS[fault]
    number, left = -1, 10**9 if on else 1

    def decide(operation: Operation) -> Answer:
        nonlocal number, left
        number += operation.kind != "say"
        if operation.kind == "say" or number < at or not left or not _fits(fault, operation.kind):
            return None
        left -= 1
        return answer

    watched = watch(history.SCRIPT, root, decide, str(root / "run"))
    out, _ = watched.child.communicate()
    return watched, out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Operation]:
    """All operations of a history that nothing befalls."""
    root = tmp_path_factory.mktemp("whole")
    watched, out = _run(root, "killed", NEVER)
    assert watched.code == 0, out
    assert '"failed"' not in out, out
    promise = history.promised(out)
    assert promise.versions == {1: {None}, 2: {0, None}, 3: {1}, 4: {2}, 5: {None}}
    assert history.kept(root / "run", promise) == []
    return watched.operations


def test_the_history_does_what_a_crash_is_to_be_tried_in(whole: list[Operation]) -> None:
    """From several threads, also such as Python knows nothing of: TensorStore's."""
    kinds = {operation.kind for operation in whole}
    assert kinds == {"say", "write", "fsync", "create", "rename", "exchange", "unlink", "rmdir", "mkdir"}
    assert len({operation.thread for operation in whole}) > 8
    assert any(operation.path.endswith(".__lock") for operation in whole)
    saves = [operation for operation in whole if operation.kind == "fsync" and operation.path.startswith("run/2.")]
    assert len({operation.thread for operation in saves}) > 2


@pytest.fixture(scope="module")
def points(whole: list[Operation], full: bool) -> dict[str, list[int]]:
    """For each fault, the numbers of the operations at which it is tried: all, or some of each kind in each act."""
    told = itertools.accumulate(operation.kind == "say" and b'"begin"' in operation.data for operation in whole)
    acts = [(act, operation.kind) for act, operation in zip(told, whole, strict=True) if operation.kind != "say"]
    found = {}
    for fault in FAULTS:
        places: dict[tuple[int, str], list[int]] = {}
        for number, (act, kind) in enumerate(acts):
            if _fits(fault, kind):
                places.setdefault((act, kind), []).append(number)
        rng = random.Random(fault)
        some = [rng.choice(numbers) for numbers in rng.sample([*places.values()], min(20, len(places)))]
        found[fault] = [*sorted(itertools.chain(*places.values())), len(acts)] if full else sorted(some)
    return found


def _in_an_attempt(operation: Operation) -> bool:
    """Whether it is to bring something to the disk of a checkpoint that is not committed yet."""
    return operation.kind in GROWS and _commit.TMP in operation.path


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_an_operation(
    fault: str, part: int, points: dict[str, list[int]], count: Count, tmp_path: Path
) -> None:
    for at in points[fault][part::PARTS]:
        watched, out = _run(tmp_path, fault, at)
        assert watched.code == (-9 if fault.startswith("killed") and watched.struck else 0), out
        broken = history.kept(tmp_path / "run", history.promised(out))
        assert broken == [], f"{fault} at operation {at}, {watched.struck}:\n{out}"
        if fault in ("EIO", "ENOSPC") and any(_in_an_attempt(operation) for operation in watched.struck):
            assert '"failed"' in out, f"{fault} at {watched.struck} was passed over"
        told = "an act failed, and said so" if '"failed"' in out else "no act failed"
        count(f"{fault}, at an operation", "kept" if fault.startswith("killed") else f"kept; {told}")
        shutil.rmtree(tmp_path / "run", ignore_errors=True)


def test_after_an_error_nothing_of_the_save_still_writes(tmp_path: Path) -> None:
    """One thread's write fails, the others' take their time: they are waited for, or their files would be left."""
    at_work: set[int] = set()
    fails = True

    def decide(operation: Operation) -> Answer:
        nonlocal fails
        if not operation.path.startswith(f"run/1{_commit.TMP}") or "/ocdbt.process_0/d/" not in operation.path:
            return None
        at_work.add(operation.thread)
        if fails and len(at_work) > 1 and operation.kind == "write":
            fails = False
            return errno.EIO
        return Hold(lambda: time.sleep(0.3))

    watched = watch(history.SCRIPT, tmp_path, decide, str(tmp_path / "run"))
    out, _ = watched.child.communicate()
    assert watched.code == 0, out
    told = next(i for i, operation in enumerate(watched.operations) if b'"failed": "save 1"' in operation.data)
    assert not [o for o in watched.operations[told:] if o.path.startswith(f"run/1{_commit.TMP}")]
