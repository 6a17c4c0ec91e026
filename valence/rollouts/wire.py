"""Talking to a server over HTTP: deadlines, and errors that say what to look at."""

from __future__ import annotations

import json
import random
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

from valence.errors import UserError
from valence.network import as_the_environment_says, routes

CONNECT = 10.0
"""Seconds to wait for a connection."""

PATIENCE = 5.0
"""Seconds in which a server that is well says so."""

POLL = 0.25
"""Seconds between looks at whether a server is back."""

LONGEST = 20.0
"""Seconds to wait at most before a server that is well is asked again."""

AWAY = (429, 502, 503, 504)
"""What a server, or a proxy before it, answers while it is not well, or has too much to do."""


class Lost(Exception):
    """The server is gone, or not well. It may come back."""


def address(url: str) -> str:
    """The server's root: ``http://host:8000`` of that, of ``http://host:8000/`` and of
    ``http://host:8000/v1``.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"{url!r} is no address of a server",
            code="rollout-url-invalid",
            where="rollout.url",
            fix="write it as http://127.0.0.1:8000",
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Wire:
    """One server.

    ``timeout``: seconds that it may take for one request, and to come back when it is gone.
    ``health``: a route that answers with 200 while the server is well.
    """

    def __init__(
        self, url: str, timeout: float, key: str | None = None, health: str = "/health"
    ) -> None:
        self.url, self.timeout, self.health = address(url), timeout, health
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        # No connection is kept: a server closes its side after an error, and the next request would
        # seem to fail.
        with as_the_environment_says(self.url):
            self._client = httpx.Client(
                base_url=self.url,
                headers=self.headers,
                timeout=httpx.Timeout(timeout, connect=CONNECT),
                limits=httpx.Limits(max_keepalive_connections=0),
                **routes(self.url),
            )

    def get(self, path: str, *, seconds: float | None = None) -> Any:
        """The answer to a GET, as JSON.

        Raises Lost, or UserError where waiting for the server would not help.
        """
        return self.read(path, self._ask("GET", path, None, seconds))

    def post(self, path: str, body: object = None) -> Any:
        """The answer to a POST of ``body`` as JSON.

        Raises Lost, or UserError where waiting for the server would not help.
        """
        return self.read(path, self._ask("POST", path, body, None))

    def tell(self, path: str, body: object = None, *, seconds: float | None = None) -> None:
        """A POST whose answer says nothing but that it worked."""
        self.passed(path, self._ask("POST", path, body, seconds))

    def _ask(self, method: str, path: str, body: object, seconds: float | None) -> httpx.Response:
        patience = httpx.USE_CLIENT_DEFAULT if seconds is None else httpx.Timeout(seconds)
        try:
            return self._client.request(method, path, json=body, timeout=patience)
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            raise self.hangs(path, self.timeout if seconds is None else seconds) from error
        except httpx.HTTPError as error:
            raise self.lost(error) from error

    def passed(self, path: str, response: httpx.Response) -> None:
        """Raises what a response's status means."""
        if response.status_code in AWAY:
            raise Lost(f"{self.url}{path} answers {response.status_code}: {said(response)}")
        if response.status_code >= 400:
            raise Refused(self.url + path, response.status_code, said(response))

    def read(self, path: str, response: httpx.Response) -> Any:
        """What a response holds, or what its status means, raised."""
        self.passed(path, response)
        try:
            return response.json()
        except json.JSONDecodeError as error:
            raise UserError(
                f"it answers no JSON: {response.text[:200]!r}",
                code="rollout-server-protocol",
                where=self.url + path,
                fix="see that this is a server of models",
            ) from error

    def lost(self, error: Exception) -> Lost:
        """That the server cannot be reached."""
        return Lost(f"{self.url}: {error or type(error).__name__}")

    def hangs(self, path: str, seconds: float) -> UserError:
        """What to say of a request that got no answer: is the server slow, or stuck?"""
        if self.healthy():
            code = "rollout-server-slow"
            what = f"no answer in {seconds:g} s, though the server says that it is well"
            fix = (
                "raise rollout.timeout, or lower rollout.max_new_tokens or "
                "rollout.num_rollouts; its log says how busy it is"
            )
        else:
            code = "rollout-server-hangs"
            what = (
                f"no answer in {seconds:g} s, and none to {self.url}{self.health} either: the "
                f"server hangs"
            )
            fix = (
                "look at the end of its log, and start it again; the run goes on from its last "
                "checkpoint"
            )
        return UserError(what, code=code, where=self.url + path, fix=fix)

    def healthy(self) -> bool:
        """Whether it says that it is well."""
        try:
            return self._client.get(self.health, timeout=PATIENCE).status_code == 200
        except httpx.HTTPError:
            return False

    def wait(self, why: Lost, attempt: int = 1) -> None:
        """Until the server is well, and longer each time.

        Raises UserError when it is not within ``timeout``.
        """
        until = time.monotonic() + self.timeout
        time.sleep(min(LONGEST, POLL * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)))
        while not self.healthy():
            if time.monotonic() > until:
                raise UserError(
                    f"the server went away and is not back after {self.timeout:g} s ({why})",
                    code="rollout-server-lost",
                    where=self.url,
                    fix="look at the end of its log and start it again, or raise rollout.timeout",
                )
            time.sleep(POLL)

    def close(self) -> None:
        """Gives back connections."""
        self._client.close()


class Refused(UserError):
    """The server understood, and said no."""

    def __init__(self, where: str, status: int, message: str) -> None:
        self.status, self.message = status, message
        fix = FIXES.get(status, "see the server's log")
        super().__init__(
            f"the server answers {status}: {message}",
            code="rollout-server-refused",
            where=where,
            fix=fix,
        )


FIXES = {
    401: "name the server's key in the environment (VLLM_API_KEY, or OPENAI_API_KEY with engine "
    "openai)",
    403: "name a key in the environment that may do this",
    404: "see docs/vllm.md for how such a server is started, and that rollout.url is its address",
    400: "shorten prompts or answers (rollout.max_new_tokens), or start the server with other "
    "limits",
}


def said(response: httpx.Response) -> str:
    """The message in an error's body."""
    try:
        body = response.json()
    except json.JSONDecodeError:
        return response.text.strip()[:500] or "(nothing more)"
    for step in ("error", "message"):
        body = body.get(step, body) if isinstance(body, dict) else body
    return str(body)[:500]
