"""Trainers after each other in one process: ``ten_trainers.py MODEL FOLDER COUNT KIND...`` prints the memory after each."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {
        "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"
    }  # fmt: skip

import psutil
import torch
from environment_agents import Plays
from games import Chatter, end_process, make_trainer
from ppo_games import make_ppo
from transformers.generation.stopping_criteria import STOP_STRING_EMBEDDING_CACHE

from agile_trainers.envs.agent import Agent
from agile_trainers.trainers.trainer import MultiTurnTrainer

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "agents": {"environment": Agent(Plays(Chatter))},
    "processes": {"environment_processes": 2},
    "ahead": {"batches_ahead": 1},
    "critic": {},
    "vllm": {"use_vllm": True, "stop_strings": None},
}


def maker(kinds: list[str], model: Path | str) -> Callable[..., MultiTurnTrainer]:
    """Return what makes a trainer of these kinds together, in a folder and with further options."""
    made: Any = make_ppo if "critic" in kinds else make_trainer
    options = {name: value for kind in kinds for name, value in KINDS[kind].items()}
    return lambda folder, **more: made(model, folder, **{**options, **more})


def outside() -> set[Any]:
    """The threads and processes that this process has, but for those of tqdm, and of pytest for the test that runs.

    Nor do the server that starts processes count, and what counts their semaphores: Python begins them once, and anew where
    they have ended.
    """
    threads = {one for one in threading.enumerate() if not one.name.startswith(("tqdm_monitor", "pytest_timeout"))}
    once = (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)
    return {*threads, *(one for one in psutil.Process().children(recursive=True) if one.pid not in once)}


def held(others: Collection[Any] = ()) -> dict[str, int]:
    """Count what this process holds: live trainers, bytes of tensors, threads, processes below it, descriptors.

    Threads and processes of ``others`` are not counted.
    """
    STOP_STRING_EMBEDDING_CACHE.clear()  # of transformers, for at most eight tokenizers
    for _ in range(3):  # a thread or process that ends frees more
        gc.collect()
    multiprocessing.active_children()  # lets go of those that have ended
    begun = outside() - {*others}
    threads = [one for one in begun if isinstance(one, threading.Thread)]
    objects = gc.get_objects()
    tensors = [one for one in objects if type(one) in (torch.Tensor, torch.nn.Parameter) and not one.is_meta]
    tensors = [one for one in tensors if torch._C._has_storage(one)]  # a fake one of an older PyTorch has none
    return {
        "trainers": sum(issubclass(type(one), MultiTurnTrainer) for one in objects),
        "bytes": sum({one.data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values()),
        "threads": len(threads),
        "processes": len(begun) - len(threads),
        "descriptors": psutil.Process().num_fds(),
    }


def check_tenth(model: Path, folder: Path, kinds: list[str]) -> None:
    """Make ten trainers in a process of its own, and check that the tenth leaves no more than the second."""
    command = [sys.executable, __file__, str(model), str(folder), "10", *kinds]
    run = subprocess.run(command, capture_output=True, text=True)
    after: list[dict[str, Any]] = [json.loads(line[5:]) for line in run.stdout.splitlines() if line.startswith("held ")]
    assert len(after) == 10, run.stderr[-4000:]
    second, tenth = after[1], after[9]
    assert tenth["trainers"] == 0 and tenth["resident"] < 1.1 * second["resident"]
    for name in ("bytes", "threads", "processes", "descriptors"):
        assert tenth[name] <= second[name], name


if __name__ == "__main__":
    model, folder, count, *kinds = sys.argv[1:]
    make = maker(kinds, model)
    for number in range(int(count)):
        trainer = make(Path(folder) / str(number), max_steps=2)
        trainer.train()
        if number % 2:
            trainer.close()
        del trainer
        print("held", json.dumps(held() | {"resident": psutil.Process().memory_info().rss}), flush=True)
    end_process()
