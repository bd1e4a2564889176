"""Orbax's checkpoints, of any layout, as they lie there (no JAX, no Orbax)."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  Registers bfloat16, float8 and the like with NumPy.
import msgspec
import numpy as np

from . import _commit, _manifest, _orbax, _structure, _values, _view
from ._chunks import Box
from ._manifest import Leaf
from ._storage import Folder
from ._structure import UNTOLD, Node
from ._view import Path, View
from ._zarr_arrays import Arrays
from .errors import CheckpointError, Corrupt, Fault, NotFound

METADATA, CHECKPOINT, MARKER = "_METADATA", "_CHECKPOINT_METADATA", "orbax.checkpoint"
TMP = ".orbax-checkpoint-tmp"
SUCCESS = "commit_success.txt"
LARGEST = 1 << 30  # Bytes of a file of JSON.
OPENED = 256  # Arrays opened at once.
_SEQUENCE = 1
_EMPTY = {"None": "none", "Dict": "dict", "List": "list", "Tuple": "tuple", "NamedTuple": "named"}
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
_JSON = ("metadata", "data.json")  # The file of an item that is JSON, in v0 and in v1.


def is_here(place: Folder) -> bool:
    """Whether Orbax wrote what lies in a folder: a checkpoint, an item of one, or a root of steps."""
    entries = place.entries()
    if _is_ours(place) or _is_ours(place.parent):
        return False  # What lost its manifest, or never had one, is no checkpoint, although Orbax would read it.
    if not {METADATA, CHECKPOINT, MARKER}.isdisjoint(entries):
        return True
    return bool(_items(place, entries)) or _newest(place, entries) is not None


def _is_ours(place: Folder) -> bool:
    """Whether we wrote an Orbax checkpoint, with a manifest that counts alone."""
    return place.read(_manifest.NAME, 0, 1) is not None or place.read(SUCCESS, 0, 100) == _orbax.WRITTEN


def view(place: Folder) -> View:
    """What an Orbax checkpoint holds: of a root of steps the newest, of several items all, each under its name.

    Raises:
        NotFound: it was not finished, or holds no tree that can be read.
        Corrupt: it is damaged.
        Unsupported: it holds what this cannot read; names all of it.
    """
    entries = place.entries()
    if METADATA not in entries and not _items(place, entries) and (newest := _newest(place, entries)) is not None:
        place, entries = newest, newest.entries()
    _check_finished(place, entries)
    told = _json(place, CHECKPOINT) if CHECKPOINT in entries else {}
    if METADATA in entries:
        items = {"": place}
    else:
        items = {name: place / name for name in _items(place, entries)}
        _check_items(place, told, entries)
    if not items:
        raise _no_tree(place, entries)
    custom = told.get("custom_metadata")
    escaped = isinstance(custom, dict) and _orbax.ESCAPED.items() <= custom.items()
    found: dict[Path, _Found] = {}
    sequences: set[Path] = set()
    for name, folder in items.items():
        within = (name,) if len(items) > 1 else ()
        item = _load(folder, others=[place / other for other in items if other != name])
        found |= {within + _keys(path, escaped=escaped): each for path, each in item.found.items()}
        sequences |= {within + _keys(path, escaped=escaped) for path in item.sequences}
    tree, names = _view.nested({path: each.node for path, each in found.items()}, sequences.__contains__)
    leaves = {name: found[path].leaf for name, path in names.items()}

    def read(name: str, box: Box) -> np.ndarray:
        each = found[names[name]]
        return each.item.read(each.parameter, box, name)

    return View(
        "Orbax",
        place.url,
        tree,
        leaves,
        read,
        step=_step(place if METADATA not in entries or told else place.parent),
        metadata=_metadata(place, told, entries),
        metrics=_metrics(place, told),
        lacks=("digests",),
        stamp=_stamp(items.values()),
    )


def _keys(path: Path, *, escaped: bool) -> Path:
    return tuple(map(_structure.unescape, path)) if escaped else path


def _step(place: Folder) -> int | None:
    """The step of a folder, which may have a prefix, as in `step_1000`."""
    return _commit.step_of(place.name.rpartition("_")[2].lstrip("0") or "0") if place.name[-1:].isdigit() else None


# --- layouts ----------------------------------------------------------------------------------------------------------


def _items(place: Folder, entries: Iterable[str]) -> list[str]:
    """The folders in a checkpoint that hold a tree."""
    return [name for name in entries if TMP not in name and (place / name).read(METADATA, 0, 1) is not None]


def _newest(place: Folder, entries: Iterable[str]) -> Folder | None:
    """The newest step in a root, whatever its names begin with."""
    steps = [(step, name) for name in entries if TMP not in name and (step := _step(place / name)) is not None]
    for _, name in sorted(steps, reverse=True):
        inside = (place / name).entries()
        if _is_ours(place / name):
            continue
        if not {METADATA, CHECKPOINT, MARKER}.isdisjoint(inside) or _items(place / name, inside):
            return place / name
    return None


def _load(folder: Folder, others: list[Folder]) -> "Item":
    try:
        return Item(folder)
    except CheckpointError as error:
        hint = f"perhaps {', '.join(map(str, others))} can be read alone" if others else error.hint
        raise type(error)(error.summary, error.faults, hint) from error


def _check_finished(place: Folder, entries: list[str]) -> None:
    unfinished = TMP in place.url
    if not place.local and not unfinished:
        unfinished = SUCCESS not in {*entries, *place.parent.entries()}
    if unfinished:
        raise NotFound(f"{place} was not finished by Orbax", hint="take a step that was")


def _check_items(place: Folder, told: dict[str, Any], entries: list[str]) -> None:
    """Raises Corrupt where an item that the checkpoint tells of is not there, or a folder has nothing in it."""
    handlers = told.get("item_handlers")
    missing = [
        Fault(name, "an item of the checkpoint", "no such folder")
        for name, handler in (handlers if isinstance(handlers, dict) else {}).items()
        if name not in entries and "JsonHandler" not in str(handler) and "Descriptor" not in str(handler)
    ]
    if missing and not _items(place, entries):
        raise Corrupt(f"{place} lacks what it says it holds", missing)


def _no_tree(place: Folder, entries: list[str]) -> NotFound:
    folders = [place, *(place / name for name in entries)]
    arrays = any(folder.read("manifest.ocdbt", 0, 1) is not None for folder in folders)
    hint = f"without {METADATA} nobody knows the tree; Orbax does not read it either" if arrays else ""
    found = ", ".join(entries[:8]) or "nothing"
    return NotFound(
        f"{place} is an Orbax checkpoint without a tree that can be read",
        [Fault(place.url, f"{METADATA}, or a folder that has it", found)],
        hint=hint,
    )


def _metadata(place: Folder, told: dict[str, Any], entries: list[str]) -> Any:
    """What users gave: custom metadata, and items that are JSON."""
    found: dict[str, Any] = {}
    custom = told.get("custom_metadata")
    if isinstance(custom, dict) and _orbax.ESCAPED.items() <= custom.items():  # We wrote it, so it is all there is.
        own = {key: each for key, each in custom.items() if key not in _orbax.ESCAPED}
        return _values.unpack(own.get("metadata", own)) or None
    if custom:
        found["custom_metadata"] = custom
    for name in entries:
        for file in _JSON:
            if name != "metrics" and (place / name).read(file, 0, 1) is not None:
                found[name] = _json(place / name, file)
    return found or None


def _metrics(place: Folder, told: dict[str, Any]) -> dict[str, Any]:
    found = told.get("metrics")
    if not found and (place / "metrics").read("metrics", 0, 1) is not None:
        found = _json(place / "metrics", "metrics")
    return found if isinstance(found, dict) else {}


def _json(place: Folder, file: str) -> dict[str, Any]:
    """A file of JSON.

    Raises:
        Corrupt: it is none.
    """
    try:
        data = place.read(file, most=LARGEST)
        found = json.loads(data or b"")
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{place} is damaged", [Fault(file, "JSON", f"{error}"[:200])]) from error
    if not isinstance(found, dict):
        raise Corrupt(f"{place} is damaged", [Fault(file, "an object", f"{found!r:.80}")])
    return found


def _stamp(folders: Iterable[Folder]) -> str:
    """Of the files' names and sizes, and of the descriptions in them."""
    sums = hashlib.sha256()
    for folder in folders:
        sums.update(repr((folder.url, sorted(folder.files().items()) if folder.local else 0)).encode())
        for name in (METADATA, "manifest.ocdbt"):
            sums.update(folder.read(name) or b"")
    return sums.hexdigest()


# --- one item ---------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """What lies at a path: an empty container, or a leaf and the name of the array that it lies in."""

    item: "Item"
    parameter: str
    node: Node | None = None
    leaf: Leaf = Leaf("scalar")


class _Parameter(msgspec.Struct):
    """A record of `_METADATA`."""

    key_metadata: list[dict[str, Any]]
    value_metadata: dict[str, Any]


class _Tree(msgspec.Struct):
    tree_metadata: dict[str, _Parameter]
    use_ocdbt: bool = False
    use_zarr3: bool = False
    store_array_data_equal_to_fill_value: bool = False


class Item:
    """A tree as Orbax lays it down: a description, and arrays in a key space or in folders.

    Attributes:
        found: what lies at each path.
        sequences: the paths of containers whose entries are positions.
    """

    def __init__(self, place: Folder):
        self.place = place
        try:
            self.tree = msgspec.json.decode(place.read(METADATA, most=LARGEST) or b"", type=_Tree)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise Corrupt(f"{place} is damaged", [Fault(METADATA, "the description of a tree", f"{error}")]) from error
        self.sequences: set[Path] = set()
        self.found: dict[Path, _Found] = {}
        faults: list[Fault] = []
        records = dict(self._records(faults))
        stored = {path: name for path, (name, kind) in records.items() if kind in _ARRAYS}
        self._arrays = Arrays(
            place,
            ocdbt=self.tree.use_ocdbt,
            zarr3=self.tree.use_zarr3,
            # Older versions of Orbax wrote no chunks of zeros; of the others a chunk that is not there is lost.
            fill=not self.tree.store_array_data_equal_to_fill_value,
        )
        faults += self._arrays.open(stored.values())
        impls, strings = self._impls(), self._strings() if any(k == "string" for _, k in records.values()) else {}
        if not faults:
            for path, (name, kind) in records.items():
                try:
                    self.found[path] = self._leaf(name, kind, impls, strings)
                except ValueError as error:
                    faults.append(Fault(".".join(path), "a leaf", str(error)))
        if faults:
            raise Corrupt(f"{place} is damaged in {len(faults)} places", faults)

    def _records(self, faults: list[Fault]) -> Iterator[tuple[Path, tuple[str, str]]]:
        """Path, name of the array, and kind of each leaf and each empty container."""
        names: dict[str, Path] = {}
        for key, record in self.tree.tree_metadata.items():
            try:
                path = tuple(str(entry["key"]) for entry in record.key_metadata)
                kinds = [entry.get("key_type") for entry in record.key_metadata]
                kind = str(record.value_metadata["value_type"])
            except (KeyError, AttributeError, TypeError):
                faults.append(Fault(f"{METADATA}: {key}", "a path and a kind of value", "others"))
                continue
            self.sequences |= {path[:at] for at, kind_of in enumerate(kinds) if kind_of == _SEQUENCE}
            name = ".".join(path)
            if kind not in _EMPTY and name in names:
                told = f"the same as of {'.'.join(names[name])!r}: Orbax wrote one over the other"
                faults.append(Fault(f"{METADATA}: {key}", "a name of its own", told))
            if not all(map(_is_plain, name.split("/"))):
                faults.append(Fault(f"{METADATA}: {key}", "a name that stays inside the folder", name[:80]))
            names[name] = path
            yield path, (name, kind)

    def _leaf(self, name: str, kind: str, impls: dict[str, str], strings: dict[str, Any]) -> _Found:
        if kind in _EMPTY:
            return _Found(self, name, Node(_EMPTY[kind], type="" if kind == "None" else UNTOLD))
        if kind == "string":
            if not isinstance(strings.get(name), str):
                raise ValueError("no text in _strings.json")
            return _Found(self, name, leaf=Leaf("scalar", dtype="str", value=strings[name]))
        if kind not in _ARRAYS:
            raise ValueError(f"a value of the kind {kind!r:.60}, which only Orbax knows")
        leaf = self._arrays.leaf(name, host="numpy" if kind == "np.ndarray" else "")
        if kind == "scalar" and not leaf.shape:
            value = self._arrays.read(name, (), name).item()
            return _Found(self, name, leaf=Leaf("scalar", dtype=type(value).__name__, value=value))
        if name in impls:
            if leaf.dtype != "uint32" or not leaf.shape:
                raise ValueError(f"key data of {leaf}")
            leaf.kind, leaf.impl = "key", impls[name]
        return _Found(self, name, leaf=leaf)

    def _impls(self) -> dict[str, str]:
        """The implementations of PRNG keys, by the name of the array."""
        found = {}
        folder = self.place / "array_metadatas"
        for file in folder.entries():
            for each in _json(folder, file).get("array_metadatas", ()):
                told = each.get("array_metadata", {}) if isinstance(each, dict) else {}
                more = told.get("ext_metadata") if isinstance(told, dict) else None
                if isinstance(more, dict) and isinstance(more.get("random_key_impl"), str):
                    found[str(told.get("param_name"))] = more["random_key_impl"]
        return found

    def _strings(self) -> dict[str, Any]:
        return _json(self.place, "_strings.json")

    def read(self, parameter: str, box: Box, name: str) -> np.ndarray:
        """The values of an array in a box; errors tell of the leaf `name`."""
        return self._arrays.read(parameter, box, name)


def _is_plain(part: str) -> bool:
    return part not in ("", ".", "..") and "\0" not in part
