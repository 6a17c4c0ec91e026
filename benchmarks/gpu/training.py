"""Tiny runs to the end: KTO, twice and killed and resumed, GRPO, and KTO with a quantized model.

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


def train_in_process(folder: Path, kind: str, logs: Path) -> dict[str, Any]:
    """Train to the end in a new process, and return the number of steps and two losses."""
    return _losses(run_process(_fresh(folder, kind, "run"), logs / f"{kind}.log"), STEPS)


def compare_runs(folder: Path, logs: Path) -> dict[str, Any]:
    """Train with KTO to the end, again, and again with a kill and a new cache of compiled programs.

    unequal_again, unequal_resumed: number of tensors of weights that differ from the first run.
    """
    caches: list[dict[str, str]] = []
    for k in range(2):
        cache = folder / f"cache {k}"
        shutil.rmtree(cache, ignore_errors=True)
        caches.append(
            {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
        )
    output = run_process(
        _fresh(folder, "kto", "first"), logs / "kto first.log", environment=caches[0]
    )
    figures = _losses(output, STEPS)
    run_process(_fresh(folder, "kto", "again"), logs / "kto again.log", environment=caches[0])
    command, kill = _fresh(folder, "kto", "resumed"), ["--kill-after", str(KILLED_AFTER)]
    log, status = logs / "kto killed.log", -signal.SIGKILL
    run_process([*command, *kill], log, status=status, environment=caches[0])
    output = run_process(command, logs / "kto resumed.log", environment=caches[1])
    _losses(output, STEPS - SAVED_EVERY)  # the steps after the checkpoint
    first, again, resumed = (
        _weights(folder / run / "model") for run in ("first", "again", "resumed")
    )
    return figures | {
        "unequal_again": sum(not torch.equal(first[name], again[name]) for name in first),
        "unequal_resumed": sum(not torch.equal(first[name], resumed[name]) for name in first),
        "largest_difference": max(
            (first[name].float() - resumed[name].float()).abs().max().item() for name in first
        ),
    }


def _losses(output: str, steps: int) -> dict[str, Any]:
    """Return the first and the last loss that a run printed. Raises RuntimeError unless it ran this
    number of steps with finite losses.
    """
    losses = json.loads(output.splitlines()[-1])
    if len(losses) != steps or not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the losses of the steps are {losses}")
    return {"steps": steps, "first_loss": losses[0], "last_loss": losses[-1]}


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
