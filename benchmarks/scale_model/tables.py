"""The tables of docs/scale.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from benchmarks.scale_model import cases
from benchmarks.scale_model.model import Layout, distribute_rows, sharded

PROCESSES = (8, 64, 512)


def section(title: str) -> str:
    """A table below its description, in Markdown."""
    description, head, rows = TABLES[title]
    return f"{description}\n\n{_table(head, rows())}\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def gigabytes(model: str, method: str, lora: bool, layout: Layout, quantize: bool = False) -> float:
    """Predicted GB per device."""
    memory = cases.memory(model, method, layout, lora=lora, quantize=quantize)
    return memory.total(cases.MICRO_BATCH_TOKENS) / 1e9


def _memory() -> Iterator[list[str]]:
    one = Layout(1)
    for model in cases.DECODERS:
        estimates = [
            gigabytes(model, "dpo", True, one, quantize=True),
            gigabytes(model, "dpo", True, one),
            gigabytes(model, "dpo", True, sharded(8, sync_every_micro_batch=False)),
            *(gigabytes(model, "dpo", False, layout) for layout in (one, sharded(8), sharded(64))),
        ]
        yield [model, *(f"{size:,.0f}" for size in estimates)]


def _balance() -> Iterator[list[str]]:
    for rows in (64, 256, cases.ROWS):
        lengths = cases.lengths(rows)
        balances = [
            distribute_rows(lengths, sharded(n), cases.MICRO_BATCH_TOKENS)[1] for n in PROCESSES
        ]
        yield [f"{rows:,}", *(f"{balance:.2f}" for balance in balances)]


SEVERAL = [f"{n} GPUs" for n in PROCESSES]
TABLES: dict[str, tuple[str, list[str], Callable[[], Iterable[Sequence[str]]]]] = {
    "Memory per GPU": (
        "Predicted GB per GPU for dpo and kto with `train.checkpointing: full`, AdamW and "
        "micro-batches of 4,096 tokens in bfloat16. Adapters have rank 16. On several GPUs, "
        "weights are sharded (`parallel.shard: full`).",
        [
            "model",
            "LoRA, 4-bit, 1 GPU",
            "LoRA, 1 GPU",
            "LoRA, 8 GPUs",
            "all weights, 1 GPU",
            "8 GPUs",
            "64 GPUs",
        ],
        _memory,
    ),
    "Balance": (
        "Mean work of a process divided by the largest work of any process: the fraction of the "
        "ideal speed.",
        ["rows per step", *SEVERAL],
        _balance,
    ),
}
"""Title -> description, heads of the columns, and rows."""
