"""What can go wrong when something is loaded, said so that a user can mend it."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from valence.errors import UserError

LOADING_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)


def must_exist(name: str, setting: str) -> None:
    """A name that is written as a path must be a folder: a hub would answer with something confusing."""
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).is_dir():
        raise UserError(
            f"there is no folder {name!r}", where=setting, fix="name an existing folder, or a hub id such as owner/model"
        )


def cannot_load(what: str, name: str, error: Exception) -> UserError:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return UserError(
        f"cannot load the {what} {name!r}: {first}",
        where="model",
        fix="check the folder or hub id and that it holds a causal language model; a hub needs a network connection",
    )
