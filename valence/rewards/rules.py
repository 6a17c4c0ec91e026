"""Rewards that need no model: each compares an answer with what its row says, or looks at the
answer alone.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from valence.errors import UserError, install_command
from valence.rewards.calls import RewardError
from valence.rewards.maths import Maths
from valence.rewards.threads import Raised, TimedOut, attempt, in_thread
from valence.types import Completion, Score

Rule = Callable[[Completion], float]
INSTALL = install_command("rewards")
LIBRARIES = {"maths": "math-verify", "vader": "vaderSentiment", "json_schema": "jsonschema"}
"""What rules judge by."""
SECONDS_OF_A_PATTERN = 5.0

Column = Annotated[
    str,
    Field(
        description="column of the row that holds what is right; a list there allows for several"
    ),
]
IgnoreCase = Annotated[bool, Field(description="whether capital and small letters are the same")]


class UnscoredError(Exception):
    """There is no score of an answer, and this is why."""


def exact_match(*, answer: Column = "answer", ignore_case: IgnoreCase = False) -> Rule:
    """1 when the answer is the row's own, spaces around it aside; else 0."""

    def rule(completion: Completion) -> float:
        found = _folded(completion.text.strip(), ignore_case)
        return float(
            any(
                found == _folded(right.strip(), ignore_case)
                for right in _expected(completion, answer)
            )
        )

    return rule


def contains(
    *,
    words: Annotated[
        list[str] | None, Field(description="what to look for; null: what the row's column says")
    ] = None,
    answer: Column = "answer",
    want: Annotated[
        Literal["any", "all", "none"], Field(description="how many of them the answer must have")
    ] = "any",
    ignore_case: IgnoreCase = False,
) -> Rule:
    """1 when the answer has these words (pieces of text) in it, else 0."""
    if words is not None and not all(words):
        raise UserError(
            "every answer has an empty text in it",
            code="reward-setting-value",
            where="words",
            fix="remove it",
        )

    def rule(completion: Completion) -> float:
        text = _folded(completion.text, ignore_case)
        found = [
            _folded(word, ignore_case) in text for word in (words or _expected(completion, answer))
        ]
        return float({"any": any(found), "all": all(found), "none": not any(found)}[want])

    return rule


def regex(
    *,
    pattern: Annotated[str, Field(description="a regular expression of Python")],
    whole: Annotated[bool, Field(description="whether it must match the whole answer")] = False,
    ignore_case: IgnoreCase = False,
) -> Rule:
    """1 when the pattern is found in the answer, else 0. `.` also stands for a line break."""
    import regex as engine  # unlike `re` it can be stopped

    try:
        compiled = engine.compile(
            pattern, engine.DOTALL | (engine.IGNORECASE if ignore_case else 0)
        )
    except engine.error as error:
        raise UserError(
            f"this is no regular expression: {error}",
            code="reward-setting-value",
            where="pattern",
            fix="correct it",
        ) from error

    def rule(completion: Completion) -> float:
        look = compiled.fullmatch if whole else compiled.search
        try:
            return float(
                look(completion.text, timeout=SECONDS_OF_A_PATTERN, concurrent=True) is not None
            )
        except TimeoutError as error:
            raise UnscoredError(
                f"the pattern took longer than {SECONDS_OF_A_PATTERN:g} s; it backtracks without "
                f"end"
            ) from error

    return rule


def length(
    *,
    unit: Annotated[
        Literal["tokens", "characters", "words"], Field(description="what is counted")
    ] = "tokens",
    least: Annotated[int, Field(ge=0, description="shortest length that gives 1")] = 0,
    most: Annotated[
        int | None, Field(ge=0, description="longest length that gives 1; null: any")
    ] = None,
    fall: Annotated[
        int, Field(ge=0, description="over how many units it falls from 1 to 0 outside")
    ] = 0,
) -> Rule:
    """1 when the length is in a range; outside it falls linearly to 0.

    Of a text without its tokens these cannot be counted.
    """
    if most is not None and most < least:
        raise UserError(
            f"no length is at least {least} and at most {most}",
            code="reward-setting-value",
            where="most",
            fix="set least below it",
        )

    def rule(completion: Completion) -> float:
        if unit == "tokens" and completion.text and not completion.tokens:
            raise UnscoredError(
                "its tokens are not known, only its text: set unit to characters or words"
            )
        n = {
            "tokens": len(completion.tokens),
            "characters": len(completion.text),
            "words": len(completion.text.split()),
        }[unit]
        outside = max(least - n, 0, 0 if most is None else n - most)
        return 1.0 - min(outside, fall) / fall if fall else float(outside == 0)

    return rule


def json_schema(
    *,
    schema: Annotated[
        dict[str, Any] | str | None,
        Field(description="a JSON schema, or the file of one; null: any JSON"),
    ] = None,
    fenced: Annotated[
        bool, Field(description="whether the JSON may stand in a fence of ```, with text around it")
    ] = False,
) -> Rule:
    """1 when the answer is JSON that satisfies the schema, else 0."""
    check = _validator(schema)

    def rule(completion: Completion) -> float:
        text = completion.text
        if fenced and text.count("```") >= 2:
            text = text.split("```")[1].removeprefix("json")
        try:
            return float(check(json.loads(text, parse_constant=_no_json)))
        except (ValueError, RecursionError):  # no JSON, or nested so deeply that nobody reads it
            return 0.0

    return rule


def maths(
    *,
    answer: Column = "answer",
    after: Annotated[
        str | None, Field(description="mark in the column behind which it stands, as '####'")
    ] = None,
    seconds: Annotated[
        float, Field(gt=0, description="of the processor that one comparison may take")
    ] = 5.0,
) -> Rule:
    """1 when the last formula or number of the answer equals the row's, by math-verify; else 0."""
    process = Maths(seconds)

    def rule(completion: Completion) -> float:
        rights = _expected(completion, answer)
        rights = rights if after is None else [right.rpartition(after)[2] for right in rights]
        said = process.ask({"right": rights, "text": completion.text})
        if "error" in said:
            raise UnscoredError(f"{said['error']}, of the row's {answer} {rights[0][:80]!r}")
        return float(said["score"])

    rule.close = process.close  # pyright: ignore[reportFunctionMemberAccess]
    return rule


def vader(
    *,
    part: Annotated[
        Literal["compound", "pos", "neu", "neg"], Field(description="which of VADER's numbers")
    ] = "compound",
) -> Rule:
    """Sentiment of English text by VADER's lexicon: compound from -1 (negative) to 1 (positive), or
    a share.

    Hutto and Gilbert 2014, ICWSM.
    """
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()

    def rule(completion: Completion) -> float:
        return float(analyzer.polarity_scores(completion.text)[part])

    return rule


RULES: dict[str, Callable[..., Rule]] = {
    "exact_match": exact_match,
    "contains": contains,
    "regex": regex,
    "length": length,
    "json_schema": json_schema,
    "maths": maths,
    "vader": vader,
}
"""By name. Keyword-only parameters are the settings."""


def settings_of(name: str) -> type[BaseModel]:
    """The settings of a rule: types, bounds, defaults and what each means."""
    fields: dict[str, Any] = {
        p.name: (p.annotation, ... if p.default is p.empty else p.default)
        for p in inspect.signature(RULES[name], eval_str=True).parameters.values()
    }
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    with warnings.catch_warnings():
        # a setting may be called schema
        warnings.filterwarnings("ignore", ".*shadows an attribute")
        return create_model(name, __config__=config, **fields)


def unknown_rule(name: str) -> UserError:
    near = get_close_matches(name, RULES, 1, 0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return UserError(
        f"there is no rule {name!r}",
        code="reward-not-found",
        fix=f"{hint}rules: {', '.join(RULES)}",
    )


def code_of(error: Mapping[str, Any]) -> str:
    """The code of what pydantic has against a setting."""
    kinds = {"extra_forbidden": "reward-setting-unknown", "missing": "reward-setting-missing"}
    return kinds.get(error["type"], "reward-setting-value")


def said(error: Mapping[str, Any]) -> str:
    """What pydantic has against a setting."""
    return "there is no such setting" if error["type"] == "extra_forbidden" else str(error["msg"])


def rule_of(name: str, settings: Mapping[str, Any], where: str) -> Rule:
    """The rule under these settings.

    Raises UserError for a wrong one, or when its library is missing.
    """
    try:
        given = settings_of(name)(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (where, *first["loc"])))
        names = ", ".join(settings_of(name).model_fields)
        raise UserError(
            f"{said(first)} (reward {name})",
            code=code_of(first),
            where=place,
            fix=f"its settings are {names}; see `valence rewards {name}`",
        ) from error
    try:
        return RULES[name](**{field: getattr(given, field) for field in type(given).model_fields})
    except UserError as error:
        raise UserError(
            error.what, code=error.code, where=f"{where}.{error.where}", fix=error.fix
        ) from error
    except ImportError as error:
        raise UserError(
            f"reward {name} needs a library: {error}",
            code="library-missing",
            where=where,
            fix=INSTALL,
        ) from error


@dataclass
class Rules:
    """A rule, asked in a thread about one answer after the other. ``seconds``: of one call."""

    name: str
    rule: Rule
    settings: Mapping[str, Any]
    seconds: float = 60.0
    _abandoned: list[Any] = field(default_factory=list[Any], repr=False)

    @property
    def identity(self) -> Mapping[str, Any]:
        read = [Path(__file__), *Path(__file__).parent.glob("maths*.py")]
        schema = self.settings.get("schema")
        read += [Path(schema)] if isinstance(schema, str) else []
        source = hashlib.sha256(b"".join(path.read_bytes() for path in read)).hexdigest()
        library = ""
        if self.name in LIBRARIES:
            with suppress(PackageNotFoundError):  # not every use of a rule needs it
                library = version(LIBRARIES[self.name])
        return {
            "rule": self.name,
            "settings": dict(self.settings),
            "source": source,
            "library": library,
        }

    async def attempt(self, completions: Sequence[Completion]) -> list[Score]:
        try:
            found = await in_thread(
                lambda: [self._one(completion) for completion in completions],
                self.seconds,
                self._abandoned,
            )
        except TimedOut as late:
            raise RewardError(
                f"no answer within {self.seconds:g} s; the call was given up"
            ) from late
        if isinstance(found, Raised):
            raise found.error
        return found

    async def close(self) -> None:
        getattr(self.rule, "close", lambda: None)()

    def _one(self, completion: Completion) -> Score:
        found = attempt(partial(self.rule, completion))
        if not isinstance(found, Raised):
            return Score(found)
        if isinstance(found.error, UnscoredError):
            return Score(None, error=str(found.error))
        return Score(None, error=f"raised {type(found.error).__name__}: {found.error}")


def _expected(completion: Completion, column: str) -> list[str]:
    """What the row says is right: one text or several. Raises Unscored when it says nothing."""
    found = completion.info.get(column)
    if found is None:
        has = ", ".join(completion.info) or "none"
        raise UnscoredError(f"its row has nothing in the column {column!r} (others: {has})")
    several: Sequence[Any] = found if isinstance(found, list | tuple) else [found]
    if not several or not all(isinstance(each, str | int | float) for each in several):
        raise UnscoredError(
            f"its row's {column!r} is {found!r:.80}, where a text or a number is wanted, or a "
            f"list of them"
        )
    return [str(each) for each in several]


def _folded(text: str, ignore_case: bool) -> str:
    return text.casefold() if ignore_case else text


def _validator(schema: dict[str, Any] | str | None) -> Callable[[Any], bool]:
    if schema is None:
        return lambda _: True
    import jsonschema
    from jsonschema.validators import validator_for

    loaded: Any = schema
    if isinstance(schema, str):
        try:
            loaded = json.loads(Path(schema).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            what = f"no JSON schema can be read from {schema}: {error}"
            raise UserError(
                what, code="reward-setting-value", where="schema", fix="name a JSON file"
            ) from error
    kind = validator_for(loaded)
    try:
        kind.check_schema(loaded)
    except jsonschema.SchemaError as error:
        raise UserError(
            f"this is no JSON schema: {error.message}",
            code="reward-setting-value",
            where="schema",
            fix="correct it",
        ) from error
    return kind(loaded).is_valid


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
