"""One checkpoint's copy: its files, read back before the manifest makes it count (no JAX)."""

import contextlib
import errno
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from . import _commit, _faults, _manifest, _storage, _threads, _verify
from ._manifest import Manifest
from ._storage import Folder
from .errors import CheckpointError, Corrupt, Exists, Fault, NotFound

PIECE = 16 << 20  # Bytes of a file that are held at once; of a bucket's, which TensorStore reads whole, all of them.
WORKERS = _storage.VALUES  # Files that are copied at once.
FULL = {errno.ENOSPC, errno.EDQUOT}

Bytes = tuple[int, int]  # Done, and in all.


@dataclass(slots=True)
class Sums:
    """How far it is: bytes to write and to read back, those done, and those that were written."""

    total: int
    done: int = 0
    written: int = 0

    def more(self, size: int) -> Bytes:
        self.done += size
        return self.done, max(self.total, self.done)


def copy(source: Folder, target: Folder, sums: Sums, full: OSError | None = None) -> Generator[Bytes, None, bool]:
    """Copies a checkpoint; says whether that was to be done at all.

    Args:
        source, target: its folder, and the one to be.
        sums: how far it is; goes on with it.
        full: what befell a copy before this one, where the disk is full: then it is not tried.

    Raises:
        Exists: another one is there, or its copy is being written by another process.
        Corrupt: it is damaged, or what is there already.
        NotFound: it was deleted or replaced meanwhile.
        OSError: it cannot be read or written; on a disk that is full what was written is gone again.
    """
    data = _commit.data_of(source)
    if data is None:
        raise _faults.gone(source)
    manifest = _manifest.loads(data, source.url)
    if _manifest.NAME in manifest.files:  # A stranger's: in a bucket it would count before all is there.
        raise Corrupt(f"{source} contradicts itself", [Fault(_manifest.NAME, "not to list itself", "that it does")])
    if _is_there(target, manifest):
        _settle(source, target, manifest)  # Whoever was killed had perhaps not come to that.
        return False
    if full is not None:
        raise OSError(full.errno, f"not tried, as the disk is full: {os.strerror(full.errno or 0)}", target.url)
    if source.local and (faults := _faults.of_files(source, manifest)):  # Also of what lies behind a link.
        raise _faults.damaged(source, faults)
    try:
        attempt = _commit.take_up(target, manifest.seal[:16], manifest.state)
    except Exists:
        if not _is_there(target, manifest):
            raise
        return False  # Another process has just come to the end of it.
    try:
        yield from _fill(source, attempt.folder, manifest, sums)
        if target.local:
            _copy_beside(source, attempt.folder, manifest)
        _commit.commit(attempt, manifest, data)
    except (CheckpointError, OSError) as error:
        if isinstance(error, CheckpointError) or error.errno in {*FULL, errno.EFBIG}:
            _commit.discard(attempt)  # Of what else befell it, or if it is interrupted, the next call goes on.
        raise
    finally:
        attempt.close()
    _settle(source, target, manifest)
    return True


def _settle(source: Folder, target: Folder, manifest: Manifest) -> None:
    """What follows a commit: it makes the copy neither more nor less of a checkpoint."""
    if not target.local:
        with contextlib.suppress(OSError):
            _copy_beside(source, target, manifest)
    _commit.point(target, manifest)


def _is_there(target: Folder, manifest: Manifest) -> bool:
    """Whether this very checkpoint is at the target; raises where something else is, or where it is not whole."""
    try:
        found = _commit.load_data(target)
    except NotFound:
        return False
    if found.seal != manifest.seal:
        raise Exists(f"another checkpoint is at {target}: its seal is {found.seal[:12]}…, not {manifest.seal[:12]}…")
    if _commit.is_bad(target):
        raise Corrupt(f"{target} is there already, and marked as damaged; delete it, and copy it again")
    # In a bucket the manifest is put last, and to ask the size of a file is to read it.
    if missing := _commit.missing_files(target, found) if target.local else []:
        raise Corrupt(f"{target} is there already, and damaged; delete it, and copy it again", missing)
    return True


def _fill(source: Folder, folder: Folder, manifest: Manifest, sums: Sums) -> Iterator[Bytes]:
    """Brings all files to the folder, but those that are there, and reads them back."""
    files = manifest.files
    if folder.local:
        _tidy(folder, manifest)
    sizes = folder.sizes(list(files))
    there = {path for path, file in files.items() if sizes[path] == file.bytes}
    folder.sync_files(there)
    yield sums.more(sum(files[path].bytes for path in there))
    wrong = files.keys() - there
    for last in (False, True):
        yield from _transfer(source, folder, {path: files[path].bytes for path in wrong}, sizes, sums)
        if not (wrong := (yield from _differing(folder, manifest, sizes, sums))):
            return
        _check(source, manifest)
        if last:
            named = ", ".join(sorted(wrong)[:3])
            raise OSError(errno.EIO, f"what was written comes back as something else, twice: {named}", folder.url)


def _tidy(folder: Folder, manifest: Manifest) -> None:
    """Makes the folders of all files, which are no links; what another put there besides goes."""
    for path in sorted({parent for file in manifest.files for parent in _parents(file)}):
        if (folder / path).is_link() or not (folder / path).is_folder():
            folder.unlink(path)
        folder.make(path)
    for path in folder.files():
        if path not in manifest.files:
            folder.unlink(path)


def _parents(path: str) -> Iterator[str]:
    parts = path.split("/")[:-1]
    return ("/".join(parts[: count + 1]) for count in range(len(parts)))


def _transfer(
    source: Folder, folder: Folder, files: dict[str, int], sizes: dict[str, int | None], sums: Sums
) -> Iterator[Bytes]:
    """Copies files, some at once, the largest first; notes their sizes. Ends where the source has too little."""
    with _threads.Pool(WORKERS) as pool:
        ordered = sorted(files, key=lambda path: -files[path])
        jobs = [(path, pool.submit(_copy_file, source, folder, path, files[path])) for path in ordered]
        for path, job in jobs:
            sizes[path] = size = job.result()
            sums.written += size
            if size != files[path]:
                return
            yield sums.more(size)


def _copy_file(source: Folder, folder: Folder, path: str, size: int) -> int:
    """Copies a file of this size, and says how much of it there was."""
    if folder.local:
        folder.unlink(path)  # Not into what is there: that may be a link, or have another name too.
    done = 0
    with folder.writing(path) as out:
        for piece in _pieces(source, path, size):
            out.write(piece)
            done += len(piece)
    return done


def _pieces(source: Folder, path: str, size: int) -> Iterator[memoryview]:
    """A file's first bytes, as far as there are any; each piece is gone when the next one comes."""
    if not source.local:
        if data := source.read(path):
            yield memoryview(data)[:size]
        return
    buffer = memoryview(bytearray(min(size, PIECE)))
    for at in range(0, size, PIECE):
        piece = buffer[: min(PIECE, size - at)]
        try:
            count = source.read_into(path, at, piece)
        except FileNotFoundError:
            return
        except OSError as error:
            error.filename = error.filename or (source / path).url
            raise
        if count:
            yield piece[:count]


def _differing(
    folder: Folder, manifest: Manifest, sizes: dict[str, int | None], sums: Sums
) -> Generator[Bytes, None, set[str]]:
    """Reads all back; the files that are not what the manifest says."""
    if folder.local:  # In a bucket a value is put whole or not at all, and to ask its size is to read it.
        sizes = folder.sizes(list(manifest.files))
    if wrong := {path for path, file in manifest.files.items() if sizes[path] != file.bytes}:
        return wrong
    seen, before = _verify.Seen(), 0
    for done in _verify.contents(folder, manifest, seen):
        yield sums.more(done - before)
        before = done
    if seen.unread:
        raise seen.unread[0]
    return seen.files(folder, manifest)


def _check(source: Folder, manifest: Manifest) -> None:
    """Raises what is wrong with the source, if it is the source: Corrupt, or NotFound where it is another meanwhile."""
    _verify.still_there(source, manifest)
    _verify.verify(source.url).check()
    _verify.still_there(source, manifest)


def _copy_beside(source: Folder, target: Folder, manifest: Manifest) -> None:
    """Copies what Orbax looks for beside the arrays, where the manifest does not list it."""
    for path in _commit.BESIDE:
        if path in manifest.files or target.read(path, 0, 1) is not None:
            continue
        if (data := source.read(path, most=PIECE)) is not None:
            target.write(path, data)
