"""Build training examples from the completions of an online round.

The result is demonstrations, pairs, labelled completions, or completions with advantages. A builder
reads the prompts of a round with their completions and rewards. Its keyword-only parameters are
settings in the recipe's ``loss`` section of the methods that use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from itertools import compress, groupby
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
    """A prompt with its rewarded completions, in sampling order.

    rewards: after length penalties. columns: for each completion, its token columns `old`, `ref`
    and `value`, if the method reads them. feedback: what the rewards say about each completion.
    teachers: for each completion, the prompt of its teacher if that reads more than the policy:
    empty if there is nothing to read, None if it is too long. shared_vocabulary: number of token
    ids that mean the same to policy and teacher; None: all. turn_rewards: for each completion, how
    much of its reward each turn has earned; if empty, the last turn has earned all of it.
    """

    prompt: TokenizedExample
    answers: tuple[Completion, ...]
    rewards: Rewards
    columns: tuple[Columns, ...] = ()
    feedback: tuple[str, ...] = ()
    teachers: tuple[tuple[int, ...] | None, ...] = ()
    shared_vocabulary: int | None = None
    turn_rewards: tuple[Rewards, ...] = ()

    @property
    def tied(self) -> bool:
        """Whether all rewards are equal."""
        return len(set(self.rewards)) < 2

    def unit(
        self,
        kind: Literal["demonstration", "judgement", "preference", "scored", "feedback"],
        *indices: int,
        columns: Columns | None = None,
        masked: bool = False,
        **labels: Any,
    ) -> TokenizedExample:
        """An example with the completions at these indices.

        columns: token columns of each completion. masked: keep all tokens out of the loss mask.
        """
        answers = [self.answers[i] for i in indices]
        token_columns = tuple(sorted((columns or {}).items()))
        return TokenizedExample(
            id=content_id(kind, self.prompt.id, [(a.index, list(a.tokens)) for a in answers]),
            origin=self.prompt.origin,
            kind=kind,
            prompt_ids=self.prompt.prompt_ids,
            prompt_mask=self.prompt.prompt_mask,
            answers=tuple(
                TokenizedCompletion(
                    a.tokens,
                    (False,) * len(a.tokens) if masked else a.sampled,
                    a.stop == "eos",
                    token_columns,
                )
                for a in answers
            ),
            weight=self.prompt.weight,
            source=self.prompt.source,
            **labels,
        )


Exclusion = Literal[
    "tied", "truncated", "low_reward", "worst", "no_feedback", "too_long", "unknown_token"
]
"""Reasons not to train on a completion, in the order in which they are tried."""

EXCLUSIONS: dict[Exclusion, str] = {
    "tied": "in groups whose rewards are all equal",
    "truncated": "truncated at rollout.max_new_tokens",
    "low_reward": "below rollout.min_reward",
    "worst": "no better than the worst of their group",
    "no_feedback": "without a text that the teacher may read (teacher.context)",
    "too_long": "longer than data.max_length after the prompt of the teacher",
    "unknown_token": "with a token that the teacher does not have",
}
"""The reasons as they appear in messages."""


def exclusion_reasons(
    group: RolloutGroup, min_reward: float | None, mask_truncated: bool
) -> list[Exclusion | None]:
    """Why each completion of a group must not be imitated; None if it may be.

    Equal rewards do not show which completion is good: with a 0/1 verifier, all may be wrong.
    Without ``min_reward``, the same is true of the completions with the lowest reward of a group.
    With it, completions are compared with that reward, also if a prompt has only one. A truncated
    completion has no end-of-turn token, so imitating it teaches the model not to stop.
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


def teacher_exclusions(group: RolloutGroup, mask_truncated: bool) -> list[Exclusion | None]:
    """Why no teacher can assess each completion of a group; None if one can."""
    reasons: list[Exclusion | None] = []
    for i, completion in enumerate(group.answers):
        limit = group.shared_vocabulary
        if mask_truncated and completion.stop == "length":
            reasons.append("truncated")
        elif limit is not None and max(completion.tokens, default=0) >= limit:
            reasons.append("unknown_token")
        elif not group.teachers:  # it reads the prompt of the policy
            reasons.append(None)
        elif group.teachers[i] is None:
            reasons.append("too_long")
        else:
            reasons.append(None if group.teachers[i] else "no_feedback")
    return reasons


def best_of_n(
    round: Sequence[RolloutGroup], top_n: int, min_reward: float | None, mask_truncated: bool
) -> list[TokenizedExample]:
    """Demonstrations from the `rollout.top_n` completions with the largest rewards of each prompt.

    Nakano et al. 2021, arXiv 2112.09332, Sec. 2 (best of n); Dong et al. 2023, arXiv 2304.06767
    (RAFT). Leaves out truncated completions (`rollout.mask_truncated`), prompts with several
    completions of equal reward, and rewards below `rollout.min_reward` (if not set, the lowest of
    their prompt).
    """
    examples: list[TokenizedExample] = []
    for group in round:
        reasons = exclusion_reasons(group, min_reward, mask_truncated)
        allowed = [i for i, reason in enumerate(reasons) if reason is None]
        order = sorted(allowed, key=lambda i: -group.rewards[i])
        examples += [group.unit("demonstration", i) for i in order[:top_n]]
    return examples


def preference_pairs(
    round: Sequence[RolloutGroup],
    *,
    pairs: Literal["best_worst", "all"] = "best_worst",
    pair_margin: Annotated[float, Ge(0)] = 0.0,
) -> list[TokenizedExample]:
    """Pairs of completions of one prompt; the one with the larger reward is preferred.

    Guo et al. 2024, arXiv 2402.04792 (online DPO). Completions with equal rewards or equal tokens
    form no pair.

    pairs: the best and the worst completion of each prompt, or all pairs.
    pair_margin: smallest difference between the rewards of a pair.
    """
    examples: list[TokenizedExample] = []
    for group in round:
        order = sorted(range(len(group.answers)), key=lambda i: -group.rewards[i])
        worst = min(order, key=lambda i: (group.rewards[i], i))
        candidates = (
            [(i, j) for k, i in enumerate(order) for j in order[k + 1 :]]
            if pairs == "all"
            else [(order[0], worst)]
        )
        for i, j in candidates:
            margin = group.rewards[i] - group.rewards[j]
            if (
                margin > 0
                and margin >= pair_margin
                and group.answers[i].tokens != group.answers[j].tokens
            ):
                examples.append(group.unit("preference", i, j))
    return examples


Threshold = float | Literal["mean", "median", "batch_mean", "batch_median"]


def binary_labels(
    round: Sequence[RolloutGroup],
    *,
    thumbs_up: Threshold = "mean",
    thumbs_quantile: Annotated[float, Gt(0), Lt(1)] | None = None,
) -> list[TokenizedExample]:
    """Label each completion desirable or undesirable by comparing its reward with a threshold.

    Ethayarajh et al. 2024, arXiv 2402.01306, Sec. 4 (KTO from scores). A reward equal to the
    threshold is desirable if that is a number, and left out if it is a mean or median.

    thumbs_up: a number, or the mean or median of the prompt's rewards (batch_: of the round's).
    thumbs_quantile: instead, label this share of each prompt's completions desirable, as many
        undesirable, and leave out the others.
    """
    examples: list[TokenizedExample] = []
    all_rewards = [reward for group in round for reward in group.rewards]
    for group in round:
        for i, label in _labels(group.rewards, all_rewards, thumbs_up, thumbs_quantile):
            examples.append(group.unit("judgement", i, label=label))
    return examples


def _labels(
    rewards: Rewards, all_rewards: Sequence[float], threshold: Threshold, share: float | None
) -> Iterator[tuple[int, bool]]:
    """The index and label of each labelled completion of a group. all_rewards: of the round."""
    if share is not None:
        order = sorted(range(len(rewards)), key=lambda i: -rewards[i])
        count = min(max(1, round(share * len(rewards))), len(rewards) // 2)
        for i, j in zip(order[:count], order[::-1][:count], strict=True):
            if rewards[i] > rewards[j]:
                yield from ((i, True), (j, False))
        return
    if isinstance(threshold, int | float):
        yield from ((i, reward >= threshold) for i, reward in enumerate(rewards))
        return
    average = fmean if threshold.endswith("mean") else median
    level = average(all_rewards if threshold.startswith("batch") else rewards)
    yield from ((i, reward > level) for i, reward in enumerate(rewards) if reward != level)


def with_teachers(
    round: Sequence[RolloutGroup], ahead: int, mask_truncated: bool
) -> list[TokenizedExample]:
    """Completions that a teacher assesses.

    Another model reads the same prompt (Agarwal et al. 2024, arXiv 2306.13649). The policy as
    teacher also reads what the reward says, or the prompt's best completion (`teacher.context`;
    SDPO, Hübotter et al. 2026, arXiv 2601.20802). Leaves out completions without such a text.
    """
    examples: list[TokenizedExample] = []
    for group in round:
        for i, reason in enumerate(teacher_exclusions(group, mask_truncated)):
            if reason is None:
                columns = group.columns[i] if group.columns else {}
                # the policy has changed since a round was sampled ahead
                old = group.answers[i].logps if ahead else columns.get("old")
                example = group.unit(
                    "feedback" if group.teachers else "demonstration",
                    i,
                    columns={"old": old} if old else None,
                )
                if group.teachers:
                    example = replace(_with_complete_prompt(example), teacher_ids=group.teachers[i])
                examples.append(example)
    return examples


def _with_complete_prompt(example: TokenizedExample) -> TokenizedExample:
    """The example of one completion, whose tokens before the first sampled one become a part of the
    prompt: what an environment has added to it, which the teacher reads in its own prompt.
    """
    [answer] = example.answers
    start = answer.mask.index(True)
    prompt_ids = example.prompt_ids + answer.ids[:start]
    columns = tuple((name, values[start:]) for name, values in answer.columns)
    rest = replace(answer, ids=answer.ids[start:], mask=answer.mask[start:], columns=columns)
    prompt_mask = example.prompt_mask + (False,) * start
    return replace(example, prompt_ids=prompt_ids, prompt_mask=prompt_mask, answers=(rest,))


@dataclass(frozen=True)
class SampleBuilder:
    """Build the training examples of a round with a function.

    fn: takes the round. Its other positional parameters are settings of the recipe's ``rollout``
    section, by name. excludes: returns why completions of a group may not be trained on, with the
    same settings as keyword arguments. reasons: those that it may return.
    """

    fn: Callable[..., Any]
    excludes: Callable[..., list[Exclusion | None]] | None = None
    reasons: tuple[Exclusion, ...] = ()

    def excluded(self, round: Sequence[RolloutGroup], rollout: Any) -> Counter[str]:
        """Number of completions that must not be trained on, by reason. rollout: the section."""
        if self.excludes is None:
            return Counter()
        names = (p for p in signature(self.excludes).parameters if p in self.reads)
        settings = {name: getattr(rollout, name) for name in names}
        reasons = (reason for group in round for reason in self.excludes(group, **settings))
        return Counter[str](reason for reason in reasons if reason is not None)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the positional parameters."""
        return tuple(
            p.name
            for p in signature(self.fn).parameters.values()
            if p.kind is not Parameter.KEYWORD_ONLY
        )

    @property
    def settings(self) -> dict[str, Parameter]:
        """The keyword-only parameters."""
        return {
            p.name: p
            for p in signature(self.fn, eval_str=True).parameters.values()
            if p.kind is Parameter.KEYWORD_ONLY
        }

    def __call__(
        self, round: Sequence[RolloutGroup], rollout: Any, settings: Mapping[str, Any]
    ) -> list[TokenizedExample]:
        """The training examples of a round.

        rollout: that section of the recipe. settings: of the loss section.
        """
        options = {name: getattr(rollout, name) for name in self.reads[1:]}
        return self.fn(round, **options, **{name: settings[name] for name in self.settings})


class AdvantageBuilder(SampleBuilder):
    """Build one example per completion, with token advantages from ``losses.advantage``.

    With ``rollout.mask_truncated``, the tokens of truncated completions are not in the loss mask;
    their rewards still count in the statistics of the group and the round.
    """

    def __call__(
        self, round: Sequence[RolloutGroup], rollout: Any, settings: Mapping[str, Any]
    ) -> list[TokenizedExample]:
        inputs = {name: value for name, value in _tensors(round).items() if name in self.reads}
        result = self.fn(**inputs, **{name: settings[name] for name in self.settings})
        advantages: dict[str, Tensor] = result if isinstance(result, dict) else {"adv": result}
        lengths = [sum(answer.sampled) for group in round for answer in group.answers]
        per_answer = {name: iter(values.split(lengths)) for name, values in advantages.items()}
        examples: list[TokenizedExample] = []
        for group in round:
            for i, reward in enumerate(group.rewards):
                answer = group.answers[i]
                columns: dict[str, tuple[float, ...]] = {}
                if answer.logps:
                    columns["sampler"] = answer.logps
                if group.columns:
                    columns |= group.columns[i]
                columns |= {
                    name: per_token(answer, next(part).tolist())
                    for name, part in per_answer.items()
                }
                masked = rollout.mask_truncated and answer.stop == "length"
                examples.append(
                    group.unit("scored", i, scores=(reward,), columns=columns, masked=masked)
                )
        return examples


def per_token(answer: Completion, values: Iterable[float]) -> tuple[float, ...]:
    """A column of a completion from the values of its sampled tokens: 0 for the others, which no
    loss reads."""
    remaining = iter(values)
    return tuple(next(remaining) if is_sampled else 0.0 for is_sampled in answer.sampled)


def token_rewards(answer: Completion, reward: float, turns: Rewards) -> list[float]:
    """The reward of each sampled token: that of a turn at its last token, and what the other turns
    leave of the reward at the last token of all.
    """
    rewards: list[float] = []
    of_turns = iter(turns)
    for is_sampled, tokens in groupby(answer.sampled):
        if is_sampled:
            rewards += [0.0] * len(list(tokens))
            rewards[-1] = next(of_turns, 0.0)
    rewards[-1] = reward - sum(rewards[:-1])
    return rewards


def _tensors(round: Sequence[RolloutGroup]) -> dict[str, Tensor]:
    """The inputs of an advantage function, for S completions with N sampled tokens in their order:
    reward[S], group[S], owner[N], reward_t[N], and old_t[N], ref_t[N], value_t[N] where they were
    measured.
    """
    import torch

    answers = [answer for group in round for answer in group.answers]
    lengths = torch.tensor([sum(answer.sampled) for answer in answers])
    rewards = [reward for group in round for reward in group.rewards]
    tensors = {
        "reward": torch.tensor(rewards, dtype=torch.float64),
        "group": torch.tensor([g for g, group in enumerate(round) for _ in group.answers]),
        "owner": torch.arange(len(lengths)).repeat_interleave(lengths),
        "reward_t": torch.tensor(
            [
                reward
                for group in round
                for i, answer in enumerate(group.answers)
                for reward in token_rewards(
                    answer, group.rewards[i], group.turn_rewards[i] if group.turn_rewards else ()
                )
            ],
            dtype=torch.float64,
        ),
    }
    for name in ("old", "ref", "value"):
        values = [columns.get(name) for group in round for columns in group.columns]
        if values and None not in values:
            sampled = zip(values, answers, strict=True)
            tensors[f"{name}_t"] = torch.tensor(
                [x for column, answer in sampled for x in compress(column or (), answer.sampled)],
                dtype=torch.float64,
            )
    return tensors
