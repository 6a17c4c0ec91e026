"""The start-up check: which models pack, which run one sequence at a time, and which are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.engine.test_oracle import oracle, sequences
from tests.models import tiny
from valence.engine import attention
from valence.engine.check import plain_batch
from valence.engine.logprobs import Engine
from valence.engine.models import build_policy
from valence.errors import UserError

ALONE = {
    "bloom": "the tokens of one sequence change",
    "mamba": "the tokens of one sequence change",
    "stablelm": "do not tell their attention where the sequences begin",
    "phimoe-window": "a window of 4096 tokens",
    "gpt_oss": "depends on s_aux",
    "phi3-longrope": "depend on the longest sequence",
    "llama-dynamic": "depend on the longest sequence",
}


@pytest.mark.parametrize("kind", ALONE)
def test_an_architecture_that_cannot_pack_runs_one_by_one_and_says_why(kind: str) -> None:
    model = tiny(kind, dtype=torch.float32)
    untouched = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=f"{ALONE[kind]}.*each sequence runs by itself"):
        engine = build_policy(model, dtype=torch.float32).eval()
    assert not engine.packs
    rows = sequences()[::-1]  # the longest first: its length must not stay with the others
    out = engine(plain_batch(rows)).logp
    start = 0
    for row in rows:
        wanted = oracle(copy.deepcopy(untouched), row)
        torch.testing.assert_close(out[start + 1 : start + len(row)].double(), wanted, rtol=1e-4, atol=1e-4)
        start += len(row)


def test_values_of_another_size_than_queries_pack() -> None:
    engine = build_policy(tiny("deepseek_v3", dtype=torch.float32), dtype=torch.float32)
    rows = sequences()
    assert engine.packs
    with engine.stock():
        wanted = torch.cat([torch.cat([torch.zeros(1), oracle(engine.model, row).float()]) for row in rows])
    torch.testing.assert_close(engine(plain_batch(rows)).logp, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoder_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match="BertLMHeadModel is not a causal language model"):
        build_policy(tiny("bert", dtype=dtype), dtype=dtype)


class Leaky(nn.Module):
    """A layer that also gives the last three tokens a little of what the first one gets: causal, but blind to sequences."""

    def __init__(self, inner: nn.Module, share: float) -> None:
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.inner(hidden)
        told = torch.zeros(out.shape[1], 1, dtype=out.dtype)
        told[-3:] = self.share
        return out + told * out[:, :1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_leak_far_below_rounding_is_seen(dtype: torch.dtype) -> None:
    model = tiny(dtype=dtype)
    layer = model.model.layers[0]  # type: ignore[union-attr]
    layer.mlp = Leaky(layer.mlp, 1e-4)  # type: ignore[union-attr, arg-type]
    with pytest.warns(UserWarning, match="the tokens of one sequence change"):
        Engine(model).check_layout()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mistral-window"])
def test_rounding_is_no_leak(kind: str, dtype: torch.dtype) -> None:
    engine = Engine(tiny(kind, dtype=dtype))
    engine.check_layout()
    assert engine.packs


@torch.inference_mode()
def test_the_check_works_where_gradients_are_off() -> None:
    with torch.inference_mode(False):
        model = tiny(dtype=torch.float32)
    Engine(model).check_layout()
    assert all(p.grad is None for p in model.parameters())


def test_a_layer_without_bounds_says_so() -> None:
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(attention.CannotPackError, match="where the sequences begin"):
        attention.packed_attention(nn.Module(), q, q, q, None)


def test_autocast_leaves_plain_products_in_float32() -> None:
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 12, 8, generator=made).bfloat16().requires_grad_() for _ in range(3))
    hidden = torch.ones(12, 12).triu(1).bool()

    def run(autocast: bool) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out: Tensor = attention.Dense.apply(q * 4, k, v, 8**-0.5, None, hidden)  # type: ignore[assignment]
            return out, *torch.autograd.grad(out.float().sum(), (q, k, v))

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))
