"""Regression prompts: what an answer must and must not contain, before and after training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from valence.config.schema import RewardSettings
from valence.errors import UserError
from valence.evaluation.judges import AnswerPair
from valence.rewards.build import reward_of
from valence.rewards.combine import Combined
from valence.rewards.run import close, score_all

COLUMN = "assert"
"""Column of prompts with their assertions."""
KINDS = "contains, not_contains, regex, json_schema, refusal and length"
MAX_NAME = 80


@dataclass(frozen=True)
class Assertion:
    """A check of answers. name: for people, such as ``contains: Paris``. rule: gives 1 to an answer
    that passes.
    """

    name: str
    rule: Combined


@dataclass(frozen=True, slots=True)
class AssertionResult:
    """An assertion on the answers of both models; None if it could not be checked.

    errors: why it could not.
    """

    prompt: str
    name: str
    baseline: bool | None
    candidate: bool | None
    answer: str
    errors: str = ""

    @property
    def is_broken(self) -> bool:
        """Whether only the baseline passes it."""
        return self.baseline is True and self.candidate is False

    @property
    def is_fixed(self) -> bool:
        return self.baseline is False and self.candidate is True

    def to_dict(self) -> dict[str, Any]:
        values = {"prompt": self.prompt, "assertion": self.name}
        sides = {"baseline": self.baseline, "candidate": self.candidate}
        errors = {"error": self.errors} if self.errors else {}
        return {**values, **sides, "answer": self.answer, **errors}


def parse_assertions(value: Any, where: str) -> list[Assertion]:
    """The assertions of a row: an object with one entry for each, or a list of such objects.

    Raises UserError for another value.
    """
    objects = value if isinstance(value, list) else [value]
    entries = [entry for item in objects if isinstance(item, Mapping) for entry in item.items()]
    if not entries or not all(isinstance(item, Mapping) for item in objects):
        raise _invalid(f"{json.dumps(value, default=str):.80} is not an assertion", where)
    return [_assertion(str(kind), content, where) for kind, content in entries]


def _assertion(kind: str, content: Any, where: str) -> Assertion:
    rule, settings = _rule(kind, content, where)
    try:
        reward = reward_of([RewardSettings(reward=rule, settings=settings)])
    except UserError as error:
        raise UserError(
            f"{kind}: {error.message}",
            code=error.code,
            where=f"{where} ({COLUMN})",
            fix=error.fix,
        ) from error
    shown = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return Assertion(f"{kind}: {shown}"[:MAX_NAME], reward)


def _rule(kind: str, content: Any, where: str) -> tuple[str, dict[str, Any]]:
    """Name and settings of the rule for an assertion."""
    options = dict(content) if isinstance(content, Mapping) else {}
    words = [content] if isinstance(content, str) else content
    match kind:
        case "contains" | "not_contains":
            want = "all" if kind == "contains" else "none"
            return "contains", {"want": want, **(options or {"words": words})}
        case "regex":
            return "regex", options or {"pattern": content}
        case "json_schema":
            return "json_schema", {"schema": content if options else None, "fenced": True}
        case "refusal":
            return "refusal", {"want": content}
        case "length":
            return "length", {"unit": "words", **options}
        case _:
            raise _invalid(f"there is no assertion {kind!r}", where)


def _invalid(message: str, where: str) -> UserError:
    return UserError(
        message,
        code="assertion-invalid",
        where=f"{where} ({COLUMN})",
        fix=f'write an object such as {{"contains": "Paris"}}; the kinds are {KINDS}',
    )


def check_assertions(
    pairs: Sequence[AnswerPair], assertions: Mapping[str, Sequence[Assertion]]
) -> list[AssertionResult]:
    """assertions: by the id of the pair's prompt (``AnswerPair.prompt_key``)."""
    results: list[AssertionResult] = []
    for pair in pairs:
        for assertion in assertions.get(pair.prompt_key, ()):
            scores = score_all(assertion.rule, [pair.baseline, pair.candidate])
            close(assertion.rule)
            passed = [None if score.value is None else score.value == 1.0 for score in scores]
            errors = [score.error for score in scores if score.value is None]
            results.append(
                AssertionResult(
                    pair.prompt,
                    assertion.name,
                    passed[0],
                    passed[1],
                    pair.candidate.text,
                    "; ".join(errors),
                )
            )
    return results


def count_assertions(results: Sequence[AssertionResult]) -> dict[str, Any]:
    """How many pass, and those that only one model passes."""
    return {
        "number": len(results),
        "baseline": sum(result.baseline is True for result in results),
        "candidate": sum(result.candidate is True for result in results),
        "unchecked": sum(None in (result.baseline, result.candidate) for result in results),
        "broken": [result.to_dict() for result in results if result.is_broken],
        "fixed": [result.to_dict() for result in results if result.is_fixed],
    }
