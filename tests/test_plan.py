"""The planner: published sums to their printed precision, what files may say, and what a run measured."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt_jax as ck
from ckpt_jax import _events, _plan_file, _plan_report, _plan_run, _units, _values, plan
from ckpt_jax._units import DAY, HOUR, MINUTE

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs" / "plan"


def sums(name: str, **changes: object) -> _plan_report.Sums:
    return _plan_report.sums(dataclasses.replace(_plan_file.load(str(CONFIGS / f"{name}.toml")), **changes))


def text(name: str) -> str:
    return _plan_report.text(sums(name))


# --- the published sums -----------------------------------------------------------------------------------------------


def test_every_file_in_configs_is_a_plan_and_says_its_sum():
    files = sorted(CONFIGS.glob("*.toml"))
    assert len(files) == 10
    for file in files:
        assert file.read_text().startswith("# "), file
        told = _plan_report.text(_plan_report.sums(_plan_file.load(str(file))))
        assert told.startswith(_plan_file.load(str(file)).name)
        assert "nan" not in told
        assert "inf" not in told


def test_70b_for_30_days_on_1024_gpus():
    found = sums("70b-30-days")
    assert found.setup.size == 980e9
    assert found.setup.shared.write == 196
    today, best = found.today, found.best
    assert f"{today.stall:.1%} {today.lost:.1%} {today.total:.1%}" == "2.7% 4.2% 6.9%"
    assert found.setup.devices * found.setup.length / HOUR == 737_280
    assert _units.digits(today.device_hours) == "51,000"
    assert f"{best.interval / MINUTE:.0f}" == "97"
    held, count = found.kept.bytes, found.kept.checkpoints
    assert (count, _units.digits(held / 1e12)) == (360, "350")


def test_70b_for_30_days_with_a_pause_of_5_seconds():
    found, before = sums("70b-30-days-two-stage"), sums("70b-30-days")
    assert math.floor(found.best.interval / MINUTE) == 15
    assert f"{found.best.total:.1%}" == "1.1%"
    assert _units.digits(before.today.device_hours - found.best.device_hours) == "43,000"
    held, count = found.kept.bytes, found.kept.checkpoints
    assert (count, f"{held / 1e12:.0f}") == (33, "32")
    assert "43,000 device-hours" in _plan_report.compared(before, found)


def test_the_write_behind_the_training_that_sum_leaves_out():
    shared = _plan_file.Saves(pause=5, write=196)
    assert f"{sums('70b-30-days-two-stage', shared=shared).best.total:.1%}" == "1.3%"


def test_70b_on_the_nodes_own_disks():
    setup = sums("70b-30-days-tiered").setup
    assert setup.nodes == 128
    assert f"{setup.size / setup.nodes / 1e9:.1f}" == "7.7"
    assert f"{setup.local.write:.0f}" == "4"


def test_70b_on_1024_h100s():
    found = sums("llama70b-1024")
    assert f"{DAY / found.setup.mtbf:.2f} a day, {found.setup.mtbf / HOUR:.0f} h" == "0.54 a day, 44 h"
    assert f"{found.daly / MINUTE:.0f}" == "51"  # By Daly's formula; Young's gives 51.7.
    assert f"{found.best.total:.1%}" == f"{_plan_report.row(found.setup, found.daly).total:.1%}" == "2.3%"
    hours = found.setup.devices * found.setup.length / HOUR
    assert _plan_report._money(found.best.money, "$") == "$43k"
    assert _plan_report._money(hours * 2.5, "$", 3) == "$1.87M"
    held, count = found.kept.bytes, found.kept.checkpoints
    assert (count, f"{held / 1e12:.0f}") == (17, "17")
    assert [f"{plan.bandwidth(1e12, seconds) / 1e9:.0f}" for seconds in found.setup.shared.within] == ["8", "6"]


def test_70b_on_1024_h100s_that_wait_for_each_save():
    found = sums("llama70b-1024-synchronous")
    assert f"{found.best.interval / HOUR:.1f}" == f"{found.daly / HOUR:.1f}" == "2.7"
    assert f"{found.best.total:.1%}" == "6.5%"
    assert _units.digits(found.best.money) == "120,000"


def test_llama_3_405b():
    found = sums("llama3-405b-16384")
    assert f"{found.best.interval / MINUTE:.0f}" == "27"
    assert 20 < found.daly / MINUTE < 30


def test_64_ranks():
    setup = sums("70b-64-ranks").setup
    assert setup.size == 140e9
    assert f"{setup.size / setup.devices / 1e9:.1f}" == "2.2"


def test_the_naive_run_and_the_exercises():
    assert sums("naive").today.total == 0.05
    assert f"{sums('exercise-short-mtbf').best.interval / MINUTE:.1f}" == "26.8"
    assert sums("exercise-slow-save").today.stall == 0.25


# --- formulas ---------------------------------------------------------------------------------------------------------

seconds = st.floats(0.01, 1e5)


@settings(deadline=None)
@given(pause=seconds, mtbf=st.floats(10, 1e9), write=seconds)
def test_no_interval_wastes_less_than_the_best(pause, mtbf, write):
    best = plan.optimum(pause, mtbf, write=write)
    assert best >= pause + write
    wasted = plan.waste(best, pause, mtbf, write=write)
    for factor in (1.001, 1.1, 2, 10):
        others = [best * factor] + ([best / factor] if best / factor >= pause + write else [])
        for other in others:
            there = plan.waste(other, pause, mtbf, write=write)
            assert wasted.stall + wasted.lost <= (there.stall + there.lost) * (1 + 1e-9)


@settings(deadline=None)
@given(pause=st.floats(1, 100), mtbf=st.floats(1e5, 1e8), restart=st.floats(0, 600), write=st.floats(0, 600))
def test_the_first_order_is_the_exact_value_where_the_interval_is_short(pause, mtbf, restart, write):
    interval = plan.optimum(pause, mtbf, write=write)
    exact = 1 - plan.goodput(interval, pause, mtbf, write=write, restart=restart)
    first = plan.waste(interval, pause, mtbf, write=write, restart=restart).total
    small = (interval + write + restart) / mtbf
    assert abs(first - exact) <= small**2 + first * small + 1e-12


@settings(deadline=None)
@given(pause=st.floats(0.1, 1000), mtbf=st.floats(1e4, 1e8))
def test_dalys_interval_is_the_best_of_the_exact_value(pause, mtbf):
    """It is the time to train, so the pause comes to it; and a series that was broken off, so it is nearly the best."""

    def dalys(interval: float) -> float:  # Where a save follows upon each start.
        return (interval - pause) / (mtbf * math.expm1(interval / mtbf))

    at = plan.daly(pause, mtbf) + pause
    intervals = [at * (0.5 + step / 500) for step in range(501)]
    best = max(map(dalys, intervals))
    assert dalys(at) >= best - 1e-3 * (1 - best) - 1e-9
    best = max(plan.goodput(interval, pause, mtbf) for interval in intervals)
    assert plan.goodput(at, pause, mtbf) >= best - 5e-3 * (1 - best) - 1e-9


def test_dalys_interval_at_its_ends():
    assert plan.daly(0, 100) == 0
    assert plan.daly(200, 100) == plan.daly(1e9, 100) == 100
    assert plan.daly(1, math.inf) == math.inf


def test_goodput_at_its_ends():
    assert plan.goodput(100, 10, math.inf) == 0.9
    assert plan.goodput(10, 10, 100) == plan.goodput(5, 10, 100)  # A save every 10 s is all that there can be.
    assert plan.goodput(10, 10, 100) == pytest.approx(math.exp(-0.2) * 0.1)  # The training before the first save.
    assert plan.goodput(1e9, 1, 1) == 0
    assert plan.waste(1e9, 1, 1).total == 1


def test_without_memory_two_classes_with_one_tier_are_one():
    tier = plan.Tier(1000, 5, write=20, restart=60)
    both = plan.tiered([(1e5, tier), (3e5, tier)], detection=10)
    one = plan.waste(1000, 5, 1 / (1 / 1e5 + 1 / 3e5), write=20, restart=60, detection=10)
    assert dataclasses.astuple(both) == pytest.approx(dataclasses.astuple(one))


@pytest.mark.parametrize("odd", [-1.0, math.nan, -math.inf])
def test_what_is_no_duration_is_refused_by_name(odd):
    for call, name in [
        (lambda: plan.young(odd, 1), "pause"),
        (lambda: plan.daly(1, odd), "mtbf"),
        (lambda: plan.optimum(1, 1, write=odd), "write"),
        (lambda: plan.waste(odd, 1, 1), "interval"),
        (lambda: plan.waste(1, 1, 1, detection=odd), "detection"),
        (lambda: plan.goodput(1, 1, 1, restart=odd), "restart"),
        (lambda: plan.storage(1, length=odd), "length"),
        (lambda: plan.bandwidth(1, odd), "seconds"),
        (lambda: plan.last_save(1, odd), "write"),
    ]:
        with pytest.raises(ValueError, match=name):
            call()
    with pytest.raises(ValueError, match="mtbf"):
        plan.tiered([(odd, plan.Tier(1, 1))])
    for none in (None, True, "70 B"):
        with pytest.raises(TypeError, match="a state is a number of parameters, a tree or a Manifest"):
            plan.state_bytes(none)
    with pytest.raises(TypeError, match="pause is a number of seconds, not '5 s'"):
        plan.young("5 s", 1)
    with pytest.raises(ValueError, match="mtbf is more than 0"):
        plan.young(1, 0)


def test_a_fit_holds_the_true_value_as_often_as_it_says():
    chance = np.random.default_rng(1)
    held = 0
    for _ in range(500):
        gaps = chance.exponential(3600, 200).cumsum()
        found = plan.fit(int((gaps < 50 * 3600).sum()), 50 * 3600, 0.8)
        held += found.low <= 3600 <= found.high
    assert 0.76 < held / 500 < 0.88


def test_where_nothing_failed_the_time_between_failures_has_a_lower_bound_only():
    found = plan.fit(0, 3600)
    assert found.mtbf == found.high == math.inf
    assert found.low == pytest.approx(3600 / -math.log(0.05))


def event(time: float, kind: str, process: int = 0) -> dict[str, object]:
    return {"time": time, "kind": kind, "process": process}


def test_failures_are_runs_that_told_of_no_end():
    told = [event(0, "started"), event(50, "committed"), event(1, "started", 1), event(100, "started")]
    told += [event(130, "closed"), event(1000, "started"), event(1040, "failed")]
    found = plan.fit_mtbf(told)
    assert (found.failures, found.seconds) == (1, 50 + 30 + 40)
    assert plan.fit_mtbf(_events.Event(**each) for each in told) == found
    assert plan.fit_mtbf([]).failures == plan.fit_mtbf([{}, {"time": 3}]).failures == 0


def test_the_size_of_a_state_is_exact_for_trees_and_manifests(tmp_path):
    import jax
    import jax.numpy as jnp

    tree = {"w": jnp.zeros((3, 5), jnp.bfloat16), "k": jax.random.key(0), "n": 3, "s": "text"}
    manifest = ck.save(tmp_path / "1", tree)
    assert plan.state_bytes(tree) == plan.state_bytes(manifest) == 30 + 8
    assert plan.state_bytes(jax.eval_shape(lambda: {"w": jnp.zeros((3, 5))})) == 60
    with pytest.raises(ValueError, match="recipe is one of bf16-adam, "):
        plan.state_bytes(1, "fp4")
    with pytest.raises(ValueError, match="a number of parameters"):
        plan.state_bytes(-1)


# --- units ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "kind", "value"),
    [
        ("90 s", "seconds", 90),
        ("1.5h", "seconds", 5400),
        ("2 days", "seconds", 172_800),
        ("1 day", "seconds", 86_400),
        ("3 minutes", "seconds", 180),
        ("1 month", "seconds", 2_629_800),
        (".5 min", "seconds", 30),
        (7, "seconds", 7),
        ("64 GiB", "bytes", 64 * 2**30),
        ("1 TB", "bytes", 1e12),
        (12, "bytes", 12),
        ("5 GB/s", "bytes/s", 5e9),
        ("200 MiB/s", "bytes/s", 200 * 2**20),
        ("405e9", "count", 405e9),
        ("1,024", "count", 1024),
        ("8 k", "count", 8000),
    ],
)
def test_quantities_are_read(written, kind, value):
    assert _units.parse(written, kind) == value


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("5 GB", "seconds"),
        ("5 GB/s", "bytes"),
        ("5 GB", "bytes/s"),
        ("5 parsecs", "seconds"),
        ("", "seconds"),
        ("h", "seconds"),
        ("1e999", "count"),
        ("nan", "count"),
        (math.nan, "count"),
        (math.inf, "seconds"),
        (True, "count"),
        (None, "bytes"),
        ([1], "bytes"),
        (10**400, "count"),
        ("5 b", "bytes"),
        ("1,5 h", "seconds"),
        ("1,23,456", "count"),
        ("9" * 20_000 + "!", "seconds"),
    ],
)
def test_what_is_no_quantity_is_refused_with_how_one_is_written(written, kind):
    with pytest.raises(ValueError, match=re.escape(_units.EXAMPLES[kind])):
        _units.parse(written, kind)


@settings(deadline=None)
@given(st.floats(1e-6, 1e12))
def test_what_is_printed_is_read_again_to_its_digits(value):
    assert _units.parse(_units.duration(value), "seconds") == pytest.approx(value, rel=0.06)
    if value >= 1:
        assert _units.parse(_values.human(value, 2), "bytes") == pytest.approx(value, rel=0.06)
    assert float(_units.digits(value).replace(",", "")) == pytest.approx(value, rel=0.051)


# --- files ------------------------------------------------------------------------------------------------------------


def refused(data: str) -> ck.CheckpointError:
    with pytest.raises(ck.CheckpointError) as caught:
        _plan_file.loads(data.encode(), "a.toml")
    return caught.value


FAULTY = """
name = 7
nonsense = 1
run = 3
[state]
parameters = "many"
bytes = "3 GB"
[cluster]
devices = 0
price = -1
[failures]
mtbf = "0.1 s"
count = 3
restart = "8 days"
[save]
pause = "-5 s"
intervall = "2 h"
bandwidth = "5 GB"
[local]
covers = ["meteor"]
[keep]
last = true
"""


def test_all_that_is_wrong_in_a_file_is_told_at_once_with_its_key_unit_and_range():
    error = refused(FAULTY)
    places = [fault.place for fault in error.faults]
    expected = ["name", "nonsense", "run", "state.parameters", "cluster.devices", "cluster.price", "failures.mtbf"]
    expected += ["failures.over", "failures.restart", "failures.shares", "save.pause", "save.intervall"]
    expected += ["save.bandwidth", "local.covers", "local.pause", "keep.last", "run.length"]
    assert set(places) == set(expected)
    told = str(error)
    assert "failures.mtbf: expected a duration between 1 s and 365,250 days, such as" in told
    assert "save.bandwidth: expected a rate between 1 kB/s and" in told
    assert 'such as "5 GB/s" or bytes a second as a bare number, found 5 GB' in told
    assert "save.intervall: expected one of bandwidth, interval, pause, within, write, found an unknown key" in told
    assert "docs/plan.md lists all keys" in told


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ("[failures]\nrestart = 1", "failures.mtbf"),
        ("[failures]\ncount = 3", "failures.over"),
        ("[failures]\nmtbf = 9\ncount = 3\nover = 70", "failures.count"),
        ("[failures]\nmtbf = 9\ndevices = 3", "cluster.devices"),
        ("[failures]\nmtbf = 9\nshares = 5", "failures.shares"),
        ("[state]\nparameters = 9\nrecipe = {}", "state.recipe"),
        ("[state]\nparameters = 9\nrecipe = {weights = 0}", "state.recipe"),
        ("[keep]\ndaily = 3\n[state]\nbytes = 3\n[run]\nlength = '3 days'", "keep.last"),
        ("", "save"),
        ("[failures]\nmtbf = 9\n[failures.shares]\nnode = 0.4", "failures.shares"),
        ("[save]\ninterval = 9", "save.pause"),
        ("[save]\nbandwidth = 9e9", "state.parameters"),
        ("[save]\npause = 1\nwrite = 3\nbandwidth = 9e9\n[state]\nbytes = 9", "save.bandwidth"),
        ("[save]\npause = 10\ninterval = 5", "save.interval"),
        ("[save]\nwrite = 10\ninterval = 5", "save.interval"),
        ("[state]\nparameters = 9\nbytes = 3", "state.bytes"),
        ("[state]\nparameters = 9\nrecipe = 'fp4'", "state.recipe"),
        ("[state]\nparameters = 9\n[state.recipe]\nweights = 'heavy'", "state.recipe.weights"),
        ("[state]\nrecipe = 'fp32-adam'", "state.parameters"),
        ("[keep]\nlast = 3\n[state]\nbytes = 3", "run.length"),
        ("[keep]\nlast = 3\n[run]\nlength = '3 days'", "state.parameters"),
        ("[save]\npause = 1\nwithin = '2 min'", "state.parameters"),
        ("[preemption]\nnotice = '2 min'", "save.pause"),
        ("[preemption]\nnotices = '2 min'", "preemption.notice"),
        ("[failures]\nmtbf = 9\n[failures.shares]", "failures.shares"),
        ("[cluster]\nprice = 3\n[run]\nlength = '3 days'", "cluster.devices"),
        ("[local]\nnode_bandwidth = 9e9\n[state]\nbytes = 9", "cluster.devices"),
        ("[preemption]\nnotice = ['1 h', 'soon']", "preemption.notice"),
        ("[plan]\nx = 1", "plan"),
        ("state = [1]", "state"),
        ("[[save]]\npause = 1", "save"),
    ],
)  # fmt: skip
def test_what_is_missing_or_twice_there_is_told(data, place):
    assert place in [fault.place for fault in refused(data).faults]


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ("[failures]\nmtbf = 'soon'", "failures.mtbf"),
        ("[failures]\ncount = -1\nover = '9 days'", "failures.count"),
        ("[failures]\nmtbf = 9\n[failures.shares]\nnode = 4", "failures.shares.node"),
        ("[state]\nbytes = 'much'", "state.bytes"),
        ("[state]\nbytes = 'much'\n[save]\nbandwidth = '5 GB/s'", "state.bytes"),
        ("[cluster]\ndevices = 'all'\n[failures]\nmtbf = 9\ndevices = 3", "cluster.devices"),
        ("[save]\npause = -1", "save.pause"),
        ("[save]\npause = 1\n[preemption]\nnotice = 'short'", "preemption.notice"),
    ],
)
def test_what_is_there_and_wrong_is_told_once(data, place):
    assert [fault.place for fault in refused(data).faults] == [place]


@pytest.mark.parametrize("data", [b"\xff", b"a = ", b"[" * 100_000, b"x = 1e", b"a = 1\na = 2"])
def test_what_is_no_toml_is_told(data):
    with pytest.raises(ck.CheckpointError, match="is no TOML"):
        _plan_file.loads(data, "a.toml")


KEYS = ["name", "run", "state", "cluster", "failures", "save", "local", "keep", "preemption", "parameters", "recipe"]
KEYS += ["bytes", "devices", "devices_per_node", "price", "length", "mtbf", "count", "over", "restart", "shares"]
KEYS += ["interval", "pause", "write", "bandwidth", "node_bandwidth", "covers", "within", "last", "daily", "notice"]
VALUES = ['"2 h"', '"70 B"', '"5 GB/s"', '"1 TB"', "3", "0", "-1", "1e300", "nan", "true", '["2 min"]', "[[1]]"]
VALUES += ['"bf16-adam"', "{}", "1979-05-27"]
LINES = st.one_of(
    st.sampled_from(KEYS).map(lambda key: f"[{key}]"),
    st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)).map(" = ".join),
)


@settings(deadline=None)
@given(st.lists(LINES))
def test_any_file_is_a_plan_or_is_refused(lines):
    try:
        setup = _plan_file.loads("\n".join(lines).encode(), "a.toml")
    except ck.CheckpointError:
        return
    found = _plan_report.sums(setup)
    assert _plan_report.text(found)
    json.dumps(_plan_report.as_json(found), allow_nan=False)


# --- the command ------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_jax.cli", "plan", *arguments],
        capture_output=True,
        text=True,
        env={"JAX_PLATFORMS": "nowhere", "PATH": "", "COLUMNS": "200"},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_says_the_sums_step_by_step():
    code, out, _ = command(str(CONFIGS / "llama70b-1024.toml"))
    assert code == 0
    for sentence in [
        "Failures: 466 in 54 days on 16,384 devices, so 0.54 a day on 1,024: one every 44 h.",
        "The best interval: √(2 × 30 s × 44 h) = 52 min (Young); 51 min of training between two saves (Daly).",
        "  10 min / 44 h = 0.4 % restart",
        "  2.3 % in all: 17,000 of 748,032 device-hours, $43k of $1.87M.",
        "Storage: the last 3 and one a day for 14 days: 17 × 1 TB = 17 TB, and one more while it is written.",
        "Bandwidth: 1 TB in 2 min needs 8.3 GB/s, all nodes together.",
        "Preemption: a notice of 2 min leaves 90 s for the write.",
        "Preemption: a notice of 30 s leaves nothing for the write.",
    ]:
        assert sentence in out, out


def test_the_command_compares_scales_and_draws(tmp_path):
    plot = tmp_path / "out.svg"
    a, b = (str(CONFIGS / f"{name}.toml") for name in ("70b-30-days", "70b-30-days-two-stage"))
    code, out, err = command(a, "--compare", b, "--plot", str(plot))
    assert code == 0, err
    assert "two-stage wastes less: 5.8 in 100 of the time: 43,000 device-hours." in out
    assert plot.read_text().startswith("<?xml")
    code, out, _ = command(str(CONFIGS / "llama70b-1024.toml"), "--scale", "10", "--json")
    told = json.loads(out)
    assert (told["setup"]["devices"], told["setup"]["per_node"]) == (10_240, 8)
    assert told["setup"]["mtbf"] == pytest.approx(sums("llama70b-1024").setup.mtbf / 10)
    assert told["optimum"] == pytest.approx(sums("llama70b-1024").optimum / math.sqrt(10))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a plan's file, or --from ROOT, or both"),
        (["nowhere.toml"], "No such file"),
        ([str(CONFIGS / "naive.toml"), "--plot", "x.gif"], "a name that ends in .svg, .png or .pdf"),
        ([str(CONFIGS / "70b-64-ranks.toml"), "--plot", "x.svg"], "there is no curve"),
        (["--from", "nowhere"], "tells of no run that a plan can be made from"),
        ([str(CONFIGS / "naive.toml"), "--scale", "0"], "--scale"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, said, tmp_path):
    code, _, err = command(*arguments)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_a_plan_from_a_run_takes_what_it_measured(tmp_path):
    root = tmp_path / "run"
    lives = 3
    for life in range(lives):
        with ck.Saver(root) as saver:
            _, step = saver.resume({"w": np.zeros(1000)})
            for later in (1, 2):
                saver.save(step + later, {"w": np.zeros(1000)})
                saver.wait()
            if life:  # Killed: the line that tells of the end is not written.
                saver._log.add = saver._log.note
    lines = [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]
    with (root / "events.jsonl").open("a") as file:
        file.write('{"kind": "commi')  # As a crash leaves it.
    found = _plan_run.measured(str(root))
    committed = [line for line in lines if line["kind"] == "committed"]
    assert len(committed) == found.saves == 2 * lives
    assert found.pause == np.median([line["seconds"]["blocked"] for line in committed])
    assert found.write == np.median([line["seconds"]["all"] for line in committed])
    assert found.size == 8000
    assert found.failures.failures == 1  # Of the two that were killed the last may be running.
    setup = _plan_run.applied(sums("llama70b-1024").setup, found)
    assert (setup.size, setup.shared.pause, setup.shared.write) == (8000, found.pause, found.write)
    assert setup.mtbf == found.failures.mtbf
    told = _plan_run.text(found)
    assert "in the last 6 saves the median pause was" in told
    assert "1 failure in" in told
    code, out, err = command(str(CONFIGS / "llama70b-1024.toml"), "--from", str(root), "--json")
    assert code == 0, err
    assert json.loads(out)["measured"]["saves"] == 6


def test_a_run_in_which_nothing_failed_leaves_the_files_failures(tmp_path):
    with ck.Saver(tmp_path) as saver:
        saver.save(1, {"w": np.zeros(1000)})
    found = _plan_run.measured(str(tmp_path))
    before = sums("llama70b-1024").setup
    assert _plan_run.applied(before, found).mtbf == before.mtbf
    assert "too little to plan by" in _plan_run.text(found)


# --- the words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pause", "write", "notice", "said"),
    [
        (5, 20, 60, "is long enough for a last save: 45 s at worst"),
        (
            5,
            20,
            30,
            "is long enough for a last save (25 s); where one has just begun, that one must do",
        ),
        (5, 196, 30, "is too short for a last save, which takes 201 s: the work since the one before is lost."),
        (5, None, 30, "leaves 25 s for the write"),
    ],
)
def test_what_a_notice_is_enough_for(pause, write, notice, said):
    setup = _plan_file.Setup(shared=_plan_file.Saves(pause=pause, write=write), notices=(notice,))
    assert said in _plan_report.text(_plan_report.sums(setup))


def test_a_write_that_takes_longer_than_the_best_interval_bounds_it():
    setup = _plan_file.Setup(mtbf=HOUR, shared=_plan_file.Saves(pause=1, write=1200))
    found = _plan_report.sums(setup)
    assert found.optimum == 1201
    told = _plan_report.text(found)
    assert "A save takes 20 min, and the next one begins after it: so that is the best." in told
    assert "Failures come so soon that these sums are too large" in told


def test_a_run_that_never_gets_ahead_is_told_so():
    setup = _plan_file.Setup(
        mtbf=10, devices=1000, length=DAY, shared=_plan_file.Saves(pause=60, write=60, restart=600)
    )
    told = _plan_report.text(_plan_report.sums(setup))
    assert "So such a run never gets ahead." in told
    assert " of 24,000 device-hours" not in told


def test_an_interval_that_is_shorter_than_a_save_is_told():
    setup = _plan_file.Setup(mtbf=DAY, shared=_plan_file.Saves(interval=600, pause=5, write=1500))
    found = _plan_report.sums(setup)
    assert (
        "A save takes 25 min, and those that come due meanwhile are skipped: it is every 30 min."
        in _plan_report.text(found)
    )
    assert found.today.total == plan.waste(1800, 5, DAY, write=1500).total
    assert found.best.total <= found.today.total


def test_two_tiers_that_are_alike_are_two():
    tier = plan.Tier(1200, 5, write=4)
    twin = plan.Tier(1200, 5, write=4)
    assert plan.tiered([(1e5, tier), (2e5, twin)]).stall == pytest.approx(10 / 1200)
    assert plan.tiered([(1e5, tier), (2e5, tier)]).stall == pytest.approx(5 / 1200)


def test_a_crashed_process_goes_on_from_the_newest_copy_that_is_left():
    local, shared = plan.Tier(3600, 5, write=4, restart=60), plan.Tier(600, 5, write=20, restart=300)
    found = plan.tiered([(1e5, [local, shared]), (2e5, shared)])
    chance = np.random.default_rng(7)
    ages = np.stack([4 + chance.uniform(0, 3600, 10**6), 20 + chance.uniform(0, 600, 10**6)])
    assert found.lost == pytest.approx(ages.min(0).mean() / 1e5 + 320 / 2e5, rel=2e-3)
    again = np.where(ages[0] < ages[1], 60, 300).mean()
    assert found.restart == pytest.approx(again / 1e5 + 300 / 2e5, rel=2e-3)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1, 1e5), st.floats(0, 1e5), st.floats(0, 1e4)), min_size=2, max_size=4))
def test_the_newest_of_several_tiers_is_no_older_than_any_of_them(given):
    tiers = [plan.Tier(interval, 0, write, restart) for interval, write, restart in given]
    age, restart = plan._newest(tiers)
    alone = [plan._newest([tier]) for tier in tiers]
    assert age <= min(old for old, _ in alone) * (1 + 1e-6)
    assert age >= min(tier.write for tier in tiers) * (1 - 1e-6)
    low, high = min(again for _, again in alone), max(again for _, again in alone)
    assert low - 1e-6 * (1 + high) <= restart <= high * (1 + 1e-6) + 1e-9


def test_an_error_that_ended_a_run_is_a_failure_and_ctrl_c_is_none():
    told = [event(0, "started"), event(100, "closed") | {"message": "after RuntimeError: NCCL timed out"}]
    told += [event(200, "started"), event(300, "closed") | {"message": "after KeyboardInterrupt: "}]
    told += [event(400, "started"), event(450, "closed") | {"message": "what came after step 3 is not saved"}]
    found = plan.fit_mtbf(told)
    assert (found.failures, found.seconds) == (1, 250)


def test_a_fit_of_a_runs_events_is_not_biased():
    """A run tells nothing between its last commit and the crash."""
    chance, told, now = np.random.default_rng(3), [], 0.0
    for _ in range(3000):
        life = chance.exponential(4 * HOUR)
        told += [event(now, "started")]
        told += [event(now + 2 * HOUR * k, "committed") for k in range(1, int(life / (2 * HOUR)) + 1)]
        now += life + 600
    assert plan.fit_mtbf(told).mtbf == pytest.approx(4 * HOUR, rel=0.05)


def test_storage_is_never_of_more_checkpoints_than_there_are():
    assert plan.storage(1, length=10 * DAY, last=3, daily=30) == 13
    assert plan.storage(1, length=10 * DAY, last=5000, interval=DAY) == 10
    for odd in ({"last": 0}, {"last": -5}, {"last": 1, "daily": -3}):
        with pytest.raises(ValueError, match="last is 1 or more"):
            plan.storage(1, length=DAY, **odd)
    setup = _plan_file.Setup(size=1e12, length=10 * DAY, mtbf=DAY, last=3, daily=30, shared=_plan_file.Saves(pause=5))
    assert "and one a day for 10 days: 13 ×" in _plan_report.text(_plan_report.sums(setup))


def test_failures_that_were_on_other_devices_are_scaled():
    data = b"[failures]\nmtbf = '2.8 h'\ndevices = 16384\n[cluster]\ndevices = 1024"
    assert _plan_file.loads(data, "a.toml").mtbf == pytest.approx(2.8 * HOUR * 16)


def test_a_larger_cluster_has_its_nodes_counted_anew():
    setup = _plan_file.Setup(devices=90, per_node=8)
    assert (setup.nodes, _plan_file.scaled(setup, 2).nodes) == (12, 23)
    assert _plan_file.scaled(setup, 0.001).devices == 1
    assert _plan_file.scaled(setup, 0.1).name == "plan, 10 times smaller"


def test_near_the_time_between_failures_the_exact_best_is_told():
    setup = _plan_file.Setup(mtbf=HOUR, shared=_plan_file.Saves(pause=3000, write=0))
    every, share = _plan_report.exactly_best(setup)
    assert share == pytest.approx(0.1785, abs=0.001)
    assert f"every {_units.duration(every)} is best: 17." in _plan_report.text(_plan_report.sums(setup))


def test_plans_of_other_clusters_are_compared_by_shares_alone():
    told = _plan_report.compared(sums("70b-30-days"), sums("70b-30-days", devices=64))
    assert told.endswith("Both waste the same.")
    told = _plan_report.compared(sums("70b-30-days"), sums("70b-30-days", devices=64, mtbf=86_400 * 16.0))
    assert told.endswith("wastes less: 3.9 in 100 of the time.")
    told = _plan_report.compared(sums("70b-30-days"), sums("naive"))
    assert "failures not counted in" in told
    assert "less of its time" not in told


def test_a_file_that_is_too_large_is_refused(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"#" * (1 << 20) + b"\n[save]\npause = 1")
    with pytest.raises(ck.CheckpointError, match="16 kB at most"):
        _plan_file.load(str(tmp_path / "a.toml"))


def test_numpys_numbers_are_numbers():
    assert plan.young(np.float32(5), np.int64(86_400)) == plan.young(5, 86_400)
    assert plan.state_bytes(np.int64(10)) == plan.state_bytes(np.float32(10)) == 140


def labels(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_plot_marks_what_it_says(tmp_path):
    from ckpt_jax import _plan_plot

    figure = _plan_plot.draw(sums("70b-30-days"))
    axes = figure.axes[0]
    assert labels(figure) == [
        "wasted in all", "stall in saves", "work lost", "best: every 97 min, 6.7 %", "today: every 2 h, 6.9 %",
    ]  # fmt: skip
    assert {line.get_color() for line in axes.get_lines()} == {"black"}
    styles = [(line.get_linestyle(), line.get_marker()) for line in axes.get_lines()]
    assert len(set(styles)) == len(styles)  # Told apart without colour.
    total = axes.get_lines()[0]
    at = int(np.argmin(total.get_ydata()))
    assert total.get_xdata()[at] == pytest.approx(sums("70b-30-days").optimum, rel=0.05)
    assert "share of the time (%)" in axes.get_ylabel()
    for kind in ("svg", "png", "pdf"):
        _plan_plot.save(sums("llama70b-1024"), str(tmp_path / f"x.{kind}"))
        assert (tmp_path / f"x.{kind}").stat().st_size > 1000


def test_the_plot_of_two_plans_tells_them_apart():
    from ckpt_jax import _plan_plot

    one, other = sums("70b-30-days"), sums("70b-30-days-two-stage")
    figure = _plan_plot.draw(one, other)
    assert labels(figure) == [
        "70 B for 30 days on 1,024 GPUs: wasted in all",
        "70 B for 30 days on 1,024 GPUs: best: every 97 min, 6.7 %",
        "70 B for 30 days on 1,024 GPUs: today: every 2 h, 6.9 %",
        "70 B for 30 days on 1,024 GPUs, two-stage: wasted in all",
        "70 B for 30 days on 1,024 GPUs, two-stage: best: every 15 min, 1.1 %",
    ]
    axes = figure.axes[0]
    curves = [line for line in axes.get_lines() if line.get_marker() == "None"]
    for line, each in zip(curves, (one, other), strict=True):
        at = int(np.argmin(line.get_ydata()))
        assert line.get_xdata()[at] == pytest.approx(each.optimum, rel=0.05)
    assert len({line.get_color() for line in curves}) == 2
    assert figure.axes[0].child_axes  # Both have the same device-hours: their axis is drawn.
    assert not _plan_plot.draw(one, sums("naive")).axes[0].child_axes


def test_every_mark_lies_on_the_plot():
    """Where saves are skipped, today's stands at the interval that is left."""
    from ckpt_jax import _plan_plot

    setup = _plan_file.loads(b"[failures]\nmtbf='24 h'\n[save]\ninterval=10\npause=5\nwrite=196", "x")
    figure = _plan_plot.draw(_plan_report.sums(setup))
    low, high = figure.axes[0].get_xlim()
    marks = [line.get_xdata()[0] for line in figure.axes[0].get_lines() if line.get_marker() != "None"]
    assert 210 in marks
    assert all(low <= mark <= high for mark in marks)


def test_the_table_has_a_column_for_each_thing_that_is_known():
    assert "device-hours" not in _plan_report.table(sums("naive"))[0]
    assert "device-hours" in _plan_report.table(sums("llama70b-1024"))[0]


def test_the_guide_lists_every_key_of_the_json():
    guide = (ROOT / "docs" / "plan.md").read_text()
    setup = _plan_file.load(str(CONFIGS / "70b-30-days-tiered.toml"))
    found = _plan_report.sums(dataclasses.replace(setup, notices=(120.0,), last=3))
    measured = _plan_run.Measured("x", 1, 1.0, 1.0, 1.0, 1.0, plan.fit_mtbf([]), 0, 0)
    told = _plan_report.as_json(found, found, measured)
    assert told.pop("compared").keys() == told.keys() - {"measured"}
    told["setup"]["recipe"] = told["setup"]["shares"] = None  # Their keys are the user's own.
    told["setup"]["local"] = None  # As `shared`.

    def keys(value: object, place: str):
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value, place = value[0], f"{place}[]"
        if isinstance(value, dict):
            for key, item in value.items():
                yield from keys(item, f"{place}.{key}".lstrip("."))
        else:
            yield place

    table = guide.partition("## What `--json` gives")[2].partition("\n## ")[0]
    listed = set(
        re.findall(r"`([a-z_.\[\]]+)`", "".join(row.split("|")[1] for row in table.splitlines() if "|" in row))
    )
    assert listed - {"compared"} == set(keys(told, ""))


def test_the_guide_lists_every_key():
    guide = (ROOT / "docs" / "plan.md").read_text()
    read = _plan_file._Reader({"local": {"pause": 1}, "failures": {"shares": {}}})
    _plan_file._setup(read)
    for section, keys in read._known.items():
        for key in keys:
            assert f"`{section}.{key}`".replace("`.", "`") in guide, (section, key)


TWO = b"""
[failures]
mtbf = "24 h"
restart = "20 min"
detection = "5 min"
[failures.shares]
process = 0.9
node = 0.1
[save]
pause = "5 s"
write = "1 min"
[local]
pause = "1 s"
write = "5 s"
restart = "1 min"
"""


@pytest.mark.parametrize("interval", [None, "10 min", "2 h"])
@pytest.mark.parametrize("factor", [1, 10])
def test_with_two_tiers_the_best_interval_is_the_least_of_the_curve(interval, factor):
    more = "" if interval is None else f'interval = "{interval}"'
    setup = _plan_file.scaled(_plan_file.loads(TWO + more.encode(), "x"), factor)
    found = _plan_report.sums(setup)
    curve = [_plan_report.row(setup, found.optimum * 2 ** (step / 20)).total for step in range(-60, 61)]
    assert found.best.total <= min(curve) * 1.001
    assert found.best.total <= min(row.total for row in found.rows)
    told = _plan_report.text(found)
    assert ("; today" in told) == (interval is not None)


def test_with_two_tiers_the_sum_is_what_a_simulation_gives():
    simulated = pytest.importorskip("ckpt_jax.plan_sim")
    pytest.importorskip("simpy", reason="the floors of the core are without it")
    local, shared = plan.Tier(3791, 1, 5, 60), plan.Tier(4603, 5, 60, 1200)
    classes = [(96_000.0, [local, shared]), (864_000.0, shared)]
    found = plan.tiered(classes, detection=300)
    failures = [simulated.Failures(96_000, 0), simulated.Failures(864_000, 1)]
    mean = simulated.mean(simulated.Run(3e7, [local, shared], failures, detection=300), runs=8)
    assert 1 - mean.goodput == pytest.approx(found.total, rel=0.03, abs=4 * mean.error)


def test_a_local_tier_whose_saves_cost_nothing_is_counted():
    free = _plan_report.sums(_plan_file.loads(TWO.replace(b'pause = "1 s"\nwrite = "5 s"', b"pause = 0"), "x"))
    cheap = _plan_report.sums(_plan_file.loads(TWO.replace(b'pause = "1 s"\nwrite = "5 s"', b'pause = "1 ms"'), "x"))
    assert free.best.restart == pytest.approx(cheap.best.restart, rel=0.05)
    assert free.best.total <= cheap.best.total
    assert free.best.goodput is None


def test_a_run_that_gets_ahead_is_not_said_never_to():
    setup = _plan_file.loads(b"[failures]\nmtbf = '24 h'\n[save]\npause = 196\ninterval = '2 days'", "x")
    told = _plan_report.text(_plan_report.sums(setup))
    assert "never gets ahead" not in told
    assert "by the exact value the run gets ahead 31.2 % of the time" in told
    setup = _plan_file.loads(b"[failures]\nmtbf = '1 min'\n[save]\npause = 196\ninterval = '2 days'", "x")
    assert "never gets ahead" in _plan_report.text(_plan_report.sums(setup))


def test_currencies_are_not_subtracted():
    price = b"[failures]\nmtbf='9 h'\n[run]\nlength='9 days'\n[save]\npause=%d\n"
    price += b"[cluster]\ndevices=8\nprice=2\ncurrency='%s'"
    one, other = (_plan_report.sums(_plan_file.loads(price % each, "x")) for each in ((9, b"EUR "), (99, b"$")))
    assert "EUR" not in _plan_report.compared(one, other).splitlines()[-1]


@pytest.mark.parametrize("text", ["30", "30 ss", "1 hr", ""])
def test_a_text_without_a_unit_is_refused(text):
    with pytest.raises(ValueError, match="is not of the form"):
        _units.parse(text, "seconds")


@pytest.mark.parametrize(
    "data",
    [
        b"[save]\npause" + b".a" * 1000 + b" = 1",
        b"[cluster]\ndevices = 0x" + b"f" * 5000,
        b"[failures]\nmtbf = 0x" + b"f" * 5000,
        b'[state]\nparameters = 9\nrecipe = {"a\\n\\u001b[31mb" = 99}',
        b'"\\u001b[31mb" = 99',
    ],
)
def test_what_cannot_be_printed_is_told_all_the_same(data):
    with pytest.raises(ck.CheckpointError) as caught:
        _plan_file.loads(data, "x")
    told = str(caught.value)
    assert "\x1b" not in told


def test_a_share_that_is_next_to_nothing_is_refused():
    with pytest.raises(ck.CheckpointError, match=r"failures\.shares\.node: expected 0, or a millionth"):
        _plan_file.loads(TWO.replace(b"0.9", b"1.0").replace(b"node = 0.1", b"node = 1e-320"), "x")


def test_a_file_may_begin_with_a_byte_order_mark():
    assert _plan_file.loads(b"\xef\xbb\xbf[save]\npause = 1", "x").shared.pause == 1


def test_the_time_that_nothing_ran_is_no_interval(tmp_path):
    ck.save(tmp_path / "1", {"n": 1})  # No arrays: 0 bytes.
    lines = []
    for life in range(3):
        at = life * 7 * 86_400
        lines += [{"kind": "started", "time": at}]
        lines += [{"kind": "committed", "time": at + 60 * n, "seconds": {"blocked": 1, "all": 2}} for n in (1, 2)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line | {"process": 0}) + "\n" for line in lines))
    found = _plan_run.measured(str(tmp_path))
    assert found.interval == 60
    assert found.saves == 6
    setup = _plan_run.applied(_plan_file.loads(b"[run]\nlength='9 days'\n[state]\nbytes=9\n[keep]\nlast=3", "x"), found)
    assert setup.size is None
    _plan_report.text(_plan_report.sums(setup))


def test_a_clock_that_jumps_makes_no_life_of_years():
    told = [{"time": t, "kind": k} for t, k in ((1, "started"), (1.7e9, "committed"), (1.7e9 + 60, "started"))]
    assert plan.fit_mtbf(told).seconds < 100


def test_a_bucket_tells_of_no_run():
    with pytest.raises(ck.CheckpointError, match="is in a bucket, and tells of no run"):
        _plan_run.measured("memory://plan/run")


@pytest.mark.parametrize(
    "call",
    [
        lambda: plan.young(10**400, 1),
        lambda: plan.fit(3, 10**400),
        lambda: plan.state_bytes(10**400),
        lambda: plan.state_bytes(1e9, {"w": math.nan}),
        lambda: plan.state_bytes(1e9, {"w": -1}),
        lambda: plan.storage(1, length=1e10, interval=1e-310),
        lambda: plan.mtbf(1, 1, devices=math.inf, to=math.inf),
        lambda: plan.fit_mtbf([{"time": 10**400, "kind": "started"}]),
    ],
)
def test_numbers_that_no_float_holds_are_refused(call):
    with pytest.raises(ValueError, match=r"not|short"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: plan.fit_mtbf([3]),
        lambda: plan.state_bytes(1e9, [1]),  # pyright: ignore
        lambda: plan.state_bytes(1j),
        lambda: ck.Every(mtbf=True),
    ],
)
def test_other_things_than_numbers_are_refused(call):
    with pytest.raises(TypeError):
        call()
