"""Reads and changes LoRA configurations: what an initialization does to the base, the scope, and the merging of two."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from agile_trainers.adapters.roles import POLICY, REFERENCE

NOT_LORA_SETTINGS = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
}  # fmt: skip
"""Fields of a LoRA configuration that are book-keeping, or that only affect how new weights are initialized."""
IDLE = (True, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` with which the initial policy equals the base model."""
_EXTENDS = (True, "gaussian", "orthogonal")
"""Values of ``init_lora_weights`` with which a new part of an adapter adds nothing, without data."""
KEPT_BASE = (*IDLE, False)
"""Values of ``init_lora_weights`` that leave the base's weights unchanged."""
REPEATABLE = ("pissa", "olora")
"""Values that move a part of the base into the adapter deterministically, so that a saved adapter can be loaded."""
_UNREPEATABLE = {
    "pissa_niter": "its decomposition is random",
    "corda": "its decomposition needs the activations of that time",
    "lora_ga": "its decomposition needs the gradients of that time",
}

_OTHER_POLICIES = {
    "alora_invocation_tokens": "the adapter acts from these tokens on, and PEFT finds them once in a row and not at all "
    "where a row is read token by token",
    "monteclora_config": "each forward pass of training draws other weights, so that the policy that is trained is not the "
    "one that played",
}


def changes_base(config: PeftConfig) -> bool:
    """Return whether creating the adapter changes the weights of the base."""
    return isinstance(config, LoraConfig) and config.init_lora_weights not in KEPT_BASE


def check_bias(config: PeftConfig | None, sharing: str) -> None:
    """Reject an adapter that trains biases of the base, if others compute with the base too.

    Args:
        config: Of the adapter.
        sharing: The adapter and the others, for the error.

    Raises:
        ValueError: If it does.
    """
    bias = getattr(config, "bias", "none")
    if bias != "none":
        raise ValueError(
            f"LoraConfig(bias={bias!r}) trains biases of the base, which {sharing} share. Use bias='none'."
        )


def lora_settings(config: LoraConfig) -> dict[str, Any]:
    """Return the settings of a LoRA configuration that change the adapter's function, as JSON values."""
    settings = {name: value for name, value in config.to_dict().items() if name not in NOT_LORA_SETTINGS and value}
    if changes_base(config):
        settings["init_lora_weights"] = config.init_lora_weights  # the weights are relative to that base
    return json.loads(
        json.dumps(settings, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    )


def starts_elsewhere(config: PeftConfig) -> bool:
    """Return whether disabling the adapter gives another policy than the one that training starts from."""
    return isinstance(config, LoraConfig) and config.init_lora_weights not in IDLE


def check_repeatable(model: Any, peft_config: PeftConfig | None) -> None:
    """Reject a policy whose initialization changes the base irreproducibly, since only the adapter is saved.

    What :func:`check_one_policy` rejects is rejected too.

    Args:
        model: The trainer's ``model``, with or without an adapter.
        peft_config: Configuration of the adapter that the trainer creates, if any.

    Raises:
        ValueError: If the initialization changes the base in a way that a later process cannot repeat.
    """
    config = model.peft_config.get(POLICY) if isinstance(model, PeftModel) else peft_config
    check_one_policy(config)
    init = str(getattr(config, "init_lora_weights", True)).lower()
    for name, reason in _UNREPEATABLE.items():
        if init.startswith(name):
            raise ValueError(
                f"init_lora_weights={init!r} changes the base, and {reason}: a resumed run, or anyone who loads the saved "
                "adapter, would get another policy without an error. Use init_lora_weights='pissa' or 'olora', which load "
                "again, or save the changed base with `save_pretrained` and put a plain adapter on it."
            )


def check_one_policy(config: PeftConfig | None, where: str = "LoraConfig") -> None:
    """Reject an adapter that computes another policy with a whole row than token by token, or in training than in play.

    Args:
        config: Of an adapter that is to be made or loaded; None passes.
        where: Where it is from, for the error.

    Raises:
        ValueError: For the setting that does this.
    """
    for name, reason in _OTHER_POLICIES.items():
        if value := getattr(config, name, None):
            raise ValueError(f"{where}: {name}={value!r} cannot be used: {reason}. Make the adapter without it.")


def check_scales(config: PeftConfig | None) -> None:
    """Reject ranks and alphas, also those of patterns, that PEFT rejects once there is a model, or computes NaN or 0 with.

    Args:
        config: Of an adapter that is to be made; None and those of other kinds than LoRA pass.

    Raises:
        ValueError: For a rank below 1, or an alpha that is not positive and finite.
    """
    if not isinstance(config, LoraConfig):
        return
    ranks: dict[str, Any]
    alphas: dict[str, Any]
    ranks, alphas = (
        {name: getattr(config, name)}
        | {f"{pattern}[{key!r}]": one for key, one in (getattr(config, pattern) or {}).items()}
        for name, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))
    )
    for name, rank in ranks.items():
        if not isinstance(rank, Integral) or isinstance(rank, bool) or rank < 1:
            raise ValueError(f"{name} must be at least 1, got {rank!r}; a rank is a whole number.")
    for name, alpha in alphas.items():
        if not isinstance(alpha, Real) or isinstance(alpha, bool) or not 0 < float(alpha) < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {alpha!r}.")


def check_layers(model: PeftModel) -> None:
    """Reject numbers of layers that the model does not have; PEFT adapts the others, and says nothing.

    Args:
        model: With the adapter of the policy, as the user's configuration made it.

    Raises:
        ValueError: For the first of them.
    """
    chosen = getattr(model.peft_config[POLICY], "layers_to_transform", None)
    wanted = [chosen] if isinstance(chosen, int) else chosen or []
    known = {int(part) for name, _ in model.named_modules() for part in name.split(".") if part.isdigit()}
    for number in wanted if known else ():
        if number not in known:
            raise ValueError(
                f"layers_to_transform={chosen!r} names the layer {number!r}, and the model has none of that number: its "
                f"layers are numbered from 0 to {max(known)}. Leave it out."
            )


def plain(config: PeftConfig) -> PeftConfig:
    """Return a copy of an adapter's configuration whose initialization does not change the base."""
    config = copy.deepcopy(config)
    if changes_base(config):
        config.init_lora_weights = True
    return config


@contextmanager
def plain_copies(model: Any) -> Iterator[None]:
    """Keep the base unchanged while TRL copies ``model``'s policy as the reference; PiSSA would change it otherwise."""
    config = model.peft_config.get(POLICY) if isinstance(model, PeftModel) else None
    if config is None or not changes_base(config):
        yield
        return
    init, config.init_lora_weights = config.init_lora_weights, True
    try:
        yield
        if REFERENCE in model.peft_config:  # TRL's copy shares the policy's configuration
            model.peft_config[REFERENCE] = copy.deepcopy(config)
    finally:
        config.init_lora_weights = init


_SELECTION = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
"""Fields that select the adapted modules; compared by the selected modules."""
RESOLVED = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout", "target_modules")
"""Fields whose differences merging can resolve."""
_OTHER_ALGEBRA = ("target_parameters", "use_qalora", "use_bdlora", "layer_replication", "arrow_config", "kasa_config")
"""Options with which a module's weights are not one A (rank, in) and one B (out, rank)."""


@dataclass(frozen=True)
class Layer:
    """Rank and scaling that a LoRA configuration gives one module."""

    rank: int
    scaling: float


def layers(base: PreTrainedModel, config: LoraConfig) -> dict[str, Layer]:
    """Return the modules that a configuration adapts on a model of this architecture; the model is not changed.

    Raises:
        ValueError: If the configuration selects no module (PEFT's own message).
    """
    settings = copy.deepcopy(base.config)
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    config = copy.deepcopy(config)
    config.init_lora_weights = True  # some ways to initialize compute with the base's weights
    with torch.device("meta"):
        skeleton = type(base)._from_config(settings)
    model = get_peft_model(skeleton, config, low_cpu_mem_usage=True)
    found = {name: m for name, m in model.base_model.model.named_modules() if isinstance(m, LoraLayer)}
    return {name: Layer(m.r["default"], float(m.scaling["default"])) for name, m in found.items()}


def differing_settings(base: PreTrainedModel, saved: LoraConfig, wanted: LoraConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two LoRA configurations differ on a model.

    Returns:
        Field to (saved, wanted). ``target_modules`` stands for all fields that select modules; its values are the modules
        that only one of the two configurations adapts.
    """
    found = {}
    for name in (f.name for f in fields(LoraConfig) if f.name not in {*NOT_LORA_SETTINGS, *_SELECTION}):
        left, right = _plain(getattr(saved, name, None)), _plain(getattr(wanted, name, None))
        if left != right:
            found[name] = (getattr(saved, name, None), getattr(wanted, name))
    left_layers, right_layers = set(layers(base, saved)), set(layers(base, wanted))
    if left_layers != right_layers:
        found["target_modules"] = (sorted(left_layers - right_layers), sorted(right_layers - left_layers))
    return found


def describe(found: dict[str, tuple[Any, Any]]) -> str:
    """Format differences, one line each."""
    lines = []
    for name, (left, right) in found.items():
        if name == "target_modules":
            left, right = (f"{', '.join(_endings(names)) or 'no'} module(s) of its own" for names in (left, right))
            lines.append(f"  {name}: the adapter has {left}, peft_config {right}")
        else:
            lines.append(f"  {name}: {left!r} in the adapter, {right!r} in peft_config")
    return "\n".join(lines)


def check_extends(wanted: LoraConfig) -> None:
    """Reject settings to extend an adapter with whose initialization would start from another policy.

    Raises:
        ValueError: For such an ``init_lora_weights``.
    """
    if wanted.init_lora_weights not in _EXTENDS:
        raise ValueError(
            f"merge_lora_configs=True extends an adapter that computes the same function as before, and peft_config has "
            f"init_lora_weights={wanted.init_lora_weights!r}, which would start from another one: such values change the "
            "base, need data, or give new modules weights that are not zero. Leave init_lora_weights unset, or set it to "
            "'gaussian' or 'orthogonal'."
        )


def merged_config(base: PreTrainedModel, saved: LoraConfig, wanted: LoraConfig) -> LoraConfig:
    """Return the configuration of an adapter that contains both: the larger rank, all modules, other fields of ``wanted``.

    Raises:
        ValueError: If a difference cannot be resolved exactly, or new weights would change the function.
    """
    check_extends(wanted)
    found = differing_settings(base, saved, wanted)
    beyond = {name: found[name] for name in found if name not in RESOLVED}
    if beyond:
        raise ValueError(
            "merge_lora_configs=True resolves " + ", ".join(RESOLVED) + ". These differ too and must be made equal:\n"
            f"{describe(beyond)}"
        )
    odd = [name for name in _OTHER_ALGEBRA if getattr(saved, name, None)]
    if odd and found:
        raise ValueError(
            f"merge_lora_configs=True cannot pad an adapter with {', '.join(odd)}. Give peft_config the adapter's own "
            f"settings, or leave peft_config unset; it differs in\n{describe(found)}"
        )
    left, right = layers(base, saved), layers(base, wanted)
    config = copy.deepcopy(wanted)
    if config.init_lora_weights == "orthogonal":  # whose A and B are not zero, and cancel out but for rounding
        config.init_lora_weights = True
    config.r = max(saved.r, wanted.r)
    names = sorted({*left, *right})
    if saved.rank_pattern or wanted.rank_pattern:
        ranks = {name: max(side[name].rank for side in (left, right) if name in side) for name in names}
        config.rank_pattern = {name: rank for name, rank in ranks.items() if rank != config.r}
    for name in _SELECTION:
        setattr(config, name, None)
    # The shortest names that select exactly these modules.
    config.target_modules = _endings(names)
    if set(layers(base, config)) != set(names):
        config.target_modules = names
    return config


def padded(
    weights: dict[str, torch.Tensor], fresh: dict[str, torch.Tensor], scalings: dict[str, float]
) -> dict[str, torch.Tensor]:
    """Pad an adapter's weights to the shapes of a larger adapter that computes the same function.

    Args:
        weights: By PEFT's name, without the adapter's own: ``"base_model.model.<module>.lora_A.weight"``, (r, in);
            ``lora_B``, (out, r). Convolutions and embeddings have their rank in the same place.
        fresh: Weights of the larger adapter, freshly initialized.
        scalings: Module to the old scaling divided by the new.

    Returns:
        All weights of ``fresh``, in their dtypes, and the weights that only ``weights`` has.
    """
    result = dict(fresh)
    for name, weight in weights.items():
        module, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        if not part or name not in fresh:
            result[name] = weight
            continue
        kind, new = part.removeprefix("embedding_")[0], fresh[name].clone()
        if kind == "A":
            new[: weight.size(0)] = weight
        elif kind == "B":
            new.zero_()
            scaled = weight.to(torch.float64) * scalings[module]
            # The bias that LoRA may give B has no rank.
            new[(slice(None), slice(weight.size(1))) if weight.dim() > 1 else slice(None)] = scaled.to(new.dtype)
        else:
            new = weight
        result[name] = new
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, (set, list, tuple)):
        return sorted(value, key=str) or None
    return value or None


def _endings(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def within_scope(config: PeftConfig, *scopes: str) -> LoraConfig:
    """Return a copy of a LoRA configuration that adapts only modules inside some parts of the model.

    Args:
        config: LoRA configuration; its ``target_modules`` select the modules inside the part.
        scopes: Dotted paths of modules, or their ends: ``"language_model"`` also matches ``model.language_model``.

    Raises:
        ValueError: If ``config`` is not a LoRA configuration, or already excludes modules.
    """
    scope = "|".join(scopes)
    if not isinstance(config, LoraConfig):
        raise ValueError(f"lora_target_scope={scope!r} needs a LoraConfig as peft_config, got {type(config).__name__}.")
    if config.exclude_modules:
        raise ValueError(
            f"lora_target_scope={scope!r} and peft_config.exclude_modules={config.exclude_modules!r} both exclude modules; "
            "keep one of them."
        )
    config = copy.deepcopy(config)
    parts = "|".join(map(re.escape, scopes))
    config.exclude_modules = rf"(?!(?:.*\.)?(?:{parts})\.).*"  # PEFT matches the full name of a module
    return config


@contextmanager
def explaining_scope(scope: str | None) -> Iterator[None]:
    """Replace PEFT's errors inside the block by one that names ``lora_target_scope``, or ways to name modules."""
    try:
        yield
    except ValueError as error:
        if scope is None and "not found in the base model" in str(error):
            raise ValueError(
                f"{error} Set target_modules of peft_config to 'all-linear', or to names of model.named_modules() such as "
                "'q_proj'."
            ) from error
        if scope is None or "exclu" not in str(error):
            raise
        raise ValueError(
            f"lora_target_scope={scope!r} selects no module: none of peft_config.target_modules lies below a module "
            "of that name. Expected a dotted path such as 'model.layers' or 'language_model' (see "
            "model.named_modules())."
        ) from error
