"""Power that fails at any moment of a history: what was reported is found, whatever of the rest reached the disk.

Promise R-6.
"""

import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ckpt_jax import _commit
from tests.conftest import Count
from tests.torture import history
from tests.torture.disk import Disk, Image, put, replay
from tests.torture.history import Promise
from tests.torture.syscalls import Answer, Hold, Operation, needs_linux, watch

pytestmark = needs_linux


def _record(root: Path, script: str = history.SCRIPT) -> list[Operation]:
    """A history's operations. What the threads make durable takes its time, so that who does not wait for it shows."""
    main: set[int] = set()

    def decide(operation: Operation) -> Answer:
        if operation.kind != "fsync":
            return None
        main.add(operation.thread) if not main else None
        return Hold(lambda: time.sleep(0.02)) if operation.thread not in main else None

    watched = watch(script, root, decide, str(root / "run"))
    out, _ = watched.child.communicate()
    assert watched.code == 0, out
    return watched.operations


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Operation]:
    return _record(tmp_path_factory.mktemp("whole"))


def _frozen(found: "Image | bytes", name: str = "") -> object:
    """What makes one image another to a reader: what lies in attempts is nothing to him."""
    if isinstance(found, bytes):
        return hash(found)
    if _commit.TMP in name:
        return "an attempt"
    return frozenset((below, _frozen(more, below)) for below, more in found.items())


class Judge:
    """Says of an image what is not as promised; each kind is put on a real disk and read once."""

    def __init__(self, scratch: Path):
        self.scratch, self.known = scratch, dict[object, list[str]]()

    def faults(self, image: Image, promise: Promise) -> list[str]:
        run = image.get("run", {})
        key = _frozen(run), repr(promise)
        if key not in self.known:
            put(image, self.scratch / "disk")
            self.known[key] = history.seen(self.scratch / "disk" / "run", promise)
            shutil.rmtree(self.scratch / "disk")
        return self.known[key]


def _crashes(operations: Sequence[Operation], *, pairs: bool = False) -> Iterator[tuple[int, Image, Promise]]:
    """A crash after each of the operations, in every way that it may end."""
    disk, out = Disk(), ""
    for number, operation in enumerate(operations):
        if operation.kind == "say":
            out += operation.data.decode()
        else:
            disk.apply(operation)
        promise = history.promised(out)
        for image in disk.images(pairs=pairs):
            yield number, image, promise


def test_the_disk_that_is_replayed_is_the_one_that_there_was(whole: list[Operation], tmp_path: Path) -> None:
    """All that was written, in its place: else the rest of this would prove nothing."""
    operations = _record(tmp_path)
    put(replay(operations).image(lambda _: True), tmp_path / "replayed")
    files = {path.relative_to(tmp_path / "run"): path for path in (tmp_path / "run").rglob("*") if path.is_file()}
    again = tmp_path / "replayed" / "run"
    assert {path.relative_to(again) for path in again.rglob("*") if path.is_file()} == files.keys()
    assert all((again / name).read_bytes() == path.read_bytes() for name, path in files.items())


def test_a_crash_loses_nothing_that_was_reported(
    whole: list[Operation], full: bool, count: Count, tmp_path: Path
) -> None:
    judge = Judge(tmp_path)
    tried = 0
    for number, image, promise in _crashes(whole, pairs=full):
        assert judge.faults(image, promise) == [], f"after operation {number}, {whole[number]._replace(data=b'')}"
        tried += 1
    count("power fails: disks after a crash at each operation", "kept", tried)
    count("power fails: of these, disks that a reader can tell apart", "kept", len(judge.known))


# --- would it be found? -----------------------------------------------------------------------------------------------

# What is synced and need not be, and why; the attempts' and files' random names are left out.
NOT_NEEDED = {
    "run/N*/orbax.checkpoint": "it is empty",
    "run/N*/state/ocdbt.process_0/manifest.ocdbt": "deleted before the commit: only the merge reads it",
    "run/N*/state/ocdbt.process_0/d/*": "of two, that which holds the tree of keys: deleted, as the one above",
    "run/N*/state/manifest.ocdbt_*.__lock": "of two, the first: TensorStore replaces it with the second",
    "run/LATEST.tmp": "a hint, which nobody trusts",
}


def _first_fault(operations: Sequence[Operation], judge: Judge, start: int, end: int) -> str | None:
    """What is found of crashes in a part of a history; None if all is kept."""
    crashes = _crashes(operations[:end])
    found = (judge.faults(image, promise) for number, image, promise in crashes if number >= start)
    return next((faults[0] for faults in found if faults), None)


def _without_names(path: str) -> str:
    return re.sub(r"[0-9a-f]{16,}", "*", re.sub(r"run/\d+\.orbax-checkpoint-tmp-", "run/N", path))


def test_each_sync_of_a_history_is_missed(whole: list[Operation], full: bool, count: Count, tmp_path: Path) -> None:
    """Of each file and folder in turn: were it not synced, a crash would lose or tear what was reported."""
    judge = Judge(tmp_path)
    needed, spare = Counter[str](), Counter[str]()
    paths = dict.fromkeys(operation.path for operation in whole if operation.kind == "fsync")
    for path in paths:
        if not full and path.startswith("run/") and not path.startswith(f"run/2{_commit.TMP}"):
            continue  # One save is like the others.
        mine = [i for i, operation in enumerate(whole) if operation.kind == "fsync" and operation.path == path]
        told = next(i for i, operation in enumerate(whole) if i > mine[-1] and b'"done"' in operation.data)
        less = [operation for i, operation in enumerate(whole) if i not in mine]
        found = _first_fault(less, judge, mine[0], told - len(mine) + 1)
        (needed if found else spare)[_without_names(path)] += 1
    assert spare.keys() <= NOT_NEEDED.keys()
    assert len(needed) >= 14
    count("an fsync left out (of one file or folder), then the power fails", "found", needed.total())
    count("an fsync left out (of one file or folder), then the power fails", "it was not needed", spare.total())


LEFT_OUT = {
    "of files": "from ckpt_jax import _direct; import types; "
    "_direct.os = types.SimpleNamespace(**{**vars(_direct.os), 'fsync': lambda fd: None})",
    **{
        where: "from ckpt_jax import _storage; import sys; fsync = _storage._fsync; _storage._fsync = "
        f"lambda path: None if sys._getframe(1).f_code.co_name == {function!r} else fsync(path)"
        for where, function in {"of new folders": "make", "of folders": "sync", "of renames": "_settle"}.items()
    },
}


@pytest.mark.parametrize("where", LEFT_OUT)
def test_each_sync_of_the_library_is_missed(where: str, count: Count, tmp_path: Path) -> None:
    operations = _record(tmp_path, f"{LEFT_OUT[where]}\n{history.SCRIPT}")
    assert _first_fault(operations, Judge(tmp_path), 0, len(operations))
    count(f"the library's fsync {where} left out, then the power fails", "found")
