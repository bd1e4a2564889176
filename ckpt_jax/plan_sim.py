"""A run that fails at random, simulated: what an interval costs where the sums of `plan` leave something out.

Needs simpy (`pip install "ckpt_jax[plan]"`). Times are in seconds; the same seed gives the same run.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from .plan import Tier

MOST = 1e8  # Saves and failures of a run: hours of simulation.


@dataclass(frozen=True, slots=True)
class Failures:
    """One class of failures.

    Attributes:
        mtbf: mean seconds between two.
        tier: which of the run's tiers survives them: a number from 0 on.
        shape: of a Weibull distribution: 1 has no memory; below 1 failures come soon after a repair, or not for long.
        takes: nodes that are gone with it, until they are repaired.
    """

    mtbf: float
    tier: int = 0
    shape: float = 1.0
    takes: int = 0

    def __post_init__(self) -> None:
        if not (self.mtbf > 0 and 0.1 <= self.shape <= 100):
            raise ValueError(f"mtbf is more than 0, shape between 0.1 and 100: {self}")
        if not all(isinstance(count, int) and 0 <= count <= 10_000 for count in (self.tier, self.takes)):
            raise ValueError(f"tier and takes are whole numbers from 0 to 10,000: {self}")

    def next(self, chance: random.Random) -> float:
        """Seconds until the next one."""
        if self.mtbf == math.inf:
            return math.inf
        return chance.weibullvariate(self.mtbf / math.gamma(1 + 1 / self.shape), self.shape)


@dataclass(frozen=True, slots=True)
class Run:
    """A run to simulate.

    Attributes:
        length: seconds.
        tiers: where checkpoints go, and how often.
        failures: what fails.
        detection: seconds until a failure is noticed.
        spares: nodes that stand ready for those that are lost; None for as many as are needed.
        repair: seconds until a lost node is a spare again.
        corrupt: the chance that the newest checkpoint cannot be read when it is needed, and the one before is taken;
            0.5 at most.
    """

    length: float
    tiers: Sequence[Tier]
    failures: Sequence[Failures]
    detection: float = 0.0
    spares: int | None = None
    repair: float = 0.0
    corrupt: float = 0.0

    def __post_init__(self) -> None:
        if not self.tiers or any(failure.tier >= len(self.tiers) for failure in self.failures):
            raise ValueError("there is a tier at least, and a failure's tier is one of them")
        if not (0 < self.length < math.inf and self.repair >= 0 and self.detection >= 0 and 0 <= self.corrupt <= 0.5):
            raise ValueError("length is more than 0 s, repair and detection 0 or more, corrupt 0.5 at most")
        rates = [1 / tier.interval for tier in self.tiers]
        rates += [(1 + failures.takes) / failures.mtbf for failures in self.failures]
        if self.length * sum(rates) > MOST:
            raise ValueError(
                f"the run has more than {MOST:,.0f} saves and failures: length, interval and mtbf are seconds"
            )
        if self.spares is not None and not (type(self.spares) is int and self.spares >= 0):
            raise ValueError(f"spares is a number of nodes, not {self.spares!r}")


@dataclass(slots=True)
class Outcome:
    """What came of a run, in seconds; they add up to its length.

    Attributes:
        trained: work that counts in the end.
        stall: in saves.
        lost: work that is done a second time.
        restart: until failures were noticed and the run trained on.
        waiting: for a node, as there was no spare.
        commits, skipped: saves that came to count, and that were due while one was being written.
        failures: how many of each class.
    """

    trained: float = 0.0
    stall: float = 0.0
    lost: float = 0.0
    restart: float = 0.0
    waiting: float = 0.0
    commits: int = 0
    skipped: int = 0
    failures: list[int] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """The share of the time in which the run got ahead."""
        return self.trained / (self.trained + self.stall + self.lost + self.restart + self.waiting)


def simulate(run: Run, seed: int = 0) -> Outcome:
    """One run, from its first step to its length.

    >>> day = 86_400.0
    >>> run = Run(30 * day, [Tier(7200, 196)], [Failures(day)])
    >>> outcome = simulate(run, seed=1)
    >>> f"{outcome.goodput:.1%} with {outcome.failures[0]} failures"
    '92.1% with 38 failures'
    """
    try:
        import simpy
    except ImportError as error:
        raise ImportError('a simulation needs simpy: pip install "ckpt_jax[plan]"') from error

    environment = simpy.Environment()
    trainer = _Trainer(run, environment, random.Random(seed), simpy)
    environment.run(until=trainer.process)
    return trainer.outcome


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean goodput of several runs.

    Attributes:
        goodput: its mean.
        error: the standard error of that.
        outcomes: each run's.
    """

    goodput: float
    error: float
    outcomes: tuple[Outcome, ...]


def mean(run: Run, runs: int = 20, seed: int = 0) -> Mean:
    """The mean of so many runs with different seeds.

    >>> from ckpt_jax import plan
    >>> found = mean(Run(864_000, [Tier(7200, 196)], [Failures(86_400)]), runs=10)
    >>> abs(found.goodput - plan.goodput(7200, 196, 86_400)) < 4 * found.error
    True
    """
    if runs < 2:
        raise ValueError(f"a mean is of 2 runs or more, not {runs!r}")
    outcomes = tuple(simulate(run, seed * 1_000_003 + number) for number in range(runs))
    shares = [outcome.goodput for outcome in outcomes]
    average = fmean(shares)
    spread = math.sqrt(sum((share - average) ** 2 for share in shares) / max(1, runs - 1))
    return Mean(average, spread / math.sqrt(runs), outcomes)


class _Trainer:
    """The run itself: it trains, saves, fails, waits and starts again."""

    def __init__(self, run: Run, environment: Any, chance: random.Random, simpy: Any):
        self.run, self.environment, self.chance, self.simpy = run, environment, chance, simpy
        self.outcome = Outcome(failures=[0] * len(run.failures))
        self.done = 0.0  # Seconds of training that the run is ahead.
        # Of each tier what counts, oldest first; and what is being written: how far it is, and when that counts.
        self.saved: list[list[float]] = [[0.0] for _ in run.tiers]
        self.writing: list[tuple[float, float] | None] = [None for _ in run.tiers]
        self.spares = None if run.spares is None else simpy.Container(environment, init=run.spares)
        self.missing = 0  # Nodes that were lost, and have no spare in their place yet.
        self.process = environment.process(self._live())
        for number in range(len(run.failures)):
            environment.process(self._fail(number))

    # --- failures ---

    def _fail(self, number: int) -> Iterator[Any]:
        failures = self.run.failures[number]
        while math.isfinite(after := failures.next(self.chance)):
            yield self.environment.timeout(after)
            if self.process.is_alive:
                self.process.interrupt(number)

    def _live(self) -> Iterator[Any]:
        struck: set[int] = set()
        while self.environment.now < self.run.length:
            try:
                if struck:
                    yield from self._start_again(struck)
                    struck = set()
                yield from self._train()
            except self.simpy.Interrupt as interrupt:
                self._commit_written()
                struck.add(interrupt.cause)
                self.outcome.failures[interrupt.cause] += 1
                self._lose(self.run.failures[interrupt.cause].takes)
        self.outcome.trained = self.done

    def _lose(self, nodes: int) -> None:
        if self.spares is not None:
            self.missing += nodes
            for _ in range(nodes):
                self.environment.process(self._repair())

    def _repair(self) -> Iterator[Any]:
        yield self.environment.timeout(self.run.repair)
        if self.spares is not None:
            yield self.spares.put(1)

    def _start_again(self, struck: set[int]) -> Iterator[Any]:
        """From the newest checkpoint that survived all that struck."""
        number = max(self.run.failures[which].tier for which in struck)
        for tier in range(len(self.run.tiers)):
            self.writing[tier] = None
            if tier < number:  # What lay there is gone with the node.
                self.saved[tier] = [0.0]
        tier, back = self._newest(number)
        assert back <= self.done, "a checkpoint is ahead of the run"
        self.outcome.lost += self.done - back
        self.done = back
        yield from self._take_spares()
        before = self.environment.now
        try:
            yield self._until_the_end(self.run.detection + self.run.tiers[tier].restart)
        finally:
            self.outcome.restart += self.environment.now - before

    def _take_spares(self) -> Iterator[Any]:
        before = self.environment.now
        try:
            while self.spares is not None and self.missing and self.environment.now < self.run.length:
                spare = self.spares.get(1)
                try:
                    yield spare | self._until_the_end()
                finally:
                    if spare.triggered:  # It may have come in the very moment of another failure.
                        self.missing -= 1
                    else:
                        spare.cancel()
        finally:
            self.outcome.waiting += self.environment.now - before

    def _newest(self, number: int) -> tuple[int, float]:
        """The tier of the newest checkpoint that can be read, this one or one above it, and how far that is."""
        while True:
            tier = max(range(number, len(self.saved)), key=lambda which: self.saved[which][-1])
            if len(self.saved[tier]) == 1 or self.chance.random() >= self.run.corrupt:
                return tier, self.saved[tier][-1]
            self.saved[tier].pop()

    def _until_the_end(self, seconds: float = math.inf) -> Any:
        return self.environment.timeout(max(0.0, min(seconds, self.run.length - self.environment.now)))

    # --- training ---

    def _train(self) -> Iterator[Any]:
        """Until something strikes, or the run is at its end."""
        due = [self.environment.now + tier.interval for tier in self.run.tiers]
        while self.environment.now < self.run.length:
            number = min(range(len(due)), key=due.__getitem__)
            at = min(due[number], self.run.length)
            before = self.environment.now
            try:
                if at > before:
                    yield self.environment.timeout(at - before)
            finally:
                self.done += self.environment.now - before
            if self.environment.now >= self.run.length:
                return
            self._commit_written()
            if self.writing[number] is not None:
                self.outcome.skipped += 1
            else:
                yield from self._save(number)
            due[number] += self.run.tiers[number].interval
            for tier, time in enumerate(due):  # Another's pause may have taken longer than that.
                due[tier] = max(time, self.environment.now)

    def _save(self, number: int) -> Iterator[Any]:
        tier = self.run.tiers[number]
        before = self.environment.now
        try:
            yield self._until_the_end(tier.pause)
        finally:
            self.outcome.stall += self.environment.now - before
        self.writing[number] = (self.done, self.environment.now + tier.write)
        self._commit_written()

    def _commit_written(self) -> None:
        for number, writing in enumerate(self.writing):
            if writing is not None and writing[1] <= self.environment.now:
                self.saved[number].append(writing[0])
                del self.saved[number][:-8]  # More are never gone back.
                self.writing[number] = None
                self.outcome.commits += 1
