"""The types that describe an episode, as Python objects and as tensors.

Shape letters used everywhere: ``B`` episodes, ``K`` turns, ``P`` prompt tokens, ``T`` completion tokens. Token
positions are *completion coordinates*: index 0 is the first token after the prompt. Nothing is shifted by one anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line checks names before it takes the seconds of this import
    import torch

Message = dict[str, Any]
"""One chat message, ``{"role": ..., "content": ...}``."""

NO_TURN = -1
"""Value of ``turn_ids`` on every token that is not part of an action."""


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
    ENVIRONMENT_ERROR = "environment_error"
    """The environment raised or broke the protocol; the episode is not trained on."""
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    """The environment did not answer within ``environment_timeout`` seconds; the episode is not trained on."""

    @property
    def truncated(self) -> bool:
        """True if a limit stopped the episode before the environment ended it."""
        return self in (StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.CONTEXT_FULL)

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


@dataclass
class Trajectory:
    """One episode with the sampled token ids, which are never re-encoded from text."""

    prompt_ids: list[int]
    completion_ids: list[int]
    """Every token after the prompt: actions and observations, in order."""
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

    @property
    def rewards(self) -> list[float]:
        """Reward of each turn."""
        return [turn.reward for turn in self.turns]

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of the turn rewards."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def clipped(self) -> bool:
        """True if a limit ended the episode: on turns, context, the environment, or the tokens of the last answer."""
        return self.stop_reason.truncated or any(turn.finish_reason == "length" for turn in self.turns[-1:])

    @property
    def success(self) -> bool | None:
        """``info["success"]`` of the last turn, or None when the environment does not report it."""
        if not self.turns or "success" not in self.turns[-1].info:
            return None
        return bool(self.turns[-1].info["success"])

    @property
    def anchors(self) -> list[str | None]:
        """``info["anchor"]`` of the state each turn started from: of ``reset`` for the first, else of the previous step."""
        infos = [self.reset_info, *(turn.info for turn in self.turns[:-1])][: len(self.turns)]
        return [None if info.get("anchor") is None else str(info["anchor"]) for info in infos]

    @property
    def messages(self) -> list[Message]:
        """The conversation after the prompt: actions as assistant messages, observations between them."""
        messages: list[Message] = []
        for turn in self.turns:
            messages.append({"role": "assistant", "content": turn.text})
            if isinstance(turn.observation, str):
                messages.append({"role": "user", "content": turn.observation})
            elif turn.observation:
                messages.extend(turn.observation)
        return messages


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
    prompt+completion coordinates (column P-1 is the last prompt token). Entry ``n`` of an episode of ``n`` turns is its
    final state (its last token); later entries repeat it and have no meaning."""
    truncated: torch.Tensor
    """(B,) bool, True if a limit ended the episode."""
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

    def rows(self, chosen: torch.Tensor) -> TurnBatch:
        """Select rows.

        Args:
            chosen: (R,) int64.
        """
        return TurnBatch(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    @property
    def action_mask(self) -> torch.Tensor:
        """(B, T) bool, True on the tokens that the policy sampled."""
        return self.turn_ids >= 0

    @property
    def valid_mask(self) -> torch.Tensor:
        """(B, T) bool, True on the sampled tokens of episodes that did not fail."""
        return self.action_mask & ~self.failed[:, None]
