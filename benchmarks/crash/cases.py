"""The cases: every kind of method, on a random model so small that a run takes a second."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPECIAL = ("<pad>", "<s>", "</s>")
TRAINED, HELD_OUT = 18, 5


@dataclass(frozen=True)
class Case:
    """One recipe. rows: name of the file with the training rows, without suffix. lora: train an
    adapter instead of all weights. sections: settings that differ from ``recipe``'s defaults.
    processes: number of training processes.
    """

    name: str
    method: str
    rows: str
    lora: bool
    sections: Mapping[str, Any] = field(default_factory=dict[str, Any])
    processes: int = 1


def make_model(folder: str) -> None:
    """Write a random model of two layers with a tokenizer of bytes.

    The state of full training is larger than the part that a save writes at once.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    letters = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _row(kind: str, i: int) -> dict[str, Any]:
    """Row number ``i`` of the format that a file of this kind has."""
    prompt, good, bad = (
        f"question {i} " + "why " * (i % 3),
        "good " * (1 + i % 4) + str(i),
        "bad " * (1 + i % 3) + str(i),
    )
    return {
        "thumbs": {"prompt": prompt, "completion": good if i % 2 else bad, "label": bool(i % 2)},
        "pairs": {"prompt": prompt, "chosen": good, "rejected": bad},
        "shown": {"prompt": prompt, "completion": good},
        "asked": {"prompt": prompt, "answer": i},
        "groups": {
            "prompt": prompt,
            "completions": [good, bad, f"so {i}"],
            "scores": [1.0, 0.0, 0.25],
        },
    }[kind]


def write_rows(folder: Path) -> None:
    """Write a training file and a held-out file for each kind of rows."""
    for kind in ("thumbs", "pairs", "shown", "groups", "asked"):
        for name, numbers in ((kind, range(TRAINED)), (f"{kind}_held", range(100, 100 + HELD_OUT))):
            lines = (json.dumps(_row(kind, i)) + "\n" for i in numbers)
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def recipe(case: Case, folder: Path) -> dict[str, Any]:
    """Recipe of a run of 17 steps.

    An epoch has 5 steps, the last of which has fewer rows. Epochs and logging windows end between
    saves, so that a kill can hit any combination of these.
    """
    sections = {name: dict(section) for name, section in case.sections.items() if name != "mix"}
    model = {"name": str(folder / "model"), "dtype": "float32"} | (
        {"lora": {"rank": 4} | sections.pop("lora", {})} if case.lora else {}
    )
    mix = [
        part | {"train": str(folder / f"{part['train']}.jsonl")}
        for part in case.sections.get("mix", [])
    ]
    held_out = str(folder / f"{case.rows}_held.jsonl")
    defaults: dict[str, dict[str, Any]] = {
        "data": {
            "train": str(folder / f"{case.rows}.jsonl"),
            "eval": held_out,
            "test": held_out,
            "max_length": 128,
        },
        "train": {
            "batch_size": 4,
            "epochs": 3.4,
            "learning_rate": 1e-3,
            "schedule": "cosine",
            "compile": "off",
        },
        "eval": {"every": 4},
        "run": {"save_every": 3, "log_every": 2, "keep": 2, "keep_best": {"metric": "eval/loss"}},
    }
    merged = {name: section | sections.pop(name, {}) for name, section in defaults.items()}
    return {"method": case.method, "model": model, **merged, **sections} | (
        {"mix": mix} if mix else {}
    )


MANY_BATCHES = {"train": {"micro_batch_tokens": 90}}
FOLLOWS = {"reference": {"sync_every": 4, "sync_mix": 0.6}}
ALSO_SFT = {"mix": [{"method": "sft", "train": "shown", "batch_size": 3, "weight": 0.5}]}
SAVED_MODELS = {"run": {"save_hf": True}}
SPLIT = {"parallel": {"shard": "full"}}
ONLINE = {
    "reward": {"reward": "length", "settings": {"unit": "characters", "max_length": 3, "fall": 10}},
    "rollout": {"num_rollouts": 3, "max_new_tokens": 6, "epochs": 2, "steps": 2},
    "train": {"max_steps": 17, "epochs": 9.0},
    "run": {"keep_best": {"metric": "eval/reward/mean", "mode": "max"}},
}
ONLINE_FOLLOWS = {"reference": {"sync_every": 4}, "loss": {"kl_weight": 0.1}}
DROPOUT = {"lora": {"dropout": 0.1}}

CASES = (
    Case("kto, lora", "kto", "thumbs", True, MANY_BATCHES),
    Case("kto", "kto", "thumbs", False),
    Case("dpo, lora with dropout", "dpo", "pairs", True, DROPOUT),
    Case("dpo", "dpo", "pairs", False, MANY_BATCHES),
    Case("bco, lora", "bco", "thumbs", True, {"data": {"stratify": True}}),
    Case("bco", "bco", "thumbs", False),
    Case("kto + sft, lora", "kto", "thumbs", True, ALSO_SFT),
    Case("kto + sft", "kto", "thumbs", False, ALSO_SFT | MANY_BATCHES),
    Case("dpo that follows, lora", "dpo", "pairs", True, FOLLOWS),
    Case("dpo that follows", "dpo", "pairs", False, FOLLOWS),
    Case("sft, lora", "sft", "shown", True),
    Case("sft, whole models", "sft", "shown", False, SAVED_MODELS),
    Case("grpo, lora", "grpo", "groups", True, MANY_BATCHES),
    Case("grpo", "grpo", "groups", False),
    Case("ppo, lora", "ppo", "groups", True),
    Case("ppo", "ppo", "groups", False),
    Case("pointwise, lora, models", "pointwise", "thumbs", True, SAVED_MODELS),
    Case("pointwise", "pointwise", "thumbs", False),
    Case("aot, lora", "aot", "pairs", True),
    Case("aot", "aot", "pairs", False),
    Case("own answers, grpo, lora", "grpo", "asked", True, ONLINE | ONLINE_FOLLOWS),
    Case("own answers, ppo", "ppo", "asked", False, ONLINE | {"loss": {"kl_target": 0.5}}),
    Case("own answers, dapo, lora", "dapo", "asked", True, ONLINE),
    Case("own answers, kto, 2 processes", "online_kto", "asked", True, ONLINE, processes=2),
    Case("kto, lora, 2 processes", "kto", "thumbs", True, MANY_BATCHES, processes=2),
    Case("dpo, 2 that share it", "dpo", "pairs", False, MANY_BATCHES | SPLIT, processes=2),
)
QUICK = (
    "kto, lora", "dpo", "bco", "kto + sft, lora", "dpo that follows, lora", "pointwise, lora, "
                                                                            "models",
    "dpo, 2 that share it", "own answers, ppo",
)  # fmt: skip
