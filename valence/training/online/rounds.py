"""Where a run stands with its rounds: which prompts were answered, and what of the present round is
still to be trained on.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from valence.batching.kl_pairs import make_kl_pairs
from valence.data.sampler import canonical_order
from valence.errors import UserError
from valence.losses.advantage import adapted
from valence.training.online.collect import Asked, Collector, RoundTally
from valence.training.online.packed import packed, unpacked
from valence.training.online.sample_builders import EXCLUSIONS, Exclusion, RolloutGroup
from valence.types import Prompt, TokenizedExample

if TYPE_CHECKING:
    from valence.training.loop import Run

SAME = (
    "the answers to each prompt are worth the same",
    "look at the reward and the prompts, or raise rollout.num_rollouts or rollout.temperature",
)
UNPAIRED = (
    "their answers are all to one prompt or all alike, and each is measured behind a prompt of "
    "another one",
    "raise train.batch_size, or give more prompts; online_apo_zero_unpaired does without",
)
"""Why a round cannot be trained on, and what would help."""

FIXES: dict[Exclusion, str] = {
    "tied": SAME[1],
    "truncated": "raise rollout.max_new_tokens, or set rollout.mask_truncated: false",
    "low_reward": "lower rollout.min_reward, or sample more (rollout.num_rollouts)",
    "worst": SAME[1],
}
"""What would help where most completions are excluded for one reason."""


class NothingToLearnError(UserError):
    """Round after round had nothing to train on."""


class Rounds:
    """The rounds of a run.

    ``done``: rounds that were sampled; ``consumed``: prompts that were answered, over all epochs;
    ``steps``: of the present round, for each optimizer step left the indices of its ``units``.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.collector = Collector(run)
        self.done = self.consumed = 0
        self._hold([])
        self.steps: list[list[int]] = []
        self.kl_beta: float | None = (
            run.recipe.loss["kl_beta"] if run.recipe.loss.get("kl_target") else None
        )
        """Where it is adapted."""
        self.judges: dict[str, str] = {}
        """Of each reward that has judged, what it was."""
        self.exclusions: Counter[str] = Counter()
        """Of all rounds; see ``RoundTally``."""

    # ------------------------------------------------------------------ what a step trains on

    def next(self) -> tuple[list[TokenizedExample], list[TokenizedExample]]:
        """The units of the next optimizer step, and the others of the round."""
        own = self.steps[0]
        others = [i for i in range(len(self.units)) if i not in set(own)]
        return [self.units[i] for i in own], [self.units[i] for i in others]

    def passed(self) -> None:
        """A step was made."""
        self.steps.pop(0)
        if not self.steps:
            self._hold([])

    def fill(self) -> None:
        """Sample the next round when the present one has been trained on. Raises Interrupted when
        that is broken off, which leaves all as it was; NothingToLearnError when too many rounds in
        a row had nothing to train on; UserError when rewards failed."""
        if self.steps:
            return
        tally, begun = RoundTally(), self.consumed
        try:
            self._hold(self._sampled(tally))
            begun = self.consumed
        finally:
            self.consumed = begun
        self.done += 1
        self.exclusions.update(tally.exclusions)
        self._compare_judges()
        if self.run.prepared.method.fills:
            self._ask_ahead(seed_of(self.run.recipe.train.seed, "rollout", self.done, "ahead"))
        if self.kl_beta is not None and tally.apart:
            target, horizon = self.run.recipe.loss["kl_target"], self.run.recipe.loss["kl_horizon"]
            self.kl_beta = adapted(
                self.kl_beta, fmean(tally.apart), target, horizon, len(tally.apart)
            )
        self.steps = self._split(self.units)
        self._tell(tally)

    def _compare_judges(self) -> None:
        """Tells of rewards that are others than those that judged before the run was taken up,
        which no setting says.
        """
        before, self.judges = self.judges, self.collector.judges
        for name in before.keys() & self.judges.keys():
            if before[name] != self.judges[name]:
                self.run.warn(
                    f"reward {name} has changed: answers from round {self.done} on are judged by "
                    f"what it is now"
                )

    def _hold(self, units: list[TokenizedExample]) -> None:
        """Takes units as those of the present round.

        They are packed once, as every step asks for the state.
        """
        self.units, self._packed = units, packed(units)

    def _sampled(self, tally: RoundTally) -> list[TokenizedExample]:
        """What a round is trained on.

        Prompts that teach nothing have others in their place, where the method wants that or where
        nothing else is left.
        """
        run, rollout, method = self.run, self.run.recipe.rollout, self.run.prepared.method
        assert method.makes is not None
        kept: list[RolloutGroup] = []
        why: tuple[str, str] = SAME
        for attempt in range(rollout.max_resample + 1):
            found = self._answered(
                self._take(run.recipe.train.batch_size - len(kept)), attempt, tally
            )
            kept += [each for each in found if not (method.fills and each.tied)]
            self._count_excluded(found, tally)
            if (
                method.fills
                and len(kept) < run.recipe.train.batch_size
                and attempt < rollout.max_resample
            ):
                continue
            units = (
                method.makes(self._measured(kept, tally), rollout, self._settings) if kept else []
            )
            if units and self._paired(units):
                return units
            kept, why = [], UNPAIRED if units else SAME
        if tally.exclusions and why is SAME:
            why = describe_exclusions(tally.exclusions), _fix_for(tally.exclusions)
        what = f"{rollout.max_resample + 1} rounds in a row had nothing to teach: {why[0]}"
        raise NothingToLearnError(
            what, code="nothing-to-learn", where=f"step {run.step}", fix=why[1]
        )

    def _count_excluded(self, groups: Sequence[RolloutGroup], tally: RoundTally) -> None:
        """Count what the method must not train on, where it excludes completions one by one."""
        method, rollout = self.run.prepared.method, self.run.recipe.rollout
        assert method.makes is not None
        if method.makes.excludes is None:
            return
        by_group = [method.makes.excluded([group], rollout) for group in groups]
        num_unused = sum(
            counts.total() == len(group.answers)
            for group, counts in zip(groups, by_group, strict=True)
        )
        tally.exclude(groups, sum(by_group, Counter[str]()), num_unused)

    @property
    def _settings(self) -> dict[str, Any]:
        """Of the loss, as they are by now."""
        steered = {} if self.kl_beta is None else {"kl_beta": self.kl_beta}
        return {**self.run.recipe.loss, **steered}

    def _answered(
        self, asked: Sequence[Asked], attempt: int, tally: RoundTally
    ) -> list[RolloutGroup]:
        seed = seed_of(self.run.recipe.train.seed, "rollout", self.done, attempt)
        collector = self.collector
        rollout = self.run.recipe.rollout
        answers = collector.answers(asked, rollout.num_rollouts, seed, tally)
        if not self.run.prepared.method.fills:  # else this round may need more prompts first
            self._ask_ahead(seed)
        return collector.judged(asked, answers, collector.scores(answers, tally), tally)

    def _ask_ahead(self, seed: int) -> None:
        """Has the prompts of the round after this one answered while this one is trained on, if
        there will be one.
        """
        run, rollout = self.run, self.run.recipe.rollout
        if not rollout.ahead or run.step + rollout.steps_per_round >= run.total_steps:
            return
        begun = self.consumed
        self.collector.begin(
            self._take(run.recipe.train.batch_size), rollout.num_rollouts, seed + 1
        )
        self.consumed = begun

    def _measured(self, round: Sequence[RolloutGroup], tally: RoundTally) -> list[RolloutGroup]:
        """With what the method reads of the tokens, and what the log tells of them: of another
        model's answers nothing.
        """
        if self.run.recipe.rollout.engine == "openai":
            return list(round)
        found = self.collector.measured(round, self.collector.reads, tally)
        self.collector.divergence(found, tally)
        return found

    def _paired(self, units: Sequence[TokenizedExample]) -> bool:
        """Whether each answer can be put behind a prompt that it does not answer, where the method
        does that.
        """
        if not self.run.prepared.method.needs_kl_pairs:
            return True
        try:
            make_kl_pairs(units, max_length=self.run.recipe.data.max_length)
        except UserError:
            return False
        return True

    def _take(self, count: int) -> list[Asked]:
        """The next prompts, in each epoch in another order.

        A round may reach into the next epoch.
        """
        corpus = self.run.prepared.corpora["train"]
        sampler, units, found = self.run.sampler, corpus.units, list[Asked]()
        assert sampler is not None
        for _ in range(count):
            epoch, place = divmod(self.consumed, len(units))
            unit = units[sampler.epoch(epoch)[place]]
            found.append(asked_of(unit, corpus.examples[unit.id]))
            self.consumed += 1
        return found

    def _split(self, units: Sequence[TokenizedExample]) -> list[list[int]]:
        """The units of each optimizer step of the round: in every pass the prompts in another
        order, dealt to its steps.
        """
        train, rollout = self.run.recipe.train, self.run.recipe.rollout
        families: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for i, unit in enumerate(units):
            families.setdefault((str(unit.origin), unit.prompt_ids), []).append(i)
        found: list[list[int]] = []
        for epoch in range(rollout.num_epochs):
            number = self.done * rollout.num_epochs + epoch
            order = sorted(families, key=lambda key: seed_of(train.seed, "order", number, *key))
            parts = min(rollout.steps, len(order))
            for k in range(parts):
                own = [
                    i
                    for key in order[k * len(order) // parts : (k + 1) * len(order) // parts]
                    for i in families[key]
                ]
                found.append(
                    [own[i] for i in canonical_order([units[i] for i in own], train.seed, number)]
                )
        return found

    def _tell(self, tally: RoundTally) -> None:
        run = self.run
        if run.group.rank == 0:
            means = tally.means
            # kto calls its reference point so
            if run.prepared.method.needs_kl_pairs and "kl" in means:
                means["rollout/kl"] = means.pop("kl")
            run.window.meter.add(means)
        if tally.failures:
            run.warn(
                f"round {self.done}: {len(tally.failures)} answers have no score; the first: "
                f"{tally.failures[0]}"
            )

    @property
    def epochs(self) -> float:
        """Passes over the prompts so far."""
        return self.consumed / len(self.run.prepared.corpora["train"].units)

    @property
    def counters(self) -> dict[str, float]:
        """For the log."""
        steered = {} if self.kl_beta is None else {"kl_beta": self.kl_beta}
        return {"rounds": self.done, "prompts": self.consumed, **steered}

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {
            "done": self.done,
            "consumed": self.consumed,
            "kl_beta": self.kl_beta,
            "units": self._packed,
            "steps": [list(step) for step in self.steps],
            "judges": self.judges,
            "exclusions": dict(self.exclusions),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.consumed = state["done"], state["consumed"]
        # else it is not adapted, or was not until now
        if self.kl_beta is not None and state["kl_beta"] is not None:
            self.kl_beta = state["kl_beta"]
        self.judges = state.get("judges", {})
        self.exclusions = Counter(state.get("exclusions", {}))
        self.units, self.steps = unpacked(state["units"]), [list(step) for step in state["steps"]]
        self._packed = state["units"]

    def take_up(self, changed: Collection[str]) -> None:
        """After settings or rows have changed, by name: what no longer holds of the saved state."""
        if "data.train" in changed:
            self.consumed = 0
        # at which the round in flight was measured
        if "data.train" in changed or "rollout.temperature" in changed:
            self.steps = []
            self._hold([])
        if "loss.kl_beta" in changed and self.kl_beta is not None:
            self.kl_beta = self.run.recipe.loss["kl_beta"]


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


def _fix_for(exclusions: Mapping[str, int]) -> str:
    return FIXES[max(EXCLUSIONS, key=lambda reason: exclusions.get(reason, 0))]


def asked_of(unit: TokenizedExample, example: Any) -> Asked:
    """A prompt with its row."""
    assert isinstance(example, Prompt)
    return Asked(unit, example)


def seed_of(*parts: object) -> int:
    """A number below 2**63 that depends on these alone."""
    return (
        int.from_bytes(
            hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little"
        )
        >> 1
    )
