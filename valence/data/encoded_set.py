"""What encoding makes of examples: their tokens, the rows that cannot be used, remarks, and the
facts that the audit reads, all as columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valence.data.tokenized_dataset import (
    COLUMNS,
    NAMES,
    Array,
    LazySequence,
    Names,
    Origins,
    TokenizedColumns,
    TokenizedDataset,
    offsets,
)
from valence.data.vocab import row_code
from valence.types import (
    Chat,
    Example,
    Judgement,
    Origin,
    Preference,
    Ranking,
    TokenizedExample,
    content_id,
)

FACTS = {
    "row_id": np.uint64, "row_path": np.int32, "row_line": np.int64, "prompt_id": np.uint64,
    "verdict_id": np.uint64, "verdict": np.int8, "flags": np.uint8,
}  # fmt: skip
"""Columns with a number for each example that was encoded, also of those that cannot be used.

``row_id``, ``prompt_id``: content ids. ``verdict_id``: of what was judged. ``verdict``: which way,
-1 for none.
"""
EQUAL_SIDES, TIED_SCORES, TEXT_PROMPT, CHAT_PROMPT = 1, 2, 4, 8
LENGTHS = {"prompt_length": np.int32, "num_lengths": np.int32, "answer_length": np.int32}
"""Lengths before ``long_rows`` did anything, of each example that could be tokenized.

``num_lengths``: of its answers, which ``answer_length`` has end to end.
"""
NOTES = {"note": np.int32, "noted": np.int64, "split": np.int64, "num_parts": np.int32}
"""``note``, ``noted``: number of a remark, and index of the example that it is about. ``split``:
index of each conversation that became ``num_parts`` examples.
"""
ALL_COLUMNS = COLUMNS | FACTS | LENGTHS | NOTES
ALL_NAMES = NAMES | {"row_path": "files", "note": "notes"}
EXAMPLE_INDICES = ("noted", "split")
"""Columns with indices of examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unusable:
    """An example that became no unit of training.

    ``dropped``: it is too long, which the recipe allows for; otherwise the row is bad. ``kind``: a
    short stable name to count by (``too_long``, ``not_a_prefix``, ``empty_answer``, ...).
    """

    origin: Origin
    kind: str
    reason: str
    fix: str | None = None
    dropped: bool = False
    source: str = ""

    @property
    def code(self) -> str:
        """The code of a UserError about this row."""
        return row_code(self.kind)


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of an example's prompt and of each answer, before ``long_rows`` did anything."""

    prompt: int
    answers: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: the prompt with its longest answer."""
        return self.prompt + max(self.answers, default=0)


class Lengths(LazySequence[Length]):
    """Lengths of all examples that could be tokenized.

    prompts[n]; counts[n]: of the answers of each; answers: of all, end to end.
    """

    def __init__(self, prompts: Array, counts: Array, answers: Array) -> None:
        self.prompts, self.counts, self.answers = prompts, counts, answers
        self._first = offsets(counts)

    def __len__(self) -> int:
        return len(self.prompts)

    def item(self, index: int) -> Length:
        start, end = self._first[index : index + 2].tolist()
        return Length(int(self.prompts[index]), tuple(self.answers[start:end].tolist()))

    @property
    def longest(self) -> NDArray[np.int64]:
        """Tokens of the longest sequence of each."""
        answers = np.zeros(len(self), np.int64)
        np.maximum.at(answers, np.repeat(np.arange(len(self)), self.counts), self.answers)
        return self.prompts + answers

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences: a prompt once for each of its answers, and at least once."""
        prompts = self.prompts.astype(np.int64) * np.maximum(1, self.counts)
        return int(prompts.sum() + self.answers.sum(dtype=np.int64))


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What the audit compares examples by: the columns of ``FACTS``."""

    columns: Mapping[str, Array]
    origins: Origins

    def __len__(self) -> int:
        return len(self.origins)

    def with_flag(self, flag: int) -> NDArray[np.int64]:
        """Indices of the examples that have a flag."""
        return np.flatnonzero(self.columns["flags"] & flag)


class Parts(LazySequence[Example]):
    """The examples that took the place of conversations, one for each assistant turn.

    split: indices of these conversations among the examples; counts: how many each became.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        split: Array,
        counts: Array,
        divide: Callable[[Any], Sequence[Example]],
    ) -> None:
        self._examples, self._split, self._divide = examples, split, divide
        self._first = offsets(counts)

    def __len__(self) -> int:
        return int(self._first[-1])

    def item(self, index: int) -> Example:
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        example = self._examples[int(self._split[number])]
        return self._divide(example)[index - int(self._first[number])]


@dataclass(frozen=True, slots=True)
class EncodedSet:
    """All units in the order of their examples, and what happened on the way.

    ``notes``: name of a remark -> the rows it was made on (see ``Encoder``). ``lengths``: one for
    every example that could be tokenised, so also for those that were then dropped or cut.
    ``parts``: the examples that took the place of conversations which were split into one for each
    assistant turn.
    """

    units: TokenizedDataset
    unusable: tuple[Unusable, ...]
    notes: Mapping[str, Origins]
    lengths: Lengths
    facts: RowFacts = field(compare=False)
    parts: Sequence[Example] = ()


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """What encoding made of consecutive examples, as columns: see ``ALL_COLUMNS``."""

    columns: Mapping[str, Array]
    names: Mapping[str, Sequence[Any]]
    unusable: Sequence[Unusable]
    num_examples: int


class EncodedColumns:
    """Collects what encoding makes of consecutive examples."""

    def __init__(self) -> None:
        self._units = TokenizedColumns()
        self._values: dict[str, list[Any]] = {name: [] for name in FACTS | LENGTHS | NOTES}
        self._notes = Names()
        self._unusable: list[Unusable] = []
        self._num_examples = 0

    def add(
        self,
        example: Example,
        results: Sequence[TokenizedExample | Unusable],
        notes: Sequence[str],
        lengths: Sequence[Length],
        num_parts: int = 0,
    ) -> None:
        """``num_parts``: examples that a conversation was divided into; 0 if it was not."""
        values, index = self._values, self._num_examples
        self._num_examples += 1
        self._add_facts(example)
        for result in results:
            if isinstance(result, Unusable):
                self._unusable.append(result)
            else:
                self._units.add(result)
        for note in notes:
            values["note"].append(self._notes.number(note))
            values["noted"].append(index)
        for length in lengths:
            values["prompt_length"].append(length.prompt)
            values["num_lengths"].append(len(length.answers))
            values["answer_length"] += length.answers
        if num_parts:
            values["split"].append(index)
            values["num_parts"].append(num_parts)

    def _add_facts(self, example: Example) -> None:
        verdict = verdict_of(example)
        flags = TEXT_PROMPT * isinstance(example.prompt, str)
        flags |= CHAT_PROMPT * isinstance(example.prompt, Chat)
        if isinstance(example, Preference):
            flags |= EQUAL_SIDES * (example.chosen == example.rejected)
        if isinstance(example, Ranking):
            flags |= TIED_SCORES * (len(set(example.scores)) == 1)
        facts = {
            "row_id": int(example.id, 16),
            "row_path": self._units.names["files"].number(example.origin.path),
            "row_line": example.origin.line,
            "prompt_id": int(content_id(example.prompt), 16),
            "verdict_id": 0 if verdict is None else int(verdict[0], 16),
            "verdict": -1 if verdict is None else int(verdict[1]),
            "flags": flags,
        }
        for name, value in facts.items():
            self._values[name].append(value)

    def chunk(self) -> EncodedChunk:
        own = FACTS | LENGTHS | NOTES
        columns = {name: np.array(self._values[name], dtype) for name, dtype in own.items()}
        names = {name: each.names for name, each in self._units.names.items()}
        return EncodedChunk(
            self._units.arrays() | columns,
            names | {"notes": self._notes.names},
            self._unusable,
            self._num_examples,
        )


def verdict_of(example: Example) -> tuple[str, bool] | None:
    """What was judged, and which way."""
    if isinstance(example, Judgement) and example.label is not None:
        return content_id(example.prompt, example.completion), example.label
    if (
        isinstance(example, Preference)
        and example.chosen != example.rejected
        and example.soft != 0.5
    ):
        chosen, rejected = content_id(example.chosen), content_id(example.rejected)
        better = (chosen < rejected) is (example.soft is None or example.soft > 0.5)
        return content_id(example.prompt, *sorted((chosen, rejected))), better
    return None
