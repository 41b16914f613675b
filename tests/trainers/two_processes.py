"""A short training run per case, to be launched with one process or two; leaves gradients and adapters behind.

Usage: torchrun --nproc_per_node N two_processes.py MODEL OUTPUT '{"case": {"option": "value"}}'
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from games import Chatter, Gradients, end_process, make_trainer

from agile_trainers import MultiTurnTrainer
from agile_trainers.evaluation import EpisodeOptions, VllmSampler, evaluate_policy
from agile_trainers.sampling.sampler import sampling_settings


class Fragile(Chatter):
    """Fails on some answers."""

    def step(self, action):
        if len(action) == 2:
            raise RuntimeError("two letters")
        return super().step(action)


def judge(trajectories, log_metric, log_extra, **_):
    """Odd about turns, and logs of each episode."""
    for episode in trajectories:
        log_metric("judge/turns", len(episode.turns))
    log_extra("turns", [len(episode.turns) for episode in trajectories])
    return [None if len(episode.turns) == 1 else float(len(episode.completion_ids)) for episode in trajectories]


def evaluate(trainer: MultiTurnTrainer) -> dict[str, Any]:
    metrics = trainer.evaluate()
    alone = evaluate_policy(
        trainer.model, trainer.processing_class, trainer.environment, 5, seed=trainer.args.seed, held_out=False,
        options=EpisodeOptions.of_args(trainer.args), sampling=sampling_settings(trainer.args),
    )  # fmt: skip
    try:
        VllmSampler()
        refusal = None
    except (ImportError, ValueError) as error:
        refusal = str(error)
    return {"evaluation": metrics, "rows": alone.rows, "alone": alone.metrics, "refusal": refusal}


def play(model: str, output: Path, changes: dict) -> None:
    """One case. ``per_device_train_batch_size`` is divided by the number of processes; with ``by_hand`` several of these
    train by ``rollout`` and ``update``. With ``evaluated`` the policy is evaluated by the trainer, and apart from it."""
    processes, by_hand = int(os.environ.get("WORLD_SIZE", "1")), changes.pop("by_hand", False)
    evaluated = changes.pop("evaluated", False)
    rows = changes.pop("per_device_train_batch_size") // processes
    if changes.pop("judged", False):
        changes = {"environment": Fragile, **changes, "reward_funcs": judge}
    if numbers := changes.pop("numbers", None):
        changes["train_dataset"] = Dataset.from_dict({"number": numbers})
    gradients = Gradients()
    trainer = make_trainer(
        model, output, callbacks=[gradients], num_eval_episodes=5, per_device_train_batch_size=rows, **changes
    )
    if by_hand and processes > 1:
        while trainer.state.global_step < trainer.args.max_steps:
            trainer.update(trainer.rollout())
    else:
        trainer.train()
    evaluations = evaluate(trainer) if evaluated else {}
    if trainer.accelerator.is_main_process:
        torch.save(
            {
                "processes": trainer.accelerator.num_processes,
                "distributed_type": str(trainer.accelerator.distributed_type),
                "gradients": [{k.removeprefix("module."): v for k, v in step.items()} for step in gradients.steps],
                "adapter": {k: v for k, v in trainer.model.state_dict().items() if "lora" in k},
                "logged": trainer.state.log_history[0],
                **evaluations,
            },
            output / "result.pt",
        )


if __name__ == "__main__":
    for name, case in json.loads(sys.argv[3]).items():
        play(sys.argv[1], Path(sys.argv[2]) / name, case)
    end_process()
