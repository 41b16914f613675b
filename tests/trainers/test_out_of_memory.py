"""Memory that runs out in the five places of a step: the run ends bit-equal to one that has the smaller size from there."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_ranks
from games import make_trainer
from ppo_games import make_ppo

from agile_trainers.rollout.generators.transformers.generator import TransformersGenerator
from agile_trainers.step.token_batches import remember_attributes, undoing, within_memory

SCRIPT = Path(__file__).with_name("out_of_memory_two_processes.py")
DROPOUT = {"lora": {"lora_dropout": 0.2}, "disable_dropout": False}


class OutOfMemory:
    """Raises torch's error once, in the first pass of several rows from the call with this number on."""

    def __init__(self, call: int, rows: int = 1):
        self.left, self.rows, self.raised = call, rows, 0

    def __call__(self, rows: int) -> None:
        self.left -= 1
        if self.left <= 0 and rows > self.rows and not self.raised:
            self.raised += 1
            raise torch.OutOfMemoryError


def in_forward(trainer: Any, fails: OutOfMemory) -> None:
    trainer.model.get_base_model().model.layers[0].mlp.down_proj.register_forward_hook(
        lambda _module, args, output: fails(len(args[0])) if output.requires_grad else None
    )


def in_backward(trainer: Any, fails: OutOfMemory) -> None:
    def watch(_module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            rows = len(args[0])
            output.register_hook(lambda _: fails(rows))

    trainer.model.get_base_model().model.layers[0].mlp.down_proj.register_forward_hook(watch)


def in_scoring(trainer: Any, fails: OutOfMemory) -> None:
    score = trainer.log_prob_passes._log_probs

    def watched(*args: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        fails(len(input_ids))
        return score(*args, input_ids=input_ids, **kwargs)

    trainer.log_prob_passes._log_probs = watched


def in_critic(trainer: Any, fails: OutOfMemory) -> None:
    values = trainer.packer.values

    def watched(model: Any, part: Any, positions: torch.Tensor) -> Any:
        fails(len(positions))
        return values(model, part, positions)

    trainer.packer.values = watched


SPLIT = {"per_device_train_batch_size": 4, "steps_per_generation": 2}
"""A batch of two updates, before which it is scored."""
PLACES: dict[str, tuple[Callable[[Any, OutOfMemory], None], dict[str, Any]]] = {
    "forward": (in_forward, DROPOUT),
    "backward": (in_backward, DROPOUT),
    "backward of the second micro-batch": (in_backward, {**DROPOUT, "gradient_accumulation_steps": 2}),
    "scoring": (in_scoring, {**SPLIT, "beta": 0.1}),
    "critic": (in_critic, {}),
    "critic with its gradient": (in_critic, {"max_turns": 2}),
}


def trained(
    place: str, model: Path, folder: Path, call: int, switch: tuple[int, int] | None = None
) -> tuple[Any, int, OutOfMemory]:
    """Train two steps. Memory runs out at ``call``, or the budget is ``switch[1]`` from attempt ``switch[0]`` on."""
    watch, options = PLACES[place]
    make = make_ppo if place.startswith("critic") else make_trainer
    if place == "critic":
        options = {**options, **SPLIT}
    torch.manual_seed(0)
    settings = {"max_steps": 2, "learning_rate": 1e-2, "sequence_packing": "none", "skip_zero_advantage": False}
    trainer = make(model, folder, **{**settings, **options})
    fails = OutOfMemory(call if switch is None else 10**9)
    watch(trainer, fails)
    attempts, failed = 0, 0
    fitting = trainer.token_batches.fitting

    def counted(function: Callable[[], Any]) -> Any:
        nonlocal attempts, failed
        attempts += 1
        if switch is not None and attempts == switch[0]:
            trainer.token_batches.budget = switch[1]
        raised = fails.raised
        result = fitting(function)
        if fails.raised > raised:
            failed = attempts
        return result

    trainer.token_batches.fitting = counted
    trainer.train()
    return trainer, failed, fails


@pytest.mark.parametrize("place", PLACES)
def test_the_run_is_that_of_smaller_passes_from_there(embedded_model, tmp_path, place):
    call = 4 if "second" in place else 1 if place == "critic" else 2
    first, failed, fails = trained(place, embedded_model, tmp_path / "out", call)
    assert fails.raised == 1 and failed > 0
    other, _, _ = trained(place, embedded_model, tmp_path / "smaller", 0, switch=(failed, first.token_batches.budget))
    assert first.token_batches.budget == other.token_batches.budget < 16_000
    for (name, weights), (_, expected) in zip(
        first.model.named_parameters(), other.model.named_parameters(), strict=True
    ):
        assert torch.equal(weights, expected), name
    logs = [
        [{n: v for n, v in log.items() if "time" not in n and "per_second" not in n} for log in one.state.log_history]
        for one in (first, other)
    ]
    assert logs[0][:2] == logs[1][:2]


def test_a_rollout_is_played_again_with_half_of_its_rows(embedded_model, tmp_path, monkeypatch):
    forward, rows, fails = TransformersGenerator._forward, [], OutOfMemory(3, rows=4)

    def watched(self, batch):
        rows.append(len(batch.rows))
        fails(len(batch.rows))
        return forward(self, batch)

    expected = make_trainer(embedded_model, tmp_path / "smaller", generation_chunk_size=4).rollout()
    monkeypatch.setattr(TransformersGenerator, "_forward", watched)
    trainer = make_trainer(embedded_model, tmp_path / "out")
    played = [(one.completion_ids, one.sampling_logprobs, one.episode_return, one.seed) for one in trainer.rollout()]
    assert played == [(one.completion_ids, one.sampling_logprobs, one.episode_return, one.seed) for one in expected]
    assert fails.raised == 1 and trainer.sampler.rows == 4 and max(rows) == 8 and max(rows[3:]) == 4
    # An evaluation plays on with these.
    rows.clear()
    trainer.evaluate(num_episodes=8)
    assert max(rows) == 4


def test_an_evaluation_is_played_again_too(embedded_model, tmp_path, monkeypatch):
    forward, fails = TransformersGenerator._forward, OutOfMemory(1, rows=2)

    def watched(self, batch):
        fails(len(batch.rows))
        return forward(self, batch)

    trainer = make_trainer(embedded_model, tmp_path)
    expected = trainer.evaluate(num_episodes=4)["eval_return"]
    monkeypatch.setattr(TransformersGenerator, "_forward", watched)
    assert trainer.evaluate(num_episodes=4)["eval_return"] == expected
    assert fails.raised == 1 and trainer.sampler.rows == 2


def test_nothing_is_left_to_halve(embedded_model, tmp_path, monkeypatch):
    def fails(self, batch):
        raise torch.OutOfMemoryError

    trainer = make_trainer(embedded_model, tmp_path, num_iterations=2)
    with monkeypatch.context() as patch:
        patch.setattr(TransformersGenerator, "_forward", fails)
        with pytest.raises(RuntimeError, match=r"A single episode does not fit .* Lower max_model_length"):
            trainer.rollout()
        assert trainer.sampler.rows == 1

    def run_out(*args, **kwargs):
        raise torch.OutOfMemoryError

    trainer = make_trainer(embedded_model, tmp_path / "scoring", **SPLIT)
    trainer.log_prob_passes._log_probs = run_out
    with pytest.raises(RuntimeError, match=r"An episode does not fit into memory. Lower max_model_length.$"):
        trainer.train()


def test_a_resumed_run_decodes_as_many_episodes_at_the_same_time(embedded_model, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "save_only_model": False}
    trainer = make_trainer(embedded_model, tmp_path, **saving)
    trainer.sampler.halve(8)
    trainer.train()
    for option, rows in ((None, 4), (2, 2), (6, 4)):
        resumed = make_trainer(embedded_model, tmp_path, **saving, generation_chunk_size=option)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        assert resumed.sampler.rows == rows
    trainer.sampler.restore(None)  # of a checkpoint in which nothing was bounded
    assert trainer.sampler.rows == 4


def test_a_whole_model_says_what_to_lower(embedded_model, tmp_path):
    """Its gradients are as large as itself, and no copy of them is kept."""
    trainer = make_trainer(embedded_model, tmp_path, lora=False, max_tokens_per_micro_batch=500)

    def run_out(*_):
        raise torch.OutOfMemoryError

    trainer.model.model.layers[0].mlp.register_forward_hook(
        lambda _module, _args, output: run_out() if output.requires_grad else None
    )
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    (note,) = caught.value.__notes__
    assert "trained whole" in note and "max_tokens_per_micro_batch (it is 500 now)" in note


def test_what_an_attempt_did_is_undone():
    """Random state, gradients, metrics and observers are those before it; attempts end when nothing is left."""
    weight = torch.nn.Linear(2, 1, bias=False)
    weight.weight.grad = torch.ones(1, 2)
    metrics, seen = {"old": [1.0]}, type("Observer", (), {})()
    seen.total, seen.stored = 3, {"a": 1}
    sizes, drawn = [8], []

    def attempt():
        drawn.append(torch.rand(()).item())
        weight.weight.grad += 1.0
        metrics["old"].append(2.0)
        metrics.setdefault("new", []).append(5.0)
        seen.total += 1
        seen.stored["b"] = 2
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError
        return sizes[-1]

    def halve():
        sizes.append(sizes[-1] // 2)

    assert within_memory(attempt, halve, lambda: undoing(weight, metrics, [partial(remember_attributes, seen)])) == 2
    assert sizes == [8, 4, 2] and len(set(drawn)) == 1
    assert weight.weight.grad.tolist() == [[2.0, 2.0]]
    assert metrics == {"old": [1.0, 2.0], "new": [5.0]} and (seen.total, seen.stored) == (4, {"a": 1, "b": 2})


def test_one_of_two_processes(embedded_model, tmp_path):
    """That rank plays again without gathering again, and all have its rows then; in an update, where they wait, all end."""
    done = run_ranks(2, [SCRIPT, embedded_model, tmp_path])
    assert all(rank.returncode for rank in done)
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["rows"] for one in ranks] == [2, 2] and [one["gathered"] for one in ranks] == [1, 1]
    assert ranks[0]["weights"] == ranks[1]["weights"] and all(one["steps"] == 1 for one in ranks)
    said = "".join(rank.stderr for rank in done)
    assert said.count("Forward passes are not made smaller by themselves with several processes.") == 1
    assert not list(tmp_path.glob("survivor-*"))


def test_what_a_pass_changes_is_put_back(embedded_model, tmp_path):
    """Each observer of a run with a critic has, after an attempt that is undone, what it had before."""
    trainer = make_ppo(embedded_model, tmp_path)
    ids, mask = torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool)
    observed = [trainer.turn_means[0], trainer.mismatch, trainer.critic]

    def watch() -> None:
        trainer.turn_means[0].add(torch.ones(1, 3), ids, mask)
        trainer.mismatch.add(torch.ones(1, 3), torch.zeros(1, 3), mask, ids, mask[:, 0])
        trainer.accelerator.gradient_state._set_sync_gradients(False)
        trainer.critic._metrics(*torch.ones(4))

    trainer.mismatch.open()
    watch()
    before = [dict(vars(one)) for one in observed]
    undo = undoing(None, {}, trainer.token_batches.observers)
    watch()
    for one, state in zip(observed, before, strict=True):
        changed = {name for name, value in vars(one).items() if value is not state[name]}
        assert changed and all(isinstance(vars(one)[name], torch.Tensor) for name in changed)
    undo()
    assert all(vars(one)[name] is value for one, state in zip(observed, before) for name, value in state.items())
