"""``agile-trainers check``: environments whose fault only their episodes show, and sound ones that look alike."""

from __future__ import annotations

import io
import random
import re
from typing import Any, ClassVar

import pytest
from rich.console import Console

from agile_trainers.cli.check import command as check
from agile_trainers.types import Message

WORDS = ("red", "blue", "green", "black")


class Colours:
    """A sound game: three guesses at a colour that the seed decides; 1 for the right one, and each guess is answered."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.secret, self.turn = WORDS[(seed or 0) * 7919 % 4], 0
        return "Guess a colour: red, blue, green or black.", {}

    def step(self, action: str) -> Any:
        self.turn += 1
        right = action.strip() == self.secret
        near = "close" if action.strip()[:1] == self.secret[:1] else "far"
        return "right" if right else near, float(right), right or self.turn == 3, False, {"success": right}


def random_policy(messages: list[Message], rng: random.Random) -> str:
    return rng.choice(WORDS)


class NeverEnds(Colours):
    def step(self, action: str) -> Any:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, False, info


class IgnoresAnswers(Colours):
    """Decides by its seed how an episode goes."""

    def step(self, action: str) -> Any:
        return super().step("red")


class EchoesAnswers(IgnoresAnswers):
    """The same, with an observation that depends on the answer."""

    def step(self, action: str) -> Any:
        return f"You said {action}.", *super().step(action)[1:]


class SameTask(Colours):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(2, options)


class WinIsTruncated(Colours):
    def step(self, action: str) -> Any:
        observation, reward, ended, _, info = super().step(action)
        return observation, reward, ended and not reward, ended and bool(reward), info


class HoldsOut(Colours):
    """Sound: who has not said the secret for three turns has succeeded, which a limit ends."""

    def step(self, action: str) -> Any:
        self.turn += 1
        lost = action.strip() == self.secret
        return "go on", float(not lost), lost, not lost and self.turn == 3, {"success": not lost and self.turn == 3}


class SaysNothing(Colours):
    def step(self, action: str) -> Any:
        return " ", *super().step(action)[1:]


class WrongRange(Colours):
    return_range = (-1.0, 0.5)


class NoRange(Colours):
    return_range = "0 to 1"


class SharedList(Colours):
    """Gives a guess that was made before, in any episode, no credit."""

    made: ClassVar[list[str]] = []

    def step(self, action: str) -> Any:
        self.made.append(action)
        _, reward, *rest = super().step(action)
        return f"{len(self.made)} guesses", reward / len(self.made), *rest


class SharedStart(Colours):
    """Counts its episodes in the class, and says the number."""

    started = 0

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        type(self).started += 1
        return f"Game {self.started}: guess a colour.", super().reset(seed)[1]


class UnseededSecret(Colours):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        start = super().reset(seed)
        self.secret = random.SystemRandom().choice(WORDS)
        return start


class GlobalSecret(Colours):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        start = super().reset(seed)
        self.secret = random.choice(WORDS)
        return start


class UntoldForm(Colours):
    """Understands only an answer in brackets, and does not say so."""

    def step(self, action: str) -> Any:
        return super().step(action if re.fullmatch(r"\[\w+\]", action.strip()) else "")


def run(environment: str, *options: str) -> tuple[int, str]:
    """Exit code and report."""
    file = io.StringIO()
    target = environment if ":" in environment else f"{__name__}:{environment}"
    code = check.main(["--environment", target, "--max_turns", "4", *options], Console(file=file, width=400))
    return code, file.getvalue()


@pytest.mark.parametrize(
    ("broken", "code", "message"),
    [
        ("NeverEnds", 0, r"warning: \[episodes_cut\] A limit cut every episode short \(max_turns=4\)"),
        ("IgnoresAnswers", 0, r"warning: \[zero_advantage_groups\] Answers make no difference: 4 different ones"),
        ("EchoesAnswers", 0, r"warning: \[zero_advantage_groups\] Answers make no difference"),
        ("SameTask", 0, r"warning: \[one_task\] Different seeds give the same task"),
        ("WinIsTruncated", 0, r"warning: \d+ episodes that succeeded ended as truncated.*return terminated=True"),
        ("SaysNothing", 0, r"warning: \[prompts_unread\] 100% of the observations between two answers are empty"),
        ("WrongRange", 0, r"warning: the environment declares return_range=\(-1.0, 0.5\), but episodes return 0 to 1"),
        ("NoRange", 1, r"problem: .*NoRange declares return_range='0 to 1'; expected"),
        ("SharedList", 1, r"problem: instances share state: .* after others and .* in a new process"),
        ("SharedStart", 1, r"problem: instances share state: .* begins with .* in a new process"),
        ("UnseededSecret", 0, r"members of a group would not play the same task; let results depend on the seed"),
        ("GlobalSecret", 0, r"draws from or seeds the global random state"),
        (
            "UntoldForm",
            0,
            r"\[too_hard\] Read an episode: the prompt must tell the form in which an answer is understood",
        ),
    ],
)
def test_what_is_said(broken: str, code: int, message: str) -> None:
    got, report = run(broken)
    assert got == code and re.search(message, report), report
    assert broken.startswith("Shared") or "share state" not in report, report


@pytest.mark.parametrize(
    "sound", ["Colours", "HoldsOut", "agile:guess_number", "agile:probe/memory", "agile:countdown"]
)
def test_sound_ones_are_not_warned_of(sound: str) -> None:
    code, report = run(sound)
    found = re.findall(
        r"warning: (?!An update|every episode that|\d+ answers of the expert|all \d+ episodes).*", report
    )
    assert code == 0 and not found, report


def test_a_win_that_is_masked_is_a_reason_not_to_train() -> None:
    code, report = run("WinIsTruncated", "--mask_truncated_completions", "true")
    assert code == 1 and "which mask_truncated_completions=True leaves out" in report


def test_rows_that_reset_does_not_read_are_one_task(tmp_path: Any) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"colour": "{word}"}}\n' for word in WORDS * 4))
    _, report = run("SameTask", "--dataset_name", str(tmp_path), "--gradient_accumulation_steps", "1")
    assert "[one_task] Different rows give the same task" in report, report
