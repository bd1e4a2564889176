"""Folders of `torch.distributed.checkpoint`: their metadata, and tensors out of their chunks (no JAX, no torch)."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  Registers bfloat16, float8 and the like with NumPy.
import numpy as np

from . import _chunks, _pickled, _torch_file, _view, _zipped
from ._chunks import Box, Shape
from ._pickled import Call, Global
from ._storage import Folder
from ._structure import Node
from ._torch_file import Odd, Tensor
from ._view import Path
from ._zipped import Part
from .errors import CheckpointError, Corrupt, Fault

KIND = "folder of torch.distributed.checkpoint"
METADATA = ".metadata"
MODULE = "torch.distributed.checkpoint.metadata"
_OPENED = 4096  # Chunks whose place is kept in mind.


class _Stored(NamedTuple):
    """Where a chunk or an object lies: a file of `torch.save` within another."""

    file: str
    offset: int
    length: int


class _Chunk(NamedTuple):
    """A chunk of a tensor."""

    box: Box
    stored: _Stored

    @property
    def shape(self) -> Shape:
        return _chunks.extent(self.box)


class Sharded(NamedTuple):
    """A tensor in chunks."""

    dtype: str
    shape: Shape
    chunks: list[_Chunk]


class Saved:
    """What lies in a folder.

    Attributes:
        files: those that hold the chunks.
        held: by their paths, tensors in chunks, and what was saved as objects, in parts: tensors, plain values, Odd.
        nodes: the same paths and those of empty containers, as `_view.nested` takes them.
        sequences: the paths of containers whose entries are positions.

    Raises:
        CheckpointError: it is damaged.
        OSError: it cannot be read.
    """

    def __init__(self, place: Folder):
        self.place = place
        self.held: dict[Path, Any] = {}
        self.nodes: dict[Path, Node | None] = {}
        self.sequences: set[Path] = set()
        self._items, self._text = _view.ITEMS, _view.TEXT  # What is still allowed.
        # The place of a tensor in a chunk is looked up once.
        self._opened = functools.lru_cache(_OPENED)(self._load)
        faults: list[Fault] = []
        try:
            told = self._metadata()
            self._stored = dict(_places(told.get("storage_data")))
            items = _dict(told.get("state_dict_metadata"), "state_dict_metadata")
            paths = _paths([_checked(name, str) for name in items], told.get("planner_data"))
        except ValueError as error:
            raise _refused(place, [Fault(METADATA, f"the metadata of {KIND}", str(error))]) from error
        self.files = {stored.file for stored in self._stored.values()}
        faults += self._faults()
        for name, item in items.items() if not faults else ():
            path, positions = paths[name]
            self.sequences |= {path[:at] for at in positions}
            try:
                self._put(path, self._item(name, item))
            except ValueError as error:
                faults.append(Fault(name, "a tensor or an object", str(error)))
        if faults:
            raise _refused(place, faults)

    def _metadata(self) -> dict[str, Any]:
        part = _zipped.whole(self.place, METADATA)
        if part.size > _pickled.LARGEST:
            raise ValueError(f"{part.size:,} bytes, where {_pickled.LARGEST:,} are read")
        return _fields(_pickled.loads(part.read(0, part.size)), "Metadata")

    def _load(self, stored: _Stored) -> Any:
        return _torch_file.load(Part(self.place, *stored))

    def _faults(self) -> Iterator[Fault]:
        """Where the files are not those of which the metadata tells."""
        sizes = self.place.sizes(sorted(self.files))
        for file, size in sizes.items():
            if size is None:
                yield Fault(file, "a file", "none")
        for (name, at), stored in self._stored.items():
            size, end = sizes[stored.file], stored.offset + stored.length
            if size is not None and (min(stored.offset, stored.length) < 0 or end > size):
                yield Fault(f"{name}{list(at)}", f"bytes {stored.offset:,} to {end:,} of {stored.file}", f"{size:,}")

    def _item(self, name: str, item: Any) -> Any:
        """A tensor in chunks, or the object that was saved."""
        if isinstance(item, Call) and item.what == Global(MODULE, "BytesStorageMetadata"):
            return self._load(self._at(name, ()))
        told = _fields(item, "TensorStorageMetadata")
        shape, dtype = _torch_file.sizes(told.get("size")), _dtype(told.get("properties"))
        if dtype.name not in _torch_file.DTYPES:
            return Odd(f"a tensor of the dtype {dtype!s:.60}")
        _view.array(dtype.name, shape)
        chunks = [self._chunk(name, chunk, shape) for chunk in _checked(told.get("chunks"), list)]
        if sum(math.prod(chunk.shape) for chunk in chunks) < math.prod(shape):
            raise ValueError(f"chunks that do not make a tensor of the shape {shape}")
        return Sharded(dtype.name, shape, chunks)

    def _chunk(self, name: str, chunk: Any, shape: Shape) -> _Chunk:
        told = _fields(chunk, "ChunkStorageMetadata")
        starts, extent = _torch_file.sizes(told.get("offsets")), _torch_file.sizes(told.get("sizes"))
        if not len(starts) == len(extent) == len(shape) or any(
            a + n > most for a, n, most in zip(starts, extent, shape, strict=True)
        ):
            raise ValueError(f"a chunk of the shape {extent} at {starts} of a tensor of the shape {shape}")
        return _Chunk(tuple((a, a + n) for a, n in zip(starts, extent, strict=True)), self._at(name, starts))

    def _at(self, name: str, offset: Shape) -> _Stored:
        found = self._stored.get((name, offset))
        if found is None:
            raise ValueError(f"no place of what begins at {list(offset)}")
        return found

    def _put(self, path: Path, value: Any) -> None:
        """Lays a value, or the parts of a container, at a path."""
        self._items -= 1
        self._text -= _view.length(value) + sum(map(len, path))
        if self._items < 0 or self._text < 0:
            raise ValueError(f"more than {_view.ITEMS:,} values, or {_view.TEXT:,} bytes of text")
        if path in self.nodes:
            raise ValueError("two of the same name")
        if value is None:
            self.nodes[path] = Node("none")
        elif type(value) not in (dict, list, tuple):
            self.held[path], self.nodes[path] = value, None
        elif not value:
            self.nodes[path] = Node(type(value).__name__)
        elif type(value) is dict:
            for key, child in value.items():
                self._put((*path, str(key)), child)
        else:
            self.sequences.add(path)
            for at, child in enumerate(value):
                self._put((*path, str(at)), child)

    def read(self, sharded: Sharded, box: Box, name: str) -> np.ndarray:
        """The values of a tensor in a box, out of the chunks that have them; errors tell of the leaf `name`.

        Raises:
            Corrupt: they do not make the box, or are not what the metadata says.
            OSError: they cannot be read.
        """
        values = np.empty(_chunks.extent(box), sharded.dtype)
        missing = np.ones(values.shape, bool)
        for chunk in sharded.chunks if values.size else ():
            shared = _chunks.overlap(chunk.box, box)
            if shared is None:
                continue
            tensor = self._tensor(sharded.dtype, chunk, name)
            inside = tuple((a - start, b - start) for (a, b), (start, _) in zip(shared, chunk.box, strict=True))
            at = (*_chunks.slices(shared, box), ...)
            values[at], missing[at] = _torch_file.read(tensor, inside, name), False
        if missing.any():
            fault = Fault(name, f"chunks that cover {list(box)}", "a gap between them")
            raise Corrupt(f"{self.place} is damaged", [fault])
        return values

    def _tensor(self, dtype: str, chunk: _Chunk, name: str) -> Tensor:
        try:
            tensor = self._opened(chunk.stored)
        except ValueError as error:
            tensor = Odd(str(error))
        if isinstance(tensor, Tensor) and (tensor.flat.dtype, tensor.shape) == (dtype, chunk.shape):
            return tensor
        found = f"{tensor.flat.dtype}{list(tensor.shape)}" if isinstance(tensor, Tensor) else "none"
        fault = Fault(
            f"{name} at byte {chunk.stored.offset:,}",
            f"{dtype}{list(chunk.shape)}",
            tensor.says if isinstance(tensor, Odd) else found,
        )
        raise Corrupt(f"{self.place / chunk.stored.file} is damaged", [fault])


# --- records ----------------------------------------------------------------------------------------------------------


def _refused(place: Folder, faults: list[Fault]) -> CheckpointError:
    return _view.refused(place.url, KIND, faults)


def _places(told: Any) -> Iterator[tuple[tuple[str, Shape], _Stored]]:
    """Where the chunk of a name that begins at an offset lies; an object begins at none."""
    for index, info in _dict(told, "storage_data").items():
        key, where = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        offset, file = key.get("offset"), _checked(where.get("relative_path"), str)
        if where.get("transform_descriptors"):
            raise ValueError("chunks that an extension of torch's transformed")
        if not all(part not in ("", ".", "..") and "\0" not in part for part in file.split("/")):
            raise ValueError(f"a file {file!r:.80}, which leads out of the folder")
        at = () if offset is None else _torch_file.sizes(offset)
        stored = _Stored(file, _checked(where.get("offset"), int), _checked(where.get("length"), int))
        yield (_checked(key.get("fqn"), str), at), stored


def _dtype(properties: Any) -> Global:
    """The dtype of a tensor's properties, which begin with it."""
    state = _fields(properties, "TensorProperties", tuple)
    if not state or not isinstance(state[0], Global):
        raise ValueError("a tensor without a dtype")
    return state[0]


def _paths(names: list[str], told: Any) -> dict[str, tuple[Path, list[int]]]:
    """The path of each name, split at its dots, and where in it the planner had the position of a sequence."""
    found: dict[str, tuple[Path, list[int]]] = {}
    for name, path in _view.split(names).items():
        entries = told.get(name) if isinstance(told, dict) else None
        positions = list(_positions(entries)) if isinstance(entries, tuple) else []
        found[name] = path, positions if positions and positions[-1] < len(path) else []
    return found


def _positions(entries: tuple[Any, ...]) -> Iterator[int]:
    at = 0
    for entry in entries:
        if type(entry) is int:
            yield at
        at += 1 + (entry.count(".") if isinstance(entry, str) else 0)


def _fields(value: Any, name: str, kind: type = dict) -> Any:
    """The state of a dataclass of torch's, of a name.

    Raises:
        ValueError: it is none of that name.
    """
    if not isinstance(value, Call) or value.what.name != name or not value.what.module.startswith("torch."):
        raise ValueError(f"no {name}")
    return _checked(value.state, kind)


def _dict(value: Any, name: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"no {name}")
    return value


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} should be")
    return value
