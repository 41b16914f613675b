"""No token, key or password in what is written, pickled, printed or reported."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from games import make_trainer

from agile_trainers.checkpoints.model_card import hyperparameters
from agile_trainers.checkpoints.secrets import blanked
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig

TOKEN = "hf_" + "secret" * 6
PLAIN = "plain-passphrase"


def config(folder: Path, **options: Any) -> MultiTurnGRPOConfig:
    init = {"token": TOKEN, "dtype": "float32", "proxies": [{"https": f"http://me:{PLAIN}@host"}]}
    return MultiTurnGRPOConfig(
        output_dir=str(folder), hub_token=TOKEN, model_init_kwargs=init, bf16=False, use_cpu=True,
        chat_template_kwargs={"api_key": PLAIN, "eos_token": "<end>"}, **options,
    )  # fmt: skip


def test_copies_keep_tokens_and_what_is_written_has_none(tmp_path: Path) -> None:
    args = config(tmp_path)
    for copied in (copy.copy(args), copy.deepcopy(args), copy.deepcopy([args])[0], args.with_environment()):
        assert copied.hub_token == TOKEN and copied.model_init_kwargs["token"] == TOKEN
    assert copy.deepcopy(args).model_init_kwargs is not args.model_init_kwargs
    loaded = pickle.loads(pickle.dumps(args))
    assert loaded.hub_token is None and loaded.model_init_kwargs["token"] is None
    assert loaded.model_init_kwargs["dtype"] == "float32" and loaded.learning_rate == args.learning_rate
    written = [
        str(pickle.dumps(args)), json.dumps(args.to_dict(), default=str), str(args.to_sanitized_dict()),
        args.to_json_string(), str(args), repr(args), f"{args}", str(hyperparameters(args)),
    ]  # fmt: skip
    for text in written:
        assert TOKEN not in text and PLAIN not in text
    assert args.to_dict()["chat_template_kwargs"] == {"api_key": "***", "eos_token": "<end>"}
    assert args.hub_token == TOKEN and args.model_init_kwargs["token"] == TOKEN, "the configuration itself is as it was"


def test_every_configuration_prints_without_its_token(tmp_path: Path) -> None:
    printed = repr(MultiTurnPPOConfig(output_dir=str(tmp_path), hub_token=TOKEN, bf16=False, use_cpu=True))
    assert TOKEN not in printed and printed.startswith("MultiTurnPPOConfig(")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("token", "x", None), ("hub_token", "x", None), ("use_auth_token", "x", None), ("API_KEY", "x", None),
        ("x-api-key", "x", None), ("Authorization", "Bearer x", None), ("client_secret", "x", None),
        ("proxy_password", "x", None), ("max_new_tokens", 5, 5), ("token", True, True), ("token", None, None),
        ("eos_token", "</s>", "</s>"), ("learning_rate", 0.1, 0.1), ("tokenizer", "x", "x"),
        ("url", "https://me:pass@host/a@b", "https://***@host/a@b"), ("note", f"with {TOKEN}.", "with ***."),
        ("deep", [({"token": "x"},)], [({"token": None},)]), ("text", "an email a@b.c", "an email a@b.c"),
    ],
)  # fmt: skip
def test_what_counts_as_a_secret(name: str, value: Any, expected: Any) -> None:
    assert blanked(value, name, None) == expected


def test_what_a_run_writes_and_reports(embedded_model: Path, tmp_path: Path) -> None:
    """Checkpoint, record, model card and training_args.bin, byte by byte."""
    trainer = make_trainer(
        embedded_model, tmp_path / "run", max_steps=1, save_strategy="steps", save_steps=1, hub_token=TOKEN,
        chat_template_kwargs={"api_key": PLAIN},
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"training_args.bin", "README.md", "agile_trainers.json"} <= {path.name for path in files}
    for path in files:
        assert TOKEN.encode() not in path.read_bytes() and PLAIN.encode() not in path.read_bytes(), path
    arguments = torch.load(tmp_path / "run" / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert arguments.hub_token is None and arguments.max_steps == 1
