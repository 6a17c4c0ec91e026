"""python -m benchmarks.hindsight [--quick] [--look NAME ...] [--seeds N ...] [--out FILE]: what
SmolLM2-135M-Instruct learns from the messages of a simulated user, without a label.

The model has answered the quickstart's questions. A rule accepts or rejects each answer, and the
user writes a complaint or thanks in one of ten phrasings; one message in five is about something
else.

- signal: before any training, the signal log p_teacher - log p by kind of message, with the
  message of the row, with that of another row, and with the opposite one. If they are equal, the
  model does not use the messages. The teacher also answers rejected questions again: how many
  answers does the rule accept then?
- training: the share of answers to 100 held-out questions (greedy) that the rule accepts, before
  and after training with hindsight, with hindsight on messages shuffled between rows, with kto on
  labels, and with sft on accepted answers. Same answers, same number of epochs. Differences are
  paired over seeds.
- cost: time and memory of a step of hindsight and of kto on the same rows, in turns.
- tokens, only if named: on twenty answers with a marked span that a message is about, the AUC of
  the negative signal for marked against other tokens; also without the signal of a neutral message,
  and without the mean signal of the other messages.
- format, only if named: the share of answers to the tuning questions that end with a question, not
  counting repetitions of the prompt, before and after training on messages that ask for it, of the
  teacher, and with the message as part of the question.

Results are appended to a file, by their settings: the same command skips what it has. ``--set``
changes the recipe of hindsight, for example ``--set teacher.weights=live``. ``--questions tuning``
evaluates on 40 other questions, with which settings may be chosen. ``--quick``: signal and cost on
few rows, and hindsight with one seed, without bars. Exit status: 0 all figures reach
their bars, 1 some do not.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from transformers.utils.logging import disable_progress_bar

from benchmarks.hindsight.answerer import Answerer, user_turn
from benchmarks.hindsight.closing_question import (
    closing_question,
    print_closing_question,
    question_rows,
)
from benchmarks.hindsight.marked_spans import marked_answers, marked_spans, print_marked_spans
from benchmarks.hindsight.rows import (
    Arm,
    LoggedAnswer,
    Split,
    logged_answers,
    messages,
    questions,
    training_rows,
)
from benchmarks.hindsight.training import RATES, Record, recipe, steps_of
from benchmarks.hindsight.user import ACCEPTED, MESSAGES, NEW_TOPIC, verdict
from benchmarks.step.memory import peak_above_idle
from examples.demo import assets
from valence.data.hindsight import TeacherContext
from valence.statistics import mean_interval, student_interval
from valence.types import Chat, content_id

EXPERIMENTS = ("signal", "training", "cost")
NAMED_EXPERIMENTS = ("tokens", "format")
"""Experiments that run only when ``--look`` names them."""
ARMS: tuple[Arm, ...] = ("hindsight", "shuffled", "kto", "sft")
NUM_SIGNAL, NUM_AGAIN = 48, 24
"""Answers whose signal is measured, and rejected ones that the teacher answers again."""
QUICK_ROWS = 16
NUM_FORMAT_ROWS = 60
"""Rows whose messages ask for a closing question."""
MAX_TIME, MAX_MEMORY = 1.6, 1.2
"""Bars of the cost: that of hindsight, relative to kto."""


class Results:
    """Measurements in a file, one on each line, by their settings."""

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.records: dict[str, Record] = {
            record["id"]: record for record in map(json.loads, lines)
        }

    def get(self, settings: Record) -> Record | None:
        return self.records.get(content_id(settings))

    def add(self, settings: Record, values: Record) -> Record:
        record = {"id": content_id(settings), "settings": settings} | values
        self.records[record["id"]] = record
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        return record


def judged(question_texts: Sequence[str], answers: Sequence[tuple[str, bool]]) -> Record:
    """Verdicts of the rule on answers, with the form of the answers."""
    kinds = [
        verdict(question, text, is_finished=is_finished)
        for question, (text, is_finished) in zip(question_texts, answers, strict=True)
    ]
    words = [text.split() for text, _ in answers]
    return {
        "accepted": kinds.count(ACCEPTED) / len(kinds),
        "kinds": dict(Counter(kinds)),
        "words": fmean(map(len, words)),
        "distinct": fmean(len(set(text)) / max(1, len(text)) for text in words),
        "answers": [text for text, _ in answers],
    }


# Before training


def signal(model: Answerer, context: TeacherContext, answers: Sequence[LoggedAnswer]) -> Record:
    """The teacher's signal for each row, with its message, with that of another row, and with the
    opposite one: thanks for a rejected answer, a complaint about an accepted one.
    """
    prompts = [user_turn(answer.question) for answer in answers]
    texts = [answer.answer for answer in answers]
    plain = model.logps(prompts, texts)
    rng = random.Random(0)
    opposites = ["too long" if answer.kind == ACCEPTED else ACCEPTED for answer in answers]
    variants = {
        "true": messages(answers, 0, shuffled=False),
        "shuffled": messages(answers, 0, shuffled=True),
        "opposite": [(rng.choice(MESSAGES[kind]), kind) for kind in opposites],
    }
    record: Record = {}
    for name, written in variants.items():
        contexts = [
            context.prompt(prompt, text, None)
            for prompt, (text, _) in zip(prompts, written, strict=True)
        ]
        teacher = model.logps([c for c in contexts if isinstance(c, Chat)], texts)
        rows = [
            {
                "answer": answer.kind,
                "message": kind,
                "mean": float((after - before).clamp(-5, 5).mean()),
                "end": float(after[-1] - before[-1]),
                "clipped": float(((after - before).abs() > 5).float().mean()),
            }
            for answer, (_, kind), before, after in zip(
                answers, written, plain, teacher, strict=True
            )
        ]
        record[name] = rows
    return record


def answer_again(
    model: Answerer, context: TeacherContext, answers: Sequence[LoggedAnswer]
) -> Record:
    """The teacher's answers to rejected rows, with the complaint in its context and without."""
    rng = random.Random(0)
    question_texts = [answer.question for answer in answers]
    prompts = [user_turn(question) for question in question_texts]
    contexts = [
        context.prompt(prompt, rng.choice(MESSAGES[answer.kind]), None)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return {
        "before": judged(question_texts, model.answers(prompts)),
        "after": judged(
            question_texts, model.answers([c for c in contexts if isinstance(c, Chat)])
        ),
    }


def print_signal(record: Record) -> None:
    """Print the mean signal by kind of answer and of message, and whether it depends on the
    message.
    """
    print(f"{'signal (nats a token)':24}{'rows':>5}{'true':>9}{'shuffled':>10}{'opposite':>10}")
    for key in ("answer", "message"):
        kinds = [row[key] for row in record["true"]]
        for kind in sorted(set(kinds)):
            means = {
                name: fmean(
                    row["mean"]
                    for row, kind_of_row in zip(record[name], kinds, strict=True)
                    if kind_of_row == kind
                )
                for name in ("true", "shuffled", "opposite")
            }
            print(
                f"{key + ': ' + kind:24}{kinds.count(kind):>5}{means['true']:>+9.3f}"
                f"{means['shuffled']:>+10.3f}{means['opposite']:>+10.3f}"
            )
    for other in ("shuffled", "opposite"):
        values = [
            one["mean"] - two["mean"]
            for one, two in zip(record["true"], record[other], strict=True)
            if one["answer"] != ACCEPTED and NEW_TOPIC not in (one["message"], two["message"])
        ]
        low, high = mean_interval(values)
        print(f"rejected answers, true - {other}: {fmean(values):+.3f} [{low:+.3f}, {high:+.3f}]")
    before, after = record["again"]["before"], record["again"]["after"]
    print(
        f"rejected questions, answered again: accepted {before['accepted']:.2f} without the "
        f"message, {after['accepted']:.2f} with it; words {before['words']:.0f}, "
        f"{after['words']:.0f}",
        flush=True,
    )


def _mean(rows: Sequence[Record], key: str) -> float:
    return fmean(row[key] for row in rows)


# Training


def train(
    recipe_in: Callable[[Path], Record],
    rows: Sequence[Record],
    question_texts: Sequence[str],
    held: Sequence[LoggedAnswer],
) -> Record:
    """Train on the rows, and evaluate. recipe_in: the recipe, for a folder with train.jsonl.
    question_texts, held: see ``evaluate``.
    """
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        start = time.monotonic()
        steps = steps_of(recipe_in(folder), rows, folder)
        seconds = time.monotonic() - start
        after = evaluate(folder / "run" / "model", question_texts, held)
    keys = ("loss", "signal/mean", "signal/clipped", "entropy", "logps/token", "seconds", "memory")
    return {
        "rows": len(rows),
        "seconds": seconds,
        "steps": [{key: step[key] for key in keys if key in step} for step in steps],
    } | after


def evaluate(model: Path, question_texts: Sequence[str], held: Sequence[LoggedAnswer]) -> Record:
    """Verdicts on greedy answers to other questions, and the mean log-probability (nats per token)
    of logged answers to them.
    """
    answerer = Answerer(model)
    prompts = [user_turn(answer.question) for answer in held]
    logps = answerer.logps(prompts, [answer.answer for answer in held])
    return judged(
        question_texts, answerer.answers([user_turn(question) for question in question_texts])
    ) | {
        "logps": [float(logp.mean()) for logp in logps],
        "held": [answer.kind for answer in held],
    }


def margin(before: Record, after: Record) -> float:
    """How much more likely accepted answers have become than rejected ones (nats per token)."""
    changes: dict[bool, list[float]] = {True: [], False: []}
    for kind, old, new in zip(before["held"], before["logps"], after["logps"], strict=True):
        changes[kind == ACCEPTED].append(new - old)
    return fmean(changes[True]) - fmean(changes[False])


def print_training(before: Record, after: dict[Arm, list[Record]]) -> None:
    header = f"{'answers':12}{'seeds':>6}{'accepted':>10}{'words':>8}{'distinct':>10}{'margin':>9}"
    print(f"{header}  rejected")
    rows = [("before", [before]), *after.items()]
    for name, records in rows:
        rejected: Counter[str] = Counter()
        for record in records:
            rejected.update(record["kinds"])
        del rejected[ACCEPTED]
        kinds = ", ".join(f"{kind} {n / len(records):.0f}" for kind, n in rejected.most_common())
        print(
            f"{name:12}{len(records):>6}{_mean(records, 'accepted'):>10.3f}"
            f"{_mean(records, 'words'):>8.1f}{_mean(records, 'distinct'):>10.2f}"
            f"{fmean(margin(before, record) for record in records):>+9.3f}  {kinds}"
        )


def print_difference(label: str, one: Sequence[Record], other: Sequence[Record]) -> float:
    """Print the mean difference in accepted answers, paired over seeds, and its 95 % interval.
    Returns the lower end, NaN for one seed.
    """
    values = [a["accepted"] - b["accepted"] for a, b in zip(one, other, strict=True)]
    low, high = student_interval(values) if len(values) > 1 else (math.nan, math.nan)
    print(f"{label}: {fmean(values):+.3f} [{low:+.3f}, {high:+.3f}]")
    return low


# Cost


def cost(answers: Sequence[LoggedAnswer], model: Path, steps: int, turns: int) -> Record:
    """Median seconds of a step, and median peak memory of a run (GB, the model included), by
    method.
    """
    seconds: dict[str, list[float]] = {"hindsight": [], "kto": []}
    memory: dict[str, list[float]] = {"hindsight": [], "kto": []}
    for turn in range(turns):
        for arm in ("hindsight", "kto") if turn % 2 == 0 else ("kto", "hindsight"):
            with TemporaryDirectory() as scratch:
                folder = Path(scratch)
                settings = recipe(arm, model, folder, 0, 1.0, {})
                settings["train"] = settings["train"] | {"max_steps": steps + 1}
                del settings["train"]["epochs"]
                settings["reference"] = {"cache": "off"}
                rows = training_rows(arm, answers, 0)
                log, peak = peak_above_idle(partial(steps_of, settings, rows, folder))
            seconds[arm] += [step["seconds"] for step in log[1:]]
            memory[arm].append(peak / 1e3)
    return {
        arm: {"seconds": median(seconds[arm]), "memory": median(memory[arm])}
        for arm in ("hindsight", "kto")
    }


def parse_overrides(texts: Sequence[str]) -> Record:
    """``section.name=value``, with values as in JSON if they are that, otherwise text."""
    overrides: Record = {}
    for text in texts:
        key, _, value = text.partition("=")
        try:
            overrides[key] = json.loads(value)
        except json.JSONDecodeError:
            overrides[key] = value
    return overrides


Figures = list[tuple[str, bool]]
"""A figure with its bar, and whether it reaches it."""


@dataclass(frozen=True)
class Setup:
    """What all measurements share."""

    model: Path
    results: Results
    overrides: Record
    answers: Sequence[LoggedAnswer]
    quick: bool

    @property
    def context(self) -> TeacherContext:
        return TeacherContext(template=self.overrides.get("teacher.template"))


def look_at_signal(setup: Setup) -> None:
    context, answers = setup.context, setup.answers
    settings = {"look": "signal", "template": context.text("", None), "rows": len(answers)}
    record = setup.results.get(settings)
    if record is None:
        model = Answerer(setup.model)
        rejected = [answer for answer in answers if answer.kind != ACCEPTED]
        record = setup.results.add(
            settings,
            signal(model, context, answers[:NUM_SIGNAL])
            | {"again": answer_again(model, context, rejected[:NUM_AGAIN])},
        )
    print_signal(record)


def look_at_training(
    setup: Setup, arms: Sequence[Arm], seeds: Sequence[int], epochs: float, split: Split
) -> Figures:
    limit = QUICK_ROWS if setup.quick else None
    question_texts, held = questions(split)[:limit], logged_answers(split, limit)
    settings: Record = {"look": "before", "questions": split, "count": len(question_texts)}
    before = setup.results.get(settings) or setup.results.add(
        settings, evaluate(setup.model, question_texts, held)
    )
    after: dict[Arm, list[Record]] = {}
    for seed in seeds:
        for arm in arms:
            is_hindsight = arm not in ("kto", "sft")
            overrides = setup.overrides if is_hindsight else {}
            settings = {
                "look": arm, "seed": seed, "rows": len(setup.answers), "rate": RATES[arm],
                "questions": split, "count": len(question_texts), "epochs": epochs,
                "template": setup.context.text("{feedback}", None) if is_hindsight else None,
                "overrides": overrides,
            }  # fmt: skip
            record = setup.results.get(settings)
            if record is None:
                recipe_of_seed = partial(
                    recipe, arm, setup.model, seed=seed, epochs=epochs, overrides=overrides
                )
                rows = training_rows(arm, setup.answers, seed)
                record = setup.results.add(
                    settings, train(recipe_of_seed, rows, question_texts, held)
                )
            after.setdefault(arm, []).append(record)
            print(
                f"seed {seed} {arm:12} accepted {before['accepted']:.2f} -> "
                f"{record['accepted']:.2f}, margin {margin(before, record):+.3f}, "
                f"{record['seconds']:.0f} s",
                flush=True,
            )
    print_training(before, after)
    figures: Figures = []
    for arm, records in after.items():
        low = print_difference(f"{arm} - before", records, [before] * len(records))
        if arm == "hindsight":
            figures.append((f"hindsight-before from {low:+.3f}>0", low > 0))
    for arm in ("shuffled", "kto", "sft"):
        if "hindsight" in after and arm in after:
            low = print_difference(f"hindsight - {arm}", after["hindsight"], after[arm])
            if arm == "shuffled":
                figures.append((f"hindsight-shuffled from {low:+.3f}>0", low > 0))
    return [] if setup.quick else figures


def look_at_cost(setup: Setup) -> Figures:
    steps, turns = (2, 2) if setup.quick else (6, 4)
    record = cost(setup.answers[:24], setup.model, steps, turns)
    for arm, values in record.items():
        print(f"{arm:12}{values['seconds']:>8.2f} s a step{values['memory']:>8.2f} GB")
    figures: Figures = []
    for key, bar in (("seconds", MAX_TIME), ("memory", MAX_MEMORY)):
        ratio = record["hindsight"][key] / record["kto"][key]
        figures.append((f"{key} {ratio:.2f}<={bar:g}", ratio <= bar))
    return [] if setup.quick else figures


def look_at_tokens(setup: Setup) -> Figures:
    answers = marked_answers()[: QUICK_ROWS if setup.quick else None]
    template = setup.context.text("", None)
    settings = {"look": "tokens", "template": template, "answers": [vars(a) for a in answers]}
    record = setup.results.get(settings) or setup.results.add(
        settings, marked_spans(Answerer(setup.model), setup.context, answers)
    )
    low, high = print_marked_spans(record)["signal"]
    return [] if setup.quick else [(f"tokens [{low:.2f}, {high:.2f}]>0.5", low > 0.5)]


def look_at_format(setup: Setup, seed: int, epochs: float) -> Figures:
    question_texts = questions("tuning")[: QUICK_ROWS if setup.quick else None]
    rows = question_rows(setup.answers[:NUM_FORMAT_ROWS], seed)
    settings: Record = {
        "look": "format", "seed": seed, "rows": len(rows), "rate": RATES["hindsight"],
        "count": len(question_texts), "epochs": epochs,
        "template": setup.context.text("{feedback}", None), "overrides": setup.overrides,
    }  # fmt: skip
    record = setup.results.get(settings)
    if record is None:
        recipe_in = partial(
            recipe, "hindsight", setup.model, seed=seed, epochs=epochs, overrides=setup.overrides
        )
        record = setup.results.add(
            settings,
            closing_question(setup.model, setup.context, recipe_in, rows, question_texts),
        )
    low, high = print_closing_question(record)
    return [] if setup.quick else [(f"format [{low:+.2f}, {high:+.2f}]>0", low > 0)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hindsight", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, one seed, no bars")
    parser.add_argument(
        "--look", nargs="+", choices=(*EXPERIMENTS, *NAMED_EXPERIMENTS), default=EXPERIMENTS
    )
    parser.add_argument("--only", nargs="+", choices=ARMS, default=ARMS, metavar="METHOD")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--questions", choices=("held-out", "tuning"), default="held-out")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--rows", type=int, help="use only the first N logged answers")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of hindsight's recipe"
    )
    parser.add_argument("--out", type=Path, default=Path("hindsight-results.jsonl"))
    options = parser.parse_args(arguments)
    disable_progress_bar()
    quick: bool = options.quick
    setup = Setup(
        assets.smollm2(),
        Results(options.out),
        parse_overrides(options.set),
        logged_answers("training", QUICK_ROWS if quick else options.rows),
        quick,
    )
    figures: Figures = []
    if "signal" in options.look:
        look_at_signal(setup)
    if "training" in options.look:
        arms: Sequence[Arm] = ("hindsight",) if quick else options.only
        seeds = options.seeds[:1] if quick else options.seeds
        epochs = 1.0 if quick else options.epochs
        figures += look_at_training(setup, arms, seeds, epochs, options.questions)
    if "cost" in options.look:
        figures += look_at_cost(setup)
    if "tokens" in options.look:
        figures += look_at_tokens(setup)
    if "format" in options.look:
        figures += look_at_format(setup, options.seeds[0], options.epochs)
    print("; ".join(f"{label} {'held' if held else 'short'}" for label, held in figures))
    return 0 if all(held for _, held in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
