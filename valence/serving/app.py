"""The web application: a page that collects feedback, and an OpenAI-compatible interface."""
# No postponed annotations here: FastAPI reads them, and its names are known only inside of
# functions.

import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from valence.errors import UserError
from valence.rollouts import Sampling
from valence.serving.chat import Answer, ChatModel
from valence.serving.feedback import FeedbackStore, Winner
from valence.serving.prompts import PromptQueue

if TYPE_CHECKING:
    from fastapi import FastAPI

MAX_BODY = 4_000_000
"""Bytes of a request."""

PAGE_HEADERS = {
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

    def message(self) -> dict[str, Any]:
        """The message with its text in one piece. Raises UserError for other content."""
        content = self.content
        if isinstance(content, list):
            if not all(part.get("type") == "text" for part in content):
                raise UserError(
                    "a message has content that is not text",
                    code="content-not-text",
                    where="messages",
                    fix="send text alone",
                )
            content = "".join(str(part.get("text", "")) for part in content)
        more = {
            name: value for name, value in (self.model_extra or {}).items() if value is not None
        }
        role = "system" if self.role == "developer" else self.role
        return {"role": role, **more, "content": content}


Messages = Annotated[list[Turn], Field(min_length=1, max_length=1000)]
Text = Annotated[str, Field(max_length=100_000)]


class Ask(Body):
    messages: Messages
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


class CompletionRequest(BaseModel):
    """What `POST /v1/chat/completions` reads. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    messages: Messages
    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=8)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    user: str | None = None


class FeedbackRequest(Body):
    """A verdict that an app sends. id: of a completion of this service."""

    id: str
    label: bool | None = None
    score: Annotated[float, Field(allow_inf_nan=False)] | None = None
    correction: Text | None = None
    comment: Text = ""
    tags: list[Annotated[str, Field(max_length=100)]] = Field(default=[], max_length=50)
    user: Annotated[str, Field(max_length=1000)] = ""


@dataclass
class ChatService:
    """What the application serves.

    tokens: rater by secret token; a request without one of them is refused. Empty: anybody is the
    rater "". sampling: how answers are drawn, where a request does not say it. has_page: serve the
    page too.
    """

    model: ChatModel
    store: FeedbackStore
    sampling: Sampling
    queue: PromptQueue
    tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    has_page: bool = True

    def __post_init__(self) -> None:
        self._sides: dict[str, tuple[str, str]] = {}

    def rater(self, authorization: str) -> str | None:
        """The rater with the bearer token of a request; None for an unknown one."""
        if not self.tokens:
            return ""
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        found = None
        for token, rater in self.tokens.items():  # all of them, whichever it is
            if hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
                found = rater
        return found

    def seeded(self, **changes: Any) -> Sampling:
        """The sampling of one request, with a seed of its own."""
        settings = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_new_tokens": self.sampling.max_new_tokens,
            "seed": secrets.randbits(62),
        }
        given = {name: value for name, value in changes.items() if value is not None}
        return Sampling(**{**settings, **given})

    # What the page asks for

    async def ask(self, messages: Sequence[Mapping[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        """Yield pieces of an answer's text, then its id."""
        async for part in self.model.stream(messages, self.seeded()):
            if isinstance(part, Answer):
                self.store.add(part)
                yield {"done": part.id, "stop": part.completion.stop}
            else:
                yield {"text": part}

    async def ask_twice(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield pieces of two answers on the sides a and b, then the comparison's id."""
        answers: list[Answer] = []
        for side in ("a", "b"):
            async for part in self.model.stream(messages, self.seeded()):
                if isinstance(part, Answer):
                    self.store.add(part)
                    answers.append(part)
                else:
                    yield {"side": side, "text": part}
            yield {"side": side, "stop": answers[-1].completion.stop, "answer": answers[-1].id}
        comparison = secrets.token_hex(8)
        self._sides[comparison] = answers[0].id, answers[1].id
        yield {"done": comparison}

    def compare(self, comparison: Comparison, rater: str) -> None:
        """Raises KeyError for an unknown comparison."""
        a, b = self._sides[comparison.comparison]
        self.store.compare(
            self.store.answer(a),
            self.store.answer(b),
            comparison.winner,
            rater,
            comment=comparison.comment,
        )


def application(service: ChatService) -> "FastAPI":
    """The web application of a service."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    from valence.version import __version__

    app = FastAPI(title="Valence", version=__version__, docs_url=None, redoc_url=None)

    @app.middleware("http")
    async def limit_body(request: Request, call_next: Any) -> Any:
        length = request.headers.get("content-length", "0")
        is_chunked = "transfer-encoding" in request.headers
        if is_chunked or not length.isdecimal() or int(length) > MAX_BODY:
            return JSONResponse({"error": {"message": f"at most {MAX_BODY} bytes"}}, 413)
        return await call_next(request)

    @app.exception_handler(UserError)
    async def user_error(_: Request, error: UserError) -> JSONResponse:
        fix = f"; {error.fix}" if error.fix else ""
        message = {"message": f"{error.what}{fix}", "code": error.code, "type": "invalid_request"}
        return JSONResponse({"error": message}, 400)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "alive", "model": service.model.name, "version": __version__}

    if service.has_page:
        _add_page(app)
        _add_page_requests(app, service)
    _add_openai_interface(app, service)
    return app


def _rater(service: ChatService) -> Any:
    """What a route takes as its rater: refuses a request without a known token."""
    from fastapi import Depends, HTTPException, Request

    def rater_of(request: Request) -> str:
        rater = service.rater(request.headers.get("authorization", ""))
        if rater is None:
            raise HTTPException(401, "open the link that `valence` has printed, with its token")
        return rater

    return Depends(rater_of)


def _answer(service: ChatService, id: str) -> Answer:
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
        return Response(content, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    @app.get("/page/{name}")
    async def page_file(name: str) -> Response:
        if name not in PAGE_FILES:
            raise HTTPException(404)
        content = folder.joinpath(name).read_bytes()
        return Response(content, media_type=PAGE_FILES[name], headers=PAGE_HEADERS)


def _add_page_requests(app: "FastAPI", service: ChatService) -> None:
    """What the page sends."""
    from fastapi import HTTPException
    from fastapi.responses import StreamingResponse

    known_rater = _rater(service)

    @app.get("/api/session")
    async def session(rater: str = known_rater) -> dict[str, Any]:
        return {
            "model": service.model.name,
            "rater": rater,
            "prompts": len(service.queue.prompts),
            "votes": service.store.num_votes,
        }

    @app.post("/api/next-prompt")
    async def next_prompt(request: NextPrompt, rater: str = known_rater) -> dict[str, Any]:
        following = service.queue.next(rater, request.skip)
        total = len(service.queue.prompts)
        if following is None:
            return {"number": total, "total": total, "messages": None}
        number, messages = following
        return {"number": number, "total": total, "messages": [dict(m) for m in messages]}

    @app.post("/api/answer")
    async def answer(ask: Ask, _: str = known_rater) -> StreamingResponse:
        messages = [turn.message() for turn in ask.messages]
        service.model.encode(messages)  # what cannot be answered is refused with a status
        events = service.ask_twice(messages) if ask.compare else service.ask(messages)
        return StreamingResponse(_events(events), media_type="text/event-stream")

    @app.post("/api/rate")
    def rate(rating: Rating, rater: str = known_rater) -> dict[str, int]:
        service.store.rate(
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


def _add_openai_interface(app: "FastAPI", service: ChatService) -> None:
    """OpenAI's chat completions, and feedback on them."""
    from fastapi import HTTPException
    from fastapi.responses import StreamingResponse

    known_rater = _rater(service)

    @app.get("/v1/models")
    async def models(_: str = known_rater) -> dict[str, Any]:
        model = {"id": service.model.name, "object": "model", "owned_by": "valence", "created": 0}
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions", response_model=None)
    async def completions(
        request: CompletionRequest, _: str = known_rater
    ) -> StreamingResponse | dict[str, Any]:
        messages = [turn.message() for turn in request.messages]
        tools = request.tools or []
        service.model.encode(messages, tools)
        sampling = service.seeded(
            temperature=request.temperature, top_p=request.top_p, seed=request.seed,
            max_new_tokens=request.max_completion_tokens or request.max_tokens,
        )  # fmt: skip
        if request.stream:
            if request.n > 1:
                raise HTTPException(400, "n must be 1 with stream")
            chunks = _chunks(service, messages, tools, sampling)
            return StreamingResponse(chunks, media_type="text/event-stream")
        answers = [
            await service.model.answer(messages, _other_seed(sampling, index), tools)
            for index in range(request.n)
        ]
        for each in answers:
            service.store.add(each)
        return _completion(answers)

    @app.post("/feedback")
    def feedback(request: FeedbackRequest, rater: str = known_rater) -> dict[str, int]:
        service.store.rate(
            _answer(service, request.id.removeprefix("chatcmpl-")), request.user or rater,
            label=request.label, score=request.score, correction=request.correction,
            comment=request.comment, tags=request.tags,
        )  # fmt: skip
        return {"votes": service.store.num_votes}


def _other_seed(sampling: Sampling, index: int) -> Sampling:
    """The sampling of one of several completions."""
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        seed=(sampling.seed + index) % 2**63,
    )


async def _events(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Server-sent events. An error after the first one is an event too."""
    try:
        async for event in events:
            yield f"data: {json.dumps(event)}\n\n"
    except UserError as error:
        yield f"data: {json.dumps({'error': error.what})}\n\n"


FINISH = {"eos": "stop", "length": "length"}


def _completion(answers: Sequence[Answer]) -> dict[str, Any]:
    """The response of OpenAI's interface. Its choices have ids of their own, for feedback."""
    first = answers[0]
    prompt, new = len(first.prompt_ids), sum(len(each.completion.tokens) for each in answers)
    return {
        "id": f"chatcmpl-{first.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": first.model,
        "choices": [
            {
                "index": index,
                "id": f"chatcmpl-{each.id}",
                "message": {"role": "assistant", "content": each.completion.text},
                "finish_reason": FINISH.get(each.completion.stop, "stop"),
            }
            for index, each in enumerate(answers)
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
        },
    }


async def _chunks(
    service: ChatService,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    sampling: Sampling,
) -> AsyncIterator[str]:
    """The streamed response of OpenAI's interface."""
    created = int(time.time())
    id = ""

    def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
        record = {
            "id": id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": service.model.name,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }
        return f"data: {json.dumps(record)}\n\n"

    answer_id = secrets.token_hex(8)
    id = f"chatcmpl-{answer_id}"
    yield chunk({"role": "assistant", "content": ""})
    try:
        async for part in service.model.stream(messages, sampling, tools, id=answer_id):
            if isinstance(part, Answer):
                service.store.add(part)
                yield chunk({}, FINISH.get(part.completion.stop, "stop"))
            else:
                yield chunk({"content": part})
    except UserError as error:
        yield f"data: {json.dumps({'error': {'message': error.what}})}\n\n"
    yield "data: [DONE]\n\n"
