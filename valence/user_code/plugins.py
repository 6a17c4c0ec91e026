"""Plugins: objects that installed packages offer as entry points, or that recipes name by path."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal

from valence.errors import UserError
from valence.user_code.load import is_import_path, load_object

Group = Literal["formats", "importers", "engines", "trackers"]
"""The groups of entry points are ``valence.formats``, ``valence.importers``, and so on."""


@cache
def plugin_paths(group: Group) -> dict[str, str]:
    """The import path of each plugin of a group, by its name. Loads none of them.

    As in a recipe, names have lower case and underscores.
    """
    entries = entry_points(group=f"valence.{group}")
    return {_key(entry.name): entry.value for entry in entries}


def is_plugin(group: Group, name: str) -> bool:
    """Whether a name is that of a plugin, or an import path."""
    return is_import_path(name) or _key(name) in plugin_paths(group)


def _key(name: str) -> str:
    return name.lower().replace("-", "_")


def load_plugin(group: Group, name: str, where: str, builtin: Collection[str] = ()) -> Any:
    """The object of a plugin, by its name or import path.

    where: the setting that names it. builtin: names that are no plugins. Raises UserError.
    """
    subject = group.removesuffix("s")
    if is_plugin(group, name):
        return load_object(plugin_paths(group).get(_key(name), name), where, subject)
    names = [*builtin, *plugin_paths(group)]
    close = get_close_matches(name, names, 1)
    raise UserError(
        f"there is no {subject} {name!r}",
        code=f"{subject}-unknown",
        where=where,
        fix=f"did you mean {close[0]}?"
        if close
        else f"use one of {', '.join(names)}, the import path of one (`package.module:name`), or "
        f"install a package with an entry point of this name in valence.{group}",
    )
