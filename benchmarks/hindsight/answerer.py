"""Greedy answers of a model, and the log-probabilities of given ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from valence.data.encode import Encoder
from valence.models.build import load_tokenizer
from valence.rollouts import HFGenerator, Sampling
from valence.types import Chat

MAX_NEW_TOKENS = 56


def user_turn(text: str) -> Chat:
    return Chat(({"role": "user", "content": text},))


class Answerer:
    """Greedy answers of a model, and the log-probabilities of given ones."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        )
        self.encoder = Encoder(load_tokenizer(str(folder)), max_length=1024)
        self.generator = HFGenerator(
            self.model, self.encoder.tokenizer, end_ids=self.encoder.end_ids
        )

    def answers(
        self, prompts: Sequence[Chat], max_new_tokens: int = MAX_NEW_TOKENS
    ) -> list[tuple[str, bool]]:
        """The text of each answer, and whether the model ended it."""
        sampling = Sampling(temperature=0.0, max_new_tokens=max_new_tokens)
        ids = [self.encoder.encode_prompt(prompt) for prompt in prompts]
        return [
            (answer.text, answer.stop != "length")
            for [answer] in self.generator.generate(ids, 1, sampling)
        ]

    def logps(self, prompts: Sequence[Chat], answers: Sequence[str]) -> list[torch.Tensor]:
        """Of each token of the answers and of their ends (nats)."""
        tokenizer = self.encoder.tokenizer
        pairs = [
            (
                self.encoder.encode_prompt(prompt),
                (
                    *tokenizer(answer, add_special_tokens=False)["input_ids"],
                    self.encoder.end_ids[0],
                ),
            )
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return [torch.tensor(logps) for logps in self.generator.logps(pairs)]
