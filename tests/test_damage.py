"""Damage: whatever befalls the bytes of a checkpoint is found and named, or touched nothing that anyone reads.

By default a sample is tried, with a fixed seed. `CKPT_DAMAGE=full` tries every byte of every file, and every bit of
the small ones; that takes half an hour.
"""

import functools
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_jax as ck
from ckpt_jax import _chunks, _commit, _reading, _writing, _zarr

from .cells import cells_of

FULL = os.environ.get("CKPT_DAMAGE") == "full"
MANIFEST = "MANIFEST.json"
SMALL = 4096  # Files up to this size are tried bit by bit in a full run.

needs_8_devices = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


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
    return [treedef, *map(_leaf, leaves)]


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return str(leaf.dtype), _leaf(jax.random.key_data(leaf))
        return leaf.dtype, leaf.shape, leaf.sharding, leaf.weak_type, leaf.committed, np.asarray(leaf).tobytes()
    if isinstance(leaf, (np.ndarray, np.generic)):
        return type(leaf), leaf.dtype, leaf.shape, leaf.tobytes()
    if isinstance(leaf, np.random.Generator):
        return repr(leaf.bit_generator.state)
    return type(leaf), repr(leaf)


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    """Chunks of at most 2 kB, data files of 8 kB, tree nodes of 4 kB: a small checkpoint has several of each."""
    config = _writing._CONFIG | {"max_decoded_node_bytes": 4096}
    with mock.patch.multiple(_writing, DATA_FILE=8 << 10, _CONFIG=config), cells_of(2048):
        yield


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


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = World(tmp_path_factory.mktemp("damage"))
    for step in (100, 200):
        made.trees[step] = make_tree(step)
        ck.save(made.root / str(step), made.trees[step], metadata={"note": "any"})
    made.like = make_tree(300)
    made.manifest = (made.step / MANIFEST).read_bytes()
    for name, look in LOOKS.items():
        made.expected[name] = look(made)
    assert ck.verify(made.step).ok
    return made


@pytest.fixture
def copy(world: World, tmp_path: Path) -> World:
    """A copy of the world that a test may break."""
    shutil.copytree(world.root, tmp_path / "root")
    return World(tmp_path / "root", world.trees, world.like, world.expected, world.manifest)


# --- every way to look at it ------------------------------------------------------------------------------------------


def _without_target(world: World) -> list[Any]:
    return fingerprint(ck.restore(world.step))


def _into_target(world: World) -> list[Any]:
    world.like["rng"] = np.random.default_rng(300)
    return fingerprint(ck.restore(world.step, world.like))


def _opened(world: World) -> list[Any]:
    """Leaf by leaf: where one is damaged, the others can still be had."""
    checkpoint = ck.open(world.step)
    found: list[Any] = [checkpoint.metadata]
    for name, leaf in checkpoint.items():
        try:
            found.append([name, _leaf(leaf[()])])
        except ck.CheckpointError as error:
            found.append([name, error])
    return found


LOOKS: dict[str, Callable[[World], list[Any]]] = {
    "restore(path)": _without_target,
    "restore(path, like)": _into_target,
    "open(path)": _opened,
}


def _same(found: list[Any], expected: list[Any]) -> bool:
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
def _flipped(path: Path, at: int, bit: int) -> Iterator[None]:
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


def _flips(world: World, file: str, rng: random.Random) -> Iterator[Damage]:
    path = world.step / file
    size = path.stat().st_size
    if FULL:
        every_bit = size <= SMALL or file == MANIFEST
        flips = [(at, bit) for at in range(size) for bit in (range(8) if every_bit else [rng.randrange(8)])]
    elif file == MANIFEST:
        flips = [(at, rng.randrange(8)) for at in range(size)]
    else:
        flips = [(at, rng.randrange(8)) for at in sorted(rng.sample(range(size), min(size, 150)))]
    for at, bit in flips:
        yield Damage("bit flipped", file, f"byte {at}, bit {bit}", functools.partial(_flipped, path, at, bit))


def _others(world: World, file: str) -> Iterator[Damage]:
    path = world.step / file
    data = path.read_bytes()

    def with_contents(kind: str, detail: str, new: dict[Path, bytes | None]) -> Damage:
        return Damage(kind, file, detail, functools.partial(_contents, new))

    lengths = {
        0,
        1,
        len(data) // 2,
        len(data) - 1,
        *range(0, len(data) if FULL else 0, 1 if len(data) <= SMALL else 37),
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


def damages(world: World, seed: int = 1) -> Iterator[Damage]:
    rng = random.Random(seed)
    for file in world.files:
        yield from _flips(world, file, rng)
        yield from _others(world, file)


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
            if name == "restore(path, like)" and _leaf(world.like["rng"]) != _leaf(np.random.default_rng(300)):
                tally.touched.append(where)
        except Exception as error:  # noqa: BLE001
            tally.wrong_error.append(f"{where}: {name} raised {type(error).__name__}: {error!s:.200}")
        else:
            if not _same(found, world.expected[name]):
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


def _listed(world: World, damage: Damage, tally: Tally, where: str) -> None:
    """Looking over the root never fails, and offers no step whose manifest or sizes are not what they were."""
    if damage.kind == "bit flipped" and damage.file != MANIFEST:
        return
    whole = damage.kind in ("bit flipped", "zeroed", "from an older step", "swapped") and damage.file != MANIFEST
    try:
        steps, latest = ck.steps(world.root), ck.latest(world.root)
    except Exception as error:  # noqa: BLE001
        tally.wrong_error.append(f"{where}: looking over the root raised {type(error).__name__}: {error!s:.200}")
        return
    if 100 not in steps or latest not in (str(world.root / "100"), str(world.step)):
        tally.wrong_error.append(f"{where}: the root has the steps {steps}, the latest is {latest}")
    if latest == str(world.step) and not whole and (world.step / MANIFEST).read_bytes() != world.manifest.rstrip():
        tally.wrong_error.append(f"{where}: it is still offered as the latest")


@needs_8_devices
def test_no_damage_is_ever_restored_as_if_it_were_whole(world: World) -> None:
    tally = Tally()
    before = {file: (world.step / file).read_bytes() for file in world.files}
    for damage in damages(world):
        with damage.do():
            judge(world, damage, tally)
    print(tally)
    assert {file: (world.step / file).read_bytes() for file in world.files} == before, "the test puts all back"
    assert tally.silent == []
    assert tally.wrong_error == []
    assert tally.unseen_by_verify == []
    assert tally.touched == []
    assert tally.tried > (20_000 if FULL else 3_000)
    assert tally.count("detected") > tally.tried / 2
    # What nobody reads: the newline that ends the manifest.
    assert tally.unused.keys() <= {MANIFEST}
    assert tally.unused[MANIFEST] <= 1


# --- damage that every lower check takes for whole --------------------------------------------------------------------


def _chunk_bytes(world: World, name: str, coords: tuple[int, ...], step: int = 200) -> tuple[Path, int, bytes]:
    """The data file in which a chunk lies, where in it, and the chunk with its crc32c."""
    checkpoint = ck.open(world.root / str(step))
    leaf = checkpoint[name]
    cell = _chunks.cell(coords, leaf.chunk, leaf.shape)
    values = np.zeros(leaf.chunk, leaf.dtype)
    values[tuple(map(slice, _chunks.extent(cell)))] = leaf[_chunks.slices(cell)]
    raw = values.tobytes()
    for path in (world.root / str(step)).rglob("d/*"):
        data = path.read_bytes()
        if (at := data.find(raw)) >= 0:
            return path, at, data[at : at + len(raw) + _zarr.CRC]
    raise AssertionError(f"{name} {coords} is in no data file")


def _overwrite(path: Path, at: int, data: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[at : at + len(data)] = data
    path.write_bytes(whole)


@needs_8_devices
def test_two_chunks_that_changed_places_are_found(copy: World) -> None:
    """Each passes its own crc32c; only the manifest knows which belongs where."""
    (a, at_a, one), (b, at_b, two) = (_chunk_bytes(copy, "w", coords) for coords in [(1, 0), (3, 1)])
    _overwrite(a, at_a, two)
    _overwrite(b, at_b, one)
    with pytest.raises(ck.Corrupt) as caught:
        ck.restore(copy.step)
    assert [(fault.place, fault.expected.partition(" in ")[0]) for fault in caught.value.faults] == [
        ("w", "chunk [1, 0]"),
        ("w", "chunk [3, 1]"),
    ]
    assert len(ck.verify(copy.step).faults) == 2


@needs_8_devices
def test_two_leaves_that_changed_places_are_found(copy: World) -> None:
    (a, at_a, one), (b, at_b, two) = (_chunk_bytes(copy, name, (0, 0)) for name in ("w", "bf16"))
    assert len(one) == len(two)
    _overwrite(a, at_a, two)
    _overwrite(b, at_b, one)
    with pytest.raises(ck.Corrupt) as caught:
        ck.restore(copy.step, copy.like)
    assert [fault.place for fault in caught.value.faults] == ["bf16", "w"]


@needs_8_devices
def test_a_chunk_of_an_older_step_is_found(copy: World) -> None:
    path, at, _ = _chunk_bytes(copy, "host.ints", (2, 0))
    _, _, stale = _chunk_bytes(copy, "host.ints", (2, 0), step=100)
    _overwrite(path, at, stale)
    with pytest.raises(ck.Corrupt, match=r"host\.ints: expected chunk \[2, 0\]"):
        ck.open(copy.step)["host.ints"][25]
    assert not ck.verify(copy.step).ok


@needs_8_devices
@pytest.mark.parametrize("what", ["everything but the manifest", "state", "state/d", "state/ocdbt.process_0"])
def test_a_folder_of_an_older_step_is_found(copy: World, what: str) -> None:
    if what == "everything but the manifest":
        shutil.rmtree(copy.step)
        shutil.copytree(copy.root / "100", copy.step)
        (copy.step / MANIFEST).write_bytes(copy.manifest)
    else:
        shutil.rmtree(copy.step / what)
        shutil.copytree(copy.root / "100" / what, copy.step / what)
    with pytest.raises(ck.Corrupt):
        ck.restore(copy.step)
    with pytest.raises(ck.Corrupt):
        ck.restore(copy.step, copy.like)
    assert not ck.verify(copy.step).ok
    assert not ck.verify(copy.step, level="files").ok
    assert ck.latest(copy.root) == str(copy.root / "100")


@needs_8_devices
@pytest.mark.parametrize("what", ["state", "state/d", "state/ocdbt.process_0", "state/ocdbt.process_0/d"])
def test_a_folder_that_is_gone_is_found(copy: World, what: str) -> None:
    shutil.rmtree(copy.step / what)
    with pytest.raises(ck.Corrupt):
        ck.restore(copy.step)
    assert not ck.verify(copy.step, level="files").ok
    assert not ck.verify(copy.step).ok
    with mock.patch.object(_commit, "missing_files", return_value=[]):
        assert _same(_opened(copy), copy.expected["open(path)"]), "what lies elsewhere can still be had"


@needs_8_devices
def test_every_key_rewritten_through_tensorstore_is_found(copy: World, tmp_path: Path) -> None:
    """Whoever writes to the store leaves every checksum but ours as it should be."""
    state, good = copy.step / "state", tmp_path / "good"
    shutil.copytree(state, good)
    older = _reading.open_store(_commit.Folder(str(copy.root / "100" / "state")))
    keys = [key.decode() for key in older.list().result()]
    leaves = ck.open(copy.step).manifest.leaves
    rng = random.Random(2)
    chunks = [key for key in keys if "/c" in key and key.partition("/")[0] in leaves]
    chunks = [key for key in chunks if leaves[key.partition("/")[0]].stored]
    assert len(chunks) > 30
    if not FULL:
        chunks = sorted(rng.sample(chunks, 20))
    silent = []
    for key in chunks:
        store = _reading.open_store(_commit.Folder(str(state)))
        old, stale = store.read(key).result().value, older.read(key).result().value
        zeros = bytes(len(old) - 4) + _writing.crc32c.crc32c(bytes(len(old) - 4)).to_bytes(4, "little")
        for new in (None, stale, zeros, old[:-1], old + b"\0", b""):
            if new == old:
                continue
            store.write(key, new).result()
            with mock.patch.object(_commit, "missing_files", return_value=[]):  # Or a file's size would tell.
                for look in (
                    ck.restore,
                    lambda path: ck.restore(path, copy.like),
                    lambda path: ck.verify(path).check(),
                ):
                    try:
                        look(copy.step)
                        silent.append(f"{key}: {new!r:.20}")
                    except ck.Corrupt as error:
                        if f"\n  {key.partition('/')[0]}: " not in str(error):
                            silent.append(f"{key}: {error}")
        shutil.rmtree(state)
        shutil.copytree(good, state)
    assert silent == []
    assert ck.verify(copy.step).ok


@needs_8_devices
def test_an_array_that_describes_itself_otherwise_is_found_by_verify(copy: World) -> None:
    """We never read zarr.json, so our values are right; others would read wrong ones."""
    store = _reading.open_store(_commit.Folder(str(copy.step / "state")))
    was = store.read("w/zarr.json").result().value
    store.write("w/zarr.json", was.replace(b'"float32"', b'"int32"')).result()
    with mock.patch.object(_commit, "missing_files", return_value=[]):
        assert fingerprint(ck.restore(copy.step)) == copy.expected["restore(path)"]
        assert [fault.place for fault in ck.verify(copy.step).faults] == ["state/manifest.ocdbt", "w"]


# --- what is said of it -----------------------------------------------------------------------------------------------


@needs_8_devices
def test_the_error_names_leaf_chunk_and_file_and_what_to_do(copy: World) -> None:
    path, at, _ = _chunk_bytes(copy, "w", (1, 0))
    file = path.relative_to(copy.step)
    with _flipped(path, at + 17, 3), pytest.raises(ck.Corrupt) as caught:
        ck.restore(copy.step)
    digest = ck.open(copy.step)["w"].digest[2 * 32 : 3 * 32][:12]
    assert re.fullmatch(
        rf"{copy.step} is damaged in 1 place:\n"
        rf"  w: expected chunk \[1, 0\] in {file}: digest {digest}…, "
        rf"found digest [0-9a-f]{{12}}… in place of {digest}…\n"
        rf"\n"
        rf"hint: `ckpt-jax ls {copy.root}` lists older steps; `ckpt-jax verify {copy.step}` checks every chunk",
        str(caught.value),
    )


@needs_8_devices
def test_all_damaged_chunks_are_named_at_once(copy: World) -> None:
    places = [("bf16", (0, 0)), ("host.ints", (1, 0)), ("w", (0, 0)), ("w", (2, 1))]
    for name, coords in places:
        path, at, raw = _chunk_bytes(copy, name, coords)
        _overwrite(path, at, bytes(byte ^ 0xFF for byte in raw))
    for look in (ck.restore, lambda path: ck.restore(path, copy.like), lambda path: ck.verify(path).check()):
        with pytest.raises(ck.Corrupt, match="is damaged in 4 places") as caught:
            look(copy.step)
        for fault, (name, coords) in zip(caught.value.faults, places, strict=True):
            assert fault.place == name
            assert f"chunk {list(coords)} in state/ocdbt.process_0/d/" in fault.expected


@needs_8_devices
def test_a_file_that_is_gone_or_cut_off_is_named_with_the_leaves_in_it(copy: World) -> None:
    gone, *_ = _chunk_bytes(copy, "w", (0, 0))
    cut, *_ = next(found for c in range(8) if (found := _chunk_bytes(copy, "bf16", (c // 4, c % 4)))[0] != gone)
    size = cut.stat().st_size
    cut.write_bytes(cut.read_bytes()[:-7])
    gone.unlink()
    for look in (ck.restore, lambda path: ck.verify(path).check(), lambda path: ck.verify(path, level="files").check()):
        with pytest.raises(ck.Corrupt) as caught:
            look(copy.step)
        by_place = {fault.place: fault for fault in caught.value.faults}
        first, second = (by_place[str(path.relative_to(copy.step))] for path in (gone, cut))
        assert re.fullmatch(r"no such file \(holds .*\bw\b.*\)", first.found)
        assert re.fullmatch(rf"{size - 7:,} bytes \(holds .*\bbf16\b.*\)", second.found)
        assert second.expected == f"{size:,} bytes"


@needs_8_devices
@pytest.mark.parametrize("what", ["a flipped bit", "half of it", "nothing", "another file"])
def test_a_damaged_manifest_says_so(copy: World, what: str) -> None:
    data = copy.manifest
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    new = {"a flipped bit": flipped, "half of it": data[: len(data) // 2], "nothing": b"", "another file": b"{}\n"}[
        what
    ]
    (copy.step / MANIFEST).write_bytes(new)
    for look in (ck.restore, ck.open, lambda path: ck.restore(path, copy.like)):
        with pytest.raises(ck.Corrupt) as caught:
            look(copy.step)
        text = str(caught.value)
        assert text.startswith(f"{copy.step} is damaged:\n  MANIFEST.json: expected ")
        assert text.endswith("hint: restore an older step: `ckpt-jax ls` on the folder above lists them")
    assert [fault.place for fault in ck.verify(copy.step).faults] == [MANIFEST]
    assert ck.steps(copy.root) == [100]
    assert ck.latest(copy.root) == str(copy.root / "100")


@needs_8_devices
def test_a_manifest_that_is_gone_is_no_checkpoint(copy: World) -> None:
    (copy.step / MANIFEST).unlink()
    for look in (ck.restore, ck.open, ck.verify, lambda path: ck.restore(path, copy.like)):
        with pytest.raises(ck.NotFound, match=r"it has no MANIFEST\.json") as caught:
            look(copy.step)
        assert "\nhint: " in str(caught.value)
    assert ck.steps(copy.root) == [100]


@needs_8_devices
def test_what_is_whole_can_still_be_had(copy: World) -> None:
    path, at, _ = _chunk_bytes(copy, "w", (1, 0))
    _overwrite(path, at, b"\xff" * 4)
    checkpoint = ck.open(copy.step)
    with pytest.raises(ck.Corrupt, match=r"chunk \[1, 0\]"):
        checkpoint["w"][()]
    whole = np.asarray(copy.trees[200]["w"])
    assert np.array_equal(checkpoint["w"][16:], whole[16:]), "the rows of other chunks"
    assert np.array_equal(checkpoint["bf16"][()], np.asarray(copy.trees[200]["bf16"]))
    assert np.array_equal(ck.restore(copy.step, only="bf16")["bf16"], np.asarray(copy.trees[200]["bf16"]))


@needs_8_devices
def test_the_hint_which_step_is_newest_is_never_trusted(copy: World) -> None:
    hint = copy.root / "LATEST"
    good = hint.read_bytes()
    for new in [b"", b"{", good[:-3], b"[]", b'{"step": 100}', b'{"step": 10000, "seal": ""}', b"\xff" * 90, None]:
        hint.unlink() if new is None else hint.write_bytes(new)
        assert ck.latest(copy.root) == str(copy.step)
        assert ck.steps(copy.root) == [100, 200]
    for new in (b"", b"\xff", b'{"step": "x"}', b'{"step": -1, "seal": 5}', b"[" * 100_000, b'{"step": 1e999}'):
        hint.write_bytes(new)
        shutil.rmtree(copy.root / "300", ignore_errors=True)
        ck.save(copy.root / "300", {"x": 1})
        assert b'"step": 300' in hint.read_bytes(), "and it is written anew"
