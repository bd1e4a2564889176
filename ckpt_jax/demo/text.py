"""The text: the source of this Python's standard library, as bytes."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np


def files() -> list[Path]:
    """The library's modules, in the same order every time.

    Raises:
        FileNotFoundError: this Python keeps its library in an archive.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(path for path in folder.glob("*.py") if path.is_file())
    if not found:
        raise FileNotFoundError(f"no source files in {folder} to train on")
    return found


def read(paths: Sequence[Path]) -> np.ndarray:
    """All files, one after the other, as uint8[n]."""
    return np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)


def batches(text: np.ndarray, *, context: int, batch: int, seed: int) -> grain.DatasetIterator[dict[str, np.ndarray]]:
    """Batches without end: every window of the text once, in random order, then again in another one.

    How far it has come is its `get_state()`, so it stands in a checkpoint as a leaf like any other.

    Returns:
        An iterator over `{"position": int[batch], "tokens": uint8[batch, context + 1]}`; a position is the sample's
        first byte in the text, and the last token is there to be predicted.
    """

    def window(number: int) -> dict[str, Any]:
        start = number * context
        return {"position": start, "tokens": text[start : start + context + 1]}

    count = (len(text) - 1) // context
    windows = grain.MapDataset.range(count).shuffle(seed=seed).map(window)
    return iter(windows.repeat().batch(batch).to_iter_dataset())
