"""Trains tiny runs for five steps and compares their weights, to the bit, with those of another commit.

Each case is a run on the embedded model, of one path through a training step. A digest is the SHA-256 of all weights after
step 5; the log history has a digest for each metric of losses and rewards. The script imports public names alone, so that
the same file runs on an older commit:

    git archive 6476772 | tar x -C /tmp/before
    PYTHONPATH=/tmp/before python benchmarks/same_weights.py --write before.json --checkpoints checkpoints
    python benchmarks/same_weights.py --against before.json --resume checkpoints

The first command writes what was computed and checkpoints after step 3. The second computes the same with the code here,
resumes the other commit's checkpoints to step 5, and exits with 1 if a case differs, naming it and its metrics. Sums depend
on the machine, its threads and PyTorch, so both commands need the same ones; a thread is set. Two minutes of one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback

import agile_trainers
from agile_trainers.embedded import make_embedded_model

STEPS, SAVED = 5, 3
"""Optimizer steps of a run, and the step after which a checkpoint is saved."""
COMPARED = (
    "loss",
    "grad_norm",
    "reward",
    "return",
    "kl",
    "entropy",
    "clip_ratio",
    "value/",
    "learning_rate",
    "success",
)
"""Beginnings of the metrics whose values are compared."""
Digests = dict[str, Any]
"""``weights``: a digest. ``log``: a digest for each metric."""


# -------------------------------------------------------------------------------------------------------- environments


class Chatter:
    """Talks for one to four turns (by the seed) and rewards what it hears by an arbitrary rule."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        number = (seed or 0) + (options or {}).get("number", 0)
        self.turn, self.length = 0, 1 + number % 4
        return f"start {number % 7} " + "more " * (number % 5), {"anchor": "start"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        reward = sum(map(ord, action)) % 5 / 4
        info = {"success": reward > 0.5, "anchor": len(action) % 2}
        return "again " * (1 + len(action) % 4), reward, self.turn >= self.length, False, info


class Uneven(Chatter):
    """Pays nothing for even seeds and rows, so that their groups have no advantage."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.pays = ((options or {}).get("number", seed) or 0) % 2
        return super().reset(seed, options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, done, truncated, info = super().step(action)
        return observation, reward * self.pays, done, truncated, info


class Short(Chatter):
    """The same for exactly one turn."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        observation = super().reset(seed, options)
        self.length = 1
        return observation


def letters(completions: list[Any], **_: Any) -> list[float]:
    """A reward function: different letters of the first answer."""
    return [len(set(completion[0]["content"])) / 8 for completion in completions]


# --------------------------------------------------------------------------------------------------------------- cases

NUMBERS = Dataset.from_dict({"number": list(range(12))})
PROMPTS = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"say {n}"}] for n in range(8)]})
MIXED: dict[str, Any] = {
    "environment": {"chatter": Chatter, "short": Short},
    "environment_limits": {"short": {"max_turns": 1, "max_new_tokens": 3}},
}  # fmt: skip
REPLACED: dict[str, Any] = {
    "environment": Uneven, "train_dataset": NUMBERS, "num_generations": 4, "per_device_train_batch_size": 8,
    "resample_zero_advantage_groups": 2,
}  # fmt: skip
EVERY: dict[str, Any] = {
    "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "max_turns": 4, "max_new_tokens": 5,
    "num_iterations": 1,
    "stop_strings": list("aeiou01234 !"), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
    "max_steps": STEPS, "optim": "adamw_torch", "learning_rate": 1e-2, "lr_scheduler_type": "linear", "max_grad_norm": 0.5,
    "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "seed": 3,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "grpo turn": {},
    "grpo turn, ratio of turns": {"importance_sampling_level": "turn", "num_iterations": 2},
    "grpo turn, ratio of sums of turns": {
        "importance_sampling_level": "turn", "turn_ratio_pooling": "sum", "num_iterations": 2,
    },
    "grpo turn, ratio of sequences": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "grpo trajectory": {"advantage_granularity": "trajectory"},
    "grpo trajectory, ratio of sequences": {
        "advantage_granularity": "trajectory", "importance_sampling_level": "sequence", "num_iterations": 2,
    },
    "grpo anchor": {"advantage_granularity": "anchor", "gamma": 0.9},
    "grpo leave one out, whitened, clipped": {
        "advantage_baseline": "leave_one_out", "whiten_advantages": True, "advantage_clip_range": 1.0,
        "scale_rewards": "none", "turn_credit": "reward",
    },
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {
        "loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True, "max_turns": 3, "num_iterations": 2,
    },
    "reinforce": {"algorithm": "reinforce", "gamma": 0.9},
    "reinforce of tokens": {"algorithm": "reinforce", "advantage_granularity": "token", "num_iterations": 2},
    "ppo": {"algorithm": "ppo", "critic_learning_rate": 2e-2, "value_clip_range": 0.2, "num_iterations": 2},
    "ppo of tokens": {"algorithm": "ppo", "advantage_granularity": "token", "gamma": 0.9},
    "ppo, one critic layer": {"algorithm": "ppo", "critic_layers": 1, "critic_warmup_steps": 1},
    "ppo with KL in the reward": {"algorithm": "ppo", "beta": 0.1, "kl_placement": "reward"},
    "gspo": {"algorithm": "gspo", "num_iterations": 2},
    "cispo": {"algorithm": "cispo", "num_iterations": 2},
    "mixture": MIXED,
    "mixture with reinforce": {**MIXED, "algorithm": "reinforce"},
    "mixture with ppo": {**MIXED, "algorithm": "ppo"},
    "replaced groups": REPLACED,
    "replaced groups, adaptive tasks": {
        **REPLACED, "task_sampling": "adaptive", "task_column": "number", "steps_per_generation": 4,
    },
    "replaced groups, a reward function": {**REPLACED, "reward_funcs": letters},
    "replaced groups, KL in the reward": {**REPLACED, "beta": 0.1, "kl_placement": "reward"},
    "KL in the reward": {"beta": 0.1, "kl_placement": "reward"},
    "KL in the advantage": {"beta": 0.1, "kl_placement": "advantage"},
    "KL in the loss": {"beta": 0.1, "kl_placement": "loss"},
    "reference adapter that moves": {
        "beta": 0.1, "reference_adapter": True, "sync_ref_model": True, "ref_model_sync_steps": 2,
        "ref_model_mixup_alpha": 1.0,
    },
    "two iterations": {"num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_target": 9.0},
    "not packed": {"sequence_packing": "none", "per_device_train_batch_size": 8},
    "packed": {"sequence_packing": "prefix", "per_device_train_batch_size": 8},
    "small passes": {"max_tokens_per_micro_batch": 60, "per_device_train_batch_size": 8},
    "small passes with ppo": {"algorithm": "ppo", "max_tokens_per_micro_batch": 60, "per_device_train_batch_size": 8},
    "every episode trained": {"skip_zero_advantage": "False", "environment": Uneven},
    "corrected mismatch": {"vllm_importance_sampling_correction": True, "repetition_penalty": 1.2},
    "rows and a reward function": {"train_dataset": NUMBERS, "reward_funcs": letters, "steps_per_generation": 4},
    "evaluation between": {"eval_strategy": "steps", "eval_steps": 2, "num_eval_episodes": 4, "diagnosis_interval": 2},
    "whole model": {"lora": False, "beta": 0.1, "learning_rate": 1e-3},
    "by hand": {"by_hand": True, "num_iterations": 2},
    "by hand with ppo": {"by_hand": True, "algorithm": "ppo"},
    "by hand, rows": {"by_hand": True, "train_dataset": NUMBERS, "reward_funcs": letters},
    "without environment": {
        "environment": None, "train_dataset": PROMPTS, "reward_funcs": letters, "max_completion_length": 8, "beta": 0.1,
        "num_iterations": 2,
    },
    "without environment, a new batch each step": {
        "environment": None, "train_dataset": PROMPTS, "reward_funcs": letters, "max_completion_length": 8,
        "importance_sampling_level": "sequence", "loss_type": "grpo", "lora": False, "learning_rate": 1e-3,
    },
}  # fmt: skip
GIVEN = ("train_dataset", "reward_funcs", "callbacks")
"""Arguments of the trainer that a case sets, besides the environment."""
RESUMED = (
    "grpo turn", "reinforce", "ppo", "ppo, one critic layer", "mixture", "replaced groups, adaptive tasks",
    "reference adapter that moves", "two iterations", "whole model", "without environment",
)  # fmt: skip
"""Cases that are saved after step 3 and resumed, some of them inside a generation batch."""


def make(name: str, model: Path, folder: Path, **more: Any) -> Any:
    """A case's trainer.

    Args:
        name: Of the case.
        model: Folder of the embedded model; checkpoints record it.
        folder: ``output_dir``.
        more: Options besides the case's.
    """
    options = {**EVERY, **CASES[name], **more}
    options.pop("by_hand", None)
    algorithm, lora = options.pop("algorithm", "grpo"), options.pop("lora", True)
    given: dict[str, Any] = {
        key: options.pop(key) for key in ("train_dataset", "reward_funcs", "callbacks") if key in options
    }
    given["environment"] = options.pop("environment", Chatter)
    if algorithm not in ("ppo", "reinforce"):
        options.setdefault("num_generations", 4)
    if given["environment"] is None:
        for ours in ("max_turns", "max_new_tokens", "stop_strings"):
            del options[ours]
    trainer_class = agile_trainers.find_algorithm(algorithm)
    transformers.set_seed(3)  # an adapter's first weights are drawn before `Trainer` sets the seed
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights="gaussian")
    trainer = trainer_class(
        model=str(model), args=trainer_class.config_class(output_dir=str(folder), **options),
        peft_config=config if lora else None, **given,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


class Stop(TrainerCallback):
    """Ends a run after the step that is saved."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == SAVED


def train(name: str, model: Path, folder: Path) -> Digests:
    """Train a case to its end and digest it."""
    trainer = make(name, model, folder)
    if CASES[name].get("by_hand"):
        while trainer.state.global_step < STEPS:
            trainer.update(trainer.rollout())
    else:
        trainer.train()
    return digest(trainer)


def save(name: str, model: Path, folder: Path) -> None:
    """Train a case up to the step that is saved; the checkpoint is in the folder."""
    make(name, model, folder, save_strategy="steps", save_steps=SAVED, callbacks=[Stop()]).train()


def resume(name: str, model: Path, saved: Path, folder: Path) -> Digests:
    """Resume a checkpoint, which stays as it is, in another folder, and digest the end."""
    trainer = make(name, model, folder)
    trainer.train(resume_from_checkpoint=str(saved / f"checkpoint-{SAVED}"))
    return digest(trainer)


# ------------------------------------------------------------------------------------------------------------- digests


def digest(trainer: Any) -> Digests:
    """Digest all weights (policy, critic, reference, frozen base) and the metrics of every step."""
    assert trainer.state.global_step == STEPS
    states = {"model": trainer.model.state_dict()}
    if getattr(trainer, "ref_model", None) is not None:
        states["reference"] = trainer.ref_model.state_dict()
    found = hashlib.sha256()
    for kind, state in states.items():
        for name, tensor in sorted(state.items()):
            found.update(f"{kind} {name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    values: dict[str, list[Any]] = {}
    for entry in trainer.state.log_history:
        for name, value in entry.items():
            if name.removeprefix("eval_").startswith(COMPARED):
                values.setdefault(name, []).append((entry["step"], None if math.isnan(value) else value))
    return {"weights": found.hexdigest(), "log": {name: _short(values[name]) for name in sorted(values)}}


def _short(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def differences(before: Digests, now: Digests) -> list[str]:
    """Differences of a case: ``weights``, and names of metrics."""
    logs = before["log"], now["log"]
    metrics = [name for name in sorted({*logs[0], *logs[1]}) if logs[0].get(name) != logs[1].get(name)]
    return ["weights"] * (before["weights"] != now["weights"]) + metrics


def report(before: dict[str, Digests], now: dict[str, Digests], what: str) -> bool:
    """Print the cases that differ, or are missing on one side; return whether there are none."""
    wrong = {name: ["missing"] for name in before.keys() ^ now.keys()}
    wrong |= {name: found for name in before.keys() & now.keys() if (found := differences(before[name], now[name]))}
    for name in sorted(wrong):
        print(f"DIFFERS from {what}: {name}: {', '.join(wrong[name])}")
    print(f"{len(now.keys() - wrong.keys())} of {len(now)} cases equal {what}, to the bit.")
    return not wrong


def run(names: list[str], model: Path, scratch: Path) -> dict[str, Digests]:
    """Train the cases, and resume those that are to be resumed."""
    found = {}
    for name in names:
        found[name] = train(name, model, scratch / name)
        print(f"{found[name]['weights'][:16]}  {name}", flush=True)
        if name in RESUMED:
            save(name, model, scratch / f"{name}, saved")
            resumed = f"{name}, resumed"
            found[resumed] = resume(name, model, scratch / f"{name}, saved", scratch / resumed)
            print(f"{found[resumed]['weights'][:16]}  {resumed}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the digests")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with the digests of this file")
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="write checkpoints of step 3, and their model")
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="resume these checkpoints; compare with those made here"
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="cases to run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"{Path(agile_trainers.__file__).parent}, torch {torch.__version__}")
    equal, resumed = True, [name for name in RESUMED if name in options.only]
    with tempfile.TemporaryDirectory(prefix="same-weights-") as folder:
        scratch = Path(folder)
        now = run(options.only, make_embedded_model(scratch / "model"), scratch)
        if options.checkpoints:
            model = make_embedded_model(options.checkpoints / "model")
            for name in resumed:
                save(name, model, options.checkpoints / name)
        if options.resume:
            theirs = {
                f"{name}, resumed": resume(
                    name, options.resume / "model", options.resume / name, scratch / f"{name}, theirs"
                )
                for name in resumed
            }
            ours = {name: now[name] for name in theirs}
            equal &= report(ours, theirs, "what resumes from a checkpoint of this commit")
    if options.write:
        options.write.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    if options.against:
        before = json.loads(options.against.read_text(encoding="utf-8"))
        chosen = {name: found for name, found in before.items() if name.removesuffix(", resumed") in options.only}
        equal &= report(chosen, now, options.against.name)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
