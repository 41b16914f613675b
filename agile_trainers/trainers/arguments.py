"""Checks the kinds of a trainer's arguments and its folders, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback, TrainingArguments
from transformers.utils.quantization_config import QuantizationConfigMixin
from trl import rewards

from agile_trainers.adapters.found import check_model
from agile_trainers.adapters.loading import CONFIG, OnBase
from agile_trainers.imports import nearest

_FROM_ROWS = {
    "DataFrame": "Dataset.from_pandas({name})",
    "list": "Dataset.from_list({name})",
    "tuple": "Dataset.from_list(list({name}))",
    "dict": "Dataset.from_dict({name})",
    "str": 'load_dataset("json", data_files={name}, split="train")',
    "Path": 'load_dataset("json", data_files=str({name}), split="train")',
}
"""Kind of rows to the call of ``datasets`` that makes a data set of them."""


def named_model(model: Any) -> Any:
    """Return a model's folder as text if it is given as a path, as ``make_embedded_model`` returns it."""
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def check_order(reward_funcs: Any) -> None:
    """Reject a configuration in the place of the reward functions, the second argument.

    Raises:
        TypeError: For a configuration.
    """
    if isinstance(reward_funcs, TrainingArguments):
        raise TypeError(
            f"reward_funcs, the second argument, is a {type(reward_funcs).__name__}. Pass the configuration by name: "
            "args=..."
        )


def check_arguments(model: Any, args: Any, given: Mapping[str, Any]) -> None:
    """Reject arguments of the wrong kind, and an ``output_dir`` that cannot be one.

    Args:
        model: The trainer's.
        args: Its configuration, of the right class.
        given: The arguments of its constructor, by name.

    Raises:
        TypeError: For an argument of the wrong kind.
        ValueError: For a model that cannot be found or has an adapter already, a tokenizer without an end of turn, a reward
            function that cannot be found, or an ``output_dir`` that is a file or the model's own folder.
    """
    _check_model_kind(model)
    check_output_dir(args.output_dir, model)
    if isinstance(model, str) and not {"subfolder", "gguf_file"} & set(args.model_init_kwargs or {}):
        check_model(model, (args.model_init_kwargs or {}).get("revision"), option="model")
    _check_one_adapter(model, given["peft_config"])
    check_dataset(given["train_dataset"], "train_dataset")
    eval_dataset, callbacks = given["eval_dataset"], given["callbacks"]
    if not isinstance(eval_dataset, Mapping):
        check_dataset(eval_dataset, "eval_dataset", rows_too=True)
    else:
        for name, part in eval_dataset.items():
            check_dataset(part, f"eval_dataset[{name!r}]", rows_too=True)
    _check_rewards(given["reward_funcs"])
    _check_tokenizer(given["processing_class"])
    if callbacks is not None and not isinstance(callbacks, (list, tuple)):
        one = isinstance(callbacks, TrainerCallback) or callable(callbacks)
        raise TypeError(f"callbacks must be a list, got {_kind(callbacks)}. Pass {'[it]' if one else 'a list'}.")
    quantization_config = given["quantization_config"]
    if quantization_config is not None and not isinstance(quantization_config, QuantizationConfigMixin):
        raise TypeError(
            f"quantization_config must be a configuration of transformers, got {_kind(quantization_config)}. Pass "
            "BitsAndBytesConfig(load_in_4bit=True), for example."
        )


def _kind(value: Any) -> str:
    """Describe a value: the text itself if it is one, else its type."""
    return f"the text {value!r:.200}" if isinstance(value, str) else type(value).__name__


def _check_model_kind(model: Any) -> None:
    if isinstance(model, (PreTrainedTokenizerBase, ProcessorMixin)):
        raise TypeError(
            f"model is a tokenizer ({type(model).__name__}). Pass it as processing_class, and the model's name, its folder "
            "or the loaded model as model."
        )
    if not isinstance(model, (str, OnBase, nn.Module)):
        raise TypeError(
            f"model must be a Hub id, a folder or a loaded model, got {_kind(model)}. Pass "
            "'Qwen/Qwen2.5-0.5B-Instruct', for example."
        )


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
    """Reject a model with an adapter inside, on which another would be stacked."""
    if isinstance(model, str):
        folder = Path(model).expanduser()
        if (folder / "config.json").is_file() and (folder / CONFIG).is_file():
            raise ValueError(
                f"model={model!r} holds a whole model (config.json) and an adapter ({CONFIG}): transformers would put the "
                "adapter on that model, and a new one on top. Move the adapter's files to a folder of their own: name that "
                "one to continue the adapter, or this one to train the model without it."
            )
        return
    if peft_config is None or isinstance(model, OnBase):
        return
    if isinstance(model, PeftModel) or any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            f"model is a {type(model).__name__} that has an adapter already, and peft_config would stack a second one on "
            "it. Leave peft_config unset to train the adapter that it has, pass the adapter's folder as model with "
            "merge_lora_configs=True to extend it, or merge it first: model.merge_and_unload()."
        )


def check_dataset(dataset: Any, name: str, *, rows_too: bool = False) -> None:
    """Reject what is no data set.

    Args:
        dataset: The trainer's, or None.
        name: The argument's name, for the message.
        rows_too: True if a list of rows will do.

    Raises:
        TypeError: For anything else; the message says how to make a data set of it.
    """
    known = (Dataset, IterableDataset, list, tuple) if rows_too else (Dataset, IterableDataset)
    if dataset is None or isinstance(dataset, known):
        return
    if isinstance(dataset, (DatasetDict, IterableDatasetDict)):
        splits = list(dataset)
        chosen = name.partition("_")[0] if name.partition("_")[0] in splits else next(iter(splits), "train")
        raise TypeError(
            f"{name} is a {type(dataset).__name__} with the splits {', '.join(map(repr, splits))}. Pass one of them, "
            f"{name}=data[{chosen!r}]."
        )
    kind = next((known for known in _FROM_ROWS if known in {one.__name__ for one in type(dataset).__mro__}), None)
    # The kind of a path differs between platforms (PosixPath), its parent's does not.
    kind = "Path" if isinstance(dataset, os.PathLike) else kind
    how = f" Make one of it with the package datasets: {_FROM_ROWS[kind].format(name='it')}." if kind else ""
    if isinstance(dataset, str) or kind is None:
        how = how.replace("data_files=it", f"data_files={dataset!r}") or " Pass one of the package datasets, or None."
    raise TypeError(f"{name} must be a Dataset or an IterableDataset, got {_kind(dataset)}.{how}")


def _check_rewards(reward_funcs: Any) -> None:
    several = isinstance(reward_funcs, (list, tuple))
    for function in reward_funcs if several else [] if reward_funcs is None else [reward_funcs]:
        if isinstance(function, str):
            known = [name for name in dir(rewards) if name.endswith("_reward")]
            near = nearest(function, known, count=1, cutoff=0.4)
            try:
                check_model(function, option="reward_funcs")
            except ValueError as error:
                raise ValueError(
                    f"{error} A text names a reward model; functions of trl.rewards are passed themselves{near or '.'}"
                ) from error
        elif not callable(function):
            where = " in it" if several else ""
            raise TypeError(
                f"reward_funcs must be a function, the name of a reward model, or a list of these; got {_kind(function)}"
                f"{where}. A function takes completions and **kwargs, and returns one number for each."
            )


def _check_tokenizer(tokenizer: Any) -> None:
    if tokenizer is None:
        return
    if not isinstance(tokenizer, (PreTrainedTokenizerBase, ProcessorMixin)):
        raise TypeError(
            f"processing_class must be a tokenizer, got {_kind(tokenizer)}. Pass AutoTokenizer.from_pretrained(...), or "
            "leave it unset to load the model's."
        )
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    if inner.eos_token_id is None:
        raise ValueError(
            "The tokenizer (processing_class) has no eos_token, so that no answer could end. Set it to the token that ends "
            "a turn, such as tokenizer.eos_token = '<|im_end|>'."
        )
