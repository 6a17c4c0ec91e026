"""Processes that share the tokens of micro-batches return the results of one: values, gradients,
their norm, and weights after two steps.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.distributed.process_groups import full
from tests.distributed.test_tensor import Case, as_exact, compare, digest, run_on_ranks
from tests.models.test_oracle import PATTERNS, prefix_tree_batch
from tests.prefix_trees import conversations
from tests.tiny_models import tiny
from valence.distributed.context_parallel import ContextParallel, context_parallel
from valence.distributed.fsdp2 import shard
from valence.distributed.process_group import Group, SingleProcess
from valence.errors import UserError
from valence.models import policy_model
from valence.models.build import build_policy
from valence.models.check import check_layout, plain_batch
from valence.models.policy_model import PolicyModel

pytestmark = pytest.mark.dist
slow = pytest.mark.slow

TWO = [
    Case("llama"),
    Case("llama", "lora checkpointed"),
    Case("llama", "full bfloat16 checkpointed"),
    Case("llama", "lora bfloat16"),
    Case("llama", "lora head"),
    Case("llama-tied"),
    Case("qwen2", "lora"),
    Case("qwen3", "full checkpointed"),
    Case("mistral-window"),
    Case("gemma2", "full checkpointed"),
    Case("gemma3"),
    Case("gpt_neox"),
    Case("gpt2"),
    Case("phi3", "lora"),
    Case("granite", "lora", (("attention_bias", True),)),
]
FOUR = [Case("llama"), Case("qwen2", "lora checkpointed"), Case("gemma2", "full bfloat16")]
FEW = [Case("llama"), Case("llama", "lora head"), Case("llama", "full fsdp")]
BOTH = [*FOUR, Case("llama", "full fsdp"), Case("qwen2", "lora fsdp checkpointed")]
SHARDED = [
    Case("llama", "full fsdp"),
    Case("llama-tied", "full fsdp checkpointed"),
    Case("qwen2", "lora fsdp"),
    Case("gemma2", "full fsdp bfloat16"),
]


def built(case: Case, world: Group, group: Group) -> PolicyModel:
    targets = ["q_proj", "down_proj", "lm_head"] if "head" in case.features else "all-linear"
    lora = (
        type("Lora", (), {"rank": 3, "alpha": None, "dropout": 0.0, "targets": targets})
        if "lora" in case.features
        else None
    )
    wide = torch.float32 if "bfloat16" in case.features else torch.float64
    policy = build_policy(
        tiny(case.name, dtype=wide, **dict(case.changes)),
        dtype=case.dtype,
        lora=lora,
        checkpointing="full" if "checkpointed" in case.features else "off",
        check=False,
    )
    for key, p in policy.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(2))
    context_parallel(policy, group, world)
    if "fsdp" in case.features and world.size > 1:
        layers = [m for m in policy.modules() if isinstance(m, GradientCheckpointingLayer)]
        shard(policy, layers, world, compute=policy.compute, sum_every_backward=True)  # type: ignore[arg-type]
    check_layout(policy.eval())
    assert policy.packs
    return policy.train()


def steps(case: Case, world: Group, size: int) -> dict[str, Tensor]:
    """Of two steps, in which each group of ``size`` processes has its share of the rows."""
    data, group = world.split(size, "context")
    policy = built(case, world, group)
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
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
        policy.max_joint_rows = 0  # sequences without a gradient read the keys of a first pass
        out = policy(batch, ("entropy", "sum_sq"))
        assert out.entropy is not None
        assert out.sum_sq is not None
        results |= {
            f"{step} logp": out.logp.detach(),
            f"{step} entropy": out.entropy.detach(),
            f"{step} sum_sq": out.sum_sq,
        }
        (torch.stack([out.logp, out.entropy]) * slopes).sum().backward()
        world.reduce_gradients(list(trained.values()))
        results[f"{step} norm"] = world.norm(list(trained.values()))
        results |= {
            f"{step} grad {name}": full(p.grad) for name, p in trained.items() if p.grad is not None
        }
        optimizer.step()
        optimizer.zero_grad()
    return results | {name: full(p.detach()) for name, p in policy.named_parameters()}


def several(world: Group, size: int, cases: list[Case], multiple: int) -> list[dict[str, Tensor]]:
    policy_model.CPU_TOKEN_MULTIPLE = multiple
    return [steps(case, world, size) for case in cases]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("processes", "size", "cases", "multiple"),
    [
        pytest.param(2, 2, TWO[:1], 2, id="two, quick"),
        pytest.param(2, 2, TWO, 2, id="two", marks=slow),
        pytest.param(2, 2, SHARDED, 16, id="sharded", marks=slow),
        pytest.param(4, 4, FOUR, 2, id="four", marks=slow),
        # Most processes have padding alone.
        pytest.param(4, 4, FEW, 64, id="few tokens", marks=slow),
        pytest.param(4, 2, BOTH, 2, id="other rows too", marks=slow),
    ],
)
def test_processes_that_share_tokens_are_one(
    processes: int, size: int, cases: list[Case], multiple: int
) -> None:
    ranks = run_on_ranks(several, processes, size, cases, multiple)
    for k, case in enumerate(cases):
        expected = steps(case, SingleProcess(), 1)
        assert len({digest(rank[k]) for rank in ranks}) == 1, case
        if case.dtype == torch.bfloat16:
            exact = replace(case, features=case.features.replace("bfloat16", ""))
            as_exact(ranks[0][k], expected, steps(exact, SingleProcess(), 1), case)
        else:  # gemma's norms are in float32
            compare(ranks[0][k], expected, 1e-2 if "gemma" in case.name else 1e-7, case)


# ---------------------------------------------------------------- communication


def gathered(world: Group) -> dict[str, tuple[Tensor, Tensor]]:
    """Tokens of all processes and their gradient, ours and PyTorch's."""
    from torch.distributed.tensor.experimental._context_parallel import flex_cp_allgather

    draw = torch.Generator().manual_seed(world.rank)
    tokens = torch.randn(6, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    slopes = torch.randn(6 * world.size, 3, generator=draw, dtype=torch.float64)
    ours = ContextParallel(world, world).gather(tokens)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    theirs, _ = flex_cp_allgather(tokens, tokens.detach(), 0, name)
    return {
        "values": (ours.detach(), theirs.detach()),
        "gradient": tuple(  # type: ignore[dict-item]
            torch.autograd.grad((values * slopes).sum(), tokens)[0] for values in (ours, theirs)
        ),
    }


@slow
def test_tokens_are_gathered_as_by_pytorch() -> None:
    for rank in run_on_ranks(gathered, 2):
        assert rank["values"][0].equal(rank["values"][1])
        torch.testing.assert_close(*rank["gradient"], rtol=1e-15, atol=1e-15)


# ---------------------------------------------------------------- memory


def saved_bytes(world: Group) -> dict[str, int]:
    """Bytes of activations that this process saves for the backward pass of one long row."""
    policy = build_policy(
        tiny("llama", dtype=torch.float32, max_position_embeddings=2048),
        dtype=torch.float32,
        check=False,
    )
    context_parallel(policy, world, world)
    tokens = torch.randint(3, 97, (1024,), generator=torch.Generator().manual_seed(0))
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    sizes: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        out = policy(plain_batch([tokens]))
    out.logp.sum().backward()
    return {"bytes": sum(sizes.values())}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=slow)])
def test_each_process_saves_a_part_of_the_activations(size: int) -> None:
    """Only keys and values, here 1 KB per token, are saved of all tokens."""
    alone = saved_bytes(SingleProcess())["bytes"]
    keys = 2 * 2 * 2 * 8 * 4 * 1024  # keys and values of two layers, two heads of 8 numbers
    for rank in run_on_ranks(saved_bytes, size):
        assert rank["bytes"] - keys < 1.05 * (alone - keys) / size + keys
        assert rank["bytes"] < (0.6 if size == 2 else 0.4) * alone


# ---------------------------------------------------------------- refused


def refused(world: Group) -> list[tuple[str, str, str]]:
    model = build_policy(tiny("mamba", dtype=torch.float32), dtype=torch.float32, check=False)
    context_parallel(model, world, world)
    with pytest.raises(UserError) as raised:
        check_layout(model.eval())
    with pytest.raises(UserError) as size:
        world.split(3, "context")
    return [(e.value.code, e.value.where or "", e.value.message) for e in (raised, size)]


@slow
def test_models_that_are_not_packed_are_refused() -> None:
    for (code, where, message), size in run_on_ranks(refused, 2):
        assert (code, where) == ("context-unsupported", "parallel.context")
        assert "MambaForCausalLM" in message
        assert size[:2] == ("context-size-mismatch", "parallel.context")
