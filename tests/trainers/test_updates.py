"""``rollout`` and ``update`` do what ``train`` does, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from games import Chatter, OneTurn, make_trainer
from ppo_games import make_ppo
from transformers import TrainerCallback

from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agile_trainers.trainers.manual_loop import RunOverError, _Meter

ROWS = [{"prompt": [{"role": "user", "content": ""}], "row": n} for n in range(5)]
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"num_iterations": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_steps": 4},
    # Five rows make epochs of two updates and a row that is left over; two steps for each generation batch.
    "grpo-rows": {"rows": True, "steps_per_generation": 2, "per_device_train_batch_size": 4, "max_steps": 5, "beta": 0.1},
    # A step takes two generation batches, of two environments.
    "reinforce": {"algorithm": "reinforce", "num_generations": 1, "steps_per_generation": 2, "max_steps": 3,
                  "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2,
                  "environment": {"chatter": Chatter, "short": OneTurn}},
    "ppo": {"algorithm": "ppo", "num_iterations": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4,
            "max_steps": 4, "critic_learning_rate": 0.05},
}  # fmt: skip
EVERY = {"optim": "adamw_torch", "learning_rate": 1e-2, "lr_scheduler_type": "linear", "max_grad_norm": 0.5,
         "save_strategy": "steps", "save_steps": 3, "save_total_limit": 1}  # fmt: skip


class Heard(TrainerCallback):
    """The events of a run, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, float | None]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def hear(args: Any, state: Any, control: Any, **_: Any) -> None:
            # The epoch is a fraction of the data set's from the end of the step on.
            self.events.append((name, state.global_step, state.epoch if name in ("on_log", "on_save") else None))

        return hear


def first_word(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """A reward function that reads the row, if there are rows."""
    rows = columns.get("row", [0] * len(completions))
    return [(row + len(str(completion[0]["content"]))) % 3 / 3 for row, completion in zip(rows, completions)]


def make(model: Path, folder: Path, case: str, **more: Any) -> Any:
    changes: dict[str, Any] = {**EVERY, **CASES[case], "callbacks": [Heard()], **more}
    if changes.pop("rows", False):
        changes["train_dataset"] = Dataset.from_list(ROWS)
    if changes.get("algorithm") == "ppo":
        del changes["algorithm"]
        return make_ppo(model, folder, **changes)
    return make_trainer(model, folder, reward_funcs=first_word, **changes)


def drive(trainer: Any) -> list[dict[str, float]]:
    """Update until the run is over."""
    logs = []
    while trainer.state.global_step < trainer.args.max_steps:
        logs.append(trainer.update(trainer.rollout()))
    return logs


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in trainer.model.state_dict().items() if "lora" in name or "head" in name}


def timeless(entry: dict[str, Any]) -> dict[str, Any]:
    timed = ("time", "second", "runtime", "flos")
    return {name: value for name, value in entry.items() if not any(word in name for word in timed)}


def events(trainer: Any) -> list[Any]:
    (heard,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, Heard))
    return heard.events


@pytest.mark.parametrize("case", CASES)
def test_a_loop_of_rollout_and_update_is_train(embedded_model: Path, tmp_path: Path, case: str) -> None:
    whole = make(embedded_model, tmp_path / "whole", case)
    torch.manual_seed(1)
    whole.train()
    ours = make(embedded_model, tmp_path / "ours", case)
    torch.manual_seed(1)
    logs = drive(ours)
    for name, value in weights(whole).items():
        assert torch.equal(weights(ours)[name], value), name
    assert ours.state.global_step == whole.state.global_step == ours.args.max_steps
    history = [timeless(entry) for entry in whole.state.log_history]
    assert [timeless(entry) for entry in ours.state.log_history] == history
    assert events(ours) == events(whole)
    assert ours.is_in_train is whole.is_in_train is False
    steps = [entry for entry in history if "loss" in entry]
    per_update = -(-len(steps) // len(logs))
    for index, log in enumerate(logs):
        made = steps[index * per_update : (index + 1) * per_update]
        assert log["step"] == made[-1]["step"] and log["time/update"] > 0
        assert log["turn/1/entropy"] > 0
        for name in set().union(*made) - {"step", "epoch"}:
            there = [entry[name] for entry in made if name in entry]
            assert log[name] == pytest.approx(sum(there) / len(there), rel=1e-5, abs=1e-7), name
    folders = [tmp_path / run / f"checkpoint-{ours.args.max_steps}" for run in ("whole", "ours")]
    states = [torch.load(folder / "optimizer.pt", weights_only=False)["state"] for folder in folders]
    for one, other in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    saved = [timeless(json.loads((folder / "trainer_state.json").read_text())) for folder in folders]
    saved = [{**state, "log_history": [], "best_model_checkpoint": None} for state in saved]
    assert saved[0] == saved[1]


def test_a_resumed_run_goes_on_inside_a_generation_batch(embedded_model: Path, tmp_path: Path) -> None:
    more = {"rows": True, "save_steps": 1, "save_total_limit": None}
    whole = make(embedded_model, tmp_path, "grpo", **more)
    whole.train()
    ours = make(embedded_model, tmp_path / "again", "grpo", **more)
    ours.start(str(tmp_path / "checkpoint-1"))
    assert ours.state.global_step == 2, "the second pass over the batch is made at once"
    log = ours.update(ours.rollout())
    assert log["step"] == 4 and not ours.updates.is_open
    for name, value in weights(whole).items():
        assert torch.equal(weights(ours)[name], value), name


QUICK: dict[str, Any] = {"max_steps": 3, "save_strategy": "no", "optim": "sgd"}


@pytest.fixture(scope="module")
def trainer(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two groups of four for each of three updates."""
    return make(embedded_model, tmp_path_factory.mktemp("run"), "grpo", num_iterations=1, **QUICK)


def same(one: Any, other: Any) -> bool:
    return [(t.seed, t.completion_ids) for t in one] == [(t.seed, t.completion_ids) for t in other]


def test_what_is_no_update_is_refused_and_changes_nothing(trainer: Any) -> None:
    episodes, before = trainer.rollout(), weights(trainer)
    assert len(episodes) == 8 and [t.seed for t in episodes] == [
        s for s in dict.fromkeys(t.seed for t in episodes) for _ in range(4)
    ]
    for wrong, error, words in (
        ([], ValueError, "8 episodes.*got 0"),
        (episodes[:4], ValueError, "8 episodes.*got 4"),
        (episodes[::2] + episodes[1::2], ValueError, "num_generations=4.*seeds"),
        ([*episodes[:7], "hello"], TypeError, "Trajectory.*'hello'"),
    ):
        with pytest.raises(error, match=words):
            trainer.update(wrong)
    with pytest.raises(ValueError, match="rows is empty"):
        trainer.rollout([])
    with pytest.raises(ValueError, match=r"generation.*-1"):
        trainer.rollout(generation=-1)
    with pytest.raises(RuntimeError, match="finish"):
        trainer.train()
    with pytest.raises(RuntimeError, match="finish"):
        trainer.start()
    assert trainer.state.global_step == 0 and all(torch.equal(weights(trainer)[name], before[name]) for name in before)


def test_a_rollout_is_the_same_until_an_update_is_made(trainer: Any) -> None:
    first = trainer.rollout()
    trainer.evaluate(num_episodes=2)
    assert same(trainer.rollout(), first)
    other = trainer.rollout(generation=9)
    assert not {t.seed for t in other} & {t.seed for t in first}
    chosen = trainer.rollout([{"row": 1}, {"row": 2}, {"row": 3}], generation=5)
    assert [t.options for t in chosen] == [{"row": n} for n in (1, 2, 3) for _ in range(4)]
    before = {name: value.clone() for name, value in weights(trainer).items()}
    # Groups of several rollouts, with rewards of one's own.
    mixed = [*first[:4], *other[4:]]
    for number, episode in enumerate(mixed):
        episode.turns[-1].reward = float(number % 2)
    log = trainer.update(mixed)
    assert log["step"] == 1 and any(not torch.equal(weights(trainer)[name], before[name]) for name in before)
    assert not same(trainer.rollout(), first)
    for episode in (again := trainer.rollout()):
        for turn in episode.turns:
            turn.reward = 0.0
    assert trainer.update(again)["advantage/std"] > 0, "first_word still rewards them"
    trainer.finish()
    assert trainer.state.global_step == 2 and not trainer.is_in_train
    for over in (trainer.finish, lambda: trainer.update(again)):
        with pytest.raises(RunOverError, match=r"is over|no run is under way"):
            over()
    assert len(trainer.rollout()) == 8, "playing is always possible"
    trainer.start()
    assert trainer.update(trainer.rollout())["step"] == 1, "another run"
    trainer.finish()


def test_what_updates_cannot_be_made_of(embedded_model: Path, tmp_path: Path) -> None:
    args = MultiTurnGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    plain = MultiTurnGRPOTrainer(str(embedded_model), first_word, args, Dataset.from_list(ROWS))
    for call in (plain.rollout, plain.start, lambda: plain.update([])):
        with pytest.raises(ValueError, match="environment="):
            call()
    torn = make_trainer(embedded_model, tmp_path, environment=Chatter, steps_per_generation=2,
                        gradient_accumulation_steps=3, per_device_train_batch_size=4)  # fmt: skip
    with pytest.raises(ValueError, match="gradient_accumulation_steps=3"):
        torn.rollout()


def test_an_update_has_no_metrics_of_earlier_ones() -> None:
    """Not of one that was logged before and not now, as a correlation that is not defined; a count is replaced each time."""
    meter = _Meter()
    metrics = {"correlation": [0.5], "reward": [1.0], "num_tokens": [10.0]}
    meter.note(1, 0.0, None, None, metrics)
    assert meter.read() == {"step": 1.0, "loss": 0.0, "correlation": 0.5, "reward": 1.0, "num_tokens": 10.0}
    meter.mark(0.0, metrics)
    metrics["reward"].append(3.0)
    metrics["num_tokens"] = [25.0]
    meter.note(2, 0.0, None, None, metrics)
    assert meter.read() == {"step": 2.0, "loss": 0.0, "reward": 3.0, "num_tokens": 25.0}
