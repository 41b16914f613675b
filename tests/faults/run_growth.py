# ruff: noqa: E402
"""Train a small run for thousands of steps and measure what grows (part of ``make faults``).

Every ten steps three numbers of the process are written down: memory that no file backs, open descriptors and threads. The
slope of a straight line through the last three quarters must stay below 1 KiB a step; descriptors and threads must not
grow at all. The exit code is 1 otherwise. Rollout logs, evaluation and checkpoints are on, since they have state of their
own. ``Trainer`` keeps every log in ``state.log_history``; its part of the slope is printed. ``--algorithm trl`` measures
TRL's own ``GRPOTrainer`` with the same model, steps and logs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "trainers"), str(ROOT / "tests"), str(ROOT)]

import numpy as np
import psutil
import torch
from datasets import Dataset
from games import LORA, Chatter, make_trainer, settings
from peft import LoraConfig
from ppo_games import make_ppo
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from agile_trainers.embedded import make_embedded_model

EVERY = 10
BOUND = 1024.0
"""Bytes a step."""
COLUMNS = ("step", "memory", "before", "history", "descriptors", "threads")


def unshared_bytes(process: psutil.Process) -> int:
    """Return the memory that no file backs, swapped or not.

    The unique set size would also count pages of libraries, as long as no other process has loaded them.
    """
    return sum(part.anonymous + part.swap for part in process.memory_maps(grouped=True))


def history_bytes(history: Sequence[Mapping[str, Any]]) -> int:
    """Return the memory of ``state.log_history``, each object counted once."""
    parts = {id(part): part for entry in history for part in (entry, *entry.keys(), *entry.values())}
    return sys.getsizeof(history) + sum(map(sys.getsizeof, parts.values()))


class Meter(TrainerCallback):
    """Writes down :data:`COLUMNS`.

    glibc returns the pages of freed objects now and then, so that memory rises and falls by megabytes in hundreds of
    steps. ``malloc_trim`` returns them before ``memory`` is read; ``before`` is read before that.

    Args:
        steps: Of the run.
    """

    def __init__(self, steps: int) -> None:
        self.rows = np.zeros((steps // EVERY, len(COLUMNS)))
        self._process = psutil.Process()
        self._allocator = ctypes.CDLL(None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % EVERY == 0:
            gc.collect()
            before = unshared_bytes(self._process)
            self._allocator.malloc_trim(0)
            self.rows[state.global_step // EVERY - 1] = (
                state.global_step, unshared_bytes(self._process), before, history_bytes(state.log_history),
                self._process.num_fds(), threading.active_count(),
            )  # fmt: skip


def make_run(algorithm: str, steps: int, folder: Path, meter: Meter) -> Any:
    """Make the trainer of a small run."""
    model = make_embedded_model(folder / "model")
    common: dict[str, Any] = {
        "max_steps": steps, "save_strategy": "steps", "save_steps": steps // 8, "save_total_limit": 1,
        "eval_strategy": "steps", "eval_steps": steps // 8, "learning_rate": 1e-4, "logging_steps": 10,
    }  # fmt: skip
    if algorithm == "trl":
        ours = ("max_turns", "max_new_tokens", "stop_strings")
        rows = Dataset.from_dict({"prompt": [f"start {number} " for number in range(8)]})
        options = {name: value for name, value in settings(folder / "run", **common).items() if name not in ours}
        return GRPOTrainer(
            str(model),
            lambda completions, **kwargs: [sum(map(ord, text)) % 5 / 4 for text in completions],
            args=GRPOConfig(**options, per_device_eval_batch_size=8, max_completion_length=5),
            train_dataset=rows,
            eval_dataset=rows,
            callbacks=[meter],
            peft_config=LoraConfig(**LORA),
        )
    common |= {"environment": Chatter, "environment_workers": 2, "num_eval_episodes": 8, "callbacks": [meter]}
    if algorithm == "ppo":
        return make_ppo(model, folder / "run", **common)
    groups = {"num_generations": 1} if algorithm == "reinforce" else {}
    return make_trainer(model, folder / "run", algorithm=algorithm, **common, **groups)


def main() -> int:
    """Train, print the figures and compare them with the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=("grpo", "reinforce", "ppo", "trl"), default="grpo")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    meter, begun = Meter(options.steps), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_run(options.algorithm, options.steps, Path(folder), meter)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    late = meter.rows[meter.rows[:, 0] > options.steps / 4]
    of = dict(zip(COLUMNS, late.T))
    slope, untrimmed, history = (
        float(np.polyfit(of["step"], of[name], 1)[0]) for name in ("memory", "before", "history")
    )
    grown = {name: int(of[name][-1] - of[name][0]) for name in ("descriptors", "threads")}
    print(
        f"{options.algorithm}, {options.steps} steps, {time.process_time() - begun:.0f} CPU s. Memory "
        f"{of['memory'][0] / 2**20:.1f} -> {of['memory'][-1] / 2**20:.1f} MiB over the last {len(late) * EVERY} steps: "
        f"{slope:.0f} bytes a step (bound {BOUND:.0f}), of which log_history {history:.0f}, the rest "
        f"{slope - history:.0f}; {untrimmed:.0f} with the pages that the allocator had kept. "
        + ", ".join(f"{name} {change:+d}" for name, change in grown.items())
    )
    return int(slope >= BOUND or max(grown.values()) > 0)


if __name__ == "__main__":
    sys.exit(main())
