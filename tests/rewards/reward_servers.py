"""Rewards whose scores follow from the text, and servers for them in this process."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
from uvicorn import Server

from benchmarks.reward_server.hash_reward import hash_score
from valence.apps.serve.http_server import open_socket
from valence.apps.serve.reward_batches import Limits
from valence.apps.serve.reward_server import Service, web_server
from valence.types import Completion, Score

http_request = partial(httpx.request, verify=ssl.create_default_context())
"""As of httpx, which makes such a context for each request: that takes longer than the request."""
http_get, http_post = partial(http_request, "GET"), partial(http_request, "POST")


@dataclass
class Numbers:
    """Gives each answer its number. ``score``: what it gives instead; ``calls``: the answers of
    each call so far."""

    score: Callable[[Completion], Score] = lambda c: Score(hash_score(c.text))
    gate: threading.Event | None = None
    """It waits for it; with ``blocks`` nothing else runs in its event loop meanwhile."""
    blocks: bool = False
    name: str = "numbers"
    deterministic: bool = True
    calls: list[list[Completion]] = field(default_factory=list[list[Completion]])
    closed: bool = False

    async def __call__(self, completions: Sequence[Completion]) -> list[Score]:
        self.calls.append(list(completions))
        if self.gate is not None and self.blocks:
            self.gate.wait(30)
        elif self.gate is not None:
            await asyncio.to_thread(self.gate.wait, 30)
        return [self.score(c) for c in completions]

    async def close(self) -> None:
        self.closed = True


@dataclass
class Served:
    url: str
    reward: Any
    service: Service
    server: Server
    lines: list[str]

    def post(self, **body: Any) -> httpx.Response:
        return http_post(f"{self.url}/get_reward", json=body, timeout=30)

    @property
    def statuses(self) -> dict[int, int]:
        """How many requests for scores had which status."""
        return {
            int(sample.labels["status"]): int(sample.value)
            for metric in self.service.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "valence_reward_requests_total"
        }

    def raw(self) -> socket.socket:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return socket.create_connection((host, int(port)), timeout=30)


@contextmanager
def served(
    reward: Any,
    limits: Limits = Limits(),
    web: Mapping[str, Any] = {},
    *,
    is_ready: bool = True,
    **settings: Any,
) -> Iterator[Served]:
    """A server of the reward at a free port. web: settings of the web server. is_ready: what it
    says.
    """
    with served_service(Service(reward, limits, **settings), is_ready, **web) as server:
        yield server


@contextmanager
def served_as_command(target: str, *overrides: str, limits: Limits = Limits()) -> Iterator[Served]:
    """A server of what the command would serve."""
    from valence.cli.serve_reward import reward_service

    with served_service(
        reward_service(target, list(overrides), limits, token=None, ends=None)
    ) as server:
        yield server


@contextmanager
def served_service(service: Service, is_ready: bool = True, **web: Any) -> Iterator[Served]:
    lines = list[str]()
    with open_socket("127.0.0.1", 0, has_tokens=False) as place:
        server = web_server(service, place, log=lines.append, **web)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[place])))
        thread.start()
        url = f"http://127.0.0.1:{place.getsockname()[1]}"
        try:
            assert http_get(f"{url}/ready", timeout=30).status_code == (200 if is_ready else 503)
            yield Served(url, service.reward, service, server, lines)
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()
