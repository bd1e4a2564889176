"""Batches whose order depends on the seed alone, so that any number of processes can go on where others stopped."""

import operator
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np

from . import _processes


def global_batches(
    source: Any,
    batch_size: int,
    *,
    seed: int,
    epochs: int | None = None,
    shuffle: bool = True,
    process: int | None = None,
    processes: int | None = None,
) -> "GlobalBatches":
    """An iterator over a process's share of global batches, as a live leaf.

    The stream of samples is `source` in an order that the seed gives, anew in each epoch; batch `n` is its samples
    `n * batch_size` up to `(n + 1) * batch_size`, also across the end of an epoch. Each of `processes` reads its own
    slice of every batch: slices put together in the order of processes are the batch. The state is the number of
    batches given out: a run on 8 processes goes on where one on 4 stopped, and no sample is lost or comes twice.

    Args:
        source: a grain `MapDataset`, or anything with `len` and `[index]`. Each of its samples has a position, so it
            may leave none out, as grain's `filter` does.
        batch_size: samples in a global batch; the number of processes divides it.
        seed: gives the order.
        epochs: how often the source is gone through; None for without end. What is left after the last whole batch
            is not given out.
        shuffle: False keeps the source's order.
        process, processes: which slice of how many; by default JAX's.

    Returns:
        An iterator of batches: the samples' trees with a new first axis of length `batch_size // processes`.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the batch size is no multiple of the number of processes, or larger than what there is; `process`
            is not one of `processes`, or only one of the two is given.

    >>> import ckpt_jax as ck
    >>> batches = ck.data.global_batches(range(6), 4, seed=0, shuffle=False)
    >>> next(batches), next(batches)
    (array([0, 1, 2, 3]), array([4, 5, 0, 1]))
    >>> batches.get_state()
    {'batches': 2, 'seed': 0, 'batch_size': 4, 'length': 6, 'shuffle': False}
    """
    if (process is None) != (processes is None):
        raise ValueError("process and processes are given both, or neither of them")
    process, processes = _processes.here() if process is None else (process, processes)
    processes = _int("processes", processes, least=1)
    if (process := _int("process", process)) >= processes:
        raise ValueError(f"process is one of 0 to {processes - 1}, not {process}")
    if not isinstance(shuffle, bool):
        raise TypeError(f"shuffle is True or False, not {shuffle!r}")
    return GlobalBatches(
        source,
        _int("batch_size", batch_size, least=1),
        _int("seed", seed),
        None if epochs is None else _int("epochs", epochs, least=1),
        shuffle=shuffle,
        slice_of=(process, processes),
    )


def _int(name: str, value: Any, least: int = 0) -> int:
    """An argument as an int, which it may also be in NumPy's or JAX's way."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise TypeError(f"{name} is an int, not {value!r}")
    if found < least:
        raise ValueError(f"{name} is {least} or more, not {found}")
    return found


class GlobalBatches:
    """What `global_batches` returns."""

    global_state = True  # One state serves all processes, and any number of them.

    def __init__(
        self,
        source: Any,
        batch_size: int,
        seed: int,
        epochs: int | None = None,
        *,
        shuffle: bool,
        slice_of: tuple[int, int],
    ):
        import grain

        self._process, self._processes = slice_of
        if batch_size % self._processes:
            raise ValueError(f"batch_size {batch_size} is no multiple of the number of processes, {self._processes}")
        if not len(source):
            raise ValueError("the source is empty")
        if epochs is not None and epochs * len(source) < batch_size:
            raise ValueError(f"{epochs} epochs of {len(source)} samples are less than a batch of {batch_size}")
        dataset = source if isinstance(source, grain.MapDataset) else grain.MapDataset.source(_Indexed(source))
        dataset = dataset.shuffle(seed=seed) if shuffle else dataset
        self._stream = dataset.repeat(epochs)
        self._total = None if epochs is None else epochs * len(source) // batch_size
        self._fixed = {"seed": seed, "batch_size": batch_size, "length": len(source), "shuffle": shuffle}
        self._batches = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._total is not None and self._batches >= self._total:
            raise StopIteration
        size = self._fixed["batch_size"] // self._processes
        start = self._batches * self._fixed["batch_size"] + self._process * size
        samples = [self._stream[start + i] for i in range(size)]
        if gone := [start + i for i, sample in enumerate(samples) if sample is None]:
            raise ValueError(
                f"sample {gone[0]} of the stream is None, as are all that a grain filter leaves out; every sample has "
                "a position of its own, so give a source that holds the wanted ones only"
            )
        batch = jax.tree.map(lambda *values: np.stack(values), *samples)
        self._batches += 1  # Last: of a batch that could not be made no sample is lost.
        return batch

    def get_state(self) -> dict[str, Any]:
        """The number of batches given out, and what it was counted with."""
        return {"batches": self._batches, **self._fixed}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where another one was.

        Raises:
            ValueError: that one had another seed, batch size, source length or order; or it is no such state.
        """
        if not isinstance(state, dict):
            raise ValueError(f"a state of batches is a dict, not {state!r:.80}")  # noqa: TRY004  As all that is wrong with it.
        other = {key: (state.get(key), value) for key, value in self._fixed.items() if state.get(key) != value}
        if other:
            told = ", ".join(f"{key} {there!r}, here {here!r}" for key, (there, here) in other.items())
            raise ValueError(f"the batches were counted with {told}")
        try:
            self._batches = _int("batches", state.get("batches"))
        except TypeError as error:
            raise ValueError(str(error)) from None


class _Indexed:
    """Anything with `len` and `[index]` as what grain takes for a source."""

    def __init__(self, items: Sequence[Any]):
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[int(index)]
