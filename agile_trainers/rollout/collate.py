"""Converts trajectories to padded tensors and checks their alignment."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from agile_trainers.types import NO_TURN, Trajectory, TurnBatch


def collate(
    trajectories: Sequence[Trajectory],
    *,
    pad_token_id: int,
    end_token_id: int,
    pad_to_multiple_of: int | None = None,
    device: torch.device | str = "cpu",
) -> TurnBatch:
    """Pad trajectories into a :class:`~agile_trainers.types.TurnBatch`.

    An episode without actions (its environment failed at reset, or the prompt filled the context) is not trained on. Its
    completion is one end token that belongs to no turn. Its prompt, which may be longer than the model's context, is
    replaced by one end token too.

    Args:
        trajectories: B episodes, at least one.
        pad_token_id: Id of the padding.
        end_token_id: Id of the token in episodes without actions.
        pad_to_multiple_of: Round P and T up to a multiple of this number.
        device: Device of the tensors.

    Returns:
        The batch.

    Raises:
        ValueError: If there is no trajectory, the turns of one are not ordered spans of its tokens, or its sampling
            log-probs do not match its tokens.
    """
    if not trajectories:
        raise ValueError("collate needs at least one trajectory, got none.")
    for trajectory in trajectories:
        _check(trajectory)
    prompts = [trajectory.prompt_ids if trajectory.turns else [end_token_id] for trajectory in trajectories]
    completions = [trajectory.completion_ids or [end_token_id] for trajectory in trajectories]
    size = len(trajectories)
    width = _round_up(max(map(len, prompts)), pad_to_multiple_of)
    length = _round_up(max(map(len, completions)), pad_to_multiple_of)
    num_turns = max(1, max(len(trajectory.turns) for trajectory in trajectories))

    batch = TurnBatch(
        prompt_ids=torch.full((size, width), pad_token_id),
        prompt_mask=torch.zeros(size, width, dtype=torch.long),
        completion_ids=torch.full((size, length), pad_token_id),
        completion_mask=torch.zeros(size, length, dtype=torch.long),
        turn_ids=torch.full((size, length), NO_TURN),
        turn_rewards=torch.zeros(size, num_turns),
        turn_mask=torch.zeros(size, num_turns, dtype=torch.bool),
        state_positions=torch.zeros(size, num_turns + 1, dtype=torch.long),
        truncated=torch.tensor([trajectory.stop_reason.truncated for trajectory in trajectories]),
        unfinished=torch.tensor([it.stop_reason.truncated and it.end_reward is None for it in trajectories]),
        failed=torch.tensor([trajectory.stop_reason.failed for trajectory in trajectories]),
        sampling_logprobs=torch.zeros(size, length),
        anchors=torch.zeros(size, num_turns, dtype=torch.long),
        environments=torch.tensor([0 if (name := it.environment_name) is None else _hash(name) for it in trajectories]),
    )
    for row, (trajectory, prompt, completion) in enumerate(zip(trajectories, prompts, completions)):
        batch.prompt_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        batch.prompt_mask[row, width - len(prompt) :] = 1
        batch.completion_ids[row, : len(completion)] = torch.tensor(completion)
        batch.completion_mask[row, : len(completion)] = 1
        batch.sampling_logprobs[row, : len(trajectory.sampling_logprobs)] = torch.tensor(trajectory.sampling_logprobs)
        # Every entry is first the final state; the turns that happened then overwrite theirs.
        batch.state_positions[row] = width + len(completion) - 1
        for k, turn in enumerate(trajectory.turns):
            batch.turn_ids[row, turn.start : turn.end] = k
            batch.turn_rewards[row, k] = turn.reward
            batch.turn_mask[row, k] = True
            batch.state_positions[row, k] = width + turn.start - 1
        for k, anchor in enumerate(trajectory.anchors):
            batch.anchors[row, k] = 0 if anchor is None else _hash(anchor)
    _check_logprobs(batch)
    return TurnBatch(**{name: value.to(device) for name, value in vars(batch).items()})


def _hash(text: str) -> int:
    """Return the same positive integer in every process, unlike Python's ``hash``."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % (2**63 - 1) + 1


def _round_up(length: int, multiple: int | None) -> int:
    return length if multiple is None else -(-length // multiple) * multiple


def _check(trajectory: Trajectory) -> None:
    length = len(trajectory.completion_ids)
    if len(trajectory.sampling_logprobs) != length:
        raise ValueError(
            f"A trajectory has {length} completion tokens but {len(trajectory.sampling_logprobs)} sampling log-probs; "
            "every token needs one (0.0 on observations)."
        )
    end = 0
    for k, turn in enumerate(trajectory.turns):
        if not end <= turn.start < turn.end <= length:
            raise ValueError(
                f"Turn {k} spans tokens {turn.start} to {turn.end}, but the previous turn ends at {end} and the completion "
                f"has {length} tokens; turns must be non-empty, in order and inside the completion."
            )
        end = turn.end


def _check_logprobs(batch: TurnBatch) -> None:
    stray = (batch.sampling_logprobs != 0.0) & ~batch.action_mask
    if stray.any():
        row, token = stray.nonzero()[0].tolist()
        raise ValueError(
            f"Token {token} of episode {row} belongs to no turn, but its sampling log-prob is "
            f"{batch.sampling_logprobs[row, token]:.4g} instead of 0: log-probs and turns are misaligned."
        )
