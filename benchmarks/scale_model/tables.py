"""The tables of docs/scale.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from benchmarks.scale_model import cases
from benchmarks.scale_model.model import Layout, distribute_rows, sharded, volume

PROCESSES = (8, 64, 512)
STEP = (
    f"A step has {cases.ROWS:,} rows of {cases.SHORTEST} to {cases.LONGEST:,} tokens, "
    f"{sum(cases.lengths()) / 1e6:.1f} million "
    f"in all. Micro-batches have {cases.MICRO_BATCH_TOKENS:,} tokens, activations are recomputed "
    f"(`train.checkpointing: full`), matrix multiplications are in bfloat16, and adapters have "
    f"rank 16."
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
        "Balance",
        "Mean work of a process divided by the largest work of any process. This is the fraction "
        "of the ideal speed.",
        _table(["rows per step", *several], _balance()),
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
            estimates = [_received(model, lora, layout) for layout in layouts]
            yield [
                f"{model}, {name}",
                *(f"{size / 1e9:,.{1 if size < 1e10 else 0}f}" for size in estimates),
            ]


def _received(model: str, lora: bool, layout: Layout) -> float:
    """Bytes that each process receives in a step of sft."""
    count, _ = distribute_rows(cases.lengths(), layout, cases.MICRO_BATCH_TOKENS)
    return volume(cases.shape(model, lora), layout, count)


def _balance() -> Iterator[list[str]]:
    for rows in (64, 256, cases.ROWS):
        lengths = cases.lengths(rows)
        balances = [
            distribute_rows(lengths, sharded(n), cases.MICRO_BATCH_TOKENS)[1] for n in PROCESSES
        ]
        yield [f"{rows:,}", *(f"{balance:.2f}" for balance in balances)]
