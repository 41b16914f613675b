"""Folders of populations and chains that another person made, and signatures beside other files."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from agile_trainers.adapters.folders import RECORD, CheckpointError, form_of, read_form, write_json
from agile_trainers.checkpoints.integrity import KEY_FILE, MARKER, OPTION, check_complete, mark_complete
from agile_trainers.cli.chain import command
from agile_trainers.populations.lineage import HeldOut, Lineage
from agile_trainers.populations.members import Result
from agile_trainers.populations.population import _SETTINGS_FORM

EVENT: dict[str, Any] = {"round": 1, "member": 0, "event": "trained", "hyperparameters": {"learning_rate": 1e-3}}
EVENT |= {"changes": {"learning_rate": [1e-3, 2e-3]}, "fitness": 0.5}
LINEAGE: dict[str, Any] = {
    "settings": {"model": "m"},
    "events": [EVENT],
    "finished": False,
    "best": 0,
    "held_out": None,
}
LINEAGES: dict[str, tuple[dict[str, Any], str]] = {
    "settings are a list": ({"settings": []}, "settings"),
    "events are a table": ({"events": {"a": 1}}, "events"),
    "an event is a text": ({"events": ["born"]}, r"events\[0\]"),
    "a member elsewhere": ({"events": [{**EVENT, "member": "../../x"}]}, r"events\[0\].member"),
    "a member below zero": ({"events": [{**EVENT, "member": -1}]}, r"events\[0\].member"),
    "fitness in words": ({"events": [{**EVENT, "fitness": "high"}]}, r"events\[0\].fitness"),
    "an argument more": ({"events": [{**EVENT, "x": 1}]}, r"events\[0\]"),
    "changes are texts": ({"events": [{**EVENT, "changes": {"a": "ab"}}]}, r"events\[0\].changes.a"),
    "parent in words": ({"events": [{**EVENT, "parent": "0"}]}, r"events\[0\].parent"),
    "half an evaluation": ({"held_out": {"member": 1}}, "held_out"),
    "a field more": ({"x": 1}, "it"),
    "the best in words": ({"best": "0"}, "best"),
}


@pytest.mark.parametrize("kind", LINEAGES)
def test_a_lineage_of_another_form(tmp_path: Path, kind: str) -> None:
    changes, place = LINEAGES[kind]
    write_json(tmp_path / "lineage.json", LINEAGE)
    assert Lineage.read(tmp_path).winner is not None
    write_json(tmp_path / "lineage.json", {**LINEAGE, **changes})
    with pytest.raises(CheckpointError, match=rf"lineage.json: {place} is "):
        Lineage.read(tmp_path)


RESULT = asdict(Result(0, 1, 2, 3, [1.0, None], [0, 1], 0.5))
HELD = {"member": 0, "round": 1, "fitness": None, "standard_error": None, "episodes": 6, "failed_episodes": 6}
STAGE = {"id": "a", "parent": None, "made_of": {}, "finished": True}
FILES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (form_of(Result), RESULT, {"member": "../0"}),
    (form_of(Result), RESULT, {"values": ["1"]}),
    (form_of(Result), RESULT, {"steps": None}),
    (form_of(Result), RESULT, {"source": "x"}),
    (form_of(HeldOut), HELD, {"episodes": "6"}),
    (_SETTINGS_FORM, {"options": {}}, {"options": [1]}),
    (_SETTINGS_FORM, {"options": {}}, {"environment_arguments": "x"}),
    (command._STATE_FORM, STAGE, {"finished": "yes"}),
    (command._STATE_FORM, STAGE, {"made_of": []}),
    (command._STATE_FORM, STAGE, {"parent": {"id": "a"}}),
    (command._RESULT_FORM, {"of": {}, "metrics": {}}, {"metrics": 1.0}),
]


@pytest.mark.parametrize(("form", "good", "changes"), FILES)
def test_a_file_of_a_search_or_chain_of_another_form(
    tmp_path: Path, form: Any, good: dict[str, Any], changes: dict[str, Any]
) -> None:
    write_json(tmp_path / "file.json", good)
    assert read_form(tmp_path / "file.json", form) == good
    write_json(tmp_path / "file.json", {**good, **changes})
    with pytest.raises(CheckpointError, match=rf"file.json: ({next(iter(changes))}\S*|it) is "):
        read_form(tmp_path / "file.json", form)


@pytest.mark.parametrize("theft", ["marker", "marker and states", "states under another name", "one file of two"])
def test_a_signature_beside_other_files(tmp_path: Path, theft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this user signed in one folder proves nothing of another."""
    monkeypatch.delenv(OPTION, raising=False)
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))
    mine, theirs = tmp_path / "mine" / "checkpoint-4", tmp_path / "theirs" / "checkpoint-4"
    write_json(mine / RECORD, {"lora": {}, "global_step": 4})
    write_json(mine / "trainer_state.json", {"epoch": 0.5, "global_step": 4})
    (mine / "adapter_model.safetensors").write_bytes(b"")
    (mine / "latest").write_text("global_step4")
    for rank in (0, 1):
        state = mine / "global_step4" / f"mp_rank_0{rank}_model_states.pt"
        state.parent.mkdir(exist_ok=True)
        state.write_bytes(pickle.dumps({"rank": rank}))
    mark_complete(mine)
    assert check_complete(mine) == mine
    shutil.copytree(mine, theirs)
    states = [theirs / "global_step4" / f"mp_rank_0{rank}_model_states.pt" for rank in (0, 1)]
    marker = json.loads((theirs / MARKER).read_text())
    if theft == "marker":
        states[0].write_bytes(b"evil")
    elif theft == "states under another name":
        states[0].rename(theirs / "global_step4" / "other.pt")
        states[1].rename(states[0])
        (theirs / "global_step4" / "other.pt").rename(states[1])
    elif theft == "one file of two":
        states[1].unlink()
        del marker["files"]["global_step4/mp_rank_01_model_states.pt"]
        write_json(theirs / MARKER, marker)
    else:
        states[0].write_bytes(b"evil")
        with monkeypatch.context() as other:
            other.setenv(KEY_FILE, str(tmp_path / "their key"))
            mark_complete(theirs)
        forged = json.loads((theirs / MARKER).read_text())
        write_json(theirs / MARKER, {**forged, "signature": marker["signature"]})
    with pytest.raises(CheckpointError, match=r"is damaged|was not signed by"):
        check_complete(theirs)
