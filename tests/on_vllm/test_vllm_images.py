"""Episodes with images on vLLM, beside the transformers generator; their training, and what is refused."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch
from games import make_trainer
from serving import serving

from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine
from agile_trainers.rollout.generators.base import GenerationRequest, Generator, SamplingSettings
from agile_trainers.rollout.generators.images import SERVED, ImageReader, prepare_for_images, vllm_options
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.generators.transformers.generator import TransformersGenerator
from agile_trainers.rollout.generators.vllm.engine import (
    VllmEngine,
    VllmGenerator,
    features_of,
    logit_bias,
    prompt_of,
    sampling_fields,
)
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.types import Picture, Trajectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from image_models import Gallery, make_image_model, noise

WIDTH = 128  # four heads of 32 dimensions, which vLLM asks for on CPU
GREEDY = SamplingSettings(do_sample=False, stop_strings=("a", "e", "o"))


def made(name: str, folder: Path) -> tuple[Any, Any]:
    """A model and its processor, saved to a folder."""
    # vLLM's image models import processors of transformers that import torchvision; PyPI's builds need a torch for CUDA.
    pytest.importorskip("torchvision", reason="vLLM needs a torchvision that fits its torch.", exc_type=Exception)
    if name == "smolvlm":
        pytest.importorskip("num2words")
    model, processor = make_image_model(name, width=WIDTH)
    for saved in (model, processor):
        saved.save_pretrained(folder)
    return model.eval(), processor


def engine_of(folder: Path, name: str) -> VllmEngine:
    return VllmEngine(str(folder), dtype=torch.float32, max_model_length=512, max_batch_size=16, **vllm_options(name))


class Seen:
    """A generator that notes the pictures and ids of its requests."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.pictures: dict[int, Picture] = {}

    def submit(self, request: Any) -> None:
        self.pictures |= {picture.key: picture for picture in request.pictures}
        self.generator.submit(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)


def play(playing: RolloutEngine, generator: Generator, seeds: range) -> list[Trajectory]:
    return playing.run([EpisodeSpec(seed, (seed, 0)) for seed in seeds], generator)


@contextlib.contextmanager
def both(name: str, folder: Path, environment: Any, **options: Any) -> Iterator[tuple[Any, Any, Any]]:
    """A model's conversations, and a generator of each kind."""
    model, processor = made(name, folder)
    reader = prepare_for_images(model)
    options = {"max_turns": 3, "max_new_tokens": 5, **options}
    playing = build_engine(
        EpisodeOptions(**options), EnvironmentPool(environment), processor, model_config=model.config
    )
    common: dict[str, Any] = {
        "eos_token_ids": playing.chat.eos_token_ids, "settings": GREEDY, "tokenizer": processor.tokenizer
    }  # fmt: skip
    engine = engine_of(folder, name)
    try:
        yield (
            playing, VllmGenerator(engine, reader=reader, **common),
            TransformersGenerator(model, pad_token_id=processor.tokenizer.pad_token_id, **common),
        )  # fmt: skip
    finally:
        engine.close()


def agree(ours: list[Trajectory], theirs: list[Trajectory]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        assert our.error is None
        assert our.prompt_ids == their.prompt_ids
        assert our.completion_ids == their.completion_ids
        assert our.sampling_logprobs == pytest.approx(their.sampling_logprobs, abs=1e-4)


@pytest.mark.parametrize("name", SERVED)
def test_greedy_episodes_are_those_of_the_transformers_generator(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three turns with images of different sizes. Each is encoded once, by the trainer's model, for sampler and trainer."""
    encoded, encode = [], ImageReader._encode
    monkeypatch.setattr(ImageReader, "_encode", lambda self, picture: encoded.append(picture) or encode(self, picture))
    with both(name, tmp_path, Gallery) as (playing, on_vllm, on_transformers):
        seen = Seen(on_vllm)
        ours = play(playing, seen, range(6))
        assert len(encoded) == len(seen.pictures) > 12
        agree(ours, play(playing, on_transformers, range(6)))
        assert len(encoded) == len(seen.pictures)
        assert all(len(episode.turns) == 3 for episode in ours)


class Twins(Gallery):
    """Shows images of one size with the same text, so that the ids of all episodes are the same."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed)
        self.shown = 100 * (seed or 0)
        return [self._message(["look", self._image()])], {}

    def _image(self) -> Any:
        self.shown += 1
        return noise(self.shown, (24, 24))


@pytest.mark.parametrize("history", [None, "images:1"])
def test_images_of_one_size_are_told_apart(tmp_path: Path, history: str | None) -> None:
    """The prefix cache must not answer with the keys and values of another image, nor the encoder's cache with it."""
    with both("idefics3", tmp_path, Twins, history=history) as (playing, on_vllm, on_transformers):
        ours = play(playing, on_vllm, range(4))
        assert len({tuple(episode.prompt_ids) for episode in ours}) == 1
        assert len({round(episode.sampling_logprobs[0], 3) for episode in ours}) == 4
        agree(ours, play(playing, on_transformers, range(4)))


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("lora", [{}, False], ids=["lora", "whole"])
def test_a_training_of_three_steps(tmp_path: Path, name: str, lora: Any) -> None:
    made(name, tmp_path / "model")
    trainer = make_trainer(
        tmp_path / "model", tmp_path, environment=Gallery, use_vllm=True, stop_strings=None, max_steps=3, lora=lora,
        learning_rate=1e-2, vllm_importance_sampling_correction=True,
    )  # fmt: skip
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in steps) < 1e-3
    assert all(entry["turns/mean"] > 1 and entry["grad_norm"] > 0 for entry in steps)
    trainer.close()


# ------------------------------------------------------------------------------------------------------------ servers


def training(folder: Path, url: str, **changes: Any) -> Any:
    return make_trainer(
        folder / "model", folder, environment=Gallery, use_vllm=True, vllm_mode="server", vllm_server_base_url=url,
        stop_strings=None, max_steps=3, learning_rate=1e-2, vllm_importance_sampling_correction=True, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["idefics3", "qwen2_5_vl"])
def test_a_server_samples_from_the_same_features(tmp_path: Path, name: str) -> None:
    made(name, tmp_path / "model")
    with serving(tmp_path / "model", 1024, more=["--enable-scale-out"]) as served:
        trainer = training(tmp_path, served.url)
        trainer.train()
        trainer.close()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in steps) < 1e-3
    assert all(entry["turns/mean"] > 1 and entry["grad_norm"] > 0 for entry in steps)


def test_a_server_that_takes_no_images_is_refused(tmp_path: Path) -> None:
    made("llava", tmp_path / "model")
    with (
        serving(tmp_path / "model", 1024) as served,
        pytest.raises(ValueError, match=r"does not serve /inference/v1/generate.*--enable-scale-out"),
    ):
        training(tmp_path, served.url)


def test_a_request_to_a_server_holds_what_the_engine_gets(tmp_path: Path) -> None:
    """As the server's own code reads it."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_features import mm_kwargs_from_features
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    model, processor = made("idefics3", tmp_path)
    reader = prepare_for_images(model)
    playing = build_engine(
        EpisodeOptions(max_turns=3, max_new_tokens=5), EnvironmentPool(Gallery), processor, model_config=model.config
    )
    (episode,) = play(playing, ScriptedGenerator(lambda request: [5]), range(1))
    ((ids, pictures),) = episode.shown
    request = GenerationRequest(0, ids, 4, lambda n: [0.0] * n, pictures=pictures)
    ours = prompt_of(request, reader)
    body = {
        "token_ids": ids, "features": features_of(request, reader),
        "sampling_params": {
            **sampling_fields(GREEDY, [3]), "logit_bias": logit_bias(reader), "stop": ["a"], "skip_special_tokens": False,
            "max_tokens": 4, "logprobs": 0, "output_kind": 2,
        },
    }  # fmt: skip
    theirs = GenerateRequest.model_validate_json(json.dumps(body))
    assert theirs.sampling_params.logit_bias == dict.fromkeys(reader.suppressed, -100.0)
    read = mm_kwargs_from_features(theirs.features)["image"]
    assert [item["image_embeds"].data.tolist() for item in read] == [
        item["image_embeds"].data.tolist() for item in ours["mm_kwargs"]["image"]
    ]
    assert theirs.features.mm_hashes == ours["mm_hashes"]
    assert [(place.offset, place.length) for place in theirs.features.mm_placeholders["image"]] == [
        (place.offset, place.length) for place in ours["mm_placeholders"]["image"]
    ]
