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
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

PLAIN: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}
"""Settings of all trainers: one process in float32, which writes nothing."""
TRAINERS = {
    "kto": (trl.KTOTrainer, trl.KTOConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "cpo": (CPOTrainer, CPOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
}
SAMPLING = {
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
}
"""Trainers that sample completions."""
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


def load(folder: str, case: dict[str, Any]) -> Any:
    dtype = torch.float64 if case["double"] else torch.float32
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def sdpo_trainer(case: dict[str, Any], scratch: str) -> SDPOTrainer:
    """A trainer that "samples" the completions of the rows, and whose teacher is the policy, which
    reads the feedback after the prompt.
    """
    rows = [
        {"prompt": spelled(row["prompt"]), "privileged_context": spelled(row["feedback"])}
        for row in case["rows"]
    ]
    arguments = SDPOConfig(
        output_dir=scratch,
        **PLAIN,
        per_device_train_batch_size=case["batch"],
        num_generations=1,
        scale_rewards="none",
        shuffle_dataset=False,
        max_prompt_length=None,
        distillation_mode="sampled_token",
        teacher_model_kind="live",
        use_successful_as_teacher=False,
        include_environment_feedback=True,
        reprompt_template="{prompt}{feedback}",
        feedback_template="{feedback_raw}",
        **case["config"],
    )
    policy = load(case["policy"], case)
    trainer = SDPOTrainer(
        model=policy,
        reward_funcs=lambda prompts, **_: [0.0] * len(prompts),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer_of_ids(policy.config.vocab_size, case["eos"]),
    )
    completions = iter([row["completion"] for row in case["rows"]])
    trainer._generate = lambda prompt_ids: (prompt_ids, [next(completions) for _ in prompt_ids])
    trainer.current_gradient_accumulation_steps = 1  # set by train()
    return trainer


def sdpo_step(case: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Loss and gradient norm of a step of SDPO that accumulates over all batches of a case."""
    trainer = sdpo_trainer(case, scratch)
    trainer.model.train()
    batches = list(trainer.get_train_dataloader())
    loss, rows = 0.0, []
    for inputs in batches:
        batch = trainer._prepare_inputs(inputs)
        part = trainer.compute_loss(trainer.model, batch) / len(batches)
        part.backward()
        loss += part.item()
        rows += sdpo_rows(batch)
    grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    figures = {"loss": loss, "grad_norm": torch.nn.utils.get_total_norm(grads).item()}
    return {"figures": figures, "rows": rows}


def sdpo_rows(batch: dict[str, Any]) -> list[dict[str, list[int]]]:
    """The tokens of each row that policy and teacher read, without padding."""

    def unpadded(ids: str, mask: str) -> list[list[int]]:
        pairs = zip(batch[ids], batch[mask].bool(), strict=True)
        return [row[is_token].tolist() for row, is_token in pairs]

    return [
        {"prompt_ids": prompt, "completion_ids": completion, "teacher_ids": teacher}
        for prompt, completion, teacher in zip(
            unpadded("prompt_ids", "prompt_mask"),
            unpadded("completion_ids", "completion_mask"),
            unpadded("teacher_input_ids", "teacher_attention_mask"),
            strict=True,
        )
    ]


def sampling_trainer(case: dict[str, Any], scratch: str) -> Any:
    """A trainer that "samples" the completions of the rows."""
    kind, config = SAMPLING[case["trainer"]]
    rows = case["rows"]
    num_completions = len(rows[0]["completions"])
    rewards = [reward for row in rows for reward in row["rewards"]]
    policy = load(case["policy"], case)
    trainer = kind(
        model=policy,
        reward_funcs=lambda prompts, **_: rewards,
        args=config(
            output_dir=scratch,
            **PLAIN,
            per_device_train_batch_size=case["batch"] * num_completions,
            gradient_accumulation_steps=len(rows) // case["batch"],
            num_generations=num_completions,
            shuffle_dataset=False,
            disable_dropout=True,
            **case["config"],
        ),
        train_dataset=Dataset.from_list([{"prompt": spelled(row["prompt"])} for row in rows]),
        processing_class=tokenizer_of_ids(policy.config.vocab_size, case["eos"]),
    )
    completions = [ids for row in rows for ids in row["completions"]]
    result = (completions, None) if case["trainer"] == "grpo" else completions
    trainer._generate_single_turn = lambda *_: result
    if trainer.ref_model is not None:  # a copy of the policy
        trainer.ref_model.load_state_dict(load(case["reference"], case).state_dict())
    return trainer


def sampled_step(case: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Loss and gradient norm of a step on the completions of a round."""
    trainer = sampling_trainer(case, scratch)
    trainer.model.train()
    num_batches = trainer.args.gradient_accumulation_steps
    trainer.current_gradient_accumulation_steps = num_batches  # set by train()
    loss, rows = 0.0, []
    for step, inputs in enumerate(trainer.get_train_dataloader()):
        trainer._step = step  # counted by training_step()
        batch = trainer._prepare_inputs(inputs)
        prompts, completions = (
            [
                ids[mask.bool()].tolist()
                for ids, mask in zip(batch[f"{part}_ids"], batch[f"{part}_mask"], strict=True)
            ]
            for part in ("prompt", "completion")
        )
        rows += [
            {"prompt_ids": prompt, "completion_ids": ids}
            for prompt, ids in zip(prompts, completions, strict=True)
        ]
        if case["stale"]:
            make_stale(trainer, batch, completions, case["rows"])
        part = trainer.compute_loss(trainer.model, batch)
        if case["trainer"] == "rloo":  # divided by training_step()
            part = part / num_batches
        part.backward()
        loss += part.item()
    grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    figures = {"loss": loss, "grad_norm": torch.nn.utils.get_total_norm(grads).item()}
    return {"figures": figures, "rows": rows}


def make_stale(
    trainer: Any,
    batch: dict[str, Any],
    completions: list[list[int]],
    rows: list[dict[str, Any]],
) -> None:
    """Subtract the changes of the log-probabilities from those of the sampling policy."""
    changes = {
        tuple(ids): change
        for row in rows
        for ids, change in zip(row["completions"], row["changes"], strict=True)
    }
    is_token = batch["completion_mask"].bool()
    by = torch.zeros(is_token.shape, dtype=torch.float64)
    by[is_token] = torch.tensor(
        [x for ids in completions for x in changes[tuple(ids)]], dtype=torch.float64
    )
    if "old_logps" in batch:  # of completions
        batch["old_logps"] = batch["old_logps"] - by.sum(1).to(batch["old_logps"])
        return
    ids, mask = (
        torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1)
        for name in ("ids", "mask")
    )
    with torch.no_grad():
        now, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, is_token.shape[1]
        )
    batch["old_per_token_logps"] = now - by.to(now)


def trainer_of(case: dict[str, Any], scratch: str) -> Any:
    trainer, config = TRAINERS[case["trainer"]]
    rows = [
        {k: spelled(v) if k in TEXT_COLUMNS else v for k, v in row.items()} for row in case["rows"]
    ]
    arguments = config(
        output_dir=scratch,
        **PLAIN,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=case["batch"],
        max_length=case["max_length"],
        **case["config"],
    )
    policy = load(case["policy"], case)
    extra = {}
    if case["trainer"] in WITH_REFERENCE:
        extra["ref_model"] = load(case["reference"], case)
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
        steps = {"sdpo": sdpo_step} | dict.fromkeys(SAMPLING, sampled_step)
        step_results = [steps.get(case["trainer"], step)(case, scratch) for case in cases]
    with open(results, "w") as file:
        json.dump({"versions": versions, "cases": step_results}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
