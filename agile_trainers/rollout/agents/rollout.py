"""The agents' episodes of one rollout, and the server that their clients talk to."""

from __future__ import annotations

from copy import deepcopy

from agile_trainers.envs.agent import Model, Task
from agile_trainers.rollout.agents.episode import AgentEpisode
from agile_trainers.rollout.agents.requests import POLICY, EpisodeExchange, over, refuse_request
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.environment_pool import EnvironmentPool, Outcome
from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest
from agile_trainers.rollout.spec import EpisodeSpec, Limits


class AgentRollout:
    """Plays the agents' episodes of one rollout, as :class:`~agile_trainers.rollout.rollout.Episodes`.

    It is a context manager, outside of which nothing listens.

    The server's thread posts requests to the environment pool, whose outcomes the rollout loop takes.

    Args:
        pool: Runs the agents.
        chat: Renders prompts.
    """

    def __init__(self, pool: EnvironmentPool, chat: ChatRenderer) -> None:
        self._pool, self._chat = pool, chat
        from agile_trainers.rollout.agents.server import AgentServer  # aiohttp, which stepped environments do not need

        self._exchange: EpisodeExchange[AgentEpisode] = EpisodeExchange(pool.post)
        self._server = AgentServer(self._exchange)

    def __enter__(self) -> AgentRollout:
        self._server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._exchange.close()
        self._refuse_posted()
        for episode in self._exchange.keys:
            episode.close()
        self._server.__exit__(*error)
        self._refuse_posted()

    def start(self, key: int, spec: EpisodeSpec, limits: Limits) -> AgentEpisode:
        """Let the agent of an episode begin."""
        agent = self._pool.agent(spec.environment)
        assert agent is not None
        episode = AgentEpisode(key, spec, limits, self._chat, agent)
        api_key, reward_key = self._exchange.admit(episode)
        model = Model(self._server.base_url, api_key, POLICY, reward_key)
        self._pool.play(key, model, Task(deepcopy(spec.options), spec.seed), spec.environment)
        return episode

    def on_outcome(self, outcome: Outcome, episode: AgentEpisode | None) -> list[GenerationRequest]:
        """Take what the server or the pool has for an episode. Return what is to be sampled."""
        value, requests = outcome.value, list[GenerationRequest]()
        if episode is None:
            if outcome.method == "call":
                refuse_request(value, over())
            return requests
        match outcome.method:
            case "call":
                requests = episode.ask(value)
            case "delivered":
                episode.delivered(value)
            case "abandoned":
                episode.abandoned(value)
            case "reward":
                episode.reward(*episode.posted.popleft())
            case "play":
                self._exchange.dismiss(episode)
                while episode.posted:  # whoever gave them has been told that they count
                    episode.reward(*episode.posted.popleft())
                episode.end(value, outcome.error)
        self._pool.waits(outcome.episode, episode.waits)
        return requests

    def on_output(self, output: GenerationOutput, episode: AgentEpisode) -> list[GenerationRequest]:
        """Take an answer. Nothing is to be sampled before the client has read it."""
        episode.answered(output)
        self._pool.waits(output.episode, episode.waits)
        return []

    def _refuse_posted(self) -> None:
        """Refuse requests that came too late to be taken, so that the next rollout does not find them."""
        for outcome in self._pool.outcomes(block=False):
            if outcome.method == "call":
                refuse_request(outcome.value, over())
