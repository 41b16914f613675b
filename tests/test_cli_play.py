"""``agile-trainers play`` and ``agile-trainers envs``."""

from __future__ import annotations

import importlib.util
import io
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agile_environments import TASKS
from agile_trainers.cli import environments as envs
from agile_trainers.cli import play
from agile_trainers.cli.errors import guard
from agile_trainers.envs import list_environments
from agile_trainers.envs.context import Question
from agile_trainers.envs.libraries import LIBRARIES


def typed(*answers: str) -> Callable[[str], str]:
    """A person who types these answers and then leaves."""
    left = iter(answers)

    def ask(prompt: str) -> str:
        for answer in left:
            return answer
        raise EOFError

    return ask


def played(*options: str, answers: tuple[str, ...]) -> tuple[int, str]:
    """Exit code, and what was on the screen."""
    file = io.StringIO()
    code = play.main(options, Console(file=file, width=300), typed(*answers))
    return code, file.getvalue()


class Broken:
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "Say something.", {}

    def step(self, action: str) -> Any:
        raise RuntimeError("no more")


class OfRows(Broken):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return options["question"], {}  # type: ignore[index]


class Toy:
    def reset(self, seed: int | None = None) -> Any:
        return "What is 2+2?", {}

    def step(self, text: str) -> Any:
        return "Done.", float("4" in text), True, False, {}


class Forgets(Toy):
    """Asks for a note after every step, and shows that alone."""

    def step(self, text: str) -> Any:
        return "And now?", 0.0, text == "end", False, {}

    def context(self, messages: Any) -> Any:
        return asks_for_a_note(messages)


def asks_for_a_note(messages: Any) -> Any:
    if messages[-1]["role"] == "assistant":
        return [*messages.prompt[:-1], {"role": "user", "content": f"Your note: {messages[-1]['content']}"}]
    return messages if len(messages) == 1 else Question([*messages, {"role": "user", "content": "Write a note."}])


@pytest.mark.parametrize("options", [("Forgets",), ("Forgets", "--history", f"{__name__}:asks_for_a_note")])
def test_a_person_hears_the_questions_of_a_history(options: tuple[str, ...]) -> None:
    code, screen = played("--environment", f"{__name__}:{options[0]}", *options[1:], answers=("on", "a note", "end"))
    assert code == 0 and screen.count("user: Write a note.") == 1
    assert screen.index("environment: And now?") < screen.index("user: Write a note.")
    assert "Over: terminated after 3 turns" in screen


def test_an_environment_without_options_is_played() -> None:
    code, screen = played("--environment", f"{__name__}:Toy", answers=("4",))
    assert code == 0 and "Over: terminated after 1 turns, return +1." in screen


def test_a_person_plays_a_game() -> None:
    options = ["--environment", "agile:guess_number", "--environment_args", '{"level": "easy"}', "--seed", "4"]
    code, screen = played(*options, answers=("3", "x", "5"))
    shown = screen.splitlines()
    assert code == 0
    assert "environment: Guess the number between 1 and 6. You have 3 guesses. Answer with one number." in shown
    start = shown.index("environment: higher")
    assert shown[start : start + 7] == [
        "environment: higher",
        "reward +0",
        "environment: invalid",
        "reward -0.2",
        "environment: correct",
        "reward +1",
        "Over: terminated after 3 turns, return +0.8, success.",
    ]


def test_what_is_played_is_recorded_as_demonstrations(tmp_path: Path) -> None:
    options = ["--environment", "agile:guess_number", "--environment_args", '{"level": "easy"}', "--seed", "4"]
    file = tmp_path / "mine.jsonl"
    for _ in range(2):
        assert played(*options, "--record", str(file), answers=("3", "x", "5"))[0] == 0
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert first == second and first["seed"] == 4 and first["rewards"] == [0.0, -0.2, 1.0]
    assert [message["content"] for message in first["messages"] if message["role"] == "assistant"] == ["3", "x", "5"]
    with pytest.raises(ValueError, match=r"to a \.jsonl file"):
        played(*options, "--record", str(tmp_path / "mine.txt"), answers=())


def test_one_may_leave_and_play_several() -> None:
    code, screen = played("--environment", "agile:guess_number", "--episodes", "2", answers=("1", "x"))
    assert code == 0 and "seed 0" in screen and "seed 1" in screen and screen.endswith("You left the game.\n")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_one_leaves_by_ctrl_c_and_is_terminated_by_sigterm(number: int, status: int) -> None:
    def ask(prompt: str) -> str:
        signal.raise_signal(number)
        return "1"

    screen = io.StringIO()
    options = ["--environment", "agile:guess_number"]
    assert guard("play", lambda: play.main(options, Console(file=screen), ask), debug=False) == status
    assert screen.getvalue().endswith("You left the game.\n") is (status == 0)


def test_limits_and_system_prompt_are_those_of_training(embedded_model: Any) -> None:
    options = [
        "--environment",
        "agile:guess_number",
        "--max_turns",
        "2",
        "--max_new_tokens",
        "2",
        "--seed",
        "4",
    ]
    options += ["--model", str(embedded_model), "--system_prompt", "Be brief."]
    code, screen = played(*options, answers=("1 2 3 4", "2"))
    assert code == 0 and "Over: max_turns after 2 turns" in screen
    assert "1 of your answers were cut at --max_new_tokens." in screen


def test_what_cannot_be_played_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="did you mean agile:guess_number"):
        played("--environment", "agile:guess_nmber", answers=())
    code, screen = played("--environment", f"{__name__}:Broken", answers=("a",))
    assert code == 1 and "RuntimeError: no more" in screen and "environment_error" in screen
    assert "reset gets no row" not in screen
    code, screen = played("--environment", f"{__name__}:OfRows", answers=())
    assert code == 1 and "reset gets no row here (options=None)" in screen
    for option, message in (
        (["--environment_args", "[1]"], "expected a JSON object"),
        (["--environment_args", "{"], "is not JSON"),
    ):
        with pytest.raises(SystemExit):
            played("--environment", "agile:guess_number", *option, answers=())
        assert message in capsys.readouterr().err


def listed(*arguments: str) -> tuple[int, str]:
    """Exit code and listing."""
    file = io.StringIO()
    return envs.main(arguments, Console(file=file, width=300)), file.getvalue()


def test_every_task_and_library_is_listed() -> None:
    code, listing = listed()
    assert code == 0 and all(f"agile:{name} " in listing for name in TASKS)
    assert "Guess a number: the model guesses, the environment says higher or lower." in listing
    assert all(f"\n{prefix} " in listing for prefix in LIBRARIES)


def test_a_text_lists_the_ids_that_hold_it() -> None:
    code, listing = listed("PROBE/")
    assert code == 0
    assert listing.splitlines() == [name for name in list_environments() if "probe/" in name]
    assert listed("nothing like it") == (1, "No environment's id contains 'nothing like it'; agile-trainers envs lists "
                                            "all.\n")  # fmt: skip


def test_what_is_not_installed_comes_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    missing = {"gem", "verifiers"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    lines = listed()[1].splitlines()
    for prefix, command in (
        ("gem", "pip install 'agile-trainers[envs]'"),
        ("verifiers", "pip install 'agile-trainers[verifiers]'"),
    ):
        row = next(index for index, line in enumerate(lines) if line.startswith(f"{prefix} "))
        assert "not installed" in lines[row] and f"Run: {command}" in lines[row + 1]


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """``asking``, where agents are."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "trainers"))


def test_a_person_answers_the_calls_of_an_agent(agents: None) -> None:
    """Of the second prompt only what is new is shown: not the first one, and not the answer to it."""
    code, screen = played(
        "--environment", "agent:asking:talks", "--environment_args", '{"turns": 3}', "--seed", "5",
        answers=("one", "twelve", "even"),
    )  # fmt: skip
    assert code == 0 and "Over: terminated after 3 turns, return +1, success." in screen
    first, *later = screen.partition("Over:")[0].split("the agent asks: ")[1:]
    assert "start 5" in first
    assert later == ["\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n\n"] * 2


def test_a_person_leaves_an_agent_or_it_fails(agents: None) -> None:
    code, screen = played("--environment", "agent:asking:talks", answers=("one",))
    assert code == 0 and "You left the game." in screen
    code, screen = played("--environment", "agent:asking:reads_rows", answers=())
    assert code == 1 and "AssertionError" in screen
    with pytest.raises(ValueError, match="system_prompt has no effect on an agent"):
        played("--environment", "agent:asking:talks", "--system_prompt", "Hi.", answers=())
