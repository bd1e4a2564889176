"""Resume: all processes go on from the newest step that each of them can read, or none does."""

import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from . import _commit, _formats, _manifest, _processes, _restore, _storage, _tree, _values
from ._events import Log
from ._formats import Found
from ._manifest import Leaf, Manifest
from .errors import CheckpointError, Corrupt, Fault, NotFound


class Refusal(NamedTuple):
    """Why a step was passed over, whether that is damage, and what it was: its folder's identity.

    Damage is marked, if the root is not read-only.
    """

    why: str
    damaged: bool
    what: str


Refusals = dict[int, Refusal]


def resume(
    root: _storage.Folder, like: Any, group: _processes.Group, log: Log
) -> tuple[Any, Manifest | None, Refusals]:
    """The newest state that every process can read, and its manifest; `like` and None if there is no checkpoint.

    A step that a process finds damaged is marked, told of, and passed over; one that it cannot read just now is not
    marked. Both are returned as well. Whatever else keeps `like` from being filled is raised, in every process.
    """
    refused: Refusals = {}
    gone: set[int] = set()  # Such as one that was replaced while it was read: it gets another chance.
    turn = 0
    while True:
        place, known = _proposed(root, group, turn, refused, log)
        if place is None:
            return like, None, refused
        found, error = _read(place, known, like)
        verdicts = _exchange(group, turn, "ok" if error is None else f"{_kind(error)}: {_why(error)}")
        if all(verdict == "ok" for verdict in verdicts):
            assert found is not None
            manifest, finish = found
            state = _finished(finish, group, turn)
            for step, refusal in refused.items():  # Also for who looks at no events: training is lost.
                warnings.warn(f"step {step} cannot be read, and the one before is taken: {refusal.why}", stacklevel=3)
            return state, manifest, refused
        _raise_what_is_no_damage(error, verdicts)
        step = int(place.name)
        if step in gone or any(verdict.startswith(("corrupt", "unread")) for verdict in verdicts):
            refused[step] = _pass_over(place, verdicts, group, log)
        gone.add(step)
        turn += 1


Proposal = tuple[_storage.Folder | None, Found | None]  # A step, and its manifest where it has been read already.


def _proposed(root: _storage.Folder, group: _processes.Group, turn: int, refused: Refusals, log: Log) -> Proposal:
    """The step that process 0 proposes to all."""
    if group.index == 0:
        try:
            if turn == 0:
                _commit.clear_all(root)
            place, found = _newest(root, refused, log)
        except BaseException as error:
            group.publish(f"proposal/{turn}", json.dumps({"failed": str(error)}))
            raise
        group.publish(f"proposal/{turn}", json.dumps({"step": place and place.name}))
        return place, found
    told = json.loads(group.wait(f"proposal/{turn}", process=0, phase="propose a step"))
    if "failed" in told:
        raise CheckpointError(f"process 0 could not propose a step to resume from: {told['failed']}")
    return (root / told["step"] if told["step"] is not None else None), None


def _newest(root: _storage.Folder, refused: Refusals, log: Log) -> Proposal:
    """The newest committed step that is not marked; one whose manifest is damaged is marked here.

    Raises:
        CheckpointError: there are checkpoints, but none that can be read; Corrupt, where all are damaged. Nobody's
            month is begun anew unasked.
    """
    marked = []
    for step in _commit.candidates(root):
        place = root / str(step)
        if step in refused:
            continue
        try:
            if _commit.is_bad(place):
                marked.append(step)
                continue
            found = _loaded(place)
        except (NotFound, Corrupt, OSError) as error:
            failure = error
        else:
            if found is None:
                continue
            return place, found
        refused[step] = Refusal(_why(failure), not isinstance(failure, OSError), place.identity())
        log.add("fell back", step, message=refused[step].why)
        if isinstance(failure, Corrupt):
            _commit.mark_bad(place, refused[step].why)
    if marked or refused:
        raise _none_left(root, marked, refused)
    return None, None


def _loaded(place: _storage.Folder) -> Found | None:
    """The manifest of a step, which may be Orbax's; None if there never was one.

    Where two folders cannot be exchanged there is none for a moment of a replacement, and then there is.
    """
    while True:
        try:
            return _formats.load(place)
        except NotFound:
            was_one = _commit.was_one(place)
            if place.read(_manifest.NAME, 0, 1) is not None:
                continue
            if was_one:
                raise
            return None


def _none_left(root: _storage.Folder, marked: list[int], refused: Refusals) -> CheckpointError:
    why = dict.fromkeys(marked, "it is marked as damaged") | {step: found.why for step, found in refused.items()}
    bad = sorted(why, reverse=True)
    damaged = all(refusal.damaged for refusal in refused.values())
    them = f"all {len(bad)} of them are" if len(bad) > 1 else "the only one is"
    state = "damaged" if damaged else "damaged or cannot be read now"
    verify = f"`ckpt-jax verify {root / str(bad[0])}` tells more"
    advice = f"{verify}; to begin anew, move them or take another root"
    return (Corrupt if damaged else CheckpointError)(
        f"no checkpoint in {root} can be read: {them} {state}",
        [Fault(str(step), "a checkpoint that can be read", why[step]) for step in bad],
        hint=advice if damaged else f"once storage can be read again, so can they; {verify}",
    )


def _read(
    place: _storage.Folder, known: Found | None, like: Any
) -> tuple[tuple[Manifest, Callable[[], Any]] | None, Exception | None]:
    """The manifest, and what gives the state; or why not."""
    try:
        found = known or _formats.load(place)
        return (found.manifest, _restore.fetch(place, found, like)), None
    except Exception as error:  # noqa: BLE001  Raised once the others know: they wait for this process's word.
        return None, error


def _finished(finish: Callable[[], Any], group: _processes.Group, turn: int) -> Any:
    """The state, once every process has it: an iterator may refuse its state in one of them."""
    state, error = None, None
    try:
        state = finish()
    except Exception as failure:  # noqa: BLE001  As above.
        error = failure
    verdict = "ok" if error is None else f"failed: {_why(error)}"
    verdicts = _exchange(group, turn, verdict, phase="take the state")
    if error is not None:
        raise error
    _raise_what_is_no_damage(None, verdicts)
    return state


def _kind(error: Exception) -> str:
    for kind, name in ((Corrupt, "corrupt"), (NotFound, "gone"), (OSError, "unread")):
        if isinstance(error, kind):
            return name
    return "failed"


def _why(error: Exception) -> str:
    """What was wrong, without advice: a mark is read long after."""
    faults = error.faults[:20] if isinstance(error, CheckpointError) else ()
    plain = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return "; ".join(map(str, faults)) or (error.summary if isinstance(error, CheckpointError) else plain)


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


def _pass_over(place: _storage.Folder, verdicts: list[str], group: _processes.Group, log: Log) -> Refusal:
    """Tells of a step that is passed over, and marks it if it is damaged."""
    step = int(place.name)
    reasons = [
        f"process {i}: {v.partition(': ')[2]}" if group.count > 1 else v.partition(": ")[2]
        for i, v in enumerate(verdicts)
        if v != "ok"
    ]
    why = "; ".join(reasons)
    log.add("fell back", step, message=why)
    # Deleted while being read is no damage: then it is simply not there the next time. Nor is a disk in trouble.
    damaged = any(verdict.startswith("corrupt") for verdict in verdicts)
    if group.index == 0 and damaged:
        _commit.mark_bad(place, why)
    return Refusal(why, damaged, place.identity())


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
