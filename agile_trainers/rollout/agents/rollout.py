"""The agents' episodes of one rollout, and the server that their clients talk to."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from agile_trainers.envs.agent import Agent, Endpoint, Model, Task
from agile_trainers.envs.checker import LARGEST_REWARD
from agile_trainers.rollout.agents.episode import AgentEpisode
from agile_trainers.rollout.agents.requests import POLICY, Refusal, Ticket, over, refuse_request, wrong_key
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


class _Episode(Protocol):
    index: int
    agent: Agent
    posted: deque[tuple[float, Any]]
    """Rewards that have been posted, in order: an outcome ``"reward"`` for each."""

    def sample_of(self, call: str | None) -> Any:
        """Return the answer that a reward names.

        Raises:
            Refusal: If there is none.
        """


_E = TypeVar("_E", bound=_Episode)


class EpisodeExchange(Generic[_E]):
    """Finds the episode of a key, for the server's thread.

    Args:
        post: Takes what comes in for an episode.
    """

    def __init__(self, post: Callable[[Outcome], None]) -> None:
        self._post = post
        self._lock = Lock()
        """Held between an episode's end and its last reward: none that is taken comes too late."""
        self._episodes: dict[str, _E] = {}
        self.keys: dict[_E, tuple[str, str]] = {}
        """Episodes under way to their keys."""
        number = secrets.token_urlsafe(8)
        self._first = {"api_key": f"sk-{number}-", "reward_key": f"rk-{number}-"}
        """The first characters of all keys of a kind, by which those of episodes that have ended are known."""

    def admit(self, episode: _E) -> tuple[str, str]:
        """Make an episode's keys, of its requests and of its rewards."""
        api_key, reward_key = (first + secrets.token_urlsafe(32) for first in self._first.values())
        self._episodes[api_key] = self._episodes[reward_key] = episode
        self.keys[episode] = api_key, reward_key
        return api_key, reward_key

    def dismiss(self, episode: _E) -> None:
        """Take no more requests and rewards of an episode."""
        with self._lock:
            for key in self.keys.pop(episode):
                del self._episodes[key]

    def close(self) -> None:
        """Take no more requests."""
        self._episodes.clear()

    def ask(self, key: str, ticket: Ticket) -> None:
        """Take a request of the episode with this key."""
        try:
            self._post(Outcome(self._find(key).index, "call", ticket))
        except Refusal as refusal:
            refuse_request(ticket, refusal)

    def delivered(self, key: str, ticket: Ticket) -> None:
        """Note that the client got the whole answer."""
        self._note(key, "delivered", ticket)

    def abandoned(self, key: str, ticket: Ticket) -> None:
        """Note that the client hung up before it got the whole answer."""
        self._note(key, "abandoned", ticket)

    def reward(self, key: str, value: Any, call: str | None) -> None:
        """Take a reward of one call."""
        with self._lock:
            episode = self._find(key, "reward_key")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST_REWARD:
                raise Refusal(f"The reward is {value!r:.100}; expected a finite number.")
            if call is not None and not isinstance(call, str):
                raise Refusal(
                    f"The call is {call!r:.100}; expected the answer's id, `response.id`, or none for the last answer."
                )
            # Found at once: the last answer may be another one later.
            episode.posted.append((float(value), episode.sample_of(call)))
            self._post(Outcome(episode.index, "reward"))

    def models(self, key: str) -> Mapping[str, Endpoint]:
        """Return the endpoints that answer for other models' names."""
        return self._find(key).agent.models

    def _note(self, key: str, what: str, ticket: Ticket) -> None:
        if (episode := self._episodes.get(key)) is not None:
            self._post(Outcome(episode.index, what, ticket))

    def _find(self, key: str, kind: str = "api_key") -> _E:
        if not key.startswith(self._first[kind]):
            raise wrong_key(kind)
        episode = self._episodes.get(key)
        if episode is None:
            raise over()
        return episode
