"""Safetensors files, one or several shards, read where they lie (no JAX, no safetensors)."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from . import _described, _flat, _manifest, _view
from ._chunks import Box
from ._flat import Flat
from ._manifest import Leaf
from ._storage import Folder
from ._view import View
from .errors import Fault, Unsupported

KIND = "safetensors"
SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
METADATA = "__metadata__"
FORMAT = ("format", "pt")  # What the loaders of Hugging Face want to see in the metadata, if there is any.
LARGEST = 100_000_000  # Bytes of a header: the format's own limit. Of an index too.
TOLD = 1000  # Faults of one file after which no more are looked for: a stranger may have made millions.
LENGTH = 8  # Bytes that tell the header's.

# The format's dtypes that NumPy has too. In F4, F6_E2M3 and F6_E3M2 elements share bytes, in an order that it does not
# tell.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
_NUMBERED = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})\.safetensors")


def is_here(place: Folder) -> bool:
    """Whether a file, or what lies directly in a folder, is safetensors; on a file system only.

    A link whose name says so counts: `view` then tells why it is not read.
    """
    if not place.local:
        return False
    if place.is_folder():
        return any(name.endswith((SUFFIX, INDEX)) for name in place.entries())
    if place.name.endswith(SUFFIX):
        return place.exists()
    head = place.parent.read(place.name, 0, LENGTH + 1) or b""
    return head[LENGTH:] == b"{" and int.from_bytes(head[:LENGTH], "little") <= LARGEST


def view(place: Folder) -> View:
    """What a file, or a folder of shards with an index or without, holds.

    Raises:
        CheckpointError: a file is damaged, or shards and index do not agree; tells every fault.
        Unsupported: a dtype that NumPy lacks, or shards that are missing.
    """
    faults: list[Fault] = []
    folder, files, index = place.parent, [place.name], None
    if place.is_folder():
        folder = place
        files, index = _files(place, faults)
    places = {file: _flat.followed(folder, file) for file in files}
    sizes = {file: size for file, (at, name) in places.items() for size in _flat.sizes(at, [name], faults).values()}
    shards: dict[str, _Shard] = {}
    lacking: list[Fault] = []  # Dtypes.
    for file, size in sizes.items():
        prefix = f"{file}: " if len(files) > 1 else ""
        shard = _shard(*places[file], size, prefix=prefix, faults=faults, lacking=lacking)
        if shard is not None:
            shards[file] = shard
    if not faults and not lacking:
        faults += _disagreements(shards, index)
    if faults:
        raise _view.refused(place.url, f"{KIND} checkpoint" if place == folder else f"{KIND} file", faults + lacking)
    if lacking:
        raise Unsupported(f"{place} has arrays of dtypes that cannot be read", lacking)
    arrays = {name: flat for shard in shards.values() for name, flat in shard.arrays.items()}
    shown: dict[str, str] = {}
    for shard in shards.values():
        shown = shard.metadata | shown
    description = index.description if index is not None else shown.get(_described.KEY)
    if description is not None:  # Then a format that the user did not give was added by our writer.
        shown = {key: value for key, value in shown.items() if (key, value) != FORMAT and key != _described.KEY}

    def read(name: str, box: Box) -> np.ndarray:
        return _flat.read(arrays[name], box, name)

    return _described.view(
        KIND,
        place.url,
        {name: _view.array(flat.dtype, flat.shape) for name, flat in arrays.items()},
        read,
        description=description,
        metadata=shown,
        stamp=_flat.stamp(folder, [*sizes, *([index.file] if index is not None else [])]),
    )


# --- one file ---------------------------------------------------------------------------------------------------------

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of a header."""

    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=_manifest.AXES)]
    data_offsets: tuple[_Size, _Size]


class _Shard(NamedTuple):
    arrays: dict[str, Flat]
    metadata: dict[str, str]


def _shard(
    folder: Folder, file: str, size: int, *, prefix: str, faults: list[Fault], lacking: list[Fault]
) -> _Shard | None:
    """What a file holds; None where it is damaged. Faults are told with their places."""
    header = _header(folder, file, size, prefix, faults)
    if header is None:
        return None
    before = len(faults)
    start = LENGTH + len(header)
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        faults.append(Fault(f"{prefix}header", "JSON, an entry for each array", f"{error}"[:200]))
        return None
    metadata: dict[str, str] = {}
    tensors: dict[str, _Tensor] = {}
    for name, raw in entries.items():
        try:
            if name == METADATA:
                metadata = msgspec.json.decode(raw, type=dict[str, str])
            else:
                tensors[name] = msgspec.json.decode(raw, type=_Tensor)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            what = "text for each key" if name == METADATA else "a dtype, a shape, and where the data begin and end"
            faults.append(Fault(f"{prefix}{name:.80}", what, f"{error}"[:200]))
            if len(faults) - before >= TOLD:
                return None
    if len(faults) == before:  # Only now: of JSON that is anything else, Python would build much more than it is long.
        faults += [Fault(f"{prefix}{name:.80}", "an entry once", "again") for name in _repeated(header)]
    arrays = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            lacking.append(Fault(f"{prefix}{name:.80}", "a dtype that NumPy has", f"{tensor.dtype:.80}"))
            continue
        try:
            leaf = _leaf(tensor)
            arrays[name] = Flat(folder, file, start + tensor.data_offsets[0], leaf.dtype, leaf.shape)
        except ValueError as error:
            faults.append(Fault(f"{prefix}{name:.80}", "an array and its bytes", str(error)))
    faults += _gaps(tensors, size - start, prefix)
    return _Shard(arrays, metadata) if len(faults) == before else None


def _leaf(tensor: _Tensor) -> Leaf:
    """The array that an entry tells of; a ValueError where its bytes are not as many."""
    leaf = _view.array(DTYPES[tensor.dtype], tensor.shape)
    begin, end = tensor.data_offsets
    if end - begin != (wanted := _manifest.nbytes(leaf)):
        raise ValueError(f"{end - begin:,} bytes for {leaf}, which is {wanted:,}")
    return leaf


def _header(folder: Folder, file: str, size: int, prefix: str, faults: list[Fault]) -> bytes | None:
    """The bytes of a header, if there is one."""
    length = int.from_bytes(folder.read(file, 0, LENGTH) or b"", "little")
    if size < LENGTH or length > LARGEST:
        told = f"one of {length:,}" if size >= LENGTH else f"a file of {size:,} bytes"
        faults.append(Fault(f"{prefix}header", f"a header of {LARGEST:,} bytes at most, and its length", told))
    elif length > size - LENGTH:
        faults.append(Fault(f"{prefix}header", f"{length:,} bytes", f"a file of {size:,} bytes"))
    else:
        header = folder.read(file, LENGTH, length) or b""
        if len(header) == length and header.startswith(b"{"):
            return header
        faults.append(Fault(f"{prefix}header", "JSON, which begins with {", f"{header[:20]!r}"))
    return None


def _gaps(tensors: Mapping[str, _Tensor], room: int, prefix: str) -> Iterable[Fault]:
    """Where arrays overlap, or leave bytes that are nobody's: in a file that is whole each begins where one ends."""
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = tensor.data_offsets
        if begin > end or begin != at:
            why = "a hole" if at < begin <= end else "what overlaps another" if begin <= end else "an end before it"
            yield Fault(f"{prefix}{name:.80}", f"data that begin at {at:,}", f"{begin:,} to {end:,}: {why}")
        at = max(at, end)
    if at != room:
        yield Fault(f"{prefix}data", f"{at:,} bytes, as the header says", f"{room:,}")


def _repeated(document: bytes | msgspec.Raw) -> list[str]:
    """The keys that stand twice in one object of a JSON document, which parsers pass over."""
    found: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                found.append(key)
            seen.add(key)

    json.loads(bytes(document).decode(), object_pairs_hook=look)
    return found


# --- shards -----------------------------------------------------------------------------------------------------------


class _Index(NamedTuple):
    """Which shard holds each array."""

    file: str
    shards: dict[str, str]
    description: str | None


def _files(place: Folder, faults: list[Fault]) -> tuple[list[str], _Index | None]:
    """The shards in a folder, and the index if there is one."""
    entries = place.entries()
    indices = [name for name in entries if name.endswith(INDEX)]
    if f"model{INDEX}" in indices:
        indices = [f"model{INDEX}"]
    if len(indices) > 1:
        hint = f"give one of the files, or leave one index in the folder: {', '.join(indices)}"
        raise Unsupported(f"{place} holds {len(indices)} checkpoints", hint=hint)
    if indices:
        index = _index(place, indices[0], faults)
        return (sorted(set(index.shards.values())), index) if index is not None else ([], None)
    files = [name for name in entries if name.endswith(SUFFIX)]
    there = Counter((found[1], found[3]) for found in map(_NUMBERED.fullmatch, files) if found)
    for (stem, count), number in there.items():
        if number != int(count):
            faults.append(Fault(f"{stem}-…-of-{count}{SUFFIX}", f"{int(count):,} shards", f"{number:,}"))
    return files, None


def _index(place: Folder, file: str, faults: list[Fault]) -> _Index | None:
    before = len(faults)
    at, name = _flat.followed(place, file)
    size = _flat.sizes(at, [name], faults).get(name)
    if size is None:
        return None
    if size > LARGEST:
        faults.append(Fault(file, f"an index of {LARGEST:,} bytes at most", f"{size:,}"))
        return None
    try:
        found = msgspec.json.decode(at.read(name) or b"", type=dict[str, msgspec.Raw])
        shards = msgspec.json.decode(found["weight_map"], type=dict[str, str])
        metadata = msgspec.json.decode(found.get("metadata", b"{}"), type=dict[str, msgspec.Raw])
        told = metadata.get(_described.KEY)
        description = msgspec.json.decode(told, type=str) if told is not None else None
        faults += [Fault(f"{file}: {name:.80}", "an entry once", "again") for name in _repeated(found["weight_map"])]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError) as error:
        told = "none" if isinstance(error, KeyError) else f"{error}"[:200]
        faults.append(Fault(file, "JSON with a weight_map, the file of each array", told))
        return None
    for name in sorted(set(shards.values())):
        if "/" in name or "\0" in name or not name.endswith(SUFFIX):
            faults.append(Fault(file, f"names of {SUFFIX} files in the same folder", f"{name!r:.80}"))
    return _Index(file, shards, description) if len(faults) == before else None


def _disagreements(shards: Mapping[str, _Shard], index: _Index | None) -> Iterable[Fault]:
    """In what shards differ from their index, or from each other."""
    holders: dict[str, list[str]] = {}
    for file, shard in shards.items():
        for name in shard.arrays:
            holders.setdefault(name, []).append(file)
    for name, files in holders.items():
        if len(files) > 1:
            yield Fault(f"{name:.80}", "in one file", f"in {', '.join(files[:8])}")
        if index is not None and index.shards.get(name) not in files:
            told = f"in {files[0]}, not in the index" if name not in index.shards else f"in {files[0]}"
            yield Fault(f"{name:.80}", f"in {index.shards.get(name, 'none of the files')}", told)
    if index is not None:
        for name, file in index.shards.items():
            if name not in holders:
                yield Fault(f"{name:.80}", f"in {file}, as {index.file} says", "in no file")
