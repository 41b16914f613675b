"""Times ragged episodes on one vLLM engine, driven event by event and turn by turn (``make bench-vllm``).

Episodes have 1 to 8 turns, answers of 4 to 64 tokens and environments that block for 20 ms. Event by event, an episode asks
for its next turn as soon as its environment has answered. This is the rollout of this library, with environments in threads.
Turn by turn, all episodes wait for the slowest answer and the slowest environment before the next turn begins. The
environments of a turn are stepped one after another, as in TRL's loop, or all at once. All play the same number of tokens.

The model is as deep as one of half a billion weights and as narrow as the embedded one, with a single head. A step of the
engine therefore costs little more for many rows than for one, as on a GPU; the benchmark prints these costs. Lengths are
drawn log-uniformly (answers are mostly short and a few are long) and uniformly. With uniform lengths, the longest episode
alone takes 0.69 of the engine's steps in a rollout turn by turn (338 of 493). No order of work needs fewer steps, so the
ratio to environments at once has no limit there.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from agile_trainers.embedded import make_embedded_model, make_tokenizer
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest, Generator, SamplingSettings
from agile_trainers.rollout.generators.vllm.engine import VllmEngine, VllmGenerator
from agile_trainers.rollout.spec import EpisodeSpec, Limits

TURNS, TOKENS, SECONDS = (1, 8), (4, 64), 0.02
MEMORY: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 30}
LIMIT = 0.7
"""Longest allowed event-driven rollout, as a share of the wall time of a turn-by-turn one."""


class Ragged:
    """An environment that takes 20 ms a step, for a number of turns that the seed decides."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.left = random.Random(seed).randint(*TURNS)
        return "Go on.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(SECONDS)
        self.left -= 1
        return "And on.", 1.0, self.left == 0, False, {}


class RaggedAnswers:
    """A generator whose answers have lengths decided by episode and turn.

    Args:
        generator: Makes the answers.
        uniform: Draw lengths uniformly; otherwise their logarithms, so that most are short and a few are long.
    """

    def __init__(self, generator: Generator, uniform: bool):
        self._generator, self._uniform = generator, uniform

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request."""
        draw, (low, high) = random.Random(f"{request.episode}/{len(request.token_ids)}"), TOKENS
        length = draw.randint(low, high) if self._uniform else low * math.exp(draw.random() * math.log(high / low))
        self._generator.submit(replace(request, max_new_tokens=round(length)))

    def step(self) -> list[GenerationOutput]:
        """Make some progress."""
        return self._generator.step()

    @property
    def pending(self) -> int:
        """Number of requests under way."""
        return self._generator.pending

    def release(self, episode: int) -> None:
        """Forget an episode."""
        self._generator.release(episode)


class TurnByTurn:
    """A generator that starts when every running episode has asked, and returns when every answer is complete.

    Args:
        generator: Makes the answers.
        episodes: Number of episodes.
    """

    def __init__(self, generator: Generator, episodes: int):
        self._generator, self._living = generator, episodes
        self._asked: list[GenerationRequest] = []

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request."""
        self._asked.append(request)

    def step(self) -> list[GenerationOutput]:
        """Play a whole turn, if all running episodes have asked for it."""
        if len(self._asked) < self._living:
            return []
        for request in self._asked:
            self._generator.submit(request)
        self._asked.clear()
        outputs = []
        while self._generator.pending:
            outputs += self._generator.step()
        return outputs

    @property
    def pending(self) -> int:
        """Requests that a step would answer; 0 while others are awaited, so that the loop sleeps until they ask."""
        return self._living if len(self._asked) == self._living else 0

    def release(self, episode: int) -> None:
        """Forget an episode."""
        self._living -= 1
        self._generator.release(episode)


def step_cost(engine: VllmEngine, rows: int, steps: int = 40) -> float:
    """Measure the milliseconds of one decoding step."""
    sampler = VllmGenerator(engine, eos_token_ids=[], settings=SamplingSettings())
    for row in range(rows):
        sampler.submit(GenerationRequest(row, [5, 6, 7], steps + 1, lambda n: [0.5] * n))
    sampler.step()
    started = time.perf_counter()
    while sampler.pending:
        sampler.step()
    return 1000 * (time.perf_counter() - started) / steps


@dataclass(frozen=True)
class Drive:
    """A way to drive the engine."""

    name: str
    by_turns: bool
    in_threads: bool
    """Step the environments at once; otherwise one after another."""


OURS = Drive("event by event", by_turns=False, in_threads=True)
SEQUENTIAL = Drive("turn by turn, environments one after another", by_turns=True, in_threads=False)
AT_ONCE = Drive("turn by turn, environments at once", by_turns=True, in_threads=True)


def rollout(engine: VllmEngine, chat: ChatRenderer, episodes: int, uniform: bool, drive: Drive) -> tuple[float, int]:
    """Play one rollout. Returns its wall time in seconds and the number of sampled tokens."""
    engine.engine.reset_prefix_cache()
    sampler = VllmGenerator(engine, eos_token_ids=[], settings=SamplingSettings())
    generator: Generator = RaggedAnswers(sampler, uniform)
    if drive.by_turns:
        generator = TurnByTurn(generator, episodes)
    pool = EnvironmentPool(Ragged, workers=episodes if drive.in_threads else 0)
    loop = RolloutEngine(pool, chat, Limits(TURNS[1], TOKENS[1], engine.max_model_length))
    started = time.perf_counter()
    trajectories = loop.run([EpisodeSpec(seed, (seed,)) for seed in range(episodes)], generator)
    seconds = time.perf_counter() - started
    pool.close()
    return seconds, sum(turn.end - turn.start for trajectory in trajectories for turn in trajectory.turns)


def main() -> int:
    """Measure. Return 1 if an event-driven rollout takes more than 0.7 of the time of a turn-by-turn one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_embedded_model(folder, num_layers=24, num_heads=1)
        engine = VllmEngine(
            folder, dtype=torch.float32, max_model_length=2048, max_batch_size=options.episodes, **MEMORY
        )
    chat, slow = ChatRenderer(make_tokenizer()), False
    step_cost(engine, options.episodes)
    costs = [step_cost(engine, rows) for rows in (1, options.episodes)]
    print(f"A step takes {costs[0]:.1f} ms for 1 row, {costs[1]:.1f} ms for {options.episodes}.", flush=True)
    for uniform in (False, True):
        walls: dict[Drive, list[float]] = {OURS: [], SEQUENTIAL: [], AT_ONCE: []}
        rollout(engine, chat, options.episodes, uniform, OURS)  # warm
        sampled = set()
        for _ in range(options.repetitions):
            for drive, seconds in walls.items():
                wall, tokens = rollout(engine, chat, options.episodes, uniform, drive)
                seconds.append(wall)
                sampled.add(tokens)
        if len(sampled) > 1:
            raise RuntimeError(f"Not the same number of tokens was sampled in every rollout: {sorted(sampled)}.")
        kind = "uniformly" if uniform else "log-uniformly"
        print(f"\n{options.episodes} episodes, lengths drawn {kind}, {tokens} tokens", flush=True)
        print(f"  {OURS.name}: {median(walls[OURS]):.2f} s")
        for drive in (SEQUENTIAL, AT_ONCE):
            ratio = median(ours / theirs for ours, theirs in zip(walls[OURS], walls[drive]))
            bound = not (uniform and drive is AT_ONCE)
            slow |= bound and ratio > LIMIT
            limit = f" (limit {LIMIT})" if bound else ""
            print(f"  {drive.name}: {median(walls[drive]):.2f} s, ratio {ratio:.2f}{limit}", flush=True)
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
