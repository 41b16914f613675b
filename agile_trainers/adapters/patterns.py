"""Tries the regular expressions of a saved adapter on the names of a model's modules, in a process with a time limit.

PEFT matches ``target_modules``, ``exclude_modules`` and the like against the name of every module. Python's ``re`` tries the
ways to match one after another: with an expression such as ``(.+)+!`` in another person's ``adapter_config.json``, their
number doubles with each character of a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peft import LoraConfig
from torch import nn

from agile_trainers.adapters.limited import why_it_fails

_NAME = re.compile(r"[\w.\-]*")
"""Names, which match in linear time whatever they are put into."""
_CHILD = """
import re
for name, method, pattern in given["patterns"]:
    try:
        match = getattr(re.compile(pattern), method)
        for module in given["modules"]:
            match(module)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        sys.exit(f"{name} is no regular expression: {error}")
"""


def check_patterns(config: LoraConfig, model: nn.Module, folder: Path) -> None:
    """Reject a saved adapter whose regular expressions are wrong, or too slow on a model.

    An adapter that names its modules in lists, or takes ``"all-linear"``, is accepted at once. Others start a process.

    Args:
        config: The adapter's configuration, as it was read.
        model: The model that it is to be put on.
        folder: The adapter's folder, for the error.

    Raises:
        ValueError: If an expression is not valid, or 10 seconds of processor time do not suffice.
    """
    patterns = list(expressions(config))
    if not patterns:
        return
    modules = [name for name, _ in model.named_modules()]
    if why := why_it_fails(_CHILD, patterns=patterns, modules=modules):
        names = ", ".join(dict.fromkeys(name for name, *_ in patterns))
        raise ValueError(
            f"{folder} is not loaded: the regular expressions in its adapter_config.json ({names}) cannot be used: {why}. "
            "Put the names of the modules there, as a list."
        )


def expressions(config: LoraConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the expressions that are more than names, as PEFT gives them to ``re``: field, method and expression."""
    tied = config.target_modules if config.ensure_weight_tying else None
    layers = _text(config.layers_pattern) or config.layers_pattern
    for name, values, method, form in (
        ("target_modules", _text(config.target_modules), "fullmatch", "{}"),
        ("exclude_modules", _text(config.exclude_modules), "fullmatch", "{}"),
        ("target_modules", tied, "match", r"(^|.*\.){}($|\..*)"),
        ("modules_to_save", config.modules_to_save, "match", r"(^|.*\.){}($|\..*)"),
        ("layers_pattern", layers, "match", r"(?:^|.*?\.){}\.(?P<idx>\d+)\."),
        ("rank_pattern", config.rank_pattern, "match", r"(.*\.)?({})$"),
        ("alpha_pattern", config.alpha_pattern, "match", r"(.*\.)?({})$"),
    ):
        for value in [values] if isinstance(values, str) else values or ():
            if not _NAME.fullmatch(value):
                yield name, method, form.replace("{}", value)


def _text(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else []
