"""Diff: in what two checkpoints differ, leaf by leaf (no JAX)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from . import _faults, _open, _storage, _structure, _units, _values
from ._manifest import Leaf


@dataclass(frozen=True, slots=True)
class Change:
    """One leaf (or container) that is not the same in both.

    Attributes:
        name: the leaf.
        what: `only in a`, `only in b`, `structure`, `kind`, `shape`, `dtype` or `values`.
        a, b: what each has there, in words.
    """

    name: str
    what: Literal["only in a", "only in b", "structure", "kind", "shape", "dtype", "values"]
    a: str = ""
    b: str = ""

    def __str__(self) -> str:
        if self.what in ("only in a", "only in b"):
            return f"{self.name}: {self.what} ({self.a or self.b})"
        if self.what == "values":
            return f"{self.name}: values differ: {self.a}{self.b and f' / {self.b}'}"
        return f"{self.name}: another {self.what}: {self.a} / {self.b}"


@dataclass(frozen=True, slots=True)
class Diff:
    """What `diff` found: nothing, if the two hold the same.

    Attributes:
        a, b: the two paths.
        changes: every difference.
        same: how many leaves are the same in both.
    """

    a: str
    b: str
    changes: tuple[Change, ...]
    same: int

    @property
    def equal(self) -> bool:
        return not self.changes

    def __bool__(self) -> bool:
        """True where there is a difference, as with the command of that name."""
        return bool(self.changes)

    def __str__(self) -> str:
        if self.equal:
            return f"{self.a} and {self.b} hold the same: {self.same:,} leaves, by their digests"
        places = _units.several(len(self.changes), "place")
        same = f"{self.same:,} lea{'ves are' if self.same != 1 else 'f is'} the same"
        head = f"{self.a} (a) and {self.b} (b) differ in {places}; {same}:"
        return "\n".join([head, *(f"  {change}" for change in self.changes)])


def diff(a: _storage.PathLike, b: _storage.PathLike) -> Diff:
    """Compares two checkpoints: structure, shapes, dtypes and values, bit for bit; starts no device.

    Values are compared by the digests that were taken when they were saved; arrays are read only where the two are
    cut into other chunks, or one is Orbax's. Whether the bytes on disk still have those digests is what `verify` tells.

    Raises:
        NotFound: one of the two is not there.
        Corrupt: one of the two is damaged where it had to be read.

    >>> import numpy as np, ckpt_jax as ck
    >>> _ = ck.save("memory://docs/diff/1", {"w": np.zeros(3), "n": 1})
    >>> _ = ck.save("memory://docs/diff/2", {"w": np.ones(3), "n": 1})
    >>> print(ck.diff("memory://docs/diff/1", "memory://docs/diff/2"))
    memory://docs/diff/1 (a) and memory://docs/diff/2 (b) differ in 1 place; 1 leaf is the same:
      w: values differ: 3 of 3 elements, by at most 1
    """
    *_, found = progress(a, b)
    assert isinstance(found, Diff)
    return found


def progress(a: _storage.PathLike, b: _storage.PathLike) -> Iterator[tuple[int, int] | Diff]:
    """As `diff`, step by step: (leaves compared, leaves in all), and the result at the end."""
    one, two = _open.open(a), _open.open(b)
    for checkpoint in (one, two):  # What is not there cannot be the same.
        place = _storage.folder(checkpoint.path)
        if checkpoint.manifest.seal and (faults := _faults.of_files(place, checkpoint.manifest)):
            raise _faults.damaged(place, faults)
    ours, theirs = one.manifest.leaves, two.manifest.leaves
    changes = [Change(n, "only in a", a=str(ours[n])) for n in ours if n not in theirs]
    changes += [Change(n, "only in b", b=str(theirs[n])) for n in theirs if n not in ours]
    for _, fault in _structure.differences(one.manifest.tree, two.manifest.tree, lambda name: True):
        changes.append(Change(fault.place, "structure", a=fault.found or "a node", b=fault.expected or "none"))
    both = [name for name in ours if name in theirs]
    same = 0
    for number, name in enumerate(both, 1):
        change = _compare(name, ours[name], theirs[name], one, two)
        if change is None:
            same += 1
        else:
            changes.append(change)
        yield number, len(both)
    yield Diff(one.path, two.path, tuple(changes), same)


def _compare(name: str, a: Leaf, b: Leaf, one: _open.Checkpoint, two: _open.Checkpoint) -> Change | None:
    what: Literal["kind", "shape", "dtype"] | None = None
    if a.kind != b.kind or a.impl != b.impl:
        what = "kind"
    elif a.shape != b.shape:
        what = "shape"
    elif a.dtype != b.dtype:
        what = "dtype"
    if what is not None:
        return Change(name, what, str(a), str(b))
    if not a.stored:
        return (
            None
            if msgspec.json.encode(a.value) == msgspec.json.encode(b.value)
            else Change(name, "values", _shown(a), _shown(b))
        )
    if a.chunk == b.chunk and a.digests and b.digests:
        if a.digests == b.digests:
            return None
        return Change(name, "values", _how_far(one[name], two[name]))
    if all(x.tobytes() == y.tobytes() for x, y in _blocks(one[name], two[name])):
        return None
    return Change(name, "values", _how_far(one[name], two[name]))


def _shown(leaf: Leaf) -> str:
    return _values.shown(_values.unpack(leaf.value))[:60]


def _blocks(a: _open.LazyArray, b: _open.LazyArray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The two arrays side by side, in blocks that fit in memory."""
    if not a.shape:
        yield a[()], b[()]
        return
    rows = max(1, (64 << 20) // max(1, a.nbytes // max(1, a.shape[0])))
    for start in range(0, a.shape[0], rows):
        yield a[start : start + rows], b[start : start + rows]


def _how_far(a: _open.LazyArray, b: _open.LazyArray) -> str:
    """How many elements differ, and by how much."""
    count, most = 0, 0.0
    for x, y in _blocks(a, b):
        raw = [np.ascontiguousarray(v).reshape(-1).view(np.uint8).reshape(v.size, -1) for v in (x, y)]
        other = (raw[0] != raw[1]).any(axis=1)
        count += int(other.sum())
        if other.any() and x.dtype.kind in "biuf":
            most = max(most, _largest(x.reshape(-1)[other], y.reshape(-1)[other]))
    by = f", by at most {most:.6g}" if most else ""
    return f"{count:,} of {a.size:,} elements{by}"


def _largest(x: np.ndarray, y: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        gap = np.abs(x.astype(np.float64) - y.astype(np.float64))
    return float(np.nanmax(gap)) if not np.isnan(gap).all() else 0.0
