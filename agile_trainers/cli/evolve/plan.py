"""Reads and checks the YAML of a population, a file of its own or a stage of a chain, before anything is trained."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig

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
from agile_trainers.imports import load_named
from agile_trainers.populations import HyperparameterConfig, Population, Processes, Range
from agile_trainers.populations.selection import STRATEGIES, Strategy
from agile_trainers.trainers.registry import find_algorithm

OWN = (
    "algorithm", "hyperparameters", "members", "rounds", "strategy", "fitness", "max_episodes", "max_hours", "seed",
    "options", "dataset", "dataset_args", "eval_dataset", "eval_dataset_args", "lora",
)  # fmt: skip
"""Keys of a population, in a file and in a stage."""
OF_FILE = ("output_dir", "model", "environment", "environment_args")
"""Keys of a file alone; a stage has those of its chain."""
FITNESS = ("return", "success")


@dataclass
class _Search:
    """Arguments of ``Population`` that are plain values; the types parse them."""

    members: int = 8
    max_episodes: int | None = None
    max_hours: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class PopulationPlan:
    """A population as a file describes it, checked."""

    algorithm: str
    config: Any
    """The algorithm's configuration, with the population's folder as ``output_dir``."""
    options: dict[str, Any]
    """Its options in the file, shared ones included."""
    hyperparameters: HyperparameterConfig
    search: dict[str, Any]
    """Further arguments of ``Population``: members, rounds, strategy, fitness, budget and seed."""
    dataset: str | None
    dataset_args: dict[str, Any]
    eval_dataset: str | None
    eval_dataset_args: dict[str, Any]
    lora: LoraConfig | None

    def make(
        self,
        model: str,
        environment: Any,
        lora: LoraConfig | None,
        *,
        on_trainer: Callable[[Any, int], None] | None = None,
        processes: Processes | None = None,
        load: bool = True,
    ) -> Population:
        """Make the population.

        Args:
            model: The model or adapter that members start from.
            environment: Its factory, or several by name.
            lora: Settings of the members' adapters; None if ``model`` is an adapter.
            on_trainer: See ``Population``.
            processes: See ``Population``.
            load: Read the data set. False makes a population that checks its arguments and cannot run.

        Raises:
            ValueError: For options in which members cannot differ, or that a population cannot use.
        """
        rows = stage_rows(self.dataset, self.dataset_args) if self.dataset and load else None
        eval_rows = stage_rows(self.eval_dataset, self.eval_dataset_args) if self.eval_dataset and load else None
        return Population(
            self.algorithm, model, self.config, environment, self.hyperparameters, train_dataset=rows,
            eval_dataset=eval_rows, peft_config=lora, on_trainer=on_trainer, processes=processes, **self.search,
        )  # fmt: skip


@dataclass(frozen=True)
class PopulationFile:
    """The content of a population's file, checked."""

    model: str
    environment: Any
    """A factory, or several by name."""
    environment_options: str
    """The options of the command line that name it; empty if the file names several."""
    plan: PopulationPlan


def read_population(path: Path) -> PopulationFile:
    """Read and check a file; ``docs/populations.md`` describes its form.

    Raises:
        YAMLFileError: If anything in it cannot be run.
    """
    content = read_yaml(path)
    with naming_place(path):
        content = mapping(content, [*OF_FILE, *OWN], "the file")
        for name in ("output_dir", "model", "environment"):
            if not content.get(name):
                raise YAMLFileError(f"`{name}` is missing.")
        environment = read_environment(content)
        own = {name: value for name, value in content.items() if name in OWN}
        plan = read_plan(own, Path(str(content["output_dir"])))
        named = _environment_options(content["environment"], content.get("environment_args"))
        file = PopulationFile(str(content["model"]), environment, named, plan)
        check_plan(plan, file.model, environment, plan.lora)
    return file


def _environment_options(environment: Any, arguments: dict[str, Any] | None) -> str:
    if not isinstance(environment, str):
        return ""
    given = f" --environment_args {shlex.quote(json.dumps(arguments))}" if arguments else ""
    return f" --environment {shlex.quote(environment)}{given}"


def read_plan(
    content: Any, output_dir: Path, *, shared: Mapping[str, Any] | None = None, where: str = "the file"
) -> PopulationPlan:
    """Read and check what a file or a stage says of a population.

    Args:
        content: A mapping with keys of ``OWN``.
        output_dir: The population's folder.
        shared: Options that are taken where the configuration has them and ``options`` does not set them.
        where: Place in the file, for errors.

    Raises:
        YAMLFileError: If anything in it cannot be run.
    """
    content = mapping(content, OWN, where)
    for name in ("algorithm", "hyperparameters"):
        if not content.get(name):
            raise YAMLFileError(f"{where}: `{name}` is missing.")
    check_algorithm(content["algorithm"], (), where)
    config = find_algorithm(content["algorithm"]).config_class
    known = options_of(config)
    options = {name: value for name, value in (shared or {}).items() if name in known}
    options |= mapping(content.get("options"), known, f"{where}, `options`")
    data: dict[str, Any] = {}
    for name in ("dataset", "eval_dataset"):
        data[name] = str(content[name]) if content.get(name) else None
        data[f"{name}_args"] = mapping(content.get(f"{name}_args"), None, f"{where}, `{name}_args`")
        if data[name] is not None:
            check_dataset(data[name], data[f"{name}_args"], where)
        elif data[f"{name}_args"]:
            raise YAMLFileError(f"{where}: `{name}_args` has no effect without `{name}`.")
    given = {name: content[name] for name in ("members", "max_episodes", "max_hours", "seed") if name in content}
    search: dict[str, Any] = dict(vars(make_config(_Search, given, None, where)))
    if "rounds" in content:
        search["rounds"] = _rounds(content["rounds"], where)
    search["strategy"] = _strategy(content.get("strategy"), where)
    search["fitness"] = _fitness(content.get("fitness", "return"), where)
    return PopulationPlan(
        algorithm=content["algorithm"],
        config=make_config(config, options, output_dir, f"{where}, `options`"),
        options=options,
        hyperparameters=_hyperparameters(content["hyperparameters"], where),
        search=search,
        **data,
        lora=read_lora(content.get("lora"), f"{where}, `lora`"),
    )


def check_plan(
    plan: PopulationPlan, model: str, environment: Any, lora: LoraConfig | None, where: str = "the file"
) -> None:
    """Check what a population checks at construction, without loading model or data.

    Raises:
        YAMLFileError: If it cannot be made.
    """
    with naming_place(where):
        plan.make(model, environment, lora, load=False)


def _hyperparameters(raw: Any, where: str) -> HyperparameterConfig:
    ranges = {}
    names = [one.name for one in dataclasses.fields(Range)]
    for name, one in mapping(raw, None, f"{where}, `hyperparameters`").items():
        place = f"{where}, `hyperparameters`, {name!r}"
        if not isinstance(one, dict) or not {"low", "high"} <= one.keys():
            raise YAMLFileError(f"{place} must be a range such as {{low: 1e-5, high: 1e-3, log: true}}, got {one!r}.")
        ranges[str(name)] = make_config(Range, mapping(one, names, place), None, place)
    return HyperparameterConfig(**ranges)


def _rounds(raw: Any, where: str) -> int | list[int]:
    given = raw if isinstance(raw, list) else [raw]
    if not given or any(type(one) is not int for one in given):
        raise YAMLFileError(f"{where}: `rounds` must be a number of rounds, or a list of the steps at which they end, "
                            f"got {raw!r}.")  # fmt: skip
    return raw


def _strategy(raw: Any, where: str) -> Strategy | None:
    """Find a strategy by name, or by ``{name: {option: value}}``; None without one."""
    if raw is None:
        return None
    ((name, options),) = raw.items() if isinstance(raw, dict) and len(raw) == 1 else ((raw, None),)
    if not isinstance(name, str) or name not in STRATEGIES:
        raise YAMLFileError(
            f"{where}: `strategy` must be one of {', '.join(STRATEGIES)}, alone or with options such as "
            f"{{tournament: {{size: 3}}}}, got {raw!r}."
        )
    place, kind = f"{where}, `strategy`, {name!r}", STRATEGIES[name]
    names = [one.name for one in dataclasses.fields(kind) if one.name != "name"]
    return make_config(kind, mapping(options, names, place), None, place)


def _fitness(raw: Any, where: str) -> Any:
    if raw in FITNESS:
        return raw
    if not isinstance(raw, str) or ":" not in raw:
        raise YAMLFileError(
            f"{where}: `fitness` must be {' or '.join(FITNESS)}, or 'module.path:function' of an episode, got {raw!r}."
        )
    with naming_place(f"{where}: fitness {raw!r}"):
        return load_named(raw)
