"""A run of several processes ends like an undisturbed one after any of them, or the launcher, is
killed and the run is restarted.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.crash.cases import recipe
from benchmarks.crash.process import LAUNCHER, Kill
from benchmarks.crash.trial import CrashHarness, Trial, differences, newest
from tests.arch.source import ROOT
from tests.crash.helpers import CASE
from tests.programs import fork_server
from valence.storage import holder

pytestmark = [pytest.mark.dist, pytest.mark.slow]
REPLICATED, TENSOR_PARALLEL = "kto, lora, 2 processes", "dpo, 2 that share it"
MARK = "VALENCE_TEST_RUN"
"""In the environment of a run's processes: its folder."""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> CrashHarness:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "OMP_NUM_THREADS", "1")
        fork_server()
        return CrashHarness(tmp_path_factory.mktemp("harness"))


def test_whoever_is_killed_the_same_command_ends_the_run_as_if_nothing_had_been(
    harness: CrashHarness,
) -> None:
    """The launcher, rank 1 during a step, and rank 0 during a save.

    Concurrently for replicated weights and for tensor-parallel ones.
    """

    def killed(name: str) -> Trial:
        draw = random.Random(name)
        kills = [
            Kill("steps", draw.randint(1, 5), LAUNCHER),
            Kill("steps", draw.randint(2, 5), 1),
            Kill("saving", draw.randint(5, 25), 0),
        ]
        return harness.run_with_kills(CASE[name], harness.folder / f"{name} killed", iter(kills))

    with ThreadPoolExecutor(2) as workers:
        for trial in workers.map(killed, (REPLICATED, TENSOR_PARALLEL)):
            assert trial.errors == []
            assert trial.kills == 3


def processes(run: Path) -> dict[int, str]:
    """Those of a run by their ids: their ranks, empty for what started them."""
    results: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            lines = path.read_bytes().split(b"\0")
        except OSError:  # it has just ended, or is another user's
            continue
        if f"{MARK}={run}".encode() in lines:
            ranks = [
                line.removeprefix(b"RANK=").decode() for line in lines if line.startswith(b"RANK=")
            ]
            results[int(path.parent.name)] = "".join(ranks)
    return results


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run's folder. None of its processes outlives the test."""
    yield tmp_path / "run"
    for pid in processes(tmp_path / "run"):
        os.kill(pid, signal.SIGKILL)


def test_a_program_killed_in_a_save_leaves_no_process_and_no_lock(
    harness: CrashHarness, run: Path
) -> None:
    """As it is started by hand, and not from what was loaded before."""
    case = CASE[REPLICATED]
    written = run.parent / "recipe.yaml"
    written.write_text(json.dumps(recipe(case, harness.folder)), encoding="utf-8")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("WORLD_SIZE", "OMP_NUM_THREADS")
    }
    started = subprocess.Popen(
        [sys.executable, "-m", "valence", "train", str(written), f"run.dir={run}", "--nproc", "2"],
        cwd=ROOT,
        env=environment | {MARK: str(run)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    ends = time.monotonic() + 120
    while newest(run) < 3:
        assert started.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.01)
    first = next(pid for pid, rank in processes(run).items() if rank == "0")
    while not any((run / "checkpoints").glob(".step-*")):
        assert started.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.001)
    os.kill(first, signal.SIGKILL)
    printed = started.communicate(timeout=60)[0]
    assert started.returncode == 1
    assert re.search(r"rank 0\b.*\bSIGKILL", printed), printed
    assert processes(run) == {}
    holder_then = holder(run)
    assert holder_then is not None
    assert not holder_then.alive
    assert harness.start(case, run).status == 0
    assert f"pid {holder_then.pid} " in Path(f"{run}.output").read_text(encoding="utf-8")
    assert differences(run, harness.undisturbed_run(case)[0]) == []
    assert holder(run) is None


def test_processes_killed_while_a_thread_writes_the_state(harness: CrashHarness) -> None:
    """Rank 1, which writes its shards only, and rank 0 before and after the folder is complete."""
    kills = [
        Kill("saving", 2, 1),
        Kill("saving", 9, 0),
        Kill("saving", 3, 1),
        Kill("saving", 21, 0),
    ]
    run = harness.folder / "killed while writing"
    trial = harness.run_with_kills(CASE[TENSOR_PARALLEL], run, iter(kills))
    assert trial.errors == []
    assert trial.kills == 4
