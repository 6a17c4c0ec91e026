"""What a policy does on held-out prompts: rewards, length, KL divergence from the reference.

Both libraries import this module, so it needs only PyTorch and vaderSentiment.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

WORD, NUMBER = re.compile(r"[a-z']+"), re.compile(r"\d+")
MIN_COUNT = 5


@cache
def _vader() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def vader(text: str) -> float:
    """VADER's compound score, from -1 to 1."""
    return _vader().polarity_scores(text)["compound"]


Turns = Sequence[Mapping[str, str]]


def positive(completions: Sequence[Turns], **_: Any) -> list[float]:
    """A reward, as both libraries call it: how positively a completion is written."""
    return [vader(turns[-1]["content"]) for turns in completions]


def right_sum(prompts: Sequence[Turns], completions: Sequence[Turns], **_: Any) -> list[float]:
    """A reward: 1 if the last number of a completion is the sum of the numbers in its prompt."""
    rewards: list[float] = []
    for prompt, turns in zip(prompts, completions, strict=True):
        numbers = NUMBER.findall(turns[-1]["content"])
        total = sum(map(int, NUMBER.findall(prompt[-1]["content"])))
        rewards.append(float(bool(numbers) and numbers[-1] == str(total)))
    return rewards


def bare_number(completions: Sequence[Turns], **_: Any) -> list[float]:
    """Which completions are a number and nothing else."""
    return [float(NUMBER.fullmatch(turns[-1]["content"]) is not None) for turns in completions]


@dataclass(frozen=True)
class WordScore:
    """Tells good texts from bad ones, by naive Bayes over their words.

    prior, weights: log odds of a text and of its words.
    """

    prior: float
    weights: dict[str, float]

    @classmethod
    def fit(cls, texts: Iterable[tuple[str, bool]]) -> WordScore:
        counts, number = (Counter[str](), Counter[str]()), [0, 0]
        for text, is_good in texts:
            number[is_good] += 1
            counts[is_good].update(set(WORD.findall(text.lower())))
        words = [w for w in counts[0] | counts[1] if counts[0][w] + counts[1][w] >= MIN_COUNT]

        def share(word: str, is_good: bool) -> float:
            return (counts[is_good][word] + 1) / (number[is_good] + 2)

        weights = {word: math.log(share(word, True) / share(word, False)) for word in words}
        return cls(math.log(number[1] / number[0]), weights)

    def log_odds(self, text: str) -> float:
        words = set(WORD.findall(text.lower()))
        # exactly rounded, because the order of a set differs between processes
        return math.fsum([self.prior, *(self.weights.get(word, 0.0) for word in words)])

    def of(self, text: str) -> float:
        """The probability that a text is good."""
        return 1 / (1 + math.exp(-self.log_odds(text)))


@cache
def _films() -> WordScore:
    from examples.demo import assets

    return WordScore.fit(assets.film_reviews(25_000))


def favourable(prompts: Sequence[Turns], completions: Sequence[Turns], **_: Any) -> list[float]:
    """A reward: the probability that a completion is a favourable film review."""
    return [_films().of(turns[-1]["content"]) for turns in completions]


Score = Callable[..., list[float]]


SCORES: dict[str, tuple[Score, Score]] = {
    "positive": (positive, favourable),
    "films": (favourable, positive),
    "sums": (right_sum, bare_number),
}
"""Of each task: what methods train on, and a score that none of them trains on."""


@dataclass(frozen=True)
class Point:
    """A policy on the held-out prompts.

    reward, other: mean scores. kl: nats per completion. length: sampled tokens per completion.
    seconds, sampled: of training, and completions that were sampled for it, until here. step:
    optimizer steps.
    """

    step: int
    seconds: float
    reward: float
    other: float
    kl: float
    length: float
    text: str
    sampled: int = 0


@dataclass(frozen=True)
class HeldOut:
    """Held-out prompts, as messages and as token ids, and how completions are sampled.

    samples: completions of each prompt. The random numbers depend on the seed, the completion and
    the position alone, so that policies that agree sample the same text.
    """

    messages: list[Turns]
    prompts: list[list[int]]
    end: int
    max_new_tokens: int
    samples: int
    seed: int

    @classmethod
    def of(
        cls, tokenizer: Any, prompts: Sequence[Any], max_new_tokens: int, samples: int
    ) -> HeldOut:
        """Prompts as lists of messages."""
        ids = [
            tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
            for p in prompts
        ]
        return cls(list(prompts), ids, tokenizer.eos_token_id, max_new_tokens, samples, seed=1)

    def measure(
        self, policy: Any, reference: Any, tokenizer: Any, scores: tuple[Score, Score],
        *, step: int = 0, seconds: float = 0.0, sampled: int = 0,
    ) -> Point:  # fmt: skip
        """A policy after some steps and seconds of training, and some sampled completions."""
        texts, completions, kl = self.complete(policy, reference, tokenizer)
        rows = {
            "prompts": [turns for turns in self.messages for _ in range(self.samples)],
            "completions": [[{"role": "assistant", "content": text}] for text in texts],
        }
        reward, other = (fmean(score(**rows)) for score in scores)
        length = fmean(map(len, completions))
        return Point(step, seconds, reward, other, kl, length, texts[0], sampled)

    def complete(
        self, policy: Any, reference: Any, tokenizer: Any
    ) -> tuple[list[str], list[list[int]], float]:
        """Texts and tokens of the completions, and their KL divergence from the reference.

        policy, reference: causal language models of transformers. Without a reference, the
        divergence is 0.
        """
        was_training = policy.training
        policy.eval()
        prompts = [prompt for prompt in self.prompts for _ in range(self.samples)]
        completions, kl = self.sample(policy, reference, prompts)
        policy.train(was_training)
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
        return texts, completions, kl

    @torch.no_grad()
    def sample(
        self, policy: Any, reference: Any, prompts: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], float]:
        """A completion of each prompt at temperature 1, with the token that ends it, and their KL
        divergence from the reference (nats per completion; 0 without a reference).

        mean over completions of sum_t sum_v p_t(v) * (log p_t(v) - log q_t(v)): exact over the
        vocabulary at each sampled position.
        """
        generator = torch.Generator().manual_seed(self.seed)
        draws = torch.rand(
            len(prompts), self.max_new_tokens, generator=generator, dtype=torch.float64
        )
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self.end)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        completions: list[list[int]] = [[] for _ in prompts]
        models = [policy] if reference is None else [policy, reference]
        caches: list[Any] = [None for _ in models]
        positions, total = (mask.cumsum(1) - 1).clamp(min=0), 0.0
        for i in range(self.max_new_tokens):
            logits: list[Tensor] = []
            for k, model in enumerate(models):
                out = model(
                    input_ids=ids, attention_mask=mask, position_ids=positions,
                    past_key_values=caches[k], use_cache=True, logits_to_keep=1,
                )  # fmt: skip
                caches[k] = out.past_key_values
                logits.append(out.logits[:, -1])
            p, q = (logits[k].float().log_softmax(-1) for k in (0, -1))
            is_open = [not completion or completion[-1] != self.end for completion in completions]
            total += (p.exp() * (p - q)).sum(-1)[is_open].sum().item()
            cumulative = logits[0].double().softmax(-1).cumsum(-1)
            ids = torch.searchsorted(cumulative, draws[:, i : i + 1] * cumulative[:, -1:])
            ids = ids.clamp(max=cumulative.shape[1] - 1)
            for row, token in enumerate(ids[:, 0].tolist()):
                if is_open[row]:
                    completions[row].append(token)
            if all(completion[-1] == self.end for completion in completions):
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            positions = positions[:, -1:] + 1
        return completions, total / len(prompts)


@torch.no_grad()
def answer_logps(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[float]:
    """The log-probability of each answer to its prompt."""
    logps: list[float] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        logits = model(input_ids=ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
        logp = logits.float().log_softmax(-1)
        logps.append(logp.gather(1, torch.tensor(answer)[:, None]).sum().item())
    return logps
