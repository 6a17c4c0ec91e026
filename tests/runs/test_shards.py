"""Checkpoints and models of weights that are sharded over processes: saved together or not at all,
loaded by any number.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.fsdp import fully_shard

from tests.distributed.process_groups import run
from tests.errors import raises_error
from valence import storage
from valence.distributed import sharded_checkpoint
from valence.distributed.process_group import Group
from valence.errors import UserError
from valence.training import state_files
from valence.training.checkpoints import Checkpoints, check
from valence.training.state_files import Stored

pytestmark = pytest.mark.dist
slow = pytest.mark.slow

HEAVY = ("weights", "reference", "optimizer")


class Model:
    """A model with an optimizer and a reference that follows, sharded over the processes or not.

    Vectors are never sharded.
    """

    def __init__(self, *, sharded: bool) -> None:
        torch.manual_seed(0)
        self.net, self.reference = (
            nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(2)
        )
        if sharded:
            for net in (self.net, self.reference):
                fully_shard(net, ignored_params={p for p in net.parameters() if p.ndim < 2})
        trained = list(self.net.parameters())
        groups = [
            {"params": [p for p in trained if p.ndim > 1]},
            {"params": [p for p in trained if p.ndim < 2]},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1, fused=True)

    def step(self) -> None:
        torch.manual_seed(1)
        self.net(
            torch.randn(8, 6)
        ).square().sum().backward()  # the same in all processes: gradients are averaged
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {
            "weights": {"values": dict(self.net.named_parameters())},
            "reference": {"weights": dict(self.reference.named_parameters())},
            "optimizer": self.optimizer.state_dict(),
            "counters": {"step": 2},
            "random": [torch.arange(5)],
        }

    def take(self, state: dict[str, Any]) -> None:
        state_files.put(state["weights"]["values"], dict(self.net.named_parameters()))
        state_files.put(state["reference"]["weights"], dict(self.reference.named_parameters()))
        self.optimizer.load_state_dict(
            state_files.for_optimizer(state["optimizer"], self.optimizer)
        )

    def numbers(self) -> dict[str, Tensor]:
        """All tensors, gathered."""
        results = {
            f"{kind} {name}": value
            for kind in HEAVY[:2]
            for name, value in _first(self.state()[kind]).items()
        }
        for i, of in self.optimizer.state_dict()["state"].items():
            results |= {f"{i} {name}": value for name, value in of.items()}
        return {
            name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach()
            for name, t in results.items()
        }


def _first(values: dict[str, Any]) -> dict[str, Any]:
    return next(iter(values.values()))


def differing(results: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    assert results.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(results[name], wanted[name])]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Tensor]]]:
    """A checkpoint of one process, and the numbers in it and after one more step."""
    folder = tmp_path_factory.mktemp("alone") / "checkpoints"
    model = Model(sharded=False)
    model.step()
    Checkpoints(folder, None).save(2, model.state(), {})
    there = {name: value.clone() for name, value in model.numbers().items()}
    model.step()
    return folder / "step-2", [there, model.numbers()]


# Saving and loading


def saves(
    group: Group, folder: str, other: str, numbers: list[dict[str, Tensor]]
) -> dict[str, Any]:
    """A checkpoint of processes together, then saves in which one process fails in one way or
    another. And what is wrong after loading another checkpoint.
    """
    model = Model(sharded=True)
    model.step()
    remaining = Checkpoints(Path(folder), 2, group, sharded_checkpoint.write)
    remaining.save(2, model.state(), {"rank": group.rank})
    results: dict[str, Any] = {
        "numbers": model.numbers(),
        "saved": (remaining.failed, remaining.take_messages(), remaining.steps()),
    }
    for rank, place, name in FAULTS:
        original = getattr(place, name)
        if group.rank == rank:
            setattr(place, name, _full)
        remaining.save(3, model.state(), {})
        setattr(place, name, original)
        group.barrier("failed")
        results[name] = (
            remaining.failed,
            remaining.take_messages(),
            sorted(path.name for path in Path(folder).iterdir()),
        )
        group.barrier("seen")
    for step in (4, 5):
        remaining.save(step, model.state(), {}, add_files=_write_model if step == 5 else None)
    group.barrier("seen")
    results["after"] = (remaining.failed, remaining.take_messages(), remaining.steps())
    return results | {"loaded": loads(group, other, numbers)}


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def _write_model(folder: Path) -> None:
    """A model next to the state, which processes build together and one of them writes."""
    if torch.distributed.get_rank() == 0:
        (folder / "model").mkdir()
        (folder / "model/card").write_text("a card")


FAULTS: list[tuple[int, Any, str]] = [
    (0, state_files.Snapshot, "write"),
    (0, Path, "mkdir"),
    (2, Path, "is_dir"),
    (3, HuggingFaceStorageWriter, "write_data"),
    (1, hashlib, "file_digest"),
    (0, storage, "fsync_path"),
]
"""The rank that fails, and the function that fails there."""


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory, alone: Any
) -> tuple[Path, list[dict[str, Any]]]:
    """What four processes have saved together, and what each of them found."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    ended = run(saves, 4, str(folder), str(alone[0]), alone[1])
    assert [(item.error, item.code) for item in ended] == [("", 0)] * 4
    return folder, [item.value for item in ended]


def loads(group: Group, folder: str, numbers: list[dict[str, Tensor]]) -> list[list[str]]:
    """What of a checkpoint is other than it should be in sharded processes: as it is loaded, and
    after one more step.
    """
    model = Model(sharded=True)
    model.take(state_files.load(Path(folder), sharded_checkpoint.read, HEAVY))
    wrong = [differing(model.numbers(), numbers[0])]
    model.step()
    result = model.numbers()
    return [
        *wrong,
        [
            name
            for name, value in numbers[1].items()
            if not torch.allclose(result[name], value, atol=1e-6)
        ],
    ]


def test_a_checkpoint_of_four_is_loaded_by_one(
    saved: tuple[Path, list[dict[str, Any]]], alone: Any
) -> None:
    model = Model(sharded=False)
    state = state_files.load(check(saved[0] / "step-5").path, sharded_checkpoint.read)
    assert state["counters"] == {"step": 2}
    assert state["random"][0].equal(torch.arange(5))
    weights = state["weights"]["values"]
    assert isinstance(weights["0.weight"], Stored)
    assert isinstance(weights["0.bias"], Tensor)
    assert (weights["0.weight"].shape, weights["0.weight"].dtype) == ((7, 6), torch.float32)
    model.take(state)
    assert differing(model.numbers(), saved[1][0]["numbers"]) == []
    assert {
        name: torch.allclose(model.numbers()[name], value, atol=1e-6)
        for name, value in alone[1][0].items()
        if value.ndim > 1
    }
    assert state_files.load_tensors(weights)["0.weight"].equal(weights["0.weight"].load())
    with raises_error("checkpoint-damaged"):
        weights["0.weight"].into(torch.zeros(7, 5))
    with pytest.raises(TypeError, match=f"{saved[0] / 'step-5'} .*0.weight"):
        state_files.put(
            state_files.load(saved[0] / "step-5")["weights"]["values"],
            dict(model.net.named_parameters()),
        )


def after(saved: tuple[Path, list[dict[str, Any]]]) -> tuple[str, list[dict[str, Tensor]]]:
    """The checkpoint of four processes, its numbers, and those of one process after one more
    step.
    """
    folder, ranks = saved
    model = Model(sharded=False)
    model.take(state_files.load(folder / "step-5", sharded_checkpoint.read))
    model.step()
    return str(folder / "step-5"), [ranks[0]["numbers"], model.numbers()]


@slow
def test_a_checkpoint_of_four_is_loaded_by_three(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [item.value for item in run(loads, 3, *after(saved))] == [[[], []]] * 3


@slow
def test_a_checkpoint_of_four_is_loaded_by_two(exported: tuple[Path, Path, list[Any]]) -> None:
    assert [item["loaded"] for item in exported[2]] == [[[], []]] * 2


def test_a_checkpoint_of_one_is_loaded_by_four(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [item["loaded"] for item in saved[1]] == [[[], []]] * 4


def test_four_processes_save_one_complete_checkpoint(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, ranks = saved
    assert [rank["saved"] for rank in ranks] == [(0, [], [2])] * 4
    assert [rank["after"] for rank in ranks] == [(0, [], [4, 5])] * 4
    for step in (4, 5):
        there = check(folder / f"step-{step}")
        files = {
            path.relative_to(there.path).as_posix()
            for path in there.path.rglob("*")
            if path.is_file()
        }
        manifest = json.loads((there.path / "manifest.json").read_text())
        assert files == {*manifest["files"], "manifest.json"}
        parts = {f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in range(1, 5)}
        assert files == {
            "manifest.json",
            "state.json",
            "tensors.safetensors",
            *parts,
            *(["model/card"] if step == 5 else []),
        }


@pytest.mark.parametrize(
    "name", ["shard-00003-model-00001-of-00001.safetensors", "tensors.safetensors", "model/card"]
)
def test_every_file_is_checked(saved: tuple[Path, list[dict[str, Any]]], name: str) -> None:
    file = saved[0] / "step-5" / name
    before = file.read_bytes()
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    try:
        with raises_error("checkpoint-damaged", where=str(saved[0] / "step-5")) as damaged:
            check(saved[0] / "step-5")
        assert f" {name} " in damaged.error.message
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("i", range(len(FAULTS)), ids=lambda i: FAULTS[i][2])
def test_a_save_that_fails_in_one_process_fails_in_all_and_leaves_the_earlier_one(
    saved: tuple[Path, list[dict[str, Any]]], i: int
) -> None:
    rank, _, name = FAULTS[i]
    failed, messages, there = saved[1][0][name]
    assert [item[name] for item in saved[1]] == [(failed, messages, there)] * 4
    assert failed == i + 1
    assert len(messages) == 1
    assert "step-3" in messages[0]
    assert f"rank {rank}" in messages[0]
    assert os.strerror(errno.ENOSPC) in messages[0]
    assert there == ["step-2"]


def test_sharded_tensors_are_not_saved_without_a_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_files, "is_sharded", lambda tensor: True)
    with pytest.raises(TypeError, match=f"{tmp_path}.*weight"):
        Checkpoints(tmp_path, None).save(1, {"weight": torch.ones(3)}, {}, wait=True)


# Models for others to load


class Case:
    """A model with two axes or more of its weights sharded: what it is made of, and how it is
    exported.
    """

    def __init__(
        self,
        architecture: str,
        *,
        lora: dict[str, Any] | None = None,
        narrow: bool = False,
        **options: Any,
    ) -> None:
        self.architecture, self.lora, self.narrow = architecture, lora, narrow
        self.options = {"kind": "auto", "card": "A card.", **options}

    def model(self) -> Any:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForSequenceClassification

        from tests.tiny_models import tiny

        result: Any = tiny(
            self.architecture, dtype=torch.bfloat16 if self.narrow else torch.float32
        )
        if scores := (self.lora or {}).get("task_type") == "SEQ_CLS":
            result.config.num_labels = 2
            scorer = AutoModelForSequenceClassification.from_config(result.config)
            scorer.load_state_dict(result.state_dict(), strict=False)
            result = scorer
        torch.manual_seed(3)
        if self.lora is not None:
            result = get_peft_model(
                result,
                LoraConfig(**{"r": 2, "lora_alpha": 3, "task_type": "CAUSAL_LM", **self.lora}),
            )
            for name, p in result.named_parameters():
                if "lora_B" in name or (scores and "score" in name):
                    nn.init.normal_(p)
        return result

    def sharded(self) -> Any:
        model = self.model()
        vectors = {p for p in model.parameters() if p.ndim < 2}
        base = model.get_base_model() if self.lora is not None else model
        for layer in getattr(base, base.base_model_prefix).layers:
            fully_shard(layer, ignored_params=vectors)
        fully_shard(model, ignored_params=vectors)
        return model


CASES = {
    "all weights": Case("qwen3", config={"more": [1.5]}),
    "tied": Case("llama-tied", max_file_bytes=20_000),
    "other names": Case("gpt_neox", max_file_bytes=20_000),
    "other pieces": Case("qwen3_moe", max_file_bytes=20_000),
    "merged": Case("llama", lora={}, max_file_bytes=20_000),
    "merged, narrow": Case(
        "llama-tied", lora={"use_dora": True, "target_modules": "all-linear"}, narrow=True
    ),
    "reward model": Case("llama", lora={"task_type": "SEQ_CLS"}),
    "adapter": Case("llama", lora={"modules_to_save": ["lm_head"]}, kind="adapter"),
}


def exports(
    group: Group, folder: str, saved: str, numbers: list[dict[str, Tensor]]
) -> dict[str, Any]:
    """Every case, and one of them on a disk that is full.

    And what is wrong after loading a checkpoint.
    """
    from tests.tiny import tiny_tokenizer
    from valence.training import model_files as exporting

    tokenizer, message = tiny_tokenizer(), []
    for name, case in CASES.items():
        exporting.export(case.sharded(), tokenizer, Path(folder, name), group=group, **case.options)
    for place in ("save_file", "fsync_path"):
        where: Any = exporting if place == "save_file" else storage
        original = getattr(where, place)
        if group.rank == 0:
            setattr(where, place, _full)
        try:
            exporting.export(
                CASES["tied"].sharded(),
                tokenizer,
                Path(folder, "full"),
                group=group,
                **CASES["tied"].options,
            )
        except UserError as error:
            message.append(error.message)
        setattr(where, place, original)
    return {"said": message, "loaded": loads(group, saved, numbers)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, saved: Any) -> tuple[Path, Path, list[Any]]:
    """The cases exported by two processes, and by one; what the former said."""
    from tests.tiny import tiny_tokenizer
    from valence.training.model_files import export

    ours, theirs = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("one")
    ended = run(exports, 2, str(ours), *after(saved), deadline=60.0)
    assert [(item.error, item.code) for item in ended] == [("", 0)] * 2
    for name, case in CASES.items():
        export(case.model(), tiny_tokenizer(), theirs / name, **case.options)
    return ours, theirs, [item.value for item in ended]


def loaded(name: str, folder: Path) -> dict[str, Tensor]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from tests.tiny_models import tiny

    if name == "adapter":
        return PeftModel.from_pretrained(
            tiny(CASES[name].architecture, dtype=torch.float32), str(folder)
        ).state_dict()  # type: ignore[arg-type]
    auto: Any = (
        AutoModelForSequenceClassification if name == "reward model" else AutoModelForCausalLM
    )
    model, result = auto.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(result[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.state_dict()


@slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_export_the_same_files_as_one(
    name: str, exported: tuple[Path, Path, list[Any]]
) -> None:
    ours, theirs = (folder / name for folder in exported[:2])
    result, wanted = loaded(name, ours), loaded(name, theirs)
    assert {key: value.dtype for key, value in result.items()} == {
        key: value.dtype for key, value in wanted.items()
    }
    assert differing(result, wanted) == []
    texts = {
        path.name
        for path in theirs.iterdir()
        if path.suffix != ".safetensors" and "index" not in path.name
    }
    assert {
        path.name
        for path in ours.iterdir()
        if path.suffix != ".safetensors" and "index" not in path.name
    } == texts
    for text in texts:
        assert normalized_text(ours / text) == normalized_text(theirs / text), text


def normalized_text(file: Path) -> Any:
    """What a file says, in which the modules that an adapter is on have no order."""
    result = file.read_text()
    if file.name == "adapter_config.json":
        result = json.loads(result)
        result["target_modules"].sort()
    return result


@slow
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if "max_file_bytes" in case.options]
)
def test_files_are_no_larger_than_asked_for(
    name: str, exported: tuple[Path, Path, list[Any]]
) -> None:
    folder = exported[0] / name
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    assert set(files) == set(index["weight_map"].values())
    assert len(files) > 2
    assert max(files.values()) < 22_000  # and their headers


@slow
def test_an_export_that_fails_in_one_process_fails_in_all(
    exported: tuple[Path, Path, list[Any]],
) -> None:
    first, other = exported[2]
    assert first == other
    assert len(first["said"]) == 2
    assert all(os.strerror(errno.ENOSPC) in message for message in first["said"])
    assert not list(exported[0].glob("*full*"))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_on_tied_weights_is_not_merged_into_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.tiny import tiny_tokenizer
    from valence.training.model_files import export

    monkeypatch.setattr("valence.training.model_files.is_sharded", lambda tensor: True)
    model = Case("llama-tied", lora={"target_modules": ["lm_head"]}).model()
    with raises_error("adapter-tied-weights", where="run.export", fix="parallel.shard"):
        export(model, tiny_tokenizer(), tmp_path / "model", kind="auto", card="")
    assert not list(tmp_path.iterdir())
