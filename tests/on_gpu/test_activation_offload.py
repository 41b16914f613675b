"""Offloading activations moves memory and nothing else. Needs an accelerator; on CPU the option is refused."""

from __future__ import annotations

import pytest
from games import Gradients, make_trainer, relative_error

pytestmark = pytest.mark.gpu


def test_gradients_are_the_same(machine, embedded_model, tmp_path):
    if machine.tiny:
        pytest.skip("offload needs a GPU")
    steps = []
    for offload in (False, True):
        seen = Gradients()
        folder = tmp_path / str(offload)
        make_trainer(embedded_model, folder, use_cpu=False, activation_offload=offload, callbacks=[seen]).train()
        steps.append(seen.steps[0])
    assert relative_error(*steps) < 1e-5
