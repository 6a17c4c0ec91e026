"""Let Optuna choose the values of a sweep, one configuration after the other.

``sweep.json`` decides which trials exist. Optuna's journal in the same folder is brought up to date
with it at each start, so that the tools of Optuna can show the study. Each suggestion has a sampler
with another seed, so that a killed search continues with the same suggestions.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from valence.errors import UserError, install_command
from valence.reports.stats import mean
from valence.sweeps.grid import Grid, ValueRange
from valence.sweeps.state import SweepState, Trial

JOURNAL = "optuna.journal"
STUDY = "sweep"
SEED = 0


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
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._grid, self._seeds, self._num_trials = grid, tuple(seeds), num_trials
        self._distributions = {name: _distribution(axis) for name, axis in grid.axes.items()}
        backend = JournalFileBackend(str(folder / JOURNAL))
        # every value is stored such that larger is better
        self._study = optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name=STUDY,
            direction="maximize",
            load_if_exists=True,
        )

    def extend(self, state: SweepState) -> bool:
        """Add the trials of the next configuration. Returns whether there is one."""
        import optuna

        self._update(state)
        numbers = sorted({t.number for t in state.trials if t.number is not None})
        count = len(numbers)
        if count >= self._num_trials:
            return False
        self._study.sampler = optuna.samplers.TPESampler(seed=SEED + count)
        trial = self._study.ask(self._distributions)
        configuration = self._grid.configuration(_plain(trial.params))
        state.add(configuration, self._seeds, trial.number)
        return True

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


def _objective(trials: Sequence[Trial], sign: int) -> float:
    value = mean(t.value for t in trials if t.value is not None)
    assert value is not None
    return sign * value


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Values with numbers at four digits, which name the folders of runs."""
    return {n: float(f"{v:.4g}") if isinstance(v, float) else v for n, v in values.items()}


def _distribution(axis: Any) -> Any:
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
                    "--search optuna supports values that are numbers or words, not lists",
                    code="sweep-range",
                    where="--over",
                    fix="leave out --search optuna, or the settings with lists",
                )
        return CategoricalDistribution(axis)
    if axis.is_integer:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.is_log)
    return FloatDistribution(axis.low, axis.high, log=axis.is_log)
