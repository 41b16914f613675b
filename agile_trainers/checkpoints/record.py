"""Saves and restores checkpoints, from which a run continues exactly; an incomplete one is recognized."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import logging
from trl import GRPOTrainer

from agile_trainers.adapters.folders import (
    RECORD,
    SUCCESSES_FORM,
    CheckpointError,
    read_form,
    read_json,
    read_record,
    write_json,
)
from agile_trainers.adapters.loading import SavedAdapters, parent_of, read_config
from agile_trainers.adapters.lora_settings import lora_settings
from agile_trainers.adapters.roles import REFERENCE, base_model
from agile_trainers.adapters.untrusted import check_patterns
from agile_trainers.checkpoints.disclosure import (
    check_public,
    differences,
    flat_environment,
    masked,
    note_private,
    public_arguments,
    public_options,
    warn_of_unknown,
)
from agile_trainers.checkpoints.integrity import (
    check_complete,
    checkpoints,
    mark_complete,
    newest_complete,
    set_aside,
    step_of,
)
from agile_trainers.checkpoints.resuming import (
    agreed_step,
    check_storage,
    compare_options,
    locked,
    on_each_disk,
    recorded_options,
)
from agile_trainers.records.reader import read_rows
from agile_trainers.records.writer import new_run_id, write_episodes
from agile_trainers.train_batch import Batch

logger = logging.get_logger(__name__)

_UNFINISHED = "unfinished"
"""Subfolder of ``output_dir`` in which a checkpoint is built; a complete one is moved out of it."""
_ROLLOUT, _POSITION = "rollout", "position.json"
"""Subfolder and index of the rollout buffer. Loaders of whole models take every safetensors file of the main folder."""
_SNAPSHOTS = "snapshots.safetensors"
"""Adapters that play batches ahead."""
_SUCCESSES = "successes.json"
"""Episodes that may take places in groups. They are not in the index, which is pushed to the Hub."""
_GEOMETRY = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations")
"""Options that must be the same for a half-used rollout buffer to be valid."""
_ARCHITECTURE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass
class RolloutState:
    """The position of a run in its rollouts, which ``Trainer`` does not save."""

    steps: int
    """Micro-steps taken."""
    micro_batches: list[Batch] | None
    """Micro-batches of the current generation batch; None at its start."""
    parts: dict[str, Any]
    """States of the parts of a run as JSON, by their names in ``position.json``; an earlier release wrote fewer."""
    episodes: list[dict[str, Any]] = field(default_factory=list)
    """Records of the current generation batch, rows of :data:`agile_trainers.records.schema.EPISODE`."""
    ahead: AheadState | None = None
    """Batches that are played ahead; None without any."""
    successes: dict[str, Any] = field(default_factory=dict)
    """State of a :class:`~agile_trainers.step.successes.Successes`."""


@dataclass
class AheadState:
    """State of the generation batches that are played ahead of their update."""

    batches: list[dict[str, Any]]
    """``generation``, ``version`` and ``episodes`` of each batch of this process, as JSON."""
    weights: dict[int, dict[str, torch.Tensor]]
    """The adapters that play them, by version."""


class RunCheckpoints:
    """Chooses, builds and deletes the checkpoints of a run in ``output_dir``.

    Args:
        trainer: After TRL's own constructor.
        algorithm: The algorithm's name.
        environment: The trainer's argument.
        saved: The adapters that the policy was loaded from, if any.
    """

    def __init__(self, trainer: GRPOTrainer, algorithm: str, environment: Any, saved: SavedAdapters | None) -> None:
        self._trainer, self._algorithm, self._environment, self._saved = trainer, algorithm, environment, saved
        self._args: Any = trainer.args
        check_public(trainer.args.public_values, environment, vars(trainer.args))
        check_storage(trainer.accelerator, trainer.args)
        self._parent = parent_of(saved, self._base_config._name_or_path)
        self.run_id = ""
        """Id of the run, or of its branch if it was resumed from an older checkpoint."""
        self.epochs_done = 0
        """Number of whole epochs before the checkpoint that the run was resumed from."""
        self.building: Path | None = None
        """Folder below which a checkpoint is being built."""
        self._best_step: int | None = None
        """Step of the best checkpoint, once the policy has its weights."""
        self._others: list[Path] = []
        """Checkpoints of another run or branch, to be set aside."""

    @property
    def _base_config(self) -> Any:
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        return base_model(model).config

    @property
    def _every(self) -> int:
        return self._args.steps_per_generation * self._args.num_iterations

    # ------------------------------------------------------------------------------------------------------ choose

    def choose(self, resume: str | bool | None, lock: ExitStack) -> str | None:
        """Choose the checkpoint to resume from, the same on all processes.

        The main process locks ``output_dir`` and chooses for all, or all raise. With ``save_on_each_node``, one process of
        each machine does so with its own folder; the newest checkpoint that all machines hold is taken.

        Args:
            resume: ``resume_from_checkpoint``.
            lock: Receives the lock, which is released when the run ends.

        Raises:
            ValueError: If ``resume`` names no folder.
            CheckpointError: If there is no whole checkpoint there, or it is one of another run.
            OutputDirInUseError: If another process of this host trains into ``output_dir``.
        """
        if resume == "" or not isinstance(resume, (str, os.PathLike, bool, type(None))):
            raise ValueError(
                f"resume_from_checkpoint={resume!r}: expected True, 'auto', or the folder of a checkpoint."
            )
        if isinstance(resume, str) and resume.lower() == "auto":
            resume = "auto"
        output_dir, saves = Path(self._args.output_dir), self._args.should_save
        on_each_disk(saves, lambda: lock.enter_context(locked(output_dir)))
        newest = resume is True or resume == "auto"
        step = agreed_step(saves, lambda at_most: self._find_step(resume, output_dir, at_most), older=newest)
        folder = None if step is None else output_dir / f"checkpoint-{step}" if newest else Path(str(resume))
        if folder is not None:
            self._check_own_states(folder)
        self._best_step, self._others = None, []
        self.run_id = on_each_disk(saves, lambda: self._begin(folder, output_dir))[0]
        if saves:
            note_private(output_dir, self._environment, recorded_options(self._args))
        self.epochs_done = 0
        if folder is None:
            self._set_aside()
            return None
        self.epochs_done = int(read_json(folder / "trainer_state.json")["epoch"])
        self._parent = read_record(folder).get("parent")
        return str(folder)

    def _begin(self, folder: Path | None, output_dir: Path) -> str:
        """Check the checkpoint, or the folder of a new run, and return the id of the run or its new branch."""
        if folder is None:
            self._check_output_dir(output_dir)
            return self._begin_branch(output_dir, after=-1)
        self._check_fits(folder)
        record = read_json(folder / RECORD)
        own = output_dir.resolve() in (folder.resolve().parent, folder.parent.resolve())  # either may be a link
        later = [path for path in checkpoints(output_dir) if step_of(path) > record["global_step"]]
        if own and not later and record.get("run_id"):
            return record["run_id"]
        return self._begin_branch(output_dir, after=record["global_step"] if own else -1)

    @staticmethod
    def _find_step(resume: str | bool | None, output_dir: Path, at_most: int | None) -> int | None:
        """Return the step of the complete checkpoint that ``resume_from_checkpoint`` names; None to start a new run."""
        if resume is None or resume is False or (resume == "auto" and not checkpoints(output_dir)):
            return None
        if resume is not True and resume != "auto":
            return read_json(check_complete(Path(resume)) / RECORD)["global_step"]
        try:
            folder, skipped = newest_complete(output_dir, at_most)
        except CheckpointError as error:
            if resume is True:
                raise
            logger.warning("Starting a new run: %s", error)
            return None
        for reason in skipped:
            logger.warning("Not resumed from: %s", reason)
        return step_of(folder)

    def _check_own_states(self, folder: Path) -> None:
        """Reject a checkpoint that other processes saved on this disk, as after machines were started in another order."""
        processes = self._trainer.accelerator.num_processes
        name = f"rng_state_{self._trainer.accelerator.process_index}.pth"
        same = read_json(folder / _ROLLOUT / _POSITION)["geometry"]["processes"] == processes > 1
        lost = gather_object([name] if same and not (folder / name).is_file() else [])
        if lost:
            raise CheckpointError(
                f"{folder} lacks {', '.join(lost)} on the machines of these processes. Start the machines in the order in "
                "which they saved it (--machine_rank), or start a new run with "
                f"model={str(folder)!r}."
            )

    def _begin_branch(self, output_dir: Path, after: int) -> str:
        """Note checkpoints that a later resume would take for those of a new branch, and return the branch's id.

        Args:
            output_dir: Folder of the run.
            after: The step it is resumed from; checkpoints of later steps belong to another branch.
        """
        # The policy itself may come from one of them.
        source = Path(self._base_config._name_or_path if self._saved is None else self._saved.folder).resolve()
        self._others = [path for path in checkpoints(output_dir) if step_of(path) > after and path.resolve() != source]
        return new_run_id()

    def _set_aside(self) -> None:
        others, self._others = self._others, []
        if others:
            where = set_aside(others, others[0].parent)
            logger.warning(
                "%s held checkpoints of another run or branch (%s), which a later resume would take for this one's. They "
                "are in %s now.",
                others[0].parent, ", ".join(path.name for path in others), where,
            )  # fmt: skip

    def _check_output_dir(self, output_dir: Path) -> None:
        """Reject an ``output_dir`` with checkpoints of another program, which might be overwritten."""
        foreign = [path for path in checkpoints(output_dir) if not (path / RECORD).is_file()]
        if foreign:
            raise CheckpointError(
                f"{foreign[-1]} was not saved by a multi-turn trainer (it has no {RECORD}) and might be overwritten. Choose "
                "another output_dir."
            )

    def _check_fits(self, folder: Path) -> None:
        """Reject the checkpoint of a run with other settings, and name each that differs."""
        theirs, ours = read_json(folder / RECORD), self.record()
        pairs = {name: (theirs.get(name), ours[name]) for name in ("algorithm", "environment")}
        base = theirs.get("base_model") or {}
        pairs |= {f"base_model.{name}": (base.get(name), ours["base_model"][name]) for name in _ARCHITECTURE}
        names = base.get("name"), ours["base_model"]["name"]
        if not any(isinstance(name, str) and os.path.isdir(name) for name in names):
            pairs["base_model.name"] = names  # a folder may have moved
        lora, own_lora = theirs.get("lora"), ours["lora"]
        if lora is None or own_lora is None:
            pairs["lora"] = lora, own_lora
        else:
            pairs |= {f"lora.{name}": (lora.get(name), own_lora.get(name)) for name in sorted({*lora, *own_lora})}
        position = read_json(folder / _ROLLOUT / _POSITION)
        unpushed = "from a copy that was not pushed"
        for expected, file, what, instead in (
            (
                position["position"], "rank-*.safetensors",
                "the episodes that it was training on, and lies inside their generation batch",
                "from a checkpoint between two batches or from one that was not pushed",
            ),
            (position.get("ahead"), "ahead-*.json", "the episodes that it had begun ahead of their update", unpushed),
            (position.get("successes"), _SUCCESSES, "the successes that it kept", unpushed),
        ):  # fmt: skip
            if expected and not any((folder / _ROLLOUT).glob(file)):
                raise CheckpointError(
                    f"{folder} was pushed without {what}, so the run cannot resume exactly. Resume {instead}, or start a "
                    f"new run with model={str(folder)!r}."
                )
        if position["position"] or position.get("ahead"):
            pairs |= {name: (position["geometry"].get(name), value) for name, value in self._geometry().items()}
        different = [f"{name} is {a!r} there and {b!r} here" for name, (a, b) in pairs.items() if a != b]
        shown, arguments = ours["environment_arguments"], flat_environment(self._environment)["environment_arguments"]
        known = theirs.get("environment_arguments", shown)
        changed, unknown = differences(known, arguments, shown)
        different += [f"environment_arguments.{clause}" for clause in changed.values()]
        deepspeed = bool(getattr(self._trainer, "is_deepspeed_enabled", False))
        options = compare_options(
            theirs.get("options", {}), recorded_options(self._args), ours["options"], deepspeed=deepspeed,
            inside=bool(position["position"]),
        )  # fmt: skip
        different += [f"{change} does not fit the saved states" for change in options.refused]
        if different:
            raise CheckpointError(
                f"{folder} is a checkpoint of another run: {'; '.join(different)}. Give the trainer those settings, "
                f"or start a new run with model={str(folder)!r}."
            )
        if options.early:
            raise CheckpointError(
                f"{folder} lies inside a generation batch that was made without what these options need: "
                f"{'; '.join(options.early)}. Resume from a checkpoint between two batches, or leave these options as they "
                "were."
            )
        here = self._data()
        if (there := position.get("data", here)) != here:
            logger.warning(
                "train_dataset is not the checkpoint's: it had %s rows with the columns %s, and has %s with %s. The run "
                "goes on at its place in the new rows.",
                there["rows"], there["columns"], here["rows"], here["columns"],
            )  # fmt: skip
        self._check_adapters(folder)
        warn_of_unknown(folder, [*(f"environment_arguments.{name}" for name in unknown), *options.unknown])
        if options.idle:
            logger.warning(
                "These options differ from the checkpoint's and have NO effect, since DeepSpeed's state holds them: %s. "
                "To change them, start a new run with model=%r.",
                "; ".join(options.idle), str(folder),
            )  # fmt: skip
        if options.active:
            logger.warning(
                "These options differ from the checkpoint's and take effect from here on: %s.",
                "; ".join(options.active),
            )

    def _check_adapters(self, folder: Path) -> None:
        """Reject adapters that this run does not have, as ``Trainer`` adds every one in a subfolder to the model.

        A run that was started from an adapter has a reference, which a trainer on the base model alone lacks.
        """
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        if not isinstance(model, PeftModel):
            return
        found = {file.parent.name for file in folder.glob("*/adapter_*")}
        if other := sorted(found - {REFERENCE, *model.peft_config}):
            raise CheckpointError(
                f"{folder} holds adapters that this run does not have: {ascii(other)[:200]}. Give the trainer the settings "
                "that it was saved with, or remove their folders."
            )
        if REFERENCE in found - model.peft_config.keys():
            try:
                check_patterns(read_config(folder / REFERENCE), model.get_base_model(), folder / REFERENCE)
            except ValueError as error:
                raise CheckpointError(str(error)) from error

    # -------------------------------------------------------------------------------------------------------- save

    def record(self) -> dict[str, Any]:
        """Make the content of ``agile_trainers.json``: the origin of a model."""
        model, text = self._trainer.accelerator.unwrap_model(self._trainer.model), self._base_config.get_text_config()
        step = self._trainer.state.global_step if self._best_step is None else self._best_step
        record = record_without_environment(self._algorithm, model, step, self._parent)
        record["base_model"] |= {name: getattr(text, name, None) for name in _ARCHITECTURE}
        record |= {
            **public_arguments(self._environment, self._args.public_values),
            "critic": self._args.has_critic,
            "run_id": self.run_id,
            "options": public_options(recorded_options(self._args), type(self._args), self._args.public_values),
        }
        return masked(record)

    def describe(self, folder: Path) -> None:
        """Write the record into a folder that gets the model."""
        write_json(folder / RECORD, self.record())
        # Beside the run alone: a folder elsewhere may be one that is published.
        if self.building is None and folder.resolve() == Path(self._args.output_dir).resolve():
            note_private(folder, self._environment, recorded_options(self._args))

    def can_load(self, best: Path) -> bool:
        """Return whether the best checkpoint is complete on all disks, and name its step from then on; warn if not."""
        try:
            self._best_step = on_each_disk(
                self._args.should_save, lambda: read_record(check_complete(best, resumes=False))["global_step"]
            )[0]
        except CheckpointError as error:
            logger.warning("The best checkpoint is not loaded, and the last weights are kept: %s", error)
            return False
        return True

    def _data(self) -> dict[str, Any]:
        """Return what tells the rows of a run from others."""
        if not self._trainer.setup.rows_are_options:
            return {"rows": 0, "columns": []}
        rows = self._trainer.train_dataset
        columns = getattr(rows, "column_names", None) or []
        return {"rows": len(rows) if hasattr(rows, "__len__") else None, "columns": sorted(columns)}

    def _geometry(self) -> dict[str, int]:
        sizes = {name: getattr(self._args, name) for name in _GEOMETRY}
        return {"processes": self._trainer.accelerator.num_processes, **sizes}

    @contextmanager
    def saving(self, run: Path, rollout: RolloutState) -> Iterator[Path]:
        """Build a checkpoint in a hidden folder and move it into ``run`` when it is complete.

        Args:
            run: The folder of the run's checkpoints.
            rollout: Position in the rollouts, saved unless ``save_only_model``.

        Yields:
            The folder to write into; :attr:`building` is its parent.
        """
        accelerator, state, args = self._trainer.accelerator, self._trainer.state, self._args
        name = f"checkpoint-{state.global_step}"
        building, folder = run / _UNFINISHED / name, run / name
        if args.should_save:
            shutil.rmtree(building.parent, ignore_errors=True)  # left by a killed process
        accelerator.wait_for_everyone()
        self.building = building.parent
        try:
            yield building
        finally:
            self.building = None
        self._save_rollout(building, rollout)
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(folder)
            if args.should_save:
                state.save_to_json(str(building / "trainer_state.json"))
        accelerator.wait_for_everyone()
        if args.should_save:
            mark_complete(building)
        accelerator.wait_for_everyone()  # all disks hold it before one shows it
        if args.should_save:
            _move_into_place(building, folder)
        accelerator.wait_for_everyone()

    def rotate(self, run: Path) -> None:
        """Delete the checkpoints beyond ``save_total_limit``. ``Trainer`` only sees the folder of unfinished ones."""
        if self._args.should_save:
            best = self._trainer.state.best_model_checkpoint
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=self._args.save_total_limit,
                # By the name that it has here: the state's may be relative, or another folder's.
                best_model_checkpoint=best and str(run / Path(best).name),
                use_mtime=False,  # by step
            )

    def _save_rollout(self, folder: Path, rollout: RolloutState) -> None:
        """Save the current micro-batches, one file per process, and the position in them."""
        if self._args.save_only_model:
            return
        generation, position = divmod(rollout.steps, self._every)
        (folder / _ROLLOUT).mkdir(parents=True, exist_ok=True)
        if position:
            file = folder / _ROLLOUT / f"rank-{self._trainer.accelerator.process_index}.safetensors"
            # Micro-batches are views of one tensor, which safetensors does not write.
            own = [
                {name: value.contiguous().clone() for name, value in one.items()} for one in rollout.micro_batches or ()
            ]
            save_file(_flat(dict(enumerate(own)), "."), file)
            if rollout.episodes:
                write_episodes(file.with_suffix(".parquet"), rollout.episodes)
        if rollout.ahead is not None and rollout.ahead.batches:
            write_json(folder / _ROLLOUT / self._ahead_file, {"batches": rollout.ahead.batches})
            if self._args.should_save:
                save_file(_flat(rollout.ahead.weights, "/"), folder / _ROLLOUT / _SNAPSHOTS)
        if self._args.should_save:
            if rollout.successes:
                write_json(folder / _ROLLOUT / _SUCCESSES, {"kept": rollout.successes})
            state = {
                "generation": generation,
                "position": position,
                **rollout.parts,
                "successes": len(rollout.successes),
                "ahead": [] if rollout.ahead is None else [one["generation"] for one in rollout.ahead.batches],
                "geometry": self._geometry(),
                "data": self._data(),
            }
            write_json(folder / _ROLLOUT / _POSITION, state)

    # ------------------------------------------------------------------------------------------------------ resume

    def find_best(self, checkpoint: Path) -> None:
        """Look for the best checkpoint beside the one that is resumed from: its folder may have moved, or been pushed.

        Args:
            checkpoint: Its states are loaded, so that checkpoints of another branch are set aside before.
        """
        self._set_aside()
        self._trainer.accelerator.wait_for_everyone()
        state, best = self._trainer.state, read_json(checkpoint / "trainer_state.json").get("best_model_checkpoint")
        # A pushed checkpoint does not name the folder.
        name = f"checkpoint-{state.best_global_step}" if best is None else Path(best).name
        beside = {path.name: str(path) for path in checkpoints(checkpoint.parent)}
        if best is not None and Path(best).is_dir():
            beside.setdefault(name, best)
        state.best_model_checkpoint = beside.get(name)
        # `Trainer` updates the states of callbacks that are there; a pushed checkpoint has none.
        known = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        made = TrainerState(stateful_callbacks=[one for one in known if isinstance(one, ExportableState)])
        state.stateful_callbacks = {**made.stateful_callbacks, **state.stateful_callbacks}

    def load_rollout(self, checkpoint: str) -> RolloutState:
        """Load the position in the rollouts that :meth:`saving` saved for this process."""
        folder, device = Path(checkpoint) / _ROLLOUT, str(self._args.device)
        state = read_json(folder / _POSITION)
        micro_batches, episodes = None, []
        if state["position"]:
            file = folder / f"rank-{self._trainer.accelerator.process_index}.safetensors"
            with _readable(file):
                micro_batches = [batch for _, batch in sorted(_nested(load_file(file, device=device), ".").items())]
                if file.with_suffix(".parquet").is_file():
                    episodes = read_rows(file.with_suffix(".parquet"))
        steps, ahead = state["generation"] * self._every + state["position"], None
        if (folder / self._ahead_file).is_file():
            with _readable(folder / _SNAPSHOTS):
                weights = _nested(load_file(folder / _SNAPSHOTS, device=device), "/")
            ahead = AheadState(read_json(folder / self._ahead_file)["batches"], weights)
        successes = read_form(folder / _SUCCESSES, SUCCESSES_FORM)["kept"] if state.get("successes") else {}
        return RolloutState(steps, micro_batches, state, episodes, ahead, successes)

    @property
    def _ahead_file(self) -> str:
        return f"ahead-{self._trainer.accelerator.process_index}.json"

    def at_epoch(self, sampler: Any) -> Any:
        """Draw the orders of the epochs that are over, so that the next is the one it would have been."""
        if getattr(sampler, "shuffle", False):
            for _ in range(self.epochs_done):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler


def record_without_environment(
    algorithm: str, model: Any, global_step: int, parent: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Make the record of a run that plays no episodes, for its model card.

    Args:
        algorithm: Its name.
        model: The trained model, not wrapped.
        global_step: Number of updates.
        parent: See :func:`~agile_trainers.adapters.loading.parent_of`.
    """
    config = base_model(model).config
    return {
        "algorithm": algorithm,
        "environment": None,
        "base_model": {"name": config._name_or_path or None, "commit": getattr(config, "_commit_hash", None)},
        "parent": parent,
        "lora": lora_settings(model.active_peft_config) if isinstance(model, PeftModel) else None,
        "global_step": global_step,
        "versions": package_versions(),
    }


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run depends on."""
    packages = ("agile-trainers", "trl", "transformers", "peft", "accelerate", "torch")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _move_into_place(building: Path, folder: Path) -> None:
    """Rename a complete checkpoint; an older one of the same step is removed."""
    if folder.is_dir() and building.is_dir():
        doomed = folder.with_name(f"{folder.name}.old")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        building.rename(folder)
        shutil.rmtree(doomed)
    else:
        building.rename(folder)
    with suppress(OSError):
        building.parent.rmdir()


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}.") from error


def _flat(parts: Mapping[int, Mapping[str, Any]], mark: str) -> dict[str, torch.Tensor]:
    """Name the tensors of numbered parts for one file of safetensors, by number, mark and name."""
    return {f"{number}{mark}{name}": value for number, own in parts.items() for name, value in own.items()}


def _nested(tensors: Mapping[str, torch.Tensor], mark: str) -> dict[int, dict[str, Any]]:
    """Part the tensors that :func:`_flat` has named."""
    parts: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(mark)
        parts.setdefault(int(number), {})[name] = value
    return parts
