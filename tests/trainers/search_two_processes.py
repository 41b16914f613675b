"""A search of three trials, the second of which fails, to be launched with one process or two.

Usage: torchrun --nproc_per_node N search_two_processes.py MODEL OUTPUT '{"case": {}}'
"""

import json
import os
import sys
from pathlib import Path

from games import end_process, make_trainer
from optuna.samplers import RandomSampler
from transformers import TrainerCallback


class Infinite(TrainerCallback):
    """Breaks the second trial."""

    def on_optimizer_step(self, args, state, control, **kwargs):
        if args.output_dir.endswith("run-1"):
            next(p for p in kwargs["model"].parameters() if p.requires_grad).data.fill_(float("inf"))


def play(model: str, output: Path, changes: dict) -> None:
    rows = 8 // int(os.environ.get("WORLD_SIZE", "1"))
    trainer = make_trainer(
        model,
        output,
        callbacks=[Infinite()],
        num_eval_episodes=6,
        per_device_train_batch_size=rows,
        max_turns=2,
        **changes,
    )
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 0.01, 1.0, log=True)},
        n_trials=3,
        sampler=RandomSampler(seed=1),
    )
    assert (best is None) == (trainer.args.process_index != 0)
    if best is not None:
        trials = [[trial.state.name, trial.value, trial.params] for trial in best.run_summary.trials]
        (output / "result.json").write_text(json.dumps([trainer.args.world_size, best.run_id, trials]))


if __name__ == "__main__":
    for name, case in json.loads(sys.argv[3]).items():
        play(sys.argv[1], Path(sys.argv[2]) / name, case)
    end_process()
