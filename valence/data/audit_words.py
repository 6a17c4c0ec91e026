"""What the texts of rows contain that no label shows: personal data, and feedback that repeats,
quotes another chat, or is in another language.

The search for personal data knows forms such as that of an e-mail address. It does not find names.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import chain
from typing import Any

from valence.data.formats import lookup
from valence.types import Origin

PARTS = (
    "system", "prompt", "instruction", "input", "history", "messages", "text",
    "completion", "chosen", "rejected", "first", "second", "completions", "feedback",
)  # fmt: skip
"""Parts of a row whose texts are searched."""
COMMENT = "info.comment"
"""Also searched: comments on pairs, which are no feedback on one completion."""
TEXT_FIELDS = ("content", "value", "text")
"""Fields of a turn, or of a part of its content, that hold text."""
PLACES = 5
"""Number of rows to name for each result."""
QUOTED_WORDS = 12
"""Words in a row from which on feedback quotes a text."""

EMAIL = re.compile(r"[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,4}[a-zA-Z]{2,}\b")
PHONE = re.compile(
    r"(?<![\w.+-])(?<!\d )(?:\+|00|\()[1-9][\d ()./-]{6,18}\d(?!\w)"
    r"|(?<![\w.+-])(?<!\d )\(0\d[\d ()./-]{6,18}\d(?!\w)"
    r"|(?<![\w.-])\d{3}[.-]\d{3}[.-]\d{4}(?![\w-])"
)
IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b")
CARD = re.compile(r"(?<![\w.-])\d{4}(?:[ -]?\d{4}){2}[ -]?\d{1,7}(?![\w.-])")
ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")

LANGUAGES = {
    "English": "the and is are you that it of not what this for please too",
    "German": "der die das und ist nicht ich ein mit wie zu bitte auch",
    "French": "le la les et est pas je vous une de que pour trop",
    "Spanish": "el los y es no que una por como del para gracias muy",
    "Italian": "il lo gli è non che di una per sono grazie della",
    "Portuguese": "os é não que um uma por com você obrigado muito do",
    "Dutch": "het en is niet ik een van dat je wat graag te",
}
"""Frequent words by language."""
SCRIPTS = {
    "CYRILLIC": "Cyrillic script",
    "CJK": "Chinese",
    "HIRAGANA": "Japanese",
    "KATAKANA": "Japanese",
    "HANGUL": "Korean",
    "ARABIC": "Arabic script",
    "GREEK": "Greek",
    "HEBREW": "Hebrew",
    "DEVANAGARI": "Devanagari script",
    "THAI": "Thai",
}
"""First word of the Unicode name of a letter -> its language or script."""


@dataclass(frozen=True, slots=True)
class RowTexts:
    """The texts of a row by part."""

    origin: Origin
    parts: Mapping[str, str]

    @property
    def feedback(self) -> str:
        return self.parts.get("feedback", "")

    @property
    def chat(self) -> str:
        """All texts but the feedback."""
        return "\n".join(text for part, text in self.parts.items() if part != "feedback")


@dataclass(frozen=True, slots=True)
class PersonalData:
    """A kind of personal data in a part of rows. count: rows that seem to contain it; rows: the
    first of them.
    """

    kind: str
    part: str
    count: int
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackTexts:
    """The feedback of rows.

    rows: that have feedback. languages: number of rows by language, the most frequent first;
    num_other_language: rows whose completion is in another one. repeated: texts of several rows,
    with their numbers, the most frequent first; num_repeated: all rows with such a text. quotes:
    the first rows whose feedback repeats QUOTED_WORDS words of another chat, and a row of that
    chat; num_quotes: all of them.
    """

    rows: int
    languages: Mapping[str, int]
    num_other_language: int
    repeated: tuple[tuple[str, int], ...]
    num_repeated: int
    quotes: tuple[tuple[str, str], ...]
    num_quotes: int


def texts_of(value: Mapping[str, Any], columns: Mapping[str, str], origin: Origin) -> RowTexts:
    """The texts of a row. columns: the file's column of each part."""
    texts: dict[str, str] = {}
    for part in PARTS:
        column = columns.get(f"{part}_text") or columns.get(part, part)
        if text := _text(lookup(value, column)):
            texts[part] = text
    if "feedback" not in texts and (comment := _text(lookup(value, COMMENT))):
        texts[COMMENT] = comment
    return RowTexts(origin, texts)


def _text(value: object) -> str:
    """The text in a value: of turns, their contents."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(_text, value)))
    if isinstance(value, Mapping):
        return "\n".join(filter(None, (_text(value.get(name)) for name in TEXT_FIELDS)))
    return ""


# Personal data


def personal_data(rows: Sequence[RowTexts]) -> tuple[PersonalData, ...]:
    """Rows that seem to contain personal data, by its kind and the part that contains it."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        for part, text in row.parts.items():
            for kind in _kinds(text):
                places[kind, part].append(str(row.origin))
    return tuple(
        PersonalData(kind, part, len(origins), tuple(origins[:PLACES]))
        for (kind, part), origins in sorted(places.items(), key=lambda item: -len(item[1]))
    )


def _kinds(text: str) -> Iterator[str]:
    for kind, (pattern, is_valid) in PATTERNS.items():
        if any(is_valid(match[0]) for match in pattern.finditer(text)):
            yield kind


def _is_phone(text: str) -> bool:
    return 8 <= sum(map(str.isdigit, text)) <= 15


def _is_iban(text: str) -> bool:
    code = text.replace(" ", "")
    return int("".join(str(int(char, 36)) for char in code[4:] + code[:4])) % 97 == 1


def _is_card(text: str) -> bool:
    """Whether the check digit is right (Luhn)."""
    digits = [int(char) for char in text if char.isdigit()][::-1]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return (
        len(digits) <= 19 and (sum(digits[::2]) + sum(doubled)) % 10 == 0 and len(set(digits)) > 1
    )


def _is_public_address(text: str) -> bool:
    try:
        return ip_address(text).is_global
    except ValueError:
        return False


PATTERNS: dict[str, tuple[re.Pattern[str], Callable[[str], bool]]] = {
    "e-mail address": (EMAIL, lambda _: True),
    "phone number": (PHONE, _is_phone),
    "IBAN": (IBAN, _is_iban),
    "card number": (CARD, _is_card),
    "IP address": (ADDRESS, _is_public_address),
}
"""Kind of personal data -> its form, and what a match must also satisfy."""


# Feedback


def audit_feedback(rows: Sequence[RowTexts]) -> FeedbackTexts | None:
    """What the feedback of rows contains; None where no row has feedback."""
    with_feedback = [row for row in rows if row.feedback]
    if not with_feedback:
        return None
    languages = [language_of(row.feedback) for row in with_feedback]
    answers = [language_of(row.parts.get("completion", "")) for row in with_feedback]
    texts = Counter(" ".join(row.feedback.split()) for row in with_feedback)
    repeated = [(text, count) for text, count in texts.most_common() if count > 1]
    quotes = _quotes(rows)
    return FeedbackTexts(
        rows=len(with_feedback),
        languages=dict(Counter(language or "unknown" for language in languages).most_common()),
        num_other_language=sum(
            bool(a and b and a != b) for a, b in zip(languages, answers, strict=True)
        ),
        repeated=tuple(repeated[:PLACES]),
        num_repeated=sum(count for _, count in repeated),
        quotes=tuple((str(a.origin), str(b.origin)) for a, b in quotes[:PLACES]),
        num_quotes=len(quotes),
    )


def language_of(text: str) -> str:
    """The language of a text, or its script; "" where too few of its words are known."""
    letters = [char for char in text[:2000] if char.isalpha()]
    scripts = Counter(unicodedata.name(char, "").split(" ")[0] for char in letters)
    for script, language in SCRIPTS.items():
        if scripts[script] > 0.3 * len(letters):
            return language
    words = Counter(re.findall(r"\w+", text[:2000].casefold()))
    hits = Counter({
        language: sum(words[word] for word in frequent.split())
        for language, frequent in LANGUAGES.items()
    })  # fmt: skip
    (first, num_hits), (_, second) = hits.most_common(2)
    return first if num_hits >= 2 and num_hits > second else ""


def _quotes(rows: Sequence[RowTexts]) -> list[tuple[RowTexts, RowTexts]]:
    """Rows whose feedback repeats words of another chat, each with the first row of that chat."""
    quoting: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        for shingle in set(_shingles(row.feedback)) - set(_shingles(row.chat)):
            quoting[shingle].append(i)
    quotes: dict[int, int] = {}
    for j, row in enumerate(rows) if quoting else ():
        shared = (quoting.get(shingle, ()) for shingle in _shingles(row.chat))
        for i in dict.fromkeys(chain.from_iterable(shared)):
            if i not in quotes and not _is_same_chat(rows[i], row):
                quotes[i] = j
    return [(rows[i], rows[j]) for i, j in sorted(quotes.items())]


def _shingles(text: str) -> Iterator[str]:
    words = re.findall(r"\w+", text.casefold())
    return (" ".join(words[i : i + QUOTED_WORDS]) for i in range(len(words) - QUOTED_WORDS + 1))


def _is_same_chat(a: RowTexts, b: RowTexts) -> bool:
    """Whether two rows have one prompt, or one continues the other."""
    prompts = a.parts.get("prompt", ""), b.parts.get("prompt", "")
    return prompts[0].startswith(prompts[1]) or prompts[1].startswith(prompts[0])
