"""Health: NaN, infinity and norms, looked at while a snapshot is written (no JAX)."""

import cmath
import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real

import ml_dtypes
import numpy as np

from . import _manifest, _values
from ._manifest import Leaf
from ._writing import Chunk
from .errors import Fault, Unhealthy

BLOCK = 1 << 18  # Values squared at a time: a megabyte of float32, so that sums of squares stay exact enough.


@dataclass(frozen=True, slots=True)
class Health:
    """What a state must fulfil to be committed.

    Attributes:
        finite: no leaf of floats may hold NaN or infinity.
        norm_jump: by which factor a leaf's norm may differ from that in the last committed checkpoint; None for any.
        allow: globs of names that may be as they like, such as `("metrics.*",)`.

    >>> import ckpt_jax as ck
    >>> ck.Health(norm_jump=10.0, allow=("loss_scale",))
    Health(finite=True, norm_jump=10.0, allow=('loss_scale',))
    """

    finite: bool = True
    norm_jump: float | None = None
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.finite, bool):
            raise TypeError(f"finite is True or False, not {self.finite!r}")
        if self.norm_jump is not None:
            if isinstance(self.norm_jump, bool) or not isinstance(self.norm_jump, Real):
                raise TypeError(f"norm_jump is a number, not {self.norm_jump!r}")
            if not self.norm_jump > 1:
                raise ValueError(f"norm_jump is a factor above 1, not {self.norm_jump!r}")
        globs = None if isinstance(self.allow, str) or not isinstance(self.allow, Iterable) else tuple(self.allow)
        if globs is None or not all(isinstance(glob, str) for glob in globs):
            raise TypeError(f'allow is a tuple of globs, such as ("metrics.*",), not {self.allow!r}')
        object.__setattr__(self, "allow", globs)


class Sums:
    """What one process finds out about its chunks: sums of squares, and counts of NaN and infinity."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, int]] = {}

    def watch(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Takes in the values of chunks of floats as they go by."""
        for chunk in chunks:
            if is_float(chunk.array.dtype):
                squares, nonfinite = sum_of_squares(chunk.array)
                before = self.found.get(chunk.name, (0.0, 0))
                self.found[chunk.name] = before[0] + squares, before[1] + nonfinite
            yield chunk


def of_scalars(leaves: Mapping[str, Leaf]) -> dict[str, tuple[float, int]]:
    """As `Sums.found`, the Python floats that are not finite; they lie in the manifest, so one process tells of them.

    >>> of_scalars({"lr": Leaf("scalar", dtype="float", value={"$float": "7ff8000000000000"})})
    {'lr': (0.0, 1)}
    """
    values = {
        name: _values.unpack(leaf.value)
        for name, leaf in leaves.items()
        if leaf.kind == "scalar" and leaf.dtype in ("float", "complex")
    }
    return {name: (0.0, 1) for name, value in values.items() if not cmath.isfinite(value)}


def is_float(dtype: np.dtype) -> bool:
    if dtype.kind in "fc":
        return True
    try:
        ml_dtypes.finfo(dtype)  # bfloat16, float8 and the like, which NumPy takes for no numbers at all.
    except ValueError:
        return False
    return True


def sum_of_squares(values: np.ndarray) -> tuple[float, int]:
    """The sum of the squares of the finite values, and how many are not finite.

    >>> sum_of_squares(np.array([3.0, np.nan, 4.0]))
    (25.0, 1)
    """
    total, nonfinite = 0.0, 0
    flat = values.reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(np.float32 if flat.dtype == np.complex64 else np.float64)
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        block = block if block.dtype in (np.float32, np.float64) else block.astype(np.float32)
        with np.errstate(all="ignore"):
            squares = float(np.dot(block, block))
            if not math.isfinite(squares):  # NaN and infinity come through; so does a sum too large for float32.
                wide = block.astype(np.float64)
                good = np.isfinite(wide)
                nonfinite += int(good.size - good.sum())
                squares = float(np.dot(wide[good], wide[good]))
        total += squares
    return total, nonfinite


def merged(parts: list[dict[str, tuple[float, int]]]) -> dict[str, _manifest.Health]:
    """The processes' sums as norms."""
    sums: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, (squares, nonfinite) in part.items():
            before = sums.get(name, (0.0, 0))
            sums[name] = before[0] + squares, before[1] + nonfinite
    # Six digits: a sum of float32 squares has no more, and how blocks are cut must not show.
    return {name: _manifest.Health(_norm(squares), bad) for name, (squares, bad) in sums.items()}


def _norm(squares: float) -> float:
    return float(f"{min(math.sqrt(squares), 1e308):.6g}")  # JSON has no infinity.


def check(
    found: Mapping[str, _manifest.Health],
    before: Mapping[str, _manifest.Health],
    health: Health,
    leaves: dict[str, Leaf],
) -> None:
    """Raises Unhealthy, naming every leaf that is not as it must be."""
    faults = []
    for name, now in found.items():
        if any(fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(name, f"{glob}.*") for glob in health.allow):
            continue
        if health.finite and now.nonfinite:
            many = f"{now.nonfinite:,} NaN or infinite in {leaves[name]}"
            faults.append(Fault(name, "finite values", many))
        elif health.norm_jump is not None and (then := before.get(name)) and _jumped(then.norm, now.norm, health):
            faults.append(Fault(name, f"a norm within {health.norm_jump:g} times {then.norm:g}", f"{now.norm:g}"))
    if faults:
        raise Unhealthy(
            "the state is not healthy, so it was not committed",
            faults,
            hint="Health(allow=(…,)) excepts leaves by name; go back to the last good step with Saver.resume",
        )


def _jumped(then: float, now: float, health: Health) -> bool:
    assert health.norm_jump is not None
    low, high = sorted((then, now))
    return low > 0 and high / low > health.norm_jump
