"""Kill and restart a run until it is done, and compare it with an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from benchmarks.crash.cases import Case, make_model, recipe, write_rows
from benchmarks.crash.process import (
    EVALUATION,
    FINISHING,
    LAUNCHER,
    PRELOADED,
    Kill,
    ProcessRecord,
    train,
)
from valence.storage import holder

UNSEEDED = ("/random/python", "/random/numpy")
"""Parts of the names of random states that no seed determines, because other libraries draw."""
PHASES = ("no save yet", "in a save", "evaluation", "finishing", "elsewhere")
MACHINE_METRICS = ("seconds", "tokens/s", "memory")
"""Prefixes of metrics that depend on the machine."""
TIMEOUT = 120
"""Seconds after which a process that neither ended nor was killed counts as failed."""
GRACE_PERIOD = 10.0
"""Seconds for a process to end after its launcher: it may have to save first."""


@dataclass(frozen=True)
class CommandResult:
    """Outcome of a command.

    status: exit status, or minus the number of the signal. killed: whether one of its processes was
    killed. seconds: duration. ready: seconds until training started (0: it did not). processes: one
    record per rank. survivors: ids of processes that outlived the command.
    """

    status: int
    killed: bool
    seconds: float
    ready: float
    processes: Sequence[ProcessRecord]
    survivors: Sequence[int]

    @property
    def rank0(self) -> ProcessRecord:
        """The record of the process that writes the run's folder."""
        return self.processes[0]


@dataclass
class Trial:
    """A run that was killed and restarted until it was done.

    phases: number of kills in each of PHASES. stopped: when one process was killed, others may have
    received a signal to save and end. restarts: seconds from each restart to training. errors:
    differences from an undisturbed run.
    """

    phases: Counter[str] = field(default_factory=Counter[str])
    stopped: bool = False
    restarts: list[float] = field(default_factory=list[float])
    errors: list[str] = field(default_factory=list[str])

    @property
    def kills(self) -> int:
        return self.phases.total()


class CrashHarness:
    """Creates a model and rows in a folder, and runs trainings.

    Training processes are forks of a fork server that has imported the libraries and run nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context: Any = get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.undisturbed: dict[str, tuple[Path, CommandResult]] = {}
        write_rows(folder)
        maker = self.context.Process(target=make_model, args=(str(folder / "model"),))
        maker.start()
        maker.join()
        if maker.exitcode:
            raise RuntimeError("the model could not be made")

    def start(self, case: Case, run: Path, kill: Kill | None = None) -> CommandResult:
        """Run the training command, kill one of its processes, and wait for its end."""
        recipe_path = Path(f"{run}.json")  # two runs of a case may start at the same time
        recipe_path.write_text(json.dumps(recipe(case, self.folder)), encoding="utf-8")
        records = self.context.RawArray(ProcessRecord, case.processes)
        process = self.context.Process(
            target=train, args=(str(recipe_path), str(run), records, kill, f"{run}.output")
        )
        start = time.monotonic()
        process.start()
        killed = False
        if kill is not None and kill.by == "seconds":
            process.join(kill.at)
            if killed := process.is_alive():
                _kill(records[kill.who].pid if kill.who != LAUNCHER else 0, process.pid)
        process.join(TIMEOUT)
        is_late = process.is_alive()
        if is_late:
            process.kill()
            process.join()
        end = time.monotonic()
        survivors = _kill_survivors([process.pid for process in records])
        killed = killed or any(process.killed for process in records)
        status = -signal.SIGALRM if is_late else process.exitcode
        return CommandResult(
            status, killed, end - start, max(0.0, records[0].ready - start), records, survivors
        )

    def undisturbed_run(self, case: Case) -> tuple[Path, CommandResult]:
        """Folder and outcome of the same run without kills. It runs once per case."""
        if case.name not in self.undisturbed:
            run = self.folder / f"{case.name} alone"
            result = self.start(case, run)
            if result.status:
                raise RuntimeError(
                    f"{case.name} ended with status {result.status}: {output_of(run)}"
                )
            self.undisturbed[case.name] = run, result
        return self.undisturbed[case.name]

    def run_with_random_kills(self, case: Case, run: Path, rng: random.Random) -> Trial:
        """Kill and restart a run at random moments until it ends by itself."""
        undisturbed = self.undisturbed_run(case)[1]
        return self.run_with_kills(case, run, (draw_kill(rng, undisturbed) for _ in count()))

    def run_with_kills(self, case: Case, run: Path, kills: Iterator[Kill]) -> Trial:
        """Kill and restart a run until it ends by itself or ``kills`` is exhausted."""
        other, undisturbed = self.undisturbed_run(case)
        trial = Trial()
        while True:
            newest_before = newest(run)
            result = self.start(case, run, next(kills, None))
            if newest_before and result.ready:
                trial.restarts.append(result.ready)
            if result.survivors:
                trial.errors.append(f"{len(result.survivors)} processes were left behind")
            if not result.killed or -result.status == signal.SIGALRM:
                break
            trial.stopped |= case.processes > 1
            trial.phases[phase_of(run, result)] += 1
            if newest(run) < newest_before:
                trial.errors.append(f"checkpoint step-{newest_before} was lost")
        if result.status:
            trial.errors.append(f"exit status {result.status}: {output_of(run)}")
            return trial
        if result.rank0.steps + newest_before != undisturbed.rank0.steps:
            trial.errors.append(
                f"ran {result.rank0.steps} steps after step {newest_before} "
                f"of {undisturbed.rank0.steps}"
            )
        trial.errors += differences(run, other)
        states_of_run, expected_states = states(run), states(other)
        # a stopped process also saves at the step where it stops, and removes an older checkpoint
        if trial.stopped:
            states_of_run, expected_states = (
                {name: state[name] for name in states_of_run.keys() & expected_states.keys()}
                for state in (states_of_run, expected_states)
            )
        if states_of_run != expected_states or not states_of_run:
            trial.errors.append(
                f"the checkpoints {', '.join(sorted(states_of_run))} are not as those of "
                f"{', '.join(sorted(expected_states))}"
            )
        if holder(run) is not None:
            trial.errors.append("its folder is still locked")
        if leftovers := [os.fspath(path.relative_to(run)) for path in run.rglob(".*")]:
            trial.errors.append(f"left over: {', '.join(leftovers)}")
        return trial


def draw_kill(rng: random.Random, undisturbed: CommandResult) -> Kill:
    """Draw a moment or a file operation of a complete run, and one of its processes or the
    launcher.
    """
    is_distributed = len(undisturbed.processes) > 1
    who = rng.choice((*range(len(undisturbed.processes)), LAUNCHER)) if is_distributed else 0
    by = rng.choice(("seconds", "seconds", "saving", "other"))
    limit = getattr(undisturbed.processes[max(who, 0)], by) if by != "seconds" else 0
    return (
        Kill(by, rng.randint(1, limit), who)
        if limit
        else Kill("seconds", rng.uniform(0, undisturbed.seconds), who)
    )


def _kill(*pids: int) -> None:
    """Kill the first process in ``pids`` that has started (its id is not 0)."""
    with suppress(ProcessLookupError):  # the process has just ended
        os.kill(next(pid for pid in pids if pid), signal.SIGKILL)


def _kill_survivors(pids: Sequence[int]) -> list[int]:
    """Wait for processes to end, kill the remaining ones, and return their ids."""
    deadline = time.monotonic() + GRACE_PERIOD
    while survivors := [pid for pid in pids if pid and _is_alive(pid)]:
        if time.monotonic() > deadline:
            for pid in survivors:
                _kill(pid)
            return survivors
        time.sleep(0.02)
    return []


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def phase_of(run: Path, result: CommandResult) -> str:
    """The phase of PHASES in which a run was killed."""
    if any((run / "checkpoints").glob(".*")):
        return PHASES[1]
    if result.rank0.phase == EVALUATION:
        return PHASES[2]
    if result.rank0.phase == FINISHING:
        return PHASES[3]
    return PHASES[4] if newest(run) else PHASES[0]


def newest(run: Path) -> int:
    """Step of the newest checkpoint; 0 if there is none."""
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")), default=0)


def output_of(run: Path) -> str:
    """The last lines of a run's output."""
    path = Path(f"{run}.output")
    return (
        " | ".join(path.read_text(encoding="utf-8", errors="replace").split("\n")[-8:])
        if path.is_file()
        else ""
    )


def states(run: Path) -> dict[str, dict[str, bytes]]:
    """The tensors of each checkpoint as bytes: weights, optimizer and PyTorch's random state.

    Random states of other libraries are omitted, because they have no seed.
    """
    contents: dict[str, dict[str, bytes]] = {}
    for path in run.glob("checkpoints/*/*.safetensors"):
        tensors = {
            f"{path.name} {name}": array.tobytes() for name, array in load_file(path).items()
        }
        seeded = {
            name: content
            for name, content in tensors.items()
            if not any(part in name for part in UNSEEDED)
        }
        contents.setdefault(path.parent.name, {}).update(seeded)
    return contents


def differences(ours: Path, theirs: Path) -> list[str]:
    """Differences between two finished runs of a recipe: weights, log, evaluations, status."""
    differences = [
        f"{name} differs"
        for pattern in ("model/*.safetensors", "eval/*.json")
        for name in sorted(
            {
                os.fspath(path.relative_to(run))
                for run in (ours, theirs)
                for path in run.glob(pattern)
            }
        )
        if _content(ours / name) != _content(theirs / name)
    ]
    if not any((ours / "model").glob("*.safetensors")):
        differences.append("there is no model")
    if not (ours / "report.html").is_file():
        differences.append("there is no report")
    log, other = logged(ours), logged(theirs)
    if log != other:
        first = next(
            (i for i, (a, b) in enumerate(zip(log, other, strict=False), 1) if a != b),
            min(len(log), len(other)) + 1,
        )
        differences.append(f"the log differs from line {first} of {len(log)} and {len(other)}")
    trained = [record["step"] for record in log if "loss" in record]
    if trained != sorted(set(trained)):
        differences.append(f"the log has the steps {trained}")
    status = json.loads((ours / "run.json").read_text(encoding="utf-8"))["status"]
    return differences + ([] if status == "done" else [f"the run's status is {status}"])


def logged(run: Path) -> list[dict[str, Any]]:
    """The records of a run's log without metrics that depend on the machine."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [
        {name: value for name, value in record.items() if not name.startswith(MACHINE_METRICS)}
        for record in records
    ]


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
