"""Translates names of AgileRL, TRL and transformers to those of this package, for answers to unknown names."""

from __future__ import annotations

from collections.abc import Collection

from agile_trainers.imports import nearest

_HERE = {
    "activation_offload": "activation_offloading",
    "advantage_clip_range": "adv_clip_range",
    "advantage_granularity": "action_granularity",
    "args": "config training_args",
    "beta": "kl_penalty target_kl kl_coef kl_coeff init_kl_coef",
    "critic_learning_rate": "lr_critic critic_lr",
    "critic_start='policy'": "overwrite_critic_adapter",
    "critic_warmup_steps": "actor_start_step critic_warmup",
    "delta": "off_policy_token_mask_bounds",
    "environment": "rollout_func env env_factory env_fn entrypoint factory env_client env_url make_env environments "
    "ReasoningGym HuggingFaceGym PromptDatasetEnv",
    "environment_args, a mapping": "env_config env_args env_kwargs action_field observation_field",
    "environment_timeout": "io_timeout_s request_timeout_s timeout_s slot_acquire_timeout_s",
    "environment_workers": "num_workers num_envs max_concurrent_resets",
    "epsilon and epsilon_high, distances from 1": "clip_coef cliprange clip_range clip_ratio clip_eps",
    "eval_dataset": "eval_tasks test_dataset",
    "eval_steps": "evaluation_interval",
    "eval_strategy": "evaluation_strategy",
    "gae_lambda": "lam lambda_",
    "generation_batch_size, in episodes of all processes": "batch_size rollout_batch_size train_batch_size data_batch_size "
    "data_batch_size_per_gpu",
    "generation_chunk_size": "hf_generate_chunk_size max_num_seqs eval_max_concurrent_episodes",
    "gradient_accumulation_steps": "mini_batch_size num_mini_batches",
    "hyperparameters, of Population": "hp_config hpo",
    "importance_sampling_level='turn'": "turn_level_clip",
    "keep_reference": "overwrite_reference_adapter",
    "kl_placement='advantage'": "use_kl_advantage_shaping",
    "learning_rate": "lr lr_actor actor_lr",
    "load_best_model_at_end": "save_elite",
    "load_in_4bit or load_in_8bit": "quantization",
    "log_rollouts": "completion_logging",
    "logging_steps": "reporting_interval log_interval",
    "loss_type": "loss_norm",
    "lr_scheduler_type and lr_scheduler_kwargs": "cosine_lr_schedule_config min_lr_ratio lr_scheduler",
    "max_logprob_gap": "vllm_max_logprob_gap",
    "max_model_length": "max_model_len max_context_length max_prompt_length max_seq_length max_length",
    "max_new_tokens": "max_output_tokens response_length max_tokens",
    "max_steps": "training_steps total_timesteps num_steps total_steps",
    "members, of Population": "pop pop_size",
    "min_new_tokens": "min_output_tokens",
    "model": "base_model model_name actor_network actor policy",
    "model_init_kwargs": "model_config",
    "model_name_or_path": "pretrained_model_name_or_path",
    "num_eval_episodes": "eval_loop eval_samples_per_task eval_episodes",
    "num_generations": "num_rollouts group_size rloo_k num_samples",
    "num_iterations": "update_epochs num_ppo_epochs ppo_epochs",
    "num_train_epochs": "num_epochs epochs",
    "off_policy_mask_threshold": "off_policy_sequence_mask_threshold",
    "offload_policy_during_rollout": "offload_trainer_during_rollout use_memory_efficient_params",
    "output_dir": "output_path logdir elite_path checkpoint_path overwrite_checkpoints save_path",
    "peft_config": "lora_config",
    "per_device_train_batch_size": "micro_batch_size_per_gpu reduce_memory_peak micro_batch_size per_gpu_train_batch_size",
    "processing_class": "tokenizer pad_token pad_token_id pad_id chat_template_path",
    "r, of LoraConfig, or --lora_r": "lora_r lora_rank",
    "reference_adapter": "use_separate_reference_adapter ref_model",
    "report_to": "wb tensorboard wandb_api_key wandb_kwargs tensorboard_log_dir log_with",
    "resume_from_checkpoint": "load_optimizer",
    "reward_funcs": "reward_functions rubric_file_path rubric_name reward_fn reward_func reward_model reward_function",
    "rounds, of Population": "evo_steps evo_epochs",
    "save_only_model": "checkpoint_optimizer save_optimizer",
    "save_steps": "checkpoint_steps save_interval",
    "scale_rewards": "whiten_rewards adv_norm",
    "seed": "base_seed",
    "sequence_packing": "use_sequence_packing packing",
    "skip_zero_advantage": "filter_zero_adv",
    "stop_strings": "stop_token_ids stop_sequences stop",
    "strategy, of Population": "selection_strategy tournament mutation",
    "task_column": "task_family_field task_families",
    "task_sampling": "adaptive_task_sampling",
    "torch_compile and torch_compile_mode": "torch_compiler",
    "train()": "finetune_llm finetune_llm_reasoning finetune_llm_multiturn",
    "train_dataset": "tasks dataset dataset_path hf_dataset_id train_test_split dataset_name",
    "turn_value_position": "turn_value_reduction",
    "use_cpu": "device no_cuda",
    "use_vllm and vllm_mode": "vllm_config",
    "value_clip_range": "cliprange_value vf_clip_range",
    "vf_coef": "value_coef value_loss_coef",
    "vllm_enable_sleep_mode": "sleep_mode sleep_mode_level",
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_tensor_parallel_size": "tensor_parallel_size",
    "warmup_steps": "warmup_proportion warmup_ratio num_warmup_steps",
    "whiten_advantages": "adv_whitening normalize_advantages",
    "zero_advantage_eps": "adv_filter_eps",
    "entropy_coef": "ent_coef entropy_coeff",
    "environment=trl_environment(FACTORY), or the id 'trl:module.path:Class'": "environment_factory",
    "environment=trl_environment(tools=[...])": "tools",
    "epsilon_high": "clip_ratio_high clip_ratio_c epsilon_max",
    "top_k": "top_k_sampling",
    "project": "project_name wandb_project",
    "temperature, top_p, top_k and min_p": "sampling_params",
    "hub_token": "push_to_hub_token hf_token",
    "optim, or optimizers of the trainer": "optimizer optimizer_cls",
    "callbacks=[EarlyStoppingCallback(...)]": "early_stopping early_stopping_patience",
    "deepspeed": "ds_config deepspeed_config",
    "save_model(), which saves what was trained": "save_llm_checkpoint",
    "max_tokens_per_micro_batch, which batches rows of similar length": "group_by_length",
    "report_to, with TENSORBOARD_LOGGING_DIR for the folder": "logging_dir",
    "use_cpu, or the options of accelerate launch": "accelerator",
}
"""Name here to the names elsewhere."""
OTHER_NAMES = {theirs: ours for ours, names in _HERE.items() for theirs in names.split()}

_ARGUMENTS = (
    "model", "args", "environment", "reward_funcs", "train_dataset", "eval_dataset", "processing_class", "peft_config",
    "quantization_config", "callbacks",
)  # fmt: skip
"""Arguments of a trainer, not of its configuration."""
_COMMAND = {
    "args": "--config FILE",
    "callbacks": "an argument of the trainer, in Python",
    "environment=trl_environment(FACTORY), or the id 'trl:module.path:Class'": "--environment trl:module.path:Class",
    "environment=trl_environment(tools=[...])": "--environment trl:module.path:Class",
    "eval_dataset": "--dataset_test_split",
    "model": "--model_name_or_path",
    "peft_config": "--use_peft",
    "processing_class": "the tokenizer of --model_name_or_path",
    "quantization_config": "--load_in_4bit or --load_in_8bit",
    "r, of LoraConfig, or --lora_r": "--lora_r",
    "train()": "the command itself",
    "train_dataset": "--dataset_name",
}
"""Name here to what it is on the command line, where that is no option of the same name."""
_OF_POPULATION = ", of Population"
OF_CRITIC = (
    "gae_lambda", "critic_start", "critic_learning_rate", "critic_warmup_steps", "turn_value_position", "critic_layers",
    "vf_coef", "value_clip_range", "bootstrap_at_limits",
)  # fmt: skip
"""Options of algorithms with a critic alone."""


def meant(name: str, known: Collection[str], *, count: int = 3) -> str:
    """Return ``; here that is X.`` for a name of another library, or else ``; did you mean X?`` with the nearest names.

    Args:
        name: The unknown name, with its dashes if it is an option of the command line.
        known: The names that are known, as ``name`` is written.
        count: Largest number of nearest names.
    """
    plain = name.lstrip("-").replace("-", "_")
    here = OTHER_NAMES.get(plain, plain if plain in _ARGUMENTS else "")
    if (here or plain) in OF_CRITIC and not {here, plain, f"--{here or plain}"} & set(known):
        return f"; {here or plain} is an option of ppo, which trains a critic."
    if name.startswith("-"):
        here = _on_the_command_line(here, known)
    elif here in _ARGUMENTS and here not in known:
        here += ", an argument of the trainer"
    return f"; here that is {here}." if here else nearest(name, known, count=count)


def _on_the_command_line(here: str, known: Collection[str]) -> str:
    first = here.split(" ")[0].rstrip(",").partition("=")[0]
    if not here or here in _COMMAND:
        return _COMMAND.get(here, "")
    if here.endswith(_OF_POPULATION):
        return f"{here.removesuffix(_OF_POPULATION)}, in the file of agile-trainers evolve"
    return f"--{here}" if f"--{first}" in known else f"{here}, in Python"
