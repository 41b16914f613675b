"""Agents whose batches are played ahead: by which policy, and that neither timing nor a kill changes what is trained."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from checkpointed_runs import SAVING, Told, assert_same, press_ctrl_c, run_until, weights
from datasets import Dataset
from environment_agents import Gathers, Plays, scripted
from games import Chatter, make_trainer
from scripted_runs import sampling_with, watched

from agile_trainers.envs.agent import Agent
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.types import Trajectory

RUN: dict[str, Any] = {
    "max_steps": 4, "num_generations": 2, "per_device_train_batch_size": 4, "learning_rate": 0.3, "max_turns": 9,
    "advantage_granularity": "trajectory",
}  # fmt: skip


def in_turn(chance: random.Random | None = None, make: Callable[[], Any] = Chatter) -> Agent:
    return Agent(Plays(make, None if chance is None else lambda task, number: chance.choice([0, 0, 0.01])))


def at_once(chance: random.Random | None = None, make: Callable[[], Any] = Chatter) -> Agent:
    return Agent(Gathers() if chance is None else Gathers(lambda number: chance.choice([0, 0.002, 0.01])))


AGENTS: dict[str, Callable[..., Agent]] = {"in turn": in_turn, "at once": at_once}


def tokens(episodes: list[Trajectory]) -> list[Any]:
    """What an update reads of each, but for log-probabilities."""
    assert not [one.error for one in episodes if one.error]
    return [
        (
            one.seed, one.prompt_ids, one.completion_ids, one.paths, one.linear,
            [(turn.path, turn.place, turn.start, turn.end, turn.reward) for turn in one.turns],
        )
        for one in episodes
    ]  # fmt: skip


@pytest.fixture(scope="module", params=AGENTS)
def run(request: Any, embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run with checkpoints of every step: the trainer, its batches, its folder, how far it is ahead, and its agent.

    Whether one batch is ahead or two is no matter of agents: test_batches_ahead.py has both.
    """
    ahead, kind = 2, request.param
    folder = tmp_path_factory.mktemp("ahead")
    agent = AGENTS[kind]()
    trainer = make_trainer(embedded_model, folder, environment=agent, batches_ahead=ahead, **RUN, **SAVING)
    trained = watched(trainer)
    trainer.train()
    return trainer, trained, folder, ahead, AGENTS[kind]


def test_each_batch_is_played_by_the_policy_of_some_batches_earlier(
    embedded_model: Path, run: Any, tmp_path: Path
) -> None:
    _, trained, folder, ahead, agent = run
    versions = [max(generation - ahead, 0) for generation in range(4)]
    assert [{one.version for one in batch} for batch in trained] == [{version} for version in versions]
    for generation in (ahead, 3):  # the last one of the first policy, and a later policy's
        version = versions[generation]
        model: dict[str, Any] = {"lora": False} if version else {}
        player = make_trainer(
            folder / f"checkpoint-{version}" if version else embedded_model, tmp_path / str(generation),
            environment=agent(), **RUN, **model,
        )  # fmt: skip
        assert tokens(trained[generation]) == tokens(player.rollout(generation=generation))
    assert tokens(trained[3]) != tokens(player.rollout(generation=2))


def test_the_sampler_is_compared_with_the_policy_that_played(run: Any) -> None:
    logs = [log for log in run[0].state.log_history if "loss" in log]
    assert len(logs) == 4
    assert all(log["sampling/sampling_logp_difference/mean"] < 1e-5 for log in logs)
    assert [("drift/kl" in log) for log in logs] == [False, *[True] * 3] and all(
        log["drift/kl"] > 1e-5 for log in logs[1:]
    )
    for log in logs:
        busy = [log[f"busy/{name}"] for name in ("trainer", "sampler", "environments")]
        assert min(busy) >= 0 and max(busy) <= 1 + 1e-9


def test_timing_changes_nothing(embedded_model: Path, tmp_path: Path, run: Any) -> None:
    trainer, trained, _, ahead, agent = run
    late = make_trainer(embedded_model, tmp_path, environment=agent(random.Random(ahead)), batches_ahead=ahead, **RUN)
    others = watched(late)
    late.train()
    assert list(map(tokens, others)) == list(map(tokens, trained))
    for name, one in weights(late).items():
        assert torch.allclose(one, weights(trainer)[name], atol=1e-6), name


@pytest.mark.parametrize(
    ("script", "kind", "kills"), [(True, "in turn", (1, 4)), (False, "at once", (3,))], ids=["script", "model"]
)
def test_a_killed_run_goes_on(
    embedded_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: bool,
    kind: str,
    kills: tuple[int, ...],
) -> None:
    """From any step, in the middle of a generation batch too, with rows and random delays: to the bit."""
    ahead = 1 if kind == "at once" else 2
    settings: dict[str, Any] = {
        **RUN, "per_device_train_batch_size": 4, "steps_per_generation": 2, "batches_ahead": ahead, "max_steps": 5,
        "num_generations": 2, "optim": "adamw_torch", "learning_rate": 1e-2,
        "train_dataset": Dataset.from_dict({"number": list(range(12))}), "max_logprob_gap": 1e9,
    }  # fmt: skip
    chance, init = random.Random(ahead), make_trainer

    def make(*args: Any, **changes: Any) -> Any:
        trainer = init(*args, **{**changes, "environment": AGENTS[kind](chance, Told)})
        tokenizer = trainer.processing_class
        say = scripted(tokenizer.eos_token_id, tokenizer.encode("aeiou0123456789 again start"))
        slow = lambda _: ScriptedGenerator(say, lambda request: chance.randint(1, 6))  # noqa: E731
        return sampling_with(trainer, slow) if script else trainer

    monkeypatch.setattr("checkpointed_runs.make_trainer", make)
    monkeypatch.setitem(run_until.__globals__["CASES"], "agents", settings)
    whole = run_until(99, "agents", embedded_model, tmp_path / "whole")
    for kill in kills:
        run_until(kill, "agents", embedded_model, tmp_path / "run", resume="auto")
    again = run_until(99, "agents", embedded_model, tmp_path / "run", resume="auto")
    assert again.state.global_step == 5
    assert_same(weights(again), weights(whole))


def test_an_agent_beside_an_environment(embedded_model: Path, tmp_path: Path) -> None:
    """With evaluations while both are under way, which a policy that stays plays alike."""
    trained = []
    for ahead in (0, 2):
        trainer = make_trainer(
            embedded_model, tmp_path / str(ahead), environment={"agent": in_turn(random.Random(1)), "game": Chatter},
            batches_ahead=ahead, eval_strategy="steps", eval_steps=1, num_eval_episodes=2,
            **{**RUN, "learning_rate": 0.0, "max_steps": 3},
        )  # fmt: skip
        batches = watched(trainer)
        trainer.train()
        evaluated = [log["eval_return"] for log in trainer.state.log_history if "eval_return" in log]
        assert len(evaluated) == 3 and len(set(evaluated)) == 1
        trained.append(([[(one.environment_name, *tokens([one])) for one in batch] for batch in batches], evaluated))
    assert trained[0] == trained[1]
    assert {name for batch in trained[0][0] for name, *_ in batch} == {"agent", "game"}


@pytest.mark.parametrize("ends", ["error", "Ctrl-C"])
def test_a_run_that_ends_in_the_middle_leaves_no_thread_and_no_socket(
    embedded_model: Path, tmp_path: Path, ends: str
) -> None:
    trainer = make_trainer(
        embedded_model, tmp_path, environment=in_turn(random.Random(1)), batches_ahead=2, generation_chunk_size=2, **RUN
    )
    loss, before = trainer._compute_loss, listening()
    open_then: list[set[int]] = []

    def breaks(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == 1:
            open_then.append(listening() - before)
            if ends == "error":
                raise RuntimeError("in the middle")
            press_ctrl_c()
        return loss(*args, **kwargs)

    trainer._compute_loss = breaks
    with pytest.raises(RuntimeError if ends == "error" else KeyboardInterrupt):
        trainer.train()
    with suppress(Exception):
        trainer.engine.pool.close()
    assert len(open_then[0]) == 1 and listening() == before
    assert not [one for one in threading.enumerate() if one.name in ("agent-server", "rollout")]


def listening() -> set[int]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
