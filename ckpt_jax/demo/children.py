"""A child: a trainer in a process of its own, heard line by line, and killed when its time has come."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import _commit
from . import settings


class Ended(Exception):
    """A trainer that ended by itself when it should not have."""


@contextlib.contextmanager
def trainer(
    config: Path, root: Path, *, start: Path, side: settings.Side, devices: int, until: int, log: Path
) -> Iterator[subprocess.Popen[str]]:
    """A running trainer with that many CPU devices; it is gone when the block is left, however that happens."""
    command = [sys.executable, "-m", "ckpt_jax.demo.train", str(config), str(root)]
    command += ["--start", str(start), "--side", side, "--until", str(until)]
    flags = f"--xla_force_host_platform_device_count={devices}"
    world = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with log.open("a", encoding="utf-8") as errors:
        child = subprocess.Popen(command, env=world, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8")
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def events(child: subprocess.Popen[str], log: Path) -> Iterator[dict[str, Any]]:
    """What the trainer tells, as it tells it, until it is done.

    Raises:
        Ended: it failed; with the end of what it wrote to its log.
    """
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("{") and line.endswith("\n"):
            yield json.loads(line)
    if child.wait() != 0:
        raise Ended(_why(child, log))


def _why(child: subprocess.Popen[str], log: Path) -> str:
    last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
    return f"the trainer ended with exit code {child.returncode}; the end of {log}:\n{last}"


def kill_in_save(child: subprocess.Popen[str], root: Path, step: int, *, over: int, log: Path) -> Path | None:
    """Kills a trainer by SIGKILL while it saves a step: once more than `over` bytes of it are on the disk.

    Returns:
        The attempt folder that the save left behind; None if the save was faster, and the step is committed.

    Raises:
        Ended: the trainer was gone before it could be killed.
    """
    committed = root / str(step)
    while child.poll() is None and not committed.exists() and not _begun(root, step, over):
        time.sleep(0.0005)
    child.send_signal(signal.SIGKILL)
    if child.wait() != -signal.SIGKILL:
        raise Ended(_why(child, log))
    left = attempts(root, step)
    return left[0] if left and not committed.exists() else None


def _begun(root: Path, step: int, over: int) -> bool:
    return any(size(attempt) > over for attempt in attempts(root, step))


def attempts(root: Path, step: int) -> list[Path]:
    """The folders in which a step is being written, or was when its writer died."""
    return sorted(root.glob(f"{step}{_commit.TMP}*"))


def size(folder: Path) -> int:
    """The bytes of all files in a folder, which may change meanwhile."""
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(at, name)).st_size
    return total
