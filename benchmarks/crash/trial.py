"""Run, kill and restart until a run is done, and compare it with an undisturbed run."""

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
from benchmarks.crash.process import EVALUATION, FINISHING, LAUNCHER, PRELOADED, Kill, Notes, train
from valence.runs.lock import holder

UNSEEDED = ("/random/python", "/random/numpy")
"""In names of tensors: what draws without a seed."""
PLACES = ("no save yet", "in a save", "evaluation", "finishing", "elsewhere")
PATIENCE = 120
OF_THE_MACHINE = ("seconds", "tokens/s", "memory")
"""Seconds after which a process that ends neither by itself nor by a kill has failed."""
LEAVES = 10.0
"""Seconds in which a process ends after the one that started it: it may have to save first."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit status (negative: by that signal), whether one of its processes
    was killed, seconds it ran and until it could train (0: never), what each process noted, and the
    ids of those that were left behind.
    """

    status: int
    killed: bool
    seconds: float
    ready: float
    processes: Sequence[Notes]
    left: Sequence[int]

    @property
    def notes(self) -> Notes:
        """Of the process that writes the run's folder."""
        return self.processes[0]


@dataclass
class Trial:
    """A run that was killed until it was done.

    ``places``: where the kills fell; ``wrong``: what is not as it should be; ``stopped``: some of
    its processes may have been asked to end when another was killed.
    """

    places: Counter[str] = field(default_factory=Counter[str])
    stopped: bool = False
    restarts: list[float] = field(default_factory=list[float])
    wrong: list[str] = field(default_factory=list[str])

    @property
    def kills(self) -> int:
        return self.places.total()


class Laboratory:
    """Makes a model and rows in a folder, and forks training processes from one that has everything
    imported and run nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context: Any = get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.alone: dict[str, tuple[Path, Ended]] = {}
        write_rows(folder)
        maker = self.context.Process(target=make_model, args=(str(folder / "model"),))
        maker.start()
        maker.join()
        if maker.exitcode:
            raise RuntimeError("the model could not be made")

    def start(self, case: Case, run: Path, kill: Kill | None = None) -> Ended:
        """The command of a run, to its end."""
        written = self.folder / f"{case.name}.json"
        written.write_text(json.dumps(recipe(case, self.folder)), encoding="utf-8")
        notes = self.context.RawArray(Notes, case.processes)
        process = self.context.Process(
            target=train, args=(str(written), str(run), notes, kill, f"{run}.said")
        )
        began = time.monotonic()
        process.start()
        killed = False
        if kill is not None and kill.by == "seconds":
            process.join(kill.at)
            if killed := process.is_alive():
                _kill(notes[kill.who].pid if kill.who != LAUNCHER else 0, process.pid)
        process.join(PATIENCE)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        ended = time.monotonic()
        left = _left([process.pid for process in notes])
        killed = killed or any(process.killed for process in notes)
        status = -signal.SIGALRM if late else process.exitcode
        return Ended(status, killed, ended - began, max(0.0, notes[0].ready - began), notes, left)

    def left_alone(self, case: Case) -> tuple[Path, Ended]:
        """The same run without a kill: its folder and how it ended."""
        if case.name not in self.alone:
            run = self.folder / f"{case.name} alone"
            ended = self.start(case, run)
            if ended.status:
                raise RuntimeError(
                    f"{case.name} ended with status {ended.status}: {output_of(run)}"
                )
            self.alone[case.name] = run, ended
        return self.alone[case.name]

    def until_done(self, case: Case, run: Path, draw: random.Random) -> Trial:
        """Kills a run at moments that are drawn, until it ends by itself."""
        undisturbed = self.left_alone(case)[1]
        return self.killed(case, run, (drawn(draw, undisturbed) for _ in count()))

    def killed(self, case: Case, run: Path, kills: Iterator[Kill]) -> Trial:
        """Kills a run as long as there are kills, until it ends by itself."""
        other, undisturbed = self.left_alone(case)
        trial = Trial()
        while True:
            before = newest(run)
            ended = self.start(case, run, next(kills, None))
            if before and ended.ready:
                trial.restarts.append(ended.ready)
            if ended.left:
                trial.wrong.append(f"{len(ended.left)} processes were left behind")
            if not ended.killed or -ended.status == signal.SIGALRM:
                break
            trial.stopped |= case.processes > 1
            trial.places[place(run, ended)] += 1
            if newest(run) < before:
                trial.wrong.append(f"checkpoint step-{before} was lost")
        if ended.status:
            trial.wrong.append(f"exit status {ended.status}: {output_of(run)}")
            return trial
        if ended.notes.steps + before != undisturbed.notes.steps:
            trial.wrong.append(
                f"ran {ended.notes.steps} steps after step {before} of {undisturbed.notes.steps}"
            )
        trial.wrong += differences(run, other)
        actual, wanted = states(run), states(other)
        if trial.stopped:  # it has saved where it stopped as well, and removed an older one for it
            actual, wanted = (
                {name: state[name] for name in actual.keys() & wanted.keys()}
                for state in (actual, wanted)
            )
        if actual != wanted or not actual:
            trial.wrong.append(
                f"the checkpoints {', '.join(sorted(actual))} are not as those of "
                f"{', '.join(sorted(wanted))}"
            )
        if holder(run) is not None:
            trial.wrong.append("its folder is still locked")
        if left := [os.fspath(path.relative_to(run)) for path in run.rglob(".*")]:
            trial.wrong.append(f"left over: {', '.join(left)}")
        return trial


def drawn(draw: random.Random, undisturbed: Ended) -> Kill:
    """A moment, or a file operation, of a whole run; of several processes, one or their
    launcher.
    """
    several = len(undisturbed.processes) > 1
    who = draw.choice((*range(len(undisturbed.processes)), LAUNCHER)) if several else 0
    by = draw.choice(("seconds", "seconds", "saving", "other"))
    limit = getattr(undisturbed.processes[max(who, 0)], by) if by != "seconds" else 0
    return (
        Kill(by, draw.randint(1, limit), who)
        if limit
        else Kill("seconds", draw.uniform(0, undisturbed.seconds), who)
    )


def _kill(*pids: int) -> None:
    """The first of these processes that has come to be."""
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(next(pid for pid in pids if pid), signal.SIGKILL)


def _left(pids: Sequence[int]) -> list[int]:
    """Those of the processes that do not end, killed now."""
    ends = time.monotonic() + LEAVES
    while left := [pid for pid in pids if pid and _lives(pid)]:
        if time.monotonic() > ends:
            for pid in left:
                _kill(pid)
            return left
        time.sleep(0.02)
    return []


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def place(run: Path, ended: Ended) -> str:
    """Where a process was when it was killed."""
    if any((run / "checkpoints").glob(".*")):
        return PLACES[1]
    if ended.notes.phase == EVALUATION:
        return PLACES[2]
    if ended.notes.phase == FINISHING:
        return PLACES[3]
    return PLACES[4] if newest(run) else PLACES[0]


def newest(run: Path) -> int:
    """The step of the newest checkpoint; 0 without any."""
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")), default=0)


def output_of(run: Path) -> str:
    """The last lines that a process of a run printed."""
    path = Path(f"{run}.said")
    return (
        " | ".join(path.read_text(encoding="utf-8", errors="replace").split("\n")[-8:])
        if path.is_file()
        else ""
    )


def states(run: Path) -> dict[str, dict[str, bytes]]:
    """The tensors in each checkpoint: weights, optimizer and torch's random state.

    What other libraries draw has no seed.
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
    """In what a finished run differs from another of the same recipe: weights, log, evaluations,
    status.
    """
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
    """The records of a run's log without what tells of the clock."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [
        {name: value for name, value in record.items() if not name.startswith(OF_THE_MACHINE)}
        for record in records
    ]


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
