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


def save(found: Sums, path: str, other: Sums | None = None) -> None:
    """Draws the curve into a file, whose name says its kind: .svg, .png or .pdf.

    Raises:
        CheckpointError: the plan has no curve, or the file's kind is another.
        ImportError: matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in (".svg", ".png", ".pdf"):
        raise CheckpointError("a plot is a picture", [Fault(path, "a name that ends in .svg, .png or .pdf", path)])
    figure = draw(found, other)
    figure.savefig(path, dpi=150)


def draw(found: Sums, other: Sums | None = None) -> Any:
    """The curve as a matplotlib figure, readable in black and white: lines differ by their dashes.

    Beside another plan it has of each what is wasted in all, the other's in grey.
    """
    plans = [found] if other is None else [found, other]
    marks = [[row for row in each.rows if row.what] for each in plans]
    if not all(marks):
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
    every = [row.every for rows in marks for row in rows]
    least = min(max(_takes(each), min(every) / WIDE) for each in plans)
    most = max(every) * WIDE
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for each, rows in zip(plans, marks, strict=True):
        color = "black" if each is found else "0.55"
        whose = "" if other is None else f"{each.setup.name or 'plan'}: "
        start = max(least, _takes(each))
        steps = [start * (most / start) ** (at / (POINTS - 1)) for at in range(POINTS)]
        curve = [_plan_report.row(each.setup, interval) for interval in steps]
        for share, label, style, width in _LINES if other is None else _LINES[:1]:
            shares = [100 * getattr(row, share) for row in curve]
            if any(shares):
                axes.plot(steps, shares, style, color=color, linewidth=width, label=_plain(whose + label))
        for row in rows:
            marker, fill = ("o", color) if "optimum" in row.what else ("s", "white")
            words = {"optimum": "best", "today": "today", "today, optimum": "today, which is best"}[row.what]
            label = f"{whose}{words}: every {_units.duration(row.every)}, {_units.percent(row.total)}"
            point = [row.every], [100 * row.total]
            axes.plot(*point, marker, color=color, markerfacecolor=fill, markersize=9, label=_plain(label))
    axes.set_xscale("log")
    ticks = [t for t in _TICKS if least <= t <= most]
    if len(ticks) > 1:
        axes.xaxis.set_major_locator(FixedLocator(ticks[:: 1 + len(ticks) // 9]))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: _units.duration(seconds)))
    axes.set_ylim(0, min(104.0, 100 * max(3 * max(row.total for rows in marks for row in rows), 1e-4)))
    axes.set_xlim(least, most)
    axes.set_xlabel("from one save to the next")
    axes.set_ylabel("share of the time (%)")
    axes.set_title(_plain("how often to save" if other or not setup.name else setup.name), wrap=True)
    axes.grid(visible=True, color="0.85", linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=2 if other is None else 1, frameon=False)
    hours = (setup.length or 0) / _units.HOUR * (setup.devices or 0)
    if hours and (other is None or (other.setup.length, other.setup.devices) == (setup.length, setup.devices)):
        to_hours = functools.partial(np.multiply, hours / 100), functools.partial(np.multiply, 100 / hours)
        right = axes.secondary_yaxis("right", functions=to_hours)
        right.set_ylabel("device-hours")
        right.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}" if math.isfinite(count) else ""))
    return figure


def _takes(found: Sums) -> float:
    return found.setup.shared.blocks + found.setup.shared.behind


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # Else it is mathematics.


_LINES = (
    ("total", "wasted in all", "-", 2.2),
    ("stall", "stall in saves", "--", 1.2),
    ("lost", "work lost", ":", 1.6),
    ("restart", "restart", "-.", 1.2),
)
_TICKS = [1, 3, 10, 30, *(60 * m for m in (1, 3, 10, 30)), *(3600 * h for h in (1, 3, 10, 24, 72, 240, 720))]
