"""One process of the benchmark: reads each file twice and prints its measurements as JSON."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from transformers.utils.logging import disable_progress_bar

from valence.batching.micro_batches import StepPacker
from valence.data.audit import audit
from valence.data.encode import Encoder
from valence.data.load import DataFile, load
from valence.data.sampler import Sampler
from valence.data.tokenize import tokenize
from valence.data.tokenized_dataset import TokenizedDataset
from valence.models.build import load_tokenizer
from valence.types import TokenizedExample

BATCH_SIZE = 64
REPEATS = 15


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak() -> float:
    """Largest resident memory since the last reset, in MB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def cpu_seconds() -> float:
    """Processor time of this process and its child processes."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def step_ratio(units: TokenizedDataset) -> float:
    """Time to build the micro-batches of a step from the arrays, relative to tuples."""
    sampler = Sampler(units, BATCH_SIZE)
    steps = [sampler.step(k)[0] for k in range(min(REPEATS, sampler.steps_per_epoch))]
    tuples = [[units[i] for i in indices] for indices in steps]

    def pack(examples: Sequence[TokenizedExample]) -> None:
        packer = StepPacker(examples)
        for indices in packer.pack(packer.example_indices, 8192):
            packer.micro_batch(indices)

    ratios: list[float] = []
    for indices, examples in zip(steps, tuples, strict=True):
        start = time.process_time()
        pack(examples)
        middle = time.process_time()
        pack([units[i] for i in indices])
        ratios.append((time.process_time() - middle) / (middle - start))
    return median(ratios)


def measure(encoder: Encoder, path: str) -> dict[str, Any]:
    reset_peak()
    cpu = cpu_seconds()
    times = [time.perf_counter()]
    loaded = load([DataFile(path)], "judgement")
    times.append(time.perf_counter())
    encoded = tokenize(encoder, loaded.examples)
    times.append(time.perf_counter())
    audit(loaded, encoded, encoder)
    times.append(time.perf_counter())
    cpu = cpu_seconds() - cpu
    units = encoded.units
    return {
        "cpu": cpu,
        "seconds": times[3] - times[0],
        "load": times[1] - times[0],
        "tokenize": times[2] - times[1],
        "audit": times[3] - times[2],
        "step": step_ratio(units),
        "peak": peak(),
        "workers": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        "tokens": int(units.num_unique_tokens.sum()),
        "bytes": units.nbytes,
    }


def main(model: str, files: Sequence[str]) -> None:
    disable_progress_bar()
    encoder = Encoder(load_tokenizer(model), max_length=1024)
    for path in files:
        for _ in ("empty", "filled"):
            sys.stdin.readline()
            print(json.dumps(measure(encoder, path)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
