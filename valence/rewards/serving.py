"""Batching, limits and counters of a reward server.

Answers of several requests are scored in one call; each request gets its own scores or its own
errors.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from valence.rewards.calls import FailedCall, checked, describe_error
from valence.rewards.threads import Background
from valence.types import Completion, Reward, Score

BOUNDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)
"""Seconds: upper ends of the classes of durations."""
CLIENTS = 4096
"""Of how many clients the rate is known at a time."""
CLOSING = 5.0
"""Seconds that a reward may take to give back what it holds."""
SEPARATE = 4
"""Requests of a failed call that are repeated one by one at once.

More are repeated in groups first.
"""
UNUSUAL = 10.0
"""A call is unusually long when it takes so many times as long as calls do on average ..."""
USUAL_SECONDS = 5.0
"""... and longer than this, or than half the time-out of requests."""


@dataclass(frozen=True, slots=True)
class Limits:
    """max_batch: answers of one call of the reward. max_wait: seconds that an answer waits for
    others to be scored with.
    concurrency: calls under way at a time. timeout: seconds until a request is answered, in any
    case. max_items: answers of one request. max_waiting: answers of all requests that wait.
    max_body: bytes of one request; ``bodies``: of all that are being read. rate: requests a second
    of one client; None: any number.
    """

    max_batch: int = 64
    max_wait: float = 0.005
    concurrency: int = 1
    timeout: float = 60.0
    max_items: int = 1024
    max_waiting: int = 16384
    max_body: int = 32_000_000
    rate: float | None = None

    @property
    def bodies(self) -> int:
        return 8 * self.max_body


class Busy(Exception):
    """So many answers wait that another request would not be scored in time."""


@dataclass(slots=True)
class Duration:
    """A histogram, cumulative as Prometheus has it."""

    classes: list[int] = field(default_factory=lambda: [0] * len(BOUNDS))
    total: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        self.total, self.count = self.total + seconds, self.count + 1
        for k, bound in enumerate(BOUNDS):
            self.classes[k] += seconds <= bound


@dataclass(slots=True)
class Counts:
    """What a server has done so far."""

    requests: Counter[int] = field(default_factory=Counter[int])
    """By HTTP status."""
    scored: int = 0
    failed: int = 0
    answers: int = 0
    """Given to the reward, in all calls."""
    calls: Duration = field(default_factory=Duration)
    seconds: Duration = field(default_factory=Duration)

    def text(self, waiting: int) -> str:
        """In Prometheus' text format 0.0.4."""
        requests = [
            (f'status="{status}"', count) for status, count in sorted(self.requests.items())
        ]
        outcomes = [('outcome="scored"', self.scored), ('outcome="failed"', self.failed)]
        lines = [
            *_family("requests_total", "counter", "requests for scores", requests),
            *_family("answers_total", "counter", "answers of requests", outcomes),
            *_family(
                "call_answers_total", "counter", "answers given to the reward", [("", self.answers)]
            ),
            *_family("waiting", "gauge", "answers that wait to be scored", [("", waiting)]),
            *_histogram("call_seconds", "duration of a call of the reward", self.calls),
            *_histogram("request_seconds", "duration of a request for scores", self.seconds),
        ]
        return "\n".join(lines) + "\n"


def _family(name: str, kind: str, words: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    head = [f"# HELP valence_reward_{name} {words}", f"# TYPE valence_reward_{name} {kind}"]
    return head + [
        f"valence_reward_{name}{f'{{{label}}}' if label else ''} {value}"
        for label, value in samples
    ]


def _histogram(name: str, words: str, of: Duration) -> list[str]:
    classes = [
        (f'le="{bound}"', count)
        for bound, count in zip((*BOUNDS, "+Inf"), (*of.classes, of.count), strict=True)
    ]
    head, kind, *buckets = _family(name, "histogram", words, classes)
    buckets = [line.replace(f"_{name}{{", f"_{name}_bucket{{", 1) for line in buckets]
    return [
        head,
        kind,
        *buckets,
        f"valence_reward_{name}_sum {of.total}",
        f"valence_reward_{name}_count {of.count}",
    ]


class Rate:
    """Lets each client make ``rate`` requests a second, as many of them at once as come in a second
    (a token bucket).
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self.held: dict[str, tuple[float, float]] = {}  # client -> (tokens, when it had them)

    def wait(self, client: str, now: float | None = None) -> float:
        """Seconds until this client's request would be welcome; 0.0: it is, and counts."""
        if self.rate is None:
            return 0.0
        now = time.monotonic() if now is None else now
        most = max(self.rate, 1.0)
        tokens, then = self.held.pop(client, (most, now))
        tokens = min(most, tokens + (now - then) * self.rate)
        welcome = tokens >= 1.0
        self.held[client] = (tokens - welcome, now)
        if len(self.held) > CLIENTS:
            del self.held[next(iter(self.held))]  # the one that was not here for the longest time
        return 0.0 if welcome else (1.0 - tokens) / self.rate


@dataclass(slots=True, eq=False)
class Job:
    """The answers of one request. ``gone``: nobody waits for their scores any more."""

    completions: Sequence[Completion]
    deadline: float
    scores: list[Score | None]
    done: asyncio.Event = field(default_factory=asyncio.Event)
    left: int = 0
    gone: bool = False

    def settle(self, index: int, score: Score) -> None:
        if self.scores[index] is None:
            self.scores[index] = score
            self.left -= 1
        if not self.left:
            self.done.set()


Item = tuple[Job, int]
"""An answer: the request that it is of, and which of its answers."""


class Batcher:
    """Scores the answers of several requests in one call of the reward.

    A request gets only the scores and the errors of its own answers. When a call fails as a whole,
    its error may be about any of its requests, so it is repeated, in groups and then request by
    request. The reward is given an answer at most three times.

    probe: says why the reward cannot be called now, or None.
    """

    def __init__(
        self,
        reward: Reward,
        limits: Limits,
        counts: Counts | None = None,
        probe: Callable[[], Awaitable[str | None]] | None = None,
    ) -> None:
        self.reward, self.limits, self.probe = reward, limits, probe
        self.counts = Counts() if counts is None else counts
        self.waiting: deque[Item] = deque()
        self.tasks: list[asyncio.Task[None]] = []
        self.open = False
        self.call_starts: dict[object, float] = {}
        """Of each call under way: when it began (time.monotonic)."""

    async def why_not_ready(self) -> str | None:
        """Why answers that come now would not be scored in time; None if they would."""
        if not self.open:
            return "the server is starting or ending"
        if len(self.waiting) >= self.limits.max_waiting:
            return f"{len(self.waiting)} answers wait already"
        calls = self.counts.calls
        average = calls.total / calls.count if calls.count else 0.0
        usual = max(min(USUAL_SECONDS, self.limits.timeout / 2), UNUSUAL * average)
        now = time.monotonic()
        if (
            sum(now - start > usual for start in self.call_starts.values())
            >= self.limits.concurrency
        ):
            return (
                f"all calls ({self.limits.concurrency}) have been under way for more than "
                f"{usual:.3g} s"
            )
        return None if self.probe is None else await self.probe()

    async def start(self) -> None:
        # a reward that computes does not keep the server from answering
        self.aside = Background("valence reward")
        self.arrived, self.gathering = asyncio.Event(), asyncio.Lock()
        self.tasks = [asyncio.create_task(self._work()) for _ in range(self.limits.concurrency)]
        self.open = True

    async def close(self) -> None:
        """Ends calls that are under way, and gives back what the reward holds."""
        self.open = False
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.wait(
            [asyncio.wrap_future(self.aside.submit(self.reward.close()))], timeout=CLOSING
        )

    def take(self, completions: Sequence[Completion]) -> Job:
        """Lines answers up. Raises Busy where too many wait."""
        if self.waiting and len(self.waiting) + len(completions) > self.limits.max_waiting:
            raise Busy
        job = Job(
            completions,
            time.monotonic() + self.limits.timeout,
            [None] * len(completions),
            left=len(completions),
        )
        self.waiting.extend((job, index) for index in range(len(completions)))
        if not job.left:
            job.done.set()
        self.arrived.set()
        return job

    async def _work(self) -> None:
        while True:
            async with self.gathering:
                items = await self._gather()
            if items:
                await self._score(items)

    async def _gather(self) -> list[Item]:
        """The answers of the next call: as many as wait, or come in time."""
        await self._until(1)
        try:
            async with asyncio.timeout(self.limits.max_wait):
                await self._until(self.limits.max_batch)
        except TimeoutError:
            pass  # a call of fewer
        items: list[Item] = []
        while self.waiting and len(items) < self.limits.max_batch:
            item = self.waiting.popleft()
            if not item[0].gone:
                items.append(item)
        return items

    async def _until(self, count: int) -> None:
        while len(self.waiting) < count:
            self.arrived.clear()
            await self.arrived.wait()

    async def _score(self, items: list[Item]) -> None:
        """Settle each answer.

        One whose call failed is settled only if no other request was in the call.
        """
        failures = await self._settle_in_one_call(items)
        requests = _by_request(failures)
        if len(requests) > SEPARATE and not any(failure.late for failure in failures.values()):
            size = math.isqrt(len(requests) - 1) + 1
            groups = [requests[start : start + size] for start in range(0, len(requests), size)]
        else:  # a call that exceeds its time limit costs the most: not once more than needed
            groups = [requests]
        for group in groups:
            if len(groups) > 1 and len(group) > 1:
                group = _by_request(
                    await self._settle_in_one_call([item for request in group for item in request])
                )
            for request in group:
                await self._settle_in_one_call(request)

    async def _settle_in_one_call(self, items: list[Item]) -> dict[Item, FailedCall]:
        """Call the reward and settle what it says of each answer.

        Returns the answers that are not settled: those whose call failed while answers of other
        requests were in it. Does nothing for requests that nobody waits for.
        """
        items = [item for item in items if not item[0].gone]
        if not items:
            return {}
        failures = dict[Item, FailedCall]()
        is_shared = len(_by_request(items)) > 1
        for item, score in zip(items, await self._call(items), strict=True):
            if is_shared and isinstance(score, FailedCall):
                failures[item] = score
            else:
                item[0].settle(item[1], score)
        return failures

    async def _call(self, items: list[Item]) -> list[Score]:
        """The scores of one call.

        It may take as long as it likes: a reward in this process cannot be stopped, and another
        call beside it would make both slower. Meanwhile requests end at their time.
        """
        call_id, started = object(), time.monotonic()
        self.call_starts[call_id] = started
        call = asyncio.wrap_future(
            self.aside.submit(self.reward([job.completions[index] for job, index in items]))
        )
        try:
            (result,) = await asyncio.gather(call, return_exceptions=True)
        finally:
            del self.call_starts[call_id]
            self.counts.answers += len(items)
            self.counts.calls.add(time.monotonic() - started)
        if isinstance(result, BaseException):
            return [FailedCall(None, error=f"{self.reward.name}: {describe_error(result)}")] * len(
                items
            )
        if not isinstance(result, list) or len(result) != len(items):  # pyright: ignore[reportUnnecessaryIsInstance]
            error = f"{self.reward.name}: not a score for each of {len(items)} answers"
            return [FailedCall(None, error=error)] * len(items)
        return [checked(score) for score in result]


def _by_request(items: Iterable[Item]) -> list[list[Item]]:
    requests = dict[Job, list[Item]]()
    for item in items:
        requests.setdefault(item[0], []).append(item)
    return list(requests.values())
