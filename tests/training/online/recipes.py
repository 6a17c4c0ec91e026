"""A tiny model, its prompts, and a recipe for online training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.logs import repeatable
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny

VOWELS = "tests.training.online.rewards:vowels"
PROMPTS = [
    {"prompt": [{"role": "user", "content": f"say {kind}"}], "wanted": k % 2}
    for k, kind in enumerate(
        ("hello", "moon", "sun and star", "Paris", "the earth", "what is 2 + 2?", "a capital")
    )
]


def make(place: Path, **changes: Any) -> None:
    """Write a model and two files of prompts. changes: settings of the model's configuration."""
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32, **changes).save_pretrained(
        place / "model"
    )  # type: ignore[operator]
    tokenizer.save_pretrained(place / "model")
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (place / "held.jsonl").write_text(
        "".join(json.dumps({"prompt": f"tell of {n}"}) + "\n" for n in ("rain", "snow", "wind"))
    )


def recipe(place: Path, method: str = "grpo", **changes: dict[str, Any] | str) -> dict[str, Any]:
    """Seven prompts, three a round: three rounds an epoch. changes: sections to be added to, or
    replaced.
    """
    results: dict[str, Any] = {
        "method": method,
        "model": {"name": str(place / "model"), "lora": {"rank": 2}},
        "data": {
            "train": [str(place / "prompts.jsonl")],
            "eval": [str(place / "held.jsonl")],
            "max_length": 128,
        },
        "reward": VOWELS,
        "rollout": {"num_rollouts": 4, "max_new_tokens": 6},
        "train": {"batch_size": 3, "epochs": 10.0, "max_steps": 6, "learning_rate": 1e-2},
        "eval": {"every": 3.0},
        "run": {"dir": str(place / "run"), "save_every": 1},
    }
    for name, change in changes.items():
        results[name] = results.get(name, {}) | change if isinstance(change, dict) else change
    return results


def recipe_without_eval(
    place: Path,
    method: str = "grpo",
    **changes: dict[str, Any] | str,
) -> dict[str, Any]:
    """The same recipe without held-out prompts."""
    result = recipe(place, method, **changes)
    return result | {"data": {**result["data"], "eval": []}, "eval": {}}


def logged(place: Path, run: str = "run") -> list[dict[str, Any]]:
    """The log without times."""
    lines = (place / run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [repeatable(row) for row in rows]
