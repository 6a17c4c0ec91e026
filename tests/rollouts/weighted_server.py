"""A stand-in for a server whose completions depend on the weights."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.rollouts.vllm_server import Fake, Reply


def number(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:6])


class WeightedServer(Fake):
    """A server whose completions depend on the adapter that a request names.

    lag: a request for the adapter of round n is answered with that of round n - lag. delay: seconds
    before a reply. num_running, sent_while_running: requests in progress, and how often an adapter
    arrived meanwhile.
    """

    def __init__(self, lag: int = 0, delay: Any = lambda: 0.0) -> None:
        super().__init__()
        self.lag, self.delay = lag, delay
        self.digests: dict[str, str] = {}
        self.lock, self.num_running, self.sent_while_running = threading.Lock(), 0, 0

    def v1_load_lora_adapter(self, body: Any) -> Reply:
        values = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
        digest = hashlib.sha256(b"".join(values[name].numpy().tobytes() for name in sorted(values)))
        self.digests[body["lora_name"]] = digest.hexdigest()
        self.sent_while_running += self.num_running > 0
        return super().v1_load_lora_adapter(body)

    def inference_v1_generate(self, body: Any) -> Reply:
        with self.lock:
            self.num_running += 1
        try:
            time.sleep(self.delay())
            labels = list(self.digests)
            place = labels.index(body["model"])
            digest = self.digests[labels[max(0, place - self.lag)]]
            settings = body["sampling_params"]
            return 200, {"choices": [_choice(settings, k, digest) for k in range(settings["n"])]}
        finally:
            with self.lock:
                self.num_running -= 1


def _choice(settings: Any, index: int, digest: str) -> dict[str, Any]:
    seed = settings["seed"] + index
    length = 1 + number(digest, seed) % 4
    tokens = [10 + number(digest, seed, k) % 50 for k in range(length)]
    tokens.append(settings["stop_token_ids"][0])
    logps = [-0.1 - number(digest, seed, k, "logp") % 40 / 10 for k in range(len(tokens))]
    content = [{"token_id": t, "logprob": p} for t, p in zip(tokens, logps, strict=True)]
    return {
        "index": index, "finish_reason": "stop", "token_ids": tokens,
        "logprobs": {"content": content},
    }  # fmt: skip
