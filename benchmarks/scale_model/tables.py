"""The tables of the model, some of which are in docs/scale.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from benchmarks.scale_model import cases
from benchmarks.scale_model.model import Layout, distribute_rows, seconds, sharded, volume

PROCESSES = (8, 64, 512)
LARGEST_MEMORY = 141
"""Memory of an H200 (GB)."""
STEP = (
    f"A step has {cases.ROWS:,} rows of {cases.SHORTEST} to {cases.LONGEST:,} tokens, "
    f"{sum(cases.lengths()) / 1e6:.1f} million "
    f"in all, a quarter of them in prompts. Micro-batches have "
    f"{cases.MICRO_BATCH_TOKENS:,} tokens, "
    f"activations are recomputed (`train.checkpointing: full`), matrix multiplications are in "
    f"bfloat16, adapters have rank 16, and the reference cache is empty."
)


def text() -> str:
    """All tables, in Markdown."""
    return f"{STEP}\n\n" + "\n".join(f"### {title}\n\n{section(title)}" for title in TABLES)


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


def _volume() -> Iterator[list[str]]:
    for model in ("8B", "70B"):
        for name, lora, build in (
            ("shard off", False, Layout),
            ("shard full", False, sharded),
            ("shard full, reshard false", False, partial(sharded, reshard=False)),
            ("shard full, sync step", False, partial(sharded, sync_every_micro_batch=False)),
            ("LoRA, shard off", True, Layout),
            ("LoRA, shard full", True, partial(sharded, sync_every_micro_batch=False)),
        ):
            layouts = [build(n) for n in PROCESSES]
            estimates = [
                sum(volume(cases.job(model, "sft", layout, lora=lora), layout).values())
                for layout in layouts
            ]
            yield [
                f"{model}, {name}",
                *(f"{size / 1e9:,.{1 if size < 1e10 else 0}f}" for size in estimates),
            ]


def _throughput() -> Iterator[list[str]]:
    for model in ("8B", "70B"):
        for method, lora, tensor in (
            ("sft", False, 1),
            ("dpo", False, 1),
            ("kto", False, 1),
            ("sft", True, 1),
            ("dpo", True, 1),
            ("sft", False, 8),
        ):
            name = (
                f"{model}, {method}"
                + (", LoRA" if lora else "")
                + (f", tensor {tensor}" if tensor > 1 else "")
            )
            layouts = [
                cases.automatic_layout(model, method, n, lora=lora, tensor=tensor)
                for n in PROCESSES
            ]
            yield [name, *(_speed(model, method, lora, layout) for layout in layouts)]


def _speed(model: str, method: str, lora: bool, layout: Layout) -> str:
    """Tokens per second per GPU; in parentheses, seconds per step."""
    if gigabytes(model, method, lora, layout) > LARGEST_MEMORY:
        return "does not fit"
    job = cases.job(model, method, layout, lora=lora)
    duration = seconds(job, layout, cases.H100)
    rate = job.trained.tokens / duration.total / layout.processes
    return f"{rate:,.0f} ({duration.total:.3g} s)"


def _balance() -> Iterator[list[str]]:
    for rows in (64, 256, cases.ROWS):
        lengths = cases.lengths(rows)
        balances = [
            distribute_rows(lengths, sharded(n), cases.MICRO_BATCH_TOKENS)[1] for n in PROCESSES
        ]
        yield [f"{rows:,}", *(f"{balance:.2f}" for balance in balances)]


def _published() -> Iterator[list[str]]:
    for name, processes, published_seconds in cases.PUBLISHED:
        estimate = published(processes)
        yield [
            name,
            f"{estimate:,.0f}",
            f"{published_seconds:,}",
            f"{estimate / published_seconds:.2f}",
        ]


def published(processes: int) -> float:
    """Tokens per second per GPU that the model gives for a published run."""
    layout = sharded(processes)
    job = cases.published(layout)
    return job.trained.tokens / seconds(job, layout, cases.H100).total / processes


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
    "Communication per step": (
        "Data in GB that each GPU receives in a step of sft. It sends the same amount.",
        ["model, setting", *SEVERAL],
        _volume,
    ),
    "Throughput": (
        "Predicted tokens per second per H100 GPU, in parentheses seconds per step. Weights are "
        "sharded as with `parallel.shard: auto`.",
        ["model, method", *SEVERAL],
        _throughput,
    ),
    "Balance": (
        "Mean work of a process divided by the largest work of any process: the fraction of the "
        "ideal speed.",
        ["rows per step", *SEVERAL],
        _balance,
    ),
    "Constants": (
        "None of them has been measured yet.",
        ["", "value", "from"],
        lambda: cases.CONSTANTS,
    ),
    "Comparison with published figures": (
        "Tokens per second per GPU of torchtitan, which also uses FSDP2, on Llama 3.1 8B with rows "
        "of 8,192 tokens (December 2024, tables 1 and 3 of its llama3_h100_202412_torchtitan.md, "
        "not compiled).",
        ["", "predicted", "published", "ratio"],
        _published,
    ),
}
"""Title -> description, heads of the columns, and rows."""
