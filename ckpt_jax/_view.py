"""Views: what can be read of a checkpoint in any format: a tree of leaves, and boxes of their arrays (no JAX)."""

import collections
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import _chunks, _manifest, _reading, _structure, _threads, _values
from ._chunks import Box, Shape
from ._manifest import Leaf, Manifest
from ._structure import LEAF, UNTOLD, Node
from .errors import CheckpointError, Fault, Unsupported

ITEMS = 1 << 20  # Containers and leaves of a tree, where few bytes of a file could make many.
TEXT = 1 << 28  # Bytes of all its plain values, and characters of all its names.


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


def read(
    view: View,
    chunks: Iterable[_reading.Wanted],
    use: _reading.Use,
    room: Callable[[_reading.Wanted, bool], bool] = lambda chunk, force: True,
) -> Iterator[tuple[_reading.Wanted, Any, str]]:
    """Reads chunks, some at a time and with bounded memory, and gives them to `use`, as `_reading.read` does.

    Raises:
        Corrupt: one is damaged, as far as the format can tell.
        OSError: storage did not give what lies there.
    """

    def used(chunk: _reading.Wanted) -> Any:
        return use(chunk, memoryview(view.cell(chunk.name, chunk.coords)))

    upcoming = iter(chunks)
    queue: collections.deque[tuple[_reading.Wanted, Future[Any]]] = collections.deque()
    ahead, coming = 0, next(upcoming, None)
    with _threads.Pool(_reading.READERS) as pool:
        while coming or queue:
            while coming and (ahead < _reading.WINDOW // 2 or not queue) and room(coming, not queue):
                queue.append((coming, pool.submit(used, coming)))
                ahead += coming.size
                coming = next(upcoming, None)
            chunk, answer = queue.popleft()
            ahead -= chunk.size
            yield chunk, answer.result(), ""


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
        if len(path) > _values.DEPTH:
            faults.append(Fault(f"{'.'.join(path):.80}", f"at most {_values.DEPTH} levels", f"{len(path):,}"))
            continue
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


def contained(value: Any, told: str = "") -> tuple[Node | str, dict[str, Any]]:
    """The tree of plain dicts, lists, tuples and None, and what is none of them, by its name.

    Args:
        told: the type of its dicts; UNTOLD, where a format makes dicts of other containers too.

    Raises:
        ValueError: it is no tree that can be, or one that becomes very large: one value may stand in many places.
    """
    found: list[Any] = []
    items, text = ITEMS, TEXT

    def node(value: Any, depth: int) -> Node | str:
        nonlocal items, text
        items, text = items - 1, text - length(value)
        if items < 0 or text < 0:
            raise ValueError(f"more than {ITEMS:,} values, or {TEXT:,} bytes of text")
        if depth > _values.DEPTH:
            raise ValueError(f"more than {_values.DEPTH} levels")
        if value is None:
            return Node("none")
        if type(value) is dict:
            keys = [_values.pack(key) for key in map(_key, value)]
            return Node("dict", [node(child, depth + 1) for child in value.values()], keys, told)
        if type(value) in (list, tuple):
            return Node(type(value).__name__, [node(child, depth + 1) for child in value])
        found.append(value)
        return LEAF

    tree = node(value, 0)
    return tree, dict(zip(names(tree), found, strict=True))


def names(tree: Node | str) -> list[str]:
    """The names of a tree's leaves, in order.

    Raises:
        ValueError: it is no tree that can be, or its names are very long.
    """
    found, text = [], TEXT
    for name in _structure.names(tree):
        found.append(name)
        text -= len(name)
        if text < 0:
            raise ValueError(f"names of more than {TEXT:,} characters")
    return found


def length(value: Any) -> int:
    """Bytes of a plain value."""
    return value.bit_length() // 8 if type(value) is int else len(value) if type(value) in (str, bytes) else 0


def _key(key: Any) -> Any:
    if not _structure.is_key(key):
        raise ValueError(f"{_values.shown(key)} is no key")
    return key


def scalar(value: Any) -> Leaf:
    """A leaf that is a plain Python value: an int, float, complex, bool, str or bytes."""
    return Leaf("scalar", dtype=type(value).__name__, value=_values.pack(value))


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
