"""Run the web application of a service."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from valence.errors import UserError
from valence.rewards.http_limits import (
    HEAD_SECONDS,
    MAX_HEADER_BYTES,
    RequestGuard,
    host_names,
    limited_protocol,
    raise_connection_limit,
)
from valence.rewards.server import listening
from valence.serving.app import WebService

SHUTDOWN_SECONDS = 5


def open_socket(
    host: str,
    port: int,
    *,
    has_tokens: bool,
    danger: str = "other machines could chat with the model, and vote",
    fix: str = "leave out --no-token or --host",
) -> socket.socket:
    """A socket that takes connections. Raises UserError when the port cannot be used, or when other
    machines could reach the service without a token. danger: what these could do then. fix: how to
    prevent it.
    """
    return listening(
        host,
        port,
        guarded=has_tokens,
        danger=danger,
        fix=fix,
    )


def links_of(service: WebService, host: str, port: int) -> list[tuple[str, str]]:
    """The raters, and the link that each of them opens.

    host: the address that the service listens at. One that stands for all addresses of this machine
    is shown as the machine's name.
    """
    name = socket.gethostname() if ipaddress.ip_address(host).is_unspecified else host
    base = f"http://[{name}]:{port}/" if ":" in name else f"http://{name}:{port}/"
    return [(rater, f"{base}#token={token}") for token, rater in service.tokens.items()] or [
        ("", base)
    ]


def serve(
    service: WebService,
    place: socket.socket,
    *,
    host: str,
    allowed_hosts: Sequence[str] = (),
    print_line: Callable[[str], None] = print,
    shutdown_seconds: int = SHUTDOWN_SECONDS,
) -> None:
    """Serve at a socket until a signal comes, then close the service.

    host: the name that the socket was asked for. shutdown_seconds: time for running requests to
    finish after a signal.
    """
    import uvicorn

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        # here, since a signal ends the process as soon as the server returns
        try:
            await asyncio.to_thread(service.close)
        except UserError as error:
            print_line(str(error))
            print_line(service.recovery)
        print_line(service.summary)

    address, port, *_ = place.getsockname()
    links = links_of(service, address.partition("%")[0], port)
    for line in service.greeting(links):
        print_line(line)
    app = service.application(lifespan)
    logging.getLogger("uvicorn.error").addFilter(_is_not_logged)
    config = uvicorn.Config(
        RequestGuard(app, host_names(host, allowed_hosts)),
        http=limited_protocol(HEAD_SECONDS, raise_connection_limit()),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=shutdown_seconds,
    )
    asyncio.run(uvicorn.Server(config).serve(sockets=[place]))


def _is_not_logged(record: logging.LogRecord) -> bool:
    """Whether uvicorn's message is not about an error that the application has logged already."""
    return record.exc_info is None
