"""Run the web application of a service."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from valence.apps.serve.app import WebService
from valence.apps.serve.http_server import limited_server
from valence.errors import UserError

SHUTDOWN_SECONDS = 5


def links_of(service: WebService, host: str, port: int) -> list[tuple[str, str]]:
    """The raters and their links.

    host: the address that the service listens on. The address for all interfaces is replaced by the
    name of the machine.
    """
    name = socket.gethostname() if ipaddress.ip_address(host).is_unspecified else host
    base = f"http://[{name}]:{port}/" if ":" in name else f"http://{name}:{port}/"
    return [(rater, f"{base}#token={token}") for token, rater in service.tokens.items()] or [
        ("", base)
    ]


def serve(
    service: WebService,
    listener: socket.socket,
    *,
    host: str,
    allowed_hosts: Sequence[str] = (),
    print_line: Callable[[str], None] = print,
    shutdown_seconds: int = SHUTDOWN_SECONDS,
) -> None:
    """Serve on a socket until a signal arrives, then close the service.

    host: the name that was passed to ``open_socket``. shutdown_seconds: time for running requests
    to finish after a signal.
    """

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        # here, because a signal ends the process as soon as the server returns
        try:
            await asyncio.to_thread(service.close)
        except UserError as error:
            print_line(str(error))
            print_line(service.recovery)
        print_line(service.summary)

    address, port, *_ = listener.getsockname()
    links = links_of(service, address.partition("%")[0], port)
    for line in service.greeting(links):
        print_line(line)
    app = service.application(lifespan)
    logging.getLogger("uvicorn.error").addFilter(_is_not_logged)
    server = limited_server(
        app, host=host, allowed_hosts=allowed_hosts, shutdown_seconds=shutdown_seconds
    )
    asyncio.run(server.serve(sockets=[listener]))


def _is_not_logged(record: logging.LogRecord) -> bool:
    """Whether a message of uvicorn is not about an error, which the application has logged."""
    return record.exc_info is None
