"""A file written past the page cache, where the file system lets one (no JAX)."""

import errno
import fcntl
import mmap
import os
from types import TracebackType
from typing import Self

import numpy as np

UNIT = 1 << 20  # Bytes that the disk is given at once, from memory that is aligned as it asks for.

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux has it.
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectFile:
    """A new file, written from its beginning to its end, which is durable once its `with` is left.

    The page cache would take a copy and fresh memory for every byte, which training could use:
    `docs/decisions/0007` has the figures.
    """

    def __init__(self, path: str):
        self._buffer = np.frombuffer(mmap.mmap(-1, UNIT), np.uint8)
        self._used = 0
        self._direct = bool(_DIRECT)
        try:
            self._fd = os.open(path, _FLAGS | _DIRECT, 0o666)
        except OSError as error:
            if not self._direct or error.errno not in _REFUSED:
                raise
            self._fd, self._direct = os.open(path, _FLAGS, 0o666), False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Takes all of it; it may be changed afterwards."""
        rest = np.frombuffer(data, np.uint8)
        while rest.size:
            count = min(rest.size, UNIT - self._used)
            self._buffer[self._used : self._used + count] = rest[:count]  # NumPy lets other threads run meanwhile.
            rest, self._used = rest[count:], self._used + count
            if self._used == UNIT:
                self._flush()

    def _flush(self) -> None:
        rest = self._buffer[: self._used]
        while rest.size:
            try:
                rest = rest[os.write(self._fd, rest.data) :]
            except OSError as error:
                if not self._direct or error.errno not in _REFUSED:
                    raise
                self._use_cache()  # Some file systems open the file, and refuse then.
        self._used = 0

    def _use_cache(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~_DIRECT)
        self._direct = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                if self._direct:  # What is left is no whole block.
                    self._use_cache()
                self._flush()
                os.fsync(self._fd)
        finally:
            os.close(self._fd)
