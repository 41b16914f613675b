"""Episodes of a program's calls: which path each lies on, which call it continues, and the tensors of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from agile_trainers.rollout.collate import collate
from agile_trainers.rollout.forest import Call, forest
from agile_trainers.train_batch import Paths
from agile_trainers.types import NO_TURN, StopReason, Trajectory, Turn, path_nodes


def call(prompt: list[int], answer: list[int], **fields: Any) -> Call:
    return Call(prompt, answer, [-0.1 * token for token in answer], **fields)


def branching() -> Trajectory:
    """Asked again, goes on, an aside, goes on again, an answer that is the beginning of another; cut short."""
    calls = [
        call([1, 2], [3, 4], reward=1.0),
        call([1, 2], [3, 9], reward=2.0),
        call([1, 2, 3, 9, 5], [6]),
        call([7, 7], [8]),
        call([1, 2, 3, 9, 5, 6, 5], [6, 1]),
        call([1, 2], [3], rewarded=4),
    ]
    return forest(calls, StopReason.MAX_TURNS, last=[10, 11])


def test_paths_are_the_longest_prompts_with_answers():
    episode = branching()
    assert episode.paths == [[1, 2, 3, 4], [1, 2, 3, 9, 5, 6, 5, 6, 1], [7, 7, 8], [1, 2, 3, 10, 11]]
    assert [(turn.path, turn.place) for turn in episode.turns] == [(0, 2), (1, 2), (1, 5), (2, 2), (1, 7), (3, 2)]
    assert episode.completion_ids == [3, 4, 3, 9, 6, 8, 6, 1, 3]
    assert episode.parents == [None, None, 1, None, 2, None]
    assert [episode.prompt_of(k) for k in (0, 4)] == [[1, 2], [1, 2, 3, 9, 5, 6, 5]]
    assert [episode.action_of(k) for k in (0, 4)] == [[3, 4], [6, 1]]
    # 1 2 3, then 4 | 9 5 6 5 6 1 | 10 11; and 7 7 8.
    assert episode.num_tokens == 3 + 1 + 6 + 2 + 3


def test_every_field_of_the_batch_by_hand():
    batch = collate([branching()], pad_token_id=0, end_token_id=99)
    assert batch.path_ids.tolist() == [[1, 2, 3, 4, 1, 2, 3, 9, 5, 6, 5, 6, 1, 7, 7, 8, 1, 2, 3, 10, 11]]
    assert batch.path_lengths.tolist() == [[4, 9, 3, 5]]
    assert batch.places.tolist() == [[2, 3, 6, 7, 9, 15, 11, 12, 18]]
    assert batch.turn_ids.tolist() == [[0, 0, 1, 1, 2, 3, 4, 4, 5]]
    assert batch.state_positions.tolist() == [[1, 5, 8, 14, 10, 17, 20]]
    assert batch.following.tolist() == [[6, 2, 4, 6, 6, 6]]
    assert batch.rewarded.tolist() == [[0, 1, 2, 3, 4, 4]]
    assert not batch.left_padded.any()


def test_a_call_continues_one_call_of_equal_ones_and_is_continued_by_the_first():
    same = call([1], [2])
    going_on = [call([1, 2, 3], [4]), call([1, 2, 5], [4])]
    episode = forest([same, same, *going_on], StopReason.TERMINATED)
    assert episode.parents == [None, None, 1, 1]
    batch = collate([episode], pad_token_id=0, end_token_id=99)
    assert batch.following.tolist() == [[4, 2, 4, 4]]
    # The longest beginning, not the last call.
    shorter = [call([1], [2, 3]), call([1], [2]), call([1, 2, 3, 4], [5])]
    assert forest(shorter, StopReason.TERMINATED).parents == [None, None, 0]


def test_ordinary_episodes_beside_others_are_one_path():
    plain = Trajectory([21, 22], [23, 24, 25], [-1.0, 0.0, -2.0], [Turn(0, 1, "", "stop"), Turn(2, 3, "", "stop")],
                       StopReason.TERMINATED)  # fmt: skip
    failed = Trajectory([31], [], [], [], StopReason.ENVIRONMENT_ERROR)
    batch = collate([branching(), plain, failed], pad_token_id=0, end_token_id=99)
    assert batch.path_lengths.tolist() == [[4, 9, 3, 5], [5, 0, 0, 0], [2, 0, 0, 0]]
    assert batch.path_ids[1:, :6].tolist() == [[21, 22, 23, 24, 25, 0], [99, 99, 0, 0, 0, 0]]
    assert batch.places[1:, :4].tolist() == [[2, -1, 4, -1], [-1, -1, -1, -1]]
    assert batch.state_positions[1:].tolist() == [[1, 3, 4, 4, 4, 4, 4], [1, 1, 1, 1, 1, 1, 1]]
    assert batch.following[1:].tolist() == [[1, 6, 6, 6, 6, 6], [6, 6, 6, 6, 6, 6]]
    assert batch.turn_ids[1].tolist() == [0, NO_TURN, 1, *[NO_TURN] * 6]


def test_the_rows_of_a_model_are_the_paths_that_hold_actions():
    batch = collate([branching()], pad_token_id=0, end_token_id=99)
    paths = Paths.of(batch.path_ids, batch.path_lengths, batch.places)
    assert paths.ids.shape == (4, 9) and paths.mask.sum(dim=1).tolist() == [4, 9, 3, 5]
    assert paths.ids.flatten()[paths.cells].tolist() == [[3, 4, 3, 9, 6, 8, 6, 1, 3]]
    only = torch.where(batch.turn_ids == 3, batch.places, -1)
    paths = Paths.of(batch.path_ids, batch.path_lengths, only)
    assert paths.ids.tolist() == [[7, 7, 8]] and paths.cells.tolist() == [[-1] * 5 + [2] + [-1] * 3]
    assert paths.has(torch.tensor([[0, 13, 15, 16]])).tolist() == [[False, True, True, False]]


def test_helpers_beside_a_long_path_are_not_padded_to_its_length():
    """16 episodes with 200 helpers and a path of 32k tokens; padded rows would be 1.7 GB."""
    calls = [call([1, k + 2], [3]) for k in range(200)] + [call([1] * 32_000, [2])]
    long = forest(calls, StopReason.TERMINATED)
    batch = collate([long, *[branching()] * 15], pad_token_id=0, end_token_id=99)
    tensors = [value for value in vars(batch).values() if value is not None]
    assert sum(value.nbytes for value in tensors) < 15e6


def test_the_anchor_of_a_turn_is_its_exact_prompt():
    batch = collate([branching(), branching()], pad_token_id=0, end_token_id=99)
    one, other = batch.anchors.tolist()
    assert one == other and 0 not in one
    # The first, second and last call were asked the same.
    assert one[0] == one[1] == one[5] and len(set(one)) == 4


def test_tokens_after_the_same_prefix_have_one_number():
    assert path_nodes([[1, 2, 3], [1, 2, 4, 5], [2], [1, 2]]) == [[0, 1, 2], [0, 1, 3, 4], [5], [0, 1]]


def test_the_conversation_is_that_of_the_last_turn():
    def said(k: int, prompt: list[int], **fields: Any) -> Call:
        return call(prompt, [50 + k], text=f"answer {k}", observation=f"observation {k}", **fields)

    first = {"role": "user", "content": "question"}
    history = said(0, [1]), said(1, [1], fork="asked again"), said(2, [1, 51, 5])
    episode = forest(history, StopReason.TERMINATED, prompt=[first])
    texts = [message["content"] for message in episode.messages]
    assert texts == ["answer 1", "observation 1", "answer 2", "observation 2"]
    assert [[message["content"] for message in aside] for aside in episode.asides] == [["answer 0", "observation 0"]]
    rewritten = {"role": "user", "content": "summary"}
    episode = forest([*history, said(3, [9, 9], messages=[rewritten])], StopReason.TERMINATED, prompt=[first])
    assert [message["content"] for message in episode.messages] == ["summary", "answer 3", "observation 3"]
    assert len(episode.asides) == 3


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([], "at least one call"),
        ([call([], [1])], "0 prompt tokens"),
        ([call([1], [])], "0 sampled"),
        ([Call([1], [2], [])], "0 sampling log-probs"),
        ([call([1], [2], rewarded=1)], "rewarded of call 0 is 1"),
    ],
)
def test_impossible_calls_are_refused(calls, said):
    with pytest.raises(ValueError, match=said):
        forest(calls, StopReason.TERMINATED)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"place": 3}, "not where it says"),
        ({"path": 7}, "path 7 of 4"),
        ({"place": 0}, "not where it says"),
        ({"rewarded": 2}, "rewarded of turn 1 is 2"),
    ],
)
def test_a_turn_that_is_not_where_it_says_is_refused(changes, said):
    episode = branching()
    episode.turns[1] = dataclasses.replace(episode.turns[1], **changes)
    with pytest.raises(ValueError, match=said):
        collate([episode], pad_token_id=0, end_token_id=99)
