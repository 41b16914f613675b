"""Sampler and trainer compute the same log-probabilities, whatever the model's architecture: positions, noise, ropes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from games import Chatter, Gradients, draw_batch, make_trainer, relative_error
from ppo_games import make_ppo, wake
from recorded import recorded
from trl.trainer.utils import use_adapter

from agile_trainers.embedded import make_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import architectures

LEARNED_POSITIONS = ["gpt2", "gpt_neo", "gpt_bigcode", "opt"]


def saved(name: str, folder: Path, **changes) -> Path:
    """A tiny model of this architecture and its tokenizer, as a folder."""
    architectures.make_model(name, **changes).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.parametrize("name", [*LEARNED_POSITIONS, "qwen2"])
def test_padding_moves_no_position(tmp_path, name):
    """Scored in one padded batch, each row has the log-probs that the model gives it alone, without padding."""
    model = saved(name, tmp_path)
    trainer = make_trainer(model, tmp_path, lora=False, num_iterations=2)
    batch = draw_batch(trainer)
    assert len({int(row.sum()) for row in batch["prompt_mask"]}) > 1, "all prompts have one length: the test is empty"
    alone = architectures.make_model(name).eval()
    for row in range(8):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row] > 0]
        completion = batch["completion_ids"][row][batch["completion_mask"][row] > 0]
        with torch.no_grad():
            logits = alone(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]
        scored, actions = (batch[n][row, : len(completion)] for n in ("old_per_token_logps", "turn_ids"))
        torch.testing.assert_close(scored[actions >= 0], expected[actions >= 0], rtol=0, atol=1e-5)
        assert not scored[actions < 0].any(), "observations are not scored"


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo"])
def test_micro_batches_change_no_gradient_with_learned_positions(tmp_path, name):
    model, steps = saved(name, tmp_path), []
    for size in (8, 1):
        gradients = Gradients()
        trainer = make_trainer(
            model,
            tmp_path / str(size),
            lora=False,
            callbacks=[gradients],
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
        )
        trainer.train()
        steps.append(gradients.steps[0])
    assert relative_error(steps[1], steps[0]) < 1e-5


def value_of(trainer, record, position):
    """V at a position of one episode: PEFT's own switch, an unpadded row, the head by hand."""
    base = trainer.model.get_base_model()
    with torch.no_grad(), use_adapter(trainer.model, "critic"):
        hidden = base.base_model(torch.tensor([record["prompt_ids"] + record["completion_ids"]])).last_hidden_state
        return (hidden[0, position] @ base.value_head.modules_to_save["critic"].weight[0]).item()


def test_padding_moves_no_position_of_the_critic(tmp_path):
    """Values of a padded batch are the critic's of each episode alone; those of an update are the same."""
    trainer = make_ppo(
        saved("gpt2", tmp_path), tmp_path, environment=Chatter, lora={"target_modules": ["c_attn", "c_fc"]}
    )
    wake(trainer)
    trainer.model.get_base_model().value_head.modules_to_save["critic"].bias.data.zero_()
    batch = draw_batch(trainer)
    assert len({int(row.sum()) for row in batch["prompt_mask"]}) > 1, "all prompts have one length: the test is empty"
    records = sorted(recorded(tmp_path), key=lambda record: (record["group"], record["member"]))
    for row, record in enumerate(records):
        for turn in range(len(record["turns"])):
            expected = value_of(trainer, record, len(record["prompt_ids"]) + record["turn_ids"].index(turn) - 1)
            assert batch["old_values"][row, turn].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    trainer.critic.count_turns([batch])
    trainer._compute_loss(trainer.model, {**batch, "value_targets": batch["old_values"]})
    assert trainer._metrics["train"]["value/loss"][-1] < 1e-9


NOISY = {
    "llama": {"attention_dropout": 0.1},
    "mixtral": {"router_jitter_noise": 0.1},
    "seed_oss": {},  # as shipped: attention_dropout and residual_dropout .1
    "opt": {"layerdrop": 0.5},
    "falcon": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "phimoe": {"input_jitter_noise": 0.1, "router_aux_loss_coef": 0.0},  # its router samples experts
}


@pytest.mark.parametrize("name", NOISY)
def test_every_ratio_is_one_before_the_first_update_of_a_model_with_noise(tmp_path, name):
    """Rates kept as floats are off too, when scoring and when training."""
    row = architectures.compare(name, tmp_path, **NOISY[name])
    assert row.accepted and row.tokens > 20
    assert row.mismatch < 1e-5


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "adapters"])
def test_reference_and_critic_have_no_noise(tmp_path, whole):
    """In training mode the reference starts as the policy, and the critic's values of an update are those of the rollout."""
    model = saved("llama", tmp_path, attention_dropout=0.1)
    options = {"beta": 0.1, "num_iterations": 2}
    if whole:
        trainer = make_trainer(model, tmp_path, lora=False, **options)
    else:
        trainer = make_ppo(model, tmp_path, lora={"lora_dropout": 0.1}, reference_adapter=True, **options)
        wake(trainer)
        trainer.update_reference()
    trainer.is_in_train = False
    batch = draw_batch(trainer)
    actions = batch["turn_ids"] >= 0
    difference = (batch["ref_per_token_logps"] - batch["old_per_token_logps"])[actions].abs().max()
    assert difference < 1e-5
    if not whole:
        trainer.critic.count_turns([batch])
        trainer._compute_loss(trainer.model, {**batch, "value_targets": batch["old_values"]})
        assert trainer._metrics["train"]["value/loss"][-1] < 1e-9


def test_rates_that_forward_passes_read_from_the_configuration_are_zero(tmp_path):
    trainer = make_trainer(saved("falcon", tmp_path, attention_dropout=0.1), tmp_path, lora=False)
    assert trainer.model.config.attention_dropout == 0.0
    trainer = make_trainer(
        saved("falcon", tmp_path / "kept", attention_dropout=0.1), tmp_path, lora=False, disable_dropout=False
    )
    assert trainer.model.config.attention_dropout == 0.1


def test_a_rope_that_depends_on_length_ends_conversations_where_it_changes(tmp_path):
    """Longer rows would change the factors of their batch mates, and of the keys that are kept already."""
    row = architectures.compare("phi3 longrope", tmp_path)
    assert row.tokens > 20 and row.mismatch < 1e-5
    model = saved("phi3 longrope", tmp_path)
    for asked in (None, 48, 40):
        trainer = make_trainer(model, tmp_path, lora=False, max_model_length=asked)
        assert trainer.engine.limits.max_model_length == (asked or 48)
    with pytest.raises(ValueError, match=r"max_model_length=49.*longrope.*original_max_position_embeddings=48"):
        make_trainer(model, tmp_path, lora=False, max_model_length=49)


def test_what_the_way_out_names_works(tmp_path):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48, "rope_theta": 1e4}
    model = saved("phi3 longrope", tmp_path)
    trainer = make_trainer(
        model, tmp_path, lora=False, max_model_length=192, model_init_kwargs={"rope_parameters": rope}
    )
    assert trainer.engine.limits.max_model_length == 192
    assert trainer.model.config.rope_parameters["rope_type"] == "yarn"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("recurrent_gemma", {}, "RecurrentGemmaForCausalLM runs its recurrence over padding"),
        ("phimoe", {"router_aux_loss_coef": 0.01}, "PhimoeForCausalLM.*num_experts.*router_aux_loss_coef=0.0"),
    ],
)
def test_what_cannot_be_trained_faithfully_is_refused_at_construction(tmp_path, name, changes, message):
    row = architectures.compare(name, tmp_path, **changes)
    assert re.search(message, row.refused)


@pytest.mark.parametrize("name", ["llama4_text", "mamba2", "gpt_bigcode"])  # the last has an episode without advantage
def test_sampled_scored_and_trained_agree(tmp_path, name):
    """``make architectures`` compares the others."""
    row = architectures.compare(name, tmp_path)
    assert row.accepted and row.mismatch < 1e-4


@pytest.mark.parametrize("tied", [False, True])
def test_trainable_tokens(tmp_path, tied):
    """PPO trains them for the policy alone; where they reach a tied head, which TRL cannot score, they are refused."""
    seen = sorted(set(make_tokenizer()("start again more").input_ids))
    model, lora = saved("qwen2", tmp_path, tie_word_embeddings=tied), {"trainable_token_indices": seen}
    if tied:
        with pytest.raises(ValueError, match="trainable_token_indices reach the output head"):
            make_ppo(model, tmp_path, lora=lora)
        return
    trainer = make_ppo(model, tmp_path, lora=lora, max_new_tokens=2)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    moved = [name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])]
    assert any(name.endswith("trainable_tokens_delta.default") for name in moved)
    assert all(".default" in name or ".critic" in name for name in moved)
