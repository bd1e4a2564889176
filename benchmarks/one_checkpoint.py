"""One checkpoint of 1.49 GB, and one of 10,000 small leaves: ckpt_jax, Orbax v0 and v1, and the raw disk, side by side.

    python benchmarks/one_checkpoint.py [--repeats 5] [--folder DIR]

Every round runs all of them in turn, so that a noisy neighbour hits each alike; the table has medians, and ratios to
Orbax's in the same run. The state is a GPT-2-small with Adam moments on a 4×2 mesh of virtual CPU devices: 439 leaves.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import psutil
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import ckpt_jax as ck

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


def raw_disk(path: Path, nbytes: int) -> None:
    """The same bytes in one file, made durable: what the disk can do."""
    block = np.random.default_rng(0).integers(0, 255, 64 << 20, dtype=np.uint8).data
    with path.open("wb") as file:
        for start in range(0, nbytes, len(block)):
            file.write(block[: nbytes - start])
        file.flush()
        os.fsync(file.fileno())


def raw_read(path: Path) -> None:
    buffer = bytearray(64 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def clean(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def measure(runs: dict[str, Callable[[], Any]], repeats: int, before: Callable[[str], None]) -> dict[str, list[float]]:
    """Seconds of each, `repeats` times in turn, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats + 1):
        for name, run in runs.items():
            before(name)
            started = time.perf_counter()
            result = run()
            jax.block_until_ready([x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)])
            if number:
                seconds[name].append(time.perf_counter() - started)
            del result
            print(".", end="", file=sys.stderr, flush=True)
    return seconds


def saves(folder: Path, tree: Any) -> dict[str, Callable[[], Any]]:
    def orbax_v0() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "orbax v0", tree)
            checkpointer.wait_until_finished()

    nbytes = sum(x.nbytes for x in jax.tree.leaves(tree))
    return {
        "ckpt_jax": lambda: ck.save(folder / "ckpt_jax", tree) and None,
        "orbax v0": orbax_v0,
        "orbax v1": lambda: v1.save(folder / "orbax v1", tree),
        "raw disk": lambda: raw_disk(folder / "raw disk", nbytes),
    }


def restores(folder: Path, target: Any) -> dict[str, Callable[[], Any]]:
    return {
        "ckpt_jax": lambda: ck.restore(folder / "ckpt_jax", target),
        "orbax v0": lambda: ocp.StandardCheckpointer().restore(folder / "orbax v0", target),
        "orbax v1": lambda: v1.load(folder / "orbax v1", target),
        "raw disk": lambda: raw_read(folder / "raw disk"),
    }


def row(title: str, seconds: dict[str, list[float]]) -> str:
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [f"1/{middle[peer] / middle['ckpt_jax']:.1f}" for peer in ("orbax v0", "orbax v1")]
    cells = [f"{middle[name]:.2f}" for name in ("ckpt_jax", "orbax v0", "orbax v1")]
    raw = f"{middle['raw disk']:.2f}" if "raw disk" in middle else "–"
    return f"| {title} | **{cells[0]}** | {cells[1]} | {cells[2]} | {raw} | {ratios[0]} | {ratios[1]} |"


def peak_of(what: str) -> float:
    """MB of memory at most beyond the state itself, measured in a process of its own."""
    command = [sys.executable, __file__, "--peak", what]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def peak(what: str) -> None:
    """In a child process: saves (or restores) once, and prints the peak in MB beyond the state (or what came back)."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree = state(mesh)
        peer, verb = what.split(":")
        if verb == "save":
            with Peak() as found:
                saves(folder, tree)[peer]()
            print(found.most / 1e6)
            return
        saves(folder, tree)[peer]()
        target = abstract(tree, lambda x: x.sharding)
        size = sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards)
        del tree
        with Peak() as found:
            result = jax.block_until_ready(restores(folder, target)[peer]())
        del result
        print((found.most - size) / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to write; by default a temporary folder")
    parser.add_argument("--peak", default=None, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.peak:
        peak(chosen.peak)
        return
    mesh, other = jax.make_mesh((4, 2), ("data", "model")), jax.make_mesh((2, 4), ("data", "model"))
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        big = state(mesh)
        same = abstract(big, lambda x: x.sharding)
        turned = abstract(big, lambda x: NamedSharding(other, P("model", "data") if x.ndim == 2 else P()))
        nbytes = sum(x.nbytes for x in jax.tree.leaves(big))
        lines = [
            f"{nbytes / 1e9:.2f} GB in {len(jax.tree.leaves(big))} leaves, {os.cpu_count()} cores, "
            f"{chosen.repeats} rounds, medians in seconds",
            "",
            "| | ckpt_jax | Orbax v0 | Orbax v1 | raw disk | against v0 | against v1 |",
            "|---|---|---|---|---|---|---|",
        ]
        lines.append(row("save, durable", measure(saves(folder, big), chosen.repeats, lambda n: clear(folder / n))))
        lines.append(row("restore, same mesh", measure(restores(folder, same), chosen.repeats, quiet)))
        lines.append(row("restore, transposed mesh", measure(restores(folder, turned), chosen.repeats, quiet)))
        del big
        draw = np.random.default_rng(0)
        small = {f"l{i}": jnp.asarray(draw.standard_normal(64, dtype=np.float32)) for i in range(SMALL)}
        fewer = max(1, chosen.repeats // 2)
        rows = saves(folder, small)
        rows.pop("raw disk")
        lines.append(row(f"save, {SMALL:,} leaves of 256 B", measure(rows, fewer, lambda n: clear(folder / n))))
        rows = restores(folder, small)
        rows.pop("raw disk")
        lines.append(row(f"restore, {SMALL:,} leaves of 256 B", measure(rows, fewer, quiet)))
    for verb in ("save", "restore"):
        cells = [f"{peak_of(f'{peer}:{verb}'):.0f} MB" for peer in ("ckpt_jax", "orbax v0", "orbax v1")]
        lines.append(f"| {verb}: peak memory beyond the state | **{cells[0]}** | {cells[1]} | {cells[2]} | – | | |")
    print("\n" + "\n".join(lines))


def quiet(_: str) -> None:
    """What others wrote is on the disk: no restore shares it with another's late writes."""
    os.sync()


def clear(path: Path) -> None:
    path.unlink() if path.is_file() else clean(path)
    os.sync()


if __name__ == "__main__":
    main()
