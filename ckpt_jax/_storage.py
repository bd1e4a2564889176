"""Bytes by name in a folder, on any root: a file system or a bucket (no JAX)."""

import contextlib
import ctypes
import errno
import fcntl
import functools
import io
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import Exists, Fault, Unsupported

if TYPE_CHECKING:
    from ._direct import DirectFile

PathLike = str | os.PathLike[str]
F = TypeVar("F", bound=Callable[..., Any])

IDLE_SECONDS = 3600  # Where the file system has no locks: an attempt in which nothing moved for so long is dead.
BEGIN_SECONDS = 60  # A new, empty folder without a lock for longer: whoever made it was killed just there.
VALUES = 4  # Values of a bucket that are held at once: of data files, up to 256 MiB each.
CONCURRENCY = 8  # Files written or read at once: enough to have several fsyncs under way.

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)\Z", re.DOTALL)
# What the system says of a name that no file has: ELOOP of a link.
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENAMETOOLONG}
# TensorStore's own defaults wait 15 minutes for a server that is gone.
_RETRIES = {"max_retries": 6, "initial_delay": "200ms", "max_delay": "5s"}


@contextlib.contextmanager
def failures(place: "Folder") -> Iterator[None]:
    """Makes OSErrors of TensorStore's errors, which are ValueErrors whatever befell it."""
    try:
        yield
    except (ValueError, TimeoutError) as error:
        raise os_error(error, place) from error


# What older TensorStores make of the errors of a file system, whose numbers they do not tell.
_STATUS = {"RESOURCE_EXHAUSTED": errno.ENOSPC, "PERMISSION_DENIED": errno.EACCES}


def os_error(error: Exception, place: "Folder") -> OSError:
    """An error of TensorStore's as what it is: a full disk is ENOSPC."""
    if isinstance(error, OSError):
        return error
    text = str(error).partition(" [")[0]
    code = re.search(r"os_error_code='(\d+)'", str(error))
    status = _STATUS.get(text.partition(":")[0], errno.EIO) if place.local else errno.EIO
    number = int(code[1]) if code else status
    return OSError(number, f"{os.strerror(number)} ({text[:300]})", place.url)


# TensorStore's words for a service that does not answer, or not us, rather than for bytes that are odd. 416 is a file
# that is too short.
_TROUBLE = re.compile(
    r"(ABORTED|CANCELLED|DEADLINE_EXCEEDED|PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAUTHENTICATED|UNAVAILABLE):"
    r"|.*\[(http_response_code='(?!416)|curl_code=)",
    re.DOTALL,
)


def trouble(error: Exception, place: "Folder") -> OSError | None:
    """What kept something from being read, if it says nothing of the bytes: they may well be whole.

    None where the error is about what lies there: no such file, or not what was expected.
    """
    if isinstance(error, OSError):
        return None if error.errno in {*_NO_FILE, errno.EFBIG} else error
    return os_error(error, place) if _TROUBLE.match(str(error)) else None


class Unsure(OSError):
    """It is done, and a crash of the machine may undo it: the folder's entries could not be made durable."""


def _os_errors(method: F) -> F:
    """A method of Folder whose failures are OSErrors on a bucket too."""

    @functools.wraps(method)
    def call(self: "Folder", *arguments: Any, **named: Any) -> Any:
        with failures(self):
            return method(self, *arguments, **named)

    return call  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder and what can be done in it; names inside it use `/`."""

    url: str  # An absolute path, or a bucket's URL.

    @property
    def local(self) -> bool:
        """Whether it is on a file system, where a folder can be renamed and files are made durable by fsync."""
        return self.url.startswith("/")

    def __truediv__(self, name: str) -> "Folder":
        return Folder(f"{self.url.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The folder's own name; empty for a bucket."""
        return "" if self.parent == self else self.url.rpartition("/")[2]

    @property
    def parent(self) -> "Folder":
        """The folder above; a bucket's, and that of the root of a file system, is itself."""
        above = self.url.rpartition("/")[0]
        return self if above.endswith(":/") else Folder(above or "/")

    def _path(self, name: str) -> str:
        return os.path.join(self.url, name)

    # --- reading ---

    @_os_errors
    def read(self, name: str, start: int = 0, length: int = -1, *, most: int | None = None) -> bytes | None:
        """A file's bytes, or a part of them; None if there is no such file.

        Raises:
            OSError: EFBIG, on a file system: it is larger than `most`.
        """
        if self.local:
            fd = self._opened(name)
            if fd is None:
                return None
            with open(fd, "rb") as file:
                size = os.fstat(fd).st_size
                if most is not None and size > most:
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), self._path(name))
                file.seek(min(start, size))  # A stranger's tree may say any place, also one that no system call takes.
                return file.read(length)
        found = _kv(self).read(name).result()
        if found.state != "value":
            return None
        return found.value[start : start + length] if length >= 0 else found.value[start:]

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        """Fills a buffer from a place in a file (on a file system only); returns how many bytes there were."""
        fd = self._opened(name)
        if fd is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._path(name))
        try:
            done = 0
            if start >= os.fstat(fd).st_size:  # A stranger's tree may say one that no system call takes.
                return done
            while done < len(buffer) and (count := os.preadv(fd, [buffer[done:]], start + done)):
                done += count
            return done
        finally:
            os.close(fd)

    def _opened(self, name: str) -> int | None:
        """A file's descriptor; None if there is no such file. A link is none, nor is a pipe or a device.

        A stranger may have put it there: a link leads anywhere, a pipe waits for ever, a device has no end.
        """
        try:
            fd = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _NO_FILE or error.errno == errno.ENXIO:  # Of a socket; elsewhere a disk is gone.
                return None
            raise
        plain = False
        try:
            plain = stat.S_ISREG(os.fstat(fd).st_mode)
        finally:
            if not plain:
                os.close(fd)
        return fd if plain else None

    def plain(self, names: Iterable[str]) -> set[str]:
        """Which names are those of files, on a file system: not of links, nor of what lies behind a link.

        None is, if the folder itself is a link. A bucket has no links.
        """
        if not self.local:
            return set(names)
        return set() if self.is_link() else {name for name, size in self._sizes(names) if size is not None}

    @_os_errors
    def files(self) -> dict[str, int]:
        """Every file below the folder, by name, with its size."""
        return dict(self._files())

    def _files(self) -> Iterator[tuple[str, int]]:
        if not self.local:
            store = _kv(self)
            for key in store.list().result():
                name = key.decode("utf-8", "surrogateescape")
                if "/" in name and name.endswith("/"):
                    continue
                yield name, len(store.read(name).result().value)
            return
        for at, folders, names in os.walk(self.url, onerror=_unless_absent):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(at, name)
                with contextlib.suppress(FileNotFoundError):  # Deleted while we looked.
                    yield os.path.relpath(path, self.url), os.lstat(path).st_size

    @_os_errors
    def sizes(self, names: list[str]) -> dict[str, int | None]:
        """The sizes of some files; None for one that is not there."""
        if self.local:
            return dict(self._sizes(names))
        store = _kv(self)
        sizes: dict[str, int | None] = {}
        for at in range(0, len(names), VALUES):
            for name, read in [(name, store.read(name)) for name in names[at : at + VALUES]]:
                found = read.result()
                sizes[name] = len(found.value) if found.state == "value" else None
        return sizes

    def _sizes(self, names: Iterable[str]) -> Iterator[tuple[str, int | None]]:
        """The sizes of files; None for one that is not there, and for what no reader would open (`_opened`)."""

        @functools.cache  # A folder is looked at once, not for each of its files.
        def is_inside(folder: str) -> bool:
            return not folder or (is_inside(os.path.dirname(folder)) and not stat.S_ISLNK(_mode(self._path(folder))))

        for name in names:
            yield name, self._size(name) if is_inside(os.path.dirname(name)) else None

    def _size(self, name: str) -> int | None:
        try:
            found = os.lstat(self._path(name))
        except OSError as error:
            if error.errno in _NO_FILE:
                return None
            raise
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    @_os_errors
    def entries(self) -> list[str]:
        """The names of what lies directly in the folder; none if it is not there."""
        if self.local:
            try:
                return sorted(os.listdir(self.url))
            except OSError as error:
                if error.errno in _NO_FILE:
                    return []
                raise
        names = (key.decode("utf-8", "surrogateescape") for key in _kv(self).list().result())
        return sorted({name.partition("/")[0] for name in names})

    def exists(self) -> bool:
        """Whether anything is there: on a bucket, a folder exists by what it holds."""
        return _mode(self.url) != 0 if self.local else bool(self.entries())

    def is_link(self) -> bool:
        return self.local and stat.S_ISLNK(_mode(self.url))

    def is_folder(self) -> bool:
        """Whether it is a folder on a file system, or a link to one."""
        return self.local and _is_folder(self.url)

    # --- writing ---

    def write(self, name: str, data: bytes) -> None:
        """Writes a file and makes it durable; its folder's entry is made durable by `sync`."""
        with self.writing(name) as file:
            file.write(data)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator["DirectFile | io.BytesIO"]:
        """A file to be written piece by piece, which is durable in the end, as by `write`."""
        if not self.local:
            file = io.BytesIO()
            yield file
            with failures(self):
                _kv(self).write(name, file.getvalue()).result()
            return
        from ._direct import DirectFile  # Here: it takes NumPy, which who lists a root has no need of.

        with _naming(self._path(name)), DirectFile(self._path(name)) as file:
            yield file

    def replace(self, name: str, data: bytes) -> None:
        """Puts a file in the place of another at once and durably: a reader sees the old one or the new one, whole."""
        if not self.local:
            self.write(name, data)
            return
        try:
            self.write(name + ".tmp", data)
            os.replace(self._path(name + ".tmp"), self._path(name))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(self._path(name + ".tmp"))
            raise
        _fsync(os.path.dirname(self._path(name)))  # Not `sync`: a root has many folders below it.

    @_os_errors
    def create(self, name: str, data: bytes) -> bool:
        """Writes a file if there is none of that name; says whether it is now there with these bytes."""
        if self.local:
            try:
                with open(self._path(name), "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except FileExistsError:
                return self.read(name) == data
            return True
        # b"\x02" is TensorStore's "no value". A lost answer makes the retry see our own object: hence the read-back.
        written = _kv(self).write(name, data, if_equal=b"\x02").result()
        return written.generation != b"" or self.read(name) == data

    def make(self, *folders: str) -> None:
        """Makes the folder and those below it, each durable in the one above."""
        if not self.local:
            return
        missing = []
        at = self.url
        while not _is_folder(at):
            missing.append(at)
            at = os.path.dirname(at)
        for path in reversed(missing):
            while not _is_folder(path):  # Another process may be first, or take a new attempt for a leftover.
                try:
                    os.mkdir(path)
                except FileExistsError as error:
                    if _mode(path) and not _is_folder(path):
                        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error
            _fsync(os.path.dirname(path))
        for name in folders:
            os.makedirs(self._path(name), exist_ok=True)

    def sync(self) -> None:
        """Makes the entries of this folder and of all below it durable (its files are, as they were written)."""
        if self.local:
            for at, _, _ in os.walk(self.url, topdown=False, onerror=_unless_absent):
                _fsync(at)

    def sync_files(self, names: Iterable[str]) -> None:
        """Makes files durable that a process wrote which was killed: it may not have come to that."""
        for name in names if self.local else ():
            fd = self._opened(name)
            if fd is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._path(name))
            try:
                with _naming(self._path(name)):
                    os.fsync(fd)
            finally:
                os.close(fd)

    @_os_errors
    def remove(self, *, first: str = "") -> None:
        """Deletes the folder with all that is in it; never through a link. `first` goes before all else."""
        if self.local:
            if self.is_link():
                os.unlink(self.url)
                return
            shutil.rmtree(self.url, onerror=_unless_gone)
            return
        store = _kv(self)
        if first:
            store.write(first, None).result()
        for key in store.list().result():
            store.write(key, None).result()

    @_os_errors
    def unlink(self, name: str) -> None:
        if self.local:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(name))
        else:
            _kv(self).write(name, None).result()

    # --- renaming (file systems only) ---

    def rename(self, to: "Folder") -> None:
        """Gives the folder another name, durably.

        Raises:
            Exists: something stands there (an empty folder gives way).
            Unsure: it has its new name, but not durably.
        """
        try:
            os.rename(self.url, to.url)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
                raise Exists(
                    f"{to} came to be while this save was under way",
                    hint="does another process save to the same path? The first one counts",
                ) from error
            raise
        to._settle()

    def exchange(self, other: "Folder") -> bool:
        """As `rename`, of two folders that get each other's name in one step; False if the system has no such call."""
        if not _exchange(self.url, other.url):
            return False
        other._settle()
        return True

    def _settle(self) -> None:
        """Makes the folder's new name durable."""
        try:
            _fsync(os.path.dirname(self.url))
        except OSError as error:
            why = f"{error.strerror}: this folder is in place, but a crash of the machine may undo that"
            raise Unsure(error.errno, why, self.url) from error

    def lock(self) -> int | None:
        """Marks the folder as in use until this process ends or `unlock` is called with what is returned.

        None if the folder is gone: someone took it for a leftover before it was locked.
        """
        for attempt in range(3):
            try:
                fd = os.open(self.url, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            with contextlib.suppress(OSError):  # No locks here (NFS, Lustre): others then go by time.
                fcntl.flock(fd, fcntl.LOCK_EX)
            with contextlib.suppress(OSError):
                # Another may have come in its place meanwhile. Some file systems number a folder anew each time.
                if os.path.samestat(os.stat(self.url), os.fstat(fd)) or attempt == 2:
                    _locks.add(fd)
                    return fd
            os.close(fd)
        return None

    def identity(self) -> str:
        """Which folder or link bears this name now; empty if none does, and on a bucket."""
        try:
            found = os.lstat(self.url) if self.local else None
        except OSError:
            return ""
        return f"{found.st_dev}:{found.st_ino}" if found is not None else ""

    def is_locked(self) -> bool:
        """Whether somebody holds the folder's lock; no, where there are no locks."""
        try:
            fd = os.open(self.url, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        finally:
            os.close(fd)
        return False

    def in_use(self) -> bool:
        """Whether a living process writes in the folder."""
        fd = self._idle()
        if fd is not None:
            os.close(fd)
        return fd is None

    def just_made(self) -> bool:
        """Whether whoever made the folder may be about to lock it: it is new, and nothing is in it yet."""
        return not self.entries() and time.time() - _modified(self.url) < BEGIN_SECONDS

    def remove_if_idle(self) -> bool:
        """Deletes the folder unless a living process writes in it; holds its lock meanwhile."""
        fd = self._idle()
        if fd is None:
            return False
        try:
            self.remove()
        finally:
            os.close(fd)
        return True

    def _idle(self) -> int | None:
        """The folder, locked, if nobody else has it so; None if somebody has, or if it is gone."""
        try:
            fd = os.open(self.url, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError:  # No locks here: an attempt is dead if nothing has moved in it for long.
            with contextlib.suppress(OSError):  # Nor where it cannot be seen whether something does.
                walk = os.walk(self.url, onerror=_unless_absent)
                paths = (os.path.join(at, name) for at, _, names in walk for name in ("", *names))
                if time.time() - max(map(_modified, paths), default=0) > IDLE_SECONDS:
                    return fd
        else:
            with contextlib.suppress(OSError):
                if _mode(self.url):  # Else it was committed since it was opened.
                    return fd
        os.close(fd)
        return None

    # --- TensorStore ---

    def spec(self) -> dict[str, Any]:
        """The folder as a TensorStore kvstore."""
        if self.local:
            return {"driver": "file", "path": self.url + "/"}
        scheme, _, rest = self.url.partition("://")
        if scheme == "memory":
            return {"driver": "memory", "path": rest + "/"}
        bucket, _, path = rest.partition("/")
        if scheme == "gs":
            return {"driver": "gcs", "bucket": bucket, "path": path + "/", "gcs_request_retries": _RETRIES}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return {
            "driver": "s3",
            "bucket": bucket,
            "path": path + "/",
            "s3_request_retries": _RETRIES,
            "use_conditional_write": False,  # Ceph 16 refuses every If-Match, and TensorStore then retries for ever.
            **({"endpoint": endpoint} if endpoint else {}),
        }

    def context(self) -> Any:
        """A TensorStore context for one save or restore; a shared one would grow with each."""
        import tensorstore as ts

        if self.url.startswith("memory://"):
            return _memory()
        # The cache holds OCDBT's tree nodes, which are otherwise read anew for each key.
        return ts.Context(
            {
                "file_io_concurrency": {"limit": CONCURRENCY},
                "cache_pool": {"total_bytes_limit": 64 << 20},
                # Each process writes in a folder of its own; some file systems (NFS, Lustre) have no locks at all.
                "file_io_locking": {"mode": "none"},
            }
        )


_locks: set[int] = set()


def unlock(lock: int) -> None:
    """Gives back what `Folder.lock` returned."""
    _locks.discard(lock)
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)  # Also for a worker that was forked when nobody knew of this lock yet.
    os.close(lock)


def _after_fork() -> None:
    """A worker that was forked amid a save has its locks too, and would keep them when who saved is dead."""
    for lock in _locks:
        os.close(lock)
    _locks.clear()


os.register_at_fork(after_in_child=_after_fork)


def folder(path: PathLike) -> Folder:
    """The folder at a path: `~` and relative paths are resolved now, so that a later chdir changes nothing.

    Raises:
        TypeError: the path is no str or os.PathLike.
        Unsupported: it is a URL of a kind that nothing here can read.
    """
    if path is None:
        raise TypeError("the path is None, as ckpt_jax.latest returns where there is no checkpoint")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a path is a str or os.PathLike of one, not {type(path).__name__}")
    if not text.strip():
        raise ValueError("the path is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"a path is text in UTF-8, and this is not: {text!r}") from None
    if "\0" in text:
        raise ValueError(f"a path holds no NUL: {text!r}")
    found = _URL.match(text)
    if found is None:
        return Folder(os.path.abspath(os.path.expanduser(text)))
    scheme, rest = found[1].lower(), found[2]
    if scheme == "file" and rest.startswith("/"):
        return Folder(os.path.abspath(rest))
    if scheme not in ("gs", "s3", "memory", "file"):
        raise Unsupported(
            f"no storage is known for {text}", [Fault(text, "a folder, gs://, s3:// or memory://", f"{scheme}://")]
        )
    if scheme == "file" or not rest.strip("/") or rest.startswith("/"):
        raise ValueError(f"this path names no {'folder' if scheme == 'file' else 'bucket'}: {text}")
    return Folder(f"{scheme}://{rest.strip('/')}")


@functools.cache
def _memory() -> Any:
    """One context for memory:// in this process: its contents live as long as this."""
    import tensorstore as ts

    return ts.Context()


def _kv(place: Folder) -> Any:
    import tensorstore as ts

    return ts.KvStore.open(place.spec(), context=place.context()).result()


def _mode(path: str, *, follow: bool = False) -> int:
    """What lies at a path; 0 if nothing does.

    Not `os.path.exists` and its like, by which a disk that is in trouble has nothing on it.
    """
    try:
        return os.stat(path, follow_symlinks=follow).st_mode
    except OSError as error:
        if error.errno in _NO_FILE:
            return 0
        raise


def _is_folder(path: str) -> bool:
    return stat.S_ISDIR(_mode(path, follow=True))


def _modified(path: str) -> float:
    """When something was last changed there; 0 if nothing is there."""
    try:
        return os.lstat(path).st_mtime
    except OSError as error:
        if error.errno in _NO_FILE:
            return 0
        raise


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Says which file an OSError is about, where Python does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise


def _unless_gone(_: Any, path: str, failure: Any) -> None:
    """What `rmtree` calls on an error: another process may be removing the same folder."""
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]


def _unless_absent(error: OSError) -> None:
    """What `os.walk` calls on an error, which it would pass over: as if there were nothing in a folder."""
    if error.errno not in _NO_FILE:
        raise error


def _fsync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(a: str, b: str) -> bool:
    """Linux's renameat2(RENAME_EXCHANGE) or macOS's renamex_np(RENAME_SWAP); Python has neither."""
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = os.fsencode(a), os.fsencode(b)
    if hasattr(libc, "renameat2"):
        at_cwd = -100
        done = libc.renameat2(at_cwd, source, at_cwd, target, 2)
    elif hasattr(libc, "renamex_np"):
        done = libc.renamex_np(source, target, 2)
    else:
        return False
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), a, None, b)
