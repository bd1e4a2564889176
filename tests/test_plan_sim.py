"""The simulation: it agrees with the formula where that holds, and differs where it does not."""

import math

import pytest

from ckpt_jax import plan
from ckpt_jax.plan_sim import Failures, Run, Tier, mean, simulate

DAY = 86_400.0


def wasted(run: Run, runs: int = 6) -> float:
    return 1 - mean(run, runs=runs, seed=3).goodput


@pytest.mark.parametrize(
    ("pause", "mtbf", "write", "restart"),
    [(5, DAY, 0, 0), (30, 160_000, 150, 600), (5, DAY, 196, 600), (120, 3 * DAY, 0, 300)],
)
def test_the_formula_and_the_simulation_agree_within_two_percent(pause, mtbf, write, restart):
    """At the best interval, which is short against the time between failures."""
    interval = plan.optimum(pause, mtbf, write=write)
    run = Run(4000 * mtbf, [Tier(interval, pause, write, restart)], [Failures(mtbf)], detection=30)
    found = wasted(run)
    known = {"write": write, "restart": restart, "detection": 30}
    assert found == pytest.approx(plan.waste(interval, pause, mtbf, **known).total, rel=0.02)
    assert found == pytest.approx(1 - plan.goodput(interval, pause, mtbf, **known), rel=0.02)


@pytest.mark.parametrize("interval", [DAY / 2, DAY, 2 * DAY])
def test_near_the_time_between_failures_the_exact_value_holds_and_the_first_order_does_not(interval):
    found = wasted(Run(6000 * DAY, [Tier(interval, 196, restart=600)], [Failures(DAY)]))
    exact = 1 - plan.goodput(interval, 196, DAY, restart=600)
    first = plan.waste(interval, 196, DAY, restart=600).total
    assert found == pytest.approx(exact, rel=0.02)
    assert first > 1.05 * found


def test_failures_that_come_soon_after_a_repair_cost_less_than_the_formula_says():
    """Infant mortality: they come in bunches, and the second of a bunch finds little to destroy."""
    tier = Tier(7200, 196)
    found = wasted(Run(4000 * DAY, [tier], [Failures(DAY, shape=0.5)]))
    assert found < 0.97 * plan.waste(7200, 196, DAY).total
    steady = wasted(Run(4000 * DAY, [tier], [Failures(DAY, shape=1)]))
    assert steady == pytest.approx(1 - plan.goodput(7200, 196, DAY), rel=0.02)


def test_the_times_between_failures_have_their_mean_whatever_their_shape():
    import random

    chance = random.Random(2)
    for shape in (0.5, 1.0, 3.0):
        failures = Failures(100, shape=shape)
        assert sum(failures.next(chance) for _ in range(40_000)) / 40_000 == pytest.approx(100, rel=0.03)


def test_a_write_that_is_longer_than_the_interval_skips_saves():
    outcome = simulate(Run(10 * DAY, [Tier(600, 5, write=1500)], [Failures(math.inf)]))
    assert outcome.skipped == pytest.approx(2 * outcome.commits, abs=3)
    found = wasted(Run(4000 * DAY, [Tier(600, 5, write=6900)], [Failures(DAY)]))
    assert found > 1.2 * plan.waste(600, 5, DAY, write=6900).total
    assert found == pytest.approx(1 - plan.goodput(7200, 5, DAY, write=6900), rel=0.03)  # It is as if every 2 h.


def test_a_run_is_accounted_for_to_the_second():
    run = Run(
        30 * DAY,
        [Tier(300, 1, write=4, restart=60), Tier(7200, 5, write=196, restart=600)],
        [Failures(DAY), Failures(5 * DAY, tier=1, takes=2)],
        detection=30,
        spares=1,
        repair=3 * DAY,
        corrupt=0.1,
    )
    for seed in range(20):
        one = simulate(run, seed)
        parts = one.trained + one.stall + one.lost + one.restart + one.waiting
        assert parts == pytest.approx(run.length, rel=1e-9), one
        assert min(one.trained, one.stall, one.lost, one.restart, one.waiting) >= 0
        assert one == simulate(run, seed)
    assert simulate(run, 1) != simulate(run, 2)


def test_two_tiers_agree_with_their_formula():
    local, shared = Tier(1200, 5, write=4, restart=60), Tier(3600, 5, write=196, restart=600)
    classes = [(40 * 3600.0, local), (60 * 3600.0, shared)]
    run = Run(8000 * DAY, [local, shared], [Failures(classes[0][0], 0), Failures(classes[1][0], 1, takes=1)])
    assert wasted(run, runs=4) == pytest.approx(plan.tiered(classes).total, rel=0.025)
    alone = Run(8000 * DAY, [shared], [Failures(classes[0][0]), Failures(classes[1][0])])
    assert wasted(alone, runs=4) > 1.3 * wasted(run, runs=4)


def test_what_a_lost_node_had_on_its_disk_is_gone_for_all_later_failures():
    """A process that crashes soon afterwards finds nothing there that is ahead of the run."""
    tiers = [Tier(100, 1), Tier(1e6, 1)]
    run = Run(20_000, tiers, [Failures(300), Failures(5000, tier=1)])
    lost = [simulate(run, seed).lost for seed in range(10)]  # Which holds, at each failure, that none is ahead.
    kept = [simulate(Run(20_000, tiers, [Failures(300), Failures(5000)]), seed).lost for seed in range(10)]
    assert sum(lost) > 2 * sum(kept)


def test_what_makes_it_worse_makes_it_worse():
    def run(**changes: object) -> float:
        named = {"failures": [Failures(DAY, takes=1)], "detection": 0.0} | changes
        return wasted(Run(500 * DAY, [Tier(3600, 30, restart=60)], **named), runs=4)

    usual = run()
    assert run(spares=1, repair=3 * DAY) > 1.5 * usual
    assert run(spares=30, repair=3 * DAY) == pytest.approx(usual, rel=0.01)
    assert run(corrupt=0.5) > 1.2 * usual
    assert run(detection=1800.0) > 1.3 * usual


def test_nothing_fails_and_nothing_is_lost():
    outcome = simulate(Run(DAY, [Tier(3600, 36)], [Failures(math.inf)]))
    assert outcome.lost == outcome.restart == 0
    assert outcome.goodput == pytest.approx(plan.goodput(3600, 36, math.inf), abs=0.001)
    assert outcome.failures == [0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Failures(0),
        lambda: Failures(1, shape=0),
        lambda: Run(1, [], []),
        lambda: Run(1, [Tier(1, 1)], [Failures(1, tier=1)]),
        lambda: Run(0, [Tier(1, 1)], []),
        lambda: Run(1, [Tier(1, 1)], [], corrupt=1.0),
        lambda: Run(1, [Tier(1, 1)], [], spares=-1),
        lambda: Failures(1, shape=0.02),
        lambda: Failures(1, takes=1.5),
        lambda: Run(math.inf, [Tier(1, 1)], []),
        lambda: Run(1, [Tier(1e-12, 1)], []),
        lambda: mean(Run(1, [Tier(1, 1)], []), runs=1),
        lambda: Tier(0, 1),
        lambda: Tier(1, -1),
    ],
)
def test_absurd_runs_are_refused(make):
    with pytest.raises(ValueError, match=r"0|tier|spares|runs|seconds"):
        make()
