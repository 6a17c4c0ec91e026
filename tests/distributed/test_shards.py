"""Sharded tensors: each shard is written once, and any number of processes reads them in any
layout.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed.process_groups import run
from tests.errors import raises_error
from valence.distributed import sharded_checkpoint
from valence.distributed.process_group import Group
from valence.errors import UserError

pytestmark = pytest.mark.dist
slow = pytest.mark.slow


def tensors() -> dict[str, Tensor]:
    """Of several types; rows that do not divide evenly, fewer of them than processes, and none."""
    torch.manual_seed(0)
    return {
        "float32": torch.randn(7, 5),
        "two/rows": torch.randn(2, 6),
        "bfloat16": torch.randn(9, 4, 3).bfloat16(),
        "uint8": torch.randint(0, 256, (10, 6), dtype=torch.uint8),
        "empty": torch.zeros(0, 3),
        "line": torch.randn(6, dtype=torch.float64),
        "number": torch.tensor(3.5),
        "whole number": torch.tensor(7),
    }


LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "rows": ((-1,), [Shard(0)]),
    "columns": ((-1,), [Shard(1)]),
    "copies": ((-1,), [Replicate()]),
    "copies of rows": ((2, 2), [Replicate(), Shard(0)]),
    "blocks": ((2, 2), [Shard(0), Shard(1)]),
}


@cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def placed(values: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Those with two axes or more as DTensors."""
    shape, placements = LAYOUTS[layout]
    mesh = mesh_of(tuple(torch.distributed.get_world_size() if n == -1 else n for n in shape))
    return {
        name: distribute_tensor(t, mesh, placements) if t.ndim > 1 else t
        for name, t in values.items()
    }


def differing(
    folder: Path, layout: str | None, settings: dict[str, Tensor] | None = None
) -> list[str]:
    """Tensors that are not as they were written, after reading them into others of this layout
    (None: whole).
    """
    wanted = settings or tensors()
    empty = {name: torch.full_like(value, 99) for name, value in wanted.items()}
    into = placed(empty, layout) if layout else empty
    sharded_checkpoint.read(folder, into)
    results = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in into.items()}
    return [name for name, value in wanted.items() if not torch.equal(results[name], value)]


def writes(group: Group, folder: str) -> dict[str, Any]:
    """Writes in every layout, and reads in every other."""
    sharded_checkpoint.FILE = 100
    results: dict[str, Any] = {}
    for layout in LAYOUTS:
        place = Path(folder, layout)
        place.mkdir(exist_ok=True)
        results[layout] = [
            path.name for path in sharded_checkpoint.write(place, placed(tensors(), layout))
        ]
        group.barrier("written")
        results |= {(layout, other): differing(place, other) for other in (*LAYOUTS, None)}
    return results


def reads(group: Group, folder: str) -> dict[str, list[str]]:
    layouts = [name for name, (shape, _) in LAYOUTS.items() if len(shape) == 1]
    return {
        f"{place.name} {other}": differing(place, other)
        for place in Path(folder).iterdir()
        for other in layouts
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("shards")
    ended = run(writes, 4, str(folder))
    assert [item.error for item in ended] == [""] * 4
    return folder, [item.value for item in ended]


@slow
def test_shards_of_any_layout_are_read_in_any_other(
    written: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, ranks = written
    for rank in ranks:
        assert {key: odd for key, odd in rank.items() if isinstance(key, tuple) and odd} == {}
    assert {layout: differing(folder / layout, None) for layout in LAYOUTS} == {
        layout: [] for layout in LAYOUTS
    }


@slow
def test_another_number_of_processes_reads(written: tuple[Path, list[dict[str, Any]]]) -> None:
    for item in run(reads, 3, str(written[0])):
        assert len(item.value) == 15
        assert {key: odd for key, odd in item.value.items() if odd} == {}


@slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_process_writes_its_shards_and_replicated_tensors_are_written_once(
    written: tuple[Path, list[dict[str, Any]]], layout: str
) -> None:
    folder, ranks = written
    actual = [name for rank in ranks for name in rank[layout]]
    # no metadata, which would be a pickle
    assert sorted(actual) == sorted(path.name for path in (folder / layout).iterdir())
    assert len(actual) == len(set(actual))
    elements = dict.fromkeys(tensors(), 0)
    for name in actual:
        with safe_open(folder / layout / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                elements[key] += file.get_tensor(key).numel()
    assert elements == {name: value.numel() for name, value in tensors().items()}
    if layout in ("rows", "blocks"):
        assert len(actual) > 4  # several files of a process
        assert all(rank[layout] for rank in ranks)


@slow
def test_other_types_are_filled_rounded(written: tuple[Path, list[dict[str, Any]]]) -> None:
    settings = {"float32": torch.zeros(7, 5, dtype=torch.bfloat16)}
    sharded_checkpoint.read(written[0] / "rows", settings)
    assert settings["float32"].equal(tensors()["float32"].bfloat16())


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process has written, into several files."""
    folder = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_checkpoint, "FILE", 100)
        assert len(sharded_checkpoint.write(folder, tensors())) > 2
    return folder


@pytest.mark.parametrize(
    ("into", "parts"),
    [
        ({"float32": torch.zeros(7, 6)}, ["float32", "[7, 5]", "[7, 6]"]),
        ({"other": torch.zeros(2)}, ["other"]),
    ],
)
def test_missing_tensors_are_named(rows: Path, into: dict[str, Tensor], parts: list[str]) -> None:
    with raises_error("checkpoint-damaged", where=str(rows)) as raised:
        sharded_checkpoint.read(rows, into)
    assert [part for part in parts if part not in raised.error.message] == []


@pytest.mark.parametrize("damage", ["a file is gone", "a file is cut"])
def test_incomplete_tensors_are_refused(rows: Path, damage: str, tmp_path: Path) -> None:
    shutil.copytree(rows, tmp_path / "rows")
    with safe_open(file := sorted((tmp_path / "rows").iterdir())[0], "pt") as opened:
        name = next(iter(opened.keys()))
    file.unlink() if damage == "a file is gone" else file.write_bytes(file.read_bytes()[:-1])
    with raises_error("checkpoint-damaged", where=str(tmp_path / "rows")):
        sharded_checkpoint.read(tmp_path / "rows", {name: torch.zeros_like(tensors()[name])})


def test_one_process_writes_too(tmp_path: Path) -> None:
    settings = {"weight": torch.randn(3, 4), "number": torch.tensor(2.0)}
    assert [path.name for path in sharded_checkpoint.write(tmp_path, settings)] == [
        "shard-00001-model-00001-of-00001.safetensors"
    ]
    assert differing(tmp_path, None, settings) == []


def one_cannot(group: Group, folder: str) -> list[tuple[str, str]]:
    """One process has no room: all get the mistake, and the next time goes well."""
    mistakes: list[tuple[str, str]] = []

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    writer: Any = HuggingFaceStorageWriter
    original = writer.write_data
    for cannot in (True, False):
        writer.write_data = full if cannot and group.rank == 1 else original
        try:
            sharded_checkpoint.write(Path(folder), placed(tensors(), "rows"))
        except UserError as error:
            mistakes.append((error.code, error.message))
    group.barrier("end")
    return mistakes


@slow
def test_one_that_cannot_write_fails_all_alike(tmp_path: Path) -> None:
    first, second = run(one_cannot, 2, str(tmp_path))
    assert first.value == second.value
    ((code, kind),) = first.value
    assert code == "checkpoint-incomplete"
    assert "rank 1: [Errno 28] No space left on device" in kind
    assert "rank 0" not in kind
    assert differing(tmp_path, None) == []
