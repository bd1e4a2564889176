"""The story: a run is killed in the middle of a save, and another one, on other devices, takes over."""

import importlib.util
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress

import ckpt_jax

from .._manifest import human
from . import checks, children, settings
from .checks import Check, Step

Say = Callable[..., None]

TRIES = 5  # Saves that may be faster than the signal, one after the other, before the demo gives up.
EVERY = 5  # Where no terminal shows a bar that moves, every fifth step is a line.
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
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if missing := [name for name in ("flax", "optax", "grain") if importlib.util.find_spec(name) is None]:
        say(f'the demo needs {" and ".join(missing)}: pip install "ckpt_jax[demo]"')
        return 2
    try:
        folder = _fresh(root)
    except OSError as error:
        say(f"the demo needs a new or empty folder: {error}")
        return 2
    began = time.perf_counter()
    try:
        held = _tell(console, say, Path(config) if config else settings.where(), folder)
    except children.Ended as error:
        say(f"\nFAILED  {error}")
        return 1
    say(f"\n{'all checks hold' if held else 'NOT ALL CHECKS HOLD'}; {time.perf_counter() - began:.0f} s in all")
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


def _tell(console: Console, say: Say, config: Path, folder: Path) -> bool:
    """The four chapters; whether every check in them held."""
    chosen = settings.load(config)
    before, after = folder / "killed", folder / "resumed"
    first, second = chosen.mesh["before"], chosen.mesh["after"]
    say(f"settings  {config}\nfolder    {folder}")

    say(f"\n1. Train on a {first} of {first.devices} CPU devices, saving every {chosen.train.save_every} steps")
    one = _train_and_kill(console, say, chosen, config, before)

    say(f"\n2. Killed by SIGKILL in the middle of saving step {one.step}: what is there now?")
    if one.attempt is None:
        return _report(say, [Check(False, f"{TRIES} saves in a row were faster than the signal: nothing is proved")])
    held = _report(say, checks.killed(before, one.step, one.attempt))

    say(f"\n3. A new process restores it on a {second} of {second.devices} devices, saves what it got, and goes on")
    two = _go_on(console, say, chosen, config, before, max(chosen.train.steps, one.step))

    say("\n4. Is it the same run?")
    held &= _report(say, checks.same_state(before / str(two.step), after / str(two.step), second))
    held &= _report(say, checks.same_run(one.steps, two.steps))
    _compare(say, one.steps, two.steps)
    _sizes(say, before / str(two.step), one, two)
    _next(say, folder, before / str(two.step), after / str(two.step))
    return held


def _report(say: Say, found: list[Check]) -> bool:
    for each in found:
        say(f"  {'ok    ' if each.holds else 'FAILED'}  {each.says}")
    return all(each.holds for each in found)


# --- the two runs -----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What was heard of a run.

    Attributes:
        step: the step whose save was cut short, or the one that it started from.
        attempt: what that save left behind.
        steps: each training step.
        saves: how long each save took.
        restore: how long it took to restore.
    """

    step: int = 0
    attempt: Path | None = None
    steps: dict[int, Step] = field(default_factory=dict)
    saves: list[float] = field(default_factory=list)
    restore: float = 0.0


def _train_and_kill(console: Console, say: Say, chosen: settings.Settings, config: Path, root: Path) -> Run:
    """Trains until it is killed in the middle of a save; after a save that was faster, it goes on, for one more try."""
    train, log, run = chosen.train, root.parent / "trainer.log", Run(step=chosen.train.kill_at)
    last = train.kill_at + TRIES * train.save_every
    devices = chosen.mesh["before"].devices
    for _ in range(TRIES):
        with children.trainer(config, root, start=root, side="before", devices=devices, until=last, log=log) as child:
            for event in _shown(console, say, children.events(child, log), run, last=run.step):
                if event["event"] == "saving" and event["step"] >= train.kill_at:
                    run.step = event["step"]
                    run.attempt = children.kill_in_save(child, root, run.step, log)
                    break
        if run.attempt is not None:
            break
        say(f"  step {run.step} was committed before the signal came; it goes on from there, for another try")
    return run


def _go_on(console: Console, say: Say, chosen: settings.Settings, config: Path, start: Path, last: int) -> Run:
    """Trains on from where the killed run was; in another folder, so that what the kill left stays to be looked at."""
    root, log, run = start.parent / "resumed", start.parent / "trainer.log", Run()
    devices = chosen.mesh["after"].devices
    with children.trainer(config, root, start=start, side="after", devices=devices, until=last, log=log) as child:
        for event in _shown(console, say, children.events(child, log), run, last=last):
            if event["event"] == "restored":
                run.step, run.restore = event["step"], event["seconds"]
    return run


def _shown(
    console: Console, say: Say, events: Iterator[dict[str, Any]], run: Run, *, last: int
) -> Iterator[dict[str, Any]]:
    """Passes on what a trainer tells, writes it down, and shows it: a bar on a terminal, lines elsewhere."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("  JAX starts", total=None)
        for event in events:
            match event:
                case {"event": "ready", "parameters": parameters, "files": files, "text": text}:
                    say(f"  {parameters:,} parameters; text: {files} files of this Python's library, {human(text)}")
                    bar.update(task, description="  the first step is compiled")
                case {"event": "restored", "step": step, "seconds": seconds}:
                    say(f"  step {step} restored in {seconds:.2f} s")
                case {"event": "step", "step": step, "loss": loss, "positions": positions, "seconds": seconds}:
                    run.steps[step] = Step(loss, tuple(positions), seconds)
                    bar.update(task, total=last, completed=step, description=f"  step {step}, loss {loss:.2f}")
                    if not console.is_terminal and step % EVERY == 0:
                        say(f"  step {step}: loss {loss:.2f}")
                case {"event": "saved", "step": step, "bytes": size, "seconds": seconds}:
                    run.saves.append(seconds)
                    loss = f"loss {run.steps[step].loss:.2f}, " if step in run.steps else ""
                    say(f"  step {step}: {loss}saved, {human(size)} in {seconds:.2f} s")
            yield event


# --- what came of it --------------------------------------------------------------------------------------------------


def _compare(say: Say, before: Mapping[int, Step], after: Mapping[int, Step]) -> None:
    """The losses of both runs, side by side where they took the same steps."""
    say("\n     step   loss of the run that was killed   of the one that took over")
    every = -(-len(after) // ROWS)
    for step in sorted(after)[every - 1 :: every]:
        killed = f"{before[step].loss:.4f}" if step in before else "-"
        say(f"  {step:>7,}   {killed:>31}   {after[step].loss:>24.4f}")


def _sizes(say: Say, saved: Path, one: Run, two: Run) -> None:
    opened = ckpt_jax.open(saved)
    say(f"\nstate     {len(opened)} leaves, {human(opened.manifest.nbytes)}; on disk {human(children.size(saved))}")
    middle = [median(step.seconds for step in run.steps.values()) for run in (one, two)]
    say(f"times     a step {middle[0]:.2f} s before, {middle[1]:.2f} s after; ", end="")
    say(f"a save {median(one.saves):.2f} s; the restore {two.restore:.2f} s")


def _next(say: Say, folder: Path, saved: Path, resaved: Path) -> None:
    roots, a, b = shlex.quote(str(saved.parent)), shlex.quote(str(saved)), shlex.quote(str(resaved))
    say("\nlook at it yourself:")
    say(f"  ckpt-jax ls {roots}")
    say(f"  ckpt-jax show {b}")
    say(f"  ckpt-jax verify {a}")
    say(f"  ckpt-jax diff {a} {b}")
    say(f"  ls -l {roots}    # the folder with -tmp- in its name is what the kill left")
    say(f"{human(children.size(folder))} in all; when you are done: rm -r {shlex.quote(str(folder))}")
