"""Times rollouts whose context is rewritten, beside the same generator that reads everything again for each request.

16 episodes of 8 turns each begin with a prompt. A turn appends an answer of 32 tokens and an observation of 32. Every fourth
turn drops what came after the prompt but the last answer and its observation. The model has random weights in fp32 and runs
on one thread; rows wait for nothing, since environments take no time. Both sides are the transformers generator: one is
asked under the key of the episode and keeps what it read, the other under a new key for each request. They must sample the
same tokens, and take turns, so that a ratio compares measurements of the same minute. Seconds are CPU seconds, which other
work on the machine changes less than those of the clock. The exit code is 1 if ``BAR`` is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from update_vs_trl import PAGE, with_tables

from agile_trainers.rollout.generators import GenerationRequest, SamplingSettings, TransformersGenerator
from agile_trainers.types import common_prefix

RESULTS = Path(__file__).resolve().parent / "results" / "rewrites.json"
EPISODES, TURNS, EVERY, NEW = 16, 8, 4, 32
PROMPTS, BAR = (128, 512, 1024), (512, 2.0)
"""``BAR``: with prompts of this length, this many times the tokens per second of reading everything again."""
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
SIDES = ("everything again", "ours")


@dataclass
class Episode:
    """One episode, and the ids that its model has read."""

    noise: random.Random
    ids: list[int]
    prompt: int
    seen: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    read: int = 0
    again: int = 0
    """Ids that were read though the model had read the conversation up to them before."""


@dataclass
class Rollout:
    """Costs of a rollout."""

    seconds: float
    """CPU seconds."""
    tokens: int
    read: int
    again: int


def ids_of(noise: random.Random, count: int, vocabulary: int) -> list[int]:
    return [noise.randrange(2, vocabulary) for _ in range(count)]


def play(model: Qwen2ForCausalLM, side: str, prompt: int, turns: int = TURNS) -> tuple[Rollout, list[list[list[int]]]]:
    """Play the episodes on one side; return what they took, and the answers of each."""
    vocabulary = model.config.vocab_size
    generator = TransformersGenerator(model, eos_token_ids=[], pad_token_id=0, settings=SamplingSettings())
    noises = [random.Random(number) for number in range(EPISODES)]
    episodes = [Episode(noise, ids_of(noise, prompt, vocabulary), prompt) for noise in noises]

    def key(number: int) -> int:
        return number if side == "ours" else number + EPISODES * len(episodes[number].answers)

    def ask(number: int, extends: bool) -> None:
        episode = episodes[number]
        noise = episode.noise
        generator.submit(
            GenerationRequest(
                key(number), episode.ids, NEW, lambda n: [noise.random() for _ in range(n)], extends=extends
            )
        )

    started = time.process_time()
    for number in range(EPISODES):
        ask(number, extends=True)
    while generator.pending:
        for output in generator.step():
            number = output.episode % EPISODES
            episode = episodes[number]
            if side != "ours":
                generator.release(output.episode)
            note(episode, output.read or 0, output.token_ids)
            if len(episode.answers) == turns:
                generator.release(output.episode)
                continue
            rewritten = len(episode.answers) % EVERY == 0
            before = episode.ids[: episode.prompt] if rewritten else episode.ids
            episode.ids = [*before, *output.token_ids, *ids_of(episode.noise, NEW, vocabulary)]
            ask(number, extends=not rewritten)
    seconds = time.process_time() - started
    read, again = sum(episode.read for episode in episodes), sum(episode.again for episode in episodes)
    return Rollout(seconds, EPISODES * turns * NEW, read, again), [episode.answers for episode in episodes]


def note(episode: Episode, read: int, answer: list[int]) -> None:
    """Count what was read for a request and its answer, and what of it the model had read before."""
    known = max((common_prefix(seen, episode.ids) for seen in episode.seen), default=0)
    episode.read += read
    episode.again += read - (len(episode.ids) - known)
    episode.seen.append([*episode.ids, *answer[:-1]])  # the last id of an answer is not read for it
    episode.answers.append(answer)


def measure(model: Qwen2ForCausalLM, prompt: int, repetitions: int, turns: int = TURNS) -> dict[str, Any]:
    """Measure both sides with prompts of a length, in turns.

    Raises:
        RuntimeError: If the sides sample other tokens.
    """
    result: dict[str, Any] = {side: {"seconds": []} for side in SIDES}
    for _ in range(repetitions):
        answers = {}
        for side in SIDES:
            rollout, answers[side] = play(model, side, prompt, turns)
            result[side]["seconds"].append(rollout.seconds)
            result[side] |= {"tokens": rollout.tokens, "read": rollout.read, "again": rollout.again}
        if answers["ours"] != answers["everything again"]:
            raise RuntimeError(f"With prompts of {prompt} tokens, the sides sample other tokens.")
        print(prompt, {side: round(result[side]["seconds"][-1], 1) for side in SIDES}, flush=True)
    return result


def ratios(result: dict[str, Any]) -> list[float]:
    """Return how many times the tokens per second of reading everything again this library's are, in each repetition."""
    theirs, ours = (result[side]["seconds"] for side in SIDES)
    return [their / our for their, our in zip(theirs, ours, strict=True)]


def table(results: dict[str, dict[str, Any]]) -> str:
    """Write the results as a table of Markdown."""
    lines = [
        "| prompt | read, everything again | read, ours | of it read before | tokens/s, everything again | tokens/s, ours "
        "| ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for prompt, result in results.items():
        theirs, ours = (result[side] for side in SIDES)
        speeds = [f"{side['tokens'] / median(side['seconds']):.0f}" for side in (theirs, ours)]
        found = ratios(result)
        ratio = f"{median(found):.1f} ({min(found):.1f} to {max(found):.1f})"
        read = [f"{count:,}" for count in (theirs["read"], ours["read"], ours["again"])]
        lines.append(f"| {' | '.join([prompt, *read, *speeds, ratio])} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, save, and write the table of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3, help="measurements of each side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()
    play(model, "ours", 16, turns=1)  # warms up
    results = {str(prompt): measure(model, prompt, options.repetitions) for prompt in PROMPTS}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text(), {"rewrites": table(results)}))
    print(table(results))
    prompt, bar = BAR
    return 0 if median(ratios(results[str(prompt)])) >= bar else 1


if __name__ == "__main__":
    sys.exit(main())
