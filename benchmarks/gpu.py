"""Measures decoding, updates and whole steps on a GPU, for this library and for plain TRL (`make bench-gpu`).

The models have random weights and Qwen2.5's shapes, and train with LoRA in bf16. Each case runs in a process of its own, so
that it leaves nothing on the GPU and may run out of memory alone, and is written down before the next one starts: a run that
is cut off goes on where it ended. Plain TRL answers once, so whole steps are compared with our episodes of one turn; those
of four turns have as many tokens. ``--rehearse`` runs the same on CPU in a minute; its figures mean nothing.
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
from statistics import median
from typing import Any

import torch
from case_log import CaseLog
from datasets import Dataset
from peft import LoraConfig
from transformers import GenerationConfig, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer
from trl.import_utils import is_vllm_available

from agile_trainers.embedded import make_tokenizer
from agile_trainers.rollout.generators import GenerationRequest, SamplingSettings, TransformersGenerator
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

ROOT = Path(__file__).resolve().parents[1]
SHAPES: dict[str, dict[str, int]] = {
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
    "7B": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944,
    },
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
}  # fmt: skip
"""Shapes of Qwen2.5, with a vocabulary of 151936 tokens, and two key-value heads where no other number is stated."""
EPISODES, NEW_TOKENS, STEPS = 8, 256, 3
"""Episodes of a batch (one group), tokens sampled in each episode, and steps; the first step is a warm-up."""


@dataclass(frozen=True)
class Case:
    """Whole steps of one side: a rollout and an update."""

    shape: str
    tokens: int
    """Approximate tokens of a whole episode."""
    turns: int
    side: str
    """ours or TRL."""
    vllm: bool

    @property
    def name(self) -> str:
        generator = ", vLLM" if self.vllm else ""
        return f"step {self.shape}, {self.tokens} tokens, {self.turns} turns, {self.side}{generator}"

    @property
    def new_tokens(self) -> int:
        """Tokens sampled per turn."""
        return min(NEW_TOKENS, self.tokens // 4) // self.turns

    def figures(self, model: Path) -> dict[str, Any]:
        """Tokens per second, and memory."""
        return asdict(measure(self, model))


@dataclass(frozen=True)
class Update:
    """A workload of `update_vs_trl.py`: the same episodes for us, for TRL and for the bare model."""

    shape: str
    part: str

    @property
    def name(self) -> str:
        return f"update {self.shape}, {self.part}"

    def figures(self, model: Path) -> dict[str, Any]:
        """Median seconds of each side, their ratios, and the seconds that the matrix products alone take."""
        import update_vs_trl as update  # it imports this file

        if torch.cuda.is_available():
            update.DEVICE = "cuda"
        update.CHECKPOINTS = self.shape == "7B"
        result = update.compare(update.WORKLOADS[self.part], model, 2 if self.shape == "tiny" else 3)
        took = {side: median(seconds) for side, seconds in result["seconds"].items()}
        weights = sum(p.numel() for p in Qwen2ForCausalLM.from_pretrained(model).parameters())
        # Forward, and the gradient of the input: 2 multiplications and additions a weight each, none for frozen weights.
        least = 4 * weights * result["distinct_tokens"] / products_per_second()
        return {
            **{f"{side}, s": seconds for side, seconds in took.items()},
            "ours / TRL": median(update.ratios(result["seconds"], "ours", "TRL")),
            "ours / bare model": median(update.ratios(result["seconds"], "ours", "limit")),
            "matrix products, s": least,
            "ours / matrix products": took["ours"] / least,
        }


@dataclass(frozen=True)
class Decoding:
    """Answers to ragged prompts by the generator of the rollouts, and by transformers' own ``generate``."""

    shape: str
    rows: int
    context: int
    """Tokens of the longest prompt; the shortest has half of it."""

    @property
    def name(self) -> str:
        return f"decode {self.shape}, {self.rows} rows of {self.context}"

    def figures(self, model: Path) -> dict[str, Any]:
        """Sampled tokens per second of each, the reading of the prompts included, and memory."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        loaded = Qwen2ForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
        chance, count = random.Random(0), 16 if self.shape == "tiny" else 128
        lengths = [self.context - row * self.context // (2 * self.rows) for row in range(self.rows)]
        prompts = [[chance.randrange(10, 1000) for _ in range(length)] for length in lengths]
        found: dict[str, Any] = {}
        for side, decode in (("ours", _decode), ("generate", _generate)):
            decode(loaded, prompts, 4)
            _finish()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            sampled = decode(loaded, prompts, count)
            _finish()
            found[f"{side}, tokens/s"] = sampled / (time.perf_counter() - started)
            if sampled != count * self.rows:
                raise RuntimeError(f"{side} sampled {sampled} tokens, expected {count * self.rows}.")
            if torch.cuda.is_available():
                found[f"{side}, GiB"] = torch.cuda.max_memory_allocated() / 2**30
        return found


def _decode(model: Any, prompts: list[list[int]], count: int) -> int:
    eos, pad = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    settings = SamplingSettings(min_new_tokens=count)
    generator = TransformersGenerator(model, eos_token_ids=[eos], pad_token_id=pad, settings=settings)
    for episode, prompt in enumerate(prompts):
        chance = random.Random(episode)
        uniforms = lambda n, chance=chance: [chance.random() for _ in range(n)]  # noqa: E731
        generator.submit(GenerationRequest(episode, prompt, count, uniforms))
    sampled = 0
    while generator.pending:
        sampled += sum(len(output.token_ids) for output in generator.step())
    return sampled


def _generate(model: Any, prompts: list[list[int]], count: int) -> int:
    width, pad = max(map(len, prompts)), model.generation_config.pad_token_id
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    answers = model.generate(input_ids=ids, attention_mask=mask, min_new_tokens=count, max_new_tokens=count)
    return int(answers[:, width:].numel())


def products_per_second() -> float:
    """Multiplications and additions per second of a large matrix product, in the type that models compute in."""
    size, cuda = (8192, True) if torch.cuda.is_available() else (512, False)
    a, b = torch.randn(2, size, size, device="cuda" if cuda else "cpu", dtype=torch.bfloat16 if cuda else torch.float32)
    took = []
    for _ in range(8):
        _finish()
        started = time.perf_counter()
        a @ b
        _finish()
        took.append(time.perf_counter() - started)
    return 2 * size**3 / median(took[2:])


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


def cases(tiny: bool, vllm: bool) -> list[Case | Update | Decoding]:
    """All measurements, those that tell most first."""
    if tiny:
        return [Decoding("tiny", 4, 64), Update("tiny", "whole"), *_steps("tiny", 64, False)]
    return [
        Decoding("0.5B", 64, 1024),
        Update("0.5B", "whole"),
        *_steps("0.5B", 4096, False),
        Decoding("0.5B", 256, 1024),
        Update("7B", "whole"),
        Decoding("7B", 64, 1024),
        *(Update("0.5B", part) for part in ("long", "ragged", "sure", "zero_advantage")),
        Update("7B", "long"),
        *_steps("0.5B", 16384, False),
        *(case for tokens in (4096, 16384) for case in _steps("1.5B", tokens, False)),
        *(
            case
            for shape in ("0.5B", "1.5B")
            if vllm
            for tokens in (4096, 16384)
            for case in _steps(shape, tokens, True)
        ),
    ]


def _steps(shape: str, tokens: int, vllm: bool) -> list[Case]:
    """Whole steps of the two sides, which alternate."""
    return [Case(shape, tokens, turns, side, vllm) for side, turns in (("ours", 1), ("TRL", 1), ("ours", 4))]


def make_model(shape: str, folder: Path) -> Path:
    """Make a model with random weights, and a tokenizer whose vocabulary is a part of the model's."""
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        **{"num_key_value_heads": 2, **SHAPES[shape]},
        vocab_size=2048 if shape == "tiny" else 151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
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
                num_iterations=1,
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


def measure_apart(case: Case | Update | Decoding, model: Path, log: CaseLog, seconds: float) -> None:
    """Measure a case in a process of its own, and write its figures, or the line of its error, into the log."""
    command = [sys.executable, __file__, "--case", case.name, "--model", str(model)]
    started = time.time()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        log.write(case.name, "died", time.time() - started, reason=f"took longer than {seconds:.0f} s")
        return
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"figures"')]
    if done.returncode == 0 and lines:
        log.write(case.name, "passed", time.time() - started, **json.loads(lines[-1]))
        return
    errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    reason = next((line for line in reversed(errors) if "Error" in line), errors[-1])[:300]
    log.write(case.name, "failed", time.time() - started, reason=reason)


def page(log: CaseLog, device: str) -> str:
    """The results, in Markdown."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("agile-trainers", "trl", "transformers", "torch"))
    return (
        "# Decoding, updates and whole steps on a GPU\n\n"
        f"Written by `make bench-gpu` on {device}; {versions}. Random weights of Qwen2.5's shapes, LoRA, bf16. A step has "
        f"{EPISODES} episodes of about so many tokens, {NEW_TOKENS} of them sampled (a quarter at most), and gradient "
        f"checkpointing; its figures are means of {STEPS - 1} steps after one to warm up: sampled tokens per second of the "
        "rollout, tokens of whole episodes per second of the rest, and torch's peak memory in GiB, without vLLM's own.\n\n"
        f"{log.table()}"
    )


def run(log: CaseLog, models: Path, *, seconds: float, rehearse: bool) -> None:
    """Measure the cases that have no result yet, until the time is over."""
    started = time.time()
    finished = log.finished(started)
    for case in cases(rehearse, is_vllm_available() and not rehearse):
        left = started + seconds - time.time()
        if case.name in finished or left < 30:
            continue
        model = models / case.shape
        if not model.is_dir():
            make_model(case.shape, model)
        measure_apart(case, model, log, left)
        print(log.table().splitlines()[-1], flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is left and write the table; return 2 without a GPU, 1 if a measurement failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on CPU, to test the benchmark itself")
    parser.add_argument("--seconds", type=float, default=500, help="time of this run (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder of the results (default: runs/gpu or runs/gpu-rehearsal)")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.case is not None:
        known = {case.name: case for tiny in (True, False) for case in cases(tiny, True)}
        print(json.dumps({"figures": known[options.case].figures(options.model)}))
        return 0
    if not torch.cuda.is_available() and not options.rehearse:
        print(
            "bench-gpu measures a GPU, and torch sees none here. See `agile-trainers env`; --rehearse runs it on CPU.",
            file=sys.stderr,
        )
        return 2
    folder = options.folder or ROOT / "runs" / ("gpu-rehearsal" if options.rehearse else "gpu")
    log = CaseLog(folder / "bench.jsonl")
    with tempfile.TemporaryDirectory() as models:
        run(log, Path(models), seconds=options.seconds, rehearse=options.rehearse)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    (folder / "bench.md").write_text(page(log, device), encoding="utf-8")
    print(f"results in {folder}")
    return int(any(one["outcome"] != "passed" for one in log.results().values()))


if __name__ == "__main__":
    sys.exit(main())
