"""``agile-trainers check``: reports whether a run is ready to train, with exit code 1 if it is not.

The options are those of ``agile-trainers grpo`` (or of another algorithm, named first: ``agile-trainers check ppo ...``), so
that a command or configuration file can be checked unchanged, those of ``accelerate launch`` included, and those of
:class:`CheckArguments`. Nothing is launched. ``--model`` is short for ``--model_name_or_path``; the default is the embedded
model.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging
from trl import DatasetMixtureConfig, ModelConfig
from trl.import_utils import is_vllm_available

from agile_trainers.adapters.loading import check_model
from agile_trainers.cli.check.report import Report, Run
from agile_trainers.cli.check.sections import check_run
from agile_trainers.cli.errors import message, mistakes_of_options
from agile_trainers.cli.launch_configs import SINGLE, Launch, planned
from agile_trainers.cli.parser import Parser
from agile_trainers.cli.train import (
    MultiTurnScriptArguments,
    OptionsOnly,
    check_needed,
    launcher_options,
    on_cpu,
    reward_functions,
    script_dataset,
    split_of_dataset,
)
from agile_trainers.config.batch_defaults import unlikely_to_learn
from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.config.options import option, with_args
from agile_trainers.config.rules import MACHINE, check_rules
from agile_trainers.embedded import make_embedded_model
from agile_trainers.envs.agent import is_agent
from agile_trainers.envs.registry import describe_environment, environment_factories
from agile_trainers.judges.judge import Judge
from agile_trainers.rollout.episode_options import end_token_ids
from agile_trainers.rollout.generators.images import SUPPORTED
from agile_trainers.step.task_sampling import task_pool
from agile_trainers.trainers.mixture import first_rows, mixture_of, names_of, rows_of_environment
from agile_trainers.trainers.registry import algorithm_names, find_algorithm
from agile_trainers.trainers.setup import training_rows

_EPISODES, _OF_AGENTS = 16, 2
"""Number of episodes that are played, and of those of an agent."""
POLICIES = ("auto", "model", "random", "expert")


@with_args
@dataclass
class CheckArguments:
    """Options of a check, beside those of training."""

    episodes: int | None = option(None, "Number of episodes to play. Default: 16, of an agent 2.")
    scripted_policy: str = option(
        "auto",
        "Plays the episodes: the environment's scripted policy `random` or `expert`, the `model`, or `auto`. `auto` is the "
        "model if one is named, otherwise the random policy, or the embedded model if there is none. With `gpu_memory` on a "
        "machine without a GPU, which is to plan for another machine, no weights are loaded: it is the random or "
        "expert policy then, if the environment has one.",
    )
    gpu_memory: float | None = option(
        None, "GiB of the GPU to plan for. Default: those of this machine's GPU, if there is one."
    )

    gpus: int | None = option(
        None,
        "GPUs of the machine to plan for, which decide where a server of `vllm_server_start` runs. Default: those of this "
        "machine, or with `gpu_memory` on one without, as many as the processes and the server need.",
    )

    def __post_init__(self) -> None:
        if self.gpus is not None and self.gpus < 1:
            raise ValueError(f"gpus must be a positive number of GPUs, got {self.gpus}.")
        if self.gpu_memory is not None and not self.gpu_memory > 0:
            raise ValueError(f"gpu_memory must be a positive number of GiB, got {self.gpu_memory}.")
        if self.episodes is not None and self.episodes < 2:
            raise ValueError(f"episodes must be at least 2, to compare them, got {self.episodes}.")
        if self.scripted_policy not in POLICIES:
            raise ValueError(f"scripted_policy must be one of {', '.join(POLICIES)}, got {self.scripted_policy!r}.")


def make_parser(algorithm: str, kind: type[Parser] = Parser, launch: Launch = SINGLE) -> Parser:
    """Make the parser of ``agile-trainers check`` for one algorithm.

    Args:
        algorithm: Its name.
        kind: The class of the parser.
        launch: The processes that the configuration is checked for.
    """
    config: Any = find_algorithm(algorithm).config_class
    if launch.processes > 1:  # batch sizes are over all processes
        config = type(config.__name__, (config,), {"world_size": launch.processes, "__module__": config.__module__})
    types = (CheckArguments, MultiTurnScriptArguments, config, ModelConfig, DatasetMixtureConfig)
    command = "agile-trainers check"
    names = " | ".join([*algorithm_names(), "module.path:Class"])
    usage = f"{command} [{names}] --environment ID [--model MODEL] [--config FILE] [options]"
    return on_cpu(kind(types, prog=command, usage=usage))


def parse_options(algorithm: str, options: Sequence[str]) -> tuple[Any, Parser, Launch, bool]:
    """Parse the options, those of ``accelerate launch`` apart.

    Returns:
        The parsed dataclasses, the parser, the processes of the run, and whether the run is for a GPU that is not here.
    """
    first = make_parser(algorithm, OptionsOnly)
    given, from_config, from_command_line = first.parse_args_and_config(
        options, return_remaining_strings=True, separate_remaining_strings=True
    )
    launched = [*from_config, *from_command_line]
    launch = SINGLE
    if launched:
        launch = planned(launcher_options(first, [algorithm, *options], launched, from_command_line, debug=False))
    elsewhere = given.gpu_memory is not None and not torch.cuda.is_available()
    parser = make_parser(algorithm, Parser, launch)
    if elsewhere:
        parser.set_defaults(use_cpu=True, bf16=not given.fp16)  # as TRL decides on a GPU
    with mistakes_of_options(parser, ValueError):  # of a configuration's own checks
        *parsed, _, _ = parser.parse_args_and_config(
            options, return_remaining_strings=True, separate_remaining_strings=True
        )
    return parsed, parser, launch, elsewhere


def main(argv: Sequence[str], console: Console | None = None) -> int:
    """Parse the options, check, and print the report.

    Args:
        argv: The options, after an algorithm if it is not ``grpo``.
        console: Console for the report.

    Returns:
        0 if the run is ready to train, 1 if not.
    """
    named = bool(argv) and not argv[0].startswith("-")
    algorithm, options = (argv[0], argv[1:]) if named else ("grpo", argv)
    options = [
        f"--model_name_or_path{option[7:]}" if option.split("=")[0] == "--model" else option for option in options
    ]
    (check, script, args, model, mixture), parser, launch, elsewhere = parse_options(algorithm, options)
    if script.environment is None:
        parser.error(
            "--environment is missing: set the id of the environment to check, module.path:Name or "
            "agent:module.path:function."
        )
    with mistakes_of_options(parser, ValueError):
        args = args.with_environment(names_of(script.environment))
    report = Report(console or Console())
    shown = describe_environment(script.environment)["environment"]
    report.console.rule(f"agile-trainers check: {shown}", characters="-")
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        named = model.model_name_or_path
        if named is None:
            model.model_name_or_path = str(make_embedded_model(folder))
        report.line(
            f"Algorithm {algorithm}; {f'model {named}' if named else 'the embedded model, since none was named'}."
        )
        for finding in unlikely_to_learn(args, adapter=model.use_peft):
            report.warning(finding)
        check_needed(parser, algorithm, script=script, model=model)
        policy = check.scripted_policy
        if policy == "auto":
            policy = "model" if named and not elsewhere else "random"
        if args.use_vllm and not is_vllm_available():
            report.warning(
                "vLLM is not installed here; the machine that trains needs pip install 'agile-trainers[vllm]'."
            )
        try:
            made = environment_factories(script.environment, script.environment_args)
            check_model(str(model.model_name_or_path), model.model_revision)
            dataset = script_dataset(script, mixture)
            train_rows = split_of_dataset(dataset, script.dataset_train_split)
            if train_rows:
                training_rows(args, train_rows)
            if not elsewhere:
                check_rules(args, MACHINE)
            functions = reward_functions(script)
            rows = _rows_of_each(args, script, train_rows, check.episodes or _EPISODES)
            where = {"revision": model.model_revision, "trust_remote_code": args.trust_remote_code}
            tokenizer, ends = tokenizer_of_model(model.model_name_or_path, **where)
            config = AutoConfig.from_pretrained(model.model_name_or_path, **where)
            processor = None
            if config.model_type in SUPPORTED:
                processor = AutoProcessor.from_pretrained(model.model_name_or_path, **where)
        except (ValueError, TypeError, ImportError, OSError) as error:
            report.problem(message(error))
            return report.verdict()
        several = isinstance(made, dict)
        for name, factory in made.items() if isinstance(made, dict) else [(None, made)]:
            if several:
                report.console.rule(f"environment {name}", characters="-")
            run = Run(
                environment=str(name or script.environment),
                factory=factory,
                args=args.for_environment(name),
                model=model,
                config=config,
                named=named is not None and not elsewhere,
                tokenizer=tokenizer,
                processor=processor,
                eos_token_ids=ends,
                rows=rows[name],
                episodes=check.episodes or (_OF_AGENTS if is_agent(factory) else _EPISODES),
                policy="model" if is_agent(factory) and check.scripted_policy == "auto" else policy,
                reward_functions=bool(functions),
                judges=[one for one in functions if isinstance(one, Judge)],
                gpu_memory=check.gpu_memory,
                launch=launch,
                gpus=check.gpus,
            )
            report.about = f"{name}: " if several else ""
            check_run(report, run)
    return report.verdict()


def _rows_of_each(
    args: MultiTurnConfig, script: MultiTurnScriptArguments, train_rows: Any, count: int
) -> dict[str | None, list[dict[str, Any]] | None]:
    """Return the first rows of each environment by its name; None without rows.

    Raises:
        ValueError: If a row names no known environment, an environment has no row, or the rows do not fit the options that
            draw them.
    """
    mixture = mixture_of(args, script.environment)
    task_pool(args, train_rows or None, mixture)
    if mixture is None:
        return {None: train_rows and [dict(row) for row in islice(train_rows, count)]}
    if not train_rows:
        return dict.fromkeys(mixture.names)
    first_rows(mixture, args, train_rows, None)
    return {name: rows_of_environment(mixture, train_rows, name, count) for name in mixture.names}


def tokenizer_of_model(model: Any, **where: Any) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """Load a model's tokenizer with a padding token, and the ids that end an answer, as the trainers do."""
    tokenizer = AutoTokenizer.from_pretrained(model, **where)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    try:
        ends = GenerationConfig.from_pretrained(model, **where).eos_token_id
    except OSError:  # the model has no generation_config.json
        ends = None
    return tokenizer, end_token_ids(ends, tokenizer)
