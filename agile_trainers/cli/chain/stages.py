"""Reads and checks the YAML file of ``agile-trainers chain``, before anything is trained."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, SFTConfig

from agile_trainers.cli.parser import Parser
from agile_trainers.cli.yaml_files import YAMLFileError, read_yaml
from agile_trainers.envs.questions.rows import FILES, read_dataset
from agile_trainers.envs.registry import environment_factories
from agile_trainers.imports import import_named
from agile_trainers.rollout.episode_options import EpisodeOptions
from agile_trainers.sampling.sampler import sampling_settings
from agile_trainers.trainers import MultiTurnGRPOConfig
from agile_trainers.trainers.algorithms import ALGORITHMS, algorithm_names, find_algorithm
from agile_trainers.trainers.mixture import names_of

SUPERVISED: dict[str, type] = {"sft": SFTConfig, "dpo": DPOConfig}
"""Stages of TRL's trainers."""
EPISODES = (
    "max_turns", "max_new_tokens", "min_new_tokens", "max_model_length", "max_observation_length", "stop_strings",
    "system_prompt", "training_chat_template", "chat_template_kwargs", "temperature", "top_p", "top_k", "min_p",
    "num_eval_episodes", "eval_greedy", "environment_limits",
)  # fmt: skip
"""Options that an evaluation takes from the last multi-turn stage, unless ``evaluation`` sets them."""
_PLAYED = (
    "seed", "generation_chunk_size", "max_environments", "environment_workers", "environment_processes",
    "environment_timeout",
)  # fmt: skip
"""Further options that ``evaluation`` takes."""
_SHARED = ("repetition_penalty", "log_rollouts", "use_cpu", "trust_remote_code", "model_init_kwargs")
"""Options of all stages that an evaluation takes over."""
EVALUATION = dataclasses.make_dataclass(
    "EvaluationOptions",
    [
        (one.name, one.type, copy.copy(one))
        for one in dataclasses.fields(MultiTurnGRPOConfig)
        if one.name in (*EPISODES, *_PLAYED, *_SHARED)
    ],
)  # fmt: skip
"""Options of an evaluation: those fields of the trainers' configuration that it has a use for."""
RESERVED = ("start", "chain.json", "chain.json.partial")
"""Names in the chain's folder that stages cannot have."""
_NAME = re.compile(r"\w(?:[\w.+=@-]{0,98}\w)?")
_STAGE_KEYS = ("algorithm", "name", "dataset", "dataset_args", "lora", "merge_lora_configs")


class PipelineError(ValueError):
    """Raised when the file cannot be run; the message gives place and reason."""


@dataclass(frozen=True)
class Stage:
    """One stage, its options parsed."""

    name: str
    algorithm: str
    options: dict[str, Any]
    """The options in the file, shared ones included."""
    config: Any
    """``SFTConfig``, ``DPOConfig`` or the algorithm's configuration."""
    dataset: str | None = None
    dataset_args: dict[str, Any] = field(default_factory=dict)
    lora: LoraConfig | None = None
    merge_lora_configs: bool = False


@dataclass(frozen=True)
class Pipeline:
    """A chain of stages."""

    output_dir: Path
    model: str
    environment: Callable[[], Any] | dict[str, Callable[[], Any]]
    """A factory, or several by name."""
    stages: list[Stage]
    evaluation: Any
    """Settings of every evaluation, of the type ``EVALUATION``."""
    evaluation_options: dict[str, Any]
    """Options of the evaluation's configuration."""
    lora: LoraConfig | None
    """Settings of the first stage that trains an adapter; later stages continue with the adapter."""
    source: dict[str, Any]
    """Settings in the file that all stages depend on."""


def read_pipeline(path: Path) -> Pipeline:
    """Read and check a file.

    Raises:
        PipelineError: If anything in it cannot be run.
    """
    try:
        content = read_yaml(path)
    except YAMLFileError as error:
        raise PipelineError(str(error)) from error
    try:
        return parse_pipeline(content)
    except PipelineError as error:
        raise PipelineError(f"{path}: {error}") from error


def parse_pipeline(content: Any) -> Pipeline:
    """Check the content of a file; ``docs/chaining.md`` describes its form.

    Raises:
        PipelineError: If it cannot be run.
    """
    known = ("output_dir", "model", "environment", "environment_args", "lora", "options", "evaluation", "stages")
    content = _mapping(content, known, "the file")
    for name in ("output_dir", "model", "environment", "stages"):
        if not content.get(name):
            raise PipelineError(f"`{name}` is missing.")
    sys.path[:0] = [] if os.getcwd() in sys.path else [os.getcwd()]  # needed for module.path:name
    arguments = _mapping(content.get("environment_args"), None, "`environment_args`")
    try:
        environment = environment_factories(content["environment"], arguments)
    except (ValueError, ImportError) as error:
        raise PipelineError(f"environment: {error}") from error
    if not isinstance(content["stages"], list):
        raise PipelineError(f"`stages` must be a list, got {content['stages']!r}.")
    output = Path(content["output_dir"])
    raw = [_raw_stage(stage, number) for number, stage in enumerate(content["stages"], start=1)]
    algorithms = {*SUPERVISED, *ALGORITHMS, *(stage["algorithm"] for stage in raw)}
    everything = {name for algorithm in algorithms for name in _options_of(config_of(algorithm))}
    shared = _mapping(content.get("options"), everything, "`options`")
    stages = [_stage(stage, shared, output, names_of(environment)) for stage in raw]
    names = [stage.name for stage in stages]
    folded = [name.casefold() for name in names]  # some file systems ignore case
    twice = [name for name in names if folded.count(name.casefold()) > 1]
    if twice:
        raise PipelineError(f"Two stages are named {' and '.join(map(repr, twice[:2]))}; change the `name` of one.")
    evaluation = _evaluation(content.get("evaluation"), shared, stages)
    return Pipeline(
        output,
        str(content["model"]),
        environment,
        stages,
        _check_evaluation(make_config(EVALUATION, evaluation, None, "`evaluation`")),
        evaluation,
        _lora(content.get("lora"), "`lora`"),
        {name: content.get(name) for name in ("model", "environment", "environment_args", "lora")},
    )


def _raw_stage(stage: Any, number: int) -> dict[str, Any]:
    stage = _mapping(stage, None, f"stage {number}")
    algorithm = stage.get("algorithm")
    known = [*SUPERVISED, *algorithm_names()]
    if algorithm not in known and ":" not in str(algorithm):
        raise PipelineError(
            f"stage {number}: `algorithm` must be one of {', '.join(known)}, or 'module.path:Class' of your own, got "
            f"{algorithm!r}{_nearest(algorithm, known)}."
        )
    try:
        config_of(algorithm)
    except (ValueError, TypeError, ImportError) as error:
        raise PipelineError(f"stage {number}: {error}") from error
    return {"name": algorithm.rpartition(":")[2], **stage}


def config_of(algorithm: str) -> type:
    """The configuration class of a stage's algorithm."""
    return SUPERVISED[algorithm] if algorithm in SUPERVISED else find_algorithm(algorithm).config_class


def _stage(raw: dict[str, Any], shared: dict[str, Any], output: Path, environments: list[str] | None) -> Stage:
    name, algorithm = str(raw["name"]), raw["algorithm"]
    where = f"stage {name!r}"
    if not _NAME.fullmatch(name) or name.casefold() in RESERVED:
        raise PipelineError(
            f"{where}: a stage's name is the name of its folder. Expected letters, digits and any of `._+=@-`, a letter "
            f"or digit first and last, and none of {', '.join(RESERVED)}."
        )
    config = config_of(algorithm)
    known = _options_of(config)
    _mapping(raw, {*_STAGE_KEYS, *known}, where)
    options = {key: value for key, value in shared.items() if key in known}
    options |= {key: value for key, value in raw.items() if key not in _STAGE_KEYS}
    if raw.get("merge_lora_configs") and "merge_lora_configs" in known:
        options["merge_lora_configs"] = True
    dataset = raw.get("dataset")
    arguments = _mapping(raw.get("dataset_args"), None, f"{where}, `dataset_args`")
    if dataset is None and algorithm in SUPERVISED:
        raise PipelineError(f"{where}: `dataset` is missing; {algorithm} trains on one.")
    if dataset is not None:
        check_dataset(str(dataset), where)
    made = make_config(config, options, output / name, where)
    if algorithm not in SUPERVISED:
        try:
            made.with_environment(environments)
        except ValueError as error:
            raise PipelineError(f"{where}: {error}") from error
        if dataset is None and made.max_steps <= 0:
            raise PipelineError(f"{where}: without a `dataset`, set `max_steps`.")
    return Stage(
        name,
        algorithm,
        options,
        made,
        dataset,
        arguments,
        _lora(raw.get("lora"), f"{where}, `lora`"),
        bool(raw.get("merge_lora_configs")),
    )


def make_config(config: type, options: Mapping[str, Any], output_dir: Path | None, where: str) -> Any:
    """Make a configuration from YAML values, parsed as on the command line (``1e-3`` is a number)."""

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    parser = Parser([config])
    parser.error = refuse  # type: ignore[method-assign]
    try:
        folder = {} if output_dir is None else {"output_dir": str(output_dir)}
        parser.set_defaults_with_config(**options, **folder)
        (made,) = parser.parse_args_into_dataclasses(args=[])
    except (ValueError, TypeError) as error:
        raise PipelineError(f"{where}: {error}") from error
    return made


def _evaluation(raw: Any, shared: dict[str, Any], stages: list[Stage]) -> dict[str, Any]:
    """Return the options of every evaluation."""
    given = _mapping(raw, {*EPISODES, *_PLAYED}, "`evaluation`")
    played = next((stage.options for stage in reversed(stages) if stage.algorithm not in SUPERVISED), shared)
    options = {name: value for name, value in shared.items() if name in _options_of(EVALUATION)}
    return options | {name: played[name] for name in EPISODES if name in played} | given


def _check_evaluation(options: Any) -> Any:
    """The options of every evaluation, if they can be played by.

    Raises:
        PipelineError: If one of them is out of range.
    """
    try:
        EpisodeOptions.of_args(options)
        sampling_settings(options)
        if options.num_eval_episodes < 1:
            raise ValueError(f"num_eval_episodes must be at least 1, got {options.num_eval_episodes}.")
    except ValueError as error:
        raise PipelineError(f"`evaluation`: {error}") from error
    return options


def check_dataset(name: str, where: str) -> None:
    """Check that a data set's file or function exists, without loading it.

    Raises:
        PipelineError: If a file or function does not exist.
    """
    module, _, attribute = name.partition(":")
    path = Path(name)
    if attribute and not path.exists():
        try:
            found = hasattr(import_named(module), attribute)
        except ModuleNotFoundError as error:
            raise PipelineError(f"{where}: dataset {name!r}: there is no module {error.name!r}.") from error
        if not found:
            nearest = _nearest(attribute, dir(sys.modules[module]))
            raise PipelineError(f"{where}: dataset {name!r}: {module} has no {attribute!r}{nearest}.")
    elif path.suffix.lower() in FILES and not path.is_file():
        raise PipelineError(f"{where}: there is no file {name}.")


def stage_rows(name: str, arguments: dict[str, Any]) -> Dataset:
    """Load the rows of a stage.

    Args:
        name: ``module.path:function`` that returns rows, or a source of
            :func:`~agile_trainers.envs.questions.rows.read_dataset` (the split is ``train``).
        arguments: Arguments of the function or of ``datasets.load_dataset``.
    """
    module, _, attribute = name.partition(":")
    if attribute and not Path(name).exists():
        rows = getattr(importlib.import_module(module), attribute)(**arguments)
        return rows if isinstance(rows, Dataset) else Dataset.from_list(list(rows))
    return read_dataset(name, **{"split": "train", **arguments})


def _lora(raw: Any, where: str) -> LoraConfig | None:
    if raw is None:
        return None
    given = _mapping(raw, LoraConfig.__dataclass_fields__, where)
    try:
        return LoraConfig(**{"task_type": "CAUSAL_LM", **given})
    except (ValueError, TypeError) as error:
        raise PipelineError(f"{where}: {error}") from error


def _options_of(config: type) -> set[str]:
    return {f.name for f in dataclasses.fields(config) if f.init} - {"output_dir"}


def _mapping(value: Any, known: Iterable[str] | None, where: str) -> dict[str, Any]:
    """Check that a value is a mapping with known keys, and return it; None becomes an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise PipelineError(f"{where} must be a mapping of names to values, got {value!r}.")
    if known is not None:
        names = list(known)
        for key in value:
            if key not in names:
                raise PipelineError(f"{where} knows no {key!r}{_nearest(key, names)}.")
    return value


def _nearest(name: Any, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(str(name), list(names), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(found)}?)" if found else ""
