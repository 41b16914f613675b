"""Weights that make up for penalties at sampling, proved over all episodes of a task small enough to list them.

The task and its policy are those of ``enumerated``. The sampler is the rollout's own ``Sampler`` on the policy's
logits, so an episode is drawn with another probability than the policy's; the trainer weighs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from enumerated import (
    EPISODES,
    TURN_IDS,
    Table,
    estimate,
    exact_return_gradient,
    grpo,
    relative_error,
    turn_batch,
    turn_rewards,
)
from games import draw_batch, loss_and_gradients, make_trainer
from games import relative_error as relative_error_of

from agile_trainers.rollout.generators.base import SamplingSettings
from agile_trainers.rollout.generators.transformers.decoding import Sampler
from agile_trainers.step.credit import Credit
from agile_trainers.step.log_probs import BatchLogProbs

WHOLE: dict[str, Any] = {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 1e6}
"""The whole episode's ratio, however large."""


def sampled(table: Table, settings: SamplingSettings) -> torch.Tensor:
    """(8, 4) log-probability of each token under what the sampler draws from, -inf if it never does; the prompt is 0."""
    sampler, log_probs = Sampler(settings, eos_token_ids=[]), torch.zeros(8, 4)
    a, b, _ = EPISODES.unbind(1)
    contexts = [table.logits[0].expand(8, 2), table.logits[1][a], table.logits[2][a, b]]
    for position, (column, logits) in enumerate(zip((0, 2, 3), contexts)):
        history = torch.cat([torch.zeros(8, 1, dtype=torch.long), EPISODES[:, :position]], dim=1)
        log_probs[:, column] = -torch.inf
        # The smallest uniform draws the first token that can be drawn, the largest the last.
        for uniform in (0.0, 1 - 1e-12):
            drawn, scores = sampler.draw(
                sampler.distribution(logits.detach(), history), torch.full((8,), uniform, dtype=torch.float64)
            )
            same = drawn == EPISODES[:, position]
            log_probs[same, column] = scores[same].float()
    return log_probs


def to_go() -> torch.Tensor:
    """(8, 2) undiscounted returns from each turn on."""
    rewards = turn_rewards(EPISODES)
    return torch.stack([rewards.sum(1), rewards[:, 1]], 1)


def expected_gradient(trainer: Any, table: Table, log_probs: torch.Tensor) -> torch.Tensor:
    """Of the trainer's estimate from raw returns, over the episodes that the sampler draws."""
    total = torch.zeros(())
    for i, probability in enumerate(log_probs[:, TURN_IDS >= 0].sum(1).exp()):
        if probability == 0:
            continue
        batch, returns = turn_batch(EPISODES[[i]]), to_go()[[i]]
        batch.sampling_logprobs = log_probs[[i]]
        scores = BatchLogProbs(torch.ones(1) > 0, table.log_probs(EPISODES[[i]]).detach())
        output = trainer.batches.finish(batch, Credit(returns), scores, None).to_trl()
        columns = {
            name: output[name] for name in ("importance_sampling_ratio", "old_per_token_logps") if name in output
        }
        total = total + probability * estimate(trainer, table, EPISODES[[i]], returns, **columns)
    return total


@pytest.mark.parametrize("level", ["token", "turn"])
@pytest.mark.parametrize("penalty", [1.5, 0.6])
def test_a_penalty_is_made_up_for_exactly(
    embedded_model: Path,
    tmp_path: Path,
    table: Table,
    level: str,
    penalty: float,
) -> None:
    log_probs, exact = sampled(table, SamplingSettings(repetition_penalty=penalty)), exact_return_gradient(table)
    assert log_probs[:, TURN_IDS >= 0].sum(1).exp().sum().item() == pytest.approx(1.0)
    changes = {"repetition_penalty": penalty, "importance_sampling_level": level}
    corrected = grpo(embedded_model, tmp_path, 2, **changes, **WHOLE)
    assert relative_error(expected_gradient(corrected, table, log_probs), exact) < 1e-5
    changes["vllm_importance_sampling_correction"] = False
    plain = grpo(embedded_model, tmp_path, 2, **changes)
    assert relative_error(expected_gradient(plain, table, log_probs), exact) > 0.03


def test_tokens_that_a_filter_removed_stay_missing(
    embedded_model: Path,
    tmp_path: Path,
    table: Table,
) -> None:
    """What is kept is weighed back to the policy's own probability; the rest of the sum is never drawn."""
    log_probs = sampled(table, SamplingSettings(top_p=0.7))
    kept = log_probs[:, TURN_IDS >= 0].sum(1).exp() > 0
    assert 0 < kept.sum() < 8
    trainer = grpo(embedded_model, tmp_path, 2, top_p=0.7, vllm_importance_sampling_correction=True, **WHOLE)
    estimated = expected_gradient(trainer, table, log_probs)
    ours, returns = table.log_probs(EPISODES), to_go()
    terms = ours[:, 0] * returns[:, 0] + ours[:, 2:].sum(1) * returns[:, 1]
    # Zero times every table keeps those that no kept episode uses in the graph.
    unused = 0 * sum(logits.sum() for logits in table.logits)
    of_kept = table.gradient((table.probability().detach() * terms)[kept].sum() + unused)
    assert relative_error(estimated, of_kept) < 1e-5
    assert relative_error(estimated, exact_return_gradient(table)) > 0.1


def test_the_trainer_weighs_what_it_sampled(embedded_model: Path, tmp_path: Path) -> None:
    """Real episodes with a penalty: the weight of a token is the policy's probability over the sampler's."""
    options = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 0.992}
    trainer = make_trainer(embedded_model, tmp_path, repetition_penalty=1.5, **options)
    batch = draw_batch(trainer)
    trained = batch["tool_mask"] > 0
    ratios = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).exp()
    torch.testing.assert_close(batch["importance_sampling_ratio"][trained], ratios[trained].clamp(max=0.992))
    assert (batch["importance_sampling_ratio"][~trained] == 1).all()
    assert ratios[trained].min() < 0.992 < ratios[trained].max()
    _, weighed = loss_and_gradients(trainer, batch)
    batch["importance_sampling_ratio"] = 2 * batch["importance_sampling_ratio"]
    _, twice = loss_and_gradients(trainer, batch)
    assert relative_error_of(twice, {name: 2 * value for name, value in weighed.items()}) < 1e-5
