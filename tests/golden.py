"""The tree that every golden checkpoint holds; `python -m tests.golden v2` writes one for a new version, once."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

METADATA = {"run": "golden", "lr": [0.5, 2**60], "blob": b"\x00\xff"}


class State(NamedTuple):
    count: Any
    mu: Any


def tree() -> dict[str, Any]:
    """Every kind of leaf and container, small, and the same each time."""
    generator = np.random.default_rng(7)
    generator.random(3)
    return {
        "params": {
            "w": jnp.asarray(np.arange(48, dtype=np.float32).reshape(6, 8)),
            "b": jnp.asarray(np.linspace(-1, 1, 5), jnp.bfloat16),
            "q": jnp.asarray(np.array([-8, -1, 0, 7]), jnp.int4),
            "e": jnp.asarray(np.array([0.5, -2, 240]), jnp.float8_e4m3),
        },
        "opt": (State(jnp.int32(3), [np.arange(3.0), np.float64("nan")]), ()),
        "big": np.arange(600, dtype=">i4").reshape(20, 30)[::2],
        "key": jax.random.key(1),
        "keys": jax.random.split(jax.random.key(2, impl="rbg"), 3),
        "generator": generator,
        "step": 3,
        "huge": -(2**100),
        "float": float("-inf"),
        "complex": complex(-0.0, 1.5),
        "text": "naïve ✓",
        "bytes": b"\x00\x01",
        "flag": True,
        "empty": {"dict": {}, "list": [], "tuple": (), "none": None},
        "a.b": np.float32(-0.0),
        "a": {"b": np.bool_(True)},
    }


if __name__ == "__main__":
    import ckpt_jax as ck

    made = tree()
    ck.save(Path(__file__).parent / "golden" / sys.argv[1], made, step=3, metadata=METADATA)
