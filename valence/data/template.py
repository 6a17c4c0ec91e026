"""Chat templates: the tokenizer's own or one ChatML fallback, what they print for a row, and where a turn ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from valence.data.vocab import RowError, Vocab
from valence.errors import UserError
from valence.types import Chat, Message

ROLES = frozenset({"system", "user", "assistant", "tool"})
"""Roles that every template is tried with; any other must be named by the template itself."""

Piece = tuple[str, bool]
"""Some text, and whether it is an assistant's turn (content and end-of-turn)."""

_SENTINEL = "sentinelanswer"


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The end-of-turn token that a template prints behind an answer, and the text that it prints after that token.

    Where it prints no special token, ``token`` is None and ``after`` is all that follows the answer.
    """

    token: int | None
    after: str


def fallback_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """ChatML for a tokenizer that has no chat template.

    A turn ends with ``<|im_end|>`` where that is one token of this tokenizer, else with its end-of-sequence token: a
    model can stop only at a single token. BOS is printed when the tokenizer puts it before plain text by itself.
    """
    vocab = Vocab(tokenizer)
    end = "eos_token"
    if vocab.unsplit.fullmatch("<|im_end|>"):
        end = "'<|im_end|>'"
    elif not vocab.ends:
        raise UserError(
            "the tokenizer has no chat template and no end-of-sequence token, so an answer could never end",
            fix="set model.tokenizer to one that has either",
        )
    bos = "{{ bos_token }}" if vocab.bos is not None and vocab.prefix == (vocab.bos,) else ""
    turn = f"{{{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + {end} + '\\n' }}}}"
    ask = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    return f"{bos}{{% for message in messages %}}{turn}{{% endfor %}}{ask}"


class ChatTemplate:
    """Prints conversations with a tokenizer's chat template (or the fallback), and checks what was printed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self.is_fallback = not tokenizer.chat_template

    @cached_property
    def fallback(self) -> str | None:
        """The fallback's text where the tokenizer has no template of its own: to be saved with the tokenizer."""
        return fallback_template(self._tokenizer) if self.is_fallback else None

    def source(self, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The template's text (a tokenizer may have another one for conversations with tools)."""
        return self._tokenizer.get_chat_template(self.fallback, list(tools) or None)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, ask: bool) -> str:
        """The conversation as text; ``ask``: with the header of the assistant's next turn. Raises RowError."""
        try:
            return self._tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tools=[dict(t) for t in tools] or None,
                chat_template=self.fallback,
                add_generation_prompt=ask,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RowError(
                "template_refuses",
                f"the chat template cannot print this conversation: {error}",
                "use only roles, turn orders and fields that this model's template knows",
            ) from error

    @cached_property
    def turn_end(self) -> TurnEnd:
        """Found with a made-up answer: the first special or added token that the template prints behind it."""
        fix = "mend the tokenizer's chat template, or set model.tokenizer to one whose template works"
        question = {"role": "user", "content": "sentinelquestion"}
        try:
            text = self.render([question, {"role": "assistant", "content": _SENTINEL}], ask=False)
        except RowError as error:
            raise UserError(f"{error.reason} (one user turn and its answer)", fix=fix) from error
        _, found, tail = text.rpartition(_SENTINEL)
        if not found:
            raise UserError("the chat template does not print the assistant's answer", fix=fix)
        vocab = Vocab(self._tokenizer)
        match = vocab.unsplit.search(tail)
        if match is None:
            return TurnEnd(None, tail)
        return TurnEnd(vocab.token(match.group()), tail[match.end() :])

    def prompt(self, chat: Chat) -> str:
        """A prompt as text, up to where the model's answer starts. Raises RowError when a turn would be left out."""
        self._check_known(chat.messages, chat.tools)
        text = self.render(chat.messages, chat.tools, ask=True)
        self._check_printed(chat.messages, chat.tools, text)
        return text

    def prompt_pieces(self, prompt: Chat, prompt_text: str) -> list[Piece]:
        """The prompt's text in pieces. Raises RowError when one of its turns renders differently further on."""
        return _cut(prompt_text, 0, self._spans(prompt.messages, prompt.tools, prompt_text, first=0))

    def answer_pieces(self, prompt: Chat, prompt_text: str, completion: Chat) -> list[Piece]:
        """What follows ``prompt_text`` once the prompt is answered, in pieces, up to the last turn's end-of-turn.

        Raises RowError when the prompt alone is not a prefix of the whole.
        """
        messages, first = (*prompt.messages, *completion.messages), len(prompt.messages)
        self._check_known(completion.messages, prompt.tools)
        text = self.render(messages, prompt.tools, ask=False)
        _check_prefix(prompt_text, text, "the prompt alone")
        self._check_printed(messages, prompt.tools, text, first=first)
        text = text.removesuffix(self.turn_end.after)
        if len(completion.messages) == 1:
            return [(text[len(prompt_text) :], True)]
        return _cut(text, len(prompt_text), self._spans(messages, prompt.tools, text, first=first))

    def _spans(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], text: str, *, first: int
    ) -> list[tuple[int, int]]:
        """(start, end) in ``text`` of each assistant turn from message ``first`` on, end-of-turn included."""
        spans: list[tuple[int, int]] = []
        for i in range(first, len(messages)):
            # A turn that nothing precedes answers nothing, and one with weight 0 is context.
            if messages[i]["role"] != "assistant" or i == 0 or messages[i].get("weight") == 0:
                continue
            before = self.render(messages[:i], tools, ask=True)
            _check_prefix(before, text, f"the conversation before turn {i + 1}")
            upto = self.render(messages[: i + 1], tools, ask=False).removesuffix(self.turn_end.after)
            _check_prefix(upto, text, f"the conversation up to turn {i + 1}")
            spans.append((len(before), len(upto)))
        return spans

    def _check_known(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Raises RowError for a role, or for tool calls, that the template does not read."""
        source = self.source(tools)
        for message in messages:
            role = message["role"]
            if role not in ROLES and f"'{role}'" not in source and f'"{role}"' not in source:
                raise RowError(
                    "unknown_role", f"the chat template has no role {role!r}", f"use one of {', '.join(sorted(ROLES))}"
                )
            if message.get("tool_calls") and "tool_calls" not in source:
                raise RowError(
                    "not_printed",
                    "a turn calls tools, which the chat template does not print",
                    "use a model whose template knows tools, or write the call as the turn's content",
                )

    def _check_printed(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], text: str, *, first: int = 0
    ) -> None:
        """Raises RowError when the template leaves out a turn, from message ``first`` on."""
        for i, message in enumerate(messages[first:], start=first):
            content = message.get("content")
            if not isinstance(content, str) or content.strip() in text or json.dumps(content, ensure_ascii=False)[1:-1] in text:
                continue
            # Not found as it is: rewritten (the template read it), or left out (another content prints the same)?
            changed = [*messages[:i], {**message, "content": _SENTINEL}, *messages[i + 1 :]]
            if self.render(changed, tools, ask=True) == self.render(messages, tools, ask=True):
                raise RowError(
                    "not_printed",
                    f"the chat template leaves out turn {i + 1} ({message['role']})",
                    "leave that turn out of the data, or use a model whose template prints it",
                )


def _cut(text: str, start: int, spans: Sequence[tuple[int, int]]) -> list[Piece]:
    """``text[start:]`` in pieces, those of the spans marked."""
    pieces: list[Piece] = []
    for first, last in spans:
        pieces += [(text[start:first], False), (text[first:last], True)]
        start = last
    return [(piece, marked) for piece, marked in [*pieces, (text[start:], False)] if piece]


def _check_prefix(part: str, whole: str, name: str) -> None:
    if whole.startswith(part):
        return
    at = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
    raise RowError(
        "not_a_prefix",
        f"{name} renders differently once it is answered: after {at} characters it reads "
        f"{part[at : at + 40]!r}, and in the whole conversation {whole[at : at + 40]!r}",
        "training would see another prompt than sampling: change the row, or the model's chat template",
    )
