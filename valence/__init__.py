"""Valence aligns language models with feedback: thumbs up and down, pairs, scores,
demonstrations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valence.version import __version__

if TYPE_CHECKING:
    from valence.api import Callback, Run, Trainer, build_run, logprobs, make_micro_batches, train
    from valence.data.importers.records import Vote
    from valence.errors import UserError
    from valence.losses import LOSSES, Loss
    from valence.types import Completion, Origin

__all__ = [
    "LOSSES",
    "Callback",
    "Completion",
    "Loss",
    "Origin",
    "Run",
    "Trainer",
    "UserError",
    "Vote",
    "__version__",
    "build_run",
    "logprobs",
    "make_micro_batches",
    "train",
]

_HOMES = {
    **dict.fromkeys(
        ("train", "build_run", "logprobs", "Run", "Trainer", "Callback", "make_micro_batches"),
        "valence.api",
    ),
    **dict.fromkeys(("Completion", "Origin"), "valence.types"),
    "UserError": "valence.errors",
    "Vote": "valence.data.importers.records",
    "LOSSES": "valence.losses",
    "Loss": "valence.losses",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: `valence --help` should not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'valence' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
