"""``agile-trainers eval``: plays the episodes of one or several policies and compares them."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from logging import WARNING, getLogger, lastResort, root
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import disable_progress_bars
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from transformers.utils import logging

from agile_trainers.adapters.folders import RECORD, read_json, write_json
from agile_trainers.adapters.loading import check_model
from agile_trainers.checkpoints.disclosure import masked, public_options, withheld_values
from agile_trainers.checkpoints.model_card import add_results, check_card
from agile_trainers.cli.eval.report import EnvironmentReport, Played, card_results, compare_files, show
from agile_trainers.cli.parser import check_output, json_object, named_dataset, seed_number
from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.envs.context import as_history
from agile_trainers.envs.registry import make_environment_factory
from agile_trainers.evaluation import (
    EpisodeOptions,
    EpisodeResults,
    SamplingSettings,
    VllmSampler,
    evaluate_policy,
)
from agile_trainers.evaluation.comparison import common_measure, compare_measures, corrected
from agile_trainers.evaluation.modules import REFERENCE, compute_metrics, lacks_reference, load_metrics
from agile_trainers.evaluation.panels import EpisodePanel, check_panel, check_starts, read_panel, sealed, sources
from agile_trainers.evaluation.policy import check_evaluation, is_quantized, load_model, load_shapes, recorded_settings
from agile_trainers.evaluation.results import reported_together
from agile_trainers.imports import nearest
from agile_trainers.monitor.progress import BAR
from agile_trainers.records.writer import RecordWriter, episode_row, new_run_id
from agile_trainers.rollout.episode_options import LIMITS
from agile_trainers.rollout.seeds import COLUMN
from agile_trainers.types import Trajectory

logger = logging.get_logger(__name__)

_ABOUT = (
    "Plays episodes with a policy, and compares it with others that play the same episodes. MODEL is the folder or Hub id "
    "of a model, a checkpoint or a LoRA adapter. Limits and sampling that are not given are those that it was trained with, "
    "if its folder records them, else the defaults."
)
_JSON = ("chat_template_kwargs", "environment_limits")
_EPISODES = 500
_SAMPLING = tuple(one.name for one in fields(SamplingSettings) if one.name not in ("do_sample", "stop_strings"))
"""Sampling settings that are numbers."""

_NO_ANSWER = (
    "An episode of %s has no right answer %r in its data set row or the environment's information: --metric will have no "
    "values there. Name the right answer with --reference."
)


@dataclass(frozen=True)
class EvaluationTask:
    """An environment, its rows and the limits of its episodes."""

    environment: str
    factory: EnvironmentFactory
    rows: list[dict[str, Any]] | None
    episodes: int
    options: EpisodeOptions


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of ``agile-trainers eval``. Options that it shares with training have the same names."""
    usage = (
        "agile-trainers eval MODEL --environment ID [--against MODEL ...] [options], or MODEL --panel FILE [options], or "
        "--compare RESULTS RESULTS [...]"
    )
    parser = argparse.ArgumentParser(prog="agile-trainers eval", usage=usage, description=_ABOUT, allow_abbrev=False)
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="folder or Hub id of the policy")
    add("--against", nargs="+", default=[], metavar="MODEL", help="policies that it is compared with")
    add("--measure", choices=("success", "return"), help="measure of the comparison; where the other one says "
        "otherwise, both are shown (default: success if it is reported)")  # fmt: skip
    add("--environment", nargs="+", metavar="ID", help="ids of environments, module.path:Name, or "
        "agent:module.path:function")  # fmt: skip
    add("--environment_args", type=json_object, default={}, metavar="JSON", help="arguments of the environment; of several, "
        "those of each by its id")  # fmt: skip
    add("--episodes", type=positive_int, metavar="N", help="episodes in each environment, with the same seeds for all "
        f"policies (default: one for each row of --dataset_name, else {_EPISODES})")  # fmt: skip
    add("--attempts", type=positive_int, default=1, metavar="K", help="times that each episode is played, for pass@k "
        "(default: 1)")  # fmt: skip
    add("--greedy", action="store_true", help="take the likeliest token instead of sampling")
    add("--seed", type=seed_number, default=42, help="seed of environments and sampling (default: 42), of "
        "episodes that no training plays")  # fmt: skip
    panel = parser.add_argument_group("panels, which name episodes by their content")
    panel.add_argument("--panel", metavar="FILE", help="play the episodes of a panel: a file of `panel make`, "
                       "or a ready task's id, whose panel is shipped")  # fmt: skip
    panel.add_argument("--compare", nargs="+", type=Path, metavar="RESULTS", help="compare the first policies of files "
                       "results.json of one panel, without the models")  # fmt: skip
    panel.add_argument("--allow_difference", nargs="+", default=[], metavar="NAME", help="limits and sampling settings that "
                       "may differ between the files of --compare; the report names them")  # fmt: skip
    data = parser.add_argument_group("rows, which are handed to the environment's reset in order")
    data.add_argument("--dataset_name", metavar="NAME", help="Hub id, file or folder")
    data.add_argument("--dataset_config", metavar="NAME", help="its configuration")
    data.add_argument("--dataset_test_split", default="test", metavar="NAME", help="its split (default: test)")
    metrics = parser.add_argument_group("further metrics, which are modules of the package evaluate")
    metrics.add_argument("--metric", nargs="+", default=[], metavar="NAME", help="success, episode_return, pass_at_k, "
                         "answer_match; a module's file or folder; with --trust_remote_code, a name on the Hub")  # fmt: skip
    metrics.add_argument("--reference", default=REFERENCE, metavar="NAME", help="name of the right answer in the rows or "
                         f"the environment's information (default: {REFERENCE})")  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--output_dir", type=Path, default=Path("runs/eval"), metavar="DIR", help="folder of results and "
                        "episodes; each evaluation has a folder of its own in it (default: runs/eval)")  # fmt: skip
    output.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    output.add_argument("--no_card", action="store_true", help="leave the model card of a local MODEL as it is; otherwise "
                        "the results are added to its metadata")  # fmt: skip
    loading = parser.add_argument_group("loading")
    loading.add_argument(
        "--dtype", type=_dtype, metavar="TYPE", help="type of the weights: float32 (default), bfloat16, auto, ..."
    )
    loading.add_argument("--device", type=_device, help="device of the model (default: the GPU, if there is one)")
    loading.add_argument("--trust_remote_code", action="store_true", help="run code of the model's repository, and "
                         "of metrics that are named on the Hub")  # fmt: skip
    loading.add_argument("--generation_chunk_size", type=positive_int, metavar="N", help="episodes that are decoded at once "
                         "(default: all, with vLLM 256)")  # fmt: skip
    engine = parser.add_argument_group("sampling with vLLM instead of transformers")
    engine.add_argument("--use_vllm", action="store_true", help="sample with vLLM, which loads the base model and serves "
                        "adapters as LoRA")  # fmt: skip
    engine.add_argument("--vllm_gpu_memory_utilization", type=float, metavar="N", help="share of the GPU's memory for "
                        "weights and cache (default: 0.9)")  # fmt: skip
    engine.add_argument("--vllm_model_impl", choices=("vllm", "transformers", "auto"), help="implementation of the model "
                        "(default: vllm)")  # fmt: skip
    _add_fields(parser.add_argument_group("episodes"), EpisodeOptions)
    _add_fields(parser.add_argument_group("sampling"), SamplingSettings)
    return parser


def _add_fields(group: Any, kind: type) -> None:
    """Add the fields of a dataclass as options, with the help of the option of that name in training."""
    described = {one.name: one.metadata.get("help", "") for one in fields(MultiTurnConfig)}
    for one in fields(kind):
        if one.name == "do_sample":
            continue
        name, about = f"--{one.name}", described[one.name].split(". ")[0].rstrip(".").replace("%", "%%")
        default = (
            f" (default: {one.default})" if isinstance(one.default, (int, float)) and one.default is not False else ""
        )
        add = partial(group.add_argument, name, default=SUPPRESS)  # so that it is known what was given
        if one.type == "bool":
            add(action="store_true", help=about)
        elif one.name in _JSON:
            add(type=json_object, metavar="JSON", help=about)
        elif one.name == "history":
            add(type=lambda text: json_object(text) if text.startswith("{") else text, metavar="NAME", help=about)
        elif one.name == "stop_strings":
            add(nargs="+", metavar="TEXT", help=about)
        else:
            parse: type = {"int": int, "float": float, "str": str}[str(one.type).removesuffix(" | None")]
            add(type=parse, metavar="TEXT" if parse is str else "N", help=about + default)


def _settle(options: argparse.Namespace, models: Sequence[str]) -> list[str]:
    """Fill in the limits and sampling settings that were not given: those of a model's training, else the defaults.

    Args:
        options: Those of the command line.
        models: The policies. The first with a record decides, since all play under the same limits.

    Returns:
        What to tell of it, in sentences.
    """
    known = {model: found for model in models if (found := recorded_settings(model))}
    source, lost = next(iter(known), None), list[str]()
    # A class is recorded by its name alone.
    ids = {form: one for one in options.environment for form in (one.rpartition(":")[2], one)}
    for model, found in known.items():
        for option in ("environment_limits", "history"):  # by environment: of those that are played
            if isinstance(own := found.get(option), dict):
                found[option] = {ids[name]: value for name, value in own.items() if name in ids} or None
                if model == source and not found[option]:
                    lost.append(f"{option} of {', '.join(own)}")
    recorded = {} if source is None else dict(known[source])
    defaults = {one.name: one.default for kind in (EpisodeOptions, SamplingSettings) for one in fields(kind)}
    del defaults["do_sample"]
    said, changed = [], []
    for name, default in defaults.items():
        given = getattr(options, name, recorded.get(name, default))
        setattr(options, name, tuple(given) if name == "stop_strings" else given)
        if name in recorded and source is not None and getattr(options, name) != recorded[name]:
            changed.append(f"{name}={getattr(options, name)!r}, trained with {recorded[name]!r}")
    told = ["max_turns", "max_new_tokens", "temperature"]
    told += [name for name in ("environment_limits", "history") if getattr(options, name)]
    shown = ", ".join(f"{name}={getattr(options, name)!r}" for name in told)
    if source is None:
        said.append(f"No model has a record of its limits. Played with {shown}; set what it was trained with.")
    else:
        said.append(f"Limits and sampling are those that {source} was trained with: {shown}.")
    if lost:
        said.append(f"It was trained with {' and '.join(lost)}, which is none that is played here by that name.")
    if changed:
        said.append(f"Set otherwise: {'; '.join(changed)}.")
    for model, found in known.items():
        other = [f"{name}={found[name]!r}" for name in defaults if name in found and name != "environment_limits"
                 and found[name] != getattr(options, name)]  # fmt: skip
        if model != source and other:
            said.append(f"{model} was trained with {', '.join(other)}, and is played like {source}.")
    return said


def main(argv: Sequence[str]) -> None:
    """Parse the options, play and report.

    Raises:
        ValueError: If an option, a model, an environment or a metric cannot be used.
        ImportError: If a library that one of them needs is missing.
    """
    parser = make_parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        parser.error(f"there is no option {unknown[0]}{nearest(unknown[0].split('=')[0], known, count=1)}")
    if options.compare is not None:
        _take_only(
            parser,
            options,
            ("compare", "allow_difference", "measure", "json"),
            "with --compare, which reads files alone",
        )
        return compare_files(options.compare, options.allow_difference, options.measure, options.json)
    if options.allow_difference:
        parser.error("--allow_difference has no effect without --compare.")
    if options.model is None or (options.environment is None and options.panel is None):
        parser.error(
            "MODEL and --environment ID are required, or MODEL and --panel FILE, or --compare RESULTS RESULTS."
        )
    panel = None if options.panel is None else _panel(parser, options)
    models = [options.model, *options.against]
    for model, option in zip(models, ["MODEL", *["--against"] * len(options.against)]):
        check_model(model, option=option)
    told = _settle(options, models)
    tasks = _tasks(options)
    if panel is not None:
        check_panel(panel, tasks[0].factory, tasks[0].rows)
    chosen = {name: getattr(options, name) for name in _SAMPLING}
    sampling = SamplingSettings(do_sample=not options.greedy, stop_strings=tuple(options.stop_strings), **chosen)
    if options.greedy and options.attempts > 1:
        parser.error("--attempts has no effect with --greedy, which plays the same game each time.")
    if options.measure and not options.against:
        parser.error("--measure has no effect without --against.")
    _check_engine(parser, options)
    if options.metric:
        load_metrics(options.metric, trust_remote_code=options.trust_remote_code)
    check_output(options.output_dir)
    if _has_card(options):
        check_card(Path(options.model))
    logging.disable_progress_bar()
    disable_progress_bars()
    state = PartialState()
    (run,) = broadcast_object_list([new_run_id("evaluation")])
    main_process = state.is_main_process
    console = Console(stderr=options.json, quiet=not main_process)
    for sentence in told:
        console.print(escape(sentence), highlight=False, soft_wrap=True)
    errors: list[BaseException] = []
    with (
        _warned_once(),
        redirect_stdout(sys.stderr) if options.json else nullcontext(),
    ):  # of environments and libraries
        reports = _play_all(options, models, tasks, sampling, run, console, errors)
        # Again: what is kept by the process, or on a server, may have changed while it played.
        if panel is not None and not errors:
            check_starts(panel, tasks[0].factory, tasks[0].rows)
    if main_process:
        _report(options, sampling, reports, run, console, None if errors else panel, errors)
    if errors:
        raise errors[0]


_ENGINE = {"vllm_gpu_memory_utilization": "gpu_memory_utilization", "vllm_model_impl": "model_impl"}
"""Options of the engine, and their names in :class:`VllmSampler`."""


def _check_engine(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the command if an option has no effect on the chosen sampler."""
    if options.use_vllm and options.device is not None:
        parser.error("--device has no effect with --use_vllm: vLLM runs on the GPU that is visible, or on CPU as a build of "
                     "its own.")  # fmt: skip
    for name in _ENGINE:
        if getattr(options, name) is not None and not options.use_vllm:
            parser.error(f"--{name} has no effect without --use_vllm.")


def _report(
    options: argparse.Namespace,
    sampling: SamplingSettings,
    reports: Sequence[EnvironmentReport],
    run: str,
    console: Console,
    panel: EpisodePanel | None,
    errors: list[BaseException],
) -> None:
    """Write the results and the model card, whose error goes to ``errors``, and print the tables or the JSON."""
    folder = options.output_dir / run
    content = {
        "format": 1,
        "run": run,
        "settings": _settings(options, sampling),
        "environments": [one.to_dict(with_outcomes=panel is not None) for one in reports],
    }
    if panel is not None:
        content = sealed(content | {"panel": panel.to_dict()})
    write_json(folder / "results.json", content)
    card = None
    if _has_card(options):
        rows = [
            row for report in reports for row in card_results(report, _played_with(options, report.environment, panel))
        ]
        try:
            card = add_results(Path(options.model), rows)
        except (ValueError, OSError) as error:
            errors.append(error)
    if options.json:
        print(json.dumps(content, indent=2))
        return
    for report in reports:
        show(console, report)
    console.print(f"Results: {folder / 'results.json'}. Episodes: {options.output_dir / 'rollouts'}."
                  + (f" Model card: {card}." if card else ""), highlight=False, soft_wrap=True)  # fmt: skip


def _has_card(options: argparse.Namespace) -> bool:
    """Return whether the results are added to the card of the first policy."""
    return not options.no_card and Path(options.model).is_dir()


def _played_with(options: argparse.Namespace, environment: str, panel: EpisodePanel | None) -> dict[str, Any]:
    """Return the settings that a row of the card states."""
    limits = {name: getattr(options, name) for name in LIMITS} | (options.environment_limits or {}).get(environment, {})
    sampling = {name: getattr(options, name) for name in _SAMPLING}
    text = {name: getattr(options, name) for name in ("system_prompt", "history")}
    text["stop_strings"] = list(options.stop_strings)
    stated = {**limits, **({} if options.greedy else sampling), **public_options(text)}
    return {
        "limits": {name: value for name, value in stated.items() if value not in (None, [])},
        "episodes_of": "held out",
        "seed": options.seed,
        **({} if panel is None else {"panel": panel.hash}),
    }


def _take_only(parser: argparse.ArgumentParser, options: argparse.Namespace, taken: Sequence[str], where: str) -> None:
    """End the command if another option than these was given."""
    for name, value in vars(options).items():
        if name not in taken and value != parser.get_default(name):
            parser.error(f"{'MODEL' if name == 'model' else f'--{name}'} has no effect {where}.")


def _panel(parser: argparse.ArgumentParser, options: argparse.Namespace) -> EpisodePanel:
    """Read the panel, and set the options that it decides."""
    decided = ("environment", "environment_args", "episodes", "seed", "dataset_config", "dataset_test_split")
    _take_only(
        parser, options, [name for name in vars(options) if name not in decided], "with --panel, which decides it"
    )
    panel = read_panel(options.panel)
    dataset = dict(panel.dataset or {})
    if options.dataset_name is not None:  # a copy elsewhere; the hashes of its rows are checked
        dataset["dataset_name"] = options.dataset_name
    for name, value in {**dataset, "environment": [panel.environment], "environment_args": panel.arguments,
                        "episodes": len(panel.seeds), "seed": panel.seed}.items():  # fmt: skip
        setattr(options, name, value)
    return panel


def _tasks(options: argparse.Namespace) -> list[EvaluationTask]:
    """Make the environments, and divide the rows among them.

    Raises:
        ValueError: If an environment, its arguments, its limits or the rows cannot be used.
    """
    ids: list[str] = options.environment
    if repeated := [one for one in ids if ids.count(one) > 1]:
        raise ValueError(f"--environment names {repeated[0]!r} twice; name each environment once.")
    limits, arguments = options.environment_limits or {}, options.environment_args
    for option, given in (("--environment_args", arguments if len(ids) > 1 else {}), ("--environment_limits", limits)):
        if unknown := [name for name in given if name not in ids]:
            raise ValueError(f"{option} is by id of the environment ({', '.join(ids)}), got {unknown[0]!r}.")
    names = [one.name for one in fields(EpisodeOptions)]
    episode = EpisodeOptions(**{name: getattr(options, name) for name in names})
    rows = dataset_rows(options)
    tasks = []
    for name in ids:
        named = rows is not None and (len(ids) > 1 or any(row.get(COLUMN) == name for row in rows))
        own = _rows_of(name, rows or [], ids) if named else rows
        if own is not None and not own:
            raise ValueError(f"--dataset_name has no row for {name}.")
        factory = make_environment_factory(name, **(arguments.get(name, {}) if len(ids) > 1 else arguments))
        count = options.episodes or (_EPISODES if own is None else len(own))
        tasks.append(EvaluationTask(name, factory, own, count, episode.of(name)))
    return tasks


def _rows_of(environment: str, rows: Sequence[dict[str, Any]], ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows that name an environment, without that column."""
    if any(COLUMN not in row for row in rows):
        raise ValueError(f"--dataset_name has no column {COLUMN!r}, which names the environment of each row. Add it.")
    if len(ids) > 1 and (others := {str(row[COLUMN]) for row in rows} - {*ids}):
        raise ValueError(
            f"--dataset_name has rows of {', '.join(sorted(others))}, which --environment does not name. The column "
            f"{COLUMN!r} has the ids that are played: {', '.join(ids)}."
        )
    own = [row for row in rows if row[COLUMN] == environment]
    return [{column: value for column, value in row.items() if column != COLUMN} for row in own]


def dataset_rows(options: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Read the rows that ``--dataset_name``, ``--dataset_config`` and ``--dataset_test_split`` name; None without a name.

    Raises:
        ValueError: If they cannot be loaded.
    """
    if options.dataset_name is None:
        return None
    splits = named_dataset("--dataset_name", options.dataset_name, options.dataset_config)
    name = options.dataset_test_split
    if name not in splits and len(splits) == 1 and name == "test":  # a single file is called "train"
        (name,) = splits
    if name not in splits:
        raise ValueError(f"--dataset_test_split={name!r}: the data set has the splits {', '.join(map(repr, splits))}.")
    return [dict(row) for row in splits[name]]


def _play_all(
    options: argparse.Namespace,
    models: Sequence[str],
    tasks: Sequence[EvaluationTask],
    sampling: SamplingSettings,
    run: str,
    console: Console,
    errors: list[BaseException],
) -> list[EnvironmentReport]:
    """Play every policy in every environment, and compare the first one with the others.

    An error ends it, as do Ctrl-C, SIGTERM and SIGHUP. If episodes of a policy in an environment have been played by then,
    what was played is returned.

    Args:
        options: Those of the command line.
        models: Folders or Hub ids of the policies.
        tasks: The environments.
        sampling: How the policies sample.
        run: Id of the evaluation.
        console: Console for the progress bars.
        errors: Gets the errors of metrics, and first the one that ended it.
    """
    names = [
        name if models[:n].count(name) == 0 else f"{name} ({models[:n].count(name) + 1})"
        for n, name in enumerate(models)
    ]
    played: dict[str, list[Played]] = {}
    modules = load_metrics(options.metric, trust_remote_code=options.trust_remote_code) if options.metric else []

    def play(place: int, policy: Any, tokenizer: Any) -> None:
        for number, task in enumerate(tasks):
            name = names[place]
            with _progress(console, f"{name} in {task.environment}", task.episodes * options.attempts) as shown:

                def ended(trajectory: Trajectory, shown: Any = shown, environment: str = task.environment) -> None:
                    shown(trajectory)
                    # Said while there is time to correct it.
                    if lacks_reference(modules, trajectory, options.reference):
                        logger.warning(_NO_ANSWER, environment, options.reference)

                results = evaluate_policy(
                    policy, tokenizer, task.factory, task.episodes, rows=task.rows, seed=options.seed,
                    attempts=options.attempts, sampling_seed=place, options=task.options, sampling=sampling,
                    generation_chunk_size=options.generation_chunk_size, on_finish=ended,
                )  # fmt: skip
            info = {"policy": name, "model": models[place], "environment": task.environment, "seed": options.seed,
                    "options": _settings(options, sampling)}  # fmt: skip
            records = _write_records(options.output_dir, f"{run}-{place}-{number}", info, results, tokenizer)
            metrics: dict[str, Any] = {}
            try:
                if options.metric:
                    given = {"reference": options.reference, "trust_remote_code": options.trust_remote_code}
                    metrics = compute_metrics(options.metric, results, **given)
            except ValueError as error:  # the episodes are played; the error is raised after they are reported
                errors.append(ValueError(f"{name} in {task.environment}: {error}"))
            played.setdefault(task.environment, []).append(Played(name, results, _plain(metrics), records))

    try:
        with closing(_loaded(options, models, tasks)) as loaded:
            for place in range(len(models)):
                play(place, *next(loaded))
    except (Exception, KeyboardInterrupt) as error:
        if not played:
            raise
        errors.insert(0, error)
    compared = []
    for environment, several in played.items():
        # Once one policy's episodes report success, all are counted by it.
        together = reported_together([each.results for each in several])
        one = played[environment] = [replace(each, results=counted) for each, counted in zip(several, together)]
        reported = common_measure([each.results for each in one])
        if options.measure == "success" != reported:  # the episodes are played; the error is raised after the report
            errors.append(
                ValueError(f"--measure success: {environment} reports no success; its returns were compared.")
            )
        measure = reported if options.measure == "success" else options.measure or reported
        compared += [compare_measures(one[0].results, other.results, measure) for other in one[1:]]
    adjusted = iter(corrected(compared))
    return [EnvironmentReport(name, one, [next(adjusted) for _ in one[1:]]) for name, one in played.items()]


def _loaded(
    options: argparse.Namespace, models: Sequence[str], tasks: Sequence[EvaluationTask]
) -> Generator[tuple[Any, Any]]:
    """Yield the policies that are played with their tokenizers, one in memory at a time.

    All of them, and all environments, are tried before the first is yielded.

    Raises:
        ImportError: If vLLM is asked for and not installed.
        ValueError: If a policy cannot be loaded or served, or an environment cannot be used.
    """

    def try_all(policies: Iterable[tuple[Any, Any]]) -> None:
        for policy, tokenizer in policies:
            for task in tasks:
                check_evaluation(
                    policy, tokenizer, task.factory, rows=task.rows, seed=options.seed, options=task.options
                )

    init = {"trust_remote_code": options.trust_remote_code, **({"dtype": options.dtype} if options.dtype else {})}
    if options.use_vllm:
        given = {ours: getattr(options, name) for name, ours in _ENGINE.items() if getattr(options, name) is not None}
        with VllmSampler(**given) as vllm:
            served = [(policy, policy.tokenizer) for policy in [vllm.load(model, **init) for model in models]]
            try_all(served)
            yield from served
        return
    if len(models) > 1 or len(tasks) > 1:  # else the one is tried by being played
        try_all(load_shapes(model, **init) for model in models if not is_quantized(model))
    for model in models:
        yield load_model(model, device=options.device, **init)
        gc.collect()  # before the next one is loaded
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _write_records(folder: Path, run: str, info: Mapping[str, Any], results: EpisodeResults, tokenizer: Any) -> str:
    state, record = PartialState(), Path(info["model"]) / RECORD
    step = read_json(record).get("global_step", 0) if record.is_file() else 0
    writer = RecordWriter(folder, {"kind": "evaluation", "run": run, **info}, rank=state.process_index)
    episodes = zip(results.trajectories, results.places)
    writer.write_images(results.trajectories)
    writer.write_eval(step, "eval", (episode_row(one, step=step, index=place) for one, place in episodes))
    if state.is_main_process:
        writer.write_vocabulary(tokenizer)
        writer.write_metrics(step, {f"eval_{name}": value for name, value in results.metrics.items()})
    return str(writer.folder)


@contextmanager
def _progress(console: Console, title: str, episodes: int) -> Iterator[Callable[[Trajectory], None]]:
    """Show a bar of the episodes of this process."""
    state = PartialState()
    total = len(range(state.process_index, episodes, state.num_processes))
    with Progress(*BAR, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda trajectory: progress.advance(task)


def _settings(options: argparse.Namespace, sampling: SamplingSettings) -> dict[str, Any]:
    """Return the options that decide what is played, as JSON-ready data."""
    left_out = ("output_dir", "json", "no_card", "metric", "reference", "compare", "allow_difference")
    chosen = {name: value for name, value in vars(options).items() if name not in left_out}
    chosen["versions"] = {name: version(name) for name in ("agile-trainers", "transformers", "torch")}
    given = options.history.values() if isinstance(options.history, dict) else [options.history]
    modules = {getattr(as_history(one), "__module__", "agile_trainers") for one in given}
    chosen["history_source"] = sources({one for one in modules if not one.startswith("agile_trainers")})
    arguments = withheld_values(_plain(options.environment_args))
    return masked(_plain(chosen | {"environment_args": arguments, "do_sample": sampling.do_sample}))


def _plain(value: Any) -> Any:
    """Convert to JSON-ready data, NumPy's numbers and arrays included."""
    return json.loads(json.dumps(value, default=lambda it: it.tolist() if hasattr(it, "tolist") else str(it)))


def _dtype(text: str) -> str:
    if text != "auto" and not isinstance(getattr(torch, text, None), torch.dtype):
        raise argparse.ArgumentTypeError(f"expected float32, bfloat16, float16 or auto, got {text!r}")
    return text


def _device(text: str) -> str:
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:  # the latter of a PyTorch without CUDA
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return text


@contextmanager
def _warned_once() -> Iterator[None]:
    """Show each warning once, however many policies and environments it is told of."""
    seen = dict[tuple[str, str, str], Any]()
    handlers = [one for one in (lastResort, *root.handlers, *getLogger("transformers").handlers) if one is not None]

    def is_new(record: Any) -> bool:
        # Several handlers see the same record. A wrong call of a library's is for the handler to tell of.
        told = record.name, str(record.msg), repr(record.args)
        return record.levelno != WARNING or seen.setdefault(told, record) is record

    for one in handlers:
        one.addFilter(is_new)
    try:
        yield
    finally:
        for one in handlers:
            one.removeFilter(is_new)


def positive_int(text: str) -> int:
    """Read the value of an option that takes a whole number of at least 1; a ``type`` of ``argparse``.

    Raises:
        argparse.ArgumentTypeError: If the text is anything else.
    """
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value
