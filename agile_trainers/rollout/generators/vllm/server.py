"""A sampler on a vLLM server, through TRL's client. Every answer is a request of its own, so nothing waits for a batch."""

from __future__ import annotations

import math
import queue
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from transformers import PreTrainedTokenizerBase
from trl.generation.vllm_client import VLLMClient
from urllib3.util.retry import Retry

from agile_trainers.rollout.generators.base import FinishReason, GenerationOutput, GenerationRequest, SamplingSettings
from agile_trainers.rollout.generators.checks import check_request, check_room, check_token_ids
from agile_trainers.rollout.generators.transformers.decoding import stop_criteria
from agile_trainers.rollout.generators.vllm.engine import (
    check_logprobs,
    check_settings,
    sampling_fields,
    seed_of,
    write_adapter,
)

PATIENCE = 0.005
"""Seconds that a step waits for an answer; environments are looked at in between."""
ANSWER_SECONDS = 600.0
"""How long a request may take. TRL's client waits for ever."""
RETRIES = Retry(
    total=3, read=1, status_forcelist=[500, 502, 503], backoff_factor=0.5, allowed_methods=["POST", "GET"]
)  # fmt: skip
"""A server that is gone is noticed after three seconds; TRL's client goes on for a minute."""

MOST_STOP_STRINGS = 4
"""That a server takes with a request."""


class _PatientAdapter(HTTPAdapter):
    """Limits every request that names no limit itself to ``ANSWER_SECONDS``."""

    def send(self, request: PreparedRequest, **options: Any) -> Response:  # type: ignore[override]
        options["timeout"] = options.get("timeout") or ANSWER_SECONDS
        return super().send(request, **options)


class VllmServer:
    """A vLLM server, and the adapter that it serves. It gets token ids, never text.

    Args:
        url: As in ``http://host:port``.
        timeout: Seconds to wait for the server to be up.
        max_batch_size: Most requests under way at the same time; the others wait here.
        vocab_size: Of the model.
        folder: Adapters are written there for the server to read. Default: the system's folder for temporary files.

    Raises:
        requests.exceptions.ConnectionError: If the server is not up in time.
        RuntimeError: If it does not say how it was started, for want of ``VLLM_SERVER_DEV_MODE=1``.
    """

    def __init__(
        self, url: str, *, timeout: float, max_batch_size: int, vocab_size: int, folder: str | Path | None = None
    ) -> None:
        self.client = VLLMClient(base_url=url, connection_timeout=timeout)
        for prefix in ("http://", "https://"):
            self.client.session.mount(prefix, _PatientAdapter(max_retries=RETRIES, pool_maxsize=max_batch_size))
        self.url, self.max_batch_size, self.vocab_size = self.client.base_url, max_batch_size, vocab_size
        self.info: dict[str, Any] = self.client.get_server_info()
        """How the server was started, as vLLM's ``VllmConfig``."""
        self.max_model_length: int = self.info["model_config"]["max_model_len"]
        self.adapter: str | None = None
        """Name of the adapter that requests are for; None: of the base model."""
        self._folder = folder
        self._written: tempfile.TemporaryDirectory[str] | None = None

    def load_adapter(self, weights: Mapping[str, torch.Tensor], config: LoraConfig) -> int:
        """Serve this adapter from now on, in place of the last one.

        Its name is new to the server, so nothing that was cached under an earlier one is taken for its own.

        Args:
            weights: Under PEFT's names, as ``get_peft_model_state_dict`` gives them.
            config: Of the adapter.

        Returns:
            The bytes that were handed over.

        Raises:
            ValueError: If the server does not load it.
        """
        if self._written is None:
            if self._folder is not None:
                Path(self._folder).mkdir(parents=True, exist_ok=True)
            self._written = tempfile.TemporaryDirectory(prefix="vllm-policy-", dir=self._folder)
            Path(self._written.name).chmod(0o755)  # the server may run as another user
        name = f"policy-{uuid.uuid4().hex}"
        folder = Path(self._written.name).resolve() / name
        try:
            moved = write_adapter(folder, weights, config)
            for path in (folder, *folder.iterdir()):
                path.chmod(0o755 if path.is_dir() else 0o644)
            self._lora("load", {"lora_name": name, "lora_path": str(folder)})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if self.adapter is not None:
            self._lora("unload", {"lora_name": self.adapter})
            shutil.rmtree(folder.parent / self.adapter)
        self.adapter = name
        return moved

    def generate(self, token_ids: list[int], fields: dict[str, Any]) -> tuple[list[int], list[float]]:
        """One answer and its log-probabilities; waits for it. May be called from several threads."""
        fields = fields if self.adapter is None else {"model": self.adapter, **fields}
        answer = self.client.generate([token_ids], generation_kwargs=fields)
        logprobs = (position[0] for position in answer["logprobs"][0])
        return answer["completion_ids"][0], [math.nan if logprob is None else logprob for logprob in logprobs]

    def _lora(self, action: str, body: dict[str, str]) -> None:
        response = self.client.session.post(f"{self.url}/v1/{action}_lora_adapter", json=body)
        if response.status_code == 200:
            return
        hint = f"It has to see {body.get('lora_path')}: choose an output_dir on a file system that both share."
        if response.status_code in (401, 403):
            hint = "Something before the server refuses the request: a proxy, or an API key that it asks for."
        elif response.status_code == 404 and "Not Found" in response.text:  # there is no such route
            hint = "It takes adapters only if it was started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
        raise ValueError(
            f"The vLLM server at {self.url} did not {action} the policy's adapter: {response.status_code} {response.text}. "
            f"{hint}"
        )


class ServerGenerator:
    """Samples with a :class:`VllmServer`. A turn reads only what the server's prefix cache does not hold.

    Requests are seeded as :class:`~agile_trainers.rollout.generators.vllm.engine.VllmGenerator` seeds them.

    Args:
        server: Others may use it too.
        eos_token_ids: Tokens that end an answer; they belong to it.
        settings: How to sample. Stop strings are found by the server, with the tokenizer that it was started with.
        tokenizer: Needed for ``settings.stop_strings`` only.

    Raises:
        ValueError: A setting means another thing to vLLM, an id is outside the vocabulary, or stop strings are more than a
            server takes or come without a tokenizer.
    """

    def __init__(
        self,
        server: VllmServer,
        *,
        eos_token_ids: Sequence[int],
        settings: SamplingSettings,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        check_settings(settings)
        _check_stop_strings(settings)
        check_token_ids("eos_token_ids", eos_token_ids, server.vocab_size)
        self._server = server
        self._settings, self._eos = settings, frozenset(eos_token_ids)
        self._fields = sampling_fields(settings, eos_token_ids)
        self._stop = stop_criteria(settings, tokenizer)
        if self._stop is not None:
            self._fields |= {"stop": list(settings.stop_strings), "skip_special_tokens": False}
        self._known: dict[int, list[int]] = {}
        self._under_way: dict[int, GenerationRequest] = {}
        # The only thing that other threads touch.
        self._answers: queue.SimpleQueue[tuple[GenerationRequest, Any]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(server.max_batch_size, thread_name_prefix="vllm-request")

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: The episode has a request under way, the prompt is empty, ``max_new_tokens`` is below 1, the
                ids do not start with those already read and sampled, or the answer might not fit into the server's
                ``max_model_length``.
        """
        episode = request.episode
        check_request(request, self._known.get(episode, []), episode in self._under_way)
        check_room(request, self._server.max_model_length)
        fields = self._fields | {"max_tokens": request.max_new_tokens}
        if self._settings.do_sample:
            fields["seed"] = seed_of(request)
        self._known[episode], self._under_way[episode] = list(request.token_ids), request
        self._threads.submit(self._ask, request, fields)

    def step(self) -> list[GenerationOutput]:
        """Return the answers that have come, after a short wait if there are none. Empty when idle.

        Raises:
            Exception: What the server or the way to it made of a request.
            ValueError: A log-probability is not a number.
        """
        outputs: list[GenerationOutput] = []
        while self._under_way:
            try:
                request, answer = self._answers.get(timeout=0 if outputs else PATIENCE)
            except queue.Empty:
                break
            if self._under_way.get(request.episode) is not request:
                continue  # released meanwhile
            if isinstance(answer, BaseException):
                raise answer
            outputs.append(self._finish(request, *answer))
        return outputs

    @property
    def pending(self) -> int:
        """Number of requests submitted and not yet returned."""
        return len(self._under_way)

    def release(self, episode: int) -> None:
        """Forget an episode. An answer that is under way still comes, and is not read."""
        self._known.pop(episode, None)
        self._under_way.pop(episode, None)

    def close(self) -> None:
        """Withdraw what has not begun, and wait for the rest: the next policy may replace this one."""
        self._known.clear()
        self._under_way.clear()
        self._threads.shutdown(cancel_futures=True)

    def _ask(self, request: GenerationRequest, fields: dict[str, Any]) -> None:
        answer: Any
        try:
            answer = self._server.generate(list(request.token_ids), fields)
        except BaseException as error:
            answer = error
        self._answers.put((request, answer))

    def _finish(self, request: GenerationRequest, token_ids: list[int], logprobs: list[float]) -> GenerationOutput:
        episode = request.episode
        check_logprobs(episode, logprobs)
        del self._under_way[episode]
        self._known[episode] += token_ids
        return GenerationOutput(episode, token_ids, logprobs, self._reason(token_ids, request.max_new_tokens))

    def _reason(self, token_ids: list[int], max_new_tokens: int) -> FinishReason:
        """TRL's client does not say why an answer ended."""
        if len(token_ids) < max_new_tokens or token_ids[-1] in self._eos:
            return "stop"
        return "stop" if self._stop is not None and self._stop(torch.tensor([token_ids]), None)[0] else "length"


def _check_stop_strings(settings: SamplingSettings) -> None:
    if len(settings.stop_strings) > MOST_STOP_STRINGS:
        raise ValueError(
            f"A vLLM server takes {MOST_STOP_STRINGS} stop strings, got {len(settings.stop_strings)}: "
            f"{list(settings.stop_strings)}. Use fewer, or vllm_mode='colocate'."
        )
    if settings.stop_strings and settings.min_new_tokens:
        raise ValueError(
            f"A vLLM server looks for stop_strings={list(settings.stop_strings)} only after "
            f"min_new_tokens={settings.min_new_tokens}, transformers from the beginning. Use one of them, or "
            "vllm_mode='colocate'."
        )
