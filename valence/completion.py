"""Shell completion. It runs at each press of the tab key, so nothing here imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.markup import escape

MAX_DEPTH = 2
"""Levels of folders to search below that of the incomplete word."""
MAX_ENTRIES = 2000
SKIPPED = ("node_modules", "checkpoints", "model")


def recipes(incomplete: str) -> list[str]:
    """YAML files except the config.yaml of a run."""
    return [
        word
        for word, path in _below(incomplete)
        if path.suffix in (".yaml", ".yml")
        and not (path.name == "config.yaml" and (path.parent / "run.json").exists())
    ]


def run_folders(incomplete: str) -> list[str]:
    """Folders that contain a run."""
    folders = [
        word.removesuffix("run.json")
        for word, path in _below(incomplete)
        if path.name == "run.json"
    ]
    return [word if word == incomplete else word.rstrip("/") for word in folders if word]


def runs_or_recipes(incomplete: str) -> list[str]:
    return run_folders(incomplete) + recipes(incomplete)


def settings(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Names of settings, and values of settings with a fixed set of values.

    In bash, words end at ``=``, which is a word by itself.
    """
    from valence.config.describe import at, choices_of, meaning, schema_of, settings_table
    from valence.config.schema import Recipe

    overrides = ctx.params.get("overrides") or []
    is_bash = len(overrides) > 1 and overrides[-1] == "="
    name, equals, value = (overrides[-2], "=", incomplete) if is_bash else incomplete.partition("=")
    if not equals:
        rows = [row for row in settings_table() if ".N." not in row.name]
        return [
            (f"{row.name}=", _first_sentence(row.meaning))
            for row in rows
            if row.name.startswith(incomplete)
        ]
    node = at(schema_of(Recipe), tuple(name.split(".")))
    choices = [str(choice) for choice in choices_of(node)] or (
        ["true", "false"] if node.get("type") == "boolean" else []
    )
    return [
        (choice if is_bash else f"{name}={choice}", _first_sentence(meaning(node)))
        for choice in choices
        if choice.startswith(value)
    ]


def methods(incomplete: str) -> list[str]:
    """Names of losses and methods."""
    from valence.methods import METHODS, ONLINE

    return [name for name in dict.fromkeys((*METHODS, *ONLINE)) if name.startswith(incomplete)]


def topics(incomplete: str) -> list[str]:
    """Names of methods, reward rules, pages and settings."""
    from valence.config.describe import settings_table
    from valence.rewards.rules import RULES
    from valence.shipped import pages

    names = (*RULES, *pages(), *(row.name for row in settings_table()))
    return [*methods(incomplete), *(name for name in names if name.startswith(incomplete))]


def shipped_recipes(incomplete: str) -> list[str]:
    """Names of the recipes that come with the package."""
    from valence.shipped import recipes

    return [name for name in recipes() if name.startswith(incomplete)]


def feedback_sources(incomplete: str) -> list[tuple[str, str]]:
    """Names of tools with a supported export."""
    from valence.data.importers.sources import SOURCES, command_name

    return [
        (command_name(name), escape(source.description))
        for name, source in SOURCES.items()
        if command_name(name).startswith(incomplete)
    ]


def _below(incomplete: str) -> Iterator[tuple[str, Path]]:
    """Files that begin with the incomplete word, also in folders below: the completed word and the
    path of each.
    """
    start = incomplete[: incomplete.rfind("/") + 1]
    prefix, num_entries = incomplete.removeprefix(start), 0
    queue = [(start, Path(start or ".").expanduser(), 0)]
    while queue:
        word, folder, depth = queue.pop(0)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:  # not a folder, or not readable
            continue
        for entry in entries:
            num_entries += 1
            is_hidden = entry.name.startswith(".") and not prefix.startswith(".")
            if (
                num_entries > MAX_ENTRIES
                or is_hidden
                or not entry.name.isprintable()
                or (depth == 0 and not entry.name.startswith(prefix))
            ):
                continue
            if not entry.is_dir():
                yield word + entry.name, folder / entry.name
            elif depth < MAX_DEPTH and entry.name not in SKIPPED:
                queue.append((f"{word}{entry.name}/", folder / entry.name, depth + 1))


def _first_sentence(text: str) -> str:
    return escape(text.partition(". ")[0].rstrip("."))
