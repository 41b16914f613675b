"""Converts trajectories to padded tensors and checks their alignment."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch

from agile_trainers.objectives.kept_sets import pad_sets
from agile_trainers.types import NO_TURN, Picture, Trajectory, TurnBatch, located


def collate(
    trajectories: Sequence[Trajectory],
    *,
    pad_token_id: int,
    end_token_id: int,
    pad_to_multiple_of: int | None = None,
    device: torch.device | str = "cpu",
    encode: Callable[[Picture], None] | None = None,
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
        encode: Gives a picture its features. Needed for episodes with images.

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
    turns = [trajectory.turns for trajectory in trajectories]
    size = len(trajectories)
    width = _round_up(max(map(len, prompts)), pad_to_multiple_of)
    length = _round_up(max(map(len, completions)), pad_to_multiple_of)
    num_turns = max(1, *map(len, turns))
    counts = torch.tensor([[len(own)] for own in turns])
    completed = torch.tensor([[len(completion)] for completion in completions])
    numbers = torch.arange(num_turns + 1)
    starts = _padded([[turn.start for turn in own] for own in turns], num_turns + 1)

    batch = TurnBatch(
        prompt_ids=_padded([prompt[::-1] for prompt in prompts], width, pad_token_id).flip(1),
        prompt_mask=(torch.arange(width) >= width - torch.tensor([[len(prompt)] for prompt in prompts])).long(),
        completion_ids=_padded(completions, length, pad_token_id),
        completion_mask=(torch.arange(length) < completed).long(),
        turn_ids=_turn_ids(trajectories, length),
        turn_rewards=_padded([[turn.reward for turn in own] for own in turns], num_turns, dtype=np.float32),
        turn_mask=numbers[:-1] < counts,
        # The final state, and before it those of the turns that happened.
        state_positions=width - 1 + torch.where(numbers < counts, starts, completed),
        cut=torch.tensor([trajectory.clipped for trajectory in trajectories]),
        unfinished=torch.tensor([it.stop_reason.truncated and it.end_reward is None for it in trajectories]),
        failed=torch.tensor([trajectory.stop_reason.failed for trajectory in trajectories]),
        sampling_logprobs=_padded([it.sampling_logprobs for it in trajectories], length, dtype=np.float32),
        anchors=_padded([[0 if it is None else _hash(it) for it in one.anchors] for one in trajectories], num_turns),
        environments=torch.tensor([0 if (name := it.environment_name) is None else _hash(name) for it in trajectories]),
        following=torch.where(numbers[1:] < counts, numbers[1:], num_turns),
        rewarded=numbers[:-1].repeat(size, 1),
        linear=torch.tensor([trajectory.linear for trajectory in trajectories]),
    )
    if any(trajectory.demonstration for trajectory in trajectories):
        batch.demonstrations = torch.tensor([trajectory.demonstration for trajectory in trajectories])
    if any(trajectory.kept is not None for trajectory in trajectories):
        sets = [trajectory.kept or () for trajectory in trajectories]
        batch.kept_words, batch.kept_sizes = pad_sets(sets, length)
    if any(trajectory.paths is not None for trajectory in trajectories):
        _add_paths(batch, trajectories, [[*prompt, *completion] for prompt, completion in zip(prompts, completions)])
    _check_logprobs(batch)
    if any(it.turns and it.pictures for it in trajectories):
        assert encode is not None
        batch.image_features, batch.image_places = _images(trajectories, encode, device)
    return batch.to(device)


def _padded(
    rows: Sequence[Sequence[float]], width: int, fill: int = 0, dtype: type[np.generic] = np.int64
) -> torch.Tensor:
    """Arrange rows of numbers as (B, width), each followed by ``fill``."""
    lengths = np.array([len(row) for row in rows])
    padded = np.full((len(rows), width), fill, dtype)
    padded[np.arange(width) < lengths[:, None]] = np.fromiter(chain.from_iterable(rows), dtype, lengths.sum())
    return torch.from_numpy(padded)


def _turn_ids(trajectories: Sequence[Trajectory], length: int) -> torch.Tensor:
    """Return the turn (B, length) that each token belongs to."""
    spans = [(row, k, one.start, one.end) for row, it in enumerate(trajectories) for k, one in enumerate(it.turns)]
    rows, turns, starts, ends = np.array(spans, dtype=np.int64).reshape(-1, 4).T
    tokens = ends - starts
    columns = np.arange(tokens.sum()) + np.repeat(ends - tokens.cumsum(), tokens)
    ids = np.full((len(trajectories), length), NO_TURN)
    ids[np.repeat(rows, tokens), columns] = np.repeat(turns, tokens)
    return torch.from_numpy(ids)


def _images(
    trajectories: Sequence[Trajectory], encode: Callable[[Picture], None], device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features (B, V, W) and the places (B, V, 5) of the image tokens of episodes."""
    features, places = list[torch.Tensor](), list[torch.Tensor]()
    for trajectory in trajectories:
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        start = 0
        for ids, pictures in trajectory.shown if trajectory.turns else ():
            for picture, where in located(ids, pictures):
                encode(picture)
                assert picture.features is not None and picture.offsets is not None
                column = torch.tensor(where) + start
                own.append(
                    (picture.features[: len(where)], torch.cat([column[:, None], picture.offsets[: len(where)]], 1))
                )
            start += len(ids)
        features.append(torch.cat([one for one, _ in own]) if own else torch.zeros(0, 0))
        places.append(torch.cat([one for _, one in own]) if own else torch.zeros(0, 5, dtype=torch.long))
    known = next(one for one in features if one.numel())
    shape = (len(features), max(map(len, features)))
    whole = torch.zeros(*shape, known.size(1), dtype=known.dtype, device=device)
    placed_at = torch.full((*shape, 5), -1, device=device)
    for row, (one, there) in enumerate(zip(features, places, strict=True)):
        if len(one):
            whole[row, : len(one)], placed_at[row, : len(one)] = one.to(device), there.to(device)
    return whole, placed_at


def _add_paths(batch: TurnBatch, trajectories: Sequence[Trajectory], whole: Sequence[list[int]]) -> None:
    """Add the paths of episodes to their batch; one without any is a single path, its prompt and completion.

    Args:
        batch: Changed in place.
        trajectories: B episodes.
        whole: Prompt and completion of each.
    """
    # Without turns there are no paths to read.
    paths = [[ids] if it.paths is None or not it.turns else it.paths for it, ids in zip(trajectories, whole)]
    size, num_turns = batch.turn_mask.shape
    batch.path_ids = torch.zeros(size, max(sum(map(len, own)) for own in paths), dtype=torch.long)
    batch.path_lengths = torch.zeros(size, max(map(len, paths)), dtype=torch.long)
    batch.places = torch.full_like(batch.turn_ids, -1)
    for row, (trajectory, own) in enumerate(zip(trajectories, paths)):
        lengths = torch.tensor([len(path) for path in own])
        batch.path_ids[row, : int(lengths.sum())] = torch.tensor([token for path in own for token in path])
        batch.path_lengths[row, : len(own)] = lengths
        starts = (lengths.cumsum(0) - lengths).tolist()
        # Every entry is first the final state; the turns that happened then overwrite theirs.
        last = trajectory.turns[-1].path if trajectory.turns and trajectory.paths is not None else 0
        batch.state_positions[row] = starts[last] + len(own[last]) - 1
        for k, turn in enumerate(trajectory.turns):
            first = len(trajectory.prompt_ids) + turn.start
            if trajectory.paths is not None:
                first = starts[turn.path] + turn.place
            batch.places[row, turn.start : turn.end] = torch.arange(first, first + turn.end - turn.start)
            batch.state_positions[row, k] = first - 1
            batch.rewarded[row, k] = k if turn.rewarded is None else turn.rewarded
        if trajectory.paths is not None:
            batch.following[row] = num_turns
            for k, parent in reversed(list(enumerate(trajectory.parents))):
                if parent is not None:
                    batch.following[row, parent] = k  # the first of several stays


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
    if trajectory.kept is not None and len(trajectory.kept) != length:
        raise ValueError(
            f"A trajectory has {length} completion tokens but {len(trajectory.kept)} kept sets; every token needs one "
            "(empty on observations), or kept must be None."
        )
    end = 0
    for k, turn in enumerate(trajectory.turns):
        if not end <= turn.start < turn.end <= length:
            raise ValueError(
                f"Turn {k} spans tokens {turn.start} to {turn.end}, but the previous turn ends at {end} and the completion "
                f"has {length} tokens; turns must be non-empty, in order and inside the completion."
            )
        end = turn.end
    if trajectory.paths is not None:
        _check_paths(trajectory, trajectory.paths)


def _check_paths(trajectory: Trajectory, paths: list[list[int]]) -> None:
    if trajectory.turns and not paths:
        raise ValueError("An episode with turns has paths=[]; expected at least one path, or None.")
    end = 0
    for k, turn in enumerate(trajectory.turns):
        action = trajectory.completion_ids[turn.start : turn.end]
        path = paths[turn.path] if 0 <= turn.path < len(paths) else []
        if turn.place < 1 or path[turn.place : turn.place + len(action)] != action:
            raise ValueError(
                f"Turn {k} is not where it says: path {turn.path} of {len(paths)} does not have its {len(action)} tokens "
                f"from token {turn.place} on, after a prompt of at least one."
            )
        if turn.start != end:
            raise ValueError(
                f"Turn {k} begins at token {turn.start} and the turn before it ends at {end}; in an episode of several "
                "paths completion_ids are the actions alone, one after another."
            )
        end = turn.end
        if turn.rewarded is not None and not 0 <= turn.rewarded <= k:
            raise ValueError(
                f"rewarded of turn {k} is {turn.rewarded}; expected 0 to {k}, the number of turns before it."
            )


def _check_logprobs(batch: TurnBatch) -> None:
    stray = (batch.sampling_logprobs != 0.0) & ~batch.action_mask
    if stray.any():
        row, token = stray.nonzero()[0].tolist()
        raise ValueError(
            f"Token {token} of episode {row} belongs to no turn, but its sampling log-prob is "
            f"{batch.sampling_logprobs[row, token]:.4g} instead of 0: log-probs and turns are misaligned."
        )
