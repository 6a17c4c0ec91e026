"""Traces of applications, whose steps are calls of models and whatever encloses them: which call a
vote is about, and the vote on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from valence.data.importers.fields import is_blank, value_at
from valence.data.importers.messages import Exchange, exchange_of
from valence.data.importers.records import ReadOptions, Skipped, SkipReason, Vote
from valence.data.sources import BadRow, Row, read_rows
from valence.data.values import shown
from valence.errors import UserError
from valence.types import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a trace: an observation, span or run, or the trace itself.

    start: seconds since 1970. is_generation: a call of a language model. given, answer: what the
    step recorded as its input and output. row: as it is in the export.
    """

    id: str
    trace: str
    parent: str = ""
    start: float = 0.0
    is_generation: bool
    is_failed: bool = False
    given: Any = None
    answer: Any = None
    tools: tuple[Mapping[str, Any], ...] = ()
    model: str = ""
    session: str = ""
    rater: str = ""
    row: Mapping[str, Any]


class Traces:
    """The steps of traces, by their ids and by the traces that they belong to."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self.steps = {step.id: step for step in steps}
        self.by_trace: dict[str, list[Step]] = defaultdict(list)
        for step in self.steps.values():
            self.by_trace[step.trace].append(step)

    def rated_step(self, step_id: str, trace_id: str) -> Step | SkipReason:
        """The call of a model that a vote on this step, or on this trace, is about.

        It is the step itself if that is one, else the last one with an output inside of it. Without
        any, it is the step, or the step that no other one encloses.
        """
        step = self.steps.get(step_id)
        members = self.by_trace.get(step.trace if step else trace_id, [])
        if step is None and (step_id or not members):
            return "message_missing" if members else "no_conversation"
        if step is None or not step.is_generation:
            calls = [s for s in members if s.is_generation and (not step or self._is_in(s, step))]
            answered = [s for s in calls if s.is_failed or not is_blank(s.answer)]
            root = self.steps.get(trace_id) or next((s for s in members if not s.parent), None)
            step = max(reversed(answered), key=lambda s: s.start) if answered else step or root
        if step is None:
            return "message_missing"
        trace = self.steps.get(step.trace, step)
        return replace(step, rater=step.rater or trace.rater, session=step.session or trace.session)

    def _is_in(self, step: Step, outer: Step) -> bool:
        passed: set[str] = set()
        while step.parent and step.parent not in passed:
            if step.parent == outer.id:
                return True
            passed.add(step.parent)
            if step.parent not in self.steps:
                return False
            step = self.steps[step.parent]
        return False


def exchange_in(step: Step, options: ReadOptions) -> Exchange | SkipReason:
    """The prompt and completion of a step, or why it has none."""
    if step.is_failed:
        return "failed"
    given = value_at(step.row, options.paths["prompt"]) if "prompt" in options.paths else step.given
    answer = step.answer
    if "completion" in options.paths:
        answer = value_at(step.row, options.paths["completion"])
    found = exchange_of(given, answer, keeps_reasoning=options.keeps_reasoning)
    if isinstance(found, Exchange) and step.tools and not found.tools:
        return replace(found, tools=step.tools)
    return found


def vote_on(
    step: Step | SkipReason,
    options: ReadOptions,
    origin: Origin,
    *,
    source: str,
    rater: str | None,
    **said: Any,
) -> Vote | Skipped:
    """A vote on a step, or why there is none.

    rater: None for whom the application served. said: the fields of the vote that say what the
    rater said.
    """
    if not isinstance(step, Step):
        return Skipped(step, origin)
    found = exchange_in(step, options)
    if not isinstance(found, Exchange):
        return Skipped(found, origin, f"{shown(step.given)} -> {shown(step.answer)}")
    return Vote(
        source=source,
        origin=origin,
        rater=step.rater if rater is None else rater,
        prompt=found.prompt,
        tools=found.tools,
        completion=found.completion,
        message=step.id,
        model=step.model,
        session=step.session,
        **said,
    )


def export_rows(paths: Sequence[str]) -> Iterator[Row]:
    """The rows of the files of an export, without those that cannot be read."""
    for path in paths:
        yield from (row for row in read_rows(path) if isinstance(row, Row))


def rows_of_kind(
    kind: str,
    paths: Sequence[str],
    kinds_of: Callable[[Mapping[str, Any]], Collection[str]],
    tool: str,
    needed: Mapping[str, str],
) -> tuple[list[Row], list[Skipped]]:
    """The rows of one kind in the files of an export, and the rows that cannot be read.

    Raises UserError for a file that is not of this tool, and where a kind of rows is missing.

    needed: kinds that must be there -> the export that has them.
    """
    rows: list[Row] = []
    bad: list[Skipped] = []
    present: set[str] = set()
    for path in paths:
        in_file: set[str] = set()
        for row in read_rows(path):
            if isinstance(row, BadRow):
                bad.append(Skipped("shape_unknown", row.origin, row.reason))
                continue
            kinds = kinds_of(row.value)
            in_file |= set(kinds)
            if kind in kinds:
                rows.append(row)
        if not in_file:
            raise UserError(
                f"the file is not an export of {tool}",
                code="import-not-an-export",
                where=path,
                fix=f"name files of {' and of '.join(needed.values())}",
            )
        present |= in_file
    for name, export in needed.items():
        if name not in present:
            raise UserError(
                f"no file has {export}",
                code="import-file-missing",
                where=", ".join(paths),
                fix=f"export {export} from {tool} too, and name that file beside the others",
            )
    return rows, bad


def combine_votes(records: Iterable[Vote | Skipped]) -> Iterator[Vote | Skipped]:
    """Join what one rater said of one completion in several records: a label, a score and a
    correction, each the latest one.

    A record that changes an earlier one remains a vote of its own, which comes later.
    """
    by_key: dict[str, list[Vote]] = defaultdict(list)
    for record in records:
        if isinstance(record, Skipped):
            yield record
        else:
            by_key[record.key].append(record)
    for votes in by_key.values():
        combined: list[Vote] = []
        for vote in sorted(votes, key=lambda v: v.updated_at):
            last = combined[-1] if combined else None
            if last is None or vote.winner is not None or last.winner is not None:
                combined.append(vote)
                continue
            if not _facets(vote) & _facets(last):
                combined.pop()
            combined.append(
                replace(
                    vote,
                    label=last.label if vote.label is None else vote.label,
                    score=last.score if vote.score is None else vote.score,
                    scale=last.scale if vote.scale is None else vote.scale,
                    correction=vote.correction or last.correction,
                    comment=vote.comment or last.comment,
                    tags=vote.tags or last.tags,
                )
            )
        yield from combined


def _facets(vote: Vote) -> set[str]:
    return {name for name in ("label", "score", "correction") if getattr(vote, name) is not None}
