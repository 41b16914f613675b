"""A script of TRL with `tools=`, `reward_funcs` and a `prompt` column, moved here by docs/trl.md alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from games import Chatter, draw_batch, settings
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen2_5_chat_template

from agile_trainers.envs import make_environment_factory
from agile_trainers.envs.libraries.trl_tools import TRLEnvironment, from_environment_factory, trl_environment
from agile_trainers.rollout.generators.base import GenerationRequest
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, arguments


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def correct(completions: Any, product: Any, **_: Any) -> list[float]:
    return [float(str(want) in said[-1]["content"]) for said, want in zip(completions, product)]


def called(completions: Any, prompts: Any, **_: Any) -> list[float]:
    """Reads every part of a conversation that TRL's form has."""
    rewards = []
    for said, prompt in zip(completions, prompts):
        calls = [one["function"] for message in said for one in message.get("tool_calls") or []]
        results = [message for message in said if message["role"] == "tool"]
        words = sum(len(message["content"].split()) for message in said if message["role"] == "assistant")
        named = sum(result["name"] == "multiply" and result["content"].isdigit() for result in results)
        rewards.append(len(calls) + 10 * named + 0.01 * words + 0.001 * len(prompt[-1]["content"])
                       + sum(sum(call["arguments"].values()) for call in calls if call["name"] == "multiply"))  # fmt: skip
    return rewards


def asks(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'multiply', 'arguments': arguments})}\n</tool_call>"


ROWS = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"What is {n} times 7?"}], "product": 7 * n} for n in range(3, 7)]
)
SCRIPTS = [
    [asks(a=3, b=7), "It is 21."],
    ["I know: 28."],
    [f"Let me see. {asks(a=5, b=7)}", asks(a=5, b=8), "It is 40."],
    [f"{asks(a=6, b=7)}\n{asks(a=2, b=2)}", "It is 42."],
]


@pytest.fixture(scope="module")
def model(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with the template of Qwen2.5, whose calls TRL can read."""
    folder = tmp_path_factory.mktemp("qwen") / "model"
    shutil.copytree(embedded_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = qwen2_5_chat_template
    tokenizer.save_pretrained(folder)
    return folder


def ours(model: Path, folder: Path, max_new_tokens: int = 300, **arguments: Any) -> MultiTurnGRPOTrainer:
    return MultiTurnGRPOTrainer(
        model=str(model),
        environment=trl_environment(tools=[multiply], reward_funcs=[correct, called]),
        train_dataset=ROWS,
        args=MultiTurnGRPOConfig(**settings(folder, max_turns=4, max_new_tokens=max_new_tokens, stop_strings=None)),
        **arguments,
    )


def with_trl(model: Path, folder: Path) -> dict[str, list[Any]]:
    """The conversations and rewards of the scripts, by TRL's own trainer."""
    seen: dict[str, list[Any]] = {}

    def noted(function: Any) -> Any:
        def noting(completions: Any, **given: Any) -> list[float]:
            seen["completions"], seen[function.__name__] = completions, function(completions=completions, **given)
            return seen[function.__name__]

        noting.__name__ = function.__name__
        return noting

    class Scripted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
            answers = []
            for ids in prompt_ids:
                text = self.processing_class.decode(ids)
                (place,) = [n for n, row in enumerate(ROWS) if row["prompt"][0]["content"] in text]
                answers.append(SCRIPTS[place][text.count("<|im_start|>assistant") - 1])
            eos = self.processing_class.eos_token_id
            return [[*self.processing_class.encode(text), eos] for text in answers], None

    args = GRPOConfig(
        output_dir=str(folder), bf16=False, use_cpu=True, per_device_train_batch_size=8, num_generations=2, max_steps=1,
        report_to="none", max_completion_length=900, max_tool_calling_iterations=3, shuffle_dataset=False,
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    Scripted(
        model=str(model), tools=[multiply], reward_funcs=[noted(correct), noted(called)], train_dataset=ROWS, args=args
    ).train()
    return {name: values[::2] for name, values in seen.items()}


def test_rewards_of_scripted_answers_are_those_of_trl(model: Path, tmp_path: Path) -> None:
    theirs = with_trl(model, tmp_path / "trl")
    assert theirs["correct"] == [1.0, 1.0, 0.0, 1.0] and len(theirs["completions"]) == 4
    trainer = ours(model, tmp_path / "ours")
    for place, script in enumerate(SCRIPTS):
        answers: Iterator[str] = iter(script)

        def say(_: GenerationRequest, answers: Iterator[str] = answers) -> list[int]:
            return [*trainer.processing_class.encode(next(answers)), trainer.processing_class.eos_token_id]

        (episode,) = trainer.engine.run([EpisodeSpec(0, (0,), dict(ROWS[place]))], ScriptedGenerator(say))
        assert episode.environment.completion == theirs["completions"][place]
        assert episode.episode_return == pytest.approx(theirs["correct"][place] + theirs["called"][place])


def test_the_moved_script_trains(model: Path, tmp_path: Path) -> None:
    trainer = ours(model, tmp_path, max_new_tokens=24)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert any(not parameter.equal(before[name]) for name, parameter in trainer.model.named_parameters())
    (logged,) = (entry for entry in trainer.state.log_history if "return/mean" in entry)
    assert logged["return/mean"] > 0, "each function rewards the words of an answer"
    (episode, *_) = trainer.rollout([dict(ROWS[0])], generation=0)
    assert episode.prompt[-1]["content"] == "What is 3 times 7?" and "multiply" in episode.prompt[0]["content"]


class Deaf:
    """Says the same whatever the row says."""

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return "Hello.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 1.0, True, False, {}


class Repeating(Deaf):
    def reset(self, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return f"Please: {options['prompt'][-1]['content']}", {}


def test_a_prompt_that_the_model_does_not_see_is_warned_of(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("agile_trainers.trainers.setup.logger.warning", lambda text, *v: said.append(text % v))
    for environment in (Deaf, Repeating, trl_environment(tools=[multiply]), {"a": Deaf, "b": Deaf}):
        several = isinstance(environment, dict)
        rows = ROWS.add_column("environment", ["a", "b", "a", "b"]) if several else ROWS
        args = MultiTurnGRPOConfig(**settings(tmp_path))
        MultiTurnGRPOTrainer(str(model), environment=environment, train_dataset=rows, args=args)
    assert len(said) == 3 and all(
        "options['prompt']" in text and "trl_environment(tools=[...])" in text for text in said
    )
    assert {part for text in said for part in ("of 'a'", "of 'b'") if part in text} == {"of 'a'", "of 'b'"}


def test_tools_without_an_object() -> None:
    with pytest.raises(ValueError, match=r"needs a factory.*or tools="):
        trl_environment()
    with pytest.raises(ValueError, match="two tools of one name: multiply, multiply"):
        trl_environment(tools=[multiply, multiply])


def test_tools_beside_an_environment_are_pointed_to_it(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`tools` cannot be used.*trl_environment\(tools=\[\.\.\.\]\)"):
        ours(model, tmp_path, tools=[multiply])


class Quiet:
    """An object of TRL's ``environment_factory`` without a reward of its own."""

    def reset(self, **row: Any) -> str:
        return " Look around."

    def look(self) -> str:
        """Look around."""
        return "A wall."


class Half(Quiet):
    def get_reward(self) -> float | None:
        return 0.5


class Undecided(Quiet):
    def get_reward(self) -> float | None:
        return None


FIRST = [1.0, None, 0.5, None, 2.0, None, None, 1.0]
SECOND = [None, None, 0.25, 3.0, None, None, -1.0, None]


def first(completions: Any, **_: Any) -> list[float | None]:
    return FIRST[: len(completions)]


def second(completions: Any, **_: Any) -> list[float | None]:
    return SECOND[: len(completions)]


def with_factory(model: Path, folder: Path, factory: Any, **changes: Any) -> MultiTurnGRPOTrainer:
    options = settings(folder, max_new_tokens=4, num_generations=4, generation_batch_size=8, **changes)
    return MultiTurnGRPOTrainer(
        model=str(model), environment_factory=factory, reward_funcs=[first, second], train_dataset=ROWS,
        args=MultiTurnGRPOConfig(**options),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("factory", "scale"),
    [(Quiet, "group"), (Half, "group"), (Undecided, "group"), (Quiet, "batch"), (Half, "batch"), (Undecided, "none")],
)
def test_a_reward_of_none_counts_as_in_trl(model: Path, tmp_path: Path, factory: Any, scale: str) -> None:
    """An episode that nothing rewards is in no mean and no deviation, and has no advantage."""
    theirs: dict[str, Any] = {}

    class Watched(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            theirs.update(super()._generate_and_score_completions(inputs))
            return theirs

    args = GRPOConfig(
        output_dir=str(tmp_path / "trl"), bf16=False, use_cpu=True, per_device_train_batch_size=8, num_generations=4,
        max_steps=1, report_to="none", max_completion_length=4, save_strategy="no", disable_tqdm=True,
        gradient_checkpointing=False, scale_rewards=scale,
    )  # fmt: skip
    Watched(
        model=str(model), environment_factory=factory, reward_funcs=[first, second], train_dataset=ROWS, args=args
    ).train()
    expected = theirs["advantages"].tolist()
    assert (expected[1] == 0.0) == (factory is not Half) and expected[0] and expected[6]
    trainer = with_factory(model, tmp_path, factory, advantage_granularity="trajectory", scale_rewards=scale)
    batch = draw_batch(trainer)
    found = [
        [value for value, acts in zip(*row) if acts]
        for row in zip(batch["advantages"].tolist(), batch["turn_ids"].ge(0).tolist())
    ]
    assert [row[0] for row in found] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert all(value == row[0] for row in found for value in row)


def test_trls_argument_is_the_environment(model: Path, tmp_path: Path) -> None:
    kinds = {
        "of TRL": (Quiet, TRLEnvironment), "ours": (Deaf, Deaf),
        "by name": ({"a": Half, "b": Quiet}, None),
    }  # fmt: skip
    for name, (given, kind) in kinds.items():
        made = from_environment_factory(given)
        if kind is None:
            assert [type(one()) for one in made.values()] == [TRLEnvironment] * 2
            assert [type(one().object) for one in made.values()] == [Half, Quiet]
        else:
            assert type(make_environment_factory(made)()) is kind, name
    assert from_environment_factory("agile:probe/constant") == "agile:probe/constant"
    trainer = with_factory(model, tmp_path, Deaf)
    assert trainer.environment is Deaf and trainer.rollout()[0].prompt[0]["content"] == "Hello."
    with pytest.raises(ValueError, match="`environment_factory` cannot be used together with `environment`"):
        ours(model, tmp_path, environment_factory=Quiet)
    with pytest.raises(ValueError, match=r"`tools` are added to objects of TRL's"):
        from_environment_factory(Deaf, [multiply])
    assert sorted(trl_environment(Quiet, tools=[multiply])().tools) == sorted(
        from_environment_factory(Quiet, [multiply])().tools
    )


def test_methods_that_nothing_calls_are_named(embedded_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Those of the table fail here, and a run with evaluations ends; those that are called are not named."""

    def fails(*_: Any, **__: Any) -> Any:
        raise AssertionError("called")

    scored: list[int] = []

    class Overriding(MultiTurnGRPOTrainer):
        def _calculate_rewards(self, **inputs: Any) -> Any:
            scored.append(len(inputs["prompts"]))
            return super()._calculate_rewards(**inputs)

    there = [name for name in arguments._NEVER_CALLED if hasattr(MultiTurnGRPOTrainer, name)]
    assert len(there) > 7
    said: list[str] = []
    monkeypatch.setattr(arguments.logger, "warning", lambda text, *values: said.append(text % values))
    few = {"num_eval_episodes": 2, "diagnosis_interval": 0, "eval_strategy": "steps", "eval_steps": 1}
    for kind in (Overriding, type("Deafened", (Overriding,), dict.fromkeys(there, fails))):
        trainer = kind(str(embedded_model), environment=Chatter, args=MultiTurnGRPOConfig(**settings(tmp_path, **few)))
    assert len(said) == 1 and f"Deafened overrides {', '.join(there)}, which nothing calls" in said[0]
    trainer.train()
    trainer.predict(Dataset.from_dict({"row": [1]}))
    assert scored == [8, 2, 1]
