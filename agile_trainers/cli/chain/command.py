"""``agile-trainers chain pipeline.yaml``: runs several training stages, each from the result of the previous one.

Stages are SFT and DPO with TRL's trainers, and any multi-turn algorithm. Each stage has a folder. Finished stages are
skipped, an unfinished stage continues from its last complete checkpoint. The command ends with the return in the environment
after each stage. docs/chaining.md describes the file.
"""

from __future__ import annotations

import argparse
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from huggingface_hub.errors import HfHubHTTPError
from peft import LoraConfig, PeftModel
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.utils import logging
from trl import DPOTrainer, SFTTrainer

from agile_trainers.adapters.copies import copy_adapter
from agile_trainers.adapters.folders import (
    NUMBER,
    RECORD,
    CheckpointError,
    Fields,
    Name,
    naming_full_disk,
    read_form,
    write_json,
)
from agile_trainers.adapters.loading import find_adapters, load_policy, load_tokenizer, parent_of
from agile_trainers.adapters.lora_settings import NOT_LORA_SETTINGS, lora_settings
from agile_trainers.adapters.roles import POLICY, REFERENCE
from agile_trainers.checkpoints.disclosure import (
    check_special_tokens,
    clean_tokenizer,
    differences,
    is_named,
    masked,
    public_options,
    warn_of_unknown,
    withheld_values,
)
from agile_trainers.checkpoints.hub import HubPushes, HubUnreachableError
from agile_trainers.checkpoints.integrity import MARKER, checkpoints, mark_complete, newest_complete
from agile_trainers.checkpoints.model_card import write_card_of_rows
from agile_trainers.checkpoints.record import record_without_environment
from agile_trainers.checkpoints.stopping import RUN_AGAIN, GracefulStop
from agile_trainers.cli.chain.stages import (
    EVOLVE,
    SUPERVISED,
    Pipeline,
    Stage,
    check_rows,
    read_pipeline,
    supervised_rows,
)
from agile_trainers.cli.errors import mistakes_of_options
from agile_trainers.cli.evolve.command import WINNER, run_plan
from agile_trainers.cli.parser import check_output
from agile_trainers.cli.run_files import stage_rows
from agile_trainers.cli.train import Started
from agile_trainers.cli.yaml_files import YAMLFileError
from agile_trainers.config.launch_checks import uses_deepspeed
from agile_trainers.envs.registry import describe_environment
from agile_trainers.evaluation import EpisodeResults, evaluate_policy
from agile_trainers.monitor.progress import PROGRESS, showing
from agile_trainers.populations import PopulationError
from agile_trainers.populations.lineage import FILE, Lineage
from agile_trainers.records.writer import RecordWriter, digest_of, episode_row, new_run_id
from agile_trainers.rollout.episode_options import EpisodeOptions
from agile_trainers.sampling.sampler import sampling_settings
from agile_trainers.trainers.registry import find_algorithm

logger = logging.get_logger(__name__)

_STATE_FORM = Fields(
    {"id": Name, "parent": (Name, None), "made_of": {str: Any}, "finished": bool},
    required=("id", "parent", "made_of", "finished"),
)
_SCORES = dict.fromkeys(("return", "return_sem", "success", "episodes"), NUMBER)
_RESULT_FORM = Fields(
    {"of": {str: Any}, "metrics": Fields(_SCORES | {"environments": {str: Fields(_SCORES)}})},
    required=("of", "metrics"),
)
STATE = "stage.json"
"""File in a stage's folder with its options, the run of the previous stage that it started from, and its completion."""
Hook = Callable[[Stage, Any], None]
_ARGUMENTS = ("environment_args", "dataset_args")
"""Settings with arguments by name, whose values may hold anything."""
_SHOWN = ("model", "environment", "lora", "stage_lora", "algorithm", "dataset")
"""Settings that may leave the machine, besides numbers and words, unless they hold an address."""
_NO_EFFECT = ("hub_token", "max_wall_seconds", "public_values")
"""Options that the result of a stage does not depend on."""
_LORA, _CONTENT, _HOURS = "stage_lora", "dataset_content", f"{EVOLVE}.max_hours"
"""Names in :func:`made_of`; the hours are in chains that were made before."""
_INITIALIZATION = "init_lora_weights"


class PipelineError(ValueError):
    """Raised when a stage's folder does not let the chain go on."""


def run_pipeline(
    pipeline: Pipeline, console: Console, *, after_stage: Hook | None = None, progress: str = "table"
) -> list[dict[str, Any]]:
    """Train the unfinished stages of a pipeline, and evaluate all.

    Args:
        pipeline: The stages.
        console: Console for the output.
        after_stage: Called with each newly trained stage and its trainer (its population, of an ``evolve`` stage), after
            its model was saved.
        progress: Output while a stage trains, one of ``PROGRESS``.

    Returns:
        One row for the start and one per finished stage: ``name``, ``algorithm``, ``folder``, ``evaluation``, ``trained``
        (now). A stage that ``max_wall_seconds`` ended is not finished, and no later one begins.

    Raises:
        PipelineError: If a stage's folder was made by another pipeline.
    """
    states = _checked(pipeline)
    begin = shown_source(_flat({name: pipeline.source[name] for name in ("model", "environment", "environment_args")}))
    evaluation = evaluate_stage(pipeline, pipeline.model, pipeline.output_dir / "start", begin)
    start = {"name": "start", "algorithm": "", "folder": pipeline.model, "trained": False}
    rows, parent, model = [start | {"evaluation": evaluation}], None, pipeline.model
    for stage, state in zip(pipeline.stages, states):
        folder = pipeline.output_dir / stage.name
        trained = state is None or not state["finished"]
        if state is None:
            (identity,) = broadcast_object_list([uuid.uuid4().hex])
            state = {"id": identity, "parent": parent, "made_of": shown_made_of(pipeline, stage), "finished": False}
        if trained:
            _write(folder / STATE, state)
            console.rule(f"{stage.name}: {stage.algorithm} on {model}")
            train = _train if stage.population is None else _evolve
            done = train(pipeline, stage, model, console, progress)
            if done is None:
                console.print(f"{stage.name}: its time is over. The same command continues it.", markup=False)
                return rows
            if after_stage is not None:
                after_stage(stage, done)
            del done
            clear_device_cache(garbage_collection=True)
            _write(folder / STATE, {**state, "finished": True})
        parent, model = state["id"], str(policy_folder(pipeline, stage))
        evaluation = evaluate_stage(pipeline, model, folder, {"id": parent})
        row = {"name": stage.name, "algorithm": _shown(stage), "folder": model, "trained": trained}
        rows.append(row | {"evaluation": evaluation})
    _write(pipeline.output_dir / "chain.json", {"stages": rows})
    return rows


def policy_folder(pipeline: Pipeline, stage: Stage) -> Path:
    """Return the folder of the policy that a stage leaves."""
    folder = pipeline.output_dir / stage.name
    return folder if stage.population is None else folder / WINNER


def _shown(stage: Stage) -> str:
    return stage.algorithm if stage.population is None else f"evolve {stage.algorithm}"


def made_of(pipeline: Pipeline, stage: Stage) -> dict[str, Any]:
    """Return the options that a stage's result depends on, as JSON values as they are, without the earlier stages.

    Args:
        pipeline: The chain.
        stage: The stage.
    """
    own = {"algorithm": stage.algorithm, "dataset": stage.dataset, "dataset_args": stage.dataset_args or None}
    if stage.dataset is not None and Path(stage.dataset).is_file():
        own[_CONTENT] = digest_of(Path(stage.dataset))
    if stage.lora is not None:
        own |= _stage_lora({**lora_settings(stage.lora), _INITIALIZATION: stage.lora.init_lora_weights})
    shared = {name: value for name, value in pipeline.source.items() if value is not None}
    options = {name: value for name, value in stage.options.items() if name not in _NO_EFFECT}
    made = _flat({**shared, **own, **_number(options, _parsed(stage))})
    made.pop(_HOURS, None)  # may be raised
    return made


def _parsed(stage: Stage) -> dict[str, Any]:
    """Return what the options of a stage were parsed as."""
    parsed = {name: getattr(stage.config, name, None) for name in stage.options}
    if (plan := stage.population) is not None:
        strategy = plan.search["strategy"]
        parsed[EVOLVE] = {
            **plan.search, "strategy": {getattr(strategy, "name", None): strategy}, "options": plan.config,
            "hyperparameters": plan.hyperparameters,
        }  # fmt: skip
    return parsed


def _number(value: Any, parsed: Any) -> Any:
    """Return the number that a text stands for, such as ``1e-3``, if it was parsed as one; other values as they are.

    Args:
        value: Options of the file, or one of them.
        parsed: A mapping or an object with their parsed values, or the parsed value.
    """
    if isinstance(value, dict):
        known = parsed if isinstance(parsed, Mapping) else getattr(parsed, "__dict__", {})
        return {name: _number(one, known.get(name)) for name, one in value.items()}
    if isinstance(value, str) and isinstance(parsed, (int, float)) and not math.isnan(parsed):  # which equals no other
        with suppress(ValueError):
            return float(value)
    return value


def _stage_lora(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rank and what differs from the defaults of PEFT, to which another version may add."""
    default = {**lora_settings(LoraConfig()), _INITIALIZATION: True}
    idle = NOT_LORA_SETTINGS - {_INITIALIZATION}
    return {
        f"{_LORA}.{name}": value for name, value in settings.items()
        if name == "r" or (name not in idle and (value or None) != default.get(name))
    }  # fmt: skip


def shown_source(source: dict[str, Any], public: Sequence[str] = ()) -> dict[str, Any]:
    """Replace the values of a stage's settings that may not leave the machine by their digests.

    Args:
        source: Settings of the file, or :func:`made_of`.
        public: ``public_values`` of the stage.
    """
    known = {
        name: masked(value) for name, value in source.items()
        if name.partition(".")[0] in _SHOWN and "://" not in str(value)
    }  # fmt: skip
    arguments = {
        name: value for name, value in source.items()
        if name.partition(".")[0] in _ARGUMENTS and not is_named(name, public)
    }  # fmt: skip
    others = {name: value for name, value in source.items() if name not in (*known, *arguments)}
    named = [name for name in others if is_named(name, public)]
    return {**public_options(others, public=named), **known, **withheld_values(arguments)}


def _flat(source: dict[str, Any]) -> dict[str, Any]:
    """Replace dictionaries of arguments by their entries, ``environment_args.level``."""
    flat: dict[str, Any] = {}
    for name, value in source.items():
        inside = name in (*_ARGUMENTS, EVOLVE) and isinstance(value, dict)
        flat |= {f"{name}.{inner}": one for inner, one in value.items()} if inside else {name: value}
    return flat


def shown_made_of(pipeline: Pipeline, stage: Stage) -> dict[str, Any]:
    """Return :func:`made_of` as ``stage.json`` holds it."""
    return shown_source(made_of(pipeline, stage), getattr(stage.config, "public_values", ()))


def _checked(pipeline: Pipeline) -> list[dict[str, Any] | None]:
    """Check folders and rows of all stages and return each stage's state, None if it has not begun."""
    states: list[dict[str, Any] | None] = []
    for stage in pipeline.stages:
        folder = pipeline.output_dir / stage.name
        if not (folder / STATE).is_file():
            if folder.is_dir() and any(folder.iterdir()):
                raise PipelineError(
                    f"{folder} is not empty and is not a stage of a chain: it has no {STATE}. Rename the stage, restore the "
                    "file, or remove the folder to train this stage and later ones again."
                )
            states.append(None)
            continue
        state = read_form(folder / STATE, _STATE_FORM)
        then, now = dict(state["made_of"]), made_of(pipeline, stage)
        if _CONTENT not in now:  # the file is gone
            then.pop(_CONTENT, None)
        changed, unknown = differences(then, now, shown_made_of(pipeline, stage))
        warn_of_unknown(folder / STATE, unknown)
        if changed and not state["finished"] and _trained_nothing(stage, folder):
            states.append(None)  # it failed before its first checkpoint, and begins again with what was corrected
            continue
        if changed:
            lines = [f"  {clause}" for clause in changed.values()]
            raise PipelineError(
                f"{folder} was trained with other options:\n" + "\n".join(lines) + "\nRestore them, choose another "
                "output_dir, or remove the folder to train this stage and later ones again."
            )
        before = states[-1] if states else {"id": None}
        if before is None or state["parent"] != before["id"]:
            raise PipelineError(
                f"{folder} was trained from an earlier run of the previous stage, or after other stages than the file has "
                "now. Restore them, or remove the folder to train it again."
            )
        if state["finished"] and _may_go_on(stage):
            state |= {"id": uuid.uuid4().hex, "finished": False}  # a new run: its winner may be another
        states.append(state)
    check_rows(pipeline, {one.name: bool(state and state["finished"]) for one, state in zip(pipeline.stages, states)})
    return states


def _may_go_on(stage: Stage) -> bool:
    """Return whether a stage is a population that ``max_hours`` ended, which would not end it now."""
    folder = Path(stage.config.output_dir)
    if stage.population is None or not (folder / FILE).is_file():
        return False
    lineage = Lineage.read(folder)
    then, now = lineage.settings.get("max_hours"), stage.population.search["max_hours"]
    seconds = sum(event.seconds for event in lineage.events)
    left = max(event.round for event in lineage.events) < len(lineage.settings["rounds"])
    return left and then is not None and 3600 * then <= seconds and (now is None or seconds < 3600 * now)


def _trained_nothing(stage: Stage, folder: Path) -> bool:
    """Return whether a stage has no checkpoint to go on from."""
    return stage.population is None and not any((one / MARKER).is_file() for one in checkpoints(folder))


def _write(path: Path, value: dict[str, Any]) -> None:
    if PartialState().is_main_process:
        write_json(path, value)
    PartialState().wait_for_everyone()


# ------------------------------------------------------------------------------------------------------------ training


def resume_point(folder: Path, console: Console) -> str | None:
    """Return the checkpoint that a stage resumes from, None for a new stage; print skipped checkpoints.

    Raises:
        PipelineError: If there are checkpoints, but none is complete.
    """
    try:
        found, skipped = newest_complete(folder)
    except CheckpointError as error:
        there = checkpoints(folder)
        if any((one / MARKER).is_file() for one in there):
            raise PipelineError(
                f"{folder}: no checkpoint of the stage is complete. {error}\nRestore the missing files, or remove the "
                "checkpoints to train the stage from its beginning."
            ) from error
        if there:
            console.print(f"{folder}: its first checkpoint was not finished; the stage begins again.")
        return None
    for reason in skipped:
        console.print(f"Passed over: {reason}", markup=False)
    console.print(f"Going on from {found}.", markup=False)
    return str(found)


def _train(pipeline: Pipeline, stage: Stage, model: str, console: Console, progress: str) -> Any:
    """Train a stage, from where it was left, and return its trainer; None if ``max_wall_seconds`` ended it."""
    folder = pipeline.output_dir / stage.name
    checkpoint = resume_point(folder, console)
    make = make_supervised if stage.algorithm in SUPERVISED else make_multi_turn
    trainer = make(pipeline, stage, model)
    trainer.add_callback(Started())
    heard: Any = nullcontext()  # the multi-turn trainers stop by themselves
    if stage.algorithm in SUPERVISED:
        trainer.stop = GracefulStop(trainer.accelerator)
        trainer.add_callback(trainer.stop)
        heard, trainer.args.max_wall_seconds = trainer.stop.heard(), stage.config.max_wall_seconds
        if checkpoint is not None:
            trainer.add_callback(_Resumed(checkpoint))
            _take_no_step_too_many(trainer, Path(checkpoint))
    trainer.stop.way_on = RUN_AGAIN
    with naming_full_disk(folder):
        with heard, showing(trainer.callback_handler, console, stage.name, progress=progress):
            trainer.train(resume_from_checkpoint=checkpoint)
        trainer.stop.pass_on()
        if trainer.stop.out_of_time:
            return None
        trainer.save_model(str(folder))
    if stage.algorithm in SUPERVISED:
        if trainer.args.should_save:
            _complete(folder, stage, model, trainer.model, trainer.args, trainer.state)
        if trainer.hub_model_id is not None:  # on the main process, if the stage pushes and is not offline
            try:
                HubPushes(trainer).push("Model save", True, None, None)
            except (HubUnreachableError, HfHubHTTPError) as error:  # the stage is trained and saved
                logger.warning("%s", error)
        PartialState().wait_for_everyone()
    return trainer


def _take_no_step_too_many(trainer: Any, checkpoint: Path) -> None:
    """Keep `Trainer` from a further step after the checkpoint of the last one, which it takes in the middle of an epoch."""
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    if state.global_step >= state.max_steps and isinstance(trainer.train_dataset, Dataset):
        trainer.train_dataset = trainer.train_dataset.select(range(1))  # its epochs are over


def _evolve(pipeline: Pipeline, stage: Stage, model: str, console: Console, progress: str) -> Any:
    """Train the population of a stage, from where it was left, and return it; its winner goes to the stage's folder."""
    assert stage.population is not None
    lora = _lora_of(pipeline, stage, model)
    _, population = run_plan(
        stage.population, model, pipeline.environment, lora, console, table=progress != "dicts",
        winner=policy_folder(pipeline, stage),
    )  # fmt: skip
    return population


def _complete(folder: Path, stage: Stage, model: str, trained: Any, args: Any, state: Any) -> None:
    """Write record and model card of a stage with one of TRL's trainers; the multi-turn trainers write their own."""
    parent = parent_of(find_adapters(model), model)
    record = record_without_environment(stage.algorithm.upper(), trained, state.global_step, parent)
    write_json(folder / RECORD, {name: record[name] for name in ("algorithm", "environment", "global_step", "parent")})
    name = f"{stage.name}/{folder.name}" if folder.name != stage.name else stage.name
    rows = str(stage.dataset)
    rows = Path(rows).name if Path(rows).exists() else rows
    write_card_of_rows(folder, name, record, args, state.log_history, rows)


def make_multi_turn(pipeline: Pipeline, stage: Stage, model: str) -> Any:
    """Make the trainer of a multi-turn stage."""
    return find_algorithm(stage.algorithm)(
        model=model,
        environment=pipeline.environment,
        args=stage.config,
        train_dataset=stage_rows(stage.dataset, stage.dataset_args) if stage.dataset else None,
        peft_config=_lora_of(pipeline, stage, model),
    )


def make_supervised(pipeline: Pipeline, stage: Stage, model: str) -> Any:
    """Make TRL's trainer of a stage, which continues with the previous stage's adapter; a copy is DPO's reference."""
    args, lora = stage.config, _lora_of(pipeline, stage, model)
    saved, policy, tokenizer = find_adapters(model), model, None
    if saved is not None:
        policy = load_policy(
            saved,
            peft_config=lora,
            merge_lora_configs=stage.merge_lora_configs,
            seed=args.seed,
            **{"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})},
        )
        tokenizer, lora, args.model_init_kwargs = load_tokenizer(saved, args.trust_remote_code), None, None
    whole = _Whole(stage, model)
    trainer = (_SFT if stage.algorithm == "sft" else _DPO)(
        model=policy,
        args=args,
        train_dataset=supervised_rows(stage, pipeline.model),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[whole],
    )
    check_special_tokens(trainer.processing_class)
    if isinstance(trainer.model, PeftModel) and REFERENCE in trainer.model.peft_config:
        copy_adapter(trainer.model, POLICY, REFERENCE)  # TRL's copy omits embeddings
    if trainer.args.push_to_hub:
        # `Trainer` would push the whole folder, the chain's files too.
        whole.hub = HubPushes(trainer)
        whole.hub.check()
        trainer.args.push_to_hub = False
    return trainer


def _lora_of(pipeline: Pipeline, stage: Stage, model: str) -> Any:
    """Return a stage's own LoRA settings, else those of the chain if there is no adapter yet."""
    return stage.lora or (pipeline.lora if find_adapters(model) is None else None)


class _WithoutPickle:
    """Removes what `Trainer` pickles beside a model: its arguments, with any token among them."""

    args: Any
    processing_class: Any

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            clean_tokenizer(folder, self.processing_class)

    def init_hf_repo(self, token: str | None = None, **_: Any) -> None:
        HubPushes(self).begin(token, super().init_hf_repo)  # type: ignore[misc]

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **_: Any,
    ) -> Any:
        trainer: Any = self
        trainer.save_model(_internal_call=True)
        if trainer.hub_model_id is None:
            trainer.init_hf_repo(token=token)
        return HubPushes(self).push(commit_message, blocking, token, revision) if self.args.should_save else None


class _SFT(_WithoutPickle, SFTTrainer):
    pass


class _DPO(_WithoutPickle, DPOTrainer):
    pass


class _Resumed(TrainerCallback):
    """Restores the policy of a checkpoint, which `Trainer` before transformers 5.23 passes over where other adapters are in
    subfolders of it."""

    def __init__(self, checkpoint: str) -> None:
        self._checkpoint = checkpoint

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # DeepSpeed restores every parameter by itself.
        if isinstance(kwargs["model"], PeftModel) and not uses_deepspeed(args):
            kwargs["model"].load_adapter(self._checkpoint, POLICY, is_trainable=True)


class _Whole(TrainerCallback):
    """Completes the checkpoints of TRL's trainers (record, model card, the mark that they are whole), and pushes them."""

    hub: HubPushes | None = None
    """Pushes them, as the other trainers push theirs; None: they are not pushed."""

    def __init__(self, stage: Stage, model: str) -> None:
        self._stage, self._model = stage, model

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        PartialState().wait_for_everyone()
        if args.should_save:
            _complete(folder, self._stage, self._model, kwargs["model"], args, state)
            mark_complete(folder)
        if self.hub is not None:
            self.hub.push_checkpoint(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.hub is not None:
            self.hub.wait()


# ---------------------------------------------------------------------------------------------------------- evaluation


def evaluate_stage(pipeline: Pipeline, model: str, folder: Path, of: dict[str, Any]) -> dict[str, Any]:
    """Play a model's evaluation episodes, with the same seeds after every stage, and cache the result.

    Args:
        pipeline: Settings of the evaluation.
        model: Folder or Hub id.
        folder: Folder of the cached result.
        of: Key of the result, besides the settings.

    Returns:
        ``return``, ``return_sem``, ``episodes`` and, if the environment reports it, ``success``. With several environments
        also ``environments``, the same values of each by name.
    """
    path, of = folder / "evaluation.json", {**of, "settings": public_options(pipeline.evaluation_options)}
    if path.is_file():
        try:
            if (known := read_form(path, _RESULT_FORM))["of"] == of:
                return known["metrics"]
        except CheckpointError as error:
            logger.warning("%s The evaluation is played again.", error)
    args = pipeline.evaluation
    results = evaluate_policy(
        model,
        None,
        pipeline.environment,
        args.num_eval_episodes,
        seed=args.seed,
        held_out=False,
        greedy=args.eval_greedy,
        options=EpisodeOptions.of_args(args),
        sampling=sampling_settings(args),
        generation_chunk_size=args.generation_chunk_size,
        device="cpu" if args.use_cpu else None,
        model_init_kwargs={"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})},
    )
    if args.log_rollouts:
        _write_episodes(pipeline, model, folder, results)
    kept: dict[str, Any] = _scores(results.metrics)
    if isinstance(pipeline.environment, dict):
        kept["environments"] = {name: _scores(metrics) for name, metrics in results.by_environment.items()}
    clear_device_cache(garbage_collection=True)
    _write(path, {"of": of, "metrics": kept})
    return kept


def _write_episodes(pipeline: Pipeline, model: str, folder: Path, results: EpisodeResults) -> None:
    """Write the episodes of an evaluation to ``folder/evaluation/rollouts``."""
    (run,) = broadcast_object_list([new_run_id("evaluation")])
    environment, seed = describe_environment(pipeline.environment)["environment"], pipeline.evaluation.seed
    info = {"kind": "evaluation", "run": run, "model": model, "environment": environment, "seed": seed}
    writer = RecordWriter(folder / "evaluation", info, rank=PartialState().process_index)
    writer.write_images(results.trajectories)
    writer.write_eval(0, "eval", (episode_row(one, index=n) for n, one in zip(results.places, results.trajectories)))


def _scores(metrics: dict[str, float]) -> dict[str, float]:
    found = {name: metrics.get(name, math.nan) for name in _SCORES}
    return {name: value for name, value in found.items() if not math.isnan(value)}


def results(rows: list[dict[str, Any]]) -> Table:
    """Make the table of returns after each stage, with those of each environment if there are several."""
    episodes = rows[-1]["evaluation"].get("episodes", 0)
    notes = ["" if row["trained"] or row["name"] == "start" else "done before" for row in rows]
    trained = ["trained"] if any(notes) else []
    table = Table("stage", "algorithm", "return", "success", *trained, "folder", title=f"{episodes:.0f} episodes each")
    for row, note in zip(rows, notes):
        shown = [note or ("now" if row["trained"] else "")] if trained else []
        table.add_row(row["name"], row["algorithm"], *_gained(row["evaluation"]), *shown, row["folder"])
        for name, scores in row["evaluation"].get("environments", {}).items():
            table.add_row(f"  {name}", "", *_gained(scores), *[""] * len(trained), "")
    return table


def _gained(scores: dict[str, float]) -> tuple[str, str]:
    success = f"{scores['success']:.1%}" if "success" in scores else "-"
    error = f" ± {scores['return_sem']:.3f}" if "return_sem" in scores else ""
    return f"{scores['return']:+.3f}{error}" if "return" in scores else "-", success


def main(argv: Sequence[str]) -> None:
    """Parse the options and run the chain."""
    parser = argparse.ArgumentParser(
        prog="agile-trainers chain",
        description="Runs several training stages, each from the result of the previous one: SFT and DPO with TRL's "
        "trainers, and any multi-turn algorithm. Finished stages are skipped; an unfinished stage continues from its last "
        "complete checkpoint. docs/chaining.md describes the file.",
    )
    parser.add_argument("pipeline", type=Path, help="the YAML file")
    parser.add_argument("--dry-run", action="store_true", help="check the file and list the stages; train nothing")
    parser.add_argument("--progress", choices=PROGRESS, default="table", help="output while training: a table with one "
                        "row per log, the same with columns of TRL, or every metric of a log in one line, as transformers "
                        "prints it")  # fmt: skip
    options = parser.parse_args(argv)
    with mistakes_of_options(parser, PipelineError, PopulationError, YAMLFileError):
        pipeline = read_pipeline(options.pipeline)
        # After the configurations: without GPUs, the stages' `use_cpu` makes one run of several processes.
        console = Console(quiet=not PartialState().is_main_process)
        if options.dry_run:
            for stage, state in zip(pipeline.stages, _checked(pipeline)):
                reached = "not begun" if state is None else "finished" if state["finished"] else "begun"
                console.print(f"{stage.name}: {_shown(stage)}, {reached}, in {pipeline.output_dir / stage.name}")
            return
        check_output(pipeline.output_dir)  # before the first evaluation
        rows = run_pipeline(pipeline, console, progress=options.progress)
    console.print(results(rows))
    PartialState().destroy_process_group()
