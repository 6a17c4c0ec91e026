"""Rewards of servers. POST /get_reward with ``{"query": [...], "prompts": [...], "labels": [...]}``
returns ``{"rewards": [...]}``, or if some completions have no score, status 500 and
``{"failed": [{"index", "error"}], "scored": [{"index", "reward"}]}``. ``feedback``, a list of texts
for the rewards or a text of each scored completion, is optional.
"""

from __future__ import annotations

import asyncio
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from valence.errors import UserError
from valence.network import (
    as_the_environment_says,
    backoff,
    refuse_credentials,
    retry_after,
    routes,
)
from valence.rewards.calls import RewardError
from valence.types import Completion, Score

if TYPE_CHECKING:
    import httpx

MAX_REPLY_BYTES = 64 * 2**20
FIRST_REST, LONGEST_REST = 1.0, 30.0
"""Seconds for which a failed server is tried last, doubled with each consecutive failure."""
RETRIED = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which a request is retried."""
TIMED_OUT = (408, 504)
"""Statuses of a server that exceeded its time limit."""
PARTIAL = 500
"""Status of a reply with scores of some completions, and errors of the others."""
MAX_ERROR_LENGTH = 500
"""Maximum characters of the error of a completion."""
SCORE_KEYS = ("rewards", "scores")
"""Keys of the list of numbers in a reply; the first that is present counts."""


@dataclass
class ServerState:
    """One address. ``rests_until``: time (of the client's clock) until which it is tried last."""

    url: str
    failures: int = 0
    rests_until: float = 0.0
    num_calls: int = 0

    def failed(self, now: float, after: float) -> None:
        pause = backoff(self.failures, FIRST_REST, LONGEST_REST)
        self.failures += 1
        self.rests_until = now + max(pause, after)

    def answered(self) -> None:
        self.failures, self.rests_until = 0, 0.0


@dataclass
class HttpClient:
    """Posts JSON to servers, with limits on the time and the length of a reply.

    seconds: time limit up to the last byte. token: sent as the bearer token.
    """

    urls: Sequence[str]
    seconds: float = 60.0
    token: str | None = field(default=None, repr=False)
    max_bytes: int = MAX_REPLY_BYTES
    _client: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = field(
        default=None, repr=False
    )

    async def post(self, url: str, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of the reply. Raises RewardError if there is none."""
        import httpx

        try:
            async with asyncio.timeout(self.seconds):
                return await self._post(url, body)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise RewardError(
                f"no answer within {self.seconds:g} s", passes=True, late=True
            ) from error
        except httpx.TransportError as error:
            name = type(error).__name__
            reason = f"{name}: {error}" if str(error) else name
            raise RewardError(f"connection failed ({reason})", passes=True) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RewardError(f"request failed ({type(error).__name__}: {error})") from error

    async def close(self) -> None:
        if self._client is not None:
            await self._client[1].aclose()
            self._client = None

    async def _post(self, url: str, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of the reply, up to a maximum length."""
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self.token}"} if self.token else {}
        )
        reply = bytearray()
        client = self._client_of_loop()
        async with client.stream("POST", url, content=body, headers=headers) as response:
            async for chunk in response.aiter_bytes():
                reply += chunk
                if len(reply) > self.max_bytes:
                    raise RewardError(f"the reply is longer than {self.max_bytes} bytes")
            return response.status_code, response.headers, bytes(reply)

    def _client_of_loop(self) -> httpx.AsyncClient:
        """The client of the running event loop."""
        import httpx

        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            with as_the_environment_says(", ".join(self.urls)):
                client = httpx.AsyncClient(
                    timeout=self.seconds, limits=limits, **routes(*self.urls)
                )
            self._client = (loop, client)
        return self._client[1]


def status_error(status: int, headers: Mapping[str, str], reply: bytes) -> RewardError:
    """The error for a reply with a status other than 200."""
    is_redirect = 300 <= status < 400 and "location" in headers
    target = f", a redirect to {headers['location']}: use that address" if is_redirect else ""
    text = reply[:200].decode(errors="replace").strip()
    return RewardError(
        f"status {status}{target}{f' ({text})' if text else ''}",
        passes=status in RETRIED,
        after=retry_after(headers.get("retry-after", "")),
        late=status in TIMED_OUT,
    )


@dataclass
class Servers:
    """Servers with the same reward. A call goes to the least busy one, and if that fails to the
    next. A server that failed is tried last for a while.

    seconds: time limit of one server for a call, up to the last byte. label: column of the rows
    that is sent as ``labels``; None: "label" if there is one, else an empty text.
    """

    urls: Sequence[str]
    seconds: float = 60.0
    label: str | None = None
    token: str | None = field(default=None, repr=False)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.servers = [ServerState(url) for url in self.urls]
        self.http = HttpClient(self.urls, self.seconds, self.token)

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"servers": sorted(self.urls), "label": self.label}

    async def attempt(self, completions: Sequence[Completion]) -> list[Score]:
        rows = [self._row(completion) for completion in completions]
        sent = [row for row in rows if not isinstance(row, Score)]
        scores = iter(await self._call_any(sent) if sent else [])
        return [row if isinstance(row, Score) else next(scores) for row in rows]

    async def close(self) -> None:
        await self.http.close()

    def _row(self, completion: Completion) -> tuple[str, str, Any] | Score:
        """Query, prompt and label; or a failed score if one of them is unknown."""
        prompt = completion.rendered or completion.prompt
        if not isinstance(prompt, str):
            return Score(None, error="the row has no rendered text of its chat")
        label = completion.info.get(self.label or "label")
        if label is None and self.label is not None:
            error = f"the row has no value in the column {self.label!r}, which is sent as label"
            return Score(None, error=error)
        label = "" if label is None else label
        try:
            json.dumps(label, allow_nan=False)
        except (TypeError, ValueError):
            error = f"the label has the type {type(label).__name__}, which JSON does not support"
            return Score(None, error=error)
        return prompt + completion.text, prompt, label

    async def _call_any(self, rows: Sequence[tuple[str, str, Any]]) -> list[Score]:
        """The scores from the first server that answers. Raises RewardError if none does."""
        queries, prompts, labels = zip(*rows, strict=True)
        body = json.dumps({"query": queries, "prompts": prompts, "labels": labels}).encode()
        failures: list[tuple[ServerState, RewardError]] = []
        while server := self._next_server([server for server, _ in failures]):
            server.num_calls += 1
            try:
                scores = await self._call(server, body, len(rows))
            except RewardError as error:
                if error.passes and not server.failures:  # once, until it answers again
                    warnings.warn(f"{server.url}: {error}; retrying", stacklevel=2)
                server.failed(self.clock(), error.after)
                failures.append((server, error))
                continue
            finally:
                server.num_calls -= 1
            server.answered()
            return scores
        pauses = [error.after for _, error in failures if error.passes]
        raise RewardError(
            "; ".join(f"{server.url}: {error}" for server, error in failures),
            passes=bool(pauses),
            after=min(pauses, default=0.0),
            late=any(error.late for _, error in failures),
        )

    def _next_server(self, tried: Sequence[ServerState]) -> ServerState | None:
        """Servers that rest come last, in the order in which their rests end."""
        now = self.clock()
        return min(
            (server for server in self.servers if not any(server is failed for failed in tried)),
            key=lambda server: (max(server.rests_until - now, 0.0), server.num_calls),
            default=None,
        )

    async def _call(self, server: ServerState, body: bytes, number: int) -> list[Score]:
        status, headers, reply = await self.http.post(server.url, body)
        if status == PARTIAL and (scores := parse_partial_scores(reply, number)) is not None:
            return scores
        if status != 200:
            raise status_error(status, headers, reply)
        return parse_scores(reply, number)


# Replies


def parse_scores(reply: bytes, number: int) -> list[Score]:
    """The scores in a reply for ``number`` completions. Raises RewardError for another reply.

    Whether scores are finite is checked later, for all rewards.
    """
    try:
        content: Any = json.loads(reply)
    except (ValueError, RecursionError) as error:
        text = reply[:80].decode(errors="replace")
        raise RewardError(f"the reply is not JSON ({text!r})") from error
    is_object = isinstance(content, dict)
    key = next((key for key in SCORE_KEYS if is_object and key in content), None)
    if key is None:
        keys = f"keys {', '.join(map(str, content))}" if is_object else type(content).__name__
        raise RewardError(f"the reply has no list 'rewards' ({keys[:120]})")
    values = content[key]
    if not isinstance(values, list):
        raise RewardError(f"{key!r} in the reply has the type {type(values).__name__}, not list")
    if len(values) != number:
        raise RewardError(f"the reply has {len(values)} rewards for {number} completions")
    texts: list[list[Any]] = []
    for name in ("errors", "feedback"):
        column = content.get(name)
        is_complete = isinstance(column, list) and len(column) == number
        texts.append(column if is_complete else [None] * number)
    return [_score(value, *row) for value, *row in zip(values, *texts, strict=True)]


def _score(value: Any, error: Any, feedback: Any) -> Score:
    if isinstance(value, bool) or not isinstance(value, int | float):
        reason = f": {error}" if isinstance(error, str) and error else ""
        return Score(
            None, error=f"the server returned {json.dumps(value):.80} instead of a number{reason}"
        )
    try:
        return Score(float(value), feedback=feedback if isinstance(feedback, str) else "")
    except OverflowError:
        return Score(None, error="the server returned a number that is too large")


class _Scored(BaseModel):
    model_config = ConfigDict(strict=True)
    index: int
    reward: FiniteFloat
    feedback: str = ""


class _Failed(BaseModel):
    model_config = ConfigDict(strict=True)
    index: int
    error: str


class _PartialReply(BaseModel):
    model_config = ConfigDict(strict=True)
    scored: list[_Scored]
    failed: list[_Failed]


def parse_partial_scores(reply: bytes, number: int) -> list[Score] | None:
    """The scores and errors in a reply for ``number`` completions; None unless it has each
    completion once.
    """
    try:
        content = _PartialReply.model_validate_json(reply)
    except ValidationError:
        return None
    scores = [(row.index, Score(row.reward, feedback=row.feedback)) for row in content.scored]
    for row in content.failed:
        error = f"the server returned no score: {row.error[:MAX_ERROR_LENGTH]}"
        scores.append((row.index, Score(None, error=error)))
    if sorted(index for index, _ in scores) != list(range(number)):
        return None
    return [score for _, score in sorted(scores, key=lambda entry: entry[0])]


def parse_addresses(target: str, where: str) -> list[str]:
    """The addresses in a comma-separated list. Raises UserError for an invalid one."""
    refuse_credentials(
        target, where, fix="set token_env to the environment variable with the server's token"
    )
    urls = [url.strip() for url in target.split(",")]
    for url in urls:
        try:
            parts = urlsplit(url)
            is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
            is_valid = is_http and (parts.port is None or parts.port > 0)
        except ValueError:
            is_valid = False
        if not is_valid:
            raise UserError(
                f"{url!r} is not a valid address",
                code="reward-address-invalid",
                where=where,
                fix="write an address such as http://host:port/get_reward",
            )
    if len(set(urls)) < len(urls):
        raise UserError(
            "duplicate server address",
            code="reward-address-duplicate",
            where=where,
            fix="list each server once",
        )
    return urls
