"""Chunks smaller than those of a real checkpoint, so that a small array has several."""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

from ckpt_jax import _chunks, _snapshot


@contextlib.contextmanager
def cells_of(cell_bytes: int = _chunks.CELL_BYTES, *, share: int = _chunks.SHARE_BYTES) -> Iterator[None]:
    """Cells of at most so many bytes, and boxes shared out if each gets at least `share`."""
    grid = functools.partial(_chunks.grid, cell_bytes=cell_bytes)
    with mock.patch.object(_chunks, "SHARE_BYTES", share), mock.patch.object(_chunks, "grid", grid):
        _snapshot._layout.cache_clear()  # It remembers how arrays were cut.
        try:
            yield
        finally:
            _snapshot._layout.cache_clear()
