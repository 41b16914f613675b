"""Reads and checks the YAML file of ``agile-trainers chain``, before anything is trained."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from peft import LoraConfig
from transformers import AutoTokenizer
from transformers.utils import logging
from trl import DPOConfig, SFTConfig

from agile_trainers.adapters.lora_settings import check_extends
from agile_trainers.cli.evolve.plan import PopulationPlan, check_plan, read_plan
from agile_trainers.cli.run_files import (
    check_algorithm,
    check_dataset,
    make_config,
    mapping,
    options_of,
    read_environment,
    read_lora,
    stage_rows,
)
from agile_trainers.cli.yaml_files import YAMLFileError, naming_place, read_yaml
from agile_trainers.config.rules import at_least, check_rules, positive
from agile_trainers.rollout.episode_options import EpisodeOptions, check_names
from agile_trainers.rollout.generators.base import SamplingSettings
from agile_trainers.sampling.sampler import sampling_settings
from agile_trainers.trainers import MultiTurnGRPOConfig
from agile_trainers.trainers.mixture import names_of
from agile_trainers.trainers.registry import ALGORITHMS, find_algorithm

SUPERVISED: dict[str, type] = {"sft": SFTConfig, "dpo": DPOConfig}
"""Stages of TRL's trainers."""
_SUPERVISED_RULES = (
    at_least(1, "per_device_train_batch_size", "gradient_accumulation_steps"),
    at_least(0, "learning_rate"),
    positive("max_wall_seconds"),
)
"""Rules for their options; those of the other stages have rules of their own."""


@dataclass
class _OfAllStages:
    """Options that the stages of TRL's trainers take too."""

    max_wall_seconds: float | None = None


@dataclass
class _Merging:
    """The key of a stage that is true or false."""

    merge_lora_configs: bool = False


STAGE_KEYS = ("algorithm", "name", "dataset", "dataset_args", "lora", "merge_lora_configs")
EVOLVE = "evolve"
"""Key of a stage that is a population."""
_PLAYED = (
    *(one.name for kind in (EpisodeOptions, SamplingSettings) for one in fields(kind) if one.name != "do_sample"),
    "num_eval_episodes",
    "eval_greedy",
    "generation_chunk_size",
)
"""Options that an evaluation takes from the last multi-turn stage, unless ``evaluation`` sets them."""
_LOADED = ("use_cpu", "trust_remote_code", "model_init_kwargs")
"""Options of a stage that an evaluation takes over and ``evaluation`` does not set."""
_SHARED = ("seed", "log_rollouts")
"""Options of all stages that an evaluation takes over."""
RESERVED = ("start", "chain.json", "chain.json.partial")
"""Names in the chain's folder that stages cannot have."""
_NAME = re.compile(r"\w(?:[\w.+=@-]{0,98}\w)?")
POPULATION = "population"
"""Folder of a population below its stage's."""


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
    population: PopulationPlan | None = None
    """The population of an ``evolve`` stage; ``algorithm`` is that of its members."""


@dataclass(frozen=True)
class Pipeline:
    """A chain of stages."""

    output_dir: Path
    model: str
    environment: Callable[[], Any] | dict[str, Callable[[], Any]]
    """A factory, or several by name."""
    stages: list[Stage]
    evaluation: Any
    """Settings of every evaluation, a ``MultiTurnGRPOConfig``."""
    evaluation_options: dict[str, Any]
    """Options of the evaluation's configuration."""
    lora: LoraConfig | None
    """Settings of the first stage that trains an adapter; later stages continue with the adapter."""
    source: dict[str, Any]
    """Settings in the file that all stages depend on."""


def read_pipeline(path: Path) -> Pipeline:
    """Read and check a file.

    Raises:
        YAMLFileError: If anything in it cannot be run.
    """
    content = read_yaml(path)
    with naming_place(path):
        return parse_pipeline(content)


def parse_pipeline(content: Any) -> Pipeline:
    """Check the content of a file; ``docs/chaining.md`` describes its form.

    Raises:
        YAMLFileError: If it cannot be run.
    """
    known = ("output_dir", "model", "environment", "environment_args", "lora", "options", "evaluation", "stages")
    content = mapping(content, known, "the file")
    for name in ("output_dir", "model", "environment", "stages"):
        if not content.get(name):
            raise YAMLFileError(f"`{name}` is missing.")
    if not isinstance(content["stages"], list):
        raise YAMLFileError(f"`stages` must be a list, got {content['stages']!r}.")
    environment = read_environment(content)
    output = Path(str(content["output_dir"]))
    raw = [_raw_stage(stage, number) for number, stage in enumerate(content["stages"], start=1)]
    algorithms = {*SUPERVISED, *ALGORITHMS, *(stage["algorithm"] for stage in raw)}
    everything = {name for algorithm in algorithms for name in options_of(config_of(algorithm))}
    shared = mapping(content.get("options"), everything, "`options`")
    lora = read_lora(content.get("lora"), "`lora`")
    stages = [_stage(stage, shared, output, names_of(environment)) for stage in raw]
    _check_lora(stages, lora)
    adapter = lora
    for stage in stages:
        adapter = stage.lora or adapter  # what the stages before leave has these settings
        if stage.population is not None:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise YAMLFileError(
                    f"stage {stage.name!r}: a population trains each member in one process, but this chain runs in several. "
                    "Run the chain in one process, or the population alone: agile-trainers evolve."
                )
            check_plan(stage.population, content["model"], environment, adapter, f"stage {stage.name!r}")
    names = [stage.name for stage in stages]
    folded = [name.casefold() for name in names]  # some file systems ignore case
    twice = [name for name in names if folded.count(name.casefold()) > 1]
    if twice:
        raise YAMLFileError(f"Two stages are named {' and '.join(map(repr, twice[:2]))}; change the `name` of one.")
    evaluation = _evaluation(content.get("evaluation"), shared, stages, names_of(environment))
    return Pipeline(
        output,
        str(content["model"]),
        environment,
        stages,
        *evaluation,
        lora,
        {name: content.get(name) for name in ("model", "environment", "environment_args", "lora")},
    )


def _raw_stage(stage: Any, number: int) -> dict[str, Any]:
    stage = mapping(stage, None, f"stage {number}")
    if EVOLVE in stage:
        mapping(stage, (EVOLVE, "name"), f"stage {number} with `{EVOLVE}`")
        population = mapping(stage[EVOLVE], None, f"stage {number}, `{EVOLVE}`")
        check_algorithm(population.get("algorithm"), (), f"stage {number}, `{EVOLVE}`")
        return {"name": EVOLVE, **stage, "algorithm": population["algorithm"]}
    check_algorithm(stage.get("algorithm"), SUPERVISED, f"stage {number}")
    return {"name": stage["algorithm"].rpartition(":")[2], **stage}


def config_of(algorithm: str) -> type:
    """The configuration class of a stage's algorithm."""
    return SUPERVISED[algorithm] if algorithm in SUPERVISED else find_algorithm(algorithm).config_class


def _stage(raw: dict[str, Any], shared: dict[str, Any], output: Path, environments: list[str] | None) -> Stage:
    name, algorithm = str(raw["name"]), raw["algorithm"]
    where = f"stage {name!r}"
    if not _NAME.fullmatch(name) or name.casefold() in RESERVED:
        raise YAMLFileError(
            f"{where}: a stage's name is the name of its folder. Expected letters, digits and any of `._+=@-`, a letter "
            f"or digit first and last, and none of {', '.join(RESERVED)}."
        )
    if EVOLVE in raw:
        folder = output / name / POPULATION
        plan = read_plan(raw[EVOLVE], folder, shared=shared, where=f"{where}, `{EVOLVE}`")
        options = {**plan.options, EVOLVE: raw[EVOLVE]}
        return Stage(name, algorithm, options, plan.config, plan.dataset, plan.dataset_args, plan.lora, population=plan)
    config = config_of(algorithm)
    own = options_of(config)
    known = own | options_of(_OfAllStages)
    mapping(raw, {*STAGE_KEYS, *known}, where)
    options = {key: value for key, value in shared.items() if key in known}
    options |= {key: value for key, value in raw.items() if key not in STAGE_KEYS}
    given = {"merge_lora_configs": raw["merge_lora_configs"]} if "merge_lora_configs" in raw else {}
    merges = make_config(_Merging, given, None, where).merge_lora_configs
    if merges and "merge_lora_configs" in known:
        options["merge_lora_configs"] = True
    dataset = raw.get("dataset")
    arguments = mapping(raw.get("dataset_args"), None, f"{where}, `dataset_args`")
    if algorithm in SUPERVISED and dataset is None:
        raise YAMLFileError(f"{where}: `dataset` is missing; {algorithm} trains on one.")
    if dataset is not None:
        check_dataset(str(dataset), arguments, where)
    made = make_config(config, {key: options[key] for key in options if key in own}, output / name, where)
    with naming_place(where):
        if algorithm in SUPERVISED:
            limits = {key: options[key] for key in options if key not in own}
            made.max_wall_seconds = make_config(_OfAllStages, limits, None, where).max_wall_seconds
            check_rules(made, _SUPERVISED_RULES)
        else:
            made.with_environment(environments)
    if dataset is None and made.max_steps <= 0:
        raise YAMLFileError(f"{where}: without a `dataset`, set `max_steps`.")
    lora = read_lora(raw.get("lora"), f"{where}, `lora`")
    return Stage(name, algorithm, options, made, dataset, arguments, lora, merges)


def _check_lora(stages: list[Stage], lora: LoraConfig | None) -> None:
    """Reject settings of a stage's own that differ from those of the adapter that an earlier one leaves.

    Raises:
        YAMLFileError: For such a stage.
    """
    before: LoraConfig | None = None
    for stage in stages:
        merges = stage.lora is not None and (
            stage.merge_lora_configs or getattr(stage.config, "merge_lora_configs", False)
        )
        if before is not None and stage.lora is not None and not merges and stage.lora.to_dict() != before.to_dict():
            raise YAMLFileError(
                f"stage {stage.name!r}: `lora` differs from that of the adapter that is there before it. Remove it, or set "
                "`merge_lora_configs: true`, with which the adapter is extended."
            )
        if merges and stage.lora is not None and (before is None or stage.lora.to_dict() != before.to_dict()):
            with naming_place(f"stage {stage.name!r}"):
                check_extends(stage.lora)
        before = None if merges else stage.lora or before or lora


def _evaluation(
    raw: Any, shared: dict[str, Any], stages: list[Stage], environments: list[str] | None
) -> tuple[Any, dict[str, Any]]:
    """Return the settings of every evaluation, if they can be played by, and the options that they are made of.

    Raises:
        YAMLFileError: If one of them is out of range, or names another environment.
    """
    given = mapping(raw, {*_PLAYED, "seed"}, "`evaluation`")
    played = next((stage.options for stage in reversed(stages) if stage.algorithm not in SUPERVISED), shared)
    options = {name: value for name, value in shared.items() if name in (*_PLAYED, *_LOADED, *_SHARED)}
    options |= {name: played[name] for name in (*_PLAYED, *_LOADED) if name in played} | given
    made = make_config(MultiTurnGRPOConfig, options, Path("evaluation"), "`evaluation`")
    with naming_place("`evaluation`"):
        sampling_settings(made)
        episodes = EpisodeOptions.of_args(made)
        check_names("environment_limits", episodes.environment_limits, environments or [])
        episodes.histories(environments or [None])
    return made, options


logger = logging.get_logger(__name__)

_PAIRS = (
    ("instruction", "output"), ("instruction", "response"), ("question", "answer"), ("question", "response"),
    ("prompt", "response"), ("query", "response"), ("input", "output"),
)  # fmt: skip
"""Columns of a prompt and its answer that are read as ``prompt`` and ``completion``."""
_EXPECTED = {
    "sft": "`messages` (a conversation), `prompt` and `completion`, or `text`. Of others, "
    + ", ".join(f"`{prompt}` and `{answer}`" for prompt, answer in _PAIRS)
    + " are read too, with `input` beside `instruction`",
    "dpo": "`chosen` and `rejected`, and `prompt` where these are only the answers",
}


def check_rows(pipeline: Pipeline, finished: Mapping[str, bool]) -> None:
    """Check the columns of each supervised stage whose rows are in a file or made by a function, and warn of plain text.

    Args:
        pipeline: The chain.
        finished: Names of stages to whether they have finished; these need no rows.

    Raises:
        YAMLFileError: If a stage's trainer cannot read its columns.
    """
    for number, stage in enumerate(pipeline.stages):
        named = str(stage.dataset)
        local = Path(named).exists() or ":" in named  # the Hub is asked when the stage begins
        if stage.algorithm not in SUPERVISED or finished.get(stage.name) or not local:
            continue
        first = _first(stage, stage_rows(named, stage.dataset_args))
        plays = [later.name for later in pipeline.stages[number + 1 :] if later.algorithm not in SUPERVISED]
        if plays and _is_plain(stage, first) and has_template(pipeline.model, beside=first):
            logger.warning(
                f"Stage {stage.name!r} trains on plain text ({', '.join(first)}), but stage {plays[0]!r} plays in the chat "
                "template of the model: what is learned may not show there. Give conversations: `messages`, or `prompt` and "
                "`completion` as lists of messages."
            )


def supervised_rows(stage: Stage, model: str) -> Any:
    """Load the rows of a stage; a prompt and its answer under other names become ``prompt`` and ``completion``.

    These are messages if the model has a chat template, else text.

    Raises:
        YAMLFileError: If the stage's trainer cannot read the columns.
    """
    rows = stage_rows(str(stage.dataset), stage.dataset_args)
    first = _first(stage, rows)
    pair = _pair(stage, first)
    if pair is None:
        return rows
    chat = has_template(model)

    def of_trl(row: dict[str, Any]) -> dict[str, Any]:
        asked = [str(row[pair[0]]), *([str(row["input"])] if pair[0] == "instruction" and row.get("input") else [])]
        prompt, answer = "\n\n".join(asked), str(row[pair[1]])
        if not chat:
            return {"prompt": f"{prompt}\n", "completion": answer}
        return {
            "prompt": [{"role": "user", "content": prompt}],
            "completion": [{"role": "assistant", "content": answer}],
        }

    return rows.map(of_trl, remove_columns=list(first))


def has_template(model: str, beside: Mapping[str, Any] | None = None) -> bool:
    """Return whether a model's tokenizer has a chat template; True if it cannot be read yet.

    Args:
        model: Folder or Hub id.
        beside: A row; False if its text is written in the template already, as special tokens in it tell.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        return True
    texts = [text for text in (beside or {}).values() if isinstance(text, str)]
    written = any(token in text for text in texts for token in tokenizer.all_special_tokens)
    return tokenizer.chat_template is not None and not written


def _first(stage: Stage, rows: Any) -> dict[str, Any]:
    """Return the first row, if the stage's trainer can read it."""
    first: dict[str, Any] | None = next(iter(rows), None)
    where = f"stage {stage.name!r}: dataset {stage.dataset}"
    if first is None:
        raise YAMLFileError(f"{where} has no rows.")
    if not _is_known(stage, first) and _pair(stage, first) is None:
        raise YAMLFileError(
            f"{where} has the columns {', '.join(map(repr, first))}; {stage.algorithm} expects {_EXPECTED[stage.algorithm]}."
        )
    return first


def _is_known(stage: Stage, row: Mapping[str, Any]) -> bool:
    if stage.algorithm == "dpo":
        return {"chosen", "rejected"} <= row.keys()
    text = getattr(stage.config, "dataset_text_field", "text")
    return bool({"messages", "conversations", "input_ids", text} & row.keys()) or {"prompt", "completion"} <= row.keys()


def _pair(stage: Stage, row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the columns of a prompt and its answer, if they have other names than TRL's."""
    if stage.algorithm == "dpo" or _is_known(stage, row):
        return None
    return next((pair for pair in _PAIRS if set(pair) <= row.keys()), None)


def _is_plain(stage: Stage, row: Mapping[str, Any]) -> bool:
    """Return whether a row is text, not messages."""
    if _pair(stage, row) is not None:
        return False
    return not any(isinstance(row.get(name), list) for name in ("messages", "conversations", "completion", "chosen"))
