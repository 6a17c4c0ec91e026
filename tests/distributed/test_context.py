"""Processes that share the tokens of micro-batches return the results of one: values, gradients,
their norm, and weights after two steps.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.distributed.rig import full
from tests.distributed.test_tensor import Case, as_exact, compare, digest, run_on_ranks
from tests.models.test_oracle import PATTERNS, forest_of
from tests.prefix_trees import conversations
from tests.tiny_models import tiny
from valence.distributed.context_parallel import context_parallel
from valence.distributed.fsdp2 import shard
from valence.distributed.process_group import Group, SingleProcess
from valence.models import policy_model
from valence.models.build import build_policy
from valence.models.check import check_layout
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
        batch = forest_of(conversations(), trains)
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
        pytest.param(4, 4, FOUR[:1], 64, id="few tokens", marks=slow),
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
