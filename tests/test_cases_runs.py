"""What users met: shardings, scale and memory, file systems, crashes, loaders, resumed runs."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ckpt_jax as ck
from tests import trees
from tests.trees import same

W = np.arange(64.0, dtype=np.float32).reshape(8, 8)


def mesh(shape: tuple[int, ...], axes: tuple[str, ...]) -> Mesh:
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))


# --- sharding and placement -------------------------------------------------------------------------------------------


def test_c038_any_mesh_to_any_mesh(root: str, mesh42: Mesh):
    """The target's shardings are the only ones used: fewer or more devices, other axes, other specs."""
    some = np.array(jax.devices()[:2])
    targets = [
        NamedSharding(Mesh(some[:1], ("x",)), P()),
        NamedSharding(Mesh(some, ("fsdp",)), P("fsdp")),
        NamedSharding(mesh((8,), ("fsdp",)), P("fsdp")),
        NamedSharding(mesh((2, 4), ("a", "b")), P(None, ("a", "b"))),
        NamedSharding(mesh42, P("model", "data")),
        NamedSharding(mesh42, P("data")),
        SingleDeviceSharding(jax.devices()[7]),
    ]
    for number, saved in enumerate([NamedSharding(mesh42, P("data", "model")), *targets]):
        ck.save(f"{root}/{number}", {"w": jax.device_put(W, saved)})
        for sharding in targets:
            like = {"w": jax.ShapeDtypeStruct((8, 8), W.dtype, sharding=sharding)}
            restored = ck.restore(f"{root}/{number}", like=like)["w"]
            assert same(np.asarray(restored), W)
            assert restored.sharding == sharding


def test_c040_a_mixed_tree(root: str, mesh42: Mesh):
    """Each leaf comes back as the kind its target has; without a target all is on the host."""
    tree = {
        "s": jax.device_put(W, NamedSharding(mesh42, P("data"))),
        "r": jax.device_put(W[0], NamedSharding(mesh42, P())),
        "one": jnp.ones(2),
        "n": np.ones(3),
        "step": 7,
    }
    ck.save(f"{root}/1", tree)
    restored = ck.restore(f"{root}/1", like=tree)
    assert same(restored, tree)
    assert all(restored[name].sharding == tree[name].sharding for name in ("s", "r", "one"))
    assert same(
        ck.restore(f"{root}/1"), {"s": W, "r": W[0].copy(), "one": np.ones(2, np.float32), "n": np.ones(3), "step": 7}
    )


def test_c043_explicit_axis_types_survive(root: str):
    """The target's mesh comes back with its axis types, and the saved one's are on record."""
    explicit = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    a = jax.device_put(W, NamedSharding(explicit, P("x", "y")))
    ck.save(f"{root}/1", {"a": a})
    restored = ck.restore(f"{root}/1", like={"a": a})["a"]
    assert restored.sharding.mesh.axis_types == explicit.axis_types
    assert jax.typeof(restored) == jax.typeof(a)
    recorded = ck.open(f"{root}/1")["a"].sharding
    assert recorded is not None
    assert recorded["axis_types"] == ["Explicit", "Explicit"]


def test_c045_stacked_arrays_of_pmap_code(root: str):
    """An array is saved as it is seen, its device axis included; no replica is picked silently."""
    stacked = np.stack([np.arange(3.0) + i for i in range(8)]).astype(np.float32)
    value = jax.device_put(stacked, NamedSharding(mesh((8,), ("x",)), P("x")))
    ck.save(f"{root}/1", {"w": value})
    assert ck.open(f"{root}/1")["w"].shape == (8, 3)
    assert same(ck.restore(f"{root}/1"), {"w": stacked})
    with pytest.raises(ck.Mismatch, match="w"):
        ck.restore(f"{root}/1", like={"w": jax.ShapeDtypeStruct((3,), "float32")})


def test_c047_partly_replicated_and_permuted(root: str):
    """Boxes go by their indices, never by a device's place in a list, on either side."""
    devices = np.array(jax.devices())
    grids = [devices[[3, 1, 0, 2, 7, 6, 5, 4]].reshape(2, 4), devices[::-1].reshape(2, 4), devices.reshape(4, 2).T]
    specs = [P("x"), P("y"), P(("x", "y")), P(("y", "x")), P(None, "y"), P("y", "x"), P("x", "y")]
    shardings = [NamedSharding(Mesh(grid, ("x", "y")), spec) for grid in grids for spec in specs]
    for number, sharding in enumerate(shardings):
        ck.save(f"{root}/{number}", {"w": jax.device_put(W, sharding)})
        assert same(ck.restore(f"{root}/{number}")["w"], W)
        like = {"w": jax.ShapeDtypeStruct((8, 8), W.dtype, sharding=shardings[-1 - number])}
        assert same(np.asarray(ck.restore(f"{root}/{number}", like=like)["w"]), W)


# --- scale and memory -------------------------------------------------------------------------------------------------


def test_c048_twenty_thousand_tiny_leaves(tmp_path: Path):
    """Small leaves share files: a few, not one or two for each leaf."""
    tree = {f"l{i}": np.full(8, i, np.float32) for i in range(20_000)}
    ck.save(tmp_path / "1", tree)
    assert same(ck.restore(tmp_path / "1"), tree)
    assert same(ck.restore(tmp_path / "1", like=trees.zeros(tree)), tree)
    assert sum(len(files) for _, _, files in os.walk(tmp_path)) < 100


PEAK = """
import gc, os, sys
import jax, jax.numpy as jnp, numpy as np, psutil
import ckpt_jax as ck

place = sys.argv[1]

def rss():
    return psutil.Process().memory_info().rss

def peak(call):
    # The kernel's own high-water mark, set back to what is in use now: no sample is missed.
    gc.collect()
    base = rss()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    result = call()
    with open("/proc/self/status") as file:
        high = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    return (high - base) >> 20, result

"""


def measured(source: str, *arguments: Any) -> dict[str, int]:
    """Runs a program of its own that measures itself, and returns what it found, in MiB."""
    # What is freed goes back to the system at once: what is left is what is in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
    command = [sys.executable, "-c", PEAK + source, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's high-water mark")
def test_c050_c052_peak_memory_of_save_and_restore(tmp_path: Path):
    """Save needs its window, not the state again; restore needs the state once, whatever its target is."""
    found = measured(
        """
import json
tree = {f"w{i}": jnp.full(64 << 20, i, jnp.float32) for i in range(4)}  # 1 GiB
jax.block_until_ready(tree)
found = {}
ck.save(f"{place}/0", {"w": np.ones(1000)})
found["save"], _ = peak(lambda: ck.save(f"{place}/1", tree))
abstract = jax.eval_shape(lambda: {f"w{i}": jnp.zeros(64 << 20) for i in range(4)})
found["concrete"], restored = peak(lambda: ck.restore(f"{place}/1", like=tree))
assert all((restored[k][::4096] == tree[k][::4096]).all() for k in tree)
del restored, tree
found["abstract"], restored = peak(lambda: ck.restore(f"{place}/1", like=abstract))
del restored
found["host"], restored = peak(lambda: ck.restore(f"{place}/1"))
print(json.dumps(found))
""",
        tmp_path,
    )
    assert found["save"] < 400
    assert 1024 <= found["abstract"] + 16 < 1.4 * 1024
    assert found["concrete"] < 1.4 * 1024
    assert found["host"] < 1.4 * 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_c050_a_hundred_saves_leave_nothing_in_memory(tmp_path: Path):
    """Resident memory does not grow with the number of saves and restores."""
    found = measured(
        """
import json
tree = {f"w{i}": jnp.full((16, 1024), i, jnp.float32) for i in range(16)}  # 1 MiB
def round(n):
    ck.save(f"{place}/1", tree, overwrite=True)
    ck.restore(f"{place}/1", like=tree)
for n in range(20):
    round(n)
gc.collect(); before = rss()
for n in range(100):
    round(n)
gc.collect()
print(json.dumps({"grown": (rss() - before) >> 20}))
""",
        tmp_path,
    )
    assert found["grown"] < 40


# --- what can be told of asynchronous saves by synchronous ones -------------------------------------------------------


def test_c053_leaves_changed_right_after_save(root: str):
    """What was saved is the state at the call, whatever becomes of the leaves afterwards."""
    tree = {"a": np.zeros(1 << 20, np.float32), "step": np.array(1), "cfg": {"k": 1}}
    ck.save(f"{root}/1", tree)
    tree["a"] += 1
    tree["step"][...] = 2
    tree["cfg"]["k"] = 99
    tree["new"] = 3
    restored = ck.restore(f"{root}/1")
    assert not restored["a"].any()
    assert restored["step"] == 1
    assert restored["cfg"] == {"k": 1}
    assert "new" not in restored


def test_c054_donated_and_deleted_leaves(root: str):
    """Donating after save is safe; leaves that are gone already are refused at the call, every one by name."""
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    tree = {"w": jnp.zeros(1 << 18), "b": jnp.ones(3), "k": jax.random.key(0)}
    ck.save(f"{root}/1", tree)
    after = step({"w": tree["w"], "b": tree["b"]})
    assert tree["w"].is_deleted()
    assert not ck.restore(f"{root}/1")["w"].any()
    for leaf in (*jax.tree.leaves(after), tree["k"]):
        leaf.delete()
    with pytest.raises(ck.Unsupported, match="deleted or donated") as caught:
        ck.save(f"{root}/2", {**after, "k": tree["k"], "ok": 1})
    assert {fault.place for fault in caught.value.faults} == {"w", "b", "k"}
    assert ck.steps(root) == [1]


# --- children that die, stop, or run into walls ----------------------------------------------------------------------

# Forks a child for each job, so that a kill costs no new interpreter. A child saves one step, and an audit hook may end
# or stop it just before its nth touch of the file system: a real signal, at every moment there is.
CHILDREN = """
import ctypes, errno, fcntl, json, os, resource, signal, struct, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
import ckpt_jax as ck
from ckpt_jax import restore, save, steps, verify  # Imports all that they need, once.

def content(step):
    rng = np.random.default_rng(step)
    params = {"w": rng.random((64, 1024)), "b": rng.random(30)}
    return {"p": params, "opt": [rng.random((128, 512)), step], "loader": step}

def touches(event, args):
    # Files opened to be written, folders opened to be synced; made, renamed, deleted; exchanged (a call by ctypes).
    if event == "open":
        return bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_DIRECTORY))
    return event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "ctypes.dlsym")

def touch_down(number, signal_):
    seen = 0
    def hook(event, args):
        nonlocal seen
        if armed and touches(event, args):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal_)
    armed = True
    sys.addaudithook(hook)
    def disarm():
        nonlocal armed
        armed = False
        return seen
    return disarm

def forbid_locks():
    # flock fails with ENOSYS and fcntl's locks with ENOLCK, as on some cluster file systems (x86-64).
    def op(code, yes, no, k):
        return struct.pack("HBBI", code, yes, no, k)
    load, equal, ret = 0x20, 0x15, 0x06
    program = [
        op(load, 0, 0, 0), op(equal, 7, 0, 73), op(equal, 0, 5, 72), op(load, 0, 0, 24), op(equal, 5, 0, 6),
        op(equal, 4, 0, 7), op(equal, 3, 0, 37), op(equal, 2, 0, 38), op(ret, 0, 0, 0x7FFF0000),
        op(ret, 0, 0, 0x50000 | errno.ENOSYS), op(ret, 0, 0, 0x50000 | errno.ENOLCK),
    ]
    code = ctypes.create_string_buffer(b"".join(program))
    class Program(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(Program(len(program), ctypes.addressof(code)))) == 0  # PR_SET_SECCOMP
    for number in (fcntl.LOCK_EX, ):
        with open(os.devnull) as file:
            try:
                fcntl.flock(file, number)
            except OSError as error:
                assert error.errno == errno.ENOSYS
            else:
                raise AssertionError("locks still work")

def work(job, ready):
    import jax
    jax.devices()
    if job.get("no_locks"):
        forbid_locks()
    if "file_bytes" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_bytes"], resource.RLIM_INFINITY))
    say(child=os.getpid())
    os.read(ready, 1)
    disarm = touch_down(job.get("touch"), getattr(signal, job.get("signal", "SIGKILL")))
    try:
        ck.save(job["path"], content(job["content"]), overwrite=job.get("overwrite", False))
        answer = {"done": True}
    except BaseException as error:
        answer = {"done": False, "error": type(error).__name__, "text": str(error)}
        answer["oserror"] = isinstance(error, OSError)
    answer["touches"] = disarm()
    if "then" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        ck.save(job["then"], content(job["content"]))
    say(**answer)

def say(**words):
    os.write(1, json.dumps(words).encode() + b"\\n")

for line in sys.stdin:
    jobs = json.loads(line)
    ready, go = os.pipe()
    for job in jobs:
        if os.fork() == 0:
            os.close(go)
            try:
                work(job, ready)
            except BaseException as error:
                say(crashed=repr(error))
            finally:
                os._exit(0)
    os.close(ready)
    left = len(jobs)
    sys.stdin.readline()  # All are ready: the reader says go.
    os.close(go)
    while left:
        _, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            say(stopped=True)
        else:
            left -= 1
    say(over=True)
"""


class Children:
    """Processes that save, and may be killed for it."""

    def __init__(self, *wrapper: str):
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        self.server = subprocess.Popen(
            [*wrapper, sys.executable, "-c", CHILDREN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def hear(self) -> dict[str, Any]:
        assert self.server.stdout is not None
        return json.loads(self.server.stdout.readline())

    def say(self, line: str) -> None:
        assert self.server.stdin is not None
        self.server.stdin.write(line + "\n")
        self.server.stdin.flush()

    def start(self, *jobs: dict[str, Any]) -> list[int]:
        """The pids of children that are about to save; all begin at once."""
        self.say(json.dumps(jobs))
        pids = [self.hear()["child"] for _ in jobs]
        self.say("go")
        return pids

    def finish(self) -> list[dict[str, Any]]:
        """What the children had to say; nothing, from one that was killed."""
        answers = []
        while "over" not in (answer := self.hear()):
            assert "crashed" not in answer, answer
            answers.append(answer)
        return answers

    def run(self, **job: Any) -> dict[str, Any]:
        self.start(job)
        return next(iter(self.finish()), {})

    def close(self) -> None:
        self.server.terminate()
        with contextlib.suppress(BrokenPipeError):
            self.server.communicate()


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    found = Children()
    yield found
    found.close()


def content(step: int) -> dict[str, Any]:
    """What the children save for a step."""
    rng = np.random.default_rng(step)
    params = {"w": rng.random((64, 1024)), "b": rng.random(30)}
    return {"p": params, "opt": [rng.random((128, 512)), step], "loader": step}


def holds(path: Path, step: int) -> bool:
    return ck.verify(path).ok and same(ck.restore(path), content(step))


def test_c056_a_failed_save_reports_its_cause_and_harms_nothing(tmp_path: Path, children: Children):
    """A write that the system refuses is an OSError at once; the step before stays, and the next save works."""
    ck.save(tmp_path / "1", content(1))
    answer = children.run(path=str(tmp_path / "2"), content=2, file_bytes=1 << 18, then=str(tmp_path / "3"))
    assert not answer["done"]
    assert answer["oserror"], answer
    assert ck.steps(tmp_path) == [1, 3]
    assert sorted(os.listdir(tmp_path)) == ["1", "3", "LATEST"]
    assert holds(tmp_path / "1", 1)


def test_c056_a_full_disk_fails_the_save_and_gives_its_space_back(tmp_path: Path):
    """No space left: an OSError with that cause, what was committed stays, and the temporary space is free again."""
    mounting = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=3m none {tmp_path} && exec "$@"', "sh"]
    try:
        subprocess.run([*mounting, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a file system of its own")
    children = Children(*mounting)
    try:
        assert children.run(path=f"{tmp_path}/1", content=1)["done"]
        assert children.run(path=f"{tmp_path}/2", content=2)["done"]
        answer = children.run(path=f"{tmp_path}/3", content=3)
        assert not answer["done"]
        assert answer["oserror"], answer
        assert "space" in answer["text"]
        pid = children.server.pid
        inside = Path(f"/proc/{pid}/root{tmp_path}")
        assert sorted(os.listdir(inside)) == ["1", "2", "LATEST"]
        shutil.rmtree(inside / "1")
        assert children.run(path=f"{tmp_path}/3", content=3)["done"]
        assert sorted(os.listdir(inside)) == ["2", "3", "LATEST"]
    finally:
        children.close()


def test_c060_two_saves_of_one_step_at_once(tmp_path: Path, children: Children):
    """One of them is committed whole, the others say so; no deadlock, nothing is left lying about."""
    for step in range(3):
        jobs = [{"path": str(tmp_path / str(step)), "content": i} for i in range(3)]
        children.start(*jobs)
        answers = children.finish()
        assert sum(answer["done"] for answer in answers) == 1
        assert {answer["error"] for answer in answers if not answer["done"]} == {"Exists"}
        assert ck.verify(tmp_path / str(step)).ok
        winner = ck.restore(tmp_path / str(step))
        assert same(winner, content(winner["loader"]))
    assert ck.steps(tmp_path) == [0, 1, 2]
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "LATEST"]


# --- file systems and paths -------------------------------------------------------------------------------------------


def test_c063_relative_paths_and_a_later_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Any path is taken, and resolved at the call: what was opened stays where it was."""
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    ck.save("../out/1", {"w": np.ones(1000)})
    ck.save("./b/../../out/2", {"w": np.ones(1000)})
    ck.save(Path("rel"), {"w": np.ones(1000)})
    opened = ck.open("../out/1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ck.save("~/3", {"w": np.ones(1000)})
    monkeypatch.chdir("/")
    assert same(opened["w"][...], np.ones(1000))
    assert ck.steps(tmp_path / "out") == [1, 2]
    assert ck.latest(tmp_path / "out") == str(tmp_path / "out" / "2")
    assert ck.steps(tmp_path / "home") == [3]
    assert same(ck.restore(tmp_path / "a" / "rel"), {"w": np.ones(1000)})
    assert sorted(os.listdir(tmp_path)) == ["a", "home", "out"]


@pytest.mark.parametrize("name", ["with space", "ü日本", "per%20cent", "a#b?c", "-dash", "new\nline", "'\"$HOME"])
def test_c063_paths_with_odd_characters(name: str, tmp_path: Path):
    """A folder's name is taken as it is: nothing in it is escaped, expanded or cut off."""
    ck.save(tmp_path / name / "1", {"w": np.ones(1000)})
    assert same(ck.restore(tmp_path / name / "1"), {"w": np.ones(1000)})
    assert ck.steps(tmp_path / name) == [1]
    assert os.listdir(tmp_path) == [name]


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="the filter is for Linux, x86-64")
def test_c066_a_file_system_without_locks(tmp_path: Path, children: Children):
    """Saving needs no lock that a cluster's file system may lack, and leaves no lock files behind."""
    answer = children.run(path=str(tmp_path / "1"), content=1, no_locks=True)
    assert answer["done"], answer
    assert holds(tmp_path / "1", 1)
    assert not list(tmp_path.rglob("*__lock*"))
    answer = children.run(path=str(tmp_path / "1"), content=2, no_locks=True, overwrite=True)
    assert answer["done"], answer
    assert holds(tmp_path / "1", 2)


def test_c068_leftovers_of_a_crashed_attempt(tmp_path: Path, children: Children):
    """What a killed save left is invisible, does not block the same step, and is gone after the next save."""
    touches = children.run(path=str(tmp_path / "0"), content=0)["touches"]
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    for number in (touches // 2, touches // 3, touches * 2 // 3):
        assert children.run(path=str(tmp_path / "5"), content=4, touch=number) == {}
        assert len([name for name in os.listdir(tmp_path) if name.startswith("5.")]) == 1
        assert ck.latest(tmp_path) is None
        assert ck.steps(tmp_path) == []
        with pytest.raises(ck.NotFound):
            ck.restore(tmp_path / "5")
    ck.save(tmp_path / "5", content(5))
    assert holds(tmp_path / "5", 5)
    assert sorted(os.listdir(tmp_path)) == ["5", "LATEST"]


def test_c068_a_living_writer_is_left_alone(tmp_path: Path, children: Children):
    """Two live writers of one step never delete each other's folder; the later one is told that it exists."""
    touches = children.run(path=str(tmp_path / "0"), content=0)["touches"]
    (pid,) = children.start({"path": str(tmp_path / "5"), "content": 4, "touch": touches // 2, "signal": "SIGSTOP"})
    assert children.hear() == {"stopped": True}
    (theirs,) = [name for name in os.listdir(tmp_path) if name.startswith("5.")]
    ck.save(tmp_path / "5", content(5))
    assert theirs in os.listdir(tmp_path)
    os.kill(pid, signal.SIGCONT)
    (answer,) = children.finish()
    assert answer["error"] == "Exists"
    assert sorted(os.listdir(tmp_path)) == ["0", "5", "LATEST"]
    assert holds(tmp_path / "5", 5)


def test_c070_many_processes_make_the_same_folders(tmp_path: Path, children: Children):
    """Eight processes that begin in a root that none of them finds all succeed."""
    for attempt in range(2):
        root = tmp_path / str(attempt) / "deep" / "run"
        children.start(*({"path": str(root / str(i)), "content": i} for i in range(8)))
        answers = children.finish()
        assert len(answers) == 8
        assert all(answer["done"] for answer in answers), answers
        assert ck.steps(root) == list(range(8))
        assert all(holds(root / str(i), i) for i in range(8))
        assert sorted(os.listdir(root)) == [*map(str, range(8)), "LATEST"]


def test_c072_a_root_behind_a_link(tmp_path: Path):
    """A root may be a link and may move: nothing in it holds an absolute path, and no link is followed to delete."""
    real = tmp_path / "scratch"
    real.mkdir()
    (tmp_path / "run").symlink_to(real)
    ck.save(tmp_path / "run" / "1", content(1))
    assert (tmp_path / "run").is_symlink()
    shutil.move(real, tmp_path / "moved")
    moved = tmp_path / "moved"
    assert ck.latest(moved) == str(moved / "1")
    assert holds(moved / "1", 1)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "f").write_text("keep")
    (moved / "2").symlink_to(precious)
    for overwrite in (False, True):
        with pytest.raises(ck.Exists):
            ck.save(moved / "2", content(2), overwrite=overwrite)
    (moved / "3.orbax-checkpoint-tmp-0123456789abcdef").symlink_to(precious)
    ck.save(moved / "3", content(3))
    assert (precious / "f").read_text() == "keep"
    assert ck.steps(moved) == [1, 3]


@pytest.mark.parametrize("hint", ["", "{", '{"step": 7}', '{"step": "x"}', "[]", "\0", '{"step": -1, "seal": 3}'])
def test_c072_latest_is_only_a_hint(hint: str, root: str, tmp_path: Path):
    """A pointer that is torn, wrong or gone changes nothing: the listing decides, and the next save mends it."""
    for step in (1, 2):
        ck.save(tmp_path / str(step), content(step))
    (tmp_path / "LATEST").write_text(hint)
    assert ck.latest(tmp_path) == str(tmp_path / "2")
    ck.save(tmp_path / "3", content(3))
    assert json.loads((tmp_path / "LATEST").read_text())["step"] == 3
    (tmp_path / "LATEST").unlink()
    assert ck.latest(tmp_path) == str(tmp_path / "3")


def test_c073_an_existing_step(root: str):
    """An existing step is an error before any work; overwrite replaces that step alone, newer ones stay."""
    for step in (1, 2):
        ck.save(f"{root}/{step}", content(step))
    with pytest.raises(ck.Exists, match="overwrite=True"):
        ck.save(f"{root}/1", content(9))
    assert same(ck.restore(f"{root}/1"), content(1))
    ck.save(f"{root}/1", content(9), overwrite=True)
    assert ck.steps(root) == [1, 2]
    assert same(ck.restore(f"{root}/1"), content(9))
    assert same(ck.restore(f"{root}/2"), content(2))
    assert ck.verify(f"{root}/1").ok
    ck.save(f"{root}/3", content(3), overwrite=True)
    assert ck.steps(root) == [1, 2, 3]


def test_c073_killed_while_overwriting(tmp_path: Path, children: Children):
    """Killed before any touch of the file system, an overwrite leaves the old one or the new one, whole."""
    roots = [tmp_path / str(i) for i in range(4)]
    old = dict.fromkeys(roots, 8)
    for root in roots:
        ck.save(root / "2", content(8))
    seen = []
    for first in range(1, 1000, len(roots)):
        jobs = [{"path": str(root / "2"), "overwrite": True, "touch": first + i} for i, root in enumerate(roots)]
        new = {root: 17 - old[root] for root in roots}
        children.start(*(job | {"content": new[root]} for job, root in zip(jobs, roots, strict=True)))
        survivors = children.finish()
        for root in roots:
            assert ck.steps(root) == [2]
            found = ck.restore(root / "2")["loader"]
            assert holds(root / "2", found)
            assert found in (old[root], new[root])
            seen.append(found == new[root])
            old[root] = found
        if len(survivors) == len(roots):  # It takes fewer touches than this.
            break
    assert {False, True} == set(seen[: -len(roots)])
    for root in roots:
        ck.save(root / "2", content(5), overwrite=True)
        assert sorted(os.listdir(root)) == ["2", "LATEST"]


# --- crashes and damage -----------------------------------------------------------------------------------------------


def test_c075_killed_before_any_touch_of_the_file_system(tmp_path: Path, children: Children):
    """Wherever a save dies, the step before is the newest and whole, or the new one is, whole; a retry clears up."""
    roots = [tmp_path / str(i) for i in range(4)]
    for root in roots:
        ck.save(root / "1", content(1))
    committed = []
    for first in range(1, 1000, len(roots)):
        children.start(*({"path": str(root / "2"), "content": 2, "touch": first + i} for i, root in enumerate(roots)))
        survivors = children.finish()
        for root in roots:
            steps = ck.steps(root)
            assert steps in ([1], [1, 2])
            assert ck.latest(root) == str(root / str(steps[-1]))
            assert all(holds(root / str(step), step) for step in steps)
            committed.append(steps == [1, 2])
            ck.save(root / "2", content(2), overwrite=True)
            assert sorted(os.listdir(root)) == ["1", "2", "LATEST"]
            shutil.rmtree(root / "2")
        if len(survivors) == len(roots):  # It takes fewer touches than this.
            break
    # There is one moment of commit: nothing counts before it, all counts after it.
    assert committed == sorted(committed)
    assert {False, True} == set(committed[: -len(roots)])


def test_c075_killed_at_any_moment(tmp_path: Path, children: Children):
    """SIGKILL from outside, at random moments of the write: the step before is the newest, and a retry works."""
    rng = random.Random(75)
    root = tmp_path / "run"
    assert ck.latest(root) is None
    for round_ in range(12):
        before = ck.steps(root)
        (pid,) = children.start({"path": str(root / "2"), "content": 2, "overwrite": True})
        threading.Event().wait(rng.random() * 0.12)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        children.finish()
        steps = ck.steps(root)
        assert set(before) <= set(steps) <= {1, 2}
        assert all(holds(root / str(step), step) for step in steps)
        assert ck.latest(root) == (str(root / str(steps[-1])) if steps else None)
        if round_ % 3 == 2:
            ck.save(root / "2", content(2), overwrite=True)
            assert sorted(os.listdir(root)) == sorted({*map(str, before), "2", "LATEST"})
            shutil.rmtree(root / "2")
        if round_ == 5:
            ck.save(root / "1", content(1))


def test_c075_a_checkpoint_is_all_its_items_or_nothing(tmp_path: Path, children: Children):
    """Parameters, optimizer and loader are one commit: none of them comes back without the others."""
    ck.save(tmp_path / "1", content(1))
    touches = children.run(path=str(tmp_path / "0"), content=0)["touches"]
    assert children.run(path=str(tmp_path / "2"), content=2, touch=touches // 2) == {}
    newest = ck.latest(tmp_path)
    assert newest is not None
    assert same(ck.restore(newest, like=trees.zeros(content(0))), content(1))


def test_c077_truncated_and_empty_files(tmp_path: Path):
    """Any file cut short is found: the step is skipped by latest, and restoring it names what is damaged."""
    for step in (1, 2):
        ck.save(tmp_path / str(step), content(step))
    newest = tmp_path / "2"
    files = [path for path in newest.rglob("*") if path.is_file()]
    assert len(files) > 6
    for path in files:
        whole = path.read_bytes()
        for size in {0, len(whole) // 2, len(whole) - 2} - {-2, len(whole)}:
            path.write_bytes(whole[:size])
            assert ck.latest(tmp_path) == str(tmp_path / "1"), path
            report = ck.verify(newest)
            assert any(fault.place == os.path.relpath(path, newest) for fault in report.faults), path
            with pytest.raises(ck.Corrupt) as caught:
                ck.restore(newest)
            assert path.name in str(caught.value)
            assert ck.steps(tmp_path) == ([1] if path.name == "MANIFEST.json" else [1, 2])
        path.write_bytes(whole)
    assert holds(newest, 2)


def test_c080_look_alikes_in_the_root(tmp_path: Path):
    """Only folders with a whole manifest of their own step count; whatever else is there stays untouched."""
    ck.save(tmp_path / "10", content(10))
    (tmp_path / "999").mkdir()
    (tmp_path / "20").write_text("")
    for name in ("step_30 (copy)", "1000.tmp", "-5", "007", "+8", "1e3", "٣", "50.orbax-checkpoint-tmp-1"):
        shutil.copytree(tmp_path / "10", tmp_path / name)
    for name in (".DS_Store", "notes.txt"):
        (tmp_path / name).write_text("mine")
    shutil.copytree(tmp_path / "10", tmp_path / "11")
    (tmp_path / "12").symlink_to(tmp_path / "gone")
    before = sorted(os.listdir(tmp_path))
    assert ck.steps(tmp_path) == [10]
    assert ck.latest(tmp_path) == str(tmp_path / "10")
    report = ck.verify(tmp_path / "11")
    assert not report.ok
    assert "step 11" in str(report.faults[0])
    with pytest.raises(ck.NotFound):
        ck.restore(tmp_path / "999")
    with pytest.raises(ck.Exists):
        ck.save(tmp_path / "20", content(20))
    ck.save(tmp_path / "999", content(999))
    assert ck.steps(tmp_path) == [10, 999]
    assert before == sorted(set(os.listdir(tmp_path)))


# --- loaders ----------------------------------------------------------------------------------------------------------


class Numbers(grain.sources.RandomAccessDataSource[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: Any) -> int:
        return int(index)

    def __repr__(self) -> str:
        return "Numbers()"


def data_loader(workers: int = 0) -> Any:
    sampler = grain.samplers.IndexSampler(
        24, num_epochs=1, shard_options=grain.sharding.NoSharding(), shuffle=True, seed=3
    )
    return iter(grain.DataLoader(data_source=Numbers(), sampler=sampler, worker_count=workers))


def dataset(epochs: int = 3) -> Any:
    return iter(grain.MapDataset.range(8).shuffle(seed=1).repeat(epochs).batch(2).to_iter_dataset())


@pytest.mark.parametrize("make", [data_loader, dataset])
def test_c082_grain_iterators(make: Any, root: str):
    """A loader is a leaf: its state is taken at the call, and the next element is the one that would have come."""
    it = make()
    for _ in range(5):
        next(it)
    ck.save(f"{root}/5", {"w": np.ones(2), "loader": it})
    expected = [np.asarray(next(it)) for _ in range(4)]
    other = make()
    next(other)
    restored = ck.restore(f"{root}/5", like={"w": np.zeros(2), "loader": other})
    assert restored["loader"] is other
    assert same([np.asarray(next(other)) for _ in range(4)], expected)
    assert ck.open(f"{root}/5")["loader"].kind == "live"


def test_c085_another_number_of_workers(root: str):
    """A loader that cannot take the state is a Mismatch with its reason, never a stream that starts anew."""
    it = data_loader()
    next(it)
    ck.save(f"{root}/1", {"w": np.ones(2), "loader": it})
    w = np.zeros(2)
    with pytest.raises(ck.Mismatch, match="Worker count"):
        ck.restore(f"{root}/1", like={"w": w, "loader": data_loader(workers=1)})
    with pytest.raises(ck.Mismatch, match="loader"):
        ck.restore(f"{root}/1", like={"w": w})
    assert same(ck.restore(f"{root}/1", like={"w": w}, on_extra="ignore"), {"w": np.ones(2)})


@pytest.mark.parametrize("taken", [0, 3, 4, 5, 8, 11, 12])
def test_c087_epoch_boundaries(taken: int, root: str):
    """At a boundary the next epoch follows with its own shuffle; an exhausted iterator stays exhausted."""
    it = dataset()
    for _ in range(taken):
        next(it)
    ck.save(f"{root}/1", {"loader": it})
    expected = [np.asarray(batch) for batch in it]
    assert len(expected) == 12 - taken
    other = dataset()
    ck.restore(f"{root}/1", like={"loader": other})
    assert same([np.asarray(batch) for batch in other], expected)


def test_c089_state_reaches_the_iterator_that_is_consumed(root: str):
    """The object in the tree takes the state itself: after one element its state has moved on from there."""
    it = dataset()
    for _ in range(5):
        next(it)
    ck.save(f"{root}/1", {"loader": it})
    other = dataset()
    ck.restore(f"{root}/1", like={"loader": other})
    assert other.get_state() == it.get_state()
    next(other)
    assert other.get_state() != it.get_state()


class Stash:
    """Remembers the state that it is set to, and begins anew all the same."""

    def __init__(self):
        self.state, self.at = None, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return self.at

    def get_state(self):
        return {"at": self.at} if self.state is None else self.state

    def set_state(self, state: Any):
        self.state = state


class Deaf(Stash):
    def set_state(self, state: Any):
        pass


def test_c089_a_loader_that_does_not_take_its_state_is_refused(root: str):
    it = Deaf()
    next(it)
    ck.save(f"{root}/1", {"loader": it})
    with pytest.raises(ck.Mismatch, match=r"it was set to \{'at': 1\}, and says it is at \{'at': 0\}"):
        ck.restore(f"{root}/1", like={"loader": Deaf()})


def test_c089_a_loader_that_only_remembers_its_state_is_told_of(root: str):
    """What it says after elements were read is what it was set to: the first save after the resume tells."""
    events: list[Any] = []
    for until in (3, 5):
        with ck.Saver(root, every=ck.Every(steps=1), on_event=events.append) as saver:
            state, step = saver.resume({"loader": Stash(), "still": np.random.default_rng(0)})
            while step < until:
                next(state["loader"])
                step += 1
                saver.step(step, state)
                saver.wait()
    (warning,) = [event for event in events if event.kind == "warning"]
    assert warning.step == 4
    assert warning.names == ("loader",)
    assert "as it was resumed at step 3" in warning.message


# --- the resumed run --------------------------------------------------------------------------------------------------


def test_c091_the_step_is_the_number_of_completed_updates(root: str):
    """A run that is broken off and resumed twice uses every batch once, and the optimizer's count agrees."""
    tx = optax.adam(0.1)
    used: list[int] = []

    def run(stop: int) -> None:
        params = {"w": jnp.ones(4)}
        state = {"p": params, "o": tx.init(params)}
        newest = ck.latest(root)
        step = 0
        if newest is not None:
            state, step = ck.restore(newest, like=state), ck.open(newest).step
        assert step is not None
        while step < stop:
            used.append(step)
            updates, opt = tx.update({"w": state["p"]["w"] * (step + 1)}, state["o"])
            state = {"p": optax.apply_updates(state["p"], updates), "o": opt}
            step += 1
            ck.save(f"{root}/{step}", state)
            assert int(state["o"][0].count) == step

    for stop in (4, 7, 10):
        run(stop)
    assert used == list(range(10))
    assert ck.steps(root) == list(range(1, 11))
    with pytest.raises(ValueError, match="step 11"):
        ck.save(f"{root}/11", {}, step=12)


def test_c093_a_schedule_goes_on_or_is_restarted_on_purpose(root: str):
    """Exact continuation is the default; a new schedule or parameters alone are named leaf by leaf."""
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(optax.linear_schedule(0.0, 1.0, 10)))
    params = {"w": jnp.ones(4)}
    state = tx.init(params)
    for _ in range(4):
        _, state = tx.update(params, state)
    ck.save(f"{root}/4", {"p": params, "o": state})
    fresh = {"p": {"w": jnp.zeros(4)}, "o": tx.init(params)}
    resumed = ck.restore(f"{root}/4", like=fresh)
    assert (int(resumed["o"][0].count), int(resumed["o"][1].count)) == (4, 4)
    restarted = ck.restore(f"{root}/4", like=fresh, only=["p", "o.0"])
    assert (int(restarted["o"][0].count), int(restarted["o"][1].count)) == (4, 0)
    assert same(restarted["o"][0], state[0])
    alone = ck.restore(f"{root}/4", like=fresh, only="p")
    assert (int(alone["o"][0].count), int(alone["o"][1].count)) == (0, 0)
    assert same(alone["p"], params)


# --- a root over time -------------------------------------------------------------------------------------------------


def test_c098_steps_out_of_order(root: str):
    """A save below the newest step happens like any other; the newest is the one with the highest number."""
    for step in (10, 20, 5):
        manifest = ck.save(f"{root}/{step}", content(step))
        assert manifest.step == step
    assert ck.steps(root) == [5, 10, 20]
    assert ck.latest(root) == f"{root}/20"
    assert same(ck.restore(f"{root}/5"), content(5))


def test_c100_checkpoints_deleted_by_hand(tmp_path: Path):
    """The listing is what counts: steps that vanished, the newest too, disturb nothing."""
    for step in range(4):
        ck.save(tmp_path / str(step), content(step))
    shutil.rmtree(tmp_path / "1")
    shutil.rmtree(tmp_path / "3")
    assert ck.steps(tmp_path) == [0, 2]
    assert ck.latest(tmp_path) == str(tmp_path / "2")
    ck.save(tmp_path / "1", content(1))
    assert json.loads((tmp_path / "LATEST").read_text())["step"] in (1, 2)
    assert ck.latest(tmp_path) == str(tmp_path / "2")
    shutil.rmtree(tmp_path)
    assert ck.steps(tmp_path) == []
    assert ck.latest(tmp_path) is None


def test_c100_deleted_while_being_read(tmp_path: Path):
    """A checkpoint that is deleted under a reader is NotFound, never Corrupt."""
    ck.save(tmp_path / "1", content(1))
    opened = ck.open(tmp_path / "1")
    shutil.rmtree(tmp_path / "1")
    with pytest.raises(ck.NotFound, match="deleted while being read"):
        opened["p.w"][...]


# --- notebooks and versions -------------------------------------------------------------------------------------------


def test_c109_inside_a_running_event_loop(root: str):
    """Saving and restoring work inside a coroutine, again and again, and leave the loop as it was."""

    async def cell() -> None:
        for step in range(3):
            ck.save(f"{root}/{step}", content(step))
            assert same(ck.restore(f"{root}/{step}"), content(step))
            await asyncio.sleep(0)
        await asyncio.to_thread(ck.save, f"{root}/3", content(3))
        assert asyncio.get_running_loop().is_running()

    asyncio.run(cell())
    asyncio.run(cell_again := _verify_all(root))
    assert cell_again.cr_frame is None
    assert not hasattr(asyncio, "_nest_patched")


async def _verify_all(root: str) -> None:
    assert ck.steps(root) == [0, 1, 2, 3]
    assert all(ck.verify(f"{root}/{step}").ok for step in range(4))


def test_c109_from_several_threads(root: str):
    """Threads that save and restore at once do not disturb each other."""
    failed: list[BaseException] = []

    def work(step: int) -> None:
        try:
            for turn in range(3):
                ck.save(f"{root}/{step}", {**content(step), "turn": jnp.int32(turn)}, overwrite=True)
                assert same(ck.restore(f"{root}/{step}"), {**content(step), "turn": np.array(turn, np.int32)})
        except BaseException as error:  # noqa: BLE001  Handed to the main thread.
            failed.append(error)

    threads = [threading.Thread(target=work, args=(step,)) for step in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert ck.steps(root) == list(range(6))


def _reseal(path: Path, old: bytes, new: bytes) -> None:
    import hashlib

    data = path.read_bytes()
    assert data.count(old) == 1
    body = data.replace(old, new).rpartition(b',"seal":')[0]
    path.write_bytes(body + b',"seal":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n')


def test_c111_versions(tmp_path: Path):
    """Format and version stand first; a newer major version is refused by name, unknown keys are ignored."""
    ck.save(tmp_path / "1", content(1))
    path = tmp_path / "1" / "MANIFEST.json"
    manifest = json.loads(path.read_bytes())
    major, minor = manifest["version"]
    assert list(manifest)[:2] == ["format", "version"]
    assert manifest["format"] == "ckpt_jax"
    start = b'"version":[%d,%d]' % (major, minor)
    _reseal(path, start, b'"version":[%d,%d],"unknown":{"a":[1,2]}' % (major, minor + 7))
    assert holds(tmp_path / "1", 1)
    assert ck.steps(tmp_path) == [1]
    _reseal(path, b'"version":[%d,%d]' % (major, minor + 7), b'"version":[%d,0]' % (major + 1000))
    with pytest.raises(ck.Unsupported, match=rf"format {major + 1000}\.0.*upgrade|format {major + 1000}\.0") as caught:
        ck.restore(tmp_path / "1")
    assert "pip install --upgrade ckpt_jax" in str(caught.value)
    with pytest.raises(ck.Unsupported):
        ck.open(tmp_path / "1")
    assert ck.steps(tmp_path) == []
    assert ck.latest(tmp_path) is None
