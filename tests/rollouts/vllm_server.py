"""Stand-ins for servers of models, a client of them, and the environment in which a real vLLM
server runs.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tests.arch.source import ROOT
from tests.programs import Copies
from valence.rollouts.protocol import Sampling
from valence.rollouts.servers import CPU_VARIABLES, PYTHON
from valence.rollouts.transports import WeightTransfer
from valence.rollouts.vllm import VLLMGenerator

HERE = Path(os.environ.get(PYTHON, ROOT / ".peers" / "vllm" / "bin" / "python"))
"""The Python of the environment with vLLM, which has its own torch and transformers."""
needs_vllm = pytest.mark.skipif(
    not HERE.exists(), reason="there is no environment with vLLM: `make vllm` builds one"
)

FORKED = Path(__file__).parent / "forked"
"""A folder that makes the processes of a server copies of the first, if it is on its path."""

Reply = tuple[int, Any]
END = 3


def forking_vllm_python() -> Copies:
    """Servers in copies of a process that has vLLM loaded. Each gets its variables when it starts:
    here are only those that libraries read when they are imported.
    """
    path = f"{FORKED}{os.pathsep}{ROOT}"
    module = "vllm.entrypoints.openai.api_server"
    return Copies(HERE, (module,), **CPU_VARIABLES, OMP_NUM_THREADS="1", PYTHONPATH=path)


class Fake:
    """A server with the same routes, and tokens that follow from the seed.

    It can hang, fail and forget.

    State that a test looks at and changes. ``on``: what to do at a route first; it may raise Drop,
    or return the reply. ``stopped``: set once it serves no longer. ``kill``: closes all its
    sockets, as the end of a process would. ``model``, ``tokenizer``: for log-probabilities of
    prompts; without a model these follow from the position.
    """

    def __init__(self) -> None:
        self.version, self.adapters, self.mode = "default", ["base"], "processed_logprobs"
        self.dtype = "float32"
        self.model: Any = None
        self.tokenizer: Any = None
        self.paused = self.updating = self.asleep = False
        self.requests: list[tuple[str, Any]] = []
        self.on: dict[str, Callable[[Any], Reply | None]] = {}
        self.url = ""
        self.stopped = threading.Event()
        self.kill: Callable[[], None] = lambda: None

    def hang(self, body: Any) -> None:
        """Never answers, for ``on``."""
        self.stopped.wait()
        raise Drop

    def paths(self) -> list[str]:
        """What was asked for, in order, without looks at its health."""
        return [path for path, _ in self.requests if path != "/health"]

    def answer(self, path: str, body: Any) -> Reply:
        self.requests.append((path, body))
        if self.asleep and path in NEEDS_MEMORY:
            return 500, {"error": {"message": "the engine is asleep"}}
        if path in self.on and (reply := self.on[path](body)) is not None:
            self.updating &= path != "/update_weights"  # one that fails is closed
            return reply
        simple: dict[str, Callable[[], Reply]] = {
            "/health": lambda: (200, {}),
            "/weight_info": lambda: (200, {"weight_version": self.version}),
            "/v1/models": lambda: (200, {"data": [{"id": name} for name in self.adapters]}),
            "/server_info": lambda: (
                200,
                {
                    "vllm_config": {
                        "model_config": {
                            "dtype": f"torch.{self.dtype}",
                            "logprobs_mode": self.mode,
                        }
                    }
                },
            ),
            "/get_world_size": lambda: (200, {"world_size": 1}),
            "/init_weight_transfer_engine": lambda: (200, {}),
            "/update_weights": lambda: (200, {}),
            "/abort_requests": lambda: (200, {}),
        }
        if path in simple:
            return simple[path]()
        return getattr(
            self,
            path.strip("/").replace("/", "_").replace(".", "_"),
            lambda body: (404, {"detail": "Not Found"}),
        )(body)

    # vllm/entrypoints/serve/dev/sleep/api_router.py; `level` is in the query

    def sleep(self, body: Any) -> Reply:
        self.asleep = True
        return 200, {"status": "sleeping", "level": 1}

    def wake_up(self, body: Any) -> Reply:
        self.asleep = False
        return 200, {"status": "awake", "tags": None}

    def pause(self, body: Any) -> Reply:
        self.paused = True
        return 200, {}

    def resume(self, body: Any) -> Reply:
        self.paused = False
        return 200, {}

    def start_weight_update(self, body: Any) -> Reply:
        if self.updating:
            return 500, {"error": {"message": "a weight update is already active"}}
        self.updating = True
        return 200, {}

    def finish_weight_update(self, body: Any) -> Reply:
        self.version, self.updating = body["weight_version"], False
        return 200, {}

    def update_weight_version(self, body: Any) -> Reply:
        self.version = body["new_version"]
        return 200, {}

    def v1_load_lora_adapter(self, body: Any) -> Reply:
        self.adapters.append(body["lora_name"])
        return 200, "Success"

    def v1_unload_lora_adapter(self, body: Any) -> Reply:
        if body["lora_name"] not in self.adapters:
            return 404, {"error": {"message": "not loaded"}}
        self.adapters.remove(body["lora_name"])
        return 200, "Success"

    def inference_v1_generate(self, body: Any) -> Reply:
        if body.get("model", "base") not in self.adapters:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        settings = body["sampling_params"]
        if "prompt_logprobs" in settings:
            if self.model is not None:
                rows = self.logprobs(body["token_ids"], settings["prompt_logprobs"])
            else:
                rows = [
                    None,
                    *(
                        {str(token): {"logprob": -0.5 - k}}
                        for k, token in enumerate(body["token_ids"][1:])
                    ),
                ]
            return 200, {"choices": [], "prompt_logprobs": rows}
        return 200, {"choices": [self.choice(settings, k) for k in range(settings["n"])]}

    @torch.no_grad()
    def logprobs(self, ids: list[int], count: int) -> list[dict[str, Any] | None]:
        """Of each token but the first, and of the likeliest ones in its place."""
        assert self.model is not None
        rows: list[dict[str, Any] | None] = [None]
        logps = torch.log_softmax(self.model(torch.tensor([ids])).logits[0].float(), -1)
        for token, row in zip(ids[1:], logps, strict=False):
            top = row.topk(count).indices.tolist() if count else []
            rows.append({str(i): {"logprob": float(row[i])} for i in dict.fromkeys([token, *top])})
        return rows

    def detokenize(self, body: Any) -> Reply:
        return 200, {"prompt": self.tokenizer.decode(body["tokens"])}

    def choice(self, settings: Any, index: int) -> dict[str, Any]:
        """An answer of two tokens; every other one ends by itself."""
        first = 10 + (settings["seed"] + index) % 50
        certain = settings["top_p"] < 0.01 and self.mode == "processed_logprobs"
        tokens = [first, settings["stop_token_ids"][0] if index % 2 else first]
        return {
            "index": index,
            "finish_reason": "stop" if index % 2 else "length",
            "token_ids": tokens,
            "logprobs": {
                "content": [
                    {"token_id": token, "logprob": 0.0 if certain else -float(token)}
                    for token in tokens
                ]
            },
            "weight_versions": [{"version": self.version, "start": 0, "end": 2}],
        }


class Completions(Fake):
    """A completions endpoint. ``speaks``: token ids."""

    def __init__(self, *, speaks: bool) -> None:
        super().__init__()
        self.speaks = speaks

    def v1_completions(self, body: Any) -> tuple[int, Any]:
        if not self.speaks and "return_token_ids" in body:
            return 400, {"error": {"message": "unknown argument return_token_ids"}}
        first = 10 + body["seed"] % 50
        ended = body["seed"] % 2 == 0
        if not self.speaks:
            return 200, {
                "choices": [{"finish_reason": "stop" if ended else "length", "text": f"{first} 8"}]
            }
        tokens = [first, END if ended else 8][: body["max_tokens"]]
        choice = {
            "finish_reason": "length",
            "token_ids": tokens,
            "logprobs": {"token_logprobs": [-1.5] * len(tokens)},
        }
        return 200, {"choices": [choice]}


class Drop(Exception):
    """The connection ends without an answer."""


@contextmanager
def serving(fake: Fake, port: int = 0) -> Iterator[Fake]:
    """Runs it; port 0: one that is free."""

    connections: set[socket.socket] = set()

    class Handler(BaseHTTPRequestHandler):
        def setup(self) -> None:
            connections.add(self.request)
            super().setup()

        def finish(self) -> None:
            connections.discard(self.request)
            super().finish()

        def _any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(length)
            if len(raw) < length:  # the connection was closed before the whole body arrived
                self.close_connection = True
                return
            try:
                status, body = fake.answer(
                    urlsplit(self.path).path, json.loads(raw) if raw else None
                )
            except Drop:
                self.close_connection = True
                return
            out = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(out)))
            self.end_headers()
            self.wfile.write(out)

        do_GET = do_POST = _any

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that has gone is part of the tests."""

    server = Quiet(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"

    def kill() -> None:
        server.shutdown()
        server.server_close()
        for connection in list(connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    fake.kill = kill
    try:
        yield fake
    finally:
        fake.stopped.set()
        server.shutdown()
        server.server_close()


PROMPTS = [(5, 6, 7), (8, 9)]
FREE = Sampling(temperature=0.7, max_new_tokens=2, seed=4)
WEIGHTS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor([7], dtype=torch.bfloat16),
    "c": torch.tensor(3, dtype=torch.int64),
}
NEEDS_MEMORY = ("/inference/v1/generate", "/start_weight_update", "/update_weights")
"""Routes that a sleeping server cannot serve."""
UPDATE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


class Words:
    """A tokenizer that writes token 7 as "7" and leaves the end token out."""

    eos_token_id = END

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(i) for i in ids if i != END or not skip_special_tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]


def generator(
    url: str, transport: WeightTransfer, *, timeout: float = 5.0, **settings: Any
) -> VLLMGenerator:
    return VLLMGenerator(url, transport, Words(), end_ids=[END], timeout=timeout, **settings)  # type: ignore[arg-type]


def weights() -> Any:
    return WEIGHTS.items()
