"""Another process's operations on files, each seen before it happens: recorded, failed, torn, held up, or its last.

The kernel asks (`seccomp_unotify`) before each system call that changes files, or reads them, from whichever thread it
comes, also from TensorStore's. `strace -e inject` counts for each thread by itself, so that most operations of a thread
that lives shortly could not be reached; this counts them in the order in which they come.
"""

import ctypes
import errno
import fcntl
import functools
import operator
import os
import platform
import re
import select
import socket
import struct
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.forked import Child

needs_linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="asks the Linux kernel, by its numbers on x86-64"
)


class Operation(NamedTuple):
    """A system call that is about to happen; or a line that the process prints.

    Attributes:
        kind: write, fsync, create (a file, or make it empty), rename, exchange, unlink, rmdir, mkdir, truncate; where
            reads are watched too, open, read, list and stat; say.
        path: which file or folder, relative to the root.
        to: what it is to be called, of a rename.
        at, data: what is to be written where; of a truncate, the size.
        thread: which one asks.
    """

    kind: str
    path: str
    to: str = ""
    at: int = 0
    data: bytes = b""
    thread: int = 0


class Hold(NamedTuple):
    """An answer: the operation happens once this returns, which is called in a thread of its own."""

    until: Callable[[], Any]


KILL = "kill"  # An answer: the process is killed before the operation happens,
TORN = "torn"  # or when half of what is to be written has been.
Answer = int | str | Hold | None  # An errno; None: it happens.
Decide = Callable[[Operation], Answer]

_CALLS = {  # Number: name, and which arguments are what.
    1: ("write", "fd", "buffer", "size"),
    18: ("write", "fd", "buffer", "size", "at"),
    20: ("write", "fd", "vector", "count"),
    296: ("write", "fd", "vector", "count", "at"),
    74: ("fsync", "fd"),
    75: ("fsync", "fd"),
    77: ("truncate", "fd", "at"),
    82: ("rename", "path", "to"),
    264: ("rename", "dirfd", "path", "todirfd", "to"),
    316: ("rename", "dirfd", "path", "todirfd", "to", "flags"),
    83: ("mkdir", "path"),
    258: ("mkdir", "dirfd", "path"),
    84: ("rmdir", "path"),
    87: ("unlink", "path"),
    263: ("unlink", "dirfd", "path", "flags"),
}
_OPENS = {2: ("create", "path", "flags"), 257: ("create", "dirfd", "path", "flags")}
# Nothing here understands these yet: who begins to use one is told so.
_OTHERS = dict.fromkeys([40, 76, 85, 86, 88, 265, 266, 275, 285, 326, 328, 425, 437], ("other",))
_FOR_WRITING = os.O_CREAT | os.O_TRUNC
_READS = {
    2: ("open", "path", "flags"),
    257: ("open", "dirfd", "path", "flags"),
    0: ("read", "fd"),
    17: ("read", "fd"),
    19: ("read", "fd"),
    295: ("read", "fd"),
    327: ("read", "fd"),
    78: ("list", "fd"),
    217: ("list", "fd"),
    4: ("stat", "path"),
    5: ("stat", "fd"),
    6: ("stat", "path"),
    262: ("stat", "dirfd", "path"),
    332: ("stat", "dirfd", "path"),
}

_RECEIVE, _SEND, _IS_VALID = 0xC0502100, 0xC0182101, 0x40082102  # SECCOMP_IOCTL_NOTIF_RECV, _SEND and _ID_VALID
_GO_ON = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE


# --- in the process that is watched -----------------------------------------------------------------------------------


class _Line(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("lines", ctypes.POINTER(_Line)))


def be_watched(address: str, reads: bool) -> None:
    """From here on each operation waits for the answer of who listens at the address."""
    load, equal, has_bits, give = 0x20, 0x15, 0x45, 0x06
    ask, allow = (give, 0, 0, 0x7FC00000), (give, 0, 0, 0x7FFF0000)
    lines = [(load, 0, 0, 0)]
    for number in _CALLS | _OTHERS | (_READS if reads else {}):
        lines += [(equal, 0, 1, number), ask]
    for number, (_, *arguments) in _OPENS.items() if not reads else ():
        flags = 16 + 8 * arguments.index("flags")
        lines += [(equal, 0, 4, number), (load, 0, 0, flags), (has_bits, 0, 1, _FOR_WRITING), ask, allow]
    lines.append(allow)
    program = _Program(len(lines), (_Line * len(lines))(*(_Line(*line) for line in lines)))
    libc = ctypes.CDLL(None, use_errno=True)
    with socket.socket(socket.AF_UNIX) as watcher:
        watcher.connect("\0" + address)
        no_new_privileges, seccomp, mode_filter, new_listener = 38, 317, 1, 8
        libc.prctl(no_new_privileges, 1, 0, 0, 0)
        fd = libc.syscall(seccomp, mode_filter, new_listener, ctypes.byref(program))
        if fd < 0:
            raise OSError(ctypes.get_errno(), "the kernel does not let a process be watched")
        socket.send_fds(watcher, [b"."], [fd])
        os.close(fd)


# --- in the process that watches --------------------------------------------------------------------------------------


@dataclass
class Watched:
    """A process that is watched, and what came of it once it has ended.

    Attributes:
        operations: all that it did, and printed, in order. Those that were held count as done when they were let go: so
            what did not wait for them comes before them.
        struck: those that failed, or that it was killed in.
    """

    child: Child
    operations: list[Operation] = field(default_factory=list)
    struck: list[Operation] = field(default_factory=list)

    @property
    def code(self) -> int | None:
        return self.child.returncode


def watch(script: str, root: Path, decide: Decide, *arguments: str, reads: bool = False) -> Watched:
    """Starts a script, and asks `decide` about each operation in the root and below, and each line that it prints."""
    address = f"torture-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + address)
        server.listen()
        server.settimeout(60)
        prologue = f"from tests.torture import syscalls; syscalls.be_watched({address!r}, {reads})"
        watched = Watched(Child(f"{prologue}\n{script}", *arguments))
        connection, _ = server.accept()
    with connection:
        _, (listener, *_), _, _ = socket.recv_fds(connection, 1, 1)
    threading.Thread(target=_Watcher(watched, str(root), listener, decide).run, daemon=True).start()
    return watched


@dataclass
class _Watcher:
    watched: Watched
    root: str
    listener: int
    decide: Decide

    def run(self) -> None:
        try:
            self._answer_all()
        except BaseException:
            self.watched.child.kill()
            raise
        finally:
            os.close(self.listener)

    def _answer_all(self) -> None:
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        while True:
            ((_, event),) = poll.poll()
            if not event & select.POLLIN:
                return  # All its threads have ended.
            asked = bytearray(80)
            try:
                fcntl.ioctl(self.listener, _RECEIVE, asked)
            except FileNotFoundError:  # Killed since it asked.
                continue
            key, thread, _, number, _, _, *values = struct.unpack("QIIiIQ6Q", asked)
            try:
                operation = self._operation(thread, number, values)
            except OSError:
                if self._is_asking(key):
                    raise
                continue
            if not self._is_asking(key):  # What was read may be of another process by now.
                continue
            answer = self.decide(operation) if operation else None
            if operation and isinstance(answer, int | str):
                self.watched.struck.append(operation)
            if answer in (KILL, TORN):
                if answer == TORN and operation:
                    self._tear(operation)
                self.watched.child.kill()
            elif isinstance(answer, Hold):
                threading.Thread(target=self._reply_late, args=[answer, key, operation], daemon=True).start()
            else:
                self._reply(key, answer, operation)

    def _is_asking(self, key: int) -> bool:
        """Whether the process is there still: it may have been killed since it asked."""
        try:
            fcntl.ioctl(self.listener, _IS_VALID, struct.pack("Q", key))
        except FileNotFoundError:
            return False
        return True

    def _reply_late(self, hold: Hold, key: int, operation: Operation | None) -> None:
        hold.until()
        self._reply(key, None, operation)

    def _reply(self, key: int, answer: object, operation: Operation | None) -> None:
        number = answer if isinstance(answer, int) else 0
        if operation and not number:
            self.watched.operations.append(operation)
        try:
            fcntl.ioctl(self.listener, _SEND, bytearray(struct.pack("QqiI", key, 0, -number, 0 if number else _GO_ON)))
        except OSError as error:  # Killed meanwhile; or all is over.
            if error.errno not in (errno.ENOENT, errno.EBADF):
                raise

    def _tear(self, operation: Operation) -> None:
        with open(os.path.join(self.root, operation.path), "r+b") as file:
            file.seek(operation.at)
            file.write(operation.data[: len(operation.data) // 2])

    # --- what it asked for ---

    def _operation(self, thread: int, number: int, values: list[int]) -> Operation | None:
        """None for one that is about nothing in the root."""
        kind, *names = (_CALLS | _OTHERS | _READS | _OPENS)[number]
        if kind == "other":
            raise NotImplementedError(f"system call {number}: what comes of it is not known here")
        given = dict(zip(names, values, strict=False))
        if kind == "create" and not given["flags"] & _FOR_WRITING:
            kind = "open"
        memory = functools.partial(_memory, thread)
        if "fd" in given:
            link = _link(thread, given["fd"])
            if kind == "write" and given["fd"] == 1 and not link.startswith("/"):
                return Operation("say", "", data=_data(given, memory))
            path = self._inside(link)
        else:
            path = self._inside(_path(thread, given.get("dirfd"), _text(memory, given["path"])))
        if path is None:
            return None
        if kind == "write":
            at = given["at"] if "at" in given else _position(thread, given["fd"])
            return Operation(kind, path, at=at, data=_data(given, memory), thread=thread)
        if kind == "rename":
            to = self._inside(_path(thread, given.get("todirfd"), _text(memory, given["to"])))
            assert to is not None, "out of the root"
            assert given.get("flags", 0) & ~2 == 0, "a flag that is not known here"
            return Operation("exchange" if given.get("flags", 0) else kind, path, to, thread=thread)
        if kind == "unlink" and given.get("flags", 0) & 0x200:  # AT_REMOVEDIR
            kind = "rmdir"
        if kind == "create" and not given["flags"] & os.O_TRUNC and os.path.exists(os.path.join(self.root, path)):
            return None  # Opened, and nothing changed; or O_EXCL, and refused.
        return Operation(kind, path, at=given.get("at", 0), thread=thread)

    def _inside(self, path: str) -> str | None:
        path = os.path.normpath(path)
        if path != self.root and not path.startswith(self.root + "/"):
            return None
        return os.path.relpath(path, self.root)


def _memory(thread: int, at: int, size: int) -> bytes:
    with open(f"/proc/{thread}/mem", "rb") as memory:
        memory.seek(at)
        found = memory.read(size)
    if len(found) < size:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return found


def _text(memory: Callable[[int, int], bytes], at: int) -> str:
    """A string, which ends with a zero: read up to the end of its page, and then of the next ones."""
    found = b""
    while b"\0" not in found:
        found += memory(at + len(found), 4096 - (at + len(found)) % 4096)
    return os.fsdecode(found.partition(b"\0")[0])


def _data(given: dict[str, int], memory: Callable[[int, int], bytes]) -> bytes:
    if "buffer" in given:
        return memory(given["buffer"], given["size"])
    pairs = struct.iter_unpack("QQ", memory(given["vector"], 16 * given["count"]))
    return functools.reduce(operator.add, (memory(at, size) for at, size in pairs), b"")


def _link(thread: int, fd: int) -> str:
    return os.readlink(f"/proc/{thread}/fd/{fd}")


def _position(thread: int, fd: int) -> int:
    """Where the next bytes go: at the end of a file that is opened to be appended to."""
    found = dict(re.findall(r"(pos|flags):\s+(\d+)", Path(f"/proc/{thread}/fdinfo/{fd}").read_text()))
    if int(found["flags"], 8) & os.O_APPEND:
        return os.stat(f"/proc/{thread}/fd/{fd}").st_size
    return int(found["pos"])


def _path(thread: int, dirfd: int | None, path: str) -> str:
    if path.startswith("/"):
        return path
    at_cwd = dirfd is None or dirfd & 0xFFFFFFFF == 0xFFFFFF9C
    return os.path.join(os.readlink(f"/proc/{thread}/cwd") if at_cwd else _link(thread, dirfd), path)
