"""The table of row formats: one line for each shape of a row."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from valence.data.values import COLOSSAL, OPENAI, ROLES, SHAREGPT, Dialect, graded
from valence.types import Kind

UNIMPORTANT = frozenset([
    "id", "ids", "qid", "uuid", "source", "category", "type", "level", "subject", "topic", "domain",
    "dataset", "split", "model", "models", "url", "meta", "metadata", "info", "lang", "language",
    "tag", "tags", "difficulty", "subset", "name", "title", "date", "time", "timestamp", "index",
    "license", "author", "user", "rater", "annotator", "judge", "version", "hash", "length", "turn",
    "turns", "num", "token", "tokens", "text", "comment", "reason", "rationale", "explanation",
    "feedback", "critique", "review", "distilabel", "moderation", "redacted",
    "weight",
])  # fmt: skip
"""Words in the names of columns that do not change what a row means."""
MESSAGE_ROLES = frozenset([*ROLES, "prompter"])
TREE = ("parent_id", "message_tree_id")


@dataclass(frozen=True)
class Format:
    """A row format: the kind of its examples, its columns, and the parts that these hold.

    need, may: the columns (or dotted paths) that a row must and may have, separated by spaces, in
    addition to ``weight`` and ``info``, which any row may have. ``column=part``: the part that the
    column holds, if it has another name. ``column|name``: other names of the column.
    dialect: how chat turns are written.
    test: whether a row with the needed columns has this format.
    only: the format is detected only for methods that read this kind. not_for: it is not.
    loose: the format is detected only if no other one fits, and if no column is left that matters;
    so are other names of columns.
    """

    gives: Kind
    need: str
    may: str = ""
    dialect: Dialect = OPENAI
    test: Callable[[Mapping[str, Any]], bool] | None = None
    only: Kind | None = None
    not_for: Kind | None = None
    loose: bool = False

    @cached_property
    def others(self) -> dict[str, tuple[str, ...]]:
        """Column -> its other names."""
        names = (token.partition("=")[0].split("|") for token in f"{self.need} {self.may}".split())
        return {column: tuple(others) for column, *others in names}

    @cached_property
    def parts(self) -> dict[str, str]:
        """Column -> the part that it holds."""
        parts = (token.partition("=")[2] for token in f"{self.need} {self.may}".split())
        return {column: part or column for column, part in zip(self.others, parts, strict=True)}

    @cached_property
    def columns(self) -> dict[str, str]:
        """``parts``, with the columns that any row may have."""
        common = {name: name for name in ("weight", "info") if name not in self.parts.values()}
        return {**self.parts, **common}

    @cached_property
    def required(self) -> frozenset[str]:
        return frozenset([*self.others][: len(self.need.split())])


def _ends_with_a_question(row: Mapping[str, Any]) -> bool:
    """Whether the last turn is to be answered."""
    last = row["messages"][-1] if isinstance(row["messages"], list) and row["messages"] else None
    return isinstance(last, dict) and last.get("role") in ("user", "tool")


def _has_graded_answers(row: Mapping[str, Any]) -> bool:
    """Whether the answers are objects that hold their scores or ranks."""
    answers = row["answers"]
    return isinstance(answers, list) and all(len(graded(answer)) > 1 for answer in answers)


def _has_no_other_text(row: Mapping[str, Any]) -> bool:
    """Whether no other column holds text of several words, turns or objects."""
    read = ("text", *ANSWER.split("|"))
    others = [v for name, v in row.items() if name not in read and not is_unimportant(name)]
    return is_not_one_message(row) and not any(
        isinstance(v, list | dict) or len(str(v or "").split()) > 1 for v in others
    )


def is_not_one_message(row: Mapping[str, Any]) -> bool:
    """Whether the text of a row is not one message of a conversation, with its role."""
    return str(row.get("role")).casefold() not in MESSAGE_ROLES


def is_in_a_tree(row: Mapping[str, Any]) -> bool:
    """Whether a row is one message of a tree of messages, which names its parent or its tree."""
    return not is_not_one_message(row) and not row.keys().isdisjoint(TREE)


def begins_a_tree(row: Mapping[str, Any]) -> bool:
    """Whether a message of a tree is its first one, and by a user."""
    is_by_user = str(row["role"]).casefold() in ("user", "human", "prompter")
    is_root = row.get("message_tree_id") in (None, row.get("message_id"))
    return is_by_user and is_root and row.get("parent_id") in (None, "")


def is_unimportant(column: str) -> bool:
    """Whether a column has the name of one that does not change what its row means."""
    return any(word in UNIMPORTANT for word in re.findall(r"[a-z]+", column.lower()))


# Names of columns that mean the same, and groups of columns

PROMPT = "prompt|question|query|instruction|problem|input"
ANSWER = "completion|response|answer|output|target|solution|generation"
TURNS = "messages|conversation|dialogue|dialog|chat"
LABEL = "label|thumbs_up"
CHOSEN = "chosen|chosen_response|response_j|preferred|accepted"
REJECTED = "rejected|rejected_response|response_k|dispreferred"
ANSWERS = "completions|responses|generations|outputs|candidates"
SCORES = "scores|rating|ratings ranks|rank"
MARKS = (("_a", "_b"), ("_0", "_1"), ("_1", "_2"), ("_A", "_B"), ("1", "2"), ("A", "B"))
NUMBERS = ("score", "rating", "reward")


def _of_two(*stems: str) -> list[str]:
    """The names of columns of the first of two answers, and of the second."""
    return ["|".join(stem + marks[i] for stem in stems for marks in MARKS) for i in (0, 1)]


FIRST, SECOND = _of_two("response", "answer", "output", "completion", "generation")
SCORE_FIRST, SCORE_SECOND = _of_two(*NUMBERS)
FLAG_FIRST, FLAG_SECOND = _of_two("winner_model", "winner")
TWO_ANSWERS = f"{PROMPT} {FIRST}=first {SECOND}=second"
SCORES_OF_TWO = f"{SCORE_FIRST}=score_first {SCORE_SECOND}=score_second"
FIRST_MINUS_SECOND, SECOND_MINUS_FIRST = (
    "|".join(
        f"{stem}{marks[side]}_minus{stem_again}{marks[1 - side]}"
        for stem in NUMBERS
        for stem_again in ("", f"_{stem}")
        for marks in MARKS
    )
    for side in (0, 1)
)
SCORES_OF_PAIR = " ".join(
    "|".join(f"{stem}_{side}|{side}_{stem}|{side}-{stem}" for stem in NUMBERS)
    for side in ("chosen", "rejected")
)
WINNER = "winner|better|preference|preferred|label|choice"
EDITED = "edited|edited_response=chosen original|original_response=rejected"
FEEDBACK = "feedback|comment|critique|follow_up|demonstration"
MORE = "system|system_prompt tools"
ALPACA = "input system history"
IDS = "prompt_ids=prompt completion_ids=completion"
GENERATED = (
    "logps sampled prompt=prompt_text completion=completion_text rendered tools info stop version "
    "index parts"
)
"""Columns that `valence sample` and `valence score` write in addition to the tokens. Of text and
tokens, the tokens are used if the row has the digest of the model's vocabulary, else the text.
"""
ATTRIBUTES = " ".join(f"{name}=scores.{name}" for name in (
    "correctness", "coherence", "complexity", "verbosity"
))  # fmt: skip

FORMATS: dict[str, Format] = {
    "judgement": Format("judgement", f"{PROMPT} {ANSWER} {LABEL}", f"score scores {MORE}"),
    "scored": Format("judgement", f"{PROMPT} {ANSWER} score|reward", f"scores {MORE} error parts"),
    "attributes": Format("judgement", f"{PROMPT} {ANSWER} scores", MORE),
    "judged_messages": Format("judgement", f"{TURNS}|completion {LABEL}", f"score scores {MORE}"),
    "scored_messages": Format("judgement", f"{TURNS} score|reward", f"scores {MORE}"),
    "preference": Format(
        "preference", f"{CHOSEN} {REJECTED}", f"{PROMPT} margin soft {SCORES_OF_PAIR} {MORE}"),
    "demonstration": Format("demonstration", f"{PROMPT} {ANSWER}", MORE),
    "messages": Format("demonstration", TURNS, MORE),
    "ranking": Format("ranking", f"{PROMPT} {ANSWERS}", f"{SCORES} {MORE}"),
    "prompt": Format("prompt", PROMPT, "tools"),
    "text_prompt": Format("prompt", "text=prompt", test=is_not_one_message),
    # Token ids, used without tokenization
    "judgement_ids": Format("judgement", f"{IDS} label", f"score error {GENERATED}"),
    "scored_ids": Format("judgement", f"{IDS} score", f"error {GENERATED}"),
    "preference_ids": Format(
        "preference", "prompt_ids=prompt chosen_ids=chosen rejected_ids=rejected",
        "margin soft prompt=prompt_text chosen=chosen_text rejected=rejected_text tools sampled"),
    "demonstration_ids": Format("demonstration", IDS, GENERATED),
    # HALOs: the output of its labelling script
    "binary_feedback": Format("judgement", "prompt output=completion label", "reward=score type"),
    "scalar_feedback": Format("judgement", "prompt output=completion reward=score", "type"),
    "pairwise_feedback": Format(
        "preference", "prompt output_A=first output_B=second label=label",
        "reward_A=score_first reward_B=score_second type"),
    # HelpSteer, NeMo-Aligner, ColossalChat, OpenRLHF, OpenAI
    "helpsteer": Format(
        "judgement", "prompt response=completion helpfulness=scores.helpfulness", ATTRIBUTES),
    "nemo_aligner": Format("judgement", "prompt response=completion preference=label"),
    "colossalchat": Format("judgement", "prompt completion label", dialect=COLOSSAL),
    "openrlhf": Format("judgement", "input=prompt output=completion label"),
    "openrlhf_preference": Format(
        "preference", "input=prompt chosen rejected", f"margin soft {SCORES_OF_PAIR}"),
    "openai_preference": Format(
        "preference", "input.messages=prompt preferred_output=chosen non_preferred_output=rejected",
        "input.tools=tools margin soft"),
    # LLaMA-Factory
    "sharegpt": Format("demonstration", "conversations=messages", "system tools", SHAREGPT),
    "sharegpt_kto": Format(
        "judgement", "conversations=messages kto_tag=label", "system tools", SHAREGPT),
    "sharegpt_preference": Format(
        "preference", "conversations=prompt chosen rejected", f"system tools {SCORES_OF_PAIR}",
        SHAREGPT),
    "alpaca": Format("demonstration", "instruction output=completion", ALPACA),
    "alpaca_kto": Format("judgement", "instruction output=completion kto_tag=label", ALPACA),
    "alpaca_preference": Format(
        "preference", "instruction chosen rejected", f"{ALPACA} {SCORES_OF_PAIR}"),
}  # fmt: skip
SHAPES: dict[str, Format] = {
    # What the reader of an answer wrote about it
    "feedback": Format(
        "judgement", f"{PROMPT} {ANSWER} {FEEDBACK}", f"label score {MORE}", only="feedback"),
    "feedback_messages": Format(
        "judgement", f"{TURNS} {FEEDBACK}", f"label score {MORE}", only="feedback"),
    "feedback_ids": Format(
        "judgement", f"{IDS} feedback", f"label score error {GENERATED}", only="feedback"),
    # Two answers, and which one is better
    "shp": Format(
        "preference", "history=prompt human_ref_A=first human_ref_B=second labels=label"),
    "safe_rlhf": Format(
        "preference", "prompt response_0=first response_1=second better_response_id=winner"),
    "helpsteer2_preference": Format(
        "preference",
        f"{PROMPT}=prompt response_1=first response_2=second preference_strength=strength"),
    "helpsteer3": Format(
        "preference",
        f"context|{PROMPT}=prompt response1=first response2=second overall_preference=strength"),
    "arena": Format(
        "preference", "conversation_a=first conversation_b=second winner", "model_a model_b turn"),
    "arena_flags": Format(
        "preference", f"{TWO_ANSWERS} {FLAG_FIRST}=score_first {FLAG_SECOND}=score_second",
        f"winner_tie|tie=score_tie model_a model_b {MORE}"),
    "summary_comparison": Format(
        "preference",
        "info.post=prompt summaries.0.text=first summaries.1.text=second choice=winner"),
    "webgpt": Format(
        "preference", "question.full_text|prompt|question|query=prompt answer_0=first "
        "answer_1=second score_0=score_first score_1=score_second"),
    "instruct_comparison": Format(
        "preference", "instruction output_1=first output_2=second preference|label=winner",
        "input"),
    "preference_collection": Format(
        "preference", "orig_instruction=prompt orig_response_A=first orig_response_B=second "
        "orig_preference=winner"),
    "comparison": Format(
        "preference", f"{TWO_ANSWERS} {WINNER}", f"{SCORES_OF_TWO} model_a model_b {MORE}",
        loose=True),
    "comparison_scores": Format(
        "preference", f"{TWO_ANSWERS} {SCORES_OF_TWO}", f"model_a model_b {MORE}", loose=True),
    "comparison_lead": Format(
        "preference", f"{TWO_ANSWERS} {FIRST_MINUS_SECOND}=lead", f"model_a model_b {MORE}",
        loose=True),
    "comparison_strength": Format(
        "preference", f"{TWO_ANSWERS} {SECOND_MINUS_FIRST}=strength", f"model_a model_b {MORE}",
        loose=True),
    # A chosen answer, a rejected one, and a conversation
    "ultrafeedback_binarized": Format(
        "preference", "prompt chosen rejected messages score_chosen score_rejected"),
    "rejected_response": Format(
        "preference", "messages rejected_response=rejected", "system tools margin",
        not_for="demonstration"),
    "rejected_messages": Format(
        "preference", "messages rejected_messages=rejected", "system tools margin",
        not_for="demonstration"),
    "correction": Format(
        "preference", f"{PROMPT}|context {EDITED}", f"feedback {MORE}", loose=True),
    # Several answers with scores or ranks
    "ultrafeedback": Format("ranking", "instruction=prompt completions"),
    "graded_answers": Format("ranking", f"{PROMPT} answers=completions", test=_has_graded_answers),
    "rated_generations": Format(
        "ranking", "messages=prompt generations=completions ratings=scores"),
    "nemo_ranking": Format("ranking", "context=prompt completions"),
    "feedback_collection": Format(
        "judgement", "orig_instruction=prompt orig_response=completion orig_score=score"),
    # An instruction with its input, and earlier rounds
    "instruct": Format("demonstration", "instruction response=completion", ALPACA, loose=True),
    "instruct_context": Format(
        "demonstration", "instruction|question context=input response|answer=completion",
        loose=True),
    "dialogue": Format("demonstration", f"{PROMPT} {ANSWER} history", MORE, loose=True),
    "message_pair": Format("demonstration", "message_1=prompt message_2=completion"),
    # Text without a prompt, and conversations that end with a question
    "plain_text": Format("demonstration", "text", test=_has_no_other_text, only="demonstration"),
    "plain_completion": Format(
        "demonstration", ANSWER, test=_has_no_other_text, only="demonstration", loose=True),
    "message_tree": Format("prompt", "text=prompt role", test=is_in_a_tree, only="prompt"),
    "open_messages": Format(
        "prompt", "messages=prompt", "tools", test=_ends_with_a_question, only="prompt"),
}  # fmt: skip
"""Shapes of public data sets and other tools."""
FORMATS |= SHAPES
