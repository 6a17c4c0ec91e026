"""Many requests to one server at once, and again what a server left unanswered when it went
away.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from valence.errors import UserError
from valence.network import routes
from valence.rollouts.wire import CONNECT, Lost, Wire

TRIES = 3
"""Times in a row that a server may go away without having answered anything."""

Bodies = Callable[[Collection[int]], Mapping[int, object]]
"""Makes the requests for some positions."""

Take = Callable[[int, Any], object]
"""Is handed a position and the answer to its request."""


def unsaid(note: str) -> None:
    """Who asks for no notes gets none."""


def seed_of(seed: int, position: int) -> int:
    """Where the seeds of a prompt's answers start; the answer at index i has this + i.

    Far apart for different prompts.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{position}".encode()).digest()[:8]) >> 2


class Asking:
    """Requests to ``route`` of a server.

    gone: whether an answer means that the server went away, beside those that always do. revive:
    starts it again. say: hears of every wait.
    """

    def __init__(
        self,
        wire: Wire,
        route: str,
        *,
        gone: Callable[[httpx.Response], bool] = lambda response: False,
        tries: int = TRIES,
        revive: Callable[[], None] | None = None,
        say: Callable[[str], None] = unsaid,
    ) -> None:
        self.wire, self.route, self.gone, self.tries = wire, route, gone, tries
        self.revive, self.say = revive, say

    def persist(self, work: Callable[[], Any]) -> Any:
        """The result of work, which is done again when the server went away meanwhile and is
        back.
        """
        attempt = 0
        while True:
            try:
                return work()
            except Lost as error:
                attempt += 1
                self.recover(error, attempt)

    def recover(self, error: Lost, attempt: int) -> None:
        """Waits until the server is back.

        Raises UserError when it is not, or has gone away too often.
        """
        if attempt >= self.tries:
            what = f"the server went away {attempt} times in a row ({error})"
            raise UserError(
                what, code="rollout-server-lost", where=self.wire.url, fix="see why in its log"
            ) from error
        self.say(f"{error}; waiting for the server")
        if self.revive is not None and not self.wire.healthy():
            self.revive()
        self.wire.wait(error, attempt)

    def all(self, positions: Collection[int], bodies: Bodies, take: Take, most: int) -> None:
        """Asks for every position until each has been taken, ``most`` requests at once.

        bodies: of the positions that are left, made anew each time that the server went away. take:
        may raise Lost, and then the position is asked for again.
        """
        left, attempt = dict.fromkeys(positions), 0

        def taken(i: int, answer: Any) -> None:
            take(i, answer)
            del left[i]

        while left:
            before = len(left)
            try:
                self._run(bodies(left), taken, most)
            except Lost as error:
                attempt = 1 if len(left) < before else attempt + 1
                self.recover(error, attempt)

    def _run(self, bodies: Mapping[int, object], take: Take, most: int) -> None:
        """One round. Where an event loop runs already, as in a notebook, in a thread of its own."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(self._round(bodies, take, most))
            return
        with ThreadPoolExecutor(1, "valence-asking") as thread:
            thread.submit(asyncio.run, self._round(bodies, take, most)).result()

    async def _round(self, bodies: Mapping[int, object], take: Take, most: int) -> None:
        """Hands over each answer as it comes.

        The first error ends all requests, and the server forgets them.
        """
        turn = asyncio.Semaphore(most)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=most)
        async with httpx.AsyncClient(
            base_url=self.wire.url,
            headers=self.wire.headers,
            timeout=httpx.Timeout(None, connect=CONNECT),
            limits=limits,
            **routes(self.wire.url),
        ) as client:

            async def ask(i: int) -> tuple[int, Any]:
                async with turn:
                    return i, await self._ask(client, bodies[i])

            tasks = [asyncio.create_task(ask(i)) for i in bodies]
            try:
                for each in asyncio.as_completed(tasks):
                    take(*await each)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, client: httpx.AsyncClient, body: object) -> Any:
        try:
            async with asyncio.timeout(self.wire.timeout):
                response = await client.post(self.route, json=body)
        except TimeoutError as error:
            raise await asyncio.to_thread(self.wire.hangs, self.route, self.wire.timeout) from error
        except httpx.HTTPError as error:
            raise self.wire.lost(error) from error
        if self.gone(response):
            raise Lost(
                f"{self.wire.url}{self.route} answers {response.status_code}: {response.text[:300]}"
            )
        return self.wire.read(self.route, response)
