"""Several processes started by one command: its exit status, what is shown, and that signals reach all and are waited for."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from valence.dist.launch import needed
from valence.errors import UserError

pytestmark = pytest.mark.dist
START = """
import sys
from valence.dist import launch
launch.GRACE = 1.0
sys.exit(launch.launch(sys.argv[3:], int(sys.argv[2]), program=[sys.executable, sys.argv[1]]))
"""
HEAD = "import json, os, signal, sys, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\nsignal.alarm(40)\n"
MISTAKE = "valence: recipe.yaml:3: there is no such method\n  to fix it: name another\n"


class Place:
    """A folder with a script that each process runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, script: str, nproc: int, *arguments: str, **how: object) -> subprocess.Popen[str]:
        path = self.folder / "script.py"
        path.write_text(HEAD + textwrap.dedent(script), encoding="utf-8")
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | how
        environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "OMP_NUM_THREADS")}
        command = [sys.executable, "-c", START, str(path), str(nproc), *arguments]
        process: subprocess.Popen[str] = subprocess.Popen(command, cwd=ROOT, env=environment, **streams)  # type: ignore[call-overload]
        self.started.append(process)
        return process

    def run(self, script: str, nproc: int, *arguments: str) -> tuple[int, str, str, float]:
        """Exit status, both outputs, and seconds."""
        began = time.monotonic()
        process = self.start(script, nproc, *arguments)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err, time.monotonic() - began

    def stopping(self, script: str, *signals: tuple[int, float]) -> tuple[int, list[list[str]], float]:
        """Sends signals to two processes, each after so many seconds. Exit status, what each noted, and seconds since."""
        process = self.start(script, 2, str(self.folder))
        wait_for(self.folder / "0.up", self.folder / "1.up")
        began = time.monotonic()
        for number, after in signals:
            time.sleep(after)
            process.send_signal(number)
        process.communicate(timeout=60)
        notes = [(self.folder / f"{rank}.txt").read_text(encoding="utf-8").split() for rank in range(2)]
        return process.returncode, notes, time.monotonic() - began


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def wait_for(*paths: Path) -> None:
    ends = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_all_are_done(place: Place) -> None:
    script = """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    Path(sys.argv[1], str(rank)).write_text(json.dumps([sys.argv[2:], {name: os.environ[name] for name in names}]))
    print("printed by", rank)
    print("warned by", rank, file=sys.stderr)
    """
    status, out, err, _ = place.run(script, 3, str(place.folder), "recipe.yaml", "a=b c")
    assert (status, out, err) == (0, "printed by 0\n", "warned by 0\n")
    found = [json.loads((place.folder / str(rank)).read_text(encoding="utf-8")) for rank in range(3)]
    port = found[0][1]["MASTER_PORT"]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
    for rank, (arguments, environment) in enumerate(found):
        assert arguments == ["recipe.yaml", "a=b c"]
        assert list(environment.values()) == [str(rank), str(rank), "3", "3", "127.0.0.1", port, threads]


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.5)])
def test_a_mistake_of_all_is_shown_once(place: Place, before: float, after: float) -> None:
    """before, after: seconds that rank 0 takes longer than the others until it says so, and until it ends."""
    script = f"""
    time.sleep({before} if rank == 0 else 0.1)
    print({MISTAKE!r}, end="", file=sys.stderr, flush=True)
    time.sleep({after} if rank == 0 else 0.1)
    sys.exit(2)
    """
    status, _, err, _ = place.run(script, 3)
    assert (status, err.strip()) == (2, MISTAKE.strip())


def test_a_mistake_of_one_ends_all(place: Place) -> None:
    script = f"""
    if rank == 2:
        print("a warning\\n" + {MISTAKE!r}, file=sys.stderr)
        sys.exit(2)
    time.sleep(60)
    """
    status, _, err, seconds = place.run(script, 3)
    assert (status, err.strip()) == (2, MISTAKE.strip())
    assert seconds < 8


@pytest.mark.parametrize(("fails", "shown"), [
    ("raise ValueError('the cause')", r"rank 1 says:\nbefore\nTraceback [^$]*ValueError: the cause\n$"),
    ("os.kill(os.getpid(), signal.SIGKILL)", r"rank 1 says:\nbefore\nrank 1 was ended by SIGKILL, as [^$]*\n$"),
    ("import ctypes; ctypes.string_at(0)", r"rank 1 says:\nbefore\nFatal Python error: Segm[^$]*ended by SIGSEGV\n$"),
    ("os._exit(77)", r"rank 1 says:\nbefore\n$"),
])  # fmt: skip
def test_a_crash_of_one_ends_all_and_is_shown_first(place: Place, fails: str, shown: str) -> None:
    script = f"""
    def ended(*_):
        print("rank 0 lost rank 1", file=sys.stderr)
        sys.exit(2)

    signal.signal(signal.SIGTERM, ended)
    if rank == 1:
        time.sleep(0.2)
        print("before", flush=True)
        {fails}
    time.sleep(60)
    """
    status, _, err, seconds = place.run(script, 2)
    assert status == 1
    assert re.match(shown, err), err
    assert seconds < 8


def test_one_that_does_not_heed_is_killed(place: Place) -> None:
    script = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(sys.argv[1], f"{rank}.pid").write_text(str(os.getpid()))
    while rank == 1 and not Path(sys.argv[1], "0.pid").exists():
        time.sleep(0.02)
    time.sleep(60 if rank == 0 else 0)
    sys.exit("no")
    """
    status, _, err, seconds = place.run(script, 2, str(place.folder))
    assert (status, err) == (1, "rank 1 says:\nno\n")
    assert seconds < 10
    with pytest.raises(ProcessLookupError):
        os.kill(int((place.folder / "0.pid").read_text(encoding="utf-8")), 0)


SAVES = """
def stop(number, _):
    with open(f"{sys.argv[1]}/{rank}.txt", "a") as notes:
        print(number, file=notes, flush=True)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, stop)
notes = Path(sys.argv[1], f"{rank}.txt")
Path(sys.argv[1], f"{rank}.up").touch()
while not notes.exists() or not notes.read_text():
    time.sleep(0.02)
ends = time.monotonic() + SECONDS * (rank == 0)  # rank 0 saves
while time.monotonic() < ends:
    time.sleep(0.02)
print("saved", file=notes.open("a"))
sys.exit(128 + int(notes.read_text().split()[0]))
"""


@pytest.mark.parametrize(("signals", "seconds"), [
    ([(signal.SIGTERM, 0.0), (signal.SIGTERM, 0.3)], 1.5),  # longer than what is given to processes when another has failed
    ([(signal.SIGINT, 0.0)], 0.2),
    ([(signal.SIGUSR1, 0.0)], 0.2),
])  # fmt: skip
def test_a_signal_reaches_all_once_and_is_waited_for(place: Place, signals: list[tuple[int, float]], seconds: float) -> None:
    status, notes, took = place.stopping(SAVES.replace("SECONDS", str(seconds)), *signals)
    number = signals[0][0]
    assert status == 128 + number
    assert notes == [[str(int(number)), "saved"]] * 2
    assert took > seconds


def test_a_second_signal_ends_what_does_not_end(place: Place) -> None:
    status, notes, took = place.stopping(SAVES.replace("SECONDS", "60"), (signal.SIGINT, 0.0), (signal.SIGINT, 0.5))
    assert status == 130
    assert notes[0] == ["2", "2"]
    assert took < 6


def test_ctrl_c_in_a_terminal_is_one_signal(place: Place) -> None:
    """There the terminal sends it to all processes of its foreground."""
    process = place.start(SAVES.replace("SECONDS", "0.2"), 2, str(place.folder), start_new_session=True)
    wait_for(place.folder / "0.up", place.folder / "1.up")
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert [(place.folder / f"{rank}.txt").read_text(encoding="utf-8") for rank in range(2)] == ["2\nsaved\n"] * 2


def test_a_save_that_fails_is_a_failure(place: Place) -> None:
    script = SAVES.replace("SECONDS", "0.3").replace("sys.exit(128", "rank == 0 and sys.exit('the disk is full')\nsys.exit(128")
    process = place.start(script, 2, str(place.folder))
    wait_for(place.folder / "0.up", place.folder / "1.up")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1] == "the disk is full\n"
    assert process.returncode == 1


def test_all_are_out_of_time(place: Place) -> None:
    assert place.run("time.sleep(0.3 * rank)\nsys.exit(124)", 2)[:3] == (124, "", "")


def test_nothing_is_left_when_the_launcher_is_killed(place: Place) -> None:
    process = place.start(SAVES.replace("SECONDS", "0.1"), 2, str(place.folder))
    wait_for(place.folder / "0.up", place.folder / "1.up")
    process.kill()
    process.communicate(timeout=30)  # ends when nobody holds its output any more
    for rank in range(2):  # Linux may say it more than once, as each thread of the launcher ends
        assert set((place.folder / f"{rank}.txt").read_text(encoding="utf-8").split()) == {"15", "saved"}


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
    assert needed(2)
    assert not needed(None)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert not needed(None)
    assert not needed(4)
    with pytest.raises(UserError, match="2 processes are asked for where 4 have been started"):
        needed(2)


COUNTS = """
from contextlib import closing
import torch
from valence.dist.processes import start
with closing(start(20.0, "cpu")) as group:
    given = torch.tensor([group.rank + 1.0])
    found = group.size, group.sum(given).item(), group.gather(given).tolist()
    if group.rank == 0:
        print(*found)
    if sys.argv[1:] == ["die"]:
        if group.rank == 1:
            raise ValueError("the cause")
        group.sum(given)
    group.barrier("end")
"""


def test_they_find_each_other_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + COUNTS, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "2 3.0 [1.0, 2.0]\n"), done.stderr


def test_the_one_that_crashed_in_a_group_is_shown(place: Place) -> None:
    status, out, err, _ = place.run(COUNTS, 2, "die")
    assert (status, out) == (1, "2 3.0 [1.0, 2.0]\n")
    assert err.startswith("rank 1 says:\n")
    assert err.rstrip().endswith("ValueError: the cause")
