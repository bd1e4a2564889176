"""Threads that do what they are given, also while Python ends (no JAX)."""

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Self


def watched(work: Callable[[Callable[[int, int], None]], None], seconds: float = 0.1) -> Iterator[tuple[int, int]]:
    """Runs `work` in a thread, and gives the last that it told, now and then, until it has ended: done, and in all.

    If the caller is interrupted, the next time that it tells something it is interrupted too, and is waited for.
    """
    last, over = [(0, 0)], threading.Event()

    def told(done: int, total: int) -> None:
        if over.is_set():
            raise KeyboardInterrupt
        last[0] = done, total

    with Pool(1) as pool:
        future = pool.submit(work, told)
        try:
            while not future.done():
                yield last[0]
                concurrent.futures.wait([future], seconds)
            future.result()
        finally:
            over.set()
    yield last[0]


class Pool:
    """Up to so many threads; where none can be started any more the caller does the work.

    `concurrent.futures` takes nothing once the main thread has ended, but then a run's last save is often under way.
    At the end of a `with` it waits for what has begun; the rest is not done.
    """

    def __init__(self, count: int):
        self._count = count
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._over = False

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """The result to come of a call."""
        future: Future[Any] = Future()

        def run() -> None:
            if self._over or not future.set_running_or_notify_cancel():
                future.cancel()
                return
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001  Raised where the result is asked for.
                future.set_exception(error)

        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, daemon=True)
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._threads.append(thread)
        if self._threads:
            self._jobs.put(run)
        else:
            run()
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self._jobs.put(None)  # For the next one: Ctrl-C in `submit` may leave a thread that nobody counted.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._jobs.put(None)
        for thread in self._threads:
            thread.join()
