"""Sessions of OpenEnv on a server whose rubric rewards the end of the game."""

from __future__ import annotations

from typing import Any

from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State
from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import ResourceSessionFactory, StepEnvSessionAdapter
from openenv.core.rubrics import ExponentialDiscountingTrajectoryRubric


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str


class Quick(ExponentialDiscountingTrajectoryRubric):
    """A half of the reward for each guess after the first."""

    def score_trajectory(self, trajectory: list[Any]) -> float:
        return 0.5 ** (len(trajectory) - 1)


class RubricServer(Environment[Guess, Hint, State]):
    """Guess a number of 1..9; the seed is the secret."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__(rubric=Quick())
        self.secret = self.steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, low: int = 1, **kwargs: Any) -> Hint:
        self._reset_rubric()
        self.secret, self.steps = (seed or 0) % 9 + 1, 0
        return Hint(hint=f"Guess a number from {low} to 9.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self.steps += 1
        right = action.number == self.secret
        observation = Hint(hint="right" if right else "wrong", done=right)
        observation.reward = self._apply_rubric(action, observation)
        return observation

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


class Sessions(ResourceSessionFactory):
    """One tool, ``guess``."""

    def __init__(self, url: str) -> None:
        self.url = url

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> StepEnvSessionAdapter:
        schema = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
        return StepEnvSessionAdapter(
            GenericEnvClient(base_url=self.url),
            task=task,
            seed=seed,
            reset_kwargs=dict(task or {}),
            tool_specs=[Tool(name="guess", description="Guess the number.", input_schema=schema)],
            action_builder=lambda name, arguments: {"number": int(arguments["number"])},
            initial_messages_builder=lambda result, task: [{"role": "user", "content": result.observation["hint"]}],
        )
