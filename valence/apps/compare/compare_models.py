"""Compare two models: both answer held-out prompts, and judges say which answers are better.

The folder of a comparison has ``prompts.jsonl``, the answers of both models, one file of verdicts
for each judge, and the result as ``compare.json`` and ``report.html``. All files of lines are
resumable jobs, so that no prompt is answered or judged twice.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from valence.apps.compare.assertions import (
    COLUMN,
    Assertion,
    check_assertions,
    count_assertions,
    parse_assertions,
)
from valence.apps.compare.benchmarks import BenchmarkResult, read_benchmarks
from valence.apps.compare.run_benchmarks import (
    BATCH_SIZE,
    ComparedModel,
    check_benchmarks,
    run_benchmarks,
    tasks_of,
)
from valence.apps.compare.run_benchmarks import FOLDER as BENCHMARKS
from valence.apps.compare.text_losses import compare_texts, needs_texts
from valence.apps.compare.votes import read_votes
from valence.config.parse import from_yaml
from valence.config.schema import RewardSettings
from valence.data.load import stream
from valence.data.sources import BadRow
from valence.data.split import prompt_key
from valence.errors import UserError
from valence.evaluation.calibration import (
    MIN_AGREEMENT,
    Calibration,
    calibrate,
    count_items,
    describe_calibration,
    read_labels,
    require_agreement,
)
from valence.evaluation.forgetting import Forgetting
from valence.evaluation.judges import AnswerPair, PairJudge, PairVerdict, build_judge
from valence.evaluation.summary import JudgeSummary, summarize
from valence.files import check_path
from valence.jobs.reward_rows import list_rewards, sampled_completion
from valence.jobs.row_job import Line, RowJob, as_line, replace_file
from valence.jobs.sample_rows import load_prompts, prompt_columns, sample_rows
from valence.models.loading import must_exist
from valence.options import CompareOptions, SampleOptions
from valence.reports.console import Progress
from valence.reports.run_record import is_run
from valence.reports.win_rates import win_rate_page
from valence.rewards.build import (
    check_rewards,
    judge_settings,
    list_reward_models,
    reward_names,
)
from valence.rewards.cache import digest
from valence.storage import LOCK_FILE, Lock, add_checksum, part_path, read_json, rename, verify
from valence.targets import load_target, with_files
from valence.terminal import Terminal, print_message
from valence.training.evaluate import as_text
from valence.training.open_run import refuse_tools
from valence.training.reward_models import reward_model, reward_model_must_exist
from valence.training.saved_models import At
from valence.types import Completion, Content, Prompt, content_id
from valence.user_code.sources import are_current

PROMPTS, RESULT, REPORT = "prompts.jsonl", "compare.json", "report.html"
REPLIES = "replies"
"""Folder of the replies of LLM judges."""
SIDES = ("baseline", "candidate")
TAG_COLUMNS = ("tags", "tag")
PEOPLE = "people"
"""Name of the votes among the judges."""
MAX_FOLLOWED = 0.5
"""Share of verdicts that follow the position of the answers, with its 95 % interval, below which a
judge can decide a gate. It is the share of a judge that guesses.
"""
START_OVER = "set --out to another folder, or start over with --fresh, which renames this one"


@dataclass(frozen=True, kw_only=True)
class ModelComparison:
    """models: names of baseline and candidate. answers: for each side the mean length in characters
    and the number of truncated answers. duplicates: rows with a prompt of an earlier row. trained:
    prompts that are in the training data as well, by model. calibrations: of judges that were
    measured against labels. benchmarks: of lm-eval.
    """

    models: tuple[str, str]
    num_prompts: int
    answers: Mapping[str, Mapping[str, float]]
    judges: Sequence[JudgeSummary]
    duplicates: int = 0
    trained: Mapping[str, int] = field(default_factory=dict[str, int])
    calibrations: Sequence[Calibration] = ()
    assertions: Mapping[str, Any] | None = None
    benchmarks: Sequence[BenchmarkResult] = ()
    forgetting: Forgetting | None = None
    notes: Sequence[str] = ()
    folder: str = ""

    def failed_gates(
        self,
        at_least: float | None = None,
        max_broken: int | None = None,
        max_forgetting: float | None = None,
    ) -> list[str]:
        """Sentences about win rates below ``at_least``, too many broken assertions, and a loss of
        other texts that is more than ``max_forgetting`` nats per token above the baseline's.

        A gate without a win rate, or without assertions, fails as well, and so does one whose judge
        may decide by the position of the answers: a judge that guesses does so for half of them.
        """
        failures: list[str] = []
        if at_least is not None:
            rates = {judge.judge: judge.rates.rate for judge in self.judges}
            if not rates:
                failures.append("there is no win rate, because there is no --judge or --votes")
            failures += [
                f"the judge {name} has no win rate"
                if rate is None
                else f"the win rate of the judge {name} is {100 * rate.value:.1f} %, below "
                f"{100 * at_least:g} %"
                for name, rate in rates.items()
                if rate is None or rate.value < at_least
            ]
            failures += [
                f"the judge {judge.judge} preferred the same position in both orders for "
                f"{judge.position.num_followed} of {judge.position.num_decided} pairs, so its "
                f"verdicts may not depend on the answers: the share must be below "
                f"{100 * MAX_FOLLOWED:.0f} % with its interval, whose upper end is "
                f"{100 * judge.position.followed_bound:.0f} %"
                for judge in self.judges
                if judge.position and judge.position.followed_bound >= MAX_FOLLOWED
            ]
        if max_broken is not None:
            num_broken = len(self.assertions["broken"]) if self.assertions else None
            if num_broken is None:
                failures.append("there are no assertions")
            elif num_broken > max_broken:
                is_one = num_broken == 1
                failures.append(
                    f"{num_broken} {'assertion is' if is_one else 'assertions are'} broken, "
                    f"more than {max_broken}"
                )
        if max_forgetting is not None:
            if self.forgetting is None or self.forgetting.unit != "token":
                failures.append(
                    "the models have different tokenizers, so there is no loss per token to compare"
                )
            elif self.forgetting.difference > max_forgetting:
                failures.append(
                    f"the loss of other texts is {self.forgetting.difference:.3f} nats per token "
                    f"larger, more than {max_forgetting:g}"
                )
        return failures

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings."""
        return {
            **dict(zip(SIDES, self.models, strict=True)),
            "prompts": self.num_prompts,
            "duplicates": self.duplicates,
            "trained": dict(self.trained),
            "answers": {side: dict(facts) for side, facts in self.answers.items()},
            "judges": [judge.to_dict() for judge in self.judges],
            "calibrations": [calibration.to_dict() for calibration in self.calibrations],
            **({} if self.assertions is None else {"assertions": dict(self.assertions)}),
            **({"benchmarks": [b.to_dict() for b in self.benchmarks]} if self.benchmarks else {}),
            **({"forgetting": self.forgetting.to_dict()} if self.forgetting else {}),
            "notes": list(self.notes),
            "folder": self.folder,
        }


def compare_models(
    baseline: str,
    candidate: str,
    options: CompareOptions,
    *,
    overrides: Sequence[str] = (),
    at: At = None,
    console: Console | None = None,
    command: str = "valence compare",
) -> ModelComparison:
    """Let two models answer prompts, let judges compare the answers, and write the result.

    baseline, candidate: a run's folder, a recipe, or a model's folder or hub id; the same one on
    both sides is allowed. at: checkpoint of the baseline.

    Raises UserError for invalid arguments, before any model is loaded.
    """
    console = console or Terminal()
    specs = [list_rewards([_read_entry(judge)], None, ()) for judge in options.judge]
    _check_judges(specs, has_votes=options.votes is not None)
    people = None if options.votes is None else read_votes(options.votes, baseline, candidate)
    benchmarks = [] if options.lm_eval is None else read_benchmarks(*options.lm_eval)
    tasks = tasks_of(options)
    if tasks is not None:
        check_benchmarks(tasks)
    questions = ComparisonPrompts()
    has_results = options.votes or options.lm_eval or tasks or needs_texts(options)
    if options.prompts or options.assertions or not has_results:
        questions = _read_prompts(candidate, options.prompts, options.assertions, overrides)
    questions.check_judges(bool(specs))
    questions.check_tag(options.tag)
    trained, notes = count_trained(
        dict(zip(SIDES, (baseline, candidate), strict=True)), questions.by_key, overrides
    )
    if questions.prompts:
        _check_models((baseline, candidate), specs, overrides)
    with closing(ComparisonFolder(options.out, fresh=options.fresh)) as folder:
        folder.write_prompts(questions.prompts)
        calibrations: list[Calibration] = []
        for entries in specs:
            settings = judge_settings(entries[0], "judge")
            files = options.labels or ([settings.labels] if settings and settings.labels else [])
            if files:
                if options.min_agreement is not None:
                    minimum = options.min_agreement
                else:
                    minimum = settings.min_agreement if settings else MIN_AGREEMENT
                is_allowed = options.allow_below or bool(settings and settings.allow_below)
                calibrations.append(folder.calibrate(entries, files, minimum, is_allowed, console))
            elif settings:
                notes.append(f"{settings.model} was not measured against labels (--labels)")
        models = [
            ComparedModel("baseline", baseline, at),
            ComparedModel("candidate", candidate, None),
        ]
        for model in models if questions.prompts else ():
            sample_rows(
                model.target,
                SampleOptions(
                    n=1,
                    temperature=options.temperature,
                    top_p=options.top_p,
                    max_new_tokens=options.max_new_tokens,
                    at_once=options.at_once,
                    seed=options.seed,
                    data=[str(folder.path / PROMPTS)],
                    out=folder.answers_path(model.side),
                ),
                overrides=overrides,
                at=model.at,
                console=console,
                command=command,
                store_immediately=True,
                fix=START_OVER,
            )
        all_pairs = folder.read_pairs(questions.prompts, options.tag)
        results = check_assertions(all_pairs, questions.assertions)
        pairs = [pair for pair in all_pairs if pair.prompt_key in questions.judged]
        summaries: list[JudgeSummary] = []
        if people is not None:
            summaries.append(summarize(PEOPLE, *people, seed=options.seed))
            all_pairs = all_pairs or people[0]
        for entries in specs:
            with closing(build_judge(entries, reward_model, folder.path / REPLIES)) as judge:
                path = folder.verdicts_path(judge)
                verdicts = folder.judge(judge, pairs, console=console)
                cost = judge.cost
            _check_failures(verdicts, options.max_failed, path)
            summary = summarize(judge.name, pairs, verdicts, seed=options.seed, cost=cost)
            summaries.append(summary)
        if tasks is not None:
            benchmarks += run_benchmarks(
                tasks,
                models,
                folder.path / BENCHMARKS,
                batch_size=options.at_once or BATCH_SIZE,
                overrides=overrides,
                console=console,
            )
        forgetting = compare_texts(
            options,
            models,
            folder.path,
            has_prompts=bool(questions.prompts),
            overrides=overrides,
            notes=notes,
            console=console,
        )
        result = ModelComparison(
            models=_model_names(baseline, candidate),
            num_prompts=len(all_pairs),
            answers={
                side: _answer_facts([getattr(pair, side) for pair in all_pairs])
                for side in SIDES
                if all_pairs
            },
            judges=summaries,
            duplicates=questions.duplicates,
            trained=trained,
            calibrations=calibrations,
            assertions=count_assertions(results) if results else None,
            benchmarks=benchmarks,
            forgetting=forgetting,
            notes=notes,
            folder=str(options.out),
        )
        folder.write_result(result.to_dict())
        return result


def _check_judges(specs: Sequence[Sequence[RewardSettings]], *, has_votes: bool) -> None:
    """Raise UserError for a judge that does not exist, or that has the name of another one, which
    results and gates could not distinguish.
    """
    entries = [entry for entries in specs for entry in entries]
    check_rewards(entries)
    if has_votes and PEOPLE in reward_names(entries):
        raise UserError(
            f"a judge has the name {PEOPLE!r}, which is the name of the --votes",
            code="reward-name-duplicate",
            where="--judge",
            fix="set another name: --judge '{reward: NAME, name: OTHER}'",
        )


def _check_models(
    targets: Sequence[str], specs: Sequence[Sequence[RewardSettings]], overrides: Sequence[str]
) -> None:
    """Raise UserError for a model or reward model that does not exist, and for tools that are not
    trusted. Loads no weights.
    """
    for target in targets:
        source = load_target(target, overrides)
        must_exist(source.recipe.model.name, target)
        if is_run(target):
            refuse_tools(source)
    for entries in specs:
        for entry in list_reward_models(entries):
            reward_model_must_exist(*entry)


def _read_entry(judge: str) -> str:
    """An entry of a reward section: the content of a YAML file, or the text itself."""
    path = Path(judge)
    if path.suffix not in (".yaml", ".yml"):
        return judge
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(
            f"the file cannot be read ({reason})",
            code="file-not-readable",
            where=judge,
            fix="use a YAML file with an entry of the reward section of a recipe",
        ) from error
    return json.dumps(from_yaml(text, judge).values)


def _model_names(baseline: str, candidate: str) -> tuple[str, str]:
    names = Path(baseline).name or baseline, Path(candidate).name or candidate
    if names[0] == names[1]:
        names = baseline, candidate
    if names[0] == names[1]:
        names = f"{baseline} (baseline)", f"{candidate} (candidate)"
    return names


def _answer_facts(answers: Sequence[Completion]) -> dict[str, float]:
    return {
        "mean_characters": sum(len(answer.text) for answer in answers) / len(answers),
        "truncated": sum(answer.stop == "length" for answer in answers),
        "empty": sum(not answer.text.strip() for answer in answers),
    }


def _check_failures(verdicts: Sequence[PairVerdict], max_failed: float, path: Path) -> None:
    errors = [verdict.error for verdict in verdicts if verdict.preference is None]
    if len(errors) > max_failed * len(verdicts):
        raise UserError(
            f"the judge gave no verdict on {len(errors)} of {len(verdicts)} prompts, more than "
            f"--max-failed allows; the first error: {errors[0]}",
            code="verdicts-missing",
            where=str(path),
            fix="fix the cause of this error in the judge, its server or the prompts. Then remove "
            "this file and rerun the same command, which reuses the answers (for other prompts, "
            "start over with --fresh). Or raise --max-failed",
        )


# Prompts


@dataclass
class ComparisonPrompts:
    """by_key: each prompt once, by its content. assertions: of prompts, by the same key. judged:
    keys of the prompts whose answers are judged. duplicates: rows with a prompt of another row.
    """

    by_key: dict[str, Prompt] = field(default_factory=dict[str, Prompt])
    assertions: dict[str, list[Assertion]] = field(default_factory=dict[str, list[Assertion]])
    judged: set[str] = field(default_factory=set[str])
    duplicates: int = 0

    @property
    def prompts(self) -> list[Prompt]:
        return list(self.by_key.values())

    def add(self, example: Prompt) -> str:
        """Add the prompt of a row. Returns its key."""
        key = prompt_key(example.prompt)
        self.duplicates += key in self.by_key
        self.by_key.setdefault(key, example)
        if (value := example.info.get(COLUMN)) is not None:
            assertions = parse_assertions(value, str(example.origin))
            self.assertions[key] = [*self.assertions.get(key, []), *assertions]
        return key

    def check_tag(self, column: str | None) -> None:
        """Raise UserError for a column of tags that no prompt has."""
        columns = sorted({name for example in self.prompts for name in example.info})
        if column and self.by_key and column not in columns:
            raise UserError(
                f"no prompt has a column {column!r}",
                code="column-missing",
                where="--tag",
                fix=f"use a column of the prompts: {', '.join(columns)}"
                if columns
                else "remove --tag, or add this column to the prompts",
            )

    def check_judges(self, has_judges: bool) -> None:
        """Raise UserError for prompts without a judge, or a judge without prompts."""
        if self.judged and not has_judges and not self.assertions:
            raise UserError(
                "no judge compares the answers",
                code="judge-missing",
                where="compare",
                fix="add --judge with a rule (`valence docs` lists them), a function such as "
                "my_rewards.py:score, a reward model or the address of a server; or let people "
                "compare: `valence collect BASELINE CANDIDATE`",
            )
        if has_judges and not self.judged:
            raise UserError(
                "there are no prompts for the judge, which does not compare the answers to "
                "--assertions",
                code="rows-missing",
                where="compare",
                fix="add --prompts FILE with held-out prompts",
            )


def _read_prompts(
    target: str, prompts: Sequence[str], assertions: Sequence[str], overrides: Sequence[str]
) -> ComparisonPrompts:
    if not prompts and not assertions:
        data = load_target(target, overrides).recipe.data
        write = ""
        if data.split is not None:
            share = f"--share {data.split.share:g}"
            write = (
                f"write them with `valence split {shlex.quote(data.train[0].path)} {share}`, then "
            )
        raise UserError(
            "there are no prompts to answer",
            code="rows-missing",
            where="compare",
            fix=f"{write}add --prompts FILE with held-out prompts",
        )
    sources = with_files(target, [*prompts, *assertions], overrides).recipe.data.files("eval")
    questions = ComparisonPrompts()
    for example in load_prompts(sources[: len(prompts)]) if prompts else ():
        questions.judged.add(questions.add(example))
    for example in load_prompts(sources[len(prompts) :]) if assertions else ():
        if COLUMN not in example.info:
            raise UserError(
                f"the row has no column {COLUMN!r}",
                code="assertion-missing",
                where=str(example.origin),
                fix="add the column to the row; pass files without assertions with --prompts",
            )
        questions.add(example)
    return questions


def count_trained(
    targets: Mapping[str, str], keys: Iterable[str], overrides: Sequence[str]
) -> tuple[dict[str, int], list[str]]:
    """For each run the number of prompts that its training data has as well, and notes about
    training data that cannot be read.
    """
    counts: dict[str, int] = {}
    notes: list[str] = []
    prompts = set(keys)
    for side, target in targets.items():
        if not is_run(target):
            continue
        try:
            data = load_target(target, overrides).recipe.data
            examples = (example for source in data.train for _, example in stream(source))
            contents = (e.prompt for e in examples if not isinstance(e, BadRow))
            trained = {
                prompt_key(content)
                for content in contents
                if data.split is None or not data.split.is_held_out(content)
            }
        except (UserError, OSError) as error:
            reason = str(error).partition("\n")[0]
            notes.append(
                f"the training data of the {side} cannot be read, so it is unknown whether it "
                f"contains these prompts ({reason})"
            )
            continue
        if num_trained := len(prompts & trained):
            counts[side] = num_trained
    return counts, notes


# The folder


class ComparisonFolder:
    """The files of a comparison, which one process at a time uses until ``close``.

    Raises UserError for a folder that something else wrote, or that another process uses.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        check_path(path)
        self.path = path
        if path.exists() and not path.is_dir():
            raise UserError(
                "the path is a file",
                code="path-is-file",
                where=f"--out {path}",
                fix="set --out to a folder",
            )
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else set[str]()
        if names - {part_path(path / PROMPTS).name, LOCK_FILE} and PROMPTS not in names:
            raise UserError(
                "this folder exists and was not written by `valence compare`",
                code="path-exists",
                where=str(path),
                fix="set --out to another folder",
            )
        try:
            if fresh and PROMPTS in names:
                with self._locked():  # the lock moves with the folder
                    others = (path.with_name(f"{path.name}.{n}") for n in count(1))
                    rename(path, others)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the folder cannot be created or moved ({error.strerror})",
                code="folder-not-writable",
                where=str(path),
                fix="set --out to a folder in which you have write permission",
            ) from error
        self._use = ExitStack()
        self._use.enter_context(self._locked())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Inside the block, this process alone uses the folder. Raises UserError."""
        lock = Lock(self.path)
        try:
            lock.take()
        except UserError as error:
            raise UserError(
                error.message.replace("another run", "another comparison").replace(
                    "run folder", "folder"
                ),
                code=error.code,
                where=str(self.path),
                fix="wait until it ends, or use another folder with --out"
                if error.code == "run-locked"
                else "make the folder writable, or use another folder with --out",
            ) from error
        try:
            yield
        finally:
            lock.release()

    def close(self) -> None:
        self._use.close()

    def answers_path(self, side: str) -> Path:
        return self.path / f"answers.{side}.jsonl"

    def verdicts_path(self, judge: PairJudge) -> Path:
        """Another file for a judge of the same name with other settings."""
        return self.path / f"verdicts.{judge.name}.{digest(judge.identity)[:8]}.jsonl"

    def write_prompts(self, examples: Sequence[Prompt]) -> None:
        """Raises UserError if the folder has answers to other prompts."""
        rows = [
            {**prompt_columns(e.prompt), **({"info": dict(e.info)} if e.info else {})}
            for e in examples
        ]
        content = "".join(f"{as_line(row)}\n" for row in rows)
        path = self.path / PROMPTS
        if path.exists() and path.read_text(encoding="utf-8") != content:
            raise UserError(
                "the folder contains a comparison on different prompts",
                code="output-settings-differ",
                where=str(path),
                fix=START_OVER,
            )
        replace_file(path, content)

    def read_pairs(self, examples: Sequence[Prompt], tag: str | None) -> list[AnswerPair]:
        """The answers of both models, with the tags of their prompts."""
        if not examples:
            return []
        sides = [
            [json.loads(line) for line in self.answers_path(side).read_bytes().splitlines()]
            for side in SIDES
        ]
        return [
            AnswerPair(
                id=content_id(prompt_key(example.prompt), *(row["completion"] for row in rows)),
                prompt=as_readable(example.prompt),
                baseline=sampled_completion(rows[0]),
                candidate=sampled_completion(rows[1]),
                tags=_tags(example, tag),
                origin=str(example.origin),
                prompt_key=prompt_key(example.prompt),
            )
            for example, *rows in zip(examples, *sides, strict=True)
        ]

    def calibrate(
        self,
        entries: Sequence[RewardSettings],
        labels: Sequence[str],
        minimum: float,
        allow_below: bool,
        console: Console,
    ) -> Calibration:
        """Measure a judge against labels. Raises UserError if it agrees too little."""
        rated, done = read_labels(labels), 0
        with (
            closing(build_judge(entries, reward_model, self.path / REPLIES)) as judge,
            Progress(
                console,
                f"measuring {judge.name}",
                count_items(judge, rated),
                brief=True,
            ) as bar,
        ):

            def advance(num_new: int) -> None:
                nonlocal done
                done += num_new
                bar.update(done)

            calibration = calibrate(judge, rated, advance)
        print_message(console, describe_calibration(calibration))
        require_agreement(calibration, minimum, allow_below=allow_below, setting="--allow-below")
        return calibration

    def judge(
        self, judge: PairJudge, pairs: Sequence[AnswerPair], *, console: Console
    ) -> list[PairVerdict]:
        """The verdicts of one judge. Those that the folder has are not repeated, unless the judge
        has another identity, an unknown one, or has loaded other files.
        """
        path = self.verdicts_path(judge)
        modules = path.with_name(f"{path.name}.modules.json")
        sources = _read_sources(modules)
        is_fresh = judge.identity is None or sources is None or not are_current(sources)
        with RowJob(path, (), window=judge.window, fresh=is_fresh, console=console) as job:
            job.check_facts({"judge": judge.identity})
            transform = VerdictTransform(
                judge, min(judge.window, len(pairs)), modules, {} if is_fresh else sources or {}
            )
            job.run(transform, pairs, len(pairs), "judging", {"judge": judge.name})
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        return [verdict for line in lines if (verdict := PairVerdict.from_dict(line))]

    def write_result(self, result: Mapping[str, Any]) -> None:
        replace_file(self.path / RESULT, json.dumps(result, indent=1, ensure_ascii=False))
        replace_file(self.path / REPORT, win_rate_page(result))


def _read_sources(path: Path) -> dict[str, Any] | None:
    """The modules that a judge had loaded; none if no file records them. None: damaged."""
    try:
        return verify(read_json(path), required=True)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError):
        return None


def as_readable(content: Content) -> str:
    """A prompt as text; a conversation with its roles."""
    tokenizer: Any = None  # only prompts that are tokens need one
    return as_text(content, tokenizer)


def _tags(example: Prompt, column: str | None) -> tuple[str, ...]:
    names = TAG_COLUMNS if column is None else (column,)
    columns = [example.info.get(name) for name in names]
    value = next((value for value in columns if value not in (None, "", [], ())), ())
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(str(tag) for tag in values))


class VerdictTransform:
    """A pair becomes a line with both answers and the verdict.

    max_failures: pairs of a batch; if the judge fails on as many at once, it is broken.
    modules: file that records ``judge.sources`` before the lines are written. sources: its content.
    """

    num_tokens = None

    def __init__(
        self, judge: PairJudge, max_failures: int, modules: Path, sources: Mapping[str, Any]
    ) -> None:
        self.pair_judge, self.max_failures = judge, max_failures
        self.modules, self.sources = modules, sources

    def compute(self, batch: Sequence[AnswerPair], advance: Callable[[int], None]) -> list[Line]:
        """Raises UserError if the judge is broken. The batch is then not written."""
        verdicts = self.pair_judge.judge(batch, advance)
        num_failures = sum(verdict.preference is None for verdict in verdicts)
        if num_failures >= self.max_failures:  # the last batch may be smaller
            raise UserError(
                f"the judge {self.pair_judge.name} failed on this prompt and on all others of its "
                f"batch ({len(batch)} prompts); the first error: {verdicts[0].error}",
                code="judge-failures",
                where=batch[0].origin,
                fix="fix the cause of this error in the judge, its server or the prompts, then "
                "rerun the same command to resume (if the prompts have changed, with --fresh)",
            )
        if sources := self.pair_judge.sources:
            self.sources = {**self.sources, **sources}
            replace_file(self.modules, json.dumps(add_checksum(self.sources), indent=1))
        return [
            {
                "pair": pair.id,
                "prompt": pair.prompt,
                "baseline": pair.baseline.text,
                "candidate": pair.candidate.text,
                **verdict.to_dict(),
            }
            for pair, verdict in zip(batch, verdicts, strict=True)
        ]

    def origin(self, item: AnswerPair) -> str:
        return item.origin

    def is_valid(self, line: Line, index: int) -> bool:
        return PairVerdict.from_dict(line) is not None

    def is_line_of(self, line: Line, item: AnswerPair) -> bool:
        return line.get("pair") == item.id

    def error_in(self, line: Line) -> str | None:
        return line["error"] if line["preference"] is None else None
