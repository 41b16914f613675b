"""What the seam takes for granted about TRL. A TRL upgrade that changes it fails here, by name, and nowhere else."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from collections import deque
from typing import Any

import pandas as pd
import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from datasets import Dataset
from games import LORA, make_trainer
from peft import LoraConfig
from transformers import TrainerState
from trl import GRPOConfig, GRPOTrainer, TrlParser
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.kernels import chunked_logprob
from trl.models import utils as model_utils
from trl.scripts.grpo import GRPOScriptArguments
from trl.trainer import utils

from agile_trainers import MultiTurnTrainer

SIGNATURES = {
    "_generate_and_score_completions": ["self", "inputs"],
    "_compute_loss": ["self", "model", "inputs"],
    "_prepare_inputs": ["self", "generation_batch"],
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "evaluate": ["self", "eval_dataset", "ignore_keys", "metric_key_prefix"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "_get_train_sampler": ["self", "dataset"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_load_best_model": ["self"],
    "_load_rng_state": ["self", "checkpoint"],
    "_push_from_checkpoint": ["self", "checkpoint_folder"],
    "_finish_current_push": ["self"],
    "_get_output_dir": ["self", "trial"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
    "save_model": ["self", "output_dir", "_internal_call"],
    "train": ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_finalize_training": ["self", "trial", "num_train_samples", "start_time"],
    "_run_epoch": [
        "self",
        "model",
        "epoch",
        "train_dataloader",
        "steps_in_epoch",
        "num_update_steps_per_epoch",
        "trial",
        "ignore_keys_for_eval",
        "start_time",
        "resume_from_checkpoint",
        "epochs_trained",
        "steps_trained_in_current_epoch",
    ],
    "_maybe_log_save_evaluate": [
        "self",
        "tr_loss",
        "grad_norm",
        "model",
        "trial",
        "epoch",
        "ignore_keys_for_eval",
        "start_time",
        "learning_rate",
    ],
}
IMAGES = {
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
}  # fmt: skip
SCORE_ARGUMENTS = {
    "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss",
}  # fmt: skip
INIT_ARGUMENTS = [
    "self", "model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class",
    "reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config", "tools", "rollout_func",
    "environment_factory",
]  # fmt: skip
LOSS_READS = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages", "num_items_in_batch",
    "old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps",
}  # fmt: skip


def parameters(function) -> list[str]:
    return list(inspect.signature(inspect.unwrap(function)).parameters)


@pytest.mark.parametrize("name", SIGNATURES)
def test_methods_we_override_or_call(name):
    assert parameters(getattr(GRPOTrainer, name)) == SIGNATURES[name]


def test_scoring_takes_our_keywords_and_returns_three_things():
    assert set(parameters(GRPOTrainer._get_per_token_logps_and_entropies)) == SCORE_ARGUMENTS | IMAGES
    returned = inspect.signature(inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies)).return_annotation
    assert "tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]" in str(returned).replace("typing.", "")


def test_constructor_arguments_are_the_ones_we_pass_on():
    assert parameters(GRPOTrainer.__init__) == INIT_ARGUMENTS


def test_the_loss_reads_the_keys_we_write():
    """And no other: a mask of what the sampler kept (TRL 1.17) has to come from our kept sets, or is counted twice."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert set(re.findall(r'inputs(?:\.get)?[\[(]"(\w+)"', source)) == LOSS_READS | IMAGES


def test_the_loss_is_weighed_where_vllm_samples():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert 'per_token_loss * inputs["importance_sampling_ratio"]' in source
    assert "self.use_vllm and self.vllm_importance_sampling_correction" in source


def test_the_weights_of_a_whole_model_have_vllms_names():
    """``_WholeModel`` has no engine; a server's policy is sent, and the description of its weights is read back."""
    assert parameters(VLLMGeneration.__init__)[:4] == ["self", "model", "accelerator", "processing_class"]
    server = {"mode", "server_base_url", "server_timeout", "group_port"}
    assert server <= set(parameters(VLLMGeneration.__init__))
    for name in ("_iter_named_params", "_init_vllm", "sync_weights"):
        assert parameters(getattr(VLLMGeneration, name)) == ["self"]
    source = inspect.getsource(VLLMGeneration.sync_weights)
    assert "update_named_params(self._weight_metadata, self._iter_named_params())" in source


def test_the_client_of_a_vllm_server():
    """Its session, its URL, and the answers to our two requests; a running server: tests/on_vllm."""
    assert {"base_url", "connection_timeout"} <= set(parameters(VLLMClient.__init__))
    source = inspect.getsource(VLLMClient.__init__)
    assert "self.session = requests.Session()" in source and "self.base_url = " in source
    assert parameters(VLLMClient.get_server_info) == ["self"]
    assert parameters(VLLMClient.generate)[:2] == ["self", "prompts"]
    assert "generation_kwargs" in parameters(VLLMClient.generate)
    source = inspect.getsource(VLLMClient.generate)
    assert '"completion_ids": completion_ids' in source and '"logprobs": logprobs' in source


def test_the_fused_heads_output_and_arguments():
    """``ActorCriticOutput`` adds a field to TRL's; packed rows replace the per-token fields that TRL asks for."""
    fields = dataclasses.fields(utils.FusedCausalLMOutput)
    names = ["loss", "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask", "aux_loss"]
    assert [(field.name, field.default) for field in fields] == [(name, None) for name in names]
    given = inspect.signature(utils.add_fused_lm_head).parameters
    assert {name: one.default for name, one in given.items() if name != "model"} == {
        "temperature": 1.0, "cast_lm_head_to_fp32": False, "outputs": ("log_probs",),
    }  # fmt: skip
    source = inspect.getsource(GRPOTrainer.__init__)
    (call,) = [part.partition(")\n")[0] for part in source.split("add_fused_lm_head(")[1:] if "outputs=" in part]
    assert 'outputs=("log_probs", "entropy")' in call


def test_the_tiles_of_the_fused_head():
    """The memory plan counts them, as tokens and as words of the vocabulary."""
    assert (chunked_logprob.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE) == (4096, 32768)


def test_the_arguments_of_trls_script_are_the_ones_the_command_reads():
    assert {field.name for field in dataclasses.fields(GRPOScriptArguments)} == {
        "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming",
        "ignore_bias_buffers", "reward_model_name_or_path", "reward_funcs",
    }  # fmt: skip


def test_the_parser_of_trl():
    assert parameters(TrlParser.__init__) == ["self", "dataclass_types", "kwargs"]
    given = ["self", "args", "return_remaining_strings", "fail_with_unknown_args", "separate_remaining_strings"]
    assert parameters(TrlParser.parse_args_and_config) == given
    assert parameters(TrlParser.set_defaults_with_config) == ["self", "kwargs"]
    parser = TrlParser([GRPOConfig])
    assert parser.dataclass_types == [GRPOConfig]
    # The file's values come through the method that we override, and `--config` is TRL's to remove.
    source = inspect.getsource(TrlParser.parse_args_and_config)
    assert "self.set_defaults_with_config(**" in source and '"--config"' in source


def test_attributes_of_an_instance(embedded_model, tmp_path):
    from games import make_trainer

    trainer = make_trainer(embedded_model, tmp_path)
    for name in (
        "_step", "_buffered_inputs", "_metrics", "_logs", "_tokenizer", "_dist", "eos_token_ids", "num_generations",
        "num_iterations", "importance_sampling_level", "scale_rewards", "beta", "ref_model", "reward_weights",
        "reward_func_names", "mask_truncated_completions", "pad_to_multiple_of", "temperature", "top_p", "top_k",
        "min_p", "repetition_penalty", "chat_template_kwargs", "use_vllm", "vllm_importance_sampling_correction",
    ):  # fmt: skip
        assert hasattr(trainer, name), name
    assert set(trainer._logs) >= {"prompt", "completion", "rewards", "advantages"}


def test_the_order_of_an_epoch_is_drawn_from_the_samplers_own_generator():
    sampler = utils.RepeatSampler(range(9), 1, seed=4)
    generator = torch.Generator().manual_seed(4)
    for _ in range(2):
        assert list(sampler) == torch.randperm(sampler.num_samples, generator=generator).tolist()


def test_extra_batch_entries_survive_shuffle_and_split():
    batch = {"a": torch.arange(4), "turn_ids": torch.arange(8).view(4, 2), "zero_dimensional": torch.tensor(7)}
    shuffled = utils.shuffle_sequence_dict(batch)
    parts = utils.split_tensor_dict(shuffled, 2)
    assert torch.cat([p["turn_ids"] for p in parts])[:, 0].tolist() == (2 * shuffled["a"]).tolist()
    assert all(p["zero_dimensional"] == 7 for p in parts)


def test_a_step_is_skipped_by_accelerates_flag():
    """Read after the gradient's norm and before the schedule moves."""
    source = inspect.getsource(GRPOTrainer._run_epoch)
    marks = ["self._get_grad_norm(", "self.optimizer.step()", "optimizer_step_was_skipped", "self.lr_scheduler.step()"]
    places = [source.index(mark) for mark in marks]
    assert places == sorted(places)
    assert "self._is_overflow" in inspect.getsource(AcceleratedOptimizer.step_was_skipped.fget)


def test_what_a_coming_trl_is_expected_to_change():
    """What to do then. The mask of TRL 1.17 also changes what is scored and read, which the tests above state."""
    options = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert "padding_free" not in options, "Rows are packed twice: refuse padding_free with sequence_packing (trl#7087)."
    assert {name for name in options if "mask" in name} == {
        "mask_truncated_completions",
        "off_policy_mask_threshold",
    }, "An option for the mask of a filter has no effect with episodes, or must have that of our kept sets."
    source = inspect.getsource(GRPOTrainer._generate)
    returned = source.rstrip().rpartition("return ")[2]
    assert (
        returned == "prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"
    ), "TRL's generation returns the kept tokens: compare its ratios under filters with ours (test_truncated_runs.py)."
    assert importlib.util.find_spec("trl.experimental.async_grpo"), (
        "AsyncGRPOTrainer has moved (TRL 1.18): compare docs/trl.md's table with it anew."
    )


def test_helpers_exist():
    assert callable(model_utils.unwrap_model_for_generation) and callable(utils.use_adapter)
    assert callable(model_utils.disable_gradient_checkpointing)


# ------------------------------------------------------------------------------------------------------- side effects


def digest(value):
    """What a method may have changed about an attribute: a number's value, what a container holds, else its identity."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {key: digest(item) for key, item in value.items()}
    if isinstance(value, deque):
        return repr(value)
    return digest(vars(value)) if isinstance(value, TrainerState) else id(value)


def left_by(trainer, method, *arguments):
    """The attributes that a call changed, a state's field and a dictionary's key by their own names."""
    before = {name: digest(value) for name, value in vars(trainer).items()}
    getattr(trainer, method)(*arguments)
    changed = set()
    for name, value in vars(trainer).items():
        now = digest(value)
        if isinstance(now, dict) and isinstance(before.get(name), dict):
            changed |= {f"{name}.{key}" for key in now if now[key] != before[name].get(key)}
        elif now != before.get(name, "absent"):
            changed.add(name)
    return changed


def judge(completions, log_metric, log_extra, **_):
    log_metric("judged", len(completions))
    log_extra("note", [completion[0]["content"] for completion in completions])
    return [float(len(completion[0]["content"])) for completion in completions]


@pytest.fixture(scope="module")
def both(embedded_model, tmp_path_factory):
    """TRL's trainer and ours after one step with an evaluation and the table, and what one more batch and loss left."""
    from games import Chatter, make_trainer, settings

    options = {"eval_strategy": "steps", "eval_steps": 1, "log_completions": True}
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": str(n)}] for n in range(4)]})
    made = {}
    for name in ("trl", "ours"):
        folder = tmp_path_factory.mktemp(name)
        if name == "ours":
            trainer = make_trainer(
                embedded_model, folder, environment=Chatter, reward_funcs=judge, train_dataset=rows, eval_dataset=rows,
                num_eval_episodes=4, **options,
            )  # fmt: skip
        else:
            changes = settings(folder, **options)
            for theirs in ("max_turns", "max_new_tokens", "stop_strings"):
                del changes[theirs]
            args = GRPOConfig(**changes, max_completion_length=5, per_device_eval_batch_size=4)
            trainer = GRPOTrainer(str(embedded_model), judge, args, rows, rows, peft_config=LoraConfig(**LORA))
        trainer.train()
        table = pd.read_parquet(folder / "completions/completions_00001.parquet")
        history = trainer.state.log_history
        trainer.model.train()
        batches = []
        score = trainer._generate_and_score_completions
        trainer._keep = lambda inputs, score=score, batches=batches: batches.append(score(inputs))
        inputs = [dict(rows[n // 4]) for n in range(8)]
        scored = left_by(trainer, "_keep", inputs)
        lost = left_by(trainer, "_compute_loss", trainer.model, batches[0])
        made[name] = {
            "train": set(history[0]), "eval": set(history[1]), "table": set(table.columns), "scored": scored, "loss": lost,
            "pending": [*trainer._pending_metrics, *trainer._pending_extra_logs],
        }  # fmt: skip
    return made


def test_what_a_batch_and_a_loss_leave_on_the_trainer(both):
    batch = {"_metrics.train", "state.num_input_tokens_seen"} | {
        f"_logs.{name}" for name in ("prompt", "completion", "rewards", "advantages", "extra")
    }
    assert both["trl"]["scored"] == batch and both["trl"]["loss"] == {"_metrics.train"}
    assert both["ours"]["scored"] == batch and both["ours"]["loss"] == {"_metrics.train"}
    assert both["trl"]["pending"] == both["ours"]["pending"] == []


def test_whoever_reads_trls_logs_finds_them(both):
    assert both["trl"]["train"] <= both["ours"]["train"]
    assert both["ours"]["table"] - both["trl"]["table"] == {"environment"}
    assert both["trl"]["table"] <= both["ours"]["table"]
    # Evaluation computes no loss and has no groups.
    missing = both["trl"]["eval"] - both["ours"]["eval"]
    assert {name for name in missing if "clip_ratio/" not in name} == {
        "eval_loss", "eval_entropy", "eval_steps_per_second", "eval_frac_reward_zero_std",
    }  # fmt: skip


def test_overrides_stand_in_the_order_in_which_they_are_called(embedded_model, tmp_path, monkeypatch):
    """In a resumed run with an evaluation, a checkpoint and a best model; those of the Hub stand after them."""
    run = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "num_eval_episodes": 2}
    run |= {"load_best_model_at_end": True, "metric_for_best_model": "return"}
    make_trainer(embedded_model, tmp_path, max_steps=1, **run).train()
    trainer = make_trainer(embedded_model, tmp_path, max_steps=2, **run)
    called: list[str] = []

    def traced(name: str, method: Any) -> Any:
        def first(*args: Any, **kwargs: Any) -> Any:
            if name not in called:
                called.append(name)
            return method(*args, **kwargs)

        return first

    overrides = [name for name, method in vars(MultiTurnTrainer).items() if inspect.isfunction(method)]
    overrides = [name for name in overrides if hasattr(GRPOTrainer, name) and not name.startswith("__")]
    for name in overrides:
        monkeypatch.setattr(MultiTurnTrainer, name, traced(name, vars(MultiTurnTrainer)[name]))
    trainer.train(resume_from_checkpoint=True)
    hub = overrides[overrides.index("init_hf_repo") :]
    assert [name for name in called if name not in hub] == [
        name for name in overrides if name in called and name not in hub
    ]
    assert set(overrides) - set(called) == {
        "hyperparameter_search", "predict", "init_hf_repo", "push_to_hub", "_push_from_checkpoint",
    }  # fmt: skip
