"""Run the trials of a sweep one after the other, each in a separate process.

A trial is an ordinary run: ``valence train --json`` with a folder below ``trials/``. Its process
can crash or run out of memory without ending the sweep, and it can be resumed like any run. This
module imports no torch.
"""

from __future__ import annotations

import json
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from valence.apps.sweep.grid import Grid, label_of, load
from valence.apps.sweep.objective import Objectives
from valence.apps.sweep.state import LOGS, REFERENCE, SweepState, Trial
from valence.config.schema import seconds_of
from valence.distributed.launcher import STOPPED, end_with_parent
from valence.errors import UserError
from valence.options import SweepOptions
from valence.reports.console import Progress
from valence.reports.formatting import duration, number
from valence.reports.run_record import LOG, RunRecord, read_undamaged_facts
from valence.statistics import finite
from valence.storage import checksum, holder
from valence.terminal import print_message

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
OUT_OF_TIME = 124
PROGRAM = (sys.executable, "-m", "valence")
"""The command of a trial, before its arguments."""
POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0
"""Time for a trial to end by itself after a second signal."""
MAX_EQUAL_FAILURES = 2
"""A sweep ends when this many first trials fail with the same mistake, which all of them share."""
RESULT_OF_SETTINGS = ("loss-not-finite", "weights-not-finite", "nothing-to-learn")
"""Codes of failures that other settings may avoid."""
MIN_FINISHED, MIN_SHARE = 4, 1 / 3
"""Number of finished trials and share of the steps before the rule for stopping early applies."""


class StopRequestedError(Exception):
    """The sweep ends before its last trial. status: its exit status. reason: a short text."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Search(Protocol):
    """Suggests further configurations from the results so far."""

    def extend(self, state: SweepState) -> bool:
        """Add trials to the state. Returns whether there are any."""
        ...

    def report(self, state: SweepState) -> None:
        """Take notice of a trial that has ended."""
        ...


class Signals:
    """The signals that this process received, in order, while it listens."""

    def __init__(self) -> None:
        self.pending: list[int] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as cleanup:
            for name in SIGNALS:
                if signal.getsignal(name) not in (signal.SIG_IGN, None):
                    previous = signal.signal(name, lambda n, _: self.pending.append(n))
                    cleanup.callback(signal.signal, name, previous)
            yield


class SweepRunner:
    """Runs the trials of a sweep that have not ended.

    on_trial: called after each trial that has ended.
    """

    def __init__(
        self,
        grid: Grid,
        state: SweepState,
        objectives: Objectives,
        options: SweepOptions,
        console: Console,
        *,
        search: Search | None = None,
        on_trial: Callable[[Trial], None] = lambda _: None,
    ) -> None:
        self.grid, self.state, self.objectives, self.options = grid, state, objectives, options
        self.console, self.search, self.on_trial = console, search, on_trial
        self._signals = Signals()
        limit = seconds_of(grid.base.recipe.run.max_time or "")
        self._deadline = time.monotonic() + limit if limit else float("inf")
        self._attempted: set[str] = set()
        self._durations: list[float] = []
        """Seconds of the complete trials of this start, with loading and writing the model."""
        self._histories: dict[str, dict[int, float]] = {}

    def run(self) -> None:
        """Run trials until none is left.

        Raises StopRequestedError after a signal or run.max_time, with the current trial saved.
        Raises UserError for a mistake that all trials share.
        """
        with self._signals.listening():
            while True:
                trial = self._next()
                if trial is None:
                    if self.search is None or not self.search.extend(self.state):
                        return
                    self.state.save()
                    continue
                self._check_stop()
                source = load(self.grid.recipe, self.grid.overrides)  # edited in the meantime?
                self.state.check_settings(source, list(self.grid.axes))
                self._attempted.add(trial.name)
                self._run_trial(trial)
                self.state.save()
                if self.search is not None and trial.state != "running":
                    self.search.report(self.state)
                self.on_trial(trial)
                self._check_failures(trial)

    def _next(self) -> Trial | None:
        """The next trial to run. Trials that failed in an earlier start are tried again."""
        for trial in self.state.included:
            if trial.state == "stopped" and not self.options.stop_early:
                trial.state, trial.reason = "waiting", ""
            if trial.state in ("done", "stopped") or trial.name in self._attempted:
                continue
            if self.options.stop_early and (other := self._stopped_seed(trial)):
                trial.state = "stopped"
                trial.reason = f"not started: seed={other.seed} was stopped early"
                continue
            return trial
        return None

    def _stopped_seed(self, trial: Trial) -> Trial | None:
        """A trial of the same configuration that was stopped early by itself."""
        return next(
            (
                other
                for other in self.state.included
                if other.key == trial.key and other.state == "stopped" and other.step is not None
            ),
            None,
        )

    def _check_failures(self, trial: Trial) -> None:
        """Raise UserError if the first trials fail with the same mistake."""
        ended = [t for t in self.state.included if t.name in self._attempted or t.state == "done"]
        reasons = {t.reason for t in ended}
        if (
            trial.state == "failed"
            and self._last_error is not None
            and self._last_error.code not in RESULT_OF_SETTINGS
            and len(ended) >= MAX_EQUAL_FAILURES
            and all(t.state == "failed" for t in ended)
            and len(reasons) == 1
        ):
            raise UserError(
                f"the first {len(ended)} trials fail with the same mistake: "
                f"{self._last_error.message}",
                code=self._last_error.code,
                where=self._last_error.where or str(self.state.run_dir(trial)),
                fix=self._last_error.fix or "fix it, then rerun the same command",
            )

    # One trial

    def _run_trial(self, trial: Trial) -> None:
        """Run a trial to its end, and put the result into it.

        Raises StopRequestedError after a signal or run.max_time.
        """
        self._last_error: UserError | None = None
        run_dir = self.state.run_dir(trial)
        self._wait_for_earlier_process(run_dir)
        if self._should_stop_by_history(trial, run_dir):
            return
        trial.state, trial.reason = "running", ""
        self.state.save()
        place = f"trial {self._place(trial)} of {len(self.state.included)}"
        name = f"{label_of(trial.values)}, seed {trial.seed}"
        print_message(self.console, f"{place}: {name}{self._time_left()}")
        began, is_resumed = time.monotonic(), (run_dir / LOG).exists()
        log = self.state.folder / LOGS / f"{trial.name}.log"
        log.parent.mkdir(exist_ok=True)
        process = _TrialProcess(self._command(trial, run_dir), log)
        request, stopped_early = None, False
        try:
            request, stopped_early = self._follow(trial, process, run_dir)
        finally:
            process.end()
        self._last_error = process.error
        if request is not None:
            if process.status == 0:  # it ended before the signal reached it
                self._collect(trial, run_dir)
                self.state.save()
            raise request
        if stopped_early:
            return
        if process.status == 0:
            self._collect(trial, run_dir)
            self._durations += [] if is_resumed else [time.monotonic() - began]
        else:
            trial.state, trial.reason = "failed", process.failure(log)
        print_message(self.console, self._outcome(trial), _style(trial))

    def _command(self, trial: Trial, run_dir: Path) -> list[str]:
        """The command of a trial, as a user could type it to resume it."""
        overrides = [*self.grid.overrides, *trial.overrides]
        overrides.append(f"run.dir={json.dumps(str(run_dir))}")
        if trial.shares_cache:
            reference = str(self.state.folder / REFERENCE)
            overrides.append(f"reference.cache={json.dumps(reference)}")
        if self.grid.base.settings["run.keep"].is_default:
            overrides.append("run.keep=1")  # the newest checkpoint is enough to resume
        if self.grid.base.recipe.run.max_time is not None:
            overrides.append("run.max_time=null")  # it limits the sweep
        words = ["train", str(self.grid.recipe), *overrides, "--json"]
        words += ["--nproc", str(self.options.nproc)] if self.options.nproc else []
        return [*PROGRAM, *words]

    def _follow(
        self, trial: Trial, process: _TrialProcess, run_dir: Path
    ) -> tuple[StopRequestedError | None, bool]:
        """Read the log of a running trial until its end.

        Returns the request to stop the sweep, if there was one, and whether the trial was stopped
        early.
        """
        first: StopRequestedError | None = None
        kill_at, stopped_early = float("inf"), False
        with ExitStack() as bars:
            bar: Progress | None = None
            while (record := process.read(POLL_SECONDS)) is not None:
                if request := self._stop_request():
                    if first:
                        kill_at = min(kill_at, time.monotonic() + GRACE_SECONDS)
                    else:
                        message = f"{request.reason}: the trial finishes its step and is saved"
                        print_message(
                            self.console, f"{message}; a second signal stops it immediately"
                        )
                    first = first or request
                    is_clock = request.status == OUT_OF_TIME
                    process.send(signal.SIGTERM if is_clock else request.status - 128)
                if time.monotonic() > kill_at:
                    process.kill()
                if "step" not in record:
                    continue
                bar = bar or bars.enter_context(self._progress(trial, record["step"], run_dir))
                bar.record(record)
                bar.update(record["step"])
                if stopped_early or first:
                    continue
                if (value := self._measured(record)) is not None:
                    stopped_early = self._stop_early(trial, record["step"], value, run_dir)
                    if stopped_early:
                        process.send(signal.SIGTERM)
        return first, stopped_early

    def _measured(self, record: Mapping[str, Any]) -> float | None:
        """The objective in a record of the log, if it has one."""
        metrics = {n[5:]: v for n, v in record.items() if n.startswith("eval/")}
        if not metrics:
            return None
        if self.state.objective is None:
            self.state.objective, self.state.sign = self.objectives.choose(metrics)
            self.state.save()
        value = metrics.get(self.state.objective)
        return value if finite(value) else None

    def _collect(self, trial: Trial, run_dir: Path) -> None:
        """Put the results of a finished run into its trial."""
        run = RunRecord.read(run_dir)
        values = self._history(run)
        trial.seconds = float(run.facts.get("seconds") or 0.0)
        cache = run.facts.get("reference_cache") or {}
        trial.computed, trial.cached = cache.get("misses", 0), cache.get("hits", 0)
        trial.rows = _digests(run)
        if not values:
            trial.state, trial.reason = "failed", f"its last {self.state.objective} is not finite"
            return
        trial.step = max(values)
        trial.value = values[trial.step]
        test = (run.test or {}).get("metrics", {}).get(self.state.objective)
        trial.test = test if finite(test) else None
        trial.state, trial.reason = "done", ""
        if problem := self._other_rows(trial):
            trial.state, trial.reason = "failed", problem

    def _history(self, run: RunRecord) -> dict[int, float]:
        """The objective at each evaluation of a run. Empty if the last one is not finite."""
        values: dict[int, float] = {}
        is_finite = False
        for record in run.metrics:
            if any(name.startswith("eval/") for name in record):
                value = self._measured(record)
                is_finite = value is not None
                if value is not None:
                    values[record["step"]] = value
        return values if is_finite else {}

    def _other_rows(self, trial: Trial) -> str:
        """Why the rows of a trial are not those of the other trials; empty if they are."""
        varies_data = any(name.split(".")[0] in ("data", "mix", "model") for name in trial.values)
        names = ["held-out"] if varies_data else ["held-out", "training"]
        for other in self.state.included:
            if other is trial or other.state != "done":
                continue
            for name in names:
                if other.rows.get(name) != trial.rows.get(name):
                    return f"its {name} rows differ from those of {other.name}"
        return ""

    # Stopping early

    def _should_stop_by_history(self, trial: Trial, run_dir: Path) -> bool:
        """Whether the evaluations that an interrupted trial has already made stop it."""
        if not self.options.stop_early or not (run_dir / LOG).exists():
            return False
        history = self._history(RunRecord.read(run_dir))
        return any(self._stop_early(trial, step, v, run_dir) for step, v in sorted(history.items()))

    def _stop_early(self, trial: Trial, step: int, value: float, run_dir: Path) -> bool:
        """Stop a trial whose objective is worse than the median of the finished trials at the same
        step. The decision is stored before the trial ends, so that it stays the same after a kill.
        """
        total = read_undamaged_facts(run_dir).get("total_steps") or 0
        if not self.options.stop_early or not total * MIN_SHARE <= step < total:
            return False
        for other in self.state.included:
            other_dir = self.state.run_dir(other)
            is_known = other.name in self._histories or not other_dir.is_dir()
            if other.state == "done" and not is_known:
                self._histories[other.name] = self._history(RunRecord.read(other_dir))
        values = [
            history[step]
            for name, history in self._histories.items()
            if step in history and name != trial.name
        ]
        if len(values) < MIN_FINISHED:
            return False
        median = statistics.median(values)
        if self.state.sign * (value - median) >= 0:
            return False
        trial.state, trial.value, trial.step = "stopped", value, step
        trial.reason = (
            f"{self.state.objective} was {number(value)} at step {step}; the median of "
            f"{len(values)} finished trials is {number(median)}"
        )
        self.state.save()
        print_message(self.console, self._outcome(trial), _style(trial))
        return True

    # Signals, time, messages

    def _stop_request(self) -> StopRequestedError | None:
        """The next request to stop the sweep, if there is one."""
        if self._signals.pending:
            name = signal.Signals(self._signals.pending.pop(0))
            return StopRequestedError(128 + name, name.name)
        if time.monotonic() > self._deadline:
            self._deadline = float("inf")
            return StopRequestedError(OUT_OF_TIME, "run.max_time was reached")
        return None

    def _check_stop(self) -> None:
        if request := self._stop_request():
            raise request

    def _wait_for_earlier_process(self, run_dir: Path) -> None:
        """Wait until a trial whose sweep was killed has saved its state and ended."""
        has_printed = False
        while (process := holder(run_dir)) is not None and process.alive:
            self._check_stop()
            if not has_printed:
                message = f"waiting for the process of an earlier start to save ({process})"
                print_message(self.console, message)
                has_printed = True
            time.sleep(POLL_SECONDS)

    def _progress(self, trial: Trial, step: int, run_dir: Path) -> Progress:
        total = read_undamaged_facts(run_dir).get("total_steps") or 0
        return Progress(
            self.console,
            f"  trial {self._place(trial)}",
            total,
            start=step,
            quiet=not total,
            brief=True,
        )

    def _place(self, trial: Trial) -> int:
        return next(i for i, other in enumerate(self.state.included, 1) if other is trial)

    def _time_left(self) -> str:
        """The estimated time for the trials that are left; empty before the first one is done."""
        left = sum(t.state in ("waiting", "running") for t in self.state.included)
        if not self._durations:
            return ""
        return f"  (about {duration(left * statistics.mean(self._durations))} left)"

    def _outcome(self, trial: Trial) -> str:
        if trial.state == "done":
            assert trial.value is not None
            return f"  {self.state.objective} {number(trial.value)}, {duration(trial.seconds)}"
        return f"  {'stopped early' if trial.state == 'stopped' else trial.state}: {trial.reason}"


def _style(trial: Trial) -> str:
    return {"failed": "red", "stopped": "yellow"}.get(trial.state, "")


class _TrialProcess:
    """The process of a trial: its standard output is read as records, its standard error is
    appended to a log.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.error: UserError | None = None
        self.status: int | None = None
        self._records: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C reaches it through this process alone
                preexec_fn=end_with_parent,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    record = json.loads(line)
                except ValueError:  # it was killed while writing, or a library printed something
                    continue
                if isinstance(record, dict):
                    self._records.put(record)
        self._records.put(None)

    def read(self, seconds: float) -> dict[str, Any] | None:
        """The next record; empty if there is none yet, None after the last one."""
        try:
            record = self._records.get(timeout=seconds)
        except queue.Empty:
            return {}
        if record and record.get("event") == "done" and record.get("code"):
            text = str(record.get("error") or "").partition("\n  to fix it: ")
            self.error = UserError(text[0], code=str(record["code"]), fix=text[2] or None)
        return record

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Wait for its end; if something else went wrong here, ask it to save and end first."""
        if sys.exc_info()[0] is not None:
            self._process.terminate()
        self.status = self._process.wait()

    def failure(self, log: Path) -> str:
        """Why it ended without finishing, in one line."""
        status = self.status or 0
        if self.error is not None:
            return self.error.message.partition("\n")[0]
        if status < 0:
            name = signal.Signals(-status).name
            memory = ", which the system sends when there is no memory left"
            return f"ended by {name}{memory if name == 'SIGKILL' else ''}; see {log}"
        if status in STOPPED:
            return f"stopped from outside (exit status {status}); its state is saved"
        return f"a defect (exit status {status}); see {log}"


def _digests(run: RunRecord) -> dict[str, str]:
    """Digests of the held-out rows and of the training rows of a run."""
    ids = sorted(str(row.get("id")) for row in (run.last or {}).get("rows", ()))
    train = (run.facts.get("rows") or {}).get("data.train") or {}
    return {"held-out": str(checksum(ids)), "training": str(train.get("digest"))}
