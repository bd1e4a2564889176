"""A history of a root that tells what it does: when it is broken off anywhere, what must be there is known.

`SCRIPT` is what a child does; it goes on after an error, as a user's notebook would. `promised` reads what the child
printed, and `kept` looks at the root, in a process that knows nothing else.
"""

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ckpt_jax as ck
from ckpt_jax import _retain, _writing
from tests.cells import cells_of
from tests.forked import Child

SCRIPT = "import sys; from tests.torture import history; history.run(sys.argv[1])"
ASIDE = ".rolled-back-"


def tree(step: int, version: int = 0) -> dict[str, Any]:
    """A state that is like no other step's, and no other version's of the same step."""
    mark = 100 * step + version
    return {
        "w": jnp.arange(1024, dtype=jnp.float32).reshape(32, 32) + mark,  # In two chunks,
        "host": np.full((20, 40), mark, np.int32),  # in as many,
        "small": jnp.full(5, mark, jnp.bfloat16),  # and in a node of the tree.
        "key": jax.random.key(mark),
        "mark": mark,
    }


# --- the child --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Act:
    """One thing that is done.

    Attributes:
        writes: the steps that it saves, each with its version.
        may_go: which steps it deletes or puts aside, or may.
        surely: whether they are gone once it is done.
    """

    name: str
    do: Callable[[str], Any]
    writes: dict[int, int] = field(default_factory=dict)
    may_go: Callable[[str], list[int]] = lambda root: []
    surely: bool = True


def _save(root: str, step: int, version: int = 0, *, overwrite: bool = False) -> None:
    ck.save(f"{root}/{step}", tree(step, version), overwrite=overwrite)


def _resume(root: str) -> None:
    """A run goes on with two more steps, and lets old ones go."""

    def told(event: Any) -> None:
        if event.kind == "committed":
            _say(committed=event.step)

    with ck.Saver(root, every=ck.Every(steps=1), keep=ck.Keep(last=3), on_event=told) as saver:
        saver.resume(tree(0))
        for step in (4, 5):
            saver.step(step, tree(step))
            saver.wait()


ACTS = [
    Act("save 1", lambda root: _save(root, 1), {1: 0}),
    Act("save 2", lambda root: _save(root, 2), {2: 0}),
    Act("save 3", lambda root: _save(root, 3), {3: 0}),
    Act("prune", lambda root: ck.prune(root, TWO), may_go=lambda root: ck.prune(root, TWO, dry_run=True)),
    Act("overwrite 3", lambda root: _save(root, 3, 1, overwrite=True), {3: 1}),
    # A Saver that cannot delete goes on.
    Act("resume", _resume, {4: 0, 5: 0}, lambda root: sorted({*ck.steps(root), 4, 5})[:-3], surely=False),
    Act("roll back", lambda root: _retain.rollback(root, 3), may_go=lambda root: [s for s in ck.steps(root) if s > 3]),
    Act("save 4 anew", lambda root: _save(root, 4, 2), {4: 2}),
]
TWO = ck.Keep(last=2)


def _say(**facts: Any) -> None:
    os.write(1, json.dumps(facts).encode() + b"\n")


def run(root: str) -> None:
    """Does all acts, and prints when each begins, is done, or fails as it may."""
    warnings.simplefilter("ignore")  # A Saver warns of what it survives.
    with cells_of(2048):
        _writing.DATA_FILE = 4096
        for act in ACTS:
            try:
                _say(begin=act.name, may_go=act.may_go(root))
                act.do(root)
            except (OSError, ck.CheckpointError) as error:
                _say(failed=act.name, why=f"{type(error).__name__}: {error}")
            else:
                _say(done=act.name)
    os._exit(0)


# --- what was promised ------------------------------------------------------------------------------------------------


@dataclass
class Promise:
    """What may be there, and no more, and nothing less.

    Attributes:
        versions: for each step, those that may be there; None: it may not be there.
        aside: what must be there if not at its own name, then put aside.
    """

    versions: dict[int, set[int | None]] = field(default_factory=dict)
    aside: list[int] = field(default_factory=list)


def promised(out: str) -> Promise:
    """What was promised by a child that printed this."""
    found = Promise()
    before: dict[int, set[int | None]] = {}
    for line in [json.loads(line) for line in out.splitlines() if line.startswith("{")]:
        if "committed" in line:
            found.versions[line["committed"]] -= {None}
            continue
        act = next(act for act in ACTS if act.name in line.values())
        if "begin" in line:
            before = {step: found.versions.get(step, {None}) for step in {*act.writes, *line["may_go"]}}
            for step, versions in before.items():
                found.versions[step] = versions | {act.writes.get(step)}
            if act.name == "roll back":
                found.aside = line["may_go"]
        elif "done" in line:
            for step in before:
                if step in act.writes or act.surely:
                    found.versions[step] = {act.writes.get(step)}
        elif len(act.writes) == 1 and "is in place" not in line["why"]:
            found.versions |= before
    return found


# --- is it kept? ------------------------------------------------------------------------------------------------------


def version_at(place: Path, step: int) -> int:
    """Which version of a step lies there, whole to the last bit."""
    found = ck.restore(place, tree(step))
    version = found["mark"] - 100 * step
    assert _bytes(found) == _bytes(tree(step, version)), f"step {step} holds the values of none of its versions"
    ck.verify(place).check()
    return version


def _bytes(tree: dict[str, Any]) -> list[bytes]:
    key = tree["key"]  # As `open` gives it: its numbers.
    plain = tree | {"key": jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key}
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain)]


def differs(found: dict[str, Any], step: int) -> bool:
    """Whether a state is not that of a step, to the last bit."""
    return _bytes(found) != _bytes(tree(step))


def seen(root: Path, promise: Promise) -> list[str]:
    """What is not as it was promised."""
    return [*_steps(root, promise.versions), *_aside(root, promise.aside)]


def faults(root: Path, promise: Promise) -> list[str]:
    """What is not as it was promised; or else, what the next one to work in the root finds in its way."""
    return seen(root, promise) or [*_next(root, promise.versions)]


def _steps(root: Path, may: dict[int, set[int | None]]) -> Iterator[str]:
    there = ck.steps(root)
    for step in sorted({*there, *may}):
        allowed = may.get(step, {None})
        try:
            version = version_at(root / str(step), step) if step in there else None
        except ck.CheckpointError as error:
            yield f"step {step} is there, and {error}"
        else:
            if version not in allowed:
                yield f"step {step}: version {version} is there, and {allowed} may be"
    newest = str(root / str(there[-1])) if there else None
    if ck.latest(root) != newest:
        yield f"latest is {ck.latest(root)}, not {newest}"
    if bad := ck.steps(root, bad=True):
        yield f"marked as damaged: {bad}"


def _aside(root: Path, moved: list[int]) -> Iterator[str]:
    """What is rolled back is not lost."""
    there = {int(place.name.partition(ASIDE)[0]): place for place in root.glob(f"*{ASIDE}*")}
    for step, place in there.items():
        if version_at(place, step) != 0:
            yield f"{place.name} is another version than what was put aside"
    for step in moved:
        if step not in there and step not in ck.steps(root):
            yield f"step {step} was to be put aside, and is lost"


def _next(root: Path, may: dict[int, set[int | None]]) -> Iterator[str]:
    """Resuming, saving what was under way, another save and `prune` work, and leave no litter."""
    there = ck.steps(root)
    with ck.Saver(root) as saver:
        state, step = saver.resume(tree(0))
        if step != (there[-1] if there else 0) or state["mark"] - 100 * step not in may.get(step, {0}):
            yield f"resumed from step {step} with {state['mark']}"
    anew = [step for step, versions in may.items() if len(versions) > 1]
    for step in anew:
        ck.save(root / str(step), tree(step, 7), overwrite=step in there)
    ck.save(root / "9", tree(9, 7))
    ck.prune(root, ck.Keep(last=20))
    for step in {9, *anew}:
        if (version := version_at(root / str(step), step)) != 7:
            yield f"step {step} was saved anew, and is still version {version}"
    for name in os.listdir(root):
        if not re.fullmatch(rf"\d+({ASIDE}[\d-]+)?|LATEST|events\.jsonl", name):
            yield f"litter: {name}"
        elif name.isdigit():
            files = {str(path.relative_to(root / name)) for path in (root / name).rglob("*") if path.is_file()}
            if more := files - ck.open(root / name).manifest.files.keys() - {"MANIFEST.json"}:
                yield f"litter in {name}: {more}"


def kept(root: Path, promise: Promise) -> list[str]:
    """As `faults`, found by a new process."""
    versions = {step: sorted(found, key=str) for step, found in promise.versions.items()}
    child = Child(_CHECK, str(root), json.dumps([versions, promise.aside]))
    out, _ = child.communicate()
    return json.loads(out) if child.returncode == 0 else [out]


_CHECK = """
import json, pathlib, sys, warnings
from tests.torture.history import Promise, faults
warnings.simplefilter("ignore")
versions, aside = json.loads(sys.argv[2])
promise = Promise({int(step): set(found) for step, found in versions.items()}, aside)
print(json.dumps(faults(pathlib.Path(sys.argv[1]), promise)))
"""
