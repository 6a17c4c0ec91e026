"""Rewards of servers: to POST /get_reward with ``{"query": [...], "prompts": [...], "labels":
[...]}`` they answer ``{"rewards": [...]}``; or, where some answers have no score, with status 500
and ``{"failed": [{"index", "error"}], "scored": [{"index", "reward"}]}``.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from valence.errors import UserError
from valence.network import as_the_environment_says, backoff, routes
from valence.rewards.calls import RewardError
from valence.types import Completion, Score

if TYPE_CHECKING:
    import httpx

MOST_BYTES = 64 * 2**20
"""Of one reply."""
FIRST_REST, LONGEST_REST = 1.0, 30.0
"""Seconds that a server which failed is asked last, doubled with each failure in a row."""
MAY_PASS = (408, 425, 429, 500, 502, 503, 504)
"""Statuses of a reply that another try may change."""
OVER = (408, 504)
"""Statuses that say that the time was over."""
IN_PART = 500
"""Status of a reply that has scores of some answers and says of the others why they have none."""
LONGEST_ERROR = 500
"""Letters of what a server says of an answer."""
LISTS = ("rewards", "scores")
"""Names of the numbers in a reply, the first that is there counts."""


@dataclass
class ServerState:
    """One address.

    ``rests_until``: when (of the client's clock) it may be asked like the others again.
    """

    url: str
    failures: int = 0
    rests_until: float = 0.0
    under_way: int = 0

    def failed(self, now: float, after: float) -> None:
        rest = backoff(self.failures, FIRST_REST, LONGEST_REST)
        self.failures += 1
        self.rests_until = now + max(rest, after)

    def answered(self) -> None:
        self.failures, self.rests_until = 0, 0.0


@dataclass
class Servers:
    """Servers that give the same rewards: a call goes to the least busy one, and from one that
    fails to the next; one that failed rests for a while and then is asked again. ``seconds``: that
    one of them may take for a call, from the first byte to the last.

    label: the column of the rows that is sent as ``labels``; None: "label" where there is one, else
    an empty text.
    """

    urls: Sequence[str]
    seconds: float = 60.0
    label: str | None = None
    token: str | None = field(default=None, repr=False)
    most_bytes: int = MOST_BYTES
    clock: Callable[[], float] = time.monotonic
    _client: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = field(
        default=None, repr=False
    )

    def __post_init__(self) -> None:
        self.servers = [ServerState(url) for url in self.urls]

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"servers": sorted(self.urls), "label": self.label}

    async def attempt(self, completions: Sequence[Completion]) -> list[Score]:
        body, unsent = self._body(completions)
        sent = [i for i in range(len(completions)) if i not in unsent]
        found = await self._from_any(body, len(sent)) if sent else []
        scores = dict(zip(sent, found, strict=True))
        return [scores[i] if i in scores else unsent[i] for i in range(len(completions))]

    async def close(self) -> None:
        if self._client is not None:
            await self._client[1].aclose()
            self._client = None

    # What is sent

    def _body(self, completions: Sequence[Completion]) -> tuple[bytes, dict[int, Score]]:
        """The request, and by their places the answers that are not in it, since something of them
        is not known.
        """
        rows: list[tuple[str, str, Any]] = []
        unsent: dict[int, Score] = {}
        for i, completion in enumerate(completions):
            row = self._row(completion)
            if isinstance(row, Score):
                unsent[i] = row
            else:
                rows.append(row)
        columns = zip(
            ("query", "prompts", "labels"),
            zip(*rows, strict=True) if rows else ((), (), ()),
            strict=True,
        )
        return json.dumps(dict(columns)).encode(), unsent

    def _row(self, completion: Completion) -> tuple[str, str, Any] | Score:
        prompt = completion.rendered or completion.prompt
        if not isinstance(prompt, str):
            return Score(None, error="the text that its chat was rendered as is not known")
        label = completion.info.get(self.label or "label")
        if label is None and self.label is not None:
            return Score(
                None,
                error=f"its row has nothing in the column {self.label!r}, which is to be sent as "
                f"label",
            )
        label = "" if label is None else label
        try:
            json.dumps(label, allow_nan=False)
        except (TypeError, ValueError):
            return Score(
                None, error=f"its label is a {type(label).__name__}, which JSON does not have"
            )
        return prompt + completion.text, prompt, label

    # To whom

    async def _from_any(self, body: bytes, number: int) -> list[Score]:
        """Of the first server that answers. Raises Failed when none does."""
        failures: list[tuple[ServerState, RewardError]] = []
        while server := self._next([server for server, _ in failures]):
            server.under_way += 1
            try:
                scores = await self._from(server, body, number)
            except RewardError as error:
                if error.passes and not server.failures:  # once, until it answers again
                    warnings.warn(
                        f"{server.url}: {error}; it is asked again, or another one", stacklevel=2
                    )
                server.failed(self.clock(), error.after)
                failures.append((server, error))
                continue
            finally:
                server.under_way -= 1
            server.answered()
            return scores
        said = "; ".join(f"{server.url}: {error}" for server, error in failures)
        waits = [error.after for _, error in failures if error.passes]
        late = any(error.late for _, error in failures)
        raise RewardError(said, passes=bool(waits), after=min(waits, default=0.0), late=late)

    def _next(self, tried: Sequence[ServerState]) -> ServerState | None:
        """Those that rest come last, the one whose rest ends first before the others."""
        now = self.clock()
        left = [server for server in self.servers if not any(server is each for each in tried)]
        return min(
            left,
            key=lambda server: (max(server.rests_until - now, 0.0), server.under_way),
            default=None,
        )

    async def _from(self, server: ServerState, body: bytes, number: int) -> list[Score]:
        import httpx

        try:
            async with asyncio.timeout(self.seconds):
                status, headers, reply = await self._post(server.url, body)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise RewardError(
                f"no answer within {self.seconds:g} s", passes=True, late=True
            ) from error
        except httpx.TransportError as error:
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise RewardError(f"no connection, or it broke ({said})", passes=True) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RewardError(f"no answer ({type(error).__name__}: {error})") from error
        if status == IN_PART and (in_part := scores_in_part(reply, number)) is not None:
            return in_part
        if status != 200:
            more = (
                f", to {headers['location']}: name that address"
                if 300 <= status < 400 and "location" in headers
                else ""
            )
            said = reply[:200].decode(errors="replace").strip()
            raise RewardError(
                f"it answered with status {status}{more}{f' ({said})' if said else ''}",
                passes=status in MAY_PASS,
                after=_seconds(headers.get("retry-after", "")),
                late=status in OVER,
            )
        return scores_in(reply, number)

    async def _post(self, url: str, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of the reply, whose length has a limit."""
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self.token}"} if self.token else {}
        )
        reply = bytearray()
        async with self._opened().stream("POST", url, content=body, headers=headers) as response:
            async for piece in response.aiter_bytes():
                reply += piece
                if len(reply) > self.most_bytes:
                    raise RewardError(f"its reply is longer than {self.most_bytes} bytes")
            return response.status_code, response.headers, bytes(reply)

    def _opened(self) -> httpx.AsyncClient:
        """Of the event loop that runs."""
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


# What comes back


def scores_in(reply: bytes, number: int) -> list[Score]:
    """The numbers of a reply to so many answers. Raises Failed when it is not one."""
    try:
        found: Any = json.loads(reply)
    except (ValueError, RecursionError) as error:
        raise RewardError(
            f"its reply is not JSON ({reply[:80].decode(errors='replace')!r})"
        ) from error
    name = next((name for name in LISTS if isinstance(found, dict) and name in found), None)
    if name is None:
        said = (
            f"names {', '.join(map(str, cast(dict[Any, Any], found)))}"
            if isinstance(found, dict)
            else f"a {type(found).__name__}"
        )
        raise RewardError(f"its reply has no list 'rewards' ({said[:120]})")
    values = found[name]
    if not isinstance(values, list):
        raise RewardError(f"its {name} are a {type(values).__name__}, where a list is wanted")
    if len(cast(list[Any], values)) != number:
        raise RewardError(f"it gave {len(cast(list[Any], values))} rewards for {number} answers")
    errors: Any = found.get("errors")
    reasons: list[Any] = (
        cast(list[Any], errors)
        if isinstance(errors, list) and len(cast(list[Any], errors)) == number
        else []
    )
    return [
        _score(value, reasons[i] if reasons else None)
        for i, value in enumerate(cast(list[Any], values))
    ]


def scores_in_part(reply: bytes, number: int) -> list[Score] | None:
    """The scores and failures by index of a reply to so many answers; None unless it has each
    answer once, with a finite number or a reason.
    """
    try:
        found: Any = json.loads(reply)
        scored, failed = found["scored"], found["failed"]
        rows: list[tuple[Any, Score]] = [(row["index"], _in_part(row["reward"])) for row in scored]
        rows += [(row["index"], _reason(row["error"])) for row in failed]
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None
    if not isinstance(scored, list) or not isinstance(failed, list):
        return None
    if any(type(index) is not int for index, _ in rows) or sorted(
        index for index, _ in rows
    ) != list(range(number)):
        return None
    scores: dict[int, Score] = dict(rows)
    return [scores[index] for index in range(number)]


def _in_part(value: Any) -> Score:
    """Raises ValueError or OverflowError unless it is a finite number."""
    if type(value) not in (int, float) or not math.isfinite(number := float(value)):
        raise ValueError("no finite number")
    return Score(number)


def _reason(error: Any) -> Score:
    """Raises ValueError unless it is a text."""
    if not isinstance(error, str):
        raise ValueError("no text")
    return Score(None, error=f"the server gave no score: {error[:LONGEST_ERROR]}")


def _score(value: Any, reason: Any) -> Score:
    """Whether it is finite is asked later, of all scores alike."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        why = f": {reason}" if isinstance(reason, str) and reason else ""
        return Score(
            None, error=f"the server gave {json.dumps(value):.80} where a number is wanted{why}"
        )
    try:
        return Score(float(value))
    except OverflowError:
        return Score(None, error="the server gave a number that is too large")


def _seconds(retry_after: str) -> float:
    """Of a Retry-After header, in seconds or as a date; 0 without one that can be read."""
    try:
        return max(0.0, float(int(retry_after)))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


def addresses(target: str, where: str) -> list[str]:
    """The addresses that a comma stands between. Raises UserError for what is none."""
    found = [each.strip() for each in target.split(",")]
    for url in found:
        try:
            parts = urlsplit(url)
            good = (
                parts.scheme in ("http", "https")
                and bool(parts.hostname)
                and (parts.port is None or parts.port > 0)
            )
        except ValueError:
            good = False
        if not good:
            raise UserError(
                f"{url!r} is no address",
                code="reward-address-invalid",
                where=where,
                fix="write http://host:port/get_reward",
            )
    if len(set(found)) < len(found):
        raise UserError(
            "an address stands there twice",
            code="reward-address-duplicate",
            where=where,
            fix="name each server once",
        )
    return found
