"""KL pairs of KTO: each prompt of a step with the completion of another example, to estimate z0.

Ethayarajh et al. 2024, arXiv 2402.01306, Sec. 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from valence.errors import UserError
from valence.types import Origin, TokenizedCompletion, TokenizedExample

T = TypeVar("T")
Pairing = Literal["next", "previous", "reversed"]


def make_kl_pairs(
    examples: Sequence[TokenizedExample],
    following: Iterable[TokenizedExample] = (),
    *,
    max_length: int,
) -> list[TokenizedExample]:
    """Make one KL pair for each example of a step in canonical order.

    The completion is that of the next example, cyclically, whose prompt and completion both
    differ, and which fits behind the prompt. If none fits, it is the next one that differs, cut on
    the right to at least one token. If no example of the step differs, it is the first of
    ``following`` (later examples of the epoch) that does. Raises UserError when none differs.
    """
    later, rest = list[TokenizedExample](), iter(following)
    pairs: list[TokenizedExample] = []
    for i, example in enumerate(examples):
        others = (examples[(i + k) % len(examples)] for k in range(1, len(examples)))
        partner = _find_partner(example, others, max_length)
        if partner is None:
            partner = _find_partner(example, _reread(later, rest), max_length)
        if partner is None:
            raise _no_partner(example.origin)
        pairs.append(_with_completion(example, partner.answers[0], max_length))
    return pairs


def _reread(before: list[T], rest: Iterator[T]) -> Iterator[T]:
    """Yield the items in ``before``, then those of ``rest``, and add these to ``before``."""
    yield from before
    for item in rest:
        before.append(item)
        yield item


def check_kl_pairs(
    prompts: NDArray[np.uint64], completions: NDArray[np.uint64], origins: Sequence[Origin]
) -> None:
    """Raise the UserError that ``make_kl_pairs`` raises for these examples as one step.

    prompts[S], completions[S]: hashes of the tokens. origins: of the examples.
    """
    pairs = np.stack([prompts, completions], axis=1)
    num_partners = np.full(len(prompts), len(prompts))  # examples that differ in both
    for values, sign in ((prompts[:, None], -1), (completions[:, None], -1), (pairs, 1)):
        _, groups, counts = np.unique(values, axis=0, return_inverse=True, return_counts=True)
        num_partners += sign * counts[groups.reshape(-1)]
    if not num_partners.all():
        raise _no_partner(origins[int(np.flatnonzero(num_partners == 0)[0])])


def _no_partner(origin: Origin) -> UserError:
    return UserError(
        "KTO cannot estimate the KL for this row, because no other row differs in both prompt and "
        "completion",
        code="kl-pairs-missing",
        where=str(origin),
        fix="add rows with another prompt and another completion, or set method: "
        "apo_zero_unpaired, which needs no pairs",
    )


def make_kl_pairs_in_groups(
    examples: Sequence[TokenizedExample], group_size: int, pairing: Pairing, *, max_length: int
) -> list[TokenizedExample]:
    """Make KL pairs within groups of consecutive examples, cyclically, as other libraries do."""
    pairs: list[TokenizedExample] = []
    for start in range(0, len(examples), group_size):
        group = examples[start : start + group_size]
        for i, example in enumerate(group):
            index = {"next": i + 1, "previous": i - 1, "reversed": -1 - i}[pairing] % len(group)
            pairs.append(_with_completion(example, group[index].answers[0], max_length))
    return pairs


def _find_partner(
    example: TokenizedExample, others: Iterable[TokenizedExample], max_length: int
) -> TokenizedExample | None:
    """Return the first of ``others`` that differs and fits, else the first that differs."""
    room = max_length - len(example.prompt_ids)
    completion = example.answers[0].ids
    first = None
    for other in others:
        if other.prompt_ids == example.prompt_ids or other.answers[0].ids == completion:
            continue
        if len(other.answers[0].ids) <= room:
            return other
        first = first or other
    return first


def _with_completion(
    example: TokenizedExample, completion: TokenizedCompletion, max_length: int
) -> TokenizedExample:
    room = max(1, max_length - len(example.prompt_ids))
    fits = len(completion.ids) <= room
    cut = TokenizedCompletion(
        completion.ids[:room], completion.mask[:room], completion.complete and fits
    )
    return replace(example, prompt_mask=(False,) * len(example.prompt_ids), answers=(cut,))
