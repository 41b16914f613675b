"""The demo, with a tiny budget; the full one is ``make demo``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from cards import cards_of
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM

from agile_environments.guess_number import demonstrations, halving_policy, random_policy
from agile_trainers.checkpoints.model_card import moving_average
from agile_trainers.cli import demo as demo
from agile_trainers.cli.demo import Budget, some_games
from agile_trainers.records.writer import RecordWriter, episode_row
from agile_trainers.rollout.generators.base import GenerationRequest
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.types import StopReason, Trajectory, Turn

Finished = tuple[Path, Mapping[str, Mapping[str, float]]]
TINY = Budget(sft_steps=2, sft_batch=4, rl_steps=2, eval_episodes=36)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    output = tmp_path_factory.mktemp("demo")
    with (output / "screen.txt").open("w") as screen:
        return output, demo.run(output, seed=0, budget=TINY, console=Console(file=screen, width=100))


def test_everything_promised_is_written(finished: Finished) -> None:
    output, scores = finished
    assert list(scores) == ["random play", "after SFT", "after RL", "optimal play"]
    screen = (output / "screen.txt").read_text()
    for expected in ("random play", "after SFT", "after RL", "optimal play", "PeftModel.from_pretrained", "2/2"):
        assert expected in screen
    assert screen.count("environment: Guess the number between 1 and 12") == 3


def test_the_adapters_card_compares_with_the_baselines(finished: Finished) -> None:
    output, scores = finished
    (card,) = cards_of(output).values()
    table = card.partition("## Evaluation")[2].partition("##")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()[2:]]
    rows = {name: success for name, _, success, _ in cells}
    expected = {
        "before training": "after SFT",
        "2": "after RL",
        **{name: name for name in ("random play", "optimal play")},
    }
    assert len(cells) == 4 and rows == {name: f"{scores[key]['eval_success']:.1%}" for name, key in expected.items()}
    assert "mean of the 9 logs" in card and "Dashed lines" in card
    assert (output / "adapter" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_model_that_the_adapter_is_on_has_a_card(finished: Finished) -> None:
    card = (finished[0] / "sft" / "README.md").read_text(encoding="utf-8")
    assert "untrained, trained with SFT on `agile_environments.guess_number:demonstrations`: 2 updates" in card
    assert 'AutoModelForCausalLM.from_pretrained("sft")' in card


def test_adapter_loaded_anew_plays_as_reported(finished: Finished, tmp_path: Path) -> None:
    output, scores = finished
    base = AutoModelForCausalLM.from_pretrained(output / "sft")
    model = PeftModel.from_pretrained(base, output / "adapter", is_trainable=True)
    trainer = demo.make_trainer(model, tmp_path, seed=0, budget=TINY)
    metrics = trainer.evaluate()
    assert all(metrics[name] == scores["after RL"][name] for name in ("eval_success", "eval_return"))


def test_scripted_policies_are_measured_by_the_same_engine(finished: Finished, tmp_path: Path) -> None:
    """Halving never needs more than four guesses; four uniform guesses find one of twelve with 1 - (11/12)^4."""
    output, scores = finished
    best = {"eval_success": 1.0, "eval_return": 1.0}
    assert scores["optimal play"] == best | {"eval_episodes": TINY.eval_episodes}
    trainer = demo.make_trainer(str(output / "sft"), tmp_path, seed=0, budget=TINY)
    played = trainer.processing_class, trainer.args
    success = demo.scripted_scores(random_policy, *played, 1200)["eval_success"]
    assert abs(success - (1 - (11 / 12) ** 4)) < 4 * (0.21 / 1200) ** 0.5
    assert demo.scripted_scores(halving_policy, *played, 12) == best | {"eval_episodes": 12}


def test_supervised_tokens_are_those_of_a_rollout(finished: Finished, tmp_path: Path) -> None:
    """The games SFT trains on, replayed through the rollout engine, give the same ids; the labels are the turns."""
    output, _ = finished
    sft = demo.make_sft_trainer(output / "untrained", tmp_path, seed=0, budget=TINY)
    trainer = demo.make_trainer(str(output / "sft"), tmp_path, seed=0, budget=TINY)
    for seed, (row, game) in enumerate(zip(sft.train_dataset, demonstrations(8))):
        answers = iter([message["content"] for message in game["messages"] if message["role"] == "assistant"])

        def script(_: GenerationRequest, answers: Iterator[str] = answers) -> list[int]:
            return [*trainer.processing_class.encode(next(answers)), trainer.processing_class.eos_token_id]

        (episode,) = trainer.engine.run([EpisodeSpec(seed, (0,))], ScriptedGenerator(script))
        assert row["input_ids"][:-1] == episode.prompt_ids + episode.completion_ids  # the template ends with a newline
        trained = {position for position, label in enumerate(row["labels"]) if label != -100}
        offset = len(episode.prompt_ids)
        assert trained == {offset + token for turn in episode.turns for token in range(turn.start, turn.end)}


def test_moving_average_shrinks_at_the_ends() -> None:
    assert moving_average([1, 2, 6, 3], 3) == [1.5, 3.0, 11 / 3, 4.5]
    assert moving_average([], 3) == []


def test_games_shown_are_the_longest_of_the_last_evaluation(tmp_path: Path) -> None:
    def episode(secret: int, turns: int) -> dict:
        made = [Turn(n, n + 1, "1", "stop", float(n == 0), "higher") for n in range(turns)]
        prompt = [{"role": "user", "content": "Guess."}]
        stop, infos = StopReason.TERMINATED, {"secret": secret}
        return episode_row(Trajectory([1], [2] * turns, [-1.0] * turns, made, stop, prompt, infos))

    RecordWriter(tmp_path, {"kind": "evaluation"}).write_eval(0, "eval", [episode(9, 4)])
    writer = RecordWriter(tmp_path, {})
    writer.write_eval(160, "eval", [episode(1, 1), episode(2, 3), episode(3, 2), episode(2, 3)])
    writer.write_train(159, [episode(8, 4)])
    games = some_games(tmp_path / "rollouts", count=2).split("\n\n")
    assert [game.splitlines()[-1] for game in games] == [f"(the number was {n}; return +1.0)" for n in (2, 3)]
    assert games[1].splitlines()[:3] == ["environment: Guess.", "      model: 1", "environment: higher"]
