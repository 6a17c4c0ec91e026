"""python -m benchmarks.reward_model [--quick]: a pointwise reward model on film
reviews, SmolLM2-135M-Instruct with an adapter.

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

ACCURACY, SECONDS = 0.85, 600
HELD_OUT, TRAINED = 500, 3000
LETTERS = 500


def row(text: str, liked: bool) -> dict[str, Any]:
    end = text if len(text) <= LETTERS else "... " + text[-LETTERS:].split(" ", 1)[1]
    return {"prompt": "A film review: ", "completion": end, "label": liked}


def recipe(model: Path, folder: Path) -> dict[str, Any]:
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
    held_out, trained = (100, TRAINED // 10) if quick else (HELD_OUT, TRAINED)
    model, films = assets.smollm2(), assets.film_reviews(held_out + trained)
    with TemporaryDirectory() as place:
        folder = Path(place)
        for name, part in (("test", films[:held_out]), ("train", films[held_out:])):
            lines = (json.dumps(row(text, liked)) + "\n" for text, liked in part)
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        began = time.monotonic()
        valence.train(recipe(model, folder), quiet=True)
        seconds = time.monotonic() - began
        metrics = json.loads((folder / "run" / "eval" / "test.json").read_text(encoding="utf-8"))[
            "metrics"
        ]
    for name, value in metrics.items():
        print(f"{name:28}{value:10.4f}")
    bar = 0.5 + 3 * 0.5 / held_out**0.5 if quick else ACCURACY
    right = metrics["rewards/accuracies"]
    held = right >= bar
    line = f"accuracy {right:.3f}>={bar:.2f} {'held' if held else 'short'}"
    if not quick:
        held = held and seconds <= SECONDS
        line += f" seconds {seconds:.0f}<={SECONDS} {'held' if seconds <= SECONDS else 'short'}"
    print(line)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
