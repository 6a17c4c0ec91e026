"""Keyword arguments of ``valence.train`` that are settings of a recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from valence.config.describe import at, schema_of
from valence.config.schema import Recipe
from valence.errors import UserError


def recipe_from_arguments(
    recipe: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    settings: Mapping[str, Any],
) -> tuple[str | Path | Mapping[str, Any], list[str]]:
    """Merge settings into a recipe. Returns what ``load_recipe`` takes: a recipe and overrides.

    settings: sections as mappings (``loss={"beta": 0.2}``) or single settings by their full name
    (``**{"train.seed": 1}``). They win over the recipe, and the overrides win over them. Names and
    types are checked with the rest of the recipe. Raises UserError for a value that a recipe cannot
    hold.
    """
    flat = dict(_flatten(settings, ()))
    if recipe is None or isinstance(recipe, Mapping):
        merged = _copy(recipe or {})
        for path, value in flat.items():
            _put(merged, path, value)
        return merged, list(overrides)
    return recipe, [
        *(f"{'.'.join(path)}={_as_json(path, value)}" for path, value in flat.items()),
        *overrides,
    ]


def names_a_model(recipe: str | Path | Mapping[str, Any] | None) -> bool:
    """Whether the recipe has a ``model.name``.

    A file is taken to have one: without it, its own check says so.
    """
    if not isinstance(recipe, Mapping):
        return recipe is not None
    model = recipe.get("model")
    return isinstance(model, str) or (isinstance(model, Mapping) and "name" in model)


def _flatten(
    settings: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in settings.items():
        inner = (*path, *str(name).split("."))
        # names in a mapping such as model.lora.rank_pattern are the user's, and may have dots
        is_section = not isinstance(at(schema_of(Recipe), inner).get("additionalProperties"), dict)
        if isinstance(value, Mapping) and value and is_section:
            yield from _flatten(cast(Mapping[str, Any], value), inner)
        else:
            yield inner, str(value) if isinstance(value, Path) else value


def _copy(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _copy(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else value
        for key, value in mapping.items()
    }


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for index, name in enumerate(path[:-1]):
        inner = values.setdefault(name, {})
        # the short form of model.name
        if name == "model" and index == 0 and isinstance(inner, str):
            inner = values[name] = {"name": inner}
        if not isinstance(inner, dict):
            raise UserError(
                f"{'.'.join(path[: index + 1])} is not a section",
                code="setting-not-a-section",
                where=".".join(path),
                fix="write it as a mapping",
            )
        values = cast(dict[str, Any], inner)
    values[path[-1]] = value


def _as_json(path: tuple[str, ...], value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        what = f"a recipe cannot hold a value of type {type(value).__name__}"
        raise UserError(
            what,
            code="setting-type",
            where=".".join(path),
            fix="give a number, a text, a list or a mapping",
        ) from None


__all__ = ["names_a_model", "recipe_from_arguments"]
