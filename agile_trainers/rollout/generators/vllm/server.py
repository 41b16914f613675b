"""A sampler on a vLLM server, through TRL's client. Every answer is a separate request."""

from __future__ import annotations

import itertools
import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from requests import ConnectionError as RequestsConnectionError
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from requests.exceptions import ChunkedEncodingError, RetryError
from transformers import PreTrainedTokenizerBase
from trl.generation.vllm_client import VLLMClient
from urllib3.util.retry import Retry

from agile_trainers.rollout.generators.base import (
    Conversations,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    SamplingSettings,
    check_room,
    check_token_ids,
)
from agile_trainers.rollout.generators.images import ImageReader
from agile_trainers.rollout.generators.transformers.decoding import stop_criteria
from agile_trainers.rollout.generators.vllm import Health
from agile_trainers.rollout.generators.vllm.engine import (
    FINISHED,
    check_logprobs,
    check_settings,
    features_of,
    kept_sets,
    length_fields,
    logit_bias,
    sampling_fields,
    seed_of,
)
from agile_trainers.rollout.generators.vllm.servers import NotServed, VllmServers

PATIENCE = 0.005
"""Seconds that a step waits for an answer, before environments are polled again."""
ANSWER_SECONDS = 600.0
"""Timeout of a request in seconds. TRL's client has none."""
RETRIES = Retry(
    total=3, read=1, status_forcelist=[500, 502, 503], backoff_factor=0.5, allowed_methods=["POST", "GET"]
)  # fmt: skip
"""Retries for three seconds until a server counts as down. TRL's client retries for a minute."""

MOST_STOP_STRINGS = 4
"""Maximum number of stop strings in a request to a server."""


_WITH_IMAGES = "/inference/v1/generate"


class _PatientAdapter(HTTPAdapter):
    """Limits every request without a timeout to ``ANSWER_SECONDS``, and to the life of the server."""

    def __init__(self, health: Health, **options: Any) -> None:
        self._health = health
        super().__init__(**options)

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        pools = self.poolmanager.pool_classes_by_scheme
        self.poolmanager.pool_classes_by_scheme = {
            scheme: _watched(pool, self._health) for scheme, pool in pools.items()
        }

    def send(self, request: PreparedRequest, **options: Any) -> Response:  # type: ignore[override]
        options["timeout"] = options.get("timeout") or ANSWER_SECONDS
        return super().send(request, **options)


def _watched(pool: Any, health: Health) -> Any:
    """Make a class of urllib3's pools, whose connections ask for the server's health while they wait for an answer."""

    class Connection(pool.ConnectionCls):
        def getresponse(self) -> Any:
            health.wait(self.sock, self.timeout)
            return super().getresponse()

    return type(pool.__name__, (pool,), {"ConnectionCls": Connection})


class VllmServer:
    """A vLLM server. It receives token ids, not text.

    Args:
        url: URL of the server, ``http://host:port``.
        timeout: Seconds to wait until the server is up.
        max_batch_size: Maximum number of requests at the same time; the others wait in this process.
        vocab_size: Size of the model's vocabulary.
        when_gone: What to do when the server does not answer any more, for the error.

    Raises:
        requests.exceptions.ConnectionError: If the server is not up in time.
        RuntimeError: If the server was started without ``VLLM_SERVER_DEV_MODE=1`` and does not report its configuration.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        max_batch_size: int,
        vocab_size: int,
        when_gone: str = "Start it again, and resume from the last checkpoint.",
    ) -> None:
        self.client = VLLMClient(base_url=url, connection_timeout=timeout)
        health = Health()
        for prefix in ("http://", "https://"):
            patient = _PatientAdapter(health, max_retries=RETRIES, pool_maxsize=max_batch_size)
            self.client.session.mount(prefix, patient)
        self.client.session.hooks["response"].append(self._note_answer)
        self._noted = threading.local()
        self.url, self.max_batch_size, self.vocab_size = self.client.base_url, max_batch_size, vocab_size
        self.info: dict[str, Any] = self.client.get_server_info()
        """Configuration of the server, vLLM's ``VllmConfig``."""
        self.max_model_length: int = self.info["model_config"]["max_model_len"]
        self._when_gone = when_gone

    def load(self, name: str, folder: Path) -> None:
        """Serve the adapter in a folder, under a name."""
        self._lora("load", {"lora_name": name, "lora_path": str(folder)})

    def unload(self, name: str) -> None:
        """Serve an adapter no longer."""
        self._lora("unload", {"lora_name": name})

    def generate(
        self, token_ids: list[int], fields: dict[str, Any], adapter: str | None = None
    ) -> tuple[list[int], list[float], FinishReason, int | None]:
        """Request an answer, of an adapter or of the base; wait for ids, log-probabilities and why it ends.

        Thread-safe. The last value is the number of ids that the server took from its prefix cache, if it reports it
        (``--enable-prompt-tokens-details``). With the field ``features``, images or None, the request goes to the endpoint
        that takes images; see :meth:`check_images`.

        Raises:
            NotServed: If the server does not know the adapter.
            requests.exceptions.ConnectionError: If the server does not answer, or has broken the answer off.
        """
        fields = fields if adapter is None else {"model": adapter, **fields}
        noted = self._noted
        with self._reached():
            if "features" in fields:
                ids, logprobs = self._generate_beside_images(token_ids, fields)
            else:
                answer = self.client.generate([token_ids], generation_kwargs=fields)
                ids, logprobs = answer["completion_ids"][0], [position[0] for position in answer["logprobs"][0]]
        return ids, [math.nan if one is None else one for one in logprobs], noted.reason, noted.cached

    def _generate_beside_images(self, token_ids: list[int], fields: dict[str, Any]) -> tuple[list[int], list[float]]:
        # TRL's client asks this endpoint for the base alone.
        sampling = {name: value for name, value in fields.items() if name not in ("features", "model")}
        body = {
            "model": fields.get("model", self.client.model),
            "token_ids": token_ids,
            "features": fields["features"],
            "sampling_params": {**sampling, "logprobs": 0, "output_kind": 2},
        }
        response = self.client.session.post(self.url + _WITH_IMAGES, json=body)
        if response.status_code != 200:
            raise ValueError(
                f"The vLLM server at {self.url} rejects a request: {response.status_code} {response.text[:2000]}"
            )
        (choice,) = response.json()["choices"]
        return choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]

    def check_images(self) -> None:
        """Raise ``ValueError`` if the server has no endpoint that takes images beside token ids."""
        if self.client.session.post(self.url + _WITH_IMAGES, json={}).status_code == 404:
            raise ValueError(
                f"The vLLM server at {self.url} does not serve {_WITH_IMAGES}, which takes images beside token ids. Start "
                "it with --enable-scale-out (vLLM 0.30 and later), or pass the processor's tokenizer as `processing_class` "
                "for episodes of text."
            )

    def _note_answer(self, response: Response, **_: Any) -> None:
        """Keep what TRL's client drops of an answer, for the thread that waits for it."""
        if response.status_code == 404 and b"does not exist" in response.content:  # of a route it is "Not Found"
            raise NotServed(
                f"The vLLM server at {self.url} does not know the model of a request: {response.text[:500]}"
            )
        if not response.ok or b'"choices"' not in response.content:
            return
        answer = response.json()
        reason = answer["choices"][0]["finish_reason"]
        if reason not in FINISHED:
            # A server that is told to end answers with the tokens that it has by then, and status 200.
            raise RequestsConnectionError(f"it broke an answer off, with finish_reason={reason!r}")
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        self._noted.reason, self._noted.cached = FINISHED[reason], details.get("cached_tokens")

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        # An engine that ends lets its server answer with status 500 for a moment.
        except (RequestsConnectionError, RetryError, ChunkedEncodingError) as error:
            raise RequestsConnectionError(
                f"The vLLM server at {self.url} does not answer any more: {error}. {self._when_gone}"
            ) from error

    def _lora(self, action: str, body: dict[str, str]) -> None:
        with self._reached():
            response = self.client.session.post(f"{self.url}/v1/{action}_lora_adapter", json=body)
        if response.status_code == 200:
            return
        path = body.get("lora_path")
        hint = f"The server must be able to read {path}: choose an output_dir on a shared file system." if path else ""
        if response.status_code in (401, 403):
            hint = "A proxy in front of the server rejected the request, or the server needs an API key."
        elif response.status_code == 404 and "Not Found" in response.text:  # the route does not exist
            hint = "Start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, so that it accepts adapters."
        raise ValueError(
            f"The vLLM server at {self.url} did not {action} the policy's adapter: {response.status_code} {response.text}. "
            f"{hint}"
        )


class ServerGenerator:
    """Samples with vLLM servers. A turn reads only the ids that the server's prefix cache does not hold.

    Requests are seeded as in :class:`~agile_trainers.rollout.generators.vllm.engine.VllmGenerator`. Of those that wait, the
    one of the lowest episode is sent next: batches that are trained first have the lower ones.

    Args:
        servers: Which others may use at the same time. Their adapters go with the last object that holds ``servers``.
        eos_token_ids: Tokens that end an answer; they belong to it.
        settings: Sampling options. The server finds stop strings with its own tokenizer.
        tokenizer: Needed for ``settings.stop_strings`` only.
        adapter_of: Returns the name of the adapter that an episode is sampled with. Default: the server's own for all.
        reader: Encodes the images of requests.

    Raises:
        ValueError: If a setting has another meaning in vLLM, an id is outside the vocabulary, or there are too many stop
            strings or no tokenizer for them.
    """

    def __init__(
        self,
        servers: VllmServers,
        *,
        eos_token_ids: Sequence[int],
        settings: SamplingSettings,
        tokenizer: PreTrainedTokenizerBase | None = None,
        adapter_of: Callable[[int], str | None] = lambda episode: None,
        reader: ImageReader | None = None,
    ) -> None:
        check_settings(settings)
        _check_stop_strings(settings)
        check_token_ids("eos_token_ids", eos_token_ids, servers.vocab_size)
        self._servers = servers
        self._adapter_of, self._reader = adapter_of, reader
        self._settings, self._eos = settings, frozenset(eos_token_ids)
        self._fields = sampling_fields(settings, eos_token_ids)
        self._stop = stop_criteria(settings, tokenizer)
        if self._stop is not None:
            self._fields |= {"stop": list(settings.stop_strings), "skip_special_tokens": False}
        if reader is not None:
            self._fields["logit_bias"] = logit_bias(reader)
        self._conversations = Conversations[GenerationRequest]()
        # What other threads use: requests in the order of their episodes, then of their arrival; and answers.
        self._arrived = itertools.count()
        self._waiting: queue.PriorityQueue[tuple[int, int, GenerationRequest, dict[str, Any]]] = queue.PriorityQueue()
        self._answers: queue.SimpleQueue[tuple[GenerationRequest, Any]] = queue.SimpleQueue()
        self._wake: Callable[[], None] | None = None
        self._threads = ThreadPoolExecutor(servers.max_batch_size, thread_name_prefix="vllm-request")

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: If the episode has a pending request of the same ``call``, the prompt is empty, ``max_new_tokens`` is
                below 1, the ids do not start with those of the last request and its answer although ``extends`` is true, or
                the answer might exceed the server's ``max_model_length``.
        """
        self._conversations.check(request)
        check_room(request, self._servers.max_model_length)
        fields = self._fields | length_fields(self._settings, request)
        if self._settings.do_sample:
            fields["seed"] = seed_of(request)
        if self._reader is not None:
            fields["features"] = features_of(request, self._reader)
        self._conversations.submitted(request, request)
        self._waiting.put((request.episode, next(self._arrived), request, fields))
        self._threads.submit(self._ask)

    def listen(self, wake: Callable[[], None]) -> None:
        """Call a function, in any thread, whenever an answer has arrived; :meth:`step` then waits no longer."""
        self._wake = wake

    def step(self) -> list[GenerationOutput]:
        """Return the answers that have arrived, after a short wait if there are none and nobody listens. Empty when idle.

        Raises:
            Exception: Any error of a request, from the server or the connection.
            ValueError: If a log-probability is not a number.
        """
        outputs: list[GenerationOutput] = []
        while self._conversations.pending:
            try:
                patience = 0 if outputs or self._wake is not None else PATIENCE
                request, answer = self._answers.get(timeout=patience)
            except queue.Empty:
                break
            if self._conversations.pending.get((request.episode, request.call)) is not request:
                continue  # released in the meantime
            if isinstance(answer, BaseException):
                raise answer
            outputs.append(self._finish(request, *answer))
        return outputs

    @property
    def pending(self) -> int:
        """Number of requests submitted and not yet returned."""
        return len(self._conversations.pending)

    def release(self, episode: int) -> None:
        """Forget an episode. Pending answers are discarded when they arrive."""
        self._conversations.release(episode)

    def close(self) -> None:
        """Cancel requests that have not started and wait for the others, so that the adapter can be replaced."""
        self._conversations = Conversations()
        self._threads.shutdown(cancel_futures=True)

    def _ask(self) -> None:
        """Send the request that is next, and wait for its answer."""
        _, _, request, fields = self._waiting.get_nowait()
        answer: Any
        try:
            adapter = self._adapter_of(request.episode)
            answer = self._servers.generate(list(request.token_ids), fields, adapter, request.episode)
        except BaseException as error:
            answer = error
        self._answers.put((request, answer))
        if self._wake is not None:
            self._wake()

    def _finish(
        self,
        request: GenerationRequest,
        token_ids: list[int],
        logprobs: list[float],
        reason: FinishReason,
        cached: int | None,
    ) -> GenerationOutput:
        check_logprobs(request.episode, logprobs)
        self._conversations.answered(request, token_ids)
        if reason == "length" and self._is_complete(token_ids):
            reason = "stop"
        read = None if cached is None else len(request.token_ids) - cached
        kept = kept_sets(self._settings, self._eos, len(token_ids))
        return GenerationOutput(request.episode, token_ids, logprobs, reason, request.call, read, kept)

    def _is_complete(self, token_ids: list[int]) -> bool:
        """Return True if the last token ends the answer, whether or not there was room for another."""
        return token_ids[-1] in self._eos or (
            self._stop is not None and bool(self._stop(torch.tensor([token_ids]), None)[0])
        )


def _check_stop_strings(settings: SamplingSettings) -> None:
    if len(settings.stop_strings) > MOST_STOP_STRINGS:
        raise ValueError(
            f"A vLLM server accepts {MOST_STOP_STRINGS} stop strings, got {len(settings.stop_strings)}: "
            f"{list(settings.stop_strings)}. Use fewer, or vllm_mode='colocate'."
        )
    if settings.stop_strings and settings.min_new_tokens:
        raise ValueError(
            f"A vLLM server checks stop_strings={list(settings.stop_strings)} only after "
            f"min_new_tokens={settings.min_new_tokens}, transformers from the beginning. Use one of them, or "
            "vllm_mode='colocate'."
        )
