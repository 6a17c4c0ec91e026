"""Small runs to compare: offline on rated answers, or online, with any settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from valence.reports.comparable_runs import ComparedRun, find_runs, read_runs


def config(
    method: str = "kto",
    *,
    beta: float = 0.1,
    reward: str = "vader",
    train: str = "rows.jsonl",
    seed: int = 0,
) -> str:
    return json.dumps(
        {
            "method": method,
            "model": {"name": "org/tiny-chat", "lora": {"rank": 16, "alpha": None}},
            "data": {"train": [{"path": train, "keys": {}}], "eval": [{"path": "held_out.jsonl"}]},
            "loss": {"beta": beta},
            "reward": [{"name": reward}],
            "train": {"seed": seed},
        }
    )


def thumbs(step: int, rewards: Mapping[str, float] | None = None, **more: Any) -> dict[str, Any]:
    grown = step / 20
    metrics = {
        "loss": 0.5 - 0.1 * grown,
        "rewards/auc": 0.5 + 0.2 * grown,
        "rewards/margins": grown,
        "grad": 1.0,
        "kl/raw": -grown,
    }
    metrics |= {"logratio/chosen": grown, "logratio/rejected": -2 * grown, **more}
    rows = [
        {
            "id": id,
            "origin": f"held_out.jsonl:{i}",
            "label": i % 2 == 0,
            "reward": reward,
            "prompt": f"Ask {id}",
            "completion": "Yes.",
        }
        for i, (id, reward) in enumerate(
            (rewards or {"a": 0.1, "b": 0.2, "c": 0.3}).items(), start=1
        )
    ]
    return {"step": step, "metrics": metrics, "rows": rows}


def online_evaluation(
    step: int, reward: float, kl: float, message: str = "An answer."
) -> dict[str, Any]:
    row = {
        "origin": "prompts.jsonl:1",
        "stop": "end",
        "tokens": 3,
        "prompt": "Ask",
        "completion": message,
    }
    rows = [{"id": id, **row, "reward": worth} for id, worth in (("a", reward), ("b", 0.5))]
    return {
        "step": step,
        "metrics": {"reward/mean": reward, "kl": kl, "rollout/length": 3.0},
        "rows": rows,
    }


def a_run(
    folder: Path,
    *evaluations: Mapping[str, Any],
    settings: str | None = None,
    seconds: float = 2.0,
    **facts: Any,
) -> Path:
    """A finished run of 20 steps, logged every 10, with these evaluations."""
    (folder / "eval").mkdir(parents=True)
    (folder / "config.yaml").write_text(settings or config())
    log = [
        {
            "step": s,
            "loss": 0.6 - s / 100,
            "lr": 1e-4,
            "seconds": seconds,
            "tokens_seen": 1000 * s,
            "lag": 1.5,
        }
        for s in (10, 20)
    ]
    for result in evaluations:
        (folder / f"eval/step-{result['step']}.json").write_text(json.dumps(result))
        log.append(
            {
                "step": result["step"],
                **{f"eval/{name}": value for name, value in result["metrics"].items()},
            }
        )
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in sorted(log, key=lambda r: r["step"]))
    )
    versions = {"valence": "0.1.0", "torch": "2.13"}
    message = {
        "status": "done",
        "method": "kto",
        "steps": 20,
        "total_steps": 20,
        "seconds": 65.0,
        "versions": versions,
        **facts,
    }
    (folder / "run.json").write_text(json.dumps(message))
    return folder


def read(*places: Path) -> list[ComparedRun]:
    return read_runs(find_runs(places))
