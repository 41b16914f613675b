"""Options that every multi-turn trainer shares, on top of TRL's ``GRPOConfig``."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from trl import GRPOConfig

from agile_trainers.checkpoints.disclosure import is_withheld, public_options
from agile_trainers.config.batch_defaults import TRL_LEARNING_RATE, accumulation, micro_batch, take_trl_batch
from agile_trainers.config.launch_checks import fall_back_to_cpu, fill_deepspeed
from agile_trainers.config.options import default_of, option, with_args
from agile_trainers.config.other_names import meant
from agile_trainers.config.rules import (
    CISPO_BOUND,
    EPISODES,
    SIZES,
    VALUES,
    Rule,
    check_best,
    check_environment_names,
    check_kinds,
    check_limits,
    check_rules,
)
from agile_trainers.envs.context import name_of_history
from agile_trainers.objectives.demonstrations import ADVANTAGE_SFT
from agile_trainers.objectives.distillation import IMMEDIATE
from agile_trainers.rollout.episode_options import EpisodeOptions

TRL_COMPLETION_LENGTH = 512
"""TRL's default for ``max_completion_length``, which applies when there is no environment."""
TRL_SAMPLING_MODE = "sequence_mask"
"""TRL's default for ``vllm_importance_sampling_mode``, which applies when there is no environment."""

_SIMPLE = (bool, int, float, type(None), torch.device)
"""Types of the attributes besides the options that are pickled."""

_BATCH = ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
"""Options that make an update larger than a micro-batch."""


@with_args
@dataclass
class MultiTurnConfig(GRPOConfig):
    """Configuration shared by the multi-turn trainers.

    Everything in TRL's ``GRPOConfig`` keeps its name, default and meaning, except for what is listed here. With an
    environment, ``vllm_importance_sampling_*`` act without vLLM too, and ``epsilon_high`` defaults to 5.0 with
    ``loss_type="cispo"``, whose weights TRL's default would cut to a fifth. For ``vllm_*`` see ``docs/vllm.md``.

    A field that TRL does not have acts only with an environment; setting one without is an error.
    """

    groupless: ClassVar[bool] = False
    """True for an algorithm without groups (``num_generations=1``); set by a subclass."""
    iterations: ClassVar[int] = 1
    """Updates of a generation batch where ``num_iterations`` is unset, with an environment."""
    has_critic: ClassVar[bool] = False
    """True for an algorithm with a critic, whose values the credit rule gets; set by a subclass."""
    bootstrap_at_limits = False
    """True: after a limit an episode is worth what the critic expects; an option of PPO."""
    rewarded: ClassVar[bool] = True
    """False for an algorithm whose gradient does not depend on rewards; set by a subclass."""
    value_rules: ClassVar[tuple[Rule, ...]] = ()
    """The algorithm's rules for values, checked at construction after those of all algorithms."""
    episode_rules: ClassVar[tuple[Rule, ...]] = ()
    """The algorithm's rules for a run with an environment."""
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *GRPOConfig._VALID_DICT_FIELDS, "environment_limits", "history", "teacher",
    ]  # fmt: skip

    learning_rate: float | None = option(
        None,
        "Learning rate. A rate of 1e-6 or less for an adapter gives a warning. Default: 1e-5 for an adapter in an "
        "environment, otherwise TRL's 1e-6, which is for whole models.",
    )
    num_iterations: int = option(
        None,
        "Updates of each generation batch, which `max_steps` counts; each reads all episodes once. Default: 4 with GRPO "
        "and PPO in an environment ([half of the episodes](grpo.md#updates-of-a-batch)), otherwise, and where an update "
        "takes several generation batches, 1.",
    )
    gradient_accumulation_steps: int | None = option(
        None,
        "Micro-batches of one update on each process. Default: the fewest with which one update, over all processes, sees "
        "8 whole groups (64 episodes without groups); 1 without an environment, and with `steps_per_generation` or "
        "`generation_batch_size`.",
    )
    max_completion_length: int | None = option(
        None,
        "Tokens of an episode, and Dr. GRPO's divisor. With an environment it is derived and cannot be set. "
        "Default: `max_turns * max_new_tokens`; without an environment 512, as in TRL.",
    )
    metric_for_best_model: str | None = option(
        None,
        "Metric of `evaluate()` that chooses the best checkpoint; required with several evaluation data sets. Default: "
        "`reward` with `reward_funcs`, else `return`; without an environment the loss, as in transformers.",
    )
    disable_dropout: bool | None = option(
        None,
        "Disable dropout, layer drop and router jitter of every kind, so that every ratio is 1 before the first update. "
        "Default: True with an environment, else False.",
    )
    importance_sampling_level: str = option(
        "token",
        "Unit of the importance ratio: `token`, `turn` or `sequence` (also called `trajectory`). `turn` needs an "
        "environment.",
    )
    max_turns: int = option(EpisodeOptions.max_turns, "Turns after which an episode is cut short.")
    max_new_tokens: int = option(EpisodeOptions.max_new_tokens, "Tokens of one answer, at most.")
    min_new_tokens: int = option(0, "Tokens of one answer before an end-of-turn token may be sampled.")
    max_model_length: int | None = option(
        None,
        "Tokens of the whole conversation, prompt included. It is also the length of vLLM's engine. Default: the model's "
        "`max_position_embeddings`.",
    )
    max_observation_length: int = option(
        EpisodeOptions.max_observation_length,
        "Characters of one observation, at most. A longer one is cut, with a note to the model.",
    )
    stop_strings: list[str] | None = option(None, "Strings that end an answer. They stay part of it.")
    system_prompt: str | None = option(None, "System message before a first observation that has no system message.")
    training_chat_template: bool = option(
        False,
        "Use a version of the chat template that keeps earlier turns, and save it with the model. Templates such as "
        "Qwen3's rewrite them. The version is TRL's, or our own where TRL's rewrites them too.",
    )
    on_rewrite: str = option(
        EpisodeOptions.on_rewrite,
        "Treatment of a chat template that rewrites earlier turns: `fork` trains on conversations as they are served, "
        "with new paths ([chat templates](chat_templates.md)); `refuse` is an error.",
    )
    history: dict[str, str] | str | None = option(
        None,
        "Function that rewrites what the model sees before each answer ([rewritten contexts](history.md)), or the name of "
        "one: `full`, `last:N` (exchanges), `observations:N`, `images:N`, `summary:N` (tokens), `module.path:function`. A "
        "dictionary has one for each of several environments. Default: the environment's own `context`, if it defines that.",
    )
    turn_ratio_pooling: str = option(
        "mean", "Pooling of the log-ratios of a turn's tokens with `importance_sampling_level=turn`: `mean` or `sum`."
    )
    gamma: float = option(1.0, "Discount per turn, in [0, 1]. It does not depend on a turn's length in tokens.")
    whiten_advantages: bool = option(
        False,
        "Shift and scale the advantages to mean 0 and deviation 1. The statistics are over all turns of all episodes of "
        "the generation batch (over tokens if these have advantages of their own).",
    )
    advantage_clip_range: float | None = option(
        None, "Clip advantages to plus or minus this, after normalization and whitening."
    )
    environment_workers: int = option(
        0,
        "Threads in which blocking environments step; 0 steps them inline, one after the other. Async environments are "
        "always awaited together.",
    )
    environment_processes: int = option(
        0,
        "Number of environments that play at once, each in a process, for work that needs a core. 0: none. The "
        "factory may be a lambda, a closure or a class of the script.",
    )
    max_environments: int | None = option(
        None, "Number of episodes that play at once, for servers with a limit; the others wait. Default: all."
    )
    environment_timeout: float | None = option(
        None, "Seconds after which a `reset` or `step` is stopped and its episode fails. Default: no limit."
    )
    environment_limits: dict[str, dict[str, int]] | str | None = option(
        None,
        'Limits of each of several environments, by name: {"guess": {"max_turns": 4}, "sums": {"max_turns": 1}}. Any of '
        "`max_turns`, `max_new_tokens`, `max_model_length` and `max_observation_length`; the common options apply to the "
        "rest. `max_completion_length` is that of the longest.",
    )
    task_sampling: str = option(
        "uniform",
        "Choice of the tasks that groups start from: `uniform` (rows in TRL's order, environments equally often), or "
        "`adaptive`, by how often a task's group is informative. `adaptive` changes the objective, see "
        "[task sampling](task_sampling.md).",
    )
    task_column: str | None = option(
        None,
        "Column of `train_dataset` that names the task of a row, such as its difficulty. Its values are logged with their "
        "share of the groups; with `adaptive` sampling, rows of one value are one task. Default: each row is one.",
    )
    resample_zero_advantage_groups: int = option(
        0,
        "Replace zero-advantage groups by fresh ones before the update, up to this many times for each generation batch "
        "(dynamic sampling, DAPO). Those that are left then stay.",
    )
    generation_chunk_size: int | None = option(
        None,
        "Number of episodes that are decoded at once; with a vLLM server, concurrent requests. Default: a batch, on a GPU "
        "without vLLM as many as fit.",
    )
    num_eval_episodes: int = option(128, "Episodes of an evaluation, in all.")
    eval_greedy: bool = option(False, "Evaluate with the likeliest token instead of sampling.")
    log_rollouts: int = option(
        1,
        "Write the episodes of every N-th generation batch, and of every evaluation, to `output_dir/rollouts/`, with what "
        "the update computed of each token ([rollout log](rollout_log.md)). True is 1; False or 0 writes nothing.",
    )
    diagnosis_interval: int = option(
        50,
        "Generation batches from one measurement of the policy to the next, for the run's diagnosis. It tells whether "
        "answers depend on their prompt, and whether updates move the policy. Each reads up to 68 prompts with an answer, "
        "without gradient. 0: none.",
    )
    kl_placement: str = option(
        "loss",
        "Place of the penalty for leaving the reference, which `beta` weighs: `loss` (k3), `reward` (of a turn) or "
        "`advantage` (each token).",
    )
    skip_zero_advantage: str = option(
        "auto",
        "Leave episodes without advantage out of the forward passes: `auto`, `True` or `False`. Loss and gradient stay; "
        "metrics of entropy and clip ratios are over the remaining episodes, and where a process's micro-batch has none "
        "over the shortest in it. `auto` does so unless something trains them: `beta` with `kl_placement=loss`, a teacher, "
        "an entropy bonus or quantile, a router's auxiliary loss, a critic.",
    )
    max_tokens_per_micro_batch: int | None = option(
        None,
        "Tokens of one forward and backward pass, at most; a longer episode has a pass of its own. Loss and gradient stay "
        "the same. It is rejected with terms that need the whole micro-batch at once: an adaptive entropy bonus, an entropy "
        "quantile, a router's auxiliary loss. Default: 2000 on CPU (up to 16000 for episodes that share most tokens), on "
        "a GPU what fits.",
    )
    sequence_packing: str = option(
        "auto",
        "Packing of the rows of a forward pass: `prefix` computes every prefix once, without padding; "
        "`none` pads the rows. `auto` packs where that costs less, checks once that packed and padded rows agree, and logs "
        "why where rows must stay padded; with `prefix` that is an error.",
    )
    zero_advantage_eps: float = option(
        1e-6,
        "Largest absolute advantage of a turn that counts as none. It acts on `skip_zero_advantage`, adaptive draws, "
        "replaced groups and metrics. A zero-advantage group is one in which no turn of any member has a larger one.",
    )
    reference_adapter: bool = option(
        False, "Use an adapter of its own, `ref`, as the reference (LoRA). It starts as a copy of the policy."
    )
    teacher: dict[str, str] | str | None = option(
        None,
        "Folder or Hub id of a [teacher](teacher.md), an adapter or a model, whose divergence is added to the loss; "
        "`http://host:port`: a vLLM server; `policy`: the policy that reads `teacher_hint`; `reference`: the reference "
        "adapter. A dictionary has one for some of several environments. Default: none.",
    )
    teacher_gradient: str = option(
        IMMEDIATE,
        "Gradient of the divergence: `immediate` (a token's log-ratio credits it alone), `return_to_go` (those to the "
        "episode's end do), `distribution_reverse` or `_forward` (KL of whole distributions).",
    )
    teacher_coef: float = option(1.0, "Weight of the teacher's part of the loss.")
    teacher_steps: float | None = option(
        None,
        "Number of updates over which `teacher_coef` falls linearly to 0, or their share of the run if it is at most 1. "
        "Then the teacher is not read any more. Default: it does not fall.",
    )
    teacher_turn_decay: float = option(1.0, "Factor of the teacher's weight from one turn to the next, in [0, 1].")
    teacher_hint: str | None = option(
        None, "Entry of the environment's `info`, such as the solution, that the teacher alone reads. Default: none."
    )
    demonstrations: str | None = option(
        None,
        "Episodes of an expert that take places of each group ([demonstrations](demonstrations.md)): a rollout log, a "
        "`.jsonl` file of conversations, a scripted policy of the environment (`expert`) or `module.path:function`. "
        "Default: none.",
    )
    demonstrations_per_group: int = option(
        1, "Places that demonstrations take, of each group; without groups, of each generation batch."
    )
    replay_successes: int = option(
        0,
        "Rows of the data set whose last success is kept. Where all members of a group fail, it takes the place of one and "
        "is trained on [as a demonstration](demonstrations.md#a-runs-own-successes).",
    )
    demonstration_loss: str = option(
        ADVANTAGE_SFT,
        "Treatment of an expert's tokens: `advantage_sft` weighs them by the advantage; `weighted` also by the policy's "
        "probability over the expert's, at most 1; `sft` by nothing.",
    )
    demonstration_coef: float = option(1.0, "Weight of a demonstration beside an own episode.")
    lora_target_scope: str | None = option(
        None, "Name of the part of the model whose modules are adapted, such as `language_model`. Default: all."
    )
    entropy_coef_schedule: str = option(
        "constant", "Schedule of `entropy_coef` over the run: `constant` or `linear` (to 0)."
    )
    activation_offload: bool = option(
        False, "Keep activations in the CPU's memory between forward and backward pass. Needs a GPU."
    )
    vllm_importance_sampling_mode: str | None = option(
        None,
        "Unit over which the correction takes the product of ratios (`token`, `turn` or `sequence`), and the treatment of "
        "products out of bounds: `_truncate` cuts them to the bound, `_mask` sets them to 0. Default: `turn_truncate` with "
        "an environment, else TRL's `sequence_mask`.",
    )
    offload_policy_during_rollout: bool = option(
        False,
        "Keep the trainer's own weights in the CPU's memory while vLLM samples. Needs a GPU; not with DeepSpeed or FSDP.",
    )
    max_logprob_gap: float | None = option(
        None,
        "Largest mean difference of log-probs between sampler and trainer, in nats a token (training-inference mismatch). A "
        "larger one gives a warning; in the first batch it is an error where rounding cannot be the cause. Default: .001 "
        "there, else .1.",
    )
    vllm_importance_sampling_correction: bool | None = option(
        None,
        "Weigh each token by the trainer's probability over the sampler's, by `vllm_importance_sampling_mode`, on any "
        "generator. Default: True with vLLM and with a `repetition_penalty`, else False.",
    )
    vllm_server_start: bool = option(
        False,
        'Start the server of `vllm_mode="server"`. It ends with this process ([a server](vllm.md#a-server)). '
        "It gets GPUs that the trainer does not use, if there are any.",
    )
    batches_ahead: int = option(
        0,
        "Number of generation batches that are played ahead of the one that is trained on. Their policies are as many "
        "batches old ([rollouts that do not wait](async.md)).",
    )
    drift_correction: str | None = option(
        "turn_truncate",
        "Weight of a token of `batches_ahead`: the ratio of its `token`, `turn` or `sequence`. `_truncate` cuts it to "
        "`drift_clip_max`, `_mask` sets it to 0 above. `decision_truncate`: weight of each reward of a return, the ratio of "
        "all turns up to it; for advantages of turns. None: no weight. [What is exact](drift.md#what-is-exact).",
    )
    drift_clip_max: float | None = option(2.0, "Largest weight of `drift_correction`. None: no bound.")
    max_wall_seconds: float | None = option(
        None,
        "Seconds after which the run finishes its optimizer step, saves and ends with exit code 0; a resumed run has as "
        "many again. The learning rate's schedule still ends at `max_steps`. Default: no limit.",
    )
    public_values: list[str] = option(
        [],
        "Environment arguments and options whose values may leave the machine, such as `level`, or `guess.level` of one of "
        "several. Other arguments, and options that are texts, lists or dictionaries, are written as their "
        "type and a digest into records, model cards and trackers ([what leaves the "
        "machine](checkpoints.md#what-leaves-the-machine)).",
    )
    keep_reference: bool = option(
        False,
        "Keep the reference that the adapter was saved with. If `model` is a folder of adapters, its `ref` is the "
        "reference, instead of the loaded policy.",
    )
    merge_lora_configs: bool = option(
        False,
        "Extend the loaded adapter to the rank and modules of `peft_config`. It gets the larger rank and the modules of "
        "both, and computes the same as before. Without this option, a `peft_config` that differs from the loaded "
        "adapter's is an error.",
    )

    def __new__(cls, *args: Any, **options: Any) -> "MultiTurnConfig":
        """Reject an option that does not exist, naming the one that is meant, or the nearest.

        Raises:
            TypeError: For such an option.
        """
        known = [one.name for one in fields(cls)]
        for name in options:
            if name not in known:
                raise TypeError(
                    f"{cls.__name__} has no option {name!r}{meant(name, known) or '.'} `agile-trainers grpo --help_all` "
                    "lists the options."
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if withheld := [name for name, value in vars(self).items() if is_withheld(value)]:
            raise ValueError(
                f"{withheld[0]}={vars(self)[withheld[0]]!r} stands for a value that does not leave the machine: to_dict() "
                "and records hold no others. Pass the value itself, or copy a configuration with copy.copy."
            )
        check_kinds(self)
        check_rules(self, SIZES)
        # TRL checks the eval batch against the group size; episodes are evaluated on their own, so that check is
        # left to `without_environment`.
        group, eval_group = vars(self)["num_generations"], vars(self)["num_generations_eval"]
        self.num_generations_eval = eval_group or 1
        self._iterations_are_ours = self.num_iterations is None
        if self._iterations_are_ours:
            self.num_iterations = self.iterations
        self._batch_is_ours = all(vars(self)[name] is None for name in _BATCH)
        if self.gradient_accumulation_steps is None:
            self.gradient_accumulation_steps = accumulation(self) if self._batch_is_ours else 1
        if self.groupless:
            self.num_generations = self._episodes_per_generation()
        fall_back_to_cpu(self)
        check_best(self)
        # `TrainingArguments` fills both in, with the loss.
        self.best_metric_is_unset = self.metric_for_best_model is None
        self.lower_is_better_was_asked = self.greater_is_better is False
        super().__post_init__()
        self._iterate_once()
        self.num_generations, self.num_generations_eval = group, eval_group
        skip = str(self.skip_zero_advantage).lower()  # the command line gives text
        setattr(self, "skip_zero_advantage", {"true": True, "false": False}.get(skip, skip))  # noqa: B010
        if self.importance_sampling_level == "trajectory":
            self.importance_sampling_level = "sequence"
        if isinstance(self.history, dict):
            self.history = {name: name_of_history(one) for name, one in self.history.items()}
        else:
            self.history = name_of_history(self.history)
        check_rules(self, (*VALUES, *self.value_rules))
        check_limits(self)

    def __getstate__(self) -> dict[str, Any]:
        # `Trainer` pickles its arguments into every folder that it saves, and W&B uploads them with a model.
        options = {one.name: one for one in fields(self)}
        shown = public_options({name: getattr(self, name) for name in options}, type(self), self.public_values)
        hidden = {name: value for name, value in shown.items() if is_withheld(value)}
        state = {name: value for name, value in vars(self).items() if name in options or isinstance(value, _SIMPLE)}
        return state | {name: default_of(options[name]) for name in hidden} | {"withheld": hidden}

    def __copy__(self) -> "MultiTurnConfig":
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "MultiTurnConfig":
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def to_dict(self) -> dict[str, Any]:
        """Return the options for trackers (W&B, TensorBoard, Trackio, ...): those values that may leave the machine."""
        return public_options(super().to_dict(), type(self), self.public_values)

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    __repr__ = __str__

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__repr__ = cls.__str__  # type: ignore[method-assign, assignment]  # `dataclass` would write one that shows tokens

    def without_environment(self) -> "MultiTurnConfig":
        """Copy the configuration for TRL's own ``GRPOTrainer``. Fields that need an environment must be unset."""
        trl = {one.name for one in fields(GRPOConfig)}
        idle = [one.name for one in fields(self) if one.name not in trl and getattr(self, one.name) != default_of(one)]
        for name in ("importance_sampling_level", "vllm_importance_sampling_mode"):
            if str(getattr(self, name)).startswith("turn"):
                idle.append(f"{name}={getattr(self, name)!r}")
        if self.scale_rewards == "mean":
            idle.append("scale_rewards='mean'")
        if idle:
            raise ValueError(
                f"{', '.join(sorted(idle))}: these options act on multi-turn episodes and would have no effect here. "
                "Name an environment (`environment=...`, --environment on the command line), or leave them unset."
            )
        args = copy.copy(self)
        if args.learning_rate is None:
            args.learning_rate = TRL_LEARNING_RATE
        if self._batch_is_ours:
            take_trl_batch(args)
        if self._iterations_are_ours:
            args.num_iterations = 1
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
        """Copy the configuration for episodes: fill in derived fields, reject options without effect.

        Args:
            names: Names of several environments; None for one.
        """
        check_rules(self, self.episode_rules)
        check_environment_names(self, names)
        each = [self.for_environment(name) for name in names or (None,)]
        length = max(one.max_turns * one.max_new_tokens for one in each)
        if self.max_completion_length not in (None, length):
            raise ValueError(
                f"max_completion_length={self.max_completion_length} cannot be set together with an environment: it is "
                f"max_turns * max_new_tokens = {length}{' of the longest environment' if names else ''}. Set max_turns, "
                "max_new_tokens (per answer) and max_model_length (whole conversation) instead."
            )
        args = copy.copy(self)
        args._iterate_once()  # the sizes may have changed since
        if args.vllm_importance_sampling_correction is None:
            penalized = self.use_vllm or self.repetition_penalty != 1.0
            args.vllm_importance_sampling_correction = penalized and not self.batches_ahead
        check_rules(args, EPISODES)
        args.max_completion_length = length
        if self.loss_type == "cispo" and self.epsilon_high is None:
            args.epsilon_high = CISPO_BOUND
        args.disable_dropout = self.disable_dropout is not False
        if args.vllm_importance_sampling_correction:
            args.vllm_importance_sampling_mode = self.vllm_importance_sampling_mode or "turn_truncate"
        return args

    def _iterate_once(self) -> None:
        """Default to one pass where several passes would be one update, which reads the same episodes again."""
        if self._iterations_are_ours and self.steps_per_generation < self.gradient_accumulation_steps:
            self.num_iterations = 1

    def for_environment(self, name: str | None) -> "MultiTurnConfig":
        """Copy the configuration with the limits of one of several environments in place of the common ones."""
        alone = copy.copy(self)
        alone.__dict__.update(EpisodeOptions.of_args(self).of(name).__dict__)
        alone.max_completion_length = alone.max_turns * alone.max_new_tokens
        return alone

    def _episodes_per_generation(self) -> int:
        """Return a group size that passes TRL's check of the generation batch, for algorithms without groups."""
        local = micro_batch(self) * (self.steps_per_generation or self.gradient_accumulation_steps or 1)
        episodes = self.generation_batch_size or local
        if episodes < 2:
            raise ValueError(
                "A generation batch needs at least two episodes, whose returns are compared. Raise "
                "per_device_train_batch_size or gradient_accumulation_steps."
            )
        return episodes
