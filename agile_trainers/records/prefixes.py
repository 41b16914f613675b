"""Compresses the paths of an episode: a prefix that several of them share is stored once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agile_trainers.types import path_nodes


def packed_paths(paths: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Store each path as the length of the prefix that it shares with an earlier one, and its other tokens.

    Args:
        paths: Token ids of each, at least one.

    Returns:
        A dictionary for each path. ``of`` is the first of the earlier paths that share the longest beginning with it, None
        if none shares a token; ``shared`` is the number of tokens of that beginning, and ``ids`` are the tokens after it.
    """
    nodes = path_nodes(paths)
    owners = [-1] * (1 + max((numbers[-1] for numbers in nodes if numbers), default=-1))
    found = []
    for k, (path, numbers) in enumerate(zip(paths, nodes, strict=True)):
        low, high = 0, len(path)
        while low < high:  # the nodes that an earlier path has come first
            middle = (low + high) // 2
            if owners[numbers[middle]] >= 0:
                low = middle + 1
            else:
                high = middle
        for number in numbers[low:]:
            owners[number] = k
        found.append({"of": owners[numbers[low - 1]] if low else None, "shared": low, "ids": list(path[low:])})
    return found


def path_ids(paths: Sequence[dict[str, Any]], k: int) -> list[int]:
    """Return the tokens of path ``k`` of :func:`packed_paths`.

    Args:
        paths: All of them.
        k: Index of one.
    """
    parts, length = list[list[int]](), None
    place: int | None = k
    while place is not None:
        one = paths[place]
        own = one["ids"] if length is None else one["ids"][: max(0, length - one["shared"])]
        parts.append(own)
        length = one["shared"] if length is None else min(length, one["shared"])
        place = one["of"]
    return [token for part in reversed(parts) for token in part]


def path_lengths(paths: Sequence[Any]) -> list[int]:
    """Return the number of tokens of each path of :func:`packed_paths`, whoever wrote them.

    Raises:
        ValueError: If a path does not begin with tokens of an earlier one, as it says.
    """
    lengths = list[int]()
    for k, one in enumerate(paths):
        of, shared, ids = (None if one is None else one[name] for name in ("of", "shared", "ids"))
        longest = 0 if of is None else lengths[of] if 0 <= of < k else -1
        if ids is None or None in ids or shared is None or not 0 <= shared <= longest:
            raise ValueError(f"path {k} of an episode shares {shared} tokens with path {of}, which it cannot")
        lengths.append(shared + len(ids))
    return lengths
