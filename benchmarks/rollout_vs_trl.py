"""Times the rollout beside TRL's ``GRPOTrainer`` on the same work (``make bench``). ``update_vs_trl.py`` times the update.

TRL's side uses a ``rollout_func`` as a user writes it for several turns. ``model.generate`` reads the whole conversation
again at every turn; rows are batched and left-padded, ids are appended and never tokenized again, and finished episodes are
left out. Both sides play the same environment with the same model, LoRA, batch and number of generated tokens. They
alternate (ours, TRL's, ours, ...). Each repetition is a new trainer, whose first step is a warm-up and whose other steps are
timed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import string
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import GenerationConfig, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import unwrap_model_for_generation

from agile_trainers.embedded import END_OF_TURN, make_tokenizer
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

RESULTS = Path(__file__).resolve().parent / "results"
EPISODES, GROUP, TURNS, NEW_TOKENS, OBSERVATION_CHARACTERS = 16, 8, 8, 32, 64
THREADS = 2
TIMED_STEPS = 3
"""Timed steps of one repetition, after the warm-up step."""
HEADING = (
    "# Rollout, beside TRL's GRPOTrainer\n\n"
    f"Written by `make bench`: {EPISODES} episodes, {NEW_TOKENS} new tokens a turn, observations of "
    f"{OBSERVATION_CHARACTERS} characters, Qwen2 of 256 x 4, LoRA r=8, fp32, {THREADS} threads. Seconds are medians, "
    "ratios (ours / TRL's) medians over pairs of runs (lowest to highest)."
)


@dataclass(frozen=True)
class Workload:
    """The episodes to play."""

    name: str
    ragged: bool
    """Play 1 to 8 turns, each count twice, instead of 8 turns in every episode."""


WORKLOADS = (
    Workload("8 turns", ragged=False),
    Workload("1 to 8 turns", ragged=True),
)


@dataclass(frozen=True)
class Times:
    """Mean seconds of the rollout of one generation batch."""

    rollout: float
    action_tokens: int
    """Number of sampled tokens."""
    tokens: int
    """Number of tokens of all conversations."""


class Chatter:
    """Returns random letters for a fixed number of turns, and random rewards."""

    def __init__(self, lengths: itertools.cycle[int]):
        self._lengths = lengths
        self._random = random.Random(0)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self._left = next(self._lengths)
        self._random.seed(seed)
        return self._speak(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        return self._speak(), self._random.random(), self._left == 0, False, {}

    def _speak(self) -> str:
        return "".join(self._random.choices(string.ascii_lowercase, k=OBSERVATION_CHARACTERS))


def turn_counts(workload: Workload) -> itertools.cycle[int]:
    """Turn counts of successive episodes. Any 16 hold each count equally often, so that batches are equal work."""
    return itertools.cycle(range(1, TURNS + 1) if workload.ragged else [TURNS])


def make_model(folder: Path) -> None:
    """Make a Qwen2 of 256 x 4 and a byte-level tokenizer with ChatML."""
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=1024,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, top_k=0
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class RereadingRollout:
    """A ``rollout_func`` for TRL that plays several turns by ``model.generate`` on the whole conversation."""

    def __init__(self, workload: Workload):
        lengths = turn_counts(workload)
        self.environments = [Chatter(lengths) for _ in range(EPISODES)]
        self.seconds: list[float] = []
        self.episodes: list[tuple[int, int]] = []
        """Action tokens and all tokens of each episode of the last batch."""

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        started = time.perf_counter()
        with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model, torch.no_grad():
            model.eval()
            output = self._play(model, trainer.processing_class, trainer.accelerator.device)
            model.train()
        self.seconds.append(time.perf_counter() - started)
        return output

    def _play(self, model: Any, tokenizer: Any, device: torch.device) -> dict[str, Any]:
        prompts = [
            _first_ids(tokenizer, environment.reset(index)[0]) for index, environment in enumerate(self.environments)
        ]
        completions: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        returns = [0.0] * len(prompts)
        active = list(range(len(prompts)))
        while active:
            answers = _generate(model, tokenizer, [prompts[i] + completions[i] for i in active], device)
            still = []
            for i, answer in zip(active, answers):
                completions[i] += answer
                masks[i] += [1] * len(answer)
                observation, reward, terminated, _, _ = self.environments[i].step(
                    tokenizer.decode(answer, skip_special_tokens=True)
                )
                returns[i] += reward
                if not terminated:
                    delimited = _delimited(tokenizer, observation)
                    completions[i] += delimited
                    masks[i] += [0] * len(delimited)
                    still.append(i)
            active = still
        self.episodes = [(sum(mask), len(p) + len(c)) for mask, p, c in zip(masks, prompts, completions)]
        return {
            "prompt_ids": prompts,
            "completion_ids": completions,
            "logprobs": None,
            "env_mask": masks,
            "episode_return": returns,
        }


def _first_ids(tokenizer: Any, observation: str) -> list[int]:
    messages = [{"role": "user", "content": observation}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def _delimited(tokenizer: Any, observation: str) -> list[int]:
    return tokenizer.encode(f"{END_OF_TURN}\n<|im_start|>user\n{observation}{END_OF_TURN}\n<|im_start|>assistant\n")


def _generate(model: Any, tokenizer: Any, conversations: Sequence[list[int]], device: torch.device) -> list[list[int]]:
    inputs = tokenizer.pad({"input_ids": list(conversations)}, padding_side="left", return_tensors="pt").to(device)
    ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=True)
    return ids[:, inputs["input_ids"].size(1) :].tolist()


def _common(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": 1 + TIMED_STEPS,
        "per_device_train_batch_size": EPISODES,
        "gradient_accumulation_steps": 1,
        "num_generations": GROUP,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def make_lora() -> LoraConfig:
    return LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")


def time_ours(workload: Workload, model: Path) -> Times:
    """Time one repetition of ``MultiTurnGRPOTrainer``."""
    lengths = turn_counts(workload)
    with tempfile.TemporaryDirectory() as folder:
        trainer = MultiTurnGRPOTrainer(
            model=str(model),
            args=MultiTurnGRPOConfig(
                **_common(folder),
                max_turns=TURNS,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                num_iterations=1,
                log_rollouts=False,
            ),
            peft_config=make_lora(),
            environment=lambda: Chatter(lengths),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    last = [entry for entry in trainer.state.log_history if "time/rollout" in entry]
    rollout = fmean(entry["time/rollout"] for entry in last[1:])
    tokens = last[-1]["num_tokens"] - last[-2]["num_tokens"]
    actions = round(last[-1]["completions/mean_length"] * EPISODES)
    return Times(rollout, actions, round(tokens))


def time_trl(workload: Workload, model: Path) -> Times:
    """Time one repetition of TRL's ``GRPOTrainer``."""
    rollout = RereadingRollout(workload)

    def episode_return(episode_return: list[float], **_: Any) -> list[float]:
        return episode_return

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(model),
            reward_funcs=episode_return,
            args=GRPOConfig(**_common(folder), disable_dropout=True),
            train_dataset=Dataset.from_dict({"prompt": [""] * EPISODES}),
            peft_config=make_lora(),
            rollout_func=rollout,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    actions, tokens = (sum(counts) for counts in zip(*rollout.episodes))
    return Times(fmean(rollout.seconds[1:]), actions, tokens)


def compare(workload: Workload, model: Path, repetitions: int) -> dict[str, Any]:
    """Time both sides alternately.

    Returns:
        Every repetition of each side, and the paired ratios ours / TRL's.

    Raises:
        RuntimeError: If the sides did different amounts of work.
    """
    ours, trl = [], []
    for repetition in range(repetitions):
        ours.append(time_ours(workload, model))
        trl.append(time_trl(workload, model))
        one, other = ours[-1], trl[-1]  # all tokens may differ by the delimiters of a turn
        if one.action_tokens != other.action_tokens or abs(one.tokens / other.tokens - 1) > 0.02:
            raise RuntimeError(f"Unequal work: {ours[-1]} and {trl[-1]}.")
        print(
            f"  {repetition + 1}/{repetitions}  ours {ours[-1].rollout:.2f} s   TRL {trl[-1].rollout:.2f} s", flush=True
        )
    return {
        "workload": asdict(workload),
        "ours": [asdict(times) for times in ours],
        "trl": [asdict(times) for times in trl],
        "ratios": [a.rollout / b.rollout for a, b in zip(ours, trl, strict=True)],
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """The medians as a Markdown table."""
    lines = [
        "| workload | tokens sampled / all, ours | TRL | rollout, ours | TRL | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        cells = [result["workload"]["name"]]
        cells += [f"{result[side][0]['action_tokens']} / {result[side][0]['tokens']}" for side in ("ours", "trl")]
        cells += [f"{median(times['rollout'] for times in result[side]):.2f} s" for side in ("ours", "trl")]
        ratios = result["ratios"]
        cells.append(f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Run all workloads. Return 1 if one is slower than TRL's, or if the rollout of equal turns is not twice as fast."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--workloads", nargs="+", type=int, choices=range(len(WORKLOADS)), default=range(len(WORKLOADS))
    )
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Silences the warning that episodes are not reproducible: their lengths are fixed, whatever the seed.
    logging.get_logger("agile_trainers.trainers.trainer").setLevel("ERROR")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for workload in (WORKLOADS[index] for index in options.workloads):
            print(workload.name, flush=True)
            results.append(compare(workload, Path(folder), options.repetitions))
    print(f"\n{table(results)}")
    if len(results) == len(WORKLOADS):
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "rollout_vs_trl.md").write_text(f"{HEADING}\n\n{table(results)}\n")
    # TRL's side has little to read again where most episodes end early.
    bounds = [1.0 if result["workload"]["ragged"] else 0.5 for result in results]
    return int(any(median(result["ratios"]) > bound for result, bound in zip(results, bounds, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
