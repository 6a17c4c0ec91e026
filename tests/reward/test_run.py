"""Scoring from a program that is not asynchronous: order, progress, stopping, and event loops that are already there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.reward.kit import Reply, answers, calls_of, reward, server, values
from valence.reward import Stopped, close, score_all
from valence.types import Completion, Score


@dataclass
class Slow:
    """Gives the number in an answer, the later ones sooner."""

    seconds: float = 0.1
    batch_size: int = 2
    name: str = "slow"
    deterministic: bool = True
    seen: list[int] = field(default_factory=list[int])

    async def __call__(self, completions: Sequence[Completion]) -> list[Score]:
        self.seen.append(len(completions))
        first = int(completions[0].text[1:])
        await asyncio.sleep(self.seconds / (1 + first))
        return [Score(float(c.text[1:])) for c in completions]

    async def close(self) -> None: ...


def test_scores_are_in_order_whatever_comes_first() -> None:
    slow = Slow()
    assert values(slow, answers(9)) == [float(i) for i in range(9)]
    assert sorted(slow.seen) == [1, 2, 2, 2, 2]
    assert values(Slow(), []) == []


def test_progress_adds_up_and_comes_in_the_calling_thread() -> None:
    told: list[int] = []
    threads: set[int] = set()

    def progress(news: int) -> None:
        told.append(news)
        threads.add(threading.get_ident())

    score_all(Slow(0.3), answers(9), progress=progress)
    assert sum(told) == 9
    assert len(told) > 1
    assert min(told) > 0
    assert threads == {threading.get_ident()}


def test_stopping_gives_up_what_is_under_way_and_hands_over_what_has_come() -> None:
    slow = Slow(5.0, batch_size=1)

    async def call(completions: Sequence[Completion]) -> list[Score]:
        await asyncio.sleep(0.0 if completions[0].text == "a1" else 30.0)
        return [Score(1.0)]

    slow_any: Any = slow
    slow_any.__class__ = type("Half", (Slow,), {"__call__": staticmethod(call)})
    began = time.monotonic()
    with pytest.raises(Stopped, match="1 of 3") as caught:
        score_all(slow, answers(3), stop=lambda: time.monotonic() - began > 0.2)
    assert time.monotonic() - began < 2
    assert caught.value.scores == [None, Score(1.0), None]


def test_what_has_come_completely_is_not_stopped() -> None:
    assert [score.value for score in score_all(Slow(0.0), answers(2), stop=lambda: False)] == [0.0, 1.0]


def test_a_defect_comes_through_as_it_is_and_ends_the_others() -> None:
    slow = Slow(30.0)

    class Broken(Slow):
        async def __call__(self, completions: Sequence[Completion]) -> list[Score]:
            if completions[0].text == "a2":
                raise RuntimeError("a defect")
            return await slow(completions)

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="a defect"):
        score_all(Broken(), answers(6))
    assert time.monotonic() - began < 5


def test_it_works_inside_and_beside_running_event_loops() -> None:
    found: list[Any] = []

    async def program() -> None:
        found.append(values(Slow(), answers(3)))  # which blocks this loop, as a caller may

    asyncio.run(program())
    with server() as told:
        made = reward(told.url, batch_size=2)

        async def other() -> None:
            await asyncio.sleep(0.01)
            found.append(await asyncio.to_thread(values, made, answers(7)))

        threads = [threading.Thread(target=lambda: asyncio.run(other())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found[0] == [0.0, 1.0, 2.0]
    assert found[1:] == [[float(i) for i in range(7)]] * 4


def test_connections_are_kept_and_closed() -> None:
    with server() as told:
        made = reward(told.url)
        for _ in range(3):
            values(made, answers(1))
        backend: Any = calls_of(made).backend
        pool = backend._client[1]
        assert not pool.is_closed
        close(made)
        assert pool.is_closed
        assert values(made, answers(2)) == [0.0, 1.0]
        close(made)


def test_a_reward_awaited_in_a_loop_of_its_own_works_as_well() -> None:
    with server() as told:
        made = reward(told.url, batch_size=1, concurrency=1)

        async def use() -> list[float | None]:
            return [score.value for score in await made(answers(3))]

        assert values(made, answers(3)) == asyncio.run(use()) == asyncio.run(use()) == [0.0, 1.0, 2.0]


HANGS = """
import os, signal, sys, threading, time
from tests.reward.kit import answers
from valence.reward import reward_of, score_all
from tests.reward.kit import Entry

def hang(completions):
    time.sleep(60)

sys.modules["hanging"] = sys.modules["__main__"]
made = reward_of([Entry("hanging:hang", timeout=60.0)])
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    score_all(made, answers(3))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_comes_through_and_the_program_ends_though_a_function_hangs() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr
    assert time.monotonic() - began < 20


FORKS = """
import os
from tests.reward.kit import answers, reward, values
made = reward("length", settings={"most": 3})
assert values(made, answers(2)) == [1.0, 1.0]
child = os.fork()
found = values(made, answers(3))
if child == 0:
    os._exit(0 if found == [1.0] * 3 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_process_has_a_loop_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reply_that_comes_late_reaches_nobody() -> None:
    """What was given up has an error, and what comes for it afterwards is not taken for the next call's."""
    with server(lambda _, n: Reply([99.0], wait=1.0) if n == 0 else Reply([1.0])) as told:
        made = reward(told.url, timeout=0.7)
        assert values(made, answers(1)) == [None]
        time.sleep(0.4)
        assert values(made, answers(1)) == [1.0]
