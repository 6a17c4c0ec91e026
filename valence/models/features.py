"""Hidden states of completions, from which a small classifier can be trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from valence.models.policy_model import PolicyModel, said_by
from valence.models.shape import decoder_layers
from valence.types import MicroBatch

DEPTH = 0.75
"""The states are the output of the layer at this share of the model's depth."""


@torch.no_grad()
def completion_states(policy: PolicyModel, batch: MicroBatch, lengths: Sequence[int]) -> Tensor:
    """The last hidden state of each completion and the mean over its tokens: [S, 2 h], float32, on
    the CPU.

    lengths[S]: tokens of each sequence's completion, with which the sequence ends.
    """
    layers = decoder_layers(policy.causal)
    layer = layers[max(1, round(DEPTH * len(layers))) - 1]
    rows = [batch.rows(s)[-length:] for s, length in enumerate(lengths)]
    if policy.packs:
        with said_by(layer) as outputs:
            policy.states(batch)
        packed = _states(outputs[0])
        states = [packed[each] for each in rows]
    else:
        states = []
        for s, length in enumerate(lengths):
            with said_by(layer) as outputs:
                policy.states_alone(batch.tokens[batch.rows(s)])
            states.append(_states(outputs[0])[-length:])
    pooled = [torch.cat([each[-1], each.mean(0)]) for each in (s.float() for s in states)]
    return torch.stack(pooled).cpu()


def _states(output: Any) -> Tensor:
    """[T, h] of what a decoder layer returns."""
    return (output[0] if isinstance(output, tuple) else output)[0]
