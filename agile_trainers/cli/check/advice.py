"""Computes what each change of a run's options would save of its planned memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig
from trl import ModelConfig, get_peft_config

from agile_trainers.cli.check.memory_plan import Engine, MemoryPlan, estimate_memory, readable, serving
from agile_trainers.cli.check.tracing import Step
from agile_trainers.cli.launch_configs import Launch

LEAST = 2**30 // 20
"""Bytes that a change must save to be named."""


@dataclass(frozen=True)
class Remedy:
    """One change of the options."""

    option: str
    saves: int
    """Bytes of the peak, with this change alone."""
    first: bool = False
    """True if it comes before the others, however much it saves."""

    def __str__(self) -> str:
        return f"{self.option} saves {readable(self.saves)}"


def remedies(config: PretrainedConfig, plan: MemoryPlan, step: Step, gpu: int | None = None) -> list[Remedy]:
    """Plan a run again with each change that applies to it, and sort the changes by what they save.

    A base in fp32 is named first: the other changes cost time or quality, and save less on a base in bf16.

    Args:
        config: The model's configuration.
        plan: The run's plan.
        step: The traced step of the plan.
        gpu: Bytes of the GPU.
    """
    peak = estimate_memory(config, plan, step)[-1].size
    found = []
    for option, changed in _changes(plan, step, gpu):
        saves = peak - estimate_memory(config, changed)[-1].size
        if saves >= LEAST:
            found.append(Remedy(option, saves, first=changed.dtype != plan.dtype))
    return sorted(found, key=lambda remedy: (not remedy.first, -remedy.saves))


def _changes(plan: MemoryPlan, step: Step, gpu: int | None) -> Iterator[tuple[str, MemoryPlan]]:
    """Yield the changes that a run can make, each as options with the plan that it leads to."""
    lora, launch = plan.peft_config is not None, plan.launch
    if plan.dtype.itemsize > 2:
        option = "dtype=bfloat16" if lora else "dtype=bfloat16 (which rounds small updates of a whole model away)"
        yield option, replace(plan, dtype=torch.bfloat16)
    if not lora:
        adapters = get_peft_config(ModelConfig(use_peft=True, lora_target_modules=["all-linear"]))
        yield "use_peft=True", replace(plan, peft_config=adapters, copies=1)
    elif plan.quantization is None and plan.engine is None and not launch.shared:
        yield "load_in_4bit=True", replace(plan, quantization="4 bit")
    if not plan.gradient_checkpointing:
        yield "gradient_checkpointing=True", replace(plan, gradient_checkpointing=True)
    if plan.rows > 1:
        yield f"max_tokens_per_micro_batch={plan.tokens} (an episode at a time)", replace(plan, rows=1)
    if plan.engine is None and plan.episodes > 1:
        half = plan.episodes // 2
        yield f"generation_chunk_size={half}", replace(plan, episodes=half)
    if plan.engine is None and plan.quantization is None:
        yield "use_vllm=True with vllm_mode=server (on other GPUs)", replace(plan, engine=Engine(server=True))
    if plan.engine is not None and not plan.engine.server:
        yield from _smaller_engines(plan, step, plan.engine, gpu)
    if plan.copies > 1:
        yield "beta=0.0 (no reference model)", replace(plan, copies=1)
    if "8bit" not in plan.optimizer and plan.optimizer.startswith("adam") and not launch.shared:
        yield "optim=adamw_bnb_8bit", replace(plan, optimizer="adamw_bnb_8bit")
    if launch.processes > 1 and plan.quantization is None:
        for engine in ("zero2", "zero3"):
            if engine > launch.engine and launch.engine != "fsdp2":
                shared = Launch(engine, launch.processes, launch.mixed_precision)
                yield f"accelerate_config={engine}", replace(plan, launch=shared)
    half = plan.tokens // 2
    yield f"max_model_length={half} (cuts longer episodes)", replace(plan, tokens=half, decoded=min(plan.decoded, half))


def _smaller_engines(plan: MemoryPlan, step: Step, engine: Engine, gpu: int | None) -> Iterator[tuple[str, MemoryPlan]]:
    """Yield the changes that leave an engine of the process itself with less memory."""
    if not engine.sleeps:
        yield "vllm_enable_sleep_mode=True", replace(plan, engine=replace(engine, sleeps=True))
    if engine.share is not None and gpu is not None:
        # A tenth more than a single episode needs, for vLLM's own activations.
        least = -(-serving(plan, step).least * 110 // gpu)
        if 0 < least < 100 * engine.share // gpu:
            small = replace(engine, share=least * gpu // 100)
            yield f"vllm_gpu_memory_utilization={least / 100:g}", replace(plan, engine=small)
