"""Episode records of real runs: what the update computed stands at the tokens that it was computed for."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from errors import naming
from games import Chatter, make_trainer
from path_episodes import call_by_call, measured, programs
from ppo_games import make_ppo
from recorded import recorded, sampled
from trl import GRPOTrainer

from agile_trainers.monitor import rollout_log
from agile_trainers.records.reader import open_records
from agile_trainers.records.schema import TRAINED, path_ids

UPDATE: dict[str, Any] = {
    # One generation batch: four shuffled micro-batches, two optimizer steps a pass, two passes.
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2,
    "max_steps": 4, "learning_rate": 0.5,
}  # fmt: skip


class TokenBatches:
    """The log-probabilities that every forward pass of the loss returns, by the tokens of the episode."""

    def __init__(self, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_episode: dict[tuple[int, ...], list[np.ndarray]] = {}
        original = GRPOTrainer._get_per_token_logps_and_entropies

        def watched(this: Any, *args: Any, **kwargs: Any) -> Any:
            results = original(this, *args, **kwargs)
            if (handed := this._loss_pass) is not None:
                for row in range(len(results[0])):
                    ids = handed.batch.completion_ids[row][handed.batch.completion_mask[row] > 0]
                    prompt = handed.batch.prompt_ids[row][handed.batch.prompt_mask[row] > 0]
                    values = results[0][row, : len(ids)].detach().numpy().copy()
                    self.by_episode.setdefault((*prompt.tolist(), -1, *ids.tolist()), []).append(values)
            return results

        monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", watched)

    def of(self, record: dict[str, Any]) -> list[np.ndarray]:
        return self.by_episode[(*record["prompt_ids"], -1, *record["completion_ids"])]


def numbers(record: dict[str, Any], name: str) -> np.ndarray:
    """(T,) float, NaN for null."""
    return np.array([np.nan if value is None else float(value) for value in record[name]])


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_tokens_have_what_the_last_pass_computed(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """Ratios, clipping and divergence by numpy, from the log-probabilities of the passes that the loss made."""
    trainer = make_trainer(
        embedded_model, tmp_path, importance_sampling_level=level, beta=0.1, epsilon=0.05, epsilon_high=0.1, **UPDATE
    )
    passes = TokenBatches(trainer, monkeypatch)
    trainer.train()
    records = recorded(tmp_path)
    assert [(r["index"], r["group"], r["member"]) for r in records] == [(n, n // 4, n % 4) for n in range(8)]
    seen = []
    for record in records:
        actions = np.array(record["turn_ids"]) >= 0
        first, last = passes.of(record)[0], passes.of(record)[-1]
        assert len(passes.of(record)) % 2 == 0 and not np.allclose(first[actions], last[actions], atol=1e-3)
        old = numbers(record, "logprobs")
        assert (np.isnan(old) == ~actions).all()
        np.testing.assert_allclose(old[actions], sampled(record)[actions], rtol=0, atol=1e-6 + 2**-12)
        log_ratio = np.where(actions, last - old, 0.0)
        units = {
            "token": np.arange(len(actions)), "turn": np.array(record["turn_ids"]), "sequence": np.zeros(len(actions)),
        }[level]  # fmt: skip
        pooled = [log_ratio[actions & (units == unit)].mean() for unit in units[actions]]
        ratios = numbers(record, "ratios")
        np.testing.assert_allclose(ratios[actions], np.exp(pooled), rtol=1e-3)
        advantages = numbers(record, "advantages")
        turns = [record["turns"][k]["advantage"] for k in np.array(record["turn_ids"])[actions]]
        expected = [np.mean(turns)] * len(turns) if level == "sequence" else turns
        np.testing.assert_allclose(advantages[actions], expected, rtol=1e-3, atol=1e-6)
        clipped = ((ratios > 1.1) & (advantages > 0)) | ((ratios < 0.95) & (advantages < 0))
        assert (numbers(record, "clipped")[actions] == clipped[actions]).all()
        kl = numbers(record, "kl")
        assert (np.isnan(kl) == ~actions).all() and (kl[actions] >= 0).all() and kl[actions].max() > 0
        seen.append((clipped[actions], kl[actions]))
    assert 0 < np.concatenate([clipped for clipped, _ in seen]).mean() < 1
    # A pass is two optimizer steps of half of the tokens each, whose metrics are means over these.
    lines = open_records(tmp_path)[0].metrics()
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert lines[3]["kl"] == trainer.state.log_history[3]["kl"] != lines[2]["kl"]


def test_the_divergence_and_the_clipped_share_are_those_that_trl_logs(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(
        embedded_model, tmp_path, beta=0.1, epsilon=0.05, num_iterations=2, max_steps=2, learning_rate=0.5,
        use_bias_correction_kl=False,
    )  # fmt: skip
    trainer.train()
    last, records = trainer.state.log_history[1], recorded(tmp_path)
    for name, metric in (("kl", "kl"), ("clipped", "clip_ratio/region_mean")):
        values = np.concatenate([numbers(record, name) for record in records])
        assert 0 < last[metric] == pytest.approx(np.nanmean(values), rel=4e-3)


@pytest.mark.parametrize("placement", ["reward", "advantage"])
def test_the_divergence_is_there_where_the_penalty_is_not_in_the_loss(
    embedded_model: Path, tmp_path: Path, placement: str
) -> None:
    make_trainer(embedded_model, tmp_path, beta=0.1, kl_placement=placement, num_iterations=2, max_steps=2).train()
    kl = np.concatenate([numbers(record, "kl") for record in recorded(tmp_path)])
    assert np.nanmin(kl) >= 0 and np.nanmax(kl) > 1e-5


def test_turns_have_values_returns_and_advantages(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_ppo(embedded_model, tmp_path, gamma=0.5, max_steps=2)
    trainer.train()
    records = recorded(tmp_path)
    assert {record["step"] for record in records} == {0, 1} and max(len(record["turns"]) for record in records) > 1
    for record in records:
        to_go = 0.0
        for turn in reversed(record["turns"]):
            to_go = turn["reward"] + 0.5 * to_go
            assert turn["return"] == pytest.approx(to_go, rel=1e-6)
    values = [turn["value"] for record in records for turn in record["turns"]]
    assert None not in values and any(values)
    assert all(record["kl"] is None and set(record["ratios"]) <= {1.0, None} for record in records)


def test_what_was_not_trained_on_has_null(embedded_model: Path, tmp_path: Path) -> None:
    """Failed and truncated episodes, and those without an advantage where they are left out."""

    class Fragile(Chatter):
        def step(self, action: str) -> Any:
            if action != "0" and self.length == 2:
                raise RuntimeError("two")
            observation, _, *rest = super().step(action)
            return observation, float(self.length == 1 and len(action) % 2), *rest

    trainer = make_trainer(
        embedded_model, tmp_path, environment=Fragile, skip_zero_advantage=True, mask_truncated_completions=True,
        per_device_train_batch_size=16, max_steps=3, max_turns=3, seed=5,
    )  # fmt: skip
    trainer.train()
    reasons = set()
    for record in recorded(tmp_path):
        zero = not any(turn["advantage"] for turn in record["turns"])
        failed = record["stop_reason"] == "environment_error"
        truncated = record["truncated"] or record["turns"][-1]["finish_reason"] == "length"
        reasons.add((zero, failed, truncated))
        if failed or truncated:
            assert all(record[name] is None for name in TRAINED)
        elif not zero:
            assert all(record[name] is not None for name in TRAINED if name != "kl")
        assert record["kl"] is None
    assert {(False, False, False), (True, False, False), (True, True, False), (True, False, True)} <= reasons
    left_out = [
        r
        for r in recorded(tmp_path)
        if r["stop_reason"] == "terminated" and not any(t["advantage"] for t in r["turns"])
    ]
    assert len([record for record in left_out if record["ratios"] is None]) > len(left_out) / 2


@pytest.mark.parametrize("budget", [None, 20])
def test_calls_of_several_paths_have_what_was_computed_for_them(
    embedded_model: Path, tmp_path: Path, budget: int | None
) -> None:
    """Log-probabilities as a forward pass of each call alone has them; the episode comes back as it was."""
    trainer = make_trainer(
        embedded_model, tmp_path, per_device_train_batch_size=8, num_iterations=2, max_logprob_gap=100.0,
        vllm_importance_sampling_correction=False, advantage_granularity="trajectory",
    )  # fmt: skip
    episodes = programs()
    with torch.no_grad():
        expected, mask = call_by_call(trainer, episodes)
    measured(trainer, episodes, budget)
    for row, (episode, record) in enumerate(zip(episodes, recorded(tmp_path), strict=True)):
        assert episode.paths == [path_ids(record["paths"], k) for k in range(len(record["paths"]))]
        assert [turn["parent"] for turn in record["turns"]] == episode.parents
        assert record["num_tokens"] == episode.num_tokens - len(episode.prompt_ids)
        for k, turn in enumerate(record["turns"]):
            first = k if episode.turns[k].rewarded is None else episode.turns[k].rewarded
            assert turn["return"] == pytest.approx(sum(episode.rewards[first:]), rel=1e-5)
            tokens = path_ids(record["paths"], turn["path"])[turn["place"] :][: turn["end"] - turn["start"]]
            assert tokens == record["completion_ids"][turn["start"] : turn["end"]] == episode.action_of(k)
        for name in (name for name in TRAINED if name != "kl"):
            assert len(record[name]) == len(record["completion_ids"]) and None not in record[name]
        np.testing.assert_allclose(numbers(record, "logprobs"), expected[row][mask[row]], rtol=0, atol=3e-4)


def test_every_nth_generation_batch_and_every_evaluation(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(
        embedded_model, tmp_path, log_rollouts=2, max_steps=3, num_eval_episodes=3, eval_strategy="steps", eval_steps=1
    )
    trainer.train()
    assert sorted({record["generation"] for record in recorded(tmp_path)}) == [0, 2]
    assert [(r["step"], r["index"], r["group"]) for r in recorded(tmp_path, "eval")] == [
        (step, index, None) for step in (1, 2, 3) for index in range(3)
    ]
    (run,) = open_records(tmp_path)
    assert (
        sum("loss" in line for line in run.metrics()) == 3 and sum("eval_return" in line for line in run.metrics()) == 3
    )
    assert len(run.vocabulary()) == len(trainer.processing_class)
    expected = {"format": 4, "kind": "training", "algorithm": "Multi-turn GRPO", "environment": "Chatter", "seed": 3}
    assert expected.items() <= run.info.items() and run.info["run"] == run.name == trainer.checkpoints.run_id
    assert run.info["model"] == str(embedded_model) and run.info["options"]["max_turns"] == 4


def test_a_run_that_ends_before_the_last_pass_writes_what_it_has(embedded_model: Path, tmp_path: Path) -> None:
    make_trainer(embedded_model, tmp_path, **{**UPDATE, "max_steps": 1}).train()
    records = recorded(tmp_path)
    assert [record["ratios"] is None for record in records].count(False) == 4 == len(records) / 2


def test_reruns_and_evaluations_in_one_folder_stay_apart(embedded_model: Path, tmp_path: Path) -> None:
    """Two runs and two evaluations each, of one trainer before and after its run, by hand and of another trainer."""
    for _ in range(2):
        trainer = make_trainer(embedded_model, tmp_path, num_eval_episodes=2)
        for _ in range(2):
            trainer.evaluate()
        trainer.train()
        for _ in range(2):
            trainer.evaluate()
    trainer.rollout(generation=5)  # played by hand, and never trained on
    runs = open_records(tmp_path)
    assert [(run.info["kind"], len(run.index()), len(run.files)) for run in runs] == [
        *[("training", 8 + 4, 3)] * 2, *[("evaluation", 4, 2)] * 2,
    ]  # fmt: skip
    assert len({run.name for run in runs}) == 4
    assert [path.name for path in runs[0].files] == [
        "eval-000001-eval-rank0.parquet", "eval-000001-eval.2-rank0.parquet", "train-000000-rank0.parquet",
    ]  # fmt: skip


def test_a_run_stays_within_its_size(
    embedded_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("agile_trainers").propagate = True
    monkeypatch.setattr(rollout_log, "_MOST_BYTES", 1)
    trainer = make_trainer(embedded_model, tmp_path, max_steps=3)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert {record["generation"] for record in recorded(tmp_path)} == {2}
    assert caplog.text.count("train-000000-rank0.parquet was deleted") == 1
    assert sum("loss" in line for line in open_records(tmp_path)[0].metrics()) == 3


@pytest.mark.parametrize("value", [-1, 1.5, "often"])
def test_how_often_is_a_number_of_batches(tmp_path: Path, embedded_model: Path, value: Any) -> None:
    with pytest.raises(ValueError, match=naming("log_rollouts", value)):
        make_trainer(embedded_model, tmp_path, log_rollouts=value)


def test_a_vocabulary_and_options_without_secrets_are_written_once(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, hub_token="hf_secret", max_steps=1)
    trainer.train()
    (run,) = open_records(tmp_path)
    assert "hf_secret" not in json.dumps(run.info)
    ids = torch.tensor(recorded(tmp_path)[0]["completion_ids"])
    text = b"".join(run.vocabulary()[int(token)][0] for token in ids).decode("utf-8", "replace")
    assert text == trainer.processing_class.decode(ids)
