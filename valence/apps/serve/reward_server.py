"""An HTTP server of a reward: POST /get_reward {"query", "prompts", "labels"} -> {"rewards"}, the
protocol of OpenRLHF.

A reply has a finite number for each completion, or no rewards and an error status.
"""
# No postponed annotations: FastAPI reads them, and its names are known only inside functions.

import asyncio
import math
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from valence.apps.serve.http_server import (
    CLIENT_LEFT,
    HEAD_SECONDS,
    BodyReader,
    RequestError,
    has_token,
    is_json,
    limited_server,
    open_socket,
)
from valence.apps.serve.reward_batches import Batcher, Limits, Rate
from valence.errors import field_problem
from valence.types import Completion, Reward, Score, content_id
from valence.version import __version__

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
MAX_ITEMS = 1024
"""Maximum completions of a request."""
MAX_BODIES = 8
"""Maximum bytes of all requests that are being read, as a multiple of those of one."""


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
    feedback: list[str] | None = Field(
        default=None,
        description="Texts of the rewards about each completion, if there are any.",
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
        self.reward, self.limits, self.token = reward, limits, token
        self.reads_query = reads_query
        self.ends = tuple(filter(None, ends))
        self.batcher = Batcher(reward, limits, probe)
        self.metrics = self.batcher.metrics
        self.rate = Rate(limits.rate)
        self.bodies = BodyReader(limits.max_body, MAX_BODIES * limits.max_body, limits.timeout)

    def has_token(self, request: "Request") -> bool:
        """Whether the request has this server's token, if there is one."""
        authorization = request.headers.get("authorization", "")
        return self.token is None or has_token(authorization, self.token)

    def check_token(self, request: "Request") -> None:
        if not self.has_token(request):
            headers = {"WWW-Authenticate": "Bearer"}
            raise RequestError(401, "this server requires a bearer token", headers)

    async def rewards(self, request: "Request") -> RewardsResponse:
        """Raises RequestError, also if the client disconnects."""
        job = self.batcher.submit(await self.read(request))
        disconnect = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait(
                (job.result, disconnect),
                timeout=self.limits.timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if job.result.done():
                return self.response(job.result.result())
            if disconnect.done():
                raise RequestError(CLIENT_LEFT, "the client disconnected")
            error = f"{job.num_left} completions have no score after {self.limits.timeout:g} s"
            raise RequestError(504, error)
        finally:
            job.result.cancel()
            disconnect.cancel()

    async def read(self, request: "Request") -> list[Completion]:
        """The completions of a request. Raises RequestError.

        The rate, the token and the type are checked before the body is read.
        """
        wait = self.rate.wait(request.client.host if request.client else "")
        if wait:
            error = f"rate limit exceeded: {self.limits.rate:g} requests per second per client"
            raise RequestError(429, error, {"Retry-After": str(math.ceil(wait))})
        self.check_token(request)
        if not is_json(request.headers.get("content-type", "")):
            raise RequestError(415, "the content type must be application/json")
        return self.completions(parse_query(await self.bodies.read(request.receive)))

    def completions(self, query: Query) -> list[Completion]:
        """The completions of a query.

        Raises RequestError unless there are as many prompts and labels as queries, and each query
        begins with its prompt.
        """
        count = len(query.query)
        if count > MAX_ITEMS:
            raise RequestError(413, f"{count} answers, but the maximum per request is {MAX_ITEMS}")
        for name, column in (("prompts", query.prompts), ("labels", query.labels)):
            if column is not None and len(column) != count:
                raise RequestError(422, f"{count} queries, but {len(column)} {name}")
        if self.reads_query:
            prompts, texts = [""] * count, list[str | None](query.query)
        else:
            prompts = [prompt or "" for prompt in query.prompts or [None] * count]
            pairs = zip(query.query, prompts, strict=True)
            texts = [split_query(text, prompt, self.ends) for text, prompt in pairs]
        error = "the query does not begin with the prompt"
        failed = [{"index": k, "error": error} for k, text in enumerate(texts) if text is None]
        if failed:
            error = f"{len(failed)} of {count} queries do not begin with their prompt"
            raise RequestError(422, error, details={"failed": failed})
        return [
            Completion(
                content_id("prompt", prompt), (), (), text or "", "eos", index=k,
                prompt=prompt, rendered=prompt,
                info={} if query.labels is None else {"label": query.labels[k]},
            )
            for k, (text, prompt) in enumerate(zip(texts, prompts, strict=True))
        ]  # fmt: skip

    def response(self, scores: Sequence[Score]) -> RewardsResponse:
        """The reply. Raises RequestError unless all completions have a score."""
        failed = [
            {"index": k, "error": clean(s.error)} for k, s in enumerate(scores) if s.value is None
        ]
        values = {k: float(s.value) for k, s in enumerate(scores) if s.value is not None}
        self.metrics.failed.inc(len(failed))
        self.metrics.scored.inc(len(values))
        if failed:
            error = (
                f"{len(failed)} of {len(scores)} completions have no score; the first error: "
                f"{failed[0]['error']}"
            )
            scored = [
                {"index": k, "reward": value}
                | ({"feedback": scores[k].feedback} if scores[k].feedback else {})
                for k, value in values.items()
            ]
            raise RequestError(500, error, details={"failed": failed, "scored": scored})
        numbers = list(values.values())
        texts = [score.feedback for score in scores]
        first_parts = scores[0].parts if scores else {}
        names = [name for name in first_parts if all(name in s.parts for s in scores)]
        return RewardsResponse(
            rewards=numbers,
            scores=numbers,
            extra_logs={clean(name): [s.parts[name] for s in scores] for name in names},
            feedback=texts if any(texts) else None,
        )


def parse_query(body: bytes) -> Query:
    """Parse a query. Raises RequestError for any other body."""
    try:
        return Query.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where, problem = ".".join(map(str, first["loc"])), field_problem(first)
        raise RequestError(422, clean(f"{where}: {problem}" if where else problem)) from None


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


def application(service: Service, *, log: Callable[[str], None], greeting: str) -> "FastAPI":
    """The web application. log: receives ``greeting`` at the start, a line when a reward fails, and
    one at the end.
    """
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.batcher.start()
        log(greeting)
        yield
        await service.batcher.close()
        scored, failed = (
            service.metrics.value("answers_total", outcome=outcome)
            for outcome in ("scored", "failed")
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

    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> JSONResponse:
        if error.status >= 500:
            log(f"HTTP {error.status}: {error.error}")
        return JSONResponse({"error": error.error, **error.details}, error.status, error.headers)

    _add_routes(app, service)
    return app


def _add_routes(app: "FastAPI", service: Service) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse, PlainTextResponse
    from prometheus_client import generate_latest

    metrics = service.metrics
    problems: dict[int | str, dict[str, Any]] = {
        code: {"model": Problem, "description": text} for code, text in STATUSES.items()
    }
    not_ready: dict[int | str, dict[str, Any]] = {
        503: {"description": "not ready, with the reason"}
    }
    body = {
        "required": True,
        "content": {"application/json": {"schema": Query.model_json_schema()}},
    }

    @app.post(
        "/get_reward",
        response_model=RewardsResponse,
        responses=problems,
        openapi_extra={"requestBody": body},
    )
    async def get_reward(request: Request) -> JSONResponse:
        started, status = time.monotonic(), 500
        try:
            rewards = await service.rewards(request)
            status = 200
            return JSONResponse(rewards.model_dump(exclude_none=True))
        except RequestError as error:
            status = error.status
            raise
        finally:
            metrics.requests.labels(status).inc()
            metrics.request_seconds.observe(time.monotonic() - started)

    @app.get("/health", summary="Whether the process is alive.")
    async def health() -> Mapping[str, str]:
        return {"status": "alive", "reward": service.reward.name, "version": __version__}

    @app.get("/ready", summary="Whether requests are scored in time.", responses=not_ready)
    async def ready(request: Request) -> JSONResponse:
        reason = await service.batcher.why_not_ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        # the reason may quote errors of the function
        details = {"reason": clean(reason)} if service.has_token(request) else {}
        return JSONResponse({"status": "not ready", **details}, 503)

    @app.get(
        "/metrics",
        summary="Counters for Prometheus.",
        response_class=PlainTextResponse,
        responses={401: problems[401]},
    )
    async def get_metrics(request: Request) -> PlainTextResponse:
        service.check_token(request)
        text = generate_latest(metrics.registry)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def web_server(
    service: Service,
    listener: socket.socket,
    *,
    host: str = "",
    allowed_hosts: Sequence[str] = (),
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
        f"serving {service.reward.name} at http://{address}:{port}/get_reward, {guard}; "
        f"each call scores up to {limits.max_batch} answers that arrive within "
        f"{1000 * limits.max_delay:g} ms"
    )
    return limited_server(
        application(service, log=log, greeting=greeting),
        host=host,
        allowed_hosts=allowed_hosts,
        shutdown_seconds=math.ceil(limits.timeout) + 1,
        head_seconds=min(HEAD_SECONDS, limits.timeout),
    )


def serve(
    service: Service,
    *,
    host: str,
    port: int,
    allowed_hosts: Sequence[str],
    log: Callable[[str], None],
) -> None:
    """Serve until a signal arrives, then answer running requests and end."""
    with open_socket(
        host,
        port,
        has_tokens=service.token is not None,
        danger="other machines could send answers and read their scores",
        fix="add --token-env NAME, or remove --host",
    ) as listener:
        server = web_server(service, listener, host=host, allowed_hosts=allowed_hosts, log=log)
        asyncio.run(server.serve(sockets=[listener]))
