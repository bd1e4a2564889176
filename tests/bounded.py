"""A look that takes neither long nor much memory, or is stopped."""

import contextlib
import faulthandler
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def bounded(seconds: int = 20, extra: int = 1 << 30) -> Iterator[None]:
    """A hang is interrupted, and an allocation of more than `extra` bytes beyond what there is fails."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError):  # There is no such file but on Linux.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra, limits[1]))
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(6 * seconds, exit=True)  # A loop in C hears no alarm.
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
