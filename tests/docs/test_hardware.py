"""The memory tables of docs/hardware.md and the README are what the planner estimates today."""

from __future__ import annotations

import re

import pytest

from benchmarks.scale_model import cases
from benchmarks.scale_model.model import Layout, sharded
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
SIZES = re.compile(r"^\| ([\d.]+) B \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
CELL = re.compile(r"(\d+) GB(?: on each of (\d+) GPUs)?")


@pytest.mark.parametrize("page", ["README.md", "docs/hardware.md"])
def test_the_memory_of_models_is_what_the_planner_estimates(page: str) -> None:
    rows = SIZES.findall((ROOT / page).read_text(encoding="utf-8"))
    assert [size for size, *_ in rows] == [name.removesuffix("B") for name in cases.DECODERS]
    for size, *cells in rows:
        kinds = ((True, True), (True, False), (False, False))
        for (is_lora, is_quantized), cell in zip(kinds, cells, strict=True):
            match = CELL.fullmatch(cell)
            assert match, cell
            gpus = int(match[2] or 1)
            layout = sharded(gpus, sync_every_micro_batch=not is_lora) if gpus > 1 else Layout(1)
            memory = cases.memory(f"{size}B", "dpo", layout, lora=is_lora, quantize=is_quantized)
            assert int(match[1]) == round(memory.total(cases.MICRO_BATCH_TOKENS) / 1e9), (
                size,
                cell,
            )


def test_the_parts_of_the_memory_are_those_of_the_planner() -> None:
    _, _, table = PAGE.partition("| Part, on each of 8 GPUs | GB |\n| --- | --- |\n")
    rows = [line.strip("| ").rsplit(" | ", 1) for line in table.split("\n\n")[0].splitlines()]
    memory = cases.memory("8B", "dpo", sharded(8))
    parts = [
        memory.weights,
        memory.reference,
        memory.gradient,
        memory.optimizer,
        memory.gathered,
        cases.MICRO_BATCH_TOKENS * memory.per_token,
        memory.head,
        memory.program,
        memory.communication,
    ]
    assert [size for _, size in rows] == [f"{part / 1e9:.1f}" for part in parts]
    assert sum(parts) == memory.total(cases.MICRO_BATCH_TOKENS)
    assert f"The {sum(parts) / 1e9:.0f} GB of the 8 B model" in PAGE
