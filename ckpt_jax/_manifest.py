"""The manifest: what a checkpoint consists of, as typed data that can be written, read and trusted."""

import base64
import functools
import hashlib
import math
import re
import struct
from typing import Any

import msgspec

from . import _chunks
from .errors import Corrupt, Fault, Unsupported

FORMAT = "ckpt_jax"
MAJOR, MINOR = 1, 0
NAME = "MANIFEST.json"
DIGEST = 32  # Hex digits of one XXH3-128.
LEAF = "*"  # Stands for a leaf in the tree.

_SEAL = re.compile(rb',"seal":"([0-9a-f]{64})"\}\n?\Z')
_STATE = re.compile(r"state(\.[0-9a-f]+)?\Z")
_EXACT = 2**53  # JSON readers in other languages hold integers exactly up to here.


class Node(msgspec.Struct, omit_defaults=True, gc=False):
    """A container: a dict, list, tuple or None, or a registered node whose children are `named` or `unnamed`.

    `keys` are a dict's keys or a node's child names, packed. `type` says what class it was;
    nothing is imported to read it. `static` is a digest of an unnamed node's static part.
    """

    kind: str
    children: "list[Node | str]" = []
    keys: list[Any] = []
    type: str = ""
    static: str = ""


class Leaf(msgspec.Struct, omit_defaults=True, gc=False):
    """One leaf.

    Attributes:
        kind: `array`, `key` (PRNG), `scalar` (Python value) or `live` (an object with get_state and set_state).
        dtype: NumPy's name for an array's dtype; a scalar's Python type.
        shape: the global shape; a key's includes the trailing axis of its uint32 data.
        chunk: the chunk shape.
        impl: a key's implementation, such as `threefry2x32`.
        weak: whether JAX regarded the dtype as weak.
        host: `numpy` or `scalar` (a NumPy scalar) where it was not a jax array.
        type: the class that `register_leaf` encoded, or that was live.
        sharding: which entry of the manifest's `shardings` it had.
        value: a scalar's value, packed; of a live leaf `{"processes": [one state each]}` or `{"global": state}`.
        digests: XXH3-128 of each chunk's uncompressed bytes, in hex, in grid order.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    chunk: tuple[int, ...] = ()
    impl: str = ""
    weak: bool = False
    host: str = ""
    type: str = ""
    sharding: int | None = None
    value: Any = None
    digests: str = ""

    @property
    def stored(self) -> bool:
        """Whether it lies in chunks, not in the manifest."""
        return self.kind in ("array", "key")

    @property
    def counts(self) -> tuple[int, ...]:
        return _chunks.counts(self.shape, self.chunk)

    @property
    def chunks(self) -> int:
        return math.prod(self.counts) if self.stored else 0

    def digest(self, position: int) -> str:
        return self.digests[position * DIGEST : (position + 1) * DIGEST]

    def __str__(self) -> str:
        if self.kind == "array":
            return f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.kind == "key":
            return f"key<{self.impl}>[{','.join(map(str, self.shape[:-1]))}]"
        return self.dtype if self.kind == "scalar" else f"live {self.type}"


class File(msgspec.Struct, omit_defaults=True, array_like=True, gc=False):
    """A file's size, and the XXH3-128 of a small one (chunks have digests of their own)."""

    bytes: int
    digest: str = ""


class Manifest(msgspec.Struct, omit_defaults=True):
    """Everything about one checkpoint but the bytes of its arrays.

    Attributes:
        step: the number of completed updates, if it was given or stands in the path.
        time: when it was committed, in seconds since 1970.
        attempt: the nonce of the attempt that wrote it.
        writers: how many processes wrote it.
        state: the folder of the arrays, `state` unless a bucket's checkpoint was overwritten in place.
        tree: the structure; `"*"` stands for a leaf, in the order of `leaves`.
        leaves: name -> `Leaf`, in the order of the tree.
        shardings: how arrays were sharded at save, as plain data (for information; never needed to restore).
        files: path in the folder -> `File`, of everything but the manifest.
        seconds: how long the phases of the save took.
        metrics, metadata: what the user gave, packed.
        seal: SHA-256 of all that stands before it.
    """

    format: str
    version: tuple[int, int]
    step: int | None = None
    time: float = 0.0
    attempt: str = ""
    writers: int = 1
    state: str = "state"
    tree: Node | str = LEAF
    leaves: dict[str, Leaf] = {}
    shardings: list[dict[str, Any]] = []
    files: dict[str, File] = {}
    seconds: dict[str, float] = {}
    metrics: dict[str, Any] = {}
    metadata: Any = None
    seal: str = ""

    @property
    def nbytes(self) -> int:
        """The uncompressed bytes of all arrays."""
        return sum(nbytes(leaf) for leaf in self.leaves.values())

    def __repr__(self) -> str:
        step = "" if self.step is None else f"step {self.step}, "
        return f"<Manifest: {step}{len(self.leaves):,} leaves, {self.nbytes:,} bytes, seal {self.seal[:12]}>"


class Part(msgspec.Struct):
    """What one process contributed: digests by leaf and chunk, its files, and what every process must agree on."""

    process: int
    chunks: dict[str, dict[int, str]]
    files: dict[str, File]
    live: dict[str, Any]  # This process's state of each live leaf.
    shared: dict[str, str]  # Digest of each leaf that every process holds for itself, and must hold alike.
    tree: str  # Digest of the structure and of every leaf's shape and dtype.


@functools.cache
def itemsize(dtype: str) -> int:
    """Bytes of one element as stored: JAX's types of less than a byte take one each."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1  # `bool` is the one without a number.


def nbytes(leaf: Leaf) -> int:
    return itemsize(leaf.dtype) * math.prod(leaf.shape) if leaf.stored else 0


def chunk_bytes(leaf: Leaf) -> int:
    return itemsize(leaf.dtype) * math.prod(leaf.chunk)


def human(size: float) -> str:
    """A size in bytes for people.

    >>> human(1_490_000_000)
    '1.49 GB'
    """
    units = iter(("B", "kB", "MB", "GB", "TB", "PB"))
    while (unit := next(units)) != "PB" and size >= 999.5:
        size /= 1000
    return f"{size:.3g} {unit}" if size < 999.5 else f"{size:,.0f} {unit}"


# --- values in JSON ---------------------------------------------------------------------------------------------------


def pack(value: Any) -> Any:
    """A Python value as JSON that says exactly which value it was.

    Raises:
        TypeError: it holds something that is neither plain data nor an array of numbers.

    >>> pack({"n": 2**70, "x": float("nan"), "b": b"hi"})
    {'n': {'$int': '0x400000000000000000'}, 'x': {'$float': '7ff8000000000000'}, 'b': {'$bytes': 'aGk='}}
    """
    if value is None or isinstance(value, bool):
        return value
    kind = type(value)
    if kind is int:
        return value if abs(value) < _EXACT else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is complex:
        return {"$complex": [pack(value.real), pack(value.imag)]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is str:
        return _pack_str(value)
    if kind is list:
        return [pack(v) for v in value]
    if kind is tuple:
        return {"$tuple": [pack(v) for v in value]}
    if kind is dict:
        if all(type(k) is str and not k.startswith("$") for k in value):
            return {k: pack(v) for k, v in value.items()}
        return {"$dict": [[pack(k), pack(v)] for k, v in value.items()]}
    return _pack_array(value)


def _pack_str(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # Lone surrogates, which no JSON in UTF-8 holds.
        return {"$str": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    return value


def _pack_array(value: Any) -> Any:
    import numpy as np

    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        little = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"))
        raw = base64.b64encode(little.tobytes()).decode()
        return {"$array": [value.dtype.name, list(value.shape), raw], "$scalar": isinstance(value, np.generic)}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not plain data: {value!r:.80}")


def unpack(value: Any) -> Any:
    """The inverse of `pack`.

    Raises:
        ValueError: it is nothing that `pack` writes.
    """
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    if not any(k.startswith("$") for k in value):
        return {k: unpack(v) for k, v in value.items()}
    try:
        (tag, data), *_ = value.items()
        if tag == "$array":
            return _unpack_array(*data, scalar=value["$scalar"])
        return _UNPACK[tag](data)
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise ValueError(f"not a packed value: {value!r:.80}") from error


def _unpack_array(dtype: str, shape: list[int], raw: str, *, scalar: bool) -> Any:
    import numpy as np

    array = np.frombuffer(base64.b64decode(raw), np.dtype(dtype)).reshape(shape).copy()
    return array[()] if scalar else array


_UNPACK = {
    "$int": lambda v: int(v, 16),
    "$float": lambda v: struct.unpack(">d", bytes.fromhex(v))[0],
    "$complex": lambda v: complex(unpack(v[0]), unpack(v[1])),
    "$bytes": base64.b64decode,
    "$str": lambda v: base64.b64decode(v).decode("utf-8", "surrogatepass"),
    "$tuple": lambda v: tuple(unpack(x) for x in v),
    "$dict": lambda v: {unpack(k): unpack(x) for k, x in v},
}


# --- bytes ------------------------------------------------------------------------------------------------------------


def dumps(manifest: Manifest) -> bytes:
    """The manifest's bytes; sets its seal."""
    manifest.seal = ""
    body = msgspec.json.encode(manifest).removesuffix(b"}")
    manifest.seal = hashlib.sha256(body).hexdigest()
    return body + f',"seal":"{manifest.seal}"}}\n'.encode()


def loads(data: bytes, place: str) -> Manifest:
    """A manifest from its bytes, checked so far that all else may rely on it.

    Raises:
        Corrupt: it is not whole, or says something that cannot be.
        Unsupported: a newer version of ckpt_jax wrote it.
    """
    version = _version(data)
    if version is not None and version[0] > MAJOR:
        raise Unsupported(
            f"{place} is written in format {version[0]}.{version[1]}; this version reads up to {MAJOR}.x",
            hint="pip install --upgrade ckpt_jax",
        )
    end = _SEAL.search(data)
    if end is None:
        raise _corrupt(place, "a manifest that ends in its seal", f"{len(data):,} bytes that do not")
    if hashlib.sha256(data[: end.start()]).hexdigest() != end[1].decode():
        raise _corrupt(place, f"contents with the seal {end[1].decode()[:12]}…", "other contents")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        faults = list(_faults(manifest))
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise _corrupt(place, "a manifest", str(error)) from error
    if faults:
        raise Corrupt(f"{place} contradicts itself", faults[:1000], hint="it was not written by ckpt_jax.save")
    return manifest


def _corrupt(place: str, expected: str, found: str) -> Corrupt:
    return Corrupt(
        f"{place} is damaged",
        [Fault(NAME, expected, found)],
        hint="restore an older step: `ckpt-jax ls` on the folder above lists them",
    )


def _version(data: bytes) -> tuple[int, int] | None:
    """The format's version, which every version keeps at the very beginning."""
    found = re.match(rb'\{"format":"ckpt_jax","version":\[(\d{1,9}),(\d{1,9})\]', data)
    return found and (int(found[1]), int(found[2]))  # pyright: ignore[reportReturnType]


def _faults(manifest: Manifest):
    """Everything in which a manifest contradicts itself: a stranger may have written it."""
    if manifest.format != FORMAT:
        yield Fault("format", FORMAT, repr(manifest.format))
    if not _STATE.match(manifest.state):
        yield Fault("state", "state or state.<nonce>", repr(manifest.state))
    for path in manifest.files:
        if not _inside(path):
            yield Fault(f"files: {path!r:.80}", "a path inside the folder", "one that leaves it")
    held = sum(max(0, file.bytes) for file in manifest.files.values())
    told = 0
    for name, leaf in manifest.leaves.items():
        if leaf.kind not in ("array", "key", "scalar", "live"):
            yield Fault(name, "array, key, scalar or live", repr(leaf.kind))
        if not leaf.stored:
            continue
        if len(leaf.chunk) != len(leaf.shape) or min(leaf.shape, default=0) < 0 or min(leaf.chunk, default=1) < 1:
            yield Fault(name, "a chunk shape that fits the shape", f"chunk {leaf.chunk}, shape {leaf.shape}")
        elif len(leaf.digests) != DIGEST * (chunks := leaf.chunks):
            yield Fault(name, f"{chunks} digests", f"{len(leaf.digests) / DIGEST:g}")
        else:
            told += chunks * chunk_bytes(leaf)
        if leaf.kind == "key" and not leaf.shape:
            yield Fault(name, "key data with a trailing axis", "a 0-d array")
    if told > held:
        yield Fault("leaves", f"at most the {held:,} bytes that the files hold", f"{told:,}")
    if (leaves := sum(1 for _ in _walk(manifest.tree))) != len(manifest.leaves):
        yield Fault("tree", f"{len(manifest.leaves)} leaves", str(leaves))


def _inside(path: str) -> bool:
    parts = path.split("/")
    return "\\" not in path and "\0" not in path and all(part not in ("", ".", "..") for part in parts)


def _walk(tree: Node | str):
    """The leaves of a structure, and a check on its nodes."""
    if isinstance(tree, str):
        if tree != LEAF:
            raise ValueError(f"{tree!r:.20} is no node of a tree")
        yield tree
        return
    if tree.kind not in ("dict", "list", "tuple", "none", "named", "unnamed"):
        raise ValueError(f"{tree.kind!r:.20} is no kind of node")
    if tree.kind in ("dict", "named") and len(tree.keys) != len(tree.children):
        raise ValueError(f"a {tree.kind} with {len(tree.keys)} keys and {len(tree.children)} children")
    for child in tree.children:
        yield from _walk(child)


# --- parts ------------------------------------------------------------------------------------------------------------


def merge(leaves: dict[str, Leaf], parts: list[Part], place: str) -> None:
    """Puts every process's digests and live states into `leaves`.

    Raises:
        Corrupt: a chunk was written by no process, or by two.
        Unsupported: processes hold different trees, or different values where they must be alike.
    """
    faults = []
    for part in parts[1:]:
        if part.tree != parts[0].tree:
            faults.append(Fault(f"process {part.process}", "the same tree as process 0", "another structure or shapes"))
        for name, digest in part.shared.items():
            if parts[0].shared.get(name) != digest:
                faults.append(Fault(name, "the same value in every process", f"another in process {part.process}"))
    if faults:
        raise Unsupported(
            f"{place}: the processes do not hold the same state",
            faults,
            hint="host values and fully addressable arrays must be equal everywhere; make the others global arrays",
        )
    for name, leaf in leaves.items():
        if leaf.kind == "live":
            if "global" not in leaf.value:
                leaf.value = {"processes": [part.live[name] for part in parts]}
            continue
        if not leaf.stored:
            continue
        found: list[str] = [""] * leaf.chunks
        for part in parts:
            for at, digest in part.chunks.get(name, {}).items():
                if found[at]:
                    faults.append(Fault(name, f"chunk {at} once", f"again by process {part.process}"))
                found[at] = digest
        if missing := found.count(""):
            faults.append(Fault(name, f"{leaf.chunks} chunks", f"{missing} that no process wrote"))
        leaf.digests = "".join(found)
    if faults:
        raise Corrupt(f"{place}: the processes did not write every chunk once; nothing was committed", faults)
