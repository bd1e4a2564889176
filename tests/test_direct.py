"""Files written past the page cache hold what they were given, whatever the file system and the kernel take."""

import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_jax._direct import UNIT, DirectFile

SIZES = st.one_of(st.integers(0, 9000), st.sampled_from([UNIT - 1, UNIT, UNIT + 1, 2 * UNIT, 3 * UNIT + 4097]))
SHM = [pytest.param("/dev/shm", marks=pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no memory disk here"))]


def pieces(sizes: list[int]) -> list[bytes]:
    return [bytes([i % 251]) * size for i, size in enumerate(sizes, 1)]


def written(path: Path, parts: list[bytes]) -> bytes:
    with DirectFile(str(path)) as file:
        for part in parts:
            scratch = bytearray(part)
            file.write(scratch)
            scratch[:] = b"\xff" * len(scratch)  # Its memory is the caller's again.
    return path.read_bytes()


@pytest.mark.parametrize("folder", [None, *SHM])
@settings(deadline=None)  # A disk takes as long as it takes.
@given(sizes=st.lists(SIZES, max_size=6))
def test_a_file_holds_what_was_written(folder, sizes):
    """On a disk, and on one that may know nothing of O_DIRECT."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        path = Path(made) / "file"
        for parts in (pieces(sizes), pieces(sizes[::-1])):  # The second goes over the first.
            assert written(path, parts) == b"".join(parts)


def direct_works(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except (AttributeError, OSError):
        return False
    return True


def test_whole_units_go_past_the_cache_and_the_rest_through_it(tmp_path, monkeypatch):
    if not direct_works(tmp_path):
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    write, seen = os.write, []

    def watched(fd, data):
        seen.append((len(data), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return write(fd, data)

    monkeypatch.setattr(os, "write", watched)
    written(tmp_path / "file", pieces([3 * UNIT + 5]))
    assert seen == [(UNIT, True)] * 3 + [(5, False)]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_where_a_direct_write_is_refused_the_cache_is_used(tmp_path, monkeypatch, number):
    write = os.write

    def refusing(fd, data):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
            raise OSError(number, os.strerror(number))
        return write(fd, data)

    monkeypatch.setattr(os, "write", refusing)
    parts = pieces([UNIT, 7, 2 * UNIT])
    assert written(tmp_path / "file", parts) == b"".join(parts)


def test_where_opening_it_is_refused_the_cache_is_used(tmp_path, monkeypatch):
    opening = os.open

    def refusing(path, flags, *mode):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return opening(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)
    parts = pieces([UNIT + 3, 7])
    assert written(tmp_path / "file", parts) == b"".join(parts)


@pytest.mark.parametrize("most", [1000, 4096, 100_001])
def test_a_kernel_that_takes_less_at_once_gets_the_rest_again(tmp_path, monkeypatch, most):
    """After an odd number of bytes the disk's alignment is lost, and the kernel itself refuses to go on directly."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:most]))
    parts = pieces([UNIT + 11, UNIT])
    assert written(tmp_path / "file", parts) == b"".join(parts)


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_an_error_and_nothing_stays_open(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "file", pieces([2 * UNIT]))
    assert (os.listdir("/proc/self/fd") if before else []) == before


def test_what_failed_midway_is_not_made_durable(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)

    def fail():
        with DirectFile(str(tmp_path / "file")) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert synced == []
