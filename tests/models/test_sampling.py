"""Answers sampled from the policy in this process."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence.models.build import build_policy
from valence.models.check import plain_batch
from valence.rollouts import HFGenerator, Sampling, kv

LORA = SimpleNamespace(rank=4, alpha=8, dropout=0.0, targets="all-linear")
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12, 13, 14)]


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("lora", "narrow"), [(None, False), (None, True), (LORA, True)])
def test_answers_come_from_the_products_of_training(name: str, lora: Any, narrow: bool) -> None:
    """In bfloat16, keys and values too; but on a CPU float32 masters are multiplied as they are
    (elsewhere: ``narrow``).
    """
    tokenizer = tiny_tokenizer()
    engine = build_policy(
        tiny(name, vocab_size=len(tokenizer), dtype=torch.float32), dtype=torch.bfloat16, lora=lora
    )
    before = [weights.clone() for weights in engine.parameters()]
    products, caches = set[torch.dtype](), list[Any]()
    for module in engine.modules():
        if isinstance(module, nn.Linear) and module is not engine.causal.get_output_embeddings():
            module.register_forward_hook(lambda _module, _inputs, out: products.add(out.dtype))
    engine.causal.register_forward_hook(
        lambda _module, _inputs, out: caches.append(out.past_key_values)
    )
    result: Any = engine.model
    with engine.sampling(), engine.autocast() if narrow else nullcontext():
        rows = HFGenerator(result, tokenizer).generate(PROMPTS, 3, Sampling(max_new_tokens=12))
    assert products == {torch.bfloat16 if narrow else torch.float32}
    roomy = [layer for layer in caches[-1].layers if isinstance(layer, kv.PreallocatedLayer)]
    assert {part.dtype for layer in roomy for part in (layer.keys, layer.values)} == products
    for prompt, answers in zip(PROMPTS, rows, strict=True):
        for answer in answers:
            outcome = engine(plain_batch([torch.tensor(prompt + answer.tokens)])).logp[
                len(prompt) :
            ]
            assert outcome.tolist() == pytest.approx(
                answer.logps, abs=0.02 if lora or not narrow else 0.1
            )
    assert all(
        torch.equal(one, other) for one, other in zip(engine.parameters(), before, strict=True)
    )
