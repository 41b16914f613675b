"""Describes an option once, at its field: for ``--help``, for the docstring and for the tables in ``docs/``."""

from __future__ import annotations

import textwrap
from dataclasses import Field, field, fields
from typing import Any, TypeVar

T = TypeVar("T")


def option(default: Any, help: str) -> Any:
    """Make a dataclass field with a description.

    Args:
        default: The default; a list is copied for each instance.
        help: The description, in whole sentences. The last one, ``Default: ...``, explains a default of None.
    """
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": help})
    return field(default=default, metadata={"help": help})


def changed_default(parent: type, name: str, default: Any, why: str = "") -> Any:
    """Make a field of ``parent`` with another default.

    Args:
        parent: The dataclass that describes the option.
        name: The option's name.
        default: Its default in the subclass.
        why: A sentence about this default, added to the description.
    """
    return option(default, f"{description(parent, name)} {why}".strip())


def description(config: type, name: str) -> str:
    """Return the description of an option."""
    text: str = config.__dataclass_fields__[name].metadata["help"]  # type: ignore[attr-defined]
    return text


def default_of(option_field: Field[Any]) -> Any:
    """Return the default of a field."""
    return option_field.default_factory() if callable(option_field.default_factory) else option_field.default


def own_options(config: type) -> list[Field[Any]]:
    """List the fields that a dataclass declares itself, in their order."""
    known = {one.name: one for one in fields(config)}
    return [known[name] for name in config.__annotations__ if name in known]


def with_args(config: type[T]) -> type[T]:
    """Append the ``Args:`` section, made from the fields, to the docstring of a dataclass."""
    lines = [textwrap.fill(f"{one.name}: {one.metadata['help']}", 116, initial_indent="    ", subsequent_indent="        ")
             for one in own_options(config)]  # fmt: skip
    config.__doc__ = f"{textwrap.dedent('    ' + (config.__doc__ or '')).rstrip()}\n\nArgs:\n" + "\n".join(lines) + "\n"
    return config
