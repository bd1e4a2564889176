"""How often to save: what a save costs against the work that a failure loses, in seconds and bytes (no JAX).

An interval is the time from the beginning of one save to that of the next. Training stands still for `pause` of it;
the rest of the save, `write`, goes on behind the training, and a checkpoint counts once that is over. A failure loses
what was done since the newest checkpoint that counts was begun: half an interval on average, and `write`.

The sums to first order are those of Young; they hold while the interval is short against the time between failures.

>>> import ckpt_jax as ck
>>> pause, mtbf = 5.0, 86_400.0  # A save holds training up for 5 s; a failure a day.
>>> best = ck.plan.optimum(pause, mtbf)
>>> f"every {best / 60:.0f} min: {ck.plan.waste(best, pause, mtbf).total:.1%} of the time"
'every 15 min: 1.1% of the time'
"""

import itertools
import math
import numbers
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Bytes a parameter: weights in bfloat16, and what the optimizer keeps in float32.
RECIPES: dict[str, dict[str, float]] = {
    "bf16-adam": {"weights": 2, "master": 4, "moments": 8},
    "bf16-adam-no-master": {"weights": 2, "moments": 8},
    "fp32-adam": {"weights": 4, "moments": 8},
    "bf16-weights": {"weights": 2},
    "fp32-weights": {"weights": 4},
}


def _check(**named: float) -> None:
    """Raises ValueError for what is no duration: negative, NaN or infinite; `mtbf` may be infinite, and not 0."""
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} is a number of seconds, not {value!r}")
        endless = name == "mtbf" and value == math.inf
        if not (endless or (_is_finite(value) and value >= 0)):
            raise ValueError(f"{name} is a number of seconds, 0 or more, not {value!r}")
        if name in ("mtbf", "interval") and value == 0:
            raise ValueError(f"{name} is more than 0 seconds")


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # An int that no float holds.
        return False


# --- the best interval ------------------------------------------------------------------------------------------------


def young(pause: float, mtbf: float) -> float:
    """The interval with the least waste, to first order: √(2 · pause · mtbf), in seconds.

    Args:
        pause: seconds for which a save holds training up.
        mtbf: mean time between failures, in seconds.

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974).

    >>> round(young(196, 86_400) / 60)
    97
    """
    _check(pause=pause, mtbf=mtbf)
    return math.sqrt(2 * pause * mtbf) if pause else 0.0


def daly(pause: float, mtbf: float) -> float:
    """The time to train between two saves, in seconds, that costs the least if failures have no memory.

    √(2·C·M) · (1 + ⅓ √(C/2M) + ⅑ C/2M) − C for C < 2M, else M. It leaves the pause itself out, which `young` and
    `optimum` count as part of the interval.

    Args:
        pause: C, seconds for which a save holds training up.
        mtbf: M, mean time between failures, in seconds.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006).

    >>> round(daly(30, 44.5 * 3600) / 60)
    51
    """
    _check(pause=pause, mtbf=mtbf)
    if pause == 0 or mtbf == math.inf:
        return 0.0 if pause == 0 else math.inf
    half = pause / (2 * mtbf)
    if half >= 1:
        return mtbf
    return math.sqrt(2 * pause * mtbf) * (1 + math.sqrt(half) / 3 + half / 9) - pause


def optimum(pause: float, mtbf: float, *, write: float = 0.0, least: float = 0.0) -> float:
    """The interval, in seconds, that makes `waste` least and that a save fits in: `young`, but never below the write.

    Args:
        pause: seconds for which a save holds training up.
        mtbf: mean time between failures, in seconds.
        write: seconds that the rest of the save takes behind the training; a new one begins after the one before.
        least: seconds below which nobody wants it.

    >>> round(optimum(5, 86_400)), optimum(5, 86_400, write=1200)
    (930, 1205)
    """
    _check(pause=pause, mtbf=mtbf, write=write, least=least)
    return max(young(pause, mtbf), pause + write, least)


# --- what an interval costs -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waste:
    """Shares of the time that is paid for; each is 0 or more, and to first order they add up.

    Attributes:
        stall: training stands still for saves.
        lost: work that is done a second time.
        restart: failures are noticed, and runs start again.
    """

    stall: float
    lost: float
    restart: float = 0.0

    @property
    def total(self) -> float:
        """All of it; 1 at most, where nothing would ever be done."""
        return min(1.0, self.stall + self.lost + self.restart)


@dataclass(frozen=True, slots=True)
class Tier:
    """One place that checkpoints go to, and how often.

    Attributes:
        interval: seconds from the beginning of one save to that of the next.
        pause: seconds of it in which training stands still.
        write: seconds that the rest of the save takes behind the training.
        restart: seconds from a failure's notice until the run trains on from here.
    """

    interval: float
    pause: float
    write: float = 0.0
    restart: float = 0.0

    def __post_init__(self) -> None:
        _check(interval=self.interval, pause=self.pause, write=self.write, restart=self.restart)


def waste(
    interval: float, pause: float, mtbf: float, *, write: float = 0.0, restart: float = 0.0, detection: float = 0.0
) -> Waste:
    """The share of the time that saves and failures take, to first order.

    pause / interval + (interval / 2 + write) / mtbf + (detection + restart) / mtbf. It is too large where the interval
    comes near the MTBF, as it lets a failure hit work that an earlier one has stopped: `goodput` is exact there.

    Args:
        interval: seconds from the beginning of one save to that of the next.
        pause: seconds for which a save holds training up.
        mtbf: mean time between failures, in seconds; `math.inf` for none.
        write: seconds that the rest of the save takes behind the training; 0 if training waits for all of it.
        restart: seconds from a failure's notice until the run trains on.
        detection: seconds until a failure is noticed.

    Source: Young 1974, as for `young`; the term for the write is the age of a checkpoint when it begins to count.

    >>> found = waste(7200, 196, 86_400)
    >>> f"{found.stall:.1%} stall + {found.lost:.1%} lost = {found.total:.1%}"
    '2.7% stall + 4.2% lost = 6.9%'
    """
    _check(mtbf=mtbf, detection=detection)
    return tiered([(mtbf, Tier(interval, pause, write, restart))], detection=detection)


def tiered(classes: Iterable[tuple[float, Tier | Sequence[Tier]]], *, detection: float = 0.0) -> Waste:
    """As `waste`, for failures of several classes, each of which a run comes back from by way of other tiers.

    Args:
        classes: for each class of failures the mean time between them, in seconds, and the tier that survives them; or
            all that do: the run goes on from the one whose checkpoints are the newest. One tier is one object.
        detection: seconds until a failure is noticed.

    >>> local, shared = Tier(300, 1, write=4, restart=60), Tier(7200, 5, write=196, restart=600)
    >>> f"{tiered([(100_000, [local, shared]), (600_000, shared)]).total:.2%}"
    '1.35%'
    """
    survive = [(mtbf, [found] if isinstance(found, Tier) else list(found)) for mtbf, found in classes]
    tiers = {id(tier): tier for _, found in survive for tier in found}
    lost = restart = 0.0
    for mtbf, found in survive:
        _check(mtbf=mtbf, detection=detection)
        age, again = _newest(found)
        lost += age / mtbf
        restart += (detection + again) / mtbf
    return Waste(sum(tier.pause / tier.interval for tier in tiers.values()), lost, restart)


_STEPS = 8  # Of a piece in which the chances are polynomials, which Simpson's rule then integrates.


def _newest(tiers: Sequence[Tier]) -> tuple[float, float]:
    """The age of the newest checkpoint of all tiers, and how long a start from there takes: seconds, on average.

    A tier's newest one is between `write` and `write + interval` old, each age as likely; tiers save independently.
    """
    if len(tiers) == 1:
        return tiers[0].interval / 2 + tiers[0].write, tiers[0].restart

    def older(tier: Tier, age: float) -> float:
        return min(1.0, max(0.0, (tier.write + tier.interval - age) / tier.interval))

    ends = sorted({0.0} | {end for tier in tiers for end in (tier.write, tier.write + tier.interval)})
    mean = again = 0.0
    for low, high in itertools.pairwise(ends):
        width = (high - low) / _STEPS
        middle = (low + high) / 2
        for step in range(_STEPS + 1):
            weight = width / 3 * (1 if step in (0, _STEPS) else 4 if step % 2 else 2)
            chances = [older(tier, low + step * width) for tier in tiers]
            mean += weight * math.prod(chances)
            for at, tier in enumerate(tiers):
                if tier.write <= middle <= tier.write + tier.interval:  # It may be the newest, and is just so old.
                    others = math.prod(chances[:at] + chances[at + 1 :])
                    again += weight * others * tier.restart / tier.interval
    return mean, again


def goodput(
    interval: float, pause: float, mtbf: float, *, write: float = 0.0, restart: float = 0.0, detection: float = 0.0
) -> float:
    """The share of the time in which a run gets ahead: exact for failures without memory, also near the MTBF.

    With τ, C, W, M for interval, pause, write and mtbf, and D for restart and detection together: the first save after
    a start comes after τ of training, each other gains τ − C; the k-th comes to count if nothing fails for
    k · τ + C + W, which has the chance e^(−(k · τ + C + W) / M); and a cycle from failure to failure takes
    M · e^(D/M), as one may also come while the run starts again. Together
    e^(−(τ + C + W + D) / M) · (τ + (τ − C) / (e^(τ/M) − 1)) / M.

    Args: as of `waste`.

    Source: as Daly 2006, for `daly`, here with a write behind the training, and no save right after a start.

    >>> f"{goodput(7200, 196, 86_400):.2%}"
    '93.28%'
    """
    _check(interval=interval, pause=pause, mtbf=mtbf, write=write, restart=restart, detection=detection)
    interval = max(interval, pause)
    later = interval - pause
    if mtbf == math.inf:
        return later / interval
    if interval / mtbf > 700:  # e^700 is near what a float holds.
        return 0.0
    ratio = interval / mtbf
    gained = ratio + later / mtbf / math.expm1(ratio)
    return math.exp(-(interval + pause + write + restart + detection) / mtbf) * gained


# --- failures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """A mean time between failures that was observed.

    Attributes:
        mtbf: seconds; `math.inf` if nothing failed.
        low, high: its confidence interval, in seconds.
        failures: how many there were,
        seconds: in this time.
        confidence: the share of such intervals that hold the true value.
    """

    mtbf: float
    low: float
    high: float
    failures: int
    seconds: float
    confidence: float = 0.9


def mtbf(failures: float, seconds: float, *, devices: float = 1, to: float = 1) -> float:
    """The mean time between failures, in seconds, from a count, and scaled to another number of devices.

    Args:
        failures: how many there were,
        seconds: in this time,
        devices: on so many devices;
        to: on so many it is asked for.

    >>> found = mtbf(466, 54 * 86_400, devices=16_384, to=1024)
    >>> f"{86_400 / found:.2f} a day, {found / 3600:.0f} h"
    '0.54 a day, 44 h'
    """
    _check(seconds=seconds)
    if not (all(map(_is_finite, (failures, devices, to))) and failures >= 0 and devices > 0 and to > 0):
        raise ValueError(f"failures, devices and to are counts, not {failures!r}, {devices!r} and {to!r}")
    return math.inf if failures == 0 else seconds / failures * devices / to


def fit(failures: int, seconds: float, confidence: float = 0.9) -> Fit:
    """The mean time between failures with the interval that it lies in, if failures have no memory.

    Source: Epstein and Sobel 1953; the bounds are 2T/χ² with 2n + 2 and 2n degrees of freedom.

    >>> found = fit(10, 240 * 3600)
    >>> [round(s / 3600) for s in (found.low, found.mtbf, found.high)]
    [14, 24, 44]
    """
    from scipy.special import gammainccinv, gammaincinv  # Here: it takes a while, and few ask.

    _check(seconds=seconds)
    if isinstance(failures, bool) or not isinstance(failures, int) or failures < 0:
        raise ValueError(f"failures is an int, 0 or more, not {failures!r}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is between 0 and 1, not {confidence!r}")
    if seconds == 0:  # A clock that went back: nothing was observed.
        return Fit(math.inf, 0.0, math.inf, failures, 0.0, confidence)
    tail = (1 - confidence) / 2
    low = seconds / float(gammainccinv(failures + 1, tail))
    high = seconds / float(gammaincinv(failures, tail)) if failures else math.inf
    return Fit(mtbf(failures, seconds), low, high, failures, seconds, confidence)


def fit_mtbf(events: Iterable[Any], confidence: float = 0.9) -> Fit:
    """The mean time between failures of a run, from its events: lines of `events.jsonl` as dicts, or `Event`s.

    A failure is a `Saver` that was started and did not tell of its end before the next one was, or told that an error
    ended it; Ctrl-C and `sys.exit` are none. The time is that from each start to its end; where none was told, to half
    of the median time between commits after the last thing that was. Only the first process's events count. A clock
    that jumps by more than a month within a life is not believed.

    >>> told = [(0, "started"), (3600, "committed"), (4000, "started"), (9000, "committed"), (9100, "closed")]
    >>> found = fit_mtbf({"time": time, "kind": kind, "process": 0} for time, kind in told)
    >>> found.failures, found.seconds
    (1, 8700.0)
    """
    failures, seconds = 0, 0.0
    start = last = commit = None
    gaps, untold = list[float](), list[float]()  # Between commits of one life; from a life's last word to the next.
    for event in events:
        names = ("time", "kind", "process", "message")
        told = event if isinstance(event, Mapping) else {name: getattr(event, name, None) for name in names}
        if told.get("process", 0) != 0 or told.get("time") is None or told.get("kind") is None:
            if not isinstance(event, Mapping) and not hasattr(event, "kind"):
                raise TypeError(f"events are dicts or Events, not {event!r:.80}")
            continue
        if not _is_finite(told["time"]):
            raise ValueError(f"an event's time is a number of seconds, not {told['time']!r:.80}")
        time, kind = float(told["time"] or 0.0), told["kind"]
        if last is not None and kind != "started" and time - last > JUMP:
            start = None if start is None else start + (time - last)
            commit = None
        if kind == "started":
            if start is not None and last is not None:  # The one before told of no end.
                failures += 1
                seconds += max(0.0, last - start)
                untold.append(max(0.0, time - last))
            start, commit = time, None
        if kind == "committed":
            gaps += [max(0.0, time - commit)] if commit is not None else []
            commit = time
        last = time
        if kind == "closed" and start is not None:
            seconds += max(0.0, time - start)
            failures += bool(_ERROR.match(str(told.get("message", ""))))
            start = None
    if start is not None and last is not None:  # It runs still, or nobody knows yet.
        seconds += max(0.0, last - start)
    half = statistics.median(gaps) / 2 if gaps else 0.0
    return fit(failures, seconds + sum(min(half, gap) for gap in untold), confidence)


JUMP = 30.5 * 86_400.0  # Seconds without an event that no run keeps silent for.
_ERROR = re.compile(r"after (?!KeyboardInterrupt\b|SystemExit\b)")


# --- bytes ------------------------------------------------------------------------------------------------------------


def state_bytes(what: Any, recipe: str | Mapping[str, float] = "bf16-adam") -> float:
    """The size of a training state, in bytes.

    Args:
        what: the number of parameters; or, for the exact size, a tree of arrays or of `jax.ShapeDtypeStruct`s, or a
            checkpoint's `Manifest`.
        recipe: of a number: bytes that are kept for each parameter, by purpose, or the name of one of `RECIPES`.

    >>> state_bytes(70e9), state_bytes(70e9, {"weights": 2})
    (980000000000.0, 140000000000.0)
    >>> import numpy as np
    >>> state_bytes({"w": np.zeros((3, 4), np.float32), "step": 7})
    48.0
    """
    if hasattr(what, "leaves") and hasattr(what, "nbytes"):
        return float(what.nbytes)
    if what is None or isinstance(what, (bool, str)):
        raise TypeError(f"a state is a number of parameters, a tree or a Manifest, not {what!r}")
    if isinstance(what, complex):
        raise TypeError(f"a number of parameters is no complex one: {what!r}")
    if not isinstance(what, numbers.Real):
        return _tree_bytes(what)
    if not (_is_finite(what) and float(what) >= 0):
        raise ValueError(f"a number of parameters is 0 or more, not {what!r:.80}")
    count = float(what)
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise ValueError(f"recipe is one of {', '.join(RECIPES)}, or a mapping, not {recipe!r}")
        recipe = RECIPES[recipe]
    if not isinstance(recipe, Mapping):
        raise TypeError(f"recipe is a name or a mapping from purposes to bytes, not {recipe!r:.80}")
    if not all(isinstance(each, numbers.Real) and _is_finite(each) and float(each) >= 0 for each in recipe.values()):
        raise ValueError(f"a recipe's bytes a parameter are 0 or more, not {dict(recipe)!r:.200}")
    return count * math.fsum(recipe.values())


def _tree_bytes(tree: Any) -> float:
    import jax  # Who has a tree has it.
    import numpy as np

    total = 0.0
    for leaf in jax.tree.leaves(tree):
        if jax.numpy.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)  # noqa: PLW2901
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
            total += math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
    return total


def storage(
    size: float,
    *,
    length: float,
    interval: float | None = None,
    last: int | None = None,
    daily: int | None = 0,
) -> float:
    """The bytes that checkpoints take at the end of a run. While one is written there is one more.

    Args:
        size: bytes of one.
        length: seconds of the run.
        interval: seconds between two: there are no more than that. None if that is not known, and `last` says all.
        last: how many of the newest are kept; None for all.
        daily: for how many days the last of the day is kept besides; None for as long as the run.

    >>> day = 86_400
    >>> storage(0.98e12, length=30 * day, interval=7200) / 1e12
    352.8
    >>> storage(0.98e12, length=30 * day, last=3, daily=None) / 1e12
    32.34
    """
    _check(length=length, size=size)
    if (last is not None and last < 1) or (daily is not None and daily < 0):
        raise ValueError(f"last is 1 or more, daily 0 or more, not {last!r} and {daily!r}")
    if interval is not None:
        _check(interval=interval)
        if not _is_finite(length / interval):
            raise ValueError(f"interval is too short for so long a run: {interval!r} s of {length!r}")
    every = math.inf if interval is None else max(1, math.floor(length / interval))
    if last is None:
        if interval is None:
            raise ValueError("where all are kept, interval says how many that is")
        return size * every
    days = math.ceil(length / 86_400)
    return size * min(every, last + (days if daily is None else min(daily, days)))


def bandwidth(size: float, seconds: float) -> float:
    """The bytes a second that so many bytes in so many seconds need.

    >>> bandwidth(1e12, 125) / 1e9
    8.0
    """
    _check(seconds=seconds, size=size)
    return math.inf if seconds == 0 else size / seconds


def last_save(pause: float, write: float) -> tuple[float, float]:
    """The seconds that a last save takes before a preemption: at best, and where one has just begun.

    >>> last_save(5, 30)
    (35, 65)
    """
    _check(pause=pause, write=write)
    return pause + write, pause + 2 * write
