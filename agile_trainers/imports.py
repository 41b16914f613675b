"""Finds what the user names (``module.path:Name``, a folder), keeps imported code from side effects on the program, and the
user's code from errors of outputs that nothing reads any more."""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import os
import select
import stat
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any


class NotThereError(ValueError):
    """A name leads to nothing; the message says which part of it."""


def load_named(path: str) -> Any:
    """Import a class, a function or another attribute of a module.

    Args:
        path: ``module.path:Name``; the name may have dots.

    Raises:
        NotThereError: If there is no such module, or nothing of that name in it; the message names the nearest.
        ModuleNotFoundError: If the module needs another one that does not exist.
        ValueError: If the module's code raises an error.
    """
    module, _, name = path.partition(":")
    try:
        found: Any = import_named(module)
    except ModuleNotFoundError as error:
        # A library that the module itself needs is another matter, and its own error says what is missing.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise NotThereError(f"there is no module {error.name!r}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise NotThereError(f"{module} has no {name!r}{nearest(part, dir(found), cutoff=0.4)}")
        found = getattr(found, part)
    return found


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
    except BaseException as error:
        pass_on_interrupt(error)
        if isinstance(error, SyntaxError):
            file, line = error.filename, error.lineno
        else:
            last = traceback.extract_tb(error.__traceback__)[-1]
            file, line = last.filename, last.lineno
        raise ValueError(
            f"The module {module!r} cannot be imported: {type(error).__name__}: {error} ({file}, line {line}). "
            "Correct it, or name another module."
        ) from error


def unbound(function: Any) -> Any:
    """Return what a partial function calls, or the function itself."""
    while isinstance(function, partial):
        function = function.func
    return function


def find_model_folder(name: str, option: str) -> Path | None:
    """Return the folder of a model, or None for what may be a Hub id. No file is read.

    Args:
        name: A folder or Hub id, of a model or an adapter.
        option: Option that has the name, for the message.

    Raises:
        ValueError: If the name is a file, or the path of a folder that does not exist.
    """
    folder, expected = Path(name).expanduser(), "Expected a folder with config.json or adapter_config.json"
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{option}={name!r} is a file. {expected}, or a Hub id.")
    if name.startswith(("/", ".", "~")) or len(folder.parts) > 2:
        raise ValueError(f"There is no folder {option}={name!r}{nearest_folder(folder) or '.'} {expected}.")
    return None


def nearest_folder(folder: Path) -> str:
    """Return ``; did you mean X?`` with the folder of the nearest name beside one that does not exist."""
    beside = folder.parent.iterdir() if folder.parent.is_dir() else ()
    return nearest(folder.name, [one.name for one in beside if one.is_dir()], count=1)


def pass_on_interrupt(error: BaseException) -> None:
    """Raise an error of the user's code again if it is a Ctrl-C: a ``KeyboardInterrupt``, or a group that holds one.

    All other errors are the code's own. ``SystemExit``, ``GeneratorExit`` and groups of them are no ``Exception``, so that a
    handler of ``Exception`` would let them end the program. A ``KeyboardInterrupt`` that the code itself raises in the main
    thread cannot be told apart from the user's.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, BaseExceptionGroup) and error.subgroup(KeyboardInterrupt) is not None:
        raise error


@contextmanager
def exits_reported(what: str) -> Iterator[None]:
    """Raise a ``RuntimeError`` in the place of an exit of the user's code, which would end the program without a message.

    Args:
        what: Name of the code, at the beginning of the message.

    Raises:
        RuntimeError: For an error that is neither an ``Exception`` nor a Ctrl-C.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        pass_on_interrupt(error)
        raise RuntimeError(
            f"{what} raised {type(error).__name__}: {error}. Only the program that trains may exit: raise an error instead."
        ) from error


def nearest(name: object, names: Iterable[str], *, count: int = 3, cutoff: float = 0.6) -> str:
    """Return ``; did you mean X or Y?`` with the nearest known names for an unknown one; empty if none is near.

    Args:
        name: The unknown name.
        names: The known names.
        count: Largest number of names.
        cutoff: Least similarity, from 0 to 1.
    """
    found = difflib.get_close_matches(str(name), list(names), n=count, cutoff=cutoff)
    return f"; did you mean {' or '.join(found)}?" if found else ""


@contextmanager
def matplotlib_apart() -> Iterator[None]:
    """Keep matplotlib, if it is imported inside, from making its folders in the home folder.

    It writes a list of the fonts there when it is imported. A folder that exists, or that ``MPLCONFIGDIR`` names, is used.
    """
    places = (os.environ.get("XDG_CONFIG_HOME") or "~/.config") + "/matplotlib", "~/.matplotlib"
    its_own = any(os.path.isdir(os.path.expanduser(place)) for place in places)
    if its_own or "matplotlib" in sys.modules or "MPLCONFIGDIR" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="matplotlib-") as folder:
        os.environ["MPLCONFIGDIR"] = folder
        try:
            yield
            if "matplotlib" in sys.modules:
                importlib.import_module("matplotlib.font_manager")
        finally:
            os.environ.pop("MPLCONFIGDIR", None)


class _OutlivingWrite:
    """Writes to a file as it does itself, and leads it to nowhere once nothing reads it.

    Args:
        file: Below standard output or standard error.
    """

    lost = False
    """True once nothing reads the file."""

    def __init__(self, file: io.FileIO):
        self._file = file

    def __call__(self, data: Any) -> int | None:
        try:
            return io.FileIO.write(self._file, data)
        except OSError as error:
            gone = error.errno == errno.EIO and stat.S_ISCHR(os.fstat(self._file.fileno()).st_mode)  # the terminal
            if not gone and not isinstance(error, ConnectionError):
                raise
        self._lose()
        return len(data)

    def look(self) -> None:
        """Find out whether something reads the file, without writing to it."""
        if not self.lost:
            output = select.poll()
            output.register(self._file, 0)
            if any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0)):
                self._lose()

    def _lose(self) -> None:
        self.lost = True
        with suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._file.fileno())


def _files_of_outputs() -> dict[str, io.FileIO]:
    """Return the files below standard output and standard error, if they are of Python's own kind."""
    found = dict[str, io.FileIO]()
    for name in ("stdout", "stderr"):
        with suppress(AttributeError, OSError, ValueError):  # it is closed, or no file
            buffer = getattr(sys, name).buffer
            file = getattr(buffer, "raw", buffer)  # with PYTHONUNBUFFERED there is no buffer
            if type(file) is io.FileIO and not file.closed:
                found[name] = file
    return found


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Lead standard output and standard error to nowhere once nothing reads them any more (``| head``, a lost connection).

    Whatever prints inside the block goes on, in forks of the process too: an environment would fail, and the next row of a
    table would end training before the checkpoint of the stop.
    """
    made = [file for file in _files_of_outputs().values() if "write" not in vars(file)]
    for file in made:
        vars(file)["write"] = _OutlivingWrite(file)  # its buffer finds it here
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr) if made else ():
            with suppress(AttributeError, OSError, ValueError):
                stream.flush()
        is_unread()
        for file in made:
            vars(file).pop("write", None)


def is_unread() -> bool:
    """Look at the outputs that a block of :func:`outliving_readers` watches, also for programs that write to them.

    Returns:
        Whether nothing reads standard output any more.
    """
    writes = {name: vars(file).get("write") for name, file in _files_of_outputs().items()}
    for write in writes.values():
        if isinstance(write, _OutlivingWrite):
            write.look()
    return getattr(writes.get("stdout"), "lost", False)
