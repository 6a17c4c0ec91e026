"""What the answers of a round become: demonstrations, pairs, thumbs, or tokens with their
advantage.

A maker takes the prompts of a round with their answers and rewards. Its keyword-only parameters are
settings of the methods that use it, in the recipe's ``loss`` section.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from valence.types import Completion, TokenizedCompletion, TokenizedExample, content_id

if TYPE_CHECKING:
    from torch import Tensor

Rewards = tuple[float, ...]
Columns = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class RolloutGroup:
    """A prompt with those of its answers that have a reward, in the order in which they were
    sampled. ``rewards``: as the reward gave them, less what an answer lost by its length.
    ``columns``: of each answer, what was measured of its tokens: `old`, `ref`, `value`, as far as
    the method reads them.
    """

    prompt: TokenizedExample
    answers: tuple[Completion, ...]
    rewards: Rewards
    columns: tuple[Columns, ...] = ()

    @property
    def tied(self) -> bool:
        """Whether its answers teach nothing by comparison."""
        return len(set(self.rewards)) < 2

    def unit(
        self,
        kind: Literal["demonstration", "judgement", "preference", "scored"],
        *which: int,
        columns: Columns | None = None,
        masked: bool = False,
        **verdict: Any,
    ) -> TokenizedExample:
        """These of its completions as an example to train on. columns: of each of them. masked:
        whether no token is in the loss mask."""
        answers = [self.answers[i] for i in which]
        own = tuple(sorted((columns or {}).items()))
        return TokenizedExample(
            id=content_id(kind, self.prompt.id, [(a.index, list(a.tokens)) for a in answers]),
            origin=self.prompt.origin,
            kind=kind,
            prompt_ids=self.prompt.prompt_ids,
            prompt_mask=self.prompt.prompt_mask,
            answers=tuple(
                TokenizedCompletion(a.tokens, (not masked,) * len(a.tokens), a.stop == "eos", own)
                for a in answers
            ),
            weight=self.prompt.weight,
            source=self.prompt.source,
            **verdict,
        )


Exclusion = Literal["tied", "truncated", "low_reward", "worst"]
"""Why a completion is never imitated, in the order in which the reasons are tried."""

EXCLUSIONS: dict[Exclusion, str] = {
    "tied": "in groups whose rewards are all equal",
    "truncated": "truncated at rollout.max_new_tokens",
    "low_reward": "below rollout.min_reward",
    "worst": "no better than the worst of their group",
}
"""In words, for messages."""


def exclusion_reasons(
    group: RolloutGroup, min_reward: float | None, mask_truncated: bool
) -> list[Exclusion | None]:
    """Why each completion of a group must not be imitated; None where it may be.

    A group whose rewards are all equal says nothing about which completion is good: with a 0/1
    verifier all of them may be wrong. Without ``min_reward`` the same holds for the completions
    that share the lowest reward of a group. With it, that reward is the standard, also for a
    prompt with a single completion. A truncated completion has no end-of-turn token, so imitating
    it teaches the model not to stop.
    """
    is_tied = group.tied and (min_reward is None or len(group.rewards) > 1)
    lowest = min(group.rewards, default=0.0)
    reasons: list[Exclusion | None] = []
    for completion, reward in zip(group.answers, group.rewards, strict=True):
        if is_tied:
            reasons.append("tied")
        elif mask_truncated and completion.stop == "length":
            reasons.append("truncated")
        elif min_reward is not None and reward < min_reward:
            reasons.append("low_reward")
        elif min_reward is None and reward == lowest:
            reasons.append("worst")
        else:
            reasons.append(None)
    return reasons


def best_of_n(
    round: Sequence[RolloutGroup], top_n: int, min_reward: float | None, mask_truncated: bool
) -> list[TokenizedExample]:
    """The completions with the largest rewards of each prompt, to be imitated.

    Nakano et al. 2021, arXiv 2112.09332, Sec. 2 (best of n); Dong et al. 2023, arXiv 2304.06767
    (RAFT). Of equal rewards the completion that was sampled first is taken. Groups whose rewards
    are all equal are dropped, and so are the completions that ``exclusion_reasons`` names.
    """
    examples: list[TokenizedExample] = []
    for group in round:
        reasons = exclusion_reasons(group, min_reward, mask_truncated)
        allowed = [i for i, reason in enumerate(reasons) if reason is None]
        order = sorted(allowed, key=lambda i: -group.rewards[i])
        examples += [group.unit("demonstration", i) for i in order[:top_n]]
    return examples


def pairs(
    round: Sequence[RolloutGroup],
    *,
    pairs: Literal["best_worst", "all"] = "best_worst",
    pair_margin: Annotated[float, Ge(0)] = 0.0,
) -> list[TokenizedExample]:
    """Pairs of answers to one prompt, the one with the larger reward preferred.

    Guo et al. 2024, arXiv 2402.04792 (online DPO). Answers with the same reward, or the same
    tokens, are no pair. Of several best or worst ones it is that which was sampled first.

    pairs: the best against the worst answer of each prompt, or every two.
    pair_margin: smallest difference of rewards, above 0, that makes a pair.
    """
    found: list[TokenizedExample] = []
    for each in round:
        order = sorted(range(len(each.answers)), key=lambda i: -each.rewards[i])
        last = min(order, key=lambda i: (each.rewards[i], i))
        two = (
            [(i, j) for k, i in enumerate(order) for j in order[k + 1 :]]
            if pairs == "all"
            else [(order[0], last)]
        )
        for i, j in two:
            apart = each.rewards[i] - each.rewards[j]
            if (
                apart > 0
                and apart >= pair_margin
                and each.answers[i].tokens != each.answers[j].tokens
            ):
                found.append(each.unit("preference", i, j))
    return found


Threshold = float | Literal["mean", "median", "batch_mean", "batch_median"]


def thumbs(
    round: Sequence[RolloutGroup],
    *,
    thumbs_up: Threshold = "mean",
    thumbs_quantile: Annotated[float, Gt(0), Lt(1)] | None = None,
) -> list[TokenizedExample]:
    """Every answer with a thumb up or down, by its reward.

    Ethayarajh et al. 2024, arXiv 2402.01306, Sec. 4 (KTO from scores). An answer above the bar is
    up, one below it down; one that is at a bar made of the rewards themselves is left out, while
    one at a bar given as a number is up.

    thumbs_up: the bar: a number, or the mean or the median of the rewards of the prompt (batch_: of
        the whole round).
    thumbs_quantile: instead: this share of the answers to a prompt, those with the largest rewards,
        is up, and as many at the
        other end down.
    """
    found: list[TokenizedExample] = []
    every = [reward for each in round for reward in each.rewards]
    for each in round:
        for i, up in _verdicts(each.rewards, every, thumbs_up, thumbs_quantile):
            found.append(each.unit("judgement", i, label=up))
    return found


def _verdicts(
    own: Rewards, every: Sequence[float], bar: Threshold, share: float | None
) -> Iterator[tuple[int, bool]]:
    """Which answers are up (True) or down."""
    if share is not None:
        order = sorted(range(len(own)), key=lambda i: -own[i])
        most = min(max(1, round(share * len(own))), len(own) // 2)
        for i, j in zip(order[:most], order[::-1][:most], strict=True):
            if own[i] > own[j]:
                yield from ((i, True), (j, False))
        return
    level = bar if isinstance(bar, int | float) else (fmean if bar.endswith("mean") else median)(
        every if bar.startswith("batch") else own
    )  # fmt: skip
    for i, reward in enumerate(own):
        if reward != level or isinstance(bar, int | float):
            yield i, reward >= level


@dataclass(frozen=True)
class SampleBuilder:
    """A function of a round's completions. Its other positional parameters are settings of the
    recipe's ``rollout`` section, by name. ``excludes``: says why completions of a group may not be
    trained on, with the same settings as keyword arguments."""

    fn: Callable[..., Any]
    excludes: Callable[..., list[Exclusion | None]] | None = None

    def excluded(self, round: Sequence[RolloutGroup], rollout: Any) -> Counter[str]:
        """How many completions of a round must not be trained on, by reason. rollout: that
        section.
        """
        if self.excludes is None:
            return Counter()
        names = (p for p in signature(self.excludes).parameters if p in self.reads)
        settings = {name: getattr(rollout, name) for name in names}
        reasons = (reason for group in round for reason in self.excludes(group, **settings))
        return Counter[str](reason for reason in reasons if reason is not None)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of its positional parameters."""
        return tuple(
            p.name
            for p in signature(self.fn).parameters.values()
            if p.kind is not Parameter.KEYWORD_ONLY
        )

    @property
    def settings(self) -> dict[str, Parameter]:
        """Its keyword-only parameters."""
        return {
            p.name: p
            for p in signature(self.fn, eval_str=True).parameters.values()
            if p.kind is Parameter.KEYWORD_ONLY
        }

    def __call__(
        self, round: Sequence[RolloutGroup], rollout: Any, settings: Mapping[str, Any]
    ) -> list[TokenizedExample]:
        """What a round is trained on. rollout: that section; settings: of the loss, its own among
        them.
        """
        more = {name: getattr(rollout, name) for name in self.reads[1:]}
        return self.fn(round, **more, **{name: settings[name] for name in self.settings})


class Credited(SampleBuilder):
    """Every completion by itself, with the advantage of each token by a function of
    ``losses.advantage``. With ``rollout.mask_truncated`` no token of a truncated completion is in
    the loss mask; its reward still counts in the statistics of its group and round."""

    def __call__(
        self, round: Sequence[RolloutGroup], rollout: Any, settings: Mapping[str, Any]
    ) -> list[TokenizedExample]:
        given = {name: value for name, value in _tensors(round).items() if name in self.reads}
        credit = self.fn(**given, **{name: settings[name] for name in self.settings})
        columns: dict[str, Tensor] = credit if isinstance(credit, dict) else {"adv": credit}
        lengths = [len(answer.tokens) for each in round for answer in each.answers]
        parts = {name: iter(values.split(lengths)) for name, values in columns.items()}
        found: list[TokenizedExample] = []
        for each in round:
            for i, reward in enumerate(each.rewards):
                own = {name: tuple(next(part).tolist()) for name, part in parts.items()}
                known = {"sampler": each.answers[i].logps} if each.answers[i].logps else {}
                measured = dict(each.columns[i]) if each.columns else {}
                masked = rollout.mask_truncated and each.answers[i].stop == "length"
                columns_of = known | measured | own
                found.append(
                    each.unit("scored", i, scores=(reward,), columns=columns_of, masked=masked)
                )
        return found


def _tensors(round: Sequence[RolloutGroup]) -> dict[str, Tensor]:
    """The inputs of an advantage function, for S completions with N tokens in their order:
    reward[S], group[S], owner[N], and old_t[N], ref_t[N], value_t[N] where they were measured.
    """
    import torch

    lengths = torch.tensor([len(answer.tokens) for each in round for answer in each.answers])
    groups = torch.tensor([g for g, each in enumerate(round) for _ in each.answers])
    found = {
        "reward": torch.tensor(
            [reward for each in round for reward in each.rewards], dtype=torch.float64
        ),
        "group": groups,
        "owner": torch.arange(len(lengths)).repeat_interleave(lengths),
    }
    for name in ("old", "ref", "value"):
        values = [own.get(name) for each in round for own in each.columns]
        if values and None not in values:
            found[f"{name}_t"] = torch.tensor(
                [v for own in values for v in own or ()], dtype=torch.float64
            )
    return found
