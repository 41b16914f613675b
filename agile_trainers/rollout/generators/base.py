"""The protocol between the rollout loop and a sampler, and checks of what enters. Requests enter and leave at any time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

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


Pending = TypeVar("Pending")


class Conversations(Generic[Pending]):
    """The pending requests, and the last request of every episode with its answer, against which the next one is checked."""

    def __init__(self) -> None:
        self.pending: dict[tuple[int, int], Pending] = {}
        """(Episode, call) of each pending request to what its generator keeps of it."""
        self._last: dict[int, tuple[GenerationRequest, list[int]]] = {}

    def check(self, request: GenerationRequest) -> None:
        """Reject a malformed request.

        Raises:
            ValueError: If a request of the same episode and ``call`` is pending, the prompt is empty, ``max_new_tokens`` is
                below 1, or the conversation does not begin with the known ids and has ``extends``.
        """
        episode, ids = request.episode, request.token_ids
        if (episode, request.call) in self.pending:
            raise ValueError(
                f"Episode {episode} already has a pending request with call={request.call}. Wait for its answer, give this "
                "one another `call`, or `release` the episode."
            )
        if not ids:
            raise ValueError(f"Episode {episode}: `token_ids` is empty; a model needs at least one token to read.")
        if request.max_new_tokens < 1:
            raise ValueError(
                f"Episode {episode}: `max_new_tokens` is {request.max_new_tokens}, expected at least 1. "
                "End the episode when the context is full."
            )
        _, known = self._last.get(episode, (None, []))
        if not request.extends or list(ids[: len(known)]) == list(known):
            return
        position = next((i for i, (old, new) in enumerate(zip(known, ids)) if old != new), len(ids))
        found = f"id {ids[position]}" if position < len(ids) else "the end"
        raise ValueError(
            f"Episode {episode}: `token_ids` has {found} at position {position} where id {known[position]} was read or "
            "sampled before. Append the new ids to the old ones instead of encoding text again, set `extends=False` if the "
            "context is rewritten on purpose, or `release` the episode to start it again."
        )

    def submitted(self, request: GenerationRequest, kept: Pending) -> None:
        """Note a request that was accepted, and what is kept of it while it is pending."""
        self._last[request.episode] = request, list(request.token_ids)
        self.pending[request.episode, request.call] = kept

    def answered(self, request: GenerationRequest, token_ids: list[int]) -> Pending:
        """Note the answer to a request, and return what was kept of it."""
        last, known = self._last[request.episode]
        if last is request:  # else the episode has submitted another one since
            known += token_ids
        return self.pending.pop((request.episode, request.call))

    def release(self, episode: int) -> list[Pending]:
        """Forget an episode, and return what was kept of its pending requests."""
        self._last.pop(episode, None)
        return [self.pending.pop(key) for key in [key for key in self.pending if key[0] == episode]]


def check_room(request: GenerationRequest, max_model_length: int) -> None:
    """Raise ``ValueError`` if the answer might not fit into an engine's ``max_model_length``."""
    if len(request.token_ids) + request.max_new_tokens > max_model_length:
        raise ValueError(
            f"Episode {request.episode}: {len(request.token_ids)} tokens and {request.max_new_tokens} new ones exceed "
            f"the engine's max_model_length={max_model_length}."
        )


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise ``ValueError`` unless every one of ``ids``, called ``name`` in the message, lies in [0, vocab_size)."""
    outside = [i for i in ids if i not in range(vocab_size)]
    if outside:
        raise ValueError(
            f"`{name}` has {outside[0]}, expected ids in [0, {vocab_size}). Check that the tokenizer belongs to the model."
        )


PREFILL_TOKENS = 8192
"""Tokens that a vLLM engine on a GPU reads in one step, at most; longer prompts are read in chunks."""
ENGINE_BYTES = 2 * 2**30
"""Bytes that a vLLM engine takes beside weights and cache: activations of ``PREFILL_TOKENS``, logits, its kernels."""
BLOCK = 16
"""Tokens of a block of vLLM's cache on a GPU."""


def tokens_of_a_step(max_batch_size: int, max_model_length: int | None, *, chunks: bool) -> int:
    """Return vLLM's ``max_num_batched_tokens``: its profile run at the start takes the activations of so many tokens.

    Args:
        max_batch_size: Requests decoded at the same time, each of which has a token in a step.
        max_model_length: Tokens of a conversation. None: the model's limit.
        chunks: True if a prompt may be read in several steps.
    """
    if not chunks:
        return max(4096, max_batch_size, max_model_length or 0)
    most = PREFILL_TOKENS if max_model_length is None else min(PREFILL_TOKENS, max_batch_size * max_model_length)
    return max(max_batch_size, most)


def fitting_context(most: int, *, memory: int, weights: int, per_token: int) -> int:
    """Return the tokens of the longest conversation that a vLLM engine on a GPU can start with.

    Its cache must hold one such conversation beside the weights and ``ENGINE_BYTES``.

    Args:
        most: Tokens that the model can read.
        memory: Bytes of the engine's share of the GPU.
        weights: Bytes of the model on this GPU.
        per_token: Bytes of a token's keys and values on this GPU.

    Raises:
        ValueError: If the weights leave no room for a conversation.
    """
    room = memory - weights - ENGINE_BYTES
    tokens = room // per_token // BLOCK * BLOCK
    if tokens < BLOCK:
        raise ValueError(
            f"vLLM gets {memory / 2**30:.1f} GiB of the GPU, of which weights take {weights / 2**30:.1f} GiB and its "
            f"activations {ENGINE_BYTES / 2**30:.0f} GiB: no conversation fits. Raise vllm_gpu_memory_utilization, or set "
            "vllm_tensor_parallel_size."
        )
    return min(most, tokens)
