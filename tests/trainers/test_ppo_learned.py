"""A critic that is trained while its values are read: the same gradients and metrics as with a second pass in the update."""

from __future__ import annotations

import pytest
import torch
from games import Gradients, relative_error
from ppo_games import make_ppo, wake

from agile_trainers.step.critic import Critic
from agile_trainers.trainers import MultiTurnPPOTrainer

CASES = {
    "accumulation, clipping": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "value_clip_range": 0.2,
        "mask_truncated_completions": True,
        "sequence_packing": "none",
    },
    "tokens, several packed passes": {
        "advantage_granularity": "token",
        "whiten_advantages": True,
        "max_tokens_per_micro_batch": 150,
        "sequence_packing": "prefix",
    },
    "means, a reference, reentrant checkpoints": {
        "turn_value_position": "mean",
        "beta": 0.1,
        "kl_placement": "reward",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "vf_coef": 0.3,
    },
}
OPTIONS = {"max_steps": 2, "learning_rate": 1e-30, "diagnosis_interval": 0}
"""Two updates from the same weights: fp32 does not see a step of this length."""
DIFFERENT = ("step", "step_time", "num_tokens", "rollout_tokens_per_second", "value/clip_ratio")
"""What counts on, and the rounding of two equal values."""


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_metrics_are_those_of_a_second_pass(embedded_model, tmp_path, case, monkeypatch):
    gradients, calls = Gradients(), []
    trainer = make_ppo(embedded_model, tmp_path, callbacks=[gradients], **OPTIONS, **CASES[case])
    wake(trainer)
    trainer.model.get_base_model().model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    episodes = trainer.rollout()
    with monkeypatch.context() as patch:
        patch.setattr(Critic, "_learns_from", lambda self, model, step: False)
        metrics = [trainer.update(episodes)]
        assert not trainer.critic.learned
    calls.clear()
    metrics.append(trainer.update(episodes))
    assert trainer.critic.learned
    if "beta" not in CASES[case]:
        assert all(calls), "a pass without gradient"
    for adapter in (".default", ".critic"):
        parts = [{name: g for name, g in step.items() if adapter in name} for step in gradients.steps]
        assert relative_error(*parts) < 1e-6 and all(g.any() for g in parts[0].values())
    second, ours = (
        {n: value for n, value in found.items() if n not in DIFFERENT and not n.startswith("time")} for found in metrics
    )
    assert ours == pytest.approx(second, rel=1e-5, abs=1e-6)
    assert ours["value/loss"] > 0.01 and ours["value/error"] > 0.1


def test_targets_of_an_older_policy_are_those_of_a_second_pass(embedded_model, tmp_path, monkeypatch):
    """With a batch ahead, whose targets need the ratios of its rows: the weights after four updates."""
    found, learned = [], []
    for name in ("second pass", "one pass"):
        options = {"batches_ahead": 1, "drift_correction": "decision_truncate", "max_steps": 4, "learning_rate": 0.03}
        trainer = make_ppo(embedded_model, tmp_path / name, **options)
        wake(trainer)
        with monkeypatch.context() as patch:
            if not found:
                patch.setattr(Critic, "_learns_from", lambda self, model, step: False)
            rules = trainer.critic._targets_of
            trainer.critic._targets_of = lambda turns, rules=rules: learned.append(turns.ratios) or rules(turns)
            trainer.train()
        found.append({n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad})
    assert any(ratios is not None and (ratios - 1).abs().max() > 0.05 for ratios in learned)
    assert relative_error(*found) < 1e-5


def test_passes_that_do_not_fit_are_made_smaller(embedded_model, tmp_path):
    """Also where memory runs out in a backward pass, after others: every row counts once."""
    gradients, fails = Gradients(), []
    trainer = make_ppo(embedded_model, tmp_path, callbacks=[gradients], sequence_packing="none", **OPTIONS)
    wake(trainer)
    episodes = trainer.rollout()
    trainer.token_batches.budget = budget = 400
    trainer.update(episodes)

    def fail(_):
        fails.append(trainer.token_batches.budget)
        raise torch.OutOfMemoryError

    def run_out(_module, args, output):
        if len(fails) < 2 and output.requires_grad and 1 < len(args[0]) < 4:
            output.register_hook(fail)

    trainer.model.get_base_model().model.layers[0].mlp.down_proj.register_forward_hook(run_out)
    trainer.update(episodes)
    assert fails == [budget, budget // 2] and trainer.token_batches.budget == budget // 4
    assert relative_error(*reversed(gradients.steps)) < 1e-6


@pytest.mark.parametrize(
    "options",
    [{"num_iterations": 2}, {"steps_per_generation": 2, "per_device_train_batch_size": 2}, {"critic_layers": 1}],
    ids=["iterations", "steps", "layers"],
)
def test_a_critic_that_changes_before_the_batch_is_used_up_is_read_again(embedded_model, tmp_path, options):
    gradients = Gradients()
    trainer = make_ppo(embedded_model, tmp_path, callbacks=[gradients], max_steps=2, max_turns=1, **options)
    wake(trainer)
    trainer.train()
    assert not trainer.critic.learned
    assert all(step[name].any() for step in gradients.steps for name in step if ".critic" in name)


def test_a_credit_rule_says_whether_targets_depend_on_their_row_alone():
    class Other(MultiTurnPPOTrainer):
        def assign_credit(self, turns):
            return super().assign_credit(turns)

    class Declared(MultiTurnPPOTrainer):
        assign_credit, targets_by_row = Other.assign_credit, True

    class Inherits(MultiTurnPPOTrainer):
        pass

    assert [kind.targets_by_row for kind in (Other, Declared, Inherits)] == [False, True, True]
