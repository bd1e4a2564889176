"""The demo does what it says: here with a smaller model, and on disk as well as in words."""

import fcntl
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import typer
from rich.console import Console

import ckpt_jax
from ckpt_jax import cli
from ckpt_jax.demo import checks, children, settings, telling, text
from ckpt_jax.demo.checks import Step

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
keep = 2
kill_at = 4
timeout = 3.0
seed = 3

[mesh.usual]
shape = [4, 2]
axes = ["data", "model"]
processes = 2

[mesh.other]
shape = [2, 2]
axes = ["replica", "shard"]
processes = 1
"""


def demo(folder: Path) -> list[str]:
    """The command that runs the demo with the small settings."""
    config = folder / "small.toml"
    config.write_text(SMALL, encoding="utf-8")
    code = "import sys; from ckpt_jax import demo; sys.exit(demo.run(sys.argv[1], config=sys.argv[2]))"
    return [sys.executable, "-W", "error", "-c", code, str(folder / "run"), str(config)]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, testrun_uid: str) -> tuple[Path, str]:
    """The demo's folder, and what it printed: run once, by the first of pytest's processes that asks for it."""
    folder = tmp_path_factory.getbasetemp().parent / f"demo-{testrun_uid}"
    folder.mkdir(exist_ok=True)
    with (folder / "said").open("a+", encoding="utf-8") as said:
        fcntl.flock(said, fcntl.LOCK_EX)
        said.seek(0)
        if not (told := said.read()):
            done = subprocess.run(demo(folder), capture_output=True, encoding="utf-8", check=False, timeout=600)
            assert done.returncode == 0, done.stdout + done.stderr
            said.write(told := done.stdout)
    return folder / "run", told


def killed_step(said: str) -> int:
    """The step whose save was cut short."""
    (step,) = re.findall(r"^  ok      step (\d+) does not exist", said, re.MULTILINE)
    return int(step)


def same_bits(a: Path, b: Path) -> None:
    """Two checkpoints hold the same, looked at with NumPy."""
    before, after = ckpt_jax.open(a), ckpt_jax.open(b)
    assert before.manifest.attempt != after.manifest.attempt, "it was saved twice, not copied"
    assert before.keys() == after.keys()
    for name, leaf in before.items():
        if leaf.shape:
            assert np.asarray(leaf).tobytes() == np.asarray(after[name]).tobytes(), name
        else:
            assert leaf[()] == after[name][()], name
    assert {leaf.kind for leaf in after.values()} == {"array", "key", "scalar", "live"}


def test_the_demo_says_that_everything_held(story: tuple[Path, str]):
    _, said = story
    assert "all of this held" in said
    assert "FAILED" not in said
    assert len(re.findall(r"^  ok      ", said, re.MULTILINE)) == 15


def test_the_kill_left_no_checkpoint_of_that_step_and_the_one_before_it_whole(story: tuple[Path, str]):
    folder, said = story
    step = killed_step(said)
    (written,) = re.findall(rf"step {step}: SIGKILL to process 1, with (\S+ \S+) written", said)
    assert not written.startswith("0 ")
    assert ckpt_jax.steps(folder / "left") == [step - 2]
    ckpt_jax.verify(folder / "left" / str(step - 2)).check()
    assert not list(folder.glob("*/*-tmp-*")), "process 0 took away what was half there"


def test_process_0_says_who_was_missing_and_in_which_phase(story: tuple[Path, str]):
    folder, said = story
    step = killed_step(said)
    why = f"step {step} failed: process 1 did not get through the phase `write` within 3 s"
    assert f"  process 0: {why}\n" in said
    events = [json.loads(line) for line in (folder / "killed" / "events.jsonl").read_text().splitlines()]
    (failed,) = [event for event in events if event["kind"] == "failed"]
    assert failed["step"] == step
    assert failed["message"].startswith(why.partition("failed: ")[2])


def test_every_leaf_came_back_on_the_other_mesh_bit_for_bit(story: tuple[Path, str]):
    folder, said = story
    start = str(killed_step(said) - 2)
    same_bits(folder / "left" / start, folder / "restored" / start)
    before, after = (ckpt_jax.open(folder / run / start) for run in ("left", "restored"))
    assert ckpt_jax.diff(before.path, after.path).equal
    assert (before.manifest.writers, after.manifest.writers) == (2, 1)
    matrix = "arrays.model.bytes.embedding.value"
    assert (before[matrix].sharding or {})["axes"] == {"data": 4, "model": 2}
    assert (after[matrix].sharding or {})["axes"] == {"replica": 2, "shard": 2}


def test_the_run_that_was_moved_went_on_to_its_end(story: tuple[Path, str]):
    folder, said = story
    start = killed_step(said) - 2
    assert ckpt_jax.steps(folder / "moved") == [6, 8]
    samples = 4 * (8 - start)
    assert said.count(f"steps {start + 1} to 8 read the same samples: {samples} of {samples}, in the same order") == 2
    assert ckpt_jax.open(folder / "moved" / "8")["data"][()]["batches"] == 8
    losses = [ckpt_jax.open(folder / run / "8").manifest.metrics["loss"] for run in ("undisturbed", "moved")]
    assert losses[0] == pytest.approx(losses[1], abs=checks.ROUNDING)


def test_the_run_that_lost_a_process_ends_where_the_undisturbed_one_does_bit_for_bit(story: tuple[Path, str]):
    folder, said = story
    for step in ("6", "8"):
        same_bits(folder / "undisturbed" / step, folder / "killed" / step)
        one, two = (ckpt_jax.open(folder / run / step).manifest for run in ("undisturbed", "killed"))
        assert one.metrics == two.metrics
        assert one.writers == two.writers == 2
    rows = re.findall(r"^ +(\d+) +(\d\.\d{7}) +(\d\.\d{7}) +\d\.\d{7}$", said, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == list(range(killed_step(said) - 1, 9))
    assert all(undisturbed == resumed for _, undisturbed, resumed in rows)


def test_it_tells_where_all_is_and_what_to_type_next(story: tuple[Path, str]):
    folder, said = story
    assert f"folder    {folder}" in said
    commands = re.findall(r"^  ckpt-jax (.*)$", said, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["ls", "show", "verify", "diff", "diff", "prune"]
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", "ckpt_jax.cli", *command.split()], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, command + done.stdout + done.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_trainers_end_with_the_demo_also_if_one_hangs(tmp_path: Path, how: signal.Signals):
    """Process 1 stands still, so process 0 waits for it in a collective."""
    # A shell's background job ignores the signal, and what it starts inherits that: here it is heeded again.
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", heed, *demo(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    with child.stdout:
        assert any("parameters" in line for line in child.stdout)  # The trainers run.
        trainers = children_of(child.pid)
        assert len(trainers) == 2
        os.kill(trainers[1], signal.SIGSTOP)
        child.send_signal(how)
        child.stdout.read()
    assert child.wait() != 0
    wait_until_gone(trainers[0])
    if how == signal.SIGKILL:  # Nobody was there to kill it, and it could not see that.
        os.kill(trainers[1], signal.SIGCONT)
    wait_until_gone(trainers[1])


def wait_until_gone(pid: int) -> None:
    for _ in range(6000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state.startswith("Z"):  # It has ended; nobody has looked after it yet.
            return
        time.sleep(0.01)
    pytest.fail(f"process {pid} goes on")


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
    assert re.search(r"FAILED: process \d ended with exit code 1", done.stdout)
    assert str(tmp_path / "run" / "logs" / "undisturbed_") in done.stdout
    assert "not divisible" in done.stdout or "reshape" in done.stdout, done.stdout


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
    windows = text.windows(np.arange(101, dtype=np.uint8), context=10)
    batches = ckpt_jax.data.global_batches(windows, 5, seed=0, process=0, processes=1)
    one, two = next(batches), next(batches)
    positions = [*one["position"], *two["position"]]
    assert sorted(positions) == list(range(0, 100, 10))
    assert positions != sorted(positions)
    for start, tokens in zip(one["position"], one["tokens"], strict=True):
        assert tokens.tolist() == list(range(start, start + 11))


def test_one_process_goes_on_with_the_batches_of_two():
    windows = text.windows(np.arange(200, dtype=np.uint8), context=4)
    shares = [ckpt_jax.data.global_batches(windows, 4, seed=1, process=i, processes=2) for i in (0, 1)]
    for _ in range(20):  # Beyond the end of the first epoch.
        both = [next(share)["position"].tolist() for share in shares]
    alone = ckpt_jax.data.global_batches(windows, 4, seed=1, process=0, processes=1)
    alone.set_state(shares[1].get_state() | {"batches": 19})
    assert next(alone)["position"].tolist() == [at for share in both for at in share]


@pytest.mark.parametrize("name", ["tiny_gpt", "quick"])
def test_the_sums_in_the_settings_are_right(name: str):
    path = settings.where(name)
    model = settings.load(path).model
    block = 12 * model.width**2 + 2 * model.width
    parameters = (model.vocabulary + model.context + 1) * model.width + model.layers * block
    written = path.read_text(encoding="utf-8")
    assert f"= {parameters:,}\n" in re.sub(r" +", " ", written)
    assert f"{parameters:,} * 12 = {parameters * 12:,} bytes" in re.sub(r" +", " ", written)


@pytest.mark.parametrize("name", ["tiny_gpt", "quick"])
def test_the_settings_leave_three_saves_to_be_killed_in_and_one_to_go_back_to(name: str):
    chosen = settings.load(settings.where(name))
    train = chosen.train
    assert train.steps % train.save_every == train.kill_at % train.save_every == 0
    assert train.save_every < train.kill_at <= train.steps - 2 * train.save_every
    assert {mesh.processes: mesh.devices for mesh in chosen.mesh.values()} == {2: 8, 1: 4}


@pytest.mark.parametrize("quick", [True, False])
def test_the_command_takes_the_settings_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
):
    from ckpt_jax.demo import story

    asked = []
    monkeypatch.setattr(story, "_tell", lambda console, plan: asked.append(plan.config) or True)
    with pytest.raises(typer.Exit) as left:
        cli.demo(str(tmp_path / "run"), quick=quick)
    assert left.value.exit_code == 0
    assert asked == [settings.where("quick" if quick else "tiny_gpt")]


def test_quick_is_smaller():
    quick, usual = (settings.load(settings.where(name)) for name in ("quick", "tiny_gpt"))
    assert quick.model.width < usual.model.width
    assert quick.train.steps < usual.train.steps


def test_a_run_that_reads_other_samples_or_drifts_off_is_not_the_same():
    run = {1: Step(3.0, (0, 64), 0.1), 2: Step(2.5, (128, 192), 0.1)}
    assert [check.holds for check in checks.same_run(run, run)] == [True, True]
    other = run | {2: Step(2.6, (128, 256), 0.1)}
    assert [check.holds for check in checks.same_run(run, other)] == [False, False]
    assert checks.same_run(run, other)[0].found == "3 of 4, in the same order"
    assert [check.holds for check in checks.same_run(run, {})] == [False, False]


def test_on_the_same_mesh_a_loss_that_differs_in_the_last_bit_is_another():
    run = {1: Step(3.0, (0, 64), 0.1), 2: Step(2.5, (128, 192), 0.1)}
    assert [check.holds for check in checks.same_losses(run, run)] == [True, True]
    other = run | {2: Step(float(np.nextafter(np.float32(2.5), np.float32(3))), (128, 192), 0.1)}
    assert [check.holds for check in checks.same_losses(run, other)] == [True, False]
    assert checks.same_losses(run, other)[1].found == "1 of 2"
    assert [check.holds for check in checks.same_losses(run, {})] == [False, False]


def test_a_checkpoint_is_not_compared_with_itself_or_a_copy(tmp_path: Path):
    for run in ("a", "b"):
        ckpt_jax.save(tmp_path / run / "1", {"w": np.zeros(4)})
    shutil.copytree(tmp_path / "a" / "1", tmp_path / "c" / "1")
    first = tmp_path / "a" / "1"
    for run, holds in (("a", False), ("b", True), ("c", False)):
        assert checks.same_checkpoint(first, tmp_path / run / "1")[0].holds == holds
    ckpt_jax.save(tmp_path / "d" / "1", {"w": np.ones(4)})
    found = checks.same_checkpoint(first, tmp_path / "d" / "1")[0]
    assert not found.holds
    assert "w: values differ" in found.found


def test_a_kill_that_cost_a_checkpoint_is_told(tmp_path: Path):
    ckpt_jax.save(tmp_path / "2", {"w": np.zeros(4)})
    cut = children.Cut(4, "4.orbax-checkpoint-tmp-0", 3, 1000)
    said = "step 4 failed: process 1 did not get through the phase `write` within 3 s"
    assert all(check.holds for check in checks.killed(tmp_path, cut, said))
    assert [check.holds for check in checks.killed(tmp_path, cut, "nothing")] == [True, True, True, False]
    ckpt_jax.save(tmp_path / "4", {"w": np.zeros(4)})
    assert [check.holds for check in checks.killed(tmp_path, cut, said)] == [False, False, True, True]


def test_a_survivor_that_hangs_is_not_waited_for_once_it_has_told_of_its_save(monkeypatch: pytest.MonkeyPatch):
    """Not every collective notices that a process is dead."""
    monkeypatch.setattr(children, "MOMENT", 0.0)
    monkeypatch.setattr(children, "FAREWELL", 10**6)
    run = children.Trainers([], [])
    run.heard.put({"process": 1, "event": "end"})
    run.heard.put({"process": 0, "event": "failed", "step": 4, "text": "step 4 failed: process 1 is silent:\n  so"})
    console = Console(file=io.StringIO(), width=200)
    assert telling.last_words(console, run, 0, 4).startswith("step 4 failed")
    told = "  process 0: step 4 failed: process 1 is silent\n  process 0: hangs in its training step, and is ended\n"
    assert console.file.getvalue() == told


def test_a_state_that_differs_in_one_leaf_is_not_the_same(tmp_path: Path):
    ckpt_jax.save(tmp_path / "a" / "1", {"w": np.zeros(4), "step": 1})
    ckpt_jax.save(tmp_path / "b" / "1", {"w": np.zeros(4), "step": 2})
    mesh = settings.Mesh((2, 2), ("replica", "shard"), 1)
    found = checks.same_state(tmp_path / "a" / "1", tmp_path / "b" / "1", mesh)
    assert not found[0].holds
    assert "step: values differ: 1 / 2" in found[0].found


def test_the_demo_needs_no_jax_to_begin():
    code = "import sys, ckpt_jax.demo; print([m for m in ('jax', 'flax', 'optax', 'grain') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout == "[]\n"
