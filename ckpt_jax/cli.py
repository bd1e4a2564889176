"""The command line: looks into checkpoints, checks, thins out and proves; only `demo` and `prove` start a device."""

import io
import json
import sys
import time
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import typer

from . import _cli_formats, _commit, _manifest, _storage, _terminal, _units, _values
from ._manifest import Leaf, Manifest
from .errors import CheckpointError, Corrupt, NotFound

DIFFERS, USAGE = 1, 2  # Exit codes beside 0, as in `diff` and `cmp`.
_CODES = "Exit codes: 0 fine, 1 it differs or is damaged, 2 wrong usage or nothing there."

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Looks into checkpoints of ckpt_jax, and checks them.",
    epilog=_CODES,
)

Path = Annotated[str, typer.Argument(help="A checkpoint: a folder, gs://, s3://.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print the same facts as JSON.")]


class Level(StrEnum):
    files = "files"
    chunks = "chunks"


def main() -> None:
    """Runs the command; what is wrong with the data becomes a sentence on stderr and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # A terminal may know ASCII only.
    try:
        app()
    except CheckpointError as error:
        _fail(str(error), DIFFERS if isinstance(error, Corrupt) else USAGE)
    except (OSError, ValueError, TypeError, ImportError) as error:
        _fail(f"{type(error).__name__}: {error}", USAGE)


def _fail(message: str, code: int) -> NoReturn:
    print(f"ckpt-jax: {message}", file=sys.stderr)
    sys.exit(code)


@app.command(epilog=_CODES)
def ls(root: Annotated[str, typer.Argument(help="A folder of checkpoints.")], as_json: Json = False) -> None:
    """Lists the checkpoints in a folder: `ok` are those whose files are all there; `verify` reads them too."""
    place = _storage.folder(root)
    names = [name for name in _in_order(place.entries()) if _commit.TMP in name or _is_step(name)]
    rows = [row for name in names if (row := _row(place / name)) is not None]
    if not rows:
        raise NotFound(
            f"there are no checkpoints in {place}" if place.exists() else f"there is nothing at {place}",
            hint=f"`ckpt-jax show {place}` shows it"
            if place.read(_manifest.NAME, 0, 1)
            else _unlisted(place) or "check the path",
        )
    if as_json:
        _terminal.print_json({"root": place.url, "checkpoints": rows})
    else:
        _print_rows(rows)
        if unlisted := _unlisted(place):
            print(unlisted, file=sys.stderr)
    if any(row["state"].startswith(("damaged", "marked")) for row in rows):
        raise typer.Exit(DIFFERS)


def _unlisted(root: _storage.Folder) -> str:
    """What to say about checkpoints whose names are no steps."""
    others = [
        n for n in root.entries() if not _is_step(n) and _commit.TMP not in n and (root / n).read(_manifest.NAME, 0, 1)
    ]
    if not others:
        return ""
    names = ", ".join(others[:5]) + (", …" if len(others) > 5 else "")
    return f"not listed, because a step's name is a number without leading zeros: {names}"


def _print_rows(rows: list[dict[str, Any]]) -> None:
    _terminal.table(
        ["step", "saved", "leaves", "size", "state"],
        [(str(r["name"]), _when(r["time"]), _count(r["leaves"]), _size(r["bytes"]), r["state"]) for r in rows],
    )


def _is_step(name: str) -> bool:
    return _commit.step_of(name) is not None


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda n: (int(_commit.step_of(n.partition(".")[0]) or 0), n))


def _row(place: _storage.Folder) -> dict[str, Any] | None:
    """The facts about one entry; None if it vanished while we looked, as attempts do when they are committed."""
    row: dict[str, Any] = {"name": place.name, "time": None, "leaves": None, "bytes": None}
    if _commit.TMP in place.name:
        written = place.local and (place.in_use() or place.just_made())
        if not place.exists():
            return None
        doing = "being written" if written else "not finished; the next save of that step removes it"
        return row | {"name": place.name.partition(_commit.TMP)[0], "state": doing}
    try:
        manifest = _commit.load_data(place)
        missing = _commit.missing_files(place, manifest)
        marked = _commit.is_bad(place)
    except OSError as error:
        return row | {"state": f"cannot be read now: {error}"}
    except NotFound:
        return row | {"state": f"not a checkpoint: no {_manifest.NAME}"}
    except CheckpointError as error:
        return row | {"state": f"damaged: {error.faults[0] if error.faults else error.summary}"}
    state = "ok"
    if marked:
        state = "marked as damaged"
    elif missing:
        state = f"damaged: {missing[0]}"
    elif manifest.step is not None and str(manifest.step) != place.name:
        state = f"damaged: its manifest says step {manifest.step}"
    return row | {
        "time": manifest.time,
        "leaves": len(manifest.leaves),
        "bytes": manifest.nbytes,
        "state": state,
    }


@app.command(epilog=_CODES)
def show(
    path: Path,
    name: Annotated[str | None, typer.Argument(help="One leaf, or a glob of names.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Shows what a checkpoint holds, in whatever format; with NAME, all that is known of one leaf."""
    place = _storage.folder(path)
    manifest = _of_any_format(place)
    if name is not None and name in manifest.leaves:
        facts = _facts(name, manifest.leaves[name], manifest)
        _terminal.print_json(facts) if as_json else _print_facts(facts)
        return
    leaves = {n: leaf for n, leaf in manifest.leaves.items() if name is None or _matches(n, name)}
    if not leaves and name is not None:
        raise NotFound(f"{place} has no leaf {name!r}", hint=f"`ckpt-jax show {place}` lists them")
    if as_json:
        _terminal.print_json(
            _summary(place, manifest) | {"leaves": {n: _facts(n, v, manifest) for n, v in leaves.items()}}
        )
        return
    step = "" if manifest.step is None else f"step {manifest.step}, "
    leaves_and_bytes = f"{_units.several(len(manifest.leaves), 'leaf', 'leaves')}, {_values.human(manifest.nbytes)}"
    if manifest.format == _manifest.FORMAT:
        by = _units.several(manifest.writers, "process", "processes")
        print(f"{place}: {step}saved {_when(manifest.time)} by {by}")
        print(f"{leaves_and_bytes} in {_units.several(len(manifest.files), 'file')}")
    else:
        print(f"{place}: {step}in the format of {manifest.format}")
        print(leaves_and_bytes)
    for what, told in (("metrics", manifest.metrics or None), ("metadata", manifest.metadata)):
        if told is not None:
            print(f"{what}: {json.dumps(told)}")
    if manifest.milestone:
        print("milestone: it stays for ever")
    print()
    _terminal.table(
        ["name", "what", "size", "chunks", "sharding"],
        [
            (n, str(v), _size(_manifest.nbytes(v) if v.stored else None), _chunk(v), _spread(v, manifest))
            for n, v in leaves.items()
        ],
    )


def _of_any_format(place: _storage.Folder) -> Manifest:
    try:
        return _commit.load(place)
    except NotFound as error:
        from . import _formats  # Here: it imports what reads arrays.

        try:
            return _formats.view(place.url).manifest()
        except NotFound:
            raise error from None


def _matches(name: str, pattern: str) -> bool:
    from fnmatch import fnmatchcase

    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _summary(place: _storage.Folder, manifest: Manifest) -> dict[str, Any]:
    return {
        "path": place.url,
        "step": manifest.step,
        "time": manifest.time,
        "writers": manifest.writers,
        "bytes": manifest.nbytes,
        "files": {path: file.bytes for path, file in manifest.files.items()},
        "seconds": manifest.seconds,
        "metrics": manifest.metrics,
        "milestone": manifest.milestone,
        "metadata": manifest.metadata,
        "seal": manifest.seal,
    }


def _facts(name: str, leaf: Leaf, manifest: Manifest) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": name, "kind": leaf.kind, "what": str(leaf)}
    if leaf.stored:
        facts |= {"shape": leaf.shape, "dtype": leaf.dtype, "bytes": _manifest.nbytes(leaf), "chunk": leaf.chunk}
        facts |= {"chunks": leaf.chunks, "sharding": _sharding(leaf, manifest), "digests": leaf.digests}
    else:
        facts |= {"value": leaf.value}
    return facts


def _print_facts(facts: dict[str, Any]) -> None:
    width = max(map(len, facts))
    for key, value in facts.items():
        shown = value if isinstance(value, str) else json.dumps(value)
        print(f"{key:<{width}}  {shown}")


def _sharding(leaf: Leaf, manifest: Manifest) -> dict[str, Any] | None:
    return None if leaf.sharding is None else manifest.shardings[leaf.sharding]


def _spread(leaf: Leaf, manifest: Manifest) -> str:
    sharding = _sharding(leaf, manifest)
    if sharding is None:
        return leaf.host and "on the host"
    try:
        if "spec" not in sharding:
            return _units.several(int(sharding["devices"]), "device")
        axes = "×".join(f"{name}{size}" for name, size in sharding["axes"].items())
        parts = ("+".join(p) if isinstance(p, list) else p or "–" for p in sharding["spec"])
        return f"({', '.join(parts)}) on {axes}"
    except (KeyError, TypeError, ValueError, AttributeError):  # For information only, so nobody has checked it.
        return "?"


def _bytes(leaf: Leaf) -> str:
    return _values.human(_manifest.nbytes(leaf)) if leaf.stored else ""


def _chunk(leaf: Leaf) -> str:
    return f"{leaf.chunks:,}" if leaf.stored else ""


@app.command(epilog=_CODES)
def verify(
    path: Path,
    level: Annotated[
        Level, typer.Option(help="files: all there, with their sizes; chunks: every digest too.")
    ] = Level.chunks,
    as_json: Json = False,
) -> None:
    """Checks a checkpoint: every file, and every chunk against its digest."""
    from . import _verify

    report = _terminal.with_progress(_verify.progress(path, level.value), "verifying", unit="bytes")
    if as_json:
        faults = [{"place": f.place, "expected": f.expected, "found": f.found} for f in report.faults]
        _terminal.print_json(
            {"path": report.path, "level": report.level, "ok": report.ok, "faults": faults}
            | {"chunks": report.chunks, "bytes": report.bytes, "seconds": report.seconds}
        )
    else:
        print(report)
    if not report.ok:
        raise typer.Exit(DIFFERS)


@app.command(epilog=_CODES)
def diff(a: Path, b: Path, as_json: Json = False) -> None:
    """Compares two checkpoints, leaf by leaf, bit for bit."""
    from . import _diff

    found = _terminal.with_progress(_diff.progress(a, b), "comparing", unit="leaves")
    if as_json:
        changes = [{"name": c.name, "what": c.what, "a": c.a, "b": c.b} for c in found.changes]
        _terminal.print_json({"a": found.a, "b": found.b, "equal": found.equal, "same": found.same, "changes": changes})
    else:
        print(found)
    if not found.equal:
        raise typer.Exit(DIFFERS)


Root = Annotated[str, typer.Argument(help="A folder of checkpoints.", show_default=False)]


@app.command(epilog=_CODES)
def prune(
    root: Root,
    *,
    last: Annotated[int, typer.Option(help="Keep the newest so many.")] = 3,
    daily: Annotated[int, typer.Option(help="Keep the newest of each of the last so many days.")] = 0,
    every: Annotated[int | None, typer.Option(help="Keep the steps that this divides.", show_default=False)] = None,
    best: Annotated[str | None, typer.Option(help="Keep where this metric was best.", show_default=False)] = None,
    count: Annotated[int, typer.Option(help="How many of the best.")] = 1,
    largest: Annotated[bool, typer.Option("--max", help="The largest value is best, not the smallest.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; say what would be.")] = False,
    as_json: Json = False,
) -> None:
    """Deletes the checkpoints that no option keeps, and what killed saves left; the newest good one always stays."""
    from . import _retain

    rule = _retain.Best(best, count, "max" if largest else "min") if best is not None else None
    place = _storage.folder(root)
    gone = _retain.prune(root, _retain.Keep(last, daily, every, rule), dry_run=dry_run)
    kept = [step for step in _retain.facts_of(place) if step not in gone]
    if not (gone or kept):
        raise NotFound(f"there are no checkpoints in {place}", hint=_unlisted(place) or "check the path")
    if as_json:
        _terminal.print_json({"root": place.url, "dry_run": dry_run, "deleted": gone, "kept": kept})
    else:
        print(f"{'would delete' if dry_run else 'deleted'}: {', '.join(map(str, gone)) or 'nothing'}")
        print(f"kept: {', '.join(map(str, kept))}")


@app.command(epilog=_CODES)
def rollback(
    root: Root, step: Annotated[int, typer.Argument(help="The step to go back to.")], as_json: Json = False
) -> None:
    """Makes an earlier step the newest again; later ones are put aside under another name, not deleted."""
    from . import _retain

    moved = _retain.rollback(root, step)
    if as_json:
        _terminal.print_json({"root": _storage.folder(root).url, "newest": step, "aside": moved})
    else:
        print(f"step {step} is the newest now; put aside: {', '.join(moved) or 'nothing'}")


app.command("import", epilog=_CODES)(_cli_formats.import_)
app.command("export", epilog=_CODES)(_cli_formats.export)


@app.command(epilog=_CODES)
def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A folder of checkpoints, or one.", show_default=False)],
    target: Annotated[str, typer.Argument(metavar="DST", help="Where they go, or where it goes.", show_default=False)],
    *,
    steps: Annotated[str | None, typer.Option(metavar="100,200", help="These alone.", show_default=False)] = None,
    last: Annotated[int | None, typer.Option(help="The newest so many.", min=1, show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Copies checkpoints; each is read back before it counts. If it was killed, the same command goes on with it."""
    from . import _copy

    found = _terminal.with_progress(
        _copy.progress(source, target, steps=_steps(steps), last=last), "copying", unit="bytes"
    )
    if as_json:
        faults = [{"place": f.place, "expected": f.expected, "found": f.found} for f in found.faults]
        skipped = [{"step": step, "why": why} for step, why in found.skipped]
        _terminal.print_json(
            {"source": found.source, "target": found.target, "copied": found.copied, "skipped": skipped}
            | {"faults": faults, "bytes": found.bytes, "seconds": found.seconds}
        )
    else:
        print(found)
    if not found.ok:
        raise typer.Exit(DIFFERS)


def _steps(text: str | None) -> list[int] | None:
    """The steps in `100,200`."""
    if text is None:
        return None
    steps = [_commit.step_of(step.strip()) for step in text.split(",")]
    if None in steps:
        raise typer.BadParameter(f"steps are numbers with commas between, such as 100,200, not {text!r}")
    return [step for step in steps if step is not None]


@app.command(epilog=_CODES)
def prove(
    program: Annotated[str, typer.Argument(help="module:function; takes (root, steps), yields (step, state, ids).")],
    steps: Annotated[int, typer.Option(help="How many steps to run.")] = 20,
    at: Annotated[list[int] | None, typer.Option(help="Kill after this step; may be given again.")] = None,
    processes: Annotated[int, typer.Option(help="JAX processes, on CPU.")] = 1,
    as_json: Json = False,
) -> None:
    """Runs a program undisturbed, and again with a kill and a resume, and compares all to the bit."""
    from . import prove as proving

    proof = proving.prove_resume(program, steps=steps, interrupt_at=at or [7], processes=processes)
    if as_json:
        faults = [{"place": f.place, "expected": f.expected, "found": f.found} for f in proof.faults]
        _terminal.print_json({"program": program, "steps": steps, "interrupted": proof.interrupted, "faults": faults})
    else:
        print(proof)
    if not proof.ok:
        raise typer.Exit(DIFFERS)


@app.command(epilog=_CODES)
def demo(
    root: Annotated[
        str | None, typer.Option(help="Where its checkpoints go; by default a new temporary folder.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model, and fewer steps.")] = False,
) -> None:
    """Trains a small GPT in two processes, kills one in the middle of a save, and resumes."""
    from . import demo as story

    raise typer.Exit(story.run(root, quick=quick))


@app.command(epilog="Exit codes: 0 fine, 2 wrong usage, or a file that is no plan.")
def plan(
    file: Annotated[str | None, typer.Argument(help="A TOML file as in configs/plan.", show_default=False)] = None,
    *,
    as_json: Json = False,
    plot: Annotated[str | None, typer.Option(metavar="OUT.svg", help="Draw the curve: .svg, .png or .pdf.")] = None,
    compare: Annotated[str | None, typer.Option(metavar="OTHER.toml", help="Set another plan beside it.")] = None,
    scale: Annotated[float, typer.Option(help="The same cluster so many times larger.", min=0.001, max=10_000)] = 1.0,
    root: Annotated[
        str | None,
        typer.Option("--from", metavar="ROOT", help="Take what a run measured in place of the file's."),
    ] = None,
) -> None:
    """Says how often to save: what saves and failures cost, the best interval, storage, bandwidth, preemption."""
    from . import _plan_file, _plan_report, _plan_run  # Here: `ls` has no need of them.

    if file is None and root is None:
        raise typer.BadParameter("give a plan's file, or --from ROOT, or both")

    def summed(path: str | None, run: _plan_run.Measured | None = None) -> _plan_report.Sums:
        setup = _plan_file.load(path) if path is not None else _plan_file.Setup()
        setup = _plan_run.applied(setup, run) if run is not None else setup
        return _plan_report.sums(setup if scale == 1 else _plan_file.scaled(setup, scale))

    run = _plan_run.measured(root) if root is not None else None
    found = summed(file, run)
    other = summed(compare) if compare is not None else None
    if plot is not None:
        from . import _plan_plot

        _plan_plot.save(found, plot, other)
    if as_json:
        _terminal.print_json(_plan_report.as_json(found, other, run))
        return
    if run is not None:
        print(_plan_run.text(run) + "\n")
    print(_plan_report.text(found))
    if other is not None:
        print("\n" + "-" * 100 + "\n\n" + _plan_report.text(other))
        print("\n" + "-" * 100 + "\n\n" + _plan_report.compared(found, other))


# --- printing ---------------------------------------------------------------------------------------------------------


def _when(seconds: float | None) -> str:
    try:
        return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # A stranger's clock.
        return "–"


def _size(size: float | None) -> str:
    return "" if size is None else _values.human(size)


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


if __name__ == "__main__":
    main()
