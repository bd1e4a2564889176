"""One checkpoint of 1.49 GB, and one of 10,000 small leaves: ckpt_jax, Orbax v0 and v1, and bare calls, side by side.

    python benchmarks/one_checkpoint.py [--repeats 5] [--folder DIR]

Each contender has a process of its own, with the same state in it, and they take turns, one at a time, so that a noisy
neighbour hits each alike; the table has medians, and ratios to Orbax's in the same run. Each restore is the first big
one of a new process, as after a failure, from files that have been read before. The state is a GPT-2-small with
Adam moments on a 4×2 mesh of virtual CPU devices: 439 leaves. "Bare calls" is the least that can be done: the same
bytes digested and written to files by four threads, or read, digested and copied to devices; no names and no commit.
"""

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import crc32c
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import xxhash
from jax._src.core import ShapedArray
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, LAYERS, VOCABULARY, CONTEXT = 768, 12, 50304, 1024
SMALL = 10_000  # leaves of 64 float32


def parameters() -> dict[str, Any]:
    draw = np.random.default_rng(0)

    def array(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape, dtype=np.float32)

    tree: dict[str, Any] = {"wte": array(VOCABULARY, WIDTH), "wpe": array(CONTEXT, WIDTH)}
    for layer in range(LAYERS):
        tree[f"h{layer}"] = {
            "ln1": {"g": array(WIDTH), "b": array(WIDTH)},
            "attn": {
                "qkv": array(WIDTH, 3 * WIDTH),
                "qkvb": array(3 * WIDTH),
                "o": array(WIDTH, WIDTH),
                "ob": array(WIDTH),
            },
            "ln2": {"g": array(WIDTH), "b": array(WIDTH)},
            "mlp": {
                "up": array(WIDTH, 4 * WIDTH),
                "upb": array(4 * WIDTH),
                "dn": array(4 * WIDTH, WIDTH),
                "dnb": array(WIDTH),
            },
        }
    return tree


def state(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    def put(x: np.ndarray) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, P("data", "model") if x.ndim == 2 else P()))

    made = parameters()
    return {key: jax.tree.map(put, made) for key in ("params", "mu", "nu")} | {"step": jnp.int32(3)}


def abstract(tree: Any, sharding: Callable[[jax.Array], Any]) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)), tree)


class Peak:
    """The most memory that this process held within a `with`, beyond what it held before."""

    def __enter__(self) -> "Peak":
        self.process = psutil.Process()
        self.base, self.most, self.running = self.process.memory_info().rss, 0, True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while self.running:
            self.most = max(self.most, self.process.memory_info().rss - self.base)
            time.sleep(0.005)

    def __exit__(self, *_: object) -> None:
        self.running = False
        self.thread.join()


def bare_save(path: Path, tree: Any) -> None:
    """Every shard once, in files of 64 MiB, durable."""
    path.mkdir()
    files: list[list[np.ndarray]] = [[]]
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                files[-1].append(np.asarray(shard.data))
        if sum(piece.nbytes for piece in files[-1]) > 64 << 20:
            files.append([])

    def write(number: int, pieces: list[np.ndarray]) -> None:
        with (path / str(number)).open("wb", buffering=0) as file:
            for piece in pieces:
                data = piece.reshape(-1).view(np.uint8).data
                xxhash.xxh3_128_hexdigest(data)
                os.writev(file.fileno(), [data, crc32c.crc32c(data).to_bytes(4, "little")])
            os.fsync(file.fileno())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(len(files)), files))


def bare_restore(path: Path, target: Any) -> Any:
    """As many bytes as the target has, each read once, in arrays that own their memory; what they say is nonsense."""
    files = sorted(path.iterdir(), key=lambda file: int(file.name))
    sizes = [file.stat().st_size for file in files]
    own = threading.local()
    jobs, number, at = [], 0, 0
    for leaf in jax.tree.leaves(target):
        shape = leaf.sharding.shard_shape(leaf.shape)
        count = math.prod(shape) * leaf.dtype.itemsize
        boxes: dict[Any, list[Any]] = {}
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            boxes.setdefault(str(index), []).append(device)
        for devices in boxes.values():
            if at + count > sizes[number] and number + 1 < len(files):
                number, at = number + 1, 0
            jobs.append((files[number], at, count, shape, leaf.dtype, devices))
            at += count

    def read(job: tuple[Path, int, int, tuple[int, ...], Any, list[Any]]) -> list[Any]:
        file, start, count, shape, dtype, devices = job
        if not hasattr(own, "buffer") or len(own.buffer) < count:
            own.buffer = np.empty(max(count, 32 << 20), np.uint8)
        data = own.buffer[:count]
        with file.open("rb", buffering=0) as opened:
            os.preadv(opened.fileno(), [data.data], start)
        xxhash.xxh3_128_hexdigest(data.data)
        values = data.view(dtype).reshape(shape)
        return [_owned(values, device) for device in devices]

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(read, jobs))


def _owned(values: np.ndarray, device: Any) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(device)
    aval = ShapedArray(values.shape, values.dtype)
    copy = xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
    return xla_client.batched_device_put(aval, sharding, [values], [device], True, False, copy)


# --- a contender, in a process of its own -----------------------------------------------------------------------------


def contender(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How it saves a tree to a path, and how it restores one into a target. Imports nothing of the others."""
    if name == "ckpt_jax":
        import ckpt_jax as ck

        return ck.save, ck.restore
    if name == "orbax v1":
        from orbax.checkpoint import v1

        return v1.save, v1.load
    if name == "bare calls":
        return bare_save, bare_restore
    import orbax.checkpoint as ocp

    def save(path: Path, tree: Any) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)
            checkpointer.wait_until_finished()

    return save, lambda path, target: ocp.StandardCheckpointer().restore(path, target)


def tree_of(what: str) -> Any:
    if what == "big":
        return state(jax.make_mesh((4, 2), ("data", "model")))
    draw = np.random.default_rng(0)
    return {f"l{i}": jnp.asarray(draw.standard_normal(64, dtype=np.float32)) for i in range(SMALL)}


def target_of(tree: Any, mesh: str) -> Any:
    other = jax.make_mesh((2, 4), ("data", "model"))
    if mesh == "same":
        return abstract(tree, lambda x: x.sharding)
    return abstract(tree, lambda x: NamedSharding(other, P("model", "data") if x.ndim == 2 else P()))


def serve(name: str, folder: Path) -> None:
    """Does what it is told, line by line, and answers each with the seconds that it took."""
    save, restore = contender(name)
    little = {"x": jnp.ones(8)}  # What there is to import and to set up once is not in the first answer.
    save(folder / f"{name} little {os.getpid()}", little)
    restore(folder / f"{name} little {os.getpid()}", abstract(little, lambda x: x.sharding))
    tree = None
    for line in sys.stdin:
        verb, what, mesh = line.split()
        path = folder / f"{name} {what}"
        if tree is None:
            tree = tree_of(what)
        if verb == "save":
            shutil.rmtree(path, ignore_errors=True)
            arguments = path, tree
        else:
            arguments, tree = (path, target_of(tree, mesh)), None
        os.sync()  # What others wrote is on the disk: nobody shares it with another's late writes.
        started = time.perf_counter()
        result = (save if verb == "save" else restore)(*arguments)
        jax.block_until_ready([x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)])
        print(f"took {time.perf_counter() - started}", flush=True)
        del result


def peak(name: str, verb: str) -> None:
    """Saves (or restores) once, and prints the peak in MB beyond the state (or beyond what came back)."""
    save, restore = contender(name)
    tree = state(jax.make_mesh((4, 2), ("data", "model")))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        if verb == "save":
            with Peak() as found:
                save(path, tree)
            print(found.most / 1e6)
            return
        save(path, tree)
        target = abstract(tree, lambda x: x.sharding)
        size = sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards)
        del tree
        with Peak() as found:
            result = jax.block_until_ready(restore(path, target))
        del result
        print((found.most - size) / 1e6)


# --- all of them, in turn ---------------------------------------------------------------------------------------------

CONTENDERS = ("ckpt_jax", "orbax v0", "orbax v1", "bare calls")


class Child:
    """A contender's process."""

    def __init__(self, name: str, folder: Path):
        command = [sys.executable, __file__, "--contender", name, "--folder", str(folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, request: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{request}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:  # A contender may print things of its own.
            if line.startswith("took "):
                return float(line.split()[1])
        raise RuntimeError(f"a contender ended with {self.process.wait()}")

    def end(self) -> None:
        self.process.communicate()


def measure(names: Sequence[str], folder: Path, repeats: int, request: str) -> dict[str, list[float]]:
    """Seconds of each, `repeats` times in turn, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    children: dict[str, Child] = {}
    for number in range(repeats + 1):
        for name in names:
            if name not in children:
                children[name] = Child(name, folder)
            found = children[name].ask(request)
            if number:
                seconds[name].append(found)
            if request.startswith("restore"):
                children.pop(name).end()
            print(".", end="", file=sys.stderr, flush=True)
    for child in children.values():
        child.end()
    return seconds


def row(title: str, seconds: dict[str, list[float]]) -> str:
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [f"1/{middle[peer] / middle['ckpt_jax']:.1f}" for peer in ("orbax v0", "orbax v1")]
    cells = [f"{middle[name]:.2f}" for name in ("ckpt_jax", "orbax v0", "orbax v1")]
    raw = f"{middle['bare calls']:.2f}" if "bare calls" in middle else "–"
    return f"| {title} | **{cells[0]}** | {cells[1]} | {cells[2]} | {raw} | {ratios[0]} | {ratios[1]} |"


def raw_disk(folder: Path, repeats: int) -> str:
    """What the disk takes for as many bytes, in one file through the page cache, with nothing done to them."""
    block, count = os.urandom(64 << 20), 1_493_000_000 >> 26
    path = folder / "raw"
    seconds: dict[str, list[float]] = {"written and synced": [], "read": []}
    for _ in range(repeats):
        os.sync()
        started = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(count):
                file.write(block)
            os.fsync(file.fileno())
        seconds["written and synced"].append(time.perf_counter() - started)
        started = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            into = bytearray(len(block))
            while file.readinto(into):
                pass
        seconds["read"].append(time.perf_counter() - started)
        path.unlink()
    said = " and ".join(f"{what} in {statistics.median(found):.2f} s" for what, found in seconds.items())
    return f"The raw disk: {count * len(block) / 1e9:.2f} GB {said}."


def peak_of(name: str, verb: str) -> float:
    command = [sys.executable, __file__, "--contender", name, "--peak", verb]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def table(folder: Path, repeats: int) -> list[str]:
    fewer = max(1, repeats - repeats // 3)  # Orbax takes half a minute for each.
    lines = [
        f"1.49 GB in 439 leaves, {os.cpu_count()} cores, {repeats} rounds, medians in seconds",
        "",
        "| | ckpt_jax | Orbax v0 | Orbax v1 | bare calls | against v0 | against v1 |",
        "|---|---|---|---|---|---|---|",
        row("save, durable", measure(CONTENDERS, folder, repeats, "save big same")),
        row("restore, same mesh", measure(CONTENDERS, folder, repeats, "restore big same")),
        row("restore, transposed mesh", measure(CONTENDERS, folder, repeats, "restore big turned")),
        row(f"save, {SMALL:,} leaves of 256 B", measure(CONTENDERS[:3], folder, fewer, "save small same")),
        row(f"restore, {SMALL:,} leaves of 256 B", measure(CONTENDERS[:3], folder, fewer, "restore small same")),
    ]
    for verb in ("save", "restore"):
        cells = [f"{peak_of(name, verb):.0f} MB" for name in CONTENDERS[:3]]
        lines.append(f"| {verb}: peak memory beyond the state | **{cells[0]}** | {cells[1]} | {cells[2]} | – | | |")
    return [*lines, "", raw_disk(folder, repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to write; by default a temporary folder")
    parser.add_argument("--contender", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--peak", default=None, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.peak:
        peak(chosen.contender, chosen.peak)
    elif chosen.contender:
        serve(chosen.contender, Path(chosen.folder))
    else:
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            print("\n" + "\n".join(table(Path(folder), chosen.repeats)))


if __name__ == "__main__":
    main()
