"""The page of a comparison of two models, from its result as ``compare.json`` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from valence.reports.page import MARK
from valence.reports.rendering import Charts, render_page
from valence.reports.rows import Json
from valence.reports.verdict import forgetting_line, win_rate_verdict

SIDES = ("baseline", "candidate")
MAX_TEXT = 1500
"""Characters shown of a text."""
HEADER = (
    "",
    "win rate\n(95 % interval)",
    "length-\ncontrolled",
    "wins",
    "ties",
    "losses",
    "failed",
)
"""Columns of the table of win rates."""


def verdicts_of(result: Json) -> list[str]:
    """The verdict of each judge in words, and how much the candidate has forgotten."""
    verdicts = map(win_rate_verdict, result["judges"])
    texts = [verdict.text for verdict in verdicts if verdict is not None]
    return [*texts, *filter(None, [forgetting_line(result.get("forgetting"))])]


def rates_row(name: str, rates: Json) -> list[str]:
    """A row of the table of win rates: the columns of ``HEADER``."""
    estimates = (_cell(rates["win_rate"]), _cell(rates["length_controlled"]))
    return [name, *estimates, *(str(rates[key]) for key in HEADER[3:])]


def _cell(estimate: Mapping[str, float] | None) -> str:
    if estimate is None:
        return "\N{EN DASH}"
    value, low, high = (100 * estimate[name] for name in ("value", "low", "high"))
    return f"{value:.1f} % ({low:.1f}\N{EN DASH}{high:.1f})"


def warnings_of(result: Json) -> list[str]:
    """Reasons to doubt a result, one sentence each."""
    messages: list[str] = []
    for side, count in result["trained"].items():
        messages.append(
            f"{count} of {result['prompts']} prompts are in the training data of the {side}: they "
            f"are not held out."
        )
    if result["duplicates"]:
        messages.append(
            f"{result['duplicates']} rows repeat a prompt of another row, which is answered once."
        )
    for side, facts in result["answers"].items():
        for name in ("truncated", "empty"):
            if facts[name]:
                messages.append(
                    f"{facts[name]:.0f} of {result['prompts']} answers of the {side} are {name}."
                )
    messages += [f"{note[:1].upper()}{note[1:]}." for note in result["notes"]]
    return messages


CALIBRATION = (
    "judge",
    "labels",
    "agreement (95 % interval)",
    "judge prefers longer",
    "labels prefer longer",
    "judge prefers first",
)


def calibration_row(calibration: Json) -> list[str]:
    """A row of the table of calibrations: the columns of ``CALIBRATION``."""
    longer, position = calibration["longer"], calibration["position"]
    shares = [longer and longer["judge"], longer and longer["labels"]]
    shares.append(position and position["first"])
    return [
        calibration["judge"],
        str(calibration["num_labels"]),
        _cell(calibration["agreement"]),
        *("\N{EN DASH}" if share is None else f"{100 * share:.0f} %" for share in shares),
    ]


BENCHMARKS = ("task", "metric", "baseline", "candidate", "difference\n(95 % interval)")
"""Columns of the table of benchmarks."""
BETTER = {True: " \N{UPWARDS ARROW}", False: " \N{DOWNWARDS ARROW}", None: ""}
"""Sign of a metric of which larger values are better, or worse."""


def benchmark_row(benchmark: Json) -> list[str]:
    """A row of the table of benchmarks: the columns of ``BENCHMARKS``."""
    interval = ""
    if benchmark["low"] is not None:
        interval = f" ({benchmark['low']:+.3f} to {benchmark['high']:+.3f})"
    values = [
        f"{benchmark[side]:.3f}"
        + ("" if (error := benchmark[f"{side}_stderr"]) is None else f" ± {error:.3f}")
        for side in SIDES
    ]
    return [
        benchmark["task"],
        benchmark["metric"] + BETTER[benchmark["higher_is_better"]],
        *values,
        f"{benchmark['difference']:+.3f}{interval}",
    ]


def assertion_note(assertions: Json) -> str:
    """How many assertions pass, in a sentence."""
    unchecked = assertions["unchecked"]
    more = f"; {unchecked} could not be checked" if unchecked else ""
    return (
        f"The baseline passes {assertions['baseline']} of {assertions['number']} assertions, the "
        f"candidate {assertions['candidate']}: {len(assertions['broken'])} broken, "
        f"{len(assertions['fixed'])} fixed{more}."
    )


def judge_notes(judge: Json) -> list[str]:
    """How a judge worked, one sentence each."""
    messages: list[str] = []
    if position := judge.get("position"):
        messages.append(
            f"{judge['judge']} was shown both orders: {100 * position['consistent']:.0f} % of its "
            f"verdicts do not depend on the position, and {100 * position['first']:.0f} % are for "
            f"the answer that is shown first (50 % is no bias)."
        )
    if judge.get("cost") is not None:
        messages.append(f"{judge['judge']} cost {judge['cost']:.4g} US dollars.")
    return messages


def win_rate_page(result: Json) -> str:
    """The result as a self-contained HTML page."""
    charts = Charts()
    judges: Sequence[Json] = result["judges"]
    sections: dict[str, Any] = {}
    page_header = [cell.replace("-\n", "-") for cell in HEADER]
    if judges:
        sections["Win rate"] = {
            "header": page_header,
            "rows": [rates_row(judge["judge"], judge) for judge in judges],
            "lengths": {side: result["answers"][side]["mean_characters"] for side in SIDES},
        }
    if benchmarks := result.get("benchmarks"):
        rows = [benchmark_row(benchmark) for benchmark in benchmarks]
        sections["Benchmarks of lm-eval"] = {"header": BENCHMARKS, "rows": rows}
    sections |= {
        "Limits of this comparison": warnings_of(result),
        "Assertions": [assertion_note(result["assertions"])] if "assertions" in result else [],
        "Judges": [note for judge in judges for note in judge_notes(judge)],
    }
    if result["calibrations"]:
        rows = [calibration_row(calibration) for calibration in result["calibrations"]]
        sections["Agreement with your labels"] = {"header": CALIBRATION, "rows": rows}
    for judge in judges:
        if judge["tags"]:
            rows = [rates_row(tag, rates) for tag, rates in judge["tags"].items()]
            sections[f"By tag: {judge['judge']}"] = {"header": page_header, "rows": rows}
    for kind in ("broken", "fixed"):
        if entries := result.get("assertions", {}).get(kind):
            sections[f"Assertions that are {kind}"] = {
                "header": ("assertion", "prompt", "answer of the candidate"),
                "rows": [(e["assertion"], e["prompt"], e["answer"][:MAX_TEXT]) for e in entries],
                "texts": True,
            }
    for judge in judges:
        for side in reversed(SIDES):
            examples = [_shortened(example) for example in judge["clearest"][side]]
            name = result[side]
            sections[f"Clearest wins of {name}: {judge['judge']}"] = {"examples": examples}
    return render_page(
        "win_rates.html.j2",
        mark=Markup(MARK),
        title=f"{result['candidate']} compared with {result['baseline']}",
        result=result,
        verdicts=verdicts_of(result),
        sections={
            title: content
            for title, content in sections.items()
            if content and content != {"examples": []}
        },
        charts=charts,
    )


def _shortened(example: Json) -> Json:
    texts = {name: example[name] for name in ("prompt", *SIDES)}
    return {
        **example,
        **{
            name: text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ..."
            for name, text in texts.items()
        },
    }
