"""The protocol between the rollout loop and a sampler. Requests enter and leave at any time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agile_trainers.types import Picture

FinishReason = Literal["stop", "length"]


class LogitsError(FloatingPointError, ValueError):
    """A model's logits are not numbers, so that nothing can be sampled."""


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling options of an action, as in transformers' ``GenerationConfig``.

    Raises:
        ValueError: If a value is outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    do_sample: bool = True
    """False samples greedily, from the raw logits after the repetition penalty."""

    @property
    def filters(self) -> list[str]:
        """The settings that remove tokens from what is sampled, each as ``name=value``."""
        idle = {"top_p": (1.0,), "top_k": (0,), "min_p": (None, 0.0), "min_new_tokens": (0,)}
        values = {name: getattr(self, name) for name in idle} if self.do_sample else {}
        return [f"{name}={value}" for name, value in values.items() if value not in idle[name]]

    def __post_init__(self) -> None:
        rules = [
            ("temperature", self.temperature > 0 or not self.do_sample, "above 0 (for greedy, set `do_sample=False`)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1], where 1 switches it off"),
            ("top_k", self.top_k >= 0, "0, which switches it off, or more"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "in [0, 1], or None to switch it off"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0, where 1 switches it off"),
            ("min_new_tokens", self.min_new_tokens >= 0, "0 or more"),
            ("stop_strings", not isinstance(self.stop_strings, str) and all(self.stop_strings), "a tuple of texts"),
        ]
        for name, valid, expected in rules:
            if not valid:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, expected {expected}.")


@dataclass
class GenerationRequest:
    """Request for the next action of one episode."""

    episode: int
    """Key of the episode, under which a generator keeps its state between turns (a KV cache)."""
    token_ids: list[int]
    """The whole conversation so far, as the model reads it. With ``extends`` it begins with the ids of the episode's last
    request and those returned for it, unchanged."""
    max_new_tokens: int
    """At least 1: the per-turn limit or the remaining context, whichever is smaller."""
    uniforms: Callable[[int], list[float]]
    """``uniforms(n)`` draws the episode's next ``n`` uniforms in [0, 1) from its own random stream. A token is sampled
    by inverting the cumulative distribution at one of them, so an episode's tokens do not depend on which other
    episodes share its batch. Requests that are pending at once need a stream each: who draws first depends on the batch."""
    call: int = 0
    """Key of the request among those of its episode that are pending at the same time."""
    extends: bool = True
    """False for ids that need not extend the episode's last request: a rewritten context, or a question on the side."""
    pictures: Sequence[Picture] = ()
    """The images of the conversation, in order."""
    identity: str | None = None
    """Digest by which another process knows the request among all of its episode, which come in any order. None: they come
    one after the other."""


@dataclass
class GenerationOutput:
    """One finished action."""

    episode: int
    token_ids: list[int]
    """At least one id; ends with the end-of-turn token when one was sampled."""
    logprobs: list[float]
    """Log-probability of each id under its sampling distribution (after temperature and filters)."""
    finish_reason: FinishReason
    call: int = 0
    """The request's key among those of its episode."""
    read: int | None = None
    """Number of the request's ids that the model read for it; the others came from a cache. None: not known."""
    kept: list[bytes] | None = None
    """With settings that remove tokens: the set of those that were kept for each id, see
    :mod:`agile_trainers.objectives.kept_sets`. None without such settings, or if the sampler does not record it."""


class Generator(Protocol):
    """A sampler that many episodes share."""

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises ``ValueError`` if the episode has a pending one of the same ``call``."""

    def step(self) -> list[GenerationOutput]:
        """Make progress (at least one token of one request) and return the finished answers. Empty when idle."""

    @property
    def pending(self) -> int:
        """Number of requests submitted and not yet returned."""

    def release(self, episode: int) -> None:
        """Forget an episode that has ended, with its pending requests (frees its KV cache). Unknown ones are ignored."""
