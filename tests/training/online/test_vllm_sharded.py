"""Weights that are split over processes reach a real vLLM server: it then is the policy after the
update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import valence
from tests.distributed.process_groups import full
from tests.distributed.process_groups import run as run_in_processes
from tests.rollouts.vllm_server import needs_vllm
from tests.tiny import tiny_tokenizer
from tests.training.online.recipes import make, recipe_without_eval
from valence.distributed.process_group import Group
from valence.rollouts.check import difference
from valence.rollouts.protocol import Sampling
from valence.rollouts.servers import Server
from valence.rollouts.transports import DiskTransfer, GlooTransfer
from valence.rollouts.vllm import VLLMGenerator
from valence.types import Completion

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.timeout(600),
    needs_vllm,
]

CLOSE = 1e-4
"""Nats."""
PROMPTS = [tuple((7 * i + k) % 250 + 5 for i in range(20 + k)) for k in range(4)]
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("sharded")
    # heads of fewer than 32 have no kernel on a CPU
    make(result, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    return result


@pytest.fixture(scope="module")
def servers(place: Path, forking_vllm: str) -> Iterator[dict[str, Server]]:
    """One for each transport that a server on a CPU has for full weights."""

    def start(name: str) -> Server:
        return Server(
            place / "model",
            folder=place / name,
            python=forking_vllm,
            transport=name,
            dtype="float32",
            environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        ).start()

    with ThreadPoolExecutor() as threads:
        starts = {name: threads.submit(start, name) for name in ("disk", "gloo")}
    try:
        yield {name: started.result() for name, started in starts.items()}
    finally:
        for started in starts.values():
            if not started.exception():
                started.result().stop()


def train_and_save(group: Group, recipe: Mapping[str, Any], path: Path) -> list[int]:
    """Train; save the policy's full weights after the first update. Returns the number of its split
    tensors.
    """
    num_split: list[int] = []

    def save(run: Any, record: Mapping[str, Any]) -> None:
        if record["step"] != 1:
            return
        named = dict(run.state.policy.causal.named_parameters())
        num_split.append(sum(isinstance(tensor, DTensor) for tensor in named.values()))
        weights = {name: full(tensor).detach().clone() for name, tensor in named.items()}
        if group.rank == 0:
            save_file(weights, path)

    valence.train(recipe, group=group, quiet=True, callbacks=[save])
    return num_split


def answers(server: Server, transport: Any, model: Any = None) -> list[Completion]:
    """The greedy completions of a server as it is, or with the weights of a model."""
    sampler = VLLMGenerator(server.url, transport, TOKENIZER, end_ids=[1], timeout=120)
    if model is not None:
        sampler.sync(0, lambda: model.named_parameters())
    rows = sampler.generate(PROMPTS, 1, GREEDY)
    sampler.close()
    return [row[0] for row in rows]


@torch.no_grad()
def logps(model: Any, completions: Sequence[Completion]) -> list[list[float]]:
    """Log-probabilities of the tokens, from the logits of transformers."""
    rows = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        logits = model(torch.tensor([[*prompt, *completion.tokens]])).logits[0].double()
        before = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        rows.append(before.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0].tolist())
    return rows


def greedy(model: Any) -> list[tuple[int, ...]]:
    """The greedy completions of transformers."""
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=GREEDY.max_new_tokens,
            do_sample=False,
            eos_token_id=1,
            pad_token_id=0,
        )
        rows.append(tuple(out[0, len(prompt) :].tolist()))
    return rows


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.daily)])
@pytest.mark.parametrize("transport", ["disk", "gloo"])
def test_a_server_is_the_policy_after_an_update(
    transport: str, size: int, place: Path, servers: dict[str, Server]
) -> None:
    server, name = servers[transport], f"{transport} {size}"
    transfer = DiskTransfer(place / f"{name} transfer") if transport == "disk" else GlooTransfer(60)
    old = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32).eval()
    before = answers(server, transfer, old)
    assert [answer.tokens for answer in before] == greedy(old)

    path = place / f"{name}.safetensors"
    recipe = recipe_without_eval(
        place,
        "online_kto",
        model={"lora": None, "dtype": "float32"},
        parallel={"shard": "full"},
        rollout={"engine": "vllm", "url": server.url, "transport": transport, "timeout": 120.0},
        train={"max_steps": 2},  # the second round is sampled with the weights of the first update
        reward="tests.training.online.rewards:by_index",
        run={"dir": str(place / name)},
    )
    ranks = run_in_processes(train_and_save, size, recipe, path, deadline=60.0)
    assert [rank.error for rank in ranks] == [""] * size
    num_matrices = sum(weight.ndim == 2 for weight in old.parameters())
    assert [rank.value for rank in ranks] == [[num_matrices]] * size

    new = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32).eval()
    new.load_state_dict(load_file(path))
    after = answers(server, transfer)
    assert [answer.tokens for answer in after] == greedy(new)
    assert [answer.tokens for answer in after] != [answer.tokens for answer in before]
    sampled = [list(answer.logps) for answer in after]
    assert difference(logps(new, after), sampled) < CLOSE
    assert difference(logps(old, after), sampled) > 100 * CLOSE
