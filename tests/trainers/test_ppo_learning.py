"""That PPO learns: the critic a constant, the policy what the probes ask for."""

from __future__ import annotations

import pytest
from datasets import Dataset
from ppo_games import make_ppo

from agile_environments.probes import PROBE_WORDS, PROBES
from agile_trainers.embedded import make_embedded_model


class Always:
    """Pays 1 for any answer."""

    def reset(self, seed=None, options=None):
        return "go", {}

    def step(self, action):
        return "end", 1.0, True, False, {}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return make_embedded_model(tmp_path_factory.mktemp("words") / "model", words=PROBE_WORDS)


SETTINGS = {"stop_strings": None, "max_new_tokens": 2, "optim": "adamw_torch", "log_rollouts": False}


def test_the_critic_learns_a_constant(words, tmp_path):
    trainer = make_ppo(
        words, tmp_path, environment=Always, max_turns=1, max_steps=48, learning_rate=3e-3, **SETTINGS
    )  # fmt: skip
    trainer.train()
    errors = [row["value/error"] for row in trainer.state.log_history if "value/error" in row]
    assert errors[0] == 1.0 and max(errors[-10:]) < 0.05


@pytest.mark.parametrize(
    ("probe", "granularity", "steps"),
    [
        ("constant", "turn", 16),
        pytest.param("conditional", "turn", 64, marks=pytest.mark.slow),
        pytest.param("conditional", "token", 64, marks=pytest.mark.slow),
    ],
)
def test_the_policy_solves_the_probe(words, tmp_path, probe, granularity, steps):
    spec = PROBES[probe]
    assert steps * 64 <= spec.episodes
    trainer = make_ppo(
        words, tmp_path, environment=f"agile:probe/{probe}", max_turns=spec.factory.max_turns, max_steps=steps,
        per_device_train_batch_size=64, learning_rate=5e-3, entropy_coef=0.1, advantage_granularity=granularity,
        lora={"r": 8, "lora_alpha": 16}, **SETTINGS,
    )  # fmt: skip
    trainer.train()
    starts = Dataset.from_list([{"start": start} for start in range(spec.factory.starts)])
    assert trainer.evaluate(starts, num_episodes=spec.factory.starts, greedy=True)["eval_success"] >= spec.threshold
