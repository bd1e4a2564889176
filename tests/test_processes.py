"""Several real processes: each writes its share, one commits, and any number of them restores."""

import textwrap
from pathlib import Path

import numpy as np
import pytest

import ckpt_jax as ck
from tests.forked import Child

HEAD = """
import os, sys
index, count, port, root = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
import numpy as np, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import ckpt_jax as ck
from tests.forked import Child
mesh = jax.make_mesh((count, 2), ("data", "model"))
W = np.arange(4096 * 512, dtype=np.float32).reshape(4096, 512)
def place(value, spec):
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda at: value[at])
"""


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(body: str, root: Path, count: int) -> list[str]:
    """Runs one script in so many processes; returns what each printed."""
    script = HEAD + textwrap.dedent(body)
    port = free_port()
    started = [Child(script, str(i), str(count), str(port), str(root)) for i in range(count)]
    ended = [process.communicate(timeout=120)[0] for process in started]
    for process, out in zip(started, ended, strict=True):
        assert process.returncode == 0, out
    return ended


SAVE = """
state = {"rows": place(W, P("data")), "both": place(W, P("data", "model")), "all": place(W, P()), "step": 7,
         "host": np.arange(5), "one": jnp.ones(3), "key": jax.random.key(0), "rng": np.random.default_rng(index)}
manifest = ck.save(f"{root}/7", state)
print(manifest.seal, manifest.writers)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    return root, run(SAVE, root, 4)


def test_all_processes_return_the_same_manifest(saved):
    root, printed = saved
    seal = ck.open(root / "7").manifest.seal
    assert printed == [f"{seal} 4\n"] * 4
    assert ck.verify(root / "7").ok


def test_replicated_data_is_written_once_and_shared_out(saved):
    """F-9: three arrays of 8 MiB; each of four processes writes a quarter, although all hold `all`."""
    root, _ = saved
    sizes = [sum(f.stat().st_size for f in (root / f"7/state/ocdbt.process_{i}").rglob("*")) for i in range(4)]
    assert max(sizes) < 1.02 * 3 * (4096 * 512 * 4) / 4 < 1.02 * sum(sizes) / 4 * 1.02


def test_one_process_restores_what_four_saved(saved):
    root, _ = saved
    found = ck.open(root / "7")
    expected = np.arange(4096 * 512, dtype=np.float32).reshape(4096, 512)
    for name in ("rows", "both", "all"):
        np.testing.assert_array_equal(found[name][...], expected)
    assert found["step"][()] == 7


def test_another_number_of_processes_restores(saved):
    root, _ = saved
    body = """
    like = {"both": place(np.zeros_like(W), P("model", "data"))}
    found = ck.restore(f"{root}/7", like, only="both")["both"]
    assert all(np.array_equal(np.asarray(s.data), W[s.index]) for s in found.addressable_shards)
    try:
        ck.restore(f"{root}/7", {"rng": np.random.default_rng(0)}, only="rng")
    except ck.Mismatch as error:
        print(error.faults[0])
    """
    expected = (
        "rng: its checkpoint has one state for each of 4 processes, and there are 2 now; "
        'to begin it anew, leave it out of `like` and restore with on_extra="ignore"\n'
    )
    assert run(body, root, 2) == [expected] * 2


def test_each_process_gets_its_own_state_back(saved):
    root, _ = saved
    body = """
    rng = np.random.default_rng(99)
    ck.restore(f"{root}/7", {"rng": rng}, only="rng")
    print(rng.integers(1 << 40) == np.random.default_rng(index).integers(1 << 40))
    """
    assert run(body, root, 4) == ["True\n"] * 4


def test_c105_host_values_must_be_alike(tmp_path):
    """C105: no process's value wins silently."""
    body = """
    try:
        ck.save(f"{root}/1", {"seed": np.full(2, index), "w": place(W, P("data"))})
    except ck.CheckpointError as error:
        print("seed: expected the same value in every process, found another in process 1" in str(error))
    """
    assert run(body, tmp_path, 2) == ["True\n"] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_not_shared_is_found_out(tmp_path):
    """Two hosts with disks of their own under one path: here, two paths."""
    body = """
    try:
        ck.save(f"{root}/{index}/1", {"w": place(W, P("data"))})
    except ck.CheckpointError as error:
        print(str(error).splitlines()[0])
    """
    first, second = run(body, tmp_path, 2)
    assert first == "process 1 could not write its part; nothing was committed:\n"
    assert second.endswith("cannot be seen from this process\n")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
