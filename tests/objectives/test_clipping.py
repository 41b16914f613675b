"""Which tokens TRL's losses clip, by hand and by the gradient of the loss itself."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer

from agile_trainers.objectives.ratios import importance_ratios, is_clipped

CLIPPING = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def test_ratios_by_hand() -> None:
    log_ratio = torch.tensor([[2.0, 0.0, 4.0]]).log()
    mask = torch.tensor([[True, False, True]])
    log_ratio[0, 1] = 7.0  # an observation
    tokens = importance_ratios(log_ratio, mask, per_sequence=False)
    assert tokens[0, [0, 2]].tolist() == pytest.approx([2.0, 4.0])
    whole = importance_ratios(log_ratio, mask, per_sequence=True)
    assert whole[0].tolist() == pytest.approx([8**0.5] * 3)
    assert importance_ratios(log_ratio, mask & False, per_sequence=True).tolist() == [[1.0, 1.0, 1.0]]


#            ratio  advantage  grpo   grpo, delta 2  cispo (epsilon_high 0.3)
BY_HAND = [
    (0.5, +1.0, False, False, True),
    (0.5, -1.0, True, True, True),
    (0.9, -1.0, False, False, True),
    (1.0, +1.0, False, False, True),
    (0.2, -1.0, True, True, False),
    (0.2, +1.0, False, False, False),
    (1.5, +1.0, True, True, True),
    (1.5, -1.0, False, False, True),
    (2.5, -1.0, False, True, True),
    (2.5, +1.0, True, True, True),
    (2.5, 0.0, False, False, False),
    (0.5, 0.0, False, False, False),
]  # fmt: skip


def test_clipping_by_hand() -> None:
    ratios, advantages = (torch.tensor([[row[n] for row in BY_HAND]]) for n in range(2))
    for column, loss_type, delta in ((2, "grpo", None), (3, "dapo", 2.0), (4, "cispo", None)):
        expected = [row[column] for row in BY_HAND]
        assert is_clipped(ratios, advantages, loss_type, 0.2, 0.3, delta)[0].tolist() == expected
    for loss_type in ("sapo", "vespo"):
        assert not is_clipped(ratios, advantages, loss_type, 0.2, 0.3).any()


@pytest.fixture(scope="module")
def loss():
    """TRL's own loss on given log-probabilities: the method, called on an object that has what it reads."""

    class Accelerator:
        num_processes, sync_gradients = 1, True

        def reduce(self, value, reduction):
            return value

        def gather(self, value):
            return value

    def compute(log_probs, advantages, loss_type, level, epsilon_low, epsilon_high, delta):
        trainer = SimpleNamespace(
            loss_type=loss_type, importance_sampling_level=level, epsilon_low=epsilon_low, epsilon_high=epsilon_high,
            args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
            beta=0.0, use_vllm=False, vllm_importance_sampling_correction=False, top_entropy_quantile=1.0,
            off_policy_mask_threshold=None, aux_loss_enabled=False, _entropy_bonus_enabled=False,
            use_adaptive_entropy=False, max_completion_length=log_probs.size(1), accelerator=Accelerator(),
            current_gradient_accumulation_steps=1, model=SimpleNamespace(training=True),
            _metrics={"train": defaultdict(list)},
        )  # fmt: skip
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None)
        ids, mask = torch.zeros_like(log_probs, dtype=torch.long), torch.ones_like(log_probs)
        batch = {
            "prompt_ids": ids, "prompt_mask": mask, "completion_ids": ids, "completion_mask": mask,
            "advantages": advantages, "old_per_token_logps": torch.zeros_like(log_probs),
            "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        value = GRPOTrainer._compute_loss(trainer, None, batch)
        return value, trainer._metrics["train"]

    return compute


@pytest.mark.parametrize("loss_type", CLIPPING)
@pytest.mark.parametrize("delta", [None, 2.0, 1.1])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_clipped_tokens_are_those_without_gradient_in_trls_loss(loss, loss_type, delta, level) -> None:
    """One row for every ratio and advantage of the grid; a row of three equal tokens has the sequence ratio of each."""
    grid = list(product((0.3, 0.75, 0.95, 1.05, 1.15, 1.25, 1.9, 2.5), (-1.5, 0.7)))
    log_probs = torch.tensor([[ratio] * 3 for ratio, _ in grid]).log().requires_grad_()
    advantages = torch.tensor([[advantage] * 3 for _, advantage in grid])
    value, metrics = loss(log_probs, advantages, loss_type, level, 0.2, 0.2, delta)
    (gradient,) = torch.autograd.grad(value, log_probs)
    ratios = importance_ratios(log_probs.detach(), torch.ones_like(advantages, dtype=torch.bool), level == "sequence")
    found = is_clipped(ratios, advantages, loss_type, 0.2, 0.2, delta)
    assert torch.equal(found, gradient == 0) and found.any() and not found.all()
    if delta is None:  # TRL's metric does not count tokens beyond delta
        assert found.float().mean().item() == pytest.approx(metrics["clip_ratio/region_mean"][0])


def test_cispos_clipped_tokens_are_those_whose_weight_trls_loss_cuts(loss) -> None:
    grid = list(product((0.5, 1.5, 4.9, 5.1, 9.0), (-1.5, 0.7)))
    log_probs = torch.tensor([[ratio] for ratio, _ in grid]).log().requires_grad_()
    advantages = torch.tensor([[advantage] for _, advantage in grid])
    value, metrics = loss(log_probs, advantages, "cispo", "token", 0.2, 5.0, None)
    (gradient,) = torch.autograd.grad(value * len(grid), log_probs)
    ratios = log_probs.detach().exp()
    weights = -gradient / advantages
    found = is_clipped(ratios, advantages, "cispo", 0.2, 5.0)
    assert torch.equal(found, ~torch.isclose(weights, ratios)) and found.sum() == 4
    assert metrics["cispo_clip_ratio"][0] == pytest.approx((found & (advantages > 0)).float().mean().item())
