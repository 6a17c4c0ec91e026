"""Models, tokenizers, rows, a reward function, recipes and exports, written into one folder."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from tests.regression.exports import EXPORTS
from tests.regression.recipes import ARCHITECTURES, RECIPES
from tests.tiny import CHATML, CORPUS, INST, tiny_tokenizer
from tests.tiny_models import SMALL, tiny

WORDS = " ".join(CORPUS[:2]).split()
REWARDS = '''
"""Rewards with either of the two signatures that a function may have."""


def vowels(completions, **context):
    """The share of vowels in a completion."""
    return [sum(c in "aeiou" for c in each.text) / max(1, len(each.text)) for each in completions]


def near_length(prompts, completions, length, *, scale, **columns):
    """How far a completion is from a length that the row sets; no score for a few of them."""
    sizes = [len(each[0]["content"]) for each in completions]
    return [
        None if size % 11 == 5 else -scale * abs(size - wanted)
        for size, wanted in zip(sizes, length)
    ]
'''


def write_inputs(folder: Path) -> None:
    """Write everything that the recipes and the commands name. The same is written each time."""
    disable_progress_bar()
    folder.mkdir(parents=True)
    for seed, architecture in enumerate(ARCHITECTURES):
        tokenizer = tiny_tokenizer(_template(architecture))
        _write_model(folder / "models" / architecture, architecture, tokenizer, seed)
    _write_reward_model(folder / "models" / "judge")
    for kind, row in ROWS.items():
        for split, count in (("train", 26), ("held_out", 6)):
            draw = random.Random(f"{kind} {split}")
            lines = (json.dumps(row(draw, i)) + "\n" for i in range(count))
            (folder / f"{kind}_{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "regression_rewards.py").write_text(REWARDS, encoding="utf-8")
    for export in EXPORTS:
        export.write(folder)
    (folder / "recipes").mkdir()
    for recipe in RECIPES:
        text = json.dumps(recipe.settings, indent=1)  # JSON is YAML
        (folder / recipe.path).write_text(text, encoding="utf-8")


def digests(folder: Path) -> dict[str, str]:
    """File -> SHA-256 of its content, of all inputs."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if "__pycache__" not in path.parts
    }


def _template(architecture: str) -> str | None:
    return {"gpt2": None, "mistral-window": INST}.get(architecture, CHATML)


def _write_model(
    folder: Path, architecture: str, tokenizer: PreTrainedTokenizerBase, seed: int
) -> None:
    size = len(tokenizer) + 8  # some architectures add a token when they load the tokenizer
    model: Any = tiny(architecture, vocab_size=size, dtype=torch.float32, seed=seed)
    with torch.no_grad():  # at random the model would hardly ever end a completion
        model.get_output_embeddings().weight[tokenizer.eos_token_id] *= 5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_reward_model(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    config = AutoConfig.for_model("llama", **SMALL | {"vocab_size": len(tokenizer)}, num_labels=1)
    torch.manual_seed(100)
    model: Any = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _text(draw: random.Random, minimum: int, maximum: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(minimum, maximum)))


def _chat(topic: int) -> list[dict[str, str]]:
    """A prompt, the same one for the same topic."""
    of_topic = random.Random(topic)
    turns = [{"role": "user", "content": f"{_text(of_topic, 6, 16)} {topic}?"}]
    if topic % 3 == 1:
        answer = {"role": "assistant", "content": _text(of_topic, 2, 5)}
        turns = [*turns, answer, {"role": "user", "content": _text(of_topic, 2, 5)}]
    return turns


def _thumb(draw: random.Random, i: int) -> dict[str, Any]:
    """Three completions of each prompt, in separate rows."""
    return {
        "prompt": _chat(i // 3),
        "completion": _text(draw, 1, 12),
        "label": draw.random() < 0.6,
        "weight": draw.choice([0.5, 1.0, 2.0]),
    }


def _pair(draw: random.Random, i: int) -> dict[str, Any]:
    return {
        "prompt": _chat(i // 2),
        "chosen": _text(draw, 2, 12),
        "rejected": _text(draw, 1, 8) + " no",
    }


def _soft_pair(draw: random.Random, i: int) -> dict[str, Any]:
    soft = {"soft": draw.choice([0.6, 0.8, 0.9])} if i % 2 else {}
    return _pair(draw, i) | {"margin": draw.choice([0.0, 0.5, 1.0]), **soft}


def _margin_pair(draw: random.Random, i: int) -> dict[str, Any]:
    return _pair(draw, i) | {"margin": draw.choice([0.0, 0.5, 1.0])}


def _conversation(draw: random.Random, i: int) -> dict[str, Any]:
    answer = {"role": "assistant", "content": _text(draw, 2, 12)}
    return {"messages": [*_chat(i), answer], "weight": draw.choice([1.0, 3.0])}


def _demonstration(draw: random.Random, i: int) -> dict[str, Any]:
    return {"prompt": _text(draw, 2, 12) + "? ", "completion": _text(draw, 2, 12)}


def _group(draw: random.Random, i: int) -> dict[str, Any]:
    count = draw.randint(2, 5)
    return {
        "prompt": _chat(i),
        "completions": [f"{_text(draw, 1, 10)} {n}" for n in range(count)],
        "scores": [round(draw.uniform(-1, 1), 3) for _ in range(count)],
    }


def _stars(draw: random.Random, i: int) -> dict[str, Any]:
    completion, score = _text(draw, 1, 12), draw.randint(1, 5)
    return {"prompt": _chat(i // 2), "completion": completion, "score": score}


def _prompt(draw: random.Random, i: int) -> dict[str, Any]:
    return {"prompt": _chat(i), "length": 15 * (i % 3)}


ROWS = {
    "thumbs": _thumb,
    "pairs": _pair,
    "soft_pairs": _soft_pair,
    "margin_pairs": _margin_pair,
    "conversations": _conversation,
    "demonstrations": _demonstration,
    "groups": _group,
    "stars": _stars,
    "prompts": _prompt,
}
"""Kind of rows -> a function that makes row i."""
