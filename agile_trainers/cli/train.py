"""``agile-trainers grpo | gspo | cispo | reinforce | ppo | module.path:Class``: trains with any algorithm.

The options are those of ``trl grpo``, the algorithm's configuration, and :class:`MultiTurnScriptArguments`, from the command
line and from ``--config file.yaml``. Options of ``accelerate launch`` (``--num_processes 2``) and ``--accelerate_config`` (a
file, or a name: ``zero2`` is ``accelerate_configs/zero2.yaml``) start the training through ``accelerate launch``.
"""

import argparse
import atexit
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from transformers import TrainerCallback
from trl import DatasetMixtureConfig, ModelConfig
from trl.scripts.grpo import GRPOScriptArguments

from agile_trainers.adapters.loading import check_model
from agile_trainers.cli.errors import Progress, cut, guard, mistakes_of_options, take_debug
from agile_trainers.cli.parser import Parser, check_output, named_dataset
from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.config.options import option, with_args
from agile_trainers.config.other_names import OTHER_NAMES
from agile_trainers.envs.registry import environment_factories
from agile_trainers.imports import import_named, nearest
from agile_trainers.monitor.progress import PROGRESS, showing
from agile_trainers.records.plain import from_json
from agile_trainers.trainers.registry import find_algorithm


@with_args
@dataclass
class MultiTurnScriptArguments(GRPOScriptArguments):
    """Options of the environment and the data, besides those of ``trl grpo``."""

    environment: dict[str, Any] | str | None = option(
        None,
        "Environment id (`agile:guess_number`, `agent:module.path:function`), or `module.path:Name` of a class or "
        "factory; or several by name (a mapping in YAML, JSON on the command line). Default: train on the data set "
        "alone, as `trl grpo` does.",
    )
    environment_args: dict[str, Any] | str | None = option(
        None,
        "Keyword arguments of the environment, by its name if there are several: a mapping in YAML, JSON on the command "
        "line.",
    )
    progress: str = option(
        "table",
        "Output while training: `table`, a row per log of what matters most; `wide`, with columns of TRL such as loss and "
        "KL; `dicts`, that of transformers.",
    )

    def __post_init__(self) -> None:
        if self.progress not in PROGRESS:
            raise ValueError(f"progress must be 'table', 'wide' or 'dicts', got {self.progress!r}.")
        if isinstance(self.environment, str) and self.environment.lstrip().startswith("{"):
            expected = (
                'environment must be an id, or a JSON object of ids by name such as \'{"guess": "agile:guess_number"}\''
            )
            self.environment = _parsed(self.environment, expected, cut(repr(self.environment)))
        if isinstance(self.environment_args, str):
            expected = 'environment_args must be a JSON object such as \'{"level": "easy"}\''
            got = f"{len(self.environment_args)} characters that are none"  # there may be secrets among them
            self.environment_args = _parsed(self.environment_args, expected, got)
        if self.environment_args is not None and not isinstance(self.environment_args, dict):
            raise ValueError(
                f"environment_args must be a mapping of names to values, got a {type(self.environment_args).__name__}."
            )
        if self.environment_args and self.environment is None:
            raise ValueError("environment_args has no effect without environment; set environment too.")


def _parsed(text: str, expected: str, got: str) -> Any:
    try:
        return from_json(text, written=True)
    except ValueError as error:
        raise ValueError(f"{expected}, got {got}: {error}.") from error


class OptionsOnly(Parser):
    """A parser that leaves a configuration's checks to the launched processes, since batch sizes are over all of them."""

    def parse_args_into_dataclasses(self, args: Any = None, **_: Any) -> Any:
        return self.parse_known_args(args)


class Started(TrainerCallback):
    """Records that training runs, so that errors show their traceback."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Progress.training = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Progress.training = False


def make_parser(algorithm: str, kind: type[Parser] = Parser) -> Parser:
    """Make the parser of ``agile-trainers <algorithm>``. Without a GPU, the CPU is the default."""
    config = find_algorithm(algorithm).config_class
    types = (MultiTurnScriptArguments, config, ModelConfig, DatasetMixtureConfig)
    needed = "--model_name_or_path MODEL --environment ID" + (" --use_peft" if config.has_critic else "")
    command = f"agile-trainers {algorithm}"
    return on_cpu(kind(types, prog=command, usage=f"{command} {needed} [--config FILE] [options]"))


def on_cpu(parser: Parser) -> Parser:
    """Set a parser's defaults for the CPU if there is no GPU, since TRL's need one.

    The precision of a launch configuration stays, since DeepSpeed rejects another one.
    """
    if not torch.accelerator.is_available():
        parser.set_defaults(use_cpu=True, bf16=os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16")
    return parser


def train(
    algorithm: str, script: MultiTurnScriptArguments, args: MultiTurnConfig, model: ModelConfig, mixture: Any
) -> None:
    """Train, save, and push to the Hub if ``args.push_to_hub``.

    Args:
        algorithm: What ``find_algorithm`` finds a trainer by.
        script: Options of the environment and the data.
        args: The algorithm's configuration.
        model: Options of the model.
        mixture: TRL's ``DatasetMixtureConfig``.
    """
    from trl import get_peft_config, get_quantization_config

    environment: Any = script.environment
    if script.environment is not None and isinstance(script.environment_args, dict):
        environment = environment_factories(script.environment, script.environment_args)
    dataset = script_dataset(script, mixture)
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": args.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(args.model_init_kwargs or {}),
    }
    try:
        trainer = find_algorithm(algorithm)(
            model=model.model_name_or_path,
            environment=environment,
            reward_funcs=reward_functions(script),
            args=args,
            train_dataset=split_of_dataset(dataset, script.dataset_train_split),
            eval_dataset=split_of_dataset(dataset, script.dataset_test_split) if args.eval_strategy != "no" else None,
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
        )
    except SafetensorError as error:
        raise ValueError(
            f"model_name_or_path={model.model_name_or_path!r}: its weights cannot be read: {error}. The file is damaged "
            "or incomplete; copy or download it again."
        ) from error
    trainer.add_callback(Started())
    resume = args.resume_from_checkpoint
    with showing(trainer.callback_handler, Console(), algorithm, progress=script.progress):
        trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    trainer.save_model(args.output_dir)
    trainer.accelerator.print(f"Saved to {args.output_dir}.")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    trainer.accelerator.end_training()  # otherwise processes sometimes abort at the interpreter's exit


def script_dataset(script: MultiTurnScriptArguments, mixture: Any) -> Any:
    """Load the splits of the data set by name; None if no data set is named.

    Raises:
        ValueError: If two data sets are named, or one cannot be loaded.
    """
    from trl import get_dataset

    if mixture.datasets and script.dataset_name:
        raise ValueError("`datasets` and `dataset_name` both name a data set; keep one of them.")
    if mixture.datasets:
        return get_dataset(mixture)
    if script.dataset_name:
        return named_dataset(
            "dataset_name", script.dataset_name, script.dataset_config, streaming=script.dataset_streaming
        )
    return None


def split_of_dataset(dataset: Any, name: str) -> Any:
    """Return a split of the result of :func:`script_dataset`; None without a data set.

    Raises:
        ValueError: If there is no split of that name.
    """
    if dataset is None:
        return None
    if name not in dataset:
        raise ValueError(f"The data set has no split {name!r}; it has {', '.join(map(repr, dataset))}.")
    return dataset[name]


def reward_functions(script: MultiTurnScriptArguments) -> list[str | Callable[..., Any]]:
    """Return reward models, functions of ``trl.rewards`` by name, and other functions by dotted path."""
    from trl import rewards

    functions: list[str | Callable[..., Any]] = []
    if script.reward_model_name_or_path:
        functions.append(script.reward_model_name_or_path)
    for name in script.reward_funcs or []:
        if name == "get_soft_overlong_punishment":  # the lengths of `trl grpo`
            functions.append(rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256))
            continue
        module, _, attribute = name.replace(":", ".").rpartition(".")
        if module and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        source = import_named(module) if module else rewards
        if not hasattr(source, attribute):
            raise ValueError(
                f"There is no reward function {name!r}{nearest(attribute, dir(source), count=1) or '.'} Expected "
                "a name in trl.rewards or a dotted path such as 'my_package.rewards.brevity'."
            )
        functions.append(getattr(source, attribute))
    return functions


def main(argv: Sequence[str], *, debug: bool = False) -> None:
    """Parse the options and train, through ``accelerate launch`` if any of its options are given.

    Args:
        argv: The algorithm and its options.
        debug: True if launched processes show the traceback of a user's mistake.
    """
    algorithm, *options = argv
    parser = make_parser(algorithm, OptionsOnly)
    given, from_config, from_command_line = parser.parse_args_and_config(
        options, return_remaining_strings=True, separate_remaining_strings=True
    )
    if given.model_name_or_path is None:
        parser.error("--model_name_or_path is missing: the Hub id or folder of the model to train.")
    launched = [*from_config, *from_command_line]
    launch = launcher_options(parser, argv, launched, from_command_line, debug=debug) if launched else None
    parsed = () if launch else parse_checked(algorithm, options)
    check_needed(parser, algorithm, script=given, model=given)
    check_found(given)
    if not torch.accelerator.is_available():
        print(
            "There is no GPU: training runs on the CPU, in float32 unless options or launch configuration set otherwise.",
            file=sys.stderr,
        )
    if launch is not None:
        start(launch)
    else:
        train(algorithm, *parsed)


def start(launch: argparse.Namespace) -> None:
    """Start the processes of ``accelerate launch``; a single one takes this one's place.

    accelerate would wait for a child, and SIGTERM would end the wait alone: training would go on without a parent.

    Args:
        launch: The parsed options of ``accelerate launch``.
    """
    from accelerate.commands import launch as launchers
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    def take_place(options: argparse.Namespace) -> None:
        command, environment = prepare_simple_launcher_cmd_env(options)
        atexit._run_exitfuncs()  # as at an exit: temporary folders go, streams are flushed
        sys.stdout.flush()
        os.execvpe(command[0], command, environment)

    launchers.simple_launcher = take_place
    launchers.launch_command(launch)


def parse_checked(algorithm: str, options: Sequence[str]) -> Any:
    """Parse script arguments and configurations; a configuration's error becomes one of the command line."""
    parser = make_parser(algorithm)
    with mistakes_of_options(parser, ValueError, TypeError):
        return parser.parse_args_and_config(options, fail_with_unknown_args=False)


def check_needed(parser: Parser, algorithm: str, *, script: MultiTurnScriptArguments, model: ModelConfig) -> None:
    """Check that the options contain everything that an algorithm needs, before anything is loaded."""
    trainer = find_algorithm(algorithm)
    if script.environment is None and trainer.needs_environment:
        parser.error(
            f"--environment is missing: {algorithm} trains on an environment's episodes, not on a data set alone."
        )
    if trainer.config_class.has_critic and not model.use_peft:
        parser.error(
            f"--use_peft is missing: {algorithm} trains policy and critic as two LoRA adapters on one base. Add --use_peft, "
            "and --lora_target_modules all-linear to adapt every linear layer."
        )


def check_found(given: Any) -> None:
    """Check that the environment, the model and the output folder in the options can be used.

    Args:
        given: The options, by name.

    Raises:
        ValueError: If one of them cannot be used.
        ImportError: If a library that the environment needs is missing.
    """
    if given.environment is not None:
        script = MultiTurnScriptArguments(environment=given.environment, environment_args=given.environment_args)
        environment_factories(script.environment, script.environment_args)  # type: ignore[arg-type]
    check_model(given.model_name_or_path, given.model_revision)
    if given.output_dir is not None:
        check_output(given.output_dir)


def launcher_options(
    parser: Parser, argv: Sequence[str], options: list[str], from_command_line: list[str], *, debug: bool
) -> Any:
    """Return the arguments of ``accelerate launch``.

    Args:
        parser: Parser of the training options, which reports mistakes.
        argv: The algorithm and all options.
        options: Options of the file and the command line that are not for training.
        from_command_line: Those of the command line alone.
        debug: Passed on to the processes.
    """
    from accelerate.commands.launch import launch_command_parser

    from agile_trainers.cli.launch_configs import resolve

    launcher = launch_command_parser()
    launcher.error = parser.error
    known = {"--accelerate_config", *(option for action in launcher._actions for option in action.option_strings)}
    known -= {f"--{name}" for name in OTHER_NAMES}  # `--env`, which is for pods of TPUs, is an environment here
    parser.refuse(options, known)
    left = list(from_command_line)
    training = [argument for argument in argv if not (left and argument == left[0] and left.pop(0))]
    with mistakes_of_options(parser, ValueError):
        launching = resolve(options)
    module = ["--module", __spec__.name, *training, *(["--debug"] if debug else [])]
    found = launcher.parse_args([*launching, *module])
    if found.training_script != __spec__.name:
        parser.error(f"{found.training_script!r} belongs to no option; options begin with --, such as --max_steps 100.")
    for name in ("num_processes", "num_machines"):
        if (count := getattr(found, name)) is not None and count < 1:
            parser.error(f"--{name} must be at least 1, got {count}.")
    return found


if __name__ == "__main__":  # a process that `accelerate launch` started ignores the launcher's options
    show, (algorithm_name, *arguments) = take_debug(sys.argv[1:])
    raise SystemExit(
        guard(algorithm_name, lambda: train(algorithm_name, *parse_checked(algorithm_name, arguments)), debug=show)
    )
