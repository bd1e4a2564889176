"""Formats: which one a checkpoint is in, told by what lies there (no JAX)."""

import importlib
import warnings
from typing import NamedTuple

from . import _commit, _from_own, _storage
from ._manifest import Manifest
from ._storage import Folder
from ._view import View
from .errors import Fault, NotFound

# The modules that read them, by the names that users give; tried in this order. Each is imported when it is needed.
READERS = {
    "orbax": "_from_orbax",
    "safetensors": "_from_safetensors",
    "numpy": "_from_numpy",
    "torch": "_from_torch",
    "jax": "_from_jax",
    "msgpack": "_from_msgpack",
}
OURS = "ckpt_jax"
_told: set[str] = set()  # The formats of which was said what they lack.


class Found(NamedTuple):
    """A checkpoint that can be read in place: its manifest, and the view of it where it is not one of ours."""

    manifest: Manifest
    view: View | None = None


def load(place: Folder) -> Found:
    """A checkpoint of ours, or one of Orbax's, which is read in place.

    Raises:
        NotFound: there is neither.
        Corrupt: it is damaged.
    """
    try:
        return Found(_commit.load(place))
    except NotFound as error:
        found = orbax(place)
        if found is None:
            raise error from None
        return found


def orbax(place: Folder) -> Found | None:
    """An Orbax checkpoint that Orbax wrote; None if there is none. Says once what such a one lacks."""
    reader = _reader("orbax")
    if not reader.is_here(place):
        return None
    view: View = reader.view(place)
    tell(view)
    return Found(view.manifest(), view)


def tell(view: View) -> None:
    """Says what a format cannot offer, once a process for each format."""
    if view.lacks and view.kind not in _told:
        _told.add(view.kind)
        lacks = " and ".join(view.lacks)
        warnings.warn(
            f"{view.path} is in the format of {view.kind}, which has no {lacks}: damage may go unnoticed. "
            f"`ckpt-jax import` makes a checkpoint of it that notices. (This is said once.)",
            stacklevel=4,
        )


def view(path: _storage.PathLike, kind: str | None = None) -> View:
    """What a checkpoint in any format holds.

    Args:
        path: a file or a folder.
        kind: one of `READERS`, or `"ckpt_jax"`; found out from what lies there if it is not given.

    Raises:
        NotFound: there is nothing, or nothing that is known.
        CheckpointError: it is damaged, or holds what cannot be read; tells all of it.
    """
    place = _storage.folder(path)
    if kind is None:
        kind = recognised(place)
    if kind == OURS:
        return _from_own.view(place)
    return _reader(kind).view(place)


def recognised(place: Folder) -> str:
    """The name of the format that something is in.

    Raises:
        NotFound: there is nothing, or nothing that is known.
    """
    try:
        _commit.load(place)
    except NotFound as error:
        if not place.exists():
            raise
        for kind in READERS:
            if _reader(kind).is_here(place):
                return kind
        hint = f"--from takes one of {', '.join(READERS)}" if place.is_folder() or not place.local else error.hint
        fault = Fault(place.url, f"a checkpoint, of ckpt_jax or of {', '.join(READERS)}", "none that is known")
        raise NotFound(f"{place} is no checkpoint", [fault], hint=hint) from None
    return OURS


def _reader(kind: str):
    return importlib.import_module(f".{READERS[kind]}", __package__)
