"""Tensor-parallel processes return the results of one: values, gradients, their norm, and weights
after two steps.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.distributed import jobs, process_groups
from tests.distributed.process_groups import full
from tests.errors import check_error, raises_error
from tests.models.test_head import VARIANTS, VOCABULARY, make_layer, make_rows, objective, oracle
from tests.models.test_oracle import PATTERNS, prefix_tree_batch
from tests.models.test_scores import reward_model
from tests.prefix_trees import conversations
from tests.tiny_models import tiny
from valence.distributed.fsdp2 import shard
from valence.distributed.process_group import Group, SingleProcess
from valence.distributed.tensor_parallel import (
    GatheredColumnParallelLinear,
    convert_layer,
    tensor_parallel,
)
from valence.errors import UserError
from valence.models.build import build_policy
from valence.models.check import check_layout
from valence.models.head import Head
from valence.models.policy_model import PolicyModel
from valence.models.reference import AdapterDisabledReference, FrozenReference

pytestmark = pytest.mark.dist
slow = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    name: str
    features: str = "full"
    """Several of full, lora, head (has an adapter too), checkpointed, bfloat16, one by one,
    fsdp.
    """
    changes: tuple[tuple[str, Any], ...] = ()
    """To the tiny model's configuration."""

    def __str__(self) -> str:
        return "-".join(
            [self.name, self.features.replace(" ", "-"), *(name for name, _ in self.changes)]
        )

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if "bfloat16" in self.features else torch.float64


UNTIED = (("tie_word_embeddings", False),)
TWO = [
    Case("llama"),
    Case("llama", "lora checkpointed"),
    Case("llama", "full bfloat16 checkpointed"),
    Case("llama", "lora bfloat16"),
    Case("llama", "lora head"),
    Case("llama-tied"),
    Case("llama-tied", "lora"),
    Case("llama", "full one by one"),
    Case("qwen2"),
    Case("qwen2", "lora"),
    Case("gemma2", "full checkpointed"),
    Case("gemma2", "full", UNTIED),
    Case("gpt_neox"),
    Case("qwen3", "full checkpointed"),
    Case("gemma3"),
    Case("phi3", "lora"),
    Case("cohere"),
    Case("granite", "lora", (("attention_bias", True),)),
]
ALL_HEADS = (("num_key_value_heads", 4),)
FOUR = [
    Case("llama", "full", ALL_HEADS),
    Case("qwen2", "lora", ALL_HEADS),
    Case("gemma2", "full", ALL_HEADS),
]
BOTH = [
    Case("llama"),
    Case("qwen2", "lora"),
    Case("llama", "full fsdp"),
    Case("qwen2", "lora fsdp checkpointed"),
    Case("gemma2", "full fsdp bfloat16"),
]


def built(case: Case, data: Any, group: Group) -> PolicyModel:
    targets = ["q_proj", "down_proj", "lm_head"] if "head" in case.features else "all-linear"
    lora = (
        type("Lora", (), {"rank": 3, "alpha": None, "dropout": 0.0, "targets": targets})
        if "lora" in case.features
        else None
    )
    wide = torch.float32 if "bfloat16" in case.features else torch.float64
    checkpointing = "full" if "checkpointed" in case.features else "off"
    model = tiny(case.name, dtype=wide, **dict(case.changes))
    engine = build_policy(
        model, dtype=case.dtype, lora=lora, checkpointing=checkpointing, check=False
    )
    for key, p in engine.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(2))
    tensor_parallel(engine.model, group)
    check_layout(engine.eval())
    assert engine.packs
    engine.train()
    engine.max_columns = 7  # so that there are several ranges
    if "fsdp" in case.features and data.size > 1:
        layers = [
            module for module in engine.modules() if isinstance(module, GradientCheckpointingLayer)
        ]
        shard(engine, layers, data, compute=engine.compute, sum_every_backward=True)
    if "one by one" in case.features:
        engine.lay_out(packed=False)
    return engine


def steps(case: Case, data: Group, group: Group) -> dict[str, Tensor]:
    """Of two steps, in which each data process has its share of the rows."""
    engine = built(case, data, group)
    trained = {name: p for name, p in engine.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, foreach=False)
    results: dict[str, Tensor] = {}
    for step, trains in enumerate(PATTERNS[:2]):
        batch = prefix_tree_batch(conversations(), trains)
        # some are padding, whose embedding does not train
        batch = replace(batch, tokens=batch.tokens % 19)
        slopes = torch.randn(
            2, len(batch.tokens), generator=torch.Generator().manual_seed(3), dtype=torch.float64
        )
        slopes[:, batch.sequence_ids % data.size != data.rank] = 0
        out = engine(batch, ("entropy", "sum_sq"))
        assert out.entropy is not None
        assert out.sum_sq is not None
        results |= {
            f"{step} logp": out.logp.detach(),
            f"{step} entropy": out.entropy.detach(),
            f"{step} sum_sq": out.sum_sq,
        }
        (torch.stack([out.logp, out.entropy]) * slopes).sum().backward()
        data.reduce_gradients(list(trained.values()))
        results[f"{step} norm"] = data.norm(list(trained.values()))
        results |= {
            f"{step} grad {name}": full(p.grad) for name, p in trained.items() if p.grad is not None
        }
        optimizer.step()
        optimizer.zero_grad()
    return results | {name: full(p.detach()) for name, p in engine.named_parameters()}


def several(world: Group, tensor: int, cases: list[Case]) -> list[dict[str, Tensor]]:
    data, group = world.split(tensor)
    return [steps(case, data, group) for case in cases]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("size", "tensor", "cases"),
    [
        pytest.param(2, 2, TWO[:1], id="two, quick"),
        pytest.param(2, 2, TWO, id="two", marks=slow),
        pytest.param(4, 4, FOUR, id="four", marks=slow),
        pytest.param(4, 2, BOTH, id="both", marks=slow),
    ],
)
def test_processes_that_share_products_are_one(size: int, tensor: int, cases: list[Case]) -> None:
    ranks = run_on_ranks(several, size, tensor, cases)
    for k, case in enumerate(cases):
        wanted = steps(case, SingleProcess(), SingleProcess())
        assert len({digest(rank[k]) for rank in ranks}) == 1, case
        if case.dtype == torch.bfloat16:
            as_exact(
                ranks[0][k],
                wanted,
                steps(
                    replace(case, features=case.features.replace("bfloat16", "")),
                    SingleProcess(),
                    SingleProcess(),
                ),
                case,
            )
        else:  # gemma's norms are in float32
            compare(ranks[0][k], wanted, 1e-2 if "gemma" in case.name else 1e-7, case)


def as_exact(
    results: dict[str, Tensor], one: dict[str, Tensor], exact: dict[str, Tensor], case: Case
) -> None:
    """Of the first step: rounding more than in one process is not what processes share."""
    assert results.keys() == one.keys(), case
    for name in (name for name in exact if name.startswith("0 ")):
        off, allowed = ((item[name] - exact[name]).double().norm() for item in (results, one))
        assert off <= 2 * allowed + 1e-2 * exact[name].norm(), (case, name, off, allowed)


def run_on_ranks(job: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """What each process gives."""
    ranks = process_groups.run(job, size, *args, deadline=60.0)
    assert [rank.error for rank in ranks] == [""] * size
    assert [rank.code for rank in ranks] == [0] * size
    return [rank.value for rank in ranks]


def digest(results: dict[str, Tensor]) -> str:
    """Of all bits."""
    result = hashlib.sha256()
    for name, value in results.items():
        result.update(
            name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return result.hexdigest()


def compare(
    results: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float, about: Any
) -> None:
    assert results.keys() == wanted.keys(), about
    for name, value in wanted.items():
        far = float((results[name] - value).double().norm() / value.double().norm().clamp_min(1e-9))
        assert far <= tolerance, (about, name, far)


# ---------------------------------------------------------------- the head


def heads(group: Group, dtype: torch.dtype, vocabulary: int) -> dict[str, Tensor]:
    """Values and gradients of all variants of the head, gathered."""
    results: dict[str, Tensor] = {}
    for name, variant in VARIANTS.items():
        settings: dict[str, Any] = dict(variant)
        linear = make_layer(dtype, bool(settings.pop("bias", False)), vocabulary)
        if group.size > 1:
            convert_layer(linear, GatheredColumnParallelLinear, 0, group)  # type: ignore[arg-type]
        for entropy in (False, True):
            hidden, target = make_rows(dtype, vocabulary=vocabulary)
            result = Head(linear, **settings, max_columns=7)
            values = result(hidden, target, entropy)
            leaves = {"hidden": hidden} | dict(linear.named_parameters())
            slopes = torch.autograd.grad(objective(*values, entropy=entropy), list(leaves.values()))
            remaining = {
                "logp": values[0],
                "entropy": values[1],
                "sum_sq": result.sum_sq(hidden),
            } | dict(zip(leaves, slopes, strict=True))
            results |= {
                f"{name} {entropy} {key}": full(value.detach())
                for key, value in remaining.items()
                if value is not None
            }
        with torch.no_grad():  # as the model's own forward calls it
            results[f"{name} logits"] = linear(hidden)
    return results


DTYPES = {torch.float64: 1e-12, torch.float32: 1e-6}


def shared_heads(world: Group, vocabulary: int) -> list[dict[str, Tensor]]:
    _, group = world.split(world.size)
    return [heads(group, dtype, vocabulary) for dtype in DTYPES]


@slow
@pytest.mark.parametrize(("size", "vocabulary"), [(2, VOCABULARY), (4, 37)])
def test_a_shared_head_is_the_whole_one(size: int, vocabulary: int) -> None:
    assert vocabulary % size
    ranks = run_on_ranks(shared_heads, size, vocabulary)
    for k, (dtype, tolerance) in enumerate(DTYPES.items()):
        assert len({digest(rank[k]) for rank in ranks}) == 1
        compare(ranks[0][k], heads(SingleProcess(), dtype, vocabulary), tolerance, dtype)
    for name, variant in VARIANTS.items():
        settings: dict[str, Any] = dict(variant)
        complete = Head(
            make_layer(bias=bool(settings.pop("bias", False)), vocabulary=vocabulary), **settings
        )
        wanted = oracle(complete, *make_rows(vocabulary=vocabulary), entropy=True)
        for key, value in zip(
            ("logp", "entropy", "hidden", "weight", "bias"), wanted, strict=False
        ):
            torch.testing.assert_close(
                ranks[0][0][f"{name} True {key}"], value, rtol=1e-12, atol=1e-12
            )


class Largest(TorchDispatchMode):
    """The numbers in the largest tensor that any operation gives."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = [
            item
            for item in (out if isinstance(out, tuple | list) else (out,))
            if isinstance(item, Tensor)
        ]
        self.count = max(
            [
                self.count,
                *(
                    item.to_local().numel() if hasattr(item, "to_local") else item.numel()
                    for item in results
                ),
            ]
        )
        return out


WIDE = Case("llama", "full", (("vocab_size", 4001),))


def counted(world: Group) -> tuple[int, int, int]:
    """The largest tensor of a forward and backward run, and the sums over processes in each."""
    _, group = world.split(world.size)
    engine = built(WIDE, SingleProcess(), group)
    engine.max_columns = 64
    sums = [0]
    actual = type(group).sum

    def sum_(self: Any, values: Tensor) -> Tensor:
        sums[0] += 1
        return actual(self, values)

    type(group).sum = sum_  # type: ignore[method-assign]
    with Largest() as largest:
        out = engine(prefix_tree_batch(conversations())).logp
        forward = sums[0]
        out.sum().backward()
    return largest.count, forward, sums[0] - forward


@slow
def test_the_head_is_never_whole() -> None:
    for largest, forward, backward in run_on_ranks(counted, 2):
        assert largest <= -(-4001 // 2) * 32  # its own part of the weight, and of its gradient
        assert forward == 1 + 2 * 2 + 1  # embedding, attention and feed-forward of two layers, head
        assert backward == 2 * 2 + 1  # queries, keys and values share theirs


# ---------------------------------------------------------------- references, reward models,
# mistakes


def others(group: Group) -> dict[str, Tensor]:
    """What a reference says, and a reward model."""
    batch = prefix_tree_batch(conversations())
    policy = built(Case("llama", "lora checkpointed"), SingleProcess(), group)
    separate = FrozenReference(copy.deepcopy(policy))
    results = {
        "off": AdapterDisabledReference(policy)(batch),
        "copy": separate(batch),
        "policy": policy(batch).logp.detach(),
    }
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1.5)
    results |= {"copy after": separate(batch), "off after": AdapterDisabledReference(policy)(batch)}
    scorer = build_policy(reward_model(attributes=2), dtype=torch.float64, check=False)
    tensor_parallel(scorer.model, group)
    check_layout(scorer.eval())
    out = scorer(batch).score
    assert out is not None
    (out * torch.arange(1, 1 + out.numel()).view_as(out)).sum().backward()
    prompt = batch.tokens[None, :5]
    with policy.stock():
        results["sampled"] = policy.causal.generate(
            prompt, do_sample=False, max_new_tokens=8, attention_mask=torch.ones_like(prompt)
        )
    return (
        results
        | {"score": out.detach()}
        | {n: full(p.grad) for n, p in scorer.named_parameters() if p.grad is not None}
    )


def shared_others(world: Group) -> dict[str, Tensor]:
    return others(world.split(world.size)[1])


@slow
def test_references_and_reward_models() -> None:
    ranks = run_on_ranks(shared_others, 2)
    assert digest(ranks[0]) == digest(ranks[1])
    compare(ranks[0], others(SingleProcess()), 1e-10, "references")
    assert ranks[0]["copy"].equal(ranks[0]["policy"])
    assert ranks[0]["copy"].equal(ranks[0]["copy after"])
    assert not ranks[0]["off"].equal(ranks[0]["copy"])


def mistakes(world: Group) -> list[tuple[str, str, str]]:
    def mistake(action: Callable[..., Any], *args: Any) -> tuple[str, str, str]:
        with pytest.raises(UserError) as raised:
            action(*args)
        return raised.value.code, raised.value.where or "", raised.value.message

    _, group = world.split(4)
    models = (
        tiny("gpt2"),
        tiny("qwen3_moe"),
        tiny("llama"),
        tiny("llama", num_key_value_heads=4, intermediate_size=50),
    )
    return [mistake(world.split, 3), *(mistake(tensor_parallel, model, group) for model in models)]


MISTAKES = (
    ("tensor-size-mismatch", ("4", "3")),
    ("tensor-plan-missing", ("GPT2LMHeadModel",)),
    ("tensor-unsupported", ("Qwen3MoeForCausalLM", "moe_tp_experts")),
    ("tensor-heads-uneven", ("4 attention heads", "2")),
    ("tensor-layer-uneven", ("50", "model.layers.0.mlp.gate_proj")),
)
"""The codes, and what the sentences name."""


@slow
def test_models_that_cannot_be_shared_are_mistakes() -> None:
    for result in run_on_ranks(mistakes, 4):
        for (code, where, kind), (expected, names) in zip(result, MISTAKES, strict=True):
            assert (code, where) == (expected, "parallel.tensor"), kind
            assert [name for name in names if name not in kind] == []


def test_one_process_cannot_share_layers() -> None:
    with raises_error("tensor-size-mismatch", where="parallel.tensor"):
        SingleProcess().split(2)
    assert all(isinstance(group, SingleProcess) for group in SingleProcess().split(1))


# ---------------------------------------------------------------- parts of a group


def parts(world: Group) -> list[dict[str, Any]]:
    results = [jobs.members(part) for part in (*world.split(2), world)]
    alone, complete = world.split(4)
    assert (alone.size, complete.size) == (1, 4)
    assert float(alone.sum(torch.tensor(2.0))) == 2.0
    assert world.split(1)[0] is world
    return results


@slow
def test_parts_are_groups() -> None:
    ranks = run_on_ranks(parts, 4)
    for name, actual in jobs.summands(0).items():
        if name != "nothing":
            for result, _, _ in ranks:
                torch.testing.assert_close(result[f"sum {name}"], actual + jobs.summands(1)[name])
    for rank, (data, tensor, world) in enumerate(ranks):
        assert data["place"] == (rank // 2, 2, rank)
        assert tensor["place"] == (rank % 2, 2, rank)
        assert world["place"] == (rank, 4, rank)
        for result in (data, tensor):
            torch.testing.assert_close(
                result["gather equal"], torch.cat([jobs.parts(0)["equal"], jobs.parts(1)["equal"]])
            )
            torch.testing.assert_close(result["grad 4"], jobs.parameters(0)[4].grad)
            assert result["broadcast"] == jobs.JSON | {"pair": [1, 2]}
            assert result["any"] == [True, False, True]


def stays_away(world: Group, folder: str) -> None:
    """In the second half of the processes, rank 3 of all does not come to the second sum."""
    _, group = world.split(2)
    group.sum(torch.ones(1))
    timeout_file = Path(folder, "given up")
    if world.rank == 2:
        with jobs.noted_end(folder, "given up"):
            group.sum(torch.ones(1))
    process_groups.wait_for(timeout_file)  # what the processes know of each other is with rank 0


@slow
def test_a_missing_process_of_a_subgroup_is_named_by_its_global_rank(tmp_path: Path) -> None:
    ended = process_groups.run(stays_away, 4, str(tmp_path), deadline=2.0)
    assert [item.error for item in ended[:2]] == ["", ""]
    mistake = ended[2].mistake
    assert mistake is not None
    check_error(mistake, "rank-late", where="rank 2")
    assert [
        part for part in ("rank 3 ", "`sum` #2", "`sum` #1") if part not in mistake.message
    ] == []
