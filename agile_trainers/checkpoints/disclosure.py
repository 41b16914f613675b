"""Decides what of a run may leave the machine: which files are pushed, which of their fields, and which values of settings.

Each is a list of what may leave: :func:`copy_public` copies these files, and what is not listed stays. Text is masked where
it looks like a secret: keys and tokens of known forms, private keys, and values named as a password. Any other value of an
environment's arguments and of the options is written as its type and an HMAC with a key that only this user can read, so
that a resumed run can tell whether it changed. What is written into a folder with a model, and what trackers get, is this
view.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from agile_trainers.adapters.folders import RECORD, WITHHELD, read_json, write_json
from agile_trainers.adapters.roles import CRITIC, REFERENCE
from agile_trainers.checkpoints.integrity import MARKER, POSITION, keyed_digest, mark_complete
from agile_trainers.envs.context import is_ready_history
from agile_trainers.envs.registry import describe_environment
from agile_trainers.imports import nearest
from agile_trainers.records.plain import replacing

logger = logging.get_logger(__name__)

CARD, CURVE = "README.md", "learning_curve.png"
MODEL_FILES = (
    "adapter_config.json", "adapter_model*.safetensors", "adapter_model.safetensors.index.json", "config.json",
    "generation_config.json", "model*.safetensors", "model.safetensors.index.json", RECORD,
)  # fmt: skip
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja", "processor_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
_VOCABULARY = ("vocab.*", "merges.txt", "*.model", "*.tiktoken")
"""Vocabularies of tokenizers that are not in ``tokenizer.json``."""
FURTHER_FILES = tuple(
    f"{name}/{file}" for name in (REFERENCE, CRITIC) for file in ("adapter_config.json", "*.safetensors")
)
"""Files of further adapters, in their subfolders."""
_FURTHER_CARDS = (f"{REFERENCE}/{CARD}", f"{CRITIC}/{CARD}")
STATE_FILES = (
    "trainer_state.json", "optimizer*", "optimizer*/*", "scheduler.pt", "scaler.pt", "rng_state*.pth",
    "pytorch_model_fsdp*/*", "latest", "global_step*/*", "zero_to_fp32.py", "rollout/position.json",
    f"{REFERENCE}/model.safetensors", *_FURTHER_CARDS, MARKER,
)  # fmt: skip
"""Further files of a checkpoint."""
STAGE = ".push-"
"""Prefix of the folders below ``output_dir`` that hold the files of an upload."""
PRIVATE = "private.json"
"""File in ``output_dir`` with the arguments of the run as they are. Only this user can read it, and it is never pushed."""

_OURS = ("agile_trainers", "trl", "transformers")
"""Packages whose options are known. A field that a user's own configuration adds may hold anything."""
_WORDS = frozenset((
    "advantage_baseline", "advantage_granularity", "demonstration_loss", "entropy_coef_schedule", "eval_strategy",
    "hub_strategy", "importance_sampling_level", "kl_placement", "logging_strategy", "loss_type", "lr_scheduler_type",
    "multi_objective_aggregation", "on_rewrite", "optim", "pad_to_multiple_of", "public_values", "report_to",
    "save_strategy", "scale_rewards", "sequence_packing", "skip_zero_advantage", "task_sampling",
    "teacher_gradient", "train_sampling_strategy", "turn_credit", "turn_ratio_pooling", "turn_value_position",
    "vllm_importance_sampling_mode", "vllm_mode", "vllm_model_impl",
))  # fmt: skip
"""Options whose text is one of a few words."""
_BY_NAME = ("environment_limits", "liger_kernel_config")
"""Options that are numbers by name."""
_WORD = re.compile(r"[A-Za-z0-9_.+-]{1,40}")
_TOKENIZER_FIELDS = frozenset((
    "tokenizer_class", "processor_class", "auto_map", "backend", "added_tokens_decoder", "additional_special_tokens",
    "extra_special_tokens", "model_specific_special_tokens", "chat_template", "padding_side", "truncation_side",
    "model_input_names", "split_special_tokens", "max_length", "stride", "truncation_strategy", "pad_token_type_id",
))  # fmt: skip
"""Fields of ``tokenizer_config.json`` that transformers defines, besides the arguments of the tokenizer's class."""


MASK = "***"
_SHORTEST_SECRET = 8
"""Characters of the shortest value that its name makes a secret: shorter ones are mostly numbers and words of games."""
_SHORT = 200
"""Characters of the longest text whose masked form is remembered."""
_NAMES_IN_FILES = (
    r"(?:api|access|private|account)[_\-]?key|secret|passw(?:or)?d|passphrase|pwd|auth|authorization|bearer|cookie"
    r"|credential"
)
"""Names of secrets where those that end in ``token`` are of special tokens: in templates and processors' files."""
_NAMES = rf"token|{_NAMES_IN_FILES}"
_TAG = re.compile(r"<.*>|\[.*\]|\|.*\|", re.DOTALL)
"""Texts in brackets or bars, as special tokens are."""
_NO_WORDS = r"(?!(?:[A-Z]?[a-z]{0,15}\d{0,3}[\-_.]){0,8}[A-Z]?[a-z]{0,15}\d{0,3}(?![\w\-+/=~]|\.[\w\-]))"
"""A look ahead that refuses words, as in the names of environments and models (``key-door-v2``)."""
_KEYS = {
    # Each is tried at every place of a text: none may read far ahead from many places, or long texts take hours.
    "hf_": r"\bhf_[A-Za-z0-9]{16,}",
    "sk-, pk- or rk-": rf"\b[srp]k[-_]{_NO_WORDS}[\w\-]{{16,}}",
    "GitHub": r"\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}",
    "GitLab": r"\bgl[a-z]{2,4}-[\w\-]{16,}",
    "Slack": r"\bxox[a-z]-[\w\-]{8,}|\bxapp-[\w\-]{8,}|(?<=hooks\.slack\.com/services/)[\w/]{8,}",
    "AWS": r"\bA(?:KI|SI|BI|CC)A[A-Z0-9]{12,}",
    "Google": r"\bAIza[\w\-]{20,}|\bya29\.[\w\-.]{16,}|\bGOCSPX-[\w\-]{16,}",
    "npm_": r"\bnpm_[A-Za-z0-9]{16,}",
    "pypi-": r"\bpypi-[\w\-]{16,}",
    "DigitalOcean": r"\bdo[opr]_v1_[a-f0-9]{16,}",
    "SendGrid": r"\bSG\.[\w\-]{8,}\.[\w\-]{8,}",
    "webhook": r"\bwhsec_[\w+/=]{16,}|(?<=/api/webhooks/)[\w/\-]{8,}",
    "Databricks": r"\bdapi[a-f0-9]{16,}",
    "a service's prefix": (
        r"\b(?:gsk|r8|shp[a-z]{2}|lin_api|secret|fig[dm]|ntn|sq0[a-z]{3}|nvapi|pcsk|tgp_v1|key)[-_]"
        rf"{_NO_WORDS}[\w\-]{{16,}}"
    ),
    "Twilio": r"\bSK[a-f0-9]{32}\b",
    "age": r"\bAGE-SECRET-KEY-1[A-Z0-9]{16,}",
    "Vault": r"\bhvs\.[\w\-]{16,}",
    "Telegram": r"\b\d{8,10}:[\w\-]{30,}",
    "JSON Web Token": r"(?<![\w\-])eyJ[\w\-]{6,}\.[\w\-]{6,}(?:\.[\w\-]*)?",
    "user part of an address": r"(?<=://)[^/@\s\"']+(?=@)",
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
}
"""Secrets that are known by themselves, wherever they stand: the name of each form, and its pattern without groups."""


def _values(names: str, tag: str, end: str = "") -> tuple[str, ...]:
    """Return patterns of secrets that are known by the word before them.

    Args:
        names: Names of secrets.
        tag: Quoted values that are none.
        end: Where a value ends, besides at spaces and quotes.
    """
    return (
        # Headers, parameters of an address, and values of at least eight characters as JSON, YAML and shells write them.
        rf"(?P<header>\b(?i:bearer|basic)\s+){_NO_WORDS}[\w+/=.~\-]{{12,}}",
        r"(?P<parameter>[?&;][\w\-]*(?i:key|token|secret|passw(?:or)?d|pwd|auth|sig|signature|credential)s?=)"
        rf"(?:{end}[^\s&\"'<>])+",
        r"(?P<name>(?i:" + names + r")s?\\?[\"']?\s{0,99}[:=]\s{0,99})"
        rf"(?:(?P<quote>\\?[\"'])(?!{tag})(?:{end}[^\s\"'\\]){{8,}}|"
        rf"(?=[^\s,;&]{{0,99}}\d)(?=[^\s,;&]{{0,99}}[A-Za-z])(?:{end}[^\s\"'\\,;&{{}}\[\]()<>]){{8,}})",
    )


_SECRET = re.compile("|".join((*_KEYS.values(), *_values(_NAMES, r"<\|"))), re.DOTALL)
_IN_FILES = re.compile(
    "|".join((
        *(f"({form})" for form in _KEYS.values()),
        *_values(_NAMES_IN_FILES, r"(?:<[^\"']{0,99}>|\[[^\"']{0,99}\]|\|[^\"']{0,99}\|)\\?[\"']", r"(?![#%\-]{0,2}\}|\{)"),
    )),
    re.DOTALL,
)  # fmt: skip
"""Secrets in templates and processors' files: their values end at braces, so that a template stays one."""
_AFTER_NAME = "a value after its name"
"""Form of the secrets that are known by a header, a parameter or a name, in warnings."""
_STRING = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_NAMED = re.compile(rf"(?![a-z]{{3,5}}_token$)[\w\-.]*(?:{_NAMES})s?", re.IGNORECASE)
"""Names of secrets; those of a tokenizer's special tokens (``eos_token``) are none."""


# ------------------------------------------------------------------------------------------------------------ secrets


def mask(text: str) -> tuple[str, int]:
    """Replace what looks like a secret in a text by ``***``. Names of values stay.

    Args:
        text: Any text, also JSON or an address.

    Returns:
        The text, and the number of secrets that were replaced.
    """
    # Episodes repeat short texts: a game's words, the names of `info`.
    return _mask_again(text) if len(text) <= _SHORT else _mask(text)


def _mask(text: str) -> tuple[str, int]:
    def replaced(found: re.Match[str]) -> str:
        return "".join(found[group] or "" for group in ("header", "parameter", "name", "quote")) + MASK

    return _SECRET.subn(replaced, text)


_mask_again = lru_cache(maxsize=4096)(_mask)


class Masker:
    """Copies values with what looks like a secret masked, and counts what it masked."""

    def __init__(self) -> None:
        self.count = 0
        """Secrets so far."""

    def __call__(self, value: Any, name: str = "") -> Any:
        """Copy a value with every text in it masked, also in dictionaries (their names too), lists and tuples.

        Args:
            value: Any value.
            name: Its name; a text without spaces under the name of a secret is masked whatever it looks like.
        """
        if isinstance(value, str):
            if _NAMED.fullmatch(name) and len(value) >= _SHORTEST_SECRET and not re.search(r"\s", value):
                self.count += 1
                return MASK
            text, count = mask(value)
            self.count += count
            return text
        if isinstance(value, dict):
            return {self(key): self(one, str(key)) for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self(one, name) for one in value)
        return value


def masked(value: Any) -> Any:
    """Copy a value with what looks like a secret masked, see :class:`Masker`."""
    return Masker()(value)


# ------------------------------------------------------------------------------------------------------------- values


def withheld(name: str, value: Any) -> str:
    """Return the type of a value and its keyed digest, in place of the value.

    Args:
        name: The value's name, which is part of the digest: equal values of two names have different ones.
        value: JSON-ready data.

    Returns:
        ``"<str, withheld: KEY-DIGEST>"``, with hexadecimal names of key and value; without them if no key can be stored.
    """
    digest = keyed_digest(json.dumps([name, value], sort_keys=True))
    return f"<{type(value).__name__}, withheld{'' if digest is None else ': ' + '-'.join(digest)}>"


def public_arguments(environment: Any, public: Collection[str] = ()) -> dict[str, Any]:
    """Describe an environment without the values of its arguments.

    Args:
        environment: As for :func:`~agile_trainers.envs.registry.describe_environment`.
        public: Names of arguments whose values may leave: ``"level"``, or ``"guess.level"`` of one of several environments.

    Returns:
        ``environment``, its id, and ``environment_arguments``, by name.
    """
    described = flat_environment(environment)
    shown = {
        masked(name): masked(value) if is_named(name, public) else withheld(name, value)
        for name, value in described["environment_arguments"].items()
    }
    return {"environment": masked(described["environment"]), "environment_arguments": shown}


def flat_environment(environment: Any) -> dict[str, Any]:
    """Describe an environment, with the arguments of several environments as ``"<environment>.<argument>"``."""
    described = describe_environment(environment)
    if isinstance(environment, Mapping):
        arguments = described["environment_arguments"].items()
        flat = {f"{name}.{argument}": value for name, own in arguments for argument, value in own.items()}
        described["environment_arguments"] = flat
    return described


def is_named(name: str, public: Collection[str]) -> bool:
    """Return whether a value, or the argument of one of several environments, is among the names that may leave."""
    return name in public or name.rpartition(".")[2] in public


def check_public(public: Collection[str], environment: Any, options: Collection[str]) -> None:
    """Check that ``public_values`` names arguments of the environment, or options.

    Raises:
        ValueError: For another name.
    """
    arguments = flat_environment(environment)["environment_arguments"]
    known = {*options, *arguments, *(name.rpartition(".")[2] for name in arguments)}
    if unknown := [name for name in public if name not in known]:
        near = nearest(unknown[0], known) or "."
        raise ValueError(
            f"public_values names {unknown[0]!r}, which is neither an argument that this run's environment is given nor an "
            f"option{near} Its arguments are {', '.join(sorted(arguments)) or 'none'}."
        )


def public_options(
    options: Mapping[str, Any], config: type | None = None, public: Collection[str] = ()
) -> dict[str, Any]:
    """Replace the values of options that may not leave the machine.

    Numbers and truth values of options that TRL, transformers or this library define may leave, and texts that are one of a
    few words. Texts, lists and dictionaries may not, unless they are named.

    Args:
        options: Values by name.
        config: The configuration's class. Default: all options are known.
        public: Names of further options whose values may leave.
    """
    known = options.keys() if config is None else _known_options(config)
    return {
        name: masked(value)
        if name in public or is_withheld(value) or (name in known and _may_leave(name, value))
        else withheld(name, value)
        for name, value in ((name, _plain(value)) for name, value in options.items())
    }


def _known_options(config: type) -> set[str]:
    return {
        name for one in config.__mro__ if one.__module__.partition(".")[0] in _OURS
        for name in getattr(one, "__annotations__", {})
    }  # fmt: skip


def _may_leave(name: str, value: Any) -> bool:
    if value is None or isinstance(value, (bool, int, float)) or value in ([], {}, ""):
        return True
    if name == "history":
        return is_ready_history(value)
    if isinstance(value, list):
        return all(_may_leave(name, one) for one in value)
    if isinstance(value, dict):
        return name in _BY_NAME
    return name in _WORDS and isinstance(value, str) and _WORD.fullmatch(value) is not None


def _plain(value: Any) -> Any:
    """Convert to JSON values."""
    if value is None or type(value) in (bool, int, float, str):  # most options, at each save
        return value
    return json.loads(json.dumps(value, default=lambda it: it.value if isinstance(it, Enum) else str(it)))


def withheld_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Withhold all values, numbers too; those that are None stay."""
    return {masked(name): None if value is None else withheld(name, _plain(value)) for name, value in values.items()}


def is_withheld(value: Any) -> bool:
    """Return whether a value is what :func:`withheld` returns."""
    return isinstance(value, str) and WITHHELD.fullmatch(value) is not None


def differences(
    then: Mapping[str, Any], now: Mapping[str, Any], shown: Mapping[str, Any]
) -> tuple[dict[str, str], list[str]]:
    """Compare recorded values with those of this run.

    Args:
        then: Recorded values, some of them withheld.
        now: Values of this run as they are.
        shown: Those of them that may be shown, the others withheld.

    Returns:
        The names of different values, each with ``"name: then -> now"``, or ``"name: another value"`` of a withheld one;
        and the names of those that cannot be compared, since their digests were made with a key that this user does not
        have.
    """
    changed, unknown = {}, []
    for name in sorted({*then, *now}):
        if name not in then or name not in now:
            changed[name] = f"{name}: only {'now' if name in now else 'then'}"
            continue
        found = WITHHELD.fullmatch(then[name]) if isinstance(then[name], str) else None
        own = withheld(name, now[name]) if found else ""
        if found and (own_key := WITHHELD.fullmatch(own)) and (found[2] is None or found[2] != own_key[2]):
            unknown.append(name)
        elif found and then[name] != own:
            changed[name] = f"{name}: another value"
        elif not found and then[name] != masked(now[name]):
            hidden = is_withheld(shown.get(name))
            changed[name] = f"{name}: another value" if hidden else f"{name}: {then[name]!r} -> {now[name]!r}"
    return changed, unknown


def warn_of_unknown(path: Path, names: Collection[str]) -> None:
    """Warn of recorded values that this user cannot compare, see :func:`differences`."""
    if names:
        logger.warning(
            "%s records these values by digests that another user or machine made, so it is not known whether they are the "
            "same here: %s.",
            path, ", ".join(names),
        )  # fmt: skip


def note_private(output_dir: Path, environment: Any, options: Mapping[str, Any]) -> None:
    """Write the arguments and options of a run as they are into ``private.json``, which only this user can read."""
    content = {**flat_environment(environment), "options": options}
    with (
        replacing(output_dir / PRIVATE) as partial,
        open(partial, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file,
    ):
        json.dump(content, file, indent=2)
        file.write("\n")


def with_private(options: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Put back the withheld values of a record that this user's own file beside it has.

    Args:
        options: Of a record, by name.
        folder: Folder of the record: an ``output_dir``, or a checkpoint or policy below one.

    Returns:
        The options whose values are known, and the names of the others.
    """
    found = {name: value for name, value in options.items() if not is_withheld(value)}
    for path in (folder / PRIVATE, folder.parent / PRIVATE):
        if path.is_file():
            own = read_json(path).get("options") or {}
            found |= {name: own[name] for name in options
                      if name in own and name not in found and withheld(name, own[name]) == options[name]}  # fmt: skip
    return found, [name for name in options if name not in found]


# -------------------------------------------------------------------------------------------------------------- files


def matching(folder: Path, patterns: Collection[str]) -> list[Path]:
    """Return the files of a folder that any of the patterns names, as sorted relative paths. Links are left out."""
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path.relative_to(folder) for path in found if path.is_file() and not path.is_symlink())


def check_special_tokens(tokenizer: Any) -> None:
    """Reject a tokenizer with a special token that seems to be a secret, as of ``from_pretrained(..., api_token="...")``.

    transformers adds the value of every argument that ends in ``_token`` to the vocabulary, which is saved and pushed.

    Args:
        tokenizer: The tokenizer or processor.

    Raises:
        ValueError: If a token by a name that transformers does not know is as long as a secret, and not in brackets as
            special tokens are. The error has its name alone.
    """
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    for name, value in getattr(inner, "special_tokens_map", {}).items():
        own = name not in PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES and isinstance(value, str)
        if own and len(value) >= _SHORTEST_SECRET and not _TAG.fullmatch(value):
            raise ValueError(
                f"processing_class has the special token {name!a:.80}, whose text is no tag such as '<{name[:40]}>'. "
                "transformers makes one of every argument of from_pretrained that ends in _token, and saves it with the "
                "vocabulary. Load the tokenizer without this argument; `token` is that of the Hub."
            )


def public_path(name: str) -> str:
    """Return the name of a model as it may leave the machine: of a folder its last part, since the others name a user."""
    return Path(name).name if name.startswith(("/", "~", ".")) or os.path.isdir(name) else name


def shorten_paths(folder: Path) -> bool:
    """Leave of each folder that the record of a copy names its last part; return whether the record changed.

    ``adapter_config.json`` stays: PEFT loads the base model by the path in it.

    Args:
        folder: Holds copies or hard links. A file that is rewritten is replaced, so that what it is linked to stays.
    """
    path = folder / RECORD
    content = read_json(path) if path.is_file() else {}
    places, stage = [(content.get("base_model") or {}, "name")], content.get("parent")
    while stage:
        places.append((stage, "source"))
        stage = stage.get("parent")
    changed = False
    for holder, key in places:
        name = holder.get(key)
        if isinstance(name, str) and public_path(name) != name:
            holder[key], changed = public_path(name), True
    if changed:
        write_json(path, content)
    return changed


def clean_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Remove entries of ``tokenizer_config.json`` that are no arguments of the tokenizer's class.

    transformers writes every keyword argument that a tokenizer was made with, whatever it is.

    Args:
        folder: Folder that the tokenizer was saved to.
        tokenizer: The tokenizer or processor.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    arguments = {
        name for one in type(inner).__mro__ if "__init__" in vars(one)
        for name, parameter in inspect.signature(vars(one)["__init__"]).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }  # fmt: skip
    known = {*arguments, *_TOKENIZER_FIELDS, *getattr(inner, "SPECIAL_TOKENS_ATTRIBUTES", ())}
    kept = {
        name: value for name, value in content.items()
        if name in known or name in inner.special_tokens_map or value is None or isinstance(value, (bool, int, float))
    }  # fmt: skip
    if kept != content:
        path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------- copies


def copy_public(files: Mapping[Path, Path], output_dir: Path) -> Path:
    """Copy the files of a push, with the fields that may leave and no others, into a folder below ``output_dir``.

    Args:
        files: Relative path of each file to the folder it lies in. Files of checkpoints no longer change and are
            hard-linked where the file system allows it; files of ``output_dir`` itself are copied.
        output_dir: Parent of the new folder.

    Returns:
        The folder, which the caller removes.

    Raises:
        OSError: If the disk is full, or a file cannot be read. Nothing is left behind then.
    """
    folder = Path(tempfile.mkdtemp(prefix=STAGE, dir=output_dir))
    try:
        for path, source in files.items():
            _put(path, source, folder, shutil.copy2 if source == output_dir else _link)
        disclose(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def copy_policy(source: Path, folder: Path) -> None:
    """Copy a policy with its tokenizer, card, critic and reference, and nothing else, to an empty or new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in matching(
        source, (*MODEL_FILES, *TOKENIZER_FILES, *_VOCABULARY, CARD, CURVE, *FURTHER_FILES, *_FURTHER_CARDS)
    ):
        _put(path, source, folder, shutil.copy2)


def _put(path: Path, source: Path, folder: Path, copy: Callable[[Path, Path], Any]) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    copy(source / path, folder / path)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # no links on this file system, or not between the two; a full disk shows when copying
        shutil.copy2(source, target)


def disclose(folder: Path) -> None:
    """Leave in the files of a copy what may leave the machine, and write a checkpoint's marker anew.

    What the run's diagnosis and its task sampling remember of episodes is left out.

    Args:
        folder: Holds copies or hard links. A file that is rewritten is replaced, so that what it is linked to stays.
    """
    changed = {folder / RECORD} if shorten_paths(folder) else set()
    for pattern, rewrite in _REWRITTEN.items():
        for path in map(folder.joinpath, matching(folder, [pattern])):
            rewrite(path)
            changed.add(path)
    if (folder / MARKER).is_file():
        listed = read_json(folder / MARKER)["files"]
        mark_complete(folder, {name: one for name, one in listed.items() if folder / name not in changed})


def numbers(content: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a dictionary that are numbers, truth values or None."""
    return {
        masked(name): value for name, value in content.items() if value is None or isinstance(value, (bool, int, float))
    }


def _rewrite_state(path: Path) -> None:
    content = read_json(path)
    history = [numbers(entry) for entry in content.get("log_history", [])]
    write_json(path, {**numbers(content), "log_history": history, "stateful_callbacks": {}})


def _is_expression(text: str, place: int) -> bool:
    """Return whether a place of a template is in code, and not in a string there."""
    start = max(0, place - 10_000)  # or a long text takes hours
    opened, closed = (max(text.rfind(one, start, place) for one in kind) for kind in (("{%", "{{"), ("%}", "}}", "{#")))
    return opened > closed and not re.search("[\"']", _STRING.sub("", text[opened:place]))


def _without_secrets(value: Any, forms: set[str], name: str = "") -> Any:
    """Copy JSON values or a template with the secrets in them masked, and add the names of their forms (:data:`_KEYS`)."""
    if isinstance(value, str):

        def replaced(found: re.Match[str]) -> str:
            if found.lastgroup is None:
                forms.add(list(_KEYS)[(found.lastindex or 1) - 1])
                return MASK
            if found.lastgroup == "name" and _is_expression(value, found.end("name")):  # no quote follows
                return found[0]
            forms.add(_AFTER_NAME)
            return "".join(found[group] or "" for group in ("header", "parameter", "name", "quote")) + MASK

        named = _NAMED.fullmatch(name) and not re.search("tokens?$", name, re.IGNORECASE)
        if named and len(value) >= _SHORTEST_SECRET and not re.search(r"\s", value) and not _TAG.fullmatch(value):
            forms.add(_AFTER_NAME)
            return MASK
        return _IN_FILES.sub(replaced, value)
    if isinstance(value, dict):
        return {_without_secrets(key, forms): _without_secrets(one, forms, key) for key, one in value.items()}
    return [_without_secrets(one, forms, name) for one in value] if isinstance(value, list) else value


def _mask_secrets(path: Path) -> None:
    """Mask secrets but no special tokens, since a model needs the file as it is."""
    forms: set[str] = set()
    if path.suffix == ".json":
        content = _without_secrets(read_json(path), forms)
    else:
        content = _without_secrets(path.read_bytes().decode("utf-8"), forms)  # line ends too
    if not forms:
        return
    if path.suffix == ".json":
        write_json(path, content)
    else:
        path.unlink()
        path.write_bytes(content.encode("utf-8"))
    logger.warning(
        "What looks like a secret is masked in the pushed copy of %s (form: %s). The pushed model may differ from yours; "
        "change the file if it is none.",
        path.name, ", ".join(sorted(forms)),
    )  # fmt: skip


_REWRITTEN: dict[str, Callable[[Path], None]] = {
    "**/*.jinja": _mask_secrets,
    "**/*processor_config.json": _mask_secrets,
    "trainer_state.json": _rewrite_state,
    POSITION: lambda path: write_json(path, {**read_json(path), "watch": {}, "tasks": {}}),
}
"""Files of which a part may leave. Weights, tokenizers, adapters' settings and tensors leave as they are."""
