"""Corrections of drift as options of the trainers: exact where they are said to be, through a trainer's own step.

All episodes of a program of two or three turns are listed (``tests/objectives/drifting.py``). The step is the trainer's: its
order, credit, columns and TRL's loss. Only what a network would compute is given: the log-probabilities under snapshot and
prox, which are tables of logits, and the values of a critic.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from games import make_trainer
from ppo_games import make_ppo
from trl import GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "objectives"))

from drifting import Drift, three_turns, two_turns
from forests import error

from agile_trainers.objectives.drift import CORRECTIONS, turn_ratios
from agile_trainers.objectives.returns import discounted_returns, gae, vtrace_targets
from agile_trainers.step.critic import CriticValues, NoCritic
from agile_trainers.step.log_probs import BatchLogProbs
from agile_trainers.step.play import PlayedGroups
from agile_trainers.train_batch import TrainBatch
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agile_trainers.types import TurnBatch

EXACT = 1e-6
DECISION: dict[str, Any] = {"drift_correction": "decision_truncate", "drift_clip_max": None}
UNSCALED: dict[str, Any] = {"scale_rewards": "none", "advantage_baseline": "leave_one_out", "loss_type": "dr_grpo"}
drawn = cache(Drift.drawn)
every_tree = pytest.mark.parametrize("program", [two_turns, three_turns])


def turn_batch(drift: Drift, rows: torch.Tensor) -> TurnBatch:
    """What the rollout would hand over. The prompt is the episode's number."""
    size, turns, nothing = len(rows), drift.turns, torch.zeros(len(rows)) > 0
    tokens = torch.zeros(size, drift.turn_ids.size(1))
    index = torch.arange(turns).expand(size, -1)
    return TurnBatch(
        prompt_ids=rows[:, None],
        prompt_mask=torch.ones(size, 1).long(),
        completion_ids=tokens.long(),
        completion_mask=torch.ones_like(tokens).long(),
        turn_ids=drift.turn_ids[rows],
        turn_rewards=drift.prox.rewards[rows].float(),
        turn_mask=drift.prox.mask[rows],
        state_positions=torch.zeros(size, turns + 1).long(),
        cut=nothing,
        unfinished=nothing,
        failed=nothing,
        sampling_logprobs=tokens,
        anchors=torch.zeros(size, turns).long(),
        environments=torch.zeros(size).long(),
        following=index + 1,
        rewarded=index,
        linear=~nothing,
    )


class Stepped:
    """A trainer whose step gets episodes of a program that the snapshot played.

    ``values`` (N, K) are those of a critic.
    """

    def __init__(self, trainer: Any, drift: Drift, patch: pytest.MonkeyPatch, values: torch.Tensor | None = None):
        self.trainer, self.drift, self.judged = trainer, drift, None
        self.batch: TurnBatch | None = None
        ours, theirs = (one.float() for one in drift.log_probs)
        self._now = ours

        def score(models: Any, batch: TurnBatch, *, old: bool, reference: bool, rows: Any = None) -> BatchLogProbs:
            number, every = batch.prompt_ids[:, 0], torch.ones(len(batch.prompt_ids)) > 0
            return BatchLogProbs(every, self._now[number] if old else None, theirs[number] if reference else None)

        def snapshot(version: int) -> Any:
            patch.setattr(self, "_now", theirs)
            return nullcontext()

        def of_table(_: Any, model: Any, ids: torch.Tensor, *others: Any, logits_to_keep: int = 0, **more: Any) -> Any:
            width = others[1] if len(others) > 1 else logits_to_keep
            found = drift.prox.token_log_probabilities(drift.mask)[ids[:, 0], :width].float()
            return found, torch.zeros_like(found), None

        class Holding:
            holding = staticmethod(snapshot)

        trainer.log_prob_passes.compute, trainer.log_prob_passes.prepare_packing = score, lambda *_: None
        trainer.rollouts.play = lambda *_: PlayedGroups([], [], [], torch.zeros(1), self.batch, version=self.version)
        trainer.batches.snapshots = Holding()
        trainer._open_mismatch = trainer.rollout_log.begin = lambda *_: None
        trainer._log_batch = lambda generation, played, made: setattr(self, "judged", made.judged)
        trainer.rollout_log.observe = lambda *_: None
        patch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", of_table)
        if values is not None:
            critic = trainer.critic

            def read(model: Any, batch: TurnBatch, *_: Any, **__: Any) -> CriticValues:
                known = values[batch.prompt_ids[:, 0]].float()
                return CriticValues(batch.state_positions[:, :-1], known, known, torch.zeros(len(known)), False)

            critic.read = read
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        self._ours, self.version = ours, 0

    def columns(self, rows: torch.Tensor, version: int | None = 0, **changes: Any) -> TrainBatch:
        """The generation batch of the loss; ``changes`` are of the rollout's batch."""
        self._now, self.version = self._ours, version
        self.batch = turn_batch(self.drift, rows)
        for name, value in changes.items():
            setattr(self.batch, name, value)
        return TrainBatch.from_trl(self.trainer._generate_and_score_completions([{}]))

    def expected(self, members: int = 1) -> torch.Tensor:
        """(D,), the expected gradient over all groups of so many episodes of the snapshot, all in one batch."""
        count, chances = len(self.drift.mask), self.drift.snapshot.probabilities
        groups = torch.tensor(list(itertools.product(range(count), repeat=members)))
        columns = self.columns(groups.flatten())
        weight = (chances[groups].prod(dim=1) * len(groups)).repeat_interleave(members)
        columns.advantages = columns.advantages * weight[:, None]
        trainer, critic = self.trainer, self.trainer.critic
        trainer.critic = NoCritic()  # here it is given, and has no loss
        total, rows = torch.zeros_like(self.drift.prox.exact), len(columns.advantages)
        for part in torch.arange(rows).split(40):  # one pass each
            loss = trainer._compute_loss(trainer.model, columns.rows(part).to_trl())
            gradient = torch.autograd.grad(loss, self.drift.prox.logits)[0].flatten()
            total -= gradient * trainer.max_completion_length * len(part) / rows
        trainer.critic = critic
        return total


Made = Callable[..., Stepped]


@pytest.fixture
def stepped(embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    def make(program: Any, algorithm: str = "grpo", values: torch.Tensor | None = None, **options: Any) -> Stepped:
        settings = {"batches_ahead": 1, "num_generations": 2, "per_device_train_batch_size": 8, **options}
        if algorithm != "grpo":
            del settings["num_generations"]
        if algorithm == "ppo":
            trainer: Any = make_ppo(embedded_model, tmp_path, **settings)
        else:
            extra = {} if algorithm == "grpo" else {"num_generations": 1}
            trainer = make_trainer(embedded_model, tmp_path, algorithm=algorithm, **settings, **extra)
        return Stepped(trainer, drawn(program, 0), monkeypatch, values)

    return make


def values_of(drift: Drift) -> torch.Tensor:
    """(N, K), arbitrary numbers of what was said before a turn."""
    return drift.prox.table(lambda call, k, _: ((len(call.prompt) * 7 + ord(call.prompt[-1])) % 11) / 5 - k)


# -------------------------------------------------------------------------------------------------------------- exact


@every_tree
def test_grpo_is_exact(stepped: Made, program: Any) -> None:
    """With the other member for a baseline. A turn's own ratio, and no correction, are not."""
    one = stepped(program, **DECISION, **UNSCALED)
    exact = one.drift.prox.exact
    assert error(one.expected(2), exact) < EXACT
    for correction in ("turn_truncate", None):
        one.trainer.args.drift_correction = correction
        assert error(one.expected(2), exact) > 0.1
    one.trainer.args.drift_correction, one.trainer.args.drift_clip_max = "decision_truncate", 1.5
    assert error(one.expected(2), exact) > 0.02


@every_tree
def test_the_mean_of_the_group_takes_its_share(stepped: Made, program: Any) -> None:
    """Half of the gradient in pairs, as on policy."""
    one = stepped(program, **DECISION, **{**UNSCALED, "advantage_baseline": "mean"})
    assert error(one.expected(2), one.drift.prox.exact / 2) < EXACT


def test_turns_without_comparison_have_no_advantage(stepped: Made) -> None:
    """Without the fallback the gradient is that of prox over groups in which another member reached the turn."""
    one = stepped(three_turns, **DECISION, **UNSCALED, turn_advantage_trajectory_fallback=False)
    drift = one.drift
    mask = drift.prox.mask.double()
    reached = drift.snapshot.probabilities @ mask
    earned = discounted_returns(drift.prox.rewards, drift.prox.mask, 1.0)
    expected = torch.einsum("n,nk,nkd->d", drift.prox.probabilities, earned * mask * reached, drift.prox.scores)
    others = (drift.snapshot.probabilities[:, None] * earned * mask).sum(0)
    expected -= torch.einsum("n,nk,nkd->d", drift.prox.probabilities, mask * others, drift.prox.scores)
    assert error(one.expected(2), expected) < EXACT


@every_tree
def test_reinforce_is_exact(stepped: Made, program: Any) -> None:
    """Up to its scale, where mean and deviation are those of a batch of all episodes."""
    one = stepped(program, "reinforce", **DECISION, loss_type="dr_grpo")
    drift = one.drift
    earned = discounted_returns(drift.prox.rewards, drift.prox.mask, 1.0)[drift.prox.mask]
    assert error(one.expected() * earned.std(), drift.prox.exact) < EXACT


@every_tree
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.8, 0.6)])
def test_ppo_is_exact(stepped: Made, program: Any, gamma: float, gae_lambda: float) -> None:
    """With any values. Below lambda 1 it is the estimate that the same values give on episodes of prox."""
    values = values_of(drawn(program, 0))
    options: dict[str, Any] = {"gamma": gamma, "gae_lambda": gae_lambda, "loss_type": "dr_grpo", **DECISION}
    one = stepped(program, "ppo", values, **options)
    drift, none = one.drift, torch.zeros(len(values))
    on_policy = gae(drift.prox.rewards, values, none, drift.prox.mask, gamma=gamma, gae_lambda=gae_lambda)
    expected = drift.prox.expected(on_policy)
    if gamma == gae_lambda == 1.0:
        assert error(expected, drift.prox.exact) < EXACT
    assert error(one.expected(), expected) < EXACT
    for bound in (None, 1.2):
        one.trainer.args.drift_clip_max = bound
        found = one.columns(torch.arange(len(values))).turn_columns["value_targets"]
        ratios = turn_ratios(drift.log_ratio, drift.mask, drift.turn_ids, drift.turns, bound)
        assert (ratios > 1.15).any() and (ratios < 0.8).any()
        targets = vtrace_targets(
            drift.prox.rewards, values, none, drift.prox.mask, ratios, gamma=gamma, gae_lambda=gae_lambda
        )
        assert torch.allclose(found.double(), targets, atol=1e-5)
    one.trainer.args.drift_correction = "turn_truncate"
    found = one.columns(torch.arange(len(values))).turn_columns["value_targets"]
    assert torch.allclose(found.double(), (on_policy + values) * drift.prox.mask, atol=1e-5)


def test_a_discount_is_that_of_the_returns(stepped: Made) -> None:
    one = stepped(three_turns, **DECISION, **UNSCALED, gamma=0.6)
    drift = one.drift
    expected = drift.prox.expected(discounted_returns(drift.prox.rewards, drift.prox.mask, 0.6))
    assert error(one.expected(2), expected) < EXACT


def test_a_penalty_in_the_reward_is_weighted_too(stepped: Made) -> None:
    """The gradient of the expected return minus the divergence of prox from the reference, here the snapshot."""
    one = stepped(two_turns, **DECISION, **UNSCALED, beta=0.7, kl_placement="reward")
    drift = one.drift
    logs = (drift.prox.token_log_probabilities(drift.mask) - drift.log_probs[1]).sum(1)
    chances = drift.prox.token_log_probabilities(drift.mask).sum(1).exp()
    divergence = torch.autograd.grad((chances * logs).sum(), drift.prox.logits)[0].flatten()
    assert error(one.expected(2), drift.prox.exact - 0.7 * divergence) < EXACT


# ----------------------------------------------------------------------------------------------------------- by hand


def test_advantages_by_hand(stepped: Made) -> None:
    """Of a pair: weights, the other's return as the value of each turn, half of it all, over the deviation."""
    one = stepped(three_turns, drift_correction="decision_truncate", drift_clip_max=1.4, gamma=0.9)
    drift = one.drift
    lengths = drift.prox.mask.sum(1)
    rows = torch.tensor([int((lengths == 3).nonzero()[5]), int((lengths == 3).nonzero()[20])])
    one.columns(rows)
    found = one.judged.credit.advantages
    log_ratio, clipped = (drift.log_probs[0] - drift.log_probs[1])[rows], 0
    for member, other in ((0, 1), (1, 0)):
        rewards, theirs = (drift.prox.rewards[rows[i]].tolist() for i in (member, other))
        for k in range(3):
            total = 0.0
            for j in range(k, 3):
                ids = drift.turn_ids[rows[member]]
                weight = math.exp(log_ratio[member][(ids >= 0) & (ids <= j)].sum())
                clipped += weight > 1.4
                value = sum(0.9 ** (i - j) * theirs[i] for i in range(j, 3))
                following = sum(0.9 ** (i - j - 1) * theirs[i] for i in range(j + 1, 3))
                total += 0.9 ** (j - k) * min(weight, 1.4) * (rewards[j] + 0.9 * following - value)
            returns = [sum(0.9 ** (i - k) * r[i] for i in range(k, 3)) for r in (rewards, theirs)]
            deviation = abs(returns[0] - returns[1]) / math.sqrt(2)
            expected = total / 2 / (deviation + 1e-4) if deviation > 1e-6 else 0.0
            assert found[member, k].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert clipped


def test_rewards_of_episodes_without_loss_are_weighted_too(stepped: Made) -> None:
    """`mask_truncated_completions` takes tokens out of the loss; what they lead to stays as likely as it was."""
    one = stepped(three_turns, **DECISION, **UNSCALED, mask_truncated_completions=True)
    rows = torch.arange(8)
    plain = one.columns(rows)
    weights = one.judged.turns.weights
    cut = torch.arange(8) % 2 > 0
    columns = one.columns(rows, cut=cut)
    assert torch.equal(one.judged.turns.weights, weights) and (weights[cut] - 1).abs().max() > 0.1
    assert torch.equal(columns.advantages, plain.advantages) and not columns.counted[cut].any()


# -------------------------------------------------------------------------------------------------------------- lag 0


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_policy_that_has_not_moved_is_not_corrected(stepped: Made, correction: str) -> None:
    """A snapshot that is prox changes nothing; where the policy itself played, nothing is computed."""
    one = stepped(three_turns, drift_correction=correction)
    theirs, one.drift = one.drift, drawn(three_turns, 0)
    still = Drift(theirs.prox, theirs.prox)
    rows = torch.arange(36)
    one.trainer.args.drift_correction = None
    plain = one.columns(rows, version=None)
    one.trainer.args.drift_correction = correction
    assert plain.importance_sampling_ratio is None
    assert torch.equal(one.columns(rows, version=None).advantages, plain.advantages)
    assert not torch.allclose(loss_weight(one.columns(rows)), loss_weight(plain), rtol=1e-2)
    score = one.trainer.log_prob_passes.compute
    ours = still.log_probs[0].float()
    one.trainer.log_prob_passes.compute = lambda models, batch, **options: BatchLogProbs(
        score(models, batch, **options).scored, ours[batch.prompt_ids[:, 0]]
    )
    torch.testing.assert_close(loss_weight(one.columns(rows)), loss_weight(plain), rtol=1e-6, atol=1e-7)


def loss_weight(columns: TrainBatch) -> torch.Tensor:
    """(B, T), what the gradient of each token is multiplied by."""
    weights = columns.importance_sampling_ratio
    return columns.advantages * (1.0 if weights is None else weights)


@pytest.mark.parametrize("algorithm", ["reinforce", "ppo"])
def test_the_other_rules_are_not_corrected_either(stepped: Made, algorithm: str) -> None:
    values = values_of(drawn(three_turns, 0)) if algorithm == "ppo" else None
    one = stepped(three_turns, algorithm, values, **DECISION)
    rows = torch.arange(36)
    plain, score = one.columns(rows, version=None), one.trainer.log_prob_passes.compute
    assert not torch.allclose(one.columns(rows).advantages, plain.advantages, rtol=1e-2)
    ours = one.drift.log_probs[0].float()
    one.trainer.log_prob_passes.compute = lambda models, batch, **options: BatchLogProbs(
        score(models, batch, **options).scored, ours[batch.prompt_ids[:, 0]]
    )
    torch.testing.assert_close(one.columns(rows).advantages, plain.advantages, rtol=1e-6, atol=1e-7)


# --------------------------------------------------------------------------------------------------------------- runs

RUN: dict[str, Any] = {
    "batches_ahead": 2, "max_steps": 3, "num_generations": 4, "per_device_train_batch_size": 8, "learning_rate": 0.3
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "decision": {"drift_correction": "decision_truncate"},
}


def trained(model: Path, folder: Path, algorithm: str = "grpo", **changes: Any) -> Any:
    if algorithm == "ppo":
        options = {name: value for name, value in RUN.items() if name != "num_generations"}
        trainer: Any = make_ppo(model, folder, **{**options, **changes})
    else:
        settings = {**RUN, **changes, **({"num_generations": 1} if algorithm == "reinforce" else {})}
        trainer = make_trainer(model, folder, algorithm=algorithm, **settings)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("algorithm", "correction"),
    [("grpo", "decision"), ("reinforce", "decision"), ("ppo", "decision")],
)
def test_a_run_trains(embedded_model: Path, tmp_path: Path, algorithm: str, correction: str) -> None:
    """Two batches ahead, and logs what it corrects from the second batch on."""
    trainer = trained(embedded_model, tmp_path, algorithm, **RUNS[correction])
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 3 and all(math.isfinite(log["loss"]) and log["grad_norm"] > 0 for log in logs)
    for number, log in enumerate(logs):
        assert ("drift/kl" in log) == (number > 0)
    assert all(log["drift/kl"] > 1e-6 for log in logs[1:])


@pytest.mark.parametrize("correction", RUNS)
def test_a_run_is_the_same_however_its_rows_are_split(embedded_model: Path, tmp_path: Path, correction: str) -> None:
    """In micro-batches, in passes of few tokens, packed."""
    found = {}
    for name, changes in {
        "plain": {"sequence_packing": "none"},
        "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        "passes": {"max_tokens_per_micro_batch": 60},
        "packed": {"sequence_packing": "prefix"},
        "uncorrected": {},
    }.items():
        options = {**RUNS[correction], "max_steps": 2, **changes}
        if name == "uncorrected":
            options = {"max_steps": 2, "drift_correction": None}
        trainer = trained(embedded_model, tmp_path / name, **options)
        found[name] = torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])
    apart = (found["uncorrected"] - found["plain"]).abs().max()
    assert apart > 1e-4
    for name in ("accumulated", "passes", "packed"):
        assert (found[name] - found["plain"]).abs().max() < 0.01 * apart, name


# ------------------------------------------------------------------------------------------------------------ refused


class _OwnRule(MultiTurnGRPOTrainer):
    config_class = MultiTurnGRPOConfig

    def assign_credit(self, turns: Any) -> Any:
        raise NotImplementedError


class _OwnRuleThatWeighs(_OwnRule):
    weighs_decisions = True

    def assign_credit(self, turns: Any) -> Any:
        raise NotImplementedError


class _Heir(_OwnRuleThatWeighs):
    pass


def test_a_rule_declares_that_it_weighs() -> None:
    assert [one.weighs_decisions for one in (MultiTurnGRPOTrainer, _OwnRule, _OwnRuleThatWeighs, _Heir)] == [
        True, False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "changes", "said"),
    [
        ("grpo", {"advantage_granularity": "trajectory"}, "Set advantage_granularity='turn', or drift_correction='sequ"),
        ("grpo", {"advantage_granularity": "anchor"}, "Set advantage_granularity='turn'"),
        ("grpo", {"turn_credit": "reward"}, "cannot be combined with turn_credit='reward'"),
        ("grpo", {"importance_sampling_level": "sequence"}, "importance_sampling_level='token' or 'turn'"),
        ("grpo", {"whiten_advantages": True}, "cannot be combined with whiten_advantages=True"),
        ("grpo", {"beta": 0.1, "kl_placement": "advantage"}, "kl_placement='loss' or 'reward'"),
        ("grpo", {"loss_type": "vespo"}, "drift_correction='token_truncate' or 'token_mask'"),
        ("grpo", {"batches_ahead": 0}, "has no effect with batches_ahead=0"),
        ("grpo", {"drift_correction": None, "drift_clip_max": 3.0}, "a weight that it bounds"),
        ("grpo", {"drift_correction": "decision_mask"}, "'decision_truncate', got 'decision_mask'"),
        ("ppo", {"advantage_granularity": "token"}, "Set advantage_granularity='turn'"),
        ("ppo", {"advantage_granularity": "auto"}, "Set advantage_granularity='turn'"),
        ("agile_trainers.trainers:MultiTurnGSPOTrainer", {}, "Set advantage_granularity='turn'"),
        (f"{__name__}:_OwnRule", {}, "_OwnRule has one of its own"),
    ],
)  # fmt: skip
def test_what_cannot_be_weighed_per_decision(
    embedded_model: Path, tmp_path: Path, algorithm: str, changes: dict[str, Any], said: str
) -> None:
    options: dict[str, Any] = {"batches_ahead": 1, "drift_correction": "decision_truncate", **changes}
    with pytest.raises(ValueError, match=said):
        if algorithm == "ppo":
            make_ppo(embedded_model, tmp_path, **options)
        else:
            make_trainer(embedded_model, tmp_path, algorithm=algorithm, **options)
