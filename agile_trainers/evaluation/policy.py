"""Evaluates a policy in an environment: a model object, a folder, a Hub id or an adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import PartialState
from peft import PeftModel
from transformers import PreTrainedModel

from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.envs.registry import environment_factories
from agile_trainers.evaluation.loading import load_model, tokenizer_of
from agile_trainers.evaluation.results import EpisodeResults, evaluation_episodes, play_evaluation
from agile_trainers.evaluation.served import ServedModel
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_probe import check_first_prompt, probe_environment
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine, end_token_ids
from agile_trainers.rollout.generators.base import Generator, SamplingSettings
from agile_trainers.rollout.generators.transformers.generator import TransformersGenerator
from agile_trainers.rollout.seeds import EVALUATION, HELD_OUT, Mixture, preserved_random_state
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.types import Trajectory


def evaluate_policy(
    model: str | PreTrainedModel | PeftModel | ServedModel,
    tokenizer: Any,
    environment: str | EnvironmentFactory | Mapping[str, str | EnvironmentFactory],
    episodes: int = 128,
    *,
    rows: Any = None,
    seed: int = 42,
    attempts: int = 1,
    sampling_seed: int | None = None,
    held_out: bool = True,
    greedy: bool = False,
    options: EpisodeOptions | None = None,
    sampling: SamplingSettings | None = None,
    generation_chunk_size: int | None = None,
    append_final_observation: bool = False,
    device: torch.device | str | None = None,
    model_init_kwargs: Mapping[str, Any] | None = None,
    on_finish: Callable[[Trajectory], None] | None = None,
) -> EpisodeResults:
    """Play a policy's episodes in an environment; nothing is trained or written.

    By default the episodes are held out: no run and no population plays them, so that nothing was chosen by them. In a
    process group (``accelerate launch``) each process plays its share, and all get the rows of all.

    Args:
        model: A model, which keeps its device and mode; or the folder or Hub id of a model or of a LoRA adapter, which is
            loaded as a trainer loads it; or a saved policy in a vLLM engine, see
            :class:`~agile_trainers.evaluation.served.VllmSampler`.
        tokenizer: The model's. None: the one that is saved with the model, adapter or base.
        environment: An id, a zero-argument factory, or several of these by name.
        episodes: Their number, over all processes.
        rows: Handed to ``reset`` as options, in order, again and again; of several environments with the column
            ``environment``. None: the environment gets seeds only.
        seed: Of environments and sampling.
        attempts: Times that each episode is played from its start, with sampling noise of its own, for pass@k.
        sampling_seed: Seed of the sampling noise alone. Policies that are compared get different ones: they then play the
            same episodes with independent noise. Default: the same noise in every evaluation.
        held_out: False plays the episodes of ``trainer.evaluate()`` with the same seed and settings, token for token.
        greedy: Take the likeliest token instead of sampling.
        options: Limits, conversation and where environments run. Default: those of the trainers' configuration.
        sampling: Temperature, filters and stop strings. Default: those of the trainers' configuration.
        generation_chunk_size: Episodes that are decoded at once. Default: all, with vLLM 256.
        append_final_observation: See :class:`~agile_trainers.rollout.engine.RolloutEngine`.
        device: Where to load a model to. Default: the process's GPU, if there is one.
        model_init_kwargs: How to load a model: ``dtype`` (float32 by default), ``revision``, ``trust_remote_code`` and
            others of ``from_pretrained``.
        on_finish: Called with each episode of this process when it ends.

    Returns:
        The trajectories, the row of each episode, and the metrics.

    Raises:
        ValueError: If model, environment, options or settings cannot be used, or loading options are given for a model
            that is loaded already.
        EnvironmentProtocolError: If the environment fails before the first episode, or breaks the protocol.
        ImportError: If a library that the environment needs is missing.
    """
    options, sampling = options or EpisodeOptions(), sampling or SamplingSettings()
    factories = environment_factories(environment)
    mixture = Mixture(tuple(factories), 1) if isinstance(factories, dict) else None
    settings = replace(sampling, do_sample=sampling.do_sample and not greedy)
    if attempts > 1 and not settings.do_sample:
        raise ValueError(f"attempts={attempts} play the same game again in greedy play. Sample, or set attempts=1.")
    domain = HELD_OUT if held_out else EVALUATION
    specs = evaluation_episodes(
        seed, episodes, rows, mixture, attempts=attempts, sampling_seed=sampling_seed, domain=domain
    )
    policy, tokenizer = _loaded(model, tokenizer, device, model_init_kwargs)
    of_model = policy.model if isinstance(policy, ServedModel) else policy
    engine = build_engine(
        options,
        options.make_pool(factories),
        tokenizer,
        eos_token_ids=end_token_ids(of_model.generation_config.eos_token_id, tokenizer),
        model_config=of_model.config,
        append_final_observation=append_final_observation,
    )
    state = PartialState()
    try:
        with preserved_random_state():
            for spec in {spec.environment: spec for spec in reversed(specs)}.values():
                _check_start(engine, spec)
            results = play_evaluation(
                engine,
                _generator(policy, tokenizer, engine, settings, generation_chunk_size),
                specs,
                rank=state.process_index,
                world_size=state.num_processes,
                on_finish=on_finish,
            )
            return replace(results, greedy=not settings.do_sample)
    finally:
        engine.pool.close()


def _check_start(engine: RolloutEngine, spec: EpisodeSpec) -> None:
    name = spec.environment
    start = probe_environment(engine.pool, spec.seed, spec.options, name, with_context=name not in engine.histories)
    check_first_prompt(engine, start, name)


def _loaded(
    model: Any, tokenizer: Any, device: torch.device | str | None, init: Mapping[str, Any] | None
) -> tuple[Any, Any]:
    """Return the policy, loaded if its folder or Hub id is given, and its tokenizer."""
    if isinstance(model, str):
        model, tokenizer = load_model(model, tokenizer, device=device, **(init or {}))
    elif device is not None or init:
        raise ValueError(
            f"device={device!r} and model_init_kwargs={init!r} have no effect: `model` is loaded already. Leave them unset, "
            "or pass the model's folder or Hub id."
        )
    if tokenizer is None:
        tokenizer = model.tokenizer if isinstance(model, ServedModel) else tokenizer_of(model)
    return model, tokenizer


def _generator(
    model: Any, tokenizer: Any, engine: RolloutEngine, settings: SamplingSettings, at_once: int | None
) -> AbstractContextManager[Generator]:
    """A generator of an engine's actions."""
    ends = engine.chat.eos_token_ids
    if isinstance(model, ServedModel):
        return model.generator(tokenizer, ends, settings, engine.limits.max_model_length, at_once)
    return _on_transformers(model, tokenizer, ends, settings, at_once)


@contextmanager
def _on_transformers(
    model: Any, tokenizer: Any, eos_token_ids: list[int], settings: SamplingSettings, at_once: int | None
) -> Iterator[Generator]:
    """A generator on a model, which is in eval mode meanwhile."""
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield TransformersGenerator(
            model,
            eos_token_ids=eos_token_ids,
            pad_token_id=pad,
            settings=settings,
            tokenizer=tokenizer,
            max_batch_size=at_once,
        )
    finally:
        for module, training in modes.items():
            module.training = training
