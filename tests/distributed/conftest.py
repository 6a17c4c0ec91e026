"""A model and rows for runs of several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.crash.cases import write_rows
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = tiny_tokenizer(None)
    model: Any = tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder)
    return folder
