"""PPO on the shared trainer: what the critic reads, what it is trained on, and that both adapters get their gradients."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from errors import naming
from games import Gradients, draw_batch, loss_and_gradients, relative_error
from peft import LoraConfig, PeftModel
from ppo_games import Cut, make_ppo, wake
from recorded import recorded
from transformers import AutoModelForCausalLM
from trl.trainer.utils import use_adapter

from agile_trainers.checkpoints.integrity import mark_complete
from agile_trainers.trainers import MultiTurnPPOConfig, MultiTurnPPOTrainer

READ = {
    "state": lambda values, start, end: values[start],
    "final": lambda values, start, end: values[end],
    "mean": lambda values, start, end: sum(values[start + 1 : end + 1]) / (end - start),
}
"""A turn's value from those of the last prompt token and the completion."""
TOKENS = {"advantage_granularity": "token"}
SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
"""Values are read in micro-batches of unequal width."""


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def episodes(folder):
    records = recorded(folder)
    return sorted(records, key=lambda r: (r["group"], r["member"]))


def of(gradients, adapter):
    return {name: value for name, value in gradients.items() if f".{adapter}" in name}


@torch.no_grad()
def critic_of(trainer, record):
    """V at every position of one episode, prompt included: PEFT's own switch, an unpadded row, the head by hand."""
    ids = torch.tensor([record["prompt_ids"] + record["completion_ids"]])
    base = trainer.model.get_base_model()
    with use_adapter(trainer.model, "critic"):
        hidden = base.model(input_ids=ids).last_hidden_state[0]
    head = base.value_head.modules_to_save["critic"]
    return (hidden @ head.weight[0] + head.bias[0]).tolist()


def spans(record):
    ids = record["turn_ids"]
    return [(ids.index(k), len(ids) - ids[::-1].index(k)) for k in range(len(record["turns"]))]


def gae_by_hand(rewards, values, final, gamma, gae_lambda):
    """Advantages of one episode, last turn first."""
    advantages, following, running = [], final, 0.0
    for reward, value in zip(reversed(rewards), reversed(values)):
        running = reward + gamma * following - value + gamma * gae_lambda * running
        following = value
        advantages.insert(0, running)
    return advantages


@pytest.mark.parametrize("position", READ)
def test_every_number_of_the_batch_by_hand(embedded_model, tmp_path, position):
    """From the written episodes: where V is read, what it is, GAE, the critic's targets."""
    trainer = make_ppo(embedded_model, tmp_path, turn_value_position=position, gamma=0.9, gae_lambda=0.8, **SPLIT)
    wake(trainer)
    batch = draw_batch(trainer)
    records = episodes(tmp_path)
    assert len({record["stop_reason"] for record in records}) == 2, "no truncated or no terminated episode"
    for row, record in enumerate(records):
        values, width = critic_of(trainer, record), len(record["prompt_ids"])
        turns = [READ[position](values[width - 1 :], *span) for span in spans(record)]
        final = values[-1] if record["stop_reason"] == "max_turns" else 0.0
        if record["stop_reason"] == "max_turns":
            assert record["turn_ids"][-1] == -1, "the final observation is missing"
        advantages = gae_by_hand([turn["reward"] for turn in record["turns"]], turns, final, 0.9, 0.8)
        count = len(turns)
        torch.testing.assert_close(batch["old_values"][row, :count], torch.tensor(turns), rtol=1e-4, atol=1e-5)
        expected = torch.tensor([a + v for a, v in zip(advantages, turns)])
        torch.testing.assert_close(batch["value_targets"][row, :count], expected, rtol=1e-4, atol=1e-5)
        assert batch["value_weights"][row].tolist() == [1.0] * count + [0.0] * (4 - count)
        for (start, end), advantage in zip(spans(record), advantages):
            assert batch["advantages"][row, start:end].tolist() == pytest.approx([advantage] * (end - start), abs=1e-4)


def test_every_number_of_the_batch_by_hand_for_tokens(embedded_model, tmp_path):
    trainer = make_ppo(embedded_model, tmp_path, gamma=0.9, gae_lambda=0.8, **TOKENS, **SPLIT)
    wake(trainer)
    batch = draw_batch(trainer)
    for row, record in enumerate(episodes(tmp_path)):
        values, width = critic_of(trainer, record), len(record["prompt_ids"])
        turns = [values[width + start - 1] for start, _ in spans(record)]
        final = values[-1] if record["stop_reason"] == "max_turns" else 0.0
        advantages = gae_by_hand([turn["reward"] for turn in record["turns"]], turns, final, 0.9, 0.8)
        for (start, end), advantage, value in zip(spans(record), advantages, turns):
            own = values[width + start - 1 : width + end - 1]
            expected = [advantage + value - v for v in own]
            assert batch["advantages"][row, start:end].tolist() == pytest.approx(expected, abs=1e-4)
            assert batch["value_targets"][row, start:end].tolist() == pytest.approx(
                [advantage + value] * len(own), abs=1e-4
            )
            assert batch["value_weights"][row, start:end].tolist() == pytest.approx([1 / len(own)] * len(own))
    assert (batch["value_weights"][batch["turn_ids"] < 0] == 0).all()


@pytest.mark.parametrize("longest", [1, 2])
def test_auto_is_token_where_every_episode_has_one_turn(embedded_model, tmp_path, longest):
    """Bitwise, over two updates. A failed episode of two turns does not count as one."""
    weights = []
    for granularity in ("auto", "token" if longest == 1 else "turn"):
        trainer = make_ppo(
            embedded_model, tmp_path / granularity, environment=OnlyFailuresGoOn if longest == 1 else Cut,
            advantage_granularity=granularity, max_steps=2,
        )  # fmt: skip
        wake(trainer)
        trainer.train()
        weights.append({name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad})
        records = episodes(tmp_path / granularity)
        turns = {bool(r["error"]): len(r["turns"]) for r in sorted(records, key=lambda r: len(r["turns"]))}
        assert turns == ({False: 1, True: 2} if longest == 1 else {False: 4})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class OnlyFailuresGoOn(Cut):
    """One turn an episode; every third seed breaks in a second."""

    def reset(self, seed=None, options=None):
        observation = super().reset(seed, options)
        self.breaks = (seed or 0) % 3 == 0
        self.length = 2
        return observation

    def step(self, action):
        if self.turn == 1:
            raise RuntimeError("broken")
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, not self.breaks, truncated, info


def test_token_advantages_are_whitened_over_tokens_and_then_clipped(embedded_model, tmp_path):
    batches = []
    for name, changes in {"raw": {}, "white": {"whiten_advantages": True, "advantage_clip_range": 0.7}}.items():
        trainer = make_ppo(embedded_model, tmp_path / name, **TOKENS, **changes)
        wake(trainer)
        batches.append(draw_batch(trainer))
    actions = batches[0]["turn_ids"] >= 0
    raw, white = (batch["advantages"][actions] for batch in batches)
    expected = ((raw - raw.mean()) / raw.std()).clamp(-0.7, 0.7)
    assert (expected.abs() == 0.7).any() and (expected.abs() < 0.7).any()
    torch.testing.assert_close(white, expected, rtol=1e-4, atol=1e-5)
    assert (batches[1]["advantages"][~actions] == 0).all()


@pytest.mark.parametrize("changes", [{}, {"turn_value_position": "mean"}, TOKENS], ids=["state", "mean", "token"])
def test_the_value_loss_by_hand(embedded_model, tmp_path, changes):
    """Half the squared error of the new values, every turn once, over the turns of the step; and the policy's beside it."""
    trainer = make_ppo(embedded_model, tmp_path, vf_coef=0.3, **changes)
    wake(trainer)
    batch = draw_batch(trainer)
    trainer.critic.count_turns([batch])
    wake(trainer, seed=1)  # the critic has moved since
    loss, _ = loss_and_gradients(trainer, batch)
    total, turns = 0.0, 0
    for row, record in enumerate(episodes(tmp_path)):
        values, width = critic_of(trainer, record), len(record["prompt_ids"])
        for k, (start, end) in enumerate(spans(record)):
            turns += 1
            if changes == TOKENS:
                errors = [values[width + t - 1] - batch["value_targets"][row, t].item() for t in range(start, end)]
            elif changes:
                errors = [
                    sum(values[width + start : width + end]) / (end - start) - batch["value_targets"][row, k].item()
                ]
            else:
                errors = [values[width + start - 1] - batch["value_targets"][row, k].item()]
            total += sum(error**2 / 2 for error in errors) / len(errors)
    assert trainer._metrics["train"]["value/loss"][-1] == pytest.approx(total / turns, rel=1e-4)
    trainer.args.vf_coef = 0.0
    policy_loss, _ = loss_and_gradients(trainer, batch)
    assert (loss - policy_loss).item() == pytest.approx(0.3 * total / turns, rel=1e-3)


def test_the_logged_value_metrics_by_hand(embedded_model, tmp_path):
    trainer = make_ppo(embedded_model, tmp_path, per_device_train_batch_size=16)
    wake(trainer)
    batch = draw_batch(trainer)
    kept = batch["value_weights"] > 0
    values, targets = batch["old_values"][kept].double(), batch["value_targets"][kept].double()
    metrics = {name: trainer._metrics["train"][f"value/{name}"][-1] for name in ("mean", "error", "explained_variance")}
    assert metrics["mean"] == pytest.approx(values.mean().item(), abs=1e-5)
    assert metrics["error"] == pytest.approx((values - targets).square().mean().sqrt().item(), rel=1e-5)
    residual, spread = ((x - x.mean()).square().sum() for x in (targets - values, targets))
    assert metrics["explained_variance"] == pytest.approx((1 - residual / spread).item(), rel=1e-4)


class Fails(Cut):
    """Every third seed breaks in its second turn."""

    def reset(self, seed=None, options=None):
        self.broken = (seed or 0) % 3 == 0
        observation = super().reset(seed, options)
        self.length = max(self.length, 2)
        return observation

    def step(self, action):
        if self.broken and self.turn == 1:
            raise RuntimeError("broken")
        return super().step(action)


def test_failed_episodes_are_not_trained_on(embedded_model, tmp_path):
    """Neither adapter: a batch whose failed episodes got other values and targets has the same loss and gradients."""
    trainer = make_ppo(embedded_model, tmp_path, environment=Fails, per_device_train_batch_size=16)
    wake(trainer)
    batch = draw_batch(trainer)
    failed = torch.tensor([r["stop_reason"] == "environment_error" for r in episodes(tmp_path)])
    assert 0 < failed.sum() < 16
    assert (batch["value_weights"][failed] == 0).all() and (batch["value_weights"][~failed, 0] == 1).all()
    trainer.critic.count_turns([batch])
    assert batch["turns_in_step"] == sum(len(r["turns"]) for r in episodes(tmp_path) if not r["error"])
    loss, gradients = loss_and_gradients(trainer, batch)
    for name in ("old_values", "value_targets", "advantages"):
        batch[name] = torch.where(failed[:, None], 7.0, batch[name])
    other_loss, other_gradients = loss_and_gradients(trainer, batch)
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


@pytest.mark.parametrize("changes", [{}, {"turn_value_position": "mean"}, TOKENS], ids=["state", "mean", "token"])
def test_values_elsewhere_change_nothing(embedded_model, tmp_path, changes):
    """Bitwise: what the critic says at tokens and turns that do not count (observations, padding)."""
    trainer = make_ppo(embedded_model, tmp_path, value_clip_range=0.2, **changes)
    wake(trainer)
    batch = draw_batch(trainer)
    trainer.critic.count_turns([batch])
    per_token = batch["value_offsets"].shape == batch["turn_ids"].shape
    outside = batch["turn_ids"] < 0 if per_token else batch["value_weights"] == 0
    assert outside.any()
    loss, gradients = loss_and_gradients(trainer, batch)
    forward = trainer.model.forward

    def poisoned(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs.state_values = outputs.state_values + 5 * outside.view(outputs.state_values.shape)
        return outputs

    trainer.model.forward = poisoned
    unweighted = batch["value_weights"] == 0
    for name in ("old_values", "value_targets"):
        batch[name] = torch.where(unweighted, 3.0, batch[name])
    other_loss, other_gradients = loss_and_gradients(trainer, batch)
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def awake_steps(model, folder, **changes):
    """A trainer whose critic is awake, and its gradients, in two steps unless told otherwise."""
    gradients = Gradients()
    trainer = make_ppo(model, folder, callbacks=[gradients], learning_rate=1e-3, **{"max_steps": 2, **changes})
    wake(trainer)
    trainer.train()
    return trainer, gradients.steps


@pytest.fixture(scope="module")
def plain_steps(embedded_model, tmp_path_factory):
    return awake_steps(embedded_model, tmp_path_factory.mktemp("plain"))[1]


@pytest.mark.parametrize(
    ("beta", "checkpointing", "epochs"),
    [(0.0, False, 1), (0.0, True, 1), (0.1, True, 1), (0.1, None, 2)],
    ids=["non-reentrant", "reentrant", "reference, reentrant", "reference, two epochs"],
)
def test_both_adapters_train_in_every_step(embedded_model, tmp_path, plain_steps, beta, checkpointing, epochs):
    """Reference passes, which leave the critic frozen, and checkpointing included: the gradients are those without."""
    trainer, steps = awake_steps(
        embedded_model, tmp_path, beta=beta, num_iterations=epochs, gradient_checkpointing=checkpointing is not None,
        gradient_checkpointing_kwargs=None if checkpointing is None else {"use_reentrant": checkpointing},
    )  # fmt: skip
    adapters = {n for n, _ in trainer.model.named_parameters() if ".default" in n or ".critic" in n}
    for plain, this in zip(plain_steps, steps, strict=True):
        assert this.keys() == adapters and all(gradient.any() for gradient in this.values())
        if beta == 0.0:
            assert relative_error(this, plain) < 1e-5
    # The KL term is the policy's own.
    assert relative_error(of(steps[0], "critic"), of(plain_steps[0], "critic")) < 1e-5


def test_a_critic_that_is_read_before_the_update_is_trainable_after_the_reference(embedded_model, tmp_path):
    """A critic of the last layers does not learn while it is read; the reference's pass leaves it frozen."""
    _, steps = awake_steps(embedded_model, tmp_path, beta=0.1, critic_layers=1, max_steps=1)
    assert steps and all(any(gradient.any() for name, gradient in step.items() if ".critic" in name) for step in steps)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "loss_type": "grpo",
            "importance_sampling_level": "turn",
            "turn_value_position": "mean",
            "beta": 0.1,
            "value_clip_range": 0.1,
        },
        {"loss_type": "dapo", "advantage_clip_range": 0.5, "whiten_advantages": True, **TOKENS},
    ],
    ids=["turn", "token"],
)
def test_micro_batches_and_accumulation_change_nothing(embedded_model, tmp_path, changes):
    """1 x 8 and 4 x 2: the same episodes, the same gradient of policy and critic."""
    results = []
    for accumulation in (1, 4):
        folder, gradients = tmp_path / str(accumulation), Gradients()
        trainer = make_ppo(
            embedded_model,
            folder,
            callbacks=[gradients],
            per_device_train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
            **changes,
        )
        wake(trainer)
        trainer.train()
        results.append((episodes(folder), gradients.steps))
    for records, steps in results[1:]:
        assert [r["completion_ids"] for r in records] == [r["completion_ids"] for r in results[0][0]]
        assert len(steps) == 1
        for adapter in ("default", "critic"):
            assert relative_error(of(steps[0], adapter), of(results[0][1][0], adapter)) < 1e-5


def test_the_value_loss_divides_by_the_turns_of_its_own_step(embedded_model, tmp_path):
    """Two optimizer steps on one generation batch: each counts the turns of its own two micro-batches."""
    trainer = make_ppo(
        embedded_model, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, steps_per_generation=4
    )
    drawn = {name: value for name, value in draw_batch(trainer).items() if name != "turns_in_step"}
    batches = [{**drawn, "value_weights": torch.ones(2, turns)} for turns in (1, 2, 3, 4)]
    trainer.critic.count_turns(batches[:2])
    assert [int(batch.get("turns_in_step", -1)) for batch in batches] == [6, 6, -1, -1]


def test_warm_up_trains_the_critic_and_leaves_the_policy_exactly_as_it_was(embedded_model, tmp_path):
    kept = []

    class Snapshots(Gradients):
        def on_step_end(self, args, state, control, **kwargs):
            kept.append({n: p.detach().clone() for n, p in kwargs["model"].named_parameters() if p.requires_grad})

    trainer = make_ppo(
        embedded_model, tmp_path, callbacks=[Snapshots()], optim="adamw_torch", learning_rate=1e-2, max_steps=3,
        critic_warmup_steps=2, entropy_coef=0.01, beta=0.1,
    )  # fmt: skip
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    for step, parameters in enumerate(kept):
        moved = {n for n in before if not torch.equal(parameters[n], before[n])}
        # At first a critic's head is zero and so is LoRA's B: each passes nothing on to the part below it.
        critic = ("modules_to_save", "lora_B", "lora_A")[: step + 1]
        expected = {n for n in before if ".critic" in n and any(part in n for part in critic)}
        if step == 2:
            expected |= {n for n in before if ".lora_B.default" in n}
        assert moved == expected


def test_the_critic_has_a_learning_rate_of_its_own(embedded_model, tmp_path):
    """Plain SGD: each parameter moves by its own rate times its gradient, and the schedule scales both.

    Also where an adapter of an embedding has parameters of another name than those of linear layers.
    """
    gradients, lora = Gradients(), {"target_modules": ["q_proj", "embed_tokens"]}
    trainer = make_ppo(
        embedded_model, tmp_path, callbacks=[gradients], lora=lora, learning_rate=0.1, critic_learning_rate=0.03,
        lr_scheduler_type="constant_with_warmup", warmup_steps=2, max_steps=2,
    )  # fmt: skip
    wake(trainer)
    parameters = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in parameters.items()}
    trainer.train()
    second = gradients.steps[1]  # the first step is taken at rate 0
    for name, parameter in parameters.items():
        rate = 0.5 * (0.03 if ".critic" in name else 0.1)
        torch.testing.assert_close(parameter.detach(), before[name] - rate * second[name], rtol=1e-5, atol=1e-7)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(embedded_model, tmp_path):
    """Bitwise, both adapters and the head; and the folder holds what PEFT loads.

    A critic of all layers is resumed in ``test_checkpoint.py``.
    """
    changes = {
        "optim": "adamw_torch", "learning_rate": 1e-2, "critic_learning_rate": 2e-2, "max_steps": 2, "beta": 0.1,
        "critic_layers": 1,
    }  # fmt: skip
    whole = make_ppo(embedded_model, tmp_path / "whole", save_strategy="steps", save_steps=1, **changes)
    whole.train()
    resumed = make_ppo(embedded_model, tmp_path / "resumed", **changes)
    wake(resumed)  # so that only what the checkpoint holds can bring it back
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    expected = {n: p for n, p in whole.model.named_parameters() if p.requires_grad}
    assert any(".critic" in name for name in expected)
    for name, parameter in resumed.model.named_parameters():
        assert parameter.requires_grad == (name in expected), name
        if name in expected:
            assert torch.equal(parameter, expected[name]), name

    base = AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float32)
    policy = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "whole" / "checkpoint-2")
    ids = torch.arange(20)[None]
    torch.testing.assert_close(policy(ids).logits, whole.model.eval()(ids).logits, rtol=0, atol=1e-5)
    assert (tmp_path / "whole" / "checkpoint-2" / "critic" / "adapter_model.safetensors").exists()


def test_the_best_checkpoint_brings_back_its_critic(embedded_model, tmp_path):
    trainer = make_ppo(embedded_model, tmp_path)
    wake(trainer)
    trainer.save_model(str(tmp_path / "best"))
    mark_complete(tmp_path / "best")
    expected = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    wake(trainer, seed=1)
    trainer.state.best_model_checkpoint = str(tmp_path / "best")
    trainer._load_best_model()
    parameters = dict(trainer.model.named_parameters())
    assert all(torch.equal(parameters[name], value) for name, value in expected.items())


def test_a_value_that_has_moved_far_enough_gets_no_gradient(embedded_model, tmp_path):
    trainer = make_ppo(embedded_model, tmp_path, value_clip_range=0.1)
    wake(trainer)
    batch = draw_batch(trainer)
    trainer.critic.count_turns([batch])
    # Every value stands between its old one, far away, and its target.
    values = batch["old_values"].clone()
    batch["old_values"], batch["value_targets"] = values - 1, values + 1
    _, gradients = loss_and_gradients(trainer, batch)
    assert not any(gradient.any() for gradient in of(gradients, "critic").values())
    assert any(gradient.any() for gradient in of(gradients, "default").values())
    assert trainer._metrics["train"]["value/clip_ratio"][-1] == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gae_lambda": 1.5}, r"gae_lambda.*1\.5"),
        ({"vf_coef": 0.0}, r"vf_coef.*0\.0"),
        ({"value_clip_range": -1.0}, r"value_clip_range.*-1\.0"),
        ({"critic_learning_rate": 0.0}, r"critic_learning_rate.*0\.0"),
        ({"critic_warmup_steps": -1}, "critic_warmup_steps.*-1"),
        ({"critic_warmup_steps": 2, "weight_decay": 0.1}, "weight_decay=0.1.*critic_warmup_steps=2"),
        ({"turn_value_position": "last"}, "turn_value_position.*'state'.*'last'"),
        ({"advantage_granularity": "trajectory"}, "advantage_granularity.*'turn', 'token'.*'trajectory'"),
        ({"num_generations": 4}, "num_generations=4 "),
    ],
)
def test_bad_options(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        MultiTurnPPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **changes)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"scale_rewards": "batch"}, ["scale_rewards='batch'"]),
        ({"importance_sampling_level": "turn", **TOKENS}, ["importance_sampling_level='token'", "'turn'", "'token'"]),
        ({"turn_value_position": "mean", **TOKENS}, ["turn_value_position='state'", "'mean'", "'token'"]),
        (
            {"importance_sampling_level": "turn", "advantage_granularity": "auto"},
            ["advantage_granularity='auto'", "importance_sampling_level='token'", "'turn'"],
        ),
        (
            {"turn_value_position": "final", "advantage_granularity": "auto"},
            ["advantage_granularity='auto'", "turn_value_position='state'", "'final'"],
        ),
    ],
)
def test_options_that_contradict_each_other(embedded_model, tmp_path, changes, names):
    with pytest.raises(ValueError, match=naming(*names)):
        make_ppo(embedded_model, tmp_path, **changes)


def test_what_the_trainer_cannot_do_without(embedded_model, tmp_path):
    args = MultiTurnPPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=1)
    with pytest.raises(ValueError, match="peft_config=LoraConfig"):
        MultiTurnPPOTrainer(model=str(embedded_model), args=args, environment=Cut)
    with pytest.raises(ValueError, match="needs an environment"):
        MultiTurnPPOTrainer(model=str(embedded_model), args=args, peft_config=LoraConfig())
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="an optimizer made before cannot"):
        MultiTurnPPOTrainer(
            model=str(embedded_model),
            args=args,
            environment=Cut,
            peft_config=LoraConfig(),
            optimizers=(optimizer, None),
        )


def test_a_value_read_after_the_action_is_warned_of(embedded_model, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(
        "agile_trainers.step.critic.logger.warning", lambda message, *args: warnings.append(message % args)
    )
    make_ppo(embedded_model, tmp_path, turn_value_position="final")
    assert len(warnings) == 1 and "'final'" in warnings[0] and "biased" in warnings[0]


class Ended(Cut):
    """Its end is rewarded where a limit cuts it short."""

    def end(self, reason):
        return 0.25


@pytest.mark.parametrize(("environment", "bootstraps"), [(Ended, True), (Cut, False)])
def test_an_end_at_a_limit_is_not_bootstrapped(embedded_model, tmp_path, environment, bootstraps):
    """By default, and where the environment rewarded it: the value after the last turn is 0, by hand."""
    options = {"environment": environment, "bootstrap_at_limits": bootstraps, "gamma": 0.9, "gae_lambda": 0.8}
    assert MultiTurnPPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False).bootstrap_at_limits is False
    trainer = make_ppo(embedded_model, tmp_path, **options)
    wake(trainer)
    batch = draw_batch(trainer)
    records = episodes(tmp_path)
    assert {record["stop_reason"] for record in records} == {"max_turns", "terminated"}
    for row, record in enumerate(records):
        assert (record["turn_ids"][-1] == -1) is (bootstraps and record["stop_reason"] == "max_turns")
        values, width = critic_of(trainer, record), len(record["prompt_ids"])
        turns = [values[width + start - 1] for start, _ in spans(record)]
        advantages = gae_by_hand([turn["reward"] for turn in record["turns"]], turns, 0.0, 0.9, 0.8)
        for (start, end), advantage in zip(spans(record), advantages):
            assert batch["advantages"][row, start:end].tolist() == pytest.approx([advantage] * (end - start), abs=1e-4)
