"""The types that describe an episode, as Python objects and as tensors.

Shape letters used everywhere: ``B`` episodes, ``K`` turns, ``P`` prompt tokens, ``T`` completion tokens; of episodes of
several paths also ``F`` tokens of all paths, ``M`` paths. Token positions are *completion coordinates*: index 0 is the first
token after the prompt. Nothing is shifted by one anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line checks names before it takes the seconds of this import
    import torch

Message = dict[str, Any]
"""One chat message, ``{"role": ..., "content": ...}``. The content is text, or a list of parts: ``{"type": "text", "text":
...}`` and ``{"type": "image", "image": Image}``."""
Content = str | list[dict[str, Any]]
"""The content of a message."""

NO_TURN = -1
"""Value of ``turn_ids`` on every token that is not part of an action."""


@dataclass(frozen=True)
class Image:
    """An image of a message. Equal bytes are the same image."""

    data: bytes
    """A file in a common format, of one frame."""

    @cached_property
    def digest(self) -> str:
        """The content in 32 hexadecimal digits."""
        return blake2b(self.data, digest_size=16).hexdigest()

    def __repr__(self) -> str:
        return f"image:{self.digest}"


@dataclass(eq=False)
class Picture:
    """The form of an image that a model reads. Episodes that show the same image share one."""

    key: int
    """Negative, of the content; stands for the placeholders where conversations are compared."""
    text: str
    """The placeholders, and the special tokens around them."""
    token_id: int
    """The placeholder."""
    count: int
    """Number of placeholders."""
    inputs: dict[str, Any]
    """The inputs of the image encoder; the grid of patches alone, if any, once it was encoded."""
    features: torch.Tensor | None = None
    """(count, W), the values that stand in the place of each placeholder's embedding, and what is added to later layers."""
    offsets: torch.Tensor | None = None
    """(count, 4) int64: the place of each in the image on the three axes of rotary positions, and the steps to the next
    token."""


def parts_of(message: Message) -> list[dict[str, Any]]:
    """Return the content of a message as parts."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def text_of(message: Message) -> str:
    """Return the text of a message; an image is ``[image]``."""
    return "".join(part["text"] if part["type"] == "text" else "[image]" for part in parts_of(message))


def as_text(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose content is text, for tables."""
    return [{**message, "content": text_of(message)} for message in messages]


def images_of(messages: Sequence[Message]) -> list[Image]:
    """Return the images of messages, in order."""
    there = [message for message in messages if not isinstance(message["content"], str)]
    return [part["image"] for message in there for part in message["content"] if part["type"] == "image"]


def keyed(ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
    """Replace the placeholders of images by their keys, so that the ids of different images differ.

    Args:
        ids: A conversation, or its beginning.
        pictures: Its images, in order.
    """
    if not pictures:
        return list(ids)
    keys = iter([one.key for one in pictures for _ in range(one.count)])
    return [next(keys) if token == pictures[0].token_id else token for token in ids]


def located(ids: Sequence[int], pictures: Sequence[Picture]) -> list[tuple[Picture, list[int]]]:
    """Return the images of a conversation, or of its beginning, and the places of the placeholders of each."""
    if not pictures:
        return []
    places = [place for place, token in enumerate(ids) if token == pictures[0].token_id]
    found, start = [], 0
    for one in pictures:
        if start < len(places):
            found.append((one, places[start : start + one.count]))
        start += one.count
    return found


class StopReason(StrEnum):
    """Reason why an episode ended. The value is the name used in metrics (``stop/<value>``) and in the rollout log."""

    TERMINATED = "terminated"
    """The environment reached a terminal state; the value of the final state is zero."""
    TRUNCATED = "truncated"
    """The environment truncated the episode (by its own step limit, for example)."""
    MAX_TURNS = "max_turns"
    """The episode used all of ``max_turns``."""
    CONTEXT_FULL = "context_full"
    """The conversation left no room for another answer within ``max_model_length``."""
    REWRITE_FULL = "rewrite_full"
    """The rewritten context left no room for an answer within ``max_model_length``."""
    ENVIRONMENT_ERROR = "environment_error"
    """The environment raised or broke the protocol; the episode is not trained on."""
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    """The environment did not answer within ``environment_timeout`` seconds; the episode is not trained on."""

    @property
    def truncated(self) -> bool:
        """True if a limit stopped the episode before the environment ended it."""
        return self is StopReason.TRUNCATED or self.limit

    @property
    def limit(self) -> bool:
        """True if a limit of the trainer ended the episode, which the environment does not know of."""
        return self in (StopReason.MAX_TURNS, StopReason.CONTEXT_FULL, StopReason.REWRITE_FULL)

    @property
    def failed(self) -> bool:
        """True if the environment failed; rewards and statistics of the episode are then invalid."""
        return self in (StopReason.ENVIRONMENT_ERROR, StopReason.ENVIRONMENT_TIMEOUT)


@dataclass
class Turn:
    """One action and the environment's response."""

    start: int
    """First action token, in completion coordinates."""
    end: int
    """One past the last action token. The sampled end-of-turn token belongs to the action."""
    text: str
    """The action that the environment received: decoded, without special tokens."""
    finish_reason: str
    """``"stop"`` (an end-of-turn token or stop string) or ``"length"`` (a token limit)."""
    reward: float = 0.0
    """The environment's reward for this action. 0 when the environment failed on it."""
    observation: str | list[Message] | None = None
    """The environment's next observation; None when it failed."""
    info: dict[str, Any] = field(default_factory=dict)
    """The environment's ``info`` of this step."""
    path: int = 0
    """In an episode of several paths: the index of the path that holds the action."""
    place: int = 0
    """In an episode of several paths: the index in that path of the first action token. The tokens before it are the prompt
    that the action was sampled after."""
    rewarded: int | None = None
    """Number of turns whose reward was given before this action was asked for; None: all earlier ones. Actions that were
    asked for at once have the same number."""
    messages: list[Message] | None = None
    """The messages that the whole prompt was rendered from, if they are not those of an earlier turn with its action and its
    observation."""
    fork: str | None = None
    """Reason for the new path that begins with this turn, in a few words; None if it continues one, or nobody said."""
    question: bool = False
    """True if the program around the policy asked for this action, such as a summary: the environment did not get it."""
    judgements: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Answers of judges by their names: of this turn, or in the last turn of the episode. ``failed`` says why there is no
    ``score``."""

    @property
    def call(self) -> Mapping[str, Any]:
        """Notes of the endpoint on an agent's call; empty for other turns, also where an environment has a ``"call"``."""
        call = self.info.get("call")
        return call if isinstance(call, Mapping) and {"number", "request"} <= call.keys() else {}

    @property
    def said(self) -> list[Message]:
        """The action as an assistant message, and the observation after it."""
        action: Message = {"role": "assistant", "content": self.text}
        if isinstance(self.observation, str):
            return [action, {"role": "user", "content": self.observation}]
        return [action, *(self.observation or ())]


@dataclass
class Trajectory:
    """One episode with the sampled token ids, which are never re-encoded from text.

    An ordinary episode is one conversation that only grows: each turn's prompt is all that came before. Where the program
    around the policy rewrites the conversation, asks again or asks on the side, an episode has several :attr:`paths`; see
    :func:`agile_trainers.rollout.forest.forest`.
    """

    prompt_ids: list[int]
    """The prompt of the first turn."""
    completion_ids: list[int]
    """Every token after the prompt: actions and observations, in order. In an episode of several paths the actions alone, in
    the order in which they were asked for."""
    sampling_logprobs: list[float]
    """Same length as ``completion_ids``: the sampler's log-probability on action tokens, 0.0 on observations."""
    turns: list[Turn]
    stop_reason: StopReason
    prompt: list[Message] = field(default_factory=list)
    """The messages the prompt was rendered from."""
    reset_info: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    """The environment's seed; members of one group share it."""
    environment_name: str | None = None
    """Name of the environment in a run of several; None in a run of one."""
    error: str | None = None
    """The environment's exception, as text, when it failed."""
    end_reward: float | None = None
    """Reward of the environment's ``end`` after a limit ended the episode; part of the last turn's. None without."""
    observations_cut: int = 0
    """Number of observations, the first one included, that were cut to the length limit."""
    environment: Any = field(default=None, repr=False, compare=False)
    """The environment instance in its final state, until the next rollout reuses it. None if it failed."""
    options: dict[str, Any] | None = None
    """The dataset row passed to ``reset``."""
    paths: list[list[int]] | None = None
    """Token ids of each path, from its first token on; every turn's prompt and action are the beginning of one. None: one
    path, the prompt and the completion."""
    read_again: int | None = field(default=None, compare=False)
    """Prompt tokens that were read again, since they were no longer in the generator's cache. None: it cannot tell."""
    version: int = 0
    """Number of generation batches that the policy which played it was trained on, with ``batches_ahead``; else 0."""
    kept: list[bytes] | None = None
    """Same length as ``completion_ids``, where settings such as ``top_p`` removed tokens from what was sampled: the set of
    those that were kept for each token (:mod:`agile_trainers.objectives.kept_sets`), empty for all and on observations."""
    pictures: list[list[Picture]] | None = field(default=None, repr=False, compare=False)
    """The images of each path, in order; of an ordinary episode, of its only one. None without any image."""
    demonstration: bool = False
    """True if an expert gave the answers; ``sampling_logprobs`` are then its own, 0 where they are unknown."""
    linear: bool = True
    """False if the turns of two such episodes do not correspond by index, because of turns on the side or at once."""
    asked_last: int | None = None
    """The turn that was asked for last, where turns have another order: an agent's calls are ordered by their prompts. None:
    the last one."""

    @property
    def last(self) -> int:
        """The turn that was asked for last; -1 without any."""
        return len(self.turns) - 1 if self.asked_last is None else self.asked_last

    @property
    def num_tokens(self) -> int:
        """Number of distinct tokens that a model reads: a prefix that paths share counts once."""
        if self.paths is None:
            return len(self.prompt_ids) + len(self.completion_ids)
        return max(nodes[-1] for nodes in path_nodes(self._keys)) + 1

    def prompt_of(self, k: int) -> list[int]:
        """Return the tokens that turn ``k`` was sampled after."""
        turn = self.turns[k]
        if self.paths is None:
            return [*self.prompt_ids, *self.completion_ids[: turn.start]]
        return self.paths[turn.path][: turn.place]

    @property
    def images(self) -> dict[str, Image]:
        """The images of the prompt, the observations and rewritten contexts, by their text."""
        turns = [m for turn in self.turns for m in (turn.messages, turn.observation) if isinstance(m, list)]
        return {str(image): image for messages in (self.prompt, *turns) for image in images_of(messages)}

    @property
    def shown(self) -> list[tuple[list[int], list[Picture]]]:
        """The tokens and the images of each path."""
        paths = [[*self.prompt_ids, *self.completion_ids]] if self.paths is None else self.paths
        return list(zip(paths, self.pictures or [[] for _ in paths], strict=True))

    @property
    def _keys(self) -> list[list[int]]:
        """The paths, with the keys of images."""
        return [keyed(ids, pictures) for ids, pictures in self.shown]

    def action_of(self, k: int) -> list[int]:
        """Return the tokens that were sampled in turn ``k``."""
        return self.completion_ids[self.turns[k].start : self.turns[k].end]

    @property
    def parents(self) -> list[int | None]:
        """The turn that each turn goes on from; None without any.

        It is the earlier one whose prompt and action are the longest beginning of the turn's prompt, the last of equals.
        Each turn has one only: after equal actions of which the program used the last, a later state would not tell which of
        them it follows from.
        """
        if self.paths is None:
            return [None, *range(len(self.turns) - 1)][: len(self.turns)]
        nodes = path_nodes(self._keys)
        lasts = [turn.place + turn.end - turn.start - 1 for turn in self.turns]
        ends = [nodes[turn.path][last] for turn, last in zip(self.turns, lasts, strict=True)]
        parents = list[int | None]()
        for k, turn in enumerate(self.turns):
            own = nodes[turn.path]
            contained = [i for i in range(k) if lasts[i] < turn.place and own[lasts[i]] == ends[i]]
            parents.append(max(contained, key=lambda i: (lasts[i], i), default=None))
        return parents

    @property
    def rewards(self) -> list[float]:
        """Reward of each turn."""
        return [turn.reward for turn in self.turns]

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of the turn rewards."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def unjudged(self) -> bool:
        """True if a judge whose scores are trained on gave none; the episode is not trained on."""
        said = [one for turn in self.turns for one in turn.judgements.values()]
        return any("failed" in one and not one.get("held_out") for one in said)

    @property
    def clipped(self) -> bool:
        """True if a limit ended the episode: on turns, context, the environment, or the tokens of the last answer.

        A limit that an agent's own request set is none.
        """
        if self.stop_reason.truncated or not self.turns:
            return self.stop_reason.truncated
        turn = self.turns[self.last]
        return turn.finish_reason == "length" and "max_tokens" not in turn.call

    @property
    def success(self) -> bool | None:
        """``info["success"]`` of the last turn that the environment got, or None when it does not report it."""
        info = next((turn.info for turn in reversed(self.turns) if not turn.question), {})
        return bool(info["success"]) if "success" in info else None

    @property
    def anchors(self) -> list[str | None]:
        """``info["anchor"]`` of the state each turn started from: of ``reset`` for the first, else of the previous step.

        In an episode of several paths it is the exact prompt, since the previous step may be another conversation's.
        """
        if self.paths is not None:
            return [" ".join(map(str, self.prompt_of(k))) for k in range(len(self.turns))]
        infos = [self.reset_info, *(turn.info for turn in self.turns[:-1])][: len(self.turns)]
        return [None if info.get("anchor") is None else str(info["anchor"]) for info in infos]

    @property
    def messages(self) -> list[Message]:
        """The conversation after the prompt: actions as assistant messages, observations between them.

        In an episode of several paths, that of the turn that was asked for last. If it does not begin with :attr:`prompt`,
        because it was rewritten, it is there from its first message on. :attr:`asides` has the other turns.
        """
        messages: list[Message] = []
        for k in self._last_path:
            turn = self.turns[k]
            if turn.messages is not None:
                begins = turn.messages[: len(self.prompt)] == self.prompt
                messages = list(turn.messages[len(self.prompt) :] if begins else turn.messages)
            messages += turn.said
        return messages

    @property
    def rewritten(self) -> list[Message] | None:
        """The messages before the first answer of :attr:`messages`, which has them too; None if these are :attr:`prompt`."""
        for k in self._last_path[:1]:
            begun = self.turns[k].messages
            if begun is not None and begun[: len(self.prompt)] != self.prompt:
                return begun
        return None

    @property
    def asides(self) -> list[list[Message]]:
        """The turns that are not part of :attr:`messages`, such as discarded answers: each is what was said in it."""
        kept, parents = set[int | None](self._last_path), self.parents
        for k in reversed(range(len(self.turns))):  # and those that their prompts contain
            if k in kept:
                kept |= {parents[k]}
        return [turn.said for k, turn in enumerate(self.turns) if k not in kept]

    @property
    def _last_path(self) -> list[int]:
        """The turns of the conversation that was asked last, in order."""
        if self.paths is None:
            return list(range(len(self.turns)))
        parents, k, found = self.parents, self.last, list[int]()
        while k >= 0:
            found.append(k)
            parent = parents[k]
            # Messages that begin anew hold the turns before them.
            k = -1 if parent is None or self.turns[k].messages is not None else parent
        return found[::-1]


def path_nodes(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Number the distinct tokens of some paths: tokens after the same prefix have one number.

    Args:
        paths: Token ids of each, at least one.

    Returns:
        The numbers along each path, ascending; the numbers of all paths have no gaps.
    """
    nodes: list[list[int]] = [[] for _ in paths]
    before, count = -1, 0
    for place in sorted(range(len(paths)), key=lambda place: list(paths[place])):
        shared = 0 if before < 0 else common_prefix(paths[before], paths[place])
        new = len(paths[place]) - shared
        nodes[place] = [*(nodes[before][:shared] if shared else ()), *range(count, count + new)]
        before, count = place, count + new
    return nodes


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass
class TurnBatch:
    """Trajectories as padded tensors, the trainers' only input."""

    prompt_ids: torch.Tensor
    """(B, P) int64, left-padded."""
    prompt_mask: torch.Tensor
    """(B, P) int64, 1 on prompt tokens."""
    completion_ids: torch.Tensor
    """(B, T) int64, right-padded; action and observation tokens."""
    completion_mask: torch.Tensor
    """(B, T) int64, 1 on action and observation tokens: the attention mask."""
    turn_ids: torch.Tensor
    """(B, T) int64, the turn's index on action tokens, ``NO_TURN`` elsewhere."""
    turn_rewards: torch.Tensor
    """(B, K) float32, 0 where there was no turn."""
    turn_mask: torch.Tensor
    """(B, K) bool, True for turns that happened."""
    state_positions: torch.Tensor
    """(B, K+1) int64, the positions at which V(s_k) is read: the token before the turn's first action token, in *padded*
    prompt+completion coordinates (column P-1 is the last prompt token), or columns of :attr:`path_ids`. Entry ``n`` of an
    episode of ``n`` turns is its final state (its last token, that of the last turn's path); later entries repeat it and
    have no meaning."""
    cut: torch.Tensor
    """(B,) bool, True if a limit ended the episode or its last answer, :attr:`Trajectory.clipped`."""
    unfinished: torch.Tensor
    """(B,) bool, True if a limit ended the episode and the environment did not reward its end: a critic then estimates what
    is left of it."""
    failed: torch.Tensor
    """(B,) bool, True if the environment failed; such episodes are masked out of loss and statistics."""
    sampling_logprobs: torch.Tensor
    """(B, T) float32, 0 outside action tokens."""
    anchors: torch.Tensor
    """(B, K) int64, a hash of the environment's name for the state each turn started from; 0 if it has none."""
    environments: torch.Tensor
    """(B,) int64, a hash of the environment's name; 0 in a run of one."""
    following: torch.Tensor
    """(B, K) int64, the next turn on the same path: the first later one that goes on from this turn; K if there is none."""
    rewarded: torch.Tensor
    """(B, K) int64, number of turns whose reward was given before the turn was asked for: its index, but for turns at
    once."""
    linear: torch.Tensor
    """(B,) bool, see :attr:`Trajectory.linear`."""
    demonstrations: torch.Tensor | None = None
    """(B,) bool, see :attr:`Trajectory.demonstration`. None if all are False."""
    path_ids: torch.Tensor | None = None
    """(B, F) int64, right-padded; the tokens of an episode's paths, one path after another. None if every episode is a
    single path, its prompt and completion. What follows is None with it."""
    path_lengths: torch.Tensor | None = None
    """(B, M) int64, number of tokens of each path, 0 after the last."""
    places: torch.Tensor | None = None
    """(B, T) int64, column in ``path_ids`` of each action token, -1 elsewhere."""
    kept_words: torch.Tensor | None = None
    """(B, W) int32, the sets of tokens that were kept when each token was sampled, one after another; see
    :mod:`agile_trainers.objectives.kept_sets`. None if no set was recorded, as is ``kept_sizes``."""
    kept_sizes: torch.Tensor | None = None
    """(B, T) int32, the number of words of each token's set; 0 for the set of all tokens."""
    image_features: torch.Tensor | None = None
    """(B, V, W), the features of each image token, in order; see :class:`Picture`. None without any image, as is
    ``image_places``."""
    image_places: torch.Tensor | None = None
    """(B, V, 5) int64, the index of each among the tokens of its episode (or its column in ``path_ids``) and its offsets;
    -1 after the last."""

    def rows(self, chosen: torch.Tensor) -> TurnBatch:
        """Select rows.

        Args:
            chosen: (R,) int64.
        """
        return self._each(lambda value: value[chosen])

    def to(self, device: torch.device | str) -> TurnBatch:
        """Move the tensors."""
        return self._each(lambda value: value.to(device))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TurnBatch:
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {n: None if value is None else change(value) for n, value in values.items()}
        return TurnBatch(**changed)

    @property
    def action_mask(self) -> torch.Tensor:
        """(B, T) bool, True on the tokens of answers."""
        return self.turn_ids >= 0

    @property
    def left_padded(self) -> torch.Tensor:
        """(B,) bool, episodes whose prompt is padded where the model reads it."""
        return (self.prompt_mask[:, 0] == 0) & (self.path_ids is None)

    @property
    def valid_mask(self) -> torch.Tensor:
        """(B, T) bool, True on the tokens that the policy sampled in episodes that did not fail."""
        mask = self.action_mask & ~self.failed[:, None]
        return mask if self.demonstrations is None else mask & ~self.demonstrations[:, None]
