"""Makes an episode of a program's calls: each was sampled after an exact prompt, and prompts need not extend each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from agile_trainers.types import Message, Picture, StopReason, Trajectory, Turn, keyed, located


class Fork(StrEnum):
    """Reasons to begin a new path."""

    CONTEXT = "context rewritten"
    TEMPLATE = "template rewrites earlier turns"
    AGAIN = "asked again"
    """An agent asked for another answer to the same prompt."""
    BRANCH = "another continuation"
    """An agent went on from an earlier answer in a second way."""
    NEW = "new conversation"
    """An agent began another conversation."""


@dataclass
class Call:
    """One answer that a program asked the policy for. It becomes a turn."""

    prompt_ids: list[int]
    """The exact tokens that the answer was sampled after, at least one."""
    answer_ids: list[int]
    """The sampled tokens, at least one, with the end-of-turn token if it was sampled."""
    logprobs: list[float]
    """The sampler's log-probability of each."""
    text: str = ""
    finish_reason: str = "stop"
    reward: float = 0.0
    observation: str | list[Message] | None = None
    info: dict[str, Any] = field(default_factory=dict)
    rewarded: int | None = None
    """Number of calls whose reward was given before this one was submitted; None: all earlier ones."""
    messages: list[Message] | None = None
    """The messages that the prompt was rendered from."""
    fork: str | None = None
    """Reason for a prompt that does not extend the call before, in a few words."""
    question: bool = False
    """True if the environment does not get the answer; see :class:`~agile_trainers.types.Turn`."""
    kept: list[bytes] | None = None
    """The set of tokens that was kept for each of the answer; see :class:`~agile_trainers.types.Trajectory`."""
    pictures: Sequence[Picture] = ()
    """The images of the prompt, in order, and of what follows the answer."""


OF_TURNS = (
    "text", "finish_reason", "reward", "observation", "info", "rewarded", "messages", "fork", "question",
)  # fmt: skip
"""Fields that a call and its turn share."""


def forest(calls: Sequence[Call], stop_reason: StopReason, *, last: Sequence[int] = (), **options: Any) -> Trajectory:
    """Make an episode of calls, in the order in which they were submitted.

    Prompts and answers that are the beginning of another call's lie on its path. So calls whose prompts extend each other
    make one path, and a rewritten prompt, an answer that was thrown away or a question on the side begins another. Every
    call is a turn and is trained once, whichever of them the program used.

    Args:
        calls: At least one.
        stop_reason: Why the episode ended.
        last: Tokens that followed the last answer, such as the final observation of an episode that was cut short.
        **options: Further fields of the :class:`~agile_trainers.types.Trajectory`.

    Returns:
        The episode. Its paths are the longest prompts with answers, in the order of their first call.

    Raises:
        ValueError: For no calls, a call without prompt or answer, log-probs that do not match the answer, or an impossible
            number of rewarded calls.
    """
    if not calls:
        raise ValueError("An episode of calls needs at least one call, got none.")
    turns, whole = list[Turn](), list[list[int]]()
    for k, call in enumerate(calls):
        _check(call, k)
        start = turns[-1].end if turns else 0
        said = {name: getattr(call, name) for name in OF_TURNS}
        turns.append(Turn(start, start + len(call.answer_ids), place=len(call.prompt_ids), **said))
        whole.append([*call.prompt_ids, *call.answer_ids, *(last if k == len(calls) - 1 else ())])
    holders = _holders([keyed(ids, call.pictures) for ids, call in zip(whole, calls, strict=True)])
    numbers = {holder: number for number, holder in enumerate(dict.fromkeys(holders))}
    for turn, holder in zip(turns, holders, strict=True):
        turn.path = numbers[holder]
    pictures = [[one for one, _ in located(whole[holder], calls[holder].pictures)] for holder in numbers]
    return Trajectory(
        prompt_ids=list(calls[0].prompt_ids),
        completion_ids=[token for call in calls for token in call.answer_ids],
        sampling_logprobs=[value for call in calls for value in call.logprobs],
        kept=_kept(calls),
        turns=turns,
        stop_reason=stop_reason,
        paths=[whole[holder] for holder in numbers],
        pictures=pictures if any(pictures) else None,
        **options,
    )


def conversation(calls: Sequence[Call], stop_reason: StopReason, **options: Any) -> Trajectory:
    """Make an ordinary episode of calls whose prompts extend each other.

    Args:
        calls: At least one. Each prompt begins with the prompt and answer of the call before.
        stop_reason: Why the episode ended.
        **options: Further fields of the :class:`~agile_trainers.types.Trajectory`.

    Raises:
        ValueError: As :func:`forest`, or if a prompt does not extend the call before.
    """
    whole = forest(calls, stop_reason, **options)
    assert whole.paths is not None
    if len(whole.paths) > 1 or any(one.place + one.end - one.start > two.place for one, two in pairwise(whole.turns)):
        raise ValueError("The calls do not extend each other; make the episode with forest().")
    fields = on_one_path(whole.paths[0], whole.turns, [call.logprobs for call in calls], [call.kept for call in calls])
    return replace(whole, paths=None, **fields)


def on_one_path(
    path: list[int], turns: Sequence[Turn], logprobs: Sequence[list[float]], kept: Sequence[list[bytes] | None]
) -> dict[str, Any]:
    """Return the fields of an ordinary episode: its path becomes prompt and completion, and each turn a part of this.

    Args:
        path: The whole conversation.
        turns: The turns, by their places in it.
        logprobs: The log-probabilities of each turn's tokens.
        kept: Their kept sets, if there are any.
    """
    prompt, placed = turns[0].place if turns else len(path), list[Turn]()
    values, sets = [0.0] * (len(path) - prompt), [b""] * (len(path) - prompt)
    for turn, sampled, own in zip(turns, logprobs, kept, strict=True):
        start, end = turn.place - prompt, turn.place - prompt + len(sampled)
        values[start:end], sets[start:end] = sampled, own or [b""] * len(sampled)
        placed.append(replace(turn, start=start, end=end, place=0))
    return {
        "prompt_ids": path[:prompt],
        "completion_ids": path[prompt:],
        "sampling_logprobs": values,
        "kept": None if all(own is None for own in kept) else sets,
        "turns": placed,
    }


def _kept(calls: Sequence[Call]) -> list[bytes] | None:
    """Return the sets of the calls' tokens, one after another; None if no call has any."""
    if all(call.kept is None for call in calls):
        return None
    return [kept for call in calls for kept in call.kept or [b""] * len(call.answer_ids)]


def _holders(whole: Sequence[list[int]]) -> list[int]:
    """Return for each sequence the index of the one that begins with it and begins no other: a path."""
    order = sorted(range(len(whole)), key=whole.__getitem__)
    holders, holder = [0] * len(whole), order[-1]
    for place in reversed(order):  # a sequence comes right before those that begin with it
        if whole[holder][: len(whole[place])] != whole[place]:
            holder = place
        holders[place] = holder
    return holders


def _check(call: Call, k: int) -> None:
    if not call.prompt_ids or not call.answer_ids:
        raise ValueError(
            f"Call {k} has {len(call.prompt_ids)} prompt tokens and {len(call.answer_ids)} sampled ones; both need at least "
            "one."
        )
    if len(call.logprobs) != len(call.answer_ids):
        raise ValueError(
            f"Call {k} has {len(call.answer_ids)} sampled tokens but {len(call.logprobs)} sampling log-probs; each needs "
            "one."
        )
    if call.kept is not None and len(call.kept) != len(call.answer_ids):
        raise ValueError(f"Call {k} has {len(call.answer_ids)} sampled tokens but {len(call.kept)} kept sets.")
    if call.rewarded is not None and not 0 <= call.rewarded <= k:
        raise ValueError(f"rewarded of call {k} is {call.rewarded}; expected 0 to {k}, the number of calls before it.")
