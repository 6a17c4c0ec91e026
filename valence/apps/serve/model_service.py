"""The service of `valence serve`: one run, or an A/B test of two, for apps instead of raters."""
# No postponed annotations here, as in `app`.

import time
from collections.abc import AsyncGenerator, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from valence.apps.serve.app import (
    CompletionRequest,
    FeedbackService,
    Lifespan,
    Turn,
    add_openai_interface,
    base_application,
    known_rater_parameter,
)
from valence.apps.serve.chat import Answer, ChatModel, ChatPrompt, FinishedTurn
from valence.apps.serve.experiment import SIDES, Assignment, Experiment, ServedRun
from valence.apps.serve.feedback import hash_name
from valence.apps.serve.http_server import Application, Receive, Send
from valence.errors import UserError
from valence.rollouts import Sampling
from valence.types import content_id

if TYPE_CHECKING:
    from fastapi import FastAPI

BLIND_NAME = "valence"
"""The name of both runs of an A/B test."""

BUCKETS = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the histogram of durations, in seconds."""

PATHS = ("/v1/chat/completions", "/v1/models", "/feedback", "/ab", "/metrics", "/health")
"""Paths that are counted by name."""


class ServiceMetrics:
    """Prometheus metrics of a service, in a separate registry."""

    def __init__(self, models: Sequence[ChatModel]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        prefix, to = "valence_serve_", self.registry
        self.requests = Counter(f"{prefix}requests", "requests", ["path", "status"], registry=to)
        self.seconds = Histogram(
            f"{prefix}request_seconds",
            "duration of a request for completions",
            buckets=BUCKETS,
            registry=to,
        )
        self.completions = Counter(
            f"{prefix}completions", "completions", ["side", "stop"], registry=to
        )
        self.tokens = Counter(f"{prefix}tokens", "tokens of completions", ["side"], registry=to)
        self.prompt_tokens = Counter(
            f"{prefix}prompt_tokens", "tokens of prompts", ["side"], registry=to
        )
        self.votes = Counter(
            f"{prefix}feedback", "votes: up, down, or other", ["label"], registry=to
        )
        running = Gauge(f"{prefix}requests_in_progress", "completions that clients wait for",
                        ["side"], registry=to)  # fmt: skip
        for side, model in zip(SIDES, models, strict=False):
            running.labels(side).set_function(lambda model=model: model.num_requests)

    def count(self, side: str, answer: Answer) -> None:
        self.completions.labels(side, answer.completion.stop).inc()
        self.tokens.labels(side).inc(len(answer.completion.tokens))
        self.prompt_tokens.labels(side).inc(len(answer.prompt_ids))

    def text(self) -> bytes:
        """All metrics in the text format 0.0.4."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


class RequestCounter:
    """Counts requests by path and status, and measures those for completions."""

    def __init__(self, app: Application, metrics: ServiceMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in PATHS else "other"
        start, status = time.monotonic(), 500

        async def send_and_note(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            self.metrics.requests.labels(path, status).inc()
            if path == "/v1/chat/completions":
                self.metrics.seconds.observe(time.monotonic() - start)


@dataclass
class ModelService(FeedbackService):
    """The service of `valence serve`.

    runs: the run of each model. experiment: an A/B test of two models; clients see neither name.
    """

    command = "valence serve"

    runs: Sequence[ServedRun] = ()
    experiment: Experiment | None = None
    metrics: ServiceMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = ServiceMetrics(self.models)

    @property
    def public_names(self) -> list[str]:
        return [self.public_name(self.model)]

    def public_name(self, model: ChatModel) -> str:
        return model.name if self.experiment is None else BLIND_NAME

    @property
    def token_fix(self) -> str:
        return "send the server's token as `Authorization: Bearer TOKEN`"

    def greeting(self, links: Sequence[tuple[str, str]]) -> list[str]:
        base = links[0][1].partition("#")[0]
        names = " and ".join(f"{run.run} (step {run.step})" for run in self.runs)
        guard = "with a token" if self.tokens else "without a token, for this machine only"
        plan = None if self.experiment is None else self.experiment.plan
        share = "" if plan is None else f"; {plan.share:.0%} of users get the second one"
        return [
            f"serving {names} at {base}v1 as {self.public_names[0]}, {guard}{share}",
            f"{self.destination}; stop with Ctrl-C",
        ]

    @property
    def destination(self) -> str:
        return f"feedback is written to {self.store.out}"

    @property
    def summary(self) -> str:
        lines = [self.store.summary]
        return "\n".join([*lines, *([] if self.verdict is None else [self.verdict])])

    @property
    def verdict(self) -> str | None:
        return None if self.experiment is None else self.experiment.result.verdict

    def route(self, request: CompletionRequest) -> tuple[ChatModel, Mapping[str, Any]]:
        """The model of the request's user or conversation. Raises UserError for an unknown name."""
        if request.model not in (None, BLIND_NAME, *self.public_names):
            raise UserError(
                f"there is no model {request.model!r}",
                code="model-not-found",
                where="model",
                fix=f"use {self.public_names[0]!r}",
            )
        info: dict[str, Any] = {}
        index = 0
        if self.experiment is not None:
            assignment = self.experiment.plan.assign(unit_of(request))
            index = assignment.index
            info = {"test": assignment.test, "unit": assignment.unit, "side": assignment.side}
        run = self.runs[index]
        return self.models[index], {**info, "run": run.run, "step": run.step}

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
        parts = super().stream(model, prompt, sampling, id=id, stops=stops, info=info)
        async with aclosing(parts):
            async for part in parts:
                if isinstance(part, Answer):
                    self.metrics.count(SIDES[self.models.index(model)], part)
                yield part

    def rate(self, answer: Answer, rater: str, *, correction: str | None, **verdict: Any) -> None:
        label: bool | None = verdict["label"]
        super().rate(answer, rater, correction=correction, **verdict)
        if self.experiment is not None and "test" in answer.info:
            assignment = Assignment(*(answer.info[name] for name in ("test", "unit", "side")))
            self.experiment.vote(assignment, answer.id, hash_name(rater), label)
        self.metrics.votes.labels({True: "up", False: "down", None: "other"}[label]).inc()

    def application(self, lifespan: Lifespan | None = None) -> "FastAPI":
        return application(self, lifespan=lifespan)

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self.experiment is not None:
                self.experiment.close()


def unit_of(request: CompletionRequest) -> str:
    """Identifies who asks: the user, or else the conversation.

    Without `user` and `metadata.conversation_id`, the conversation is identified by its messages up
    to the first one of the user.
    """
    if request.user:
        return f"user/{request.user}"
    if conversation := (request.metadata or {}).get("conversation_id"):
        return f"conversation/{conversation}"
    return f"messages/{content_id(*map(_plain, _opening(request.messages)))}"


def _opening(messages: Sequence[Turn]) -> list[Turn]:
    """The messages up to the first one of the user."""
    roles = [message.role for message in messages]
    end = roles.index("user") + 1 if "user" in roles else len(roles)
    return list(messages[:end])


def _plain(message: Turn) -> dict[str, Any]:
    return message.model_dump(exclude_none=True)


def application(service: ModelService, *, lifespan: Lifespan | None = None) -> "FastAPI":
    """The web application of `valence serve`."""
    from fastapi import HTTPException
    from fastapi.responses import PlainTextResponse

    app = base_application(service, None, service.public_names[0], lifespan)
    app.add_middleware(RequestCounter, metrics=service.metrics)
    add_openai_interface(app, service)
    known_rater = known_rater_parameter()

    @app.get("/metrics")
    async def metrics(_: str = known_rater) -> PlainTextResponse:
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/ab")
    def ab(_: str = known_rater) -> dict[str, Any]:
        if service.experiment is None:
            raise HTTPException(
                404, "this server has no A/B test; start `valence serve` with two runs"
            )
        return service.experiment.result.to_dict()

    return app
