"""Evaluates a policy in an environment: a model object, a folder, a Hub id or an adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import PartialState
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel
from trl.trainer.utils import create_model_from_path

from agile_trainers.adapters import find_adapters, load_policy
from agile_trainers.adapters.fused import fuse
from agile_trainers.adapters.loading import load_tokenizer
from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.envs.registry import environment_factories
from agile_trainers.evaluation.results import EpisodeResults, evaluation_episodes, play_evaluation
from agile_trainers.rollout.environment_probe import check_first_prompt, probe_environment
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine, end_token_ids
from agile_trainers.rollout.generators.base import Generator, SamplingSettings
from agile_trainers.rollout.generators.transformers.generator import TransformersGenerator
from agile_trainers.rollout.mixture import Mixture
from agile_trainers.rollout.seeds import preserved_random_state
from agile_trainers.types import Trajectory


def evaluate_policy(
    model: str | PreTrainedModel | PeftModel,
    tokenizer: Any,
    environment: str | EnvironmentFactory | Mapping[str, str | EnvironmentFactory],
    episodes: int = 128,
    *,
    rows: Any = None,
    seed: int = 42,
    attempts: int = 1,
    sampling_seed: int | None = None,
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

    The episodes are those of ``trainer.evaluate()`` with the same seed and settings, token for token. In a process group
    (``accelerate launch``) each process plays its share, and all get the rows of all.

    Args:
        model: A model, which keeps its device and mode; or the folder or Hub id of a model or of a LoRA adapter, which is
            loaded as a trainer loads it.
        tokenizer: The model's. None: the one that is saved with the model, adapter or base.
        environment: An id, a zero-argument factory, or several of these by name.
        episodes: Their number, over all processes.
        rows: Handed to ``reset`` as options, in order, again and again; of several environments with the column
            ``environment``. None: the environment gets seeds only.
        seed: Of environments and sampling.
        attempts: Times that each episode is played from its start, with sampling noise of its own, for pass@k.
        sampling_seed: Seed of the sampling noise alone. Policies that are compared get different ones: they then play the
            same episodes with independent noise. Default: the noise of ``trainer.evaluate()``.
        greedy: Take the likeliest token instead of sampling.
        options: Limits, conversation and where environments run. Default: those of the trainers' configuration.
        sampling: Temperature, filters and stop strings. Default: those of the trainers' configuration.
        generation_chunk_size: Episodes that are decoded at once. Default: all.
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
    mixture = Mixture(tuple(factories), (1.0,) * len(factories), 1) if isinstance(factories, dict) else None
    settings = replace(sampling, do_sample=sampling.do_sample and not greedy)
    if attempts > 1 and not settings.do_sample:
        raise ValueError(f"attempts={attempts} play the same game again in greedy play. Sample, or set attempts=1.")
    specs = evaluation_episodes(seed, episodes, rows, mixture, attempts=attempts, sampling_seed=sampling_seed)
    if isinstance(model, str):
        policy, tokenizer = load_model(model, tokenizer, device=device, **(model_init_kwargs or {}))
    elif device is not None or model_init_kwargs:
        raise ValueError(
            f"device={device!r} and model_init_kwargs={model_init_kwargs!r} have no effect: `model` is loaded already. "
            "Leave them unset, or pass the model's folder or Hub id."
        )
    else:
        policy = model
    if tokenizer is None:
        tokenizer = _tokenizer_of(policy)
    engine = build_engine(
        options,
        options.make_pool(factories),
        tokenizer,
        eos_token_ids=end_token_ids(policy.generation_config.eos_token_id, tokenizer),
        model_config=policy.config,
        append_final_observation=append_final_observation,
    )
    state = PartialState()
    try:
        with preserved_random_state():
            for spec in {spec.environment: spec for spec in reversed(specs)}.values():
                start = probe_environment(engine.pool, spec.seed, spec.options, spec.environment)
                check_first_prompt(engine, start, spec.environment)
            results = play_evaluation(
                engine,
                _generator(policy, tokenizer, engine.chat.eos_token_ids, settings, generation_chunk_size),
                specs,
                rank=state.process_index,
                world_size=state.num_processes,
                on_finish=on_finish,
            )
            return replace(results, greedy=not settings.do_sample)
    finally:
        engine.pool.close()


@contextmanager
def _generator(
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


def load_model(
    model: str, tokenizer: Any = None, *, device: torch.device | str | None = None, **init: Any
) -> tuple[PreTrainedModel | PeftModel, Any]:
    """Load a policy as a trainer loads it.

    Args:
        model: Folder or Hub id of a model or a LoRA adapter.
        tokenizer: Its tokenizer. Default: the one that is saved with the model, adapter or base.
        device: Where to load it to. Default: the process's GPU, if there is one.
        init: Further arguments of ``from_pretrained``.

    Returns:
        The model and its tokenizer.

    Raises:
        ValueError: If the adapter cannot be used, or the weights are damaged.
    """
    init = {"device_map": None, **init}
    revision, trust = init.pop("revision", None), bool(init.get("trust_remote_code"))
    saved = find_adapters(model, revision)
    policy: Any
    if saved is None:
        try:
            policy = create_model_from_path(model, revision=revision, **init)
        except SafetensorError as error:
            raise ValueError(
                f"The weights of {model} cannot be read: {error}. The file is damaged or incomplete; copy or download "
                "it again."
            ) from error
        tokenizer = tokenizer or _tokenizer_of(policy, revision=revision, trust_remote_code=trust)
    else:
        policy = load_policy(saved, **init)
        fuse(policy)
        tokenizer = tokenizer or load_tokenizer(saved, trust)
        tokenizer = tokenizer or _tokenizer_of(policy, revision=saved.config.revision, trust_remote_code=trust)
    if init["device_map"] is None and getattr(policy.config, "quantization_config", None) is None:
        policy = policy.to(PartialState().device if device is None else torch.device(device))
    return policy, tokenizer


def _tokenizer_of(model: Any, **init: Any) -> Any:
    """The tokenizer in the folder or Hub repository that a model was loaded from.

    Raises:
        ValueError: If the model does not say where that is.
    """
    name = model.config._name_or_path
    if not name:
        raise ValueError("tokenizer=None: the model was made in memory and names no folder to load one from. Pass it.")
    return AutoTokenizer.from_pretrained(name, **init)
