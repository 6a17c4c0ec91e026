"""Chat templates: which one is used, what it prints, and which part of that a model generates."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from valence.data.vocab import RowError, Vocab, any_of
from valence.errors import UserError
from valence.types import Chat, Message

AsChat = Literal["auto"] | bool
"""As ``data.as_chat`` in a recipe."""

ROLES = frozenset({"system", "user", "assistant", "tool"})
"""Roles that every template is tried with; any other must be named by the template itself."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant turn that templates print in front of its content."""

THINKING = ("enable_thinking", "thinking")
"""Variables of templates that disable reasoning if they are false."""

CHATML = "chatml"
"""The name of the built-in template."""

NO_TEMPLATE = (
    "set data.chat_template: chatml (or the path of a Jinja file), or write prompts and "
    "completions as plain text"
)

_CHATML = (
    "{% if tools %}"
    "{{ '<|im_start|>system\\n' }}"
    "{% if messages and messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] + '\\n\\n' }}"
    "{% endif %}"
    "{{ '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n"
    "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}"
    "{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
    "{{ '\\n</tools>\\n\\nFor each function call, return a json object with function name and "
    "arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
    '{"name": <function-name>, "arguments": <args-json-object>}'
    "\\n</tool_call>' + END + '\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{% if loop.first or loop.previtem['role'] != 'tool' %}{{ '<|im_start|>user\\n' }}"
    "{% else %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem['role'] != 'tool' %}{{ END + '\\n' }}{% endif %}"
    "{% elif message['role'] == 'assistant' and message['tool_calls'] %}"
    "{{ '<|im_start|>assistant\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] %}"
    "{% set function = call['function'] or call %}"
    "{% if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": \"' + function['name'] + '\", \"arguments\": ' }}"
    "{% if function['arguments'] is string %}{{ function['arguments'] }}"
    "{% else %}{{ function['arguments'] | tojson }}{% endif %}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ END + '\\n' }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + END + '\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, in which END stands for the expression of the token that ends a turn."""

Piece = tuple[str, bool]
"""Some text, and whether it is trained on: the assistant's own text with its end-of-turn."""

Tools = Sequence[Mapping[str, Any]]

_SENTINEL = "sentinelanswer"
_QUESTION: Message = {"role": "user", "content": "sentinelquestion"}
_OPENING_TAG = re.compile(r"\s*(<[^<>\s]+>)\s*")
_ENDS_OPEN = re.compile(r"<(?!/)[^<>\s|]+>\s*$")
_CLOSING_TAG = re.compile(r"(</[^<>\s]+>|<[^<>\s|]+\|>)\s*$")


class RewrittenTurnError(RowError):
    """The template prints an earlier assistant turn differently once the conversation goes on."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How the template ends an assistant turn.

    ``token``: the token that ends it; None if it prints none. ``text``: what it prints behind the
    answer up to and including that token. ``after``: what it prints behind the token.
    """

    token: int | None
    text: str
    after: str


@dataclass(frozen=True, slots=True)
class RenderedAnswer:
    """An answer as ``pieces`` of text that follow ``context``, a beginning of the conversation.

    ``notes``: names of remarks on it (see ``Encoder``).
    """

    context: str
    pieces: tuple[Piece, ...]
    notes: tuple[str, ...] = ()


def renders_as_chat(as_chat: AsChat, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Decide whether plain-text prompts become a user message of the chat template.

    Raises UserError if this is asked for and the tokenizer has no template.
    """
    if as_chat is True and not tokenizer.chat_template:
        raise UserError(
            "the tokenizer has no chat template",
            code="chat-template-missing",
            where="data.as_chat",
            fix="set data.chat_template: chatml (or the path of a Jinja file), or set "
            "data.as_chat: false to train on plain text",
        )
    return bool(tokenizer.chat_template) if as_chat == "auto" else as_chat


def with_template(
    tokenizer: PreTrainedTokenizerBase, chosen: str | None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer with the template of ``data.chat_template``; with None, as it is.

    chosen: ``chatml``, or the text of a Jinja template. The given tokenizer is not changed.
    """
    if chosen is None:
        return tokenizer
    changed = copy.copy(tokenizer)
    changed.chat_template = chatml_template(tokenizer) if chosen == CHATML else chosen
    return changed


def chatml_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """ChatML for a tokenizer that may not have been made for it.

    A turn ends with ``<|im_end|>`` where that is one token of this tokenizer, else with its
    end-of-sequence token, because a model can stop only at a single token. BOS is printed if the
    tokenizer puts it before plain text. Tools, tool calls and their results are printed as Hermes
    and Qwen2.5 do.
    """
    vocab = Vocab(tokenizer)
    end = "eos_token"
    if vocab.unsplit.fullmatch("<|im_end|>"):
        end = "'<|im_end|>'"
    elif not vocab.ends:
        raise UserError(
            "ChatML needs a token that ends each turn, but the tokenizer has neither <|im_end|> "
            "nor an end-of-sequence token",
            code="end-token-missing",
            where="data.chat_template",
            fix="set model.tokenizer to a tokenizer that has one of these tokens",
        )
    bos = "{{ bos_token }}" if vocab.bos is not None and vocab.prefix == (vocab.bos,) else ""
    return bos + _CHATML.replace("END", end)


class ChatTemplate:
    """Prints conversations with a tokenizer's chat template, and checks what was printed.

    kwargs: variables for every rendering, as ``data.chat_template_kwargs``. stops: tokens at which
    the model stops, by its generation config. Raises UserError for variables that the template
    does not read.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: Mapping[str, Any] | None = None,
        stops: Collection[int] = (),
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._vocab = Vocab(tokenizer)
        self.kwargs, self._stops = dict(kwargs or {}), frozenset(stops)
        self._check_kwargs()

    def _check_kwargs(self) -> None:
        names = set(inspect.signature(self._tokenizer.apply_chat_template).parameters) - {"kwargs"}
        names |= {"messages", "bos_token", "eos_token"}
        for name in self.kwargs:
            where = f"data.chat_template_kwargs.{name}"
            if name in names:
                raise UserError(
                    f"{name} cannot be set: Valence passes it to the chat template itself",
                    code="template-variable-unknown",
                    where=where,
                    fix="remove it",
                )
            if not self.exists:
                raise UserError(
                    "the tokenizer has no chat template",
                    code="chat-template-missing",
                    where=where,
                    fix="set data.chat_template to the path of a Jinja file, or remove "
                    "data.chat_template_kwargs",
                )
            if not re.search(rf"\b{re.escape(name)}\b", self._every_source()):
                raise UserError(
                    f"the chat template has no variable {name}",
                    code="template-variable-unknown",
                    where=where,
                    fix="remove it, or correct its name",
                )

    def _every_source(self) -> str:
        template = self._tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)

    @property
    def exists(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self._tokenizer.chat_template)

    def source(self, tools: Tools = ()) -> str:
        """The template's text. A tokenizer may have another one for conversations with tools.

        Raises RowError if there is none.
        """
        if not self.exists:
            raise RowError("no_template", "the tokenizer has no chat template", NO_TEMPLATE)
        return self._tokenizer.get_chat_template(None, list(tools) or None)

    def reads_tools(self, tools: Tools) -> bool:
        """Whether the template prints tools."""
        return "tools" in self.source(tools)

    def render(self, messages: Sequence[Message], tools: Tools = (), *, ask: bool) -> str:
        """The conversation as text.

        ask: add the generation prompt, which starts the assistant's next turn. Raises RowError.
        """
        self.source()
        try:
            return self._tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tools=[dict(t) for t in tools] or None,
                add_generation_prompt=ask,
                tokenize=False,
                **self.kwargs,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RowError(
                "template_refuses",
                f"the chat template cannot print this conversation: {error}",
                "write the turns as this chat template needs them, or set data.chat_template to "
                "another template",
            ) from error

    @cached_property
    def turn_end(self) -> TurnEnd:
        """How a turn ends, found with a made-up answer.

        It is the first special or added token that the template prints behind the answer, or the
        first at which the model stops if it stops at any of them. A template that prints none may
        leave the end to the token that starts the next turn, if the model stops there (GLM).
        Raises UserError if the template does not work.
        """
        if not self.exists:
            return TurnEnd(None, "", "")
        fix = (
            "correct the chat template, set data.chat_template to another one such as chatml, or "
            "set model.tokenizer to a tokenizer whose template works"
        )
        answer: Message = {"role": "assistant", "content": _SENTINEL}
        try:
            text = self.render([_QUESTION, answer], ask=False)
        except RowError as error:
            raise UserError(
                f"the chat template fails on one user turn and its answer: {error.__cause__}",
                code="chat-template-failed",
                fix=fix,
            ) from error
        _, printed, tail = text.rpartition(_SENTINEL)
        if not printed:
            raise UserError(
                "the chat template does not print the assistant's answer",
                code="chat-template-no-answer",
                fix=fix,
            )
        matches = list(self._vocab.unsplit.finditer(tail))
        tokens = [self._vocab.token(match.group()) for match in matches]
        stops = {*self._stops, *self._vocab.ends} if self._stops else set[int]()
        for match, token in zip(matches, tokens, strict=True):
            if token in stops or not stops.intersection(tokens):
                return TurnEnd(token, tail[: match.end()], tail[match.end() :])
        return TurnEnd(self._next_turn_token(answer), "", tail)

    def _next_turn_token(self, answer: Message) -> int | None:
        """The token that the template prints between an answer and a user turn, if it is a stop."""
        try:
            text = self.render([_QUESTION, answer, _QUESTION], ask=False)
        except RowError:
            return None
        between = text.rpartition(_SENTINEL)[2].partition(str(_QUESTION["content"]))[0]
        match = self._vocab.unsplit.search(between)
        token = self._vocab.token(match.group()) if match else None
        return token if token in self._stops else None

    @cached_property
    def markers(self) -> frozenset[str]:
        """Special tokens that the template prints around turns.

        EOS is not one of them, and BOS only where it opens turns, as ``<|im_start|>`` does in
        SmolLM2: elsewhere they may be ordinary text, such as the HTML tag ``<s>``.
        """
        try:
            text = self.render([_QUESTION, {"role": "assistant", "content": _SENTINEL}], ask=False)
            rendered = self.render([_QUESTION], ask=True)
        except RowError:
            return frozenset()
        text += rendered
        outer = {self._vocab.bos, *self._vocab.ends}
        outer -= {
            i
            for n, i in self._vocab.special.items()
            if i == self._vocab.bos and n in rendered.removeprefix(n)
        }
        return frozenset(
            n for n, i in self._vocab.special.items() if n.strip() and n in text and i not in outer
        )

    # --- prompts and their answers

    def prompt(self, chat: Chat) -> str:
        """A prompt as text, with the generation prompt.

        Raises RowError when a turn would be left out.
        """
        self._check_known(chat.messages, chat.tools)
        text = self.render(chat.messages, chat.tools, ask=True)
        self._check_printed(chat.messages, chat.tools, text)
        return text

    def prompt_pieces(self, prompt: Chat, prompt_text: str) -> list[Piece]:
        """The prompt's text in pieces, in which its assistant turns are trained on.

        Raises RewrittenTurnError when one of them, or the generation prompt before it, is printed
        differently in the longer conversation.
        """
        messages, tools = prompt.messages, prompt.tools
        spans: list[tuple[int, int]] = []
        places = _trained(messages, 0)
        if places and self.turn_end.token is None:
            reason = "the template prints no token that ends an earlier turn"
            raise RewrittenTurnError("not_a_prefix", reason, "set data.train_on: completion")
        for i in places:
            before = self.render(messages[:i], tools, ask=True)
            upto = self.render(messages[: i + 1], tools, ask=False).removesuffix(
                self.turn_end.after
            )
            for part, name in ((before, "before"), (upto, "up to")):
                if not prompt_text.startswith(part):
                    raise _not_a_prefix(
                        part,
                        prompt_text,
                        f"the conversation {name} turn {i + 1}",
                        RewrittenTurnError,
                    )
            start = self._body_start(
                messages, i, tools, prompt_text, len(before), len(upto), ask=True
            )
            spans.append((start, self._with_next_token(prompt_text, len(upto))))
        return _cut(prompt_text, 0, spans)

    def _with_next_token(self, text: str, end: int) -> int:
        """Where a turn ends that ``text`` goes on behind; with the next turn's first token, if that
        is what ends it.
        """
        if self.turn_end.text or self.turn_end.token is None:
            return end
        stop = self._stop_pattern.match(text, end)
        return end if stop is None else stop.end()

    def answer(self, prompt: Chat, prompt_text: str, completion: Chat) -> RenderedAnswer:
        """The completion behind the prompt, up to the end of its last turn.

        Its context is ``prompt_text``, the rendering with the generation prompt, if the whole
        conversation starts with that. What the template inserts between the generation prompt and
        the assistant's own text is not trained on. Raises RowError when the template prints the
        prompt differently once it is answered.
        """
        messages, first = (*prompt.messages, *completion.messages), len(prompt.messages)
        tools = prompt.tools
        self._check_known(completion.messages, tools)
        text = self.render(messages, tools, ask=False)
        context, notes = prompt_text, set[str]()
        self._check_printed(messages, tools, text, first=first)
        completion_text, full_text = _text_alone(completion), text
        text = text.removesuffix(self.turn_end.after)
        if not text.startswith(prompt_text):
            bare = self._shared_context(prompt, prompt_text, text)
            if bare is None:
                return self._behind_rewritten(
                    messages, tools, prompt_text, text, completion_text, full_text
                )
            context = bare
            notes.add("another_header")
        if context is not prompt_text:
            self._check_thinking(completion.messages, text)
        if any(not _prints_reasoning(message, text) for message in completion.messages):
            notes.add("reasoning_ignored")
        if completion_text:
            end = self.turn_end.text
            if context is prompt_text and text[len(context) :] == completion_text.strip() + end:
                return RenderedAnswer(context, ((text[len(context) :], True),))
            if self._is_shortened(messages, tools, text, completion_text):
                completion_text = _without_repeated_tag(completion_text, prompt_text)
                return RenderedAnswer(
                    prompt_text, ((completion_text + end, True),), ("reasoning_kept",)
                )
        spans: list[tuple[int, int]] = []
        for i in _trained(messages, first):
            header = len(context)
            if i > first:
                before = self.render(messages[:i], tools, ask=True)
                if text.startswith(before):
                    header = len(before)
                else:
                    notes.add("another_header")
            end = self._turn_stop(messages, i, tools, text)
            aligned = text.startswith(prompt_text) if i == first else "another_header" not in notes
            start = self._body_start(messages, i, tools, text, header, end, aligned=aligned)
            closed = _CLOSING_TAG.search(prompt_text[len(context) :]) and not _OPENING_TAG.match(
                completion_text
            )
            if completion_text and closed and "another_header" in notes:
                # The generation prompt ends with an empty block of reasoning, which the rendering
                # of an answer lacks.
                return RenderedAnswer(prompt_text, ((text[start:], True),))
            spans.append((start, end))
        return RenderedAnswer(context, tuple(_cut(text, len(context), spans)), tuple(sorted(notes)))

    def _shared_context(self, prompt: Chat, prompt_text: str, text: str) -> str | None:
        """The prompt without its generation prompt, if ``text`` and ``prompt_text`` differ only
        behind it; else None.
        """
        try:
            bare = self.render(prompt.messages, prompt.tools, ask=False)
        except RowError:
            return None
        return bare if prompt_text.startswith(bare) and text.startswith(bare) else None

    def _behind_rewritten(
        self,
        messages: Sequence[Message],
        tools: Tools,
        prompt_text: str,
        text: str,
        completion_text: str,
        full_text: str,
    ) -> RenderedAnswer:
        """An answer of one turn behind the prompt as it is sampled from, which the template prints
        differently once it is answered (some print a system message only before the last user
        turn). Raises RowError for any other answer.
        """
        _, _, tail = self._with_sentinel(messages, len(messages) - 1, tools).partition(_SENTINEL)
        verbatim = (
            completion_text
            and _match_backwards(completion_text, text, self._content_end(text, tail)) is not None
        )
        if not verbatim or _ENDS_OPEN.search(prompt_text):
            raise _not_a_prefix(prompt_text, full_text, "the prompt alone")
        start = self._body_start(
            messages, len(messages) - 1, tools, text, 0, len(text), aligned=False
        )
        return RenderedAnswer(prompt_text, ((text[start:], True),), ("rewritten_prompt",))

    def _turn_stop(self, messages: Sequence[Message], i: int, tools: Tools, text: str) -> int:
        """Where assistant turn i ends in ``text``, its end-of-turn included."""
        if i + 1 == len(messages):
            return len(text)
        upto = self.render(messages[: i + 1], tools, ask=False).removesuffix(self.turn_end.after)
        if text.startswith(upto):
            return self._with_next_token(text, len(upto))
        # The turn is printed differently when it is the last one: look for its end behind its text.
        tail = self._with_sentinel(messages, i, tools).partition(_SENTINEL)[2]
        tail = tail.removesuffix(self.turn_end.after)
        stop = self._stop_pattern.search(tail)
        if stop is None or not text.endswith(tail):
            raise _not_a_prefix(upto, text, f"the conversation up to turn {i + 1}")
        return len(text) - len(tail) + stop.end()

    @cached_property
    def _stop_pattern(self) -> re.Pattern[str]:
        """Matches the tokens that end a turn."""
        names = sorted(self._stop_names, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")

    @cached_property
    def _stop_names(self) -> set[str]:
        ids = {self.turn_end.token, *self._vocab.ends, *self._stops} - {None}
        return {str(self._tokenizer.convert_ids_to_tokens(i)) for i in ids}

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches special tokens, and added tokens that end a turn."""
        stops = {name for name in self._stop_names if self._vocab.unsplit.fullmatch(name)}
        return any_of(stops | set(self._vocab.special))

    def _body_start(
        self,
        messages: Sequence[Message],
        i: int,
        tools: Tools,
        text: str,
        header: int,
        end: int,
        *,
        ask: bool = False,
        aligned: bool = True,
    ) -> int:
        """Where the own text of assistant turn i starts in ``text``, not before ``header``.

        aligned: the generation prompt ends at ``header``.

        Own text is the turn's content, its reasoning and its tool calls. White space that directly
        follows the generation prompt counts as own text too: the model has to generate it.
        """
        message, content = messages[i], _content(messages[i])
        try:
            blank = self._with_sentinel(messages, i, tools, ask=ask)
        except RowError:
            if aligned and message.get("tool_calls"):
                return header  # the template prints no results without the calls of this turn
            raise
        head, _, tail = blank.partition(_SENTINEL)
        start = _shared_length(head, text)
        if _has_reasoning(message) and _prints_reasoning(message, text[header:end]):
            # The model generates the markup around its reasoning, too.
            return header if aligned else max(header, start)
        if content.strip() and not message.get("tool_calls"):
            content_end = self._content_end(text, tail, ask=ask)
            at = _match_backwards(content, text, content_end)
            if at is not None and not (at >= start and not text[start:at].strip()):
                start = at
        start = min(max(start, header), end)
        return header if aligned and not text[header:start].strip() else start

    def _is_shortened(
        self, messages: Sequence[Message], tools: Tools, text: str, content: str
    ) -> bool:
        """Whether the template prints only the end of the last turn's content (it drops
        reasoning).
        """
        head, _, tail = self._with_sentinel(messages, len(messages) - 1, tools).partition(_SENTINEL)
        end = self._content_end(text, tail)
        if _match_backwards(content, text, end) is not None:
            return False
        printed = text[_shared_length(head, text) : end].strip()
        return content.strip().endswith(printed)

    def _content_end(self, text: str, tail: str, *, ask: bool = False) -> int:
        """Where the content ends in front of the ``tail``, of which ``text`` may lack what follows
        the turn's end.
        """
        suffix = tail if ask else tail.removesuffix(self.turn_end.after)
        return len(text) - len(suffix) if text.endswith(suffix) else len(text)

    def _with_sentinel(
        self, messages: Sequence[Message], i: int, tools: Tools, *, ask: bool = False
    ) -> str:
        """The conversation with a made-up content of turn i, without its reasoning and tool
        calls.
        """
        left_out = {*REASONING, "tool_calls"}
        blank = {name: value for name, value in messages[i].items() if name not in left_out}
        return self.render(
            [*messages[:i], {**blank, "content": _SENTINEL}, *messages[i + 1 :]], tools, ask=ask
        )

    # --- tool results behind a sampled turn

    def tool_suffix(self, messages: Sequence[Message], results: int, tools: Tools = ()) -> str:
        """What the template prints between the end token of an assistant turn and the place where
        the model's next turn starts.

        results: how many of the last ``messages`` follow the assistant turn: tool results, or a
        user turn with an error. Raises RowError if the template prints what precedes the turn
        differently once the conversation goes on, so that the tokens that were sampled from would
        not be those that training sees; if it leaves out the turn or a result; or if it cannot
        print the conversation.
        """
        return self.split_tool_suffix(messages, results, tools)[1]

    def split_tool_suffix(
        self, messages: Sequence[Message], results: int, tools: Tools = ()
    ) -> tuple[str, str]:
        """The text of the token that ends the assistant turn, and the ``tool_suffix`` behind it."""
        i = len(messages) - results - 1
        if results < 1 or i < 0 or messages[i]["role"] != "assistant":
            raise ValueError("tool results must follow an assistant turn")
        self._check_known(messages[i + 1 :], tools)
        text = self.render(messages, tools, ask=True)
        before = self.render(messages[:i], tools, ask=False) if i else ""
        if not text.startswith(before):
            raise _not_a_prefix(before, text, f"the conversation before turn {i + 1}")
        blank = self.render(self._with_blank_call(messages, i, tools), tools, ask=True)
        start, end = self._end_token_behind(messages, i, tools, text, blank)
        if not text.endswith(blank[end:]):
            raise _depends_on_turn(i)
        return blank[start:end], blank[end:]

    def answer_of_error(
        self, messages: Sequence[Message], error: str, tools: Tools = ()
    ) -> Message:
        """The turn that tells the model why the call in ``messages[-1]`` is malformed: a tool
        result, or a user turn if the template does not print a result without a call. Raises
        RowError if it prints neither.
        """
        result: Message = {"role": "tool", "content": error}
        try:
            self.tool_suffix([*messages, result], 1, tools)
        except RowError:
            result = {"role": "user", "content": error}
            self.tool_suffix([*messages, result], 1, tools)
        return result

    def _with_blank_call(self, messages: Sequence[Message], i: int, tools: Tools) -> list[Message]:
        """The conversation with a made-up argument in the last call of assistant turn i, or with a
        made-up content if it calls no tools.
        """
        blank = {name: value for name, value in messages[i].items() if name not in REASONING}
        calls = blank.pop("tool_calls", None)
        if calls and "tool_calls" in self.source(tools):
            function = {**calls[-1]["function"], "arguments": {_SENTINEL: _SENTINEL}}
            calls = [*calls[:-1], {**calls[-1], "function": function}]
            blank |= {"content": "", "tool_calls": calls}
        else:
            blank["content"] = _SENTINEL
        return [*messages[:i], blank, *messages[i + 1 :]]

    def _end_token_behind(
        self, messages: Sequence[Message], i: int, tools: Tools, text: str, blank: str
    ) -> tuple[int, int]:
        """Where in ``blank``, the rendering with a blank call, the token stands that ends assistant
        turn i.

        It is the first token at which the model stops. If the template prints none before the next
        message, the turn ends where it does when it is the last one, or else at the first special
        token. Raises RowError if the template leaves out the turn or a message behind it.
        """
        first = i + 1
        contents = [f"sentinelresult{place}end" for place in range(first, len(messages))]
        changed = [
            {**message, "content": content}
            for message, content in zip(messages[first:], contents, strict=True)
        ]
        marked_messages = self._with_blank_call([*messages[:first], *changed], i, tools)
        marked = self.render(marked_messages, tools, ask=True)
        head, printed, tail = marked.rpartition(_SENTINEL)
        for place, content in enumerate([_SENTINEL, *contents], start=i):
            if not printed or (place > i and content not in tail):
                raise RowError(
                    "not_printed",
                    f"the chat template leaves out turn {place + 1} ({messages[place]['role']}) "
                    "when tool results follow",
                    "set data.chat_template to a template that prints tool results, such as chatml",
                )
        start = len(head) + len(_SENTINEL)
        limit = start + min(tail.index(content) for content in contents)
        if marked[:limit] != blank[:limit]:
            raise _depends_on_turn(i)
        if stop := self._stop_pattern.search(marked, start, limit):
            return stop.span()
        tokens = list(self._vocab.unsplit.finditer(marked, start, limit))
        upto = self.render(messages[: i + 1], tools, ask=False).removesuffix(self.turn_end.after)
        if text.startswith(upto) and text.endswith(blank[start:]):
            end = len(blank) - (len(text) - len(upto))
            if start <= end <= limit:
                at_end = [token.start() for token in tokens if token.end() == end]
                return (at_end[0] if at_end else end), end
        if not tokens:
            raise RowError(
                "not_a_prefix",
                f"the chat template prints no token that ends turn {i + 1}",
                "set data.chat_template to another template",
            )
        return tokens[0].span()

    # --- checks

    def _check_thinking(self, messages: Sequence[Message], text: str) -> None:
        """Raise RowError for reasoning in a text that does not start with the generation prompt,
        because a variable of the template disables reasoning when completions are sampled.
        """
        disabled = [name for name in THINKING if self.kwargs.get(name) is False]
        if disabled and any(_has_reasoning(m) and _prints_reasoning(m, text) for m in messages):
            raise RowError(
                "reasoning_disabled",
                f"the answer has reasoning, but {disabled[0]} is false, so the model samples "
                "answers after another prompt, without reasoning",
                f"remove the reasoning from the row, or remove {disabled[0]} from "
                "data.chat_template_kwargs",
            )

    def _check_known(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raises RowError for a role, or for tool calls, that the template does not read."""
        source = self.source(tools)
        for message in messages:
            role = message["role"]
            if role not in ROLES and f"'{role}'" not in source and f'"{role}"' not in source:
                raise RowError(
                    "unknown_role",
                    f"the chat template has no role {role!r}",
                    f"use one of {', '.join(sorted(ROLES))}",
                )
            if message.get("tool_calls") and "tool_calls" not in source:
                raise RowError(
                    "not_printed",
                    "a turn calls tools, but the chat template does not print tool calls",
                    "set data.chat_template to a template with tool calls, use a model that has "
                    "one, or write the call into the content of the turn",
                )

    def _check_printed(
        self, messages: Sequence[Message], tools: Tools, text: str, *, first: int = 0
    ) -> None:
        """Raises RowError when the template leaves out a turn, from message ``first`` on."""
        for i, message in enumerate(messages[first:], start=first):
            content = message.get("content")
            if (
                not isinstance(content, str)
                or content.strip() in text
                or json.dumps(content, ensure_ascii=False)[1:-1] in text
            ):
                continue
            # Either the template rewrote it, or it left it out: then another content prints the
            # same.
            changed = [*messages[:i], {**message, "content": _SENTINEL}, *messages[i + 1 :]]
            if self.render(changed, tools, ask=True) == self.render(messages, tools, ask=True):
                raise RowError(
                    "not_printed",
                    f"the chat template leaves out turn {i + 1} ({message['role']})",
                    "remove that turn from the row, or set data.chat_template to a template that "
                    "prints it",
                )


def _trained(messages: Sequence[Message], first: int) -> list[int]:
    """Places of the assistant turns from ``first`` on that answer something and may be trained
    on.
    """
    turns = enumerate(messages[first:], start=first)
    return [i for i, m in turns if m["role"] == "assistant" and i > 0 and not has_no_weight(m)]


def has_no_weight(message: Message) -> bool:
    """Whether an assistant turn is context only."""
    return message.get("weight") == 0


def _content(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _text_alone(completion: Chat) -> str:
    """The content of an answer that is one turn of text and nothing else, to be trained on; else an
    empty string.
    """
    message = completion.messages[0]
    alone = len(completion.messages) == 1 and not message.get("tool_calls")
    return (
        _content(message)
        if alone and not _has_reasoning(message) and not has_no_weight(message)
        else ""
    )


def _has_reasoning(message: Message) -> bool:
    return any(isinstance(message.get(name), str) and message[name].strip() for name in REASONING)


def _prints_reasoning(message: Message, text: str) -> bool:
    """Whether the reasoning of a turn, if it has any, is in the text."""
    fields = [message[name].strip() for name in REASONING if isinstance(message.get(name), str)]
    return not any(fields) or any(field and field in text for field in fields)


def _match_backwards(completion_text: str, text: str, end: int) -> int | None:
    """Where ``own`` starts in ``text`` if it stands right before ``end``, whatever white space
    differs; else None.
    """
    stripped = completion_text.strip()
    if text.endswith(stripped, 0, end):
        return end - len(stripped)
    at = end
    for character in reversed(completion_text):
        if character.isspace():
            continue
        at -= 1
        while at >= 0 and text[at].isspace():
            at -= 1
        if at < 0 or text[at] != character:
            return None
    return at


def _without_repeated_tag(completion_text: str, prompt_text: str) -> str:
    """The answer without an opening tag, such as ``<think>``, that the generation prompt ends
    with.
    """
    tag = _OPENING_TAG.match(completion_text)
    return (
        completion_text[tag.end() :]
        if tag and prompt_text.rstrip().endswith(tag[1])
        else completion_text
    )


def _cut(text: str, start: int, spans: Sequence[tuple[int, int]]) -> list[Piece]:
    """``text[start:]`` in pieces, those of the spans marked."""
    pieces: list[Piece] = []
    for first, last in spans:
        pieces += [(text[start:first], False), (text[first:last], True)]
        start = last
    return [(piece, marked) for piece, marked in [*pieces, (text[start:], False)] if piece]


def _shared_length(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def _depends_on_turn(i: int) -> RowError:
    return RowError(
        "not_a_prefix",
        f"what the chat template prints behind turn {i + 1} depends on the text of that turn",
        "set data.chat_template to another template",
    )


def _not_a_prefix(
    part: str, full_text: str, name: str, kind: type[RowError] = RowError
) -> RowError:
    at = _shared_length(part, full_text)
    return kind(
        "not_a_prefix",
        f"the chat template prints {name} differently once an answer follows: after {at} "
        f"characters {part[at : at + 40]!r}, and in the whole conversation "
        f"{full_text[at : at + 40]!r}, so training would see another prompt than sampling",
        "change the row so that both are equal, or set data.chat_template to another template",
    )
