"""Right answers earn 1 in whatever form, wrong ones do not; and no answer costs more than its limit."""

from __future__ import annotations

import importlib.util
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import forging_functions
import isolated_functions
import pytest
from grading_table import GRADERS, Pair, pairs

from agile_environments.countdown import reward
from agile_trainers.envs.isolation import calls as isolation_calls
from agile_trainers.envs.isolation import levels as isolation
from agile_trainers.envs.isolation.calls import IsolatedDeath, IsolatedError, run_isolated
from agile_trainers.envs.questions import answers
from agile_trainers.envs.questions.answers import (
    exact_match,
    exact_value,
    final_answer,
    last_boxed,
    math_match,
    normalized,
    read_number,
    tagged,
)
from agile_trainers.envs.tools.search import answer_match
from agile_trainers.envs.tools.toolbox import MalformedCall, parse_tool_calls

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed: pip install math-verify"
)
MANY = 50_000
"""So often that a quadratic scan would take hours."""


@pytest.mark.parametrize("task", [pytest.param(t, marks=needs_math_verify if t == "math" else ()) for t in GRADERS])
def test_every_pair_is_graded_as_it_should_be(task: str) -> None:
    def graded(pair: Pair) -> bool:
        return GRADERS[task](pair[2], pair[1]) == 1.0

    own = [pair for pair in pairs() if pair[0] == task]
    assert [pair for pair in own if graded(pair) != pair[3]] == []
    assert {pair[3] for pair in own} == {True, False}


def test_there_are_many_pairs_and_none_twice() -> None:
    assert len({pair[:3] for pair in pairs()}) == len(pairs()) >= 150


def test_normalizing_twice_changes_nothing() -> None:
    for _, gold, completion, _ in pairs():
        for text in (gold, completion):
            assert normalized(normalized(text)) == normalized(text)


def test_a_false_equation_is_no_solution() -> None:
    puzzle = "Use each of the numbers 3, 5 and 7 exactly once, with + - * / and brackets, to make 22. Answer ..."
    assert reward("3*5+7=99", None, puzzle) == 0.1
    assert reward("22=15+7", None, puzzle) == 0.0


def test_numbers_are_exact_and_bounded() -> None:
    assert exact_match("0.1", "0.10") == exact_match("1e3", 1000) == 1.0
    assert exact_match("9007199254740993", 9007199254740992) == 0.0
    assert read_number("1e9999999") is read_number("9" * 5000) is read_number("\u0663") is None
    assert answer_match("A", ["the a", "A"]) == 1.0 and answer_match("", ["the a"]) == 0.0


@pytest.mark.parametrize("text", ["3 +", "f(3)", "3 ^ 5", "\\sqrt{9}", "3 +- 5", "\\frac{3}{}", "3; 5", "0b1"])
def test_what_is_no_arithmetic(text: str) -> None:
    with pytest.raises(ValueError):
        exact_value(text)


def test_extended_arithmetic_reads_signs_decimals_and_bounded_powers() -> None:
    """Exactly; countdown does not ask for it."""
    assert exact_value("-0.1 + 2^{3} * (-3)**-1 - +0.2", extended=True)[0] == Fraction(-3, 10) - Fraction(8, 3)
    assert exact_value("(2^2047)/(2^2046) + 144^0", extended=True)[0] == 3
    for text in ("9^9^9", "(9^999)^999", "2^2049", "1^99999", "4^0.5", "2^", "1..2", "...", "1.5.2", "3!"):
        with pytest.raises(ValueError):
            exact_value(text, extended=True)
    for text in ("-3 + 5", "3.0 + 5", "3**2", "...", "3 + (-5)"):
        with pytest.raises(ValueError):
            exact_value(text)


# ------------------------------------------------------------------------------------------------------- what it costs


def test_scans_are_linear() -> None:
    """Quadratic ones would take hours."""
    assert last_boxed("\\boxed{" * MANY) is None
    assert last_boxed("\\boxed{" * MANY + "1}") == "1"
    assert last_boxed("{" * MANY + "\\boxed{1}") == "1"
    assert final_answer("<answer>" * MANY + "</answer>" * 2) == ""
    assert final_answer("<answer>" * MANY).startswith("<answer>")
    assert normalized("\\text{" * MANY + "1" + "}" * MANY) == "\\text{" * (MANY - 20) + "1" + "}" * (MANY - 20)
    assert exact_match("\\text{" * 20 + "1" + "}" * 20, "1") == 1.0
    assert tagged("<search>" * MANY, "search", "answer") == []
    assert len(tagged("<search></search>" * MANY, "search", "answer")) == MANY
    assert exact_match("<answer>" * MANY, "1") == exact_match("9" * MANY, "1") == exact_match("=" * MANY, "1") == 0.0
    assert len(parse_tool_calls('{"name": "a", "parameters": {}};' * MANY)) == MANY
    assert isinstance(parse_tool_calls("<tool_call>" * MANY)[0], MalformedCall)


@needs_math_verify
def test_an_answer_that_would_take_for_ever_scores_0_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_SECONDS", 0.1)
    scores: list[float] = []

    def score() -> None:
        scores.append(math_match("\\boxed{9^{9^9}}", "42"))
        monkeypatch.setattr(answers, "_SECONDS", 60.0)
        scores.append(math_match("\\boxed{6 \\times 7}", "42"))

    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    assert scores == [0.0, 1.0]


def test_the_process_is_kept_and_replaced_when_it_had_to_be_killed() -> None:
    first = run_isolated(isolated_functions.process)
    assert first == run_isolated(isolated_functions.process) != isolated_functions.process()
    with pytest.raises(TimeoutError):
        run_isolated(isolated_functions.big_integer, timeout=0.2)
    assert run_isolated(isolated_functions.process) != first
    with pytest.raises(TimeoutError):
        run_isolated(isolated_functions.sleep, timeout=0.01)
    first = run_isolated(isolated_functions.process)
    with pytest.raises(IsolatedError, match="MemoryError"):
        run_isolated(isolated_functions.much_memory)
    assert run_isolated(isolated_functions.process) != first, "what took the memory may still hold it"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (isolated_functions.much_memory, "MemoryError"),
        (isolated_functions.die, "died .exit code 3"),
        (isolated_functions.exit_early, "SystemExit: 4"),
        (isolated_functions.unsayable, "TypeError"),
        (isolated_functions.raise_unprintable, "Unprintable"),
    ],
)
def test_whatever_happens_there_is_an_error_here(function: Any, message: str) -> None:
    with pytest.raises(IsolatedError, match=message):
        run_isolated(function)
    assert run_isolated(isolated_functions.echo, [1, "\ud800", None]) == [1, "\ud800", None]


FORGERIES = {
    "the old form": '["value", 1.0]\n',
    "no number": '["", "value", 1.0]\n',
    "the number of the request": '["NUMBER", "value", 1.0]\n',
    "the end of the call": '["NUMBER", "done", null]\n',
    "the end and a value": '["NUMBER", "done", null]\n["NUMBER", "value", 1.0]\n',
    "the end and a value, before the call ends": '["NUMBER", "done", null]\n["NUMBER", "value", 1.0]\n',
    "half a line": "[",
    "an empty line": "\n",
    "deep": "[" * 100_000 + "\n",
    "many digits": "[" + "9" * 5_000 + "]\n",
    "no JSON": "x\n",
    "no UTF-8": "\udcff\n",
    "a number": "1\n",
    "an object": '{"number": "NUMBER"}\n',
    "text": '"NUMBER"\n',
    "short": '["NUMBER"]\n',
    "long": '["NUMBER", "done", null, null]\n',
    "a kind that is a list": '["NUMBER", ["done"], null]\n',
    "a flood without a line": "x" * 17_000_000,
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_reply_is_one_kind_of_error_and_shifts_nothing(forgery: str) -> None:
    """Six calls after it are answered as they are; the process that was written from is gone."""
    process = run_isolated(forging_functions.process)
    with pytest.raises(IsolatedDeath):
        run_isolated(forging_functions.forge, FORGERIES[forgery], 0.3 * forgery.endswith("ends"))
    assert [run_isolated(forging_functions.echo, float(n % 2)) for n in range(6)] == [0.0, 1.0] * 3
    assert run_isolated(forging_functions.process) != process


def test_a_process_that_speaks_unasked_or_dies_between_calls_is_replaced() -> None:
    """The six calls of a rollout get their own rewards, with nothing of the call before."""
    for unasked in ("late", "dead"):
        process = run_isolated(forging_functions.process)
        [worker] = idle = isolation_calls._idle[isolation.level(), forging_functions.__file__]
        if unasked == "late":
            worker._begun = b'["", "value", 1.0]\n'
        else:
            worker._process.kill()
            worker._process.wait()
        assert [run_isolated(forging_functions.echo, float(n % 2)) for n in range(6)] == [0.0, 1.0] * 3
        assert run_isolated(forging_functions.process) != process and worker not in idle


def test_the_process_knows_no_environment_variable_and_writes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    known = run_isolated(isolated_functions.environment)
    assert "HF_TOKEN" not in known and "PATH" not in known
    with pytest.raises(IsolatedError, match=r"OSError|PermissionError"):
        run_isolated(isolated_functions.write, str(tmp_path / "file"))
    assert not (tmp_path / "file").exists() or (tmp_path / "file").stat().st_size == 0


def test_threads_use_processes_side_by_side() -> None:
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(run_isolated(isolated_functions.echo, n))) for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(12))
