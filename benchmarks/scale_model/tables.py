"""The tables of docs/scale.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    return (
        "\n\n".join(
            [STEP, *(f"### {title}\n\n{text}\n\n{shown}" for title, text, shown in _tables())]
        )
        + "\n"
    )


def _tables() -> Iterator[tuple[str, str, str]]:
    several = [f"{n} GPUs" for n in PROCESSES]
    yield (
        "Memory per GPU",
        "Memory in GB on one GPU, and with `parallel.shard: full` on N GPUs, including 1.5 GB for "
        "the buffers of NCCL. With `off`, each of N GPUs needs 1.5 GB more than one GPU. An H100 "
        "has 80 GB, an H200 141 GB.",
        _table(["model, method", "1 GPU", *several], _memory()),
    )
    yield (
        "Communication per step",
        "Data in GB that each GPU receives in a step of sft. It sends the same amount.",
        _table(["model, setting", *several], _volume()),
    )
    yield (
        "Throughput",
        "Tokens per second per GPU; in parentheses, seconds per step and the share of that time "
        "spent in matrix multiplications. Weights are sharded as `parallel.shard: auto` would on "
        "an H100.",
        _table(["model, method", *several], _throughput()),
    )
    yield (
        "Balance",
        "Mean work of a process divided by the largest work of any process. This is the fraction "
        "of the ideal speed.",
        _table(["rows per step", *several], _balance()),
    )
    yield (
        "Constants",
        "None of them has been measured yet.",
        _table(["", "value", "from"], cases.CONSTANTS),
    )
    yield (
        "Comparison with published figures",
        "Tokens per second per GPU of torchtitan, which also uses FSDP2, on Llama 3.1 8B with rows "
        "of 8,192 tokens (December 2024, tables 1 and 3 of its llama3_h100_202412_torchtitan.md, "
        "not compiled).",
        _table(["", "predicted", "published", "ratio"], _published()),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _kinds() -> Iterator[tuple[str, str, str, bool]]:
    """Title, model, method, and whether an adapter is trained, of each line of a table."""
    for model in cases.DECODERS:
        yield f"{model}, sft", model, "sft", False
        yield f"{model}, dpo and kto", model, "dpo", False
        yield f"{model}, LoRA, any method", model, "dpo", True


def gigabytes(model: str, method: str, lora: bool, layout: Layout) -> float:
    """Predicted GB per device."""
    memory = cases.memory(model, method, layout, lora=lora)
    return memory.total(cases.MICRO_BATCH_TOKENS) / 1e9


def _memory() -> Iterator[list[str]]:
    for name, model, method, lora in _kinds():
        layouts = [Layout(1), *(sharded(n, sync_every_micro_batch=not lora) for n in PROCESSES)]
        yield [name, *(f"{gigabytes(model, method, lora, layout):.0f}" for layout in layouts)]


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
    """Tokens per second per GPU; in brackets, seconds per step and share of matrix products."""
    if gigabytes(model, method, lora, layout) > LARGEST_MEMORY:
        return "does not fit"
    job = cases.job(model, method, layout, lora=lora)
    duration = seconds(job, layout, cases.H100)
    rate = job.trained.tokens / duration.total / layout.processes
    return f"{rate:,.0f} ({duration.total:.3g} s, {duration.products / duration.total:.0%})"


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
