"""python -m benchmarks.context [--quick]: the activations of each process by the number of
processes that share the tokens of a long row (`parallel.context`).

A random Llama-shaped model of eight layers (--quick: four) with grouped heads runs one row of 4,096
tokens (--quick: 1,024) forward and backward on a CPU, in one process, and in 2 and 4. The figures
are the bytes of tensors that a process saves for the backward pass, weights excluded, and how much
of them are keys and values of the whole row, which every process saves. Loss and gradients must
agree. Exit status: 0 all figures are within their bars, 1 some are not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from valence.distributed.launcher import launch

WORKER = (sys.executable, "-m", "benchmarks.context.worker")
RANKS = (1, 2, 4)
MARGIN = 1.05
"""Largest allowed share of activations of a process besides keys and values, relative to 1/N."""
AGREE = 1e-5


def run(folder: Path, ranks: int, tokens: int, layers: int, mode: str) -> dict[str, Any]:
    """Figures of the process that saves the most."""
    notes = folder / f"{mode} {ranks}"
    notes.mkdir()
    os.environ["VALENCE_NOTES"] = str(notes)
    status = launch([str(tokens), str(layers), mode], ranks, program=WORKER)
    assert status == 0, f"the processes ended with {status}"
    results = [json.loads(path.read_text()) for path in sorted(notes.glob("rank-*.json"))]
    assert len(results) == ranks
    return max(results, key=lambda result: result["saved"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four layers, 1,024 tokens")
    tokens, layers = (1024, 4) if parser.parse_args().quick else (4096, 8)
    figures: list[tuple[str, float, float]] = []
    print(f"{'recomputed':>11}{'processes':>10}{'saved MB':>10}{'keys MB':>9}{'share':>7}  loss")
    with TemporaryDirectory() as folder:
        for mode in ("off", "full"):
            alone: dict[str, Any] = {}
            for ranks in RANKS:
                result = run(Path(folder), ranks, tokens, layers, mode)
                alone = alone or result
                print(
                    f"{mode:>11}{ranks:>10}{result['saved'] / 1e6:>10.1f}"
                    f"{result['keys'] / 1e6:>9.1f}{result['saved'] / alone['saved']:>7.2f}"
                    f"  {result['loss']:.6f}"
                )
                part, total = (item["saved"] - item["keys"] for item in (result, alone))
                figures += [
                    (f"{mode} in {ranks}", ranks * part / total, MARGIN),
                    *(
                        (f"{name} differs by", abs(result[name] / alone[name] - 1), AGREE)
                        for name in ("loss", "norm")
                    ),
                ]
    failed = [f"{name} {value:.3g} (bar {bar:g})" for name, value, bar in figures if value > bar]
    print("; ".join(failed) or "all figures held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
