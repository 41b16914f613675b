"""Compares the memory plan of ``agile-trainers check`` with counted bytes, for models of Qwen2.5's shapes, without a GPU.

Usage: python benchmarks/plan_bytes.py [--cases NAME ...]

Weights, gradients and optimizer state are counted on tensors without data (the meta device), a 4-bit base on two layers that
bitsandbytes quantizes. Activations are counted with saved-tensor hooks on one and two layers of full width in real passes of
short padded episodes, and temporaries from the tensors that live after each operation of a real backward pass. Both are
polynomials of the length, of degree 2 with masks: three lengths give those of the plan's length exactly. Caches are counted
by shape. Sharded states are counted by DeepSpeed's own estimate. The exit code is 1 if a sum differs by more than 15 %.
"""

from __future__ import annotations

import argparse
import copy
import json
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from counting import SavedBytes
from peft import get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Cache, Qwen2Config
from transformers.modeling_layers import GradientCheckpointingLayer
from trl import ModelConfig
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from agile_trainers.adapters.fused import fuse
from agile_trainers.cli.check.memory_plan import estimate_memory, plan_memory
from agile_trainers.cli.check.tracing import MemoryPlan, trace
from agile_trainers.cli.launch_configs import SINGLE, Launch
from agile_trainers.rollout.generators.transformers.kv_cache import GrowingLayer, capacity
from agile_trainers.trainers import MultiTurnGRPOConfig

RESULTS = Path(__file__).parent / "results/plan_bytes.json"
WITHIN = 0.15
GPU = 79 * 2**30
"""Bytes of an H100 of 80 GB, of which vLLM takes a share."""
PROMPT, OBSERVATION = 512, 256
LENGTHS = (16, 24, 40)
"""Tokens of the real passes."""
_QWEN = {"num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 151936}
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        **_QWEN, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    },
    "3B": {
        **_QWEN, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
    },
    "7B": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "tie_word_embeddings": False, "vocab_size": 152064,
    },
}  # fmt: skip
"""Shapes of Qwen2.5's public configurations."""
_LORA = {"use_peft": True, "lora_r": 16, "lora_target_modules": ["all-linear"], "dtype": "bfloat16"}
_LIMITS = {"max_turns": 8, "max_new_tokens": 512, "max_model_length": 8192, "gradient_accumulation_steps": 4}
_COLOCATED, _SERVER = {"use_vllm": True}, {"use_vllm": True, "vllm_mode": "server"}


@dataclass(frozen=True)
class Case:
    """A run whose memory is planned and counted."""

    size: str
    options: dict[str, Any]
    launch: Launch = SINGLE

    def make(self, shapes: dict[str, dict[str, Any]] = SHAPES) -> tuple[Qwen2Config, MemoryPlan]:
        """Make the model's configuration and the plan, as ``agile-trainers check`` does."""
        named = {one.name for one in fields(ModelConfig)} - {"trust_remote_code"}
        model = ModelConfig(**{name: value for name, value in self.options.items() if name in named})
        own = {name: value for name, value in self.options.items() if name not in named}
        args = MultiTurnGRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **{**_LIMITS, **own})
        args.bf16 = True  # as on a GPU, which is not here
        config = Qwen2Config(**shapes[self.size], max_position_embeddings=32768, dtype="bfloat16")
        known = {"prompt": PROMPT, "observation": OBSERVATION, "launch": self.launch, "gpu": GPU}
        return config, plan_memory(config, args, model, critic=False, **known)  # type: ignore[arg-type]


CASES = {
    "0.5B, whole": Case("0.5B", {"per_device_train_batch_size": 4}),
    "0.5B, whole, vLLM": Case("0.5B", {"per_device_train_batch_size": 4, **_COLOCATED}),
    "3B, whole": Case("3B", {"per_device_train_batch_size": 2}),
    "3B, whole, vLLM": Case("3B", {"per_device_train_batch_size": 2, "dtype": "bfloat16", **_COLOCATED}),
    "7B, LoRA": Case("7B", {"per_device_train_batch_size": 4, **_LORA}),
    "7B, LoRA, no checkpointing": Case("7B", {"per_device_train_batch_size": 1, "gradient_checkpointing": False,
                                              "gradient_accumulation_steps": 8, "max_model_length": 2048, **_LORA}),
    "7B, LoRA, vLLM": Case("7B", {"per_device_train_batch_size": 4, **_LORA, **_COLOCATED}),
    "7B, 4 bit": Case("7B", {"per_device_train_batch_size": 4, "load_in_4bit": True, **_LORA}),
    "7B, LoRA, server, DDP on 6": Case(
        "7B", {"per_device_train_batch_size": 4, **_LORA, **_SERVER}, Launch("ddp", 6, "bf16")
    ),
    "7B, whole, server, ZeRO-3 on 6": Case(
        "7B", {"per_device_train_batch_size": 4, "dtype": "bfloat16", **_SERVER}, Launch("zero3", 6, "bf16")
    ),
}  # fmt: skip


def computes(plan: MemoryPlan) -> torch.dtype:
    """Return the dtype that the model's weights have when it computes."""
    return plan.autocast if plan.autocast and (plan.quantization or plan.launch.zero) else plan.dtype


def make_model(config: Qwen2Config, plan: MemoryPlan, *, real: bool) -> Any:
    """Make the model that the trainer would make, with weights of any value, or without data."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=computes(plan))
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        if plan.peft_config is not None:
            model = get_peft_model(model, copy.deepcopy(plan.peft_config))
            fuse(model)
    if real:
        model = model.to_empty(device="cpu")
        for weight in (*model.parameters(), *model.buffers()):
            weight.data.zero_()
    if not plan.dropout:
        disable_dropout_in_model(model)
    return model.train()


def narrow(config: Qwen2Config, layers: int) -> Qwen2Config:
    """Return a configuration of full width with few layers, and a vocabulary that fits into memory."""
    settings = {name: getattr(config, name) for name in next(iter(SHAPES.values()))}
    return Qwen2Config(**{**settings, "num_hidden_layers": layers, "vocab_size": 512}, max_position_embeddings=32768)


def extrapolate(values: Sequence[int], length: int) -> int:
    """Return the value at a length of the polynomial through the values at ``LENGTHS``."""
    total = Fraction(0)
    for here, value in zip(LENGTHS, values, strict=True):
        factor = Fraction(1)
        for other in LENGTHS:
            factor *= 1 if other == here else Fraction(length - other, here - other)
        total += factor * value
    return int(total)


def mixed(plan: MemoryPlan) -> AbstractContextManager[Any]:
    """Return the precision of a forward pass."""
    return nullcontext() if plan.autocast is None else torch.autocast("cpu", plan.autocast)


def one_pass(model: Any, plan: MemoryPlan, tokens: int) -> None:
    """Run a forward pass of padded rows."""
    ids = torch.zeros(plan.rows, tokens, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with mixed(plan):
        model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)


def count_kept(config: Qwen2Config, plan: MemoryPlan, checkpointing: bool) -> int:
    """Count what the forward pass keeps at the plan's length, from one and from two layers."""
    found = []
    for layers in (1, 2):
        model = make_model(narrow(config, layers), plan, real=True)
        if checkpointing:
            model.gradient_checkpointing_enable()
            if plan.peft_config is not None:
                model.enable_input_require_grads()
        sizes = []
        for tokens in LENGTHS:
            counter = SavedBytes([*model.parameters(), *model.buffers()])
            with counter.counting():
                one_pass(model, plan, tokens)
            sizes.append(counter.peak)
        found.append(extrapolate(sizes, plan.tokens))
        del model
    one, two = found
    return one + (config.num_hidden_layers - 1) * (two - one)


def count_layer(config: Qwen2Config, plan: MemoryPlan) -> tuple[int, int]:
    """Count what one layer keeps beside its input, and what its passes take at most beside weights and gradients."""
    model = make_model(narrow(config, 1), plan, real=True)
    (layer,) = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    calls: list[Any] = []
    handle = layer.register_forward_pre_hook(lambda _, args, named: calls.append((args, named)), with_kwargs=True)
    for tokens in LENGTHS:
        one_pass(model, plan, tokens)
    handle.remove()
    for weight in layer.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    kept, courses = [], []
    for (hidden, *rest), named in calls:
        hidden = hidden.detach().requires_grad_()
        hidden.grad = torch.zeros_like(hidden)
        counter, course = SavedBytes([*model.parameters(), *model.buffers(), hidden]), Course()
        with counter.counting(), mixed(plan):
            layer(hidden, *rest, **named)
        kept.append(counter.peak)
        with course:
            with mixed(plan):
                output = layer(hidden, *rest, **named)
            output.backward(torch.zeros_like(output))
        del output
        courses.append(course.sizes)
    most = max(extrapolate(moment, plan.tokens) for moment in zip(*courses, strict=True))
    return extrapolate(kept, plan.tokens), most


class Course(TorchDispatchMode):
    """Records the bytes of all tensors that were made and are not freed, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._there: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in before:
                storage = tensor.untyped_storage()
                self._there[id(storage)] = weakref.ref(storage)
        alive = {key: one for key, reference in self._there.items() if (one := reference()) is not None}
        self._there = {key: self._there[key] for key in alive}
        self.sizes.append(sum(storage.nbytes() for storage in alive.values()))
        return made


def count_state(config: Qwen2Config, plan: MemoryPlan) -> dict[str, int]:
    """Count weights, gradients and optimizer on tensors without data."""
    model = make_model(config, plan, real=False)
    if plan.peft_config is not None and plan.quantization is not None:
        for weight in model.parameters():  # as TRL does on a quantized base
            weight.data = weight.data.to(torch.bfloat16) if weight.requires_grad else weight.data
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    weights = sum({id(weight): weight.nbytes for weight in model.parameters()}.values())
    if plan.quantization is not None:
        weights -= quantization_saves(config, plan)
    for weight in trained:
        weight.grad = torch.empty_like(weight)
    gradients = sum(weight.grad.nbytes for weight in trained if weight.grad is not None)
    optimizer = torch.optim.AdamW(trained, foreach=False)
    optimizer.step()
    states = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.ndim)
    if plan.launch.engine == "zero3":
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

        numbers = sum(weight.numel() for weight in model.parameters())
        largest = max(weight.numel() for weight in model.parameters())
        estimate = estimate_zero3_model_states_mem_needs(
            numbers, largest, num_gpus_per_node=plan.launch.processes, cpu_offload=False, cpu_offload_params=False,
            zero_init=True,
        )  # fmt: skip
        return {"states": estimate[1]}
    return {"weights": weights, "gradients": gradients * (2 if plan.launch.engine == "ddp" else 1), "optimizer": states}


def quantization_saves(config: Qwen2Config, plan: MemoryPlan) -> int:
    """Count what bitsandbytes saves of all layers, by quantizing those of two."""
    import bitsandbytes

    model = make_model(narrow(config, 2), MemoryPlan(**{**vars(plan), "peft_config": None}), real=True)
    saved = 0
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.data
            packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
            saved += weight.nbytes - packed.nbytes - state.absmax.nbytes - state.code.nbytes
    return saved * config.num_hidden_layers // 2


def count(config: Qwen2Config, plan: MemoryPlan) -> dict[str, int]:
    """Count the bytes of one process, by the names of the plan's items."""
    sizes = count_state(config, plan)
    layer, most = count_layer(config, plan)
    again = layer if plan.gradient_checkpointing else 0
    kept = count_kept(config, plan, plan.gradient_checkpointing)
    sizes |= {"activations": kept + again, "temporaries": most - layer}
    if plan.engine is None:
        token = count_cache(config, plan) * config.num_hidden_layers
        sizes["KV cache"] = plan.episodes * capacity(plan.decoded, plan.new_tokens) * token
    return sizes


def count_cache(config: Qwen2Config, plan: MemoryPlan) -> int:
    """Count keys and values of a token in one layer, as the generator's cache keeps those of a real layer."""
    model = make_model(narrow(config, 1), plan, real=True).eval()
    cache = Cache(layer_class_to_replicate=GrowingLayer)
    with torch.no_grad(), mixed(plan):
        model(input_ids=torch.zeros(1, 8, dtype=torch.long), past_key_values=cache, use_cache=True)
    return sum(states[:, :, :1].nbytes for states in (cache.layers[0].keys, cache.layers[0].values))


def compare(case: Case, shapes: dict[str, dict[str, Any]] = SHAPES) -> dict[str, dict[str, float]]:
    """Plan and count a run.

    Returns:
        Planned and counted bytes by item, and their sums. What is set and not counted (the tile of logits, the share that
        vLLM takes, ZeRO's buffers) is in neither sum.
    """
    config, plan = case.make(shapes)
    counted = count(config, plan)
    planned: dict[str, int] = {item.name: item.size for item in estimate_memory(config, plan, trace(config, plan))}
    if "states" in counted:
        planned["states"] = sum(planned[name] for name in ("weights", "gradients", "optimizer", "gathered"))
    rows: dict[str, dict[str, float]] = {
        name: {"planned": planned[name], "counted": size} for name, size in counted.items()
    }
    rows["sum"] = {kind: sum(row[kind] for row in rows.values()) for kind in ("planned", "counted")}
    rows["peak"] = {"planned": planned["peak"]}
    return rows


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Write the results as a table in GiB, planned beside counted."""
    groups = {
        "weights, gradients, optimizer": ("states", "weights", "gradients", "optimizer"),
        "activations, temporaries": ("activations", "temporaries"),
        "KV cache": ("KV cache",),
        "sum": ("sum",),
    }
    lines = [f"| run | {' | '.join(groups)} | ratio |", f"|---|{'---|' * (len(groups) + 1)}"]
    for run, rows in results.items():
        shown = []
        for names in groups.values():
            there = [rows[name] for name in names if name in rows]
            sizes = [f"{sum(row[kind] for row in there) / 2**30:.2f}" for kind in ("planned", "counted")]
            shown.append(" / ".join(sizes) if there else "")
        lines.append(f"| {run} | {' | '.join(shown)} | {rows['sum']['planned'] / rows['sum']['counted']:.3f} |")
    return "\n".join(lines)


def main() -> int:
    """Compare the cases, save the results and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    chosen = parser.parse_args().cases
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for name in chosen:
        results[name] = compare(CASES[name])
        results = {case: results[case] for case in CASES if case in results}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(name, {kind: f"{size / 2**30:.2f} GiB" for kind, size in results[name]["sum"].items()}, flush=True)
    print(table(results))
    ratios = [rows["sum"]["planned"] / rows["sum"]["counted"] for rows in results.values()]
    return int(any(abs(ratio - 1) > WITHIN for ratio in ratios))


if __name__ == "__main__":
    raise SystemExit(main())
