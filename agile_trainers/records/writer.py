"""Writes the episodes, metrics and vocabulary of a run into a folder of its own, within a size on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agile_trainers.records.plain import PARTIAL, Plain, replacing, to_json
from agile_trainers.records.schema import ADDED, EPISODE, FORMAT, PARQUET, TRAINED, VOCABULARY, packed_paths, to_table
from agile_trainers.types import NO_TURN, Trajectory

DIGESTS = "digests-*.jsonl"


def digest_of(path: Path) -> str:
    """Return the SHA-256 digest of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_entry(path: Path, content: Path) -> dict[str, str]:
    """Return the entry of a file in the list of digests, before the file is there.

    Args:
        path: Where the file is going to be.
        content: Where its content is now; it is renamed to ``path`` afterwards.
    """
    return {"file": path.name, "sha256": digest_of(content)}


def has_digest(path: Path) -> bool:
    """Return whether a file's folder keeps digests. A single copied file has none."""
    return any(path.parent.glob(DIGESTS))


def digest_problem(path: Path) -> str | None:
    """Return why a file is not what was written; None if it is, or if its folder keeps no digests.

    Args:
        path: A regular file.

    Raises:
        OSError: If the file or its digests cannot be read.
    """
    files = sorted(path.parent.glob(DIGESTS))
    if not files:
        return None
    listed = {digest for file in files for name, digest in _lines(file, _stamp(file)) if name == path.name}
    if not listed:
        return f"no file {DIGESTS} beside it has its digest, so that nothing says that it is whole"
    return None if _digest(path, _stamp(path)) in listed else "its bytes are not those that were written"


def _stamp(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_mtime_ns, state.st_size, state.st_ino


@lru_cache(maxsize=64)
def _lines(path: Path, _: tuple[int, int, int]) -> frozenset[tuple[str, str]]:
    found = set()
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            entry = json.loads(line)
            found.add((str(entry["file"]), str(entry["sha256"])))
        except (ValueError, TypeError, LookupError, RecursionError):  # half a line, or a damaged one: its file has none
            continue
    return frozenset(found)


@lru_cache(maxsize=4096)
def _digest(path: Path, _: tuple[int, int, int]) -> str:
    return digest_of(path)


ROLLOUTS, RUN, METRICS, VOCABULARY_FILE = "rollouts", "run.json", "metrics.jsonl", "vocabulary.parquet"
FINDINGS = "findings.jsonl"
IMAGES = "images"
_ROW_GROUP_BYTES = 2**25
"""Estimated bytes of the episodes that a reader loads to show one of them."""
_TRAIN_FILE = re.compile(r"train-(\d+)-rank(\d+)\.parquet")
_LONGEST = 80
"""Characters of the longest name of an evaluation in a file's name."""
_EVAL_FILE = re.compile(r"eval-(\d+)-.*-rank(\d+)\.parquet")


def file_part(name: str) -> str:
    """Return a name as a part of a file's name: letters, digits and ``_``, at most 80, others for other names.

    Args:
        name: Any text, such as the prefix of an evaluation's metrics, which ends in the name of a data set.
    """
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
    if plain == name and len(name) <= _LONGEST:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{plain[: _LONGEST - 1 - len(digest)]}_{digest}"


def new_run_id(kind: str = "training") -> str:
    """Make the id of a run from the time: ``YYYYmmdd-HHMMSS-<4 hex>``, with ``eval-`` before that of an evaluation.

    The hexadecimal digits are the fraction of the second, so that names sort by time.
    """
    now = datetime.now(UTC)
    fraction = now.microsecond * 2**16 // 10**6
    return ("eval-" if kind == "evaluation" else "") + f"{now:%Y%m%d-%H%M%S}-{fraction:04x}"


def episode_row(
    trajectory: Trajectory,
    *,
    step: int = 0,
    phase: str = "eval",
    index: int = 0,
    generation: int | None = None,
    group: int | None = None,
    member: int | None = None,
    advantages: Sequence[float] | None = None,
    returns: Sequence[float] | None = None,
    values: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Convert an episode to a row of :data:`agile_trainers.records.schema.EPISODE`.

    The token columns of an update (:data:`~agile_trainers.records.schema.TRAINED`) are None; set them to sequences as long
    as ``completion_ids``.

    Args:
        trajectory: The episode.
        step: Optimizer steps before the update on it; of an evaluation's episode, of its policy.
        phase: ``"train"`` or ``"eval"``.
        index: Its index among the episodes of all processes.
        generation: Index of its generation batch.
        group: Index of its group.
        member: Index in its group.
        advantages: Of each turn.
        returns: From each turn on. Default: the undiscounted sum of the environment's rewards that had not been given when
            it was asked for.
        values: The critic's, of the state before each turn.
    """
    turn_ids = np.full(len(trajectory.completion_ids), NO_TURN, dtype=np.int16)
    if returns is None:
        to_go = np.cumsum(trajectory.rewards[::-1])[::-1].tolist()
        firsts = (k if turn.rewarded is None else turn.rewarded for k, turn in enumerate(trajectory.turns))
        returns = [to_go[first] for first in firsts]
    turns = []
    parents = None if trajectory.paths is None else trajectory.parents
    for k, turn in enumerate(trajectory.turns):
        turn_ids[turn.start : turn.end] = k
        is_text = turn.observation is None or isinstance(turn.observation, str)
        added: dict[str, Any] = {"judgements": turn.judgements} if turn.judgements else {}
        if trajectory.end_reward is not None and turn is trajectory.turns[-1]:
            added["end_reward"] = trajectory.end_reward
        turns.append({
            "start": turn.start,
            "end": turn.end,
            "text": turn.text,
            "finish_reason": turn.finish_reason,
            "observation": turn.observation if is_text else to_json(turn.observation),
            "observation_is_json": not is_text,
            "reward": turn.reward,
            "return": returns[k],
            "advantage": None if advantages is None else advantages[k],
            "value": None if values is None else values[k],
            "info": to_json({**turn.info, **added} if added else turn.info),
            **dict.fromkeys(ADDED),
            "question": turn.question or None,
            "messages": None if turn.messages is None else to_json(turn.messages),
            **({} if parents is None else {
                "path": turn.path,
                "place": turn.place,
                "parent": parents[k],
                "rewarded": k if turn.rewarded is None else turn.rewarded,
                "fork": turn.fork,
            }),
        })  # fmt: skip
    return {
        "step": step,
        "generation": generation,
        "phase": phase,
        "index": index,
        "group": group,
        "member": member,
        "environment": trajectory.environment_name,
        "seed": trajectory.seed,
        "row": None if trajectory.options is None else to_json(trajectory.options, shown=False),
        "return": trajectory.episode_return,
        "success": trajectory.success,
        "stop_reason": trajectory.stop_reason.value,
        "error": trajectory.error,
        "truncated": trajectory.stop_reason.truncated,
        "demonstration": trajectory.demonstration or None,
        "num_turns": len(turns),
        "num_tokens": trajectory.num_tokens - len(trajectory.prompt_ids),
        "prompt": to_json(trajectory.prompt),
        "reset_info": to_json(trajectory.reset_info),
        "turns": turns,
        "prompt_ids": trajectory.prompt_ids,
        "completion_ids": trajectory.completion_ids,
        "turn_ids": turn_ids,
        "sampling_logprobs": np.ma.masked_array(trajectory.sampling_logprobs, turn_ids == NO_TURN, dtype=np.float64),
        **dict.fromkeys(TRAINED),
        "paths": None if trajectory.paths is None else packed_paths(trajectory.paths),
    }


def write_episodes(path: Path, rows: Iterable[dict[str, Any]], digests: Path | None = None) -> None:
    """Write a Parquet file atomically: it is there as a whole or not at all.

    Args:
        path: The file.
        rows: Of :func:`episode_row`; read one after another, so that long texts need not be in memory at once.
        digests: File to which the digest is appended; see :mod:`agile_trainers.records.writer`. Default: none.

    Raises:
        OSError: If the file cannot be written.
    """
    with replacing(path) as partial:
        with pq.ParquetWriter(partial, EPISODE, **PARQUET) as writer:
            for part in _row_groups(rows):
                writer.write_table(to_table(part))
        if digests is not None:
            _append(digests, digest_entry(path, partial))


def thinned(generations: Sequence[int]) -> int:
    """Choose the generation batch whose records are deleted first, so that the rest covers the whole run evenly.

    Odd indices go first, then the odd multiples of 2, of 4 and so on, and of these the oldest. The first batch and the
    newest stay.

    Args:
        generations: Indices of at least two batches.
    """
    newest = max(generations)
    others = [generation for generation in generations if generation != newest]
    # The largest power of two that divides the index; of 0, any.
    return min(others, key=lambda generation: (generation & -generation or newest + 1, generation))


def _sizes(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield time, size and path of the whole files of a folder that other processes write and delete in."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if path.suffix != PARTIAL:
                yield path.stat().st_mtime_ns, path.stat().st_size, path


class RecordWriter:
    """Writes the rollout log of one process's part of a run to ``folder/rollouts/<run>``.

    Args:
        folder: ``output_dir`` of the run.
        info: Content of ``run.json``: ``kind`` (``"training"``, the default, or ``"evaluation"``), ``run`` (default: a new
            id) and whatever describes the run. Written by the process of rank 0; entries of a run that goes on take the
            place of the earlier ones.
        max_bytes: Largest size of this process's files of episodes. Beyond it, those of training batches are thinned, see
            :func:`thinned`; if all but the newest are gone, the oldest evaluations are deleted. Default: no limit.
        rank: Index of this process.
        report: Called with one line of text at the first deletion.
    """

    def __init__(
        self,
        folder: Path | str,
        info: dict[str, Any],
        *,
        max_bytes: int | None = None,
        rank: int = 0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        kind = info.get("kind", "training")
        self.run: str = info.get("run") or _free_id(Path(folder) / ROLLOUTS, kind)
        self.folder = Path(folder) / ROLLOUTS / self.run
        """Folder of the run."""
        self._max_bytes, self._rank, self._report = max_bytes, rank, report
        self.folder.mkdir(parents=True, exist_ok=True)
        for partial in self.folder.glob(f"*-rank{rank}.parquet{PARTIAL}"):  # of a killed process
            partial.unlink()
        if rank == 0:
            new = {"format": FORMAT, "kind": kind, "started": datetime.now(UTC).isoformat(timespec="seconds")}
            entries = {**new, **self._info(), **info, "run": self.run}
            with replacing(self.folder / RUN) as partial:
                partial.write_text(json.dumps(Plain()(entries), indent=2) + "\n", encoding="utf-8")

    def _info(self) -> dict[str, Any]:
        """Return the entries that the run has already; none where they cannot be read."""
        with suppress(OSError, ValueError, TypeError, RecursionError):
            return dict(json.loads((self.folder / RUN).read_text(encoding="utf-8")))
        return {}

    def write_train(self, generation: int, rows: Iterable[dict[str, Any]]) -> Path:
        """Write the episodes of a generation batch.

        Args:
            generation: Its index in the run.
            rows: Of :func:`episode_row`.

        Raises:
            OSError: If the file cannot be written.
        """
        return self._write(f"train-{generation:06d}", rows)

    def write_eval(self, step: int, prefix: str, rows: Iterable[dict[str, Any]]) -> Path:
        """Write the episodes of an evaluation. A second one of the same step and prefix gets a number.

        Args:
            step: Optimizer steps of the policy.
            prefix: Prefix of its metrics.
            rows: Of :func:`episode_row`.

        Raises:
            OSError: If the file cannot be written.
        """
        name = f"eval-{step:06d}-{file_part(prefix)}"
        names = (name if number == 1 else f"{name}.{number}" for number in count(1))
        return self._write(next(free for free in names if not self._path(free).exists()), rows)

    def write_images(self, trajectories: Iterable[Trajectory]) -> None:
        """Write the images of episodes that are not there yet, each into a file of its own.

        They may take as many bytes as the episodes; beyond that the oldest are deleted.

        Args:
            trajectories: The episodes.

        Raises:
            OSError: If a file cannot be written.
        """
        folder = self.folder / IMAGES
        images = {text: image for one in trajectories for text, image in one.images.items()}
        new = {folder / image.digest: image for image in images.values() if not (folder / image.digest).exists()}
        if not new:
            return
        folder.mkdir(exist_ok=True)
        for path, image in new.items():
            # Of this process alone: another may write the same image.
            with replacing(path, f"-rank{self._rank}") as partial:
                partial.write_bytes(image.data)
        kept = sorted(_sizes(folder))
        while self._max_bytes is not None and sum(size for _, size, _ in kept) > self._max_bytes:
            kept.pop(0)[2].unlink(missing_ok=True)

    def write_metrics(self, step: int, logs: dict[str, Any]) -> None:
        """Append the numbers of a log to ``metrics.jsonl``. Call it on one process.

        Args:
            step: Optimizer steps so far.
            logs: Metrics by name. What is no number is left out; an infinite one or NaN is written as null.
        """
        line = {"step": step, **{name: _number(value) for name, value in logs.items() if _is_number(value)}}
        _append(self.folder / METRICS, line)

    def write_findings(self, findings: Iterable[dict[str, Any]]) -> None:
        """Append findings of the run's diagnosis to ``findings.jsonl``. Call it on one process.

        Args:
            findings: Each with ``name``, ``step``, ``evidence`` and ``advice``.
        """
        for finding in findings:
            _append(self.folder / FINDINGS, finding)

    def write_vocabulary(self, tokenizer: Any) -> None:
        """Write the bytes of every token, once. Call it on one process.

        Args:
            tokenizer: A tokenizer of transformers, or a processor with one.
        """
        path = self.folder / VOCABULARY_FILE
        if not path.exists():
            ids, texts, special = zip(*pieces(getattr(tokenizer, "tokenizer", tokenizer)))
            table = pa.table([list(ids), list(texts), list(special)], schema=VOCABULARY)
            with replacing(path) as partial:
                pq.write_table(table, partial, compression="zstd", write_statistics=False, store_schema=False)
                _append(self._digests, digest_entry(path, partial))

    def rewind(self, generation: int, step: int, processes: int) -> int:
        """Delete what a resumed run writes again: what came after its checkpoint.

        Args:
            generation: First generation batch that was not over at the checkpoint.
            step: Optimizer steps of the checkpoint.
            processes: Number of processes of the resumed run. The first deletes the files of those that are no more.

        Returns:
            Number of files that this process deleted.
        """
        later = []
        for pattern, first in ((_TRAIN_FILE, generation), (_EVAL_FILE, step + 1)):
            for path in self.folder.glob("*.parquet"):
                if (found := pattern.fullmatch(path.name)) is None or int(found[1]) < first:
                    continue
                if (rank := int(found[2])) == self._rank or (self._rank == 0 and rank >= processes):
                    later.append(path)
        for path in later:
            path.unlink()
        for lines in (self.folder / METRICS, self.folder / FINDINGS):
            if self._rank == 0 and lines.is_file():
                kept = [line for line in lines.read_bytes().splitlines(keepends=True) if _step_of(line) <= step]
                with replacing(lines) as partial:
                    partial.write_bytes(b"".join(kept))
        return len(later)

    @property
    def _digests(self) -> Path:
        return self.folder / DIGESTS.replace("*", str(self._rank))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}-rank{self._rank}.parquet"

    def _files(self, pattern: re.Pattern[str]) -> list[Path]:
        """Return this process's files of a kind, the oldest first."""
        found = [path for path in self.folder.glob(f"*-rank{self._rank}.parquet") if pattern.fullmatch(path.name)]
        return sorted(found)

    def _write(self, name: str, rows: Iterable[dict[str, Any]]) -> Path:
        path = self._path(name)
        write_episodes(path, rows, self._digests)
        self._keep_size(path)
        return path

    def _keep_size(self, written: Path) -> None:
        """Delete files until the rest is within the limit. The file that was just written stays."""
        if self._max_bytes is None:
            return
        training = {int(path.name.split("-")[1]): path for path in self._files(_TRAIN_FILE)}
        evaluations = [path for path in self._files(_EVAL_FILE) if path != written]
        sizes = {path: path.stat().st_size for path in (*training.values(), *evaluations, written)}
        while sum(sizes.values()) > self._max_bytes and (len(training) > 1 or evaluations):
            path = training.pop(thinned(list(training))) if len(training) > 1 else evaluations.pop(0)
            path.unlink()
            del sizes[path]
            if self._report is not None:
                self._report(
                    f"The episodes in {self.folder} reached {self._max_bytes:,} bytes. {path.name} was deleted, and more "
                    "will be: training batches of odd index first, so that the rest covers the whole run."
                )
                self._report = None


def _free_id(rollouts: Path, kind: str) -> str:
    """Make the folder of a new run, whose id no other process has taken, and return the id."""
    while True:
        run = new_run_id(kind)
        with suppress(FileExistsError):
            (rollouts / run).mkdir(parents=True)
            return run


def _row_groups(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    part, size = list[dict[str, Any]](), 0
    for row in rows:
        part.append(row)
        size += _estimated_bytes(row)
        if size >= _ROW_GROUP_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _estimated_bytes(row: dict[str, Any]) -> int:
    names = ("text", "observation", "info", "messages")
    texts = sum(len(turn[name] or "") for turn in row["turns"] for name in names)
    return texts + len(row["prompt"]) + len(row["reset_info"]) + len(row["row"] or "") + 40 * row["num_tokens"]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _append(path: Path, entry: dict[str, Any]) -> None:
    """Append a line of JSON to a file, in which a killed run may have left half a line."""
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write((json.dumps(entry) + "\n").encode())


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except ValueError:  # half a line of a killed run
        return float("inf")


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def pieces(tokenizer: Any) -> list[tuple[int, bytes, bool]]:
    """Return the id, the bytes and whether it is special of every token.

    Byte-level tokenizers (GPT-2, Qwen, Llama 3) and those with byte tokens (``<0xE3>``, SentencePiece) give the bytes
    themselves; of others, the decoded text of each token is encoded.

    Args:
        tokenizer: A tokenizer of transformers.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # late, so that reading records is quick

    ids = sorted(set(tokenizer.get_vocab().values()))
    added = {index: str(token.content) for index, token in tokenizer.added_tokens_decoder.items()}
    special = set(tokenizer.all_special_ids) | {
        index for index, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = "" if backend is None else json.dumps(json.loads(backend.to_str())["decoder"])
    alphabet = {letter: byte for byte, letter in bytes_to_unicode().items()}
    found = []
    for index, token in zip(ids, tokenizer.convert_ids_to_tokens(ids)):
        if index in added:
            piece = added[index].encode("utf-8", "replace")
        elif '"ByteLevel"' in decoder and set(token) <= alphabet.keys():
            piece = bytes(alphabet[letter] for letter in token)
        elif (byte := _BYTE.fullmatch(token)) is not None:
            piece = bytes([int(byte[1], 16)])
        elif "▁" in decoder:
            piece = token.replace("▁", " ").encode("utf-8", "replace")
        else:
            piece = tokenizer.decode([index]).encode("utf-8", "replace")
        found.append((index, piece, index in special))
    return found
