"""A trainer with a server: ``run_with_server.py MODEL OUTPUT`` prints the ids of keeper and a fork, and waits for a line."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "trainers"))

from games import Chatter, make_trainer

if __name__ == "__main__":
    trainer: Any = make_trainer(
        sys.argv[1], sys.argv[2], environment=Chatter, use_vllm=True, vllm_mode="server", vllm_server_start=True,
        stop_strings=None, max_model_length=256,
    )  # fmt: skip
    fork = os.fork()
    if fork == 0:
        time.sleep(300)
        os._exit(0)
    print("ids", trainer.sampler.vllm._started._keeper.pid, fork, flush=True)
    sys.stdin.readline()
