"""Save: a tree becomes a committed checkpoint."""

import contextlib
import itertools
import json
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.core
import msgspec
import numpy as np
import xxhash

from . import (
    _collector,
    _commit,
    _health,
    _leaves,
    _manifest,
    _ocdbt,
    _orbax,
    _processes,
    _snapshot,
    _storage,
    _tree,
    _values,
    _writing,
)
from ._manifest import File, Leaf, Manifest, Part
from ._snapshot import Snapshot
from .errors import CheckpointError, Fault, NotFound


def save(
    path: _storage.PathLike,
    tree: Any,
    *,
    step: int | None = None,
    metadata: Any = None,
    overwrite: bool = False,
) -> Manifest:
    """Saves a tree; returns when it is durable and committed.

    Until then nothing is at `path`, whatever happens: a checkpoint is never half there. With several processes all
    call this with the same path and tree; each writes the chunks that it holds.

    Args:
        path: where the checkpoint will be: a folder that does not exist yet, `gs://…`, `s3://…` or `memory://…`.
            In a root of checkpoints the name is the step: `"runs/a/1000"`.
        tree: any pytree of jax and NumPy arrays, PRNG keys, Python values (int, float, complex, bool, str, bytes),
            live objects with `get_state` and `set_state`, and types given to `register_leaf`.
        step: the number of completed updates; taken from the path where its name is a number.
        metadata: anything that is plain data; comes back as `open(path).metadata`.
        overwrite: replace a checkpoint that is there. The old one goes once the new one is committed.

    Returns:
        The manifest: every leaf with its shape, dtype and digests, the files, and the time that each phase took.

    Raises:
        Unsupported: leaves that cannot be saved, all named; nothing was written.
        Exists: something is at `path` already.
        OSError: the storage failed; nothing was committed, and what was written is gone again.

    >>> import jax.numpy as jnp, ckpt_jax as ck
    >>> manifest = ck.save("memory://docs/save/100", {"w": jnp.ones((2, 3)), "step": 100})
    >>> manifest.step, list(manifest.leaves)
    (100, ['step', 'w'])
    """
    target = _storage.folder(path)
    if not isinstance(overwrite, bool):
        raise TypeError(f"overwrite is True or False, not {overwrite!r}")
    group = _processes.group(f"save/{target.name}")
    try:
        manifest, snapshot = prepare(target, tree, group, step=step, metadata=metadata)
    except BaseException as error:
        abstain(group, f"failed: {error}")
        group.part()
        raise
    try:
        return write(target, manifest, snapshot, group, Terms(overwrite))
    finally:
        group.part()


def prepare(
    target: _storage.Folder,
    tree: Any,
    group: _processes.Group,
    *,
    step: int | None = None,
    metadata: Any = None,
    metrics: dict[str, Any] | None = None,
    milestone: bool = False,
    hold: bool = False,
) -> tuple[Manifest, Snapshot]:
    """What training waits for: the tree's records and this process's snapshot of it.

    With `hold` the snapshot stays as it is, whatever becomes of the tree.
    """
    started = time.perf_counter()
    step = _step(target, step)
    packed = _packed("metadata", metadata)
    with _collector.paused():
        flat = _tree.flatten(tree)
        encoded = _leaves.encode_all(flat.leaves)
        snapshot = _snapshot.take(encoded, group.index, group.count, hold=hold)
    manifest = Manifest(
        _manifest.FORMAT,
        (_manifest.MAJOR, _manifest.MINOR),
        step=step,
        writers=group.count,
        tree=flat.structure,
        leaves=snapshot.leaves,
        shardings=snapshot.shardings,
        metrics=_metrics(metrics),
        milestone=_milestone(milestone),
        metadata=packed,
    )
    manifest.seconds["snapshot"] = time.perf_counter() - started
    return manifest, snapshot


def fingerprints(tree: Any, group: _processes.Group) -> dict[tuple[str, int], str]:
    """The digests of this process's chunks, read here and now by the plain way."""
    encoded = _leaves.encode_all(_tree.flatten(tree).leaves)
    snapshot = _snapshot.take(encoded, group.index, group.count)
    return _writing.digests(snapshot.leaves, snapshot.chunks)


def _step(target: _storage.Folder, step: int | None) -> int | None:
    named = _commit.step_of(target.name)
    if step is None:
        if named is None and (found := _LIKE_A_STEP.fullmatch(target.name)):
            number = found[1]
            warnings.warn(
                f"{target.name!r} is no step: `steps`, `latest` and `Saver.resume` find names that are numbers without "
                f"leading zeros, such as {number!r}",
                stacklevel=4,
            )
        return named
    return checked_step(target, step)


def checked_step(target: _storage.Folder, step: int | None) -> int | None:
    """A step that does not contradict the folder's name."""
    named = _commit.step_of(target.name)
    step = None if step is None else as_step(step)
    if named is not None and named != step:
        raise ValueError(f"step={step}, but the folder's name says step {named}: {target}")
    return step


def as_step(step: Any) -> int:
    """A step that a user gave, if it is one."""
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)):
        raise TypeError(f"step is an int, not {step!r}")
    if step < 0 or step >= 10**18:
        raise ValueError(f"step is between 0 and 10^18, not {step}")
    return int(step)


def _metrics(metrics: Any) -> dict[str, Any]:
    """Metrics by name; arrays of one number stay what they are, so that training does not wait for them."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"metrics is a dict, not {type(metrics).__name__}")
    arrays = {k: v for k, v in (metrics or {}).items() if isinstance(v, (jax.Array, np.ndarray, np.generic))}
    for name, value in arrays.items():
        if value.shape or not (jax.numpy.issubdtype(value.dtype, np.number) or value.dtype == bool):
            raise TypeError(f"the metric {name!r} is a number, not {value.dtype}{list(value.shape)}")
        if isinstance(value, jax.core.Tracer):
            raise TypeError(f"the metric {name!r} is a traced value: call save outside of jit, grad and vmap")
    plain = {k: v for k, v in (metrics or {}).items() if k not in arrays}
    _packed("metrics", plain)
    return plain | arrays


def _milestone(milestone: Any) -> bool:
    if not isinstance(milestone, (bool, np.bool_)):
        raise TypeError(f"milestone is True or False, not {milestone!r}")
    return bool(milestone)


def _packed(what: str, value: Any) -> Any:
    try:
        packed = _values.pack(value)
    except TypeError as error:
        raise TypeError(f"{what}: plain data (dicts, lists, str, numbers, bytes), please: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{what}: it holds itself, or is nested too deep") from error
    if _values.too_deep(packed):
        raise ValueError(f"{what}: nested too deep")
    return packed


_LIKE_A_STEP = re.compile(r"(?:step|ckpt|checkpoint|epoch)?[-_]?0*(\d+)", re.IGNORECASE)


class Declined(CheckpointError):
    """A process was still writing the checkpoint before; nothing is wrong, and nothing was committed."""


def abstain(group: _processes.Group, why: str) -> None:
    """Tells the others that this process takes no part in a save: `"failed: …"` or `"declined: …"`."""
    group.publish("attempt" if group.index == 0 else f"part/{group.index}", why)


class Terms(NamedTuple):
    """On what terms a snapshot is committed.

    Attributes:
        overwrite: replace a checkpoint that is there.
        refused: of a run: replace also one that is marked as damaged, and put aside what has this identity.
        health: what the state must fulfil; None to not look.
        before: how the leaves were in the last committed checkpoint.
        expected: digests of this process's chunks, which the snapshot must still have.
        written: is told how many bytes this process wrote, once they are durable.
        again: of what can be written once more to the last bit, a name for that: what one who was killed wrote is kept.
    """

    overwrite: bool = False
    refused: str | None = None
    health: _health.Health | None = None
    before: Mapping[str, _manifest.Health] = {}
    expected: Mapping[tuple[str, int], str] | None = None
    written: Callable[[int], None] = lambda size: None
    again: str = ""


def write(
    target: _storage.Folder, manifest: Manifest, snapshot: Snapshot, group: _processes.Group, terms: Terms
) -> Manifest:
    """Writes a snapshot and commits it, together with the run's other processes. Touches no device.

    The caller parts from the group afterwards.
    """
    try:
        numbers = {k: v.item() if hasattr(v, "dtype") else v for k, v in manifest.metrics.items()}
        manifest.metrics = _packed("metrics", numbers)
    except BaseException as error:  # Such as one that was deleted meanwhile.
        abstain(group, _told(error))
        raise
    if group.index != 0:
        return _follow(target, manifest, snapshot, group, terms)
    return _lead(target, manifest, snapshot, group, terms)


def _lead(
    target: _storage.Folder, manifest: Manifest, snapshot: Snapshot, group: _processes.Group, terms: Terms
) -> Manifest:
    attempt = _begin(target, group, terms)
    try:
        parts = [_write_part(attempt, manifest, snapshot, group, terms), *_collect(attempt, group)]
        started = time.perf_counter()
        _manifest.merge(manifest.leaves, parts, target.url)
        if terms.health is not None:
            manifest.health = _health.merged([part.health for part in parts])
            _health.check(manifest.health, terms.before, terms.health, manifest.leaves)
        _writing.merge(attempt.folder / attempt.state, [attempt.process(i) for i in range(group.count)])
        _finish(attempt, manifest, parts, started)
    except BaseException as error:
        with contextlib.suppress(CheckpointError):  # Told first: the others' own writes fail once the folder goes.
            group.publish("outcome", _told(error))
        if terms.again and isinstance(error, KeyboardInterrupt):
            attempt.close()
        else:
            (_commit.discard if terms.again else _commit.abandon)(attempt)
        raise
    group.publish("outcome", "committed")
    return manifest


def _told(error: BaseException) -> str:
    """An error as a message to the other processes."""
    return f"{'declined' if isinstance(error, Declined) else 'failed'}: {error}"


def _raise_told(
    message: str, otherwise: str, faults: Sequence[Fault] = (), cause: BaseException | None = None
) -> NoReturn:
    """Raises what another process told."""
    kind, _, why = message.partition(": ")
    if kind == "declined":
        raise Declined(why) from cause
    raise CheckpointError(otherwise if faults else f"{otherwise}: {why}", faults) from cause


def _begin(target: _storage.Folder, group: _processes.Group, terms: Terms) -> _commit.Attempt:
    try:
        marked = terms.refused is not None and _commit.is_bad(target)
        refused = target.identity() if marked else terms.refused or ""
        if terms.again:
            attempt = taken_up(target, terms.again, overwrite=terms.overwrite)
        else:
            attempt = _commit.begin(target, overwrite=terms.overwrite or marked, refused=refused)
    except BaseException as error:
        abstain(group, _told(error))
        raise
    group.publish("attempt", json.dumps([attempt.nonce, attempt.state]))
    return attempt


def taken_up(target: _storage.Folder, again: str, *, overwrite: bool = False, state: str = "") -> _commit.Attempt:
    """An attempt of a given name, with the data files of one that was killed; all else of that is written anew."""
    attempt = _commit.take_up(
        target, again, state or ("state" if target.local else f"state.{again}"), overwrite=overwrite
    )
    if target.local:
        for path in attempt.folder.files():
            if f"/d/{again}" not in path:
                attempt.folder.unlink(path)
        attempt.folder.make(f"{attempt.state}/array_metadatas")
    return attempt


def _write_part(
    attempt: _commit.Attempt, manifest: Manifest, snapshot: Snapshot, group: _processes.Group, terms: Terms
) -> Part:
    """Writes this process's chunks, durably, and says what it wrote."""
    started = time.perf_counter()
    place = attempt.process(group.index)
    place.make()
    head = group.index == 0
    extra = numbers(manifest.leaves) if head else {}
    scalars = (_writing.Chunk(name, 0, (), value) for name, (_, value) in extra.items())
    sums = _health.Sums()
    chunks = snapshot.chunks if terms.health is None else sums.watch(snapshot.chunks)
    written = _writing.write(
        place,
        manifest.leaves | {name: leaf for name, (leaf, _) in extra.items()},
        itertools.chain(chunks, scalars),
        head=head,
        again=terms.again,
    )
    place.sync()
    manifest.seconds["write"] = time.perf_counter() - started
    digests = {name: found for name, found in written.digests.items() if name not in extra}
    terms.written(sum(len(found) * _manifest.chunk_bytes(manifest.leaves[name]) for name, found in digests.items()))
    if terms.expected is not None:
        _check_unchanged(digests, terms.expected)
    return Part(
        process=group.index,
        chunks=digests,
        live=snapshot.live,
        shared=snapshot.shared | _scalar_digests(manifest.leaves, group),
        tree=_tree_digest(manifest) if group.count > 1 else "",
        health=sums.found | (_health.of_scalars(manifest.leaves) if head and terms.health is not None else {}),
        files=written.files,
    )


def _check_unchanged(digests: dict[str, dict[int, str]], expected: Mapping[tuple[str, int], str]) -> None:
    """Raises CheckpointError where what was written is not what stood there when the snapshot was taken."""
    changed = sorted({name for (name, at), digest in expected.items() if digests[name][at] != digest})
    if changed:
        raise CheckpointError(
            "the snapshot changed before it was written; nothing was committed",
            [Fault(name, "the values at the call", "others") for name in changed],
            hint="something writes to memory of these leaves that JAX holds to be constant",
        )


def _tree_digest(manifest: Manifest) -> str:
    shapes = {name: (str(leaf), leaf.kind, leaf.chunk) for name, leaf in manifest.leaves.items()}
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([manifest.tree, shapes]))


def numbers(leaves: dict[str, Leaf]) -> dict[str, tuple[Leaf, np.ndarray]]:
    """The Python numbers that Orbax can hold, as the 0-d arrays in which it looks for them."""
    found = {}
    for name, leaf in leaves.items():
        if (array := _orbax.scalar_array(leaf)) is not None:
            dtype, value = array
            found[name] = Leaf("array", dtype=dtype), np.array(value, dtype)
    return found


def _scalar_digests(leaves: dict[str, Leaf], group: _processes.Group) -> dict[str, str]:
    if group.count == 1:
        return {}
    values = {name: leaf.value for name, leaf in leaves.items() if leaf.kind == "scalar"}
    return {name: xxhash.xxh3_128_hexdigest(msgspec.json.encode(value)) for name, value in values.items()}


def _finish(attempt: _commit.Attempt, manifest: Manifest, parts: list[Part], started: float) -> None:
    manifest.attempt, manifest.state, manifest.time = attempt.nonce, attempt.state, time.time()
    sidecars = _orbax.sidecars(manifest, str(jax.devices()[0]) if _has_key(manifest) else "")
    beside: dict[str, bytes] = {}
    if not attempt.target.local:  # In a bucket a fixed name beside the arrays would be another attempt's, too.
        beside = {path: data for path, data in sidecars.items() if not path.startswith(f"{attempt.state}/")}
    inside = {path: data for path, data in sidecars.items() if path not in beside}
    for path, data in inside.items():
        attempt.folder.write(path, data)
    sizes = _sizes(attempt, parts)
    ours = inside.keys() | {path for path in sizes if path.startswith(f"{attempt.state}/")}
    root = f"{attempt.state}/{_ocdbt.MANIFEST}"
    small = inside | ({root: attempt.folder.read(root) or b""} if root in ours else {})
    manifest.files = {
        path: File(size, xxhash.xxh3_128_hexdigest(small[path]) if path in small else "")
        for path, size in sorted(sizes.items())
        if path in ours
    }
    manifest.seconds["merge"] = time.perf_counter() - started
    _commit.commit(attempt, manifest)
    for path, data in beside.items():
        with contextlib.suppress(OSError):  # It is committed; this is for Orbax alone.
            attempt.target.write(path, data)


def _sizes(attempt: _commit.Attempt, parts: list[Part]) -> dict[str, int]:
    """The attempt's files and their sizes; what only the merge needed goes: each process's own tree of keys.

    Raises:
        CheckpointError: a data file is not as long as what was written to it.
    """
    sizes, faults = attempt.folder.files(), []
    for part in parts:
        home = f"{attempt.home(part.process)}/"
        for file, size in part.files.items():
            if (found := sizes.get(home + file)) != size:
                faults.append(Fault(home + file, f"{size:,} bytes", "no such file" if found is None else f"{found:,}"))
        for path in [path for path in sizes if path.startswith(home) and path.removeprefix(home) not in part.files]:
            attempt.folder.unlink(path)
            del sizes[path]
    if faults:
        raise CheckpointError("what was just written is gone from the storage; nothing was committed", faults)
    return sizes


def _has_key(manifest: Manifest) -> bool:
    return any(leaf.kind == "key" for leaf in manifest.leaves.values())


# --- several processes ------------------------------------------------------------------------------------------------


def _collect(attempt: _commit.Attempt, group: _processes.Group) -> list[Part]:
    """The other processes' parts, each checked against the digest that its writer published."""
    parts = []
    for process, message in group.wait_for_all("part", phase="write"):
        if message.startswith(("failed: ", "declined: ")):
            why = message.partition(": ")[2]
            fault = Fault(f"process {process}", "its part", why)
            _raise_told(message, f"process {process} could not write its part; nothing was committed", [fault])
        data = attempt.folder.read(_part_name(process)) or b""
        if xxhash.xxh3_128_hexdigest(data) != message:
            raise CheckpointError(
                f"process 0 cannot see what process {process} wrote; nothing was committed",
                [Fault(_part_name(process), f"digest {message}", f"{len(data)} bytes of another")],
                hint="all processes must save to storage that they share",
            )
        attempt.folder.unlink(_part_name(process))
        parts.append(msgspec.json.decode(data, type=Part))
    return parts


def _part_name(process: int) -> str:
    return f"part_{process}.json"


def _follow(
    target: _storage.Folder, manifest: Manifest, snapshot: Snapshot, group: _processes.Group, terms: Terms
) -> Manifest:
    """What every process but the first does: write its part, say so, and hear what became of it."""
    message = group.wait("attempt", process=0, phase="open")
    if message.startswith(("failed: ", "declined: ")):
        _raise_told(message, "process 0 could not begin")
    attempt = None
    try:
        attempt = _commit.join(target, *json.loads(message))
        part = msgspec.json.encode(_write_part(attempt, manifest, snapshot, group, terms))
        attempt.folder.write(_part_name(group.index), part)
        group.publish(f"part/{group.index}", xxhash.xxh3_128_hexdigest(part))
    except BaseException as error:
        abstain(group, _told(error))
        if outcome := group.heard("outcome"):  # Why the folder is gone, if it is.
            if attempt is not None:
                _commit.leave(attempt)
            _raise_told(outcome, f"process 0 did not commit {target}", cause=error)
        raise
    # For twice as long as process 0 waits for the others: they hear from it which one is missing.
    outcome = group.wait("outcome", process=0, phase="commit", seconds=2 * group.timeout)
    if outcome != "committed":
        _commit.leave(attempt)
        _raise_told(outcome, f"process 0 did not commit {target}")
    try:
        return _commit.load(target)
    except NotFound as error:
        raise CheckpointError(f"process 0 committed {target}, but it cannot be seen here: {error.summary}") from error
