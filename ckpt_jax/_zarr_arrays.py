"""Zarr arrays that others wrote, in a key space or in folders, read by TensorStore (no JAX)."""

import functools
import math
import os
import stat
from collections.abc import Iterable
from typing import Any

import ml_dtypes  # noqa: F401  Registers bfloat16, float8 and the like with NumPy.
import numpy as np
import tensorstore as ts

from . import _chunks, _manifest, _storage, _view
from ._chunks import Box, Shape
from ._manifest import Leaf
from ._reading import short
from ._storage import Folder
from .errors import Corrupt, Fault

OPENED = 256  # Arrays opened at once.


class Arrays:
    """The arrays in a folder, by their names.

    Args:
        place: the folder.
        ocdbt: whether they lie in a key space; else each in a folder of its name.
        zarr3: whether they are of zarr's version 3; else 2.
        fill: whether a chunk that is not there is one of zeros; else it is lost.
    """

    def __init__(self, place: Folder, *, ocdbt: bool, zarr3: bool, fill: bool):
        self.place = place
        self._ocdbt, self._driver, self._fill = ocdbt, "zarr3" if zarr3 else "zarr", fill
        self._stores: dict[str, ts.TensorStore] = {}
        self._context = place.context()
        _check_plain(place)

    def _spec(self, name: str) -> dict[str, Any]:
        base = self.place.spec()
        if self._ocdbt:
            kvstore: dict[str, Any] = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        else:
            kvstore = base | {"path": f"{base['path'].rstrip('/')}/{name}/"}
        return {"driver": self._driver, "kvstore": kvstore, "fill_missing_data_reads": self._fill}

    def open(self, names: Iterable[str]) -> list[Fault]:
        """Opens arrays; tells of those that cannot be.

        Raises:
            OSError: storage did not answer.
        """
        faults, names = [], list(dict.fromkeys(names))
        for start in range(0, len(names), OPENED):
            some = names[start : start + OPENED]
            opening = {name: ts.open(self._spec(name), open=True, read=True, context=self._context) for name in some}
            for name, future in opening.items():
                try:
                    store = future.result()
                    _check_memory(store)
                except ValueError as error:
                    if (cause := _storage.trouble(error, self.place)) is not None:
                        raise cause from error
                    faults.append(Fault(name, "an array", short(error)))
                else:
                    self._stores[name] = store
        return faults

    def leaf(self, name: str, **more: Any) -> Leaf:
        """The record of an array.

        Raises:
            ValueError: it is of a dtype that no array has here.
        """
        store = self._stores[name]
        shape = tuple(store.shape)
        return _view.array(store.dtype.name, shape, _best(_read_chunk(store), shape, store.dtype.name), **more)

    def read(self, name: str, box: Box, leaf: str) -> np.ndarray:
        """The values of an array in a box; errors tell of the leaf.

        Raises:
            Corrupt: they are not there, or not whole.
            OSError: storage did not answer.
        """
        try:
            return np.asarray(self._stores[name][_chunks.slices(box)].read().result())
        except ValueError as error:
            if (cause := _storage.trouble(error, self.place)) is not None:
                raise cause from error
            fault = Fault(leaf, f"its values in {list(box)}", short(error))
            raise Corrupt(f"{self.place} is damaged", [fault]) from error


def _check_plain(place: Folder) -> None:
    """Raises Corrupt where something is neither a file nor a folder: TensorStore would wait for a pipe for ever."""
    odd = []
    for at, folders, files in os.walk(place.url) if place.local else ():
        for path in (os.path.join(at, name) for name in (*folders, *files)):
            mode = os.stat(path).st_mode if os.path.exists(path) else 0
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                odd.append(Fault(os.path.relpath(path, place.url), "a file", "a pipe, a device, or a link to nowhere"))
    if odd:
        raise Corrupt(f"{place} is damaged", odd)


@functools.cache
def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_memory(store: ts.TensorStore) -> None:
    """Raises ValueError for chunks that no memory holds: TensorStore would end the process."""
    size = store.dtype.numpy_dtype.itemsize * math.prod(_read_chunk(store))
    if size > _memory():
        raise ValueError(f"chunks of {size:,} bytes, which this machine's memory does not hold")


def _read_chunk(store: ts.TensorStore) -> Shape:
    chunk = store.chunk_layout.read_chunk.shape or store.shape
    return tuple(int(n or 1) for n in chunk)


def _best(stored: Shape, shape: Shape, dtype: str) -> Shape:
    """What is best read at once: whole chunks, as many as make a good size."""
    chunk = [max(1, min(c, n)) for c, n in zip(stored, shape, strict=True)]
    room = _chunks.CELL_BYTES // (_manifest.ITEMSIZE.get(dtype, 1) * math.prod(chunk))
    for axis in reversed(range(len(shape))):
        times = max(1, min(room, -(-shape[axis] // chunk[axis])))
        chunk[axis] = max(1, min(chunk[axis] * times, shape[axis]))
        room //= times
    return tuple(chunk)
