"""Models that are sharded during construction equal those of one process, and no process ever holds
all weights.
"""

from __future__ import annotations

import re
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed.process_groups import full, run
from tests.errors import check_error, raises_error
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence.config.load import load_recipe
from valence.config.schema import LoraSettings
from valence.distributed.process_group import Group, PlannedGroup, SingleProcess
from valence.distributed.tensor_parallel import local
from valence.models import build as model_build
from valence.models.build import build_policy, load_model
from valence.models.check import plain_batch
from valence.models.memory import Split
from valence.models.policy_model import PolicyModel
from valence.models.reference import FrozenReference, Reference, SyncedReference
from valence.training import models as building
from valence.training import plan as planning
from valence.training.memory import can_compile, choose_split, min_free_memory
from valence.training.models import build_models
from valence.training.plan import describe, make_plan
from valence.training.prepare import Prepared, prepare

pytestmark = pytest.mark.dist
slow = pytest.mark.slow

ROWS: dict[str, list[dict[str, Any]]] = {
    "dpo": [
        {"prompt": f"question {i} ", "chosen": f"good {i}", "rejected": f"bad {i} {i}"}
        for i in range(6)
    ],
    "pointwise": [
        {"prompt": f"question {i} ", "completion": f"answer {i}", "score": i % 2} for i in range(6)
    ],
}
LORA = {"rank": 3, "dropout": 0.3}

CASES: dict[str, dict[str, Any]] = {
    "full": {"model": {"name": "qwen2"}},
    "full in bfloat16": {
        "model": {"name": "llama", "dtype": "bfloat16"},
        "parallel": {"sync": "step", "reshard": False},
    },
    "adapter": {"model": {"name": "gemma2", "dtype": "bfloat16", "lora": LORA}},
    "adapter on convolutions": {"model": {"name": "gpt2", "lora": LORA}},
    "adapter that goes on": {"model": {"name": "llama", "adapter": "adapter"}},
    "another reference": {"model": {"name": "llama"}, "reference": {"model": "other"}},
    "an adapter, and another reference": {
        "model": {"name": "llama", "lora": LORA},
        "reference": {"model": "other"},
    },
    "a reference that follows": {"model": {"name": "llama"}, "reference": {"sync_every": 1}},
    "a reference that follows an adapter": {
        "model": {"name": "qwen2", "lora": LORA},
        "reference": {"sync_every": 1},
    },
    "fresh head and adapter": {
        "method": "pointwise",
        "model": {"name": "llama", "dtype": "bfloat16", "lora": LORA},
    },
    "saved head": {"method": "pointwise", "model": {"name": "scores"}},
    "experts": {"model": {"name": "qwen3_moe"}},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models in several files each, and of adapters."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), tiny_tokenizer()
    kinds = {
        "llama": "llama",
        "other": "llama",
        "qwen2": "qwen2",
        "gemma2": "gemma2",
        "gpt2": "gpt2",
        "qwen3_moe": "qwen3_moe",
    }
    for seed, (name, kind) in enumerate(kinds.items()):
        more = {"tie_word_embeddings": True} if kind == "qwen2" else {}
        model: Any = tiny(
            kind, seed=seed, vocab_size=len(tokenizer) + 8, dtype=torch.float32, **more
        )
        model.save_pretrained(folder / name, max_shard_size="40KB")
        tokenizer.save_pretrained(folder / name)
    scores: Any = load_model(str(folder / "llama"), dtype=torch.float32, attributes=("reward",))
    torch.nn.init.normal_(scores.score.weight)
    scores.save_pretrained(folder / "scores")
    tokenizer.save_pretrained(folder / "scores")
    lora: Any = type(
        "Lora", (), {"rank": 2, "alpha": None, "dropout": 0.0, "targets": "all-linear"}
    )
    engine = build_policy(
        load_model(str(folder / "llama"), dtype=torch.float32), dtype=torch.float32, lora=lora
    )
    for name, weight in engine.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    engine.model.save_pretrained(folder / "adapter")  # type: ignore[operator]
    return folder


def prepared(place: Path, recipe: dict[str, Any], **parallel: Any) -> Prepared:
    recipe = {"method": "dpo", "train": {"batch_size": 2, "seed": 5}} | recipe
    for section, name in (("model", "name"), ("model", "adapter"), ("reference", "model")):
        if name in recipe.get(section, {}):
            recipe = recipe | {
                section: recipe[section] | {name: str(place / recipe[section][name])}
            }
    if recipe["method"] == "dpo":
        recipe |= {"reference": recipe.get("reference", {}) | {"cache": "off"}}
    recipe |= {"parallel": recipe.get("parallel", {}) | parallel}
    settings = {"train": ROWS[recipe["method"]]}
    return prepare(load_recipe(recipe, in_memory=["train"]), rows=settings)


def other_weights(ours: PolicyModel, theirs: PolicyModel) -> list[str]:
    """The weights and buffers of two engines that do not have the same bits."""
    result, wanted = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert list(result) == list(wanted)
    odd = [
        name
        for name in wanted
        if not torch.equal(full(result[name]), wanted[name])
        or result[name].dtype != wanted[name].dtype
    ]
    odd += [name for name in wanted if result[name].requires_grad != wanted[name].requires_grad]
    buffers = dict(theirs.named_buffers())
    return odd + [
        name for name, buffer in ours.named_buffers() if not torch.equal(buffer, buffers[name])
    ]


def engine_of(reference: Reference | None) -> PolicyModel | None:
    return reference.engine if isinstance(reference, FrozenReference) else None


def compared(group: Group, place: Path, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What differs between the models that this process builds alone and those that all build
    together.
    """
    return {name: list(_differences(group, place, recipe)) for name, recipe in cases.items()}


def _differences(group: Group, place: Path, recipe: dict[str, Any]) -> Any:
    alone, alone_reference = build_models(prepared(place, {**recipe, "parallel": {}}))
    drawn = torch.rand(3)
    policy, reference = build_models(prepared(place, recipe, shard="full"), group=group)
    if torch.equal(torch.rand(3), drawn) is not (group.rank == 0):
        yield "random draws"
    if not policy.is_sharded or policy.packs != alone.packs or policy.training != alone.training:
        yield "how it runs"
    yield from other_weights(policy, alone)
    large = [weight for weight in policy.parameters() if weight.ndim > 1]
    if sum(local(p).numel() for p in large) > 0.7 * sum(p.numel() for p in large):
        yield "it is not split"
    if type(reference) is not type(alone_reference):
        yield "kind of reference"
    ours, theirs = engine_of(reference), engine_of(alone_reference)
    if ours and theirs:
        yield from (f"reference: {name}" for name in other_weights(ours, theirs))
        if (
            any(weight.requires_grad for weight in ours.parameters())
            or ours.packs != theirs.packs
            or ours.training
        ):
            yield "how the reference runs"
    yield from other_outputs(policy.eval(), reference, alone.eval(), alone_reference)


@torch.no_grad()
def other_outputs(
    policy: PolicyModel, reference: Any, alone: PolicyModel, alone_reference: Any
) -> list[str]:
    batch = plain_batch([torch.arange(3, 20), torch.arange(30, 70)], torch.arange(5, 9))
    out, wanted = policy(batch), alone(batch)
    near: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5 if policy.compute is None else 0.02}
    pairs = [(out.logp, wanted.logp) if out.score is None else (out.score, wanted.score)]
    if reference is not None:
        pairs.append((reference(batch), alone_reference(batch)))
    if isinstance(reference, SyncedReference):
        for weight in (*policy.parameters(), *alone.parameters()):
            weight += 0.125 * weight.requires_grad
        for item, engine in ((reference, policy), (alone_reference, alone)):
            item.follow(dict(engine.named_parameters()), 0.5)
        pairs.append((reference(batch), alone_reference(batch)))
    return [
        f"what it says: {i}"
        for i, (result, expected) in enumerate(pairs)
        if not torch.allclose(result, expected, **near)
    ]


@slow
def test_sharded_weights_equal_those_of_one_process(place: Path) -> None:
    result = run(compared, 2, place, CASES, deadline=120)
    assert [item.error for item in result] == ["", ""]
    assert [item.value for item in result] == [{name: [] for name in CASES}] * 2


def split_objects(group: Group, place: Path) -> list[str]:
    """What differs when models that are given are split."""
    objects = [load_model(str(place / name), dtype=torch.float32) for name in ("llama", "other")]
    policy, reference = build_models(
        prepared(place, {"model": {"name": "llama"}}, shard="full"),
        group=group,
        model=objects[0],
        reference=objects[1],
    )
    wanted, other = build_models(
        prepared(place, {"model": {"name": "llama"}, "reference": {"model": "other"}})
    )
    assert isinstance(reference, FrozenReference)
    assert isinstance(other, FrozenReference)
    return [
        *other_weights(policy, wanted),
        *other_weights(reference.engine, other.engine),
        *other_outputs(policy, reference, wanted, other),
    ]


def shared(group: Group, place: Path, tensor: int, shard_size: int | None = None) -> list[Any]:
    """What differs when processes share each layer, and others split what they have of it."""
    results: list[Any] = []
    for recipe in (
        {"model": {"name": "llama"}},
        {"model": {"name": "llama", "lora": LORA}, "reference": {"model": "other"}},
    ):
        alone, alone_reference = build_models(prepared(place, recipe))
        policy, reference = build_models(
            prepared(place, recipe, shard="full", tensor=tensor, shard_size=shard_size),
            group=group,
        )
        table = local(policy.causal.get_input_embeddings().weight)
        results += [
            len(table),
            *other_weights(policy, alone),
            *other_outputs(policy.eval(), reference, alone.eval(), alone_reference),
        ]
    return results


def planned(group: Group, place: Path) -> list[Any]:
    """How weights are split where a host has so much memory, as planned and as built."""
    results: list[Any] = []
    for free in (2**40, 2**20):
        for module in (planning, building):
            module.free_memory = lambda _, free=free: free + group.rank  # type: ignore[attr-defined]
        run = prepared(place, {"model": {"name": "llama"}})
        plan = make_plan(run, None, group)
        policy, _ = build_models(run, group=group)
        remaining = [
            build_models(run, group=group, sharded=before)[0].is_sharded for before in (True, False)
        ]
        results.append(
            (
                plan.free,
                plan.split.ways,
                plan.memory.weights,
                policy.is_sharded,
                remaining,
                describe(plan)[3:5],
            )
        )
    return results


def noted(group: Group, place: Path) -> list[Any]:
    """Warnings about models that cannot be read in parts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy, _ = build_models(
            prepared(place, {"model": {"name": "qwen3_moe"}}, shard="full"), group=group
        )
    return [
        policy.is_sharded,
        [str(item.message) for item in caught if str(place / "qwen3_moe") in str(item.message)],
    ]


@slow
def test_models_that_are_given_or_cannot_be_read_in_parts_are_split_as_well(place: Path) -> None:
    result = run(split_objects, 2, place)
    assert [(item.error, item.value) for item in result] == [("", [])] * 2
    first, second = (item.value for item in run(noted, 2, place))
    assert first[0] is second[0] is True
    assert len(first[1]) == 1
    assert second[1] == []


@slow
def test_layers_are_shared_and_split_as_well(place: Path) -> None:
    rows = -(
        -load_model(str(place / "llama"), dtype=torch.float32)
        .get_input_embeddings()
        .weight.shape[0]
        // 4
    )  # type: ignore
    result = run(shared, 4, place, 2, deadline=60)
    assert [(item.error, item.value) for item in result[:3]] == [("", [rows, rows])] * 3
    assert result[3].error == ""
    assert result[3].value[1:] == result[3].value[:1]  # what is left for the last


def in_replicas(group: Group, place: Path) -> list[Any]:
    """The part of the weights that a process of two replicas has, and what it prints."""
    run = prepared(place, {"model": {"name": "llama"}}, shard="full", shard_size=2)
    policy, _ = build_models(run, group=group)
    large = [weight for weight in policy.parameters() if weight.ndim > 1]
    plan = make_plan(run, None, group)
    sizes = sum(local(p).numel() for p in large), sum(p.numel() for p in large)
    return [*sizes, plan.split.ways, plan.memory.weights, describe(plan)[3]]


@slow
def test_a_replica_is_sharded_over_its_processes_only(place: Path) -> None:
    result = run(in_replicas, 4, place)
    assert [item.error for item in result] == [""] * 4
    parts = [item.value[0] for item in result]
    assert parts[:2] == parts[2:]
    assert sum(parts[:2]) == result[0].value[1]
    in_four = make_plan(
        prepared(place, {"model": {"name": "llama"}}, shard="full"), None, PlannedGroup(4)
    )
    for *_, ways, weights, line in (item.value for item in result):
        assert ways == 2
        assert weights == pytest.approx(2 * in_four.memory.weights, rel=1e-3)
        assert line.startswith("4 processes: each holds 1/2 of all weights")
        assert "in 2 replicas (parallel.shard_size)" in line


@slow
def test_replicas_with_shared_layers(place: Path) -> None:
    """Eight processes: two replicas, each sharded over two pairs that share layers."""
    result = run(shared, 8, place, 2, 2, deadline=120)
    assert [item.error for item in result] == [""] * 8
    for item in result:
        rows = item.value[0]
        assert item.value == [rows, rows]


@slow
def test_auto_shards_weights_that_exceed_the_memory_of_one_process(place: Path) -> None:
    result = run(planned, 2, place)
    assert [item.error for item in result] == ["", ""]
    (roomy, tight), others = (item.value for item in result)
    assert others == [roomy, tight]
    assert roomy[:2] == (2**39, 1)  # both are on one host
    assert roomy[3:5] == (False, [True, False])
    assert tight[:2] == (2**19, 2)
    assert tight[3:5] == (True, [True, False])
    assert tight[2] == roomy[2] // 2
    for (line, memory), share in ((roomy[5], None), (tight[5], "1/2")):
        assert line.startswith("2 processes: ")
        assert "parallel.shard: auto" in line
        assert (" 1/2 " in line) is (share is not None)
        assert memory.startswith("memory: ")


def recipe_with(**parallel: Any) -> Any:
    changes = {"optimizer": "adamw", "compile": "auto", "router_aux_loss": 0.0} | parallel.pop(
        "train", {}
    )
    lora = parallel.pop("lora", None)
    lora = LoraSettings(**lora) if isinstance(lora, dict) else lora
    model = SimpleNamespace(lora=lora, adapter=None)
    request = {
        "shard": "auto",
        "tensor": 1,
        "context": 1,
        "shard_size": None,
        "reshard": True,
        "sync": "auto",
        "offload": False,
    } | parallel
    return SimpleNamespace(
        parallel=SimpleNamespace(**request),
        train=SimpleNamespace(**changes),
        model=model,
        trains_adapter=lora is not None,
    )


@pytest.mark.parametrize(
    ("sections", "size", "before", "fits", "expected"),
    [
        ({}, 1, None, False, Split()),
        ({"shard": "full"}, 1, True, False, Split()),
        ({}, 4, None, True, Split()),
        ({}, 4, None, False, Split(4)),
        ({}, 4, True, True, Split(4)),
        ({}, 4, False, False, Split()),
        ({"shard": "off"}, 4, True, False, Split()),
        ({"shard": "full"}, 4, False, True, Split(4)),
        ({"shard": "full", "lora": 1}, 4, None, True, Split(4, sync_every_micro_batch=False)),
        ({"shard": "full", "sync": "step"}, 4, None, True, Split(4, sync_every_micro_batch=False)),
        (
            {"shard": "full", "sync": "micro_batch", "lora": 1, "reshard": False},
            2,
            None,
            True,
            Split(2, reshard=False),
        ),
        ({"tensor": 2}, 2, None, False, Split(1, 2)),
        ({"tensor": 2}, 4, None, False, Split(2, 2)),
        ({"context": 2}, 4, None, True, Split(context=2)),
        # Weights are sharded over processes with other tokens too.
        ({"context": 2}, 4, None, False, Split(4, context=2)),
        ({"shard_size": 2}, 4, None, False, Split(2)),
        ({"shard_size": 2}, 4, None, True, Split()),
        ({"shard_size": 4}, 4, None, False, Split(4)),
        ({"tensor": 2, "shard_size": 2}, 8, None, False, Split(2, 2)),
    ],
)
def test_how_weights_are_split(
    sections: dict[str, Any], size: int, before: Any, fits: bool, expected: Split
) -> None:
    assert (
        choose_split(
            recipe_with(**sections), size, torch.device("cpu"), before=before, fits=lambda: fits
        )
        == expected
    )


@pytest.mark.parametrize(
    ("split", "setting", "expected"),
    [
        (Split(), "auto", True),
        (Split(), "on", True),
        (Split(4), "on", True),
        (Split(4), "auto", False),
        (Split(1, 2), "on", False),
        (Split(4, context=2), "on", False),
    ],
)
def test_sharded_layers_are_compiled_on_request(split: Split, setting: str, expected: bool) -> None:
    recipe = recipe_with(train={"compile": setting})
    assert can_compile(recipe, split) is expected


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"train": {"optimizer": "adamw_8bit"}}, "train.optimizer"),
        ({"train": {"optimizer": "torch.optim.Muon"}}, "train.optimizer"),
        ({"train": {"compile": "on"}, "tensor": 2}, "train.compile"),
        ({"offload": True}, "parallel.offload"),
        ({"train": {"router_aux_loss": 0.01}}, "train.router_aux_loss"),
        ({"lora": {"use_dora": True}}, "model.lora.use_dora"),
        ({"lora": {"init_lora_weights": "pissa"}}, "model.lora.init_lora_weights"),
        ({"lora": {"bias": "all"}}, "model.lora.bias"),
        ({"lora": {"modules_to_save": ["lm_head"]}}, "model.lora.modules_to_save"),
    ],
)
def test_settings_that_split_weights_do_not_support_are_mistakes(
    sections: dict[str, Any], where: str
) -> None:
    cpu = torch.device("cpu")
    if "tensor" not in sections:
        assert choose_split(recipe_with(**sections), 2, cpu, before=None, fits=lambda: True).single
    with raises_error("parallel-unsupported", where=where):
        choose_split(recipe_with(**sections), 2, cpu, before=None, fits=lambda: False)


@pytest.mark.parametrize(
    ("sections", "size", "multiple"),
    [
        ({"shard_size": 4}, 6, "4"),
        ({"shard_size": 4}, 2, "4"),
        ({"shard_size": 3, "tensor": 2}, 8, "6"),
    ],
)
def test_processes_that_do_not_divide_into_replicas_are_an_error(
    sections: dict[str, Any], size: int, multiple: str
) -> None:
    cpu = torch.device("cpu")
    with raises_error("shard-size-mismatch", where="parallel.shard_size") as raised:
        choose_split(recipe_with(**sections), size, cpu, before=None, fits=lambda: False)
    assert f"{size} processes" in raised.error.message
    assert f"a multiple of {multiple}" in raised.error.message


def test_sharding_with_one_process_has_no_effect_and_a_note(place: Path) -> None:
    run = prepared(place, {"model": {"name": "llama"}}, shard="full")
    assert len([line for line in describe(make_plan(run)) if "parallel.shard: full" in line]) == 1
    assert build_models(run)[0].is_sharded is False
    assert min_free_memory(5, torch.device("cpu"), SingleProcess()) == 5


def test_the_plan_of_processes_that_share_tokens(place: Path) -> None:
    """Micro-batches are as large for each process, and its activations are a part."""
    recipe = {"model": {"name": "llama"}}
    alone = make_plan(prepared(place, recipe), group=PlannedGroup(4))
    shared = make_plan(prepared(place, recipe, context=4), group=PlannedGroup(4))
    assert "4 share each row (parallel.context)" in "\n".join(describe(shared))
    assert (alone.dealt, shared.dealt) == (4, 1)
    assert shared.micro_batch_tokens == 4 * alone.micro_batch_tokens
    assert alone.memory.per_token / 4 < shared.memory.per_token < alone.memory.per_token / 2
    assert make_plan(prepared(place, recipe, context=2), group=PlannedGroup(4)).dealt == 2
    with raises_error("context-size-mismatch", where="parallel.context"):
        make_plan(prepared(place, recipe, context=3), group=PlannedGroup(4))


def differing(group: Group, place: Path) -> None:
    build_models(prepared(place / f"host{group.rank}", {"model": {"name": "llama"}}), group=group)


@slow
@pytest.mark.parametrize(
    ("file", "content"), [("config.json", None), ("model-00001-of-00004.safetensors", b"")]
)
def test_an_error_names_files_that_differ_between_hosts(
    file: str, content: bytes | None, place: Path, tmp_path: Path
) -> None:
    for rank in range(2):
        shutil.copytree(place / "llama", tmp_path / f"host{rank}" / "llama")
    path = tmp_path / "host1" / "llama" / file
    path.write_bytes(path.read_bytes().replace(b"256", b"257") if content is None else content)
    result = run(differing, 2, tmp_path)
    for item in result:
        assert item.mistake is not None
        check_error(item.mistake, "ranks-differ", where="rank 1")
        assert f"{file} of model.name" in item.mistake.message


# ---------------------------------------------------------------- memory


def peak(action: Callable[[], Any]) -> tuple[int, Any]:
    """Peak anonymous memory (bytes) of this process during the action, less that before it (mapped
    files do not count), and the result of the action.
    """

    def anonymous_memory() -> int:
        return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0])

    largest, done, before = 0, threading.Event(), anonymous_memory()

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.001):
            largest = max(largest, anonymous_memory())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        result = action()
    finally:
        done.set()
        watching.join()
    return max(largest, anonymous_memory()) - before, result


def measured(group: Group, place: Path, shard: str) -> tuple[int, int]:
    """Bytes of a model's weights, and the peak anonymous memory while a process built policy and
    reference (but did not run them).
    """
    recipe = {"model": {"name": "large"}}
    building.check_layout = model_build.check_layout = lambda engine: None
    # libraries come with their own
    build_models(prepared(place, {"model": {"name": "llama"}}, shard=shard), group=group)
    largest, (policy, _) = peak(
        lambda: build_models(prepared(place, recipe, shard=shard), group=group)
    )
    return sum(4 * p.numel() for p in policy.parameters()), largest


@slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="nothing tells what a process has"
)
def test_no_process_ever_holds_a_whole_model(place: Path) -> None:
    more: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "head_dim": 128,
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
    }
    # else what is not split would be mapped, and not its own
    model: Any = tiny(vocab_size=400, dtype=torch.bfloat16, **more)
    model.save_pretrained(place / "large", max_shard_size="20MB")
    tiny_tokenizer().save_pretrained(place / "large")
    del model
    complete, split = (
        [item.value for item in run(measured, 2, place, shard, deadline=120)]
        for shard in ("off", "full")
    )
    assert all(weights > 100_000_000 for weights, _ in complete + split)
    assert all(largest > 1.8 * weights for weights, largest in complete)  # policy and reference
    assert all(largest < 1.2 * weights for weights, largest in split)  # half of both
