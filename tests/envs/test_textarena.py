"""TextArena's real single-player games behind the protocol."""

from __future__ import annotations

import importlib.util
import random
import re
from typing import Any

import pytest
from installed import needs

from agile_trainers.envs import Episode, check_environment, list_environments, make_environment_factory, play
from agile_trainers.envs.libraries.textarena import OFFLINE_GAMES, TextArenaEnvironment, listed
from agile_trainers.types import Message

needs("textarena")

ANSWERS = ("[up]", "[3]", "[1 2 3 4]", "[A C]", "[reveal 1 1]", "[hit]", "[continue]", "[red]", "[accept]", "nonsense")


def at_random(messages: list[Message], rng: random.Random) -> str:
    return rng.choice(ANSWERS)


def numbers(messages: list[Message]) -> tuple[int, int]:
    """The interval a game of GuessTheNumber has left open."""
    low, high = (int(n) for n in re.findall(r"between (\d+) and (\d+)", str(messages[0]["content"]))[0])
    for guess, hint in zip(messages[1::2], messages[2::2]):
        number = int(re.findall(r"\d+", str(guess["content"]))[0])
        low, high = (number + 1, high) if "higher" in str(hint["content"]) else (low, number - 1)
    return low, high


def halving(messages: list[Message], rng: random.Random) -> str:
    return f"[{sum(numbers(messages)) // 2}]"


def hanoi_moves(disks: int, source: str = "A", target: str = "C", spare: str = "B") -> list[str]:
    if not disks:
        return []
    before, after = hanoi_moves(disks - 1, source, spare, target), hanoi_moves(disks - 1, spare, target, source)
    return [*before, f"[{source} {target}]", *after]


# Generating these takes seconds.
SLOW = ("RushHour-v0", "Sokoban-v0")


@pytest.mark.parametrize("game", [game for game in OFFLINE_GAMES if game not in (*SLOW, "Sudoku-v0-hard")])
def test_eight_random_episodes_of_every_offline_game(game: str) -> None:
    first, second = TextArenaEnvironment(game), TextArenaEnvironment(game)
    state = random.getstate()
    for seed in range(8):
        episode = play(first, at_random, seed, max_turns=12)
        if seed < 2:
            second.reset(seed=99)  # what came before must not matter
            assert play(second, at_random, seed, max_turns=12) == episode
        assert all(str(message["content"]).strip() for message in episode.messages if message["role"] == "user")
    assert random.getstate() == state


@pytest.mark.parametrize("game", [*SLOW, pytest.param("Sudoku-v0-hard", marks=pytest.mark.slow)])
def test_the_slow_ones_too(game: str) -> None:
    first, second = (play(TextArenaEnvironment(game), at_random, 1, max_turns=4) for _ in range(2))
    assert first == second


def test_ids() -> None:
    assert list(OFFLINE_GAMES) == listed()
    assert {f"textarena:{game}" for game in OFFLINE_GAMES} <= set(list_environments())
    environment = make_environment_factory("textarena:GuessTheNumber-v0", max_number=50)()
    assert "between 1 and 50" in str(environment.reset(seed=0))


def test_halving_solves_guess_the_number() -> None:
    environment = TextArenaEnvironment("GuessTheNumber-v0")
    episodes: list[Episode] = [play(environment, halving, seed) for seed in range(30)]
    assert all(episode.success and episode.rewards[-1] == 1.0 for episode in episodes)
    assert all(not any(episode.rewards[:-1]) for episode in episodes)
    assert len({len(episode.rewards) for episode in episodes}) > 2, "the secret does not depend on the seed"


def test_the_recursion_solves_the_tower_of_hanoi() -> None:
    moves = iter(hanoi_moves(3))
    episode = play(TextArenaEnvironment("TowerOfHanoi-v0"), lambda messages, rng: next(moves), 0)
    assert episode.success and len(episode.rewards) == 7


def test_observations_hold_only_what_is_new() -> None:
    environment = TextArenaEnvironment("GuessTheNumber-v0")
    first, info = environment.reset(seed=3)
    assert str(first).startswith("You are Player 0") and info == {}
    secret = environment.game.game_number
    wrong = 20 if secret < 20 else 19
    observation, reward, *over, info = environment.step(f"I guess [{wrong}]")
    hint = "lower" if wrong > secret else "higher"
    assert (observation, reward, over, info) == (
        f"The target number is {hint}.",
        0.0,
        [False, False],
        {"success": False},
    )
    end, reward, *over, info = environment.step(str(secret))  # the brackets are put around it
    assert (reward, over, info["success"]) == (1.0, [True, False], True)
    assert end == info["reason"] and "Congratulations" in str(end)


def test_brackets_are_left_to_the_player_in_raw_games_and_rules_may_be_broken_once() -> None:
    environment = TextArenaEnvironment("GuessTheNumber-v0-raw")
    environment.reset(seed=0)
    observation, reward, terminated, _, _ = environment.step("7")
    assert "invalid move" in str(observation) and not terminated and reward == 0.0
    _, reward, terminated, _, info = environment.step("7")
    assert terminated and reward == 0.0 and info["reason"].startswith("Invalid Move") and not info["success"]


def test_a_near_miss_is_no_success() -> None:
    environment = TextArenaEnvironment("GuessTheNumber-v0", max_turns=1)  # it counts the turns that went before
    environment.reset(seed=0)
    secret = environment.game.game_number
    far, near = (secret + 2, secret + 1) if secret < 19 else (secret - 2, secret - 1)
    assert environment.step(f"[{far}]")[2] is False
    _, reward, terminated, _, info = environment.step(f"[{near}]")
    assert reward == pytest.approx(1 - 1 / 19) and terminated and not info["success"]


def test_seeds_and_options() -> None:
    environment = TextArenaEnvironment("Mastermind-v0")

    def code(seed: int | None, options: dict[str, Any] | None = None) -> tuple[int, ...]:
        environment.reset(seed=seed, options=options)
        return tuple(environment.game.state.game_state["secret_code"])

    codes = [code(seed) for seed in range(30)]
    assert codes == [code(seed) for seed in range(30)] and len(set(codes)) > 10
    assert code(0, {"seed": 7}) == codes[7] and code(2**40 + 1) == code(2**40 + 1)
    assert len({code(None) for _ in range(30)}) > 10
    with pytest.raises(ValueError, match=r"textarena:Mastermind-v0.*secret"):
        code(0, {"secret": 3})


def test_the_checker_finds_nothing() -> None:
    factory = make_environment_factory("textarena:GuessTheNumber-v0")
    report = check_environment(factory, episodes=3, max_turns=4, actions=["[3]", "[9]", "[15]"])
    assert not report.findings, str(report)


@pytest.mark.parametrize(
    ("game", "kwargs", "error", "message"),
    [
        ("TicTacToe-v0", {}, ValueError, "not a game for one player .*GuessTheNumber-v0"),
        ("Golf-v0", {}, ValueError, "not a game for one player"),
        ("IteratedPrisonersDilemma-v0", {}, ValueError, "not a game for one player"),
        ("Klondike-v0", {}, RuntimeError, "does not load: SyntaxError"),
        ("GuessTheNumber-v0", {"hihg": 3}, ValueError, r"hihg.*min_number"),
    ],
)
def test_what_cannot_be_played_is_refused(game: str, kwargs: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make_environment_factory(f"textarena:{game}", **kwargs)


def test_unknown_ids_name_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"did you mean .*textarena:GuessTheNumber-v0"):
        make_environment_factory("textarena:GuessTheNumbr-v0")


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "textarena" else find(name))
    with pytest.raises(ImportError, match=r"pip install 'agile-trainers\[envs\]'"):
        make_environment_factory("textarena:GuessTheNumber-v0")
