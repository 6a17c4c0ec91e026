"""Rows of a data set on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from valence.errors import UserError
from valence.types import Origin


def hub_rows(path: str, split: str | None) -> Iterator[tuple[Origin, dict[str, Any]]]:
    """Each row with its place, ``owner/name[split]`` and its number. ``split`` may be None when there is only one."""
    import datasets
    from datasets.exceptions import DatasetsError

    _check_answers(path)
    try:
        splits = datasets.load_dataset(path)
    except (OSError, ValueError, DatasetsError) as error:
        raise UserError(
            f"the hub data set cannot be loaded: {str(error).splitlines()[0]}",
            where=path,
            fix=("check the name and your access to it, or download its files and name one of them"),
        ) from error
    if split is None and len(splits) == 1:
        split = str(next(iter(splits)))
    if split not in splits:
        raise UserError(
            f"the data set has no split {split!r}" if split else "the data set has several splits",
            where=path,
            fix=f"set split: one of {', '.join(map(str, splits))}",
        )
    for number, value in enumerate(splits[split], 1):
        yield Origin(f"{path}[{split}]", number), dict(value)


def _check_answers(path: str) -> None:
    """Loading retries for half a minute where there is no network: ask once, first."""
    import httpx
    from datasets import config

    if config.HF_HUB_OFFLINE:
        return
    try:
        httpx.head(config.HF_ENDPOINT, timeout=5.0)
    except httpx.TransportError as error:
        raise UserError(
            f"there is no such file, and the hub does not answer ({error})",
            where=path,
            fix=("name a file, or go online, or set HF_HUB_OFFLINE=1 to use what was downloaded before"),
        ) from error
