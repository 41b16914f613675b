"""Rejects models, adapters and servers with which vLLM cannot serve the policy, before an engine is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from peft import LoraConfig, PeftModel, PeftType
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from agile_trainers.adapters.lora_settings import NOT_LORA_SETTINGS, changes_base
from agile_trainers.adapters.roles import base_model
from agile_trainers.rollout.generators.base import fitting_context
from agile_trainers.rollout.generators.transformers.kv_cache import bytes_per_token

logger = logging.get_logger(__name__)

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks that vLLM can be started with."""
_SERVED = NOT_LORA_SETTINGS | {
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "ensure_weight_tying", "megatron_core", "qalora_group_size",
}  # fmt: skip
"""LoRA settings that vLLM reads, that the weights contain, or that only affect training."""
_COMPARED = 1 << 16
"""Numbers of each weight of a base that are compared with its files, at first."""


def longest_served(
    model: torch.nn.Module, dtype: torch.dtype, most: int, memory: int, parallel: int = 1, *, stored: bool = False
) -> int:
    """Return the tokens of the longest conversation that an engine beside the trainer can start with.

    Args:
        model: The policy.
        dtype: In which the engine computes.
        most: Tokens that the model can read.
        memory: Bytes of a GPU that the engine gets.
        parallel: GPUs of the engine.
        stored: True if the engine keeps the weights as the trainer does, quantized.

    Raises:
        ValueError: If no conversation fits.
    """
    base = base_model(model)
    weights = sum(one.nbytes if stored else one.numel() * dtype.itemsize for one in base.parameters())
    per_token = bytes_per_token(base.config.get_text_config(), dtype)
    return fitting_context(most, memory=memory, weights=weights // parallel, per_token=-(-per_token // parallel))


def base_source(model: torch.nn.Module) -> str:
    """Return the folder or Hub id from which vLLM loads the base model.

    Raises:
        ValueError: If the model was made in memory.
    """
    name = base_model(model).config._name_or_path
    if not name:
        raise ValueError(
            "vLLM loads the base model from a folder or from the Hub, but this one was made in memory. Save it with "
            "`save_pretrained` and pass the folder as `model`, or set use_vllm=False."
        )
    return str(name)


def check_base_unchanged(model: torch.nn.Module) -> None:
    """Refuse the base of an adapter that was changed since it was loaded: vLLM loads it from the files that it names.

    The first numbers of each weight are compared with those of the same name in the files, and where these differ, the sum
    of all numbers' bits. Nothing is compared of quantized models, of weights that are sharded already, and of those that
    transformers renamed or reshaped.

    Args:
        model: The base, or the policy with its adapters.

    Raises:
        ValueError: If a weight is another.
    """
    if isinstance(model, PeftModel):
        lora_rank(model.active_peft_config)  # the better reason, such as an initialization that changes the base
    base = base_model(model)
    if quantization_name(base) is not None:
        return
    own = {name.replace(".base_layer.", "."): weight for name, weight in base.named_parameters() if _is_whole(weight)}
    embedding = base.get_input_embeddings().weight
    for file in _weight_files(base.config):
        with safe_open(file, framework="pt") as stored:
            for name in sorted(own.keys() & set(stored.keys())):
                there = stored.get_slice(name)
                resized = own[name] is embedding and list(embedding.shape) != there.get_shape()
                if resized or _differs(own[name].detach(), there):
                    raise ValueError(
                        f"vLLM loads the base from the files that the model names ({base.config._name_or_path!r}), and the "
                        f"model that was passed holds other weights ({name}): it would sample from another policy. Save the "
                        "base as it is, without an adapter, with save_pretrained(folder), and load or make the adapter on "
                        "that folder; or set use_vllm=False. A PeftModel gives its base by unload(), once the adapter is "
                        "saved."
                    )


def _weight_files(config: Any) -> list[Path]:
    """List the safetensors files that a model was loaded from, as far as they are on this machine."""
    name, commit = str(config._name_or_path), getattr(config, "_commit_hash", None)
    if not name:
        return []
    folder = Path(name)
    if not folder.is_dir():
        found = try_to_load_from_cache(name, "config.json", revision=commit)
        if not isinstance(found, str):
            return []
        folder = Path(found).parent
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("model-*-of-*.safetensors"))


def _is_whole(weight: torch.Tensor) -> bool:
    """Return whether this process holds all of a weight, and it is no single number."""
    elsewhere = weight.is_meta or isinstance(weight, DTensor) or hasattr(weight, "ds_id")
    return not elsewhere and weight.dim() > 0 and weight.numel() > 0


def _differs(own: torch.Tensor, stored: Any) -> bool:
    """Return whether a weight is none of the roundings of a stored one, nor these in another order."""
    if list(own.shape) != stored.get_shape() or stored.get_dtype() not in ("F16", "BF16", "F32", "F64"):
        return False
    rows = max(1, _COMPARED // own[0].numel())
    if any(torch.equal(own[:rows].cpu(), one) for one in _roundings(stored[:rows], own.dtype)):
        return False
    # Some models store the same numbers permuted.
    return _sum_of_bits(own) not in map(_sum_of_bits, _roundings(stored[:], own.dtype))


def _roundings(stored: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield a stored weight in another dtype, which a loaded one may have got by way of half precision."""
    return (stored.to(way).to(dtype) for way in (dtype, torch.bfloat16, torch.float16))


def _sum_of_bits(weight: torch.Tensor) -> int:
    """Return the sum of the bit patterns of a weight's numbers, which has no rounding in any order."""
    patterns = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(weight.view(patterns[weight.element_size()]).sum(dtype=torch.int64))


def compute_dtype(args: Any, model: torch.nn.Module) -> torch.dtype:
    """Return the dtype in which the trainer computes, which the sampler should share."""
    if args.bf16:
        return torch.bfloat16
    if args.fp16:
        return torch.float16
    return base_model(model).dtype


def quantization(model: torch.nn.Module, served: Sequence[str], engine: str) -> str | None:
    """Return the name of the base model's quantization; None without any.

    Args:
        model: The policy.
        served: Names of the quantizations that the engine can serve.
        engine: The engine's name in the error.

    Raises:
        ValueError: If the engine cannot serve this quantization.
    """
    method, settings = quantization_name(model), _quantization_settings(model)
    if method is None or settings is None:
        return None
    if method not in served or settings.get("load_in_8bit"):
        bits = " in 8 bit" if settings.get("load_in_8bit") else ""
        raise ValueError(
            f"{engine} cannot serve a base model quantized by {method!r}{bits}. Use the "
            "transformers generator (use_vllm=False), or a base that is not quantized"
            f"{', or quantized by one of ' if served else ''}{', '.join(served)}."
        )
    return method


def quantization_name(model: torch.nn.Module) -> str | None:
    """Return the name of the base model's quantization, whether or not an engine can serve it; None without any."""
    settings = _quantization_settings(model)
    return None if settings is None else str(getattr(settings["quant_method"], "value", settings["quant_method"]))


def _quantization_settings(model: torch.nn.Module) -> dict[str, Any] | None:
    config = getattr(base_model(model).config, "quantization_config", None)
    return config if config is None or isinstance(config, dict) else config.to_dict()


def lora_rank(config: LoraConfig) -> int:
    """Return the maximum rank with which vLLM must be started for an adapter.

    Raises:
        ValueError: If vLLM cannot serve the adapter. The error names the settings that it would ignore.
    """
    if config.peft_type != PeftType.LORA:
        raise ValueError(f"vLLM serves LoRA adapters, not {config.peft_type}. Use a LoraConfig, or set use_vllm=False.")
    default = LoraConfig()
    odd = [
        f.name for f in fields(default) if f.name not in _SERVED and getattr(config, f.name) != getattr(default, f.name)
    ]
    if changes_base(config):
        odd.append("init_lora_weights")
    if odd:
        shown = ", ".join(f"{name}={getattr(config, name)!r}" for name in odd)
        raise ValueError(
            f"vLLM cannot serve an adapter with {shown}: it would sample from another policy. Leave {' and '.join(odd)} at "
            "PEFT's default, or set use_vllm=False."
        )
    room = next((rank for rank in RANKS if rank >= config.r), None)
    if room is None:
        raise ValueError(
            f"vLLM serves adapters of up to rank {RANKS[-1]}, got r={config.r}. Lower it, or set use_vllm=False."
        )
    return room


def check_batch_invariant(environment: Mapping[str, str], *, on_cpu: bool) -> None:
    """Refuse vLLM's batch invariance on a CPU, where an engine ends at its first request.

    Args:
        environment: The environment variables.
        on_cpu: True if vLLM computes on a CPU.

    Raises:
        ValueError: If ``VLLM_BATCH_INVARIANT`` asks for it there.
    """
    if on_cpu and environment.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        raise ValueError(
            f"VLLM_BATCH_INVARIANT={environment['VLLM_BATCH_INVARIANT']} ends vLLM at its first request on a CPU. Unset it: "
            "with one thread (OMP_NUM_THREADS=1) in fp32 a run repeats itself to the bit there."
        )


def check_server(
    info: dict[str, Any], url: str, *, model: str, dtype: torch.dtype, rank: int | None, max_model_length: int | None
) -> None:
    """Reject a server that would serve another model than the policy.

    Args:
        info: The server's ``VllmConfig``, as ``/server_info`` returns it.
        url: Its address.
        model: Folder or Hub id of the trainer's base model.
        dtype: The trainer's dtype.
        rank: Rank of the policy's adapter; None for a model that is trained whole.
        max_model_length: Tokens of a conversation; None if nothing but the model limits it.

    Raises:
        ValueError: With every difference, and the command that starts a suitable server. Also for a server that runs copies
            of the model side by side, if the policy is an adapter.
    """
    copies = info["parallel_config"]["data_parallel_size"]
    if rank is not None and copies > 1:
        raise ValueError(
            f"The vLLM server at {url} runs {copies} copies of the model (--data-parallel-size {copies}), and an adapter is "
            "loaded on one of them only. Start a server for each copy, and name all of them, with commas between, in "
            "vllm_server_base_url."
        )
    served, highest = info["model_config"], (info["lora_config"] or {"max_lora_rank": 0})["max_lora_rank"]
    name = str(dtype).removeprefix("torch.")
    room = None if rank is None else next(size for size in RANKS if size >= rank)
    checks = [
        (_same(served["model"], model), f"it serves {served['model']}, and this trains {model}", model),
        (served["dtype"] in (name, f"torch.{name}"), f"it computes in {served['dtype']}", f"--dtype {name}"),
        (
            served["logprobs_mode"] == "processed_logprobs",
            f"its log-probabilities are {served['logprobs_mode']}, not of the distribution it samples from",
            "--logprobs-mode processed_logprobs",
        ),
        (
            max_model_length is None or served["max_model_len"] >= max_model_length,
            f"its conversations end at {served['max_model_len']} tokens, before the trainer's max_model_length",
            max_model_length and f"--max-model-len {max_model_length}",
        ),
        (
            (rank or 0) <= highest,
            f"its adapters end at rank {highest}, before r={rank}" if highest else "it serves no adapters",
            room and f"--enable-lora --max-lora-rank {room}",
        ),
        (
            rank is not None or info["weight_transfer_config"] is not None,
            "it takes no weights of a model that is trained whole",
            None if room else """--weight-transfer-config '{"backend": "nccl"}'""",
        ),
    ]
    wrong = [reason for right, reason, _ in checks if not right]
    if wrong:
        command = " ".join(option for _, _, option in checks if option)
        raise ValueError(
            f"The vLLM server at {url} would not serve this policy: {'; '.join(wrong)}. Start it with\n"
            f"VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {command}"
        )


def check_slots(info: dict[str, Any], url: str, ahead: int) -> None:
    """Warn if a server has to load adapters again that play at the same time.

    Args:
        info: As for :func:`check_server`.
        url: Its address.
        ahead: ``batches_ahead``.
    """
    slots, wanted = (info["lora_config"] or {}).get("max_loras"), ahead + 2
    if ahead and slots is not None and slots < wanted:
        logger.warning(
            "The vLLM server at %s computes with at most %d adapters at the same time, and batches_ahead=%d plays with up "
            "to %d. It works, but slowly: requests wait for each other, and adapters are loaded again. Start it with "
            "--max-loras %d.",
            url, slots, ahead, wanted, wanted,
        )  # fmt: skip


def addresses(given: str | Sequence[str]) -> list[str]:
    """List the addresses of a text with commas between them, or of a list."""
    return [url.strip().rstrip("/") for url in (given.split(",") if isinstance(given, str) else given)]


def server_urls(args: Any) -> list[str]:
    """List the addresses of the servers of a run."""
    return addresses(args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}")


def _same(served: str, trained: str) -> bool:
    return served == trained or (Path(trained).exists() and Path(served).resolve() == Path(trained).resolve())
