"""A model's answers to prompts of files, written as rows that can be judged and trained on: the
first part of a round offline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from valence.config.load import LoadedRecipe
from valence.config.schema import Rollout, SourceSettings
from valence.data.detect import COLUMNS
from valence.data.formats import FORMATS
from valence.data.load import load
from valence.data.sources import Row, read_rows
from valence.distributed.process_group import (
    Group,
    SingleProcess,
    check_ranks_agree,
    gather_objects,
)
from valence.errors import UserError
from valence.jobs.lines import ANEW, Lines, as_line, check_line
from valence.jobs.score_rows import refuse_inputs
from valence.lifecycle.restore import open_run
from valence.lifecycle.saved_models import At
from valence.models.build import check_positions
from valence.models.digest import model_digest
from valence.reports.console import Progress
from valence.reports.formatting import number
from valence.rollouts.protocol import Sampling
from valence.runs.signals import Stop
from valence.terminal import Terminal, print_message
from valence.trainer.evaluate import as_text
from valence.trainer.sampling import PolicySampler, check_can_generate
from valence.trainer.targets import load_target, with_files
from valence.trainer.trainer import Trainer
from valence.types import Chat, Completion, Content, Ids, Origin, Prompt, content_id
from valence.version import __version__

SAME = ("model", "vocabulary", "template")
"""Facts that answers share which are appended to others."""
ADDED = f"add to it with --append; {ANEW}"
READING = {"temperature": 0.7, "max_new_tokens": 256}
"""How answers to read are sampled, unless the recipe or the command says otherwise.

Rows to train on are sampled at temperature 1, the model's own distribution, at which small models
ramble.
"""
HEAD_ROWS = 20
"""Rows that the column of the prompts is looked for in."""


@dataclass(frozen=True)
class Draws:
    """How many answers to each prompt, and how they are drawn.

    None: as the recipe's ``rollout`` section says; where it has no reward, one answer, and to read
    (``for_reading``) as in ``READING``.
    """

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    at_once: int | None = None
    """Answers that are sampled at once: all that is lost when the program is killed."""
    seed: int = 0

    def for_reading(self, source: LoadedRecipe) -> Draws:
        """The same with the values of ``READING`` where neither these nor the recipe set any."""
        if source.recipe.reward:
            return self
        unset = {
            name: value
            for name, value in READING.items()
            if getattr(self, name) is None and source.settings[f"rollout.{name}"].is_default
        }
        return replace(self, **unset)

    def filled(self, rollout: Rollout, online: bool) -> tuple[int, int, Sampling]:
        """Answers to each prompt, answers at once, and how they are drawn.

        Raises UserError for a value out of range.
        """
        given = {name: value for name, value in asdict(self).items() if value is not None}
        n, at_once = (
            given.pop("n", rollout.num_rollouts if online else 1),
            given.pop("at_once", rollout.at_once),
        )
        section = {
            name: getattr(rollout, name) for name in ("temperature", "top_p", "max_new_tokens")
        }
        return n, at_once, Sampling(**{**section, **given})


@dataclass(frozen=True)
class Counted:
    """What became of the call: answers in the file by now, those of them that an earlier call
    wrote, answers of this call that reached their longest length, and the tokens of this call.
    """

    answers: int
    earlier: int
    cut: int
    tokens: int


def sample_rows(
    target: str,
    out: Path,
    draws: Draws,
    *,
    data: Sequence[str] = (),
    questions: Sequence[str] = (),
    overrides: Sequence[str] = (),
    at: At = None,
    fresh: bool = False,
    append: bool = False,
    console: Console | None = None,
    quiet: bool = False,
    command: str = "valence.sample_rows(...)",
    group: Group | None = None,
) -> Counted:
    """Writes a model's answers to these prompts, one JSON object a line: the prompt, the answer and
    its tokens with their log-probabilities, and how it was drawn.

    target: a run's folder (its newest weights, or those of the checkpoint ``at``), a recipe (the
    model it starts from), or a model's or adapter's folder or hub id. data: files of prompts, or
    sections as in a recipe; questions: prompts as text; with neither, the prompts that the recipe
    trains on. out: what an interrupted call wrote there is kept and gone on from; ``fresh`` moves
    it aside, ``append`` writes other answers of the same model behind it. group: of processes that
    each answer a share.

    The answers to the prompt at position k depend on the seed and k alone. Raises UserError for a
    mistake in the request.
    """
    group, console = group or SingleProcess(), console or Terminal()
    with Stop(console).listening():
        sources, source = _sources(target, data, overrides, asks=not questions)
        recipe = source.recipe
        refuse_inputs(out, sources)
        prompts = _prompts(questions, sources)
        n, at_once, how = draws.filled(recipe.rollout, bool(recipe.reward))
        window = max(1, at_once // n)
        more: dict[str, Any] = {"append": SAME} if append else {"anew": ADDED}
        lines = Lines(out, window * n, fresh=fresh, **more) if group.rank == 0 else None
        facts = {"prompts": _named(sources, questions), "answers": n, **asdict(how)}
        if lines:
            lines.agree(facts)
        if not quiet:
            here = (
                ""
                if recipe.rollout.engine == "hf"
                else " (to be sampled in this process, not by a server)"
            )
            said = (
                f"{number(len(prompts))} prompts, {n} {'answer' if n == 1 else 'answers'} "
                f"each; loading {target}{here}"
            )
            print_message(console, said)
        run = open_run(target, overrides, group=group, at=at, console=console)
        writer = _Writer(run, prompts, n, how, lines, group, window, at_once)
        facts |= writer.facts()
        check_ranks_agree(
            group,
            lambda: {**facts, "prompts": [p.id for p in prompts]},
            "let all processes read the same files",
        )
        if lines:
            lines.agree(writer.facts())
        with lines.open(len(prompts) * n) if lines else nullcontext():
            writer.by = content_id(facts)
            kept = writer.skip()
            if lines:
                lines.go_on(
                    {
                        "target": target,
                        "step": run.step,
                        "command": command,
                        "valence": __version__,
                        "torch": torch.__version__,
                    }
                )
            counted = writer.run_from(kept, console, quiet)
    if not quiet:
        _say(counted, out, console)
    return counted


def answers(
    target: str,
    draws: Draws,
    *,
    data: Sequence[str] = (),
    questions: Sequence[str] = (),
    overrides: Sequence[str] = (),
    at: At = None,
    console: Console | None = None,
    group: Group | None = None,
) -> list[tuple[str, Completion]]:
    """Each prompt, as text, with an answer to read. The request is as for ``sample_rows``."""
    group = group or SingleProcess()
    sources, source = _sources(target, data, overrides, asks=not questions)
    asked = [prompt.prompt for prompt in _prompts(questions, sources)]
    n, _, how = draws.for_reading(source).filled(source.recipe.rollout, bool(source.recipe.reward))
    run = open_run(target, overrides, group=group, at=at, console=console)
    texts = [as_text(content, run.prepared.tokenizer) for content in asked]
    return [
        (text, each)
        for text, own in zip(texts, run.sample(asked, how, n), strict=True)
        for each in own
    ]


# Before a model is loaded


def _sources(
    target: str, data: Sequence[str], overrides: Sequence[str], *, asks: bool
) -> tuple[list[SourceSettings], LoadedRecipe]:
    """Files of prompts, and the recipe."""
    if data or not asks:
        source = with_files(target, data, overrides)
        return list(source.recipe.data.eval), source
    source = load_target(target, overrides)
    recipe = source.recipe
    if not recipe.reward or not recipe.data.train:
        raise UserError(
            "there is nothing to answer",
            code="rows-missing",
            where="sample",
            fix="give --prompt or --data",
        )
    return list(recipe.data.train), source


def _prompts(questions: Sequence[str], sources: Sequence[SourceSettings]) -> list[Prompt]:
    """In their order: those given as text, then those of the files."""
    # the run says whether they become user messages
    asked = [
        Prompt(prompt=text, origin=Origin("--prompt", number))
        for number, text in enumerate(questions, 1)
    ]
    named = [_as_prompts(source) for source in sources]
    found = load(named, "prompt").examples if named else ()
    prompts = asked + [example for example in found if isinstance(example, Prompt)]
    for prompt in prompts:
        check_line(prompt.info, prompt.origin)
    return prompts


def _as_prompts(source: SourceSettings) -> SourceSettings:
    """The section of a file for its prompts alone, whatever else its rows have."""
    name = source.format or _format(source)
    others = COLUMNS.difference(FORMATS[name].columns) if name in FORMATS else frozenset[str]()
    keys = {ours: theirs for ours, theirs in source.keys.items() if ours not in others}
    return source.model_copy(update={"format": name, "keys": keys})


def _format(source: SourceSettings) -> str:
    rows = read_rows(source.path, split=source.split, subset=source.subset)
    head = [row.value for row in islice(rows, HEAD_ROWS) if isinstance(row, Row)]
    has_prompt = "prompt" in source.keys or any(row.get("prompt") is not None for row in head)
    has_text = "text" in source.keys or any(row.get("text") is not None for row in head)
    return "text_prompt" if has_text and not has_prompt else "prompt"


def _named(sources: Sequence[SourceSettings], questions: Sequence[str]) -> list[Any]:
    return [
        *questions,
        *(source.model_dump(mode="json", exclude_defaults=True) for source in sources),
    ]


# Answers to lines


@dataclass
class _Writer:
    """Samples a window of prompts at once and makes lines of their answers.

    ``lines``: of rank 0.
    """

    run: Trainer
    prompts: Sequence[Prompt]
    n: int
    how: Sampling
    lines: Lines | None
    group: Group
    window: int
    at_once: int
    by: str = ""

    def __post_init__(self) -> None:
        run = self.run
        check_can_generate(run.prepared.method)
        self.tokens = [self._encoded(prompt) for prompt in self.prompts]
        self.sampler = PolicySampler(
            run.policy,
            run.prepared.encoder,
            version=lambda: run.step,
            batch_size=self.at_once,
        )
        self.deals = self.group.size > 1 and not (run.policy.is_sharded or run.policy.shared)
        longest = max(range(len(self.tokens)), key=lambda k: len(self.tokens[k]))
        check_positions(
            run.policy.causal,
            len(self.tokens[longest]) + self.how.max_new_tokens,
            "prompt and answer may have",
            code="prompt-too-long",
            where=str(self.prompts[longest].origin),
            fix="give fewer --max-new-tokens, or leave the prompt out",
        )

    def _encoded(self, prompt: Prompt) -> tuple[int, ...]:
        try:
            return self.run.prepared.encoder.encode_prompt(prompt.prompt)
        except UserError as error:
            raise UserError(
                error.what, code=error.code, where=str(prompt.origin), fix=error.fix
            ) from error

    def facts(self) -> dict[str, Any]:
        """What the answers depend on besides the request. All processes come here."""
        encoder, data = self.run.prepared.encoder, self.run.recipe.data
        return {
            "model": model_digest(self.run.policy, adapter=True),
            "vocabulary": encoder.vocab.digest,
            "template": content_id(
                encoder.tokenizer.chat_template,
                encoder.as_chat,
                sorted(data.chat_template_kwargs.items()),
            ),
        }

    def skip(self) -> int:
        """The prompts that are answered already.

        Raises UserError for a line that is not of its prompt.
        """
        if self.lines is None:
            return int(self.group.broadcast(None))
        for at, line in enumerate(self.lines.read()):
            k, index = divmod(at, self.n)
            sampled = line.get("sampled")
            if not isinstance(sampled, dict) or (sampled.get("by"), line.get("index")) != (
                self.by,
                index,
            ):
                raise self.lines.foreign(self.lines.base + at + 1)
            if line.get("prompt_ids") != list(self.tokens[k]):
                what = (
                    f"line {self.lines.base + at + 1} of {self.lines.path} answers another "
                    f"prompt: the data has changed"
                )
                raise UserError(
                    what,
                    code="output-rows-changed",
                    where=str(self.prompts[k].origin),
                    fix="undo the change, or start over with --fresh",
                )
        return int(self.group.broadcast(self.lines.kept // self.n))

    def run_from(self, kept: int, console: Console, quiet: bool) -> Counted:
        """Answers the prompts from this one on.

        Each window is sampled by itself, whatever came before it and whoever does it.
        """
        total, cut, ran = len(self.prompts), 0, 0
        windows = [range(k, min(k + self.window, total)) for k in range(kept, total, self.window)]
        ways = self.group.size if self.deals else 1
        with Progress(console, "sampling", total * self.n, start=kept * self.n, quiet=quiet) as bar:
            for first in range(0, len(windows), ways):
                dealt = windows[first : first + ways]
                begun = dealt[0].start * self.n
                ended = [0]  # of this process; the others have about as many

                def advance(
                    news: int, begun: int = begun, ended: list[int] = ended, ran: int = ran
                ) -> None:
                    ended[0] += news
                    bar.update(min(begun + ended[0] * ways, total * self.n), tokens=ran)

                for window, own in zip(dealt, self._answers(dealt, advance), strict=True):
                    ran += sum(len(each.tokens) for several in own for each in several)
                    cut += sum(each.stop == "length" for several in own for each in several)
                    if self.lines:
                        asked = zip(window, own, strict=True)
                        self.lines.write(
                            [
                                self._line(k, i, each)
                                for k, several in asked
                                for i, each in enumerate(several)
                            ]
                        )
                bar.update(dealt[-1].stop * self.n, tokens=ran)
        return Counted(total * self.n, kept * self.n, cut, ran)

    def _answers(self, dealt: Sequence[range], advance: Any) -> Iterator[list[list[Completion]]]:
        """Those to each of these windows, of which each process has one, if they are dealt."""
        mine = self.group.rank if self.deals else 0
        found = self._generate(dealt[mine], advance) if mine < len(dealt) else []
        if not self.deals:
            return iter([found])
        every = gather_objects(self.group, [[asdict(each) for each in own] for own in found])
        return (
            [[_completion(each) for each in own] for own in answers]
            for answers in every[: len(dealt)]
        )

    def _generate(self, window: range, advance: Any) -> list[list[Completion]]:
        prompts = [self.tokens[k] for k in window]
        try:
            return self.sampler.generate(
                prompts, self.n, self.how, first=window.start, progress=advance
            )
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"there is no memory for {len(prompts) * self.n} answers at once",
                code="out-of-memory",
                where=str(self.prompts[window.start].origin),
                fix="give fewer --at-once; the same command goes on from here",
            ) from error
        except FloatingPointError as error:
            where = str(self.prompts[window.start].origin)
            raise UserError(
                f"{error}, for this prompt or one after it",
                code="sampling-failed",
                where=where,
                fix="look at the model; try float32",
            ) from error

    def _line(self, k: int, index: int, answer: Completion) -> str:
        """One answer, with all that rewards and training read."""
        prompt, tokenizer = self.prompts[k], self.run.prepared.tokenizer
        drawn = {"by": self.by, "position": k, "seed": self.how.seed}
        drawn |= {
            "temperature": self.how.temperature,
            "top_p": self.how.top_p,
            "vocabulary": self.run.prepared.encoder.vocab.digest,
        }
        line = {
            **_shown(prompt.prompt),
            "prompt_ids": list(self.tokens[k]),
            "rendered": str(tokenizer.decode(list(self.tokens[k]))),
            "completion": answer.text,
            "completion_ids": list(answer.tokens),
            # as many digits as a float32 has
            "logps": [float(f"{logp:.9g}") for logp in answer.logps],
            "stop": answer.stop,
            "version": answer.version,
            "index": index,
            **({"info": dict(prompt.info)} if prompt.info else {}),
            **({"weight": prompt.weight} if prompt.weight != 1.0 else {}),
            "sampled": drawn,
        }
        return as_line(line)


def _shown(content: Content) -> Mapping[str, Any]:
    """A prompt as its row has it."""
    if isinstance(content, Chat):
        tools = {"tools": [dict(tool) for tool in content.tools]} if content.tools else {}
        return {"prompt": [dict(turn) for turn in content.messages], **tools}
    return {"prompt": "" if isinstance(content, Ids) else content}


def _completion(told: Mapping[str, Any]) -> Completion:
    """As another process told of it."""
    found = Completion(**told)
    return replace(
        found, tokens=tuple(found.tokens), logps=tuple(found.logps), versions=tuple(found.versions)
    )


def _say(counted: Counted, out: Path, console: Console) -> None:
    earlier = f" ({number(counted.earlier)} of them were there already)" if counted.earlier else ""
    made = counted.answers - counted.earlier
    cut = (
        f"; {number(counted.cut)} of {number(made)} were cut at their longest"
        if counted.cut
        else ""
    )
    print_message(console, f"{number(counted.answers)} answers in {out}{earlier}{cut}")
