"""The trials of a sweep and their results, stored in ``sweep.json``.

The file is replaced atomically after every change, so that a killed sweep loses no result. What a
trial has trained is in the trial's run folder; the file can be built again from these folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal

from valence.apps.sweep.grid import Configuration, folder_name, key_of
from valence.config.load import LoadedRecipe
from valence.errors import UserError
from valence.files import check_path
from valence.reports.run_record import FACTS
from valence.storage import (
    LOCK_FILE,
    Lock,
    add_checksum,
    atomic_write,
    read_json,
    rename,
    verify,
    writing,
)

STATE_FILE, PAGE, TRIALS, LOGS, REFERENCE = (
    "sweep.json", "sweep.html", "trials", "logs", "reference",
)  # fmt: skip
FORMAT = 1
UNCOMPARED = (
    *(f"run.{name}" for name in ("dir", "save_", "keep", "max_", "sinks", "export", "log_every")),
    "run.samples",
    "parallel.",
    "eval.train_examples",
    "reference.cache",
)
"""Beginnings of settings that may change between two starts of a sweep: they change no result."""
MAX_LISTED = 12

TrialState = Literal["waiting", "running", "done", "stopped", "failed"]


@dataclass
class Trial:
    """One run of a sweep: a configuration with a seed.

    state: stopped means stopped early, by the rule of the sweep. included: whether the current grid
    contains it. value, step: of the objective at the last evaluation, or where the trial was
    stopped. test: the objective on the test rows. reason: why it failed or was stopped. computed,
    cached: sequences whose reference log-probabilities were computed, or read from the cache.
    rows: digests of the rows. number: of the search that suggested it.
    """

    name: str
    values: dict[str, Any]
    seed: int
    overrides: list[str]
    is_default: bool = False
    shares_cache: bool = False
    included: bool = True
    state: TrialState = "waiting"
    value: float | None = None
    step: int | None = None
    test: float | None = None
    reason: str = ""
    seconds: float = 0.0
    computed: int = 0
    cached: int = 0
    rows: dict[str, str] = field(default_factory=dict[str, str])
    number: int | None = None

    @property
    def key(self) -> str:
        """Identifies the configuration, without the seed."""
        return key_of(self.values)


class SweepState:
    """The content of ``sweep.json``, which ``save`` writes.

    settings: of the recipe with its fixed overrides. objective: name and sign of the metric, once
    known. results: added by the report.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings: dict[str, Any] = {}
        self.definition: dict[str, Any] = {}
        self.objective: str | None = None
        self.sign = 0
        self.trials: list[Trial] = []
        self.results: dict[str, Any] = {}

    @property
    def path(self) -> Path:
        return self.folder / STATE_FILE

    @property
    def included(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.included]

    def run_dir(self, trial: Trial) -> Path:
        return self.folder / TRIALS / trial.name

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **self.definition,
            "objective": self.objective,
            "goal": {1: "max", -1: "min"}.get(self.sign),
            "results": self.results,
            "trials": [{**asdict(trial), "run": f"{TRIALS}/{trial.name}"} for trial in self.trials],
            "settings": self.settings,
        }

    def save(self) -> None:
        """Raises UserError if the file cannot be written."""
        text = json.dumps(
            add_checksum(self.as_dict()), indent=1, ensure_ascii=False, allow_nan=False, default=str
        )
        with writing(self.path, "free disk space, then rerun the same command to resume"):
            atomic_write(self.path, text)

    def load(self) -> str:
        """Read the file, if there is one. Returns a warning if it is damaged: it is moved aside.

        Raises UserError if another version of Valence wrote it.
        """
        try:
            content = verify(read_json(self.path))
            if content["format"] != FORMAT:
                raise UserError(
                    f"the file has format {content['format']}, and this version of Valence reads "
                    f"{FORMAT}",
                    code="sweep-format",
                    where=str(self.path),
                    fix="continue the sweep with the version of Valence that started it",
                )
            names = {f.name for f in fields(Trial)}
            self.trials = [
                Trial(**{name: value for name, value in trial.items() if name in names})
                for trial in content["trials"]
            ]
            self.settings = content["settings"]
            self.definition = {name: content[name] for name in ("over", "search")}
            self.objective = content["objective"]
            self.sign = {"max": 1, "min": -1}.get(content["goal"], 0)
        except FileNotFoundError:
            return ""
        except (
            OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
        ) as error:  # fmt: skip
            stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
            endings = (f"{stamp}-{n}" if n else stamp for n in count())
            aside = rename(self.path, (self.path.with_name(f"{STATE_FILE}.{e}") for e in endings))
            self.trials, self.settings = [], {}
            return (
                f"{self.path} cannot be read ({error}): it was moved to {aside}, and is written "
                f"again from the trials"
            )
        return ""

    def check_settings(self, source: LoadedRecipe, axes: Sequence[str]) -> None:
        """Compare with the settings of an earlier start, then store those of this one.

        axes: settings that the sweep varies now. Raises UserError for a difference, which would
        make trials incomparable.
        """
        now = json.loads(json.dumps({n: s.value for n, s in source.settings.items()}, default=str))
        varied = {*axes, *(name for trial in self.trials for name in trial.values)}
        changed = [
            name
            for name in sorted(self.settings.keys() | now.keys())
            if self.settings
            and name not in varied
            and not name.startswith(UNCOMPARED)
            and self.settings.get(name) != now.get(name)
        ]
        if changed:
            lines = [
                f"  {name}: {json.dumps(self.settings.get(name))} -> {json.dumps(now.get(name))}"
                for name in changed[:MAX_LISTED]
            ]
            lines += [f"  and {len(changed) - MAX_LISTED} more"] * (len(changed) > MAX_LISTED)
            raise UserError(
                "\n".join(["this folder contains a sweep with other settings:", *lines]),
                code="sweep-differs",
                where=str(self.folder),
                fix="undo these changes, or choose another --out",
            )
        for trial in self.trials:  # a setting that is varied from now on had the recipe's value
            missing = {name: self.settings.get(name) for name in axes if name not in trial.values}
            trial.values = {**trial.values, **missing}
        self.settings = now

    def include(self, configurations: Sequence[Configuration], seeds: Sequence[int]) -> None:
        """Make these configurations with these seeds the current trials, in this order: all
        configurations with the first seed, then with the next. Others are kept behind them.
        """
        trials = {(trial.key, trial.seed): trial for trial in self.trials}
        for trial in self.trials:
            trial.included = False
        current = [self._trial(trials, c, seed) for seed in seeds for c in configurations]
        self.trials = [*current, *(trial for trial in self.trials if not trial.included)]

    def has(self, configuration: Configuration) -> bool:
        """Whether a trial of the sweep has the values of the configuration."""
        key = key_of(_plain_values(configuration))
        return any(trial.key == key for trial in self.included)

    def add(self, configuration: Configuration, seeds: Sequence[int], number: int) -> None:
        """Add the trials of a configuration that a search suggested."""
        for seed in seeds:
            trial = self._trial({}, configuration, seed)
            trial.name, trial.number = f"{number:03},{trial.name}", number
            self.trials.append(trial)

    def _trial(
        self, trials: Mapping[tuple[str, int], Trial], configuration: Configuration, seed: int
    ) -> Trial:
        values = _plain_values(configuration)
        trial = trials.get((key_of(values), seed)) or Trial(
            name=f"{folder_name(configuration.label)},seed={seed}",
            values=values,
            seed=seed,
            overrides=[],
        )
        # an earlier start may have written the same values with another recipe value around them
        trial.overrides = [*configuration.overrides, f"train.seed={seed}"]
        trial.is_default, trial.included = configuration.is_default, True
        trial.shares_cache = configuration.shares_cache
        return trial


def _plain_values(configuration: Configuration) -> dict[str, Any]:
    """The values of a configuration as they are read back from a file."""
    return json.loads(json.dumps(configuration.values, default=str))


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Inside the block, this process alone uses the folder, which is created if needed.

    Raises UserError if another sweep uses it, if it contains other files, and for an OSError in the
    block.
    """
    check_path(folder, "--out")
    if folder.exists() and not folder.is_dir():
        raise UserError(
            "the path is a file",
            code="path-is-file",
            where=f"--out {folder}",
            fix="set --out to a folder",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in folder.iterdir()} - {LOCK_FILE}
    except OSError as error:
        raise UserError(
            f"the folder cannot be used ({error.strerror})",
            code="folder-not-writable",
            where=f"--out {folder}",
            fix="choose another --out",
        ) from error
    if FACTS in names or (names and not names & {STATE_FILE, TRIALS}):
        raise UserError(
            "the folder contains a training run, not a sweep"
            if FACTS in names
            else "the folder contains files that do not belong to a sweep",
            code="folder-not-empty",
            where=f"--out {folder}",
            fix="set --out to a new or empty folder, or to the folder of an earlier sweep",
        )
    lock = Lock(folder)
    try:
        lock.take()
    except UserError as error:
        if error.code != "run-locked":
            raise
        raise UserError(
            error.message.replace("another run", "another sweep"),
            code="run-locked",
            where=error.where,
            fix="wait until the other sweep ends, stop it, or choose another --out",
        ) from None
    try:
        yield
    except OSError as error:
        raise UserError(
            f"a file of the sweep cannot be read or written ({error})",
            code="file-not-writable",
            where=f"--out {folder}",
            fix="free disk space, then rerun the same command to resume",
        ) from error
    finally:
        lock.release()
