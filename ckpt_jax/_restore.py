"""Restore: a checkpoint becomes a tree, on whatever sharding is asked for."""

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import msgspec
import numpy as np

from . import (
    _collector,
    _faults,
    _formats,
    _from_own,
    _leaves,
    _manifest,
    _names,
    _place,
    _processes,
    _reading,
    _rules,
    _storage,
    _structure,
    _tree,
    _units,
    _values,
    _view,
)
from ._formats import Found
from ._leaves import Target
from ._manifest import Leaf, Manifest
from .errors import Fault, Mismatch, Unsupported

ShardingLike = Any  # A Sharding, a tree prefix of them, or a function (name, shape, dtype) -> Sharding | None.


def restore(
    path: _storage.PathLike,
    like: Any = None,
    *,
    sharding: ShardingLike = None,
    only: str | Sequence[str] | None = None,
    rename: _rules.Rules | None = None,
    on_missing: Literal["error", "keep"] = "error",
    on_extra: Literal["error", "ignore"] = "error",
    cast: bool = False,
) -> Any:
    """Reads a checkpoint into the structure, kinds and shardings of `like`, every byte checked.

    Each process reads just the chunks that its devices need, each once, and the mesh need not be the one that saved.
    Every difference between the checkpoint and `like` is reported at once, before any array is read.

    Args:
        path: a committed checkpoint, such as `"gs://bucket/run7/1000"`; or one of Orbax's, which has no digests.
        like: the tree to fill: arrays, `jax.ShapeDtypeStruct`s, keys, Python values, live objects. Each leaf comes
            back as the kind of thing that stands there, on its sharding. It is not modified, but for live objects,
            whose state is set last. None gives nested dicts, lists and tuples of NumPy arrays and typed keys.
        sharding: where arrays go instead: a `Sharding`, a tree prefix of them, or a function
            `(name, shape, dtype) -> Sharding`; None leaves an array where `like` has it.
        only: globs of names, such as `"params.*"`; a name counts with all below it. Leaves of `like` that are not
            among them come back as they are.
        rename: rules by which the checkpoint's leaves get the names that `like` has, and are transposed, split, stacked
            or cast on the way: a TOML file, or a list of dicts; `docs/interop.md` tells them.
        on_missing: `"keep"` takes what `like` holds where the checkpoint has no such leaf.
        on_extra: `"ignore"` leaves out what the checkpoint has beyond `like`.
        cast: convert a leaf to the dtype that `like` holds, instead of refusing it. Values are rounded; one that
            would wrap or become infinite is a Mismatch. Floats become ints by cutting off what is behind the point.

    Returns:
        A new tree, bit for bit what was saved; its arrays own their memory and can be donated.

    Raises:
        NotFound: nothing is committed at `path`.
        Mismatch: `like` has another structure, shape or dtype.
        Corrupt: a chunk is not what the manifest says; names leaf, chunk and file.
        OSError: storage did not give what lies there; that is not known to be damage.
        Unsupported: a newer version wrote it, or `like` holds an abstract mesh.

    >>> import jax, jax.numpy as jnp, ckpt_jax as ck
    >>> _ = ck.save("memory://docs/restore", {"w": jnp.arange(4.0)})
    >>> ck.restore("memory://docs/restore", like={"w": jax.ShapeDtypeStruct((4,), "float32")})
    {'w': Array([0., 1., 2., 3.], dtype=float32)}
    >>> ck.restore("memory://docs/restore")
    {'w': array([0., 1., 2., 3.], dtype=float32)}
    """
    _check_arguments(on_missing, on_extra, sharding, cast)
    place = _storage.folder(path)
    with _collector.paused():
        found = _formats.load(place)
        if rename is not None:
            view = _names.apply(found.view or _from_own.view(place, found.manifest), rename)
            found = Found(view.manifest(), view)
        wanted = _check_only(only, place, found.manifest, like)
    if like is None:
        return _without_target(place, found, sharding, wanted)
    return fetch(
        place, found, like, sharding=sharding, wanted=wanted, on_missing=on_missing, on_extra=on_extra, cast=cast
    )()


def fetch(
    place: _storage.Folder,
    found: Found,
    like: Any,
    *,
    sharding: ShardingLike = None,
    wanted: Callable[[str], bool] = lambda name: True,
    on_missing: str = "error",
    on_extra: str = "error",
    cast: bool = False,
) -> Callable[[], Any]:
    """Reads all that `restore` reads; what it returns sets the live objects and gives the tree."""
    with _collector.paused():
        flat, kept, pairs = _matched(
            place,
            found.manifest,
            like,
            sharding=sharding,
            wanted=wanted,
            on_missing=on_missing,
            on_extra=on_extra,
            cast=cast,
        )
    values = kept | _read(place, found, pairs)

    def finish() -> Any:
        _set_live(pairs, values)
        return flat.unflatten(values)

    return finish


def _matched(
    place: _storage.Folder,
    manifest: Manifest,
    like: Any,
    *,
    sharding: ShardingLike,
    wanted: Callable[[str], bool],
    on_missing: str,
    on_extra: str,
    cast: bool,
) -> tuple[_tree.Flat, dict[str, Any], dict[str, tuple[Leaf, Target]]]:
    """`like` taken apart; the leaves of it that are kept; and for each other what is saved and what is wanted of it.

    Raises:
        Mismatch: they do not fit; tells all places.
    """
    flat = _tree.flatten(like)
    targets, faults = _leaves.targets({name: leaf for name, leaf in flat.leaves.items() if wanted(name)})
    targets = _on(targets, _sharding_of(sharding, flat))
    kept = {
        n: v for n, v in flat.leaves.items() if not wanted(n) or (on_missing == "keep" and n not in manifest.leaves)
    }
    saved = {name: leaf for name, leaf in manifest.leaves.items() if wanted(name)}
    faults += _structure_faults(manifest, flat, wanted, on_missing, on_extra)
    faults += _name_faults(saved, flat, kept, wanted, on_extra)
    pairs = {name: (saved[name], want) for name, want in targets.items() if name in saved}
    faults += (fault for name, (leaf, want) in pairs.items() if (fault := fits(name, leaf, want, cast=cast)))
    if faults:
        places = _units.several(len(faults), "place")
        raise Mismatch(
            f"{place} does not fit `like` in {places}",
            faults,
            hint=_advice(saved, flat, wanted, place),
        )
    return flat, kept, pairs


def _advice(saved: dict[str, Leaf], flat: _tree.Flat, wanted: Callable[[str], bool], place: _storage.Folder) -> str:
    """What to do about names that do not agree."""
    more = [name for name in saved if name not in flat.leaves]
    less = [name for name in flat.leaves if wanted(name) and name not in saved]
    advice = []
    # Both sides have odd names: is one of them just wrapped once more than the other?
    lower, upper = {name.partition(".")[2] for name in more}, {name.partition(".")[2] for name in less}
    if set(flat.leaves) & lower:
        under = next(name.partition(".")[0] for name in more if name.partition(".")[2] in flat.leaves)
        advice.append(f"the checkpoint has these leaves under {under!r}: like={{{under!r}: …}}")
    elif set(saved) & upper:
        over = next(name.partition(".")[0] for name in less if name.partition(".")[2] in saved)
        advice.append(f"`like` has these leaves under {over!r}, the checkpoint has not")
    else:
        advice += ['on_extra="ignore" leaves out what `like` has not, only= restores a part'] if more else []
        advice += ['on_missing="keep" keeps what the checkpoint has not'] if less else []
    return "; ".join([*advice, f"`ckpt-jax show {place}` lists what was saved"])


def _check_arguments(on_missing: str, on_extra: str, sharding: Any, cast: Any) -> None:
    if not isinstance(cast, bool):
        raise TypeError(f"cast is True or False (the dtypes are those of `like`), not {cast!r}")
    if isinstance(sharding, jax.sharding.Mesh):
        raise TypeError("sharding is a jax.sharding.Sharding, such as NamedSharding(mesh, spec), not a mesh")
    if on_missing not in ("error", "keep"):
        raise ValueError(f'on_missing is "error" or "keep", not {on_missing!r}')
    if on_extra not in ("error", "ignore"):
        raise ValueError(f'on_extra is "error" or "ignore", not {on_extra!r}')


def matcher(only: str | Sequence[str] | None, names: Collection[str] = ()) -> Callable[[str], bool]:
    """Whether a leaf's name is among those asked for: a glob takes what it names, and all below.

    Where a pattern is itself one of the `names`, or what they begin with, it stands for that alone.

    >>> asked = matcher("params.*.kernel")
    >>> asked("params.0.kernel"), asked("params.0.bias")
    (True, False)
    """
    if only is None:
        return lambda name: True
    patterns = [only] if isinstance(only, str) else list(only) if isinstance(only, Collection) else [only]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"only is a glob or a list of them, not {only!r}")

    def below(name: str, pattern: str) -> bool:
        return name == pattern or name.startswith(f"{pattern}.")

    literal = {pattern for pattern in patterns if any(below(name, pattern) for name in names)}
    return lambda name: any(
        below(name, p) if p in literal else fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(name, f"{p}.*")
        for p in patterns
    )


def _check_only(
    only: str | Sequence[str] | None, place: _storage.Folder, manifest: Manifest, like: Any
) -> Callable[[str], bool]:
    """Whether a name is asked for. A glob that names nothing is a slip of the pen: no restore of nothing for it."""
    matcher(only)  # Refuses what is no glob.
    patterns = [only] if isinstance(only, str) else list(only or ())
    names = manifest.leaves.keys() | (_tree.flatten(like).leaves.keys() if patterns and like is not None else set())
    idle = [pattern for pattern in patterns if not any(map(matcher(pattern, names), names))]
    if idle:
        raise Mismatch(
            f"{place} has no leaf that `only` names",
            [Fault(repr(pattern), "a leaf of this name", "none") for pattern in idle],
            hint=f"`ckpt-jax show {place}` lists what was saved",
        )
    return matcher(only, names)


# --- what fits what ---------------------------------------------------------------------------------------------------


def _structure_faults(
    manifest: Manifest, flat: _tree.Flat, wanted: Callable[[str], bool], on_missing: str, on_extra: str
) -> Iterator[Fault]:
    for side, fault in _structure.differences(manifest.tree, flat.structure, wanted):
        if not (side == "missing" and on_missing == "keep") and not (side == "extra" and on_extra == "ignore"):
            yield fault


def _name_faults(
    saved: dict[str, Leaf], flat: _tree.Flat, kept: dict[str, Any], wanted: Callable[[str], bool], on_extra: str
) -> Iterator[Fault]:
    for name in flat.leaves:
        if wanted(name) and name not in saved and name not in kept:
            yield Fault(name, "in the checkpoint", "missing", "in `like`, not in the checkpoint")
    if on_extra == "error":
        for name, leaf in saved.items():
            if name not in flat.leaves:
                yield Fault(name, "in `like`", str(leaf), f"{leaf} in the checkpoint, not in `like`")
    for name, value in kept.items():
        if isinstance(value, jax.ShapeDtypeStruct):
            yield Fault(name, "a value to keep", "a ShapeDtypeStruct", "is to be kept as in `like`, which has no value")


def fits(name: str, leaf: Leaf, want: Target, *, cast: bool) -> Fault | None:
    """What keeps a saved leaf from coming back as what is wanted, if anything does."""

    def fault(why: str = "") -> Fault:
        text = f"checkpoint has {leaf}, `like` wants {want}"
        return Fault(name, str(want), str(leaf), f"{text} ({why})" if why else text)

    if (problem := _unplaceable(leaf, want)) is not None:
        return Fault(name, "a sharding that can hold it", problem, problem)
    if leaf.kind == "scalar":
        return _scalar_fits(leaf, want, fault, cast=cast)
    if leaf.kind == "live":
        return fault() if want.kind != "live" else _live_fits(name, leaf)
    if leaf.kind == "key":
        if leaf.dtype != "uint32" or _leaves.impl_width(leaf.impl) != leaf.shape[-1]:
            return fault(f"this JAX has no PRNG implementation {leaf.impl!r} with such keys")
        if (want.kind, want.dtype, want.shape) == ("key", f"key<{leaf.impl}>", leaf.shape[:-1]):
            return None
        numbers = want.kind in ("jax", "numpy") and want.dtype == "uint32"
        return fault("restore it as a key; jax.random.key_data gives its numbers" if numbers else "")
    if want.kind == "scalar":
        return None if not leaf.shape and _same_sort(leaf.dtype, want.dtype) else fault()
    if want.kind == "key" and leaf.dtype == "uint32":
        return fault("restore it as uint32; jax.random.wrap_key_data makes a key of it")
    if want.kind not in ("jax", "numpy", "generic") or want.shape != leaf.shape:
        return fault()
    if want.dtype != leaf.dtype and not cast:
        return fault("cast=True converts it")
    if leaf.dtype.startswith("complex") and not want.dtype.startswith("complex"):
        return fault("no cast drops an imaginary part")
    if want.kind == "jax" and not cast and not _held(want.dtype):
        return fault("JAX holds no 64-bit values: set jax_enable_x64, restore it as NumPy, or cast=True")
    return None


def _unplaceable(leaf: Leaf, want: Target) -> str | None:
    """Why a leaf cannot go on the sharding that is asked for."""
    if want.sharding is None or want.kind not in ("jax", "key"):
        return None
    return _uneven(want.sharding, leaf.shape)


@functools.lru_cache(4096)
def _uneven(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> str | None:
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        raise Unsupported(
            "`like` is sharded over an abstract mesh, which has no devices to put arrays on",
            hint="give NamedSharding(mesh, spec) with a mesh from jax.make_mesh, or pass `sharding=`",
        )
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError) as error:  # IndexError: a 0-d array cut along an axis.
        if len(getattr(sharding, "spec", ())) > len(shape):
            return f"{list(shape)} has {len(shape)} axes, and its PartitionSpec {len(sharding.spec)}"  # pyright: ignore[reportAttributeAccessIssue]
        return f"{list(shape)} cannot be cut as its sharding says: {' '.join(str(error).split())[:400]}"
    return None


def _scalar_fits(leaf: Leaf, want: Target, fault: Callable[..., Fault], *, cast: bool) -> Fault | None:
    if want.kind == "scalar":
        return None if want.dtype == leaf.dtype else fault()
    if (
        want.kind not in ("jax", "numpy", "generic")
        or want.shape
        or leaf.dtype not in ("int", "float", "bool", "complex")
    ):
        return fault()
    value = _leaves.scalar(leaf)
    exact = _same_sort(want.dtype, leaf.dtype) and _exactly(value, want.dtype)
    if want.kind == "jax" and not _held(want.dtype):
        exact = False
    if exact:
        return None
    return (
        None
        if cast and _castable(value, want.dtype)
        else fault(
            f"{want.dtype} does not hold {_values.shown(value)}" + ("" if cast else "; cast=True takes what is nearest")
        )
    )


def _live_fits(name: str, leaf: Leaf) -> Fault | None:
    try:
        _leaves.live_state(leaf, *_processes.here())
    except ValueError as error:
        advice = 'to begin it anew, leave it out of `like` and restore with on_extra="ignore"'
        return Fault(name, "one state for each process", str(error), f"its checkpoint has {error}; {advice}")
    return None


_SORTS = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}


def _same_sort(dtype: str, scalar: str) -> bool:
    """Whether a dtype and a Python type are both of ints, or of floats, and so on."""
    if jax.numpy.issubdtype(np.dtype(dtype), np.floating):
        return scalar == "float"
    return _SORTS.get(np.dtype(dtype).kind) == scalar


def _exactly(value: Any, dtype: str) -> bool:
    try:
        with np.errstate(all="ignore"):
            held = np.asarray(value).astype(dtype) if not isinstance(value, int) else np.array(value, dtype)
    except (OverflowError, ValueError):
        return False
    back = held.item()  # Not `held == value`, which NumPy compares in the narrower type.
    return back == value or (value != value and back != back)  # noqa: PLR0124  NaN.


def _castable(value: Any, dtype: str) -> bool:
    if isinstance(value, complex) and not dtype.startswith("complex"):
        return False
    try:
        _place.converted(np.asarray(value), dtype)
    except (TypeError, ValueError, OverflowError, _place.Unfit):
        return False
    return True


@functools.lru_cache(64)
def _held_x64(dtype: str, x64: bool) -> bool:
    return bool(jax.dtypes.canonicalize_dtype(dtype) == np.dtype(dtype))


def _held(dtype: str) -> bool:
    """Whether a jax array can have this dtype, as JAX is set up now."""
    return _held_x64(dtype, _leaves.x64())


# --- where it goes ----------------------------------------------------------------------------------------------------


def _sharding_of(sharding: ShardingLike, flat: _tree.Flat) -> Callable[[str, Any, Any], Any]:
    """`sharding` in its three forms as a function of name, shape and dtype."""
    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        return lambda name, shape, dtype: sharding
    if callable(sharding):
        return sharding
    try:
        spread = jax.tree.broadcast(
            sharding, flat.unflatten(dict.fromkeys(flat.leaves, 0)), is_leaf=lambda x: x is None
        )
        by_name = _tree.flatten(jax.tree.map(_Held, spread, is_leaf=lambda x: x is None)).leaves
    except ValueError as error:
        text = " ".join(str(error).split())[:600].replace("broadcast_prefix prefix_tree", "sharding")
        raise Mismatch(
            "`sharding` is no prefix of `like`", [Fault("sharding", "a tree prefix of `like`", text)]
        ) from error
    return lambda name, shape, dtype: by_name[name].value


@dataclass(frozen=True, slots=True)
class _Held:
    """Keeps a None in a tree from being taken for a container."""

    value: Any


def _on(targets: dict[str, Target], sharding: Callable[[str, Any, Any], Any]) -> dict[str, Target]:
    """The targets with the shardings that were asked for beside `like`."""
    placed = {}
    for name, want in targets.items():
        if want.kind in ("jax", "key", "numpy", "generic"):
            try:
                found = sharding(name, want.shape, want.dtype)
            except Exception as error:
                error.add_note(f"raised by `sharding` for the leaf {name}, {want}")
                raise
            if found is not None:
                if not isinstance(found, jax.sharding.Sharding):
                    raise TypeError(f"sharding for {name} is a jax.sharding.Sharding or None, not {found!r}")
                kind = "key" if want.kind == "key" else "jax"
                placed[name] = msgspec.structs.replace(want, kind=kind, sharding=found, committed=True)
                continue
        placed[name] = want
    return placed


def _without_target(place: _storage.Folder, found: Found, sharding: ShardingLike, wanted: Callable[[str], bool]) -> Any:
    manifest = found.manifest
    saved = {name: leaf for name, leaf in manifest.leaves.items() if wanted(name)}
    flat = _tree.flatten(_structure.build(manifest.tree, _Held, wanted))
    of = _sharding_of(sharding, flat) if saved else lambda *_: None
    targets = {name: _leaves.default_target(leaf, None) for name, leaf in saved.items()}
    targets = _on(targets, of)
    for name, want in targets.items():
        if want.kind == "jax" and manifest.leaves[name].weak:
            targets[name] = msgspec.structs.replace(want, weak=True)
    pairs = {name: (leaf, targets[name]) for name, leaf in saved.items()}
    faults = [
        fault
        for name, (leaf, want) in pairs.items()
        if leaf.kind != "live" and (fault := fits(name, leaf, want, cast=False))
    ]
    if faults:
        raise Mismatch(f"{place} cannot be restored as asked in {len(faults)} places", faults)
    values = _read(place, found, pairs)
    for name, (leaf, _) in pairs.items():
        if leaf.kind == "live":
            states = _manifest.states(leaf) or [_leaves.live_state(leaf, 0, 1)]
            values[name] = states if len(states) > 1 else states[0]
    return _structure.build(manifest.tree, values.__getitem__, wanted)


def _set_live(pairs: dict[str, tuple[Leaf, Target]], values: dict[str, Any]) -> None:
    """Sets live objects last, and all or none: a restore that was refused has touched nothing."""
    live = {name: (leaf, want.like) for name, (leaf, want) in pairs.items() if leaf.kind == "live"}
    before = []
    for _, thing in live.values():
        with contextlib.suppress(Exception):  # A loader that cannot say where it is yet has nothing to go back to.
            before.append((thing, _leaves.get_state(thing)))
    for name, (leaf, thing) in live.items():
        try:
            _set(thing, _leaves.live_state(leaf, *_processes.here()))
        except Exception as error:
            for other, state in before:
                with contextlib.suppress(Exception):  # The one that refused may refuse this too.
                    _leaves.set_state(other, state)
            raise Mismatch(
                f"{name} does not take the state it had",
                [Fault(name, f"a {leaf.type} that takes its state", f"{type(error).__name__}: {error}")],
                hint="build it as it was built when the checkpoint was saved",
            ) from error
        values[name] = thing


def _set(thing: Any, state: Any) -> None:
    """Raises ValueError if what it says of itself afterwards is something else: it would start anew without a word."""
    _leaves.set_state(thing, state)
    try:
        found = _leaves.get_state(thing)
    except Exception:  # noqa: BLE001  It cannot say where it is before it is read from.
        return
    if _values.pack(found) != _values.pack(state):
        raise ValueError(f"it was set to {state!s:.200}, and says it is at {found!s:.200}")


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(place: _storage.Folder, found: Found, pairs: dict[str, tuple[Leaf, Target]]) -> dict[str, Any]:
    """The values of all leaves but live ones; every chunk is read once."""
    values: dict[str, Any] = {}
    stored = {name: pair for name, pair in pairs.items() if pair[0].stored}
    for name, (leaf, want) in pairs.items():
        if leaf.kind == "scalar":
            values[name] = _as_wanted(_leaves.scalar(leaf), want)
    if found.view is None and (faults := _faults.of_files(place, found.manifest)):
        raise _faults.damaged(place, faults)
    if stored:
        values |= _read_arrays(place, found, stored)
    for name in values:
        leaf, want = pairs[name]
        if leaf.type or _leaves.is_registered(want.like):
            values[name] = _leaves.decode_registered(values[name], leaf, want)
    return values


def _as_wanted(value: Any, want: Target) -> Any:
    """A Python value as a scalar or a 0-d array."""
    if want.kind == "scalar" or want.kind not in ("jax", "numpy", "generic"):
        return value
    array = (
        _place.converted(np.asarray(value), want.dtype) if not isinstance(value, int) else _from_int(value, want.dtype)
    )
    if want.kind == "jax":
        return _place.place(array, want)
    return array[()] if want.kind == "generic" else array


def _from_int(value: int, dtype: str) -> np.ndarray:
    return np.array(value, dtype) if _exactly(value, dtype) else _place.converted(np.asarray(value), dtype)


def _chunks_of(
    place: _storage.Folder, found: Found, chunks: Iterator[_reading.Wanted], use: _reading.Use, room: Any
) -> Iterator[tuple[_reading.Wanted, Any, _reading.Found]]:
    """Chunks as `_reading.read` gives them, of a checkpoint in any format."""
    if found.view is None:
        source = _reading.Source(place / found.manifest.state, found.manifest.state_files)
        return _reading.read(chunks, [source], use, room=room)
    return _view.read(found.view, chunks, use, room)


def _read_arrays(place: _storage.Folder, found: Found, pairs: dict[str, tuple[Leaf, Target]]) -> dict[str, Any]:
    staging = _place.Staging(_reading.WINDOW // 2)
    plans: dict[str, _place.Plan] = {}
    values: dict[str, Any] = {}
    unfit: dict[str, Fault] = {}
    bad: list[tuple[_reading.Wanted, _reading.Found]] = []

    def requests() -> Iterator[_reading.Wanted]:
        for name, (leaf, want) in pairs.items():
            plan = _place.Plan(leaf, want, staging)
            if plan.chunks:
                plans[name] = plan
                yield from _reading.wanted(name, leaf, plan.chunks)
            else:
                values[name] = plan.finish()

    def room(chunk: _reading.Wanted, force: bool) -> bool:
        return plans[chunk.name].reserve(chunk.coords, force=force)

    def misfit(name: str, plan: _place.Plan, error: _place.Unfit) -> None:
        unfit[name] = Fault(name, f"values that fit in {plan.want.dtype}", str(error))

    def use(chunk: _reading.Wanted, data: memoryview) -> bool:
        plan = plans[chunk.name]
        try:
            return plan.add(chunk.coords, data)
        except _place.Unfit as error:
            misfit(chunk.name, plan, error)
            return False

    def finish(name: str) -> None:
        plan = plans.pop(name)
        try:
            values[name] = plan.finish()
        except _place.Unfit as error:
            misfit(name, plan, error)

    for chunk, done, other in _chunks_of(place, found, requests(), use, room):
        if done is None:
            bad.append((chunk, other))
        elif done and plans[chunk.name].kept is None:
            finish(chunk.name)
    if bad:
        raise _faults.unreadable(place, found.manifest, bad)
    for name in [name for name in plans if name not in unfit]:
        finish(name)
    if unfit:
        raise Mismatch(
            f"a cast would change what is saved at {place}",
            [unfit[name] for name in pairs if name in unfit],  # They were found in any order.
            hint="restore such leaves in a wider dtype",
        )
    return values
