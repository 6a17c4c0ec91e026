"""Several model servers that share the requests of one process.

Each request is in progress at one server at most. A server that is lost (``ServerLost``) gets no
more requests until it is healthy and admitted again; its requests in progress go to other servers.
A reply that has arrived is final.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import httpx

from valence.errors import UserError
from valence.rollouts.client import (
    ServerClient,
    ServerGone,
    ServerHangs,
    ServerLost,
    ignore_message,
)

T = TypeVar("T")
Errors = Mapping[ServerClient, Exception]

Admit = Callable[[ServerClient], Any]
"""Prepares a server for requests, in a thread. Its value is passed to the functions below."""
MakeBody = Callable[[int, Any], object]
"""Makes the request of a position for an admitted server."""
HandleReply = Callable[[int, Any, Any], Coroutine[Any, Any, bool] | None]
"""Receives a position, its reply, and the value of the server's admission. May raise ServerLost:
the request is repeated. May return a coroutine that says whether the position has another request.
"""


class Steps(Protocol):
    """Work of each position before its first request, and between its requests.

    It runs in the event loop of the requests.
    """

    async def start(self, position: int) -> bool:
        """Returns whether the position has a request."""
        ...

    async def close(self) -> None:
        """Called at the end, also after an error."""
        ...


def admit_unprepared(client: ServerClient) -> ServerClient:
    """Admit a server without preparation."""
    return client


class AllServersLost(Exception):
    """No server could be reached. errors: the reason of each."""

    def __init__(self, errors: Errors) -> None:
        super().__init__()
        self.errors = errors


@dataclass(eq=False)
class PoolMember:
    """A server during ``post_all``.

    num_losses: consecutive losses without any reply. admission: prepares the server; done: it may
    be asked. was_tried: the first attempt of the admission is over. requests: in progress, with
    their positions. gone: why it is not asked again.
    """

    client: ServerClient
    http: httpx.AsyncClient
    num_losses: int = 0
    admission: asyncio.Task[Any] | None = None
    was_tried: asyncio.Event = field(default_factory=asyncio.Event)
    requests: dict[asyncio.Task[Any], int] = field(default_factory=dict[asyncio.Task[Any], int])
    gone: ServerGone | None = None

    def take_back(self) -> list[int]:
        """Cancel the requests in progress. Returns their positions."""
        positions = [*self.requests.values()]
        for request in self.requests:
            request.cancel()
        self.requests.clear()
        return positions

    @property
    def is_admitted(self) -> bool:
        return self.admission is not None and self.admission.done() and self.gone is None


class ServerPool:
    """Servers with the same model.

    log: receives a message when a server is lost, and when it is back. is_patient: wait for servers
    that are lost, as long as their time limit; else ServerGone is raised at once.
    """

    def __init__(
        self,
        clients: Sequence[ServerClient],
        log: Callable[[str], None] = ignore_message,
        *,
        is_patient: bool = True,
    ) -> None:
        self.clients, self.log, self.is_patient = list(clients), log, is_patient
        self.lost: set[ServerClient] = set()
        urls = [client.url for client in clients]
        if repeated := next((url for url in urls if urls.count(url) > 1), None):
            raise UserError(
                "duplicate server address",
                code="rollout-url-duplicate",
                where=f"rollout.url: {repeated}",
                fix="list each server only once",
            )

    @property
    def reachable(self) -> list[ServerClient]:
        """The servers that were not lost when they were last asked."""
        return [client for client in self.clients if client not in self.lost]

    def close(self) -> None:
        """Close connections."""
        for client in self.clients:
            client.close()

    # One request

    def ask_any(self, work: Callable[[ServerClient], T]) -> T:
        """The result of ``work`` with the first server that can be reached."""

        def ask() -> T:
            errors: dict[ServerClient, Exception] = {}
            for client in self.clients:
                try:
                    return work(client)
                except (ServerLost, ServerHangs) as error:
                    errors[client] = self._tolerate(error)
            raise AllServersLost(errors)

        return self._repeat(ask)

    def ask_all(self, work: Callable[[ServerClient], object], *, is_parallel: bool = False) -> None:
        """Do ``work`` with every server that can be reached, which is at least one.

        is_parallel: with all at the same time, in threads.
        """

        def attempt(client: ServerClient) -> Exception | None:
            try:
                work(client)
            except (ServerLost, ServerHangs) as error:
                return self._tolerate(error)
            return None

        def ask() -> None:
            if is_parallel and len(self.clients) > 1:
                with ThreadPoolExecutor(len(self.clients), "valence-servers") as threads:
                    outcomes = list(threads.map(attempt, self.clients))
            else:
                outcomes = [attempt(client) for client in self.clients]
            errors = {
                client: error
                for client, error in zip(self.clients, outcomes, strict=True)
                if error is not None
            }
            if len(errors) == len(self.clients):
                raise AllServersLost(errors)
            for client in self.clients:
                if client in errors:
                    self._note_lost(client, errors[client])
                else:
                    self._note_back(client)

        self._repeat(ask)

    def _tolerate(self, error: Exception) -> Exception:
        """Return a loss. Raises the error of a single server that hangs: no other can be asked."""
        if isinstance(error, ServerHangs) and len(self.clients) == 1:
            raise error
        return error

    def _repeat(self, ask: Callable[[], T]) -> T:
        """The result of ``ask``, which is repeated as long as all servers are lost."""
        num_losses = 0
        while True:
            try:
                return ask()
            except AllServersLost as lost:
                num_losses += 1
                run(self._wait_for_any(lost.errors, num_losses))

    async def _wait_for_any(self, errors: Errors, num_losses: int) -> None:
        """Block until a server is healthy. Raises UserError if none comes back."""
        gone: dict[ServerClient, ServerGone] = {}

        async def wait_for(client: ServerClient) -> None:
            async with client.connect() as http:
                try:
                    await self._recover(client, http, errors[client], num_losses)
                except ServerGone as error:
                    gone[client] = error

        waiting = {asyncio.create_task(wait_for(client)): client for client in self.clients}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                    if waiting.pop(task) not in gone:
                        return
        finally:
            await cancel(waiting)
        raise self._all_gone(gone)

    async def _recover(
        self, client: ServerClient, http: httpx.AsyncClient, error: Exception, num_losses: int
    ) -> None:
        """Block until a lost server is healthy. Raises ServerGone."""
        self._note_lost(client, error)
        if not self.is_patient:
            raise ServerGone(client.url, f"the server was lost ({error})", "read the server's log")
        await client.wait_until_healthy(http, error, num_losses)

    def _note_lost(self, client: ServerClient, error: Exception) -> None:
        is_new = client not in self.lost
        self.lost.add(client)
        if len(self.clients) == 1 and self.is_patient:
            self.log(f"{error}; waiting for the server")
        elif is_new:
            self.log(f"{error}; until the server is back, the others get its requests")

    def _note_back(self, client: ServerClient) -> None:
        if client in self.lost:
            self.lost.discard(client)
            if len(self.clients) > 1:
                self.log(f"{client.url}: the server is back")

    def _all_gone(self, errors: Mapping[ServerClient, ServerGone]) -> ServerGone:
        if len(self.clients) == 1:
            return errors[self.clients[0]]
        reasons = "; ".join(f"{client.url}: {errors[client].message}" for client in self.clients)
        return ServerGone(
            ", ".join(client.url for client in self.clients),
            f"none of the {len(self.clients)} servers is available ({reasons})",
            "restart them, then rerun the same command to resume; to use other servers, change "
            "rollout.url and add --allow rollout.url",
        )

    # Many requests

    def post_all(
        self,
        route: str,
        positions: Collection[int],
        make_body: MakeBody,
        handle: HandleReply,
        concurrency: int,
        admit: Admit = admit_unprepared,
        steps: Steps | None = None,
    ) -> None:
        """Post a request for every position until all are handled.

        A request goes to the admitted server with the fewest requests in progress, the first of
        them in the order of the addresses. concurrency: maximum per server. admit: called before
        the first request to a server, and again each time that it was lost. steps: a position is
        posted after its ``start``.

        Raises UserError when no server is left, or when waiting is useless.
        """
        run(self._post_all(route, positions, make_body, handle, concurrency, admit, steps))

    async def _post_all(
        self,
        route: str,
        positions: Collection[int],
        make_body: MakeBody,
        handle: HandleReply,
        concurrency: int,
        admit: Admit,
        steps: Steps | None,
    ) -> None:
        waiting = deque(() if steps else positions)
        between: dict[asyncio.Task[bool], int] = {}
        async with contextlib.AsyncExitStack() as stack:
            members = [
                PoolMember(client, await stack.enter_async_context(client.connect()))
                for client in self.clients
            ]
            tasks: set[asyncio.Task[Any]] = set()

            def end(task: asyncio.Task[Any]) -> None:
                tasks.discard(task)
                if not task.cancelled():
                    task.exception()  # asyncio prints errors that nothing asks for

            def start(work: Any) -> asyncio.Task[Any]:
                task = asyncio.create_task(work)
                tasks.add(task)
                task.add_done_callback(end)
                return task

            try:
                between |= {start(work): i for i, work in first_steps(steps, positions)}
                for member in members:
                    member.admission = start(self._admit(member, admit))
                for member in members:  # so that the first one does not get all requests
                    if member.client not in self.lost:
                        await member.was_tried.wait()
                while waiting or between or any(member.requests for member in members):
                    self._settle_admissions(members)
                    while waiting and (member := choose_member(members, concurrency)):
                        position = waiting.popleft()
                        body = make_body(position, member.admission.result())  # type: ignore[union-attr]
                        request = start(member.client.post_async(member.http, route, body))
                        member.requests[request] = position
                    await any_done(*(in_progress(member) for member in members), between)
                    for member in members:
                        error, following = self._handle_replies(member, handle)
                        between |= {start(work): position for position, work in following}
                        if error:
                            waiting.extendleft(sorted(member.take_back(), reverse=True))
                            member.admission = start(self._admit(member, admit, error))
                    waiting += take_ready(between)
            finally:
                await cancel(tasks)
                if steps:
                    await steps.close()

    async def _admit(self, member: PoolMember, admit: Admit, error: Exception | None = None) -> Any:
        """Prepare a server for requests. error: why it was lost. Raises ServerGone."""
        client = member.client
        try:
            # a server that hangs would delay the others by the time limit of a request
            needs_probe = error is None and len(self.clients) > 1
            if needs_probe and not await client.is_healthy_async(member.http):
                error = ServerLost(f"{client.url}: no reply from {client.health}")
                member.num_losses += 1
            while True:
                if error is not None:
                    member.was_tried.set()
                    await self._recover(client, member.http, error, member.num_losses)
                try:
                    value = await asyncio.to_thread(admit, client)
                except (ServerLost, ServerHangs) as lost:
                    error = self._tolerate(lost)
                    member.num_losses += 1
                else:
                    self._note_back(client)
                    return value
        finally:
            member.was_tried.set()

    def _settle_admissions(self, members: Sequence[PoolMember]) -> None:
        """Raises the error of an admission, and UserError when no server is left."""
        for member in members:
            if member.gone is None and member.admission is not None and member.admission.done():
                try:
                    member.admission.result()
                except ServerGone as error:
                    member.gone = error
        gone = {member.client: member.gone for member in members if member.gone is not None}
        if len(gone) == len(members):
            raise self._all_gone(gone)

    def _handle_replies(
        self, member: PoolMember, handle: HandleReply
    ) -> tuple[Exception | None, list[tuple[int, Coroutine[Any, Any, bool]]]]:
        """Handle the replies that have arrived. Returns why the server is lost, if it is, and the
        work that follows replies."""
        loss: Exception | None = None
        following: list[tuple[int, Coroutine[Any, Any, bool]]] = []
        for request in [request for request in member.requests if request.done()]:
            try:
                reply, position = request.result(), member.requests[request]
                work = handle(position, reply, member.admission.result())  # type: ignore[union-attr]
            except (ServerLost, ServerHangs) as error:
                loss = loss or self._tolerate(error)
            else:
                del member.requests[request]
                member.num_losses = 0
                following += [] if work is None else [(position, work)]
        member.num_losses += loss is not None
        return loss, following


def choose_member(members: Sequence[PoolMember], concurrency: int) -> PoolMember | None:
    """The admitted server with the fewest requests in progress; None if each has ``concurrency`` of
    them.
    """
    free = [m for m in members if m.is_admitted and len(m.requests) < concurrency]
    return min(free, key=lambda member: len(member.requests), default=None)


def first_steps(
    steps: Steps | None, positions: Collection[int]
) -> Iterator[tuple[int, Coroutine[Any, Any, bool]]]:
    """The work before the first request of each position."""
    if steps is not None:
        yield from ((position, steps.start(position)) for position in positions)


def take_ready(between: dict[asyncio.Task[bool], int]) -> list[int]:
    """Remove the work that is done. Returns the positions that have another request."""
    done = [work for work in between if work.done()]
    positions = {work: between.pop(work) for work in done}
    return [position for work, position in positions.items() if work.result()]


async def any_done(*parts: Collection[asyncio.Task[Any]]) -> None:
    """Wait until one of these is done, if there are any."""
    if pending := {task for part in parts for task in part}:
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


def in_progress(member: PoolMember) -> list[asyncio.Task[Any]]:
    """The requests of a server, and its admission while it is not done."""
    is_waiting = member.admission is not None and not member.admission.done()
    return [*member.requests, *([member.admission] if is_waiting and member.admission else [])]


async def cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and block until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def run(work: Any) -> None:
    """Run a coroutine; in a thread if an event loop is running here, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    with ThreadPoolExecutor(1, "valence-requests") as thread:
        thread.submit(asyncio.run, work).result()
