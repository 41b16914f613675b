"""Grid navigation: maps, moves, and what the scripted policies reach."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from agile_environments.grid_navigation import (
    AGENT,
    DIRECTIONS,
    GOAL,
    LEVELS,
    WALL,
    GridNavigation,
    demonstrations,
    draw_map,
    expert_policy,
    find,
    free_cells,
    neighbour,
    preferences,
    random_legal_policy,
    random_policy,
    shortest_way,
)
from agile_trainers.envs import check_environment, make_environment_factory, play

RANDOM_SUCCESS = {"easy": (0.262, 0.386), "normal": (0.188, 0.265), "hard": (0.173, 0.247)}
"""What README.md says of random and of random legal moves, over 10,000 walks."""
MAP = "A . #\n# . G"


def walk(text: str = MAP, **kwargs: Any) -> GridNavigation:
    environment = GridNavigation(**kwargs)
    environment.reset(options={"map": text})
    return environment


def success_probability(grid: list[str], moves: int, legal: bool) -> float:
    """Probability that a random walk arrives, by following the distribution over cells move by move."""
    free, goal = free_cells(grid), find(grid, GOAL)
    where, arrived = {find(grid, AGENT): 1.0}, 0.0
    for _ in range(moves):
        after: dict[tuple[int, int], float] = {}
        for cell, probability in where.items():
            ways = [neighbour(cell, direction) for direction in DIRECTIONS]
            ways = [way for way in ways if way in free] if legal else [way if way in free else cell for way in ways]
            for way in ways:
                after[way] = after.get(way, 0.0) + probability / len(ways)
        arrived += after.pop(goal, 0.0)
        where = after
    return arrived


def test_a_walk_by_hand() -> None:
    environment = GridNavigation()
    prompt, info = environment.reset(options={"map": MAP})
    assert prompt == (
        "Walk from A to G. # is a wall. You have 12 moves. Answer with one word: up, down, left or right.\nA . #\n# . G"
    )
    assert info == {"anchor": "0,0"}
    stayed = {"success": False, "anchor": "0,0"}
    assert environment.step("down") == (f"blocked\n{MAP}", 0.0, False, False, stayed)
    assert environment.step("left") == (f"blocked\n{MAP}", 0.0, False, False, stayed)
    assert environment.step("go right") == (f"invalid\n{MAP}", -0.2, False, False, stayed)
    moved = ("moved\n. A #\n# . G", 0.0, False, False, {"success": False, "anchor": "0,1"})
    assert environment.step(" Right\n") == moved
    assert environment.step("down")[4]["anchor"] == "1,1"
    assert environment.step("right") == ("arrived", 1.0, True, False, {"success": True, "anchor": "1,2"})


def test_running_out_of_moves_terminates_and_the_last_move_may_arrive() -> None:
    environment = walk(max_turns=3)
    assert [environment.step(move)[2] for move in ("up", "up", "x")] == [False, False, True]
    environment.reset(options={"map": MAP})
    assert [environment.step(move)[1] for move in ("right", "down", "right")] == [0.0, 0.0, 1.0]
    assert "You have 1 move." in GridNavigation(max_turns=1).reset(seed=0)[0]


@pytest.mark.parametrize("level", LEVELS)
def test_maps_follow_their_level_and_their_seed(level: str) -> None:
    size, walls, moves = LEVELS[level]
    maps = [draw_map(level, seed) for seed in range(60)]
    for grid in maps:
        assert len(grid) == size and {len(line) for line in grid} == {size}
        marks = "".join(grid)
        assert (marks.count(AGENT), marks.count(GOAL), marks.count(WALL)) == (1, 1, walls)
        assert 2 <= len(shortest_way(grid)) <= moves // 2
    assert maps == [draw_map(level, seed) for seed in range(60)]
    assert len({"".join(grid) for grid in maps}) > 30


def test_the_shortest_way_is_shortest() -> None:
    assert shortest_way(["A.#", "#.G"]) == ["right", "down", "right"]
    assert shortest_way(["A#G"]) == []
    for seed in range(20):  # no walk of fewer moves has any chance of arriving
        grid = draw_map("normal", seed)
        length = len(shortest_way(grid))
        assert success_probability(grid, length - 1, legal=True) == 0 < success_probability(grid, length, legal=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("policy", [random_policy, random_legal_policy])
def test_random_policies_reach_what_the_readme_says(level: str, policy: Callable[..., str]) -> None:
    """The exact probability of each map is compared with playing it, and the mean over maps with the README's."""
    environment, walks = GridNavigation(level), 300
    legal = policy is random_legal_policy
    exact = [success_probability(draw_map(level, seed), LEVELS[level][2], legal) for seed in range(walks)]
    rate = sum(play(environment, policy, seed).success for seed in range(walks)) / walks
    assert abs(rate - sum(exact) / walks) <= 3 * math.sqrt(sum(p * (1 - p) for p in exact)) / walks
    stated = RANDOM_SUCCESS[level][legal]
    assert abs(sum(exact) / walks - stated) <= 4 * math.sqrt(sum((p - stated) ** 2 for p in exact)) / walks


def test_the_expert_arrives_by_a_shortest_way() -> None:
    for level in LEVELS:
        for seed in range(40):
            episode = play(GridNavigation(level), expert_policy, seed)
            assert episode.success and len(episode.rewards) == len(shortest_way(draw_map(level, seed)))


def test_bad_options_and_arguments() -> None:
    for text in ("", "A.", "AG\n.", "AAG", "A G x"):
        with pytest.raises(ValueError, match="lines of equal length of one A, one G"):
            walk(text)
    with pytest.raises(ValueError, match="no way from A to G"):
        walk("A#G")
    with pytest.raises(ValueError, match=r"maze.*map"):
        GridNavigation().reset(options={"maze": MAP})
    with pytest.raises(ValueError, match=r"'heavy'.*easy, normal, hard"):
        GridNavigation("heavy")
    with pytest.raises(ValueError, match=r"max_turns.*0"):
        GridNavigation(max_turns=0)
    with pytest.raises(ValueError, match="Expected a message with a map"):
        expert_policy([{"role": "user", "content": "hello"}], random.Random(0))


def test_the_checker_finds_nothing() -> None:
    factory = make_environment_factory("agile:grid_navigation", level="hard")
    assert not check_environment(factory, episodes=3, max_turns=8, actions=[*DIRECTIONS, "x"]).findings


def test_demonstrations_and_preferences() -> None:
    rows = demonstrations(8, seed=3)
    assert rows == demonstrations(8, seed=3)
    for seed, row in enumerate(rows, start=3):
        environment = GridNavigation()
        environment.reset(seed=seed)
        steps = [environment.step(message["content"]) for message in row["messages"][1::2]]
        assert steps[-1][2] and all(step[1] >= 0 for step in steps)
    for pair in preferences(6):
        assert pair["prompt"][-1]["role"] == "user"
        (chosen,), (rejected,) = pair["chosen"], pair["rejected"]
        assert chosen["content"] == expert_policy(pair["prompt"], random.Random(0)) != rejected["content"]
