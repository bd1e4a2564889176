"""Commit: a checkpoint is there from the moment its manifest is, and never half (no JAX).

On a file system all is written in an attempt folder beside the target, made durable, and renamed. On a bucket each
attempt writes below a name of its own, and the manifest, which comes last, is a create-only put.
"""

import contextlib
import errno
import itertools
import json
import os
import platform
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from . import _manifest, _storage, _units
from ._manifest import Manifest
from ._storage import Folder, Unsure
from .errors import CheckpointError, Corrupt, Exists, Fault, NotFound

TMP = ".orbax-checkpoint-tmp-"  # Orbax takes no folder for a checkpoint whose name holds this.
BAD = "BAD.json"
LATEST = "LATEST"

_STEP = re.compile(r"0|[1-9][0-9]{0,17}")
_OLD = "old"  # The attempt folder that holds what is being replaced, where two folders cannot be exchanged.


def step_of(name: str) -> int | None:
    """The step that a folder's name stands for, if it is one: digits, no leading zero."""
    return int(name) if _STEP.fullmatch(name) else None


# --- one checkpoint ---------------------------------------------------------------------------------------------------


def load(place: Folder) -> Manifest:
    """The manifest of a committed checkpoint.

    Raises:
        NotFound: nothing is committed there.
        Corrupt: the manifest is damaged.
        Unsupported: a newer version wrote it.
    """
    data = data_of(place)
    if data is None:
        raise _not_found(place)
    manifest = _manifest.loads(data, place.url)
    check_step(place, manifest)
    return manifest


def check_step(place: Folder, manifest: Manifest) -> None:
    """Raises Corrupt where a folder's name is a step, and its manifest records another."""
    named = step_of(place.name)
    if named is not None and manifest.step not in (None, named):
        raise Corrupt(
            f"{place} holds another step's manifest",
            [Fault(_manifest.NAME, f"step {named}, as the folder's name says", f"step {manifest.step}")],
            hint=f"if the folder was renamed, name it {manifest.step} again, or something that is no number",
        )


def _not_found(place: Folder) -> NotFound:
    entries = place.entries()
    if found := steps(place) if entries else []:
        newest = place / str(found[-1])
        return NotFound(
            f"{place} is a root of {_units.several(len(found), 'checkpoint')}, not one",
            hint=f'its newest is "{newest}"; ckpt_jax.latest("{place}") gives that path',
        )
    if entries:
        return NotFound(
            f"there is no checkpoint at {place}: it has no {_manifest.NAME}",
            [Fault(place.url, _manifest.NAME, _few(entries))],
            hint="a save that did not finish does not count; `ckpt-jax ls` on the folder above lists what does",
        )
    if place.is_link() and not place.is_folder():
        return NotFound(f"{place} is a link that leads nowhere", hint="is a disk not mounted?")
    if place.local and place.exists() and not place.is_folder():
        return NotFound(f"{place} is a file, not a checkpoint's folder", hint="give the folder that it lies in")
    above = []
    with contextlib.suppress(OSError):  # It is for advice only.
        above = steps(place.parent)
    hint = f"{place.parent} has the steps {', '.join(map(str, above[-5:]))}" if above else "check the path"
    return NotFound(f"there is nothing at {place}", hint=hint)


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def missing_files(place: Folder, manifest: Manifest) -> list[Fault]:
    """Which files are not there, or not of the size that the manifest tells."""
    sizes = place.sizes(list(manifest.files))
    return [
        Fault(path, f"{file.bytes:,} bytes", _absent(place / path) if sizes[path] is None else f"{sizes[path]:,} bytes")
        for path, file in manifest.files.items()
        if sizes[path] != file.bytes
    ]


def _absent(file: Folder) -> str:
    return "no plain file (links are not followed)" if file.local and file.exists() else "no such file"


# --- a root of steps --------------------------------------------------------------------------------------------------


def steps(root: Folder, *, bad: bool = False) -> list[int]:
    """The committed steps in a root, in ascending order: each has a whole manifest that records that step."""
    found = []
    for step in reversed(candidates(root)):
        place = root / str(step)
        try:
            if load_data(place).step == step and is_bad(place) == bad:
                found.append(step)
        except CheckpointError:
            continue
    return found


def load_data(place: Folder) -> Manifest:
    """As `load`, with a plain NotFound: it looks nowhere else."""
    data = data_of(place)
    if data is None:
        raise NotFound(f"there is no checkpoint at {place}")
    return _manifest.loads(data, place.url)


def data_of(place: Folder) -> bytes | None:
    """A manifest's bytes; None if there is none."""
    try:
        return place.read(_manifest.NAME, most=_manifest.LARGEST)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise _manifest.too_large(place.url) from error


def candidates(root: Folder) -> list[int]:
    """What looks like a step by its name, the newest first."""
    return sorted((step for name in root.entries() if (step := step_of(name)) is not None), reverse=True)


def is_bad(place: Folder) -> bool:
    """Whether a step was marked as damaged."""
    return place.read(BAD, 0, 1) is not None


def was_one(place: Folder) -> bool:
    """Whether what can no longer be taken for a checkpoint was one: a step's folder comes whole, so that is damage.

    Its manifest is gone, or is no plain file; or a link leads nowhere, as where a disk is not mounted. In a bucket any
    attempt that did not come to its end looks like that.
    """
    if not place.local:
        return False
    lost = place.is_link() and not place.is_folder()
    return lost or any(_is_ours(name) or name == _manifest.NAME for name in place.entries())


def aside(place: Folder, word: str) -> Folder:
    """Gives a folder another name, which says what befell it and when, and under which it counts no longer."""
    name = f"{place.name}.{word}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    to = next(place.parent / free for free in names if not (place.parent / free).exists())
    place.rename(to)
    return to


def good(root: Folder, unread: dict[int, OSError] | None = None) -> Iterator[tuple[int, Manifest]]:
    """The steps whose manifest is whole, whose files are all there, and that nobody marked; the newest first.

    Raises:
        OSError: one cannot be read; unless such are to be noted in `unread`.
    """
    for step in candidates(root):
        place = root / str(step)
        try:
            manifest = load_data(place)
            while missing_files(place, manifest):
                before, manifest = manifest, load_data(place)
                if manifest.seal == before.seal:  # Else it was replaced just now.
                    break
            else:
                if manifest.step == step and not is_bad(place):
                    yield step, manifest
        except CheckpointError:
            continue
        except OSError as error:
            if unread is None:
                raise
            unread[step] = error


def latest(root: Folder) -> Folder | None:
    """The newest good step."""
    return next((root / str(step) for step, _ in good(root)), None)


def delete(place: Folder) -> OSError | None:
    """Deletes a checkpoint so that no reader ever sees a part of it; returns what kept its space from being freed."""
    if not place.local or place.is_link():
        place.remove(first=_manifest.NAME)
        return None
    gone = place.parent / f"{place.name}{TMP}{secrets.token_hex(8)}"
    try:
        place.rename(gone)
    except FileNotFoundError:  # Another process is deleting it.
        return None
    try:
        gone.remove()
    except OSError as error:
        return error
    return None


def clear(target: Folder, but: str = "") -> None:
    """Removes what dead attempts at this checkpoint left behind, but one; a living writer's folder is left alone."""
    if not target.local:
        return
    for name in target.parent.entries():
        if not name.startswith(target.name + TMP) or name == but:
            continue
        leftover = target.parent / name
        if name.endswith(TMP + _OLD) and not target.exists() and leftover.is_folder() and not leftover.is_link():
            # Killed between the two renames of a replacement, the old one is the newest. Whoever lives has it locked.
            if not leftover.is_locked():
                with contextlib.suppress(Exists, FileNotFoundError):  # Or just came to the end of it.
                    leftover.rename(target)
        else:
            with contextlib.suppress(OSError):  # It is in nobody's way; `ckpt-jax ls` goes on telling of it.
                leftover.remove_if_idle()


def clear_all(root: Folder) -> None:
    """As `clear`, for every name in a root: also what was being deleted when a process was killed."""
    for base in {name.partition(TMP)[0] for name in root.entries() if TMP in name} if root.local else ():
        clear(root / base)


def mark_bad(place: Folder, why: str) -> None:
    """Marks a committed step, so that nobody takes it for a good one again; it is not deleted."""
    told = {"why": why, "time": time.time(), "host": platform.node(), "pid": os.getpid()}
    with contextlib.suppress(OSError):  # A root that is read-only: then it is found damaged again the next time.
        place.replace(BAD, json.dumps(told).encode() + b"\n")


def point_back(place: Folder) -> None:
    """Makes LATEST name a step although a later one was named."""
    manifest = load(place)
    place.parent.unlink(LATEST)
    point(place, manifest)


# --- an attempt -------------------------------------------------------------------------------------------------------


@dataclass
class Attempt:
    """One attempt to write a checkpoint: where its files go until it counts.

    Once it is `placed`, its folder has the target's name, and under its own may lie what it replaced. What a run has
    `refused`, told by its identity, and stands in the way, is put aside.
    """

    target: Folder
    folder: Folder
    nonce: str
    overwrite: bool = False
    state: str = "state"
    refused: str = ""
    placed: bool = False
    lock: int | None = field(default=None, repr=False)

    def home(self, index: int) -> str:
        """The name of the folder that one process writes in, so that none waits for another."""
        return f"{self.state}/ocdbt.process_{index}"

    def process(self, index: int) -> Folder:
        """The key space that one process writes."""
        return self.folder / self.home(index)

    def close(self) -> None:
        if self.lock is not None:
            _storage.unlock(self.lock)
            self.lock = None


def check_free(target: Folder, *, overwrite: bool) -> None:
    """Raises Exists unless a checkpoint may be written at `target`."""
    if TMP in target.name:
        raise ValueError(f"a checkpoint's name does not hold {TMP!r}, which marks what is not finished: {target}")
    if target.parent != target and target.parent.read(_manifest.NAME, 0, 1) is not None:
        raise Exists(f"{target} would lie inside the checkpoint {target.parent}", hint="choose another path")
    if not target.exists():
        return
    if target.local and (target.is_link() or not target.is_folder()):
        raise Exists(f"a file or link is in the way: {target}", hint="choose another path; ckpt_jax does not delete it")
    entries = target.entries()
    if _manifest.NAME in entries:
        if not overwrite:
            raise Exists(
                f"there is a checkpoint at {target} already",
                hint="overwrite=True replaces it, once the new one is whole",
            )
        foreign = _foreign(target, entries)
    elif not target.local and all(map(_is_ours, entries)):
        return  # In a bucket: what another attempt writes, or a dead one left.
    else:
        foreign = entries
    if not foreign:
        return
    found = Fault(target.url, "nothing, or an empty folder", _few(foreign))
    if any(step_of(name) is not None for name in foreign):
        raise Exists(f"{target} is a root of steps", [found], hint=f'save one in it: "{target / "1000"}"')
    raise Exists(f"{target} holds files that are not ckpt_jax's to delete", [found], hint="choose another path")


def _foreign(target: Folder, entries: list[str]) -> list[str]:
    """What lies in a checkpoint's folder and does not belong to it; in a bucket nobody looks."""
    if not target.local:
        return []
    try:
        known = set(load(target).files)
    except (CheckpointError, OSError):  # Damaged, or another step's: then what is ours is told by the names.
        return [name for name in entries if not _is_ours(name) and name not in {_manifest.NAME, BAD, f"{BAD}.tmp"}]
    known |= {*BESIDE, _manifest.NAME, BAD, f"{BAD}.tmp"}
    return [name for name in target.files() if name not in known]


# What Orbax looks for beside the arrays. The manifest of a bucket's checkpoint does not list it, nor that of its copy.
BESIDE = ("_CHECKPOINT_METADATA", "orbax.checkpoint", "commit_success.txt")


def _is_ours(name: str) -> bool:
    """Whether a name in a checkpoint's folder is one that we give: in a bucket, and its copies, arrays have a nonce."""
    return name == "state" or name in BESIDE or name.startswith("state.")


def begin(target: Folder, *, overwrite: bool, refused: str = "") -> Attempt:
    """Starts an attempt, in one process: the way is free, leftovers are gone, and there is a folder to write in.

    Where what stands in the way is what a run has refused to resume from, that is put aside later.
    """
    try:
        check_free(target, overwrite=overwrite)
        refused = ""
    except (Exists, OSError):  # OSError: it cannot even be looked into.
        if not refused or target.identity() != refused:
            raise
    nonce = secrets.token_hex(8)
    if not target.local:
        return Attempt(target, target, nonce, overwrite, f"state.{nonce}")
    target.parent.make()
    clear(target)
    attempt = Attempt(target, target.parent / f"{target.name}{TMP}{nonce}", nonce, overwrite, refused=refused)
    try:
        while attempt.lock is None:  # Another save of this step may take the new folder for a leftover.
            attempt.folder.make()
            attempt.lock = attempt.folder.lock()
        attempt.folder.make(f"{attempt.state}/array_metadatas")
    except BaseException:
        abandon(attempt)
        raise
    return attempt


def take_up(target: Folder, nonce: str, state: str, *, overwrite: bool = False) -> Attempt:
    """Starts an attempt of a given nonce, or goes on with it where its process was killed: its files are still there.

    Raises:
        Exists: the way is not free, or a living process has this attempt.
    """
    if not target.local:
        check_free(target, overwrite=overwrite)
        return Attempt(target, target, nonce, overwrite, state)
    target.parent.make()
    folder = target.parent / f"{target.name}{TMP}{nonce}"
    if folder.is_link() or (folder.exists() and not folder.is_folder()):
        target.parent.unlink(folder.name)  # Its name can be foretold: nothing is written where another had it lead.
    if folder.exists() and folder.in_use():
        raise Exists(
            f"another process writes {target} at this moment",
            [Fault(folder.url, "nobody at work in it", "a lock, or, where there are no locks, a change not long ago")],
            hint="wait until it has ended, and try again",
        )
    clear(target, but=folder.name)
    attempt = Attempt(target, folder, nonce, overwrite, state)
    try:
        while attempt.lock is None:  # As in `begin`; or it was committed just now, which `check_free` finds.
            attempt.folder.make()
            attempt.lock = attempt.folder.lock()
        check_free(target, overwrite=overwrite)
    except BaseException:
        discard(attempt)
        raise
    return attempt


def join(target: Folder, nonce: str, state: str) -> Attempt:
    """The attempt that another process began.

    Raises:
        NotFound: its folder is not to be seen here, so the processes do not share this root.
    """
    folder = target.parent / f"{target.name}{TMP}{nonce}" if target.local else target
    if target.local and not folder.exists():
        raise NotFound(
            f"{folder} cannot be seen from this process",
            hint="all processes must save to storage that they share",
        )
    return Attempt(target, folder, nonce, state=state)


def commit(attempt: Attempt, manifest: Manifest, data: bytes | None = None) -> None:
    """Makes the attempt the checkpoint: from here on it exists. A copy's manifest has these very bytes."""
    data = _manifest.dumps(manifest) if data is None else data
    _manifest.loads(data, attempt.target.url)  # Before it counts: what could not be read would be lost.
    if attempt.target.local:
        attempt.folder.write(_manifest.NAME, data)
        attempt.folder.sync()
        _put_in_place(attempt)
    elif attempt.overwrite:  # One put takes the old one's place, whose files go; those of another attempt are its own.
        old: set[str] = set()
        with contextlib.suppress(CheckpointError):
            old = set(load_data(attempt.target).files)
        attempt.target.write(_manifest.NAME, data)
        for path in (old - set(manifest.files)) | {BAD}:
            attempt.target.unlink(path)
    elif not attempt.target.create(_manifest.NAME, data):
        raise Exists(
            f"{attempt.target} came to be while this save was under way",
            hint="does another process save to the same path? The first one counts",
        )
    attempt.close()
    point(attempt.target, manifest)


def _put_in_place(attempt: Attempt) -> None:
    """Gives the attempt the target's name; what it replaces goes once that is durable."""
    target, old = attempt.target, None
    try:
        if attempt.refused and target.identity() == attempt.refused:
            with contextlib.suppress(Unsure):  # The next one makes both durable.
                aside(target, "set-aside")
            attempt.folder.rename(target)
        elif attempt.overwrite and _manifest.NAME in target.entries():
            old = _replace(attempt)
        else:
            attempt.folder.rename(target)
    except Unsure:
        attempt.placed = True
        raise
    attempt.placed = True
    if old is not None:
        with contextlib.suppress(OSError):  # It is a leftover then, which the next save of this step removes.
            if old != attempt.folder:  # Under a name that nobody takes for what a crash left of a replacement.
                old.rename(attempt.folder)
            attempt.folder.remove()


def _replace(attempt: Attempt) -> Folder:
    """Puts the attempt in the place of a checkpoint; returns where that is now."""
    target = attempt.target
    if attempt.folder.exchange(target):
        return attempt.folder
    lock = target.lock()  # Waits for another who replaces it, and tells who clears up that nobody was killed here.
    if lock is None:
        raise Exists(
            f"{target} was replaced or deleted while this save was under way",
            hint="does another process save to the same path?",
        )
    old = target.parent / f"{target.name}{TMP}{_OLD}"
    try:
        with contextlib.suppress(Unsure):  # The next one makes both durable.
            target.rename(old)
        try:
            attempt.folder.rename(target)
        except Unsure:
            raise
        except BaseException:
            with contextlib.suppress(Exists, FileNotFoundError, Unsure):  # Another took the name, or did it.
                old.rename(target)
            raise
    finally:
        _storage.unlock(lock)
    return old


def abandon(attempt: Attempt) -> None:
    """Removes what an attempt wrote; nothing of it was ever visible."""
    attempt.close()
    if not attempt.placed:
        leave(attempt)


def discard(attempt: Attempt) -> None:
    """As `abandon`, of an attempt that was taken up: as the next one has the same name, it is unlocked last.

    In a bucket nothing is removed: another may have written the same bytes under the same names, and count on them.
    """
    if attempt.lock is not None and not attempt.placed:
        with contextlib.suppress(OSError):  # What ended the attempt is more to the point.
            attempt.folder.remove()
    attempt.close()


def leave(attempt: Attempt) -> None:
    """What another process than the first does with an attempt that failed.

    What it wrote after the first had removed all goes too.
    """
    with contextlib.suppress(OSError):  # What ended the attempt is more to the point.
        (attempt.folder if attempt.target.local else attempt.folder / attempt.state).remove()


def point(target: Folder, manifest: Manifest) -> None:
    """Writes the root's LATEST: a hint for people and tools, which `latest` never trusts."""
    if step_of(target.name) != manifest.step or manifest.step is None:
        return
    try:
        old = target.parent.read(LATEST)
        named = int(json.loads(old)["step"]) if old else -1
        if named > manifest.step and (target.parent / str(named)).exists():
            return
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, OSError):
        pass  # Whatever it says, it is a hint, and is written anew.
    hint = json.dumps({"step": manifest.step, "seal": manifest.seal}).encode() + b"\n"
    with contextlib.suppress(OSError, ValueError):  # The checkpoint is committed; a full disk cannot undo that.
        target.parent.replace(LATEST, hint)
