"""Proof: is a run that was killed and resumed the same run, bit for bit?"""

import contextlib
import hashlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
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
        interrupted: after which steps it was killed, in a run of its own each.
        faults: where a resumed run was another than the one that was not disturbed, the first step and leaf first.
    """

    program: str
    steps: int
    interrupted: tuple[int, ...]
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        return not self.faults

    def check(self) -> None:
        """Raises CheckpointError with all faults, if there is one."""
        if self.faults:
            raise CheckpointError(f"{self.program}: a resumed run is not the same run", self.faults)

    def __str__(self) -> str:
        kills = ", ".join(map(str, self.interrupted))
        if self.ok:
            return (
                f"{self.program}: killed after step {kills} and resumed, all {self.steps} steps are the same to the bit"
            )
        lines = [f"{self.program}: a resumed run is not the same run (killed after step {kills}):"]
        return "\n".join(lines + [f"  {fault}" for fault in self.faults])


def prove_resume(
    program: str, *, steps: int = 20, interrupt_at: Sequence[int] = (7,), processes: int = 1, timeout: float = LIMIT
) -> Proof:
    """Runs a program undisturbed, and again with a kill and a resume, and compares everything after every step.

    Each run is in new processes. The interrupted one gets SIGKILL once the step's save is out of the way; what
    resumes it is the program itself, which finds its checkpoints in the same root.

    Args:
        program: `"module:function"`, importable from here. The function takes `(root, steps)`, saves in `root` as it
            likes, resumes from there if it can, and yields `(step, state, sample_ids)` after each step that it runs.
        steps: how many.
        interrupt_at: after which steps to kill; each is tried in a run of its own.
        processes: of JAX, on CPU.
        timeout: seconds for each run.

    Returns:
        A `Proof`: for each kill the first step that is not as it was, with every leaf and sample that differs there.

    Raises:
        CheckpointError: the program failed; tells what it printed.
        ValueError: it is no `module:function`, or is to be killed after a step that it does not have.
    """
    if ":" not in program:
        raise ValueError(f'program is "module:function", not {program!r}')
    if not all(0 < at < steps for at in interrupt_at):
        raise ValueError(f"interrupt_at is between 1 and {steps - 1}, not {list(interrupt_at)}")
    with tempfile.TemporaryDirectory(prefix="ckpt_jax_proof_") as folder:
        whole = _run(program, Path(folder) / "whole", steps, processes, timeout=timeout)
        faults: list[Fault] = []
        for at in interrupt_at:
            place = Path(folder) / f"interrupted_{at}"
            _run(program, place, steps, processes, timeout=timeout, kill_at=at)
            saved = _retain.steps(place / "root")
            if not saved:
                faults.append(Fault(f"killed after step {at}", "a checkpoint to resume from", "none was committed"))
                continue
            resumed = _run(program, place, steps, processes, timeout=timeout)
            faults += _compare(at, saved[-1], whole, resumed)
    return Proof(program, steps, tuple(interrupt_at), tuple(faults))


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
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": path}
        )
        children.append((child, output))
    try:
        for index, (child, _) in enumerate(children):
            code = child.wait(timeout)
            if code != (-signal.SIGKILL if kill_at else 0):
                raise CheckpointError(
                    f"{program} ended with exit code {code}",
                    [Fault(f"process {index}", "exit code 0", (place / f"output_{index}.txt").read_text()[-2000:])],
                )
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{program} did not end within {timeout:g} s") from error
    finally:
        for child, output in children:
            if child.poll() is None:
                child.kill()
                child.wait()
            output.close()
    return _records(records)


def _records(paths: list[Path]) -> Record:
    found: Record = {}
    for index, path in enumerate(paths):
        for line in path.read_text().splitlines():
            told = json.loads(line)
            entries = told["leaves"] | {"samples": told["samples"]}
            where = f"process {index}, " if len(paths) > 1 else ""
            found.setdefault(told["step"], {}).update({f"{where}{name}": v for name, v in entries.items()})
    return found


def _compare(at: int, saved: int, whole: Record, resumed: Record) -> Iterator[Fault]:
    where = f"killed after step {at}"
    first = min(resumed, default=None)
    if first != saved + 1:
        told = "no step" if first is None else f"step {first}"
        yield Fault(where, f"to go on with step {saved + 1} after the checkpoint of step {saved}", told)
    for step in sorted(whole.keys() | {s for s in resumed if s > saved}):
        if step <= saved:
            continue
        if step not in resumed or step not in whole:
            yield Fault(f"{where}, step {step}", "in both runs", "in one only")
            return
        a, b = whole[step], resumed[step]
        odd = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
        for name in odd:
            yield Fault(f"{where}, step {step}: {name}", _short(a.get(name)), _short(b.get(name)))
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

    if task["count"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{task['port']}", task["count"], task["index"])
    module, _, function = task["program"].partition(":")
    run = getattr(importlib.import_module(module), function)
    with open(task["record"], "a", encoding="utf-8") as record:
        for step, state, samples in run(task["root"], task["steps"]):
            told = {"step": int(step), "leaves": _digests(state), "samples": _plain(samples)}
            record.write(json.dumps(told) + "\n")
            record.flush()
            if step == task["kill_at"]:
                _wait_for_saves()
                os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_saves() -> None:
    """So that a proof has the same outcome each time: kills in the middle of a save are another test's."""
    from . import saver

    for found in list(saver.open_savers()):
        with contextlib.suppress(Exception):
            found.wait()


def _digests(state: Any) -> dict[str, str]:
    """A digest of every leaf, as far as this process has it."""
    from . import _leaves, _processes, _snapshot, _tree

    encoded = _leaves.encode_all(_tree.flatten(state).leaves)
    index, count = _processes.here()
    snapshot = _snapshot.take(encoded, index, count)
    hashes = {name: hashlib.sha256(str(item.leaf).encode()) for name, item in encoded.items()}
    for name, item in encoded.items():
        if not item.leaf.stored:
            hashes[name].update(json.dumps(item.leaf.value, sort_keys=True).encode())
    for chunk in snapshot.chunks:
        hashes[chunk.name].update(chunk.values.tobytes())
    return {name: found.hexdigest()[:32] for name, found in hashes.items()}


def _plain(samples: Any) -> Any:
    return samples.tolist() if hasattr(samples, "tolist") else list(samples) if samples is not None else None


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
