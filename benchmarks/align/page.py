"""The page with the results, and its figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.align.measures import Point
from benchmarks.align.summary import (
    MAX_KL,
    TOLERANCE,
    Estimate,
    MethodSummary,
    Row,
    frontier,
    in_both,
    kinds,
    points_by_seed,
    runs_of,
    summarize,
    within,
)
from benchmarks.peers import ROOT
from valence.evaluation.win_rate import Estimate as Rate
from valence.evaluation.win_rate import length_controlled_rate, win_rate
from valence.reports.form import RatedAnswers, compare_with_form

FOLDER = Path(__file__).parent
AMOUNTS, PAIRS = FOLDER / "amounts.json", FOLDER / "pairs.json"
PAGE, FIGURE = ROOT / "docs" / "align.md", ROOT / "docs" / "images" / "frontier.svg"
NAMES = {"valence": "Valence", "trl": "TRL"}
COLORS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")
WIDTH, HEIGHT, LEFT, BOTTOM, LEGEND = 700, 360, 50, 40, 190


def table(summaries: Sequence[MethodSummary], start: Point, other: str) -> str:
    """other: the name of the score that was not trained on."""
    lines = [
        "| method | library | runs | mean over 0 to 10 nats | at 5 nats | at 10 nats "
        f"| in equal time | {other} | tokens | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        f"| reference | | | {start.reward:.3f} | | | | {start.other:.3f} | | |",
    ]
    lines += [
        f"| {s.method} | {NAMES[s.library]} | {s.num_runs} | {s.area} | {s.at_5} | {s.at_10} | "
        f"{s.in_time} | {s.other} | {'' if isnan(s.tokens) else f'{s.tokens:,.0f}'} | "
        f"{s.seconds:.0f} |"
        for s in summaries
    ]
    return "\n".join(lines)


def penalties_table(results: Mapping[str, Row]) -> str:
    """Of methods with several penalties: reward and KL divergence at the end of the runs, with
    t-intervals over seeds.
    """
    lines = [
        "| method | penalty | reward | nats | reward in TRL | nats in TRL |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for method in dict.fromkeys(run["method"] for run in results.values()):
        runs = {library: runs_of(results, library, method) for library in NAMES}
        penalties = sorted({run["penalty"] for run in runs["valence"]} - {None})
        for penalty in penalties if len(penalties) > 1 else ():
            cells = [method, f"{penalty:g}"]
            for library in NAMES:
                ends = [run["points"][-1] for run in runs[library] if run["penalty"] == penalty]
                for name, digits in (("reward", 3), ("kl", 1)):
                    values = tuple(end[name] for end in ends)
                    cells.append(Estimate(values).text(digits) if values else "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def comparison(results: Mapping[str, Row], start: Point) -> list[str]:
    """What the runs that both libraries have made show; first what Valence loses."""
    by_key = {(s.library, s.method): s for s in summarize(in_both(results), start)}
    facts: list[tuple[float, str]] = []
    for (library, method), theirs in by_key.items():
        if library != "trl":
            continue
        ours = by_key["valence", method]
        if theirs.disagreement is not None:
            losses = f"losses differ by at most {theirs.disagreement:.0e} of their size"
            if theirs.disagreement > TOLERANCE:
                facts.append((0.0, f"{method}: {losses}, so nothing is compared."))
                continue
        else:
            losses = "each library samples for itself"
        ratio = theirs.seconds / ours.seconds
        rewards = f"mean reward {ours.area} in Valence, {theirs.area} in TRL"
        time = f"TRL takes {ratio:.2f} times as long"
        runs = f"{ours.num_runs} run{'s' if ours.num_runs > 1 else ''} each"
        facts.append((ratio, f"{method}, {runs}: {rewards}; {losses}; {time}."))
    return [text for _, text in sorted(facts)]


def figure(results: Mapping[str, Row], start: Point) -> str:
    """An SVG image of the frontiers, averaged over seeds: solid Valence, dashed TRL, where it has
    run the same seeds; both then of the same penalties.
    """
    methods = list(dict.fromkeys(run["method"] for run in results.values()))
    curves: list[tuple[str, str, list[float]]] = []  # rewards at each tenth of a nat
    shared = in_both(results)
    for library, method in kinds(results):
        seeds = points_by_seed(runs_of(shared, library, method))
        if len(seeds) < len(points_by_seed(runs_of(results, "valence", method))):
            if library == "trl":
                continue
            seeds = points_by_seed(runs_of(results, library, method))
        frontiers = [frontier(points, start) for points in seeds]
        end = min(MAX_KL, *(max(p.kl for p in points) for points in seeds))
        tenths = range(int(10 * end) + 1)  # no further than all seeds have come
        values = [fmean(within(f, k / 10) for f in frontiers) for k in tenths]
        curves.append((method, library, values))
    top = max(value for *_, values in curves for value in values)
    low, high = start.reward, start.reward + 1.05 * max(top - start.reward, 1e-6)

    def place(kl: float, reward: float) -> str:
        x = LEFT + kl / MAX_KL * (WIDTH - LEFT - LEGEND)
        y = 24 + (high - reward) / (high - low) * (HEIGHT - BOTTOM - 24)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="{HEIGHT - 6}">KL divergence from the reference (nats per completion)'
        "</text>",
        f'<text x="{LEFT}" y="12">reward (VADER)</text>',
    ]
    for kl in range(0, 11, 2):
        x, y = place(kl, low).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 16}" text-anchor="middle">{kl}</text>')
    for i in range(5):
        reward = low + (high - low) * i / 4
        x, y = place(0, reward).split(",")
        right = place(MAX_KL, reward).split(",")[0]
        parts.append(f'<line x1="{x}" x2="{right}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{float(x) - 6}" y="{float(y) + 4}" text-anchor="end">{reward:.2f}</text>'
        )
    for row, (method, library, values) in enumerate(curves):
        color = COLORS[methods.index(method) % len(COLORS)]
        dash = ' stroke-dasharray="5 4"' if library == "trl" else ""
        line = " ".join(place(k / 10, value) for k, value in enumerate(values))
        stroke = f'stroke="{color}" stroke-width="2" fill="none"{dash}'
        parts.append(f'<polyline points="{line}" {stroke}/>')
        y = 20 + 18 * row
        x = WIDTH - LEGEND + 10
        parts.append(f'<line x1="{x}" x2="{x + 24}" y1="{y}" y2="{y}" {stroke}/>')
        parts.append(f'<text x="{x + 30}" y="{y + 4}">{method} {NAMES[library]}</text>')
    return "\n".join([*parts, "</svg>", ""])


def amounts_table(results: Mapping[str, Row], start: Row) -> str:
    """For runs that differ in their seed alone: mean reward with a t-interval over seeds, and how
    many of 100 answers are better and worse than before.
    """
    before = fmean(start["rewards"])
    lines = [
        "| thumbs | up : down | wrong | runs | reward | better, worse of 100 | nats | tokens |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        f"| none | | | | {before:.3f} | | | {start['length']:.0f} |",
    ]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for run in results.values():
        if run.get("is_paired"):
            continue
        # amounts first, then shares of thumbs up, then of wrong labels
        place = run["flipped"] > 0, run["reviewed"] > 0, run["up"] != 0.5
        rest = run["flipped"], run["up"], run["is_balanced"], run["rows"]
        groups.setdefault((*place, *rest), []).append(run)
    for _, runs in sorted(groups.items()):
        rows, up, reviewed = (runs[0][name] for name in ("rows", "up", "reviewed"))
        wrong = f"{fmean(run['wrong'] for run in runs) / rows:.0%}"
        wrong += f" ({runs[0]['flipped']:.0%} before {reviewed} decisions)" if reviewed else ""
        reward = Estimate(tuple(fmean(run["rewards"]) for run in runs))
        gains = [
            after - earlier
            for run in runs
            for earlier, after in zip(start["rewards"], run["rewards"], strict=True)
        ]
        better, worse = (round(100 * fmean(gain * sign > 0 for gain in gains)) for sign in (1, -1))
        kl, length = (fmean(run[name] for run in runs) for name in ("kl", "length"))
        ratio = f"{max(1, round(up / (1 - up)))} : {max(1, round((1 - up) / up))}"
        ratio += ", balanced" if runs[0]["is_balanced"] else ""
        lines.append(
            f"| {rows:,} | {ratio} | {wrong} | {len(runs)} | {reward} | "
            f"{better}, {worse} | {kl:.1f} | {length:.0f} |"
        )
    return "\n".join(lines)


def noise_table(results: Mapping[str, Row], start: Row) -> str:
    """Of runs on pairs: mean reward of each method by the share of wrong pairs."""
    runs = [run for run in results.values() if run.get("is_paired")]
    shares = sorted({run["flipped"] for run in runs})
    lines = [
        "| method | runs | " + " | ".join(f"{share:.0%} wrong" for share in shares) + " |",
        "| --- | --- |" + " --- |" * len(shares),
        "| none | |" + f" {fmean(start['rewards']):.3f} |" * len(shares),
    ]
    for method in dict.fromkeys(run["method"] for run in runs):
        cells: list[str] = []
        num_runs = 0
        for share in shares:
            chosen = [r for r in runs if (r["method"], r["flipped"]) == (method, share)]
            num_runs = max(num_runs, len(chosen))
            rewards = tuple(fmean(run["rewards"]) for run in chosen)
            cells.append(str(Estimate(rewards)) if rewards else "as dpo")
        lines.append(f"| {method} | {num_runs} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sums_table(results: Mapping[str, Row], start: Point) -> str:
    """Share of right answers after a number of sampled completions, with t-intervals over seeds."""
    runs = list(results.values())
    total = min(run["points"][-1]["sampled"] for run in runs)
    lines = [
        f"| method | library | runs | after {total // 2:,} completions | after {total:,} "
        "| only a number | nats |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| reference | | | {start.reward:.3f} | {start.reward:.3f} | {start.other:.3f} | |",
    ]
    for library, method in kinds(results):
        chosen = [run for run in runs if (run["library"], run["method"]) == (library, method)]
        points = [[start, *(Point(**point) for point in run["points"])] for run in chosen]

        def at(number: int, name: str, points: Sequence[list[Point]] = points) -> Estimate:
            curves = [[(p.sampled, getattr(p, name)) for p in run] for run in points]
            return Estimate(tuple(within(curve, number) for curve in curves))

        lines.append(
            f"| {method} | {NAMES[library]} | {len(chosen)} | {at(total // 2, 'reward')} | "
            f"{at(total, 'reward')} | {at(total, 'other').mean:.3f} | {at(total, 'kl').mean:.1f} |"
        )
    return "\n".join(lines)


def pairs_table(results: Mapping[str, Row], start: Row) -> str:
    """Of each method, over all folds: how it ranks held-out pairs, and how often its answers win.

    start: how many pairs there are.
    """
    lines = [
        "| method | library | pairs | ranked right | beyond length and form | wins | wins at equal "
        "length | tokens |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    runs = list(results.values())
    for library, method in kinds(results):
        chosen = [run for run in runs if (run["library"], run["method"]) == (library, method)]

        def joined(name: str, chosen: Sequence[Row] = chosen) -> list[Any]:
            return [value for run in chosen for value in run[name]]

        margins = joined("margins")
        form = compare_with_form(
            RatedAnswers(
                kind="pairs",
                labels=[1.0] * len(margins),
                rewards=margins,
                before=None if chosen[0]["before"] is None else joined("before"),
                forms=joined("forms"),
                groups=joined("groups"),
            )
        )
        right = win_rate([float(margin > 0) for margin in margins])
        preferences, differences = joined("preferences"), joined("differences")
        wins = win_rate(preferences)
        at_equal_length = length_controlled_rate(preferences, differences)
        cells = [
            method, NAMES[library], f"{len(margins)} of {start['pairs']}", share(right),
            f"{form.correlation:.2f} [{form.low:.2f}, {form.high:.2f}]", share(wins),
            share(at_equal_length), f"{fmean(run['length'] for run in chosen):.0f}",
        ]  # fmt: skip
        if len(lines) == 2:
            lines.append(f"| length and form alone | | | {form.alone:.0%} | | | | |")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def share(rate: Rate) -> str:
    """A share with its 95 % interval."""
    return f"{rate.value:.0%} [{rate.low:.0%}, {rate.high:.0%}]"


def rewards_section(results: Mapping[str, Row], start: Point, *, other: str) -> str:
    """The frontiers in words and as a table."""
    facts = [f"- {fact}" for fact in comparison(results, start)]
    rows = table(summarize(results, start), start, other)
    return "\n".join([*facts, *([""] if facts else []), rows])


SECTIONS: dict[str, Callable[[Mapping[str, Row], Point], str]] = {
    "positive": partial(rewards_section, other="film score"),
    "films": partial(rewards_section, other="VADER"),
    "sums": sums_table,
}
"""Of the tasks."""


def results_file(task: str) -> Path:
    return FOLDER / f"{task}.json"


def publish(file: Path, start: Row, results: Mapping[str, Row]) -> None:
    """Add results to a file, then write the page and the figure.

    Results that are there stay, if the reference has answered as it does now.
    """
    stored: Row = json.loads(file.read_text("utf-8")) if file.exists() else {"start": None}
    runs = {**stored["runs"], **results} if stored["start"] == start else results
    text = json.dumps({"start": start, "runs": runs})
    file.write_text(text + "\n", encoding="utf-8")
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


def files() -> dict[Path, str]:
    """The page and the figure, from the results."""
    blocks: dict[str, str] = {}
    figures: dict[Path, str] = {}
    for task, section in SECTIONS.items():
        record = json.loads(results_file(task).read_text("utf-8"))
        results, start = record["runs"], Point(**record["start"])
        blocks[task] = section(results, start)
        if task == "positive":
            blocks["penalties"] = penalties_table(results)
            figures[FIGURE] = figure(results, start)
    amounts = json.loads(AMOUNTS.read_text("utf-8"))
    blocks["amounts"] = amounts_table(amounts["runs"], amounts["start"])
    pairs = json.loads(PAIRS.read_text("utf-8"))
    blocks["pairs"] = pairs_table(pairs["runs"], pairs["start"])
    blocks["noise"] = noise_table(amounts["runs"], amounts["start"])
    text = PAGE.read_text("utf-8")
    for name, block in blocks.items():
        before, begin, rest = text.partition(f"<!-- {name}: begin -->")
        _, end, after = rest.partition(f"<!-- {name}: end -->")
        text = f"{before}{begin}\n\n{block}\n\n{end}{after}"
    return {PAGE: text, **figures}
