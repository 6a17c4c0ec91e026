"""Sample completions as rows to score and train on: the first part of an offline round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from valence.config.load import LoadedRecipe
from valence.config.schema import Rollout, SourceSettings
from valence.data.detect import COLUMNS
from valence.data.format_table import FORMATS, is_in_a_tree
from valence.data.load import load
from valence.data.sources import Row, read_rows
from valence.data.split import PromptSplit
from valence.distributed.process_group import (
    Group,
    SingleProcess,
    check_ranks_agree,
    gather_objects,
)
from valence.errors import UserError
from valence.jobs.row_job import START_OVER, Line, RowJob, check_line
from valence.models.build import check_positions
from valence.models.digest import model_digest
from valence.models.memory import DEFAULT_COMPLETIONS
from valence.options import SampleOptions
from valence.reports.formatting import number
from valence.reports.run_record import CHECKPOINTS, is_run
from valence.rollouts.protocol import Sampling
from valence.storage import Journal, writing
from valence.targets import load_target, with_files
from valence.training.episodes import episodes_of
from valence.training.evaluate import as_text
from valence.training.open_run import open_run
from valence.training.sampling import PolicySampler, check_can_generate
from valence.training.saved_models import At
from valence.training.trainer import Trainer
from valence.types import (
    Chat,
    Completion,
    Content,
    Episode,
    Ids,
    Origin,
    Prompt,
    content_id,
)
from valence.version import __version__

MODEL_FACTS = ("model", "vocabulary", "template")
"""Facts that must agree to append completions to a file."""
DIFFERENT_SAMPLING = f"add --append to append answers to the file; {START_OVER}"
READING_DEFAULTS = {"temperature": 0.7, "max_new_tokens": 256}
"""Defaults for completions that people read.

Rows to train on are sampled at temperature 1, the distribution of the model, at which the
completions of small models are incoherent.
"""
HEAD_ROWS = 20
"""Rows to look at for the column of the prompts."""


def for_reading(options: SampleOptions, source: LoadedRecipe) -> SampleOptions:
    """Apply ``READING_DEFAULTS`` where neither the options nor the recipe set a value, unless the
    recipe has a reward.
    """
    if source.recipe.reward:
        return options
    unset = {
        name: value
        for name, value in READING_DEFAULTS.items()
        if getattr(options, name) is None and source.settings[f"rollout.{name}"].is_default
    }
    return replace(options, **unset)


def resolve(options: SampleOptions, rollout: Rollout, is_online: bool) -> tuple[int, int, Sampling]:
    """Completions per prompt, completions per batch, and sampling parameters.

    Raises UserError for a value out of range.
    """
    n = options.n or (rollout.num_rollouts if is_online else 1)
    at_once = options.at_once or rollout.at_once or DEFAULT_COMPLETIONS
    values: dict[str, Any] = {}
    for name in ("temperature", "top_p", "max_new_tokens"):
        value = getattr(options, name)
        values[name] = getattr(rollout, name) if value is None else value
    return n, at_once, Sampling(**values, seed=options.seed)


@dataclass(frozen=True)
class SampleCounts:
    """Completions in the file and those of earlier calls; for this call, the number of truncated
    completions and of tokens.
    """

    answers: int
    earlier: int
    truncated: int
    tokens: int


def sample_rows(
    target: str,
    options: SampleOptions,
    *,
    overrides: Sequence[str] = (),
    at: At = None,
    console: Console | None = None,
    command: str = "valence.sample_rows(...)",
    group: Group | None = None,
    store_immediately: bool = False,
    fix: str | None = None,
) -> SampleCounts:
    """Write a model's completions of prompts as JSON Lines to ``options.out``: prompt, completion,
    its tokens with their log-probabilities, and the sampling parameters.

    target: a run's folder (its newest weights, or those of the checkpoint ``at``), a recipe (its
    initial model), or a model's or adapter's folder or hub id. Without prompts in the options, they
    are those that the recipe trains on. group: processes that sample a share each.
    store_immediately, for one process: do not lose an answer that has ended, even if the program is
    killed, and do not load the model if all answers exist and its files are unchanged. After an
    interruption, the rounding of the other answers may differ from that of an undisturbed call.
    fix: what to do if the file has other completions, for messages; by default, options of
    ``valence sample``.

    The completions of the prompt at position k depend on the seed and k alone. Raises UserError for
    invalid arguments.
    """
    assert options.out is not None
    out, questions = options.out, options.questions
    sources, source = _sources(target, options, overrides)
    recipe = source.recipe
    n, at_once, sampling = resolve(options, recipe.rollout, bool(recipe.reward))
    with RowJob(
        out,
        [s.path for s in sources],
        window=max(1, at_once // n),
        lines_per_item=n,
        fresh=options.fresh,
        append=MODEL_FACTS if options.append else None,
        fix=fix or (START_OVER if options.append else DIFFERENT_SAMPLING),
        console=console,
        group=group,
    ) as job:
        files = [
            s.model_dump(mode="json", exclude_defaults=True) | {"path": _path_from(out.parent, s)}
            for s in sources
        ]
        split = source.recipe.data.split
        held_out = [asdict(split)] if split else []
        chats = [q if isinstance(q, str) else asdict(q) for q in questions]
        facts = {"prompts": [*chats, *files, *held_out], "answers": n, **asdict(sampling)}
        job.check_facts(facts)
        prompts = _prompts(questions, sources, split)
        files_of_model = model_files(target, source, at) if store_immediately else None
        about = {} if files_of_model is None else {"model_files": files_of_model}
        if about and _has_all(job, prompts, about):
            total = len(prompts) * n
            job.print_status(f"{number(total)} answers in {out} (all of them were already there)")
            return SampleCounts(total, total, 0, 0)
        is_local = recipe.rollout.engine == "hf"
        note = "" if is_local else " (this command samples in this process, not on a server)"
        noun = "answer" if n == 1 else "answers"
        job.print_status(f"{number(len(prompts))} prompts, {n} {noun} each; loading {target}{note}")
        run = open_run(target, overrides, group=job.group, at=at, console=job.console)
        check_can_generate(run.prepared.method, target)
        transform = SampleTransform(run, n, sampling, at_once, job.group)
        items = [TokenizedPrompt(k, p, _tokenize(run, p)) for k, p in enumerate(prompts)]
        _check_lengths(run, items, sampling)
        model_facts = transform.model_facts()
        facts |= model_facts
        check_ranks_agree(
            job.group,
            lambda: {**facts, "prompts": [prompt.id for prompt in prompts]},
            "let all processes read the same files",
        )
        job.check_facts(model_facts)
        transform.request_id = content_id(facts)
        if store_immediately:
            transform.pending = PendingAnswers(out, transform.request_id)
        tally = job.run(
            transform,
            items,
            len(items),
            "sampling",
            {
                **{"target": target, "step": run.step, "command": command},
                **{"torch": torch.__version__, **about},
            },
            batch_size=job.window * transform.num_shares,
        )
        if transform.pending is not None:
            transform.pending.remove()
    counts = SampleCounts(
        tally.rows, tally.earlier, transform.num_truncated, transform.num_tokens or 0
    )
    earlier = f" ({number(counts.earlier)} of them were already there)" if counts.earlier else ""
    num_new = counts.answers - counts.earlier
    truncated = (
        f"; {number(counts.truncated)} of {number(num_new)} were truncated"
        if counts.truncated
        else ""
    )
    job.print_status(f"{number(counts.answers)} answers in {out}{earlier}{truncated}")
    return counts


def answers(
    target: str,
    options: SampleOptions,
    *,
    overrides: Sequence[str] = (),
    at: At = None,
    console: Console | None = None,
    group: Group | None = None,
) -> list[tuple[str, Completion]]:
    """Each prompt as text, with a completion to read. Arguments as for ``sample_rows``."""
    sources, source = _sources(target, options, overrides)
    prompts = _prompts(options.questions, sources, source.recipe.data.split)
    recipe = source.recipe
    n, _, sampling = resolve(for_reading(options, source), recipe.rollout, bool(recipe.reward))
    run = open_run(target, overrides, group=group or SingleProcess(), at=at, console=console)
    check_can_generate(run.prepared.method, target)
    items = [TokenizedPrompt(k, p, _tokenize(run, p)) for k, p in enumerate(prompts)]
    _check_lengths(run, items, sampling)
    return [
        (as_text(prompt.prompt, run.prepared.tokenizer), completion)
        for prompt, completions in zip(prompts, run.sample(prompts, sampling, n), strict=True)
        for completion in completions
    ]


# Prompts


def _path_from(folder: Path, source: SourceSettings) -> str:
    """The path of a file of prompts; relative if it is in this folder, which may be moved."""
    path, folder = Path(source.path).resolve(), folder.resolve()
    is_inside = path.is_file() and path.is_relative_to(folder)
    return str(path.relative_to(folder)) if is_inside else source.path


def _sources(
    target: str, options: SampleOptions, overrides: Sequence[str]
) -> tuple[list[SourceSettings], LoadedRecipe]:
    """Files of prompts, and the recipe."""
    if options.data or options.prompt:
        source = with_files(target, options.data, overrides)
        return source.recipe.data.files("eval"), source
    source = load_target(target, overrides)
    recipe = source.recipe
    if not recipe.reward or not recipe.data.train:
        raise UserError(
            "there are no prompts",
            code="rows-missing",
            where="sample",
            fix="add --prompt TEXT or --data FILE",
        )
    return list(recipe.data.train), source


def _prompts(
    questions: Sequence[str | Chat], sources: Sequence[SourceSettings], split: PromptSplit | None
) -> list[Prompt]:
    """In their order: those passed as text, then those of the files that are not held out."""
    # the run decides whether texts become user messages
    prompts = [Prompt(prompt=q, origin=Origin("--prompt", k)) for k, q in enumerate(questions, 1)]
    prompts += [
        prompt
        for prompt in (load_prompts(sources) if sources else ())
        if split is None or not split.is_held_out(prompt.prompt)
    ]
    for prompt in prompts:
        check_line(prompt.info, prompt.origin)
    return prompts


def load_prompts(sources: Sequence[SourceSettings]) -> list[Prompt]:
    """The prompts of the rows of these files, whatever else the rows have."""
    examples = load([_as_prompts(source) for source in sources], "prompt").examples
    return [example for example in examples if isinstance(example, Prompt)]


def _as_prompts(source: SourceSettings) -> SourceSettings:
    """The section of a file that reads only the prompts of its rows."""
    name = source.format or _format(source)
    unread = COLUMNS.difference(FORMATS[name].columns) if name in FORMATS else frozenset[str]()
    keys = {part: column for part, column in source.keys.items() if part not in unread}
    return source.model_copy(update={"format": name, "keys": keys})


def _format(source: SourceSettings) -> str:
    rows = read_rows(source.path, split=source.split, subset=source.subset)
    head = [row.value for row in islice(rows, HEAD_ROWS) if isinstance(row, Row)]
    has_prompt = "prompt" in source.keys or any(row.get("prompt") is not None for row in head)
    has_text = "text" in source.keys or any(row.get("text") is not None for row in head)
    if has_prompt or not has_text:
        return "prompt"
    return "message_tree" if any(map(is_in_a_tree, head)) else "text_prompt"


# Completions


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt with its position among all prompts, on which its random numbers depend."""

    position: int
    prompt: Prompt
    ids: tuple[int, ...]


def _tokenize(run: Trainer, prompt: Prompt) -> tuple[int, ...]:
    """The tokens of a prompt. Raises UserError with the row of the prompt."""
    try:
        return run.prepared.encoder.encode_prompt(prompt.prompt)
    except UserError as error:
        raise UserError(
            error.message, code=error.code, where=str(prompt.origin), fix=error.fix
        ) from error


def _check_lengths(run: Trainer, items: Sequence[TokenizedPrompt], sampling: Sampling) -> None:
    """Raise UserError if the longest prompt with its answer exceeds the positions of the model."""
    longest = max(items, key=lambda item: len(item.ids))
    check_positions(
        run.policy.causal,
        len(longest.ids) + sampling.max_new_tokens,
        "prompt and answer can have",
        code="prompt-too-long",
        where=str(longest.prompt.origin),
        fix="lower --max-new-tokens, or remove this prompt",
    )


class SampleTransform:
    """A prompt becomes ``n`` lines, one per completion, with all columns for rewards and training.

    With several processes that each have the whole model, each samples one window of a batch.
    A window is sampled independently of all others.
    """

    def __init__(
        self, run: Trainer, n: int, sampling: Sampling, at_once: int, group: Group
    ) -> None:
        self.run, self.n, self.sampling, self.group = run, n, sampling, group
        self.window = max(1, at_once // n)
        self.sampler = PolicySampler(
            run.policy, run.prepared.encoder, version=lambda: run.step, batch_size=at_once
        )
        is_split = run.policy.is_sharded or run.policy.is_tensor_parallel
        self.num_shares = 1 if is_split else group.size
        self.request_id = ""
        self.pending: PendingAnswers | None = None
        self.num_tokens: int | None = 0
        self.num_truncated = 0

    def model_facts(self) -> dict[str, Any]:
        """Facts that the completions depend on besides the request. All processes call it."""
        encoder, data = self.run.prepared.encoder, self.run.recipe.data
        use = self.run.prepared.tool_use
        limits = () if use is None else (use.max_turns, use.tools.max_output)
        return {
            **({} if use is None else {"tools": content_id(use.tools.identity, *limits)}),
            "model": model_digest(self.run.policy, adapter=True),
            "vocabulary": encoder.vocab.digest,
            "template": content_id(
                encoder.tokenizer.chat_template,
                encoder.as_chat,
                sorted(data.chat_template_kwargs.items()),
            ),
        }

    def compute(
        self, batch: Sequence[TokenizedPrompt], advance: Callable[[int], None]
    ) -> list[Line]:
        rank = self.group.rank if self.num_shares > 1 else 0
        local_items = batch[rank * self.window : (rank + 1) * self.window]
        local = self._generate(local_items, lambda num_lines: advance(num_lines * self.num_shares))
        if self.num_shares > 1:
            shares = gather_objects(self.group, [[asdict(c) for c in group] for group in local])
            completions = [
                [_completion(fields) for fields in group] for share in shares for group in share
            ]
        else:
            completions = local
        sampled = [completion for group in completions for completion in group]
        self.num_tokens = (self.num_tokens or 0) + sum(len(c.tokens) for c in sampled)
        self.num_truncated += sum(c.stop == "length" for c in sampled)
        return [
            self._line(item, index, completion)
            for item, group in zip(batch, completions, strict=True)
            for index, completion in enumerate(group)
        ]

    def _generate(
        self, items: Sequence[TokenizedPrompt], advance: Callable[[int], None]
    ) -> list[list[Completion]]:
        pending = self.pending
        stored = {} if pending is None else pending.of(items, self.n)
        missing = [item for item in items if item.position not in stored]
        advance((len(items) - len(missing)) * self.n)
        if not missing:
            return [stored[item.position] for item in items]

        def store(i: int, completion: Completion) -> None:
            assert pending is not None
            pending.add(missing[i].position, completion)

        positions = [item.position for item in missing]
        use, rows = self.run.prepared.tool_use, [item.prompt for item in missing]
        try:
            sampled = self.sampler.generate(
                [item.ids for item in missing],
                self.n,
                self.sampling,
                positions=positions,
                progress=advance,
                on_completion=None if pending is None else store,
                episodes=episodes_of(use, rows, self.n, self.sampling, positions) if use else (),
            )
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory with {len(items) * self.n} answers per batch",
                code="out-of-memory",
                where=self.origin(items[0]),
                fix="lower --at-once, then rerun the same command to resume",
            ) from error
        except FloatingPointError as error:
            raise UserError(
                f"{error}, for this prompt or a later one in its batch",
                code="sampling-failed",
                where=self.origin(items[0]),
                fix="add model.dtype=float32; if the error remains, the weights of the model are "
                "not finite: use an earlier checkpoint or another model",
            ) from error
        stored |= {item.position: group for item, group in zip(missing, sampled, strict=True)}
        return [stored[item.position] for item in items]

    def _line(self, item: TokenizedPrompt, index: int, completion: Completion) -> Line:
        prompt, encoder, episode = item.prompt, self.run.prepared.encoder, completion.episode
        content, vocab = prompt.prompt, encoder.vocab
        ids = list((episode and episode.prompt_ids) or item.ids)
        if episode is not None:  # with the tools of the run
            content = encoder.chat_of(content)
            if episode.reset_text:
                content = content.with_user_text(episode.reset_text)
        return {
            **prompt_columns(content),
            "prompt_ids": ids,
            **({} if ids == list(item.ids) else {"row_ids": list(item.ids)}),
            "rendered": str(self.run.prepared.tokenizer.decode(ids)),
            "completion": completion.text if episode is None else list(episode.messages),
            **({} if episode is None else {"episode": _facts_of(completion, episode)}),
            "completion_ids": list(completion.tokens),
            # the digits of a float32
            "logps": [float(f"{logp:.9g}") for logp in completion.logps],
            "stop": completion.stop,
            "version": completion.version,
            "index": index,
            **({"info": dict(prompt.info)} if prompt.info else {}),
            **({"weight": prompt.weight} if prompt.weight != 1.0 else {}),
            "sampled": {
                "by": self.request_id,
                "position": item.position,
                "seed": self.sampling.seed,
                "temperature": self.sampling.temperature,
                "top_p": self.sampling.top_p,
                "vocabulary": vocab.digest,
                **({"mask": list(map(int, completion.mask))} if completion.mask else {}),
            },
        }

    def origin(self, item: TokenizedPrompt) -> str:
        return str(item.prompt.origin)

    def is_valid(self, line: Line, index: int) -> bool:
        sampled = line.get("sampled")
        is_of_request = isinstance(sampled, dict) and sampled.get("by") == self.request_id
        return is_of_request and line.get("index") == index

    def is_line_of(self, line: Line, item: TokenizedPrompt) -> bool:
        return line.get("row_ids", line.get("prompt_ids")) == list(item.ids)

    def error_in(self, line: Line) -> str | None:
        return None


class PendingAnswers:
    """Answers to the prompts of an incomplete window, in a hidden file next to the output.

    Each is one line, which is written when the answer has ended. request: identifies the model and
    the sampling parameters; answers of other requests are ignored.
    """

    def __init__(self, out: Path, request: str) -> None:
        self.path, self.request = out.with_name(f".{out.name}.pending"), request
        self._answers: dict[int, dict[int, Completion]] = {}
        with self._writing():
            # a damaged line is skipped: its answer is generated again
            self._journal = Journal(
                self.path, _pending_answer, lambda *_: None, create=False, sync=False
            )
            for by, position, completion in self._journal:
                if by == request:
                    self._store(position, completion)

    def _store(self, position: int, completion: Completion) -> None:
        self._answers.setdefault(position, {})[completion.index] = completion

    def of(self, items: Sequence[TokenizedPrompt], n: int) -> dict[int, list[Completion]]:
        """The n answers to each prompt that has them all, by its position."""
        answers: dict[int, list[Completion]] = {}
        for item in items:
            prompt_id = content_id("prompt", Ids(item.ids))
            stored = self._answers.get(item.position, {})
            group = [stored[k] for k in sorted(stored) if stored[k].prompt_id == prompt_id]
            if len(group) == n:
                answers[item.position] = group
        return answers

    def add(self, position: int, completion: Completion) -> None:
        """Write an answer. Raises UserError if that fails."""
        record = {"by": self.request, "position": position, "completion": asdict(completion)}
        with self._writing():
            self._journal.append(record)

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.path, "free disk space, then rerun the same command to resume")

    def remove(self) -> None:
        self._journal.remove()


def _pending_answer(record: Mapping[str, Any]) -> tuple[str, int, Completion]:
    return record["by"], record["position"], _completion(record["completion"])


def _has_all(job: RowJob, prompts: Sequence[Prompt], about: Mapping[str, Any]) -> bool:
    """Whether the output has the answers of the same model files to all prompts."""
    lines = job.finished_lines(len(prompts), about, (*MODEL_FACTS,))
    if lines is None:
        return False
    expected = [
        prompt_columns(prompt.prompt) for prompt in prompts for _ in range(job.lines_per_item)
    ]
    return all(
        {name: line.get(name) for name in ("prompt", "tools") if name in line} == dict(columns)
        for line, columns in zip(lines, expected, strict=True)
    )


def model_files(target: str, source: LoadedRecipe, at: At) -> str | None:
    """Identify a target by its settings and the state of its files, without reading weights.

    A file that is written again, moved or replaced has another inode or time of change. None: the
    files are not on this machine.
    """
    model = source.recipe.model
    names = [model.name, model.adapter, model.tokenizer]
    folders = [_model_folder(name) for name in names if name is not None]
    if None in folders:
        return None
    if is_run(target):
        folders.append(Path(target, CHECKPOINTS))
    files = sorted(
        {file for folder in folders if folder for file in folder.rglob("*") if file.is_file()}
    )
    template = source.recipe.data.chat_template
    files += [Path(template)] if template and Path(template).is_file() else []
    states = [file.stat() for file in files]
    recipe = source.recipe.model_dump(mode="json", exclude={"data": {"train", "eval", "test"}})
    return content_id(
        [recipe, at, __version__, torch.__version__, torch.cuda.is_available()],
        [
            [str(file), state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns]
            for file, state in zip(files, states, strict=True)
        ],
    )


def _model_folder(name: str) -> Path | None:
    """The folder of a model on this machine: the name itself, or in the cache of the hub."""
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    paths = (try_to_load_from_cache(name, file) for file in ("config.json", "adapter_config.json"))
    return next((Path(path).parent for path in paths if isinstance(path, str)), None)


def prompt_columns(content: Content) -> Mapping[str, Any]:
    """A prompt as the columns of a row: a transcript as the text that it was read from."""
    if isinstance(content, Chat) and content.transcript is not None:
        content = content.transcript
    if isinstance(content, Chat):
        tools = {"tools": [dict(tool) for tool in content.tools]} if content.tools else {}
        return {"prompt": [dict(message) for message in content.messages], **tools}
    return {"prompt": "" if isinstance(content, Ids) else content}


def _completion(fields: Mapping[str, Any]) -> Completion:
    """A completion from the fields that another process sent as JSON."""
    lists = {name: tuple(fields[name]) for name in ("tokens", "logps", "versions", "mask")}
    episode = fields["episode"] and Episode.from_record(fields["episode"])
    return Completion(**{**fields, **lists, "episode": episode})


def _facts_of(completion: Completion, episode: Episode) -> dict[str, Any]:
    """What the turns of an episode do not show. text: of the last one, as a reward reads it."""
    # times would differ between two calls of the command
    calls = [{k: v for k, v in call.items() if k != "seconds"} for call in episode.calls]
    facts = {"text": completion.text, "end": episode.end, "calls": calls}
    if episode.reward is not None:
        facts["reward"] = episode.reward
    if episode.turn_rewards:
        facts["turn_rewards"] = list(episode.turn_rewards)
    return facts | ({"error": episode.error} if episode.error else {})
