"""TRL's side: a process in TRL's environment that receives commands over a pipe, one line of JSON
each.

Usage: python -m benchmarks.step.trl_worker

Every input line is {"do": name, ...}. The reply is one line: a JSON object, or {"error": text}.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")

import peft
import torch
import transformers
import trl
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl.trainer.utils import pad

from benchmarks.parity.trl_side import spelled, tokenizer_of_ids
from benchmarks.step import THREADS
from benchmarks.step.memory import peak_above_idle
from benchmarks.step.trl_best import best, without_needless_mask

TRAINERS = {
    "kto": (trl.KTOTrainer, trl.KTOConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "bradley_terry": (trl.RewardTrainer, trl.RewardConfig),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    "distill": (trl.DistillationTrainer, trl.DistillationConfig),
}
# A trainer needs a data set at construction; the measured rows come later, through the trainer's
# collator.
STAND_INS = {
    "kto": {"prompt": spelled([3, 4]), "completion": spelled([5]), "label": True},
    "dpo": {"prompt": spelled([3, 4]), "chosen": spelled([5]), "rejected": spelled([6])},
    "sft": {"prompt": spelled([3, 4]), "completion": spelled([5])},
    "bradley_terry": {"chosen": spelled([3, 4, 5]), "rejected": spelled([3, 4, 6])},
    "grpo": {"prompt": spelled([3, 4])},
    "distill": {"prompt": spelled([3, 4])},
}
GRPO = {"loss_type": "grpo", "beta": 0.0, "num_generations": 2, "per_device_train_batch_size": 2}
DISTILL = {"beta": 1.0, "per_device_train_batch_size": 2}
AS_SAMPLED = ("grpo", "distill")
"""Methods whose trainer takes completions in the form in which it samples them."""
PAD, EOS = "<0>", 2


class Session:
    """One trainer in one configuration."""

    def __init__(self, options: dict[str, Any], scratch: str) -> None:
        self.method, self.best = options["method"], options["best"]
        self.trainer = trainer_of(options, scratch)
        self.batches: dict[int, dict[str, Any]] = {}
        model, arguments = self.trainer.model, self.trainer.args
        if arguments.gradient_checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs=arguments.gradient_checkpointing_kwargs
            )
        if self.best:
            inner = model.get_base_model() if hasattr(model, "get_base_model") else model
            without_needless_mask(inner.base_model)
            if options["compiled"]:
                for layer in inner.base_model.layers:
                    layer.compile(dynamic=True)
        self.model = self.trainer.accelerator.prepare_model(model)
        self.model.train()
        self.trainer.current_gradient_accumulation_steps = 1

    def batch(self, number: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The rows as this trainer's collator makes them, padded."""
        if number not in self.batches:
            columns = COLUMNS[self.method](rows)
            self.batches[number] = (
                columns if self.method in AS_SAMPLED else self.trainer.data_collator(columns)
            )
        return dict(self.batches[number])

    def step(self, number: int, rows: list[dict[str, Any]], memory: bool) -> dict[str, float]:
        """Loss and gradient norm of one step without an update, and its time (s), or its peak
        memory (MB) in place of it.
        """
        batch = self.batch(number, rows)

        def run() -> tuple[float, float]:
            begin = time.perf_counter()
            with best() if self.best else nullcontext():
                with self.trainer.compute_loss_context_manager():
                    loss = self.trainer.compute_loss(self.model, batch)
                self.trainer.accelerator.backward(loss)
            return loss.item(), time.perf_counter() - begin

        (loss, seconds), peak = peak_above_idle(run) if memory else (run(), 0.0)
        grads = [p.grad.float() for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads).item()
        self.model.zero_grad(set_to_none=True)
        return {"loss": loss, "grad_norm": norm, "seconds": seconds, "peak": peak}


def trainer_of(options: dict[str, Any], scratch: str) -> Any:
    """TRL's trainer at its defaults, or in its fastest configuration: precomputed reference values
    and no activation checkpointing.
    """
    method = options["method"]
    trainer, config = TRAINERS[method]
    sampled = {"grpo": GRPO, "distill": DISTILL}
    settings: dict[str, Any] = sampled.get(method, {"max_length": options["max_length"]})
    with_reference = method in ("kto", "dpo")
    if options["best"]:
        settings = settings | {"gradient_checkpointing": options["checkpointing"]}
        settings |= {"precompute_ref_log_probs": True} if with_reference else {}
    arguments = config(
        output_dir=scratch, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        bf16=options["precision"] == "mixed", **settings,
    )  # fmt: skip
    dtype = torch.bfloat16 if options["precision"] == "bfloat16" else torch.float32
    kind = AutoModelForSequenceClassification if method == "bradley_terry" else AutoModelForCausalLM
    policy = kind.from_pretrained(options["policy"], dtype=dtype)
    if options["adapter"]:
        widened = options["precision"] != "bfloat16"
        policy = peft.PeftModel.from_pretrained(
            policy, options["adapter"], is_trainable=True, autocast_adapter_dtype=widened
        )
    extra: dict[str, Any] = {"reward_funcs": lambda **_: []} if method == "grpo" else {}
    if with_reference and not options["best"]:
        extra["ref_model"] = AutoModelForCausalLM.from_pretrained(options["reference"], dtype=dtype)
    if method == "distill":
        extra["teacher_model"] = AutoModelForCausalLM.from_pretrained(
            options["reference"], dtype=dtype
        )
    tokenizer = tokenizer_of_ids(16, EOS)
    # the score is read before the padding, so padding must differ from the end of an answer
    if method == "bradley_terry":
        tokenizer.pad_token = PAD
    extra |= {
        "train_dataset": Dataset.from_list([STAND_INS[method]] * 2),
        "processing_class": tokenizer,
    }
    return trainer(model=policy, args=arguments, **extra)


def kto_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pairs as TRL makes them: each prompt with the completion of the previous row, cyclically."""
    before = [rows[i - 1]["answers"][0] for i in range(len(rows))]
    return [
        {
            "prompt_ids": row["prompt"],
            "completion_ids": row["answers"][0],
            "KL_completion_ids": other,
            "label": row["label"],
            "ref_logps": row["ref"][0],
            "ref_KL_logps": row["mismatched_ref"],
        }
        for row, other in zip(rows, before, strict=True)
    ]


def dpo_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "prompt_ids": row["prompt"],
            "chosen_ids": row["answers"][0],
            "rejected_ids": row["answers"][1],
            "ref_chosen_logps": row["ref"][0],
            "ref_rejected_logps": row["ref"][1],
        }
        for row in rows
    ]


def sft_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    both = [(row["prompt"], row["answers"][0]) for row in rows]
    return [
        {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}
        for prompt, answer in both
    ]


def reward_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            f"{side}_ids": row["prompt"] + row["answers"][k]
            for k, side in enumerate(("chosen", "rejected"))
        }
        for row in rows
    ]


def sampled_columns(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of rollouts in the form of TRL's loss: prompts padded on the left, completions on the
    right.
    """
    answers = [answer for row in rows for answer in row["answers"]]
    prompts = [row["prompt"] for row in rows for _ in row["answers"]]

    def padded(values: list[list[Any]], side: str, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return pad(
            [torch.tensor(v, dtype=dtype) for v in values], padding_value=0, padding_side=side
        )

    batch = {
        "prompt_ids": padded(prompts, "left"),
        "prompt_mask": padded([[1] * len(p) for p in prompts], "left"),
        "completion_ids": padded(answers, "right"),
        "completion_mask": padded([[1] * len(a) for a in answers], "right"),
    }
    if "old" not in rows[0]:
        return batch
    return batch | {
        "old_per_token_logps": padded(
            [old for row in rows for old in row["old"]], "right", torch.float32
        ),
        "advantages": torch.tensor([advantage for row in rows for advantage in row["advantages"]]),
    }


COLUMNS: dict[str, Any] = {
    "kto": kto_columns,
    "dpo": dpo_columns,
    "sft": sft_columns,
    "bradley_terry": reward_columns,
    "grpo": sampled_columns,
    "distill": sampled_columns,
}


class Worker:
    """The commands. A case is a list of row sets, and the sessions that run them."""

    def __init__(self, scratch: str) -> None:
        self.scratch = scratch
        self.sets: list[list[dict[str, Any]]] = []
        self.sessions: dict[str, Session] = {}

    def versions(self) -> dict[str, str]:
        return {module.__name__: module.__version__ for module in (trl, torch, transformers, peft)}

    def rows(self, sets: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Set the rows of the next case, and drop the sessions of the previous one."""
        self.sets, self.sessions = sets, {}
        torch.compiler.reset()
        return {}

    def load(self, name: str, **options: Any) -> dict[str, Any]:
        self.sessions[name] = Session(options, self.scratch)
        return {}

    def drop(self, name: str) -> dict[str, Any]:
        del self.sessions[name]
        return {}

    def step(self, name: str, number: int, memory: bool) -> dict[str, float]:
        return self.sessions[name].step(number, self.sets[number], memory)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    torch.set_num_threads(THREADS)
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as scratch:
        worker = Worker(scratch)
        for line in sys.stdin:
            order = json.loads(line)
            try:
                answer = getattr(worker, order.pop("do"))(**order)
            except Exception:  # the parent process raises it again
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
