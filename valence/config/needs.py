"""What the method of a recipe needs: its settings, the reference, and columns of its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from valence.config.schema import SELF, Recipe
from valence.methods import Method, method_of


def settings_of_step(recipe: Recipe) -> dict[str, Any]:
    """The settings of the loss, with those that another section of the recipe determines."""
    limit = (
        {"max_tokens": recipe.rollout.max_new_tokens}
        if recipe.reward and recipe.loss.get("max_tokens", 0) is None
        else {}
    )
    return {**recipe.loss, **limit}


def methods_in(recipe: Recipe) -> list[Method]:
    """The method of a recipe, and those of `mix`."""
    return [method_in(recipe), *(method_of(part.method) for part in recipe.mix)]


def has_teacher(methods: Iterable[Method]) -> bool:
    """Whether one of the methods has a teacher."""
    return any(method.loss.needs_teacher for method in methods)


def has_fixed_teacher(recipe: Recipe, methods: Iterable[Method]) -> bool:
    """Whether the teacher of a run has the weights of its reference."""
    is_fixed = recipe.teacher.model != SELF or recipe.teacher.weights == "initial"
    return is_fixed and has_teacher(methods)


def other_text(recipe: Recipe) -> str | None:
    """``eval.other_text`` without its automatic value; None: off."""
    value = recipe.eval.other_text
    if value == "auto":
        return "shipped" if has_teacher(methods_in(recipe)) else None
    return None if value == "off" else value


def reads_reference(recipe: Recipe) -> bool:
    """Whether a run of this recipe needs a reference, which may be its teacher."""
    method, *mixed = methods_in(recipe)
    if has_fixed_teacher(recipe, [method, *mixed]) or any(other.needs_reference for other in mixed):
        return True
    if not method.online:
        return method.needs_reference
    if method.loss_reads_reference(recipe.loss):
        return True
    return recipe.measures_kl


def caches_reference(recipe: Recipe) -> bool:
    """Whether the losses read log-probabilities of the reference or teacher that are cached: those
    of stored completions.
    """
    settings = recipe.loss, *(part.loss for part in recipe.mix)
    methods = methods_in(recipe)
    return not methods[0].online and any(
        method.loss.needs_reference
        or (method.loss.needs_teacher and not method.loss.compares_distributions(values))
        for method, values in zip(methods, settings, strict=True)
    )


def read_of_tokens(recipe: Recipe, *, reference: bool) -> tuple[str, ...]:
    """The token columns that an online method needs for its completions.

    `old` and `ref`: log-probabilities of the policy and the reference (if any); `value`: of the
    value head.
    """
    method, rollout = method_in(recipe), recipe.rollout
    assert method.sample_builder is not None
    reads = method.sample_builder.reads
    # the policy changes within the round
    has_several_steps = method.is_on_policy and rollout.steps_per_round > 1
    needs_old = (
        has_several_steps or "old_t" in reads or "value_t" in reads or rollout.engine != "hf"
    )
    # With top_p, the sampler's log-probabilities are over the nucleus, those of the reference over
    # all tokens.
    needs_old = needs_old or rollout.top_p < 1
    is_teacher = recipe.teacher.model != SELF  # then the reference is another model
    needs = {"old": needs_old, "ref": reference and not is_teacher, "value": "value_t" in reads}
    return tuple(name for name, is_needed in needs.items() if is_needed)


def method_in(recipe: Recipe) -> Method:
    """The table row of the method that a recipe names."""
    return method_of(recipe.method, bool(recipe.reward))
