"""Exported folders in a real vLLM, and what is reported without one."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.command import command, command_error
from tests.errors import check_error
from tests.export.kit import ADAPTER, byte_level, check_equal, export_files, real_vllm, train_place
from tests.rollouts.test_vllm_starting import python as stand_in
from tests.rollouts.vllm_server import needs_vllm
from tests.tiny import BOS
from valence.apps.export.probes import log_softmax
from valence.apps.export.vllm import MAX_LOGPROBS, complete_distribution
from valence.rollouts.servers import PYTHON

__all__ = ["real_vllm"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that trained an adapter of a tiny Llama with BOS, and both exports."""
    folder = tmp_path_factory.mktemp("vllm")
    train_place(folder, "llama", byte_level("qwen2", BOS, adds_bos=True), *ADAPTER)
    for name, words in {"merged": (), "adapter": ("--adapter",)}.items():
        assert (
            command("export", str(folder / "run"), str(folder / name), "--no-verify", *words) == 0
        )
    return folder


def verify(
    capsys: pytest.CaptureFixture[str], place: Path, folder: Path, *words: str
) -> dict[str, Any]:
    """What vLLM makes of a folder."""
    run = str(place / "run")
    return export_files(capsys, run, str(folder), "--verify-only", *words)["vllm"]


def codes(file: dict[str, Any]) -> set[str]:
    return {f["code"] for f in file["differences"] if f["severity"] == "error"}


# --- with vLLM


def with_vllm(test: Any) -> Any:
    """A test that starts vLLM."""
    marks = (pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600), needs_vllm)
    for mark in (*marks, pytest.mark.usefixtures("real_vllm")):
        test = mark(test)
    return test


@with_vllm
@pytest.mark.parametrize("name", ["merged", pytest.param("adapter", marks=pytest.mark.daily)])
def test_vllm_computes_the_same_model(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = verify(capsys, place, place / name, "--vllm")
    check_equal(file)
    assert file["same_answers"] == 14
    assert file["kl_max"] < 1e-6
    report = json.loads((place / name / "verification.json").read_text())
    assert [item["kind"] for item in report["files"]][1] == "vllm"
    assert str(place) not in (place / name / "README.md").read_text()


def _template(folder: Path, text: str) -> None:
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")


def _weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.v_proj.weight"] *= -1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _end(folder: Path) -> None:
    for file in ("generation_config.json", "config.json"):
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 2}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "</s>"}))


def _pre_tokenizer(folder: Path) -> None:
    text = json.loads((folder / "tokenizer.json").read_text())
    steps = text["pre_tokenizer"]["pretokenizers"]
    text["pre_tokenizer"]["pretokenizers"] = [steps[1] | {"use_regex": True}]
    (folder / "tokenizer.json").write_text(json.dumps(text))


DAMAGE: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "another template": (
        lambda folder: _template(folder, BOS.replace("'<|im_end|>'", "'<|im_end|> '")),
        {"template-differs"},
    ),
    "doubled BOS": (lambda folder: _template(folder, "{{ bos_token }}" + BOS), {"double-bos"}),
    "invalid template": (
        lambda folder: _template(folder, "{{ raise_exception('no') }}"),
        {"template-failed"},
    ),
    "another pre-tokenizer": (_pre_tokenizer, {"tokens-differ"}),
    "changed weights": (_weights, {"tensors-differ"}),
    "another end token": (_end, {"stop-token-missing"}),
    "half a file": (
        lambda folder: (folder / "model.safetensors").write_bytes(
            (folder / "model.safetensors").read_bytes()[:5000]
        ),
        {"vllm-failed"},
    ),
}


@with_vllm
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "doubled BOS" else [pytest.mark.daily])
        for name in DAMAGE
    ],
)
def test_a_damaged_folder_is_found_with_its_cause(
    name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, expected = DAMAGE[name]
    shutil.copytree(place / "merged", tmp_path / "out")
    damage(tmp_path / "out")
    file = verify(capsys, place, tmp_path / "out", "--vllm")
    assert file["status"] == "differs"
    assert codes(file) >= expected, file


# --- without vLLM


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)


@pytest.mark.usefixtures("no_vllm")
def test_without_vllm_the_command_says_how_to_verify_with_it(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("export", str(place / "run"), str(place / "merged"), "--verify-only")
    assert command(*words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "was not loaded with vLLM" in out
    assert f"set {PYTHON} to the Python of an environment with vLLM" in out
    assert "merged --verify-only --vllm" in out
    assert command(*words, "--no-vllm") == 0
    assert "vLLM" not in capsys.readouterr().out
    target = str(tmp_path / "out")
    for option, code in {"--vllm": "library-missing", "--no-verify": "option-conflict"}.items():
        error = command_error("export", str(place / "run"), target, "--vllm", option)
        check_error(error, code, where="--vllm")
    assert not Path(target).exists()


def test_a_python_without_vllm_is_refused_before_anything_is_written(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = stand_in(tmp_path, "", version_script="raise KeyError('vllm')")
    monkeypatch.setenv(PYTHON, str(without))
    error = command_error("export", str(place / "run"), str(tmp_path / "out"))
    check_error(error, "library-missing", where=str(without))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("ValueError: the model type zebra is unknown", "differs"),
        ("ValueError: No available memory for the cache blocks.", "not verified"),
    ],
)
def test_a_server_that_stops_names_the_error_of_its_log(
    line: str,
    status: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = stand_in(tmp_path, f"print('(EngineCore pid=1) {line}'); sys.exit(1)")
    monkeypatch.setenv(PYTHON, str(program))
    file = verify(capsys, place, place / "merged")
    assert file["status"] == status
    text = file["reason"] or file["differences"][0]["message"]
    assert line in text
    assert "pid=1" not in text


def test_tokens_without_a_log_probability_share_the_rest_as_in_the_run() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0])
    p = np.exp(log_softmax(logits[None])[0])
    q = np.exp(complete_distribution({0: np.log(0.5), 1: np.log(0.3)}, logits))
    assert q[:2] == pytest.approx([0.5, 0.3])
    assert q.sum() == pytest.approx(1.0)
    assert q[2] / q[3] == pytest.approx(p[2] / p[3])
    # the divergence is that of (token 0, token 1, all others)
    merged = p[0] * np.log(p[0] / 0.5) + p[1] * np.log(p[1] / 0.3)
    merged += p[2:].sum() * np.log(p[2:].sum() / 0.2)
    assert (p * np.log(p / q)).sum() == pytest.approx(merged)


def test_no_other_token_is_likelier_than_the_most_likely_ones() -> None:
    logits = np.zeros(MAX_LOGPROBS + 10)
    logits[-1] = 20.0  # the run is certain of a token that vLLM hardly considers
    reported = {i: float(np.log(0.5 / MAX_LOGPROBS)) for i in range(MAX_LOGPROBS)}
    values = complete_distribution(reported | {MAX_LOGPROBS: -30.0}, logits)
    assert values[-1] <= min(reported.values())
    assert values[MAX_LOGPROBS] == -30.0
    complete = {0: float(np.log(0.75)), 1: float(np.log(0.25))}
    assert complete_distribution(complete, np.zeros(2)) == pytest.approx(list(complete.values()))
