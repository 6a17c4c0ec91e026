"""Traces of applications, whose steps are calls of models and whatever encloses them: which call a
vote is about, and the vote on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from valence.data.importers.fields import is_blank, value_at
from valence.data.importers.messages import Exchange, exchange_of
from valence.data.importers.records import ReadOptions, Skipped, SkipReason, Vote
from valence.data.values import shown
from valence.types import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a trace: an observation, span or run, or the trace itself.

    start: seconds since 1970. is_generation: a call of a language model. inputs, answer: what the
    step recorded as its input and output. row: as it is in the export.
    """

    id: str
    trace: str
    parent: str = ""
    start: float = 0.0
    is_generation: bool
    is_failed: bool = False
    inputs: Any = None
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
        visited: set[str] = set()
        while step.parent and step.parent not in visited:
            if step.parent == outer.id:
                return True
            visited.add(step.parent)
            if step.parent not in self.steps:
                return False
            step = self.steps[step.parent]
        return False


def exchange_in(step: Step, options: ReadOptions) -> Exchange | SkipReason:
    """The prompt and completion of a step, or why it has none."""
    if step.is_failed:
        return "failed"
    inputs, answer = step.inputs, step.answer
    if "prompt" in options.paths:
        inputs = value_at(step.row, options.paths["prompt"])
    if "completion" in options.paths:
        answer = value_at(step.row, options.paths["completion"])
    exchange = exchange_of(inputs, answer, keeps_reasoning=options.keeps_reasoning)
    if isinstance(exchange, Exchange) and step.tools and not exchange.tools:
        return replace(exchange, tools=step.tools)
    return exchange


def vote_on(
    step: Step | SkipReason,
    options: ReadOptions,
    origin: Origin,
    *,
    source: str,
    rater: str | None,
    id: str,
    **verdict: Any,
) -> Vote | Skipped:
    """A vote on a step, or why there is none.

    rater: None for whom the application served. verdict: the label, score, correction or
    winner, as fields of the vote.
    """
    if not isinstance(step, Step):
        return Skipped(step, origin, vote_id=id)
    exchange = exchange_in(step, options)
    if not isinstance(exchange, Exchange):
        example = f"{shown(step.inputs)} -> {shown(step.answer)}"
        return Skipped(exchange, origin, example, vote_id=id)
    return Vote(
        source=source,
        id=id,
        origin=origin,
        rater=step.rater if rater is None else rater,
        prompt=exchange.prompt,
        tools=exchange.tools,
        completion=exchange.completion,
        message=step.id,
        model=step.model,
        session=step.session,
        **verdict,
    )


def combine_votes(records: Iterable[Vote | Skipped]) -> Iterator[Vote | Skipped]:
    """Join what one rater said of one completion in several records: a label, a score and a
    correction, each the latest one.

    A record that changes an earlier one remains a separate vote, which comes later.
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
