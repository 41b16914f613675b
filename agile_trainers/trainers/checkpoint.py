"""Checkpoints that a run continues from exactly, and that never look whole unless they are."""

from __future__ import annotations

import platform
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import logging
from trl import GRPOTrainer

from agile_trainers.adapters import POLICY, every_adapter_trainable, parent_of
from agile_trainers.adapters.checkpoint import (
    RECORD,
    CheckpointError,
    check_complete,
    checkpoints,
    lora_settings,
    mark_complete,
    newest_complete,
    read_json,
    write_json,
)
from agile_trainers.rollout.engine import RolloutEngine

from .batching import Batch

logger = logging.get_logger(__name__)

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
        self._interrupt = _Interrupt(self)
        self.add_callback(self._interrupt)

    @property
    def _generate_every(self) -> int:
        return self.args.steps_per_generation * self.num_iterations

    # ------------------------------------------------------------------------------------------------------- train

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """``Trainer.train``; interrupted by Ctrl-C (SIGINT), it finishes the optimizer step, saves a checkpoint and raises.
        A second Ctrl-C stops at once.

        Args:
            resume_from_checkpoint: True takes the newest whole checkpoint in ``output_dir``; a path that one.
            *args: See ``Trainer.train``.
            **kwargs: See ``Trainer.train``.

        Raises:
            CheckpointError: If there is no whole checkpoint there, or it is one of another run.
            KeyboardInterrupt: After the checkpoint of an interrupted run was saved.
        """
        if self.engine is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        folder = self._find_checkpoint(resume_from_checkpoint)
        self._epochs_done, steps = 0, self._rollout_state()[0]
        # A trainer that trains anew, maybe after an interruption inside a step, begins with a new generation batch.
        self._restore_rollout(-(-steps // self._generate_every) * self._generate_every, None)
        if folder is not None:
            self._epochs_done = int(read_json(Path(folder) / "trainer_state.json")["epoch"])
            self._parent = read_json(Path(folder) / RECORD)["parent"]
        try:
            with self._interrupt.heard():
                output = super().train(folder, *args, **kwargs)
        finally:
            self.engine.pool.close()
        self._interrupt.pass_on()
        return output

    def _find_checkpoint(self, resume: str | bool | None) -> str | None:
        """Chosen and checked by the main process; all processes get the same answer, or error."""
        answer: list[Any] = [None]
        if self.accelerator.is_main_process:
            try:
                answer = [self._choose_checkpoint(resume)]
            except CheckpointError as error:
                answer = [error]
        broadcast_object_list(answer)
        if isinstance(answer[0], CheckpointError):
            raise answer[0]
        return answer[0]

    def _choose_checkpoint(self, resume: str | bool | None) -> str | None:
        output_dir = Path(self.args.output_dir)
        if resume is None or resume is False:
            self._check_output_dir(output_dir)
            return None
        if resume is True:
            folder, skipped = newest_complete(output_dir)
            for reason in skipped:
                logger.warning("Not resumed from: %s", reason)
        else:
            folder = check_complete(Path(resume))
        self._check_fits(folder)
        return str(folder)

    def _check_output_dir(self, output_dir: Path) -> None:
        """Nothing that others wrote is to be overwritten."""
        found = checkpoints(output_dir)
        foreign = [path for path in found if not (path / RECORD).is_file()]
        if foreign:
            raise CheckpointError(
                f"{foreign[-1]} was not saved by a multi-turn trainer (it has no {RECORD}) and might be overwritten. Choose "
                "another output_dir."
            )
        if found:
            logger.warning(
                "%s holds checkpoints of an earlier run, up to %s, which resume_from_checkpoint=True would take for this "
                "one's. Choose another output_dir, or remove them.",
                output_dir,
                found[-1].name,
            )

    def _check_fits(self, folder: Path) -> None:
        """Refuse the checkpoint of a run with other settings, naming each that differs."""
        theirs, ours = read_json(folder / RECORD), self._stage_record()
        pairs = {name: (theirs.get(name), ours[name]) for name in ("algorithm", "environment")}
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
        if different:
            raise CheckpointError(
                f"{folder} is a checkpoint of another run: {'; '.join(different)}. Give the trainer the settings of then, "
                f"or start a new run with model={str(folder)!r}."
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
        return {
            "algorithm": self._name,
            "environment": self.environment if isinstance(self.environment, str) else _name_of(self.environment),
            "base_model": {
                "name": config._name_or_path or None,
                "commit": getattr(config, "_commit_hash", None),
                **{name: getattr(text, name, None) for name in _ARCHITECTURE},
            },
            "parent": self._parent,
            "lora": lora_settings(model.peft_config[POLICY]) if isinstance(model, PeftModel) else None,
            "global_step": self.state.global_step,
            "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        }

    def _geometry(self) -> dict[str, int]:
        sizes = {name: getattr(self.args, name) for name in _GEOMETRY}
        return {"processes": self.accelerator.num_processes, **sizes}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """``Trainer.save_model``, and a record of where the model comes from (``agile_trainers.json``)."""
        if self.engine is not None and self.args.should_save:
            write_json(Path(output_dir or self.args.output_dir) / RECORD, self._stage_record())
        if self._dist.is_zero3 and isinstance(self.model, PeftModel):
            with every_adapter_trainable(self.model):
                return super().save_model(output_dir, _internal_call)
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.engine is None:
            return super()._save_checkpoint(model, trial)
        run, args = Path(self._get_output_dir(trial)), self.args
        folder = run / f"checkpoint-{self.state.global_step}"
        if args.should_save and (folder / RECORD).is_file():
            # Of an earlier run, or interrupted; a mixture of two would be neither.
            _remove(folder)
        self.accelerator.wait_for_everyone()
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            args.save_total_limit = limit
        self._save_rollout(folder)
        self.accelerator.wait_for_everyone()
        if args.should_save:
            mark_complete(folder)
        if args.push_to_hub:
            super()._push_from_checkpoint(str(folder))
        if args.should_save:
            # `Trainer` would delete the last whole checkpoint before this one is whole.
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

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
        self._restore_rollout(state["generation"] * self._generate_every + state["position"], buffer)

    def _at_epoch(self, sampler: Any) -> Any:
        """Draw the orders of the epochs that are over, so that the next is the one it would have been."""
        if getattr(sampler, "shuffle", False):
            for _ in range(self._epochs_done):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler


class _Interrupt(TrainerCallback):
    """Turns the first SIGINT into a checkpoint and a stop at the end of the optimizer step."""

    def __init__(self, trainer: Checkpoints):
        self._accelerator = trainer.accelerator
        self._requested, self._stopped = False, ""

    @contextmanager
    def heard(self) -> Iterator[None]:
        self._requested, self._stopped = False, ""
        before = signal.getsignal(signal.SIGINT)
        if before is None or threading.current_thread() is not threading.main_thread():
            yield  # Python can change no handler here
            return

        def request(*_: Any) -> None:
            signal.signal(signal.SIGINT, before)
            self._requested = True
            logger.warning("Interrupted: saving a checkpoint after this step. Interrupt again to stop at once.")

        signal.signal(signal.SIGINT, request)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        requested = torch.tensor(float(self._requested), device=self._accelerator.device)
        # The signal may reach one process a step later than another.
        if self._accelerator.reduce(requested, reduction="sum") > 0:
            control.should_save = control.should_training_stop = True
            self._stopped = f"stopped at step {state.global_step}; resume_from_checkpoint=True goes on from there"

    def pass_on(self) -> None:
        """Whoever called ``train`` is to stop too."""
        if self._requested or self._stopped:
            raise KeyboardInterrupt(self._stopped)


def _name_of(factory: Any) -> str:
    factory = getattr(factory, "func", factory)  # of a `functools.partial`
    return getattr(factory, "__qualname__", type(factory).__qualname__)


def _remove(folder: Path) -> None:
    """So that an interruption leaves no half of it under its name."""
    doomed = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    shutil.rmtree(folder.rename(doomed))


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
