"""Finds mistakes in options, inputs and files of chains before PyTorch and TRL are imported, which takes seconds.

Option names and numbers are read from the sources of the configurations, without running them. Nothing is accepted here:
what passes is checked again, and in full, by the command's own parser.
"""

from __future__ import annotations

import argparse
import ast
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agile_trainers.cli import OWN_MODULES
from agile_trainers.cli.errors import cut, message
from agile_trainers.cli.yaml_files import YAMLFileError, naming_place, read_yaml
from agile_trainers.config.other_names import OTHER_NAMES, meant
from agile_trainers.envs.libraries import LIBRARIES
from agile_trainers.envs.registry import environment_factories
from agile_trainers.imports import find_model_folder, nearest
from agile_trainers.records.plain import from_json
from agile_trainers.trainers.registry import ALGORITHMS

_OPTIONS = {
    "transformers": ("training_args",),
    "trl": (
        "trainer/base_config",
        "trainer/grpo_config",
        "trainer/sft_config",
        "trainer/dpo_config",
        "trainer/model_config",
        "scripts/utils",
        "scripts/grpo",
    ),
    "accelerate": ("commands/launch",),
    "agile_trainers": ("config/multi_turn", "cli/train", "cli/check/command", "cli/parser"),
}
"""Package to the files whose classes and parsers have the options of training."""
_ROOT = Path(__file__).parents[1]
_MORE = ("--accelerate_config", "--debug", "--model")
_NUMBERS = {"int": (int, "a whole number"), "float": (float, "a number")}
_COUNTS = ("num_processes", "num_machines")
"""Options of ``accelerate launch`` that are 1 or more."""
_OF_PODS = "env"
"""An option of ``accelerate launch`` for pods of TPUs, which nobody means who trains on an environment."""
_MODELS = ("--model_name_or_path", "--model", "--against")


def check_early(command: str, arguments: Sequence[str]) -> None:
    """Check files, folders, the environment's id, and names and numbers of options.

    Args:
        command: The command.
        arguments: Its options.

    Raises:
        ValueError: For the first mistake.
        ImportError: If the environment's module needs another one that does not exist.
    """
    if {"-h", "--help", "--help_all", "--help-all"} & set(arguments):
        return
    given = _values(arguments)
    content = _read_file(command, given)
    options = {**_file_options(content), **given}
    if command in ALGORITHMS or (command == "check" and _is_ours(arguments)):
        _check_options({**{f"--{name}": [value] for name, value in content.items()}, **given})
    if command in ALGORITHMS:
        names = {option[2:].replace("-", "_") for option in given} | content.keys()
        for needed in ("model_name_or_path", *ALGORITHMS[command].needs):
            if not any(needed.startswith(name) for name in names if name):  # argparse takes the beginning of a name
                raise ValueError(missing(needed, command))
    if command in OWN_MODULES and command not in ("check", "eval"):  # whose parsers have other options too
        file = OWN_MODULES[command].replace(".", "/")
        known = [f"--{name}" for name, _ in _options_in("agile_trainers", f"cli/{file}")]
        for option in given:
            if not any(one.startswith(option.replace("-", "_").replace("__", "--", 1)) for one in known):
                raise ValueError(f"there is no option {option}{nearest(option, known, count=1) or '.'}")
    if command in ("chain", "evolve"):
        files = [argument for argument in arguments if argument.endswith((".yaml", ".yml"))]
        content = read_yaml(files[0]) if files else {}
        if command == "chain" and files:
            with naming_place(files[0]):
                check_needed_keys(content)
                check_stage_keys(content, _options_of_training())
        return
    if command == "check":  # its report lists what cannot be found, with everything else
        return
    for option in _MODELS:
        for name in given.get(option, []):
            find_model_folder(name, option if option != "--model_name_or_path" else "model_name_or_path")
    if command == "eval":
        if arguments and not arguments[0].startswith("-"):
            find_model_folder(arguments[0], "MODEL")
        if not given.keys() & {"--environment", "--panel", "--compare"}:
            raise ValueError(
                "--environment is missing: the id of an environment to play, such as agile:guess_number, or --panel."
            )
    _check_environments(command, options)
    for folder in given.get("--output_dir", [])[:1]:
        check_output(folder)


def _values(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each option, which end at the next option."""
    found: dict[str, list[str]] = {}
    option = ""
    for argument in arguments:
        if argument.startswith("--"):
            option, equals, value = argument.partition("=")
            found.setdefault(option, []).extend([value] if equals else [])
        elif option:
            found[option].append(argument)
    return found


def _read_file(command: str, given: Mapping[str, list[str]]) -> dict[str, Any]:
    """Read the ``--config`` file; empty without one."""
    if "--config" not in given or command in ("chain", "evolve") or len(given["--config"]) != 1:
        return {}
    return read_yaml(given["--config"][0])


def _file_options(file: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the environment that a file names, if that is one id."""
    environment = file.get("environment")
    # With arguments in the file, the command's own parser makes the environment.
    return {"--environment": [environment]} if isinstance(environment, str) and "environment_args" not in file else {}


def _check_environments(command: str, options: Mapping[str, list[str]]) -> None:
    """Make the environments of ids that need no library, as the command does later."""
    try:
        arguments = environment_arguments((options.get("--environment_args") or ["{}"])[0])
    except ValueError:
        if command in ALGORITHMS:
            raise
        return  # the command's own parser says it, as it does of other values
    if not isinstance(arguments, dict):
        return
    ids = options.get("--environment", [])
    for name in ids if len(ids) == 1 or not arguments else []:
        if not name.startswith("{") and name.partition(":")[0] not in LIBRARIES:
            environment_factories(name, arguments)


def _is_ours(arguments: Sequence[str]) -> bool:
    return not arguments or arguments[0].startswith("-") or arguments[0] in ALGORITHMS


def _check_options(given: Mapping[str, list[Any]]) -> None:
    """Check names of options, and the values of those that are numbers."""
    known = _options_of_training()
    # An older or newer version may keep its options elsewhere; then the command's own parser decides.
    if not {"max_turns", "learning_rate", "num_generations", "num_processes"} <= known.keys():
        return
    for option, values in given.items():
        name = option[2:].replace("-", "_")
        name = name.removeprefix("no_") if name not in known else name
        if f"--{name}" in ("--config", *_MORE):
            continue
        # argparse takes the beginning of a name, if it is of one only.
        begun = [one for one in known if one.startswith(name)]
        elsewhere = name == _OF_PODS or (name in OTHER_NAMES and name not in known and len(begun) > 1)
        if not begun or elsewhere:
            near = meant(option, [f"--{one}" for one in known], count=1)
            raise ValueError(f"there is no option {option}{near or '.'}")
        kind = _NUMBERS.get(known.get(name, ""))
        for value in values[:1]:
            if kind and isinstance(value, str):
                _check_number(option, value, *kind)
            if name in _COUNTS and str(value).lstrip("-").isdigit() and int(value) < 1:
                raise ValueError(f"{option} must be at least 1, got {value}.")


def _check_number(option: str, value: str, kind: type, expected: str) -> None:
    try:
        kind(value)
    except ValueError as error:
        raise ValueError(f"{option} must be {expected} ({kind.__name__}), got {value!r}.") from error


def _options_of_training() -> dict[str, str]:
    """Return the options of training and launching by name, with ``int`` or ``float`` for those that are numbers."""
    files = [(package, file) for package, names in _OPTIONS.items() for file in names]
    files += [("agile_trainers", f"algorithms/{path.stem}") for path in (_ROOT / "algorithms").glob("*.py")]
    return {name: kind for package, file in files for name, kind in _options_in(package, file)}


def _options_in(package: str, file: str) -> Iterator[tuple[str, str]]:
    spec = find_spec(package)
    path = Path(spec.origin or "").parent / f"{file}.py" if spec else Path()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else ():
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id, ast.unparse(field.annotation).removesuffix(" | None").removeprefix("None | ")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for name in node.args:
                if isinstance(name, ast.Constant) and str(name.value).startswith("--"):
                    yield str(name.value)[2:].replace("-", "_"), ""


# ------------------------------------------------------------------------------------------------------ files of chains


SUPERVISED = ("sft", "dpo")
"""Algorithms of stages with TRL's trainers, which need a data set."""
STAGE_KEYS = ("algorithm", "name", "dataset", "dataset_args", "lora", "merge_lora_configs")
EVOLVE = "evolve"
"""Key of a stage that is a population."""


def check_needed_keys(content: Mapping[str, Any]) -> None:
    """Check that a file has what every chain needs.

    Raises:
        YAMLFileError: If something is missing.
    """
    for name in ("output_dir", "model", "environment", "stages"):
        if not content.get(name):
            raise YAMLFileError(f"`{name}` is missing.")
    if not isinstance(content["stages"], list):
        raise YAMLFileError(f"`stages` must be a list, got {content['stages']!r}.")


def check_stage_keys(content: Mapping[str, Any], options: Collection[str]) -> None:
    """Check the keys of stages that no stage could have, and the data sets that are missing.

    Args:
        content: The file.
        options: Names of the options of all algorithms.

    Raises:
        YAMLFileError: For the first mistake.
    """
    known = [*STAGE_KEYS, *options]
    for stage in content["stages"]:
        if not isinstance(stage, dict) or EVOLVE in stage or ":" in str(stage.get("algorithm")):
            continue
        where = f"stage {str(stage.get('name', stage.get('algorithm')))!r}"
        for key in stage:
            if key not in known:
                raise YAMLFileError(f"{where} knows no {key!r}{meant(key, known) or '.'}")
        if stage.get("algorithm") in SUPERVISED:
            check_has_dataset(stage, where)


def check_has_dataset(stage: Mapping[str, Any], where: str) -> None:
    """Check that a supervised stage has a data set.

    Raises:
        YAMLFileError: If it has none.
    """
    if stage.get("dataset") is None:
        raise YAMLFileError(f"{where}: `dataset` is missing; {stage['algorithm']} trains on one.")


# -------------------------------------------------------------------------------------------------- inputs of a command


_MISSING = {
    "model_name_or_path": "the Hub id or folder of the model to train.",
    "environment": "{0} trains on an environment's episodes, not on a data set alone.",
    "teacher": "{0} trains on a teacher alone: the folder or Hub id of an adapter or a model.",
    "use_peft": "{0} trains policy and critic as two LoRA adapters on one base. Add --use_peft, and --lora_target_modules "
    "all-linear to adapt every linear layer.",
}
"""Option that is needed to the reason."""


def missing(option: str, algorithm: str) -> str:
    """Return the error of an option that a command needs and was not given.

    Args:
        option: ``model_name_or_path``, ``environment``, ``teacher`` or ``use_peft``.
        algorithm: The command.
    """
    return f"--{option} is missing: {_MISSING[option].format(algorithm)}"


def environment_arguments(text: str) -> Any:
    """Read ``environment_args``, given as text.

    Raises:
        ValueError: If it is not JSON.
    """
    try:
        return from_json(text, written=True)
    except ValueError as error:
        raise ValueError(
            f'environment_args must be a JSON object such as \'{{"level": "easy"}}\', got {len(text)} characters that are '
            f"none: {error}."
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
