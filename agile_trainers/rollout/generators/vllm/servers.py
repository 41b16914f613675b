"""Several vLLM servers that serve the same adapters, so that any of them can answer a request."""

from __future__ import annotations

import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests
import torch
from peft import LoraConfig
from requests import ConnectionError as RequestsConnectionError
from transformers.utils import logging

from agile_trainers.rollout.generators.base import FinishReason
from agile_trainers.rollout.generators.vllm.adapter_host import AdapterFolder, AdapterHost

if TYPE_CHECKING:
    from agile_trainers.rollout.generators.vllm.server import VllmServer

logger = logging.get_logger(__name__)

_LEAVING_SECONDS = 5.0


class NotServed(Exception):
    """A server does not know the adapter that a request names."""


class VllmServers(AdapterHost[str]):
    """A fixed list of servers. Each adapter is loaded on all of them, under the same name.

    The requests of an episode go to one server, whose prefix cache holds its conversation. A server that does not answer is
    left out from then on, with a warning, and its requests are sent to another one. The last server is never left out: its
    error is raised.

    Args:
        servers: At least one.
        folder: Folder in which adapters are written for them. Default: the system's folder for temporary files.
    """

    max_adapters = None
    """A server loads an adapter again that it had no more room for."""

    def __init__(self, servers: Sequence[VllmServer], folder: str | Path | None = None) -> None:
        self.servers = tuple(servers)
        self.used: tuple[int, ...] = tuple(range(len(servers)))
        """Indices of the servers that have not been left out."""
        self.files = AdapterFolder(folder)
        """The folder of adapters that are written for the servers."""
        self.max_batch_size, self.vocab_size = servers[0].max_batch_size, servers[0].vocab_size
        self.max_model_length = min(server.max_model_length for server in servers)
        self._lock = threading.Lock()
        self._served: set[str] = set()
        self.close = weakref.finalize(self, _leave, [server.url for server in servers], self._served, self.files)
        """Unloads the adapters and deletes their files; this also happens when the object is deleted, and at the end of this
        process. The servers may be gone."""

    def add_adapter(self, weights: Mapping[str, torch.Tensor], config: LoraConfig) -> tuple[str, int]:
        loaded: list[VllmServer] = []
        with self.files.written(weights, config) as (name, folder, moved):

            def load(server: VllmServer) -> None:
                server.load(name, folder)
                loaded.append(server)

            try:
                self._on_each(load)
            except BaseException:
                for server in loaded:  # its files are deleted
                    with suppress(Exception):
                        server.unload(name)
                raise
        self._served.add(name)
        return name, moved

    def drop_adapter(self, adapter: str) -> None:
        """Serve an adapter no longer, and delete its files."""
        self._served.discard(adapter)
        self._on_each(partial(_unload_if_served, adapter))
        self.files.delete(adapter)

    def drop_left(self) -> None:
        """Unload the adapters that killed processes have left in the folder, and delete their files."""
        for folder in self.files.left():
            for adapter in sorted(path.name for path in folder.iterdir()):
                self._on_each(partial(_unload_if_served, adapter))
            shutil.rmtree(folder, ignore_errors=True)

    def generate(
        self, token_ids: list[int], fields: dict[str, Any], adapter: str | None = None, episode: int = 0
    ) -> tuple[list[int], list[float], FinishReason, int | None]:
        """Request an answer of the episode's server; see ``VllmServer.generate``. Thread-safe.

        A server that was started again meanwhile loads the adapter again.

        Raises:
            requests.exceptions.ConnectionError: If no server answers.
            ValueError: If the server cannot load the adapter again.
        """
        adapter = adapter or self.adapter
        while True:
            place = self._of(episode)
            try:
                try:
                    return self.servers[place].generate(token_ids, fields, adapter)
                except NotServed:
                    if adapter is None:
                        raise
                    self._load_again(self.servers[place], adapter)
                    return self.servers[place].generate(token_ids, fields, adapter)
            except RequestsConnectionError as error:
                self._leave_out(place, error)

    def _load_again(self, server: VllmServer, adapter: str) -> None:
        folder = self.files.find(adapter)
        if folder is None:
            raise ValueError(
                f"The vLLM server at {server.url} does not know the adapter {adapter}, and its files are gone: something "
                "has deleted them. Resume from the last checkpoint."
            )
        with self._lock:  # of the requests that miss it at the same time the first loads it
            try:
                server.load(adapter, folder)
            except ValueError as error:
                if "already been loaded" not in str(error):  # by another thread or process
                    raise
            else:
                logger.warning("The vLLM server at %s was started again, and has loaded an adapter again.", server.url)

    def _of(self, episode: int) -> int:
        """Return the episode's server; only the episodes of one that was left out move to another."""
        used, place = self.used, episode % len(self.servers)
        return place if place in used else used[episode % len(used)]

    def _on_each(self, act: Callable[[VllmServer], None]) -> None:
        for place in self.used:
            try:
                act(self.servers[place])
            except RequestsConnectionError as error:
                self._leave_out(place, error)

    def _leave_out(self, place: int, error: RequestsConnectionError) -> None:
        with self._lock:
            left = tuple(other for other in self.used if other != place)
            if not left:
                raise error
            if place in self.used:
                self.used = left
                others = " and ".join(self.servers[other].url for other in left)
                logger.warning(
                    "The vLLM server at %s does not answer and is left out from now on; its requests go to %s. %s",
                    self.servers[place].url, others, error.__cause__ or error,
                )  # fmt: skip


def _leave(urls: Sequence[str], served: Iterable[str], files: AdapterFolder) -> None:
    for url in urls:
        with suppress(requests.RequestException):
            for name in sorted(served):
                requests.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=_LEAVING_SECONDS)
    files.close()


def _unload_if_served(name: str, server: VllmServer) -> None:
    with suppress(ValueError):  # a server that was started since does not know it
        server.unload(name)
