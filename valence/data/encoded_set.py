"""Results of encoding examples: tokens, unusable rows, notes, and columns for the audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valence.data.tokenized_dataset import (
    DTYPES,
    NAME_LISTS,
    Array,
    DatasetBuilder,
    LazySequence,
    NameTable,
    Origins,
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

AUDIT_DTYPES = {
    "row_id": np.uint64, "row_path": np.int32, "row_line": np.int64, "prompt_id": np.uint64,
    "rated_id": np.uint64, "rating": np.int8, "flags": np.uint8,
}  # fmt: skip
"""Columns with one value per example, including unusable examples.

``row_id``, ``prompt_id``: content ids of the example and of its prompt. ``rated_id``, ``rating``:
see ``rated_content``; ``rating`` is 1 for True, 0 for False, -1 for None.
"""
EQUAL_SIDES, TIED_SCORES, TEXT_PROMPT, CHAT_PROMPT, CONTRADICTED = 1, 2, 4, 8, 16
LENGTH_DTYPES = {"prompt_length": np.int32, "num_lengths": np.int32, "answer_length": np.int32}
"""Lengths of each example that could be tokenized, before ``long_rows`` is applied.

``num_lengths``: number of its answers, which are concatenated in ``answer_length``.
"""
NOTE_DTYPES = {
    "note": np.int32, "note_example": np.int64, "conversation": np.int64, "num_turns": np.int32,
}  # fmt: skip
"""``note``, ``note_example``: index of a note's name, and of the example that it is about.
``conversation``: index of each conversation that was divided into ``num_turns`` examples.
"""
ALL_DTYPES = DTYPES | AUDIT_DTYPES | LENGTH_DTYPES | NOTE_DTYPES
ALL_NAME_LISTS = NAME_LISTS | {"row_path": "files", "note": "notes"}
EXAMPLE_INDICES = ("note_example", "conversation")
"""Columns that contain indices of examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unusable:
    """An example that cannot be trained on.

    ``dropped``: it is too long, and the recipe drops long rows; otherwise the row is bad. ``kind``:
    a short stable name of the reason (``too_long``, ``not_a_prefix``, ``empty_answer``, ...).
    """

    origin: Origin
    kind: str
    reason: str
    fix: str | None = None
    dropped: bool = False
    source: str = ""

    @property
    def code(self) -> str:
        """The code of the UserError for this row."""
        return row_code(self.kind)


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of an example's prompt and of each answer, before ``long_rows`` is applied."""

    prompt: int
    answers: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: the prompt with its longest answer."""
        return self.prompt + max(self.answers, default=0)


class Lengths(LazySequence[Length]):
    """Lengths of all examples that could be tokenized.

    prompts[n]: length of each prompt. counts[n]: number of answers of each example. answers:
    lengths of all answers, concatenated.
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
        """Tokens of the longest sequence of each example."""
        answers = np.zeros(len(self), np.int64)
        np.maximum.at(answers, np.repeat(np.arange(len(self)), self.counts), self.answers)
        return self.prompts + answers

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences. A prompt counts once per answer, and at least once."""
        prompts = self.prompts.astype(np.int64) * np.maximum(1, self.counts)
        return int(prompts.sum() + self.answers.sum(dtype=np.int64))


@dataclass(frozen=True, slots=True)
class AuditColumns:
    """The columns by which the audit compares examples: see ``AUDIT_DTYPES``."""

    columns: Mapping[str, Array]
    origins: Origins

    def __len__(self) -> int:
        return len(self.origins)

    def indices_with_flag(self, flag: int) -> NDArray[np.int64]:
        """Indices of the examples with a flag."""
        return np.flatnonzero(self.columns["flags"] & flag)


class TurnExamples(LazySequence[Example]):
    """The examples that replace conversations, one per assistant turn.

    conversations: indices of these conversations in ``examples``. counts: number of examples that
    ``divide`` returns for each.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        conversations: Array,
        counts: Array,
        divide: Callable[[Any], Sequence[Example]],
    ) -> None:
        self._examples, self._conversations, self._divide = examples, conversations, divide
        self._first = offsets(counts)

    def __len__(self) -> int:
        return int(self._first[-1])

    def item(self, index: int) -> Example:
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        example = self._examples[int(self._conversations[number])]
        return self._divide(example)[index - int(self._first[number])]


@dataclass(frozen=True, slots=True)
class EncodedSet:
    """The tokenized examples in the order of their examples, and what was found on the way.

    ``notes``: name of a note -> the rows that it is about (see ``Encoder``). ``lengths``: one for
    every example that could be tokenized, including those that were then dropped or truncated.
    ``turn_examples``: the examples that replace conversations, one per assistant turn.
    """

    units: TokenizedDataset
    unusable: tuple[Unusable, ...]
    notes: Mapping[str, Origins]
    lengths: Lengths
    audit_columns: AuditColumns = field(compare=False)
    turn_examples: Sequence[Example] = ()


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """The results of encoding consecutive examples, as columns: see ``ALL_DTYPES``."""

    columns: Mapping[str, Array]
    names: Mapping[str, Sequence[Any]]
    unusable: Sequence[Unusable]
    num_examples: int


class EncodedChunkBuilder:
    """Collects the results of encoding consecutive examples."""

    def __init__(self) -> None:
        self._dataset = DatasetBuilder()
        self._values: dict[str, list[Any]] = {
            name: [] for name in AUDIT_DTYPES | LENGTH_DTYPES | NOTE_DTYPES
        }
        self._notes = NameTable()
        self._unusable: list[Unusable] = []
        self._num_examples = 0

    def add(
        self,
        example: Example,
        results: Sequence[TokenizedExample | Unusable],
        notes: Sequence[str],
        lengths: Sequence[Length],
        num_turns: int = 0,
    ) -> None:
        """``num_turns``: number of examples that replace a conversation; 0 if it is not divided."""
        values, index = self._values, self._num_examples
        self._num_examples += 1
        self._add_audit_columns(example)
        for result in results:
            if isinstance(result, Unusable):
                self._unusable.append(result)
            else:
                self._dataset.add(result)
        for note in notes:
            values["note"].append(self._notes.number(note))
            values["note_example"].append(index)
        for length in lengths:
            values["prompt_length"].append(length.prompt)
            values["num_lengths"].append(len(length.answers))
            values["answer_length"] += length.answers
        if num_turns:
            values["conversation"].append(index)
            values["num_turns"].append(num_turns)

    def _add_audit_columns(self, example: Example) -> None:
        rated = rated_content(example)
        is_chat = isinstance(example.prompt, Chat)
        is_transcript = isinstance(example.prompt, Chat) and example.prompt.transcript is not None
        flags = TEXT_PROMPT * (isinstance(example.prompt, str) or is_transcript)
        flags |= CHAT_PROMPT * (is_chat and not is_transcript)
        if isinstance(example, Preference):
            flags |= EQUAL_SIDES * (example.chosen == example.rejected)
            flags |= CONTRADICTED * example.is_contradicted
        if isinstance(example, Ranking):
            flags |= TIED_SCORES * (len(set(example.scores)) == 1)
        values = {
            "row_id": int(example.id, 16),
            "row_path": self._dataset.tables["files"].number(example.origin.path),
            "row_line": example.origin.line,
            "prompt_id": int(content_id(example.prompt), 16),
            "rated_id": 0 if rated is None else int(rated[0], 16),
            "rating": -1 if rated is None else int(rated[1]),
            "flags": flags,
        }
        for name, value in values.items():
            self._values[name].append(value)

    def chunk(self) -> EncodedChunk:
        dtypes = AUDIT_DTYPES | LENGTH_DTYPES | NOTE_DTYPES
        columns = {name: np.array(self._values[name], dtype) for name, dtype in dtypes.items()}
        return EncodedChunk(
            self._dataset.arrays() | columns,
            self._dataset.name_lists | {"notes": self._notes.names},
            self._unusable,
            self._num_examples,
        )


def rated_content(example: Example) -> tuple[str, bool] | None:
    """Content id of the rated content of an example, and whether the rating is positive.

    For a pair, the content is independent of the order of its sides, and the rating says whether
    the side with the smaller content id is better. None for an example without a binary rating.
    """
    if isinstance(example, Judgement) and example.label is not None:
        return content_id(example.prompt, example.completion), example.label
    if (
        isinstance(example, Preference)
        and example.chosen != example.rejected
        and example.soft != 0.5
    ):
        chosen, rejected = content_id(example.chosen), content_id(example.rejected)
        is_first = (chosen < rejected) is (example.soft is None or example.soft > 0.5)
        return content_id(example.prompt, *sorted((chosen, rejected))), is_first
    return None
