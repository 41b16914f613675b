"""Reward functions and TRL's table of a run whose episodes have several paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from games import make_trainer
from path_episodes import programs


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def test_a_run_gives_reward_functions_and_the_table_what_was_said_aside(embedded_model: Path, tmp_path: Path) -> None:
    """Eight programs whose turns say their number; half of the asides' number is added to the last turn's reward."""
    seen: list[dict[str, Any]] = []

    def fewer(completions: Any, completion_ids: Any, trajectories: Any, **_: Any) -> list[float]:
        seen.append({"completions": completions, "ids": completion_ids})
        return [float(len(one.asides)) for one in trajectories]

    trainer = make_trainer(
        embedded_model, tmp_path, reward_funcs=[fewer], reward_weights=[0.5], advantage_granularity="trajectory",
        per_device_train_batch_size=8, max_logprob_gap=100.0, vllm_importance_sampling_correction=False,
    )  # fmt: skip
    episodes = programs()
    for episode in episodes:
        for k, turn in enumerate(episode.turns):
            turn.text, turn.observation = str(k), "so"
    trainer.current_gradient_accumulation_steps = 1
    trainer._step = trainer.state.num_input_tokens_seen = 0
    trainer._generate_and_score_completions(list(episodes))
    # summary, discarded, helper, at once, identical, beginning, plain, summary. Nobody gave messages of rewritten prompts.
    kept = ["23", "12", "03", "013", "3", "02", "01", "23"]
    asides = ["01", "0", "12", "2", "012", "1", "", "01"]
    spoken = [[m["content"] for m in messages if m["role"] == "assistant"] for messages in seen[0]["completions"]]
    assert ["".join(one) for one in spoken] == kept
    assert seen[0]["ids"] == [episode.completion_ids for episode in episodes]
    table = list(trainer._logs["completion"])
    for messages, words, beside in zip(table, kept, asides, strict=True):
        assert "".join(m["content"] for m in messages if m["role"] == "assistant") == words
        marked = [(m["role"], m["content"]) for m in messages if m["role"].endswith(": assistant")]
        assert marked == [(f"aside {n}: assistant", word) for n, word in enumerate(beside, 1)]
    assert list(trainer._logs["rewards"]["fewer"]) == [float(len(one)) for one in asides]
    trainer.rollout_log.finish()
