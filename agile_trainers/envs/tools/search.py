"""Finds passages for a query, in an index in memory or on a server."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

Search = Callable[[str], list[str]]
"""Function from a query to passages, best first."""

_MAX_RESPONSE = 10_000_000
"""Maximum number of bytes of a server's answer."""


class BM25Index:
    """Ranks passages by BM25 (Robertson and Zaragoza 2009, with Lucene's non-negative idf).

    Words are sequences of letters and digits, in lower case. Ties are broken by position. All instances of an
    environment can share one index, which is read-only.

    Args:
        passages: The passages to search.
        top_k: Maximum number of results; passages without a word of the query are never returned.
        k1: Saturation of repeated words. Default 1.5.
        b: Penalty on long passages, in [0, 1]. Default 0.75.

    Raises:
        ValueError: If there is no passage or a parameter is out of range.
    """

    def __init__(self, passages: Sequence[str], top_k: int = 3, k1: float = 1.5, b: float = 0.75):
        if not passages or top_k < 1 or k1 < 0 or not 0 <= b <= 1:
            raise ValueError(
                f"Expected at least one passage, top_k >= 1, k1 >= 0 and b in [0, 1]; got {len(passages)} passages, "
                f"{top_k=}, {k1=}, {b=}."
            )
        self.passages, self.top_k = list(passages), top_k
        counts = [Counter(_words(passage)) for passage in self.passages]
        mean = sum(count.total() for count in counts) / len(counts) or 1.0
        self._weights: dict[str, dict[int, float]] = {}
        """Word to passage index to weight, for the passages that contain the word."""
        for index, count in enumerate(counts):
            norm = k1 * (1 - b + b * count.total() / mean)
            for word, n in count.items():
                self._weights.setdefault(word, {})[index] = n * (k1 + 1) / (n + norm)
        for held in self._weights.values():
            idf = math.log(1 + (len(counts) - len(held) + 0.5) / (len(held) + 0.5))
            held.update({index: idf * weight for index, weight in held.items()})

    def __call__(self, query: str) -> list[str]:
        """Return the best passages, at most ``top_k``."""
        scores = self.scores(query)
        return [
            self.passages[index] for index in sorted(scores, key=lambda index: (-scores[index], index))[: self.top_k]
        ]

    def scores(self, query: str) -> dict[int, float]:
        """Return the scores of all passages that share a word with the query, by position."""
        scores: dict[int, float] = {}
        for word in _words(query):
            for index, weight in self._weights.get(word, {}).items():
                scores[index] = scores.get(index, 0.0) + weight
        return scores


class SearchServerError(RuntimeError):
    """Raised when a search server fails after all retries."""


class HttpSearch:
    """Searches with a server, by HTTP POST of JSON.

    Connection errors, timeouts and the status codes 429 and 5xx are retried after ``backoff``, twice that, four times
    that, ... seconds. The last error is raised, so that the episode is not trained on.

    Args:
        url: Address of the server.
        payload: Function from the query to the JSON of the request. Default: ``{"query": query, "top_k": 3}``.
        passages: Function from the JSON of the response to the passages. Default: ``response["passages"]``.
        timeout: Seconds per attempt.
        retries: Attempts after the first one.
        backoff: Seconds before the second attempt.
        headers: Further headers of the request (an API key, for example).

    Raises:
        ValueError: If the URL is not http(s) or a number is negative.
    """

    def __init__(
        self,
        url: str,
        payload: Callable[[str], Any] = lambda query: {"query": query, "top_k": 3},
        passages: Callable[[Any], list[str]] = lambda response: response["passages"],
        *,
        timeout: float = 10.0,
        retries: int = 3,
        backoff: float = 0.5,
        headers: dict[str, str] | None = None,
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"The search server's URL must begin with http:// or https://, got {url!r}.")
        if timeout <= 0 or retries < 0 or backoff < 0:
            raise ValueError(
                f"timeout must be positive, retries and backoff not negative; {timeout=}, {retries=}, {backoff=}."
            )
        self.url, self.payload, self.passages = url, payload, passages
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self.headers = {"Content-Type": "application/json", **(headers or {})}

    def __call__(self, query: str) -> list[str]:
        """Return the passages found for a query.

        Raises:
            SearchServerError: If the server fails or its answer contains no passages.
        """
        body = json.dumps(self.payload(query)).encode()
        retrying = Retrying(
            retry=retry_if_exception(_may_pass), stop=stop_after_attempt(1 + self.retries),
            wait=wait_exponential(self.backoff), reraise=True,
        )  # fmt: skip
        try:
            return self._passages(retrying(self._post, body))
        except OSError as error:
            tried = retrying.statistics["attempt_number"]
            raise SearchServerError(f"{self.url} did not answer a search in {tried} attempt(s): {error}") from error

    def _post(self, body: bytes) -> bytes:
        request = urllib.request.Request(self.url, body, self.headers, method="POST")
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            return response.read(_MAX_RESPONSE)

    def _passages(self, body: bytes) -> list[str]:
        try:
            found = self.passages(json.loads(body))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SearchServerError(
                f"{self.url} answered {body[:80]!r}, which has no passages ({error!r}). Pass `passages`, a function that "
                "extracts them from the JSON."
            ) from error
        if not isinstance(found, list) or not all(isinstance(passage, str) for passage in found):
            raise SearchServerError(f"{self.url}: expected a list of texts as passages, got {str(found)[:80]!r}.")
        return found


def _may_pass(error: BaseException) -> bool:
    """Return whether another attempt may succeed: after broken connections, timeouts, and an answer that says so."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code == 429 or error.code >= 500
    return isinstance(error, OSError)


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())
