"""Common parts of the tests of offline rounds: a folder with a model, prompts and rewards, and
functions that run the commands.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.programs import Program
from tests.training.scoring import write
from valence.distributed.process_group import Group
from valence.jobs.reward_rows import score_by_reward
from valence.jobs.row_job import Tally
from valence.jobs.sample_rows import SampleCounts, sample_rows
from valence.options import SampleOptions, ScoreOptions

ROOT = Path(__file__).parents[2]
REWARDS = """
import time

def short(completions, **context):
    return [-float(len(c.tokens)) for c in completions]

def words(completions, **context):
    texts = [f"{len(c.text)} letters" if len(c.text) % 2 else "" for c in completions]
    return [(len(c.text), text) for c, text in zip(completions, texts)]

def odd(completions, **context):
    return [None if c.info["answer"] == 1 else float(c.index) for c in completions]

def vowels(prompts, completions, answer, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [text.count("a") + a / 100 for text, a in zip(texts, answer)]

def slow(completions, **context):
    time.sleep(0.005 * len(completions))
    return [float(len(c.text)) for c in completions]

def down(completions, **context):
    raise OSError("the server is down")
"""


def prompts(name: str = "prompts.jsonl", count: int = 7) -> str:
    """Texts and chats of different lengths, some with other columns."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"question {'x' * (3 * i % 7)} {i} is ", "answer": i} for i in range(count)
    ]
    rows[2] = {
        "prompt": [{"role": "user", "content": "hello"}],
        "answer": 2,
        "label": True,
        "weight": 0.5,
    }
    return write(name, rows)


def sample(
    out: str = "answers.jsonl",
    target: str = "model",
    data: Sequence[str] = ("prompts.jsonl",),
    group: Group | None = None,
    **options: Any,
) -> SampleCounts:
    options = {"n": 3, "max_new_tokens": 6, "at_once": 6, **options}
    options = {"data": [*data], "out": Path(out), **options}
    return sample_rows(target, SampleOptions(**options), group=group)


def judge(
    *rewards: str,
    out: str = "scored.jsonl",
    data: Sequence[str] = ("answers.jsonl",),
    target: str | None = None,
    group: Group | None = None,
) -> Tally:
    names = [*rewards] or ["rewards:short"]
    options = ScoreOptions(reward=names, data=[*data], out=Path(out))
    return score_by_reward(target, options, group=group)


def killed(*words: str, out: str, lines: int) -> int:
    """Lines that the command has written before it was killed, which is as soon as it has so
    many.
    """
    program, path = Program(*words), Path(out)
    program.wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= lines)
    assert program.kill() == -signal.SIGKILL
    return path.read_bytes().count(b"\n")
