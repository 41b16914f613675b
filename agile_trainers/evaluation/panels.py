"""Panels: fixed episodes, named by a hash of their content, on which results of different people are compared as pairs."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from agile_trainers.adapters.folders import read_json
from agile_trainers.checkpoints.disclosure import masked
from agile_trainers.envs.agent import agent_of
from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.envs.checker import validate_reset
from agile_trainers.envs.libraries import LIBRARIES
from agile_trainers.envs.registry import make_environment_factory
from agile_trainers.evaluation.results import EpisodeResults, EpisodeStart, evaluation_episodes
from agile_trainers.imports import unbound
from agile_trainers.records.plain import content_digest
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.episode_options import EpisodeOptions
from agile_trainers.rollout.generators.base import SamplingSettings
from agile_trainers.rollout.seeds import HELD_OUT, preserved_random_state
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.types import StopReason

FORMAT = 1
SHIPPED = Path(__file__).with_name("panels.json")
"""Ready task to arguments and hash of its panel of ``SHIPPED_EPISODES``, from which the panel follows."""
SHIPPED_EPISODES = 200
_PARTS = ("observation", "information", "first step")
_OURS = "agile_"
"""Beginning of the names of our packages, whose version is no part of a panel: the source of a task is."""
_TASKS = (f"{_OURS}environments.", f"{_OURS}trainers.envs.questions.")
"""Beginnings of the names of our modules that are followed when a task imports them: other tasks, word lists and graders."""
_WHERE = ("environment_workers", "environment_processes", "max_environments", "training_chat_template")
SETTINGS = (
    "attempts",
    *(f.name for kind in (EpisodeOptions, SamplingSettings) for f in fields(kind) if f.name not in _WHERE),
    "history_source",
)
"""Settings that two results on a panel must share."""
_NAMED = ("use_vllm", "vllm_model_impl", "dtype", "trust_remote_code", "training_chat_template", "versions")
"""Settings that may differ, and are then named."""
_OF_ROWS = ("return", "success", "turns", "action_tokens", "stop_reason")
_OF_STARTS = tuple(one.name for one in fields(EpisodeStart) if one.name != "environment")


@dataclass(frozen=True)
class EpisodePanel:
    """The episodes of an environment, and hashes of all that decides what they are."""

    environment: str
    """The environment's id."""
    arguments: dict[str, Any]
    """Its arguments."""
    version: dict[str, str]
    """``class`` to its name, ``source of MODULE`` to its hash and ``version of DISTRIBUTION`` to it."""
    seed: int
    """Seed from which :attr:`seeds` follow."""
    seeds: list[int]
    """Seed of the environment in each episode."""
    rows: list[str] | None
    """Hash of the data set row of each episode; None without rows."""
    starts: list[str] | None
    """Hash of what the environment says at the start of each episode; None for an agent, which says nothing."""
    repeats: list[str]
    """Parts of the start that are hashed: those that were the same when each episode was begun again."""
    dataset: dict[str, Any] | None = None
    """Name, configuration and split of the data set; no part of :attr:`hash`, since the content of the rows is."""

    @property
    def hash(self) -> str:
        """The hash of the content, 32 hexadecimal digits."""
        return _hash({name: value for name, value in asdict(self).items() if name != "dataset"})

    @property
    def different_starts(self) -> int | None:
        """Number of starts that differ; None for an agent without rows."""
        told = self.starts if self.rows is None else list(zip(self.rows, self.starts or self.rows))
        return None if told is None else len(set(told))

    def to_dict(self) -> dict[str, Any]:
        """Return the panel as JSON-ready data."""
        return {"format": FORMAT, "panel": self.hash, **asdict(self)}


def make_panel(
    environment: str,
    episodes: int,
    *,
    seed: int = 42,
    arguments: Mapping[str, Any] | None = None,
    rows: Sequence[dict[str, Any]] | None = None,
    dataset: dict[str, Any] | None = None,
) -> EpisodePanel:
    """Make the panel of the episodes that ``evaluate_policy`` plays with the same seed, number and rows.

    Args:
        environment: Id of the environment.
        episodes: Number of episodes.
        seed: Seed from which those of the episodes follow.
        arguments: The environment's.
        rows: Rows for ``reset``, in order, again and again.
        dataset: Name, configuration and split of the data set that they were read from.

    Raises:
        ValueError: If the environment cannot be made or read, its arguments look like a secret, or a seed starts otherwise
            each time.
        ImportError: If a library that it needs is missing.
    """
    given = json.loads(json.dumps(dict(arguments or {})))
    if masked(given) != given:
        raise ValueError("environment_args has what looks like a secret, which a panel would publish. Let the environment "
                         "read it from an environment variable.")  # fmt: skip
    factory = make_environment_factory(environment, **given)
    specs = evaluation_episodes(seed, episodes, rows, domain=HELD_OUT)
    starts, repeats = None, list[str]()
    if agent_of(factory) is None:
        begun, again = _begin(factory, specs), _begin(factory, specs[::-1])[::-1]
        repeats = [name for n, name in enumerate(_PARTS) if all(a[n] == b[n] for a, b in zip(begun, again))]
        if _PARTS[0] not in repeats:
            place = next(n for n, (a, b) in enumerate(zip(begun, again)) if a[0] != b[0])
            raise ValueError(f"{environment} ignores its seed: seed {specs[place].seed} (episode {place}) started otherwise "
                             "when played again. Let reset(seed=...) decide the start.")  # fmt: skip
        starts = _starts(begun, repeats)
    return EpisodePanel(
        environment, given, _version(environment, factory), seed, [spec.seed for spec in specs], _row_hashes(specs), starts,
        repeats, dataset,
    )  # fmt: skip


def read_panel(source: str) -> EpisodePanel:
    """Read a panel's file, or make a shipped panel by the id of its environment.

    Raises:
        ValueError: If there is no such panel, the file was edited, or the ready task is not that of the release.
    """
    shipped = read_json(SHIPPED)
    if source in shipped:
        panel = make_panel(source, SHIPPED_EPISODES, arguments=shipped[source]["arguments"])
        if panel.hash != shipped[source]["panel"]:
            raise ValueError(
                f"{source} is not the task of this release: its panel has the hash {panel.hash}, not "
                f"{shipped[source]['panel']}. Install the release anew, or make a panel of your own."
            )
        return panel
    if not Path(source).is_file():
        raise ValueError(
            f"--panel {source}: no such file. `agile-trainers panel make` writes one; shipped: {', '.join(shipped)}."
        )
    return panel_of(read_json(Path(source)), source)


def panel_of(content: Mapping[str, Any], source: str) -> EpisodePanel:
    """Make a panel of the content of a file.

    Args:
        content: As :meth:`EpisodePanel.to_dict` returns it.
        source: Name of the file, for errors.

    Raises:
        ValueError: If it is no panel, or was edited after it was made.
    """
    names = [one.name for one in fields(EpisodePanel)]
    try:
        panel = EpisodePanel(**{name: content[name] for name in names})
        derived = [spec.seed for spec in evaluation_episodes(panel.seed, len(panel.seeds), domain=HELD_OUT)]
        columns = [one for one in (panel.rows, panel.starts) if one is not None]
        whole = content["format"] == FORMAT and all(len(one) == len(panel.seeds) for one in columns)
        found = panel.hash
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{source} is no panel ({error!r}); `agile-trainers panel make` writes one.") from error
    if not whole:
        raise ValueError(f"{source} is a panel of another format, or has columns of different length. Make it again.")
    if found != content["panel"]:
        raise ValueError(f"{source} was edited: its content has the hash {found}, and it says {content['panel']}. Get the "
                         "original, or make a panel of your own.")  # fmt: skip
    if (place := _first(panel.seeds, derived)) is not None:
        raise ValueError(f"{source}: seeds were chosen: episode {place} has {panel.seeds[place]}, seed={panel.seed} gives "
                         f"{derived[place]}. Make the panel with `agile-trainers panel make`.")  # fmt: skip
    return panel


def check_panel(panel: EpisodePanel, factory: EnvironmentFactory, rows: Sequence[dict[str, Any]] | None) -> None:
    """Check that the episodes that are about to be played are those of a panel.

    Raises:
        ValueError: If version, rows or starts differ; the message names the first difference.
    """
    version = _version(panel.environment, factory)
    for name in [*panel.version, *version]:
        if (before := panel.version.get(name)) != (now := version.get(name)):
            raise ValueError(
                f"The environment is not the panel's: the {name} was {before!r}, and is {now!r}. Install the panel's, or "
                "make a panel of this one."
            )
    if (rows is None) != (panel.rows is None):
        raise ValueError(f"The panel has {'rows' if rows is None else 'no rows'}: {'give' if rows is None else 'leave out'} "
                         "--dataset_name.")  # fmt: skip
    specs = evaluation_episodes(panel.seed, len(panel.seeds), rows, domain=HELD_OUT)
    hashes = _row_hashes(specs)
    if hashes is not None and panel.rows is not None and (place := _first(hashes, panel.rows)) is not None:
        moved = " All rows are there, in another order." if sorted(hashes) == sorted(panel.rows) else ""
        raise ValueError(f"The data set is not the panel's: the row of episode {place} has the hash {hashes[place]}, in the "
                         f"panel {panel.rows[place]}.{moved} Load the revision that the panel was made of.")  # fmt: skip
    begins = agent_of(factory) is None
    if begins != (panel.starts is not None) or begins != (_PARTS[0] in panel.repeats):
        raise ValueError("The panel was edited: it has hashes of the first observations, unless it is of an agent. Get the "
                         "original, or make a panel of your own.")  # fmt: skip
    check_starts(panel, factory, rows)


def check_starts(panel: EpisodePanel, factory: EnvironmentFactory, rows: Sequence[dict[str, Any]] | None) -> None:
    """Check that an environment begins the episodes of a panel as it did when the panel was made.

    Raises:
        ValueError: If an episode starts otherwise.
    """
    if panel.starts is not None:
        specs = evaluation_episodes(panel.seed, len(panel.seeds), rows, domain=HELD_OUT)
        starts = _starts(_begin(factory, specs), panel.repeats)
        if (place := _first(starts, panel.starts)) is not None:
            raise ValueError(f"Episode {place} (seed {panel.seeds[place]}) starts otherwise than in the panel, by its "
                             f"{', '.join(panel.repeats)}: the environment, or data or a library that it reads, changed."
                             " Restore them, or make a panel of this environment.")  # fmt: skip


def _begin(factory: EnvironmentFactory, specs: Sequence[EpisodeSpec]) -> list[tuple[str, ...]]:
    """Return hashes of the observation, the information and the first step of each episode, on one instance."""
    found, pool = [], EnvironmentPool(factory)
    try:
        with preserved_random_state():
            for spec in specs:
                pool.reset(0, spec.seed, deepcopy(spec.options))
                (outcome,) = pool.outcomes(block=True)
                if outcome.error is not None:
                    raise ValueError(f"reset(seed={spec.seed}) failed: {outcome.error!r}") from outcome.error
                observation, information = validate_reset(outcome.value)
                pool.step(0, "0")
                (outcome,) = pool.outcomes(block=True)
                step = repr(outcome.error) if outcome.error is not None else outcome.value
                found.append(tuple(content_digest(one, spec.seed) for one in (observation, information, step)))
                pool.release(0, reusable=outcome.error is None)
    finally:
        pool.close()
    return found


def _starts(begun: Sequence[tuple[str, ...]], repeats: Collection[str]) -> list[str]:
    return [_hash([one for name, one in zip(_PARTS, parts) if name in repeats])[:16] for parts in begun]


def _row_hashes(specs: Sequence[EpisodeSpec]) -> list[str] | None:
    found = [content_digest(spec.options, spec.seed) for spec in specs if spec.options is not None]
    return found or None


def _version(environment: str, factory: EnvironmentFactory) -> dict[str, str]:
    """Return the class of an environment, hashes of the sources of its classes' modules and of those that these import, and
    versions of distributions.

    Classes are those of the instance, of the environments that it holds, and of what all of these inherit from.

    Raises:
        ValueError: If the source of a module cannot be read.
    """
    function, agent = unbound(factory), agent_of(factory)
    made = unbound(factory() if agent is None else agent.solve)
    named = made if hasattr(made, "__qualname__") else type(made)
    modules = {one.__module__ for one in (function, named, *_classes(made))} - sys.stdlib_module_names
    if callable(close := getattr(made, "close", None)):
        close()
    version = {"class": f"{named.__module__}:{named.__qualname__}"}
    library = LIBRARIES.get(environment.partition(":")[0])
    tops = {name.partition(".")[0] for name in [*modules, *(library.packages if library else ())]}
    theirs = [top for top in tops if not top.startswith(_OURS)]
    for name in sorted({found for top in theirs for found in _distributions().get(top, [])}):
        version[f"version of {name}"] = importlib.metadata.version(name)
    return version | sources(modules)


def sources(modules: Iterable[str]) -> dict[str, str]:
    """Return ``source of MODULE`` to its hash, of modules and of those of the same project that they import.

    Raises:
        ValueError: If the source of a module cannot be read.
    """
    found = dict[str, bytes]()
    waiting = [(name, getattr(sys.modules.get(name), "__file__", None)) for name in modules]
    while waiting:
        name, file = waiting.pop()
        if file is None:
            raise ValueError(f"The source of {name} cannot be read, so that a panel cannot name its version. Put the class "
                             "into a file of its own.")  # fmt: skip
        if name not in found:
            found[name] = Path(file).read_bytes().replace(b"\r\n", b"\n")
            if Path(file).suffix == ".py":
                waiting += _imported(name, Path(file).resolve(), found[name])
    return {f"source of {name}": sha256(found[name]).hexdigest()[:32] for name in sorted(found)}


def _imported(name: str, file: Path, source: bytes) -> Iterator[tuple[str, Path]]:
    """Yield names and files of the modules that a module imports, also inside functions, and that are no installed library.

    They are read from the source, since what is loaded depends on what else the process did.
    """
    whole = file.name == "__init__.py"
    package, root = name if whole else name.rpartition(".")[0], file.parents[name.count(".") + whole]
    for node in ast.walk(ast.parse(source)):
        names = [one.name for one in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names = [base, *(f"{base}.{one}" for one in names)]
        for one in names:
            top, *rest = one.split(".")
            of_top = next(iter(getattr(sys.modules.get(top), "__path__", ())), root / top)
            folder = Path(of_top, *rest).resolve()
            path = next((it for it in (folder.with_suffix(".py"), folder / "__init__.py") if it.is_file()), None)
            installed = {"site-packages", "dist-packages"} & set(folder.parts) or not folder.is_relative_to(root)
            if path is not None and (one.startswith(_TASKS) if one.startswith(_OURS) else not installed):
                yield one, path


@cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()  # which reads the metadata of all that is installed


def _classes(made: Any) -> Iterator[type]:
    """Yield the classes of an environment, of those that it wraps, and their bases."""
    waiting, seen = [made], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield from (kind for kind in type(one).__mro__ if kind.__module__ != "builtins")
            held = list(getattr(one, "__dict__", {}).values())
            waiting += [each for each in held if hasattr(each, "reset") and hasattr(each, "step")]


def _first(found: Sequence[Any], expected: Sequence[Any]) -> int | None:
    """Return the first place at which two lists of equal length differ; None if they do not."""
    return next((n for n, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), None)


def _hash(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


# ------------------------------------------------------------------------------------------------------------ results


@dataclass(frozen=True)
class PanelResults:
    """A policy's results on a panel, as read from ``results.json``."""

    policy: str
    panel: EpisodePanel
    settings: dict[str, Any]
    """Limits, sampling settings and versions of the evaluation."""
    results: EpisodeResults
    """Their rows and starts; the trajectories are not in the file."""


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``results.json`` with its digest, which shows an edit but is no signature."""
    return {**content, "digest": _hash({name: value for name, value in content.items() if name != "digest"})}


def outcomes(results: EpisodeResults) -> dict[str, Any]:
    """Return the outcome of each episode as columns, JSON-ready; :func:`read_results` reads them."""
    columns = {name: [row[name] for row in results.rows] for name in _OF_ROWS}
    columns |= {name: [getattr(start, name) for start in results.starts] for name in _OF_STARTS}
    limits = results.ranges.get(None)
    return {"greedy": results.greedy, "return_range": None if limits is None else list(limits), **columns}


def read_results(path: Path) -> PanelResults:
    """Read the first policy's results of a file that ``eval --panel`` wrote.

    Raises:
        ValueError: If the file is none, was edited, or has other episodes than those of its panel.
    """
    content = read_json(path)
    if not isinstance(content.get("panel"), dict):
        raise ValueError(f"{path} is no result on a panel. Play one: `agile-trainers eval MODEL --panel FILE`.")
    if content.get("digest") != sealed(content)["digest"]:
        raise ValueError(
            f"{path} was edited after it was written: its digest is not that of its content. Play it again."
        )
    panel = panel_of(content["panel"], str(path))
    try:
        settings, policy = content["settings"], content["environments"][0]["policies"][0]
        columns, attempts = policy["outcomes"], settings["attempts"]
        keys = list(zip(columns["seed"], columns["row"], strict=True))
        of_panel = zip(panel.seeds, [None] * len(panel.seeds) if panel.rows is None else panel.rows)
        expected = [key for key in of_panel for _ in range(attempts)]
        if len(keys) != len(expected):
            raise ValueError(f"{len(keys)} episodes, of {len(expected)} that the panel has")
        if (place := _first(keys, expected)) is not None:
            raise ValueError(f"episode {place} is of (seed, row) {keys[place]}, and the panel's of {expected[place]}")
        numbers = range(len(keys))
        starts = [EpisodeStart(None, *(columns[name][n] for name in _OF_STARTS)) for n in numbers]
        rows = [{"environment": None, **{name: columns[name][n] for name in _OF_ROWS}} for n in numbers]
        for row in rows:
            StopReason(row["stop_reason"])
        ranges: dict[str | None, Any] = {None: columns["return_range"] and tuple(columns["return_range"])}
        results = EpisodeResults([], [], [], rows, starts, greedy=columns["greedy"], ranges=ranges)
        return PanelResults(policy["policy"], panel, settings, results)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"{path} has not the episodes of its panel: {error}. Play the panel again.") from error


def check_comparable(first: PanelResults, other: PanelResults, allowed: Collection[str] = ()) -> list[str]:
    """Check that two results are of one panel and were played in the same way.

    Args:
        first: Results of a policy.
        other: Those of another one.
        allowed: Names of ``SETTINGS`` that may differ.

    Returns:
        Sentences on what differs and was allowed, or may differ.

    Raises:
        ValueError: If anything else differs.
    """
    if unknown := [name for name in allowed if name not in SETTINGS or name == "attempts"]:
        raise ValueError(f"--allow_difference {unknown[0]}: expected any of {', '.join(SETTINGS[1:])}.")
    if first.panel.hash != other.panel.hash:
        parts = [one.name for one in fields(EpisodePanel) if one.name != "dataset"]
        apart = [name for name in parts if getattr(first.panel, name) != getattr(other.panel, name)]
        raise ValueError(f"{first.policy} and {other.policy} were not played on one panel, but on {first.panel.hash} and "
                         f"{other.panel.hash}, which differ in: {', '.join(apart)}. Play both on one.")  # fmt: skip

    def differing(names: Collection[str]) -> dict[str, str]:
        pairs = {name: (first.settings.get(name), other.settings.get(name)) for name in names}
        return {name: f"{name}={a!r} and {name}={b!r}" for name, (a, b) in pairs.items() if a != b}

    found = differing(SETTINGS)
    if refused := [said for name, said in found.items() if name not in allowed]:
        raise ValueError(f"{first.policy} and {other.policy} were not played in the same way: {'; '.join(refused)}. Play "
                         "both with the same options, or compare them as they are with --allow_difference and the names of "
                         "options that are part of a policy; attempts must be equal.")  # fmt: skip
    both = f"{first.policy} and {other.policy}"
    notes = [f"{both} were played differently: {one}." for one in [*found.values(), *differing(_NAMED).values()]]
    pairs = list(zip(first.results.starts, other.results.starts, strict=True))
    if all(one.played == its.played for one, its in pairs):
        notes.append(f"{both} said the same in every episode: they may be one policy.")
    if prompts := sum(one.prompt != its.prompt for one, its in pairs):
        notes.append(f"{both} began {prompts} of {len(pairs)} episodes with different tokens: their tokenizers or chat "
                     "templates differ, or what the environment said.")  # fmt: skip
    return notes
