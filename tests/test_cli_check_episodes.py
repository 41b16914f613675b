"""``agile-trainers check``: environments whose fault only their episodes show, and sound ones that look alike."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from faulty_games import WORDS
from rich.console import Console

from agile_trainers.cli.check import command as check
from agile_trainers.cli.check import plays


def run(environment: str, *options: str) -> tuple[int, str]:
    """Exit code and report. The memory plan is for the same limit everywhere, and made once (``quick.py``)."""
    file = io.StringIO()
    target = environment if ":" in environment else f"faulty_games:{environment}"
    limits = ["--max_turns", "4", "--max_model_length", "512"]
    code = check.main(["--environment", target, *limits, *options], Console(file=file, width=400))
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
        (
            "DrawsItsStart",
            0,
            r"\[environment_ignores_seed\] DrawsItsStart: .* a group would not start from the same state",
        ),
        (
            "MoodyAboutColours",
            1,
            r"Colours follows it(.|\n)*Determinism\n +warning: MoodyAboutColours: the same actions",
        ),
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
    ("apart", "here", "found"),
    [
        ("AAAA", "BCDEFGH", "instances share state: .* is told 'C' in turn 1 after others and 'A' in a new process"),
        ("AAAB", "BCDEFGH", None),  # new processes agree by chance
        ("", "BCAABBB", "instances share state: .* is told 'B' in turn 1 beside others and 'A' alone"),
        ("ABCD", "BCAABBDEF", None),  # an episode agrees beside others, and alone, by chance
    ],
)
def test_a_random_environment_may_agree_with_itself_by_chance(monkeypatch, apart: str, here: str, found: Any) -> None:
    """The results of an episode, in the order in which it is played: beside others, after them, alone twice, and again."""
    results = {True: iter(apart), False: iter(here)}

    def played(*_: Any, apart: bool = False) -> list[Any]:
        return [("start", [(0.0, next(results[apart]))], "end", 0.0, None, 0.0)]

    monkeypatch.setattr(plays, "_replayed", played)
    monkeypatch.setattr(plays, "_result", lambda episode: episode)
    told = plays._dependence(None, [plays.Game(None, ("own",))])
    assert re.match(found, told) if found else told is None


@pytest.mark.parametrize(
    "sound", ["Colours", "HoldsOut", "PaysAtTheLimit", "agile:guess_number", "agile:probe/memory", "agile:countdown"]
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
