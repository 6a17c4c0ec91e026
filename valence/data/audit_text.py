"""The audit as a screen of plain text: the tables, then a line for each thing found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from valence.data.audit import Audit, Finding, Spread, Truncation, UnusedSummary

REASONS_SHOWN = 8
"""Reasons for not using rows that the screen has room for."""

COLUMNS_SHOWN = 20
"""Columns that are not read that the screen has room for."""

_SINGULAR = {"are": "is", "have": "has", "were": "was", "lost": "lost", "became": "became"} | {
    verb: f"{verb}s" for verb in ("contain", "end", "follow", "give", "lack", "repeat", "start")
}
"""The verbs of the findings, for one row instead of several."""
_PLURAL = re.compile(rf"^((?:[\w-]+ )?\w+)s ({'|'.join(_SINGULAR)})\b")

WARNINGS = {
    "contradictions": (
        "answers have the opposite label in another row: {rows}",
        "Remove one row of each two, or give both a weight below 1.",
    ),
    "one_class": (
        "all rows have the same label, so there is nothing to compare with",
        "Add rows with the other label, or imitate the good answers with method: sft and "
        "data.convert: chosen_to_demonstrations.",
    ),
    "no_mismatch": (
        "all rows share one prompt or one answer",
        "Add rows with other prompts and answers: kto pairs each prompt with another row's answer.",
    ),
    "rows_in_train": (
        "rows are also in data.train: {rows}",
        "Remove them from one of the two files: training rows cannot show how the model does on "
        "new prompts, and do not count in the verdict.",
    ),
    "prompts_in_train": (
        "rows have a prompt that is also in data.train: {rows}",
        "Put all rows of a prompt into the same file: held-out rows should show how the model does "
        "on new prompts.",
    ),
    "double_bos": (
        "prompts start with two BOS tokens: {rows}",
        "Remove the BOS token from the text or the token ids of the prompts.",
    ),
    "end_of_turn_missing": (
        "answers have no end-of-turn token: {rows}",
        "Add it to completion_ids of each complete answer. Otherwise the model does not learn to "
        "stop.",
    ),
    "end_of_turn_unmasked": (
        "end-of-turn tokens are outside the mask: {rows}",
        "Set their mask to 1. Otherwise the model does not learn to stop.",
    ),
    "text_on_chat_model": (
        "prompts are trained on as plain text, without the model's chat template: {rows}",
        "Set data.as_chat: true, unless the rows contain the template already, or you will prompt "
        "the model with plain text.",
    ),
    "another_header": (
        "answers follow another header than the generation prompt: {rows}",
        "Set data.chat_template_kwargs so that both agree (see `valence docs models`). "
        "Otherwise the model is trained on other tokens than it is sampled from.",
    ),
    "reasoning_ignored": (
        "answers have reasoning that the chat template does not print: {rows}",
        "Set data.chat_template to a template that prints it, or remove the reasoning from the "
        "rows.",
    ),
    "special_tokens_in_text": (
        "texts contain special tokens such as the end of a turn, spelled out: {rows}",
        "Remove them from the texts unless they are intended: they are tokenized as special "
        "tokens.",
    ),
    "tools_ignored": (
        "rows have tools, which the chat template does not print: {rows}",
        "Use a model whose template supports tools, set data.chat_template to such a template, or "
        "remove the tools.",
    ),
    "equal_sides": (
        "pairs have the same answer on both sides: {rows}",
        "Remove them: they express no preference.",
    ),
    "contradicted_pairs": (
        "pairs have a larger score for the rejected answer than for the chosen one: {rows}",
        "Swap the answers or correct the scores, or remove the rows: one of the two is wrong.",
    ),
    "tied_scores": (
        "rankings give all answers the same score: {rows}",
        "Remove them, or use finer scores: nothing can be learned from them.",
    ),
    "length_bias": (
        "good and bad answers differ in length (mean tokens: {lengths})",
        "If the model should not learn the length, balance the lengths (see `valence docs "
        "labels`).",
    ),
}
"""What may spoil a result, and what to do about it, by the name of the finding."""

REMARKS = {
    "text_has_no_turns": (
        "prompts are text, so data.train_on: assistant finds no earlier answers in them: {rows}",
        "Write prompts as chat turns, or remove data.train_on.",
    ),
    "duplicates": (
        "rows repeat an earlier row: {rows}",
        "Remove them if they should count only once.",
    ),
    "missing_attributes": (
        "rows lack an attribute that other rows have: {rows}",
        "Add the attribute, or leave it out on purpose: it is then not trained on in these rows.",
    ),
    "end_of_turn_added": (
        "answers end with a token that was added, as the chat template prints no end of turn: "
        "{rows}",
        "Nothing to do: with this token the model learns to stop.",
    ),
    "rewritten_prompt": (
        "prompts are printed differently by the chat template once an answer follows: {rows}",
        "Nothing to do: training uses the form that sampling uses.",
    ),
    "reasoning_kept": (
        "answers have reasoning that the chat template drops once the conversation goes on; it is "
        "trained on: {rows}",
        "Remove the reasoning from the rows if the model should not produce it.",
    ),
    "split_turns": (
        "conversations became one example for each assistant turn, because the template prints "
        "earlier turns differently: {rows}",
        "Nothing to do; expect more examples than rows.",
    ),
    "boundary_merges": (
        "prompt and answer would share a token where they meet, so they are tokenized separately: "
        "{rows}",
        "Nothing to do: sampling uses the same tokens.",
    ),
    "bos_in_text": (
        "prompts start with BOS already, so none is added: {rows}",
        "Nothing to do.",
    ),
    "empty_prompt": (
        "prompts are empty; a BOS (or EOS) token replaces them: {rows}",
        "Remove them, unless answers without a prompt are intended.",
    ),
    "cut_prompt": (
        "rows lost their oldest turns, or the start of their text: {rows}",
        "Raise data.max_length to keep them complete.",
    ),
    "cut_completion": (
        "rows lost the end of an answer and its end-of-turn token: {rows}",
        "Raise data.max_length to keep them complete.",
    ),
    "sampling_truncated": (
        "answers were truncated when they were sampled, and do not teach the model to stop: {rows}",
        "Nothing to do if most answers are complete; otherwise sample with a larger "
        "--max-new-tokens.",
    ),
    "logps_of_others": (
        "answers were not sampled at temperature 1 from all tokens, so their log-probabilities "
        "are not used: {rows}",
        "Sample with temperature 1 and top_p 1 to use them. Until then, the reference takes the "
        "place of the policy that sampled the answers.",
    ),
    "tokenized_again": (
        "rows have tokens of another or an unknown tokenizer, so their text is tokenized again: "
        "{rows}",
        "Nothing to do, unless the tokens are those of this model: then add the digest of its "
        "vocabulary to the rows (see `valence docs rows`).",
    ),
    "logps_missing": (
        "rankings have answers without log-probabilities, so none are used: {rows}",
        "Add the log-probabilities of all answers, or remove logps from all rows.",
    ),
    "blocks": (
        "rows are sorted by label",
        "Nothing to do: training shuffles them. But with data.limit, shuffle the file first: it "
        "uses only the first rows.",
    ),
    "dated_template": (
        "the chat template prints today's date, so prompts differ from day to day",
        "Set the date in data.chat_template_kwargs if the template has a variable for it.",
    ),
}
"""What is good to know, and what to do about it, by the name of the finding."""


def render(audit: Audit, *, training: bool = True) -> str:
    """A screen without colours, for a terminal or a log. It has no lines about absent problems.

    training: these are the rows to train on, for which class weights are advised.
    """
    blocks = [
        _listed("Not used", _unused(audit)),
        list(_files(audit)),
        list(_lengths(audit)),
        list(_balance(audit, training)),
        _listed("Warnings", _findings(audit, WARNINGS)),
        _listed("Remarks", [*_findings(audit, REMARKS), *_ignored(audit)]),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def warnings_of(audit: Audit) -> list[str]:
    """What the screen lists under "Not used" and "Warnings", one sentence each."""
    sentences = audited(audit)["said"]
    return [
        *(f"{count:,} {text}" for count, text in _unused(audit)),
        *(sentences[name] for name in WARNINGS if name in sentences),
    ]


def _files(audit: Audit) -> Iterator[str]:
    extras = {"bad": "bad", "too_long": "too long", "not_converted": "not converted"}
    extras = {
        name: head for name, head in extras.items() if any(getattr(f, name) for f in audit.files)
    }
    names = list(audit.classes)
    rows = [
        [
            f.path,
            f.format or "?",
            f.rows,
            *(f.classes.get(n, 0) for n in names),
            *(getattr(f, e) for e in extras),
        ]
        for f in audit.files
    ]
    if len(rows) > 1:
        rows.append(
            ["all", "", *(sum(int(row[i]) for row in rows) for i in range(2, len(rows[0])))]
        )
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
        yield f"No row is longer than data.max_length ({cut.max_length:,} tokens)."
        return
    rows = f"{cut.too_long:,} of {cut.rows:,} rows ({_percent(cut.too_long, cut.rows)})"
    tokens = (
        f"{cut.tokens_lost:,} of {cut.tokens:,} tokens ({_percent(cut.tokens_lost, cut.tokens)})"
    )
    yield (
        f"{rows} are longer than data.max_length ({cut.max_length:,} tokens); {cut.keeps_99:,} "
        f"would keep 99 % of the rows complete."
    )
    yield f"data.long_rows: {cut.long_rows} loses {tokens}. To lose less, raise data.max_length."


def _percent(part: int, total: int) -> str:
    share = 100 * part / total
    return "under 1 %" if 0 < share < 1 else f"{share:.0f} %"


def _balance(audit: Audit, training: bool) -> Iterator[str]:
    if len(audit.mean_answer) == 2:
        (first, a), (second, b) = audit.mean_answer.items()
        longer = (
            f"{first} {a / b:.2f} times as long"
            if a >= b
            else f"{second} {b / a:.2f} times as long"
        )
        yield f"mean answer length: {first} {a:,.0f} tokens, {second} {b:,.0f} ({longer})"
    weights = audit.weights
    if training and weights and weights.ratio is not None:
        is_weighted = weights.desirable_weight != 1 or weights.undesirable_weight != 1
        ups, downs = f"{weights.n_up:,} up", f"{weights.n_down:,} down"
        if is_weighted:
            ups = f"{weights.desirable_weight:g} x {ups}"
            downs = f"{weights.undesirable_weight:g} x {downs}"
        way = f", which loss.class_weights: auto or {weights.setting} gives"
        yield (
            f"class balance: {ups} / {downs} = {weights.ratio:.3g}; for kto, 1 to 1.33 is advised"
            + (way if weights.setting and not is_weighted else "")
        )


def _unused(audit: Audit) -> list[tuple[int, str]]:
    lines = [(u.count, _why(u, audit)) for u in audit.unused[:REASONS_SHOWN]]
    more = audit.unused[REASONS_SHOWN:]
    return (
        [*lines, (sum(u.count for u in more), f"for {len(more)} other reasons")] if more else lines
    )


def _why(unused: UnusedSummary, audit: Audit) -> str:
    """The kind of reason, the rows, and what was said about the first of them."""
    first = "the first: " if unused.count > 1 else ""
    rows = _rows(unused.count, unused.rows, audit)
    return f"{unused.kind.replace('_', ' ')}: {rows} ({first}{unused.reason})"


def audited(audit: Audit) -> dict[str, Any]:
    """The audit as plain values, with ``said``: by the name of each finding, what it is and what to
    do about it.
    """
    messages = {
        name: (f"{finding.count:,} " if "{rows}" in sentence else "")
        + f"{_sentence(sentence, finding, audit)}. {fix}"
        for name, (sentence, fix) in (WARNINGS | REMARKS).items()
        if (finding := audit.findings.get(name))
    }
    return audit.to_dict() | {"said": messages}


def _findings(audit: Audit, sentences: dict[str, tuple[str, str]]) -> list[tuple[int | None, str]]:
    """Count, sentence and advice of the findings, in the order of the table.

    The count is None for a finding about the rows as a set.
    """
    findings = (
        (audit.findings.get(name), sentence, fix) for name, (sentence, fix) in sentences.items()
    )
    return [
        (
            f.count if "{rows}" in sentence else None,
            f"{_sentence(sentence, f, audit)}\n{fix}",
        )
        for f, sentence, fix in findings
        if f
    ]


def _sentence(text: str, finding: Finding, audit: Audit) -> str:
    lengths = ", ".join(f"{name} {tokens:,.0f}" for name, tokens in audit.mean_answer.items())
    if finding.count == 1 and "{rows}" in text:
        text = _PLURAL.sub(lambda match: f"{match[1]} {_SINGULAR[match[2]]}", text)
    return text.format(rows=_rows(finding.count, finding.rows, audit), lengths=lengths)


def _ignored(audit: Audit) -> list[tuple[int, str]]:
    columns = list(audit.ignored_columns.items())
    lines = [
        (
            count,
            f"{'row has' if count == 1 else 'rows have'} a column {column!r}, which is not read",
        )
        for column, count in columns[:COLUMNS_SHOWN]
    ]
    more = columns[COLUMNS_SHOWN:]
    if more:
        lines.append(
            (
                max(count for _, count in more),
                f"rows have one of {len(more):,} other columns that are not read",
            )
        )
    return lines


def _rows(count: int, rows: Sequence[str], audit: Audit) -> str:
    """The rows, with the file's name once where there is one file only."""
    text = ", ".join(rows) + (", ..." if count > len(rows) else "")
    if len(audit.files) == 1:
        name = f"{audit.files[0].path}:"
        head, match, tail = text.partition(name)
        text = head + match + tail.replace(name, ":")
    return text


def _listed(title: str, lines: Sequence[tuple[int | None, str]]) -> list[str]:
    """A title and indented lines that begin with their count, or with a dash."""
    if not lines:
        return []
    counts = ["-" if count is None else f"{count:,}" for count, _ in lines]
    width = max(map(len, counts))
    indent = "\n" + " " * (width + 4)
    return [
        title,
        *(
            f"  {count:>{width}}  " + text.replace("\n", indent)
            for count, (_, text) in zip(counts, lines, strict=True)
        ),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[object]], *, left: int) -> Iterator[str]:
    """Columns as wide as they need; the first ``left`` of them start at the left, the others are
    numbers.
    """
    cells = [
        list(head),
        *([f"{c:,}" if isinstance(c, int) else str(c) for c in row] for row in rows),
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        aligned = (
            c.ljust(w) if i < left else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(aligned).rstrip()
