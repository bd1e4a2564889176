"""Open: look into a checkpoint, and read parts of its arrays, without a device."""

import html
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from . import _chunks, _formats, _from_own, _manifest, _storage, _structure, _units, _values
from ._manifest import Leaf, Manifest
from ._structure import Node
from ._view import View


def open(path: _storage.PathLike) -> "Checkpoint":
    """Opens a checkpoint to look at it; reads its manifest only.

    Args:
        path: a committed checkpoint; or one of Orbax's, of any layout, which is read in place, and has no digests.

    Returns:
        A mapping from every leaf's name to a `LazyArray`.

    Raises:
        NotFound: nothing is committed at `path`.
        Corrupt: the manifest is damaged.

    >>> import numpy as np, ckpt_jax as ck
    >>> _ = ck.save("memory://docs/open", {"params": {"wte": np.arange(12.0).reshape(4, 3)}})
    >>> checkpoint = ck.open("memory://docs/open")
    >>> checkpoint["params.wte"]
    <params.wte: float64[4,3], 96 bytes in 1 chunk>
    >>> checkpoint["params.wte"][1:3, 0]
    array([3., 6.])
    """
    place = _storage.folder(path)
    found = _formats.load(place)
    return Checkpoint(found.manifest, found.view or _from_own.view(place, found.manifest))


class LazyArray:
    """A leaf of a checkpoint that is read when it is indexed, chunk by chunk, each checked.

    Attributes:
        name: the leaf's name.
        kind: `array`, `key`, `scalar` or `live`.
        shape: its global shape; a PRNG key's is that of its uint32 data. `()` for a scalar.
        dtype: NumPy's dtype; for a scalar or live leaf the name of its type.
    """

    def __init__(self, name: str, leaf: Leaf, checkpoint: "Checkpoint"):
        self.name, self.kind = name, leaf.kind
        self.shape = leaf.shape
        self.dtype: Any = np.dtype(leaf.dtype) if leaf.stored else (leaf.dtype or leaf.type)
        self._leaf, self._checkpoint = leaf, checkpoint

    @property
    def nbytes(self) -> int:
        """Uncompressed bytes."""
        return _manifest.nbytes(self._leaf)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def digest(self) -> str:
        """XXH3-128 of its chunks, in hex, one after the other in grid order."""
        return self._leaf.digests

    @property
    def chunk(self) -> tuple[int, ...]:
        """The chunk shape."""
        return self._leaf.chunk

    @property
    def impl(self) -> str:
        """A PRNG key's implementation."""
        return self._leaf.impl

    @property
    def sharding(self) -> dict[str, Any] | None:
        """How it was sharded when it was saved, as plain data."""
        at = self._leaf.sharding
        return None if at is None else self._checkpoint.manifest.shardings[at]

    def __getitem__(self, index: Any) -> Any:
        """The values at a basic index (integers, slices, `...`); a scalar's or live leaf's value.

        Raises:
            Corrupt: a chunk is not what the manifest says.
            OSError: storage did not give what lies there; that is not known to be damage.
        """
        if self._leaf.stored:
            return self._checkpoint._read(self.name, self._leaf, index)
        if index not in ((), Ellipsis):
            raise IndexError(f"{self.name} is a {self.kind} leaf; [()] gives its value")
        value = _values.unpack(self._leaf.value)
        if self.kind == "live":
            return value["global"] if "global" in value else value["processes"]
        return value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = np.asarray(self[...])
        return value if dtype is None else value.astype(dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name} has no length: it has no axes")
        return self.shape[0]

    def __repr__(self) -> str:
        if not self._leaf.stored:
            return f"<{self.name}: {self._leaf}>"
        count = self._leaf.chunks
        return f"<{self.name}: {self._leaf}, {self.nbytes:,} bytes in {_units.several(count, 'chunk')}>"


class Checkpoint(Mapping[str, LazyArray]):
    """A committed checkpoint, opened: a mapping from names to lazily read leaves.

    Attributes:
        path: where it is.
        manifest: all that is known of it.
    """

    def __init__(self, manifest: Manifest, view: View):
        self.path, self.manifest = view.path, manifest
        self._view = view

    @property
    def step(self) -> int | None:
        return self.manifest.step

    @property
    def metadata(self) -> Any:
        """What the user gave to `save`."""
        return _values.unpack(self.manifest.metadata)

    @property
    def tree(self) -> Any:
        """The leaves as nested dicts, lists and tuples."""
        return _structure.build(self.manifest.tree, self.__getitem__)

    def __getitem__(self, name: str) -> LazyArray:
        if name not in self.manifest.leaves:
            near = [n for n in self.manifest.leaves if str(name).rpartition(".")[2] in n][:3]
            raise KeyError(f"no leaf {name!r} in {self.path}" + (f"; there is {', '.join(near)}" if near else ""))
        return LazyArray(name, self.manifest.leaves[name], self)

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.leaves)

    def __len__(self) -> int:
        return len(self.manifest.leaves)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.leaves

    def _read(self, name: str, leaf: Leaf, index: Any) -> Any:
        box, rest = basic_index(index, leaf.shape, name)
        return self._view.read(name, box)[rest]

    def __repr__(self) -> str:
        step = "" if self.step is None else f"step {self.step}, "
        lines = [f"<Checkpoint {self.path}: {step}{len(self):,} leaves, {self.manifest.nbytes:,} bytes>"]
        names = list(self)
        lines += [f"  {name}: {self.manifest.leaves[name]}" for name in names[:20]]
        return "\n".join(lines + ([f"  … and {len(names) - 20:,} more"] if len(names) > 20 else []))

    def _repr_html_(self) -> str:
        return _html(self)


def basic_index(index: Any, shape: tuple[int, ...], name: str) -> tuple[_chunks.Box, tuple[Any, ...]]:
    """The box that a basic index needs, and the index into that box that gives the same values."""
    entries = index if isinstance(index, tuple) else (index,)
    dots = [at for at, entry in enumerate(entries) if entry is Ellipsis]
    if len(dots) > 1:
        raise IndexError(f"{name}: an index has one ellipsis at most")
    if dots:
        (at,) = dots
        fill = len(shape) - (len(entries) - 1)
        entries = entries[:at] + (slice(None),) * fill + entries[at + 1 :]
    if len(entries) > len(shape):
        raise IndexError(f"{name} has {len(shape)} axes, and the index {len(entries)}")
    entries += (slice(None),) * (len(shape) - len(entries))
    box, rest = [], []
    for axis, (entry, n) in enumerate(zip(entries, shape, strict=True)):
        if isinstance(entry, slice):
            picked = range(n)[entry]
            low, high = (min(picked[0], picked[-1]), max(picked[0], picked[-1]) + 1) if picked else (0, 0)
            box.append((low, high))
            rest.append(slice(None, None, picked.step) if picked else slice(0, 0))
        elif hasattr(entry, "__index__") and not isinstance(entry, bool) and not getattr(entry, "ndim", 0):
            at = entry.__index__()
            if not -n <= at < n:
                raise IndexError(f"{name}: index {at} is out of range for axis {axis} of {n}")
            box.append((at % n, at % n + 1))
            rest.append(0)
        else:
            raise IndexError(f"{name}: an index is made of integers, slices and `...`, not {entry!r}")
    return tuple(box), (*rest, ...) if dots else tuple(rest)  # As in NumPy, `...` gives an array, never a scalar.


# --- for notebooks ----------------------------------------------------------------------------------------------------


def _html(checkpoint: Checkpoint) -> str:
    """The tree, collapsible, with shape, dtype and size of every leaf, and the size of every branch."""
    manifest = checkpoint.manifest
    title = "Checkpoint" if manifest.step is None else f"Step {manifest.step}"
    head = (
        f"<b>{title}</b> {html.escape(checkpoint.path)}: {len(checkpoint):,} leaves, {_values.human(manifest.nbytes)}"
    )
    body = _html_node(manifest.tree, "", "tree", manifest.leaves.__getitem__)[0]
    return f'<div style="font-family: monospace; line-height: 1.5">{head}{body}</div>'


def _html_node(node: Node | str, name: str, label: str, leaf: Callable[[str], Leaf]) -> tuple[str, int]:
    if isinstance(node, str):
        found = leaf(name or _structure.ROOT)
        size = _manifest.nbytes(found)
        shown = f" {_values.human(size)}" if found.stored else ""
        return f"<div>{html.escape(label)}: {html.escape(str(found))}{shown}</div>", size
    if not node.children:
        return f"<div>{html.escape(label)}: {html.escape(_structure.says(node))}</div>", 0
    parts, total = [], 0
    for key, child in zip(_structure.keys_of(node), node.children, strict=True):
        text, size = _html_node(child, _structure.join(name, key), str(key), leaf)
        parts.append(text)
        total += size
    kind = html.escape(node.type.rpartition(".")[2] or node.kind)
    summary = f"{html.escape(label)} <i>{kind}</i> of {len(parts):,}, {_values.human(total)}"
    opened = " open" if not name else ""
    return (
        f"<details{opened}><summary>{summary}</summary>"
        f'<div style="margin-left: 1.5em">{"".join(parts)}</div></details>',
        total,
    )
