"""Prints the results of `valence audit` and `valence select` on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from valence.data.label_audit import RaterAgreement
from valence.jobs.audit_labels import SIDES, FormAudit, HiddenStateAudit, KindAudit, LabelAudit
from valence.jobs.cross_fit import FEWEST
from valence.jobs.select_prompts import Selection
from valence.terminal import print_message

SHOWN = 5
"""Contradictions and raters that are listed."""
TEXT_LENGTH = 60
"""Characters of a completion that are shown."""
RELIABLE, TENTATIVE = 0.8, 0.667
"""Krippendorff's limits for alpha: reliable data, and data for tentative conclusions."""


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 row", "2 rows"."""
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"


def print_audit(audit: LabelAudit, console: Console) -> None:
    for each in audit.kinds:
        up, down = SIDES[each.kind]
        line = counted(each.rows, each.kind.removesuffix("s"))
        if each.kind != "pairs":
            line += f": {each.up:,} {up}, {each.down:,} {down}"
        if each.kind == "scores":
            line += " (above and below their mean)"
        print_message(console, line)
    if audit.unrated:
        print_message(console, f"{counted(audit.unrated, 'row')} without a label or preference")
    if audit.num_bad:
        line = f"{counted(audit.num_bad, 'row')} that cannot be read"
        print_message(console, line + (":" if audit.num_bad == 1 else ", such as:"), "yellow")
        for bad in audit.bad:
            print_message(console, f"  {bad}", "yellow")
    _print_contradictions(audit, console)
    _print_agreement(audit.agreement, console)
    for each in audit.kinds:
        _print_form(each, console)
    if audit.model is None:
        _print_title("Likely wrong labels", console)
        print_message(console, "Name a model or a run with --model to look for them.")
    for each in audit.kinds if audit.model is not None else ():
        _print_states(each, console)
    if audit.out:
        print_message(
            console, f"\nAll rows that can be read are in {audit.out}, the most suspicious first."
        )


def _print_title(title: str, console: Console) -> None:
    print_message(console, f"\n{title}", "bold")


def _print_contradictions(audit: LabelAudit, console: Console) -> None:
    _print_title("Opposite labels", console)
    count, near = len(audit.contradictions), len(audit.near_duplicates)
    verb = "contradicts" if count == 1 else "contradict"
    print_message(
        console,
        f"{counted(count, 'row')} {verb} an earlier row with the same content"
        + (":" if count else "."),
    )
    for row, other in audit.contradictions[:SHOWN]:
        print_message(console, f"  {row} against {other}")
    if any(each.kind != "pairs" for each in audit.kinds):
        verb = "has" if near == 1 else "have"
        print_message(
            console,
            f"{counted(near, 'pair')} of near-duplicate completions of one prompt {verb} opposite "
            "labels" + (":" if near else "."),
        )
    for up, down, similarity in audit.near_duplicates[:SHOWN]:
        print_message(console, f"  up {up}, down {down} (similarity {similarity:.2f})")


def _print_agreement(agreement: RaterAgreement | None, console: Console) -> None:
    _print_title("Agreement between raters", console)
    if agreement is None:
        print_message(console, "Unknown: no completion has votes of several known raters.")
        return
    alpha = agreement.alpha
    meaning = (
        "undefined, as all votes are the same"
        if alpha is None
        else f"{alpha:.2f}, "
        + (
            "reliable"
            if alpha >= RELIABLE
            else "good enough for tentative conclusions"
            if alpha >= TENTATIVE
            else "not reliable"
        )
    )
    print_message(
        console,
        f"Krippendorff's alpha is {meaning} (1: perfect, 0: chance; {RELIABLE:g} or more is "
        f"reliable). {counted(agreement.targets, 'completion')} "
        f"{'has' if agreement.targets == 1 else 'have'} several raters, who disagree in "
        f"{agreement.disagreement:.0%} of the pairs of votes.",
    )
    table = Table("rater", "votes", "pairs", "disagree", box=None, pad_edge=False)
    for rater in agreement.raters[:SHOWN]:
        share = f"{rater.disagreement:.0%}"
        table.add_row(rater.rater, f"{rater.ratings:,}", f"{rater.pairs:,}", share)
    console.print(table)


def _print_form(audit: KindAudit, console: Console) -> None:
    up, down = SIDES[audit.kind]
    _print_title(f"Form alone: {audit.kind}", console)
    if audit.form is None:
        print_message(console, _too_few(audit))
        return
    form = audit.form
    summary = f"A classifier that sees only this table's columns has an AUC of {_auc_text(form)}"
    if form.is_predictive:
        summary += (
            f". Of a completion of each class ({up}, {down}), it ranks the "
            f"right one first in {form.auc:.0%} of cases without reading what they say. A model "
            "can learn the form instead of the content; if your raters did not mean it, balance "
            "the rows."
        )
    else:
        summary += ": the form does not reliably give the label away."
    print_message(console, summary)
    table = Table("per completion", up, down, "AUC alone", box=None, pad_edge=False)
    for each in form.features:
        table.add_row(each.name, f"{each.up:.2f}", f"{each.down:.2f}", f"{each.auc:.2f}")
    console.print(table)


def _auc_text(audit: FormAudit | HiddenStateAudit) -> str:
    return _with_interval(audit.auc, audit.interval)


def _with_interval(auc: float, interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{auc:.2f} (95 % interval {low:.2f} to {high:.2f}; 0.5 is chance)"


def _too_few(audit: KindAudit) -> str:
    classes = " and ".join(SIDES[audit.kind])
    needed = "pairs" if audit.kind == "pairs" else f"rows of each of {classes}"
    return f"Too few rows: at least {FEWEST} {needed} are needed."


def _print_states(audit: KindAudit, console: Console) -> None:
    _print_title(f"Likely wrong labels: {audit.kind}", console)
    states = audit.states
    for reason, count in audit.unusable.items():
        verb = "is" if count == 1 else "are"
        line = f"{counted(count, 'row')} {verb} left out for the model: {reason}"
        print_message(console, line, "yellow")
    if states is None:
        num_left = audit.rows - sum(audit.unusable.values())
        left = f" {num_left:,} of {audit.rows:,} are left." if audit.unusable else ""
        print_message(console, f"{_too_few(audit)}{left}")
        return
    quality = f"The model predicts labels of held-out rows with an AUC of {_auc_text(states)}"
    if not states.can_tell:
        print_message(console, f"{quality}: it cannot tell the labels apart, so no row is listed.")
        return
    print_message(
        console,
        f"{quality}. It contradicts {states.num_suspects:,} of {states.rows:,} labels. Read these "
        "rows first, for example with --review; many of their labels may still be right.",
    )
    if audit.form is not None and audit.form.auc > states.interval[0]:
        print_message(
            console,
            "The form alone predicts the labels about as well, so the list may show rows of an "
            "unusual form rather than wrong labels.",
            "yellow",
        )
    table = Table("row", "score", "given", "predicted", "completion", box=None, pad_edge=False)
    table.columns[0].overflow = "fold"
    for each in states.suspects:
        words = " ".join(each.completion.split())
        text = f"{words[:TEXT_LENGTH]}..." if len(words) > TEXT_LENGTH else words
        given, predicted = (
            SIDES["thumbs"][0 if label else 1] if isinstance(label, bool) else label
            for label in (each.given, each.predicted)
        )
        table.add_row(each.origin, f"{each.score:.2f}", given, predicted, text)
    console.print(table)


def print_selection(selection: Selection, console: Console) -> None:
    for reason, count in selection.left_out.items():
        verb = "is" if count == 1 else "are"
        print_message(console, f"{counted(count, 'row')} {verb} left out: {reason}", "yellow")
    if selection.auc is not None and selection.interval is not None:
        quality = _with_interval(selection.auc, selection.interval)
        line = f"The model predicts labels of held-out rows with an AUC of {quality}"
        if selection.order == "diversity":
            line += ": it cannot tell the labels apart, so its doubts mean nothing"
        print_message(console, f"{line}.")
    order = {
        "margin": "those come first whose answers the model is least sure of",
        "diversity": "those come first that are least like the rated ones and each other",
    }[selection.order]
    print_message(
        console,
        f"{selection.selected:,} of {counted(selection.prompts, 'prompt')} are in {selection.out}; "
        f"{order}.",
    )
