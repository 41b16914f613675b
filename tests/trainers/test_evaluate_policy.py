"""Evaluation without a trainer: the episodes of ``trainer.evaluate()``, from a model object, a folder or an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from games import Chatter, OneTurn, make_trainer, settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from agile_trainers.evaluation import EpisodeOptions, EpisodeResults, SamplingSettings, evaluate_policy
from agile_trainers.rollout.metrics import episode_metrics
from agile_trainers.trainers.trainer import MultiTurnTrainer

OPTIONS = EpisodeOptions(max_turns=4, max_new_tokens=5)
SAMPLING = SamplingSettings(stop_strings=tuple(settings("x")["stop_strings"]), temperature=0.9)


class Listener(Chatter):
    """Chatter that says which row it got, and counts instances and calls."""

    made = resets = steps = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        type(self).resets += 1
        text, info = super().reset(seed, options)
        return f"{(options or {}).get('word', '')} {text}", info

    def step(self, action: str) -> Any:
        type(self).steps += 1
        return super().step(action)


class Broken(Chatter):
    def step(self, action: str) -> Any:
        raise RuntimeError("no words")


ROWS = [{"word": "a"}, {"word": "the"}, {"word": "is"}]


@pytest.fixture(scope="module")
def trained(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> MultiTurnTrainer:
    """A policy that is no longer its base, with rows to evaluate on, saved."""
    folder = tmp_path_factory.mktemp("trained")
    trainer = make_trainer(
        embedded_model, folder, environment=Listener, eval_dataset=Dataset.from_list(ROWS), num_eval_episodes=7,
        temperature=0.9, learning_rate=1.0,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(folder / "policy"))
    return trainer


def said(results: Any) -> list[tuple[Any, ...]]:
    """What makes an episode, token for token."""
    return [(t.prompt_ids, t.completion_ids, t.rewards, t.seed, t.options) for t in results]


def by_trainer(trainer: MultiTurnTrainer, **options: Any) -> tuple[dict[str, float], list[Any]]:
    """What ``trainer.evaluate()`` returns, and the episodes it plays."""
    played: list[Any] = []
    write = trainer.rollout_log.write_evaluation
    trainer.rollout_log.write_evaluation = lambda step, prefix, evaluated: played.extend(evaluated.trajectories)  # type: ignore[method-assign]
    metrics = trainer.evaluate(**options)
    trainer.rollout_log.write_evaluation = write  # type: ignore[method-assign]
    return metrics, played


def test_eval_greedy_makes_evaluations_take_the_likeliest_token(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, eval_greedy=True, num_eval_episodes=4)
    _, played = by_trainer(trainer)
    for episode in played:
        with torch.no_grad():
            logits = trainer.model(torch.tensor([episode.prompt_ids + episode.completion_ids])).logits[0]
        likeliest = logits[len(episode.prompt_ids) - 1 : -1].argmax(dim=-1)
        sampled = torch.cat([torch.arange(turn.start, turn.end) for turn in episode.turns])
        assert likeliest[sampled].tolist() == [episode.completion_ids[place] for place in sampled]
    assert said(played) == said(by_trainer(trainer, greedy=True)[1]) != said(by_trainer(trainer, greedy=False)[1])


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("source", ["object", "folder"])
def test_the_episodes_are_those_of_the_trainer(trained: MultiTurnTrainer, source: str, greedy: bool) -> None:
    metrics, expected = by_trainer(trained, greedy=greedy)
    model = trained.model if source == "object" else f"{trained.args.output_dir}/policy"
    modes = [module.training for module in trained.model.modules()]
    results = evaluate_policy(
        model, None, Listener, 7, rows=ROWS, seed=3, held_out=False, greedy=greedy, options=OPTIONS, sampling=SAMPLING
    )
    assert said(results.trajectories) == said(expected) and len(expected) == 7
    ours = results.metrics
    assert {"return", "return_sem", "episodes", "success", "turns/mean", "stop/terminated"} <= set(ours)
    assert ours == {name: metrics[f"eval_{name}"] for name in ours}
    assert results.rows == [episode_metrics(trajectory) for trajectory in expected] and results.places == list(range(7))
    assert modes == [module.training for module in trained.model.modules()]


def test_the_adapter_is_what_is_played(trained: MultiTurnTrainer, embedded_model: Path) -> None:
    def play(model: Any, **changes: Any) -> EpisodeResults:
        settings = {"options": OPTIONS, "sampling": SAMPLING, "held_out": False}
        return evaluate_policy(model, None, OneTurn, 6, **{**settings, **changes})

    base = AutoModelForCausalLM.from_pretrained(embedded_model)
    state = torch.get_rng_state()
    plain, adapted = play(str(embedded_model)), play(f"{trained.args.output_dir}/policy")
    assert said(plain.trajectories) == said(play(base).trajectories) != said(adapted.trajectories)
    assert said(plain.trajectories) != said(play(base, seed=0).trajectories)
    assert said(plain.trajectories) == said(play(base, generation_chunk_size=2).trajectories)
    longer = play(base, options=EpisodeOptions(max_turns=1, max_new_tokens=9, environment_workers=2), rows=None)
    assert max(row["action_tokens"] for row in longer.rows) > 5
    assert torch.equal(state, torch.get_rng_state())
    seeds = {one.seed for one in play(base, held_out=True).starts}
    assert len(seeds) == 6 and not seeds & {one.seed for one in plain.starts}, "nothing was chosen by these episodes"


def test_several_environments_play_equally_many_within_their_own_limits(embedded_model: Path) -> None:
    limits = {"one": {"max_new_tokens": 1}, "many": {"max_turns": 2}}
    results = evaluate_policy(
        str(embedded_model), None, {"one": OneTurn, "many": Chatter}, 9,
        options=EpisodeOptions(max_new_tokens=3, environment_limits=limits),
    )  # fmt: skip
    assert {name: metrics["episodes"] for name, metrics in results.by_environment.items()} == {"one": 5, "many": 4}
    assert {row["action_tokens"] for row in results.rows if row["environment"] == "one"} == {1}
    assert results.by_environment["many"]["turns/max"] == 2
    total = sum(metrics["return"] * metrics["episodes"] for metrics in results.by_environment.values())
    assert results.metrics["return"] == pytest.approx(total / 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episodes": 0}, "an episode and an attempt at least, got episodes=0"),
        ({"rows": []}, "needs a row"),
        ({"device": "cpu"}, "device='cpu'.*loaded already"),
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, "model_init_kwargs=.*loaded already"),
        ({"options": EpisodeOptions(max_model_length=10**6)}, "max_model_length=1000000"),
        ({"options": EpisodeOptions(environment_limits={"x": {"max_turns": 1}})}, "environment_limits names 'x'"),
        ({"generation_chunk_size": 0}, "max_batch_size"),
        ({"environment": {}}, "empty mapping"),
        ({"environment": lambda: object()}, "object cannot be played"),
        ({"environment": {"one": OneTurn, "other": Broken}}, r"other \(Broken\) cannot be played(.|\n)*no words"),
        ({"options": EpisodeOptions(max_model_length=3)}, "max_model_length=3"),
        ({"sampling": SamplingSettings(min_new_tokens=300)}, "max_new_tokens=256 is less than min_new_tokens=300"),
    ],
)
def test_what_cannot_be_evaluated(embedded_model: Path, changes: dict[str, Any], message: str) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(embedded_model),
        AutoTokenizer.from_pretrained(embedded_model),
    )
    given: dict[str, Any] = {"environment": OneTurn, "episodes": 2, **changes}
    with pytest.raises(ValueError, match=message):
        evaluate_policy(model, tokenizer, **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_turns": 0}, "max_turns must be at least 1, got 0"),
        (
            {"environment_limits": {"x": {"max_turns": 0}}},
            r"environment_limits\['x'\]: max_turns must be at least 1, got 0",
        ),
        ({"environment_limits": {"x": {"temperature": 1}}}, r"environment_limits\['x'\].*'temperature'"),
    ],
)
def test_limits_that_cannot_be_played_by(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EpisodeOptions(**changes)
