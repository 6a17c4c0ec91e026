"""``python -m tests.docs.scale`` writes the tables into docs/scale.md and docs/train/models.md."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks.scale_model import tables
from tests.docs.blocks import ROOT, blocks
from tests.large_models import plan_large, use_gpus
from valence.training.plan import Plan

PAGE = ROOT / "docs" / "scale.md"
ONE_GPU = ROOT / "docs" / "train" / "models.md"
TABLE = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end of table -->\n)", re.DOTALL)
EXAMPLE = re.compile(
    r"^### [^\n]*(one|\d) GPUs? with (\d+) GB\n.*?(?=^##|\Z)", re.MULTILINE | re.DOTALL
)
PARTS = re.compile(r"(\| part \| GB \|\n\| --- \| --- \|\n)(?:\|.*\n)*")
CHANGE = re.compile(r"^(\| `([^`]+)`.* \|) [\d.]+ \|$", re.MULTILINE)
"""A row of a table: settings that change the example, and the memory that it needs then."""


def examples(page: str) -> str:
    """The page with the estimates of today in the tables of its examples."""
    return EXAMPLE.sub(lambda match: _example(match[0], match[1], match[2]), page)


def _example(section: str, gpus: str, size: str) -> str:
    [recipe] = blocks(section, "yaml")

    def planned(*overrides: str) -> Plan:
        number = 1 if gpus == "one" else int(gpus)
        with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            use_gpus(patch, int(size) * 1e9)
            path = Path(folder) / "recipe.yaml"
            path.write_text(recipe.text)
            return plan_large(path, number, Path(folder), *overrides)

    def total(change: re.Match[str]) -> str:
        plan = planned(*change[2].split())
        return f"{change[1]} {plan.memory.total(plan.micro_batch_tokens) / 1e9:.1f} |"

    rows = "".join(f"| {name} | {bytes / 1e9:.1f} |\n" for name, bytes in _parts(planned()))
    return CHANGE.sub(total, PARTS.sub(lambda match: match[1] + rows, section))


def _parts(plan: Plan) -> list[tuple[str, float]]:
    memory, tokens, ways = plan.memory, plan.micro_batch_tokens, plan.split.ways
    shard = f", 1/{ways}" if ways > 1 else ""
    parts = {
        f"weights of the model{shard}": memory.weights,
        f"weights of the reference model{shard}": memory.reference,
        "gradients": memory.gradient,
        f"AdamW state{shard}": memory.optimizer,
        "weights gathered from the other GPUs": memory.gathered,
        f"activations of {tokens:,} tokens": tokens * memory.per_token,
        "logits and probabilities of the LM head": memory.head,
        "CUDA and libraries": memory.program,
        "buffers of NCCL": memory.communication,
    }
    total = memory.total(tokens)
    assert sum(parts.values()) == total
    return [*((name, size) for name, size in parts.items() if size), ("**total**", total)]


def page() -> str:
    """docs/scale.md as it should be now."""
    text = examples(PAGE.read_text(encoding="utf-8"))
    return TABLE.sub(lambda match: f"{match[1]}\n{tables.section(match[2])}\n{match[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    ONE_GPU.write_text(examples(ONE_GPU.read_text(encoding="utf-8")), encoding="utf-8")
