"""Every trial of a search is a run of its own from the same start, and the best of them is found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from datasets import Dataset
from games import LORA, Chatter, make_trainer, settings
from optuna.samplers import RandomSampler
from peft import LoraConfig
from recorded import recorded
from safetensors.torch import load_file
from several_processes import launch
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, TrainerCallback

from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agile_trainers.trainers.hyperparameter_search import changed

RUN: dict[str, Any] = {
    "max_steps": 2, "per_device_train_batch_size": 4, "max_turns": 1, "num_eval_episodes": 4, "save_steps": 9,
}  # fmt: skip


def of_trial(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-2, 1.0, log=True)}


class Begun(TrainerCallback):
    """Keeps the weights that each trial began with and ended with, and the rate of its optimizer."""

    def __init__(self) -> None:
        self.trials: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (rate,) = {group["lr"] for group in kwargs["optimizer"].param_groups}
        self.trials.append({"rate": rate, "folder": Path(args.output_dir), "begin": weights(kwargs["model"])})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trials[-1] |= {"end": weights(kwargs["model"]), "steps": state.global_step}


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def searched(embedded_model, tmp_path_factory):
    """Three trials; the objective is the rate itself, so that the best is known."""
    folder, begun = tmp_path_factory.mktemp("search"), Begun()
    trainer = make_trainer(embedded_model, folder, callbacks=[begun], **RUN, save_strategy="steps")
    before = weights(trainer.model)
    metrics: list[dict[str, float]] = []

    def objective(found: dict[str, float]) -> float:
        metrics.append(found)
        return -abs(found["eval_return"]) - len(metrics) % 2

    best = trainer.hyperparameter_search(
        of_trial, objective, n_trials=3, direction="maximize", backend="optuna", sampler=RandomSampler(seed=0)
    )
    return trainer, best, begun.trials, before, metrics


def test_each_trial_trains_with_its_own_rate_from_the_same_weights(searched):
    trainer, best, trials, before, _ = searched
    rates = [trial.params["learning_rate"] for trial in best.run_summary.trials]
    assert [one["rate"] for one in trials] == rates and len(set(rates)) == 3
    for one in trials:
        assert one["begin"].keys() == before.keys() and one["steps"] == 2
        for name, value in before.items():
            assert torch.equal(one["begin"][name], value), name
            if "lora" not in name:
                assert torch.equal(one["end"][name], value), f"{name} of the base"
    ends = [torch.cat([v.flatten() for n, v in one["end"].items() if "lora_B" in n]) for one in trials]
    assert all(not torch.equal(ends[a], ends[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    for name, value in weights(trainer.model).items():
        assert torch.equal(value, before[name]), "the trainer itself is not trained"


def test_a_trial_is_the_run_that_one_would_start_by_hand(searched, embedded_model, tmp_path):
    _, best, trials, _, metrics = searched
    rate = best.run_summary.trials[1].params["learning_rate"]
    alone = make_trainer(embedded_model, tmp_path, **{**RUN, "learning_rate": rate})
    alone.train()
    for name, value in weights(alone.model).items():
        assert torch.equal(value, trials[1]["end"][name]), name
    assert alone.evaluate()["eval_return"] == metrics[1]["eval_return"]


def test_the_best_run_has_the_best_objective_and_its_policy_is_in_its_folder(searched):
    trainer, best, trials, _, metrics = searched
    values = [-abs(found["eval_return"]) - number % 2 for number, found in enumerate(metrics, start=1)]
    number = int(best.run_id)
    assert best.objective == max(values) == values[number]
    assert best.hyperparameters == {"learning_rate": trials[number]["rate"]}
    folder = Path(trainer.args.output_dir) / f"run-{number}"
    assert trials[number]["folder"] == folder
    saved = load_file(folder / "adapter_model.safetensors")
    assert saved and all(
        torch.equal(value, trials[number]["end"][name.replace(".weight", ".default.weight")])
        for name, value in saved.items()
    )
    assert {row["step"] for row in recorded(folder, "train")} == {0, 1}


def test_a_pruned_trial_ends_early_and_one_that_becomes_nan_fails_alone(embedded_model, tmp_path):
    """The third trial's weights become infinite with its first step. The second one is worse than the first."""

    class Second(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return trial.number == 1 and 1 in trial.intermediate_values

    class Infinite(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.output_dir.endswith("third"):
                next(p for p in kwargs["model"].parameters() if p.requires_grad).data.fill_(float("inf"))

    begun = Begun()
    options = {**RUN, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(embedded_model, tmp_path, callbacks=[begun, Infinite()], **options)
    best = trainer.hyperparameter_search(
        n_trials=3, pruner=Second(), hp_name=lambda trial: ("first", "second", "third")[trial.number]
    )
    study = best.run_summary
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "FAIL"]
    assert [one.get("steps") for one in begun.trials] == [2, 1, None]
    assert best.run_id == "0" and study.direction.name == "MAXIMIZE"
    assert best.objective == study.trials[0].intermediate_values[2]
    assert all(0.01 <= trial.params["learning_rate"] <= 1.0 for trial in study.trials)  # around 0.1


def test_model_init_makes_the_model_of_each_trial(embedded_model, tmp_path):
    asked: list[Any] = []

    def init(trial: Any) -> Any:
        asked.append(trial and trial.number)
        return AutoModelForCausalLM.from_pretrained(embedded_model)

    def make(**changes: Any) -> MultiTurnGRPOTrainer:
        args = MultiTurnGRPOConfig(**settings(tmp_path, **{**RUN, "max_steps": 1}))
        lora = LoraConfig(**LORA)
        return MultiTurnGRPOTrainer(**{"args": args, "environment": Chatter, "peft_config": lora, **changes})

    best = make(model_init=init).hyperparameter_search(
        lambda trial: {"seed": trial.suggest_categorical("seed", [5])}, n_trials=1
    )
    assert asked == [None, 0] and best.hyperparameters == {"seed": 5}
    assert not (tmp_path / "run-0" / "adapter_model.safetensors").exists()
    with pytest.raises(ValueError, match="`model` and `model_init`"):
        make(model=str(embedded_model), model_init=init)
    with pytest.raises(ValueError, match="needs a model"):
        make()
    with pytest.raises(ValueError, match="returned None"):
        make(model_init=lambda: None)
    with pytest.raises(TypeError, match="takes 2"):
        make(model_init=lambda one, two: None)


@pytest.fixture(scope="module")
def idle(embedded_model, tmp_path_factory):
    return make_trainer(embedded_model, tmp_path_factory.mktemp("idle"), **RUN)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"backend": "ray"}, ValueError, "backend must be 'optuna', got 'ray'"),
        ({"n_trials": 0}, ValueError, "n_trials must be at least 1, got 0"),
        ({"n_jobs": 2}, ValueError, "n_jobs must be 1, got 2"),
        ({"direction": "minimize"}, ValueError, "'maximize' for 'eval_return', got 'minimize'"),
        ({"compute_objective": len}, ValueError, "direction must be .* got None"),
        ({"hp_space": lambda _: {"learning_rat": 1}}, ValueError, "'learning_rat'.*did you mean learning_rate"),
        ({"hp_space": lambda _: {"num_generations": 2}}, ValueError, "'num_generations'.*batch"),
        ({"hp_space": lambda _: {"output_dir": "x"}}, ValueError, "'output_dir'.*folder"),
        ({"hp_space": lambda _: {"max_steps": 1.5}}, ValueError, "max_steps=1.5.*int"),
        ({"hp_space": lambda _: {"gamma": 1.5}}, ValueError, "gamma"),
        ({"hp_space": lambda _: None}, TypeError, "dictionary"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_search_that_cannot_be_made_says_why(idle, given, error, message):
    with pytest.raises(error, match=message):
        idle.hyperparameter_search(**{"n_trials": 1, **given})


def test_without_optuna_the_error_names_the_extra(idle, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"agile-trainers\[optuna\]"):
        idle.hyperparameter_search(backend="optuna")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "object"}, "`model` is an object"),
        ({"optimizers": True}, "`optimizers` holds one"),
        ({"kind": True}, "constructor of its own"),
        ({"environment": None}, "`eval_dataset`"),
        ({"max_wall_seconds": 60}, "max_wall_seconds=60.*`timeout`"),
    ],
    ids=lambda value: str(value),
)
def test_a_trainer_that_cannot_be_made_again_is_refused(embedded_model, tmp_path, changes, message):
    class Own(MultiTurnGRPOTrainer):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)

    loaded = AutoModelForCausalLM.from_pretrained(embedded_model)
    optimizer = AdamW(loaded.parameters(), lr=1e-3)
    options = settings(tmp_path, **RUN) | {n: v for n, v in changes.items() if n == "max_wall_seconds"}
    if "environment" in changes:
        options = {
            n: v
            for n, v in options.items()
            if n not in ("max_turns", "max_new_tokens", "stop_strings", "num_eval_episodes")
        }

    trainer = (Own if "kind" in changes else MultiTurnGRPOTrainer)(
        model=loaded if "model" in changes else str(embedded_model),
        args=MultiTurnGRPOConfig(**options),
        environment=changes.get("environment", Chatter),
        optimizers=(optimizer, None) if "optimizers" in changes else (None, None),
        reward_funcs=(lambda completions, **_: [0.0] * len(completions)) if "environment" in changes else None,
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}) if "environment" in changes else None,
    )
    with pytest.raises(ValueError, match=message):
        trainer.hyperparameter_search()


def test_numbers_become_what_the_option_is():
    args = MultiTurnGRPOConfig(output_dir="x", use_cpu=True, bf16=False, lr_scheduler_type="constant", max_steps=3)
    copied = changed(args, {"max_steps": 2.0, "beta": 1, "lr_scheduler_type": "cosine", "learning_rate": 0.5})
    assert (copied.max_steps, copied.beta, copied.lr_scheduler_type.value, copied.learning_rate) == (
        2,
        1.0,
        "cosine",
        0.5,
    )
    assert isinstance(copied.max_steps, int) and isinstance(copied.beta, float) and args.max_steps == 3


@pytest.mark.slow
def test_two_processes_run_each_trial_together(embedded_model, tmp_path):
    script = Path(__file__).with_name("search_two_processes.py")
    runs = [launch(script, number, embedded_model, tmp_path / str(number), {"search": {}}) for number in (1, 2)]
    one, two = (json.loads((folder / "search" / "result.json").read_text()) for folder in runs)
    assert (one[0], two[0]) == (1, 2) and one[1] == two[1]
    assert [state for state, _, _ in one[2]] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert one[2] == two[2]
