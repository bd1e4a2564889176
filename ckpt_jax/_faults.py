"""What to say about what cannot be read: which leaf, which chunk, which file, and whether that is damage (no JAX)."""

import contextlib

from . import _commit, _manifest, _reading, _units
from ._manifest import Manifest
from ._ocdbt import Tree
from ._storage import Folder
from .errors import Corrupt, Fault, NotFound


def damaged(place: Folder, faults: list[Fault], *, verified: bool = False) -> Corrupt:
    """What to say about a checkpoint whose bytes are not the ones that were saved; `verified` if all were looked at."""
    hints = [] if _commit.step_of(place.name) is None else [f"`ckpt-jax ls {place.parent}` lists older steps"]
    hints += [] if verified else [f"`ckpt-jax verify {place}` checks every chunk"]
    many = _units.several(len(faults), "place")
    return Corrupt(f"{place} is damaged in {many}", faults, hint="; ".join(hints))


def gone(place: Folder) -> NotFound:
    """What to say when a checkpoint vanished under a reader."""
    return NotFound(
        f"{place} was replaced or deleted while being read",
        hint="if it was replaced, try again; `ckpt-jax ls` on the folder above lists what is there",
    )


def unreadable(place: Folder, manifest: Manifest, bad: list[tuple[_reading.Wanted, _reading.Found]]) -> Exception:
    """What to say about chunks that did not come back as they were written.

    An OSError where none came back wrong, and some not at all: nobody knows then that they are damaged.
    """
    if (error := vanished(place, manifest)) is not None:
        return error
    faults = chunk_faults(place, manifest, bad)
    causes = [found for _, found in bad if isinstance(found, OSError)]
    if len(causes) < len(bad):
        return damaged(place, faults)
    more = f" (and {len(bad) - 1:,} more)" if len(bad) > 1 else ""
    told = f"{causes[0].strerror or causes[0]}: {faults[0].place}, {faults[0].expected.partition(':')[0]}{more}"
    return OSError(causes[0].errno, f"{told} could not be read; that is not known to be damage", place.url)


def vanished(place: Folder, manifest: Manifest) -> NotFound | None:
    """A NotFound where the checkpoint was deleted or replaced since its manifest was read."""
    now = place.read(_manifest.NAME)
    return None if now is not None and manifest.seal.encode() in now[-100:] else gone(place)


def chunk_faults(place: Folder, manifest: Manifest, bad: list[tuple[_reading.Wanted, _reading.Found]]) -> list[Fault]:
    files = files_of(place, manifest, [chunk for chunk, _ in bad])
    faults = []
    for (chunk, found), file in zip(bad, files, strict=True):
        at = f"chunk {list(chunk.coords)} in {file or f'{manifest.state}/manifest.ocdbt and the tree it points to'}"
        faults.append(Fault(chunk.name, f"{at}: digest {chunk.digest[:12]}…", str(found)))
    return faults


def files_of(place: Folder, manifest: Manifest, chunks: list[_reading.Wanted]) -> list[str]:
    """The file that each chunk lies in; "" where the tree of keys does not tell."""
    tree = _tree(place, manifest)
    files = []
    for chunk in chunks:
        value = None
        with contextlib.suppress(OSError):  # What cannot be read may be the tree itself.
            value = tree.find(chunk.key)
        files.append(f"{manifest.state}/{value.file}" if value is not None else "")
    return files


def _tree(place: Folder, manifest: Manifest) -> Tree:
    arrays = place / manifest.state
    return Tree(arrays, arrays.plain(manifest.state_files))


def of_files(place: Folder, manifest: Manifest) -> list[Fault]:
    """Files that are not there or not of their size, each with the leaves that live in it.

    Raises:
        NotFound: the whole checkpoint is gone meanwhile.
    """
    faults = _commit.missing_files(place, manifest)
    if not faults:
        return []
    if (error := vanished(place, manifest)) is not None:
        raise error
    inside: dict[str, set[str]] = {}
    with contextlib.suppress(OSError):  # Then it is not told which leaves live there.
        for key, file in _tree(place, manifest).files():
            inside.setdefault(f"{manifest.state}/{file}", set()).add(key.partition("/")[0])
    named = []
    for fault in faults:
        leaves = sorted(inside.get(fault.place, ()))
        note = (
            f" (holds {', '.join(leaves[:5])}{f' and {len(leaves) - 5} more' if len(leaves) > 5 else ''})"
            if leaves
            else ""
        )
        named.append(Fault(fault.place, fault.expected, fault.found + note))
    return named
