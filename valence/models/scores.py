"""Scores of sequences under a reward model: a decoder in the layouts of ``PolicyModel`` with a
linear head.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import PreTrainedTokenizerBase

from valence.errors import UserError
from valence.models.divergence import TeacherDistributions
from valence.models.policy_model import PolicyModel, zero_with_gradient
from valence.types import MicroBatch, PolicyOutput, sent


def is_reward_model(model: nn.Module) -> bool:
    """Return whether a Hugging Face model has a linear head for attributes instead of one for the
    vocabulary.
    """
    return isinstance(getattr(model, "score", None), nn.Linear)


def has_score_head(config: Any) -> bool:
    """Return whether this is the configuration of a saved model with a head for attributes."""
    return any("ForSequenceClassification" in kind for kind in config.architectures or ())


class Scorer(PolicyModel):
    """A causal decoder that scores each sequence for each of A attributes at its last token.

    levels: the number of ordinal levels (stars), between which it has thresholds: those of the
    model's configuration, or initially such that all levels are equally likely at a score of 0.
    Raises UserError when the configuration has another number of thresholds.
    """

    def __init__(
        self, model: nn.Module, *, compute: torch.dtype | None = None, levels: int | None = None
    ) -> None:
        super().__init__(model, compute=compute)
        self.cuts: nn.Parameter | None = None
        if levels is not None:
            theta = _first_thresholds(self.causal.config, levels)
            gaps = theta.diff()
            cuts = torch.cat([theta[:1], gaps + (-torch.expm1(-gaps)).log()])  # inverse of softplus
            self.cuts = nn.Parameter(
                cuts.to(self.device, _widen_dtype(next(self.causal.score.parameters()).dtype))
            )

    @property
    def thresholds(self) -> Tensor | None:
        """Ascending theta[levels - 1]: a level is at most k with probability sigmoid(theta_k -
        score).
        """
        cuts: Tensor | None = self.cuts
        if cuts is None:
            return None
        if self.context is not None and self.context.rank:
            # They do not depend on tokens: processes that share tokens would each add the whole
            # gradient.
            cuts = cuts.detach()
        return torch.cat([cuts[:1], cuts[:1] + softplus(cuts[1:]).cumsum(0)])

    def forward(
        self,
        batch: MicroBatch,
        want: Collection[str] = (),
        teacher: TeacherDistributions | None = None,
    ) -> PolicyOutput:
        """Return the scores [S, A] of all sequences; those with requires_grad have a gradient.

        Log-probabilities are 0. Of the further outputs only router_aux_loss is computed. teacher: a
        reward model has none.
        """
        balance = self._router_balance(want)
        if self.packs:
            ends = torch.tensor([batch.segments[leaf][1] - 1 for leaf in batch.leaves])
            states, is_local = self.states(batch, balance).at(sent(ends, self.device))
            score = self._head(states)
            if self.context is not None:
                assert isinstance(is_local, Tensor)
                zeros = score.new_zeros(batch.sequences, score.shape[1])
                score = self.context.sum(zeros.index_put((is_local.nonzero()[:, 0],), score))
        else:
            states = (
                self.states_alone(batch.tokens[path], balance if batch.requires_grad[s] else None)
                for s, path in self._sequences(batch)
            )
            scores = [self._head(hidden)[-1:] for hidden in states]
            score = torch.cat(scores[: batch.sequences])
            score = score + zero_with_gradient(scores[batch.sequences :])
        if not all(batch.requires_grad):
            requires_grad = sent(torch.tensor(batch.requires_grad), score.device)
            score = torch.where(requires_grad[:, None], score, score.detach())
        loss = None if balance is None else balance.loss()
        return PolicyOutput(score.new_zeros(len(batch.tokens)), score=score, router_aux_loss=loss)

    def _outputs(self, tokens: Tensor, at: Tensor | None, **_: Any) -> Tensor:
        hidden = self.states_alone(tokens)
        return self._head(hidden if at is None else hidden[at])

    def _head(self, hidden: Tensor) -> Tensor:
        """Return scores [N, A] of hidden[N, h], in float32 or float64."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.causal.score(hidden.to(_widen_dtype(hidden.dtype)))

    def description(self, scores: Tensor) -> dict[str, Any]:
        """Return the entries of the saved model's configuration: mean and population standard
        deviation of scores[N, A] for each attribute, and the thresholds (None without them).
        """
        scores = scores.double()
        return {
            "reward_mean": scores.mean(0).tolist(),
            "reward_std": scores.std(0, correction=0).tolist(),
            "reward_thresholds": None if self.thresholds is None else self.thresholds.tolist(),
        }


def widen_head(model: Any) -> None:
    """Cast the head of a reward model to float32 unless it is float64."""
    model.score.to(_widen_dtype(model.score.weight.dtype))


def with_padding(
    tokenizer: PreTrainedTokenizerBase, ends: Collection[int], size: int
) -> PreTrainedTokenizerBase:
    """Return a copy that pads on the right with a token that no sequence ends with, or without a
    padding token if there is none.

    transformers reads a score at the last token that is not padding. If the token at the end of a
    turn were padding, it would read the token before.
    ends: tokens that sequences end with. size: number of embeddings of the model, which limits
    additional tokens.
    """
    padded = copy.deepcopy(tokenizer)
    padded.padding_side = "right"
    padded.pad_token = next(_padding_candidates(padded, ends), None)
    if padded.pad_token is None and len(padded) < size:
        padded.add_special_tokens({"pad_token": "<|pad|>"})
    return padded


def _padding_candidates(tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> Iterator[str]:
    """Yield special tokens that may be padding, the best first."""
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    by_preference = sorted(
        added.items(), key=lambda item: ("pad" in item[1].lower(), item[0]), reverse=True
    )
    for token in (tokenizer.pad_token, tokenizer.unk_token, *(token for _, token in by_preference)):
        if (
            token
            and token != tokenizer.bos_token
            and tokenizer.convert_tokens_to_ids(str(token)) not in ends
        ):
            yield str(token)


def _first_thresholds(config: Any, levels: int) -> Tensor:
    """Return the saved thresholds [levels - 1] of a model that was trained on levels, else the
    logits of 1/levels, 2/levels, ...
    """
    saved = getattr(config, "reward_thresholds", None)
    if saved is None:
        return (torch.arange(1, levels, dtype=torch.float64) / levels).logit()
    if len(saved) != levels - 1:
        saved_levels = len(saved) + 1
        raise UserError(
            f"the model was trained on {saved_levels} levels, not {levels}",
            code="levels-mismatch",
            where="loss.levels",
            fix=f"set loss.levels: {saved_levels}",
        )
    return torch.tensor(saved, dtype=torch.float64)


def _widen_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(torch.float32, dtype)
