"""The first sentence of a report: whether held-out behaviour improved, by how much, and with what
confidence.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from valence.reports.charts import equals_reference
from valence.reports.diagnostics import main_warning
from valence.reports.formatting import number
from valence.reports.rows import has_signals, is_pair, is_rollout, margin, per_token, value, verdict
from valence.reports.run_record import FILES, RunRecord
from valence.statistics import (
    MIN_CLASS_ROWS,
    Z95,
    auc,
    auc_interval,
    finite,
    mean,
    mean_interval,
    spearman,
    wilson,
)

if TYPE_CHECKING:  # loads torch, which other commands do without
    from valence.reports.form import FormComparison, RatedAnswers

Json = Mapping[str, Any]
State = Literal["improved", "form", "worse", "unclear", "unmeasured"]
RatedKind = Literal["thumbs", "pairs", "scores"]

NO_ROWS = "No rows were held out, so nothing shows whether the model is better."
HOLD_OUT = "Set data.eval to a share of the rows, such as 0.1, or to a file of other rows."
HEADLINES: dict[State, str] = {
    "improved": "Improved on held-out data",
    "form": "No gain beyond length and form on held-out data",
    "worse": "Worse on held-out data",
    "unclear": "No clear change on held-out data",
    "unmeasured": "Not measured on held-out data",
}
MIN_ROWS = 2
"""Rows of a kind that an interval needs."""

DETECTED = 0.7
"""Share of answers or pairs in the right order that a verdict should tell from chance, 0.5."""
POWER = Z95 + 0.841621
"""Standard errors between chance and a share that is found in four of five evaluations."""


@dataclass(frozen=True)
class Verdict:
    """The result of a run on held-out rows, or of a comparison of two models.

    state: improved or worse if the 95 % interval excludes no change, and the length and form of the
    answers do not explain the gain; form if they do; unclear if the interval includes no change;
    unmeasured without rows.
    value, low, high: the measured number and its 95 % interval. baseline: the value of no change.
    count: held-out rows.
    sentence: all of this in words. advice: what to do or to consider. title: a headline other than
    that of the state.
    """

    state: State
    sentence: str
    advice: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    baseline: float | None = None
    count: int = 0
    title: str = ""

    @property
    def text(self) -> str:
        """The verdict as the terminal, reports and the model card print it."""
        return f"{self.headline}. {self.sentence}"

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        return self.title or HEADLINES[self.state]


def run_verdict(run: RunRecord) -> Verdict:
    """The verdict on a run, with advice for what its folder holds."""
    return held_out_verdict(run.first, run.last, has_answers=bool(run.samples))


def held_out_verdict(
    first: Json | None, last: Json | None, *, has_answers: bool = False
) -> Verdict:
    """Compare a run's last evaluation with its first one, or with chance where the run started
    there.

    first is last if there was only one evaluation; both are None if there was none.
    has_answers: the run has answers to held-out prompts, which the advice can mention.
    Rows that are training rows too do not count.
    """
    if last is None:
        return Verdict("unmeasured", NO_ROWS, HOLD_OUT)
    after = _held_out(last["rows"])
    before = _held_out(first["rows"]) if first is not None and first is not last else None
    num_trained = len(last["rows"]) - len(after)
    if num_trained and not after:
        return Verdict(
            "unmeasured",
            f"All {number(num_trained)} rows of the evaluation are also in data.train, so they "
            "cannot show whether the model is better.",
            f"{HOLD_OUT} {_next_step(last['rows'], has_answers)}",
        )
    if has_signals(last):
        return _towards_teacher(after, before) or _of_signals(after, before, has_answers)
    verdict = _verdict_on(after, before, has_answers)
    if not num_trained:
        return verdict
    return replace(
        verdict,
        sentence=f"{verdict.sentence} This leaves out {number(num_trained)} of "
        f"{number(len(last['rows']))} rows, which are also in data.train.",
        advice=f"{HOLD_OUT} {verdict.advice}",
    )


def _held_out(rows: Sequence[Json]) -> Sequence[Json]:
    """The rows that are not training rows."""
    return [row for row in rows if not row.get("in_train")]


def _verdict_on(after: Sequence[Json], before: Sequence[Json] | None, has_answers: bool) -> Verdict:
    """The verdict on the held-out rows of the last evaluation, and of an earlier one if there was
    one.
    """
    if verdict := _of_completions(after, before):
        return verdict
    for of_kind in (_of_thumbs, _of_pairs, _of_scores, _of_demonstrations):
        if verdict := of_kind(after, before):
            return replace(verdict, advice=f"{verdict.advice} {_next_step(after, has_answers)}")
    return Verdict(
        "unmeasured",
        f"The {number(len(after))} held-out rows are too few, or of a kind without a metric.",
        "Hold out at least 50 rows.",
    )


def _of_signals(after: Sequence[Json], before: Sequence[Json] | None, has_answers: bool) -> Verdict:
    """The mean size of the signal of held-out rows. It decides nothing: a policy that agrees with
    its teacher may answer worse.
    """
    size = _mean_size(after)
    change = "" if size is None else f" The mean size of their signal is {size:.3g} nats per token"
    if change and before is not None and (earlier := _mean_size(before)) is not None:
        change += f", and was {earlier:.3g} in the first evaluation"
    return Verdict(
        "unmeasured",
        f"The model did not write the {number(len(after))} held-out completions, so they do not "
        f"show whether its answers are better.{change}{'.' if change else ''}",
        f"{_next_step(after, has_answers)} A judge can compare both models: `valence compare`.",
    )


def _towards_teacher(last: Sequence[Json], first: Sequence[Json] | None) -> Verdict | None:
    """The signal of the policy's own completions, before and after, paired by prompt: an estimate
    of -KL(policy, teacher) per token.
    """
    if (changes := _changes_of_completions(last, first)) is None:
        return None
    before, after, low, high, count = changes
    state = _state(low, high, 0.0)
    titles = {
        "improved": "Closer to the teacher on held-out prompts",
        "worse": "Further from the teacher on held-out prompts",
    }
    return Verdict(
        state,
        f"The signal of completions of {number(count)} held-out prompts went from {before:.3g} to "
        f"{after:.3g} nats per token (change {_signed(after - before)}, 95 % interval "
        f"{_signed(low)} to {_signed(high)}). At 0, the model agrees with its teacher.",
        "Whether its answers are better, a judge can tell: `valence compare`.",
        after - before, low, high, 0.0, count, titles.get(state, ""),
    )  # fmt: skip


def _mean_size(rows: Sequence[Json]) -> float | None:
    return mean(abs(signal) for row in rows if (signal := value(row)) is not None)


def _next_step(rows: Sequence[Json], has_answers: bool) -> str:
    """What to read in addition to the number."""
    if _is_of_reward_model(rows):
        return "Read the most surprising rows in the report."
    if has_answers:
        return "Read the answers in the report."
    return (
        "To read answers as well, set run.samples.prompts in the recipe, or sample from both "
        "models: `valence sample RUN`, and `valence sample RECIPE` for the model before training."
    )


def _is_of_reward_model(rows: Sequence[Json]) -> bool:
    return any(name.startswith("scores") for row in rows for name in row)


def _state(low: float, high: float, baseline: float) -> State:
    return "improved" if low > baseline else "worse" if high < baseline else "unclear"


def _interval(low: float, high: float) -> str:
    return f"95 % interval {low:.2f} to {high:.2f}"


RANKING = "Ranking held-out rows well is not the same as answering well."


def _of_completions(last: Sequence[Json], first: Sequence[Json] | None) -> Verdict | None:
    """The reward of the policy's own completions, before and after, paired by prompt."""
    if (changes := _changes_of_completions(last, first)) is None:
        return None
    before, after, low, high, count = changes
    return Verdict(
        _state(low, high, 0.0),
        f"The mean reward on {number(count)} held-out prompts went from {before:.3g} to "
        f"{after:.3g} "
        f"(change {_signed(after - before)}, 95 % interval {_signed(low)} to {_signed(high)}).",
        "Read the answers in the report: a policy that exploits the reward looks the same as one "
        "that has learned the task.",
        after - before, low, high, 0.0, count,
    )  # fmt: skip


def _changes_of_completions(
    last: Sequence[Json], first: Sequence[Json] | None
) -> tuple[float, float, float, float, int] | None:
    """The mean value of sampled completions before and after, the interval of its change, and the
    number of prompts; None for other rows, or too few.
    """
    if first is None or not any(map(is_rollout, last)):
        return None
    pairs = _paired({**_by_id(first, value)}, {**_by_id(last, value)})
    if len(pairs) < MIN_ROWS:
        return None
    low, high = mean_interval([after - before for before, after in pairs])
    before, after = mean(b for b, _ in pairs), mean(a for _, a in pairs)
    assert before is not None
    assert after is not None
    return before, after, low, high, len(pairs)


def _of_thumbs(last: Sequence[Json], first: Sequence[Json] | None) -> Verdict | None:
    """How well the reward ranks thumbs up above thumbs down."""
    after = _thumbs(last)
    if after is None:
        return None
    ups, downs = after
    now, (low, high) = auc(ups, downs), auc_interval(auc(ups, downs), len(ups), len(downs))
    earlier = _thumbs(first) if first is not None else None
    before = auc(*earlier) if earlier else 0.5
    num_rows = len(ups) + len(downs)
    state, form = _compare_with_form(_state(low, high, before), "thumbs", last, first)
    return Verdict(
        state,
        f"The model ranks a liked answer above a disliked one {_percent(now)} % of the time "
        f"(95 % interval {_percent(low)} to {_percent(high)} %; chance is 50 %; AUC {now:.2f} on "
        f"{number(num_rows)} held-out rows).{_before(first, last, before)}{form}"
        f"{_rows_missing(state, num_rows, rows_needed(len(ups) / num_rows))}",
        RANKING, now, low, high, before, num_rows,
    )  # fmt: skip


def rows_needed(share_up: float | None) -> int:
    """Rows for a verdict: with them, four of five evaluations distinguish a model that orders
    DETECTED of the answers correctly from chance.

    share_up: of the rows that are thumbs up; the variance is that of Mann and Whitney's U without
    ties. None for pairs.
    """
    gain = DETECTED - 0.5
    if share_up is None:
        deviation = Z95 * 0.5 + (POWER - Z95) * math.sqrt(DETECTED * (1 - DETECTED))
        return math.ceil((deviation / gain) ** 2)
    return math.ceil((POWER / gain) ** 2 / 12 / (share_up * (1 - share_up)))


def _rows_missing(state: State, num_rows: int, needed: int) -> str:
    """A sentence about how many rows a verdict needs; empty if there are enough."""
    sentence = "" if state == "improved" else few_rows(num_rows, needed)
    return f" {sentence}" if sentence else ""


def few_rows(num_rows: int, needed: int) -> str:
    """A sentence about how many held-out rows a verdict needs; empty if there are enough."""
    if num_rows >= needed:
        return ""
    return (
        f"{number(num_rows)} held-out rows are few: about {number(needed)} are needed to "
        f"distinguish a model that ranks {_percent(DETECTED)} % correctly from chance."
    )


def _compare_with_form(
    state: State, kind: RatedKind, last: Sequence[Json], first: Sequence[Json] | None
) -> tuple[State, str]:
    """The state after a comparison with what length and form alone reach, and a sentence about it.

    Only improved can change: to form, or to unclear with too few rows for the comparison. The
    sentence is empty without a comparison, as for rows without text.
    """
    answers = _rated_answers(kind, last, first)
    if answers is None:
        return state, ""
    average = mean(answers.labels) or 0.0
    num_ups = sum(label > average for label in answers.labels)
    num_smaller = len(answers.labels)
    if kind != "pairs":
        num_smaller = min(num_ups, num_smaller - num_ups)
    if num_smaller < MIN_CLASS_ROWS:
        if state != "improved":
            return state, ""
        return "unclear", (
            f" These are too few rows to compare with length and form: at least {MIN_CLASS_ROWS} "
            f"{'pairs' if kind == 'pairs' else 'rows of each class'} are needed."
        )
    from valence.reports.form import compare_with_form

    form = compare_with_form(answers)
    is_beyond = form.low > 0 and (form.difference is None or form.difference[1] > 0)
    if state == "improved" and not is_beyond:
        state = "form"
    return state, _form_sentence(form, state)


def _rated_answers(
    kind: RatedKind, last: Sequence[Json], first: Sequence[Json] | None
) -> RatedAnswers | None:
    """The rated answers of an evaluation with their form; None if a row has no text."""
    from valence.reports.form import RatedAnswers

    reward_of = margin if kind == "pairs" else value
    rows = [
        (row, label, reward)
        for row in last
        if (label := _label(kind, row)) is not None and (reward := reward_of(row)) is not None
    ]
    forms = [form for row, *_ in rows if (form := _form_features(row, kind)) is not None]
    if not rows or len(forms) < len(rows):
        return None
    earlier = {} if first is None or _equals_reference(first) else _by_id(first, reward_of)
    before = [earlier.get(str(row.get("id"))) for row, *_ in rows]
    return RatedAnswers(
        kind=kind,
        labels=[label for _, label, _ in rows],
        rewards=[reward for *_, reward in rows],
        before=None if None in before else [item or 0.0 for item in before],
        forms=forms,
        groups=[str(row.get("prompt", row.get("id"))) for row, *_ in rows],
    )


def _label(kind: RatedKind, row: Json) -> float | None:
    """The thumb or the score of a row, 1 for a pair; None for a row of another kind."""
    if kind == "pairs":
        return 1.0 if is_pair(row) else None
    if kind == "thumbs":
        label = verdict(row)
        return None if label is None else float(label)
    return score if finite(score := row.get("target")) else None


def _form_features(row: Json, kind: RatedKind) -> list[float] | None:
    """Logarithms of the number of tokens and of the other properties of an answer's form; of a
    pair, the differences between chosen and rejected.
    """
    from valence.reports.form import form_of

    sides: list[list[float]] = []
    for key in ("chosen", "rejected") if kind == "pairs" else ("completion",):
        tokens, text = row.get(f"tokens_{key}" if kind == "pairs" else "tokens"), row.get(key)
        if not finite(tokens) or not isinstance(text, str):
            return None
        sides.append([math.log1p(size) for size in (tokens, *form_of(text).values())])
    return [a - b for a, b in zip(*sides, strict=True)] if kind == "pairs" else sides[0]


def _form_sentence(form: FormComparison, state: State) -> str:
    if form.difference is None:
        sentence = f" Length and form alone reach {form.alone:.2f}"
    else:
        change, low, high = (f"{100 * item:+.0f}" for item in form.difference)
        sentence = (
            f" Length and form alone reach {_percent(form.alone)} % (difference {change} points, "
            f"95 % interval {low} to {high})"
        )
    if state in ("improved", "form"):
        finding = "also follows" if state == "improved" else "does not clearly follow"
        sentence += (
            f". The model {finding} the ratings beyond length and form (partial correlation "
            f"{form.correlation:.2f}, 99 % interval {form.low:.2f} to {form.high:.2f})"
        )
    return f"{sentence}."


def _thumbs(rows: Sequence[Json]) -> tuple[list[float], list[float]] | None:
    rated = [
        (label, reward)
        for row in rows
        if (label := verdict(row)) is not None and (reward := value(row)) is not None
    ]
    ups = [reward for label, reward in rated if label]
    downs = [reward for label, reward in rated if not label]
    return (ups, downs) if min(len(ups), len(downs)) >= MIN_ROWS else None


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


def _before(first: Sequence[Json] | None, last: Sequence[Json], baseline: float) -> str:
    """A sentence about the value before training; empty if it was not measured."""
    if first is None:
        if _equals_reference(last):
            return " Every reward is 0: the model equals its reference."
        return ""
    if _equals_reference(first):
        return (
            f" Before training, this share is {_percent(baseline)} % by definition, because the "
            "model equals its reference."
        )
    return f" Before training: {_percent(baseline)} %."


def _equals_reference(rows: Sequence[Json]) -> bool:
    return equals_reference({"rows": rows}) and not _is_of_reward_model(rows)


def _of_pairs(last: Sequence[Json], first: Sequence[Json] | None) -> Verdict | None:
    """How many pairs the reward ranks correctly."""
    hits, count = _ordered(last)
    if count < MIN_ROWS:
        return None
    low, high = wilson(hits, count)
    earlier = _ordered(first) if first is not None else (0, 0)
    before = (
        earlier[0] / earlier[1] if earlier[1] and any(margin(row) for row in first or ()) else 0.5
    )
    state, form = _compare_with_form(_state(low, high, before), "pairs", last, first)
    return Verdict(
        state,
        f"The model ranks the chosen answer above the rejected one in {_percent(hits / count)} % "
        f"of {number(count)} held-out pairs (95 % interval {_percent(low)} to {_percent(high)} %; "
        f"chance is 50 %).{_before(first, last, before)}{form}"
        f"{_rows_missing(state, count, rows_needed(None))}",
        RANKING, hits / count, low, high, before, count,
    )  # fmt: skip


def _ordered(rows: Sequence[Json]) -> tuple[int, int]:
    margins = [m for row in rows if is_pair(row) and (m := margin(row)) is not None]
    return sum(m > 0 for m in margins), len(margins)


def _of_scores(last: Sequence[Json], first: Sequence[Json] | None) -> Verdict | None:
    """How well the reward ranks rows as their scores do."""
    pairs = [
        (reward, row["target"])
        for row in last
        if finite(row.get("target")) and (reward := value(row)) is not None
    ]
    if len(pairs) < 4 or (rank := spearman([a for a, _ in pairs], [b for _, b in pairs])) is None:
        return None
    # Fisher's transformation of a correlation, with the variance of a rank correlation (Fieller et
    # al. 1957).
    centre, half = (
        math.atanh(max(-0.999999, min(0.999999, rank))),
        Z95 * math.sqrt(1.06 / (len(pairs) - 3)),
    )
    low, high = math.tanh(centre - half), math.tanh(centre + half)
    state, form = _compare_with_form(_state(low, high, 0.0), "scores", last, first)
    return Verdict(
        state,
        f"On {number(len(pairs))} held-out rows the model's reward and the scores of the data "
        f"have a rank correlation of "
        f"{rank:.2f} ({_interval(low, high)}). 0 is chance.{form}",
        RANKING, rank, low, high, 0.0, len(pairs),
    )  # fmt: skip


def _of_demonstrations(last: Sequence[Json], first: Sequence[Json] | None) -> Verdict | None:
    """The change of the log-probability of held-out answers, paired by row."""
    if first is None or any(is_pair(row) or verdict(row) is not None for row in last):
        return None
    pairs = _paired(_by_id(first, per_token), _by_id(last, per_token))
    if len(pairs) < MIN_ROWS:
        return None
    low, high = mean_interval([after - before for before, after in pairs])
    change = mean(after - before for before, after in pairs)
    assert change is not None
    return Verdict(
        _state(low, high, 0.0),
        f"The log-probability per token of {number(len(pairs))} held-out answers changed by "
        f"{_signed(change)} nats "
        f"(95 % interval {_signed(low)} to {_signed(high)}).",
        "Likelier held-out answers do not show that new answers are better.",
        change, low, high, 0.0, len(pairs),
    )  # fmt: skip


def _by_id(rows: Sequence[Json], measure: Any) -> dict[str, float]:
    """The mean of a measure over the rows of each id."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if isinstance(row.get("id"), str) and (number := measure(row)) is not None:
            values.setdefault(row["id"], []).append(number)
    return {key: math.fsum(group) / len(group) for key, group in values.items()}


def _paired(before: Mapping[str, float], after: Mapping[str, float]) -> list[tuple[float, float]]:
    return [(before[key], after[key]) for key in after if key in before]


def _signed(change: float) -> str:
    return f"{change:+.3g}"


def win_rate_verdict(judge: Json) -> Verdict | None:
    """The verdict of a judge on two models, from its win rates in ``compare.json``: improved only
    if the win rate is above one half, and also if the answers of both were equally long.

    None if the judge gave no verdict.
    """
    rate, controlled = judge["win_rate"], judge["length_controlled"]
    if rate is None or controlled is None:
        return None
    state = _state(rate["low"], rate["high"], 0.5)
    titles = {"improved": "The candidate is better", "worse": "The baseline is better"}
    title = titles.get(state, "No clear difference")
    if state != "unclear" and _state(controlled["low"], controlled["high"], 0.5) != state:
        state, title = "form", "No clear difference beyond length"
    shares = [
        f"{_percent(r['value'])} % (95 % interval {_percent(r['low'])} to {_percent(r['high'])} %)"
        for r in (rate, controlled)
    ]
    count = judge["wins"] + judge["ties"] + judge["losses"]
    return Verdict(
        state,
        f"By {judge['judge']}, the candidate wins on {shares[0]} of {number(count)} prompts, and "
        f"would win on {shares[1]} if the answers of both were equally long; chance is 50 %.",
        "",
        rate["value"], rate["low"], rate["high"], 0.5, count, title,
    )  # fmt: skip


def forgetting_line(forgetting: object) -> str:
    """A comparison of the losses of other texts, as run.json and compare.json have it, in one line;
    empty without one.
    """
    if not isinstance(forgetting, Mapping):
        return ""
    values = {name: value for name, value in cast(Json, forgetting).items() if finite(value)}
    if not {"before", "after", "difference", "perplexity_ratio", "num_texts"} <= values.keys():
        return ""
    interval = (
        f" (95 % interval {values['low']:+.3f} to {values['high']:+.3f})"
        if {"low", "high"} <= values.keys()
        else ""
    )
    return (
        f"Forgetting on {number(values['num_texts'])} other texts: {values['difference']:+.3f} "
        f"nats per {cast(Json, forgetting).get('unit', 'token')}{interval}, from "
        f"{values['before']:.3f} to {values['after']:.3f}; the perplexity is "
        f"multiplied by {values['perplexity_ratio']:.4g}."
    )


# The end of `valence train`

MAX_SYSTEM, MAX_PROMPT = 200, 80
"""Characters of a system message and a prompt that a command is shown with."""


def outputs(run_dir: Path) -> list[str]:
    """The last lines on a finished run: the verdict, what was written, the most important warning
    and the next command.
    """
    run = RunRecord.read(run_dir)
    result = run_verdict(run)
    paths = [f"{title:>7}  {run_dir / n}" for title, n in FILES.items() if (run_dir / n).exists()]
    warning = main_warning(run)
    lines = [*paths, *([f"Warning: {warning}"] if warning else []), f"Next: {_next_command(run)}"]
    forgetting = list(filter(None, [forgetting_line(run.facts.get("forgetting"))]))
    if run.last is None:
        return [*lines, *forgetting, f"{result.text} {result.advice}"]
    return [result.text, result.advice, *forgetting, *lines]


def _next_command(run: RunRecord) -> str:
    """A command that shows what the model does now."""
    path = shlex.quote(str(run.path))
    rows: Sequence[Json] = run.last["rows"] if run.last is not None else ()
    if _is_of_reward_model(rows):
        return f"valence evaluate {path} --data FILE"
    rollout = run.config.get("rollout")
    named = _names_of_tools(rollout if isinstance(rollout, Mapping) else {})
    if "rollout.environment" in named:  # it reads the columns of rows
        return " ".join([f"valence sample {path} --data FILE", *named.values()])
    questions = (_question(str(row.get("prompt", ""))) for row in rows)
    system, prompt = next(filter(None, questions), ("", "Who are you?"))
    first = f" --system {shlex.quote(system)}" if system else ""
    # as the report's samples
    command = f"valence sample {path}{first} --prompt {shlex.quote(prompt)} --temperature 0"
    return " ".join([command, *named.values()])


def _names_of_tools(rollout: Json) -> dict[str, str]:
    """Arguments that name the tools of a run: a run folder alone does not execute them."""
    values = {f"rollout.{name}": rollout.get(name) for name in ("tools", "environment")}
    return {
        name: shlex.quote(
            f"{name}=[{', '.join(map(str, value))}]"
            if isinstance(value, list)
            else f"{name}={value}"
        )
        for name, value in values.items()
        if value
    }


def _question(prompt: str) -> tuple[str, str] | None:
    """The system message and the question of a row's prompt; None unless both are short lines."""
    # a chat is shown with the names of its roles
    _, *turns = re.split(r"^(system|user|assistant|tool): ", prompt, flags=re.MULTILINE)
    roles, texts = turns[::2], [text.rstrip("\n") for text in turns[1::2]]
    if not turns:
        texts = ["", prompt]
    elif roles == ["user"]:
        texts = ["", *texts]
    elif roles != ["system", "user"]:
        return None
    system, question = texts
    is_short = len(system) <= MAX_SYSTEM and 0 < len(question) <= MAX_PROMPT
    return (system, question) if is_short and (system + question).isprintable() else None
