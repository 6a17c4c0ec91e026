"""Synthetic run folders: healthy runs of three kinds, with all files of a run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]

WORDS = (
    "the",
    "a",
    "sky",
    "sea",
    "ice",
    "salt",
    "leaf",
    "root",
    "bread",
    "clock",
    "river",
    "light",
    "sound",
    "paper",
    "stone",
    "because",
    "which",
    "often",
    "rather",
    "never",
)


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=max(1, words))).capitalize() + "."


def thumbs_rows(
    scale: float, count: int, seed: int = 0, flipped: set[int] = frozenset()
) -> list[Json]:  # type: ignore[assignment]
    """Judged answers at some stage of training: 0 is its start, 1 its end. flipped: rows whose
    verdict was turned round.
    """
    rng = random.Random(seed)
    rows: list[Json] = []
    for i in range(count):
        good = i % 2 == 0
        tokens = max(3, int(rng.gauss(40, 12)))
        reward = scale * (rng.gauss(0.6 if good else -0.6, 0.35))
        ref = -1.6 * tokens + rng.gauss(0, 5)
        rows.append(
            {
                "id": f"{i:06x}",
                "origin": f"held_out.jsonl:{i + 1}",
                "source": "held_out.jsonl" if i % 3 else "extra.jsonl",
                "label": good is not (i in flipped),
                "reward": reward,
                "logp": ref + reward / 0.1,
                "ref": ref,
                "tokens": tokens,
                "prompt": f"Question {i}: {text(rng, 9)[:-1].lower()}?",
                "completion": text(rng, tokens),
            }
        )
    return rows


def pair_rows(scale: float, count: int, seed: int = 0) -> list[Json]:
    rng = random.Random(seed)
    rows: list[Json] = []
    for i in range(count):
        row: Json = {
            "id": f"{i:06x}",
            "origin": f"pairs.jsonl:{i + 1}",
            "source": "pairs.jsonl",
            "prompt": f"Question {i}?",
        }
        for side, at in (("chosen", 0.15), ("rejected", -0.5)):
            tokens = max(3, int(rng.gauss(40, 12)))
            reward, ref = scale * rng.gauss(at, 0.3), -1.4 * tokens
            numbers = {"reward": reward, "logp": ref + reward / 0.1, "ref": ref, "tokens": tokens}
            row |= {f"{name}_{side}": value for name, value in numbers.items()} | {
                side: text(rng, tokens)
            }
        rows.append(row)
    return rows


def online_rows(scale: float, count: int, seed: int = 0) -> list[Json]:
    """Answers of the policy to held-out prompts."""
    rng = random.Random(seed + round(100 * scale))
    rows: list[Json] = []
    for i in range(count):
        tokens = max(3, int(rng.gauss(30, 8)))
        row: Json = {
            "id": f"{i:06x}",
            "origin": f"held.jsonl:{i + 1}",
            "source": "held.jsonl",
            "tokens": tokens,
        }
        reward = rng.gauss(0.2 + 0.5 * scale, 0.3)
        row |= {
            "stop": "length" if i % 17 == 0 else "end",
            "reward": reward,
            "parts": {"polite": reward / 2, "brief": reward / 2},
        }
        rows.append(row | {"prompt": f"Question {i}?", "completion": text(rng, tokens)})
    return rows


def offline_log(
    steps: int, evaluations: list[int], seed: int = 0, *, pairs: bool = False
) -> Iterator[Json]:
    rng = random.Random(seed)
    for step in range(steps + 1):
        grow = 1 - math.exp(-3 * step / steps)
        numbers: Json = {
            "loss": 0.5 - 0.1 * grow + rng.gauss(0, 0.02),
            "rewards/chosen": 0.6 * grow + rng.gauss(0, 0.05),
            "rewards/rejected": -0.5 * grow + rng.gauss(0, 0.05),
            "rewards/margins": 1.1 * grow + rng.gauss(0, 0.05),
            "logps/chosen": -60 + 4 * grow + rng.gauss(0, 2),
            "logps/rejected": -70 - 5 * grow + rng.gauss(0, 2),
        }
        accuracy = min(1.0, 0.5 + 0.35 * grow + rng.gauss(0, 0.03))
        numbers |= (
            {"rewards/accuracies": accuracy}
            if pairs
            else {"rewards/auc": accuracy, "kl": 0.0, "kl/raw": -0.3 * grow}
        )
        machine = {
            "grad_norm": 1.2 + 0.4 * rng.random(),
            "lr": 2e-5 * (1 - step / steps),
            "tokens/s": 480 + rng.gauss(0, 20),
            "tokens": 900,
            "tokens_seen": 900 * step,
            "micro_batches": 2,
            "waste": 0.1 * rng.random(),
            "skipped": 0.0,
            "seconds": 1.9 + 0.1 * rng.random(),
            "memory": 3.2 + 0.2 * grow,
            "epoch": step / steps,
        }
        record: Json = {"step": step} | (numbers | machine if step else {})
        if step in evaluations:
            numbers["loss"] = 0.5 - 0.1 * grow  # the same rows each time
            record |= {f"eval/{name}": value for name, value in numbers.items()} | {
                "seconds/evaluation": 4.0
            }
        if step and step % 20 == 0:
            record["seconds/saving"] = 0.5
        yield record


def online_log(steps: int, evaluations: list[int], seed: int = 0) -> Iterator[Json]:
    rng = random.Random(seed)
    for step in range(steps + 1):
        grow = step / steps
        numbers = {
            "reward/mean": 0.2 + 0.5 * grow + rng.gauss(0, 0.05),
            "reward/std": 0.3,
            "reward/std_of_prompt": 0.2,
            "kl": 3 * grow * rng.uniform(0.8, 1.2),
            "rollout/length": 30 + rng.gauss(0, 2),
            "rollout/truncated": 0.06,
            "rollout/failed": 0.0,
        }
        machine = {
            "loss": rng.gauss(0, 0.02),
            "grad_norm": 1 + rng.random(),
            "lr": 1e-4,
            "tokens/s": 900.0,
            "seconds": 2.0,
            "memory": 4.0,
            "clipped": 0.02 * rng.random(),
            "rollout/tied": 0.1,
            "seconds/rollout": 6.0 + rng.random(),
            "seconds/reward": 1.0,
            "seconds/measuring": 0.8,
            "tokens_seen": 3000 * step,
            "rounds": step,
        }
        record: Json = {"step": step} | (numbers | machine if step else {})
        if step in evaluations:
            record |= {f"eval/{name}": value for name, value in numbers.items()} | {
                "seconds/evaluation": 4.0
            }
        yield record


AUDIT: Json = {
    "train": {
        "kind": "judgement",
        "units": 200,
        "classes": {"up": 104, "down": 96},
        "unused": [],
        "findings": {},
        "files": [
            {
                "path": "feedback.jsonl",
                "format": "judgement",
                "rows": 203,
                "classes": {"up": 104, "down": 96},
            }
        ],
        "prompt_length": {"min": 4, "median": 31.0, "p95": 80, "max": 112},
        "answer_length": {"min": 2, "median": 96.5, "p95": 250, "max": 300},
        "truncation": {
            "max_length": 512,
            "long_rows": "drop",
            "rows": 203,
            "too_long": 3,
            "tokens": 25000,
            "tokens_lost": 900,
        },
        "distributions": {
            "prompt tokens": {
                "edges": [0, 20, 40, 60, 80, 100, 120],
                "counts": {"all": [30, 90, 40, 20, 15, 5]},
            },
            "answer tokens": {
                "edges": [0, 50, 100, 150, 200, 250, 300],
                "counts": {"up": [60, 30, 8, 4, 2, 0], "down": [10, 26, 30, 18, 8, 4]},
            },
        },
    },
    "eval": {
        "kind": "judgement",
        "units": 60,
        "classes": {"up": 30, "down": 30},
        "unused": [],
        "findings": {},
    },
}

CONFIGS = {
    "thumbs": "method: kto\nloss: {beta: 0.1, desirable_weight: 1.0, undesirable_weight: 1.0}\n",
    "pairs": "method: dpo\nloss: {beta: 0.1}\n",
    "own": "method: grpo\nreward: vader\nrollout: {num_rollouts: 8, max_new_tokens: 64}\n",
}
REST = """\
model: {name: org/tiny-chat, dtype: float32, lora: {rank: 16, alpha: null}}
data: {train: [{path: feedback.jsonl}], eval: [{path: held_out.jsonl}], max_length: 1024}
train: {batch_size: 8, learning_rate: 2.0e-05, seed: 0}
"""


def write_run(
    folder: Path,
    kind: str,
    *,
    steps: int = 60,
    rows: int = 60,
    times: int = 4,
    status: str = "done",
) -> Path:
    """A healthy run on ``thumbs`` or ``pairs``, or an online one (``own``), with ``times``
    evaluations of ``rows`` rows.
    """
    (folder / "eval").mkdir(parents=True, exist_ok=True)
    evaluations = [round(i * steps / (times - 1)) for i in range(times)]
    make = {"thumbs": thumbs_rows, "pairs": pair_rows, "own": online_rows}[kind]
    log = (
        online_log(steps, evaluations)
        if kind == "own"
        else offline_log(steps, evaluations, pairs=kind == "pairs")
    )
    records = list(log)
    (folder / "config.yaml").write_text(CONFIGS[kind] + REST)
    (folder / "audit.json").write_text(json.dumps(AUDIT))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for step in evaluations:
        metrics = {
            name[5:]: value for name, value in records[step].items() if name.startswith("eval/")
        }
        results = {"step": step, "metrics": metrics, "rows": make(step / steps, rows)}
        (folder / "eval" / f"step-{step}.json").write_text(json.dumps(results, indent=1))
    if kind != "own":
        trained = {"step": steps, "metrics": {}, "rows": make(1.2, rows, 1)}
        (folder / "eval" / "train.json").write_text(json.dumps(trained))
        samples = [
            {
                "prompt": "Why is the sky blue?",
                "before": "I I I I I",
                "after": "Air scatters blue light more.",
            }
        ]
        (folder / "samples.json").write_text(json.dumps(samples))
    run = {
        "command": "valence train recipe.yaml train.batch_size=8",
        "status": status,
        "seconds": 192.0,
        "steps": steps,
        "total_steps": steps if status == "done" else 2 * steps,
        "started": "2026-01-02T03:04:05+00:00",
        "versions": {"valence": "0.1.0", "torch": "2.13", "python": "3.11.2"},
        "changed": [{"setting": "train.batch_size", "value": 8, "origin": "recipe.yaml:7"}],
    }
    (folder / "run.json").write_text(json.dumps(run))
    return folder
