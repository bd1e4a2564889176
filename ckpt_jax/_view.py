"""Views: what can be read of a checkpoint in any format: a tree of leaves, and boxes of their arrays (no JAX)."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import _chunks, _manifest, _structure, _values
from ._chunks import Box, Shape
from ._manifest import Leaf, Manifest
from ._structure import LEAF, UNTOLD, Node
from .errors import CheckpointError, Fault, Unsupported


@dataclass(frozen=True, slots=True)
class View:
    """What can be read of a checkpoint.

    Attributes:
        kind: the format, such as `"Orbax"`.
        path: where it is.
        tree, leaves: its structure, and the leaves in its order, as in a manifest; without digests where the format has
            none. A leaf's chunk is what is best read at once.
        read: the values of a leaf in a box, of the leaf's dtype and in native byte order; also in several threads.
            Raises Corrupt, or an OSError where storage did not give what lies there.
        step, metadata, metrics: as in a manifest, plain.
        lacks: what the format cannot tell, in words.
        stamp: another one once the files are others.
    """

    kind: str
    path: str
    tree: Node | str
    leaves: dict[str, Leaf]
    read: Callable[[str, Box], np.ndarray]
    step: int | None = None
    metadata: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    stamp: str = ""

    @property
    def nbytes(self) -> int:
        return sum(map(_manifest.nbytes, self.leaves.values()))

    def manifest(self) -> Manifest:
        """The same as the manifest that it has not: format and version say what it is."""
        return Manifest(
            self.kind,
            (0, 0),
            step=self.step,
            tree=self.tree,
            leaves=self.leaves,
            metrics=_values.pack(self.metrics),
            metadata=_values.pack(self.metadata),
        )

    def cell(self, name: str, coords: Shape) -> bytearray:
        """The bytes of one chunk of a leaf, as they would lie on disk: zeros beyond the array's edge."""
        leaf = self.leaves[name]
        data = bytearray(_manifest.chunk_bytes(leaf))
        box = _chunks.cell(coords, leaf.chunk, leaf.shape)
        whole = np.frombuffer(data, np.dtype(leaf.dtype)).reshape(leaf.chunk)
        whole[(*map(slice, _chunks.extent(box)), ...)] = self.read(name, box)
        return data


def array(dtype: str, shape: Iterable[int], chunk: Shape | None = None, **more: Any) -> Leaf:
    """A leaf that is an array, with the chunks that it has, or that are best for one that lies in a row.

    Raises:
        ValueError: no array can be like that.
    """
    shape = tuple(shape)
    if dtype not in _manifest.ITEMSIZE:
        raise ValueError(f"{dtype!r:.80} is no dtype that an array can have here")
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
        raise ValueError(f"{shape!r:.80} is no shape")
    if len(shape) > _manifest.AXES or math.prod(max(1, n) for n in shape) >= 2**59:  # No sum of it: it may be huge.
        raise ValueError(f"a shape of {len(shape):,} axes, {shape!r:.80}, is more than an array can have")
    if chunk is None:
        chunk = _chunks.grid(shape, shape, _manifest.itemsize(dtype))
    return Leaf("array", dtype=dtype, shape=shape, chunk=chunk, **more)


# --- structure --------------------------------------------------------------------------------------------------------

Path = tuple[str, ...]
CONTAINER = 64  # Characters that a container counts for, besides its name, where room is counted.


def nested(
    paths: Mapping[Path, Node | None], sequences: Callable[[Path], bool] = lambda path: False
) -> tuple[Node | str, dict[str, Path]]:
    """The tree of what lies at paths, and its leaves' names in order, each with its path.

    The format does not tell what the containers were, so each fits any other with the same names.

    Args:
        paths: None stands for a leaf, a Node for an empty container.
        sequences: whether the entries of the container at a path are positions.

    Raises:
        Unsupported: something is a leaf and a container of others at once.
    """
    root: dict[str, Any] = {}
    faults = []
    for path, item in paths.items():
        at: Any = root
        for entry in path[:-1]:
            at = at.setdefault(entry, {}) if isinstance(at, dict) else at
        if path and isinstance(at, dict) and path[-1] not in at:
            at[path[-1]] = item
        elif path or len(paths) > 1:
            faults.append(Fault(".".join(path) or _structure.ROOT, "a leaf, or a container of others", "both"))
    if faults:
        raise Unsupported("what was saved is no tree", faults)
    names: dict[str, Path] = {}

    def node(found: Any, path: Path, name: str) -> Node | str:
        if found is None:
            names[name or _structure.ROOT] = path
            return LEAF
        if isinstance(found, Node):
            return found
        order = _positions(found) if sequences(path) else None
        kind, keys = ("dict", list(found)) if order is None else ("list", [])
        entries = list(found) if order is None else order
        children = [node(found[entry], (*path, entry), _structure.join(name, entry)) for entry in entries]
        return Node(kind, children, keys, UNTOLD)

    return node(paths.get((), root), (), ""), names


def _positions(entries: Mapping[str, Any]) -> list[str] | None:
    """The entries in order, if they are the positions of a sequence, each there."""
    order = sorted(entries, key=lambda entry: (len(entry), entry))
    return order if order == [str(at) for at in range(len(order))] else None


def split(names: Iterable[str]) -> dict[str, Path]:
    """The paths that names with dots stand for; each a path of its own where a name is also the beginning of another.

    So it is too where there would be more levels or containers than a tree can have: a stranger may have named them.

    >>> split(["a.b", "a.c"])
    {'a.b': ('a', 'b'), 'a.c': ('a', 'c')}
    >>> split(["a", "a.b"])
    {'a': ('a',), 'a.b': ('a.b',)}
    """
    names = list(names)
    if _are_paths(names):
        return {name: tuple(name.split(".")) for name in names}
    return {name: (name,) for name in names}


def _are_paths(names: list[str]) -> bool:
    inner: set[str] = set()
    room = _structure.NAMES
    for name in names:
        if name.count(".") >= _values.DEPTH:
            return False
        at = name.find(".")
        while at >= 0:
            if (beginning := name[:at]) not in inner:
                inner.add(beginning)
                room -= len(beginning) + CONTAINER
                if room < 0:
                    return False
            at = name.find(".", at + 1)
    return inner.isdisjoint(names)


# --- faults -----------------------------------------------------------------------------------------------------------


def refused(path: str, kind: str, faults: list[Fault], hint: str = "") -> CheckpointError:
    """What to say of a file that contradicts itself."""
    return CheckpointError(f"{path} is no whole {kind}", faults, hint=hint or "get it again from where it came from")


def boxes(leaf: Leaf) -> Iterator[Box]:
    """The boxes of a leaf's chunks, in grid order."""
    for coords in _chunks.covering(_chunks.whole(leaf.shape), leaf.chunk):
        yield _chunks.cell(coords, leaf.chunk, leaf.shape)
