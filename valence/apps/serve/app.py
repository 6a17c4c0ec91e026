"""The web application: a page that collects feedback, and an OpenAI-compatible interface."""
# No postponed annotations here: FastAPI reads them, and its names are known only inside of
# functions.

import asyncio
import json
import math
import re
import secrets
import time
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from itertools import compress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from valence.apps.serve.chat import Answer, ChatModel, ChatPrompt, FinishedTurn, new_id
from valence.apps.serve.feedback import ComparisonResults, FeedbackStore, Winner
from valence.apps.serve.http_server import (
    CLIENT_LEFT,
    Application,
    BodyReader,
    Receive,
    RequestError,
    Send,
    has_token,
    is_json,
)
from valence.apps.serve.prompts import PromptQueue
from valence.errors import UserError, field_problem
from valence.rollouts import Sampling
from valence.rollouts.protocol import MAX_TOKENS
from valence.terminal import print_traceback
from valence.types import Message

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from fastapi.responses import StreamingResponse

T = TypeVar("T")

MAX_BODY = 4_000_000
"""Maximum bytes of a request."""

MAX_BODIES = 8 * MAX_BODY
"""Maximum bytes of all requests that are being read."""
BODY_SECONDS = 60.0
"""Time limit for a client to send a request."""
SURROGATE = re.compile("[\\ud800-\\udfff]")
MAX_DEPTH = 64
"""Maximum levels of lists and objects in a request."""

MAX_REQUESTS = 64
"""Maximum number of running and waiting requests; more are refused."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}

PAGE_FILES = {
    "common.js": "text/javascript",
    "page.js": "text/javascript",
    "page.css": "text/css",
    "review.js": "text/javascript",
    "review.css": "text/css",
}


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_parts(cls, value: Any) -> Any:
        _check_storable(value)
        return value


def _check_storable(value: Any) -> None:
    """Raise ValueError for what a file of JSON lines cannot have."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for part in level for item in _items(part)]
        if not all(map(_is_storable, level)):
            raise ValueError("the body has NaN, Infinity or text that is not valid Unicode")
    if level:
        raise ValueError(f"the body has more than {MAX_DEPTH} levels of lists and objects")


def _items(value: Any) -> Iterable[Any]:
    """The parts of a list, or the names and values of an object."""
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, list) else ()


def _is_storable(value: Any) -> bool:
    """Whether a file of JSON lines can have a value: not NaN, Infinity, or half of a surrogate
    pair.
    """
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, str) or not SURROGATE.search(value)


def _check_content(value: Any) -> Any:
    """A text, a list of parts, or None."""
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return value
    if value is None or isinstance(value, str):
        return value
    raise ValueError("it is not text or a list of parts")


class Turn(BaseModel):
    """A chat message. Other keys, such as tool calls, are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, AfterValidator(_check_content)] = None


Messages = Annotated[list[Turn], Field(min_length=1, max_length=1000)]
Text = Annotated[str, Field(max_length=100_000)]


Tools = Annotated[list[dict[str, Any]], Field(max_length=1000)]


class Ask(Body):
    """A request of the page for an answer, or for two.

    after: id of the answer that the messages follow, with everything before it; empty: they are
    the whole conversation. prompt: number of the prompt that the conversation starts with.
    """

    messages: Messages
    tools: Tools = []
    compare: bool = False
    after: str = ""
    prompt: int | None = None


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
    "logit_bias": {},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "store": False,
    "tool_choice": "auto",
    "top_logprobs": 0,
}
"""Values of fields that change nothing. Other values of these fields are refused."""


class StreamOptions(Body):
    include_usage: bool = False


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class CompletionRequest(Body):
    """The body of `POST /v1/chat/completions`. Unsupported fields are refused."""

    messages: Messages
    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=8)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[list[StopString], Field(max_length=4), BeforeValidator(_as_list)] = []
    logprobs: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    tools: Tools = []
    user: Annotated[str, Field(max_length=1000)] | None = None
    metadata: dict[str, Annotated[str, Field(max_length=1000)]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            name: item
            for name, item in value.items()
            if item is not None and not (name in NEUTRAL and item == NEUTRAL[name])
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


class WebService:
    """A service with raters who open secret links.

    tokens: rater by secret token; a request without one of them is refused. Empty: every client is
    the rater "". log: called with server errors. command: prints the links. destination: message
    about where data are written. recovery: message about how to write them if that failed at the
    end.
    """

    tokens: Mapping[str, str]
    log: Callable[[BaseException], None]
    command: ClassVar[str]
    recovery: ClassVar[str]

    def rater(self, authorization: str) -> str | None:
        """The rater with the bearer token of a request; None for an unknown one."""
        if not self.tokens:
            return ""
        # compare with all of them, so that the duration does not depend on the token
        matches = [rater for token, rater in self.tokens.items() if has_token(authorization, token)]
        return matches[0] if matches else None

    @property
    def token_fix(self) -> str:
        """What a client without a valid token can do."""
        return f"open the link that `{self.command}` printed when it was started last"

    def greeting(self, links: Sequence[tuple[str, str]]) -> list[str]:
        """What is printed when the service starts. links: the raters, and the link of each."""
        lines = [
            (f"{rater}: {link}" if rater else link)
            if rater or len(links) == 1
            else f"results, for you alone: {link}"
            for rater, link in links
        ]
        return [*lines, f"{self.destination}; stop with Ctrl-C"]

    @property
    def destination(self) -> str:
        raise NotImplementedError

    @property
    def summary(self) -> str:
        """A message about the collected data."""
        raise NotImplementedError

    def application(self, lifespan: "Lifespan | None" = None) -> "FastAPI":
        """The web application."""
        raise NotImplementedError

    def close(self) -> None:
        """Write all data, and release the files. Raises UserError."""
        raise NotImplementedError


Lifespan = Callable[[Any], AbstractAsyncContextManager[None]]


@dataclass
class FeedbackService(WebService):
    """The service of `valence collect`.

    rival: a second model to compare answers with; the page then
    shows neither name before a vote. tokens: rater by secret token; without tokens, every client is
    the rater "", who owns the service and may see results. sampling: the default of requests.
    """

    command = "valence collect"
    recovery = "all votes are saved; rerun the same command to write the rows"

    model: ChatModel
    store: FeedbackStore
    sampling: Sampling
    queue: PromptQueue
    rival: ChatModel | None = None
    tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    log: Callable[[BaseException], None] = log_error

    @property
    def models(self) -> tuple[ChatModel, ...]:
        return (self.model,) if self.rival is None else (self.model, self.rival)

    def model_by_name(self, name: str | None) -> ChatModel:
        """The model with this name, or the first one if there is none."""
        return next((model for model in self.models if model.name == name), self.model)

    @property
    def public_names(self) -> list[str]:
        """The names of the models that clients can ask for."""
        return [model.name for model in self.models]

    def public_name(self, model: ChatModel) -> str:
        """The name of a model in responses."""
        return model.name

    def route(self, request: CompletionRequest) -> tuple[ChatModel, Mapping[str, Any]]:
        """The model that answers a request, and columns for the rows of votes on the answer."""
        return self.model_by_name(request.model), {}

    @property
    def results(self) -> ComparisonResults | None:
        """How often each of two models won."""
        if self.rival is None:
            return None
        return self.store.results((self.model.name, self.rival.name))

    @property
    def destination(self) -> str:
        return f"votes are written to {self.store.out}"

    @property
    def summary(self) -> str:
        lines = [self.store.summary]
        return "\n".join([*lines, *([] if self.results is None else [str(self.results)])])

    def application(self, lifespan: Lifespan | None = None) -> "FastAPI":
        return application(self, lifespan=lifespan)

    def request_sampling(self, **changes: Any) -> Sampling:
        """The sampling parameters of one request, with a random seed."""
        changes = {name: value for name, value in changes.items() if value is not None}
        return replace(self.sampling, **{"seed": secrets.randbits(62), **changes})

    async def encode(
        self, messages: Sequence[Message], tools: Tools, model: ChatModel, **options: Any
    ) -> ChatPrompt:
        """The prompt of a request for a model. options: those of ``ChatModel.encode``. Raises
        UserError.
        """
        if model.num_requests >= MAX_REQUESTS:
            raise UserError(
                f"{MAX_REQUESTS} requests are already waiting",
                code="server-busy",
                fix="retry later",
            )
        return await asyncio.to_thread(model.encode, messages, tools, **options)

    async def encode_sides(self, ask: Ask) -> list[tuple[ChatModel, ChatPrompt]]:
        """The models that answer a request of the page, in the order of their answers, each with
        its prompt. Raises KeyError if it follows an unknown answer, and UserError.
        """
        messages = normalized(ask.messages)
        if ask.after:
            earlier = self.store.answer(ask.after)
            messages = [*earlier.prompt, *earlier.messages, *messages]
        info = self.queue.info(ask.prompt)
        models = [self.model] * (2 if ask.compare else 1)
        if self.rival is not None:
            models = list(self.models)
            secrets.SystemRandom().shuffle(models)
        return [
            (model, await self.encode(messages, ask.tools, model, info=info)) for model in models
        ]

    async def stream(
        self,
        model: ChatModel,
        prompt: ChatPrompt,
        sampling: Sampling,
        *,
        id: str = "",
        stops: Sequence[str] = (),
        info: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[str | FinishedTurn | Answer, None]:
        """Yield the parts of ``ChatModel.stream``, of which the answer is stored. info: columns for
        the rows of votes on it.
        """
        async with aclosing(model.stream(prompt, sampling, id=id, stops=stops)) as parts:
            async for part in parts:
                if isinstance(part, Answer):
                    part = replace(part, info=info or {})
                    await asyncio.to_thread(self.store.add, part)
                yield part

    async def answer(
        self, model: ChatModel, prompt: ChatPrompt, sampling: Sampling, **options: Any
    ) -> Answer:
        """Return a complete answer, which is stored. options: those of ``stream``."""
        async with aclosing(self.stream(model, prompt, sampling, **options)) as parts:
            async for part in parts:
                if isinstance(part, Answer):
                    return part
        raise AssertionError("a stream ends with its answer")

    def rate(self, answer: Answer, rater: str, *, correction: str | None, **verdict: Any) -> None:
        """Record a verdict on an answer."""
        model = self.model_by_name(answer.model)
        ids = model.encode_correction(answer, correction) if correction else ()
        self.store.rate(answer, rater, correction=correction, correction_ids=ids, **verdict)

    def compare(self, comparison: Comparison, rater: str) -> list[str]:
        """Record a verdict on two answers. Returns the names of two models in the order of
        their answers, or an empty list if one model gave both answers.

        Raises KeyError for an unknown comparison, and UserError for a changed verdict on two
        models, because the rater has seen their names.
        """
        id_a, _, id_b = comparison.comparison.partition("-")
        a, b = self.store.answer(id_a), self.store.answer(id_b)
        if id_a == id_b or a.key != b.key:
            raise KeyError(comparison.comparison)
        if a.prompt != b.prompt or a.tools != b.tools:
            raise UserError(
                "the answers cannot be compared, because their tools or the texts of their "
                "environments differ",
                code="comparison-unequal",
                where="comparison",
                fix="rate single answers, or make `reset` of the environment deterministic",
            )
        is_blind = a.model != b.model
        if is_blind and self.store.winner(a, b, rater) not in (None, comparison.winner):
            raise UserError(
                "the vote is final, because the names of the models have been shown",
                code="comparison-final",
                where="comparison",
                fix="compare two other answers",
            )
        self.store.compare(a, b, comparison.winner, rater, comment=comparison.comment)
        return [a.model, b.model] if is_blind else []

    def close(self) -> None:
        """Stop answering, write the rows, and release the files. Raises UserError."""
        for model in self.models:
            model.close()
        self.store.close()


def normalized(messages: Sequence[Turn]) -> list[Message]:
    """The messages of a request as chat templates read them. Raises UserError for one that is not
    text.
    """
    return [_normalize(message.model_dump()) for message in messages]


def _normalize(message: Mapping[str, Any]) -> Message:
    """A message with its text as one string, and without keys that are None. The arguments of calls
    are objects.

    Raises UserError for content that is not text.
    """
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
            raise UserError(
                "a message has content that is not text",
                code="content-not-text",
                where="messages",
                fix="send only text",
            )
        content = "".join(map(str, texts))
    role = "system" if message["role"] == "developer" else message["role"]
    fields = {name: value for name, value in message.items() if value is not None}
    if isinstance(calls := fields.get("tool_calls"), list) and calls:
        fields["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        content = content or ""
    return {**fields, "role": role, "content": content}


def _with_parsed_arguments(call: Any) -> Any:
    """A call whose arguments are an object, which OpenAI's API writes as text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
        _check_storable(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class Gate:
    """Refuses requests without a valid token, or with a body that is too large or not JSON, before
    the body is read, and reads the body within limits. Adds the headers of the page to all
    responses.
    """

    def __init__(self, app: Application, service: WebService) -> None:
        self.app, self.service = app, service
        self.bodies = BodyReader(MAX_BODY, MAX_BODIES, BODY_SECONDS)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        names = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        is_open = scope["path"] in ("/", "/health") or scope["path"].startswith("/page/")
        rater = "" if is_open else self.service.rater(names.get("authorization", ""))
        length = names.get("content-length", "0")
        if rater is None:
            response = error_response(
                401,
                f"the token is missing or no longer valid; {self.service.token_fix}",
            )
        elif "transfer-encoding" in names or not length.isdecimal() or int(length) > MAX_BODY:
            response = error_response(413, f"the request has more than {MAX_BODY} bytes")
        elif scope["method"] == "POST" and not is_json(names.get("content-type", "")):
            response = error_response(415, "the body must be application/json")
        else:
            scope["rater"] = rater
            try:
                bodies = [await self.bodies.read(receive)]
            except RequestError as error:
                response = error_response(error.status, error.error)
            else:

                async def receive_again() -> MutableMapping[str, Any]:
                    if bodies:
                        return {"type": "http.request", "body": bodies.pop(), "more_body": False}
                    return await receive()

                await self.app(scope, receive_again, send_with_headers)
                return
        response.headers["connection"] = "close"
        await response(scope, receive, send_with_headers)


def error_response(status: int, message: str, **facts: Any) -> Any:
    """An error in the format of OpenAI's API."""
    from fastapi.responses import JSONResponse

    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": None, **facts}
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": error}, status, headers)


def message_of(error: UserError) -> str:
    """The message of an error for a client."""
    return f"{error.message}; {error.fix}" if error.fix else error.message


STATUS = {
    "file-not-writable": 507,
    "model-not-found": 404,
    "output-line-foreign": 500,
    "sampling-failed": 500,
    "server-busy": 503,
    "server-stopped": 503,
}
"""HTTP status by error code; other errors are caused by the request (400)."""

LOGGED = (500, 507)
"""Statuses of errors that are also printed on the server's terminal."""

DEFECT = "internal server error; the terminal of the server shows the cause"


def application(service: FeedbackService, *, lifespan: Lifespan | None = None) -> "FastAPI":
    """The web application of `valence collect`."""
    app = base_application(
        service, "page.html", " and ".join(model.name for model in service.models), lifespan
    )
    _add_page_requests(app, service)
    add_openai_interface(app, service)
    return app


def base_application(
    service: WebService, page: str | None, name: str, lifespan: Lifespan | None = None
) -> "FastAPI":
    """A web application with a page, which needs no token, and no other routes yet.

    page: file of the page, if there is one. name: of the model or file that the service is about.
    """
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    from valence.version import __version__

    app = FastAPI(
        title="Valence", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    app.add_middleware(Gate, service=service)

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
        message, code = field_problem(first), "field-invalid"
        if first["type"] == "json_invalid":
            message, place = "the body is not JSON", ""
        elif not place and first["type"] == "missing":
            message = "the body is missing"
        elif place in NEUTRAL:
            message = f"the server supports only {json.dumps(NEUTRAL[place])}"
        elif first["type"] == "extra_forbidden":
            message, code = "the server does not support this field", "field-unsupported"
        return error_response(
            400, f"{place}: {message}" if place else message, code=code, param=place or None
        )

    @app.exception_handler(Exception)
    async def defect(_: Request, error: Exception) -> JSONResponse:
        service.log(error)
        return error_response(500, DEFECT)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "alive", "model": name, "version": __version__}

    if page is not None:
        _add_page(app, page)
    return app


def known_rater_parameter() -> Any:
    """The default of a route's parameter that gets the rater of the request."""
    from fastapi import Depends, Request

    def rater_of(request: Request) -> str:
        return request.scope["rater"]

    return Depends(rater_of)


def _answer(service: FeedbackService, id: str) -> Answer:
    """Return an answer. Raises HTTPException with status 404 for an unknown id."""
    from fastapi import HTTPException

    try:
        return service.store.answer(id)
    except KeyError:
        raise HTTPException(404, "unknown answer") from None


def _add_page(app: "FastAPI", name: str) -> None:
    from fastapi import HTTPException
    from fastapi.responses import Response

    folder = files("valence.apps.serve").joinpath("page")

    @app.get("/")
    async def page() -> Response:
        content = folder.joinpath(name).read_bytes()
        return Response(content, media_type="text/html; charset=utf-8")

    @app.get("/page/{name}")
    async def page_file(name: str) -> Response:
        if name not in PAGE_FILES:
            raise HTTPException(404, "file not found")
        content = folder.joinpath(name).read_bytes()
        return Response(content, media_type=PAGE_FILES[name])


def _add_page_requests(app: "FastAPI", service: FeedbackService) -> None:
    """Add the routes for the page."""
    from fastapi import HTTPException
    from fastapi.responses import StreamingResponse

    known_rater = known_rater_parameter()

    @app.get("/api/session")
    async def session(rater: str = known_rater) -> dict[str, Any]:
        return {
            "model": service.model.name if service.rival is None else "",
            "is_blind": service.rival is not None,
            "has_results": service.rival is not None and rater == "",
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
        try:
            sides = await service.encode_sides(ask)
        except KeyError:
            raise HTTPException(404, "unknown answer") from None
        return _stream(service, _page_events(service, sides))

    @app.post("/api/rate")
    def rate(rating: Rating, rater: str = known_rater) -> dict[str, int]:
        service.rate(
            _answer(service, rating.answer), rater, label=rating.label,
            correction=rating.correction, comment=rating.comment, tags=rating.tags,
        )  # fmt: skip
        return {"votes": service.store.num_votes}

    @app.post("/api/compare")
    def compare(comparison: Comparison, rater: str = known_rater) -> dict[str, Any]:
        try:
            models = service.compare(comparison, rater)
        except KeyError:
            raise HTTPException(404, "unknown comparison") from None
        return {"votes": service.store.num_votes, "models": models}

    @app.get("/api/results")
    def results(rater: str = known_rater) -> dict[str, Any]:
        if (results := service.results) is None:
            raise HTTPException(404, "the service does not compare two models")
        if rater:
            raise HTTPException(403, "only the owner of this service can see the results")
        return asdict(results)


def add_openai_interface(app: "FastAPI", service: FeedbackService) -> None:
    """Add the routes of OpenAI's chat completions API, and of feedback on completions."""
    from fastapi import Request
    from fastapi.responses import StreamingResponse

    known_rater = known_rater_parameter()

    @app.get("/v1/models")
    async def models(_: str = known_rater) -> dict[str, Any]:
        fields = {"object": "model", "owned_by": "valence", "created": 0}
        return {"object": "list", "data": [{"id": name} | fields for name in service.public_names]}

    @app.post("/v1/chat/completions", response_model=None)
    async def completions(
        body: CompletionRequest, request: Request, _: str = known_rater
    ) -> StreamingResponse | dict[str, Any]:
        model, info = service.route(body)
        messages = normalized(body.messages)
        prompt = await service.encode(messages, body.tools, model, client_calls=bool(body.tools))
        if prompt.calls_tools and body.stop:
            raise UserError(
                "stop strings are not supported while the server calls tools",
                code="field-unsupported",
                where="stop",
                fix="remove stop",
            )
        sampling = service.request_sampling(
            temperature=body.temperature, top_p=body.top_p, seed=body.seed,
            max_new_tokens=body.max_completion_tokens or body.max_tokens,
        )  # fmt: skip
        samplings = [
            replace(sampling, seed=(sampling.seed + index) % 2**63) for index in range(body.n)
        ]
        options = {"stops": body.stop, "info": info}
        if body.stream:
            return _stream(service, _chunks(service, model, prompt, samplings, body, options))

        async def answer_all() -> list[Answer]:
            work = [service.answer(model, prompt, sampling, **options) for sampling in samplings]
            return await asyncio.gather(*work)

        answers = await _while_connected(request, answer_all())
        return _completion(answers, service.public_name(model), model if body.logprobs else None)

    @app.post("/feedback")
    def feedback(request: FeedbackRequest, rater: str = known_rater) -> dict[str, int]:
        service.rate(
            _answer(service, request.id.removeprefix("chatcmpl-")), request.user or rater,
            label=request.label, score=request.score, correction=request.correction,
            comment=request.comment, tags=request.tags,
        )  # fmt: skip
        return {"votes": service.store.num_votes}


async def _while_connected(request: "Request", work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, and cancel it if the client disconnects."""
    from fastapi import HTTPException

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(CLIENT_LEFT, "the client disconnected")
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()


# Streams of server-sent events


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _stream(service: FeedbackService, events: AsyncGenerator[str, None]) -> "StreamingResponse":
    """A response that streams events. An error after the first event is sent as an event."""
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
        except Exception as error:  # the status has already been sent
            service.log(error)
            yield _event({"error": {"message": DEFECT, "code": None}})

    return StreamingResponse(with_errors(), media_type="text/event-stream")


async def _page_events(
    service: FeedbackService, prompts: Sequence[tuple[ChatModel, ChatPrompt]]
) -> AsyncGenerator[str, None]:
    """Pieces of one or two answers with their side, then the ids for rating them. The content of
    a turn with calls takes the place of its pieces.
    """
    pieces: asyncio.Queue[tuple[str, str | FinishedTurn | Answer | None]] = asyncio.Queue()

    async def answer(side: str, model: ChatModel, prompt: ChatPrompt) -> None:
        try:
            async with aclosing(service.stream(model, prompt, service.request_sampling())) as parts:
                async for part in parts:
                    pieces.put_nowait((side, part))
        finally:
            pieces.put_nowait((side, None))

    sides = dict(zip("ab", prompts, strict=False))
    tasks = {side: asyncio.create_task(answer(side, *sides[side])) for side in sides}
    ids = dict.fromkeys(sides, "")
    try:
        while not all(ids.values()):
            side, part = await pieces.get()
            if part is None:
                await tasks[side]  # raises its error
            elif isinstance(part, Answer):
                ids[side] = part.id
                prompt = sides[side][1].messages
                added = {} if part.prompt == prompt else {"prompt": _last_of_user(part.prompt)}
                yield _event({"side": side, "stop": part.completion.stop, **added})
            elif isinstance(part, FinishedTurn):
                yield _event({"side": side, "turn": _page_turn(part)})
            else:
                yield _event({"side": side, "text": part})
        yield _event({"done": "-".join(ids.values())})
    finally:  # the page may have been closed, or the other answer failed
        for task in tasks.values():
            task.cancel()


def _last_of_user(messages: Sequence[Message]) -> str:
    return next((str(m["content"]) for m in reversed(messages) if m["role"] == "user"), "")


def _page_turn(turn: FinishedTurn) -> dict[str, Any]:
    """What the page shows of a turn: its text, its calls, and the results of the calls in the same
    order, or the answer to a call that could not be read.
    """
    message, *results = turn.messages
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {
        "content": message["content"],
        "calls": [
            {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
            for call in calls
        ],
        "results": [str(result["content"]) for result in results],
    }


FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


def _finish_of(answer: Answer) -> str:
    if answer.has_client_calls:
        return "tool_calls"
    episode = answer.completion.episode
    if episode is not None and episode.end == "turns":
        return "length"
    return FINISH[answer.completion.stop]


def _calls_of(answer: Answer) -> list[dict[str, Any]]:
    """The calls that the client is to make, in the format of OpenAI's API."""
    calls = answer.messages[-1]["tool_calls"] if answer.has_client_calls else ()
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in calls
    ]


def _message_of(answer: Answer) -> dict[str, Any]:
    """The last turn of an answer in the format of OpenAI's API."""
    content, calls = str(answer.messages[-1].get("content") or ""), _calls_of(answer)
    return {
        "role": "assistant",
        "content": content or (None if calls else ""),
        "refusal": None,
        **({"tool_calls": calls} if calls else {}),
    }


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt = len(answers[0].prompt_ids)
    new = sum(len(answer.completion.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _logprobs(answer: Answer, model: ChatModel) -> dict[str, Any]:
    """The log-probability of each sampled token, in the distribution that it was sampled from."""
    completion = answer.completion
    is_sampled = completion.mask or [True] * len(completion.tokens)
    texts = model.token_texts(list(compress(completion.tokens, is_sampled)))
    logps = compress(completion.logps, is_sampled)
    content = [
        {"token": text, "logprob": logp, "bytes": None, "top_logprobs": []}
        for text, logp in zip(texts, logps, strict=True)
    ]
    return {"content": content, "refusal": None}


def _completion(
    answers: Sequence[Answer], name: str, logprobs_of: ChatModel | None
) -> dict[str, Any]:
    """The response of OpenAI's API. Each choice also has an id, for feedback.

    name: of the model. logprobs_of: the model, if the response has log-probabilities.
    """
    return {
        "id": f"chatcmpl-{answers[0].id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": name,
        "choices": [
            {
                "index": index,
                "id": f"chatcmpl-{answer.id}",
                "message": _message_of(answer),
                "logprobs": None if logprobs_of is None else _logprobs(answer, logprobs_of),
                "finish_reason": _finish_of(answer),
            }
            for index, answer in enumerate(answers)
        ],
        "usage": _usage(answers),
    }


def _rest_of(content: str, sent: str) -> str:
    """What a client lacks of the text of a turn with calls, which has no white space around it."""
    sent = sent.lstrip()
    if not content.startswith(sent):
        sent = sent.rstrip()
    return content[len(sent) :] if content.startswith(sent) else ""


async def _chunks(
    service: FeedbackService,
    model: ChatModel,
    prompt: ChatPrompt,
    samplings: Sequence[Sampling],
    body: CompletionRequest,
    options: Mapping[str, Any],
) -> AsyncGenerator[str, None]:
    """The streamed response of OpenAI's API, one choice after the other. The last chunk of a
    choice has its log-probabilities. If the service calls tools, the text of the last turn comes
    at once.
    """
    created, ids = int(time.time()), [new_id() for _ in samplings]
    has_usage, name = body.stream_options.include_usage, service.public_name(model)
    answers: list[Answer] = []

    def chunk(choices: list[dict[str, Any]], **fields: Any) -> str:
        record = {
            "id": f"chatcmpl-{ids[0]}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": name,
            "choices": choices,
        }
        return _event(record | ({"usage": None} if has_usage else {}) | fields)

    def choice(
        index: int,
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> str:
        identity = {"index": index, "id": f"chatcmpl-{ids[index]}"}
        return chunk([{**identity, "delta": delta, "logprobs": logprobs, "finish_reason": finish}])

    for index, sampling in enumerate(samplings):
        yield choice(index, {"role": "assistant", "content": ""})
        sent = ""
        stream = service.stream(model, prompt, sampling, id=ids[index], **options)
        async with aclosing(stream) as parts:
            async for part in parts:
                if isinstance(part, Answer):
                    answers.append(part)
                    logprobs = _logprobs(part, model) if body.logprobs else None
                    message = _message_of(part)
                    if part.turns and (rest := _rest_of(message["content"] or "", sent)):
                        yield choice(index, {"content": rest})
                    if calls := message.get("tool_calls"):
                        numbered = [{"index": i, **call} for i, call in enumerate(calls)]
                        yield choice(index, {"tool_calls": numbered})
                    yield choice(index, {}, _finish_of(part), logprobs)
                elif isinstance(part, str) and not prompt.calls_tools:
                    sent += part
                    yield choice(index, {"content": part})
    if has_usage:
        yield chunk([], usage=_usage(answers))
    yield "data: [DONE]\n\n"
