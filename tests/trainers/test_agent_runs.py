"""Runs of agents: the same episodes as those that the rollout loop plays, the same weights, in any order of arrival."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_runs import weights
from environment_agents import Gathers, NoiseByPrompt, Plays, scripted
from games import Chatter, make_trainer
from scripted_runs import by_script, sampling_with

from agile_trainers.envs.agent import Agent
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.types import Trajectory


def same_episodes(one: Trajectory, other: Trajectory) -> None:
    assert (one.error, one.stop_reason) == (other.error, other.stop_reason) == (None, other.stop_reason)
    assert one.prompt_ids == other.prompt_ids and one.completion_ids == other.completion_ids
    assert one.prompt == other.prompt and one.paths is other.paths is None
    # An agent does not say what its model never sees: the observation after the last answer.
    assert [*other.messages, one.messages[-1]] == one.messages
    assert one.rewards == other.rewards and one.success == other.success
    assert [(turn.start, turn.end, turn.text) for turn in one.turns] == [
        (turn.start, turn.end, turn.text) for turn in other.turns
    ]


def test_an_agent_on_the_scripted_generator_trains_to_the_same_bits(embedded_model: Path, tmp_path: Path) -> None:
    """Three steps of GRPO by turn on the episodes of both."""
    trained = []
    for name, environment in (("loop", Chatter), ("agent", Agent(Plays(Chatter)))):
        trainer = make_trainer(
            embedded_model, tmp_path / name, environment=environment, max_steps=3, advantage_granularity="turn",
            max_logprob_gap=100.0,
        )  # fmt: skip
        sampling_with(trainer, by_script(trainer))
        episodes = [trainer.rollout() for _ in range(1)]
        for _ in range(3):
            trainer.update(episodes[-1])
            episodes.append(trainer.rollout())
        trained.append((episodes, weights(trainer)))
    (ours, our_weights), (theirs, their_weights) = trained
    for one, other in zip(chain(*ours), chain(*theirs), strict=True):
        same_episodes(one, other)
    assert len({len(one.turns) for one in chain(*ours)}) > 1
    assert all(torch.equal(our_weights[name], their_weights[name]) for name in our_weights)


def test_an_agent_on_transformers_samples_the_same_tokens(embedded_model: Path, tmp_path: Path) -> None:
    trained = []
    for name, environment in (("loop", Chatter), ("agent", Agent(Plays(Chatter)))):
        trainer = make_trainer(
            embedded_model, tmp_path / name, environment=environment, max_steps=1, max_logprob_gap=1e-5
        )
        sampling_with(trainer, NoiseByPrompt)  # type: ignore[arg-type]
        before = weights(trainer)
        episodes = trainer.rollout()
        trainer.update(episodes)
        trained.append((episodes, {key: value - before[key] for key, value in weights(trainer).items()}))
    (ours, our_steps), (theirs, their_steps) = trained
    for one, other in zip(ours, theirs, strict=True):
        same_episodes(one, other)
        torch.testing.assert_close(one.sampling_logprobs, other.sampling_logprobs, atol=1e-5, rtol=0)
    for name, step in our_steps.items():  # of SGD at a rate of .1
        torch.testing.assert_close(step / 0.1, their_steps[name] / 0.1, atol=1e-6, rtol=0)


# ---------------------------------------------------------------------------------------------------- calls at once


def shuffled(seed: int) -> Callable[[int], float]:
    """Return delays of up to 8 ms in a random order."""
    order = random.Random(seed).sample(range(8), 8)
    return lambda number: order[number] / 1000


def rows_of(episodes: list[Trajectory]) -> list[Any]:
    """Everything of episodes that an update reads."""
    return [
        (
            one.error, one.prompt_ids, one.completion_ids, one.sampling_logprobs, one.paths, one.linear,
            [(turn.path, turn.place, turn.start, turn.end, turn.reward, turn.rewarded) for turn in one.turns],
        )
        for one in episodes
    ]  # fmt: skip


@pytest.fixture(scope="module")
def gathering(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    agent = Agent(Gathers())
    trainer = make_trainer(
        embedded_model, tmp_path_factory.mktemp("gathering"), environment=agent, max_turns=9, max_steps=3,
        advantage_granularity="trajectory",
    )  # fmt: skip
    trainer.agent = agent
    return trainer


@pytest.mark.parametrize("labels", [True, False])
def test_calls_at_once_are_sampled_alike_in_any_order_of_arrival(gathering: Any, labels: bool) -> None:
    """Eight calls under fifteen shuffled delays: what the update reads is the same to the bit."""
    tokenizer = gathering.processing_class
    say = scripted(tokenizer.eos_token_id, tokenizer.encode("aeiou0123456789 again start"))
    seen = []
    for seed in range(15):
        gathering.agent.solve = Gathers(shuffled(seed), labels=labels)
        late = random.Random(seed)
        generator = ScriptedGenerator(say, latency=lambda request, late=late: late.randrange(1, 5))  # type: ignore[misc]
        specs = [EpisodeSpec(place, (7, place)) for place in range(2)]
        seen.append(rows_of(gathering.engine.run(specs, generator)))
        assert seen[-1] == seen[0], seed
    assert seen[0][0][0] is None and len(seen[0][0][6]) == 9 and len(seen[0][0][4]) == 9


def test_calls_at_once_on_transformers_have_the_same_tokens_and_gradients(embedded_model: Path, tmp_path: Path) -> None:
    updates = []
    for seed in range(3):
        agent = Agent(Gathers(shuffled(seed)))
        trainer = make_trainer(
            embedded_model, tmp_path / str(seed), environment=agent, max_turns=9, advantage_granularity="trajectory",
            max_logprob_gap=1e-5,
        )  # fmt: skip
        before = weights(trainer)
        episodes = trainer.rollout()
        trainer.update(episodes)
        tokens = [(one.completion_ids, one.paths) for one in episodes]
        updates.append((tokens, {key: (value - before[key]) / 0.1 for key, value in weights(trainer).items()}))
    for tokens, gradient in updates[1:]:
        assert tokens == updates[0][0]
        for name, value in gradient.items():
            torch.testing.assert_close(value, updates[0][1][name], atol=1e-6, rtol=0)
    assert any(value.abs().max() > 1e-4 for value in updates[0][1].values())
