"""The measured cases, and the bars for their figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Method = Literal["kto", "dpo", "sft", "distill", "bradley_terry", "grpo"]


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths (tokens)."""

    median: int
    p95: int


@dataclass(frozen=True)
class Shape:
    """A Qwen3-shaped model with untied embeddings."""

    name: str
    vocabulary: int
    hidden: int = 512
    intermediate: int = 1536
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64


SMALL = Shape("32k", vocabulary=32_000)
LARGE_VOCABULARY = Shape("152k", vocabulary=151_936)
TINY = Shape(
    "tiny", vocabulary=512, hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, head_dim=16
)

PROMPT, COMPLETION = Lengths(100, 500), Lengths(60, 300)
PROMPT_400 = Lengths(400, 2000)
PROMPT_1000 = Lengths(1000, 2000)
PROMPT_10 = Lengths(10, 20)


@dataclass(frozen=True)
class Case:
    """One kind of step: ``prompts`` prompts with ``answers`` completions each.

    bar: required speedup over TRL's fastest configuration (None: only reported). without_sharing:
    compared with Valence on the same completions with separate prompts, which share no prefix.
    """

    name: str
    method: Method
    prompts: int = 8
    answers: int = 1
    prompt: Lengths = PROMPT
    completion: Lengths = COMPLETION
    shape: Shape = SMALL
    lora: bool = False
    bar: float | None = None
    without_sharing: bool = False
    quick: bool = False

    @property
    def is_reward_model(self) -> bool:
        """Whether it trains a reward model, which has no head for the vocabulary."""
        return self.method == "bradley_terry"


# fmt: off
CASES = (
    Case("kto",                "kto",                                                  bar=2.5, quick=True),
    Case("dpo",                "dpo", answers=2,                                       bar=3.0, quick=True),
    Case("grpo 8@100",         "grpo", prompts=1, answers=8,                           bar=3.5),
    Case("grpo 8@400",         "grpo", prompts=1, answers=8, prompt=PROMPT_400,        bar=5.0, quick=True),
    Case("grpo 16@400",        "grpo", prompts=1, answers=16, prompt=PROMPT_400,       bar=6.5),
    Case("grpo 1@100",         "grpo", prompts=8, answers=1),
    Case("sft",                "sft"),
    Case("distill",            "distill",                                              bar=2.0),
    Case("distill 152k",       "distill", shape=LARGE_VOCABULARY),
    Case("reward model",       "bradley_terry", answers=2),
    Case("kto lora",           "kto", lora=True),
    Case("dpo lora",           "dpo", answers=2, lora=True),
    Case("kto 152k",           "kto", shape=LARGE_VOCABULARY),
    Case("dpo 152k",           "dpo", answers=2, shape=LARGE_VOCABULARY),
    Case("grpo 8@100 152k",    "grpo", prompts=1, answers=8, shape=LARGE_VOCABULARY),
    Case("dpo long prompts",   "dpo", prompts=4, answers=2, prompt=PROMPT_1000),
    Case("pairs @10",          "grpo", prompts=8, answers=2, prompt=PROMPT_10,         without_sharing=True),
)
# fmt: on

SMALL_STEPS = Case("dpo, 64 short pairs", "dpo", prompts=64, answers=2, shape=TINY)
"""A model so small that preparing micro-batches takes a few percent of a step."""

FLOOR_BAR = 0.7
"""Required ratio of the minimum time to the measured time, for cases with a bar."""
MEMORY_BAR, CHECKPOINTED_BAR = 0.5, 0.8
"""Largest allowed share of TRL's peak memory, without and with activation checkpointing."""
WAITING_BAR = 0.5
"""Largest allowed share of a step (percent) in which training waits for its micro-batches."""
UNSHARED_BAR = 0.97
"""Sharing prefixes is never slower than not sharing them, within the noise of two medians."""
