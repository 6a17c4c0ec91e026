"""Hidden states of completions, from which a small classifier can be trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from valence.models.policy_model import PolicyModel, record_outputs
from valence.models.shape import decoder_layers
from valence.types import MicroBatch

DEPTH = 0.75
"""The states are the output of the layer at this share of the model's depth."""


@torch.no_grad()
def completion_states(policy: PolicyModel, batch: MicroBatch, lengths: Sequence[int]) -> Tensor:
    """Return the last hidden state of each completion and the mean over its tokens: [S, 2 h],
    float32, on the CPU.

    lengths[S]: number of tokens of each sequence's completion, at the end of the sequence.
    """
    layers = decoder_layers(policy.causal)
    layer = layers[max(1, round(DEPTH * len(layers))) - 1]
    rows = [batch.rows(s)[-length:] for s, length in enumerate(lengths)]
    if policy.packs:
        with record_outputs(layer) as outputs:
            policy.states(batch)
        packed = _states(outputs[0])
        states = [packed[index] for index in rows]
    else:
        states = []
        for s, length in enumerate(lengths):
            with record_outputs(layer) as outputs:
                policy.states_alone(batch.tokens[batch.rows(s)])
            states.append(_states(outputs[0])[-length:])
    pooled = [torch.cat([x[-1], x.mean(0)]) for x in (s.float() for s in states)]
    return torch.stack(pooled).cpu()


def _states(output: Any) -> Tensor:
    """Return the hidden states [T, h] among the outputs of a decoder layer."""
    return (output[0] if isinstance(output, tuple) else output)[0]
