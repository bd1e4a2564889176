"""How often a Saver saves: by the clock, and as the price of a save and the failures say."""

import itertools
import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt_jax as ck
from ckpt_jax import _events, _storage
from ckpt_jax._pace import FIRST, Pace

HOUR = 3600.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def paced(every: ck.Every, root: str = "memory://pace") -> tuple[Pace, Clock, list[dict]]:
    clock, told = Clock(), []
    return Pace(every, _storage.folder(root), lambda **facts: told.append(facts), clock), clock, told


def saved(pace: Pace, blocked: float, write: float) -> None:
    pace.begun()
    pace.learn(blocked, write)


def measured(pace: Pace, blocked: float, write: float) -> None:
    """As many saves as it takes for the interval to be theirs."""
    for _ in range(FIRST):
        saved(pace, blocked, write)


def until_due(pace: Pace, clock: Clock) -> float:
    """Seconds until the clock says so."""
    began = clock.now
    while not pace.is_due():
        clock.now += 0.5
    return clock.now - began


def test_the_first_save_is_early_and_then_it_is_as_often_as_costs_the_least():
    pace, clock, told = paced(ck.Every.optimal(mtbf="24h", jitter=0, least="30 s"))
    assert until_due(pace, clock) == 30
    saved(pace, 50, 200)  # The first one of a process takes longer.
    assert until_due(pace, clock) == 250
    assert not told
    saved(pace, 5, 20)
    assert until_due(pace, clock) == pytest.approx(math.sqrt(2 * 5 * 24 * HOUR), abs=2)
    (fact,) = told
    assert fact["message"] == (
        "save every 16 min: √(2 × 5 s pause × 24 h between failures) = 16 min; 0 failures were seen"  # 280 s more.
    )
    assert fact["seconds"]["pause"] == 5
    assert fact["seconds"]["write"] == 20
    assert fact["seconds"]["interval"] == pytest.approx(929.6, abs=2)


def test_it_is_never_more_often_than_a_save_takes_nor_beyond_its_bounds():
    pace, clock, told = paced(ck.Every.optimal(mtbf="1h", jitter=0.9))
    measured(pace, 1, 900)
    for _ in range(20):
        assert until_due(pace, clock) >= 901
        pace.begun()
    assert told[-1]["message"].endswith("and at least 15 min, what a save takes; 0 failures were seen")
    pace, clock, told = paced(ck.Every.optimal(mtbf="1h", jitter=0.9, most="10 min"))
    measured(pace, 60, 1)
    for _ in range(20):
        assert until_due(pace, clock) <= 600.5
        pace.begun()
    pace, _, told = paced(ck.Every.optimal(mtbf="1h", jitter=0, most="10 min"))
    measured(pace, 60, 3000)
    assert "and at least 51 min, what a save takes" in told[-1]["message"]
    pace, _, told = paced(ck.Every.optimal(mtbf="1 year", jitter=0, most="2h"))
    measured(pace, 60, 5)
    assert pace.interval() == 2 * HOUR
    assert "at most 2 h as was asked for" in told[-1]["message"]
    pace, _, told = paced(ck.Every.optimal(mtbf="1 min", jitter=0, least="5 min"))
    measured(pace, 0.1, 1)
    assert pace.interval() == 300
    assert "at least 5 min, the least that was asked for" in told[-1]["message"]


def test_a_slow_save_changes_little_and_a_storage_that_became_slow_changes_much():
    pace, _, told = paced(ck.Every.optimal(mtbf="24h", jitter=0))
    for _ in range(9):
        saved(pace, 5, 20)
    before = pace.interval()
    saved(pace, 500, 2000)
    assert pace.interval() == pytest.approx(before, rel=0.01)
    for _ in range(9):
        saved(pace, 20, 80)
    assert pace.interval() == pytest.approx(2 * before, rel=0.01)
    assert len(told) == 2  # It is told once more, as the interval has become another.


def test_failures_of_the_run_make_it_save_more_often(tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    lines = []
    for life in range(9):
        lines += [{"kind": "started", "time": 10_000 * life}, {"kind": "committed", "time": 10_000 * life + 3600}]
    (root / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "sta')
    pace, clock, told = paced(ck.Every.optimal(mtbf="24h", jitter=0), str(root))
    assert pace.mtbf() == (24 * HOUR + 9 * HOUR) / 9  # Eight that were seen, and the one that is expected.
    clock.now += 9 * HOUR
    assert pace.mtbf() == (24 * HOUR + 18 * HOUR) / 9  # It has run on without one.
    measured(pace, 5, 20)
    assert told[0]["message"].endswith("; 8 failures were seen")


def test_jitter_spreads_runs_and_is_the_same_in_each_life_of_one():
    def gaps(root: str) -> list[float]:
        pace, clock, _ = paced(ck.Every.optimal(mtbf="24h", jitter=0.1), root)
        measured(pace, 5, 20)
        found = []
        for _ in range(30):
            best = pace.interval()  # It grows a little, while nothing fails.
            found.append(until_due(pace, clock) / best)
            pace.begun()
        return found

    one, other = gaps("memory://jitter/a"), gaps("memory://jitter/b")
    assert one == gaps("memory://jitter/a")
    assert one != other
    assert all(0.9 <= gap < 1.102 for gap in one)
    assert max(one) - min(one) > 0.1
    assert statistics.fmean(one) == pytest.approx(1, abs=0.03)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), min_size=1), st.floats(1, 1e7), st.floats(0, 0.99))
def test_whatever_saves_take_the_interval_keeps_its_bounds(saves, mtbf, jitter):
    pace, _, _ = paced(ck.Every.optimal(mtbf=mtbf, jitter=jitter, least=10, most=1000))
    for pause, write in saves:
        saved(pace, pause, write)
        takes = statistics.median_low(pace._pauses) + statistics.median_low(pace._writes)
        assert pace.interval() >= max(10, takes) * (1 - 1e-9)
        assert pace.interval() <= max(1000, takes) * (1 + 1e-9)
        assert pace._now >= max(10, takes) * (1 - 1e-9)


def test_a_run_saves_by_it_and_tells_how_often(tmp_path):
    events: list[_events.Event] = []
    every = ck.Every.optimal(mtbf=2, least=0.05, most=1)
    with ck.Saver(tmp_path, every=every, on_event=events.append) as saver:
        state, step = saver.resume({"w": np.zeros(1000)})
        while len(ck.steps(tmp_path)) < 4 and step < 100_000:
            step += 1
            saver.step(step, state)
    planned = [event for event in events if event.kind == "planned"]
    assert planned
    assert planned[0].seconds.keys() == {"interval", "pause", "write", "mtbf"}
    assert "save every" in planned[0].message
    committed = [event for event in events if event.kind == "committed"]
    assert planned[0].seconds["write"] == min(event.seconds["all"] for event in committed[:FIRST])
    told = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert told.index("planned") > told.index("committed")
    assert "skipped" not in told


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: ck.Every.optimal(mtbf="often"), ValueError, "mtbf: 'often' is not of the form"),
        (lambda: ck.Every.optimal(mtbf=0), ValueError, "mtbf is a duration of more than 0"),
        (lambda: ck.Every.optimal(mtbf="1h", jitter=1), ValueError, "jitter is a part"),
        (lambda: ck.Every.optimal(mtbf="1h", least="2h", most="1h"), ValueError, "least and most are durations"),
        (lambda: ck.Every.optimal(mtbf="1h", least=0), ValueError, "least and most are durations"),
        (lambda: ck.Every(minutes=1, mtbf=3.0), ValueError, "either minutes or mtbf"),
        (lambda: ck.Every.optimal(mtbf="1h", jitter="a lot"), TypeError, "jitter is a number"),
        (ck.Every, ValueError, "Every takes"),
    ],
)
def test_absurd_rules_are_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_a_rule_shows_what_was_said():
    assert repr(ck.Every(minutes=5)) == "Every(minutes=5)"
    assert repr(ck.Every.optimal(mtbf="1h", jitter=0)) == "Every(mtbf=3600.0)"
    assert ck.Every(steps=3) == ck.Every(steps=3)


def test_what_is_told_is_the_sum_that_was_made(monkeypatch):
    """The clock goes on between one look at it and the next."""
    told: list[str] = []
    clock = itertools.count(0, 0.001)
    every = ck.Every.optimal(mtbf="24h", jitter=0)
    pace = Pace(
        every, _storage.folder("memory://pace/x"), lambda **facts: told.append(facts["message"]), lambda: next(clock)
    )
    measured(pace, 5, 20)
    assert told == ["save every 15 min: √(2 × 5 s pause × 24 h between failures) = 15 min; 0 failures were seen"]


def test_at_a_bound_runs_that_began_together_do_not_meet():
    def first(root: str) -> float:
        pace, _, _ = paced(ck.Every.optimal(mtbf="24h", jitter=0.1), root)
        pace.begun()
        return pace._now

    gaps = {first(f"memory://jitter/{number}") for number in range(50)}
    assert len(gaps) == 50
    assert all(60 <= gap <= 66 for gap in gaps)


def test_one_slow_first_save_does_not_hold_off_the_next():
    pace, clock, _ = paced(ck.Every.optimal(mtbf="44h", jitter=0))
    saved(pace, 100, 1)
    assert until_due(pace, clock) <= 102
    saved(pace, 1, 1)
    assert pace.interval() == pytest.approx(math.sqrt(2 * 44 * HOUR), rel=0.01)
