"""What the demo shows: the runs as they go, and in the end what came of them."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import Progress

import ckpt_jax

from .._values import human
from . import children
from .checks import Step
from .children import Told, Trainers

EVERY = 5  # Where no terminal shows a bar that moves, every fifth step is a line.
ROWS = 10  # Of the table of losses.


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@dataclass(slots=True)
class Run:
    """What was heard of a run.

    Attributes:
        steps: each training step that all processes told of.
        saves: how long each save took, until it was committed.
        blocked: for how long training waited for each save.
        restore: how long the restore took.
    """

    steps: dict[int, Step] = field(default_factory=dict)
    saves: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    restore: float = 0.0


def follow(console: Console, trainers: Trainers, last: int, *, begin: bool = False) -> Run:
    """Shows a run to its end; at its beginning, if that is asked for, what there is to train."""
    run = Run()
    for told in shown(console, trainers, run, last):
        match told:
            case {"event": "ready", "process": 0, "parameters": parameters, "text": text, "files": files} if begin:
                say(console, f"  {parameters:,} parameters; {human(text)} of text, this Python's {files} modules")
    return run


def shown(console: Console, trainers: Trainers, run: Run, last: int) -> Iterator[Told]:
    """Passes on what trainers tell, writes it down, and shows it: a bar on a terminal, lines elsewhere."""
    parts: dict[int, dict[int, list[int]]] = {}  # Of each step the samples that each process read.
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("  JAX starts", total=None)
        for told in children.events(trainers):
            if told["event"] == "step":
                read = parts.setdefault(told["step"], {})
                read[told["process"]] = told["positions"]
                if len(read) == len(trainers.processes):
                    positions = tuple(at for process in sorted(read) for at in read[process])
                    run.steps[told["step"]] = Step(told["loss"], positions, told["seconds"])
            match told:
                case {"process": 0, "event": "ready"}:
                    bar.update(task, description="  the training step is compiled")
                case {"process": 0, "event": "resumed", "step": step, "seconds": {"read": seconds}}:
                    run.restore = seconds
                    say(console, f"  step {step}: restored in {seconds:.2f} s")
                case {"process": 0, "event": "step", "step": step, "loss": loss}:
                    bar.update(task, total=last, completed=step, description=f"  step {step}: loss {loss:.2f}")
                    if not console.is_terminal and step % EVERY == 0:
                        say(console, f"  step {step}: loss {loss:.2f}")
                case {"process": 0, "event": "committed", "step": step, "bytes": size, "seconds": seconds}:
                    run.saves.append(seconds["all"])
                    run.blocked.append(seconds["blocked"])
                    say(console, f"  step {step}: saved, {human(size)} in {seconds['all']:.2f} s")
                case {"event": "failed" | "rejected" | "declined" | "fell back" | "warning", "text": text}:
                    say(console, f"  process {told['process']}: {text}")
            yield told


def last_words(console: Console, trainers: Trainers, index: int, step: int) -> str:
    """Shows what a process says once another one is dead; returns what it says of that step's save."""
    said, ended = "nothing", False
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(f"  process {index} waits for the other one", total=None)
        for told in children.last_words(trainers, index, step):
            match told:
                case {"event": "failed" | "committed", "step": at, "text": text} if at == step:
                    said = text
                    say(console, f"  process {index}: {text.partition(chr(10))[0].rstrip(':')}")
                case {"event": "stopped", "why": why}:
                    ended = True
                    say(console, f"  process {index}: ended by {why}")
    if not ended:
        say(console, f"  process {index}: hangs in its training step, and is ended")
    return said


# --- what came of it --------------------------------------------------------------------------------------------------


def compare(
    console: Console, whole: Mapping[int, Step], resumed: Mapping[int, Step], moved: Mapping[int, Step]
) -> None:
    """The losses of the three runs, side by side where they took the same steps."""
    head = ("step", "undisturbed", "killed and resumed", "moved to another mesh")
    say(console, "\n  " + "   ".join(head))
    every = -(-len(resumed) // ROWS)
    for step in sorted(resumed)[every - 1 :: every]:
        losses = [f"{run[step].loss:.7f}" if step in run else "-" for run in (whole, resumed, moved)]
        cells = zip([str(step), *losses], head, strict=True)
        say(console, "  " + "   ".join(f"{cell:>{len(title)}}" for cell, title in cells))


def sizes(console: Console, folder: Path, saved: Path, two: list[Run], one: Run) -> None:
    opened = ckpt_jax.open(saved)
    disk, everything = children.size(saved), children.size(folder)
    steps = [median(step.seconds for run in runs for step in run.steps.values()) for runs in (two, [one])]
    saves = [median(times) for times in ([t for r in two for t in r.saves], [t for r in two for t in r.blocked])]
    say(console, f"\nsizes     {human(opened.manifest.nbytes)} of state in {len(opened)} leaves; {human(disk)} on disk")
    say(console, f"times     a save {saves[0]:.2f} s, for which training waited {saves[1]:.2f} s;")
    say(
        console, f"          a restore {two[-1].restore:.2f} s; a step {steps[0]:.2f} s in two, {steps[1]:.2f} s in one"
    )
    say(console, f"folder    {folder}, {human(everything)}; yours to delete")


def what_next(console: Console, undisturbed: Path, resumed: Path, left: Path, restored: Path) -> None:
    """Commands by which anyone can look for themselves."""
    root, a, b = (shlex.quote(str(path)) for path in (resumed.parent, undisturbed, resumed))
    c, d = (shlex.quote(str(path)) for path in (left, restored))
    say(console, "\nSee for yourself:")
    say(console, f"  grep failed {root}/events.jsonl    # what process 0 wrote down")
    say(console, f"  ckpt-jax ls {root}")
    say(console, f"  ckpt-jax show {b}")
    say(console, f"  ckpt-jax verify {b}")
    say(console, f"  ckpt-jax diff {a} {b}")
    say(console, f"  ckpt-jax diff {c} {d}")
    say(console, f"  ckpt-jax prune {root} --last 1 --dry-run")
