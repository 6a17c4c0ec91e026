"""python -m benchmarks.distill [--quick] [--seeds N [N ...]] [--folder DIR]: what a student gains
from its teacher's distributions on its own completions, when imitation has nothing more to give.

The teacher is SmolLM2-135M-Instruct, the student six of its thirty layers. The student is trained
on the teacher's answers (sft) until the loss on held-out answers no longer falls. From there, each
seed trains two copies of it on as many tokens: online_distill on completions that the student
samples, and sft on the teacher's answers. The measure is KL(student, teacher) in nats per token,
over the whole vocabulary, on completions of held-out prompts that each student samples itself,
with the forward pass of transformers.

Models and answers stay in the folder: the same command continues where it stopped. ``--quick``:
few prompts and steps, one seed, without bars. Exit status: 0 the KL after online_distill is at
least 20 % below that after sft, and the interval over seeds excludes 0; 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import mkdtemp
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import valence
from benchmarks.hindsight.rows import questions
from benchmarks.online.__main__ import TOPICS
from examples.demo import assets
from valence.data.encode import Encoder
from valence.models.build import load_tokenizer
from valence.rollouts import HFGenerator, Sampling
from valence.statistics import student_interval
from valence.types import Chat

LAYERS = (0, 5, 11, 17, 23, 29)
"""Layers of the teacher that the student consists of."""
TEMPLATES = (
    "Write one sentence about {}.",
    "In one sentence, what do you think of {}?",
    "Name two things that you notice about {}.",
    "Ask a short question about {}.",
    "What would a child say about {}? Be brief.",
    "Give one piece of advice about {}.",
)
MAX_NEW_TOKENS = 32
ANSWERS_PER_PROMPT = 2
BATCH_SIZE = 16
RATES = {"imitation": 3e-4, "online_distill": 1e-4, "sft": 1e-4}
STEPS = 30
"""Of online_distill. sft gets as many tokens."""
BAR = 0.2

Arm = Literal["online_distill", "sft"]
Record = dict[str, Any]


def write(file: Path, rows: Sequence[Record]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def prompt_texts() -> list[str]:
    """Prompts of the training rows, in random order. None is a held-out question."""
    texts = [*questions("training"), *questions("tuning")]
    texts += [template.format(topic) for template in TEMPLATES for topic in TOPICS]
    random.Random(0).shuffle(texts)
    return texts


@dataclass(frozen=True)
class Setup:
    """What all measurements share."""

    teacher: Path
    folder: Path
    quick: bool

    @property
    def training_prompts(self) -> Path:
        return self.folder / "prompts.jsonl"

    @property
    def held_out_prompts(self) -> Path:
        return self.folder / "held_out_prompts.jsonl"

    def write_prompts(self) -> None:
        """Write both files of prompts."""
        texts = prompt_texts(), questions("held-out")
        for file, part in zip((self.training_prompts, self.held_out_prompts), texts, strict=True):
            chats = [{"prompt": [{"role": "user", "content": text}]} for text in part]
            write(file, chats[:12] if self.quick else chats)

    def answers(self, prompts: Path, count: int) -> Path:
        """Answers that the teacher samples to each prompt of a file, which are rows for sft."""
        file = self.folder / f"answers_{prompts.name}"
        command = [
            sys.executable, "-m", "valence", "sample", str(self.teacher),
            "--data", str(prompts), "--out", str(file), "-n", str(count),
            "--max-new-tokens", str(MAX_NEW_TOKENS), "--seed", "0",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        return file

    def student(self) -> Path:
        """The student before training, as a folder."""
        folder = self.folder / "cut"
        if not folder.exists():
            model: Any = AutoModelForCausalLM.from_pretrained(self.teacher, dtype=torch.float32)
            layers: list[Any] = [model.model.layers[i] for i in LAYERS]
            for i, layer in enumerate(layers):
                layer.self_attn.layer_idx = i
            model.model.layers = torch.nn.ModuleList(layers)
            model.config.num_hidden_layers = len(LAYERS)
            if getattr(model.config, "layer_types", None):
                model.config.layer_types = model.config.layer_types[: len(LAYERS)]
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(self.teacher).save_pretrained(folder)
        return folder

    def train(self, name: str, sections: Record) -> Path:
        """Train, or continue, a run of this name. Returns its folder."""
        folder = self.folder / name
        if not (folder / "model").exists():
            valence.train(
                {
                    **sections,
                    "data": {"max_length": 256} | sections["data"],
                    "train": {"batch_size": BATCH_SIZE, "compile": "off"} | sections["train"],
                    "run": {"dir": str(folder), "save_every": 20} | sections.get("run", {}),
                },
                quiet=True,
            )
        return folder


def log_of(run: Path) -> list[Record]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def imitate(setup: Setup, answers: Path, held_out: Path) -> Path:
    """Train the student on the teacher's answers until the held-out loss no longer falls. Returns
    the model of the best evaluation.
    """
    run = setup.train(
        "imitation",
        {
            "method": "sft",
            "model": {"name": str(setup.student()), "dtype": "float32"},
            "data": {"train": str(answers), "eval": str(held_out)},
            "train": {
                "learning_rate": RATES["imitation"],
                "warmup": 0.05,
                **({"max_steps": 4} if setup.quick else {"epochs": 20}),
            },
            "eval": {"every": 2 if setup.quick else 20, "other_text": "off"},
            "run": {"keep_best": {}, "early_stop": {"patience": 3}},
        },
    )
    losses = [record["eval/loss"] for record in log_of(run) if "eval/loss" in record]
    print("held-out loss of sft until it converges: " + " ".join(f"{x:.3f}" for x in losses))
    best = setup.folder / "imitated"
    if not best.exists():
        command = [sys.executable, "-m", "valence", "export", str(run), str(best)]
        subprocess.run([*command, "--step", "best", "--no-verify"], check=True)
    return best


def continue_training(
    setup: Setup, start: Path, arm: Arm, seed: int, steps: int, answers: Path
) -> Path:
    """Train a copy of the student further."""
    is_online = arm == "online_distill"
    sections: Record = {
        "method": arm,
        "model": {"name": str(start), "dtype": "float32"},
        "data": {"train": str(setup.training_prompts if is_online else answers)},
        "train": {
            "learning_rate": RATES[arm],
            "schedule": "constant",
            "warmup": 0.1,
            "max_steps": steps,
            "seed": seed,
        },
        "eval": {"other_text": "off"},
    }
    if is_online:
        sections["teacher"] = {"model": str(setup.teacher)}
        sections["rollout"] = {"num_rollouts": 1, "max_new_tokens": MAX_NEW_TOKENS}
    return setup.train(f"{arm}_{seed}", sections)


def trained_tokens(run: Path) -> int:
    """Tokens of the rows that a run has trained on, prompts included."""
    return sum(record["tokens"] for record in log_of(run) if "loss" in record)


@torch.no_grad()
def divergence(setup: Setup, student: Path) -> float:
    """KL(student, teacher) per token of completions that the student samples to the held-out
    prompts (nats).
    """
    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (student, setup.teacher)
    ]
    encoder = Encoder(load_tokenizer(str(setup.teacher)), max_length=256)
    generator = HFGenerator(models[0], encoder.tokenizer, end_ids=encoder.end_ids)
    rows = [json.loads(line) for line in setup.held_out_prompts.read_text("utf-8").splitlines()]
    prompts = [encoder.encode_prompt(Chat(tuple(row["prompt"]))) for row in rows]
    torch.manual_seed(0)
    sampled = generator.generate(prompts, 1, Sampling(max_new_tokens=MAX_NEW_TOKENS))
    total, num_tokens = 0.0, 0
    for prompt, [completion] in zip(prompts, sampled, strict=True):
        ids = torch.tensor([[*prompt, *completion.tokens]])
        q, p = (
            torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].double(), -1)
            for model in models
        )
        total += float((q.exp() * (q - p)).sum())
        num_tokens += len(q)
    return total / num_tokens


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distill", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few prompts, one seed, no bars")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, help="models and answers. Default: a new folder")
    options = parser.parse_args(arguments)
    disable_progress_bar()
    quick: bool = options.quick
    folder: Path = options.folder or Path(mkdtemp(prefix="distill-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"folder {folder}", flush=True)
    setup = Setup(assets.smollm2(), folder.resolve(), quick)
    setup.write_prompts()
    answers = setup.answers(setup.training_prompts, ANSWERS_PER_PROMPT)
    start = imitate(setup, answers, setup.answers(setup.held_out_prompts, 1))
    before = divergence(setup, start)
    print(f"KL(student, teacher) after sft: {before:.3f} nats per token", flush=True)
    gains: list[float] = []
    for seed in options.seeds[:1] if quick else options.seeds:
        online = continue_training(
            setup, start, "online_distill", seed, 3 if quick else STEPS, answers
        )
        tokens = trained_tokens(online)
        per_step = fmean(
            record["tokens"] for record in log_of(setup.folder / "imitation") if "loss" in record
        )
        further = continue_training(
            setup, start, "sft", seed, math.ceil(tokens / per_step), answers
        )
        after = {run: divergence(setup, run / "model") for run in (online, further)}
        gains.append(1 - after[online] / after[further])
        print(
            f"seed {seed}: {after[online]:.3f} after online_distill ({tokens} tokens), "
            f"{after[further]:.3f} after sft ({trained_tokens(further)} tokens)",
            flush=True,
        )
    if quick:
        return 0
    low, high = student_interval(gains)
    held = fmean(gains) >= BAR and low > 0
    print(
        f"KL after online_distill below that after sft: {fmean(gains):.1%} "
        f"[{low:.1%}, {high:.1%}], bar {BAR:.0%}: {'held' if held else 'short'}"
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
