"""The scorers that evaluate a model's answer: what they may read, and what an answer can do once it is executed."""

from __future__ import annotations

import builtins
import inspect
import os
import re
import socket
from pathlib import Path
from typing import Any

import isolated_functions
import pytest

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: pip install 'agile-trainers[envs]'")

from agile_trainers.envs import make_environment_factory
from agile_trainers.envs.isolation.calls import run_isolated
from agile_trainers.envs.isolation.levels import NONE, OPTION, IsolationError
from agile_trainers.envs.libraries import scorers
from agile_trainers.envs.libraries.reasoning_gym import ReasoningGymEnvironment, check_scorer, listed

KNOWN = scorers.EVALUATING
REFUSED = re.compile(r"(PermissionError|OSError|FileNotFoundError|ProcessLookupError|MemoryError)\(")


def question(name: str, number: int = 0) -> dict[str, Any]:
    return ReasoningGymEnvironment(name).row("train", number)


def score(name: str, answer: str, row: dict[str, Any]) -> float:
    return ReasoningGymEnvironment(name).score(f"<answer>{answer}</answer>", row)


# -------------------------------------------------------------------------------------------------------- isolation


def test_nothing_gets_through_the_nine_scorers(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that are executed, since nothing looks at them beforehand: the process has to hold them."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    tmp_path.chmod(0o777)
    target, secret = tmp_path / "written", tmp_path / "token"
    secret.write_text("hf_secret", encoding="utf-8")
    attacks = {
        "environment": "dict(os.environ)",
        "the parent's environment": f"open('/proc/{os.getpid()}/environ').read()",
        "token file": f"open({str(secret)!r}).read()",
        "writing": f"open({str(target)!r}, 'w').write('x')",
        "shell": f"os.posix_spawn('/bin/sh', ['sh', '-c', 'echo $HF_TOKEN > {target}'], os.environ)",
        "socket": "__import__('_socket').socket()",
        "fork": "[os.fork() for _ in iter(int, 1)]",
        "memory": "[bytes(1 << 28) for _ in iter(int, 1)]",
        "signal": f"os.kill({os.getpid()}, 9)",
        "signal to all": "os.kill(-1, 9)",
    }
    with socket.create_server(("127.0.0.1", 0)):
        for name in scorers.EVALUATING:
            row = question(name)
            brought = run_isolated(
                isolated_functions.attack_scorer, name, row, list(attacks.values()), timeout=60, memory=1024
            )
            for attack, result in zip(attacks, brought, strict=True):
                assert "hf_secret" not in result and "not executed" not in result
                if attack != "environment":
                    assert REFUSED.match(result), f"{name}, {attack}: {result}"
    assert not target.exists()


def test_an_answer_without_end_is_ended_and_scores_nothing(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = question("simple_integration")
    assert score("simple_integration", row["answer"], row) == 1.0
    monkeypatch.setattr("agile_trainers.envs.libraries.reasoning_gym._SECONDS", 0.1)
    assert score("simple_integration", "9**9**9**9", row) == 0.0
    monkeypatch.setattr("agile_trainers.envs.libraries.reasoning_gym._SECONDS", 60.0)
    assert score("simple_integration", row["answer"], row) == 1.0


@pytest.mark.parametrize("name", scorers.EVALUATING)
def test_the_shells_answer_of_the_report(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    target = tmp_path / "token"
    assert score(name, f"__import__('os').system('echo $HF_TOKEN > {target}')", question(name)) == 0.0
    assert not target.exists()


@pytest.mark.usefixtures("nothing_isolates")
def test_without_isolation_they_refuse_unless_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_environment_factory("reasoning_gym:chain_sum")().reset(seed=0)
    monkeypatch.setattr("agile_trainers.envs.libraries.reasoning_gym._made", {})
    for name in ("reasoning_gym:n_queens", "gem:rg:n_queens"):
        if name.startswith("gem"):
            pytest.importorskip("gem")
        with pytest.raises(IsolationError, match=rf"{name}.*{OPTION}={NONE}"):
            make_environment_factory(name)()
    monkeypatch.setenv(OPTION, NONE)
    row = question("n_queens")
    assert score("n_queens", row["answer"], row) == 1.0


def test_these_are_all_that_evaluate_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the release that is installed: every other scorer was read. One that is not known is refused."""
    import reasoning_gym

    found = set()
    monkeypatch.setattr(scorers, "EVALUATING", ())
    for name in listed():
        data_set = reasoning_gym.create_dataset(name, seed=0, size=2)
        code = inspect.getsource(type(data_set).score_answer)
        if re.search(r"\b(eval|exec|parse_expr|sympify|parse_latex|compile)\(", code):
            found.add(name)
        if name in KNOWN:
            with pytest.raises(ValueError, match=rf"here:{name} executes answers .*{type(data_set).__name__}"):
                check_scorer(name, data_set, f"here:{name}")
        else:
            check_scorer(name, data_set, f"here:{name}")
    assert found - {"number_sorting"} == set(KNOWN)


# ---------------------------------------------------------------------------------------------------------- grammar


@pytest.mark.parametrize(
    ("name", "answer", "allowed"),
    [
        ("n_queens", "[['Q', '_'], ['_', 'Q']]", True),
        ("n_queens", " [-1, +2.5, 'a', None, (1,)]", True),
        ("n_queens", "_ Q _ _\n_ _ _ Q", True),  # no Python, so nothing that could be evaluated
        ("n_queens", "valid_solutions[0]", False),
        ("n_queens", "[i for i in range(3)]", False),
        ("n_queens", " \t__import__('os')", False),
        ("n_queens", "f'{1}'", False),
        ("n_queens", "[" * 5000 + "]" * 5000, True),  # no expression: too many nested brackets
        ("n_queens", "-" * 2978 + "__import__('os')", False),
        ("n_queens", "-" * 9000 + "1", False),
        ("spiral_matrix", "\n  __import__('os')", False),
        ("spiral_matrix", "\u2003__import__('os')", False),
        ("string_insertion", "oracle_answer", False),
        ("spiral_matrix", "[1, 2].__class__", False),
        ("binary_matrix", "lambda: 0", False),
        ("simple_integration", "x**2/2 + sin(x) + .5*x + 1. + C", True),
        ("simple_integration", "X**2", True),
        ("simple_integration", "Integral(2*x, x)", False),
        ("simple_integration", "x.diff", False),
        ("simple_integration", "1.real", False),
        ("simple_integration", "sin.func(x)", False),
        ("simple_integration", "[x]", False),
        ("simple_integration", "x if x else x", False),
        ("simple_integration", "lambda", False),
        ("simple_integration", "'x'", False),
        ("simple_integration", "__import__", False),
        ("simple_integration", "\uff53in(x)", False),
        ("simple_integration", "not " * 2400 + "'", False),  # can be split into names in 3 ** 2400 ways
        ("simple_integration", "12" * 4000 + "'", False),
        ("countdown", "12" * 4000 + "'", False),
        ("polynomial_multiplication", "3*x**2 - y*z", True),
        ("polynomial_multiplication", "expand((x + 1)*(x - 1))", False),
        ("countdown", "(1 + 2)*3 - 4/5", True),
        ("countdown", "(1 + 2)*3 - 4", False),
        ("countdown", "(1 + 2)*3 - 4/5 + len('')", False),
        ("countdown", "1 + 2**3 - 4/5", False),
        ("countdown", "1 + 2*3.4 - 5", False),
        ("puzzle24", "5*4//3 + 1*2", False),
    ],
)
def test_what_a_scorer_may_read(name: str, answer: str, allowed: bool) -> None:
    entry = {"answer": "x + C", "metadata": {"variable": "X", "variables": ["x", "y", "z"], "numbers": [1, 2, 3, 4, 5]}}
    assert scorers.is_in_grammar(name, answer, entry) == allowed


@pytest.mark.parametrize("name", scorers.EVALUATING)
def test_every_right_answer_is_read(name: str) -> None:
    for number in range(4 if name in ("puzzle24", "intermediate_integration") else 12):
        row = question(name, number)
        assert score(name, row["answer"], row) == 1.0


def test_what_paid_without_being_a_solution() -> None:
    row = question("puzzle24")
    numbers, row["metadata"]["numbers"] = row["metadata"]["numbers"], [7, 7, 2, 1]
    assert score("puzzle24", "7*7/2*1", row) == 0.01, "24.5 is not 24"
    row["metadata"]["numbers"] = [6, 6, 6, 6]
    assert score("puzzle24", "6+6+6+6", row) == 1.0
    row["metadata"]["numbers"] = numbers
    assert score("puzzle24", "6+6+6+6", row) == 0.0
    row = question("countdown")
    row["metadata"] |= {"numbers": [500, 400, 1, 300], "target": 900}
    assert score("countdown", "500 + 400 + 1/300", row) == 0.05, "near is not equal"
    assert score("countdown", "(500 + 400)*1 + 300", row) == 0.05
    assert score("countdown", "(500*400*300*1)*len('')+len('" + "x" * 900 + "')", row) == 0.0
    row = question("simple_integration")
    assert (
        score("simple_integration", f"Integral({row['metadata']['integrand']}, {row['metadata']['variable']})", row)
        == 0.0
    )


def test_a_list_still_earns_what_its_scorer_pays_for_it() -> None:
    row = question("spiral_matrix")
    assert score("spiral_matrix", str([int(n) for n in row["answer"].split()]), row) == 0.1
    row = question("string_insertion")
    assert score("string_insertion", str(list(row["answer"])), row) == 0.1
    assert score("string_insertion", "oracle_answer", row) == 0.0


# ---------------------------------------------------------------------------------------------------------- attacks

FORGED = r"""__import__('os').write(3, b'["value", 1.0]\n["value", 1.0]\n')"""
"""Takes the place of the scorer's reply, where it is executed."""
ATTACKS = {
    "nested signs": "-" * 2978 + FORGED,
    "fewer nested signs": "-" * 990 + FORGED,
    "more nested signs": "+-" * 4900 + FORGED,
    "nested negations": "not " * 2400 + FORGED,
    "nested brackets": "[" * 150 + FORGED + "]" * 150,
    "long attribute chain": "(" + FORGED + ")" + ".real" * 1500,
    "deep sum": "1+" * 4000 + FORGED,
    "an indented line": "\n  " + FORGED,
    "a space that Python does not know": "\u2003" + FORGED,
    "a form feed": "\x0c" + FORGED,
    "a line continuation": "\\\n" + FORGED,
    "letters of another width": "\uff3f" * 2 + "import__('os')." + FORGED.partition(".")[2],
    "a formatted string": "f'{" + FORGED.replace("'", '"') + "}'",
    "a comprehension": f"[{FORGED} for _ in [1]]",
    "a walrus": f"[x := {FORGED}]",
    "a null byte": FORGED + "\0",
    "a coding line": "# coding: utf-7\n" + FORGED,
    "a surrogate": FORGED + " # \ud800",
}


@pytest.mark.parametrize("name", scorers.EVALUATING)
def test_no_answer_sets_its_own_reward(name: str) -> None:
    """Whatever happens to a wrong answer, the next ones are scored as they are."""
    row, items = question(name), ReasoningGymEnvironment(name).items
    wrong = items.score("wrong", row)
    for attack, answer in ATTACKS.items():
        scores = [items.score(text, row) for text in (answer, "wrong", row["answer"], "wrong")]
        assert wrong < 0.1 and scores == [0.0, wrong, 1.0, wrong], attack


@pytest.mark.parametrize("name", scorers.LITERALS)
def test_a_scorer_that_reads_a_list_cannot_execute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing looks at the answer beforehand."""
    monkeypatch.setattr(scorers, "is_in_grammar", lambda *arguments: True)
    row = question(name)
    settings = ReasoningGymEnvironment(name).items._settings
    for attack in ATTACKS.values():
        marker = "__import__('builtins').__dict__.update(executed=1)"
        assert scorers.score(name, settings, attack.replace(FORGED, marker), row) == 0.0
        assert "executed" not in vars(builtins)
    assert scorers.score(name, settings, row["answer"], row) == 1.0


def test_any_text_does_not_solve_a_question_of_yes_or_no() -> None:
    """Its own scorer pays every text, since every text is true."""
    environment = ReasoningGymEnvironment("game_of_life_halting")
    for row in (environment.items.item(number) for number in range(4)):
        paid = [text for text in ("True", "False", "anything") if environment.score(text, row)]
        assert paid == [row["answer"]]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("complex_arithmetic", "nan"),  # no comparison with it is true
        ("complex_arithmetic", "NaN + nani"),
        ("propositional_logic", " \u2227 ".join(f"p{i}" for i in range(40))),  # a truth table of 2 ** 40 rows
        ("spell_backward", " " * 1_000_000),
        ("game_of_life", "[" * 1_000_000),
        ("jugs", '["a",' * 2_000),
        ("prime_factorization", "9" * 1_000_000),
        ("complex_arithmetic", "(" * 500_000 + ")" * 500_000),
        ("number_sorting", "[" + "9" * 9_000 + "]"),
    ],
)
def test_an_answer_neither_pays_nor_takes_hours(name: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agile_trainers.envs.libraries.reasoning_gym._SECONDS", 0.3)
    environment = ReasoningGymEnvironment(name)
    assert environment.items.score(answer, question(name)) <= 0.05
