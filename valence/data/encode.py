"""Examples to tokens: what sampling would feed the model, then the answer, with a mask that ends at
the end-of-turn.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from valence.data.encoded_set import (
    AUDIT_DTYPES,
    AuditColumns,
    EncodedChunk,
    EncodedChunkBuilder,
    EncodedSet,
    Length,
    Lengths,
    TurnExamples,
    Unusable,
)
from valence.data.hindsight import TeacherContext, TextSource
from valence.data.template import (
    AsChat,
    ChatTemplate,
    Piece,
    RenderedAnswer,
    RewrittenTurnError,
    Tools,
    has_no_weight,
    renders_as_chat,
)
from valence.data.tokenized_dataset import DTYPES, Origins, TokenizedDataset
from valence.data.vocab import Marked, RowError, Vocab, any_of
from valence.errors import UserError
from valence.types import (
    Chat,
    Content,
    Demonstration,
    Example,
    Ids,
    Judgement,
    Message,
    Origin,
    Preference,
    Prompt,
    Ranking,
    Sampled,
    TokenizedCompletion,
    TokenizedExample,
    content_id,
)

LongRows = Literal["drop", "cut_completion", "cut_prompt"]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A prompt and its answers as tokens.

    ``head``: tokens at the start of the prompt that no cut may take (BOS). ``teacher``: the prompt
    of the teacher; empty without one.
    """

    prompt: tuple[int, ...]
    prompt_mask: tuple[bool, ...]
    answers: tuple[TokenizedCompletion, ...]
    head: int = 0
    teacher: tuple[int, ...] = ()

    @property
    def length(self) -> Length:
        """The prompt's is that of the longer of both prompts."""
        prompt = max(len(self.prompt), len(self.teacher))
        return Length(prompt, tuple(len(a.ids) for a in self.answers))


@dataclass(slots=True)
class _EncodingState:
    """What is found out about one example while it is encoded."""

    notes: set[str] = field(default_factory=set[str])
    length: Length | None = None
    earlier_turns_trainable: bool = True  # may earlier assistant turns be trained on?
    rewritten: bool = False  # could they not, because the template prints them differently?
    follows: bool = False  # does it matter how likely its answers were when they were sampled?


class Encoder:
    """Turns examples into tokens with a tokenizer and its chat template.

    max_length: longest prompt with its answer, in tokens. answers: how many of these are for
    answers that are still to come. teacher: how feedback enters the prompt of the teacher; None if
    the method has no teacher.
    tools: those of chat prompts without tools.
    long_rows, train_on, as_chat, chat_template_kwargs: as in a recipe's data section. stop_ids:
    tokens at which the model stops, by its generation config. Raises UserError for a template that
    is asked for and missing.

    Its attribute of that name says whether a prompt of plain text becomes a user message; an empty
    one never does.

    Notes that it makes on rows:
    ``boundary_merges``: tokenising prompt and answer at once would have merged text across the
        boundary
    ``special_tokens_in_text``: the row's own text holds the name of a special token, which becomes
        that token
    ``bos_in_text``: a text prompt starts with BOS already; none was added
    ``double_bos``: the prompt starts with two BOS tokens
    ``empty_prompt``: an empty text prompt: BOS, or else EOS, stands in for it
    ``end_of_turn_added``: the template prints no end-of-turn token behind the answer; one was
        appended
    ``rewritten_prompt``: the template prints the prompt differently once it is answered; it is
        trained on as it is sampled
    ``another_header``: the template starts an answered turn with another header than its generation
        prompt has
    ``reasoning_kept``: the template drops an answer's reasoning; it is trained on, behind the
        generation prompt
    ``reasoning_ignored``: the template does not print an answer's reasoning, which is not trained
        on
    ``split_turns``: the template rewrites earlier turns; each assistant turn became an example
    ``text_has_no_turns``: train_on is "assistant", and the prompt is text, which has no earlier
        answers to train on
    ``tools_ignored``: the row has tools, and the template does not print tools
    ``cut_prompt``, ``cut_completion``: the row was too long and lost its oldest turns / the end of
        an answer
    ``sampling_truncated``: sampling ended at the length limit, so the answer has no end
    ``logps_of_others``: the stored log-probabilities are not those of the model as it is, and are
        not read
    ``logps_missing``: a ranking has none, where others do: none are read
    ``tokenized_again``: the tokens come from another or an unknown tokenizer; the text is used

    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        answers: int = 0,
        long_rows: LongRows = "drop",
        train_on: Literal["completion", "assistant"] = "completion",
        as_chat: AsChat = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stop_ids: Collection[int] = (),
        teacher: TeacherContext | None = None,
        tools: Tools = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.teacher, self.tools = teacher, tuple(tools)
        self.max_length, self.answers = max_length - answers, answers
        self.long_rows: LongRows = long_rows
        self.train_on = train_on
        self.as_chat = renders_as_chat(as_chat, tokenizer)
        self.vocab = Vocab(tokenizer)
        self.stop_ids = tuple(i for i in stop_ids if 0 <= i < len(tokenizer))
        self.template = ChatTemplate(tokenizer, chat_template_kwargs, self.stop_ids)

    def with_teacher(self, teacher: TeacherContext) -> Encoder:
        """The same, which also encodes the prompts of a teacher."""
        encoder = copy(self)
        encoder.teacher = teacher
        encoder.__dict__.pop("digest", None)
        return encoder

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that tokens depend on, without the tokenizer and its template."""
        return {
            "max_length": self.max_length,
            "answers": self.answers,
            "long_rows": self.long_rows,
            "train_on": self.train_on,
            "as_chat": self.as_chat,
            "chat_template_kwargs": self.template.kwargs,
            "stop_ids": self.stop_ids,
            **({"teacher": repr(self.teacher)} if self.teacher else {}),
            **({"tools": self.tools} if self.tools else {}),
        }

    @cached_property
    def digest(self) -> str:
        """Of everything that the tokens of a row depend on: tokenizer, template and settings."""
        template = self.tokenizer.chat_template
        return content_id(self.vocab.tokenizer_digest, template, self.settings)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens at which generation stops: the template's end-of-turn, the tokenizer's
        end-of-sequence token, and those of the model's generation config. The first is the one that
        ends a completion of a plain-text prompt.
        """
        turn = self.template.turn_end.token
        turns = () if turn is None else (turn,)
        rendered_ids = (*turns, *self.vocab.ends) if self.as_chat else (*self.vocab.ends, *turns)
        return tuple(dict.fromkeys((*rendered_ids, *self.stop_ids)))

    def encode_prompt(self, prompt: Content) -> tuple[int, ...]:
        """The tokens that a prompt is sampled from, and the same ones that training sees.

        Raises UserError.
        """
        try:
            [prompt] = self.rendered_as(prompt)
            return self._tokens(self._form(prompt), (), False, _EncodingState()).prompt
        except RowError as error:
            raise UserError(error.reason, code=error.code, fix=error.fix) from error

    def encode_teacher_prompt(
        self, prompt: Content, feedback: str, source: TextSource
    ) -> tuple[int, ...]:
        """The tokens that the teacher of a sampled completion reads before it. Raises UserError."""
        try:
            [prompt] = self.rendered_as(prompt)
            context = self._with_feedback(prompt, (), feedback, None, source)
            return self._tokens(context, (), False, _EncodingState()).prompt
        except RowError as error:
            raise UserError(error.reason, code=error.code, fix=error.fix) from error

    def encode_tool_suffix(
        self, prompt: Chat, turns: Sequence[Message], results: int
    ) -> tuple[int, ...]:
        """The tokens between a sampled turn with its end token and the model's next turn.

        prompt: the conversation's prompt. turns: what follows it; the last ``results`` of them
        answer the sampled turn. Raises RowError (see ``ChatTemplate.tool_suffix``).
        """
        end, suffix = self.template.split_tool_suffix(
            (*prompt.messages, *turns), results, prompt.tools
        )
        (ids, _), _ = self.vocab.join([(suffix, False)], end, self.vocab.ids(end))
        return ids

    def without_special(self, text: str) -> str:
        """A text that others have written, in which no special token stands: a space breaks each.

        A result of a tool could otherwise end its turn and begin one of the assistant.
        """
        return self.template.special_pattern.sub(lambda m: f"{m[0][:1]} {m[0][1:]}", text)

    def rendered_as(self, *contents: Content) -> Sequence[Content]:
        """A prompt and its answers; transcripts as text if no chat template is used."""
        texts = [c.transcript if isinstance(c, Chat) else None for c in contents]
        return contents if self.as_chat or None in texts else [t for t in texts if t is not None]

    def chat_of(self, prompt: Content) -> Chat:
        """A prompt as the chat that it is encoded as. Raises UserError if it is none."""
        [content] = self.rendered_as(prompt)
        content = self._form(content)
        if isinstance(content, Chat):
            return content
        kind = "token ids" if isinstance(content, Ids) else "plain text"
        raise UserError(
            f"tools need prompts that are chats, and this one is {kind}",
            code="tools-need-chat",
            where="rollout.tools",
            fix="use a model with a chat template, or set data.chat_template: chatml, and write "
            "prompts as text or as chat messages",
        )

    def encode(self, example: Example, source: str = "") -> TokenizedExample | Unusable:
        """One example as tokens, or why it cannot be used."""
        return self._encode(example, source, _EncodingState())

    def encode_all(
        self, examples: Sequence[Example], sources: Sequence[str] | None = None
    ) -> EncodedSet:
        """Tokenize all examples. ``sources``: the file of each example."""
        return build_encoded_set(self.encode_chunk(examples, sources), examples)

    def encode_chunk(
        self, examples: Iterable[Example], sources: Sequence[str] | None = None
    ) -> EncodedChunk:
        """Tokenize consecutive examples into columns."""
        builder = EncodedChunkBuilder()
        for i, example in enumerate(examples):
            source = sources[i] if sources else ""
            states = [_EncodingState()]
            results = [self._encode(example, source, states[0])]
            turns: list[Example] = []
            if states[0].rewritten and isinstance(example, Demonstration):
                turns = _one_per_turn(example)
                states = [_EncodingState(earlier_turns_trainable=False) for _ in turns]
                results = [
                    self._encode(turn, source, state)
                    for turn, state in zip(turns, states, strict=True)
                ]
                states[0].notes.add("split_turns")
            notes = sorted({note for state in states for note in state.notes})
            lengths = [state.length for state in states if state.length is not None]
            builder.add(example, results, notes, lengths, len(turns))
        return builder.chunk()

    def _encode(
        self, example: Example, source: str, state: _EncodingState
    ) -> TokenizedExample | Unusable:
        completions, verdict = _parts(example)
        feedback: Judgement | None = None
        if self.teacher is not None and isinstance(example, Judgement) and example.feedback:
            feedback, verdict = example, {**verdict, "kind": "feedback"}
        state.follows = isinstance(example, Ranking) or feedback is not None
        trained_prompt = (
            state.earlier_turns_trainable
            and isinstance(example, Demonstration)
            and self.train_on == "assistant"
        )
        try:
            prompt, completions = self._read_tokens(example.prompt, completions, state)
            prompt, *completions = self.rendered_as(prompt, *completions)
            prompt = self._form(prompt, completions)
            if trained_prompt and not isinstance(prompt, Chat):
                state.notes.add("text_has_no_turns")
            tokens = self._tokens(prompt, completions, trained_prompt, state, feedback)
            state.length = tokens.length
            fitted = self._fit(tokens, prompt, completions, trained_prompt, state, feedback)
        except RowError as error:
            state.rewritten = isinstance(error, RewrittenTurnError)
            return Unusable(
                origin=example.origin,
                kind=error.kind,
                reason=error.reason,
                fix=error.fix,
                source=source,
            )
        if fitted is None:
            return self._too_long(tokens, example.origin, source)
        return TokenizedExample(
            id=example.id,
            origin=example.origin,
            prompt_ids=fitted.prompt,
            prompt_mask=fitted.prompt_mask,
            answers=fitted.answers,
            weight=example.weight,
            source=source,
            teacher_ids=fitted.teacher,
            **verdict,
        )

    # --- a prompt and its answers as tokens

    def _read_tokens(
        self, prompt: Content, completions: Sequence[Content], state: _EncodingState
    ) -> tuple[Content, Sequence[Content]]:
        """The same, or their texts if they are tokens of another or an unknown vocabulary.

        Raises RowError if the row does not have the texts.
        """
        if all(
            not isinstance(c, Ids) or c.sampled is None or c.sampled.vocabulary == self.vocab.digest
            for c in completions
        ):
            return prompt, completions
        first, *others = (_readable(content) for content in (prompt, *completions))
        texts = [text for text in others if text is not None]
        if first is None or len(texts) < len(others):
            raise RowError(
                "another_vocabulary",
                "the tokens of the answer come from another tokenizer than that of the model, or "
                "from an unknown one, and the row does not have the complete text",
                'if they are tokens of this model, add sampled: {"vocabulary": '
                f'"{self.vocab.digest}"}} to the row; otherwise add the text of prompt and answer',
            )
        state.notes.add("tokenized_again")
        return first, texts

    def _form(self, prompt: Content, completions: Sequence[Content] = ()) -> Content:
        """The prompt as it is encoded: text becomes a user message as ``as_chat`` says, or when a
        chat answers it.

        Raises RowError for text that already holds the template's markup.
        """
        if isinstance(prompt, Chat) and self.tools and not prompt.tools:
            return replace(prompt, tools=self.tools)
        if not isinstance(prompt, str):
            return prompt
        answered_by_chat = any(isinstance(c, Chat) for c in completions)
        if not answered_by_chat and not (self.as_chat and prompt.strip()):
            return prompt
        if marker := next((name for name in sorted(self.template.markers) if name in prompt), None):
            raise RowError(
                "template_in_text",
                f"the prompt is plain text that already contains {marker}, a token of the chat "
                f"template",
                f"remove {marker} from the prompt"
                if answered_by_chat
                else "if the chat template is already applied to the rows, set data.as_chat: "
                f"false; otherwise remove {marker} from the prompt",
            )
        return replace(_turns(prompt, "user"), tools=self.tools)

    def _tokens(
        self,
        prompt: Content,
        completions: Sequence[Content],
        trained_prompt: bool,
        state: _EncodingState,
        feedback: Judgement | None = None,
    ) -> _Tokens:
        """``trained_prompt``: assistant turns of the prompt are in its mask. ``feedback``: the
        example whose feedback the teacher reads. Raises RowError.
        """
        if isinstance(prompt, Chat):
            tokens = self._chat_tokens(prompt, completions, trained_prompt, state)
        elif isinstance(prompt, Ids):
            tokens = self._ids_tokens(prompt, completions, state)
        else:
            tokens = self._text_tokens(prompt, completions, state)
        if self.vocab.bos is not None and tokens.prompt[:2] == (self.vocab.bos, self.vocab.bos):
            state.notes.add("double_bos")
        if feedback is not None:
            return replace(
                tokens, teacher=self._teacher_prompt(prompt, completions, feedback, tokens)
            )
        return tokens

    def _teacher_prompt(
        self, prompt: Content, completions: Sequence[Content], feedback: Judgement, tokens: _Tokens
    ) -> tuple[int, ...]:
        """The tokens of the teacher's prompt. Raises RowError if the completion would have other
        tokens behind it.
        """
        context = self._with_feedback(prompt, completions, feedback.feedback, feedback.label)
        is_text = not isinstance(prompt, Ids)
        teacher = self._tokens(context, completions if is_text else (), False, _EncodingState())
        if is_text and [a.ids for a in teacher.answers] != [a.ids for a in tokens.answers]:
            raise RowError(
                "feedback_changes_tokens",
                "the completion has other tokens after a prompt with the feedback",
                "remove the row, or use another chat template",
            )
        return teacher.prompt

    def _with_feedback(
        self,
        prompt: Content,
        completions: Sequence[Content],
        feedback: str,
        label: bool | None,
        source: TextSource | None = None,
    ) -> Chat | str:
        """A prompt with the feedback. Raises RowError if the prompt has no text."""
        assert self.teacher is not None
        text, answers = _readable(prompt), [_readable(c) for c in completions]
        if text is None:
            raise RowError(
                "feedback_without_text",
                "the prompt has tokens and no text, so feedback cannot be added to it",
                "add the text of the prompt to the row",
            )
        text = self._form(text, [a for a in answers if a is not None])
        assert not isinstance(text, Ids)
        return self.teacher.prompt(text, feedback, label, source)

    def _chat_tokens(
        self,
        prompt: Chat,
        completions: Sequence[Content],
        trained_prompt: bool,
        state: _EncodingState,
    ) -> _Tokens:
        if self.template.exists:
            _ = self.template.turn_end  # a template that does not work is no mistake of the row
        text = self.template.prompt(prompt)
        self._note_special(prompt, state)
        if prompt.tools and not self.template.reads_tools(prompt.tools):
            state.notes.add("tools_ignored")
        plain = self.vocab.ids(text)
        chats = [_turns(completion, "assistant") for completion in completions]
        rendered: list[RenderedAnswer] = []
        for chat in chats:
            _check_turns(chat)
            self._note_special(chat, state)
            rendered.append(self.template.answer(prompt, text, chat))
            state.notes.update(rendered[-1].notes)
        context = min((part.context for part in rendered), key=len, default=text)
        ids = plain if context == text else self.vocab.ids(context)
        mask = (False,) * len(ids)
        if trained_prompt:
            joined, mask = self._join(self.template.prompt_pieces(prompt, text), "", (), state)
            if joined != ids:
                message = (
                    "the tokens of an earlier assistant turn cannot be separated from the text "
                    "around it"
                )
                raise RewrittenTurnError("not_a_prefix", message, "set data.train_on: completion")
        answers: list[TokenizedCompletion] = []
        for part in rendered:
            # Answers share the shortest context; what others have more of it precedes their own
            # text.
            between = part.context[len(context) :]
            pieces = [(between, False), *part.pieces] if between else part.pieces
            answers.append(self._ended(self._join(pieces, context, ids, state), state))
        return _Tokens(ids, mask, tuple(answers))

    def _ended(self, marked: Marked, state: _EncodingState) -> TokenizedCompletion:
        """An answer with the end-of-turn token that the template printed, or else with one
        appended.
        """
        ids, mask = marked
        if not any(mask):
            raise RowError(
                "no_weight",
                "all assistant turns of the answer have weight 0",
                "remove the row, or set the weight of a turn to 1",
            )
        if self._stops.issuperset(i for i, trained in zip(ids, mask, strict=True) if trained):
            raise _empty_answer()
        if ids[-1] in self._stops:
            return TokenizedCompletion(ids, mask)
        state.notes.add("end_of_turn_added")
        end = self.template.turn_end.token
        return TokenizedCompletion((*ids, self.vocab.eos if end is None else end), (*mask, True))

    def _text_tokens(
        self, prompt: str, completions: Sequence[Content], state: _EncodingState
    ) -> _Tokens:
        self._note_special(prompt, state)
        plain, prefix = self.vocab.ids(prompt), self.vocab.prefix
        head = len(prefix)
        if prefix and plain[:head] == prefix:
            state.notes.add("bos_in_text")
            ids = plain
        elif plain or prefix:
            ids = prefix + plain
        else:
            state.notes.add("empty_prompt")
            ids, head = self.vocab.stand_in, 1
        answers = (self._text_answer(c, prompt, plain, state) for c in completions)
        return _Tokens(ids, (False,) * len(ids), tuple(answers), head)

    def _text_answer(
        self, completion: Content, prompt: str, plain: tuple[int, ...], state: _EncodingState
    ) -> TokenizedCompletion:
        if not isinstance(completion, str):
            raise _mixed("text", completion)
        if not completion.strip():
            raise _empty_answer()
        self._note_special(completion, state)
        ids, mask = self._join([(completion, True)], prompt, plain, state)
        if not ids:
            raise _empty_answer()
        if ids[-1] not in self.end_ids:
            ids, mask = (*ids, self.vocab.eos), (*mask, True)
        return TokenizedCompletion(ids, mask)

    def _ids_tokens(
        self, prompt: Ids, completions: Sequence[Content], state: _EncodingState
    ) -> _Tokens:
        ids = self.vocab.checked(prompt.ids)
        if not ids:
            raise RowError(
                "empty_prompt",
                "the prompt has no tokens",
                "add at least the model's BOS token to prompt_ids",
            )
        answers: list[TokenizedCompletion] = []
        for completion in completions:
            if not isinstance(completion, Ids):
                raise _mixed("token ids", completion)
            if not completion.ids:
                raise _empty_answer()
            answer = self.vocab.checked(completion.ids)
            columns = self._columns(completion.sampled, state)
            if completion.sampled and completion.sampled.is_truncated:
                state.notes.add("sampling_truncated")
            mask = completion.sampled.mask if completion.sampled else ()
            answers.append(
                TokenizedCompletion(
                    answer, mask or (True,) * len(answer), answer[-1] in self.end_ids, columns
                )
            )
        return _Tokens(ids, (False,) * len(ids), tuple(answers), head=int(ids[0] == self.vocab.bos))

    def _columns(
        self, sampled: Sampled | None, state: _EncodingState
    ) -> tuple[tuple[str, tuple[float, ...]], ...]:
        """`old` of an answer that was sampled, if it is to be known."""
        if sampled is None or not sampled.logps or not state.follows:
            return ()
        if not sampled.plain:
            state.notes.add("logps_of_others")
            return ()
        return (("old", sampled.logps),)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return any_of(set(self.vocab.special))

    @cached_property
    def _stops(self) -> frozenset[int | None]:
        """Tokens that can end a turn: the end-of-turn token, or another special one that some turns
        end with.
        """
        return frozenset(
            {self.template.turn_end.token, *self.vocab.ends, *self.vocab.special.values()} - {None}
        )

    def _note_special(self, content: str | Chat, state: _EncodingState) -> None:
        texts = (
            [content] if isinstance(content, str) else [m.get("content") for m in content.messages]
        )
        if any(isinstance(t, str) and self._special.search(t) for t in texts):
            state.notes.add("special_tokens_in_text")

    def _join(
        self, pieces: Sequence[Piece], before: str, context: tuple[int, ...], state: _EncodingState
    ) -> Marked:
        marked, merged = self.vocab.join(pieces, before, context)
        if merged:
            state.notes.add("boundary_merges")
        return marked

    # --- rows longer than max_length

    def _fit(
        self,
        tokens: _Tokens,
        prompt: Content,
        completions: Sequence[Content],
        trained_prompt: bool,
        state: _EncodingState,
        feedback: Judgement | None = None,
    ) -> _Tokens | None:
        """The same within max_length, or None."""
        if tokens.length.longest <= self.max_length:
            return tokens
        fitted: _Tokens | None = None
        if self.long_rows == "cut_completion":
            fitted = _cut_answers(tokens, self.max_length - tokens.length.prompt)
        elif self.long_rows == "cut_prompt":
            if isinstance(prompt, Chat):
                shorter = (
                    self._tokens(p, completions, trained_prompt, state, feedback)
                    for p in _shorter(prompt)
                )
                fitted = next((t for t in shorter if t.length.longest <= self.max_length), None)
            elif not tokens.teacher:
                fitted = _cut_prompt(tokens, self.max_length)
        if fitted is not None:
            state.notes.add(self.long_rows)
        return fitted

    def _too_long(self, tokens: _Tokens, origin: Origin, source: str) -> Unusable:
        length = tokens.length
        text = {
            "drop": f"the row has {length.longest} tokens",
            "cut_completion": f"the prompt alone has {length.prompt} tokens",
            "cut_prompt": f"the row has {length.longest} tokens, and is too long even with the "
            "shortest possible prompt",
        }[self.long_rows]
        reserved = (
            f", of which {self.answers} are for the answer (rollout.max_new_tokens)"
            if self.answers
            else ""
        )
        without = len(tokens.prompt) + max(length.answers, default=0)
        if tokens.teacher and without <= self.max_length:
            text += f" with its feedback, and {without} without"
        reason = f"{text}; data.max_length is {self.max_length + self.answers}{reserved}"
        fix = f"set data.max_length to {length.longest + self.answers} or more, or shorten the row"
        if self.long_rows == "drop":
            fix += ", or set data.long_rows to cut such rows"
        return Unusable(
            origin=origin, kind="too_long", reason=reason, fix=fix, dropped=True, source=source
        )


def _parts(example: Example) -> tuple[tuple[Content, ...], dict[str, Any]]:
    """The completions, and what a TokenizedExample says of them: its kind and what is known about
    their worth.
    """
    match example:
        case Judgement():
            scores = () if example.score is None else (example.score,)
            judged = {
                "label": example.label,
                "scores": scores,
                "attributes": tuple(sorted(example.attributes.items())),
            }
            return (example.completion,), {"kind": "judgement", **judged}
        case Preference():
            return (example.chosen, example.rejected), {
                "kind": "preference",
                "margin": example.margin,
                "soft": example.soft,
            }
        case Demonstration():
            return (example.completion,), {"kind": "demonstration"}
        case Ranking():
            return example.completions, {"kind": "ranking", "scores": example.scores}
        case Prompt():
            return (), {"kind": "prompt"}


def _readable(content: Content) -> str | Chat | None:
    """The text of tokens; None if it is not known. Other content unchanged."""
    return content.readable if isinstance(content, Ids) else content


def _turns(content: Content, role: str) -> Chat:
    """Text as one turn; a chat as it is."""
    if isinstance(content, Ids):
        raise _mixed("chat messages", content)
    return content if isinstance(content, Chat) else Chat(({"role": role, "content": content},))


def _check_turns(completion: Chat) -> None:
    """Raises RowError unless the completion starts and ends with an assistant turn, and none of
    these is empty.
    """
    messages = completion.messages
    if not messages or messages[0]["role"] != "assistant" or messages[-1]["role"] != "assistant":
        raise RowError(
            "not_an_answer",
            "the completion does not start and end with an assistant turn",
            "put the turns before the answer into the prompt, and remove those after it",
        )
    for message in messages:
        content = message.get("content")
        blank = not content.strip() if isinstance(content, str) else not content
        if message["role"] == "assistant" and blank and not message.get("tool_calls"):
            raise _empty_answer()


def _one_per_turn(example: Demonstration) -> list[Example]:
    """A conversation as one example for each assistant turn, with all that precedes it as the
    prompt.
    """
    prompt, completion = _readable(example.prompt), _readable(example.completion)
    assert isinstance(prompt, Chat)
    assert completion is not None
    messages = (*prompt.messages, *_turns(completion, "assistant").messages)
    return [
        replace(example, prompt=Chat(messages[:i], prompt.tools), completion=Chat((messages[i],)))
        for i, message in enumerate(messages)
        if message["role"] == "assistant" and i > 0 and not has_no_weight(message)
    ]


def _empty_answer() -> RowError:
    return RowError("empty_answer", "the answer is empty", "write the answer, or remove the row")


def _mixed(wanted: str, content: Content) -> RowError:
    name = {str: "text", Chat: "chat messages", Ids: "token ids"}[type(content)]
    return RowError(
        "mixed_content",
        f"the row mixes {wanted} with {name}",
        f"write prompt and completion both as {wanted}",
    )


def _cut_answers(tokens: _Tokens, room: int) -> _Tokens | None:
    """The answers cut on the right to at most ``room`` tokens; None when nothing would be left."""
    if room < 1 or not all(any(a.mask[:room]) for a in tokens.answers):
        return None
    return replace(
        tokens, answers=tuple(a if len(a.ids) <= room else _cut(a, room) for a in tokens.answers)
    )


def _cut(answer: TokenizedCompletion, room: int) -> TokenizedCompletion:
    return TokenizedCompletion(
        answer.ids[:room],
        answer.mask[:room],
        False,
        tuple((name, values[:room]) for name, values in answer.columns),
    )


def build_encoded_set(chunk: EncodedChunk, examples: Sequence[Example]) -> EncodedSet:
    """Build the result for ``examples`` from a chunk with all of their columns."""
    columns, names = chunk.columns, chunk.names
    units = TokenizedDataset({name: columns[name] for name in DTYPES}, names)
    origins = Origins(names["files"], columns["row_path"], columns["row_line"])
    units, without_logps = _drop_partial_token_columns(units)
    notes = {
        name: origins.select(columns["note_example"][columns["note"] == number])
        for number, name in enumerate(names["notes"])
    }
    notes |= {"logps_missing": without_logps} if without_logps else {}
    return EncodedSet(
        units,
        tuple(chunk.unusable),
        {name: notes[name] for name in sorted(notes)},
        Lengths(columns["prompt_length"], columns["num_lengths"], columns["answer_length"]),
        AuditColumns({name: columns[name] for name in AUDIT_DTYPES}, origins),
        TurnExamples(examples, columns["conversation"], columns["num_turns"], _one_per_turn),
    )


def _drop_partial_token_columns(
    units: TokenizedDataset,
) -> tuple[TokenizedDataset, Origins | None]:
    """Drop the token columns if some answers of rankings have them and others do not.

    Also returns the rankings without them, or None if nothing was dropped.
    """
    has_names = np.array([bool(names) for names in units.names["columns"]], np.bool_)
    if not has_names.any():
        return units, None
    is_ranking = units.has_kind("ranking") | units.has_kind("feedback")
    has_columns = has_names[units.answer_column("column_names")]
    examples = units.answer_examples
    is_incomplete = np.zeros(len(units), np.bool_)
    is_incomplete[examples[~has_columns]] = True
    is_incomplete &= is_ranking
    if not is_incomplete.any() or not (has_columns & is_ranking[examples]).any():
        return units, None
    return units.without_token_columns(), units.origins.select(np.flatnonzero(is_incomplete))


def _cut_prompt(tokens: _Tokens, max_length: int) -> _Tokens | None:
    """The prompt cut on the left, behind its head; None when only the
    head would be left.
    """
    room = max_length - max(tokens.length.answers, default=0) - tokens.head
    if room < 1:
        return None
    ids = tokens.prompt[: tokens.head] + tokens.prompt[tokens.head :][-room:]
    return replace(tokens, prompt=ids, prompt_mask=(False,) * len(ids))


def _shorter(prompt: Chat) -> Iterator[Chat]:
    """The prompt without its oldest turns, longest first.

    A leading system turn stays, the rest starts with a user turn (most templates insist), and the
    last user turn stays with all that follows it.
    """
    system = int(bool(prompt.messages) and prompt.messages[0]["role"] == "system")
    users = [i for i, m in enumerate(prompt.messages) if m["role"] == "user" and i > system]
    for start in users:
        yield replace(prompt, messages=(*prompt.messages[:system], *prompt.messages[start:]))
