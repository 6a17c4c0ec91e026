"""python -m benchmarks.device [--quick]: how close does a step come to the limits of this device?

(1) The rates of a large product in bfloat16 and of a copy, which are the ceilings. (2) The head,
forward and backward, compared with its three products. (3) Steps without an update of kto, dpo and
grpo with cached values of the reference: a model of 1 to 2 billion weights that all train, the same
with recomputed activations, and one of 8 billion weights that trains an adapter with recomputed
activations. Each line has the seconds, the share of the first ceiling that the step's necessary
operations reach, and the memory next to its prediction. A case that runs out of memory says so.

On a CPU models are tiny and not compared with the bar. --quick: the smaller model only. Exit
status: 0 if all figures are within their bars and all cases fit, otherwise 1.
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.device.measure import (
    LARGER,
    SMALL_VARIANTS,
    VARIANTS,
    copy_rate,
    head_seconds,
    measure_steps,
    product_rate,
)
from benchmarks.step import THREADS
from benchmarks.step.cases import TINY
from valence.models.build import best_device

HEAD_BAR = 1.5
"""Maximum time of the head relative to its matrix products."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smaller model only")
    is_quick = parser.parse_args(arguments).quick
    device, on_gpu = best_device(), torch.cuda.is_available()
    torch.set_num_threads(THREADS)
    print(torch.cuda.get_device_name() if on_gpu else "no GPU: models are tiny", flush=True)
    size = 8192 if on_gpu else 512
    rate = product_rate(device, size)
    print(
        f"ceilings: {rate / 1e12:.3g} TFLOP/s in bfloat16, "
        f"{copy_rate(device, size) / 1e12:.3g} TB/s of a copy",
        flush=True,
    )
    seconds, products = head_seconds(*((LARGER, 8192) if on_gpu else (TINY, 256)), device)
    print(f"head: {seconds:.4f} s, its products {products:.4f} s", flush=True)
    variants = VARIANTS if on_gpu else SMALL_VARIANTS
    failures = 0
    for variant in variants[:2] if is_quick else variants:
        for figures in measure_steps(variant, device, rate):
            print(figures, flush=True)
            failures += bool(figures.failure)
    is_within = seconds / products <= HEAD_BAR
    verdict = ("within" if is_within else "over") if on_gpu else "not compared"
    print(f"\nhead {seconds / products:.2f} (bar {HEAD_BAR:g}, {verdict}), {failures} failures")
    return 0 if (is_within or not on_gpu) and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
