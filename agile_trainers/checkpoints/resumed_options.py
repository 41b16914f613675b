"""Compares the options of a resumed run with those its checkpoint was saved under, and applies the optimizer's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import TrainingArguments

from agile_trainers.checkpoints.disclosure import differences

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


@dataclass
class OptionChanges:
    """Differences between the options of two parts of a run, each a clause without values that may not leave the machine."""

    refused: list[str] = field(default_factory=list)
    """Changes that do not fit the states in the checkpoint."""
    idle: list[str] = field(default_factory=list)
    """Changes without effect."""
    active: list[str] = field(default_factory=list)
    """Changes that take effect from the checkpoint on."""
    unknown: list[str] = field(default_factory=list)
    """Names of options that another user's key made unreadable, so that they were not compared."""


def recorded_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the options that affect learning, as JSON types, without paths and addresses."""
    chosen = {f.name: getattr(args, f.name) for f in fields(args) if not f.name.startswith(_BOOKKEEPING)}
    return json.loads(json.dumps(chosen, default=str))


def compare_options(
    then: dict[str, Any], now: dict[str, Any], shown: dict[str, Any], *, deepspeed: bool = False
) -> OptionChanges:
    """Sort the differences by their effect on a resumed run.

    Args:
        then: Options in the checkpoint's record. Options it does not name are not compared.
        now: :func:`recorded_options` of the trainer that resumes.
        shown: Those of them that may be shown, see :func:`~agile_trainers.checkpoints.disclosure.public_options`.
        deepspeed: True if DeepSpeed restores the optimizer, its options included.
    """
    both = then.keys() & now.keys()
    changed, unknown = differences({name: then[name] for name in both}, {name: now[name] for name in both}, shown)
    changes = OptionChanges(unknown=unknown)
    for name, clause in changed.items():
        # With a rate of its own the critic has its own parameter group.
        regrouped = name == "critic_learning_rate" and None in (then[name], now[name])
        if name in _FIXED or regrouped:
            kind = changes.refused
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
