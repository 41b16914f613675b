"""Runs with a planted failure name it, and measurements of the policy equal those computed one answer at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from games import OneTurn, make_trainer

from agile_environments.probes import PROBES
from agile_trainers.monitor.health_checks import (
    ANSWER_TOKENS,
    LANDMARKS,
    PAIRS,
    HealthChecks,
    PolicyMeasurements,
    PromptedAnswer,
    answers_of_turn,
    prompt_information,
)
from agile_trainers.records.reader import open_records
from agile_trainers.rollout.forest import Call, forest
from agile_trainers.types import StopReason, Trajectory, Turn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import probes

# ------------------------------------------------------------------------------------------------- prompt information


def test_prompt_information_by_hand() -> None:
    """Two prompts: log p(y1|x1) = log .8, log p(y1|x2) = log .2; the second answer is equally likely after both."""
    scores = torch.tensor([[0.8, 0.2], [0.5, 0.5]]).log()
    assert prompt_information(scores) == pytest.approx((math.log(0.8 / 0.5) + 0.0) / 2 / math.log(2))


def test_prompt_information_is_one_for_answers_that_name_their_prompt_and_zero_for_equal_ones() -> None:
    own = torch.full((5, 5), -40.0) + 39 * torch.eye(5)
    assert prompt_information(own) == pytest.approx(1.0, abs=1e-9)
    assert prompt_information(torch.randn(5, 1).expand(5, 5)) == pytest.approx(0.0, abs=1e-6)
    assert prompt_information(own.roll(1, dims=1)) < -10, "columns are prompts"


def test_prompt_information_estimates_the_mutual_information() -> None:
    """Its mean over all answers of a channel is the mutual information with a uniform prompt, by enumeration."""
    channel = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]], dtype=torch.float64)
    marginal = channel.mean(0)
    exact = (0.5 * channel * (channel / marginal).log()).sum()
    mean = sum(
        channel[0, a] * channel[1, b] * prompt_information(channel[:, [a, b]].T.log())
        for a in range(3)
        for b in range(3)
    )
    assert mean * math.log(2) == pytest.approx(exact.item(), abs=1e-9)


@pytest.mark.parametrize("shape", [(2, 3), (1, 1)])
def test_prompt_information_needs_a_square(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="log_probs"):
        prompt_information(torch.zeros(shape))


# ------------------------------------------------------------------------------------------------------------- the checks


def test_each_value_is_taken_once_whenever_the_log_is_cleared() -> None:
    """Values of a step are averaged; those of earlier steps, which wait for a log, are not taken again."""
    options = SimpleNamespace(
        has_critic=False, rewarded=True, loss_type="grpo", importance_sampling_level="token", task_sampling="uniform",
        shuffle_dataset=True, generation_batch_size=8, num_generations=4,
    )  # fmt: skip
    checks = HealthChecks(options, SimpleNamespace(state=dict), speaks=False)
    pending: dict[str, list[float]] = {"entropy": [1.0, 3.0]}
    with checks.looking(1, pending):
        pass
    pending["entropy"] += [5.0]
    with checks.looking(2, pending):
        pending.clear()
    pending["entropy"] = [7.0]
    with checks.looking(3, pending):
        pass
    assert checks.state()["diagnosis"]["history"]["latest"] == {"entropy": [2.0, 5.0, 7.0]}


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce"])
def test_a_probe_is_reported_as_solved_and_nothing_else(algorithm: str) -> None:
    """`make probes` does so for every algorithm and probe. That of groups may end before these are enough."""
    found = probes.run(algorithm, "constant", 0)["findings"]
    assert found == ["solved"] or (algorithm == "grpo" and found == [])


# ------------------------------------------------------------------------------------------------------- measurements


def alone(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probabilities of an answer's tokens, from one forward pass without padding."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(answer)), answer].tolist()


def test_measurements_equal_those_of_one_answer_at_a_time(embedded_model: Path, tmp_path: Path) -> None:
    """Prompts are those of the first turn with four different conversations; the policy moves between two measurements."""
    trainer = make_trainer(embedded_model, tmp_path, per_device_train_batch_size=16, diagnosis_interval=3)
    episodes, measure = trainer.rollout(), partial(trainer.health.measurements.take, models=trainer._models)
    first = measure(0, episodes)
    different = list({tuple(episode.prompt_ids): episode for episode in reversed(episodes)}.values())[::-1]
    assert len(different) == 4 and first.keys() == {"prompt_information"}

    def by_hand() -> tuple[float, list[list[float]]]:
        answers = [(e.prompt_ids, e.completion_ids[: e.turns[0].end]) for e in different]
        matrix = [[sum(alone(trainer.model, prompt, answer)) for prompt, _ in answers] for _, answer in answers]
        landmarks = [
            alone(trainer.model, e.prompt_ids, e.completion_ids[: e.turns[0].end]) for e in episodes[:LANDMARKS]
        ]
        return prompt_information(torch.tensor(matrix)), landmarks

    told, before = by_hand()
    assert first["prompt_information"] == pytest.approx(told, abs=1e-5)
    assert trainer.health.measurements.rows == 4 * 4 + LANDMARKS
    assert measure(1, episodes) == measure(2, episodes) == {}
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.05
    second, (told, after) = measure(3, episodes), by_hand()
    changes = [abs(x - y) for row, other in zip(before, after) for x, y in zip(row, other)]
    assert second["prompt_information"] == pytest.approx(told, abs=1e-5)
    assert (
        second["policy_change"] == pytest.approx(sum(changes) / len(changes), rel=1e-3)
        and second["policy_change"] > 0.01
    )


def test_answers_that_are_compared() -> None:
    """One for each conversation before the turn; an episode that failed, or had no such turn, has none."""

    def episode(prompt: list[int], lengths: list[int], failed: bool = False) -> Trajectory:
        turns, at = [], 0
        for length in lengths:
            turns.append(Turn(at, at + length, "", "stop"))
            at += length + 1
        reason = StopReason.ENVIRONMENT_ERROR if failed else StopReason.TERMINATED
        return Trajectory(prompt, list(range(at)), [0.0] * at, turns, reason)

    played = [
        episode([7], [2, 3]),
        episode([7], [4]),
        episode([8], [ANSWER_TOKENS + 9]),
        episode([9], [1], failed=True),
    ]
    assert answers_of_turn(played, 0) == [PromptedAnswer([7], [0, 1]), PromptedAnswer([8], list(range(ANSWER_TOKENS)))]
    assert answers_of_turn(played, 1) == [PromptedAnswer([7, 0, 1, 2], [3, 4, 5])]
    assert len(answers_of_turn([episode([n], [1]) for n in range(20)], 0)) == PAIRS
    # Of episodes of several paths, each after its own prompt; the second turn of one may be another's helper.
    calls = [Call([7], [1, 2], [0.0] * 2), Call([5, 6], [3], [0.0])]
    rewritten, helped = (forest(calls, StopReason.TERMINATED, linear=linear) for linear in (True, False))
    assert answers_of_turn([rewritten, helped], 0) == [PromptedAnswer([7], [1, 2])]
    assert answers_of_turn([rewritten], 1) == [PromptedAnswer([5, 6], [3])] and answers_of_turn([helped], 1) == []


def test_measurements_are_off_where_they_cannot_act(embedded_model: Path, tmp_path: Path) -> None:
    """A single prompt and one turn: nothing to compare, so only the four answers are read. Interval 0: nothing at all."""
    trainer = make_trainer(
        embedded_model, tmp_path, environment=PROBES["constant"].factory, max_turns=1, max_new_tokens=1, max_steps=2,
        diagnosis_interval=1, stop_strings=None,
    )  # fmt: skip
    trainer.train()
    assert (
        "prompt_information" not in trainer.state.log_history[0] and trainer.health.measurements.rows == 2 * LANDMARKS
    )
    assert "policy_change" in trainer.state.log_history[1]
    silent = PolicyMeasurements(trainer.log_prob_passes, trainer.accelerator, 0, (0, 0))
    assert silent.take(0, [], trainer._models) == {} and silent.rows == 0


# ----------------------------------------------------------------------------------------------------- planted failures


def plays(
    reward: Callable[[str], float] = lambda action: 0.0,
    success: Callable[[str], bool] | None = None,
    long: str = "",
) -> type[OneTurn]:
    """An environment of one turn with this reward."""

    class Planted(OneTurn):
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
            observation, info = super().reset(seed, options)
            return observation + long, info

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "end", reward(action), True, False, {} if success is None else {"success": success(action)}

    return Planted


class Fails(OneTurn):
    """Fails on some answers, but not on those of the check at construction."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if sum(map(ord, action)) % 4 == 3:
            raise RuntimeError("the disk is full")
        return super().step(action)


class Talks(OneTurn):
    """Never ends an episode, and says much."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "more " * 30, float(len(action) % 2), False, False, {"success": False}


class SameStart(OneTurn):
    """Starts alike after every seed."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return super().reset(0, options)


def not_a_number(completions: list[Any], **_: Any) -> list[float | None]:
    return [math.nan, None, *[0.0] * (len(completions) - 2)]


def half(action: str) -> float:
    return float(sum(map(ord, action)) % 2)


SHORT: dict[str, Any] = {
    "max_turns": 1,
    "max_new_tokens": 2,
    "max_steps": 5,
    "stop_strings": None,
    "max_grad_norm": 1.0,
}
ADAM = {"optim": "adamw_torch"}
GROUPS = {"num_generations": 2, "per_device_train_batch_size": 24, "gradient_accumulation_steps": 1}  # 12 a batch
FAILURES: dict[str, tuple[set[str], dict[str, Any]]] = {
    "success without exception": ({"solved"}, {"environment": plays(lambda _: 1.0, lambda _: True), **GROUPS}),
    "no success": ({"too_hard"}, {"environment": plays(lambda _: 0.0, lambda _: False), **GROUPS}),
    "a constant reward": ({"zero_advantage_groups"}, {"environment": plays(lambda _: 3.0)}),
    "an easy task": (
        {"too_easy"}, {"environment": plays(half, lambda action: sum(map(ord, action)) % 8 > 0)},
    ),
    "answers that never end": (
        {"cut_answers"}, {"environment": plays(half), "max_new_tokens": 16},
    ),
    "a full context": (
        {"context_full", "episodes_cut"},
        {"environment": Talks, "max_turns": 9, "max_model_length": 300, "max_steps": 5},
    ),
    "all cut and masked": (
        {"episodes_cut"},
        {"environment": Talks, "max_turns": 1, "mask_truncated_completions": True},
    ),
    "an environment that fails": ({"environment_failing"}, {"environment": Fails, "max_steps": 1}),
    "a learning rate without effect": (
        {"no_weight_change"},
        {"environment": plays(half), "learning_rate": 1e-9, "diagnosis_interval": 20, "max_steps": 21, **ADAM},
    ),
    "too large a step": (
        {"ratio_clipped"},
        {"environment": plays(half), "learning_rate": 3e-2, "num_iterations": 4, "max_steps": 40, "epsilon": 1e-2, **ADAM},
    ),
    "a flipped sign": (
        {"reward_misses_success"}, {"environment": plays(lambda action: -half(action), lambda action: half(action) > 0)},
    ),
    "a single row": (
        {"one_task"},
        {"environment": SameStart, "train_dataset": Dataset.from_list([{"number": 1}] * 2), "max_steps": 10},
    ),
    "a reward that is not a number": ({"rewards_missing"}, {"reward_funcs": not_a_number, "max_steps": 1}),
    "a policy without entropy": (
        {"zero_advantage_groups"}, {"environment": plays(half), "temperature": 1e-4, "max_steps": 10},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_a_planted_failure_is_named(embedded_model: Path, tmp_path: Path, case: str) -> None:
    expected, changes = FAILURES[case]
    trainer = make_trainer(embedded_model, tmp_path, **{**SHORT, **changes})
    trainer.train()
    found = [finding.name for finding in trainer.health.findings]
    assert expected <= {*found}, found
    (records,) = open_records(tmp_path)
    assert records.findings() == [finding.to_dict() for finding in trainer.health.findings]
