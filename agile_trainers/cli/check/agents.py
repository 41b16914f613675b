"""Describes the calls of an agent for ``agile-trainers check``: how they fork, and what changes at every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.envs.scripted_policies import ScriptedPolicy
from agile_trainers.evaluation.scripted_policies import play_agent
from agile_trainers.rollout.forest import Fork
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.types import Trajectory, common_prefix

_BEFORE, _AFTER = 24, 32
"""Characters that are shown before and after the place where a prompt parts from an earlier one."""
_OFTEN = 2
"""Forks at the same place from which that place is said to change at every call."""


@dataclass(frozen=True)
class Parting:
    """The place where a prompt parts from the earlier prompt or answer that it shares most with."""

    number: int
    """Number of the call in its episode, by the time that it was asked."""
    token: int
    """Tokens that both begin with."""
    shared: str
    """The end of what both begin with."""
    was: str
    """The earlier one's text from there."""
    now: str
    """This one's text from there."""

    def __str__(self) -> str:
        return f"{self.shared!r} went on with {self.was!r}, now with {self.now!r}"


def partings(episode: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[Parting]:
    """Return where the prompts of an episode part from the earlier ones, but for those that are new from the start.

    Args:
        episode: An agent's.
        tokenizer: Writes the tokens as text.
    """
    found: list[Parting] = []
    before: list[list[int]] = []
    for number, turn in _in_time(episode):
        prompt = episode.prompt_of(turn)
        if episode.turns[turn].fork == Fork.CONTEXT and before:
            nearest = max(before, key=lambda ids: common_prefix(ids, prompt))
            place = common_prefix(nearest, prompt)
            shared, was, now = (tokenizer.decode(ids) for ids in (prompt[:place], nearest[place:], prompt[place:]))
            found.append(Parting(number, place, shared[-_BEFORE:], was[:_AFTER], now[:_AFTER]))
        before.append([*prompt, *episode.action_of(turn)])
    return found


def call_lines(played: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, str]]:
    """Yield labels and lines about the calls of an agent's episodes.

    Args:
        played: The episodes.
        tokenizer: Writes the tokens as text.
    """
    calls = [turn.info.get("call", {}) for episode in played for turn in episode.turns]
    if not calls:
        return
    clients = Counter(str(call.get("client", "an unnamed client")) for call in calls)
    by = ", ".join(f"{name} ({count})" if len(clients) > 1 else name for name, count in clients.most_common())
    yield "calls", f"{len(calls) / len(played):.1f} an episode, by {by}"
    notes = {
        "sent again by the client and answered once": sum(call.get("repeated", 0) > 0 for call in calls),
        "given up by the client": sum(bool(call.get("hung_up")) for call in calls),
    }
    if any(notes.values()):
        yield "", ", ".join(f"{count} {what}" for what, count in notes.items() if count)
    if asked := _overridden(calls):
        yield "", f"settings that the run decides instead: {asked}"
    forks = Counter(turn.fork for episode in played for turn in episode.turns if turn.fork is not None)
    if not forks:
        yield "forks", "none: each prompt goes on from the answer before it"
        return
    begun = ", ".join(f"{count} ({count / len(calls):.0%}) {why}" for why, count in forks.most_common())
    yield "forks", f"of {len(calls)} answers these begin a path of their own: {begun}"
    yield from _where(played, tokenizer)
    computed = fmean(episode.num_tokens for episode in played)
    longest = fmean(
        max(len(episode.prompt_of(k)) + len(episode.action_of(k)) for k in range(len(episode.turns)))
        for episode in played
        if episode.turns
    )
    cost = (
        f"an update computes {computed:.0f} tokens an episode, {computed / longest:.2f} times the {longest:.0f} of its "
        "longest path"
    )
    yield "cost", cost
    again = [episode.read_again for episode in played if episode.read_again is not None]
    if again and any(again):
        yield "", f"sampling read {fmean(again):.0f} tokens an episode again, which were no longer in the cache"


def changes_every_call(played: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Describe what changes in the prompt from call to call, such as a clock, and begins a path each time; None if nothing.

    Args:
        played: The episodes.
        tokenizer: Writes the tokens as text.
    """
    for episode in played:
        found = partings(episode, tokenizer)
        often = Counter(one.token for one in found).most_common(1)
        if often and often[0][1] >= _OFTEN and 2 * often[0][1] >= len(found):
            token, count = often[0]
            example = next(one for one in found if one.token == token)
            return (
                f"{count} of {len(episode.turns)} calls of an episode change token {token} of the prompt, and so begin a "
                f"path each: {example}. Leave out what changes at every call, such as a time or a random id, or put it at "
                "the end."
            )
    return None


def policy_scores(
    factory: EnvironmentFactory, policies: Mapping[str, ScriptedPolicy], specs: Sequence[EpisodeSpec]
) -> dict[str, tuple[float, float | None]]:
    """Play an agent's episodes with functions in the model's place. Return each one's mean reward and success, if reported.

    Args:
        factory: The agent.
        policies: Functions by name.
        specs: The episodes.
    """
    scores = {}
    for name, policy in policies.items():
        episodes = [play_agent(factory, policy, [spec.seed], spec.options)[0] for spec in specs]
        told = any("success" in episode.info for episode in episodes)
        success = fmean(episode.success for episode in episodes) if told else None
        scores[name] = fmean(episode.reward for episode in episodes), success
    return scores


def _where(played: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, str]]:
    """Yield the first place of each episode where a prompt parts from an earlier one, without repeating a place."""
    seen: set[int] = set()
    for episode in played:
        for parting in partings(episode, tokenizer):
            if parting.token not in seen:
                seen.add(parting.token)
                yield "", f"call {parting.number + 1}, at token {parting.token}: {parting}"
                break


def first_difference(one: Trajectory, other: Trajectory, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Describe where the calls of two episodes of the same seed and answers differ; None if they are equal.

    Args:
        one: An episode.
        other: The same, played again.
        tokenizer: Writes the tokens as text.
    """
    for (number, turn), (_, again) in zip(_in_time(one), _in_time(other)):
        was, now = one.prompt_of(turn), other.prompt_of(again)
        if was != now:
            place = common_prefix(was, now)
            texts = (tokenizer.decode(ids) for ids in (now[:place], was[place:], now[place:]))
            shared, before, after = texts
            parting = Parting(number, place, shared[-_BEFORE:], before[:_AFTER], after[:_AFTER])
            return f"call {number + 1} differs at token {place}: {parting}"
    if len(one.turns) != len(other.turns):
        return f"it made {len(one.turns)} calls, then {len(other.turns)}"
    if (one.episode_return, one.error) != (other.episode_return, other.error):
        return f"the calls are equal, but the return was {one.episode_return:g}, then {other.episode_return:g}"
    return None


def _in_time(episode: Trajectory) -> list[tuple[int, int]]:
    """Return the calls in the order in which they were asked, each as its number and its turn."""
    numbers = [int(turn.info.get("call", {}).get("number", k)) for k, turn in enumerate(episode.turns)]
    return sorted((number, turn) for turn, number in enumerate(numbers))


def _overridden(calls: Sequence[dict[str, Any]]) -> str:
    asked: dict[str, None] = {}
    for call in calls:
        asked |= dict.fromkeys(f"{name}={value}" for name, value in call.get("asked", {}).items())
    return ", ".join(asked)
