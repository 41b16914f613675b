"""Imports modules that the user names: environments, reward functions, data sets."""

from __future__ import annotations

import importlib
import traceback
from types import ModuleType


def import_named(module: str) -> ModuleType:
    """Import a module.

    Args:
        module: Dotted name of the module.

    Raises:
        ModuleNotFoundError: If the module, or one that it imports, does not exist.
        ValueError: If the module's code raises another exception or exits. The message gives the exception and the line.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError):
            file, line = error.filename, error.lineno
        else:
            last = traceback.extract_tb(error.__traceback__)[-1]
            file, line = last.filename, last.lineno
        raise ValueError(
            f"The module {module!r} cannot be imported: {type(error).__name__}: {error} ({file}, line {line}). "
            "Correct it, or name another module."
        ) from error
