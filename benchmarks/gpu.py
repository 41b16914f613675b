"""Measures rollout and update speed and peak memory on a GPU, for this library and for plain TRL (`make bench-gpu`).

The models have random weights and 0.5B and 1.5B shapes, and train with LoRA, bf16 and gradient checkpointing on episodes of
4k and 16k tokens. Plain TRL answers once, so it is compared with our episodes of one turn; those of four turns have as many
tokens. Each measurement runs in a process of its own, so that it leaves nothing on the GPU and may run out of memory alone.
The results go to `results/gpu.md`. `--tiny` runs the same on CPU in seconds; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import GenerationConfig, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer
from trl.import_utils import is_vllm_available

from agile_trainers.embedded import make_tokenizer
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

RESULTS = Path(__file__).resolve().parent / "results"
SHAPES: dict[str, dict[str, int]] = {
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
}
"""Shapes of Qwen2.5, with a vocabulary of 151936 tokens and two key-value heads."""
EPISODES, NEW_TOKENS, STEPS = 8, 256, 3
"""Episodes of a batch (one group), tokens sampled in each episode, and steps; the first step is a warm-up."""


@dataclass(frozen=True)
class Case:
    """The settings of one measurement."""

    shape: str
    tokens: int
    """Approximate tokens of a whole episode."""
    turns: int
    side: str
    """ours or TRL."""
    vllm: bool

    @property
    def new_tokens(self) -> int:
        """Tokens sampled per turn."""
        return min(NEW_TOKENS, self.tokens // 4) // self.turns


@dataclass(frozen=True)
class Speed:
    """Speed and memory over the steps after the first."""

    rollout: float
    """Tokens sampled per second."""
    update: float
    """Tokens of whole episodes per second: scoring, loss, backward and optimizer step."""
    memory: float
    """Peak memory that torch allocated, in GiB, without vLLM's; 0 on CPU."""
    sampled: int
    tokens: int


def cases(tiny: bool, vllm: bool) -> list[Case]:
    """All measurements, with the two sides alternating."""
    shapes, lengths = (("tiny",), (64,)) if tiny else (("0.5B", "1.5B"), (4096, 16384))
    runs = (("ours", 1), ("TRL", 1), ("ours", 4))
    return [
        Case(shape, tokens, turns, side, engine)
        for shape in shapes
        for tokens in lengths
        for engine in ((False, True) if vllm else (False,))
        for side, turns in runs
    ]


def make_model(shape: str, folder: Path) -> Path:
    """Make a model with random weights, and a tokenizer whose vocabulary is a part of the model's."""
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        **SHAPES[shape],
        vocab_size=2048 if shape == "tiny" else 151936,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, top_k=0
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_text(tokens: int) -> str:
    """Random letters of about the given number of tokens."""
    letters = "".join(random.Random(0).choices(string.ascii_lowercase, k=tokens * 4))
    tokenizer = make_tokenizer()
    return tokenizer.decode(tokenizer.encode(letters)[:tokens])


class Talker:
    """Returns the same text in each turn and a random reward, which the members of a group do not share."""

    def __init__(self, text: str, turns: int, chance: random.Random):
        self._text, self._turns, self._chance = text, turns, chance

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self._left = self._turns
        return self._text, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        return self._text, self._chance.random(), self._left == 0, False, {}


def _common(case: Case, folder: str) -> dict[str, Any]:
    rows = max(1, min(EPISODES, 8192 // case.tokens))
    options: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": EPISODES // rows,
        "num_generations": EPISODES,
        "learning_rate": 1e-5,
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": True,
        "model_init_kwargs": {"dtype": "bfloat16" if torch.cuda.is_available() else "float32"},
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "disable_dropout": True,
    }
    if case.vllm:
        options |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    return options


def make_trainer(case: Case, model: Path, folder: str) -> GRPOTrainer:
    """The trainer of one side; both see the same prompts."""
    text = make_text((case.tokens - case.turns * case.new_tokens) // case.turns)
    shared: dict[str, Any] = {
        "model": str(model),
        "peft_config": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    }
    chance = random.Random(0)
    if case.side == "ours":
        return MultiTurnGRPOTrainer(
            args=MultiTurnGRPOConfig(
                **_common(case, folder),
                max_turns=case.turns,
                max_new_tokens=case.new_tokens,
                min_new_tokens=case.new_tokens,
                log_rollouts=False,
            ),
            environment=lambda: Talker(text, case.turns, chance),
            **shared,
        )

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [chance.random() for _ in completions]

    least = {"min_tokens" if case.vllm else "min_new_tokens": case.new_tokens}
    return GRPOTrainer(
        args=GRPOConfig(**_common(case, folder), max_completion_length=case.new_tokens, generation_kwargs=least),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}]] * EPISODES}),
        **shared,
    )


def _timed(inner: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _finish()
        started = time.perf_counter()
        result = inner(*args, **kwargs)
        _finish()
        seconds.append(time.perf_counter() - started)
        return result

    return call


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(case: Case, model: Path) -> Speed:
    """Train a few steps and time the rollout and the rest of each."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, model, folder)
        trainer.remove_callback(PrinterCallback)
        rollouts: list[float] = []
        steps: list[float] = []
        if case.side == "TRL":
            vars(trainer)["_generate"] = _timed(trainer._generate, rollouts)
        else:
            assert isinstance(trainer, MultiTurnGRPOTrainer) and trainer.engine is not None
            vars(trainer.engine)["run"] = _timed(trainer.engine.run, rollouts)
        vars(trainer)["training_step"] = _timed(trainer.training_step, steps)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "num_tokens" in entry]
    later = STEPS - 1
    rollout = sum(rollouts[-later:])
    update = sum(steps[-later * len(steps) // STEPS :]) - rollout
    tokens = round(logs[-1]["num_tokens"] - logs[-1 - later]["num_tokens"])
    sampled = later * EPISODES * case.turns * case.new_tokens
    found = round(sum(entry["completions/mean_length"] for entry in logs[-later:]) * EPISODES)
    if found != sampled:
        raise RuntimeError(f"{case} sampled {found} tokens, expected {sampled}.")
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return Speed(sampled / rollout, tokens / update, memory, sampled, tokens)


def measure_apart(case: Case, model: Path) -> Speed | str:
    """Run :func:`measure` in a process of its own. Returns the last line of its error if it fails."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case)), "--model", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"rollout"')]
    if done.returncode == 0 and lines:
        return Speed(**json.loads(lines[-1]))
    errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return next((line for line in reversed(errors) if "Error" in line), errors[-1])[:200]


def table(results: Sequence[tuple[Case, Speed | str]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| model | tokens | turns | generator | library | rollout, tokens/s | update, tokens/s | peak memory, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, speed in results:
        cells = [case.shape, str(case.tokens), str(case.turns), "vLLM" if case.vllm else "transformers", case.side]
        if isinstance(speed, str):
            cells += [speed.replace("|", "/"), "", ""]
        else:
            cells += [f"{speed.rollout:.0f}", f"{speed.update:.0f}", f"{speed.memory:.1f}" if speed.memory else "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def update_tables(shape: str, *options: str) -> str:
    """Run the update workloads of `update_vs_trl.py` in a process of their own; return their tables."""
    script = Path(__file__).with_name("update_vs_trl.py")
    command = [
        sys.executable,
        str(script),
        "--shape",
        shape,
        "--parts",
        "whole",
        "ragged",
        "long",
        "sure",
        "silent",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    lines = [line for line in done.stdout.splitlines() if line.startswith("|") or not line]
    return "\n".join(lines).strip() or (done.stderr.strip().splitlines() or ["no output"])[-1]


def page(results: Sequence[tuple[Case, Speed | str]], device: str) -> str:
    """The content of `results/gpu.md`."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("agile-trainers", "trl", "transformers", "torch"))
    return (
        "# Rollout, update and memory on a GPU, beside TRL's GRPOTrainer\n\n"
        f"Written by `make bench-gpu` on {device}; {versions}. {EPISODES} episodes of about so many tokens, {NEW_TOKENS} of "
        "them sampled (a quarter at most), the rest read; random weights of Qwen2.5's shapes, LoRA r=16, bf16, gradient "
        f"checkpointing; means of {STEPS - 1} steps after one to warm up. Rollout counts sampled tokens, update those of "
        f"whole episodes. Peak memory is torch's, without vLLM's own.\n\n{table(results)}\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything and write the table; return 2 without a GPU, 1 if a measurement failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="run a tiny model on CPU, to test the benchmark itself")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.md")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.case is not None:
        print(json.dumps(asdict(measure(Case(**options.case), options.model))))
        return 0
    if not torch.cuda.is_available() and not options.tiny:
        print(
            "bench-gpu measures a GPU, and torch sees none here. See `agile-trainers env`; --tiny runs it on CPU.",
            file=sys.stderr,
        )
        return 2
    results: list[tuple[Case, Speed | str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(options.tiny, is_vllm_available() and not options.tiny):
            model = Path(folder) / case.shape
            if not model.is_dir():
                make_model(case.shape, model)
            results.append((case, measure(case, model) if options.tiny else measure_apart(case, model)))
            print(table(results[-1:]).splitlines()[-1], flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    text = page(results, device)
    if not options.tiny:
        for shape in ("0.5B", "1.5B"):
            tables = update_tables(shape)
            print(f"\n{shape}\n{tables}", flush=True)
            text += f"\n## Update, {shape}\n\nSee `update_vs_trl.py`; the bars are those of CPU.\n\n{tables}\n"
    options.output.write_text(text, encoding="utf-8")
    return int(any(isinstance(speed, str) for _, speed in results))


if __name__ == "__main__":
    sys.exit(main())
