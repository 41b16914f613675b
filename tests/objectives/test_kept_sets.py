"""Kept sets: what they are as bytes, as tensors, and as masks; and a softmax over them."""

from __future__ import annotations

import pytest
import torch

from agile_trainers.objectives.kept_sets import KeptSets, encode_sets, pad_sets, truncated_log_probs, without


def mask_of(sets: list[bytes], vocab: int) -> torch.Tensor:
    return KeptSets.of(*pad_sets([sets], len(sets))).mask(vocab)


@pytest.mark.parametrize("vocab", [5, 32, 33, 1000])
def test_every_form_is_read_back(vocab: int) -> None:
    """Few ids, few that are missing, about half, one, all but one, and all; then in any order and in several rows."""
    generator = torch.Generator().manual_seed(vocab)
    shares = torch.tensor([0.001, 0.01, 0.3, 0.5, 0.7, 0.99, 0.999, 1.0]).repeat(3)
    kept = torch.rand(len(shares), vocab, generator=generator) < shares[:, None]
    kept[0], kept[1] = torch.arange(vocab) == vocab - 1, torch.arange(vocab) != 0
    sets = encode_sets(kept)
    assert torch.equal(mask_of(sets, vocab), kept)
    assert [one == b"" for one in sets] == kept.all(dim=1).tolist()
    words, sizes = pad_sets([sets[:5], [], [b"", *sets[5:7]]], 7)
    batch = KeptSets.of(words, sizes)
    expected = torch.ones(3, 7, vocab, dtype=torch.bool)
    expected[0, :5], expected[2, 1:3] = kept[:5], kept[5:7]
    assert torch.equal(batch.mask(vocab).view(3, 7, vocab), expected)
    places = torch.tensor([16, 2, 8])
    assert torch.equal(batch.at(places).mask(vocab), expected.view(21, vocab)[places])


def test_the_bytes_of_a_set_are_bounded() -> None:
    """A word of form, and the fewest of: ids, missing ids, a bit for each token. All tokens cost nothing."""
    vocab = 150_000
    kept = torch.zeros(5, vocab, dtype=torch.bool)
    kept[0, torch.randperm(vocab)[:50]] = True
    kept[1] = True
    kept[1, [3, 5]] = False
    kept[2, : vocab // 2] = True
    kept[3] = True
    kept[4, :4687] = True
    words = -(-vocab // 32)
    assert [len(one) for one in encode_sets(kept)] == [4 * 51, 4 * 3, 4 * (words + 1), 0, 4 * 4688]
    assert pad_sets([[b"", b""]], 2)[0].numel() == 0 and pad_sets([[]], 2)[1].tolist() == [[0, 0]]
    assert encode_sets((torch.arange(100) != 7)[None]) == [without([7])]


def test_log_probs_by_hand() -> None:
    """Of 1, 2, 3, 4 tenths, the second and fourth are kept: 1/3 and 2/3. The gradient is that of these alone."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64).log().requires_grad_()
    kept = torch.tensor([[False, True, False, True]])
    log_probs, entropies = truncated_log_probs(logits, torch.tensor([3]), kept)
    third = torch.tensor(1 / 3, dtype=torch.float64)
    assert log_probs.item() == pytest.approx((2 * third).log().item())
    assert entropies.item() == pytest.approx(-(third * third.log() + 2 * third * (2 * third).log()).item())
    (gradient,) = torch.autograd.grad(log_probs.sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -1 / 3, 0.0, 1 / 3]], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(entropies.sum(), logits)
    expected = third * (2 * third) * torch.tensor(2.0).double().log()  # p_1 p_2 log(p_2 / p_1) towards the first
    torch.testing.assert_close(gradient, torch.stack([0 * third, expected, 0 * third, -expected])[None])
