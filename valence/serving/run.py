"""Run the web application of a service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from valence.rewards.http_limits import (
    HEAD_SECONDS,
    MAX_HEADER_BYTES,
    RequestGuard,
    host_names,
    limited_protocol,
    raise_connection_limit,
)
from valence.rewards.server import listening
from valence.serving.app import ChatService, application

SHUTDOWN_SECONDS = 5


def links_of(service: ChatService, host: str, port: int) -> list[tuple[str, str]]:
    """The raters, and the link that each of them opens."""
    shown = f"[{host}]" if ":" in host else host
    base = f"http://{shown}:{port}/"
    return [(rater, f"{base}#token={token}") for token, rater in service.tokens.items()] or [
        ("", base)
    ]


def serve(
    service: ChatService,
    *,
    host: str,
    port: int,
    allowed_hosts: Sequence[str] = (),
    tell: Callable[[str], None] = print,
) -> None:
    """Serve until a signal comes. Raises UserError when the port cannot be used, or when other
    machines could reach the service without a token.
    """
    import uvicorn

    danger = "other machines could chat with the model, and vote"
    with listening(host, port, guarded=bool(service.tokens), danger=danger) as place:
        address, actual_port, *_ = place.getsockname()
        for rater, link in links_of(service, address, actual_port):
            tell(f"{rater}: {link}" if rater else link)
        tell(f"votes are written to {service.store.out}; stop with Ctrl-C")
        config = uvicorn.Config(
            RequestGuard(application(service), host_names(host, allowed_hosts)),
            http=limited_protocol(HEAD_SECONDS, raise_connection_limit()),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        try:
            asyncio.run(uvicorn.Server(config).serve(sockets=[place]))
        finally:
            service.model.close()
            service.store.close()
    tell(f"{service.store.num_votes} votes in {service.store.out}")
