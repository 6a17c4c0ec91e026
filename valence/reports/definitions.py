"""One line for each metric of an evaluation, most important first. docs/metrics.md has all metrics
with their formulas.
"""

from __future__ import annotations

from collections.abc import Iterable

DEFINITIONS: dict[str, str] = {
    "reward/mean": "Mean reward of the model's own completions. Higher is better.",
    "rewards/auc": "Probability that a thumbs up has a larger reward than a thumbs down. 0.5 is "
    "chance, 1 is perfect.",
    "rewards/accuracies": "Share of pairs whose chosen answer has the larger reward. 0.5 is "
    "chance.",
    "rewards/spearman": "Rank correlation of rewards and the scores of the data. 0 is chance, 1 "
    "is perfect.",
    "loss": "The method's loss. Lower is better. It may rise although answers improve.",
    "rewards/margins": "Mean reward of chosen answers minus that of rejected ones.",
    "rewards/chosen": "Mean reward of thumbs up or of the chosen answers of pairs.",
    "rewards/rejected": "Mean reward of thumbs down or of the rejected answers of pairs.",
    "logps/chosen": "Mean log-probability of chosen answers, in nats per answer. Closer to 0 is "
    "likelier.",
    "logps/rejected": "Mean log-probability of rejected answers, in nats per answer.",
    "logps/token": "Mean log-probability per token, in nats. Closer to 0 is likelier.",
    "signal/mean": "How much likelier the teacher finds a token than the model does, in nats. "
    "Below 0 where feedback complains.",
    "signal/size": "Mean size of this signal, in nats per token.",
    "signal/clipped": "Share of tokens whose signal is clipped. Should be near 0.",
    "logratio/chosen": "How much likelier chosen answers have become since the start, in nats "
    "per answer.",
    "logratio/rejected": "How much likelier rejected answers have become since the start, in "
    "nats per answer.",
    "logratio/token": "How much likelier tokens have become, in nats per token.",
    "kl": "Distance of the policy from the reference, in nats per answer. For kto: its reference "
    "point, often 0.",
    "kl/raw": "For kto: the reference point before it is clamped at 0.",
    "kl/reference": "Distance of the policy from the reference, in nats per token.",
    "entropy": "Uncertainty about the next token, in nats. Near 0 the policy has become "
    "deterministic.",
    "probs/token": "Mean probability of a token.",
    "rewards/brier": "Mean squared error of the predicted probabilities. Lower is better.",
    "rewards/calibration_error": "How far predicted probabilities are from how often they come "
    "true. Lower is better.",
    "rewards/mean": "Mean score of a reward model.",
    "rewards/pearson": "Correlation of scores and targets. 1 is perfect.",
    "rewards/error": "Mean absolute error of the scores. Lower is better.",
    "reward/std": "Spread of the rewards.",
    "rollout/length": "Mean tokens per completion.",
    "rollout/truncated": "Share of completions that were cut off at the token limit. Lower is "
    "better.",
    "rollout/tied": "Share of prompts whose completions all have the same reward. They teach "
    "nothing.",
    "rollout/failed": "Share of completions without a score.",
    "rollout/turns": "Mean turns of the policy per completion.",
    "rollout/tool_calls": "Mean tool calls per completion.",
    "rollout/tool_errors": "Share of the tool calls that failed. Lower is better.",
    "rollout/max_turns": "Share of completions that ended with the last allowed turn.",
}


def by_importance(names: Iterable[str]) -> list[str]:
    """The names of metrics, those that matter most first; unknown ones last, in their order."""
    places = {name: place for place, name in enumerate(DEFINITIONS)}
    return sorted(names, key=lambda name: places.get(name, len(places)))
