"""Adapters that do not start as the base: the reference is the policy as it starts, and what is saved loads again."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from games import LORA, Chatter, make_trainer, settings
from peft import LoraConfig, PeftModel, get_peft_model
from ppo_games import make_ppo
from transformers import AutoModelForCausalLM, AutoTokenizer

from agile_trainers.adapters.folders import CheckpointError
from agile_trainers.adapters.roles import POLICY, REFERENCE, running
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agile_trainers.trainers.trainer import MultiTurnTrainer

IDS = torch.randint(0, 200, (2, 24), generator=torch.Generator().manual_seed(0))
LEARNS: dict[str, Any] = {"beta": 0.1, "max_steps": 2, "learning_rate": 1.0}


@torch.no_grad()
def log_probs(model: Any) -> torch.Tensor:
    model.eval()
    return model(input_ids=IDS).logits.log_softmax(-1)


def base_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def kl(trainer: MultiTurnTrainer) -> list[float]:
    return [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]


def assert_near(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=1e-4)


def adapter(trainer: MultiTurnTrainer, name: str) -> dict[str, torch.Tensor]:
    weights = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    return {key.replace(f".{name}.", "."): p.detach().clone() for key, p in weights if f".{name}." in key}


@pytest.fixture(scope="module")
def learned(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Any]:
    """Train with an initialization, once: the folder with the run and its policy, the trainer, and what it started from."""

    @cache
    def train(init: Any) -> tuple[Path, MultiTurnTrainer, torch.Tensor]:
        folder = tmp_path_factory.mktemp(str(init))
        saving = {"save_strategy": "steps", "save_steps": 1}
        trainer = make_trainer(embedded_model, folder / "run", lora={"init_lora_weights": init}, **saving, **LEARNS)
        start = log_probs(trainer.model)
        trainer.train()
        trainer.save_model(str(folder / "policy"))
        return folder, trainer, start

    return train


@pytest.mark.parametrize("init", ["pissa", "olora", "orthogonal", False])
def test_the_reference_is_the_policy_as_it_starts(embedded_model: Path, learned: Any, init: Any) -> None:
    _, trainer, start = learned(init)
    if init is not False:
        assert_near(start, log_probs(base_of(embedded_model)))
    assert (REFERENCE in trainer.model.peft_config) == (init in ("pissa", "olora", False))
    assert abs(kl(trainer)[0]) < 1e-5 < 1e-3 < kl(trainer)[1]
    if REFERENCE in trainer.model.peft_config:
        with running(trainer.model, REFERENCE):
            assert_near(log_probs(trainer.model), start)
    assert (log_probs(trainer.model) - start).abs().max() > 1e-3


def test_no_adapter_is_kept_without_a_penalty(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, lora={"init_lora_weights": "pissa"})
    assert set(trainer.model.peft_config) == {POLICY}


@pytest.mark.parametrize("placement", ["reward", "advantage"])
def test_wherever_the_penalty_enters(embedded_model: Path, tmp_path: Path, placement: str) -> None:
    changes = {"beta": 0.1, "kl_placement": placement}
    trainer = make_trainer(embedded_model, tmp_path, lora={"init_lora_weights": "pissa"}, **changes)
    trainer.train()
    assert abs(kl(trainer)[0]) < 1e-5


def test_a_model_that_has_the_adapter_already(embedded_model: Path, tmp_path: Path) -> None:
    """TRL copies its configuration too, which would take a second part of the base away."""
    model = get_peft_model(base_of(embedded_model), LoraConfig(**{**LORA, "init_lora_weights": "pissa"}))
    start = log_probs(model)
    args = MultiTurnGRPOConfig(**settings(tmp_path, **LEARNS))
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    trainer = MultiTurnGRPOTrainer(model, args=args, environment=Chatter, processing_class=tokenizer)
    assert_near(log_probs(trainer.model), start)
    configs = {name: config.init_lora_weights for name, config in trainer.model.peft_config.items()}
    assert configs == {POLICY: "pissa", REFERENCE: True}
    trainer.train()
    assert abs(kl(trainer)[0]) < 1e-5 < kl(trainer)[1]


@pytest.fixture(scope="module", params=["pissa", "olora"])
def saved(request: pytest.FixtureRequest, learned: Any) -> Any:
    """Options of the adapter, the folder of a trained policy, and its trainer."""
    folder, trainer, _ = learned(request.param)
    return {"init_lora_weights": request.param}, folder, trainer


def test_what_is_saved_loads_on_the_original_base(embedded_model: Path, saved: Any) -> None:
    _, folder, trainer = saved
    loaded = PeftModel.from_pretrained(base_of(embedded_model), folder / "policy")
    assert_near(log_probs(loaded), log_probs(trainer.model))
    assert (log_probs(loaded) - log_probs(base_of(embedded_model))).abs().max() > 1e-2
    written = json.loads((folder / "policy" / REFERENCE / "adapter_config.json").read_text())
    assert written["init_lora_weights"] is True


def test_a_resumed_run_is_the_same_run(embedded_model: Path, saved: Any) -> None:
    lora, folder, trainer = saved
    changes = {**LEARNS, "save_strategy": "steps", "save_steps": 9}
    resumed = make_trainer(embedded_model, folder / "run", lora=lora, **changes)
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-1"))
    for name in (POLICY, REFERENCE):
        theirs, ours = adapter(trainer, name), adapter(resumed, name)
        assert theirs and all(torch.equal(theirs[key], ours[key]) for key in theirs)
    # On the base as it was, the same weights would be another policy.
    other = make_trainer(embedded_model, folder / "run", **changes)
    with pytest.raises(CheckpointError, match=r"lora\.init_lora_weights.*'\w+'.*None"):
        other.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-1"))


def test_a_warm_start_goes_on_with_it(embedded_model: Path, tmp_path: Path, saved: Any) -> None:
    _, folder, trainer = saved
    following = make_trainer(folder / "policy", tmp_path, lora=False, **LEARNS)
    assert_near(log_probs(following.model), log_probs(trainer.model))
    following.train()
    assert abs(kl(following)[0]) < 1e-5 < kl(following)[1]
    with pytest.raises(ValueError, match=r"init_lora_weights='\w+'.*cannot be extended"):
        make_trainer(folder / "policy", tmp_path, lora={"r": 8}, merge_lora_configs=True)


def test_a_critic_starts_from_the_whole_model(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_ppo(embedded_model, tmp_path, lora={"init_lora_weights": "pissa"})
    start = log_probs(trainer.model)
    trainer.model.set_adapter("critic")
    assert_near(log_probs(trainer.model), start)


@pytest.mark.parametrize("init", ["pissa_niter_4", "corda", "lora_ga"])
def test_what_nobody_could_load_again_is_refused(embedded_model: Path, tmp_path: Path, init: str) -> None:
    config = LoraConfig(**LORA)
    config.init_lora_weights = init  # PEFT wants more for some, at once
    with pytest.raises(ValueError, match=f"init_lora_weights='{init}' changes the base"):
        MultiTurnGRPOTrainer(
            str(embedded_model), args=MultiTurnGRPOConfig(**settings(tmp_path)), environment=Chatter, peft_config=config
        )
