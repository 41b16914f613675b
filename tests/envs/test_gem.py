"""The real GEM games behind the protocol."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gem_games import OFFLINE_GAMES
from installed import needs

from agile_environments.guess_number import halving_policy
from agile_trainers.envs import Episode, check_environment, demonstrate, make_environment_factory, play
from agile_trainers.envs.libraries.gem import GemEnvironment, listed
from agile_trainers.types import Message

needs("gem")

SLOW_TO_GENERATE = ("game:Sokoban-v0-hard", "game:Sokoban-v0-random")


def random_play(environment: GemEnvironment, seed: int) -> Episode:
    return play(environment, environment.scripted_policies()["random"], seed)


def play_all(game: str, episodes: int) -> None:
    first, second = GemEnvironment(game), GemEnvironment(game)
    state = random.getstate()
    for seed in range(episodes):
        episode = random_play(first, seed)
        assert episode.rewards and min(episode.rewards) > -0.1, "a format error, or no turn at all"
        assert episode.success == (abs(episode.episode_return - 1.0) < 1e-6)
        if seed < 2:
            # the second instance has played less: what came before must not matter
            second.reset(seed=99)
            assert random_play(second, seed) == episode
    assert random.getstate() == state


@pytest.mark.parametrize("game", [game for game in OFFLINE_GAMES if game not in SLOW_TO_GENERATE])
def test_four_random_episodes(game: str) -> None:
    play_all(game, 4)


@pytest.mark.slow
@pytest.mark.parametrize("game", OFFLINE_GAMES)
def test_sixteen_random_episodes(game: str) -> None:
    play_all(game, 16)


def test_the_offline_games_are_gems_games() -> None:
    assert set(OFFLINE_GAMES) <= set(listed())


def test_the_checker_finds_nothing() -> None:
    factory = make_environment_factory("gem:game:Minesweeper-v0-easy")
    actions = ["\\boxed{reveal 2 2}", "\\boxed{reveal 0 0}", "\\boxed{flag 4 4}"]
    report = check_environment(factory, episodes=3, max_turns=6, actions=actions)
    assert not report.findings, str(report)


def guess(environment: GemEnvironment, seed: int, *answers: str) -> list[Any]:
    environment.reset(seed=seed)
    return [environment.step(answer) for answer in answers]


def test_guess_the_number_by_hand() -> None:
    environment = GemEnvironment("game:GuessTheNumber-v0-easy")
    observation, info = environment.reset(seed=5)
    assert "between 1 and 10 (inclusive) within 4 turns" in str(observation) and info == {}
    assert str(observation).endswith("\nEnter your next guess.")
    secret = environment.game.game_number
    wrong = 10 if secret < 10 else 9
    (hint, reward, *over, info), (end, last, *ended, won) = guess(
        environment, 5, f"\\boxed{{{wrong}}}", f"\\boxed{{{secret}}}"
    )
    hinted = f"the target number is {'lower' if wrong > secret else 'higher'} than {wrong}."
    assert hint.endswith(f"{hinted}\nEnter your next guess.")
    assert (reward, over, info) == (0.0, [False, False], {"success": False})
    assert end.startswith("Congratulations") and "Enter your next guess" not in end
    assert (last, ended, won) == (1.0, [True, False], {"success": True})


def test_a_format_error_ends_the_game_as_in_gem() -> None:
    ((_, reward, terminated, truncated, info),) = guess(GemEnvironment("game:GuessTheNumber-v0-easy"), 1, "seven")
    assert (reward, terminated, truncated, info) == (-0.1, True, False, {"success": False})


def test_running_out_of_turns_pays_by_distance_and_is_no_success() -> None:
    environment = GemEnvironment("game:GuessTheNumber-v0-easy")
    environment.reset(seed=0)
    secret = environment.game.game_number
    near = secret + 1 if secret < 10 else secret - 1
    *_, (_, reward, terminated, truncated, info) = guess(environment, 0, *[f"\\boxed{{{near}}}"] * 4)
    assert reward == pytest.approx(1 - 1 / 9)
    assert (terminated, truncated, info) == (True, True, {"success": False})


def test_success_of_a_game_that_pays_bit_by_bit() -> None:
    environment = GemEnvironment("game:Sudoku-v0-easy")
    environment.reset(seed=1)
    board, solution = environment.game.board, environment.game.full_grid
    cells = [(row, col) for row in range(4) for col in range(4) if board[row][col] == 0]
    steps = [environment.step(f"\\boxed{{{row + 1} {col + 1} {solution[row][col]}}}") for row, col in cells]
    assert all(reward == pytest.approx(1 / len(cells)) for _, reward, *_ in steps)
    assert [info["success"] for *_, info in steps] == [False] * (len(cells) - 1) + [True]
    assert [terminated for _, _, terminated, _, _ in steps] == [False] * (len(cells) - 1) + [True]


def test_halving_solves_guess_the_number_and_makes_demonstrations() -> None:
    def boxed(messages: list[Message], rng: random.Random) -> str:
        return f"\\boxed{{{halving_policy(messages, rng)}}}"

    environment = GemEnvironment("game:GuessTheNumber-v0-easy")
    assert all(play(environment, boxed, seed).success for seed in range(40))
    (row,) = demonstrate(environment, boxed, [3])
    assert row["messages"][-1] == {"role": "assistant", "content": f"\\boxed{{{environment.game.game_number}}}"}


def test_the_seed_alone_decides_and_is_folded_into_what_numpy_takes() -> None:
    environment = GemEnvironment("game:Mastermind-v0-easy")

    def code(seed: int | None, options: dict[str, Any] | None = None) -> tuple[int, ...]:
        environment.reset(seed=seed, options=options)
        return tuple(environment.game.game_code)

    codes = [code(seed) for seed in range(30)]
    assert codes == [code(seed) for seed in range(30)] and len(set(codes)) > 10
    assert code(2**32 + 7) == codes[7] and code(-1) == code(2**32 - 1)
    assert code(0, {"seed": 7}) == codes[7]
    with pytest.raises(ValueError, match=r"gem:game:Mastermind-v0-easy.*secret"):
        code(0, {"secret": 3})
    unseeded = {code(None) for _ in range(30)}
    assert len(unseeded) > 10


def test_instances_do_not_disturb_each_other_or_the_process() -> None:
    alone = [random_play(GemEnvironment("game:Game2048-v0-easy"), seed) for seed in (1, 2)]
    first, second = GemEnvironment("game:Game2048-v0-easy"), GemEnvironment("game:Game2048-v0-easy")
    state, numpy_state = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index]
    # one policy, two games, a step of each in turn
    policies = [random.Random("player 1"), random.Random("player 2")]
    observations = [[first.reset(seed=1)[0]], [second.reset(seed=2)[0]]]
    over = [False, False]
    while not all(over):
        for index, environment in enumerate((first, second)):
            if not over[index]:
                observation, _, over[index], _, _ = environment.step(
                    environment.scripted_policies()["random"]([], policies[index])
                )
                observations[index].append(observation)
    for index, episode in enumerate(alone):
        said = [message["content"] for message in episode.messages if message["role"] == "user"]
        assert observations[index] == [*said, episode.final_observation]
    assert random.getstate() == state
    assert np.random.get_state()[1].tobytes() == numpy_state  # type: ignore[index]


def test_threads_give_the_same_games() -> None:
    def games_of(seed: int) -> Episode:
        return random_play(GemEnvironment("game:Minesweeper-v0-easy"), seed)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            threaded = list(pool.map(games_of, range(40)))
    finally:
        sys.setswitchinterval(interval)
    assert threaded == [games_of(seed) for seed in range(40)]


def test_games_do_not_depend_on_the_process_and_gem_leaves_its_logging_alone() -> None:
    starts = ("game:Crosswords-v0-easy", "game:Sokoban-v0-easy", "game:Sudoku-v0-easy")
    program = (
        "import json, logging\nfrom agile_trainers.envs.libraries.gem import GemEnvironment\n"
        f"print(json.dumps([GemEnvironment(game).reset(seed=4)[0] for game in {starts}]))\n"
        "assert not logging.getLogger().handlers and logging.getLogger().level == logging.WARNING\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    process = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(process.stdout) == [GemEnvironment(game).reset(seed=4)[0] for game in starts]


def test_data_set_tasks_ask_by_seed_however_many_were_asked_before() -> None:
    fresh, used = (GemEnvironment("rg:basic_arithmetic", size=5) for _ in range(2))
    for seed in range(7):
        used.reset(seed=seed)
    assert [fresh.reset(seed=seed) for seed in range(7)] == [used.reset(seed=seed) for seed in range(7)]
    used.reset(seed=3)
    answer = used.game.data["answer"]
    _, reward, terminated, _, info = used.step(f"\\boxed{{{answer}}}")
    assert (reward, terminated, info) == (1.0, True, {"success": True})


def test_there_is_no_random_policy_for_other_environments() -> None:
    assert GemEnvironment("rg:basic_arithmetic").scripted_policies() == {}


def test_a_data_set_that_draws_from_sets_is_warned_of_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "agile_trainers.envs.libraries.gem.sys", SimpleNamespace(flags=SimpleNamespace(hash_randomization=1))
    )
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    make_environment_factory("gem:rg:ransom_note")
    monkeypatch.delenv("PYTHONHASHSEED")
    make_environment_factory("gem:rg:chain_sum")
    assert not caplog.records
    make_environment_factory("gem:rg:ransom_note")
    assert "PYTHONHASHSEED=0, or play reasoning_gym:ransom_note" in caplog.text
    monkeypatch.setenv("WORLD_SIZE", "2")  # the members of a group would be asked other things
    make_environment_factory("gem:rg:chain_sum")
    with pytest.raises(ValueError, match="PYTHONHASHSEED=0, or play reasoning_gym:ransom_note"):
        make_environment_factory("gem:rg:ransom_note")


def test_gems_python_tool_runs_code_and_what_it_pays_is_no_success() -> None:
    environment = make_environment_factory(
        "gem:game:GuessTheNumber-v0-easy", wrappers=("python_tool", "episode_tracking")
    )()
    observation, _ = environment.reset(seed=5)  # type: ignore[misc]
    assert "between 1 and 10" in observation and "<python>...</python>" in observation
    plain = GemEnvironment("game:GuessTheNumber-v0-easy")
    plain.reset(seed=5)
    assert environment.game.game_number == plain.game.game_number  # type: ignore[attr-defined]
    observation, reward, terminated, _, info = environment.step("<python>print(6 * 7)</python>")  # type: ignore[misc]
    assert "Code execution result: 42" in observation and reward == pytest.approx(0.3)
    assert not terminated and info["success"] is False and info["tool_success_counter"] == 1
    for _ in range(3):
        *_, info = environment.step("<python>1</python>")  # type: ignore[misc]
    # 1.2 by now; a wrong guess shows that it is not taken for the game's 1
    *_, info = environment.step(f"\\boxed{{{plain.game.game_number % 10 + 1}}}")  # type: ignore[misc]
    assert info["success"] is False
    answer = f"\\boxed{{{plain.game.game_number}}}"
    _, reward, terminated, _, info = environment.step(answer)  # type: ignore[misc]
    assert (reward, terminated, info["success"]) == (1.0, True, True)


@pytest.mark.parametrize(("name", "words"), [("concat", "repeats the conversation"), ("python", "python_tool")])
def test_other_wrappers_are_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GemEnvironment("game:GuessTheNumber-v0-easy", wrappers=(name,))


# ------------------------------------------------------------------------------------- what evaluates a model's text


def secrets(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TERM", "hf_secret")  # which GEM hands on
    folder.chmod(0o777)
    return folder / "written"


def test_gems_code_runner_is_isolated(level: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = secrets(monkeypatch, tmp_path)
    environment = make_environment_factory("gem:game:GuessTheNumber-v0-easy", wrappers=("python_tool",))()
    environment.reset(seed=5)
    observation, *_ = environment.step("<python>print(6 * 7, list(range(3)))</python>")  # type: ignore[misc]
    assert "Code execution result: 42 [0, 1, 2]" in observation
    for attack in (
        f"open({str(target)!r}, 'w')",
        "import _socket; _socket.socket()",
        "import posix; posix.fork()",
        f"import posix; posix.kill({os.getpid()}, 0)",
        f"open('/proc/{os.getpid()}/environ')",
    ):
        observation, *_ = environment.step(f"<python>{attack}</python>")  # type: ignore[misc]
        assert "PermissionError" in observation or "FileNotFoundError" in observation, observation
        environment.reset(seed=5)
    observation, *_ = environment.step("<python>import os; print(dict(os.environ))</python>")  # type: ignore[misc]
    assert "Code execution result: {" in observation and "hf_secret" not in observation
    observation, *_ = environment.step("<python>import numpy; print(numpy.arange(3).sum())</python>")  # type: ignore[misc]
    assert "Code execution result: 3" in observation
    assert not target.exists()


def code_task() -> Callable[[str], float]:
    """The reward of a program for GEM's task to add two numbers."""
    from datasets import Dataset

    tests = json.dumps({"inputs": ["1 2\n", ["3 4"]], "outputs": ["3\n", ["7"]]})
    data = Dataset.from_list([{"problem": "Add.", "tests": tests}])
    environment = make_environment_factory("gem:code:Taco8k", dataset=data)()
    environment.reset(seed=0)
    return lambda code: environment.step(f"```python\n{code}\n```")[1]  # type: ignore[misc, index]


def test_gems_code_tasks_are_judged_by_runs() -> None:
    reward = code_task()
    assert reward("print(sum(map(int, input().split())))") == 1.0
    assert reward("import sys; print(sum(map(int, sys.stdin.buffer.read().split())))") == 1.0
    assert reward("print(3)") == 0.0


def test_gems_code_tasks_are_isolated(level: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = secrets(monkeypatch, tmp_path)
    assert code_task()(f"open({str(target)!r}, 'w'); print(sum(map(int, input().split())))") == 0.0
    assert not target.exists()


def two_letters(code: str) -> str:
    """A program in GEM's grammar of evaluated answers: sqrt, frac and two more letters, here h alone."""
    characters = "+'+'+".join(f"'frac'[3]+'h'+'frac'[1]+'({ord(character)})'" for character in code)
    return f"frac('frac('+{characters}+')')"


def test_gems_mathematical_grader_is_isolated_and_executes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("pylatexenc", reason="GEM's grader needs pylatexenc, which GEM does not install")
    from datasets import Dataset

    target = secrets(monkeypatch, tmp_path)
    data = Dataset.from_list([{"problem": "Half of one?", "answer": "\\frac{1}{2}"}])
    environment = make_environment_factory("gem:math:GSM8K", dataset=data)()
    environment.reset(seed=0)
    for answer, paid in {
        "0.5": 1.0,
        "1/2": 1.0,
        "sqrt(1)/2": 1.0,
        "(1 + x - x)/2": 1.0,
        "2": 0.0,
        two_letters("exec('import sympy; sympy.simplify = lambda x: 0') or 0"): 0.0,
        "frac('1/4') + 1/4": 0.0,
        "x.diff(x)/2": 0.0,
        f"__import__('os').system('echo x > {target}')": 0.0,
    }.items():
        assert environment.step(f"So \\boxed{{{answer}}}")[1] == paid, answer  # type: ignore[misc, index]
    assert not target.exists()
    environment.close()  # type: ignore[attr-defined]


def test_reasoning_gyms_scorers_are_isolated_behind_gem_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = secrets(monkeypatch, tmp_path)
    environment = GemEnvironment("rg:n_queens")
    environment.reset(seed=1)
    assert environment.step(f"\\boxed{{__import__('os').system('echo x > {target}')}}")[1] == 0.0
    environment.reset(seed=1)
    assert environment.step(f"\\boxed{{{environment.game.data['answer']}}}")[1] == 1.0
    assert not target.exists()
