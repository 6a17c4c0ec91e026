"""Signs that an online run has collapsed or has nothing left to learn, from records of its log.

The training loop shows a sign in the terminal when it occurs, and the report reads the same log
again, so both find the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from valence.reports.formatting import number
from valence.reports.stats import finite

THRESHOLDS: dict[str, float] = {
    # Nats per completion, and per token: both must be reached. At 10 nats the reference samples
    # such a completion once in 22,000 times. That alone is normal for long completions (500 tokens
    # at
    # 0.02), and a high value per token alone is normal for short ones (a single token that became
    # certain). 1 nat per token is about the entropy of text under a language model at temperature
    # 1: the reference then hardly has a say in the next token.
    "kl": 10.0,
    "kl/token": 1.0,
    # A divergence is shown again when it is so many times what was shown last.
    "kl/again": 4.0,
    # Share of groups whose rewards are all equal: nearly all. With 8 prompts per round it is all.
    "tied": 0.9,
    # How close the mean reward is to the highest reward of the run, as a share of the range of
    # rewards so far. Below it some completions are still worse than others.
    "saturated": 0.02,
    # Distinct 4-grams of tokens among all of a completion (1 - seq-rep-4 of Welleck et al. 2019,
    # arXiv 1908.04319). Text written by people has nearly 1, lists and code less. At a half every
    # second 4-gram was said before, which happens only in loops.
    "distinct_4grams": 0.5,
    # Share of completions that equal another one of their round, where completions have on average
    # at least so many tokens. Short answers ("yes") repeat in healthy runs.
    "duplicates": 0.5,
    "duplicates/length": 8.0,
    # Rounds in a row: a single round may be an accident, and the estimate of the divergence (k3)
    # has rare, very large outliers.
    "rounds": 3,
    # Optimizer steps in a row without a gradient. With hard prompts a few tied rounds are normal.
    "zero_gradient_steps": 5,
}
"""From where on something is shown. Signs are questions to look at, not verdicts."""


@dataclass(frozen=True)
class Sign:
    """name: for programs. said: the observation with its numbers. do: what to try or to look at.
    is_urgent: the run has collapsed or learns nothing, so it is shown above everything else."""

    name: str
    said: str
    do: str
    is_urgent: bool = False


class OnlineWatch:
    """Finds signs in the records of an online run, one after the other. Its state is plain data, so
    that a resumed run finds what an undisturbed one does."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.in_a_row: dict[str, int] = {}
        """By sign: rounds in a row that show it."""
        self.shown: dict[str, float] = {}
        """By sign: the value at which it was shown last."""
        self.rewards: list[float] = []
        """The lowest and the highest reward so far, once there is one."""
        self.last_gradient = 0
        """The last step that had a gradient."""

    def see(self, record: Mapping[str, Any]) -> list[Sign]:
        """The signs that this record shows for the first time."""
        signs = list(self._of_round(record)) if "rollout/length" in record else []
        return [*signs, *self._zero_gradient(record)]

    def _of_round(self, record: Mapping[str, Any]) -> Iterator[Sign]:
        yield from self._high_kl(record)
        yield from self._saturated(record)
        yield from self._repetitive(record)

    def _lasts(self, name: str, shows: bool) -> bool:
        """Whether a round shows a sign, as several before it did, and it is still to be shown."""
        self.in_a_row[name] = self.in_a_row.get(name, 0) + 1 if shows else 0
        lasts = self.in_a_row[name] >= THRESHOLDS["rounds"]
        if not shows and name != "high kl":
            self.shown.pop(name, None)
        return lasts and name not in self.shown

    def _high_kl(self, record: Mapping[str, Any]) -> Iterator[Sign]:
        kl, length = record.get(name_of_kl(record)), record["rollout/length"]
        if not finite(kl) or not finite(length) or length <= 0:
            return
        is_high = kl >= THRESHOLDS["kl"] and kl / length >= THRESHOLDS["kl/token"]
        lasts = self._lasts("high kl", is_high)
        before = self.shown.get("high kl")
        grows = is_high and before is not None and kl >= THRESHOLDS["kl/again"] * before
        if lasts or grows:
            self.shown["high kl"] = kl
            yield Sign(
                "high kl",
                f"The policy is far from the reference: {number(kl)} nats per completion, "
                f"{number(kl / length)} per token.",
                "Read the completions: is the text still sound? Raise loss.kl_weight (or "
                "loss.kl_beta), "
                "lower train.learning_rate, or take an earlier checkpoint.",
                is_urgent=True,
            )

    def _saturated(self, record: Mapping[str, Any]) -> Iterator[Sign]:
        mean, tied = record.get("reward/mean"), record.get("rollout/tied")
        top, bottom = record.get("reward/max"), record.get("reward/min")
        if not (finite(mean) and finite(tied) and finite(top) and finite(bottom)):
            return
        lowest, highest = self.rewards = [min([bottom, *self.rewards]), max([top, *self.rewards])]
        slack = THRESHOLDS["saturated"] * (highest - lowest)
        shows = tied >= THRESHOLDS["tied"] and mean >= highest - slack
        if self._lasts("saturated reward", shows):
            self.shown["saturated reward"] = mean
            yield Sign(
                "saturated reward",
                f"Nearly every completion has the highest reward of the run: the mean is "
                f"{number(mean)}, "
                f"and {tied:.0%} of the groups are all alike.",
                "Read the completions: a policy that exploits the reward looks the same as one "
                "that "
                "has learned the task. Stop, or use harder prompts or a reward with finer steps.",
                is_urgent=True,
            )

    def _repetitive(self, record: Mapping[str, Any]) -> Iterator[Sign]:
        distinct, equal = record.get("rollout/distinct_4grams"), record.get("rollout/duplicates")
        loops = finite(distinct) and distinct <= THRESHOLDS["distinct_4grams"]
        repeated = 1 - distinct if finite(distinct) else 0.0
        long_enough = record["rollout/length"] >= THRESHOLDS["duplicates/length"]
        copies = finite(equal) and long_enough and equal >= THRESHOLDS["duplicates"]
        if not self._lasts("repetitive", loops or copies):
            return
        self.shown["repetitive"] = 1.0
        seen = (
            [f"{repeated:.0%} of the 4-grams of a completion repeat an earlier one"]
            if loops
            else []
        )
        seen += (
            [f"{equal:.0%} of the completions of a round are equal to another one"]
            if copies
            else []
        )
        yield Sign(
            "repetitive",
            f"Completions are repetitive: {', and '.join(seen)}.",
            "Read the completions. Raise loss.kl_weight (or loss.kl_beta) or "
            "rollout.temperature, lower "
            "train.learning_rate, or give repetition a lower reward (docs/rewards.md).",
            is_urgent=True,
        )

    def _zero_gradient(self, record: Mapping[str, Any]) -> Iterator[Sign]:
        norm, step = record.get("grad_norm"), record["step"]
        if not finite(norm):
            return
        if norm > 0:
            self.last_gradient = step
            self.shown.pop("no gradient", None)
        elif step - self.last_gradient >= THRESHOLDS["zero_gradient_steps"] and (
            "no gradient" not in self.shown
        ):
            self.shown["no gradient"] = step
            yield Sign(
                "no gradient",
                f"No step since step {self.last_gradient} had a gradient: the completions of "
                f"every group have the same reward.",
                "Look at the reward and the prompts. Sample more (rollout.num_rollouts) or at a "
                "higher "
                "rollout.temperature, or use dapo. train.max_zero_gradient_steps ends such a run.",
                is_urgent=True,
            )

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        for name, value in state.items():
            setattr(self, name, copy.deepcopy(value))


def name_of_kl(record: Mapping[str, Any]) -> str:
    """What the divergence from the reference is called in a record. Methods like kto log their
    reference point as `kl`."""
    return "rollout/kl" if {"rollout/kl", "kl/raw"} & record.keys() else "kl"


def is_online(record: Mapping[str, Any]) -> bool:
    return "rollout/length" in record or "reward/mean" in record


def online_signs(records: Iterable[Mapping[str, Any]]) -> list[Sign]:
    """All signs of a log, each as it was shown last."""
    records = list(records)
    if not any(map(is_online, records)):
        return []
    watch, signs = OnlineWatch(), dict[str, Sign]()
    for record in records:
        signs |= {sign.name: sign for sign in watch.see(record)}
    return list(signs.values())
