# ruff: noqa: E402
"""Train a small run for thousands of steps and measure what grows (part of ``make faults``).

Every ten steps the memory of its own (USS), open descriptors and threads of the process are written down. The slope of a
straight line through the last three quarters must stay below 1 KiB a step; descriptors and threads must not grow at all.
The exit code is 1 otherwise. Rollout logs, evaluation and checkpoints are on, since they have state of their own.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
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
from games import Chatter, make_trainer
from ppo_games import make_ppo
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging

from agile_trainers.embedded import make_embedded_model

EVERY = 10
BOUND = 1024.0
"""Bytes a step."""


class Meter(TrainerCallback):
    """Writes down memory, descriptors and threads."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int]] = []
        self.process = psutil.Process()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % EVERY == 0:
            gc.collect()
            used = self.process.memory_full_info().uss
            self.rows.append((state.global_step, used, self.process.num_fds(), threading.active_count()))


def main() -> int:
    """Train, print the figures and compare them with the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=("grpo", "reinforce", "ppo"), default="grpo")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    meter, begun = Meter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        model = make_embedded_model(Path(folder) / "model")
        settings: dict[str, Any] = {
            "environment": Chatter, "environment_workers": 2, "max_steps": options.steps, "save_strategy": "steps",
            "save_steps": options.steps // 8, "save_total_limit": 1, "eval_strategy": "steps",
            "eval_steps": options.steps // 8, "num_eval_episodes": 8, "learning_rate": 1e-4, "callbacks": [meter],
            "logging_steps": 10,
        }  # fmt: skip
        if options.algorithm == "ppo":
            trainer: Any = make_ppo(model, Path(folder) / "run", **settings)
        else:
            groups = {"num_generations": 1} if options.algorithm == "reinforce" else {}
            trainer = make_trainer(model, Path(folder) / "run", algorithm=options.algorithm, **settings, **groups)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    steps, memory, descriptors, threads = np.array(meter.rows, dtype=float).T
    late = steps > options.steps / 4
    slope = np.polyfit(steps[late], memory[late], 1)[0]
    grown = [float(each[late][-1] - each[late][0]) for each in (descriptors, threads)]
    print(
        f"{options.algorithm}, {options.steps} steps, {time.process_time() - begun:.0f} CPU s: memory "
        f"{memory[late][0] / 2**20:.1f} -> {memory[-1] / 2**20:.1f} MiB, {slope:.0f} bytes a step over the last "
        f"{int(late.sum()) * EVERY} (bound {BOUND:.0f}); descriptors {grown[0]:+.0f}, threads {grown[1]:+.0f}"
    )
    return int(slope >= BOUND or max(grown) > 0)


if __name__ == "__main__":
    sys.exit(main())
