"""The web application: a page that collects feedback, and an OpenAI-compatible interface."""
# No postponed annotations here: FastAPI reads them, and its names are known only inside of
# functions.

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from valence.errors import UserError
from valence.jobs.row_job import as_line
from valence.rewards.http_limits import Application, Receive, Send
from valence.rollouts import Sampling
from valence.serving.chat import Answer, ChatModel, ChatPrompt, new_id
from valence.serving.feedback import FeedbackStore, Winner
from valence.serving.prompts import PromptQueue
from valence.terminal import print_traceback
from valence.types import Message

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from fastapi.responses import StreamingResponse

T = TypeVar("T")

MAX_BODY = 4_000_000
"""Bytes of a request."""

MAX_REQUESTS = 64
"""Requests that are answered or wait for it; more are refused."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}

PAGE_FILES = {"page.js": "text/javascript", "page.css": "text/css"}


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Turn(BaseModel):
    """A chat message. Other keys, such as tool calls, are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


Messages = Annotated[list[Turn], Field(min_length=1, max_length=1000)]
Text = Annotated[str, Field(max_length=100_000)]


Tools = Annotated[list[dict[str, Any]], Field(max_length=1000)]


class Ask(Body):
    messages: Messages
    tools: Tools = []
    compare: bool = False


class NextPrompt(Body):
    """skip: number of the prompt that the rater does not want to rate."""

    skip: int | None = None


class Rating(Body):
    """A verdict on one answer; without any, the earlier one is withdrawn."""

    answer: str
    label: bool | None = None
    correction: Text | None = None
    comment: Text = ""
    tags: list[Annotated[str, Field(max_length=100)]] = Field(default=[], max_length=50)


class Comparison(Body):
    """A verdict on two answers, by the sides on which they were shown."""

    comparison: str
    winner: Winner | None
    comment: Text = ""


NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logprobs": False,
    "store": False,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
}
"""Values of fields that change nothing. Other values of these fields are refused."""


class StreamOptions(Body):
    include_usage: bool = False


class CompletionRequest(Body):
    """What `POST /v1/chat/completions` reads. Fields that it cannot honour are refused."""

    messages: Messages
    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=8)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    tools: Tools = []
    user: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            name: each
            for name, each in value.items()
            if each is not None and not (name in NEUTRAL and each == NEUTRAL[name])
        }


class FeedbackRequest(Body):
    """A verdict that an app sends. id: of a completion of this service."""

    id: str
    label: bool | None = None
    score: Annotated[float, Field(allow_inf_nan=False)] | None = None
    correction: Text | None = None
    comment: Text = ""
    tags: list[Annotated[str, Field(max_length=100)]] = Field(default=[], max_length=50)
    user: Annotated[str, Field(max_length=1000)] = ""


def log_error(error: BaseException) -> None:
    """Print an error with its traceback on the terminal."""
    print_traceback(type(error), error, error.__traceback__)


@dataclass
class FeedbackService:
    """What the application serves.

    tokens: rater by secret token; a request without one of them is refused. Empty: anybody is the
    rater "". sampling: how answers are drawn, where a request does not say it. log: called with
    errors that the client is not to blame for.
    """

    model: ChatModel
    store: FeedbackStore
    sampling: Sampling
    queue: PromptQueue
    tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    log: Callable[[BaseException], None] = log_error

    def rater(self, authorization: str) -> str | None:
        """The rater with the bearer token of a request; None for an unknown one."""
        if not self.tokens:
            return ""
        scheme, _, credentials = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        result = None
        for token, rater in self.tokens.items():  # all of them, whichever it is
            if hmac.compare_digest(credentials.encode("utf-8", "replace"), token.encode()):
                result = rater
        return result

    def request_sampling(self, **changes: Any) -> Sampling:
        """The sampling of one request, with a seed of its own."""
        changes = {name: value for name, value in changes.items() if value is not None}
        return replace(self.sampling, **{"seed": secrets.randbits(62), **changes})

    async def encode(self, messages: Sequence[Turn], tools: Tools) -> ChatPrompt:
        """The prompt that the turns of a request make. Raises UserError."""
        if self.model.num_requests >= MAX_REQUESTS:
            raise UserError(
                f"{MAX_REQUESTS} requests wait already", code="server-busy", fix="ask again later"
            )
        turns = [_normalize(turn.model_dump()) for turn in messages]
        _check_storable([*turns, *tools])
        return await asyncio.to_thread(self.model.encode, turns, tools)

    async def stream(
        self, prompt: ChatPrompt, sampling: Sampling, *, id: str = ""
    ) -> AsyncGenerator[str | Answer, None]:
        """Yield the pieces of an answer's text; then keep the answer, and yield it."""
        async with aclosing(self.model.stream(prompt, sampling, id=id)) as parts:
            async for part in parts:
                if isinstance(part, Answer):
                    await asyncio.to_thread(self.store.add, part)
                yield part

    async def answer(self, prompt: ChatPrompt, sampling: Sampling) -> Answer:
        """Return a whole answer, which is kept."""
        answer = await self.model.answer(prompt, sampling)
        await asyncio.to_thread(self.store.add, answer)
        return answer

    def rate(self, answer: Answer, rater: str, *, correction: str | None, **verdict: Any) -> None:
        """Record a verdict on an answer."""
        ids = self.model.encode_correction(answer, correction) if correction else ()
        self.store.rate(answer, rater, correction=correction, correction_ids=ids, **verdict)

    def compare(self, comparison: Comparison, rater: str) -> None:
        """Record a verdict on two answers. Raises KeyError for an unknown comparison."""
        id_a, _, id_b = comparison.comparison.partition("-")
        a, b = self.store.answer(id_a), self.store.answer(id_b)
        if id_a == id_b or a.prompt_ids != b.prompt_ids or a.prompt != b.prompt:
            raise KeyError(comparison.comparison)
        self.store.compare(a, b, comparison.winner, rater, comment=comparison.comment)

    def close(self) -> None:
        """Stop answering, write the rows, and release the files. Raises UserError."""
        self.model.close()
        self.store.close()


def _normalize(message: Mapping[str, Any]) -> Message:
    """A message with its text in one piece, and without keys that are None.

    Raises UserError for content that is not text.
    """
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise UserError(
                "a message has content that is not text",
                code="content-not-text",
                where="messages",
                fix="send text alone",
            )
        content = "".join(str(part.get("text", "")) for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    others = {name: value for name, value in message.items() if value is not None}
    return {**others, "role": role, "content": content}


def _check_storable(parts: Sequence[Message]) -> None:
    """Raises UserError for what JSON allows in a request, and cannot hold in a file."""
    try:
        as_line({"parts": parts}).encode()
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"the messages hold something that cannot be stored ({error})",
            code="row-not-json",
            where="messages",
            fix="remove it",
        ) from error


class Gate:
    """Refuses requests without a known token, or whose body is too large or not JSON, before the
    body is read. All responses get the headers of the page.

    A web page cannot send JSON to another site without asking it first, which is refused.
    """

    def __init__(self, app: Application, service: FeedbackService) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        names = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        is_open = scope["path"] in ("/", "/health") or scope["path"].startswith("/page/")
        rater = "" if is_open else self.service.rater(names.get("authorization", ""))
        length = names.get("content-length", "0")
        kind = names.get("content-type", "").partition(";")[0].strip().lower()
        if rater is None:
            response = error_response(
                401,
                "the token is missing or not valid any more; open the link that "
                "`valence collect` printed when it was started last",
            )
        elif "transfer-encoding" in names or not length.isdecimal() or int(length) > MAX_BODY:
            response = error_response(413, f"the request has more than {MAX_BODY} bytes")
        elif scope["method"] == "POST" and kind != "application/json":
            response = error_response(415, "the body must be application/json")
        else:
            scope["rater"] = rater
            await self.app(scope, receive, send_with_headers)
            return
        response.headers["connection"] = "close"
        await response(scope, receive, send_with_headers)


def error_response(status: int, message: str, **facts: Any) -> Any:
    """An error in the form of OpenAI's interface."""
    from fastapi.responses import JSONResponse

    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": None, **facts}
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": error}, status, headers)


def message_of(error: UserError) -> str:
    """What a client is told."""
    return f"{error.what}; {error.fix}" if error.fix else error.what


STATUS = {
    "file-not-writable": 507,
    "output-line-foreign": 500,
    "sampling-failed": 500,
    "server-busy": 503,
    "server-stopped": 503,
}
"""By the code of an error; the others are mistakes in the request."""

LOGGED = (500, 507)
"""Statuses of errors that whoever runs the server must know of."""

DEFECT = "the server failed; its terminal shows why"


def application(
    service: FeedbackService,
    *,
    lifespan: Callable[[Any], AbstractAsyncContextManager[None]] | None = None,
) -> "FastAPI":
    """The web application of a service."""
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    from valence.version import __version__

    app = FastAPI(
        title="Valence", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    app.add_middleware(Gate, service=service)  # pyright: ignore[reportArgumentType]

    @app.exception_handler(UserError)
    async def user_error(_: Request, error: UserError) -> JSONResponse:
        status = STATUS.get(error.code, 400)
        if status in LOGGED:
            service.log(error)
        return error_response(status, message_of(error), code=error.code, param=error.where)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return error_response(error.status_code, str(error.detail))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][1:]))
        return error_response(
            422, f"{place}: {first['msg']}" if place else first["msg"], param=place
        )

    @app.exception_handler(Exception)
    async def defect(_: Request, error: Exception) -> JSONResponse:
        service.log(error)
        return error_response(500, DEFECT)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "alive", "model": service.model.name, "version": __version__}

    _add_page(app)
    _add_page_requests(app, service)
    _add_openai_interface(app, service)
    return app


def _rater() -> Any:
    """What a route takes as its rater."""
    from fastapi import Depends, Request

    def rater_of(request: Request) -> str:
        return request.scope["rater"]

    return Depends(rater_of)


def _answer(service: FeedbackService, id: str) -> Answer:
    """Raises HTTPException with status 404 for an unknown answer."""
    from fastapi import HTTPException

    try:
        return service.store.answer(id)
    except KeyError:
        raise HTTPException(404, "there is no such answer") from None


def _add_page(app: "FastAPI") -> None:
    from fastapi import HTTPException
    from fastapi.responses import Response

    folder = files("valence.serving").joinpath("page")

    @app.get("/")
    async def page() -> Response:
        content = folder.joinpath("page.html").read_bytes()
        return Response(content, media_type="text/html; charset=utf-8")

    @app.get("/page/{name}")
    async def page_file(name: str) -> Response:
        if name not in PAGE_FILES:
            raise HTTPException(404, "there is no such file")
        content = folder.joinpath(name).read_bytes()
        return Response(content, media_type=PAGE_FILES[name])


def _add_page_requests(app: "FastAPI", service: FeedbackService) -> None:
    """What the page sends."""
    from fastapi import HTTPException
    from fastapi.responses import StreamingResponse

    known_rater = _rater()

    @app.get("/api/session")
    async def session(rater: str = known_rater) -> dict[str, Any]:
        return {
            "model": service.model.name,
            "rater": rater,
            "prompts": len(service.queue.prompts),
            "votes": service.store.num_votes,
        }

    @app.post("/api/next-prompt")
    def next_prompt(request: NextPrompt, rater: str = known_rater) -> dict[str, Any]:
        following = service.queue.next(rater, service.store.has_voted, skip=request.skip)
        total = len(service.queue.prompts)
        if following is None:
            return {"number": total, "total": total, "messages": None, "tools": []}
        number, chat = following
        return {
            "number": number,
            "total": total,
            "messages": [dict(message) for message in chat.messages],
            "tools": [dict(tool) for tool in chat.tools],
        }

    @app.post("/api/answer")
    async def answer(ask: Ask, _: str = known_rater) -> StreamingResponse:
        prompt = await service.encode(ask.messages, ask.tools)
        sides = ("a", "b") if ask.compare else ("a",)
        return _stream(service, _page_events(service, prompt, sides))

    @app.post("/api/rate")
    def rate(rating: Rating, rater: str = known_rater) -> dict[str, int]:
        service.rate(
            _answer(service, rating.answer), rater, label=rating.label,
            correction=rating.correction, comment=rating.comment, tags=rating.tags,
        )  # fmt: skip
        return {"votes": service.store.num_votes}

    @app.post("/api/compare")
    def compare(comparison: Comparison, rater: str = known_rater) -> dict[str, int]:
        try:
            service.compare(comparison, rater)
        except KeyError:
            raise HTTPException(404, "there is no such comparison") from None
        return {"votes": service.store.num_votes}


def _add_openai_interface(app: "FastAPI", service: FeedbackService) -> None:
    """OpenAI's chat completions, and feedback on them."""
    from fastapi import Request
    from fastapi.responses import StreamingResponse

    known_rater = _rater()

    @app.get("/v1/models")
    async def models(_: str = known_rater) -> dict[str, Any]:
        model = {"id": service.model.name, "object": "model", "owned_by": "valence", "created": 0}
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions", response_model=None)
    async def completions(
        body: CompletionRequest, request: Request, _: str = known_rater
    ) -> StreamingResponse | dict[str, Any]:
        prompt = await service.encode(body.messages, body.tools)
        sampling = service.request_sampling(
            temperature=body.temperature, top_p=body.top_p, seed=body.seed,
            max_new_tokens=body.max_completion_tokens or body.max_tokens,
        )  # fmt: skip
        samplings = [
            replace(sampling, seed=(sampling.seed + index) % 2**63) for index in range(body.n)
        ]
        if body.stream:
            has_usage = body.stream_options.include_usage
            return _stream(service, _chunks(service, prompt, samplings, has_usage=has_usage))

        async def answer_all() -> list[Answer]:
            return [await service.answer(prompt, each) for each in samplings]

        return _completion(await _while_connected(request, answer_all()))

    @app.post("/feedback")
    def feedback(request: FeedbackRequest, rater: str = known_rater) -> dict[str, int]:
        service.rate(
            _answer(service, request.id.removeprefix("chatcmpl-")), request.user or rater,
            label=request.label, score=request.score, correction=request.correction,
            comment=request.comment, tags=request.tags,
        )  # fmt: skip
        return {"votes": service.store.num_votes}


async def _while_connected(request: "Request", work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is cancelled when the client leaves."""
    from fastapi import HTTPException

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(499, "the client left")
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()


# Streams of server-sent events


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _stream(service: FeedbackService, events: AsyncGenerator[str, None]) -> "StreamingResponse":
    """The response with some events. An error after the first one is an event too."""
    from fastapi.responses import StreamingResponse

    async def with_errors() -> AsyncGenerator[str, None]:
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        except UserError as error:
            if STATUS.get(error.code) in LOGGED:
                service.log(error)
            yield _event({"error": {"message": message_of(error), "code": error.code}})
        except Exception as error:  # the status is sent already; the client must learn of it
            service.log(error)
            yield _event({"error": {"message": DEFECT, "code": None}})

    return StreamingResponse(with_errors(), media_type="text/event-stream")


async def _page_events(
    service: FeedbackService, prompt: ChatPrompt, sides: Sequence[str]
) -> AsyncGenerator[str, None]:
    """Pieces of one or two answers, each with its side, and what they are rated by."""
    ids: list[str] = []
    for side in sides:
        async with aclosing(service.stream(prompt, service.request_sampling())) as parts:
            async for part in parts:
                if isinstance(part, Answer):
                    ids.append(part.id)
                    yield _event({"side": side, "stop": part.completion.stop})
                else:
                    yield _event({"side": side, "text": part})
    yield _event({"done": "-".join(ids)})


FINISH = {"eos": "stop", "length": "length"}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt = len(answers[0].prompt_ids)
    new = sum(len(each.completion.tokens) for each in answers)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _completion(answers: Sequence[Answer]) -> dict[str, Any]:
    """The response of OpenAI's interface. Its choices have ids of their own, for feedback."""
    return {
        "id": f"chatcmpl-{answers[0].id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": answers[0].model,
        "choices": [
            {
                "index": index,
                "id": f"chatcmpl-{each.id}",
                "message": {
                    "role": "assistant",
                    "content": each.completion.text,
                    "refusal": None,
                },
                "logprobs": None,
                "finish_reason": FINISH[each.completion.stop],
            }
            for index, each in enumerate(answers)
        ],
        "usage": _usage(answers),
    }


async def _chunks(
    service: FeedbackService, prompt: ChatPrompt, samplings: Sequence[Sampling], *, has_usage: bool
) -> AsyncGenerator[str, None]:
    """The streamed response of OpenAI's interface, one choice after the other."""
    created, ids = int(time.time()), [new_id() for _ in samplings]
    answers: list[Answer] = []

    def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
        record = {
            "id": f"chatcmpl-{ids[0]}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": service.model.name,
            "choices": choices,
        }
        return _event(record | ({"usage": None} if has_usage else {}) | more)

    def choice(index: int, delta: dict[str, Any], finish: str | None = None) -> str:
        place = {"index": index, "id": f"chatcmpl-{ids[index]}"}
        return chunk([{**place, "delta": delta, "logprobs": None, "finish_reason": finish}])

    for index, sampling in enumerate(samplings):
        yield choice(index, {"role": "assistant", "content": ""})
        async with aclosing(service.stream(prompt, sampling, id=ids[index])) as parts:
            async for part in parts:
                if isinstance(part, Answer):
                    answers.append(part)
                    yield choice(index, {}, FINISH[part.completion.stop])
                else:
                    yield choice(index, {"content": part})
    if has_usage:
        yield chunk([], usage=_usage(answers))
    yield "data: [DONE]\n\n"
