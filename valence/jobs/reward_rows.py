"""Rewards of the answers in files of rows, written beside the rows: the second part of a round
offline.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rich.console import Console

from valence.config.load import LISTS, load_recipe
from valence.config.schema import RewardSettings, SourceSettings
from valence.data.encode import Encoder
from valence.data.formats import columns_read
from valence.data.load import stream
from valence.data.sources import BadRow, Row
from valence.distributed.process_group import Group, SingleProcess, gather_objects
from valence.errors import UserError
from valence.jobs.lines import ANEW, Lines, as_line, check_line
from valence.jobs.score_rows import Tally, facts_of_tokens, refuse_inputs, say
from valence.lifecycle.reward_models import reward_model
from valence.reports.console import Progress
from valence.rewards.build import identities, reward_of
from valence.rewards.run import close, score_all
from valence.runs.signals import Stop
from valence.terminal import Terminal
from valence.trainer.evaluate import as_text
from valence.trainer.methods import method_of
from valence.trainer.prepare import Prepared, prepare
from valence.trainer.targets import load_target, with_files
from valence.types import (
    Chat,
    Completion,
    Demonstration,
    Ids,
    Judgement,
    Reward,
    Score,
    content_id,
)
from valence.version import __version__

WINDOW = 128
"""Answers that are judged and written together: what is lost at most when the program is killed."""
WRITTEN = ("score", "parts", "error")
"""The new columns."""
BARE: dict[str, Any] = {"method": "rejection", "model": {"name": "none"}}
"""What a reward without a recipe is read as part of."""

Told = tuple[Row, Completion | Score]
"""A row with the completion that a reward is given, or why there is none."""


def score_by_reward(
    data: Sequence[str],
    out: Path,
    *,
    rewards: Sequence[str] = (),
    target: str | None = None,
    overrides: Sequence[str] = (),
    format: str | None = None,
    fresh: bool = False,
    console: Console | None = None,
    quiet: bool = False,
    group: Group | None = None,
) -> Tally:
    """Writes every row of these files with the reward of its answer as ``score`` (and its
    ``parts``), one JSON object a line, in the order of the rows. An answer whose reward failed has
    no score (null), and an ``error`` that says why.

    rewards: as a recipe's reward section has them, added up; by default those of the recipe that
    the target is. target: needed for rows without token ids: its tokenizer makes them. out: what an
    interrupted call wrote there is kept and gone on from; ``fresh`` moves it aside. group: of
    processes that each judge a share; rank 0 writes.

    Raises UserError for a mistake in the request, and when the reward failed for all answers of a
    window, which is then not written.
    """
    group, console = group or SingleProcess(), console or Terminal()
    with Stop(console).listening():
        specs = specs_of(rewards, target, overrides)
        own = load_target(target, overrides).recipe.data if target is not None else None
        bare = BARE | {"reward": "length"}
        sources = with_files(bare, data, (), recorded=own, format=format).recipe.data.eval
        refuse_inputs(out, sources)
        lines = Lines(out, WINDOW, fresh=fresh) if group.rank == 0 else None
        if lines:
            lines.agree(_facts(sources, specs))
        total, needs_tokens = _read_through(sources)
        prepared = _prepared(target, overrides, needs_tokens)
        if prepared is None and rewards and overrides:
            what = (
                "nothing reads it: the rows have their tokens, and a reward has settings of its own"
            )
            raise UserError(
                what,
                code="option-unused",
                where=overrides[0],
                fix="leave it out, or give --reward '{reward: NAME, settings: {...}}'",
            )
        reader = _Reader(sources, prepared and prepared.encoder)
        reward = reward_of(specs, model=reward_model)
        try:
            if lines:
                lines.agree({"judges": identities(reward)})
                lines.agree(facts_of_tokens(prepared.recipe, prepared.encoder) if prepared else {})
            with lines.open(total) if lines else nullcontext():
                writer = _Writer(lines, reward, group)
                rows = iter(reader)
                tally = writer.skip(rows)
                if lines:
                    lines.go_on({"target": target, "valence": __version__})
                writer.run(rows, tally, total, console, quiet)
        finally:
            close(reward)
    say(tally, out, console, quiet)
    return tally


# The request


def specs_of(
    rewards: Sequence[str], target: str | None, overrides: Sequence[str]
) -> list[RewardSettings]:
    """The sections that these words stand for (a name, or `{reward: NAME, weight: 2}`), or else
    those of the target.
    """
    if rewards:
        listed = ", ".join(
            r if r.lstrip().startswith("{") else json.dumps(r, ensure_ascii=False) for r in rewards
        )
        recipe = load_recipe(
            BARE, [f"reward=[{listed}]"], method_of=method_of, training=False
        ).recipe
        return list(recipe.reward)
    found: list[RewardSettings] = []
    if target is not None:
        found = list(load_target(target, overrides).recipe.reward)
    if not found:
        raise UserError(
            "there is no reward",
            code="reward-missing",
            where="score",
            fix="give --reward, or a recipe that has one",
        )
    return found


def _facts(sources: Sequence[SourceSettings], specs: Sequence[RewardSettings]) -> dict[str, Any]:
    """What the scores depend on."""
    return {
        "data": [s.model_dump(mode="json", exclude_defaults=True) for s in sources],
        "reward": [s.model_dump(mode="json", exclude_defaults=True) for s in specs],
    }


def _read_through(sources: Sequence[SourceSettings]) -> tuple[int, str]:
    """How many rows there are, and the first that has no tokens of its own ("": none).

    Raises UserError for a row that cannot be judged.
    """
    total, bare = 0, ""
    for row, example in chain.from_iterable(map(stream, sources)):
        total += 1
        if isinstance(row, BadRow) or isinstance(example, BadRow):
            bad = row if isinstance(row, BadRow) else example
            assert isinstance(bad, BadRow)
            raise UserError(bad.reason, code=bad.code, where=str(bad.origin), fix=bad.fix)
        if not isinstance(example, Judgement | Demonstration):
            what = "a reward judges one answer to a prompt, and the row holds something else"
            raise UserError(
                what,
                code="row-not-scorable",
                where=str(row.origin),
                fix="give rows with prompt and completion, as `valence sample` writes them",
            )
        there = next((name for name in WRITTEN if row.value.get(name) is not None), None)
        if there is not None:
            raise UserError(
                f"the row has a column {there!r} already",
                code="row-column-taken",
                where=str(row.origin),
                fix="judge rows without it",
            )
        check_line(row.value, row.origin)
        if not bare and not _is_sampled(row.value):
            bare = str(row.origin)
    return total, bare


def _is_sampled(value: Mapping[str, Any]) -> bool:
    """Whether a row has its answer as text and as tokens."""
    return (
        isinstance(value.get("completion"), str)
        and bool(value.get("completion_ids"))
        and bool(value.get("prompt_ids"))
    )


def _prepared(target: str | None, overrides: Sequence[str], where: str) -> Prepared | None:
    """What makes tokens of rows that have none, if there are any."""
    if not where:
        return None
    if target is None:
        what = "the row has no prompt_ids and completion_ids beside its text"
        raise UserError(
            what,
            code="row-tokens-missing",
            where=where,
            fix="name a model, recipe or run before --data: its tokenizer makes them",
        )
    empty = [f"data.{name}=[]" for name in LISTS]
    return prepare(load_target(target, [*overrides, *empty]), rewards=False)


# Rows to lines


@dataclass(frozen=True)
class _Reader:
    """Rows with the completion that a reward is given, or why there is none."""

    sources: Sequence[SourceSettings]
    encoder: Encoder | None

    def __iter__(self) -> Iterator[Told]:
        for source in self.sources:
            for row, example in stream(source):
                assert isinstance(row, Row)
                yield row, self._completion(row, example)

    def _completion(self, row: Row, example: Any) -> Completion | Score:
        value = row.value
        if self.encoder is None or _is_sampled(value):
            prompt, tools = value.get("prompt") or "", value.get("tools")
            return Completion(
                prompt_id=content_id("prompt", Ids(tuple(value["prompt_ids"]))),
                tokens=tuple(value["completion_ids"]),
                logps=tuple(value.get("logps") or ()),
                text=value["completion"],
                stop=value.get("stop") or "eos",
                version=value.get("version") or 0,
                index=value.get("index") or 0,
                prompt=prompt if isinstance(prompt, str) else tuple(prompt),
                rendered=value.get("rendered") or "",
                info=value.get("info") or {},
                tools=tuple(tools) if isinstance(tools, list) else (),
            )
        unit, tokenizer = self.encoder.encode(example), self.encoder.tokenizer
        if not hasattr(unit, "answers"):
            return Score(None, error=f"the row cannot be put into tokens: {unit.reason}")  # type: ignore[union-attr]
        [answer] = unit.answers  # type: ignore[union-attr]
        content = example.prompt
        read = {name for f in ("demonstration", "messages") for name in columns_read(f, {})}
        return Completion(
            prompt_id=content_id("prompt", content),
            tokens=answer.ids,
            logps=(),
            text=as_text(example.completion, tokenizer),
            stop="eos" if answer.complete else "length",
            prompt=content.messages if isinstance(content, Chat) else as_text(content, tokenizer),
            rendered=str(tokenizer.decode(list(unit.prompt_ids))),  # type: ignore[union-attr]
            info={name: each for name, each in value.items() if name not in read},
            tools=content.tools if isinstance(content, Chat) else (),
        )


@dataclass
class _Writer:
    """Judges a window of answers at once and makes a line of each row. ``lines``: of rank 0."""

    lines: Lines | None
    reward: Reward
    group: Group

    def skip(self, rows: Iterator[Told]) -> Tally:
        """Takes the rows that have their lines already.

        Raises UserError for a line that is not of its row.
        """
        if self.lines is None:
            kept = self.group.broadcast(None)
            return Tally(rows=len(list(islice(rows, kept))), earlier=kept)
        tally = Tally(earlier=self.lines.kept)
        for number, (line, (row, _)) in enumerate(zip(self.lines.read(), rows, strict=False), 1):
            if not _is_scored(line):
                raise self.lines.foreign(number)
            if {name: each for name, each in line.items() if name not in WRITTEN} != json.loads(
                as_line(_plain(row.value))
            ):
                what = (
                    f"{self.lines.path}:{number} is not of this row as it is now: the data "
                    f"has changed"
                )
                raise UserError(what, code="output-rows-changed", where=str(row.origin), fix=ANEW)
            _add(tally, row, line)
        self.group.broadcast(tally.rows)
        return tally

    def run(
        self, rows: Iterator[Told], tally: Tally, total: int, console: Console, quiet: bool
    ) -> None:
        """Judges these rows. They are read a window at a time."""
        with Progress(console, "judging", total, start=tally.rows, quiet=quiet) as bar:
            while window := list(islice(rows, WINDOW)):
                done = tally.rows

                def advance(news: int) -> None:
                    nonlocal done
                    done = min(done + news * self.group.size, tally.rows + len(window))
                    bar.update(done)

                scores = self._scores([told for _, told in window], advance)
                _check_some(window, scores)
                made = [_line(row, score) for (row, _), score in zip(window, scores, strict=True)]
                if self.lines:
                    self.lines.write([as_line(line) for line in made])
                for (row, _), line in zip(window, made, strict=True):
                    _add(tally, row, line)
                bar.update(tally.rows)

    def _scores(self, told: Sequence[Completion | Score], advance: Any) -> list[Score]:
        """Each process judges a share."""
        answers = [each for each in told if isinstance(each, Completion)]
        own = score_all(self.reward, answers[self.group.rank :: self.group.size], progress=advance)
        every = gather_objects(
            self.group, [[each.value, dict(each.parts), each.error] for each in own]
        )
        found: list[Score] = [Score(None)] * len(answers)
        for rank, share in enumerate(every):
            found[rank :: self.group.size] = [
                Score(value, parts, error) for value, parts, error in share
            ]
        rest = iter(found)
        return [next(rest) if isinstance(each, Completion) else each for each in told]


def _check_some(window: Sequence[Told], scores: Sequence[Score]) -> None:
    """Raises UserError when the reward itself has failed, as when a server is down: a later call
    may do better.
    """
    judged = [
        (row, score)
        for (row, told), score in zip(window, scores, strict=True)
        if isinstance(told, Completion)
    ]
    if judged and all(score.value is None for _, score in judged):
        row, score = judged[0]
        what = (
            f"the reward failed for all {len(judged)} answers from here on; the first: "
            f"{score.error}"
        )
        raise UserError(
            what,
            code="reward-failures",
            where=str(row.origin),
            fix="fix the reward, then run the same command again to resume",
        )


def _line(row: Row, score: Score) -> dict[str, Any]:
    """A row with its score. A failure is never a number."""
    parts = {"parts": dict(score.parts)} if score.parts else {}
    if score.value is not None and math.isfinite(score.value):
        return {**_plain(row.value), "score": score.value, **parts}
    error = score.error or f"the reward gave {score.value}"
    finite = {name: each for name, each in score.parts.items() if math.isfinite(each)}
    return {
        **_plain(row.value),
        "score": None,
        **({"parts": finite} if finite else {}),
        "error": error,
    }


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what is written here: empty columns of these names may be there."""
    return {name: each for name, each in value.items() if name not in WRITTEN}


def _is_scored(line: Mapping[str, Any]) -> bool:
    score = line.get("score")
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    return is_number or ("score" in line and score is None and isinstance(line.get("error"), str))


def _add(tally: Tally, row: Row, line: Mapping[str, Any]) -> None:
    failed = {"error": line["error"]} if line["score"] is None else {}
    tally.add({"origin": str(row.origin), **failed})
