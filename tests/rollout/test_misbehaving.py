"""Environments that misbehave in every way of ``misbehaving.KINDS``, beside sound ones that must not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from misbehaving import KINDS, LIVES, Kind, Misbehaving, hang, kill_server
from transformers import AutoModelForCausalLM, AutoTokenizer

from agile_trainers.records.reader import read_records
from agile_trainers.records.writer import episode_row, write_episodes
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.collate import collate
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.generators import SamplingSettings, TransformersGenerator
from agile_trainers.rollout.spec import EpisodeSpec, Limits
from agile_trainers.types import Trajectory

SOUND = 40
"""Sound episodes of a rollout, spread among the others."""
WHERE: dict[str, dict[str, Any]] = {
    "inline": {},
    "threads": {"workers": 8, "timeout": 0.1},  # on a clock that stands still until all but what hangs is over
    "processes": {"processes": 6},
}


@pytest.fixture(scope="module")
def play(embedded_model: Path) -> Iterator[Any]:
    """Plays episodes of (seed, kind) on the embedded model."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    model = AutoModelForCausalLM.from_pretrained(embedded_model).double().eval()
    chat = ChatRenderer(tokenizer)
    pools: list[EnvironmentPool] = []

    def run(
        episodes: list[tuple[int, str | None]],
        on_finish: Callable[[Trajectory], None] | None = None,
        *,
        max_batch_size: int = 48,
        max_new_tokens: int = 4,
        **where: Any,
    ) -> list[Trajectory]:
        lives = {kind: LIVES[kind].factory for _, kind in episodes if kind in LIVES}
        pools.append(EnvironmentPool({"sound": Misbehaving, **lives}, **where))
        limits = Limits(max_turns=3, max_new_tokens=max_new_tokens, max_model_length=400, max_observation_length=2000)
        generator = TransformersGenerator(
            model,
            eos_token_ids=chat.eos_token_ids,
            pad_token_id=tokenizer.pad_token_id,
            settings=SamplingSettings(),
            max_batch_size=max_batch_size,
        )
        specs = [
            EpisodeSpec(seed, (seed,), {"kind": kind, "list": [1]}, kind if kind in LIVES else "sound")
            for seed, kind in episodes
        ]
        engine = RolloutEngine(pools[-1], chat, limits, environment_limits=dict.fromkeys(["sound", *lives], limits))
        return engine.run(specs, generator, on_finish)

    yield run
    for pool in pools:
        pool.close()


@pytest.fixture(scope="module")
def alone(play: Any) -> list[Trajectory]:
    """The sound episodes, with nobody beside them."""
    return play([(seed, None) for seed in range(SOUND)])


def kinds_of(where: str) -> dict[str, Kind]:
    """Every way to misbehave that can be survived there; ``Kind.at`` of those of :data:`LIVES` means nothing."""
    lives = {name: Kind("reset", lambda _: None, life.sound) for name, life in LIVES.items()}
    return {name: kind for name, kind in {**KINDS, **lives}.items() if where in kind.where}


def test_there_are_many_kinds() -> None:
    assert all(len(kinds_of(where)) >= 120 for where in WHERE)


def test_inline_neighbours_are_equal_bit_by_bit(play: Any) -> None:
    """Alone in its batch, an episode's numbers depend on nothing but itself."""
    few = [(seed, None) for seed in range(6)]
    others = [(1000 + n, name) for n, name in enumerate(kinds_of("inline"))]
    size = -(-len(others) // len(few))
    episodes = [one for n, sound in enumerate(few) for one in (sound, *others[n * size : (n + 1) * size])]
    assert len(episodes) == len(few) + len(others)
    beside = dict(zip(episodes, play(episodes, max_batch_size=1, max_new_tokens=2)))
    for sound, expected in zip(few, play(few, max_batch_size=1, max_new_tokens=2)):
        got = beside[sound]
        assert got.error is None and got.turns == expected.turns
        assert (got.prompt_ids, got.completion_ids) == (expected.prompt_ids, expected.completion_ids)
        assert got.sampling_logprobs == expected.sampling_logprobs


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("where", "everything"),
    [
        ("inline", True),
        ("threads", True),
        pytest.param("processes", False, id="only_processes"),
        pytest.param("processes", True, id="processes", marks=pytest.mark.slow),
    ],
)
def test_neighbours_notice_nothing(
    where: str, everything: bool, play: Any, alone: list[Trajectory], tmp_path: Path, clock: Any
) -> None:
    kinds = kinds_of(where)
    if not everything:  # starting the server again takes long
        kinds = {name: kind for name, kind in kinds.items() if kind.where == where and kind.act is not kill_server}
    names = list(kinds)
    others = iter([(1000 + n, name) for n, name in enumerate(names)])
    episodes: list[tuple[int, str | None]] = []
    for seed in range(SOUND):
        episodes += [(seed, None), *(other for _, other in zip(range(-(-len(names) // SOUND)), others))]
    left = [kind for _, kind in episodes if not (kind and kinds[kind].act is hang)]

    def on_finish(trajectory: Trajectory) -> None:
        if left:
            left.pop()
        clock.pace = 0.0 if left else 1e6

    played = dict(zip(episodes, play(episodes, on_finish if len(left) < len(episodes) else None, **WHERE[where])))

    for expected in alone:
        got = played[expected.seed, None]
        assert got.error is None and got.completion_ids == expected.completion_ids
        assert got.prompt_ids == expected.prompt_ids and got.rewards == expected.rewards
        np.testing.assert_allclose(got.sampling_logprobs, expected.sampling_logprobs, rtol=0, atol=1e-6)

    failed = {kind: episode.error for (_, kind), episode in played.items() if kind and episode.stop_reason.failed}
    assert failed.keys() == {name for name in names if not kinds[name].sound}
    assert all(isinstance(error, str) and 0 < len(error) <= 2100 for error in failed.values())

    ours = {name for name in failed if name.startswith("context") or name.startswith("first context")}
    assert [name for name in ours if "context" not in str(failed[name])] == [], "the error names the function"

    said = [turn.observation for episode in played.values() for turn in episode.turns]
    assert "from the child" not in said, "of a process that the environment forked"

    # What became of them can be trained on and written down.
    batch = collate(list(played.values()), pad_token_id=0, end_token_id=1)
    assert batch.turn_rewards.isfinite().all() and int(batch.failed.sum()) == len(failed)
    write_episodes(tmp_path / "episodes.parquet", [episode_row(trajectory) for trajectory in played.values()])
    records = read_records(tmp_path / "episodes.parquet")
    assert [record["seed"] for record in records] == [seed for seed, _ in episodes]
    assert (tmp_path / "episodes.parquet").stat().st_size < 20_000_000
