"""The story: a run of two processes loses one in the middle of a save, and goes on, here and on other devices."""

import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import ckpt_jax

from .._values import human
from . import checks, children, settings, telling
from .checks import Check
from .children import Cut, Trainers
from .settings import Name, Settings
from .telling import Run, say

VICTIM = 1  # The process that is killed.


def run(
    root: str | None = None,
    *,
    console: Console | None = None,
    config: str | os.PathLike[str] | None = None,
    quick: bool = False,
) -> int:
    """Trains, kills, resumes, compares, and tells what it saw.

    Args:
        root: a new or empty folder for all that the demo writes; None makes one below the system's temporary folder.
        console: where to tell it.
        config: other settings than `configs/demo/tiny_gpt.toml`.
        quick: those of `configs/demo/quick.toml`.

    Returns:
        0 if all that was promised held, 1 if something did not, 2 if the demo could not begin.
    """
    console = console or Console()
    if missing := [name for name in ("flax", "optax", "grain") if importlib.util.find_spec(name) is None]:
        say(console, f'the demo needs {" and ".join(missing)}: pip install "ckpt_jax[demo]"')
        return 2
    try:
        folder = _fresh(root)
    except OSError as error:
        say(console, f"the demo needs a new or empty folder to write in: {error}")
        return 2
    began = time.perf_counter()
    path = Path(config) if config else settings.where("quick" if quick else "tiny_gpt")
    try:
        with ExitStack() as running:
            held = _tell(console, Plan(settings.load(path), path, folder, running))
    except (children.Ended, ckpt_jax.CheckpointError, FileNotFoundError) as error:
        say(console, f"FAILED: {error}")
        held = False
    verdict = "all of this held" if held else "NOT all of this held"
    say(console, f"\n{verdict} ({time.perf_counter() - began:.0f} s in all)")
    return 0 if held else 1


def _fresh(root: str | None) -> Path:
    if root is None:
        above = Path(tempfile.gettempdir()) / "ckpt_jax_demo"
        above.mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d_%H%M%S_"), dir=above))
    folder = Path(root).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")
    return folder


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to happen, and where.

    Attributes:
        running: ends the trainers that outlast their chapter.
    """

    settings: Settings
    config: Path
    folder: Path
    running: ExitStack

    @property
    def undisturbed(self) -> Path:
        return self.folder / "undisturbed"

    @property
    def killed(self) -> Path:
        """The root of the run that is killed, and goes on."""
        return self.folder / "killed"

    @property
    def left(self) -> Path:
        """Where a copy of the newest checkpoint that the kill left stays, as runs delete their old ones."""
        return self.folder / "left"

    @property
    def moved(self) -> Path:
        """The root of the run that goes on with the killed one's checkpoint, on the other mesh."""
        return self.folder / "moved"

    @property
    def restored(self) -> Path:
        """Where that one saves what it restored, as it is."""
        return self.folder / "restored"

    def trainers(
        self, root: Path, on: Name, *, timeout: float | None = None, again: Path | None = None
    ) -> AbstractContextManager[Trainers]:
        """A run in that root, on that mesh."""
        mesh, logs = self.settings.mesh[on], self.folder / "logs"
        return children.trainers(self.config, root, mesh, on, logs=logs, timeout=timeout, again=again)


def _tell(console: Console, plan: Plan) -> bool:
    """The four chapters; whether every check in them held."""
    train, mesh = plan.settings.train, plan.settings.mesh
    last = str(train.steps)
    say(console, f"settings  {plan.config}")
    say(console, f"folder    {plan.folder}")

    say(console, f"\n1. Two processes train on {mesh['usual']}, saving every {train.save_every} steps")
    with plan.trainers(plan.undisturbed, "usual") as two:
        whole = telling.follow(console, two, train.steps, begin=True)
    held = _report(console, [checks.whole(plan.undisturbed / last)])

    say(console, f"\n2. The same again, but process {VICTIM} gets SIGKILL in the middle of a save")
    killed = Run()
    found = _kill(console, plan, killed)
    if found is None:
        return _report(
            console, [Check(False, "it was in the middle of a save", "every save was faster than the signal")]
        )
    held &= _report(console, checks.killed(plan.killed, found.cut, found.said))
    held &= _report(console, checks.same_losses(whole.steps, killed.steps))

    say(console, f"\n3. One process goes on with a copy of step {found.start}, on {mesh['other']}")
    moved = telling.follow(console, found.moved, train.steps)
    left, restored = plan.left / str(found.start), plan.restored / str(found.start)
    held &= _report(console, checks.same_state(left, restored, mesh["other"]))
    held &= _report(console, checks.same_run(whole.steps, moved.steps))

    say(console, f"\n4. Two processes go on in the killed run's own folder, on {mesh['usual']}")
    with plan.trainers(plan.killed, "usual") as two:
        resumed = telling.follow(console, two, train.steps)
    held &= _report(console, checks.same_losses(whole.steps, resumed.steps))
    held &= _report(console, checks.same_checkpoint(plan.undisturbed / last, plan.killed / last))

    telling.compare(console, whole.steps, resumed.steps, moved.steps)
    telling.sizes(console, plan.folder, plan.killed / last, [whole, killed, resumed], moved)
    telling.what_next(console, plan.undisturbed / last, plan.killed / last, left, restored)
    return held


def _report(console: Console, found: Iterable[Check]) -> bool:
    found = list(found)
    for each in found:
        say(console, f"  {'ok    ' if each.holds else 'FAILED'}  {each.claim}: {each.found}")
    return all(each.holds for each in found)


# --- the kill ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Killed:
    """What came of the kill.

    Attributes:
        cut: the save that was cut short.
        said: what process 0 says about it.
        start: the step that was the newest.
        moved: the trainer that goes on with a copy of it.
    """

    cut: Cut
    said: str
    start: int
    moved: Trainers


def _kill(console: Console, plan: Plan, run: Run) -> Killed | None:
    """Trains until one of two is killed in the middle of a save; None if no save was slow enough for that."""
    train = plan.settings.train
    while train.steps not in (ckpt_jax.steps(plan.killed) if plan.killed.exists() else []):
        with plan.trainers(plan.killed, "usual", timeout=train.timeout) as two:
            cut = _in_save(console, plan, two, run)
            if cut is None:
                continue
            say(console, f"  process 0 waits for the part of process {VICTIM}; chapter 3 begins meanwhile, unseen")
            start = _copy_newest(plan)
            moved = plan.running.enter_context(plan.trainers(plan.moved, "other", again=plan.restored))
            said = telling.last_words(console, two, 0, cut.step)
        if cut.step not in ckpt_jax.steps(plan.killed):
            return Killed(cut, said, start, moved)
        say(console, f"  step {cut.step} was committed all the same; on from there, for another try")
        plan.running.close()
        for place in (plan.left, plan.moved, plan.restored):
            shutil.rmtree(place, ignore_errors=True)
    return None


def _in_save(console: Console, plan: Plan, two: Trainers, run: Run) -> Cut | None:
    """Follows two trainers up to the kill."""
    train = plan.settings.train
    for told in telling.shown(console, two, run, train.steps):
        if told["event"] == "snapshot" and told["step"] >= train.kill_at and told["process"] == VICTIM:
            cut = children.kill_in_save(two, VICTIM, plan.killed, told["step"])
            if cut is not None:
                say(
                    console,
                    f"  step {cut.step}: SIGKILL to process {VICTIM}, with {human(cut.bytes)} written of {cut.attempt}",
                )
                return cut
            say(console, f"  step {told['step']} was saved before the signal came")
    return None


def _copy_newest(plan: Plan) -> int:
    newest = ckpt_jax.steps(plan.killed)[-1]
    for place in (plan.left, plan.moved):
        shutil.copytree(plan.killed / str(newest), place / str(newest))
    return newest
