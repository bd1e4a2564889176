"""Verify: is every file there, and every chunk what was saved? (no JAX)"""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

import xxhash

from . import _chunks, _commit, _faults, _formats, _reading, _storage, _units, _values, _zarr
from ._manifest import Manifest
from .errors import CheckpointError, Fault, NotFound, Unsupported

Level = Literal["files", "chunks"]
PIECE = 64 << 20  # Bytes of a file that are read at once.


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found.

    Attributes:
        path: the checkpoint.
        level: how far it looked.
        faults: all that is wrong; empty if nothing is.
        unread: the errors of those of them that could not be read, and may be whole.
        chunks: chunks read back and compared.
        bytes: their bytes.
        seconds: how long it took.
    """

    path: str
    level: Level
    faults: tuple[Fault, ...]
    chunks: int
    bytes: int
    seconds: float
    unread: tuple[OSError, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        if self.ok:
            chunks = f"{self.chunks:,} chunks read back, all as they were saved"
            read = chunks if self.level == "chunks" else "all files there"
            return f"{self.path}: {read} ({_values.human(self.bytes)}, {self.seconds:.1f} s)"
        places = _units.several(len(self.faults), "place")
        what = "damaged" if len(self.unread) < len(self.faults) else "not to be read now, which may be no damage,"
        return "\n".join([f"{self.path}: {what} in {places}:", *(f"  {fault}" for fault in self.faults)])

    def check(self) -> None:
        """Raises Corrupt with all faults, if there is one; OSError, if all that is known is what cannot be read."""
        if self.faults and len(self.unread) == len(self.faults):
            first = self.unread[0]
            raise OSError(first.errno, str(self), self.path) from first
        if self.faults:
            raise _faults.damaged(_storage.folder(self.path), list(self.faults), verified=True)


def verify(path: _storage.PathLike, level: Level = "chunks") -> Report:
    """Checks a checkpoint without restoring it; starts no device.

    Args:
        path: a committed checkpoint.
        level: `"files"`: the manifest is whole, and every file is there with its size. `"chunks"`: also every small
            file and every chunk has its digest, and the arrays say of themselves what the manifest says of them.

    Returns:
        A `Report` of everything that is wrong; `report.check()` raises if there is something.

    Raises:
        NotFound: nothing is committed at `path`.
        Unsupported: it is in a format without digests.

    >>> import numpy as np, ckpt_jax as ck
    >>> _ = ck.save("memory://docs/verify", {"w": np.ones(3)})
    >>> report = ck.verify("memory://docs/verify")
    >>> report.ok, report.chunks, report.bytes
    (True, 1, 24)
    """
    *_, report = progress(path, level)
    assert isinstance(report, Report)
    return report


def progress(path: _storage.PathLike, level: Level = "chunks") -> Iterator[tuple[int, int] | Report]:
    """As `verify`, step by step: (bytes checked, bytes in all) after each chunk, and the report at the end."""
    if level not in ("files", "chunks"):
        raise ValueError(f'level is "files" or "chunks", not {level!r}')
    started = time.perf_counter()
    place = _storage.folder(path)
    try:
        manifest = _commit.load(place)
    except NotFound as error:
        if (found := _formats.orbax(place)) is not None and found.view is not None:
            raise Unsupported(
                f"{place} is in the format of {found.view.kind}, which has no digests that it could be checked by",
                hint=f"`ckpt-jax import {place} …` makes a checkpoint of it that has",
            ) from error
        raise
    except CheckpointError as error:
        yield Report(
            place.url, level, error.faults or (Fault("MANIFEST.json", "a manifest", error.summary),), 0, 0, 0.0
        )
        return
    faults = _faults.of_files(place, manifest)
    seen = Seen()
    if level == "chunks":
        total = manifest.nbytes
        for done in contents(place, manifest, seen, {fault.place for fault in faults}):
            yield done, max(total, done)
        faults += seen.faults(place, manifest)
        if faults:
            still_there(place, manifest)
    seconds = time.perf_counter() - started
    yield Report(place.url, level, tuple(faults), seen.chunks, seen.bytes, seconds, tuple(seen.unread))


@dataclass(slots=True)
class Seen:
    """What `contents` has read, and what of it is not what was saved: small files, chunks, headers of arrays."""

    chunks: int = 0
    bytes: int = 0
    small: list[Fault] = field(default_factory=list)
    bad: list[tuple[_reading.Wanted, _reading.Found]] = field(default_factory=list)
    headers: list[Fault] = field(default_factory=list)
    unread: list[OSError] = field(default_factory=list)

    def faults(self, place: _storage.Folder, manifest: Manifest) -> list[Fault]:
        chunks = _faults.chunk_faults(place, manifest, self.bad) if self.bad else []
        return [*self.small, *chunks, *self.headers]

    def files(self, place: _storage.Folder, manifest: Manifest) -> set[str]:
        """The files that are not what was saved: where it is not known which, all of the arrays'."""
        found = {fault.place for fault in self.small}
        if self.bad:
            found |= set(_faults.files_of(place, manifest, [chunk for chunk, _ in self.bad]))
        if self.headers or "" in found:
            found |= {path for path in manifest.files if path.startswith(f"{manifest.state}/")}
        return found - {""}


def contents(place: _storage.Folder, manifest: Manifest, seen: Seen, known: Collection[str] = ()) -> Iterator[int]:
    """Reads all that has a digest, but the files in `known`, and notes it in `seen`; yields the bytes of chunks so far.

    The manifest need not be there yet.
    """
    seen.small += _sidecar_faults(place, manifest, known, seen.unread)
    source = _reading.Source(place / manifest.state, manifest.state_files)
    requests = (
        chunk
        for name, leaf in manifest.leaves.items()
        if leaf.stored
        for chunk in _reading.wanted(name, leaf, _chunks.covering(_chunks.whole(leaf.shape), leaf.chunk), crc=True)
    )
    for chunk, done_with, found in _reading.read(requests, [source]):
        if done_with is None:
            seen.bad.append((chunk, found))
        seen.chunks += 1
        seen.bytes += chunk.size
        yield seen.bytes
    seen.unread += [found for _, found in seen.bad if isinstance(found, OSError)]
    seen.headers += _header_faults(source, manifest, seen.unread)


def still_there(place: _storage.Folder, manifest: Manifest) -> None:
    """Raises NotFound where the checkpoint was deleted or replaced meanwhile: then its chunks prove nothing."""
    if (error := _faults.vanished(place, manifest)) is not None:
        raise error


def _sidecar_faults(
    place: _storage.Folder, manifest: Manifest, known: Collection[str], unread: list[OSError]
) -> Iterator[Fault]:
    for path, file in manifest.files.items():
        if not file.digest or path in known:
            continue
        digest = xxhash.xxh3_128()
        try:
            for at in range(0, file.bytes, PIECE):
                digest.update(place.read(path, at, PIECE) or b"")
        except OSError as error:
            unread.append(error)
            yield Fault(path, f"digest {file.digest[:12]}…", str(error))
            continue
        found = digest.hexdigest()
        if found != file.digest:
            yield Fault(path, f"digest {file.digest[:12]}…", f"{found[:12]}…")


def _header_faults(source: _reading.Source, manifest: Manifest, unread: list[OSError]) -> Iterator[Fault]:
    """Where an array's own zarr.json, by which others read it, does not say what the manifest does."""
    stored = {name: leaf for name, leaf in manifest.leaves.items() if leaf.stored}
    reads = {name: source.small(f"{name}/zarr.json") for name in stored}
    for name, answer in reads.items():
        expected = _zarr.zarr_json(stored[name])
        try:
            value = _reading.value_of(answer)
            found = source.nothing if value is None else "" if value == expected else "another"
        except (ValueError, OSError) as error:
            found = _reading.short(error)
            if (trouble := _storage.trouble(error, source.place)) is not None:
                unread.append(trouble)
        if found:
            yield Fault(name, "its zarr.json as it was written", found)
