"""The story: a run is killed in the middle of a save, and another one, on other devices, takes over."""

import importlib.util
import os
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress

import ckpt_jax

from .._values import human
from . import checks, children, settings
from .checks import Check, Step
from .settings import Settings

TRIES = 5  # Saves that may be faster than the signal, one after the other, before the demo gives up.
EVERY = 4  # Where no terminal shows a bar that moves, every fourth step is a line.
ROWS = 10  # Of the table of losses.


def run(
    root: str | None = None, *, console: Console | None = None, config: str | os.PathLike[str] | None = None
) -> int:
    """Trains, kills, restores, compares, and tells what it saw.

    Args:
        root: a new or empty folder for all that the demo writes; None makes one below the system's temporary folder.
        console: where to tell it.
        config: other settings than `configs/demo/tiny_gpt.toml`.

    Returns:
        0 if all that was promised held, 1 if something did not, 2 if the demo could not begin.
    """
    console = console or Console()
    if missing := [name for name in ("flax", "optax", "grain") if importlib.util.find_spec(name) is None]:
        _say(console, f'the demo needs {" and ".join(missing)}: pip install "ckpt_jax[demo]"')
        return 2
    try:
        folder = _fresh(root)
    except OSError as error:
        _say(console, f"the demo needs a new or empty folder to write in: {error}")
        return 2
    began = time.perf_counter()
    path = Path(config) if config else settings.where()
    try:
        held = _tell(console, Plan(settings.load(path), path, folder))
    except (children.Ended, ckpt_jax.CheckpointError) as error:
        _say(console, f"\nFAILED: {error}")
        return 1
    verdict = "all of this held" if held else "FAILED: not all of this held"
    _say(console, f"\n{verdict} ({time.perf_counter() - began:.0f} s in all)")
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


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to happen, and where."""

    settings: Settings
    config: Path
    folder: Path

    @property
    def before(self) -> Path:
        """The root of the run that is killed."""
        return self.folder / "killed"

    @property
    def after(self) -> Path:
        """The root of the run that takes over: another one, so that what the kill left stays to be looked at."""
        return self.folder / "resumed"

    @property
    def log(self) -> Path:
        return self.folder / "trainers.log"


@dataclass(slots=True)
class Run:
    """What was heard of a run.

    Attributes:
        step: the step whose save was cut short, or the one that it took over from.
        attempt: what the save that was cut short left behind.
        steps: each training step.
        saves: how long each save took.
        restore: how long the restore took.
    """

    step: int = 0
    attempt: Path | None = None
    steps: dict[int, Step] = field(default_factory=dict)
    saves: list[float] = field(default_factory=list)
    restore: float = 0.0


def _tell(console: Console, plan: Plan) -> bool:
    """The four chapters; whether every check in them held."""
    train, mesh = plan.settings.train, plan.settings.mesh
    _say(console, f"settings  {plan.config}")
    _say(console, f"folder    {plan.folder}")

    _say(console, f"\n1. Train on {mesh['before']}, saving every {train.save_every} steps")
    one = _train_and_kill(console, plan)

    _say(console, f"\n2. Killed by SIGKILL in the middle of saving step {one.step}: what is there now?")
    if one.attempt is None:
        return _report(
            console, [Check(False, "it was in the middle of a save", f"{TRIES} saves were faster than the signal")]
        )
    held = _report(console, checks.killed(plan.before, one.step, one.attempt))

    _say(console, f"\n3. A new process restores it on {mesh['after']}, saves what it got, and goes on")
    two = _take_over(console, plan, last=max(train.steps, one.step))

    _say(console, "\n4. Is it the same run?")
    saved, resaved = plan.before / str(two.step), plan.after / str(two.step)
    held &= _report(console, checks.same_state(saved, resaved, mesh["after"]))
    held &= _report(console, checks.same_run(one.steps, two.steps))
    _compare(console, one.steps, two.steps)
    _sizes(console, plan, saved, one, two)
    _next(console, plan, saved, resaved)
    return held


def _report(console: Console, found: list[Check]) -> bool:
    for each in found:
        _say(console, f"  {'ok    ' if each.holds else 'FAILED'}  {each.claim}: {each.found}")
    return all(each.holds for each in found)


# --- the two runs -----------------------------------------------------------------------------------------------------


def _train_and_kill(console: Console, plan: Plan) -> Run:
    """Trains until it is killed in the middle of a save; after a save that was faster, it goes on, for one more try."""
    train, devices = plan.settings.train, plan.settings.mesh["before"].devices
    last = train.kill_at + TRIES * train.save_every
    run, whole = Run(step=train.kill_at), 0
    for _ in range(TRIES):
        with children.trainer(
            plan.config, plan.before, start=plan.before, side="before", devices=devices, until=last, log=plan.log
        ) as child:
            for event in _shown(console, children.events(child, plan.log), run, last=run.step):
                if event["event"] == "ready" and not run.steps:
                    size, text = f"{event['parameters']:,} parameters", f"{human(event['text'])} of text"
                    _say(console, f"  {size}; {text}, this Python's {event['files']} modules")
                if event["event"] == "saved":
                    whole = event["bytes"]
                if event["event"] == "saving" and event["step"] >= train.kill_at:
                    run.step = event["step"]
                    run.attempt = children.kill_in_save(child, plan.before, run.step, over=whole // 2, log=plan.log)
                    break
        if run.attempt is not None:
            break
        _say(console, f"  step {run.step} was committed before the signal came; on from there, for another try")
    return run


def _take_over(console: Console, plan: Plan, *, last: int) -> Run:
    """Trains on from the newest step of the run that was killed."""
    run, devices = Run(), plan.settings.mesh["after"].devices
    with children.trainer(
        plan.config, plan.after, start=plan.before, side="after", devices=devices, until=last, log=plan.log
    ) as child:
        for event in _shown(console, children.events(child, plan.log), run, last=last):
            if event["event"] == "restored":
                run.step, run.restore = event["step"], event["seconds"]
    return run


def _shown(console: Console, events: Iterator[dict[str, Any]], run: Run, *, last: int) -> Iterator[dict[str, Any]]:
    """Passes on what a trainer tells, writes it down, and shows it: a bar on a terminal, lines elsewhere."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("  JAX starts", total=None)
        for event in events:
            match event:
                case {"event": "ready"}:
                    bar.update(task, description="  the training step is compiled")
                case {"event": "restored", "step": step, "seconds": seconds}:
                    _say(console, f"  step {step}: restored in {seconds:.2f} s")
                case {"event": "step", "step": step, "loss": loss, "positions": positions, "seconds": seconds}:
                    run.steps[step] = Step(loss, tuple(positions), seconds)
                    bar.update(task, total=last, completed=step, description=f"  step {step}: loss {loss:.2f}")
                    if not console.is_terminal and step % EVERY == 0:
                        _say(console, f"  step {step}: loss {loss:.2f}")
                case {"event": "saved", "step": step, "bytes": size, "seconds": seconds}:
                    run.saves.append(seconds)
                    _say(console, f"  step {step}: saved, {human(size)} in {seconds:.2f} s")
            yield event


# --- what came of it --------------------------------------------------------------------------------------------------


def _compare(console: Console, before: Mapping[int, Step], after: Mapping[int, Step]) -> None:
    """The losses of both runs, side by side where they took the same steps."""
    _say(console, "\n   step   loss before the kill   after the restore")
    every = -(-len(after) // ROWS)
    for step in sorted(after)[every - 1 :: every]:
        killed = f"{before[step].loss:.4f}" if step in before else "-"
        _say(console, f"  {step:>5}   {killed:>20}   {after[step].loss:>17.4f}")


def _sizes(console: Console, plan: Plan, saved: Path, one: Run, two: Run) -> None:
    opened = ckpt_jax.open(saved)
    disk, everything = children.size(saved), children.size(plan.folder)
    steps = [median(step.seconds for step in run.steps.values()) for run in (one, two)]
    _say(
        console, f"\nsizes     {human(opened.manifest.nbytes)} of state in {len(opened)} leaves; {human(disk)} on disk"
    )
    _say(console, f"times     save {median(one.saves + two.saves):.2f} s, restore {two.restore:.2f} s,")
    _say(console, f"          a step {steps[0]:.2f} s before, {steps[1]:.2f} s after")
    _say(console, f"folder    {plan.folder}, {human(everything)}; yours to delete")


def _next(console: Console, plan: Plan, saved: Path, resaved: Path) -> None:
    root, a, b = shlex.quote(str(plan.before)), shlex.quote(str(saved)), shlex.quote(str(resaved))
    _say(console, "\nSee for yourself:")
    _say(console, f"  ls {root}    # the name with -tmp- in it is what the kill left")
    _say(console, f"  ckpt-jax ls {root}")
    _say(console, f"  ckpt-jax show {a}")
    _say(console, f"  ckpt-jax verify {a}")
    _say(console, f"  ckpt-jax diff {a} {b}")
