"""The audit as a screen of plain text: the tables, then a line for each thing found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from valence.data.audit import Audit, Finding, Spread, Truncation, Unused

REASONS_SHOWN = 8
"""Reasons for not using rows that the screen has room for."""

COLUMNS_SHOWN = 20
"""Columns that are not read that the screen has room for."""

WARNINGS = {
    "contradictions": "judged the other way elsewhere: {rows}",
    "one_class": "all rows have the same label: there is nothing to tell apart",
    "no_mismatch": "all rows share one prompt or one answer: kto needs two different ones of each",
    "rows_in_train": "of these rows are also in data.train, so they cannot show what is learnt beyond it: {rows}",
    "double_bos": "prompts start with two BOS tokens: {rows}",
    "end_of_turn_missing": "answers have no end-of-turn token, so they do not teach to stop: {rows}",
    "end_of_turn_unmasked": "end-of-turn tokens are outside the mask, so they do not teach to stop: {rows}",
    "text_on_chat_model": "prompts are trained on as plain text, without the model's chat template: {rows}",
    "another_header": "answers start with another header than the generation prompt, so training sees other tokens than "
    "sampling: {rows}",
    "reasoning_ignored": "answers have reasoning that the chat template does not print: {rows}",
    "special_tokens_in_text": "texts hold the names of special tokens, which they become: {rows}",
    "tools_ignored": "rows have tools, which the chat template does not print: {rows}",
    "equal_sides": "pairs with twice the same answer: {rows}",
    "tied_scores": "rankings give all of their answers the same score, so nothing is learnt from them: {rows}",
    "length_bias": "length alone tells the answers apart (mean tokens: {lengths})",
}
"""What may spoil a result, by the name of the finding."""

REMARKS = {
    "prompts_in_train": "of the other rows share their prompt with a row of data.train: {rows}",
    "text_has_no_turns": "prompts are text, where data.train_on: assistant finds no earlier answers to train on: {rows}",
    "duplicates": "repeat an earlier row: {rows}",
    "missing_attributes": "lack an attribute that other rows have: {rows}",
    "end_of_turn_added": "the chat template prints no end of turn behind an answer; it was appended: {rows}",
    "rewritten_prompt": "prompts are printed differently once they are answered; training sees them as sampling does: {rows}",
    "reasoning_kept": "answers hold reasoning that the chat template drops from a conversation; it is trained on: {rows}",
    "split_turns": "conversations became one example for each assistant turn, because the chat template prints earlier "
    "turns differently: {rows}",
    "boundary_merges": "prompt and answer would merge into one token, and were kept apart: {rows}",
    "bos_in_text": "prompts bring BOS along; none was added: {rows}",
    "empty_prompt": "empty prompts; a BOS (or else EOS) token stands in: {rows}",
    "cut_prompt": "lost their oldest turns, or the start of their text: {rows}",
    "cut_completion": "lost the end of an answer, and end without end-of-turn: {rows}",
    "logps_of_others": "answers were not drawn at temperature 1 from all tokens: their log-probabilities are not read, and the "
    "reference stands in for the policy that answered: {rows}",
    "logps_missing": "rankings have answers without the log-probabilities that others have, so none are read: {rows}",
    "blocks": "one class comes after the other (training shuffles them; `data.limit` would not)",
    "dated_template": "the chat template prints today's date, so prompts differ from day to day",
}
"""What is good to know."""


def render(audit: Audit, *, training: bool = True) -> str:
    """A screen without colours, for a terminal or a log. Nothing is said about what was not found.

    training: these are the rows to train on, for which class weights are advised.
    """
    blocks = [
        list(_files(audit)),
        list(_lengths(audit)),
        list(_balance(audit, training)),
        _listed("Not used", _unused(audit)),
        _listed("Warnings", _said(audit, WARNINGS)),
        _listed("Remarks", [*_said(audit, REMARKS), *_ignored(audit)]),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def warnings_of(audit: Audit) -> list[str]:
    """What the screen lists under "Not used" and "Warnings", one sentence each."""
    said = audited(audit)["said"]
    return [*(f"{count:,} {text}" for count, text in _unused(audit)), *(said[name] for name in WARNINGS if name in said)]


def _files(audit: Audit) -> Iterator[str]:
    extras = {"bad": "bad", "too_long": "too long", "not_converted": "not converted"}
    extras = {name: head for name, head in extras.items() if any(getattr(f, name) for f in audit.files)}
    names = list(audit.classes)
    rows = [
        [f.path, f.format or "?", f.rows, *(f.classes.get(n, 0) for n in names), *(getattr(f, e) for e in extras)]
        for f in audit.files
    ]
    if len(rows) > 1:
        rows.append(["all", "", *(sum(int(row[i]) for row in rows) for i in range(2, len(rows[0])))])
    yield from _table(["file", "format", "rows", *names, *extras.values()], rows, left=2)
    yield from (f"{f.path}: {note}" for f in audit.files for note in f.notes)


def _lengths(audit: Audit) -> Iterator[str]:
    spreads = {"prompt": audit.prompt_length, "answer": audit.answer_length}
    rows = [[name, *_numbers(s)] for name, s in spreads.items() if s]
    if rows:
        yield from _table(["tokens", "min", "median", "95 %", "max"], rows, left=1)
    if audit.truncation:
        yield from _cost(audit.truncation)


def _numbers(spread: Spread) -> list[str]:
    return [f"{n:,.0f}" for n in (spread.min, spread.median, spread.p95, spread.max)]


def _cost(cut: Truncation) -> Iterator[str]:
    if not cut.too_long:
        yield f"max_length {cut.max_length:,} keeps every row whole."
        return
    rows = f"{cut.too_long:,} of {cut.rows:,} rows ({_percent(cut.too_long, cut.rows)})"
    tokens = f"{cut.tokens_lost:,} of {cut.tokens:,} tokens ({_percent(cut.tokens_lost, cut.tokens)})"
    yield f"max_length {cut.max_length:,} is too short for {rows}; {cut.keeps_99:,} would keep 99 % of the rows whole."
    yield f"long_rows: {cut.long_rows} loses {tokens}."


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole
    return "under 1 %" if 0 < share < 1 else f"{share:.0f} %"


def _balance(audit: Audit, training: bool) -> Iterator[str]:
    if len(audit.mean_answer) == 2:
        (first, a), (second, b) = audit.mean_answer.items()
        longer = f"{first} {a / b:.2f} times as long" if a >= b else f"{second} {b / a:.2f} times as long"
        yield f"mean answer: {first} {a:,.0f} tokens, {second} {b:,.0f} ({longer})"
    weights = audit.weights
    if training and weights and weights.ratio is not None:
        ratio = f"class weights at 1: {weights.n_up:,} up / {weights.n_down:,} down = {weights.ratio:.3g}"
        yield f"{ratio}; for kto, 1 to 1.33 is advised{f': {weights.remedy}' if weights.remedy else ''}"


def _unused(audit: Audit) -> list[tuple[int, str]]:
    lines = [(u.count, _why(u, audit)) for u in audit.unused[:REASONS_SHOWN]]
    more = audit.unused[REASONS_SHOWN:]
    return [*lines, (sum(u.count for u in more), f"for {len(more)} other reasons")] if more else lines


def _why(unused: Unused, audit: Audit) -> str:
    """The kind of reason, the rows, and what was said about the first of them."""
    first = "the first: " if unused.count > 1 else ""
    rows = _rows(unused.count, unused.rows, audit)
    return f"{unused.kind.replace('_', ' ')}: {rows} ({first}{unused.reason})"


def audited(audit: Audit) -> dict[str, Any]:
    """The audit as plain values, with ``said``: the sentence about each finding, by its name."""
    said = {
        name: (f"{found.count:,} " if "{rows}" in text else "") + _sentence(text, found, audit)
        for name, text in (WARNINGS | REMARKS).items()
        if (found := audit.findings.get(name))
    }
    return audit.to_dict() | {"said": said}


def _said(audit: Audit, sentences: dict[str, str]) -> list[tuple[int, str]]:
    """Count and sentence of the findings, in the order of the table."""
    found = ((audit.findings.get(name), text) for name, text in sentences.items())
    return [(f.count, _sentence(text, f, audit)) for f, text in found if f]


def _sentence(text: str, found: Finding, audit: Audit) -> str:
    lengths = ", ".join(f"{name} {tokens:,.0f}" for name, tokens in audit.mean_answer.items())
    return text.format(rows=_rows(found.count, found.rows, audit), lengths=lengths)


def _ignored(audit: Audit) -> list[tuple[int, str]]:
    columns = list(audit.ignored_columns.items())
    lines = [(count, f"rows have a column {column!r}, which is not read") for column, count in columns[:COLUMNS_SHOWN]]
    more = columns[COLUMNS_SHOWN:]
    if more:
        lines.append((max(count for _, count in more), f"rows have one of {len(more):,} other columns that are not read"))
    return lines


def _rows(count: int, rows: Sequence[str], audit: Audit) -> str:
    """The rows, with the file's name once where there is one file only."""
    text = ", ".join(rows) + (", ..." if count > len(rows) else "")
    if len(audit.files) == 1:
        name = f"{audit.files[0].path}:"
        head, found, tail = text.partition(name)
        text = head + found + tail.replace(name, ":")
    return text


def _listed(title: str, lines: Sequence[tuple[int, str]]) -> list[str]:
    if not lines:
        return []
    width = max(len(f"{count:,}") for count, _ in lines)
    return [title, *(f"  {count:>{width},}  {text}" for count, text in lines)]


def _table(head: Sequence[str], rows: Sequence[Sequence[object]], *, left: int) -> Iterator[str]:
    """Columns as wide as they need; the first ``left`` of them start at the left, the others are numbers."""
    cells = [list(head), *([f"{c:,}" if isinstance(c, int) else str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        aligned = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        yield "  ".join(aligned).rstrip()
