"""Errors of loading a model, an adapter or a tokenizer, as messages to the user."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import AutoConfig, GenerationConfig
from transformers.utils.hub import cached_file

from valence.errors import UserError
from valence.files import similar_folder
from valence.network import hub_problem

IDENTIFYING = ("config.json", "adapter_config.json", "tokenizer_config.json")
"""Files of which a model, an adapter or a tokenizer has at least one."""
NAME_ANOTHER = "use an existing folder, or a hub id such as owner/model"


def must_exist(name: str, setting: str) -> None:
    """Raise UserError unless ``name`` is a folder other than that of a run, or a hub id that is in
    the cache or can be downloaded.

    Each process contacts the hub once. If the hub does not respond, this process uses only the
    cache: the libraries would retry for a minute.
    """
    if Path(name).is_dir():
        _refuse_run(Path(name), setting)
        return
    near = similar_folder(Path(name).expanduser())
    hint = f"did you mean {near}? " if near else ""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path or _is_in_folder_of_runs(name):
        raise UserError(
            f"the folder {name!r} does not exist",
            code="model-not-found",
            where=setting,
            fix=hint.strip() or NAME_ANOTHER,
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
            fix=f"{hint}use an existing folder, if it is one (paths start in {Path.cwd()}), set "
            "HF_HOME to the folder of a cache that has it, "
            + (
                "or unset HF_HUB_OFFLINE"
                if offline
                else "or set HF_ENDPOINT to a hub that can be reached"
            ),
        )
    if problem:
        constants.HF_HUB_OFFLINE = True


def _refuse_run(folder: Path, setting: str) -> None:
    """Raise UserError for the folder of a run, which contains the folder of its model."""
    files = (*IDENTIFYING, "*.gguf")
    if not (folder / "config.yaml").is_file() or any(any(folder.glob(name)) for name in files):
        return
    model = folder / "model"
    raise UserError(
        f"the folder {str(folder)!r} is a run, not a model",
        code="model-not-loadable",
        where=setting,
        fix=f"use the folder of its model, {model}"
        if model.is_dir()
        else f"the run has no model yet: finish it, or write one with `valence export {folder} "
        "FOLDER`",
    )


def _is_in_folder_of_runs(name: str) -> bool:
    """Whether a name such as runs/first lies in an existing folder that contains runs.

    A folder named like an owner on the hub may exist, too.
    """
    parent = Path(name).parent
    return parent.name != "" and any(parent.glob("*/config.yaml"))


def is_cached(name: str, setting: str) -> bool:
    """Return whether a hub id is in the cache. Raises UserError for a name that is not a hub id."""
    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in IDENTIFYING)
    except HFValidationError as error:
        raise UserError(
            f"{name!r} is neither a folder nor a hub id",
            code="model-not-found",
            where=setting,
            fix=NAME_ANOTHER,
        ) from error


CONTENTS = {
    "adapter": "a LoRA adapter (adapter_config.json)",
    "model": "a causal language model (config.json)",
    "model or adapter": "a causal language model or a LoRA adapter",
    "tokenizer": "a tokenizer (tokenizer.json)",
}
"""Contents of the folder or hub id that each kind of object is loaded from."""


@contextmanager
def loading(kind: str, name: str) -> Iterator[None]:
    """Inside the block, an error of a library is a UserError that names what cannot be loaded.

    kind: a key of CONTENTS.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a wrong file makes the libraries raise anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # transformers names the field in one line, and what is wrong in the next one
        reason = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
        if isinstance(error, LookupError | AttributeError | ArithmeticError) or not reason:
            reason = f"{type(error).__name__} {reason}".rstrip()
        raise UserError(
            f"cannot load the {kind} {name!r}: {reason}",
            code="model-not-loadable",
            where="model",
            fix=f"check that the folder or hub id contains {CONTENTS[kind]}, and that you have "
            "access to it",
        ) from error


SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
"""Sizes that every decoder has."""


def load_config(name: str, *, trust_remote_code: bool = False, gguf_file: str | None = None) -> Any:
    """Return the configuration of a model. Raises UserError if it cannot be read, or a size is not
    positive.
    """
    must_exist(name, "model.name")
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    with loading("model", name):
        config: Any = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **extra)
        sizes = config.get_text_config()
        for size in SIZES:
            if getattr(sizes, size, 1) < 1:
                raise ValueError(f"{size} is {getattr(sizes, size)} in its config.json")
        window = getattr(sizes, "sliding_window", None)
        if not isinstance(window, int | None):  # transformers does not check it for all models
            raise ValueError(f"sliding_window is {window!r} in its config.json")
    return config


def read_generation_config(name: str) -> GenerationConfig | None:
    """Return the generation config of a model; None if it has none that can be read."""
    try:
        return GenerationConfig.from_pretrained(name)
    except (OSError, ValueError, TypeError, RecursionError):
        return None


SETTINGS = (".json", ".py", ".txt", ".jinja")
NUM_SAMPLES, SAMPLE_BYTES = 32, 1 << 16
"""Samples of a weights file that its fingerprint hashes: their number, and the bytes of each."""
WEIGHTS = (".safetensors", ".bin", ".gguf", ".model")


def fingerprint(name: str) -> dict[str, str]:
    """Return a fingerprint of the folder of a model or adapter: for each file a hash of settings,
    or the size and a hash of parts of weights; for a hub id the commit. Raises UserError when the
    hub id cannot be resolved.
    """
    folder = Path(name)
    if not folder.is_dir():
        kinds = ("config.json", "adapter_config.json")
        with loading("model or adapter", name):
            paths = [
                cached_file(name, kind, _raise_exceptions_for_missing_entries=False)
                for kind in kinds
            ]
        return {"commit": next((Path(path).parent.name for path in paths if path), "")}
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    settings = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.suffix in SETTINGS
    }
    return settings | {path.name: _sampled(path) for path in files if path.suffix in WEIGHTS}


def _sampled(path: Path) -> str:
    """Return the size of a file and a hash of parts of it, since reading all of it would take as
    long as loading the model.
    """
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for k in range(NUM_SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * k // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return f"{size} bytes, {digest.hexdigest()[:16]}"
