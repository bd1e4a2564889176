"""What every test stands on: eight CPU devices, places to save to, and a table of what the torture came to."""

import os

# Before jax is imported anywhere: it reads both just once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest


@pytest.fixture(params=["file", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A root that does not exist yet: in a folder, and in memory."""
    return str(tmp_path / "run") if request.param == "file" else f"memory://{uuid.uuid4()}"


@pytest.fixture
def memory() -> str:
    """A root in memory alone, for tests of what does not depend on the storage."""
    return f"memory://{uuid.uuid4()}"


@pytest.fixture(scope="session")
def mesh42() -> jax.sharding.Mesh:
    """Eight devices as four by two."""
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.fixture
def x64() -> Iterator[None]:
    """JAX with its 64-bit types on."""
    with jax.enable_x64(True):
        yield


# --- torture: how much of it, and what came of it ---------------------------------------------------------------------

Count = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="torture: try everything, not a sample; takes hours")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All of the torture is run in the quick way too, but for tests that are marked as `full`."""
    for item in items:
        if "torture" in item.path.parts and item.get_closest_marker("full") is None:
            item.add_marker("quick")
    if not config.getoption("full"):
        long = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether everything is to be tried, not a sample."""
    return request.config.getoption("full")


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Count:
    """Notes what came of a fault that was tried, for the table at the end: `count(fault, outcome, number=1)`."""

    def note(fault: str, outcome: str, number: int = 1) -> None:
        request.node.user_properties.append(("torture", [fault, outcome, number]))

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was tried and what came of it, as docs/reliability.md has it."""
    table: Counter[tuple[str, str]] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        for _, (fault, outcome, number) in (p for p in getattr(report, "user_properties", ()) if p[0] == "torture"):
            table[fault, outcome] += number if report.when == "call" else 0
    if table:
        terminalreporter.write_sep("-", "torture")
        terminalreporter.write_line("| what was done | what came of it | times |\n|---|---|---|")
        for (fault, outcome), number in sorted(table.items()):
            terminalreporter.write_line(f"| {fault} | {outcome} | {number:,} |")
