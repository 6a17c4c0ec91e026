"""Scores of whole sequences under a reward model: the decoder and the layouts of the engine, below
a linear head.
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
from valence.models.policy_model import PolicyModel, nothing
from valence.types import MicroBatch, PolicyOutput, sent


def is_reward_model(model: nn.Module) -> bool:
    """Whether a Hugging Face model has a linear head for attributes over its decoder, instead of
    one for the vocabulary.
    """
    return isinstance(getattr(model, "score", None), nn.Linear)


class Scorer(PolicyModel):
    """A causal decoder that gives each sequence a number for each of A attributes, read at its last
    token.

    levels: it also has thresholds between so many levels (stars): those of the model's
    configuration, or else such that all levels are equally likely at a score of 0. Raises UserError
    when the configuration has another number of them.
    """

    def __init__(
        self, model: nn.Module, *, compute: torch.dtype | None = None, levels: int | None = None
    ) -> None:
        super().__init__(model, compute=compute)
        self.cuts: nn.Parameter | None = None
        if levels is not None:
            theta = _first_thresholds(self.causal.config, levels)
            gaps = theta.diff()
            cuts = torch.cat([theta[:1], gaps + (-torch.expm1(-gaps)).log()])  # softplus undone
            self.cuts = nn.Parameter(
                cuts.to(self.device, _wide(next(self.causal.score.parameters()).dtype))
            )

    @property
    def thresholds(self) -> Tensor | None:
        """theta[levels - 1], ascending: a level is at most k with probability s(theta_k -
        score).
        """
        if self.cuts is None:
            return None
        return torch.cat([self.cuts[:1], self.cuts[:1] + softplus(self.cuts[1:]).cumsum(0)])

    def forward(self, batch: MicroBatch, want: Collection[str] = ()) -> PolicyOutput:
        """The scores of all sequences, of which those that train have a gradient.

        Log-probabilities are 0; of what else may be wanted only router_aux_loss is computed.
        """
        balance = self._router_balance(want)
        if self.packs:
            ends = torch.tensor([batch.segments[leaf][1] - 1 for leaf in batch.leaves])
            score = self._head(self.states(batch, balance)[sent(ends, self.device)])
        else:
            states = (
                self.states_alone(batch.tokens[path], balance if batch.requires_grad[s] else None)
                for s, path in self._alone(batch)
            )
            found = [self._head(hidden)[-1:] for hidden in states]
            score = torch.cat(found[: batch.sequences]) + nothing(found[batch.sequences :])
        if not all(batch.requires_grad):
            trains = sent(torch.tensor(batch.requires_grad), score.device)
            score = torch.where(trains[:, None], score, score.detach())
        loss = None if balance is None else balance.loss()
        return PolicyOutput(score.new_zeros(len(batch.tokens)), score=score, router_aux_loss=loss)

    def _outputs(self, tokens: Tensor, at: Tensor | None, **_: Any) -> Tensor:
        hidden = self.states_alone(tokens)
        return self._head(hidden if at is None else hidden[at])

    def _head(self, hidden: Tensor) -> Tensor:
        """[N, A] of hidden[N, h], in float32 at least."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.causal.score(hidden.to(_wide(hidden.dtype)))

    def description(self, scores: Tensor) -> dict[str, Any]:
        """What the configuration of the saved model says about it: mean and (population) standard
        deviation of scores[N, A] for each attribute, and the thresholds (None: it has none).
        """
        scores = scores.double()
        return {
            "reward_mean": scores.mean(0).tolist(),
            "reward_std": scores.std(0, correction=0).tolist(),
            "reward_thresholds": None if self.thresholds is None else self.thresholds.tolist(),
        }


def widen_head(model: Any) -> None:
    """A reward model's head is computed, and trains, in float32 at least."""
    model.score.to(_wide(model.score.weight.dtype))


def with_padding(
    tokenizer: PreTrainedTokenizerBase, ends: Collection[int], size: int
) -> PreTrainedTokenizerBase:
    """A copy that pads on the right, with a token that no sequence ends with; without one when it
    has none to spare.

    transformers reads a score at the last token that is not padding: were that the end of a turn,
    it would read one too early.
    ends: tokens that sequences end with. size: of the model's embedding, where a token more may
    find room.
    """
    made = copy.deepcopy(tokenizer)
    made.padding_side = "right"
    made.pad_token = next(_spare(made, ends), None)
    if made.pad_token is None and len(made) < size:
        made.add_special_tokens({"pad_token": "<|pad|>"})
    return made


def _spare(tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> Iterator[str]:
    """Special tokens that may pad, best first."""
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    others = sorted(
        added.items(), key=lambda item: ("pad" in item[1].lower(), item[0]), reverse=True
    )
    for token in (tokenizer.pad_token, tokenizer.unk_token, *(token for _, token in others)):
        if (
            token
            and token != tokenizer.bos_token
            and tokenizer.convert_tokens_to_ids(str(token)) not in ends
        ):
            yield str(token)


def _first_thresholds(config: Any, levels: int) -> Tensor:
    """[levels - 1] of a model that was trained on levels before, else the logits of 1/levels,
    2/levels, ...
    """
    saved = getattr(config, "reward_thresholds", None)
    if saved is None:
        return (torch.arange(1, levels, dtype=torch.float64) / levels).logit()
    if len(saved) != levels - 1:
        known = len(saved) + 1
        raise UserError(
            f"the model was trained on {known} levels",
            code="levels-mismatch",
            where="loss.levels",
            fix=f"set it to {known}",
        )
    return torch.tensor(saved, dtype=torch.float64)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(torch.float32, dtype)
