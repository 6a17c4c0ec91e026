"""A client of a vLLM server, with a tokenizer that writes numbers, and weights to send."""

from __future__ import annotations

from typing import Any

import torch

from tests.rollout.fake import END
from valence.rollout.protocol import Sampling
from valence.rollout.transports import Transport
from valence.rollout.vllm import VLLMGenerator

PROMPTS = [(5, 6, 7), (8, 9)]
FREE = Sampling(temperature=0.7, max_new_tokens=2, seed=4)
WEIGHTS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor([7], dtype=torch.bfloat16),
    "c": torch.tensor(3, dtype=torch.int64),
}
UPDATE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


class Words:
    """A tokenizer that writes token 7 as "7" and leaves the end token out."""

    eos_token_id = END

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(i) for i in ids if i != END or not skip_special_tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]


def generator(url: str, transport: Transport, *, timeout: float = 5.0, **settings: Any) -> VLLMGenerator:
    return VLLMGenerator(url, transport, Words(), end_ids=[END], timeout=timeout, **settings)  # type: ignore[arg-type]


def weights() -> Any:
    return WEIGHTS.items()
