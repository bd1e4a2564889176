"""Checkpoints as a stranger might write them, and what looking at one may do."""

import contextlib
import hashlib
import io
import json
import os
import re
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import xxhash

import ckpt_jax as ck
from ckpt_jax import _ocdbt, _ocdbt_writer, _storage, cli
from ckpt_jax._ocdbt import Value

from ..bounded import bounded
from .outside import Outside

MANIFEST, KEYS, TREE, DATA = "MANIFEST.json", "state/manifest.ocdbt", "state/d/tree", "state/ocdbt.process_0/d/data"
SECONDS = 10  # None of the looks takes a tenth of one; a hang is interrupted.
MEMORY = 1 << 30  # Beyond what the process has: the threads of TensorStore and XLA alone reserve some 100 MB.
FILLED = 256 << 20  # Beyond the most that it held before: files of some kilobytes fill no such room.

Make = Callable[[Path], Any]
Damage = Mapping[
    str, bytes | Make | None
]  # By path in the checkpoint: other bytes, what makes another thing, or nothing.


class Broken(AssertionError):
    """Looking at a checkpoint did what it may not do."""


# --- a world with a checkpoint ----------------------------------------------------------------------------------------


def state() -> dict[str, Any]:
    """Several kinds of leaves and containers; `big` is in two chunks of a data file, the others lie in the tree."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    halves = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return {
        "a": {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "h": jnp.ones(3, jnp.bfloat16)},
        "big": jax.device_put(np.arange(600, dtype=np.float32), halves),
        "key": jax.random.key(3),
        "list": [1, 2.5, "text", None, {}, (), 2**70],
        "rng": np.random.default_rng(5),
    }


@dataclass
class World:
    """A root with a checkpoint to damage (100) and a whole one (50), and beside it what nobody may open.

    Attributes:
        root, step: the root, and the checkpoint in it that is damaged.
        outside: a whole checkpoint too, so that what a link or a path leads to there would be taken for good.
        whole: the files of the checkpoint as they are when nothing is wrong.
        keys: its keys, with the places of their values.
        values: what they hold.
    """

    root: Path
    step: Path
    outside: Path
    whole: dict[str, bytes]
    keys: dict[bytes, Value]
    values: Any
    like: Any
    watch: Outside

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.whole[MANIFEST])


def make(top: Path) -> World:
    """A world below a folder. The files have the same names each time, so that an input means the same each time."""
    root = top / "root"
    step, outside = root / "100", top / "outside"
    ck.save(step, state(), metadata={"note": (1, b"hi")})
    place = _storage.folder(step / "state")
    tree = _ocdbt.Tree(place, place.files())
    keys = {key.encode(): value for key, _ in tree.files() if (value := tree.find(key)) is not None}
    (data,) = (step / "state/ocdbt.process_0/d").iterdir()
    (node,) = (step / "state/d").iterdir()
    data.rename(step / DATA)
    node.unlink()
    keys = {k: v if v.data else Value(DATA.removeprefix("state/"), v.offset, v.length) for k, v in sorted(keys.items())}
    _ocdbt_writer.write_tree(place, "d/tree", keys, 1000, 8 << 20)
    files = {str(path.relative_to(step)): path.read_bytes() for path in sorted(step.rglob("*")) if path.is_file()}
    document = json.loads(files.pop(MANIFEST)) | {"time": 1.7e9, "attempt": "00ff00ff00ff00ff", "seconds": {}}
    document["files"] = {}
    files[MANIFEST] = sealed(accounted(document, files))
    (step / MANIFEST).write_bytes(files[MANIFEST])
    shutil.copytree(step, outside)
    shutil.copytree(step, root / "50")
    (root / "50" / MANIFEST).write_bytes(sealed(accounted(document | {"step": 50}, {})))
    values = told(ck.restore(step))
    assert told(ck.restore(step, state())) == told(state())
    assert ck.verify(step).ok
    return World(root, step, outside, files, keys, values, state(), Outside(root, top, outside))


def sealed(body: bytes | dict[str, Any]) -> bytes:
    """A manifest with a seal that holds, whatever stands in it."""
    if isinstance(body, dict):
        body = msgspec.json.encode({key: value for key, value in body.items() if key != "seal"})
    body = re.sub(rb',"seal":"[0-9a-f]{64}"\}\n?\Z', b"}", body).rstrip(b"\n").removesuffix(b"}")
    return body + f',"seal":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def accounted(document: dict[str, Any], files: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest that tells files' sizes and digests as they are now."""
    for path, data in files.items():
        if path != MANIFEST and isinstance(data, bytes):
            digest = "" if "/d/" in path else xxhash.xxh3_128_hexdigest(data)
            document["files"][path] = [len(data), digest]
    return document


def told(value: Any) -> Any:
    """What can be compared: types, dtypes and all bits."""
    if isinstance(value, dict):
        return {key: told(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(told, value)]
    if isinstance(value, np.random.Generator):
        return told(value.bit_generator.state)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return str(value.dtype), told(np.asarray(jax.random.key_data(value)))
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        found = np.asarray(value)
        return str(found.dtype), found.shape, found.tobytes()
    return type(value).__name__, repr(value)


@contextlib.contextmanager
def damaged(world: World, damage: Damage) -> Iterator[None]:
    """The checkpoint with the damage done; whole again afterwards."""
    upward = sorted(damage, key=lambda path: -path.count("/"))
    try:
        for path in upward:  # What is in a folder, before that is a link to what must stay as it is.
            change = damage[path]
            _remove(world.step / path)
            if isinstance(change, bytes):
                (world.step / path).write_bytes(change)
            elif change is not None:
                change(world.step / path)
        yield
    finally:
        for path in reversed(upward):
            _remove(world.step / path)
        for path, data in world.whole.items():
            if not os.path.lexists(world.step / path):
                (world.step / path).parent.mkdir(parents=True, exist_ok=True)
                (world.step / path).write_bytes(data)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


# --- what looking may do ----------------------------------------------------------------------------------------------


def _values(step: Path) -> dict[str, Any]:
    """Every leaf's value, of the shape and with the digest that the manifest tells."""
    checkpoint = ck.open(step)
    repr(checkpoint), checkpoint._repr_html_(), checkpoint.tree, checkpoint.metadata
    found: dict[str, Any] = {}
    for name, lazy in checkpoint.items():
        repr(lazy), lazy.sharding
        found[name] = value = lazy[...]
        leaf = checkpoint.manifest.leaves[name]
        if leaf.stored and (value.shape, value.dtype.name) != (leaf.shape, leaf.dtype):
            raise Broken(f"{name}: {value.dtype.name}{value.shape} in place of {leaf}")
        if leaf.stored and leaf.chunk == leaf.shape and xxhash.xxh3_128_hexdigest(value.tobytes()) != leaf.digests:
            raise Broken(f"{name}: values of another digest than the manifest's")
    return found


def _shown(world: World) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        cli.show(str(world.step))
        cli.show(str(world.step), as_json=True)
        cli._row(_storage.folder(world.step))


LOOKS: dict[str, Callable[[World], Any]] = {
    "open": lambda world: _values(world.step),
    "restore": lambda world: told(ck.restore(world.step)),
    "restore like": lambda world: told(ck.restore(world.step, world.like)),
    "restore loosely": lambda world: ck.restore(world.step, {"a": 1, "big": 0.0}, on_missing="keep", on_extra="ignore"),
    "verify files": lambda world: str(ck.verify(world.step, level="files")),
    "verify chunks": lambda world: ck.verify(world.step),
    "steps": lambda world: ck.steps(world.root),
    "latest": lambda world: ck.latest(world.root),
    "diff": lambda world: str(ck.diff(world.step, world.root / "50")),
    "diff backwards": lambda world: str(ck.diff(world.root / "50", world.step)),
    "show": _shown,
}


def attack(world: World, damage: Damage) -> str:
    """Looks at a damaged checkpoint in every way, and says what came of it in all.

    Raises:
        Broken: it was another error than a CheckpointError, a wrong value, too long or too much, or a file elsewhere.
    """
    broken: list[str] = []
    came: dict[str, Any] = {}
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with damaged(world, damage), world.watch as opened, bounded(SECONDS, MEMORY), warnings.catch_warnings():
        warnings.simplefilter("error")
        for what, look in LOOKS.items():
            try:
                came[what] = look(world)
            except ck.CheckpointError as error:
                if not 0 < len(str(error)) < 200_000:
                    broken.append(f"{what}: an error of {len(str(error))} characters")
            except BaseException as error:  # noqa: BLE001  SystemError and MemoryError too.
                broken.append(f"{what}: {type(error).__name__}: {error!s:.300}")
    same = _tells_the_same(world, damage.get(MANIFEST, b""))
    broken += [f"opened {path}" for path in opened]
    if (more := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) << 10 > FILLED:
        broken.append(f"{more / 1024:.0f} MB more than before")
    broken += _wrong(world, came, same=same)
    if broken:
        raise Broken("\n".join(broken))
    if not {"open", "restore", "restore like"} <= came.keys():
        return "CheckpointError"
    return "values equal" if same else "as its manifest says"


def _tells_the_same(world: World, manifest: Any) -> bool:
    """Whether the manifest tells of the same leaves as when it was whole: then no other values are right."""
    try:
        found, good = json.loads(manifest or world.whole[MANIFEST]), world.document
    except (ValueError, RecursionError, TypeError):
        return True
    return isinstance(found, dict) and all(found.get(part) == good[part] for part in ("leaves", "tree"))


def _wrong(world: World, came: dict[str, Any], *, same: bool) -> Iterator[str]:
    """What was found out about the checkpoint that is not so."""
    if same and "restore" in came and came["restore"] != world.values:
        yield "restore: wrong values"
    if same and "restore like" in came and came["restore like"] != told(state()):
        yield "restore like: wrong values"
    if came.get("verify chunks") and came["verify chunks"].ok and "open" not in came:
        yield "verify: found nothing wrong, and it cannot be read"
    if 50 not in came.get("steps", [50]) or came.get("latest", "") is None:
        yield "the whole checkpoint beside it is not seen"
