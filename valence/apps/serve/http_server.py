"""The HTTP server of all services: its socket, its bearer token, and limits on hosts, headers,
bodies and connections.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import json
import re
import resource
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from valence.errors import UserError

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
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that none is closed while it is reused."""
CLIENT_LEFT = 499
"""Status of a request after its client has disconnected."""
CLOSE, RETRY = {"Connection": "close"}, {"Retry-After": "1"}
"""Headers of responses to clients that may still be sending, and to those that can try again."""
DRAIN_FACTOR = 2
"""A body that is too large is read to its end, up to this multiple of the limit."""

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
    name = match[1].rstrip(".") if match else ""
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
        from starlette.responses import JSONResponse

        app: Any = self.app
        if scope["type"] == "http" and (problem := self._problem(scope)) is not None:
            status, error = problem
            app = JSONResponse({"error": error}, status, {"connection": "close"})
        await app(scope, receive, send)

    def _problem(self, scope: Mapping[str, Any]) -> tuple[int, str] | None:
        """The status and the error of a request that is refused."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            return 431, (
                f"a request can have at most {MAX_HEADERS} headers with {MAX_HEADER_BYTES} bytes "
                "in total"
            )
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            # a proxy may use the other one
            return 400, "the body has both Content-Length and Transfer-Encoding"
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if not all(is_allowed_host(host, self.names) for host in hosts):
            return 421, "this host name is not allowed; add it with --allowed-host"
        return None


def has_token(authorization: str, token: str) -> bool:
    """Whether an Authorization header, decoded as Latin-1, has this bearer token.

    The duration of the comparison does not depend on the number of equal characters.
    """
    scheme, _, credentials = authorization.partition(" ")
    is_equal = hmac.compare_digest(credentials.encode("latin-1"), token.encode())
    return is_equal and scheme.lower() == "bearer"


def is_json(content_type: str) -> bool:
    """Whether a Content-Type header is that of JSON.

    Web pages cannot send JSON to other sites without a preflight request, which is refused.
    """
    return content_type.partition(";")[0].strip().lower() == "application/json"


@dataclass(eq=False)
class RequestError(Exception):
    """Why a request is refused. details: further fields of the response."""

    status: int
    error: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


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
        """The body of a request. Raises RequestError.

        A slightly larger body is read to its end and dropped: a client that still writes does not
        see the reply.
        """
        size, parts, is_complete = 0, list[bytes](), False
        try:
            async with asyncio.timeout(self.seconds):
                while not is_complete and size <= DRAIN_FACTOR * self.limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RequestError(CLIENT_LEFT, "the client disconnected")
                    part: bytes = message.get("body", b"")
                    size += len(part)
                    self.num_bytes += len(part)
                    if size <= self.limit and self.num_bytes <= self.total:
                        parts.append(part)
                    else:
                        parts.clear()
                    is_complete = not message.get("more_body", False)
        except TimeoutError:
            error = f"the body was not complete after {self.seconds:g} s"
            raise RequestError(408, error, CLOSE) from None
        finally:
            self.num_bytes -= size
        if size > self.limit:
            raise RequestError(413, f"the body has more than {self.limit} bytes", CLOSE)
        if sum(map(len, parts)) < size:
            raise RequestError(503, "too many large requests at the same time", RETRY)
        return b"".join(parts)


def open_socket(
    host: str,
    port: int,
    *,
    has_tokens: bool,
    danger: str = "other machines could use the model and vote",
    fix: str = "remove --no-token or --host",
) -> socket.socket:
    """Open a listening socket.

    danger: what other machines could do without a token. fix: how to prevent that. Raises UserError
    if the port cannot be used, or if other machines could connect without a token.
    """
    try:
        infos = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = infos[0]
        is_local = all(
            ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in infos
        )
        if not has_tokens and not is_local:
            raise UserError(
                f"without a token, {danger}",
                code="server-token-missing",
                where=f"--host {host}",
                fix=fix,
            )
        listener = socket.create_server(address[:2], family=family, backlog=2048)
        # asyncio sets it only for sockets that have a protocol number; without it each small part
        # of a response may wait 40 ms for the client's acknowledgement
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        fix = "use another --port (0: any free port), or stop the program that uses this port"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            fix = "set --host to an address of this machine, or to 0.0.0.0 for all of them"
        elif error.errno == errno.EACCES:
            fix = "use a --port of 1024 or more"
        raise UserError(
            f"cannot listen on this address: {error}",
            code="server-cannot-listen",
            where=f"--host {host} --port {port}",
            fix=fix,
        ) from error


def raise_connection_limit() -> int:
    """Raise the limit of open files as far as allowed; return the number of connections."""
    needed = MAX_CONNECTIONS + RESERVED_FILES
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (needed if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if soft < needed:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    return max(min(MAX_CONNECTIONS, soft - RESERVED_FILES), 1)


def limited_server(
    app: Any,
    *,
    host: str,
    allowed_hosts: Iterable[str],
    shutdown_seconds: int,
    head_seconds: float = HEAD_SECONDS,
) -> Server:
    """A web server with limits on hosts, headers and connections.

    host: the name that the socket was opened with. allowed_hosts: further names that clients may
    use. shutdown_seconds: time for running requests to finish. head_seconds: time limit of a
    request's head.
    """
    import uvicorn

    config = uvicorn.Config(
        RequestGuard(app, host_names(host, allowed_hosts)),
        http=limited_protocol(head_seconds, raise_connection_limit()),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=shutdown_seconds,
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
            headers = [
                (b"content-type", b"application/json"),
                (b"connection", b"close"),
                (b"content-length", b"%d" % len(body)),
            ]
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
