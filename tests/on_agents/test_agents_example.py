"""The example of an agent that is written with a framework and knows nothing of training, and the page that shows it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from agile_environments.archive import careless_policy, expert_policy
from agile_trainers.evaluation.scripted_policies import demonstrate_agent, play_agent
from agile_trainers.records.reader import read_records

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return runpy.run_path(str(ROOT / "examples/agent_pydantic_ai.py"))


def test_it_asks_as_the_ready_task_does_with_a_scribe_of_its_own(example: dict[str, object]) -> None:
    (episode, *others) = play_agent(example["agent"], expert_policy, range(4))  # type: ignore[arg-type]
    assert all(one.success for one in [episode, *others])
    look_up, note, answer = episode.calls
    assert [len(call["tools"]) for call in episode.calls] == [1, 0, 1]
    assert note["messages"][: len(look_up["messages"])] == look_up["messages"]
    assert [one["content"] for one in note["messages"][-2:]] == ["Write a note", answer["messages"][-1]["content"]]
    assert [one["role"] for one in answer["messages"]] == ["user", "assistant"]
    assert answer["messages"][0]["content"].startswith(look_up["messages"][0]["content"] + "\n\nYour note :\n")


def test_the_tutorial_shows_the_agent() -> None:
    page = (ROOT / "docs/tutorial/agent.md").read_text(encoding="utf-8")
    agent = (ROOT / "examples/archivist.py").read_text(encoding="utf-8")
    assert agent.partition("annotations\n\n")[2] in page


def test_a_conversation_of_each_prompt_is_a_row(example: dict[str, object]) -> None:
    rows = demonstrate_agent(example["agent"], careless_policy, range(2))  # type: ignore[arg-type]
    assert [row["tools"] is None for row in rows] == [False, True, False] * 2


@pytest.mark.slow
def test_it_trains(
    example: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["example", "--output_dir", str(tmp_path), "--sft_steps", "2", "--rl_steps", "1"])
    example["main"]()  # type: ignore[operator]
    assert "success before" in capsys.readouterr().out and (tmp_path / "adapter_model.safetensors").is_file()
    assert len(read_records(tmp_path)) == 2 * 256 + 128
