"""python -m benchmarks.ranks [--quick]: the memory of each process by the number of processes.

A random Llama-shaped model of 227 million weights (--quick: 45 million) trains in float32 without
an adapter for four steps with AdamW, from loading to export: in one process, and sharded over 2 and
4 (`parallel.shard: full`). The figure is the largest peak memory of any process (VmHWM), less that
of the program without a model. One process needs 16 bytes per weight (weight, gradient, two
moments). Each of n processes should need an n-th of that, the layer that it runs, and embedding and
head. All logged losses must agree. The seconds are of processes that share the cores of one
machine, so they are not meaningful. Exit status: 0 all figures are within their bars, 1 some are
not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.checkpoint.cases import tokenizer_of_bytes
from valence.distributed.launcher import launch

WORKER = (sys.executable, "-m", "benchmarks.ranks.worker")
RANKS = (1, 2, 4)
SHARES = {2: 0.65, 4: 0.45}
"""Maximum memory of a process relative to that of a single process."""
TOLERANCE = 1e-5
"""Maximum relative difference of losses and gradient norms."""


def make_inputs(folder: Path, width: int, layers: int) -> int:
    """Write a model, rows and a recipe. Return the number of weights."""
    tokenizer = tokenizer_of_bytes()
    tokenizer.save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=256,
    )
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    rows = [{"prompt": f"question {i} ", "completion": "word " * (4 + i % 5)} for i in range(16)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = {
        "method": "sft", "model": {"name": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "rows.jsonl")},
        "train": {"batch_size": 4, "compile": "off", "learning_rate": 1e-4},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return sum(p.numel() for p in model.parameters())


def run(folder: Path, ranks: int) -> tuple[float, list[dict[str, Any]], float]:
    """Memory of the largest process (bytes), the log, and the seconds of the last step."""
    records_folder = folder / f"notes {ranks}"
    records_folder.mkdir()
    os.environ["VALENCE_RANK_RECORDS"] = str(records_folder)
    out = folder / f"run {ranks}"
    overrides = ["parallel.shard=full"] if ranks > 1 else []
    status = launch(
        ["train", str(folder / "recipe.yaml"), f"run.dir={out}", "--quiet", *overrides],
        ranks,
        program=WORKER,
    )
    assert status == 0, f"the run ended with {status}"
    records = [json.loads(path.read_text()) for path in sorted(records_folder.glob("rank-*.json"))]
    assert len(records) == ranks
    log = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return (
        max(record["peak"] - record["program"] for record in records),
        log,
        log[-1]["seconds"],
    )


def largest_difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """The largest relative difference of losses and of norms of gradients."""
    pairs = [
        (a[name], b[name])
        for a, b in zip(ours, theirs, strict=True)
        for name in ("loss", "grad_norm")
    ]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="45 million weights")
    width, layers = (512, 14) if parser.parse_args().quick else (768, 24)
    with TemporaryDirectory() as folder:
        weights = make_inputs(Path(folder), width, layers)
        runs = {ranks: run(Path(folder), ranks) for ranks in RANKS}
    print(f"{weights / 1e6:.0f} million weights: 16 bytes each are {16 * weights / 1e6:.0f} MB")
    print(f"{'processes':>10}{'peak MB':>10}{'share':>8}{'ideal':>9}{'s/step':>10}  losses")
    largest = runs[1][0]
    for ranks, (peak, log, seconds) in runs.items():
        losses = " ".join(f"{record['loss']:.6f}" for record in log)
        print(
            f"{ranks:>10}{peak / 1e6:>10.0f}{peak / largest:>8.2f}{1 / ranks:>9.2f}"
            f"{seconds:>10.2f}  {losses}"
        )
    difference = max(largest_difference(runs[ranks][1], runs[1][1]) for ranks in RANKS)
    if not difference <= TOLERANCE or math.isnan(difference):
        print(f"losses or gradient norms differ by {difference:.2g}: no figures")
        return 1
    figures = [
        (f"memory of 1 in {ranks}", runs[ranks][0] / largest, bar) for ranks, bar in SHARES.items()
    ]
    figures.append(("losses and norms differ by", difference, TOLERANCE))
    print(
        "; ".join(
            f"{name} {value:.2g} (bar {bar:g}) {'held' if value <= bar else 'short'}"
            for name, value, bar in figures
        )
    )
    return 0 if all(value <= bar for _, value, bar in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
