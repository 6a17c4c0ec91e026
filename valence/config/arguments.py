"""Keyword arguments of ``valence.train`` that are settings of a recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from valence.config.describe import at, dotted, schema_of
from valence.config.parse import put, value_at
from valence.config.schema import Recipe
from valence.errors import UserError
from valence.user_code.load import target_of

Argument = tuple[str, str, Any]
"""The name of an argument, the full name of the setting or section that it sets, and the value."""


def refuse_duplicates(arguments: Sequence[Argument], overrides: Sequence[str]) -> None:
    """Raise UserError if two arguments set the same setting. Arguments that are None set nothing.

    overrides: they may replace settings, but not the rows of ``train`` and ``eval``.
    """
    paths: list[tuple[str, tuple[str, ...]]] = []
    changes = [tuple(text.partition("=")[0].strip().split(".")) for text in overrides]
    for argument, setting, value in arguments:
        if value is None:
            continue
        is_short = setting == "data" and not isinstance(value, Mapping)
        new = [path for path, _ in _flatten({"data.train" if is_short else setting: value}, ())]
        for path in new:
            for other, other_path in paths:
                if path == other_path or (
                    {argument, other} & {"train", "eval"} and _is_within(path, other_path)
                ):
                    raise _duplicate(other, argument, path)
        if setting == f"data.{argument}" and not isinstance(value, Mapping):  # rows
            for change in changes:
                if _is_within(new[0], change):
                    raise _duplicate(argument, "overrides", new[0])
        paths += [(argument, path) for path in new]


def _is_within(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether one of two settings is the other, or a part of it."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _duplicate(argument: str, other: str, path: tuple[str, ...]) -> UserError:
    return UserError(
        f"the arguments {argument} and {other} both set {dotted(path)}",
        code="argument-duplicate",
        where=dotted(path),
        fix=f"remove {argument} or {other}",
    )


def recipe_from_arguments(
    recipe: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    settings: Mapping[str, Any],
) -> tuple[str | Path | Mapping[str, Any], list[str]]:
    """Merge settings into a recipe. Returns a recipe and overrides for ``load_recipe``.

    settings: sections as mappings (``loss={"beta": 0.2}``) or single settings by their full name
    (``**{"train.seed": 1}``). They replace settings of the recipe, and the overrides replace them.
    A function or another object to call, such as a loss or a reward, becomes its import path. Names
    and types are checked with the rest of the recipe. Raises UserError for a value that a recipe
    cannot hold.
    """
    used: list[str] = []
    flat = dict(_flatten(_with_paths(settings, used), ()))
    if isinstance(recipe, Mapping):
        recipe = _with_paths(recipe, used)
    if recipe is not None and not isinstance(recipe, Mapping):
        assignments = (f"{dotted(path)}={_as_json(path, value)}" for path, value in flat.items())
        return recipe, [*assignments, *overrides]
    merged: Any = recipe or {}
    for path, value in flat.items():
        model = merged.get("model")
        if isinstance(model, str) and path[0] == "model" and len(path) > 1:
            merged = {**merged, "model": {"name": model}}
        for length in range(1, len(path)):
            if not isinstance(value_at(merged, path[:length]), Mapping | None):
                raise UserError(
                    f"{dotted(path[:length])} in the recipe is not a mapping",
                    code="setting-not-a-section",
                    where=dotted(path),
                    fix=f"write {dotted(path[:length])} in the recipe as a mapping of its settings",
                )
        merged = put(merged, path, value)
    return merged, list(overrides)


def _with_paths(value: Any, used: list[str]) -> Any:
    """The value with the import paths of the objects in it that can be called.

    used: the paths so far, to which new ones are added.
    """
    if isinstance(value, Mapping):
        section = cast(Mapping[str, Any], value)
        return {name: _with_paths(inner, used) for name, inner in section.items()}
    if isinstance(value, list | tuple):
        return [_with_paths(inner, used) for inner in cast(Sequence[Any], value)]
    if not callable(value):
        return str(value) if isinstance(value, Path) else value
    used.append(target_of(value, used))
    return used[-1]


def names_a_model(recipe: str | Path | Mapping[str, Any] | None) -> bool:
    """Whether the recipe has a ``model.name``. Assumes so for a file, which is checked later."""
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
            yield inner, value


def _as_json(path: tuple[str, ...], value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        raise UserError(
            f"a recipe cannot contain a value of type {type(value).__name__}",
            code="setting-type",
            where=dotted(path),
            fix="use a number, a string, True or False, None, a list or a dictionary",
        ) from None


__all__ = ["names_a_model", "recipe_from_arguments", "refuse_duplicates"]
