"""When a save is due: at some steps, by the clock, or as often as its price and the failures say (no JAX)."""

import collections
import math
import numbers
import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from . import _events, _units, plan
from ._storage import Folder

FIRST = 2  # Saves before the interval is theirs: a process's first one compiles, allocates and opens.
RECENT = 9  # Saves whose median counts: enough that one slow save changes nothing.
TOLD = 0.25  # By so large a part the interval changes before that is told again.


@dataclass(frozen=True, slots=True, repr=False)
class Every:
    """How often to save: at every step that `steps` divides, and whenever so many minutes have gone by.

    Attributes:
        steps: None for no rule by steps.
        minutes: since the save before was begun; None for no rule by time. With several processes, the first one
            looks at the clock, and all save at the same step soon after.
        mtbf: seconds between failures that are expected, where the interval is the best one for them (`optimal`).
        jitter: the part of the interval by which it is longer or shorter, each time anew.
        least, most: seconds between which that interval stays.

    >>> import ckpt_jax as ck
    >>> ck.Every(steps=100)
    Every(steps=100)
    """

    steps: int | None = None
    minutes: float | None = None
    mtbf: float | None = None
    jitter: float = 0.0
    least: float = 60.0
    most: float = 4 * 3600.0

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None and self.mtbf is None:
            raise ValueError("Every takes steps=, minutes=, or both; Every.optimal takes mtbf=")
        if self.steps is not None and (isinstance(self.steps, bool) or not isinstance(self.steps, int)):
            raise TypeError(f"steps is an int, not {self.steps!r}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps is 1 or more, not {self.steps}")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes is more than 0, not {self.minutes!r}")
        if self.minutes is not None and self.mtbf is not None:
            raise ValueError("either minutes or mtbf says how often")
        if isinstance(self.mtbf, bool):
            raise TypeError(f"mtbf is a number of seconds, not {self.mtbf!r}")
        if self.mtbf is not None and not 0 < self.mtbf < math.inf:
            raise ValueError(f"mtbf is a duration of more than 0, such as 44 hours, not {self.mtbf!r} s")
        if isinstance(self.jitter, bool) or not isinstance(self.jitter, numbers.Real):
            raise TypeError(f"jitter is a number, not {self.jitter!r}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter is a part of the interval, from 0 to below 1, not {self.jitter!r}")
        if not 0 < self.least <= self.most < math.inf:
            raise ValueError(f"least and most are durations, in this order, not {self.least!r} s and {self.most!r} s")

    @classmethod
    def optimal(
        cls, mtbf: float | str, *, jitter: float = 0.1, least: float | str = 60.0, most: float | str = "4 h"
    ) -> "Every":
        """As often as costs the least: √(2 · pause · MTBF), from what saves take here and how often this run failed.

        The first two saves come after `least` each, and say what one takes. From then on the interval is the best one
        for the median pause of the last saves, never below what a whole save takes; the run tells it as the event
        `planned`, with the sum. `mtbf` counts as one failure that was seen, beside those that `events.jsonl` tells of.

        Args:
            mtbf: the time between failures that is expected of the whole run: seconds, or a text such as `"44h"`.
            jitter: the part of the interval by which it is longer or shorter, each time anew, so that many runs that
                began together do not go on saving in the same minute; its seed is the run's folder.
            least, most: the interval stays between them: seconds, or a text such as `"10 min"`.

        >>> import ckpt_jax as ck
        >>> ck.Every.optimal(mtbf="44h", most="1 h")
        Every(mtbf=158400.0, jitter=0.1, most=3600.0)
        """
        named = {"mtbf": mtbf, "least": least, "most": most}
        seconds = {}
        for name, value in named.items():
            try:
                seconds[name] = _units.parse(value, "seconds")
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return cls(jitter=jitter, **seconds)

    def __repr__(self) -> str:
        said = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Every({', '.join(f'{name}={value!r}' for name, value in said)})"

    @property
    def by_clock(self) -> bool:
        """Whether one process looks at the clock for all."""
        return self.minutes is not None or self.mtbf is not None


class Pace:
    """When the clock says that a save is due, in the process that looks at it.

    Args:
        every: the rule.
        root: the run's folder, whose events tell of failures, and whose name is the seed of the jitter.
        tell: is given the facts of the event `planned`.
        clock: seconds, from anywhere; None for the system's.
    """

    def __init__(self, every: Every, root: Folder, tell: Callable[..., Any], clock: Callable[[], float] | None = None):
        self._every, self._tell, self._clock = every, tell, clock or time.monotonic
        self._failures, self._before = 0, 0.0
        if every.mtbf is not None:
            seen = plan.fit_mtbf(_events.read(root))
            self._failures, self._before = seen.failures, seen.seconds
        self._start = self._last = self._clock()
        self._pauses: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._writes: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._chance = random.Random(root.url)  # A text: the same seed in each life of the run.
        self._told: float | None = None
        self._lock = threading.Lock()  # The training loop asks, the writer's thread learns.
        self._now = self._jittered(every.minutes * 60 if every.minutes is not None else every.least)

    def begun(self) -> None:
        """A save was begun, or the run goes on from one: the time until the next is counted from here."""
        with self._lock:
            self._last = self._clock()
            if self._every.mtbf is not None:
                self._now = self._jittered(self.interval())

    def is_due(self, *, writing: bool = False) -> bool:
        """Whether a save is due; by the best interval never one that would be skipped, as one is being written."""
        if writing and self._every.mtbf is not None:
            return False
        with self._lock:
            return self._clock() - self._last >= self._now

    def learn(self, pause: float, write: float) -> None:
        """A save has ended: training stood still for `pause` seconds, and the rest took `write`."""
        if self._every.mtbf is None:
            return
        with self._lock:
            self._pauses.append(pause)
            self._writes.append(write)
            mtbf = self.mtbf()
            interval = self.interval(mtbf)
            self._now = self._jittered(interval)
            enough = len(self._pauses) >= FIRST
        if enough and (self._told is None or abs(interval - self._told) > TOLD * self._told):
            self._told = interval
            pause, write = self._takes()
            facts = {"interval": interval, "pause": pause, "write": write, "mtbf": mtbf}
            self._tell(message=self._sum(pause, write, mtbf, interval), seconds=facts)

    def mtbf(self) -> float:
        """Seconds between failures: those that were seen, and the one that stands for what is expected."""
        assert self._every.mtbf is not None
        ran = self._before + self._clock() - self._start
        return (self._every.mtbf + ran) / (1 + self._failures)

    def interval(self, mtbf: float | None = None) -> float:
        """Seconds from the beginning of one save to that of the next, without jitter."""
        if len(self._pauses) < FIRST:
            return self._least()
        pause, _ = self._takes()
        return max(self._least(), min(plan.young(pause, mtbf or self.mtbf()), self._every.most))

    def _takes(self) -> tuple[float, float]:
        """The pause and the write of a save like the last ones: of two the shorter, as a run's first takes longer."""
        return statistics.median_low(self._pauses), statistics.median_low(self._writes)

    def _least(self) -> float:
        """Below this saves would be skipped, as the one before is still being written."""
        return max(self._every.least, sum(self._takes()) if self._pauses else 0.0)

    def _jittered(self, interval: float) -> float:
        if not self._every.jitter:
            return interval
        part, least, most = self._every.jitter * self._chance.uniform(-1, 1), self._least(), self._every.most
        if not least <= interval * (1 + part) <= max(most, interval):
            part = -part  # Not cut off at a bound, where runs that began together would meet again.
        return max(least, min(interval * (1 + part), max(most, interval)))

    def _sum(self, pause: float, write: float, mtbf: float, interval: float) -> str:
        named = _units.duration
        best = plan.young(pause, mtbf)
        root = f"√(2 × {named(pause)} pause × {named(mtbf)} between failures)"
        text = f"save every {named(interval)}: {root} = {named(best)}"
        if interval > min(best, self._every.most):
            why = "what a save takes" if pause + write >= self._every.least else "the least that was asked for"
            text += f", and at least {named(interval)}, {why}"
        elif interval < best:
            text += f", and at most {named(interval)} as was asked for"
        seen = f"{self._failures} failures were" if self._failures != 1 else "1 failure was"
        return f"{text}; {seen} seen"
