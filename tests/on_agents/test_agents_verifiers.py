"""Environments and harnesses of the installed verifiers, unmodified: its harness is a program that asks the endpoint."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uv", reason="the clients of agents are not installed; make test-agents installs them")
pytest.importorskip("verifiers", reason="verifiers is not installed: pip install 'agile-trainers[verifiers]'")

import torch
from doc_blocks import exchanged, of
from games import make_trainer
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv_server import serve

from agile_trainers.envs import make_environment_factory
from agile_trainers.envs.libraries.verifiers import VerifiersEnvironment
from agile_trainers.evaluation.scripted_policies import play_agent

SEAT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 3}


@pytest.fixture(autouse=True, scope="module")
def uv() -> Iterator[None]:
    """Harnesses look for uv, which stands beside this Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        yield


class Say(Action):
    text: Any


class Hint(Observation):
    hint: str


class LongServer(Environment[Say, Hint, State]):
    """Rewards an answer by 0, .25 or .5 for its length modulo three; the second one ends the game."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self.said = 0
        return Hint(hint=f"start {kwargs['word']}")

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self.said += 1
        return Hint(hint="more", reward=len(str(action.text)) % 3 / 4, done=self.said == 2)

    @property
    def state(self) -> State:
        return State()


@pytest.fixture(scope="module")
def openenv() -> Iterator[Any]:
    """verifiers' environment for OpenEnv servers, in which its harness answers each observation."""
    with serve(create_fastapi_app(LongServer, Say, Hint, max_concurrent_envs=16)) as url:
        resets = [{"word": "stone"}, {"word": "water"}]
        yield make_environment_factory("verifiers:openenv", env={"player": SEAT}, base_url=url, resets=resets)


def test_an_environment_of_several_turns(openenv: Any) -> None:
    (episode,) = play_agent(openenv, lambda messages, rng: "a" * len(messages), [5])
    said = [[(one["role"], one["content"][:40]) for one in call["messages"]] for call in episode.calls]
    first, second = ('{"observation": {"metadata": {}, "hint": "' + hint for hint in ("start water", "more"))
    assert said[0] == [("user", first[:40]), ("assistant", "a")]
    assert said[1] == [*said[0], ("user", second[:40]), ("assistant", "aaa")] and len(said) == 2
    assert "start water" in episode.calls[0]["messages"][0]["content"]
    assert episode.reward == 0.25 and episode.info["rewards"] == {"openenv_reward": 0.25} and not episode.success


@pytest.mark.parametrize("harness", ["null", "bash"])
def test_a_harness_is_scored_as_an_answer_is(harness: str) -> None:
    factory = make_environment_factory("verifiers:reverse_taskset", env={"agent": SEAT | {"harness": {"id": harness}}})
    call = '<tool_call>{"name": "bash", "arguments": {"command": "printf enots"}}</tool_call>'
    answers = iter(["retaw", "water"] if harness == "null" else [call, "retaw", "water"])
    episodes = play_agent(factory, lambda messages, rng: next(answers), [1, 4])
    plain = VerifiersEnvironment("reverse_taskset")
    for episode, answer in zip(episodes, ("retaw", "water"), strict=True):
        plain.reset(seed=4)
        _, reward, _, _, info = asyncio.run(plain.step(answer))
        assert episode.reward == reward and episode.info["rewards"] == info["rewards"]
        assert episode.success == info["success"]
    turns = [episode.info["metrics"]["turns"] for episode in episodes]
    assert turns == ([1, 1] if harness == "null" else [2, 1])
    if harness == "bash":
        assert "enots" in episodes[0].calls[1]["messages"][-2]["content"]


def test_a_modeled_user_is_played_by_the_same_weights_and_not_trained(embedded_model: Path, tmp_path: Path) -> None:
    env = {"id": "user-sim", "assistant": SEAT, "user": SEAT | {"model": "policy-frozen", "max_turns": 2}}
    factory = make_environment_factory("verifiers:reverse_taskset", env=env)
    trainer = make_trainer(embedded_model, tmp_path, environment=factory, max_turns=4, max_new_tokens=4)
    episodes = trainer.rollout()
    assert [episode.error for episode in episodes] == [None] * 8
    for episode in episodes:
        assert 1 <= len(episode.turns) <= 2
        assert all("role-playing" not in str(turn.observation) for turn in episode.turns)
        assert episode.prompt[0]["content"] == "Only the word."


def test_three_steps_of_training(openenv: Any, embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(
        embedded_model, tmp_path, environment=openenv, max_turns=3, max_new_tokens=6, max_steps=3, learning_rate=1e-2,
        max_logprob_gap=1e-3,
    )  # fmt: skip
    before = {name: one.detach().clone() for name, one in trainer.model.named_parameters() if one.requires_grad}
    trainer.train()
    assert trainer.state.global_step == 3
    moved = [not torch.equal(one, before[name]) for name, one in trainer.model.named_parameters() if name in before]
    assert any(moved)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert len(logs) == 3 and any(log["grad_norm"] > 0 for log in logs)
    print("\n", [(log["reward"], log["sampling/sampling_logp_difference/max"]) for log in logs])


def test_the_code_of_the_page(embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taskset, *blocks = [block for block in of("python") if block.page == "docs/verifiers.md"]
    (tmp_path / "guess_taskset.py").write_text(taskset.text, encoding="utf-8")
    (tmp_path / "model").symlink_to(embedded_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    namespace: dict[str, Any] = {"__name__": "docs"}
    for block in blocks:
        exec(compile("\n" * block.line + exchanged(block.text), block.page, "exec", dont_inherit=True), namespace)
        assert namespace["trainer"].state.global_step == 1
    guesses = iter(["6", "9", "8", "1"])
    (episode,) = play_agent(namespace["environment"], lambda messages, rng: next(guesses), [7])
    assert episode.success and [call["messages"][-2]["content"] for call in episode.calls[1:]] == ["higher", "lower"]
