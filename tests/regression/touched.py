"""What one steady step of a run touches: files and functions of the package, calls between files,
depth of calls. A reader of the step has to turn as many pages.

The step is what lies between the ends of two calls of the optimizer, so that no name in the package
is needed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
import valence
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.utils.logging import disable_progress_bar

from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny

PACKAGE = f"{Path(valence.__file__ or '').parent}{os.sep}"
NAMELESS = ("<lambda>", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>", "<module>")
REWARD = {"reward": "contains", "settings": {"words": ["a", "e"]}}
METHODS: dict[str, dict[str, Any]] = {
    "kto": {},
    "grpo": {"reward": REWARD, "rollout": {"num_rollouts": 4, "max_new_tokens": 8}},
}
"""Method -> settings besides those that both runs have."""


@dataclass(frozen=True)
class Call:
    """Of a function of the package, in a file of it, by a function in ``caller`` ("" if that is
    outside it)."""

    file: str
    function: str
    caller: str
    depth: int


@dataclass
class Trace:
    """calls: of all threads, in order. steps: how many there were at the end of each step of the
    optimizer."""

    calls: list[Call] = field(default_factory=list[Call])
    steps: list[int] = field(default_factory=list[int])
    _local: threading.local = field(default_factory=threading.local)

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        files: list[str] = self._local.__dict__.setdefault("files", [])
        if event == "return":
            del files[-1:]
            return
        file, caller = code.co_filename.removeprefix(PACKAGE), files[-1] if files else ""
        files.append(file)
        if not code.co_qualname.endswith(NAMELESS):
            self.calls.append(Call(file, code.co_qualname, caller, len(files)))

    @property
    def steady_step(self) -> list[Call]:
        """The last but one, as the last prepares no further step."""
        before, end = self.steps[-3:-1]
        return self.calls[before:end]


def print_touched() -> None:
    """Print a line for each method."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        disable_progress_bar()
        tokenizer = tiny_tokenizer()
        model: Any = tiny(vocab_size=len(tokenizer), dtype=torch.float32)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        for method in METHODS:
            print(describe(method, _trace(method, folder).steady_step), flush=True)


def describe(method: str, calls: list[Call]) -> str:
    across = sum(call.caller not in ("", call.file) for call in calls)
    functions = {(call.file, call.function) for call in calls}
    return (
        f"{method}: one step enters {len({call.file for call in calls})} files and"
        f" {len(functions)} functions of the package, with {len(calls)} calls, {across} across"
        f" files, and a depth of {max(call.depth for call in calls)}"
    )


def _trace(method: str, folder: Path) -> Trace:
    rows = [
        {"prompt": [{"role": "user", "content": f"question {i // 2}"}]}
        | ({"completion": f"answer {i * 7}", "label": i % 2 == 0} if method == "kto" else {})
        for i in range(32)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{method}.jsonl").write_text(text, encoding="utf-8")
    recipe = {
        "method": method,
        "model": {"name": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / f"{method}.jsonl")},
        "train": {"batch_size": 4, "max_steps": 4, "learning_rate": 1e-4},
        "run": {"dir": str(folder / method)},
    }
    trace = Trace()
    with _traced(trace):
        valence.train(recipe | METHODS[method], quiet=True)
    return trace


@contextmanager
def _traced(trace: Trace) -> Iterator[None]:
    hook = register_optimizer_step_post_hook(lambda *_: trace.steps.append(len(trace.calls)))
    threading.setprofile(trace.profile)
    sys.setprofile(trace.profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        hook.remove()
