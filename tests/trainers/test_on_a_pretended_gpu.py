"""Generation, scoring and updates on a pretended GPU: no tensor of the CPU among those of the GPU, and few waits.

A limit on waits is the number counted when it was written, and five more; lower it with the number.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from games import Gradients, make_trainer
from ppo_games import make_ppo
from pretended_gpu import GPU, PretendedGPU, on_gpu
from transformers import AutoModelForCausalLM

from agile_trainers.objectives.kept_sets import without
from agile_trainers.packing import attention
from agile_trainers.rollout.environment_probe import planned_tokens
from agile_trainers.rollout.generators import GenerationRequest, SamplingSettings, TransformersGenerator
from agile_trainers.rollout.generators.transformers.kv_cache import bytes_per_row
from agile_trainers.types import Trajectory


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def dense_flex(q: Any, k: Any, v: Any, block_mask: Any, scale: float, enable_gqa: bool, **_: Any) -> torch.Tensor:
    """FlexAttention's function, with its mask asked for every pair."""
    places = torch.arange(q.size(2), device=q.device)
    seen = block_mask.mask_mod(None, None, places[:, None], places[None])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGPU]:
    """The GPU, without Triton, which compiles for none that is not there: TRL has its head in torch too, we the mask."""
    monkeypatch.setattr("trl.kernels.chunked_logprob._TRITON_AVAILABLE", False)
    monkeypatch.setattr(attention, "flex_attention", dense_flex)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    caches = [one for one in vars(attention).values() if hasattr(one, "cache_clear")]
    with PretendedGPU() as made:
        yield made
    AcceleratorState._reset_state(reset_partial_state=True)  # its device is none of the next test's
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(
    ("filters", "waits"),
    [({}, 1), ({"top_p": 0.9, "top_k": 50, "min_new_tokens": 10}, 6), ({"top_p": 0.9}, 8)],
    ids=["no filter", "few tokens kept", "many"],
)
def test_waits_of_a_token_do_not_depend_on_the_rows(gpu, embedded_model, filters, waits):
    """One, which reads the sampled tokens of all rows, of which there are more; with filters those of their kept sets."""
    model = AutoModelForCausalLM.from_pretrained(embedded_model).to("cuda").eval()
    settings = SamplingSettings(repetition_penalty=1.1, **filters)
    generator = TransformersGenerator(model, eos_token_ids=[1], pad_token_id=0, settings=settings)
    for episode in range(12):
        chance = random.Random(episode)
        uniforms = lambda count, chance=chance: [chance.random() for _ in range(count)]  # noqa: E731
        generator.submit(GenerationRequest(episode, list(range(300, 305 + episode)), 10, uniforms))
    generator.step()
    assert all(on_gpu(weight) for weight in model.parameters())
    gpu.waits.clear()
    for _ in range(8):
        generator.step()
    assert sum(gpu.waits.values()) <= 8 * waits, gpu.waits
    while generator.pending:
        generator.step()


def test_a_fork_copies_and_crops_what_is_on_the_gpu(gpu, embedded_model):
    model = AutoModelForCausalLM.from_pretrained(embedded_model).to("cuda").eval()
    generator = TransformersGenerator(
        model, eos_token_ids=[], pad_token_id=0, settings=SamplingSettings(do_sample=False)
    )
    prompt = list(range(300, 330))
    requests = [
        GenerationRequest(0, prompt, 4, list),
        GenerationRequest(0, [*prompt[:25], 400, 401], 4, list, extends=False),  # cropped
        GenerationRequest(0, [*prompt[:9], 402], 4, list, call=1, extends=False),  # copied from one that is decoded
        GenerationRequest(1, [*prompt[:9], 402], 4, list),
    ]
    outputs = []
    for request in requests:
        generator.submit(request)
        outputs += generator.step()
        if request is requests[0]:
            outputs += [output for _ in range(3) for output in generator.step()]
    while generator.pending:
        outputs += generator.step()
    read = {(output.episode, output.call): output.read for output in outputs}
    answers = {(output.episode, output.call): output.token_ids for output in outputs}
    assert read == {(0, 0): 2, (0, 1): 1, (1, 0): 10} and outputs[0].read == 30
    assert answers[0, 1] == answers[1, 0]
    assert all(on_gpu(layer.keys) for kept in generator._with_cache() for layer in kept.kv.layers)


MAKERS = {"grpo": make_trainer, "ppo": make_ppo}
STEPS: dict[str, tuple[str, dict[str, Any], int]] = {
    "padded": ("grpo", {"sequence_packing": "none"}, 88),
    "packed, checkpoints": ("grpo", {"sequence_packing": "prefix", "gradient_checkpointing": True}, 98),
    "scored": ("grpo", {"sequence_packing": "none", "beta": 0.1, "num_iterations": 2}, 102),
    "truncated": ("grpo", {"sequence_packing": "none", "top_p": 0.9, "max_logprob_gap": 1.0}, 106),
    "in passes": ("grpo", {"sequence_packing": "none", "max_tokens_per_micro_batch": 150}, 130),
    "taught": ("grpo", {"sequence_packing": "none", "teacher": "policy", "teacher_hint": "hint"}, 98),
    "taught, packed": (
        "grpo",
        {
            "sequence_packing": "prefix",
            "teacher": "policy",
            "teacher_hint": "hint",
            "teacher_gradient": "distribution_reverse",
        },
        108,
    ),
    "ppo": ("ppo", {"sequence_packing": "none"}, 106),
    "ppo, packed": ("ppo", {"sequence_packing": "prefix"}, 124),
    "critic_layers": ("ppo", {"sequence_packing": "none", "critic_layers": 1}, 98),
    "critic_layers, packed": ("ppo", {"sequence_packing": "prefix", "critic_layers": 1}, 114),
}
"""Algorithm, options, and the limit on waits of an update."""


@pytest.fixture(scope="module")
def episodes(embedded_model, tmp_path_factory) -> list[Trajectory]:
    return make_trainer(embedded_model, tmp_path_factory.mktemp("played")).rollout()


@pytest.mark.parametrize("name", STEPS)
def test_an_update(gpu, embedded_model, tmp_path, episodes, name):
    algorithm, options, limit = STEPS[name]
    trainer = MAKERS[algorithm](embedded_model, tmp_path / "gpu", use_cpu=False, max_steps=3, **options)
    assert trainer.args.device == trainer.accelerator.device == GPU
    if "top_p" in options:
        said = {token for episode in episodes for token in episode.completion_ids}
        removed = without([next(token for token in range(5, 400) if token not in said)])
        episodes = [replace(one, kept=[removed] * len(one.completion_ids)) for one in episodes]
    if "teacher" in options:
        episodes = [replace(one, reset_info={"hint": "say " * n} if n else {}) for n, one in enumerate(episodes)]
    trainer.update(episodes)  # compares packed with padded rows, and measures what the health checks start from
    gpu.waits.clear()
    trainer.update(episodes)
    waits = Counter(gpu.waits)
    assert all(on_gpu(weight) for weight in trainer.model.parameters())
    assert sum(waits.values()) <= limit, waits.most_common()


def test_a_run_with_demonstrations(gpu, embedded_model, tmp_path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, use_cpu=False, max_steps=2, demonstrations="experts:hums")
    trainer.train()
    assert all(on_gpu(weight) for weight in trainer.model.parameters())
    assert "demonstrations/log_prob" in trainer.state.log_history[0]


class Stream:
    """A stream that does at once what it is given, and an event of it."""

    def record_event(self) -> Stream:
        return self

    def wait_stream(self, stream: Stream) -> None: ...

    def synchronize(self) -> None: ...

    wait_event = wait_stream


def test_offloaded_activations_give_the_same_gradients(gpu, embedded_model, tmp_path, episodes, monkeypatch):
    """TRL's hooks move what the backward pass needs to the CPU and back."""
    for name in ("Stream", "current_stream", "default_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    steps, moved = [], Counter[bool]()
    for offload in (False, True):
        seen = Gradients()
        options = {"use_cpu": False, "max_steps": 1, "gradient_checkpointing": False, "sequence_packing": "none"}
        trainer = make_trainer(
            embedded_model, tmp_path / str(offload), activation_offload=offload, callbacks=[seen], **options
        )
        backward = trainer.accelerator.backward

        def watched(loss: torch.Tensor, backward=backward, trainer=trainer, **given: Any) -> None:
            for kept, is_moved, *_ in trainer.offloading.tracker.values() if trainer.args.activation_offload else ():
                moved[is_moved] += 1
                assert on_gpu(kept) is not is_moved
            backward(loss, **given)

        monkeypatch.setattr(trainer.accelerator, "backward", watched)
        trainer.update(episodes)
        steps.append(seen.steps[0])
    assert moved[True] > 20
    assert steps[0].keys() == steps[1].keys()
    assert all(torch.equal(steps[0][name], steps[1][name]) for name in steps[0])


def test_a_rollout_decodes_as_many_episodes_as_fit_into_free_memory(gpu, embedded_model, tmp_path, monkeypatch):
    """Free is what gradients and optimizer will leave: three values of 4 bytes for each trained weight."""
    options = {"use_cpu": False, "optim": "adamw_torch", "max_steps": 2}
    trainer = make_trainer(embedded_model, tmp_path / "bounded", **options)
    said = [{"role": "user", "content": trainer.setup.first_states[None][0]}]
    prompt = trainer.processing_class.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    tokens = 4 * (len(prompt) + 5)  # turns, each with an observation like the first and an answer
    assert planned_tokens(trainer.engine, trainer.setup.first_states) == tokens
    shorter = make_trainer(embedded_model, tmp_path / "shorter", max_model_length=40, **options)
    assert planned_tokens(shorter.engine, shorter.setup.first_states) == 40
    each = bytes_per_row(trainer.model.config, tokens, 5, torch.float32)
    to_come = 3 * 4 * sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    forward, rows = TransformersGenerator._forward, []
    monkeypatch.setattr(
        TransformersGenerator, "_forward", lambda self, b: (rows.append(len(b.rows)), forward(self, b))[1]
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (to_come + int(2.9 * each / 0.8), 80 * 2**30))
    played = trainer.rollout()
    assert trainer.sampler.rows == max(rows) == 2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * to_come, 80 * 2**30))
    trainer.rollout()
    assert trainer.sampler.rows == 2  # decided once
    expected = make_trainer(embedded_model, tmp_path / "set", generation_chunk_size=2, **options).rollout()
    assert [(one.completion_ids, one.sampling_logprobs) for one in played] == [
        (one.completion_ids, one.sampling_logprobs) for one in expected
    ]
