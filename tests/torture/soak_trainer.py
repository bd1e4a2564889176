"""The soak's trainer: a run as in earnest, with a few megabytes of state and steps of a few milliseconds.

Of each step it leaves a record of 16 bytes, which no kill tears: the step, a checksum of its samples' ids, and the bits
of its loss. Of each commit another: how much memory this process takes, and how much of it is in use.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ckpt_jax as ck
from ckpt_jax._events import Event
from tests.trees import bits

WIDTH = 768  # The middle layer, with Adam's two moments: 3 * 768 * 768 * 4 bytes = 7 MB.
EVERY = 25  # Steps. A save takes about as long as they do: a kill meets one as often as not.
RECORD = struct.Struct("<QII")
MEMORY = struct.Struct("<QQ")


class Task(NamedTuple):
    """What one process is to do: train until `steps` are done; None for as long as it lives."""

    root: str
    notes: str  # Where its records go; the folder is there.
    steps: int | None
    forget: str = (
        ""  # What the checkpoints leave out, as a broken program does: "key"; or "position", which is one off.
    )


def train(task: Task) -> None:
    """The loop of the README."""
    table = np.random.default_rng(0).standard_normal((5000, 32), np.float32)  # The data set: its samples by their ids.
    tx = optax.adam(1e-3)
    params = _params()
    state = {
        "params": params,
        "opt": tx.init(params),
        "key": jax.random.key(1),
        "data": ck.data.global_batches(range(len(table)), 16, seed=7),
        "step": 0,
    }

    @jax.jit
    def update(params: Any, opt: Any, key: jax.Array, x: jax.Array) -> tuple[Any, Any, jax.Array, jax.Array]:
        key, draw = jax.random.split(key)
        mask = jax.random.bernoulli(draw, 0.9, (WIDTH,))

        def loss_of(p: Any) -> jax.Array:
            hidden = jnp.tanh(jnp.tanh(x @ p["in"]) * mask @ p["middle"])
            return jnp.mean((hidden @ p["out"] - x) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, key, loss

    def what_is_saved() -> dict[str, Any]:
        return {name: value for name, value in state.items() if name != task.forget}

    with _notes(task) as (record, on_event):
        keep, every = ck.Keep(last=3), ck.Every(steps=EVERY)
        with ck.Saver(task.root, every=every, keep=keep, health=ck.Health(), on_event=on_event) as saver:
            saved, step = saver.resume(what_is_saved())
            state |= saved
            if step and task.forget == "position":
                next(state["data"])
            while (task.steps is None or step < task.steps) and not saver.preempted:
                ids = next(state["data"])
                args = (state["params"], state["opt"], state["key"], table[ids])
                state["params"], state["opt"], state["key"], loss = update(*args)
                step += 1
                state["step"] = step
                record(step, ids, loss)
                saver.step(step, what_is_saved(), metrics={"loss": loss})
        if step == task.steps:
            if step not in ck.steps(task.root):  # It was not due, or was skipped.
                ck.save(f"{task.root}/{step}", what_is_saved(), overwrite=True)
            _tell_the_end(task, state)


def _params() -> dict[str, jax.Array]:
    draw = np.random.default_rng(3)
    shapes = {"in": (32, WIDTH), "middle": (WIDTH, WIDTH), "out": (WIDTH, 32)}
    return {name: jnp.asarray(draw.standard_normal(s, np.float32) / s[0] ** 0.5) for name, s in shapes.items()}


@contextlib.contextmanager
def _notes(task: Task) -> Iterator[tuple[Any, Any]]:
    """What writes the records of steps, and of commits."""
    files = [os.open(f"{task.notes}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("steps", "commits")]

    def record(step: int, ids: Any, loss: jax.Array) -> None:
        os.write(files[0], RECORD.pack(step, zlib.crc32(ids.tobytes()), int(np.asarray(loss).view(np.uint32))))

    def on_event(event: Event) -> None:
        if event.kind == "committed":
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            os.write(files[1], MEMORY.pack(resident, _in_use()))

    try:
        yield record, on_event
    finally:
        for file in files:
            os.close(file)


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]


def _in_use() -> int:
    """Bytes that were allocated and not freed: what is freed stays with the process for a while, in gaps."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Mallinfo
    found = ask()
    return found.uordblks + found.hblkhd


def _tell_the_end(task: Task, state: dict[str, Any]) -> None:
    """A digest of each leaf as it is in memory, whatever the checkpoints say."""
    named = jax.tree_util.tree_leaves_with_path(state | {"data": state["data"].get_state()})
    told = {jax.tree_util.keystr(path): hashlib.sha256(repr(bits(leaf)).encode()).hexdigest() for path, leaf in named}
    Path(task.notes, "end").write_text(json.dumps(told))
