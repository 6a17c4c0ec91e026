"""How servers are reached, and how long to pause before a retry."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from valence.errors import UserError

DEADLINE = 3.0
"""Seconds within which the hub has to answer."""

draw_jitter = random.SystemRandom().random
"""Random numbers for pauses. The program's random state belongs to the run, and forked processes
share it.
"""


def backoff(
    attempt: int, first: float, longest: float, draw: Callable[[], float] | None = None
) -> float:
    """Seconds before the next try: ``first``, doubled for each attempt (from 0) up to ``longest``.

    draw: random numbers in [0, 1). With it only half of the pause is certain and the rest random,
    so that many clients spread out.
    """
    seconds = min(longest, first * 2 ** min(attempt, 16))
    return seconds if draw is None else seconds * (0.5 + 0.5 * draw())


def within(deadline: float, action: Callable[[], str]) -> str:
    """The answer of a request, or the error as text.

    A name server or a proxy that never answers is abandoned.
    """
    answers: list[str] = []

    def ask() -> None:
        try:
            answers.append(action())
        except (
            Exception
        ) as error:  # which HTTP library raises depends on the version of huggingface_hub
            answers.append(f"{error}" or type(error).__name__)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(deadline)
    return answers[0] if answers else f"no answer within {deadline:g} seconds"


def ask_hub() -> str:
    """Why the hub that models come from cannot be reached; empty when it answers."""
    import httpx
    from huggingface_hub import constants

    def ask() -> str:
        status = httpx.head(constants.ENDPOINT, timeout=DEADLINE, follow_redirects=True).status_code
        return "" if status < 500 else f"status {status}"

    return within(DEADLINE, ask)


@cache
def hub_problem() -> str:
    """``ask_hub``, asked once by each process."""
    return ask_hub()


def routes(*urls: str) -> dict[str, Any]:
    """For an httpx client of these servers.

    What is asked without TLS is on one's own network, and never asked through a proxy; what is
    asked with TLS goes as ``HTTPS_PROXY``, ``ALL_PROXY`` and ``NO_PROXY`` say.
    """
    return {
        "trust_env": any(urlsplit(url).scheme == "https" for url in urls),
        "mounts": {"http://": None},
    }


@contextmanager
def as_the_environment_says(where: str) -> Iterator[None]:
    """Around the making of such a client.

    Raises UserError where the environment names proxies or certificates that cannot be had.
    """
    import httpx

    try:
        yield
    except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
        fix = "correct HTTPS_PROXY, ALL_PROXY, NO_PROXY or SSL_CERT_FILE, or unset them"
        message = f"the proxies or certificates of the environment cannot be used: {error}"
        raise UserError(message, code="network-environment", where=where, fix=fix) from error
