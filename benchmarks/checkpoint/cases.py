"""The trained models: random, of several sizes, fine-tuned on random letters."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import valence
from benchmarks.checkpoint import THREADS
from benchmarks.crash.cases import make_model
from valence.distributed.process_group import Group
from valence.models.build import load_tokenizer
from valence.training.callbacks import CallbackLike
from valence.training.trainer import Trainer

ROWS, BATCH = 16, 2


@dataclass(frozen=True)
class Case:
    """A Llama-shaped model, trained in full or with an adapter of rank 16.

    letters: length of each row in letters, which are one token each, so that a step takes some
    tenths of a second. threads: PyTorch threads of a step.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    letters: int
    lora: bool = False
    threads: int = THREADS


SMALL, MIDDLE, LARGE = (
    Case("5M", 256, 768, 6, 600),
    Case("25M", 512, 1536, 8, 150),
    Case("100M", 768, 2048, 14, 40),
)


def _with_variants(case: Case) -> tuple[Case, Case, Case]:
    """The case, the same with steps that leave a core free, and the same with an adapter."""
    free_core = replace(case, name=f"{case.name}, a core is free", threads=1)
    return case, free_core, replace(case, name=f"{case.name}, adapter", lora=True)


CASES = (SMALL, MIDDLE, *_with_variants(LARGE))
QUICK = (SMALL, *_with_variants(MIDDLE))


def tokenizer_of_bytes() -> PreTrainedTokenizerBase:
    """A tokenizer with one token per byte."""
    with TemporaryDirectory() as folder:
        make_model(folder)
        return load_tokenizer(folder)


def build(
    case: Case,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    callbacks: tuple[CallbackLike, ...] = (),
    group: Group | None = None,
    **sections: Any,
) -> Trainer:
    """A run that saves only on request and never ends by itself.

    If the folder contains a checkpoint, the run resumes from it. group: its processes. sections:
    further settings.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=case.hidden,
            intermediate_size=case.intermediate,
            num_hidden_layers=case.layers,
            num_attention_heads=case.hidden // 64,
            max_position_embeddings=2048,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    rng = random.Random(0)
    rows = [
        {
            "prompt": f"{i}: ",
            "completion": "".join(rng.choices(string.ascii_lowercase, k=case.letters)),
        }
        for i in range(ROWS)
    ]
    recipe: dict[str, Any] = {
        "method": "sft",
        "model": {"name": case.name, "dtype": "float32"}
        | ({"lora": {"rank": 16}} if case.lora else {}),
        "data": {"max_length": 2048},
        "train": {
            "batch_size": BATCH,
            "max_steps": 10**6,
            "epochs": 1e6,
            "micro_batch_tokens": 4096,
            "compile": "off",
        },
        "run": {"dir": str(folder), "save_every": 10**6, "keep": 1},
        **sections,
    }
    return valence.build_run(
        recipe,
        rows={"train": rows},
        model=model,
        tokenizer=tokenizer,
        callbacks=callbacks,
        group=group,
        quiet=True,
        console=Console(quiet=True),
    )
