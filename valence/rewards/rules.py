"""Rewards without a model: rules that compare a completion with a column of its row, or inspect
the completion alone.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from pydantic import BaseModel

from valence.errors import UserError, install_command
from valence.rewards.calls import RewardError
from valence.rewards.maths import FormulaComparer
from valence.rewards.settings import read_settings
from valence.rewards.threads import TimedOut, in_thread
from valence.storage import read_json
from valence.types import Completion, Score
from valence.user_code.attempt import Raised, attempt
from valence.user_code.settings import setting_docs, settings_model

Rule = Callable[[Completion], float | Score]
INSTALL = install_command("rewards")
LIBRARIES = {"maths": "math-verify", "vader": "vaderSentiment", "json_schema": "jsonschema"}
"""Libraries that rules use."""
PATTERN_SECONDS = 5.0
"""Time limit of a search for a pattern."""


class UnscoredError(Exception):
    """A rule cannot score a completion, and why."""


def exact_match(*, answer: str = "answer", ignore_case: bool = False) -> Rule:
    """1 if the answer equals the row's, apart from surrounding spaces; else 0.

    answer: column with the right answer, or a list of right answers.
    ignore_case: ignore case.
    """

    def rule(completion: Completion) -> float:
        text = _fold(completion.text.strip(), ignore_case)
        expected = [_fold(right.strip(), ignore_case) for right in _expected(completion, answer)]
        return float(text in expected)

    return rule


def contains(
    *,
    words: list[str] | None = None,
    answer: str = "answer",
    want: Literal["any", "all", "none"] = "any",
    ignore_case: bool = False,
) -> Rule:
    """1 if the answer contains these words (any texts), else 0.

    words: texts to search for; null: the texts in the column.
    answer: column with the right answer, or a list of right answers.
    want: how many of the texts the answer must contain.
    ignore_case: ignore case.
    """
    if words is not None and not all(words):
        raise UserError(
            "the list contains an empty string, which matches every answer",
            code="reward-setting-value",
            where="words",
            fix="remove the empty string",
        )

    def rule(completion: Completion) -> float:
        text, texts = _fold(completion.text, ignore_case), words or _expected(completion, answer)
        matches = [_fold(word, ignore_case) in text for word in texts]
        return float({"any": any(matches), "all": all(matches), "none": not any(matches)}[want])

    return rule


def regex(*, pattern: str, full_match: bool = False, ignore_case: bool = False) -> Rule:
    """1 if the pattern matches in the answer, else 0. `.` also matches line breaks.

    pattern: a Python regular expression.
    full_match: match the complete answer.
    ignore_case: ignore case.
    """
    import regex as engine  # unlike `re` it has a time limit

    try:
        compiled = engine.compile(
            pattern, engine.DOTALL | (engine.IGNORECASE if ignore_case else 0)
        )
    except engine.error as error:
        raise UserError(
            f"not a valid regular expression: {error}",
            code="reward-setting-value",
            where="pattern",
            fix="correct the pattern",
        ) from error

    def rule(completion: Completion) -> float:
        search = compiled.fullmatch if full_match else compiled.search
        try:
            match = search(completion.text, timeout=PATTERN_SECONDS, concurrent=True)
        except TimeoutError as error:
            raise UnscoredError(
                f"the pattern took longer than {PATTERN_SECONDS:g} s (backtracking): simplify it"
            ) from error
        return float(match is not None)

    return rule


def length(
    *,
    unit: Literal["tokens", "characters", "words"] = "tokens",
    min_length: Annotated[int, Ge(0)] = 0,
    max_length: Annotated[int, Ge(0)] | None = None,
    fall: Annotated[int, Ge(0)] = 0,
) -> Rule:
    """1 if the length is in a range; outside it falls linearly to 0.

    Tokens cannot be counted if only the text is known.

    unit: unit of the length.
    min_length: minimum length for score 1.
    max_length: maximum length for score 1; null: no maximum.
    fall: number of units over which the score falls from 1 to 0 outside the range.
    """
    if max_length is not None and max_length < min_length:
        raise UserError(
            f"the maximum {max_length} is smaller than the minimum {min_length}",
            code="reward-setting-value",
            where="max_length",
            fix="set max_length to at least the value of min_length",
        )

    def rule(completion: Completion) -> float:
        if unit == "tokens" and completion.text and not completion.tokens:
            raise UnscoredError(
                "the completion has text but no tokens: set unit to characters or words"
            )
        n = {
            "tokens": len(completion.tokens),
            "characters": len(completion.text),
            "words": len(completion.text.split()),
        }[unit]
        outside = max(min_length - n, 0, 0 if max_length is None else n - max_length)
        return 1.0 - min(outside, fall) / fall if fall else float(outside == 0)

    return rule


def json_schema(*, schema: dict[str, Any] | str | None = None, fenced: bool = False) -> Rule:
    """1 if the answer is JSON that satisfies the schema, else 0.

    schema: JSON schema, or a file that contains one; null: any JSON.
    fenced: allow the JSON in a ``` fence with text around it.
    """
    check = _validator(schema)

    def rule(completion: Completion) -> float:
        text = completion.text
        if fenced and text.count("```") >= 2:
            text = text.split("```")[1].removeprefix("json")
        try:
            return float(check(json.loads(text, parse_constant=_refuse_constant)))
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            return 0.0

    return rule


def maths(
    *,
    answer: str = "answer",
    after: str | None = None,
    seconds: Annotated[float, Gt(0)] = 5.0,
) -> Rule:
    """1 if the last formula or number of the answer equals the row's, by math-verify; else 0.

    answer: column with the right answer, or a list of right answers.
    after: text in the column before the answer, such as '####'.
    seconds: CPU time limit of one comparison, in seconds.
    """
    comparer = FormulaComparer(seconds)

    def rule(completion: Completion) -> float:
        expected = _expected(completion, answer)
        if after is not None:
            expected = [text.rpartition(after)[2] for text in expected]
        reply = comparer.compare(expected, completion.text)
        if "error" in reply:
            raise UnscoredError(
                f"{reply['error']}, for the column {answer!r} with {expected[0][:80]!r}"
            )
        return float(reply["score"])

    rule.close = comparer.close  # pyright: ignore[reportFunctionMemberAccess]
    return rule


def vader(*, part: Literal["compound", "pos", "neu", "neg"] = "compound") -> Rule:
    """Sentiment of English text by VADER's lexicon: compound from -1 (negative) to 1 (positive), or
    a fraction.

    Hutto and Gilbert 2014, ICWSM.

    part: which of VADER's scores.
    """
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()

    def rule(completion: Completion) -> float:
        return float(analyzer.polarity_scores(completion.text)[part])

    return rule


REFUSAL = (
    r"(i'?m|i am)( \w+)? (sorry|unable|not able)"
    r"|i (can'?t|cannot|can not|won'?t|will not|must decline|decline|am not able)"
    r"|(can'?t|cannot|unable to) (help|assist|answer|provide|comply)"
    r"|as an ai\b"
)
REFUSAL_CHARACTERS = 200
"""Beginning of an answer in which a refusal is searched for."""


def refusal(*, want: bool = True) -> Rule:
    """1 if the answer refuses to help, else 0; with `want: false` the other way round.

    It searches for usual English phrases near the beginning, such as "I cannot" and "I'm sorry".

    want: whether the answer should refuse.
    """
    compiled = re.compile(REFUSAL, re.IGNORECASE)

    def rule(completion: Completion) -> float:
        beginning = completion.text[:REFUSAL_CHARACTERS].replace("\u2019", "'")
        return float((compiled.search(beginning) is not None) == want)

    return rule


def zero() -> Rule:
    """0 for every completion: for methods that need no reward, such as online_distill."""
    return lambda completion: 0.0


def environment() -> Rule:
    """What `get_turn_reward` and `get_reward` of the environment return (`rollout.environment`)."""

    def rule(completion: Completion) -> Score:
        episode = completion.episode
        if episode is None or episode.reward is None:
            raise UnscoredError(
                "the completion has no reward of an environment: set rollout.environment to a "
                "class with get_reward or get_turn_reward"
            )
        return Score(episode.reward, turn_rewards=episode.turn_rewards)

    return rule


RULES: dict[str, Callable[..., Rule]] = {
    "exact_match": exact_match,
    "contains": contains,
    "regex": regex,
    "length": length,
    "json_schema": json_schema,
    "maths": maths,
    "vader": vader,
    "refusal": refusal,
    "zero": zero,
    "environment": environment,
}
"""Rules by name. Their keyword-only parameters are the settings."""


def settings_of(name: str) -> type[BaseModel]:
    """The settings of a rule as a model, with types, bounds, defaults and descriptions."""
    rule = RULES[name]
    parameters = inspect.signature(rule, eval_str=True).parameters.values()
    return settings_model(name, parameters, setting_docs(rule.__doc__ or ""))


def unknown_rule(name: str) -> UserError:
    close = get_close_matches(name, RULES, 1, 0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return UserError(
        f"there is no rule {name!r}",
        code="reward-not-found",
        fix=f"{hint}Use one of {', '.join(RULES)}" if hint else f"use one of {', '.join(RULES)}",
    )


def rule_of(name: str, settings: Mapping[str, Any], where: str) -> Rule:
    """The rule with these settings.

    Raises UserError for a wrong setting, and if its library is missing.
    """
    values = read_settings(settings_of(name), settings, where, f"reward {name}", name)
    try:
        return RULES[name](**{field: getattr(values, field) for field in type(values).model_fields})
    except UserError as error:
        raise UserError(
            error.message, code=error.code, where=f"{where}.{error.where}", fix=error.fix
        ) from error
    except ImportError as error:
        raise UserError(
            f"reward {name} needs a library that is not installed: {error}",
            code="library-missing",
            where=where,
            fix=INSTALL,
        ) from error


@dataclass
class Rules:
    """A rule as a backend, which runs in a thread. seconds: time limit of a call."""

    name: str
    rule: Rule
    settings: Mapping[str, Any]
    seconds: float = 60.0
    _abandoned: list[Any] = field(default_factory=list[Any], repr=False)

    def __post_init__(self) -> None:
        self._identity = self._read_identity()  # while the files are those that were read

    @property
    def identity(self) -> Mapping[str, Any]:
        return self._identity

    def _read_identity(self) -> Mapping[str, Any]:
        files = [Path(__file__), *Path(__file__).parent.glob("maths*.py")]
        schema = self.settings.get("schema")
        files += [Path(schema)] if isinstance(schema, str) else []
        source = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
        library = ""
        if self.name in LIBRARIES:
            with suppress(PackageNotFoundError):  # not every use of a rule requires it
                library = version(LIBRARIES[self.name])
        return {
            "rule": self.name,
            "settings": dict(self.settings),
            "source": source,
            "library": library,
        }

    async def attempt(self, completions: Sequence[Completion]) -> list[Score]:
        try:
            scores = await in_thread(
                lambda: [self._score(completion) for completion in completions],
                self.seconds,
                self._abandoned,
            )
        except TimedOut as late:
            raise RewardError(
                f"the rule {self.name} gave no result within {self.seconds:g} s; the call was "
                "abandoned"
            ) from late
        if isinstance(scores, Raised):
            raise scores.error
        return scores

    async def close(self) -> None:
        getattr(self.rule, "close", lambda: None)()

    def _score(self, completion: Completion) -> Score:
        value = attempt(partial(self.rule, completion))
        if not isinstance(value, Raised):
            return value if isinstance(value, Score) else Score(value)
        if isinstance(value.error, UnscoredError):
            return Score(None, error=str(value.error))
        return Score(None, error=f"raised {type(value.error).__name__}: {value.error}")


def _expected(completion: Completion, column: str) -> list[str]:
    """The right answers in a column of the row. Raises UnscoredError if there is none."""
    value = completion.info.get(column)
    if value is None:
        columns = ", ".join(completion.info) or "none"
        raise UnscoredError(
            f"the row has no value in the column {column!r} (columns of the row: {columns})"
        )
    texts: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    if not texts or not all(isinstance(text, str | int | float) for text in texts):
        raise UnscoredError(
            f"the column {column!r} of the row has {value!r:.80}, not a text, a number or a list "
            f"of them"
        )
    return [str(text) for text in texts]


def _fold(text: str, ignore_case: bool) -> str:
    return text.casefold() if ignore_case else text


def _validator(schema: dict[str, Any] | str | None) -> Callable[[Any], bool]:
    if schema is None:
        return lambda _: True
    import jsonschema
    from jsonschema.validators import validator_for

    loaded: Any = schema
    if isinstance(schema, str):
        try:
            loaded = read_json(Path(schema))
        except (OSError, ValueError) as error:
            raise UserError(
                f"the JSON schema {schema} cannot be read: {error}",
                code="reward-setting-value",
                where="schema",
                fix="use the path of a JSON file",
            ) from error
    kind = validator_for(loaded)
    try:
        kind.check_schema(loaded)
    except jsonschema.SchemaError as error:
        raise UserError(
            f"the JSON schema is not valid at {error.json_path}: {error.message}",
            code="reward-setting-value",
            where="schema",
            fix="correct this part of the schema",
        ) from error
    return kind(loaded).is_valid


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
