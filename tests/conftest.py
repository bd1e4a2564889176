"""What every test stands on: eight CPU devices, and places to save to."""

import os

# Before jax is imported anywhere: it reads both just once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import uuid
from collections.abc import Iterator
from pathlib import Path

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
