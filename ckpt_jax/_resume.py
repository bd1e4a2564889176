"""Resume: all processes go on from the newest step that each of them can read, or none does."""

import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import _commit, _manifest, _processes, _restore, _storage, _tree, _values
from ._events import Log
from ._manifest import Leaf, Manifest
from .errors import CheckpointError, Corrupt, Fault, NotFound


def resume(root: _storage.Folder, like: Any, group: _processes.Group, log: Log) -> tuple[Any, Manifest | None]:
    """The newest state that every process can read, and its manifest; `like` and None if there is no checkpoint.

    A step that a process finds damaged is marked, told of, and passed over. Whatever else keeps `like` from being
    filled is raised, in every process.
    """
    refused: dict[int, str] = {}  # And why. Also where no mark could be written: the root may be read-only.
    gone: set[int] = set()  # Such as one that was replaced while it was read: it gets another chance.
    turn = 0
    while True:
        place, known = _proposed(root, group, turn, refused, log)
        if place is None:
            return like, None
        found, error = _read(place, known, like)
        verdicts = _exchange(group, turn, "ok" if error is None else f"{_kind(error)}: {_why(error)}")
        if all(verdict == "ok" for verdict in verdicts):
            assert found is not None
            manifest, finish = found
            state = _finished(finish, group, turn)
            for step, why in refused.items():  # Also for who looks at no events: training is lost.
                warnings.warn(f"step {step} cannot be read, and the one before is taken: {why}", stacklevel=3)
            return state, manifest
        _raise_what_is_no_damage(error, verdicts)
        step = int(place.name)
        if step in gone or any(verdict.startswith("corrupt") for verdict in verdicts):
            refused[step] = _pass_over(place, verdicts, group, log)
        gone.add(step)
        turn += 1


Proposal = tuple[_storage.Folder | None, Manifest | None]  # A step, and its manifest where it has been read already.


def _proposed(root: _storage.Folder, group: _processes.Group, turn: int, refused: dict[int, str], log: Log) -> Proposal:
    """The step that process 0 proposes to all."""
    if group.index == 0:
        try:
            place, manifest = _newest(root, refused, log)
        except BaseException as error:
            group.publish(f"proposal/{turn}", json.dumps({"failed": str(error)}))
            raise
        group.publish(f"proposal/{turn}", json.dumps({"step": place and place.name}))
        return place, manifest
    told = json.loads(group.wait(f"proposal/{turn}", process=0, phase="propose a step"))
    if "failed" in told:
        raise CheckpointError(f"process 0 could not propose a step to resume from: {told['failed']}")
    return (root / told["step"] if told["step"] is not None else None), None


def _newest(root: _storage.Folder, refused: dict[int, str], log: Log) -> Proposal:
    """The newest committed step that is not marked; one whose manifest is damaged is marked here.

    Raises:
        Corrupt: there are checkpoints, but none that can be read. Nobody's month is begun anew unasked.
    """
    for step in _commit.candidates(root):
        place = root / str(step)
        if step in refused or _commit.is_bad(place):
            continue
        try:
            return place, _commit.load(place)
        except NotFound as error:
            if _commit.lost_its_manifest(place):
                refused[step] = _why(error)
                log.add("fell back", step, message=refused[step])
        except Corrupt as error:
            refused[step] = _why(error)
            _commit.mark_bad(place, refused[step])
            log.add("fell back", step, message=refused[step])
    if bad := [step for step in _commit.candidates(root) if step in refused or _commit.is_bad(root / str(step))]:
        raise Corrupt(
            f"no checkpoint in {root} can be read: {'all ' * (len(bad) > 1)}{len(bad)} of them are damaged",
            [Fault(str(step), "a checkpoint", "a damaged one") for step in bad],
            hint=f"`ckpt-jax verify {root / str(bad[0])}` tells more; to begin anew, move them or take another root",
        )
    return None, None


def _read(
    place: _storage.Folder, known: Manifest | None, like: Any
) -> tuple[tuple[Manifest, Callable[[], Any]] | None, CheckpointError | OSError | None]:
    """The manifest, and what gives the state; or why not."""
    try:
        manifest = known or _commit.load(place)
        return (manifest, _restore.fetch(place, manifest, like)), None
    except (CheckpointError, OSError) as error:
        return None, error


def _finished(finish: Callable[[], Any], group: _processes.Group, turn: int) -> Any:
    """The state, once every process has it: an iterator may refuse its state in one of them."""
    state, error = None, None
    try:
        state = finish()
    except (CheckpointError, OSError) as failure:
        error = failure
    verdict = "ok" if error is None else f"failed: {_why(error)}"
    verdicts = _exchange(group, turn, verdict, phase="take the state")
    _raise_what_is_no_damage(error, verdicts)
    return state


def _kind(error: Exception) -> str:
    return "corrupt" if isinstance(error, Corrupt) else "gone" if isinstance(error, NotFound) else "failed"


def _why(error: Exception) -> str:
    """What was wrong, without advice: a mark is read long after."""
    faults = error.faults[:20] if isinstance(error, CheckpointError) else ()
    return "; ".join(map(str, faults)) or (error.summary if isinstance(error, CheckpointError) else str(error))


def _exchange(group: _processes.Group, turn: int, verdict: str, phase: str = "read the checkpoint") -> list[str]:
    """What every process says of the proposal, as all hear it."""
    if group.count == 1:
        return [verdict]
    key = f"{phase.replace(' ', '_')}/{turn}"
    group.publish(f"{key}/{group.index}", verdict)
    return [
        verdict if i == group.index else group.wait(f"{key}/{i}", process=i, phase=phase) for i in range(group.count)
    ]


def _raise_what_is_no_damage(error: Exception | None, verdicts: list[str]) -> None:
    if error is not None and _kind(error) == "failed":
        raise error
    for process, verdict in enumerate(verdicts):
        if verdict.startswith("failed"):
            raise CheckpointError(f"process {process} could not resume: {verdict.partition(': ')[2]}")


def _pass_over(place: _storage.Folder, verdicts: list[str], group: _processes.Group, log: Log) -> str:
    """Tells of a step that is passed over, and marks it if it is damaged; returns why."""
    step = int(place.name)
    reasons = [
        f"process {i}: {v.partition(': ')[2]}" if group.count > 1 else v.partition(": ")[2]
        for i, v in enumerate(verdicts)
        if v != "ok"
    ]
    why = "; ".join(reasons)
    log.add("fell back", step, message=why)
    # Deleted while being read is no damage: then it is simply not there the next time.
    if group.index == 0 and any(verdict.startswith("corrupt") for verdict in verdicts):
        _commit.mark_bad(place, why)
    return why


# --- do the counts agree? ---------------------------------------------------------------------------------------------


def check_counts(manifest: Manifest, state: Any, log: Log) -> None:
    """Warns where a step, optax's counts or a loader's position in the tree are not the step that was saved."""
    step = manifest.step
    odd = {}
    for name, value in _tree.flatten(state).leaves.items():
        count = _count(name, value, manifest.leaves.get(name))
        if count is not None and count != step:
            odd[name] = count
    if odd:
        told = ", ".join(f"{name} is {count}" for name, count in odd.items())
        message = f"step {step} was resumed, but {told}: is a step the number of completed updates everywhere?"
        log.add("warning", step, message=message, names=tuple(odd))
        warnings.warn(message, stacklevel=4)


def positions(manifest: Manifest, state: Any, process: int) -> dict[str, Any]:
    """Where the iterators in a state stand that was just resumed, by name, as the manifest has it."""
    found = {}
    for name, value in _tree.flatten(state).leaves.items():
        leaf = manifest.leaves.get(name)
        if leaf is not None and leaf.kind == "live" and hasattr(type(value), "__next__"):
            found[name] = _position(leaf, process)
    return found


def stalled(before: Mapping[str, Any], manifest: Manifest) -> tuple[str, ...]:
    """Those iterators whose state is still what it was; the manifest is one that this process is about to write."""
    now = {name: manifest.leaves[name] for name in before if name in manifest.leaves}
    return tuple(name for name, leaf in now.items() if leaf.kind == "live" and _position(leaf, 0) == before[name])


def _position(leaf: Leaf, process: int) -> Any:
    return leaf.value["global"] if "global" in leaf.value else leaf.value["processes"][process]


def _count(name: str, value: Any, leaf: Leaf | None) -> int | None:
    """How many updates a leaf says there were, if it is one that counts them."""
    last = name.rpartition(".")[2]
    if leaf is not None and leaf.kind == "live":
        states = _manifest.states(leaf) or [_values.unpack(leaf.value["global"])]
        batches = [state["batches"] for state in states if isinstance(state, Mapping) and "batches" in state]
        return batches[0] if batches else None
    if last not in ("step", "count") or isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if getattr(value, "shape", None) == () and np.issubdtype(value.dtype, np.integer):
        return int(value)
    return None
