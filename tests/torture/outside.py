"""Which files are opened that lie outside of a root: by Python, and on Linux by any code in this process."""

import ctypes
import os
import struct
import sys
import sysconfig
from pathlib import Path
from typing import Any

_IN_ACCESS, _IN_OPEN = 0x1, 0x20
_EVENT = struct.Struct("iIII")  # inotify(7): watch, mask, cookie, length of the name

# What Python and its libraries open on their own: modules that are imported only when they are needed.
_OWN = tuple({os.path.realpath(path) + "/" for path in (*sysconfig.get_paths().values(), *sys.path[1:]) if path})
_OWN += (os.path.realpath(Path(__file__).parents[2]) + "/ckpt_jax/", "/proc/", "/dev/null")

_noted: list[str] | None = None  # What Python opens now, if anyone wants to know; an audit hook cannot be taken back.


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _noted is None or event not in ("open", "os.listdir", "os.scandir"):
        return
    path = arguments[0]
    if not isinstance(path, (str, bytes, os.PathLike)):
        return  # A descriptor: it was opened before.
    path = os.fsdecode(path)
    flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
    if flags & os.O_NOFOLLOW:  # Of a link only the way to it counts: it is not followed.
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    _noted.append(path if flags & os.O_NOFOLLOW else os.path.realpath(path))


sys.addaudithook(_note)


class Outside:
    """Watches what is opened outside of a root; `with` gives a list that is full afterwards.

    Args:
        root: what may be opened.
        folders: where TensorStore's C++ code is watched too, of which Python's audit hooks hear nothing.
    """

    def __init__(self, root: Path, *folders: Path):
        self.root = os.path.realpath(root)
        self.found: list[str] = []
        self.fd, self.names = -1, {}
        if sys.platform == "linux":
            libc = ctypes.CDLL(None, use_errno=True)
            self.fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            inside = [path for folder in folders[1:] for path in folder.rglob("*") if path.is_dir()]
            for folder in (*folders, *inside):
                watch = libc.inotify_add_watch(self.fd, os.fsencode(folder), _IN_ACCESS | _IN_OPEN)
                assert watch >= 0, os.strerror(ctypes.get_errno())
                self.names[watch] = str(folder)

    def __enter__(self) -> list[str]:
        global _noted  # noqa: PLW0603
        self._events()
        self.found = []
        _noted = []
        return self.found

    def __exit__(self, *_: object) -> None:
        global _noted
        opened, _noted = _noted or [], None
        inside = (self.root, self.root + "/")
        self.found += [p for p in opened if p != inside[0] and not p.startswith((inside[1], *_OWN))]
        self.found += [path for path in self._events() if path != self.root]

    def _events(self) -> list[str]:
        """The paths that were opened or read in the folders that are watched, by whatever code."""
        data, paths = b"", []
        while self.fd >= 0:
            try:
                data += os.read(self.fd, 1 << 16)
            except BlockingIOError:
                break
        while data:
            watch, _, _, length = _EVENT.unpack_from(data)
            name = data[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
            data = data[_EVENT.size + length :]
            folder = self.names.get(watch, "?")
            paths.append(os.path.join(folder, os.fsdecode(name)) if name else folder)
        return paths
