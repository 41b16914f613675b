"""Mistakes of new users in Python: one message each that names the value, the expectation and the way out."""

# ruff: noqa: E501 -- one line per mistake
from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict
from errors import naming
from games import LORA, Chatter, make_trainer, settings
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from agile_trainers.embedded import make_embedded_model
from agile_trainers.step.reward import over_sound_episodes
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agile_trainers.types import StopReason

ROWS = Dataset.from_dict({"secret": [1, 2, 3, 4]})


def saying(*texts: str) -> str:
    """A pattern for messages with all of these in them, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(text)})" for text in texts)


class NoSeed(Chatter):
    def reset(self, options=None):  # type: ignore[override]
        return "x", {}


class NoOptions(Chatter):
    def reset(self, seed=None):  # type: ignore[override]
        return "x", {}


class ListStep(Chatter):
    def step(self, action):
        return ["x", 1.0, True, False, {}]


class TextReward(Chatter):
    def step(self, action):
        return "x", "1.0", True, False, {}


class YieldingStep(Chatter):
    def step(self, action):
        yield "x"


class OfTRL:
    def reset(self, **row):
        return "Count."

    def increment(self, by: int) -> int:
        return by


def without_eos(model: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = None
    return tokenizer


ARGUMENTS: dict[str, tuple[Callable[[Path, Path], dict[str, Any]], list[str]]] = {
    "DatasetDict": (lambda model, folder: {"train_dataset": DatasetDict(train=ROWS)}, ["train_dataset", "'train'", "data['train']"]),
    "DataFrame": (lambda model, folder: {"train_dataset": pd.DataFrame({"secret": [1]})}, ["DataFrame", "Dataset.from_pandas"]),
    "name of a file as rows": (lambda model, folder: {"train_dataset": "rows.jsonl"}, ["'rows.jsonl'", "load_dataset"]),
    "path as rows": (lambda model, folder: {"train_dataset": folder / "rows.jsonl"}, ["PosixPath", "load_dataset"]),
    "list as rows": (lambda model, folder: {"train_dataset": [{"secret": 1}]}, ["list", "Dataset.from_list"]),
    "DataFrame to evaluate on": (lambda model, folder: {"eval_dataset": pd.DataFrame({"secret": [1]})}, ["eval_dataset", "Dataset.from_pandas"]),
    "tokenizer without EOS": (lambda model, folder: {"processing_class": without_eos(model)}, ["eos_token", "'<|im_end|>'"]),
    "tokenizer by name": (lambda model, folder: {"processing_class": "a/tokenizer"}, ["processing_class", "'a/tokenizer'", "AutoTokenizer.from_pretrained"]),
    "tokenizer as model": (lambda model, folder: {"model": AutoTokenizer.from_pretrained(model)}, ["processing_class"]),
    "model that is a number": (lambda model, folder: {"model": 5}, ["model", "int", "'Qwen/Qwen2.5-0.5B-Instruct'"]),
    "model that is not there": (lambda model, folder: {"model": str(folder / "modle")}, ["model", "config.json"]),
    "file as model": (lambda model, folder: {"model": str(folder / "a_file")}, ["is a file", "Hub id"]),
    "configuration as second argument": (lambda model, folder: {"reward_funcs": MultiTurnGRPOConfig(**settings(folder))}, ["reward_funcs", "args="]),
    "options as a dict": (lambda model, folder: {"args": {"max_steps": 1}}, ["dict", "args=MultiTurnGRPOConfig("]),
    "reward that is a number": (lambda model, folder: {"reward_funcs": 1.0}, ["reward_funcs", "float", "completions"]),
    "reward by a wrong name": (lambda model, folder: {"reward_funcs": "acuracy_reward"}, ["'acuracy_reward'", "did you mean accuracy_reward?"]),
    "one callback": (lambda model, folder: {"callbacks": TrainerCallback()}, ["callbacks", "[it]"]),
    "text as callback": (lambda model, folder: {"callbacks": [TrainerCallback, "wandb"]}, ["callbacks[1]", "'wandb'", "transformers.TrainerCallback"]),
    "text as quantization": (lambda model, folder: {"quantization_config": "4bit"}, ["'4bit'", "BitsAndBytesConfig(load_in_4bit=True)"]),
    "module of LoRA misspelt": (lambda model, folder: {"peft_config": LoraConfig(target_modules=["q_prj"])}, ["q_prj", "'all-linear'"]),
    "reset without seed": (lambda model, folder: {"environment": NoSeed}, ["NoSeed.reset(options=None)", "reset(self, seed=None, options=None)"]),
    "reset without options": (lambda model, folder: {"environment": NoOptions, "train_dataset": ROWS}, ["options=None", "rows"]),
    "list from step": (lambda model, folder: {"environment": ListStep}, ["list", "as a tuple"]),
    "text as reward of step": (lambda model, folder: {"environment": TextReward}, ["reward='1.0'", "float()"]),
    "generator as step": (lambda model, folder: {"environment": YieldingStep}, ["Replace yield by return"]),
    "file of a module": (lambda model, folder: {"environment": "my.py:Cls"}, ["'my.py:Cls'", "'my:Cls'"]),
    "list of environments": (lambda model, folder: {"environment": ["agile:guess_number"]}, ["list", "dict"]),
    "class of TRL": (lambda model, folder: {"environment": OfTRL}, ["increment", "trl_environment(OfTRL)"]),
    "object of TRL": (lambda model, folder: {"environment": OfTRL()}, ["instance", "trl_environment(OfTRL)"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", ARGUMENTS)
def test_a_wrong_argument(mistake: str, embedded_model: Path, tmp_path: Path) -> None:
    (tmp_path / "a_file").touch()
    make, names = ARGUMENTS[mistake]
    arguments = {"model": str(embedded_model), "environment": Chatter, **make(embedded_model, tmp_path)}
    arguments.setdefault("args", MultiTurnGRPOConfig(**settings(tmp_path / "out")))
    with pytest.raises((TypeError, ValueError), match=saying(*names)):
        MultiTurnGRPOTrainer(**arguments)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"learning_rate": "1e-3"}, ["'1e-3'", "a number", "learning_rate=0.001"]),
        ({"learning_rate": -1.0}, ["-1.0", "negative"]),
        ({"learning_rate": math.nan}, ["nan", "finite"]),
        ({"max_steps": "10"}, ["'10'", "a whole number", "max_steps=10"]),
        ({"max_steps": 10.0}, ["10.0", "max_steps=10"]),
        ({"max_turns": 2.5}, ["2.5", "a whole number"]),
        ({"seed": None}, ["None", "a whole number"]),
        ({"stop_strings": "</answer>"}, ["'</answer>'", "a list of texts"]),
    ],
)  # fmt: skip
def test_a_wrong_value(changes: dict[str, Any], names: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=naming(next(iter(changes)), *names)):
        MultiTurnGRPOConfig(**settings(tmp_path, **changes))


def test_a_misspelt_option(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'max_turn'; did you mean max_turns"):
        MultiTurnGRPOConfig(**settings(tmp_path), max_turn=3)


@pytest.mark.parametrize(
    ("rewards", "names"),
    [
        (lambda n: torch.ones(n, 1), ["(2, 1)", "squeeze(-1)"]),
        (lambda n: np.ones((n, 3)), ["(2, 3)", "(completions,)"]),
        (lambda n: 1.0, ["1.0", "a list", "for completion in completions"]),
        (lambda n: None, ["None", "lack a return"]),
        (lambda n: ["1.0"] * n, ["'1.0'", "float("]),
        (lambda n: [[1.0]] * n, ["[1.0]", "float("]),
        (lambda n: "11", ["'11'", "a list"]),
        (lambda n: [math.inf] * n, ["inf", "finite"]),
        (lambda n: [1.0] * (n + 1), ["3 values for 2 completions"]),
    ],
)
def test_rewards_that_are_no_list_of_numbers(rewards: Callable[[int], Any], names: list[str]) -> None:
    def rated(completions: list[str], **_: Any) -> Any:
        return rewards(len(completions))

    episodes = [SimpleNamespace(stop_reason=StopReason.TERMINATED, environment=None)] * 2
    given = {"trajectories": episodes, "completions": ["a", "b"], "log_extra": print, "log_metric": print}
    with pytest.raises((TypeError, ValueError), match=saying("'rated'", *names)):
        over_sound_episodes(rated, False)(**given)


def test_rewards_in_any_array_are_taken(embedded_model: Path) -> None:
    episodes = [SimpleNamespace(stop_reason=StopReason.TERMINATED, environment=None)] * 3
    given = {"trajectories": episodes, "completions": list("abc"), "log_extra": print, "log_metric": lambda *_: None}
    for made in ([1, None, np.float32(2)], (1.0, None, 2.0), iter([True, None, 2])):
        assert over_sound_episodes(lambda made=made, **_: made, False)(**given) == [1, None, 2]
    assert over_sound_episodes(lambda **_: torch.arange(3.0), False)(**given) == [0, 1, 2]


def test_a_forgotten_model(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'model'") as raised:
        MultiTurnGRPOTrainer(environment=Chatter, args=MultiTurnGRPOConfig(**settings(tmp_path)))  # type: ignore[call-arg]
    assert raised.value.__context__ is None


def test_a_model_without_a_head(embedded_model: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(embedded_model)
    with pytest.raises(TypeError, match=r"Qwen3Model, which has no head .*AutoModelForCausalLM"):
        MultiTurnGRPOTrainer(model=model, environment=Chatter, args=MultiTurnGRPOConfig(**settings(tmp_path)))


def test_a_path_as_model(embedded_model: Path, tmp_path: Path) -> None:
    args = MultiTurnGRPOConfig(**settings(tmp_path))
    trainer = MultiTurnGRPOTrainer(model=embedded_model, args=args, environment=Chatter, peft_config=LoraConfig(**LORA))
    assert trainer.model.get_base_model().name_or_path == str(embedded_model)


@pytest.mark.parametrize("place", [".", "run"])
def test_the_models_own_folder_is_not_overwritten(place: str, embedded_model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.symlink_to(embedded_model)
    with pytest.raises(
        ValueError, match=r"(?s)output_dir=.*the model's.*Choose another output_dir.*base-trained|model-trained"
    ):
        make_trainer(base, embedded_model / place, lora=False)


def test_output_dir_that_is_a_file(embedded_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/run"):
        with pytest.raises(ValueError, match=naming(repr(str(tmp_path / place)), "Choose another path")):
            make_trainer(embedded_model, tmp_path / place)


def test_a_second_adapter_is_not_stacked(embedded_model: Path, tmp_path: Path) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(embedded_model), LoraConfig(**LORA))
    model.save_pretrained(tmp_path / "both")
    for given in (model, model.get_base_model()):
        with pytest.raises(
            ValueError,
            match=r"(?s)stack a second one.*Leave peft_config unset.*merge_lora_configs=True.*merge_and_unload",
        ):
            MultiTurnGRPOTrainer(
                given,
                args=MultiTurnGRPOConfig(**settings(tmp_path)),
                environment=Chatter,
                peft_config=LoraConfig(**LORA),
            )
    AutoModelForCausalLM.from_pretrained(embedded_model).save_pretrained(tmp_path / "both")
    with pytest.raises(ValueError, match=r"(?s)both.*config.json.*adapter_config.json.*Move the adapter's files"):
        make_trainer(tmp_path / "both", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "mistake", "fix"),
    [
        ("mine", lambda model: None, r"adapter 'mine'.*'default'.*adapter_name unset"),
        ("default", lambda model: model.set_adapter("b"), r"runs the adapter 'b'.*set_adapter\('default'\)"),
        ("default", lambda model: model.base_model.set_adapter(["default", "b"]), r"'default', 'b'.*set_adapter"),
        ("default", lambda model: model.merge_adapter(), r"merged.*unmerge_adapter\(\)"),
        ("default", lambda model: model.disable_adapter_layers(), r"disabled.*enable_adapter_layers\(\)"),
    ],
    ids=["another name", "another runs", "two run", "merged", "disabled"],
)
def test_an_adapter_that_is_not_the_policy(
    name: str, mistake: Callable[[Any], None], fix: str, embedded_model: Path, tmp_path: Path
) -> None:
    """One that does not run beside the policy is kept, and saved in its own folder."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(embedded_model), LoraConfig(**LORA), adapter_name=name)
    model.add_adapter("b", LoraConfig(**LORA))
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)

    def make() -> MultiTurnGRPOTrainer:
        args = MultiTurnGRPOConfig(**settings(tmp_path))
        return MultiTurnGRPOTrainer(model, args=args, environment=Chatter, processing_class=tokenizer)

    if name == "default":
        make().save_model()
        assert (tmp_path / "b" / "adapter_config.json").is_file()
    mistake(model)
    with pytest.raises(ValueError, match=f"(?s){fix}"):
        make()


def test_a_word_that_the_tokenizer_lacks(tmp_path: Path) -> None:
    model = make_embedded_model(tmp_path / "model", words=["hello"])
    with pytest.raises(ValueError, match=r"no token for 'start'.*words=.*'\[UNK\]'"):
        make_trainer(model, tmp_path / "out")


def test_a_tokenizer_of_another_model(embedded_model: Path, tmp_path: Path) -> None:
    model = make_embedded_model(tmp_path / "model", words=["start", "[UNK]"])
    with pytest.raises(ValueError, match=r"embeddings for \d+ tokens only.*own tokenizer as processing_class"):
        MultiTurnGRPOTrainer(
            model, args=MultiTurnGRPOConfig(**settings(tmp_path / "out")), environment=Chatter,
            processing_class=AutoTokenizer.from_pretrained(embedded_model),
        )  # fmt: skip


def test_a_misspelt_metric_of_the_best_model(embedded_model: Path, tmp_path: Path) -> None:
    options = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_steps": 1,
    }
    for metric in ("sucess", "eval_retrun"):
        with pytest.raises(ValueError, match=naming(metric, "did you mean", "'success'", "leave it unset")):
            make_trainer(embedded_model, tmp_path, metric_for_best_model=metric, **options)
    make_trainer(embedded_model, tmp_path, metric_for_best_model="words_per_answer", **options)  # of a reward function


def test_a_reward_that_is_no_number_does_not_end_an_own_loop(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path)
    episodes = trainer.rollout()
    turn = episodes[1].turns[0]
    for wrong in (math.nan, math.inf, "1.0", None):
        before, turn.reward = turn.reward, wrong
        with pytest.raises(ValueError, match=naming("turn 1 of episode 1", wrong, "finite")):
            trainer.update(episodes)
        turn.reward = before
    assert trainer.update(episodes)["step"] == 1, "the run goes on"
