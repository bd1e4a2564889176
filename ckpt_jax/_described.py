"""Named arrays as a view: as our own writers described them, or as the dots in their names say (no JAX)."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from . import _manifest, _structure, _values, _view
from ._chunks import Box
from ._manifest import FORMAT, MAJOR, MINOR, File, Leaf, Manifest
from ._view import View
from .errors import Corrupt, Fault, Unsupported

KEY = "ckpt_jax"  # Under this the description lies among what else a format has room for.
MISFIT = "its description: it does not fit the arrays, which another tool has changed since"


def dumps(view: View) -> str:
    """What a file of arrays cannot say of a view: structure, kinds, values that are no arrays, step, metadata, metrics.

    It is the manifest without what belongs to chunks, and without the seal.

    Raises:
        Unsupported: its metadata or metrics are nothing that JSON can tell.
    """
    try:
        return _dumps(view)
    except (TypeError, ValueError, RecursionError) as error:
        faults = [Fault("metadata, metrics", "plain data", f"{error}"[:200])]
        raise Unsupported(f"{view.path} cannot be described", faults) from error


def _dumps(view: View) -> str:
    manifest = view.manifest()
    manifest.format, manifest.version = FORMAT, (MAJOR, MINOR)
    bare = {"chunk": (), "digests": "", "sharding": None}
    manifest.leaves = {name: msgspec.structs.replace(leaf, **bare) for name, leaf in view.leaves.items()}
    return msgspec.json.encode(manifest).decode()


def view(
    kind: str,
    path: str,
    arrays: Mapping[str, Leaf],
    read: Callable[[str, Box], np.ndarray],
    *,
    description: str | None = None,
    metadata: dict[str, str] | None = None,
    lacks: tuple[str, ...] = (),
    stamp: str = "",
) -> View:
    """A view of arrays that have names.

    With a description that fits them, it is what `dumps` was given. One that contradicts itself is damage. One that
    does not fit was made for other arrays, as another tool leaves it behind: then the arrays count, and `View.lacks`
    says so. Without one, containers are dicts, as the dots in the names say; an array named `<root>` alone is all.

    Args:
        arrays: what was found, by name.
        read: as a view's, by these names.
        description: what `dumps` gave, if it was found.
        metadata: what the format itself has of it, for all to see; who changed it there meant it.

    Raises:
        Corrupt: the description contradicts itself.
        Unsupported: a newer version of ckpt_jax wrote it.
    """
    if description is not None:
        manifest = _loads(description, path)
        if _fits(manifest.leaves, arrays):
            for name, leaf in manifest.leaves.items():
                leaf.chunk, leaf.digests = arrays[name].chunk if leaf.stored else (), ""
            return View(
                kind,
                path,
                manifest.tree,
                manifest.leaves,
                read,
                step=manifest.step,
                metadata=_merged(_values.unpack(manifest.metadata), metadata),
                metrics=_values.unpack(manifest.metrics),
                lacks=("digests", *lacks),
                stamp=stamp,
            )
        lacks = (MISFIT, *lacks)
    paths = {_structure.ROOT: ()} if set(arrays) == {_structure.ROOT} else _view.split(arrays)
    tree, names = _view.nested(dict.fromkeys(paths.values()))
    origin = {at: name for name, at in paths.items()}
    named = {name: origin[at] for name, at in names.items()}
    return View(
        kind,
        path,
        tree,
        {name: arrays[found] for name, found in named.items()},
        lambda name, box: read(named[name], box),
        metadata=metadata or None,
        lacks=("digests", "the kinds of containers and of leaves", *lacks),
        stamp=stamp,
    )


def _fits(leaves: Mapping[str, Leaf], arrays: Mapping[str, Leaf]) -> bool:
    told = {name: (leaf.dtype, leaf.shape) for name, leaf in leaves.items() if leaf.stored}
    return told == {name: (leaf.dtype, leaf.shape) for name, leaf in arrays.items()}


def _merged(described: Any, shown: dict[str, str] | None) -> Any:
    """Metadata as it was described, with what stands in the format's own room for it."""
    if isinstance(described, dict):
        return described | (shown or {})
    return shown or None if described is None else described


# --- trust ------------------------------------------------------------------------------------------------------------


def _loads(text: str, path: str) -> Manifest:
    """A description, as strictly looked at as a manifest: a stranger may have written it."""
    data = text.encode("utf-8", "surrogatepass")
    if (version := _manifest._version(data)) is not None and version[0] > MAJOR:
        raise Unsupported(
            f"{path} is described in format {version[0]}.{version[1]}; this version reads up to {MAJOR}.x",
            hint="pip install --upgrade ckpt_jax",
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        for leaf in manifest.leaves.values():
            # It tells of no chunks. One for each array lets the checks of a manifest see all the rest.
            leaf.chunk, leaf.sharding = tuple(max(1, n) for n in leaf.shape), None
            leaf.digests = "0" * _manifest.DIGEST if leaf.stored and 0 not in leaf.shape else ""
        # Nor of files: whether the bytes are there shows once the leaves are compared with the arrays.
        manifest.files = {"arrays": File(1 << 200)}
        faults = list(_manifest._faults(manifest))
        if not isinstance(_values.unpack(manifest.metrics), dict):
            faults.append(Fault("metrics", "a value for each name", "others"))
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        faults = [Fault(KEY, "a description of the arrays", f"{error}"[:200])]
        raise _damaged(path, faults) from error
    if faults:
        raise _damaged(path, faults)
    return manifest


def _damaged(path: str, faults: list[Fault]) -> Corrupt:
    hint = "get it again from where it came from, or delete what stands there under `ckpt_jax`: the arrays need it not"
    return Corrupt(f"{path} has a description that contradicts itself", faults[:1000], hint=hint)
