"""Boxes and grids: how an array is cut into chunks, and which process writes which (pure geometry, no I/O)."""

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import product

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]  # (start, stop) along each axis

# Larger cells cost memory in flight, smaller ones a request each (docs/decisions/0002).
CELL_BYTES = 16 << 20
# Below this, sharing the writing of replicated data costs more in requests than it saves in bytes.
SHARE_BYTES = 1 << 20
FINE = 4  # An axis that can only be cut into so many times the parts that are wanted is left to the others,
LARGEST_BYTES = 1 << 30  # unless cells would be as large as this.


def box(index: Sequence[slice], shape: Shape) -> Box:
    """The box that a device's tuple of slices covers.

    >>> box((slice(None), slice(2, 4)), (3, 8))
    ((0, 3), (2, 4))
    """
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def whole(shape: Shape) -> Box:
    return tuple((0, n) for n in shape)


def extent(b: Box) -> Shape:
    return tuple(stop - start for start, stop in b)


def slices(b: Box, within: Box | None = None) -> tuple[slice, ...]:
    """The index of box `b`, in an array that holds just the box `within` (by default: the whole array)."""
    if within is None:
        return tuple(slice(start, stop) for start, stop in b)
    return tuple(slice(start - at, stop - at) for (start, stop), (at, _) in zip(b, within, strict=True))


def overlap(a: Box, b: Box) -> Box | None:
    """The part that two boxes share, or None where they share nothing."""
    shared = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def _parts(n: int, wanted: int, *, even: bool) -> int:
    """Into how many parts an axis of `n` is cut, at least `wanted` if it can be; `even` where others' boxes adjoin."""
    if not even:
        return min(wanted, n)
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return min(d for d in (*small, *(n // d for d in small)) if d >= min(wanted, n))


def grid(shape: Shape, shard: Shape, itemsize: int, writers: int = 1, cell_bytes: int = CELL_BYTES) -> Shape:
    """The chunk shape for an array whose devices hold boxes of shape `shard`.

    Every shard is a whole number of chunks, so no chunk has two writers. Cells are at most `cell_bytes`, as far as
    the axes can be divided; a shard that `writers` processes hold is cut into at least that many, if it is worth it.

    >>> grid((1024, 768), (256, 768), 4)
    (256, 768)
    >>> grid((50257, 768), (50257, 768), 4)
    (5026, 768)
    >>> grid((2 * 50261, 768), (50261, 768), 4)
    (50261, 77)
    """
    if 0 in shape:
        return tuple(max(1, n) for n in shard)
    size = itemsize * math.prod(shard)
    wanted = max(-(-size // cell_bytes), min(writers, size // SHARE_BYTES), 1)
    chunk = list(shard)
    # An axis of prime length that others' boxes adjoin would fall into single rows: the others serve in its place. If
    # none does, cells become larger than asked, but not huge if they can be cut into what is worth a request each.
    left = _cut(chunk, shard, shape, wanted, FINE * wanted)
    if left * cell_bytes > LARGEST_BYTES:
        _cut(chunk, shard, shape, left, itemsize * math.prod(chunk) // SHARE_BYTES)
    return tuple(chunk)


def _cut(chunk: list[int], shard: Shape, shape: Shape, wanted: int, most: int) -> int:
    """Cuts cells into so many parts, no axis into more than `most`; gives how many times they are still too large."""
    # From the outermost axis: such cells are contiguous in the shard's memory.
    for axis, n in enumerate(tuple(chunk)):
        if wanted > 1 and (parts := _parts(n, wanted, even=shard[axis] != shape[axis])) <= most:
            chunk[axis] = -(-n // parts)
            wanted = -(-wanted // parts)
    return wanted


@functools.lru_cache(4096)
def counts(shape: Shape, chunk: Shape) -> Shape:
    """The number of chunks along each axis."""
    return tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))


def covering(b: Box, chunk: Shape) -> Iterator[Shape]:
    """The coordinates of all chunks that share something with a box, in grid order.

    >>> list(covering(((0, 4), (3, 5)), (4, 4)))
    [(0, 0), (0, 1)]
    """
    if any(start >= stop for start, stop in b):
        return iter(())
    return product(*(range(start // c, -(-stop // c)) for (start, stop), c in zip(b, chunk, strict=True)))


def cell(coords: Shape, chunk: Shape, shape: Shape) -> Box:
    """The box of one chunk, cut off at the array's edge."""
    return tuple((i * c, min((i + 1) * c, n)) for i, c, n in zip(coords, chunk, shape, strict=True))


def position(coords: Shape, grid_counts: Shape) -> int:
    """A chunk's place in grid order (the last axis runs fastest).

    >>> position((1, 2), (3, 4))
    6
    """
    at = 0
    for i, n in zip(coords, grid_counts, strict=True):
        at = at * n + i
    return at


def coordinates(at: int, grid_counts: Shape) -> Shape:
    """The inverse of `position`."""
    coords = []
    for n in reversed(grid_counts):
        at, i = divmod(at, n)
        coords.append(i)
    return tuple(reversed(coords))


def owner(holders: Sequence[int], number: int, cells: int, turn: int) -> int:
    """Which of the processes that hold a box writes its cell `number` of `cells`.

    `turn` (the leaf's place in the tree) spreads leaves too small to be shared.

    >>> [owner([0, 1], n, 4, turn=0) for n in range(4)]
    [0, 0, 1, 1]
    """
    return holders[(turn + number * len(holders) // cells) % len(holders)]


def key(name: str, coords: Shape) -> str:
    """A chunk's key in the store: zarr v3's default chunk key encoding."""
    return "/".join((name, "c", *map(str, coords)))
