"""Print the results of `valence audit` and `valence select`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from valence.apps.feedback.audit_labels import (
    SIDES,
    FormAudit,
    HiddenStateAudit,
    KindAudit,
    LabelAudit,
)
from valence.apps.feedback.select_prompts import Selection
from valence.data.audit_words import FeedbackTexts, PersonalData
from valence.data.label_audit import RaterAgreement
from valence.statistics import MIN_CLASS_ROWS
from valence.terminal import print_message

SHOWN = 5
"""Maximum number of contradictions and raters to list."""
TEXT_LENGTH = 60
"""Maximum characters shown of a completion."""
RELIABLE, TENTATIVE = 0.8, 0.667
"""Krippendorff's limits for alpha: reliable data, and data for tentative conclusions."""


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 row", "2 rows"."""
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"


def print_audit(audit: LabelAudit, console: Console) -> None:
    for kind in audit.kinds:
        up, down = SIDES[kind.kind]
        line = counted(kind.rows, kind.kind.removesuffix("s"))
        if kind.kind != "pairs":
            line += f": {kind.up:,} {up}, {kind.down:,} {down}"
        if kind.kind == "scores":
            line += " (above and below their mean)"
        print_message(console, line)
    if audit.unrated:
        print_message(console, f"{counted(audit.unrated, 'row')} without a label or preference")
    if audit.num_bad:
        line = f"{counted(audit.num_bad, 'row')} that cannot be read"
        print_message(console, line + (":" if audit.num_bad == 1 else ", such as:"), "yellow")
        for bad in audit.bad:
            print_message(console, f"  {bad}", "yellow")
    _print_personal(audit.personal, console)
    if audit.feedback is not None:
        _print_feedback(audit.feedback, console)
    if audit.kinds:
        _print_labels(audit, console)


def _print_labels(audit: LabelAudit, console: Console) -> None:
    _print_contradictions(audit, console)
    _print_agreement(audit.agreement, console)
    for kind in audit.kinds:
        _print_form(kind, console)
    if audit.model is None:
        _print_title("Likely wrong labels", console)
        print_message(console, "Add --model MODEL to find them.")
    for kind in audit.kinds if audit.model is not None else ():
        _print_states(kind, console)
    if audit.out:
        print_message(
            console, f"\nAll readable rows are in {audit.out}, the most suspicious first."
        )


def _print_title(title: str, console: Console) -> None:
    print_message(console, f"\n{title}", "bold")


def _print_personal(personal: Sequence[PersonalData], console: Console) -> None:
    _print_title("Personal data", console)
    if not personal:
        print_message(console, "No address, phone, account or card number was recognized.")
    for item in personal:
        noun = counted(item.count, "row")
        line = f"{item.kind} in {item.part}: {noun}, such as {item.rows[0]}"
        print_message(console, line, "yellow")


def _print_feedback(feedback: FeedbackTexts, console: Console) -> None:
    _print_title("Feedback as text", console)
    languages = ", ".join(f"{name} {count:,}" for name, count in feedback.languages.items())
    print_message(console, f"{counted(feedback.rows, 'row')}: {languages}")
    if feedback.num_other_language:
        noun = counted(feedback.num_other_language, "row")
        print_message(console, f"{noun} with a completion in another language")
    if feedback.num_repeated:
        text, count = feedback.repeated[0]
        text = f"{text[:TEXT_LENGTH]}..." if len(text) > TEXT_LENGTH else text
        noun = counted(feedback.num_repeated, "row")
        print_message(console, f"{noun} with the text of another one, such as {text!r} ({count:,})")
    if feedback.num_quotes:
        row, other = feedback.quotes[0]
        noun = counted(feedback.num_quotes, "row")
        line = f"{noun} with words of another chat, such as {row}, which quotes {other}"
        print_message(console, line, "yellow")


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
    if pairs := audit.contradicted_pairs:
        verb = "has" if len(pairs) == 1 else "have"
        noun = counted(len(pairs), "pair")
        print_message(
            console,
            f"{noun} {verb} a larger score for the rejected completion, such as {pairs[0]}",
        )
    if any(kind.kind != "pairs" for kind in audit.kinds):
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
        "undefined, because all votes are equal"
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
        f"Krippendorff's alpha is {meaning} (1 is perfect, 0 is chance, {RELIABLE:g} or more is "
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
    _print_title(f"Labels from form alone: {audit.kind}", console)
    if audit.form is None:
        print_message(console, _too_few(audit))
        return
    form = audit.form
    summary = f"A classifier on the features in this table has an AUC of {_auc_text(form)}"
    if form.is_predictive:
        summary += (
            f". Without reading the text, it ranks a completion rated {up} above one rated {down} "
            f"in {form.auc:.0%} of cases. A model can learn the form instead of the content. "
            f"Unless your raters meant the form, balance the rows."
        )
    else:
        summary += ": the form does not reliably predict the label."
    print_message(console, summary)
    table = Table("per completion", up, down, "AUC alone", box=None, pad_edge=False)
    for feature in form.features:
        table.add_row(
            feature.name, f"{feature.up:.2f}", f"{feature.down:.2f}", f"{feature.auc:.2f}"
        )
    console.print(table)


def _auc_text(audit: FormAudit | HiddenStateAudit) -> str:
    return _with_interval(audit.auc, audit.interval)


def _with_interval(auc: float, interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{auc:.2f} (95 % interval {low:.2f} to {high:.2f}; 0.5 is chance)"


def _too_few(audit: KindAudit) -> str:
    classes = " and ".join(SIDES[audit.kind])
    needed = "pairs" if audit.kind == "pairs" else f"rows of each class ({classes})"
    return f"Too few rows: at least {MIN_CLASS_ROWS} {needed} are needed."


def _print_states(audit: KindAudit, console: Console) -> None:
    _print_title(f"Likely wrong labels: {audit.kind}", console)
    states = audit.states
    for reason, count in audit.unusable.items():
        verb = "is" if count == 1 else "are"
        line = f"{counted(count, 'row')} {verb} not used by the model: {reason}"
        print_message(console, line, "yellow")
    if states is None:
        num_usable = audit.rows - sum(audit.unusable.values())
        usable = f" {num_usable:,} of {audit.rows:,} can be used." if audit.unusable else ""
        print_message(console, f"{_too_few(audit)}{usable}")
        return
    quality = f"The model predicts labels of held-out rows with an AUC of {_auc_text(states)}"
    if not states.is_informative:
        print_message(console, f"{quality}: it cannot separate the labels, so no row is listed.")
        return
    print_message(
        console,
        f"{quality}. It contradicts {states.num_suspects:,} of {states.rows:,} labels. Check these "
        "rows first, for example with --review. Many of their labels may be right.",
    )
    if audit.form is not None and audit.form.auc > states.interval[0]:
        print_message(
            console,
            "The form alone predicts the labels about as well, so these rows may have an unusual "
            "form instead of a wrong label.",
            "yellow",
        )
    table = Table("row", "score", "label", "predicted", "completion", box=None, pad_edge=False)
    table.columns[0].overflow = "fold"
    for suspect in states.suspects:
        completion = " ".join(suspect.completion.split())
        text = f"{completion[:TEXT_LENGTH]}..." if len(completion) > TEXT_LENGTH else completion
        shown_label, predicted = (
            SIDES["thumbs"][0 if label else 1] if isinstance(label, bool) else label
            for label in (suspect.label, suspect.predicted)
        )
        table.add_row(suspect.origin, f"{suspect.score:.2f}", shown_label, predicted, text)
    console.print(table)


def print_selection(selection: Selection, console: Console) -> None:
    for reason, count in selection.left_out.items():
        verb = "is" if count == 1 else "are"
        print_message(console, f"{counted(count, 'row')} {verb} skipped: {reason}", "yellow")
    if selection.auc is not None and selection.interval is not None:
        quality = _with_interval(selection.auc, selection.interval)
        line = f"The model predicts labels of held-out rows with an AUC of {quality}"
        if selection.order == "diversity":
            line += ": it cannot separate the labels, so its uncertainty is not used"
        print_message(console, f"{line}.")
    order = {
        "margin": "prompts with the least certain answers come first",
        "diversity": "prompts that differ most from the rated ones and from each other come first",
    }[selection.order]
    print_message(
        console,
        f"Selected {selection.selected:,} of {counted(selection.prompts, 'prompt')}, written to "
        f"{selection.out}: {order}.",
    )
