"""Environments of the libraries that the benchmarks compare with Valence."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_TRL = (
    "no environment with TRL: `make peers` builds one in .peers/trl, or VALENCE_PEER_TRL "
    "names one (its folder)"
)


def peer_python() -> Path | None:
    """The interpreter of TRL's environment, or None if it does not exist."""
    python = Path(os.environ.get("VALENCE_PEER_TRL") or ROOT / ".peers" / "trl") / "bin" / "python"
    return python if python.exists() else None


def peer_environment() -> dict[str, str]:
    """This process's environment variables, without those that would make the peer's interpreter
    import packages from this environment.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
