"""Random prefix trees and sequences, and the attention mask that follows from their definition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.units import unit
from valence.batching import prefix_tree
from valence.batching.prefix_tree import TokenSequence
from valence.types import TokenizedCompletion, TokenizedExample

Segments = list[tuple[int, int, int]]


@contextmanager
def sharing(minimum: int) -> Iterator[None]:
    """Share common prefixes of at least ``minimum`` tokens inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "MIN_SHARED_TOKENS", minimum)
        yield


@st.composite
def sequence_sets(draw: st.DrawFn, measured: bool = True) -> list[TokenSequence]:
    """Sequences of few distinct tokens, many of which extend each other, share prefixes, or are
    equal.
    """
    results: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 7))):
        stem = draw(st.sampled_from(results)) if results and draw(st.booleans()) else ()
        more = draw(st.lists(st.integers(0, 1), min_size=0 if stem else 1, max_size=9))
        results.append((*stem[: draw(st.integers(0, len(stem)))], *more) or (0,))
    sequences: list[TokenSequence] = []
    for ids in draw(st.permutations(results)):
        mask = [False] * len(ids)
        prompt = draw(st.integers(1, len(ids)))
        if measured:
            free = st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))
            mask = [i >= prompt for i in range(len(ids))] if draw(st.booleans()) else draw(free)
            mask[0] = False
        sequences.append(TokenSequence(ids, tuple(mask)))
    return sequences


def encoded(sequence: TokenSequence, name: str = "") -> TokenizedExample:
    """A demonstration with only this sequence."""
    ids, mask = sequence.token_ids, sequence.loss_mask
    cut = mask.index(True) if True in mask else len(ids) - 1
    answer = TokenizedCompletion(ids[cut:], mask[cut:])
    return replace(
        unit(name, "demonstration", ids[:cut]), prompt_mask=mask[:cut], answers=(answer,)
    )


def conversations() -> list[TokenizedExample]:
    """A prompt with three answers, two separately rated turns of a conversation (the completion of
    the first is context of the second), and two sequences that share no prefix.
    """
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 97, (length,), generator=generator).tolist())

    first, turn = ids(7), ids(5)
    return [
        unit("three", "ranking", ids(9), ids(7), ids(2), ids(5)),
        unit("first", "judgement", first, turn),
        unit("second", "judgement", first + turn + ids(4), ids(3)),
        unit("long", "judgement", ids(4), ids(12)),
        unit("short", "judgement", ids(1), ids(1)),
    ]


@st.composite
def prefix_trees(draw: st.DrawFn, *, segments: int = 9, longest: int = 40) -> Segments:
    """(first row, last row + 1, parent) of each segment, depth first.

    Lengths are up to ``longest``, and mostly short.
    """
    results: Segments = []
    path: list[int] = []
    for k in range(draw(st.integers(1, segments))):
        depth = draw(st.integers(0, len(path)))
        start = results[-1][1] if results else 0
        length = draw(st.integers(1, draw(st.sampled_from([3, longest]))))
        results.append((start, start + length, path[depth - 1] if depth else -1))
        path = [*path[:depth], k]
    return results


def path(segments: Segments, k: int) -> list[int]:
    """The segments from the root to this one."""
    return [*(path(segments, segments[k][2]) if segments[k][2] >= 0 else []), k]


def rows(segments: Segments, k: int) -> list[int]:
    """Rows on the path to the end of a segment, in order."""
    return [row for j in path(segments, k) for row in range(*segments[j][:2])]


def visible_mask(segments: Segments, window: int = 0) -> Tensor:
    """[T, T], True where the query token (row) may attend to the key token (column): itself or an
    earlier token on its path, and with a window (0: none) less than ``window`` tokens back.
    """
    result = torch.zeros(segments[-1][1], segments[-1][1], dtype=torch.bool)
    for k, (start, end, _) in enumerate(segments):
        full = rows(segments, k)
        for row in range(start, end):
            before = full[: full.index(row) + 1]
            result[row, before[-window:] if window else before] = True
    return result


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float = 0.0
) -> Tensor:
    """Attention by its formula. q[1, H, T, D], k[1, H_kv, T, D], v[1, H_kv, T, D_v], visible[T, T]
    -> [1, T, H, D_v].
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    return (torch.softmax(scores.masked_fill(~visible, -torch.inf), -1) @ v).transpose(1, 2)
