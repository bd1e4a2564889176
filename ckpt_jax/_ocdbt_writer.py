"""OCDBT's tree of keys, written without TensorStore: what `_ocdbt` reads (no JAX).

The format is in TensorStore's documentation of its `ocdbt` driver. `docs/decisions/0006` has the figures.
"""

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import crc32c
import numpy as np

from ._ocdbt import MANIFEST, MANIFEST_MAGIC, NODE_MAGIC, Value
from ._storage import Folder

ARITY = 4  # TensorStore's default for the tree of versions, of which there is one.


class _Node(NamedTuple):
    """An encoded node: its first key, its bytes, and what TensorStore counts of all that is below."""

    first: bytes
    data: bytes
    keys: int
    tree_bytes: int
    value_bytes: int


def write_tree(place: Folder, file: str, values: Mapping[bytes, Value], inline: int, node_bytes: int) -> None:
    """Writes a key space durably: of one version, with a node of nodes above if one node of values is not enough.

    Args:
        place: the folder, with the files that the values lie in.
        file: what the file with the nodes is to be called.
        values: where each key's value is, or its bytes.
        inline, node_bytes: the limits that the manifest tells, of values in nodes and of nodes.
    """
    if not values:
        return  # No manifest: TensorStore takes that for an empty key space too.
    nodes = [_leaf({key: values[key] for key in keys}) for keys in _shared_out(values, node_bytes // 2)]
    data = b"".join(node.data for node in nodes)
    root = nodes[0] if len(nodes) == 1 else _interior(file, nodes)
    height = int(len(nodes) > 1)
    place.write(file, data + root.data if height else data)
    place.write(MANIFEST, _manifest(file, root, len(data) * height, height, [inline, node_bytes]))


def _shared_out(values: Mapping[bytes, Value], limit: int) -> Iterator[list[bytes]]:
    """The keys in order, in lots for one node each."""
    lot: list[bytes] = []
    size = 0
    for key in sorted(values):
        more = len(key) + len(values[key].data or b"")
        if lot and size + more > limit:
            yield lot
            lot, size = [], 0
        lot.append(key)
        size += more
    yield lot


def _leaf(values: dict[bytes, Value]) -> _Node:
    found = list(values.values())
    elsewhere = [value for value in found if value.data is None]
    files = sorted({value.file for value in elsewhere}, key=str.encode)
    number = {file: i for i, file in enumerate(files)}
    body = [
        b"\0",  # height
        _table(files),
        _keys(list(values)),
        _varints([value.length if value.data is None else len(value.data) for value in found]),
        bytes(value.data is None for value in found),
        _varints([number[value.file] for value in elsewhere]),
        _varints([value.offset for value in elsewhere]),
        *(value.data for value in found if value.data is not None),
    ]
    data = _framed(NODE_MAGIC, body)
    return _Node(next(iter(values)), data, len(found), len(data), sum(value.length for value in elsewhere))


def _interior(file: str, nodes: Sequence[_Node]) -> _Node:
    """The node above nodes that follow each other in the file."""
    offsets = itertools.accumulate((len(node.data) for node in nodes[:-1]), initial=0)
    keys = _keys([node.first for node in nodes], _varints([0] * len(nodes)))  # The keys below share no first bytes.
    data = _framed(NODE_MAGIC, [b"\1", _table([file]), keys, _references(offsets, nodes)])
    totals = [sum(column) for column in zip(*(node[2:] for node in nodes), strict=True)]
    return _Node(nodes[0].first, data, totals[0], totals[1] + len(data), totals[2])


def _manifest(file: str, root: _Node, offset: int, height: int, limits: Sequence[int]) -> bytes:
    body = [
        os.urandom(16),
        _varints([0, *limits]),  # 0: this file is all of the manifest.
        bytes([ARITY]),
        _varints([0]),  # not compressed
        _table([file]),
        _varints([1, 1]),  # one version, the first
        bytes([height]),
        _references([offset], [root]),
        time.time_ns().to_bytes(8, "little"),
        _varints([0]),  # no versions elsewhere
    ]
    return _framed(MANIFEST_MAGIC, body)


def _references(offsets: Iterable[int], nodes: Sequence[_Node]) -> bytes:
    """Where nodes are in the only file of the table, and what TensorStore counts of them."""
    counts = zip(*(node[2:] for node in nodes), strict=True)
    columns = [[0] * len(nodes), list(offsets), [len(node.data) for node in nodes], *map(list, counts)]
    return b"".join(map(_varints, columns))


def _keys(keys: list[bytes], between: bytes = b"") -> bytes:
    """Keys in order, each whole: that they share none of the one before them is the simplest truth."""
    sizes = _varints([len(key) for key in keys])
    return b"".join([_varints([len(keys), *[0] * (len(keys) - 1)]), sizes, between, *keys])


def _table(files: list[str]) -> bytes:
    """The files that are pointed to, whose paths are relative to this key space's folder."""
    paths = [file.encode() for file in files]
    numbers = [len(paths), *[0] * (len(paths) - 1), *map(len, paths), *[0] * len(paths)] if paths else [0]
    return b"".join([_varints(numbers), *paths])


def _varints(numbers: Sequence[int]) -> bytes:
    """Numbers in base 128, the lowest digit first; the last digit of each is below 128, the others above."""
    digits = np.array(numbers, np.uint64)[:, None] >> np.arange(0, 64, 7, dtype=np.uint64)
    used = digits > 0
    used[:, 0] = True
    follows = np.zeros_like(used)
    follows[:, :-1] = used[:, 1:]
    return ((digits & 127) | np.where(follows, 128, 0).astype(np.uint64)).astype(np.uint8)[used].tobytes()


def _framed(magic: bytes, body: Iterable[bytes]) -> bytes:
    inner = b"".join([_varints([0, 0]), *body])  # the format's version; not compressed
    data = magic + (len(magic) + 8 + len(inner) + 4).to_bytes(8, "little") + inner
    return data + crc32c.crc32c(data).to_bytes(4, "little")
