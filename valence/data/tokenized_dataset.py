"""Tokenized examples as flat arrays: 5 bytes per token and about 100 bytes per example.

A ``TokenizedExample`` has tuples of Python integers, which take ten times as much memory. It is
created when it is read, so only the examples of a step are in memory in that form.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar, get_args, overload

import numpy as np
from numpy.typing import NDArray

from valence.types import Kind, Origin, TokenizedCompletion, TokenizedExample

Array = NDArray[Any]
T = TypeVar("T")

KINDS: tuple[Kind, ...] = get_args(Kind)

EXAMPLE_DTYPES = {
    "id": np.uint64, "path": np.int32, "line": np.int64, "source": np.int32, "kind": np.int8,
    "label": np.int8, "margin": np.float64, "soft": np.float64, "weight": np.float64,
    "num_answers": np.int32, "num_scores": np.int32, "num_attributes": np.int32,
    "margin_is_int": np.bool_, "soft_is_int": np.bool_, "has_teacher": np.bool_,
    "fingerprint": np.int64,
}  # fmt: skip
"""Columns with one value per example.

``path``, ``source``: indices into the file names. ``label``: 1 for True, 0 for False, -1 for None.
``soft``: NaN for None. ``*_is_int``: whether the value was a Python integer, because fingerprints
differ for 1 and 1.0. ``has_teacher``: whether the last part is the prompt of a teacher.
"""
PART_DTYPES = {
    "num_tokens": np.int32, "num_trained": np.int32, "digest": np.uint64, "complete": np.bool_,
    "ends_trained": np.bool_, "column_names": np.int32,
}  # fmt: skip
"""Columns with one value per part of an example. The parts are its prompt, then its answers, then
the prompt of its teacher if it has one.

``num_trained``: number of tokens in the loss mask. ``digest``: hash of the tokens.
``ends_trained``: whether the last token is in the loss mask. ``column_names``: index of the tuple
of names of its token columns.
"""
TOKEN_DTYPES = {"tokens": np.int32, "mask": np.bool_}
RAGGED_DTYPES = {
    "scores": np.float64, "attribute": np.int32, "attribute_scores": np.float64,
    "token_columns": np.float64, "score_is_int": np.bool_, "attribute_is_int": np.bool_,
}  # fmt: skip
"""Columns with any number of values per example, concatenated for all examples.

``token_columns``: for each part, all values of its first token column, then of the next one.
"""
DTYPES = EXAMPLE_DTYPES | PART_DTYPES | TOKEN_DTYPES | RAGGED_DTYPES
NAME_LISTS = {
    "path": "files",
    "source": "files",
    "attribute": "attributes",
    "column_names": "columns",
}
"""Columns that contain indices of names -> the list of these names."""


class NameTable:
    """Numbers names consecutively, in the order of their first use."""

    def __init__(self, names: Iterable[Any] = ()) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}

    def number(self, name: Any) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    @property
    def names(self) -> list[Any]:
        return list(self._numbers)


class LazySequence(Sequence[T]):
    """A sequence that creates an item when it is read. It equals any sequence of equal items."""

    def item(self, index: int) -> T:
        """The item at an index from 0."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self.item(i) for i in range(len(self))[index])
        return self.item(range(len(self))[index])

    def __iter__(self) -> Iterator[T]:
        return (self.item(i) for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(
            a == b
            for a, b in zip(self, other, strict=True)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Origins(LazySequence[Origin]):
    """The file and line of each row. path[n]: index of the file in ``files``; line[n]."""

    def __init__(self, files: Sequence[str], path: Array, line: Array) -> None:
        self.files, self.path, self.line = files, path, line

    def __len__(self) -> int:
        return len(self.path)

    def item(self, index: int) -> Origin:
        return Origin(self.files[int(self.path.item(index))], self.line.item(index))

    def select(self, indices: Array) -> Origins:
        return Origins(self.files, self.path[indices], self.line[indices])

    def isin(self, origins: Origins) -> NDArray[np.bool_]:
        """Whether each origin is one of ``origins``, which must have the same list of files."""
        pairs = np.concatenate(
            [np.stack([rows.path, rows.line], axis=1, dtype=np.int64) for rows in (self, origins)]
        )
        _, indices = np.unique(pairs, axis=0, return_inverse=True)
        indices = indices.reshape(-1)
        return np.isin(indices[: len(self)], indices[len(self) :])


def token_digest(ids: Sequence[int]) -> int:
    """64-bit hash of token ids."""
    return int.from_bytes(hashlib.blake2b(array("i", ids), digest_size=8).digest(), "little")


def fingerprint(unit: TokenizedExample) -> int:
    """64-bit hash of everything that training reads of a row: tokens, masks, labels and weight.

    Run folders store these hashes, so the definition must not change.
    """
    digest = hashlib.blake2b(digest_size=8)
    for ids, mask in (
        (unit.prompt_ids, unit.prompt_mask),
        *((answer.ids, answer.mask) for answer in unit.answers),
    ):
        digest.update(array("q", ids).tobytes() + b"|" + bytes(mask) + b"|")
    columns = tuple(answer.columns for answer in unit.answers)
    rest = (
        unit.id,
        unit.kind,
        unit.label,
        unit.scores,
        unit.attributes,
        unit.margin,
        unit.soft,
        unit.weight,
    )
    digest.update(repr((*rest, columns) if any(columns) else rest).encode())
    if unit.teacher_ids:
        digest.update(array("q", unit.teacher_ids).tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


class DatasetBuilder:
    """Collects tokenized examples as columns."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {name: [] for name in DTYPES}
        self.tables = {name: NameTable() for name in {*NAME_LISTS.values()}}

    def add(self, unit: TokenizedExample) -> None:
        add, number = self._add, self._number
        add("id", int(unit.id, 16))
        add("path", number("path", unit.origin.path))
        add("line", unit.origin.line)
        add("source", number("source", unit.source))
        add("kind", KINDS.index(unit.kind))
        add("label", -1 if unit.label is None else int(unit.label))
        add("margin", unit.margin)
        add("soft", np.nan if unit.soft is None else unit.soft)
        add("weight", unit.weight)
        add("margin_is_int", isinstance(unit.margin, int))
        add("soft_is_int", isinstance(unit.soft, int))
        add("has_teacher", bool(unit.teacher_ids))
        add("fingerprint", fingerprint(unit))
        add("num_answers", len(unit.answers))
        add("num_scores", len(unit.scores))
        add("num_attributes", len(unit.attributes))
        for score in unit.scores:
            add("scores", score)
            add("score_is_int", isinstance(score, int))
        for name, score in unit.attributes:
            add("attribute", number("attribute", name))
            add("attribute_scores", score)
            add("attribute_is_int", isinstance(score, int))
        self._add_part(TokenizedCompletion(unit.prompt_ids, unit.prompt_mask))
        for answer in unit.answers:
            self._add_part(answer)
        if unit.teacher_ids:
            self._add_part(_as_part(unit.teacher_ids))

    def _add_part(self, part: TokenizedCompletion) -> None:
        self._add("num_tokens", len(part.ids))
        self._add("num_trained", sum(part.mask))
        self._add("digest", token_digest(part.ids))
        self._add("complete", part.complete)
        self._add("ends_trained", bool(part.mask) and part.mask[-1])
        names = tuple(name for name, _ in part.columns)
        self._add("column_names", self._number("column_names", names))
        self.values["tokens"] += part.ids
        self.values["mask"] += part.mask
        for _, values in part.columns:
            self.values["token_columns"] += values

    def _add(self, name: str, value: object) -> None:
        self.values[name].append(value)

    def _number(self, column: str, name: object) -> int:
        return self.tables[NAME_LISTS[column]].number(name)

    @property
    def name_lists(self) -> dict[str, list[Any]]:
        return {name: table.names for name, table in self.tables.items()}

    def arrays(self) -> dict[str, Array]:
        return {name: np.array(self.values[name], dtype) for name, dtype in DTYPES.items()}


def _as_part(prompt: tuple[int, ...]) -> TokenizedCompletion:
    """A prompt that is not trained on, as a part of an example."""
    return TokenizedCompletion(prompt, (False,) * len(prompt))


def build_dataset(units: Iterable[TokenizedExample]) -> TokenizedDataset:
    """Store these examples in arrays. Their ids must be hexadecimal numbers."""
    builder = DatasetBuilder()
    for unit in units:
        builder.add(unit)
    return TokenizedDataset(builder.arrays(), builder.name_lists)


def offsets(counts: Array) -> NDArray[np.int64]:
    """Start of each of consecutive groups of these sizes, then the end of the last group."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


class TokenizedDataset(LazySequence[TokenizedExample]):
    """Tokenized examples in arrays. columns: see ``DTYPES``. names: the lists of ``NAME_LISTS``."""

    def __init__(self, columns: Mapping[str, Array], names: Mapping[str, Sequence[Any]]) -> None:
        self.columns, self.names = columns, names
        self._first_part = offsets(columns["num_answers"] + 1 + columns["has_teacher"])
        self._first_token = offsets(columns["num_tokens"])
        self._first_score = offsets(columns["num_scores"])
        self._first_attribute = offsets(columns["num_attributes"])

    @cached_property
    def _first_value(self) -> NDArray[np.int64]:
        """Index in ``token_columns`` where each part starts."""
        num_names = np.array([len(names) for names in self.names["columns"]], np.int64)
        columns = self.columns
        if not num_names.any():
            return np.zeros(len(columns["num_tokens"]) + 1, np.int64)
        return offsets(columns["num_tokens"] * num_names[columns["column_names"]])

    def __len__(self) -> int:
        return len(self.columns["id"])

    def item(self, index: int) -> TokenizedExample:
        kind, label, margin, soft, weight, source, has_scores, has_attributes, content = (
            read(index) for read in self._readers
        )
        prompt, *answers = self._parts(index)
        columns = self.columns
        teacher = answers.pop().ids if columns["has_teacher"][index] else ()
        return TokenizedExample(
            id=f"{content:016x}",
            origin=self.origins.item(index),
            kind=KINDS[kind],
            prompt_ids=prompt.ids,
            prompt_mask=prompt.mask,
            answers=tuple(answers),
            label=None if label < 0 else bool(label),
            scores=self._scores(index) if has_scores else (),
            attributes=self._attributes(index) if has_attributes else (),
            margin=int(margin) if columns["margin_is_int"][index] else margin,
            soft=None if soft != soft else int(soft) if columns["soft_is_int"][index] else soft,
            weight=weight,
            source=self.names["files"][source],
            teacher_ids=teacher,
        )

    @cached_property
    def _readers(self) -> list[Callable[[int], Any]]:
        """Functions that read a value of an example as a Python number."""
        names = ("kind", "label", "margin", "soft", "weight", "source", "num_scores",
                 "num_attributes", "id")  # fmt: skip
        return [self.columns[name].item for name in names]

    def _parts(self, index: int) -> list[TokenizedCompletion]:
        """The prompt, the answers, and the teacher's prompt of an example."""
        columns, parts = self.columns, list[TokenizedCompletion]()
        first, last = self._first_part.item(index), self._first_part.item(index + 1)
        start = self._first_token.item(first)
        for part in range(first, last):
            end = self._first_token.item(part + 1)
            num_trained = columns["num_trained"].item(part)
            if num_trained in (0, end - start):
                mask = (num_trained > 0,) * (end - start)
            else:
                mask = tuple(columns["mask"][start:end].tolist())
            names = self.names["columns"][columns["column_names"].item(part)]
            parts.append(
                TokenizedCompletion(
                    tuple(columns["tokens"][start:end].tolist()),
                    mask,
                    columns["complete"].item(part),
                    self._token_columns(part, names) if names else (),
                )
            )
            start = end
        return parts

    def _scores(self, index: int) -> tuple[float, ...]:
        start, end = self._first_score[index : index + 2].tolist()
        columns = self.columns
        return _numbers(columns["scores"][start:end], columns["score_is_int"][start:end])

    def _token_columns(
        self, part: int, names: Sequence[str]
    ) -> tuple[tuple[str, tuple[float, ...]], ...]:
        start, end = self._first_value[part : part + 2].tolist()
        table = self.columns["token_columns"][start:end].reshape(len(names), -1)
        return tuple(
            (name, tuple(values.tolist())) for name, values in zip(names, table, strict=True)
        )

    def _attributes(self, index: int) -> tuple[tuple[str, float], ...]:
        start, end = self._first_attribute[index : index + 2].tolist()
        columns, names = self.columns, self.names["attributes"]
        numbers = _numbers(
            columns["attribute_scores"][start:end], columns["attribute_is_int"][start:end]
        )
        names = [names[number] for number in columns["attribute"][start:end]]
        return tuple(zip(names, numbers, strict=True))

    # Columns

    @cached_property
    def origins(self) -> Origins:
        return Origins(self.names["files"], self.columns["path"], self.columns["line"])

    @property
    def ids(self) -> Iterator[str]:
        """Content ids."""
        return (f"{number:016x}" for number in self.columns["id"].tolist())

    def has_kind(self, kind: Kind) -> NDArray[np.bool_]:
        """Whether each example has this kind."""
        return self.columns["kind"] == KINDS.index(kind)

    @property
    def is_answer(self) -> NDArray[np.bool_]:
        """Whether each part is an answer."""
        is_answer = np.ones(len(self.columns["num_tokens"]), np.bool_)
        is_answer[self._first_part[:-1]] = False
        is_answer[self._first_part[1:][self.columns["has_teacher"]] - 1] = False
        return is_answer

    @property
    def answer_examples(self) -> NDArray[np.int64]:
        """Index of the example of each answer."""
        return np.repeat(np.arange(len(self)), self.columns["num_answers"])

    @property
    def answer_classes(self) -> NDArray[np.str_]:
        """The class of each answer: chosen, rejected, up, down, or all."""
        examples = self.answer_examples
        is_first, label = np.diff(examples, prepend=-1) != 0, self.columns["label"][examples]
        is_pair = self.has_kind("preference")[examples]
        is_judgement = self.has_kind("judgement")[examples]
        return np.select(
            [is_pair & is_first, is_pair, is_judgement & (label == 1), is_judgement & (label == 0)],
            ["chosen", "rejected", "up", "down"],
            "all",
        )  # fmt: skip

    def prompt_column(self, name: str) -> Array:
        """A column of the parts for prompts only: one value per example."""
        return self.columns[name][self._first_part[:-1]]

    def answer_column(self, name: str) -> Array:
        """A column of the parts for answers only: one value per answer."""
        return self.columns[name][self.is_answer]

    @property
    def last_tokens(self) -> set[int]:
        """The distinct last tokens of answers."""
        ends = self._first_token[1:][self.is_answer] - 1
        return set(np.unique(self.columns["tokens"][ends]).tolist())

    @property
    def num_sequence_tokens(self) -> NDArray[np.int64]:
        """Tokens of the sequences of each example, with the prompt counted once per answer."""
        answers = np.zeros(len(self), np.int64)
        np.add.at(answers, self.answer_examples, self.answer_column("num_tokens"))
        return answers + self.columns["num_answers"].astype(np.int64) * self.prompt_column(
            "num_tokens"
        )

    @property
    def longest_answer(self) -> NDArray[np.int64]:
        """Tokens of the longest answer of each example, 0 without answers."""
        longest = np.zeros(len(self), np.int64)
        np.maximum.at(longest, self.answer_examples, self.answer_column("num_tokens"))
        return longest

    @property
    def num_unique_tokens(self) -> NDArray[np.int64]:
        """Tokens of each example, with the prompt counted once."""
        return np.diff(self._first_token[self._first_part])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        starts = (self._first_part, self._first_token, self._first_score, self._first_attribute)
        return sum(array.nbytes for array in (*self.columns.values(), *starts))

    # Modified copies

    def with_scores(self, scores: Sequence[Sequence[float]]) -> TokenizedDataset:
        """The same examples with other scores."""
        values = [score for row in scores for score in row]
        flat = np.array(values, np.float64)
        is_int = np.fromiter((isinstance(score, int) for score in values), np.bool_, len(values))
        counts = np.array([len(row) for row in scores], np.int32)
        changed = {"scores": flat, "num_scores": counts, "score_is_int": is_int}
        return TokenizedDataset({**self.columns, **changed}, self.names)._with_fingerprints()

    def without_token_columns(self) -> TokenizedDataset:
        """The same examples without token columns."""
        changed = {
            "column_names": np.zeros_like(self.columns["column_names"]),
            "token_columns": np.zeros(0),
        }
        names = {**self.names, "columns": ((),)}
        return TokenizedDataset({**self.columns, **changed}, names)._with_fingerprints()

    def _with_fingerprints(self) -> TokenizedDataset:
        fingerprints = np.fromiter(map(fingerprint, self), np.int64, len(self))
        return TokenizedDataset({**self.columns, "fingerprint": fingerprints}, self.names)


def _numbers(values: Array, is_int: Array) -> tuple[float, ...]:
    numbers = values.tolist()
    if is_int.any():
        numbers = [int(n) if integer else n for n, integer in zip(numbers, is_int, strict=True)]
    return tuple(numbers)
