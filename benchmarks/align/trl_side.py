"""A run of one of TRL's trainers, in a process of TRL's environment.

Usage: python -m benchmarks.align.trl_side JOB.json RESULT.json

Rows of KTO and DPO are token ids, in the order in which Valence has trained on them. With an
adapter, its base is the reference, and it is saved.
"""

# pyright: reportMissingImports=false
# (TRL is in the other environment.)

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")

import torch
import transformers
import trl
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.align.measures import SCORES, HeldOut, Point
from benchmarks.parity.trl_side import PLAIN, SAMPLING, TEXT_COLUMNS, spelled, tokenizer_of_ids

ONLINE = SAMPLING | {"dapo": SAMPLING["grpo"]}
"""Trainers that sample completions."""


class Measuring(TrainerCallback):
    """Measures the policy at some steps, and the seconds of training from loading the policy on,
    without the measurements.
    """

    policy: Any = None

    def __init__(self, job: dict[str, Any]) -> None:
        self.steps = set(job["measured"])
        self.held_out = HeldOut(**job["held_out"])
        self.scores = SCORES[job["task"]]
        self.batch = job["batch"] if job["trainer"] in ONLINE else 0
        self.reference = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(job["model"])
        self.points: list[Point] = []
        self.seconds, self.start = 0.0, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds += time.perf_counter() - self.start
        if state.global_step in self.steps:
            self.points.append(
                self.held_out.measure(
                    self.policy, self.reference, self.tokenizer, self.scores,
                    step=state.global_step, seconds=self.seconds,
                    sampled=self.batch * state.global_step,
                )
            )  # fmt: skip
            print(self.points[-1], file=sys.stderr, flush=True)
        self.start = time.perf_counter()


def trainer_of(job: dict[str, Any], scratch: str) -> tuple[Any, Measuring]:
    def load() -> Any:
        dtype = getattr(torch, job.get("dtype", "float32"))
        return AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)

    measuring = Measuring(job)
    policy = load()
    measuring.policy = policy
    arguments = PLAIN | {
        "output_dir": scratch, "max_steps": job["steps"], "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant", "warmup_steps": 0, "logging_steps": 1,
        "max_grad_norm": 1.0, "weight_decay": 0.0, "seed": job["seed"], "disable_dropout": True,
        "per_device_train_batch_size": job["batch"] // job.get("accumulation", 1),
        "gradient_accumulation_steps": job.get("accumulation", 1), **job["config"],
    }  # fmt: skip
    common: dict[str, Any] = {"model": policy, "callbacks": [measuring]}
    if job["trainer"] in ONLINE:
        tokenizer = AutoTokenizer.from_pretrained(job["model"])
        kind, config = ONLINE[job["trainer"]]
        trainer = kind(
            args=config(shuffle_dataset=False, **arguments),
            reward_funcs=measuring.scores[0],
            train_dataset=Dataset.from_list(job["rows"]),
            processing_class=tokenizer,
            **common,
        )
    else:
        kind, config = {
            "kto": (trl.KTOTrainer, trl.KTOConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig)
        }[job["trainer"]]  # fmt: skip
        rows = [
            {k: spelled(v) if k in TEXT_COLUMNS else v for k, v in row.items()}
            for row in job["rows"]
        ]
        trainer = kind(
            args=config(train_sampling_strategy="sequential", max_length=512, **arguments),
            **(
                {"peft_config": LoraConfig(task_type="CAUSAL_LM", **job["adapter"])}
                if "adapter" in job
                else {"ref_model": load()}
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer_of_ids(policy.config.vocab_size, job["held_out"]["end"]),
            **common,
        )
        for row, prepared in zip(job["rows"], trainer.train_dataset, strict=True):
            for name in row.keys() & set(TEXT_COLUMNS):
                if prepared[f"{name}_ids"] != row[name]:
                    raise RuntimeError(f"TRL prepared other tokens of {name} than it was given")
    return trainer, measuring


def main(job_file: str, result_file: str) -> None:
    disable_progress_bars()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    job = json.loads(Path(job_file).read_text())
    with tempfile.TemporaryDirectory() as scratch:
        trainer, measuring = trainer_of(job, scratch)
        trainer.train()
    if "adapter" in job:
        trainer.model.save_pretrained(job["save"])
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    versions = {module.__name__: module.__version__ for module in (trl, torch, transformers)}
    result = {
        "points": [asdict(point) for point in measuring.points],
        "losses": [entry["loss"] for entry in logged],
        "seconds": measuring.seconds,
        "versions": versions,
    }
    if job["trainer"] in ONLINE:
        length = sum(entry["completions/mean_length"] for entry in logged)
        result["tokens"] = round(length * job["batch"])
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
