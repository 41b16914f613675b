"""Measures and explains the training-inference mismatch: the difference of the log-probabilities of sampler and trainer.

On-policy the importance ratio is 1 by construction. A trainer whose log-probabilities differ from the sampler's therefore
trains on the wrong gradient with healthy metrics; only the sampler's own log-probabilities show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from agile_trainers.rollout.generators.base import SamplingSettings
from agile_trainers.sampling.delivery import Delivery

EXACT, ROUNDED = 1e-3, 0.1
"""Largest normal mean mismatch, in nats a token: where both compute in fp32 on the same weights, and elsewhere."""


RISE = 1.5
"""Times the usual mismatch from which on a policy is looked for that may play in place of the one that is trained."""


class SamplerMismatchError(RuntimeError):
    """The log-probabilities of trainer and sampler differ, although rounding cannot be the cause."""


@dataclass(frozen=True)
class Mismatch:
    """Absolute difference of log-probabilities over the trained tokens of all ranks, in nats."""

    mean: float
    maximum: float
    tokens: int
    full_rows: float = 0.0
    """Mean over rows without left padding; 0 if there is no such token, here and below."""
    padded_rows: float = 0.0
    """Mean over rows with left padding."""
    first_turns: float = 0.0
    later_turns: float = 0.0


class MismatchMeter:
    """Sums the mismatch of one generation batch on the device.

    ``open`` starts a batch, ``add`` takes its forward passes one by one without waiting for the device, ``read`` ends it.

    Args:
        accelerator: The trainer's; ``read`` gathers over its processes.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._sums: torch.Tensor | None = None
        self._highest: torch.Tensor | None = None
        self.is_open = False
        """True between ``open`` and ``read``."""

    def open(self) -> None:
        """Start a generation batch and drop an unfinished one."""
        self._sums, self._highest, self.is_open = None, None, True

    @torch.no_grad()
    def add(
        self,
        log_probs: torch.Tensor,
        sampled: torch.Tensor,
        mask: torch.Tensor,
        turn_ids: torch.Tensor,
        padded: torch.Tensor,
    ) -> None:
        """Add the tokens of a forward pass.

        Args:
            log_probs: (B, T), of the trainer.
            sampled: (B, T), of the sampler.
            mask: (B, T) bool, the tokens that count. Values elsewhere have no influence, NaN included.
            turn_ids: (B, T) int64.
            padded: (B,) bool, rows whose prompt is padded.
        """
        difference = torch.where(mask, (log_probs.float() - sampled.float()).abs(), 0.0)
        parts = torch.stack([mask, mask & padded[:, None], mask & (turn_ids > 0)])
        sums = torch.cat([torch.where(parts, difference, 0.0).sum((1, 2)), parts.sum((1, 2)).float()])
        highest = difference.max()
        self._sums = sums if self._sums is None else self._sums + sums
        self._highest = highest if self._highest is None else torch.maximum(self._highest, highest)

    def remember(self) -> Callable[[], None]:
        """Return a function that drops the forward passes that are added after this call."""
        before = self._sums, self._highest, self.is_open

        def put_back() -> None:
            self._sums, self._highest, self.is_open = before

        return put_back

    def read(self) -> Mismatch | None:
        """End the batch and return the mismatch over all ranks; None if no token counts.

        Every rank must call it at the same point. It is the only collective and the only wait for the device.
        """
        assert self._sums is not None and self._highest is not None, "No forward pass was added."
        ranks = self._accelerator.gather(torch.cat([self._sums, self._highest[None]])[None]).double().cpu()
        self._sums, self._highest, self.is_open = None, None, False
        (total, padded, later), (tokens, padded_tokens, later_tokens) = ranks[:, :-1].sum(0).view(2, 3).tolist()
        if tokens == 0:
            return None
        return Mismatch(
            mean=total / tokens,
            maximum=ranks[:, -1].max().item(),
            tokens=int(tokens),
            full_rows=(total - padded) / max(tokens - padded_tokens, 1.0),
            padded_rows=padded / max(padded_tokens, 1.0),
            first_turns=(total - later) / max(tokens - later_tokens, 1.0),
            later_turns=later / max(later_tokens, 1.0),
        )


@dataclass(frozen=True)
class Conditions:
    """The settings, dtypes and noise under which sampler and trainer compute."""

    settings: SamplingSettings
    scored_at: float
    """Temperature at which the trainer scores."""
    sampler: torch.dtype
    trainer: torch.dtype
    quantized: bool = False
    tf32: bool = False
    dropout: bool = False
    """True if dropout is active in training."""
    vllm: bool = False
    corrected: bool = False
    """True if tokens are weighed by the trainer's probability over the sampler's."""
    model_type: str = ""

    @property
    def rounded(self) -> list[str]:
        """Causes of a difference by rounding, in words. Empty: the two agree up to the order of fp32 sums."""
        dtypes = {self.sampler, self.trainer}
        return [
            *([f"the sampler computes in {self.sampler}, the trainer in {self.trainer}"] if len(dtypes) > 1 else []),
            *([f"both compute in {self.sampler}"] if len(dtypes) == 1 and not dtypes <= _EXACT_DTYPES else []),
            *(["the base is quantized"] if self.quantized else []),
            *(["matrix products are rounded to TF32"] if self.tf32 else []),
        ]

    @property
    def exact(self) -> bool:
        """True if the two should differ by no more than the order of fp32 sums."""
        return not (self.rounded or self.dropout or self.penalized)

    @property
    def same(self) -> bool:
        """True if the two should differ by rounding at most."""
        return not (self.dropout or self.penalized) and self.settings.temperature == self.scored_at

    @property
    def penalized(self) -> bool:
        """True if the sampler's distribution differs from the policy's, which has the same filters but no penalty."""
        return self.settings.repetition_penalty != 1.0


_EXACT_DTYPES = {torch.float32, torch.float64}


def likely_cause(mismatch: Mismatch, bound: float, conditions: Conditions, first: float) -> str:
    """Name the likeliest cause of a training-inference mismatch.

    Args:
        mismatch: The mismatch of this batch.
        bound: The bound that its mean exceeds.
        conditions: How sampler and trainer compute.
        first: The mean mismatch of the first generation batch.
    """
    known = conditions
    if known.settings.temperature != known.scored_at:
        return f"answers are sampled at temperature {known.settings.temperature} and scored at temperature {known.scored_at}"
    if known.penalized:
        penalty = f"repetition_penalty={known.settings.repetition_penalty}"
        cause = f"{penalty} changes the distribution that is sampled from, and the trainer scores without it"
        return cause if known.corrected else f"{cause}; vllm_importance_sampling_correction=True makes up for {penalty}"
    if known.dropout:
        return "disable_dropout=False: the trainer's forward pass has dropout, the sampler's has none"
    if first <= bound:
        told = f"the first batch agreed (mismatch {first:.2g})"
        if known.vllm:
            return f"{told}, so the engine seems to serve a stale adapter"
        if not known.rounded:
            return f"{told}, so the cause is a longer conversation (rope factors that depend on length) or the update"
    if known.rounded:
        return "; ".join(known.rounded)
    if known.vllm:
        return "the base model in memory is not the one in its folder, which vLLM loaded"
    model = f"the model ({known.model_type})" if known.model_type else "the model"
    if mismatch.full_rows <= bound < mismatch.padded_rows:
        return (
            f"only rows with left padding differ ({mismatch.padded_rows:.2g}, the others {mismatch.full_rows:.2g}): {model} "
            "counts positions over padding unless it is given position_ids"
        )
    if mismatch.first_turns <= bound < mismatch.later_turns:
        return (
            f"only turns after the first differ ({mismatch.later_turns:.2g}, first turns {mismatch.first_turns:.2g}): "
            f"{model} reads keys and values kept between turns differently from a whole conversation (rope factors that "
            "depend on length, local attention taken for full)"
        )
    return (
        f"{model} adds noise in training that is not a dropout module (attention, residual or router noise), or its "
        "decoding step and its forward pass compute different values"
    )


def explain(
    mismatch: Mismatch, bound: float, conditions: Conditions, first: float, played: tuple[str, float] | None = None
) -> str:
    """Write the warning or error for a mismatch that is too large.

    Args:
        mismatch: The mismatch of this batch.
        bound: The bound that its mean exceeds.
        conditions: How sampler and trainer compute.
        first: The mean mismatch of the first generation batch.
        played: What the sampler plays instead of the policy, and the mean mismatch to that.
    """
    if played is not None:
        return (
            f"The sampler plays another policy than the one that is trained: {played[0]}. It differs by {mismatch.mean:.3g} "
            f"nats a token from the trainer, and by {played[1]:.2g} from that. See docs/rollouts.md."
        )
    return (
        f"Sampler and trainer differ by {mismatch.mean:.3g} nats a token (at most {mismatch.maximum:.3g}), more than "
        f"max_logprob_gap={bound}. The likely cause: {likely_cause(mismatch, bound, conditions, first)}. "
        "See docs/rollouts.md."
    )


class MismatchMonitor(MismatchMeter):
    """A meter that explains the mismatch of a generation batch, or raises, when it is too large.

    Args:
        accelerator: The trainer's.
        bound: ``max_logprob_gap``; None for the default that ``conditions`` calls for.
        conditions: Returns how sampler and trainer compute.
        delivery: Finds out what the sampler plays.
    """

    def __init__(
        self, accelerator: Accelerator, bound: float | None, conditions: Callable[[], Conditions], delivery: Delivery
    ) -> None:
        super().__init__(accelerator)
        self._bound, self._conditions, self.delivery = bound, conditions, delivery
        self._first: float | None = None
        self._usual = 0.0
        """The least mean mismatch so far, since the policy that plays was last in question."""

    def close(self, *, is_first_step: bool) -> tuple[dict[str, float], str | None]:
        """End the batch and explain its mismatch, the same on all ranks.

        Args:
            is_first_step: True before the first optimizer step. A resumed run is past its first batch and only warns.

        Returns:
            Metrics under TRL's names, empty without a token that counts; and the likely cause, if the mismatch is too large.

        Raises:
            SamplerMismatchError: If the sampler is found to play another policy. Also in the run's first batch, if the
                mismatch is too large and rounding cannot be the reason.
        """
        mismatch = self.read()
        if mismatch is None:
            self.delivery.close()
            return {}, None
        conditions, is_first = self._conditions(), self._first is None and is_first_step
        bound = self._bound or (EXACT if conditions.exact else ROUNDED)
        first = self._first = mismatch.mean if self._first is None else self._first
        played = self._played(mismatch.mean, bound, conditions)
        large = played is not None or mismatch.mean > bound
        text = explain(mismatch, bound, conditions, first, played) if large else None
        if text is not None and (played is not None or (is_first and conditions.exact)):
            raise SamplerMismatchError(text)
        self.delivery.close()
        name = "sampling/sampling_logp_difference"
        return {f"{name}/mean": mismatch.mean, f"{name}/max": mismatch.maximum}, text

    def _played(self, mean: float, bound: float, conditions: Conditions) -> tuple[str, float] | None:
        """Find out what the sampler plays, if the mismatch is large, or larger than it was."""
        highest = bound if conditions.exact or self._bound else min(bound, EXACT)
        known, played = self._usual > 0, None
        if not conditions.same or mean <= max(highest, RISE * self._usual):
            self._usual = min(mean, self._usual or mean)
        else:
            played = self.delivery.find(exact=conditions.exact, thorough=known or mean > bound)
            self._usual = mean
        return played
