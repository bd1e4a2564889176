"""The trainer: one process that trains, saves as it goes, and takes over from a checkpoint if there is one.

It tells what happens on stdout, one JSON object a line.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ckpt_jax

from . import model, settings, text

Place = Callable[[str, tuple[int, ...], Any], NamedSharding]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ckpt_jax.demo.train", description=__doc__)
    parser.add_argument("config", type=Path, help="the settings")
    parser.add_argument("root", type=Path, help="where the checkpoints go")
    parser.add_argument("--start", type=Path, required=True, help="the root whose newest step to start from, if any")
    parser.add_argument("--side", choices=("before", "after"), required=True, help="which of the meshes to run on")
    parser.add_argument("--until", type=int, required=True, help="the last step")
    given = parser.parse_args()
    chosen = settings.load(given.config)
    train(chosen, chosen.mesh[given.side], given.root, given.start, given.until)


def train(chosen: settings.Settings, mesh: settings.Mesh, root: Path, start: Path, until: int) -> None:
    devices = jax.make_mesh(mesh.shape, mesh.axes, axis_types=(AxisType.Auto,) * 2)
    place = placement(devices)
    paths = text.files()
    corpus = text.read(paths)
    data = text.batches(corpus, context=chosen.model.context, batch=chosen.train.batch, seed=chosen.train.seed)

    graph, abstract = nnx.split(nnx.eval_shape(lambda: build(chosen)))
    shardings = jax.tree.map(lambda leaf: place("", leaf.shape, leaf.dtype), abstract)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.filter_state(abstract, nnx.Param)["model"]))
    say("ready", parameters=parameters, files=len(paths), text=len(corpus), devices=jax.device_count())

    if (newest := ckpt_jax.latest(start)) is None:
        step, state = 0, jax.jit(lambda: nnx.split(build(chosen))[1], out_shardings=shardings)()
    else:
        began = time.perf_counter()
        like = {"step": 0, "state": abstract, "data": data}
        tree = ckpt_jax.restore(newest, like, sharding=place)
        step, state, data = tree["step"], tree["state"], tree["data"]
        say("restored", step=step, seconds=time.perf_counter() - began)
        if root != start:  # What came back is saved as it is, so that anyone can compare the two.
            save(root, step, state, data)

    update = updater(graph, shardings)
    rows = NamedSharding(devices, PartitionSpec(devices.axis_names[0]))
    while step < until:
        began = time.perf_counter()
        batch = next(data)
        state, loss = update(state, jax.device_put(batch["tokens"].astype("int32"), rows))
        step += 1
        say(
            "step",
            step=step,
            loss=float(loss),
            positions=batch["position"].tolist(),
            seconds=time.perf_counter() - began,
        )
        if step % chosen.train.save_every == 0:
            save(root, step, state, data)


def build(chosen: settings.Settings) -> dict[str, Any]:
    gpt = model.GPT(chosen.model, rngs=nnx.Rngs(params=chosen.train.seed, dropout=chosen.train.seed + 1))
    return {"model": gpt, "optimizer": model.optimizer(gpt, chosen.train)}


def placement(devices: jax.sharding.Mesh) -> Place:
    """Where leaves go: a matrix is cut along both axes of the mesh, whatever their names; the rest is everywhere."""

    def place(name: str, shape: tuple[int, ...], dtype: Any) -> NamedSharding:
        return NamedSharding(devices, PartitionSpec(*devices.axis_names) if len(shape) == 2 else PartitionSpec())

    return place


def updater(graph: Any, shardings: Any) -> Callable[[Any, jax.Array], tuple[Any, jax.Array]]:
    """The compiled training step; it takes the memory of the state that it is given."""

    def update(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        both = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(model.loss)(both["model"], tokens)
        both["optimizer"].update(both["model"], gradients)
        return nnx.state(both), loss

    return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))


def save(root: Path, step: int, state: Any, data: Any) -> None:
    say("saving", step=step)
    began = time.perf_counter()
    manifest = ckpt_jax.save(root / str(step), {"step": step, "state": state, "data": data})
    say("saved", step=step, bytes=manifest.nbytes, leaves=len(manifest.leaves), seconds=time.perf_counter() - began)


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event} | facts), flush=True)


if __name__ == "__main__":
    main()
