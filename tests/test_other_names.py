"""Names of AgileRL, TRL and transformers that are typed here: each is answered with what is meant."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from agilerl_options import ROWS
from transformers import TrainingArguments
from trl import GRPOConfig

from agile_trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, MultiTurnPPOConfig, MultiTurnPPOTrainer
from agile_trainers.algorithms.reinforce import MultiTurnREINFORCEConfig
from agile_trainers.cli.run_files import mapping, options_of
from agile_trainers.cli.train import OptionsOnly, launcher_options, make_parser
from agile_trainers.config.other_names import _ARGUMENTS, OF_CRITIC, OTHER_NAMES, meant
from agile_trainers.populations import Population
from agile_trainers.trainers.arguments import check_argument_names

OPTIONS = {
    one.name for config in (MultiTurnGRPOConfig, MultiTurnPPOConfig, MultiTurnREINFORCEConfig) for one in fields(config)
}
SECTIONS = {
    "Constructor arguments", "Other objects", "`VLLMConfig`", "The training loop and the manifest", "Names of older versions"
}  # fmt: skip


def names_in(text: str) -> list[str]:
    """The names at the beginning of each part: of ``epsilon and epsilon_high, distances from 1`` the first two."""
    return re.split(r" and | or ", re.split(r",|=|\(", text)[0])


def test_what_is_named_exists() -> None:
    population = set(Population.__init__.__annotations__)
    for text in OTHER_NAMES.values():
        for name in names_in(text):
            known = OPTIONS | {
                *_ARGUMENTS,
                "model_name_or_path",
                "environment_args",
                "load_in_4bit",
                "load_in_8bit",
                "train",
                "save_model",
                "r",
            }
            assert name in (population if "of Population" in text else known), text


def test_no_name_that_exists_is_called_another() -> None:
    here = OPTIONS | {one.name for config in (GRPOConfig, TrainingArguments) for one in fields(config)}
    here -= {"logging_dir", "warmup_ratio"}  # older versions of transformers have it and advise against it
    assert not here & OTHER_NAMES.keys()


def test_each_name_of_agilerls_page_is_answered_as_the_page_says() -> None:
    asked = 0
    for row in ROWS:
        if row.section not in SECTIONS or row.kind not in ("ours", "TRL", "transformers", "trainer"):
            continue
        for theirs, expected in (
            zip(row.theirs, ([name] for name, _ in row.ours))
            if len(row.theirs) == len(row.ours)
            else ((name, [name for name, _ in row.ours]) for name in row.theirs)
        ):
            if theirs not in OPTIONS | {
                *expected,
                "vllm_importance_sampling_cap",
                "path",
                "index",
                "clone",
                "verbose",
                "name",
                "save_llm_checkpoint",
            }:
                assert names_in(OTHER_NAMES[theirs])[0] in expected, theirs
                asked += 1
    assert asked > 80


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"update_epochs": 2},
            r"no option 'update_epochs'; here that is num_iterations\. `agile-trainers grpo --help_all`",
        ),
        ({"lora_config": None}, r"no option 'lora_config'; here that is peft_config, an argument of the trainer\."),
        ({"environment": "x"}, r"no option 'environment'; here that is environment, an argument of the trainer\."),
        ({"clip_coef": 0.2}, r"; here that is epsilon and epsilon_high, distances from 1\."),
        ({"max_turn": 2}, r"no option 'max_turn'; did you mean max_turns"),
    ],
)
def test_options(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        MultiTurnGRPOConfig(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"env": "x"}, r"^MultiTurnGRPOTrainer has no argument 'env'; here that is environment\.$"),
        ({"tokenizer": "x"}, r"no argument 'tokenizer'; here that is processing_class\.$"),
        (
            {"max_turns": 3},
            r"'max_turns'; it is an option of its configuration: args=MultiTurnGRPOConfig\(max_turns=\.\.\.\)\.$",
        ),
        ({"lr": 3}, r"'lr'; it is an option of its configuration: args=MultiTurnGRPOConfig\(learning_rate=\.\.\.\)\.$"),
        ({"enviroment": "x"}, r"'enviroment'; did you mean environment"),
    ],
)
def test_arguments(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        MultiTurnGRPOTrainer("model", **given)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--update_epochs=2", "there is no option --update_epochs; here that is --num_iterations."),
        ("--lora-config=x", "there is no option --lora-config; here that is --use_peft."),
        ("--env=x", "there is no option --env; here that is --environment."),
        (
            "--clip_coef=.2",
            "there is no option --clip_coef; here that is --epsilon and epsilon_high, distances from 1.",
        ),
        ("--model_nam=x", "there is no option --model_nam; did you mean --model_name_or_path?"),
    ],
)
def test_the_command_line(typed: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser("grpo").refuse([typed])
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_name_of_no_library_gets_the_nearest() -> None:
    assert meant("max_turn", ["max_turns"]) == "; did you mean max_turns?" and meant("qqq", ["max_turns"]) == ""


TYPED = """
accelerator actor_lr adv_norm base_model batch_size beta callbacks checkpoint_steps clip_coef clip_ratio_high
cliprange dataset deepspeed device ds_config early_stopping elite_path ent_coef env env_factory env_fn
environment_factory eval_loop evaluation_strategy evo_steps gae_lambda generation_kwargs gradient_checkpointing
group_by_length group_size hf_token kl_coef kl_penalty lam learning_rate logging_dir lora_config lora_r lr lr_actor
lr_critic max_completion_length max_grad_norm max_model_len max_output_tokens max_prompt_length max_tokens
micro_batch_size_per_gpu mini_batch_size model_name mutation no_cuda num_epochs num_rollouts num_workers optimizer
output_path pad_token_id peft_config per_gpu_train_batch_size pop_size processing_class project_name push_to_hub_token
ref_model reward_fn reward_functions rollout_batch_size rollout_func sampling_params save_llm_checkpoint scale_rewards
stop_token_ids target_kl test_dataset tokenizer tools top_k_sampling total_timesteps tournament train_dataset
training_steps update_epochs vf_coef vllm_config wandb_project warmup_ratio wb whiten_rewards
""".split()  # noqa: SIM905
"""Names of GRPOConfig, GRPOTrainer, TrainingArguments and AgileRL, now and earlier."""


PARSER = make_parser("grpo", OptionsOnly)


def parsed(*options: str) -> None:
    """Parses options as the command does."""
    _, *others = PARSER.parse_args_and_config(
        [*options], return_remaining_strings=True, separate_remaining_strings=True
    )
    launcher_options(PARSER, ["grpo", *options], [one for part in others for one in part], others[1], debug=False)


@pytest.mark.parametrize("name", TYPED)
def test_each_name_that_users_type_works_or_is_answered(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a configuration, as an argument, as an option of the command and in a file."""
    answers = []
    for place in (
        lambda: MultiTurnGRPOConfig.__new__(MultiTurnGRPOConfig, **{name: None}),
        lambda: check_argument_names(MultiTurnGRPOTrainer, [name]),
        lambda: parsed("--model_name_or_path", "model", f"--{name}", "1"),
        lambda: mapping({name: 1}, options_of(MultiTurnGRPOConfig), "stage 1"),
    ):
        try:
            place()
        except (TypeError, ValueError) as error:
            answers.append(str(error))
        except SystemExit:
            answers.append(" ".join(capsys.readouterr().err.split()))
    assert all("; here that is " in one or "is an option of" in one for one in answers), answers


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--env", "no option --env; here that is --environment."),
        ("--lr", "no option --lr; here that is --learning_rate."),
        ("--environment_factory", "here that is --environment trl:module.path:Class."),
        ("--tokenizer", "here that is the tokenizer of --model_name_or_path."),
        ("--tournament", "here that is strategy, in the file of agile-trainers evolve."),
        ("--callbacks", "here that is an argument of the trainer, in Python."),
    ],
)
def test_the_command_line_answers(typed: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--model_name_or_path", "model", typed, "1")
    assert said in " ".join(capsys.readouterr().err.split())


def test_options_of_a_critic_are_those_of_ppo() -> None:
    ppo, grpo = ({one.name for one in fields(config)} for config in (MultiTurnPPOConfig, MultiTurnGRPOConfig))
    assert ppo - grpo == set(OF_CRITIC)


def test_a_factory_of_trl_is_an_environment() -> None:
    with pytest.raises(ValueError, match=r"trl:dict must define reset\(\*\*row\)"):
        MultiTurnPPOTrainer("model", args=MultiTurnPPOConfig(use_cpu=True, bf16=False), environment_factory=dict)
