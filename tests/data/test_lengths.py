"""Histograms of lengths: every answer is counted once, in the bin of its length."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from valence.data.lengths import BINS, distributions
from valence.data.tokenized_dataset import build_dataset
from valence.types import Origin, TokenizedCompletion, TokenizedExample


def unit(
    prompt: int, *answers: int, kind: str = "judgement", label: bool | None = None
) -> TokenizedExample:
    result = tuple(TokenizedCompletion(ids=tuple(range(n)), mask=(True,) * n) for n in answers)
    return TokenizedExample(
        id="c0ffee",
        origin=Origin("rows.jsonl", 1),
        kind=kind,
        label=label,
        answers=result,  # type: ignore[arg-type]
        prompt_ids=tuple(range(prompt)),
        prompt_mask=(False,) * prompt,
    )


def distributions_of(units: list[TokenizedExample]) -> dict[str, Any]:
    return distributions(build_dataset(units))


def test_classes_have_separate_histograms() -> None:
    result = distributions_of(
        [unit(3, 5, label=True), unit(4, 7, label=False), unit(4, 7, label=False)]
    )
    assert result["answer tokens"]["counts"].keys() == {"up", "down"}
    assert sum(result["answer tokens"]["counts"]["down"]) == 2
    pair = distributions_of([unit(2, 3, 9, kind="preference")])["answer tokens"]["counts"]
    assert pair["chosen"][3] == 1
    assert pair["rejected"][9] == 1


def test_of_prompts_alone_there_are_no_answers() -> None:
    assert distributions_of([unit(3, kind="prompt")]).keys() == {"prompt tokens"}
    assert distributions_of([]) == {}


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_every_length_is_in_its_bin(lengths: list[int]) -> None:
    result = distributions_of([unit(1, n, label=True) for n in lengths])["answer tokens"]
    edges, counts = result["edges"], result["counts"]["up"]
    assert len(edges) == len(counts) + 1 <= BINS + 2
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        assert count == sum(low <= n < high for n in lengths)
    assert sum(counts) == len(lengths)
