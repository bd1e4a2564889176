"""A plan's curve: waste against the interval, with the best one and today's (needs matplotlib)."""

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np

from . import _plan_report, _units
from ._plan_report import Sums
from .errors import CheckpointError, Fault

POINTS = 200
WIDE = 12.0  # By so large a factor the curve goes beyond what is marked in it.


def save(found: Sums, path: str) -> None:
    """Draws the curve into a file, whose name says its kind: .svg, .png or .pdf.

    Raises:
        CheckpointError: the plan has no curve, or the file's kind is another.
        ImportError: matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in (".svg", ".png", ".pdf"):
        raise CheckpointError("a plot is a picture", [Fault(path, "a name that ends in .svg, .png or .pdf", path)])
    figure = draw(found)
    figure.savefig(path, dpi=150)


def draw(found: Sums) -> Any:
    """The curve as a matplotlib figure, readable in black and white: lines differ by their dashes."""
    marks = [row for row in found.rows if row.what]
    if not marks:
        raise CheckpointError(
            "there is no curve: the plan says neither an interval nor what the best one is found from",
            hint="give failures.mtbf and save.pause, or save.interval",
        )
    try:
        from matplotlib.figure import Figure  # Not pyplot: no window, and nothing that stays.
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
    except ImportError as error:
        raise ImportError('a plot needs matplotlib: pip install "ckpt_jax[plot]"') from error

    setup = found.setup
    least = max(setup.shared.blocks + setup.shared.behind, min(row.interval for row in marks) / WIDE)
    most = max(row.interval for row in marks) * WIDE
    steps = [least * (most / least) ** (at / (POINTS - 1)) for at in range(POINTS)]
    curve = [_plan_report.row(setup, interval) for interval in steps]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, style, width in (("total", "-", 2.2), ("stall", "--", 1.2), ("lost", ":", 1.6), ("restart", "-.", 1.2)):
        shares = [100 * getattr(row, name) for row in curve]
        if any(shares):
            axes.plot(steps, shares, style, color="black", linewidth=width, label=_LABELS[name])
    for row in marks:
        marker, fill = ("o", "black") if "optimum" in row.what else ("s", "white")
        words = {"optimum": "best", "today": "today", "today, optimum": "today, which is best"}[row.what]
        label = f"{words}: every {_units.duration(row.interval)}, {_units.percent(row.total)}"
        axes.plot(
            [row.interval], [100 * row.total], marker, color="black", markerfacecolor=fill, markersize=9, label=label
        )
    axes.set_xscale("log")
    ticks = [t for t in _TICKS if least <= t <= most]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: _units.duration(seconds)))
    axes.set_ylim(0, min(100.0, 100 * max(3 * max(row.total for row in marks), 1e-4)))
    axes.set_xlim(least, most)
    axes.set_xlabel("from one save to the next")
    axes.set_ylabel("share of the time (%)")
    axes.set_title((setup.name or "how often to save").replace("$", r"\$"))
    axes.grid(visible=True, color="0.85", linewidth=0.6)
    axes.legend(loc="upper center", frameon=True)
    if setup.devices is not None and setup.length is not None:
        hours = setup.length / _units.HOUR * setup.devices
        to_hours = functools.partial(np.multiply, hours / 100), functools.partial(np.multiply, 100 / hours)
        right = axes.secondary_yaxis("right", functions=to_hours)
        right.set_ylabel("device-hours")
        right.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}" if math.isfinite(count) else ""))
    return figure


_LABELS = {"total": "wasted in all", "stall": "stall in saves", "lost": "work lost", "restart": "restart"}
_TICKS = [1, 3, 10, 30, *(60 * m for m in (1, 3, 10, 30)), *(3600 * h for h in (1, 3, 10, 24, 72, 240, 720))]
