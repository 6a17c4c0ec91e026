"""A vote as feedback tools record it, whatever the tool: what every reader yields."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from valence.types import Message, Origin, content_id

Winner = Literal["this", "other", "tie", "both_bad"]
"""The result of a comparison of two completions of one prompt."""


class HashedRater(str):
    """What is written instead of a rater's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The rating by one person of one completion, or the choice between two.

    A reader yields one for each vote in an export, also where the vote contradicts an earlier one.

    source: name of the tool. id: of the vote in the tool; a vote that was changed keeps its id.
    updated_at: seconds since 1970 (UTC); 0 when unknown. rater: id in the tool, hashed when it is
    written; "" when unknown. is_machine: given by a model or a program.

    prompt: the chat turns before the rated completion. completion: the assistant's turn. turns: the
    turns of the completion before that one, with calls of tools and their results, if the vote is
    about them as well. message: id of the completion in the tool. parent: id of the turn that it
    answers, which regenerated completions share.

    label: thumbs up or down. score, scale: a number, and the ends of its scale. other, winner: the
    completion that it was compared with, and the result; other_turns: its turns. correction: a
    better completion, written by the rater, in place of its last turn. comment, tags: further words
    of the rater, and names of reasons. topics: tags that are about the conversation and not about
    the completion. follow_up: the user's next message,
    "" when there is none. model: that answered. session: id of the conversation. info: other
    columns to keep.

    tokens: how the completion was sampled, if this is known: prompt_ids, completion_ids, logps
    (nats), temperature, top_p, vocabulary (digest of the tokenizer), mask (which of them were
    sampled, if not all were), and correction_ids.
    other_tokens: the same for the other completion.
    """

    source: str
    id: str
    updated_at: float = 0.0
    rater: str = ""
    is_machine: bool = False
    prompt: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    completion: Message
    turns: tuple[Message, ...] = ()
    message: str = ""
    parent: str = ""
    label: bool | None = None
    score: float | None = None
    scale: tuple[float, float] | None = None
    other: Message | None = None
    other_turns: tuple[Message, ...] = ()
    other_message: str = ""
    other_model: str = ""
    winner: Winner | None = None
    correction: str | None = None
    comment: str = ""
    tags: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    follow_up: str = ""
    model: str = ""
    session: str = ""
    info: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    tokens: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    other_tokens: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    origin: Origin

    @property
    def has_verdict(self) -> bool:
        """Whether the vote says anything; one that was withdrawn does not."""
        verdicts = (self.label, self.score, self.winner, self.correction)
        return any(verdict is not None for verdict in verdicts)

    @property
    def is_follow_up(self) -> bool:
        """Whether this is no vote, but the record of what the user wrote after a completion."""
        return bool(self.follow_up) and not self.has_verdict

    @property
    def key(self) -> str:
        """The same for all votes of one rater on one completion or comparison.

        Of these, the last one counts. Votes of unknown raters are distinguished by their ids. A
        follow-up replaces no vote.
        """
        rater = self.rater or f"vote {self.id}"
        kind = ["follow-up"] if self.is_follow_up else []
        return content_id(self.source, rater, self.target, *kind)

    @property
    def target(self) -> str:
        """Identifies the completion, or the two completions, that the vote is about."""
        prompt = [dict(turn) for turn in (*self.prompt, *self.turns)]
        completion = self.message or content_id(prompt, dict(self.completion))
        if self.other is None:
            return content_id(self.source, self.session, completion)
        prompt = [dict(turn) for turn in (*self.prompt, *self.other_turns)]
        other = self.other_message or content_id(prompt, dict(self.other))
        return content_id(self.source, self.session, sorted([completion, other]))

    @property
    def rater_hash(self) -> str:
        """What is written instead of the rater's id: 12 hexadecimal digits; "" when unknown."""
        if not self.rater or isinstance(self.rater, HashedRater):
            return self.rater
        return hash_rater(self.source, self.rater)

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold, without fields that have their default and without the rater's id."""
        values: dict[str, Any] = {}
        for column in fields(self):
            value = getattr(self, column.name)
            is_required = column.default is column.default_factory is MISSING
            if is_required or value not in (column.default, (), {}):
                values[column.name] = value
        values |= {"rater": self.rater_hash} if self.rater else {}
        return {**values, "origin": {"path": self.origin.path, "line": self.origin.line}}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Vote:
        """The vote of which ``to_dict`` gave this. Raises TypeError or KeyError if none did."""
        arguments = {
            name: tuple(item) if isinstance(item, list) else item for name, item in value.items()
        }
        rater = HashedRater(value.get("rater", ""))
        return cls(**{**arguments, "rater": rater, "origin": Origin(**value["origin"])})


def withdrawn_vote(source: str, withdrawal: Skipped) -> Vote:
    """What is stored in the place of a vote that was withdrawn: its id and the time, no texts."""
    return Vote(
        source=source,
        id=withdrawal.vote_id,
        updated_at=withdrawal.updated_at,
        prompt=(),
        completion={},
        origin=withdrawal.origin,
    )


def hash_rater(source: str, rater: str) -> str:
    """12 hexadecimal digits for the id of a rater in a tool; "" for an unknown rater."""
    return hashlib.sha256(f"{source}/{rater}".encode()).hexdigest()[:12] if rater else ""


SkipReason = Literal[
    "machine",
    "no_vote",
    "withdrawn",
    "no_conversation",
    "message_missing",
    "unclear",
    "not_assistant",
    "unfinished",
    "failed",
    "empty",
    "image",
    "context",
    "multi_turn",
    "draft",
    "cancelled",
    "shape_unknown",
    "other_model",
    "before_since",
    "disagreement",
    "identical",
    "no_prompt",
]

SKIP_REASONS: dict[SkipReason, str] = {
    "machine": "scores of a model or program, which are not feedback",
    "no_vote": "records without a vote",
    "withdrawn": "votes that were withdrawn",
    "no_conversation": "votes whose conversation is not in the export",
    "message_missing": "votes on a message that is not in the conversation",
    "unclear": "votes on a trace with several answers, of which the rated one is not certain",
    "not_assistant": "votes on a message that is not the assistant's",
    "unfinished": "votes on an answer that had not ended",
    "failed": "votes on an answer that failed",
    "empty": "votes on an empty answer",
    "image": "conversations with images or other files",
    "context": "answers from tools or sources that the row would not contain",
    "multi_turn": "comparisons of conversations that differ before the last turn",
    "draft": "annotations that were not submitted",
    "cancelled": "annotations that were cancelled",
    "shape_unknown": "inputs or outputs in an unknown form",
    "other_model": "answers of another model",
    "before_since": "votes before --since",
    "disagreement": "votes on answers with as many thumbs up as thumbs down",
    "identical": "comparisons of two identical answers",
    "no_prompt": "answers without a prompt",
}
"""Why something in an export gives no row, in the words of the summary."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something in an export that gives no vote. example: what it looks like, for the message.

    vote_id: of the vote in the tool, if there is one. updated_at: seconds since 1970 (UTC) when a
    vote was withdrawn; 0 when unknown. With the reason "withdrawn" and a vote_id, the tool says
    that the vote with this id does not count any more.
    """

    reason: SkipReason
    origin: Origin
    example: str = ""
    vote_id: str = ""
    updated_at: float = 0.0


class UnusableVote(Exception):
    """Something in an export gives no vote. reason, example: of its ``Skipped``."""

    def __init__(self, reason: SkipReason, example: object = "") -> None:
        super().__init__(reason)
        self.reason: SkipReason = reason
        self.example = str(example)[:80]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What a reader may need to be told.

    paths: where rows keep their parts, by part (prompt, completion, left, right, correction,
    label), as dotted paths. score_names: names of the scores that are feedback. labels: categories
    that mean thumbs up (True) or down (False). keeps_reasoning: leave blocks of reasoning in
    completions. includes_unlabelled: also yield completions without a vote that a user message
    follows, or that a user corrected.
    """

    paths: Mapping[str, str] = field(default_factory=dict[str, str])
    score_names: tuple[str, ...] = ()
    labels: Mapping[str, bool] = field(default_factory=dict[str, bool])
    includes_machine: bool = False
    keeps_reasoning: bool = False
    includes_unlabelled: bool = False


Reader = Callable[[list[str], ReadOptions], Iterator[Vote | Skipped]]
"""Reads the files of an export. Raises UserError for a file that is not such an export."""
