"""What replacing zero-advantage groups does to the expected update: an enumeration of all batches of a task that is small
enough, through the trainer's own credit and TRL's loss.

Two tasks, drawn equally often; an episode is one answer, right or wrong, of a length that depends on task and answer. A
batch has two groups of two. The policy is a logit per task, so a gradient has one number for each task.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from games import make_trainer
from trl import GRPOTrainer

from agile_trainers.objectives.advantages import zero_advantage_groups
from agile_trainers.step.credit import CreditInputs

RIGHT = (0.9, 0.3)
"""Probability of the right answer, by task."""
LENGTHS = torch.tensor([[12, 8], [1, 2]])
"""Tokens of the wrong and of the right answer, by task."""
PAID = (1.0, 3.0)
"""Reward of the right answer, by task."""
BY_EPISODE, BY_TOKEN = ("grpo", "dr_grpo", "sapo", "luspo"), ("dapo", "cispo", "bnpo", "vespo")
"""Losses that divide by the number of episodes, and by the number of tokens."""
GROUPS = [(task, *answers) for task in (0, 1) for answers in itertools.product((0, 1), repeat=2)]


@pytest.fixture
def logits(monkeypatch) -> torch.Tensor:
    """The policy, in the place of a network: the first token of an answer decides, the others follow from it."""
    logits = torch.tensor(RIGHT).logit().requires_grad_()

    def scored(self: Any, model: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        task, right = input_ids[:, 0], input_ids[:, 1]
        first = torch.nn.functional.logsigmoid(logits[task] * (2 * right - 1))
        log_probs = torch.cat([first[:, None], torch.zeros(len(task), input_ids.size(1) - 2)], dim=1)
        return log_probs, torch.zeros_like(log_probs), None

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", scored)
    return logits


def probability(group: tuple[int, ...]) -> float:
    task, *answers = group
    value = 0.5
    for answer in answers:
        value *= RIGHT[task] if answer else 1 - RIGHT[task]
    return value


def credit(trainer: Any, groups: list[tuple[int, ...]]) -> torch.Tensor:
    """(B, 1) advantages of the episodes of some groups."""
    rewards = torch.tensor([[PAID[task] * answer] for task, *answers in groups for answer in answers])
    size, none = len(rewards), torch.zeros(len(rewards))
    lengths, anchors = torch.ones(size, 1).long(), torch.zeros(size, 1).long()
    return trainer.assign_credit(CreditInputs(rewards, rewards > -1, none > 0, lengths, anchors, none)).advantages


def gradient(trainer: Any, logits: torch.Tensor, groups: list[tuple[int, ...]]) -> torch.Tensor:
    """(2,) of the update on a batch, as ascent."""
    episodes = [(task, answer) for task, *answers in groups for answer in answers]
    tasks, answers = (torch.tensor(column) for column in zip(*episodes))
    mask = torch.arange(12) < LENGTHS[tasks, answers][:, None]
    batch = {
        "prompt_ids": tasks[:, None],
        "prompt_mask": torch.ones_like(tasks)[:, None],
        "completion_ids": answers[:, None].expand(-1, 12) * mask,
        "completion_mask": mask.long(),
        "tool_mask": mask.long(),
        "turn_ids": mask.long() - 1,
        "sampling_per_token_logps": torch.zeros(mask.shape),
        "advantages": credit(trainer, groups) * mask,
        "num_items_in_batch": mask.sum(),
    }
    if trainer.beta:
        reference = torch.full((len(tasks), 1), 0.5).log()
        batch["ref_per_token_logps"] = torch.cat([reference, torch.zeros(len(tasks), 11)], dim=1)
    loss = trainer._compute_loss(trainer.model, batch)
    return -torch.autograd.grad(loss, logits)[0]


def longer(trainer: Any, logits: torch.Tensor, rounds: int) -> torch.Tensor:
    """(2,) of each task, the expected update with replacement over the one without."""
    zero = [bool(zero_advantage_groups(credit(trainer, [g]), torch.ones(2, 1) > 0, 1e-6, 2)) for g in GROUPS]
    assert zero == [first == second for _, first, second in GROUPS]
    drawn = torch.tensor([probability(group) for group in GROUPS])
    again = drawn[torch.tensor(zero)].sum()
    # A group is left if it has an advantage in some round, or if it is that of the last one.
    kept = drawn * torch.where(torch.tensor(zero), again**rounds, sum(again**n for n in range(rounds + 1)))
    torch.testing.assert_close(kept.sum(), torch.tensor(1.0))
    update = torch.stack([
        torch.stack([gradient(trainer, logits, [GROUPS[i], GROUPS[j]]) for j in range(8)]) for i in range(8)
    ])  # fmt: skip
    without, replaced = (torch.einsum("ijt,i,j->t", update, chosen, chosen) for chosen in (drawn, kept))
    return replaced / without


def make(model: Any, folder: Any, **changes: Any) -> Any:
    return make_trainer(model, folder, num_generations=2, per_device_train_batch_size=4, lora=False, **changes)


@pytest.mark.parametrize("loss_type", BY_EPISODE)
def test_a_loss_over_episodes_gets_longer_by_one_factor(embedded_model, tmp_path, logits, loss_type):
    """1 + z + z^2 with two rounds and a share z of zero-advantage groups: the direction stays that of uniform draws."""
    z = sum(0.5 * (p**2 + (1 - p) ** 2) for p in RIGHT)
    found = longer(make(embedded_model, tmp_path, loss_type=loss_type), logits, 2)
    torch.testing.assert_close(found, torch.tensor([1 + z + z**2] * 2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("loss_type", BY_TOKEN)
def test_a_loss_over_tokens_gets_another_direction(embedded_model, tmp_path, logits, loss_type):
    """The divisor holds the tokens of the groups that were replaced: the factors of the tasks differ with their lengths."""
    found = longer(make(embedded_model, tmp_path, loss_type=loss_type), logits, 2).tolist()
    assert found == pytest.approx([2.258, 2.324], abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "factors"),
    [({"beta": 0.1}, [2.519, 2.088]), ({"scale_rewards": "batch"}, [1.762, 2.052])],
    ids=["kl", "batch"],
)
def test_terms_of_whole_batches_get_another_direction(embedded_model, tmp_path, logits, changes, factors):
    """The penalty of the episodes that were replaced is missing; the deviation is that of other episodes."""
    found = longer(make(embedded_model, tmp_path, loss_type="grpo", **changes), logits, 2).tolist()
    assert found == pytest.approx(factors, abs=1e-3)
