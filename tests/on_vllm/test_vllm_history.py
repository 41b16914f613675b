"""Rewritten contexts on vLLM, in this process and on a server: greedy episodes are those of the transformers generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch
from games import Long, takes_notes
from serving import serving
from thinkers import ThreeTurns, make_thinker
from transformers import AutoModelForCausalLM, AutoTokenizer

from agile_trainers.envs.context import Summary
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine
from agile_trainers.rollout.forest import Fork
from agile_trainers.rollout.generators import SamplingSettings, TransformersGenerator
from agile_trainers.rollout.generators.base import Generator
from agile_trainers.rollout.generators.vllm.engine import VllmEngine, VllmGenerator
from agile_trainers.rollout.generators.vllm.server import ServerGenerator, VllmServer
from agile_trainers.rollout.generators.vllm.servers import VllmServers
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.types import Trajectory

GREEDY = SamplingSettings(do_sample=False)
LENGTH = 512
HISTORIES: dict[str, tuple[type, dict[str, Any]]] = {
    "Qwen3's template": (ThreeTurns, {}),
    "last:1": (Long, {"history": "last:1", "training_chat_template": True}),
    "questions": (Long, {"history": takes_notes}),
    "summary": (Long, {"history": Summary(60, "Sum up."), "training_chat_template": True}),
}
Make = Callable[[Any], Generator]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_thinker(tmp_path_factory.mktemp("thinker"))


@pytest.fixture(scope="module")
def engine(thinker: Path) -> Make:
    made = VllmEngine(str(thinker), dtype=torch.float32, max_model_length=LENGTH, max_batch_size=16)
    return lambda tokenizer: VllmGenerator(
        made, eos_token_ids=[tokenizer.eos_token_id], settings=GREEDY, tokenizer=tokenizer
    )


@pytest.fixture(scope="module")
def server(thinker: Path) -> Iterator[Make]:
    with serving(thinker, LENGTH, more=["--enable-prompt-tokens-details"]) as served:
        size = len(AutoTokenizer.from_pretrained(thinker))
        made = VllmServers([VllmServer(served.url, timeout=0, max_batch_size=16, vocab_size=size)])
        yield lambda tokenizer: ServerGenerator(
            made, eos_token_ids=[tokenizer.eos_token_id], settings=GREEDY, tokenizer=tokenizer
        )


def play(thinker: Path, name: str, make: Make) -> list[Trajectory]:
    environment, options = HISTORIES[name]
    tokenizer = AutoTokenizer.from_pretrained(thinker)
    how = EpisodeOptions(max_turns=7, max_new_tokens=30, max_model_length=LENGTH, **options)
    specs = [EpisodeSpec(seed, (seed,)) for seed in range(6)]
    return build_engine(how, how.make_pool(environment), tokenizer).run(specs, make(tokenizer))


@pytest.fixture(scope="module")
def on_transformers(thinker: Path) -> dict[str, list[Trajectory]]:
    model = AutoModelForCausalLM.from_pretrained(thinker).eval()

    def make(tokenizer: Any) -> Generator:
        return TransformersGenerator(
            model, eos_token_ids=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id, settings=GREEDY
        )

    return {name: play(thinker, name, make) for name in HISTORIES}


def agree(ours: list[Trajectory], theirs: list[Trajectory]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.error is None and one.paths == other.paths and one.completion_ids == other.completion_ids
        for k, turn in enumerate(one.turns):
            assert one.prompt_of(k) == other.prompt_of(k) and one.action_of(k) == other.action_of(k)
            expected = other.turns[k]
            assert (turn.text, turn.fork, turn.question) == (expected.text, expected.fork, expected.question)
        assert one.sampling_logprobs == pytest.approx(other.sampling_logprobs, abs=1e-4)


def test_the_episodes_are_rewritten(on_transformers: dict[str, list[Trajectory]]) -> None:
    for name, episodes in on_transformers.items():
        forks = {turn.fork for episode in episodes for turn in episode.turns} - {None}
        questions = sum(turn.question for episode in episodes for turn in episode.turns)
        assert Fork.TEMPLATE in forks if name in ("Qwen3's template", "questions") else forks == {Fork.CONTEXT}
        assert bool(questions) == (name in ("questions", "summary"))
        again, tokens = (sum(getattr(one, part) for one in episodes) for part in ("read_again", "num_tokens"))
        # Greedy notes repeat, and with them a whole question whose cache was cropped to the half that was shared since.
        most = {"Qwen3's template": 0, "questions": tokens // 10}.get(name, tokens // 20)
        assert again <= most, f"{name}: {again} of {tokens} tokens were read again"


@pytest.mark.parametrize("name", HISTORIES)
def test_in_this_process(name: str, thinker: Path, engine: Make, on_transformers: dict[str, list[Trajectory]]) -> None:
    episodes = play(thinker, name, engine)
    agree(episodes, on_transformers[name])
    # vLLM caches whole blocks of 32 tokens: of a beginning that was read, at most one block's part is read again.
    for episode in episodes:
        assert episode.read_again is not None and episode.read_again < 32 * len(episode.turns)


@pytest.mark.parametrize("name", HISTORIES)
def test_on_a_server(name: str, thinker: Path, server: Make, on_transformers: dict[str, list[Trajectory]]) -> None:
    agree(play(thinker, name, server), on_transformers[name])
