"""The benchmarks for GPUs, on the CPU and on the simulated device."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import attention as attention_speed
from benchmarks.gpu import correctness, ipc, peer, sharded, steps
from benchmarks.gpu.attention import AttentionCase
from benchmarks.gpu.correctness import GROUPED_SMALL, PACKED_LIMITS, long_batch
from benchmarks.gpu.results import FILE, RUNNING, Check, Recorder, Result, read_results
from benchmarks.step.cases import Case
from benchmarks.step.inputs import draw_sets
from tests.simulated_cuda import CUDA, simulated_device
from valence.models import attention, flex
from valence.models.flex import Visible
from valence.models.layout import segment_table, segments_of

HOST = torch.device("cpu")


# ---------------------------------------------------------------- results


def run_checks(folder: Path, *checks: Check, seconds: float = 60, **options: Any) -> list[str]:
    """Run checks and return the status of each."""
    return [result.status for result in Recorder("A", [folder], seconds, **options).run(checks)]


def test_a_failed_check_does_not_end_the_others(tmp_path: Path) -> None:
    checks = [
        Check("first", lambda: {"x": 1.0}, maxima={"x": 2.0}),
        Check("second", lambda: {"x": 1 / 0}, fix="divide by something else"),
        Check("third", lambda: {"x": 1.0}, minima={"x": 2.0}),
        Check("fourth", lambda: {"x": math.nan}, maxima={"x": 2.0}),
        Check("fifth", dict, maxima={"x": 2.0}),
        Check("background", lambda: {"x": 1}, is_background=True),
    ]
    assert run_checks(tmp_path, *checks) == ["ok", "failed", "missed", "missed", "failed", "ok"]
    lines = (tmp_path / FILE).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["status"] for line in lines] == [
        "ok", "failed", "missed", "missed", "failed", "ok",
    ]  # fmt: skip
    assert "ZeroDivisionError" in json.loads(lines[1])["error"]
    assert not (tmp_path / RUNNING).exists()


def test_limits_are_not_compared_in_a_rehearsal_of_speed(tmp_path: Path) -> None:
    check = Check("slow", lambda: {"x": 1.0}, minima={"x": 2.0})
    assert run_checks(tmp_path, check, compares=False) == ["measured"]


def test_checks_with_a_result_are_not_run_again(tmp_path: Path) -> None:
    calls: list[str] = []

    def counted(name: str, value: float) -> Callable[[], dict[str, float]]:
        return lambda: calls.append(name) or {"x": value}  # pyright: ignore[reportReturnType]

    checks = [
        Check("right", counted("right", 0.0), maxima={"x": 1.0}),
        Check("wrong", counted("wrong", 2.0), maxima={"x": 1.0}),
    ]
    run_checks(tmp_path, *checks)
    with (tmp_path / FILE).open("a", encoding="utf-8") as file:
        file.write('{"part": "A", "name": "ri')  # a line that was cut off
    assert run_checks(tmp_path, *checks) == ["ok", "missed"]
    assert calls == ["right", "wrong"]
    assert run_checks(tmp_path, *checks, retries=True) == ["ok", "missed"]
    assert calls == ["right", "wrong", "wrong"]


def test_what_is_left_at_the_end_of_the_time_is_skipped_and_run_later(tmp_path: Path) -> None:
    def hang() -> dict[str, float]:
        try:
            time.sleep(30)
        except Exception as error:
            raise AssertionError from error
        return {}

    checks = [
        Check("long", hang),
        Check("next", dict),
        Check("background", hang, is_background=True),
    ]
    start = time.monotonic()
    assert run_checks(tmp_path, *checks, seconds=0.3) == ["skipped"] * 3
    assert time.monotonic() - start < 10
    assert run_checks(tmp_path, Check("long", dict), Check("next", dict)) == ["ok", "ok"]


def test_a_check_that_ends_the_process_has_failed(tmp_path: Path) -> None:
    """The next start goes on after it."""
    script = (
        "import os, pathlib, sys\n"
        "from benchmarks.gpu.results import Check, Recorder\n"
        "checks = [Check('first', dict), Check('fatal', lambda: os.kill(os.getpid(), 9)),"
        " Check('last', dict)]\n"
        "Recorder('A', [pathlib.Path(sys.argv[1])], 60).run(checks)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    assert subprocess.run(command, env=environment).returncode == 0
    statuses = {result.name: result.status for result in read_results(tmp_path)}
    assert statuses == {"first": "ok", "fatal": "failed", "last": "ok"}


@pytest.mark.parametrize("is_lost", [True, False])
def test_the_program_starts_again_if_an_error_has_made_the_device_unusable(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize() -> None:
        if is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    starts: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(os, "execv", lambda _, command: starts.append(command))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "benchmarks.gpu", "A", "--retry"])
    gpu.restart_if_device_is_lost()
    assert starts == [["python", "-m", "benchmarks.gpu", "A"]] * is_lost


def test_a_result_says_what_to_do_after_a_miss() -> None:
    missed = Result("A", "x", "missed", figures={"y": 1.0}, missed=["y"], fix="divide by two")
    assert "divide by two" in str(missed)
    assert "y" in str(missed).splitlines()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "status", "kinds"),
    [
        ("A", "ok", {"environment", "packed", "head", "step", "run", "sharded", "tests"}),
        (
            "B",
            "measured",
            {
                "ceilings",
                "step",
                "profile of the slowest step",
                "attention",
                "programs",
                "short documents",
            },
        ),
    ],
)
def test_a_rehearsal_completes(
    part: str, status: str, kinds: set[str], forking_python: str, tmp_path: Path
) -> None:
    folders = {"OUT": str(tmp_path / "out"), "WORK": str(tmp_path / "work")}
    environment = os.environ | folders | {
        "PYTHON": forking_python, "BUDGET": "280", "WHEELS": str(tmp_path),
    }  # fmt: skip
    script = Path(__file__).parents[1] / "benchmarks" / "gpu" / "first_contact.sh"
    assert subprocess.run([script, part, "--rehearse"], env=environment).returncode == 0
    results = list(read_results(tmp_path / "out"))
    assert {result.status for result in results} == {status}
    assert {result.name.split(",")[0] for result in results} == kinds
    assert results == list(read_results(tmp_path / "work"))


# ---------------------------------------------------------------- right


def test_the_long_batch_has_full_and_partial_blocks_and_two_passes() -> None:
    batch = long_batch(128, HOST)
    assert 1500 <= len(batch.tokens) <= 3000
    assert 0 < sum(batch.requires_grad) < batch.sequences
    mask = Visible(segments_of(segment_table(batch.segments)), (0,), HOST).masks[0]
    assert mask.full_kv_num_blocks is not None
    assert int(mask.full_kv_num_blocks.sum()) > 20
    assert int(mask.kv_num_blocks.sum()) > 20


@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.float32, slice(200, 201)), (torch.bfloat16, slice(128, 256))]
)
def test_attention_that_forgets_a_key_or_a_block_is_found(
    dtype: torch.dtype, rows: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the heads of the model for GPUs, one key is enough in bfloat16 too."""

    def forgets(query: Tensor, key: Tensor, value: Tensor, layout: Any) -> Tensor:
        key, value = key.clone(), value.clone()
        key[:, :, rows] = value[:, :, rows] = 0
        return right(query, key, value, layout)

    right, limits = attention.attend_by_sdpa, PACKED_LIMITS[dtype]
    with simulated_device():
        expected = correctness.compare_packed(GROUPED_SMALL, dtype, CUDA, "sdpa")
        monkeypatch.setattr(attention, "attend_by_sdpa", forgets)
        figures = correctness.compare_packed(GROUPED_SMALL, dtype, CUDA, "sdpa")
    assert all(expected[name] <= limit for name, limit in limits.items())
    assert figures["logp_rms"] > limits["logp_rms"]
    assert figures["grad"] > limits["grad"]


@pytest.mark.parametrize("method", correctness.STEPS)
def test_a_step_is_the_one_of_the_reference_figures(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a policy that has learned nothing, whose loss says nothing at a beta of 0.1."""
    limits = correctness.STEP_LIMITS[torch.float32]
    figures = correctness.compare_step(method, GROUPED_SMALL, torch.float32, HOST)
    assert all(figures[name] <= limit for name, limit in limits.items())
    monkeypatch.setattr(correctness, "REFERENCE_NOISE", 0.0)
    figures = correctness.compare_step(method, GROUPED_SMALL, torch.float32, HOST)
    assert figures["margins"] > correctness.STEP_LIMITS[torch.bfloat16]["margins"]


def test_the_expected_figures_are_those_of_the_command() -> None:
    """Of the small model, in float64."""
    expected = correctness.expected_figures(GROUPED_SMALL)
    computed = correctness.compute_figures(GROUPED_SMALL)
    assert computed["packed"]["logps"] == pytest.approx(expected["packed"]["logps"], abs=2e-5)
    for name in correctness.STEPS:
        assert computed[name]["loss"] == pytest.approx(expected[name]["loss"], rel=1e-4)


# ---------------------------------------------------------------- fast


@pytest.mark.parametrize("case", steps.CASES, ids=lambda case: case.method)
def test_a_step_of_a_device_has_the_loss_of_the_host(case: Case) -> None:
    variant = steps.SMALL_VARIANTS[1]
    expected = steps.measure_step(case, variant, HOST)["loss"]
    with simulated_device():
        assert steps.measure_step(case, variant, CUDA)["loss"] == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("case", attention_speed.SMALL_CASES, ids=str)
def test_all_attention_backends_are_measured(case: AttentionCase) -> None:
    with simulated_device():
        for backend in attention_speed.backends_for(case):
            figures = attention_speed.measure_attention(case, backend, CUDA)
            assert figures["forward_tflops"] > 0
            seconds = (figures["forward_ms"] + figures["backward_ms"]) / 1e3
            assert figures["tokens_per_s"] == pytest.approx(case.rows / seconds)


def test_the_programs_of_several_sizes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU only those of the compiler's first stage, for the forward pass."""
    monkeypatch.setattr(Visible, "__call__", Visible.run_compiled)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    flex._compiled.cache_clear()
    case = attention_speed.SMALL_PROGRAM_CASE
    try:
        for _ in range(2):  # nothing is left of the first time
            figures = attention_speed.measure_programs(case, attention_speed.SMALL_SIZES, HOST)
            assert figures["programs"] == 3
            assert figures["compile_s"] > 0
    finally:
        flex._compiled.cache_clear()
        torch.compiler.reset()


@pytest.mark.parametrize("backend", correctness.BACKENDS)
def test_short_documents_are_measured_with_each_backend(backend: str) -> None:
    variant = steps.SMALL_VARIANTS[-1]
    with simulated_device():
        before = steps.make_policy(variant, CUDA).attention_backend
        figures = steps.measure_step(steps.SHORT, variant, CUDA, backend)
        assert steps.make_policy(variant, CUDA).attention_backend == before
    assert figures["attention"] == backend
    assert figures["tokens_per_s"] > 0


def test_documents_of_a_step_have_160_tokens() -> None:
    (units,) = draw_sets(steps.SHORT, 1)
    assert {unit.tokens for unit in units} <= set(range(157, 164))
    assert 90 <= len(units) <= steps.BUDGET // 160


def test_the_step_with_the_smallest_share_is_profiled(tmp_path: Path) -> None:
    variant = steps.SMALL_VARIANTS[0]
    cases = {f"{case.name}": (case, variant) for case in steps.CASES}
    recorder = Recorder("B", [tmp_path / "work"], 60)
    shares = zip(cases, (0.3, 0.1, 0.2), strict=True)
    recorder.run([Check(f"step, {name}", lambda x=x: {"share": x}) for name, x in shares])
    # of another kind of check
    recorder.run([Check("short documents, flex", lambda: {"share": 0.01})])
    figures = gpu.profile_slowest(cases, HOST, tmp_path / "work", tmp_path)
    assert figures["step"] == f"{variant} dpo"
    assert (tmp_path / "profile.json.gz").exists()
    assert "aten::mm" in (tmp_path / "profile.txt").read_text(encoding="utf-8")


def test_sharded_weights_are_compared_and_saved_in_another_process(
    tmp_path: Path, forking_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", forking_python)
    for _ in range(2):  # again, after a failure
        figures = sharded.compare_sharded(tmp_path / "work", tmp_path / "sharded.log")
        assert figures["num_sharded"] == 16
        assert max(figures["logp_rms"], figures["grad"]) < 1e-3
        assert figures["unequal_saved"] == 0


@pytest.mark.parametrize("is_damaged", [False, True])
def test_another_process_that_reads_other_bytes_is_found(
    is_damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a file instead of the memory of a GPU."""
    path = tmp_path / "buffer"
    receiver = "import pathlib, sys; print(sum(pathlib.Path(sys.argv[1]).read_bytes()))"

    def export(buffer: Tensor) -> str:
        path.write_bytes(buffer.numpy().tobytes()[: len(buffer) - is_damaged])
        return str(path)

    monkeypatch.setattr(ipc, "RECEIVER", receiver)
    monkeypatch.setattr(ipc, "export", export)
    monkeypatch.setattr(
        ipc, "shareable_buffer", lambda size, device: torch.empty(size, dtype=torch.uint8)
    )
    monkeypatch.setattr(ipc, "BYTES", 1000)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    figures = ipc.compare_shared_memory(HOST, tmp_path / "log")
    assert figures["difference"] == (999 % 251 if is_damaged else 0)


# Compared with TRL


@pytest.mark.parametrize(
    ("ours", "theirs", "agree"),
    [
        ((0.2, 7.0), (0.201, 7.01), True),
        ((0.2, 7.0), (0.25, 7.0), False),
        ((0.2, 7.0), (0.2, 9.0), False),
        ((0.2, 7.0), (math.nan, 7.0), False),
        ((0.5, 7.0), (0.5, 7.0), False),
    ],
)
def test_sides_that_disagree_or_learn_nothing_have_no_times(
    ours: tuple[float, float], theirs: tuple[float, float], agree: bool
) -> None:
    with nullcontext() if agree else pytest.raises(RuntimeError, match="loss"):
        figures = peer.measure_agreement(lambda: ours, lambda: theirs, HOST)
        assert (figures["loss"], figures["trl_grad_norm"]) == (0.2, 7.01)
