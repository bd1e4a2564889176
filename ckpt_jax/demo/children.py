"""The children: a run's trainers in processes of their own, heard line by line, and killed when their time has come."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import _commit
from . import settings

Told = dict[str, Any]  # What a trainer tells: the event, which process it is, and the facts.
PATIENCE = 30.0  # Seconds in which a save is begun, or never is.
FAREWELL = 60.0  # Seconds in which a trainer tells what it makes of the other's death: some times what it takes.
MOMENT = 2.0  # Seconds in which it ends, if its training step does not hang.


class Ended(Exception):
    """A trainer that ended by itself when it should not have."""


@dataclass(frozen=True, slots=True)
class Trainers:
    """The processes of one run.

    Attributes:
        processes: in their order.
        heard: what each tells, as it tells it; the event `end` once it has nothing more to say.
        logs: a file each, for all else that they print.
    """

    processes: list[subprocess.Popen[str]]
    logs: list[Path]
    heard: queue.SimpleQueue[Told] = field(default_factory=queue.SimpleQueue)


@contextlib.contextmanager
def trainers(
    config: Path,
    root: Path,
    mesh: settings.Mesh,
    name: settings.Name,
    *,
    logs: Path,
    timeout: float | None = None,
    again: Path | None = None,
) -> Iterator[Trainers]:
    """A run's trainers, with that mesh's devices; they are gone when the block is left, however that happens."""
    world = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        # Level 0: these runs compile for longer than they train, and this takes a third off it.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={mesh.devices // mesh.processes} "
        "--xla_backend_optimization_level=0",
    }
    command = [sys.executable, "-m", "ckpt_jax.demo.train", str(config), str(root)]
    command += ["--mesh", name, "--port", str(_free_port())]
    command += ["--timeout", str(timeout)] if timeout is not None else []
    command += ["--again", str(again)] if again is not None else []
    logs.mkdir(exist_ok=True)
    run = Trainers([], [logs / f"{root.name}_{index}.txt" for index in range(mesh.processes)])
    try:
        for index, log in enumerate(run.logs):
            with log.open("a", encoding="utf-8") as errors:
                # A trainer ends when its stdin does: also where this process cannot end it any more.
                child = subprocess.Popen(
                    [*command, "--process", str(index)],
                    env=world,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    encoding="utf-8",
                )
            run.processes.append(child)
            threading.Thread(target=_listen, args=(run, index, child), daemon=True).start()
        yield run
    finally:
        for child in run.processes:
            child.kill()
        for child in run.processes:
            child.wait()
            assert child.stdin is not None
            child.stdin.close()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _listen(run: Trainers, index: int, child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            if line.endswith("\n"):  # A line that was cut short by a kill is none.
                run.heard.put({"process": index} | json.loads(line))
    run.heard.put({"process": index, "event": "end"})


def events(run: Trainers) -> Iterator[Told]:
    """What the trainers tell, as they tell it, until all are done.

    Raises:
        Ended: one of them failed; with the end of what it wrote to its log.
    """
    going = len(run.processes)
    while going:
        told = run.heard.get()
        if told["event"] != "end":
            yield told
            continue
        going -= 1
        index = told["process"]
        if code := run.processes[index].wait():
            last = "\n".join(run.logs[index].read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
            raise Ended(f"process {index} ended with exit code {code}; the end of {run.logs[index]}:\n{last}")


def last_words(run: Trainers, index: int, step: int) -> Iterator[Told]:
    """What a trainer still tells, once another one is dead, until it ends.

    Its training step may hang in a collective for ever: once it has told what became of that step's save, it has a
    moment left to end by itself.
    """
    end = time.monotonic() + FAREWELL
    with contextlib.suppress(queue.Empty):
        while True:
            told = run.heard.get(timeout=max(0.0, end - time.monotonic()))
            if told["process"] != index:
                continue
            if told["event"] == "end":
                return
            yield told
            if told["event"] in ("failed", "committed") and told["step"] == step:
                end = time.monotonic() + MOMENT


@dataclass(frozen=True, slots=True)
class Cut:
    """A save that was cut short: the folder it was being written to, and what stood there just after the kill."""

    step: int
    attempt: str
    files: int
    bytes: int


def kill_in_save(run: Trainers, victim: int, root: Path, step: int) -> Cut | None:
    """Kills a trainer by SIGKILL while it writes its part of a save: once the first bytes of that are on the disk.

    Returns:
        What was cut short; None, and nobody was killed, if the save was faster, or is not made at all.
    """
    child, committed = run.processes[victim], root / str(step)
    end = time.monotonic() + PATIENCE
    while True:
        if committed.exists() or child.poll() is not None or time.monotonic() > end:
            return None
        found = attempts(root, step)
        if found and size(found[0] / "state" / f"ocdbt.process_{victim}"):
            break
        time.sleep(0.0005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    left = list(_sizes(found[0]))
    return Cut(step, found[0].name, len(left), sum(left))


def attempts(root: Path, step: int) -> list[Path]:
    """The folders in which a step is being written, or was when its writer died."""
    return sorted(root.glob(f"{step}{_commit.TMP}*"))


def size(folder: Path) -> int:
    """The bytes of all files in a folder, which may change meanwhile."""
    return sum(_sizes(folder))


def _sizes(folder: Path) -> Iterator[int]:
    for at, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                yield os.lstat(os.path.join(at, name)).st_size
