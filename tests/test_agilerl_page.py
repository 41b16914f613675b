"""docs/agilerl.md: its names exist, its defaults are the real ones of both sides, and no argument or method is missing."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from agilerl_options import FAMILIES, PAGE, ROOT, ROWS, Row, _spans, _tables
from agilerl_wheel import RECORDED
from peft import LoraConfig
from transformers import TrainingArguments
from trl import GRPOConfig

from agile_trainers.cli.train import make_parser
from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.populations import Population
from agile_trainers.trainers.registry import ALGORITHMS, find_algorithm
from agile_trainers.trainers.trainer import MultiTurnTrainer

KINDS = [
    "ours", "TRL", "transformers", "trainer", "PEFT", "accelerate", "command", "population", "automatic", "not_yet", "none",
]  # fmt: skip

RECORD = json.loads(RECORDED.read_text(encoding="utf-8"))
"""Defaults and methods of AgileRL 2.58; tests/test_agilerl_wheel.py compares it with the wheel."""
THERE: dict[str, dict[str, Any]] = RECORD["defaults"]
VLLM_CONFIG = """tensor_parallel_size gpu_memory_utilization max_num_seqs max_num_batched_tokens enforce_eager
sleep_mode sleep_mode_level dtype quantization vllm_model_name_or_path kv_cache_dtype max_lora_rank max_loras
strip_multimodal_towers stop_sequences presence_penalty frequency_penalty kv_cache_memory_bytes limit_mm_per_prompt
lora_staging_dir"""

OLDER = """finetune_llm_reasoning finetune_llm_multiturn ReasoningGym TokenObservationWrapper conversation_template
data_batch_size_per_gpu save_llm_checkpoint use_memory_efficient_params fused_logprobs_chunk_rows fused_loss_chunk_rows
action_granularity adv_whitening lora_only save_optimizer load_optimizer overwrite_reference_adapter
overwrite_critic_adapter merge_lora_configs accelerator mean_pg_loss value_clip_range"""
"""Names that AgileRL's older documentation uses."""


def _names(config: type) -> set[str]:
    return {field.name for field in fields(config)}


def _written_here(config: type[MultiTurnConfig]) -> set[str]:
    """Fields that our classes declare, anew or once more."""
    classes = [base for base in config.__mro__ if base.__module__.startswith("agile_trainers")]
    return {name for base in classes for name in inspect.get_annotations(base)}


@cache
def _known(kind: str, algorithm: str) -> set[str]:
    """What an option that lives ``kind`` may be called."""
    trainer = find_algorithm(algorithm)
    config = trainer.config_class
    if kind == "ours":
        return _written_here(config) & _names(config)
    if kind in ("TRL", "transformers"):
        of_transformers = _names(TrainingArguments)
        return of_transformers if kind == "transformers" else _names(GRPOConfig) - of_transformers
    if kind == "trainer":
        return {*inspect.signature(MultiTurnTrainer.__init__).parameters, *dir(trainer)}
    if kind == "population":
        return {*inspect.signature(Population.__init__).parameters, *dir(Population)}
    if kind == "command":
        parsers = (make_parser(algorithm), launch_command_parser())
        return {o.lstrip("-") for p in parsers for action in p._actions for o in action.option_strings}
    return {"PEFT": _names(LoraConfig), "accelerate": _names(FullyShardedDataParallelPlugin)}[kind]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section}-{'-'.join(row.theirs)}"[:60])
def test_every_name_exists_where_the_page_says(row: Row) -> None:
    assert row.theirs and row.kind in KINDS
    if row.kind == "none":
        assert not row.ours and row.note, "an option without a counterpart says why"
    elif row.kind in ("automatic", "not_yet"):
        assert row.kind == "not_yet" or not row.ours
    else:
        assert row.ours
        for algorithm in (algorithm for family in row.of for algorithm in FAMILIES[family]):
            unknown = {name for name, _ in row.ours} - _known(row.kind, algorithm)
            assert not unknown, f"{algorithm} has no {sorted(unknown)} ({row.kind})"


def test_populations_have_a_counterpart() -> None:
    of_members = {
        "hp_config",
        "index",
        "clone",
        "mutation_hook",
        "population",
        "pop",
        "pop_size",
        "tournament",
        "mutation",
    }
    found = {name: row.kind for row in ROWS for name in row.theirs if name in of_members}
    assert found == dict.fromkeys(of_members, "population")


def test_what_is_not_yet_there_is_trls_name_or_no_field_yet() -> None:
    """The page must change when one of them arrives."""
    every = {name for algorithm in ALGORITHMS for name in _written_here(find_algorithm(algorithm).config_class)}
    for row in ROWS:
        if row.kind == "not_yet":
            assert not every & {name for name, _ in row.ours}, row.theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_every_constructor_argument_has_one_row(family: str) -> None:
    start, end = (PAGE.index(f"\n{title}\n") for title in ("## Constructor arguments", "### Other objects"))
    sections = {line.lstrip("# ") for line in PAGE[start:end].splitlines() if line.startswith("#")}
    listed = [name for row in ROWS if row.section in sections and family in row.of for name in row.theirs]
    assert sorted(listed) == sorted(THERE[family])


def test_every_argument_of_the_training_loop_and_every_public_method_has_a_row() -> None:
    listed = {name for row in ROWS for name in row.theirs}
    assert not THERE["train_llm_rollout"].keys() - listed and not set(RECORD["methods"]) - listed
    assert len(RECORD["methods"]) > 20


def test_every_field_of_vllm_config_has_one_row() -> None:
    listed = [name for row in ROWS if row.section == "`VLLMConfig`" for name in row.theirs]
    assert sorted(listed) == sorted(VLLM_CONFIG.split())


def test_every_name_of_older_documentation_has_one_row() -> None:
    listed = [name for row in ROWS if row.section == "Names of older versions" for name in row.theirs]
    assert set(OLDER.split()) <= set(listed) and len(listed) == len(set(listed))


CPU = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"}
WRITTEN = [
    (algorithm, name, value)
    for row in ROWS
    for name, value in row.ours
    if value is not None and row.kind != "not_yet"
    for algorithm in (algorithm for family in row.of for algorithm in FAMILIES[family])
]
NEEDED = {"kl_placement": {"beta": 0.1}, "vllm_importance_sampling_mode": {"use_vllm": True}}


@pytest.mark.parametrize(("algorithm", "name", "value"), WRITTEN)
def test_values_the_page_writes_are_taken(algorithm: str, name: str, value: Any) -> None:
    config = find_algorithm(algorithm).config_class
    args = config(**CPU, **NEEDED.get(name, {}), **{name: value}).with_environment()
    assert getattr(args, name) == value
    with pytest.raises(ValueError):
        config(**CPU, **NEEDED.get(name, {}), **{name: f"{value}, no"}).with_environment()


DEFAULTS = [
    (algorithm, family, _spans(theirs), ast.literal_eval(there.strip("`")), name, ast.literal_eval(here.strip("`")))
    for _, (theirs, of, there, option, here) in _tables("| option there | of | there | option here | here |")
    for algorithm in ([a.strip().lower() for a in of.split(",")] if of != "all" else ALGORITHMS)
    for family in FAMILIES
    if algorithm in FAMILIES[family]
    for name in _spans(option)
]
UNSET_THERE = {"weight_decay": 0.01, "lr_scheduler_type": "constant", "use_bias_correction_kl": False}
"""Ours that no argument of AgileRL sets, with what it does; tests/test_agilerl_wheel.py reads its optimizer."""
SAME_MEANING = {
    "min_p": "None and 0 keep all tokens",
    "min_output_tokens": "None and 0 require none",
    "turn_advantage_trajectory_fallback": "None is True where it applies",
    "vllm_importance_sampling_correction": "None is True with vLLM, and AgileRL's acts with vLLM",
    "importance_sampling_level": "None is `token`, with GSPO `trajectory`, here `sequence`",
    "use_sequence_packing": "changes no gradient",
    "device": "this test's CPU",
    "loss_type": "GRPO's name of its own objective",
    "completion_logging": "a log",
    "max_steps": "an example of a budget",
    "checkpoint_steps": "save_strategy decides",
}


@pytest.mark.parametrize(("algorithm", "family", "theirs", "there", "name", "here"), DEFAULTS)
def test_defaults_are_the_real_ones(
    algorithm: str, family: str, theirs: list[str], there: Any, name: str, here: Any
) -> None:
    default = getattr(find_algorithm(algorithm).config_class(**CPU), name)
    assert default == here and isinstance(default, type(here))
    arguments = THERE[family] | THERE["train_llm_rollout"]
    found = [arguments[one] for one in theirs if one in arguments] or [UNSET_THERE[name]]
    assert [tuple(one) if isinstance(one, list) else one for one in found] == [there] * len(found)


def test_all_other_defaults_are_equal() -> None:
    """Of the options that the page pairs one to one."""
    listed = {(algorithm, name) for algorithm, _, _, _, name, _ in DEFAULTS}
    compared = 0
    for row in ROWS:
        if row.kind not in ("ours", "TRL", "transformers") or len(row.theirs) != len(row.ours):
            continue
        for theirs, (ours, value) in zip(row.theirs, row.ours, strict=True):
            for family in row.of if value is None else ():
                arguments = THERE[family] | THERE["train_llm_rollout"]
                for algorithm in FAMILIES[family] if theirs in arguments else ():
                    here = getattr(find_algorithm(algorithm).config_class(**CPU), ours)
                    compared += 1
                    differs = here != arguments[theirs] and theirs not in SAME_MEANING
                    assert not differs or (algorithm, ours) in listed, (
                        algorithm,
                        theirs,
                        arguments[theirs],
                        ours,
                        here,
                    )
    assert compared > 100


def test_the_tests_that_hold_a_difference_exist() -> None:
    cited = [span for _, (*_, tests) in _tables("| here | AgileRL | held by |") for span in _spans(tests)]
    assert len(cited) > 10
    for test in cited:
        file, name = test.split("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_the_page_names_every_algorithm() -> None:
    for algorithm in ALGORITHMS:
        trainer = find_algorithm(algorithm)
        assert (
            f"`{trainer.__name__}`, `{trainer.config_class.__name__}`" in PAGE
            and f"`agile-trainers {algorithm}`" in PAGE
        )
