"""Every update is made on as many episodes as were asked for, and each of them counts alike."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest
from datasets import Dataset, IterableDataset
from games import Chatter, make_trainer
from ppo_games import make_ppo
from transformers import TrainerCallback

from agile_trainers.train_batch import TrainBatch, lengths_of


class Steps(TrainerCallback):
    """Notes what every optimizer step was made of."""

    def __init__(self) -> None:
        self.episodes: list[int] = []
        self.micro_batches: list[list[dict]] = []
        self._open: list[dict] = []

    def watch(self, trainer):
        compute = trainer._compute_loss

        def counted(model, inputs):
            self._open.append(inputs)
            return compute(model, inputs)

        trainer._compute_loss = counted
        trainer.train()
        return self

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.episodes.append(sum(len(batch["prompt_ids"]) for batch in self._open))
        self.micro_batches.append(self._open)
        self._open = []


def watched(model, folder, rows=None, make=make_trainer, **changes):
    steps = Steps()
    options = {"per_device_train_batch_size": 4, "max_turns": 1, "log_rollouts": False, "callbacks": [steps], **changes}
    return steps.watch(make(model, folder, train_dataset=rows, **options))


def stream(rows: int) -> IterableDataset:
    return IterableDataset.from_generator(lambda: ({"x": i} for i in range(rows)))


@pytest.mark.parametrize(
    ("accumulation", "per_generation", "iterations"), [(4, 6, 1), (4, 2, 1), (2, 1, 1), (4, 3, 2), (2, 4, 1)]
)
def test_no_window_closes_early_without_a_data_set(embedded_model, tmp_path, accumulation, per_generation, iterations):
    """Where a generation batch and an optimizer step do not end together, too."""
    steps = watched(
        embedded_model, tmp_path, gradient_accumulation_steps=accumulation, steps_per_generation=per_generation,
        num_iterations=iterations, max_steps=3, per_device_train_batch_size=2, num_generations=2,
    )  # fmt: skip
    assert steps.episodes == [2 * accumulation] * 3


def test_an_epoch_shorter_than_an_update_is_warned_of(embedded_model, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(
        "agile_trainers.trainers.setup.logger.warning", lambda text, *args: warnings.append(text % args)
    )
    rows = Dataset.from_dict({"x": [0, 1, 2]})
    options = {"gradient_accumulation_steps": 4, "steps_per_generation": 1}
    assert watched(embedded_model, tmp_path, rows, max_steps=1, **options).episodes == [12]
    assert any("has 3 micro-batches, and gradient_accumulation_steps=4" in warning for warning in warnings)


def test_what_a_stream_has_left_over_is_not_added_to_the_next_update(embedded_model, tmp_path):
    """Five rows, two of them an update: the fifth does not make one."""
    steps = watched(
        embedded_model, tmp_path, stream(5), gradient_accumulation_steps=2, steps_per_generation=1, max_steps=4
    )
    assert steps.episodes == [8] * 4


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (1, {"gradient_accumulation_steps": 2}, "1 rows.*take 2"),
        (
            2,
            {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
            "2 rows.*take 4 .*gradient_accumulation_steps=4",
        ),
        (0, {}, "a stream of 0 rows"),
        (9, {"max_steps": -1}, "max_steps.*-1"),
    ],
)
def test_a_stream_that_would_train_no_step_is_refused(embedded_model, tmp_path, rows, changes, message):
    with pytest.raises(ValueError, match=message):
        watched(embedded_model, tmp_path, stream(rows), **changes)


def test_a_stream_of_exactly_one_update_trains_on_and_on(embedded_model, tmp_path):
    assert watched(embedded_model, tmp_path, stream(1), max_steps=2).episodes == [4, 4]


@pytest.mark.parametrize(
    "changes",
    [
        # An epoch of three micro-batches: updates on two and on one.
        {"steps_per_generation": 3, "rows": Dataset.from_dict({"x": list(range(12))})},
        # Updates 2 and 3 of four lie in both halves of a generation batch that is used twice.
        {"steps_per_generation": 3, "num_iterations": 2},
    ],
    ids=["short-last-window", "across-iterations"],
)
def test_the_value_loss_is_the_mean_over_the_turns_of_its_update(embedded_model, tmp_path, changes):
    """And the logged loss is the sum of the policy's and the critic's, as logged."""
    steps = Steps()
    rows = changes.pop("rows", None)
    trainer = make_ppo(
        embedded_model, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4,
        log_rollouts=False, callbacks=[steps], train_dataset=rows, vf_coef=0.3, **changes,
    )  # fmt: skip
    steps.watch(trainer)
    assert steps.episodes == ([8, 4, 8, 4] if rows else [8] * 4)
    for micro_batches in steps.micro_batches:
        turns = sum(TrainBatch.from_trl(batch).column("value_weights").sum() for batch in micro_batches)
        assert all(batch["turns_in_step"] == turns for batch in micro_batches[-1:])
    for entry in trainer.state.log_history[:4]:
        assert entry["loss"] == pytest.approx(entry["policy/loss"] + 0.3 * entry["value/loss"], rel=1e-4, abs=1e-6)
        assert entry["value/loss"] > 0


def test_rows_of_a_window_that_are_alike_share_a_micro_batch(embedded_model, tmp_path):
    """By length, where rows are padded."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 4}
    trainer = make_trainer(embedded_model, tmp_path, sequence_packing="none", **options)
    steps = Steps()
    steps.watch(trainer)
    lengths = [int(length) for batch in steps._open for length in lengths_of(batch)]
    assert len(lengths) == 8 and lengths == sorted(lengths) and lengths[0] < lengths[-1]


@pytest.mark.parametrize(
    "option", [{"loss_type": "bnpo"}, {"top_entropy_quantile": 0.5}, {"use_adaptive_entropy": True}]
)
def test_what_compares_the_tokens_of_a_micro_batch_keeps_random_rows(embedded_model, tmp_path, option):
    """Rows of one length would be compared with each other: rewards that go with length would cancel."""
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **option}
    steps = Steps()
    steps.watch(
        make_trainer(embedded_model, tmp_path, sequence_packing="none", max_steps=2, callbacks=[steps], **options)
    )
    lengths = [[int(length) for batch in update for length in lengths_of(batch)] for update in steps.micro_batches]
    assert len(lengths) == 2 and any(of != sorted(of) for of in lengths)


def test_the_time_of_an_update_is_that_of_all_its_micro_batches(embedded_model, tmp_path, monkeypatch):
    """By a clock that goes on by one each time that it is read: two readings in each micro-batch."""
    clock = SimpleNamespace(perf_counter=itertools.count().__next__, time=time.time)
    monkeypatch.setattr("agile_trainers.trainers.trainer.time", clock)
    trainer = make_trainer(
        embedded_model, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=1
    )
    trainer.train()
    (log,) = (log for log in trainer.state.log_history if "time/update" in log)
    assert 4 - log["time/rollout"] - 0.01 < log["time/update"] <= 4


class Lost(Chatter):
    """Fails for every third answer, once training has begun."""

    training = False

    def step(self, action):
        if self.training and sum(map(ord, action)) % 3 == 0:
            raise RuntimeError("no answer")
        return super().step(action)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"demonstrations": "experts:hums", "demonstrations_per_group": 2}, "clip_ratio/region_mean"),
        (
            {"demonstrations": "experts:hums", "demonstrations_per_group": 2, "algorithm": "own_losses:Tokens"},
            "clipped",
        ),
        ({"environment": Lost}, "clip_ratio/region_mean"),
    ],
    ids=["an expert", "a loss of one's own", "failed episodes"],
)
def test_a_micro_batch_without_a_trained_token_enters_no_metric(embedded_model, tmp_path, monkeypatch, changes, named):
    """An entropy of 0 nobody had; what is not a mean over trained tokens is logged all the same."""
    logs, counted = [], []
    for size in (8, 1):
        monkeypatch.setattr(Lost, "training", False)
        trainer = make_trainer(
            embedded_model, tmp_path / str(size), per_device_train_batch_size=size, gradient_accumulation_steps=8 // size,
            skip_zero_advantage=False, max_steps=2, num_iterations=2, learning_rate=0.3, **changes,
        )  # fmt: skip
        loss = trainer.token_batches.loss
        trainer.token_batches.loss = lambda model, read, whole, *a, _loss=loss, **k: (
            counted.append(whole.counted.any().item()) or _loss(model, read, whole, *a, **k)
        )
        monkeypatch.setattr(Lost, "training", True)
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
    (whole, alone) = logs
    assert not all(counted), "every micro-batch has a trained token: the test is empty"
    for ours, theirs in zip(alone, whole, strict=True):
        assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=0.03) and ours["entropy"] > 5
    assert alone[1][named] > 0.5 * whole[1][named] > 0
    assert whole[0].keys() == alone[0].keys()


def test_a_batch_without_a_trained_token_moves_no_entropy_coefficient(embedded_model, tmp_path, monkeypatch):
    """TRL's controller would take the mean over no token for an entropy of 0, below every target."""
    monkeypatch.setattr(Lost, "training", False)
    trainer = make_trainer(
        embedded_model, tmp_path, environment=Lost, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        max_steps=3, use_adaptive_entropy=True, entropy_coef=0.05, entropy_target=1.0, entropy_coef_delta=0.01,
        skip_zero_advantage=False,
    )  # fmt: skip
    make = trainer._generate_and_score_completions
    monkeypatch.setattr(Lost, "step", lambda self, action: 1 / 0 if self.training else Chatter.step(self, action))

    def second_fails(*args, **kwargs):
        Lost.training = trainer.state.global_step == 1
        return make(*args, **kwargs)

    trainer._generate_and_score_completions = second_fails
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [round(entry["entropy_coef"], 6) for entry in logs] == [0.04, 0.04, 0.03]
    assert [entry.get("entropy", 0.0) > 5 for entry in logs] == [True, False, True]
    assert trainer._last_world_entropy > 5
