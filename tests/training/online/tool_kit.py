"""A model that calls tools by chance, and a reward that reads its turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.training.online.recipes import make, recipe
from valence.data.tool_calls import CallFormat, _MalformedCallError, _Turn
from valence.types import Completion

SCALE = "tests.training.online.tool_functions:scale"
SHOP = "tests.training.online.tool_functions:Shop"
COUNTER = "tests.training.online.tool_functions:Counter"
LAST = "tests.training.online.tool_functions:Last"
TURNS = "tests.training.online.tool_kit:turns"


def turns(completions: list[Completion]) -> list[float]:
    """A reward that reads the turns."""
    rewards = []
    for completion in completions:
        assert completion.episode is not None
        text = str(completion.episode.messages)
        rewards.append(text.count("a") + 0.1 * len(completion.episode.calls))
    return rewards


def _read(text: str, _: Any) -> _Turn:
    """Any turn of an even length is a call; every fifth one of these is malformed."""
    turn = _Turn(text)
    if len(text) % 10 == 0:
        raise _MalformedCallError("write the call as JSON")
    if len(text) % 2 == 0:
        turn.add("scale", {"number": len(text)})
    return turn


BY_CHANCE = CallFormat("by chance", _read)
"""Reads calls out of the texts of a model that was not trained."""


def make_with_short_turns(place: Path, **changes: Any) -> None:
    """A model with many end tokens, so that its turns are short."""
    make(place, **changes)
    model: Any = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    model.generation_config.eos_token_id = list(range(5, model.config.vocab_size, 6))
    model.generation_config.pad_token_id = 0
    model.save_pretrained(place / "model")


def tool_recipe(place: Path, method: str = "grpo", **changes: Any) -> dict[str, Any]:
    rollout = {
        "num_rollouts": 4, "max_new_tokens": 150, "max_turns": 4, "tools": [SCALE],
    } | changes.pop("rollout", {})  # fmt: skip
    data = {"chat_template": "chatml", "max_length": 1400} | changes.pop("data", {})
    return recipe(place, method, rollout=rollout, data=data, **{"reward": TURNS, **changes})
