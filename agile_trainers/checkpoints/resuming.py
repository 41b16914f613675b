"""Compares the options and the folders of a resumed run with its checkpoint's, on several machines too, and locks them."""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from filelock import FileLock, Timeout
from transformers import TrainingArguments
from transformers.utils import logging

from agile_trainers.adapters.folders import CheckpointError
from agile_trainers.checkpoints.disclosure import differences
from agile_trainers.records.plain import stable_text

_BOOKKEEPING = (
    "accelerator_config", "batch_eval", "critic_start", "data", "ddp_", "debug", "deepspeed", "disable_tqdm", "do_",
    "environment_processes", "environment_timeout", "environment_workers", "eval_", "fsdp", "generation_batch_size",
    "generation_chunk_size", "greater_is", "hub_", "ignore_data", "include_", "keep_reference", "label_", "load_best",
    "local_rank", "log_", "logging_", "max_completion_length", "max_environments",
    "max_wall_seconds", "merge_lora", "metric_for",
    "model_init_kwargs", "num_completions", "num_eval", "output_dir", "parallelism_config", "per_device_eval",
    "prediction_loss", "project", "public_values", "push_to_hub", "report_to", "restore_callback", "resume_from",
    "run_name", "save_", "skip_memory", "torch_empty", "trackio_", "use_cpu", "vllm_gpu", "vllm_group", "vllm_server",
)  # fmt: skip
"""Prefixes of options that do not affect learning, or that are compared elsewhere."""
_IN_THE_OPTIMIZER = (
    "learning_rate", "critic_learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
)  # fmt: skip
"""Options that DeepSpeed restores with its optimizer's state, so that another value has no effect."""
_OF_GROUPS = ("weight_decay", "betas", "eps")
"""The optimizer's entries of these options, besides the rate."""
_FIXED = ("optim", "optim_args", "optim_target_modules", "reference_adapter")
"""Options whose value must fit the states in the checkpoint."""
_IN_THE_BATCH = ("beta", "demonstrations", "replay_successes")
"""Options whose loss reads what only a batch that was made with them holds."""
_OF_THE_BATCH = ("kl_placement", "teacher", "teacher_gradient", "turn_value_position")
"""Options of which each value has columns of its own in a batch."""


@dataclass
class OptionChanges:
    """Differences between the options of two parts of a run, each a clause without values that may not leave the machine."""

    refused: list[str] = field(default_factory=list)
    """Changes that do not fit the states in the checkpoint."""
    early: list[str] = field(default_factory=list)
    """Changes that the generation batch in the checkpoint was not made for."""
    idle: list[str] = field(default_factory=list)
    """Changes without effect."""
    active: list[str] = field(default_factory=list)
    """Changes that take effect from the checkpoint on."""
    unknown: list[str] = field(default_factory=list)
    """Names of options that another user's key made unreadable, so that they were not compared."""


def recorded_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the options that affect learning, as JSON types, without paths and addresses."""
    chosen = {f.name: getattr(args, f.name) for f in fields(args) if not f.name.startswith(_BOOKKEEPING)}

    def shown(value: Any) -> Any:
        if isinstance(value, (set, frozenset)):  # it has another order in each process
            return sorted(item if isinstance(item, str) else stable_text(item) for item in value)
        return str(value)

    return json.loads(json.dumps(chosen, default=shown))


def compare_options(
    then: dict[str, Any], now: dict[str, Any], shown: dict[str, Any], *, deepspeed: bool = False, inside: bool = False
) -> OptionChanges:
    """Sort the differences by their effect on a resumed run.

    Args:
        then: Options in the checkpoint's record. Options it does not name are not compared.
        now: :func:`recorded_options` of the trainer that resumes.
        shown: Those of them that may be shown, see :func:`~agile_trainers.checkpoints.disclosure.public_options`.
        deepspeed: True if DeepSpeed restores the optimizer, its options included.
        inside: True if the checkpoint lies inside a generation batch, which is trained on first.
    """
    both = then.keys() & now.keys()
    changed, unknown = differences({name: then[name] for name in both}, {name: now[name] for name in both}, shown)
    changes = OptionChanges(unknown=unknown)
    for name, clause in changed.items():
        # With a rate of its own the critic has its own parameter group.
        regrouped = name == "critic_learning_rate" and None in (then[name], now[name])
        begun = name in _IN_THE_BATCH and not then[name] and now[name]
        acts = bool(now.get({"kl_placement": "beta", "teacher_gradient": "teacher"}.get(name, name)))
        if name in _FIXED or regrouped:
            kind = changes.refused
        elif inside and (
            (begun and (name != "beta" or now.get("kl_placement") == "loss")) or (acts and name in _OF_THE_BATCH)
        ):
            kind = changes.early
        elif deepspeed and name in _IN_THE_OPTIMIZER:
            kind = changes.idle
        else:
            kind = changes.active
        kind.append(clause)
    return changes


def optimizer_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group of a new optimizer, to be applied after its state was loaded."""
    return [
        {name: group[name] for name in ("initial_lr", *_OF_GROUPS) if name in group} for group in optimizer.param_groups
    ]


def apply_options(optimizer: torch.optim.Optimizer, scheduler: Any, options: list[dict[str, Any]]) -> None:
    """Give an optimizer with a loaded state the options of this run: rate, weight decay, betas and epsilon.

    PyTorch loads them with the state. The rate keeps its place in the schedule: it is scaled as its initial value is. Equal
    options change nothing, to the last bit.

    Args:
        optimizer: Its state and that of ``scheduler`` are loaded.
        scheduler: The learning rate's.
        options: Of :func:`optimizer_options`, before the state was loaded.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)  # inside accelerate's
    for index, (group, own) in enumerate(zip(optimizer.param_groups, options, strict=True)):
        group.update({name: own[name] for name in _OF_GROUPS if name in own})
        before, after = group.get("initial_lr"), own.get("initial_lr")
        if before == after or before is None or after is None:
            continue
        group["initial_lr"] = after
        group["lr"] = group["lr"] * after / before if before else after
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs[index], scheduler._last_lr[index] = after, group["lr"]


# ----------------------------------------------------------------------------------------------------- several machines


logger = logging.get_logger(__name__)

LOCK = "run.lock"


class OutputDirInUseError(RuntimeError):
    """Another process trains into the same ``output_dir``."""


@contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Hold ``output_dir/run.lock`` while the block runs.

    The operating system releases the lock when the process ends, also when it is killed; the file is removed at the end of
    the block. A process on another host does not block: file locks are unreliable between hosts, and a requeued job must
    start.

    Args:
        output_dir: Made if it does not exist.

    Raises:
        OutputDirInUseError: If another process of this host holds the lock. The message names it.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir / LOCK
    with ExitStack() as stack:
        try:
            # Time to open the file again where its holder has just removed it.
            stack.enter_context(FileLock(path, timeout=0.2))
            path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")
            stack.callback(path.unlink, missing_ok=True)
        except Timeout as taken:
            _check_holder(output_dir, taken)
        yield


def _check_holder(output_dir: Path, taken: Timeout) -> None:
    try:
        holder = json.loads((output_dir / LOCK).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        holder = {}
    holder = holder if isinstance(holder, dict) else {}
    host, pid = holder.get("host", "an unknown host"), holder.get("pid", "unknown")
    if host == socket.gethostname():
        raise OutputDirInUseError(
            f"output_dir={str(output_dir)!r} is in use: process {pid} trains into it. Wait for it, stop it, or choose "
            "another output_dir."
        ) from taken
    logger.warning("%s says that process %s on %s trains into this folder too.", output_dir / LOCK, pid, host)


Result = TypeVar("Result")
_ONE_CHECKPOINT = (DistributedType.DEEPSPEED, DistributedType.FSDP)
"""Engines whose processes write parts of one checkpoint, which each process reads again."""


def check_storage(accelerator: Accelerator, args: Any) -> None:
    """Reject a run on several machines if ``save_on_each_node`` does not fit their disks.

    The main process writes a file into ``output_dir`` and every machine looks for it. All processes must call this.

    Args:
        accelerator: The trainer's.
        args: The trainer's; reads ``output_dir`` and ``save_on_each_node``.

    Raises:
        ValueError: If machines do not share ``output_dir`` and only the first would save, so that the others could not
            resume, or the engine is DeepSpeed or FSDP; if they share it and would overwrite each other's files; or
            if only some share it.
    """
    first = accelerator.is_local_main_process
    machines = sum(gather_object([first]))
    if machines == 1:
        return
    folder = Path(args.output_dir)
    name = [f".shared-{uuid.uuid4().hex}"]
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name[0]).touch()
    broadcast_object_list(name)
    seen = sum(gather_object([first and (folder / name[0]).exists()]))
    if accelerator.is_main_process:
        (folder / name[0]).unlink()
    if seen == 1 and accelerator.distributed_type in _ONE_CHECKPOINT:
        raise ValueError(
            f"{accelerator.distributed_type.value} saves one checkpoint from all machines, but the {machines} machines do "
            f"not share output_dir={args.output_dir!r}. Give one on a disk that all machines share, or launch with DDP "
            "(accelerate_configs/ddp.yaml)."
        )
    if seen == 1 and not args.save_on_each_node:
        raise ValueError(
            f"The {machines} machines do not share output_dir={args.output_dir!r}, and only the first would save what a run "
            "resumes from. Set save_on_each_node=True, or give an output_dir on a disk that all machines share."
        )
    if seen == machines and args.save_on_each_node:
        raise ValueError(
            f"save_on_each_node=True, but the {machines} machines share output_dir={args.output_dir!r} and would overwrite "
            "each other's files. Set save_on_each_node=False, or give an output_dir on a disk of each machine's own."
        )
    if 1 < seen < machines:
        raise ValueError(
            f"{seen} of the {machines} machines share output_dir={args.output_dir!r}. Give one that all share, or one that "
            "none share with save_on_each_node=True."
        )


def on_each_disk(saves: bool, function: Callable[[], Result]) -> list[Result]:
    """Run a function on the process of each disk that saves there, and return the results to all processes.

    Args:
        saves: ``args.should_save``: True for the main process or, with ``save_on_each_node``, for one of each machine.
        function: What to run.

    Returns:
        The results in the order of the machines.

    Raises:
        CheckpointError: On all processes, if it is raised on one. The same for ``OutputDirInUseError``.
    """
    answer: Any = None
    if saves:
        try:
            answer = (function(),)
        except (CheckpointError, OutputDirInUseError) as error:
            answer = error
    answers = [one for one in gather_object([answer]) if one is not None]
    for one in answers:
        if isinstance(one, Exception):
            raise one
    return [one[0] for one in answers]


def agreed_step(saves: bool, find: Callable[[int | None], int | None], *, older: bool) -> int | None:
    """Return the step of the newest checkpoint that every disk holds; None if none is to be resumed from.

    A run that is killed while it saves may leave its last checkpoint on some of the machines.

    Args:
        saves: As in :func:`on_each_disk`.
        find: Returns the step of the newest complete checkpoint up to a step (None: of any step) on this disk.
        older: Whether an older checkpoint may be taken, if a disk lacks the newest.

    Raises:
        CheckpointError: If the disks hold no checkpoint of the same step.
    """
    steps = on_each_disk(saves, lambda: find(None))
    while len(set(steps)) > 1:
        if None in steps or not older:
            held = ", ".join("none" if step is None else f"checkpoint-{step}" for step in steps)
            raise CheckpointError(
                f"The machines would resume from different checkpoints: {held}, in the order of the machines. Give each "
                "machine its own folder of the same step, or remove the folders to start again."
            )
        limit = min(step for step in steps if step is not None)
        steps = on_each_disk(saves, lambda limit=limit: find(limit))  # type: ignore[misc]
    return steps[0]
