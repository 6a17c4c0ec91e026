"""SmolLM2-135M-Instruct with a trained adapter, through a real llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import command
from tests.export.kit import export_files, llama_cpp, needs_llama_cpp
from tests.real.conftest import smollm2

__all__ = ["llama_cpp", "smollm2"]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_llama_cpp
def test_smollm2_answers_in_llama_cpp_as_in_its_run(
    smollm2: Path, llama_cpp: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "What is the capital of France?", "completion": "Paris."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    recipe = {
        "method": "sft",
        "model": {"name": str(smollm2), "dtype": "float32", "lora": {"rank": 4}},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "train": {"batch_size": 1, "learning_rate": 1e-4},
        "run": {"dir": str(tmp_path / "run"), "export": "adapter", "samples": {"prompts": 0}},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert command("train", str(tmp_path / "recipe.yaml"), "--quiet") == 0
    words = [word for kind in ("f16", "q8_0", "q4_k_m") for word in ("--gguf", kind)]
    files = export_files(capsys, str(tmp_path / "run"), str(tmp_path / "out"), *words)
    for file in files.values():
        assert file["status"] == "verified", file
        assert file["same_text"] == file["same_tokens"] == file["prompts"] == 14
        assert file["stops"] == file["num_ends"]
    assert files["f16"]["kl_mean"] < 1e-4
    assert files["f16"]["agreement"] > 0.98
    assert files["q8_0"]["kl_mean"] < 0.02
    assert files["q4_k_m"]["kl_mean"] < 0.15
