"""The engine against the oracle: one sequence at a time, unpadded, through the model's own forward,
in float64.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partialmethod
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.prefix_trees import conversations, encoded, sequence_sets, sharing
from tests.tiny_models import ARCHITECTURES, tiny
from valence.batching.micro_batches import make_micro_batch
from valence.batching.prefix_tree import TokenSequence
from valence.models import attention
from valence.models.build import build_policy, build_reference
from valence.models.check import check_layout, plain_batch
from valence.models.compiling import compile_layers
from valence.models.head import TargetLogProb
from valence.models.policy_model import PolicyModel
from valence.types import MicroBatch, TokenizedExample

LENGTHS = (11, 2, 7, 16)


def sequences(vocabulary: int = 97) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (n,), generator=generator) for n in LENGTHS]


def oracle(model: nn.Module, tokens: Tensor) -> Tensor:
    """log p of every token but the first, from nothing but the model's logits: [n-1]."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].double()
    return (logits - torch.logsumexp(logits, -1, keepdim=True))[
        torch.arange(len(tokens) - 1), tokens[1:]
    ]


def gradients(model: nn.Module, value: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_by_one(engine: PolicyModel, batch: MicroBatch) -> Tensor:
    """What the engine should answer [T], each sequence by itself."""
    result = torch.zeros(len(batch.tokens), dtype=torch.float64)
    with engine.stock():
        for s in range(batch.sequences):
            rows = batch.rows(s)
            read = torch.nonzero(batch.loss_mask[rows] & (batch.sequence_ids[rows] == s)).squeeze(1)
            if len(read):
                result = result.index_put(
                    (rows[read],), oracle(engine.model, batch.tokens[rows])[read - 1]
                )
    return result


def compare(engine: PolicyModel, batch: MicroBatch, *, rough: bool = False) -> None:
    """Values, and gradients of what trains, whatever way the sequences that are only measured take.

    Gradients are looser because many models' norms are in float32, which rounds what a shared token
    gets once instead of once for each sequence.
    """
    tolerance = 2e-5 if rough else 1e-12
    slopes = torch.randn(
        len(batch.tokens), generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    wanted = one_by_one(engine, batch)
    trains = torch.tensor(batch.requires_grad)[batch.sequence_ids] & batch.loss_mask
    with engine.stock():
        theirs = gradients(engine.model, (wanted * slopes)[trains].sum()) if trains.any() else {}
    measured = batch.part(requires_grad=False) if not all(batch.requires_grad) else None
    try:
        for extra in (0, 10_000):
            engine.max_joint_rows = extra
            out = engine(batch).logp
            torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance * 10)
            assert out.requires_grad == any(batch.requires_grad)
            ours = gradients(engine.model, (out * slopes).sum()) if trains.any() else {}
            assert ours.keys() == theirs.keys()
            for key in ours:
                torch.testing.assert_close(
                    ours[key],
                    theirs[key],
                    rtol=1e-3 if rough else 1e-6,
                    atol=1e-4 if rough else 1e-6,
                )
    finally:
        engine.max_joint_rows = type(engine).max_joint_rows
    if measured is not None:
        separate = engine(measured).logp
        assert not separate.requires_grad
        torch.testing.assert_close(
            separate.double(), torch.where(trains, 0, wanted), rtol=tolerance, atol=tolerance * 10
        )


def prefix_tree_batch(units: list[TokenizedExample], trains: Sequence[bool] = ()) -> MicroBatch:
    with sharing(4):
        batch = make_micro_batch(units)
    return replace(batch, requires_grad=tuple(trains)) if trains else batch


def policy(name: str, mode: str = "full") -> PolicyModel:
    # its grouped products refuse float64
    dtype = torch.float32 if name == "qwen3_moe" else torch.float64
    lora = (
        type("Lora", (), {"rank": 3, "alpha": None, "dropout": 0.0, "targets": "all-linear"})
        if mode == "lora"
        else None
    )
    engine = build_policy(
        tiny(name, dtype=dtype),
        dtype=dtype,
        lora=lora,
        checkpointing="full" if mode == "checkpointed" else "off",
    )
    assert engine.packs
    for key, p in engine.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(2))
    return engine


FAST = ("llama", "gemma2", "gpt2")
"""Rotary positions and shared keys; local layers and soft-caps; learned positions.

The others have no part that these lack, and are slow tests.
"""


def named(names: Sequence[str], fast: Sequence[str] = FAST) -> list[Any]:
    """Architectures as parameters of a test: those that are not among the fast ones are slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


ROUGH = ("qwen3_moe", "gemma2")  # float32, or a softmax in float32 in the model's own attention
# which sequences train: of a prompt with three answers, of a talk's first and second turn, and of
# two others
PATTERNS = (
    (True, True, True, True, True, True, True),
    (True, False, True, True, False, True, False),
    (False, True, False, False, True, False, True),
)


@pytest.mark.parametrize("name", named(list(ARCHITECTURES)))
@pytest.mark.parametrize("mode", ["full", "lora", "checkpointed", "sdpa"])
def test_a_prefix_tree_equals_one_by_one_in_values_and_gradients(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "sdpa":  # as on devices other than a CPU
        monkeypatch.setattr(attention, "attend_on_cpu", attention.attend_by_sdpa)
    engine = policy(name, mode)
    engine.max_columns = 5  # so that several chunks are crossed
    for trains in PATTERNS:
        batch = prefix_tree_batch(conversations(), trains)
        assert len(batch.tokens) == 60
        compare(engine, batch, rough=name in ROUGH)


@cache
def cached_policy(name: str) -> PolicyModel:
    return policy(name)


@pytest.mark.parametrize(
    "name", named(["llama", "mistral-window", "gemma2", "gpt2"], ["llama", "gemma2"])
)
@settings(max_examples=12)
@given(sequence_sets(), st.integers(1, 4), st.integers(0, 2**7 - 1), st.integers(3, 40))
def test_any_tree_of_prompts_and_completions(
    name: str, token_sequences: list[TokenSequence], min_shared: int, trains: int, stride: int
) -> None:
    """stride: distance between the token ids of distinct letters."""
    assume(any(any(token_sequence.loss_mask) for token_sequence in token_sequences))
    with sharing(min_shared):
        batch = make_micro_batch([encoded(token_sequence) for token_sequence in token_sequences])
    batch = replace(
        batch,
        tokens=3 + stride * batch.tokens,
        requires_grad=tuple(bool(trains >> s & 1) for s in range(len(token_sequences))),
    )
    compare(cached_policy(name), batch, rough=name in ROUGH)


@pytest.mark.parametrize(
    "name", named(["llama", "mistral-window", "qwen3_moe", "gpt2"], ["llama", "qwen3_moe"])
)
def test_one_by_one_equals_the_oracle_for_a_prefix_tree(name: str) -> None:
    engine = policy(name)
    engine.lay_out(packed=False)
    for trains in PATTERNS:
        compare(engine, prefix_tree_batch(conversations(), trains), rough=name in ROUGH)


def test_soft_capping_is_not_left_out_one_by_one() -> None:
    """As SDPA does, where a model asks for it all the same."""
    model: Any = tiny("gemma2")
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        wanted = model(tokens).logits  # by eager attention
        model.config._attn_implementation = "sdpa"
        engine = PolicyModel(model)
        check_layout(engine)
        assert engine.packs
        with engine.stock():
            assert torch.equal(model(tokens).logits, wanted)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*torch.compile.*")
@pytest.mark.parametrize("name", named(["llama", "mistral-window", "gemma2", "gpt2"], ["gemma2"]))
def test_values_as_on_cuda(name: str) -> None:
    """FlexAttention, which has no backward pass on a CPU."""
    engine = policy(name)
    engine.attention_backend = "flex"
    batch = prefix_tree_batch(conversations())
    torch.testing.assert_close(engine(batch).logp, one_by_one(engine, batch), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("extra", [0, 1000])
def test_entropy_is_that_of_the_distribution(packed: bool, extra: int) -> None:
    engine = policy("llama")
    engine.lay_out(packed=packed)
    engine.max_joint_rows = extra
    batch = prefix_tree_batch(conversations(), PATTERNS[1])
    result = engine(batch, ["entropy"]).entropy
    assert result is not None
    assert (result[~batch.loss_mask] == 0).all()
    for s in range(batch.sequences):
        rows = batch.rows(s)
        with engine.stock():
            p = torch.softmax(engine.causal(input_ids=batch.tokens[rows][None]).logits[0], -1)
        read = torch.nonzero(batch.loss_mask[rows] & (batch.sequence_ids[rows] == s)).squeeze(1)
        wanted = torch.distributions.Categorical(p[read - 1]).entropy()
        torch.testing.assert_close(result[rows[read]], wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("llama", "inductor", marks=pytest.mark.slow),
        pytest.param("gemma2", "aot_eager", marks=pytest.mark.slow),
        ("gpt2", "aot_eager"),
    ],
)
def test_compiled_layers_are_the_same_computation(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For batches of several sizes, and for a pass over what another one kept; and none is compiled
    for one size alone.

    How a layer becomes a graph is looked at for each, at no more than the cost of tracing; what is
    made of graphs, which takes a minute where a layer has more to it, for one.
    """
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    engine = policy(name)
    assert compile_layers(engine)
    for times, trains in ((1, PATTERNS[0]), (3, PATTERNS[0] * 3), (2, PATTERNS[1] * 2)):
        batch = prefix_tree_batch(
            [
                replace(u, prompt_ids=(50 + k, *u.prompt_ids[1:]))
                for k in range(times)
                for u in conversations()
            ],
            trains,
        )
        compare(engine, batch, rough=True)
    compiled = counters["stats"]["unique_graphs"]
    compare(
        engine,
        prefix_tree_batch(conversations()[:2] * 5, PATTERNS[0] * 2 + PATTERNS[1][:6]),
        rough=True,
    )
    assert counters["stats"]["unique_graphs"] == compiled, "another size was compiled again"


def test_a_token_of_another_sequence_changes_nothing() -> None:
    engine = PolicyModel(tiny())
    rows = sequences()
    before = engine(plain_batch(rows)).logp
    rows[0] = rows[0].flip(0)
    after = engine(plain_batch(rows)).logp
    assert not torch.equal(before[: LENGTHS[0]], after[: LENGTHS[0]])
    assert torch.equal(before[LENGTHS[0] :], after[LENGTHS[0] :])


@pytest.mark.parametrize("packed", [True, False])
def test_an_adapter_in_bfloat16_starts_at_its_reference_exactly(packed: bool) -> None:
    """Also when activations are computed again; and gradients are those of the run that keeps
    them.
    """
    lora = type("Lora", (), {"rank": 3, "alpha": None, "dropout": 0.0, "targets": "all-linear"})
    results: list[dict[str, Tensor]] = []
    for checkpointing in ("off", "full"):
        torch.manual_seed(0)
        policy = build_policy(
            tiny(dtype=torch.float32), dtype=torch.bfloat16, lora=lora, checkpointing=checkpointing
        )
        policy.lay_out(packed=packed)
        batch = plain_batch(sequences())
        logp = policy(batch).logp
        assert logp.dtype == torch.float32
        assert torch.equal(logp, build_reference(policy, fresh_adapter=True)(batch))
        results.append(gradients(policy.model, logp.sum()))
    assert results[0].keys() == results[1].keys()
    assert {p.dtype for p in results[0].values()} == {torch.float32}
    for key in results[0]:
        torch.testing.assert_close(results[0][key], results[1][key], rtol=1e-6, atol=1e-8, msg=key)


def test_bfloat16_over_float32_masters_keeps_float32_logits() -> None:
    """Masters stay float32; log-probabilities come out in float32 and near those of the float32
    model.
    """
    exact = PolicyModel(tiny(dtype=torch.float32))(plain_batch(sequences())).logp
    engine = build_policy(tiny(dtype=torch.float32), dtype=torch.bfloat16)
    out = engine(plain_batch(sequences())).logp
    assert {p.dtype for p in engine.parameters()} == {torch.float32}
    assert out.dtype == torch.float32
    assert 0 < (out - exact).abs().max() < 0.3


def test_rounding_does_not_add_up_over_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, target = (
        torch.randn(36, 49152, generator=generator) * 4,
        torch.randint(0, 49152, (36,), generator=generator),
    )
    exact = torch.log_softmax(logits.double(), -1).gather(1, target[:, None]).squeeze(1)
    result: Any = TargetLogProb.apply(logits, target)
    assert abs((result.double() - exact).sum()) < 2e-5


def test_the_slope_of_a_log_probability() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(TargetLogProb.apply, (logits, torch.tensor([3, 0, 10, 3, 7])))
