"""What can go wrong when something is loaded, said so that a user can mend it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors import SafetensorError
from transformers.utils.hub import cached_file

from valence.errors import UserError

LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, SafetensorError)


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


SETTINGS = (".json", ".py", ".txt", ".jinja")
SAMPLES, SAMPLE = 32, 1 << 16  # places of a file of weights that are looked at, and their bytes
WEIGHTS = (".safetensors", ".bin", ".gguf", ".model")


def fingerprint(name: str) -> dict[str, str]:
    """What tells the folder of a model or adapter from another: by file, a hash of settings, and the size of weights; for a hub
    id the commit. Raises UserError when that cannot be found out."""
    folder = Path(name)
    if not folder.is_dir():
        kinds = ("config.json", "adapter_config.json")
        try:
            found = [cached_file(name, kind, _raise_exceptions_for_missing_entries=False) for kind in kinds]
        except OSError as error:
            raise cannot_load("model or adapter", name, error) from error
        return {"commit": next((Path(path).parent.name for path in found if path), "")}
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    settings = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.suffix in SETTINGS}
    return settings | {path.name: _sampled(path) for path in files if path.suffix in WEIGHTS}


def _sampled(path: Path) -> str:
    """The size of a file, and a hash of a few places in it: all of it would take as long to read as to load."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for k in range(SAMPLES):
            file.seek(max(0, size - SAMPLE) * k // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
    return f"{size} bytes, {digest.hexdigest()[:16]}"
