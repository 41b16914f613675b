"""Without an environment the trainer *is* TRL's GRPOTrainer: same seed, same losses, tools and all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trl
import yaml
from cards import cards_of
from datasets import Dataset
from games import make_trainer, settings
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

ROWS = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"say {i}"}] for i in range(8)]})
TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def distinct_letters(completions, **_):
    return [float(len(set(completion[-1]["content"]))) for completion in completions]


def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: One number.
        b: Another number.
    """
    return a * b


def trl_settings(folder, **changes):
    kept = settings(folder, **{"max_steps": 3, **changes})
    for name in ("max_turns", "max_new_tokens", "stop_strings"):
        del kept[name]
    return kept


def history(trainer):
    trainer.train()
    skip = ("time", "runtime", "per_second")
    return [{k: v for k, v in entry.items() if not any(s in k for s in skip)} for entry in trainer.state.log_history]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_completion_length": 8, "beta": 0.1, "num_iterations": 2},
        {"max_completion_length": 8, "importance_sampling_level": "sequence", "loss_type": "grpo"},
    ],
)
def test_same_seed_same_run(embedded_model, tmp_path, changes):
    runs = []
    for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (MultiTurnGRPOTrainer, MultiTurnGRPOConfig)):
        trainer = trainer_class(
            model=str(embedded_model),
            reward_funcs=distinct_letters,
            args=config_class(**trl_settings(tmp_path, **changes)),
            train_dataset=ROWS,
        )
        runs.append((history(trainer), trainer.model.state_dict()))
    (trl_history, trl_state), (our_history, our_state) = runs
    assert trl_history == our_history
    assert all(torch.equal(trl_state[name], our_state[name]) for name in trl_state)


def test_the_card_of_the_best_policy_names_its_step(embedded_model, tmp_path):
    def falling(completions, trainer_state, **_):
        return [-float(trainer_state.global_step)] * len(completions)

    every = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "reward", "greater_is_better": True}
    args = MultiTurnGRPOConfig(**trl_settings(tmp_path, max_steps=2, max_completion_length=4, **every, **best))
    trainer = MultiTurnGRPOTrainer(
        str(embedded_model), falling, args, train_dataset=ROWS, eval_dataset=ROWS, peft_config=LoraConfig(r=2)
    )
    trainer.train()
    trainer.save_model()
    assert ": 1 updates." in (tmp_path / "README.md").read_text()
    assert ": 2 updates." in (tmp_path / "checkpoint-2" / "README.md").read_text()


def test_an_adapter_of_any_name_is_saved(embedded_model, tmp_path):
    """As TRL does; with an environment the policy is "default"."""
    base = AutoModelForCausalLM.from_pretrained(embedded_model)
    model = get_peft_model(base, LoraConfig(r=2), adapter_name="mine")
    args = MultiTurnGRPOConfig(**trl_settings(tmp_path, max_completion_length=4))
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    MultiTurnGRPOTrainer(model, distinct_letters, args, train_dataset=ROWS, processing_class=tokenizer).save_model()
    assert (tmp_path / "mine" / "adapter_config.json").is_file()
    assert "library_name: peft" in (tmp_path / "README.md").read_text()


def test_tools_still_work(embedded_model, tmp_path, monkeypatch):
    """The model is made to call a tool by starting every answer with a scripted call."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    tokenizer.chat_template = (TEMPLATES / "qwen3.jinja").read_text()
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call><|im_end|>'
    call_ids = tokenizer(call, add_special_tokens=False)["input_ids"]
    original = GRPOTrainer._generate_single_turn
    seen = []

    def scripted(self, prompt_ids, *args, **kwargs):
        # The first answer is the call; what follows the tool's result is the model's own.
        if "tool_response" not in tokenizer.decode(prompt_ids[0]):
            return [list(call_ids) for _ in prompt_ids], None
        seen.append(tokenizer.decode(prompt_ids[0]))
        self.generation_config.max_new_tokens = 8  # not as many as the call has
        return original(self, prompt_ids, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", scripted)
    runs = []
    for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (MultiTurnGRPOTrainer, MultiTurnGRPOConfig)):
        trainer = trainer_class(
            model=str(embedded_model),
            reward_funcs=distinct_letters,
            args=config_class(**trl_settings(tmp_path, max_completion_length=len(call_ids) + 64, max_steps=1)),
            train_dataset=ROWS,
            processing_class=tokenizer,
            tools=[multiply],
        )
        runs.append(history(trainer))
    assert seen and "42" in seen[0]
    assert runs[0] == runs[1]
    assert runs[0][0]["tools/call_frequency"] >= 1.0


def test_trls_own_configuration_will_do(embedded_model, tmp_path):
    args = GRPOConfig(**trl_settings(tmp_path, max_completion_length=4))
    trainer = MultiTurnGRPOTrainer(str(embedded_model), distinct_letters, args, ROWS)
    assert trainer.engine is None and trainer.max_completion_length == 4


def test_trls_default_length_applies(embedded_model, tmp_path):
    args = MultiTurnGRPOConfig(**trl_settings(tmp_path))
    trainer = MultiTurnGRPOTrainer(str(embedded_model), distinct_letters, args, ROWS)
    assert trainer.max_completion_length == GRPOConfig(**trl_settings(tmp_path)).max_completion_length == 512


def test_multi_turn_options_without_an_environment_are_refused(embedded_model, tmp_path):
    args = MultiTurnGRPOConfig(**settings(tmp_path, gamma=0.9, scale_rewards="mean"))
    with pytest.raises(ValueError, match=r"gamma, max_new.*_turns, scale_rewards='mean', stop_strings.*environment="):
        MultiTurnGRPOTrainer(str(embedded_model), distinct_letters, args, ROWS)


@pytest.mark.parametrize("lora", [LoraConfig(r=2, target_modules="all-linear"), None], ids=["adapter", "whole model"])
def test_every_folder_has_a_card_of_the_run(embedded_model, tmp_path, lora):
    """Also the folders for which TRL and PEFT have templates of their own."""
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    args = MultiTurnGRPOConfig(**trl_settings(tmp_path / "run", max_completion_length=4, **saving))
    trainer = MultiTurnGRPOTrainer(str(embedded_model), distinct_letters, args, ROWS, ROWS, peft_config=lora)
    trainer.train()
    trainer.save_model()
    trainer.save_model(str(tmp_path / "run" / "elsewhere"))
    measured = {entry["step"]: entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry}
    folders = {"run": ".", "run/checkpoint-2": "checkpoint-2", "elsewhere": "elsewhere"}
    for name, folder in folders.items():
        text = (tmp_path / "run" / folder / "README.md").read_text(encoding="utf-8")
        assert f"# {name}\n\nmodel, trained with GRPO on rows: {2 if 'checkpoint' in name else 3} updates." in text
        assert f"| 2 | {measured[2]:.3f} |" in text and "| `num_generations` | `4` |" in text
        assert "Information Needed" not in text and "This model is a fine-tuned version" not in text
        assert yaml.safe_load(text.split("---")[1])["library_name"] == ("transformers" if lora is None else "peft")
        assert (tmp_path / "run" / folder / "learning_curve.png").is_file()
    assert len(cards_of(tmp_path)) == (0 if lora is None else 4)
    trainer.create_model_card(dataset_name="me/rows")
    assert "GRPO on rows of [me/rows]" in (tmp_path / "run" / "README.md").read_text(encoding="utf-8")


def test_the_card_of_a_continued_adapter_names_what_it_is_from(embedded_model, tmp_path):
    """A run with an environment first, whose adapter is trained on rows."""
    first = make_trainer(embedded_model, tmp_path / "games", max_steps=1)
    first.train()
    first.save_model(str(tmp_path / "played"))
    args = MultiTurnGRPOConfig(**trl_settings(tmp_path / "rows", max_completion_length=4))
    trainer = MultiTurnGRPOTrainer(str(tmp_path / "played"), distinct_letters, args, ROWS)
    trainer.save_model(str(tmp_path / "saved"))
    text = (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    assert "this model" in text and "Multi-turn GRPO" in text.split("this model")[1] and "played" in text
