"""A teacher on vLLM servers: token ids in, log-probabilities of these tokens and of the most likely
ones out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from valence.errors import UserError
from valence.models.cache import sequence_paths
from valence.models.digest import Digests
from valence.models.divergence import TopTokens
from valence.rollouts.client import ServerClient, ignore_message
from valence.rollouts.pool import ServerPool
from valence.rollouts.vllm import KEY, ROUTE, is_lost_engine
from valence.types import MicroBatch, content_id, sent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONCURRENCY = 64
TIMEOUT = 600.0
SAMPLED_IDS = 256
"""Number of token ids whose texts are compared with those of the server."""


class ServerTeacher:
    """A model on vLLM servers with the policy's tokens, as a reference.

    url: the address of a server, or of several with the same model, separated by commas.
    vocabulary: number of tokens of the policy. log: see ``ServerPool``. Raises UserError when no
    server can be reached, or has other tokens.
    """

    # Most servers compute in it, and none says with which kernels.
    precision = torch.bfloat16

    def __init__(
        self,
        url: str,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int,
        *,
        log: Callable[[str], None] = ignore_message,
    ) -> None:
        self.name, self.vocabulary = url, vocabulary
        key = os.environ.get(KEY)
        urls = [part.strip() for part in url.split(",")]
        clients = [ServerClient(one, TIMEOUT, key, is_lost=is_lost_engine) for one in urls]
        self.pool = ServerPool(clients, log)
        self._check_tokens(tokenizer)

    def digests(self) -> Digests:
        """Digests of the name of the model: a server does not reveal its weights."""
        models = self.pool.ask_any(lambda client: client.get("/v1/models"))["data"]
        digest = content_id(["served", [model.get("root") or model["id"] for model in models[:1]]])
        return Digests(digest, digest)

    def __call__(self, batch: MicroBatch) -> Tensor:
        logps = np.zeros(len(batch.tokens), np.float32)
        for rows, entries, tokens in self._ask(batch, 0):
            logps[rows] = [entry[token] for entry, token in zip(entries, tokens, strict=True)]
        return sent(torch.from_numpy(logps), batch.tokens.device)

    def distributions(self, batch: MicroBatch, rows: Tensor, top_k: int | None) -> TopTokens:
        """Return the ``top_k`` most likely tokens in place of those in these rows."""
        assert top_k is not None, "a server returns only its most likely tokens"
        shape = len(batch.tokens), top_k
        ids, logps = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        of_tokens = np.zeros(shape[0], np.float32)
        for places, entries, tokens in self._ask(batch, top_k):
            for row, entry, token in zip(places, entries, tokens, strict=True):
                # in addition to the likeliest ones, the reply has the token itself
                top = sorted(entry.items(), key=lambda item: -item[1])[:top_k]
                ids[row], logps[row] = zip(*top, strict=True)
                of_tokens[row] = entry[token]
        columns = (sent(torch.from_numpy(x), rows.device)[rows] for x in (ids, logps, of_tokens))
        return TopTokens(*columns)

    def _ask(
        self, batch: MicroBatch, top_k: int
    ) -> list[tuple[np.ndarray[Any, Any], list[dict[int, float]], list[int]]]:
        """For each sequence, the rows of its trained tokens, the log-probabilities that the servers
        report there by token id, and the tokens.
        """
        tokens = batch.cpu_tokens.numpy()
        paths = sequence_paths(batch)
        results: dict[int, tuple[np.ndarray[Any, Any], list[dict[int, float]], list[int]]] = {}
        # Settings of sampling would change the probabilities.
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        parameters = {**neutral, "max_tokens": 1, "prompt_logprobs": top_k, "detokenize": False}

        def make_body(i: int, _: Any) -> dict[str, Any]:
            return {"token_ids": tokens[paths[i][0]].tolist(), "sampling_params": parameters}

        def handle(i: int, reply: Any, client: ServerClient) -> None:
            path, mask = paths[i]
            positions = np.flatnonzero(mask)
            entries = [
                {
                    int(token): float(entry["logprob"])
                    for token, entry in row.items()
                    if int(token) < self.vocabulary  # not those of a padded embedding
                }
                for row in (reply["prompt_logprobs"][at] for at in positions)
            ]
            if any(len(entry) < top_k for entry in entries):
                raise UserError(
                    f"the reply has fewer than {top_k} tokens",
                    code="teacher-reply-short",
                    where=self.name,
                    fix="set loss.top_k to at most --max-logprobs of the server (20 by default)",
                )
            results[i] = path[mask], entries, tokens[path[mask]].tolist()

        self.pool.post_all(ROUTE, range(len(paths)), make_body, handle, CONCURRENCY)
        return [results[i] for i in range(len(paths))]

    def _check_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise UserError if token ids have other texts on the server."""
        step = max(1, len(tokenizer) // SAMPLED_IDS)
        ids = list(range(0, len(tokenizer), step))
        theirs = self.pool.ask_any(lambda client: client.post("/detokenize", {"tokens": ids}))
        if theirs["prompt"] != tokenizer.decode(ids):
            raise UserError(
                "the server's tokens are others than those of the model",
                code="vocabulary-mismatch",
                where=f"teacher.model: {self.name}",
                fix="use a teacher with the same tokenizer, or imitate answers that it writes with "
                "method: sft",
            )
