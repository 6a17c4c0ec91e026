"""Run checks one after another, and record each result as soon as it is known.

A result is one line of JSON in ``results.jsonl``. A check that raises has a failed result, and the
next one follows. A check that has a result is not run again, so that a part can be started again
after its process ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

FILE, RUNNING = "results.jsonl", "running"
"""Names of the file with the results, and of the file with the name of the running check."""
LONGEST_ERROR = 2000
"""Letters of an error that are recorded, its last ones."""

Figures = Mapping[str, Any]
"""Numbers and texts by name."""


class OutOfTimeError(BaseException):
    """The time of a part is over. Not an Exception, which a check could catch."""


@dataclass(frozen=True)
class Check:
    """A measurement. maxima, minima: limits of its figures. fix: what to do if it fails or
    misses a limit. is_background: it only waits for processes, and runs in a thread.
    """

    name: str
    run: Callable[[], Figures]
    maxima: Mapping[str, float] = field(default_factory=dict[str, float])
    minima: Mapping[str, float] = field(default_factory=dict[str, float])
    fix: str = ""
    is_background: bool = False

    def missed(self, figures: Figures) -> list[str]:
        """Return the names of the figures beyond their limits. NaN is beyond every limit."""
        return [
            name
            for name, limit in (*self.maxima.items(), *self.minima.items())
            if not (figures[name] <= limit if name in self.maxima else figures[name] >= limit)
        ]


@dataclass(frozen=True)
class Result:
    """status: ok; missed: a figure is beyond its limit; failed: the check raised or ended the
    process; skipped: there was no time left; measured: limits were not compared.
    """

    part: str
    name: str
    status: str
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict[str, Any])
    missed: Sequence[str] = ()
    error: str = ""
    fix: str = ""

    @property
    def is_good(self) -> bool:
        return self.status in ("ok", "measured")

    def __str__(self) -> str:
        figures = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.figures.items()
        )
        lines = [f"{self.status:8} {self.seconds:6.1f} s  {self.name}: {figures}".rstrip(": ")]
        if self.missed:
            lines.append(f"         beyond the limit: {', '.join(self.missed)}")
        if self.error:
            lines += [f"         {line}" for line in self.error.splitlines()[-6:]]
        if self.fix and not self.is_good and self.status != "skipped":
            lines.append(f"         next: {self.fix}")
        return "\n".join(lines)


class Recorder:
    """Runs the checks of a part, and writes their results to a file in each of these folders.

    seconds: time for the part; checks that have not ended then are skipped. compares: compare
    figures with their limits. retries: run checks again that failed or missed a limit. on_failure:
    called after each failed check.
    """

    def __init__(
        self,
        part: str,
        folders: Sequence[Path],
        seconds: float,
        *,
        compares: bool = True,
        retries: bool = False,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.part, self.folders, self.compares = part, folders, compares
        self.deadline = time.monotonic() + seconds
        self.on_failure = on_failure
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        self.running = folders[0] / RUNNING
        lasting = ("ok", "measured") if retries else ("ok", "measured", "missed", "failed")
        self.results = {
            result.name: result
            for folder in folders
            for result in read_results(folder)
            if result.part == part and result.status in lasting
        }

    def run(self, checks: Iterable[Check], workers: int = 4) -> list[Result]:
        """Run the checks without a result, and return the results of all.

        Background checks start first, ``workers`` at a time, and are waited for at the end.
        """
        checks = list(checks)
        self._record_interrupted({check.name: check for check in checks})
        pending = [check for check in checks if check.name not in self.results]
        pool = ThreadPoolExecutor(workers)
        try:
            started = [
                (check, pool.submit(_measure, check)) for check in pending if check.is_background
            ]
            for check in pending:
                if not check.is_background:
                    self.running.write_text(check.name, encoding="utf-8")
                    self._record(check, *self._run_in_time(check))
                    self.running.unlink()
            for check, future in started:
                self._record(check, *self._wait(future))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            kill_processes()
        return [self.results[check.name] for check in checks]

    def _record_interrupted(self, checks: Mapping[str, Check]) -> None:
        """Record a failure for the check during which an earlier process ended."""
        with suppress(FileNotFoundError):
            name = self.running.read_text(encoding="utf-8")
            if name in checks and name not in self.results:
                self._record(checks[name], {}, 0.0, "the process ended during this check")
            self.running.unlink()

    def _run_in_time(self, check: Check) -> tuple[Figures, float, str | None]:
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            return {}, 0.0, None
        with _interrupted_after(remaining):
            return _measure(check)

    def _wait(self, future: Future[tuple[Figures, float, str | None]]) -> Any:
        try:
            return future.result(max(0.0, self.deadline - time.monotonic()))
        except TimeoutError:
            return {}, 0.0, None

    def _record(self, check: Check, figures: Figures, seconds: float, error: str | None) -> None:
        """error: "" for none, None if the check was skipped."""
        missed = check.missed(figures) if self.compares and error == "" else []
        if error is None:
            status = "skipped"
        elif error:
            status = "failed"
        elif self.compares:
            status = "missed" if missed else "ok"
        else:
            status = "measured"
        result = Result(
            self.part, check.name, status, round(seconds, 2), figures, missed, error or "",
            check.fix if status in ("missed", "failed") else "",
        )  # fmt: skip
        self.results[check.name] = result
        line = json.dumps(asdict(result)) + "\n"
        for folder in self.folders:
            with (folder / FILE).open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        print(result, flush=True)
        if status == "failed":
            self.on_failure()


def read_results(folder: Path) -> Iterator[Result]:
    """Yield the results of a folder; a line that was cut off is left out."""
    with suppress(FileNotFoundError):
        for line in (folder / FILE).read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError, TypeError):
                yield Result(**json.loads(line))


def _measure(check: Check) -> tuple[Figures, float, str | None]:
    """Return the figures, the seconds, and the error ("" for none, None: out of time)."""
    start = time.monotonic()
    try:
        figures = dict(check.run())
        if lost := [name for name in (*check.maxima, *check.minima) if name not in figures]:
            raise KeyError(f"no figure {', '.join(lost)}")
        return figures, time.monotonic() - start, ""
    except OutOfTimeError:
        return {}, time.monotonic() - start, None
    except Exception as error:  # one failure must not end the others
        message = f"{type(error).__name__}: {error}"
        return {}, time.monotonic() - start, message[-LONGEST_ERROR:]


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the main thread if the block takes longer."""

    def interrupt(*_: Any) -> NoReturn:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_PROCESSES: set[subprocess.Popen[bytes]] = set()


def run_process(
    command: Sequence[str], log: Path, *, status: int = 0, environment: Mapping[str, str] = {}
) -> str:
    """Run a command, and return its output, which is also in the file ``log`` as it comes. Raises
    RuntimeError unless the command ends with this status.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output_file:
        process = subprocess.Popen(
            command,
            env=os.environ | dict(environment),
            stdout=output_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _PROCESSES.add(process)
    process.wait()
    _PROCESSES.discard(process)
    output = log.read_text(encoding="utf-8", errors="replace")
    if process.returncode != status:
        raise RuntimeError(f"status {process.returncode}:\n{output[-LONGEST_ERROR:]}")
    return output


def kill_processes() -> None:
    """End the processes of ``run_process`` and their descendants."""
    for process in list(_PROCESSES):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
