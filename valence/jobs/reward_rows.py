"""Score the completions of rows with a reward: the second part of an offline round."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from rich.console import Console

from valence.config.load import LISTS, load_recipe
from valence.config.schema import RewardSettings, SourceSettings
from valence.data.encode import Encoder
from valence.data.formats import columns_read
from valence.data.load import stream
from valence.data.sources import BadRow, Row
from valence.distributed.process_group import Group, gather_objects
from valence.errors import UserError, refuse_unused
from valence.jobs.row_job import Line, RowJob, Tally, as_line, check_line
from valence.jobs.score_rows import token_facts
from valence.options import ScoreOptions
from valence.rewards.build import identities, reward_of
from valence.rewards.run import close, score_all
from valence.targets import load_target, with_files
from valence.training.evaluate import as_text
from valence.training.prepare import Prepared, prepare
from valence.training.reward_models import reward_model
from valence.types import (
    Chat,
    Completion,
    Demonstration,
    Episode,
    Ids,
    Judgement,
    Reward,
    Score,
    content_id,
)

WINDOW = 128
"""Completions that are scored and written together."""
ADDED = ("score", "parts", "error")
"""The added columns, besides `feedback` in rows that do not have it."""
BARE: dict[str, Any] = {"method": "rejection", "model": {"name": "none"}}
"""The recipe for a reward that is not part of a recipe."""

Pair = tuple[Row, Completion | Score]
"""A row with the completion to score, or a failed score with the reason."""


def score_by_reward(
    target: str | None,
    options: ScoreOptions,
    *,
    overrides: Sequence[str] = (),
    console: Console | None = None,
    group: Group | None = None,
) -> Tally:
    """Write every row of ``options.data`` with the reward of its completion as ``score`` (and its
    ``parts``) to ``options.out``, as JSON Lines in the order of the rows. If the reward fails, the
    score is null and ``error`` has the reason. What the reward says in words becomes ``feedback``,
    unless the row has feedback.

    target: needed for rows without token ids, for its tokenizer, and without ``options.reward``: a
    recipe with a reward. group: processes that score a share each; rank 0 writes.

    Raises UserError for invalid arguments, and when the reward fails for all completions of a
    batch, which is then not written.
    """
    assert options.out is not None
    overrides = [*overrides, *options.settings]
    specs = list_rewards(options.reward, target, overrides)
    recipe_data = load_target(target, overrides).recipe.data if target is not None else None
    bare = BARE | {"reward": "length"}
    source = with_files(bare, options.data, (), recorded=recipe_data, format=options.format)
    sources = source.recipe.data.files("eval")
    paths = [s.path for s in sources]
    with RowJob(
        options.out, paths, window=WINDOW, fresh=options.fresh, console=console, group=group
    ) as job:
        job.check_facts(
            {
                "data": [s.model_dump(mode="json", exclude_defaults=True) for s in sources],
                "reward": [s.model_dump(mode="json", exclude_defaults=True) for s in specs],
            }
        )
        num_rows, first_without_ids = _check_rows(sources)
        prepared = _prepare(target, overrides, first_without_ids)
        if prepared is None and options.reward:
            fix = "write settings of a reward as --reward '{reward: NAME, settings: {...}}'"
            refuse_unused(overrides, "because the rows have token ids", fix)
        reward = reward_of(specs, model=reward_model)
        try:
            job.check_facts({"judges": identities(reward)})
            job.check_facts(token_facts(prepared.recipe, prepared.encoder) if prepared else {})
            tally = job.run(
                RewardTransform(reward, job.group),
                _read_pairs(sources, prepared and prepared.encoder),
                num_rows,
                "scoring",
                {"target": target},
            )
        finally:
            close(reward)
    job.report_scores(tally)
    return tally


# Before anything is scored


def list_rewards(
    rewards: Sequence[str], target: str | None, overrides: Sequence[str]
) -> list[RewardSettings]:
    """The reward sections for these arguments (a name, or `{reward: NAME, weight: 2}`), by default
    those of the target.
    """
    if rewards:
        entries = ", ".join(
            r if r.lstrip().startswith("{") else json.dumps(r, ensure_ascii=False) for r in rewards
        )
        recipe = load_recipe(BARE, [f"reward=[{entries}]"], training=False).recipe
        return list(recipe.reward)
    specs = list(load_target(target, overrides).recipe.reward) if target is not None else []
    if not specs:
        raise UserError(
            "the recipe has no reward" if target is not None else "the reward is missing",
            code="reward-missing",
            where="score",
            fix="add --reward NAME (`valence docs` lists names), or use a recipe with a reward",
        )
    return specs


def _check_rows(sources: Sequence[SourceSettings]) -> tuple[int, str]:
    """The number of rows, and the origin of the first without token ids ("" if all have them).

    Raises UserError for a row that cannot be scored.
    """
    num_rows, first_without_ids = 0, ""
    for row, example in chain.from_iterable(map(stream, sources)):
        num_rows += 1
        for part in (row, example):
            if isinstance(part, BadRow):
                raise UserError(part.reason, code=part.code, where=str(part.origin), fix=part.fix)
        assert isinstance(row, Row)
        if not isinstance(example, Judgement | Demonstration):
            raise UserError(
                "a reward scores one completion per row, but this row has none or several",
                code="row-not-scorable",
                where=str(row.origin),
                fix="use rows with a prompt and a completion, such as those of `valence sample`",
            )
        existing = next((name for name in ADDED if row.value.get(name) is not None), None)
        if existing is not None:
            raise UserError(
                f"the row already has a column {existing!r}",
                code="row-column-taken",
                where=str(row.origin),
                fix="rename or remove this column in the file",
            )
        check_line(row.value, row.origin)
        if not first_without_ids and not _has_token_ids(row.value):
            first_without_ids = str(row.origin)
    return num_rows, first_without_ids


def _has_token_ids(value: Mapping[str, Any]) -> bool:
    """Whether a row has its completion as text or an episode, and as tokens."""
    is_episode = isinstance(value.get("episode"), Mapping)
    is_text = isinstance(value.get("completion"), list if is_episode else str)
    return is_text and bool(value.get("completion_ids")) and bool(value.get("prompt_ids"))


def _prepare(target: str | None, overrides: Sequence[str], where: str) -> Prepared | None:
    """The tokenizer of the target, if there is a row without token ids (``where``)."""
    if not where:
        return None
    if target is None:
        raise UserError(
            "the row has no tokens (prompt_ids and completion_ids)",
            code="row-tokens-missing",
            where=where,
            fix="name a model, recipe or run that tokenizes the text: valence score MODEL "
            "--data FILE --reward REWARD --out FILE",
        )
    no_rows = [f"data.{name}=[]" for name in LISTS]
    return prepare(load_target(target, [*overrides, *no_rows]), rewards=False)


# Completions


def _read_pairs(sources: Sequence[SourceSettings], encoder: Encoder | None) -> Iterator[Pair]:
    for row, example in chain.from_iterable(map(stream, sources)):
        assert isinstance(row, Row)
        if encoder is None or _has_token_ids(row.value):
            completion = sampled_completion(row.value)
            error = completion.episode.error if completion.episode else ""
            yield row, Score(None, error=error) if error else completion
        else:
            yield row, _tokenized_completion(row.value, example, encoder)


def sampled_completion(value: Mapping[str, Any]) -> Completion:
    """The completion of a row as `valence sample` writes it."""
    prompt, tools = value.get("prompt") or "", value.get("tools")
    completion, episode = value["completion"], None
    if isinstance(completion, list):
        facts = value.get("episode") or {}
        names = ("end", "reward", "error")
        episode = Episode(
            messages=tuple(completion),
            calls=tuple(facts.get("calls") or ()),
            turn_rewards=tuple(facts.get("turn_rewards") or ()),
            **{name: facts[name] for name in names if name in facts},
        )
        completion = facts.get("text") or str(completion[-1].get("content") or "")
    return Completion(
        prompt_id=content_id("prompt", Ids(tuple(value["prompt_ids"]))),
        tokens=tuple(value["completion_ids"]),
        logps=tuple(value.get("logps") or ()),
        text=completion,
        stop=value.get("stop") or "eos",
        version=value.get("version") or 0,
        index=value.get("index") or 0,
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        rendered=value.get("rendered") or "",
        info=value.get("info") or {},
        tools=tuple(tools) if isinstance(tools, list) else (),
        mask=tuple(map(bool, (value.get("sampled") or {}).get("mask") or ())),
        episode=episode,
    )


def _tokenized_completion(
    value: Mapping[str, Any], example: Any, encoder: Encoder
) -> Completion | Score:
    """The completion of a row of another format."""
    encoded: Any = encoder.encode(example)
    if not hasattr(encoded, "answers"):
        return Score(None, error=f"the row cannot be tokenized: {encoded.reason}")
    (answer,), tokenizer = encoded.answers, encoder.tokenizer
    prompt, completion = encoder.rendered_as(example.prompt, example.completion)
    format_columns = {name for f in ("demonstration", "messages") for name in columns_read(f, {})}
    return Completion(
        prompt_id=content_id("prompt", prompt),
        tokens=answer.ids,
        logps=(),
        text=as_text(completion, tokenizer),
        stop="eos" if answer.complete else "length",
        prompt=prompt.messages if isinstance(prompt, Chat) else as_text(prompt, tokenizer),
        rendered=str(tokenizer.decode(list(encoded.prompt_ids))),
        info={name: cell for name, cell in value.items() if name not in format_columns},
        tools=prompt.tools if isinstance(prompt, Chat) else (),
    )


class RewardTransform:
    """Adds the score to a row. A failure is never a number."""

    num_tokens = None

    def __init__(self, reward: Reward, group: Group) -> None:
        self.reward, self.group = reward, group

    def compute(self, batch: Sequence[Pair], advance: Callable[[int], None]) -> list[Line]:
        """Score a batch; each process scores a share. Raises UserError if all scores failed."""
        completions = [part for _, part in batch if isinstance(part, Completion)]
        rank, size = self.group.rank, self.group.size
        local = score_all(
            self.reward, completions[rank::size], progress=lambda num: advance(num * size)
        )
        shares = gather_objects(self.group, [score.record for score in local])
        scores = [Score(None)] * len(completions)
        for share_rank, share in enumerate(shares):
            scores[share_rank::size] = [Score(*record) for record in share]
        if scores and all(score.value is None for score in scores):
            # the reward itself failed, for example because its server is down: do not write the
            # errors
            row = next(row for row, part in batch if isinstance(part, Completion))
            raise UserError(
                f"the reward failed for this answer and all others of its batch ({len(scores)} "
                f"answers); the first error: {scores[0].error}",
                code="reward-failures",
                where=str(row.origin),
                fix="fix the cause of this error in the reward, its server or the rows, then "
                "rerun the same command to resume (if the rows have changed, with --fresh)",
            )
        remaining = iter(scores)
        return [
            _line(row, next(remaining) if isinstance(part, Completion) else part)
            for row, part in batch
        ]

    def origin(self, item: Pair) -> str:
        return str(item[0].origin)

    def is_valid(self, line: Line, index: int) -> bool:
        score = line.get("score")
        is_number = isinstance(score, int | float) and not isinstance(score, bool)
        is_error = "score" in line and score is None and isinstance(line.get("error"), str)
        return is_number or is_error

    def is_line_of(self, line: Line, item: Pair) -> bool:
        row = item[0].value
        return _without_added(line, row) == json.loads(as_line(_without_added(row, row)))

    def error_in(self, line: Line) -> str | None:
        return line["error"] if line["score"] is None else None


def _line(row: Row, score: Score) -> Line:
    value = _without_added(row.value, row.value)
    if score.value is not None and math.isfinite(score.value):
        parts = {"parts": dict(score.parts)} if score.parts else {}
        is_added = score.feedback and "feedback" not in value
        feedback = {"feedback": score.feedback} if is_added else {}
        return {**value, "score": score.value, **parts, **feedback}
    finite = {name: part for name, part in score.parts.items() if math.isfinite(part)}
    parts = {"parts": finite} if finite else {}
    return {**value, "score": None, **parts, "error": score.error or f"the score is {score.value}"}


def _without_added(value: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """A line without the columns added to this row, which the row may have if they are empty."""
    added = ADDED if row.get("feedback") else (*ADDED, "feedback")
    return {name: cell for name, cell in value.items() if name not in added}
