"""Measures how well slow environments overlap: 64 episodes of 8 turns, with 50 ms of sleep a step (``make bench``).

With full overlap a rollout takes as long as the sleeps of one episode: 8 x 50 ms. A scripted generator answers at once, so
the time is that of the environments and of the rollout loop with its real chat renderer. A second measurement has one
environment of 64 that hangs, which must not delay the others.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

from sleepers import HANGS, SECONDS, TURNS, AsyncSleeper, Sleeper

from agile_trainers.embedded import make_tokenizer
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec, Limits
from agile_trainers.types import StopReason

EPISODES = 64
IDEAL = TURNS * SECONDS
LIMIT = 1.5
"""Longest allowed rollout, as a multiple of the ideal."""
TIMEOUT = 2.0
"""Seconds after which the hanging environment is given up."""


WAYS: dict[str, tuple[Callable[..., Sleeper], dict[str, int]]] = {
    "threads": (Sleeper, {"workers": EPISODES}),
    "asyncio": (AsyncSleeper, {}),
    "processes": (Sleeper, {"processes": EPISODES}),
}


def make_engine(way: str, hanging: bool) -> RolloutEngine:
    """Make an engine with 64 environments."""
    kind, options = WAYS[way]
    pool = EnvironmentPool(partial(kind, hanging), timeout=TIMEOUT if hanging else None, **options)
    return RolloutEngine(pool, ChatRenderer(make_tokenizer()), Limits(TURNS, 4, 100_000))


def play(engine: RolloutEngine) -> tuple[float, list[StopReason]]:
    """Play a rollout. Returns its wall time and how its episodes ended."""
    generator = ScriptedGenerator(lambda request: [*engine.chat.eos_token_ids[:1]])
    ends: list[float] = []
    started = time.perf_counter()
    specs = [EpisodeSpec(seed, (seed,)) for seed in range(EPISODES)]
    trajectories = engine.run(specs, generator, lambda _: ends.append(time.perf_counter() - started))
    # The episode that hangs ends last and is left out of the time.
    hung = sum(trajectory.stop_reason.failed for trajectory in trajectories)
    return ends[-1 - hung], [trajectory.stop_reason for trajectory in trajectories]


def measure(way: str, hanging: bool, repetitions: int) -> tuple[float, int]:
    """Return the median wall time of warm rollouts as a multiple of the ideal, and the episodes that ended unexpectedly."""
    engine = make_engine(way, hanging=False)
    play(engine)  # makes the instances and starts their threads or processes
    if hanging:
        engine = make_engine(way, hanging=True)
    seconds, unexpected = [], 0
    for _ in range(repetitions):
        wall, reasons = play(engine)
        expected = [StopReason.TERMINATED] * EPISODES
        if hanging:
            expected[HANGS] = StopReason.ENVIRONMENT_TIMEOUT
        unexpected += sum(reason != right for reason, right in zip(reasons, expected, strict=True))
        seconds.append(wall)
    engine.pool.close()
    return median(seconds) / IDEAL, unexpected


def main() -> int:
    """Measure every way to run environments. Return 1 if one misses the limit or an episode ends otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    print(f"{EPISODES} episodes x {TURNS} turns x {SECONDS * 1000:.0f} ms; ideal {IDEAL:.2f} s, limit {LIMIT} x")
    missed = False
    for way in options.ways:
        for hanging in (False, True):
            ratio, unexpected = measure(way, hanging, options.repetitions)
            missed |= ratio > LIMIT or unexpected > 0
            others = f", beside one of {EPISODES} that hangs" if hanging else ""
            others += f"; LIMIT MISSED, {LIMIT} x" if ratio > LIMIT else ""
            others += f"; {unexpected} episodes ended for another reason" if unexpected else ""
            print(f"  {way:<10} {ratio * IDEAL:.3f} s, {ratio:.2f} x ideal{others}", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
