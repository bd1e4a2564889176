"""Storage: bytes by name on any root, and what a file system can do to a save."""

import errno
import gc
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_jax as ck
from ckpt_jax import _commit, _manifest, _retain, _storage
from ckpt_jax._storage import Folder, folder

as_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root may do this")
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")

TREE = {"w": np.arange(30_000.0), "b": np.ones(3, "float32"), "n": 7}


def leftovers(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if _commit.TMP in name)


def whole(step: Path, tree: dict[str, Any] = TREE) -> bool:
    """Whether a step verifies and holds just this."""
    found = ck.restore(step)
    return ck.verify(step).ok and all(np.array_equal(found[name], tree[name]) for name in tree)


# --- bytes by name ----------------------------------------------------------------------------------------------------


@pytest.fixture
def place(root: str) -> Folder:
    made = folder(root) / "some"
    made.make()
    return made


def test_what_is_written_can_be_read(place: Folder) -> None:
    assert place.read("a") is None
    place.write("a", b"one")
    assert place.read("a") == b"one"
    place.write("a", b"")
    assert place.read("a") == b""
    place.write("a", bytes(range(256)) * 1000)
    assert place.read("a") == bytes(range(256)) * 1000


def test_a_file_is_created_just_once(place: Folder) -> None:
    assert place.create("a", b"one")
    assert not place.create("a", b"two")
    assert place.read("a") == b"one"
    assert place.create("a", b"one"), "a retry that finds its own bytes has succeeded"


def test_a_file_is_replaced_at_once(place: Folder) -> None:
    place.replace("a", b"one")
    place.replace("a", b"two")
    assert place.read("a") == b"two"
    assert place.entries() == ["a"]


def test_a_folder_lists_what_is_in_it(place: Folder) -> None:
    place.make("x", "x/y")
    for name, size in [("a", 3), ("x/b", 0), ("x/y/c", 10)]:
        place.write(name, b"z" * size)
    assert place.entries() == ["a", "x"]
    assert place.files() == {"a": 3, "x/b": 0, "x/y/c": 10}
    assert (place / "x").files() == {"b": 0, "y/c": 10}
    assert place.sizes(["a", "x/b", "x/y/c", "nothing", "a/b"]) == {
        "a": 3,
        "x/b": 0,
        "x/y/c": 10,
        "nothing": None,
        "a/b": None,
    }


def test_a_folder_that_is_not_there_is_empty(place: Folder) -> None:
    nothing = place / "nothing"
    assert not nothing.exists()
    assert nothing.entries() == []
    assert nothing.files() == {}
    assert nothing.read("a") is None
    assert nothing.sizes(["a"]) == {"a": None}
    nothing.remove()
    nothing.unlink("a")


def test_a_folder_is_removed_with_all_that_is_in_it(place: Folder) -> None:
    place.make("x")
    place.write("x/b", b"1")
    place.write("a", b"1")
    (place.parent / "other").make()
    (place.parent / "other").write("a", b"2")
    place.unlink("a")
    assert place.entries() == ["x"]
    place.remove(first="x/b")
    assert not place.exists()
    assert place.parent.entries() == ["other"]


def test_a_name_that_begins_like_another_is_another(place: Folder) -> None:
    """Buckets have no folders, only names that begin alike: deleting step 1 must not delete step 10."""
    for step in ("1", "10", "100"):
        (place / step).make()
        (place / step).write("a", step.encode())
    (place / "1").remove()
    assert place.entries() == ["10", "100"]
    assert (place / "1").files() == {}
    assert (place / "10").files() == {"a": 2}


# --- paths ------------------------------------------------------------------------------------------------------------


def test_paths_are_resolved_when_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert folder("runs/a").url == f"{tmp_path}/runs/a"
    assert folder("./runs/../runs/a/").url == f"{tmp_path}/runs/a"
    assert folder("~/runs").url == f"{tmp_path}/home/runs"
    assert folder(Path("runs")).url == f"{tmp_path}/runs"
    assert folder(f"file://{tmp_path}/x").url == f"{tmp_path}/x"
    assert folder(f"{tmp_path}//x//").url == f"{tmp_path}/x"
    assert folder("/").url == "/"


def test_urls_are_taken_as_they_are() -> None:
    assert folder("gs://bucket/run/7/").url == "gs://bucket/run/7"
    assert folder("s3://bucket/run").name == "run"
    assert folder("memory://run/7").parent.url == "memory://run"
    assert folder("gs://bucket/run 1/é").url == "gs://bucket/run 1/é"


@pytest.mark.parametrize("url", ["http://x/y", "https://x/y", "hdfs://x/y", "s3a://x/y", "az://x/y", "ftp://x"])
def test_a_url_of_an_unknown_kind_is_refused_by_name(url: str) -> None:
    for call in (ck.restore, ck.open, ck.verify, ck.steps, lambda path: ck.save(path, TREE)):
        with pytest.raises(ck.Unsupported) as caught:
            call(url)
        assert url in str(caught.value)
        assert "gs://, s3:// or memory://" in str(caught.value)


@pytest.mark.parametrize("url", ["GS://bucket/x", "Memory://x", "S3://bucket/x"])
def test_a_scheme_may_be_in_capitals(url: str) -> None:
    """And is never taken for a folder of that name."""
    assert folder(url).url == url.partition("/")[0].lower() + "//" + url.partition("//")[2]


@pytest.mark.parametrize("url", ["gs://", "s3:///", "memory://", "gs:///x", "file://host/x", "file://", "file://x"])
def test_a_url_that_is_written_wrong_makes_no_folder_of_that_name(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ck.CheckpointError, ValueError)):
        ck.save(url, {"n": 1})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", [b"/tmp/x", 5, None, ["x"]])
def test_a_path_is_text(path: Any) -> None:
    for call in (ck.restore, ck.open, ck.verify, ck.steps, ck.latest, lambda path: ck.save(path, TREE)):
        with pytest.raises(TypeError):
            call(path)


@pytest.mark.parametrize("path", ["", " ", "a\0b", "memory://a\0b", "not utf-8: \udcff"])
def test_a_path_that_can_be_none_is_refused_at_once(path: str) -> None:
    with pytest.raises(ValueError, match=r"path"):
        ck.save(path, TREE)


@pytest.mark.parametrize(
    "name",
    [
        "with space",
        "ünïcödé-日本",
        "100%",
        "a'b\"c",
        "new\nline",
        "#x?y=z",
        "-rf",
        "a:b",
        "tab\t",
        "…",
        "x" * 200,
    ],
)
def test_a_path_may_hold_any_character(tmp_path: Path, name: str) -> None:
    step = tmp_path / name / "1"
    ck.save(step, TREE)
    assert whole(step)
    assert ck.steps(tmp_path / name) == [1]
    assert ck.latest(tmp_path / name) == str(step)
    ck.save(step, TREE | {"n": 8}, overwrite=True)
    assert ck.restore(step)["n"] == 8


@pytest.mark.parametrize("name", ["with space", "ünïcödé-日本", "100%", "new\nline", "a:b", "#x?y=z"])
def test_a_url_may_hold_any_character(name: str) -> None:
    step = f"memory://{uuid.uuid4()}/{name}/1"
    ck.save(step, TREE)
    assert ck.restore(step)["n"] == 7
    assert ck.steps(step.removesuffix("/1")) == [1]


def test_a_relative_path_means_the_folder_it_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ck.save("run/1", TREE)
    checkpoint = ck.open("run/1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert checkpoint["w"][5] == 5
    assert ck.latest("../run") == str(tmp_path / "run" / "1")


def test_a_trailing_slash_changes_nothing(tmp_path: Path) -> None:
    ck.save(f"{tmp_path}/run/1/", TREE)
    assert ck.steps(f"{tmp_path}/run/") == [1]
    assert whole(tmp_path / "run" / "1")
    with pytest.raises(ck.Exists):
        ck.save(f"{tmp_path}/run/1", TREE)


def test_a_name_that_is_too_long_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"too long"):
        ck.save(tmp_path / ("x" * 300), TREE)
    assert os.listdir(tmp_path) == []


# --- links ------------------------------------------------------------------------------------------------------------


def test_a_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    ck.save(tmp_path / "run" / "1", TREE)
    ck.save(tmp_path / "run" / "1", TREE, overwrite=True)
    ck.save(tmp_path / "run" / "2", TREE)
    assert ck.steps(tmp_path / "run") == [1, 2]
    assert (tmp_path / "run").is_symlink()
    assert sorted(os.listdir(tmp_path / "disk")) == ["1", "2", "LATEST"]


def test_a_step_may_be_a_link_to_be_read(tmp_path: Path) -> None:
    ck.save(tmp_path / "run" / "1", TREE)
    (tmp_path / "best").symlink_to("run/1")
    assert whole(tmp_path / "best")


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    ck.save(tmp_path / "run" / "1", TREE)
    (tmp_path / "run" / "best").symlink_to("1")
    (tmp_path / "run" / "dangling").symlink_to("nowhere")
    for name in ("best", "dangling"):
        for overwrite in (False, True):
            with pytest.raises(ck.Exists, match=r"in the way"):
                ck.save(tmp_path / "run" / name, TREE, overwrite=overwrite)
    assert whole(tmp_path / "run" / "1")
    assert not (tmp_path / "run" / "nowhere").exists()


def test_deleting_never_follows_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("all of it")
    ck.save(tmp_path / "run" / "1", TREE)
    (tmp_path / "run" / "1" / "notes").symlink_to(precious)
    (tmp_path / "run" / "1" / "state" / "thesis").symlink_to(precious / "thesis")
    _commit.delete(folder(tmp_path / "run" / "1"))
    assert os.listdir(tmp_path / "run") == ["LATEST"]
    (tmp_path / "run" / "2").symlink_to(precious)
    _commit.delete(folder(tmp_path / "run" / "2"))
    (tmp_path / "run" / f"3{_commit.TMP}dead").symlink_to(precious)
    _commit.clear(folder(tmp_path / "run" / "3"))
    assert os.listdir(tmp_path / "run") == ["LATEST"]
    assert (precious / "thesis").read_text() == "all of it"


def test_overwriting_never_deletes_what_is_not_ours(tmp_path: Path) -> None:
    ck.save(tmp_path / "1", TREE)
    (tmp_path / "1" / "state" / "notes.txt").write_text("mine")
    with pytest.raises(ck.Exists, match=r"holds files that are not ckpt_jax's to delete:\n.* found state/notes.txt"):
        ck.save(tmp_path / "1", TREE, overwrite=True)
    (tmp_path / "1" / "state" / "notes.txt").unlink()
    ck.save(tmp_path / "1", TREE, overwrite=True)


@pytest.mark.parametrize("name", ["000100", "step_100", "ckpt-100", "checkpoint100"])
def test_a_name_that_looks_like_a_step_and_is_none_is_warned_of(tmp_path: Path, name: str) -> None:
    with pytest.warns(UserWarning, match=f"'{name}' is no step: .* such as '100'"):
        ck.save(tmp_path / name, TREE)
    assert ck.latest(tmp_path) is None


def test_a_checkpoint_that_is_replaced_while_it_is_verified_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt_jax import _faults

    ck.save(tmp_path / "1", TREE)
    of_files = _faults.of_files

    def then_replaced(place: Any, manifest: Any) -> Any:
        found = of_files(place, manifest)
        ck.save(tmp_path / "1", TREE, overwrite=True)
        return found

    monkeypatch.setattr(_faults, "of_files", then_replaced)
    with pytest.raises(ck.NotFound, match="replaced or deleted while being read"):
        ck.verify(tmp_path / "1")


def test_no_checkpoint_lies_in_another(tmp_path: Path) -> None:
    ck.save(tmp_path / "1", TREE)
    with pytest.raises(ck.Exists, match="would lie inside the checkpoint"):
        ck.save(tmp_path / "1" / "2", TREE)


def test_a_name_that_marks_what_is_not_finished_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which marks what is not finished"):
        ck.save(tmp_path / "1.orbax-checkpoint-tmp-mine", TREE)


def test_a_file_that_became_a_link_is_no_longer_that_file(tmp_path: Path) -> None:
    """A checkpoint is what lies in its folder: a link may lead anywhere tomorrow."""
    ck.save(tmp_path / "1", TREE)
    file = next((tmp_path / "1" / "state" / "ocdbt.process_0" / "d").iterdir())
    file.rename(tmp_path / "moved")
    file.symlink_to(tmp_path / "moved")
    assert not ck.verify(tmp_path / "1", level="files").ok
    with pytest.raises(ck.Corrupt, match=rf"{re.escape(file.name)}: .* found no plain file \(links are not followed\)"):
        ck.restore(tmp_path / "1")


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A stranger's link leads anywhere, a pipe would be waited for, a device has no end."""
    place = folder(tmp_path / "place")
    place.make("folder")
    place.write("folder/file", b"inside")
    (tmp_path / "file").write_bytes(b"outside")
    for name, make in {
        "link": lambda path: path.symlink_to(tmp_path / "file"),
        "within": lambda path: path.symlink_to("folder/file"),
        "itself": lambda path: path.symlink_to(path.name),
        "zeros": lambda path: path.symlink_to("/dev/zero"),
        "pipe": os.mkfifo,
    }.items():
        make(tmp_path / "place" / name)
        assert place.read(name) is None
        assert place.sizes([name]) == {name: None}
        with pytest.raises(FileNotFoundError):
            place.read_into(name, 0, memoryview(bytearray(4)))
        os.unlink(tmp_path / "place" / name)
    assert place.read("folder") is None


def test_what_lies_behind_a_link_is_no_file_of_the_folder(tmp_path: Path) -> None:
    place = folder(tmp_path / "place")
    place.make("d")
    place.write("d/file", b"inside")
    (tmp_path / "place" / "other").symlink_to("d")
    assert place.sizes(["d/file", "other/file"]) == {"d/file": 6, "other/file": None}
    assert place.plain(["d/file", "other/file", "none"]) == {"d/file"}
    (tmp_path / "link").symlink_to("place")
    assert folder(tmp_path / "link").sizes(["d/file"]) == {"d/file": 6}, "the folder itself is the user's to name"
    assert folder(tmp_path / "link").plain(["d/file"]) == set()


def test_a_name_that_no_system_takes_is_no_file(tmp_path: Path) -> None:
    """One step whose manifest lists such a file must not hide all others from `latest`."""
    assert folder(tmp_path).sizes(["x" * 300]) == {"x" * 300: None}
    assert folder(tmp_path).read("x" * 300) is None


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert folder(tmp_path).read("file", most=5) == b"12345"
    with pytest.raises(OSError, match="File too large"):
        folder(tmp_path).read("file", most=4)


# --- in the way -------------------------------------------------------------------------------------------------------


def test_an_empty_folder_gives_way(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    ck.save(tmp_path / "1", TREE)
    assert whole(tmp_path / "1")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_in_the_way_stays(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "1").write_text("mine")
    with pytest.raises(ck.Exists, match=r"in the way") as caught:
        ck.save(tmp_path / "1", TREE, overwrite=overwrite)
    assert "\nhint: " in str(caught.value)
    assert (tmp_path / "1").read_text() == "mine"
    with pytest.raises(ck.NotFound, match=r"is a file") as found:
        ck.restore(tmp_path / "1")
    assert "\nhint: " in str(found.value)


@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_files_in_the_way_stay(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "thesis").write_text("mine")
    with pytest.raises(ck.Exists, match="thesis"):
        ck.save(tmp_path / "1", TREE, overwrite=overwrite)
    assert (tmp_path / "1" / "thesis").read_text() == "mine"
    assert leftovers(tmp_path) == []


def test_a_file_where_a_folder_should_be_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises((OSError, ck.CheckpointError), match="run"):
        ck.save(tmp_path / "run" / "1", TREE)
    with pytest.raises((OSError, ck.CheckpointError), match="run"):
        ck.save(tmp_path / "run" / "deep" / "1", TREE)
    for look in (ck.restore, ck.open, ck.verify):
        with pytest.raises(ck.NotFound):
            look(tmp_path / "run" / "1")
    assert ck.steps(tmp_path / "run") == []
    assert ck.latest(tmp_path / "run") is None


def test_a_checkpoint_that_comes_to_be_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that save to one path: one of them is told, and neither loses what is committed."""
    commit = _commit.commit

    def late(attempt: Any, manifest: Any) -> None:
        monkeypatch.setattr(_commit, "commit", commit)
        ck.save(tmp_path / "1", TREE)
        commit(attempt, manifest)

    monkeypatch.setattr(_commit, "commit", late)
    with pytest.raises(ck.Exists, match=r"came to be"):
        ck.save(tmp_path / "1", TREE | {"n": 8})
    assert whole(tmp_path / "1")
    assert leftovers(tmp_path) == []


# --- locks ------------------------------------------------------------------------------------------------------------


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Another Python process, that prints `ready` and then goes on to read its stdin."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


HOLD = """
    import sys
    from ckpt_jax._storage import folder
    held = folder(sys.argv[1]).lock()
    print("ready" if held is not None else "refused", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holding(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = child(HOLD, str(path))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def test_a_folder_is_in_use_until_its_writer_is_killed(tmp_path: Path) -> None:
    place = folder(tmp_path / f"1{_commit.TMP}00ff")
    place.make()
    place.write("a", b"half")
    assert not place.in_use()
    with holding(tmp_path / f"1{_commit.TMP}00ff") as process:
        assert place.in_use()
        _commit.clear(folder(tmp_path / "1"))
        assert place.read("a") == b"half", "a living writer's folder is left alone"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not place.in_use()
        assert place.read("a") == b"half"
    _commit.clear(folder(tmp_path / "1"))
    assert os.listdir(tmp_path) == []


def test_a_lock_ends_with_its_descriptor(tmp_path: Path) -> None:
    place = folder(tmp_path)
    held = place.lock()
    assert held is not None
    assert place.in_use()
    os.close(held)
    assert not place.in_use()
    assert (place / "nothing").lock() is None


def test_a_save_leaves_the_attempt_of_a_living_writer_alone(tmp_path: Path) -> None:
    (tmp_path / f"1{_commit.TMP}alive").mkdir()
    (tmp_path / f"1{_commit.TMP}dead").mkdir()
    (tmp_path / f"10{_commit.TMP}other").mkdir()
    with holding(tmp_path / f"1{_commit.TMP}alive"):
        ck.save(tmp_path / "1", TREE)
        assert leftovers(tmp_path) == [f"1{_commit.TMP}alive", f"10{_commit.TMP}other"]
    assert whole(tmp_path / "1")


def test_where_there_are_no_locks_an_idle_folder_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(_storage.fcntl, "flock", no_locks)
    place = folder(tmp_path / "x")
    place.make("deep")
    place.write("deep/a", b"1")
    held = place.lock()
    assert held is not None
    os.close(held)
    assert place.in_use()
    for path in (tmp_path / "x", tmp_path / "x" / "deep", tmp_path / "x" / "deep" / "a"):
        os.utime(path, (1, 1))
    assert not place.in_use()
    ck.save(tmp_path / "1", TREE)
    assert whole(tmp_path / "1")


# --- replacing --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["exchanged", "renamed twice"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "renamed twice":
        monkeypatch.setattr(_storage, "_exchange", lambda *_: False)
    return request.param


def test_overwriting_puts_the_new_one_in_its_place(tmp_path: Path, exchange: str) -> None:
    ck.save(tmp_path / "1", TREE)
    ck.save(tmp_path / "1", TREE | {"n": 8}, overwrite=True)
    assert whole(tmp_path / "1", TREE | {"n": 8})
    assert sorted(os.listdir(tmp_path)) == ["1", "LATEST"]


def test_two_folders_exchange_their_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "was").write_text(name)
    if not folder(tmp_path / "a").exchange(folder(tmp_path / "b")):
        pytest.skip("this file system cannot")
    assert (tmp_path / "a" / "was").read_text() == "b"
    with pytest.raises(FileNotFoundError):
        folder(tmp_path / "a").exchange(folder(tmp_path / "nothing"))


class Killed(BaseException):
    """What a process does not get to handle."""


def test_a_crash_between_two_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save finds the old one under another name, and puts it back before all else."""
    monkeypatch.setattr(_storage, "_exchange", lambda *_: False)
    ck.save(tmp_path / "1", TREE)
    code = """
        import os, sys, signal
        import numpy as np
        import ckpt_jax as ck
        from ckpt_jax import _storage
        _storage._exchange = lambda *_: False
        rename, renames = os.rename, []
        def dying(a, b):
            renames.append(a)
            if len(renames) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(a, b)
        os.rename = dying
        ck.save(sys.argv[1], {"w": np.zeros(30_000), "b": np.ones(3, "float32"), "n": 8}, overwrite=True)
    """
    process = child(code, str(tmp_path / "1"))
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "1").exists()
    assert len(leftovers(tmp_path)) == 2
    _commit.clear(folder(tmp_path / "1"))
    assert whole(tmp_path / "1")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("then", ["overwrite", "save"])
def test_the_save_after_such_a_crash_sees_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr(_storage, "_exchange", lambda *_: False)
    ck.save(tmp_path / "1", TREE)
    (tmp_path / "1").rename(tmp_path / f"1{_commit.TMP}{_commit._OLD}")
    if then == "save":
        with pytest.raises(ck.Exists):
            ck.save(tmp_path / "1", TREE | {"n": 8})
        assert whole(tmp_path / "1")
    else:
        ck.save(tmp_path / "1", TREE | {"n": 8}, overwrite=True)
        assert whole(tmp_path / "1", TREE | {"n": 8})
    assert leftovers(tmp_path) == []


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_storage, "_exchange", lambda *_: False)
    ck.save(tmp_path / "1", TREE)
    rename, renames = os.rename, []

    def failing(source: str, target: str) -> None:
        renames.append(source)
        if len(renames) == 2:
            raise OSError(errno.EIO, "Input/output error", source)
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match=r"Input/output"):
        ck.save(tmp_path / "1", TREE | {"n": 8}, overwrite=True)
    monkeypatch.undo()
    assert whole(tmp_path / "1")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("midway", ["prune", "overwrite"])
def test_who_comes_between_two_renames_waits_or_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, midway: str
) -> None:
    """The old one's other name is no crash's while its writer lives."""
    monkeypatch.setattr(_storage, "_exchange", lambda *_: False)
    ck.save(tmp_path / "1", TREE)
    rename, others = os.rename, []

    def between(source: str, target: str) -> None:
        rename(source, target)
        if target.endswith(_commit.TMP + _commit._OLD) and not others:
            if midway == "prune":
                others.append(None)
                ck.prune(tmp_path, ck.Keep(last=1))
                assert not (tmp_path / "1").exists()
            else:
                others.append(threading.Thread(target=overwrite, args=[9]))
                others[0].start()
                time.sleep(0.2)

    def overwrite(n: int) -> None:
        errors[n] = None
        try:
            ck.save(tmp_path / "1", TREE | {"n": n}, overwrite=True)
        except ck.CheckpointError as error:
            errors[n] = error

    errors: dict[int, Exception | None] = {}
    monkeypatch.setattr(os, "rename", between)
    overwrite(8)
    for other in filter(None, others):
        other.join()
    assert others
    written = [n for n, error in errors.items() if error is None]
    assert written, errors
    assert all(isinstance(error, ck.Exists) for error in errors.values() if error is not None)
    assert any(whole(tmp_path / "1", TREE | {"n": n}) for n in written)
    _commit.clear_all(folder(tmp_path))  # Who found its place taken leaves the old one where it was.
    assert leftovers(tmp_path) == []


def test_overwriters_without_an_exchange_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told that it counts, or that another was first; at the end one that was told so is there."""
    monkeypatch.setattr(_storage, "_exchange", lambda *_: False)
    ck.save(tmp_path / "1", TREE)
    told: list[int] = []
    odd: list[BaseException] = []

    def overwrite(who: int) -> None:
        for turn in range(8):
            try:
                ck.save(tmp_path / "1", TREE | {"n": 10 * turn + who}, overwrite=True)
                told.append(10 * turn + who)
            except ck.Exists:
                pass
            except BaseException as error:  # noqa: BLE001  Told at the end.
                odd.append(error)

    threads = [threading.Thread(target=overwrite, args=[who]) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert odd == []
    assert ck.restore(tmp_path / "1")["n"] in told
    assert ck.verify(tmp_path / "1").ok
    _commit.clear_all(folder(tmp_path))  # Who found its place taken leaves the old one where it was.
    assert leftovers(tmp_path) == []


def test_a_forked_worker_keeps_no_lock(tmp_path: Path) -> None:
    """It has all that was open when it was forked, and may live long after who saved."""
    code = """
        import os, signal, sys, time
        from ckpt_jax import _storage
        place = _storage.folder(sys.argv[1])
        place.make()
        place.lock()
        if os.fork() == 0:
            print("worker", os.getpid(), flush=True)
            time.sleep(60)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    process = child(code, str(tmp_path / "1"))
    worker = int(process.stdout.readline().split()[1])
    assert folder(tmp_path / "1").in_use()
    process.wait()
    try:
        os.kill(worker, 0)
        assert not folder(tmp_path / "1").in_use()
    finally:
        os.kill(worker, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("name", ["state", "state/d/thesis.tex", "state/ocdbt.process_0/x", "_CHECKPOINT_METADATA"])
def test_a_folder_without_a_manifest_is_nobodys_to_delete(tmp_path: Path, name: str) -> None:
    """However much it looks like what is left of a checkpoint: it may be Orbax's, or a user's."""
    (tmp_path / "1" / name).parent.mkdir(parents=True)
    (tmp_path / "1" / name).write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ck.Exists, match="not ckpt_jax's to delete"):
            ck.save(tmp_path / "1", TREE, overwrite=overwrite)
    assert (tmp_path / "1" / name).read_text() == "mine"
    assert leftovers(tmp_path) == []


def test_what_replaced_another_and_is_gone_brings_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one could not be deleted; it is no longer what a crash leaves of a replacement."""
    monkeypatch.setattr(_storage, "_exchange", lambda *_: False)
    for step in (1, 2):
        ck.save(tmp_path / str(step), TREE)
    with monkeypatch.context() as patch:
        patch.setattr(_storage.shutil, "rmtree", lambda path, **_: _busy(path))
        ck.save(tmp_path / "2", TREE | {"n": 8}, overwrite=True)
        assert len(leftovers(tmp_path)) == 1
        _retain.rollback(tmp_path, 1)
        ck.prune(tmp_path, ck.Keep(last=1))
        assert ck.steps(tmp_path) == [1]
    ck.prune(tmp_path, ck.Keep(last=1))
    assert ck.steps(tmp_path) == [1]
    assert leftovers(tmp_path) == []


def _busy(path: str) -> None:
    raise OSError(errno.EBUSY, "Device or resource busy", path)


@pytest.mark.parametrize("odd", ["a file", "a pipe", "a link to itself", "a link to nowhere", "a folder"])
def test_an_odd_leftover_stops_nobody(tmp_path: Path, odd: str) -> None:
    ck.save(tmp_path / "1", TREE)
    place = tmp_path / f"7{_commit.TMP}{_commit._OLD}"
    if odd == "a file":
        place.write_text("")
    elif odd == "a pipe":
        os.mkfifo(place)
    elif odd == "a folder":
        place.mkdir()
    else:
        place.symlink_to(place if odd == "a link to itself" else tmp_path / "nowhere")
    with ck.Saver(tmp_path) as saver:
        assert saver.resume(TREE)[1] == 1
    ck.prune(tmp_path, ck.Keep(last=1))
    ck.save(tmp_path / "7", TREE)
    assert whole(tmp_path / "7")


def test_a_descriptor_is_closed_also_where_nothing_can_be_told_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("x")
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda fd: _busy("x"))
        for _ in range(20):
            with pytest.raises(OSError, match="busy"):
                folder(tmp_path).read("x")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_place_that_no_system_call_takes_is_beyond_the_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    for start in (1, 2**63 - 1, 2**63, 2**64):
        assert folder(tmp_path).read("x", start, 1) == b""
        assert folder(tmp_path).read_into("x", start, memoryview(bytearray(1))) == 0


def test_a_lock_that_is_given_back_is_nobodys(tmp_path: Path) -> None:
    """Also where a worker was forked when nobody knew of the lock yet."""
    lock = folder(tmp_path).lock()
    assert lock is not None
    inherited = os.dup(lock)
    assert folder(tmp_path).is_locked()
    _storage.unlock(lock)
    assert not folder(tmp_path).is_locked()
    os.close(inherited)


@pytest.mark.parametrize("when", ["write", "replace", "sync", "rename"])
def test_an_error_of_the_storage_leaves_the_previous_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, exchange: str
) -> None:
    ck.save(tmp_path / "1", TREE)
    before = sorted(os.listdir(tmp_path))

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, when, failing)
        if when == "rename" and exchange == "exchanged":
            patch.setattr(Folder, "exchange", failing)
        if when == "replace":  # Only the hint is written so: the checkpoint stands.
            ck.save(tmp_path / "2", TREE)
            return
        with pytest.raises(OSError, match=r"Input/output"):
            ck.save(tmp_path / "1", TREE | {"n": 8}, overwrite=True)
        with pytest.raises(OSError, match=r"Input/output"):
            ck.save(tmp_path / "2", TREE)
    assert whole(tmp_path / "1")
    assert sorted(os.listdir(tmp_path)) == before


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    at = tmp_path / "disk"
    at.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", at], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)


def used(path: Path) -> int:
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


@as_root
@on_linux
@pytest.mark.parametrize("leaves", [1, 300])
def test_a_full_disk_fails_that_save_and_nothing_else(small_disk: Path, leaves: int) -> None:
    ck.save(small_disk / "run" / "1", TREE)
    before = used(small_disk)
    big = {f"x{i}": np.random.default_rng(i).random(1_200_000 // leaves) for i in range(leaves)}
    for target, overwrite in [("2", False), ("1", True)]:
        with pytest.raises((OSError, ck.CheckpointError)) as caught:
            ck.save(small_disk / "run" / target, big, overwrite=overwrite)
        assert "No space left" in str(caught.value)
        # Less, where TensorStore still had a file open at first that was deleted.
        assert used(small_disk) <= before, "what it wrote is gone again"
    assert sorted(os.listdir(small_disk / "run")) == ["1", "LATEST"]
    assert ck.steps(small_disk / "run") == [1]
    assert whole(small_disk / "run" / "1")
    ck.save(small_disk / "run" / "2", TREE)
    assert whole(small_disk / "run" / "2")


@as_root
@on_linux
@pytest.mark.parametrize("spare", [0, 4096, 8192, 16384, 32768, 65536])
def test_a_disk_that_is_full_at_any_moment_of_a_save(small_disk: Path, spare: int) -> None:
    """There is always too little for something: a data file, the tree of keys, a sidecar, the manifest, the hint."""
    ck.save(small_disk / "run" / "1", TREE)
    needed = used(small_disk)
    room = os.statvfs(small_disk)
    filler = room.f_bavail * room.f_frsize - needed + spare - 65536 // 2
    (small_disk / "filler").write_bytes(b"\1" * max(0, filler))
    before = used(small_disk)
    failed = None
    try:
        ck.save(small_disk / "run" / "2", TREE)
    except (OSError, ck.CheckpointError) as error:
        failed = error
    if failed is None:
        assert whole(small_disk / "run" / "2")
    else:
        assert "No space left" in str(failed)
        assert used(small_disk) <= before
        assert ck.steps(small_disk / "run") == [1]
    assert leftovers(small_disk / "run") == []
    assert whole(small_disk / "run" / "1")


def test_a_file_that_may_not_grow_fails_that_save_and_nothing_else(tmp_path: Path) -> None:
    """As by a quota: the limit holds for each file of a process."""
    ck.save(tmp_path / "1", TREE)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises((OSError, ck.CheckpointError)) as caught:
            ck.save(tmp_path / "2", TREE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "File too large" in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["1", "LATEST"]
    assert whole(tmp_path / "1")


# --- no permission ----------------------------------------------------------------------------------------------------


def as_nobody(*calls: str) -> list[str]:
    """What some calls come to in a process that may not do much."""
    code = """
        import os, sys
        import jax, numpy as np
        import ckpt_jax as ck
        from ckpt_jax import _save, _restore, _open, _verify, _retain, _commit
        jax.devices()
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        for call in sys.argv[1:]:
            try:
                print("done:", str(eval(call)).replace("\\n", " "))
            except (ck.CheckpointError, OSError) as error:
                print(f"{type(error).__name__}:", str(error).replace("\\n", " "))
    """
    process = child(code, *calls)
    out, _ = process.communicate()
    assert process.returncode == 0
    lines = out.splitlines()
    assert len(lines) == len(calls)
    return lines


@pytest.fixture
def open_to_all(tmp_path: Path) -> Path:
    """A folder that others can look into."""
    for above in (tmp_path, *tmp_path.parents):
        if not above.stat().st_mode & stat.S_IXOTH:
            above.chmod(above.stat().st_mode | stat.S_IXOTH)
    return tmp_path


@as_root
def test_without_permission_a_save_says_so(open_to_all: Path) -> None:
    ck.save(open_to_all / "1", TREE)
    answers = as_nobody(
        f"ck.save({str(open_to_all / '2')!r}, {{'n': 1}})",
        f"ck.save({str(open_to_all / 'new' / '2')!r}, {{'n': 1}})",
        f"ck.save({str(open_to_all / '1')!r}, {{'n': 1}}, overwrite=True)",
    )
    for answer in answers:
        assert answer.startswith(("PermissionError: ", "CheckpointError: "))
        assert "Permission denied" in answer
        assert str(open_to_all) in answer
    assert whole(open_to_all / "1")
    assert sorted(os.listdir(open_to_all)) == ["1", "LATEST"]


@as_root
@pytest.mark.parametrize("what", [_manifest.NAME, "state/ocdbt.process_0/d/*", "state/manifest.ocdbt", ""])
def test_without_permission_a_restore_says_so(open_to_all: Path, what: str) -> None:
    step = str(open_to_all / "1")
    ck.save(step, TREE)
    for path in (open_to_all / "1").glob(what) if what else [open_to_all / "1"]:
        path.chmod(0)
    first = [f"ck.restore({step!r})", f"ck.open({step!r})['w'][()]", f"ck.verify({step!r}).check()"]
    then = [f"ck.steps({str(open_to_all)!r})", f"ck.latest({str(open_to_all)!r})"]
    answers = as_nobody(*first, *then)
    for answer in answers[:3]:
        assert answer.startswith(("PermissionError: ", "Corrupt: ", "CheckpointError: ")), answer
        assert re.search("[Pp]ermission|PERMISSION", answer), answer
        assert step in answer
    for answer in answers[3:]:
        assert answer.startswith(("done: ", "PermissionError: ")), answer


# --- deleted meanwhile ------------------------------------------------------------------------------------------------


def looks(path: str) -> list[tuple[Callable[[], Any], str]]:
    return [
        (lambda: ck.restore(path), "restore"),
        (lambda: ck.restore(path, TREE), "restore into a target"),
        (lambda: ck.verify(path), "verify"),
        (lambda: ck.verify(path, level="files"), "verify the files"),
    ]


@pytest.mark.parametrize("how", ["deleted", "overwritten"])
@pytest.mark.parametrize("number", range(4))
def test_a_checkpoint_deleted_while_it_is_read_is_not_found(
    root: str, monkeypatch: pytest.MonkeyPatch, number: int, how: str
) -> None:
    """A reader that comes too late found no damage: nobody must mark that step as bad."""
    path = f"{root}/1"
    ck.save(path, TREE)
    look, _ = looks(path)[number]
    load = _commit.load

    def late(place: Folder) -> Any:
        manifest = load(place)
        monkeypatch.setattr(_commit, "load", load)
        if how == "deleted":
            _commit.delete(place)
        else:
            ck.save(path, TREE | {"n": 8}, overwrite=True)
        return manifest

    monkeypatch.setattr(_commit, "load", late)
    with pytest.raises(ck.NotFound, match=r"deleted while being read") as caught:
        look()
    assert "\nhint: " in str(caught.value)


@pytest.mark.parametrize("how", ["deleted", "overwritten"])
def test_an_open_checkpoint_that_is_deleted_is_not_found(root: str, how: str) -> None:
    ck.save(f"{root}/1", TREE)
    checkpoint = ck.open(f"{root}/1")
    if how == "deleted":
        _commit.delete(folder(f"{root}/1"))
    else:
        ck.save(f"{root}/1", {"w": np.zeros(30_000), "b": np.zeros(3, "float32"), "n": 8}, overwrite=True)
    for name in ("w", "b"):
        with pytest.raises(ck.NotFound, match=r"deleted while being read"):
            checkpoint[name][()]


def test_a_checkpoint_deleted_between_two_chunks_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_jax import _reading

    ck.save(tmp_path / "1", {f"x{i}": np.full(20_000, i) for i in range(20)})
    check, calls = _reading._check, []

    def late(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            _commit.delete(folder(tmp_path / "1"))
        return check(*arguments)

    monkeypatch.setattr(_reading, "_check", late)
    use, _, room = _reading.read.__defaults__ or ()
    monkeypatch.setattr(_reading.read, "__defaults__", (use, 1000, room))
    with pytest.raises(ck.NotFound, match=r"deleted while being read"):
        ck.restore(tmp_path / "1")
    assert os.listdir(tmp_path) == ["LATEST"]


# --- two that save one step -------------------------------------------------------------------------------------------


def at_once(count: int, call: Callable[[int], Any]) -> list[Exception]:
    """Calls a function in so many threads; what it raised."""
    raised: list[Exception] = []

    def run(number: int) -> None:
        try:
            call(number)
        except Exception as error:  # noqa: BLE001
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_of_two_runs_that_save_one_step_the_first_has_it(root):
    for step in range(5):
        place = f"{root}/{step}"
        raised = at_once(2, lambda number, place=place: ck.save(place, {"a": np.full(50_000, number), "b": number}))
        assert [type(error) for error in raised] == [ck.errors.Exists]
        assert ck.verify(place).ok
        tree = ck.restore(place)
        assert (tree["a"] == tree["b"]).all()


def test_of_several_that_replace_a_checkpoint_one_is_there_whole(root):
    place = f"{root}/1"
    for _ in range(5):
        raised = at_once(4, lambda number: ck.save(place, {"a": np.full(50_000, number), "b": number}, overwrite=True))
        assert {type(error) for error in raised} <= {ck.errors.Exists}
        assert ck.verify(place).ok
        tree = ck.restore(place)
        assert (tree["a"] == tree["b"]).all()


def test_in_a_bucket_no_attempt_touches_what_another_writes(memory):
    """Also while the one that is replaced is read."""
    place = f"{memory}/1"
    ck.save(place, {"a": np.zeros(50_000)})
    before = set(_storage.folder(place).files())
    attempt = _commit.begin(_storage.folder(place), overwrite=True)
    (attempt.folder / attempt.state).write("half", b"written")
    ck.save(place, {"a": np.ones(50_000)}, overwrite=True)
    assert f"{attempt.state}/half" in _storage.folder(place).files()
    _commit.abandon(attempt)
    names = {name.partition("/")[0] for name in _storage.folder(place).files()}
    assert len([name for name in names if name.startswith("state.")]) == 1
    assert not {name for name in before if name.startswith("state.")} & set(_storage.folder(place).files())


def test_a_commit_that_may_not_be_durable_says_that_it_is_in_place(tmp_path, monkeypatch):
    fsync = _storage._fsync

    def fail(path: str) -> None:
        if path == str(tmp_path) and (tmp_path / "1").exists():
            raise OSError(errno.EIO, "Input/output error", path)
        fsync(path)

    monkeypatch.setattr(_storage, "_fsync", fail)
    with pytest.raises(OSError, match="Input/output error: this folder is in place, but a crash"):
        ck.save(tmp_path / "1", {"a": np.ones(3)})
    monkeypatch.undo()
    assert ck.verify(tmp_path / "1").ok


def test_what_may_come_back_in_place_of_the_new_one_is_not_deleted(tmp_path, monkeypatch, exchange):
    """After a crash the folder above may name the old one again: then its files must be there."""
    ck.save(tmp_path / "1", TREE)
    fsync = _storage._fsync

    def fail(path: str) -> None:
        if path == str(tmp_path) and (tmp_path / "1").exists() and whole(tmp_path / "1", TREE | {"n": 8}):
            raise OSError(errno.EIO, "Input/output error", path)
        fsync(path)

    monkeypatch.setattr(_storage, "_fsync", fail)
    with pytest.raises(OSError, match="this folder is in place"):
        ck.save(tmp_path / "1", TREE | {"n": 8}, overwrite=True)
    monkeypatch.undo()
    (old,) = leftovers(tmp_path)
    assert whole(tmp_path / "1", TREE | {"n": 8})
    assert whole(tmp_path / old)
    ck.prune(tmp_path, ck.Keep(last=1))
    assert leftovers(tmp_path) == []


def test_what_was_replaced_and_cannot_be_deleted_fails_no_save(tmp_path, monkeypatch, exchange):
    ck.save(tmp_path / "1", TREE)

    def fail(path: str, *_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(os, "rmdir", fail)
    ck.save(tmp_path / "1", TREE | {"n": 8}, overwrite=True)
    monkeypatch.undo()
    assert whole(tmp_path / "1", TREE | {"n": 8})
    assert len(leftovers(tmp_path)) == 1
    ck.save(tmp_path / "1", TREE | {"n": 9}, overwrite=True)
    assert leftovers(tmp_path) == []


# --- nothing is left unchecked ----------------------------------------------------------------------------------------


def test_of_each_process_only_the_data_files_stay(root):
    """Its tree of keys was for the merge; what nobody reads nobody would find damaged."""
    ck.save(f"{root}/1", {"a": np.arange(1000.0), "b": np.ones(3)})
    manifest = ck.open(f"{root}/1").manifest
    names = [path for path in _storage.folder(f"{root}/1").files() if "/ocdbt.process_0/" in path]
    (name,) = names
    assert manifest.files[name].bytes == 8000 + 4


def test_a_crc32c_that_only_orbax_reads_is_verified(tmp_path):
    ck.save(tmp_path / "1", {"a": np.arange(1000.0)})
    (path,) = tmp_path.glob("1/state/ocdbt.process_0/d/*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert (ck.restore(tmp_path / "1")["a"] == np.arange(1000.0)).all(), "its values are right"
    (fault,) = ck.verify(tmp_path / "1").faults
    assert "crc32c" in str(fault)


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_afterwards_as_it_was(memory, on):
    """Also where what ran meanwhile failed; a user may have turned it off."""
    try:
        (gc.enable if on else gc.disable)()
        ck.save(f"{memory}/1", {"a": np.ones(3)})
        assert gc.isenabled() == on
        with pytest.raises(ck.Mismatch):
            ck.restore(f"{memory}/1", {"b": np.ones(3)})
        assert gc.isenabled() == on
    finally:
        gc.enable()


def test_a_save_makes_durable_what_it_wrote_and_no_other_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LATEST is replaced in the root, below which all the steps lie: a save would take longer with each."""
    ck.save(tmp_path / "1", {"w": np.ones(3)})
    durable, fsync = [], _storage._fsync
    monkeypatch.setattr(_storage, "_fsync", lambda path: (durable.append(path), fsync(path)))
    ck.save(tmp_path / "2", {"w": np.ones(3)})
    assert str(tmp_path) in durable
    assert not [path for path in durable if path.startswith(f"{tmp_path}/1")]


def test_a_mark_that_was_being_written_when_its_process_died_is_not_in_the_way(tmp_path: Path) -> None:
    """Of a step whose manifest, damaged, no longer tells what is in it."""
    ck.save(tmp_path / "1", {"w": np.ones(3)})
    (tmp_path / "1" / "MANIFEST.json").write_bytes(b"{")
    (tmp_path / "1" / "BAD.json.tmp").write_bytes(b"{")
    ck.save(tmp_path / "1", {"w": np.zeros(3)}, overwrite=True)
    assert ck.verify(tmp_path / "1").ok


def test_a_step_that_holds_another_steps_manifest_can_be_overwritten(tmp_path: Path) -> None:
    """That one lists other data files; these are ours all the same. What is not ours still is not."""
    for step in (1, 2):
        ck.save(tmp_path / str(step), {"w": np.full(3000, step)})
    (tmp_path / "2" / "MANIFEST.json").write_bytes((tmp_path / "1" / "MANIFEST.json").read_bytes())
    (tmp_path / "2" / "notes.txt").write_text("mine")
    with pytest.raises(ck.Exists, match=r"not ckpt_jax's to delete(?s:.*)found notes\.txt"):
        ck.save(tmp_path / "2", {"w": np.zeros(3)}, overwrite=True)
    (tmp_path / "2" / "notes.txt").unlink()
    ck.save(tmp_path / "2", {"w": np.zeros(3)}, overwrite=True)
    assert ck.verify(tmp_path / "2").ok


@pytest.mark.parametrize("where", ["state", "array_metadatas"])
def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path, monkeypatch, where):
    scandir = os.scandir

    def fail(path: Any) -> Any:
        if os.path.basename(str(path)) == where:
            raise OSError(errno.EIO, "Input/output error", path)
        return scandir(path)

    folder(tmp_path / "other").make(where)
    monkeypatch.setattr(os, "scandir", fail)
    for look in (
        folder(tmp_path / "other").files,
        folder(tmp_path / "other").sync,
        lambda: ck.save(tmp_path / "1", {"small": np.ones(3)}),
    ):
        with pytest.raises(OSError, match="Input/output error"):
            look()
    monkeypatch.undo()
    assert ck.steps(tmp_path) == []


def test_what_another_deletes_at_the_same_time_is_deleted(tmp_path, monkeypatch):
    ck.save(tmp_path / "1", TREE)
    rename = os.rename

    def too_late(source: str, target: str) -> None:
        shutil.rmtree(source)
        rename(source, target)

    monkeypatch.setattr(os, "rename", too_late)
    _commit.delete(folder(tmp_path / "1"))
    assert os.listdir(tmp_path) == ["LATEST"]


def test_only_plain_digits_are_a_step():
    assert [_commit.step_of(name) for name in ("13", "1\u0663", "0", "01", "")] == [13, None, 0, None, None]
