"""Makes records of runs for the tests of the viewer: byte-level tokens, so that a character may be split over several."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agile_trainers.records.schema import VOCABULARY
from agile_trainers.records.writer import RecordWriter, digest_entry, episode_row
from agile_trainers.rollout.forest import Call, forest
from agile_trainers.types import Message, StopReason, Trajectory, Turn

END = 256
"""Token that ends a turn; the tokens below are bytes."""
HOSTILE = (
    "</script><img src=x onerror=alert(1)><script>window.hacked = 1</script>\x00\u202egnp.exe\ud800 &amp; {{index}}"
)


def byte_tokens(text: str) -> list[int]:
    return list(text.encode("utf-8", "surrogatepass"))


def play(
    said: list[str],
    answers: list[Any],
    rewards: list[float],
    *,
    stop: StopReason = StopReason.TERMINATED,
    success: bool | None = None,
    seed: int = 0,
    prompt: str = "Guess a number.",
    noise: random.Random | None = None,
    **changes: Any,
) -> Trajectory:
    """An episode in which the model says these things and the environment answers them."""
    noise = noise or random.Random(0)
    ids: list[int] = []
    logprobs: list[float] = []
    turns = []
    for text, answer, reward in zip(said, answers, rewards, strict=True):
        action = [*byte_tokens(text), END]
        turns.append(Turn(len(ids), len(ids) + len(action), text, "stop", reward, answer, {"said": text}))
        ids += action
        logprobs += [-noise.expovariate(2) for _ in action]
        after = byte_tokens(f"\nuser: {answer}\n")[:200]
        ids += after
        logprobs += [0.0] * len(after)
    if success is not None:
        turns[-1].info["success"] = success
    messages = [{"role": "system", "content": "You play."}, {"role": "user", "content": prompt}]
    return Trajectory(byte_tokens(prompt)[:500], ids, logprobs, turns, stop, messages, seed=seed, **changes)


def program(noise: random.Random | None = None, secret: int = 7) -> Trajectory:
    """An agent that asks again, asks two helpers at once, replaces its history by a summary, and answers."""
    noise, calls = noise or random.Random(0), list[Call]()
    start: list[Message] = [{"role": "system", "content": "You play."}, {"role": "user", "content": "Find the number."}]

    def rendered(messages: list[Message]) -> list[int]:
        return byte_tokens("".join(f"{one['role']}: {one['content']}\n" for one in messages) + "assistant: ")

    def call(prompt: list[int], text: str, **fields: Any) -> list[int]:
        answer = [*byte_tokens(text), END]
        calls.append(Call(prompt, answer, [-noise.expovariate(2) for _ in answer], text, **fields))
        return prompt + answer

    first = rendered(start)
    call(first, "I gues 5", observation="no guess was found")
    main = call(first, "guess 5", fork="asked again: no guess", observation="higher", reward=0.25)
    main = call(main + byte_tokens("\nuser: higher\nassistant: "), "ask the helpers", observation="asked")
    helper: list[Message] = [{"role": "user", "content": "A number is above 5. Say one."}]
    for text in ("6", "eight"):
        call(rendered(helper), text, fork="helper", rewarded=3, messages=helper)
    main += byte_tokens("\nuser: they say 6 and eight\nassistant: ")
    call(main, "Known: above 5; 6 and eight were said.", observation="")
    summary = [*start, {"role": "user", "content": "Known: above 5; 6 and eight were said."}]
    last = call(rendered(summary), "guess 6", fork="summary", messages=summary, observation="higher")
    call(last + byte_tokens("\nuser: higher\nassistant: "), f"guess {secret}", observation="correct", reward=1.0)
    calls[-1].info["success"] = True
    return forest(calls, StopReason.TERMINATED, last=byte_tokens("\nuser: correct"), prompt=start, seed=3, linear=False)


def forest_run(folder: Path, *, members: int = 4) -> Path:
    """A run of one step whose episodes are of :func:`program`, the last an ordinary one. Returns its folder."""
    noise = random.Random(1)
    writer = RecordWriter(
        folder, {"run": "20260101-000000-f0f0", "algorithm": "grpo", "environment": "guess", "seed": 0}
    )
    write_vocabulary(writer.folder)
    rows = []
    for member in range(members):
        game = program(noise) if member < members - 1 else play(["7"], ["correct"], [1.0], success=True, noise=noise)
        advantages = [noise.gauss(0, 1) for _ in game.turns]
        row = episode_row(
            game, phase="train", index=member, generation=0, group=0, member=member, advantages=advantages
        )
        rows.append(trained(row, noise))
    writer.write_train(0, rows)
    return writer.folder


def trained(row: dict[str, Any], noise: random.Random) -> dict[str, Any]:
    """Fill the columns of an update."""
    acts = [turn >= 0 for turn in row["turn_ids"]]

    def column(value: Any) -> list[Any]:
        return [value(k) if act else None for k, act in enumerate(acts)]

    row["logprobs"] = column(lambda k: float(row["sampling_logprobs"][k]) + noise.gauss(0, 0.01))
    row["advantages"] = column(lambda k: row["turns"][row["turn_ids"][k]]["advantage"])
    row["ratios"] = column(lambda k: 1 + noise.gauss(0, 0.1))
    row["clipped"] = [None if ratio is None else abs(ratio - 1) > 0.2 for ratio in row["ratios"]]
    row["kl"] = column(lambda k: abs(noise.gauss(0, 0.01)))
    return row


def write_vocabulary(folder: Path) -> None:
    ids = list(range(END + 1))
    table = pa.table(
        [ids, [*(bytes([k]) for k in range(END)), b"<|im_end|>"], [k == END for k in ids]], schema=VOCABULARY
    )
    path = folder / "vocabulary.parquet"
    pq.write_table(table, path)
    with (folder / "digests-0.jsonl").open("a") as file:
        file.write(json.dumps(digest_entry(path, path)) + "\n")


def guessing_run(
    folder: Path, *, steps: int = 4, groups: int = 3, members: int = 4, name: str = "20260101-000000-abcd"
) -> Path:
    """A run that guesses numbers, better with each step, and an evaluation at its end. Returns its folder."""
    noise = random.Random(name)
    writer = RecordWriter(folder, {"run": name, "algorithm": "grpo", "model": "tiny", "environment": "guess", "seed": 0,
                                   "options": {"learning_rate": 1e-3}})  # fmt: skip
    write_vocabulary(writer.folder)
    for step in range(steps):
        rows = []
        for group in range(groups):
            wins = [noise.random() < (step + 1) / steps or member == 0 for member in range(members)]
            average = sum(wins) / members
            for member, win in enumerate(wins):
                advantage = round(float(win) - average, 3)
                length = 1 + (group + member) % 3
                game = play(
                    [f"I guess {noise.randint(1, 12)} ✓" for _ in range(length)],
                    ["higher"] * (length - 1) + ["correct" if win else "lower"],
                    [-0.2 if k % 2 and not win else 0.0 for k in range(length - 1)] + [float(win)],
                    stop=StopReason.TERMINATED if win else StopReason.MAX_TURNS,
                    success=win,
                    seed=100 * step + group,
                    noise=noise,
                    options={"secret": group + 1},
                    environment_name=("easy", "hard")[group % 2],
                )
                row = episode_row(
                    game, step=step, phase="train", index=group * members + member, generation=step, group=group,
                    member=member, advantages=[advantage] * length, values=[average] * length,
                )  # fmt: skip
                rows.append(trained(row, noise) if advantage else row)
        writer.write_train(step, rows)
        success = (step + 1) / steps
        writer.write_metrics(step + 1, {
            "return/mean": success + noise.gauss(0, 0.02), "success": success, "entropy": 1.5 - success,
            "clip_ratio/region_mean": 0.01 * step, "zero_advantage_groups": success / 2, "loss": 0.1,
        })  # fmt: skip
    writer.write_findings(
        [{"name": "cut_answers", "step": 2, "evidence": "Half <b>are</b> cut.", "advice": "Raise it."}]
    )
    final = [play(["7"], ["correct"], [1.0], success=True, seed=seed) for seed in range(5)]
    writer.write_eval(steps, "eval", [episode_row(game, step=steps, index=k) for k, game in enumerate(final)])
    return writer.folder


def large_run(folder: Path, *, steps: int = 50, size: int = 100) -> int:
    """A run whose episodes have four turns and about 300 tokens; the n-th says "needle n". Returns the number of tokens."""
    noise = random.Random(0)
    writer = RecordWriter(folder, {"run": "20260101-000000-5000", "kind": "training"})
    write_vocabulary(writer.folder)
    words = ["guess", "higher", "perhaps", "number", "think", "between", "middle", "therefore", "12", "7"]
    tokens = 0
    for step in range(steps):
        rows = []
        for index in range(size):
            said = [" ".join(noise.choices(words, k=9)) for _ in range(4)]
            said[2] += f" needle {step * size + index}"
            game = play(said, ["higher"] * 4, [0.0, 0.0, 0.0, noise.random()], success=index % 2 == 0, noise=noise)
            row = episode_row(game, step=step, phase="train", index=index, generation=step, group=index // 10,
                              member=index % 10, advantages=[noise.gauss(0, 1)] * 4)  # fmt: skip
            rows.append(trained(row, noise))
            tokens += len(game.completion_ids)
        writer.write_train(step, rows)
        writer.write_metrics(step, {"success": step / steps, "return/mean": step / steps, "entropy": 1.0})
    return tokens


def run_of(folder: Path, games: list[Trajectory], *, name: str = "20260101-000000-0001", **info: Any) -> Path:
    """A run of one evaluation with these episodes. Returns its folder."""
    writer = RecordWriter(folder, {"run": name, "kind": "evaluation"} | info)
    write_vocabulary(writer.folder)
    writer.write_eval(0, "eval", [episode_row(game, index=k) for k, game in enumerate(games)])
    return writer.folder


def populated(folder: Path) -> Path:
    """A population of three members and a copy: 0 stopped, 1 and its copy 3 go on, 2 failed and has no episodes."""
    low, high = {"learning_rate": 1e-6}, {"learning_rate": 2.5e-4}

    def event(kind: str, member: int, values: dict[str, float], **entries: Any) -> dict[str, Any]:
        blank = {"round": 0, "parent": None, "steps": 0, "fitness": None, "standard_error": None}
        return {**blank, "event": kind, "member": member, "hyperparameters": values, **entries}

    events = [event("born", 0, low), event("born", 1, high), event("born", 2, low)]
    events += [event("trained", 1, high, round=1, steps=2, fitness=0.5, standard_error=0.0625)]
    events += [event("trained", 0, low, round=1, steps=2, fitness=0.75), event("failed", 2, low, round=1)]
    events += [event("stopped", 0, low, round=1), event("born", 3, low, round=1, parent=1, steps=2)]
    events += [event("trained", 3, low, round=2, steps=4, fitness=0.875, standard_error=0.03125)]
    events += [event("trained", 1, high, round=2, steps=4, fitness=0.625)]
    lineage = {"settings": {"fitness": "success"}, "events": events, "best": 3}
    for member in (0, 1, 3):
        guessing_run(folder / f"member-{member:02d}", steps=1, groups=1, name=f"2026010{member}-000000-abcd")
    (folder / "lineage.json").write_text(json.dumps(lineage), encoding="utf-8")
    return folder
