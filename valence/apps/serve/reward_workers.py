"""Worker processes that run a served function. A worker that exceeds a time limit is killed and
replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from valence.errors import UserError
from valence.network import backoff
from valence.rewards.calls import RewardError
from valence.rewards.threads import Background
from valence.types import Completion, Score

GRACE_SECONDS = 2.0
"""Time beyond the limit of a call for a worker to report that the limit was exceeded."""
PROBE_INTERVAL, PROBE_SECONDS = 5.0, 1.0
"""Interval between probes of an idle worker, and time limit of a probe."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before another attempt to start a worker, doubled each time, and their maximum."""
START_SECONDS = 600.0
"""Time limit for a replacement to import the function."""
MAX_REPEATS = 2
"""Repetitions of a call after the end of its process, which other calls shared."""
MAX_REPLY_BYTES = 2**28
"""Maximum bytes of a reply of a worker, which is killed if it sends more."""
MAX_LINE_BYTES = 2000
"""Maximum bytes of a worker's output per line of the log."""
START = (
    "import sys; sys.path[:] = {path!r}; "
    "from valence.apps.serve.reward_worker_process import main; main({message_fd}, {lifeline_fd})"
)


class WorkerEnded(Exception):
    """The process ended before it replied."""


@dataclass(eq=False)
class Worker:
    """One process. ``num_calls``: running calls; ``lifeline``: a pipe; closing it ends the
    process.
    """

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    lifeline: int
    num_calls: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _replies: dict[int, asyncio.Future[Any]] = field(
        default_factory=dict[int, "asyncio.Future[Any]"]
    )
    _ids: Any = field(default_factory=itertools.count)

    async def receive(self) -> Any:
        """The next message. Raises WorkerEnded."""
        try:
            return json.loads(await self.reader.readline())
        except (OSError, ValueError):  # ValueError: an incomplete reply, or a too long one
            raise WorkerEnded from None

    def send(self, message: Any) -> None:
        self.writer.write(pickle.dumps(message))

    async def ask(self, completions: Sequence[Completion] | None, seconds: float) -> Any:
        """The reply to a call, or to a probe (None). Raises TimeoutError and WorkerEnded."""
        if self.ended.is_set():
            raise WorkerEnded
        number = next(self._ids)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self.send((number, completions))
            async with asyncio.timeout(seconds):
                return await reply
        finally:
            del self._replies[number]

    async def distribute_replies(self) -> None:
        """Pass each reply to the call that waits for it, until the process ends."""
        with contextlib.suppress(WorkerEnded):
            while True:
                message = await self.receive()
                reply = self._replies.get(message["id"])
                if reply is not None and not reply.done():
                    reply.set_result(message)
        self.kill()

    def kill(self) -> None:
        """Kill the process and its children. Running calls raise WorkerEnded."""
        if self.ended.is_set():
            return
        self.ended.set()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.writer.close()
        os.close(self.lifeline)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(WorkerEnded())


@dataclass(eq=False)
class WorkerPool:
    """A backend (``CallBackend``) that calls a function in worker processes.

    seconds: time limit of a call, after which its worker is killed. concurrency: simultaneous
    calls; a blocking function has this many workers, an asynchronous one has one worker for all.
    log: receives the output of workers line by line. max_wait: seconds that a call waits for a
    worker. All workers run the same files: if a replacement has imported newer ones, the others are
    replaced as well, and ``identity`` changes.
    """

    target: str
    settings: Mapping[str, Any]
    seconds: float
    concurrency: int
    where: str
    log: Callable[[str], None]
    max_wait: float
    workers: list[Worker] = field(default_factory=list[Worker])
    _facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    _capacity: int = 1
    _trouble: str = "the worker process is starting"

    def start(self) -> None:
        """Start the workers, and block until the first has imported the function.

        Raises UserError if it cannot.
        """
        self._background = Background("valence workers")
        self._changed = asyncio.Event()
        self._background.submit(self._start()).result()

    @property
    def identity(self) -> Mapping[str, Any] | None:
        return self._facts["identity"]

    @property
    def parameters(self) -> list[str]:
        return self._facts["parameters"]

    async def attempt(self, completions: Sequence[Completion]) -> list[Score]:
        return await asyncio.wrap_future(self._background.submit(self._attempt(completions)))

    async def probe(self) -> str | None:
        """Why no worker can run a call now, or None. Probes idle workers."""
        return await asyncio.wrap_future(self._background.submit(self._probe()))

    async def close(self) -> None:
        await asyncio.wrap_future(self._background.submit(self._close()))

    # In the event loop of the workers

    async def _start(self) -> None:
        try:
            worker, facts = await self._start_worker()
        except WorkerEnded as error:
            raise UserError(
                _reason(error),
                code="reward-worker-failed",
                where=f"{self.where}: {self.target}",
                fix="read the output of the worker above, and try to import the module of the "
                f"reward: `python -c 'import {self.target.partition(':')[0]}'`",
            ) from error
        self._facts = facts
        num_workers = self.concurrency if facts["blocking"] else 1
        self._capacity = 1 if facts["blocking"] else self.concurrency
        self._tasks = [
            asyncio.create_task(self._keep_worker(worker if i == 0 else None))
            for i in range(num_workers)
        ]

    async def _start_worker(self) -> tuple[Worker, Any]:
        """A process that has imported the function, and its facts about it.

        Raises UserError and WorkerEnded.
        """
        server_socket, worker_socket = socket.socketpair()
        lifeline_read, lifeline_write = os.pipe()
        code = START.format(
            path=sys.path, message_fd=worker_socket.fileno(), lifeline_fd=lifeline_read
        )
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(worker_socket.fileno(), lifeline_read),
                start_new_session=True,
            )
        except OSError as error:
            server_socket.close()
            os.close(lifeline_write)
            raise WorkerEnded(f"the worker process cannot start: {error.strerror}") from error
        finally:
            worker_socket.close()
            os.close(lifeline_read)
        threading.Thread(
            target=self._log_output, args=(process,), name="output of a worker", daemon=True
        ).start()
        loading = asyncio.create_task(self._load(process, server_socket, lifeline_write))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.gather(loading, return_exceptions=True)
            raise

    async def _load(
        self, process: subprocess.Popen[bytes], server_socket: socket.socket, lifeline: int
    ) -> tuple[Worker, Any]:
        streams = await asyncio.open_connection(sock=server_socket, limit=MAX_REPLY_BYTES)
        worker = Worker(process, *streams, lifeline)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(worker.kill)
            worker.send((self.target, dict(self.settings), self.seconds, self.where))
            message = await worker.receive()
            if "error" in message:
                raise UserError(**message["error"])
            on_failure.pop_all()
        return worker, message["loaded"]

    def _log_output(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            while line := output.readline(MAX_LINE_BYTES):
                with contextlib.suppress(OSError, ValueError):  # the log is closed
                    self.log(f"worker {process.pid}: {line.decode('utf-8', 'replace').rstrip()}")
        process.wait()

    async def _keep_worker(self, worker: Worker | None) -> None:
        """Keep one worker while the pool is open: start another whenever it ends."""
        while True:
            worker = worker or await self._replacement()
            self._trouble = "the worker process is restarting"
            self.workers.append(worker)
            self._changed.set()
            replies = asyncio.create_task(worker.distribute_replies())
            try:
                await self._watch(worker)
            finally:
                worker.kill()
                self.workers.remove(worker)
                await asyncio.gather(replies, return_exceptions=True)
            worker = None

    async def _replacement(self) -> Worker:
        """Start another worker. Tries again until that succeeds."""
        failures = 0
        while True:
            try:
                async with asyncio.timeout(START_SECONDS):
                    worker, facts = await self._start_worker()
                self._adopt(worker, facts)
                return worker
            except (UserError, WorkerEnded, TimeoutError) as error:
                self._trouble = f"the worker process cannot start: {_reason(error)}"
                self.log(self._trouble)
                await asyncio.sleep(backoff(failures, FIRST_PAUSE, LONGEST_PAUSE))
                failures += 1

    def _adopt(self, worker: Worker, facts: Mapping[str, Any]) -> None:
        """Compare the facts of a replacement with those of the other workers.

        Raises UserError for another signature, which the other parts of the server rely on.
        """
        identity = {"identity": facts["identity"]}
        if {**self._facts, **identity} != facts:
            worker.kill()
            raise UserError(
                "the signature of the function has changed",
                code="reward-worker-failed",
                where=f"{self.where}: {self.target}",
                fix="undo the change, or restart the server",
            )
        if self._facts != facts:
            self.log(f"the files of {self.target} have changed; all workers import them again")
            self._facts = facts
            for other in self.workers:
                other.kill()

    async def _watch(self, worker: Worker) -> None:
        """Wait until the worker ends, or does not reply to a probe."""
        while not worker.ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_INTERVAL):
                    await worker.ended.wait()
            await self._is_alive(worker)

    async def _is_alive(self, worker: Worker) -> bool:
        """Whether a worker is busy or replies to a probe. If not, kill it."""
        if worker.num_calls and not worker.ended.is_set():
            return True
        try:
            await worker.ask(None, PROBE_SECONDS)
        except WorkerEnded:
            return False
        except TimeoutError:
            # it has received a call, which has its own time limit
            if worker.num_calls:
                return True
            self.log(f"worker {worker.process.pid} does not respond and was killed")
            worker.kill()
            return False
        return True

    async def _probe(self) -> str | None:
        if any(await asyncio.gather(*(self._is_alive(worker) for worker in list(self.workers)))):
            return None
        return self._trouble

    async def _attempt(self, completions: Sequence[Completion]) -> list[Score]:
        num_repeats = MAX_REPEATS if self._capacity > 1 else 0
        for _ in range(1 + num_repeats):  # another call may have ended the process
            with contextlib.suppress(WorkerEnded):
                return await self._call(completions)
        raise RewardError(f"the worker process ended during the call ({self.target})")

    async def _call(self, completions: Sequence[Completion]) -> list[Score]:
        """Raises RewardError and WorkerEnded."""
        worker = await self._free_worker()
        try:
            reply = await worker.ask(completions, self.seconds + GRACE_SECONDS)
        except TimeoutError:
            worker.kill()
            raise RewardError(
                f"no result within the time limit of {self.seconds:g} s; the worker process was "
                f"killed ({self.target})",
                late=True,
            ) from None
        finally:
            worker.num_calls -= 1
            self._changed.set()
        if "failed" in reply:
            if reply["hung"]:
                worker.kill()
            raise RewardError(reply["failed"], late=reply["late"])
        return [Score(*record) for record in reply["scores"]]

    async def _free_worker(self) -> Worker:
        """Reserve a worker for a call. Raises RewardError if none is free in time."""
        try:
            async with asyncio.timeout(self.max_wait):
                while True:
                    workers = [
                        w
                        for w in self.workers
                        if w.num_calls < self._capacity and not w.ended.is_set()
                    ]
                    if workers:
                        worker = min(workers, key=lambda w: w.num_calls)
                        worker.num_calls += 1
                        return worker
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            reason = "all worker processes are busy" if self.workers else self._trouble
            raise RewardError(
                f"no free worker within {self.max_wait:g} s: {reason} ({self.target})", late=True
            ) from None

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _reason(error: BaseException) -> str:
    if isinstance(error, UserError):
        return error.message
    if isinstance(error, TimeoutError):
        return "importing the function takes too long"
    return str(error) or "the process ended while importing the function"
