"""Moves of a policy to its sampler that go wrong, planted in a real trainer on each generator."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from agile_trainers.adapters.copies import holding_weights
from agile_trainers.adapters.roles import POLICY, belongs_to, running
from agile_trainers.sampling import delivery, mismatch

Weights = dict[str, torch.Tensor]

CAUSES = {
    "not arrived": "the base model without the adapter",
    "late": "the policy of the batch before",
    "a part": r"the adapter without its modules q_proj, up_proj \(a part",
    "a layer": r"the adapter without its layers 1 \(a part",
    "other layers": "the adapter on other layers than it was trained on, each on the one above",
    "scaling": "the adapter with 4 times its scaling",
}
"""What the error says of each."""


def changed(name: str, weights: Weights) -> Weights:
    """What arrives of an adapter's weights."""
    if name == "other layers":
        moved = {
            re.sub(r"\.0\.", ".1.", key, count=1): weight.clone()
            for key, weight in weights.items()
            if ".layers.0." in key
        }
        return {key: moved.get(key, without(key, weight)) for key, weight in weights.items()}
    lost = {"a part": r"q_proj|up_proj", "a layer": r"\.layers\.1\."}.get(name, "nothing")
    return {key: without(key, weight) if re.search(lost, key) else weight for key, weight in weights.items()}


def without(key: str, weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(weight) if "lora_B" in key else weight


def plant(trainer: Any, name: str) -> None:
    """Let the moves of a trainer go wrong; the first one right, if they are late."""
    if trainer.sampler.vllm is not None:
        _in_engine(trainer.sampler.vllm, name)
        return
    generators = trainer.sampler.generators
    given: list[Weights] = []

    def arriving() -> AbstractContextManager[None]:
        own = {key: one.detach().clone() for key, one in trainer.model.named_parameters() if belongs_to(key, POLICY)}
        given.append(own)
        if name == "not arrived":
            return running(trainer.model, None)
        scaled = {key: weight * 4 if "lora_B" in key else weight for key, weight in own.items()}
        wrong = {"late": given[max(len(given) - 2, 0)], "scaling": scaled}
        return holding_weights(trainer.model, wrong.get(name) or changed(name, own))

    @contextmanager
    def wrongly(*args: Any, **kwargs: Any) -> Iterator[Callable[..., Any]]:
        with arriving(), generators(*args, **kwargs) as make:
            yield make

    trainer.sampler.generators = wrongly


def _in_engine(served: Any, name: str) -> None:
    """What is moved to vLLM, or what requests name, is wrong."""
    move, moves = served._move_adapter, []
    served._moved_at_construction = None  # the first rollout moves it

    def wrongly(weights: Weights, config: Any) -> int:
        moves.append(name)
        if name == "late" and len(moves) > 1:
            return 0
        scaled = replace(config, lora_alpha=config.lora_alpha * 4) if name == "scaling" else config
        moved = move(changed(name, weights), scaled)
        if name == "not arrived":
            served.engine.adapter = None
        return int(moved)

    served._move_adapter = wrongly


def suspect_every_batch(monkeypatch: Any) -> list[float]:
    """Look for another policy in every batch, thoroughly; what part of the difference is left under each comes to a list."""
    find, judge, left = delivery.Delivery.find, delivery._Trial.judge, list[float]()

    def judged(trial: Any, policy: Any) -> Any:
        found = judge(trial, policy)
        left.append(found.near / found.far)
        return found

    def thoroughly(self: delivery.Delivery, *, exact: bool, thorough: bool) -> Any:
        return find(self, exact=exact, thorough=True)

    for holder, name, value in (
        (mismatch, "EXACT", 0.0), (mismatch, "RISE", 0.0), (delivery._Trial, "judge", judged),
        (delivery.Delivery, "find", thoroughly),
    ):  # fmt: skip
        monkeypatch.setattr(holder, name, value)
    return left
