"""Follow one row through the package to its gradient: ``python -m examples.trace kto``.

The command trains a tiny random model for one step. It prints the files that transform the row, in
the order of their first use, with their functions.

    python -m examples.trace kto     a rated completion, from the file to the gradient
    python -m examples.trace grpo    a prompt, and a completion that is sampled for it
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import valence
from valence.batching.micro_batches import RankBatches, StepPacker
from valence.batching.prefix_tree import PrefixTree
from valence.data.encoded_set import EncodedSet
from valence.data.load import Loaded
from valence.data.sources import Row
from valence.methods.sample_builders import RolloutGroup
from valence.training.collector import RolloutPrompt
from valence.training.prepare import Corpus
from valence.training.step import StepResult
from valence.types import (
    Completion,
    Demonstration,
    Judgement,
    MicroBatch,
    PolicyOutput,
    Preference,
    Prompt,
    Ranking,
    Score,
    TokenizedCompletion,
    TokenizedExample,
)

ROW_DATA = (
    Row, Judgement, Demonstration, Preference, Ranking, Prompt, TokenizedExample,
    TokenizedCompletion, Loaded, EncodedSet, Corpus, StepPacker, PrefixTree, RankBatches,
    MicroBatch, PolicyOutput, StepResult, RolloutPrompt, RolloutGroup, Completion, Score,
)  # fmt: skip
"""Types that hold a row, from the file to the micro-batch."""

STORAGE = ("ExampleStore.item", "TokenizedDataset.item", "TokenizedDataset._parts")
"""Functions that return a row in the form in which it was stored."""

SAMPLED = "HFGenerator.completion"
"""The function that samples a completion."""

STEP = "optimizer_step"
"""Inside this function, a row is also a tensor of log-probabilities, or the loss."""

BRANCHES = {
    "check_layout": "check of the packed layout, at the start",
    "make_kl_pairs": "KL pairs",
    "Objective.reference_logps": "reference",
    "Objective._estimate_z0": "reference point z0",
    "Objective._kl_sums": "reference point z0",
    "Objective._reference_points": "reference point z0",
    "divisors": "counts of the step",
    "counts": "counts of the step",
    "MicroBatch.part": "counts of the step",
    "Objective._shared_statistics": "statistics of the step",
    "segment_table": "which tokens each token attends to",
    "hidden_keys": "which tokens each token attends to",
    "Objective._record": "metrics",
    "SingleProcess.norm": "norm of the gradient",
}
"""Functions outside the path of the row, and their results."""

PACKAGE = Path(valence.__file__).parent
WORDS = (
    "<start> <end> <unk> user assistant what is the capital of france italy ? paris rome no idea"
)


class Trace:
    """Records the functions that bring row data into a new form.

    A function that only passes on what it received, or what another function returned, is not
    recorded. files: of each file, its functions. branches: the same for the computation off the
    row's own way.
    """

    def __init__(self) -> None:
        self.files: dict[str, list[str]] = {}
        self.branches: dict[str, dict[str, list[str]]] = {}
        self._frames: list[tuple[FrameType, str]] = []
        self._known: dict[int, Any] = {}
        self._num_steps = 0

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(PACKAGE)):
            return
        name = code.co_qualname.replace(".<locals>", "")
        if event == "call":
            branch = self._frames[-1][1] if self._frames else ""
            self._frames.append((frame, branch or BRANCHES.get(name, "")))
            self._num_steps += name == STEP
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            for argument in arguments:
                self._new_objects(frame.f_locals.get(argument))
            return
        while self._frames[-1][0] is not frame:
            self._frames.pop()
        _, branch = self._frames.pop()
        if self._new_objects(result) and "<" not in name and name not in STORAGE:
            file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
            files = self.branches.setdefault(branch, {}) if branch else self.files
            if name == SAMPLED and "the prompt" not in self.branches:
                self.branches["the prompt"], self.files = self.files, {}
                files = self.files
            names = files.setdefault(file, [])
            if name not in names:
                names.append(name)
        self._num_steps -= name == STEP

    def _new_objects(self, value: Any) -> bool:
        """Whether a value holds row data that was not seen before."""
        new_objects = [
            candidate for candidate in self._row_data(value, 3) if id(candidate) not in self._known
        ]
        self._known |= {
            id(candidate): candidate for candidate in new_objects
        }  # kept alive, so that ids stay unique
        return bool(new_objects)

    def _row_data(self, value: Any, depth: int) -> Iterator[Any]:
        if isinstance(value, ROW_DATA) or (self._num_steps and isinstance(value, torch.Tensor)):
            yield value
        elif depth and isinstance(value, dict):
            for item in list(value.values())[:8]:
                yield from self._row_data(item, depth - 1)
        elif depth and isinstance(value, list | tuple):
            for item in value[:8]:
                yield from self._row_data(item, depth - 1)


def make_model() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    words = WORDS.split()
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<start>", "<end>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = (
        "{% for m in messages %}{{ '<start> ' + m['role'] + ' ' + m['content'] + ' <end> ' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start> assistant ' }}{% endif %}"
    )
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, eos_token_id=1, bos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config), fast


def recipe(method: str, folder: Path) -> dict[str, Any]:
    prompts = ["what is the capital of france ?", "what is the capital of italy ?"]
    answers = [("paris", True), ("no idea", False)]
    rows: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    if method == "kto":
        for row, (completion, label) in zip(rows, answers, strict=True):
            row |= {"completion": completion, "label": label}
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    online: dict[str, Any] = {
        "reward": "examples.trace:num_words",
        "rollout": {"num_rollouts": 2, "max_new_tokens": 4},
    }
    return {
        "method": method,
        "model": "tiny",
        "data": {"train": str(file), "max_length": 64},
        "train": {"batch_size": 2, "max_steps": 1},
        "run": {"dir": str(folder / "run"), "samples": {"prompts": 0}},
        **(online if method == "grpo" else {}),
    }


def num_words(completions: list[Completion]) -> list[float]:
    """The reward of the GRPO example: completions with more different words are better."""
    return [float(len(set(completion.text.split()))) for completion in completions]


def trace(method: str) -> Trace:
    recorder = Trace()
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = make_model()
        sys.setprofile(recorder)
        try:
            trainer = valence.build_run(
                recipe(method, Path(folder)), model=model, tokenizer=tokenizer, quiet=True
            )
            trainer.fit()
            trainer.examples.close()
        finally:
            sys.setprofile(None)
    return recorder


def main(arguments: list[str]) -> int:
    if arguments not in (["kto"], ["grpo"]):
        print(__doc__)
        return 2
    recorder = trace(arguments[0])
    if prompt := recorder.branches.pop("the prompt", None):
        print_files("the prompt", prompt)
    print_files("the completion", recorder.files)
    print("other values that the step needs:")
    for branch, files in recorder.branches.items():
        others = [file for file in files if file not in recorder.files]
        print(f"  {branch}{': ' if others else ''}{', '.join(others)}")
    return 0


def print_files(title: str, files: Mapping[str, list[str]]) -> None:
    print(f"{title}:")
    width = max(map(len, files), default=0)
    for number, (file, names) in enumerate(files.items(), 1):
        shown = names if len(names) <= 4 else [*names[:3], "..."]
        print(f"{number:4}  {file:{width}}  {', '.join(shown)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
