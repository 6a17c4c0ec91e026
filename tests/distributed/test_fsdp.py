"""With sharded weights, every figure equals that of one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.distributed.cases import Case, full_weights, measure, models, split
from tests.distributed.process_groups import run
from tests.errors import check_error, raises_error
from tests.tiny_models import tiny
from tests.units import objective, units_for
from valence.distributed.process_group import Group, SingleProcess
from valence.errors import out_of_memory
from valence.models.cache import CachedReference
from valence.models.check import check_layout, plain_batch
from valence.models.policy_model import PolicyModel
from valence.training.step import final_out_of_memory, optimizer_step
from valence.types import MicroBatch

pytestmark = pytest.mark.dist
slow = pytest.mark.slow

NARROW = [
    Case("kto", dtype=torch.float32),
    Case("dpo", dtype=torch.float32),
    Case("dpo", dtype=torch.bfloat16),
    Case("kto", lora=True, dtype=torch.bfloat16),
]
ON_FOUR = [
    Case("dpo", shares=True),
    Case("kto", lora=True, follows=True),
    Case("bradley_terry", packs=False),
    Case("aot_unpaired", architecture="llama-tied", checkpointing="full"),
    # One process has no row of these.
    Case("sft", rows=3, lora=True, sum_every_backward=True),
    Case("kto", rows=3),
    Case("bradley_terry", rows=3, reshard=False),
    Case("aot_unpaired", rows=3, lora=True),
    Case("dpo", rows=3, lora=True, packs=False, checkpointing="full"),
]
REPLICATED = [
    replace(case, shard_size=2)
    for case in (
        Case("dpo"),
        Case("dpo", sum_every_backward=True, budget=13),
        Case("kto", lora=True, follows=True),
        Case("kto", rows=3, sum_every_backward=True),
        Case("aot_unpaired", rows=3, lora=True, checkpointing="full", reshard=False),
    )
]
"""Two copies of the weights, each sharded over two processes."""
ON_TWO = [
    Case("kto", follows=True),
    Case("sft", architecture="qwen2"),
    Case("dpo", checkpointing="selective_op"),
    Case("kto", lora=True, dtype=torch.bfloat16, checkpointing="selective_op"),
    Case("aot_unpaired", rows=3, lora=True, checkpointing="selective_op"),
    Case("distill", rows=1),
    Case("distill", lora=True),
    *NARROW,
]
PLAIN = [
    Case("kto", lora=True, follows=True),
    Case("dpo", lora=True, shares=True),
    Case("aot_unpaired", rows=3, lora=True),
]


@pytest.mark.parametrize(("size", "cases", "sharded"), [
    pytest.param(4, ON_FOUR, True, id="4 split", marks=slow),
    pytest.param(4, REPLICATED, True, id="2 x 2 split", marks=slow),
    pytest.param(2, ON_TWO, True, id="2 split", marks=slow),
    pytest.param(4, PLAIN, False, id="4 whole", marks=slow),
])  # fmt: skip
def test_two_steps_of_several_processes_are_those_of_one(
    size: int, cases: list[Case], sharded: bool
) -> None:
    alone = measure(SingleProcess(), cases)
    ranks = run(measure, size, cases, sharded, deadline=60.0)
    assert [rank.error for rank in ranks] == [""] * size
    for case in cases:
        wanted, item = alone[case.name], [rank.value[case.name] for rank in ranks]
        rel, near, far = tolerances(case, wanted)
        for result in item:
            assert result["digests"][0] == wanted["digests"][0], case.name
            for key in ("digests", "steps", "ran", "calls", "followed"):
                assert str(result[key]) == str(item[0][key]), (case.name, key)  # to the last bit
            for one, other in zip(result["steps"], wanted["steps"], strict=True):
                assert one == pytest.approx(other, rel=rel, abs=near, nan_ok=True), case.name
                exact = {key: value for key, value in other.items() if key in ("loss", "norm")}
                assert {key: one[key] for key in exact} == pytest.approx(
                    exact, rel=rel, abs=1e-9
                ), case.name
            assert result["evaluated"] == pytest.approx(wanted["evaluated"], rel=rel, abs=1e-9), (
                case.name
            )
        assert distance(item[0]["weights"], wanted["weights"]) <= far, case.name
        assert sum(outcome["rows"] for outcome in item) == wanted["rows"], case.name


def offloaded(group: Group, cases: list[Case]) -> dict[str, Any]:
    """With what ``parallel.offload`` asks for, but for memory that a device reads by itself: there
    is none.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy

    from valence.distributed import fsdp2

    results: list[CPUOffloadPolicy] = []

    def policy() -> CPUOffloadPolicy:
        results.append(CPUOffloadPolicy(pin_memory=False))
        return results[-1]

    with patch.object(fsdp2, "OffloadPolicy", policy):
        result = measure(group, cases, True)
    assert len(results) >= len(cases)
    return result


@slow
def test_parts_that_wait_in_the_hosts_memory_are_trained_alike() -> None:
    cases = [Case("kto", lora=True, follows=True), Case("dpo")]
    alone, ranks = measure(SingleProcess(), cases), run(offloaded, 2, cases, deadline=60.0)
    assert [rank.error for rank in ranks] == ["", ""]
    for case in cases:
        result, wanted = ranks[0].value[case.name], alone[case.name]
        for one, other in zip(result["steps"], wanted["steps"], strict=True):
            assert one == pytest.approx(other, rel=1e-6, abs=1e-9, nan_ok=True), case.name
        assert distance(result["weights"], wanted["weights"]) <= 1e-9, case.name


def tolerances(case: Case, wanted: Mapping[str, Any]) -> tuple[float, float, float]:
    """Relative and absolute, of numbers; absolute, of weights.

    In float32 a number may be a difference of log-probabilities, and is known to a millionth of
    these.
    """
    if case.dtype == torch.float64:
        return 1e-6, 1e-9, 1e-9
    rel, far = spread(case, wanted)
    if case.dtype == torch.bfloat16:
        return rel, 1e-9, far
    largest = max(
        abs(value)
        for step in wanted["steps"]
        for name, value in step.items()
        if name.startswith("logps/")
    )
    return 1e-6, 1e-6 * largest, far


def spread(case: Case, wanted: Mapping[str, Any]) -> tuple[float, float]:
    """How far, relatively, the numbers of one process are from each other when a step is cut
    otherwise; and how far weights are: twice that, at least two units of the last place of 1.
    """
    rel = far = 0.0
    for budget in (13, 25, 10_000):
        (other,) = measure(SingleProcess(), [replace(case, budget=budget)]).values()
        for one, two in zip(other["steps"], wanted["steps"], strict=True):
            rel = max(
                rel,
                *(
                    abs(one[key] - two[key]) / (abs(two[key]) + 1e-12)
                    for key in two
                    if two[key] == two[key]
                ),
            )
        far = max(far, distance(other["weights"], wanted["weights"]))
    return max(2 * rel, 1e-6), 2 * max(far, torch.finfo(torch.float32).eps)


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def parts(group: Group) -> dict[str, Any]:
    """What an engine is while its weights are split."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    from tests.distributed.process_groups import full
    from valence.distributed.tensor_parallel import local

    case = Case("sft")
    policy, _ = models(case)
    tokens = torch.arange(3, 30)
    batch = plain_batch([tokens[:9], tokens[9:]])
    expected = policy(batch).logp.detach()
    with policy.stock(), torch.no_grad():
        alone = policy.outputs(tokens)
    split(policy, case, group)
    check_layout(policy)
    with policy.stock(), torch.no_grad():
        outputs = policy.outputs(tokens)
        inside = policy.with_gathered_weights(
            lambda: policy.causal(input_ids=tokens[None]).logits[0]
        )
    result = policy(batch).logp
    result.sum().backward()
    weights = dict(policy.named_parameters())
    meta = PolicyModel(tiny().to("meta"))
    split(meta, case, group)
    rotary = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    meta.to_empty(device="cpu")
    with torch.no_grad():
        for name, weight in meta.named_parameters():
            inputs = full(weights[name])
            is_split = isinstance(weight, DTensor)
            weight.copy_(
                distribute_tensor(inputs, weight.device_mesh, weight.placements)
                if is_split
                else inputs
            )
        for name, buffer in meta.named_buffers():
            buffer.copy_(rotary[name])
    return {
        "outputs": distance({"a": outputs, "b": inside}, {"a": alone, "b": alone}),
        "logp": distance({"a": result, "b": meta(batch).logp}, {"a": expected, "b": expected}),
        "packs": policy.packs,
        "split": {name for name, weight in weights.items() if isinstance(weight, DTensor)},
        "own": sum(
            local(weight).numel() for weight in weights.values() if isinstance(weight, DTensor)
        ),
        "all": {name: weight.ndim for name, weight in weights.items()},
    }


def evaluate_with_cache(group: Group, folder: str) -> list[tuple[float, int, int]]:
    """Evaluations with a reference cache per process that is empty, full, or full on rank 0 only.
    Each item is the loss with the hits and misses of the cache.
    """
    case = Case("dpo")
    policy, reference = models(case)
    assert reference is not None
    if group.size > 1:
        for engine in (policy, reference.engine):  # type: ignore[attr-defined]
            split(engine, case, group)
    results: list[tuple[float, int, int]] = []
    for place in (group.rank, group.rank, 0 if group.rank == 0 else 10):
        cached = CachedReference(reference, Path(folder, str(place)), agree=group.any)
        actual = objective("dpo", policy, cached, budget=40)
        actual.group = group
        results.append(
            (
                float(actual.run(units_for("dpo", 7, 0), backward=False).loss),
                cached.hits,
                cached.misses,
            )
        )
    return results


def short(group: Group, sharded: bool) -> list[Any]:
    """A step in which rank 1 runs out of memory in its second micro-batch, and then again with the
    half at once.
    """
    case = Case("kto")
    policy, reference = models(case)
    if sharded:
        for engine in (policy, reference.engine):  # type: ignore[union-attr]
            split(engine, case, group)
    actual = objective("kto", policy, reference, budget=10)
    actual.group = group
    calls = 0

    def fail(_engine: PolicyModel, _batch: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2 and group.rank == 1:
            raise torch.OutOfMemoryError("made up")

    handle = policy.register_forward_pre_hook(fail)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.1)
    messages: list[MicroBatch | None] = []
    message = ""
    try:
        actual.run(units_for("kto", 7, 0), backward=True, progress=messages.append)
    except torch.OutOfMemoryError as error:
        message = str(error) if out_of_memory(error) else ""
    handle.remove()
    actual.micro_batch_tokens = 5
    _, norm, _ = optimizer_step(actual, optimizer, units_for("kto", 7, 0), 1.0)
    return [message, len(messages), norm, full_weights(policy.named_parameters())]


@slow
def test_an_engine_with_split_weights_is_that_engine() -> None:
    one, two = (rank.value for rank in run(parts, 2))
    assert one["packs"]
    assert two["packs"]
    assert max(one["outputs"], one["logp"], two["outputs"], two["logp"]) < 1e-12
    assert one["split"] == {name for name, axes in one["all"].items() if axes > 1}
    assert 0.9 < one["own"] / two["own"] < 1.2


def narrow_products(group: Group) -> dict[str, Any]:
    """The types of float32 weights with products in bfloat16, and the results of one micro-batch,
    the same in each process.
    """
    case = Case("sft", dtype=torch.bfloat16)
    policy, _ = models(case)
    if group.size > 1:
        split(policy, case, group)
    dtypes: dict[str, set[str]] = {"residual stream": set(), "final norm": set()}
    decoder = policy.causal.model
    for name, modules in {"residual stream": decoder.layers, "final norm": [decoder.norm]}.items():
        for module in modules:
            module.register_forward_hook(
                lambda _module, inputs, output, name=name: dtypes[name].update(
                    str(x.dtype) for x in (inputs[0], output)
                )
            )
    tokens = torch.arange(3, 30)
    logp = policy(plain_batch([tokens[:9], tokens[9:]])).logp
    logp.sum().backward()
    grads = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return {
        "dtypes": dtypes,
        "logp": logp.detach(),
        "grads": full_weights(iter(grads.items())),
        "vectors": {name for name, p in policy.named_parameters() if p.ndim < 2},
    }


def test_narrow_products_leave_the_residual_stream_and_the_logits_as_in_one_process() -> None:
    """Weights outside of layers are gathered in float32: in bfloat16 the embedding would round the
    residual stream.
    """
    alone = narrow_products(SingleProcess())
    assert set(map(tuple, alone["dtypes"].values())) == {("torch.float32",)}
    for rank in run(narrow_products, 2):
        assert rank.error == ""
        result = rank.value
        assert result["dtypes"] == alone["dtypes"]
        assert torch.equal(result["logp"], alone["logp"])
        assert result["grads"].keys() == alone["grads"].keys()
        for name, grad in alone["grads"].items():
            # FSDP sums the gradients of matrices over the processes
            total = grad if name in result["vectors"] else 2 * grad
            assert result["grads"][name].dtype == torch.float32
            torch.testing.assert_close(result["grads"][name], total, rtol=1e-6, atol=1e-6)


@slow
def test_processes_agree_whether_a_reference_is_computed(tmp_path: Path) -> None:
    wanted = evaluate_with_cache(SingleProcess(), str(tmp_path / "alone"))[0][0]
    ranks = [rank.value for rank in run(evaluate_with_cache, 2, str(tmp_path))]
    for rank, result in enumerate(ranks):
        assert [loss for loss, _, _ in result] == pytest.approx([wanted] * 3, rel=1e-9)
        (_, hits, misses), (_, again, none), (_, last, more) = result
        # what it takes part in beside its own rows is neither looked up nor kept
        assert (hits, none) == (
            0,
            0,
        )
        assert misses == again == (last if rank == 0 else more)
    assert sum(misses for (_, _, misses), *_ in ranks) == 14


@slow
def test_all_processes_give_up_a_step_when_one_has_no_memory_left() -> None:
    ranks = [rank.value for rank in run(short, 3, False)]
    assert all(text for text, *_ in ranks)
    assert [text == "made up" for text, *_ in ranks] == [False, True, False]
    assert len({message for _, message, *_ in ranks}) == 1
    policy, reference = models(Case("kto"))
    actual = objective("kto", policy, reference, budget=5)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    _, norm, _ = optimizer_step(actual, optimizer, units_for("kto", 7, 0), 1.0)
    for _, _, result, weights in ranks:
        assert result == pytest.approx(norm, rel=1e-9)
        assert distance(weights, full_weights(policy.named_parameters())) < 1e-12


@slow
def test_coupled_processes_report_why_they_end() -> None:
    first, second = run(short, 2, True, deadline=5.0)
    assert first.mistake is not None
    assert second.mistake is not None
    check_error(second.mistake, "out-of-memory", where="train.micro_batch_tokens")
    assert first.mistake.code in ("rank-lost", "rank-late")
    assert "rank 1" in first.mistake.message


def test_out_of_memory_of_a_single_process_raises_the_original_error() -> None:
    policy, reference = models(Case("kto"))
    actual = objective("kto", policy, reference, budget=10)

    def fail(*_: Any) -> None:
        raise MemoryError("made up")

    policy.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError, match="made up"):
        actual.run(units_for("kto", 7, 0), backward=True)
    with raises_error("out-of-memory", where="train.micro_batch_tokens"), final_out_of_memory(True):
        raise MemoryError
