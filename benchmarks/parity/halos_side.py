"""One step of each case by HALOs' formulas, from the papers: log-softmax, one sequence at a time,
without the losses of Valence.

KTO: arXiv 2402.01306. DPO: 2305.18290. IPO: 2310.12036. SimPO: 2405.14734. SLiC: 2305.10425. PPO:
1707.06347. GRPO: 2402.03300. Clamped log-ratios (humanline): 2509.24207. The settings have the
names of the papers.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, sigmoid

from valence.types import TokenizedExample

Settings = Mapping[str, Any]
Noted = Mapping[str, float]
Terms = Iterator[tuple[Tensor, Noted]]
"""Parts that add up to the step's loss, and what was seen on the way, to be averaged."""

BETA = 0.1


def token_logps(model: nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Log-probability of each token of an answer [T] (nats)."""
    logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    logps = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
    return logps[torch.arange(len(answer)), torch.tensor(answer)]


@dataclass(frozen=True)
class Answer:
    """Log-probabilities of an answer's tokens [T] under policy and reference (nats)."""

    logp: Tensor
    ref: Tensor

    def ratios(self, s: Settings) -> Tensor:
        """Log-ratios of the tokens [T], clamped between log_epsilon_P and log_epsilon_R where these
        are set.
        """
        d = self.logp - self.ref
        return d.clamp(s["log_epsilon_P"], s["log_epsilon_R"]) if "log_epsilon_P" in s else d

    def reward(self, s: Settings) -> Tensor:
        return self.ratios(s).sum()


Paired = Callable[[Answer, Answer, Settings], tuple[Tensor, Tensor, Tensor]]


def dpo(w: Answer, l: Answer, s: Settings) -> tuple[Tensor, Tensor, Tensor]:
    chosen, rejected = BETA * w.reward(s), BETA * l.reward(s)
    return -logsigmoid(chosen - rejected), chosen, rejected


def cdpo(w: Answer, l: Answer, s: Settings) -> tuple[Tensor, Tensor, Tensor]:
    right, chosen, rejected = dpo(w, l, s)
    return (
        (1 - s["epsilon"]) * right - s["epsilon"] * logsigmoid(rejected - chosen),
        chosen,
        rejected,
    )


def ipo(w: Answer, l: Answer, s: Settings) -> tuple[Tensor, Tensor, Tensor]:
    chosen, rejected = w.ratios(s).mean(), l.ratios(s).mean()
    return (chosen - rejected - 1 / (2 * s["tau"])) ** 2, chosen, rejected


def simpo(w: Answer, l: Answer, s: Settings) -> tuple[Tensor, Tensor, Tensor]:
    chosen, rejected = w.logp.mean(), l.logp.mean()
    return -logsigmoid(s["beta"] * (chosen - rejected - s["gamma_beta_ratio"])), chosen, rejected


def slic(w: Answer, l: Answer, s: Settings) -> tuple[Tensor, Tensor, Tensor]:
    chosen, rejected = w.logp.sum(), l.logp.sum()
    return (
        (s["beta"] - chosen + rejected).clamp(min=0) - s["lambda_coef"] * chosen,
        chosen,
        rejected,
    )


PAIRED: dict[str, Paired] = {"dpo": dpo, "cdpo": cdpo, "ipo": ipo, "simpo": simpo, "slic": slic}


def clipped(logratios: Tensor, advantage: float, s: Settings) -> Tensor:
    """The surrogate of PPO for each token [T], less beta times the divergence from the reference
    (k3) where beta is set.
    """
    ratio = logratios.exp()
    gain = torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
    return s.get("beta", 0.0) * ((-logratios).exp() + logratios - 1) - gain


@dataclass(frozen=True)
class Side:
    """Two models and a case's settings."""

    policy: nn.Module
    reference: nn.Module
    settings: Settings
    max_length: int

    def answer(self, prompt: Sequence[int], ids: Sequence[int]) -> Answer:
        with torch.no_grad():
            ref = token_logps(self.reference, prompt, ids)
        return Answer(token_logps(self.policy, prompt, ids), ref)

    def pairs(self, rows: Sequence[TokenizedExample], batch: int) -> Terms:
        for row in rows:
            w, l = (self.answer(row.prompt_ids, answer.ids) for answer in row.answers)
            loss, chosen, rejected = PAIRED[self.settings["formula"]](w, l, self.settings)
            up, down = chosen.item(), rejected.item()
            rewards = {"rewards/chosen": up, "rewards/rejected": down, "rewards/margins": up - down}
            yield loss / len(rows), rewards | {"rewards/accuracies": float(up > down)}

    def kto(self, rows: Sequence[TokenizedExample], batch: int) -> Terms:
        """One reference point for each micro-batch, of the log-ratios of the next row's answer
        behind each prompt.
        """
        for start in range(0, len(rows), batch):
            part = rows[start : start + batch]
            z0 = max(0.0, statistics.fmean(self._mismatched(part)))
            for row in part:
                reward = self.answer(row.prompt_ids, row.answers[0].ids).reward(self.settings)
                sign, name = (1, "desirable_weight") if row.label else (-1, "undesirable_weight")
                loss = self.settings.get(name, 1.0) * (1 - sigmoid(sign * BETA * (reward - z0)))
                yield (
                    loss / len(rows),
                    {"kl": z0, f"rewards/{'chosen' if row.label else 'rejected'}": reward.item()},
                )

    @torch.no_grad()
    def _mismatched(self, part: Sequence[TokenizedExample]) -> list[float]:
        """Log-ratios of the next row's answer, cut to what fits, behind each prompt of a
        micro-batch.
        """
        log_ratios: list[float] = []
        for row, other in zip(part, [*part[1:], part[0]], strict=True):
            ids = other.answers[0].ids[: max(1, self.max_length - len(row.prompt_ids))]
            log_ratios.append(self.answer(row.prompt_ids, ids).reward(self.settings).item())
        return log_ratios

    def grpo(self, rows: Sequence[TokenizedExample], batch: int) -> Terms:
        """Scores standardised among the answers of a prompt; mean over an answer's tokens, then
        over answers.
        """
        count = sum(len(row.answers) for row in rows)
        for row in rows:
            middle, is_population = (
                statistics.fmean(row.scores),
                self.settings.get("spread") == "population",
            )
            spread = (
                statistics.pstdev(row.scores)
                if is_population
                else statistics.stdev(row.scores) + 1e-4
            )
            for answer, score in zip(row.answers, row.scores, strict=True):
                ratios = self.answer(row.prompt_ids, answer.ids).ratios(self.settings)
                yield clipped(ratios, (score - middle) / spread, self.settings).mean() / count, {}

    def ppo(self, rows: Sequence[TokenizedExample], batch: int) -> Terms:
        """Scores standardised over the step (each once, or once for each of its tokens); mean over
        tokens.
        """
        by_token = self.settings.get("standardised") == "tokens"
        answers = [
            (row.prompt_ids, answer.ids, score)
            for row in rows
            for answer, score in zip(row.answers, row.scores, strict=True)
        ]
        scores = [score for _, ids, score in answers for _ in range(len(ids) if by_token else 1)]
        middle = statistics.fmean(scores)
        spread = (
            (statistics.pvariance(scores) + 1e-8) ** 0.5
            if by_token
            else statistics.pstdev(scores) + 1e-4
        )
        count = sum(len(ids) for _, ids, _ in answers)
        for prompt, ids, score in answers:
            ratios = self.answer(prompt, ids).ratios(self.settings)
            yield clipped(ratios, (score - middle) / spread, self.settings).sum() / count, {}

    def sft(self, rows: Sequence[TokenizedExample], batch: int) -> Terms:
        count = sum(len(row.answers[0].ids) for row in rows)
        for row in rows:
            yield -token_logps(self.policy, row.prompt_ids, row.answers[0].ids).sum() / count, {}


TERMS: dict[str, Callable[[Side, Sequence[TokenizedExample], int], Terms]] = {
    **dict.fromkeys(PAIRED, Side.pairs),
    "kto": Side.kto,
    "grpo": Side.grpo,
    "ppo": Side.ppo,
    "sft": Side.sft,
}


def halos(side: Side, rows: Sequence[TokenizedExample], batch: int) -> dict[str, float]:
    """The loss of a step over micro-batches of ``batch`` rows, its gradient left in the policy, and
    what else was seen.
    """
    side.policy.zero_grad()
    loss, noted_values = 0.0, defaultdict[str, list[float]](list)
    for part, noted in TERMS[side.settings["formula"]](side, rows, batch):
        part.backward()
        loss += part.item()
        for name, value in noted.items():
            noted_values[name].append(value)
    return {"loss": loss} | {
        name: statistics.fmean(values) for name, values in noted_values.items()
    }
