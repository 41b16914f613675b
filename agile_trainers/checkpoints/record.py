"""Checkpoints that a run continues from exactly, and that never look whole unless they are."""

from __future__ import annotations

import platform
import shutil
import uuid
from contextlib import ExitStack, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import logging
from trl import GRPOTrainer

from agile_trainers.adapters import POLICY, every_adapter_trainable, parent_of
from agile_trainers.adapters.folders import (
    RECORD,
    CheckpointError,
    check_complete,
    checkpoints,
    lora_settings,
    mark_complete,
    naming_full_disk,
    newest_complete,
    read_json,
    set_aside,
    step_of,
    write_json,
)
from agile_trainers.adapters.sharding import is_zero3
from agile_trainers.checkpoints.nonfinite import StepGuard, check_finite
from agile_trainers.checkpoints.output_lock import OutputDirInUseError, locked
from agile_trainers.checkpoints.resumed_options import compare_options, recorded_options
from agile_trainers.checkpoints.secrets import blanked
from agile_trainers.checkpoints.stopping import GracefulStop
from agile_trainers.envs.registry import describe_environment
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.train_batch import Batch

logger = logging.get_logger(__name__)

_UNFINISHED = "unfinished"
"""Subfolder of ``output_dir`` in which a checkpoint is built; it is moved out of it once it is whole."""
_ROLLOUT, _POSITION = "rollout", "position.json"
"""Subfolder of the rollout buffer (of its own, since loaders of whole models take every safetensors file beside them)."""
_GEOMETRY = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations")
"""With these, a half-used rollout buffer means the same."""
_ARCHITECTURE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


class Checkpoints(GRPOTrainer):
    """Saving, resuming and stopping of the multi-turn trainers."""

    args: Any
    model: Any
    engine: RolloutEngine | None
    environment: Any
    _idle_batches: int
    _saved: Any = None
    _parent: dict[str, Any] | None = None
    """What the policy was started from."""
    _epochs_done = 0
    _updates: Any  # of trainers/updates.py
    _run_id = ""
    """Of the run, or of its branch if it went on from an older checkpoint."""
    _building: Path | None = None
    """Folder below which a checkpoint is being built."""

    def _rollout_state(self) -> tuple[int, list[Batch]]:
        """Micro-steps taken, and the micro-batches of the generation batch that they are in."""
        raise NotImplementedError

    def _restore_rollout(self, steps: int, buffer: list[Batch] | None) -> None:
        raise NotImplementedError

    def _set_up_checkpoints(self) -> None:
        """Once, after TRL's own constructor."""
        if self.args.device.type == "cpu":
            # With several processes accelerate says "cpu:0", which `Trainer` hands to `torch.load`, which knows none.
            vars(self.args)["_setup_devices"] = torch.device("cpu")
        self._parent = parent_of(self._saved, self._base_config()._name_or_path)
        self._graceful_stop = GracefulStop(self.accelerator)
        self.add_callback(self._graceful_stop)

    @property
    def _generate_every(self) -> int:
        return self.args.steps_per_generation * self.num_iterations

    # ------------------------------------------------------------------------------------------------------- train

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """``Trainer.train``; interrupted by Ctrl-C (SIGINT) or SIGTERM, it finishes the optimizer step, saves a checkpoint
        and stops its caller. A second signal stops at once.

        Args:
            resume_from_checkpoint: True takes the newest whole checkpoint in ``output_dir``; ``"auto"`` does if there is
                one, and starts anew otherwise; a path takes that one.
            *args: See ``Trainer.train``.
            **kwargs: See ``Trainer.train``.

        Raises:
            CheckpointError: If there is no whole checkpoint there, or it is one of another run.
            OutputDirInUseError: If another process of this host trains into ``output_dir``.
            NonFiniteError: If too many optimizer steps in a row have a gradient that is not finite.
            KeyboardInterrupt: After the checkpoint of an interrupted run was saved.
            SystemExit: With code 143, after the checkpoint of a run that got SIGTERM was saved.
        """
        if self.engine is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        if self._updates.is_open:
            raise RuntimeError(
                "train() was called in the middle of a run of rollout() and update(). Call finish() first."
            )
        with ExitStack() as lock:
            folder = self._find_checkpoint(resume_from_checkpoint, lock)
            if self._updates.is_beginning:
                self._updates.keep(lock)
            self._epochs_done, steps = 0, self._rollout_state()[0]
            # A trainer that trains anew, maybe after an interruption inside a step, begins with a new generation batch.
            self._restore_rollout(-(-steps // self._generate_every) * self._generate_every, None)
            self._guard = StepGuard()
            if folder is not None:
                self._epochs_done = int(read_json(Path(folder) / "trainer_state.json")["epoch"])
                self._parent = read_json(Path(folder) / RECORD)["parent"]
            try:
                with self._graceful_stop.heard(), naming_full_disk(self.args.output_dir):
                    output = super().train(folder, *args, **kwargs)
            finally:
                self.engine.pool.close()
        self._graceful_stop.pass_on()
        return output

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.engine is not None and self.state.global_step >= self.state.max_steps:
            # `Trainer` looks at this after a step only, and so trains one too many.
            logger.warning(
                "Nothing is left to train: the checkpoint is at step %d of %d. Raise max_steps or num_train_epochs.",
                self.state.global_step, self.state.max_steps,
            )  # fmt: skip
            self.control.should_training_stop = True
            return
        self._updates.intercept(kwargs)
        super()._run_epoch(*args, **kwargs)

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        with self._updates.watched(tr_loss, grad_norm, kwargs.get("learning_rate")):
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.engine is not None:
            self._guard.inspect(norm, self.model, self.optimizer, self.accelerator, self.state.global_step)
            self._metrics["train"]["skipped_steps"] = [float(self._guard.skipped)]
        return norm

    def _find_checkpoint(self, resume: str | bool | None, lock: ExitStack) -> str | None:
        """The checkpoint to resume from. The main process locks ``output_dir`` and chooses; all get its answer, or error."""
        answer: list[Any] = [None, ""]
        if self.accelerator.is_main_process:
            try:
                lock.enter_context(locked(Path(self.args.output_dir)))
                answer = [self._choose_checkpoint(resume), self._run_id]
            except (CheckpointError, OutputDirInUseError) as error:
                answer = [error, ""]
        broadcast_object_list(answer)
        if isinstance(answer[0], Exception):
            raise answer[0]
        self._run_id = answer[1]
        return answer[0]

    def _choose_checkpoint(self, resume: str | bool | None) -> str | None:
        output_dir = Path(self.args.output_dir)
        folder = self._named_checkpoint(resume, output_dir)
        if folder is None:
            self._check_output_dir(output_dir)
            self._begin_branch(output_dir, after=-1)
            return None
        self._check_fits(folder)
        record = read_json(folder / RECORD)
        own = folder.resolve().parent == output_dir.resolve()
        later = [path for path in checkpoints(output_dir) if step_of(path) > record["global_step"]]
        if own and not later and record.get("run_id"):
            self._run_id = record["run_id"]
        else:
            self._begin_branch(output_dir, after=record["global_step"] if own else -1)
        return str(folder)

    @staticmethod
    def _named_checkpoint(resume: str | bool | None, output_dir: Path) -> Path | None:
        """The whole checkpoint that ``resume_from_checkpoint`` names, read once; None to start anew."""
        if resume is None or resume is False or (resume == "auto" and not checkpoints(output_dir)):
            return None
        if resume is not True and resume != "auto":
            return check_complete(Path(resume))
        try:
            folder, skipped = newest_complete(output_dir)
        except CheckpointError as error:
            if resume is True:
                raise
            logger.warning("Starting anew: %s", error)
            return None
        for reason in skipped:
            logger.warning("Not resumed from: %s", reason)
        return folder

    def _begin_branch(self, output_dir: Path, after: int) -> None:
        """Give the run a new id, and set aside what later resumes would take for its checkpoints.

        Args:
            output_dir: Of the run.
            after: The step it goes on from; checkpoints of later steps are another branch's.
        """
        self._run_id = uuid.uuid4().hex[:12]
        # The policy itself may come from one of them.
        source = Path(self._base_config()._name_or_path if self._saved is None else self._saved.folder).resolve()
        others = [path for path in checkpoints(output_dir) if step_of(path) > after and path.resolve() != source]
        if others:
            where = set_aside(others, output_dir)
            logger.warning(
                "%s held checkpoints of another run or branch (%s), which a later resume would take for this one's. They "
                "are in %s now.",
                output_dir, ", ".join(path.name for path in others), where,
            )  # fmt: skip

    def _check_output_dir(self, output_dir: Path) -> None:
        """Nothing that others wrote is to be overwritten."""
        foreign = [path for path in checkpoints(output_dir) if not (path / RECORD).is_file()]
        if foreign:
            raise CheckpointError(
                f"{foreign[-1]} was not saved by a multi-turn trainer (it has no {RECORD}) and might be overwritten. Choose "
                "another output_dir."
            )

    def _check_fits(self, folder: Path) -> None:
        """Refuse the checkpoint of a run with other settings, naming each that differs."""
        theirs, ours = read_json(folder / RECORD), self._stage_record()
        pairs = {name: (theirs.get(name), ours[name]) for name in ("algorithm", "environment")}
        if "environment_arguments" in theirs:
            pairs["environment_arguments"] = theirs["environment_arguments"], ours["environment_arguments"]
        base = theirs.get("base_model") or {}
        pairs |= {f"base_model.{name}": (base.get(name), ours["base_model"][name]) for name in _ARCHITECTURE}
        names = base.get("name"), ours["base_model"]["name"]
        if not any(name and Path(name).is_dir() for name in names):
            pairs["base_model.name"] = names  # a folder may have moved
        lora, own_lora = theirs.get("lora"), ours["lora"]
        if lora is None or own_lora is None:
            pairs["lora"] = lora, own_lora
        else:
            pairs |= {f"lora.{name}": (lora.get(name), own_lora.get(name)) for name in sorted({*lora, *own_lora})}
        position = read_json(folder / _ROLLOUT / _POSITION)
        if position["position"]:
            pairs |= {name: (position["geometry"].get(name), value) for name, value in self._geometry().items()}
        different = [f"{name} is {a!r} there and {b!r} here" for name, (a, b) in pairs.items() if a != b]
        options = compare_options(theirs.get("options", {}), ours["options"])
        different += [f"{change} does not fit the saved states" for change in options.refused]
        if different:
            raise CheckpointError(
                f"{folder} is a checkpoint of another run: {'; '.join(different)}. Give the trainer the settings of then, "
                f"or start a new run with model={str(folder)!r}."
            )
        if options.idle:
            logger.warning(
                "These options differ from the checkpoint's and have NO effect, since the optimizer's state holds them: %s. "
                "To change them, start a new run with model=%r.",
                "; ".join(options.idle), str(folder),
            )  # fmt: skip
        if options.active:
            logger.warning(
                "These options differ from the checkpoint's and take effect from here on: %s.",
                "; ".join(options.active),
            )

    # -------------------------------------------------------------------------------------------------------- save

    def _base_config(self) -> Any:
        model = self.accelerator.unwrap_model(self.model)
        return (model.get_base_model() if isinstance(model, PeftModel) else model).config

    def _stage_record(self) -> dict[str, Any]:
        """What ``agile_trainers.json`` says."""
        model = self.accelerator.unwrap_model(self.model)
        config = self._base_config()
        text = config.get_text_config()
        packages = ("agile-trainers", "trl", "transformers", "peft", "accelerate", "torch")
        record = {
            "algorithm": self._name,
            **describe_environment(self.environment),
            "base_model": {
                "name": config._name_or_path or None,
                "commit": getattr(config, "_commit_hash", None),
                **{name: getattr(text, name, None) for name in _ARCHITECTURE},
            },
            "parent": self._parent,
            "lora": lora_settings(model.peft_config[POLICY]) if isinstance(model, PeftModel) else None,
            "global_step": self.state.global_step,
            "run_id": self._run_id,
            "options": recorded_options(self.args),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        }
        return blanked(record)  # an environment may take an API's key as an argument

    def _geometry(self) -> dict[str, int]:
        sizes = {name: getattr(self.args, name) for name in _GEOMETRY}
        return {"processes": self.accelerator.num_processes, **sizes}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """``Trainer.save_model``, and a record of where the model comes from (``agile_trainers.json``)."""
        folder = Path(output_dir or self.args.output_dir)
        if self.engine is not None and self.args.should_save:
            write_json(folder / RECORD, self._stage_record())
        sharded = is_zero3(self.accelerator.state.deepspeed_plugin) and isinstance(self.model, PeftModel)
        with naming_full_disk(folder), every_adapter_trainable(self.model) if sharded else nullcontext():
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.engine is None:
            return super()._save_checkpoint(model, trial)
        check_finite(self.model, self.accelerator, self.state.global_step)
        run, args = Path(self._get_output_dir(trial)), self.args
        name = f"checkpoint-{self.state.global_step}"
        building, folder = run / _UNFINISHED / name, run / name
        here = self.accelerator.is_local_main_process  # of each machine, which need not share a disk
        if here:
            shutil.rmtree(building.parent, ignore_errors=True)  # what a kill left
        self.accelerator.wait_for_everyone()
        self._building = building.parent
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._building = None
        self._save_rollout(building)
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
            if args.should_save:
                self.state.save_to_json(str(building / "trainer_state.json"))
        self.accelerator.wait_for_everyone()
        if args.should_save:
            mark_complete(building)
        self.accelerator.wait_for_everyone()
        if here:
            _move_into_place(building, folder)
        self.accelerator.wait_for_everyone()
        if args.push_to_hub:
            super()._push_from_checkpoint(str(folder))
        if args.should_save:
            # `Trainer` has looked in the folder of unfinished ones, where there is only this one.
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=False,  # by step
            )

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._building is None else str(self._building)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Not yet, where `Trainer` calls it: the folder is not whole. See :meth:`_save_checkpoint`."""
        if self.engine is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_rollout(self, folder: Path) -> None:
        """The micro-batches that are still to be trained on, one file per process, and how far it is through them."""
        if self.args.save_only_model:
            return
        steps, buffer = self._rollout_state()
        generation, position = divmod(steps, self._generate_every)
        (folder / _ROLLOUT).mkdir(parents=True, exist_ok=True)
        if position:
            save_file(_flat(buffer), folder / _ROLLOUT / f"rank-{self.accelerator.process_index}.safetensors")
        if self.args.should_save:
            state = {
                "generation": generation,
                "position": position,
                "idle_batches": self._idle_batches,
                "skipped_steps": vars(self._guard),
                "geometry": self._geometry(),
            }
            write_json(folder / _ROLLOUT / _POSITION, state)

    # ------------------------------------------------------------------------------------------------------ resume

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.engine is None or checkpoint is None:
            return
        folder = Path(checkpoint) / _ROLLOUT
        state = read_json(folder / _POSITION)
        buffer = None
        if state["position"]:
            file = folder / f"rank-{self.accelerator.process_index}.safetensors"
            buffer = _nested(load_file(file, device=str(self.args.device)))
        self._idle_batches = state["idle_batches"]
        self._guard = StepGuard(**state.get("skipped_steps", {}))
        self._restore_rollout(state["generation"] * self._generate_every + state["position"], buffer)

    def _at_epoch(self, sampler: Any) -> Any:
        """Draw the orders of the epochs that are over, so that the next is the one it would have been."""
        if getattr(sampler, "shuffle", False):
            for _ in range(self._epochs_done):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler


def _move_into_place(building: Path, folder: Path) -> None:
    """Rename a finished checkpoint; one of the same step makes room first."""
    if folder.is_dir() and building.is_dir():
        doomed = folder.with_name(f"{folder.name}.old")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        building.rename(folder)
        shutil.rmtree(doomed)
    else:
        with suppress(FileNotFoundError):  # another machine with the same disk was first
            building.rename(folder)
    with suppress(OSError):
        building.parent.rmdir()


def _flat(micro_batches: list[Batch]) -> dict[str, torch.Tensor]:
    named = {f"{i}.{name}": value for i, batch in enumerate(micro_batches) for name, value in batch.items()}
    # Micro-batches are views of one tensor, which safetensors does not write.
    return {name: value.contiguous().clone() for name, value in named.items()}


def _nested(tensors: dict[str, torch.Tensor]) -> list[Batch]:
    micro_batches: dict[int, Batch] = {}
    for name, value in tensors.items():
        index, _, column = name.partition(".")
        micro_batches.setdefault(int(index), {})[column] = value
    return [micro_batches[index] for index in sorted(micro_batches)]
