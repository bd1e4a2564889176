"""A view's arrays as safetensors, one file or shards with an index, as Hugging Face lays them down (no JAX)."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from . import _described, _in_a_row, _manifest
from ._from_safetensors import DTYPES, FORMAT, INDEX, LARGEST, LENGTH, METADATA, SUFFIX
from ._in_a_row import Segment, Told, Written, quiet
from ._storage import Folder
from ._view import View
from .errors import Fault, Unsupported

SHARD_BYTES = 5_000_000_000  # As Hugging Face's own tools cut.
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write(view: View, dst: Folder, *, shard_bytes: int = SHARD_BYTES, told: Told = quiet) -> Written:
    """Writes the arrays of a view, under the names of its leaves.

    PRNG keys go out as their uint32 data. What safetensors cannot say (structure, kinds of leaves, scalars, live
    states, step, metrics, metadata that is not text) lies beside them as text, for ckpt_jax to read again.

    Args:
        dst: the file, if it ends in `.safetensors`; else a folder, of one file or of shards and their index.
        shard_bytes: how much of arrays a shard holds, unless one alone is larger.
        told: called with the bytes done, and of how many.

    Raises:
        Unsupported: dtypes that safetensors lacks, or more names than a header holds; nothing was written.
        Exists: something is at `dst`.
        Corrupt: the source is damaged, or the disk does not give back what was written.
        OSError: as storage says; what was written so far is gone on with the next time.
    """
    _in_a_row.check(dst)
    names = [name for name, leaf in view.leaves.items() if leaf.stored]
    _check(view, names)
    described = _described.dumps(view)
    shown = _shown(view)
    alone = dst.name.endswith(SUFFIX)
    shards = [names] if alone else _cut(view, names, shard_bytes)
    if len(shards) == 1:
        file = dst.name if alone else f"model{SUFFIX}"
        contents = {file: list(_segments(view, names, {**shown, _described.KEY: described}))}
    else:
        files = [f"model-{at:05}-of-{len(shards):05}{SUFFIX}" for at in range(1, len(shards) + 1)]
        contents = {file: list(_segments(view, shard, shown)) for file, shard in zip(files, shards, strict=True)} | {
            f"model{INDEX}": [_index(view, dict(zip(files, shards, strict=True)), described)]
        }
    if alone:
        size = _in_a_row.file(dst, contents[dst.name], told)
    else:
        size = _in_a_row.files(dst, contents, (SUFFIX, INDEX), told)
    paths = (dst.url,) if alone else tuple(f"{dst / file}" for file in contents)
    only = tuple(name for name, leaf in view.leaves.items() if not leaf.stored)
    return Written(dst.url, paths, size, len(names), only)


def _check(view: View, names: list[str]) -> None:
    lacking = [
        Fault(name, "a dtype that safetensors has", view.leaves[name].dtype)
        for name in names
        if view.leaves[name].dtype not in _NAMES
    ]
    if METADATA in names:
        lacking.append(Fault(METADATA, "another name", "the one that safetensors keeps for itself"))
    if lacking:
        hint = "cast them by a rule, or leave them out with --only"
        raise Unsupported(f"{len(lacking)} of {len(names)} arrays do not fit in safetensors", lacking, hint)


def _shown(view: View) -> dict[str, str]:
    """The metadata that other tools see: what is text, and the format that loaders of Hugging Face ask for."""
    found = view.metadata if isinstance(view.metadata, dict) else {}
    shown = {key: value for key, value in found.items() if _is_text(key) and _is_text(value) and key != _described.KEY}
    return dict([FORMAT]) | shown


def _is_text(value: object) -> bool:
    """Whether it is text that JSON in UTF-8 holds as it is."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _cut(view: View, names: list[str], shard_bytes: int) -> list[list[str]]:
    """The names in each shard, in order."""
    shards: list[list[str]] = [[]]
    used = 0
    for name in names:
        size = _manifest.nbytes(view.leaves[name])
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _segments(view: View, names: list[str], metadata: dict[str, str]) -> Iterator[Segment]:
    """A file: its header, and its arrays.

    Raises:
        Unsupported: it would have a longer header than the format allows.
    """
    # The widest first, so that each begins where its dtype must in memory: PyTorch refuses any other.
    laid = sorted(names, key=lambda name: -_manifest.itemsize(view.leaves[name].dtype))
    entries: dict[str, Any] = {METADATA: metadata, **dict.fromkeys(names)}  # In the order of the tree.
    at = 0
    for name in laid:
        leaf = view.leaves[name]
        end = at + _manifest.nbytes(leaf)
        entries[name] = {"dtype": _NAMES[leaf.dtype], "shape": leaf.shape, "data_offsets": (at, end)}
        at = end
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    if len(header) > LARGEST:
        fault = Fault("header", f"{LARGEST:,} bytes at most", f"{len(header):,}")
        raise Unsupported("there are more names than a safetensors file can have", [fault], "write smaller shards")
    yield Segment("header", LENGTH + len(header), lambda: [len(header).to_bytes(LENGTH, "little"), header])
    for name in laid:
        yield _in_a_row.array(view, name)


def _index(view: View, shards: dict[str, list[str]], described: str) -> Segment:
    """The file that says which shard holds each array."""
    document = {
        "metadata": {"total_size": view.nbytes, _described.KEY: described},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }
    data = (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
    if len(data) > LARGEST:
        fault = Fault(f"model{INDEX}", f"{LARGEST:,} bytes at most", f"{len(data):,}")
        raise Unsupported("there are more names than an index can have", [fault])
    return Segment(f"model{INDEX}", len(data), lambda: [data])
