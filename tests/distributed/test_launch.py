"""Several processes started by one command: exit status, output, and signals to all of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tests.errors import raises_error
from valence.distributed.launcher import needs_launch

pytestmark = pytest.mark.dist
slow = pytest.mark.slow
START = """
import sys
from valence.distributed import launcher
launcher.GRACE, launcher.REPEAT_INTERVAL = 0.5, 60.0
sys.exit(launcher.launch(sys.argv[3:], int(sys.argv[2]), program=[sys.executable, sys.argv[1]]))
"""
HEAD = """
import json, os, signal, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
signal.alarm(40)

def touch(name):
    (folder / name).touch()

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def run_on():
    while True:
        signal.pause()

"""
"""Start of each script. SIGALRM ends processes that remain after a failed test."""
MISTAKE = "valence: recipe.yaml:3: there is no such method\n  to fix it: name another\n"


class Place:
    """A folder with a script that each process runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, script: str, nproc: int, *arguments: str, **options: object
    ) -> subprocess.Popen[str]:
        path = self.folder / "script.py"
        path.write_text(HEAD + textwrap.dedent(script), encoding="utf-8")
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("WORLD_SIZE", "OMP_NUM_THREADS")
        }
        command = [sys.executable, "-c", START, str(path), str(nproc), str(self.folder), *arguments]
        process: subprocess.Popen[str] = subprocess.Popen(
            command, cwd=ROOT, env=environment, **streams
        )  # type: ignore[call-overload]
        self.started.append(process)
        return process

    def run(self, script: str, nproc: int, *arguments: str) -> tuple[int, str, str]:
        """Exit status, and both outputs."""
        process = self.start(script, nproc, *arguments)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def notes(self, rank: int) -> list[str]:
        """What a process has noted."""
        path = self.folder / f"{rank}.txt"
        return path.read_text(encoding="utf-8").split() if path.exists() else []

    def stop(
        self, script: str, *signals: int, to_group: bool = False, **options: object
    ) -> tuple[int, str]:
        """Sends signals to two processes, each once the one before has come to both.

        Exit status, and errors.
        """
        process = self.start(script, 2, start_new_session=to_group, **options)
        wait_until(lambda: all((self.folder / f"{rank}.up").exists() for rank in range(2)))
        for i, number in enumerate(signals):
            if i:
                wait_until(lambda: all(self.notes(rank) for rank in range(2)))
            os.killpg(process.pid, number) if to_group else process.send_signal(number)
        err = process.communicate(timeout=60)[1]
        return process.returncode, err


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    actual = Place(tmp_path)
    yield actual
    for process in actual.started:
        process.kill()
        process.communicate()


def wait_until(reached: Callable[[], bool], seconds: float = 30.0) -> None:
    ends = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_all_are_done(place: Place) -> None:
    script = """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    (folder / str(rank)).write_text(json.dumps([sys.argv[2:], {name: os.environ[name] for name in names}]))
    print("printed by", rank)
    print("warned by", rank, file=sys.stderr)
    """
    assert place.run(script, 3, "recipe.yaml", "a=b c") == (0, "printed by 0\n", "warned by 0\n")
    results = [
        json.loads((place.folder / str(rank)).read_text(encoding="utf-8")) for rank in range(3)
    ]
    port = results[0][1]["MASTER_PORT"]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
    for rank, (arguments, environment) in enumerate(results):
        assert arguments == ["recipe.yaml", "a=b c"]
        assert list(environment.values()) == [
            str(rank),
            str(rank),
            "3",
            "3",
            "127.0.0.1",
            port,
            threads,
        ]


PRINT_MISTAKE = f"print({MISTAKE!r}, end='', file=sys.stderr, flush=True)"


@pytest.mark.parametrize("rank_0", [
    pytest.param("run_on()", id="never says it", marks=slow),
    pytest.param(f"{PRINT_MISTAKE}; touch('0.said'); sys.exit(2)", id="says it first"),
    pytest.param(f"{PRINT_MISTAKE}; touch('0.said'); run_on()", id="says it and runs on", marks=slow),
])  # fmt: skip
def test_a_mistake_of_all_is_shown_once(place: Place, rank_0: str) -> None:
    script = f"""
    if rank == 0:
        {rank_0}
    if {"0.said" in rank_0}:
        wait_for("0.said")
    {PRINT_MISTAKE}
    sys.exit(2)
    """
    status, _, err = place.run(script, 3)
    assert (status, err.strip()) == (2, MISTAKE.strip())


def test_a_mistake_of_one_ends_all(place: Place) -> None:
    script = f"""
    def end(number, _):
        touch(f"{{rank}}.ended by {{number}}")
        sys.exit(1)

    signal.signal(signal.SIGTERM, end)
    touch(f"{{rank}}.up")
    if rank == 2:
        wait_for("0.up"), wait_for("1.up")
        print("a warning\\n" + {MISTAKE!r}, file=sys.stderr)
        sys.exit(2)
    run_on()
    """
    status, _, err = place.run(script, 3)
    assert (status, err.strip()) == (2, MISTAKE.strip())
    assert {path.name for path in place.folder.glob("*.ended*")} == {
        "0.ended by 15",
        "1.ended by 15",
    }


@pytest.mark.parametrize(("fails", "shown"), [
    pytest.param("raise ValueError('the cause')", r"Traceback [^$]*ValueError: the "
                                                  r"cause\n", marks=slow),
    ("os.kill(os.getpid(), signal.SIGKILL)", r"rank 1 .*SIGKILL.*\n"),
    pytest.param("import ctypes; ctypes.string_at(0)", r"Fatal Python error: "
                                                       r"Segm[^$]*SIGSEGV\n", marks=slow),
    pytest.param("os._exit(77)", "", marks=slow),
])  # fmt: skip
def test_a_crash_of_one_ends_all_and_is_shown_first(place: Place, fails: str, shown: str) -> None:
    """What rank 1 printed is shown with its rank above, and what rank 0 says of it is not."""
    script = f"""
    def end(*_):
        print("rank 0 lost rank 1", file=sys.stderr)
        touch("ended")
        sys.exit(2)

    signal.signal(signal.SIGTERM, end)
    touch(f"{{rank}}.up")
    if rank == 1:
        wait_for("0.up")
        print("before", flush=True)
        {fails}
    run_on()
    """
    status, _, err = place.run(script, 2)
    assert status == 1
    assert re.fullmatch(rf".*rank 1.*\nbefore\n{shown}", err), err
    assert (place.folder / "ended").exists()


@slow
def test_one_that_does_not_heed_is_killed(place: Place) -> None:
    script = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"{rank}.txt").write_text(str(os.getpid()))
    touch(f"{rank}.pid")
    if rank == 0:
        run_on()
    wait_for("0.pid")
    sys.exit("no")
    """
    status, _, err = place.run(script, 2)
    assert status == 1
    assert re.fullmatch(r".*rank 1.*\nno\n", err), err
    with pytest.raises(ProcessLookupError):
        os.kill(int(place.notes(0)[0]), 0)


SAVES = """
def stop(number, _):
    with open(folder / f"{rank}.txt", "a") as notes:
        print(int(number), file=notes, flush=True)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, stop)
notes = folder / f"{rank}.txt"
touch(f"{rank}.up")
while not notes.exists() or not notes.read_text():
    time.sleep(0.01)
if rank == 0:
    SAVING
print("saved", file=notes.open("a"))
sys.exit(128 + int(notes.read_text().split()[0]))
"""
QUICK = SAVES.replace("SAVING", "pass")
LONG = SAVES.replace("SAVING", "time.sleep(1.0)")
"""Rank 0 saves for longer than what processes are given when another has failed."""


@pytest.mark.parametrize(("script", "signals"), [
    pytest.param(LONG, [signal.SIGTERM, signal.SIGTERM], marks=slow),
    (QUICK, [signal.SIGINT]),
    pytest.param(QUICK, [signal.SIGUSR1], marks=slow),
])  # fmt: skip
def test_a_signal_reaches_all_once_and_is_waited_for(
    place: Place, script: str, signals: list[int]
) -> None:
    number = signals[0]
    assert place.stop(script, *signals)[0] == 128 + number
    assert [place.notes(rank) for rank in range(2)] == [[str(int(number)), "saved"]] * 2


@slow
def test_a_second_signal_kills_remaining_processes(place: Place) -> None:
    assert place.stop(SAVES.replace("SAVING", "run_on()"), signal.SIGINT, signal.SIGINT)[0] == 130
    assert place.notes(0) == ["2", "2"]


@slow
def test_ctrl_c_in_a_terminal_is_one_signal(place: Place) -> None:
    """There the terminal sends it to all processes of its foreground."""
    assert place.stop(QUICK, signal.SIGINT, to_group=True)[0] == 130
    assert [place.notes(rank) for rank in range(2)] == [["2", "saved"]] * 2


@slow
def test_a_save_that_fails_is_a_failure(place: Place) -> None:
    script = SAVES.replace("SAVING", "sys.exit('the disk is full')")
    assert place.stop(script, signal.SIGTERM) == (1, "the disk is full\n")


@slow
def test_all_are_out_of_time(place: Place) -> None:
    script = "rank == 1 and wait_for('0.ends')\ntouch(f'{rank}.ends')\nsys.exit(124)"
    assert place.run(script, 2) == (124, "", "")


@slow
def test_no_process_survives_the_launcher(place: Place) -> None:
    place.stop(QUICK, signal.SIGKILL)  # ends when all processes have closed its output
    for rank in range(2):  # rank 1 may end later; its signal may come once per launcher thread
        wait_until(lambda rank=rank: "saved" in place.notes(rank))
        assert set(place.notes(rank)) == {"15", "saved"}


@slow
def test_a_terminal_stays_one(place: Place) -> None:
    ours, theirs = os.openpty()
    process = place.start("print('terminal', sys.stdout.isatty())", 2, stdout=theirs)
    process.communicate(timeout=30)
    os.close(theirs)
    assert os.read(ours, 100).decode().split() == ["terminal", "True"]
    os.close(ours)


def test_whether_processes_are_to_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert needs_launch(2)
    assert not needs_launch(None)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert not needs_launch(None)
    assert not needs_launch(4)
    with raises_error("nproc-conflict", where="--nproc") as raised:
        needs_launch(2)
    assert re.findall(r"\d+", raised.error.message) == ["2", "4"]


COUNTS = """
from contextlib import closing
import torch
from valence.distributed.process_group import start
with closing(start(20.0, "cpu")) as group:
    given = torch.tensor([group.rank + 1.0])
    found = group.size, group.sum(given).item(), group.gather(given).tolist()
    if group.rank == 0:
        print(*found)
    if sys.argv[2:] == ["die"]:
        if group.rank == 1:
            raise ValueError("the cause")
        group.sum(given)
    group.barrier("end")
"""


@slow
def test_they_find_each_other_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + COUNTS, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
        str(tmp_path),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert (done.returncode, done.stdout) == (0, "2 3.0 [1.0, 2.0]\n"), done.stderr


@slow
def test_the_one_that_crashed_in_a_group_is_shown(place: Place) -> None:
    status, out, err = place.run(COUNTS, 2, "die")
    assert (status, out) == (1, "2 3.0 [1.0, 2.0]\n")
    assert "rank 1" in err.splitlines()[0]
    assert err.rstrip().endswith("ValueError: the cause")
