"""How servers are reached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from valence.errors import UserError


def routes(*urls: str) -> dict[str, Any]:
    """For an httpx client of these servers. What is asked without TLS is on one's own network, and never asked through a proxy;
    what is asked with TLS goes as ``HTTPS_PROXY``, ``ALL_PROXY`` and ``NO_PROXY`` say."""
    return {"trust_env": any(urlsplit(url).scheme == "https" for url in urls), "mounts": {"http://": None}}


@contextmanager
def as_the_environment_says(where: str) -> Iterator[None]:
    """Around the making of such a client. Raises UserError where the environment names proxies or certificates that cannot be
    had."""
    import httpx

    try:
        yield
    except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
        fix = "mend HTTPS_PROXY, ALL_PROXY, NO_PROXY or SSL_CERT_FILE, or unset them"
        what = f"the proxies or certificates of the environment cannot be used: {error}"
        raise UserError(what, where=where, fix=fix) from error
