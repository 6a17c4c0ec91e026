"""Threads for the code of reward functions, where nothing that it does ends, stops or moves the
program.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
LATE = 1.0
"""Seconds within which an event loop that is not blocked has answered."""


CLONE_FS = 0x200
"""Linux: what a thread gives up to have a working directory of its own."""


@dataclass(frozen=True, slots=True)
class Raised:
    """What a call raised, where it gave nothing."""

    error: BaseException


class TimedOut(Exception):
    """A call was given up.

    ``blocked``: the event loop that it ran in does nothing else any more.
    """

    def __init__(self, blocked: bool = False) -> None:
        super().__init__()
        self.blocked = blocked


def attempt(call: Callable[[], T]) -> T | Raised:
    """What the call gives, or what it raised, whatever that is."""
    try:
        return call()
    except (
        BaseException
    ) as error:  # a reward may raise even SystemExit; Ctrl-C only ever reaches the main thread
        return Raised(error)


def own_working_directory() -> bool:
    """Give this thread its own working directory, where Linux allows it: otherwise ``os.chdir``
    moves the whole process. Not for threads that outlive a call, which the program's own
    ``os.chdir`` has to reach. Returns whether it worked.
    """
    return sys.platform == "linux" and attempt(lambda: ctypes.CDLL(None).unshare(CLONE_FS)) == 0


@contextlib.contextmanager
def restored_working_directory() -> Iterator[None]:
    """Change back to the working directory if the block has left it."""
    try:
        folder = os.getcwd()
    except OSError:  # deleted: nothing to come back to
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if attempt(os.getcwd) != folder:
                os.chdir(folder)


async def in_thread(
    call: Callable[[], T], seconds: float | None, abandoned: list[threading.Thread] | None = None
) -> T | Raised:
    """What a blocking call gives or raises.

    Raises TimedOut after so many seconds: the thread cannot be ended and is left alone, among the
    ``abandoned``; it does not keep the program from ending.
    """
    loop = asyncio.get_running_loop()
    came: asyncio.Future[T | Raised] = loop.create_future()

    def tell(found: T | Raised) -> None:
        if not came.done():
            came.set_result(found)

    def run() -> None:
        own_working_directory()
        found = attempt(call)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, found)

    thread = threading.Thread(target=run, name="valence reward", daemon=True)
    thread.start()
    try:
        await asyncio.wait({came}, timeout=seconds)
    finally:
        if not came.done() and abandoned is not None:
            abandoned.append(thread)
    if not came.done():
        came.cancel()
        raise TimedOut
    return came.result()


class Background:
    """An event loop in a daemon thread, which lives as long as the program: what it opened stays
    open from call to call.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while isinstance(attempt(self.loop.run_forever), Raised):
            pass  # SystemExit of a task ends run_forever; the task has it too, and the others go on

    def end(self) -> threading.Thread:
        """The thread ends once nothing blocks it any more."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        return self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def run(self, call: Callable[[], Awaitable[T]], seconds: float | None) -> T | Raised:
        """What an awaitable that is made in the loop gives or raises.

        Raises TimedOut after so many seconds; it is cancelled.
        """

        async def made() -> T:
            return await call()

        work = asyncio.wrap_future(self.submit(made()))
        try:
            done, _ = await asyncio.wait({work}, timeout=seconds)
        finally:
            work.cancel()
        if not done:
            raise TimedOut(blocked=await self._blocked())
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        return work.result() if error is None else Raised(error)

    async def _blocked(self) -> bool:
        here = asyncio.get_running_loop()
        alive = asyncio.Event()

        def answer() -> None:
            with contextlib.suppress(RuntimeError):  # the loop that asked is closed
                here.call_soon_threadsafe(alive.set)

        self.loop.call_soon_threadsafe(answer)
        try:
            await asyncio.wait_for(alive.wait(), LATE)
        except TimeoutError:
            return True
        return False
