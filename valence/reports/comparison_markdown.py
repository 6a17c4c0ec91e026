"""Markdown for a pull request or a log book: one run told shortly, or the tables of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from valence.reports.compared import Compared
from valence.reports.comparison_tables import (
    MARK,
    RANKED,
    Disagreement,
    disagreements,
    gaps,
    percent,
    tables,
    what,
)
from valence.reports.formatting import compare, duration, flatten
from valence.reports.rendering import fenced, markdown, markdown_table
from valence.reports.rundata import RunData
from valence.reports.signs import other_warnings, signs
from valence.reports.stats import finite
from valence.reports.verdict import run_verdict


def comparison_markdown(runs: Sequence[Compared]) -> str:
    """The tables of a comparison."""
    parts = [MARK, f"# {len(runs)} runs compared", markdown(what(runs)), _listed(gaps(runs))]
    for part in tables(runs):
        parts += [
            f"## {part.title}",
            *map(markdown, part.notes),
            markdown_table(part.header, part.rows),
        ]
    if found := disagreements(runs):
        header = ("row", "prompt", *(run.label for run in runs), "answers")
        rows = [_line(each, runs) for each in found]
        parts += [
            "## Rows on which the runs disagree",
            markdown(RANKED),
            markdown_table(header, rows),
        ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _line(each: Disagreement, runs: Sequence[Compared]) -> list[str]:
    cells = [percent(each.places[run.label][0]) if run.label in each.places else "" for run in runs]
    same = [f"{name}: {said}" for name, said in each.texts.items() if name != "prompt"]
    own = [f"{label}: {said}" for label, said in each.answers.items()]
    return [each.origin, each.texts["prompt"], *cells, " / ".join([*same, *own])]


def run_markdown(run: RunData) -> str:
    """What was trained on what, the held-out numbers before and after, what there is to warn of,
    the command and the versions.
    """
    found = signs(run)
    warnings = [
        *run.problems,
        *run.audited,
        *other_warnings(run, found),
        *map(str, run.run.get("notes", ())),
    ]
    command, versions = run.run.get("command"), run.run.get("versions", {})
    parts = [
        MARK,
        _verdict(run),
        _listed([f"{sign.said} {sign.do}" for sign in found]),
        _sentence(run),
        _results(run),
        _test(run),
    ]
    parts += ["Warnings and notes:", _listed(warnings)] if warnings else []
    parts += [fenced(str(command), "sh")] if command else []
    parts += (
        [markdown(", ".join(f"{name} {version}" for name, version in versions.items()))]
        if versions
        else []
    )
    return "\n\n".join(filter(None, parts)) + "\n"


def _verdict(run: RunData) -> str:
    """Whether the model is better on held-out data."""
    found = run_verdict(run)
    return f"**{markdown(found.headline)}.** {markdown(f'{found.sentence} {found.advice}')}"


def _sentence(run: RunData) -> str:
    if not run.config:
        return "What was trained is not known: the folder holds no whole recipe (config.yaml)."
    settings = flatten(run.config)
    rank = settings.get("model.lora.rank")
    how = "an adapter" if settings.get("model.adapter") else "all weights"
    how = f"a LoRA adapter of rank {rank}" if rank else how
    model = settings.get("model.name", settings.get("model")) or "an unknown model"
    sources = settings.get("data.train")
    files = (
        [str(s.get("path")) for s in sources if isinstance(s, Mapping)]
        if isinstance(sources, list)
        else []
    )
    on = f" with the rows of {', '.join(files)}" if files else ""
    steps, seconds, status = (
        run.metrics[-1]["step"] if run.metrics else 0,
        run.run.get("seconds"),
        run.run.get("status"),
    )
    took = f" in {duration(seconds)}" if finite(seconds) else ""
    state = (
        ""
        if status == "done"
        else f" The run is not done: {status or 'nothing says how it stands'}."
    )
    method = settings.get("method", "A run")
    return (
        f"**{markdown(method)}** trained "
        f"{markdown(f'{how} of {model}{on}: {steps} optimizer steps{took}.{state}')}"
    )


def _results(run: RunData) -> str:
    if run.first is None or run.last is None:
        return "It was not evaluated on held-out rows."
    if run.first is run.last:
        return markdown_table(
            ("held-out rows", f"step {run.last['step']}"), run.last["metrics"].items()
        )
    header = (
        "held-out rows",
        f"before (step {run.first['step']})",
        f"after (step {run.last['step']})",
        "change",
    )
    return markdown_table(header, compare(run.first["metrics"], run.last["metrics"]))


def _test(run: RunData) -> str:
    return (
        markdown_table(("test rows", f"step {run.test['step']}"), run.test["metrics"].items())
        if run.test
        else ""
    )


def _listed(said: Sequence[str]) -> str:
    return "\n".join(f"- {markdown(each)}" for each in said)
