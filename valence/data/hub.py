"""Rows of a data set on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from valence.errors import UserError
from valence.types import Origin

SUBSET_FIX = "set `subset` next to `path`, to one of the configurations that this message lists"
REMEDIES = {
    "Config name is missing": SUBSET_FIX,
    "BuilderConfig": SUBSET_FIX,
    "Unknown split": "set `split` next to `path`, to one of the splits that this message lists",
}
"""The beginning of the library's message about a mistake in a name, and its fix."""


def hub_rows(
    path: str, split: str | None, subset: str | None = None
) -> Iterator[tuple[Origin, dict[str, Any]]]:
    """Each row with its place, ``owner/name[split]`` (with a subset ``owner/name/subset[split]``)
    and its number.

    ``split`` may be None when there is only one; else only that one is fetched. Raises UserError
    when it cannot be read.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    _check_answers(path)
    try:
        dataset: Any = datasets.load_dataset(path, name=subset, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        reason = " ".join(str(error).splitlines()[:2])
        fix = next((fix for begins, fix in REMEDIES.items() if reason.startswith(begins)), None)
        general = (
            "check the name of the data set, the network and your access to the data set, or "
            "download a file of it and set `path` to that file"
        )
        raise UserError(
            f"cannot load the data set from the Hugging Face Hub: {reason}",
            code="hub-dataset",
            where=path,
            fix=fix or general,
        ) from error
    if split is None:
        if len(dataset) > 1:
            fix = f"set `split` next to `path`, to one of {', '.join(map(str, dataset))}"
            raise UserError(
                "the data set has several splits", code="hub-split-missing", where=path, fix=fix
            )
        ((split, dataset),) = dataset.items()
    place = f"{path}/{subset}" if subset else path
    for number, value in enumerate(dataset, 1):
        yield Origin(f"{place}[{split}]", number), dict(value)


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
            "no file has this path, and the Hugging Face Hub, which may have a data set of this "
            f"name, cannot be reached ({error})",
            code="hub-unreachable",
            where=path,
            fix="for a file, correct the path; for a data set, check the network, or set "
            "HF_HUB_OFFLINE=1 to use a copy that was downloaded before",
        ) from error
