"""One round: prompts answered, answers judged, their tokens measured."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import pstdev
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from valence.distributed.together import gathered
from valence.errors import UserError
from valence.losses.policy import k1, k3
from valence.models.memory import out_of_memory
from valence.models.reference import FrozenReference
from valence.reports.console import Progress
from valence.rewards.build import digests
from valence.rewards.combine import Combined
from valence.rewards.run import Stopped, close, score_all
from valence.rollouts.protocol import Sampling
from valence.runs.signals import Interrupted
from valence.training.evaluate import Evaluation, as_text
from valence.training.measure import went_bad
from valence.training.memory import with_memory
from valence.training.methods import read_of_tokens
from valence.training.online.sample_builders import EXCLUSIONS, RolloutGroup, SampleBuilder
from valence.training.online.sources import InProcess, RolloutEngine, reward_in, sampler_of
from valence.types import Chat, Completion, Mean, MicroBatch, Prompt, Score, TokenizedExample

if TYPE_CHECKING:
    from valence.training.loop import Run
    from valence.training.setup import Corpus

NO_TOKENS = Score(None, error="the answer has no tokens")


@dataclass
class RoundTally:
    """What is told of the answers of a round.

    ``numbers``: means over answers or prompts; ``seconds``: of each phase.
    """

    numbers: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """Sum and count."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    failures: list[str] = field(default_factory=list[str])
    rewards: list[float] = field(default_factory=list[float])
    apart: list[float] = field(default_factory=list[float])
    """Of each answer the sum of k1, in nats."""
    exclusions: Counter[str] = field(default_factory=Counter[str])
    """Completions that must not be trained on, by reason; `completions`, `prompts` and
    `prompts_without` (those that give no example): what they are counted among."""

    def add(self, name: str, values: Sequence[float]) -> None:
        total, count = self.numbers.get(name, (0.0, 0.0))
        self.numbers[name] = total + sum(values), count + len(values)

    @property
    def means(self) -> dict[str, Mean]:
        """For a meter. reward/std, reward/max, reward/min: over all completions."""
        if len(self.rewards) > 1:
            self.numbers["reward/std"] = pstdev(self.rewards), 1.0
        if self.rewards:
            self.numbers["reward/max"] = max(self.rewards), 1.0
            self.numbers["reward/min"] = min(self.rewards), 1.0
        seconds = {f"seconds/{phase}": (spent, 1.0) for phase, spent in self.seconds.items()}
        numbers = self.numbers | seconds
        return {
            name: Mean(*(torch.tensor(each, dtype=torch.float64) for each in pair))
            for name, pair in numbers.items()
        }

    def exclude(
        self, groups: Sequence[RolloutGroup], excluded: Mapping[str, int], num_unused: int
    ) -> None:
        """Count the completions of these groups that must not be trained on, by reason, and the
        groups of which nothing is."""
        num_completions = sum(len(group.answers) for group in groups)
        for reason in EXCLUSIONS:
            count = excluded.get(reason, 0)
            self.add(f"excluded/{reason}", [1.0] * count + [0.0] * (num_completions - count))
        self.add("excluded/prompts", [1.0] * num_unused + [0.0] * (len(groups) - num_unused))
        self.exclusions.update(excluded)
        self.exclusions.update(
            completions=num_completions, prompts=len(groups), prompts_without=num_unused
        )

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began


@dataclass(frozen=True)
class Asked:
    """A prompt to be answered: its tokens, and its row."""

    unit: TokenizedExample
    prompt: Prompt


class Collector:
    """Samples the policy of a run, has its answers judged, and measures them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.method, self.rollout = run.prepared.method, run.recipe.rollout
        self._coming: tuple[list[tuple[int, ...]], int, Future[list[list[Completion]]]] | None = (
            None
        )
        self.latest: tuple[str, str, float | None] | None = None
        """A prompt, one of the last answers to it, and its reward, to be shown."""
        if self.method.is_on_policy:
            run.policy.temperature = self.rollout.temperature

    @cached_property
    def reward(self) -> Combined:
        """What the recipe names."""
        return reward_in(self.run)

    @cached_property
    def judges(self) -> dict[str, str]:
        """What each reward is, as it was loaded: a digest by its name."""
        return digests(self.reward)

    @cached_property
    def generator(self) -> RolloutEngine:
        """What samples."""
        return sampler_of(self.run)

    @cached_property
    def own(self) -> RolloutEngine:
        """What samples the policy itself, also where answers to learn from are another model's."""
        return InProcess(self.run) if self.rollout.engine == "openai" else self.generator

    @property
    def _makes(self) -> SampleBuilder:
        assert self.method.makes is not None
        return self.method.makes

    @property
    def reads(self) -> tuple[str, ...]:
        """What is measured of the tokens of an answer."""
        return read_of_tokens(self.run.recipe, reference=self.run.reference is not None)

    def close(self) -> None:
        """Gives back connections, and stops what was started."""
        if "generator" in self.__dict__:
            self.generator.close()
        if "reward" in self.__dict__:
            close(self.reward)

    def _patient(self) -> AbstractContextManager[None]:
        """One process that ended by itself would be waited for."""
        return self.run.stop.waiting() if self.run.world.size > 1 else nullcontext()

    @contextmanager
    def _tempered(self) -> Iterator[None]:
        """Inside the block, policy and reference are at the temperature of sampling."""
        run, heat = self.run, self.rollout.temperature
        reference = (
            run.reference.engine.tempered(heat)
            if isinstance(run.reference, FrozenReference)
            else nullcontext()
        )
        with run.policy.tempered(heat), reference:
            yield

    # ------------------------------------------------------------------ the phases

    def answers(
        self,
        asked: Sequence[Asked],
        n: int,
        seed: int,
        tally: RoundTally,
        *,
        held_out: bool = False,
    ) -> list[list[Completion]]:
        """n answers to each prompt, each with what a reward is given.

        All processes have all of them.
        """
        generator, phase = (
            (self.own, "answering (held out)") if held_out else (self.generator, "sampling")
        )
        run, ours, done = self.run, self._share(len(asked), generator), 0
        prompts = [asked[k].unit.prompt_ids for k in ours]
        with (
            tally.timing("rollout"),
            Progress(run.console, phase, n * len(ours), quiet=run.quiet, brief=True) as bar,
        ):

            def advance(ended: int) -> None:
                nonlocal done
                done += ended
                bar.update(done)
                self._look_out()

            own: list[list[Any]] | None = None
            with self._patient(), self._with_advice(), self._unless_stopped():
                found = self._begun(prompts, n) if ours and not held_out else None
                if found is None:
                    found = (
                        generator.generate(
                            prompts, n, self._how(seed), first=ours.start, progress=advance
                        )
                        if ours
                        else []
                    )
                own = [[_packed(each) for each in answers] for answers in found]
        told = self._of_all(own)
        # there all have the same
        every = [answers for part in (told[:1] if run.divided else told) for answers in part]
        return [
            [self._told(each, k, *packed) for k, packed in enumerate(answers)]
            for each, answers in zip(asked, every, strict=True)
        ]

    def _how(self, seed: int) -> Sampling:
        rollout = self.rollout
        return Sampling(
            temperature=rollout.temperature,
            max_new_tokens=rollout.max_new_tokens,
            top_p=rollout.top_p,
            seed=seed,
        )

    def begin(self, asked: Sequence[Asked], n: int, seed: int) -> None:
        """Has these prompts answered while something else is done."""
        prompts = [each.unit.prompt_ids for each in asked]
        if self.run.world.rank == 0:
            self._coming = prompts, n, self.generator.begin(prompts, n, self._how(seed))

    def _begun(self, prompts: Sequence[tuple[int, ...]], n: int) -> list[list[Completion]] | None:
        """The answers that were asked for before, if it was for these."""
        coming, self._coming = self._coming, None
        if coming is None or coming[:2] != (list(prompts), n):
            return None
        while not coming[2].done():
            wait([coming[2]], timeout=0.2)
            self._look_out()
        return coming[2].result()

    def _share(self, count: int, generator: RolloutEngine) -> range:
        """The prompts that this process has answered: all of them where weights are split, and
        processes need each other for every token.
        """
        world = self.run.world
        if self.run.divided:
            return range(count)
        if generator.served:  # one of them asks
            return range(count if world.rank == 0 else 0)
        each, rest = divmod(count, world.size)
        start = world.rank * each + min(world.rank, rest)
        return range(start, start + each + (world.rank < rest))

    def _look_out(self) -> None:
        """Where processes need each other for every token, none leaves by itself."""
        alone = self.run.world.size == 1 or not self.run.divided
        if alone and self.run.stop.requested:
            raise self.run.stop.ended()

    @contextmanager
    def _with_advice(self) -> Iterator[None]:
        """Inside the block, memory that runs out is an error that says what would help, and so is a
        model that has gone bad.
        """
        try:
            yield
        except FloatingPointError as error:
            raise went_bad(error, self.run.step) from error
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            what, fix = "out of memory while sampling", "lower it, or rollout.max_new_tokens"
            raise UserError(
                what,
                code="out-of-memory",
                where=f"rollout.at_once: {self.rollout.at_once}",
                fix=fix,
            ) from error

    @contextmanager
    def _unless_stopped(self) -> Iterator[None]:
        """A process that was asked to stop leaves the block; ``_of_all`` then tells the others."""
        try:
            yield
        except Interrupted as error:
            if error.at_once:
                raise

    def _of_all(self, own: list[Any] | None) -> list[list[Any]]:
        """What each process has (None: it was stopped before).

        Raises Interrupted in all of them when one was stopped.
        """
        told: list[list[Any] | None] = gathered(self.run.world, own)
        found = [part for part in told if part is not None]
        if len(found) < len(told):
            self.run.stops()
            raise self.run.stop.ended()
        return found

    def _told(self, asked: Asked, index: int, *packed: Any) -> Completion:
        tokens, logps, text, stop, version, versions = packed
        content = asked.prompt.prompt
        tokenizer = self.run.prepared.tokenizer
        return Completion(
            prompt_id=asked.unit.id,
            tokens=tuple(tokens),
            logps=tuple(logps),
            text=text,
            stop=stop,
            version=version,
            versions=tuple(versions),
            index=index,
            prompt=content.messages if isinstance(content, Chat) else as_text(content, tokenizer),
            rendered=str(tokenizer.decode(list(asked.unit.prompt_ids))),
            info=asked.prompt.info,
            tools=content.tools if isinstance(content, Chat) else (),
        )

    def scores(
        self, answers: Sequence[Sequence[Completion]], tally: RoundTally
    ) -> list[list[Score]]:
        """What the reward says of them, in the same order.

        Raises UserError when it fails too often.
        """
        run = self.run
        flat = [each for own in answers for each in own]
        ours = self._share_of(len(flat))
        with (
            tally.timing("reward"),
            Progress(run.console, "judging", len(ours), quiet=run.quiet, brief=True) as bar,
        ):
            own = self._judge(flat[ours.start : ours.stop], bar)
        told = self._of_all(
            None if own is None else [[each.value, dict(each.parts), each.error] for each in own]
        )
        every = [Score(value, parts, error) for part in told for value, parts, error in part]
        # As a server may answer that gives text alone. There is nothing in it to be more or less
        # likely.
        every = [
            score if each.tokens else NO_TOKENS for each, score in zip(flat, every, strict=True)
        ]
        self._budget(every, tally)
        found = iter(every)
        return [[next(found) for _ in each] for each in answers]

    def _judge(self, answers: Sequence[Completion], bar: Progress) -> list[Score] | None:
        """None: it was stopped."""
        done = 0

        def advance(came: int) -> None:
            nonlocal done
            done += came
            bar.update(done)

        try:
            with self._patient(), self._unless_stopped():
                return score_all(
                    self.reward, answers, progress=advance, stop=lambda: self.run.stop.requested
                )
        except Stopped:
            pass
        return None

    def _share_of(self, count: int) -> range:
        """The answers that this process has judged."""
        world = self.run.world
        return range(count * world.rank // world.size, count * (world.rank + 1) // world.size)

    def _budget(self, scores: Sequence[Score], tally: RoundTally) -> None:
        failed = [score.error for score in scores if score.value is None]
        tally.failures += failed
        stops = self.rollout.on_failure == "stop"
        most = 0.0 if stops else self.rollout.max_failed
        if len(failed) > most * len(scores):
            allowed = f"more than rollout.max_failed: {most:g} of them"
            if stops:
                allowed = "and rollout.on_failure is stop"
            self.run.together = True
            raise UserError(
                f"{len(failed)} of {len(scores)} answers have no score, {allowed}; the first: "
                f"{failed[0]}",
                code="reward-failed" if stops else "reward-failures",
                where="reward",
                fix="fix the reward, then run the same command again to resume from the last step",
            )

    def judged(
        self,
        asked: Sequence[Asked],
        answers: Sequence[Sequence[Completion]],
        scores: Sequence[Sequence[Score]],
        tally: RoundTally,
    ) -> list[RolloutGroup]:
        """Each prompt with those of its answers that have a score."""
        found: list[RolloutGroup] = []
        if asked:
            prompt = as_text(asked[0].prompt.prompt, self.run.prepared.tokenizer)
            self.latest = prompt, answers[0][0].text, scores[0][0].value
        for each, own, judged in zip(asked, answers, scores, strict=True):
            kept = [i for i, score in enumerate(judged) if score.value is not None]
            if len(kept) < len(own) and self.rollout.on_failure == "drop_group":
                kept = []
            given = {i: judged[i].value or 0.0 for i in kept}
            self._tell(own, [judged[i] for i in kept], list(given.values()), tally)
            if kept:
                rewards = tuple(
                    value - self._overlong(len(own[i].tokens)) for i, value in given.items()
                )
                found.append(RolloutGroup(each.unit, tuple(own[i] for i in kept), rewards))
        tally.add("rollout/tied", [float(each.tied) for each in found])
        tally.add("rollout/duplicates", duplicates([a.tokens for own in answers for a in own]))
        return found

    def _overlong(self, length: int) -> float:
        """What an answer of so many tokens loses: nothing, or up to 1 within the buffer before the
        limit. Yu et al. 2025, arXiv
        2503.14476, Eq. 13.
        """
        buffer = self.rollout.overlong_buffer
        return (
            max(0.0, (length - (self.rollout.max_new_tokens - buffer)) / buffer) if buffer else 0.0
        )

    def _tell(
        self,
        own: Sequence[Completion],
        judged: Sequence[Score],
        rewards: Sequence[float],
        tally: RoundTally,
    ) -> None:
        tally.add("reward/mean", rewards)
        tally.rewards += rewards
        if len(rewards) > 1:
            tally.add("reward/std_of_prompt", [pstdev(rewards)])
        for score in judged:
            for name, value in score.parts.items():
                tally.add(f"reward/{name}", [value])
        tally.add("rollout/length", [float(len(each.tokens)) for each in own])
        shares = (distinct_ngrams(each.tokens) for each in own)
        tally.add("rollout/distinct_4grams", [share for share in shares if share is not None])
        tally.add("rollout/truncated", [float(each.stop == "length") for each in own])
        tally.add("rollout/failed", [0.0] * len(judged) + [1.0] * (len(own) - len(judged)))

    def divergence(self, round: Sequence[RolloutGroup], tally: RoundTally) -> None:
        """How far the policy is from the reference, both at the temperature of sampling: KL(policy,
        reference) of an answer in nats, as the mean over answers of sum_t k3, which has no bias and
        less noise than k1; that goes into ``tally.apart``.
        """
        if self.run.reference is None:
            return
        for each in round:
            for answer, columns in zip(each.answers, each.columns, strict=True):
                given = columns.get("old", answer.logps), columns["ref"]
                own, ref = (torch.tensor(values, dtype=torch.float64) for values in given)
                tally.add("kl", [k3(own, ref).sum().item()])
                tally.apart.append(k1(own, ref).sum().item())

    def measured(
        self, round: Sequence[RolloutGroup], names: Sequence[str], tally: RoundTally
    ) -> list[RolloutGroup]:
        """The same with columns of these names: `old` (what the policy says now), `ref` (the
        reference), `value`.
        """
        if not names or not round:
            return list(round)
        units = [each.unit("demonstration", i) for each in round for i in range(len(each.answers))]
        with tally.timing("measuring"):
            found = with_memory(self.run, "training", lambda: self._columns(units, names))
        # divergence costs nothing, and none is asked for
        if "ref_t" in self._makes.reads and "ref" not in names:
            found = [columns | {"ref": columns["old"]} for columns in found]
        rest = iter(found)
        return [replace(each, columns=tuple(next(rest) for _ in each.answers)) for each in round]

    @torch.no_grad()
    def _columns(
        self, units: Sequence[TokenizedExample], names: Sequence[str]
    ) -> list[dict[str, tuple[float, ...]]]:
        run, objective = self.run, self.run.objective
        done = 0
        policy = run.policy.eval()
        try:
            with (
                Progress(run.console, "measuring", len(units), quiet=run.quiet, brief=True) as bar,
                self._tempered(),
            ):

                def measure(batch: MicroBatch) -> tuple[MicroBatch, list[Tensor]]:
                    return batch, [column[batch.scored] for column in self._of(batch, names)]

                def advance(batch: MicroBatch | None) -> None:
                    nonlocal done
                    done += (0 if batch is None else batch.sequences) * run.group.size
                    bar.update(min(done, len(units)))

                parts = objective.run_micro_batches(
                    objective.divide(units), measure, lambda dummy: self._of(dummy, names), advance
                )
        finally:
            policy.train()
        # now a device is waited for
        own = [row for batch, columns in parts for row in _by_unit(batch, columns)]
        every = [row for rows in gathered(run.group, own) for row in rows]
        by_unit = {int(unit): values for unit, values in every}
        return [dict(zip(names, map(tuple, by_unit[i]), strict=True)) for i in range(len(units))]

    def _of(self, batch: MicroBatch, names: Sequence[str]) -> list[Tensor]:
        found: dict[str, Tensor] = {}
        if "old" in names or "value" in names:
            out = self.run.policy(batch, ("value",) if "value" in names else ())
            found["old"] = out.logp
            if out.value is not None:
                found["value"] = out.value
        if "ref" in names:
            assert self.run.reference is not None
            found["ref"] = self.run.reference(batch)
        return [found[name] for name in names]

    # ------------------------------------------------------------------ held-out prompts

    def evaluate(self, corpus: Corpus, most: int | None) -> Evaluation:
        """One answer to each prompt, judged; nothing is selected.

        Every evaluation of a run draws the same random numbers.
        """
        run, tally = self.run, RoundTally()
        asked = [
            Asked(unit, example)
            for unit in corpus.units[:most]
            if isinstance(example := corpus.examples[unit.id], Prompt)
        ]
        answers = self.answers(asked, 1, run.recipe.train.seed, tally, held_out=True)
        scores = self.scores(answers, tally)
        round = self.measured(
            self.judged(asked, answers, scores, tally),
            [n for n in self.reads if n != "value"],
            tally,
        )
        self.divergence(round, tally)
        tally.seconds.clear()
        found = {
            name: (mean.total / mean.count).item()
            for name, mean in tally.means.items()
            if mean.count
        }
        found.pop("rollout/tied", None)
        rows = [
            self._row(each, own[0], judged[0])
            for each, own, judged in zip(asked, answers, scores, strict=True)
        ]
        return Evaluation(dict(sorted(found.items())), rows)

    def _row(self, asked: Asked, answer: Completion, score: Score) -> dict[str, Any]:
        unit = asked.unit
        row: dict[str, Any] = {
            "id": unit.id,
            "origin": str(unit.origin),
            **({"source": unit.source} if unit.source else {}),
        }
        row["tokens"] = len(answer.tokens)
        row |= {
            "stop": answer.stop,
            **({"reward": score.value} if score.value is not None else {"error": score.error}),
        }
        row |= {"parts": dict(score.parts)} if score.parts else {}
        return row | {
            "prompt": as_text(asked.prompt.prompt, self.run.prepared.tokenizer),
            "completion": answer.text,
        }


def distinct_ngrams(tokens: Sequence[int], n: int = 4, at_least: int = 8) -> float | None:
    """The share of distinct n-grams among all of a completion; None where it has fewer than
    ``at_least`` tokens."""
    if len(tokens) < at_least:
        return None
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(ngrams)) / len(ngrams)


def duplicates(completions: Sequence[tuple[int, ...]]) -> list[float]:
    """For each completion 1 where another one has the same tokens, else 0."""
    counts = Counter(completions)
    return [float(counts[tokens] > 1) for tokens in completions]


def _by_unit(batch: MicroBatch, columns: Sequence[Tensor]) -> list[Any]:
    """Each unit of a micro-batch of single answers, and its columns [N], token by token."""
    host = [column.cpu().double() for column in columns]
    owner = batch.cpu_scored[1]
    return [
        [unit, [column[owner == s].tolist() for column in host]]
        for s, unit in enumerate(batch.unit.tolist())
    ]


def _packed(answer: Completion) -> list[Any]:
    return [
        list(answer.tokens),
        list(answer.logps),
        answer.text,
        answer.stop,
        answer.version,
        list(answer.versions),
    ]
