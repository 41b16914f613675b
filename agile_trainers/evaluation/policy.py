"""Evaluates a policy in an environment: a model object, a folder, a Hub id or an adapter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from peft import LoraConfig, PeftModel
from transformers import AutoProcessor, AutoTokenizer, PretrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.utils import logging
from trl.import_utils import is_vllm_available
from trl.trainer.utils import create_model_from_path

from agile_trainers.adapters.folders import RECORD, read_record
from agile_trainers.adapters.fused import fuse
from agile_trainers.adapters.loading import find_adapters, load_policy, load_tokenizer, read_weights
from agile_trainers.adapters.roles import POLICY, base_model
from agile_trainers.adapters.untrusted import hub_file, naming_folder
from agile_trainers.checkpoints.disclosure import with_private
from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.envs.context import is_ready_history
from agile_trainers.envs.registry import environment_factories
from agile_trainers.evaluation.results import EpisodeResults, evaluation_episodes, play_evaluation
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.environment_probe import check_first_prompt, probe_environment
from agile_trainers.rollout.episode_options import UNLIMITED, EpisodeOptions, build_engine, end_token_ids
from agile_trainers.rollout.generators.base import Generator, SamplingSettings
from agile_trainers.rollout.generators.images import SUPPORTED, prepare_for_images
from agile_trainers.rollout.generators.transformers.generator import TransformersGenerator
from agile_trainers.rollout.seeds import EVALUATION, HELD_OUT, Mixture, preserved_random_state
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.sampling.vllm_checks import base_source, lora_rank
from agile_trainers.types import Trajectory

if TYPE_CHECKING:
    from agile_trainers.rollout.generators.vllm.engine import VllmEngine


_AT_ONCE = 256
"""Answers that vLLM decodes at the same time, unless another number is given."""


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A saved policy that a :class:`VllmSampler` samples; ``evaluate_policy`` takes it as its model."""

    sampler: VllmSampler
    model: Any
    """The policy on the meta device: its configuration and the shapes of its weights."""
    tokenizer: Any
    base: tuple[Any, ...]
    """Folder or Hub id, commit and dtype of the base, and whether its code is trusted."""
    adapter: tuple[dict[str, torch.Tensor], LoraConfig] | None
    """Weights and configuration of its adapter; None for a model without one."""
    rank: int
    """Rank with which vLLM must be started for the adapter; 0 without one."""


class VllmSampler:
    """Samples saved policies with a vLLM engine in this process.

    The engine is started before the first episode. It loads the base model and serves the policies' adapters as LoRA, one at
    a time. It is kept for the policies on the same base; another base replaces it. Use it as a context manager, or call
    ``close``, which frees its memory. Nothing else in the process may use vLLM meanwhile.

    Args:
        gpu_memory_utilization: Share of the GPU's memory for the engine's weights and cache.
        model_impl: Implementation of the model: ``"vllm"``, ``"transformers"`` or ``"auto"``.

    Raises:
        ImportError: If vLLM is not installed.
        ValueError: If a value is out of range, or there are several processes.
    """

    def __init__(self, *, gpu_memory_utilization: float = 0.9, model_impl: str = "vllm") -> None:
        if (processes := PartialState().num_processes) > 1:
            raise ValueError(
                f"An evaluation with vLLM runs in one process, got {processes}. Start it without accelerate launch, or "
                "sample with transformers."
            )
        if not is_vllm_available():
            raise ImportError(
                "Sampling with vLLM needs vLLM, which is not installed: pip install 'agile-trainers[vllm]'."
            )
        self._options: dict[str, Any] = {"gpu_memory_utilization": gpu_memory_utilization, "model_impl": model_impl}
        self._loaded: list[ServedModel] = []
        self._engine: VllmEngine | None = None
        self._started: tuple[tuple[Any, ...], int, int, int] | None = None
        self._served: ServedModel | None = None

    def __enter__(self) -> VllmSampler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def load(self, model: str, tokenizer: Any = None, **init: Any) -> ServedModel:
        """Read a saved policy without the weights of its base model. No engine is started yet.

        Args:
            model: Folder or Hub id of a model or of a LoRA adapter.
            tokenizer: Its tokenizer. Default: the one that is saved with the model, adapter or base.
            init: How to load the model: ``dtype`` (float32 by default), ``revision`` and ``trust_remote_code``.

        Raises:
            ValueError: If the policy cannot be used, or vLLM cannot serve it.
        """
        from agile_trainers.sampling.vllm_colocated import served_quantization

        policy, tokenizer = load_shapes(model, tokenizer, **init)
        served_quantization(policy)
        base = base_model(policy)
        commit, trusted = getattr(base.config, "_commit_hash", None), bool(init.get("trust_remote_code"))
        saved = find_adapters(model, init.get("revision"))
        check_stored_rows(base)
        adapter = None if saved is None else (read_weights(saved.folders[POLICY]), saved.config)
        rank = 0 if saved is None else lora_rank(saved.config)
        made = ServedModel(self, policy, tokenizer, (base_source(policy), commit, base.dtype, trusted), adapter, rank)
        self._loaded.append(made)
        return made

    def serve(self, policy: ServedModel, max_model_length: int, at_once: int) -> VllmEngine:
        """Return the engine, which serves a policy from now on. It is started or replaced where needed.

        Args:
            policy: One that this sampler has loaded.
            max_model_length: Tokens of a conversation that it must take.
            at_once: Answers that are decoded at the same time.

        Raises:
            ValueError: If vLLM cannot serve the policy.
        """
        from agile_trainers.sampling.vllm_colocated import make_engine

        wanted = (policy.base, at_once, policy.rank, max_model_length)
        if self._engine is None or self._started is None or not _fits(self._started, wanted):
            self.close()
            rank = max(one.rank for one in self._loaded if one.base == policy.base)
            *_, dtype, trusted = policy.base
            self._engine = make_engine(
                policy.model,
                dtype=dtype,
                max_model_length=max_model_length if max_model_length < UNLIMITED else None,
                max_batch_size=at_once,
                max_lora_rank=rank or None,
                trust_remote_code=trusted,
                **self._options,
            )
            self._started = (policy.base, at_once, rank, max_model_length)
        if self._served is not policy:
            if policy.adapter is None:
                self._engine.remove_adapter()
            else:
                self._engine.load_adapter(*policy.adapter)
            self._served = policy
        return self._engine

    def close(self) -> None:
        """Shut the engine down and free its memory. A later evaluation starts another."""
        engine, self._engine, self._served = self._engine, None, None
        if engine is not None:
            engine.close()


def _fits(started: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    """Return True if an engine that was started for one policy also serves another."""
    return started[:2] == wanted[:2] and started[2] >= wanted[2] and started[3] >= wanted[3]


logger = logging.get_logger(__name__)


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
        ValueError: If the adapter cannot be used, or a file of the folder is damaged.
    """
    init = {"device_map": None, **init}
    revision, trust = init.pop("revision", None), bool(init.get("trust_remote_code"))
    saved = find_adapters(model, revision)
    policy: Any
    if saved is None:
        with naming_folder(model):
            policy = create_model_from_path(model, revision=revision, **init)
        tokenizer = tokenizer or tokenizer_of(policy, revision=revision, trust_remote_code=trust)
    else:
        policy = load_policy(saved, **init)
        fuse(policy)
        tokenizer = tokenizer or load_tokenizer(saved, trust)
        tokenizer = tokenizer or tokenizer_of(policy, revision=saved.config.revision, trust_remote_code=trust)
    if init["device_map"] is None and getattr(policy.config, "quantization_config", None) is None:
        policy = policy.to(PartialState().device if device is None else torch.device(device))
    return policy, tokenizer


def load_shapes(model: str, tokenizer: Any = None, **init: Any) -> tuple[PreTrainedModel | PeftModel, Any]:
    """Load a policy as :func:`load_model` does, on the meta device: its files are checked, and no weights are read.

    Args:
        model: Folder or Hub id of a model or a LoRA adapter.
        tokenizer: Its tokenizer. Default: the one that is saved with the model, adapter or base.
        init: Further arguments of ``from_pretrained``.

    Returns:
        The model and its tokenizer.

    Raises:
        ValueError: If the adapter cannot be used, or a file of the folder is damaged.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        return load_model(model, tokenizer, device_map="meta", **init)


def is_quantized(model: str) -> bool:
    """Return whether a policy's base is stored in a quantized form, which :func:`load_shapes` may not load.

    Args:
        model: Folder or Hub id of a model or a LoRA adapter.
    """
    saved = find_adapters(model)
    base, revision = (model, None) if saved is None else (saved.config.base_model_name_or_path, saved.config.revision)
    try:
        config, _ = PretrainedConfig.get_config_dict(base, revision=revision)
    except OSError:  # loading it raises the clearer error
        return False
    return "quantization_config" in config


def check_stored_rows(base: PreTrainedModel) -> None:
    """Reject a base that got more rows of embeddings for its adapter: vLLM loads it from its files, without them.

    Raises:
        ValueError: If it got some.
    """
    rows, stored = base.config.get_text_config().vocab_size, dict[str, Any]()
    with suppress(OSError):  # loading it raises the clearer error
        stored, _ = PretrainedConfig.get_config_dict(
            base.name_or_path, revision=getattr(base.config, "_commit_hash", None)
        )
    known = stored.get("vocab_size") or (stored.get("text_config") or {}).get("vocab_size") or rows
    if rows > known:
        raise ValueError(
            f"The adapter was trained with {rows} rows of embeddings, and its base {base.name_or_path!r} has {known}: "
            "tokens were added, which vLLM cannot serve. Evaluate without vLLM, or merge the adapter into its base (PEFT's "
            "merge_and_unload) and save that, with the tokenizer."
        )


def recorded_settings(model: str) -> dict[str, Any]:
    """Read the limits of episodes and the sampling settings that a policy was trained with, from its record.

    Args:
        model: Folder or Hub id.

    Returns:
        Those of the fields of :class:`EpisodeOptions` and :class:`SamplingSettings` that the record has, of several
        environments by their ids; empty without a record of a run on episodes.
    """
    file = str(Path(model) / RECORD) if Path(model).is_dir() else hub_file(model, RECORD, None)
    if file is None or not Path(file).is_file():
        return {}
    folder = Path(file).parent
    record = read_record(folder)
    options, unknown = with_private(record.get("options", {}), folder)
    names = {one.name for kind in (EpisodeOptions, SamplingSettings) for one in fields(kind)} - {"do_sample"}
    found = {name: value for name, value in options.items() if name in names}
    if withheld := sorted(names & set(unknown)):
        logger.warning(
            "%s was trained with a %s of its own, whose value is withheld in its record and not known here. The default is "
            "played with unless the option is given.",
            model, ", ".join(withheld),
        )  # fmt: skip
    if not is_ready_history(history := found.get("history")):
        del found["history"]
        logger.warning(
            "%s was trained with history=%r, a function of its own. A record does not make it run: contexts are not "
            "rewritten unless the option is given.",
            model, history,
        )  # fmt: skip
    if "stop_strings" in found:
        found["stop_strings"] = tuple(found["stop_strings"] or ())
    for option in ("environment_limits", "history"):
        if isinstance(own := found.get(option), dict):
            found[option] = _by_id(own, str(record.get("environment")), f"{model}: {option}")
    return found


def _by_id(own: dict[str, Any], environments: str, what: str) -> dict[str, Any]:
    """Key values of several environments by the ids of these, given a record's ``"guess=agile:guess_number, ..."``."""
    ids = dict(one.split("=", 1) for one in environments.split(", ") if "=" in one)
    found: dict[str, Any] = {}
    for name, value in own.items():
        if found.setdefault(key := ids.get(name, name), value) != value:
            logger.warning("%s of %s differs between the names that it had. Played with that of the first.", what, key)
    return found


def tokenizer_of(model: Any, **init: Any) -> Any:
    """The tokenizer in the folder or Hub repository that a model was loaded from; the processor of one that reads images.

    Raises:
        ValueError: If the model does not say where that is, or it cannot be loaded.
    """
    name = model.config._name_or_path
    if not name:
        raise ValueError("tokenizer=None: the model was made in memory and names no folder to load one from. Pass it.")
    with naming_folder(name):
        kind = AutoProcessor if model.config.model_type in SUPPORTED else AutoTokenizer
        return kind.from_pretrained(name, **init)


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
            :class:`~agile_trainers.evaluation.policy.VllmSampler`.
        tokenizer: The model's, or its processor for episodes with images. None: the one that is saved with the model,
            adapter or base.
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
    options.check_answers(settings.min_new_tokens)
    policy, tokenizer = _loaded(model, tokenizer, device, model_init_kwargs)
    processor, tokenizer = tokenizer, _tokenizer_in(tokenizer, policy)
    pool = options.make_pool(factories)
    with closing(pool), preserved_random_state():
        engine = _tried_engine(policy, processor, pool, options, specs, append_final_observation)
        generator = _generator(policy, tokenizer, engine, settings, generation_chunk_size)
        return replace(play_evaluation(engine, generator, specs, on_finish), greedy=not settings.do_sample)


def check_evaluation(
    model: PreTrainedModel | PeftModel | ServedModel,
    tokenizer: Any,
    environment: EnvironmentFactory,
    *,
    rows: Any = None,
    seed: int = 42,
    options: EpisodeOptions,
) -> None:
    """Raise what :func:`evaluate_policy` would raise before its first episode.

    Args:
        model: The policy, which may be on the meta device, see :func:`load_shapes`.
        tokenizer: Its tokenizer or processor.
        environment: A zero-argument factory.
        rows: As for :func:`evaluate_policy`, as are ``seed`` and ``options``.
        seed: See there.
        options: See there.

    Raises:
        ValueError: If environment or options cannot be used with the policy.
        EnvironmentProtocolError: If the environment fails or breaks the protocol.
    """
    _tokenizer_in(tokenizer, model)
    pool, specs = options.make_pool(environment), evaluation_episodes(seed, 1, rows, domain=HELD_OUT)
    with closing(pool), preserved_random_state():
        _tried_engine(model, tokenizer, pool, options, specs)


def _tried_engine(
    policy: Any,
    tokenizer: Any,
    pool: EnvironmentPool,
    options: EpisodeOptions,
    specs: Sequence[EpisodeSpec],
    append_final_observation: bool = False,
) -> RolloutEngine:
    """Make an engine, and try the first episode of each environment."""
    of_model = policy.model if isinstance(policy, ServedModel) else policy
    own = tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer
    engine = build_engine(
        options,
        pool,
        tokenizer,
        eos_token_ids=end_token_ids(of_model.generation_config.eos_token_id, own),
        model_config=of_model.config,
        append_final_observation=append_final_observation,
    )
    for name, spec in {spec.environment: spec for spec in reversed(specs)}.items():
        start = probe_environment(pool, spec.seed, spec.options, name, with_context=name not in engine.histories)
        check_first_prompt(engine, start, name)
    return engine


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


def _tokenizer_in(given: Any, policy: Any) -> Any:
    """Return a tokenizer, or that of a processor, for whose images it prepares the policy."""
    if not isinstance(given, ProcessorMixin):
        return given
    if isinstance(policy, ServedModel):
        raise ValueError("vLLM samples text, and `tokenizer` is a processor of images. Pass its tokenizer for text.")
    prepare_for_images(base_model(policy))
    return given.tokenizer


@contextmanager
def _generator(
    model: Any, tokenizer: Any, engine: RolloutEngine, settings: SamplingSettings, at_once: int | None
) -> Iterator[Generator]:
    """A generator of an engine's actions, on vLLM or on the model itself, which is in eval mode meanwhile.

    Raises:
        ValueError: If vLLM cannot serve the policy or take the settings.
    """
    own: dict[str, Any] = {"eos_token_ids": engine.chat.eos_token_ids, "settings": settings, "tokenizer": tokenizer}
    if isinstance(model, ServedModel):
        from agile_trainers.rollout.generators.vllm.engine import VllmGenerator, check_settings

        check_settings(settings)  # before an engine is started
        served = model.sampler.serve(model, engine.limits.max_model_length, _AT_ONCE if at_once is None else at_once)
        with closing(VllmGenerator(served, **own)) as made:
            yield made
        return
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield TransformersGenerator(model, pad_token_id=pad, max_batch_size=at_once, **own)
    finally:
        for module, training in modes.items():
            module.training = training
