"""``agile-trainers check``: what it says of sound and of broken environments, and what its figures are worth."""

from __future__ import annotations

import asyncio
import io
import json
import random
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_judge import FakeJudge, serving
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config

from agile_trainers import Judge
from agile_trainers.cli.check import command as check
from agile_trainers.cli.main import main
from agile_trainers.embedded import make_tokenizer
from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.evaluation.scripted_policies import play_scripted
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.spec import EpisodeSpec, Limits
from agile_trainers.types import Message


class TwoTurns:
    """Pays 1 for each ``yes`` and -0.5 for anything else, twice."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.turn = 0
        return f"Question {(seed or 0) % 7}?", {}

    def step(self, action: str) -> Any:
        self.turn += 1
        right = action == "yes"
        return "Another?", 1.0 if right else -0.5, self.turn == 2, False, {"success": right}


def random_policy(messages: list[Message], rng: random.Random) -> str:
    return rng.choice(("yes", "no"))


def expert_policy(messages: list[Message], rng: random.Random) -> str:
    return "yes"


class Awaited(TwoTurns):
    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        await asyncio.sleep(0)
        return TwoTurns.reset(self, seed)

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        return TwoTurns.step(self, action)


class NotANumber(TwoTurns):
    def step(self, action: str) -> Any:
        observation, _, *rest = TwoTurns.step(self, action)
        return observation, float("nan"), *rest


class Hangs(TwoTurns):
    clock: Any = None

    def step(self, action: str) -> Any:
        self.clock.run_out()
        threading.Event().wait()


class HangsOnYes(Hangs):
    def step(self, action: str) -> Any:
        return Hangs.step(self, action) if action == "yes" else TwoTurns.step(self, action)


class Raises(TwoTurns):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        raise ConnectionError("the server is away")


class NeverEnds(TwoTurns):
    def step(self, action: str) -> Any:
        return "On and on.", random.Random(action).random(), False, False, {}


class SaysWhenItWins(TwoTurns):
    """Reports success only when it wins, which the seed decides."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.wins = (seed or 0) % 2
        return super().reset(seed, options)

    def step(self, action: str) -> Any:
        return *super().step(action)[:4], {"success": True} if self.wins else {}


class PaysNothing(TwoTurns):
    def step(self, action: str) -> Any:
        observation, _, *rest = TwoTurns.step(self, action)
        return observation, 0.0, *rest


PLANS_ONE = pytest.mark.usefixtures("one_plan")
"""Mark of tests that read nothing of the memory plan: equal ones are made once (``quick.py``)."""


def run(environment: str, *options: str) -> tuple[int, str]:
    """Exit code and report."""
    file = io.StringIO()
    target = environment if ":" in environment else f"{__name__}:{environment}"
    code = check.main(["--environment", target, *options], Console(file=file, width=400))
    return code, file.getvalue()


def test_a_sound_environment_gets_its_figures(embedded_model: Path) -> None:
    code, report = run(
        "TwoTurns", "--episodes", "8", "--max_new_tokens", "8", "--scripted_policy", "expert", "--max_turns", "3"
    )
    assert code == 0 and "Ready to train, with 1 warning above." in report and "problem" not in report
    assert "TwoTurns follows it" in report
    assert "8 episodes by the expert policy" in report
    assert "mean 2.000, from 2 to 2; success 100%" in report
    assert "from 1 to 1: 1 (16 times); 100% of 16 turns are not 0" in report
    assert "mean 2.0, at most 2 (max_turns=3)" in report
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    chat = ChatRenderer(tokenizer)
    answer = len(tokenizer.encode("yes")) + 1
    prompt = len(chat.first("Question 1?"))
    whole = prompt + 2 * answer + len(chat.delimited("Another?", tokenizer.eos_token_id))
    assert (
        f"an answer has {answer:.1f}, at most {answer} (max_new_tokens=8); a first prompt at most {prompt}; "
        f"an episode at most {whole} (max_model_length=4096)"
    ) in report
    assert re.search(r"ended +terminated 100%", report) and re.search(r"cut short +0%", report)
    assert "4 episodes, each played again with the same answers (alone," in report
    assert re.search(r"expert +\+2.000 +100.0%", report) and re.search(r"random +[-+]\d", report)
    assert "warning: every episode that the expert played has the same return" in report


@PLANS_ONE
def test_success_that_only_winners_report_is_no_success_of_all() -> None:
    _, report = run(
        "SaysWhenItWins", "--episodes", "8", "--max_new_tokens", "8", "--scripted_policy", "expert", "--max_turns", "3"
    )
    found = re.search(r"warning: (\d+)% of the episodes end without info\['success'\]", report)
    assert found is not None and 0 < int(found[1]) < 100, report
    assert f"success {100 - int(found[1])}%" in report


@PLANS_ONE
def test_each_of_several_environments_is_checked_within_its_own_limits() -> None:
    several = json.dumps({name: f"{__name__}:{name}" for name in ("TwoTurns", "NeverEnds", "PaysNothing")})
    limits = json.dumps({"TwoTurns": {"max_turns": 2}, "NeverEnds": {"max_turns": 1}})
    options = ["--environment_limits", limits, "--max_turns", "3", "--episodes", "4", "--scripted_policy", "expert"]
    code, report = run(several, *options, "--max_new_tokens", "8")
    assert code == 1
    first, *sections = re.split(r"-+ environment (\w+) -+", report)
    assert "TwoTurns=" in first and sections[::2] == ["TwoTurns", "NeverEnds", "PaysNothing"]
    for section, turns in zip(sections[1::2], (2, 1, 3), strict=True):
        assert f"(max_turns={turns})" in section and f"max_turns={turns}, max_new_tokens=8" in section
    verdict = report.partition("Not ready to train:")[2]
    assert "- PaysNothing: all 8 episodes returned 0" in verdict and "TwoTurns" not in verdict


@PLANS_ONE
def test_rows_are_checked_with_the_environment_they_are_for(tmp_path: Path) -> None:
    several = '{"low": "agile:guess_number", "high": "agile:guess_number"}'
    (tmp_path / "rows.jsonl").write_text(
        '{"environment": "high", "secret": 3}\n{"environment": "low", "secret": 6}\n' * 4
    )
    options = [
        "--dataset_name",
        str(tmp_path),
        "--episodes",
        "2",
        "--scripted_policy",
        "expert",
        "--gradient_accumulation_steps",
        "1",
    ]
    code, report = run(several, *options)
    assert "mean 2.0, at most 2" in report and "mean 1.0, at most 1" in report  # halving guesses 6, then 3
    code, report = run(several.replace("low", "lwo"), *options)
    assert code == 1 and "names the environment 'low'" in report and "lwo, high" in report


def test_the_model_plays_if_it_is_named(embedded_model: Path) -> None:
    options = ["--model", str(embedded_model), "--episodes", "4", "--max_new_tokens", "3", "--max_turns", "2"]
    options += ["--per_device_train_batch_size", "16", "--use_peft"]
    code, report = run("NeverEnds", *options)
    assert code == 0 and "4 episodes by the model" in report and f"model {embedded_model}" in report
    assert "warning: [episodes_cut] A limit cut every episode short" in report and "max_turns 100%" in report
    assert "(max_new_tokens=3)" in report and "16 rows x" in report and "of adapters" in report
    assert "The weights are float32" in report
    assert "learning_rate" not in report and "An update sees" not in report
    assert run("NeverEnds", *options)[1] == report, "sampled with the run's seed"


@PLANS_ONE
def test_a_recipe_that_learns_nothing_is_warned_of() -> None:
    options = [
        "--use_peft",
        "--learning_rate",
        "1e-6",
        "--gradient_accumulation_steps",
        "1",
        "--scripted_policy",
        "random",
    ]
    _, report = run("TwoTurns", *options)
    assert "warning: learning_rate=1e-06" in report and "warning: An update sees 8 episodes in groups of 8" in report
    _, report = run("TwoTurns", *options[:1], "--gradient_accumulation_steps", "1", "--per_device_train_batch_size", "4",
                    "--num_generations", "2", "--scripted_policy", "random")  # fmt: skip
    assert "warning: An update sees 4 episodes in groups of 2: their noise" in report


def test_ppo_counts_two_adapters_and_reads_a_final_state() -> None:
    file = io.StringIO()
    options = ["--environment", f"{__name__}:TwoTurns", "--use_peft", "--lora_target_modules", "all-linear"]
    options += ["--max_turns", "1", "--scripted_policy", "random"]
    commands = [["grpo", *options], ["ppo", *options, "--bootstrap_at_limits"]]
    codes = [check.main(command, Console(file=file, width=400)) for command in commands]
    grpo, ppo = (int(found.replace(",", "")) for found in re.findall(r"([\d,]+) trained x 4 bytes", file.getvalue()))
    assert codes == [0, 0] and ppo == 2 * grpo
    first, second = re.findall(r"an episode at most (\d+)", file.getvalue())
    assert int(second) > int(first), "the state after the last turn is there for the critic"


@PLANS_ONE
def test_async_environments_and_data_set_rows(tmp_path: Path) -> None:
    code, report = run("Awaited", "--episodes", "4", "--scripted_policy", "random")
    assert code == 0 and "Awaited follows it" in report
    (tmp_path / "rows.jsonl").write_text('{"secret": 3}\n{"secret": 11}\n')
    options = ["--dataset_name", str(tmp_path), "--episodes", "2", "--scripted_policy", "expert"]
    code, report = run("agile:guess_number", *options, "--gradient_accumulation_steps", "4")
    assert code == 1 and "train_dataset has 2 rows, but a generation batch takes 4" in report
    code, report = run("agile:guess_number", *options, "--gradient_accumulation_steps", "1", "--task_column", "level")
    assert code == 1 and "task_column='level' is no column of train_dataset; it has secret" in report
    code, report = run("agile:guess_number", *options, "--gradient_accumulation_steps", "1")
    assert code == 0
    assert "mean 2.5, at most 3" in report  # halving guesses 6, 3 and 6, 9, 11


@PLANS_ONE
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("NotANumber", "NotANumber: step() returned reward=nan"),
        ("Hangs", "Hangs: step() of turn 1 after reset(seed=42) did not return within 0.2 s"),
        ("Raises", "Raises: reset(seed=42) raised ConnectionError: the server is away"),
        ("PaysNothing", "all 12 episodes returned 0: there is no learning signal"),
        (
            "HangsOnYes",
            "[environment_failing] The environment failed in 100% of the episodes",
        ),
        ("agile:guess_nmber", "Unknown environment 'agile:guess_nmber'; did you mean agile:guess_number"),
    ],
)
def test_what_would_not_train_exits_with_the_reason(
    clock: Any, monkeypatch: pytest.MonkeyPatch, broken: str, message: str
) -> None:
    monkeypatch.setattr(Hangs, "clock", clock)
    code, report = run(
        broken,
        "--episodes",
        "4" if broken != "PaysNothing" else "6",
        "--environment_timeout",
        "0.2",
        "--scripted_policy",
        "expert",
    )
    verdict = report.partition("Not ready to train:")[2]
    assert code == 1 and message in verdict, report


@PLANS_ONE
def test_limits_that_the_expert_does_not_fit_in_are_named() -> None:
    code, report = run("agile:calculator", "--episodes", "4", "--max_new_tokens", "64")
    assert code == 0 and "answers of the expert policy were cut at max_new_tokens=64" in report
    assert "the expert is not better than the random policy" in report


@PLANS_ONE
def test_equal_returns_are_no_reason_where_only_the_embedded_model_could_play() -> None:
    pytest.importorskip("gymnasium", reason="Gymnasium is not installed: pip install 'agile-trainers[envs]'")
    options = ["--episodes", "2", "--max_new_tokens", "2", "--max_turns", "2"]
    code, report = run("gymnasium:FrozenLake-v1", *options)
    assert code == 0 and "warning: all 2 episodes returned 0" in report


class PaysTheRest(TwoTurns):
    """Pays those who say no more than one word."""

    def step(self, action: str) -> Any:
        observation, _, *rest = TwoTurns.step(self, action)
        return observation, {"yes": 1.0, "no": 0.5}.get(action, 0.0), *rest


@PLANS_ONE
def test_the_models_own_episodes_decide(embedded_model: Path) -> None:
    """The policies' returns differ; the model's do not."""
    options = ["--episodes", "4", "--max_new_tokens", "8", "--min_new_tokens", "8"]
    code, report = run("PaysTheRest", *options, "--model", str(embedded_model))
    assert code == 1 and "all 4 episodes of the model returned 0: there is no learning signal" in report
    assert "[too_hard] Read an episode: the prompt must tell the form" in report
    assert re.search(r"expert +\+2.000", report) and "Ready to train" not in report
    code, report = run("PaysTheRest", *options, "--scripted_policy", "model")
    assert code == 0 and "warning: every episode that the model played has the same return" in report
    taught = ["--model", str(embedded_model), "--teacher", "policy", "--teacher_hint", "hint"]
    code, report = run("PaysTheRest", *options, *taught)
    assert code == 0 and "no learning signal" not in report and "Ready to train" in report


@PLANS_ONE
def test_demonstrations_are_replayed(embedded_model: Path, tmp_path: Path) -> None:
    """With them, equal returns of the model are no reason to stop."""
    options = ["--episodes", "4", "--max_new_tokens", "8", "--min_new_tokens", "8", "--model", str(embedded_model)]
    code, report = run("PaysTheRest", *options, "--demonstrations", "expert")
    assert code == 0 and "no learning signal" not in report
    assert "Demonstrations: expert" in report and "4 agree with the environment: return +2.000" in report
    shown = tmp_path / "shown.jsonl"
    answers = [{"role": "assistant", "content": "yes"}] * 2
    shown.write_text(json.dumps({"seed": 1, "messages": answers, "rewards": [1.0, 5.0]}))
    code, report = run("PaysTheRest", *options, "--demonstrations", str(shown))
    assert code == 1 and "got the rewards [1.0, 5.0] when it was recorded and [1.0, 1.0] now" in report


def test_a_module_that_cannot_be_imported_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_here.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, report = run("fails_here:Environment")
    problems = report.partition("Not ready to train:")[2]
    assert (
        code == 1 and "'fails_here' cannot be imported: RuntimeError: no licence" in problems and "line 1" in problems
    )


def test_a_model_of_another_family_is_checked_and_planned_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """GPT-2 names no ``intermediate_size``, no key-value heads and no ``torch_dtype``."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=256, vocab_size=512, eos_token_id=2, bos_token_id=2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer(vocab_size=512).save_pretrained(tmp_path)
    options = ["--model", str(tmp_path), "--episodes", "4", "--max_new_tokens", "4", "--max_turns", "2"]
    code, report = run("NeverEnds", *options, "--gpu_memory", "0.001")
    assert code == 1 and re.search(r"planned peak of [\d.]+ MiB is more than the GPU's 1.0 MiB", report), report
    code, report = run("NeverEnds", *options, "--gpu_memory", "24", "--max_model_length", "100")
    assert code == 0 and re.search(r"planned peak is \d+% of the GPU's 24.0 GiB", report)


def test_the_plan_is_for_the_limits_and_not_for_what_was_played(embedded_model: Path) -> None:
    """Episodes of two turns of a word; the limits allow much longer ones."""
    options = ["--episodes", "4", "--scripted_policy", "expert", "--max_turns", "6"]
    small, large = (run("TwoTurns", *options, "--max_new_tokens", new)[1] for new in ("20", "200"))
    tokens = [
        int(re.findall(r"planned for episodes of ([\d,]+) tokens", report)[0].replace(",", ""))
        for report in (small, large)
    ]
    assert tokens[1] - tokens[0] == 6 * 180
    capped = run("TwoTurns", *options, "--max_new_tokens", "200", "--max_model_length", "300")[1]
    assert "planned for episodes of 300 tokens" in capped


class PaysFailures(TwoTurns):
    def step(self, action: str) -> Any:
        observation, reward, *rest = TwoTurns.step(self, action)
        return observation, -reward, *rest


class PaysTheFirst(TwoTurns):
    """Pays the first answer, and calls the last one a success."""

    def step(self, action: str) -> Any:
        observation, _, *rest = TwoTurns.step(self, action)
        return observation, float(action == "yes" and self.turn == 1), *rest


class AlwaysWins(TwoTurns):
    def step(self, action: str) -> Any:
        return *TwoTurns.step(self, action)[:4], {"success": True}


class PaysAlike(TwoTurns):
    def step(self, action: str) -> Any:
        observation, _, *rest = TwoTurns.step(self, action)
        return observation, 0.25, *rest


class InTheClass(TwoTurns):
    """Keeps the word of an episode where all instances see it."""

    want = ""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        InTheClass.want = random.Random(seed).choice(("yes", "no"))
        return super().reset(seed, options)

    def step(self, action: str) -> Any:
        right = action == InTheClass.want
        return *TwoTurns.step(self, action)[:1], float(right), self.turn == 2, False, {"success": right}


class NeverSetBack(TwoTurns):
    """Counts in the instance, and does not begin again with an episode."""

    wrong = 0

    def step(self, action: str) -> Any:
        self.wrong += action == "no"
        _, _, *rest = TwoTurns.step(self, action)
        return f"{self.wrong} wrong", float(self.wrong == 0), *rest


MISSES, DOUBT = "[reward_misses_success]", "[success_doubtful]"


@PLANS_ONE
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            "PaysFailures",
            rf"problem: \{MISSES} Return and success correlate by -0\.[6-9]\d in 256 episodes of 16 starts",
        ),
        ("PaysTheFirst", rf"problem: \{MISSES} Return and success correlate by -?0\.[01]\d in 256 episodes"),
        ("PaysAlike", rf"problem: \{MISSES} The return is the same whether an episode succeeds or not"),
        ("AlwaysWins", rf"problem: \{DOUBT} All 32 episodes count as a success, but their returns go from -1 to 2\."),
        (
            "InTheClass",
            "problem: instances share state: with the same answers, an episode returns . beside others and . al",
        ),
        (
            "NeverSetBack",
            "problem: reset leaves state behind: .* returns 0 on an instance that had played before and 1 on",
        ),
    ],
)
def test_what_the_episodes_show_is_a_reason_not_to_train(broken: str, message: str) -> None:
    code, report = run(broken)
    assert code == 1 and re.search(message, report) and report.count("problem: ") == 1 + (broken == "PaysAlike"), report
    assert not any(f"[{name}]" in report for name in ("solved", "too_hard", "zero_advantage_groups")), report


class LengthInTheClass(InTheClass):
    """The same, with answers that an untrained model gives."""

    def step(self, action: str) -> Any:
        return super().step(("no", "yes")[len(action) % 2])


@PLANS_ONE
def test_state_of_a_class_is_found_when_the_model_plays(embedded_model: Path) -> None:
    """Its episodes are played together: replays of each alone agree with each other, and not with what was played."""
    code, report = run("LengthInTheClass", "--model", str(embedded_model), "--max_new_tokens", "4")
    assert code == 1 and "problem: instances share state" in report


@PLANS_ONE
@pytest.mark.parametrize("sound", ["TwoTurns", "Awaited", "agile:guess_number", "agile:probe/grid"])
def test_sound_environments_are_not_accused(sound: str) -> None:
    code, report = run(sound)
    assert code == 0 and MISSES not in report and DOUBT not in report and "state" not in report, report


def liked(messages: list[Message]) -> dict[str, Any]:
    """Scores an episode, or ranks a group."""
    if "conversations" in messages[1]["content"]:
        return {"reason": "ranked", "ranking": [[1], [2]]}
    return {"reason": "politeness", "score": 0.75}


judged = Judge(liked, "Be polite.")
ranked = Judge(liked, "Be polite.", per="group", name="ranked")
refused = Judge(lambda messages: "no", "Be polite.", name="refused")


@PLANS_ONE
@pytest.mark.parametrize(("name", "code", "told"), [
    ("judged", 0, ("Judge: judge, one score for each episode", "0.75", "politeness", "about 1,000 questions")),
    ("ranked", 0, ("Judge: ranked, one score for each group", "ranked", "about 125 questions")),
    ("refused", 1, ("problem: refused gave no score: The answer does not fit its schema: 'no'",)),
])  # fmt: skip
def test_a_judge_is_asked_once(name: str, code: int, told: tuple[str, ...]) -> None:
    found, report = run("TwoTurns", "--episodes", "4", "--reward_funcs", f"{__name__}.{name}", "--max_new_tokens", "4")
    assert found == code
    for text in told:
        assert text in report


@PLANS_ONE
def test_a_judge_is_a_learning_signal_where_the_environment_pays_nothing() -> None:
    options = ("PaysNothing", "--episodes", "4", "--scripted_policy", "random", "--max_new_tokens", "4")
    assert "there is no learning signal" in run(*options)[1]
    code, report = run(*options, "--reward_funcs", f"{__name__}.judged")
    assert code == 0 and "there is no learning signal" not in report


@PLANS_ONE
def test_the_price_of_a_judge_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 tokens asked and 10 answered, 1,000 times, at 3 and 5 a million."""
    with serving(FakeJudge()) as url:
        monkeypatch.setitem(globals(), "priced", Judge(url, "r", model="m", prices=(3.0, 5.0)))
        code, report = run(
            "TwoTurns", "--episodes", "4", "--reward_funcs", f"{__name__}.priced", "--max_new_tokens", "4"
        )
    assert code == 0 and "about 1,000 questions and 110,000 tokens, which cost 0.35 by prices" in report


@PLANS_ONE
def test_rewards_that_are_not_known_here_are_not_judged() -> None:
    code, report = run("PaysFailures", "--reward_funcs", "think_format_reward")
    assert code == 0 and MISSES not in report


@PLANS_ONE
def test_limits_and_templates_are_checked(embedded_model: Path, tmp_path: Path) -> None:
    code, report = run("TwoTurns", "--max_model_length", "10")
    assert code == 1 and "leaves no room to answer within max_model_length=10" in report
    AutoConfig.from_pretrained(embedded_model).save_pretrained(tmp_path / "bare")
    code, report = run("TwoTurns", "--model", str(tmp_path / "bare"))
    assert code == 1 and "makes no tokens of the first prompt" in report
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    whole, cut = "{{ message['content'] }}", "{{ '' if not loop.last else message['content'] }}"
    assert tokenizer.chat_template.count(whole) == 1
    tokenizer.chat_template = tokenizer.chat_template.replace(whole, cut)
    AutoConfig.from_pretrained(embedded_model).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code, report = run("TwoTurns", "--model", str(tmp_path))
    assert code == 1 and "rewrites earlier turns" in report.partition("Not ready to train:")[2]
    assert "by the model" not in report, "no weights are loaded for what cannot work"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--environment is missing"),
        (["--environment", "agile:guess_number", "--episodes", "1"], "episodes must be at least 2"),
        (
            ["--environment", "agile:guess_number", "--scripted_policy", "me"],
            "scripted_policy must be one of auto, model, random, expert",
        ),
        (["--environment", "agile:guess_number", "--gae_lambda", "0.9"], "--gae_lambda"),
        (["ppo", "--environment", "agile:guess_number"], "--use_peft is missing"),
        (
            ["reinforce", "--environment", "agile:guess_number", "--num_generations", "4"],
            "num_generations=4 has no effect",
        ),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, ValueError)) as stopped:
        check.main(options)
    assert message in capsys.readouterr().err + str(stopped.value)


@PLANS_ONE
def test_the_command_finds_an_environment_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_alone.py").write_text(
        "class Mine:\n"
        "    def reset(self, seed=None, options=None):\n        return 'Say yes.', {}\n"
        "    def step(self, action):\n        return 'so', len(action) * 0.1, True, False, {}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    options = ["--environment", "mine_alone:Mine", "--episodes", "4", "--max_new_tokens", "4"]
    assert main(["check", *options]) == 0
    assert "Mine follows it" in capsys.readouterr().out
    assert main(["check", *options, "--max_model_length", "5"]) == 1


# --------------------------------------------------------------------------------------------------------------- seat


@pytest.mark.parametrize("environment", [TwoTurns, Awaited])
def test_a_policy_in_the_seat_is_tokenized_and_cut_as_a_model_is(embedded_model: Path, environment: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    heard: list[tuple[str | None, Any, float | None]] = []
    seen: list[list[Message]] = []

    def engine(factory: EnvironmentFactory) -> RolloutEngine:
        return RolloutEngine(EnvironmentPool(factory), ChatRenderer(tokenizer), Limits(5, 4, 4096))

    def policy(messages: list[Message], rng: random.Random) -> str:
        seen.append(list(messages))
        return "yes" if len(messages) == 1 else "yes 1 2 3 4 5 6 7"

    specs = [EpisodeSpec(3, (3,)), EpisodeSpec(4, (4,))]
    played = play_scripted(engine, environment, lambda _: policy, specs, tokenizer, lambda *said: heard.append(said))
    for trajectory in played:
        first, second = trajectory.turns
        assert trajectory.completion_ids[: first.end] == [*tokenizer.encode("yes"), tokenizer.eos_token_id]
        assert (first.text, first.reward, second.finish_reason) == ("yes", 1.0, "length")
        assert trajectory.completion_ids[second.start : second.end] == tokenizer.encode("yes 1 2 3 4 5 6 7")[:4]
        assert second.reward == -0.5
    cut = played[0].turns[1].text
    assert heard[:3] == [(None, "Question 3?", None), ("yes", "Another?", 1.0), (cut, "Another?", -0.5)]
    assert [message["content"] for message in seen[1]] == ["Question 3?", "yes", "Another?"]
    assert [message["content"] for message in seen[2]] == ["Question 4?"], "the next episode starts anew"


class LastPage(TwoTurns):
    """Four turns, of which the model sees the task and the last page; or, by chance, a window of its own."""

    def step(self, action: str) -> Any:
        self.turn += 1
        return f"Page {self.turn}.", float(action == "yes"), self.turn == 4, False, {"success": action == "yes"}

    def context(self, messages: Any) -> list[Message]:
        return [*messages.prompt, *messages[-1:]] if len(messages) > 1 else messages


@PLANS_ONE
def test_what_rewritten_contexts_cost_is_said(embedded_model: Path) -> None:
    options = ("--episodes", "8", "--max_new_tokens", "8", "--scripted_policy", "expert")
    code, report = run("LastPage", *options)
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    chat, answer = ChatRenderer(tokenizer), len(tokenizer.encode("yes")) + 1
    first = chat.first("Question 1?")
    pages = [
        chat.first([{"role": "user", "content": text} for text in ("Question 1?", f"Page {n}.")]) for n in (1, 2, 3)
    ]
    tree = {tuple(ids[: n + 1]) for ids in (first, *pages) for n in range(len(ids))}
    computed = len(tree) + 4 * answer
    grown = len(first) + 4 * answer + sum(len(chat.delimited(f"Page {n}.", tokenizer.eos_token_id)) for n in (1, 2, 3))
    expected = (
        f"of the turns 75% because of the history. An episode has {computed} tokens to compute, {computed / grown:.2f} "
        f"times the {grown} of a conversation that only grows"
    )
    assert code == 0 and expected in report, report
    assert "[rewritten_every_turn] 100% of the turns after the first" in report
    reads_all = "an update reads all paths of an episode at once"
    assert computed > 1.5 * (max(map(len, pages)) + answer) and reads_all in report
    assert reads_all not in run("LastPage", *options, "--max_tokens_per_micro_batch", "500")[1]
    code, report = run("LastPage", *options, "--history", "full")
    assert code == 0 and "rewrites  " not in report and "rewritten_every_turn" not in report


@PLANS_ONE
def test_each_of_several_environments_is_checked_with_its_own_history() -> None:
    several = json.dumps({name: f"{__name__}:{name}" for name in ("TwoTurns", "LastPage")})
    options = ("--episodes", "4", "--scripted_policy", "expert", "--max_new_tokens", "8")
    for history, rewritten in (('{"LastPage": "full"}', 0), ('{"TwoTurns": "full"}', 1), ("last:9", 0)):
        code, report = run(several, *options, "--history", history)
        assert code == 0 and report.count("because of the history") == rewritten, report


def test_a_history_of_no_environment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    several = json.dumps({name: f"{__name__}:{name}" for name in ("TwoTurns", "LastPage")})
    for environment, history in ((several, '{"Other": "full"}'), ("TwoTurns", '{"TwoTurns": "full"}')):
        with pytest.raises(SystemExit):
            run(environment, "--history", history)
        assert "none of the environments" in capsys.readouterr().err
