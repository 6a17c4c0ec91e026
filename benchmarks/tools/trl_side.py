"""TRL's side of the comparison of throughput: a process in TRL's environment.

Usage: python benchmarks/tools/trl_side.py MODEL TEMPLATE PROMPTS. For each line of input it samples
an episode of each prompt, and writes the numbers of turns and tokens and the seconds as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset


def calculate(a: int, operation: str, b: int) -> int:
    """Compute with two whole numbers.

    Args:
        a: The first number.
        operation: One of +, - and *.
        b: The second number.

    Returns:
        The result.
    """
    return {"+": a + b, "-": a - b, "*": a * b}[operation]


def main(model: str, template: str, prompts: str) -> None:
    replies = os.dup(1)
    os.dup2(2, 1)  # libraries print to standard output
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = Path(template).read_text()
    causal = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 64, "num_generations": 8,
        "max_completion_length": 112, "max_tool_calling_iterations": 2, "temperature": 1.0,
        "report_to": [], "use_cpu": True, "bf16": False,
    }  # fmt: skip
    trainer = trl.GRPOTrainer(
        causal,
        args=trl.GRPOConfig(**settings),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=tokenizer,
        tools=[calculate],
    )
    chats = [row["prompt"] for row in rows]
    trainer._sync_tool_dicts = [{"calculate": calculate} for _ in chats]
    trainer._async_tool_dicts = [{} for _ in chats]
    for line in sys.stdin:
        torch.manual_seed(int(line))
        start = time.perf_counter()
        with torch.no_grad():
            out = trainer._generate(chats)
        seconds = time.perf_counter() - start
        _, completion_ids, tool_mask, completions, *_ = out
        reply = {
            "seconds": seconds,
            "tokens": sum(map(sum, tool_mask)),
            "turns": sum(m["role"] == "assistant" for c in completions for m in c),
            "length": sum(map(len, completion_ids)),
        }
        os.write(replies, (json.dumps(reply) + "\n").encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
