"""Compiled layers with sharded weights: the same numbers as without the compiler, and the same
names in checkpoints.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from torch._dynamo.utils import counters

from tests.distributed import cases as case_module
from tests.distributed.cases import Case, measure, models, split
from tests.distributed.process_groups import run
from tests.distributed.test_fsdp import distance, tolerances
from tests.distributed.test_run import SHARDED, records, same, train, written
from valence.distributed.process_group import Group, SingleProcess
from valence.models.check import plain_batch
from valence.models.compiling import compile_layers, compiled_program, why_not

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.daily,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_not(torch.device("cpu")) is not None, reason="there is no compiler"),
]
CASES = [
    Case("dpo", dtype=torch.float32),
    Case("kto", dtype=torch.float32, lora=True, follows=True, reshard=False),
    Case("dpo", dtype=torch.float32, checkpointing="full", sum_every_backward=True),
    Case("kto", dtype=torch.float32, lora=True, checkpointing="selective"),
    Case("sft", dtype=torch.float32, architecture="qwen2", rows=3),
]
NARROW = Case("kto", dtype=torch.bfloat16, lora=True, checkpointing="full")


def without_inductor() -> Any:
    """Trace as the compiler does, and run PyTorch's own operators, which needs less time."""
    compiled_program.cache_clear()
    return patch.object(torch, "compile", partial(torch.compile, backend="aot_eager"))


def measure_compiled(
    group: Group, cases: Sequence[Case], inductor: bool = False
) -> dict[str, dict[str, Any]]:
    def split_and_compile(engine: Any, case: Case, group: Group) -> None:
        split(engine, case, group)
        assert compile_layers(engine)

    with patch.object(case_module, "split", split_and_compile):
        if inductor:
            return measure(group, cases)
        with without_inductor():
            return measure(group, cases)


def check(results: Mapping[str, Any], wanted: Mapping[str, Any], case: Case) -> None:
    rel, near, far = tolerances(case, wanted)
    for one, other in zip(results["steps"], wanted["steps"], strict=True):
        assert one == pytest.approx(other, rel=rel, abs=near, nan_ok=True), case.name
    assert distance(results["weights"], wanted["weights"]) <= far, case.name


def test_steps_of_compiled_layers_are_those_without() -> None:
    plain = run(measure, 2, CASES, deadline=60.0)
    compiled = run(measure_compiled, 2, CASES, deadline=200.0)
    assert [rank.error for rank in (*plain, *compiled)] == [""] * 4
    for case in CASES:
        for rank in (0, 1):
            check(compiled[rank].value[case.name], plain[rank].value[case.name], case)


def test_steps_of_inductors_programs_are_those_without() -> None:
    cases = CASES[:1]
    plain = run(measure, 2, cases, deadline=60.0)
    compiled = run(measure_compiled, 2, cases, True, deadline=400.0)
    assert [rank.error for rank in (*plain, *compiled)] == [""] * 4
    for rank in (0, 1):
        check(compiled[rank].value[cases[0].name], plain[rank].value[cases[0].name], cases[0])


def gradients(group: Group, case: Case) -> list[tuple[torch.Tensor, dict[str, torch.Tensor], int]]:
    """Values, gradients and the number of programs of uncompiled and compiled layers."""
    group.split(1)
    results: list[tuple[torch.Tensor, dict[str, torch.Tensor], int]] = []
    with without_inductor():
        for compiles in (False, True):
            policy, _ = models(case)
            split(policy, case, group)
            counters.clear()
            assert not compiles or compile_layers(policy)
            for n in (11, 30):  # micro-batches of two sizes
                batch = plain_batch([torch.arange(1, 41), torch.arange(2, n)])
                logp = policy(batch).logp
                logp.sum().backward()
            with torch.no_grad():
                policy(batch)
            results.append(
                (
                    logp.detach(),
                    {n: _full(p.grad) for n, p in policy.named_parameters() if p.grad is not None},
                    counters["stats"]["unique_graphs"],
                )
            )
        with torch.compiler.set_stance("fail_on_recompile"):
            for n in (19, 50):
                batch = plain_batch([torch.arange(1, 41), torch.arange(2, n), torch.arange(4, 9)])
                policy(batch).logp.sum().backward()
                with torch.no_grad():
                    policy(batch)
    assert all("_orig_mod" not in name for name, _ in policy.named_parameters())
    return results


def _full(grad: Any) -> torch.Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()


@pytest.mark.parametrize("case", [CASES[0], NARROW], ids=lambda case: case.name)
def test_gradients_are_those_without_and_other_sizes_need_no_program(case: Case) -> None:
    ranks = run(gradients, 2, case, deadline=200.0)
    assert [rank.error for rank in ranks] == ["", ""]
    rel, near = (0.05, 0.05) if case.dtype == torch.bfloat16 else (1e-4, 1e-5)
    for rank in ranks:
        (plain, expected, _), (compiled, slopes, programs) = rank.value
        torch.testing.assert_close(compiled, plain, rtol=0.4 * rel, atol=0.4 * near)
        assert expected.keys() == slopes.keys()
        for name, slope in expected.items():
            absolute = near * float(slope.abs().max())
            torch.testing.assert_close(slopes[name], slope, rtol=rel, atol=absolute)
        assert 0 < programs <= 3  # with a gradient and without


def train_compiled(group: Group, *args: Any, **options: Any) -> list[str]:
    with without_inductor():
        return train(group, *args, **options)


def copy_run(group: Group, source: Path, target: Path) -> list[str]:
    if group.rank == 0:
        shutil.copytree(source, target)
    group.barrier("copy")
    return []


def stop_and_resume(group: Group, stopped: Any, compiled: Any, copy: Path) -> list[str]:
    """Train in the same processes, which share the compiled programs. copy: of the stopped run."""
    with without_inductor():
        statuses = train(group, [stopped], 3)
        copy_run(group, Path(stopped["run"]["dir"]), copy)
        return statuses + train(group, [stopped, compiled])


@pytest.mark.parametrize("case", ["dpo", "kto, lora"])
def test_a_compiled_run_resumes_and_its_checkpoints_have_the_names_of_any_other(
    case: str, place: Path, tmp_path: Path
) -> None:
    runs = {name: tmp_path / name for name in ("plain", "compiled", "stopped")}
    recipes = {
        name: written(
            case,
            place,
            folder,
            "float32",
            **SHARDED,
            train={"compile": "off" if name == "plain" else "on"},
        )
        for name, folder in runs.items()
    }
    alone, rest = tmp_path / "alone", [recipes["stopped"], recipes["compiled"]]
    jobs: list[tuple[Any, ...]] = [(train, [recipes["plain"]])]
    if case == "dpo":  # new processes resume
        jobs += [(train_compiled, rest[:1], 3), (copy_run, runs["stopped"], alone)]
        jobs += [(train_compiled, rest)]
    else:
        jobs += [(stop_and_resume, *rest, alone)]
    ended = [run(job, 2, *args, deadline=200.0) for job, *args in jobs]
    assert [rank.error for ranks in ended for rank in ranks] == [""] * 2 * len(jobs)
    for rank in (0, 1):
        statuses = [status for ranks in ended for status in ranks[rank].value]
        assert statuses == ["done", "143", "done", "done"]
    same(runs["compiled"], runs["plain"], rel=1e-4, of_logps=1e-5)
    assert names(runs["compiled"]) == names(runs["plain"])
    assert records(runs["stopped"]) == records(runs["compiled"])
    # one process resumes it without the compiler
    resumed = written(case, place, alone, "float32", train={"compile": "off"})
    assert train(SingleProcess(), [resumed], allow=["train.compile"]) == ["done"]
    same(alone, runs["plain"], rel=1e-4, of_logps=1e-5)


def names(folder: Path) -> set[str]:
    """Names of the tensors in the newest checkpoint."""
    results: set[str] = set()
    for path in (folder / "checkpoints/step-8").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            results |= set(file.keys())
    assert results
    assert not any("_orig_mod" in name for name in results)
    return results
