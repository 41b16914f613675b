"""Episodes of several paths for the trainers' tests."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from games import loss_and_gradients

from agile_trainers.rollout.forest import Call, forest
from agile_trainers.types import StopReason, Trajectory


def repeated(trajectory: Trajectory) -> Trajectory:
    """The same episode stored as one path for each turn, which repeats everything before it."""
    prompt, turns, paths, completion, values, end = len(trajectory.prompt_ids), [], [], [], [], 0
    for k, turn in enumerate(trajectory.turns):
        last = len(trajectory.completion_ids) if k == len(trajectory.turns) - 1 else turn.end
        paths.append([*trajectory.prompt_ids, *trajectory.completion_ids[:last]])
        completion += trajectory.completion_ids[turn.start : turn.end]
        values += trajectory.sampling_logprobs[turn.start : turn.end]
        start, end = end, len(completion)
        turns.append(dataclasses.replace(turn, start=start, end=end, path=k, place=prompt + turn.start))
    return dataclasses.replace(
        trajectory, completion_ids=completion, sampling_logprobs=values, turns=turns, paths=paths
    )


def move(trainer: Any, adapters: tuple[str, ...] = (".default",)) -> None:
    """Give adapters other weights than those that sampled, so that ratios differ from 1."""
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if any(adapter in name for adapter in adapters):
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))


def measured(
    trainer: Any, episodes: list[Trajectory], budget: int | None = None, rows: list[int] | None = None
) -> tuple[Any, Any, Any]:
    """Loss, gradient and metrics of one micro-batch of given episodes, from the same weights each time.

    ``rows`` receives the rows of each forward pass of the loss.
    """
    adapters = (".default", ".critic")
    parameters = {n: p for n, p in trainer.model.named_parameters() if any(adapter in n for adapter in adapters)}
    saved = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    trainer.model.train()
    trainer.create_optimizer_and_scheduler(1)
    trainer.current_gradient_accumulation_steps = 1
    trainer.token_batches.budget = budget
    trainer._metrics["train"].clear()
    trainer._step = trainer.state.num_input_tokens_seen = 0
    trainer.is_in_train = False  # the weights move before the first pass: it cannot give the old policy
    batch = trainer._generate_and_score_completions(list(episodes))
    move(trainer, adapters)
    trainer.critic.count_turns([batch])
    handle = trainer.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: None if rows is None else rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    loss, gradients = loss_and_gradients(trainer, batch)
    handle.remove()
    changing = ("time/rollout", "time/update", "rollout_tokens_per_second", "policy_change")
    metrics = {name: values for name, values in trainer._metrics["train"].items() if name not in changing}
    trainer.rollout_log.finish()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
    return loss, gradients, dict(metrics)


def programs(vocabulary: range = range(10, 100), seed: int = 0) -> list[Trajectory]:
    """Eight episodes, two groups of four, of programs around the policy that do more than go on."""
    rng = random.Random(seed)

    def some(count: int) -> list[int]:
        return rng.choices(vocabulary, k=count)

    def call(prompt: list[int], answer: list[int] | None = None, **fields: Any) -> Call:
        answer = some(rng.randint(1, 5)) if answer is None else answer
        return Call(prompt, answer, [-rng.random() for _ in answer], reward=rng.random(), **fields)

    def after(one: Call, observation: int = 3) -> list[int]:
        return [*one.prompt_ids, *one.answer_ids, *some(observation)]

    def summary(start: list[int]) -> list[Call]:
        one = call(start)
        two = call(after(one))
        three = call([*some(4), *two.answer_ids], fork="summary")
        return [one, two, three, call(after(three))]

    def discarded(start: list[int]) -> list[Call]:
        bad = call(start)
        good = call(start, fork="asked again")
        return [bad, good, call(after(good))]

    def helper(start: list[int]) -> list[Call]:
        one = call(start)
        aside = call(some(6), fork="helper")
        return [one, aside, call(after(aside, 1)), call(after(one))]

    def at_once(start: list[int]) -> list[Call]:
        one = call(start)
        both = [call([*after(one, 0), token], rewarded=1) for token in (5, 6)]
        return [one, *both, call([*after(one, 0), 5, *both[0].answer_ids, 6, *both[1].answer_ids])]

    def identical(start: list[int]) -> list[Call]:
        one, answer = call(start), some(3)
        return [one, call(after(one, 0) + [7], answer), call(after(one, 0) + [7], answer), call(start, one.answer_ids)]

    def beginning(start: list[int]) -> list[Call]:
        long = call(start, some(5))
        return [long, call(start, long.answer_ids[:2]), call(after(long))]

    def plain(start: list[int]) -> list[Call]:
        one = call(start)
        return [one, call(after(one))]

    found = []
    groups = (summary, discarded, helper, at_once), (identical, beginning, plain, summary)
    for start, group in zip((some(5), some(7)), groups, strict=True):
        for program in group:
            cut = program is discarded
            reason = StopReason.MAX_TURNS if cut else StopReason.TERMINATED
            linear = program in (summary, plain)
            found.append(forest(program(list(start)), reason, last=some(2) if cut else (), linear=linear))
    return found


def call_by_call(trainer: Any, episodes: list[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) log-probabilities and mask of all calls, each read in a row of its own by the model's plain forward pass."""
    length = max(len(episode.completion_ids) for episode in episodes)
    calls = [(episode.prompt_of(k), episode.action_of(k)) for episode in episodes for k in range(len(episode.turns))]
    logits = iter(trainer.model(**_padded([[*prompt, *answer] for prompt, answer in calls])).logits)
    rows, masks, left = [], [], iter(calls)
    for episode in episodes:
        found = []
        for _, (prompt, answer), own in zip(episode.turns, left, logits):
            before = own[len(prompt) - 1 : len(prompt) - 1 + len(answer)]
            found.append(before.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0])
        row = torch.cat(found)
        rows.append(torch.nn.functional.pad(row, (0, length - len(row))))
        masks.append(torch.arange(length) < len(row))
    return torch.stack(rows), torch.stack(masks)


def _padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Rows with padding after them, which no token before it reads."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for place, row in zip(ids, rows):
        place[: len(row)] = torch.tensor(row)
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.size(1)) < lengths[:, None]).long()}


def values_call_by_call(trainer: Any, episodes: list[Trajectory]) -> list[torch.Tensor]:
    """The critic's value before each token of each call of an episode, and of the final state, from a row for each call."""
    rows, positions = [], []
    for episode in episodes:
        for k, turn in enumerate(episode.turns):
            prompt, answer = episode.prompt_of(k), episode.action_of(k)
            row = [*prompt, *answer]
            where = list(range(len(prompt) - 1, len(row) - 1))
            if k == len(episode.turns) - 1:
                row = episode.paths[turn.path] if episode.paths else [*episode.prompt_ids, *episode.completion_ids]
                where.append(len(row) - 1)
            rows.append(row)
            positions.append(where)
    asked = _padded(positions)
    read = trainer.model(**_padded(rows), value_positions=asked["input_ids"]).state_values
    values = iter([own[: len(where)] for own, where in zip(read, positions)])
    return [torch.cat([next(values) for _ in episode.turns]) for episode in episodes]


def reference_lambda_returns(episode: Trajectory, values: list[float], final: float, gae_lambda: float) -> list[float]:
    """Lambda returns along paths at gamma 1: a call without a later one on its path gets the rest of the episode."""
    rewards, parents = episode.rewards, episode.parents
    begins = [k if turn.rewarded is None else turn.rewarded for k, turn in enumerate(episode.turns)]
    returns = [0.0] * len(rewards)
    for k in reversed(range(len(rewards))):
        later = [j for j in range(k + 1, len(rewards)) if parents[j] == k]
        if later:
            j = later[0]
            after = (1 - gae_lambda) * values[j] + gae_lambda * returns[j]
            returns[k] = sum(rewards[begins[k] : begins[j]]) + after
        else:
            returns[k] = sum(rewards[begins[k] :]) + final
    return returns


def ordinary(trajectory: Trajectory) -> Trajectory:
    """An episode of one path, with the first turn of another one."""
    turn = dataclasses.replace(trajectory.turns[0], start=0, path=0, place=0)
    return dataclasses.replace(
        trajectory,
        completion_ids=trajectory.completion_ids[: turn.end],
        sampling_logprobs=trajectory.sampling_logprobs[: turn.end],
        turns=[turn],
        paths=None,
        linear=True,
    )
