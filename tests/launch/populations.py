"""A population whose members are spread over processes; leaves its folder.

Usage: accelerate launch --num_processes 2 populations.py MODEL OUTPUT
"""

import sys
from pathlib import Path

from agile_trainers.populations import HyperparameterConfig, Range, split_processes

PROCESSES = split_processes()  # before a configuration is made

from populated import population  # noqa: E402

from agile_trainers.populations import Tournament  # noqa: E402

if __name__ == "__main__":
    model, output = map(Path, sys.argv[1:])
    ranges = HyperparameterConfig(learning_rate=Range(1e-3, 1e-1, log=True), num_iterations=Range(1, 2))
    strategy = Tournament(mutation_probability=1.0)
    made = population(
        model, output, hyperparameters=ranges, members=3, strategy=strategy, max_steps=3, rounds=3, processes=PROCESSES
    )
    made.run()
    print(f"rank {PROCESSES.rank} of {PROCESSES.count}: best {made.best}")
