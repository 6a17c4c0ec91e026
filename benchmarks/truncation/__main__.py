"""python -m benchmarks.truncation [--seeds N] [--rounds N] [--gae-lambda L]: PPO on a constant
reward.

A constant reward contains no information: value estimates should converge to it, and the share of
completions that are truncated at `rollout.max_new_tokens` should not change much. The benchmark
compares two rules for the value after the last token of a truncated completion, on a random model
of 27 tokens that truncates about half of its completions:

- `zero`: no value. The reward is for the whole completion and is added at its last token. Valence
  uses this rule.
- `bootstrap`: the value estimate before the last token, as for an unfinished episode. The outcome
  reward then counts twice: the target of the value at the last token is R + V, which has no
  fixed point.

With a lambda below 1, errors of the value estimates count most at the last token, and whitening
scales them up to full-size advantages. The share of truncated completions then changes although
there is nothing to learn. With 1, the default of this benchmark, all tokens count equally.

Exit status: 0 if with `zero` the value estimates end within 0.5 of the reward and truncation did
not rise by more than 0.25, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import wraps
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

import valence
from valence.losses import LOSSES
from valence.losses.advantage import gae
from valence.methods import ONLINE, Method
from valence.methods.sample_builders import AdvantageBuilder
from valence.types import Completion

REWARD, MAX_NEW_TOKENS = 1.0, 16
LETTERS = ascii_lowercase[:23]
MAX_ERROR, MAX_RISE = 0.5, 0.25


def constant(completions: Sequence[Completion], **_: Any) -> list[float]:
    """The same reward for every completion."""
    return [REWARD] * len(completions)


@wraps(gae)
def bootstrap(
    reward_t: Tensor, owner: Tensor, old_t: Tensor, ref_t: Tensor, value_t: Tensor, **settings: Any
) -> Any:
    """``gae`` with the value before the last token behind completions that have MAX_NEW_TOKENS
    tokens.
    """
    lengths = owner.bincount()
    last = lengths.cumsum(0)[lengths == MAX_NEW_TOKENS] - 1
    following = settings["gamma"] * value_t[last]
    return gae(reward_t.index_add(0, last, following), owner, old_t, ref_t, value_t, **settings)


RULES = {"bootstrap": bootstrap, "zero": gae}


def make_model(folder: Path) -> None:
    """A random model of two layers, and a tokenizer of one token per letter."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(("<pad>", "<s>", "</s>", "<unk>", *LETTERS))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def recipe(folder: Path, rule: str, seed: int, rounds: int, gae_lambda: float) -> dict[str, Any]:
    return {
        "method": "ppo", "model": {"name": str(folder / "model")},
        "data": {"train": str(folder / "prompts.jsonl")},
        "reward": "benchmarks.truncation.__main__:constant",
        "loss": {"kl_beta": 0.0, "gae_lambda": gae_lambda},
        "rollout": {"num_rollouts": 8, "max_new_tokens": MAX_NEW_TOKENS, "epochs": 2},
        "train": {
            "batch_size": 8, "epochs": 1000.0, "max_steps": 2 * rounds, "schedule": "constant",
            "warmup": 0.0, "learning_rate": 1e-3, "seed": seed,
        },
        "run": {"dir": str(folder / f"{rule}-{seed}"), "save_every": 10_000},
    }  # fmt: skip


def run(settings: dict[str, Any], rule: str) -> list[dict[str, float]]:
    """The log of a run, one row for each round."""
    method = Method("ppo", LOSSES["ppo"], AdvantageBuilder(RULES[rule]), {"value": True})
    with patch.dict(ONLINE, {"ppo": method}):
        valence.train(settings, quiet=True)
    log = (Path(settings["run"]["dir"]) / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in log.splitlines()]
    return [row for row in rows if "rollout/truncated" in row and "value/mean" in row]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truncation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--gae-lambda", type=float, default=1.0)
    parsed = parser.parse_args(arguments)
    disable_progress_bar()
    holds = True
    print(f"{'rule':<11}{'seed':>5}{'round':>7}{'value/mean':>12}{'truncated':>11}{'length':>8}")
    with TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder / "model")
        prompts = [json.dumps({"prompt": 3 * letter}) + "\n" for letter in LETTERS[:16]]
        (folder / "prompts.jsonl").write_text("".join(prompts), encoding="utf-8")
        for rule, seed in product(RULES, range(parsed.seeds)):
            rows = run(recipe(folder, rule, seed, parsed.rounds, parsed.gae_lambda), rule)
            for i in sorted({0, *range(9, len(rows), 10), len(rows) - 1}):
                value, truncated, length = (
                    rows[i][name] for name in ("value/mean", "rollout/truncated", "rollout/length")
                )
                line = (
                    f"{rule:<11}{seed:>5}{i + 1:>7}{value:>12.2f}{truncated:>11.2f}{length:>8.1f}"
                )
                print(line, flush=True)
            if rule == "zero":
                rise = rows[-1]["rollout/truncated"] - rows[0]["rollout/truncated"]
                holds &= abs(rows[-1]["value/mean"] - REWARD) <= MAX_ERROR and rise <= MAX_RISE
    print("held" if holds else "short")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
