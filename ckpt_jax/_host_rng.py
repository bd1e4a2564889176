"""The host's random numbers as a live leaf: Python's `random` and NumPy's global state."""

import random
from typing import Any

import numpy as np


class HostRNG:
    """Put one in the state, and each process's `random` and `numpy.random` go on where they were.

    Generators made by `numpy.random.default_rng` are leaves by themselves.

    >>> import random, ckpt_jax as ck
    >>> _ = ck.save("memory://docs/host_rng", {"host_rng": ck.HostRNG()})
    >>> expected = random.random()
    >>> _ = ck.restore("memory://docs/host_rng", {"host_rng": ck.HostRNG()})
    >>> random.random() == expected
    True
    """

    def get_state(self) -> dict[str, Any]:
        """Both states as plain data."""
        version, internal, gauss = random.getstate()
        return {
            "python": {"version": version, "internal": list(internal), "gauss": gauss},
            "numpy": np.random.get_state(legacy=False),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        python = state["python"]
        random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
        np.random.set_state(state["numpy"])
