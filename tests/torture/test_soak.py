"""A run that is struck at random ends to the last bit as if nothing had happened; if it did not, a soak would tell.

Promise R-14.
"""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import Count
from tests.torture import soak
from tests.torture.soak_account import Facts, table


def _noted(facts: Facts, count: Count) -> None:
    assert not facts.faults, table(facts)
    for blow, number in facts.blows.items():
        count(f"soak: {blow}", "to the bit the undisturbed run", number)
    count("soak: checkpoints", "committed", facts.commits)
    count("soak: checkpoints", "resumed from", facts.resumes)
    count("soak: checkpoints", "fallen back from", facts.fallbacks)
    count("soak: steps", "computed twice", facts.computed - facts.steps)
    count("soak: steps", "in the end", facts.steps)
    count("soak: megabytes", "verified", facts.verified // 10**6)


def test_a_run_that_is_struck_for_a_while_is_the_undisturbed_run(tmp_path: Path, count: Count) -> None:
    facts = soak.soak(0.2, 1, mtbf=2.5, place=tmp_path)
    _noted(facts, count)
    assert facts.blows
    assert facts.commits
    assert facts.resumes
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_that_is_struck_for_ten_minutes_is_the_undisturbed_run(seed: int, tmp_path: Path, count: Count) -> None:
    facts = soak.soak(10, seed, mtbf=6, place=tmp_path)
    print(table(facts))
    _noted(facts, count)


@pytest.mark.parametrize(
    ("forgets", "found"),
    [("key", r"is \d+ \(its loss\)"), ("position", r"is \d+ \(its samples\)")],
    ids=["key", "position"],
)
def test_a_soak_of_a_trainer_that_forgets_something_fails(
    forgets: str, found: str, count: Count, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--minutes", "0.05", "--mtbf", "3", "--seed", "2", "--forget", forgets, "--json"]
    assert soak.main(asked) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert any(re.search(found, fault) for fault in faults), faults
    assert any(fault.startswith("the state at the end is not that of the undisturbed run: ") for fault in faults), (
        faults
    )
    count(f"soak: a trainer that forgets its {forgets}", "found")
