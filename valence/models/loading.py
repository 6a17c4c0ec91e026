"""Errors of loading a model, an adapter or a tokenizer, as messages to the user."""

from __future__ import annotations

import hashlib
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from transformers.utils.hub import cached_file

from valence.errors import UserError
from valence.network import hub_problem

LOADING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    ImportError,
    RuntimeError,
    SafetensorError,
)


IDENTIFYING = ("config.json", "adapter_config.json", "tokenizer_config.json")
"""Files of which a model, an adapter or a tokenizer has at least one."""
NAME_ANOTHER = "use an existing folder, or a hub id such as owner/model"


def must_exist(name: str, setting: str) -> None:
    """Raise UserError unless ``name`` is a folder, or a hub id that is in the cache or can be
    downloaded.

    The hub is asked once by each process. When it does not answer, this process uses the cache
    alone: the libraries would retry for a minute.
    """
    if Path(name).is_dir():
        return
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(
            f"there is no folder {name!r}", code="model-not-found", where=setting, fix=NAME_ANOTHER
        )
    cached = is_cached(name, setting)
    offline = constants.HF_HUB_OFFLINE
    problem = "HF_HUB_OFFLINE is set" if offline else hub_problem()
    if problem and not cached:
        reason = problem if offline else f"{constants.ENDPOINT} cannot be reached ({problem})"
        raise UserError(
            f"{name!r} is not a folder and not in the cache {constants.HF_HUB_CACHE}, and {reason}",
            code="model-not-found",
            where=setting,
            fix="use a folder with the model, set HF_HOME to the folder of a cache that has it, "
            + (
                "or unset HF_HUB_OFFLINE"
                if offline
                else "or set HF_ENDPOINT to a hub that can be reached"
            ),
        )
    if problem:
        constants.HF_HUB_OFFLINE = True


def is_cached(name: str, setting: str) -> bool:
    """Whether a hub id was downloaded before. Raises UserError for a name that is no hub id."""
    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in IDENTIFYING)
    except HFValidationError as error:
        raise UserError(
            f"{name!r} is neither a folder nor a hub id",
            code="model-not-found",
            where=setting,
            fix=NAME_ANOTHER,
        ) from error


def cannot_load(what: str, name: str, error: Exception) -> UserError:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return UserError(
        f"cannot load the {what} {name!r}: {first}",
        code="model-not-loadable",
        where="model",
        fix="check that the folder or hub id contains a causal language model, and that you have "
        "access to it",
    )


SETTINGS = (".json", ".py", ".txt", ".jinja")
SAMPLES, SAMPLE = 32, 1 << 16  # places of a file of weights that are looked at, and their bytes
WEIGHTS = (".safetensors", ".bin", ".gguf", ".model")


def fingerprint(name: str) -> dict[str, str]:
    """What tells the folder of a model or adapter from another: by file, a hash of settings, and
    the size of weights; for a hub id the commit. Raises UserError when that cannot be found out.
    """
    folder = Path(name)
    if not folder.is_dir():
        kinds = ("config.json", "adapter_config.json")
        try:
            found = [
                cached_file(name, kind, _raise_exceptions_for_missing_entries=False)
                for kind in kinds
            ]
        except OSError as error:
            raise cannot_load("model or adapter", name, error) from error
        return {"commit": next((Path(path).parent.name for path in found if path), "")}
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    settings = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.suffix in SETTINGS
    }
    return settings | {path.name: _sampled(path) for path in files if path.suffix in WEIGHTS}


def _sampled(path: Path) -> str:
    """The size of a file, and a hash of a few places in it: all of it would take as long to read as
    to load.
    """
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for k in range(SAMPLES):
            file.seek(max(0, size - SAMPLE) * k // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
    return f"{size} bytes, {digest.hexdigest()[:16]}"
