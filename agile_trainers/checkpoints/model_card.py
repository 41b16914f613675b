"""Writes the model card of a run into every folder that it saves a model to, and adds later results to a card."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import EvalResult, ModelCardData, metadata_load, metadata_save
from huggingface_hub.repocard_data import eval_results_to_model_index
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from agile_trainers.adapters.folders import is_cached
from agile_trainers.adapters.loading import SavedAdapters, parent_of
from agile_trainers.adapters.roles import CRITIC, REFERENCE
from agile_trainers.checkpoints.disclosure import CARD, CURVE, masked, public_options, public_path
from agile_trainers.checkpoints.record import record_without_environment
from agile_trainers.imports import matplotlib_apart
from agile_trainers.records.plain import replacing

logger = logging.get_logger(__name__)

_SHARED = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm", "max_steps",
    "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "seed",
)  # fmt: skip
"""Options of transformers that the card shows; many of the others describe the machine, not the training."""
_ALWAYS = ("learning_rate", "beta", "temperature", "seed", "max_turns", "max_new_tokens")
_SAMPLING = {"temperature": None, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""Options of sampling to their defaults, for which a model's own ``generation_config.json`` may have other values."""
_LEFT_OUT = ("system_prompt", "stop_strings", "chat_template_kwargs", "generation_kwargs")
_WHERE = ("vllm_server", "vllm_group_port", "hub_", "log_", "model_init_kwargs", "ds3_")
_EVALUATIONS = 10
"""Largest number of rows of the evaluation table; the last evaluation is always among them."""
SMOOTHED = 9
"""Largest number of logs whose mean is a point of a smoothed curve."""
BEFORE = "before training"
"""Name of the baseline that an evaluation at update 0 gives."""
_ROLES = {CRITIC: "The critic", REFERENCE: "The reference policy"}
_UNREADABLE = (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors of PyYAML, and of values that are of another form than a model index."""
Baselines = Mapping[str, Mapping[str, float]]
"""Name to metrics as an evaluation logs them: ``eval_return``, ``eval_success``, ..."""


def hyperparameters(args: Any) -> dict[str, Any]:
    """Return the options of a run that differ from their defaults, and those in ``_ALWAYS``."""
    trl = {f.name for f in fields(GRPOConfig)} - {f.name for f in fields(GRPOConfig.__mro__[1])}
    own = {f.name for f in fields(args)} - {f.name for f in fields(GRPOConfig)}
    found = {}
    for field in fields(args):
        name, value = field.name, getattr(args, field.name)
        known = name in _SHARED or (name in trl | own and not name.startswith(_WHERE))
        if known and (name in _ALWAYS or value not in (field.default, None, [], {})):
            found[name] = getattr(value, "value", value)
    return public_options(found, type(args), getattr(args, "public_values", ()))


def model_card(
    *,
    name: str,
    model_id: str,
    record: Mapping[str, Any],
    log_history: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    tags: Sequence[str],
    trainer: str,
    dataset: str | None = None,
    paper: Mapping[str, str] | None = None,
    rows: str | None = None,
    baselines: Baselines | None = None,
    chat: bool = True,
) -> str:
    """Write the text of ``README.md``.

    Args:
        name: Title.
        model_id: Hub id of the model, or the folder's name.
        record: ``agile_trainers.json``.
        log_history: ``trainer.state.log_history``.
        options: See :func:`hyperparameters`.
        tags: Tags for the Hub's search.
        trainer: Name of the trainer's class.
        dataset: Hub id of the rows, if there were any.
        paper: ``title``, ``id`` (arXiv) and optionally ``citation`` (BibTeX) of the algorithm.
        rows: Name of the rows of a run without an environment, if it is known.
        baselines: Results to compare with, by name.
        chat: True if the tokenizer has a chat template.
    """
    base = record["base_model"]["name"]
    local = base is None or public_path(base) != base
    evaluations, baselines, measured = _evaluations(log_history, baselines or {}), baselines or {}, measure(log_history)
    metadata = ModelCardData(
        base_model=None if local else base,
        datasets=dataset,
        library_name="peft" if record["lora"] else "transformers",
        pipeline_tag="text-generation",
        tags=list(tags),
        model_name=name,
        eval_results=_run_results(record, evaluations, measured) or None,
    )
    base_name = public_path(base) if base else "a model made in code"
    is_name = base is None or re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", base_name)
    source = f"the environment `{record['environment']}`" if record["environment"] else f"`{rows}`" if rows else ""
    link = f"rows of [{dataset}](https://huggingface.co/datasets/{dataset})" if dataset else ""
    commit = record["base_model"].get("commit")
    # Of a local folder, the last part alone is shown, since the ones above may name a person.
    arguments = json.dumps(f"path/to/{base_name}" if local else base_name)
    return _TEMPLATE.render(
        metadata=metadata.to_yaml(),
        name=name,
        model_id=model_id,
        record=record,
        base_name=base_name,
        base_is_local=local,
        base_link=quoted(base_name)
        if not is_name
        else base_name
        if local
        else f"[{base}](https://huggingface.co/{base})",
        base_arguments=arguments + (f", revision={json.dumps(commit)}" if commit else ""),
        source=", with ".join(one for one in (source, link) if one) or "rows",
        trainer=trainer,
        chat=chat,
        sampling=_sampling(options),
        left_out=" and ".join(f"`{name}`" for name in _LEFT_OUT if name in options),
        evaluation=_evaluation_rows(evaluations, measured, baselines),
        panels=panels(log_history, baselines),
        curve=CURVE,
        smoothed=SMOOTHED,
        options=[(f"`{name}`", f"`{value!r}`") for name, value in options.items()],
        stages=_stages(record),
        paper=paper,
    )


def _sampling(options: Mapping[str, Any]) -> str:
    """Return the arguments of ``generate`` with which a run sampled, and the usual ones of a run that did not."""
    given = {"max_new_tokens": options.get("max_new_tokens") or options.get("max_completion_length") or 64}
    if "temperature" in options:
        values = {name: options.get(name, default) for name, default in _SAMPLING.items()}
        given = {"do_sample": True, **{name: value for name, value in values.items() if value is not None}, **given}
    return ", ".join(f"{name}={value!r}" for name, value in given.items())


def _evaluations(log_history: Sequence[Mapping[str, Any]], baselines: Baselines) -> list[Mapping[str, Any]]:
    """Return the last evaluation of each update, without that of update 0 if it is among the baselines."""
    found: dict[int, dict[str, Any]] = {}
    for entry in log_history:
        if _played(entry):  # each of several data sets has an entry of its own
            found.setdefault(entry["step"], {}).update(entry)
    return [entry for step, entry in sorted(found.items()) if step or BEFORE not in baselines]


def _played(entry: Mapping[str, Any]) -> list[str]:
    """Return the prefixes of the evaluations in a log: ``eval``, or one for each of several data sets."""
    if entry.keys() & {"eval_return", "eval_reward"}:
        return ["eval"]
    # An environment's part of an evaluation has no such error.
    return sorted(found[1] for key in entry if (found := re.fullmatch(r"(eval_.+)_reward_sem", key)))


def _run_results(
    record: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]], measured: str
) -> list[EvalResult]:
    """Return what the evaluations of a run say of its policy, which may not be the last: one result for each data set."""
    if not evaluations or not record["environment"]:
        return []
    own = next((one for one in evaluations if one["step"] == record["global_step"]), evaluations[-1])
    results = []
    for prefix in _played(own):
        value, name = own[f"{prefix}_{measured}"], _shown(prefix.removeprefix("eval").removeprefix("_"))
        played = {
            "episodes_of": "evaluations during the run",
            "episodes": int(own.get(f"{prefix}_episodes", 0)),
            "standard_error": round(own[f"{prefix}_{measured}_sem"], 4),
        }
        if math.isfinite(value):  # else all episodes failed
            of = f"mean episode {measured}" + (f" of {name}" if name else "")
            results.append(result(record["environment"], "mean_reward", of, value, played))
    return results


def measure(log_history: Sequence[Mapping[str, Any]]) -> str:
    """Name the measure of a run: ``"reward"`` where reward functions add to the return, else ``"return"``."""
    names = {name.removeprefix("eval_") for entry in log_history for name in entry}
    own = {name for name in names if name.startswith("rewards/") and not name.startswith("rewards/environment/")}
    return "reward" if own else "return"


def _evaluation_rows(
    evaluations: Sequence[Mapping[str, Any]], measured: str, baselines: Baselines
) -> list[tuple[str, ...]]:
    """Return the header and the rows of the evaluation table; nothing without evaluations and baselines."""
    stride = -(-len(evaluations) // _EVALUATIONS) or 1
    shown = [{"step": name, **metrics} for name, metrics in baselines.items()] + [
        *reversed(evaluations[::-1][::stride])
    ]
    # One column for each of several environments.
    names = sorted(
        {found[1] for entry in shown for key in entry if (found := re.fullmatch(r"eval_(.+)_return_sem", key))}
    )
    # Several data sets have no common result.
    prefixes = sorted({prefix for entry in shown for prefix in _played(entry)}) or ["eval"]
    if "eval" in prefixes or any("eval_success" in entry for entry in shown):
        prefixes = ["eval"]
    header, rows = ["update"], [[str(entry["step"])] for entry in shown]
    for prefix in prefixes:
        name = prefix.removeprefix("eval").removeprefix("_")
        names = [one for one in names if one != name]
        of = f" of {_shown(name)}" if name else ""
        header += [f"{measured}{of} (± standard error)", f"success{of}", f"episodes{of}"]
        for row, entry in zip(rows, shown):
            success, episodes = entry.get(f"{prefix}_success"), entry.get(f"{prefix}_episodes")
            row += [
                _with_error(entry, prefix, measured),
                "" if success is None else f"{success:.1%}",
                "" if episodes is None else f"{episodes:.0f}",
            ]
    for row, entry in zip(rows, shown):
        row += [_with_error(entry, f"eval_{name}") for name in names]
    return [tuple(header + [f"return of {_shown(name)}" for name in names]), *map(tuple, rows)]


def _with_error(entry: Mapping[str, Any], prefix: str, measured: str = "return") -> str:
    name = f"{prefix}_{measured}"
    error = f" ± {entry[f'{name}_sem']:.3f}" if math.isfinite(entry.get(f"{name}_sem", math.nan)) else ""
    return f"{entry[name]:.3f}{error}" if name in entry else ""


def _stages(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for the model and each stage before it; nothing if it is the first."""
    rows: list[tuple[str, ...]] = [("this model", record["algorithm"], quoted(record["environment"] or ""))]
    stage: Mapping[str, Any] | None = record["parent"]
    while stage is not None:  # its author may be another person
        name = public_path(stage["source"]) + (f" at {stage['commit'][:10]}" if stage["commit"] else "")
        rows.append((quoted(name), quoted(stage["algorithm"] or ""), quoted(stage["environment"] or "")))
        stage = stage["parent"]
    return rows if len(rows) > 1 else []


def _shown(name: str) -> str:
    """Show the name of an environment; one from another person's checkpoint may hold Markdown or HTML."""
    return name if re.fullmatch(r"[\w .:/\-]+", name) else quoted(name)


def quoted(text: str) -> str:
    """Quote a text as code, in which Markdown, HTML and addresses have no effect; at most 200 characters of it."""
    shown = "".join(one if one.isprintable() else " " for one in text[:200]).replace("`", "'").replace("|", "¦")
    return f"`{shown}`" if shown.strip() else ""


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


_ENVIRONMENT = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
_ENVIRONMENT.filters |= {"quoted": quoted, "row": _row, "python": partial(json.dumps, ensure_ascii=False)}
_TEMPLATE = _ENVIRONMENT.from_string(Path(__file__).with_name("model_card.md.jinja").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Panel:
    """A quantity of the learning curve."""

    name: str
    training: list[tuple[int, float]]
    """Pairs of update and value, one for each log."""
    evaluations: list[tuple[int, float, float]]
    """Triples of update, value and standard error."""
    baselines: dict[str, float]
    is_share: bool
    """True if the quantity is between 0 and 1, and so is the axis."""


def panels(log_history: Sequence[Mapping[str, Any]], baselines: Baselines | None = None) -> list[Panel]:
    """Return what the learning curve shows: success and return (or reward, see :func:`measure`), or accuracy and loss.

    Args:
        log_history: ``trainer.state.log_history``.
        baselines: Results to compare with, by name.
    """
    measured = measure(log_history)
    own = "reward" if measured == "reward" else "return/mean"
    has_episodes = any(own in entry for entry in log_history)
    quantities = [
        ("success", "success", "eval_success", True),
        (f"mean {measured} of an episode", own, f"eval_{measured}", False),
    ]
    if not has_episodes:
        quantities = [
            ("share of right next tokens", "mean_token_accuracy", "eval_mean_token_accuracy", True),
            ("share of pairs in the right order", "rewards/accuracies", "eval_rewards/accuracies", True),
            ("loss", "loss", "eval_loss", False),
        ]
    evaluations, found = _evaluations(log_history, baselines or {}), []
    if not has_episodes:
        evaluations = [entry for entry in log_history if "eval_loss" in entry]
    for name, trained, evaluated, is_share in quantities:
        training = [(entry["step"], entry[trained]) for entry in log_history if entry.get(trained) is not None]
        if training:
            scores = [(e["step"], e[evaluated], e.get(f"{evaluated}_sem", 0.0)) for e in evaluations if evaluated in e]
            compared = {key: value[evaluated] for key, value in (baselines or {}).items() if evaluated in value}
            found.append(Panel(name, training, scores, compared, is_share))
    return found


def moving_average(values: Sequence[float], width: int) -> list[float]:
    """Compute the mean over the ``width`` values around each value, fewer at the ends."""
    half = width // 2
    windows = (values[max(index - half, 0) : index + half + 1] for index in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def draw_curve(shown: Sequence[Panel]) -> bytes:
    """Draw the learning curve as a PNG, one plot for each quantity. A share has an axis from 0 to 1."""
    with matplotlib_apart():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    # Fixed margins: a layout that measures all labels takes half of the time of a card.
    inches = 5.5 * len(shown)
    margins = {"left": 0.8 / inches, "right": 1 - 0.15 / inches, "bottom": 0.13, "top": 0.96, "wspace": 0.25}
    figure = Figure(figsize=(inches, 4))
    for panel, axes in zip(shown, figure.subplots(1, len(shown), squeeze=False, gridspec_kw=margins)[0]):
        steps, values = zip(*panel.training)
        axes.plot(steps, values, color="tab:blue", linewidth=1, alpha=0.35, label="training")
        if (width := min(SMOOTHED, len(values) // 4 | 1)) > 1:  # a wider window would hide the course of a short run
            smoothed = f"training, mean of {width} logs"
            axes.plot(steps, moving_average(values, width), color="tab:blue", linewidth=2, label=smoothed)
        if panel.evaluations:
            axes.errorbar(
                *zip(*panel.evaluations), color="tab:orange", marker="o", label="evaluation (± standard error)"
            )
        for (name, value), color in zip(panel.baselines.items(), cycle(("tab:gray", "tab:green", "black", "tab:red"))):
            axes.axhline(value, color=color, linestyle="--", linewidth=1, label=f"{name} {value:.2f}")
        axes.set(xlabel="update", ylabel=panel.name, **({"ylim": (0, 1.02)} if panel.is_share else {}))
        axes.legend(fontsize="small")
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()


def write_card(folder: Path, text: str, picture: bytes | None) -> None:
    """Write a card and its picture into a folder, and a short one into the folders of its other adapters.

    Args:
        folder: Folder of the model, which is made if there is none.
        text: See :func:`model_card`.
        picture: See :func:`draw_curve`; None for a card without a curve.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / CARD, folder / CURVE):
        if old.is_symlink():
            old.unlink()  # nothing outside the folder is overwritten
    (folder / CARD).write_text(masked(text), encoding="utf-8", errors="replace")
    if picture is not None:
        (folder / CURVE).write_bytes(picture)
    for name, role in _ROLES.items():
        if (folder / name / "adapter_config.json").is_file():
            lines = f"# {name}\n\n{role} of the model in the folder above, whose card describes the run.\n"
            (folder / name / "README.md").write_text(f"---\nlibrary_name: peft\n---\n\n{lines}", encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------------- runs


@contextmanager
def _losing_only_the_card(folder: Path) -> Iterator[None]:
    """Warn of an error inside the block and go on, since a card must not keep a model from being saved."""
    try:
        yield
    except Exception as error:
        logger.warning(
            "The model card of %s was not written (%s: %s). The model is saved all the same.",
            folder, type(error).__name__, str(error)[:300],
        )  # fmt: skip


class RunCards:
    """Writes model cards on the main process, and keeps what they compare the run with.

    Args:
        trainer: After TRL's own constructor.
        name: The algorithm's.
        tags: Tags of every card.
        paper: The algorithm's paper, in the form of TRL's ``_paper``.
        saved: The adapters that the policy was loaded from, if any.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        name: str,
        tags: Sequence[str],
        paper: Mapping[str, str],
        saved: SavedAdapters | None,
    ) -> None:
        self._trainer: Any = trainer
        self._algorithm, self._tags, self._paper = name.removeprefix("Multi-turn "), tags, paper
        # With an environment the checkpoints have read it.
        self._parent = parent_of(saved, trainer.model.config._name_or_path) if self._trainer.engine is None else None
        self._dataset: str | None = None
        self._picture: tuple[bytes, bytes | None] = b"", None
        """Digest of what the last curve shows, which is as long as the run, and the curve."""
        self.baselines: dict[str, Mapping[str, float]] = {}
        """Results to compare with, by name: ``eval_return``, ``eval_success`` and ``eval_episodes``, as far as known."""

    def note_evaluation(self, prefix: str, metrics: Mapping[str, float]) -> None:
        """Take an evaluation of the untrained policy as a baseline."""
        if re.match(r"eval(_|$)", prefix) and self._trainer.state.global_step == 0:
            self.baselines[BEFORE] = {**self.baselines.get(BEFORE, {}), **metrics}

    def write(
        self, folder: Path, *, model_name: str | None = None, dataset_name: str | None = None, tags: Sequence[str] = ()
    ) -> None:
        """Write ``README.md`` and the learning curve into a folder that holds the model.

        Args:
            folder: Folder of the model.
            model_name: Title. Default: the last part of ``hub_model_id`` for ``output_dir``, else the folder's name.
            dataset_name: Hub id of the rows, if there were any; the cards written later name it too.
            tags: More tags.
        """
        with _losing_only_the_card(folder):
            trainer, output_dir = self._trainer, Path(self._trainer.args.output_dir)
            name, log = folder.absolute().name, trainer.state.log_history
            self._dataset = dataset_name or self._dataset
            if folder.absolute() == output_dir.absolute():
                model_id = trainer.hub_model_id or name
            else:
                model_id = f"{output_dir.absolute().name}/{name}" if name.startswith("checkpoint-") else name
            shown = panels(log, self.baselines)
            digest = sha256(repr(shown).encode()).digest()
            if self._picture[0] != digest:  # a checkpoint needs it twice
                self._picture = digest, draw_curve(shown) if shown else None
            text = model_card(
                name=model_name or (model_id.rpartition("/")[2] if model_id == trainer.hub_model_id else model_id),
                model_id=model_id,
                record=self._record(),
                log_history=log,
                options=hyperparameters(trainer.args),
                tags=sorted({*self._tags, *tags}),
                trainer=type(trainer).__name__,
                dataset=self._dataset,
                paper=self._paper,
                baselines=self.baselines,
                chat=bool(getattr(trainer.processing_class, "chat_template", None)),
            )
            write_card(folder, text, self._picture[1])

    def _record(self) -> Mapping[str, Any]:
        trainer = self._trainer
        if trainer.engine is not None:
            return trainer.checkpoints.record()
        model = trainer.accelerator.unwrap_model(trainer.model)
        state, best = trainer.state, trainer.args.load_best_model_at_end and not trainer.is_in_train
        step = state.best_global_step if best and state.best_model_checkpoint else state.global_step
        return record_without_environment(self._algorithm, model, step, self._parent)


def write_card_of_rows(folder: Path, name: str, record: Mapping[str, Any], args: Any, log: Any, rows: str) -> None:
    """Write the model card of a run with one of TRL's trainers on rows.

    Args:
        folder: Folder of the model.
        name: Title, and the folder under which the card loads the model.
        record: See :func:`~agile_trainers.checkpoints.record.record_without_environment`.
        args: The trainer's configuration.
        log: ``trainer.state.log_history``.
        rows: Name of the rows.
    """
    with _losing_only_the_card(folder):
        shown = panels(log)
        text = model_card(
            name=name,
            model_id=name,
            record=record,
            log_history=log,
            options=hyperparameters(args),
            tags=["agile-trainers", record["algorithm"].lower(), "trl"],
            trainer="MultiTurnGRPOTrainer",
            rows=rows,
        )
        write_card(folder, text, draw_curve(shown) if shown else None)


# -------------------------------------------------------------------------------------------------------------- results


def result(environment: str, metric: str, name: str, value: float, arguments: Mapping[str, Any]) -> EvalResult:
    """Make a row of a card's ``model-index``.

    Args:
        environment: Id of the environment.
        metric: The Hub's name of the measure.
        name: Its name in words.
        value: The result; four digits of it are shown.
        arguments: What was played: number and kind of the episodes, limits, standard error.
    """
    return EvalResult(
        task_type="reinforcement-learning",
        dataset_type=environment,
        dataset_name=environment,
        metric_type=metric,
        metric_name=name,
        metric_value=round(value, 4),
        metric_args={key: one for key, one in arguments.items() if one == one},  # YAML has NaN, the Hub's JSON has not
    )


def add_results(folder: Path, results: Sequence[EvalResult]) -> Path:
    """Add results to the ``model-index`` of ``README.md``, which is created if it does not exist.

    A result of the same environment and metric, played with the same limits on episodes of the same kind, takes the place of
    the earlier one. The text below the metadata and the other metadata stay as they are; comments in the metadata are lost.

    Args:
        folder: Folder of the model.
        results: The results.

    Returns:
        The card.

    Raises:
        ValueError: If the card is a link or no file, or its metadata cannot be read.
        OSError: If the card cannot be written.
    """
    card, data = folder / CARD, _metadata(folder, results)
    with replacing(card) as partial:
        partial.write_bytes(card.read_bytes() if card.is_file() else f"# {folder.resolve().name}\n".encode())
        metadata_save(partial, data)
    return card


def check_card(folder: Path) -> None:
    """Raise ``ValueError`` if results cannot be added to the card of a model.

    Args:
        folder: Folder of the model.
    """
    _metadata(folder, [])


def _metadata(folder: Path, results: Sequence[EvalResult]) -> dict[str, Any]:
    """Return the metadata of a card with further results."""
    card = folder / CARD
    if (card.is_symlink() and not is_cached(card)) or (card.exists() and not card.is_file()):
        raise ValueError(f"{card} is no regular file. Put a copy of the card there, or remove it.")
    try:
        data = (metadata_load(card) if card.is_file() else None) or {}
        index = data.get("model-index") or [{"name": folder.resolve().name, "results": []}]
        return {**data, "model-index": _merged(index, results)}
    except _UNREADABLE as error:
        raise ValueError(
            f"The metadata at the top of {card} cannot be read: {str(error)[:300]}. Correct or remove it."
        ) from error


def _merged(index: list[Any], results: Sequence[EvalResult]) -> list[Any]:
    """Return a model index in which each result replaces that of the same environment, metric, limits and episodes."""
    (first, *others) = index
    kept = []
    new = [
        _key(result.task_type, result.dataset_type, result.metric_type, result.metric_name, result.metric_args)
        for result in results
    ]
    for entry in first["results"]:
        place = entry["task"]["type"], entry["dataset"]["type"]
        metrics = [
            one for one in entry["metrics"] if _key(*place, one["type"], one.get("name"), one.get("args")) not in new
        ]
        if metrics:
            kept.append({**entry, "metrics": metrics})
    (made,) = eval_results_to_model_index(first["name"], list(results))
    return [{**first, "results": [*kept, *made["results"]]}, *others]


def _key(task: str, environment: str, metric: str, name: str | None, arguments: Any) -> tuple[Any, ...]:
    played = {key: (arguments or {}).get(key) for key in ("limits", "episodes_of", "panel")}
    return task, environment, metric, name, played
