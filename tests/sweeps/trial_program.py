"""Stands for ``valence train`` in tests of sweeps: writes the run folder of a run of a few steps,
without a model.

The objective of a step is a known function of beta, the learning rate and the seed. The log serves
as checkpoint. The environment variable ``FAKE`` is a JSON object: ``pause`` (seconds per step),
and ``fails`` (beta -> "mistake", "rows", "crash", "kill" or "nan").
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from valence.storage import Lock, add_checksum

STEPS, EVERY = 6, 2
MISTAKES = {
    "mistake": {"error": "5 steps in a row were not finite", "code": "loss-not-finite"},
    "rows": {"error": "no row can be used", "code": "rows-unusable"},
}


def objective(beta: float, rate: float, seed: int, step: int) -> float:
    noise = random.Random(f"{beta}, {rate}, {seed}").gauss(0, 0.003)
    return 0.5 + step / STEPS * (0.3 - abs(beta - 0.1) - abs(rate - 1e-3) * 50 + noise)


def main() -> int:
    settings = dict(word.split("=", 1) for word in sys.argv[3:] if "=" in word)
    fake = json.loads(os.environ.get("FAKE", "{}"))
    run = Path(json.loads(settings["run.dir"]))
    beta, rate = (
        float(settings.get("loss.beta", 0.1)),
        float(settings.get("train.learning_rate", 1e-3)),
    )
    seed = int(settings["train.seed"])
    run.mkdir(parents=True, exist_ok=True)
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: signals.append(n))
    with Lock(run):
        return train(run, beta, rate, seed, fake, signals)


def train(
    run: Path, beta: float, rate: float, seed: int, fake: dict[str, Any], signals: list[int]
) -> int:
    log = run / "metrics.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    fault = fake.get("fails", {}).get(str(beta))
    write_facts(run, status="running", total_steps=STEPS)
    emit({"event": "started", "run": str(run), "resumed": bool(done)})
    (run / "command.json").write_text(json.dumps(sys.argv[1:]))
    with (run / "starts").open("a") as file:
        file.write(f"{len(done)}\n")
    for step in range(len(done), STEPS + 1):
        time.sleep(fake.get("pause", 0))
        if fault == "crash" and step == 3:
            raise RuntimeError("a defect of the trial")
        if fault == "kill" and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault in MISTAKES and step == 3:
            emit({"event": "done", "status": "failed", **MISTAKES[fault]})
            return 2
        record: dict[str, Any] = {"step": step, "loss": 1.0, "seconds": 0.1}
        if step % EVERY == 0:
            value = "nan" if fault == "nan" else objective(beta, rate, seed, step)
            record |= {"eval/rewards/auc": value, "eval/loss": 1.0}
        with log.open("a") as file:
            file.write(json.dumps(record) + "\n")
        emit(record)
        if signals:
            write_facts(run, status="interrupted", total_steps=STEPS)
            return 128 + signals[0]
    (run / "eval").mkdir(exist_ok=True)
    value = objective(beta, rate, seed, STEPS)
    rows = [{"id": "a", "origin": "rows.jsonl:1"}]
    for name, metrics in (("step-6", value), ("test", value - 0.05)):
        content = {"step": STEPS, "metrics": {"rewards/auc": metrics}, "rows": rows}
        (run / "eval" / f"{name}.json").write_text(json.dumps(add_checksum(content)))
    cache = {"hits": 3, "misses": 0}
    digest = {"data.train": {"rows": 1, "digest": "x"}}
    write_facts(
        run, status="done", seconds=1.0, total_steps=STEPS, reference_cache=cache, rows=digest
    )
    emit({"event": "done", "status": "done", "exit_status": 0})
    return 0


def write_facts(run: Path, **facts: Any) -> None:
    temporary = run / "run.json.tmp"
    temporary.write_text(json.dumps(add_checksum(facts)))
    temporary.rename(run / "run.json")


def emit(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
