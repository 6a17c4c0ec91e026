"""A run on two hosts, and its end when the link between them fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import valence
from benchmarks.crash.cases import CASES, make_model, recipe, write_rows
from benchmarks.crash.trial import differences, newest
from tests.arch.source import ROOT
from tests.distributed.hosts import ADDRESSES, CABLE, Hosts, two_hosts
from tests.distributed.test_run import same
from tests.errors import raises_error
from valence.distributed.process_group import start
from valence.storage import holder
from valence.training.checkpoints import check

pytestmark = pytest.mark.dist
DEADLINE, ANSWERS, LEAVES = 8.0, 4.0, 15.0
"""Seconds: of a collective, of the question who is missing, and for what an end takes besides."""
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": CABLE,
    "VALENCE_DEADLINE": str(DEADLINE),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Place:
    """A recipe of 40 steps in a folder that both hosts share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_model(str(folder / "model"))
        write_rows(folder)
        self.recipe = recipe({case.name: case for case in CASES}["kto, lora"], folder)
        self.recipe["train"]["epochs"] = 8
        self.recipe["model"]["dtype"] = "float64"  # in fewer digits no two ways to cut a step agree
        (folder / "recipe.yaml").write_text(json.dumps(self.recipe), encoding="utf-8")

    def start(self, hosts: Hosts, run: Path) -> list[subprocess.Popen[str]]:
        """torchrun on each host."""
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
        ]
        train = ["-m", "valence", "train", str(self.folder / "recipe.yaml"), f"run.dir={run}"]
        environment = {
            name: value for name, value in os.environ.items() if name != "WORLD_SIZE"
        } | ENVIRONMENT
        return [
            hosts.start(
                i,
                [*torchrun, f"--master-addr={ADDRESSES[0]}", f"--node-rank={i}", *train],
                environment,
                ROOT,
            )
            for i in range(2)
        ]

    def train(self, hosts: Hosts, run: Path) -> None:
        """To its end, as a scheduler starts it that is not torchrun."""
        words, of_all = (
            ["train", str(self.folder / "recipe.yaml"), f"run.dir={run}"],
            {**ENVIRONMENT, "WORLD_SIZE": "2"},
        )
        of_all |= {"LOCAL_RANK": "0", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
        message = [self.folder / f"said by {host}" for host in range(2)]
        started = [
            hosts.program(host, *words, output=message[host], RANK=str(host), **of_all)
            for host in range(2)
        ]
        statuses = [program.wait(240) for program in started]
        assert statuses == [0, 0], "\n".join(path.read_text() for path in message)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("hosts"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with ExitStack() as ending:
        try:
            result = ending.enter_context(two_hosts())
        except OSError as error:
            pytest.skip(f"there can be no hosts here: {error}")
        yield result


@pytest.fixture(scope="module")
def undisturbed(hosts: Hosts, place: Place) -> Path:
    run = place.folder / "undisturbed"
    place.train(hosts, run)
    return run


@pytest.mark.slow
def test_two_hosts_train_as_one_process_does(place: Place, undisturbed: Path) -> None:
    alone = place.folder / "alone"
    valence.train(place.recipe | {"run": place.recipe["run"] | {"dir": str(alone)}}, quiet=True)
    same(undisturbed, alone)


@pytest.mark.slow
def test_a_broken_link_ends_both_hosts_and_the_same_command_resumes(
    hosts: Hosts, place: Place, undisturbed: Path
) -> None:
    run = place.folder / "cut"
    started = place.start(hosts, run)
    ends = time.monotonic() + 120
    while newest(run) < 6:
        assert time.monotonic() < ends
        assert [process.poll() for process in started] == [None, None]
        time.sleep(0.01)
    hosts.disconnect()
    first, second = (
        process.communicate(timeout=DEADLINE + ANSWERS + LEAVES)[0] for process in started
    )
    # as torchrun has it
    assert [process.returncode for process in started] == [1, 1], first + second
    assert [hosts.pids(host) for host in range(2)] == [[], []]
    assert re.search(r"^valence: rank 0: .*\brank 1\b", first, re.MULTILINE), first
    assert re.search(
        rf"^valence: rank 1: .*\brank 0\b.* {ADDRESSES[0]}:29500", second, re.MULTILINE
    ), second
    assert f" {DEADLINE:g} s" in second
    assert 6 <= newest(run) < newest(undisturbed)
    check(run / "checkpoints" / f"step-{newest(run)}")
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["status"] == "failed"
    assert holder(run) is None
    hosts.reconnect()
    place.train(hosts, run)
    assert differences(run, undisturbed) == []


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", ""])
def test_a_deadline_that_is_no_number_of_seconds(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("VALENCE_DEADLINE", value)
    with raises_error("environment-variable-invalid", where="VALENCE_DEADLINE"):
        start(device="cpu")
