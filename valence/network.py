"""Connect to servers, and compute the pause before a retry."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from valence.errors import UserError

DEADLINE = 3.0
"""Time limit of a request to the hub, in seconds."""

CREDENTIALS = re.compile(r"(?:^|,)\s*[a-z][\w+.-]*://[^/?#\s]*@", re.IGNORECASE)
"""A user name or password in an address, or in one of a comma-separated list."""

draw_jitter = random.SystemRandom().random
"""Random numbers for pauses, independent of the random state of the run."""


def has_credentials(address: str) -> bool:
    """Whether an address, or one of a comma-separated list, contains a user name or password."""
    return CREDENTIALS.search(address) is not None


def refuse_credentials(
    address: str, where: str, *, fix: str, code: str = "address-credentials"
) -> None:
    """Raise UserError for an address with a user name or password: addresses are printed, saved and
    published.

    where: without the credentials. fix: where to put them instead.
    """
    if has_credentials(address):
        raise UserError(
            "the address contains a user name or password",
            code=code,
            where=where,
            fix=f"remove them from the address, and {fix}",
        )


def backoff(
    attempt: int, first: float, longest: float, draw: Callable[[], float] | None = None
) -> float:
    """Seconds before the next try: ``first``, doubled for each attempt (from 0) up to ``longest``.

    draw: random numbers in [0, 1), which determine half of the pause, so that clients do not retry
    at the same time.
    """
    seconds = min(longest, first * 2 ** min(attempt, 16))
    return seconds if draw is None else seconds * (0.5 + 0.5 * draw())


def retry_after(value: str) -> float:
    """Seconds of a Retry-After header with a number or a date; 0 if it has neither."""
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


def within(deadline: float, action: Callable[[], str]) -> str:
    """The result of a request, or its error as text.

    A request without a reply within the deadline is abandoned.
    """
    answers: list[str] = []

    def ask() -> None:
        try:
            answers.append(action())
        # the HTTP library, and its errors, depend on the version of huggingface_hub
        except Exception as error:
            answers.append(f"{error}" or type(error).__name__)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(deadline)
    return answers[0] if answers else f"no reply within {deadline:g} seconds"


def ask_hub() -> str:
    """Why the hub cannot be reached; empty if it replies."""
    import httpx
    from huggingface_hub import constants

    def ask() -> str:
        status = httpx.head(constants.ENDPOINT, timeout=DEADLINE, follow_redirects=True).status_code
        return "" if status < 500 else f"status {status}"

    return within(DEADLINE, ask)


@cache
def hub_problem() -> str:
    """``ask_hub``, once per process."""
    return ask_hub()


def routes(*urls: str) -> dict[str, Any]:
    """Proxy settings of an httpx client for these servers.

    Requests without TLS, which are for the local network, never use a proxy. Requests with TLS
    follow ``HTTPS_PROXY``, ``ALL_PROXY`` and ``NO_PROXY``.
    """
    return {
        "trust_env": any(urlsplit(url).scheme == "https" for url in urls),
        "mounts": {"http://": None},
    }


@contextmanager
def as_the_environment_says(where: str) -> Iterator[None]:
    """Raise UserError if a client cannot be created because of proxies or certificates of the
    environment.
    """
    import httpx

    try:
        yield
    except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
        raise UserError(
            f"a proxy or certificate in the environment variables is invalid: {error}",
            code="network-environment",
            where=where,
            fix="correct or unset HTTPS_PROXY, ALL_PROXY, NO_PROXY and SSL_CERT_FILE",
        ) from error
