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
Metrics = Mapping[str, float]
Terms = Iterator[tuple[Tensor, Metrics]]
"""Summands of the loss of a step, each with metrics to average over the summands."""

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
        """Sum of the log-ratios of the tokens."""
        return self.ratios(s).sum()


Paired = Callable[[Answer, Answer, Settings], tuple[Tensor, Tensor, Tensor]]
"""Loss of a pair, and the rewards of its chosen and rejected answers."""


def dpo(w: Answer, l: Answer, s: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """-log sigmoid(beta * (reward_w - reward_l))."""
    chosen, rejected = BETA * w.reward(s), BETA * l.reward(s)
    return -logsigmoid(chosen - rejected), chosen, rejected


def cdpo(w: Answer, l: Answer, s: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """DPO where labels are wrong with probability epsilon."""
    right, chosen, rejected = dpo(w, l, s)
    return (
        (1 - s["epsilon"]) * right - s["epsilon"] * logsigmoid(rejected - chosen),
        chosen,
        rejected,
    )


def ipo(w: Answer, l: Answer, s: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """(d - 1 / (2 tau))^2, with the difference d of the mean log-ratios."""
    chosen, rejected = w.ratios(s).mean(), l.ratios(s).mean()
    return (chosen - rejected - 1 / (2 * s["tau"])) ** 2, chosen, rejected


def simpo(w: Answer, l: Answer, s: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """-log sigmoid(beta * (d - gamma_beta_ratio)), with the difference d of the mean log-probs."""
    chosen, rejected = w.logp.mean(), l.logp.mean()
    return -logsigmoid(s["beta"] * (chosen - rejected - s["gamma_beta_ratio"])), chosen, rejected


def slic(w: Answer, l: Answer, s: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """max(0, beta - logp_w + logp_l) - lambda_coef * logp_w."""
    chosen, rejected = w.logp.sum(), l.logp.sum()
    return (
        (s["beta"] - chosen + rejected).clamp(min=0) - s["lambda_coef"] * chosen,
        chosen,
        rejected,
    )


PAIRED: dict[str, Paired] = {"dpo": dpo, "cdpo": cdpo, "ipo": ipo, "simpo": simpo, "slic": slic}


def ppo_loss(logratios: Tensor, advantage: float, s: Settings) -> Tensor:
    """Loss of each token [T]: PPO's clipped surrogate, negated, plus beta times the KL divergence
    from the reference (k3 estimator).
    """
    ratio = logratios.exp()
    surrogate = torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
    return s.get("beta", 0.0) * ((-logratios).exp() + logratios - 1) - surrogate


@dataclass(frozen=True)
class HalosStep:
    """The formulas, for two models and the settings of a case."""

    policy: nn.Module
    reference: nn.Module
    settings: Settings
    max_length: int

    def answer(self, prompt: Sequence[int], ids: Sequence[int]) -> Answer:
        """Log-probabilities of an answer under both models."""
        with torch.no_grad():
            ref = token_logps(self.reference, prompt, ids)
        return Answer(token_logps(self.policy, prompt, ids), ref)

    def pairs(self, rows: Sequence[TokenizedExample], batch: int) -> Terms:
        """A loss of PAIRED, averaged over pairs."""
        for row in rows:
            w, l = (self.answer(row.prompt_ids, answer.ids) for answer in row.answers)
            loss, chosen, rejected = PAIRED[self.settings["formula"]](w, l, self.settings)
            up, down = chosen.item(), rejected.item()
            rewards = {"rewards/chosen": up, "rewards/rejected": down, "rewards/margins": up - down}
            yield loss / len(rows), rewards | {"rewards/accuracies": float(up > down)}

    def kto(self, rows: Sequence[TokenizedExample], batch: int) -> Terms:
        """KTO with one z0 per micro-batch: the mean log-ratio of mismatched completions."""
        for start in range(0, len(rows), batch):
            micro_batch = rows[start : start + batch]
            z0 = max(0.0, statistics.fmean(self._mismatched(micro_batch)))
            for row in micro_batch:
                reward = self.answer(row.prompt_ids, row.answers[0].ids).reward(self.settings)
                sign, name = (1, "desirable_weight") if row.label else (-1, "undesirable_weight")
                loss = self.settings.get(name, 1.0) * (1 - sigmoid(sign * BETA * (reward - z0)))
                yield (
                    loss / len(rows),
                    {"kl": z0, f"rewards/{'chosen' if row.label else 'rejected'}": reward.item()},
                )

    @torch.no_grad()
    def _mismatched(self, micro_batch: Sequence[TokenizedExample]) -> list[float]:
        """Log-ratio of each prompt of a micro-batch with the next row's answer, which is truncated
        to ``max_length``.
        """
        log_ratios: list[float] = []
        for row, other in zip(micro_batch, [*micro_batch[1:], micro_batch[0]], strict=True):
            ids = other.answers[0].ids[: max(1, self.max_length - len(row.prompt_ids))]
            log_ratios.append(self.answer(row.prompt_ids, ids).reward(self.settings).item())
        return log_ratios

    def grpo(self, rows: Sequence[TokenizedExample], batch: int) -> Terms:
        """GRPO: advantages are scores, standardized over the answers of a prompt. The loss is a
        mean over the tokens of an answer, then over answers.
        """
        count = sum(len(row.answers) for row in rows)
        for row in rows:
            mean, is_population = (
                statistics.fmean(row.scores),
                self.settings.get("spread") == "population",
            )
            deviation = (
                statistics.pstdev(row.scores)
                if is_population
                else statistics.stdev(row.scores) + 1e-4
            )
            for answer, score in zip(row.answers, row.scores, strict=True):
                ratios = self.answer(row.prompt_ids, answer.ids).ratios(self.settings)
                yield ppo_loss(ratios, (score - mean) / deviation, self.settings).mean() / count, {}

    def ppo(self, rows: Sequence[TokenizedExample], batch: int) -> Terms:
        """PPO without a value function: advantages are scores, standardized over the answers (or
        tokens) of the step. The loss is a mean over tokens.
        """
        by_token = self.settings.get("standardised") == "tokens"
        answers = [
            (row.prompt_ids, answer.ids, score)
            for row in rows
            for answer, score in zip(row.answers, row.scores, strict=True)
        ]
        scores = [score for _, ids, score in answers for _ in range(len(ids) if by_token else 1)]
        mean = statistics.fmean(scores)
        deviation = (
            (statistics.pvariance(scores) + 1e-8) ** 0.5
            if by_token
            else statistics.pstdev(scores) + 1e-4
        )
        count = sum(len(ids) for _, ids, _ in answers)
        for prompt, ids, score in answers:
            ratios = self.answer(prompt, ids).ratios(self.settings)
            yield ppo_loss(ratios, (score - mean) / deviation, self.settings).sum() / count, {}

    def sft(self, rows: Sequence[TokenizedExample], batch: int) -> Terms:
        """Negative log-likelihood, averaged over tokens."""
        count = sum(len(row.answers[0].ids) for row in rows)
        for row in rows:
            yield -token_logps(self.policy, row.prompt_ids, row.answers[0].ids).sum() / count, {}


TERMS: dict[str, Callable[[HalosStep, Sequence[TokenizedExample], int], Terms]] = {
    **dict.fromkeys(PAIRED, HalosStep.pairs),
    "kto": HalosStep.kto,
    "grpo": HalosStep.grpo,
    "ppo": HalosStep.ppo,
    "sft": HalosStep.sft,
}


def halos(step: HalosStep, rows: Sequence[TokenizedExample], batch: int) -> dict[str, float]:
    """Loss and metrics of a step with micro-batches of ``batch`` rows. The gradient stays in the
    policy.
    """
    step.policy.zero_grad()
    loss, values_by_name = 0.0, defaultdict[str, list[float]](list)
    for term, metrics in TERMS[step.settings["formula"]](step, rows, batch):
        term.backward()
        loss += term.item()
        for name, value in metrics.items():
            values_by_name[name].append(value)
    return {"loss": loss} | {
        name: statistics.fmean(values) for name, values in values_by_name.items()
    }
