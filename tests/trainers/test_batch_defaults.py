"""The learning rate and the size of an update that nobody set: decided once, right for what is trained, warned of."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from games import Chatter
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from agile_trainers.cli.train import parse_checked
from agile_trainers.config.batch_defaults import accumulation, decide_learning_rate, unlikely_to_learn
from agile_trainers.trainers import MultiTurnGRPOConfig
from agile_trainers.trainers.registry import ALGORITHMS, find_algorithm

CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1}
EPISODES = {"max_turns": 2, "max_new_tokens": 2, "log_rollouts": False}


def lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


def make(algorithm: str, model: Any, folder: Path, peft_config: Any = None, **options: Any) -> Any:
    trainer = find_algorithm(algorithm)
    args = trainer.config_class(output_dir=str(folder), **CPU, **EPISODES, **options)
    return trainer(model=model, environment=Chatter, args=args, peft_config=peft_config)


def base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_updates_of_a_batch(algorithm: str, tmp_path: Path) -> None:
    """Four with GRPO's clipping and an environment; TRL's one without an environment; what is set, where it is set."""
    config = find_algorithm(algorithm).config_class
    args = config(output_dir=str(tmp_path), **CPU)
    assert args.num_iterations == (4 if algorithm in ("grpo", "ppo") else 1)
    if algorithm in ("grpo", "gspo", "cispo"):
        assert args.without_environment().num_iterations == 1
        assert config(output_dir=str(tmp_path), **CPU, num_iterations=4).without_environment().num_iterations == 4


@pytest.mark.parametrize("batch", [{"steps_per_generation": 1}, {"generation_batch_size": 16}])
def test_an_update_of_several_batches_reads_each_episode_once(tmp_path: Path, batch: dict[str, int]) -> None:
    """Passes over a batch that is smaller than an update would be one update, of the same episodes again."""
    args = MultiTurnGRPOConfig(output_dir=str(tmp_path), **CPU, gradient_accumulation_steps=8, **batch)
    assert args.num_iterations == args.with_environment().num_iterations == 1, "a population counts by the former"
    later = MultiTurnGRPOConfig(output_dir=str(tmp_path), **CPU)
    later.gradient_accumulation_steps = 16
    assert later.with_environment().num_iterations == 1
    assert not unlikely_to_learn(args.with_environment(), adapter=True)
    again = MultiTurnGRPOConfig(
        output_dir=str(tmp_path), **CPU, gradient_accumulation_steps=8, num_iterations=4, **batch
    )
    (finding,) = unlikely_to_learn(again.with_environment(), adapter=True)
    assert "reads its 16 episodes 4 times" in finding and "num_iterations=4 to 1" in finding


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("given", [None, 3e-4])
def test_an_adapter_learns_at_a_rate_of_its_own(
    embedded_model: Path, tmp_path: Path, algorithm: str, given: float | None
) -> None:
    """A new adapter, one that the model has, and one that the model is the folder of; PPO's critic follows."""
    get_peft_model(base(embedded_model), lora()).save_pretrained(tmp_path / "adapter")
    starts = [
        (str(embedded_model), lora()),
        (get_peft_model(base(embedded_model), lora()), None),
        (str(tmp_path / "adapter"), None),
    ]
    for model, peft_config in starts:
        trainer = make(algorithm, model, tmp_path, peft_config, learning_rate=given)
        rate = given or 1e-5
        assert trainer.args.learning_rate == rate
        groups = trainer.create_optimizer().param_groups
        assert {group["lr"] for group in groups} == {rate} and sum(len(group["params"]) for group in groups) > 0


def test_the_whole_model_learns_at_trls_rate(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make("grpo", str(embedded_model), tmp_path)
    assert trainer.args.learning_rate == GRPOConfig(output_dir=str(tmp_path), **CPU).learning_rate == 1e-6


@pytest.mark.parametrize(
    ("processes", "rows", "group", "expected", "episodes"),
    [
        (1, 8, 8, 8, 64),
        (2, 8, 8, 4, 64),
        (8, 8, 8, 1, 64),
        (3, 8, 8, 3, 72),
        (16, 8, 8, 1, 128),
        (1, 6, 8, 12, 72),  # 11 would split a group
        (2, 3, 4, 6, 36),
        (1, 1, 4, 32, 32),
        (1, 96, 8, 1, 96),
        (1, 8, None, 8, 64),
        (4, 3, None, 6, 72),
    ],
)
def test_an_update_sees_eight_groups(
    monkeypatch: pytest.MonkeyPatch, processes: int, rows: int, group: int | None, expected: int, episodes: int
) -> None:
    """None: an algorithm without groups. ``episodes`` are those of an update, over all processes."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    args = SimpleNamespace(per_device_train_batch_size=rows, num_generations=group or 1, groupless=group is None)
    assert accumulation(args) == expected
    assert processes * rows * expected == episodes and episodes % (group or 1) == 0


@pytest.mark.parametrize(
    ("algorithm", "options", "accumulated", "generated"),
    [
        *[(algorithm, {}, 8, 64) for algorithm in ALGORITHMS if algorithm != "distillation"],
        ("distillation", {"teacher": "folder"}, 8, 64),
        ("grpo", {"per_device_train_batch_size": 4, "num_generations": 4}, 8, 32),
        ("grpo", {"gradient_accumulation_steps": 2}, 2, 16),
        ("grpo", {"generation_batch_size": 32}, 1, 32),
        ("grpo", {"steps_per_generation": 4}, 1, 32),
        ("ppo", {"steps_per_generation": 2}, 1, 16),
        ("reinforce", {"gradient_accumulation_steps": 1}, 1, 8),
    ],
)
def test_a_batch_that_is_given_stays(
    tmp_path: Path, algorithm: str, options: dict[str, Any], accumulated: int, generated: int
) -> None:
    args = find_algorithm(algorithm).config_class(output_dir=str(tmp_path), **CPU, **options).with_environment()
    assert (args.gradient_accumulation_steps, args.generation_batch_size) == (accumulated, generated)
    assert args.generation_batch_size == args.steps_per_generation * args.per_device_train_batch_size


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 3}, {"steps_per_generation": 5}])
def test_without_an_environment_the_batch_and_the_rate_are_trls(tmp_path: Path, options: dict[str, int]) -> None:
    ours = MultiTurnGRPOConfig(output_dir=str(tmp_path), **CPU, **options).without_environment()
    theirs = GRPOConfig(output_dir=str(tmp_path), **CPU, **options)
    for name in ("learning_rate", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_trls_batch_still_holds_whole_groups(tmp_path: Path) -> None:
    args = MultiTurnGRPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=6, **CPU)
    with pytest.raises(ValueError, match=r"generation_batch_size \(6\).*num_generations \(8\)"):
        args.without_environment()


@pytest.mark.parametrize(
    ("algorithm", "options", "peft_config", "named"),
    [
        ("grpo", {}, lora(), []),
        ("ppo", {}, lora(), []),
        ("reinforce", {}, None, []),
        ("grpo", {"learning_rate": 1e-6}, lora(), ["learning_rate=1e-06"]),
        ("reinforce", {"learning_rate": 5e-7}, lora(), ["learning_rate=5e-07"]),
        ("grpo", {"learning_rate": 2e-6}, lora(), []),
        ("grpo", {"learning_rate": 1e-6}, None, []),
        ("grpo", {"gradient_accumulation_steps": 1}, lora(), ["gradient_accumulation_steps=1"]),
        ("grpo", {"gradient_accumulation_steps": 2}, lora(), []),
        ("reinforce", {"gradient_accumulation_steps": 1}, lora(), []),
        ("grpo", {"generation_batch_size": 64}, None, ["gradient_accumulation_steps=1"]),
        (
            "grpo",
            {"learning_rate": 1e-6, "gradient_accumulation_steps": 1},
            lora(),
            ["learning_rate=1e-06", "gradient_accumulation_steps=1"],
        ),
    ],
)
def test_a_recipe_that_learns_nothing_is_warned_of(
    embedded_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    algorithm: str,
    options: dict[str, Any],
    peft_config: Any,
    named: list[str],
) -> None:
    with caplog.at_level(logging.WARNING, logger="agile_trainers"):
        make(algorithm, str(embedded_model), tmp_path, peft_config, **options)
    told = [record.getMessage() for record in caplog.records if record.name == "agile_trainers.config.batch_defaults"]
    assert len(told) == len(named) and all(name in message for name, message in zip(named, told))


def test_the_command_line_leaves_the_rate_to_the_trainer() -> None:
    needed = ["--model_name_or_path", "m", "--environment", "e", "--output_dir", "o", "--use_cpu", "--bf16", "false"]
    _, args, _, _ = parse_checked("grpo", needed)
    assert (args.learning_rate, args.gradient_accumulation_steps) == (None, 8)
    _, args, _, _ = parse_checked("grpo", [*needed, "--learning_rate", "2e-5", "--gradient_accumulation_steps", "2"])
    assert (args.learning_rate, args.gradient_accumulation_steps) == (2e-5, 2)


def test_deepspeeds_auto_entries_follow(tmp_path: Path) -> None:
    """``TrainingArguments`` fills them when it is made, before the rate is known."""
    pytest.importorskip("deepspeed")
    auto = {"params": {"lr": "auto"}, "type": "AdamW"}
    sizes = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), "auto")
    args = MultiTurnGRPOConfig(output_dir=str(tmp_path), **CPU).with_environment()
    args.deepspeed = {"zero_optimization": {"stage": 2}, "optimizer": auto, **sizes}
    decide_learning_rate(args, adapter=True)
    filled = args.deepspeed_plugin.hf_ds_config.config
    assert filled["optimizer"]["params"]["lr"] == 1e-5
    assert [filled[name] for name in sizes] == [8, 8, 64]
