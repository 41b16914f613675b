"""Folders that another person made: what is read of them runs no code, hangs nothing, and is refused with a reason."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest
import torch
import trl.chat_template_utils
import yaml
from huggingface_hub import EvalResult
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from agile_trainers.adapters import untrusted
from agile_trainers.adapters.folders import (
    OPTIONS,
    RECORD,
    CheckpointError,
    misfits,
    read_json,
    read_record,
    write_json,
)
from agile_trainers.adapters.loading import find_adapters, parent_of, read_config
from agile_trainers.adapters.untrusted import check_model_folder, check_patterns, check_template, expressions
from agile_trainers.checkpoints.integrity import (
    KEY_FILE,
    MARKER,
    OPTION,
    POSITION,
    check_complete,
    is_loaded_unlisted,
    mark_complete,
    newest_complete,
)
from agile_trainers.checkpoints.model_card import add_results, model_card, write_card
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.episode_options import EpisodeOptions
from agile_trainers.rollout.generators.base import SamplingSettings

DEEP = "[" * 100_000


class Evil:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole checkpoint without pickles, which needs no signature. This user has no key."""
    monkeypatch.delenv(OPTION, raising=False)
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "home" / "key"))
    folder = tmp_path / "run" / "checkpoint-4"
    write_json(folder / RECORD, {"lora": {}, "algorithm": "Multi-turn GRPO", "global_step": 4, "parent": None})
    write_json(folder / "trainer_state.json", {"epoch": 0.5, "global_step": 4, "best_model_checkpoint": None})
    write_json(folder / POSITION, {"generation": 2, "position": 0, "geometry": {"processes": 1}})
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "optimizer.pt").write_bytes(b"states")
    mark_complete(folder)
    assert check_complete(folder) == folder
    return folder


def mark(folder: Path) -> None:
    """Write the marker as a stranger does who knows no key: any signature, links followed."""
    files = {}
    for root, _, names in os.walk(folder):
        for path in (Path(root) / name for name in names if name != MARKER):
            if path.is_file():
                content = path.read_bytes()
                files[path.relative_to(folder).as_posix()] = {"size": len(content), "sha256": _sha256(content)}
    write_json(folder / MARKER, {"files": files, "signature": "0" * 64})


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# ------------------------------------------------------------------------------------------------------- pickles, links

PICKLES: dict[str, tuple[str | None, str, str | None]] = {
    # the text of `latest`; where the pickle is, beside the run or inside the checkpoint; the link that leads there
    "latest is the folder itself": (".", "checkpoint-4/mp_rank_00_model_states.pt", None),
    "latest leads out": ("../payload", "payload/mp_rank_00_model_states.pt", None),
    "latest leads out later": ("global_step4/../../payload", "payload/mp_rank_00_model_states.pt", None),
    "latest is absolute": ("ABSOLUTE", "payload/mp_rank_00_model_states.pt", None),
    "global_step is a link": ("global_step4", "payload/mp_rank_00_model_states.pt", "global_step4"),
    "a state is a link": (
        "global_step4", "payload/model.safetensors", "global_step4/mp_rank_00_model_states.pt",
    ),
    "sharded model is a link": (None, "payload/.metadata", "pytorch_model_fsdp_0"),
    "sharded model": (None, "checkpoint-4/pytorch_model_fsdp_0/.metadata", None),
    "metadata of a rank": (None, "checkpoint-4/pytorch_model_fsdp_0/__0.metadata", None),
    "metadata of a rank of the optimizer": (None, "checkpoint-4/optimizer_0/__0.metadata", None),
    "states without latest": (None, "checkpoint-4/global_step4/mp_rank_00_model_states.pt", None),
    "a state in capitals": ("global_step4", "checkpoint-4/global_step4/MP_RANK_00_MODEL_STATES.PT", None),
    "accelerate's own state": (None, "checkpoint-4/custom_checkpoint_0.pkl", None),
    "optimizer of a subfolder": (None, "checkpoint-4/global_step4/optimizer.pt", None),
}  # fmt: skip


@pytest.mark.parametrize("kind", PICKLES)
def test_no_unsigned_pickle_is_reached(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    latest, place, link = PICKLES[kind]
    file = checkpoint.parent / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    (checkpoint / "global_step4").mkdir(exist_ok=True) if link != "global_step4" else None
    if link is not None:
        target = file if link.endswith(".pt") else file.parent
        (checkpoint / link).symlink_to(target, target_is_directory=target.is_dir())
    if latest is not None:
        (checkpoint / "latest").write_text(latest.replace("ABSOLUTE", str(file.parent)))
    mark(checkpoint)
    with pytest.raises(CheckpointError, match=r"a link|names the subfolder|full pickle protocol"):
        check_complete(checkpoint)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("latest", [".", "../payload", "/tmp", "global_step4/..", "global_step", "", "global_step٤"])
def test_latest_is_a_step_even_in_a_folder_that_is_trusted(checkpoint: Path, latest: str, monkeypatch: Any) -> None:
    """The pickles that a person trusts are those of the folder."""
    (checkpoint / "latest").write_text(latest)
    mark_complete(checkpoint)
    for trusted in ("0", "1"):
        monkeypatch.setenv(OPTION, trusted)
        with pytest.raises(CheckpointError, match="names the subfolder"):
            check_complete(checkpoint)


def test_what_pytorch_would_run(tmp_path: Path) -> None:
    """The reader of sharded states unpickles both kinds of metadata, so the attacks above are real."""
    kinds = ((None, ".metadata"), (0, "__0.metadata"))
    readable = len(inspect.signature(FileSystemReader.read_metadata).parameters)  # torch 2.7 reads the first alone
    for rank, name in kinds[:readable]:
        (tmp_path / name).write_bytes(pickle.dumps(Evil(tmp_path / f"owned{rank}")))
        with pytest.raises(AttributeError):
            FileSystemReader(tmp_path).read_metadata(**({} if rank is None else {"rank": rank}))
        assert (tmp_path / f"owned{rank}").exists()


@pytest.mark.parametrize("kind", ["folder", "file", "loop", "pipe", "socket"])
def test_a_signed_folder_to_which_something_was_added(checkpoint: Path, kind: str) -> None:
    """A signature covers the files that were there, not what a link leads to."""
    (checkpoint / "global_step4").mkdir()
    (checkpoint / "global_step4" / "mp_rank_00_model_states.pt").write_bytes(b"a pickle")
    (checkpoint / "latest").write_text("global_step4\n")
    mark_complete(checkpoint)
    assert check_complete(checkpoint) == checkpoint
    added = checkpoint / "added"
    if kind in ("folder", "file"):
        added.symlink_to("/" if kind == "folder" else "/etc/hostname")
    elif kind == "loop":
        added.symlink_to(added)
    elif kind == "pipe":
        os.mkfifo(added)
    else:
        os.mknod(added, 0o140600)
    with pytest.raises(CheckpointError, match=r"added is (a link|no regular file)"):
        check_complete(checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        "ref/model.safetensors",
        "ref/adapter_config.json",
        "critic/adapter_model.bin",
        "teacher/adapter_model.safetensors",
    ],
)
def test_an_adapter_that_the_marker_does_not_list_is_refused(checkpoint: Path, name: str) -> None:
    """On the Hub, those of an earlier run may lie beside a checkpoint. Other files may be added."""
    others = ("ref/README.md", "ref/._adapter_config.json", "critic/notes.txt", "notes/adapter_plan.txt", "notes.txt")
    for other in (*others, "adapter_model.bin", "merged/model.safetensors", "teacher/notes.txt"):
        (checkpoint / other).parent.mkdir(exist_ok=True)
        (checkpoint / other).write_text("")
    assert check_complete(checkpoint) == checkpoint
    write_json(checkpoint / name, {})
    with pytest.raises(CheckpointError, match=f"holds {name}, which {MARKER} does not list"):
        check_complete(checkpoint)


@pytest.mark.parametrize(
    ("name", "listed", "is_loaded"),
    [
        ("model.safetensors", ["model.safetensors.index.json"], True),  # transformers reads it first
        ("pytorch_model.bin", ["model.safetensors.index.json"], True),
        ("model.safetensors", ["adapter_config.json", "adapter_model.safetensors"], True),  # Trainer reads it first
        ("pytorch_model.bin", ["model.safetensors"], False),
        ("model.safetensors", ["latest"], False),  # made of DeepSpeed's states
        ("adapter_config.json", ["model.safetensors"], True),
        ("adapter_model.bin", ["adapter_config.json"], True),
        ("adapter_model.bin", ["model.safetensors"], False),
    ],
)
def test_unlisted_weights_that_a_loader_prefers(name: str, listed: list[str], is_loaded: bool) -> None:
    assert is_loaded_unlisted(name, listed) == is_loaded


def test_the_hubs_cache_links_to_its_own_contents_only(checkpoint: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--someone--run"
    snapshot = repository / "snapshots" / "0123" / "last-checkpoint"
    for path in [path for path in checkpoint.rglob("*") if path.is_file()]:
        there = snapshot / path.relative_to(checkpoint)
        (repository / "blobs").mkdir(parents=True, exist_ok=True)
        there.parent.mkdir(parents=True, exist_ok=True)
        blob = repository / "blobs" / _sha256(path.read_bytes())
        shutil.copy(path, blob)
        there.symlink_to(os.path.relpath(blob, there.parent))
    assert check_complete(snapshot) == snapshot
    elsewhere = tmp_path / "blobs" / "secret"
    elsewhere.parent.mkdir()
    elsewhere.write_text("secret")
    (snapshot / "chat_template.jinja").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=r"chat_template.jinja is a link"):
        check_complete(snapshot)


# --------------------------------------------------------------------------------------------------- markers and records

MARKERS: dict[str, Any] = {
    "deep": DEEP,
    "deep in a file": '{"files": {"optimizer.pt": ' + DEEP,
    "a number of many digits": '{"files": {"optimizer.pt": ' + "9" * 5000 + "}}",
    "null": {"files": {"optimizer.pt": None}},
    "a text": {"files": {"optimizer.pt": "e3b0c442"}},
    "a list": {"files": {"optimizer.pt": [1]}},
    "files are a text": {"files": "optimizer.pt"},
    "a long name": {"files": {"x" * 5000: {"size": 1}}},
    "a name with a zero": {"files": {"optimizer.pt\0": {"size": 1}}},
    "half a character": {"files": {"\ud800": {"size": 1}}},
    "leads out": {"files": {"../../../../../../proc/kcore": {"size": 1}}},
    "absolute": {"files": {"/dev/zero": {"size": 1}}},
    "a folder": {"files": {"rollout": {"size": 1}}},
    "sizes of another kind": {"files": {"optimizer.pt": {"size": [[]], "sha256": {"a": "b"}}}},
    "colours": {"files": {"\x1b[31moptimizer.pt": {"size": 1}}},
}
RECORDS: dict[str, Any] = {
    "deep": DEEP,
    "deep in a field": '{"lora": {}, "global_step": 4, "algorithm": ' + DEEP,
    "no step": {"lora": {}, "algorithm": "Multi-turn GRPO"},
    "a step in words": {"lora": {}, "global_step": "4"},
    "a step that is true": {"lora": {}, "global_step": True},
    "a step without end": '{"lora": {}, "global_step": 1e400}',
    "lora is a text": {"lora": "r", "global_step": 4},
    "options are a list": {"lora": {}, "global_step": 4, "options": [1]},
    "base model is a text": {"lora": {}, "global_step": 4, "base_model": "org/base"},
    "algorithm is null": {"lora": {}, "global_step": 4, "algorithm": None},
    "a long algorithm": {"lora": {}, "global_step": 4, "algorithm": "x" * 20_000},
    "parent is a text": {"lora": {}, "global_step": 4, "parent": "org/model"},
    "a run elsewhere": {"lora": {}, "global_step": 4, "run_id": "../../elsewhere"},
    "not UTF-8": b'{"lora": "\xff"}',
}
STATE = {"epoch": 0.5, "global_step": 4}
PLACE = {"generation": 2, "position": 0, "geometry": {"processes": 1}}
LANDMARK = {"prompt_ids": [1], "answer_ids": [2]}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    # file, change, the place that the error names
    *((RECORD, {"options": {name: value}}, f"options.{name}") for name, value in (
        ("max_turns", "many"), ("max_turns", -1), ("max_turns", True), ("num_iterations", None), ("temperature", "1"),
        ("stop_strings", "stop"), ("chat_template_kwargs", []), ("environment_limits", []), ("system_prompt", 7),
    )),
    (RECORD, {"options": {"stop_strings": [1]}}, r"options.stop_strings\[0\]"),
    (RECORD, {"options": {"environment_limits": {"a": {"max_turns": "many"}}}}, "options.environment_limits.a.max_turns"),
    (RECORD, {"global_step": -4}, "global_step"),
    (RECORD, {"global_step": 2**63}, "global_step"),
    (RECORD, {"environment_arguments": ["level"]}, "environment_arguments"),
    (RECORD, {"versions": {"trl": [1]}}, "versions.trl"),
    *(("trainer_state.json", {name: value}, place) for name, value, place in (
        ("epoch", "0.5", "epoch"), ("epoch", -1.0, "epoch"), ("epoch", float("nan"), "epoch"), ("epoch", 1e30, "epoch"),
        ("global_step", None, "global_step"), ("max_steps", "4", "max_steps"), ("save_steps", [], "save_steps"),
        ("best_metric", "high", "best_metric"), ("best_model_checkpoint", 4, "best_model_checkpoint"),
        ("log_history", {}, "log_history"), ("log_history", [{"step": "<img src=x>"}], r"log_history\[0\].step"),
        ("log_history", [{}], r"log_history\[0\]"), ("stateful_callbacks", [1], "stateful_callbacks"),
        ("stateful_callbacks", {"a": {"args": {}}}, "stateful_callbacks.a"),
        ("stateful_callbacks", {"a": [{"args": 1, "attributes": {}}]}, r"stateful_callbacks.a\[0\].args"),
        ("callbacks", [1], "it"),
    )),
    *((POSITION, {name: value}, place) for name, value, place in (
        ("generation", -1, "generation"), ("position", "0", "position"), ("geometry", {}, "geometry"),
        ("geometry", {"processes": "1"}, "geometry.processes"), ("skipped_steps", {"x": 1}, "skipped_steps"),
        ("skipped_steps", {"skipped": "1"}, "skipped_steps.skipped"), ("packing", {"checked": 1}, "packing.checked"),
        ("tasks", {"counts": {"a": 1}}, "tasks.counts.a"), ("tasks", {"discarded": []}, "tasks.discarded"),
        ("watch", {"diagnosis": 1}, "watch"), ("pass_tokens", 1.5, "pass_tokens"),
        ("watch", {"diagnosis": {"history": {"latest": {"reward": ["x"]}}}, "measurements": {"landmarks": [], "first": []}},
         r"watch.diagnosis.history.latest.reward\[0\]"),
        ("watch", {"diagnosis": {"history": {}}, "measurements": {"landmarks": [{**LANDMARK, "x": 1}], "first": []}},
         r"watch.measurements.landmarks\[0\]"),
    )),
]  # fmt: skip


def write(path: Path, content: Any) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(pytest.param(MARKER, content, id=f"marker: {kind}") for kind, content in MARKERS.items()),
        *(pytest.param(RECORD, content, id=f"record: {kind}") for kind, content in RECORDS.items()),
        *(pytest.param(name, DEEP, id=f"deep {name}") for name in ("trainer_state.json", POSITION)),
    ],
)
def test_a_hostile_file_is_passed_over_with_a_reason(checkpoint: Path, name: str, content: Any) -> None:
    """By True; by name it is an error of one type, short and printable."""
    older = Path(shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-2")))
    write(checkpoint / name, content)
    if name != MARKER:
        mark(checkpoint)
    with pytest.raises(CheckpointError) as refused:
        check_complete(checkpoint)
    text = str(refused.value).replace(str(checkpoint), "")
    assert len(text) < 500 and text.isprintable()
    assert newest_complete(checkpoint.parent) == (older, [str(refused.value)])


@pytest.mark.parametrize(("name", "changes", "place"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_type_is_named_with_its_place(checkpoint: Path, name: str, changes: dict[str, Any], place: str) -> None:
    """And passed over by True."""
    older = Path(shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-2")))
    good = {"trainer_state.json": STATE, POSITION: PLACE}.get(name) or json.loads((checkpoint / name).read_text())
    write(checkpoint / name, {**good, **changes})
    mark(checkpoint)
    with pytest.raises(CheckpointError, match=rf"{name}: {place} is .*, (expected|which)") as refused:
        check_complete(checkpoint)
    assert len(str(refused.value).replace(str(checkpoint), "")) < 500
    assert newest_complete(checkpoint.parent) == (older, [str(refused.value)])


def test_every_option_that_an_evaluation_takes_has_a_form() -> None:
    """A value that was withheld is of any form."""
    known = {one.name for kind in (EpisodeOptions, SamplingSettings) for one in fields(kind)}
    assert known | {"num_iterations"} == OPTIONS.of.keys()
    assert not list(misfits(dict.fromkeys(known, "<dict, withheld>"), OPTIONS))
    defaults = {**asdict(EpisodeOptions()), **asdict(SamplingSettings()), "num_iterations": 1, "stop_strings": ["x"]}
    assert not list(misfits(defaults, OPTIONS))


@pytest.mark.parametrize("name", ["checkpoint-007", "checkpoint-٩", "checkpoint-9x", "checkpoint--9"])
def test_a_folder_that_only_looks_like_a_step(checkpoint: Path, name: str) -> None:
    """Its step would be looked for in a folder of another name."""
    shutil.copytree(checkpoint, checkpoint.with_name(name))
    assert newest_complete(checkpoint.parent) == (checkpoint, [])


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_record_that_is_no_file_does_not_block(tmp_path: Path, kind: str) -> None:
    path = tmp_path / RECORD
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="it is no regular file"):
        read_json(path)


def test_an_unreadable_file_is_an_error_of_the_same_kind(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scandir(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        check_complete(checkpoint)


# -------------------------------------------------------------------------------------------------------- where it is from


def chain(length: int) -> dict[str, Any] | None:
    parent = None
    for _ in range(length):
        parent = {"source": "org/model", "parent": parent}
    return parent


PARENTS: dict[str, Any] = {
    "a text": "org/model",
    "a list": [],
    "no source": {"algorithm": "SFT"},
    "source is a number": {"source": 7},
    "source is null": {"source": None},
    "commit is a number": {"source": "a", "commit": 7},
    "algorithm is a list": {"source": "a", "algorithm": ["SFT"]},
    "environment is a table": {"source": "a", "environment": {"a": 1}},
    "its parent is a text": {"source": "a", "parent": "b"},
    "without end": chain(200),
    "a long source": {"source": "x" * 20_000},
}


@pytest.mark.parametrize("kind", PARENTS)
def test_a_history_of_another_form_is_refused_when_it_is_loaded(tmp_path: Path, kind: str) -> None:
    write_json(tmp_path / RECORD, {"algorithm": "SFT", "parent": PARENTS[kind]})
    with pytest.raises(CheckpointError, match=r"agile_trainers.json: parent.* expected"):
        parent_of(None, str(tmp_path))


def test_only_the_known_fields_of_a_history_are_passed_on(tmp_path: Path) -> None:
    stage = {
        "source": "org/model",
        "commit": "0123",
        "algorithm": "SFT",
        "global_step": 7,
        "token": "hf_x",
        "parent": None,
    }
    write_json(tmp_path / RECORD, {"algorithm": "DPO", "parent": {**stage, "parent": stage}, "secret": 1})
    known = {"source": "org/model", "commit": "0123", "algorithm": "SFT", "environment": None, "global_step": 7}
    parent = parent_of(None, str(tmp_path))
    assert parent is not None and parent["parent"] == {**known, "parent": {**known, "parent": None}}
    assert parent.keys() == {"source", "commit", "algorithm", "environment", "global_step", "parent"}
    assert read_record(tmp_path)["parent"] == parent["parent"]


MARKUP = [
    "<script>alert(1)</script>", "[free](https://evil.example)", "![x](https://evil.example/x.png)", "`<b>`", "a\n\n# Title",
    "a | b", "\\| <b>", "https://evil.example", "www.evil.example", "\x1b[31mred", "a\u202eb", "\ud800", "`" * 9, "x" * 999,
    "| --- |\n</details>", "<!-- ", "{{ evil }}",
]  # fmt: skip


@pytest.mark.parametrize("text", MARKUP)
def test_a_strangers_words_are_shown_as_code(text: str) -> None:
    """No cell of the history opens a tag, a link, a column, a line or another code span."""
    parent = {"source": text, "commit": text, "algorithm": text, "environment": text, "parent": None}
    record = {
        "algorithm": "Multi-turn GRPO", "environment": "agile:guess_number", "global_step": 7, "lora": {"r": 8},
        "base_model": {"name": text, "commit": text}, "versions": {}, "parent": parent,
    }  # fmt: skip
    card = model_card(
        name="m", model_id="m", record=record, log_history=[], options={}, tags=[], trainer="MultiTurnGRPOTrainer"
    )
    body = card.split("\n---\n", 1)[1]
    table = body.partition("## Stages")[2].partition("##")[0].strip().splitlines()
    assert len(table) == 6 and table[-1].count("|") == 4
    outside = "".join(part for row in table[2:] for part in row.split("`")[::2])
    assert not set(outside) & set("<>[]()!\\") and "evil" not in outside
    prose = "".join(body.partition("```python")[0].split("`")[::2]).replace(
        f"[{text}](https://huggingface.co/{text})", ""
    )
    assert "<" not in prose and "evil" not in prose, "a base is a link if its name is one of the Hub's"
    code = body.partition("```python\n")[2].partition("\n```\n")[0]
    compile(code, "card", "exec")
    assert code.count("\n") == 9 and all(len(cell) < 210 for row in table for cell in row.split("|"))


# ------------------------------------------------------------------------------------------------------------- adapters


class Named(torch.nn.Module):
    """As many modules, and as deep, as a small decoder."""

    def __init__(self) -> None:
        super().__init__()
        layers = []
        for _ in range(2):
            layer = torch.nn.Module()
            layer.self_attn = torch.nn.Module()
            layer.self_attn.q_proj = torch.nn.Linear(1, 1)
            layers.append(layer)
        self.layers = torch.nn.ModuleList(layers)


def config(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"target_modules": ["q_proj"], **changes})


FIELDS: dict[str, dict[str, Any]] = {
    "target_modules": {"target_modules": "ODD"},
    "exclude_modules": {"exclude_modules": "ODD"},
    "modules_to_save": {"modules_to_save": ["ODD"]},
    "layers_pattern": {"layers_pattern": ["ODD"], "layers_to_transform": [0]},
    "one layers_pattern": {"layers_pattern": "ODD", "layers_to_transform": [0]},
    "rank_pattern": {"rank_pattern": {"ODD": 4}},
    "alpha_pattern": {"alpha_pattern": {"ODD": 4}},
}
ODD = "(?:layers|self_attn|q_proj|[0-9]|[.])+"


def replaced(value: Any) -> Any:
    if isinstance(value, dict):
        return {replaced(key): entry for key, entry in value.items()}
    return [replaced(one) for one in value] if isinstance(value, list) else ODD if value == "ODD" else value


@pytest.mark.parametrize("field", FIELDS)
def test_every_expression_that_peft_matches_is_tried(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form in which PEFT gives it to ``re``."""
    used = set()
    for method in ("match", "fullmatch"):
        original = getattr(re, method)

        def spy(pattern: Any, text: str, *rest: Any, original: Any = original, method: str = method) -> Any:
            used.add((method, pattern))
            return original(pattern, text, *rest)

        monkeypatch.setattr(re, method, spy)
    settings = config(**{name: replaced(value) for name, value in FIELDS[field].items()})
    with suppress(ValueError):  # nothing is left to adapt
        get_peft_model(Named(), settings)
    used = {one for one in used if isinstance(one[1], str) and ODD in one[1]}
    assert used and used == {(method, pattern) for _, method, pattern in expressions(settings)}


def test_an_expression_that_would_hang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "CPU_SECONDS", 1)
    with pytest.raises(ValueError, match=r"modules_to_save\) cannot be used: it takes more than 1 s"):
        check_patterns(config(modules_to_save=[r"(?:(?:.+)+)+!"]), Named(), Path("theirs"))


@pytest.mark.parametrize("pattern", ["(", "a{5}{5}{5", "(" * 10_000, "a" * 10 + "**", "(?P<a>x)(?P<a>y)"])
def test_an_expression_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="cannot be used: target_modules is no regular expression"):
        check_patterns(config(target_modules=pattern), Named(), Path("theirs"))


def test_honest_expressions_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in (
        {"target_modules": r"(?i).*self_attn\.(q|k|v|o)_proj"},
        {"target_modules": r"model\.layers\.(0|1[0-9])\..*_proj", "exclude_modules": r".*lm_head.*"},
        {"rank_pattern": {r"^model\.layers\.0\.": 4}, "alpha_pattern": {"q_proj|k_proj": 8}},
        {"modules_to_save": ["value_head"], "layers_pattern": "layers", "layers_to_transform": [0]},
    ):
        check_patterns(config(**changes), Named(), Path("ours"))
    monkeypatch.setattr("subprocess.run", None)  # names need no process
    for changes in (
        {},
        {"target_modules": "all-linear"},
        {"rank_pattern": {"model.layers.0.self_attn.q_proj": 4}, "modules_to_save": ["lm_head"]},
    ):
        check_patterns(config(**changes), Named(), Path("ours"))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    config(r=4, base_model_name_or_path="org/base").save_pretrained(str(folder))
    weights = {
        "base_model.model.q_proj.lora_A.weight": torch.zeros(4, 8),
        "base_model.model.q_proj.lora_B.weight": torch.zeros(8, 4),
    }
    save_file(weights, folder / "adapter_model.safetensors")
    assert find_adapters(str(folder)) is not None
    return folder


def change(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


CONFIGS: dict[str, dict[str, Any]] = {
    "a rank of many gigabytes": {"r": 10**9},
    "a rank of many gigabytes for one module": {"rank_pattern": {"q_proj": 10**9}},
    "a rank in words": {"r": "8"},
    "a rank below zero": {"r": -1},
    "a rank that is true": {"r": True},
    "no number": {"lora_alpha": float("nan")},
    "a dropout in words": {"lora_dropout": "0.1"},
    "targets are numbers": {"target_modules": [1, 2]},
    "targets are a table": {"target_modules": {"q_proj": 1}},
    "saved modules are one text": {"modules_to_save": "lm_head"},
    "tokens are one number": {"trainable_token_indices": 5},
    "tokens in words": {"trainable_token_indices": {"embed_tokens": ["5"]}},
    "pattern is a list": {"rank_pattern": ["q_proj"]},
    "pattern of texts": {"alpha_pattern": {"q_proj": "8"}},
    "base is a list": {"base_model_name_or_path": ["a", "b"]},
    "revision is a number": {"revision": 7},
    "unknown kind": {"peft_type": "EVIL"},
    "kind is a list": {"peft_type": []},
    "not a task": {"task_type": "EVIL"},
    "a module to import": {"megatron_config": {"a": 1}, "megatron_core": "megatron.core"},
    "layers without end": {"layer_replication": [[0, 2]] * 1000},
    "acts from a token on": {"alora_invocation_tokens": [3, 4]},
    "draws weights": {"monteclora_config": {"num_samples": 2}},
    "layers in words": {"layer_replication": "ab"},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_hostile_configuration_is_refused_when_it_is_read(adapter: Path, kind: str) -> None:
    change(adapter, **CONFIGS[kind])
    with pytest.raises(ValueError, match=r"adapter_config.json"):
        read_config(adapter)


def test_deep_and_other_json_in_a_configuration(adapter: Path) -> None:
    for text in (DEEP, "[]", "null", "\x00", '"' + "x" * 100):
        (adapter / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match="is not a PEFT configuration"):
            read_config(adapter)


def test_a_header_that_promises_more_than_the_file_has(adapter: Path) -> None:
    for size in (10**15, 2**63):
        header = json.dumps({"w": {"dtype": "F32", "shape": [size, 4], "data_offsets": [0, 16 * size]}}).encode()
        (adapter / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0" * 16)
        with pytest.raises(ValueError, match="is damaged or incomplete"):
            read_config(adapter)
    (adapter / "adapter_model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="is damaged or incomplete"):
        read_config(adapter)


LINKS: dict[str, Callable[[Path, Path], None]] = {
    "a secret as the chat template": lambda f, secret: (f / "chat_template.jinja").symlink_to(secret),
    "a secret as the tokenizer": lambda f, secret: (f / "tokenizer.json").symlink_to(secret),
    "a pipe as the tokenizer": lambda f, _: os.mkfifo(f / "tokenizer.json"),
    "a device as a vocabulary": lambda f, _: (f / "vocab.json").symlink_to("/dev/zero"),
    "another adapter as the reference": lambda f, secret: (f / "ref").symlink_to(secret.parent),
    "a link in the reference": lambda f, secret: (f / "ref").mkdir() or (f / "ref" / "x").symlink_to(secret),
}


@pytest.mark.parametrize("kind", LINKS)
def test_what_an_adapter_links_to_is_not_read(adapter: Path, tmp_path: Path, kind: str) -> None:
    """What is read is saved and pushed with the policy."""
    secret = tmp_path / "ssh" / "id_rsa"
    secret.parent.mkdir()
    secret.write_text("secret")
    LINKS[kind](adapter, secret)
    with pytest.raises(CheckpointError, match=r"is (a link|no regular file)"):
        find_adapters(str(adapter))


def test_links_to_other_folders_are_ones_own_business(adapter: Path, tmp_path: Path) -> None:
    (adapter / "newest").symlink_to(tmp_path)
    assert find_adapters(str(adapter)) is not None


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_vocabulary_is_not_read_from_elsewhere(adapter: Path, tmp_path: Path, name: str) -> None:
    """transformers reads it wherever it is, and every checkpoint then holds it."""
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    for value, wrong in (
        (str(secret), True),
        (str(adapter / "adapter_config.json"), False),
        ("/nowhere/vocab.txt", False),
        (None, False),
    ):
        write(adapter / name, {"vocab_file": value, "unk_token": str(secret)})
        if wrong:
            with pytest.raises(ValueError, match=r"'vocab_file' names the file .*secret.txt' outside of its folder"):
                find_adapters(str(adapter))
        else:
            check_model_folder(str(adapter))


# ------------------------------------------------------------------------------------------------------- chat templates

RANGE = "range(99999)"
TEMPLATES = {
    "nested loops": (f"{{% for a in {RANGE} %}}{{% for b in {RANGE} %}}{{% endfor %}}{{% endfor %}}", "more than 1 s"),
    "a power without end": ("{{ 9 ** (9 ** 9) }}", "more than 1 s"),
    "many gigabytes": ("{{ 'x' * 10 ** 10 }}", "MB of memory"),
    "many gigabytes by a format": ("{{ '%2000000000d' % 1 }}", "MB of memory"),
    "many gigabytes by a filter": ("{{ 'x' | center(10 ** 10) }}", "MB of memory"),
    "a text that doubles": (
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "MB of memory",
    ),
    "a long rendering": ("{{ 'x' * 10 ** 7 }}", "writes 10000000 characters"),
    "only after an answer": ("{% if messages|length > 10 %}{{ 'x' * 10 ** 10 }}{% endif %}", "MB of memory"),
    "only with tools": ("{% if tools %}{{ 'x' * 10 ** 10 }}{% endif %}", "MB of memory"),
    "in the words of transformers": (
        "{% generation %}{{ strftime_now('%Y') }}{{ raise_exception('x') if false }}{{ messages | tojson(indent=1) }}"
        "{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}{{ 'x' * 10 ** 10 }}", "MB of memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_that_would_hang_or_fill_the_memory_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template, why = TEMPLATES[kind]
    if "more than" in why:
        monkeypatch.setattr(untrusted, "CPU_SECONDS", 1)
    else:
        monkeypatch.setattr(untrusted, "BYTES", 1 << 28)
    with pytest.raises(ValueError, match=rf"chat template of theirs is not used.*{why}"):
        check_template(template, "theirs")


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/rag.jinja"]
)
def test_every_template_of_a_folder_is_tried(adapter: Path, name: str) -> None:
    """The error names its file."""
    template = "{{ 'x' * 10 ** 10 }}"
    (adapter / name).parent.mkdir(exist_ok=True)
    for content in (
        template,
        [{"name": "default", "template": "{{ messages }}"}, {"name": "rag", "template": template}],
    ):
        write(adapter / name, {"chat_template": content} if name.endswith("json") else template)
        with pytest.raises(ValueError, match=rf"chat template of {adapter / name} is not used"):
            find_adapters(str(adapter))


def test_every_template_of_a_repository_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, repository = "0123456789abcdef0123456789abcdef01234567", tmp_path / "hub" / "models--someone--model"
    folder = repository / "snapshots" / commit
    (folder / "additional_chat_templates").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for constants in ("huggingface_hub.constants", "transformers.utils.hub.constants"):
        monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "hub"))
    write(folder / "tokenizer_config.json", {})
    write(folder / "additional_chat_templates/rag.jinja", "{{ messages }}")
    check_model_folder("someone/model")
    check_model_folder("someone/else")
    write(folder / "additional_chat_templates/tools.jinja", "{{ 'x' * 10 ** 10 }}")
    with pytest.raises(ValueError, match=r"chat template of .*/tools.jinja is not used"):
        check_model_folder("someone/model")


def test_templates_are_tried_where_they_are_used_and_once(
    embedded_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer of the user's may be another person's. An error in a template is one of the conversation."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    ChatRenderer(tokenizer)
    with monkeypatch.context() as without:
        without.setattr("subprocess.run", None)
        ChatRenderer(tokenizer)
        ChatRenderer(
            tokenizer, chat_template=trl.chat_template_utils.qwen3_training_chat_template
        )  # one that TRL ships
    tokenizer.chat_template = "{{ 'x' * 10 ** 10 }}"
    with pytest.raises(ValueError, match=r"chat template of .* is not used"):
        ChatRenderer(tokenizer)
    for template in ("{{ 1 / 0 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ {}['a'].b.c }}", "{% if %}"):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match="rejects a conversation with the roles"):
            ChatRenderer(tokenizer)


def test_templates_are_tried_in_the_environment_of_transformers() -> None:
    """A name that is missing there would hide what a template does."""
    theirs = chat_template_utils._compile_jinja_template("").environment
    known = {*jinja2.Environment().globals, "raise_exception", "strftime_now"}
    assert known == theirs.globals.keys() and theirs.filters.keys() == jinja2.Environment().filters.keys()
    tags = {tag for extension in theirs.extensions.values() for tag in extension.tags}
    assert tags == {"generation", "break", "continue"}
    assert isinstance(theirs, jinja2.sandbox.ImmutableSandboxedEnvironment)


# ----------------------------------------------------------------------------------------------------------------- cards

ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
CARDS: dict[str, tuple[str, bool]] = {
    "aliases of aliases": (ALIASES, True),
    "deep": ("x: " + "[" * 1000, False),
    "no date": ("date: 2024-13-45", False),
    "many digits": ("x: " + "9" * 5000, False),
    "a value that holds itself": ("x: &x [*x]", True),
    "results are a number": ("model-index:\n- name: m\n  results: 5", False),
}
RESULT = EvalResult(
    task_type="t", dataset_type="e", dataset_name="e", metric_type="m", metric_name="n", metric_value=1.0
)


@pytest.mark.parametrize("kind", CARDS)
def test_a_hostile_card_gets_its_results_or_an_error(tmp_path: Path, kind: str) -> None:
    front, readable = CARDS[kind]
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\ntext\n")
    if readable:
        text = add_results(tmp_path, [RESULT]).read_text()
        data = yaml.safe_load(text.split("---")[1])
        assert len(text) < 20_000 and data.pop("model-index")
        # As text, since what aliases stand for is compared one by one otherwise.
        assert yaml.safe_dump(data) == yaml.safe_dump(yaml.safe_load(front))
    else:
        with pytest.raises(ValueError, match=r"metadata at the top of .*README.md cannot be read"):
            add_results(tmp_path, [RESULT])


def test_nothing_is_written_or_read_through_a_link(tmp_path: Path) -> None:
    other, folder = tmp_path / "other", tmp_path / "model"
    other.write_text("kept")
    folder.mkdir()
    for name in ("README.md.partial", "results.json.partial"):
        (folder / name).symlink_to(other)
    write_json(folder / "results.json", {})
    add_results(folder, [RESULT])
    for name in ("README.md", "learning_curve.png"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(other)
    with pytest.raises(ValueError, match=r"README.md is no regular file"):
        add_results(folder, [RESULT])
    write_card(folder, "card", b"picture")
    assert other.read_text() == "kept" and (folder / "README.md").read_text() == "card"


def test_names_of_a_log_are_shown_as_code(tmp_path: Path) -> None:
    names = "eval_<img src=x>_return", "eval_hard: level/2_return"
    entry = {"step": 1, "eval_return": 1.0, "eval_return_sem": 0.1, **{f"{one}_sem": 0.1 for one in names}}
    base = {"name": None, "commit": None}
    record = {"algorithm": "A", "environment": "e", "base_model": base, "lora": None, "parent": None, "global_step": 1}
    text = model_card(
        name="m", model_id="m", record={**record, "versions": {}}, log_history=[entry], options={}, tags=[], trainer="T"
    )
    assert "| return of `<img src=x>` | return of hard: level/2 |" in text
