"""Helpers of the tests of rewards: completions, entries of a recipe, and a scripted server."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from valence.config.schema import RewardSettings
from valence.rewards import reward_of, score_all
from valence.rewards.calls import Calls
from valence.rewards.combine import Combined
from valence.types import Completion, Message, Score
from valence.user_code.attempt import separate_working_directory


def answer(
    text: str,
    prompt: str | tuple[Message, ...] = "q ",
    *,
    tokens: Sequence[int] | None = None,
    rendered: str = "",
    **info: Any,
) -> Completion:
    ids = tuple(range(len(text.split()))) if tokens is None else tuple(tokens)
    return Completion(
        prompt_id="p",
        tokens=ids,
        logps=(-1.0,) * len(ids),
        text=text,
        stop="eos",
        prompt=prompt,
        rendered=rendered,
        info=info,
    )


def answers(number: int) -> list[Completion]:
    return [answer(f"a{i}") for i in range(number)]


def entry(target: str, *, timeout: float = 5.0, retries: int = 0, **options: Any) -> RewardSettings:
    """An entry of a recipe's reward section, which gives up sooner than the defaults do."""
    return RewardSettings(reward=target, timeout=timeout, retries=retries, **options)


def reward(target: str, **options: Any) -> Combined:
    return reward_of([entry(target, **options)])


def calls_of(result: Combined, part: int = 0) -> Calls:
    outcome: Any = result.parts[part].reward
    return getattr(outcome, "inner", outcome)


def scores(results: Any, completions: Sequence[Completion]) -> list[Score]:
    return score_all(results, completions)


def values(results: Any, completions: Sequence[Completion]) -> list[float | None]:
    return [score.value for score in score_all(results, completions)]


def error(result: Any, completions: Sequence[Completion]) -> str:
    """The error of all of them, none of which has a score."""
    outcome = score_all(result, completions)
    assert [score.value for score in outcome] == [None] * len(completions)
    assert len({score.error for score in outcome}) == 1
    return outcome[0].error


def has_words(text: str, *words: object) -> bool:
    """Whether a message has these names and numbers in it, in any order."""
    return all(re.search(rf"(?<!\w){re.escape(str(word))}(?!\w)", text) for word in words)


def skip_if_threads_share_a_folder() -> None:
    """Some containers forbid threads a separate working directory."""
    with ThreadPoolExecutor(1) as thread:
        if not thread.submit(separate_working_directory).result():
            pytest.skip("this system does not allow it")


def wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.01)


@dataclass
class Reply:
    """What a server answers. ``raw``: the bytes of its body; ``cut``: announced bytes that never
    come; ``hangs``: until the server ends; ``drip``: seconds between two bytes."""

    rewards: Any = None
    status: int = 200
    raw: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    cut: int = 0
    hangs: bool = False
    drop: bool = False
    drip: float = 0.0

    @property
    def body(self) -> bytes:
        return json.dumps({"rewards": self.rewards}).encode() if self.raw is None else self.raw


Script = Callable[[dict[str, Any], int], Reply]


class RewardServer(ThreadingHTTPServer):
    """A server that records its requests.

    requests: the bodies. heads: their headers. max_concurrent: the largest number of requests at a
    time. connections: number of connections so far. open: number of open connections.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        self.requests, self.heads = list[dict[str, Any]](), list[dict[str, str]]()
        self.under_way = self.max_concurrent = self.connections = self.open = 0
        self.lock, self.over = threading.Lock(), threading.Event()
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/get_reward"

    def finish_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            self.connections, self.open = self.connections + 1, self.open + 1
        try:
            super().finish_request(request, client_address)
        finally:
            with self.lock:
                self.open -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that have gone are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        actual = self.server
        inputs = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with actual.lock:
            actual.requests.append(inputs)
            actual.heads.append(dict(self.headers))
            number, actual.under_way = len(actual.requests) - 1, actual.under_way + 1
            actual.max_concurrent = max(actual.max_concurrent, actual.under_way)
        try:
            reply = actual.script(inputs, number)
            self._send(reply)
        finally:
            with actual.lock:
                actual.under_way -= 1

    def _send(self, reply: Reply) -> None:
        if reply.hangs:
            self.server.over.wait()
        if reply.drop:
            self.close_connection = True
            return
        self.send_response(reply.status)
        for name, value in {
            "Content-Length": str(len(reply.body) + reply.cut),
            **reply.headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        for i in range(len(reply.body)) if reply.drip else ():
            self.wfile.write(reply.body[i : i + 1])
            self.wfile.flush()
            self.server.over.wait(reply.drip)
        self.wfile.write(b"" if reply.drip else reply.body)
        self.close_connection = self.close_connection or bool(reply.cut)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


@contextmanager
def server(script: Script | Reply | None = None, port: int = 0) -> Iterator[RewardServer]:
    """A server on a port of this host.

    Without a script a reward is the number in the answer, as of ``answers``.
    """
    inputs = (
        script
        if script is not None
        else lambda request, _: Reply([float(q.rpartition("a")[2]) for q in request["query"]])
    )
    message = RewardServer((lambda *_: inputs) if isinstance(inputs, Reply) else inputs, port)
    thread = threading.Thread(target=message.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield message
    finally:
        message.over.set()
        message.shutdown()
        message.server_close()
        thread.join()
