"""One step of each case by TRL's trainers, run with the interpreter of TRL's environment.

Usage: python trl_side.py JOB.json RESULTS.json

Rows are token ids. They pass through the trainers' preparation (pairing, truncation, padding) as
text that spells out every token, with a tokenizer that reads only such text. The results include
the tokens that the trainers used.
"""

# pyright: reportMissingImports=false
# (TRL is in the other environment.)

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
import trl
from datasets import Dataset, disable_progress_bars
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

TRAINERS = {
    "kto": (trl.KTOTrainer, trl.KTOConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "cpo": (CPOTrainer, CPOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
}
WITH_REFERENCE = ("kto", "dpo")
TEXT_COLUMNS = ("prompt", "completion", "chosen", "rejected")
TOKEN_COLUMNS = (
    "prompt_ids",
    "completion_ids",
    "chosen_ids",
    "rejected_ids",
    "input_ids",
    "chosen_input_ids",
    "rejected_input_ids",
)


def spelled(ids: list[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


def tokenizer_of_ids(vocabulary: int, eos: int) -> PreTrainedTokenizerFast:
    """Reads "<17><4>" as the tokens 17 and 4."""
    inner = Tokenizer(
        models.WordLevel({f"<{i}>": i for i in range(vocabulary)}, unk_token=f"<{eos}>")
    )
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\d+>"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=f"<{eos}>", pad_token=f"<{eos}>"
    )


def trainer_of(case: dict[str, Any], scratch: str) -> Any:
    trainer, config = TRAINERS[case["trainer"]]
    rows = [
        {k: spelled(v) if k in TEXT_COLUMNS else v for k, v in row.items()} for row in case["rows"]
    ]
    arguments = config(
        output_dir=scratch,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        train_sampling_strategy="sequential",
        per_device_train_batch_size=case["batch"],
        max_length=case["max_length"],
        disable_tqdm=True,
        **case["config"],
    )
    policy = AutoModelForCausalLM.from_pretrained(case["policy"], dtype=torch.float32)
    extra = {}
    if case["trainer"] in WITH_REFERENCE:
        extra["ref_model"] = AutoModelForCausalLM.from_pretrained(
            case["reference"], dtype=torch.float32
        )
    tokenizer = tokenizer_of_ids(policy.config.vocab_size, case["eos"])
    return trainer(
        model=policy,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **extra,
    )


def step(case: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Loss, gradient norm and logged metrics of a step that accumulates over all batches of a
    case.
    """
    trainer = trainer_of(case, scratch)
    trainer.model.train()
    batches = list(trainer.get_train_dataloader())
    loss = 0.0
    for batch in batches:
        part = trainer.compute_loss(trainer.model, batch) / len(batches)
        part.backward()
        loss += part.item()
    grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    # CPO's and ORPO's trainers store their metrics under another name.
    logged = trainer._stored_metrics if hasattr(trainer, "_stored_metrics") else trainer._metrics
    metrics = {name: sum(values) / len(values) for name, values in logged["train"].items()}
    rows = [{k: row[k] for k in TOKEN_COLUMNS if k in row} for row in trainer.train_dataset]
    figures = {"loss": loss, "grad_norm": torch.nn.utils.get_total_norm(grads).item()} | metrics
    return {"figures": figures, "rows": rows}


def main(job: str, results: str) -> None:
    disable_progress_bars()
    with open(job) as file:
        cases = json.load(file)
    versions = {module.__name__: module.__version__ for module in (trl, torch, transformers)}
    with tempfile.TemporaryDirectory() as scratch:
        step_results = [step(case, scratch) for case in cases]
    with open(results, "w") as file:
        json.dump({"versions": versions, "cases": step_results}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
