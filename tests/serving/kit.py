"""A service with a tiny chat model, and answers of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import httpx
import torch
from torch import Tensor

from tests.tiny import CHATML, CHATML_TOOLS, tiny_tokenizer
from tests.tiny_models import tiny
from valence.apps.serve.app import FeedbackService, application
from valence.apps.serve.chat import Answer, ChatModel
from valence.apps.serve.feedback import FeedbackStore
from valence.apps.serve.http_server import RequestGuard, host_names
from valence.apps.serve.prompts import PromptQueue
from valence.distributed.process_group import SingleProcess
from valence.rollouts import Sampling
from valence.training.open_run import open_run
from valence.training.trainer import Trainer

T = TypeVar("T")
TOKENS = {"token-of-anna": "anna", "token-of-ben": "ben"}
SAMPLING = Sampling(max_new_tokens=8, seed=3)
HELLO = [{"role": "user", "content": "hello"}]


def save_model(
    folder: Path, *, template: str | None = CHATML, kind: str = "llama", **changes: Any
) -> Path:
    """Write a tiny model and its tokenizer."""
    tokenizer = tiny_tokenizer(template)
    model = tiny(kind, vocab_size=len(tokenizer), layers=1, dtype=torch.float32, **changes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@cache
def saved_model() -> TemporaryDirectory[str]:
    """A folder with a tiny chat model, until this process ends."""
    folder = TemporaryDirectory()
    save_model(Path(folder.name))
    return folder


def open_trainer() -> Trainer:
    return open_run(saved_model().name, ["data.max_length=256"], group=SingleProcess())


trainer = cache(open_trainer)


@cache
def tool_trainer() -> Trainer:
    """One whose chat template prints tools."""
    with TemporaryDirectory() as folder:
        save_model(Path(folder), template=CHATML_TOOLS)
        return open_run(folder, ["data.max_length=1024"], group=SingleProcess())


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(limited())


@contextmanager
def hooked_forward(hook: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Call ``hook`` in each forward pass of ``trainer()`` with its tokens [rows, length] and its
    logits [rows, 1, vocabulary], which it may change.
    """

    def call(_: Any, __: Any, inputs: Mapping[str, Tensor], outputs: Any) -> None:
        hook(inputs["input_ids"], outputs.logits)

    handle = trainer().policy.causal.register_forward_hook(call, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


async def parts_of(
    model: ChatModel, messages: Sequence[Mapping[str, Any]] = HELLO, sampling: Sampling = SAMPLING
) -> tuple[list[str], Answer]:
    """The pieces of an answer's text, and the answer."""
    parts = [part async for part in model.stream(model.encode(messages), sampling)]
    assert isinstance(parts[-1], Answer)
    return [part for part in parts if isinstance(part, str)], parts[-1]


def sample(text: str = "hello", seed: int = 0, **changes: Any) -> Answer:
    """An answer to a user's message."""
    with closing(ChatModel(trainer(), "tiny")) as model:
        prompt = model.encode([{"role": "user", "content": text}])
        sampling = Sampling(max_new_tokens=8, seed=seed, **changes)
        return run(model.answer(prompt, sampling))


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none when there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Served:
    """A service whose votes go to ``folder``, and what its clients do.

    errors: those that the terminal would show.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tokens: Mapping[str, str] = TOKENS,
        prompts: Sequence[Mapping[str, Any]] = (),
        model: ChatModel | None = None,
        rival: ChatModel | None = None,
    ) -> None:
        self.out, self.errors = folder / "feedback.jsonl", list[BaseException]()
        files = []
        if prompts:
            files = [str(folder / "prompts.jsonl")]
            Path(files[0]).write_text("".join(f"{json.dumps(row)}\n" for row in prompts))
        self.store = FeedbackStore(self.out, on_error=self.errors.append)
        self.model = model or ChatModel(trainer(), "tiny")
        self.service = FeedbackService(
            self.model,
            self.store,
            SAMPLING,
            PromptQueue(files),
            rival=rival,
            tokens=tokens,
            log=self.errors.append,
        )
        self.app = RequestGuard(application(self.service), host_names("127.0.0.1"))

    def client(self, token: str | None = "token-of-anna", host: str = "127.0.0.1") -> Any:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return httpx.AsyncClient(transport=transport, base_url=f"http://{host}", headers=headers)

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """One request of a client with the token."""
        where = {name: options.pop(name) for name in ("token", "host") if name in options}

        async def send() -> httpx.Response:
            async with self.client(**where) as client:
                content = {} if body is None else {"json": body}
                return await client.request(method, path, **content, **options)

        return run(send())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.request("POST", path, {} if body is None else body, **options)

    def ask(self, messages: Sequence[Mapping[str, Any]] = HELLO, **more: Any) -> list[Any]:
        """The events of an answer for the page."""
        return events(self.post("/api/answer", {"messages": messages, **more}))

    def rows(self, kind: str = "") -> list[dict[str, Any]]:
        """The rows of all votes so far."""
        self.store.flush()
        return rows(self.out.with_suffix(f".{kind}.jsonl" if kind else ".jsonl"))

    def close(self) -> None:
        self.service.close()


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream; its end as text."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    texts = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]
