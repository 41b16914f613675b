"""The picture of a population: the ways of members through it, and labels that do not cover each other."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from agile_trainers.populations import Lineage, LineageEvent
from agile_trainers.populations.picture import PICTURE, apart, courses, draw_lineage, winning, write_picture

LOW, HIGH, MOVED = {"learning_rate": 1e-4}, {"learning_rate": 1e-2}, {"learning_rate": 8e-3}
SETTINGS = {"fitness": "success", "hyperparameters": {"learning_rate": {"low": 1e-5, "high": 1e-1, "log": True}}}
EVENTS = [
    LineageEvent(0, 0, "born", LOW),
    LineageEvent(0, 1, "born", HIGH),
    LineageEvent(0, 2, "born", MOVED),
    LineageEvent(1, 1, "trained", HIGH, steps=10, fitness=0.5, standard_error=0.1),
    LineageEvent(1, 0, "trained", LOW, steps=10, fitness=0.25, standard_error=None),
    LineageEvent(1, 2, "failed", MOVED, reason="NaN"),
    LineageEvent(1, 0, "stopped", LOW),
    LineageEvent(1, 1, "kept", HIGH, steps=10),
    LineageEvent(1, 3, "born", MOVED, parent=1, steps=10, changes={"learning_rate": (1e-2, 8e-3)}),
    LineageEvent(2, 3, "trained", MOVED, steps=20, fitness=0.75, standard_error=0.05),
    LineageEvent(2, 1, "trained", HIGH, steps=20, fitness=0.625, standard_error=0.05),
]


def test_a_copy_begins_where_its_parent_was_and_its_hyperparameter_moves_there():
    ways = courses(Lineage(SETTINGS, EVENTS))
    assert [(way.member, way.parent, way.family, way.end) for way in ways.values()] == [
        (0, None, 0, "stopped"), (1, None, 1, ""), (2, None, 2, "failed"), (3, 1, 1, ""),
    ]  # fmt: skip
    assert ways[1].fitness == [(10, 0.5, 0.1), (20, 0.625, 0.05)] and ways[0].fitness == [(10, 0.25, 0.0)]
    assert ways[3].fitness == [(10, 0.5, 0.1), (20, 0.75, 0.05)]
    assert ways[2].fitness == [] and ways[2].values["learning_rate"] == [(0, 8e-3)]
    assert ways[3].values["learning_rate"] == [(10, 1e-2), (10, 1e-2), (10, 8e-3), (20, 8e-3)]
    best = winning(ways, 3)
    assert best.fitness == [(10, 0.5, 0.1), (20, 0.75, 0.05)]
    assert best.values["learning_rate"][0] == (0, 1e-2) and best.values["learning_rate"][-1] == (20, 8e-3)


def test_a_mutated_member_goes_on_with_another_value():
    events = [*EVENTS[:1], LineageEvent(1, 0, "trained", LOW, steps=4, fitness=0.0)]
    events += [LineageEvent(1, 0, "mutated", HIGH, changes={"learning_rate": (1e-4, 1e-2)}, steps=4)]
    events += [LineageEvent(2, 0, "trained", HIGH, steps=8, fitness=0.1)]
    corners = courses(Lineage(SETTINGS, events))[0].values["learning_rate"]
    assert corners == [(0, 1e-4), (4, 1e-4), (4, 1e-4), (4, 1e-2), (8, 1e-2)]


@pytest.mark.parametrize(
    ("heights", "moved"),
    [
        ([0.5], [0.5]),
        ([0.2, 0.8], [0.2, 0.8]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.52, 0.5, 0.1], [0.56, 0.46, 0.1]),
        ([1.0, 0.99], [0.95, 0.85]),
        ([0.0, 0.0, 0.0], [0.05, 0.15, 0.25]),
        ([], []),
    ],
)
def test_labels_are_apart_in_order_and_inside(heights, moved):
    assert apart(heights, 0.1) == pytest.approx(moved)


def test_labels_of_any_heights_are_apart():
    for seed in range(50):
        heights = np.random.default_rng(seed).random(8).tolist()
        moved = apart(heights, 0.1)
        order = np.argsort(heights)
        gaps = np.diff(np.array(moved)[order])
        assert gaps.min() >= 0.1 - 1e-9 and min(moved) >= 0.05 - 1e-9 and max(moved) <= 0.95 + 1e-9


def test_the_picture_is_written_whole(tmp_path: Path):
    lineage = Lineage(SETTINGS, EVENTS, finished=True, best=3)
    path = write_picture(lineage, tmp_path)
    assert path == tmp_path / PICTURE and [one.name for one in tmp_path.iterdir()] == [PICTURE]
    whole = imread(path)
    assert whole.shape[0] > 500 and whole.shape[1] > 500 and whole.std() > 0
    begun = imread(BytesIO(draw_lineage(Lineage(SETTINGS, EVENTS[:2]))))
    assert begun.shape[1] == whole.shape[1], "before the first round there is a picture too"
