"""Every episode of a tiny task with its probability, and the exact gradients that estimators are compared with."""

from __future__ import annotations

import itertools

import torch
from games import make_trainer

from agile_trainers.objectives.segments import spread_to_tokens
from agile_trainers.step.credit import CreditInputs
from agile_trainers.types import TurnBatch

EPISODES = torch.tensor(list(itertools.product((0, 1), repeat=3)))


TURN_IDS = torch.tensor([0, -1, 1, 1])


FIRST_REWARD = torch.tensor([0.3, -0.5])


SECOND_REWARD = torch.tensor([[[1.0, 0.0], [0.2, -1.0]], [[0.5, 2.0], [-0.7, 0.4]]])


GAMMA = 0.8


class Table:
    """Logits per context: none, (a), (a, b)."""

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.logits = [torch.randn(*shape, generator=generator) for shape in ((2,), (2, 2), (2, 2, 2))]
        for logits in self.logits:
            logits.requires_grad_()

    def log_probs(self, episodes: torch.Tensor) -> torch.Tensor:
        """(B, 4): of a, of the observation (an arbitrary constant), of b, of c."""
        a, b, c = episodes.unbind(1)
        first, second, third = (logits.log_softmax(-1) for logits in self.logits)
        return torch.stack([first[a], torch.full(a.shape, -7.0), second[a, b], third[a, b, c]], dim=1)

    def probability(self) -> torch.Tensor:
        """(8,) of each episode."""
        return self.log_probs(EPISODES)[:, TURN_IDS >= 0].sum(1).exp()

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, self.logits)])


def turn_rewards(episodes: torch.Tensor) -> torch.Tensor:
    a, b, c = episodes.unbind(1)
    return torch.stack([FIRST_REWARD[a], SECOND_REWARD[a, b, c]], dim=1)


def exact_gradient(table: Table, gamma: float) -> torch.Tensor:
    """Of the policy-gradient objective: turn k is credited with its discounted return from k on.

    For gamma 1 this is the gradient of the expected return; below 1 the first turn sees the second discounted, and the
    second, as usual in practice, is not discounted for coming later.
    """
    rewards, probability = turn_rewards(EPISODES), table.probability().detach()
    log_probs = table.log_probs(EPISODES)
    to_go = torch.stack([rewards[:, 0] + gamma * rewards[:, 1], rewards[:, 1]], 1)
    return table.gradient((probability * (log_probs[:, 0] * to_go[:, 0] + log_probs[:, 2:].sum(1) * to_go[:, 1])).sum())


def exact_return_gradient(table: Table) -> torch.Tensor:
    return table.gradient((table.probability() * turn_rewards(EPISODES).sum(1)).sum())


def estimate(trainer, table: Table, episodes: torch.Tensor, advantages=None, spread=None, **columns) -> torch.Tensor:
    """The trainer's gradient on one batch of episodes (as ascent), times Dr. GRPO's constant."""
    size, mask = len(episodes), torch.ones(len(episodes), 2) > 0
    lengths = torch.tensor([1, 2]).expand(size, 2)
    if advantages is None:
        turns = CreditInputs(
            turn_rewards(episodes), mask, torch.zeros(size) > 0, lengths, torch.zeros(size, 2).long(), torch.zeros(size)
        )
        advantages = trainer.assign_credit(turns).advantages
    turn_ids = TURN_IDS.expand(size, -1)
    if spread is None:
        spread = spread_to_tokens(advantages, turn_ids)
        if trainer._turn_ratios and trainer.args.turn_ratio_pooling == "sum":
            spread = spread / spread_to_tokens(lengths, turn_ids).clamp(min=1)
    a, b, c = episodes.unbind(1)
    batch = {
        "prompt_ids": torch.zeros(size, 1, dtype=torch.long),
        "prompt_mask": torch.ones(size, 1, dtype=torch.long),
        "completion_ids": torch.stack([a, torch.zeros_like(a), b, c], dim=1),
        "completion_mask": torch.ones(size, 4, dtype=torch.long),
        "tool_mask": (turn_ids >= 0).long(),
        "turn_ids": turn_ids,
        "sampling_per_token_logps": torch.zeros(size, 4),
        "advantages": spread,
        "num_items_in_batch": torch.tensor(3.0 * size),
        **columns,
    }
    loss = trainer._compute_loss(trainer.model, batch)
    return -table.gradient(loss) * trainer.max_completion_length


def relative_error(estimated: torch.Tensor, exact: torch.Tensor) -> float:
    return float((estimated - exact).norm() / exact.norm())


def grpo(model, folder, group, **changes):
    return make_trainer(
        model, folder, loss_type="dr_grpo", num_generations=group, per_device_train_batch_size=group,
        lora=False, scale_rewards=changes.pop("scale_rewards", "none"), **changes,
    )  # fmt: skip


LEVELS = [
    {"importance_sampling_level": "token"},
    {"importance_sampling_level": "turn"},
    {"importance_sampling_level": "turn", "turn_ratio_pooling": "sum"},
]


def turn_batch(episodes: torch.Tensor) -> TurnBatch:
    """What the rollout would hand over."""
    size, turns = len(episodes), torch.ones(len(episodes), 2)
    return TurnBatch(
        prompt_ids=torch.zeros(size, 1, dtype=torch.long),
        prompt_mask=torch.ones(size, 1, dtype=torch.long),
        completion_ids=torch.zeros(size, 4, dtype=torch.long),
        completion_mask=torch.ones(size, 4, dtype=torch.long),
        turn_ids=TURN_IDS.expand(size, -1),
        turn_rewards=turn_rewards(episodes),
        turn_mask=turns > 0,
        state_positions=torch.zeros(size, 3, dtype=torch.long),
        cut=turns[:, 0] < 0,
        unfinished=turns[:, 0] < 0,
        failed=turns[:, 0] < 0,
        sampling_logprobs=torch.zeros(size, 4),
        anchors=torch.zeros(size, 2, dtype=torch.long),
        environments=torch.zeros(size, dtype=torch.long),
        following=torch.tensor([1, 2]).expand(size, -1),
        rewarded=torch.tensor([0, 1]).expand(size, -1),
        linear=turns[:, 0] > 0,
    )
