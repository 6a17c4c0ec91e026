"""The start-up check: which models pack, which run one sequence at a time, and which are
refused.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.errors import raises_error
from tests.models.test_oracle import oracle, sequences
from tests.tiny_models import tiny
from valence.models.attention import KeyValueMemory
from valence.models.build import build_policy
from valence.models.check import FIRST_END, PROMPT_END, PackingWarning, check_layout, plain_batch
from valence.models.policy_model import PolicyModel

ALONE = {
    "bloom": "sequences-leak",
    "mamba": "sequences-leak",
    "stablelm": "sequences-unmarked",
    "phimoe-window": "windows-differ",
    "gpt_oss": "attention-input-unknown",
    "phi3-longrope": "rotary-by-length",
    "llama-dynamic": "rotary-by-length",
}


def codes(warned: pytest.WarningsRecorder) -> list[str]:
    """Why models run one sequence at a time."""
    return [item.message.code for item in warned if isinstance(item.message, PackingWarning)]


@pytest.mark.parametrize("kind", ALONE)
def test_an_architecture_without_packing_runs_one_by_one_with_a_reason(kind: str) -> None:
    model = tiny(kind, dtype=torch.float32)
    untouched = copy.deepcopy(model)
    with pytest.warns(PackingWarning) as warned:
        engine = build_policy(model, dtype=torch.float32).eval()
    assert codes(warned) == [ALONE[kind]]
    assert not engine.packs
    rows = sequences()[::-1]  # the longest first: its length must not stay with the others
    out = engine(plain_batch(rows)).logp
    start = 0
    for row in rows:
        wanted = oracle(copy.deepcopy(untouched), row)
        torch.testing.assert_close(
            out[start + 1 : start + len(row)].double(), wanted, rtol=1e-4, atol=1e-4
        )
        start += len(row)


def test_values_of_another_size_than_queries_pack() -> None:
    engine = build_policy(tiny("deepseek_v3", dtype=torch.float32), dtype=torch.float32)
    rows = sequences()
    assert engine.packs
    with engine.stock():
        wanted = torch.cat(
            [torch.cat([torch.zeros(1), oracle(engine.model, row).float()]) for row in rows]
        )
    torch.testing.assert_close(engine(plain_batch(rows)).logp, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoder_is_refused(dtype: torch.dtype) -> None:
    with raises_error("model-not-causal", where="model.name"):
        build_policy(tiny("bert", dtype=dtype), dtype=dtype)


class Leaky(nn.Module):
    """A layer that also gives four rows a little of what an earlier one gets: causal, but blind to
    sequences.
    """

    def __init__(self, inner: nn.Module, share: float) -> None:
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.inner(hidden)
        messages = torch.zeros(out.shape[1], 1, dtype=out.dtype)
        messages[FIRST_END + 6 : FIRST_END + 10] = self.share
        return out + messages * out[:, PROMPT_END + 2, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_leak_far_below_rounding_is_seen(dtype: torch.dtype) -> None:
    model = tiny(dtype=dtype)
    layer = model.model.layers[0]  # type: ignore[union-attr]
    layer.mlp = Leaky(layer.mlp, 1e-4)  # type: ignore[union-attr, arg-type]
    with pytest.warns(PackingWarning) as warned:
        check_layout(PolicyModel(model))
    assert codes(warned) == ["sequences-leak"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mistral-window"])
def test_rounding_is_no_leak(kind: str, dtype: torch.dtype) -> None:
    engine = PolicyModel(tiny(kind, dtype=dtype))
    check_layout(engine)
    assert engine.packs


@torch.inference_mode()
def test_the_check_works_where_gradients_are_off() -> None:
    with torch.inference_mode(False):
        model = tiny(dtype=torch.float32)
    check_layout(PolicyModel(model))
    assert all(p.grad is None for p in model.parameters())


def test_a_second_pass_that_reads_something_else_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    remaining = KeyValueMemory.__call__

    def shuffled(self: KeyValueMemory, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_reading:
            key_, value_ = self.layers[self.next_layer]
            self.layers[self.next_layer] = key_.flip(2), value_
        return remaining(self, key, value)

    monkeypatch.setattr(KeyValueMemory, "__call__", shuffled)
    with pytest.warns(PackingWarning) as warned:
        check_layout(PolicyModel(tiny(dtype=torch.float32)))
    assert codes(warned) == ["layouts-differ"]


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_table_of_few_positions_is_not_read_beyond_its_end(kind: str) -> None:
    """Filling a pass up to a round number of tokens needs no positions that the model does not
    have.
    """
    engine = PolicyModel(tiny(kind, dtype=torch.float32, max_position_embeddings=24))
    check_layout(engine)
    assert engine.packs
    rows = sequences()
    with engine.stock():
        wanted = torch.cat(
            [torch.cat([torch.zeros(1), oracle(engine.model, row).float()]) for row in rows]
        )
    torch.testing.assert_close(engine(plain_batch(rows)).logp, wanted, rtol=1e-4, atol=1e-4)
