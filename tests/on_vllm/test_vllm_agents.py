"""Agents on vLLM, in this process and on a server: greedy episodes are those of the transformers generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch
from environment_agents import Gathers, Plays
from games import Long
from serving import serving
from thinkers import ThreeTurns, make_thinker
from transformers import AutoModelForCausalLM, AutoTokenizer

from agile_trainers.envs.agent import Agent
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine
from agile_trainers.rollout.generators import SamplingSettings, TransformersGenerator
from agile_trainers.rollout.generators.base import Generator
from agile_trainers.rollout.generators.vllm.engine import VllmEngine, VllmGenerator
from agile_trainers.rollout.generators.vllm.server import ServerGenerator, VllmServer
from agile_trainers.rollout.generators.vllm.servers import VllmServers
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.types import Trajectory

GREEDY = SamplingSettings(do_sample=False)
LENGTH = 512
AGENTS: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
    "three turns of Qwen3's template": (Agent(Plays(ThreeTurns)), ThreeTurns),
    "four turns": (Agent(Plays(Long)), Long),
    "calls at once": (Agent(Gathers()), None),
}
"""Agent, and the environment that it plays."""
Make = Callable[[Any], Generator]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_thinker(tmp_path_factory.mktemp("thinker"))


@pytest.fixture(scope="module")
def in_process(thinker: Path) -> Make:
    made = VllmEngine(str(thinker), dtype=torch.float32, max_model_length=LENGTH, max_batch_size=16)
    return lambda tokenizer: VllmGenerator(
        made, eos_token_ids=[tokenizer.eos_token_id], settings=GREEDY, tokenizer=tokenizer
    )


@pytest.fixture(scope="module")
def on_server(thinker: Path) -> Iterator[Make]:
    with serving(thinker, LENGTH) as served:
        size = len(AutoTokenizer.from_pretrained(thinker))
        made = VllmServers([VllmServer(served.url, timeout=0, max_batch_size=16, vocab_size=size)])
        yield lambda tokenizer: ServerGenerator(
            made, eos_token_ids=[tokenizer.eos_token_id], settings=GREEDY, tokenizer=tokenizer
        )


def play(thinker: Path, environment: Any, make: Make) -> list[Trajectory]:
    tokenizer = AutoTokenizer.from_pretrained(thinker)
    how = EpisodeOptions(max_turns=9, max_new_tokens=30, max_model_length=LENGTH)
    specs = [EpisodeSpec(seed, (seed,)) for seed in range(6)]
    return build_engine(how, how.make_pool(environment), tokenizer).run(specs, make(tokenizer))


@pytest.fixture(scope="module")
def on_transformers(thinker: Path) -> Make:
    model = AutoModelForCausalLM.from_pretrained(thinker).eval()
    return lambda tokenizer: TransformersGenerator(
        model, eos_token_ids=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id, settings=GREEDY
    )


@pytest.mark.parametrize("where", ["in_process", "on_server"])
@pytest.mark.parametrize("name", AGENTS)
def test_greedy_agents_are_those_of_transformers(
    name: str, where: str, thinker: Path, on_transformers: Make, request: pytest.FixtureRequest
) -> None:
    agent, environment = AGENTS[name]
    ours = play(thinker, agent, request.getfixturevalue(where))
    for theirs in (play(thinker, one, on_transformers) for one in (agent, environment) if one is not None):
        for one, other in zip(ours, theirs, strict=True):
            assert one.error is None and other.error is None and len(one.turns) == len(other.turns) > 1
            for k in range(len(one.turns)):
                assert one.prompt_of(k) == other.prompt_of(k) and one.action_of(k) == other.action_of(k)
            assert one.rewards == other.rewards
            assert one.sampling_logprobs == pytest.approx(other.sampling_logprobs, abs=1e-4)
