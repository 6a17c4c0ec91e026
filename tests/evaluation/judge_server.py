"""A server for /v1/chat/completions that judges with a function."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Opinion = Callable[[Mapping[str, Any]], Any]
"""Takes the JSON object that the judge is shown, and returns the text of its reply, a status, or a
number of seconds to wait and a text.
"""


@dataclass
class JudgeServer:
    """requests: the bodies of all requests. usage: tokens that are reported, None for none."""

    url: str
    opinion: Opinion
    usage: tuple[int, int] | None = (100, 10)
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tokens: list[str | None] = field(default_factory=list["str | None"])
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def shown(self) -> list[dict[str, Any]]:
        return [json.loads(request["messages"][1]["content"]) for request in self.requests]


@contextmanager
def judge_server(opinion: Opinion) -> Iterator[JudgeServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.requests.append(body)
                server.tokens.append(self.headers.get("Authorization"))
            reply = server.opinion(json.loads(body["messages"][1]["content"]))
            status, delay = 200, 0.0
            if isinstance(reply, int):
                status, reply = reply, ""
            elif isinstance(reply, tuple):
                delay, reply = reply
            time.sleep(delay)
            content: dict[str, Any] = {"choices": [{"message": {"content": reply}}]}
            if server.usage is not None:
                names = ("prompt_tokens", "completion_tokens")
                content["usage"] = dict(zip(names, server.usage, strict=True))
            if status != 200:
                content = {"error": {"message": "not now"}}
            data = json.dumps(content).encode()
            self.send_response(status if self.path == "/v1/chat/completions" else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        httpd.daemon_threads = True
        server = JudgeServer(f"http://127.0.0.1:{httpd.server_port}/v1", opinion)
        thread = threading.Thread(target=httpd.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            httpd.shutdown()
            thread.join()


def winners(winner: str, **others: str) -> str:
    return json.dumps({"reason": "so", "winners": {"quality": winner, **others}})


def longer(shown: Mapping[str, Any]) -> str:
    """Prefers the longer answer."""
    first, second = len(shown["first"]), len(shown["second"])
    return winners("tie" if first == second else "first" if first > second else "second")


def always_first(shown: Mapping[str, Any]) -> str:
    del shown
    return winners("first")
