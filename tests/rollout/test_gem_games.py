"""Every GEM game that runs offline, played for real through the rollout engine by a random policy."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from gem_games import OFFLINE_GAMES
from transformers import AutoTokenizer

from agile_trainers.envs.libraries import LIBRARIES
from agile_trainers.envs.libraries.gem import GemEnvironment
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.collate import collate
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.generators import GenerationRequest, ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec, Limits

QUICK = ("game:GuessTheNumber-v0-easy", "game:Sudoku-v0-easy", "game:Mastermind-v0-easy", "game:Minesweeper-v0-easy")


@pytest.mark.parametrize(
    "game", [pytest.param(game, marks=() if game in QUICK else pytest.mark.slow) for game in OFFLINE_GAMES]
)
def test_sixteen_episodes_play_without_an_error(game: str, embedded_model: Path) -> None:
    if not LIBRARIES["gem"].is_installed:
        pytest.skip("gem-llm is not installed: pip install 'agile-trainers[envs]'")
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    made: list[GemEnvironment] = []

    def factory() -> GemEnvironment:
        made.append(GemEnvironment(game))
        return made[-1]

    rng = random.Random(0)

    def script(request: GenerationRequest) -> list[int]:
        # Inline, all episodes are reset in order before the first action: instance and episode have one number.
        return [*tokenizer.encode(made[request.episode].scripted_policies()["random"]([], rng)), tokenizer.eos_token_id]

    engine = RolloutEngine(
        EnvironmentPool(factory),
        ChatRenderer(tokenizer, eos_token_ids=[tokenizer.eos_token_id]),
        Limits(max_turns=8, max_new_tokens=64, max_model_length=1 << 20),
    )
    episodes = engine.run([EpisodeSpec(seed, (seed,)) for seed in range(16)], ScriptedGenerator(script))
    assert [episode.error for episode in episodes] == [None] * 16
    assert all(episode.turns for episode in episodes)
    batch = collate(episodes, pad_token_id=tokenizer.pad_token_id, end_token_id=tokenizer.eos_token_id)
    assert batch.turn_mask.sum() == sum(len(episode.turns) for episode in episodes)
