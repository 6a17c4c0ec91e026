"""``python -m tests.export [NAME]...`` exports models through llama.cpp and prints how they agree
with their runs, as a table in Markdown.

SmolLM2-135M-Instruct with a trained adapter, and tiny random models of other architectures, whose
tokenizers have the rules of the real ones.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from examples.demo import assets
from tests.command import command
from tests.export.kit import (
    ADAPTER,
    byte_level,
    llama_cpp_folder,
    sentencepiece,
    train_one_step,
    train_place,
)
from valence.apps.export.llama_cpp import SETTING

TYPES = ("f16", "q8_0", "q4_k_m", "q4_0")
MODELS: dict[str, Any] = {
    "SmolLM2-135M": lambda folder: train_one_step(folder, assets.smollm2(), *ADAPTER),
    "tiny Llama": lambda folder: train_place(folder, "llama", byte_level("smollm")),
    "tiny Qwen3": lambda folder: train_place(folder, "qwen3", byte_level("qwen2")),
    "tiny Gemma 3": lambda folder: train_place(
        folder, "gemma3", sentencepiece(), tie_word_embeddings=True
    ),
}
COLUMNS = (
    *("Model", "Type", "Prompts", "Top token", "KL/token", "Largest KL", "Answers", "Stops"),
    "Result",
)


def cells(name: str, file: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    return (
        name,
        "folder" if file["kind"] == "model" else file["kind"],
        f"{file['same_tokens']}/{file['prompts']}",
        f"{file['agreement']:.1%}",
        f"{file['kl_mean']:.1e}",
        f"{file['kl_max']:.1e}",
        f"{file['same_answers']}/{file['prompts']}",
        f"{file['stops']}/{file['num_ends']}",
        file["status"],
    )


def export_all(name: str, folder: Path) -> list[dict[str, Any]]:
    """Train a model, export it in all types, and return the verification of each file."""
    words = [word for file_type in TYPES for word in ("--gguf", file_type)]
    with redirect_stdout(StringIO()):
        MODELS[name](folder)
    with redirect_stdout(StringIO()) as output:
        command("export", str(folder / "run"), str(folder / "out"), *words, "--json")
    files = {file["kind"]: file for file in json.loads(output.getvalue())["files"]}
    return [files[kind] for kind in ("model", *TYPES)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.export", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    names = parser.parse_args().names or list(MODELS)
    os.environ[SETTING] = str(llama_cpp_folder())
    for row in (COLUMNS, ("---",) * len(COLUMNS)):
        print(f"| {' | '.join(row)} |")
    is_verified = True
    for name in names:
        with TemporaryDirectory() as folder:
            for file in export_all(name, Path(folder)):
                print(f"| {' | '.join(cells(name, file))} |", flush=True)
                is_verified &= file["status"] == "verified"
    return 0 if is_verified else 1


if __name__ == "__main__":
    sys.exit(main())
