"""Episodes of several paths: what they add up to does not depend on how they are stored."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from games import make_trainer, relative_error
from path_episodes import (
    call_by_call,
    measured,
    move,
    programs,
    reference_lambda_returns,
    repeated,
    values_call_by_call,
)
from ppo_games import make_ppo, wake

from agile_trainers.rollout.forest import Call, forest
from agile_trainers.train_batch import paths_of
from agile_trainers.types import StopReason, path_nodes


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def check_same(trainer, budgets=(None,), rel=5e-6, prepare=lambda: None):
    """Compare episodes of one path with the same episodes stored as one path for each turn."""
    episodes = trainer.rollout(generation=0)
    assert max(len(episode.turns) for episode in episodes) > 1
    prepare()
    loss, gradients, metrics = measured(trainer, episodes)
    for budget in budgets:
        split, gradients_split, metrics_split = measured(trainer, [repeated(episode) for episode in episodes], budget)
        assert split.dtype == loss.dtype and split == pytest.approx(loss.item(), rel=rel, abs=min(rel, 1e-6))
        assert relative_error(gradients_split, gradients) < rel
        assert metrics_split.keys() == metrics.keys()
        for name, values in metrics.items():
            assert metrics_split[name] == pytest.approx(values, rel=1e-4, abs=1e-6), name
    return loss


ONE = {"per_device_train_batch_size": 8, "num_iterations": 2}
GRPO = [
    {"loss_type": "bnpo", "importance_sampling_level": "turn"},
    {"loss_type": "dr_grpo", "beta": 0.1, "kl_placement": "reward", "importance_sampling_level": "turn"},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "sapo", "beta": 0.1, "kl_placement": "advantage"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "vespo", "entropy_coef": 0.01},
    {"importance_sampling_level": "sequence", "advantage_granularity": "trajectory"},
    {"loss_type": "dapo", "off_policy_mask_threshold": 0.01, "gradient_checkpointing": True},
    {"top_entropy_quantile": 0.5},
]


SLOW_UNPACKED = ["prefix", pytest.param("none", marks=pytest.mark.slow)]
"""Padded rows of every case are left to ``make test-slow``; other tests have some."""


@pytest.mark.parametrize("packing", SLOW_UNPACKED)
@pytest.mark.parametrize("options", GRPO, ids=lambda options: "-".join(map(str, options.values())) or "default")
def test_splitting_an_episode_changes_nothing(embedded_model, tmp_path, packing, options):
    check_same(make_trainer(embedded_model, tmp_path, sequence_packing=packing, **ONE, **options))


@pytest.mark.parametrize("packing", SLOW_UNPACKED)
@pytest.mark.parametrize("level", ["token", "turn"])
def test_splitting_an_episode_of_reinforce_changes_nothing(embedded_model, tmp_path, packing, level):
    options = {"algorithm": "reinforce", "num_generations": 1, "gamma": 0.5, "importance_sampling_level": level}
    check_same(make_trainer(embedded_model, tmp_path, sequence_packing=packing, **ONE, **options))


@pytest.mark.parametrize("packing", SLOW_UNPACKED)
@pytest.mark.parametrize(
    "options",
    [
        {"gamma": 0.9, "gae_lambda": 0.5},
        {"advantage_granularity": "token"},
        {"turn_value_position": "mean"},
        {"turn_value_position": "final", "critic_layers": 1},
        {"value_clip_range": 0.2, "vllm_importance_sampling_correction": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_splitting_an_episode_of_ppo_changes_nothing(embedded_model, tmp_path, packing, options):
    trainer = make_ppo(embedded_model, tmp_path, sequence_packing=packing, max_turns=3, **{**ONE, **options})
    wake(trainer)
    check_same(trainer)


@pytest.mark.parametrize(
    ("packing", "loss_type"),
    [
        ("none", "grpo"),
        ("prefix", "bnpo"),
        *(pytest.param("none", name, marks=pytest.mark.slow) for name in ("bnpo", "dr_grpo", "dapo", "luspo")),
        *(pytest.param("prefix", name, marks=pytest.mark.slow) for name in ("grpo", "dr_grpo", "dapo", "luspo")),
    ],
)
def test_splitting_changes_nothing_in_forward_passes_of_any_budget(embedded_model, tmp_path, packing, loss_type):
    trainer = make_trainer(embedded_model, tmp_path, sequence_packing=packing, loss_type=loss_type, beta=0.1, **ONE)
    check_same(trainer, (60, 200))


BY_TRAJECTORY = {"advantage_granularity": "trajectory", "scale_rewards": "none"}
UNCORRECTED = {"max_logprob_gap": 100.0, "vllm_importance_sampling_correction": False}


def by_hand(trainer, episodes, loss_type, *, beta, level):
    """The loss of a micro-batch of episodes, from log-probs that are read call by call; before any update but ``move``."""
    with torch.no_grad():
        old, mask = call_by_call(trainer, episodes)
        with trainer.model.disable_adapter():
            reference, _ = call_by_call(trainer, episodes)
    move(trainer)
    new, _ = call_by_call(trainer, episodes)
    returns = torch.tensor([episode.episode_return for episode in episodes]).view(-1, 4)
    advantages = (returns - returns.mean(dim=1, keepdim=True)).view(-1, 1)
    log_ratio = new - old
    if level == "turn":
        pooled = torch.zeros_like(log_ratio)
        for row, episode in enumerate(episodes):
            for turn in episode.turns:
                pooled[row, turn.start : turn.end] = log_ratio[row, turn.start : turn.end].mean()
        log_ratio = pooled
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(1) / mask.sum(1))[:, None].expand_as(log_ratio)
    ratio = log_ratio.exp()
    token = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    token = token + beta * ratio * (torch.exp(reference - new) - (reference - new) - 1)
    each = (token * mask).sum(1)
    if loss_type == "grpo":
        return (each / mask.sum(1)).mean()
    if loss_type == "dr_grpo":
        return each.sum() / (len(episodes) * trainer.max_completion_length)
    return each.sum() / mask.sum()


LOSSES = [("grpo", "token"), ("dapo", "turn"), ("dr_grpo", "token"), ("grpo", "sequence")]


@pytest.mark.parametrize(
    ("budget", "packing", "loss_type", "level"),
    [
        *((12, "prefix", *one) for one in LOSSES),
        (12, "none", "grpo", "sequence"),
        (12, "none", "dapo", "turn"),
        *(pytest.param(12, "none", *one, marks=pytest.mark.slow) for one in LOSSES if one[1] == "token"),
        *(
            pytest.param(budget, packing, *one, marks=pytest.mark.slow)
            for budget in (None, 40)
            for packing in ("none", "prefix")
            for one in LOSSES
        ),
    ],
)
def test_forests_train_every_call_once(embedded_model, tmp_path, packing, loss_type, level, budget):
    options = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.1, "sequence_packing": packing}
    trainer = make_trainer(embedded_model, tmp_path, **options, **BY_TRAJECTORY, **UNCORRECTED, **ONE)
    episodes = programs()
    rows_of_passes: list[int] = []
    loss, gradients, metrics = measured(trainer, episodes, budget, rows_of_passes)
    trainer.model.zero_grad()
    expected = by_hand(trainer, episodes, loss_type, beta=0.1, level=level)
    expected.backward()
    theirs = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    assert loss == pytest.approx(expected.item(), rel=2e-5, abs=1e-6)
    assert relative_error(gradients, theirs) < 5e-6
    assert metrics["num_tokens"] == [sum(episode.num_tokens for episode in episodes)]
    # 12 tokens are less than most episodes have. A ratio of the whole episode needs all of it in one pass.
    passes = len(rows_of_passes)
    assert passes == 1 if budget is None else passes > 8 if budget == 12 and level != "sequence" else 1 < passes <= 8


@pytest.mark.parametrize("budget", [pytest.param(None, marks=pytest.mark.slow), 12])
@pytest.mark.parametrize(("granularity", "packing"), [("turn", "prefix"), ("token", "none")])
def test_a_critic_reads_each_call_after_its_own_prompt(embedded_model, tmp_path, packing, budget, granularity):
    """Values, advantages and the gradient of both losses beside a reference that reads call by call."""
    options = {"sequence_packing": packing, "advantage_granularity": granularity, "gae_lambda": 0.5, "vf_coef": 0.3}
    trainer = make_ppo(embedded_model, tmp_path, **options, loss_type="dr_grpo", **UNCORRECTED, **ONE)
    wake(trainer)
    episodes = programs()
    loss, gradients, _ = measured(trainer, episodes, budget)
    trainer.model.zero_grad()
    with torch.no_grad():
        old_values = values_call_by_call(trainer, episodes)
        old, mask = call_by_call(trainer, episodes)
    advantages, targets, weights = torch.zeros_like(old), torch.zeros_like(old), torch.zeros_like(old)
    for row, episode in enumerate(episodes):
        starts = [turn.start for turn in episode.turns]
        final = old_values[row][-1] if episode.stop_reason.truncated else 0.0
        lambda_returns = reference_lambda_returns(episode, old_values[row][starts].tolist(), float(final), 0.5)
        for k, turn in enumerate(episode.turns):
            span, start = slice(turn.start, turn.end), turn.start
            targets[row, span] = lambda_returns[k]
            value = old_values[row][span] if granularity == "token" else old_values[row][start]
            advantages[row, span] = lambda_returns[k] - value
            if granularity == "token":
                weights[row, span] = 1.0 / (turn.end - turn.start)
            else:
                weights[row, start] = 1.0
    move(trainer, (".default", ".critic"))
    new, _ = call_by_call(trainer, episodes)
    width, read = old.size(1), values_call_by_call(trainer, episodes)
    values = torch.stack([torch.nn.functional.pad(own[:-1], (0, width - len(own) + 1)) for own in read])
    ratio = (new - old).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask
    expected = policy.sum() / (len(episodes) * trainer.max_completion_length)
    expected = expected + 0.3 * ((values - targets) ** 2 / 2 * weights).sum() / weights.sum()
    expected.backward()
    theirs = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    assert loss == pytest.approx(expected.item(), rel=2e-5, abs=1e-6)
    assert relative_error(gradients, theirs) < 5e-6


def in_double(trainer, monkeypatch):
    """Compute in float64 throughout: TRL's head and the model's norms would go through float32."""

    def log_probs(hidden, weight, bias, labels, temperature, _chunk, _cap, _scale, outputs):
        logits = (hidden @ weight.T) / temperature
        every = logits.log_softmax(-1)
        return every.gather(1, labels[:, None])[:, 0], -(every.exp() * every).sum(-1), None, None, None

    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", SimpleNamespace(apply=log_probs))
    trainer.model.double()
    for module in trainer.model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(plain_norm, module)


def plain_norm(module, hidden):
    return module.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)


@pytest.mark.parametrize("packing", SLOW_UNPACKED)
@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "grpo", "beta": 0.1},
        {"importance_sampling_level": "turn", "turn_ratio_pooling": "sum", "advantage_granularity": "trajectory"},
    ],
    ids=["kl", "sum"],
)
def test_splitting_an_episode_changes_nothing_in_double_precision(
    embedded_model, tmp_path, monkeypatch, packing, options
):
    trainer = make_trainer(embedded_model, tmp_path, sequence_packing=packing, **ONE, **{**options, **UNCORRECTED})
    loss = check_same(trainer, (None, 60), rel=1e-12, prepare=lambda: in_double(trainer, monkeypatch))
    assert loss.dtype == torch.float64


def test_a_packed_pass_computes_each_distinct_token_once(embedded_model, tmp_path):
    """16 episodes of 12 calls; a row for each call would be 7 times as many tokens."""
    rng, start, episodes = random.Random(0), list(range(10, 40)), []
    for every in [12, 12, 12, 6] * 4:  # one of four rewrites its history in the middle
        calls: list[Call] = []
        for k in range(12):
            before = (
                [*calls[-1].prompt_ids, *calls[-1].answer_ids, *rng.choices(range(10, 90), k=4)] if k % every else start
            )
            answer = rng.choices(range(10, 90), k=6)
            calls.append(Call(list(before), answer, [-0.5] * 6, reward=rng.random()))
        episodes.append(forest(calls, StopReason.TERMINATED))
    distinct = max(nodes[-1] for nodes in path_nodes([path for episode in episodes for path in episode.paths])) + 1
    by_call = sum(len(e.prompt_of(k)) + len(e.action_of(k)) for e in episodes for k in range(12))
    options = {"per_device_train_batch_size": 16, "num_generations": 16, "sequence_packing": "prefix", **UNCORRECTED}
    trainer = make_trainer(embedded_model, tmp_path, loss_type="dr_grpo", **options)
    computed: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    measured(trainer, episodes, 10**6)
    # The last token of a path is not read: nothing is sampled after it.
    leaves = sum(len(episode.paths) for episode in episodes)
    assert computed[-1] == distinct - leaves
    assert by_call / distinct > 7


def test_a_group_of_calls_that_do_not_correspond_is_compared_by_trajectory(embedded_model, tmp_path):
    def advantages(granularity, episodes):
        folder = tmp_path / granularity
        trainer = make_trainer(embedded_model, folder, advantage_granularity=granularity, **ONE, **UNCORRECTED)
        trainer.model.train()
        batch = trainer._generate_and_score_completions(list(episodes))
        return batch["advantages"], trainer._metrics["train"]

    episodes = programs()
    assert not all(episode.linear for episode in episodes[4:])
    for episode in episodes[:4]:
        episode.linear = True
    by_turn, metrics = advantages("turn", episodes)
    whole, _ = advantages("trajectory", episodes)
    assert torch.equal(by_turn[4:], whole[4:]) and not torch.allclose(by_turn[:4], whole[:4])
    assert metrics["groups_by_trajectory"] == [0.5]


@pytest.mark.parametrize("fails_at", [0, 1])
def test_an_episode_that_does_not_fit_into_memory_is_divided(embedded_model, tmp_path, monkeypatch, fails_at):
    options = {"loss_type": "grpo", "sequence_packing": "prefix", **BY_TRAJECTORY, **UNCORRECTED, **ONE}
    trainer = make_trainer(embedded_model, tmp_path, **options)
    episodes = programs()
    loss, gradients, _ = measured(trainer, episodes, 16)
    plain, failures = type(trainer).__mro__[2]._get_per_token_logps_and_entropies, []

    def short_of_memory(self, model, ids, *args, **kwargs):
        several = self._loss_pass is not None and len(paths_of(self._loss_pass.inputs).ids) > 1
        if several and len(failures) <= fails_at:
            failures.append(1)
            raise torch.OutOfMemoryError("simulated")
        return plain(self, model, ids, *args, **kwargs)

    monkeypatch.setattr(type(trainer).__mro__[2], "_get_per_token_logps_and_entropies", short_of_memory)
    again, gradients_again, _ = measured(trainer, episodes, 64)
    assert len(failures) == fails_at + 1 and trainer.token_batches.budget <= 64 >> len(failures)
    assert again == pytest.approx(loss.item(), rel=1e-5) and relative_error(gradients_again, gradients) < 5e-6
