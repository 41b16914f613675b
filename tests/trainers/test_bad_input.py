"""Bad input is refused at construction, by an error that names the value and the way out."""

from __future__ import annotations

import re

import pytest
from datasets import Dataset
from games import Chatter, make_trainer, settings
from transformers import AutoTokenizer

from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"importance_sampling_level": "word"}, "importance_sampling_level must be one of 'token', 'turn', 'sequence'"),
        ({"turn_ratio_pooling": "max"}, "turn_ratio_pooling must be one of 'mean', 'sum', got 'max'"),
        ({"advantage_granularity": "episode"}, "advantage_granularity must be one of 'turn', 'trajectory'"),
        ({"turn_credit": "value"}, "turn_credit must be one of 'return', 'reward', got 'value'"),
        ({"advantage_baseline": "median"}, "advantage_baseline must be one of 'mean', 'leave_one_out'"),
        ({"max_turns": 0}, "max_turns must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"num_eval_episodes": 0}, "num_eval_episodes must be at least 1"),
        ({"generation_chunk_size": 0}, "generation_chunk_size must be at least 1"),
        ({"min_new_tokens": 6}, "min_new_tokens must lie between 0 and max_new_tokens=5, got 6"),
        ({"gamma": 1.5}, "gamma is a discount per turn and must lie in [0, 1], got 1.5"),
        ({"advantage_clip_range": -1.0}, "advantage_clip_range must be positive, got -1.0"),
        ({"num_generations": 3}, "must be divisible by num_generations (3)"),
        ({"loss_type": "gspo"}, "loss_type='grpo' with importance_sampling_level='sequence'. Use MultiTurnGSPOConfig"),
        ({"loss_type": "ppo"}, "loss_type must be one of 'grpo', 'bnpo'"),
        ({"scale_rewards": "std"}, "scale_rewards must be one of 'group', 'batch', 'none', got 'std'"),
        ({"scale_rewards": "mean_only"}, "What AgileRL calls 'mean_only' is 'none'"),
        (
            {"epsilon": (0.8, 1.3)},
            "got (0.8, 1.3). AgileRL's clip_coef holds bounds of the ratio; here are their distances "
            "from 1: set epsilon=0.2 and epsilon_high=0.3",
        ),
        ({"epsilon": (0.2, 0.28)}, "Set epsilon=0.2 and epsilon_high=0.28"),
        ({"epsilon_high": [0.8, 1.3], "loss_type": "cispo"}, "set epsilon_high=1.3"),
        ({"epsilon": -0.1}, "epsilon must not be negative, got -0.1"),
        ({"epsilon_high": "0.3"}, "epsilon_high must be a number, got '0.3'"),
        ({"delta": 0.0}, "delta must be positive, got 0.0"),
        ({"beta": -0.1}, "beta must not be negative, got -0.1"),
        ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "sapo_temperature_neg must be positive, got 0.0"),
        ({"top_entropy_quantile": 1.5}, "top_entropy_quantile must lie in [0, 1], got 1.5"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of must be at least 1, got 0"),
        ({"num_iterations": 0}, "num_iterations must be at least 1, got 0"),
        ({"steps_per_generation": 0}, "steps_per_generation must be at least 1, got 0"),
    ],
)
def test_values_out_of_range(tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MultiTurnGRPOConfig(**settings(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_completion_length": 99}, "it is max_turns * max_new_tokens = 20"),
        ({"loss_type": "vespo", "importance_sampling_level": "turn"}, "'vespo' pools the ratio over the sequence"),
        ({"top_entropy_quantile": 0.2, "importance_sampling_level": "turn"}, "top_entropy_quantile=0.2 drops tokens"),
        ({"turn_ratio_pooling": "sum"}, "acts on importance_sampling_level='turn' only"),
        (
            {"turn_ratio_pooling": "sum", "importance_sampling_level": "turn", "off_policy_mask_threshold": 0.5},
            "off_policy_mask_threshold compares mean",
        ),
        (
            {"turn_credit": "reward", "advantage_granularity": "trajectory"},
            "advantage_granularity='turn' or 'anchor' only",
        ),
        ({"gamma": 0.9, "advantage_granularity": "trajectory"}, "gamma=0.9 discounts the return of a turn"),
        ({"gamma": 0.9, "turn_credit": "reward"}, "gamma=0.9 discounts the return of a turn"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs={'num_beams': 2} has no effect"),
        ({"cache_implementation": "static"}, "cache_implementation='static' has no effect"),
        ({"max_tool_calling_iterations": 3}, "limited by max_turns"),
        ({"num_generations_eval": 2}, "num_eval_episodes episodes"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation='normalize_then_sum'"),
        ({"max_model_length": 10**6}, "max_model_length=1000000 is more than the model's max_position_embeddings=4096"),
        ({"max_model_length": 10}, "leaves no room to answer within max_model_length=10"),
        ({"max_steps": -1}, "Without a train_dataset, max_steps must say how long to train; it is -1"),
        (
            {"environment_timeout": 1.0},
            "environment_timeout=1.0 cannot interrupt an environment that is stepped inline",
        ),
        ({"environment_workers": -1}, "environment_workers must be 0 (inline) or more, got -1"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"reward_weights": [1.0]}, "reward_weights has 1 entries for 0 reward_funcs"),
        ({"loss_type": "cispo", "epsilon": 0.3}, "epsilon=0.3 has no effect with loss_type='cispo'"),
        ({"loss_type": "cispo", "epsilon": 0.3}, "set epsilon_high"),
        ({"delta": 4.0, "loss_type": "sapo"}, "delta=4.0 has no effect with loss_type='sapo'"),
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos=2.0 has no effect with loss_type='dapo'"),
        ({"vespo_k_pos": 1.0}, "vespo_k_pos=1.0 has no effect with loss_type='dapo'"),
    ],
)
def test_what_an_environment_would_ignore_or_cannot_do(embedded_model, tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_trainer(embedded_model, tmp_path, **changes)


class NoStep:
    def reset(self, seed=None, options=None):
        return "hello", {}


class ShortStep(Chatter):
    def step(self, action):
        return "x", 1.0


class Crashing(Chatter):
    def reset(self, seed=None, options=None):
        raise RuntimeError("no server")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (NoStep, "NoStep has no method step"),
        (ShortStep, "step"),
        (Crashing, "no server"),
        ("agile:guess_numbr", "agile:guess_number"),
        (Chatter(), "Chatter"),
    ],
)
def test_unsound_environments(embedded_model, tmp_path, environment, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        make_trainer(embedded_model, tmp_path, environment=environment)


@pytest.mark.parametrize("argument", ["tools", "rollout_func", "environment_factory"])
def test_trls_own_ways_to_act_exclude_an_environment(embedded_model, tmp_path, argument):
    with pytest.raises(ValueError, match=f"`{argument}` cannot be used together with `environment`"):
        MultiTurnGRPOTrainer(
            model=str(embedded_model),
            args=MultiTurnGRPOConfig(**settings(tmp_path)),
            environment=Chatter,
            **{argument: [print] if argument == "tools" else print},
        )


def test_vllm_that_is_not_installed(embedded_model, tmp_path):
    pytest.importorskip("trl")
    from trl.import_utils import is_vllm_available

    if is_vllm_available():
        pytest.skip("vLLM is installed here")
    with pytest.raises(ImportError, match=r"pip install 'agile-trainers\[vllm\]'"):
        make_trainer(embedded_model, tmp_path, use_vllm=True)


def test_a_template_that_rewrites_earlier_turns(embedded_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        MultiTurnGRPOTrainer(
            model=str(embedded_model),
            args=MultiTurnGRPOConfig(**settings(tmp_path)),
            processing_class=tokenizer,
            environment=Chatter,
        )


def test_too_few_rows_to_train_a_single_step(embedded_model, tmp_path):
    with pytest.raises(ValueError, match=r"1 rows, but a generation batch takes 2.*not a single step"):
        make_trainer(embedded_model, tmp_path, train_dataset=Dataset.from_dict({"secret": [1]}))


def test_a_configuration_of_another_kind(embedded_model, tmp_path):
    from trl import GRPOConfig

    with pytest.raises(TypeError, match="takes a MultiTurnGRPOConfig as `args`, got GRPOConfig"):
        MultiTurnGRPOTrainer(
            model=str(embedded_model), args=GRPOConfig(output_dir=str(tmp_path), use_cpu=True), environment=Chatter
        )


def test_the_users_configuration_is_left_as_it_was(embedded_model, tmp_path):
    args = MultiTurnGRPOConfig(**settings(tmp_path, reward_weights=[2.0]))
    before = args.to_dict()
    for _ in range(2):
        MultiTurnGRPOTrainer(
            str(embedded_model), lambda completions, **_: [0.0] * len(completions), args, environment=Chatter
        )
    assert args.to_dict() == before
