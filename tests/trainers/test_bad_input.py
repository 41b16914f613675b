"""Bad input is refused at construction, by an error that names the value and the way out."""

from __future__ import annotations

import re

import pytest
import torch
from datasets import Dataset
from errors import naming
from games import Chatter, make_trainer, settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, setup


@pytest.mark.parametrize(
    ("changes", "also"),
    [
        ({"importance_sampling_level": "word"}, "'sequence'"),
        ({"turn_ratio_pooling": "max"}, "'sum'"),
        ({"advantage_granularity": "episode"}, "'trajectory'"),
        ({"turn_credit": "value"}, "'return'"),
        ({"advantage_baseline": "median"}, "'leave_one_out'"),
        ({"max_turns": 0}, "at least 1"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"num_eval_episodes": 0}, "at least 1"),
        ({"generation_chunk_size": 0}, "at least 1"),
        ({"min_new_tokens": 6}, "max_new_tokens=5"),
        ({"gamma": 1.5}, "[0, 1]"),
        ({"advantage_clip_range": -1.0}, "positive"),
        ({"num_generations": 3}, "divisible"),
        ({"num_generations": 0}, "at least 2"),
        ({"num_generations": None}, "at least 2"),
        ({"loss_type": "gspo"}, "MultiTurnGSPOConfig"),
        ({"loss_type": "ppo"}, "'bnpo'"),
        ({"scale_rewards": "std"}, "'none'"),
        ({"scale_rewards": "mean_only"}, "'none'"),
        ({"epsilon": (0.8, 1.3)}, "epsilon=0.2 and epsilon_high=0.3"),
        ({"epsilon": (0.2, 0.28)}, "epsilon=0.2 and epsilon_high=0.28"),
        ({"epsilon_high": [0.8, 1.3], "loss_type": "cispo"}, "epsilon_high=1.3"),
        ({"epsilon": -0.1}, "negative"),
        ({"epsilon_high": "0.3"}, "number"),
        ({"delta": 0.0}, "positive"),
        ({"beta": -0.1}, "negative"),
        ({"sapo_temperature_neg": 0.0, "loss_type": "sapo"}, "positive"),
        ({"top_entropy_quantile": 1.5}, "[0, 1]"),
        ({"pad_to_multiple_of": 0}, "at least 1"),
        ({"num_iterations": 0}, "at least 1"),
        ({"seed": -5}, "negative"),
        ({"public_values": "level"}, "list of texts"),
        ({"steps_per_generation": 0}, "at least 1"),
    ],
)
def test_values_out_of_range(tmp_path, changes, also):
    option, value = next(iter(changes.items()))
    with pytest.raises(ValueError, match=naming({option: value}, also)):
        MultiTurnGRPOConfig(**settings(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"max_completion_length": 99}, ["max_completion_length=99", "max_turns", "20"]),
        (
            {"loss_type": "vespo", "importance_sampling_level": "turn"},
            ["loss_type='vespo'", "importance_sampling_level='turn'"],
        ),
        ({"top_entropy_quantile": 0.2, "importance_sampling_level": "turn"}, ["top_entropy_quantile=0.2"]),
        ({"turn_ratio_pooling": "sum"}, ["turn_ratio_pooling='sum'", "importance_sampling_level='turn'", "'token'"]),
        (
            {"turn_ratio_pooling": "sum", "importance_sampling_level": "turn", "off_policy_mask_threshold": 0.5},
            ["off_policy_mask_threshold", "turn_ratio_pooling='sum'"],
        ),
        (
            {"turn_credit": "reward", "advantage_granularity": "trajectory"},
            ["turn_credit='reward'", "advantage_granularity='turn'", "'anchor'", "'trajectory'"],
        ),
        ({"gamma": 0.9, "advantage_granularity": "trajectory"}, ["gamma=0.9", "advantage_granularity='trajectory'"]),
        ({"gamma": 0.9, "turn_credit": "reward"}, ["gamma=0.9", "turn_credit='reward'"]),
        ({"generation_kwargs": {"num_beams": 2}}, ["generation_kwargs={'num_beams': 2}"]),
        ({"cache_implementation": "static"}, ["cache_implementation='static'"]),
        ({"max_tool_calling_iterations": 3}, ["max_tool_calling_iterations=3", "max_turns"]),
        ({"num_generations_eval": 2}, ["num_generations_eval=2", "num_eval_episodes"]),
        ({"multi_objective_aggregation": "normalize_then_sum"}, ["multi_objective_aggregation='normalize_then_sum'"]),
        ({"max_model_length": 10**6}, ["max_model_length=1000000", "max_position_embeddings=4096"]),
        ({"max_model_length": 10}, ["max_model_length=10"]),
        ({"max_steps": -1}, ["max_steps", "-1", "train_dataset"]),
        ({"environment_timeout": 1.0}, ["environment_timeout=1.0", "inline"]),
        ({"environment_workers": -1}, ["environment_workers", "-1"]),
        ({"temperature": 0.0}, ["temperature"]),
        ({"top_p": 0.0}, ["top_p"]),
        ({"reward_weights": [1.0]}, ["reward_weights", "reward_funcs"]),
        ({"loss_type": "cispo", "epsilon": 0.3}, ["epsilon=0.3", "loss_type='cispo'", "epsilon_high"]),
        ({"delta": 4.0, "loss_type": "sapo"}, ["delta=4.0", "loss_type='sapo'"]),
        ({"sapo_temperature_pos": 2.0}, ["sapo_temperature_pos=2.0", "loss_type='dapo'"]),
        ({"vespo_k_pos": 1.0}, ["vespo_k_pos=1.0", "loss_type='dapo'"]),
        ({"chat_template_kwargs": {"enable_thinking": "False"}}, ["chat_template_kwargs", "enable_thinking='False'"]),
        (
            {"lora": {"target_modules": ["q_proj"], "layers_to_transform": [0, 99]}},
            ["layers_to_transform=[0, 99]", "99"],
        ),
        ({"lora": {"target_modules": ["q_proj"], "layers_to_transform": [-1, 0]}}, ["layers_to_transform=[-1, 0]"]),
        ({"lora": {"alpha_pattern": {"q_proj": float("nan")}}}, ["alpha_pattern['q_proj']", "nan", "finite"]),
        ({"lora": {"alora_invocation_tokens": [3, 4]}}, ["alora_invocation_tokens=[3, 4]", "token by token"]),
        ({"lora": {"rank_pattern": {"q_proj": 0}}}, ["rank_pattern['q_proj']", "at least 1", "0"]),
    ],
)
def test_what_an_environment_would_ignore_or_cannot_do(embedded_model, tmp_path, changes, names):
    with pytest.raises(ValueError, match=naming(*names)):
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


class Backwards(Chatter):
    return_range = (5.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": Backwards}, r"declares return_range=\(5.0, 1.0\)"),
        ({"eval_dataset": Dataset.from_dict({"number": []})}, "eval_dataset has no rows to evaluate on"),
        ({"eval_dataset": {"hard": Dataset.from_dict({"number": []})}}, r"eval_dataset\['hard'\] has no rows"),
        ({"lora": {"inference_mode": True}}, "No parameter of the model is trainable"),
        ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5\.0 adds noise .* Leave it unset"),
        ({"fp16": True}, r"fp16=True, or .* needs a GPU.* Use bf16=True"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True sends tensors .* Leave it unset"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True divides .* per_device_train_batch_size"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
            "gradient_accumulation_kwargs=.* set gradient_accumulation_steps",
        ),
        ({"dataloader_in_order": False, "dataloader_num_workers": 2}, "dataloader_in_order=False takes rows"),
    ],
)
def test_what_would_show_after_steps_shows_at_construction(embedded_model, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(embedded_model, tmp_path, **changes)


def test_settings_of_accelerates_that_change_no_row(tmp_path):
    """One worker has one order, too."""
    kept = {"dispatch_batches": False, "even_batches": False, "use_seedable_sampler": False, "non_blocking": True}
    options = {"accelerator_config": kept, "dataloader_in_order": False, "dataloader_num_workers": 1}
    MultiTurnGRPOConfig(**settings(tmp_path, **options)).with_environment()


def test_fp16_of_the_launch_needs_a_gpu_too(embedded_model, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match="mixed_precision of the launch configuration"):
        make_trainer(embedded_model, tmp_path)


def test_an_optimizer_of_other_parameters(embedded_model, tmp_path, monkeypatch):
    """An adapter that is made after the optimizer would not be trained, and what a user leaves out is told."""
    model = AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float32)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"holds none of the \d+ parameters that are trained, such as .*lora_A"):
        make_trainer(model, tmp_path, optimizers=(own, None))
    said: list[str] = []
    monkeypatch.setattr(setup.logger, "warning", lambda text, *values: said.append(text % values))
    model = AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float32)
    names, parameters = zip(*model.named_parameters())
    make_trainer(model, tmp_path, lora=False, optimizers=(torch.optim.SGD(parameters, lr=0.1), None))
    assert not said
    make_trainer(model, tmp_path, lora=False, optimizers=(torch.optim.SGD(parameters[1:], lr=0.1), None))
    assert len(said) == 1 and f"leaves out 1 of the {len(names)} parameters" in said[0] and names[0] in said[0]


def test_updates_that_16_bits_round_away_are_told(embedded_model, tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(setup.logger, "warning", lambda text, *values: said.append(text % values))
    make_trainer(embedded_model, tmp_path, lora=False, learning_rate=None, model_init_kwargs={"dtype": "bfloat16"})
    assert len(said) == 1 and re.search(r"(9\d|100)% of what is trained .* learning_rate=1e-06 is too small", said[0])
    make_trainer(embedded_model, tmp_path, learning_rate=None, model_init_kwargs={"dtype": "bfloat16"})  # an adapter
    make_trainer(embedded_model, tmp_path, lora=False, learning_rate=None)
    assert len(said) == 1

    def told(kind: torch.dtype, rate: float, *numbers: float) -> bool:
        before = len(said)
        layer = torch.nn.Linear(len(numbers), 1, bias=False, dtype=kind)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([numbers]))
            moved = layer.weight + torch.tensor(rate).to(kind)
        setup.warn_of_rounding(layer, rate)
        assert (len(said) > before) == ((moved == layer.weight).float().mean() > 0.5)
        return len(said) > before

    # The numbers around 1 are 2^-7 apart above and 2^-8 below in bfloat16, and 2^-10 above in float16.
    assert told(torch.bfloat16, 0.9 * 2**-8, 1.0, 1.5) and not told(torch.bfloat16, 1.1 * 2**-8, 1.0, 1.5)
    assert told(torch.float16, 0.9 * 2**-11, 1.0, 1.5) and not told(torch.float16, 1.1 * 2**-11, 1.0, 1.5)
    assert told(torch.bfloat16, 1e-6, 1.0, 1.0, 0.0) and not told(torch.bfloat16, 1e-6, 1.0, 0.0)
    assert not told(torch.float32, 1e-6, 1.0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_factory_that_returns_the_same_instance(embedded_model, tmp_path, workers):
    shared = Chatter()
    trainer = make_trainer(embedded_model, tmp_path, environment=lambda: shared, environment_workers=workers)
    with pytest.raises(ValueError, match="returned an instance that already plays another episode"):
        trainer.train()


def test_too_few_rows_to_train_a_single_step(embedded_model, tmp_path):
    with pytest.raises(ValueError, match=r"1 rows.*takes 2"):
        make_trainer(embedded_model, tmp_path, train_dataset=Dataset.from_dict({"secret": [1]}))


def test_a_configuration_of_another_kind(embedded_model, tmp_path):
    from trl import GRPOConfig

    with pytest.raises(TypeError, match=r"MultiTurnGRPOConfig.*`args`.* GRPOConfig"):
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


def test_a_search_of_hyperparameters_names_the_population(embedded_model, tmp_path):
    with pytest.raises(NotImplementedError, match="agile-trainers evolve"):
        make_trainer(embedded_model, tmp_path).hyperparameter_search(n_trials=2, backend="optuna")
