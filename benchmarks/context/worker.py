"""One process of the benchmark: a forward and backward pass of one row, and the bytes it saves."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from valence.distributed.context_parallel import context_parallel
from valence.distributed.process_group import Group, start
from valence.models.build import build_policy
from valence.models.check import plain_batch

WIDTH, HEADS, KEY_HEADS, VOCABULARY = 512, 8, 2, 4096


def measure(group: Group, tokens: int, layers: int, mode: Any) -> dict[str, float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=tokens,
    )
    model: Any = LlamaForCausalLM(config)
    policy = build_policy(model, dtype=torch.float32, checkpointing=mode, check=False)
    context_parallel(policy, group, group)
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    saved: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    # The head keeps as many probabilities as fit into a cache, for any number of processes.
    batch = plain_batch([torch.randint(0, VOCABULARY, (tokens,))])
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        hidden = policy.states(batch).states
    loss = -policy(batch).logp.mean()
    loss.backward()
    parameters = list(policy.parameters())
    group.reduce_gradients(parameters)
    keys = 2 * KEY_HEADS * (WIDTH // HEADS) * tokens * 4 * layers if mode == "off" else 0
    return {
        "saved": sum(saved.values()),
        "keys": keys,
        "rows": len(hidden),
        "loss": float(loss.detach()),
        "norm": float(group.norm(parameters)),
    }


if __name__ == "__main__":
    group = start(device="cpu")
    result = measure(group, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    note = Path(os.environ["VALENCE_NOTES"]) / f"rank-{group.rank}.json"
    note.write_text(json.dumps(result))
    group.close()
