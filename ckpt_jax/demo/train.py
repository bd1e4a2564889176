"""The trainer: one process of a run, with the training loop of the README.

It tells what happens on stdout, one JSON object a line, and ends when its stdin does.
"""

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ckpt_jax as ck

from . import model, settings, text

# Gloo prints to stdout, in the middle of others' lines: `main` makes that stderr, and the pipe is for events alone.
EVENTS = os.fdopen(os.dup(1), "w", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ckpt_jax.demo.train", description=__doc__)
    parser.add_argument("config", type=Path, help="the settings")
    parser.add_argument("root", type=Path, help="the run's folder")
    parser.add_argument("--mesh", choices=("usual", "other"), required=True, help="which of the meshes to run on")
    parser.add_argument("--process", type=int, required=True, help="which of the mesh's processes this one is")
    parser.add_argument("--port", type=int, required=True, help="where the processes meet, on this machine")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one waits for another in a save")
    parser.add_argument("--again", type=Path, help="where to save what was resumed, as it is")
    given = parser.parse_args()
    os.dup2(2, 1)
    # A thread of its own: the main one may hang in a collective for as long as it likes.
    threading.Thread(target=end_with_stdin, daemon=True).start()
    chosen = settings.load(given.config)
    mesh = chosen.mesh[given.mesh]
    try:
        if mesh.processes > 1:
            jax.distributed.initialize(f"127.0.0.1:{given.port}", mesh.processes, given.process)
        train(chosen, mesh, given.root, given.timeout, given.again)
    except Exception as error:  # noqa: BLE001  Whatever it was, it is told, and the process ends.
        traceback.print_exc()
        say("stopped", why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        sys.stderr.flush()
        os._exit(1)  # The usual way out ends with JAX's farewell, which waits for the others: one may be dead.


def end_with_stdin() -> None:
    """Whoever started this process is gone once its stdin ends."""
    sys.stdin.read()
    os._exit(1)


def train(chosen: settings.Settings, mesh: settings.Mesh, root: Path, timeout: float, again: Path | None) -> None:
    devices = jax.make_mesh(mesh.shape, mesh.axes, axis_types=(AxisType.Auto,) * 2)
    paths = text.files()
    corpus = text.read(paths)
    windows = text.windows(corpus, context=chosen.model.context)
    batches = ck.data.global_batches(windows, chosen.train.batch, seed=chosen.train.seed)

    graph, abstract = nnx.split(nnx.eval_shape(lambda: build(chosen)))
    shardings = jax.tree.map(lambda leaf: placed(devices, leaf.shape), abstract)
    arrays = jax.jit(lambda: nnx.split(build(chosen))[1], out_shardings=shardings)()
    update = updater(graph, shardings)
    rows = NamedSharding(devices, PartitionSpec(devices.axis_names[0]))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.filter_state(abstract, nnx.Param)["model"]))
    say("ready", parameters=parameters, files=len(paths), text=len(corpus))
    multihost_utils.sync_global_devices("ready")  # Start-up may take one longer than a short timeout allows.

    state = {"arrays": arrays, "data": batches, "step": 0}
    every, keep = ck.Every(steps=chosen.train.save_every), ck.Keep(last=chosen.train.keep)
    with ck.Saver(root, every=every, keep=keep, timeout=timeout, on_event=tell) as saver:
        state, step = saver.resume(state)
        if again:
            with ck.Saver(again) as copy:
                copy.save(step, state)
        while step < chosen.train.steps and not saver.preempted:
            began = time.perf_counter()
            batch = next(state["data"])
            tokens = jax.make_array_from_process_local_data(rows, batch["tokens"].astype("int32"))
            state["arrays"], loss = update(state["arrays"], tokens)
            loss = float(loss)
            step = state["step"] = step + 1
            seconds = time.perf_counter() - began
            say("step", step=step, loss=loss, positions=batch["position"].tolist(), seconds=seconds)
            if step % chosen.train.save_every == 0:
                saver.wait()  # A run leaves this out: a save that is late is skipped there; here each is to be seen.
            saver.step(step, state, metrics={"loss": loss})


def build(chosen: settings.Settings) -> dict[str, Any]:
    gpt = model.GPT(chosen.model, rngs=nnx.Rngs(params=chosen.train.seed, dropout=chosen.train.seed + 1))
    return {"model": gpt, "optimizer": model.optimizer(gpt, chosen.train)}


def placed(devices: jax.sharding.Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """A matrix is cut along both axes of the mesh, whatever their names; the rest is everywhere."""
    return NamedSharding(devices, PartitionSpec(*devices.axis_names) if len(shape) == 2 else PartitionSpec())


def updater(graph: Any, shardings: Any) -> Callable[[Any, jax.Array], tuple[Any, jax.Array]]:
    """The compiled training step; it takes the memory of the state that it is given."""

    def update(arrays: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        both = nnx.merge(graph, arrays)
        loss, gradients = nnx.value_and_grad(model.loss)(both["model"], tokens)
        both["optimizer"].update(both["model"], gradients)
        return nnx.state(both), loss

    return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))


def tell(event: Any) -> None:
    """Passes on what the Saver tells."""
    say(event.kind, step=event.step, bytes=event.bytes, seconds=event.seconds, text=str(event))


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event} | facts), file=EVENTS, flush=True)


if __name__ == "__main__":
    main()
