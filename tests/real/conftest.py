"""The real model and data: downloaded once into the cache, or skipped with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from examples.demo import assets


def _or_skip(fetch: Callable[[], Path]) -> Path:
    try:
        return fetch()
    except (OSError, RuntimeError) as error:
        pytest.skip(f"{fetch.__name__} cannot be fetched: {error}")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A folder with SmolLM2-135M-Instruct."""
    return _or_skip(assets.smollm2)


@pytest.fixture(scope="session")
def real_sets() -> Path:
    """A folder with kto_en_demo.json and dpo_en_demo.json."""
    return _or_skip(assets.llamafactory_data)
