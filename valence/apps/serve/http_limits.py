"""Limits of a server on connections and request heads, before a client is authenticated."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import resource
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uvicorn import Server

MAX_HEADER_BYTES = 64 * 2**10
"""Maximum size of the request line and the headers of a request."""
MAX_HEADERS = 100
HEAD_SECONDS = 20.0
"""Time limit for the head of a request, and for a client to read a reply."""
MAX_CONNECTIONS = 4096
RESERVED_FILES = 128
"""File descriptors that are reserved for other purposes than connections."""
JSON_AND_CLOSE = [(b"content-type", b"application/json"), (b"connection", b"close")]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]*)(:\d{0,5})?")


def host_names(host: str, allowed: Iterable[str] = ()) -> frozenset[str]:
    """The names that clients may use for a server at ``host``, besides IP addresses. "*": any."""
    machine = socket.gethostname()
    return frozenset(
        name.lower().rstrip(".") for name in ("localhost", machine, host, *allowed) if name
    )


def is_allowed_host(header: str, names: frozenset[str]) -> bool:
    """Whether a Host header names this server.

    A malicious page can make its host name resolve to this server's address (DNS rebinding); its
    requests have that host name. An IP address cannot be rebound, so all of them are allowed.
    """
    if "*" in names:
        return True
    match = HOST.fullmatch(header.strip().lower())
    if match is None:
        return False
    name = match[1].rstrip(".")
    if name in names or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class RequestGuard:
    """Refuses requests with too many headers, an ambiguous length or another host's name before the
    application sees them.
    """

    def __init__(self, app: Application, names: frozenset[str]) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers: list[tuple[bytes, bytes]] = scope["headers"]
            size = len(scope["raw_path"]) + len(scope["query_string"])
            size += sum(len(name) + len(value) for name, value in headers)
            if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
                error = (
                    f"a request can have at most {MAX_HEADERS} headers with {MAX_HEADER_BYTES} "
                    f"bytes in total"
                )
                await _refuse(send, 431, error)
                return
            names = {name for name, _ in headers}
            if b"content-length" in names and b"transfer-encoding" in names:
                # a proxy may use the other one
                await _refuse(send, 400, "the body has both Content-Length and Transfer-Encoding")
                return
            hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
            if not all(is_allowed_host(host, self.names) for host in hosts):
                error = "this host name is not allowed; add it with --allowed-host"
                await _refuse(send, 421, error)
                return
        await self.app(scope, receive, send)


CLIENT_LEFT = 499
"""Status of a request after its client has disconnected."""
DRAIN_FACTOR = 2
"""A body that is too large is read to its end, up to this multiple of the limit."""


@dataclass(eq=False)
class BodyError(Exception):
    """Why a body was not read, with its HTTP status."""

    status: int
    message: str


@dataclass(eq=False)
class BodyReader:
    """Reads the bodies of requests within limits.

    limit: bytes of a body. total: bytes of all bodies that are being read. seconds: time limit.
    """

    limit: int
    total: int
    seconds: float
    num_bytes: int = 0
    """Bytes of the bodies that are being read."""

    async def read(self, receive: Receive) -> bytes:
        """The body of a request. Raises BodyError.

        A slightly larger body is read to its end and dropped: a client that still writes does not
        see the reply.
        """
        size, parts, is_complete = 0, list[bytes](), False
        try:
            async with asyncio.timeout(self.seconds):
                while not is_complete and size <= DRAIN_FACTOR * self.limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise BodyError(CLIENT_LEFT, "the client disconnected")
                    part: bytes = message.get("body", b"")
                    size += len(part)
                    self.num_bytes += len(part)
                    if size <= self.limit and self.num_bytes <= self.total:
                        parts.append(part)
                    else:
                        parts.clear()
                    is_complete = not message.get("more_body", False)
        except TimeoutError:
            raise BodyError(408, f"the body was not complete after {self.seconds:g} s") from None
        finally:
            self.num_bytes -= size
        if size > self.limit:
            raise BodyError(413, f"the body has more than {self.limit} bytes")
        if sum(map(len, parts)) < size:
            raise BodyError(503, "too many large requests at the same time")
        return b"".join(parts)


async def _refuse(send: Send, status: int, error: str) -> None:
    body = json.dumps({"error": error}).encode()
    headers = [*JSON_AND_CLOSE, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def raise_connection_limit() -> int:
    """Raise the limit of open files as far as allowed; return the number of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MAX_CONNECTIONS + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        MAX_CONNECTIONS
        if soft == resource.RLIM_INFINITY
        else max(min(MAX_CONNECTIONS, soft - RESERVED_FILES), 1)
    )


def limited_server(
    app: Any,
    names: frozenset[str],
    *,
    head_seconds: float = HEAD_SECONDS,
    max_connections: int,
    shutdown_seconds: int,
    **options: Any,
) -> Server:
    """A web server with limits on hosts, headers and connections.

    names: of ``host_names``. head_seconds: time limit of a request's head. shutdown_seconds: time
    for running requests to finish. options: further settings of uvicorn.
    """
    import uvicorn

    config = uvicorn.Config(
        RequestGuard(app, names),
        http=limited_protocol(head_seconds, max_connections),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=shutdown_seconds,
        **options,
    )
    return uvicorn.Server(config)


# ruff adds up the complexity of all methods
def limited_protocol(  # noqa: C901
    seconds: float, max_connections: int
) -> type[asyncio.Protocol]:
    """A class of HTTP connections for uvicorn.

    A connection is closed if its request head, or reading a reply, takes longer than ``seconds``.
    Beyond ``max_connections`` the connection that has been idle for longest is closed, or the new
    one if none is idle. h11 limits the size of incomplete events; httptools, which uvicorn prefers,
    does not.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    idle = dict[Any, None]()
    """Connections without a request, the longest idle ones first."""

    class LimitedProtocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                longest = next(iter(idle), self)
                idle.pop(longest, None)
                longest.transport.abort()
            if not transport.is_closing():
                idle[self] = None
                self._start_head_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            idle.pop(self, None)
            self._stop_head_timer()
            self._stop_write_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._has_request():
                idle.pop(self, None)
                self._stop_head_timer()
            else:  # the start of a head, or the rest of a body
                self._start_head_timer()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.transport.is_closing():
                self._limit_writing()
            elif not self._has_request():
                idle[self] = None
                if self.conn.trailing_data[0]:
                    self._start_head_timer()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._limit_writing()

        def send_400_response(self, msg: str) -> None:
            """Called while a RemoteProtocolError of h11 is handled."""
            error = sys.exc_info()[1]
            status = getattr(error, "error_status_hint", 400)
            self._refuse(
                status if status in (431, 501) else 400,
                f"{msg} {error}" if error is not None else msg,
            )

        def pause_writing(self) -> None:
            super().pause_writing()
            self._limit_writing()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_write_timer()

        def _has_request(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _head_is_late(self) -> None:
            if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
                self._refuse(408, f"the headers were not complete after {seconds:g} s")
            else:
                self.transport.abort()

        def _refuse(self, status: int, error: str) -> None:
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.abort()
                return
            body = json.dumps({"error": error}).encode()
            headers = [*JSON_AND_CLOSE, (b"content-length", b"%d" % len(body))]
            response = h11.Response(status_code=status, headers=headers)
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            if self._has_request():  # which needs no other reply
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self.transport.close()
            self._limit_writing()

        def _limit_writing(self) -> None:
            if self._write_timer is None:
                self._write_timer = self.loop.call_later(seconds, self.transport.abort)

        def _stop_write_timer(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

        def _start_head_timer(self) -> None:
            if self._head_timer is None and not self.transport.is_closing():
                self._head_timer = self.loop.call_later(seconds, self._head_is_late)

        def _stop_head_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return LimitedProtocol
