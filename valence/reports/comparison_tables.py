"""The tables of a comparison: what each run came to, where its settings differ, and the rows on
which runs disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from valence.reports.compared import (
    Compared,
    alike,
    differing,
    same_rows,
    same_test_rows,
    some_untrained,
)
from valence.reports.formatting import duration, text, visible
from valence.reports.rows import Json, several, worth
from valence.reports.stats import finite, ranks

Key = tuple[str, str]
"""A row's id, and the number of its answer where it has several."""

MARK = "<!-- written by valence report -->"
"""In all that `valence report` writes outside a run's folder: what has it may be written over."""

RANKED = (
    "Rows of the last evaluations that the runs place most differently among all their rows: the "
    "rank says how many of the other "
    "rows a run gives a smaller reward. Of a pair, the reward is the chosen side's less the "
    "rejected side's."
)

BEST = "\N{BLACK CIRCLE}"

HEADLINES = (
    "reward/mean",
    "rewards/accuracies",
    "rewards/auc",
    "rewards/spearman",
    "rewards/margins",
    "loss",
    "kl",
)
"""Held-out numbers that stand beside what a run is; all of them have a table of their own."""

MOST_ROWS = 20
"""Rows on which the runs disagree that are shown."""

LONGEST = 300
"""Characters of a text that are shown."""

DIRECTIONS: tuple[tuple[str, int], ...] = (
    (r"loss|rewards/(brier|calibration_error|error)", -1),
    (r"rewards/(margins|accuracies|auc|pearson|spearman)|auc|value/explained", 1),
    (r"reward/(std|std_of_prompt)", 0),
    (r"reward/.+", 1),
)
"""Patterns of names, and whether less (-1) or more (1) is better; the numbers of attributes and of
mixed in methods count too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePart:
    """A section with a table. notes: sentences. numeric: all columns but the first hold numbers."""

    title: str
    notes: tuple[str, ...]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A row that the runs rank differently. places: of each run that has it the share of its other
    rows with a smaller reward (the same ones count half), and the reward. texts: its prompt, and
    the answers if all runs have the same; else ``answers`` has those of each run.
    """

    origin: str
    places: Mapping[str, tuple[float, float]]
    texts: Mapping[str, str]
    answers: Mapping[str, str]


def what(runs: Sequence[Compared]) -> str:
    """A sentence."""
    return f"Runs: {', '.join(run.label for run in runs)}."


def tables(runs: Sequence[Compared]) -> list[TablePart]:
    """All but the rows."""
    return [summary(runs), settings(runs), *numbers(runs)]


def gaps(runs: Sequence[Compared]) -> list[str]:
    """What some runs lack, and what keeps numbers from being compared: a sentence each."""
    said = [f"{run.label}: {gap}" for run in runs for gap in run.gaps]
    if not same_rows(runs):
        sets = [set(run.rows) for run in runs if run.rows]
        counts = ", ".join(f"{run.label} {text(len(run.rows))}" for run in runs if run.rows)
        shared = text(len(set.intersection(*sets)))
        said.insert(
            0,
            f"The runs were measured on different held-out rows ({counts}; {shared} of them are "
            f"in all): "
            "their held-out numbers are not comparable, and no best one is marked.",
        )
    steps = {max(run.evaluations) for run in runs if run.evaluations}
    if len(steps) > 1:
        said.append(
            f"The last evaluations were made after different numbers of steps "
            f"({', '.join(map(text, sorted(steps)))})."
        )
    if some_untrained(runs):
        said.append(
            "Some were only measured before their first step: their held-out numbers compete "
            "with none."
        )
    return said


def summary(runs: Sequence[Compared]) -> TablePart:
    """What each run is and came to, a line each."""
    held_out = [name for name in HEADLINES if any(name in run.last for run in runs)]
    same = same_rows(runs)
    columns = {
        name: _marked(runs, name, [run.last.get(name) for run in runs], same) for name in held_out
    }
    header = (
        "run",
        "method",
        "state",
        "steps",
        "tokens",
        "time",
        *(f"eval/{name}" for name in held_out),
    )
    rows = [[*_facts(run), *(columns[name][i] for name in held_out)] for i, run in enumerate(runs)]
    notes = (*_legend(rows, "column"), *_incomparable(runs, held_out))
    return TablePart(title="Summary", notes=notes, header=header, rows=rows)


def _legend(rows: Sequence[Sequence[str]], of: str) -> list[str]:
    return (
        [f"{BEST} marks the best of a {of}."]
        if any(cell.startswith(BEST) for row in rows for cell in row[1:])
        else []
    )


def _facts(run: Compared) -> list[str]:
    tokens = next(
        (r["tokens_seen"] for r in reversed(run.records) if finite(r.get("tokens_seen"))), None
    )
    steps = (
        f"{text(run.step)} of {text(run.line.total)}"
        if run.line.total not in (None, run.step)
        else text(run.step)
    )
    time = "" if run.seconds is None else duration(run.seconds)
    return [
        run.label,
        run.method,
        run.line.state,
        steps,
        "" if tokens is None else text(tokens),
        time,
    ]


def settings(runs: Sequence[Compared]) -> TablePart:
    """The settings that differ, a line each."""
    found = differing(runs)
    rows = [[name, *(cut(value) for value in values)] for name, values in found.items()]
    header = ("setting", *(run.label for run in runs))
    note = "All other settings are the same. An empty place: the run has no such setting."
    if not rows:
        rows = [["none", *("" for _ in runs)]]
        note = "All settings that are known are the same."
    return TablePart(
        title="Settings that differ", notes=(note,), header=header, rows=rows, numeric=False
    )


def numbers(runs: Sequence[Compared]) -> list[TablePart]:
    """All numbers of the last evaluations, and of the test rows, a line each."""
    header = ("metric", *(run.label for run in runs))
    made: list[TablePart] = []
    tested = same_test_rows(runs)
    apart = (
        []
        if tested
        else [
            "The runs have different test rows: these numbers are not comparable, and no best "
            "one is marked."
        ]
    )
    for title, notes, each, same in (
        (
            "Held-out numbers",
            ["At the last evaluation of each run."],
            [run.last for run in runs],
            same_rows(runs),
        ),
        ("Test rows, after training", apart, [run.test for run in runs], tested),
    ):
        names = list(dict.fromkeys(name for found in each for name in found))
        rows = [
            [visible(name), *_marked(runs, name, [found.get(name) for found in each], same)]
            for name in names
        ]
        if rows:
            made.append(
                TablePart(
                    title=title, notes=(*notes, *_legend(rows, "line")), header=header, rows=rows
                )
            )
    return made


def _marked(runs: Sequence[Compared], name: str, values: Sequence[object], same: bool) -> list[str]:
    """The numbers as text, the best of them marked where it is known which is better and the runs
    can be compared by it.
    same: all were measured on the same rows.
    """
    sign = direction(name)
    there = [run for run, value in zip(runs, values, strict=True) if finite(value)]
    late = some_untrained(runs)
    known = [
        value
        for run, value in zip(runs, values, strict=True)
        if finite(value) and not (late and max(run.evaluations, default=1) == 0)
    ]
    comparable = sign and len(set(known)) > 1 and same and not scaled_apart(there, name)
    best = max(known, key=lambda value: sign * value) if comparable else None
    cells = ["" if value is None else text(value) for value in values]
    return [
        f"{BEST} {cell}" if best is not None and value == best else cell
        for value, cell in zip(values, cells, strict=True)
    ]


def direction(name: str) -> int:
    """-1 if less of a number is better, 1 if more is, 0 if that is not known.

    Names without ``eval/``.
    """
    for pattern, sign in DIRECTIONS:
        if re.fullmatch(rf"(\w+/)?({pattern})(/.+)?", name):
            return sign
    return 0


def scaled_apart(runs: Sequence[Compared], name: str) -> bool:
    """Whether the runs have this number on scales of their own: losses and implicit rewards of
    different methods or settings of them, verdicts of different rewards.
    """
    if re.fullmatch(r"(\w+/)?(loss|rewards/(chosen|rejected|margins|error))(/.+)?", name):
        return not alike(runs, "method", "loss", "mix")
    return bool(re.fullmatch(r"(\w+/)?reward/.+", name)) and not alike(runs, "reward")


def _incomparable(runs: Sequence[Compared], names: Iterable[str]) -> list[str]:
    apart = [
        f"eval/{name}" for name in names if scaled_apart([r for r in runs if name in r.last], name)
    ]
    if not apart:
        return []
    return [
        f"Not to be compared, and not marked: {', '.join(apart)}, which depend on the method, "
        f"loss.* or reward of each run."
    ]


# --- Rows
# ------------------------------------------------------------------------------------------


def disagreements(runs: Sequence[Compared]) -> list[Disagreement]:
    """The rows in two or more last evaluations whose places among all rewards differ most, at most
    ``MOST_ROWS``.
    """
    rewards = {
        run.label: {(id, n): r for id, row in run.rows.items() for n, r in rewards_of(row).items()}
        for run in runs
    }
    shares = {label: _shares(own) for label, own in rewards.items()}
    found: list[tuple[float, Key]] = []
    for key in dict.fromkeys(key for own in shares.values() for key in own):
        places = [own[key] for own in shares.values() if key in own]
        if len(places) > 1 and max(places) > min(places):
            found.append((max(places) - min(places), key))
    worst = sorted(found, key=lambda each: -each[0])[:MOST_ROWS]
    return [
        _disagreement(
            runs, key, {n: (own[key], rewards[n][key]) for n, own in shares.items() if key in own}
        )
        for _, key in worst
    ]


def _disagreement(
    runs: Sequence[Compared], key: Key, places: Mapping[str, tuple[float, float]]
) -> Disagreement:
    id, answer = key
    own = {run.label: run.rows[id] for run in runs if run.label in places}
    answers = {label: _answers(row, answer) for label, row in own.items()}
    row, first = next(iter(own.values())), next(iter(answers.values()))
    same = all(each == first for each in answers.values())
    return Disagreement(
        origin=str(row.get("origin") or id),
        places=places,
        texts={"prompt": cut(str(row.get("prompt", "")))}
        | ({name: cut(said) for name, said in first.items()} if same else {}),
        answers={}
        if same
        else {label: cut("\n\n".join(each.values())) for label, each in answers.items()},
    )


def _answers(row: Json, answer: str) -> dict[str, str]:
    names = (f"completion_{answer}",) if answer else ("completion", "chosen", "rejected")
    return {name.replace("_", " "): str(row[name]) for name in names if name in row}


def rewards_of(row: Json) -> dict[str, float]:
    """What a run makes of a row (``worth``); of several answers the reward of each, by number.

    Empty where there is none.
    """
    if (found := worth(row)) is not None:
        return {"": found}
    return {str(n): reward for n, reward in enumerate(several(row))}


def _shares(rewards: Mapping[Key, float]) -> dict[Key, float]:
    """Of each the share of the others that are smaller; the same ones count half."""
    return {
        key: rank / max(1, len(rewards) - 1)
        for key, rank in zip(rewards, ranks(list(rewards.values())), strict=True)
    }


def cut(said: str) -> str:
    """A text as far as it is shown."""
    return (
        said
        if len(said) <= LONGEST
        else f"{said[:LONGEST]}\N{HORIZONTAL ELLIPSIS} ({len(said) - LONGEST:,} more characters)"
    )


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
