"""Checks the kinds of a trainer's arguments and its folders, and loads the adapter that it continues."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin
from trl import rewards

from agile_trainers.adapters.folders import CONFIG
from agile_trainers.adapters.loading import (
    OnBase,
    SavedAdapters,
    check_model,
    find_adapters,
    load_policy,
    load_tokenizer,
)
from agile_trainers.adapters.lora_settings import explaining_scope, plain_copies
from agile_trainers.adapters.roles import POLICY, REFERENCE
from agile_trainers.adapters.sharding import is_zero3
from agile_trainers.adapters.untrusted import LOADERS, naming_folder
from agile_trainers.config.batch_defaults import decide_learning_rate
from agile_trainers.config.other_names import OTHER_NAMES, meant
from agile_trainers.config.rules import ITSELF, THE_REFERENCE, is_address, teachers_of
from agile_trainers.imports import nearest
from agile_trainers.sampling.vllm_checks import check_base_unchanged
from agile_trainers.step.reward import listed_functions

_ROWS = (
    "one of the package datasets, made by Dataset.from_list(rows), Dataset.from_pandas(frame) or "
    'load_dataset("json", data_files=path, split="train")'
)
_KINDS: dict[str, tuple[tuple[type, ...], str, str]] = {
    "model": (
        (str, OnBase, nn.Module), "a Hub id, a folder or a loaded model", "'Qwen/Qwen2.5-0.5B-Instruct', for example"
    ),
    "train_dataset": ((Dataset, IterableDataset), "a Dataset or an IterableDataset", _ROWS),
    "eval_dataset": ((Dataset, IterableDataset, list, tuple), "a Dataset or a list of rows", _ROWS),
    "processing_class": (
        (PreTrainedTokenizerBase, ProcessorMixin), "a tokenizer",
        "AutoTokenizer.from_pretrained(...), or leave it unset to load the model's",
    ),
    "callbacks": ((list, tuple), "a list", "[it]"),
    "quantization_config": (
        (QuantizationConfigMixin,), "a configuration of transformers", "BitsAndBytesConfig(load_in_4bit=True), for example"
    ),
}  # fmt: skip
"""Argument to the types that it may have, and for the error what these are and what to pass."""
_INSTEAD = {
    "tools": "the environment answers the model; environment=trl_environment(tools=[...]) plays tools",
    "rollout_func": "the environment makes the rollout",
    "environment_factory": "both name what is played",
}
"""Arguments of TRL's that an environment replaces, and why."""
_NEVER_CALLED = (
    "_generate", "_generate_single_turn", "_tokenize_prompts", "_tool_call_loop", "_get_tool_suffix_ids",
    "get_eval_dataloader", "get_test_dataloader", "_get_eval_sampler", "evaluation_loop", "prediction_step",
)  # fmt: skip
"""Methods of TRL's that nothing calls with an environment, whose engine plays the episodes, those of evaluations too."""


def named_model(model: Any) -> Any:
    """Return a model's folder as text if it is given as a path, as ``make_embedded_model`` returns it."""
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def check_argument_names(trainer: type[Any], given: Collection[str]) -> None:
    """Reject arguments by names that a trainer's constructor does not have.

    Args:
        trainer: The class of the trainer.
        given: The names.

    Raises:
        TypeError: For such a name; the error says what is meant.
    """
    parameters = inspect.signature(trainer.__init__).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    config = trainer.config_class
    for name in given:
        if name not in parameters:
            here = OTHER_NAMES.get(name, name)
            if here in {one.name for one in fields(config)}:
                raise TypeError(
                    f"{trainer.__name__} has no argument {name!r}; it is an option of its configuration: "
                    f"args={config.__name__}({here}=...)."
                )
            raise TypeError(f"{trainer.__name__} has no argument {name!r}{meant(name, list(parameters)) or '.'}")


def check_trainer_arguments(trainer: type[Any], model: Any, args: Any, given: Mapping[str, Any]) -> None:
    """Reject arguments of the wrong kind, and an ``output_dir`` that cannot be one.

    Args:
        trainer: The class of the trainer.
        model: Its model.
        args: Its configuration.
        given: The arguments of its constructor, by name.

    Raises:
        TypeError: For an argument of the wrong kind, such as a model without a head.
        ValueError: For an argument that an environment replaces, a model that cannot be found, has an adapter already,
            names no files for its reference, or is not in the files that vLLM would load, a tokenizer without an end of
            turn, or an ``output_dir`` that is a file or the model's own folder.
    """
    config = trainer.config_class
    if not isinstance(args, config):
        raise TypeError(
            f"{trainer.__name__} takes a {config.__name__} as `args`, got {type(args).__name__}. Pass "
            f"args={config.__name__}(...) with the same options."
        )
    for name, why in _INSTEAD.items():
        if given[name] not in (None, []):
            raise ValueError(f"`{name}` cannot be used together with `environment`: {why}. Drop one of the two.")
    overridden = [name for name in _NEVER_CALLED if _is_overridden(trainer, name)]
    if overridden:
        logger.warning(
            "%s overrides %s, which nothing calls with an environment: the engine plays the episodes, those of evaluations "
            "too. Change what the environment says, or the reward functions, instead.",
            trainer.__name__, ", ".join(overridden),
        )  # fmt: skip
    values = {name: given[name] for name in _KINDS} | {"model": model}
    if isinstance(values["eval_dataset"], Mapping):
        values |= {f"eval_dataset[{name!r}]": part for name, part in values.pop("eval_dataset").items()}
    for name, value in values.items():
        _check_kind(name, value)
    for place, callback in enumerate(given["callbacks"] or ()):
        if not callable(getattr(callback, "on_init_end", None)):
            raise TypeError(
                f"callbacks[{place}] must be a TrainerCallback, got {_kind(callback)}. Derive its class from "
                "transformers.TrainerCallback."
            )
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if isinstance(inner, PreTrainedModel) and not inner.can_generate():
        raise TypeError(
            f"model is a {type(inner).__name__}, which has no head that gives tokens. Load it with "
            "AutoModelForCausalLM.from_pretrained, or pass its name or folder."
        )
    check_output_dir(args.output_dir, model)
    if isinstance(model, str) and not {"subfolder", "gguf_file"} & set(args.model_init_kwargs or {}):
        check_model(model, (args.model_init_kwargs or {}).get("revision"), option="model")
    for teacher in teachers_of(args):
        if teacher not in (ITSELF, THE_REFERENCE) and not is_address(teacher):
            check_model(teacher, option="teacher")
    _check_one_adapter(model, given["peft_config"])
    if args.beta != 0.0 and given["peft_config"] is None:
        _check_files(model, args.beta)
    if args.use_vllm and (
        isinstance(model, PeftModel) or (isinstance(model, PreTrainedModel) and given["peft_config"])
    ):
        check_base_unchanged(model)
    tokenizer = given["processing_class"]
    if tokenizer is not None and getattr(tokenizer, "tokenizer", tokenizer).eos_token_id is None:
        raise ValueError(
            "The tokenizer (processing_class) has no eos_token, so that no answer could end. Set it to the token that ends "
            "a turn, such as tokenizer.eos_token = '<|im_end|>'."
        )


def _is_overridden(trainer: type[Any], method: str) -> bool:
    """Return whether a method of a trainer is neither ours nor TRL's."""
    owner = next((cls for cls in trainer.__mro__ if method in vars(cls)), trainer.__mro__[-1])
    return owner.__module__.split(".")[0] not in ("agile_trainers", "trl", "transformers", "builtins")


def _kind(value: Any) -> str:
    """Describe a value: the text itself if it is one, else its type."""
    return f"the text {value!r:.200}" if isinstance(value, str) else type(value).__name__


def _check_kind(name: str, value: Any) -> None:
    kinds, expected, instead = _KINDS[name.partition("[")[0]]
    if isinstance(value, (DatasetDict, IterableDatasetDict)):
        splits = list(value)
        chosen = name.partition("_")[0] if name.partition("_")[0] in splits else next(iter(splits), "train")
        raise TypeError(
            f"{name} is a {type(value).__name__} with the splits {', '.join(map(repr, splits))}. Pass one of them, "
            f"{name}=data[{chosen!r}]."
        )
    if name == "model" and isinstance(value, (PreTrainedTokenizerBase, ProcessorMixin)):
        instead = "the tokenizer as processing_class, and the model's name, its folder or the loaded model as model"
    if not isinstance(value, kinds) and (value is not None or name == "model"):
        raise TypeError(f"{name} must be {expected}, got {_kind(value)}. Pass {instead}.")


def check_output_dir(output_dir: str | os.PathLike[str], model: Any) -> None:
    """Reject an ``output_dir`` that is no folder, or that lies in the model's own folder, which would be overwritten.

    Args:
        output_dir: Folder of the run.
        model: Folder or Hub id of the model that is trained, or a loaded model.

    Raises:
        ValueError: If files could not be written there, or would replace or mix with those of the model.
    """
    if not str(output_dir):
        raise ValueError("output_dir is empty. Set it to a folder for the run, such as 'runs/first'.")
    folder = Path(os.path.abspath(Path(output_dir).expanduser()))
    above = next(one for one in (folder, *folder.parents) if one.exists())
    if not above.is_dir():
        which = "is a file" if above == folder else f"lies below {str(above)!r}, which is a file"
        raise ValueError(f"output_dir={str(output_dir)!r} {which}. Choose another path, or remove the file.")
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
    if not name or not os.path.isdir(os.path.expanduser(name)):
        return
    own, target = os.path.realpath(os.path.expanduser(name)), os.path.realpath(folder)
    if target == own or Path(target).is_relative_to(own):
        place = "is the model's own folder" if target == own else f"lies inside the model's folder {name!r}"
        raise ValueError(
            f"output_dir={str(output_dir)!r} {place}, whose files the run would overwrite or mix with its own. Choose "
            "another output_dir, such as "
            f"{str(Path(own).with_name(Path(own).name + '-trained'))!r}. To resume an interrupted run there, name the model "
            "that the run started from, and call train(resume_from_checkpoint=True)."
        )


def _check_one_adapter(model: Any, peft_config: Any) -> None:
    """Reject a model whose adapter is not the policy, and one with an adapter inside, on which another would be stacked."""
    if isinstance(model, str):
        folder = Path(model).expanduser()
        if (folder / "config.json").is_file() and (folder / CONFIG).is_file():
            raise ValueError(
                f"model={model!r} holds a whole model (config.json) and an adapter ({CONFIG}): transformers would put the "
                "adapter on that model, and a new one on top. Move the adapter's files to a folder of their own: name that "
                "one to continue the adapter, or this one to train the model without it."
            )
        return
    if isinstance(model, PeftModel):
        _check_runs_policy(model)
    if peft_config is None or isinstance(model, OnBase):
        return
    if isinstance(model, PeftModel) or any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            f"model is a {type(model).__name__} that has an adapter already, and peft_config would stack a second one on "
            "it. Leave peft_config unset to train the adapter that it has, pass the adapter's folder as model with "
            "merge_lora_configs=True to extend it, or merge it first: model.merge_and_unload()."
        )


def _check_runs_policy(model: PeftModel) -> None:
    """Reject a model that computes with other adapters than the policy's alone: those would be trained, and it saved."""
    names, active = list(model.peft_config), list(model.active_adapters)
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if POLICY not in names:
        raise ValueError(
            f"model has the adapter {', '.join(map(repr, names))}, and the policy is the one named {POLICY!r}. Leave "
            "adapter_name unset where you make or load it: get_peft_model(base, config), or "
            "PeftModel.from_pretrained(base, folder, is_trainable=True)."
        )
    if active != [POLICY]:
        raise ValueError(
            f"model runs the adapter {', '.join(map(repr, active)) or 'None'}, and the policy is {POLICY!r} alone. Call "
            f"model.set_adapter({POLICY!r}); to train another adapter, save it and pass its folder as model."
        )
    if any(layer.merged for layer in layers):
        raise ValueError(
            "model has its adapter merged into the base, where it gets no gradient. Call model.unmerge_adapter(), or train "
            "the whole model that model.merge_and_unload() returns."
        )
    if any(layer.disable_adapters for layer in layers):
        raise ValueError("model has its adapter disabled. Call model.enable_adapter_layers().")


def _check_files(model: Any, beta: float) -> None:
    """Reject a whole model that names no files, from which TRL loads the reference."""
    whole = isinstance(model, nn.Module) and not isinstance(model, PeftModel)
    if whole and not getattr(getattr(model, "config", None), "_name_or_path", ""):
        raise ValueError(
            f"beta={beta} needs a reference, which is loaded from the files that the model names, and this model was made "
            "in memory and names none. Save it with model.save_pretrained(folder) and pass model=folder, or leave beta at 0."
        )


def check_reward_functions(reward_funcs: Any) -> None:
    """Reject reward functions that are none.

    Raises:
        TypeError: For anything else, such as a configuration in the place of the second argument.
        ValueError: For the name of a reward model that cannot be found.
    """
    for function in listed_functions(reward_funcs):
        if isinstance(function, str):
            near = nearest(function, [name for name in dir(rewards) if name.endswith("_reward")], count=1, cutoff=0.4)
            try:
                check_model(function, option="reward_funcs")
            except ValueError as error:
                raise ValueError(
                    f"{error} A text names a reward model; functions of trl.rewards are passed themselves{near or '.'}"
                ) from error
        elif not callable(function):
            raise TypeError(
                "reward_funcs must be a function, the name of a reward model, or a list of these; got "
                f"{_kind(function)}. A function takes completions and **kwargs, and returns one number for each. A "
                "configuration is args=..."
            )


# ------------------------------------------------------------------------------------- the adapter that a run continues


logger = logging.get_logger(__name__)


def load_adapter(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], SavedAdapters | None]:
    """Load the adapter that ``model`` names, if any, as the trainable policy.

    Only weights are loaded. Optimizer, learning rate and sampling settings are the new configuration's.

    Args:
        arguments: Those of TRL's constructor, by name.

    Returns:
        The arguments with the loaded policy, and the saved adapters that it is from.

    Raises:
        ValueError: If the adapter cannot be continued as asked for, or an option needs one and there is none.
    """
    source, args, peft_config = arguments["model"], arguments["args"], arguments["peft_config"]
    quantization, init = arguments["quantization_config"], dict(args.model_init_kwargs or {})
    # TRL's own configuration, without an environment, has none of these options.
    merge, keep, added = (
        getattr(args, name, False) for name in ("merge_lora_configs", "keep_reference", "reference_adapter")
    )
    saved = find_adapters(source, init.pop("revision", None)) if isinstance(source, str) else None
    base = None
    if isinstance(source, OnBase):
        saved, base = source.adapters, source.base
    if merge and (saved is None or peft_config is None):
        raise ValueError(
            "merge_lora_configs=True merges `peft_config` with the adapter that `model` is a folder or Hub id of; got "
            f"model={source!r}, peft_config={peft_config!r}."
        )
    if keep and (saved is None or REFERENCE not in saved.folders):
        raise ValueError(
            f"keep_reference=True needs a `model` that is a folder or Hub id with a reference adapter in {REFERENCE}/, got "
            f"{source!r}. Leave it unset; the reference is then the loaded policy."
        )
    if (
        (added or args.beta != 0.0)
        and isinstance(source, PeftModel)
        and {POLICY, REFERENCE} <= source.peft_config.keys()
    ):
        logger.warning(
            "The model holds an adapter %r, such as DPO and an earlier run leave. It is removed: the reference of this run "
            "is the policy as it is now. An earlier trainer of this model has its reference no longer.",
            REFERENCE,
        )
        source.delete_adapter(REFERENCE)
    if saved is None:
        return dict(arguments), None
    if quantization is not None:
        init["quantization_config"] = quantization
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        init["device_map"] = None  # as TRL does
    init.setdefault("trust_remote_code", args.trust_remote_code)
    zero3 = is_zero3(args.deepspeed_plugin) and quantization is None
    model = load_policy(
        saved,
        base=base,
        peft_config=peft_config,
        merge_lora_configs=merge,
        seed=args.seed,
        autocast_adapter_dtype=not zero3,
        **init,
    )
    logger.info("Continuing the adapter of %s on %s.", saved.source, saved.config.base_model_name_or_path)
    args = copy.copy(args)
    args.model_init_kwargs = None  # already used; TRL would warn that it ignores them
    tokenizer = arguments["processing_class"] or load_tokenizer(saved, args.trust_remote_code)
    loaded = {"model": model, "args": args, "processing_class": tokenizer}
    return {**arguments, **loaded, "quantization_config": None, "peft_config": None}, saved


@contextmanager
def loading_policy(arguments: Mapping[str, Any], *, episodes: bool) -> Iterator[None]:
    """Explain the errors of TRL's constructor inside the block, and let it copy adapters as they are.

    Args:
        arguments: Those of TRL's constructor, by name.
        episodes: True in a run with an environment. Then the learning rate is chosen where it is unset, and TRL sees
            neither ``use_vllm``, with which it makes an engine, nor ``sync_ref_model``, which it refuses for an adapter.
    """
    model, args = arguments["model"], arguments["args"]
    hidden = {}
    if episodes:
        adapter = arguments["peft_config"] is not None or isinstance(model, PeftModel)
        decide_learning_rate(args, adapter=adapter, own_optimizer=arguments["optimizers"][0] is not None)
        hidden = {name: getattr(args, name) for name in ("use_vllm", "sync_ref_model")}
    named = naming_folder(model if isinstance(model, str) else None, within=LOADERS)
    scope = explaining_scope(getattr(args, "lora_target_scope", None))
    vars(args).update(dict.fromkeys(hidden, False))
    try:
        with scope, plain_copies(model), named:
            yield
    finally:
        vars(args).update(hidden)
