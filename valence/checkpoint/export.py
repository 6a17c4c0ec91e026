"""A trained policy as a folder that transformers loads and vLLM serves."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedTokenizerBase

from valence.checkpoint.store import written_aside


def export(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    what: Literal["auto", "merged", "adapter"],
    card: str,
    chat_template: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes weights (safetensors), tokenizer with its template, generation settings and card (README.md).

    what: the adapter merged into a copy of the weights (also auto), or the adapter alone. Without an adapter: all weights.
    chat_template: kept with the tokenizer when it has none of its own. config: entries of config.json besides the model's own.
    """
    adapted = hasattr(model, "peft_config")
    whole: Any = model
    if adapted and what != "adapter":
        whole = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
    whole.config.update(config or {})
    with written_aside(target) as folder:
        whole.save_pretrained(folder)
        if tokenizer.chat_template is None and chat_template is not None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.chat_template = chat_template
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card)
    return target
