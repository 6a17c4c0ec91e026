"""Weights that are read late and in parts equal those of a completely loaded model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.errors import raises_error
from tests.tiny_models import tiny
from valence.models.build import build_policy, load_model
from valence.models.stream import CannotStreamError, build_without_weights, local_shard

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
LORA = SimpleNamespace(rank=3, alpha=None, dropout=0.0, targets="all-linear")
KINDS = ["llama", "qwen2", "gemma2", "gpt2"]


def saved(folder: Path, kind: str, size: str = "20KB", **changes: Any) -> str:
    model: Any = tiny(kind, dtype=F32, tie_word_embeddings=kind == "qwen2", **changes)
    model.save_pretrained(folder, max_shard_size=size)
    return str(folder)


def differences(results: nn.Module, wanted: nn.Module) -> list[str]:
    """Weights and buffers, those that are in no file too, that do not have the same bits and
    type.
    """
    ours, theirs = (
        {**dict(m.named_parameters(remove_duplicate=False)), **dict(m.named_buffers())}
        for m in (results, wanted)
    )
    assert list(ours) == list(theirs)
    return [
        name
        for name in ours
        if ours[name].dtype != theirs[name].dtype or not torch.equal(ours[name], theirs[name])
    ]


def stored_bytes(model: nn.Module) -> int:
    return sum(p.untyped_storage().nbytes() for p in model.parameters())


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_read_in_parts_equal_loaded_ones(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    name = saved(tmp_path, kind)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model, stream = build_without_weights(name, dtype=dtype, device=CPU)
    wanted: Any = load_model(name, dtype=dtype)
    assert type(model) is type(wanted)
    assert not model.training
    stream.move_to_meta(model)
    stream.load(model, CPU)
    assert differences(model, wanted) == []
    result: Any = model
    assert result.config.to_dict() == wanted.config.to_dict()
    assert result.generation_config.to_dict() == wanted.generation_config.to_dict()
    tied = [
        item.get_input_embeddings().weight is item.get_output_embeddings().weight
        for item in (result, wanted)
    ]
    assert tied == [kind == "qwen2"] * 2


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [None, LORA])
def test_a_policy_is_the_same(kind: str, dtype: torch.dtype, lora: Any, tmp_path: Path) -> None:
    name, loaded = saved(tmp_path, kind), F32 if lora is None else dtype
    engines: list[Any] = []
    for streamed in (True, False):
        model, stream = (
            build_without_weights(name, dtype=loaded, device=CPU)
            if streamed
            else (load_model(name, dtype=loaded), None)
        )
        torch.manual_seed(3)
        engine = build_policy(model, dtype=dtype, lora=lora, check=False)
        if stream:
            stream.move_to_meta(engine.causal)
            stream.load(engine.causal, CPU)
        engines.append(engine)
    assert differences(*engines) == []
    assert [p.requires_grad for p in engines[0].parameters()] == [
        p.requires_grad for p in engines[1].parameters()
    ]
    assert engines[0].compute == engines[1].compute


def test_a_stand_in_is_where_the_weight_will_be_and_takes_no_memory(tmp_path: Path) -> None:
    name = saved(tmp_path, "llama")
    model, stream = build_without_weights(name, dtype=F32, device=CPU)
    wanted = load_model(name, dtype=F32)
    small = 8 * len(list(model.parameters()))
    assert stored_bytes(model) < small < stored_bytes(wanted) / 100
    assert [(p.shape, p.dtype, p.device) for p in model.parameters()] == [
        (p.shape, p.dtype, p.device) for p in wanted.parameters()
    ]
    engine = build_policy(model, dtype=F32, lora=LORA, check=False)
    assert (
        sum(p.untyped_storage().nbytes() for p in engine.parameters() if not p.requires_grad)
        < small
    )
    stream.move_to_meta(engine.causal)
    assert {p.is_meta for p in engine.parameters() if not p.requires_grad} == {True}
    assert {p.is_meta for p in engine.parameters() if p.requires_grad} == {False}


@pytest.mark.parametrize("remaining", [True, False])
def test_the_head_of_a_reward_model_is_there_at_once(remaining: bool, tmp_path: Path) -> None:
    name = saved(tmp_path / "model", "llama")
    if remaining:
        scores: Any = load_model(name, dtype=F32, attributes=("good",))
        nn.init.normal_(scores.score.weight)
        name = str(tmp_path / "scores")
        scores.save_pretrained(name)
    model, stream = build_without_weights(name, dtype=F32, device=CPU, attributes=("good",))
    wanted: Any = load_model(name, dtype=F32, attributes=("good",))
    assert torch.equal(model.get_submodule("score").weight, wanted.score.weight)  # type: ignore[arg-type]
    assert bool(wanted.score.weight.any()) is remaining
    stream.load(model, CPU)
    assert differences(model, wanted) == []


def test_names_that_transformers_changes_are_found(tmp_path: Path) -> None:
    """A decoder that was saved by itself: its names lack the prefix."""
    tiny("qwen2", dtype=F32, tie_word_embeddings=True).model.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    model, stream = build_without_weights(str(tmp_path), dtype=F32, device=CPU)
    stream.load(model, CPU)
    assert differences(model, load_model(str(tmp_path), dtype=F32)) == []


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})


def _quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8"}})
    )


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("kind", "change", "code"),
    [
        ("qwen3_moe", lambda folder: None, "weights-converted"),
        ("llama", _quantized, "weights-quantized"),
        ("llama", _pickled, "not-safetensors"),
        (
            "llama",
            lambda folder: rewrite(folder, lambda w: w.pop("lm_head.weight")),
            "weights-missing",
        ),
        (
            "llama",
            lambda folder: rewrite(
                folder, lambda w: w.update({"lm_head.weight": torch.ones(3, 32)})
            ),
            "weight-shape",
        ),
        (
            "qwen2",
            lambda folder: rewrite(
                folder, lambda w: w.update({"lm_head.weight": torch.ones(97, 32)})
            ),
            "tied-weights-apart",
        ),
    ],
)
def test_models_that_cannot_be_read_in_parts_are_reported(
    kind: str, change: Any, code: str, tmp_path: Path
) -> None:
    name = saved(tmp_path, kind, "1GB")
    change(tmp_path)
    with pytest.raises(CannotStreamError) as error:
        build_without_weights(name, dtype=F32, device=CPU)
    assert error.value.code == code
    assert ("lm_head.weight" in str(error.value)) is (
        "weight-" in code or code in ("weights-missing", "tied-weights-apart")
    )


def test_a_gguf_file_is_not_read_in_parts(tmp_path: Path) -> None:
    with pytest.raises(CannotStreamError) as error:
        build_without_weights(str(tmp_path), dtype=F32, device=CPU, gguf_file="model.gguf")
    assert error.value.code == "weights-gguf"


@pytest.mark.parametrize("kind", ["file", "index", "part"])
def test_a_damaged_or_missing_file_is_a_mistake_in_the_folder(kind: str, tmp_path: Path) -> None:
    name = saved(tmp_path, "llama", "1GB" if kind == "file" else "20KB")
    index, part = tmp_path / "model.safetensors.index.json", min(tmp_path.glob("*.safetensors"))
    {
        "file": lambda: part.write_bytes(part.read_bytes()[:1000]),
        "index": lambda: index.write_text("{"),
        "part": part.unlink,
    }[kind]()
    with raises_error("model-not-loadable", where="model") as raised:
        build_without_weights(name, dtype=F32, device=CPU)
    assert str(tmp_path) in raised.error.message


# ---------------------------------------------------------------- parts


class Parted(SimpleNamespace):
    """What a DTensor tells of itself: how many processes along each axis of a mesh, this one's
    place, the axis that is cut.
    """

    def __init__(
        self, full: Tensor, sizes: list[int], place: list[int], cut: list[int | None]
    ) -> None:
        mesh = SimpleNamespace(
            ndim=len(sizes), size=sizes.__getitem__, get_local_rank=place.__getitem__
        )
        kinds = [
            SimpleNamespace(dim=axis, is_replicate=lambda axis=axis: axis is None) for axis in cut
        ]
        super().__init__(full=full, shape=full.shape, device_mesh=mesh, placements=kinds)

    def detach(self) -> Parted:
        return self

    def to_local(self) -> Tensor:
        """As PyTorch cuts it: along the last axis of the mesh first."""
        local = self.full
        for axis in reversed(range(self.device_mesh.ndim)):
            dim = self.placements[axis].dim
            if dim is not None:
                pieces = local.chunk(self.device_mesh.size(axis), dim)
                rank = self.device_mesh.get_local_rank(axis)
                local = (
                    pieces[rank] if rank < len(pieces) else local.narrow(dim, local.shape[dim], 0)
                )
        return local


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [
        ([3], [0]),
        ([4], [0]),
        ([9], [0]),
        ([2, 2], [0, 0]),
        ([3, 2], [0, 1]),
        ([2, 3], [0, None]),
        ([2], [None]),
    ],
)
def test_a_part_is_where_it_says(sizes: list[int], cut: list[int | None]) -> None:
    full = torch.arange(35).view(7, 5)
    for place in (
        torch.cartesian_prod(*(torch.arange(size) for size in sizes)).view(-1, len(sizes)).tolist()
    ):
        local, rows = local_shard(Parted(full, sizes, place, cut))
        assert torch.equal(local, full[rows])


def test_a_weight_that_is_not_split_is_its_own_part() -> None:
    weight = torch.randn(3, 2, requires_grad=True)
    local, rows = local_shard(weight)
    assert torch.equal(local, weight[rows])
    local.zero_()
    assert not weight.any()
