"""Finds the policy that a sampler plays in place of the one that is trained, where the numbers of the two differ.

Some of the sampled tokens are scored under what a move of an adapter can end in: the base, an earlier policy, a part of the
adapter, the layers of its neighbours, another scaling. The sampler's own log-probabilities tell which of them played.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from peft import PeftModel

from agile_trainers.adapters.copies import holding_weights
from agile_trainers.adapters.roles import POLICY, belongs_to, running
from agile_trainers.adapters.sharding import is_sharded

LEFT, NOTHING = 0.01, 1e-4
"""Part of the mean difference that is left under the policy that played, at most, where both sides are exact; or nats."""
LESS, CERTAIN = 0.7, 5.0
"""Elsewhere: the part that is left, at most, and standard errors of the decrease, at least."""
FACTORS = (1 / 16, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 16.0)
"""Scalings from the nearest of which that of the sampler is found, in so many steps at most."""

Weights = Mapping[str, torch.Tensor]
"""Parameters of the policy by name."""
Score = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Returns the log-probabilities of the sampler and, as the model is now, of the trainer, (N,) each, of the same tokens."""


class Delivery:
    """Keeps what the sampler was given before, and finds out what it plays instead of the policy.

    Models that are trained whole are not checked, and neither are sharded ones.

    Args:
        accelerator: The trainer's.
        model: Returns the policy, unwrapped.
    """

    def __init__(self, accelerator: Accelerator, model: Callable[[], torch.nn.Module]) -> None:
        self._accelerator, self._model = accelerator, model
        self._first: Weights | None = None
        self._last: Weights | None = None
        self._score: Score | None = None

    def open(self, score: Score, playing: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Start a generation batch that the sampler has played.

        Args:
            score: Scores some of its tokens.
            playing: Lets the model compute, in a block, with the policy that should have played.
        """
        self._score, self._playing = score, playing

    @property
    def _checked(self) -> PeftModel | None:
        model = self._model()
        if not isinstance(model, PeftModel) or any(map(is_sharded, model.parameters())):
            return None
        return model

    def close(self) -> None:
        """End the batch, if one is open, and remember its policy."""
        if self._score is not None and (model := self._checked) is not None:
            with self._playing():
                self._last = _copied(_policy(model))
            self._first = self._first or self._last
        self._score = None

    def find(self, *, exact: bool, thorough: bool) -> tuple[str, float] | None:
        """Find out what the sampler plays, the same on all ranks, which call it together.

        A policy is named if it explains the numbers of the rank that is farthest away.

        Args:
            exact: True if the two sides differ by no more than the order of fp32 sums.
            thorough: Try parts of the adapter too: some forward passes for each layer.

        Returns:
            It in words, and the mean difference in nats that is left under it; None if it is none of those that were tried,
            or no batch is open.
        """
        if self._score is None or (model := self._checked) is None:
            return None
        with torch.no_grad(), self._playing():
            trial = _Trial(self._accelerator, model, self._score)
            shown = [one for one in map(trial.judge, self._moves()) if one.shows(exact)]
            if (thorough or shown) and not (exact and shown):
                shown += [one for one in map(trial.judge, _parts(trial)) if one.shows(exact)]
        if not shown:
            return None
        best = min(shown, key=lambda one: one.near)
        # At a second batch the base and the policy of the first one may be the same.
        texts = [one.text for one in shown if one.near <= 1.5 * best.near]
        return " or ".join(texts), best.near

    def _moves(self) -> Iterator[tuple[str, Weights | None]]:
        yield "the base model without the adapter (the policy has not arrived)", None
        if self._last is not None:
            yield "the policy of the batch before (the last move arrived late, or not at all)", self._last
        if self._first is not None and self._first is not self._last:
            yield "the policy of this run's first batch (no move since then has arrived)", self._first


def _copied(weights: Weights) -> Weights:
    """Copy weights to the CPU. Nobody waits for the device: the copies are read after the next batch."""
    by_type: dict[torch.dtype, list[str]] = defaultdict(list)
    for name, weight in weights.items():
        by_type[weight.dtype].append(name)
    copies: dict[str, torch.Tensor] = {}
    for dtype, names in by_type.items():
        sizes, pinned = [weights[name].numel() for name in names], any(weights[name].is_cuda for name in names)
        # One allocation: pinned memory for hundreds of small tensors would take a tenth of a training step.
        parts = torch.empty(sum(sizes), dtype=dtype, pin_memory=pinned).split(sizes)
        for name, part in zip(names, parts):
            copies[name] = part.view_as(weights[name]).copy_(weights[name], non_blocking=True)
    return copies


class _Judged:
    """A policy, and how near it is to the sampler, on the rank whose policy is farthest away."""

    def __init__(self, text: str, sums: torch.Tensor) -> None:
        count = max(sums[0].item(), 1.0)
        self.text, (_, self.far, self.near, squares) = text, (sums / count).tolist()
        self._decrease = self.far - self.near
        self._error = (max(squares - self._decrease**2, 0.0) / count) ** 0.5

    def shows(self, exact: bool) -> bool:
        """Return True if the policy is the one that plays."""
        if exact:
            return self.near <= min(max(LEFT * self.far, NOTHING), self.far / 10)
        # A few tokens that are far off have large standard errors.
        return self.near <= LESS * self.far and self._decrease > CERTAIN * self._error


class _Trial:
    """Some sampled tokens, which are scored under other policies."""

    def __init__(self, accelerator: Accelerator, model: PeftModel, score: Score) -> None:
        self._gather, self._model, self._score = accelerator.gather, model, score
        self.weights = _policy(model)
        self.sampled, self.ours = (side.double() for side in score())
        squares = (self.sampled - self.ours).square()
        ranks = accelerator.gather(torch.stack([squares.sum(), squares.new_tensor(len(squares))])[None])
        self._farthest = int((ranks[:, 0] / ranks[:, 1].clamp(min=1)).argmax())

    def under(self, weights: Weights | None) -> torch.Tensor:
        """Compute log-probabilities (N,) under other weights; under the base model if they are None."""
        model = self._model
        with running(model, None) if weights is None else holding_weights(model, weights):
            return self._score()[1].double()

    def of_farthest(self, sums: torch.Tensor) -> torch.Tensor:
        """Return, on every rank, the tensor of the rank whose policy is farthest away; on the CPU."""
        gathered: torch.Tensor = self._gather(sums[None])
        return gathered[self._farthest].cpu()

    def scaled(self, factor: float, names: Iterable[str] | None = None) -> Weights:
        """Return the policy with what the adapter adds times a factor, in all layers or in those of these weights."""
        chosen = self.added if names is None else set(names)
        return {name: weight * factor if name in chosen else weight for name, weight in self.weights.items()}

    @property
    def added(self) -> list[str]:
        """Names of the weights that are factors of what each layer's adapter adds."""
        return [name for name in self.weights if ".lora_B." in name or ".lora_embedding_B." in name]

    def judge(self, policy: tuple[str, Weights | None]) -> _Judged:
        text, weights = policy
        far, near = ((self.sampled - side).abs() for side in (self.ours, self.under(weights)))
        parts = [torch.ones_like(far), far, near, (far - near) ** 2]
        return _Judged(text, self.of_farthest(torch.stack([part.sum() for part in parts])))


def _policy(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.data for name, weight in model.named_parameters() if belongs_to(name, POLICY)}


def _parts(trial: _Trial) -> Iterator[tuple[str, Weights]]:
    """Give the policies that an adapter can become on its way, in the order of how simple they are."""
    factor = _scaling(trial)
    if factor is not None:
        yield f"the adapter with {factor:.3g} times its scaling", trial.scaled(factor)
    kinds, layers = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for name in trial.added:
        kinds[re.split(r"\.lora_(?:embedding_)?B\.", name)[0].rpartition(".")[2]].append(name)
        if found := re.search(r"\.(\d+)\.", name):
            layers[found[1]].append(name)
    for what, groups in (("modules", kinds), ("layers", layers)):
        missing = _missing(trial, list(groups.values()))
        if missing:
            names = [name for one, group in zip(missing, groups.values()) if one for name in group]
            listed = ", ".join(group for one, group in zip(missing, groups) if one)
            yield f"the adapter without its {what} {listed} (a part has not arrived)", trial.scaled(0.0, names)
    for by, side in ((1, "above"), (-1, "below")) if len(layers) > 1 else ():
        text = f"the adapter on other layers than it was trained on, each on the one {side}"
        yield text, _moved(trial, by)


def _scaling(trial: _Trial) -> float | None:
    """Find the factor of the scaling that is nearest to the sampler, by least squares along secants; None without any."""
    tried = [trial.ours if factor == 1 else trial.under(trial.scaled(factor)) for factor in FACTORS]
    squares = trial.of_farthest(torch.stack([(trial.sampled - one).square().sum() for one in tried]))
    at = max(int(squares.argmin()), 1)
    factor, theirs = FACTORS[at], tried[at]
    slope = (theirs - tried[at - 1]) / (factor - FACTORS[at - 1])
    for _ in FACTORS:
        over, under = trial.of_farthest(torch.stack([(trial.sampled - theirs) @ slope, slope @ slope])).tolist()
        if not under:
            return None
        other = min(max(factor + over / under, factor / 4), factor * 4)
        if abs(other - factor) < 0.01 * factor:
            break
        moved = trial.under(trial.scaled(other))
        slope, factor, theirs = (moved - theirs) / (other - factor), other, moved
    return factor if FACTORS[0] / 2 < factor < FACTORS[-1] * 2 else None


def _missing(trial: _Trial, groups: list[list[str]]) -> list[bool]:
    """Return which groups of weights the sampler is without, by least squares; empty unless they are some and not all."""
    if len(groups) < 2:
        return []
    columns = torch.stack([trial.under(trial.scaled(0.0, names)) - trial.ours for names in groups], dim=1)
    both = torch.cat([columns, (trial.sampled - trial.ours)[:, None]], dim=1)
    products = trial.of_farthest(columns.T @ both)
    shares = torch.linalg.lstsq(products[:, :-1], products[:, -1:], driver="gelsd").solution[:, 0]
    missing = [share > 0.5 for share in shares.tolist()]
    return missing if any(missing) and not all(missing) else []


def _moved(trial: _Trial, by: int) -> Weights:
    """Return the policy with each layer's adapter so many layers above; where none comes from, there is none."""
    moved, added = dict[str, torch.Tensor](), set(trial.added)
    for name, weight in trial.weights.items():
        source = re.sub(r"\.(\d+)\.", lambda found: f".{int(found[1]) - by}.", name, count=1)
        found = trial.weights.get(source)
        if found is not None and found.shape == weight.shape:
            moved[name] = found
        else:
            moved[name] = torch.zeros_like(weight) if name in added else weight
    return moved
