"""The command that explains methods, settings, reward rules and error codes, and shows pages of the
documentation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markdown import Markdown
from rich.table import Table

from valence import completion
from valence.cli.common import app, console, table_of_settings
from valence.errors import UserError
from valence.terminal import print_message, write_line

if TYPE_CHECKING:
    from valence.cli.explain import Doc
    from valence.config.describe import SettingRow
    from valence.methods import Method


@app.command()
def docs(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A method (`kto`), a setting (`train.seed`), a section (`train`), a reward rule "
            "(`exact_match`), a page (`start`), or the code of an error (`setting-unknown`).",
            autocompletion=completion.topics,
        ),
    ] = None,
) -> None:
    """List methods, reward rules, recipes and pages of the documentation, or explain one of them, a
    setting, or the code of an error.
    """
    from valence.cli.error_codes import error_texts
    from valence.config.describe import settings_table
    from valence.methods import METHODS, ONLINE, method_of
    from valence.rewards.rules import RULES
    from valence.shipped import find_page

    if name is None:
        _print_lists()
    elif name in METHODS:
        _explain(method_of(name))
    elif name in ONLINE:
        _explain(method_of(name, online=True))
    elif ":" in name:
        _explain(_custom_method(name))
    elif name in RULES:
        _explain_rule(name)
    elif page := find_page(name):
        text = page.read_text(encoding="utf-8")
        if console.is_terminal:
            console.print(Markdown(text))
        else:
            write_line(text.rstrip())
    elif rows := [row for row in settings_table() if f"{row.name}.".startswith(f"{name}.")]:
        _explain_settings(name, rows)
    elif by_method := _loss_settings(name):
        _explain_loss_setting(by_method)
    elif texts := error_texts(name):
        for text in texts:
            fix = f"\n  to fix it: {text.fix}" if text.fix else ""
            print_message(console, f"{text.message or '...'}{fix}\n")
    else:
        raise _unknown(name)


def _unknown(name: str) -> UserError:
    """The error for a name that stands for nothing, with the nearest one."""
    from valence.methods import METHODS, ONLINE
    from valence.rewards.rules import RULES
    from valence.shipped import page_names

    near = get_close_matches(name, (*METHODS, *ONLINE, *RULES, *page_names()), n=1)
    if name.startswith("loss."):
        near = get_close_matches(name, _names_of_loss_settings(), n=1) or ["METHOD"]
    return UserError(
        f"there is no method, setting, reward rule, page or error code {name!r}",
        code="argument-invalid",
        where="NAME",
        fix=f"did you mean `valence docs {near[0]}`?"
        if near
        else "choose one that `valence docs` lists",
    )


def _custom_method(name: str) -> Method:
    """The method of a user's loss, given by import path."""
    from valence.methods import method_of

    try:
        return method_of(name)
    except UserError as error:
        if error.code != "method-needs-reward":
            raise
        return method_of(name, online=True)


def _print_lists() -> None:
    from valence.cli.explain import method_doc
    from valence.methods import METHODS, ONLINE, WITHOUT_REWARD
    from valence.rewards.build import KINDS
    from valence.rewards.rules import RULES
    from valence.shipped import pages, recipes, title
    from valence.types import plural

    table = Table("method", "reads", "reference", "what it does", box=None, pad_edge=False)
    for method in METHODS.values():
        table.add_row(
            method.name,
            plural(method.kind),
            "yes" if method.needs_reference else "no",
            method_doc(method).summary,
        )
    console.print(table)
    rewarded = [name for name in ONLINE if name not in WITHOUT_REWARD]
    print_message(
        console,
        f"\nOnline methods, which need a reward: {', '.join(rewarded)}. Without a reward: "
        f"{', '.join(WITHOUT_REWARD)}.\n",
    )
    table = Table("reward rule", "score", box=None, pad_edge=False)
    for rule, make in RULES.items():
        table.add_row(rule, " ".join((make.__doc__ or "").partition("\n\n")[0].split()))
    console.print(table)
    print_message(console, f"\nThe setting `reward` accepts {KINDS}.\n")
    for kind, files in (("recipe", recipes()), ("page", pages())):
        table = Table(kind, "", box=None, pad_edge=False)
        for name, path in files.items():
            table.add_row(name, title(path.read_text(encoding="utf-8")))
        console.print(table)
        print_message(console, "")
    print_message(
        console,
        "`valence docs NAME` explains a method, a setting or a rule, or shows a page. `valence "
        "init --recipe NAME` writes a recipe.",
    )


def _explain_settings(name: str, rows: Sequence[SettingRow]) -> None:
    """Print all about a setting, or the first paragraph about each setting of a section."""
    if rows[0].name == name:
        row, *rows = rows
        _print_text(f"{row.name}: {row.type}. Default: {row.default}.")
        _print_text(row.meaning)
    if rows:
        table = table_of_settings("type", "default", "meaning")
        for row in rows:
            table.add_row(row.name, row.type, row.default, row.summary)
        console.print(table)


def _loss_settings(name: str) -> dict[str, SettingRow]:
    """The setting of the section `loss` with this name, by method."""
    from valence.config.describe import settings_table
    from valence.methods import METHODS, ONLINE

    return {
        method: row
        for method, entry in (METHODS | ONLINE).items()
        for row in settings_table(entry.settings, "loss.")
        if row.name == name
    }


def _names_of_loss_settings() -> set[str]:
    from valence.methods import METHODS, ONLINE

    methods = (METHODS | ONLINE).values()
    return {f"loss.{name}" for method in methods for name in method.settings.model_fields}


def _explain_loss_setting(by_method: Mapping[str, SettingRow]) -> None:
    """Print a setting of the section `loss`, once for all methods where it is the same."""
    methods_of: dict[SettingRow, list[str]] = {}
    for method, row in by_method.items():
        methods_of.setdefault(row, []).append(method)
    for row, methods in methods_of.items():
        _print_text(f"{row.name} of {', '.join(methods)}: {row.type}. Default: {row.default}.")
        _print_text(row.meaning)


def _explain_rule(name: str) -> None:
    from valence.config.describe import settings_table
    from valence.rewards.rules import RULES, settings_of

    *parts, _ = (RULES[name].__doc__ or "").split("\n\n")  # the last one is in the table
    for part in parts:
        _print_text(part)
    table = table_of_settings("type", "default", "meaning")
    for line in settings_table(settings_of(name), "settings."):
        table.add_row(line.name, line.type, line.default, line.meaning)
    console.print(table)


def _explain(method: Method) -> None:
    """Print a method, and the online method with the same loss."""
    from valence.cli.explain import (
        added,
        builder_doc,
        facts,
        loss_name,
        method_doc,
        online_facts,
        online_method,
    )
    from valence.methods import WITHOUT_REWARD

    online = online_method(method)
    if method.online:
        rewards = "; needs no reward" if method.name in WITHOUT_REWARD else " and a reward scores"
        _print_text(f"Trains on completions that the policy samples{rewards}.")
        _print_doc(builder_doc(method))
        _print_text(f"The loss is {loss_name(method)}:")
    _print_doc(method_doc(method))
    _print_facts(facts(method))
    _settings(method)
    if method.online or online is None:
        return
    console.print()
    if online.name in WITHOUT_REWARD:
        _print_text(f"The method {online.name} samples completions, and needs no reward:")
    else:
        _print_text(f"With a reward, the method is {online.name}, which samples completions:")
    _print_doc(builder_doc(online))
    _print_facts(online_facts(online))
    _settings(online, added(online))


def _print_text(text: str) -> None:
    print_message(console, f"{' '.join(text.split())}\n")


def _print_doc(doc: Doc) -> None:
    for text in (doc.summary, doc.formula, doc.source):
        if text:
            _print_text(text)


def _print_facts(facts: Mapping[str, str]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    for heading, text in facts.items():
        table.add_row(heading, text)
    console.print(table)


def _settings(method: Method, only: Collection[str] | None = None) -> None:
    """Print a table of the settings of the loss, or of those in ``only``, if there are any."""
    from valence.config.describe import settings_table

    rows = [
        line
        for line in settings_table(method.settings, "loss.")
        if only is None or line.name.split(".")[1] in only
    ]
    if not rows:
        return
    table = table_of_settings("type", "default", "meaning")
    for line in rows:
        table.add_row(line.name, line.type, line.default, line.meaning)
    console.print(table)
