"""Traces of applications, whose steps are calls of models and whatever encloses them: which call a
vote is about, and the vote on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from valence.data.importers.exports import COMPLETION_COLUMNS
from valence.data.importers.fields import decode_json, is_blank, value_at
from valence.data.importers.messages import (
    Exchange,
    answer_text,
    assistant_of,
    exchange_of,
    messages_of,
)
from valence.data.importers.records import (
    ReadOptions,
    Skipped,
    SkipReason,
    UnusableVote,
    Vote,
)
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

        It is the step itself if that is one. Of several calls inside of it, it is the one whose
        output is the output of the step, or of the trace. Without an output to compare with, it is
        the last one if it reads the result of a tool that all others only called. Anything else is
        "unclear": the last call may have written a title, which no user rated. Without any call,
        it is the step, or the only step that no other one encloses.
        """
        step = self.steps.get(step_id)
        members = self.by_trace.get(step.trace if step else trace_id, [])
        if step is None and (step_id or not members):
            return "message_missing" if members else "no_conversation"
        if step is None or not step.is_generation:
            calls = [s for s in members if s.is_generation and (not step or self._is_in(s, step))]
            calls = [s for s in calls if s.is_failed or not is_blank(s.answer)]
            calls = [s for _, s in sorted(enumerate(calls), key=lambda e: (e[1].start, e[0]))]
            outer = [step] if step else self._outermost(trace_id)
            if len(calls) > 1:
                step = _call_with_output(calls, self._output(outer, calls))
            elif not calls and not outer:
                return "message_missing"
            else:
                is_only = len(outer) == 1 or (outer and outer[0].id == trace_id)
                step = calls[0] if calls else outer[0] if is_only else None
        if step is None:
            return "unclear"
        trace = self.steps.get(step.trace, step)
        return replace(step, rater=step.rater or trace.rater, session=step.session or trace.session)

    def _outermost(self, trace_id: str) -> list[Step]:
        """The trace, if it is a step, and the steps that no other one encloses."""
        trace = [self.steps[trace_id]] if trace_id in self.steps else []
        return [*trace, *(s for s in self.by_trace[trace_id] if not s.parent and s.id != trace_id)]

    def _output(self, outer: list[Step], calls: list[Step]) -> Any:
        """The first recorded output of a step that is the trace or encloses all calls."""
        for step in outer:
            encloses = step.id == step.trace or all(
                c is step or self._is_in(c, step) for c in calls
            )
            if encloses and not is_blank(step.answer):
                return step.answer
        return None

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


def _call_with_output(calls: list[Step], output: Any) -> Step | None:
    """The last call with this output; without one, the last call if it follows from the others.

    None if there is no such call, or if several calls that differ have the output.
    calls: in the order of their starts.
    """
    last = calls[-1]
    if output is None and (
        last.is_failed or (_reads_result(last) and all(_has_calls(c.answer) for c in calls[:-1]))
    ):
        return last
    text = _output_text(output)
    matches = [c for c in calls if text and (answer_text(c.answer) or "").strip() == text] or calls
    return matches[-1] if all(_is_same(matches[-1], call) for call in matches) else None


def _output_text(output: Any) -> str | None:
    """The text that a step returned; None where it is not certain.

    An object may have further texts, such as the question, a title or sources. Then the answer is
    in the column that has the name of one.
    """
    output = decode_json(output)
    if text := answer_text(output):
        return text.strip()
    if isinstance(output, Mapping):
        columns = [name for name in COMPLETION_COLUMNS if not is_blank(output.get(name))]
        if columns:
            return _output_text(output[columns[0]]) if len(columns) == 1 else None
    texts = list(_texts(output))
    return texts[0].strip() if len(texts) == 1 else None


def _is_same(a: Step, b: Step) -> bool:
    """Whether two calls have the same prompt and output, maybe recorded in different shapes."""
    if (a.inputs, a.answer, a.is_failed) == (b.inputs, b.answer, b.is_failed):
        return True
    exchange = exchange_of(a.inputs, a.answer)
    return isinstance(exchange, Exchange) and exchange == exchange_of(b.inputs, b.answer)


def _texts(value: Any) -> Iterator[str]:
    """The texts in a recorded value."""
    value = decode_json(value)
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _reads_result(call: Step) -> bool:
    """Whether the input of a call ends with the result of a tool."""
    try:
        return messages_of(call.inputs)[-1]["role"] == "tool"
    except (UnusableVote, IndexError):
        return False


def _has_calls(answer: Any) -> bool:
    """Whether a recorded output calls tools."""
    try:
        return "tool_calls" in assistant_of(answer)
    except UnusableVote:
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
