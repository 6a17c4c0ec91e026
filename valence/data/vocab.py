"""A tokenizer as encoding needs it: plain text to ids, with nothing added, merged or split
unseen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from valence.errors import UserError
from valence.types import content_id

Marked = tuple[tuple[int, ...], tuple[bool, ...]]
"""Token ids, and for each whether it is in the mask."""


def row_code(kind: str) -> str:
    """The code of a UserError about a row of this kind, such as ``row-too-long``."""
    return f"row-{kind.replace('_', '-')}"


class RowError(Exception):
    """This row cannot be encoded.

    ``kind``: a short stable name to count by; ``reason``, ``fix``: one sentence each.
    """

    def __init__(self, kind: str, reason: str, fix: str | None = None) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.fix = kind, reason, fix

    @property
    def code(self) -> str:
        """The code of a UserError about this row."""
        return row_code(self.kind)


class Vocab:
    """Reads text with a tokenizer whose own special tokens are left off unless asked for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # The base class declares less than every tokenizer has.
        self._tokenizer: Any = tokenizer
        self.bos: int | None = self._tokenizer.bos_token_id
        self._eos: int | None = self._tokenizer.eos_token_id
        self.ends: tuple[int, ...] = () if self._eos is None else (self._eos,)

    @property
    def eos(self) -> int:
        """The end-of-sequence token. Raises UserError when there is none."""
        if self._eos is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token to end an answer with",
                code="end-token-missing",
                fix="set model.tokenizer to a tokenizer that has one",
            )
        return self._eos

    @cached_property
    def digest(self) -> str:
        """Of its tokens: everything that the text of ids depends on."""
        return content_id(sorted(self._tokenizer.get_vocab().items()))

    @cached_property
    def tokenizer_digest(self) -> str:
        """Of everything that the ids of a text depend on, such as tokens, merges and normalizer;
        of a tokenizer in Python only its tokens and class.
        """
        tokenizer, cls = self._tokenizer, type(self._tokenizer)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        rules = self.digest if backend is None else backend.to_str()
        return content_id(rules, cls.__module__, cls.__qualname__, tokenizer.special_tokens_map)

    @cached_property
    def special(self) -> dict[str, int]:
        """Names that become one special token wherever they stand in a text."""
        return {name: self._id(name) for name in sorted(self._special_names())}

    @cached_property
    def unsplit(self) -> re.Pattern[str]:
        """Matches what is never split into smaller tokens: special and added tokens, but for runs
        of white space.
        """
        return any_of(self._special_names() | set(self._tokenizer.get_added_vocab()))

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """What the tokenizer puts before plain text by itself: BOS, or nothing."""
        plain, with_special = self.ids("a"), tuple(self._tokenizer("a")["input_ids"])
        starts = (i for i in range(len(with_special)) if with_special[i : i + len(plain)] == plain)
        return with_special[: next(starts, 0)]

    @cached_property
    def stand_in(self) -> tuple[int, ...]:
        """What an empty prompt becomes, since the first token of an answer needs something to be
        predicted from.
        """
        for token in (self.bos, self._eos):
            if token is not None:
                return (token,)
        raise RowError(
            "empty_prompt",
            "the prompt is empty and the tokenizer has no BOS token to start from",
            "write a prompt, or remove the row",
        )

    def token(self, name: str) -> int:
        """The id of one token."""
        return self._id(name)

    def ids(self, text: str) -> tuple[int, ...]:
        """The text as it stands, nothing added. Raises RowError for text that is not Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError(
                "not_unicode",
                f"character {error.start + 1} of the text is only half of a character (a lone "
                "surrogate)",
                "write the character itself, or both \\u escapes of its surrogate pair",
            ) from error
        if self.is_backend_only and self._backend.truncation is self._backend.padding is None:
            # The same ids without their character offsets, in two thirds of the time.
            return tuple(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def _backend(self) -> Any:
        return self._tokenizer.backend_tokenizer

    @cached_property
    def is_backend_only(self) -> bool:
        """Whether its backend, of the tokenizers library, alone determines the ids of a text."""
        cls, base = type(self._tokenizer), PreTrainedTokenizerFast
        names = {"encode", "_encode_plus", "_batch_encode_plus", "__call__", "_call_one"}
        return (
            isinstance(self._tokenizer, PreTrainedTokenizerFast)
            and all(getattr(cls, name, None) is getattr(base, name, None) for name in names)
            and names.isdisjoint(vars(self._tokenizer))
            and hasattr(self._backend, "encode_batch_fast")
            and not getattr(self._tokenizer, "split_special_tokens", False)
        )

    def checked(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The same ids. Raises RowError for one that is not in the vocabulary."""
        size = len(self._tokenizer)
        for i in ids:
            if not 0 <= i < size:
                raise RowError(
                    "id_out_of_range",
                    f"token id {i} is not in the vocabulary of {size} tokens",
                    "tokenize the rows with the tokenizer of this model, or use their text instead "
                    "of token ids",
                )
        return ids

    def join(
        self, pieces: Sequence[tuple[str, bool]], before: str, context: tuple[int, ...]
    ) -> tuple[Marked, bool]:
        """Ids and mask of pieces of text that follow ``before`` (whose ids are ``context``); and if
        any would have merged.

        No token crosses from one piece into the next. Each is tokenised together with the piece in
        front of it all the same, because some tokenizers write a word differently where a text
        starts.
        """
        ids: list[int] = []
        mask: list[bool] = []
        merged = False
        for i, (text, marked) in enumerate(pieces):
            joint = self.ids(before + text)
            if joint[: len(context)] == context:
                new = joint[len(context) :]
            else:
                new, merged = self.ids(text), True
            ids += new
            mask += [marked] * len(new)
            if i + 1 < len(pieces):
                before, context = text, self.ids(text)
        return (tuple(ids), tuple(mask)), merged

    def _id(self, name: str) -> int:
        return int(self._tokenizer.convert_tokens_to_ids(name))

    def _special_names(self) -> set[str]:
        added = {str(t) for t in self._tokenizer.added_tokens_decoder.values() if t.special}
        return added | set(self._tokenizer.all_special_tokens)


def any_of(names: set[str]) -> re.Pattern[str]:
    """Matches any of the names, longer ones first; those of white space alone are left out."""
    longest_first = sorted((n for n in names if n.strip()), key=lambda n: (-len(n), n))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
