"""Sampling in this process from an unmodified Hugging Face causal language model.

A loop of its own, not the library's ``generate``: it draws one uniform number per token instead of one per token and
vocabulary entry, runs a prompt once for all its samples, and stops computing answers that have ended. On a CPU that is
nearly twice as fast, and an answer's random numbers do not depend on how the prompts are cut into batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from valence.errors import UserError
from valence.rollout.protocol import Sampling
from valence.types import Completion, Ids, content_id

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class HFGenerator:
    """Samples from ``model`` with the weights and adapters that it has when ``generate`` is called.

    end_ids: tokens that end an answer; default: the end tokens of the tokenizer and of the model's generation config.
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
        """Copies ``params`` into the model's weights of the same names. Raises KeyError for names that it lacks."""
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        if unknown := sorted(set(params) - set(own)):
            raise KeyError(f"the model has no weights named {', '.join(unknown)}")
        with torch.no_grad():
            for name, value in params.items():
                own[name].copy_(value)
        self.version = version

    def generate(self, prompts: Sequence[tuple[int, ...]], n: int, sampling: Sampling) -> list[list[Completion]]:
        """n completions of each prompt, in the order of the prompts. The same seed gives the same completions.

        Raises UserError for an empty prompt, and FloatingPointError when the model's logits are not finite.
        """
        if n < 1:
            raise UserError(f"{n} answers per prompt", where="n", fix="ask for at least 1")
        if empty := [i for i, prompt in enumerate(prompts) if not prompt]:
            raise UserError("the prompt has no tokens", where=f"prompt {empty[0]}", fix="leave empty prompts out")
        random = torch.Generator().manual_seed(sampling.seed)
        draws = torch.rand(len(prompts), n, sampling.max_new_tokens, generator=random)
        # Prompts of similar length run together, the longest first: the peak of memory comes at the start.
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        size = max(1, self.batch_size // n)
        answers: dict[int, list[Completion]] = {}
        with torch.no_grad(), evaluating(self.model):
            for start in range(0, len(order), size):
                chunk = order[start : start + size]
                rows = self._sample([prompts[i] for i in chunk], draws[chunk].flatten(0, 1), sampling)
                for k, i in enumerate(chunk):
                    mine = rows[k * n : (k + 1) * n]
                    answers[i] = [self._completion(prompts[i], tokens, logps) for tokens, logps in mine]
        return [answers[i] for i in range(len(prompts))]

    def _sample(self, prompts: list[tuple[int, ...]], draws: Tensor, sampling: Sampling) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities of each answer. draws[R, max_new_tokens]: R answers, the same number per prompt."""
        device = self.model.device
        draws, ends = draws.to(device), torch.tensor(self.end_ids, device=device)
        tokens, mask = left_padded(prompts, self.end_ids[0], device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        # Each prompt runs once; then its row of the cache is repeated for its answers.
        which = torch.arange(len(prompts), device=device).repeat_interleave(len(draws) // len(prompts))
        logits, cache = self._forward(tokens, mask, positions, None)
        cache.batch_select_indices(which)
        logits, mask = logits[which], mask[which]
        out = torch.zeros(draws.shape, dtype=torch.long, device=device)
        logps = torch.zeros(draws.shape, device=device)
        lengths = torch.zeros(len(draws), dtype=torch.long, device=device)
        alive = torch.arange(len(draws), device=device)
        for step in range(sampling.max_new_tokens):
            token, logp = draw(logits, draws[alive, step], sampling)
            out[alive, step], logps[alive, step], lengths[alive] = token, logp, step + 1
            going = (~torch.isin(token, ends)).nonzero().squeeze(1)
            if len(going) == 0 or step + 1 == sampling.max_new_tokens:
                break
            if len(going) < len(alive):
                # Dropping ended rows copies the cache once, as growing it by a token does anyway.
                alive, mask, token = alive[going], mask[going], token[going]
                cache.batch_select_indices(going)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            logits, cache = self._forward(token[:, None], mask, mask.sum(1, keepdim=True) - 1, cache)
        if not logps.isfinite().all():
            raise FloatingPointError("the model's logits are not finite")
        return [(t[:k], p[:k]) for t, p, k in zip(out.tolist(), logps.tolist(), lengths.tolist(), strict=True)]

    def _forward(self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """logits[R, V] after the last token of each row, and the cache grown by ``tokens``."""
        out = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        grown = getattr(out, "past_key_values", None)
        if not hasattr(grown, "batch_select_indices"):
            # A recurrent model, which would also read the padding on the left as part of the prompt.
            raise UserError(
                f"{type(self.model).__name__} keeps no key-value cache, so it cannot be sampled here",
                where="model.name",
                fix="set run.samples.prompts: 0, and sample from the exported model",
            )
        return out.logits[:, -1], grown

    def _completion(self, prompt: tuple[int, ...], tokens: list[int], logps: list[float]) -> Completion:
        return Completion(
            prompt_id=content_id("prompt", Ids(prompt)),
            tokens=tuple(tokens),
            logps=tuple(logps),
            text=str(self.tokenizer.decode(tokens, skip_special_tokens=True)),
            stop="eos" if tokens[-1] in self.end_ids else "length",
            version=self.version,
        )


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token per row, and its log-probability (nats) in the distribution it was drawn from, computed in float32.

    logits[R, V], uniform[R] in [0, 1) -> token[R], logp[R]. Temperature 0 reports the log-probability at temperature 1.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        best, token = logits.max(-1)
        return token, best - logits.logsumexp(-1)
    logp = (logits / sampling.temperature).log_softmax(-1)
    if sampling.top_p < 1:
        logp = nucleus(logp, sampling.top_p)
    cumulative = logp.exp().cumsum(-1)
    total = cumulative[:, -1:]
    # Just below the total at most: rounding must not point behind the last token that has probability.
    point = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cumulative, point, right=True).clamp(max=logp.shape[-1] - 1)
    return token.squeeze(1), logp.gather(1, token).squeeze(1)


def nucleus(logp: Tensor, top_p: float) -> Tensor:
    """Keeps the smallest set of most likely tokens whose probability reaches ``top_p``, renormalised. logp[R, V]."""
    ordered, index = logp.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = torch.empty_like(logp).scatter_(1, index, ordered.masked_fill(before >= top_p, float("-inf")))
    return kept.log_softmax(-1)


def left_padded(prompts: Sequence[tuple[int, ...]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """tokens[R, L] with the prompts at the right edge, and mask[R, L]: 1 where a token is one of the prompt's."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return tokens, mask


def default_end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The end tokens of the tokenizer and of the model's generation config. Raises UserError when there is none."""
    named: Any = getattr(model.generation_config, "eos_token_id", None)
    several: list[Any] = [*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id]
    ids = {int(i) for i in several if i is not None}
    if not ids:
        raise UserError("neither the model nor its tokenizer names an end token", fix="give end_ids")
    return ids


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts every module in evaluation mode inside the block, and each back in its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
