"""The commands that read and write other formats."""

import os
from enum import StrEnum
from typing import Annotated, Any

import typer

from . import _terminal, _units
from .errors import NotFound

Source = Annotated[str, typer.Argument(help="A file or folder: what it is in is found out.", show_default=False)]
Target = Annotated[str, typer.Argument(help="Where it goes; nothing may be there yet.", show_default=False)]
Map = Annotated[
    str | None, typer.Option("--map", metavar="FILE", help="Rules for names: docs/interop.md.", show_default=False)
]
Only = Annotated[list[str] | None, typer.Option(help="Names, or globs of them; may be given again.")]
Dry = Annotated[bool, typer.Option("--dry-run", help="Write nothing; say what would come of the rules.")]
Json = Annotated[bool, typer.Option("--json", help="Print the same facts as JSON.")]


class Kind(StrEnum):
    orbax = "orbax"
    safetensors = "safetensors"
    numpy = "numpy"
    torch = "torch"
    jax = "jax"
    msgpack = "msgpack"
    ckpt_jax = "ckpt_jax"


class To(StrEnum):
    safetensors = "safetensors"
    npz = "npz"
    orbax = "orbax"


def import_(
    source: Source,
    target: Target,
    *,
    kind: Annotated[Kind | None, typer.Option("--from", help="The format, if it is not the one found.")] = None,
    rules: Map = None,
    only: Only = None,
    step: Annotated[int | None, typer.Option(help="The step, if the target's name is none.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")] = False,
    dry_run: Dry = False,
    as_json: Json = False,
) -> None:
    """Makes a checkpoint of Orbax's, safetensors, .npz, Flax msgpack, torch or JAX's own files; killed, it goes on."""
    found = _found(source, kind, rules, only)
    if _told(found, dry_run, as_json):
        return
    from . import _import

    steps = _import.progress(found.view, target, step=step, overwrite=overwrite)
    done = _terminal.with_progress(steps, "importing", unit="bytes")
    if as_json:
        told = {"path": done.path, "from": done.kind, "leaves": done.leaves, "bytes": done.bytes}
        _terminal.print_json(told | {"lacks": done.lacks, "seconds": done.seconds} | _names_of(found))
    else:
        print(done)


def export(
    source: Source,
    target: Target,
    *,
    to: Annotated[To, typer.Option(help="The format.", show_default=False)],
    rules: Map = None,
    only: Only = None,
    shard: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of a file of safetensors; 5 GB if not said.")
    ] = None,
    dry_run: Dry = False,
    as_json: Json = False,
) -> None:
    """Writes a checkpoint as safetensors, .npz or Orbax's, which others read; killed, it goes on."""
    found = _found(source, None, rules, only)
    try:
        size = None if shard is None else int(_units.parse(shard, "bytes"))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shard") from error
    if size is not None and (size < 1 or to != To.safetensors):
        raise typer.BadParameter("a size, for --to safetensors", param_hint="--shard")
    if _told(found, dry_run, as_json):
        return
    from . import _export

    steps = _export.progress(found.view, target, to.value, shard_bytes=size)
    done = _terminal.with_progress(steps, "exporting", unit="bytes")
    if as_json:
        told = {"path": done.path, "to": done.to, "leaves": done.leaves, "bytes": done.bytes}
        _terminal.print_json(told | {"described": done.described, "seconds": done.seconds} | _names_of(found))
    else:
        print(done)


def _found(source: str, kind: Kind | None, rules: str | None, only: list[str] | None) -> Any:
    """The source under its new names, as far as it is asked for."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # It may run beside a busy accelerator, and needs none.
    from . import _formats, _names, _rules

    view = _formats.view(source, None if kind is None else kind.value)
    if only:
        view = _names.selected(view, only)
    if rules is None:
        return _names.renamed(view, ())
    return _names.renamed(view, _rules.load(rules))


def _told(found: Any, dry_run: bool, as_json: bool) -> bool:
    """Says what came of the rules, if that is all that is asked for.

    Raises:
        NotFound: a rule matches nothing, and something is to be written.
    """
    if not dry_run:
        if found.idle:
            raise NotFound(
                f"{found.view.path} has no leaf for the rules {', '.join(map(repr, found.idle))}",
                hint="--dry-run tells what each rule matches; optional = true marks one that may match nothing",
            )
        return False
    if as_json:
        leaves = {name: str(leaf) for name, leaf in found.view.leaves.items()}
        _terminal.print_json({"path": found.view.path, "from": found.view.kind, "leaves": leaves} | _names_of(found))
        return True
    print(f"{found.view.path}: {found.view.kind}, {_units.several(len(found.view.leaves), 'leaf', 'leaves')}")
    print(found)
    return True


def _names_of(found: Any) -> dict[str, Any]:
    renamed = [{"sources": step.sources, "target": step.target, "what": step.what} for step in found.steps]
    return {"renamed": renamed, "dropped": found.dropped, "untouched": found.untouched, "idle": found.idle}
