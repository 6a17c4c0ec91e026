"""Batching, limits and metrics of a reward server.

Completions of several requests are scored in one call; each request receives its own scores or its
own errors.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from valence.apps.serve.http_server import RETRY, RequestError
from valence.rewards.calls import FailedCall, call_reward, checked
from valence.rewards.threads import Background
from valence.types import Completion, Reward, Score
from valence.user_code.attempt import describe_error

BUCKETS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)
"""Upper bounds of the histograms of durations, in seconds."""
MAX_CLIENTS = 4096
"""Maximum number of clients with a measured request rate."""
CLOSE_SECONDS = 5.0
"""Time limit for closing the reward."""
MAX_SEPARATE = 4
"""Maximum number of requests of a failed call that are repeated one by one.

More requests are first repeated in groups.
"""
SLOW_FACTOR = 10.0
"""A call is unusually long if it takes longer than the average call times this ..."""
SLOW_SECONDS = 5.0
"""... and longer than this, or than half the time limit of requests."""


@dataclass(frozen=True, slots=True)
class Limits:
    """max_batch: completions per call of the reward. concurrency: simultaneous calls. timeout: time
    limit of a request, in seconds. max_waiting: completions of all requests that wait. rate:
    requests per second of one client; None: unlimited. max_delay: seconds that a completion waits
    for others to share its call. max_body: bytes of a request.
    """

    max_batch: int = 64
    concurrency: int = 1
    timeout: float = 60.0
    max_waiting: int = 16384
    rate: float | None = None
    max_delay: float = 0.005
    max_body: int = 32_000_000


class ServerMetrics:
    """Prometheus metrics of a server, in a separate registry."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        prefix, to = "valence_reward_", self.registry
        status, outcome = ["status"], ["outcome"]
        self.requests = Counter(f"{prefix}requests", "requests for scores", status, registry=to)
        answers = Counter(f"{prefix}answers", "answers of requests", outcome, registry=to)
        self.scored, self.failed = answers.labels("scored"), answers.labels("failed")
        self.call_answers = Counter(
            f"{prefix}call_answers", "answers passed to the reward, over all calls", registry=to
        )
        self.waiting = Gauge(f"{prefix}waiting", "answers waiting to be scored", registry=to)
        self.call_seconds = Histogram(
            f"{prefix}call_seconds",
            "duration of a call of the reward",
            buckets=BUCKETS,
            registry=to,
        )
        self.request_seconds = Histogram(
            f"{prefix}request_seconds", "duration of a request", buckets=BUCKETS, registry=to
        )

    def value(self, name: str, **labels: str) -> float:
        """The current value of a sample by its name without the prefix."""
        return self.registry.get_sample_value(f"valence_reward_{name}", labels) or 0.0


class Rate:
    """A token bucket per client: ``rate`` requests per second, with bursts of one second."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self.buckets: dict[str, tuple[float, float]] = {}  # client -> (tokens, time)

    def wait(self, client: str, now: float | None = None) -> float:
        """Seconds until a request of this client is allowed; 0.0: it is now, and counts."""
        if self.rate is None:
            return 0.0
        now = time.monotonic() if now is None else now
        capacity = max(self.rate, 1.0)
        tokens, updated = self.buckets.pop(client, (capacity, now))
        tokens = min(capacity, tokens + (now - updated) * self.rate)
        is_allowed = tokens >= 1.0
        self.buckets[client] = (tokens - is_allowed, now)
        if len(self.buckets) > MAX_CLIENTS:
            del self.buckets[next(iter(self.buckets))]  # the client with the oldest request
        return 0.0 if is_allowed else (1.0 - tokens) / self.rate


@dataclass(slots=True, eq=False)
class Job:
    """The completions of one request.

    result: their scores in order; cancelled when nobody waits for them any more.
    """

    completions: Sequence[Completion]
    result: asyncio.Future[list[Score]]
    scores: dict[int, Score] = field(default_factory=dict[int, Score])

    @property
    def num_left(self) -> int:
        return len(self.completions) - len(self.scores)

    def settle(self, index: int, score: Score) -> None:
        self.scores[index] = score
        if not self.num_left and not self.result.done():
            self.result.set_result([self.scores[k] for k in range(len(self.completions))])


Item = tuple[Job, int]
"""A completion: its request, and its index there."""


class Batcher:
    """Scores the completions of several requests in one call of the reward.

    A request receives only the scores and the errors of the completions that it contains. If a call
    fails as a whole, its error may be about any of its requests, so the call is repeated, in groups
    and then request by request. A completion is passed to the reward at most three times.

    probe: returns why the reward cannot be called now, or None.
    """

    def __init__(
        self,
        reward: Reward,
        limits: Limits,
        probe: Callable[[], Awaitable[str | None]] | None = None,
    ) -> None:
        self.reward, self.limits, self.probe = reward, limits, probe
        self.waiting: deque[Item] = deque()
        self.arrived, self.gathering = asyncio.Event(), asyncio.Lock()
        self.metrics = ServerMetrics()
        self.metrics.waiting.set_function(lambda: len(self.waiting))
        self.call_starts: dict[object, float] = {}
        """Start (time.monotonic) of each call that is running."""

    async def why_not_ready(self) -> str | None:
        """Why new completions would not be scored in time; None if they would."""
        if len(self.waiting) >= self.limits.max_waiting:
            return f"{len(self.waiting)} answers are already waiting"
        count = self.metrics.value("call_seconds_count")
        average = self.metrics.value("call_seconds_sum") / count if count else 0.0
        longest = max(min(SLOW_SECONDS, self.limits.timeout / 2), SLOW_FACTOR * average)
        now, num_calls = time.monotonic(), self.limits.concurrency
        if sum(now - start > longest for start in self.call_starts.values()) >= num_calls:
            return f"all calls ({num_calls}) have been running for more than {longest:.3g} s"
        return None if self.probe is None else await self.probe()

    async def start(self) -> None:
        # in a thread, so that a reward that computes does not block the server
        self.background = Background("valence reward")
        self.tasks = [asyncio.create_task(self._work()) for _ in range(self.limits.concurrency)]

    async def close(self) -> None:
        """Cancel running calls, and close the reward."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.wait(
            [asyncio.wrap_future(self.background.submit(self.reward.close()))],
            timeout=CLOSE_SECONDS,
        )

    def submit(self, completions: Sequence[Completion]) -> Job:
        """Queue completions. Raises RequestError if too many wait."""
        if self.waiting and len(self.waiting) + len(completions) > self.limits.max_waiting:
            raise RequestError(503, f"{len(self.waiting)} answers are already waiting", RETRY)
        job = Job(completions, asyncio.get_running_loop().create_future())
        if not completions:
            job.result.set_result([])
        self.waiting.extend((job, index) for index in range(len(completions)))
        self.arrived.set()
        return job

    async def _work(self) -> None:
        while True:
            async with self.gathering:
                items = await self._gather()
            if items:
                await self._score(items)

    async def _gather(self) -> list[Item]:
        """The completions of the next call: those that wait, or arrive in time."""
        await self._wait_for(1)
        try:
            async with asyncio.timeout(self.limits.max_delay):
                await self._wait_for(self.limits.max_batch)
        except TimeoutError:
            pass  # the call is smaller
        items: list[Item] = []
        while self.waiting and len(items) < self.limits.max_batch:
            item = self.waiting.popleft()
            if not item[0].result.done():
                items.append(item)
        return items

    async def _wait_for(self, count: int) -> None:
        while len(self.waiting) < count:
            self.arrived.clear()
            await self.arrived.wait()

    async def _score(self, items: list[Item]) -> None:
        """Settle each completion.

        If its call failed, a completion is settled only if no other request was in the call.
        """
        failures = await self._settle_in_one_call(items)
        requests = _by_request(failures)
        is_late = any(failure.late for failure in failures.values())
        # a call that exceeds its time limit costs most: do not repeat it more than needed
        if len(requests) > MAX_SEPARATE and not is_late:
            size = math.isqrt(len(requests) - 1) + 1
            groups = [requests[start : start + size] for start in range(0, len(requests), size)]
            requests = [
                request
                for group in groups
                for request in _by_request(await self._settle_in_one_call(chain(*group)))
            ]
        for request in requests:
            await self._settle_in_one_call(request)

    async def _settle_in_one_call(self, items: Iterable[Item]) -> dict[Item, FailedCall]:
        """Call the reward and settle the completions.

        Returns those that are not settled: their call failed, and it had completions of other
        requests. Does nothing for requests of disconnected clients.
        """
        items = [item for item in items if not item[0].result.done()]
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

        There is no time limit: a reward in this process cannot be stopped, and another call at the
        same time would make both slower. Requests still end at their time limit.
        """
        call_id, started = object(), time.monotonic()
        self.call_starts[call_id] = started
        scores = self._checked_scores([job.completions[index] for job, index in items])
        call = asyncio.wrap_future(self.background.submit(scores))
        try:
            (result,) = await asyncio.gather(call, return_exceptions=True)
        finally:
            del self.call_starts[call_id]
            self.metrics.call_answers.inc(len(items))
            self.metrics.call_seconds.observe(time.monotonic() - started)
        if isinstance(result, BaseException):
            error = f"{self.reward.name}: {describe_error(result)}"
            return [FailedCall(None, error=error)] * len(items)
        return result

    async def _checked_scores(self, completions: Sequence[Completion]) -> list[Score]:
        return [checked(score) for score in await call_reward(self.reward, completions)]


def _by_request(items: Iterable[Item]) -> list[list[Item]]:
    requests = dict[Job, list[Item]]()
    for item in items:
        requests.setdefault(item[0], []).append(item)
    return list(requests.values())
