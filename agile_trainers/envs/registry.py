"""Resolves the id of an environment to a factory.

An id is one of:

- ``gem:<game>``: a GEM environment, for example ``gem:game:GuessTheNumber-v0-easy``;
- ``reasoning_gym:<name>``: a data set of reasoning-gym, for example ``reasoning_gym:chain_sum``;
- ``textarena:<game>``, ``gymnasium:<id>``, ``openenv:<url>``, ``trl:<module.path:Name>``, ``verifiers:<task set>``: see the
  modules of those names in ``libraries``, for example ``textarena:GuessTheNumber-v0``;
- ``agile:<name>``: a ready task of ``agile_environments``, or a probe, ``agile:probe/<name>``;
- a name given to :func:`register_environment`;
- ``agent:module.path:function``: an agent, which is a function of ``(model, task)``, an
  :class:`~agile_trainers.envs.agent.Agent`, or a function that makes one of these; arguments are the function's keyword
  arguments;
- ``module.path:Name``: any importable class or function that makes an environment.
"""

from __future__ import annotations

import difflib
import dis
import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, cast

from agile_trainers.envs.agent import Agent, CommandAgent
from agile_trainers.envs.base import EnvironmentFactory, call_error, check_no_text_for_booleans
from agile_trainers.envs.libraries import LIBRARIES
from agile_trainers.imports import NotThereError, load_named, nearest, unbound
from agile_trainers.records.plain import stable_json

_NAME = re.compile(r"\w[\w.-]*")
"""Names of several environments, which become part of metrics' names."""
_registered: dict[str, Callable[..., Any]] = {}


def register_environment(name: str, factory: Callable[..., Any]) -> None:
    """Register a factory under a name for :func:`make_environment_factory` and the command line.

    Args:
        name: The id, without colons, which mark the other kinds of ids.
        factory: A class or function that makes an environment; it may take keyword arguments.

    Raises:
        ValueError: If the name contains a colon or belongs to another factory.
    """
    if not name or ":" in name:
        raise ValueError(f"An environment's name must be non-empty and contain no colon, got {name!r}.")
    if _registered.get(name, factory) is not factory:
        raise ValueError(f"An environment named {name!r} is registered already: {unbound(_registered[name])!r}.")
    _registered[name] = factory


def list_environments() -> list[str]:
    """List the ids of all registered environments, tasks, probes and installed libraries' environments.

    Agents and classes of your own (``agent:module.path:function``, ``module.path:Name``) are not listed.
    """
    theirs = [f"{prefix}:{name}" for prefix, it in LIBRARIES.items() if it.is_installed for name in it.listed()]
    return sorted([*_registered, *(f"agile:{name}" for name in _tasks()), *theirs])


def make_environment_factory(environment: str | Callable[..., Any], **kwargs: Any) -> EnvironmentFactory:
    """Make a zero-argument factory for an environment.

    Args:
        environment: An id (see the module's docstring), or a class or function that makes an environment. A factory
            without ``kwargs`` is returned as it is.
        kwargs: Arguments of the environment.

    Raises:
        ValueError: If the id is unknown (the message names the nearest ones), ``environment`` is an instance, or the
            environment cannot be made from ``kwargs`` alone.
        ImportError: If the library behind the id is not installed (the message names the command that installs it).
    """
    if not isinstance(environment, str):
        return _bind(environment, kwargs, repr(unbound(environment)))
    made = IdentifiedFactory(_find(environment, kwargs))
    made.id, made.arguments = environment, kwargs
    return made


def environment_factories(
    environment: Any, arguments: Mapping[str, Any] | None = None
) -> EnvironmentFactory | dict[str, EnvironmentFactory]:
    """The factory of an environment, or those of several by name.

    Args:
        environment: An id or factory, or several by name.
        arguments: Keyword arguments of the environment; of several, those of each by its name.

    Raises:
        ValueError: For no environment, a name that cannot be part of a metric's, or what cannot be made.
        ImportError: If a library that one of them needs is missing.
    """
    arguments = arguments or {}
    if not isinstance(environment, Mapping):
        return make_environment_factory(environment, **arguments)
    if not environment:
        raise ValueError("environment is an empty mapping. Name at least one environment, or pass an id or a factory.")
    for name in environment:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"environment: the name {name!r} becomes part of metrics' names. Expected letters, digits and any of "
                "`_.-`, a letter or digit first."
            )
    unknown = [name for name in arguments if name not in environment]
    if unknown:
        raise ValueError(
            f"environment_args names {unknown[0]!r}, which is none of the environments {', '.join(environment)}. With "
            "several environments it gives the arguments of each by its name."
        )
    factories = {}
    for name, one in environment.items():
        given = arguments.get(name) or {}
        if not isinstance(given, Mapping):
            raise ValueError(
                f"environment_args[{name!r}] must be a mapping of names to values, got a {type(given).__name__}."
            )
        try:
            factories[name] = make_environment_factory(one, **given)
        except (ValueError, ImportError) as error:
            raise type(error)(f"environment {name!r}: {error}") from error
    return factories


class IdentifiedFactory(functools.partial):
    """A factory with the id and the arguments that it was made from."""

    id: str
    arguments: dict[str, Any]


def describe_environment(environment: Any) -> dict[str, Any]:
    """Describe an environment in JSON so that different environments have different descriptions.

    Args:
        environment: An id, a factory of :func:`make_environment_factory`, any other factory, or several by name.

    Returns:
        ``environment``: the id, or the name of the class or function. ``environment_arguments``: its arguments; for a
        function, a digest of its constants and of its closure variables. Several environments are written
        ``"name=environment, ..."``, with arguments by name.
    """
    if isinstance(environment, Mapping):
        each = {name: describe_environment(one) for name, one in environment.items()}
        return {
            "environment": ", ".join(f"{name}={one['environment']}" for name, one in each.items()),
            "environment_arguments": {name: one["environment_arguments"] for name, one in each.items()},
        }
    arguments: dict[str, Any] = {}
    if isinstance(environment, str):
        return _identified(environment, arguments)
    while isinstance(environment, functools.partial | Agent):
        if isinstance(environment, IdentifiedFactory):
            return _identified(environment.id, environment.arguments | arguments)
        if isinstance(environment, Agent):
            environment = environment.solve
            continue
        arguments = {**{str(i): value for i, value in enumerate(environment.args)}, **environment.keywords, **arguments}
        environment = environment.func
    if isinstance(environment, CommandAgent):
        return {"environment": environment.__name__, "environment_arguments": {"command": environment.command}}
    if inspect.isfunction(environment):
        cells = [cell.cell_contents for cell in environment.__closure__ or ()]
        code = environment.__code__
        # From Python 3.14 on, small numbers are in the instructions alone.
        small = [one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_SMALL_INT"]
        seen = [[*code.co_consts, *small], code.co_names, cells, environment.__defaults__]
        arguments["code"] = hashlib.sha256(json.dumps(stable_json(seen)).encode()).hexdigest()[:16]
    name = getattr(environment, "__qualname__", None)
    return {"environment": name or type(environment).__qualname__, "environment_arguments": stable_json(arguments)}


def _identified(identity: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the environment of an id; an address in it (``openenv:http://...``) is an argument, which may hold a key."""
    library, _, address = identity.partition(":")
    if "://" in identity:
        identity, arguments = library, {"address": address, **arguments}
    return {"environment": identity, "environment_arguments": stable_json(dict(arguments))}


def _named(kwargs: Mapping[str, Any]) -> str:
    """Name arguments without their values, for an error message, which logs keep."""
    return f"the arguments {', '.join(kwargs)}" if kwargs else "no arguments"


def _find(environment: str, kwargs: dict[str, Any]) -> EnvironmentFactory:
    source, _, name = environment.partition(":")
    if source in LIBRARIES:
        if not LIBRARIES[source].knows(name):
            raise _unknown(environment)
        check_no_text_for_booleans(kwargs, environment)
        try:
            return LIBRARIES[source].adapter.make_factory(name, **kwargs)
        except TypeError as error:
            raise ValueError(f"{environment} cannot be made from {_named(kwargs)}: {error}") from error
    if source == "agile":
        if name not in _tasks():
            raise _unknown(environment)
        return _bind(_load(_tasks()[name]), kwargs, environment)
    if source == "agent":
        if ":" not in name:
            raise ValueError(f"{environment!r} names no agent; expected agent:module.path:function.")
        return cast(EnvironmentFactory, _agent(_load(name, environment), kwargs, environment))
    if environment in _registered:
        return _bind(_registered[environment], kwargs, environment)
    if source and name:
        return _bind(_load(environment), kwargs, environment)
    raise _unknown(environment)


def _tasks() -> dict[str, str]:
    from agile_environments import TASKS
    from agile_environments.probes import PROBES

    probes = {f"probe/{name}": f"agile_environments.probes:{probe.factory.__name__}" for name, probe in PROBES.items()}
    return {**TASKS, **probes}


def _load(path: str, environment: str | None = None) -> Any:
    try:
        return load_named(path)
    except NotThereError as error:
        raise _unknown(environment or path, str(error)) from error


def _agent(found: Any, kwargs: dict[str, Any], name: str) -> Agent:
    """Make an agent of one, of a function that is one, or of a class or function that makes one of these."""
    if isinstance(found, Agent):
        return found.with_arguments(**kwargs)
    if callable(found) and not inspect.isclass(found) and call_error(found, "model", "task", **kwargs) is None:
        return Agent(found).with_arguments(**kwargs)
    made = found(**kwargs) if callable(found) and call_error(found, **kwargs) is None else None
    if isinstance(made, Agent):
        return made
    if not callable(made) or call_error(made, "model", "task") is not None:
        kind = f"its signature is {inspect.signature(found)}" if callable(found) else f"it is a {type(found).__name__}"
        raise ValueError(
            f"{name} is no agent, given {_named(kwargs)}: {kind}. An agent is a function of (model, task), an Agent, or a "
            "class or function that makes one of these. Environment arguments are its keyword arguments."
        )
    return Agent(made)


def _bind(make: Any, kwargs: dict[str, Any], name: str) -> EnvironmentFactory:
    if isinstance(make, Agent):
        return cast(EnvironmentFactory, make.with_arguments(**kwargs))
    kind, made = type(make).__name__, hasattr(make, "reset") and not isinstance(make, (type, ModuleType))
    if made and (hasattr(make, "step") or not callable(make)):
        raise ValueError(
            f"{name} is an environment instance; every episode has one of its own. Pass the class {kind}, a function "
            f"without arguments that makes it, or trl_environment({kind}) if its methods are tools of TRL's "
            "environment_factory."
        )
    if not callable(make):
        raise ValueError(
            f"{name} ({kind}) is neither an environment id nor a callable that makes one. Pass an id such as "
            "'agile:guess_number', a class, a function without arguments, or a dict of these by name."
        )
    if (error := call_error(make, **kwargs)) is not None:
        agent = " Pass an agent's function as Agent(function), or by the id agent:module.path:function."
        raise ValueError(
            f"{name} cannot be made from {_named(kwargs)}: {error}. Its signature is {inspect.signature(make)}. Pass its "
            "arguments as environment arguments, or pass a function without arguments that makes an instance."
            f"{agent if call_error(make, 'model', 'task', **kwargs) is None else ''}"
        ) from error
    return functools.partial(make, **kwargs) if kwargs else make


def _ids_near(environment: str) -> list[str]:
    """List the ids of the library that an id names, or nearly names; all if it names none, which imports every library."""
    source, colon, _ = environment.partition(":")
    if source == "agent":
        return []
    known = [*LIBRARIES, "agile"]
    named = source if source in known else next(iter(difflib.get_close_matches(source, known, 1)), None)
    if named in LIBRARIES:
        library = LIBRARIES[named]
        return [f"{named}:{name}" for name in library.listed()] if library.is_installed else []
    agile = [*(f"agile:{name}" for name in _tasks()), *_registered]
    return agile if named == "agile" or colon else list_environments()


def _unknown(environment: str, reason: str | None = None) -> ValueError:
    ids = _ids_near(environment)
    near = nearest(environment, ids, cutoff=0.7) or nearest(environment, ids, count=1, cutoff=0.4) or "."
    because = f" ({reason})" if reason else ""
    prefix = "agent:" if environment.startswith("agent:") else ""
    module, _, attribute = environment.removeprefix(prefix).partition(":")
    if module.endswith(".py") and attribute:
        path = ".".join(part for part in module.removesuffix(".py").split("/") if part not in ("", "."))
        because += (
            f". A file is named as a module, without .py: '{prefix}{path}:{attribute}', from the folder that it is in, "
            "or with that folder in PYTHONPATH"
        )
    return ValueError(
        f"Unknown environment {environment!r}{because}{near} An environment is an id, 'module.path:Name', "
        "'agent:module.path:function' or a factory; `agile-trainers envs` lists the ids."
    )
