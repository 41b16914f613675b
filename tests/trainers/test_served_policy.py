"""When a policy is moved to an engine beside the trainer: once before the first token, then whenever it has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from games import make_trainer
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict

from agile_trainers.rollout.generators.base import Generator, SamplingSettings
from agile_trainers.rollout.generators.transformers.generator import TransformersGenerator
from agile_trainers.sampling.served_policy import ServedPolicy, digest
from agile_trainers.trainers.trainer import MultiTurnTrainer

MISMATCH = "sampling/sampling_logp_difference/max"


class Beside(ServedPolicy):
    """Transformers on a copy of the policy, which knows only what it is given."""

    moves = 0
    max_adapters, max_model_length = None, 1 << 30

    def add_adapter(self, weights: dict[str, torch.Tensor], config: LoraConfig) -> tuple[dict[str, torch.Tensor], int]:
        self.others.append(weights)
        return weights, 0

    def drop_adapter(self, weights: dict[str, torch.Tensor]) -> None:
        self.others = [one for one in self.others if one is not weights]

    def remove_adapter(self) -> None:
        self._connect(None, 0, None)

    def close(self) -> None:
        self.others = []

    def _connect(self, args: Any, rows: int, max_model_length: int | None) -> None:
        self.engine, self.others = self, list[dict[str, torch.Tensor]]()
        self.copy: Any = copy.deepcopy(self._model).eval()
        for name, weight in self.copy.named_parameters():
            if "lora_" in name:
                weight.data.fill_(torch.nan)

    def _move_adapter(self, weights: dict[str, torch.Tensor], config: LoraConfig) -> int:
        self.moves += 1
        set_peft_model_state_dict(self.copy, {name: weight.clone() for name, weight in weights.items()})
        return sum(weight.nbytes for weight in weights.values())

    def _move_whole(self) -> int:
        self.moves += 1
        self.copy.load_state_dict(self._model.state_dict())
        return sum(weight.nbytes for weight in self._model.parameters())

    @contextmanager
    def generator(
        self,
        settings: SamplingSettings,
        eos_token_ids: list[int],
        tokenizer: Any,
        adapter_of: Callable[[int], Any] = lambda episode: None,
    ) -> Iterator[Generator]:
        pad = tokenizer.pad_token_id
        yield TransformersGenerator(
            self.copy, eos_token_ids=eos_token_ids, pad_token_id=pad, settings=settings, tokenizer=tokenizer
        )


@pytest.fixture
def made(embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("agile_trainers.trainers.setup.is_vllm_available", lambda: True)
    monkeypatch.setattr("agile_trainers.sampling.sampler._policy_class", lambda mode: Beside)

    def make(**options: Any) -> tuple[MultiTurnTrainer, Beside]:
        trainer = make_trainer(embedded_model, tmp_path, use_vllm=True, learning_rate=1.0, **options)
        assert isinstance(trainer.sampler.vllm, Beside)
        return trainer, trainer.sampler.vllm

    return make


def logged(trainer: MultiTurnTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_an_adapter_is_moved_once_for_each_policy(made: Any) -> None:
    trainer, engine = made(max_steps=2)
    assert engine.moves == 1, "what the engine cannot serve is said at construction"
    trainer.train()
    assert engine.moves == 2, "the first rollout's policy was there"
    assert max(logged(trainer, MISMATCH)) < 1e-4
    size = sum(weight.nbytes for weight in get_peft_model_state_dict(trainer.model).values())
    assert logged(trainer, "vllm/sync_bytes") == [size, size]


def test_the_policy_is_moved_again_after_others_were_served(made: Any) -> None:
    """Others are served together and taken away, also after an error; meanwhile the engine forgot the policy."""
    trainer, served = made(max_steps=1)
    others: Any = [({"a": torch.ones(1)}, LoraConfig()), ({"b": torch.ones(1)}, LoraConfig())]
    with pytest.raises(OSError), served.serving_several(others) as handles:
        assert handles == [weights for weights, _ in others] == served.others
        raise OSError
    assert served.others == []
    trainer.train()
    assert served.moves == 2 and logged(trainer, MISMATCH)[0] < 1e-3


def test_an_adapter_that_was_changed_after_construction_is_moved_again(made: Any) -> None:
    """Through ``.data``, which torch's own version counter does not see."""
    trainer, engine = made()
    weight = next(weight for name, weight in trainer.model.named_parameters() if "lora_B" in name)
    weight.data.add_(0.5)
    trainer.train()
    assert engine.moves == 2 and max(logged(trainer, MISMATCH)) < 1e-4


def test_a_whole_model_is_moved_first_for_its_first_rollout(made: Any) -> None:
    trainer, engine = made(lora=False)
    assert engine.moves == 0
    trainer.train()
    assert engine.moves == 1 and max(logged(trainer, MISMATCH)) < 1e-4


def test_equal_digests_mean_equal_weights() -> None:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones((), dtype=torch.bfloat16)}
    assert digest(weights) == digest({"b": weights["b"].clone(), "a": weights["a"].t().contiguous().t()})
    for name, other in {"a": weights["a"].view(3, 2), "b": -weights["b"], "c": weights["a"]}.items():
        assert digest(weights) != digest({**weights, name: other})
    assert digest(weights) != digest({**weights, "b": weights["b"].half()})
