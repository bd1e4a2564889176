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


def windows(text: np.ndarray, *, context: int) -> grain.MapDataset[dict[str, Any]]:
    """The text cut into samples, in order: `{"position": int, "tokens": uint8[context + 1]}`.

    A position is the sample's first byte in the text; the last token is there to be predicted.
    """

    def window(number: int) -> dict[str, Any]:
        start = number * context
        return {"position": start, "tokens": text[start : start + context + 1]}

    return grain.MapDataset.range((len(text) - 1) // context).map(window)
