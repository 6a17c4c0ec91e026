"""Let Optuna choose the values of a sweep, one configuration after the other.

``sweep.json`` decides which trials exist. Optuna's journal in the same folder is brought up to date
with it at each start, so that the tools of Optuna can show the study. Each suggestion has a sampler
with another seed, so that a killed search continues with the same suggestions.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from valence.apps.sweep.grid import Grid, ValueRange
from valence.apps.sweep.state import SweepState, Trial
from valence.errors import UserError, install_command
from valence.statistics import mean
from valence.storage import publish

JOURNAL = "optuna.journal"
STUDY = "sweep"
SEED = 0
MAX_REPEATS = 100
"""Consecutive suggestions of known configurations after which the search ends."""
MIN_VALUES = 1000
"""Values of a range that rounding distinguishes."""


class OptunaSearch:
    """A search with Optuna's default sampler (TPE).

    num_trials: configurations to try, each with all seeds.
    """

    def __init__(self, grid: Grid, folder: Path, seeds: Sequence[int], num_trials: int) -> None:
        """Raises UserError if Optuna is not installed."""
        if find_spec("optuna") is None:
            raise UserError(
                "optuna is not installed",
                code="library-missing",
                where="--search optuna",
                fix=install_command("optuna"),
            )
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._grid, self._seeds, self._num_trials = grid, tuple(seeds), num_trials
        self._distributions = {name: _distribution(name, axis) for name, axis in grid.axes.items()}
        try:
            self._study = _open_study(folder / JOURNAL)
        except (ValueError, LookupError, TypeError, AttributeError):  # its lines are damaged
            publish(folder / f"{JOURNAL}.damaged", folder / JOURNAL)
            self._study = _open_study(folder / JOURNAL)

    def extend(self, state: SweepState) -> bool:
        """Add the trials of the next configuration that the sweep does not have. Returns whether
        there is one.
        """
        import optuna

        self._update(state)
        count = num_searched(state)
        if count >= self._num_trials or self._is_exhausted(state):
            return False
        for attempt in range(MAX_REPEATS):
            # a sampler with the same seed would repeat itself
            seed = SEED + count + attempt * 10_000
            self._study.sampler = optuna.samplers.TPESampler(seed=seed)
            trial = self._study.ask(self._distributions)
            values = {name: _rounded(v, self._grid.axes[name]) for name, v in trial.params.items()}
            configuration = self._grid.configuration(values)
            if not state.has(configuration):
                state.add(configuration, self._seeds, trial.number)
                return True
            # the sampler ignores failed trials, and knows the result already
            self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        return False

    def _is_exhausted(self, state: SweepState) -> bool:
        """Whether the axes are lists of values of which the sweep has every combination."""
        axes = self._grid.axes
        lists = [axis for axis in axes.values() if not isinstance(axis, ValueRange)]
        return len(lists) == len(axes) and all(
            state.has(self._grid.configuration(dict(zip(axes, values, strict=True))))
            for values in product(*lists)
        )

    def report(self, state: SweepState) -> None:
        """Tell Optuna the results of configurations whose trials have all ended."""
        self._update(state)

    def add_seeds(self, state: SweepState) -> None:
        """Make these seeds the current ones of the configurations of an earlier start."""
        for trial in state.trials:
            trial.included = trial.seed in self._seeds and (
                trial.included or trial.number is not None
            )
        for number in sorted({t.number for t in state.trials if t.number is not None}):
            trials = [t for t in state.trials if t.number == number]
            missing = [seed for seed in self._seeds if seed not in {t.seed for t in trials}]
            values = {name: trials[0].values[name] for name in self._grid.axes}
            state.add(self._grid.configuration(values), missing, number)
        state.trials.sort(key=lambda t: (t.number is not None, t.number or 0))  # stable
        self._restore(state)

    def _restore(self, state: SweepState) -> None:
        """Add trials of the state that the journal has lost, so that numbers are not used again."""
        import optuna

        known = {t.number: t.values for t in state.trials if t.number is not None}
        num_present = len(self._study.get_trials(deepcopy=False))
        for number in range(num_present, max(known, default=-1) + 1):
            if number in known:
                values = {name: known[number][name] for name in self._grid.axes}
                self._study.enqueue_trial(values)
            self._study.ask(self._distributions)
            if number not in known:
                self._study.tell(number, state=optuna.trial.TrialState.FAIL)

    def _update(self, state: SweepState) -> None:
        """Tell Optuna what the state knows and the journal does not.

        Failed and stopped trials stay open there, because a later start may finish them.
        """
        import optuna

        running = self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
        for frozen in running:
            trials = [t for t in state.trials if t.number == frozen.number]
            if not trials:  # killed before its trials were stored
                self._study.tell(frozen.number, state=optuna.trial.TrialState.FAIL)
            elif all(t.state == "done" for t in trials):
                self._study.tell(frozen.number, _objective(trials, state.sign))


def num_searched(state: SweepState) -> int:
    """The number of different configurations that a search has suggested."""
    return len({trial.key for trial in state.trials if trial.number is not None})


def _objective(trials: Sequence[Trial], sign: int) -> float:
    value = mean(t.value for t in trials if t.value is not None)
    assert value is not None
    return sign * value


def _open_study(journal: Path) -> Any:
    """The study in a journal, without the incomplete last line of a killed process."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    content = journal.read_bytes() if journal.exists() else b""
    if not content.endswith(b"\n"):
        with journal.open("ab") as file:
            file.truncate(content.rfind(b"\n") + 1)
    # every value is stored such that larger is better
    return optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal))),
        study_name=STUDY,
        direction="maximize",
        load_if_exists=True,
    )


def _rounded(value: Any, axis: Any) -> Any:
    """A number with four digits, because it names the folder of a run; with more of them if the
    range is narrow.
    """
    if not isinstance(value, float) or not isinstance(axis, ValueRange):
        return value
    for digits in range(4, 17):
        rounded = float(f"{value:.{digits}g}")
        if axis.low <= rounded <= axis.high and (
            abs(rounded - value) <= (axis.high - axis.low) / MIN_VALUES
        ):
            return rounded
    return value


def _distribution(name: str, axis: Any) -> Any:
    """Optuna's distribution of a range or a list of values."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if not isinstance(axis, ValueRange):
        for value in axis:
            if isinstance(value, list | dict):
                raise UserError(
                    f"--search optuna supports numbers and words, but not the value {value}",
                    code="sweep-range",
                    where=f"--over {name}",
                    fix="leave out --search optuna, or remove this setting from --over",
                )
        return CategoricalDistribution(axis)
    if axis.is_integer:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.is_log)
    return FloatDistribution(axis.low, axis.high, log=axis.is_log)
