"""SmolLM2-135M-Instruct with a trained adapter, through a real llama.cpp and a real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.kit import (
    ADAPTER,
    check_equal,
    export_files,
    llama_cpp,
    needs_llama_cpp,
    real_vllm,
    train_one_step,
)
from tests.real.conftest import smollm2
from tests.rollouts.vllm_server import needs_vllm

__all__ = ["llama_cpp", "real_vllm", "smollm2"]


@pytest.mark.real
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_llama_cpp
@needs_vllm
@pytest.mark.daily
def test_smollm2_answers_in_other_engines_as_in_its_run(
    smollm2: Path,
    llama_cpp: None,
    real_vllm: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train_one_step(tmp_path, smollm2, *ADAPTER)
    words = [word for kind in ("f16", "q8_0", "q4_k_m") for word in ("--gguf", kind)]
    files = export_files(capsys, str(tmp_path / "run"), str(tmp_path / "out"), *words, "--vllm")
    in_vllm = files.pop("vllm")
    check_equal(in_vllm)
    assert in_vllm["same_answers"] == 14
    assert in_vllm["kl_mean"] < 1e-4
    assert in_vllm["agreement"] > 0.98
    for file in files.values():
        assert file["status"] == "verified", file
        assert file["same_text"] == file["same_tokens"] == file["prompts"] == 14
        assert file["stops"] == file["num_ends"]
    assert files["f16"]["kl_mean"] < 1e-4
    assert files["f16"]["agreement"] > 0.98
    assert files["q8_0"]["kl_mean"] < 0.02
    assert files["q4_k_m"]["kl_mean"] < 0.15
