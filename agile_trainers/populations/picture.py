"""Draws a population: the fitness of its members over optimizer steps, who copied whom, and their hyperparameters."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from agile_trainers.populations.lineage import Lineage
from agile_trainers.records.plain import replacing

PICTURE = "lineage.png"
"""Name of the picture's file in a population's folder."""
_FONT = 8
_LINE = 10.5
"""Least distance of two labels in points."""


@dataclass
class Course:
    """The way of one member through the picture."""

    member: int
    parent: int | None
    family: int
    """The member without a parent that it descends from."""
    fitness: list[tuple[int, float, float]] = field(default_factory=list)
    """Optimizer steps of its weights, fitness and standard error; a copy's first point is its parent's last."""
    values: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Each hyperparameter as corners of a staircase: steps and value."""
    end: str = ""
    """``"stopped"``, ``"failed"``, or empty for a living member."""


def courses(lineage: Lineage) -> dict[int, Course]:
    """Return the way of each member, in the order of birth.

    Args:
        lineage: The population's, finished or not.
    """
    found: dict[int, Course] = {}
    for event in lineage.events:
        if event.event == "born":
            parent = None if event.parent is None else found[event.parent]
            found[event.member] = course = Course(
                event.member, event.parent, event.member if parent is None else parent.family
            )
            if parent is not None:
                course.fitness = parent.fitness[-1:]
                course.values = {name: list(value[-1:]) for name, value in parent.values.items()}
            _turn(course, event.steps, event.hyperparameters)
            continue
        course = found[event.member]
        if event.event in ("trained", "mutated"):
            _turn(course, event.steps, event.hyperparameters)
        if event.event == "trained" and event.fitness is not None:
            course.fitness.append((event.steps, event.fitness, event.standard_error or 0.0))
        if event.event in ("stopped", "failed"):
            course.end = event.event
    return found


def _turn(course: Course, steps: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        corners = course.values.setdefault(name, [])
        if corners and corners[-1][1] != value:
            corners.append((steps, corners[-1][1]))
        corners.append((steps, value))


def winning(ways: Mapping[int, Course], best: int) -> Course:
    """Return the way of the best member's weights: its ancestors' until it was copied, then its own.

    Args:
        ways: See :func:`courses`.
        best: The member.
    """
    way = ways[best]
    if way.parent is None:
        return way
    before, born = winning(ways, way.parent), way.fitness[0][0]
    fitness = [point for point in before.fitness if point[0] < born] + way.fitness
    values = {
        name: [corner for corner in before.values.get(name, []) if corner[0] < born] + corners
        for name, corners in way.values.items()
    }
    return Course(best, way.parent, way.family, fitness, values, way.end)


def draw_lineage(lineage: Lineage) -> bytes:
    """Draw a population as a PNG: its fitness above, one panel for each hyperparameter below.

    Colours are families: a member, its copies and their copies. A share has an axis from 0 to 1.

    Args:
        lineage: The population's, finished or not.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ways = courses(lineage)
    names = list(dict.fromkeys(name for way in ways.values() for name in way.values))
    families = [way.member for way in ways.values() if way.parent is None]
    tab = colormaps["tab10" if len(families) < 10 else "tab20"]
    palette = [color for color in map(tab, range(tab.N)) if len(set(color[:3])) > 1]  # without grey
    colors = {family: palette[place % len(palette)] for place, family in enumerate(families)}
    heights = [3.0, *(1.4 for _ in names)]
    figure = Figure(figsize=(9, 1.35 * sum(heights) + 0.8), layout="constrained")
    panels = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0])
    for way in ways.values():
        _draw(panels, way, names, colors[way.family], linewidth=1.2, alpha=0.75)
    if lineage.best is not None:
        way = winning(ways, lineage.best)
        _draw(panels, way, names, colors[way.family], linewidth=3, zorder=3)
    if (winner := lineage.winner) is not None:
        color = colors[ways[winner.member].family]
        panels[0].plot(
            winner.steps, winner.fitness, marker="*", markersize=15, color=color, markeredgecolor="black", zorder=5
        )
    last = max((event.steps for event in lineage.events), default=0) or 1
    panels[-1].set(xlabel="optimizer steps of the weights", xlim=(-0.07 * last, 1.13 * last))
    fitness = str(lineage.settings.get("fitness", "fitness"))
    panels[0].set(ylabel=fitness, **({"ylim": (0, 1.03)} if fitness == "success" else {}))
    ranges = lineage.settings.get("hyperparameters", {})
    for name, axes in zip(names, panels[1:]):
        axes.set(ylabel=name)
        if ranges.get(name, {}).get("log"):
            _log_scale(axes)
    for axes in panels:
        axes.grid(alpha=0.2)
    figure.align_ylabels(panels)
    figure.draw_without_rendering()  # the labels' places need the final limits
    _label(panels, ways, names, colors)
    _legend(figure, list(ways.values()), lineage.best)
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()


_ENDS = {"stopped": "x", "failed": "v"}
"""End of a member to its mark."""


def _draw(panels: Sequence[Any], way: Course, names: Sequence[str], color: Any, **style: Any) -> None:
    """Draw one way through all panels."""
    if way.fitness:
        steps, values, errors = zip(*way.fitness)
        panels[0].plot(steps, values, marker="o", markersize=3, color=color, **style)
        panels[0].errorbar(steps, values, errors, fmt="none", ecolor=color, elinewidth=0.8, alpha=0.5)
        if way.end:
            panels[0].plot(steps[-1], values[-1], marker=_ENDS[way.end], markersize=7, color=color, zorder=4)
    for name, axes in zip(names, panels[1:]):
        if corners := way.values.get(name, []):
            axes.plot(*zip(*corners), color=color, **style)
            if way.end:
                axes.plot(*corners[-1], marker=_ENDS[way.end], markersize=6, color=color, zorder=4)


def _log_scale(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _label(panels: Sequence[Any], ways: Mapping[int, Course], names: Sequence[str], colors: Mapping[int, Any]) -> None:
    """Write the members' numbers: the first ones left, the living ones right, and copies where they were made."""
    copies: dict[tuple[int, float], list[Course]] = {}
    for way in ways.values():
        if way.parent is not None and way.fitness:
            copies.setdefault((way.fitness[0][0], way.parent), []).append(way)
    by_step: dict[int, list[tuple[float, str, Any]]] = {}
    for (step, parent), made in copies.items():
        color, height = colors[made[0].family], made[0].fitness[0][1]
        panels[0].plot(step, height, marker="o", markersize=9, fillstyle="none", color=color, zorder=4)
        text = f"{parent} → {', '.join(str(way.member) for way in made)}"
        by_step.setdefault(step, []).append((height, text, color))
    for step, there in by_step.items():
        _write(panels[0], step, there, shift=-8, align="right")
    living = [way for way in ways.values() if way.fitness and not way.end]
    last = max((way.fitness[-1][0] for way in living), default=0)
    ends = [(way.fitness[-1][1], str(way.member), colors[way.family]) for way in living if way.fitness[-1][0] == last]
    _write(panels[0], last, ends, shift=14, align="left")
    if names:
        starts = [way for way in ways.values() if way.parent is None]
        texts = [(way.values[names[0]][0][1], str(way.member), colors[way.family]) for way in starts]
        _write(panels[1], 0, texts, shift=-14, align="right")


def _write(axes: Any, step: float, texts: Sequence[tuple[float, str, Any]], *, shift: int, align: str) -> None:
    """Write texts beside points of one step, apart from each other, each with a line to its point."""
    to_share = axes.transData + axes.transAxes.inverted()
    shares = [float(to_share.transform((step, height))[1]) for height, _, _ in texts]
    size = axes.get_window_extent().height / axes.figure.dpi * 72
    for (height, text, color), share in zip(texts, apart(shares, _LINE / size)):
        moved = (share - float(to_share.transform((step, height))[1])) * size
        axes.annotate(
            text, (step, height), xytext=(shift, moved), textcoords="offset points", va="center", ha=align,
            fontsize=_FONT, color=color, zorder=5,
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0, "shrinkB": 3},
        )  # fmt: skip


def apart(heights: Sequence[float], least: float) -> list[float]:
    """Move numbers in [0, 1] until neighbours are at least a distance apart, as little as possible and in order.

    Args:
        heights: The numbers, in any order.
        least: The distance.
    """
    if not heights:
        return []
    order, steps = np.argsort(heights, kind="stable"), least * np.arange(len(heights))
    # Without the distances before each, numbers that are apart are numbers that do not fall.
    rising = isotonic_regression(np.array(heights)[order] - steps).x
    moved = np.empty(len(heights))
    moved[order] = (
        np.maximum(np.minimum(rising, 1 - least / 2 - steps[-1]), least / 2) + steps
    )  # inside, if there is room
    return moved.tolist()


def _legend(figure: Any, ways: Sequence[Course], best: int | None) -> None:
    from matplotlib.lines import Line2D

    entries = (
        [] if best is None else [Line2D([], [], color="black", linewidth=2.8, label=f"the best at the end, {best}")]
    )
    marks = [
        ("*", "the best policy", 11, any(way.fitness for way in ways)),
        ("o", "copied from another member", 9, any(way.parent is not None for way in ways)),
        *((_ENDS[end], end, 7, any(way.end == end for way in ways)) for end in _ENDS),
    ]
    for mark, label, size, there in marks:
        if there:
            entries.append(
                Line2D([], [], color="gray", marker=mark, markersize=size, fillstyle="none", linestyle="", label=label)
            )
    if entries:
        figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), fontsize="small", frameon=False)


def write_picture(lineage: Lineage, folder: Path) -> Path:
    """Write the picture into a folder, whole or not at all.

    Args:
        lineage: The population's.
        folder: Its folder.

    Returns:
        The file.
    """
    path = folder / PICTURE
    with replacing(path) as partial:
        partial.write_bytes(draw_lineage(lineage))
    return path
