"""Score the completions of rows with a model: log-probabilities and implicit rewards, one added
column per row, to inspect and clean data.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from valence.batching.micro_batches import StepPacker
from valence.config.load import LISTS
from valence.config.schema import Recipe, SourceSettings
from valence.data.detect import COLUMNS
from valence.data.encode import Encoder
from valence.data.load import stream
from valence.data.sources import BadRow, Row
from valence.distributed.process_group import Group, check_ranks_agree, gather_objects
from valence.errors import UserError
from valence.jobs.row_job import Line, RowJob, Tally, as_line
from valence.options import ScoreOptions
from valence.reports.run_record import is_run
from valence.targets import with_files, without_rows
from valence.training.prepare import prepare
from valence.training.scorers import CompletionScorer, Numbers, load_scorer
from valence.types import Example, Preference, Prompt, TokenizedExample, content_id

WINDOW = 32
"""Rows that are read, scored and written together."""
TOKENS = 8192
"""Default number of tokens per forward pass."""
NOT_FINITE = "check the row; if it is correct, add --dtype float32"

Pair = tuple[Row | BadRow, Example | BadRow]


def score_rows(
    target: str,
    options: ScoreOptions,
    *,
    overrides: Sequence[str] = (),
    console: Console | None = None,
    group: Group | None = None,
) -> Tally:
    """Write every row of ``options.data`` with a model's scores of its completions to
    ``options.out``, as JSON Lines in the order of the rows.

    target: a model's folder or hub id, an adapter's folder, a run's folder (its newest weights and
    its reference), or a recipe (its initial model). overrides: settings below model, reference and
    data. group: processes that score a share each; rank 0 writes.

    Raises UserError for invalid arguments, and when no row can be scored.
    """
    assert options.out is not None
    overrides = [*overrides, *options.settings]
    source = with_files(target, options.data, overrides, format=options.format)
    sources = source.recipe.data.files("eval")
    paths = [s.path for s in sources]
    with RowJob(
        options.out, paths, window=WINDOW, fresh=options.fresh, console=console, group=group
    ) as job:
        num_rows, digest = _check_rows(sources, options.column)
        source = without_rows(source)
        encoder = prepare(source, rewards=False).encoder
        job.check_facts(
            {
                "data": [s.model_dump(mode="json", exclude_defaults=True) for s in sources],
                "column": options.column,
                **token_facts(source.recipe, encoder),
                "window": WINDOW,
            }
        )
        job.print_status(f"{num_rows:,} rows; loading and checking {target}")
        no_rows = [f"data.{name}=[]" for name in LISTS]
        scorer = load_scorer(
            source,
            encoder.tokenizer,
            beta=options.beta,
            run=Path(target) if is_run(target) else None,
            overrides=[*overrides, *no_rows, "reference.cache=off"],
        )
        check_ranks_agree(
            job.group,
            lambda: {"file of rows": digest, "model": scorer.facts},
            "let all processes read the same files, for example on a shared disk",
        )
        job.check_facts(scorer.facts)
        default = source.recipe.train.micro_batch_tokens
        budget = options.tokens or (default if isinstance(default, int) else TOKENS)
        tally = job.run(
            ScoreTransform(encoder, scorer, budget, options.column, job.group),
            chain.from_iterable(map(stream, sources)),
            num_rows,
            "scoring",
            {"model": target, "reference": source.recipe.reference.model},
        )
    job.report_scores(tally)
    return tally


def _check_rows(sources: Sequence[SourceSettings], column: str) -> tuple[int, str]:
    """The number of rows, and a digest of them.

    Raises UserError for a file that cannot be scored, and for a column that exists already.
    """
    if column in COLUMNS:
        raise UserError(
            f"{column!r} cannot be the added column, because rows of some formats have a column "
            "of this name",
            code="column-reserved",
            where="--column",
            fix="choose another --column",
        )
    num_rows, digest = 0, hashlib.sha256()
    for row, example in chain.from_iterable(map(stream, sources)):
        num_rows += 1
        digest.update(repr(row).encode(errors="backslashreplace"))
        if isinstance(row, Row) and column in row.value:
            raise UserError(
                f"the row already has a column {column!r}",
                code="row-column-taken",
                where=str(row.origin),
                fix="choose another name with --column",
            )
        if isinstance(example, Prompt):
            raise UserError(
                "the rows are prompts without completions to score",
                code="row-not-scorable",
                where=str(example.origin),
                fix="set the column of the completions: --data '{path: FILE, keys: "
                "{completion: COLUMN}}'",
            )
    return num_rows, digest.hexdigest()


def token_facts(recipe: Recipe, encoder: Encoder) -> dict[str, Any]:
    """Everything that decides which tokens a row becomes."""
    data = recipe.data
    return {
        "max_length": data.max_length,
        "long_rows": data.long_rows,
        "train_on": data.train_on,
        "as_chat": encoder.as_chat,
        "chat_template_kwargs": data.chat_template_kwargs,
        "tokenizer": content_id(
            encoder.vocab.tokenizer_digest, encoder.tokenizer.chat_template, encoder.stop_ids
        ),
    }


class ScoreTransform:
    """Adds a column to each row: id and origin, and the scores of its completions or an error. A
    row that cannot be written as JSON is replaced by its error.
    """

    def __init__(
        self, encoder: Encoder, scorer: CompletionScorer, tokens: int, column: str, group: Group
    ) -> None:
        self.encoder, self.scorer, self.tokens = encoder, scorer, tokens
        self.column, self.group = column, group
        self.num_tokens: int | None = 0

    def compute(self, batch: Sequence[Pair], advance: Callable[[int], None]) -> list[Line]:
        """Tokenize the rows, score their tokens packed, and add the column."""
        # one at a time: origins do not identify rows if a line has several
        encoded = [
            None if isinstance(example, BadRow) else self.encoder.encode_all([example])
            for _, example in batch
        ]
        # a conversation may be split into several units
        row_of_unit = [i for i, rows in enumerate(encoded) if rows for _ in rows.units]
        units = [unit for rows in encoded if rows for unit in rows.units]
        advance(len(batch) - len(set(row_of_unit)))
        numbers: list[list[Numbers]] = [[] for _ in batch]
        for unit, scores in self._score(units, advance):  # the sides of a unit are in order
            numbers[row_of_unit[unit]].append(scores)
        return [
            self._line(row, example, rows, scores)
            for (row, example), rows, scores in zip(batch, encoded, numbers, strict=True)
        ]

    def _score(
        self, units: Sequence[TokenizedExample], advance: Callable[[int], None]
    ) -> list[tuple[int, Numbers]]:
        """The scores of all completions, with the index of their unit. Each process runs a share
        of the micro-batches.
        """
        local: list[tuple[int, Numbers]] = []
        packer = StepPacker(units, device=self.scorer.device)
        packed = packer.pack(packer.example_indices, self.tokens)
        for indices in packed[self.group.rank :: self.group.size]:
            batch = packer.micro_batch(indices)
            try:
                scores = self.scorer(batch)
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"out of memory with {len(batch.tokens)} tokens per forward pass",
                    code="out-of-memory",
                    where=str(units[indices[0]].origin),
                    fix="lower --tokens, then rerun the same command to resume",
                ) from error
            local += zip(batch.unit.tolist(), scores, strict=True)
            self.num_tokens = (self.num_tokens or 0) + len(batch.tokens)
            advance(len(indices))
        return [entry for share in gather_objects(self.group, local) for entry in share]

    def _line(
        self, row: Row | BadRow, example: Example | BadRow, rows: Any, numbers: list[Numbers]
    ) -> Line:
        about: dict[str, Any] = {"origin": str(row.origin)}
        if not isinstance(example, BadRow):
            about["id"] = example.id
        if not isinstance(row, BadRow):
            try:
                as_line(row.value)
            except ValueError as error:
                reason = f"the row cannot be written as JSON ({error})"
                return about | {"error": reason, "fix": "correct the row"}
        if isinstance(example, BadRow):
            content = about | {"error": example.reason, "fix": example.fix}
        elif rows.unusable:
            content = about | {"error": rows.unusable[0].reason, "fix": rows.unusable[0].fix}
        elif not all(map(_is_finite, numbers)):
            content = about | {"error": "a score of the row is not finite", "fix": NOT_FINITE}
        else:
            is_pair = isinstance(example, Preference)
            names = ("chosen", "rejected") if is_pair else ("completion",) * len(numbers)
            answers = [
                {"answer": name, **_round(scores)}
                for name, scores in zip(names, numbers, strict=True)
            ]
            notes = {"notes": list(rows.notes)} if rows.notes else {}
            content = {"id": example.id, "origin": about["origin"], "answers": answers, **notes}
        return content if isinstance(row, BadRow) else {**row.value, self.column: content}

    def origin(self, item: Pair) -> str:
        return str(item[0].origin)

    def is_valid(self, line: Line, index: int) -> bool:
        content = line.get(self.column, line)
        if not isinstance(content, dict) or not isinstance(content.get("origin"), str):
            return False
        is_scored = content is not line and isinstance(content.get("answers"), list)
        return is_scored or content.keys() - {"id"} == {"origin", "error", "fix"}

    def is_line_of(self, line: Line, item: Pair) -> bool:
        content, (row, example) = line.get(self.column, line), item
        row_id = None if isinstance(example, BadRow) else example.id
        return (content["origin"], content.get("id")) == (str(row.origin), row_id)

    def error_in(self, line: Line) -> str | None:
        return line.get(self.column, line).get("error")


def _round(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _round(part) for name, part in value.items()}
    return round(value, 6)


def _is_finite(value: Any) -> bool:
    return all(map(_is_finite, value.values())) if isinstance(value, dict) else math.isfinite(value)
