"""Runs whose contexts are rewritten: by a history, with questions, and by Qwen3's own chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_runs import assert_same, check_resumed, make, weights
from games import Chatter, Long, make_trainer, settings, takes_notes
from thinkers import ThreeTurns, make_thinker
from transformers import AutoTokenizer

from agile_trainers.rollout.forest import Fork
from agile_trainers.trainers import MultiTurnGRPOConfig
from agile_trainers.types import Trajectory


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_thinker(tmp_path_factory.mktemp("thinker"))


def thinking(thinker: Path, folder: Path, **options: Any) -> Any:
    return make_trainer(
        thinker, folder, environment=ThreeTurns, max_turns=3, max_new_tokens=30, stop_strings=None,
        max_logprob_gap=1e-5, learning_rate=1e-3, **options,
    )  # fmt: skip


def served(episode: Trajectory, tokenizer: Any) -> list[list[int]]:
    """What a server of the model reads at each turn, from the texts alone."""
    conversation, read = list(episode.prompt), []
    for turn in episode.turns:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        read.append(tokenizer.encode(text, add_special_tokens=False))
        conversation += turn.said
    return read


@pytest.fixture(scope="module")
def played(thinker: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Trajectory]:
    """The episodes of the first batch, by the template that serves."""
    return thinking(thinker, tmp_path_factory.mktemp("played")).rollout()


def test_qwen3_plays_as_it_is_served(thinker: Path, played: list[Trajectory]) -> None:
    """Each turn after the ids of the served conversation."""
    tokenizer = AutoTokenizer.from_pretrained(thinker)
    for episode in played:
        assert episode.error is None and len(episode.turns) == 3
        assert [episode.prompt_of(k) for k in range(3)] == served(episode, tokenizer)
    thought = ["</think>" in turn.text for episode in played for turn in episode.turns[:2]]
    forked = [turn.fork for episode in played for turn in episode.turns[1:]]
    assert sum(thought) > 12 and [fork is Fork.TEMPLATE for fork in forked] == thought


@pytest.mark.parametrize("packing", ["prefix", "none"])
def test_qwen3_is_trained_as_it_is_served(
    thinker: Path, tmp_path: Path, played: list[Trajectory], packing: str
) -> None:
    """The update computes the sampler's log-probs, on the ids that it has read."""
    trainer = thinking(thinker, tmp_path, sequence_packing=packing, max_steps=2)
    trainer.update(played)
    first = trainer.state.log_history[0]
    assert first["sampling/sampling_logp_difference/max"] < 1e-5
    thought = sum("</think>" in turn.text for episode in played for turn in episode.turns[:2])
    assert first["rewrites/template"] == pytest.approx(thought / 24)
    assert first["tokens_read_again"] == 0.0
    trainer.update(trainer.rollout())
    assert trainer.state.log_history[1]["rewrites/template"] > 0.3


def test_the_training_template_reads_fewer_tokens(thinker: Path, tmp_path: Path, played: list[Trajectory]) -> None:
    """As served, an episode's answers are read again without their thoughts, by the turn after them."""
    kept = thinking(thinker, tmp_path, training_chat_template=True).rollout()
    assert all(episode.paths is None for episode in kept)
    assert sum(episode.num_tokens for episode in played) > sum(episode.num_tokens for episode in kept)


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce"])
def test_questions_and_windows_are_trained(embedded_model: Path, tmp_path: Path, algorithm: str) -> None:
    options: dict[str, Any] = {"num_generations": 1} if algorithm == "reinforce" else {"beta": 0.1}
    trainer = make_trainer(
        embedded_model, tmp_path, algorithm=algorithm, environment=Long, history=takes_notes, max_turns=6,
        max_logprob_gap=1e-4, **options,
    )  # fmt: skip
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["rewrites/questions"] > 0 and logged["rewrites/context"] > 0 and logged["grad_norm"] > 0
    assert logged["sampling/sampling_logp_difference/max"] < 1e-4
    assert trainer.args.history == "games:takes_notes"


def test_ppo_is_resumed_in_the_middle_of_a_batch_to_the_same_bits(embedded_model: Path, tmp_path: Path) -> None:
    """GRPO is among the cases of ``test_checkpoint``."""
    options: dict[str, Any] = {"environment": Long, "history": "games:takes_notes", "max_turns": 6, "max_steps": 2}
    _, resumed = check_resumed(lambda name, **more: make("ppo", embedded_model, tmp_path / name, **options, **more), 1)
    assert resumed.state.global_step == 2


def test_full_history_is_a_run_without_one(embedded_model: Path, tmp_path: Path) -> None:
    ends = []
    for number, history in enumerate((None, "full")):
        trainer = make_trainer(embedded_model, tmp_path / str(number), history=history)
        trainer.train()
        ends.append(weights(trainer))
    assert_same(*ends)


def test_a_window_by_name(embedded_model: Path, tmp_path: Path) -> None:
    window = make_trainer(embedded_model, tmp_path, environment=Long, history="last:1").rollout()
    assert any(episode.paths for episode in window)
    for episode in window:
        for turn in episode.turns[2:]:
            assert turn.fork is Fork.CONTEXT and turn.messages is not None and len(turn.messages) == 3


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"history='last:0'.*at least 1"):
        MultiTurnGRPOConfig(**settings(tmp_path), history="last:0")
    with pytest.raises(ValueError, match=r"history\['a'\]='lost' is unknown"):
        MultiTurnGRPOConfig(**settings(tmp_path), history={"a": "lost"})
    with pytest.raises(ValueError, match="top level of a module"):
        MultiTurnGRPOConfig(**settings(tmp_path), history=lambda messages: messages)
    with pytest.raises(ValueError, match="on_rewrite='never': expected 'fork' or 'refuse'"):
        MultiTurnGRPOConfig(**settings(tmp_path), on_rewrite="never")


def test_names_of_environments_are_checked(embedded_model: Path, tmp_path: Path) -> None:
    several: Any = {"a": Chatter, "b": Chatter}
    with pytest.raises(ValueError, match="history names 'c', which is none of the environments: 'a', 'b'"):
        make_trainer(embedded_model, tmp_path, environment=several, history={"c": "full"})


def test_gradients_are_those_of_the_calls_apart(embedded_model: Path, tmp_path: Path) -> None:
    """The same batch trained by hand: each turn's prompt and answer read alone give the log-probs that the run compares."""
    trainer = make_trainer(embedded_model, tmp_path, environment=Long, history=takes_notes, max_turns=6)
    episodes = trainer.rollout()
    model = trainer.model.eval()
    for episode in episodes:
        for k, turn in enumerate(episode.turns):
            prompt, action = episode.prompt_of(k), episode.action_of(k)
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *action]])).logits[0, len(prompt) - 1 : -1]
            own = logits.log_softmax(-1).gather(1, torch.tensor(action)[:, None])[:, 0]
            sampled = torch.tensor(episode.sampling_logprobs[turn.start : turn.end])
            torch.testing.assert_close(own, sampled, rtol=0, atol=2e-5)
