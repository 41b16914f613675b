"""Asks a vLLM server for the log-probabilities of a teacher that it serves."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from agile_trainers.rollout.generators.vllm import Health
from agile_trainers.train_batch import TrainBatch, paths_of, rows_read, with_hints

REQUESTS = 32
"""Requests at the same time."""
_SECONDS = 600.0
_AGAIN = retry(
    retry=retry_if_exception_type(ConnectionError), stop=stop_after_attempt(4), wait=wait_random_exponential(0.5, 4),
    reraise=True,
)  # fmt: skip


class TeacherServer:
    """A vLLM server whose first model is a teacher. It scores the ids of whole episodes, once for each batch.

    Args:
        url: Its address, ``http://host:port``.
        tokenizer: The policy's.

    Raises:
        ValueError: If there is no vLLM server, or its model has another tokenizer.
    """

    def __init__(self, url: str, tokenizer: Any) -> None:
        self.url, self._health = url.rstrip("/"), Health()
        self._client = httpx.Client(timeout=_SECONDS, limits=httpx.Limits(max_keepalive_connections=0))
        try:
            (self._model, self.max_model_length), *_ = (
                (model["id"], model["max_model_len"]) for model in self._ask("GET", "/v1/models")["data"]
            )
        except (ConnectionError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"teacher={url!r} is no vLLM server that answers: {error}. Start one with `vllm serve`, and leave out /v1."
            ) from error
        ids = list(range(len(tokenizer)))
        try:
            same = self._ask("POST", "/detokenize", {"model": self._model, "tokens": ids})[
                "prompt"
            ] == tokenizer.decode(ids)
        except ValueError:  # an id is outside of its vocabulary
            same = False
        if not same:
            raise ValueError(
                f"teacher={url!r} serves {self._model!r}, which has another tokenizer. The teacher scores the policy's own "
                "ids: serve a model with the same tokenizer."
            )

    def log_probs(self, batch: TrainBatch) -> torch.Tensor:
        """Ask for the log-probabilities of episodes.

        Args:
            batch: The episodes, with their hints.

        Returns:
            (B, T) float32 of the tokens that enter the loss, at temperature 1 over the whole vocabulary; 0 elsewhere.

        Raises:
            ValueError: If a row is too long for the server.
            ConnectionError: If the server does not answer.
        """
        part = with_hints(batch.to_trl())
        ids, mask, _ = rows_read(part)
        rows = [own[there > 0].tolist() for own, there in zip(ids.cpu(), mask.cpu())]
        if (longest := max(map(len, rows))) >= self.max_model_length:
            raise ValueError(
                f"The teacher at {self.url} has max_model_len={self.max_model_length}, and an episode has {longest} tokens. "
                "Start it with a larger --max-model-len, or lower max_model_length."
            )
        with ThreadPoolExecutor(REQUESTS, thread_name_prefix="teacher") as threads:
            scored = list(threads.map(self._score, rows))
        flat = torch.zeros(ids.shape)
        for row, values in enumerate(scored):
            flat[row, mask[row].cpu() > 0] = torch.tensor(values)
        flat, length = flat.to(ids.device), batch.completion_ids.size(1)
        paths = paths_of(part)
        found = flat[:, -length:] if paths is None else flat.flatten()[paths.cells.clamp(min=0)]
        return torch.where(batch.counted, found, 0.0)

    def _score(self, ids: list[int]) -> list[float]:
        """Return the log-probability of each token after those before it; 0 of the first."""
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        (choice,) = self._ask("POST", "/v1/completions", body)["choices"]
        told = choice["prompt_logprobs"]
        return [0.0] + [one[str(token)]["logprob"] for token, one in zip(ids[1:], told[1:], strict=True)]

    @_AGAIN
    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            watch = {"trace": watching(self._health)}
            response = self._client.request(method, self.url + path, json=body, extensions=watch)
        except (httpx.HTTPError, OSError) as error:
            raise ConnectionError(
                f"The teacher at {self.url} does not answer: {error}. Start it (again), and resume from the last checkpoint."
            ) from error
        if response.is_error:
            kind = ConnectionError if response.is_server_error else ValueError
            raise kind(f"The teacher at {self.url} rejects a request: {response.status_code} {response.text[:500]}")
        answer: dict[str, Any] = response.json()
        broken = [one.get("finish_reason") for one in answer.get("choices", ()) if one.get("prompt_logprobs") is None]
        if broken:
            # A server that is told to end answers with what it has by then, and status 200.
            raise ConnectionError(
                f"The teacher at {self.url} has broken an answer off (finish_reason={broken[0]!r}). "
                "Start it (again), and resume from the last checkpoint."
            )
        return answer


def watching(health: Health) -> Callable[[str, dict[str, Any]], None]:
    """Make a ``trace`` of one request of httpx on a connection of its own, which looks at the server while it waits."""
    connections: list[Any] = []

    def trace(event: str, told: dict[str, Any]) -> None:
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            connections.append(told["return_value"].get_extra_info("socket"))
        elif event.endswith(".receive_response_headers.started") and connections:
            health.wait(connections[-1], _SECONDS)

    return trace
