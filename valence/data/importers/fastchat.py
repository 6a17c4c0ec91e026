"""FastChat and Chatbot Arena: logs of a server, cleaned battles, and the published data sets.

The data sets are ``lmsys-arena-human-preference-55k`` (that of Kaggle) and
``arena-human-preference-140k``. Logs identify raters by their addresses only, which are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from valence.data.importers.exports import Columns, export_rows, votes_or_skipped
from valence.data.importers.fields import decode_json, object_at, objects_at, timestamp
from valence.data.importers.messages import assistant, system_turn, turns_of
from valence.data.importers.records import ReadOptions, Skipped, UnusableVote, Vote, Winner
from valence.data.sources import Row
from valence.data.values import as_number
from valence.types import Message, content_id

SOURCE = "fastchat"
LABELS = {"upvote": True, "downvote": False}
BATTLES: dict[str, Winner] = {
    "leftvote": "this",
    "rightvote": "other",
    "tievote": "tie",
    "bothbad_vote": "both_bad",
}
WINNERS: dict[str, Winner] = {
    "model_a": "this",
    "model_b": "other",
    "tie": "tie",
    "tie (bothbad)": "both_bad",
    "both_bad": "both_bad",
}
CURSOR = "▌"
"""Ends a text that is still being written."""
SERVER_ERROR = re.compile(
    r"\*\*NETWORK ERROR|\*\*RATE LIMIT|\$MODERATION\$"
    r"|YOU HAVE REACHED THE CONVERSATION LENGTH LIMIT|.*\(error_code: \d+[^)]*\)\s*\Z",
    re.DOTALL,
)
Sides = tuple[tuple[Message, ...], tuple[Message, ...]]
"""The turns of the two conversations of a battle."""


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """The votes of logs and of data sets. Log lines of other events are passed over."""
    for row in export_rows(paths, "FastChat", _is_row):
        if isinstance(row, Skipped):
            yield row
        else:
            yield from votes_or_skipped(_votes(row, options), row.origin)


def _is_row(row: Columns) -> bool:
    is_log = "type" in row and "tstamp" in row
    return is_log or "conversation_a" in row or "winner_model_a" in row


def _votes(row: Row, options: ReadOptions) -> Iterator[Vote]:
    keeps = options.keeps_reasoning
    event = str(row.value.get("type"))
    if "winner_model_a" in row.value:
        yield from _kaggle(row, keeps)
    elif "conversation_a" in row.value:
        yield from _battle(row, keeps)
    elif event in LABELS:
        yield from _single(row, keeps)
    elif event in BATTLES:
        yield from _logged_battle(row, keeps)
    elif event == "flag":
        raise UnusableVote("no_vote", "flag")


# Logs


def _single(row: Row, keeps_reasoning: bool) -> Iterator[Vote]:
    state = object_at(row.value, "state")
    prompt, completion = _split(_state_turns(state, keeps_reasoning))
    session = str(state.get("conv_id") or "")
    turn = f"{session}/{len(prompt)}"  # the same for regenerated completions
    yield Vote(
        source=SOURCE,
        id=turn,
        updated_at=timestamp(row.value.get("tstamp")),
        prompt=prompt,
        completion=completion,
        parent=turn,
        label=LABELS[row.value["type"]],
        model=str(row.value.get("model") or state.get("model_name") or ""),
        session=session,
        origin=row.origin,
    )


def _logged_battle(row: Row, keeps_reasoning: bool) -> Iterator[Vote]:
    states = objects_at(row.value, "states")
    if len(states) != 2:
        raise UnusableVote("shape_unknown", "states")
    sides = [_state_turns(state, keeps_reasoning) for state in states]
    names = row.value.get("models")
    if not isinstance(names, list) or len(names) != 2:
        names = ["", ""]
    models = [
        str(name or state.get("model_name") or "")
        for name, state in zip(names, states, strict=True)
    ]
    session = "/".join(str(state.get("conv_id") or "") for state in states)
    yield _comparison(
        row,
        (sides[0], sides[1]),
        BATTLES[row.value["type"]],
        id=f"{session}/{len(sides[0])}",
        updated_at=timestamp(row.value.get("tstamp")),
        model=models[0],
        other_model=models[1],
        session=session,
    )


def _state_turns(state: Mapping[str, Any], keeps_reasoning: bool) -> tuple[Message, ...]:
    """The turns of a logged conversation, which must end with a whole completion."""
    if state.get("has_csam_image"):
        raise UnusableVote("image")
    roles = state.get("roles")
    if not isinstance(roles, list) or len(roles) != 2:
        raise UnusableVote("shape_unknown", f"roles {roles!r}")
    turns: list[dict[str, Any]] = []
    messages = state.get("messages") or []
    if not isinstance(messages, list) or not all(
        isinstance(message, list) and len(message) == 2 for message in messages
    ):
        raise UnusableVote("shape_unknown", "messages")
    for number, (role, text) in enumerate(messages, 1):
        if isinstance(text, list):
            if len(text) > 1 and text[1]:
                raise UnusableVote("image", "images")
            text = text[0] if text else None
        if number == len(messages):
            _check_turn(role == roles[1], text)
        turns.append({"role": "assistant" if role == roles[1] else "user", "content": text})
    if not turns:
        raise UnusableVote("no_conversation")
    system = system_turn(state.get("system_message"))
    return (*system, *_turns(turns, keeps_reasoning))


def _check_turn(is_assistant: bool, text: object) -> None:
    """Raise UnusableVote for a last turn that is no completion."""
    if not is_assistant:
        raise UnusableVote("not_assistant", "user")
    if text is None or str(text).endswith(CURSOR):
        raise UnusableVote("unfinished")


# Battles


def _battle(row: Row, keeps_reasoning: bool) -> Iterator[Vote]:
    winner = WINNERS.get(str(row.value.get("winner")))
    if winner is None:
        raise UnusableVote("no_vote", row.value.get("winner"))
    sides: list[tuple[Message, ...]] = []
    for name in ("conversation_a", "conversation_b"):
        conversation = decode_json(row.value.get(name))
        if not isinstance(conversation, list) or not conversation:
            raise UnusableVote("no_conversation", name)
        sides.append(_turns(conversation, keeps_reasoning))
    yield _comparison(
        row,
        (sides[0], sides[1]),
        winner,
        id=str(row.value.get("question_id") or row.value.get("id") or ""),
        updated_at=timestamp(row.value.get("tstamp") or row.value.get("timestamp")),
        rater=str(row.value.get("judge") or ""),
        model=str(row.value.get("model_a") or ""),
        other_model=str(row.value.get("model_b") or ""),
        session=str(row.value.get("evaluation_session_id") or ""),
    )


def _kaggle(row: Row, keeps_reasoning: bool) -> Iterator[Vote]:
    winners: list[Winner] = [
        WINNERS[name]
        for name in ("model_a", "model_b", "tie")
        if as_number(row.value.get(f"winner_{name}")) == 1
    ]
    if len(winners) != 1:
        raise UnusableVote("no_vote")
    prompts = decode_json(row.value.get("prompt"))
    sides: list[tuple[Message, ...]] = []
    for name in ("response_a", "response_b"):
        responses = decode_json(row.value.get(name))
        if not isinstance(prompts, list) or not isinstance(responses, list):
            raise UnusableVote("shape_unknown", name)
        if len(prompts) != len(responses):
            raise UnusableVote(
                "unfinished", f"{len(responses)} responses to {len(prompts)} prompts"
            )
        conversation: list[dict[str, Any]] = []
        for prompt, response in zip(prompts, responses, strict=True):
            conversation.append({"role": "user", "content": prompt})
            conversation.append({"role": "assistant", "content": response})
        sides.append(_turns(conversation, keeps_reasoning))
    yield _comparison(
        row,
        (sides[0], sides[1]),
        winners[0],
        id=str(row.value.get("id") or ""),
        model=str(row.value.get("model_a") or ""),
        other_model=str(row.value.get("model_b") or ""),
    )


def _comparison(row: Row, sides: Sides, winner: Winner, **fields: Any) -> Vote:
    """The vote on the last turns of two conversations that are the same before."""
    prompt, completion = _split(sides[0])
    other_prompt, other = _split(sides[1])
    if prompt != other_prompt:
        raise UnusableVote("multi_turn", f"{len(sides[0])} turns")
    fields["id"] = fields["id"] or content_id(row.value)
    return Vote(
        source=SOURCE,
        prompt=prompt,
        completion=completion,
        other=other,
        winner=winner,
        origin=row.origin,
        **fields,
    )


def _turns(conversation: list[Any], keeps_reasoning: bool) -> tuple[Message, ...]:
    """The turns of a conversation. The last one may be empty, which ``_split`` finds."""
    *earlier, last = conversation
    if not isinstance(last, Mapping):
        raise UnusableVote("shape_unknown", f"turn is {last!r}")
    turns = turns_of(earlier)
    if last.get("role") != "assistant":
        raise UnusableVote("not_assistant", last.get("role"))
    return (*turns, assistant(last.get("content"), keeps_reasoning=keeps_reasoning))


def _split(turns: tuple[Message, ...]) -> tuple[tuple[Message, ...], Message]:
    """Prompt and completion."""
    if SERVER_ERROR.match(str(turns[-1]["content"])):
        raise UnusableVote("failed", turns[-1]["content"])
    return turns[:-1], turns[-1]
