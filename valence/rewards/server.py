"""An HTTP server of a reward: POST /get_reward {"query", "prompts", "labels"} -> {"rewards"}, the
wire of OpenRLHF.

A request has a finite number for each of its answers, or no number at all: whatever goes wrong is
told by the HTTP status.
"""
# No postponed annotations here: FastAPI reads them, and its names are known only inside of
# functions.

import asyncio
import hmac
import ipaddress
import math
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from valence.errors import UserError
from valence.rewards.http_limits import (
    HEAD_SECONDS,
    MAX_CONNECTIONS,
    MAX_HEADER_BYTES,
    RequestGuard,
    host_names,
    limited_protocol,
    raise_connection_limit,
)
from valence.rewards.serving import Batcher, Busy, Counts, Job, Limits, Rate
from valence.types import Completion, Reward, Score, content_id

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from uvicorn import Server

ENDS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
    "<pad>",
    "<|pad|>",
    "[PAD]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
"""Special tokens that a query may still have at its end, though they are not of the answer."""
MARK = re.compile(r"(?:<[^<>\s]+>|\[[A-Z]+\])\s?")
"""A special token that a query may have before the prompt."""
DRAINED = 2
"""How much of a body that is too large is read nevertheless, against what may be."""
LONGEST_ERROR = 500
"""Letters."""
LEFT = 499
"""Status, in the counts, of a request whose client did not wait."""
ALIVE = 75
"""Seconds that a connection may stay idle: longer than clients keep theirs, so that none is closed
as it is used again.
"""


class Query(BaseModel):
    """Answers to score."""

    model_config = ConfigDict(extra="forbid", strict=True)

    query: list[str] = Field(description="Prompt and answer in one text, of each answer.")
    prompts: list[str | None] | None = Field(
        None, description="Of each answer: the prompt that its query begins with."
    )
    labels: list[Any] | None = Field(
        None, description="Of each answer: whatever the reward is to know besides."
    )


class RewardsResponse(BaseModel):
    """One finite number for each query, in order."""

    rewards: list[float]
    scores: list[float] = Field(description="The same again: OpenRLHF filters prompts by these.")
    extra_logs: dict[str, list[float]] = Field(
        description="Parts that the rewards are made of, by name; those that all have."
    )


class Failed(BaseModel):
    index: int
    error: str


class Scored(BaseModel):
    index: int
    reward: float


class Problem(BaseModel):
    """Why there are no rewards.

    Where only some answers have none: these, and the scores of the others by their index.
    """

    error: str
    failed: list[Failed] | None = None
    scored: list[Scored] | None = None


STATUSES = {
    400: "not HTTP", 401: "no bearer token, or not this server's", 408: "the request came too "
                                                                        "slowly",
    413: "too large, or too many answers", 415: "not JSON", 421: "the host name is not one of "
                                                                 "this server",
    422: "not what this server reads", 429: "more requests a second than one client may make",
    431: "too many or too large headers",
    500: "the reward gave some answers no finite "
         "number", 503: "too many answers wait", 504: "not scored in time",
}  # fmt: skip


@dataclass(eq=False)
class Refusal(Exception):
    """A request that has no rewards, by its HTTP status."""

    status: int
    problem: Problem
    headers: Mapping[str, str]


def refusal(status: int, error: str, **headers: str) -> Refusal:
    return Refusal(
        status,
        Problem(error=error),
        {name.replace("_", "-"): value for name, value in headers.items()},
    )


class Service:
    """What is done with a request for scores. whole: the reward reads a query as one text (a reward
    model), and needs no prompt.
    ends: texts that are no part of an answer where they end a query. probe: says why the reward
    cannot be called, or None.
    """

    def __init__(
        self,
        reward: Reward,
        limits: Limits,
        *,
        token: str | None = None,
        whole: bool = False,
        ends: Sequence[str] = ENDS,
        probe: Callable[[], Awaitable[str | None]] | None = None,
    ) -> None:
        self.reward, self.limits, self.whole, self.ends = (
            reward,
            limits,
            whole,
            tuple(filter(None, ends)),
        )
        self.counts = Counts()
        self.batcher = Batcher(reward, limits, self.counts, probe)
        self.rate = Rate(limits.rate)
        self.token = None if token is None else token.encode()
        self.reading = 0
        """Bytes of bodies that are being read."""

    def has_token(self, request: "Request") -> bool:
        """Whether the request has this server's token, if there is one."""
        if self.token is None:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.encode("latin-1"), self.token)
        return is_right and scheme.lower() == "bearer"

    def check_token(self, request: "Request") -> None:
        if not self.has_token(request):
            raise refusal(
                401,
                "a bearer token is needed, and it has to be this server's",
                WWW_Authenticate="Bearer",
            )

    async def rewards(self, request: "Request") -> RewardsResponse:
        """Raises Refusal."""
        until = asyncio.get_running_loop().time() + self.limits.timeout
        wait = self.rate.wait(request.client.host if request.client else "")
        if wait:
            raise refusal(
                429,
                f"one client may make {self.limits.rate:g} requests a second",
                Retry_After=str(math.ceil(wait)),
            )
        self.check_token(request)
        try:
            async with asyncio.timeout_at(until):
                body = await self.body(request)
        except TimeoutError:
            raise refusal(
                408,
                f"the body was not complete after {self.limits.timeout:g} s",
                Connection="close",
            ) from None
        completions = self.completions(read(body))
        try:
            job = self.batcher.take(completions)
        except Busy:
            raise refusal(
                503, f"{len(self.batcher.waiting)} answers wait already", Retry_After="1"
            ) from None
        try:
            await self._scored(job, request)
        finally:
            job.gone = True
        return self.outcome([score for score in job.scores if score is not None])

    async def _scored(self, job: Job, request: "Request") -> None:
        """Waits for the scores, as long as the client does.

        Raises Refusal when they take too long.
        """
        done, left = (
            asyncio.ensure_future(job.done.wait()),
            asyncio.ensure_future(request.receive()),
        )
        try:
            seconds = job.deadline - time.monotonic()
            await asyncio.wait(
                (done, left), timeout=max(seconds, 0.0), return_when=asyncio.FIRST_COMPLETED
            )
            if not job.done.is_set() and left.done():
                raise refusal(LEFT, "the client left")
            if not job.done.is_set():
                raise refusal(
                    504, f"{job.left} answers have no score after {self.limits.timeout:g} s"
                )
        finally:
            done.cancel()
            left.cancel()

    async def body(self, request: "Request") -> bytes:
        """Raises Refusal unless it is JSON of at most max_body bytes.

        One that is larger is read to its end where that is near, and dropped: a client that still
        writes does not see the answer.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which web pages cannot send to other sites unasked
            raise refusal(415, "the body has to be application/json")
        from starlette.requests import ClientDisconnect

        most, size, parts = self.limits.max_body, 0, list[bytes]()
        try:
            async for part in request.stream():
                size += len(part)
                self.reading += len(part)
                if size <= most and self.reading <= self.limits.bodies:
                    parts.append(part)
                else:
                    parts.clear()
                    if size > DRAINED * most:
                        break
        except ClientDisconnect:
            raise refusal(LEFT, "the client left") from None
        finally:
            self.reading -= size
        if size > most:
            raise refusal(413, f"the body has more than {most} bytes", Connection="close")
        if sum(map(len, parts)) < size:
            raise refusal(503, "too many large requests at a time", Retry_After="1")
        return b"".join(parts)

    def completions(self, query: Query) -> list[Completion]:
        """Raises Refusal unless there are as many prompts and labels as queries, and each query
        begins with its prompt.
        """
        count = len(query.query)
        if count > self.limits.max_items:
            raise refusal(413, f"{count} answers: a request may have {self.limits.max_items}")
        for name, column in (("prompts", query.prompts), ("labels", query.labels)):
            if column is not None and len(column) != count:
                raise refusal(422, f"{count} queries, and {len(column)} {name}")
        prompts, labels = query.prompts or [None] * count, query.labels or [None] * count
        found, failed = list[Completion](), list[Failed]()
        for index, (text, prompt, label) in enumerate(
            zip(query.query, prompts, labels, strict=True)
        ):
            answer = text if self.whole else answer_in(text, prompt or "", self.ends)
            if answer is None:
                failed.append(Failed(index=index, error="the query does not begin with the prompt"))
                continue
            before = "" if self.whole else prompt or ""
            info: dict[str, Any] = {} if query.labels is None else {"label": label}
            found.append(
                Completion(
                    content_id("prompt", before),
                    (),
                    (),
                    answer,
                    "eos",
                    index=index,
                    prompt=before,
                    rendered=before,
                    info=info,
                )
            )
        if failed:
            problem = Problem(
                error=f"{len(failed)} of {count} queries do not begin with their prompt",
                failed=failed,
            )
            raise Refusal(422, problem, {})
        return found

    def outcome(self, scores: Sequence[Score]) -> RewardsResponse:
        """Raises Refusal unless all have a number."""
        failed = [
            Failed(index=k, error=plain(s.error)) for k, s in enumerate(scores) if s.value is None
        ]
        self.counts.failed += len(failed)
        self.counts.scored += len(scores) - len(failed)
        values = [(k, float(s.value)) for k, s in enumerate(scores) if s.value is not None]
        if failed:
            scored = [Scored(index=k, reward=value) for k, value in values]
            error = (
                f"{len(failed)} of {len(scores)} answers have no score; the first: "
                f"{failed[0].error}"
            )
            raise Refusal(500, Problem(error=error, failed=failed, scored=scored), {})
        numbers = [value for _, value in values]
        names = [
            name
            for name in (scores[0].parts if scores else ())
            if all(name in s.parts for s in scores)
        ]
        return RewardsResponse(
            rewards=numbers,
            scores=numbers,
            extra_logs={plain(name): [s.parts[name] for s in scores] for name in names},
        )


def read(body: bytes) -> Query:
    """Raises Refusal unless the body is what this server reads."""
    try:
        return Query.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise refusal(422, plain(f"{where}: {first['msg']}" if where else first["msg"])) from None


def answer_in(query: str, prompt: str, ends: Sequence[str]) -> str | None:
    """What follows the prompt, without special tokens at its end; None where the query does not
    begin with the prompt. Special tokens before the prompt do not matter.
    """
    while not query.startswith(prompt):
        mark = MARK.match(query)
        if mark is None:
            return None
        query = query[mark.end() :]
    answer = query[len(prompt) :]
    while end := next((end for end in ends if answer.rstrip().endswith(end)), None):
        answer = answer.rstrip().removesuffix(end)
    return answer


def plain(text: str) -> str:
    """As it can be sent, and not too long."""
    return text.encode("utf-8", "replace").decode()[:LONGEST_ERROR]


def application(
    service: Service, *, tell: Callable[[str], None] = lambda line: None, greeting: str = ""
) -> "FastAPI":
    """The web application. tell: is given a line when it can serve, when a reward fails, and when
    it ends.
    """
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    from valence.version import __version__

    counts, batcher = service.counts, service.batcher

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await batcher.start()
        tell(greeting)
        yield
        await batcher.close()
        tell(f"stopped: {counts.scored} answers scored, {counts.failed} failed")

    app = FastAPI(
        title="Valence reward server",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> JSONResponse:
        if refusal.status >= 500:
            tell(f"HTTP {refusal.status}: {refusal.problem.error}")
        return JSONResponse(
            refusal.problem.model_dump(exclude_none=True), refusal.status, dict(refusal.headers)
        )

    _add_routes(app, service, __version__)
    return app


def _add_routes(app: "FastAPI", service: Service, version: str) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse, PlainTextResponse

    counts, batcher = service.counts, service.batcher

    async def get_reward(request: Request) -> JSONResponse:
        started, status = time.monotonic(), 500
        try:
            rewards = await service.rewards(request)
            status = 200
            return JSONResponse(rewards.model_dump())
        except Refusal as refusal:
            status = refusal.status
            raise
        finally:
            counts.requests[status] += 1
            counts.seconds.add(time.monotonic() - started)

    async def health() -> Mapping[str, str]:
        return {"status": "alive", "reward": service.reward.name, "version": version}

    async def ready(request: Request) -> JSONResponse:
        reason = await batcher.why_not_ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        # it may quote the function's errors
        shown = {"reason": plain(reason)} if service.has_token(request) else {}
        return JSONResponse({"status": "not ready", **shown}, 503)

    async def metrics(request: Request) -> PlainTextResponse:
        service.check_token(request)
        return PlainTextResponse(
            counts.text(len(batcher.waiting)), media_type="text/plain; version=0.0.4"
        )

    body = {
        "required": True,
        "content": {"application/json": {"schema": Query.model_json_schema()}},
    }
    told: dict[int | str, dict[str, Any]] = {
        code: {"model": Problem, "description": words} for code, words in STATUSES.items()
    }
    late: dict[int | str, dict[str, Any]] = {503: {"description": "it does not, and why"}}
    app.post(
        "/get_reward",
        response_model=RewardsResponse,
        responses=told,
        openapi_extra={"requestBody": body},
    )(get_reward)
    app.get("/health", summary="The process answers.")(health)
    app.get("/ready", summary="It scores in time.", responses=late)(ready)
    app.get(
        "/metrics",
        summary="Counters for Prometheus.",
        response_class=PlainTextResponse,
        responses={401: told[401]},
    )(metrics)


def listening(
    host: str,
    port: int,
    *,
    guarded: bool,
    danger: str = "other machines could have answers scored, and read the scores",
    fix: str = "give --token-env, or leave out --host",
) -> socket.socket:
    """A socket that takes connections.

    guarded: requests need a token. danger, fix: what could happen without one, and how to prevent
    it. Raises UserError when the socket cannot be had, or when others could reach it without a
    token.
    """
    try:
        infos = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = infos[0]
        own = all(
            ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in infos
        )
        if not guarded and not own:
            raise UserError(
                danger,
                code="server-token-missing",
                where=f"--host {host}",
                fix=fix,
            )
        place = socket.create_server(address[:2], family=family, backlog=2048)
        # asyncio does so only for sockets whose protocol number is set, which this one's is not;
        # without it each small part of a response may wait 40 ms for the client's acknowledgement
        place.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return place
    except OSError as error:
        fix = "choose another --port (0: any that is free), or end what uses it"
        raise UserError(
            f"cannot listen: {error}",
            code="server-cannot-listen",
            where=f"--host {host} --port {port}",
            fix=fix,
        ) from error


def web_server(
    service: Service,
    place: socket.socket,
    *,
    what: str = "",
    host: str = "",
    allowed_hosts: Sequence[str] = (),
    max_connections: int = MAX_CONNECTIONS,
    tell: Callable[[str], None] = print,
) -> "Server":
    """What serves at this socket until it is told to leave: then requests that are under way are
    answered first.

    host: the name that the socket was asked for. allowed_hosts: further names that clients may use
    for the server.
    """
    import uvicorn

    limits, (address, port, *_) = service.limits, place.getsockname()
    shown = f"[{address}]" if ":" in address else address
    guard = (
        "with a token" if service.token is not None else "without a token, for this machine only"
    )
    greeting = (
        f"serving {what or service.reward.name} at http://{shown}:{port}/get_reward, {guard}; up "
        f"to {limits.max_batch} answers "
        f"are scored at once, those that come within {1000 * limits.max_wait:g} ms of each other"
    )
    app = application(service, tell=tell, greeting=greeting)
    config = uvicorn.Config(
        RequestGuard(app, host_names(host, allowed_hosts)),
        http=limited_protocol(min(HEAD_SECONDS, limits.timeout), max_connections),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=ALIVE,
        timeout_graceful_shutdown=math.ceil(limits.timeout) + 1,
    )
    return uvicorn.Server(config)


def serve(
    service: Service,
    *,
    host: str,
    port: int,
    what: str = "",
    allowed_hosts: Sequence[str] = (),
    tell: Callable[[str], None] = print,
) -> None:
    """Serves until a signal comes: then requests that are under way are answered, and the signal
    takes its course.
    """
    with listening(host, port, guarded=service.token is not None) as place:
        server = web_server(
            service,
            place,
            what=what,
            host=host,
            allowed_hosts=allowed_hosts,
            max_connections=raise_connection_limit(),
            tell=tell,
        )
        asyncio.run(server.serve(sockets=[place]))
