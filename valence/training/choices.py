"""Settings that a recipe leaves to the program: chosen once, recorded by the run, and reused when
it is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from valence.config.load import LoadedRecipe
from valence.distributed.protocol import Group
from valence.distributed.single import Single
from valence.distributed.together import by_first
from valence.models.speed import automatic_dtype


def with_dtype(source: LoadedRecipe, group: Group | None = None) -> LoadedRecipe:
    """The recipe with a type in place of ``model.dtype: auto``: that of rank 0's machine, which all
    of ``group`` use.
    """
    if source.recipe.model.dtype != "auto":
        return source
    return source.with_automatic("model.dtype", *by_first(group or Single(), automatic_dtype))


def with_recorded(source: LoadedRecipe, settings: Mapping[str, Any]) -> LoadedRecipe:
    """The recipe with the automatic settings that its run had before.

    ``settings``: as the run recorded them.

    Not those of ``data``: rows were encoded by them already, and a difference is refused on resume.
    """
    for name, setting in source.settings.items():
        if name.startswith("data."):
            continue
        if setting.is_automatic and settings.get(name, setting.value) != setting.value:
            source = source.with_automatic(name, settings[name], "as the run began")
    return source
