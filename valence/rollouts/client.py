"""HTTP client of a model server: time limits, retries after the server was lost, and many requests
at the same time.

Every request ends in one of three ways: a reply, ``ServerLost`` (the server may come back, so that
``retry`` and ``post_all`` wait for it and repeat the request), or UserError (waiting is useless).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx

from valence.errors import UserError
from valence.network import as_the_environment_says, backoff, draw_jitter, routes

CONNECT_SECONDS = 10.0
"""Time limit of connecting."""
HEALTH_SECONDS = 5.0
"""Time limit of the health check."""
POLL_SECONDS = 0.25
"""Interval of health checks, and the first pause before a retry."""
MAX_PAUSE = 20.0
"""Maximum pause before a healthy server is asked again, in seconds."""
MAX_LOSSES = 3
"""Maximum number of consecutive losses of a server without any reply."""
LOST = (429, 502, 503, 504)
"""Statuses of a server, or of its proxy, that is unavailable or overloaded."""

MakeBodies = Callable[[Collection[int]], Mapping[int, object]]
"""Makes the requests of some positions."""
HandleReply = Callable[[int, Any], object]
"""Receives a position and its reply. May raise ServerLost: the request is repeated."""


class ServerLost(Exception):
    """The server cannot be reached, or is not healthy. It may come back."""


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
    404: "check rollout.url, and start the server as in docs/vllm.md",
    400: "shorten the prompts or lower rollout.max_new_tokens, or start the server with higher "
    "limits",
}


def ignore_message(message: str) -> None:
    """The default of ``log``."""


class ServerClient:
    """One server.

    timeout: seconds for one request, and to wait for a lost server. key: its bearer
    token. health: a route with status 200 while the server is healthy. is_lost: further replies
    of a lost server. max_losses: see ``MAX_LOSSES``. revive: starts the server
    again. log: receives a message for every wait.
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
        log: Callable[[str], None] = ignore_message,
    ) -> None:
        self.url, self.timeout, self.health = server_root(url), timeout, health
        self.is_lost, self.max_losses, self.revive, self.log = is_lost, max_losses, revive, log
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

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    # One request

    def get(self, path: str, *, seconds: float | None = None) -> Any:
        """The reply to a GET, parsed as JSON. Raises ServerLost or UserError."""
        return self._parse(path, self._request("GET", path, None, seconds))

    def post(self, path: str, body: object = None) -> Any:
        """The reply to a POST of JSON, parsed as JSON. Raises ServerLost or UserError."""
        return self._parse(path, self._request("POST", path, body, None))

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
        if self.is_healthy():
            code = "rollout-server-slow"
            reason = f"no reply within {seconds:g} s, although the server is healthy"
            fix = (
                "raise rollout.timeout, or lower rollout.max_new_tokens or rollout.num_rollouts; "
                "the server's log shows its load"
            )
        else:
            code = "rollout-server-hangs"
            reason = (
                f"the server does not respond: no reply within {seconds:g} s, and none from "
                f"{self.url}{self.health}"
            )
            fix = "read the end of its log and restart it, then rerun the same command to resume"
        return UserError(reason, code=code, where=self.url + path, fix=fix)

    def is_healthy(self) -> bool:
        try:
            return self._client.get(self.health, timeout=HEALTH_SECONDS).status_code == 200
        except httpx.HTTPError:
            return False

    # Retries

    def retry(self, work: Callable[[], Any]) -> Any:
        """The result of ``work``, which is repeated after a loss of the server."""
        num_losses = 0
        while True:
            try:
                return work()
            except ServerLost as error:
                num_losses += 1
                self._recover(error, num_losses)

    def _recover(self, error: ServerLost, num_losses: int) -> None:
        """Block until the server is healthy.

        Raises UserError if that takes longer than ``timeout``, or after ``max_losses`` in a row.
        """
        if num_losses >= self.max_losses:
            raise UserError(
                f"the connection to the server was lost {num_losses} times in a row ({error})",
                code="rollout-server-lost",
                where=self.url,
                fix="read the server's log",
            ) from error
        self.log(f"{error}; waiting for the server")
        if self.revive is not None and not self.is_healthy():
            self.revive()
        deadline = time.monotonic() + self.timeout
        time.sleep(backoff(num_losses - 1, POLL_SECONDS, MAX_PAUSE, draw_jitter))
        while not self.is_healthy():
            if time.monotonic() > deadline:
                raise UserError(
                    f"the server is still unavailable after {self.timeout:g} s ({error})",
                    code="rollout-server-lost",
                    where=self.url,
                    fix="check the address and the end of the server's log, or raise "
                    "rollout.timeout",
                )
            time.sleep(POLL_SECONDS)

    # Many requests

    def post_all(
        self,
        route: str,
        positions: Collection[int],
        make_bodies: MakeBodies,
        handle: HandleReply,
        concurrency: int,
    ) -> None:
        """Post a request for every position, ``concurrency`` at a time, until all are handled.

        make_bodies: receives the remaining positions, again each time that the server was lost.
        """
        remaining, num_losses = dict.fromkeys(positions), 0

        def handle_once(position: int, reply: Any) -> None:
            handle(position, reply)
            del remaining[position]

        while remaining:
            before = len(remaining)
            try:
                work = self._post_round(route, make_bodies(remaining), handle_once, concurrency)
                _run(work)
            except ServerLost as error:
                num_losses = 1 if len(remaining) < before else num_losses + 1
                self._recover(error, num_losses)

    async def _post_round(
        self, route: str, bodies: Mapping[int, object], handle: HandleReply, concurrency: int
    ) -> None:
        """Handle each reply as it arrives. The first error cancels all requests."""
        slots = asyncio.Semaphore(concurrency)
        async with httpx.AsyncClient(
            base_url=self.url,
            headers=self.headers,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=concurrency),
            **routes(self.url),
        ) as client:

            async def post(position: int) -> tuple[int, Any]:
                async with slots:
                    return position, await self._post_async(client, route, bodies[position])

            tasks = [asyncio.create_task(post(position)) for position in bodies]
            try:
                for task in asyncio.as_completed(tasks):
                    handle(*await task)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _post_async(self, client: httpx.AsyncClient, route: str, body: object) -> Any:
        try:
            async with asyncio.timeout(self.timeout):
                response = await client.post(route, json=body)
        except TimeoutError as error:
            raise await asyncio.to_thread(self.timeout_error, route, self.timeout) from error
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if self.is_lost(response):
            status, text = response.status_code, response.text[:300]
            raise ServerLost(f"{self.url}{route}: status {status}: {text}")
        return self._parse(route, response)


def _run(work: Any) -> None:
    """Run a coroutine; in a thread if an event loop is running here, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    with ThreadPoolExecutor(1, "valence-requests") as thread:
        thread.submit(asyncio.run, work).result()


def server_root(url: str) -> str:
    """``http://host:8000`` for ``http://host:8000``, ``http://host:8000/`` and
    ``http://host:8000/v1``.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"{url!r} is not a valid address of a server",
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
