"""What a test process leaves out of each run because the process has done it before, or because nobody reads it."""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import memory, other
from accelerate.utils.imports import is_cuda_available
from torch import nn
from transformers import PretrainedConfig, StopStringCriteria

from agile_trainers.checkpoints import model_card
from agile_trainers.cli.check import tracing
from agile_trainers.cli.check.tracing import MemoryPlan, Step


def make_quick() -> None:
    """Take a tenth of its time from a run that is as small as those of the tests."""
    _draw_curves_once()
    _embed_stop_strings_once()
    _list_modules_without_recursion()
    _look_for_compiled_modules_once()
    _seed_without_stacks()
    _trace_equal_steps_once()
    if not is_cuda_available():
        torch.cuda.device_count = lambda: 0  # else its driver is looked for anew, for half a millisecond
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # no test turns the power off
    if not (is_cuda_available() or find_spec("vllm")):  # there, garbage may hold a GPU's memory, or an engine's
        _collect_garbage_before_each_tenth_run()
    # Each configuration that is read from a folder is written as JSON for a log of a level that is off.
    PretrainedConfig.__repr__ = object.__repr__  # type: ignore[method-assign]


def _draw_curves_once() -> None:
    """Draw one picture for curves that differ in numbers only: runs save hundreds, and each takes a tenth of a second."""
    draw, pictures = model_card.draw_curve, dict[Any, bytes]()

    def drawn(shown: Any) -> bytes:
        form = tuple((one.name, one.is_share, bool(one.evaluations), tuple(one.baselines)) for one in shown)
        return pictures[form] if form in pictures else pictures.setdefault(form, draw(shown))

    model_card.draw_curve = drawn


def _embed_stop_strings_once() -> None:
    """Sort the vocabulary, so that transformers' cache knows it again: fast tokenizers give it in any order."""
    embed: Any = StopStringCriteria.clean_and_embed_tokens_with_cache

    def embedded(self: Any, tokens: Any, ids: Any, tokenizer: Any) -> Any:
        return embed(self, *zip(*sorted(zip(tokens, ids))), tokenizer)

    StopStringCriteria.clean_and_embed_tokens_with_cache = embedded  # type: ignore[method-assign]


def _list_modules_without_recursion() -> None:
    """In the same order, for half of the time: each module is handed through a generator for each one around it else."""

    def named_modules(
        self: nn.Module, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo, left = set() if memo is None else memo, [(prefix, self)]
        while left:
            name, module = left.pop()
            if module in memo:
                continue
            if remove_duplicate:
                memo.add(module)
            yield name, module
            start = name and f"{name}."
            left += [(start + one, inner) for one, inner in reversed(module._modules.items()) if inner is not None]

    nn.Module.named_modules = named_modules  # type: ignore[method-assign]


def _look_for_compiled_modules_once() -> None:
    """Accelerate looks through all modules whenever a model is unwrapped, several times in a step."""
    look, found = other.has_compiled_regions, WeakKeyDictionary[nn.Module, bool]()

    def has(module: nn.Module) -> bool:
        return found[module] if module in found else found.setdefault(module, look(module))

    other.has_compiled_regions = has


def _seed_without_stacks() -> None:
    """Torch writes down the whole stack at each seed that a device without hardware is given, ten times in a trainer."""
    for device in (torch.cuda, torch.mtia, torch.xpu):
        device.traceback = SimpleNamespace(**{**vars(traceback), "format_stack": list})  # type: ignore[attr-defined]


def _trace_equal_steps_once() -> None:
    """Plan the memory of equal steps of a model once: a trace takes a quarter of a second, and a check makes several."""
    trace, steps = tracing.trace, dict[Any, Step]()

    def traced(config: PretrainedConfig, plan: MemoryPlan) -> Step:
        adapters = plan.peft_config and repr(sorted(plan.peft_config.to_dict().items(), key=str))
        numbers = plan.rows, plan.tokens, plan.computes, plan.autocast, plan.dropout, plan.trust_remote_code
        key = config.to_json_string(), adapters, numbers
        if key not in steps:
            steps[key] = trace(config, plan)
        return deepcopy(steps[key])

    tracing.trace = traced  # before it is imported by name


def _collect_garbage_before_each_tenth_run() -> None:
    """Accelerate looks through all objects before each training, for a tenth of the time of a step."""
    clear, runs = memory.clear_device_cache, itertools.count(1)

    def cleared(garbage_collection: bool = False) -> None:
        clear(garbage_collection and next(runs) % 10 == 0)

    memory.clear_device_cache = cleared


@contextmanager
def bf16_products() -> Iterator[None]:
    """Multiply matrices of bf16 in fp32 and round the result, as processors with instructions for bf16 do.

    PyTorch's own loops take twenty times as long on others. All other types lose ten microseconds a product in the block.
    """
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        yield
        return
    library = torch.library.Library("aten", "IMPL")

    def multiply(name: str) -> None:
        into = getattr(torch.ops.aten, name).out

        def product(*given: Any, **factors: Any) -> torch.Tensor:
            rounded = given[-1].dtype == torch.bfloat16
            wide = [one.float() for one in given] if rounded else given
            result = into(*wide, **factors, out=wide[-1].new_empty(0))
            return result.bfloat16() if rounded else result

        library.impl(name, product, "CPU")

    try:
        for name in ("mm", "addmm", "bmm"):
            multiply(name)
        yield
    finally:
        library._destroy()
