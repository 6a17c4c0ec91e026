"""python -m benchmarks.reward_model [--quick]: a pointwise reward model, SmolLM2-135M-Instruct with
an adapter, on film reviews.

It reads the last 500 characters of each review. The time includes reading, loading, training,
evaluating 500 held-out reviews, and writing the model. Bars: 85 % accuracy on the held-out reviews,
ten minutes on two cores. --quick trains on a tenth of the reviews and evaluates 100; its bar is
three standard errors above chance. Exit status: 0 all figures reach their bars, 1 some do not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import valence
from examples.demo import assets

MIN_ACCURACY, MAX_SECONDS = 0.85, 600
NUM_TEST, NUM_TRAIN = 500, 3000
MAX_CHARACTERS = 500


def row(text: str, liked: bool) -> dict[str, Any]:
    """A rated answer with the end of a review, where most reviewers state their opinion."""
    end = text if len(text) <= MAX_CHARACTERS else "... " + text[-MAX_CHARACTERS:].split(" ", 1)[1]
    return {"prompt": "A film review: ", "completion": end, "label": liked}


def recipe(model: Path, folder: Path) -> dict[str, Any]:
    """Recipe of a pointwise reward model on train.jsonl and test.jsonl of a folder."""
    return {
        "method": "pointwise",
        "model": {"name": str(model), "dtype": assets.quick_dtype(), "lora": {"rank": 16}},
        "data": {
            "train": str(folder / "train.jsonl"),
            "test": str(folder / "test.jsonl"),
            "max_length": 256,
        },
        "train": {"batch_size": 16, "learning_rate": 5.0e-4, "warmup": 0.05},
        "run": {"dir": str(folder / "run")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reward_model", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the reviews")
    quick = parser.parse_args().quick
    num_test, num_train = (100, NUM_TRAIN // 10) if quick else (NUM_TEST, NUM_TRAIN)
    model, reviews = assets.smollm2(), assets.film_reviews(num_test + num_train)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, examples in (("test", reviews[:num_test]), ("train", reviews[num_test:])):
            lines = (json.dumps(row(text, liked)) + "\n" for text, liked in examples)
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        start = time.monotonic()
        valence.train(recipe(model, folder), quiet=True)
        seconds = time.monotonic() - start
        metrics = json.loads((folder / "run" / "eval" / "test.json").read_text(encoding="utf-8"))[
            "metrics"
        ]
    for name, value in metrics.items():
        print(f"{name:28}{value:10.4f}")
    bar = 0.5 + 3 * 0.5 / num_test**0.5 if quick else MIN_ACCURACY
    accuracy = metrics["rewards/accuracies"]
    is_reached = accuracy >= bar
    line = f"accuracy {accuracy:.3f}>={bar:.2f} {'held' if is_reached else 'short'}"
    if not quick:
        is_reached = is_reached and seconds <= MAX_SECONDS
        line += (
            f" seconds {seconds:.0f}<={MAX_SECONDS} {'held' if seconds <= MAX_SECONDS else 'short'}"
        )
    print(line)
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main())
