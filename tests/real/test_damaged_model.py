"""The release gate of `valence compare` on SmolLM2-135M-Instruct and a damaged copy of it."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import quickstart
from tests.command import command
from valence.cli import GATE_FAILED

pytestmark = pytest.mark.real
QUICKSTART = Path(quickstart.__file__).parent
RULE = """
from examples.quickstart.judge import judge

def thumbs(completions, **context):
    return [float(judge(c.prompt[-1]["content"], c.text, c.stop == "eos")[0]) for c in completions]
"""


def damage(source: Path, target: Path) -> None:
    """Add noise to all matrices except the embeddings."""
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.add_(torch.randn_like(weight) * weight.std() * 0.4)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


@pytest.mark.daily
def test_the_gate_fails_on_a_damaged_model_and_passes_on_the_same_one(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (QUICKSTART / "held_out_prompts.jsonl").open() as file:
        Path("prompts.jsonl").write_text("".join(islice(file, 8)))
    Path("quickstart_rule.py").write_text(RULE)
    damage(smollm2, tmp_path / "damaged")
    options = ("--prompts", "prompts.jsonl", "--judge", "quickstart_rule:thumbs", "--temperature",
               "0", "--max-new-tokens", "64", "--at-least", "0.5",
               "--other-text", "off")  # fmt: skip
    words = ("compare", str(smollm2), "damaged", *options)
    assert command(*words, "--out", "damage") == GATE_FAILED
    (judge,) = json.loads(Path("damage/compare.json").read_text())["judges"]
    assert judge["losses"] > 0
    assert judge["wins"] == 0
    words = ("compare", str(smollm2), str(smollm2), *options)
    assert command(*words, "--out", "same") == 0
    rmtree("damaged")  # half a gigabyte
