"""Sampling in this process from an unmodified Hugging Face causal language model.

A loop of its own, not the library's ``generate``: it draws one uniform number per token instead of
one per token and vocabulary entry, runs a prompt once for all its samples, writes keys and values
where there is room for them, and stops computing answers that have ended. An answer's random
numbers are its own: they depend on the seed, the place of its prompt and its number among the
answers to it, and on nothing that is sampled beside it.
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
from valence.rollouts.protocol import Pair, Sampling, check_request, unheard
from valence.types import Completion, Ids, content_id

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


LOGITS = 512
"""Rows of logits that exist at once where answers are only measured."""
BLOCK = 256
"""Vocabulary entries whose probabilities are added up before it is looked which of them was
drawn.
"""


OnTokens = Callable[[list[int], list[int]], None]
"""Called with the numbers of completions, and the token that each of them grew by."""


class HFGenerator:
    """Samples from ``model`` with the weights and adapters that it has when ``generate`` is called.

    end_ids: tokens that end an answer; default: the end tokens of the tokenizer and of the model's
    generation config.
    batch_size: answers that are sampled at once (the n answers of one prompt stay together).
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
        """Copies ``params`` into the model's weights of the same names.

        Raises KeyError for names that it lacks.
        """
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        if unknown := sorted(set(params) - set(own)):
            raise KeyError(f"the model has no weights named {', '.join(unknown)}")
        with torch.no_grad():
            for name, value in params.items():
                own[name].copy_(value)
        self.version = version

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        *,
        progress: Callable[[int], None] = unheard,
        first: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> list[list[Completion]]:
        """n completions of each prompt, in the order of the prompts.

        The same seed gives the same completions.

        first: the place of the first prompt in a longer list, of which these are a part: they are
        answered as they would be with the others (but for the rounding of what runs together).
        progress: called after each token with the number of answers that ended with it. on_tokens:
        called after each token with the numbers of the completions that it was sampled for, and the
        tokens. Raises UserError for an empty prompt, and FloatingPointError when the model's logits
        are not finite.
        """
        check_request(prompts, n, first)
        # Prompts of similar length run together, the longest first: the peak of memory comes at the
        # start.
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        size = max(1, self.batch_size // n)
        answers: dict[int, list[Completion]] = {}
        with torch.no_grad(), evaluating(self.model):
            for start in range(0, len(order), size):
                chunk = order[start : start + size]
                draws = [uniforms(sampling, first + i, k) for i in chunk for k in range(n)]
                rows = self._sample(
                    [prompts[i] for i in chunk],
                    torch.from_numpy(np.stack(draws)),
                    sampling,
                    progress,
                    on_tokens,
                )
                for k, i in enumerate(chunk):
                    mine = enumerate(rows[k * n : (k + 1) * n])
                    answers[i] = [
                        self._completion(prompts[i], index, tokens, logps)
                        for index, (tokens, logps) in mine
                    ]
        return [answers[i] for i in range(len(prompts))]

    def logps(self, pairs: Sequence[Pair], *, temperature: float = 1.0) -> list[list[float]]:
        """The log-probability of each token of each answer (nats) under softmax(logits /
        temperature); at temperature 0, as it is told of sampled answers, at 1. Raises UserError for
        an empty prompt.
        """
        check_request([prompt for prompt, _ in pairs], 1)
        found: dict[int, list[float]] = {}
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][1]))
        with torch.no_grad(), evaluating(self.model):
            while order:
                longest = len(pairs[order[0]][1])
                chunk, order = np.split(np.array(order), [max(1, LOGITS // (longest + 1))])
                found |= self._measure(
                    {int(i): pairs[i] for i in chunk}, longest, temperature or 1.0
                )
                order = order.tolist()
        return [found[i] for i in range(len(pairs))]

    def close(self) -> None:
        """There is nothing to give back."""

    def _measure(
        self, pairs: Mapping[int, Pair], longest: int, temperature: float
    ) -> dict[int, list[float]]:
        """The log-probabilities of the tokens of some answers, the longest of which has so many, in
        one pass.
        """
        tokens, mask = left_padded(
            [(*prompt, *answer) for prompt, answer in pairs.values()],
            self.end_ids[0],
            self.model.device,
        )
        logits, _ = self._forward(
            tokens, mask, (mask.cumsum(1) - 1).clamp(min=0), None, keep=longest + 1
        )
        target = tokens[:, tokens.shape[1] - longest :, None]
        found: dict[int, list[float]] = {}
        for row, (i, (_, answer)) in enumerate(pairs.items()):
            start = longest - len(answer)
            own = logits[row, start:-1].float() / temperature
            found[i] = (own.gather(1, target[row, start:]).squeeze(1) - own.logsumexp(-1)).tolist()
        return found

    def _sample(
        self,
        prompts: list[tuple[int, ...]],
        draws: Tensor,
        sampling: Sampling,
        progress: Callable[[int], None],
        on_tokens: OnTokens | None = None,
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities of each answer. draws[R, max_new_tokens]: R answers, the
        same number per prompt.
        """
        from valence.rollouts.kv import drop, give_room

        device, most = self.model.device, sampling.max_new_tokens
        draws, ends = draws.to(device), torch.tensor(self.end_ids, device=device)
        tokens, mask = left_padded(prompts, self.end_ids[0], device)
        width = tokens.shape[1]
        # Each prompt runs once; then its row of the cache is repeated for its answers.
        logits, cache = self._forward(tokens, mask, (mask.cumsum(1) - 1).clamp(min=0), None)
        which = torch.arange(len(prompts), device=device).repeat_interleave(
            len(draws) // len(prompts)
        )
        give_room(cache, which)
        logits, position = logits[which, -1], mask.sum(1, keepdim=True)[which]
        mask = torch.cat([mask[which], mask.new_ones(len(which), most)], 1)
        out = torch.zeros(draws.shape, dtype=torch.long, device=device)
        logps = torch.zeros(draws.shape, device=device)
        lengths = torch.zeros(len(draws), dtype=torch.long, device=device)
        alive = torch.arange(len(draws), device=device)
        for step in range(most):
            token, logp = draw(logits, draws[alive, step], sampling)
            out[alive, step], logps[alive, step], lengths[alive] = token, logp, step + 1
            if on_tokens is not None:
                on_tokens(alive.tolist(), token.tolist())
            going = (~torch.isin(token, ends)).nonzero().squeeze(1)
            over = len(going) == 0 or step + 1 == most
            progress(len(alive) - (0 if over else len(going)))
            if over:
                break
            if len(going) < len(alive):
                alive, mask, token, position = drop(cache, going, (alive, mask, token, position))
            logits, cache = self._forward(
                token[:, None], mask[:, : width + step + 1], position + step, cache
            )
            logits = logits[:, -1]
        if not logps.isfinite().all():
            raise FloatingPointError("the model's logits are not finite")
        return [
            (t[:k], p[:k])
            for t, p, k in zip(out.tolist(), logps.tolist(), lengths.tolist(), strict=True)
        ]

    def _forward(
        self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Any, keep: int = 1
    ) -> tuple[Tensor, Any]:
        """logits[R, keep, V] after the last tokens of each row, and the cache grown by
        ``tokens``.
        """
        # Places, not how many: by a slice, in bfloat16, a CPU would copy the head's weight for each
        # row.
        places = torch.arange(tokens.shape[1] - keep, tokens.shape[1], device=tokens.device)
        out = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=places,
        )
        grown = getattr(out, "past_key_values", None)
        if not hasattr(grown, "batch_select_indices"):
            # A recurrent model, which would also read the padding on the left as part of the
            # prompt.
            raise UserError(
                f"{type(self.model).__name__} keeps no key-value cache, so it cannot be sampled "
                f"here",
                code="sampling-unsupported",
                where="model.name",
                fix="set run.samples.prompts: 0, and sample from the exported model",
            )
        return out.logits, grown

    def _completion(
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


def uniforms(sampling: Sampling, place: int, index: int) -> Any:
    """The numbers in [0, 1) that the tokens of an answer are drawn with [max_new_tokens].

    Those of a longer one begin alike.
    """
    seed = np.random.SeedSequence(sampling.seed, spawn_key=(place, index))
    return np.random.Generator(np.random.PCG64(seed)).random(
        sampling.max_new_tokens, dtype=np.float32
    )


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token per row, and its log-probability (nats) in the distribution it was drawn from,
    computed in float32.

    logits[R, V], uniform[R] in [0, 1) -> token[R], logp[R]. Temperature 0 reports the
    log-probability at temperature 1.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        best, token = logits.max(-1)
        return token, best - logits.logsumexp(-1)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if sampling.top_p < 1:
        logits = nucleus(logits.log_softmax(-1), sampling.top_p)
    top = logits.amax(-1, keepdim=True)
    rows, size = logits.shape
    weights = logits.new_empty(rows, -(-size // BLOCK) * BLOCK)
    weights[:, size:] = 0
    torch.sub(logits, top, out=weights[:, :size]).exp_()
    # First the block, then the token in it: one sum over the vocabulary is faster, and rounds less,
    # than a running one.
    blocks = weights.view(rows, -1, BLOCK)
    sums = blocks.sum(-1)
    total = sums.sum(-1, keepdim=True)
    block, rest = _place(sums, uniform[:, None] * total)
    inside, _ = _place(blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK)).squeeze(1), rest)
    token = (block * BLOCK + inside).clamp(max=size - 1)
    return token.squeeze(1), (logits.gather(1, token) - top - total.log()).squeeze(1)


def _place(weights: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """The first of weights[R, K] with which their running sum is above point[R, 1], and what of the
    point is left there.
    """
    upto = weights.cumsum(-1)
    total = upto[:, -1:]
    # Just below the total at most: rounding must not point behind the last one that has a weight.
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(upto, point, right=True).clamp(max=weights.shape[1] - 1)
    return place, point - pad(upto, (1, 0)).gather(1, place)


def nucleus(logp: Tensor, top_p: float) -> Tensor:
    """Keeps the smallest set of most likely tokens whose probability reaches ``top_p``,
    renormalised. logp[R, V].
    """
    ordered, index = logp.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = torch.empty_like(logp).scatter_(
        1, index, ordered.masked_fill(before >= top_p, float("-inf"))
    )
    return kept.log_softmax(-1)


def left_padded(
    prompts: Sequence[tuple[int, ...]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """tokens[R, L] with the prompts at the right edge, and mask[R, L]: 1 where a token is one of
    the prompt's.
    """
    width = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return tokens, mask


def default_end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The end tokens of the tokenizer and of the model's generation config.

    Raises UserError when there is none.
    """
    named: Any = getattr(model.generation_config, "eos_token_id", None)
    several: list[Any] = [*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id]
    ids = {int(i) for i in several if i is not None}
    if not ids:
        raise UserError(
            "neither the model nor its tokenizer names an end token",
            code="end-token-missing",
            fix="give end_ids",
        )
    return ids


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts every module in evaluation mode inside the block, and each back in its own mode
    afterwards.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
