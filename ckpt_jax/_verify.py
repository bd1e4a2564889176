"""Verify: is every file there, and every chunk what was saved? (no JAX)"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
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
    unread: list[OSError] = []
    chunks = done = 0
    if level == "chunks":
        faults += _sidecar_faults(place, manifest, {fault.place for fault in faults}, unread)
        total = manifest.nbytes
        bad = []
        source = _reading.Source(place / manifest.state, manifest.state_files)
        requests = (
            chunk
            for name, leaf in manifest.leaves.items()
            if leaf.stored
            for chunk in _reading.wanted(name, leaf, _chunks.covering(_chunks.whole(leaf.shape), leaf.chunk), crc=True)
        )
        for chunk, done_with, found in _reading.read(requests, [source]):
            if done_with is None:
                bad.append((chunk, found))
            chunks += 1
            done += chunk.size
            yield done, max(total, done)
        if bad:
            faults += _faults.chunk_faults(place, manifest, bad)
            unread += [found for _, found in bad if isinstance(found, OSError)]
        faults += _header_faults(source, manifest, unread)
        if faults:
            still_there(place, manifest)
    yield Report(place.url, level, tuple(faults), chunks, done, time.perf_counter() - started, tuple(unread))


def still_there(place: _storage.Folder, manifest: Manifest) -> None:
    """Raises NotFound where the checkpoint was deleted or replaced meanwhile: then its chunks prove nothing."""
    if (error := _faults.vanished(place, manifest)) is not None:
        raise error


def _sidecar_faults(
    place: _storage.Folder, manifest: Manifest, known: set[str], unread: list[OSError]
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
