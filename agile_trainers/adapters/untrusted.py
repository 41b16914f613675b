"""Tries what a stranger wrote into a saved folder in a process with limits: regular expressions and chat templates.

A template is a program. The sandbox of Jinja keeps it from files and from Python's own objects, and limits a ``range`` to
100,000 numbers, but neither nested loops nor ``'x' * 10**10``. PEFT matches ``target_modules``, ``exclude_modules`` and the
like against the name of every module. Python's ``re`` tries the ways to match one after another: with an expression such as
``(.+)+!`` in another person's ``adapter_config.json``, their number doubles with each character of a name."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import torch
from peft import LoraConfig
from torch import nn
from transformers.utils.hub import cached_file, list_repo_templates

from agile_trainers.adapters.folders import CheckpointError, check_index, read_json

CPU_SECONDS, BYTES, _SECONDS = 10, 1 << 30, 300
"""Limits of the process: processor time, memory (on Linux), and time in all on a machine that does other things."""
_BEGIN = """
import json, resource, sys
given = json.load(sys.stdin)
sys.path += given["path"]
resource.setrlimit(resource.RLIMIT_CPU, (given["seconds"], given["seconds"]))
if sys.platform == "linux":
    resource.setrlimit(resource.RLIMIT_AS, (given["bytes"], given["bytes"]))
"""


def why_it_fails(program: str, path: list[str] | None = None, **given: Any) -> str | None:
    """Run a program that tries something.

    Args:
        program: Python code. It finds ``json``, ``sys`` and the dictionary ``given``, and ends with ``sys.exit("reason")``
            if what it tried is wrong.
        path: Folders of packages that it imports. It finds the standard library only, which starts in 20 ms.
        given: JSON values.

    Returns:
        None if the program came to its end; else the reason, printable and short.
    """
    content = json.dumps({**given, "path": path or [], "seconds": CPU_SECONDS, "bytes": BYTES})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _BEGIN + program],
            input=content, capture_output=True, text=True, timeout=_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it takes more than {CPU_SECONDS} s"
    if done.returncode == 0:
        return None
    said = done.stderr.strip() if done.returncode > 0 else ""
    return ascii(said[:300])[1:-1] if said else f"it takes more than {CPU_SECONDS} s"


FILE, MORE = "chat_template.jinja", "additional_chat_templates/*.jinja"
"""Files that hold a template, besides ``tokenizer_config.json``."""
_LONGEST = 1_000_000
"""Characters of the rendering of a short conversation, beyond which a template is none. Long ones write 30,000."""
_RENDER = """
from datetime import datetime
import jinja2, jinja2.ext, jinja2.sandbox

class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller):
        return caller()

def stop(message):
    raise jinja2.TemplateError(message)

def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

# As transformers makes it.
environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
)
environment.filters["tojson"] = tojson
environment.globals.update(raise_exception=stop, strftime_now=lambda form: datetime.now().strftime(form))
for conversation in given["conversations"]:
    try:
        text = environment.from_string(given["template"]).render(**conversation)
    except MemoryError:
        sys.exit("it takes more than %d MB of memory" % (given["bytes"] >> 20))
    except Exception:
        continue  # an error costs nothing, and comes again where the template is used
    if len(text) > given["longest"]:
        sys.exit("it writes %d characters around a short conversation" % len(text))
"""


def check_template(template: str, where: str) -> None:
    """Reject a chat template that takes too long, too much memory, or writes too much, on short conversations.

    A template that does so in other conversations passes. Each template is tried once in a process.

    Args:
        template: The template.
        where: Its file, or the name of its tokenizer, for the error.

    Raises:
        ValueError: If 10 seconds of processor time or a gigabyte do not suffice.
    """
    if why := _why_not(template):
        raise ValueError(
            f"The chat template of {where} is not used: rendering a short conversation fails, since {why}. Replace the "
            "template, or remove it."
        )


def check_templates(settings: Path, files: Iterable[Path]) -> None:
    """Reject a tokenizer with a chat template that :func:`check_template` rejects.

    Args:
        settings: Its ``tokenizer_config.json``, which may hold one template or several with names.
        files: Files that hold one template each.

    Raises:
        ValueError: If there is such a template, or a file cannot be read.
    """
    value = read_json(settings).get("chat_template") if settings.is_file() else None
    several = value if isinstance(value, list) else [value]
    for text in (one.get("template") if isinstance(one, dict) else one for one in several):
        if isinstance(text, str):
            check_template(text, str(settings))
    for path in files:
        if path.is_file():
            check_template(path.read_text(encoding="utf-8", errors="replace"), str(path))


@lru_cache(maxsize=256)
def _why_not(template: str) -> str | None:
    path = [str(Path(package.__file__).parent.parent) for package in (jinja2, markupsafe) if package.__file__]
    return why_it_fails(_RENDER, path, template=template, conversations=list(_conversations()), longest=_LONGEST)


def _conversations() -> Iterator[dict[str, Any]]:
    """Yield arguments of a rendering: conversations that grow, with and without tools, thinking and parts."""
    system, user = ({"role": role, "content": "Hello"} for role in ("system", "user"))
    thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "Hm")
    answer = {"role": "assistant", "content": "Hi", **thought}
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    called = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "look", "content": "It"},
    ]
    tokens = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")}
    for messages, tools in (
        ([user], None),
        ([system, user], None),
        ([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], None),
        ([user, answer], None),
        ([user, answer] * 8 + [user], None),
        ([system, user, *called, answer, user], [{"type": "function", "function": function}]),
    ):
        yield {
            "messages": messages, "tools": tools, "documents": None, "add_generation_prompt": messages[-1] == user, **tokens
        }  # fmt: skip


# ------------------------------------------------------------------------------------------------- regular expressions


_NAME = re.compile(r"[\w.\-]*")
"""Names, which match in linear time whatever they are put into."""
_MATCH = """
import re
for name, method, pattern in given["patterns"]:
    try:
        match = getattr(re.compile(pattern), method)
        for module in given["modules"]:
            match(module)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        sys.exit(f"{name} is no regular expression: {error}")
"""


def check_patterns(config: LoraConfig, model: nn.Module, folder: Path) -> None:
    """Reject a saved adapter whose regular expressions are wrong, or too slow on a model.

    An adapter that names its modules in lists, or takes ``"all-linear"``, is accepted at once. Others start a process.

    Args:
        config: The adapter's configuration, as it was read.
        model: The model that it is to be put on.
        folder: The adapter's folder, for the error.

    Raises:
        ValueError: If an expression is not valid, or 10 seconds of processor time do not suffice.
    """
    patterns = list(expressions(config))
    if not patterns:
        return
    modules = [name for name, _ in model.named_modules()]
    if why := why_it_fails(_MATCH, patterns=patterns, modules=modules):
        names = ", ".join(dict.fromkeys(name for name, *_ in patterns))
        raise ValueError(
            f"{folder} is not loaded: the regular expressions in its adapter_config.json ({names}) cannot be used: {why}. "
            "Put the names of the modules there, as a list."
        )


def expressions(config: LoraConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the expressions that are more than names, as PEFT gives them to ``re``: field, method and expression."""
    tied = config.target_modules if config.ensure_weight_tying else None
    layers = _text(config.layers_pattern) or config.layers_pattern
    for name, values, method, form in (
        ("target_modules", _text(config.target_modules), "fullmatch", "{}"),
        ("exclude_modules", _text(config.exclude_modules), "fullmatch", "{}"),
        ("target_modules", tied, "match", r"(^|.*\.){}($|\..*)"),
        ("modules_to_save", config.modules_to_save, "match", r"(^|.*\.){}($|\..*)"),
        ("layers_pattern", layers, "match", r"(?:^|.*?\.){}\.(?P<idx>\d+)\."),
        ("rank_pattern", config.rank_pattern, "match", r"(.*\.)?({})$"),
        ("alpha_pattern", config.alpha_pattern, "match", r"(.*\.)?({})$"),
    ):
        for value in [values] if isinstance(values, str) else values or ():
            if not _NAME.fullmatch(value):
                yield name, method, form.replace("{}", value)


def _text(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else []


_SETTINGS, _LONGEST_PATH = ("tokenizer_config.json", "special_tokens_map.json"), 4000
"""Files of the tokenizer's settings, and characters of a text in them that may be a path."""
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Files that name those of the weights, besides one that ``config.json`` names."""
LOADERS = ("from_pretrained", "create_model_from_path")
"""Functions of transformers, PEFT and TRL that load models and tokenizers."""
_RESUMING = (
    "load_from_json",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
)
"""Functions of transformers that read a checkpoint."""
_OTHERS = (ImportError, MemoryError, torch.OutOfMemoryError)
"""Errors of the machine, not of the folder."""
_OF_A_FILE = (None, errno.EINVAL)
"""Numbers of errors that come from what a file holds, not from the machine; PyTorch's for one that ends early is EINVAL."""
_BUILDERS = ("/cpp_extension.py", "/op_builder/")
"""Parts of the paths of files that build PyTorch's and DeepSpeed's extensions, which fail for want of a compiler."""


def check_model_folder(model: str, revision: str | None = None) -> None:
    """Reject a model of which a file names another one elsewhere on this machine, or whose chat template cannot be rendered.

    transformers would read the other file. The content of a secret that ``tokenizer_config.json`` names would become the
    vocabulary, which is saved and pushed with the model. A template may run without end, or fill the memory.

    Args:
        model: Folder or Hub id.
        revision: Branch, tag or commit of a Hub repository.

    Raises:
        ValueError: If there is such a file or template, or the tokenizer's settings cannot be read.
    """
    folder, local = Path(model), Path(model).is_dir()

    def find(name: str) -> Path:
        return folder / name if local else Path(hub_file(model, name, revision) or "")

    for path in map(find, _SETTINGS):
        _check_settings(path, read_json(path) if path.is_file() else {})
    config = find("config.json")
    other = read_json(config).get("transformers_weights") if config.is_file() else None
    for name in (*_INDICES, *([other] if isinstance(other, str) else [])):
        if (path := find(name)).is_file():
            check_index(path)
    more = sorted(folder.glob(MORE)) if local else [find(name) for name in _more_templates(model, revision)]
    check_templates(find(_SETTINGS[0]), [find(FILE), *more])


def _more_templates(repository: str, revision: str | None) -> list[str]:
    """Return the further templates of a repository, of what is here already where there is no connection."""
    try:
        names = list_repo_templates(repository, local_files_only=False, revision=revision)
    except (OSError, ValueError):  # no such repository: loading it as a model raises the clearest error
        return []
    return [MORE.replace("*.jinja", f"{name.removesuffix('.jinja')}.jinja") for name in sorted(names)]


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Check the settings of a tokenizer."""
    longest = settings.get("model_max_length", 0)
    if not isinstance(longest, (int, float)):
        raise ValueError(
            f"{path} is damaged: model_max_length is {longest!a:.80}, expected a number. Restore the file."
        )
    for key, value in settings.items():
        if not isinstance(value, str) or key.endswith("_token") or len(value) > _LONGEST_PATH or "\0" in value:
            continue
        if os.path.isfile(value) and not Path(os.path.realpath(value)).is_relative_to(os.path.realpath(path.parent)):
            raise ValueError(
                f"{path} is not read: {key!a:.80} names the file {value!a:.200} outside of its folder. Put a copy of the "
                "file into the folder, or remove the setting."
            )


def hub_file(repository: str, name: str, revision: str | None) -> str | None:
    """Download a file; None if there is no such repository, file or connection."""
    try:
        return cached_file(
            repository,
            name,
            revision=revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:
        # Not a repository: loading it as a model raises the clearest error.
        return None


_NO_GPU = re.compile("CUDA|NVIDIA|XPU|HIP")
"""Words of PyTorch's errors where a device is asked for that is not there."""


@contextmanager
def naming_folder(
    source: str | None, within: Collection[str] = (), kind: type[ValueError] = ValueError
) -> Iterator[None]:
    """Raise one kind of error that names the folder where transformers, PEFT or safetensors fail on its files.

    Their loaders raise ``TypeError``, ``KeyError``, ``AttributeError`` and others on values of a wrong type, and tokenizers
    a ``BaseException``. Missing packages, missing memory, extensions that cannot be built and the Hub's own errors stay.

    Args:
        source: Folder or Hub id that the block loads. None: no error is changed.
        within: Names of functions. Only errors raised inside one of these are changed. Default: all.
        kind: Type of the error.

    Raises:
        ValueError: In place of such an error, with its type and text.
    """
    try:
        yield
    except BaseException as error:
        if source is None or isinstance(error, _OTHERS) or (isinstance(error, ValueError) and source in str(error)):
            raise
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # the exit of a user
            raise
        if isinstance(error, OSError) and not (error.errno in _OF_A_FILE and os.path.isdir(source)):
            raise
        passed = _passed(error)
        built = any(part in file for file in passed.values() for part in _BUILDERS)
        if built or (within and not passed.keys() & {*within}):
            raise
        reason = " ".join(str(error).split())
        if "vLLM config is not set" in reason:  # vLLM's own constructor, in a class of transformers
            raise kind(
                f"{source} cannot be loaded in this process any more: an evaluation with model_impl='transformers' has let "
                "vLLM change the classes of transformers. Load it in another process, or evaluate with model_impl='vllm'."
            ) from error
        if _NO_GPU.search(reason) and not torch.cuda.is_available():
            raise kind(
                f"{source} cannot be loaded to a GPU, since PyTorch finds none here: {reason[:200]} Leave device_map unset "
                "(the trainers place the model themselves), or install a PyTorch for this machine's GPU."
            ) from error
        raise kind(
            f"{source} cannot be loaded: {type(error).__name__}: {reason[:1000]}. A file of it is damaged, incomplete or of "
            "another version of its library; copy or download it again."
        ) from error


def reading_checkpoint(folder: str | None) -> AbstractContextManager[None]:
    """Raise a ``CheckpointError`` that names the folder where ``Trainer`` fails on its files."""
    return naming_folder(folder, within=_RESUMING, kind=CheckpointError)


def _passed(error: BaseException) -> dict[str, str]:
    """Return the names of the functions that an error went through, each with its file."""
    found, trace = dict[str, str](), error.__traceback__
    while trace is not None:
        found[trace.tb_frame.f_code.co_name] = trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
    return found
