"""Options that every multi-turn trainer shares, on top of TRL's ``GRPOConfig``."""

import copy
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from trl import GRPOConfig

from agile_trainers.checkpoints.secrets import blanked
from agile_trainers.objectives.mismatch import MODES
from agile_trainers.sampling.vllm_checks import check_options
from agile_trainers.trainers.build_locks import remove_abandoned_locks
from agile_trainers.trainers.config_rules import CISPO_BOUND, check_counts, check_objective, check_read
from agile_trainers.trainers.environment_options import check_environments, check_names, longest_completion
from agile_trainers.trainers.launch import fill_deepspeed, uses_deepspeed
from agile_trainers.trainers.recipe import TRL_LEARNING_RATE, accumulation, micro_batch, take_trl_batch

TRL_COMPLETION_LENGTH = 512
"""TRL's default for ``max_completion_length``, which applies when there is no environment."""
TRL_SAMPLING_MODE = "sequence_mask"
"""TRL's default for ``vllm_importance_sampling_mode``, likewise."""


@dataclass
class MultiTurnConfig(GRPOConfig):
    """Configuration shared by the multi-turn trainers.

    Everything in TRL's ``GRPOConfig`` keeps its name, default and meaning, except: ``max_completion_length`` is derived as
    ``max_turns * max_new_tokens`` and cannot be set together with an environment; ``disable_dropout`` defaults to True
    with an environment (so that every importance ratio is 1 before the first update); ``importance_sampling_level`` also
    takes ``"turn"``, and ``"trajectory"`` for TRL's ``"sequence"``; ``vllm_importance_sampling_mode`` also takes
    ``"turn_truncate"``, the default with an environment, and ``"turn_mask"``; ``vllm_importance_sampling_*`` act without
    vLLM too; ``epsilon_high`` defaults to 5.0 with an environment and ``loss_type="cispo"``, whose weights TRL's default
    would cut to a fifth. For ``vllm_*`` see ``docs/vllm.md``.

    Two more defaults differ with an environment. TRL's train a LoRA adapter at the rate of a whole model, on one group.

    - ``learning_rate``: 1e-5 where an adapter is trained (``peft_config``, or a ``model`` that is one), else TRL's 1e-6. The
      trainer knows which; once it is made, ``args.learning_rate`` is the number.
    - ``gradient_accumulation_steps``: the smallest number with which one update, over all processes, sees 8 whole groups (64
      episodes where there are no groups). With ``steps_per_generation`` or ``generation_batch_size`` it is TRL's 1.

    A field below has an effect only with an environment; setting one without is an error.

    Args:
        max_turns: Turns after which an episode is cut short.
        max_new_tokens: Tokens of one answer, at most.
        min_new_tokens: Tokens of one answer before an end-of-turn token may be sampled.
        max_model_length: Tokens of the whole conversation, prompt included. Default: the model's
            ``max_position_embeddings``.
        max_observation_length: Characters of one observation; what is longer is cut, with a note.
        stop_strings: An answer ends when it contains one of these; they stay part of the answer.
        system_prompt: System message put before a first observation that brings none.
        training_chat_template: Use a training version of the model's chat template if it rewrites earlier turns: TRL's,
            or our own where TRL's rewrites them too. It is saved with the model.
        turn_ratio_pooling: How ``importance_sampling_level="turn"`` pools the log-ratios of a turn's tokens: ``"mean"``
            or ``"sum"``.
        gamma: Discount per turn, in [0, 1].
        whiten_advantages: Shift and scale the advantages to mean 0 and deviation 1 over all (episode, turn) of the
            generation batch.
        advantage_clip_range: Clip advantages to plus or minus this, after normalization and whitening.
        environment_workers: 0 steps blocking environments inline, one after the other; more steps up to that many at once
            in threads. Async environments are always awaited together.
        environment_processes: Gives each environment a process of its own, for work that needs a core; up to that many play
            at once. 0: none. The factory is sent there by ``cloudpickle``: a lambda, a closure or a class of the script will
            do.
        max_environments: Episodes that play at once, for servers that take no more; the others wait. Default: all.
        environment_timeout: Seconds a ``reset`` or ``step`` may take before its episode is given up.
        generation_chunk_size: Episodes that are decoded at once. Default: all; with vLLM those of one generation batch.
        environment_limits: With several environments: any of ``max_turns``, ``max_new_tokens``, ``max_model_length`` and
            ``max_observation_length`` for each by its name, ``{"guess": {"max_turns": 4}, "sums": {"max_turns": 1}}``. What
            it does not name holds for all. ``max_completion_length`` is that of the longest.
        environment_weights: With several environments and without a data set: how often each is drawn, by its name. Whole
            groups are drawn; 0 is for one that is only evaluated. Default: all equally often.
        num_eval_episodes: Episodes of one evaluation, over all processes.
        eval_greedy: Evaluate with the likeliest token instead of sampling.
        log_rollouts: Write every episode to ``output_dir/rollouts/`` as JSON lines.
        kl_placement: Where the penalty for leaving the reference, weighed by ``beta``, enters: the ``"loss"`` (TRL's k3),
            the ``"reward"`` of each turn (summed over its tokens) or the ``"advantage"`` of each token. See
            :mod:`agile_trainers.objectives.kl`.
        skip_zero_advantage: Leave episodes without signal out of the forward pass. The gradient stays the same; TRL's
            metrics (entropy, clip ratios) are then over the episodes that are left. A micro-batch without any signal keeps
            its shortest episode, so that all ranks stay in step.
        zero_advantage_eps: An episode has no signal if none of its advantages is larger than this.
        reference_adapter: With LoRA: the reference is an adapter of its own, ``ref``, that starts as a copy of the policy,
            instead of the base model. Costs the adapter's memory.
        reference_update_steps: Make the current policy the reference every so many optimizer steps. LoRA needs
            ``reference_adapter``.
        lora_target_scope: Adapt only modules below this part of the model, for example ``"language_model"``.
        entropy_coef_schedule: ``"constant"``, or ``"linear"``: the entropy bonus falls to 0 over the run, so that the policy
            explores early and need not be random in the end.
        activation_offload: Keep activations in the CPU's memory between forward and backward pass.
        offload_policy_during_rollout: With vLLM on a GPU: the trainer's own weights wait in the CPU's memory meanwhile.
        max_logprob_gap: Mean difference between the log-probabilities of sampler and trainer, in nats a token, that needs
            an explanation: a warning names the likely cause. In the first batch it is an error where rounding cannot be the
            cause (fp32 without TF32, quantization, dropout, penalties and filters). Default: .001 there, .1 elsewhere.
        vllm_importance_sampling_correction: On any generator: weigh each token by the trainer's probability over the
            sampler's, as ``vllm_importance_sampling_mode`` says. Default: True with vLLM and with a ``repetition_penalty``,
            else False.
        hub_extras: What is pushed to the Hub besides the policy: any of ``"reference"``, ``"critic"`` and ``"rollouts"``
            (the episodes in ``output_dir/rollouts/``).
        keep_reference: Where ``model`` is a folder of adapters: its ``ref`` stays the reference. Default: the policy that is
            loaded is.
        merge_lora_configs: Where ``model`` is an adapter and ``peft_config`` has other LoRA settings: extend the adapter to
            the larger rank and to the modules of both, without changing what it computes. Default: an error.
    """

    _groupless: ClassVar[bool] = False
    """Whether the algorithm does without groups (``num_generations=1``)."""
    _has_critic: ClassVar[bool] = False
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *GRPOConfig._VALID_DICT_FIELDS, "environment_limits", "environment_weights",
    ]  # fmt: skip

    learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate. Default: 1e-5 for an adapter in an environment, otherwise TRL's 1e-6."},
    )
    gradient_accumulation_steps: int | None = field(
        default=None,
        metadata={
            "help": "Micro-batches of one update. Default: as many as 8 groups (or 64 episodes) take; without an "
            "environment, or with steps_per_generation or generation_batch_size, 1."
        },
    )
    max_completion_length: int | None = field(
        default=None,
        metadata={"help": "Without an environment, as in TRL (512); with one it is max_turns * max_new_tokens."},
    )
    disable_dropout: bool | None = field(
        default=None, metadata={"help": "Disable dropout. Default: True with an environment, else False."}
    )
    importance_sampling_level: str = field(
        default="token", metadata={"help": "Unit of the importance ratio: token, turn or sequence (or trajectory)."}
    )
    max_turns: int = field(default=8, metadata={"help": "Turns after which an episode is cut short."})
    max_new_tokens: int = field(default=256, metadata={"help": "Tokens of one answer, at most."})
    min_new_tokens: int = field(default=0, metadata={"help": "Tokens of one answer, at least."})
    max_model_length: int | None = field(
        default=None, metadata={"help": "Tokens of the whole conversation. Default: the model's maximum."}
    )
    max_observation_length: int = field(default=100_000, metadata={"help": "Characters of one observation, at most."})
    stop_strings: list[str] | None = field(default=None, metadata={"help": "Strings that end an answer."})
    system_prompt: str | None = field(default=None, metadata={"help": "System message before the first observation."})
    training_chat_template: bool = field(
        default=False, metadata={"help": "Use a version of the chat template that keeps earlier turns."}
    )
    turn_ratio_pooling: str = field(
        default="mean", metadata={"help": "Pooling of a turn's log-ratios at the turn level: mean or sum."}
    )
    gamma: float = field(default=1.0, metadata={"help": "Discount per turn."})
    whiten_advantages: bool = field(default=False, metadata={"help": "Whiten advantages over (episode, turn)."})
    advantage_clip_range: float | None = field(default=None, metadata={"help": "Clip advantages to +- this."})
    environment_workers: int = field(default=0, metadata={"help": "Threads for blocking environments; 0 is inline."})
    environment_processes: int = field(default=0, metadata={"help": "Environments at once, a process each; 0: none."})
    max_environments: int | None = field(default=None, metadata={"help": "Episodes that play at once. Default: all."})
    environment_timeout: float | None = field(default=None, metadata={"help": "Seconds an environment may take."})
    environment_limits: dict[str, dict[str, int]] | str | None = field(
        default=None, metadata={"help": 'Limits of each of several environments: {"name": {"max_turns": 4}}.'}
    )
    environment_weights: dict[str, float] | str | None = field(
        default=None, metadata={"help": 'How often each of several environments is drawn: {"name": 2.0, ...}.'}
    )
    generation_chunk_size: int | None = field(default=None, metadata={"help": "Episodes decoded at once."})
    num_eval_episodes: int = field(default=128, metadata={"help": "Episodes of one evaluation."})
    eval_greedy: bool = field(default=False, metadata={"help": "Evaluate greedily instead of sampling."})
    log_rollouts: bool = field(default=True, metadata={"help": "Write episodes to output_dir/rollouts/."})
    kl_placement: str = field(
        default="loss", metadata={"help": "Where the KL penalty enters: loss, reward, advantage."}
    )
    skip_zero_advantage: bool = field(default=False, metadata={"help": "No forward pass for episodes without signal."})
    zero_advantage_eps: float = field(default=0.0, metadata={"help": "Advantages up to this are no signal."})
    reference_adapter: bool = field(default=False, metadata={"help": "The reference is an adapter of its own (LoRA)."})
    reference_update_steps: int | None = field(
        default=None, metadata={"help": "Make the policy the reference every so many optimizer steps."}
    )
    lora_target_scope: str | None = field(default=None, metadata={"help": "Adapt only modules below this one."})
    entropy_coef_schedule: str = field(
        default="constant", metadata={"help": "Course of entropy_coef over the run: constant, or linear (to 0)."}
    )
    activation_offload: bool = field(default=False, metadata={"help": "Keep activations in CPU memory until backward."})
    vllm_importance_sampling_mode: str | None = field(
        default=None,
        metadata={
            "help": "token, turn or sequence, and _truncate or _mask. Default: turn_truncate with an environment."
        },
    )
    offload_policy_during_rollout: bool = field(
        default=False, metadata={"help": "The trainer's weights wait in CPU memory while vLLM samples."}
    )
    max_logprob_gap: float | None = field(
        default=None,
        metadata={
            "help": "Mean gap between sampler and trainer, in nats. Default: .001 in plain fp32 (an error), else .1."
        },
    )
    vllm_importance_sampling_correction: bool | None = field(
        default=None,
        metadata={
            "help": "Weigh tokens by the trainer's probability over the sampler's. Default: with vLLM or a penalty."
        },
    )
    hub_extras: list[str] = field(
        default_factory=list, metadata={"help": "Pushed besides the policy: reference, critic, rollouts."}
    )
    keep_reference: bool = field(
        default=False, metadata={"help": "Keep the reference that the adapter was saved with."}
    )
    merge_lora_configs: bool = field(
        default=False, metadata={"help": "Extend the loaded adapter to the rank and modules of peft_config."}
    )

    def __post_init__(self) -> None:
        check_counts(self)
        if uses_deepspeed(self):
            remove_abandoned_locks()  # before `TrainingArguments` starts it
        # TRL checks the eval batch against the group size; episodes are evaluated on their own, so that check is
        # left to `without_environment`.
        group, eval_group = vars(self)["num_generations"], vars(self)["num_generations_eval"]
        self.num_generations_eval = eval_group or 1
        if self._groupless and group != 1:
            raise ValueError(
                f"num_generations={group} has no effect: {type(self).__name__} compares no group, so every episode "
                "starts from a state of its own. Leave num_generations unset (1)."
            )
        given = (vars(self)[name] for name in _BATCH)
        self._batch_is_ours = all(value is None for value in given)
        if self.gradient_accumulation_steps is None:
            self.gradient_accumulation_steps = accumulation(self) if self._batch_is_ours else 1
        if self._groupless:
            self.num_generations = self._episodes_per_generation()
        # `TrainingArguments` fills both in, with the loss.
        self.best_metric_is_unset = self.metric_for_best_model is None
        self.lower_is_better_was_asked = self.greater_is_better is False
        super().__post_init__()
        self.num_generations, self.num_generations_eval = group, eval_group
        if self.importance_sampling_level == "trajectory":
            self.importance_sampling_level = "sequence"
        check_objective(self)
        _one_of(self, "importance_sampling_level", ("token", "turn", "sequence"))
        _one_of(self, "turn_ratio_pooling", ("mean", "sum"))
        for name in (
            "max_turns", "max_new_tokens", "num_eval_episodes", "max_model_length", "max_observation_length",
            "generation_chunk_size",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must lie between 0 and max_new_tokens={self.max_new_tokens}, got {self.min_new_tokens}."
            )
        check_environments(self)
        if not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"gamma is a discount per turn and must lie in [0, 1], got {self.gamma}.")
        if self.advantage_clip_range is not None and self.advantage_clip_range <= 0:
            raise ValueError(f"advantage_clip_range must be positive, got {self.advantage_clip_range}.")
        if self.zero_advantage_eps < 0:
            raise ValueError(f"zero_advantage_eps must not be negative, got {self.zero_advantage_eps}.")
        if self.max_logprob_gap is not None and self.max_logprob_gap <= 0:
            raise ValueError(f"max_logprob_gap must be positive, got {self.max_logprob_gap}.")
        if self.vllm_importance_sampling_mode is not None:
            _one_of(self, "vllm_importance_sampling_mode", MODES)
        if self.reference_update_steps is not None and self.reference_update_steps < 1:
            raise ValueError(f"reference_update_steps must be at least 1, got {self.reference_update_steps}.")
        _one_of(self, "kl_placement", ("loss", "reward", "advantage"))
        _one_of(self, "entropy_coef_schedule", ("constant", "linear"))

    def __getstate__(self) -> dict[str, Any]:
        # `Trainer` pickles its arguments into every folder that it saves.
        return blanked(self.__dict__, instead=None)

    def __copy__(self) -> "MultiTurnConfig":
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "MultiTurnConfig":
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def to_dict(self) -> dict[str, Any]:
        """The options as reporters get them (W&B, TensorBoard, Trackio, ...), without tokens, keys and passwords."""
        return blanked(super().to_dict())

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    __repr__ = __str__

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__repr__ = cls.__str__  # type: ignore[method-assign, assignment]  # `dataclass` would write one that shows tokens

    def without_environment(self) -> "MultiTurnConfig":
        """This configuration as TRL's own ``GRPOTrainer`` means it. Fields that need an environment must be unset."""
        idle = [f.name for f in fields(self) if f.name in self._own_fields() and getattr(self, f.name) != _default(f)]
        for name in ("importance_sampling_level", "vllm_importance_sampling_mode"):
            if str(getattr(self, name)).startswith("turn"):
                idle.append(f"{name}={getattr(self, name)!r}")
        if idle:
            raise ValueError(
                f"{', '.join(sorted(idle))}: these options act on multi-turn episodes and would have no effect here. "
                "Pass `environment=...` to the trainer, or leave them unset."
            )
        args = copy.copy(self)
        if args.learning_rate is None:
            args.learning_rate = TRL_LEARNING_RATE
        if self._batch_is_ours:
            take_trl_batch(args)
        fill_deepspeed(args)
        args.max_completion_length = self.max_completion_length or TRL_COMPLETION_LENGTH
        args.vllm_importance_sampling_mode = self.vllm_importance_sampling_mode or TRL_SAMPLING_MODE
        args.vllm_importance_sampling_correction = self.vllm_importance_sampling_correction is not False
        args.disable_dropout = bool(self.disable_dropout)
        eval_batch, group = self.per_device_eval_batch_size * self.world_size, self.num_generations
        if self.do_eval and self.eval_strategy != "no" and not self.num_generations_eval and eval_batch % group:
            raise ValueError(
                f"The global eval batch size ({eval_batch}) must be divisible by num_generations ({group}) when there is "
                "no environment. Change per_device_eval_batch_size or set num_generations_eval."
            )
        return args

    def with_environment(self, names: Sequence[str] | None = None) -> "MultiTurnConfig":
        """A copy for episodes: derived fields filled in, everything that would be ignored refused.

        Args:
            names: Those of several environments; None for one.
        """
        check_names(self, names)
        length = longest_completion(self, names)
        if self.max_completion_length not in (None, length):
            raise ValueError(
                f"max_completion_length={self.max_completion_length} cannot be set together with an environment: it is "
                f"max_turns * max_new_tokens = {length}{', that of the longest' if names else ''}. Set max_turns, "
                "max_new_tokens (per answer) and max_model_length (whole conversation) instead."
            )
        for name, instead in _NO_EFFECT.items():
            if getattr(self, name) != _default(self.__dataclass_fields__[name]):
                raise ValueError(f"{name}={getattr(self, name)!r} has no effect with an environment: {instead}.")
        defaults = {f.name: _default(f) for f in fields(self)}
        args = copy.copy(self)
        if args.vllm_importance_sampling_correction is None:
            args.vllm_importance_sampling_correction = self.use_vllm or self.repetition_penalty != 1.0
        check_options(args, defaults)
        check_read(args, defaults)
        self._check_reference()
        self._check_hub()
        self._check_skipping()
        if self.entropy_coef_schedule != "constant" and (self.entropy_coef == 0.0 or self.use_adaptive_entropy):
            raise ValueError(
                f"entropy_coef_schedule={self.entropy_coef_schedule!r} moves entropy_coef, which is {self.entropy_coef} "
                f"with use_adaptive_entropy={self.use_adaptive_entropy}. Set entropy_coef, and leave the other unset."
            )
        if self.importance_sampling_level == "turn":
            self._check_turn_level()
        elif self.turn_ratio_pooling != _default(self.__dataclass_fields__["turn_ratio_pooling"]):
            raise ValueError(
                f"turn_ratio_pooling={self.turn_ratio_pooling!r} acts on importance_sampling_level='turn' only, which is "
                f"{self.importance_sampling_level!r}."
            )
        args.max_completion_length = length
        if self.loss_type == "cispo" and self.epsilon_high is None:
            args.epsilon_high = CISPO_BOUND
        args.disable_dropout = self.disable_dropout is not False
        if args.vllm_importance_sampling_correction:
            args.vllm_importance_sampling_mode = self.vllm_importance_sampling_mode or "turn_truncate"
        return args

    def _check_reference(self) -> None:
        for name in ("kl_placement", "reference_adapter", "reference_update_steps", "keep_reference"):
            if self.beta == 0.0 and getattr(self, name) != _default(self.__dataclass_fields__[name]):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect with beta=0.0, which uses no reference. Set beta, or "
                    f"leave {name} unset."
                )
        if self.sync_ref_model and self.reference_update_steps:
            raise ValueError("sync_ref_model and reference_update_steps both move the reference; keep one of them.")

    def _check_hub(self) -> None:
        there = {"reference": self.beta != 0.0, "critic": self._has_critic, "rollouts": self.log_rollouts}
        why = {
            "reference": "is no reference to push: beta=0.0 uses none",
            "critic": "is no critic to push: only PPO has one",
            "rollouts": "are no rollouts to push: log_rollouts=False",
        }
        for name in self.hub_extras:
            if name not in there:
                raise ValueError(f"hub_extras must be among {', '.join(map(repr, there))}, got {name!r}.")
            if not there[name]:
                raise ValueError(f"hub_extras={self.hub_extras!r}: there {why[name]}. Leave {name!r} out.")

    def _check_skipping(self) -> None:
        if not self.skip_zero_advantage:
            if self.zero_advantage_eps:
                raise ValueError(f"zero_advantage_eps={self.zero_advantage_eps} needs skip_zero_advantage=True.")
            return
        if self.beta != 0.0 and self.kl_placement == "loss":
            raise ValueError(
                f"skip_zero_advantage cannot be combined with beta={self.beta} and kl_placement='loss', which trains "
                "episodes without advantage too. Set kl_placement='reward' or 'advantage', beta=0.0, or "
                "skip_zero_advantage=False."
            )
        for name, idle in (
            ("entropy_coef", 0.0), ("use_adaptive_entropy", False), ("top_entropy_quantile", 1.0),
        ):  # fmt: skip
            if getattr(self, name) != idle:
                raise ValueError(
                    f"skip_zero_advantage cannot be combined with {name}={getattr(self, name)!r}, which trains episodes "
                    f"without advantage too. Set {name}={idle!r} or skip_zero_advantage=False."
                )

    def _check_turn_level(self) -> None:
        if self.loss_type == "vespo":
            raise ValueError(
                "loss_type='vespo' pools the ratio over the sequence by itself and cannot be combined with "
                "importance_sampling_level='turn'. Use importance_sampling_level='token'."
            )
        if self.top_entropy_quantile < 1.0:
            raise ValueError(
                f"top_entropy_quantile={self.top_entropy_quantile} drops tokens out of a turn whose ratio is pooled over "
                "all of them. Use top_entropy_quantile=1.0 or importance_sampling_level='token'."
            )
        if self.turn_ratio_pooling == "sum" and self.off_policy_mask_threshold is not None:
            raise ValueError(
                "off_policy_mask_threshold compares mean log-probabilities, which turn_ratio_pooling='sum' changes. Use "
                "turn_ratio_pooling='mean' or leave off_policy_mask_threshold unset."
            )

    def _episodes_per_generation(self) -> int:
        """A group size that TRL's check of the generation batch lets pass, for algorithms without groups."""
        local = micro_batch(self) * (self.steps_per_generation or self.gradient_accumulation_steps or 1)
        episodes = self.generation_batch_size or local
        if episodes < 2:
            raise ValueError(
                "A generation batch of one episode has nothing to be compared with. Raise per_device_train_batch_size or "
                "gradient_accumulation_steps."
            )
        return episodes

    @classmethod
    def _own_fields(cls) -> set[str]:
        trl = {f.name for f in fields(GRPOConfig)}
        return {f.name for f in fields(cls)} - trl


_BATCH = ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
"""What makes an update larger than a micro-batch."""

_NO_EFFECT = {
    "use_transformers_continuous_batching": "the rollout generator admits and retires episodes at every token already",
    "use_transformers_paged": "the rollout generator admits and retires episodes at every token already",
    "transformers_continuous_batching_config": "the rollout generator does its own batching",
    "cache_implementation": "the rollout generator keeps its own KV cache between turns",
    "generation_kwargs": "set temperature, top_p, top_k, min_p, repetition_penalty, min_new_tokens or stop_strings",
    "max_tool_calling_iterations": "an environment's turns are limited by max_turns",
    "num_generations_eval": "evaluate() plays num_eval_episodes episodes of their own",
    "enable_jit_checkpoint": "it saves in the middle of a step; send SIGINT (Ctrl-C), which saves at its end and stops",
    "multi_objective_aggregation": "rewards are added to the turns before anything is normalized",
}


def _default(f: Any) -> Any:
    return f.default_factory() if f.default is MISSING else f.default


def _one_of(config: Any, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
