"""The Slurm batch scripts requeue themselves if, and only if, training is not finished."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.third_party import JOB, SLURM, stand_ins

ONE, SEVERAL = (ROOT / "examples/slurm" / name for name in ("train.sbatch", "nodes.sbatch"))
TASK = JOB | {
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "8",
}
FINISHES_ITS_STEP = """
trap 'sleep 0.3; echo saved >> "$CALLS"; exit 138' USR1
trap 'sleep 0.3; echo saved >> "$CALLS"; exit 143' TERM
echo started >> "$CALLS"
while :; do sleep 0.02; done
"""
ENDS_WHILE_SIGNALLED = """
signals=0
trap 'signals=$((signals + 1))' USR1
echo started >> "$CALLS"
while [ $signals -lt 5 ]; do sleep 0.02; done
echo done >> "$CALLS"
"""


class Job:
    """A script as Slurm starts it, with a training that is written in shell.

    ``calls``: what happened, in order.
    """

    def __init__(self, script: Path, folder: Path, training: str, *arguments: str) -> None:
        self.folder, self.calls = folder, folder / "calls"
        self.calls.touch()
        commands = {
            "srun": SLURM["srun"],
            "scontrol": 'if [ "$1" = show ]; then printf "node1\\nnode2\\n"; else echo "scontrol '
            '$*" >> "$CALLS"; fi',
            "valence": f'echo $$ > training\necho "valence $*" >> "$CALLS"\n{training}',
        }
        environment = stand_ins(folder, commands) | TASK | {"CALLS": str(self.calls)}
        self.process = subprocess.Popen(
            ["bash", str(script), *arguments], env=environment, cwd=folder, start_new_session=True
        )

    def lines(self) -> list[str]:
        return self.calls.read_text().splitlines()

    def started(self) -> None:
        until = time.monotonic() + 60
        while "started" not in self.lines():
            assert time.monotonic() < until
            time.sleep(0.01)

    def signal_training(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(int((self.folder / "training").read_text()), number)

    def code(self) -> int:
        return self.process.wait(20)


@pytest.fixture(params=[ONE, SEVERAL], ids=lambda script: script.stem)
def script(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def job(script: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    results: list[Job] = []

    def start(training: str, *arguments: str) -> Job:
        results.append(Job(script, tmp_path, training, *arguments))
        return results[-1]

    yield start
    for one in results:
        with suppress(ProcessLookupError):  # all of its processes have ended
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()


@pytest.mark.parametrize("code", [124, 138, 143])
def test_what_is_not_finished_is_put_back_once(job: Callable[..., Job], code: int) -> None:
    one = job(f"exit {code}", "other.yaml", "train.seed=1", "run.dir=runs/a b")
    assert one.code() == code
    assert one.lines() == [
        "valence train other.yaml train.seed=1 run.dir=runs/a b",
        "scontrol requeue 123",
    ]


@pytest.mark.parametrize("code", [0, 1, 2, 127, 130, 137])
def test_what_is_finished_failed_or_was_stopped_by_hand_is_not(
    job: Callable[..., Job], code: int
) -> None:
    one = job(f"exit {code}")
    assert one.code() == code
    assert one.lines() == ["valence train recipe.yaml"]


@pytest.mark.parametrize("both", [False, True], ids=["training", "both"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 138), (signal.SIGTERM, 143)])
def test_a_training_that_is_signalled_is_waited_for(
    job: Callable[..., Job], number: signal.Signals, code: int, both: bool
) -> None:
    one = job(FINISHES_ITS_STEP)
    one.started()
    if both:  # as at the end of the time
        one.process.send_signal(number)
    one.signal_training(number)
    assert one.code() == code
    assert one.lines() == ["valence train recipe.yaml", "started", "saved", "scontrol requeue 123"]


def test_a_training_that_ends_well_in_spite_of_signals_is_not_put_back(
    job: Callable[..., Job],
) -> None:
    one = job(ENDS_WHILE_SIGNALLED)
    one.started()
    until = time.monotonic() + 60
    while one.process.poll() is None:
        assert time.monotonic() < until
        one.process.send_signal(signal.SIGUSR1)
        one.signal_training(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(0.013)
    assert one.code() == 0
    assert one.lines() == ["valence train recipe.yaml", "started", "done"]


@pytest.mark.parametrize("script", [SEVERAL], indirect=True)
def test_each_task_is_told_its_place(job: Callable[..., Job]) -> None:
    one = job(
        'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT" >> '
        '"$CALLS"'
    )
    assert one.code() == 0
    assert one.lines()[1:] == ["9 16 1 8 node1 20123"]


def test_slurm_is_asked_for_a_notice_to_the_training_and_for_a_log_that_grows(script: Path) -> None:
    request = re.findall(r"^#SBATCH (\S+)$", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert {"--signal=USR1@300", "--requeue", "--open-mode=append"} <= set(request)
