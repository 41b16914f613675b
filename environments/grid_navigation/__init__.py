"""Grid navigation: walk to the goal, around walls. See README.md for results of good play."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from agile_trainers.envs.base import ResetResult
from agile_trainers.envs.task import INVALID, WON, GameTask, demonstrations_of, preferences_of
from agile_trainers.types import Message

LEVELS = {"easy": (3, 0, 6), "normal": (5, 5, 12), "hard": (7, 14, 24)}
"""Level to width and height, number of walls, and number of moves. The shortest way takes at most half of the moves."""
DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""Word to its change of (row, column)."""
AGENT, GOAL, WALL, FREE = "A", "G", "#", "."

Cell = tuple[int, int]
"""(row, column), counted from the upper left corner."""


class GridNavigation(GameTask):
    """A walk from A to G.

    An answer is one word: ``up``, ``down``, ``left`` or ``right``. Reward: 1 for the move onto the goal, -0.2 for other
    words, 0 otherwise, including moves into a wall. ``info["anchor"]`` names the cell,
    ``"row,column"``.

    Args:
        level: ``easy`` (3 x 3 without walls, 6 moves), ``normal`` (5 x 5, 5 walls, 12 moves) or ``hard`` (7 x 7, 14 walls,
            24 moves).
        max_turns: Number of moves. Default: the level's.

    Raises:
        ValueError: If the level is unknown or ``max_turns`` is not positive.
    """

    name, levels, options = "agile:grid_navigation", LEVELS, ("map",)

    def start(self, seed: int | None, options: dict[str, Any]) -> ResetResult:
        """Make the map.

        Args:
            seed: Determines the map. None draws one.
            options: ``{"map": str}`` sets the map instead of the seed: lines of ``A``, ``G``, ``#`` and ``.``; blanks are
                ignored.

        Raises:
            ValueError: If the map is not a rectangle with one A, one G and a way between them.
        """
        self._grid = read_map(options["map"]) if "map" in options else draw_map(self.level, seed)
        self._agent, self._goal = find(self._grid, AGENT), find(self._grid, GOAL)
        moves = f"{self.max_turns} moves" if self.max_turns > 1 else "1 move"
        prompt = f"Walk from A to G. # is a wall. You have {moves}. Answer with one word: up, down, left or right."
        return f"{prompt}\n{self._map()}", {"anchor": self._anchor()}

    def answer(self, text: str) -> tuple[str, float, dict[str, Any]]:
        """Take a move."""
        direction = text.lower()
        reward, said = 0.0, "moved"
        if direction not in DIRECTIONS:
            reward, said = INVALID, "invalid"
        elif (cell := neighbour(self._agent, direction)) in free_cells(self._grid):
            self._agent = cell
        else:
            said = "blocked"
        info = {"success": self._agent == self._goal, "anchor": self._anchor()}
        if info["success"]:
            return "arrived", WON, info
        return f"{said}\n{self._map()}", reward, info

    def _anchor(self) -> str:
        return f"{self._agent[0]},{self._agent[1]}"

    def _map(self) -> str:
        marks = {**dict.fromkeys(free_cells(self._grid), FREE), self._goal: GOAL, self._agent: AGENT}
        lines = [[marks.get((i, j), WALL) for j in range(len(row))] for i, row in enumerate(self._grid)]
        return "\n".join(" ".join(line) for line in lines)


def draw_map(level: str, seed: int | None) -> list[str]:
    """Draw the map of a level and seed: one text per line, without blanks."""
    size, walls, moves = LEVELS[level]
    rng = random.SystemRandom() if seed is None else random.Random(f"agile:grid_navigation {level} {seed}")
    cells = [(i, j) for i in range(size) for j in range(size)]
    while True:
        agent, goal, *blocked = rng.sample(cells, walls + 2)
        marks = {agent: AGENT, goal: GOAL, **dict.fromkeys(blocked, WALL)}
        grid = ["".join(marks.get((i, j), FREE) for j in range(size)) for i in range(size)]
        if 2 <= len(shortest_way(grid)) <= moves // 2:
            return grid


def read_map(text: Any) -> list[str]:
    """Read the lines of a map, without blanks.

    Raises:
        ValueError: If the map is not a rectangle of A, G, # and . with one A, one G and a way between them.
    """
    grid = [line.replace(" ", "") for line in str(text).strip().splitlines()]
    marks = "".join(grid)
    rectangle = {len(line) for line in grid} == {len(grid[0])} if grid else False
    if not rectangle or set(marks) - {AGENT, GOAL, WALL, FREE} or marks.count(AGENT) != 1 or marks.count(GOAL) != 1:
        raise ValueError(f"map must be lines of equal length of one A, one G, and # and ., got {text!r}.")
    if not shortest_way(grid):
        raise ValueError(f"There is no way from A to G on the map {text!r}.")
    return grid


def shortest_way(grid: list[str]) -> list[str]:
    """Return the directions of a shortest way from A to G, preferring the order of ``DIRECTIONS``; [] if there is none."""
    start, goal, free = find(grid, AGENT), find(grid, GOAL), free_cells(grid)
    ways: dict[Cell, list[str]] = {start: []}
    queue = deque([start])
    while queue and goal not in ways:
        cell = queue.popleft()
        for direction in DIRECTIONS:
            reached = neighbour(cell, direction)
            if reached in free and reached not in ways:
                ways[reached] = [*ways[cell], direction]
                queue.append(reached)
    return ways.get(goal, [])


def find(grid: list[str], mark: str) -> Cell:
    """Return the cell of a mark."""
    return next((i, line.index(mark)) for i, line in enumerate(grid) if mark in line)


def free_cells(grid: list[str]) -> set[Cell]:
    """Return all cells without a wall."""
    return {(i, j) for i, line in enumerate(grid) for j, mark in enumerate(line) if mark != WALL}


def neighbour(cell: Cell, direction: str) -> Cell:
    """Return the next cell in a direction, which may lie outside the map."""
    down, right = DIRECTIONS[direction]
    return cell[0] + down, cell[1] + right


def random_policy(messages: list[Message], rng: random.Random) -> str:
    """Answer with a random direction."""
    return rng.choice(list(DIRECTIONS))


def random_legal_policy(messages: list[Message], rng: random.Random) -> str:
    """Answer with a random direction without a wall."""
    grid = _shown(messages)
    agent, free = find(grid, AGENT), free_cells(grid)
    return rng.choice([direction for direction in DIRECTIONS if neighbour(agent, direction) in free])


def careless_policy(messages: list[Message], rng: random.Random) -> str:
    """Answer with the expert's move in 60% of the turns, and a random legal one otherwise."""
    return (expert_policy if rng.random() < 0.6 else random_legal_policy)(messages, rng)


def expert_policy(messages: list[Message], rng: random.Random) -> str:
    """Answer with the next move of a shortest way."""
    return shortest_way(_shown(messages))[0]


demonstrations = demonstrations_of(GridNavigation, careless_policy)
"""Careless play teaches the words and the goal; reinforcement learning can then remove the detours."""
preferences = preferences_of(GridNavigation, expert_policy, random_legal_policy)


def _shown(messages: list[Message]) -> list[str]:
    """Read the map in the last message."""
    lines = messages[-1]["content"].splitlines()[1:]
    if not any(AGENT in line for line in lines):
        raise ValueError(f"Expected a message with a map below its first line, got {messages[-1]['content']!r}.")
    return [line.replace(" ", "") for line in lines]
