"""What torch saved, in files and in folders of `torch.distributed.checkpoint` (no JAX, no torch)."""

from typing import Any

import numpy as np

from . import _chunks, _flat, _manifest, _torch_file, _torch_folder, _view, _zipped
from ._chunks import Box
from ._manifest import Leaf
from ._storage import Folder
from ._structure import UNTOLD
from ._torch_file import Odd, Tensor
from ._torch_folder import Sharded
from ._view import View
from .errors import Fault, Unsupported

KIND = "file of torch.save"
HINT = "save plain tensors and values, as in torch.save(model.state_dict(), path)"
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # The number that torch's files began with until 1.6.


def is_here(place: Folder) -> bool:
    """Whether torch wrote a file, or what lies in a folder."""
    if place.is_folder():
        return _torch_folder.MODULE.encode() in (place.read(_torch_folder.METADATA, 0, 4096) or b"")
    if not place.local or not place.parent.plain([place.name]):
        return False
    part = _zipped.whole(place.parent, place.name)
    head = part.read(0, min(part.size, 256))
    if head.startswith(_LEGACY):
        return True
    try:
        return _zipped.is_here(part) and _torch_file.root(_zipped.members(part)) is not None
    except ValueError:
        return b"/data.pkl" in head  # One that is cut off still begins as torch's do.


def view(place: Folder) -> View:
    """What torch saved: any nesting of dicts, lists and tuples with tensors and plain values in it.

    No code runs that is in the file: what is of other classes is refused. torch names what is in a module with dots,
    so that each dict fits any other container with the same names.

    Raises:
        CheckpointError: it is damaged.
        Unsupported: it holds what is neither a tensor nor a plain value; names all of it.
        OSError: it cannot be read.
    """
    return _folder(place) if place.is_folder() else _file(place.parent, place.name)


def _file(folder: Folder, file: str) -> View:
    path = f"{folder / file}"
    if folder.read(file, 0, len(_LEGACY)) == _LEGACY:
        found = Fault(file, "a zip file, as of torch 1.6 and later", "the format before")
        hint = "torch.save(torch.load(path, weights_only=True), path) with any newer torch makes it one"
        raise Unsupported(f"{path} is too old", [found], hint=hint)
    part = _zipped.whole(folder, file)
    try:
        members = _zipped.members(part)
        if f"{_torch_file.root(members)}constants.pkl" in members:
            raise Unsupported(f"{path} is a program", [Fault(file, "tensors", "TorchScript")], hint=HINT)
        tree, held = _view.contained(_torch_file.load(part), UNTOLD)
    except ValueError as error:
        raise _view.refused(path, KIND, [Fault(file, "what torch.save writes", str(error))]) from error
    _check_plain(path, held)

    def read(name: str, box: Box) -> np.ndarray:
        return _torch_file.read(held[name], box, name)

    leaves = {name: _leaf(each) for name, each in held.items()}
    stamp = _flat.stamp(folder, [file])
    return View(KIND, path, tree, leaves, read, lacks=("digests", "sharding"), stamp=stamp)


def _folder(place: Folder) -> View:
    saved = _torch_folder.Saved(place)
    _check_plain(place.url, {".".join(path): each for path, each in saved.held.items()})
    tree, names = _view.nested(saved.nodes, saved.sequences.__contains__)

    def read(name: str, box: Box) -> np.ndarray:
        each = saved.held[names[name]]
        return saved.read(each, box, name) if isinstance(each, Sharded) else _torch_file.read(each, box, name)

    leaves = {name: _leaf(saved.held[path]) for name, path in names.items()}
    stamp = _flat.stamp(place, {_torch_folder.METADATA, *saved.files})
    lacks = ("digests", "sharding", "empty containers", "which sequences were tuples")
    return View(_torch_folder.KIND, place.url, tree, leaves, read, lacks=lacks, stamp=stamp)


def _check_plain(path: str, held: dict[str, Any]) -> None:
    odd = [Fault(name, "a tensor or a plain value", each.says) for name, each in held.items() if isinstance(each, Odd)]
    if odd:
        raise Unsupported(f"{path} holds what cannot be read in {len(odd)} places", odd, hint=HINT)


def _leaf(value: Any) -> Leaf:
    if isinstance(value, Tensor):
        return _view.array(value.flat.dtype, value.shape)
    if isinstance(value, Sharded):
        chunk = value.chunks[0].shape if value.chunks else value.shape
        size = _manifest.itemsize(value.dtype)
        return _view.array(value.dtype, value.shape, None if 0 in chunk else _chunks.grid(value.shape, chunk, size))
    return _view.scalar(value)
