"""Proof: is a run that was killed and resumed the same run, bit for bit?"""

import contextlib
import hashlib
import importlib
import json
import operator
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _retain
from .errors import CheckpointError, Fault

LIMIT = 600.0  # Seconds for one run of the program.


@dataclass(frozen=True, slots=True)
class Proof:
    """What `prove_resume` found.

    Attributes:
        program: which was run.
        steps: how many steps it had.
        interrupted: after which steps it was killed, in a run of its own each; none if it does not run all its steps.
        faults: where a resumed run was another than the one that was not disturbed, the first step and leaf first.
        is_repeatable: whether two runs are the same until one is killed; if not, `faults` tells where they differ.
    """

    program: str
    steps: int
    interrupted: tuple[int, ...]
    faults: tuple[Fault, ...]
    is_repeatable: bool = True

    @property
    def ok(self) -> bool:
        return not self.faults

    def check(self) -> None:
        """Raises CheckpointError with all faults, if there is one."""
        if self.faults:
            raise CheckpointError(self._verdict(), self.faults)

    def __str__(self) -> str:
        return "\n".join([self._verdict() + ":" * (not self.ok), *(f"  {fault}" for fault in self.faults)])

    def _verdict(self) -> str:
        if not self.interrupted:
            return f"{self.program}: nothing is proven, as it does not run all its steps"
        kills = ", ".join(map(str, self.interrupted))
        if not self.is_repeatable:
            return f"{self.program}: two runs are not the same, even without a kill: is all that it draws from seeded?"
        if self.ok:
            return (
                f"{self.program}: killed after step {kills} and resumed, all {self.steps} steps are the same to the bit"
            )
        return f"{self.program}: a resumed run is not the same run (killed after step {kills})"


def prove_resume(
    program: str, *, steps: int = 20, interrupt_at: Iterable[int] = (7,), processes: int = 1, timeout: float = LIMIT
) -> Proof:
    """Runs a program undisturbed, and again with a kill and a resume, and compares everything after every step.

    Each run is in new processes. The interrupted one gets SIGKILL once the step's save is out of the way; what
    resumes it is the program itself, which finds its checkpoints in the same root. A process that the program started
    and left behind is killed at the end of the run.

    Args:
        program: `"module:function"`, importable from here. The function takes `(root, steps)`, saves in `root` as it
            likes, resumes from there if it can, and yields `(step, state, sample_ids)` after each step that it runs,
            the ids as any tree of arrays, numbers and strings.
        steps: how many.
        interrupt_at: after which steps to kill; each is tried in a run of its own.
        processes: of JAX, on CPU.
        timeout: seconds for each run.

    Returns:
        A `Proof`: for each kill the first step that is not as it was, with every leaf and sample that differs there.
        A program that ends before its last step is not killed at all; the proof names the first step that was missing.

    Raises:
        CheckpointError: the program failed; tells what it printed.
        TypeError: `interrupt_at` is no sequence of ints.
        ValueError: it is no `module:function`, or is to be killed after a step that it does not have, or never.
    """
    interrupt_at = _check(program, steps, interrupt_at, processes)
    with tempfile.TemporaryDirectory(prefix="ckpt_jax_proof_") as folder:
        whole = _run(program, Path(folder) / "whole", steps, processes, timeout=timeout)
        faults = _never_run(whole, steps, processes)
        interrupt_at = () if faults else interrupt_at
        for at in interrupt_at:
            place = Path(folder) / f"interrupted_{at}"
            killed = _run(program, place, steps, processes, timeout=timeout, kill_at=at)
            if twice := tuple(_differences("run twice, step", whole, killed, sorted(killed))):
                return Proof(program, steps, interrupt_at, twice, is_repeatable=False)
            saved = _retain.steps(place / "root")
            if not saved:
                found = f"it saved nothing until then: save more often, or kill later than after step {at}"
                faults.append(Fault(f"killed after step {at}", "a checkpoint to resume from", found))
                continue
            resumed = _run(program, place, steps, processes, timeout=timeout)
            faults += _compare(at, saved[-1], whole, resumed)
    return Proof(program, steps, interrupt_at, tuple(faults))


def _check(program: str, steps: int, interrupt_at: Iterable[int], processes: int) -> tuple[int, ...]:
    """The steps to kill after; raises what is wrong with the arguments."""
    if not isinstance(program, str) or not all(program.partition(":")):
        raise ValueError(f'program is "module:function", not {program!r}')
    if steps < 2:
        raise ValueError(f"steps is 2 or more, so that there is one to kill after and one to resume, not {steps}")
    if processes < 1:
        raise ValueError(f"processes is 1 or more, not {processes}")
    try:
        kills = tuple(map(operator.index, interrupt_at))
    except TypeError:
        raise TypeError(f"interrupt_at is a sequence of steps, such as (7,), not {interrupt_at!r}") from None
    if not kills:
        raise ValueError("interrupt_at is empty: without a kill nothing is proven")
    if not all(0 < at < steps for at in kills):
        raise ValueError(f"interrupt_at is between 1 and {steps - 1}, not {list(kills)}")
    return kills


Record = dict[int, dict[str, Any]]  # step -> {"params.w": digest, …, "samples": [ids]}


def _run(program: str, place: Path, steps: int, processes: int, *, timeout: float, kill_at: int = 0) -> Record:
    """Runs the program in new processes; what each of its steps left behind."""
    place.mkdir(parents=True, exist_ok=True)
    port = _free_port() if processes > 1 else 0
    records = [place / f"record_{i}.jsonl" for i in range(processes)]
    children = []
    for index, record in enumerate(records):
        record.unlink(missing_ok=True)
        task = {"program": program, "root": str(place / "root"), "steps": steps, "record": str(record)}
        task |= {"index": index, "count": processes, "port": port, "kill_at": kill_at}
        command = [sys.executable, "-m", "ckpt_jax.prove", json.dumps(task)]
        path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
        output = (place / f"output_{index}.txt").open("wb")
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Its workers, such as a loader's, outlive a SIGKILL: their group is ended.
        )
        children.append((child, output))
    try:
        if kill_at:
            _kill([child for child, _ in children], records, timeout)
        for index, (child, _) in enumerate(children):
            code = child.wait(timeout)
            if code != (-signal.SIGKILL if kill_at else 0):
                printed = (place / f"output_{index}.txt").read_text(errors="replace")[-2000:]
                until = f"to run until it is killed after step {kill_at}" if kill_at else "exit code 0"
                raise CheckpointError(
                    f"{program} ended with exit code {code}", [Fault(f"process {index}", until, printed)]
                )
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{program} did not end within {timeout:g} s") from error
    finally:
        for child, output in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            output.close()
    return _records(records)


def _kill(children: list[subprocess.Popen[bytes]], records: list[Path], timeout: float) -> None:
    """Kills all processes once each is at its step, or one has ended by itself."""
    end = time.monotonic() + timeout
    while not all(_ready(record).exists() for record in records) and all(child.poll() is None for child in children):
        if time.monotonic() > end:
            raise subprocess.TimeoutExpired(children[0].args, timeout)
        time.sleep(0.01)
    for child in reversed(children):  # Process 0 last: JAX itself ends the others, otherwise, when it goes.
        child.kill()


def _ready(record: str | Path) -> Path:
    """The file by which a process says that it is at the step after which it is to be killed."""
    return Path(f"{record}.ready")


def _records(paths: list[Path]) -> Record:
    found: Record = {}
    for index, path in enumerate(paths):
        for line in path.read_text().splitlines() if path.exists() else ():
            told = json.loads(line)
            entries = told["leaves"] | {"samples": told["samples"]}
            where = _where(index, len(paths))
            found.setdefault(told["step"], {}).update({f"{where}{name}": v for name, v in entries.items()})
    return found


def _where(index: int, processes: int) -> str:
    return f"process {index}, " if processes > 1 else ""


def _never_run(whole: Record, steps: int, processes: int) -> list[Fault]:
    """What each process of the undisturbed run left out, from the first such step on."""
    faults = []
    for where in (_where(index, processes) for index in range(processes)):
        ran = {step for step, entries in whole.items() if f"{where}samples" in entries}
        if missing := sorted(set(range(1, steps + 1)) - ran):
            text = f"step {missing[0]} of {steps} was never run"
            faults.append(Fault(f"{where}undisturbed", f"{steps} steps", f"{len(ran)}", text))
    return faults


def _compare(at: int, saved: int, whole: Record, resumed: Record) -> Iterator[Fault]:
    where = f"killed after step {at}"
    first = min(resumed, default=None)
    if first != saved + 1:
        told = "no step" if first is None else f"step {first}"
        yield Fault(where, f"to go on with step {saved + 1} after the checkpoint of step {saved}", told)
    later = sorted(step for step in whole.keys() | resumed.keys() if step > saved)
    yield from _differences(f"{where}, step", whole, resumed, later)


def _differences(where: str, whole: Record, other: Record, steps: Iterable[int]) -> Iterator[Fault]:
    """All that differs at the first of some steps at which anything does."""
    for step in steps:
        if step not in other or step not in whole:
            yield Fault(f"{where} {step}", "in both runs", "in one only")
            return
        a, b = whole[step], other[step]
        odd = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
        for name in odd:
            yield Fault(f"{where} {step}: {name}", _short(a.get(name)), _short(b.get(name)))
        if odd:
            return  # From here on everything differs.


def _short(value: Any) -> str:
    return "nothing" if value is None else str(value)[:80]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


# --- in a child process -----------------------------------------------------------------------------------------------


def _child(task: dict[str, Any]) -> None:
    import jax

    from . import _tree

    if task["count"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{task['port']}", task["count"], task["index"])
    module, _, function = task["program"].partition(":")
    run = getattr(importlib.import_module(module), function)
    with open(task["record"], "a", encoding="utf-8") as record:
        for step, state, samples in _yielded(task["program"], run(task["root"], task["steps"])):
            leaves = _digests(_tree.flatten(state).leaves)
            told = {"step": operator.index(step), "leaves": leaves, "samples": _samples(samples)}
            record.write(json.dumps(told) + "\n")
            record.flush()
            if step == task["kill_at"]:
                _wait_for_saves()
                _ready(task["record"]).touch()
                while True:  # Until it is killed; other signals may come.
                    signal.pause()


def _yielded(program: str, found: Any) -> Iterator[tuple[Any, Any, Any]]:
    wanted = f"{program} is to yield (step, state, sample_ids) after each step"
    if not isinstance(found, Iterable):
        raise TypeError(f"{wanted}, and returned {found!r:.80}")
    for item in found:
        if not isinstance(item, (tuple, list)) or len(item) != 3:
            raise TypeError(f"{wanted}, and yielded {item!r:.80}")
        yield item[0], item[1], item[2]


def _wait_for_saves() -> None:
    """So that a proof has the same outcome each time: kills in the middle of a save are another test's."""
    from . import saver

    for found in list(saver.open_savers()):
        with contextlib.suppress(Exception):
            found.wait()


def _digests(leaves: dict[str, Any]) -> dict[str, str]:
    """A digest of every leaf, as far as this process has it."""
    from . import _leaves, _processes, _snapshot

    encoded = _leaves.encode_all(leaves)
    index, count = _processes.here()
    snapshot = _snapshot.take(encoded, index, count)
    hashes = {name: hashlib.sha256(str(item.leaf).encode()) for name, item in encoded.items()}
    for name, item in encoded.items():
        if not item.leaf.stored:
            hashes[name].update(json.dumps(item.leaf.value, sort_keys=True).encode())
    for chunk in snapshot.chunks:
        hashes[chunk.name].update(chunk.array.tobytes())
    for name, digest in snapshot.shared.items():  # This process's own arrays: their chunks are shared out among all.
        hashes[name].update(digest.encode())
    return {name: found.hexdigest()[:32] for name, found in hashes.items()}


def _samples(samples: Any) -> str:
    """A digest of a step's samples, after the first of them, by which a reader knows them."""
    from . import _tree

    flat = _tree.flatten(samples)
    (first, *_) = flat.leaves.values() or (None,)
    ids = isinstance(samples, Iterable) and not isinstance(samples, (str, bytes)) and not hasattr(samples, "dtype")
    if first is samples and ids:  # A range, a generator.
        flat = _tree.flatten(list(samples))
    leaves = {name: _without_text(leaf) for name, leaf in flat.leaves.items()}
    exact = json.dumps([repr(flat.structure), _digests(leaves)], sort_keys=True)
    shown = ", ".join(map(_shown, list(leaves.values())[:20]))
    return f"{shown:.50} (digest {hashlib.sha256(exact.encode()).hexdigest()[:16]})"


def _without_text(leaf: Any) -> Any:
    """A leaf that has a digest: of arrays of text or dates, what Python writes for them."""
    text = hasattr(leaf, "tolist") and getattr(leaf.dtype, "kind", "") in "USOmM"
    return repr(leaf.tolist()) if text else leaf


def _shown(leaf: Any) -> str:
    import numpy as np

    if not hasattr(leaf, "dtype"):
        return repr(leaf)[:50] if isinstance(leaf, (int, float, str, bytes)) else type(leaf).__name__
    whole = getattr(leaf, "is_fully_addressable", True) and isinstance(leaf.dtype, np.dtype)
    return str(np.asarray(leaf).reshape(-1)[:20].tolist() if whole else leaf.dtype)


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
