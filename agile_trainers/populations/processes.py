"""Divides the members of a population over the processes of a launcher, each of which trains on its own."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_OF_A_LAUNCHER = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "GROUP_WORLD_SIZE", "ROLE_NAME",
)  # fmt: skip
_SHARDED = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")
_SECONDS = 0.5
"""Time between two looks for the results of other processes."""


@dataclass(frozen=True)
class Processes:
    """This process among those that train members of one population."""

    rank: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """True for the process that writes the lineage."""
        return self.rank == 0

    def wait_for(self, files: list[Path]) -> None:
        """Wait until files exist that other processes write; a launcher stops all processes when one of them fails."""
        while self.count > 1 and not all(file.is_file() for file in files):
            time.sleep(_SECONDS)


def split_processes() -> Processes:
    """Make each process of ``accelerate launch`` or ``torchrun`` a run of its own, for :class:`Population`.

    Call it before anything else, in particular before a trainer's configuration is made: it removes the launcher's variables
    from the environment, and leaves one GPU visible. The processes share ``output_dir``, by which they meet.

    Returns:
        The ``processes`` of a population; a single one without a launcher.

    Raises:
        RuntimeError: If this process joined the others already.
        ValueError: If the launch configuration shards one model over the processes.
    """
    count, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if count == 1:
        return Processes()
    for name in _SHARDED:
        if os.environ.get(name, "false").lower() == "true":
            raise ValueError(
                f"{name}=true shards one model over the processes, but each member is trained by one process. "
                "Launch with a configuration without DeepSpeed and FSDP, such as accelerate_configs/ddp.yaml."
            )
    import torch
    from accelerate import PartialState

    if PartialState._shared_state or torch.distributed.is_initialized() or torch.cuda.is_initialized():
        raise RuntimeError(
            "split_processes() comes too late: this process has joined the others or taken a GPU. Call it before a "
            "configuration, a model or an Accelerator is made."
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    for name in _OF_A_LAUNCHER:
        os.environ.pop(name, None)
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible != "":  # empty: there is no GPU to divide
        devices = visible.split(",") if visible else [str(number) for number in range(local + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[local % len(devices)]
    return Processes(rank, count)


def check_alone() -> None:
    """Raise if this process is one of several that train together.

    Raises:
        RuntimeError: If it is, since a member of a population is trained by one process.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            "A population in several processes needs `processes = split_processes()` at the very beginning of the script, "
            "and Population(..., processes=processes)."
        )
