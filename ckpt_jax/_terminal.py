"""What the command line prints: bars, tables, JSON."""

import json
import sys
from collections.abc import Iterator
from typing import Any


def with_progress(steps: Iterator[Any], verb: str, *, unit: str) -> Any:
    """Runs the steps, with a bar on stderr if that is a terminal; returns the last one, the result."""
    if not sys.stderr.isatty():
        *_, result = steps
        return result
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn(verb), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(verb)
        result = None
        for result in steps:
            if isinstance(result, tuple):
                bar.update(task, completed=result[0], total=result[1])
    return result


def print_json(facts: Any) -> None:
    print(json.dumps(facts, indent=2))


def table(head: list[str], rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
