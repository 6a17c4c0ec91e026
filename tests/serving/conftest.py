"""Seeds of the answers that the service samples."""

from __future__ import annotations

import secrets
from random import Random

import pytest


@pytest.fixture(autouse=True)
def fixed_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers in each run of a test. One in a hundred is empty, and votes on that one
    give no row."""
    monkeypatch.setattr(secrets, "randbits", Random(0).getrandbits)
