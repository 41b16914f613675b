"""Compares the options of a resumed run with those its checkpoint was saved under."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import TrainingArguments

_BOOKKEEPING = (
    "accelerator_config", "batch_eval", "critic_start", "data", "ddp_", "debug", "deepspeed", "disable_tqdm", "do_",
    "environment_processes", "environment_timeout", "environment_workers", "eval_", "fsdp", "generation_batch_size",
    "generation_chunk_size", "greater_is", "hub_", "ignore_data", "include_", "keep_reference", "label_", "load_best",
    "local_rank", "log_", "logging_", "max_completion_length", "max_environments", "merge_lora", "metric_for",
    "model_init_kwargs", "num_completions", "num_eval", "output_dir", "parallelism_config", "per_device_eval",
    "prediction_loss", "project", "push_to_hub", "report_to", "restore_callback", "resume_from", "run_name", "save_",
    "skip_memory", "torch_empty", "trackio_", "use_cpu", "vllm_gpu", "vllm_group", "vllm_server",
)  # fmt: skip
"""Prefixes of options that do not affect learning, or that are compared elsewhere."""
_IN_THE_OPTIMIZER = (
    "learning_rate", "critic_learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
)  # fmt: skip
"""Options that are restored with the optimizer's state, so that another value has no effect."""
_FIXED = ("optim", "optim_args", "optim_target_modules", "reference_adapter")
"""Options whose value must fit the states in the checkpoint."""


@dataclass
class OptionChanges:
    """Differences between the options of two parts of a run, each as ``name: then -> now``."""

    refused: list[str] = field(default_factory=list)
    """Changes that do not fit the states in the checkpoint."""
    idle: list[str] = field(default_factory=list)
    """Changes without effect."""
    active: list[str] = field(default_factory=list)
    """Changes that take effect from the checkpoint on."""


def recorded_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the options that affect learning, as JSON types, without paths, addresses and tokens."""
    chosen = {f.name: getattr(args, f.name) for f in fields(args) if not f.name.startswith(_BOOKKEEPING)}
    return json.loads(json.dumps(chosen, default=str))


def compare_options(then: dict[str, Any], now: dict[str, Any]) -> OptionChanges:
    """Sort the differences by their effect on a resumed run.

    Args:
        then: :func:`recorded_options` when the checkpoint was saved. Options it does not name are not compared.
        now: Those of the trainer that resumes.
    """
    changes = OptionChanges()
    for name in then.keys() & now.keys():
        if then[name] == now[name]:
            continue
        # With a rate of its own the critic has its own parameter group.
        regrouped = name == "critic_learning_rate" and None in (then[name], now[name])
        if name in _FIXED or regrouped:
            kind = changes.refused
        elif name in _IN_THE_OPTIMIZER:
            kind = changes.idle
        else:
            kind = changes.active
        kind.append(f"{name}: {then[name]!r} -> {now[name]!r}")
    for kind in (changes.refused, changes.idle, changes.active):
        kind.sort()
    return changes
