"""HTTP client of one model server: time limits, and waiting for a server that was lost.

Every request ends in one of three ways: a reply, ``ServerLost`` (the server may come back, so that
``ServerPool`` repeats the request there or on another server), or UserError (waiting is useless).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from valence.errors import UserError
from valence.network import (
    as_the_environment_says,
    backoff,
    draw_jitter,
    refuse_credentials,
    routes,
)

CONNECT_SECONDS = 10.0
"""Time limit of connecting."""
HEALTH_SECONDS = 5.0
"""Time limit of the health check, which is never longer than that of a request."""
POLL_SECONDS = 0.25
"""Interval of health checks, and the first pause before a retry."""
MAX_PAUSE = 20.0
"""Maximum pause before a healthy server is asked again, in seconds."""
MAX_LOSSES = 3
"""Maximum number of consecutive losses of a server without any reply."""
MAX_IDLE_CONNECTIONS = 256
"""Maximum number of idle connections to a server while many requests are posted."""
LOST = (429, 502, 503, 504)
"""Statuses of a server, or of its proxy, that is unavailable or overloaded."""


class ServerLost(Exception):
    """The server cannot be reached, or is not healthy. It may come back."""


class ServerGone(UserError):
    """The server is not asked again: it did not come back in time, or is lost again and again."""

    def __init__(self, where: str, message: str, fix: str) -> None:
        super().__init__(message, code="rollout-server-lost", where=where, fix=fix)


class ServerHangs(UserError):
    """The server accepted a request and replies to nothing."""


class RequestRefused(UserError):
    """The server understood the request and refused it."""

    def __init__(self, where: str, status: int, message: str) -> None:
        self.status, self.message = status, message
        fix = FIXES.get(status, "read the server's log")
        super().__init__(
            f"the server refused the request with status {status}: {message}",
            code="rollout-server-refused",
            where=where,
            fix=fix,
        )


FIXES = {
    401: "set the environment variable VLLM_API_KEY to the server's key (OPENAI_API_KEY with "
    "rollout.engine: openai)",
    403: "use a key with permission for this request",
    404: "check rollout.url, and start the server as in `valence docs vllm`",
    400: "shorten the prompts or lower rollout.max_new_tokens, or start the server with higher "
    "limits",
}


def ignore_message(message: str) -> None:
    """The default of ``log``."""


class ServerClient:
    """One server.

    timeout: seconds for one request, and to wait for a lost server. key: its bearer
    token. health: a route with status 200 while the server is healthy. is_lost: further replies to
    ``post`` of a lost server. max_losses: see ``MAX_LOSSES``. revive: starts the server again.
    """

    def __init__(
        self,
        url: str,
        timeout: float,
        key: str | None = None,
        health: str = "/health",
        *,
        is_lost: Callable[[httpx.Response], bool] = lambda response: False,
        max_losses: int = MAX_LOSSES,
        revive: Callable[[], None] | None = None,
    ) -> None:
        self.url, self.timeout, self.health = server_root(url), timeout, health
        self.health_seconds = min(HEALTH_SECONDS, timeout)
        self.is_lost, self.max_losses, self.revive = is_lost, max_losses, revive
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        # no keep-alive: servers close connections after an error, and the next request would fail
        with as_the_environment_says(self.url):
            self._client = httpx.Client(
                base_url=self.url,
                headers=self.headers,
                timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
                limits=httpx.Limits(max_keepalive_connections=0),
                **routes(self.url),
            )

    def connect(self) -> httpx.AsyncClient:
        """A client for many requests at the same time; they have their own time limit."""
        return httpx.AsyncClient(
            base_url=self.url,
            headers=self.headers,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=MAX_IDLE_CONNECTIONS
            ),
            **routes(self.url),
        )

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def get(self, path: str, *, seconds: float | None = None) -> Any:
        """The reply to a GET, parsed as JSON. Raises ServerLost or UserError."""
        return self._parse(path, self._request("GET", path, None, seconds))

    def post(self, path: str, body: object = None) -> Any:
        """The reply to a POST of JSON, parsed as JSON. Raises ServerLost or UserError."""
        return self._parse(path, self._check_lost(path, self._request("POST", path, body, None)))

    async def post_async(self, http: httpx.AsyncClient, path: str, body: object) -> Any:
        """``post`` for many requests at the same time. http: from ``connect``."""
        try:
            async with asyncio.timeout(self.timeout):
                response = await http.post(path, json=body)
        except TimeoutError as error:
            raise await asyncio.to_thread(self.timeout_error, path, self.timeout) from error
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return self._parse(path, self._check_lost(path, response))

    def send(self, path: str, body: object = None, *, seconds: float | None = None) -> None:
        """A POST without a reply to read. Raises ServerLost or UserError."""
        self._check_status(path, self._request("POST", path, body, seconds))

    def _request(
        self, method: str, path: str, body: object, seconds: float | None
    ) -> httpx.Response:
        timeout = httpx.USE_CLIENT_DEFAULT if seconds is None else httpx.Timeout(seconds)
        try:
            return self._client.request(method, path, json=body, timeout=timeout)
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            raise self.timeout_error(path, self.timeout if seconds is None else seconds) from error
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _check_lost(self, path: str, response: httpx.Response) -> httpx.Response:
        if self.is_lost(response):
            status, text = response.status_code, response.text[:300]
            raise ServerLost(f"{self.url}{path}: status {status}: {text}")
        return response

    def _check_status(self, path: str, response: httpx.Response) -> None:
        status = response.status_code
        if status in LOST:
            raise ServerLost(f"{self.url}{path}: status {status}: {_error_message(response)}")
        if status >= 400:
            raise RequestRefused(self.url + path, status, _error_message(response))

    def _parse(self, path: str, response: httpx.Response) -> Any:
        self._check_status(path, response)
        try:
            return response.json()
        except json.JSONDecodeError as error:
            raise UserError(
                f"the reply is not JSON: {response.text[:200]!r}",
                code="rollout-server-protocol",
                where=self.url + path,
                fix="check that rollout.url is the address of a model server",
            ) from error

    def _unreachable(self, error: Exception) -> ServerLost:
        return ServerLost(f"{self.url}: {error or type(error).__name__}")

    def timeout_error(self, path: str, seconds: float) -> UserError:
        """The error of a request without a reply, depending on whether the server is healthy."""
        where = self.url + path
        if self.is_healthy():
            return UserError(
                f"no reply within {seconds:g} s, although the server is healthy",
                code="rollout-server-slow",
                where=where,
                fix="raise rollout.timeout, or lower rollout.max_new_tokens or "
                "rollout.num_rollouts; the server's log shows its load",
            )
        return ServerHangs(
            f"the server does not respond: no reply within {seconds:g} s, and none from "
            f"{self.url}{self.health}",
            code="rollout-server-hangs",
            where=where,
            fix="read the end of its log and restart it, then rerun the same command to resume",
        )

    # Health

    def is_healthy(self) -> bool:
        try:
            return self._client.get(self.health, timeout=self.health_seconds).status_code == 200
        except httpx.HTTPError:
            return False

    async def is_healthy_async(self, http: httpx.AsyncClient) -> bool:
        try:
            return (await http.get(self.health, timeout=self.health_seconds)).status_code == 200
        except httpx.HTTPError:
            return False

    async def wait_until_healthy(
        self, http: httpx.AsyncClient, error: Exception, num_losses: int
    ) -> None:
        """Block until the server, which was lost because of ``error``, is healthy.

        Raises ServerGone if that takes longer than ``timeout``, or after ``max_losses`` in a row.
        """
        if num_losses >= self.max_losses:
            raise ServerGone(
                self.url,
                f"the connection to the server was lost {num_losses} times in a row ({error})",
                "read the server's log",
            ) from error
        if self.revive is not None and not await self.is_healthy_async(http):
            await asyncio.to_thread(self.revive)
        deadline = time.monotonic() + self.timeout
        await asyncio.sleep(backoff(num_losses - 1, POLL_SECONDS, MAX_PAUSE, draw_jitter))
        while not await self.is_healthy_async(http):
            if time.monotonic() > deadline:
                raise ServerGone(
                    self.url,
                    f"the server is still unavailable after {self.timeout:g} s ({error})",
                    "check the address and the end of the server's log, or raise rollout.timeout",
                )
            await asyncio.sleep(POLL_SECONDS)


def server_root(url: str) -> str:
    """``http://host:8000`` for ``http://host:8000``, ``http://host:8000/`` and
    ``http://host:8000/v1``.
    """
    refuse_credentials(
        url,
        "rollout.url",
        fix="set the environment variable VLLM_API_KEY or OPENAI_API_KEY to the server's token",
    )
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"{url!r} is not a valid server address",
            code="rollout-url-invalid",
            where="rollout.url",
            fix="write an address such as http://127.0.0.1:8000",
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _error_message(response: httpx.Response) -> str:
    try:
        body = response.json()
    except json.JSONDecodeError:
        return response.text.strip()[:500] or "(empty body)"
    for key in ("error", "message"):
        body = body.get(key, body) if isinstance(body, dict) else body
    return str(body)[:500]
