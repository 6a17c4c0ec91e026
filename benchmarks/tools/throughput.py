"""python -m benchmarks.tools.throughput MODEL [--repeats N]: the time of 64 episodes with a
calculator, of Valence and of TRL's GRPOTrainer.

Eight episodes of each of eight prompts, with the same weights, tools, template and limits, at
temperature 1 in float32 on two threads. Both sides are run in turn. The random numbers differ, so
the measure is the time per sampled token; it is printed only if the mean numbers of turns and of
sampled tokens agree within 15 %. MODEL: a folder of a model that calls the calculator, such as the
one that `python -m benchmarks.tools` trains. Needs TRL's environment (`make peers`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from tempfile import mkdtemp
from typing import Any

import torch

import valence
from benchmarks.peers import NO_TRL, peer_environment, peer_python
from benchmarks.tools.__main__ import TOOLS, questions, write
from valence.rollouts import Sampling
from valence.types import Chat, Origin, Prompt

NUM_PROMPTS, NUM_EPISODES, MAX_NEW_TOKENS, THREADS = 8, 8, 112, 2
TOLERANCE = 0.15


@dataclass
class Sampled:
    seconds: float
    tokens: int
    turns: int
    length: int


class Peer:
    def __init__(self, model: Path, template: Path, prompts: Path) -> None:
        python = peer_python()
        if python is None:
            raise SystemExit(NO_TRL)
        self.process = subprocess.Popen(
            [
                str(python),
                "-m",
                "benchmarks.tools.trl_side",
                str(model),
                str(template),
                str(prompts),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=peer_environment() | {"OMP_NUM_THREADS": str(THREADS)},
        )

    def sample(self, seed: int) -> Sampled:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("TRL's process has ended; see its output above")
        return Sampled(**json.loads(line))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    folder = Path(mkdtemp(prefix="tools-"))
    rows = questions(NUM_PROMPTS, random.Random(5), set())
    python = peer_python()
    if python is None:
        raise SystemExit(NO_TRL)
    find = "import trl, pathlib; print(pathlib.Path(trl.__file__).parent / 'chat_templates')"
    output = subprocess.run(
        [str(python), "-c", find], capture_output=True, text=True, check=True,
        env=peer_environment(),
    ).stdout  # fmt: skip
    template = Path(output.splitlines()[-1]) / "qwen2_5.jinja"
    repeated = [row for row in rows for _ in range(NUM_EPISODES)]
    peer = Peer(arguments.model, template, write(folder / "repeated.jsonl", repeated))
    run = valence.build_run(
        {
            "method": "grpo",
            "model": {"name": str(arguments.model), "dtype": "float32", "lora": {}},
            "data": {
                "train": str(write(folder / "prompts.jsonl", rows)),
                "chat_template": str(template), "max_length": 512,
            },
            "reward": "benchmarks.tools.calculator:solved",
            "rollout": {"tools": [TOOLS], "max_turns": 3, "max_new_tokens": MAX_NEW_TOKENS},
            "run": {"dir": str(folder / "run")},
        }
    )  # fmt: skip
    prompts = [Prompt(prompt=Chat(tuple(r["prompt"])), origin=Origin("", 0)) for r in rows]

    def ours(seed: int) -> Sampled:
        start = time.perf_counter()
        sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, seed=seed)
        groups = run.sample(prompts, sampling, NUM_EPISODES)
        seconds = time.perf_counter() - start
        flat = [completion for group in groups for completion in group]
        turns = [c.episode.messages for c in flat if c.episode is not None]
        return Sampled(
            seconds,
            sum(sum(c.sampled) for c in flat),
            sum(m["role"] == "assistant" for messages in turns for m in messages),
            sum(len(c.tokens) for c in flat),
        )

    sides: dict[str, list[Sampled]] = {"Valence": [], "TRL": []}
    for seed in range(arguments.repeats + 1):
        for name, sample in (("Valence", ours), ("TRL", peer.sample)):
            result = sample(seed)
            print(f"{name}: {result.seconds:.1f} s{'' if seed else ' (warming up)'}", flush=True)
            if seed:  # the first is to warm up
                sides[name].append(result)
    facts: dict[str, Any] = {}
    for name, results in sides.items():
        facts[name] = [
            fmean(getattr(r, field) for r in results) / (NUM_PROMPTS * NUM_EPISODES)
            for field in ("tokens", "turns", "length")
        ]
        tokens, turns, length = facts[name]
        print(f"{name}: {tokens:.1f} sampled tokens, {turns:.2f} turns, {length:.1f} tokens each")
    for our_fact, other in zip(facts["Valence"], facts["TRL"], strict=True):
        if abs(our_fact - other) > TOLERANCE * max(our_fact, other):
            print("the two sides do not sample the same: no time is printed")
            return 1
    rates = {name: [r.tokens / r.seconds for r in results] for name, results in sides.items()}
    for name, values in rates.items():
        print(f"{name}: {median(values):.0f} sampled tokens per second")
    ratios = [a / b for a, b in zip(rates["Valence"], rates["TRL"], strict=True)]
    print(f"ratio: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    peer.process.kill()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(main())
