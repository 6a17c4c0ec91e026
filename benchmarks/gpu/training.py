"""Tiny runs to the end: KTO, also killed and resumed, GRPO, and KTO with a quantized model.

python -m benchmarks.gpu.training FOLDER KIND RUN [--kill-after STEP] trains in this process,
which is killed with signal 9 after a step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

import valence
from benchmarks.gpu.results import run_process
from benchmarks.step.cases import Shape
from benchmarks.step.inputs import config_of
from valence.types import Completion

ON_GPU = Shape(
    "tiny", 1024, hidden=512, intermediate=1536, layers=4, heads=8, kv_heads=4, head_dim=64
)
ON_CPU = Shape("tiny", 320, hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, head_dim=16)
STEPS, KILLED_AFTER, SAVED_EVERY = 10, 6, 4
KINDS = ("kto", "grpo", "qlora")
REWARD = "benchmarks.gpu.training:share_of_vowels"


def share_of_vowels(completions: Sequence[Completion]) -> list[float]:
    """Return the share of letters of each completion that are vowels."""
    texts = [completion.text for completion in completions]
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in texts]


def write_files(folder: Path) -> None:
    """Write a random model, a tokenizer of bytes, and rows, unless they are there."""
    if (folder / "prompts.jsonl").exists():
        return
    is_small = not torch.cuda.is_available()
    letters = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder / "model")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config_of(ON_CPU if is_small else ON_GPU))
    model.save_pretrained(folder / "model")
    draw, longest = random.Random(0), 24 if is_small else 400

    def text(longest: int) -> str:
        return "".join(draw.choices("abcdefghij ", k=draw.randint(longest // 4, longest)))

    rows = [
        {"prompt": text(longest), "completion": text(longest * 3 // 4), "label": bool(i % 2)}
        for i in range(64)
    ]
    for name, columns in (("thumbs", ("prompt", "completion", "label")), ("prompts", ("prompt",))):
        lines = (json.dumps({column: row[column] for column in columns}) for row in rows)
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def recipe(folder: Path, kind: str, run: str) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    is_online = kind == "grpo"
    sections: dict[str, Any] = {
        "method": "grpo" if is_online else "kto",
        "model": {"name": str(folder / "model"), "dtype": "bfloat16"},
        "data": {
            "train": str(folder / ("prompts.jsonl" if is_online else "thumbs.jsonl")),
            "max_length": 1024,
        },
        "train": {
            "batch_size": 16 if on_gpu else 4,
            "epochs": 10.0,
            "max_steps": STEPS,
            "learning_rate": 1e-3,
            "micro_batch_tokens": 8192,
            "compile": "on" if on_gpu else "off",
        },
        "run": {
            "dir": str(folder / run),
            "log_every": 1,
            "save_every": SAVED_EVERY,
            "async_save": False,
            "samples": {"prompts": 0},
        },
    }
    if kind == "qlora":
        sections["model"] |= {"quantize": "nf4", "lora": {"rank": 8}}
    if is_online:
        sections["reward"] = REWARD
        sections["rollout"] = {"num_rollouts": 4, "max_new_tokens": 64 if on_gpu else 4}
    else:
        sections["eval"] = {"train_examples": 0}
    return sections


def train_in_process(folder: Path, kind: str) -> dict[str, Any]:
    """Train to the end in a new process, and return the number of steps and the last loss."""
    output = run_process(_fresh(folder, kind, "run"))
    losses = json.loads(output.splitlines()[-1])
    if len(losses) != STEPS or not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the losses of the steps are {losses}")
    return {"steps": len(losses), "first_loss": losses[0], "last_loss": losses[-1]}


def compare_resumed(folder: Path) -> dict[str, Any]:
    """Train to the end, and again with a kill and a new cache of compiled programs; compare the
    weights.
    """
    caches = [str(folder / f"cache {k}") for k in range(3)]
    for cache in caches:
        shutil.rmtree(cache, ignore_errors=True)
    run_process(_fresh(folder, "kto", "whole"), TORCHINDUCTOR_CACHE_DIR=caches[0])
    command, kill = _fresh(folder, "kto", "resumed"), ["--kill-after", str(KILLED_AFTER)]
    run_process([*command, *kill], status=-signal.SIGKILL, TORCHINDUCTOR_CACHE_DIR=caches[1])
    output = run_process(command, TORCHINDUCTOR_CACHE_DIR=caches[2])
    steps = len(json.loads(output.splitlines()[-1]))
    weights, resumed = (_weights(folder / run / "model") for run in ("whole", "resumed"))
    return {
        "steps_after_resume": steps,
        "unequal_weights": sum(not torch.equal(weights[name], resumed[name]) for name in weights),
        "largest_difference": max(
            (weights[name].float() - resumed[name].float()).abs().max().item() for name in weights
        ),
    }


def _fresh(folder: Path, kind: str, run: str) -> list[str]:
    """Return the command of a run, without what an earlier one has left."""
    shutil.rmtree(folder / run, ignore_errors=True)
    return [sys.executable, "-m", "benchmarks.gpu.training", str(folder), kind, run]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.training")
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("run")
    parser.add_argument("--kill-after", type=int, default=0)
    arguments = parser.parse_args()
    write_files(arguments.folder)
    losses: list[float] = []

    def follow(_trainer: Any, record: Mapping[str, Any]) -> None:
        if "loss" in record:
            losses.append(float(record["loss"]))
            if record["step"] == arguments.kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

    valence.train(
        recipe(arguments.folder, arguments.kind, arguments.run), callbacks=[follow], quiet=True
    )
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
