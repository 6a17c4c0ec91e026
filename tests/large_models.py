"""Plans for models that are too large for tests: with their shape and rows of the shape of the
hub's, and without weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from tests.tiny import tiny_tokenizer
from valence.config.load import load_recipe
from valence.distributed.process_group import PlannedGroup
from valence.training import plan
from valence.training.plan import Plan, make_plan
from valence.training.prepare import prepare

SHAPES: dict[str, tuple[type[PreTrainedConfig], tuple[int, ...], int]] = {
    "meta-llama/Llama-3.1-8B-Instruct": (
        LlamaConfig,
        (4096, 14336, 32, 32, 8, 128256),
        8_030_261_248,
    ),
    "meta-llama/Llama-3.3-70B-Instruct": (
        LlamaConfig,
        (8192, 28672, 80, 64, 8, 128256),
        70_553_706_496,
    ),
    "Qwen/Qwen2.5-7B-Instruct": (Qwen2Config, (3584, 18944, 28, 28, 4, 152064), 7_615_616_512),
}
"""Of models of the hub: the architecture; hidden and inner size, layers, heads, key and value
heads, vocabulary; and the number of weights that is published.
"""
NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
LONG = "the sun is a star, and the moon goes round the earth. " * 60


def _turns(message: str, answer: str | None = None) -> list[dict[str, str]]:
    requests = [{"role": "user", "content": message}]
    return requests if answer is None else [*requests, {"role": "assistant", "content": answer}]


def _row(path: str, i: int) -> dict[str, Any]:
    """A row with the columns of a data set of the hub."""
    question, good, bad = f"Question {i}?", f"{LONG}{i}", f"{LONG}not {i}"
    both = {
        "chosen": _turns(question, good),
        "rejected": _turns(question, bad),
        "score_chosen": 8.0,
        "score_rejected": 4.0,
    }
    return {
        "trl-lib/ultrafeedback_binarized": both,
        "HuggingFaceH4/ultrafeedback_binarized": both
        | {"prompt": question, "prompt_id": f"{i:064x}", "messages": _turns(question, good)},
        "trl-lib/kto-mix-14k": {
            "prompt": _turns(question),
            "completion": _turns(question, good)[1:],
            "label": i % 2 == 0,
        },
        "trl-lib/DeepMath-103K": {"prompt": _turns(question), "solution": f"${i}$"},
    }[path]


def use_gpus(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    """Let plans be for GPUs with this many bytes, nearly all of them free."""
    monkeypatch.setattr(plan, "best_device", lambda: torch.device("cuda"))
    for name, value in (
        ("get_device_properties", SimpleNamespace(total_memory=size)),
        ("mem_get_info", (int(0.97 * size), size)),
        ("memory_reserved", 0),
        ("memory_allocated", 0),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def plan_large(path: Path, gpus: int, folder: Path, *overrides: str) -> Plan:
    """The plan of a recipe whose model is in ``SHAPES``. folder: for its stand-ins."""
    recipe = load_recipe(path).recipe
    kind, sizes, _ = SHAPES[recipe.model.name]
    shape = {**dict(zip(NAMES, sizes, strict=True)), "tie_word_embeddings": False}
    kind(**shape).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    [source], rows = recipe.data.train, folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(_row(source.path, i)) + "\n" for i in range(40)))
    here = [f"model.name={folder / 'model'}"]
    for part, sources in (("train", recipe.data.train), ("eval", recipe.data.eval)):
        for held_out in sources:
            assert held_out.path == source.path
            here += [f"data.{part}.0.path={rows}", f"data.{part}.0.split=null"]
    loaded = load_recipe(path, [*here, *overrides])
    return make_plan(prepare(loaded), group=PlannedGroup(gpus))
