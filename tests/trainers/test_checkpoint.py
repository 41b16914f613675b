"""A run that was killed goes on as if nothing had happened, from the newest checkpoint that is whole."""

from __future__ import annotations

import builtins
import functools
import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_runs import CASES, SAVING, KillBefore, Killed, assert_same, make, press_ctrl_c, run_until, weights
from games import Chatter, make_trainer
from peft import LoraConfig, PeftModel
from recorded import recorded
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from agile_trainers.adapters.folders import RECORD, CheckpointError
from agile_trainers.checkpoints.integrity import MARKER, check_complete, mark_complete, newest_complete


def logged(trainer: Any) -> list[dict[str, float]]:
    names = (
        "loss", "kl", "num_tokens", "entropy_coef", "learning_rate", "return/mean", "value/loss", "epoch", "step",
        "sampling/sampling_logp_difference/mean",
    )  # fmt: skip
    return [
        {name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history if "loss" in entry
    ]


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def undisturbed(embedded_model, tmp_path_factory) -> Callable[[str], Any]:
    """The trainer of a case after its run, and read only."""

    @functools.cache
    def train(case: str) -> Any:
        trainer = make(case, embedded_model, tmp_path_factory.mktemp("whole"))
        trainer.train()
        return trainer

    return train


KILLS = {"grpo": (1, 3, 4), "reinforce": (1, 4), "ppo": (1, 2)}
"""GRPO's inside each pass of a batch and at its end, REINFORCE's inside and at the end of an epoch; other cases' once."""


@pytest.mark.parametrize("case", CASES)
def test_killed_at_every_step(embedded_model, tmp_path, undisturbed, case):
    """Killed after steps and resumed by a new trainer each time, a run ends where an undisturbed one does, bitwise."""
    whole = undisturbed(case)
    steps = whole.args.max_steps
    for step in (*KILLS.get(case, (1,)), steps):
        trainer = run_until(step, case, embedded_model, tmp_path / "killed", resume=step > 1 or None)
        assert trainer.state.global_step == step
    assert_same(weights(trainer), weights(whole))
    assert logged(trainer) == logged(whole)
    records = recorded(tmp_path / "killed")
    assert records == recorded(Path(whole.args.output_dir)) and any(record["ratios"] for record in records)
    buffers = sorted((tmp_path / "killed" / "checkpoint-1" / "rollout").glob("*.safetensors"))
    assert len(buffers) == 1, "killed inside a generation batch"


def test_the_diagnosis_goes_on(embedded_model, tmp_path):
    class Indifferent(Chatter):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            observation, _, *rest = super().step(action)
            return observation, 0.0, *rest

    settings = {"environment": Indifferent, "max_steps": 2, "diagnosis_interval": 2, **SAVING}
    make_trainer(embedded_model, tmp_path, **settings).train()
    resumed = make_trainer(embedded_model, tmp_path, **{**settings, "max_steps": 3})
    resumed.train(resume_from_checkpoint=True)
    state = resumed.health.state()
    assert state["diagnosis"]["history"]["latest"]["advantage/zero"] == [1.0, 1.0, 1.0]
    # The answers of the first measurement are those that a resumed run compares.
    assert resumed.state.log_history[-2]["policy_change"] == 0.0
    once = json.loads((tmp_path / "checkpoint-2" / "rollout" / "position.json").read_text())["watch"]
    assert state["measurements"] == once["measurements"] and once["measurements"]["landmarks"]


# ------------------------------------------------------------------------------------------------------- interrupted saves


@contextmanager
def snapshots(run: Path, to: Path) -> Iterator[list[Path]]:
    """Copies of a folder as each file in it is opened, renamed or removed: what a kill at that moment would leave.

    Not by ``sys.addaudithook``, which nothing ends: every later test of the process would pay for it.
    """
    taken: list[Path] = []
    copying = threading.Lock()

    def first(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def take(path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(path).startswith(str(run)) and copying.acquire(blocking=False):
                try:
                    taken.append(Path(shutil.copytree(run, to / str(len(taken)))))
                finally:
                    copying.release()
            return function(path, *args, **kwargs)

        return take

    with pytest.MonkeyPatch.context() as patch:
        for module, names in (
            (os, ("open", "rename", "replace", "remove", "unlink", "rmdir", "mkdir")), (io, ("open",)),
            (builtins, ("open",)), (shutil, ("rmtree",)),
        ):  # fmt: skip
            for name in names:
                patch.setattr(module, name, first(getattr(module, name)))
        yield taken


class Watch(TrainerCallback):
    """Takes the snapshots from the second step on, when one checkpoint is whole."""

    def __init__(self, run: Path, to: Path):
        self.context = snapshots(run, to)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.taken = self.context.__enter__()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.context.__exit__(None, None, None)


def test_killed_while_saving(embedded_model, tmp_path):
    """Whatever moment of saving the kill comes at, a whole checkpoint is found, even if only one is kept."""
    watch = Watch(tmp_path / "run", tmp_path / "taken")
    settings = {"per_device_train_batch_size": 4, "steps_per_generation": 2, **SAVING, "save_total_limit": 1}
    whole = make_trainer(embedded_model, tmp_path / "run", max_steps=2, callbacks=[watch], **settings)
    whole.train()
    found = [newest_complete(folder) for folder in watch.taken]
    assert all(skipped == [] for _, skipped in found), "a checkpoint appears whole"
    names = [folder.name for folder, _ in found]
    assert set(names) == {"checkpoint-1", "checkpoint-2"} and names == sorted(names) and len(names) > 15
    partial = [taken for taken in watch.taken if (taken / "unfinished" / "checkpoint-2").is_dir()]
    assert len(partial) > 10
    final = [digest(folder) for folder, _ in found if folder.name == "checkpoint-2"]
    assert final and all(files == final[0] for files in final), "nothing is written after the marker"

    for late in (partial[0], partial[-1]):
        resumed = make_trainer(embedded_model, late, max_steps=2, **settings)
        resumed.train(resume_from_checkpoint=True)
        assert_same(weights(resumed), weights(whole))
        assert [path.name for path in late.glob("checkpoint-*")] == ["checkpoint-2"]
        assert not (late / "unfinished").exists()
        check_complete(late / "checkpoint-2")


class Interrupt(TrainerCallback):
    """Presses Ctrl-C inside a step."""

    def __init__(self, times: int, step: int):
        self.times, self.step = times, step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for _ in range(self.times if state.global_step == self.step - 1 else 0):
            press_ctrl_c()


@contextmanager
def interrupts(handler: Any) -> Iterator[None]:
    """What an interrupt does before training, and again after it."""
    own = signal.signal(signal.SIGINT, handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, own)


def interrupt_once(case: str, model: Path, folder: Path, step: int) -> None:
    stopped = make(case, model, folder, callbacks=[Interrupt(1, step)])
    with pytest.raises(KeyboardInterrupt, match=rf"stopped at step {step}; .*resume_from_checkpoint=True"):
        stopped.train()
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{step}"]


def interrupt_twice(model: Path, folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        make("tasks", model, folder, callbacks=[Interrupt(2, 1)]).train()
    assert not list(folder.glob("checkpoint-*"))


def test_ctrl_c(embedded_model, tmp_path, undisturbed, warned):
    with interrupts(signal.default_int_handler):
        interrupt_once("ppo", embedded_model, tmp_path / "once", 2)
        assert "Interrupt again to stop at once" in warned[0]
        resumed = make("ppo", embedded_model, tmp_path / "once")
        resumed.train(resume_from_checkpoint=True)
        assert_same(weights(resumed), weights(undisturbed("ppo")))
        interrupt_twice(embedded_model, tmp_path / "twice")


def test_ctrl_c_in_the_background(embedded_model, tmp_path):
    """A shell starts what runs there with interrupts ignored; what is saved is the same."""
    with interrupts(signal.SIG_IGN):
        interrupt_once("tasks", embedded_model, tmp_path / "once", 1)
        interrupt_twice(embedded_model, tmp_path / "twice")


class KillInside(TrainerCallback):
    """Ends the first run between the micro-batches of its second step."""

    done = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and not self.done:
            self.done = True
            raise Killed


def test_the_same_trainer_trains_anew_after_an_interruption(embedded_model, tmp_path, undisturbed):
    """It begins with a new generation batch, or where the checkpoint was."""
    trainer = make("ppo", embedded_model, tmp_path, callbacks=[KillInside()], **SAVING)
    with pytest.raises(Killed):
        trainer.train()
    assert trainer._step == 3
    trainer.args.save_strategy = "no"
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same(weights(trainer), weights(undisturbed("ppo")))
    shutil.rmtree(tmp_path / "rollouts")
    trainer.args.max_steps = 1
    trainer.train()
    assert trainer._step == 8 + 2
    assert sorted({(r["step"], r["generation"]) for r in recorded(tmp_path / "rollouts")}) == [(0, 2)]


# ---------------------------------------------------------------------------------------------------------- what is saved


def test_the_record(embedded_model, saved):
    record = json.loads((saved / "checkpoint-1" / RECORD).read_text())
    assert (
        record["algorithm"] == "Multi-turn GRPO" and record["environment"] == "Chatter" and record["global_step"] == 1
    )
    assert record["base_model"]["name"] == str(embedded_model) and record["base_model"]["model_type"] == "qwen3"
    assert record["parent"] is None and record["lora"]["r"] == 4
    assert "model.layers.0.self_attn.q_proj" in record["lora"]["target_modules"]
    assert record["versions"].keys() >= {"agile-trainers", "trl", "transformers", "peft", "torch"}


def test_a_warm_started_run(embedded_model, tmp_path, saved):
    """It goes on exactly too, and remembers its parents, even if only the base model is at hand when it is resumed."""
    settings = {"beta": 0.1, "max_steps": 2, "per_device_train_batch_size": 4, "steps_per_generation": 2}
    whole = make_trainer(saved / "checkpoint-1", tmp_path / "whole", lora=False, **settings)
    whole.train()
    first = make_trainer(saved / "checkpoint-1", tmp_path / "killed", lora=False, **SAVING, **settings)
    with pytest.raises(Killed):
        first.add_callback(KillBefore(1))
        first.train()
    resumed = make_trainer(embedded_model, tmp_path / "killed", **SAVING, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert_same(weights(resumed), weights(whole))
    parent = json.loads((tmp_path / "killed" / "checkpoint-2" / RECORD).read_text())["parent"]
    assert parent["source"] == str(saved / "checkpoint-1") and parent["commit"] is None and parent["parent"] is None
    assert parent["algorithm"] == "Multi-turn GRPO" and parent["global_step"] == 1


def test_the_folder_is_read_by_peft(embedded_model, saved):
    """Policy and reference by ``PeftModel.from_pretrained``; the buffer as safetensors, away from the weights."""
    folder = saved / "checkpoint-1"
    for part in (folder, folder / "ref"):
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(embedded_model), part)
        stored = load_file(part / "adapter_model.safetensors")
        loaded = {name.replace(".default.", "."): p for name, p in model.named_parameters() if "lora" in name}
        assert_same(loaded, stored)
    assert [path.name for path in folder.glob("*.safetensors")] == ["adapter_model.safetensors"]
    buffer = load_file(folder / "rollout" / "rank-0.safetensors")
    assert {name.partition(".")[0] for name in buffer} == {"0", "1", "2", "3"}
    assert json.loads((folder / "rollout" / "position.json").read_text())["position"] == 2


def test_the_best_checkpoint_by_return_is_kept(embedded_model, tmp_path):
    trainer = make_trainer(
        embedded_model, tmp_path, max_steps=3, save_total_limit=1, load_best_model_at_end=True, eval_strategy="steps",
        eval_steps=1, metric_for_best_model="return", num_eval_episodes=4, learning_rate=3.0, **SAVING,
    )  # fmt: skip
    trainer.train()
    returns = {e["step"]: e["eval_return"] for e in trainer.state.log_history if "eval_return" in e}
    assert len(set(returns.values())) > 1 and trainer.state.best_metric == max(returns.values())
    best = check_complete(tmp_path / f"checkpoint-{max(returns, key=lambda step: returns[step])}")
    assert trainer.state.best_model_checkpoint == str(best)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [best.name]
    policy = {n.replace(".default.", "."): p for n, p in trainer.model.named_parameters() if ".default." in n}
    assert_same(policy, load_file(best / "adapter_model.safetensors"))


# ------------------------------------------------------------------------------------------------------------- bad folders


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


DAMAGE = {
    "no marker": (lambda f: (f / MARKER).unlink(), "saving was interrupted"),
    "no record": (lambda f: (f / RECORD).unlink(), f"not saved by a multi-turn trainer: it has no {RECORD}"),
    "record cut off": (lambda f: _truncate(f / RECORD) or _truncate(f / RECORD), f"{RECORD} cannot be read"),
    "record of another kind": (lambda f: (f / RECORD).write_text("[]"), "holds a list, expected a JSON object"),
    "marker cut off": (lambda f: _truncate(f / MARKER) or _truncate(f / MARKER), f"{MARKER} cannot be read"),
    "marker without files": (lambda f: (f / MARKER).write_text("{}"), "does not list the checkpoint's files"),
    "adapter cut off": (
        lambda f: _truncate(f / "adapter_model.safetensors"),
        r"adapter_model.safetensors has \d+ bytes",
    ),
    "adapter changed": (
        lambda f: _flip(f / "adapter_model.safetensors"),
        "adapter_model.safetensors has another content",
    ),
    "buffer changed": (lambda f: _flip(f / "rollout" / "rank-0.safetensors"), "rank-0.safetensors has another content"),
    "reference lost": (lambda f: shutil.rmtree(f / "ref"), "ref/adapter_config.json is missing"),
    "optimizer lost": (lambda f: (f / "optimizer.pt").unlink(), "optimizer.pt is missing"),
}


def test_damaged_folders_are_refused(embedded_model, tmp_path, saved, warned):
    """By name and by True, with the reason; nothing is loaded, and nothing on disk changes."""
    trainer = make("grpo", embedded_model, tmp_path / "run", max_steps=1)
    for index, (damage, message) in enumerate(DAMAGE.values()):
        folder = tmp_path / str(index) / "checkpoint-1"
        shutil.copytree(saved / "checkpoint-1", folder)
        damage(folder)
        before, start = digest(folder), weights(trainer)
        trainer.args.output_dir = str(folder.parent)
        with pytest.raises(CheckpointError, match=message):
            trainer.train(resume_from_checkpoint=str(folder))
        with pytest.raises(CheckpointError, match=rf"(?s)There is no checkpoint to resume from.*{message}"):
            trainer.train(resume_from_checkpoint=True)
        assert digest(folder) == before and not (folder.parent / "superseded").exists()
        assert_same(weights(trainer), start)


class Evil:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_folder_is_not_run(embedded_model, tmp_path, saved):
    """Not even in a folder whose marker says that all is well. The last of these files is not read."""
    trainer = make("grpo", embedded_model, tmp_path / "run", max_steps=2)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "adapter_model.bin", "training_args.bin"):
        folder = Path(shutil.copytree(saved / "checkpoint-1", tmp_path / name / "checkpoint-1"))
        torch.save(Evil(tmp_path / "owned"), folder / name)
        if name == "adapter_model.bin":
            (folder / "adapter_model.safetensors").unlink()
        mark_complete(folder)
        if name == "training_args.bin":
            trainer.train(resume_from_checkpoint=str(folder))
        else:
            with pytest.raises((pickle.UnpicklingError, CheckpointError)):
                trainer.train(resume_from_checkpoint=str(folder))
        assert not (tmp_path / "owned").exists(), name


def test_folders_that_hold_something_else(embedded_model, tmp_path, saved):
    trainer = make("grpo", embedded_model, saved, max_steps=1)
    before = digest(saved)
    with pytest.raises(CheckpointError, match=r"There is no folder .*checkpoint-7; .* holds checkpoint-1\."):
        trainer.train(resume_from_checkpoint=str(saved / "checkpoint-7"))
    trainer.args.output_dir = str(tmp_path)
    with pytest.raises(CheckpointError, match="holds no folder checkpoint-<step>"):
        trainer.train(resume_from_checkpoint=True)
    shutil.copytree(saved, tmp_path / "run")
    trainer.save_model(str(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=r"holds a model, not a checkpoint. Its checkpoints are checkpoint-1\."):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run"))
    assert digest(saved) == before


def test_no_optimizer_state(embedded_model, tmp_path):
    make_trainer(embedded_model, tmp_path, save_only_model=True, **SAVING).train()
    with pytest.raises(CheckpointError, match=r"no optimizer state \(save_only_model=True\).*model='.*checkpoint-1'"):
        make_trainer(embedded_model, tmp_path).train(resume_from_checkpoint=True)


OTHERS = {
    "algorithm": (
        {"case": "reinforce", "train_dataset": None, "environment": Chatter},
        "algorithm is 'Multi-turn GRPO' there",
    ),
    "environment": (
        {"environment": "agile:guess_number"},
        "environment is 'Chatter' there and 'agile:guess_number' here",
    ),
    "whole model": ({"lora": False, "reference_adapter": False}, r"lora is \{.*'r': 4.*\} there and None here"),
    "geometry": (
        {"num_iterations": 1, "steps_per_generation": 8},
        "steps_per_generation is 4 there and 8 here; num_iterations",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_checkpoints_of_other_runs_are_refused(embedded_model, tmp_path, saved, other):
    changes, message = OTHERS[other]
    trainer = make(**{"case": "grpo", "model": embedded_model, "folder": tmp_path, "max_steps": 2, **changes})
    before = digest(saved)
    with pytest.raises(CheckpointError, match=f"checkpoint-1 is a checkpoint of another run: .*{message}"):
        trainer.train(resume_from_checkpoint=str(saved / "checkpoint-1"))
    assert digest(saved) == before and not list(tmp_path.glob("checkpoint-*"))


def test_every_lora_setting_that_differs_is_named(embedded_model, tmp_path, saved):
    trainer = make("grpo", embedded_model, tmp_path, max_steps=2)
    trainer.model.peft_config["default"] = LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj"], lora_dropout=0.1)
    with pytest.raises(CheckpointError) as refusal:
        trainer.train(resume_from_checkpoint=str(saved / "checkpoint-1"))
    for text in (
        "lora.r is 4 there and 8 here",
        "lora.target_modules is",
        "lora.lora_dropout is None there and 0.1 here",
    ):
        assert text in str(refusal.value)
    assert "lora_alpha" not in str(refusal.value)


def test_a_base_model_of_another_shape(embedded_model, tmp_path, saved):
    trainer = make("grpo", embedded_model, tmp_path, max_steps=2)
    trainer.model.config.hidden_size = 128
    with pytest.raises(CheckpointError, match=r"base_model\.hidden_size.*64.*128"):
        trainer.train(resume_from_checkpoint=str(saved / "checkpoint-1"))


def test_at_a_generation_boundary_the_batch_sizes_may_change(embedded_model, tmp_path):
    make_trainer(embedded_model, tmp_path, max_steps=1, **SAVING).train()
    resumed = make_trainer(embedded_model, tmp_path, max_steps=2, per_device_train_batch_size=4, steps_per_generation=4)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert sorted({(r["step"], r["generation"]) for r in recorded(tmp_path)}) == [(0, 0), (1, 1)]


def test_a_new_run_beside_old_checkpoints(embedded_model, tmp_path, saved, warned):
    shutil.copytree(saved, tmp_path / "run")
    trainer = make("grpo", embedded_model, tmp_path / "run", max_steps=1, **SAVING)
    trainer.train()
    assert "checkpoints of another run or branch (checkpoint-1)" in warned[0]
    assert digest(tmp_path / "run" / "superseded" / "1" / "checkpoint-1") == digest(saved / "checkpoint-1")
    (tmp_path / "run" / "checkpoint-1" / RECORD).unlink()
    before = digest(tmp_path / "run" / "checkpoint-1")
    with pytest.raises(
        CheckpointError, match=r"checkpoint-1 was not saved by a multi-turn trainer.*another output_dir"
    ):
        trainer.train()
    assert digest(tmp_path / "run" / "checkpoint-1") == before


def test_a_checkpoint_of_another_kind_at_the_same_step_leaves_nothing_behind(embedded_model, tmp_path):
    make("ppo", embedded_model, tmp_path, max_steps=1, **SAVING).train()
    assert (tmp_path / "checkpoint-1" / "critic").is_dir()
    make_trainer(embedded_model, tmp_path, **SAVING).train()
    assert not (tmp_path / "checkpoint-1" / "critic").exists()
    check_complete(tmp_path / "checkpoint-1")
