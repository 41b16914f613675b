"""Rows split into forward passes by tokens: loss, gradient and metrics stay those of the micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpointed_runs import SAVING, make
from errors import naming
from games import Chatter, Gradients, loss_and_gradients, make_trainer, relative_error
from ppo_games import make_ppo, wake
from split_passes import WHOLE, check_equal, drawn, measured

from agile_trainers.step.token_batches import (
    backward_bytes_per_token,
    bytes_to_come,
    fitting_tokens,
    in_number,
    split_packed,
    split_padded,
)
from agile_trainers.train_batch import Pass, TrainBatch
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def listed(passes):
    return [rows.tolist() for rows in passes]


def test_padded_rows_are_split_by_rows_times_columns():
    none, lengths = torch.zeros(6, dtype=torch.long), torch.tensor([2, 3, 4, 4, 9, 30])
    assert listed(split_padded(none, lengths, 12)) == [[0, 1, 2], [3], [4], [5]]
    assert listed(split_padded(lengths, none, 12)) == [[0, 1, 2], [3], [4], [5]]
    # Prompts are padded on the left and completions on the right: 9 and 1, 1 and 9 are two rows of 18 columns.
    assert listed(split_padded(torch.tensor([9, 1]), torch.tensor([1, 9]), 35)) == [[0], [1]]
    assert listed(split_padded(torch.tensor([9, 1]), torch.tensor([1, 9]), 36)) == [[0, 1]]
    # 1 + 3 tokens are 4 + 4 columns.
    assert listed(split_padded(torch.tensor([1, 1]), torch.tensor([3, 3]), 15, multiple=4)) == [[0], [1]]
    assert listed(split_padded(torch.tensor([1, 1]), torch.tensor([3, 3]), 16, multiple=4)) == [[0, 1]]


def test_packed_rows_are_split_by_distinct_tokens():
    def packed(lengths, shared, budget, multiple=1):
        return listed(split_packed(torch.tensor(lengths), torch.tensor(shared), budget, multiple))

    # 10, then 4 new, then 3 new of 5: the pass is full at 14.
    assert packed([10, 10, 5], [0, 6, 2], 14) == [[0, 1], [2]]
    # A row that exceeds the budget alone has a pass of its own, however much another shares with it.
    assert packed([12, 14, 14, 6], [0, 10, 14, 0], 12) == [[0], [1], [2], [3]]
    assert packed([5, 5], [0, 4], 6, multiple=4) == [[0], [1]] and packed([5, 5], [0, 4], 8, multiple=4) == [[0, 1]]


def test_packed_rows_that_share_most_of_their_tokens_stay_together_beyond_a_fast_pass():
    def packed(shared, budget, fast):
        lengths, shared = torch.full((len(shared),), 10), torch.tensor(shared)
        return listed(split_packed(lengths, shared, budget, fast=fast))

    # Eight rows of 8 shared and 2 own tokens are 24 distinct ones; passes of 12 would read the shared ones four times.
    assert packed([0] + [8] * 7, 100, 12) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    # The budget holds whatever they share, and half of a row is not most of it.
    assert packed([0] + [8] * 7, 16, 12) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert packed([0, 5, 5], 100, 14) == [[0], [1], [2]]


class LongPrompt(Chatter):
    """Chatter whose first observation is long and the same in every episode, or of very different lengths."""

    same = True

    def reset(self, seed=None, options=None):
        _, info = super().reset(seed, options)
        return "a prompt that every row shares " * (3 if self.same else 1 + (seed or 0) % 5), info


class LongPrompts(LongPrompt):
    same = False


def passes_of(trainer, batch, budget):
    """Rows and tokens of each forward pass of the loss."""
    trainer.token_batches.budget = budget
    whole = TrainBatch.from_trl(batch)
    rows = [len(part.batch.prompt_ids) for part in trainer.token_batches.of(whole, whole)]
    tokens = []
    handle = trainer.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    loss_and_gradients(trainer, batch)
    handle.remove()
    assert sum(rows) == 8 and len(rows) == len(tokens)
    return list(zip(rows, tokens))


@pytest.mark.parametrize(
    ("environment", "packing", "multiple"),
    [(LongPrompt, "prefix", None), (LongPrompt, "auto", None), (LongPrompts, "none", None), (LongPrompts, "none", 32)],
)
def test_no_pass_of_several_rows_exceeds_the_budget(embedded_model, tmp_path, environment, packing, multiple):
    trainer = make_trainer(
        embedded_model, tmp_path, environment=environment, sequence_packing=packing, skip_zero_advantage=False,
        pad_to_multiple_of=multiple,
    )  # fmt: skip
    batch = drawn(trainer)
    assert trainer.packer.packs == (packing == "prefix") or packing == "auto"
    several = 0
    for budget in (1, 100, 150, 200, 300, 400, 600, 1000):
        found = passes_of(trainer, batch, budget)
        assert all(rows == 1 or tokens <= budget for rows, tokens in found), (budget, found)
        several += any(1 < rows < 8 for rows, _ in found)
    assert several > 1


def test_rows_whose_packing_does_not_pay_are_split_as_padded(embedded_model, tmp_path, monkeypatch):
    """A pass decides by itself whether it is packed: what was split by distinct tokens may be padded."""
    trainer = make_trainer(
        embedded_model, tmp_path, environment=LongPrompt, sequence_packing="prefix", skip_zero_advantage=False
    )
    batch = drawn(trainer)
    monkeypatch.setattr(trainer.packer, "_pays", lambda mask, trie: len(mask) % 2 == 0)
    kinds = set()
    for budget in (150, 200, 300, 400, 600):
        found = passes_of(trainer, batch, budget)
        assert all(rows == 1 or tokens <= budget for rows, tokens in found), (budget, found)
        kinds |= {rows % 2 for rows, _ in found if rows > 1}
    assert kinds


def test_every_rank_gets_the_number_of_the_largest():
    passes = [Pass(torch.arange(4)), Pass(torch.tensor([4, 5]))]
    assert [p.rows.tolist() for p in in_number(passes, 3)] == [[0, 1], [2, 3], [4, 5]]
    assert [p.rows.tolist() for p in in_number([Pass(torch.tensor([7]))], 3)] == [[7], [], []]
    assert in_number(passes, 2) == passes


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_gradient_is_that_of_one_pass(embedded_model, tmp_path, loss_type):
    """With old log-probabilities, a KL term and rows without advantage."""
    options = {"beta": 0.1} if loss_type != "vespo" else {}
    trainer = make_trainer(embedded_model, tmp_path, loss_type=loss_type, num_iterations=2, **options)
    check_equal(trainer, drawn(trainer))


@pytest.mark.parametrize(
    "changes",
    [
        {"entropy_coef": 0.3, "loss_type": "grpo"},
        {"entropy_coef": 0.3},
        {"importance_sampling_level": "sequence"},
        {"importance_sampling_level": "turn", "turn_ratio_pooling": "sum", "beta": 0.1},
        {"vllm_importance_sampling_correction": True, "off_policy_mask_threshold": 0.01},
    ],
    ids=["entropy-rows", "entropy-tokens", "sequence", "turn", "correction"],
)
def test_other_terms_are_those_of_one_pass(embedded_model, tmp_path, changes):
    trainer = make_trainer(embedded_model, tmp_path, num_iterations=2, **changes)
    before, batch = trainer.entropy_coef, drawn(trainer)
    check_equal(trainer, batch)
    trainer._metrics["train"]["entropy_coef"] = [0.7]  # by an earlier step, which had another coefficient
    loss_and_gradients(trainer, batch)
    earlier, *now = trainer._metrics["train"]["entropy_coef"]
    assert trainer.entropy_coef == before and earlier == 0.7 and set(now) <= {before}


def test_the_value_loss_is_that_of_one_pass(embedded_model, tmp_path):
    trainer = make_ppo(embedded_model, tmp_path, value_clip_range=0.1, sequence_packing="none")
    wake(trainer)
    batch = drawn(trainer)
    trainer.critic.count_turns([batch])
    check_equal(trainer, batch)


@pytest.mark.parametrize("layers", [None, 1])
def test_a_critic_reads_the_same_values_packed_and_padded(embedded_model, tmp_path, layers):
    found = {}
    for mode in ("none", "prefix"):
        trainer = make_ppo(embedded_model, tmp_path / mode, critic_layers=layers, sequence_packing=mode)
        wake(trainer)
        batch = drawn(trainer)
        assert trainer.packer.packs == (mode == "prefix")
        trainer.critic.count_turns([batch])
        found[mode] = (batch, *loss_and_gradients(trainer, batch))
    (padded, loss, gradients), (packed, loss_packed, gradients_packed) = found["none"], found["prefix"]
    torch.testing.assert_close(packed["turns:old_values"], padded["turns:old_values"], rtol=1e-5, atol=1e-5)
    assert loss_packed == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert relative_error(gradients_packed, gradients) < 1e-5


class Opposite(MultiTurnGRPOTrainer):
    """Changes what the loss of its parent is."""

    config_class = MultiTurnGRPOConfig

    def compute_loss(self, *given, **named):
        return -2 * super().compute_loss(*given, **named)


@pytest.mark.parametrize("changed", ["class", "object"])
@pytest.mark.parametrize("changes", [{}, {"max_tokens_per_micro_batch": 120}], ids=["one", "several"])
def test_a_loss_that_user_code_changes_is_what_is_trained(embedded_model, tmp_path, changes, changed):
    found = []
    for algorithm in ("grpo", f"{__name__}:Opposite" if changed == "class" else "grpo"):
        gradients = Gradients()
        trainer = make_trainer(
            embedded_model, tmp_path, algorithm=algorithm, callbacks=[gradients], gradient_accumulation_steps=2,
            per_device_train_batch_size=4, max_grad_norm=0.0, **changes,
        )  # fmt: skip
        if found and changed == "object":
            computed = trainer._compute_loss
            trainer._compute_loss = lambda *given, computed=computed, **named: -2 * computed(*given, **named)
        trainer.train()
        found.append(gradients.steps[0])
    assert relative_error(found[1], {name: -2 * value for name, value in found[0].items()}) < 1e-5


def test_terms_that_compare_all_tokens_keep_one_pass(embedded_model, tmp_path):
    trainer = make_trainer(embedded_model, tmp_path, top_entropy_quantile=0.5)
    batch = drawn(trainer)
    assert measured(trainer, batch, 10)[3] == [8]


@pytest.mark.parametrize(
    "option", [{"top_entropy_quantile": 0.5}, {"use_adaptive_entropy": True, "entropy_target": 1.0}]
)
def test_a_budget_is_refused_with_them(embedded_model, tmp_path, option):
    with pytest.raises(ValueError, match=naming("max_tokens_per_micro_batch=99", next(iter(option)))):
        make_trainer(embedded_model, tmp_path, max_tokens_per_micro_batch=99, **option)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_pass_that_does_not_fit_is_made_smaller(embedded_model, tmp_path, monkeypatch, when):
    """The gradient counts every row once, also where the pass failed in its backward pass."""
    warnings = []
    monkeypatch.setattr(
        "agile_trainers.step.token_batches.logger.warning", lambda text, *args: warnings.append(text % args)
    )
    trainer = make_trainer(embedded_model, tmp_path, num_iterations=2)
    batch = drawn(trainer)
    _, expected, metrics, _ = measured(trainer, batch, WHOLE)
    longest = int((batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)).max())

    def fail(_):
        raise torch.OutOfMemoryError

    def run_out(_module, args, output):
        if args[0].size(0) * args[0].size(1) > 2 * longest:
            output.register_hook(fail) if when == "backward" else fail(None)

    trainer.model.get_base_model().model.layers[0].mlp.down_proj.register_forward_hook(run_out)
    _, gradients, metrics_split, _ = measured(trainer, batch, 4 * longest)
    assert trainer.token_batches.budget == 2 * longest
    assert len(warnings) == 1 and "did not fit into memory" in warnings[0]
    assert f"max_tokens_per_micro_batch={trainer.token_batches.budget}" in warnings[-1]
    assert relative_error(gradients, expected) < 1e-5
    assert metrics_split["entropy"] == pytest.approx(metrics["entropy"], rel=1e-4)


def test_an_episode_that_does_not_fit_alone_is_an_error(embedded_model, tmp_path):
    trainer = make_trainer(embedded_model, tmp_path, num_iterations=2)
    batch = drawn(trainer)

    def run_out(*_):
        raise torch.OutOfMemoryError

    trainer.model.register_forward_pre_hook(run_out)
    with pytest.raises(RuntimeError, match="An episode does not fit into memory"):
        measured(trainer, batch, WHOLE)


@pytest.mark.parametrize("packing", ["prefix", "none"])
def test_recovery_ends_where_rows_share_a_prompt(embedded_model, tmp_path, packing):
    """Every pass runs out of memory: each retry has smaller passes, until the one that fails has a single row."""
    trainer = make_trainer(
        embedded_model, tmp_path, environment=LongPrompt, sequence_packing=packing, skip_zero_advantage=False
    )
    batch, tried = drawn(trainer), []

    def run_out(_module, _args, kwargs):
        tried.append(kwargs["input_ids"].numel())
        raise torch.OutOfMemoryError

    trainer.model.register_forward_pre_hook(run_out, with_kwargs=True)
    with pytest.raises(RuntimeError, match="An episode does not fit into memory"):
        measured(trainer, batch, WHOLE)
    assert 2 <= len(tried) <= 4 and tried == sorted({*tried}, reverse=True), tried


def test_a_micro_batch_that_needs_one_pass_cannot_be_split(embedded_model, tmp_path):
    trainer = make_trainer(embedded_model, tmp_path, top_entropy_quantile=0.5, num_iterations=2)
    batch, tried = drawn(trainer), []

    def run_out(*_):
        tried.append(1)
        raise torch.OutOfMemoryError

    trainer.model.register_forward_pre_hook(run_out)
    with pytest.raises(RuntimeError, match=r"needs all of its episodes at once.*Lower per_device_train_batch_size"):
        measured(trainer, batch, WHOLE)
    assert tried == [1]


def test_the_budget_is_part_of_a_checkpoint(embedded_model, tmp_path):
    """A run whose passes became smaller goes on with these; an option says otherwise."""
    first = make("grpo", embedded_model, tmp_path, **{**SAVING, "max_steps": 1})
    assert first.token_batches.budget is None
    first.token_batches.budget = 77
    first.train()
    resumed = make("grpo", embedded_model, tmp_path, **{**SAVING, "max_steps": 1})
    resumed.token_batches.restore(resumed.checkpoints.load_rollout(str(tmp_path / "checkpoint-1")).parts["pass_tokens"])
    assert resumed.token_batches.budget == 77
    asked = make_trainer(embedded_model, tmp_path / "asked", max_tokens_per_micro_batch=55)
    asked.token_batches.restore(77)
    assert asked.token_batches.budget == 55


def test_what_fits_on_a_gpu_is_estimated_from_the_model():
    class Config:
        hidden_size, num_hidden_layers, intermediate_size = 1024, 10, 4096

    assert backward_bytes_per_token(Config, checkpointing=False) == 10 * 34 * 1024
    assert backward_bytes_per_token(Config, checkpointing=True) == 10 * 2 * 1024 + 2 * 34 * 1024


def test_gradients_and_optimizer_that_are_still_to_come():
    """Three billion weights in fp32: 12 GB of gradients and 24 of AdamW's averages."""
    whole = [(3 * 10**9, 4)]
    assert bytes_to_come(whole, "adamw_torch_fused") == 36 * 10**9
    assert bytes_to_come([(3 * 10**9, 2)], "adamw_torch") == 18 * 10**9
    assert bytes_to_come([(3 * 10**9, 2)], "paged_adamw_32bit") == 6 * 10**9
    # Tensors of fewer than 4,096 weights keep 32 bits.
    assert bytes_to_come([(4096, 4), (4095, 4)], "adamw_bnb_8bit") == 4096 * (4 + 2) + 4095 * (4 + 8)
    assert bytes_to_come([(5000, 2)], "lion_32bit") == 5000 * (2 + 4)
    assert bytes_to_come([(100, 4)], "sgd") == 800 and bytes_to_come([(100, 4)], "ademamix") == 1600
    assert bytes_to_come([(100, 4)], "schedule_free_adamw") == 1200 and bytes_to_come([(100, 4)], "adafactor") == 400
    assert bytes_to_come([(100, 2)], None, shares=4) == 50
    # 60 % of what is left of 70 GB after them, by 1 MB a token; without them it would have been 42,000 tokens.
    assert fitting_tokens(70 * 10**9, bytes_to_come(whole, "adamw_torch_fused"), 10**6) == 20_400
    assert fitting_tokens(30 * 10**9, 36 * 10**9, 10**6) == 1024


def test_the_trained_weights_of_a_run_are_counted(embedded_model, tmp_path):
    for lora in (True, False):
        trainer = make_trainer(embedded_model, tmp_path / str(lora), lora=lora, optim="adamw_torch")
        trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        assert trainer.token_batches._to_come(trainer.model) == (4 + 8) * trained > 0
