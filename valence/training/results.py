"""What a run that was trained from Python offers: where its files are, its log, answers of its model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from valence.report.console import number
from valence.rollout.protocol import Sampling
from valence.types import Chat, Content

if TYPE_CHECKING:
    from valence.training.loop import Run

SHOWN = ("loss", "reward/mean", "eval/loss", "eval/rewards/accuracies", "eval/rewards/auc", "kl")
"""Metrics in the ``repr`` of a run, if its log has them."""
FILES = {"model": "model", "log": "metrics.jsonl", "report": "report.html"}
"""What a run writes for its user, by the word for it."""


class RunResults:
    """The part of ``Run`` that reads what the run has written. It changes nothing."""

    @property
    def directory(self) -> Path:
        """The run's folder."""
        return Path(cast("Run", self).recipe.run.dir)

    @property
    def report(self) -> Path:
        """The page with curves, samples and warnings."""
        return self.directory / FILES["report"]

    @property
    def model_dir(self) -> Path:
        """The trained model: a folder that transformers loads. It is written at the end of the run."""
        return self.directory / FILES["model"]

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of the log, oldest first, as ``pandas.DataFrame`` takes them; numbers that are not finite as floats."""
        try:
            lines = (self.directory / FILES["log"]).read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        return [{name: _as_number(value) for name, value in json.loads(line).items()} for line in lines]

    def ask(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str:
        """Answer a prompt with the policy as it is now.

        prompt: text or chat messages. Text becomes the user's turn of a chat where the run trains on chats, and is
        continued as it is where the run trains on text. temperature: 0 takes the most likely token each time.

        Raises UserError for a reward model.
        """
        content: Content = prompt if isinstance(prompt, str) else Chat(tuple(dict(message) for message in prompt))
        run = cast("Run", self)
        if isinstance(prompt, str) and _trains_on_chats(run):
            content = Chat(({"role": "user", "content": prompt},))
        how = Sampling(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
        return run.sample([content], how)[0][0].text

    def __repr__(self) -> str:
        run, latest = cast("Run", self), dict[str, Any]()
        for record in self.history:
            latest |= record
        metrics = [f"{name}={number(latest[name])}" for name in SHOWN if isinstance(latest.get(name), int | float)]
        steps = f"steps={run.step}/{max(run.step, run.total_steps)}"
        return f"Run({', '.join([f'method={run.recipe.method!r}', steps, *metrics, f'folder={str(self.directory)!r}'])})"


def outputs(folder: Path) -> list[str]:
    """One line for each file or folder that a finished run has for its user."""
    return [f"{what:>7}  {folder / name}" for what, name in FILES.items() if (folder / name).exists()]


def _trains_on_chats(run: Run) -> bool:
    corpus = run.prepared.corpora.get("train")
    examples = corpus.loaded.examples if corpus else ()
    if not examples:
        return run.prepared.tokenizer.chat_template is not None
    return isinstance(getattr(examples[0], "prompt", None), Chat)


def _as_number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value
