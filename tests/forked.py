"""Python processes that begin with JAX imported: forked from one that has, which takes 0.1 s in place of 2.

They are processes like any other: each makes its own backend, and dies by its own signal. What they are forked from has
imported modules, and done nothing else.
"""

import array
import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any


class Child:
    """A process that runs a script; its interface is that of `subprocess.Popen` with stderr in stdout."""

    def __init__(self, script: str, *arguments: str):
        self.args = [script, *arguments]
        read, write = os.pipe()
        self.pid = _parent().start(script, arguments, write)
        os.close(write)
        self.stdout = os.fdopen(read, encoding="utf-8", errors="replace")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _parent().code(self.pid)
        return self.returncode

    def wait(self, timeout: float = 120) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args[0], timeout)
            time.sleep(0.01)
        return code

    def communicate(self, timeout: float = 120) -> tuple[str, None]:
        """All that it printed, once it has ended; what it leaves running may have its stdout still."""
        late = threading.Event()
        alarm = threading.Timer(timeout, lambda: (late.set(), self.kill()))
        alarm.start()
        with self.stdout:
            out = self.stdout.read()
        self.wait(timeout)
        alarm.cancel()
        if late.is_set():
            raise subprocess.TimeoutExpired(self.args[0], timeout, out)
        return out, None

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Parent:
    """The process that the others are forked from."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        environment.pop("XLA_FLAGS", None)
        command = [sys.executable, "-m", "tests.forked", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self.lines = self.socket.makefile("r", encoding="utf-8")
        self.codes: dict[int, int] = {}

    def _ask(self, request: dict[str, Any], *descriptors: int) -> Any:
        message = json.dumps(request).encode()
        with_fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self.socket.sendmsg([len(message).to_bytes(4, "big")], with_fds)
        self.socket.sendall(message)
        return json.loads(self.lines.readline())

    def end(self) -> None:
        self.lines.close()
        self.socket.close()
        self.process.wait()

    def start(self, script: str, arguments: Sequence[str], stdout: int) -> int:
        pid = self._ask({"script": script, "arguments": list(arguments)}, stdout)
        self.codes.pop(pid, None)  # Of an earlier process: pids come round again.
        return pid

    def code(self, pid: int) -> int | None:
        if pid not in self.codes:
            self.codes |= {int(ended): code for ended, code in self._ask({}).items()}
        return self.codes.get(pid)


_parents: dict[int, _Parent] = {}


def _parent() -> _Parent:
    """One for each process of pytest."""
    if os.getpid() not in _parents:
        _parents[os.getpid()] = _Parent()
        atexit.register(_parents[os.getpid()].end)
    return _parents[os.getpid()]


# --- in the process that is forked ------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> tuple[str, list[str]]:
    """Starts what it is asked for; returns in the child, with what that is to run."""
    running: set[int] = set()
    while True:
        head, descriptors, *_ = socket.recv_fds(connection, 4, 1)
        if not head:
            os._exit(0)  # pytest is gone.
        size, data = int.from_bytes(head, "big"), b""
        while len(data) < size:
            data += connection.recv(size - len(data))
        request = json.loads(data)
        if not descriptors:
            ended = {}
            for pid in list(running):
                if (found := os.waitpid(pid, os.WNOHANG))[0]:
                    ended[pid] = os.waitstatus_to_exitcode(found[1])
                    running.remove(pid)
            connection.sendall(json.dumps(ended).encode() + b"\n")
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            for stream in (1, 2):
                os.dup2(descriptors[0], stream)
            os.close(descriptors[0])
            return request["script"], request["arguments"]
        os.close(descriptors[0])
        running.add(pid)
        connection.sendall(json.dumps(pid).encode() + b"\n")


if __name__ == "__main__":
    import random
    import warnings

    import grain  # noqa: F401
    import jax
    import jax.experimental.multihost_utils
    import jax.numpy  # noqa: F401
    import numpy as np
    import optax  # noqa: F401

    import ckpt_jax.data
    import ckpt_jax.saver  # noqa: F401

    _script, _arguments = _serve(socket.socket(fileno=int(sys.argv[1])))
    warnings.resetwarnings()
    random.seed()
    np.random.seed()
    sys.argv = ["-c", *_arguments]
    exec(compile(_script, "<string>", "exec"), {"__name__": "__main__"})
