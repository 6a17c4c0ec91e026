"""Sampling in this process from an unmodified Hugging Face causal language model.

The loop replaces the library's ``generate``. It draws one uniform number per token instead of one
per token and vocabulary entry, runs a prompt once for all its completions, preallocates the
key-value cache, and removes completions that have ended. The random numbers of a completion depend
on the seed, the position of its prompt and its index alone, not on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from valence.errors import UserError
from valence.rollouts.protocol import Pair, Sampling, check_request, ignore_progress
from valence.types import Completion, Ids, content_id

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


MAX_LOGITS = 512
"""Maximum rows of logits in memory while completions are scored."""
BLOCK = 256
"""Vocabulary entries per partial sum of probabilities."""
SMALLEST = torch.finfo(torch.float32).tiny
"""Smaller sampling parameters would be 0 in float32."""


class HFGenerator:
    """Samples from ``model`` with its present weights and adapters.

    end_ids: tokens that end a completion; default: the end tokens of the tokenizer and of the
    model's generation config. batch_size: completions per batch (the n completions of one prompt
    stay together).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: Collection[int] | None = None,
        batch_size: int = 64,
    ) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.version = 0
        self.end_ids = sorted(default_end_ids(model, tokenizer) if end_ids is None else end_ids)

    def load_weights(self, version: int, params: Mapping[str, Tensor]) -> None:
        """Copy ``params`` into the model's weights of the same names.

        Raises KeyError for unknown names.
        """
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        if unknown := sorted(set(params) - set(tensors)):
            raise KeyError(f"the model has no weights named {', '.join(unknown)}")
        with torch.no_grad():
            for name, value in params.items():
                tensors[name].copy_(value)
        self.version = version

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        *,
        progress: Callable[[int], None] = ignore_progress,
        first: int = 0,
        positions: Sequence[int] | None = None,
        on_completion: Callable[[int, Completion], None] | None = None,
    ) -> list[list[Completion]]:
        """n completions of each prompt, in the order of the prompts.

        The same seed gives the same completions.

        first: the position of the first prompt in a longer list, of which these are a part. Their
        completions are the same as with the whole list, except for rounding. positions: of all
        prompts, if they do not follow each other. progress: called after each token with the number
        of completions that ended. on_completion: called with the index of a prompt and a completion
        as soon as it has ended. Raises UserError for an empty prompt,
        and FloatingPointError if logits are not finite.
        """
        check_request(prompts, n, first)
        # prompts of similar length run together, the longest first, so that the memory peaks at the
        # start
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        size = max(1, self.batch_size // n)
        completions: dict[int, list[Completion]] = {}
        with torch.no_grad(), evaluating(self.model):
            for start in range(0, len(order), size):
                chunk = order[start : start + size]
                places = [first + i if positions is None else positions[i] for i in chunk]
                draws = [uniforms(sampling, place, k) for place in places for k in range(n)]

                def report(
                    row: int, tokens: list[int], logps: list[float], chunk: Any = chunk
                ) -> None:
                    i = chunk[row // n]
                    completion = self.completion(prompts[i], row % n, tokens, logps)
                    on_completion(i, completion)  # type: ignore[misc]

                rows = self._sample(
                    [prompts[i] for i in chunk],
                    torch.from_numpy(np.stack(draws)),
                    sampling,
                    progress,
                    report if on_completion else None,
                )
                for k, i in enumerate(chunk):
                    completions[i] = [
                        self.completion(prompts[i], index, tokens, logps)
                        for index, (tokens, logps) in enumerate(rows[k * n : (k + 1) * n])
                    ]
        return [completions[i] for i in range(len(prompts))]

    def logps(self, pairs: Sequence[Pair], *, temperature: float = 1.0) -> list[list[float]]:
        """The log-probability of each token of each completion (nats) under softmax(logits /
        temperature); at temperature 0 those at temperature 1, as for sampled completions. Raises
        UserError for an empty prompt.
        """
        check_request([prompt for prompt, _ in pairs], 1)
        logps: dict[int, list[float]] = {}
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][1]))
        with torch.no_grad(), evaluating(self.model):
            while order:
                longest = len(pairs[order[0]][1])
                chunk, order = np.split(np.array(order), [max(1, MAX_LOGITS // (longest + 1))])
                logps |= self._score({int(i): pairs[i] for i in chunk}, longest, temperature or 1.0)
                order = order.tolist()
        return [logps[i] for i in range(len(pairs))]

    def close(self) -> None:
        """Nothing to close."""

    def _score(
        self, pairs: Mapping[int, Pair], longest: int, temperature: float
    ) -> dict[int, list[float]]:
        """Log-probabilities of completions of at most ``longest`` tokens, in one forward pass."""
        tokens, mask = left_pad(
            [(*prompt, *completion) for prompt, completion in pairs.values()],
            self.end_ids[0],
            self.model.device,
        )
        logits, _ = self.forward(
            tokens, mask, (mask.cumsum(1) - 1).clamp(min=0), None, keep=longest + 1
        )
        target = tokens[:, tokens.shape[1] - longest :, None]
        logps: dict[int, list[float]] = {}
        for row, (i, (_, completion)) in enumerate(pairs.items()):
            start = longest - len(completion)
            scaled = logits[row, start:-1].float() / temperature
            logp = scaled.gather(1, target[row, start:]).squeeze(1) - scaled.logsumexp(-1)
            logps[i] = logp.tolist()
        return logps

    def _sample(
        self,
        prompts: list[tuple[int, ...]],
        draws: Tensor,
        sampling: Sampling,
        progress: Callable[[int], None],
        report: Callable[[int, list[int], list[float]], None] | None,
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities of each completion.

        draws[R, max_new_tokens]: random numbers of R completions, the same number per prompt.
        report: called with the row, tokens and log-probabilities of a completion when it has ended.
        """
        from valence.rollouts.kv import remove_finished, select_rows

        device, max_tokens = self.model.device, sampling.max_new_tokens
        draws, ends = draws.to(device), torch.tensor(self.end_ids, device=device)
        tokens, mask = left_pad(prompts, self.end_ids[0], device)
        width = tokens.shape[1]
        # each prompt runs once; then its row of the cache is repeated for its completions
        logits, cache = self.forward(tokens, mask, (mask.cumsum(1) - 1).clamp(min=0), None)
        rows = torch.arange(len(prompts), device=device).repeat_interleave(
            len(draws) // len(prompts)
        )
        select_rows(cache, rows, width + max_tokens)
        logits, position = logits[rows, -1], mask.sum(1, keepdim=True)[rows]
        mask = torch.cat([mask[rows], mask.new_ones(len(rows), max_tokens)], 1)
        sampled = torch.zeros(draws.shape, dtype=torch.long, device=device)
        logps = torch.zeros(draws.shape, device=device)
        lengths = torch.zeros(len(draws), dtype=torch.long, device=device)
        active = torch.arange(len(draws), device=device)
        for step in range(max_tokens):
            token, logp = draw(logits, draws[active, step], sampling)
            sampled[active, step], logps[active, step], lengths[active] = token, logp, step + 1
            unfinished = (~torch.isin(token, ends)).nonzero().squeeze(1)
            is_last = len(unfinished) == 0 or step + 1 == max_tokens
            if report is not None:
                remaining = set[int]() if is_last else set(active[unfinished].tolist())
                for row in (row for row in active.tolist() if row not in remaining):
                    row_logps = logps[row, : step + 1]
                    if row_logps.isfinite().all():
                        report(row, sampled[row, : step + 1].tolist(), row_logps.tolist())
            progress(len(active) - (0 if is_last else len(unfinished)))
            if is_last:
                break
            if len(unfinished) < len(active):
                tensors = (active, mask, token, position)
                active, mask, token, position = remove_finished(cache, unfinished, tensors)
            logits, cache = self.forward(
                token[:, None], mask[:, : width + step + 1], position + step, cache
            )
            logits = logits[:, -1]
        if not logps.isfinite().all():
            raise FloatingPointError("the model's logits are not finite")
        return [
            (t[:k], p[:k])
            for t, p, k in zip(sampled.tolist(), logps.tolist(), lengths.tolist(), strict=True)
        ]

    def forward(
        self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Any, keep: int = 1
    ) -> tuple[Tensor, Any]:
        """logits[R, keep, V] of the last tokens of each row, and the extended cache."""
        from valence.rollouts.kv import can_select_rows, forward_with_cache

        # indices instead of a number: with a slice in bfloat16, a CPU copies the head for each row
        indices = torch.arange(tokens.shape[1] - keep, tokens.shape[1], device=tokens.device)
        output, extended = forward_with_cache(
            self.model,
            cache,
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            logits_to_keep=indices,
        )
        if not can_select_rows(extended):
            # a recurrent model, which would also read the left padding as part of the prompt
            raise UserError(
                f"{type(self.model).__name__} has no key-value cache, which sampling needs",
                code="sampling-unsupported",
                where="model.name",
                fix="set run.samples.prompts: 0, and generate text from the exported model with "
                "transformers",
            )
        return output.logits, extended

    def completion(
        self, prompt: tuple[int, ...], index: int, tokens: list[int], logps: list[float]
    ) -> Completion:
        return Completion(
            prompt_id=content_id("prompt", Ids(prompt)),
            tokens=tuple(tokens),
            logps=tuple(logps),
            text=str(self.tokenizer.decode(tokens, skip_special_tokens=True)),
            stop="eos" if tokens[-1] in self.end_ids else "length",
            version=self.version,
            index=index,
        )


def uniforms(sampling: Sampling, position: int, index: int) -> Any:
    """Random numbers in [0, 1) for the tokens of a completion [max_new_tokens].

    Those of a longer completion start with the same numbers.
    """
    seed = np.random.SeedSequence(sampling.seed, spawn_key=(position, index))
    return np.random.Generator(np.random.PCG64(seed)).random(
        sampling.max_new_tokens, dtype=np.float32
    )


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token per row, and its log-probability (nats) in the distribution it is drawn from, in
    float32.

    logits[R, V], uniform[R] in [0, 1) -> token[R], logp[R]. Temperature 0 reports the
    log-probability at temperature 1.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        best, token = logits.max(-1)
        return token, best - logits.logsumexp(-1)
    if sampling.temperature != 1:
        # the largest logit is 0 and stays finite: any other may become -inf
        logits = (logits - logits.amax(-1, keepdim=True)) / max(sampling.temperature, SMALLEST)
    if sampling.top_p < 1:
        logits = nucleus(logits.log_softmax(-1), max(sampling.top_p, SMALLEST))
    top = logits.amax(-1, keepdim=True)
    rows, size = logits.shape
    weights = logits.new_empty(rows, -(-size // BLOCK) * BLOCK)
    weights[:, size:] = 0
    torch.sub(logits, top, out=weights[:, :size]).exp_()
    # first the block, then the token in it: one sum over the vocabulary is faster, and rounds less,
    # than a cumulative sum
    blocks = weights.view(rows, -1, BLOCK)
    sums = blocks.sum(-1)
    total = sums.sum(-1, keepdim=True)
    block, rest = _locate(sums, uniform[:, None] * total)
    inside, _ = _locate(blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK)).squeeze(1), rest)
    token = (block * BLOCK + inside).clamp(max=size - 1)
    return token.squeeze(1), (logits.gather(1, token) - top - total.log()).squeeze(1)


def _locate(weights: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """The first index at which the cumulative sum of weights[R, K] exceeds point[R, 1], and the
    remainder of the point there.
    """
    upto = weights.cumsum(-1)
    total = upto[:, -1:]
    # stay below the total: rounding must not select an entry without a weight
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(upto, point, right=True).clamp(max=weights.shape[1] - 1)
    return index, point - pad(upto, (1, 0)).gather(1, index)


def nucleus(logp: Tensor, top_p: float) -> Tensor:
    """Restrict logp[R, V] to the smallest set of most likely tokens whose probability reaches
    ``top_p``, renormalized.
    """
    ordered, index = logp.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    restricted = torch.empty_like(logp).scatter_(
        1, index, ordered.masked_fill(before >= top_p, float("-inf"))
    )
    return restricted.log_softmax(-1)


def left_pad(
    prompts: Sequence[tuple[int, ...]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """tokens[R, L] with the prompts at the right edge, and mask[R, L]: 1 for tokens of prompts."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return tokens, mask


def default_end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The end tokens of the tokenizer and of the model's generation config.

    Raises UserError when there is none.
    """
    config: Any = getattr(model.generation_config, "eos_token_id", None)
    values: list[Any] = [
        *(config if isinstance(config, list) else [config]),
        tokenizer.eos_token_id,
    ]
    ids = {int(value) for value in values if value is not None}
    if not ids:
        raise UserError(
            "neither the model nor its tokenizer has an end token",
            code="end-token-missing",
            fix="set eos_token in the tokenizer, or pass end_ids",
        )
    return ids


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules in evaluation mode inside the block, and restore their modes afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
