"""Examples of a step to micro-batches: packing under a token budget, and balance across ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from valence.batching.prefix_tree import PrefixTree, TokenSequence, build_prefix_tree
from valence.types import MicroBatch, TokenizedExample, sent


@dataclass(frozen=True)
class RankBatches:
    """The micro-batches of one rank.

    num_rounds: the largest number of micro-batches of any rank. dummy: a micro-batch that this
    rank runs, without effect on the result, while others run theirs (None: it does not need to).
    """

    local: list[MicroBatch]
    num_rounds: int
    dummy: MicroBatch | None = None

    def to(self, device: torch.device) -> RankBatches:
        """Return the micro-batches on a device."""
        if device.type == "cpu":
            return self
        dummy = None if self.dummy is None else to_device(self.dummy, device)
        return RankBatches([to_device(b, device) for b in self.local], self.num_rounds, dummy)


class StepPacker:
    """Divides the examples of a step into micro-batches. The prefix tree is built once.

    examples: in canonical order. kl_pairs: one for each example, or none; their indices follow
    those of the examples. groups: which statistic of the step each example belongs to, such as
    the reference point of KTO (None: one for all). device: where the micro-batches will run.
    """

    def __init__(
        self,
        examples: Sequence[TokenizedExample],
        kl_pairs: Sequence[TokenizedExample] = (),
        groups: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.examples, self.kl_pairs = list(examples), list(kl_pairs)
        self._all = [*self.examples, *self.kl_pairs]
        self._groups, self._device = groups, torch.device(device)
        self._first: list[int] = []  # number of the first sequence of each example
        sequences: list[TokenSequence] = []
        for example in self._all:
            self._first.append(len(sequences))
            sequences += token_sequences(example)
        self.tree = build_prefix_tree(sequences)
        self._segments = [self.tree.segments_of(self._sequences(i)) for i in range(len(self._all))]

    @property
    def example_indices(self) -> range:
        return range(len(self.examples))

    @property
    def kl_indices(self) -> range:
        return range(len(self.examples), len(self._all))

    def example(self, index: int) -> TokenizedExample:
        """The example or KL pair of an index."""
        return self._all[index]

    @property
    def num_unique_tokens(self) -> int:
        """Tokens that any layout has to run."""
        return len(self.tree.tokens)

    def _sequences(self, index: int) -> range:
        first = self._first[index]
        return range(first, first + len(self._all[index].answers))

    def num_tokens(self, indices: Sequence[int]) -> int:
        """Unique tokens of these examples together."""
        return self.tree.num_tokens(self._union(indices))

    def attention_cost(self, indices: Sequence[int], hidden_size: int) -> float:
        """Cost of a micro-batch of these examples, in tokens.

        Attention to a context of 6 hidden sizes costs as much as the matrix products of a layer.
        """
        segments = self._union(indices)
        context = self.tree.num_context_tokens(segments)
        return self.tree.num_tokens(segments) + context / (6 * hidden_size)

    def _union(self, indices: Sequence[int]) -> set[int]:
        """Segments of these examples together."""
        return set[int]().union(*(self._segments[i] for i in indices))

    def pack(self, indices: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Divide examples into as few micro-batches as possible, evenly filled.

        Examples with a common prefix stay together as far as ``max_tokens`` allows. A longer
        example gets a separate micro-batch. Indices are ascending in each micro-batch.
        """
        families = self._families(indices, max_tokens)
        bins = fill_bins([tokens for tokens, _ in families], max_tokens)
        return [sorted(i for k in members for i in families[k][1]) for members in bins]

    def _families(self, indices: Sequence[int], max_tokens: int) -> list[tuple[int, list[int]]]:
        """Group neighbours in the tree that share tokens, up to ``max_tokens``.

        Returns (number of unique tokens, indices) of each group.
        """
        families: list[tuple[int, list[int]]] = []
        before = set[int]()
        order = {
            i: (self._all[i].prompt_ids, [a.ids for a in self._all[i].answers]) for i in indices
        }
        for i in sorted(indices, key=lambda i: order[i]):
            segments = self._segments[i]
            num_tokens = self.tree.num_tokens(segments)
            num_new = self.tree.num_tokens(segments - before)
            if num_new < num_tokens and families[-1][0] + num_new <= max_tokens:
                families[-1] = families[-1][0] + num_new, [*families[-1][1], i]
            else:
                families.append((num_tokens, [i]))
            before = segments
        return families

    def micro_batch(self, indices: Sequence[int], no_grad: Sequence[int] = ()) -> MicroBatch:
        """Build the micro-batch of these examples. No gradient flows from those of ``no_grad``."""
        return to_device(self.host_micro_batch(indices, no_grad), self._device)

    def host_micro_batch(self, indices: Sequence[int], no_grad: Sequence[int] = ()) -> MicroBatch:
        """Build a micro-batch in host memory, which is pinned if it will run on CUDA."""
        rows = [  # one for each sequence
            _BatchSequence(self._all[i], i % len(self.examples), side, requires_grad)
            for chosen, requires_grad in ((indices, True), (no_grad, False))
            for i in chosen
            for side in range(len(self._all[i].answers))
        ]
        sequences = [s for i in (*indices, *no_grad) for s in self._sequences(i)]
        is_complete = sequences == list(range(len(self.tree.leaves)))
        tree = self.tree if is_complete else self.tree.select(sequences)
        batch = _make_tensors(tree, rows, self._groups, self._device)
        if not any(row.example.teacher_ids for row in rows):
            return batch
        return self._with_teacher(batch, rows)

    def _with_teacher(self, batch: MicroBatch, rows: Sequence[_BatchSequence]) -> MicroBatch:
        """Add the same completions after the prompts of the teacher."""
        rows = [replace(row, example=for_teacher(row.example)) for row in rows]
        tree = build_prefix_tree([token_sequences(row.example)[row.side] for row in rows])
        teacher = _make_tensors(tree, rows, self._groups, self._device)
        # the rows that a loss reads, ordered by sequence and then by position
        ours, theirs = (b.cpu_scored[1].argsort(stable=True) for b in (batch, teacher))
        teacher_rows = torch.empty_like(ours)
        teacher_rows[ours] = teacher.cpu_scored[0][theirs]
        if self._device.type == "cuda":
            teacher_rows = teacher_rows.pin_memory()
        return replace(batch, teacher=teacher, teacher_rows=teacher_rows)


def for_teacher(example: TokenizedExample) -> TokenizedExample:
    """Return the example as the teacher reads it: with its prompt, and without stored columns."""
    prompt = example.teacher_ids or example.prompt_ids
    answers = tuple(replace(answer, columns=()) for answer in example.answers)
    return replace(
        example,
        prompt_ids=prompt,
        prompt_mask=(False,) * len(prompt),
        answers=answers,
        teacher_ids=(),
    )


def token_sequences(example: TokenizedExample) -> list[TokenSequence]:
    """Return the prompt with each of its completions."""
    return [
        TokenSequence(example.prompt_ids + answer.ids, example.prompt_mask + answer.mask)
        for answer in example.answers
    ]


def make_micro_batch(
    examples: Sequence[TokenizedExample],
    *,
    kl_pairs: Sequence[TokenizedExample] = (),
    groups: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Build one micro-batch of all these examples. No gradient flows from the KL pairs."""
    packer = StepPacker(examples, kl_pairs, groups, device)
    return packer.micro_batch(packer.example_indices, packer.kl_indices)


def make_micro_batches(
    examples: Sequence[TokenizedExample], max_tokens: int, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    """Divide examples into micro-batches of at most ``max_tokens`` tokens.

    ``unit`` of each is the index in ``examples``.
    """
    packer = StepPacker(examples, device=device)
    return [packer.micro_batch(rows) for rows in packer.pack(packer.example_indices, max_tokens)]


def fill_bins(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Divide items of these sizes into as few bins as possible, evenly filled.

    An item larger than the capacity gets a separate bin.
    """
    if not sizes:
        return []
    longest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    oversized = [i for i in longest_first if sizes[i] > capacity]
    shared = longest_first[len(oversized) :]
    bins: list[list[int]] = [[] for _ in range(-(-sum(sizes[i] for i in shared) // capacity))]
    heap = [(0, k) for k in range(len(bins))]  # the emptiest bin first
    for i in shared:
        size, k = heap[0]
        if size + sizes[i] <= capacity:
            heapq.heapreplace(heap, (size + sizes[i], k))
        else:  # an item that does not fit the emptiest bin fits none
            k = len(bins)
            bins.append([])
            heapq.heappush(heap, (sizes[i], k))
        bins[k].append(i)
    return [[i] for i in oversized] + [sorted(items) for items in bins if items]


def balance_across_ranks(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Assign items to ranks, the most expensive first and each to the rank with the least so far.

    Returns indices, ascending for each rank. Some ranks may get none.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        cost, rank = heap[0]
        heapq.heapreplace(heap, (cost + costs[i], rank))
        ranks[rank].append(i)
    return [sorted(items) for items in ranks]


def round_robin(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Assign items to ranks in turn, the most expensive first.

    The k-th items of all ranks then cost about the same, for ranks that wait for each other in
    every layer.
    """
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    return [order[rank::num_ranks] for rank in range(num_ranks)]


@dataclass(frozen=True, slots=True)
class _BatchSequence:
    """One sequence of a micro-batch. number: index of its example in the step."""

    example: TokenizedExample
    number: int
    side: int
    requires_grad: bool


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return the micro-batch on a device. Copies from pinned memory do not block the host."""
    if device.type == "cpu":
        return batch
    tensors = {
        field.name: sent(value, device)
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
        and not field.name.startswith("cpu_")
    }
    columns = {name: sent(values, device) for name, values in batch.token_columns.items()}
    teacher = None if batch.teacher is None else to_device(batch.teacher, device)
    return replace(batch, token_columns=columns, teacher=teacher, **tensors)


def _make_tensors(
    tree: PrefixTree,
    rows: Sequence[_BatchSequence],
    groups: Sequence[int] | None,
    device: torch.device,
) -> MicroBatch:
    """Build the tensors of a micro-batch in host memory. groups, device: see ``StepPacker``."""
    float_type = torch.float32 if device.type == "mps" else torch.float64
    labels = [row.example.label for row in rows]
    scored = tree.scored

    def tensor(values: object, dtype: torch.dtype | None = None) -> torch.Tensor:
        host = torch.as_tensor(values, dtype=dtype)
        return host.pin_memory() if device.type == "cuda" else host

    targets = _targets(rows)
    return MicroBatch(
        tokens=tensor(tree.tokens),
        position_ids=tensor(tree.position_ids),
        previous=tensor(tree.previous),
        sequence_ids=tensor(tree.sequence_ids),
        loss_mask=tensor(tree.loss_mask),
        scored=tensor(scored[0]),
        cpu_tokens=torch.as_tensor(tree.tokens),
        cpu_scored=torch.as_tensor(scored),
        segments=tree.segments,
        leaves=tree.leaves,
        requires_grad=tuple(row.requires_grad for row in rows),
        unit=tensor([row.number for row in rows], torch.long),
        side=tensor([row.side for row in rows], torch.long),
        label=None if None in labels else tensor(labels, torch.bool),
        weight=tensor([row.example.weight for row in rows], torch.float32),
        margin=tensor([row.example.margin for row in rows], torch.float32),
        soft=tensor(
            [math.nan if row.example.soft is None else row.example.soft for row in rows],
            torch.float32,
        ),
        target=None if targets is None else tensor(targets, torch.float32),
        group=tensor([groups[row.number] if groups else 0 for row in rows], torch.long),
        num_groups=max(groups) + 1 if groups else 1,
        ids=tuple(row.example.id for row in rows),
        token_columns={
            name: tensor(values, float_type) for name, values in _token_columns(rows, tree)
        },
    )


def _token_columns(
    rows: Sequence[_BatchSequence], tree: PrefixTree
) -> list[tuple[str, list[float]]]:
    """Columns of the completions: (name, a number for each token that a loss reads).

    Raises ValueError where only some completions have a column.
    """
    columns = [dict(row.example.answers[row.side].columns) for row in rows]
    names = list(columns[0])
    if any(list(column) != names for column in columns):
        raise ValueError("some completions of the micro-batch lack columns that others have")
    starts = [len(row.example.prompt_ids) for row in rows]
    scored_rows, readers = tree.scored
    places = list(zip(readers.tolist(), tree.position_ids[scored_rows].tolist(), strict=True))
    return [(name, [columns[s][name][at - starts[s]] for s, at in places]) for name in names]


def _targets(rows: Sequence[_BatchSequence]) -> list[list[float]] | None:
    """Scores of the data [S, A], NaN where a row has none; None when no row has any."""
    scores = [
        row.example.scores[row.side : row.side + 1]
        if row.example.kind == "ranking"
        else row.example.scores
        for row in rows
    ]
    width = max(map(len, scores))
    if not width:
        return None
    return [list(values) or [math.nan] * width for values in scores]
