"""Online training: the rounds of a run, and the examples that each optimizer step trains on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from valence.batching.kl_pairs import make_kl_pairs
from valence.data.sampler import canonical_order
from valence.errors import UserError
from valence.losses.advantage import adapted
from valence.methods.sample_builders import EXCLUSIONS, Exclusion, RolloutGroup
from valence.training.collector import (
    TOOLS,
    Collector,
    QueuedRound,
    RolloutPrompt,
    RoundTally,
    packed,
    unpacked,
)
from valence.training.evaluate import Evaluation
from valence.training.examples import NothingToLearnError, StepExamples
from valence.training.folder import Messages
from valence.training.prepare import Corpus, Prepared
from valence.training.state import TrainState
from valence.types import Completion, Prompt, TokenizedExample

TIED = (
    "all completions of each prompt have the same reward",
    "check the reward and the prompts, or raise rollout.num_rollouts or rollout.temperature",
)
UNPAIRED = (
    "the completions belong to a single prompt or are identical, so they form no KL pairs",
    "raise train.batch_size, add prompts, or use online_apo_zero_unpaired, which needs no KL pairs",
)
"""Why a round cannot be trained on, and the fix."""

FIXES: dict[Exclusion, str] = {
    "tied": TIED[1],
    "truncated": "raise rollout.max_new_tokens, or set rollout.mask_truncated: false",
    "low_reward": "lower rollout.min_reward, or sample more (rollout.num_rollouts)",
    "worst": TIED[1],
    "no_feedback": "return a text with the number in the reward, or set teacher.context: either "
    "and a reward that differs between completions",
    "too_long": "raise data.max_length, or return shorter texts in the reward",
}
"""The fix for each reason, for the most frequent one."""


QUEUE_SETTINGS = (
    "data.", "rollout.temperature", "rollout.top_p", "rollout.max_new_tokens",
    "rollout.num_rollouts", "rollout.engine", "reward",
)  # fmt: skip
"""Beginnings of the settings that rounds in the queue were sampled and scored with."""


class Rounds:
    """The rounds of a run: each samples completions, scores them, and builds examples.

    With ``rollout.ahead`` above 0, servers sample later rounds while one is trained on, in a queue.
    Round n + ahead always comes from the weights at the start of round n, and weights are sent only
    while nothing is sampled: the completions do not depend on the time that anything takes. Scoring
    in the background ends when the round is due.

    num_rounds: rounds sampled so far, without the queue. num_prompts: position after the last
    prompt that was used, over all epochs, with the queue. units: the examples
    of the current round. steps: for each remaining optimizer step of the round, the indices of its
    examples. kl_beta: the adaptive KL coefficient; None if it is fixed. reward_digests: digest of
    each reward when it last scored. exclusions: of all rounds, see ``RoundTally``.
    """

    def __init__(
        self, prepared: Prepared, state: TrainState, collector: Collector, messages: Messages
    ) -> None:
        self.collector = collector
        self._prepared, self._state, self._messages = prepared, state, messages
        self._sampler = prepared.sampler if "train" in prepared.corpora else None
        loss = prepared.recipe.loss
        self.num_rounds = self.num_prompts = 0
        self._set_units([])
        self.steps: list[list[int]] = []
        self.kl_beta: float | None = loss["kl_beta"] if loss.get("kl_target") else None
        self.reward_digests: dict[str, str] = {}
        self.exclusions: Counter[str] = Counter()
        self._queue: list[QueuedRound] = []

    # The interface of ExampleSource

    @property
    def latest_completion(self) -> tuple[str, str, float | None] | None:
        return self.collector.latest

    def prepare_step(self) -> None:
        """Sample the next round if no step of the current one is left.

        Raises Interrupted, which leaves the state unchanged; NothingToLearnError if too many
        consecutive rounds give nothing to train on; UserError if rewards failed.
        """
        if self.steps:
            return
        recipe, state = self._prepared.recipe, self._state
        tally, num_prompts, queue = RoundTally(), self.num_prompts, list(self._queue)
        try:
            self._set_units(self._sample_round(tally))
            num_prompts, queue = self.num_prompts, self._queue
        finally:
            for queued in self._queue:
                queued.is_cancelled = queued not in queue
            self.num_prompts, self._queue = num_prompts, queue
        self.num_rounds += 1
        self.exclusions.update(tally.exclusions)
        self._warn_of_changed_rewards()
        if self.kl_beta is not None and tally.kl_estimates:
            self.kl_beta = adapted(
                self.kl_beta,
                fmean(tally.kl_estimates),
                recipe.loss["kl_target"],
                recipe.loss["kl_horizon"],
                len(tally.kl_estimates),
            )
        self.steps = self._split_into_steps(self.units)
        if state.group.rank == 0:
            means = tally.means
            if self._prepared.method.needs_kl_pairs and "kl" in means:
                means["rollout/kl"] = means.pop("kl")  # for KTO, kl is the reference point
            state.window.meter.add(means)
        if tally.failures:
            self._messages.warn(
                f"round {self.num_rounds}: the reward failed for {len(tally.failures)} "
                f"completions; the first error: {tally.failures[0]}"
            )

    def next_step(self) -> StepExamples:
        """Return the examples of the next optimizer step, and the others of the round."""
        return self._examples_of(self.steps[0])

    def upcoming_step(self) -> Callable[[], StepExamples] | None:
        """None for the first step of a round, whose completions are sampled when it is due."""
        return partial(self._examples_of, self.steps[1]) if len(self.steps) > 1 else None

    def _examples_of(self, indices: Sequence[int]) -> StepExamples:
        chosen = set(indices)
        others = [unit for i, unit in enumerate(self.units) if i not in chosen]
        return [self.units[i] for i in indices], others

    def finish_step(self) -> None:
        self.steps.pop(0)
        if not self.steps:
            self._set_units([])

    def evaluate(self, corpus: Corpus, limit: int | None, phase: str) -> Evaluation:
        self.collector.finish_sampling(self._queue, RoundTally())  # the weights may be sent
        return self.collector.evaluate(corpus, limit)

    @property
    def _num_due_prompts(self) -> int:
        """Prompts of the rounds that are not in the queue."""
        return self.num_prompts - sum(len(queued.prompts) for queued in self._queue)

    @property
    def epoch(self) -> float:
        return self._num_due_prompts / len(self._prepared.corpora["train"].units)

    @property
    def metrics(self) -> dict[str, float]:
        adaptive = {} if self.kl_beta is None else {"kl_beta": self.kl_beta}
        return {"rounds": self.num_rounds, "prompts": self._num_due_prompts, **adaptive}

    def resume(self, changed: Collection[str]) -> None:
        if self._queue and any(name.startswith(QUEUE_SETTINGS) for name in changed):
            self.num_prompts, self._queue = self._queue[0].state["start"], []
        # The log-probabilities of the current round are at the old temperature.
        if "rollout.temperature" in changed:
            self.steps = []
            self._set_units([])
        if "loss.kl_beta" in changed and self.kl_beta is not None:
            self.kl_beta = self._prepared.recipe.loss["kl_beta"]
        use = self._prepared.tool_use
        if use is not None and use.tools.not_replayable and not self.steps:
            self._messages.warn(
                f"round {self.num_rounds + 1} may have begun before the interruption and is "
                f"sampled from its start: calls of {', '.join(use.tools.not_replayable)}, which "
                "cannot be replayed, may be made twice"
            )

    def close(self) -> None:
        self.collector.close()

    # A round

    def _set_units(self, units: list[TokenizedExample]) -> None:
        """Set the examples of the current round, packed once because every step reads the state."""
        self.units, self._packed = units, packed(units)

    def _sample_round(self, tally: RoundTally) -> list[TokenizedExample]:
        """Return the examples of a new round.

        Samples further prompts in place of those with equal rewards (``rollout.replace_tied``), or
        if no example is left.
        """
        recipe, method = self._prepared.recipe, self._prepared.method
        rollout, batch_size = recipe.rollout, recipe.train.batch_size
        assert method.sample_builder is not None
        groups: list[RolloutGroup] = []
        reason: tuple[str, str] = TIED
        for attempt in range(rollout.max_resample + 1):
            if attempt == 0 and self._queue:
                sampled = self._take_groups(self._queue.pop(0), tally)
            else:
                prompts = self._next_prompts(batch_size - len(groups))
                sampled = self._sample_groups(prompts, attempt, tally)
            sampled = self._with_teachers(sampled)
            groups += [group for group in sampled if not (rollout.replace_tied and group.tied)]
            self._count_excluded(sampled, tally)
            is_last = attempt == rollout.max_resample
            if rollout.replace_tied and len(groups) < batch_size and not is_last:
                continue
            units = (
                method.sample_builder(self._measure(groups, tally), rollout, self._loss_settings)
                if groups
                else []
            )
            if units and self._has_kl_pairs(units):
                self._fill_queue(tally)
                return units
            groups, reason = [], UNPAIRED if units else TIED
        if tally.exclusions and reason is TIED:
            main_exclusion = max(EXCLUSIONS, key=lambda name: tally.exclusions.get(name, 0))
            reason = describe_exclusions(tally.exclusions), FIXES[main_exclusion]
        raise NothingToLearnError(
            f"{rollout.max_resample + 1} consecutive rounds gave nothing to train on: {reason[0]}",
            code="nothing-to-learn",
            where=f"step {self._state.step}",
            fix=reason[1],
        )

    def _next_prompts(self, count: int) -> list[RolloutPrompt]:
        """Return the next prompts; each epoch shuffles them, and a round may span two epochs."""
        self.num_prompts += count
        return self._prompts_at(self.num_prompts - count, count)

    def _prompts_at(self, start: int, count: int) -> list[RolloutPrompt]:
        """Return prompts by their position in the order of the run."""
        corpus = self._prepared.corpora["train"]
        assert self._sampler is not None
        prompts: list[RolloutPrompt] = []
        for place in range(start, start + count):
            epoch, position = divmod(place, len(corpus.units))
            unit = corpus.units[self._sampler.epoch(epoch)[position]]
            row = corpus.examples[unit.id]
            assert isinstance(row, Prompt)
            prompts.append(RolloutPrompt(unit, row))
        return prompts

    def _sample_groups(
        self, prompts: Sequence[RolloutPrompt], attempt: int, tally: RoundTally
    ) -> list[RolloutGroup]:
        """Sample a round, or further prompts of one, with the current weights."""
        recipe, collector = self._prepared.recipe, self.collector
        seed = seed_of(recipe.train.seed, "rollout", self.num_rounds, attempt)
        collector.finish_sampling(self._queue, tally)  # the weights may be sent
        completions = collector.sample(prompts, recipe.rollout.num_rollouts, seed, tally)
        if not recipe.rollout.replace_tied:  # else this round may need the servers again
            self._fill_queue(tally)
        self._count_staleness(completions, tally)
        return collector.group(prompts, completions, collector.score(completions, tally), tally)

    def _take_groups(self, queued: QueuedRound, tally: RoundTally) -> list[RolloutGroup]:
        """Wait for the first round of the queue."""
        collector = self.collector
        collector.finish_sampling([queued], tally)
        completions = queued.completions
        assert completions is not None
        if not self._prepared.recipe.rollout.replace_tied:
            self._fill_queue(tally)
        self._count_staleness(completions, tally)
        scores = collector.score(completions, tally, queued)
        return collector.group(queued.prompts, completions, scores, tally)

    def _with_teachers(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Add the prompt of each completion's teacher, if the method has one."""
        encoder, corpus = self._prepared.encoder, self._prepared.corpora["train"]
        if encoder.teacher is None:
            limit = self._prepared.shared_vocabulary
            return [replace(group, shared_vocabulary=limit) for group in groups]
        max_length = self._prepared.recipe.data.max_length
        extended: list[RolloutGroup] = []
        for group in groups:
            row = corpus.examples[group.prompt.id]
            answers = [answer.text for answer in group.answers]
            texts = encoder.teacher.select(group.rewards, group.feedback, answers)
            resets = [a.episode.reset_text if a.episode else "" for a in group.answers]
            prompts = {  # several completions may have the same texts
                (text, reset): encoder.encode_teacher_prompt(
                    encoder.chat_of(row.prompt).with_user_text(reset) if reset else row.prompt,
                    *text,
                )
                for text, reset in dict.fromkeys(zip(texts, resets, strict=True))
                if text is not None
            }
            teachers = [
                () if text is None else prompts[text, reset]
                for text, reset in zip(texts, resets, strict=True)
            ]
            fitted = tuple(
                # without what an environment has added to the prompt
                ids
                if len(ids) + len(answer.tokens) - answer.sampled.index(True) <= max_length
                else None
                for ids, answer in zip(teachers, group.answers, strict=True)
            )
            extended.append(
                replace(group, teachers=fitted, shared_vocabulary=self._prepared.shared_vocabulary)
            )
        return extended

    def _fill_queue(self, tally: RoundTally) -> None:
        """Start to sample rounds that follow the current one, with the current weights."""
        recipe, state = self._prepared.recipe, self._state
        rollout, queue = recipe.rollout, self._queue
        remaining = state.total_steps - state.step
        num_rounds = min(rollout.ahead, (remaining - 1) // rollout.steps_per_round)
        if len(queue) < num_rounds:
            self.collector.finish_sampling(queue, tally)
        while len(queue) < num_rounds:
            seed = seed_of(recipe.train.seed, "rollout", self.num_rounds + 1 + len(queue), 0)
            start, prompts = self.num_prompts, self._next_prompts(recipe.train.batch_size)
            queue.append(QueuedRound(prompts, start, seed))
            self.collector.begin(queue[-1])
        for queued in queue:  # after a resume, some may have no scores
            self.collector.begin_scoring(queued)

    def _count_staleness(
        self, completions: Sequence[Sequence[Completion]], tally: RoundTally
    ) -> None:
        """Count the optimizer steps between the weights of each completion and the current ones."""
        if self._prepared.recipe.rollout.ahead:
            step = self._state.step
            staleness = [float(step - c.version) for group in completions for c in group]
            tally.add("rollout/staleness", staleness)

    def _measure(self, groups: Sequence[RolloutGroup], tally: RoundTally) -> list[RolloutGroup]:
        """Add the token columns that the method reads, except for completions of other models."""
        if self._prepared.recipe.rollout.engine == "openai":
            return list(groups)
        measured = self.collector.measure(groups, self.collector.token_columns, tally)
        self.collector.record_kl(measured, tally)
        return measured

    @property
    def _loss_settings(self) -> dict[str, Any]:
        """The settings of the loss, with the adapted KL coefficient."""
        adaptive = {} if self.kl_beta is None else {"kl_beta": self.kl_beta}
        return {**self._prepared.recipe.loss, **adaptive}

    def _count_excluded(self, groups: Sequence[RolloutGroup], tally: RoundTally) -> None:
        """Count the completions that the method excludes from training."""
        builder, rollout = self._prepared.method.sample_builder, self._prepared.recipe.rollout
        assert builder is not None
        if builder.excludes is None:
            return
        by_group = [builder.excluded([group], rollout) for group in groups]
        excluded = Counter[str](dict.fromkeys(builder.reasons, 0))
        for counts in by_group:
            excluded.update(counts)
        num_unused = sum(
            counts.total() == len(group.answers)
            for group, counts in zip(groups, by_group, strict=True)
        )
        tally.exclude(groups, excluded, num_unused)

    def _has_kl_pairs(self, units: Sequence[TokenizedExample]) -> bool:
        """Whether the examples form KL pairs, if the method needs them."""
        if not self._prepared.method.needs_kl_pairs:
            return True
        try:
            make_kl_pairs(units, max_length=self._prepared.recipe.data.max_length)
        except UserError:
            return False
        return True

    def _split_into_steps(self, units: Sequence[TokenizedExample]) -> list[list[int]]:
        """Return the indices of the examples of each optimizer step.

        Each pass over the round shuffles the prompts and divides them among its steps.
        """
        train, rollout = self._prepared.recipe.train, self._prepared.recipe.rollout
        by_prompt: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for i, unit in enumerate(units):
            by_prompt.setdefault((str(unit.origin), unit.prompt_ids), []).append(i)
        steps: list[list[int]] = []
        for epoch in range(rollout.num_epochs):
            number = self.num_rounds * rollout.num_epochs + epoch
            # by content, not by origin: another path of the same file changes nothing
            order = sorted(by_prompt, key=lambda key: seed_of(train.seed, "order", number, key[1]))
            num_steps = min(rollout.steps, len(order))
            for k in range(num_steps):
                keys = order[k * len(order) // num_steps : (k + 1) * len(order) // num_steps]
                indices = [i for key in keys for i in by_prompt[key]]
                shuffled = canonical_order([units[i] for i in indices], train.seed, number)
                steps.append([indices[i] for i in shuffled])
        return steps

    def _warn_of_changed_rewards(self) -> None:
        """Warn of reward functions whose code or model has changed since they last scored, and of
        tools whose code has changed."""
        before, self.reward_digests = self.reward_digests, self.collector.reward_digests
        for name in before.keys() & self.reward_digests.keys():
            if before[name] != self.reward_digests[name]:
                subject = "the tools have" if name == TOOLS else f"reward {name} has"
                use = "use the new ones" if name == TOOLS else "are scored by its new version"
                self._messages.warn(
                    f"{subject} changed: from round {self.num_rounds} on, completions {use}"
                )

    # State

    def settle(self) -> None:
        """Wait until the rounds of the queue are sampled, so that ``state_dict`` contains them. All
        processes call it.
        """
        self.collector.settle(self._queue)

    def state_dict(self) -> dict[str, Any]:
        return {
            "done": self.num_rounds,
            "consumed": self.num_prompts,
            "kl_beta": self.kl_beta,
            "units": self._packed,
            "steps": [list(step) for step in self.steps],
            "judges": self.reward_digests,
            "exclusions": dict(self.exclusions),
            "queue": [queued.state for queued in self._queue],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_rounds, self.num_prompts = state["done"], state["consumed"]
        # None: the coefficient is fixed, or was until now.
        if self.kl_beta is not None and state["kl_beta"] is not None:
            self.kl_beta = state["kl_beta"]
        self.reward_digests = state.get("judges", {})
        self.exclusions = Counter(state.get("exclusions", {}))
        self.units, self.steps = unpacked(state["units"]), [list(step) for step in state["steps"]]
        self._packed = state["units"]
        self._queue = []
        for saved in state.get("queue", ()):
            if saved["completions"] is None:  # these weights are gone: newer ones sample it
                self.num_prompts = saved["start"]
                break
            self._queue.append(self._restored_round(saved))

    def _restored_round(self, saved: Mapping[str, Any]) -> QueuedRound:
        prompts = self._prompts_at(saved["start"], saved["prompts"])
        queued = QueuedRound(prompts, saved["start"], saved["seed"])
        self.collector.restore(queued, saved["completions"], saved["scores"])
        return queued


def describe_exclusions(exclusions: Mapping[str, int]) -> str:
    """How many completions were not trained on, and why: what a round or a run has excluded."""
    reasons = [
        f"{exclusions[reason]} {words}"
        for reason, words in EXCLUSIONS.items()
        if exclusions.get(reason)
    ]
    excluded = f": {', '.join(reasons)}" if reasons else ""
    return (
        f"{exclusions['prompts_without']} of {exclusions['prompts']} prompts gave no example; "
        f"{sum(exclusions.get(reason, 0) for reason in EXCLUSIONS)} of "
        f"{exclusions['completions']} completions were excluded{excluded}"
    )


def seed_of(*parts: object) -> int:
    """A number below 2**63 that depends on these alone."""
    return (
        int.from_bytes(
            hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little"
        )
        >> 1
    )
