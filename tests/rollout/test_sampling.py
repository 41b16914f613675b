"""Drawing tokens: the exact distribution, and what may never be drawn."""

from __future__ import annotations

import pytest
import torch

from agile_trainers.rollout.generators.base import SamplingSettings
from agile_trainers.rollout.generators.transformers.decoding import Sampler, draw_tokens

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, -3.0, 0.0, 1.0, -0.5])


def sample(
    sampler: Sampler, logits: torch.Tensor, uniforms: torch.Tensor, *given: torch.Tensor, **named: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return sampler.draw(sampler.distribution(logits, *given, **named), uniforms)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (SamplingSettings(), range(8)),
        (SamplingSettings(temperature=0.5), range(8)),
        (SamplingSettings(top_k=3), [0, 3, 6]),
        (SamplingSettings(top_p=0.6), [0, 3]),
        (SamplingSettings(min_p=0.2), [0, 2, 3, 6]),
        (SamplingSettings(temperature=3.0, top_k=6, min_p=0.5), [0, 2, 3, 5, 6]),
    ],
)
def test_frequencies_are_the_filtered_softmax(settings: SamplingSettings, kept: list[int]) -> None:
    count = 100_000
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count  # stratified: frequencies are exact to one draw
    tokens, logprobs = sample(Sampler(settings, []), LOGITS.expand(count, -1), grid)
    weights = torch.zeros(8, dtype=torch.float64)
    weights[list(kept)] = (LOGITS.double()[list(kept)] / settings.temperature).exp()
    expected = weights / weights.sum()
    frequencies = torch.bincount(tokens, minlength=8) / count
    assert (frequencies - expected).abs().max() < 1.5 / count
    assert torch.allclose(logprobs, expected[tokens].log(), atol=1e-6)


def test_impossible_tokens_are_never_drawn() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    largest = torch.nextafter(torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64))
    uniforms = torch.stack([torch.zeros_like(largest), 0.25 - 1e-12 + 0 * largest, 0.25 + 0 * largest, largest])
    assert draw_tokens(probs.expand(4, -1), uniforms).tolist() == [1, 1, 3, 3]


def test_rounding_of_a_long_sum_cannot_leave_the_support() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(64, 50_000, generator=generator, dtype=torch.float64) ** 8
    probs[:, -20_000:] = 0
    probs[:, ::3] = 0
    probs /= probs.sum(-1, keepdim=True)
    for uniform in (0.0, 1 - 2**-53):
        tokens = draw_tokens(probs, torch.full((64,), uniform, dtype=torch.float64))
        assert (probs.gather(1, tokens[:, None]) > 0).all()


def test_a_rough_cumsum_cannot_make_a_token_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parallel cumsum is not monotone to the last bit."""
    ulp = 2.0**-52
    probs = torch.tensor([[0.5, 0.0, 0.5], [0.5, 0.5, 0.0]], dtype=torch.float64)
    rough = torch.tensor([[0.5, 0.5 + ulp, 1.0], [0.5, 1.0, 1.0 + 4 * ulp]], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, dim: rough)
    assert draw_tokens(probs, torch.tensor([0.5, 1 - 2**-53], dtype=torch.float64)).tolist() == [2, 1]


def test_greedy_logprobs_are_those_of_the_penalized_softmax() -> None:
    settings = SamplingSettings(do_sample=False, temperature=0.1, top_k=1, repetition_penalty=2.0)
    history = torch.tensor([[0, 0, 1]])
    penalized = LOGITS.clone()
    penalized[0], penalized[1] = 1.0, -2.0
    tokens, logprobs = sample(Sampler(settings, []), LOGITS[None], torch.zeros(1), history)
    assert tokens.tolist() == [3]
    assert logprobs.item() == pytest.approx(penalized.log_softmax(-1)[3].item(), abs=1e-6)


def test_held_rows_do_not_end() -> None:
    sampler = Sampler(SamplingSettings(do_sample=False), [0, 3])
    tokens, logprobs = sample(sampler, LOGITS.expand(2, -1), torch.zeros(2), hold_eos=torch.tensor([True, False]))
    assert tokens.tolist() == [6, 0]
    others = LOGITS[[1, 2, 4, 5, 6, 7]]
    assert logprobs[0].item() == pytest.approx(others.log_softmax(-1)[4].item(), abs=1e-6)


def test_half_precision_logits_are_processed_in_float32() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5]], dtype=torch.bfloat16)
    sampler = Sampler(SamplingSettings(temperature=0.7), [])
    _, logprobs = sample(sampler, logits, torch.zeros(1, dtype=torch.float64))
    assert logprobs.item() == pytest.approx((logits.double() / 0.7).log_softmax(-1)[0, 0].item(), abs=1e-6)
