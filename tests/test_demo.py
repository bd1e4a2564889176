"""The demo does what it says: here with a smaller model, and on disk as well as in words."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ckpt_jax
from ckpt_jax.demo import checks, settings, text
from ckpt_jax.demo.checks import Step

pytestmark = pytest.mark.xdist_group("demo")  # One run of it serves most of these.

SMALL = """
[model]
vocabulary = 256
context = 16
layers = 1
width = 64
heads = 2
dropout = 0.1

[train]
batch = 4
steps = 8
warmup = 2
learning_rate = 3e-3
weight_decay = 0.1
clip = 1.0
save_every = 2
kill_at = 6
seed = 3

[mesh.before]
shape = [4, 2]
axes = ["data", "model"]

[mesh.after]
shape = [2, 2]
axes = ["replica", "shard"]
"""


def demo(folder: Path) -> list[str]:
    """The command that runs the demo with the small settings."""
    config = folder / "small.toml"
    config.write_text(SMALL, encoding="utf-8")
    code = "import sys; from ckpt_jax import demo; sys.exit(demo.run(sys.argv[1], config=sys.argv[2]))"
    return [sys.executable, "-W", "error", "-c", code, str(folder / "run"), str(config)]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo, run once: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(demo(folder), capture_output=True, text=True, encoding="utf-8", check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run", done.stdout


def killed_step(folder: Path) -> int:
    """The step whose save was cut short: its attempt folder is there, and no checkpoint of that name."""
    (left,) = (folder / "killed").glob("*.orbax-checkpoint-tmp-*")
    return int(left.name.partition(".")[0])


def test_the_demo_says_that_everything_held(story: tuple[Path, str]):
    _, said = story
    assert "all of this held" in said
    assert "FAILED" not in said
    assert len(re.findall(r"^  ok      ", said, re.MULTILINE)) == 7


def test_the_kill_left_an_attempt_that_is_no_checkpoint_and_the_one_before_it_whole(story: tuple[Path, str]):
    folder, said = story
    step = killed_step(folder)
    steps = ckpt_jax.steps(folder / "killed")
    assert steps == list(range(2, step, 2))
    assert f"step {step} does not exist" in said
    with pytest.raises(ckpt_jax.NotFound):
        ckpt_jax.open(folder / "killed" / str(step))
    assert ckpt_jax.latest(folder / "killed") == str(folder / "killed" / str(steps[-1]))
    ckpt_jax.verify(folder / "killed" / str(steps[-1])).check()


def test_every_leaf_came_back_on_the_other_mesh_bit_for_bit(story: tuple[Path, str]):
    folder, _ = story
    start = ckpt_jax.steps(folder / "killed")[-1]
    before, after = (ckpt_jax.open(folder / run / str(start)) for run in ("killed", "resumed"))
    assert before.keys() == after.keys()
    for name, leaf in before.items():
        assert (
            np.asarray(leaf).tobytes() == np.asarray(after[name]).tobytes()
            if leaf.shape
            else leaf[()] == after[name][()]
        )
    assert ckpt_jax.diff(before.path, after.path).equal
    assert {leaf.kind for leaf in after.values()} == {"array", "key", "scalar", "live"}
    matrix = "state.model.bytes.embedding.value"
    assert (before[matrix].sharding or {})["axes"] == {"data": 4, "model": 2}
    assert (after[matrix].sharding or {})["axes"] == {"replica": 2, "shard": 2}


def test_the_run_that_took_over_went_on_to_its_end(story: tuple[Path, str]):
    folder, said = story
    start, step = ckpt_jax.steps(folder / "killed")[-1], killed_step(folder)
    assert ckpt_jax.steps(folder / "resumed") == list(range(start, max(8, step) + 1, 2))
    assert f"steps {start + 1} to {step} read the same samples again: 8 of 8, in the same order" in said
    (data,) = ckpt_jax.open(folder / "resumed" / str(max(8, step)))["data"][()]
    assert data["next_index"] == max(8, step)


def test_it_tells_where_all_is_and_what_to_type_next(story: tuple[Path, str]):
    folder, said = story
    killed = folder / "killed"
    start = ckpt_jax.steps(killed)[-1]
    assert f"folder    {folder}" in said
    assert f"  ckpt-jax ls {killed}\n" in said
    assert f"  ckpt-jax diff {killed / str(start)} {folder / 'resumed' / str(start)}\n" in said


def test_ctrl_c_ends_the_trainer_too(tmp_path: Path):
    # A shell's background job ignores the signal, and what it starts inherits that: here it is heeded again.
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", heed, *demo(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    with child.stdout:
        assert any("parameters" in line for line in child.stdout)  # The trainer runs.
        trainers = children_of(child.pid)
        assert len(trainers) == 1
        child.send_signal(signal.SIGINT)
        child.stdout.read()
    assert child.wait() != 0
    while any(Path(f"/proc/{pid}").exists() for pid in trainers):
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    if not (tasks / str(pid) / "children").exists():
        pytest.skip("no /proc here to see a process's children in")
    return [int(word) for task in tasks.iterdir() for word in (task / "children").read_text().split()]


def test_a_trainer_that_fails_fails_the_demo_with_its_last_words(tmp_path: Path):
    command = demo(tmp_path)
    config = tmp_path / "small.toml"
    config.write_text(SMALL.replace("heads = 2", "heads = 5"), encoding="utf-8")  # 3 * 64 channels do not go into 5.
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "FAILED: the trainer ended with exit code 1" in done.stdout
    assert str(tmp_path / "run" / "trainers.log") in done.stdout


def test_without_what_it_needs_the_demo_says_what_to_install(tmp_path: Path):
    code = "import sys; sys.modules['flax'] = None; from ckpt_jax import demo; sys.exit(demo.run(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == 'the demo needs flax: pip install "ckpt_jax[demo]"\n'
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("all of it")
    done = subprocess.run(demo(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not empty" in done.stdout
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


# --- the parts --------------------------------------------------------------------------------------------------------


def test_the_text_is_this_pythons_own_source_in_the_same_order_every_time():
    paths = text.files()
    assert Path(json.__file__).parent.parent / "argparse.py" in paths
    assert paths == text.files()
    corpus = text.read(paths[:2])
    assert corpus.dtype == np.uint8
    assert corpus.tobytes() == paths[0].read_bytes() + paths[1].read_bytes()


def test_batches_are_windows_of_the_text_each_once_in_an_epoch():
    corpus = np.arange(101, dtype=np.uint8)
    batches = text.batches(corpus, context=10, batch=5, seed=0)
    one, two = next(batches), next(batches)
    positions = [*one["position"], *two["position"]]
    assert sorted(positions) == list(range(0, 100, 10))
    assert positions != sorted(positions)
    for start, tokens in zip(one["position"], one["tokens"], strict=True):
        assert tokens.tolist() == list(range(start, start + 11))


def test_batches_go_on_from_where_their_state_says():
    corpus = np.arange(200, dtype=np.uint8)
    first = text.batches(corpus, context=4, batch=3, seed=1)
    for _ in range(20):  # Beyond the end of the first epoch.
        next(first)
    second = text.batches(corpus, context=4, batch=3, seed=1)
    second.set_state(first.get_state())
    assert next(first)["position"].tolist() == next(second)["position"].tolist()


def test_the_sums_in_the_settings_are_right():
    path = settings.where()
    model = settings.load(path).model
    block = 12 * model.width**2 + 2 * model.width
    parameters = (model.vocabulary + model.context + 1) * model.width + model.layers * block
    written = path.read_text(encoding="utf-8")
    assert f"= {parameters:,}\n" in re.sub(r" +", " ", written)
    assert f"{parameters:,} * 12 = {parameters * 12:,} bytes" in re.sub(r" +", " ", written)


def test_a_run_that_reads_other_samples_or_drifts_off_is_not_the_same():
    run = {1: Step(3.0, (0, 64), 0.1), 2: Step(2.5, (128, 192), 0.1)}
    assert [check.holds for check in checks.same_run(run, run)] == [True, True]
    other = run | {2: Step(2.6, (128, 256), 0.1)}
    assert [check.holds for check in checks.same_run(run, other)] == [False, False]
    assert checks.same_run(run, other)[0].found == "3 of 4, in the same order"
    assert [check.holds for check in checks.same_run(run, {})] == [False, False]


def test_a_state_that_differs_in_one_leaf_is_not_the_same(tmp_path: Path):
    ckpt_jax.save(tmp_path / "a" / "1", {"w": np.zeros(4), "step": 1})
    ckpt_jax.save(tmp_path / "b" / "1", {"w": np.zeros(4), "step": 2})
    mesh = settings.Mesh((2, 2), ("replica", "shard"))
    found = checks.same_state(tmp_path / "a" / "1", tmp_path / "b" / "1", mesh)
    assert not found[0].holds
    assert "step: values differ: 1 / 2" in found[0].found


def test_the_demo_needs_no_jax_to_begin():
    code = "import sys, ckpt_jax.demo; print([m for m in ('jax', 'flax', 'optax', 'grain') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout == "[]\n"
