"""What a user sees of a run: metrics, episodes on disk, rewards, evaluation, checkpoints."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset
from games import Chatter, Gradients, draw_batch, make_trainer, relative_error
from peft import PeftModel
from recorded import recorded
from transformers import AutoModelForCausalLM

from agile_trainers.types import StopReason


def generations(folder):
    return recorded(folder)


@pytest.fixture(scope="module")
def plain(embedded_model, tmp_path_factory):
    """The tokens of a step without any option, and its gradient."""
    folder, gradients = tmp_path_factory.mktemp("plain"), Gradients()
    make_trainer(embedded_model, folder, callbacks=[gradients]).train()
    return [r["completion_ids"] for r in generations(folder)], gradients.steps[0]


def test_metrics_agree_with_the_episodes_on_disk(embedded_model, tmp_path):
    trainer = make_trainer(embedded_model, tmp_path, per_device_train_batch_size=16)
    trainer.train()
    logged, records = trainer.state.log_history[0], generations(tmp_path)
    assert len(records) == 16
    returns = np.array([r["return"] for r in records])
    assert logged["return/mean"] == pytest.approx(returns.mean())
    assert logged["return/std"] == pytest.approx(returns.std(ddof=1))
    assert logged["reward"] == pytest.approx(returns.mean(), abs=1e-6)
    assert logged["success"] == pytest.approx(np.mean([r["success"] for r in records]))
    assert logged["turns/mean"] == pytest.approx(np.mean([len(r["turns"]) for r in records]))
    answers = sum(len(r["turns"]) for r in records)
    tokens = sum(i >= 0 for r in records for i in r["turn_ids"])
    assert logged["tokens_per_turn"] == pytest.approx(tokens / answers)
    assert logged["num_tokens"] == sum(len(r["prompt_ids"]) + len(r["completion_ids"]) for r in records)
    assert sum(logged[f"stop/{reason.value}"] for reason in StopReason) == pytest.approx(1.0)
    advantages = [turn["advantage"] for r in records for turn in r["turns"]]
    assert logged["advantage/std"] == pytest.approx(np.std(advantages, ddof=1), rel=1e-5)
    assert logged["time/rollout"] > 0 and logged["time/update"] > 0 and logged["rollout_tokens_per_second"] > 0
    for name in ("zero_advantage_groups", "turns_without_comparison", "entropy", "loss", "grad_norm"):
        assert name in logged


def test_advantages_on_disk_are_the_formulas(embedded_model, tmp_path):
    """Recomputed from the file alone: turn k against turn k of the group's members that reached it."""
    make_trainer(embedded_model, tmp_path, gamma=0.5, scale_rewards="none").train()
    records = generations(tmp_path)
    for group in {r["group"] for r in records}:
        members = [r for r in records if r["group"] == group]
        rewards = [[turn["reward"] for turn in r["turns"]] for r in members]
        for k in range(max(map(len, rewards))):
            reached = {
                i: sum(0.5**j * x for j, x in enumerate(row[k:])) for i, row in enumerate(rewards) if k < len(row)
            }
            mean = sum(reached.values()) / len(reached)
            for i, value in reached.items():
                expected = value - mean if len(reached) > 1 else 0.0
                assert members[i]["turns"][k]["advantage"] == pytest.approx(expected, abs=1e-6)


def test_advantages_reach_the_turns_tokens_only(embedded_model, tmp_path):
    trainer = make_trainer(embedded_model, tmp_path)
    batch = draw_batch(trainer)
    for row, record in enumerate(generations(tmp_path)):
        for position, k in enumerate(record["turn_ids"]):
            expected = record["turns"][k]["advantage"] if k >= 0 else 0.0
            assert batch["advantages"][row, position].item() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(batch["tool_mask"] == 1, batch["turn_ids"] >= 0)


def test_reward_functions_are_added_to_the_last_turn(embedded_model, tmp_path):
    calls = {}

    def judge(prompts, completions, completion_ids, secret, **_):
        calls.update(prompts=prompts, completions=completions, completion_ids=completion_ids, secret=secret)
        return [float(i) for i in range(len(completions))]

    rows = Dataset.from_dict({"secret": [5, 6, 7]})
    trainer = make_trainer(
        embedded_model, tmp_path, reward_funcs=judge, train_dataset=rows, reward_weights=[2.0], turn_credit="reward",
        scale_rewards="none", num_generations=8, max_steps=1,
    )  # fmt: skip
    trainer.train()
    records = generations(tmp_path)
    assert calls["prompts"][0] == records[0]["prompt"]
    assert calls["completion_ids"][0] == records[0]["completion_ids"]
    assert calls["completions"][0][0] == {"role": "assistant", "content": records[0]["turns"][0]["text"]}
    assert calls["completions"][0][1]["role"] == "user"
    assert len(set(calls["secret"])) == 1, "a group is one row"
    # All episodes of the group share their length, so the last turn's reward is compared as it is.
    last = [r["turns"][-1]["reward"] + 2.0 * i for i, r in enumerate(records)]
    for record, value in zip(records, last):
        assert record["turns"][-1]["advantage"] == pytest.approx(value - np.mean(last), abs=1e-5)
    logged = trainer.state.log_history[0]
    assert logged["rewards/judge/mean"] == pytest.approx(3.5)
    assert logged["reward"] == pytest.approx(logged["return/mean"] + 2 * 3.5)


def test_rows_are_handed_to_reset(embedded_model, tmp_path):
    seen = []

    class Asking(Chatter):
        def reset(self, seed=None, options=None):
            seen.append(options)
            return super().reset(seed, options)

    rows = Dataset.from_dict({"secret": [1, 2], "prompt": ["unused", "unused"]})
    make_trainer(embedded_model, tmp_path, environment=Asking, train_dataset=rows).train()
    trained = seen[-8:]
    assert [row["secret"] for row in trained] in ([1] * 4 + [2] * 4, [2] * 4 + [1] * 4)
    make_trainer(embedded_model, tmp_path, environment=Asking).train()
    assert seen[-1] is None


def test_failed_episodes_are_counted_and_not_trained_on(embedded_model, tmp_path):
    class Fragile(Chatter):
        def step(self, action):
            if len(action) % 2:
                raise RuntimeError("odd")
            return super().step(action)

    gradients = Gradients()
    # The construction check sends "0", which is odd: it must not.
    with pytest.raises(ValueError, match="odd"):
        make_trainer(embedded_model, tmp_path, environment=Fragile)

    class FragileLater(Fragile):
        def step(self, action):
            return Chatter.step(self, action) if action == "0" else super().step(action)

    trainer = make_trainer(embedded_model, tmp_path, environment=FragileLater, callbacks=[gradients])
    trainer.train()
    records = generations(tmp_path)
    failed = [r for r in records if r["stop_reason"] == "environment_error"]
    assert 0 < len(failed) < len(records)
    assert trainer.state.log_history[0]["stop/environment_error"] == len(failed) / len(records)
    assert all(turn["advantage"] == 0 for r in failed for turn in r["turns"])
    assert (
        failed[0]["error"].startswith("RuntimeError: odd (test_multi_turn_grpo.py, line ")
        and failed[0]["completion_ids"]
    )
    batch = draw_batch(make_trainer(embedded_model, tmp_path / "2", environment=FragileLater))
    for row, record in enumerate(generations(tmp_path / "2")):
        assert (batch["tool_mask"][row].sum() == 0) == (record["stop_reason"] == "environment_error")


def test_truncated_episodes_can_be_masked(embedded_model, tmp_path):
    trainer = make_trainer(
        embedded_model, tmp_path, max_turns=2, mask_truncated_completions=True, per_device_train_batch_size=32
    )
    batch = draw_batch(trainer)
    reasons = [record["stop_reason"] for record in generations(tmp_path)]
    assert {"max_turns", "terminated"} <= set(reasons)
    for row, reason in enumerate(reasons):
        assert (batch["tool_mask"][row].sum() == 0) == (reason == "max_turns")
        assert batch["completion_mask"][row].sum() > 0, "masked from the loss, not from attention"


def test_evaluation_leaves_the_training_stream_alone(embedded_model, tmp_path):
    """The same run with and without an evaluation between its steps: same episodes, same weights, same random state."""
    finals = []
    for name, changes in (("plain", {}), ("evaluated", {"eval_strategy": "steps", "eval_steps": 1})):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        trainer = make_trainer(embedded_model, tmp_path / name, max_steps=2, num_eval_episodes=6, **changes)
        trainer.train()
        state = (random.random(), np.random.rand(), torch.rand(1).item())
        finals.append((generations(tmp_path / name), trainer.model.state_dict(), state, trainer.state.log_history))
    (plain, weights, state, _), (evaluated, other_weights, other_state, history) = finals
    assert [r["completion_ids"] for r in plain] == [r["completion_ids"] for r in evaluated]
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert state == other_state
    logged = [entry for entry in history if "eval_return" in entry]
    assert len(logged) == 2 and logged[0]["eval_episodes"] == 6
    evaluations = recorded(tmp_path / "evaluated", "eval")
    seeds = [[r["seed"] for r in evaluations if r["step"] == step] for step in sorted({r["step"] for r in evaluations})]
    assert len(seeds) == 2 and seeds[0] == seeds[1], "every evaluation plays the same seeds"
    assert not set(seeds[0]) & {r["seed"] for r in plain}


def test_evaluation_rows_greedy_and_best_model(embedded_model, tmp_path):
    rows = Dataset.from_dict({"secret": [1, 2, 3]})
    trainer = make_trainer(
        embedded_model, tmp_path, eval_dataset=rows, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1, max_steps=2, load_best_model_at_end=True, metric_for_best_model="return", num_eval_episodes=4,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric is not None
    metrics = trainer.evaluate(num_episodes=3, greedy=True)
    assert metrics["eval_episodes"] == 3
    again = trainer.evaluate(num_episodes=3, greedy=True)
    assert metrics["eval_return"] == again["eval_return"]
    named = trainer.evaluate({"a": rows, "b": rows}, num_episodes=2)
    assert {"eval_a_return", "eval_b_return"} <= named.keys()
    with pytest.raises(ValueError, match=r"num_episodes.*0"):
        trainer.evaluate(num_episodes=0)


def test_the_checkpoint_is_a_plain_adapter(embedded_model, tmp_path):
    trainer = make_trainer(embedded_model, tmp_path)
    trainer.train()
    trainer.save_model()
    base = AutoModelForCausalLM.from_pretrained(embedded_model)
    loaded = PeftModel.from_pretrained(base, tmp_path)
    ids = torch.arange(5, 25)[None]
    trainer.model.eval()
    torch.testing.assert_close(loaded(ids).logits, trainer.model(ids).logits, rtol=0, atol=1e-6)


def test_full_fine_tuning(embedded_model, tmp_path):
    gradients = Gradients()
    make_trainer(embedded_model, tmp_path, lora=False, callbacks=[gradients], beta=0.05).train()
    assert any("lm_head" in name for name in gradients.steps[0])
    assert sum(g.abs().sum() for g in gradients.steps[0].values()) > 0


def test_gradient_checkpointing_changes_no_gradient(embedded_model, tmp_path, plain):
    gradients = Gradients()
    make_trainer(embedded_model, tmp_path, gradient_checkpointing=True, callbacks=[gradients]).train()
    assert relative_error(gradients.steps[0], plain[1]) < 1e-6


@pytest.mark.parametrize(
    "changes",
    [{"environment_workers": 4, "environment_timeout": 30.0}, {"generation_chunk_size": 3}],
    ids=["threads", "chunks"],
)
def test_threads_and_chunks_play_the_same_episodes(embedded_model, tmp_path, plain, changes):
    draw_batch(make_trainer(embedded_model, tmp_path, **changes))
    assert [r["completion_ids"] for r in generations(tmp_path)] == plain[0]


def test_a_system_prompt_opens_every_episode(embedded_model, tmp_path):
    make_trainer(embedded_model, tmp_path, system_prompt="Be brief.").train()
    assert generations(tmp_path)[0]["prompt"][0] == {"role": "system", "content": "Be brief."}


def test_rollouts_can_be_left_unwritten(embedded_model, tmp_path):
    make_trainer(embedded_model, tmp_path, log_rollouts=False).train()
    assert not (tmp_path / "rollouts").exists()


def test_whiten_and_clip_act(embedded_model, tmp_path):
    make_trainer(embedded_model, tmp_path, whiten_advantages=True, advantage_clip_range=0.5).train()
    advantages = [turn["advantage"] for r in generations(tmp_path) for turn in r["turns"]]
    assert max(map(abs, advantages)) == 0.5
    make_trainer(embedded_model, tmp_path / "white", whiten_advantages=True, scale_rewards="none").train()
    white = [turn["advantage"] for r in generations(tmp_path / "white") for turn in r["turns"]]
    assert np.mean(white) == pytest.approx(0, abs=1e-6) and np.std(white, ddof=1) == pytest.approx(1, rel=1e-4)


def test_the_training_template_is_saved_with_the_run(embedded_model, tmp_path):
    """Qwen3's template drops earlier thinking; TRL's training version keeps it, and must be what the folder renders."""
    from pathlib import Path

    import trl
    from games import settings
    from transformers import AutoTokenizer

    from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text()
    with pytest.raises(ValueError, match="training_chat_template"):
        args = MultiTurnGRPOConfig(**settings(tmp_path, on_rewrite="refuse"))
        MultiTurnGRPOTrainer(str(embedded_model), args=args, processing_class=tokenizer, environment=Chatter)
    args = MultiTurnGRPOConfig(**settings(tmp_path, training_chat_template=True))
    trainer = MultiTurnGRPOTrainer(str(embedded_model), args=args, processing_class=tokenizer, environment=Chatter)
    trainer.train()
    trainer.save_model()
    saved = AutoTokenizer.from_pretrained(tmp_path).chat_template
    assert saved == trainer.engine.chat.chat_template and "generation" in saved


def test_environments_are_reused_and_closed(embedded_model, tmp_path):
    made, closed = [], []

    class Closing(Chatter):
        def __init__(self):
            made.append(self)

        def close(self):
            closed.append(self)

    trainer = make_trainer(embedded_model, tmp_path, environment=Closing, max_steps=2)
    before = len(made)
    trainer.train()
    # One instance per episode that runs at the same time (the construction check left one), for both batches.
    assert len(made) - before == 7
    assert set(map(id, made)) == set(map(id, closed))
    trainer.evaluate(num_episodes=2)
    assert set(map(id, made)) == set(map(id, closed))


def test_turns_from_the_same_state_are_compared_whatever_their_index(embedded_model, tmp_path):
    """The advantages on disk, made again from the rewards and the states on disk. No episode is compared with itself."""
    trainer = make_trainer(
        embedded_model, tmp_path, environment=Anchored, advantage_granularity="anchor",
        scale_rewards="none", num_generations=8, max_steps=1,
    )  # fmt: skip
    trainer.train()
    episodes = [record["turns"] for record in generations(tmp_path)]
    returns = [sum(turn["reward"] for turn in turns) for turns in episodes]
    turns = [
        (i, named, sum(later["reward"] for later in turns[k:]), returns[i] - sum(returns) / 8, turn["advantage"])
        for i, turns in enumerate(episodes)
        for k, (named, turn) in enumerate(zip(["start", *(t["info"]["anchor"] for t in turns)], turns))
    ]
    counts = Counter((i, named) for i, named, *_ in turns)
    assert max(counts.values()) > 1 and len({named for _, named in counts}) > 1
    for i, named, to_go, whole, advantage in turns:
        others = [value for j, other, value, *_ in turns if j != i and other == named]
        part = to_go - (to_go + sum(others)) / (1 + len(others))
        assert advantage == pytest.approx(whole + part, abs=1e-5)


class Anchored(Chatter):
    """Chatter whose state is one of two names; it starts in one of them."""

    def reset(self, seed=None, options=None):
        observation, _ = super().reset(3, options)
        return observation, {"anchor": "start"}

    def step(self, action):
        *answer, info = super().step(action)
        return *answer, {**info, "anchor": "start" if len(action) % 2 else "elsewhere"}


def test_the_entropy_bonus_may_fall_over_the_run(embedded_model, tmp_path):
    options = {"entropy_coef": 0.3, "max_steps": 2}
    trainer = make_trainer(embedded_model, tmp_path / "linear", entropy_coef_schedule="linear", **options)
    trainer.train()
    logged = [entry["entropy_coef"] for entry in trainer.state.log_history if "entropy_coef" in entry]
    assert logged == pytest.approx([0.3, 0.15])
    constant = make_trainer(embedded_model, tmp_path / "constant", **options)
    constant.train()
    weights = [dict(t.model.named_parameters()) for t in (trainer, constant)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    with pytest.raises(ValueError, match=r"entropy_coef.*0\.0"):
        make_trainer(embedded_model, tmp_path, entropy_coef_schedule="linear")
