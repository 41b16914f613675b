"""Converts rollout logs to the parts that the page loads on demand: an index, parts of sections, and episodes."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

from agile_trainers.records.plain import from_json, json_bytes
from agile_trainers.records.reader import RecordsError, RunRecords
from agile_trainers.records.schema import ADDED
from agile_trainers.records.writer import ROLLOUTS
from agile_trainers.types import StopReason

OUTLINE_TEXT = 200
"""Characters of a text in an outline."""
OUTLINE_TURNS = 40
"""Turns of an outline that have texts."""
STOP_REASONS = {
    StopReason.TERMINATED: "The environment reached a terminal state.",
    StopReason.TRUNCATED: "The environment ended the episode by a limit of its own.",
    StopReason.MAX_TURNS: "The episode used all of max_turns.",
    StopReason.CONTEXT_FULL: "The conversation left no room for another answer within max_model_length.",
    StopReason.REWRITE_FULL: "The rewritten context left no room for an answer within max_model_length.",
    StopReason.ENVIRONMENT_ERROR: "The environment raised or broke the protocol; the episode is not trained on.",
    StopReason.ENVIRONMENT_TIMEOUT: "The environment did not answer in time; the episode is not trained on.",
}
"""The page's sentence for each stop reason."""
_FACTS = ("kind", "run", "algorithm", "model", "environment", "policy", "seed", "started", "options")
"""Entries of ``run.json`` that the page shows."""
_EVALUATED = "eval-YYYYmmdd-HHMMSS-abcd"
"""The beginning that the names of the runs of one evaluation's policies have in common."""
_LARGEST = 1e300
"""Numbers from which on the charts have no place."""
_COLUMNS = ("generation", "group", "member", "seed", "return", "success", "num_turns", "num_tokens", "demonstration")
_TOKENS = ("turn_ids", "sampling_logprobs", "logprobs", "advantages", "ratios", "clipped", "kl")
_EVALUATION = re.compile(r"eval-\d+-([A-Za-z0-9_.]+?)(?:\.(\d{1,9}))?-rank")
"""Key of an evaluation's episode: the prefix of its metrics, and the number of the evaluation at its step."""
_AS_IT_IS = frozenset({int, bool, str, type(None)})
_TURN = ("start", "end", "text", "observation", "reward", "return", "advantage", "value", "finish_reason", "info")


@dataclass(frozen=True)
class Section:
    """The episodes that one policy step sampled, in training or in an evaluation."""

    phase: str
    step: int
    rows: list[dict[str, Any]]
    """Their rows of :meth:`RunRecords.index`, file by file."""
    evaluation: str = ""
    """Prefix of an evaluation's metrics, and a number from the second one of a step on (``eval.2``); empty in training."""

    @property
    def name(self) -> str:
        """The name of its parts; it changes when further episodes are written."""
        return "-".join(filter(None, [self.phase, str(self.step), str(len(self.rows)), self.evaluation]))


def readable_rows(
    run: RunRecords, index: Callable[[Path], list[dict[str, Any]]] | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """List the episodes of the files that can be read, and what is wrong with the others and with the run's logs.

    Args:
        run: The run.
        index: Lists the episodes of a file. Default: reads it.
    """
    rows, problems = list[dict[str, Any]](), [*run.problems, *run.unread_lines()]
    for path in run.files:
        try:
            rows += RunRecords(run.folder, [path], path.name).index() if index is None else index(path)
        except RecordsError as error:
            problems.append(str(error))
    try:
        run.vocabulary()
    except RecordsError as error:
        problems.append(str(error))
    return rows, problems


def readable_vocabulary(run: RunRecords) -> dict[int, tuple[bytes, bool]]:
    """Read the vocabulary of a run; empty if its file cannot be read, so that tokens are shown by their numbers."""
    try:
        return run.vocabulary()
    except RecordsError:
        return {}


def sections(index: Iterable[dict[str, Any]]) -> list[Section]:
    """Split the episodes of a run into sections, by step; training comes before the evaluations, one after another."""

    def place(row: dict[str, Any]) -> tuple[int, bool, str, int]:
        step = row["step"] or 0
        if row["phase"] == "train":
            return step, False, "", 0
        named = _EVALUATION.match(row["key"])
        return step, True, named[1] if named else "eval", int(named[2] or 1) if named else 1

    split = groupby(sorted(index, key=place), place)
    return [
        Section("eval" if other else "train", step, list(rows), prefix if number < 2 else f"{prefix}.{number}")
        for (step, other, prefix, number), rows in split
    ]


def read_section(run: RunRecords, section: Section) -> Iterator[dict[str, Any]]:
    """Read the episodes of a section in order, file by file: to ask for each by its key would read a file once for each.

    In the place of one that cannot be read is :func:`unreadable`.
    """
    wanted = dict.fromkeys(row["key"] for row in section.rows)
    for name in dict.fromkeys(row["key"].rpartition("#")[0] for row in section.rows):
        left = [key for key in wanted if key.rpartition("#")[0] == name]
        problem = f"{run.folder / name} changed while it was read."
        try:
            for number, record in enumerate(RunRecords(run.folder, [run.folder / name], name).episodes()):
                if left and f"{name}#{number}" == left[0]:
                    yield record
                    left.pop(0)
        except RecordsError as error:
            problem = str(error)
        yield from (unreadable(problem) for _ in left)


def unreadable(problem: str) -> dict[str, Any]:
    """Return an episode that shows why it cannot be read."""
    return {"turns": [], "error": problem, "completion_ids": []}


def index_of(entries: Sequence[dict[str, Any]], runs: Sequence[RunRecords], **facts: Any) -> bytes:
    """Return the index of a page as JSON.

    Args:
        entries: :func:`run_index` of each run.
        runs: The runs.
        **facts: Further entries.
    """
    _count_unreported(entries, runs)
    named = zip(entries, labels(runs), seed_sets(runs), strict=True)
    found = [entry | {"label": label, "set": number} for entry, label, number in named]
    return encode({**facts, "stop_reasons": STOP_REASONS, "runs": found})


def _count_unreported(entries: Sequence[dict[str, Any]], runs: Sequence[RunRecords]) -> None:
    """Count episodes that report no success as unsuccessful where others of the environment report it, as the log does.

    Policies of one evaluation count alike. Episodes whose environment failed are unsuccessful in evaluations, and have no
    success in training.
    """
    keys, known = list[list[Any]](), set[Any]()
    for entry, run in zip(entries, runs, strict=True):
        of = run.folder.parent, run.name[: len(_EVALUATED)], entry["info"].get("environment")
        columns, names = entry["episodes"], entry["environments"]
        keys.append([(of, None if place is None else names[place]) for place in columns["environment"]])
        known |= {key for key, success in zip(keys[-1], columns["success"], strict=True) if success is not None}
    for entry, of_rows in zip(entries, keys, strict=True):
        phases = [phase for phase, _, size, *_ in entry["sections"] for _ in range(size)]
        columns = entry["episodes"]
        failures = [StopReason(stop).failed for stop in columns["stop"]]
        columns["success"] = [
            None if key not in known or (failed and phase == "train") else bool(success) and not failed
            for success, key, phase, failed in zip(columns["success"], of_rows, phases, failures, strict=True)
        ]


def run_index(
    run: RunRecords, found: Sequence[Section], part_of: dict[str, int], problems: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a run's part of the index: what is known of each episode without its texts and tokens, by column.

    Args:
        run: The run.
        found: Its sections.
        part_of: Key of an episode to the number of the part that holds it; others are not on the page.
        problems: What could not be read.
    """
    rows = [row for section in found for row in section.rows]
    environments = sorted({row["environment"] for row in rows if row["environment"] is not None})
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in _COLUMNS}
    columns["environment"] = [
        None if row["environment"] is None else environments.index(row["environment"]) for row in rows
    ]
    columns["stop"] = [row["stop_reason"] for row in rows]
    columns["part"] = [part_of.get(row["key"], -1) for row in rows]
    metrics = [entry for entry in run.metrics() if _is_step(entry.get("step"))]
    return {
        "name": run.name,
        "info": _info(run),
        "environments": environments,
        "sections": [
            [section.phase, section.step, len(section.rows), section.name, section.evaluation] for section in found
        ],
        "episodes": columns,
        "findings": [
            {"step": finding["step"], **{name: _text(finding.get(name)) for name in ("name", "evidence", "advice")}}
            for finding in run.findings()
            if _is_step(finding.get("step"))
        ],
        "problems": list(problems),
        "metrics": {
            name: [entry[name] if _is_drawable(entry.get(name)) else None for entry in metrics]
            for name in sorted({name for entry in metrics for name, value in entry.items() if _is_drawable(value)})
        },
    }


def outline(record: dict[str, Any]) -> dict[str, Any]:
    """Return the beginning of each of an episode's texts, for pages that show many episodes side by side.

    All turns have their numbers, the first :data:`OUTLINE_TURNS` their texts too. ``credit`` is the return of the rewards
    that credit was computed from.
    """
    turns = [
        {"reward": turn.get("reward"), "advantage": turn_advantage(record, turn)}
        | ({name: _cut(turn.get(name)) for name in ("text", "observation")} if place < OUTLINE_TURNS else {})
        for place, turn in enumerate(record["turns"])
    ]
    return {
        "row": _cut(record.get("row")),
        "prompt": _cut(_last_message(record.get("prompt"))),
        "error": _cut(record.get("error")),
        "credit": record["turns"][0].get("return") if record["turns"] else None,
        "turns": turns,
    }


def figures(record: dict[str, Any]) -> dict[str, Any]:
    """Return what the page computes statistics of episodes from, besides the index.

    ``start`` is a digest of what the episode starts from: environment, and dataset row or prompt. ``clip`` has the number
    of clipped tokens and that of tokens of which it is known, or is None. ``low`` is the lowest advantage of a token, or
    of a turn where tokens have none, or None.
    """
    start = [record.get("environment"), record.get("row") if record.get("row") is not None else record.get("prompt")]
    clipped = [value for value in record.get("clipped") or () if value is not None]
    known = [value for value in record.get("advantages") or () if value is not None]
    known = known or [turn["advantage"] for turn in record["turns"] if turn.get("advantage") is not None]
    return {
        "start": blake2b(json.dumps(start, sort_keys=True, default=str).encode(), digest_size=8).hexdigest(),
        "clip": [sum(clipped), len(clipped)] if clipped else None,
        "low": min((value for value in known if isfinite(value)), default=None),
    }


def searched_texts(record: dict[str, Any]) -> list[str]:
    """Return the whole texts of an episode, to search in: what it starts from, each action and its answer, the error."""
    prompt = record.get("prompt")
    messages = prompt if isinstance(prompt, list) else [prompt]
    start = [one.get("content", one) if isinstance(one, dict) else one for one in messages] + [record.get("row")]
    turns = [turn.get(name) for turn in record["turns"] for name in ("text", "observation")]
    return ["\n".join(map(_whole, start)).strip(), *map(_whole, turns), _whole(record.get("error"))]


SECTION_PARTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "outline": outline,
    "figures": figures,
    "texts": searched_texts,
}
"""The parts of a section, by the beginning of their names, and what each says of an episode."""


_IMAGE = re.compile(r"image:([0-9a-f]{32})")
_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp", b"BM": "bmp", b"GIF8": "gif"}
"""Beginnings of the files of images that a page shows, none of which holds scripts."""


def images_in(record: dict[str, Any], read: Callable[[str], bytes | None]) -> dict[str, str]:
    """Return the images of an episode by the text that stands for each, as addresses that hold the data.

    Args:
        record: The episode.
        read: Reads an image by its digest; None for one that is not there.
    """
    messages = [
        record.get("prompt"),
        *(turn.get(name) for turn in record["turns"] for name in ("observation", "messages")),
    ]
    found = {}
    for digest in dict.fromkeys(_IMAGE.findall(json.dumps([m for m in messages if isinstance(m, list)], default=str))):
        data = read(digest) or b""
        kind = next((kind for begin, kind in _KINDS.items() if data.startswith(begin)), None)
        if kind is not None:
            found[f"image:{digest}"] = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return found


def detail(record: dict[str, Any], read_image: Callable[[str], bytes | None] = lambda digest: None) -> dict[str, Any]:
    """Return everything that the page shows of an episode.

    Args:
        record: The episode.
        read_image: See :func:`images_in`. Default: there are none.
    """
    turns = [
        {
            **{name: turn.get(name) for name in _TURN},
            "advantage": turn_advantage(record, turn),
            **{name: turn[name] for name in ("question", "messages") if turn.get(name)},
        }
        for turn in record["turns"]
    ]
    shown = {name: record.get(name) for name in (*_TOKENS, "row", "error", "prompt", "reset_info", "prompt_ids")}
    if any(turn.get("path") is not None for turn in record["turns"]):
        shown |= {"paths": record["paths"]}
        for turn, found, extra in zip(turns, record["turns"], _prompts(record), strict=True):
            turn |= {name: found[name] for name in ADDED} | extra
    images = images_in(record, read_image)
    return {
        **shown,
        "ids": record.get("completion_ids") or [],
        "turns": turns,
        **({"images": images} if images else {}),
    }


def _prompts(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Say of each turn how much of its prompt earlier turns read or wrote, and number the prompts by their tokens.

    ``seen`` is the number of tokens that the prompt shares with a prompt and answer of an earlier turn, ``samePrompt`` a
    number that turns with the same prompt have in common. Both are None where the tokens were left out.
    """
    paths = record["paths"]
    if paths is None:
        return [{"seen": None, "samePrompt": None} for _ in record["turns"]]
    known, numbers, found = [0] * len(paths), dict[tuple[int, int], int](), []
    for turn in record["turns"]:
        path, length = turn["path"], turn["place"]
        while known[path] <= paths[path]["shared"] and paths[path]["of"] is not None:  # nothing of its own is known
            path, length = paths[path]["of"], min(length, paths[path]["shared"])
        seen = min(length, known[path])
        path, length = turn["path"], turn["place"]
        while length <= paths[path]["shared"] and paths[path]["of"] is not None:  # the path that stores its last token
            path = paths[path]["of"]
        found.append({"seen": seen, "samePrompt": numbers.setdefault((path, length), len(numbers))})
        holder: int | None = turn["path"]
        length += turn["end"] - turn["start"]
        while holder is not None:
            known[holder], length = max(known[holder], length), min(length, paths[holder]["shared"])
            holder = paths[holder]["of"]
    return found


def turn_advantage(record: dict[str, Any], turn: dict[str, Any]) -> float | None:
    """Return a turn's advantage; where only its tokens have one, their mean."""
    if turn.get("advantage") is not None:
        return turn["advantage"]
    if turn.get("start") is None or not record.get("advantages"):
        return None
    known = [value for value in record["advantages"][turn["start"] : turn["end"]] if value is not None]
    return sum(known) / len(known) if known else None


def used_tokens(vocabulary: dict[int, tuple[bytes, bool]], episodes: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the tokens that episodes use: the bytes of each as a text of as many characters, and whether it is special."""
    used = {token for episode in episodes for token in (*episode["ids"], *(episode["prompt_ids"] or ()))}
    used |= {token for episode in episodes for path in episode.get("paths") or () for token in path["ids"]}
    return {
        str(token): [vocabulary[token][0].decode("latin-1"), int(vocabulary[token][1])]
        for token in sorted(used)
        if token in vocabulary
    }


def detail_part(vocabulary: dict[int, tuple[bytes, bool]], episodes: Sequence[dict[str, Any]]) -> bytes:
    """Return a part with whole episodes and the tokens that they use, as JSON."""
    return encode({"pieces": used_tokens(vocabulary, episodes), "episodes": episodes})


def section_parts(records: Iterable[dict[str, Any]]) -> dict[str, bytes]:
    """Return the parts of a section, as JSON, by their kinds in :data:`SECTION_PARTS`."""
    made: dict[str, list[bytes]] = {kind: [] for kind in SECTION_PARTS}
    for record in records:
        for kind, shown in SECTION_PARTS.items():
            made[kind].append(encode(shown(record)))
    return {kind: b"[" + b",".join(found) + b"]" for kind, found in made.items()}


def encode(value: Any) -> bytes:
    """Return a value as JSON in ASCII: numbers rounded (:func:`_rounded`), NaN and infinity as texts, surrogates escaped."""
    return json.dumps(_finite(value), separators=(",", ":"), default=str).encode("ascii")


def most_telling_first(count: int) -> Iterator[int]:
    """Yield the numbers below ``count``: first and last, then the middle of each gap, so that any beginning is even."""
    yield from sorted({0, count - 1}) if count else ()
    gaps = deque([(0, count - 1)])
    while gaps:
        low, high = gaps.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            yield middle
            gaps += [(low, middle), (middle, high)]


def _finite(value: Any) -> Any:
    """Return JSON-ready data with rounded numbers, and a text for each number that JSON does not have."""
    if isinstance(value, float):
        return _rounded(value) if isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [  # most are numbers of tokens, for which a call each would take most of the time
            item
            if (kind := type(item)) in _AS_IT_IS
            else _rounded(item)
            if kind is float and isfinite(item)
            else _finite(item)
            for item in value
        ]
    return value


def _rounded(value: float) -> float:
    """Round to five decimals, or to five significant digits where these are more: a reward of 4e-6 is not 0."""
    return round(value, 5) if abs(value) >= 1 else float(f"{value:.5g}")


def _exact(value: Any) -> Any:
    """Return data with texts in the place of fractions, which the page would show with all digits: 0.000001 for 1e-6."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    return [_exact(item) for item in value] if isinstance(value, (list, tuple)) else value


def _info(run: RunRecords) -> dict[str, Any]:
    """Return what the page shows of ``run.json``, each entry with the type that it expects, and of a population's member."""
    known = {name: run.info[name] for name in _FACTS if run.info.get(name) is not None}
    facts = {name: _text(value) for name, value in known.items() if name != "options"}
    options = known.get("options")
    given = {"options": _exact(options)} if isinstance(options, dict) else {}
    return facts | given | ({"member": _exact(run.member)} if run.member is not None else {})


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(_exact(value), default=str)


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_drawable(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def _last_message(prompt: Any) -> Any:
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        return prompt[-1].get("content")
    return prompt


def _cut(value: Any, most: int = OUTLINE_TEXT) -> str | None:
    """Return the beginning of a text, or of a value's JSON; an ellipsis stands for the rest."""
    if value is None:
        return None
    text = _whole(value)
    return text if len(text) <= most else f"{text[:most]}…"


def _whole(value: Any) -> str:
    """Return a text, or a value's JSON; nothing for None."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


_SEEDS = frozenset({"seed", "data_seed"})
"""Options in which runs of one set may differ."""
_WITHHELD = re.compile(r"<\w+, withheld\b.*>", re.DOTALL)
"""A value that ``run.json`` withholds; equal values have different texts in different folders."""
_LONGEST = 80
"""Characters of a policy or folder in a label."""


def labels(runs: Sequence[RunRecords]) -> list[str]:
    """Name each run: folder and algorithm, of an evaluation policy and folder; where these are equal, the run's id too.

    A folder is named by as much of the end of its path as tells it apart from the other folders.
    """
    folders = _short_names([_output_dir(run) for run in runs])
    found = []
    for run, folder in zip(runs, folders, strict=True):
        policy, algorithm = (run.info.get(name) for name in ("policy", "algorithm"))
        parts = [policy, folder] if policy else [folder, algorithm]
        texts = (_whole(part).removeprefix("Multi-turn ") for part in parts if part)
        found.append(" · ".join(f"{_cut(text, _LONGEST)}" for text in texts))
    counts = Counter(found)
    return [label if counts[label] == 1 else f"{label} · {run.name}" for label, run in zip(found, runs, strict=True)]


def seed_sets(runs: Sequence[RunRecords]) -> list[int]:
    """Number the sets of runs that differ in the seed alone; a run that is like no other is a set of its own.

    Compared are kind, algorithm, model, environment, policy and options; of options whose values are withheld, the names.
    Runs with the same seed are in different sets: the second run of a seed says nothing about other seeds. So are members of
    a population, whose hyperparameters change.
    """
    numbers: dict[Any, int] = {}
    seen: Counter[Any] = Counter()
    found = []
    for place, run in enumerate(runs):
        key: Any = place
        if run.member is None and type(run.info.get("seed")) is int:
            alike = _without_seed(run.info)
            seen[alike, run.info["seed"]] += 1
            key = alike, seen[alike, run.info["seed"]]
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def _without_seed(info: dict[str, Any]) -> str:
    """Return what must be equal in runs of one set, as JSON."""
    facts = {name: info.get(name) for name in ("kind", "algorithm", "model", "environment", "policy")}
    options = info.get("options")
    if isinstance(options, dict):
        compared = {name: value for name, value in options.items() if name not in _SEEDS}
        options = {name: None if _WITHHELD.fullmatch(str(value)) else value for name, value in compared.items()}
    return json.dumps([facts, options], sort_keys=True, default=str)


def _output_dir(run: RunRecords) -> Path:
    folder = run.folder.resolve()
    if folder.parent.name == ROLLOUTS:
        return folder.parent.parent
    return folder.parent if folder.name == ROLLOUTS else folder


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths, of one length, that tell different paths apart."""
    different = set(folders)
    longest = max((len(folder.parts) for folder in folders), default=1)
    for size in range(1, longest + 1):
        if len({folder.parts[-size:] for folder in different}) == len(different):
            break
    return ["/".join(folder.parts[-size:]) for folder in folders]


LINEAGE = "lineage.json"
"""File in a population's folder; the members' folders are beside it."""


def with_members(runs: Sequence[RunRecords]) -> list[RunRecords]:
    """Name the runs of members after them, the winner first, before the other runs in their order.

    Args:
        runs: Any runs. Those in ``member-<number>/rollouts/`` beside a lineage are of members. They get ``member``: number,
            parent, hyperparameters, steps, fitness, standard error, state, and the fitness's name. A lineage that cannot be
            read is named in their ``problems``.
    """
    lineages: dict[Path, dict[int, dict[str, Any]] | str] = {}
    members, others = [], []
    for run in runs:
        found = None
        folder = run.folder.parent.parent
        if folder.name.startswith("member-") and (folder.parent / LINEAGE).is_file():
            if folder.parent not in lineages:
                lineages[folder.parent] = _members(folder.parent / LINEAGE)
            number, lineage = folder.name.removeprefix("member-"), lineages[folder.parent]
            if isinstance(lineage, str):
                run = replace(run, problems=[*run.problems, lineage])
            elif number.isascii() and number.isdecimal() and len(number) < 10:
                found = lineage.get(int(number))
        if found is None:
            others.append(run)
        else:
            members.append(replace(run, name=f"{folder.name} {run.name}", member=found))
    return sorted(members, key=_place) + others


def _place(run: RunRecords) -> tuple[str, bool, int, float]:
    """Order members: by population, then the winner of all rounds, then by how long they lived, then by fitness."""
    member = run.member
    assert member is not None
    fitness = -1e9 if member["fitness"] is None else member["fitness"]
    return str(run.folder.parents[2]), not member["winner"], -member["round"], -fitness


def _members(path: Path) -> dict[int, dict[str, Any]] | str:
    """Read what became of each member: its last hyperparameters and result, and whether it lives; or what is wrong."""
    try:
        return _read_members(from_json(json_bytes(path)))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, OSError) as error:
        return f"{path} is no lineage of a population: {type(error).__name__}: {str(error)[:200]}."


def _read_members(lineage: dict[str, Any]) -> dict[int, dict[str, Any]]:
    winner: dict[str, Any] | None = None
    found: dict[int, dict[str, Any]] = {}
    for event in lineage["events"]:
        if event["event"] == "born":
            found[event["member"]] = {
                "member": int(event["member"]), "parent": event["parent"] and int(event["parent"]), "round": 0,
                "steps": int(event["steps"]), "fitness": None, "error": None, "state": "",
                "winner": False,
                "measured": str(lineage["settings"]["fitness"]),
            }  # fmt: skip
        member = found[event["member"]]
        member["hyperparameters"] = {str(name): f"{value:.4g}" for name, value in event["hyperparameters"].items()}
        if event["event"] == "trained":
            if winner is None or (event["fitness"], event["round"]) > (winner["fitness"], winner["round"]):
                winner = event
            member |= {
                "round": int(event["round"]), "steps": int(event["steps"]), "fitness": round(event["fitness"], 4),
                "error": event["standard_error"] and round(event["standard_error"], 4),
            }  # fmt: skip
        elif event["event"] in ("stopped", "failed"):
            member["state"] = event["event"]
    if winner is not None:
        found[winner["member"]]["winner"] = True
    if lineage["best"] is not None and winner is not None:
        at_the_end = found[lineage["best"]]["round"] == winner["round"]
        found[lineage["best"]]["state"] = "the best" if at_the_end else "the best at the end"
        if not at_the_end:
            found[winner["member"]]["state"] = f"the best, at step {winner['steps']}"
    return found
