"""OCDBT's tree of keys, read without TensorStore: which file holds a value, and the small values themselves (no JAX).

The format is in TensorStore's documentation of its `ocdbt` driver. What is not understood here, or is damaged, is
answered with None. `docs/decisions/0005` has the figures, and why TensorStore is not asked in either case.
"""

import bisect
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import crc32c
import msgspec
import numpy as np

from ._storage import Folder, trouble

MANIFEST = "manifest.ocdbt"
NODE_BYTES = 64 << 20  # A larger node is left to TensorStore; ours are of at most 8 MiB.
NODES = 16  # Nodes kept: keys are asked for nearly in order.

_VARINT = 10  # Bytes of the longest.
_NOWHERE = 2**64 - 1  # The offset of the root of an empty tree.
MANIFEST_MAGIC, NODE_MAGIC = bytes.fromhex("0cdb3a2a"), bytes.fromhex("0cdb20de")


class Foreign(ValueError):
    """Not damaged as far as can be told, but of a kind that is not read here: of a later version, compressed."""


class Value(msgspec.Struct, gc=False):
    """Where a value lies; with its bytes, if it lies in a node of the tree."""

    file: str
    offset: int = 0
    length: int = 0
    data: bytes | None = None


class _Reference(msgspec.Struct, frozen=True):
    """A node: its file, the base path of what it points to, its place in the file, its height."""

    file: str
    base: str
    offset: int
    length: int
    height: int


class _Leaf(msgspec.Struct):
    """A node of values."""

    index: dict[bytes, int]
    files: list[str]  # Of each value; "" for this node itself.
    starts: list[int]
    sizes: list[int]
    file: str
    data: bytes

    def get(self, key: bytes) -> Value | None:
        at = self.index.get(key)
        if at is None:
            return None
        file, start, size = self.files[at], self.starts[at], self.sizes[at]
        return Value(file, start, size) if file else Value(self.file, data=self.data[start : start + size])


class _Interior(msgspec.Struct):
    """A node of nodes: the first key in each, the prefix that all keys in it share, and where it is."""

    keys: list[bytes]
    prefixes: list[bytes]
    children: list[_Reference]


class Tree:
    """The tree of keys in a folder.

    Args:
        place: the folder with `manifest.ocdbt`.
        files: the names of the files in it that may be opened; a stranger may have written the tree.

    Attributes:
        foreign: whether something was met that is of a kind which is not read here.

    Raises:
        OSError: `find` and `files`: a part of it could not be read just now. They may be called again.
    """

    foreign = False

    def __init__(self, place: Folder, files: Collection[str]):
        self._place, self._files = place, files
        self._nodes: dict[_Reference, _Leaf | _Interior | None] = {}
        self._last: tuple[bytes, _Leaf] | None = None

    @functools.cached_property
    def _root(self) -> _Reference | None:
        if MANIFEST not in self._files:
            return None
        return self._understood(lambda: _root(self._place.read(MANIFEST, most=NODE_BYTES) or b""))

    def _understood(self, load: Callable[[], Any]) -> Any:
        """What a part of the tree says; None if that is not to be understood."""
        try:
            return load()
        except (ValueError, IndexError) as error:
            self.foreign = self.foreign or isinstance(error, Foreign)
        except OSError as error:
            if trouble(error, self._place) is not None:
                raise
        return None

    def find(self, key: str) -> Value | None:
        """Where a key's value is; None if there is none, or if the way to it cannot be read."""
        wanted = key.encode()
        if self._last is not None:  # Most often in the node where the one before it was.
            prefix, leaf = self._last
            if wanted.startswith(prefix) and (value := leaf.get(wanted.removeprefix(prefix))) is not None:
                return value
        reference, prefix, rest = self._root, b"", wanted
        while reference is not None:
            node = self._node(reference)
            if isinstance(node, _Leaf):
                self._last = prefix, node
                return node.get(rest)
            at = bisect.bisect_right(node.keys, rest) - 1 if node is not None else -1
            if node is None or at < 0 or not rest.startswith(node.prefixes[at]):
                return None
            reference = node.children[at]
            prefix, rest = prefix + node.prefixes[at], rest.removeprefix(node.prefixes[at])
        return None

    def files(self) -> Iterator[tuple[str, str]]:
        """Every key with the file of its value, as far as the tree can be read."""
        nodes = [(self._root, b"")]
        seen = set()  # In a stranger's tree, floors of nodes that all point to the same one below have no end.
        while nodes:
            reference, prefix = nodes.pop()
            node = self._node(reference) if reference is not None and reference not in seen else None
            seen.add(reference)
            if isinstance(node, _Leaf):
                for key, at in node.index.items():
                    yield (prefix + key).decode("utf-8", "replace"), node.files[at] or node.file
            elif node is not None:
                nodes += [(c, prefix + p) for c, p in zip(node.children, node.prefixes, strict=True)]

    def _node(self, reference: _Reference) -> _Leaf | _Interior | None:
        if reference not in self._nodes:
            while len(self._nodes) >= NODES:
                self._nodes.pop(next(iter(self._nodes)))
            self._nodes[reference] = self._understood(lambda: self._load(reference))
        return self._nodes[reference]

    def _load(self, at: _Reference) -> _Leaf | _Interior | None:
        if at.file not in self._files or at.length > NODE_BYTES:
            return None
        return _node(self._place.read(at.file, at.offset, at.length) or b"", at)


# --- bytes ------------------------------------------------------------------------------------------------------------


class _Reader:
    """Takes an encoded manifest or node apart, from front to back.

    Raises:
        ValueError: it is not whole, not of the kind that is expected, or compressed.
    """

    def __init__(self, data: bytes, magic: bytes):
        if len(data) < 18 or data[:4] != magic or int.from_bytes(data[4:12], "little") != len(data):
            raise ValueError("no whole manifest or node")
        if crc32c.crc32c(memoryview(data)[:-4]) != int.from_bytes(data[-4:], "little"):
            raise ValueError("a crc32c that does not match")
        self.data, self.at, self.end = data, 12, len(data) - 4
        if self.varint() or self.varint():
            raise Foreign("a later version, or compressed")

    def skip(self, count: int) -> int:
        """Where the next bytes begin, which are then behind."""
        if count > self.end - self.at:
            raise ValueError("more than there is")
        self.at += count
        return self.at - count

    def take(self, count: int) -> bytes:
        start = self.skip(count)
        return self.data[start : start + count]

    def varint(self) -> int:
        return int(self.varints(1)[0])

    def count(self) -> int:
        """The number of items in what follows, each of which takes a byte at least."""
        count = self.varint()
        if count > self.end - self.at:
            raise ValueError("more than there is")
        return count

    def varints(self, count: int) -> np.ndarray:
        """uint64[count], each of which was written in base 128, lowest digit first."""
        if count <= 0:
            return np.zeros(0, np.uint64)
        window = np.frombuffer(self.data, np.uint8)[self.at : min(self.at + _VARINT * count, self.end)]
        ends = np.flatnonzero(window < 128)[:count]
        if len(ends) < count:
            raise ValueError("more than there is")
        starts = np.concatenate([[0], ends[:-1] + 1])
        lengths = ends - starts + 1
        if lengths.max() > _VARINT:
            raise ValueError("a number of more than 64 bits")
        used = int(ends[-1]) + 1
        places = (np.arange(used) - np.repeat(starts, lengths)).astype(np.uint64)
        self.at += used
        return np.add.reduceat((window[:used] & 127).astype(np.uint64) << np.uint64(7) * places, starts)

    def texts(self, prefixes: np.ndarray, lengths: np.ndarray) -> list[bytes]:
        """Byte strings of which each but the first begins as the one before it does, so many bytes long."""
        found: list[bytes] = []
        before, total = b"", 0  # Not strict: of nothing there is no first one either.
        for prefix, length in zip([0, *prefixes.tolist()], lengths.tolist(), strict=False):
            total += prefix + length
            if prefix > len(before) or total > NODE_BYTES:  # A long one that many begin with takes few bytes here.
                raise ValueError("a longer prefix than what it is of, or more than a node holds")
            before = before[:prefix] + self.take(length)
            found.append(before)
        return found

    def table(self, base: str) -> tuple[list[str], list[str]]:
        """The files that are pointed to: their names, and the base path of what they point to in turn."""
        count = self.count()
        prefixes, lengths = self.varints(count - 1), self.varints(count)
        bases = self.varints(count)
        paths = [base + path.decode() for path in self.texts(prefixes, lengths)]
        return paths, [path[: len(base) + int(n)] for path, n in zip(paths, bases, strict=True)]


def _root(data: bytes) -> _Reference | None:
    """The root of the newest version; None if it is empty."""
    reader = _Reader(data, MANIFEST_MAGIC)
    reader.take(16)  # uuid
    if reader.varint():
        raise Foreign("a manifest in several files")
    reader.varints(2)  # the sizes of inline values and of nodes
    reader.take(1)  # arity of the version tree
    if reader.varint():
        reader.take(4)  # level of zstd
    files, bases = reader.table("")
    count = reader.count()
    reader.varints(count)  # generations
    heights = reader.take(count)
    ids, offsets, lengths = (reader.varints(count) for _ in range(3))
    newest = count - 1
    if newest < 0 or offsets[newest] == _NOWHERE:
        return None
    file = int(ids[newest])
    return _Reference(files[file], bases[file], int(offsets[newest]), int(lengths[newest]), heights[newest])


def _node(data: bytes, at: _Reference) -> _Leaf | _Interior:
    reader = _Reader(data, NODE_MAGIC)
    (height,) = reader.take(1)
    if height != at.height:  # So every way down has an end.
        raise ValueError("another height")
    files, bases = reader.table(at.base)
    count = reader.count()
    prefixes, lengths = reader.varints(count - 1), reader.varints(count)
    if height:
        common = reader.varints(count).tolist()
        keys = reader.texts(prefixes, lengths)
        columns = [reader.varints(count).tolist() for _ in range(3)]
        children = [
            _Reference(files[file], bases[file], offset, length, height - 1)
            for file, offset, length in zip(*columns, strict=True)
        ]
        return _Interior(keys, [key[:n] for key, n in zip(keys, common, strict=True)], children)
    keys = reader.texts(prefixes, lengths)
    sizes, kinds = (reader.varints(count).tolist() for _ in range(2))
    if any(kind > 1 for kind in kinds):
        raise Foreign("a value of another kind")
    elsewhere = sum(kinds)
    where = iter([files[file] for file in reader.varints(elsewhere).tolist()])
    offsets = iter(reader.varints(elsewhere).tolist())
    homes = [next(where) if kind else "" for kind in kinds]
    starts = [next(offsets) if kind else reader.skip(size) for kind, size in zip(kinds, sizes, strict=True)]
    return _Leaf({key: i for i, key in enumerate(keys)}, homes, starts, sizes, at.file, data)
