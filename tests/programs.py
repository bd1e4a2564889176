"""Programs to be proven: one that resumes as it should, and the same with something left out each."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import ckpt_jax as ck

Step = tuple[int, Any, Any]


def _run(
    root: str, steps: int, change: Callable[[dict[str, Any]], dict[str, Any]], shift: int = 0, every: int = 3
) -> Iterator[Step]:
    """Trains a line with everything that a run has; `change` says which part of the state is saved and resumed."""
    random.seed(0)
    np.random.seed(0)
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(optax.linear_schedule(-0.1, -0.01, 20)))
    loader = grain.MapDataset.range(64).shuffle(seed=5).repeat().batch(4).to_iter_dataset()
    params = {"w": jnp.zeros(4)}
    state = {
        "params": params,
        "opt": tx.init(params),
        "key": jax.random.key(1),
        "data": iter(loader),
        "host_rng": ck.HostRNG(),
        "step": 0,
    }

    @jax.jit
    def update(params: Any, opt: Any, key: jax.Array, batch: jax.Array, noise: jax.Array) -> Any:
        key, drop = jax.random.split(key)
        mask = jax.random.bernoulli(drop, 0.5, (4,))
        grads = jax.grad(lambda p: jnp.sum((p["w"] * mask - batch * noise) ** 2))(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, key

    with ck.Saver(root, every=ck.Every(steps=every)) as saver:
        saved, step = saver.resume(change(state))
        state |= saved
        if "adam" in saved:  # Of the optimizer just a part was saved.
            state["opt"] = (state.pop("adam"), state["opt"][1])
        step += shift if step else 0
        while step < steps:
            batch = next(state["data"])
            noise = jnp.float32(random.random() + np.random.rand())
            state["params"], state["opt"], state["key"] = update(
                state["params"], state["opt"], state["key"], jnp.asarray(batch, jnp.float32), noise
            )
            step += 1
            state["step"] = step
            saver.step(step, change(state))
            saver.wait()
            yield step, {name: state[name] for name in ("params", "opt", "key", "step")}, batch


def _without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {key: value for key, value in state.items() if key != name}


class _OneOf:
    """Of the host's two random states, just one."""

    def __init__(self, kept: str):
        self.kept, self.both = kept, ck.HostRNG()

    def get_state(self) -> Any:
        return {self.kept: self.both.get_state()[self.kept]}

    def set_state(self, state: Any) -> None:
        self.both.set_state(self.both.get_state() | state)


def good(root: str, steps: int) -> Iterator[Step]:
    return _run(root, steps, lambda state: state)


def good_at_each_step(root: str, steps: int) -> Iterator[Step]:
    return _run(root, steps, lambda state: state, every=1)


def no_key(root: str, steps: int) -> Iterator[Step]:
    return _run(root, steps, _without("key"))


def no_numpy_rng(root: str, steps: int) -> Iterator[Step]:
    return _run(root, steps, lambda state: state | {"host_rng": _OneOf("python")})


def no_python_rng(root: str, steps: int) -> Iterator[Step]:
    return _run(root, steps, lambda state: state | {"host_rng": _OneOf("numpy")})


def no_loader(root: str, steps: int) -> Iterator[Step]:
    return _run(root, steps, _without("data"))


def unseeded(root: str, steps: int) -> Iterator[Step]:
    """Another one each time, also without a kill."""
    for step, state, ids in good(root, steps):
        yield step, state | {"noise": os.urandom(8)}, ids


def no_schedule_count(root: str, steps: int) -> Iterator[Step]:
    return _run(root, steps, lambda state: _without("opt")(state) | {"adam": state["opt"][0]})


def off_by_one(root: str, steps: int) -> Iterator[Step]:
    return _run(root, steps, lambda state: state, shift=1)


def never_resumes(root: str, steps: int) -> Iterator[Step]:
    return _run(f"{root}/{os.getpid()}", steps, lambda state: state)


def fails(root: str, steps: int) -> Iterator[Step]:
    raise RuntimeError(f"no such luck in {root} for {steps}")
    yield


def in_two_processes(root: str, steps: int) -> Iterator[Step]:
    """A global array over all processes' devices, and each process's slice of global batches."""
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((len(jax.devices()),), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    count = len(jax.devices())
    w = jax.make_array_from_callback((count,), sharding, lambda at: np.zeros(count, np.float32)[at])
    state = {"w": w, "data": ck.data.global_batches(range(40), 8, seed=2), "step": 0}
    add = jax.jit(lambda w, x: w + x)
    with ck.Saver(root, every=ck.Every(steps=2)) as saver:
        state, step = saver.resume(state)
        while step < steps:
            batch = next(state["data"])
            step += 1
            state |= {"w": add(state["w"], float(step)), "step": step}
            saver.step(step, state)
            saver.wait()
            yield step, {"w": state["w"], "step": step}, batch


def _ids(root: str, steps: int, samples: Callable[[int], Any], last: int | None = None) -> Iterator[Step]:
    """Nothing but a count, with samples made of it."""
    with ck.Saver(root, every=ck.Every(steps=1)) as saver:
        state, step = saver.resume({"w": np.zeros(3)})
        while step < (last or steps):
            step += 1
            saver.step(step, state)
            saver.wait()
            yield step, state, samples(step)


_here = iter(range(1, 100))  # Counts in each process anew, as what is not saved does.


def other_ids_in_a_dict(root: str, steps: int) -> Iterator[Step]:
    return _ids(root, steps, lambda step: {"ids": [next(_here)], "epoch": 0})


def other_ids_of_numpy(root: str, steps: int) -> Iterator[Step]:
    return _ids(root, steps, lambda step: [np.int64(next(_here)), None])


def none_after_a_resume(root: str, steps: int) -> Iterator[Step]:
    return _ids(root, steps, lambda step: [step, None if next(_here) == step else ()])


def ids_of_all_kinds(root: str, steps: int) -> Iterator[Step]:
    kinds = [
        lambda n: {"ids": [n], "name": f"n{n}", "none": None},
        lambda n: [np.int64(n), jnp.int32(n), n, True, 2.0 * n],
        lambda n: [float("nan"), np.float32("nan")],
        jnp.arange,
        range,
        lambda n: (i for i in range(n)),
        lambda n: np.array([f"a{n}", "b"]),
        lambda n: n,
        lambda n: None,
    ]
    return _ids(root, steps, lambda step: kinds[step % len(kinds)](step))


def other_arrays_in_process_1(root: str, steps: int) -> Iterator[Step]:
    for step, _, samples in _ids(root, steps, lambda step: [step]):
        own = np.array([next(_here) if jax.process_index() else step])
        yield step, {"a": own, "b": own}, samples


def ends_early(root: str, steps: int) -> Iterator[Step]:
    return _ids(root, steps, lambda step: [step], last=steps - 2)


def returns_nothing(root: str, steps: int) -> None:
    return None


def yields_nothing(root: str, steps: int) -> Iterator[Step]:
    return iter(())


def yields_pairs(root: str, steps: int) -> Iterator[Any]:
    return ((step, {}) for step in range(steps))


def prints_no_text(root: str, steps: int) -> Iterator[Step]:
    os.write(1, b"\xff\xfe")
    raise RuntimeError("no such luck")


def leaves_a_worker(root: str, steps: int) -> Iterator[Step]:
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    with open(os.environ["WORKERS"], "a", encoding="utf-8") as file:
        file.write(f"{worker.pid}\n")
    yield from _ids(root, steps, lambda step: [step])
    worker.kill()
