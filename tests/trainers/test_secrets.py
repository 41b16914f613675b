"""What leaves the machine is a list: other values are written, pickled, printed and reported as type and keyed digest."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from games import Chatter, make_trainer
from transformers.trainer_utils import HubStrategy

from agile_trainers.adapters.folders import CheckpointError, read_json, write_json
from agile_trainers.checkpoints.disclosure import (
    Masker,
    check_special_tokens,
    clean_tokenizer,
    differences,
    disclose,
    mask,
    public_arguments,
    public_options,
    withheld,
)
from agile_trainers.checkpoints.hub import check_deepspeed
from agile_trainers.checkpoints.integrity import KEY_FILE, MARKER, mark_complete
from agile_trainers.checkpoints.model_card import hyperparameters, model_card
from agile_trainers.envs.registry import environment_factories, make_environment_factory
from agile_trainers.evaluation.policy import recorded_settings
from agile_trainers.populations.lineage import Lineage
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig

TOKEN = "hf_" + "secret" * 6
PLAIN = "plain-passphrase"


class Named(Chatter):
    """Takes any argument."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


def config(folder: Path, **options: Any) -> MultiTurnGRPOConfig:
    init = {"token": TOKEN, "dtype": "float32", "proxies": [{"https": f"http://me:{PLAIN}@host"}]}
    return MultiTurnGRPOConfig(
        output_dir=str(folder), hub_token=TOKEN, model_init_kwargs=init, bf16=False, use_cpu=True, system_prompt=PLAIN,
        chat_template_kwargs={"api_key": PLAIN, "eos_token": "<end>"}, run_name=PLAIN, **options,
    )  # fmt: skip


def test_copies_keep_values_and_what_leaves_has_none(tmp_path: Path) -> None:
    args = config(tmp_path)
    for copied in (copy.copy(args), copy.deepcopy(args), copy.deepcopy([args])[0], args.with_environment()):
        assert copied.hub_token == TOKEN and copied.model_init_kwargs["token"] == TOKEN
    assert copy.deepcopy(args).model_init_kwargs is not args.model_init_kwargs
    loaded = pickle.loads(pickle.dumps(args))
    assert loaded.hub_token is None and loaded.model_init_kwargs is None and loaded.system_prompt is None
    assert loaded.learning_rate == args.learning_rate and loaded.optim == args.optim
    assert loaded.withheld["system_prompt"] == withheld("system_prompt", PLAIN)
    written = [
        str(pickle.dumps(args)), json.dumps(args.to_dict(), default=str), str(args.to_sanitized_dict()),
        args.to_json_string(), str(args), repr(args), f"{args}", str(hyperparameters(args)),
    ]  # fmt: skip
    for text in written:
        assert TOKEN not in text and PLAIN not in text
    assert args.hub_token == TOKEN and args.model_init_kwargs["token"] == TOKEN, "the configuration itself is as it was"
    named = config(tmp_path, public_values=["system_prompt"])
    assert named.to_dict()["system_prompt"] == hyperparameters(named)["system_prompt"] == PLAIN
    assert pickle.loads(pickle.dumps(named)).system_prompt == PLAIN
    with pytest.raises(ValueError, match=r"^\w+='<\w+, withheld: .*Pass the value itself") as raised:
        type(args)(**args.to_dict())
    assert TOKEN not in str(raised.value) and PLAIN not in str(raised.value)


def test_every_configuration_prints_without_its_token(tmp_path: Path) -> None:
    printed = repr(MultiTurnPPOConfig(output_dir=str(tmp_path), hub_token=TOKEN, bf16=False, use_cpu=True))
    assert TOKEN not in printed and printed.startswith("MultiTurnPPOConfig(")


def test_which_options_leave(tmp_path: Path) -> None:
    """Numbers of known fields and words of known choices; no text, list or dictionary, and nothing of a user's field."""

    @dataclass
    class Own(MultiTurnGRPOConfig):
        pin: int = 1234

    options = {
        "learning_rate": 0.1, "bf16": False, "max_model_length": None, "loss_type": "dapo", "reward_weights": [1.0, 0.5],
        "environment_limits": {"guess": {"max_turns": 3}}, "stop_strings": ["secret"], "system_prompt": "secret",
        "chat_template_kwargs": {"thinking": False}, "optim": "not a word of it", "pin": 1234, "unknown": 5,
    }  # fmt: skip
    found = public_options(options, Own, public=["chat_template_kwargs"])
    hidden = {"stop_strings", "system_prompt", "optim", "pin", "unknown"}
    assert {name for name, value in found.items() if value != options[name]} == hidden
    assert all(re.fullmatch(r"<(str|int|list), withheld: \w{8}-\w{32}>", found[name]) for name in hidden)
    assert public_options(found, Own) == {
        **found,
        "chat_template_kwargs": withheld("chat_template_kwargs", {"thinking": False}),
    }


ARGUMENTS = {"level": "easy", "pwd": PLAIN, "pin": 1234, "keys": [PLAIN], "deep": {"a": {"b": PLAIN}}, "flag": True}


def test_arguments_leave_by_name_only() -> None:
    found = public_arguments(make_environment_factory(Named, **ARGUMENTS))["environment_arguments"]
    assert found.keys() == ARGUMENTS.keys()
    assert [value.split(",")[0] for value in found.values()] == ["<str", "<str", "<int", "<list", "<dict", "<bool"]
    assert PLAIN not in str(found) and "1234" not in re.sub(r"-\w{32}", "", str(found))
    several = environment_factories({"guess": Named, "sums": Named}, {"guess": ARGUMENTS, "sums": {"level": "hard"}})
    found = public_arguments(several, ["guess.level", "flag"])["environment_arguments"]
    assert (
        found["guess.level"] == "easy"
        and found["guess.flag"] is True
        and found["sums.level"].startswith("<str, withheld")
    )
    assert found["sums.level"] != withheld("guess.level", "hard"), "equal values of two names have different digests"


def test_an_address_is_an_argument() -> None:
    found = public_arguments("openenv:https://me:pass@host/run?api_key=abc")
    assert found["environment"] == "openenv" and found["environment_arguments"]["address"].startswith(
        "<str, withheld: "
    )
    assert "host" not in str(found)


def test_a_digest_needs_the_users_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same key gives the same digest; another user's says that it cannot be compared; without a key only the type."""
    first, second, nowhere = tmp_path / "a" / "key", tmp_path / "b" / "key", tmp_path / "file" / "key"
    now = {"level": "easy", "same": 1}
    monkeypatch.setenv(KEY_FILE, str(first))
    then = {name: withheld(name, value) for name, value in now.items()}
    assert stat.S_IMODE(first.stat().st_mode) == 0o600 and len(first.read_bytes()) == 32
    assert differences(then, now, then) == ({}, [])
    changed, unknown = differences(then, {**now, "level": PLAIN}, then)
    assert changed == {"level": "level: another value"} and unknown == []
    monkeypatch.setenv(KEY_FILE, str(second))
    assert differences(then, now, then) == ({}, ["level", "same"])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(KEY_FILE, str(nowhere))
    assert withheld("level", "easy") == "<str, withheld>"
    assert differences({"level": "<str, withheld>"}, {"level": 1}, {}) == ({}, ["level"])


def test_a_public_value_is_compared_by_value() -> None:
    assert differences({"level": "easy"}, {"level": "easy"}, {"level": withheld("level", "easy")}) == ({}, [])
    changed, _ = differences({"level": "easy"}, {"level": PLAIN}, {"level": withheld("level", PLAIN)})
    assert changed["level"] == "level: another value"
    changed, _ = differences({"level": "easy"}, {"level": "hard", "new": 1}, {"level": "hard", "new": 1})
    assert list(changed.values()) == ["level: 'easy' -> 'hard'", "new: only now"]


def test_a_name_that_is_no_argument_is_refused(embedded_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"public_values names 'levle'.*level"):
        make_trainer(
            embedded_model, tmp_path, environment=make_environment_factory(Named, level=1), public_values=["levle"]
        )


def test_errors_name_arguments_without_values() -> None:
    for environment in ("agile:guess_number", Chatter):
        with pytest.raises(ValueError, match="the arguments pwd") as raised:
            make_environment_factory(environment, pwd=PLAIN)
        assert PLAIN not in str(raised.value)
    with pytest.raises(ValueError) as raised:
        environment_factories({"one": Chatter}, {"one": PLAIN})
    assert PLAIN not in str(raised.value)


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_a_run_writes_and_what_a_resume_compares(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoint, record, model card, records and training_args.bin, byte by byte; `private.json` alone has the values."""

    def made(folder: Path, **arguments: Any) -> Any:
        return make_trainer(
            embedded_model, folder, environment=make_environment_factory(Named, **{**ARGUMENTS, **arguments}), max_steps=2,
            save_strategy="steps", save_steps=1, hub_token=TOKEN, chat_template_kwargs={"plan": PLAIN},
            public_values=["level"],
        )  # fmt: skip

    run = tmp_path / "run"
    trainer = made(run)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    files = files_of(run)
    assert {"training_args.bin", "README.md", "agile_trainers.json", "run.json"} <= {path.name for path in files}
    with_values = [
        path.name for path in files if PLAIN.encode() in path.read_bytes() or TOKEN.encode() in path.read_bytes()
    ]
    assert with_values == ["private.json"]
    trainer.save_model(str(tmp_path / "to publish"))
    assert not (tmp_path / "to publish" / "private.json").exists()
    private = run / "private.json"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert read_json(private)["environment_arguments"] == ARGUMENTS
    assert read_json(private)["options"]["chat_template_kwargs"] == {"plan": PLAIN}
    record = read_json(run / "agile_trainers.json")
    assert record["environment_arguments"]["level"] == "easy" and record["options"]["learning_rate"] == 0.1
    arguments = torch.load(run / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert arguments.hub_token is None and arguments.chat_template_kwargs is None and arguments.max_steps == 2

    assert recorded_settings(str(run / "checkpoint-1"))["chat_template_kwargs"] == {"plan": PLAIN}
    (tmp_path / "copied").mkdir()
    shutil.copy(run / "agile_trainers.json", tmp_path / "copied")
    assert "chat_template_kwargs" not in recorded_settings(str(tmp_path / "copied"))

    checkpoint = str(run / "checkpoint-1")
    with pytest.raises(CheckpointError, match=r"environment_arguments\.pwd: another value") as raised:
        made(run, pwd="another").train(resume_from_checkpoint=checkpoint)
    assert PLAIN not in str(raised.value) and "another run" in str(raised.value)
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "of another user"))
    said: list[str] = []
    monkeypatch.setattr(
        "agile_trainers.checkpoints.disclosure.logger.warning", lambda text, *rest: said.append(text % rest)
    )
    made(tmp_path / "elsewhere", pwd="another").train(resume_from_checkpoint=checkpoint)
    assert any("not known whether" in one and "pwd" in one and "chat_template_kwargs" in one for one in said), said


TEXTS = {
    "a word": None, "the secret is 7": None, "token: easy": None, "an email a@b.c": None, "max_new_tokens=16": None,
    "a task-1234-token_of_it": None, "password": None,
    f"with {TOKEN}.": "with ***.", "https://me:pass@host/a@b": "https://***@host/a@b",
    "https://host/?api_key=abc&page=1": "https://host/?api_key=***&page=1",
    "Authorization: Bearer abcdefgh1234": "Authorization: Bearer ***",
    '{"password": "hunter2hunter2", "n": 1}': '{"password": "***", "n": 1}', "pwd = hunter2hunter2": "pwd = ***",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY----- end": "*** end",
    "-----BEGIN PRIVATE KEY-----\\nMIIE": "***", "eyJhbGciOiJI.eyJzdWIiOiIx.c2ln": "***",
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_what_looks_like_a_secret_in_text(text: str) -> None:
    assert mask(text) == ((text, 0) if TEXTS[text] is None else (TEXTS[text], 1))


@pytest.mark.parametrize("text", ["_", "9f", "eyJ-", "token:"])
def test_a_long_text_is_masked_in_linear_time(text: str) -> None:
    """Quadratic patterns take hours for these, of which an environment may print any."""
    long = text * (50_000 // len(text))
    assert mask(f"{long} {TOKEN} {long}") == (f"{long} *** {long}", 1)


def test_what_the_diagnosis_remembers_of_episodes_does_not_leave(tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    position = tmp_path / "rollout" / "position.json"
    write_json(position, {"position": 1, "watch": {"said": TOKEN}, "tasks": {"row": TOKEN}})
    disclose(tmp_path)
    assert read_json(position) == {"position": 1, "watch": {}, "tasks": {}}


def test_special_tokens_of_templates_and_processors_are_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets are masked there, and told; an untouched file has the same bytes."""
    said: list[str] = []
    monkeypatch.setattr(
        "agile_trainers.checkpoints.disclosure.logger.warning", lambda text, *rest: said.append(text % rest)
    )
    template = (
        "{%- set bos_token = '<seed:bos>' -%}\r\n{% set auth = messages[0] %}{% set call_begin_token='<a:tool>' %}"
    )
    processor = {"image_break_token": "[IMG_BREAK]", "global_image_token": "<global-img>", "size": [{"height": 2}]}
    (tmp_path / "chat_template.jinja").write_bytes(template.encode())
    write_json(tmp_path / "processor_config.json", processor)
    disclose(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_bytes() == template.encode()
    assert read_json(tmp_path / "processor_config.json") == processor and not said
    (tmp_path / "chat_template.jinja").write_bytes(f"{template}{TOKEN}".encode())
    write_json(tmp_path / "processor_config.json", {**processor, "note": ["AKIAIOSFODNN7EXAMPLE"]})
    disclose(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_bytes() == f"{template}***".encode()
    assert read_json(tmp_path / "processor_config.json") == {**processor, "note": ["***"]}
    assert [re.findall(r"copy of (\S+) \(form: (.+?)\)", one) for one in said] == [
        [("chat_template.jinja", "hf_")], [("processor_config.json", "AWS")]
    ]  # fmt: skip
    write_json(
        tmp_path / "processor_config.json",
        {**processor, "api_keys": ["9f8e7d6c5b4a"], "image_end_token": "image_end1", "end": {"password": "<hunter22"}},
    )
    disclose(tmp_path)
    masked_now = {**processor, "api_keys": ["***"], "image_end_token": "image_end1", "end": {"password": "***"}}
    assert read_json(tmp_path / "processor_config.json") == masked_now
    assert "processor_config.json (form: a value after its name)" in said[-1]


IN_TEMPLATES = {
    "{# Authorization: Bearer Zx81kQpLm02ba7Tq99Xy #}": "{# Authorization: Bearer *** #}",
    "{# https://x.net/c?sv=1&sig=aB3dEf9Hj2Kl0Mn7Pq#}": "{# https://x.net/c?sv=1&sig=***#}",
    "{% set api_key = '9f8e7d6c5b4a' %}": "{% set api_key = '***' %}",
    "{% set d = {'password': \"hunter2hunter2\"} %}": "{% set d = {'password': \"***\"} %}",
    "{% set a = 1 %}AccountKey=abcdEFGH1234==; {{ a }}": "{% set a = 1 %}AccountKey=***; {{ a }}",
    "{% set a = 'AccountKey=abcdEFGH1234==' %}": "{% set a = 'AccountKey=***' %}",
    "{#password:hunter22aa#}": "{#password:***#}",
}
"""Secrets, masked so that a template stays one."""
NO_SECRETS = (
    "{% set auth = messages[0]['content'] %}", "{{ f('a', password=user2.password3) }}", "?api_key={{ key }}&sig={{sig}}",
    "{%- set bos_token = '[BOS_TOKEN]' %}", "{%- set think_token = 'think_start1' %}", "{% set secret = '[SECRET_A]' %}",
    "{{ tool_token='<tool_call>' }}", "{% set credential = '|credential|' %}", 'api_key: "{{messages[0]}}"',
)  # fmt: skip


@pytest.mark.parametrize("text", [*IN_TEMPLATES, *NO_SECRETS])
def test_secrets_of_templates_and_no_expressions(tmp_path: Path, text: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(text)
    disclose(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == IN_TEMPLATES.get(text, text)


def test_templates_of_others_stay(tmp_path: Path) -> None:
    """Those that are installed with the libraries."""
    found = [path for one in (transformers, trl) for path in Path(one.__file__).parent.rglob("*.jinja")]
    for number, path in enumerate(found):
        shutil.copy(path, tmp_path / f"{number}.jinja")
    disclose(tmp_path)
    assert found and all(
        (tmp_path / f"{number}.jinja").read_bytes() == path.read_bytes() for number, path in enumerate(found)
    )


def test_a_long_template_is_masked_in_linear_time(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{%" + "'a' auth=x1234567 " * 10_000)
    began = time.perf_counter()
    disclose(tmp_path)
    assert time.perf_counter() - began < 10


def test_masks_by_the_name_of_an_entry() -> None:
    masker = Masker()
    found = masker(
        {"cookies": ["abcdefgh"], "eos_token": "<|endoftext|>", "secret": "7", "note": "two words", TOKEN: 1}
    )
    assert found == {"cookies": ["***"], "eos_token": "<|endoftext|>", "secret": "7", "note": "two words", "***": 1}
    assert masker.count == 2


def test_a_tokenizers_own_arguments_leave_and_others_do_not(embedded_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model, licence=PLAIN, number=3)
    tokenizer.save_pretrained(tmp_path)
    before = read_json(tmp_path / "tokenizer_config.json")
    assert before["licence"] == PLAIN
    clean_tokenizer(tmp_path, tokenizer)
    assert read_json(tmp_path / "tokenizer_config.json") == {k: v for k, v in before.items() if k != "licence"}
    assert os.listdir(tmp_path)


def test_a_secret_that_became_a_special_token_is_refused(embedded_model: Path, tmp_path: Path) -> None:
    """transformers puts it into the vocabulary. Those of vision models are tags."""
    from transformers import AutoTokenizer

    secret = AutoTokenizer.from_pretrained(embedded_model, api_token=PLAIN)
    secret.save_pretrained(tmp_path)
    assert PLAIN in (tmp_path / "tokenizer.json").read_text()
    with pytest.raises(ValueError, match="has the special token 'api_token'") as refused:
        check_special_tokens(secret)
    assert PLAIN not in str(refused.value)
    for honest in (
        {},
        {"image_token": "<image>"},
        {"boi_token": "[begin image]"},
        {"mark_token": "|mark|"},
        {"x_token": "x"},
    ):
        check_special_tokens(AutoTokenizer.from_pretrained(embedded_model, **honest))


def test_a_users_name_in_a_path_is_not_pushed(tmp_path: Path) -> None:
    """Of a folder, its last part is; the original stays, also where the copy is a hard link."""
    name = {"base_model_name_or_path": "/home/alice/models/base", "peft_type": "LORA"}
    grandparent = {"source": "/home/alice/sft", "parent": {"source": "org/model", "parent": None}}
    parent = {"source": str(tmp_path), "parent": grandparent}
    record = {"base_model": {"name": "~alice/base"}, "parent": parent, "lora": {}, "global_step": 1}
    copy = tmp_path / "copy"
    for path, content in (
        ("agile_trainers.json", record),
        ("adapter_config.json", name),
        ("ref/adapter_config.json", name),
    ):
        write_json(tmp_path / "run" / path, content)
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(tmp_path / "run" / path, copy / path)
    mark_complete(tmp_path / "run")
    os.link(tmp_path / "run" / MARKER, copy / MARKER)
    disclose(copy)
    text = "".join(path.read_text() for path in copy.rglob("*.json") if path.name != "adapter_config.json")
    assert "alice" not in text and str(tmp_path) not in text
    pushed = read_json(copy / "agile_trainers.json")
    assert pushed["base_model"]["name"] == "base" and pushed["parent"]["source"] == tmp_path.name
    assert pushed["parent"]["parent"]["source"] == "sft"
    assert pushed["parent"]["parent"]["parent"]["source"] == "org/model", "of the Hub"
    assert read_json(copy / "ref" / "adapter_config.json") == name, "PEFT loads the base by it"
    assert read_json(tmp_path / "run" / "adapter_config.json") == name
    listed = read_json(copy / MARKER)["files"]
    assert all(listed[path]["size"] == (copy / path).stat().st_size for path in listed)
    stage = {**grandparent, **dict.fromkeys(("commit", "algorithm", "environment", "parent"))}
    named = {
        "algorithm": "A",
        "environment": "e",
        "versions": {},
        "base_model": {"name": "/home/alice/b", "commit": None},
    }
    card = model_card(
        name="m",
        model_id="m",
        log_history=[],
        options={},
        tags=[],
        trainer="T",
        record={**record, **named, "parent": stage},
    )
    assert "alice" not in card and "`sft`" in card
    lineage = Lineage({"model": "/home/alice/models/base"})
    assert lineage.public().settings == {"model": "base"} and lineage.settings["model"].startswith("/home")


def test_deepspeeds_settings_are_pushed_without_a_secret() -> None:
    """Its states hold them as they are. ``comet.api_key`` is a field of them."""
    secret = {"zero_optimization": {"stage": 1}, "comet": {"enabled": True, "api_key": PLAIN}}
    honest = {"zero_optimization": {"stage": 1}, "wandb": {"enabled": True, "project": "games"}, "train_batch_size": 8}
    for strategy in HubStrategy:
        check_deepspeed(honest, strategy)
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            with pytest.raises(ValueError, match="pushes DeepSpeed's states") as refused:
                check_deepspeed(secret, strategy)
            assert PLAIN not in str(refused.value)
        else:
            check_deepspeed(secret, strategy)


WORDS = (
    "key-door-environment-v0", "pk_battle_simulator_v2", "secret_number_guessing_game", "sk-guess-the-number-run7",
    "user/key-value-memory-agent", "secret-santa-game-environment", "basic understanding.", "Basic Instructions_for_you",
    "bearer certificates", "{%- set stop_token = '<|im_end|>' %}", 'namespace(token="<|observation|>")',
)  # fmt: skip
KEYS = (
    "sk-proj-abcdefgh12345678ABCD", "sk_live_abcdefghij0123456789", "secret_abcdefghijklmnopqrst",
    "key-0123456789abcdef0123456789abcdef", "token='hunter2hunter2'", "Bearer abcdefghijklmnopqrstuvwxyz",
    "Basic dXNlcjpwYXNz",
    "Bearer sl.u.AbC1dEf2GhI3jKl4", "Bearer dp.pt.aB3dE5gH7jK9mN1p", "Bearer v2.local.aB3dE5gH7jK9",
    "pk_test_words_and_then_aB3dE5gH7jK9mN1p",
)  # fmt: skip


@pytest.mark.parametrize("text", WORDS)
def test_names_of_words_are_no_keys(text: str) -> None:
    """Environments, models, templates and sentences whose beginning is that of a key."""
    assert mask(text) == (text, 0)


@pytest.mark.parametrize("text", KEYS)
def test_keys_beside_them_are(text: str) -> None:
    assert mask(text)[1] == 1
