"""Writes the model card: base model, environment, evaluation, learning curve, options and lineage."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from trl import GRPOConfig

from agile_trainers.checkpoints.secrets import blanked

CURVE = "learning_curve.png"
_SHARED = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm", "max_steps",
    "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "seed",
)  # fmt: skip
"""Options of transformers that the card shows; many of the others describe the machine, not the training."""
_ALWAYS = ("learning_rate", "beta", "temperature", "seed", "max_turns", "max_new_tokens")
_WHERE = ("vllm_server", "vllm_group_port", "hub_", "log_", "model_init_kwargs", "ds3_")
_EVALUATIONS = 10
"""Largest number of rows of the evaluation table; the last evaluation is always among them."""


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
    return blanked(found)


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
    """
    base = record["base_model"]["name"]
    local = base is None or Path(base).is_dir()
    evaluations = [entry for entry in log_history if "eval_return" in entry]
    metadata = ModelCardData(
        base_model=None if local else base,
        datasets=dataset,
        library_name="peft" if record["lora"] else "transformers",
        pipeline_tag="text-generation",
        tags=list(tags),
        model_name=name,
        eval_results=[_result(record["environment"], evaluations[-1], measure(log_history))] if evaluations else None,
    )
    base_name = Path(base).name if local and base else base or "a model made in code"
    base_link = base_name if local else f"[{base}](https://huggingface.co/{base})"
    rows = f", with rows of [{dataset}](https://huggingface.co/datasets/{dataset})" if dataset else ""
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {name}",
        f"{base_link}, trained with {record['algorithm']} on the environment `{record['environment']}`{rows}: "
        f"{record['global_step']} updates.",
        _loading(base_name, model_id, record, trainer),
        _evaluation_table(evaluations, measure(log_history)),
        f"## Learning curve\n\n![Return of the training episodes at each update]({CURVE})"
        if curve(log_history)
        else "",
        _table("Hyperparameters", ("option", "value"), [(f"`{k}`", f"`{v!r}`") for k, v in options.items()]),
        _lineage(record),
        _table("Versions", ("", ""), list(record["versions"].items())),
        _citations(record["algorithm"], paper),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def measure(log_history: Sequence[Mapping[str, Any]]) -> str:
    """Name the measure of a run: ``"reward"`` where reward functions add to the return, else ``"return"``."""
    names = {name.removeprefix("eval_") for entry in log_history for name in entry}
    own = {name for name in names if name.startswith("rewards/") and not name.startswith("rewards/environment/")}
    return "reward" if own else "return"


def _result(environment: str, metrics: Mapping[str, Any], measured: str) -> EvalResult:
    return EvalResult(
        task_type="reinforcement-learning",
        dataset_type=environment,
        dataset_name=environment,
        metric_type="mean_reward",
        metric_name=f"mean episode {measured}",
        metric_value=f"{metrics[f'eval_{measured}']:.3f} +/- {metrics[f'eval_{measured}_sem']:.3f}",
    )


def _loading(base: str, model_id: str, record: Mapping[str, Any], trainer: str) -> str:
    if record["lora"]:
        commit = record["base_model"]["commit"]
        revision = f', revision="{commit}"' if commit else ""
        lines = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f'base = AutoModelForCausalLM.from_pretrained("{base}"{revision})',
            f'model = PeftModel.from_pretrained(base, "{model_id}")',
        ]
    else:
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f'model = AutoModelForCausalLM.from_pretrained("{model_id}")',
        ]
    lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{model_id}")')
    code = "\n".join(lines)
    onward = f'`{trainer}(model="{model_id}", environment=..., args=...)` trains it on.'
    return f"## How to load it\n\n```python\n{code}\n```\n\n{onward}"


def _evaluation_table(evaluations: Sequence[Mapping[str, Any]], measured: str) -> str:
    stride = -(-len(evaluations) // _EVALUATIONS) or 1
    shown = list(reversed(list(reversed(evaluations))[::stride]))
    # One column for each of several environments.
    names = sorted(
        {found[1] for entry in shown for key in entry if (found := re.fullmatch(r"eval_(.+)_return_sem", key))}
    )
    rows = [
        (
            str(entry["step"]),
            _with_error(entry, "eval", measured),
            f"{entry['eval_success']:.1%}" if "eval_success" in entry else "",
            f"{entry['eval_episodes']:.0f}",
            *(_with_error(entry, f"eval_{name}") for name in names),
        )
        for entry in shown
    ]
    header = (
        "update", f"{measured} (± standard error)", "success", "episodes", *(f"return of {name}" for name in names)
    )  # fmt: skip
    return _table("Evaluation", header, rows)


def _with_error(entry: Mapping[str, Any], prefix: str, measured: str = "return") -> str:
    name = f"{prefix}_{measured}"
    return f"{entry[name]:.3f} ± {entry[f'{name}_sem']:.3f}" if name in entry else ""


def _lineage(record: Mapping[str, Any]) -> str:
    rows = [("this model", record["algorithm"], f"`{record['environment']}`")]
    stage: Mapping[str, Any] | None = record["parent"]
    while stage is not None:
        source, commit = stage["source"], stage["commit"]
        name = Path(source).name if Path(source).is_dir() else source
        environment = f"`{stage['environment']}`" if stage["environment"] else ""
        rows.append((name + (f" at {commit[:10]}" if commit else ""), stage["algorithm"] or "", environment))
        stage = stage["parent"]
    return _table("Stages, latest first", ("", "algorithm", "environment"), rows) if len(rows) > 1 else ""


def _citations(algorithm: str, paper: Mapping[str, str] | None) -> str:
    own = "Trained with agile-trainers, on top of [TRL](https://github.com/huggingface/trl)."
    if not paper:
        return f"## Citations\n\n{own}"
    text = f"## Citations\n\n{algorithm}: [{paper['title']}](https://huggingface.co/papers/{paper['id']}). {own}"
    return text + (f"\n\n```bibtex\n{paper['citation'].strip()}\n```" if paper.get("citation") else "")


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [header, ["---"] * len(header), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in cells)


def curve(log_history: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return pairs of update and mean return (or reward, see :func:`measure`) of its training episodes."""
    name = "reward" if measure(log_history) == "reward" else "return/mean"
    return [(entry["step"], entry[name]) for entry in log_history if name in entry]


def plot_curve(log_history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the learning curve as a PNG: training episodes, and evaluations where there were any."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*curve(log_history)), color="tab:blue", linewidth=1, label="training episodes")
    measured = measure(log_history)
    evaluations = [entry for entry in log_history if f"eval_{measured}" in entry]
    if evaluations:
        axes.errorbar(
            [entry["step"] for entry in evaluations],
            [entry[f"eval_{measured}"] for entry in evaluations],
            [entry[f"eval_{measured}_sem"] for entry in evaluations],
            color="tab:orange", marker="o", label="evaluation (± standard error)",
        )  # fmt: skip
    axes.set(xlabel="update", ylabel=f"mean {measured} of an episode")
    axes.legend(fontsize="small")
    FigureCanvasAgg(figure).print_png(path)
