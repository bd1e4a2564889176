"""The manifest: what a checkpoint consists of, as typed data that can be written, read and trusted."""

import hashlib
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from . import _chunks, _structure, _values
from ._structure import LEAF, Node
from .errors import Corrupt, Fault, Unsupported

FORMAT = "ckpt_jax"
MAJOR, MINOR = 1, 0
NAME = "MANIFEST.json"
DIGEST = 32  # Hex digits of one XXH3-128.
AXES = 64  # Of an array; NumPy has no more.
LARGEST = 1 << 30  # Bytes of a manifest: the digests of 33 million chunks, half a petabyte at 16 MiB each.

_SEAL = re.compile(rb',"seal":"([0-9a-f]{64})"\}\n?\Z')
_STATE = re.compile(r"state(\.[0-9a-f]+)?\Z")


# Every dtype that can be saved, and its bytes.
ITEMSIZE = {
    **dict.fromkeys(("bool", "int1", "uint1", "int2", "uint2", "int4", "uint4", "int8", "uint8", "float4_e2m1fn"), 1),
    **dict.fromkeys(("float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3fn"), 1),
    **dict.fromkeys(("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
SCALARS = ("int", "float", "bool", "str", "bytes", "complex", "str_", "bytes_")


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


class Health(msgspec.Struct, array_like=True, gc=False):
    """How the values of a leaf of floats were: its Euclidean norm over the finite ones, and how many were not."""

    norm: float = 0.0
    nonfinite: int = 0


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
        milestone: whether it was saved to stay for ever.
        health: name -> `Health` of each leaf of floats, where it was looked at.
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
    milestone: bool = False
    health: dict[str, Health] = {}
    metadata: Any = None
    seal: str = ""

    @property
    def nbytes(self) -> int:
        """The uncompressed bytes of all arrays."""
        return sum(nbytes(leaf) for leaf in self.leaves.values())

    @property
    def state_files(self) -> dict[str, int]:
        """The files of the arrays, by their names in `state`, and their sizes."""
        inside = f"{self.state}/"
        return {path.removeprefix(inside): file.bytes for path, file in self.files.items() if path.startswith(inside)}

    def __repr__(self) -> str:
        step = "" if self.step is None else f"step {self.step}, "
        return f"<Manifest: {step}{len(self.leaves):,} leaves, {self.nbytes:,} bytes, seal {self.seal[:12]}>"


class Part(msgspec.Struct):
    """What one process contributed: digests by leaf and chunk, and what every process must agree on."""

    process: int
    chunks: dict[str, dict[int, str]]
    live: dict[str, Any]  # This process's state of each live leaf.
    shared: dict[str, str]  # Digest of each leaf that every process holds for itself, and must hold alike.
    tree: str  # Digest of the structure and of every leaf's shape and dtype.
    health: dict[str, tuple[float, int]] = {}  # Sum of squares and count of NaN and infinity, of this process's chunks.
    files: dict[str, int] = {}  # The data files that it wrote, in its own folder, and their sizes.


def itemsize(dtype: str) -> int:
    """Bytes of one element as stored: JAX's types of less than a byte take one each."""
    return ITEMSIZE[dtype]


def nbytes(leaf: Leaf) -> int:
    return itemsize(leaf.dtype) * math.prod(leaf.shape) if leaf.stored else 0


def chunk_bytes(leaf: Leaf) -> int:
    return itemsize(leaf.dtype) * math.prod(leaf.chunk)


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
    if (version := _version(data)) is not None and version[0] > MAJOR:
        raise Unsupported(
            f"{place} is written in format {version[0]}.{version[1]}; this version reads up to {MAJOR}.x",
            hint="pip install --upgrade ckpt_jax",
        )
    if len(data) > LARGEST:
        raise too_large(place)
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


def too_large(place: str) -> Corrupt:
    """What to say of a manifest that nobody can have written."""
    return _corrupt(place, f"a manifest of {LARGEST:,} bytes at most", "a larger file")


def _version(data: bytes) -> tuple[int, int] | None:
    """The format's version: at the very beginning, as we write it, or wherever another writer has put it."""
    if found := re.match(rb'\{"format":"ckpt_jax","version":\[(\d{1,99}),(\d{1,99})\]', data):
        return int(found[1]), int(found[2])
    try:
        document = msgspec.json.decode(data)
        major, minor = document["version"]
        if document["format"] == FORMAT and type(major) is int and type(minor) is int:
            return major, minor
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, KeyError, IndexError):
        pass  # Then it is no manifest, and `loads` says so.
    return None


def _faults(manifest: Manifest) -> Iterator[Fault]:
    """Everything in which a manifest contradicts itself: a stranger may have written it."""
    if manifest.format != FORMAT or manifest.version[0] < 1 or manifest.version[1] < 0:
        yield Fault("format", f"{FORMAT} from 1.0", f"{manifest.format!r:.80} {manifest.version}")
    if not _STATE.match(manifest.state):
        yield Fault("state", "state or state.<nonce>", f"{manifest.state!r:.80}")
    if manifest.step is not None and not 0 <= manifest.step < 10**18:
        yield Fault("step", "a number of updates", str(manifest.step))
    for path, file in manifest.files.items():
        if not _inside(path) or file.bytes < 0:
            yield Fault(f"files: {path!r:.80}", "a path inside the folder, and its size", "another")
    yield from _leaf_faults(manifest)
    for value in (manifest.metadata, manifest.metrics):
        _values.unpack(value)
    # One by one: a tree whose names have a long beginning in common takes much less room in JSON than those names do.
    for inside, name in itertools.zip_longest(_structure.names(manifest.tree), manifest.leaves):
        if inside != name:
            yield Fault("tree", f"the names of the {len(manifest.leaves)} leaves", f"{inside!r:.80}, not {name!r:.80}")
            break


def _leaf_faults(manifest: Manifest) -> Iterator[Fault]:
    held = sum(max(0, file.bytes) for file in manifest.files.values())
    told = 0
    for name, leaf in manifest.leaves.items():
        if leaf.sharding is not None and not 0 <= leaf.sharding < len(manifest.shardings):
            yield Fault(name, "one of the shardings", str(leaf.sharding))
        if not leaf.stored:
            yield from _value_faults(name, leaf)
        elif leaf.dtype not in ITEMSIZE or (leaf.kind == "key" and leaf.dtype != "uint32"):
            yield Fault(name, "a dtype of numbers", f"{leaf.dtype!r:.80}")
        elif len(leaf.chunk) != len(leaf.shape) or min(leaf.shape, default=0) < 0 or min(leaf.chunk, default=1) < 1:
            yield Fault(name, "a chunk shape that fits the shape", f"chunk {leaf.chunk}, shape {leaf.shape}")
        elif len(leaf.shape) > AXES or math.prod(max(1, n) for n in leaf.shape) >= 2**59:
            yield Fault(name, "a shape that an array can have", f"{len(leaf.shape)} axes, {max(leaf.shape):,} at most")
        elif len(leaf.digests) != DIGEST * (chunks := leaf.chunks):
            yield Fault(name, f"{chunks} digests", f"{len(leaf.digests) / DIGEST:g}")
        elif leaf.kind == "key" and not leaf.shape:
            yield Fault(name, "key data with a trailing axis", "a 0-d array")
        else:
            told += chunks * chunk_bytes(leaf)
    if told > held:
        yield Fault("leaves", f"at most the {held:,} bytes that the files hold", f"{told:,}")


def _value_faults(name: str, leaf: Leaf) -> Iterator[Fault]:
    if leaf.kind not in ("scalar", "live"):
        yield Fault(name, "array, key, scalar or live", f"{leaf.kind!r:.80}")
        return
    try:
        if leaf.kind == "scalar":
            scalar(leaf)
        else:
            states(leaf)
    except ValueError as error:
        yield Fault(name, f"the value of a {leaf.kind} {leaf.dtype}", str(error))


def scalar(leaf: Leaf) -> Any:
    """A scalar leaf's Python value (of NumPy's text types, the text).

    Raises:
        ValueError: the record holds no such value.
    """
    value = _values.unpack(leaf.value)
    if leaf.dtype == "float" and type(value) is int:  # A writer in another language may have dropped the point.
        return float(value)
    if leaf.dtype not in SCALARS or type(value).__name__ != leaf.dtype.rstrip("_"):
        raise ValueError(f"a {type(value).__name__}")
    return value


def states(leaf: Leaf) -> list[Any] | None:
    """The states of a live leaf in each process, or None if it has a global one.

    Raises:
        ValueError: the record holds neither.
    """
    value = leaf.value
    if _values.too_deep(value):
        raise ValueError("one nested too deep")
    if not isinstance(value, dict) or len(value) != 1 or not ("global" in value or value.get("processes")):
        raise ValueError(f"{value!r:.80}")
    if "global" in value:
        _values.unpack(value["global"])
        return None
    if type(value["processes"]) is not list:
        raise ValueError(f"{value!r:.80}")
    return [_values.unpack(state) for state in value["processes"]]


def _inside(path: str) -> bool:
    parts = path.split("/")
    return "\\" not in path and "\0" not in path and all(part not in ("", ".", "..") for part in parts)


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
            if any(name in part.live for part in parts):
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
        raise Corrupt(
            f"{place}: the processes did not write every chunk once; nothing was committed",
            faults,
            hint="all processes must save the same tree at the same time, each step in a folder of its own",
        )
