"""Scoring from a program that is not asynchronous: order, progress, stopping, and event loops that
are already there.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.rewards.kit import Reply, answers, calls_of, reward, server, values, wait_for
from valence.rewards import Stopped, close, score_all
from valence.types import Completion, Score


@dataclass
class Numbers:
    """Gives the number in an answer. before: is awaited by each call, with its first number."""

    before: Callable[[int], Awaitable[object]]
    batch_size: int = 2
    name: str = "numbers"
    deterministic: bool = True
    batch_sizes: list[int] = field(default_factory=list[int])

    async def __call__(self, completions: Sequence[Completion]) -> list[Score]:
        self.batch_sizes.append(len(completions))
        await self.before(int(completions[0].text[1:]))
        return [Score(float(c.text[1:])) for c in completions]

    async def close(self) -> None: ...


def backwards() -> Numbers:
    """A call ends after those of later answers."""
    ended = defaultdict[int, asyncio.Event](asyncio.Event)

    async def before(first: int) -> None:
        ended[first].clear()
        await asyncio.sleep(0)  # the others begin
        for later in [item for item in ended if item > first]:
            await ended[later].wait()
        ended[first].set()

    return Numbers(before)


def test_scores_are_in_order_whatever_comes_first() -> None:
    result = backwards()
    assert values(result, answers(9)) == [float(i) for i in range(9)]
    assert sorted(result.batch_sizes) == [1, 2, 2, 2, 2]
    assert values(backwards(), []) == []


def test_progress_adds_up_and_comes_in_the_calling_thread() -> None:
    events: list[int] = []
    threads: set[int] = set()
    first_news = threading.Event()

    def progress(news: int) -> None:
        events.append(news)
        threads.add(threading.get_ident())
        first_news.set()

    async def before(first: int) -> None:
        if first == 0:
            await asyncio.to_thread(first_news.wait, 30)

    score_all(Numbers(before), answers(9), progress=progress)
    assert sum(events) == 9
    assert len(events) > 1
    assert min(events) > 0
    assert threads == {threading.get_ident()}


def test_stopping_gives_up_what_is_under_way_and_hands_over_what_has_come() -> None:
    came: list[int] = []
    ended: list[int] = []

    async def before(first: int) -> None:
        if first != 1:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(first)

    with pytest.raises(Stopped) as caught:
        score_all(
            Numbers(before, batch_size=1), answers(3), progress=came.append, stop=lambda: bool(came)
        )
    assert caught.value.scores == [None, Score(1.0), None]
    wait_for(lambda: sorted(ended) == [0, 2])


def test_what_has_come_completely_is_not_stopped() -> None:
    async def before(first: int) -> None: ...

    assert [
        score.value for score in score_all(Numbers(before), answers(2), stop=lambda: False)
    ] == [0.0, 1.0]


def test_a_defect_comes_through_as_it_is_and_ends_the_others() -> None:
    ended: list[int] = []

    async def before(first: int) -> None:
        if first == 2:
            raise RuntimeError("a defect")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(first)

    with pytest.raises(RuntimeError, match="a defect"):
        score_all(Numbers(before), answers(6))
    wait_for(lambda: sorted(ended) == [0, 4])


def test_it_works_inside_and_beside_running_event_loops() -> None:
    results: list[Any] = []

    async def program() -> None:
        results.append(values(backwards(), answers(3)))  # which blocks this loop, as a caller may

    asyncio.run(program())
    with server() as stub:
        combined = reward(stub.url, batch_size=2)

        async def other() -> None:
            await asyncio.sleep(0)
            results.append(await asyncio.to_thread(values, combined, answers(7)))

        threads = [threading.Thread(target=lambda: asyncio.run(other())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results[0] == [0.0, 1.0, 2.0]
    assert results[1:] == [[float(i) for i in range(7)]] * 4


def test_connections_are_kept_and_closed() -> None:
    with server() as stub:
        combined = reward(stub.url)
        for _ in range(3):
            values(combined, answers(1))
        assert (stub.connections, stub.open) == (1, 1)
        close(combined)
        wait_for(lambda: not stub.open)
        assert values(combined, answers(2)) == [0.0, 1.0]
        assert stub.connections == 2
        close(combined)


def test_a_reward_awaited_in_a_loop_of_its_own_works_as_well() -> None:
    with server() as stub:
        combined = reward(stub.url, batch_size=1, concurrency=1)

        async def use() -> list[float | None]:
            return [score.value for score in await combined(answers(3))]

        assert (
            values(combined, answers(3))
            == asyncio.run(use())
            == asyncio.run(use())
            == [0.0, 1.0, 2.0]
        )


HANGS = """
import os, signal, sys, threading
from tests.rewards.kit import answers
from valence.rewards import reward_of, score_all
from tests.rewards.kit import entry

def hang(completions):
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()

sys.modules["hanging"] = sys.modules["__main__"]
made = reward_of([entry("hanging:hang", timeout=600.0)])
try:
    score_all(made, answers(3))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_comes_through_and_the_program_ends_though_a_function_hangs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr


FORKS = """
import os
from tests.rewards.kit import answers, reward, values
made = reward("length", settings={"max_length": 3})
assert values(made, answers(2)) == [1.0, 1.0]
child = os.fork()
found = values(made, answers(3))
if child == 0:
    os._exit(0 if found == [1.0] * 3 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_process_has_a_loop_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:http.*:UserWarning")
def test_a_reply_that_comes_late_reaches_nobody() -> None:
    """What was given up has an error, and what comes for it afterwards is not taken for the next
    call's.
    """
    late = threading.Event()
    with server(lambda _, n: Reply([99.0] if n == 0 and late.wait(30) else [1.0])) as stub:
        combined = reward(stub.url, timeout=0.3)
        backend: Any = calls_of(combined).backend
        assert values(combined, answers(1)) == [None]
        late.set()
        wait_for(lambda: not stub.under_way)
        backend.seconds = 30.0
        assert values(combined, answers(1)) == [1.0]
