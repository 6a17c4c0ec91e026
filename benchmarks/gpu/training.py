"""Step D: does a real run keep the device busy, and does it learn the same as on a CPU?

python -m benchmarks.gpu.training FOLDER STEPS prints the losses of the first steps of KTO, as JSON:
the other side of the comparison, in a process without a GPU.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch._logging import set_logs  # pyright: ignore[reportPrivateImportUsage]
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

import valence
from benchmarks.step.cases import Shape
from benchmarks.step.inputs import config_of
from valence.types import Completion

HALF_BILLION = Shape(
    "0.5b", 1024, hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8, head_dim=128
)
TINY = Shape("tiny", 320, hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, head_dim=16)
WARM_UP, PROFILED = 20, (40, 45)
"""The step after which nothing should be compiled or allocated, and the profiled steps."""
REWARD = "benchmarks.gpu.training:share_of_vowels"


@dataclass
class RunFigures:
    """A run. losses: of each step. compile_share: compile time after WARM_UP steps, of the time
    after them. allocations: calls of cudaMalloc after WARM_UP steps. idle: share of the profiled
    steps in which no kernel ran.
    """

    losses: list[float] = field(default_factory=list[float])
    compile_share: float = 0.0
    allocations: int = 0
    idle: float = 0.0


def share_of_vowels(completions: Sequence[Completion]) -> list[float]:
    """Return the share of letters of each completion that are vowels."""
    texts = [completion.text for completion in completions]
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in texts]


def write_files(folder: Path, shape: Shape, num_rows: int = 512, longest: int = 400) -> None:
    """Write a random model, a tokenizer of bytes, and rows. longest: letters of a prompt."""
    letters = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder / "model")
    torch.manual_seed(0)
    Qwen3ForCausalLM(config_of(shape)).save_pretrained(folder / "model")
    draw = random.Random(0)

    def text(longest: int) -> str:
        return "".join(draw.choices("abcdefghij ", k=draw.randint(longest // 4, longest)))

    rows = [
        {"prompt": text(longest), "completion": text(longest * 3 // 4), "label": bool(i % 2)}
        for i in range(num_rows)
    ]
    for name, columns in (("thumbs", ("prompt", "completion", "label")), ("prompts", ("prompt",))):
        lines = (json.dumps({column: row[column] for column in columns}) for row in rows)
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def recipe(folder: Path, method: str, steps: int, batch_size: int, run: str) -> dict[str, Any]:
    is_online = method == "grpo"
    sections: dict[str, Any] = {
        "method": method,
        "model": {"name": str(folder / "model"), "dtype": "bfloat16"},
        "data": {
            "train": str(folder / ("prompts.jsonl" if is_online else "thumbs.jsonl")),
            "max_length": 1024,
        },
        "train": {
            "batch_size": batch_size,
            "epochs": 10.0,
            "max_steps": steps,
            "learning_rate": 1e-5,
            "micro_batch_tokens": 16_384,
            "compile": "on" if torch.cuda.is_available() else "off",
        },
        "run": {"dir": str(folder / run), "log_every": 1, "samples": {"prompts": 0}},
    }
    if is_online:
        sections["reward"] = REWARD
        sections["rollout"] = {"num_rollouts": 8, "max_new_tokens": 300}
    else:
        sections["reference"] = {"cache": "off"}
        sections["eval"] = {"train_examples": 0}
    return sections


def run_training(
    folder: Path,
    method: str,
    steps: int,
    *,
    batch_size: int = 16,
    run: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> RunFigures:
    """Train, and measure the run. changes: further settings by their dotted names."""
    figures = RunFigures()
    on_gpu = torch.cuda.is_available()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    start: dict[str, float] = {}

    def follow(trainer: Any, record: Mapping[str, Any]) -> None:
        if "loss" not in record:
            return
        figures.losses.append(float(record["loss"]))
        if not on_gpu:
            return
        step = len(figures.losses)
        if step == WARM_UP:
            start.update(time=time.perf_counter(), compiled=_compile_seconds())
            start["allocations"] = torch.cuda.memory_stats()["num_device_alloc"]
        if step == PROFILED[0]:
            start["profiled"] = time.perf_counter()
            profiler.start()
        if step == PROFILED[1]:
            torch.cuda.synchronize()
            wall = time.perf_counter() - start["profiled"]
            profiler.stop()
            figures.idle = 1 - _busy_seconds(profiler) / wall

    set_logs(recompiles=on_gpu)
    valence.train(
        recipe(folder, method, steps, batch_size, run or method),
        callbacks=[follow],
        quiet=True,
        fresh=True,
        **(changes or {}),
    )
    if "time" in start:
        wall = time.perf_counter() - start["time"]
        figures.compile_share = (_compile_seconds() - start["compiled"]) / wall
        after = torch.cuda.memory_stats()["num_device_alloc"]
        figures.allocations = int(after - start["allocations"])
    return figures


def losses_on_a_cpu(folder: Path, steps: int, batch_size: int) -> list[float]:
    """Return the losses of the first steps of KTO, in a process without a GPU."""
    command = [sys.executable, "-m", "benchmarks.gpu.training"]
    done = subprocess.run(
        [*command, str(folder), str(steps), str(batch_size)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _compile_seconds() -> float:
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]


def _busy_seconds(profiler: Any) -> float:
    """Return the seconds in which at least one kernel or copy ran."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.profiler.DeviceType.CUDA
    )
    busy, end = 0.0, float("-inf")
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return busy / 1e6


if __name__ == "__main__":
    place, count, rows = sys.argv[1:]
    result = run_training(Path(place), "kto", int(count), batch_size=int(rows), run="kto_on_cpu")
    print(json.dumps(result.losses))
