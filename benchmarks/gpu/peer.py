"""Part C: a step of KTO with an adapter, in turn with TRL on the same rows, weights and device.

Both sides compute the reference with the adapter disabled, and keep all activations. TRL pads the
rows. Without agreement of losses and gradients there are no times.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from benchmarks.gpu.steps import SMALLER, release_memory, synchronize
from benchmarks.parity.cases import z0_of_trl
from benchmarks.step.cases import TINY, Case
from benchmarks.step.inputs import EOS, MAX_LENGTH, config_of, draw_sets, padded_tokens
from valence.distributed.process_group import SingleProcess
from valence.methods import METHODS
from valence.models.build import build_policy, build_reference
from valence.models.compiling import compile_layers
from valence.training.step import Objective
from valence.types import TokenizedExample

CASE = Case("kto and trl", "kto", prompts=16, lora=True)
"""TRL pads these rows and keeps all activations: more would not fit into 80 GB."""
PROMPTS_ON_A_CPU = 4
BUDGET = 16_384
"""Tokens of a micro-batch."""
ROUNDS = 5
BETA = 1.0
LOSS_TOLERANCE, NORM_TOLERANCE = 0.02, 0.05
"""Largest difference of the losses, and of the norms of the gradients relative to ours."""
MIN_DISTANCE = 0.05
"""Least distance of the loss from 0.5, the loss of every policy that equals its reference."""
ADAPTER = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
ADAPTER_STD = 0.035
"""Standard deviation of the adapter's weights. Their product is half of the weights below."""

Step = Callable[[], tuple[float, float]]
"""Computes a step without an update; returns its loss and the norm of the gradient."""


def variants() -> list[tuple[str, bool]]:
    """TRL's attention, and whether it uses Liger's kernels, as far as they run here."""
    if not torch.cuda.is_available():
        return [("sdpa", False)]
    attention = ["sdpa", *(["flash_attention_2"] if find_spec("flash_attn") else [])]
    return [(name, with_liger) for name in attention for with_liger in (True, False)]


def compare_with_trl(
    attention: str, with_liger: bool, device: torch.device, work: Path
) -> dict[str, Any]:
    """Measure steps in turn. Raises RuntimeError if the sides disagree."""
    rows, ours = _our_step(device, work)
    theirs = _trl_step(rows, attention, with_liger, device, work)
    values = measure_agreement(ours, theirs, device)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS if torch.cuda.is_available() else 1):
        for step, seconds in zip((ours, theirs), times, strict=True):
            synchronize(device)
            start = time.perf_counter()
            step()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
    seconds, trl_seconds = map(median, times)
    tokens = sum(len(row.prompt_ids) + len(row.answers[0].ids) for row in rows)
    return values | {
        "seconds": seconds,
        "trl_seconds": trl_seconds,
        "times_as_fast": trl_seconds / seconds,
        "tokens_per_s": tokens / seconds,
        "trl_tokens_per_s": tokens / trl_seconds,
        "padding": 1 - tokens / padded_tokens(rows),
    }


def measure_agreement(ours: Step, theirs: Step, device: torch.device) -> dict[str, Any]:
    """Return losses, norms of gradients and peaks of memory (GB) of both sides."""
    figures, before = dict[str, Any](), 0
    for prefix, step in (("", ours), ("trl_", theirs)):
        step()  # compiles
        release_memory()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        figures[f"{prefix}loss"], figures[f"{prefix}grad_norm"] = step()
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated(device)
            figures[f"{prefix}step_gb"] = (peak - before) / 1e9
    difference = abs(figures["loss"] - figures["trl_loss"])
    norms = abs(figures["trl_grad_norm"] / figures["grad_norm"] - 1)
    if not (difference <= LOSS_TOLERANCE and norms <= NORM_TOLERANCE):
        raise RuntimeError(f"the sides disagree: {figures}")
    if abs(figures["loss"] - 0.5) < MIN_DISTANCE:
        raise RuntimeError(f"the loss is that of a policy that equals its reference: {figures}")
    return figures


@cache
def _base_model(device: torch.device, work: Path) -> nn.Module:
    """Return a model with random weights in bfloat16, and write an adapter with random weights."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    shape = SMALLER if torch.cuda.is_available() else TINY
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config_of(shape), dtype=torch.bfloat16)
    torch.nn.init.normal_(model.lm_head.weight, std=shape.hidden**-0.5)  # logits of about 1
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**ADAPTER))
    with torch.no_grad():
        for name, weights in adapted.named_parameters():
            if "lora_" in name:
                weights.normal_(std=ADAPTER_STD)
    adapted.save_pretrained(str(work / "adapter"))
    return model


@cache
def _our_step(device: torch.device, work: Path) -> tuple[list[TokenizedExample], Step]:
    """Return rows and our step. Completions that the policy prefers more than the reference does
    are desirable, as after some training: with random labels, errors of both labels cancel out.
    """
    policy = build_policy(
        copy.deepcopy(_base_model(device, work)),
        dtype=torch.bfloat16,
        adapter=str(work / "adapter"),
    )
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        compile_layers(policy)
    prompts = CASE.prompts if on_gpu else PROMPTS_ON_A_CPU
    (rows,) = draw_sets(replace(CASE, shape=SMALLER if on_gpu else TINY, prompts=prompts), 1)
    method = METHODS["kto"]
    objective = Objective(
        method,
        method.resolve(z0_of_trl(prompts) | {"beta": BETA}),
        policy,
        build_reference(policy, fresh_adapter=True),
        SingleProcess(),
        BUDGET,
        MAX_LENGTH,
    )
    is_preferred = {
        row.unit: (row.logp or 0.0) > (row.ref or 0.0)
        for row in objective.run(rows, backward=False, rows=True).rows
    }
    labelled = [replace(row, label=is_preferred[k]) for k, row in enumerate(rows)]

    def run() -> tuple[float, float]:
        loss = objective.run(labelled, backward=True).loss.item()
        return loss, _norm_and_clear(policy)

    return labelled, run


def _trl_step(
    rows: list[TokenizedExample],
    attention: str,
    with_liger: bool,
    device: torch.device,
    work: Path,
) -> Step:
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import Dataset
    from peft import PeftModel

    from benchmarks.step.trl_worker import STAND_INS, tokenizer_of_ids

    gc.collect()  # the trainer before this one
    model: Any = copy.deepcopy(_base_model(device, work))
    model.set_attn_implementation(attention)
    arguments = trl.KTOConfig(
        output_dir=str(work / "trl"),
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        beta=BETA,
        gradient_checkpointing=False,
        use_liger_kernel=with_liger,
        max_length=MAX_LENGTH,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer: Any = trl.KTOTrainer(
        model=PeftModel.from_pretrained(model, str(work / "adapter"), is_trainable=True),
        args=arguments,
        train_dataset=Dataset.from_list([STAND_INS["kto"]] * 2),
        processing_class=tokenizer_of_ids(16, EOS),
    )
    # TRL takes the given adapter for the reference. Without it, the reference has no adapter.
    trainer.model.delete_adapter("ref")
    prepared = trainer.accelerator.prepare_model(trainer.model)
    prepared.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer.data_collator(_columns(rows))

    def run() -> tuple[float, float]:
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(prepared, dict(batch))
        trainer.accelerator.backward(loss)
        return loss.item(), _norm_and_clear(prepared)

    return run


def _columns(rows: list[TokenizedExample]) -> list[dict[str, Any]]:
    """The rows of TRL's collator: each prompt also with the completion of the row before it."""
    return [
        {
            "prompt_ids": list(row.prompt_ids),
            "completion_ids": list(row.answers[0].ids),
            "KL_completion_ids": list(rows[i - 1].answers[0].ids),
            "label": row.label,
        }
        for i, row in enumerate(rows)
    ]


def _norm_and_clear(model: nn.Module) -> float:
    grads = [p.grad.float() for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads).item()
    for p in model.parameters():
        p.grad = None
    return norm
