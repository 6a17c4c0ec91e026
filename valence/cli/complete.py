"""Completion of words in a shell. Each key press may ask for it, so nothing here imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.markup import escape

DEEP = 2
"""Folders below that of the word so far in which is looked, and entries that are looked at in
all.
"""
MOST = 2000
SKIPPED = ("node_modules", "checkpoints", "model")


def recipes(incomplete: str) -> list[str]:
    """YAML files; but not the one that a run keeps of its settings."""
    return [
        word
        for word, path in _below(incomplete)
        if path.suffix in (".yaml", ".yml")
        and not (path.name == "config.yaml" and (path.parent / "run.json").exists())
    ]


def run_folders(incomplete: str) -> list[str]:
    """Folders that hold a run."""
    found = [
        word.removesuffix("run.json")
        for word, path in _below(incomplete)
        if path.name == "run.json"
    ]
    return [word if word == incomplete else word.rstrip("/") for word in found if word]


def runs_or_recipes(incomplete: str) -> list[str]:
    return run_folders(incomplete) + recipes(incomplete)


def settings(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Names of settings, and values of those that take one of a few words. bash has words end at =,
    which is then one itself.
    """
    from valence.config.describe import at, choices_of, meaning, schema_of, settings_table
    from valence.config.schema import Recipe

    said = ctx.params.get("overrides") or []
    of_bash = len(said) > 1 and said[-1] == "="
    name, given, value = (said[-2], "=", incomplete) if of_bash else incomplete.partition("=")
    if not given:
        rows = [row for row in settings_table() if ".N." not in row.name]
        return [
            (f"{row.name}=", _first_sentence(row.meaning))
            for row in rows
            if row.name.startswith(incomplete)
        ]
    node = at(schema_of(Recipe), tuple(name.split(".")))
    words = [str(word) for word in choices_of(node)] or (
        ["true", "false"] if node.get("type") == "boolean" else []
    )
    found = [word for word in words if word.startswith(value)]
    return [
        (word if of_bash else f"{name}={word}", _first_sentence(meaning(node))) for word in found
    ]


def methods(incomplete: str) -> list[str]:
    """Names of losses and methods."""
    from valence.trainer.methods import METHODS, ONLINE

    return [name for name in dict.fromkeys((*METHODS, *ONLINE)) if name.startswith(incomplete)]


def rules(incomplete: str) -> list[str]:
    """Names of rewards that are rules."""
    from valence.rewards.rules import RULES

    return [name for name in RULES if name.startswith(incomplete)]


def feedback_sources(incomplete: str) -> list[tuple[str, str]]:
    """Names of tools whose exports are read."""
    from valence.data.importers.sources import SOURCES, command_name

    return [
        (command_name(name), escape(source.description))
        for name, source in SOURCES.items()
        if command_name(name).startswith(incomplete)
    ]


def _below(incomplete: str) -> Iterator[tuple[str, Path]]:
    """Files that begin with the word so far, also in folders below: as the word would name each,
    and its path.
    """
    start = incomplete[: incomplete.rfind("/") + 1]
    begun, seen = incomplete.removeprefix(start), 0
    waiting = [(start, Path(start or ".").expanduser(), 0)]
    while waiting:
        word, folder, depth = waiting.pop(0)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:  # not a folder, or not ours to read: nothing to offer
            continue
        for entry in entries:
            seen += 1
            hidden = entry.name.startswith(".") and not begun.startswith(".")
            if (
                seen > MOST
                or hidden
                or not entry.name.isprintable()
                or (depth == 0 and not entry.name.startswith(begun))
            ):
                continue
            if not entry.is_dir():
                yield word + entry.name, folder / entry.name
            elif depth < DEEP and entry.name not in SKIPPED:
                waiting.append((f"{word}{entry.name}/", folder / entry.name, depth + 1))


def _first_sentence(text: str) -> str:
    return escape(text.partition(". ")[0].rstrip("."))
