"""What settings must have to do with each other: those with no effect in this run, and those that contradict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Protocol

from valence.config.schema import Recipe


class MethodFacts(Protocol):
    """What a recipe is checked against: the method's name, the rows it reads, and the settings of its loss.

    ``kind`` is one of ``valence.types.Kind``. ``settings`` is a pydantic model (the class) that forbids unknown
    names; it is declared as Any so that a cached property may provide it.
    """

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def needs_reference(self) -> bool: ...
    @property
    def settings(self) -> Any: ...
    def without_effect(self, settings: Mapping[str, Any]) -> Mapping[str, str]:
        """Settings of the loss that change nothing under the others, and what would turn each on."""
        ...

    def contradictions(self, settings: Mapping[str, Any]) -> Mapping[str, str]:
        """Settings of the loss that another one rules out, and that one."""
        ...


MAKES = {
    "pairs_to_judgements": "judgement",
    "pairs_to_rankings": "ranking",
    "judgements_to_pairs": "preference",
    "scores_to_judgements": "judgement",
    "scores_to_pairs": "preference",
    "scores_to_all_pairs": "preference",
    "scores_to_rankings": "ranking",
    "rankings_to_scored": "scored",
    "chosen_to_demonstrations": "demonstration",
}
"""Kind of the examples that each ``data.convert`` makes."""

THRESHOLD = ("scores_to_all_pairs", "scores_to_judgements", "scores_to_pairs")
"""Conversions that read ``data.threshold``."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a rule looks at. ``rows``: which of train, eval and test there are, in files or in memory."""

    recipe: Recipe
    method: MethodFacts
    rows: Set[str]

    @property
    def words(self) -> dict[str, str | None]:
        """What a rule's ``why`` may name."""
        kinds = "scored answers" if self.method.kind == "scored" else f"{self.method.kind}s"
        return {"method": self.method.name, "kinds": kinds, "convert": self.recipe.data.convert}

    @property
    def converts_astray(self) -> bool:
        """Does ``data.convert`` make what the method does not read? A judgement is a scored answer, too."""
        if self.recipe.data.convert is None:
            return False
        makes = MAKES[self.recipe.data.convert]
        return makes != self.method.kind and (makes, self.method.kind) != ("judgement", "scored")


@dataclass(frozen=True, slots=True)
class Rule:
    """A mistake about ``setting`` (a pattern of dotted names) that is there when ``broken`` says so.

    ``why`` may name ``{method}``, ``{kinds}`` and ``{convert}``.
    """

    setting: str
    broken: Callable[[Case], bool]
    why: str
    fix: str


NO_EVAL = "nothing is evaluated during training, as data.eval is empty"
NO_EFFECT = (
    Rule("eval.every", lambda c: "eval" not in c.rows, NO_EVAL, "give data.eval"),
    Rule("eval.at_start", lambda c: "eval" not in c.rows, NO_EVAL, "give data.eval"),
    Rule("eval.max_examples", lambda c: "eval" not in c.rows, NO_EVAL, "give data.eval"),
    Rule("reference.*", lambda c: not c.method.needs_reference, "{method} reads no reference", "choose a method that reads one"),
    Rule(
        "data.threshold",
        lambda c: c.recipe.data.convert not in THRESHOLD,
        f"only data.convert: {', '.join(THRESHOLD[:-1])} and {THRESHOLD[-1]} read it",
        "set data.convert",
    ),
    Rule(
        "data.train_on",
        lambda c: c.method.kind != "demonstration",
        "{method} reads {kinds}, and only demonstrations have other turns to train on",
        "choose a method like sft",
    ),
    Rule(
        "data.stratify",
        lambda c: c.method.kind not in ("judgement", "scored"),
        "{method} reads {kinds}, and only judgements are thumbs up or down",
        "choose a method like kto",
    ),
    Rule(
        "run.export",
        lambda c: c.recipe.model.lora is None and c.recipe.model.adapter is None,
        "there is no adapter to merge or to keep apart",
        "set model.lora",
    ),
    Rule(
        "run.samples.prompts",
        lambda c: not c.rows & {"eval", "test"},
        "the prompts are those of data.eval or data.test, which are both empty",
        "give data.eval",
    ),
    Rule(
        "run.samples.max_new_tokens",
        lambda c: c.recipe.run.samples.prompts == 0,
        "no answers are sampled",
        "set run.samples.prompts",
    ),
    Rule(
        "run.samples.temperature",
        lambda c: c.recipe.run.samples.prompts == 0,
        "no answers are sampled",
        "set run.samples.prompts",
    ),
)
"""Settings without effect. Only a setting that differs from its default can break one of these."""

CONTRADICTIONS = (
    Rule(
        "data.convert",
        lambda c: c.converts_astray,
        "{convert} does not make what {method} reads: {kinds}",
        "choose another data.convert or another method",
    ),
    Rule(
        "data.threshold",
        lambda c: c.recipe.data.convert == "scores_to_judgements" and c.recipe.data.threshold is None,
        "{convert} needs the score from which an answer is thumbs up",
        "set data.threshold",
    ),
    Rule(
        "model.lora",
        lambda c: c.recipe.model.lora is not None and c.recipe.model.adapter is not None,
        "model.adapter already says the rank and the layers",
        "remove model.lora, or model.adapter to start a new one",
    ),
)
"""Settings that cannot hold together, or that another one makes necessary."""
