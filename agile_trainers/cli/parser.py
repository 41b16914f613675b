"""Parses options and ``--config`` files with TRL's parser, checked YAML and a shorter help page."""

from __future__ import annotations

import argparse
import copy
import inspect
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from datasets.exceptions import DatasetsError
from trl import GRPOConfig, ModelConfig, TrlParser

from agile_trainers.cli.errors import cut, message, wrapped
from agile_trainers.cli.yaml_files import read_yaml
from agile_trainers.config.other_names import meant
from agile_trainers.envs.questions.rows import read_dataset
from agile_trainers.records.plain import from_json

OFTEN = (
    "model_name_or_path", "output_dir", "dataset_name", "learning_rate", "max_steps", "per_device_train_batch_size",
    "gradient_accumulation_steps", "num_generations", "beta", "epsilon", "loss_type", "scale_rewards", "temperature",
    "use_peft", "lora_r", "lora_alpha", "lora_target_modules", "load_in_4bit", "dtype", "bf16", "use_cpu",
    "gradient_checkpointing", "use_vllm", "vllm_mode", "logging_steps", "save_steps", "eval_strategy", "seed",
    "report_to", "resume_from_checkpoint", "push_to_hub",
)  # fmt: skip
"""Options of TRL in ``--help``; ``--help_all`` shows the others too."""
_EPILOG = (
    "Options of `accelerate launch`, such as --num_processes 2, start the training through it. --debug shows the traceback "
    "of an error."
)


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Formats each option in one spelling, and omits missing defaults."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return ", ".join(action.option_strings) or super()._format_action_invocation(action)
        shown = action.option_strings[0]
        return f"{shown} {self._format_args(action, self._get_default_metavar_for_optional(action))}"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kind = getattr(action.type, "__name__", "")
        names = {"int": "N", "float": "X", "string_to_bool": "BOOL", "str": "TEXT", "dict": "JSON"}
        return names.get(kind, "VALUE")

    def _get_help_string(self, action: argparse.Action) -> str | None:
        explained = action.default in (None, "", [], argparse.SUPPRESS) or "efault:" in (action.help or "")
        text = action.help if explained else super()._get_help_string(action)
        # What a page of the documentation links to, a terminal cannot open.
        return text and re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", re.sub(r" \(\[[^]]+\]\([^)]+\)\)", "", text))


class Parser(TrlParser):
    """Parses options and ``--config`` files.

    Args:
        types: Dataclasses whose fields are the options.
        kwargs: Arguments of :class:`argparse.ArgumentParser`.
    """

    def __init__(self, types: Iterable[type], **kwargs: Any):
        kwargs = {"formatter_class": Formatter, "epilog": _EPILOG, "add_help": False, "allow_abbrev": False, **kwargs}
        super().__init__(list(types), **kwargs)
        self._everything = False
        for action in self._actions:
            if action.dest == "report_to":
                action.nargs = "+"  # transformers' own type is a text or a list
        hidden: dict[str, Any] = {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        # The parent removes `--config` before it parses; this adds it to the help page.
        config = "YAML file of options; those of the command line override it."
        self.add_argument("--config", metavar="FILE", help=config, **hidden)
        self.add_argument("-h", "--help", action=_Help, nargs=0, help="Show the most important options.", **hidden)
        self.add_argument("--help_all", "--help-all", action=_Help, nargs=0, help="Show every option.", **hidden)

    def parse_args_and_config(self, args: Sequence[str], **kwargs: Any) -> Any:
        """Parse options and a checked ``--config`` file; extends TRL's method by ``--config=FILE``.

        Raises:
            YAMLFileError: If the file cannot be used.
        """
        options = list[str]()
        for option in args:
            options += option.split("=", 1) if option.startswith("--config=") else [option]
        for index, option in enumerate(options):
            if option == "--config":
                if index + 1 == len(options) or options[index + 1].startswith("--"):
                    self.error("--config: the name of a YAML file is missing after it.")
                if "--config" in options[index + 1 :]:
                    self.error("--config is given twice; put all the options into one file.")
                read_yaml(options[index + 1])
        try:
            return super().parse_args_and_config(options, **kwargs)
        except RecursionError:  # of the JSON reader of an option of TRL or transformers
            self.error("the JSON of an option is nested too deep to be read. Make it flatter.")

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Set the values of a file as defaults, parsed as on the command line: ``1e-3`` is a number."""
        actions = {action.dest: action for action in self._actions}
        for name, value in values.items():
            action = actions.get(name)
            if action is None or value is None:
                continue
            if action.type in (int, float) and (isinstance(value, (bool, list, dict))):
                self.error(f"{name} must be a {'whole ' if action.type is int else ''}number, got {value!r}.")
            if action.type is not None and getattr(action.type, "__name__", "") == "string_to_bool":
                if not isinstance(value, (bool, str)):
                    self.error(f"{name} must be true or false, got {value!r}.")
            elif type(value) in (int, float):
                values[name] = str(value)  # the action's own conversion then raises the error
        return super().set_defaults_with_config(**values)

    def error(self, message: str) -> NoReturn:
        """Print an error in the options and exit with code 2."""
        print(wrapped(f"usage: {self.usage}\n{self.prog}: error: {message}"), file=sys.stderr)
        raise SystemExit(2)

    def refuse(self, options: Sequence[str], others: Collection[str] = ()) -> None:
        """Reject options that this parser does not know, naming the nearest known ones.

        Args:
            options: Names and values of the remaining options.
            others: Further known options.
        """
        own = [known for action in self._actions for known in action.option_strings]
        for option in options:
            name = option.split("=")[0]
            if name.startswith("--") and name not in others:
                near = [*own, *others]
                self.error(f"there is no option {name}{meant(name, near, count=1)}")
        if options and not others:
            self.error(f"{options[0]!r} belongs to no option; options begin with --, such as --max_steps 100.")

    def format_help(self) -> str:
        """Return the help page, with the options of multi-turn training first."""
        often, rest = list[argparse.Action](), list[argparse.Action]()
        own, general = list[argparse.Action](), list[argparse.Action]()
        trl = {*GRPOConfig.__dataclass_fields__, *ModelConfig.__dataclass_fields__}
        ours = {name for kind in self.dataclass_types for name in _own_fields(kind)}
        for action in self._actions:
            if action.option_strings and action.option_strings[0].startswith(("--no_", "--no-")):
                continue
            if action.dest == argparse.SUPPRESS:
                general.append(action)
            elif action.dest in OFTEN:
                often.append(action)
            elif action.dest in ours and action.dest not in trl:
                own.append(action)
            else:
                rest.append(action)
        often.sort(key=lambda action: OFTEN.index(action.dest))
        if not self._everything:
            own, often = [_brief(action, "Default: ") for action in own], [_brief(action) for action in often]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        sections = [
            ("environment and episodes", own),
            ("options of TRL that are often set", often),
            ("general", general),
        ]
        for title, actions in [*sections, *([("all other options of TRL", rest)] if self._everything else [])]:
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        more = "" if self._everything else f" --help_all shows {len(rest)} more options of TRL."
        formatter.add_text(f"{self.epilog or ''}{more}")
        return formatter.format_help()


def _brief(action: argparse.Action, *beginnings: str) -> argparse.Action:
    """Return the option with its help shortened to the first sentence and sentences with certain beginnings."""
    brief = copy.copy(action)
    first, *others = re.split(r"(?<=\.)\s", action.help or "")
    brief.help = " ".join([first, *(sentence for sentence in others if sentence.startswith(beginnings))])
    return brief


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser._everything = "--help_all" in self.option_strings  # type: ignore[attr-defined]
        parser.print_help()
        parser.exit()


def _own_fields(kind: type) -> list[str]:
    """Return the fields that this package or the user's algorithm declares, not TRL or transformers."""
    ours = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("trl", "transformers")]
    return [name for base in ours for name in inspect.get_annotations(base)]


def named_dataset(option: str, name: str, config: str | None, *, streaming: bool = False) -> Any:
    """Load the splits of the data set that an option names.

    Raises:
        ValueError: If it cannot be loaded.
    """
    try:
        return read_dataset(name, config, streaming=streaming)
    except (DatasetsError, OSError) as error:
        raise ValueError(
            f"{option}={name!r} cannot be loaded: {message(error)} Expected a Hub id, or a file or folder of JSON, CSV or "
            "Parquet files."
        ) from error


def check_output(folder: str | Path) -> None:
    """Check that files can be written to a folder, which is created if it does not exist.

    Raises:
        ValueError: If the folder cannot be written to.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"output_dir={str(folder)!r} cannot be written to: {message(error)}") from error


def json_object(text: str) -> dict[str, Any]:
    """Read the value of an option that takes a JSON object; a ``type`` of ``argparse``.

    Raises:
        argparse.ArgumentTypeError: If the text is anything else.
    """
    try:
        value = from_json(text, written=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{cut(repr(text))} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'expected a JSON object such as {{"level": "easy"}}, got {cut(repr(text))}')
    return value


def seed_number(text: str) -> int:
    """Read the value of an option that takes a seed; a ``type`` of ``argparse``.

    Raises:
        argparse.ArgumentTypeError: If the text is no whole number, or a negative one.
    """
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {cut(repr(text))}")
    return int(text)
