"""A training with a server of its own, in any number of processes: ``started_run.py MODEL OUTPUT`` writes what each did."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "trainers"))

import torch
from games import Chatter, end_process, make_trainer
from scripted_runs import said, watched


def play(model: Path | str, output: Path) -> None:
    """Train, and write the server's address, whether this process started it, and what it trained on."""
    processes, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    trainer: Any = make_trainer(
        model, output, environment=Chatter, use_vllm=True, vllm_mode="server", vllm_server_start=True, stop_strings=None,
        max_model_length=256, batches_ahead=1, max_steps=3, per_device_train_batch_size=8 // processes,
    )  # fmt: skip
    batches = watched(trainer)
    trainer.train()
    policy = trainer.sampler.vllm
    result = {
        "url": policy.engine.servers[0].url,
        "started": policy._started is not None,
        "said": [said(one) for one in batches],
    }
    (output / f"rank-{rank}.json").write_text(json.dumps(result))
    trainer.save_model(str(output / "end"))


if __name__ == "__main__":
    play(sys.argv[1], Path(sys.argv[2]))
    end_process()
