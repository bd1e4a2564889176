"""Everything that can befall the bytes of a small checkpoint with every kind of leaf, and what is to come of it."""

import functools
import itertools
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_jax as ck
from ckpt_jax import _ocdbt, _reading, _storage

MANIFEST = "MANIFEST.json"
SMALL = 4096  # Files up to this size are tried bit by bit if all is to be tried.

# --- the world: two steps of one tree, with every kind of leaf --------------------------------------------------------


def make_tree(seed: int) -> dict[str, Any]:
    """Every kind of leaf; arrays in chunks that lie in data files, and in such as are small enough to be inlined."""
    rng = np.random.default_rng(seed)
    mesh = jax.make_mesh((4, 2), ("a", "b"))

    def on(values: Any, *spec: Any) -> jax.Array:
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))

    return {
        "w": on(rng.standard_normal((32, 128), np.float32), "a", "b"),
        "small": on(rng.standard_normal(16, np.float32), ("a", "b")),
        "bf16": on(jnp.asarray(rng.standard_normal((16, 512)), jnp.bfloat16), ("b", "a")),
        "copied": on(rng.standard_normal((3, 5), np.float32)),
        "host": {
            "ints": rng.integers(0, 2**60, (31, 20)),
            "flags": rng.random(40) < 0.5,
            "one": np.float32(rng.random()),
        },
        "empty": {"array": np.zeros((0, 3), np.int8), "dict": {}, "list": [], "tuple": (), "none": None},
        "keys": [jax.random.key(seed), on(jax.random.split(jax.random.key(seed + 1), 8), ("a", "b"))],
        "weak": jnp.asarray(float(seed)) * 1.5,
        "scalars": (
            seed,
            2**70 + seed,
            seed + 0.1,
            complex(seed, 0.1),
            seed % 2 == 0,
            f"run {seed} €",
            seed.to_bytes(3),
        ),
        "rng": np.random.default_rng(seed),
    }


def fingerprint(tree: Any) -> list[Any]:
    """All that a tree is: two are the same, bit for bit, exactly where these are equal."""
    leaves, treedef = jax.tree.flatten(tree)
    return [treedef, *map(bits, leaves)]


def bits(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return str(leaf.dtype), bits(jax.random.key_data(leaf))
        return leaf.dtype, leaf.shape, leaf.sharding, leaf.weak_type, leaf.committed, np.asarray(leaf).tobytes()
    if isinstance(leaf, (np.ndarray, np.generic)):
        return type(leaf), leaf.dtype, leaf.shape, leaf.tobytes()
    if isinstance(leaf, np.random.Generator):
        return repr(leaf.bit_generator.state)
    return type(leaf), repr(leaf)


@dataclass
class World:
    """Two steps, and what is known about the newer one while it was whole."""

    root: Path
    trees: dict[int, Any] = field(default_factory=dict)
    like: Any = None
    expected: dict[str, list[Any]] = field(default_factory=dict)
    manifest: bytes = b""

    @property
    def step(self) -> Path:
        return self.root / "200"

    @property
    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.step)) for path in self.step.rglob("*") if path.is_file())

    def older(self, file: str) -> Path:
        """The file of step 100 that does what this one does in step 200: data files have random names."""
        twin = self.root / "100" / file
        if not twin.exists():
            mine = sorted((self.step / file).parent.iterdir(), key=lambda path: (path.stat().st_size, path.name))
            theirs = sorted(twin.parent.iterdir(), key=lambda path: (path.stat().st_size, path.name))
            twin = theirs[min(mine.index(self.step / file), len(theirs) - 1)]
        return twin


def make_world(root: Path) -> World:
    """Two steps, the newer one with what every look at it comes to."""
    made = World(root)
    for step in (100, 200):
        made.trees[step] = make_tree(step)
        ck.save(made.root / str(step), made.trees[step], metadata={"note": "any"})
    made.like = make_tree(300)
    made.manifest = (made.step / MANIFEST).read_bytes()
    for name, look in LOOKS.items():
        made.expected[name] = look(made)
    assert ck.verify(made.step).ok
    return made


# --- every way to look at it ------------------------------------------------------------------------------------------


def _without_target(world: World) -> list[Any]:
    return fingerprint(ck.restore(world.step))


def _into_target(world: World) -> list[Any]:
    world.like["rng"] = np.random.default_rng(300)
    return fingerprint(ck.restore(world.step, world.like))


def opened(world: World) -> list[Any]:
    """Leaf by leaf: where one is damaged, the others can still be had."""
    checkpoint = ck.open(world.step)
    found: list[Any] = [checkpoint.metadata]
    for name, leaf in checkpoint.items():
        try:
            found.append([name, bits(leaf[()])])
        except ck.CheckpointError as error:
            found.append([name, error])
    return found


LOOKS: dict[str, Callable[[World], list[Any]]] = {
    "restore(path)": _without_target,
    "restore(path, like)": _into_target,
    "open(path)": opened,
}


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        a == b or (isinstance(a, list) and a[0] == b[0] and isinstance(a[1], ck.CheckpointError))
        for a, b in zip(found, expected, strict=True)
    )


# --- every kind of damage ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """One thing done to one file."""

    kind: str
    file: str
    detail: str
    do: Callable[[], Any] = field(repr=False)  # A context manager: the damage lasts as long as it is open.


@contextmanager
def flipped(path: Path, at: int, bit: int) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR)
    old = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([old[0] ^ 1 << bit]), at)
    yield
    os.pwrite(fd, old, at)
    os.close(fd)


@contextmanager
def _contents(new: dict[Path, bytes | None]) -> Iterator[None]:
    """Files with other contents; None for one that is gone."""
    old = {path: path.read_bytes() for path in new}
    for path, data in new.items():
        path.unlink()
        if data is not None:
            path.write_bytes(data)
    yield
    for path, data in old.items():
        path.write_bytes(data)


@contextmanager
def _a_folder_instead(path: Path) -> Iterator[None]:
    data = path.read_bytes()
    path.unlink()
    path.mkdir()
    yield
    path.rmdir()
    path.write_bytes(data)


def _flips(world: World, file: str, rng: random.Random, *, full: bool) -> Iterator[Damage]:
    path = world.step / file
    size = path.stat().st_size
    if full:
        every_bit = size <= SMALL or file == MANIFEST
        flips = [(at, bit) for at in range(size) for bit in (range(8) if every_bit else [rng.randrange(8)])]
    elif file == MANIFEST:
        flips = [(at, rng.randrange(8)) for at in range(size)]
    else:
        flips = [(at, rng.randrange(8)) for at in sorted(rng.sample(range(size), min(size, 150)))]
    for at, bit in flips:
        yield Damage("bit flipped", file, f"byte {at}, bit {bit}", functools.partial(flipped, path, at, bit))


def _others(world: World, file: str, *, full: bool) -> Iterator[Damage]:
    path = world.step / file
    data = path.read_bytes()

    def with_contents(kind: str, detail: str, new: dict[Path, bytes | None]) -> Damage:
        return Damage(kind, file, detail, functools.partial(_contents, new))

    lengths = {
        0,
        1,
        len(data) // 2,
        len(data) - 1,
        *range(0, len(data) if full else 0, 1 if len(data) <= SMALL else 37),
    }
    for length in sorted(lengths & {*range(len(data))}):
        yield with_contents("cut off", f"at {length} of {len(data)}", {path: data[:length]})
    for extra in {b"\0": 0, b" ": 0, b"\n": 0, data[:1]: 0, data: 0}:
        if extra:
            yield with_contents("appended to", f"{len(extra)} bytes", {path: data + extra})
    yield with_contents("deleted", "", {path: None})
    yield Damage("a folder instead", file, "", functools.partial(_a_folder_instead, path))
    if any(data):
        yield with_contents("zeroed", "", {path: bytes(len(data))})
    older = world.older(file).read_bytes()
    if older != data:
        yield with_contents("from an older step", "", {path: older})
    for other in world.files:
        theirs = (world.step / other).read_bytes()
        if other > file and theirs != data:
            yield with_contents("swapped", f"with {other}", {path: theirs, world.step / other: data})


def _swaps(world: World, *, full: bool) -> Iterator[Damage]:
    """Each chunk in another's place, whose crc32c comes with it: with some of its length, or with each."""
    chunks = chunks_in_files(world.step)
    for (key, one), (other, two) in itertools.combinations(chunks.items(), 2):
        if one.length == two.length and (full or list(chunks).index(other) - list(chunks).index(key) < 6):
            new = {path: bytearray(path.read_bytes()) for path in (one.path, two.path)}
            a, b = (bytes(new[chunk.path][chunk.span]) for chunk in (one, two))
            new[one.path][one.span], new[two.path][two.span] = b, a
            do = functools.partial(_contents, {path: bytes(data) for path, data in new.items()})
            yield Damage("chunks swapped", str(one.path.relative_to(world.step)), f"{key} and {other}", do)


class Place(NamedTuple):
    """Where a chunk lies, with its crc32c."""

    path: Path
    offset: int
    length: int

    @property
    def span(self) -> slice:
        return slice(self.offset, self.offset + self.length)


def chunks_in_files(step: Path) -> dict[str, Place]:
    """The chunks that lie in data files, by key."""
    state = _storage.Folder(str(step / "state"))
    tree = _ocdbt.Tree(state, state.files())
    keys = [key.decode() for key in _reading.open_store(state).list().result()]
    found = {key: value for key in keys if (value := tree.find(key)) is not None and value.data is None}
    return {key: Place(step / "state" / value.file, value.offset, value.length) for key, value in found.items()}


def damages(world: World, *, full: bool, seed: int = 1) -> Iterator[Damage]:
    """All of it, or a sample."""
    rng = random.Random(seed)
    for file in world.files:
        yield from _flips(world, file, rng, full=full)
        yield from _others(world, file, full=full)
    yield from _swaps(world, full=full)


# --- what must come of it ---------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What came of all damages, by kind and by file; and everything that must not be."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    silent: list[str] = field(default_factory=list)
    wrong_error: list[str] = field(default_factory=list)
    unseen_by_verify: list[str] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return self.outcomes.total()

    def count(self, outcome: str) -> int:
        return sum(n for (_, found), n in self.outcomes.items() if found == outcome)

    def __str__(self) -> str:
        columns = ("detected", "by verify only", "unused")
        lines = [f"\n{'':24}" + "".join(f"{column:>16}" for column in columns)]
        for kind in dict.fromkeys(kind for kind, _ in self.outcomes):
            lines.append(f"{kind:24}" + "".join(f"{self.outcomes[kind, column]:16,}" for column in columns))
        lines.append(f"{'in all':24}" + "".join(f"{self.count(column):16,}" for column in columns))
        lines.append(
            f"tried {self.tried:,}; silent {len(self.silent)}; wrong type of exception {len(self.wrong_error)}; "
            f"unseen by verify {len(self.unseen_by_verify)}; touched `like` in vain {len(self.touched)}"
        )
        lines += [f"  unused in {file}: {n:,}" for file, n in self.unused.items()]
        return "\n".join(lines)


def _kinds(damage: Damage) -> tuple[type[ck.CheckpointError], ...]:
    """Which errors are fitting: without a manifest there is no checkpoint, and a flipped version is a newer one."""
    if MANIFEST not in damage.file:
        return (ck.Corrupt,)
    return (ck.NotFound,) if damage.kind in ("deleted", "a folder instead") else (ck.Corrupt, ck.Unsupported)


def judge(world: World, damage: Damage, tally: Tally) -> None:
    """Looks at the damaged checkpoint in every way, and notes what came of it."""
    where = f"{damage.kind}: {damage.file} {damage.detail}".rstrip()
    refused: dict[str, bool] = {}
    for name, look in LOOKS.items():
        try:
            found = look(world)
        except _kinds(damage) as error:
            refused[name] = True
            if not error.hint or not str(error).endswith(f"hint: {error.hint}"):
                tally.wrong_error.append(f"{where}: {name} raised an error without a hint: {error}")
            if name == "restore(path, like)" and bits(world.like["rng"]) != bits(np.random.default_rng(300)):
                tally.touched.append(where)
        except Exception as error:  # noqa: BLE001
            tally.wrong_error.append(f"{where}: {name} raised {type(error).__name__}: {error!s:.200}")
        else:
            if not same(found, world.expected[name]):
                tally.silent.append(f"{where}: {name}")
            refused[name] = found != world.expected[name]
    try:
        report = ck.verify(world.step)
        seen = not report.ok
        if not report.ok and not all(fault.place and fault.expected and fault.found for fault in report.faults):
            tally.wrong_error.append(f"{where}: verify gave a fault without words: {report.faults}")
    except ck.NotFound:
        seen = ck.NotFound in _kinds(damage)
        if not seen:
            tally.wrong_error.append(f"{where}: verify raised NotFound")
    except Exception as error:  # noqa: BLE001
        tally.wrong_error.append(f"{where}: verify raised {type(error).__name__}: {error!s:.200}")
        return
    _listed(world, damage, tally, where)
    if any(refused.values()) and not seen:
        tally.unseen_by_verify.append(where)
    outcome = "detected" if any(refused.values()) else "by verify only" if seen else "unused"
    tally.outcomes[damage.kind, outcome] += 1
    if outcome == "unused":
        tally.unused[re.sub(r"[0-9a-f]{32}", "*", damage.file)] += 1


# What leaves every file as long as it was: then a look at sizes finds nothing.
WHOLE_BY_SIZE = {"bit flipped", "zeroed", "from an older step", "swapped", "chunks swapped"}


def _listed(world: World, damage: Damage, tally: Tally, where: str) -> None:
    """Looking over the root never fails, and offers no step whose manifest or sizes are not what they were."""
    if damage.kind == "bit flipped" and damage.file != MANIFEST:
        return
    whole = damage.kind in WHOLE_BY_SIZE and damage.file != MANIFEST
    try:
        steps, latest = ck.steps(world.root), ck.latest(world.root)
    except Exception as error:  # noqa: BLE001
        tally.wrong_error.append(f"{where}: looking over the root raised {type(error).__name__}: {error!s:.200}")
        return
    if 100 not in steps or latest not in (str(world.root / "100"), str(world.step)):
        tally.wrong_error.append(f"{where}: the root has the steps {steps}, the latest is {latest}")
    if latest == str(world.step) and not whole and (world.step / MANIFEST).read_bytes() != world.manifest.rstrip():
        tally.wrong_error.append(f"{where}: it is still offered as the latest")
