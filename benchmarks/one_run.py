"""A run that saves as it trains: for how long a save blocks the loop, and how it slows the steps beside it.

    python benchmarks/one_run.py [--repeats 5] [--folder DIR]

The state is the 1.49 GB of `one_checkpoint.py`. Each contender has a process of its own. The step is a jitted update of
every array, with the state donated. "Bare calls" is what JAX itself takes to hold every piece of the state against the
donation by the next step, and nothing else.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from one_checkpoint import state

STEPS = 6  # Timed without a save; as many as fit are timed beside one.


def contender(name: str, folder: Path) -> tuple[Callable[[int, Any], None], Callable[[], bool], Callable[[], None]]:
    """How it saves without waiting, whether that is over, and how to wait for it."""
    if name == "ckpt_jax":
        import ckpt_jax as ck

        saver = ck.Saver(folder / name)
        return saver.save, saver._idle.is_set, saver.wait
    if name == "bare calls":
        held: list[np.ndarray] = []

        def hold(step: int, tree: Any) -> None:
            for array in jax.tree.leaves(tree):
                pieces = 1 if array.is_fully_replicated else len(array.sharding.addressable_devices)
                held.extend(np.asarray(array.addressable_data(i)) for i in range(pieces))

        return hold, lambda: True, held.clear
    import orbax.checkpoint as ocp

    saver = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def save(step: int, tree: Any) -> None:
        saver.save(folder / name / str(step), args=ocp.args.StandardSave(tree))

    manager: Any = saver._async_manager
    return save, lambda: manager._thread is None or not manager._thread.is_alive(), saver.wait_until_finished


def serve(name: str, folder: Path, repeats: int) -> None:
    """Prints seconds for each repeat: that the save blocked, of a step alone, of a step beside it, until it is over."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    tree = state(mesh)
    update = jax.jit(
        lambda t: jax.tree.map(lambda x: x * jnp.asarray(1.0001, x.dtype) if x.ndim else x + 1, t), donate_argnums=0
    )
    save, over, wait = contender(name, folder)
    tree = jax.block_until_ready(update(tree))

    def step() -> float:
        nonlocal tree
        started = time.perf_counter()
        tree = jax.block_until_ready(update(tree))
        return time.perf_counter() - started

    for number in range(repeats + 1):
        shutil.rmtree(folder / name, ignore_errors=True)
        alone = statistics.median(step() for _ in range(STEPS))
        started = time.perf_counter()
        save(number, tree)
        blocked = time.perf_counter() - started
        beside = [step()]
        while not over():
            beside.append(step())
        wait()
        print(f"took {blocked} {alone} {statistics.median(beside)} {time.perf_counter() - started}", flush=True)


def measured(name: str, folder: Path, repeats: int) -> list[float]:
    command = [sys.executable, __file__, "--contender", name, "--folder", str(folder), "--repeats", str(repeats)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [list(map(float, line.split()[1:])) for line in out.splitlines() if line.startswith("took ")]
    return [statistics.median(column) for column in zip(*lines[1:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to write; by default a temporary folder")
    parser.add_argument("--contender", default=None, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.contender:
        serve(chosen.contender, Path(chosen.folder), chosen.repeats)
        return
    names = ("ckpt_jax", "orbax", "bare calls")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        ours, theirs, bare = (measured(name, Path(folder), chosen.repeats) for name in names)
    print(f"1.49 GB in 439 leaves, {chosen.repeats} saves each, medians in ms\n")
    print("| | ckpt_jax | Orbax async | bare calls | against Orbax |")
    print("|---|---|---|---|---|")
    titles = ("loop blocked", "step alone", "step beside a save", "save over after")
    for title, a, b, c in zip(titles, ours, theirs, [*bare[:2], None, None], strict=True):
        floor = "–" if c is None else f"{1000 * c:.1f}"
        print(f"| {title} | **{1000 * a:.1f}** | {1000 * b:.1f} | {floor} | 1/{b / a:.1f} |")


if __name__ == "__main__":
    main()
