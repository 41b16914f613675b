"""Real Gymnasium environments behind the protocol."""

from __future__ import annotations

import importlib.util
import random
from collections import deque
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="Gymnasium is not installed: pip install 'agile-trainers[envs]'")

import gymnasium

from agile_trainers.envs import check_environment, list_environments, make_environment_factory, play
from agile_trainers.envs.libraries.gymnasium import GymnasiumEnvironment, _without_colours, listed
from agile_trainers.types import Message


class Reverse(gymnasium.Env[str, str]):
    """Say a word backwards: both spaces are text."""

    metadata = {"render_modes": []}  # noqa: RUF012
    observation_space = gymnasium.spaces.Text(max_length=40, charset="Reverse: abcdfghijklmnopqtuwxyz")
    action_space = gymnasium.spaces.Text(max_length=8, charset="abcdefghijklmnopqrstuvwxyz")

    def __init__(self, words: tuple[str, ...] = ("stone", "water", "light")):
        self.words = words

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.word = (options or {}).get("word") or self.words[self.np_random.integers(len(self.words))]
        return f"Reverse: {self.word}", {}

    def step(self, action: str) -> Any:
        right = action == self.word[::-1]
        return "right" if right else "wrong", float(right), right, False, {"is_success": right}


gymnasium.register("Reverse-v0", entry_point=Reverse, max_episode_steps=3)


def shortest_path(rows: list[str]) -> list[str]:
    """Actions from S to G on a frozen lake that is not slippery."""
    cells = {(r, c): cell for r, row in enumerate(rows) for c, cell in enumerate(row)}
    moves = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    queue: deque[tuple[tuple[int, int], list[str]]] = deque([((0, 0), [])])
    seen = {(0, 0)}
    while queue:
        (row, col), path = queue.popleft()
        if cells[row, col] == "G":
            return path
        for name, (down, right) in moves.items():
            cell = row + down, col + right
            if cells.get(cell, "H") != "H" and cell not in seen:
                seen.add(cell)
                queue.append((cell, [*path, name]))
    raise AssertionError("no path")


def policy(answers: list[str]) -> Any:
    remaining = iter(answers)

    def answer(messages: list[Message], rng: random.Random) -> str:
        return next(remaining)

    return answer


@pytest.mark.parametrize("name", listed())
def test_eight_random_episodes(name: str) -> None:
    first, second = GymnasiumEnvironment(name), GymnasiumEnvironment(name)

    def at_random(messages: list[Message], rng: random.Random) -> str:
        return rng.choice(first.actions)

    for seed in range(8):
        episode = play(first, at_random, seed, max_turns=20)
        if seed < 2:
            second.reset(seed=99)
            again = play(second, at_random, seed, max_turns=20)
            assert (again.messages, again.rewards) == (episode.messages, episode.rewards)
        assert "\x1b" not in str(episode.messages)


@pytest.mark.parametrize("name", ["FrozenLake-v1", "FrozenLake8x8-v1"])
def test_the_shortest_path_crosses_the_lake(name: str) -> None:
    environment = GymnasiumEnvironment(name, is_slippery=False)
    first, _ = environment.reset(seed=0)
    *text, board = str(first).split("\n\n")
    assert text[0].startswith("Walk over") and text[1] == "Answer with one of: left, down, right, up."
    rows = board.replace("[S]", "S").split("\n")
    path = shortest_path(rows)
    episode = play(environment, policy(path), 0)
    assert episode.success and episode.rewards == [0.0] * (len(path) - 1) + [1.0]
    assert str(episode.final_observation).endswith("[G]")


def test_falling_into_a_hole_is_no_success() -> None:
    episode = play(GymnasiumEnvironment("FrozenLake-v1", is_slippery=False), policy(["down", "right"]), 0)
    assert episode.rewards == [0.0, 0.0] and episode.info["success"] is False


def test_walking_around_the_cliff_succeeds_with_reward_minus_one_a_step() -> None:
    episode = play(GymnasiumEnvironment("CliffWalking-v1"), policy(["up", *["right"] * 11, "down"]), 0)
    assert episode.success and episode.rewards == [-1.0] * 13


def test_the_seed_chooses_the_taxis_start() -> None:
    environment = GymnasiumEnvironment("Taxi-v4")
    starts = [environment.reset(seed=seed)[0] for seed in range(10)]
    assert len(set(starts)) > 7
    assert environment.reset(seed=0, options={"seed": 3})[0] == starts[3] == environment.reset(seed=2**32 + 3)[0]


def test_an_answer_that_names_no_action_is_no_step() -> None:
    environment = GymnasiumEnvironment("FrozenLake-v1", is_slippery=False)
    environment.reset(seed=0)
    hint = environment.step("I will go upwards")
    assert hint == ("That is no action; name one of: left, down, right, up.", 0.0, False, False, {"success": False})
    observation, *_ = environment.step("Not LEFT but Down!")
    assert str(observation).endswith("SFFF\n[F]HFH\nFFFH\nHFFG")


def test_text_spaces_are_taken_as_they_are() -> None:
    environment = GymnasiumEnvironment("Reverse-v0", words=("abc",), rules="Play.")
    assert environment.reset(seed=0)[0] == "Play.\n\nReverse: abc"
    observation, reward, terminated, truncated, info = environment.step("Not within the space")
    assert "no action; stay within Text" in str(observation) and (reward, terminated, truncated) == (0.0, False, False)
    assert environment.step("abc")[:4] == ("wrong", 0.0, False, False)
    observation, reward, terminated, truncated, info = environment.step("cba")
    assert (observation, reward, terminated, info["success"]) == ("right", 1.0, True, True)
    assert environment.reset(seed=0, options={"options": {"word": "xyz"}})[0] == "Play.\n\nReverse: xyz"
    assert [environment.step("abc")[3] for _ in range(3)] == [False, False, True]  # max_episode_steps


def test_actions_may_be_named() -> None:
    environment = GymnasiumEnvironment("CliffWalking-v1", actions=("north", "east", "south", "west"))
    assert "north, east, south, west" in str(environment.reset(seed=0)[0])
    assert str(environment.step("north")[0]).split("\n")[2].startswith("x")


def test_colours_become_brackets_from_the_inside_out() -> None:
    assert _without_colours("a\x1b[43m\x1b[34;1mB\x1b[0m\x1b[0mc\x1b[35mD\x1b[0m") == "a[(B)]c{D}"


def test_ids() -> None:
    assert {"gymnasium:FrozenLake-v1", "gymnasium:Taxi-v4"} <= set(list_environments())
    assert isinstance(make_environment_factory("gymnasium:Reverse-v0")(), GymnasiumEnvironment)
    assert isinstance(make_environment_factory(f"gymnasium:{__name__}:Reverse-v0")(), GymnasiumEnvironment)
    with pytest.raises(ValueError, match=r"did you mean .*gymnasium:FrozenLake-v1"):
        make_environment_factory("gymnasium:FrozenLak-v1")


def test_the_checker_finds_nothing() -> None:
    factory = make_environment_factory("gymnasium:FrozenLake-v1")
    report = check_environment(factory, episodes=3, max_turns=4, actions=["down", "right", "nothing"])
    assert not report.findings, str(report)


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("CartPole-v1", {}, ["cannot be shown in text", "Box"]),
        ("Blackjack-v1", {}, ["cannot be shown in text", "Tuple"]),
        ("Pendulum-v1", {}, ["action space Box", "Text or Discrete"]),
        ("FrozenLake-v1", {"slipry": True}, ["slipry"]),
        ("FrozenLake-v1", {"actions": ["a", "b"]}, ["4 actions", "['a', 'b']"]),
        ("Reverse-v0", {"actions": ["a"]}, ["takes any text"]),
    ],
)
def test_what_cannot_be_played_is_refused(name: str, kwargs: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        make_environment_factory(f"gymnasium:{name}", **kwargs)
    assert all(word in str(error.value) for word in words), error.value


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gymnasium:Taxi-v4.*colour"):
        GymnasiumEnvironment("Taxi-v4").reset(seed=0, options={"colour": 1})


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gymnasium" else find(name))
    with pytest.raises(ImportError, match=r"pip install 'agile-trainers\[envs\]'"):
        make_environment_factory("gymnasium:FrozenLake-v1")
