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
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config

from agile_trainers.cli.check import command as check
from agile_trainers.cli.layout import draw_layout
from agile_trainers.cli.main import main
from agile_trainers.embedded import make_tokenizer
from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.evaluation.scripted_policies import play_scripted
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.collate import collate
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.forest import Call, forest
from agile_trainers.rollout.spec import EpisodeSpec, Limits
from agile_trainers.types import Message, StopReason, Trajectory, Turn


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
    assert f"{2 * answer} of {whole} tokens are trained on" in report


def test_success_that_only_winners_report_is_no_success_of_all() -> None:
    _, report = run(
        "SaysWhenItWins", "--episodes", "8", "--max_new_tokens", "8", "--scripted_policy", "expert", "--max_turns", "3"
    )
    found = re.search(r"warning: (\d+)% of the episodes end without info\['success'\]", report)
    assert found is not None and 0 < int(found[1]) < 100, report
    assert f"success {100 - int(found[1])}%" in report


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
    code, report = run("NeverEnds", *options, "--per_device_train_batch_size", "16", "--use_peft")
    assert code == 0 and "4 episodes by the model" in report and f"model {embedded_model}" in report
    assert "warning: [episodes_cut] A limit cut every episode short" in report and "max_turns 100%" in report
    assert "(max_new_tokens=3)" in report and "16 rows x" in report and "of adapters" in report
    assert "The weights are float32" in report
    assert "learning_rate" not in report and "An update sees" not in report
    assert run("NeverEnds", *options)[1] == run("NeverEnds", *options)[1], "sampled with the run's seed"


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
    codes = [check.main([name, *options], Console(file=file, width=400)) for name in ("grpo", "ppo")]
    grpo, ppo = (int(found.replace(",", "")) for found in re.findall(r"([\d,]+) trained x 4 bytes", file.getvalue()))
    assert codes == [0, 0] and ppo == 2 * grpo
    first, second = re.findall(r"an episode at most (\d+)", file.getvalue())
    assert int(second) > int(first), "the state after the last turn is there for the critic"


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


def test_limits_that_the_expert_does_not_fit_in_are_named() -> None:
    code, report = run("agile:calculator", "--episodes", "4", "--max_new_tokens", "64")
    assert code == 0 and "answers of the expert policy were cut at max_new_tokens=64" in report
    assert "the expert is not better than the random policy" in report


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


def test_state_of_a_class_is_found_when_the_model_plays(embedded_model: Path) -> None:
    """Its episodes are played together: replays of each alone agree with each other, and not with what was played."""
    code, report = run("LengthInTheClass", "--model", str(embedded_model), "--max_new_tokens", "4")
    assert code == 1 and "problem: instances share state" in report


@pytest.mark.parametrize("sound", ["TwoTurns", "Awaited", "agile:guess_number", "agile:probe/grid"])
def test_sound_environments_are_not_accused(sound: str) -> None:
    code, report = run(sound)
    assert code == 0 and MISSES not in report and DOUBT not in report and "state" not in report, report


def test_rewards_that_are_not_known_here_are_not_judged() -> None:
    code, report = run("PaysFailures", "--reward_funcs", "think_format_reward")
    assert code == 0 and MISSES not in report


def test_limits_and_templates_are_checked(embedded_model: Path, tmp_path: Path) -> None:
    code, report = run("TwoTurns", "--max_model_length", "10")
    assert code == 1 and "leaves no room to answer within max_model_length=10" in report
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


# ------------------------------------------------------------------------------------------------------------- layout


def episode(stop_reason: StopReason = StopReason.TERMINATED) -> Trajectory:
    turns = [Turn(0, 2, "7", "stop"), Turn(5, 6, "8", "length")]
    return Trajectory([5, 6, 7], [20, 21, 30, 31, 32, 22], [0.0] * 6, turns, stop_reason)


def test_the_layout_brackets_exactly_what_is_trained_on(embedded_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    file = io.StringIO()
    Console(file=file, width=200).print(draw_layout(episode(), tokenizer))
    lines = [line.split(maxsplit=3) for line in file.getvalue().splitlines()]
    assert [line[0] for line in lines[1:-1]] == ["prompt", "answer", "observation", "answer"]
    trained = [tokenizer.decode([token]) for token in (20, 21, 22)]
    drawn = file.getvalue()
    assert all(f"[{piece}]" in drawn for piece in trained) and drawn.count("]") == 3 + 1
    assert "3 of 9 tokens are trained on" in drawn
    mask = collate([episode()], pad_token_id=0, end_token_id=0).action_mask
    assert int(mask.sum()) == 3
    colours = io.StringIO()
    Console(file=colours, width=200, force_terminal=True, color_system="standard").print(
        draw_layout(episode(), tokenizer)
    )
    assert re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", colours.getvalue())[0].startswith(f"[{trained[0]}][{trained[1]}]")


def test_each_path_is_drawn_from_where_it_is_its_own(embedded_model: Path) -> None:
    """An answer that is thrown away, one that begins like it, a third that begins the second, and a helper."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    calls = [
        Call([5, 6], [20, 21], [0.0] * 2),
        Call([5, 6], [20, 22, 23], [0.0] * 3),
        Call([5, 6], [20, 22], [0.0] * 2),
        Call([7, 8, 9], [24], [0.0]),
        Call([5, 6, 20, 22, 23, 30], [25], [0.0]),
    ]
    file = io.StringIO()
    drawn = forest(calls, StopReason.MAX_TURNS, last=[31])
    Console(file=file, width=200).print(draw_layout(drawn, tokenizer))
    lines = [re.split(r"  +", line.strip()) for line in file.getvalue().splitlines()[1:]]

    def pieces(*tokens: int) -> str:
        return "".join(f"[{tokenizer.decode([token])}]" for token in tokens).replace("\n", "\\n").strip()

    assert [line[:2] for line in lines[:-1]] == [
        ["path 1", "4"], ["prompt", "2"], ["answers 1 and 2 and 3", "1"], ["answer 1", "1"],
        ["path 2", "8"], ["answers 2 and 3", "1"], ["answer 2", "1"], ["observation", "1"], ["answer 5", "1"],
        ["observation", "1"], ["path 3", "4"], ["prompt", "3"], ["answer 4", "1"],
    ]  # fmt: skip
    assert lines[4][2] == "begins with 3 of path 1's" and len(lines[0]) == len(lines[10]) == 2
    assert [lines[n][2] for n in (2, 3, 5, 6, 8, 12)] == [pieces(token) for token in (20, 21, 22, 23, 25, 24)]
    end = "6 of 13 tokens are trained on. 3 of them count again, for another answer with the same beginning."
    assert end in file.getvalue()


def test_nothing_of_a_failed_episode_is_trained_on_and_long_parts_are_cut(embedded_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    file = io.StringIO()
    Console(file=file, width=200).print(draw_layout(episode(StopReason.ENVIRONMENT_ERROR), tokenizer))
    assert "0 of 9 tokens are trained on" in file.getvalue()
    long = Trajectory(list(range(10, 110)), [20], [0.0], [Turn(0, 1, "7", "stop")], StopReason.TERMINATED)
    Console(file=file, width=200).print(draw_layout(long, tokenizer))
    assert "... 68 more ..." in file.getvalue() and "1 of 101 tokens" in file.getvalue()


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
