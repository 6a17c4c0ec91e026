"""The phases of a round of online training: sample completions, score and measure them."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from valence.config.needs import read_of_tokens
from valence.config.rules import SPLIT_WEIGHTS
from valence.distributed.process_group import Group, gather_objects
from valence.errors import UserError, out_of_memory
from valence.losses.policy import k1, k3
from valence.methods.sample_builders import RolloutGroup, per_token
from valence.models.reference import tempered
from valence.reports.console import Progress
from valence.rewards.build import digests
from valence.rewards.cache import digest
from valence.rewards.combine import Combined
from valence.rewards.run import Stopped, close, score_all
from valence.rollouts.protocol import Sampling
from valence.training.engines import RolloutEngine
from valence.training.episodes import PATIENCE, EpisodeRun, episodes_of
from valence.training.evaluate import Evaluation, answer_text, as_text
from valence.training.folder import Messages
from valence.training.out_of_memory import MemoryRetry
from valence.training.prepare import Corpus, Prepared
from valence.training.sampling import sampling_failed
from valence.training.signals import Interrupted, SharedStop
from valence.training.state import TrainState
from valence.types import (
    Chat,
    Completion,
    Episode,
    Mean,
    MicroBatch,
    Origin,
    Prompt,
    Score,
    TokenizedCompletion,
    TokenizedExample,
)

TOOLS = "rollout.tools"
"""The name of the tools among the digests of the rewards."""
EMPTY_COMPLETION = Score(None, error="the answer has no tokens")


@dataclass
class RoundTally:
    """Measurements of the completions of a round.

    totals: sum and count of each metric, over completions or prompts. seconds: of each phase.
    rewards: of all completions. kl_estimates: of each completion the sum of k1, in nats.
    exclusions: completions that must not be trained on, by reason; with `completions`, `prompts`
    and `prompts_without` (those that give no example), which they are counted among.
    """

    totals: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    failures: list[str] = field(default_factory=list[str])
    rewards: list[float] = field(default_factory=list[float])
    kl_estimates: list[float] = field(default_factory=list[float])
    exclusions: Counter[str] = field(default_factory=Counter[str])

    def add(self, name: str, values: Sequence[float]) -> None:
        total, count = self.totals.get(name, (0.0, 0.0))
        self.totals[name] = total + sum(values), count + len(values)

    @property
    def means(self) -> dict[str, Mean]:
        """The metrics for a meter. reward/std, reward/max, reward/min: over all completions."""
        if len(self.rewards) > 1:
            self.totals["reward/std"] = pstdev(self.rewards), 1.0
        if self.rewards:
            self.totals["reward/max"] = max(self.rewards), 1.0
            self.totals["reward/min"] = min(self.rewards), 1.0
        seconds = {f"seconds/{phase}": (spent, 1.0) for phase, spent in self.seconds.items()}
        return {
            name: Mean(*(torch.tensor(number, dtype=torch.float64) for number in pair))
            for name, pair in (self.totals | seconds).items()
        }

    def exclude(
        self, groups: Sequence[RolloutGroup], excluded: Mapping[str, int], num_unused: int
    ) -> None:
        """Count the completions of these groups that must not be trained on, by reason, and the
        groups of which nothing is."""
        num_completions = sum(len(group.answers) for group in groups)
        for reason, count in excluded.items():
            self.add(f"excluded/{reason}", [1.0] * count + [0.0] * (num_completions - count))
        self.add("excluded/prompts", [1.0] * num_unused + [0.0] * (len(groups) - num_unused))
        self.exclusions.update({name: count for name, count in excluded.items() if count})
        self.exclusions.update(
            completions=num_completions, prompts=len(groups), prompts_without=num_unused
        )

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start


@dataclass(frozen=True)
class RolloutPrompt:
    """A prompt to sample completions of: its tokens, and its row."""

    example: TokenizedExample
    row: Prompt


class QueuedRound:
    """A round that servers sample, and that is scored, while earlier rounds are trained on.

    start: position of its first prompt in the order of the run. seed: seed of its completions.
    completions, scores: None until all processes have them. sampling, scoring: the work in
    progress, on the process that asks the servers. num_sampled: completions so far. is_cancelled:
    the round is not needed any more. state: its entry in a checkpoint, always current.
    """

    def __init__(self, prompts: Sequence[RolloutPrompt], start: int, seed: int) -> None:
        self.prompts, self.seed = list(prompts), seed
        self.completions: list[list[Completion]] | None = None
        self.scores: list[Score] | None = None
        self.sampling: Future[list[list[Completion]]] | None = None
        self.scoring: Future[list[Score]] | None = None
        self.num_sampled = 0
        self.is_cancelled = False
        self.state: dict[str, Any] = {
            "start": start,
            "prompts": len(self.prompts),
            "seed": seed,
            "completions": None,
            "scores": None,
        }

    def set_completions(self, completions: list[list[Completion]]) -> None:
        self.completions = completions
        self.state["completions"] = packed_completions(completions)

    def set_scores(self, scores: Sequence[Sequence[Any]]) -> None:
        """scores: ``Score.record`` of each completion."""
        self.scores = [Score(*record) for record in scores]
        self.state["scores"] = [list(record) for record in scores]

    def advance(self, count: int) -> None:
        """Count completions. Ends the sampling of a round that is not needed any more."""
        if self.is_cancelled:
            raise CancelledError
        self.num_sampled += count


class Collector:
    """Samples completions of prompts, scores them, and measures their log-probabilities.

    latest: a prompt, one of its latest completions, and its reward, to be shown.
    """

    def __init__(
        self,
        prepared: Prepared,
        state: TrainState,
        *,
        make_engine: Callable[[], RolloutEngine],
        make_policy_engine: Callable[[], RolloutEngine],
        load_reward: Callable[[], Combined],
        world: Group,
        stop: SharedStop,
        messages: Messages,
        retry: MemoryRetry,
    ) -> None:
        """make_engine: returns what samples the completions to train on. make_policy_engine:
        returns what samples the policy itself, for held-out prompts. load_reward: loads the
        rewards of the recipe. All are called on first use.
        """
        self._prepared, self._state = prepared, state
        self._make_engine, self._make_policy_engine = make_engine, make_policy_engine
        self._load_reward = load_reward
        self._world, self._stop, self._messages, self._retry = world, stop, messages, retry
        self._rollout = prepared.recipe.rollout
        self._scorers = ThreadPoolExecutor(self._rollout.ahead + 1, "valence-scoring")
        self._is_closed = False
        self.latest: tuple[str, str, float | None] | None = None
        if prepared.method.is_on_policy:
            state.policy.temperature = self._rollout.temperature

    @cached_property
    def reward(self) -> Combined:
        return self._load_reward()

    @cached_property
    def reward_digests(self) -> dict[str, str]:
        """A digest of each reward as it was loaded, by its name, and of the tools."""
        use = self._prepared.tool_use
        return digests(self.reward) | ({} if use is None else {TOOLS: digest(use.tools.identity)})

    @cached_property
    def engine(self) -> RolloutEngine:
        return self._make_engine()

    @cached_property
    def policy_engine(self) -> RolloutEngine:
        is_other_model = self._rollout.engine == "openai"
        return self._make_policy_engine() if is_other_model else self.engine

    @property
    def token_columns(self) -> tuple[str, ...]:
        """What the method reads of the tokens of a completion: `old`, `ref`, `value`."""
        has_reference = self._state.reference is not None
        return read_of_tokens(self._prepared.recipe, reference=has_reference)

    def close(self) -> None:
        """End work in the background, release connections, and stop processes that were started."""
        self._is_closed = True
        if "engine" in self.__dict__:
            self.engine.close()
        self._scorers.shutdown(cancel_futures=True)
        if "reward" in self.__dict__:
            close(self.reward)
        if self._prepared.tool_use is not None:
            self._prepared.tool_use.tools.close()

    # Sampling

    def sample(
        self,
        prompts: Sequence[RolloutPrompt],
        n: int,
        seed: int,
        tally: RoundTally,
        *,
        held_out: bool = False,
    ) -> list[list[Completion]]:
        """Return n completions of each prompt, with everything that a reward reads.

        All processes return all of them.
        """
        engine = self.policy_engine if held_out else self.engine
        phase = "answering (held out)" if held_out else "sampling"
        local = self._local_prompts(len(prompts), engine)
        token_ids = [prompts[k].example.prompt_ids for k in local]
        messages, num_ended = self._messages, 0
        with (
            tally.timing("rollout"),
            Progress(messages.console, phase, n * len(local), brief=True) as bar,
        ):

            def advance(count: int) -> None:
                nonlocal num_ended
                num_ended += count
                bar.update(num_ended)
                self._check_stop(engine)

            records: list[list[Any]] | None = None
            with (
                self._stop.deferred(),
                engine.phase(phase),
                self._convert_errors(engine),
                self._unless_stopped(),
            ):
                sampling = self._sampling(seed)
                episodes = self._episodes([prompts[k] for k in local], n, sampling, local)
                completions = (
                    engine.generate(
                        token_ids,
                        n,
                        sampling,
                        first=local.start,
                        progress=advance,
                        episodes=episodes,
                    )
                    if local
                    else []
                )
                if any(episode.is_late for episode in episodes):
                    messages.note_once(
                        f"some tools needed more than {PATIENCE:g} s, and other samples did not "
                        "wait for them: if this run is killed and resumed, the round in progress "
                        "is repeated with other rounding"
                    )
                records = _to_records(completions)
        gathered_records = self._gather(records)
        # without a server, all processes have then sampled the same
        if self._state.has_split_weights and not engine.is_server:
            gathered_records = gathered_records[:1]
        return self._from_records(prompts, [group for part in gathered_records for group in part])

    def _from_records(
        self, prompts: Sequence[RolloutPrompt], groups: Sequence[Sequence[Sequence[Any]]]
    ) -> list[list[Completion]]:
        return [
            [self._from_record(prompt, k, *record) for k, record in enumerate(group)]
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    # Rounds in the background. All processes call these methods.

    def begin(self, queued: QueuedRound) -> None:
        """Start to sample a round with the current weights, and to score it after that.

        Call it only while no round is sampled with other weights.
        """
        token_ids = [prompt.example.prompt_ids for prompt in queued.prompts]
        n, sampling = self._rollout.num_rollouts, self._sampling(queued.seed)
        with self.engine.phase("sending weights"):
            if self._world.rank == 0:
                episodes = self._episodes(queued.prompts, n, sampling, range(len(token_ids)))
                queued.sampling = self.engine.begin(
                    token_ids, n, sampling, queued.advance, episodes
                )
        self.begin_scoring(queued)

    def begin_scoring(self, queued: QueuedRound) -> None:
        """Score a round in the background as soon as it is sampled, unless this has begun."""
        if self._world.rank == 0 and queued.scores is None and queued.scoring is None:
            _ = self.reward  # not loaded in another thread
            queued.scoring = self._scorers.submit(self._score_in_background, queued)

    def _score_in_background(self, queued: QueuedRound) -> list[Score]:
        """Raises Stopped when the run ends."""

        def is_stopped() -> bool:
            return self._is_closed or queued.is_cancelled or self._stop.local.requested

        completions = queued.completions
        if completions is None:
            assert queued.sampling is not None
            while not wait([queued.sampling], timeout=0.2).done:
                if is_stopped():
                    raise Stopped([])
            records = _to_records(queued.sampling.result())
            completions = self._from_records(queued.prompts, records)
        flat = [completion for group in completions for completion in group]
        return score_all(self.reward, flat, stop=is_stopped)

    def finish_sampling(self, queue: Sequence[QueuedRound], tally: RoundTally) -> None:
        """Wait until rounds are sampled, so that all processes have their completions.

        Raises the error that ended the sampling of one of them, and Interrupted.
        """
        for queued in queue:
            if queued.completions is not None:
                continue
            messages, records = self._messages, None
            total = len(queued.prompts) * self._rollout.num_rollouts
            with (
                tally.timing("rollout"),
                Progress(messages.console, "sampling", total, brief=True) as bar,
                self._stop.deferred(),
                self.engine.phase("sampling"),
                self._convert_errors(self.engine),
                self._unless_stopped(),
            ):
                sampling = queued.sampling
                while sampling is not None and not wait([sampling], timeout=0.2).done:
                    bar.update(queued.num_sampled)
                    self._check_stop(self.engine)
                records = _to_records(sampling.result()) if sampling is not None else []
            groups = [group for part in self._gather(records) for group in part]
            queued.set_completions(self._from_records(queued.prompts, groups))

    def settle(self, queue: Sequence[QueuedRound]) -> None:
        """Wait until rounds are sampled, so that a checkpoint can hold them, and their scores if
        these are known.

        Completions that could not be sampled are left out: the error is raised when their round is
        due.
        """
        for queued in queue:
            results: list[Any] = [None, None]
            with self.engine.phase("sampling") if queued.completions is None else nullcontext():
                if queued.completions is None and queued.sampling is not None:
                    wait([queued.sampling])
                    results[0] = _to_records(_result(queued.sampling) or [])
            if queued.scores is None and queued.scoring is not None and queued.scoring.done():
                scores: list[Score] = _result(queued.scoring) or []
                if all(score.value is not None for score in scores):  # failed ones are repeated
                    results[1] = [score.record for score in scores]
            records, all_scores = gather_objects(self._world, results)[0]
            if records:
                queued.set_completions(self._from_records(queued.prompts, records))
            if all_scores:
                queued.set_scores(all_scores)

    def restore(
        self,
        queued: QueuedRound,
        completions: Mapping[str, Any],
        scores: Sequence[Sequence[Any]] | None,
    ) -> None:
        """Restore a round of the queue from the state of a checkpoint."""
        records = unpacked_records(completions)
        queued.set_completions(self._from_records(queued.prompts, records))
        if scores is not None:
            queued.set_scores(scores)

    # Sampling parameters and errors

    def _episodes(
        self,
        prompts: Sequence[RolloutPrompt],
        n: int,
        sampling: Sampling,
        positions: Sequence[int],
    ) -> list[EpisodeRun]:
        """With tools, n episodes of each prompt; else none."""
        use = self._prepared.tool_use
        if use is None:
            return []
        if self._state.has_split_weights and self._rollout.engine == "hf":
            problem, fix = SPLIT_WEIGHTS
            raise UserError(problem, code="setting-conflict", where="rollout.engine", fix=fix)
        return episodes_of(use, [prompt.row for prompt in prompts], n, sampling, positions)

    def _sampling(self, seed: int) -> Sampling:
        rollout = self._rollout
        return Sampling(
            temperature=rollout.temperature,
            max_new_tokens=rollout.max_new_tokens,
            top_p=rollout.top_p,
            seed=seed,
        )

    def _local_prompts(self, count: int, engine: RolloutEngine) -> range:
        """The prompts that this process samples.

        All of them where weights are split: processes then need each other for every token.
        """
        world = self._world
        if engine.is_server:  # rank 0 asks
            return range(count if world.rank == 0 else 0)
        if self._state.has_split_weights:
            return range(count)
        share, rest = divmod(count, world.size)
        start = world.rank * share + min(world.rank, rest)
        return range(start, start + share + (world.rank < rest))

    def _check_stop(self, engine: RolloutEngine) -> None:
        """Raise Interrupted when this process was asked to stop, unless others need it."""
        needs_others = self._state.has_split_weights and not engine.is_server
        is_free = self._world.size == 1 or not needs_others
        if is_free and self._stop.local.requested:
            raise self._stop.local.ended()

    @contextmanager
    def _convert_errors(self, engine: RolloutEngine) -> Iterator[None]:
        """Raise UserError for out of memory, and for logits that are not finite."""
        try:
            yield
        except FloatingPointError as error:
            raise sampling_failed(error, self._state.step) from error
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise UserError(
                "out of memory while sampling",
                code="out-of-memory",
                where=f"rollout.at_once: {engine.at_once}",
                fix="lower rollout.at_once or rollout.max_new_tokens",
            ) from error

    @contextmanager
    def _unless_stopped(self) -> Iterator[None]:
        """Leave the block when this process is asked to stop; ``_gather`` then tells the others."""
        try:
            yield
        except Interrupted as error:
            if error.at_once:
                raise

    def _gather(self, local: list[Any] | None) -> list[list[Any]]:
        """Return the parts of all processes. None: this process was stopped.

        Raises Interrupted on all processes when one was stopped.
        """
        parts: list[list[Any] | None] = gather_objects(self._world, local)
        present = [part for part in parts if part is not None]
        if len(present) < len(parts):
            self._stop.requested()
            raise self._stop.local.ended()
        return present

    def _from_record(self, prompt: RolloutPrompt, index: int, *record: Any) -> Completion:
        tokens, logps, text, stop, version, versions, *more = record
        mask, episode = more or ((), None)  # records of earlier versions have neither
        tokenizer = self._prepared.tokenizer
        [content] = self._prepared.encoder.rendered_as(prompt.row.prompt)
        episode = None if episode is None else Episode.from_record(episode)
        prompt_ids = (episode and episode.prompt_ids) or prompt.example.prompt_ids
        return Completion(
            prompt_id=prompt.example.id,
            tokens=tuple(tokens),
            logps=tuple(logps),
            text=text,
            stop=stop,
            version=version,
            versions=tuple(versions),
            index=index,
            prompt=content.messages if isinstance(content, Chat) else as_text(content, tokenizer),
            rendered=str(tokenizer.decode(list(prompt_ids))),
            info=prompt.row.info,
            tools=content.tools if isinstance(content, Chat) else (),
            mask=tuple(mask),
            episode=episode,
        )

    # Scoring

    def score(
        self,
        completions: Sequence[Sequence[Completion]],
        tally: RoundTally,
        queued: QueuedRound | None = None,
    ) -> list[list[Score]]:
        """Return the score of each completion, in the same order.

        queued: the round of these completions, if it is scored in the background. Raises UserError
        when the rewards fail too often.
        """
        flat = [completion for group in completions for completion in group]
        rank, size = self._world.rank, self._world.size
        local = flat[len(flat) * rank // size : len(flat) * (rank + 1) // size]
        messages = self._messages
        with (
            tally.timing("reward"),
            Progress(messages.console, "judging", len(local), brief=True) as bar,
        ):
            if queued is None:
                local_scores = self._score_local(local, bar)
            else:
                with self._world.long_phase("judging"):
                    local_scores = self._wait_for_scores(queued)
        records = None if local_scores is None else [score.record for score in local_scores]
        scores = [Score(*record) for part in self._gather(records) for record in part]
        # A server that returns text alone may return a completion without tokens, which cannot
        # become more or less likely.
        scores = [
            _score_of(completion, score) for completion, score in zip(flat, scores, strict=True)
        ]
        self._check_failures(scores, tally)
        remaining = iter(scores)
        return [[next(remaining) for _ in group] for group in completions]

    def _score_local(self, completions: Sequence[Completion], bar: Progress) -> list[Score] | None:
        """Return the scores; None if this process was asked to stop."""
        num_scored = 0

        def advance(count: int) -> None:
            nonlocal num_scored
            num_scored += count
            bar.update(num_scored)

        stop = self._stop.local
        try:
            with self._stop.deferred(), self._unless_stopped():
                return score_all(
                    self.reward, completions, progress=advance, stop=lambda: stop.requested
                )
        except Stopped:
            pass
        return None

    def _wait_for_scores(self, queued: QueuedRound) -> list[Score] | None:
        """Return all scores of a round on rank 0, and none elsewhere; None if this process was
        asked to stop.
        """
        if self._world.rank > 0:
            return []
        self.begin_scoring(queued)
        if queued.scores is not None:
            return queued.scores
        assert queued.scoring is not None
        try:
            with self._stop.deferred(), self._unless_stopped():
                while not wait([queued.scoring], timeout=0.05).done:
                    if self._stop.local.requested:
                        return None
                return queued.scoring.result()
        except Stopped:
            pass
        return None

    def _check_failures(self, scores: Sequence[Score], tally: RoundTally) -> None:
        """Raise UserError when more scores failed than the recipe allows."""
        failures = [score.error for score in scores if score.value is None]
        tally.failures += failures
        is_strict = self._rollout.on_failure == "stop"
        limit = 0.0 if is_strict else self._rollout.max_failed
        if len(failures) <= limit * len(scores):
            return
        allowed = (
            "and rollout.on_failure is stop"
            if is_strict
            else f"more than rollout.max_failed: {limit:g} allows"
        )
        self._stop.is_synchronized = True
        raise UserError(
            f"{len(failures)} of {len(scores)} completions have no score, {allowed}; the first "
            f"error: {failures[0]}",
            code="reward-failed" if is_strict else "reward-failures",
            where="reward",
            fix="fix its cause in the reward, its server, the environment or the rows, then rerun "
            "the same command to resume",
        )

    def group(
        self,
        prompts: Sequence[RolloutPrompt],
        completions: Sequence[Sequence[Completion]],
        scores: Sequence[Sequence[Score]],
        tally: RoundTally,
    ) -> list[RolloutGroup]:
        """Return each prompt with those of its completions that have a score."""
        groups: list[RolloutGroup] = []
        if prompts:
            text = as_text(prompts[0].row.prompt, self._prepared.tokenizer)
            score = None if self._prepared.recipe.is_unrewarded else scores[0][0].value
            self.latest = text, answer_text(completions[0][0]), score
        for prompt, sampled, scored in zip(prompts, completions, scores, strict=True):
            places = [i for i, score in enumerate(scored) if score.value is not None]
            if len(places) < len(sampled) and self._rollout.on_failure == "drop_group":
                places = []
            rewards = [scored[i].value or 0.0 for i in places]
            self._count(sampled, [scored[i] for i in places], rewards, tally)
            if places:
                shaped = tuple(
                    reward - self._overlong_penalty(len(sampled[i].tokens))
                    for i, reward in zip(places, rewards, strict=True)
                )
                turns = tuple(tuple(scored[i].turn_rewards) for i in places)
                example, answers = with_prompts(prompt.example, [sampled[i] for i in places])
                feedback = tuple(scored[i].feedback for i in places)
                group = RolloutGroup(
                    example, tuple(answers), shaped, feedback=feedback, turn_rewards=turns
                )
                groups.append(group)
        if not self._prepared.recipe.is_unrewarded:
            tally.add("rollout/tied", [float(group.tied) for group in groups])
        tally.add("rollout/duplicates", duplicates([c.tokens for g in completions for c in g]))
        return groups

    def _overlong_penalty(self, length: int) -> float:
        """Penalty of a completion of this many tokens: 0, rising to 1 within the buffer before the
        limit. Yu et al. 2025, arXiv 2503.14476, Eq. 13.
        """
        buffer, limit = self._rollout.overlong_buffer, self._rollout.max_new_tokens
        return max(0.0, (length - (limit - buffer)) / buffer) if buffer else 0.0

    def _count(
        self,
        completions: Sequence[Completion],
        scores: Sequence[Score],
        rewards: Sequence[float],
        tally: RoundTally,
    ) -> None:
        """Add the metrics of the completions of a prompt."""
        if not self._prepared.recipe.is_unrewarded:
            tally.add("reward/mean", rewards)
            tally.rewards += rewards
            if len(rewards) > 1:
                tally.add("reward/std_of_prompt", [pstdev(rewards)])
            for score in scores:
                for name, value in score.parts.items():
                    tally.add(f"reward/{name}", [value])
        tally.add("rollout/length", [float(sum(c.sampled)) for c in completions])
        shares = (distinct_4grams(c.sampled_tokens) for c in completions)
        tally.add("rollout/distinct_4grams", [share for share in shares if share is not None])
        tally.add("rollout/truncated", [float(c.stop == "length") for c in completions])
        episodes = [c.episode for c in completions if c.episode is not None]
        if episodes:
            calls = [call for episode in episodes for call in episode.calls]
            num_turns = [sum(m["role"] == "assistant" for m in e.messages) for e in episodes]
            tally.add("rollout/turns", [float(n) for n in num_turns])
            tally.add("rollout/tool_calls", [float(len(e.calls)) for e in episodes])
            tally.add("rollout/tool_errors", [float(bool(call["error"])) for call in calls])
            tally.add("rollout/max_turns", [float(e.end == "turns") for e in episodes])
        num_failed = len(completions) - len(scores)
        tally.add("rollout/failed", [0.0] * len(scores) + [1.0] * num_failed)

    # Measuring

    def measure(
        self, groups: Sequence[RolloutGroup], names: Sequence[str], tally: RoundTally
    ) -> list[RolloutGroup]:
        """Return the groups with token columns of these names.

        `old`: log-probabilities of the policy as it is now; `ref`: of the reference; `value`.
        """
        if not names or not groups:
            return list(groups)
        units = [
            group.unit("demonstration", i) for group in groups for i in range(len(group.answers))
        ]
        with tally.timing("measuring"):
            columns = self._retry.run("training", lambda: self._measure(units, names))
        builder = self._prepared.method.sample_builder
        assert builder is not None
        if "ref_t" in builder.reads and "ref" not in names:
            # The KL penalty has weight 0, so no reference was loaded.
            columns = [values | {"ref": values["old"]} for values in columns]
        remaining = iter(columns)
        return [
            replace(
                group,
                columns=tuple(
                    {name: per_token(a, values) for name, values in next(remaining).items()}
                    for a in group.answers
                ),
            )
            for group in groups
        ]

    @torch.no_grad()
    def _measure(
        self, units: Sequence[TokenizedExample], names: Sequence[str]
    ) -> list[dict[str, tuple[float, ...]]]:
        objective, messages = self._state.objective, self._messages
        num_measured, num_processes = 0, self._state.group.size
        parts: list[tuple[MicroBatch, list[Tensor]]] = []
        policy = self._state.policy.eval()
        try:
            with (
                Progress(messages.console, "measuring", len(units), brief=True) as bar,
                self._at_sampling_temperature(),
            ):

                def advance(batch: MicroBatch | None) -> None:
                    nonlocal num_measured
                    num_measured += (0 if batch is None else batch.sequences) * num_processes
                    bar.update(min(num_measured, len(units)))

                rounds = objective.rounds(objective.divide(units), advance)
                for batch, is_dummy in rounds:
                    with rounds.running():
                        columns = self._columns(batch, names)
                        if not is_dummy:
                            parts.append((batch, [column[batch.scored] for column in columns]))
        finally:
            policy.train()
        # Blocks on the device here, once.
        local = [row for batch, columns in parts for row in _split_by_unit(batch, columns)]
        rows = [row for rows in gather_objects(self._state.group, local) for row in rows]
        by_unit = {int(unit): values for unit, values in rows}
        return [dict(zip(names, map(tuple, by_unit[i]), strict=True)) for i in range(len(units))]

    @contextmanager
    def _at_sampling_temperature(self) -> Iterator[None]:
        """Inside the block, policy and reference have the temperature of sampling."""
        state, temperature = self._state, self._rollout.temperature
        with state.policy.tempered(temperature), tempered(state.reference, temperature):
            yield

    def _columns(self, batch: MicroBatch, names: Sequence[str]) -> list[Tensor]:
        """Token columns of these names [T]."""
        columns: dict[str, Tensor] = {}
        if "old" in names or "value" in names:
            out = self._state.policy(batch, ("value",) if "value" in names else ())
            columns["old"] = out.logp
            if out.value is not None:
                columns["value"] = out.value
        if "ref" in names:
            assert self._state.reference is not None
            columns["ref"] = self._state.reference(batch)
        return [columns[name] for name in names]

    def record_kl(self, groups: Sequence[RolloutGroup], tally: RoundTally) -> None:
        """Estimate KL(policy || reference) of each completion in nats, at the temperature of
        sampling.

        The metric is the mean of sum_t k3, which is unbiased and less noisy than k1. The sums of
        k1 are for the adaptive coefficient.
        """
        if "ref" not in self.token_columns:
            return
        for group in groups:
            for completion, columns in zip(group.answers, group.columns, strict=True):
                logps = torch.tensor(columns.get("old", completion.logps), dtype=torch.float64)
                ref_logps = torch.tensor(columns["ref"], dtype=torch.float64)
                tally.add("kl", [k3(logps, ref_logps).sum().item()])
                tally.kl_estimates.append(k1(logps, ref_logps).sum().item())

    # Held-out prompts

    def evaluate(self, corpus: Corpus, limit: int | None) -> Evaluation:
        """Sample one completion of each prompt and score it; none is selected.

        Every evaluation of a run draws the same random numbers.
        """
        tally = RoundTally()
        prompts = [
            RolloutPrompt(unit, row)
            for unit in corpus.units[:limit]
            if isinstance(row := corpus.examples[unit.id], Prompt)
        ]
        seed = self._prepared.recipe.train.seed
        completions = self.sample(prompts, 1, seed, tally, held_out=True)
        scores = self.score(completions, tally)
        groups = self.group(prompts, completions, scores, tally)
        columns = [name for name in self.token_columns if name != "value"]
        self.record_kl(self.measure(groups, columns, tally), tally)
        tally.seconds.clear()
        metrics = {
            name: (mean.total / mean.count).item()
            for name, mean in tally.means.items()
            if mean.count
        }
        metrics.pop("rollout/tied", None)
        rows = [
            self._row(prompt, sampled[0], scored[0])
            for prompt, sampled, scored in zip(prompts, completions, scores, strict=True)
        ]
        if self._prepared.recipe.is_unrewarded and self._prepared.method.loss.needs_teacher:
            # one group of each prompt whose completion could be scored
            metrics |= self._signals(groups, [row for row in rows if "error" not in row])
        return Evaluation(dict(sorted(metrics.items())), rows)

    def _signals(
        self, groups: Sequence[RolloutGroup], rows: Sequence[dict[str, Any]]
    ) -> dict[str, float]:
        """Let the teacher's signal (nats per token) take the place of the reward of rows, one of
        each group, and return its metrics.

        On completions of the policy its mean estimates -KL(policy, teacher) per token.
        """
        limit = self._prepared.shared_vocabulary or sys.maxsize
        known = [
            i
            for i, group in enumerate(groups)
            if group.answers and max(group.answers[0].tokens, default=limit) < limit
        ]
        examples = [groups[i].unit("demonstration", 0) for i in known]
        signals = self._state.objective.token_signals(examples) if examples else []
        for row in rows:
            row.pop("reward", None)
        for i, values in zip(known, signals, strict=True):
            rows[i]["reward"] = fmean(values)
        every = [x for values in signals for x in values]
        if not every:
            return {}
        return {"signal/mean": fmean(every), "signal/size": fmean(map(abs, every))}

    def _row(self, prompt: RolloutPrompt, completion: Completion, score: Score) -> dict[str, Any]:
        example = prompt.example
        row: dict[str, Any] = {"id": example.id, "origin": str(example.origin)}
        if example.source:
            row["source"] = example.source
        row |= {"tokens": len(completion.tokens), "stop": completion.stop}
        row |= {"error": score.error} if score.value is None else {"reward": score.value}
        if score.parts:
            row["parts"] = dict(score.parts)
        if score.feedback:
            row["feedback"] = score.feedback
        if score.turn_rewards:
            row["turn_rewards"] = list(score.turn_rewards)
        return row | {
            "prompt": as_text(prompt.row.prompt, self._prepared.tokenizer),
            "completion": answer_text(completion),
        }


def _score_of(completion: Completion, score: Score) -> Score:
    """The score of a completion; one that failed if the completion cannot have any."""
    if completion.episode is not None and completion.episode.error:
        return Score(None, error=completion.episode.error)
    return score if completion.tokens else EMPTY_COMPLETION


def with_prompts(
    example: TokenizedExample, completions: Sequence[Completion]
) -> tuple[TokenizedExample, list[Completion]]:
    """The prompt of a row, and its completions, if an environment has added to the prompts.

    The prompt becomes what all prompts begin with. The other tokens of each prompt become the
    beginning of its completion, which no loss reads.
    """
    prompts = [
        (c.episode.prompt_ids if c.episode else ()) or example.prompt_ids for c in completions
    ]
    if set(prompts) <= {example.prompt_ids}:
        return example, list(completions)
    columns = zip(*prompts, strict=False)  # as far as the shortest goes
    shared = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
    example = replace(example, prompt_ids=prompts[0][:shared], prompt_mask=(False,) * shared)
    extended: list[Completion] = []
    for completion, prompt in zip(completions, prompts, strict=True):
        rest = prompt[shared:]
        extended.append(
            replace(
                completion,
                tokens=rest + completion.tokens,
                logps=(0.0,) * len(rest) + completion.logps if completion.logps else (),
                mask=(False,) * len(rest) + completion.sampled,
            )
        )
    return example, extended


def distinct_4grams(tokens: Sequence[int]) -> float | None:
    """The share of distinct 4-grams among all of a completion; None below 8 tokens."""
    if len(tokens) < 8:
        return None
    ngrams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(set(ngrams)) / len(ngrams)


def duplicates(completions: Sequence[tuple[int, ...]]) -> list[float]:
    """For each completion 1 where another one has the same tokens, else 0."""
    counts = Counter(completions)
    return [float(counts[tokens] > 1) for tokens in completions]


def _split_by_unit(batch: MicroBatch, columns: Sequence[Tensor]) -> list[Any]:
    """The unit of each sequence of a micro-batch, and its columns [N]."""
    on_host = [column.cpu().double() for column in columns]
    sequences = batch.cpu_scored[1]
    return [
        [unit, [column[sequences == s].tolist() for column in on_host]]
        for s, unit in enumerate(batch.unit.tolist())
    ]


def _to_records(groups: Sequence[Sequence[Completion]]) -> list[list[list[Any]]]:
    """Completions in a form that processes can exchange."""
    return [
        [[list(c.tokens), list(c.logps), *_rest_of_record(c)] for c in group] for group in groups
    ]


def _rest_of_record(c: Completion) -> list[Any]:
    episode = None if c.episode is None else asdict(c.episode)
    return [c.text, c.stop, c.version, list(c.versions), list(c.mask), episode]


def _result(work: Future[Any]) -> Any:
    """The result of work that has ended; None if it failed."""
    return None if work.cancelled() or work.exception() is not None else work.result()


PLAIN = ("id", "kind", "label", "scores", "attributes", "margin", "soft", "weight", "source")
"""Fields that are saved as they are."""


def packed(units: Sequence[TokenizedExample]) -> dict[str, Any]:
    """Pack the tokens, columns and other fields of examples.

    Prompts are outside the loss mask.
    """
    answers = [answer for unit in units for answer in unit.answers]
    columns: dict[str, list[float]] = {}
    for answer in answers:
        for name, values in answer.columns:
            columns.setdefault(name, []).extend(values)
    return {
        "rows": [
            {name: getattr(unit, name) for name in PLAIN} | {"origin": asdict(unit.origin)}
            for unit in units
        ],
        "lengths": [
            [len(unit.prompt_ids), *(len(answer.ids) for answer in unit.answers)] for unit in units
        ],
        "teacher_lengths": [len(unit.teacher_ids) for unit in units],
        "teacher_tokens": torch.tensor([i for unit in units for i in unit.teacher_ids]).long(),
        "complete": [answer.complete for answer in answers],
        "mask": torch.tensor([is_read for answer in answers for is_read in answer.mask]).bool(),
        "tokens": torch.tensor(
            [
                i
                for unit in units
                for i in (*unit.prompt_ids, *(t for a in unit.answers for t in a.ids))
            ]
        ).long(),
        "columns": {
            name: torch.tensor(values, dtype=torch.float64)
            for name, values in sorted(columns.items())
        },
    }


def packed_completions(groups: Sequence[Sequence[Completion]]) -> dict[str, Any]:
    """Pack what was sampled for each prompt."""
    flat = [completion for group in groups for completion in group]
    return {
        "groups": [len(group) for group in groups],
        "lengths": [len(completion.tokens) for completion in flat],
        "tokens": torch.tensor([t for completion in flat for t in completion.tokens]).long(),
        "logps": torch.tensor(
            [logp for completion in flat for logp in completion.logps], dtype=torch.float64
        ),
        "rest": [_rest_of_record(c) for c in flat],
    }


def unpacked_records(state: Mapping[str, Any]) -> list[list[list[Any]]]:
    """For each prompt, its completions as records (see ``_to_records``)."""
    lengths = state["lengths"]
    tokens, logps = state["tokens"].split(lengths), state["logps"].split(lengths)
    records = iter(
        [t.tolist(), values.tolist(), *rest]
        for t, values, rest in zip(tokens, logps, state["rest"], strict=True)
    )
    return [[next(records) for _ in range(n)] for n in state["groups"]]


def unpacked(state: Mapping[str, Any]) -> list[TokenizedExample]:
    """Restore the examples that ``packed`` packed."""
    tokens = iter(state["tokens"].split([n for lengths in state["lengths"] for n in lengths]))
    complete = iter(state["complete"])
    sizes = [n for _, *lengths in state["lengths"] for n in lengths]
    if "mask" in state:
        masks = iter(state["mask"].split(sizes))
    else:  # of an earlier version, in which a completion was entirely inside or outside of it
        masks = iter(
            torch.full((n,), not is_masked)
            for n, is_masked in zip(sizes, state["masked"], strict=True)
        )
    columns = {name: iter(values.split(sizes)) for name, values in state["columns"].items()}
    teacher_lengths = state.get("teacher_lengths") or [0] * len(state["rows"])
    teacher_tokens = state.get("teacher_tokens", torch.zeros(0)).long()
    teachers = iter(teacher_tokens.split(teacher_lengths))
    examples: list[TokenizedExample] = []
    for row, (_, *lengths) in zip(state["rows"], state["lengths"], strict=True):
        prompt = tuple(next(tokens).tolist())
        answers = [
            TokenizedCompletion(
                tuple(next(tokens).tolist()),
                tuple(next(masks).tolist()),
                next(complete),
                tuple((name, tuple(next(values).tolist())) for name, values in columns.items()),
            )
            for _ in lengths
        ]
        plain = {name: row[name] for name in PLAIN} | {
            "scores": tuple(row["scores"]),
            "attributes": tuple((name, score) for name, score in row["attributes"]),
            "origin": Origin(**row["origin"]),
        }
        examples.append(
            TokenizedExample(
                **plain,
                prompt_ids=prompt,
                prompt_mask=(False,) * len(prompt),
                answers=tuple(answers),
                teacher_ids=tuple(next(teachers).tolist()),
            )
        )
    return examples
