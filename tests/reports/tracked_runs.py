"""A run with a tracker and without a model that is killed and resumed as real runs are."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from valence.reports import trackers as trackers_module
from valence.reports.sinks import SAMPLES, FanOut, JsonlSink
from valence.reports.trackers import Tracker

ROOT = Path(__file__).parents[2]
CONFIG = {
    "method": "kto",
    "train.learning_rate": 1e-5,
    "model.lora.rank": None,
    "train.betas": [0.9, 0.999],
}
ROWS = [
    {
        "id": str(i),
        "origin": f"eval.jsonl:{i}",
        "prompt": "why | so?\nx",
        "completion": "because",
        "label": i % 2 == 0,
        "reward": 0.5 - i,
        "logp": -3.0,
        "tokens": 4,
    }
    for i in range(30)
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tests away from the folders of the user who runs them."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in (
        "WANDB_API_KEY",
        "WANDB_MODE",
        "WANDB_BASE_URL",
        "NETRC",
        "MLFLOW_TRACKING_URI",
        "TRACKIO_DIR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # set here so that it is taken back
    for name, value in trackers_module.PRIVACY.items():
        monkeypatch.setenv(name, value)


def record(step: int) -> dict[str, Any]:
    odd = (
        {"grad_norm": float("nan"), "kl": float("inf")}
        if step == 1
        else {"grad_norm": 0.5, "kl": 0.25}
    )
    evaluation = (
        {"eval/loss": 1 / (step + 1), "eval/kl": 0.0, "eval/kl/raw": -0.1} if step % 3 == 0 else {}
    )
    return {"step": step, "loss": 1 / (step + 1), "tokens/s": 100, **odd, **evaluation}


class Killed:
    """A run without a model: a log, evaluations and one tracker, killed and resumed as real runs
    are.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.settings, self.warnings = (
            folder,
            {"kind": "tensorboard", **settings},
            list[str](),
        )

    def log_steps(
        self,
        first: int,
        last: int,
        *,
        keep: int | None = None,
        closes: bool = True,
        test: bool = False,
    ) -> Tracker:
        """Logs steps first..last. keep: the log is cut to as many records before, as a checkpoint
        would have it.
        """
        log = JsonlSink(self.folder / "metrics.jsonl")
        if keep is not None:
            lines = (self.folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
            log.load_state_dict({"bytes": len(b"".join(lines[:keep]))})
        tracker = Tracker(self.settings, self.warnings.append)
        fan = FanOut([log], [tracker], self.warnings.append)
        fan.start(CONFIG, self.folder, keep is not None)
        (self.folder / "eval").mkdir(exist_ok=True)
        for step in range(first, last + 1):
            if step % 3 == 0:
                (self.folder / "eval" / f"step-{step}.json").write_text(
                    json.dumps({"step": step, "metrics": {}, "rows": ROWS})
                )
                fan.table(SAMPLES, step, ROWS)
            fan.log(record(step))
        if test:
            fan.log({"step": last, "test/loss": 0.125})
        if closes:
            fan.close("done")
        else:
            tracker.log({"step": last})  # an empty one: when it is taken, all before are done
            until = time.monotonic() + 20
            while tracker.waiting and time.monotonic() < until:
                time.sleep(0.01)
            log.close()
        return tracker


def killed_twice(run: Killed) -> None:
    """Kill a run ahead of its checkpoint and then behind it, run it to the end, and resume it once
    more.
    """
    run.log_steps(0, 5, closes=False)  # the checkpoint is that of step 4
    run.log_steps(5, 6, keep=5)
    log = run.folder / "metrics.jsonl"
    # the tracker was behind: it never saw this
    log.write_text(log.read_text() + json.dumps(record(7)) + "\n")
    run.log_steps(8, 8, keep=8, test=True, closes=False)
    run.log_steps(9, 8, keep=9, test=True)
    assert run.warnings == []


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The complete records of a file of wandb, for which it has no public reader: LevelDB's log
    format behind a header, blocks of 32 KiB with pieces of a checksum, a length and a kind (1
    whole, 2 first, 3 middle, 4 last).
    """
    at, parts = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        if not kind or at + 7 + length > len(content):
            return
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""
