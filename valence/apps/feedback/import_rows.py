"""Import the votes of a feedback tool as training rows."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from valence.apps.feedback.import_store import (
    ImportStore,
    MergeCounts,
    as_date,
    merge_votes,
    vote_line,
)
from valence.data.audit import WeightAdvice, advised_weights
from valence.data.importers.records import (
    SKIP_REASONS,
    ReadOptions,
    Skipped,
    SkipReason,
    Vote,
    withdrawn_vote,
)
from valence.data.importers.rows import (
    KIND_OF,
    ROW_KINDS,
    ImportedRows,
    RowKind,
    agreement,
    make_rows,
    pairs_left_out,
)
from valence.data.importers.sources import (
    command_name,
    pull_votes,
    read_votes,
    source_name,
    source_of,
)
from valence.data.kind_names import METHOD_FOR, WORDS
from valence.errors import UserError, refuse_unused
from valence.jobs.row_job import refuse_inputs
from valence.options import ImportOptions, changed_options
from valence.terminal import Terminal, print_message
from valence.types import Origin

EVERY = 5.0
"""Seconds between messages about how many votes were read."""
SHOWN_MODELS = 10
"""Maximum number of models in the summary."""
EXAMPLE_LENGTH = 60
"""Maximum characters shown of a skipped item."""
FIXES: dict[SkipReason, str] = {
    "machine": "add --include-machine to import them",
    "other_model": "set --model to a model in the export, or remove --model",
    "before_since": "set --since to an earlier date",
    "no_conversation": "also pass the file that contains the conversations",
    "shape_unknown": "set the paths of prompt and completion with --prompt and --completion",
}
"""The fix if nothing was imported for a reason."""


@dataclass(frozen=True, slots=True)
class SkippedCount:
    """The number of items that were skipped for a reason, and the first of them."""

    count: int
    place: str
    example: str


@dataclass(frozen=True, slots=True)
class RowsFile:
    """A file of rows. command: writes a recipe that trains on it."""

    path: str
    kind: RowKind
    rows: int
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSummary:
    """The result of an import.

    votes: read now, each of which is in ``counts``; total: in all imports into the same --out.
    follow_ups: completions without a vote that were read because a user message follows. feedback:
    the number of rows of one completion, and of those with a label, with feedback, and with each
    part of it.
    skipped: by reason, most frequent first. models: how many of the votes that were read are on
    completions of each. from_date, to_date: of all votes. num_shared: completions or comparisons
    on which several raters voted; agreement: share of all pairs of their votes that agree.
    num_pairs_left_out: as in ``ImportedRows``.
    """

    source: str
    votes: int
    counts: MergeCounts
    total: int
    files: tuple[RowsFile, ...]
    votes_file: str
    skipped: Mapping[SkipReason, SkippedCount] = field(
        default_factory=dict[SkipReason, SkippedCount]
    )
    models: Mapping[str, int] = field(default_factory=dict[str, int])
    from_date: str | None = None
    to_date: str | None = None
    weights: WeightAdvice | None = None
    num_raters: int = 0
    num_shared: int = 0
    agreement: float | None = None
    num_pairs_left_out: int = 0
    follow_ups: int = 0
    feedback: Mapping[str, int] = field(default_factory=dict[str, int])

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings."""
        summary = asdict(self)
        if self.weights:
            summary["weights"]["advice"] = self.weights.remedy
        return summary


FEEDBACK_WORDS = {
    "comment": "a comment",
    "reasons": "reasons or tags",
    "correction": "a correction",
    "follow_up": "a follow-up",
}
"""Parts of the feedback of rows -> their names in the summary."""
CATEGORIES = {"up": True, "down": False}


def import_feedback(
    source: str,
    files: Sequence[str],
    options: ImportOptions,
    *,
    console: Console | None = None,
) -> ImportSummary:
    """Add the votes of an export to those of earlier imports into ``options.out``, and write their
    rows.

    ``out`` gets the rows of the source's main kind, and files next to it the other kinds; see
    ``ImportStore``. files: of the export.

    Raises UserError for invalid arguments, and if no vote can be used.
    """
    name, reading, url = source_name(source), _reading(options), options.url
    unlabelled = options.unlabelled or source_of(name).main == "unlabelled"
    console = console or Terminal()
    if bool(files) is bool(url):
        if files:
            problem, fix = "files and --url cannot be combined", "remove the files or --url"
        else:
            problem = "no exported files are named"
            fix = f"add the exported files: {source_of(name).files}"
            if source_of(name).is_pullable:
                fix += "; or add --url to read from the server"
        where = f"valence import {command_name(name)}"
        raise UserError(problem, code="import-input", where=where, fix=fix)
    if not url:
        fix = "add --url to read from the server"
        refuse_unused(changed_options(options, "token_env"), "without --url", fix)
    if options.complete and options.since is not None:
        raise UserError(
            "--since skips votes of the export, but --complete removes stored votes that are not "
            "read",
            code="option-conflict",
            where="--complete",
            fix="remove --since or --complete",
        )
    store = ImportStore(options.out, overwrite=options.overwrite)
    refuse_inputs(store.paths, files)
    with store.locked():
        count = _counter(console)
        sources: set[str] = {name}
        read: Iterable[Vote | Skipped] = _counted(read_votes(name, files, reading), count)
        if source_of(name).is_plugin and not url:  # its votes may name the tool otherwise
            read = list(read)
            sources = {item.source for item in read if isinstance(item, Vote)} or sources
        store.has_unlabelled |= unlabelled
        of_sources = [vote for vote in store.votes if vote.source in sources]
        start = _start(options.since, [vote for vote in of_sources if not vote.is_follow_up])
        if url:
            read = pull_votes(
                name, url, reading, start, token_env=options.token_env, progress=count
            )
        votes, skipped = _select_votes(read, start, options.model)
        stored = store.votes
        if options.complete or (url and not start and source_of(name).lists_all_votes):
            server = None
            if url and not options.complete:
                from valence.data.importers.pull import server_address

                server, _ = server_address(url)
            stored = _drop_absent(stored, sources, votes, skipped, server, follow_ups=unlabelled)
        num_absent = len(store.votes) - len(stored)
        withdrawals = [
            withdrawn_vote(source, item)
            for source in sorted(sources)
            for item in skipped
            if item.reason == "withdrawn" and item.vote_id
        ]
        merged, counts = merge_votes(stored, [*votes, *withdrawals])
        num_withdrawn = _num_verdicts(store.votes) - _num_verdicts(stored)
        counts = replace(counts, withdrawn=counts.withdrawn + num_withdrawn)
        imported = make_rows(merged, unlabelled=store.has_unlabelled)
        skipped += imported.unused
        is_up_to_date = bool(store.votes) and bool(
            withdrawals or num_absent or any(item.reason == "before_since" for item in skipped)
        )
        was_withdrawn = num_absent or not all(
            vote.has_verdict or vote.is_follow_up for vote in merged
        )
        if not (votes or is_up_to_date) or not (any(imported.rows.values()) or was_withdrawn):
            raise _nothing_imported(name, files, url, skipped)
        main = store.main or source_of(name).main
        if not store.main and not imported.rows[main] and imported.rows["unlabelled"]:
            main = "unlabelled"
        rows = store.write(merged, imported, main)
    merged = [vote for vote in merged if vote.has_verdict]
    times = [vote.updated_at for vote in merged if vote.updated_at]
    num_shared, agreeing = agreement(merged)
    labels = [row["label"] for row in imported.rows["thumbs"]]
    weights = advised_weights(labels.count(True), labels.count(False)) if labels else None
    num_follow_ups = sum(vote.is_follow_up for vote in votes)
    return ImportSummary(
        source=name,
        votes=len(votes) - num_follow_ups,
        counts=counts,
        total=len(merged),
        files=tuple(
            _rows_file(store.rows_path(kind, main), kind, rows, is_main=kind == main)
            for kind in sorted(ROW_KINDS, key=lambda kind: kind != main)
            if imported.rows[kind]
        ),
        votes_file=str(store.votes_path),
        skipped=_skipped_counts(skipped),
        models=dict(Counter(vote.model for vote in votes if vote.model).most_common()),
        from_date=as_date(min(times)) if times else None,
        to_date=as_date(max(times)) if times else None,
        weights=weights,
        num_raters=len({(vote.source, vote.rater) for vote in merged if vote.rater}),
        num_shared=num_shared,
        agreement=agreeing,
        num_pairs_left_out=imported.num_pairs_left_out,
        follow_ups=num_follow_ups,
        feedback=_feedback_counts(imported),
    )


def _feedback_counts(imported: ImportedRows) -> dict[str, int]:
    kinds: tuple[RowKind, ...] = ("thumbs", "scores", "unlabelled")
    rows = [row for kind in kinds for row in imported.rows[kind]]
    parts = Counter(part for row in rows for part in row["info"].get("feedback", ()))
    return {
        "rows": len(rows),
        "label": sum("label" in row for row in rows),
        "feedback": sum("feedback" in row for row in rows),
        **{part: parts[part] for part in FEEDBACK_WORDS},
    }


def _num_verdicts(votes: Iterable[Vote]) -> int:
    return sum(vote.has_verdict for vote in votes)


def _reading(options: ImportOptions) -> ReadOptions:
    """The settings of the reader of the export. Raises UserError for an invalid category."""
    parts = ("prompt", "completion", "left", "right", "correction", "label")
    return ReadOptions(
        paths={name: path for name in parts if (path := getattr(options, name))},
        score_names=tuple(options.score_name),
        labels=dict(map(_category, options.category)),
        includes_machine=options.include_machine,
        keeps_reasoning=options.keep_reasoning,
        includes_unlabelled=options.unlabelled,
    )


def _category(text: str) -> tuple[str, bool]:
    name, _, word = text.rpartition("=")
    if not name or word not in CATEGORIES:
        raise UserError(
            f"{text!r} does not map a category to up or down",
            code="category-invalid",
            where="--category",
            fix="write NAME=up or NAME=down",
        )
    return name, CATEGORIES[word]


def _start(since: str | None, stored: Sequence[Vote]) -> float:
    """Seconds since 1970 of the first votes to read; 0 for all."""
    if since is None:
        return 0.0
    if since == "last":
        return max((vote.updated_at for vote in stored), default=0.0)
    try:
        date = datetime.fromisoformat(since)
    except ValueError:
        raise UserError(
            f"{since!r} is not a date",
            code="date-invalid",
            where="--since",
            fix="write a date such as 2026-01-31 or 2026-01-31T12:00:00Z, or `last`",
        ) from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _counter(console: Console) -> Callable[[int], None]:
    """A function that prints the number of votes every few seconds; the total is unknown."""
    printed = time.monotonic()

    def count(number: int) -> None:
        nonlocal printed
        if time.monotonic() - printed >= EVERY:
            printed = time.monotonic()
            print_message(console, f"{number:,} votes read")

    return count


def _counted(
    items: Iterable[Vote | Skipped], count: Callable[[int], None]
) -> Iterator[Vote | Skipped]:
    for number, item in enumerate(items, 1):
        count(number)
        yield item


def _select_votes(
    items: Iterable[Vote | Skipped], start: float, model: str | None
) -> tuple[list[Vote], list[Skipped]]:
    """The votes to import, as they are read back from the file of votes, and the skipped items."""
    votes: list[Vote] = []
    skipped: list[Skipped] = []
    for item in items:
        item = replace(item, origin=Origin(_public_name(item.origin.path), item.origin.line))
        if isinstance(item, Skipped):
            skipped.append(item)
        elif 0 < item.updated_at < start:
            date = as_date(item.updated_at)
            skipped.append(Skipped("before_since", item.origin, date, item.id))
        elif model is not None and model not in (item.model, item.other_model):
            skipped.append(Skipped("other_model", item.origin, item.model, item.id))
        else:
            try:
                votes.append(Vote.from_dict(json.loads(vote_line(item))))
            except ValueError as error:
                skipped.append(Skipped("shape_unknown", item.origin, str(error), item.id))
    return votes, skipped


def _drop_absent(
    stored: Sequence[Vote],
    sources: Collection[str],
    votes: Sequence[Vote],
    skipped: Sequence[Skipped],
    server: str | None,
    *,
    follow_ups: bool,
) -> list[Vote]:
    """The stored votes without those of a tool that are no longer among all of its votes.

    sources: its names in votes. votes, skipped: all that it has. server: the address of the server
    that has them, so that votes from elsewhere stay; None for all votes of the tool. follow_ups:
    whether follow-ups were read too.
    """
    keys = {vote.key for vote in votes}
    ids = {*(vote.id for vote in votes), *(item.vote_id for item in skipped)} - {""}
    return [
        vote
        for vote in stored
        if vote.source not in sources
        or vote.key in keys
        or vote.id in ids
        or not (vote.has_verdict or (vote.is_follow_up and follow_ups))
        or server not in (None, vote.origin.path)
    ]


def _public_name(path: str) -> str:
    """The name of a file without folders outside of the working folder, of a URL without
    credentials.
    """
    url = urlsplit(path)
    if url.scheme in ("http", "https"):
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
    relative = os.path.relpath(path)
    return Path(path).name if relative.startswith(os.pardir) else relative


def _skipped_counts(skipped: Sequence[Skipped]) -> dict[SkipReason, SkippedCount]:
    counts = Counter[SkipReason](item.reason for item in skipped)
    first = {item.reason: item for item in reversed(skipped)}
    return {
        reason: SkippedCount(count, str(first[reason].origin), first[reason].example)
        for reason, count in counts.most_common()
    }


def _rows_file(path: Path, kind: RowKind, rows: Mapping[str, int], *, is_main: bool) -> RowsFile:
    command = ["valence", "init", str(path), *([] if is_main else ["--out", f"{kind}.yaml"])]
    command += ["--method", "hindsight"] if kind == "unlabelled" else []
    return RowsFile(str(path), kind, rows[path.name], shlex.join(command))


def _nothing_imported(
    name: str, files: Sequence[str], url: str | None, skipped: Sequence[Skipped]
) -> UserError:
    counts = _skipped_counts(skipped)
    reasons = "; ".join(
        f"{skip.count:,} {SKIP_REASONS[reason]} (first: {skip.place})"
        for reason, skip in counts.items()
    )
    fixes = [FIXES[reason] for reason in counts if reason in FIXES]
    follow_ups = (
        "; or add --unlabelled to import the answers that a user message follows"
        if "unlabelled" in source_of(name).options.split()
        else ""
    )
    return UserError(
        f"nothing was imported: {reasons or 'the export has no votes'}",
        code="nothing-imported",
        where=_public_name(url) if url else ", ".join(files),
        fix=fixes[0] if fixes else f"use an export with votes: {source_of(name).files}{follow_ups}",
    )


# The summary on the terminal


def print_summary(summary: ImportSummary, console: Console) -> None:
    _print_counts(summary, console)
    if summary.files:
        table = Table("file", "rows", "kind", "content", box=None, pad_edge=False)
        for file in summary.files:
            table.add_row(file.path, f"{file.rows:,}", file.kind, _content(file.kind))
        console.print(table)
    else:
        print_message(console, "None of the stored votes can be converted into a row.")
    if summary.skipped:
        print_message(console, "\nSkipped")
        table = Table("count", "reason", "first", box=None, pad_edge=False, show_header=False)
        for reason, skip in summary.skipped.items():
            table.add_row(f"{skip.count:,}", SKIP_REASONS[reason], _origin(skip))
        console.print(table)
    print_message(console, "")
    for sentence in _sentences(summary):
        print_message(console, sentence)
    if summary.files:
        print_message(console, "\nNext, write a recipe for the rows to train on:")
    for file in summary.files:
        print_message(console, f"  {file.command}")


def _print_counts(summary: ImportSummary, console: Console) -> None:
    """Print how many votes and follow-ups were read."""
    counts = summary.counts
    parts = {"new": counts.new, "replaced": counts.replaced, "unchanged": counts.unchanged}
    if counts.withdrawn:
        parts["withdrawn"] = counts.withdrawn
    if counts.superseded:
        parts["superseded by a later vote of the same rater"] = counts.superseded
    outcomes = ", ".join(f"{number:,} {outcome}" for outcome, number in parts.items())
    if summary.follow_ups:
        answers = "answer" if summary.follow_ups == 1 else "answers"
        line = f"{summary.follow_ups:,} {answers} read without a vote, with the user's next message"
        print_message(console, line)
    if summary.votes or not summary.follow_ups:
        print_message(console, f"{_votes(summary.votes)} read: {outcomes}")
    period = f", {summary.from_date} to {summary.to_date}" if summary.from_date else ""
    if summary.total or not summary.follow_ups:
        print_message(console, f"{_votes(summary.total)} in {summary.votes_file}{period}")
    print_message(console, "")


def _content(kind: RowKind) -> str:
    """What a file of rows contains, and the method for it."""
    if kind == "unlabelled":
        return "completions with feedback as text, for hindsight"
    return f"{WORDS[KIND_OF[kind]]}, for {METHOD_FOR[KIND_OF[kind]]}"


def _votes(number: int) -> str:
    return f"{number:,} vote{'' if number == 1 else 's'}"


def _origin(skip: SkippedCount) -> str:
    example = " ".join(skip.example.split())
    is_long = len(example) > EXAMPLE_LENGTH
    example = f"{example[:EXAMPLE_LENGTH]}..." if is_long else example
    return f"{skip.place} ({example})" if example else skip.place


def _shortage(file: RowsFile, weights: WeightAdvice | None) -> str:
    """A sentence about a file with too few rows to judge a model by, or without a contrast; empty
    for others.
    """
    from valence.reports.verdict import rows_needed

    if file.kind == "thumbs" and weights and 0 in (weights.n_up, weights.n_down):
        kind = "up" if weights.n_up else "down"
        way = (
            "; imitate them with method: sft and data.convert: chosen_to_demonstrations"
            if weights.n_up
            else ""
        )
        return f"{file.path}: all thumbs are {kind}, so there is nothing to compare with{way}."
    share_up = 0.5
    if file.kind == "thumbs" and weights:
        share_up = weights.n_up / (weights.n_up + weights.n_down)
    needed = rows_needed(None if file.kind == "pairs" else share_up)
    if file.kind not in ("thumbs", "pairs") or file.rows >= 2 * needed:
        return ""
    return (
        f"{file.path}: {file.rows:,} {file.kind} are few: about {needed:,} are needed to judge a "
        "model, and at least as many to train on. Collect more votes."
    )


def _sentences(summary: ImportSummary) -> Iterator[str]:
    """Statistics of the votes, and which of them are too few."""
    yield from filter(None, (_shortage(file, summary.weights) for file in summary.files))
    if weights := summary.weights:
        advice = f"; {weights.remedy}, or loss.class_weights: auto" if weights.remedy else ""
        yield f"Thumbs: {weights.n_up:,} up, {weights.n_down:,} down{advice}"
    if (counts := summary.feedback) and counts["rows"]:
        parts = [
            f"{counts[part]:,} with {words}"
            for part, words in FEEDBACK_WORDS.items()
            if counts[part]
        ]
        yield (
            f"Feedback as text: {counts['feedback']:,} of {counts['rows']:,} rows"
            + (f" ({', '.join(parts)})" if parts else "")
            + f"; {counts['label']:,} with a label"
        )
    if summary.num_pairs_left_out:
        yield pairs_left_out(summary.num_pairs_left_out)
    if summary.num_raters:
        shared = (
            f"; {summary.num_shared:,} completions have votes of several raters, who agree in "
            f"{summary.agreement:.0%} of the pairs of votes"
            if summary.agreement is not None
            else ""
        )
        yield f"Raters: {summary.num_raters:,}{shared}"
    if summary.models:
        total = sum(summary.models.values())
        shares = [f"{name} {number / total:.0%}" for name, number in summary.models.items()]
        suffix = f" and {len(shares) - SHOWN_MODELS:,} more" if len(shares) > SHOWN_MODELS else ""
        yield f"Models: {', '.join(shares[:SHOWN_MODELS])}{suffix}"
