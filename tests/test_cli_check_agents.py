"""What ``agile-trainers check`` says of agents: their calls, how they fork, and what changes at every call."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from agile_trainers.cli.check import command as check

TRAINERS = str(Path(__file__).parent / "trainers")


@pytest.fixture(scope="module", autouse=True)
def named() -> None:
    sys.path.append(TRAINERS)


def report(*options: str) -> tuple[int, str]:
    """The exit code and the report, without line breaks in paragraphs."""
    console = Console(file=io.StringIO(), width=200)
    code = check.main([*options, "--max_new_tokens", "6", "--seed", "3"], console)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def test_an_agent_with_a_clock_in_its_prompt() -> None:
    """Two episodes of four calls: the clock begins a path at every call, and so does the summary."""
    code, said = report("--environment", "agent:asking:looks_at_the_clock")
    assert code == 0 and "Play: 2 episodes by the model" in said
    assert re.search(r"calls +4\.0 an episode, by asking/1\n", said)
    assert "settings that the run decides instead: temperature=0.3" in said
    assert re.search(
        r"of 8 answers these begin a path of their own: 4 \(50%\) context rewritten, 2 \(25%\) new conv", said
    )
    where = re.search(
        r"""call 2, at token \d+: .*It is (\d?)['"] went on with "(\d+) o'clock.*, now with "(\d+) o'clock""", said
    )
    assert where is not None and where[1] + where[2] != where[1] + where[3]
    assert re.search(r"warning: [23] of 4 calls of an episode change token \d+ of the prompt", said)
    assert re.search(
        r"cost +an update computes \d+ tokens an episode, \d\.\d\d times the \d+ of its longest path", said
    )
    assert "warning: an update reads all paths of an episode at once" in said
    assert "warning: the first episode, played again with the same noise, differs: call 1 differs at token" in said
    assert "Memory of one process" in said


def test_an_agent_that_goes_on() -> None:
    code, said = report("--environment", "agent:asking:talks", "--environment_args", '{"turns": 3}')
    assert code == 0 and re.search(r"calls +3\.0 an episode", said)
    assert re.search(r"forks +none: each prompt goes on from the answer before it", said)
    assert "made the same calls" in said and "calls of an episode change" not in said and "cost " not in said


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["agent:asking:reads_rows"], r"\[environment_failing\] The environment failed in 100% .*AssertionError"),
        (
            ["agent:asking:talks", "--scripted_policy", "random"],
            "is an agent, whose calls the model answers here; choose --scripted_policy model",
        ),
        (["agent:asking:tals"], "Unknown environment 'agent:asking:tals'.*asking has no 'tals'"),
        (["agent:asking:talks", "--history", "last:2"], "history has no effect on an agent"),
        (["agent:asking:talks", "--advantage_granularity", "anchor"], "which an agent does not name"),
    ],
)
def test_agents_that_are_not_ready(options: list[str], problem: str) -> None:
    code, said = report("--environment", *options)
    assert code == 1 and re.search(problem, said)


def test_the_policies_of_a_ready_agent_are_compared_with_the_model() -> None:
    """The expert finds every animal; the random policy says one of eight."""
    code, said = report("--environment", "agile:archive")
    assert code == 0 and re.search(r"expert +\+1\.000 +100\.0%", said)
    chance = re.search(r"random +\+(\d\.\d+) ", said)
    assert chance is not None and float(chance[1]) < 0.5
    assert "There is no other policy" not in said
