"""Estimates the device memory of a run, with formulas."""

from __future__ import annotations

import os
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from trl import ModelConfig, get_peft_config
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

from agile_trainers.adapters.loading import check_model, find_adapters, read_weights
from agile_trainers.adapters.lora_settings import within_scope
from agile_trainers.adapters.roles import POLICY
from agile_trainers.cli.check.tracing import Engine, MemoryPlan, Step, trace
from agile_trainers.cli.launch_configs import SINGLE, Launch
from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.config.rules import ITSELF, THE_REFERENCE, is_address, teachers_of
from agile_trainers.packing.kept_head import COPIES, LOGITS
from agile_trainers.rollout.generators.transformers.kv_cache import capacity
from agile_trainers.sampling.sampler import sampling_settings
from agile_trainers.sampling.started_server import (
    NO_WHOLE_MODEL,
    adapter_slots,
    gpus_of_server,
    server_command,
    share_of_gpu,
)
from agile_trainers.sampling.vllm_checks import (
    RANKS,
    check_batch_invariant,
    compute_dtype,
    quantization,
    quantization_name,
)
from agile_trainers.step.token_batches import optimizer_values

QUANTIZED = {"4 bit": 0.5 + 4 / 64, "4 bit, double": 0.5 + 1 / 64, "8 bit": 1.0}
"""Quantization to bytes of a linear layer's weight, with bitsandbytes' constants for each block of 64."""
_LIVE, _BUCKET = 10**9, 5 * 10**8
"""Weights that ZeRO-3 gathers at most, and gradients that ZeRO reduces at once (DeepSpeed's defaults)."""
_GATHERED_LAYERS = 2
"""Layers whose weights FSDP2 holds at the same time: the one that computes and the next."""


@dataclass(frozen=True)
class MemoryItem:
    """One part of the memory."""

    name: str
    size: int
    """Bytes."""
    formula: str


def plan_memory(
    config: PretrainedConfig,
    args: MultiTurnConfig,
    model: ModelConfig,
    *,
    critic: bool,
    prompt: int,
    observation: int,
    launch: Launch = SINGLE,
    gpu: int | None = None,
    shares: bool = False,
) -> MemoryPlan:
    """Make the plan of a run with episodes as long as its limits allow.

    Args:
        config: The model's configuration.
        args: The run's configuration.
        model: The options of the model.
        critic: True if a second adapter is trained.
        prompt: Tokens of the longest first prompt.
        observation: Tokens of the longest observation between two answers.
        launch: How the run is launched.
        gpu: Bytes of a GPU, of which vLLM takes a share.
        shares: True if a server that the run starts has no GPU of its own.
    """
    room = conversation_limit(args, config) or 1 << 30
    decoded = prompt + args.max_turns * args.max_new_tokens + (args.max_turns - 1) * observation
    tokens = decoded + (observation if args.bootstrap_at_limits else 0)  # a critic reads the last one too
    peft_config = get_peft_config(model)
    if peft_config is not None and args.lora_target_scope is not None:
        peft_config = within_scope(peft_config, args.lora_target_scope)
    share = None if gpu is None else int(args.vllm_gpu_memory_utilization * gpu)
    engine = Engine(
        server=args.vllm_mode == "server",
        share=share if args.vllm_mode == "colocate" or shares else None,
        parallel=args.vllm_tensor_parallel_size,
        sleeps=args.vllm_enable_sleep_mode,
        offloads=args.offload_policy_during_rollout,
        slots=adapter_slots(args) if args.vllm_server_start else 0,
    )
    tokens, decoded = min(tokens, room), min(decoded, room)
    rows, budget = args.per_device_train_batch_size, args.max_tokens_per_micro_batch
    four = "4 bit, double" if model.use_bnb_nested_quant else "4 bit"
    return MemoryPlan(
        dtype=weight_dtype(config, model),
        rows=rows if budget is None else max(1, min(rows, budget // tokens)),
        episodes=args.generation_chunk_size or args.per_device_train_batch_size * args.steps_per_generation,
        tokens=tokens,
        decoded=decoded,
        new_tokens=args.max_new_tokens,
        gradient_checkpointing=args.gradient_checkpointing,
        autocast=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
        quantization=four if model.load_in_4bit else "8 bit" if model.load_in_8bit else None,
        dropout=args.disable_dropout is False,
        optimizer=str(getattr(args.optim, "value", args.optim)),
        peft_config=peft_config,
        adapters=2 if critic else 1,
        copies=2 if args.beta != 0.0 and peft_config is None else 1,
        trust_remote_code=args.trust_remote_code,
        launch=launch,
        engine=engine if args.use_vllm else None,
        snapshots=args.batches_ahead + 1 if args.batches_ahead else 0,
        teachers=teacher_bytes(args, weight_dtype(config, model)),
        filters=bool(sampling_settings(args).filters),
    )


def conversation_limit(args: MultiTurnConfig, config: PretrainedConfig) -> int | None:
    """Return the tokens of the longest conversation, prompt included; None if neither options nor model limit it."""
    return args.max_model_length or getattr(config.get_text_config(), "max_position_embeddings", None)


def teacher_bytes(args: MultiTurnConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the weights that teachers add to a process: adapters in fp32, and models in the policy's dtype."""
    total = 0
    for teacher in teachers_of(args):
        if teacher in (ITSELF, THE_REFERENCE) or is_address(teacher):
            continue
        if (saved := find_adapters(teacher)) is not None:
            total += 4 * sum(weight.numel() for weight in read_weights(saved.folders[POLICY]).values())
            continue
        check_model(teacher, option="teacher")
        config = AutoConfig.from_pretrained(teacher, trust_remote_code=args.trust_remote_code)
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
        weights = sum(parameter.numel() for parameter in whole.parameters())
        total += weights * (4 if args.cast_lm_head_to_fp32 else dtype.itemsize)
    return total


def weight_dtype(config: PretrainedConfig, model: ModelConfig) -> torch.dtype:
    """The dtype that a model's weights are loaded in."""
    name = model.dtype if model.dtype not in (None, "auto") else config.dtype or "float32"
    return name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."))


def estimate_memory(config: PretrainedConfig, plan: MemoryPlan, step: Step | None = None) -> list[MemoryItem]:
    """Estimate the memory of one process, without fragmentation and the libraries' own memory.

    The activations for the backward pass are counted on a forward pass without data, so they are right for any
    architecture. A critic's are assumed to be as large as the policy's, and to be kept beside them; a run whose critic is
    trained while its values are read keeps one of the two.

    Args:
        config: The model's configuration. No weights are loaded.
        plan: The settings of the run.
        step: The result of :func:`trace`. Default: it is traced.

    Returns:
        Weights, gradients, optimizer, activations, what the backward pass takes beside them, and the memory of rollouts:
        KV cache or vLLM; the peak at last. Not all of them are allocated at the same time; the peak says which.

    Raises:
        ValueError: If ``peft_config`` matches no module of the model.
    """
    step = step or trace(config, plan)
    state = _state(plan, step)
    fixed = sum(item.size for item in state)
    kept = step.kept(plan.gradient_checkpointing) * plan.adapters
    again = step.again(plan.gradient_checkpointing) * plan.adapters
    layers = "each layer's input, and one layer computed again" if plan.gradient_checkpointing else "of all layers"
    head = _head(plan, step)
    items = [
        *state,
        MemoryItem("activations", kept + again, f"{plan.rows} rows x {plan.tokens:,} tokens: {layers}"),
        MemoryItem("temporaries", step.temporaries, "of the backward pass of the largest layer"),
        head,
    ]
    update = max(kept + head.size, kept + again + step.temporaries)
    if gathered := _gathered(plan, step):
        items.append(gathered)
        update += gathered.size
    rollout = _rollout(plan, step, state[0].size)
    items += rollout
    most = {
        "an update": fixed + update,
        "a rollout": fixed + sum(item.size * _COPIES.get(item.name, 1) for item in rollout),
    }
    if plan.engine is not None and rollout[0].size:
        engine = rollout[0].size
        most["an update"] += 0 if plan.engine.sleeps else engine
        most["a rollout"] = fixed - (state[0].size if plan.engine.offloads else 0) + engine
    when = max(most, key=most.__getitem__)
    return [*items, MemoryItem("peak", most[when], f"in {when}: {_RULES[when]}")]


_COPIES = {"KV cache": 2}
"""Part of a rollout to how many of it there are at the same time: the cache is copied when it grows."""
_RULES = {
    "an update": "weights, gradients, optimizer, activations, and the larger of temporaries and logits",
    "a rollout": "weights, gradients, optimizer, and what the rollout takes (a KV cache twice: it is copied)",
}


def _state(plan: MemoryPlan, step: Step) -> list[MemoryItem]:
    """Return weights, gradients and optimizer of one process."""
    launch, quantized = plan.launch, plan.quantization is not None
    # DeepSpeed computes on 16-bit weights and optimizes a copy in fp32; FSDP2 keeps what is trained in fp32.
    master = launch.zero and plan.autocast is not None
    per_weight = plan.autocast.itemsize if master and plan.autocast else plan.dtype.itemsize
    trained = step.trained * plan.adapters
    # TRL keeps adapters on a quantized base in bfloat16; PEFT keeps all others in float32.
    per_trained = (2 if quantized else 4) if plan.peft_config else per_weight
    if master:
        per_trained = per_weight
    elif launch.engine == "fsdp2" and plan.autocast is not None:
        per_trained = 4
    own = trained if plan.peft_config else 0
    per_linear = QUANTIZED[plan.quantization] if plan.quantization else per_weight
    base, others = step.linear + step.others, step.others
    if plan.peft_config is None:
        per_linear = per_weight = per_trained
    weights = plan.copies * int(step.linear * per_linear + others * per_weight) + per_trained * own
    # DeepSpeed and FSDP2 keep the optimizer's values in fp32, and ZeRO a copy of the weights.
    states, per_state = optimizer_values(plan.optimizer, 4 if launch.zero else per_trained)
    per_optimized, optimized = states * per_state, f"{states} x {per_state} bytes"
    if launch.zero:
        per_optimized, optimized = per_optimized + 4, f"({optimized} + 4 bytes of fp32 weights)"
    sizes = f"{step.linear:,} x {per_linear:g} bytes + {others:,}" if quantized else f"{base:,}"
    copies = f"{plan.copies} x " if plan.copies > 1 else ""
    adapters = f" + {own:,} of adapters x {per_trained} bytes" if own else ""
    buckets = launch.engine == "ddp" and launch.processes > 1
    shares = {name: launch.processes if name in launch.shared else 1 for name in ("weights", "gradients", "optimizer")}

    def item(name: str, size: int, formula: str) -> MemoryItem:
        return MemoryItem(
            name, size // shares[name], formula + (f", of {shares[name]} processes" if shares[name] > 1 else "")
        )

    dtype = _name(plan, per_weight)
    size = plan.snapshots * per_trained * step.trained
    snapshots = MemoryItem(
        "snapshots", size, f"{plan.snapshots} x {step.trained:,} x {per_trained} bytes (batches_ahead)"
    )
    return [
        item("weights", weights, f"{copies}{sizes} x {per_weight} bytes ({dtype}){adapters}"),
        item(
            "gradients",
            per_trained * trained * (2 if buckets else 1),
            f"{trained:,} trained x {per_trained} bytes{' x 2 (DDP sends a copy)' if buckets else ''}",
        ),
        item("optimizer", per_optimized * trained, f"{trained:,} trained x {optimized} ({plan.optimizer})"),
        *([snapshots] if plan.snapshots else []),
        *([MemoryItem("teachers", plan.teachers, "frozen weights of teachers")] if plan.teachers else []),
    ]


def _head(plan: MemoryPlan, step: Step) -> MemoryItem:
    """Return what the backward pass of the output head takes: a tile of logits, and gradients in fp32 (TRL's fused head).

    With filters it takes the logits of a piece, several times.
    """
    positions, (vocabulary, hidden) = plan.rows * plan.tokens, step.head
    computes = (plan.autocast or plan.dtype).itemsize
    tile = min(positions, TOKEN_CHUNK_SIZE) * min(vocabulary, _CHUNKED_LOGPROB_CHUNK_SIZE) * computes
    if plan.filters:
        tile += COPIES * 4 * min(positions * vocabulary, LOGITS)
    gradients = positions * hidden * 4 + (vocabulary * hidden * 4 if step.head_is_trained else 0)
    trained = " and of the head" if step.head_is_trained else ""
    tokens = f"one tile, {min(positions, TOKEN_CHUNK_SIZE):,} tokens wide, and the fp32 gradient of its input{trained}"
    return MemoryItem("logits", tile + gradients, tokens)


def _gathered(plan: MemoryPlan, step: Step) -> MemoryItem | None:
    """Return what sharding gathers in an update; None without."""
    launch = plan.launch
    if launch.processes == 1 or not launch.shared:
        return None
    base, trained = step.linear + step.others, step.trained * plan.adapters
    computes = (plan.autocast or plan.dtype).itemsize
    if launch.engine == "fsdp2":
        layer = step.linear // max(1, len(step.layers))
        return MemoryItem("gathered", _GATHERED_LAYERS * layer * computes, f"{_GATHERED_LAYERS} layers' weights")
    live = min(base, _LIVE) if launch.engine == "zero3" else 0
    bucket = min(trained, _BUCKET)
    weights = f"{live:,} weights and " if live else ""
    return MemoryItem(
        "gathered", (live + bucket) * computes, f"{weights}a bucket of {bucket:,} gradients x {computes} bytes"
    )


def _rollout(plan: MemoryPlan, step: Step, weights: int) -> list[MemoryItem]:
    """Return what a rollout takes beside the state: KV cache and gathered weights, or a vLLM engine."""
    columns = capacity(plan.decoded, plan.new_tokens)
    if plan.engine is not None and plan.engine.server and plan.engine.share is None:
        return [MemoryItem("vLLM", 0, "a server on other GPUs, with weights and cache of its own")]
    if plan.engine is not None:
        needed = serving(plan, step)
        if plan.engine.share is None:
            least = "weights and the cache of one episode, at least; --gpu_memory says more"
            return [MemoryItem("vLLM", needed.weights + needed.episode, least)]
        return [MemoryItem("vLLM", plan.engine.share, "vllm_gpu_memory_utilization of the GPU: weights and cache")]
    caches = [f"{columns:,} tokens x {step.keys:,} bytes"] if step.keys or not step.windowed else []
    windows = sum(size * min(columns, window) for size, window in step.windowed)
    caches += [f"{windows:,} bytes in windows"] if windows else []
    cache = plan.episodes * (columns * step.keys + windows)
    items = [MemoryItem("KV cache", cache, f"{plan.episodes} episodes x {' + '.join(caches)}")]
    if "weights" in plan.launch.shared and plan.launch.processes > 1:
        missing = weights * (plan.launch.processes - 1)
        items.append(MemoryItem("whole model", missing, "the other processes' weights, gathered for a rollout"))
    return items


@dataclass(frozen=True)
class Serving:
    """Memory that a vLLM engine needs."""

    weights: int
    """Bytes of the model, and of the adapters of a server that the run starts, on each GPU of the engine."""
    episode: int
    """Bytes of the cache of the longest episode, on each GPU of the engine."""

    def episodes(self, share: int) -> int:
        """Return how many of the longest episodes fit into so many bytes at the same time."""
        return max(0, (share - self.weights) // max(1, self.episode))


def serving(plan: MemoryPlan, step: Step, parallel: int | None = None) -> Serving:
    """Return what an engine of the run needs on each of its GPUs, without its activations.

    Args:
        plan: The settings of the run.
        step: The traced step.
        parallel: GPUs of an engine (tensor parallelism). Default: the plan's.
    """
    gpus = parallel or (plan.engine.parallel if plan.engine else 1)
    computes = (plan.autocast or plan.dtype).itemsize
    weights = step.linear + step.others
    if plan.engine and plan.engine.slots:
        rank = getattr(plan.peft_config, "r", 1)
        weights += plan.engine.slots * step.trained * next((room for room in RANKS if room >= rank), rank) // rank
    return Serving(weights * computes // gpus, plan.decoded * step.cached * computes // gpus)


def _name(plan: MemoryPlan, per_weight: int) -> str:
    dtype = plan.dtype if plan.dtype.itemsize == per_weight or plan.autocast is None else plan.autocast
    return ", ".join(filter(None, (plan.quantization, str(dtype).removeprefix("torch."))))


def readable(size: int) -> str:
    """Format a number of bytes in a suitable unit."""
    if size >= 2**30 / 100:
        return f"{size / 2**30:.1f} GiB" if size >= 10 * 2**30 else f"{size / 2**30:.2f} GiB"
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


# ----------------------------------------------------------------------------------------- a server that the run starts


@dataclass(frozen=True)
class PlannedServer:
    """A server as the trainer would start it."""

    gpus: tuple[str, ...]
    """Names of its GPUs; empty on a CPU."""
    shares: bool
    """True if a process of the trainer uses its GPU too."""
    share: float | None
    """Share of each GPU that it is told to take; None for vLLM's own default."""
    command: tuple[str, ...]
    """Starts it, without its address."""


def planned_server(
    args: MultiTurnConfig, model: ModelConfig, config: PretrainedConfig, launch: Launch, gpus: int | None
) -> PlannedServer | None:
    """Plan the server of a run; None if it starts none.

    Args:
        args: The run's configuration.
        model: The options of the model.
        config: The model's configuration.
        launch: How the run is launched, on one machine.
        gpus: GPUs of the machine; None for a CPU.

    Raises:
        ValueError: If the trainer could not start it: a model that is trained whole, an adapter or a quantization that vLLM
            cannot serve, or too few GPUs.
    """
    if not (args.use_vllm and args.vllm_server_start):
        return None
    adapter: Any = get_peft_config(model)
    if adapter is None:
        raise ValueError(NO_WHOLE_MODEL)
    check_batch_invariant(os.environ, on_cpu=gpus is None)
    names, shares = (
        ([], False)
        if gpus is None
        else gpus_of_server(range(launch.processes), list(map(str, range(gpus))), args.vllm_tensor_parallel_size)
    )
    base = copy(config)
    if model.load_in_4bit or model.load_in_8bit:
        base.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": model.load_in_8bit}
    policy: Any = SimpleNamespace(config=base, dtype=weight_dtype(config, model))
    quantization(policy, list(filter(None, [quantization_name(policy)])), "A vLLM server")
    command = server_command(
        args,
        policy,
        adapter,
        compute_dtype(args, policy),
        seqs=launch.processes
        * (args.generation_chunk_size or args.per_device_train_batch_size * args.steps_per_generation),
        max_model_length=conversation_limit(args, config),
        on_gpu=gpus is not None,
    )
    share = None if gpus is None else share_of_gpu(args, shares)
    command += [] if share is None else ["--gpu-memory-utilization", str(share)]
    return PlannedServer(tuple(names), shares, share, ("python", *command[1:]))
