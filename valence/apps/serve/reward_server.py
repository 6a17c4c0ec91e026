"""An HTTP server of a reward: POST /get_reward {"query", "prompts", "labels"} -> {"rewards"}, the
protocol of OpenRLHF.

A reply has a finite number for each completion, or no rewards and an error status.
"""
# No postponed annotations: FastAPI reads them, and its names are known only inside functions.

import asyncio
import errno
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

from valence.apps.serve.http_limits import (
    CLIENT_LEFT,
    HEAD_SECONDS,
    MAX_CONNECTIONS,
    BodyError,
    BodyReader,
    host_names,
    limited_server,
    raise_connection_limit,
)
from valence.apps.serve.reward_batches import Batcher, Busy, Job, Limits, Rate, ServerMetrics
from valence.errors import UserError, field_problem
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
"""Special tokens at the end of a query that are not part of the completion."""
SPECIAL_TOKEN = re.compile(r"(?:<[^<>\s]+>|\[[A-Z]+\])\s?")
"""A special token that a query may have before the prompt."""
MAX_ERROR_LENGTH = 500
"""Maximum characters of an error message."""
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that none is closed while it is reused."""


class Query(BaseModel):
    """Completions to score."""

    model_config = ConfigDict(extra="forbid", strict=True)

    query: list[str] = Field(description="For each completion: prompt and completion as one text.")
    prompts: list[str | None] | None = Field(
        None, description="For each completion: the prompt that its query begins with."
    )
    labels: list[Any] | None = Field(
        None, description="For each completion: a value that is passed to the reward."
    )


class RewardsResponse(BaseModel):
    """One finite number for each query, in order."""

    rewards: list[float]
    scores: list[float] = Field(
        description="Equal to rewards; OpenRLHF filters prompts by these numbers."
    )
    extra_logs: dict[str, list[float]] = Field(
        description="Parts of the rewards by name, if all completions have them."
    )


class Failed(BaseModel):
    index: int
    error: str


class Scored(BaseModel):
    index: int
    reward: float


class Problem(BaseModel):
    """Why there are no rewards.

    If only some completions have none: these, and the scores of the others by index.
    """

    error: str
    failed: list[Failed] | None = None
    scored: list[Scored] | None = None


STATUSES = {
    400: "not HTTP",
    401: "missing or wrong bearer token",
    408: "the request arrived too slowly",
    413: "the body is too large, or has too many answers",
    415: "not JSON",
    421: "the host name is not allowed",
    422: "not a valid query",
    429: "too many requests per second from one client",
    431: "too many or too large headers",
    500: "the reward failed for some answers",
    503: "too many answers are waiting",
    504: "not scored in time",
}


@dataclass(eq=False)
class Refusal(Exception):
    """A request without rewards, with its HTTP status."""

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
    """Answers requests for scores.

    reads_query: the reward reads a query as one text (a reward model), and needs no prompt. ends:
    texts at the end of a query that are not part of the completion. probe: returns why the reward
    cannot be called, or None.
    """

    def __init__(
        self,
        reward: Reward,
        limits: Limits,
        *,
        token: str | None = None,
        reads_query: bool = False,
        ends: Sequence[str] = ENDS,
        probe: Callable[[], Awaitable[str | None]] | None = None,
    ) -> None:
        self.reward, self.limits, self.reads_query = reward, limits, reads_query
        self.ends = tuple(filter(None, ends))
        self.metrics = ServerMetrics()
        self.batcher = Batcher(reward, limits, self.metrics, probe)
        self.rate = Rate(limits.rate)
        self.token = None if token is None else token.encode()
        self.bodies = BodyReader(limits.max_body, limits.max_bodies, limits.timeout)

    def has_token(self, request: "Request") -> bool:
        """Whether the request has this server's token, if there is one."""
        if self.token is None:
            return True
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(token.encode("latin-1"), self.token)
        return is_right and scheme.lower() == "bearer"

    def check_token(self, request: "Request") -> None:
        if not self.has_token(request):
            raise refusal(
                401,
                "this server requires a bearer token",
                WWW_Authenticate="Bearer",
            )

    async def rewards(self, request: "Request") -> RewardsResponse:
        """Raises Refusal."""
        wait = self.rate.wait(request.client.host if request.client else "")
        if wait:
            raise refusal(
                429,
                f"rate limit exceeded: {self.limits.rate:g} requests per second per client",
                Retry_After=str(math.ceil(wait)),
            )
        self.check_token(request)
        completions = self.completions(parse_query(await self.read_body(request)))
        try:
            job = self.batcher.submit(completions)
        except Busy:
            raise refusal(
                503, f"{len(self.batcher.waiting)} answers are already waiting", Retry_After="1"
            ) from None
        try:
            await self._wait_for_scores(job, request)
        finally:
            job.gone = True
        return self.response([score for score in job.scores if score is not None])

    async def _wait_for_scores(self, job: Job, request: "Request") -> None:
        """Wait for the scores. Raises Refusal if they take too long or the client disconnects."""
        done = asyncio.ensure_future(job.done.wait())
        disconnect = asyncio.ensure_future(request.receive())
        try:
            seconds = job.deadline - time.monotonic()
            await asyncio.wait(
                (done, disconnect), timeout=max(seconds, 0.0), return_when=asyncio.FIRST_COMPLETED
            )
            if not job.done.is_set() and disconnect.done():
                raise refusal(CLIENT_LEFT, "the client disconnected")
            if not job.done.is_set():
                raise refusal(
                    504, f"{job.num_left} completions have no score after {self.limits.timeout:g} s"
                )
        finally:
            done.cancel()
            disconnect.cancel()

    async def read_body(self, request: "Request") -> bytes:
        """The body. Raises Refusal unless it is JSON within the limits."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if (
            kind != "application/json"
        ):  # web pages cannot send JSON to other sites without a preflight request
            raise refusal(415, "the content type must be application/json")
        try:
            return await self.bodies.read(request.receive)
        except BodyError as error:
            headers = {"Retry_After": "1"} if error.status == 503 else {"Connection": "close"}
            raise refusal(error.status, error.message, **headers) from None

    def completions(self, query: Query) -> list[Completion]:
        """The completions of a query.

        Raises Refusal unless there are as many prompts and labels as queries, and each query begins
        with its prompt.
        """
        count = len(query.query)
        if count > self.limits.max_items:
            raise refusal(
                413, f"{count} answers, but the maximum per request is {self.limits.max_items}"
            )
        for name, column in (("prompts", query.prompts), ("labels", query.labels)):
            if column is not None and len(column) != count:
                raise refusal(422, f"{count} queries, but {len(column)} {name}")
        prompts, labels = query.prompts or [None] * count, query.labels or [None] * count
        completions, failed = list[Completion](), list[Failed]()
        for index, (text, prompt, label) in enumerate(
            zip(query.query, prompts, labels, strict=True)
        ):
            completion = text if self.reads_query else split_query(text, prompt or "", self.ends)
            if completion is None:
                failed.append(Failed(index=index, error="the query does not begin with the prompt"))
                continue
            prompt = "" if self.reads_query else prompt or ""
            info: dict[str, Any] = {} if query.labels is None else {"label": label}
            completions.append(
                Completion(
                    content_id("prompt", prompt), (), (), completion, "eos", index=index,
                    prompt=prompt, rendered=prompt, info=info,
                )
            )  # fmt: skip
        if failed:
            problem = Problem(
                error=f"{len(failed)} of {count} queries do not begin with their prompt",
                failed=failed,
            )
            raise Refusal(422, problem, {})
        return completions

    def response(self, scores: Sequence[Score]) -> RewardsResponse:
        """The reply. Raises Refusal unless all completions have a score."""
        failed = [
            Failed(index=k, error=clean(s.error)) for k, s in enumerate(scores) if s.value is None
        ]
        self.metrics.failed.inc(len(failed))
        self.metrics.scored.inc(len(scores) - len(failed))
        values = [(k, float(s.value)) for k, s in enumerate(scores) if s.value is not None]
        if failed:
            scored = [Scored(index=k, reward=value) for k, value in values]
            error = (
                f"{len(failed)} of {len(scores)} completions have no score; the first error: "
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
            extra_logs={clean(name): [s.parts[name] for s in scores] for name in names},
        )


def parse_query(body: bytes) -> Query:
    """Parse a query. Raises Refusal for any other body."""
    try:
        return Query.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where, problem = ".".join(map(str, first["loc"])), field_problem(first)
        raise refusal(422, clean(f"{where}: {problem}" if where else problem)) from None


def split_query(query: str, prompt: str, ends: Sequence[str]) -> str | None:
    """The completion in a query, without special tokens at its end; None if the query does not
    begin with the prompt. Special tokens before the prompt are ignored.
    """
    while not query.startswith(prompt):
        token = SPECIAL_TOKEN.match(query)
        if token is None:
            return None
        query = query[token.end() :]
    completion = query[len(prompt) :]
    while end := next((end for end in ends if completion.rstrip().endswith(end)), None):
        completion = completion.rstrip().removesuffix(end)
    return completion


def clean(text: str) -> str:
    """Replace characters that UTF-8 cannot encode, and truncate."""
    return text.encode("utf-8", "replace").decode()[:MAX_ERROR_LENGTH]


def application(
    service: Service, *, log: Callable[[str], None] = lambda line: None, greeting: str = ""
) -> "FastAPI":
    """The web application. log: receives a line at the start, when a reward fails, and at the
    end.
    """
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    from valence.version import __version__

    metrics, batcher = service.metrics, service.batcher

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await batcher.start()
        log(greeting)
        yield
        await batcher.close()
        scored, failed = (
            metrics.value("answers_total", outcome=outcome) for outcome in ("scored", "failed")
        )
        log(f"stopped: {scored:.0f} answers scored, {failed:.0f} failed")

    app = FastAPI(
        title="Valence reward server",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> JSONResponse:
        if refusal.status >= 500:
            log(f"HTTP {refusal.status}: {refusal.problem.error}")
        return JSONResponse(
            refusal.problem.model_dump(exclude_none=True), refusal.status, dict(refusal.headers)
        )

    _add_routes(app, service, __version__)
    return app


def _add_routes(app: "FastAPI", service: Service, version: str) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse, PlainTextResponse

    metrics, batcher = service.metrics, service.batcher

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
            metrics.requests.labels(status).inc()
            metrics.request_seconds.observe(time.monotonic() - started)

    async def health() -> Mapping[str, str]:
        return {"status": "alive", "reward": service.reward.name, "version": version}

    async def ready(request: Request) -> JSONResponse:
        reason = await batcher.why_not_ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        # the reason may quote errors of the function
        details = {"reason": clean(reason)} if service.has_token(request) else {}
        return JSONResponse({"status": "not ready", **details}, 503)

    async def get_metrics(request: Request) -> PlainTextResponse:
        service.check_token(request)
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    body = {
        "required": True,
        "content": {"application/json": {"schema": Query.model_json_schema()}},
    }
    problems: dict[int | str, dict[str, Any]] = {
        code: {"model": Problem, "description": text} for code, text in STATUSES.items()
    }
    not_ready: dict[int | str, dict[str, Any]] = {
        503: {"description": "not ready, with the reason"}
    }
    app.post(
        "/get_reward",
        response_model=RewardsResponse,
        responses=problems,
        openapi_extra={"requestBody": body},
    )(get_reward)
    app.get("/health", summary="Whether the process is alive.")(health)
    app.get("/ready", summary="Whether requests are scored in time.", responses=not_ready)(ready)
    app.get(
        "/metrics",
        summary="Counters for Prometheus.",
        response_class=PlainTextResponse,
        responses={401: problems[401]},
    )(get_metrics)


def listening(
    host: str,
    port: int,
    *,
    guarded: bool,
    danger: str = "other machines could send answers and read their scores",
    fix: str = "add --token-env NAME, or remove --host",
) -> socket.socket:
    """A socket that accepts connections.

    guarded: requests need a token. danger, fix: the risk without one, and how to prevent it. Raises
    UserError when the socket cannot be opened, and when other machines could reach it without a
    token.
    """
    try:
        infos = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = infos[0]
        is_local = all(
            ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in infos
        )
        if not guarded and not is_local:
            raise UserError(
                f"without a token, {danger}",
                code="server-token-missing",
                where=f"--host {host}",
                fix=fix,
            )
        listener = socket.create_server(address[:2], family=family, backlog=2048)
        # asyncio sets it only for sockets that have a protocol number; without it each small part
        # of a response may wait 40 ms for the client's acknowledgement
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        fix = "use another --port (0: any free port), or stop the program that uses this port"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            fix = "set --host to an address of this machine, or to 0.0.0.0 for all of them"
        elif error.errno == errno.EACCES:
            fix = "use a --port of 1024 or more"
        raise UserError(
            f"cannot listen on this address: {error}",
            code="server-cannot-listen",
            where=f"--host {host} --port {port}",
            fix=fix,
        ) from error


def web_server(
    service: Service,
    listener: socket.socket,
    *,
    title: str = "",
    host: str = "",
    allowed_hosts: Sequence[str] = (),
    max_connections: int = MAX_CONNECTIONS,
    log: Callable[[str], None] = print,
) -> "Server":
    """The web server of this socket, which answers running requests before it exits.

    host: the name that the socket was opened with. allowed_hosts: further names that clients may
    use for the server.
    """
    limits, (address, port, *_) = service.limits, listener.getsockname()
    address = f"[{address}]" if ":" in address else address
    guard = (
        "with a token" if service.token is not None else "without a token, only for this machine"
    )
    greeting = (
        f"serving {title or service.reward.name} at http://{address}:{port}/get_reward, {guard}; "
        f"each call scores up to {limits.max_batch} answers that arrive within "
        f"{1000 * limits.max_wait:g} ms"
    )
    app = application(service, log=log, greeting=greeting)
    return limited_server(
        app,
        host_names(host, allowed_hosts),
        head_seconds=min(HEAD_SECONDS, limits.timeout),
        max_connections=max_connections,
        shutdown_seconds=math.ceil(limits.timeout) + 1,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )


def serve(
    service: Service,
    *,
    host: str,
    port: int,
    title: str = "",
    allowed_hosts: Sequence[str] = (),
    log: Callable[[str], None] = print,
) -> None:
    """Serve until a signal arrives, then answer running requests and end."""
    with listening(host, port, guarded=service.token is not None) as listener:
        server = web_server(
            service,
            listener,
            title=title,
            host=host,
            allowed_hosts=allowed_hosts,
            max_connections=raise_connection_limit(),
            log=log,
        )
        asyncio.run(server.serve(sockets=[listener]))
