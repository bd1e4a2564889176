"""Python's garbage collector, paused while many objects are made that stay (no JAX)."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collection within: each would look through all of JAX's objects and find nothing, in up to 0.3 s.

    For bookkeeping, which takes a moment: other threads' garbage waits for it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
