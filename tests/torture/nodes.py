"""OCDBT's manifest and nodes that say whatever they are told to, with a length and a crc32c that hold."""

from typing import NamedTuple

from ckpt_jax import _ocdbt, _ocdbt_writer


class Entry(NamedTuple):
    """A key in a node, with its value or the place of that."""

    key: bytes
    file: str
    offset: int = 0
    length: int = 0
    data: bytes | None = None


class Below(NamedTuple):
    """A node in the node above: the first key in it, how much of that all keys in it begin with, and its place."""

    key: bytes
    common: int
    file: str
    offset: int
    length: int


def leaf(entries: list[Entry]) -> bytes:
    """A node of values, in the order that they come in."""
    away = [entry for entry in entries if entry.data is None]
    files, table = _files([entry.file for entry in away])
    return _ocdbt_writer._framed(
        _ocdbt.NODE_MAGIC,
        [
            b"\0",
            table,
            _ocdbt_writer._keys([entry.key for entry in entries]),
            varints([entry.length if entry.data is None else len(entry.data) for entry in entries]),
            bytes(entry.data is None for entry in entries),
            varints([files.index(entry.file) for entry in away]),
            varints([entry.offset for entry in away]),
            *(entry.data for entry in entries if entry.data is not None),
        ],
    )


def interior(height: int, nodes: list[Below]) -> bytes:
    """A node of nodes."""
    files, table = _files([node.file for node in nodes])
    keys = _ocdbt_writer._keys([node.key for node in nodes], varints([node.common for node in nodes]))
    return _ocdbt_writer._framed(_ocdbt.NODE_MAGIC, [bytes([height]), table, keys, _places_of(files, nodes)])


def manifest(root: Below, height: int) -> bytes:
    """The manifest of a key space of one version."""
    files, table = _files([root.file])
    head = [bytes(16), varints([0, 1000, 8 << 20]), b"\4", varints([0]), table, varints([1, 1]), bytes([height])]
    return _ocdbt_writer._framed(_ocdbt.MANIFEST_MAGIC, [*head, _places_of(files, [root]), bytes(8), varints([0])])


def _places_of(files: list[str], nodes: list[Below]) -> bytes:
    columns = [[files.index(node.file) for node in nodes], [n.offset for n in nodes], [n.length for n in nodes]]
    return b"".join(map(varints, [*columns, *[[1] * len(nodes)] * 3]))


def _files(files: list[str]) -> tuple[list[str], bytes]:
    """The files that are pointed to, and their table."""
    files = sorted(set(files))
    raw = [file.encode("utf-8", "surrogatepass") for file in files]
    numbers = [len(raw), *[0] * (len(raw) - 1), *map(len, raw), *[0] * len(raw)]
    return files, varints(numbers) + b"".join(raw)


def varints(numbers: list[int]) -> bytes:
    """Numbers in base 128; those beyond 64 bits are the largest that has so many."""
    return _ocdbt_writer._varints([min(number, 2**64 - 1) for number in numbers]) if numbers else b""
