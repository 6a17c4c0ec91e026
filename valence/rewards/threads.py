"""Threads for reward functions: their code cannot exit or block the program, or change its
folder.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from valence.user_code.attempt import Raised, attempt, separate_working_directory

T = TypeVar("T")
RESPONSE_SECONDS = 1.0
"""Time within which an event loop that is not blocked responds."""


class TimedOut(Exception):
    """A call exceeded its time limit. ``blocked``: it blocks its event loop."""

    def __init__(self, blocked: bool = False) -> None:
        super().__init__()
        self.blocked = blocked


async def in_thread(
    call: Callable[[], T], seconds: float | None, abandoned: list[threading.Thread] | None = None
) -> T | Raised:
    """The result or exception of a blocking call.

    Raises TimedOut after ``seconds``. The thread cannot be ended and is added to ``abandoned``; it
    does not prevent the program from exiting.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T | Raised] = loop.create_future()

    def deliver(result: T | Raised) -> None:
        if not outcome.done():
            outcome.set_result(result)

    def run() -> None:
        separate_working_directory()
        result = attempt(call)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, result)

    thread = threading.Thread(target=run, name="valence reward", daemon=True)
    thread.start()
    try:
        await asyncio.wait({outcome}, timeout=seconds)
    finally:
        if not outcome.done() and abandoned is not None:
            abandoned.append(thread)
    if not outcome.done():
        outcome.cancel()
        raise TimedOut
    return outcome.result()


class Background:
    """An event loop in a daemon thread that lives as long as the program, so that connections stay
    open between calls.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while isinstance(attempt(self.loop.run_forever), Raised):
            pass  # SystemExit of a task ends run_forever; the other tasks continue

    def end(self) -> threading.Thread:
        """Stop the loop. The thread ends when it is no longer blocked."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        return self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def run(self, call: Callable[[], Awaitable[T]], seconds: float | None) -> T | Raised:
        """The result or exception of an awaitable that is created in the loop, in the caller's
        working directory.

        Cancels it and raises TimedOut after ``seconds``.
        """
        folder = attempt(os.getcwd)

        async def run_call() -> T:
            if separate_working_directory() and not isinstance(folder, Raised):
                os.chdir(folder)
            return await call()

        work = asyncio.wrap_future(self.submit(run_call()))
        try:
            done, _ = await asyncio.wait({work}, timeout=seconds)
        finally:
            work.cancel()
        if not done:
            raise TimedOut(blocked=await self._is_blocked())
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        return work.result() if error is None else Raised(error)

    async def _is_blocked(self) -> bool:
        caller = asyncio.get_running_loop()
        alive = asyncio.Event()

        def answer() -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed
                caller.call_soon_threadsafe(alive.set)

        self.loop.call_soon_threadsafe(answer)
        try:
            await asyncio.wait_for(alive.wait(), RESPONSE_SECONDS)
        except TimeoutError:
            return True
        return False
