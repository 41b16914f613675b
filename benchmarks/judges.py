"""Times batches of judged games: a judge that is asked while others play, beside one that is asked in turn after all.

The judge takes 0.1 to 0.5 seconds for a question, drawn from it, and answers any number at once; a step of the environment
takes 0.02 to 0.2 seconds in a thread. Sides take turns. The exit code is 1 if the batch takes over ``BAR`` times as long
with the judge as without one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from update_vs_trl import with_tables

from agile_environments.guess_number import GuessNumber
from agile_trainers import Judge, MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agile_trainers.embedded import make_embedded_model
from agile_trainers.judges.questions import ask_of_episode
from agile_trainers.types import Trajectory

ROOT = Path(__file__).resolve().parent
RESULTS, PAGE = ROOT / "results" / "judges.json", ROOT.parent / "docs" / "judges.md"
EPISODES, BAR = 32, 1.5
SIDES = ("no judge", "in turn, after the batch", "`Judge`")


class Slow(GuessNumber):
    """The game, whose steps take their time."""

    def step(self, action: str) -> Any:
        time.sleep(Random(f"{self.secret} {action}").uniform(0.02, 0.2))
        return super().step(action)


async def judge(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Answer a question after a while."""
    await asyncio.sleep(Random(str(messages)).uniform(0.1, 0.5))
    return {"reason": "", "score": 0.5}


def in_turn(trajectories: list[Trajectory], **_: Any) -> list[float]:
    """Ask about one episode after the other."""
    return [
        asyncio.run(judge(ask_of_episode(one, "r", "episode", (0.0, 1.0)).messages))["score"] for one in trajectories
    ]


def play(model: Path, folder: Path, reward_funcs: Callable[..., Any] | None) -> float:
    """Return the seconds of a generation batch with its rewards."""
    trainer = MultiTurnGRPOTrainer(
        model=str(model),
        environment=Slow,
        reward_funcs=reward_funcs,
        args=MultiTurnGRPOConfig(
            output_dir=str(folder), use_cpu=True, bf16=False, per_device_train_batch_size=EPISODES, num_generations=4,
            max_turns=4, max_new_tokens=4, environment_workers=EPISODES, report_to="none", max_steps=1,
        ),
    )  # fmt: skip
    rows = [dict(trainer.train_dataset[0])] * EPISODES
    started = time.perf_counter()
    trainer.rollouts.play(rows, 0, 0)
    seconds = time.perf_counter() - started
    trainer.close()
    return seconds


def table(results: dict[str, list[float]]) -> str:
    """Write the results as a table of Markdown."""
    lines = ["| judge | seconds a batch (lowest to highest) | episodes a second |", "|---|---|---|"]
    for side, seconds in results.items():
        middle = median(seconds)
        spread = f"{middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        lines.append(f"| {side} | {spread} | {EPISODES / middle:.1f} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, save, and write the table of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="measurements of each side")
    options = parser.parse_args()
    results: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        model = make_embedded_model(Path(folder) / "model")
        for repetition in range(-1, options.repetitions):  # the first warms up
            functions = (None, in_turn, Judge(judge, "r"))
            for side, function in zip(SIDES, functions, strict=True):
                seconds = play(model, Path(folder, f"{repetition} {len(side)}"), function)
                if repetition >= 0:
                    results[side].append(seconds)
            print({side: round(seconds[-1], 2) for side, seconds in results.items() if seconds}, flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text(), {"judges": table(results)}))
    print(table(results))
    alone, _, judged = (median(results[side]) for side in SIDES)
    return 0 if judged <= BAR * alone else 1


if __name__ == "__main__":
    sys.exit(main())
