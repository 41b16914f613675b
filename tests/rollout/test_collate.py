"""Trajectories as tensors: every field by hand, episodes without an action, padding, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from agile_trainers.rollout.collate import collate
from agile_trainers.types import StopReason, Trajectory, Turn, TurnBatch

PAD, END = 0, 99


def trajectory(
    prompt: list[int], completion: list[int], spans: list[tuple[int, int]], stop: StopReason, rewards: list[float]
) -> Trajectory:
    """Log-probabilities: minus the token's id, divided by 8, on actions."""
    turns = [Turn(start, end, "", "stop", reward) for (start, end), reward in zip(spans, rewards, strict=True)]
    acting = {position for start, end in spans for position in range(start, end)}
    logprobs = [-token / 8 if position in acting else 0.0 for position, token in enumerate(completion)]
    return Trajectory(prompt, completion, logprobs, turns, stop)


def two_turns() -> Trajectory:
    """Terminated: the last token is an action's.

    prompt 11 12 13 | 21 22 (turn 0) | 31 (observation) | 23 (turn 1)
    """
    return trajectory([11, 12, 13], [21, 22, 31, 23], [(0, 2), (3, 4)], StopReason.TERMINATED, [0.5, -1.0])


def one_turn_and_final_observation() -> Trajectory:
    """Truncated, with the final observation appended.

    prompt 14 15 | 24 (turn 0) | 32 33 34 35 (observation)
    """
    return trajectory([14, 15], [24, 32, 33, 34, 35], [(0, 1)], StopReason.MAX_TURNS, [2.0])


def no_action(stop: StopReason = StopReason.ENVIRONMENT_ERROR, prompt: tuple[int, ...] = ()) -> Trajectory:
    return trajectory(list(prompt), [], [], stop, [])


def as_lists(batch: TurnBatch) -> dict[str, Any]:
    return {name: None if value is None else value.tolist() for name, value in vars(batch).items()}


def test_every_field_by_hand() -> None:
    """P = 3, T = 5, K = 2: positions count padded prompt columns.

    row 0   11 12 13 | 21 22 31 23  .      V: before 21 (2), before 23 (5), last token (6)
    row 1    . 14 15 | 24 32 33 34 35      V: before 24 (2), last token (7), repeated
    row 2    .  . 99 | 99  .  .  .  .      V: nothing but the end token (3)
    """
    batch = collate([two_turns(), one_turn_and_final_observation(), no_action()], pad_token_id=PAD, end_token_id=END)
    assert as_lists(batch) == {
        "prompt_ids": [[11, 12, 13], [0, 14, 15], [0, 0, 99]],
        "anchors": [[0, 0], [0, 0], [0, 0]],
        "environments": [0, 0, 0],
        "prompt_mask": [[1, 1, 1], [0, 1, 1], [0, 0, 1]],
        "completion_ids": [[21, 22, 31, 23, 0], [24, 32, 33, 34, 35], [99, 0, 0, 0, 0]],
        "completion_mask": [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]],
        "turn_ids": [[0, 0, -1, 1, -1], [0, -1, -1, -1, -1], [-1, -1, -1, -1, -1]],
        "turn_rewards": [[0.5, -1.0], [2.0, 0.0], [0.0, 0.0]],
        "turn_mask": [[True, True], [True, False], [False, False]],
        "state_positions": [[2, 5, 6], [2, 7, 7], [3, 3, 3]],
        "cut": [False, True, False],
        "unfinished": [False, True, False],
        "failed": [False, False, True],
        "sampling_logprobs": [[-21 / 8, -22 / 8, 0, -23 / 8, 0], [-3, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
        "following": [[1, 2], [2, 2], [2, 2]],
        "rewarded": [[0, 1], [0, 1], [0, 1]],
        "linear": [True, True, True],
        "path_ids": None,
        "path_lengths": None,
        "places": None,
        "kept_words": None,
        "kept_sizes": None,
        "image_features": None,
        "image_places": None,
        "demonstrations": None,
    }
    integers = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "turn_ids", "state_positions")
    for name in integers:
        assert getattr(batch, name).dtype == torch.int64, name
    for name in ("turn_mask", "cut", "unfinished", "failed"):
        assert getattr(batch, name).dtype == torch.bool, name
    for name in ("turn_rewards", "sampling_logprobs"):
        assert getattr(batch, name).dtype == torch.float32, name
    assert torch.equal(batch.action_mask, batch.turn_ids >= 0)


def test_state_positions_point_at_the_token_before_each_turn() -> None:
    """Read back through the padded rows: token 13 before turn 0, observation 31 before turn 1, 23 at the end."""
    rows = [two_turns(), one_turn_and_final_observation()]
    batch = collate(rows, pad_token_id=PAD, end_token_id=END, pad_to_multiple_of=4)
    tokens = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1)
    assert tokens.gather(1, batch.state_positions).tolist() == [[13, 31, 23], [15, 35, 35]]


@pytest.mark.parametrize("stop", list(StopReason))
def test_flags_of_every_stop_reason(stop: StopReason) -> None:
    batch = collate([trajectory([1], [2], [(0, 1)], stop, [0.0])], pad_token_id=PAD, end_token_id=END)
    cut = {StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.CONTEXT_FULL, StopReason.REWRITE_FULL}
    failed = {StopReason.ENVIRONMENT_ERROR, StopReason.ENVIRONMENT_TIMEOUT}
    assert (batch.cut.item(), batch.failed.item()) == (stop in cut, stop in failed)


def test_a_last_answer_that_ran_out_of_tokens_is_cut() -> None:
    """As in TRL, also where the environment took it for an answer and ended the episode."""
    episodes = [trajectory([1], [2, 3], [(0, 1), (1, 2)], StopReason.TERMINATED, [0.0, 0.0]) for _ in range(2)]
    episodes[0].turns[0].finish_reason = episodes[1].turns[1].finish_reason = "length"
    episodes[1].turns[1].info = {"call": {"max_tokens": 5}}  # the environment's own
    batch = collate(episodes, pad_token_id=PAD, end_token_id=END)
    assert batch.cut.tolist() == [False, True] and not batch.unfinished.any()


def test_episodes_without_an_action() -> None:
    """One end token of no turn; a prompt that filled the context is not read again, however long it is."""
    full = no_action(StopReason.CONTEXT_FULL, prompt=tuple(range(1, 50)))
    batch = collate([full, no_action()], pad_token_id=PAD, end_token_id=END)
    assert batch.prompt_ids.tolist() == batch.completion_ids.tolist() == [[99], [99]]
    assert batch.completion_mask.tolist() == [[1], [1]] and batch.turn_ids.tolist() == [[-1], [-1]]
    assert batch.turn_mask.tolist() == [[False], [False]] and batch.turn_rewards.tolist() == [[0.0], [0.0]]
    assert batch.state_positions.tolist() == [[1, 1], [1, 1]]
    assert batch.cut.tolist() == [True, False] and batch.failed.tolist() == [False, True]


def test_pad_to_multiple_of() -> None:
    """P 3 -> 4 and T 5 -> 8: more padding, on the left and on the right, and positions that move with it."""
    rows = [two_turns(), one_turn_and_final_observation()]
    plain = collate(rows, pad_token_id=PAD, end_token_id=END)
    padded = collate(rows, pad_token_id=PAD, end_token_id=END, pad_to_multiple_of=4)
    assert padded.prompt_ids.tolist() == [[0, 11, 12, 13], [0, 0, 14, 15]]
    assert padded.completion_ids.tolist() == [[21, 22, 31, 23, 0, 0, 0, 0], [24, 32, 33, 34, 35, 0, 0, 0]]
    assert torch.equal(padded.state_positions, plain.state_positions + 1)
    assert padded.turn_ids[:, 5:].eq(-1).all() and not padded.completion_mask[:, 5:].any()
    assert not padded.prompt_mask[:, 0].any()
    exact = collate([one_turn_and_final_observation()], pad_token_id=PAD, end_token_id=END, pad_to_multiple_of=5)
    assert exact.completion_ids.shape == (1, 5)


def test_a_pad_token_that_is_the_end_token_hides_nothing() -> None:
    """Masks come from lengths, not from ids."""
    row = trajectory([7], [3, END], [(0, 2)], StopReason.TERMINATED, [0.0])
    batch = collate([row, two_turns()], pad_token_id=END, end_token_id=END)
    assert batch.completion_ids[0].tolist() == [3, 99, 99, 99]
    assert batch.completion_mask[0].tolist() == [1, 1, 0, 0] and batch.turn_ids[0].tolist() == [0, 0, -1, -1]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 2), (1, 4)], "Turn 1 .* 1 to 4.* 2"),
        ([(3, 4), (0, 2)], "Turn 1 spans tokens 0 to 2"),
        ([(0, 5)], "Turn 0 .* 0 to 5.* 4 tokens"),
        ([(2, 2)], "Turn 0 .* 2 to 2.*non-empty"),
        ([(-1, 2)], "Turn 0 spans tokens -1 to 2"),
    ],
)
def test_misaligned_turns_are_refused(spans: list[tuple[int, int]], message: str) -> None:
    bad = trajectory([1], [21, 22, 31, 23], spans, StopReason.TERMINATED, [0.0] * len(spans))
    with pytest.raises(ValueError, match=message):
        collate([two_turns(), bad], pad_token_id=PAD, end_token_id=END)


def test_misaligned_log_probs_are_refused() -> None:
    short = two_turns()
    short.sampling_logprobs.pop()
    with pytest.raises(ValueError, match=r"4 completion tokens.* 3 "):
        collate([short], pad_token_id=PAD, end_token_id=END)
    shifted = two_turns()
    shifted.sampling_logprobs.insert(0, shifted.sampling_logprobs.pop())
    with pytest.raises(ValueError, match=r"Token 2 of episode 1.*-2\.75"):
        collate([two_turns(), shifted], pad_token_id=PAD, end_token_id=END)


def test_nothing_to_collate_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one trajectory"):
        collate([], pad_token_id=PAD, end_token_id=END)


def test_anchors_name_the_state_a_turn_started_from() -> None:
    """Turn 0's is in reset's info, turn 1's in the info of the step before; the same name is the same number anywhere."""
    one, two = two_turns(), two_turns()
    one.reset_info, one.turns[0].info = {"anchor": "start"}, {"anchor": (1, 2)}
    two.reset_info, two.turns[1].info = {"anchor": None}, {"anchor": "where nothing follows"}
    two.turns[0].info = {"anchor": "start"}
    start = 2316573427547572729
    anchors = collate([one, two], pad_token_id=PAD, end_token_id=END).anchors
    assert one.anchors == ["start", "(1, 2)"] and two.anchors == [None, "start"]
    assert anchors[0, 0] == anchors[1, 1] == start
    assert anchors[1, 0] == 0 and anchors[0, 1] not in (0, start)


def test_environments_are_told_apart_alike_in_every_process() -> None:
    named = [replace(two_turns(), environment_name=name) for name in ("low", "high", "low")]
    low, high, again = collate(named, pad_token_id=PAD, end_token_id=END).environments.tolist()
    assert low == again != high and 0 not in (low, high)
    assert low == 798_926_812_534_107_495, "Python's own hash of a string differs in each process"
