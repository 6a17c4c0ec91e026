"""Errors of the command line itself: unknown commands and options, missing and wrong values."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from valence.cli.guide import COMMANDS, RENAMED
from valence.cli.sweep import missing_over
from valence.errors import UserError

COMMAND_LINE = "command line"
DATA_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")


def usage_error(error: Any, arguments: Sequence[str], commands: Sequence[str]) -> UserError:
    """The error for a usage error of click.

    arguments: the words of the command line. commands: the names of all commands.
    """
    kind = type(error).__name__
    name = next((word for word in arguments if not word.startswith("-")), "")
    command = name if name in commands else None
    if kind == "NoSuchOption":
        return _unknown_option(error, command, arguments)
    if command is None and name:
        return UserError(
            f"there is no command {name!r}",
            code="command-unknown",
            where=COMMAND_LINE,
            fix=_similar_command(name, commands),
        )
    example = COMMANDS.get(command or "", ("", ""))[1]
    if kind == "MissingParameter":
        is_option = error.param.param_type_name == "option"
        if command == "sweep" and (mistake := missing_over(arguments)):
            return mistake
        label = (
            error.param.opts[0]
            if is_option
            else (error.param.metavar or error.param.name).strip("[]{}.")
        )
        return UserError(
            f"{label} is missing",
            code="option-missing" if is_option else "argument-missing",
            where=command or COMMAND_LINE,
            fix=f"add it, as in `{example}`" if example else "add it",
        )
    text = error.format_message().rstrip(".")
    return UserError(
        f"{text[:1].lower()}{text[1:]}",
        code="usage-invalid",
        where=command or COMMAND_LINE,
        fix=f"correct it; `valence {command + ' ' if command else ''}--help` explains all options",
    )


def _unknown_option(error: Any, command: str | None, arguments: Sequence[str]) -> UserError:
    option = error.option_name
    near = list(error.possibilities or [])
    takes_settings = "overrides" in {param.name for param in error.ctx.command.params}
    settings = _settings_named(option, is_exact=bool(near)) if takes_settings else []
    if settings:
        fix = f"write a setting without dashes: {settings[0]}={_value_of(option, arguments)}"
    else:
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        fix = f"{hint}`valence {command + ' ' if command else ''}--help` lists the options"
    return UserError(
        f"there is no option {option}", code="option-unknown", where=COMMAND_LINE, fix=fix
    )


def _settings_named(option: str, is_exact: bool) -> list[str]:
    from valence.config.messages import settings_named

    return settings_named(option.lstrip("-").replace("-", "_"), is_exact=is_exact)


def _value_of(option: str, arguments: Sequence[str]) -> str:
    """The value after an option, or VALUE if there is none."""
    for word, following in zip(arguments, [*arguments[1:], "-"], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            value = value if equals else following
            return "VALUE" if value.startswith("-") or "=" in value else value
    return "VALUE"


def _similar_command(name: str, commands: Sequence[str]) -> str:
    if name.endswith((".yaml", ".yml")):
        return f"name the command as well, such as `valence train {name}`"
    if name.endswith(DATA_SUFFIXES):
        return f"write a recipe for this file: `valence init {name}`"
    if name in RENAMED:
        return f"use `{RENAMED[name]}`"
    near = get_close_matches(name.lower(), commands, n=1)
    if near:
        return f"did you mean `valence {near[0]}`?"
    from valence.methods import similar_methods

    methods = similar_methods(name, cutoff=0.8)
    if methods:
        return (
            f"train with this method: `valence train RECIPE method={methods[0].split()[0]}`; "
            f"`valence docs {methods[0].split()[0]}` explains it"
        )
    return "`valence --help` lists the commands"
