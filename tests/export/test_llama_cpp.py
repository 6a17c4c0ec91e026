"""Exported models through a real llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.export.kit import (
    byte_level,
    export_files,
    llama_cpp,
    needs_llama_cpp,
    sentencepiece,
    train_place,
)
from tests.tiny import BOS
from valence.apps.export.probes import CONVERSATIONS, TEXTS

__all__ = ["llama_cpp"]
pytestmark = [pytest.mark.slow, needs_llama_cpp, pytest.mark.usefixtures("llama_cpp")]

Make = Callable[[], PreTrainedTokenizerBase]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, Make, dict[str, Any]]] = {
    "llama": ("llama", lambda: byte_level("smollm"), {}),
    "llama-tied": ("llama-tied", lambda: byte_level("gpt-2"), {}),
    "llama-3": (
        "llama",
        lambda: byte_level("llama-3", BOS, adds_bos=True),
        {"rope_parameters": LLAMA3_ROPE},
    ),
    "llama-linear": (
        "llama",
        lambda: byte_level("gpt-2"),
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-2": ("llama", lambda: sentencepiece(adds_space=True), {}),
    "space-at-start": ("llama", lambda: sentencepiece(space_at_start=True), {}),
    "bos-for-plain-text": ("llama", lambda: byte_level("gpt-2", adds_bos=True), {}),
    "no-template": ("llama", lambda: byte_level("gpt-2", None, adds_bos=True), {}),
    "padded": ("llama", lambda: byte_level("gpt-2"), {"rows": 768}),
    "mistral": ("mistral", lambda: byte_level("gpt-2"), {}),
    "qwen2": ("qwen2", lambda: byte_level("qwen2"), {"rows": 768}),
    "qwen3": ("qwen3", lambda: byte_level("qwen2"), {}),
    "gemma2": ("gemma2", sentencepiece, {"tie_word_embeddings": True}),
    "gemma3": ("gemma3", sentencepiece, {"tie_word_embeddings": True}),
}

QUANTIZED = ("q8_0", "q4_0", "q4_k_m")
ALL_TYPES = ("llama", "qwen2", "gemma3")
OTHER_TOKENIZERS = ("llama-2", "space-at-start", "bos-for-plain-text", "no-template")
"""Models with the weights of `llama` and another tokenizer, which does not depend on their type."""
ONE_TYPE = {
    name: (QUANTIZED[i % 3],) for i, name in enumerate(MODELS) if name not in OTHER_TOKENIZERS
}
"""The quantized type of a model that is not among ALL_TYPES."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same_model(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, make, changes = MODELS[name]
    train_place(place, kind, make(), **changes)
    num_prompts = len(TEXTS) + (0 if name == "no-template" else len(CONVERSATIONS))
    types = ("f16", *(QUANTIZED if name in ALL_TYPES else ONE_TYPE.get(name, ())))
    words = [word for file_type in types for word in ("--gguf", file_type)]
    files = export_files(capsys, "run", "out", *words)
    assert set(files) == {"model", *types}
    for file in files.values():
        assert file["status"] == "verified", file
        assert file["same_text"] == file["same_tokens"] == file["prompts"] == num_prompts
        assert file["stops"] == file["num_ends"] > 0
    assert files["model"]["kl_max"] < 1e-9
    assert files["f16"]["kl_mean"] < 1e-4
    assert files["f16"]["agreement"] > 0.98
    # errors grow as bits are removed, so that the divergence is one of the weights
    for finer, coarser in pairwise(
        files[file_type] for file_type in types if "_k_" not in file_type
    ):
        assert finer["kl_mean"] < coarser["kl_mean"]
        assert finer["size"] > coarser["size"]
    if "q4_k_m" in files:
        finer = files["q8_0"] if "q8_0" in files else files["f16"]
        assert finer["kl_mean"] < files["q4_k_m"]["kl_mean"]
