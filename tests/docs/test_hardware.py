"""The memory tables of docs/scale.md and the README are what the planner estimates today."""

from __future__ import annotations

import re

from benchmarks.scale_model import cases, tables
from benchmarks.scale_model.model import Layout, sharded
from tests.docs.blocks import ROOT

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
SIZES = re.compile(r"^\| ([\d.]+) B \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
CELL = re.compile(r"(\d+) GB(?: on each of (\d+) GPUs)?")


def test_the_memory_of_models_is_what_the_planner_estimates() -> None:
    rows = SIZES.findall(PAGE)
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


def test_the_memory_table_of_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert tables.section("Memory per GPU") in page, "run `python -m tests.docs.scale`"
