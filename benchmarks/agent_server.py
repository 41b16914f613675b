"""Times rollouts of agents behind the endpoint, beside the same episodes stepped by the rollout loop.

Episodes of 8 turns are played at once. A sampler answers each request after 150 to 250 ms, 200 on average, and takes no
processor meanwhile; in the cases "in step" after 200 ms exactly, so that all clients come at the same moment. On one side an
environment is stepped; on the other an agent plays the same game with a client of Chat Completions, in this process. Both
must sample the same tokens, and take turns, so that a ratio compares measurements of the same minute. The exit code is 1 if
the agents' rollout takes more than ``BAR`` times the other.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import torch
from update_vs_trl import PAGE, with_tables

from agile_trainers.embedded import make_tokenizer
from agile_trainers.envs.agent import Agent, Model, Task
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest
from agile_trainers.rollout.spec import EpisodeSpec, Limits

RESULTS = Path(__file__).resolve().parent / "results" / "agent_server.json"
TURNS, SAMPLING, SPREAD, BAR = 8, 0.2, 0.05, 1.05
CASES = {"1": (1, 0.0), "16": (16, SPREAD), "64": (64, SPREAD), "16 in step": (16, 0.0), "64 in step": (64, 0.0)}
"""Case to its episodes and the spread of the sampler's seconds. ``BAR`` is for those without "in step"."""
SIDES = ("stepped", "agents")


class Busy:
    """Answers each request some time after it came, and takes no processor meanwhile."""

    def __init__(self, answer: list[int], spread: float) -> None:
        self._answer, self._spread, self._due = answer, spread, list[tuple[float, int, GenerationRequest]]()
        self._count = 0

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request."""
        self._count += 1
        # The same on both sides: by the episode and the length of its conversation.
        draw = random.Random(f"{request.episode} {len(request.token_ids)}").uniform(-1, 1)
        seconds = SAMPLING + self._spread * draw
        heapq.heappush(self._due, (time.perf_counter() + seconds, self._count, request))

    def step(self) -> list[GenerationOutput]:
        """Return the answers that are due, after a short wait if there are none."""
        if self._due:
            time.sleep(min(0.002, max(0.0, self._due[0][0] - time.perf_counter())))
        done = []
        while self._due and self._due[0][0] <= time.perf_counter():
            request = heapq.heappop(self._due)[2]
            logprobs = [-1.0] * len(self._answer)
            done.append(GenerationOutput(request.episode, self._answer, logprobs, "stop", request.call))
        return done

    @property
    def pending(self) -> int:
        """Number of requests submitted and not yet returned."""
        return len(self._due)

    def release(self, episode: int) -> None:
        """Forget an episode, which has no pending requests here."""


class Counts:
    """Hears eight answers and repeats itself."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin to count."""
        self.turns = 0
        return "How many guesses do you have? Answer with one number.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Count an answer."""
        self.turns += 1
        return "Try again. Remember this number.", 0.0, self.turns == TURNS, False, {}


async def counts(model: Model, task: Task) -> float:
    """Play the same as an agent."""
    game = Counts()
    messages, done = [{"role": "user", "content": game.reset(task.seed)[0]}], False
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.api_key}"}) as client:
        while not done:
            body = {"model": model.name, "messages": messages}
            async with client.post(f"{model.base_url}/chat/completions", json=body) as sent:
                said = (await sent.json())["choices"][0]["message"]
            observation, _, done, *_ = game.step(said["content"])
            messages += [said, {"role": "user", "content": observation}]
    return 0.0


def play(side: str, episodes: int, spread: float = 0.0) -> tuple[float, float, list[list[int]]]:
    """Play episodes on one side; return the seconds of the clock and of the processor, and the tokens."""
    tokenizer = make_tokenizer()
    factory: Callable[[], Any] = Counts if side == "stepped" else Agent(counts)
    engine = RolloutEngine(EnvironmentPool(factory), ChatRenderer(tokenizer), Limits(TURNS, 64, 4096))
    answer = [*tokenizer.encode("the answer is 7 or 8 " * 5)[:63], tokenizer.eos_token_id]
    specs = [EpisodeSpec(number, (number,)) for number in range(episodes)]
    clock, processor = time.perf_counter(), time.process_time()
    played = engine.run(specs, Busy(answer, spread))
    seconds = time.perf_counter() - clock, time.process_time() - processor
    engine.pool.close()
    assert all(one.error is None for one in played), played[0].error
    return *seconds, [one.prompt_ids + one.completion_ids for one in played]


def measure(case: str, repetitions: int) -> dict[str, Any]:
    """Measure both sides of a case, in turns.

    Raises:
        RuntimeError: If the sides sample other tokens.
    """
    episodes, spread = CASES[case]
    result: dict[str, Any] = {side: {"seconds": [], "cpu": []} for side in SIDES}
    for _ in range(repetitions):
        tokens = {}
        for side in SIDES:
            seconds, cpu, tokens[side] = play(side, episodes, spread)
            result[side]["seconds"].append(seconds)
            result[side]["cpu"].append(cpu)
        if tokens["stepped"] != tokens["agents"]:
            raise RuntimeError(f"With {case} episodes, the sides sample other tokens.")
        print(case, {side: round(result[side]["seconds"][-1], 3) for side in SIDES}, flush=True)
    return result


def ratios(result: dict[str, Any]) -> list[float]:
    """Return how many times as long as the stepped episodes the agents took, in each repetition."""
    stepped, agents = (result[side]["seconds"] for side in SIDES)
    return [theirs / ours for ours, theirs in zip(stepped, agents, strict=True)]


def table(results: dict[str, dict[str, Any]]) -> str:
    """Write the results as a table of Markdown."""
    lines = [
        "| episodes at once | seconds, stepped | seconds, agents | ratio | CPU ms a call, stepped | CPU ms a call, agents |",
        "|---|---|---|---|---|---|",
    ]
    for case, result in results.items():
        found, calls = ratios(result), CASES[case][0] * TURNS
        seconds = [f"{median(result[side]['seconds']):.2f}" for side in SIDES]
        cpu = [f"{1000 * median(result[side]['cpu']) / calls:.1f}" for side in SIDES]
        ratio = f"{median(found):.3f} ({min(found):.3f} to {max(found):.3f})"
        lines.append(f"| {' | '.join([case, *seconds, ratio, *cpu])} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, save, and write the table of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="measurements of each side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for side in SIDES:
        play(side, 1)  # warms up
    results = {case: measure(case, options.repetitions) for case in CASES}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text(), {"agent server": table(results)}))
    print(table(results))
    return 0 if all(median(ratios(results[case])) <= BAR for case in CASES if "in step" not in case) else 1


if __name__ == "__main__":
    sys.exit(main())
