"""The command ``valence export``: what it writes, verifies, refuses and uploads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import HfApi
from safetensors.numpy import load_file, save_file
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.command import command, command_error
from tests.disk import full_disk
from tests.errors import check_error, raises_error
from tests.export.kit import byte_level, export_files, sentencepiece, train_place
from tests.tiny import BOS, CHATML, INST, NO_END, tiny_tokenizer
from valence.apps.export import artifacts, llama_cpp
from valence.apps.export.gguf_file import (
    architecture_of,
    file_type_of,
    read_metadata,
)
from valence.apps.export.gguf_tokenizer import has_nfc_normalizer, tokenizer_fields
from valence.apps.export.ollama import turn_texts
from valence.apps.export.probes import Probe, ProbeResult
from valence.apps.export.verify import compare
from valence.cli import export as export_command
from valence.data.template import ChatTemplate
from valence.storage import lock_file
from valence.types import Message

pytestmark = pytest.mark.usefixtures("no_llama_cpp")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that trained an adapter of a tiny Llama."""
    folder = tmp_path_factory.mktemp("export")
    train_place(folder, "llama", byte_level("gpt-2"), "model.lora.rank=2")
    return folder


def test_merged_weights_and_adapter_are_verified_with_transformers(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(place / "run")
    for kind, words in {"model": [], "adapter": ["--adapter"]}.items():
        out = tmp_path / kind
        (file,) = export_files(capsys, run, str(out), *words).values()
        assert (file["kind"], file["status"]) == (kind, "verified")
        assert file["same_tokens"] == file["same_answers"] == file["prompts"] == 14
        assert file["kl_max"] < 1e-6
        report = json.loads((out / artifacts.REPORT).read_text())
        assert report == {"run": {"name": "run", "step": 1}, "files": [file]}
        assert (out / "README.md").read_text().count(artifacts.SECTION) == 1
        assert export_files(capsys, run, str(out), "--verify-only") == {kind: file}
        assert (out / "README.md").read_text().count(artifacts.SECTION) == 1
        assert str(tmp_path) not in (out / artifacts.REPORT).read_text()


def test_without_llama_cpp_a_gguf_file_is_written_and_not_called_verified(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "named"
    files = export_files(capsys, str(place / "run"), str(out), "--gguf", "q8_0")
    assert files["q8_0"]["file"] == "named-q8_0.gguf"
    assert files["q8_0"]["status"] == "not verified"
    assert files["q8_0"]["reason"]
    assert files["q8_0"]["prompts"] == 0
    assert files["model"]["status"] == "verified"
    metadata = read_metadata(out / "named-q8_0.gguf")
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    assert metadata["general.architecture"] == "llama"
    assert metadata["tokenizer.chat_template"] == tokenizer.chat_template == CHATML
    assert metadata["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert metadata["tokenizer.ggml.tokens"] == len(tokenizer)
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    lines = (out / "Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ./named-q8_0.gguf"
    assert 'PARAMETER stop "<|im_end|>"' in lines
    assert "<|im_start|>" in (out / "Modelfile").read_text()


def test_progress_without_a_terminal_is_printed_as_lines(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = str(place / "run")
    assert command("export", run, str(tmp_path / "brief"), "--gguf", "f16") == 0
    assert "of 14 prompts" not in capsys.readouterr().out
    monkeypatch.setattr(export_command, "PLAIN_SECONDS", 0.0)
    assert command("export", run, str(tmp_path / "long"), "--gguf", "f16") == 0
    lines = capsys.readouterr().out.splitlines()
    for activity in ("loading ", "run: 14 of 14 prompts", "writing the model folder"):
        assert any(line.startswith(activity) for line in lines), activity
    assert any(line.startswith("long-f16.gguf: ") for line in lines)


def test_types_of_llama_cpp_are_quantized_from_unrounded_weights(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = tmp_path / "llama-quantize"
    program.write_text('#!/bin/sh\necho "$3" > "$2.type"\ncp "$1" "$2"\n')
    program.chmod(0o755)
    monkeypatch.setattr(
        llama_cpp.shutil, "which", lambda name: str(program) if name == program.name else None
    )
    out = tmp_path / "out"
    words = ("--gguf", "q4_k_m", "--gguf", "Q4_K_M")  # the same type is written once
    files = export_files(capsys, str(place / "run"), str(out), *words)
    assert (out / "Modelfile").is_file()
    assert (out / "out-q4_k_m.gguf.type").read_text() == "Q4_K_M\n"
    assert file_type_of(out / "out-q4_k_m.gguf") == "f32"  # of the copy
    assert files["f32"]["differences"] == []  # the weights are not rounded
    assert [path.name for path in out.glob(".*")] == []


def test_leftovers_of_a_killed_export_are_replaced(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part/out-f16.gguf").write_bytes(b"GGUF")
    export_files(capsys, str(place / "run"), str(tmp_path / "out"), "--gguf", "f32")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").glob("*.gguf")] == ["out-f32.gguf"]


def test_llama_cpp_is_looked_for_in_the_folder_of_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp.shutil, "which", lambda name: "/usr/bin/node")
    monkeypatch.setenv(llama_cpp.SETTING, str(tmp_path))
    with raises_error("llama-cpp-missing", where=llama_cpp.SETTING):
        llama_cpp.find_llama_cpp()
    module = tmp_path / llama_cpp.PACKAGE
    module.parent.mkdir(parents=True)
    module.touch()
    llama = llama_cpp.find_llama_cpp()
    assert llama is not None
    assert llama.module == module
    monkeypatch.delenv(llama_cpp.SETTING)
    monkeypatch.chdir(tmp_path)
    assert llama_cpp.find_llama_cpp() == llama


def test_verification_can_be_left_out(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export_files(capsys, str(place / "run"), str(tmp_path / "out"), "--no-verify") == {}
    assert not (tmp_path / "out" / artifacts.REPORT).exists()


def test_changed_weights_are_found(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    run, out = str(place / "run"), tmp_path / "out"
    assert command("export", run, str(out), "--no-verify") == 0
    weights = load_file(out / "model.safetensors")
    weights["model.layers.0.self_attn.v_proj.weight"] *= -1
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    words = ("--verify-only", "--push", "me/model")  # without a connection: it is not uploaded
    (file,) = export_files(capsys, run, str(out), *words).values()
    assert [f["code"] for f in file["differences"]] == ["tensors-differ"]
    path = out / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    (file,) = export_files(capsys, run, str(out), "--verify-only").values()
    assert [f["code"] for f in file["differences"]] == ["weights-damaged"]


def test_a_template_that_fails_is_found(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(place / "run"), tmp_path / "out"
    assert command("export", run, str(out), "--no-verify") == 0
    (out / "chat_template.jinja").write_text("{{ raise_exception('no') }}", encoding="utf-8")
    (file,) = export_files(capsys, run, str(out), "--verify-only").values()
    assert {f["code"] for f in file["differences"]} == {"settings-differ", "template-failed"}
    assert file["same_text"] == 0
    assert file["kl_max"] < 1e-6


@pytest.mark.parametrize(
    ("words", "code", "where"),
    [
        (["--gguf", "q4_k_m"], "llama-cpp-missing", "--gguf"),
        (["--gguf", "q9"], "gguf-type-unknown", "--gguf"),
        (["--gguf", "f16", "--adapter"], "option-conflict", "--adapter"),
        (["--gguf", "f16", "--verify-only"], "option-conflict", "--verify-only"),
        (["--no-verify", "--verify-only"], "option-conflict", "--verify-only"),
        (["--dry-run"], "option-conflict", "--dry-run"),
        (["--push", "name"], "option-conflict", "--push"),
        (["--push", "../x"], "option-conflict", "--push"),
        (["--verify-only"], "path-missing", "out"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(
    words: list[str],
    code: str,
    where: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    check_error(command_error("export", str(place / "run"), "out", *words), code, where=where)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt_neox", {}),
        ("llama", {"attention_bias": True}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
        ("gemma3", {"query_pre_attn_scalar": 7}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ],
)
def test_models_that_llama_cpp_computes_differently_are_refused(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    train_place(tmp_path, name, byte_level("gpt-2"), **changes)
    words = ("export", str(tmp_path / "run"), str(tmp_path / "out"), "--gguf", "f16")
    check_error(command_error(*words), "gguf-architecture-unsupported")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("qwen2", {"hidden_act": "relu"}),
        ("gemma2", {"hidden_activation": "gelu"}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"tie_word_embeddings": False}),
        ("gemma3_text", {"final_logit_softcapping": 30.0}),
    ],
)
def test_settings_that_llama_cpp_does_not_read_are_refused(
    name: str, changes: dict[str, Any]
) -> None:
    assert architecture_of(AutoConfig.for_model(name)).name == name.removesuffix("_text")
    with raises_error("gguf-architecture-unsupported"):
        architecture_of(AutoConfig.for_model(name, **changes))


@pytest.mark.parametrize(
    ("part", "step"),
    [
        ("normalizer", normalizers.Lowercase()),
        ("normalizer", normalizers.Replace("a", "b")),
        ("pre_tokenizer", pre_tokenizers.Whitespace()),
    ],
)
def test_tokenizers_that_llama_cpp_reads_differently_are_refused(part: str, step: Any) -> None:
    tokenizer: Any = byte_level("gpt-2")
    tokenizer_fields(tokenizer, len(tokenizer))
    setattr(tokenizer.backend_tokenizer, part, step)
    with raises_error("gguf-tokenizer-unsupported"):
        tokenizer_fields(tokenizer, len(tokenizer))


@pytest.mark.parametrize("step", [normalizers.NFC(), normalizers.Sequence([normalizers.NFC()])])
def test_unicode_normalization_is_accepted(step: Any) -> None:
    tokenizer: Any = byte_level("qwen2")
    assert has_nfc_normalizer(tokenizer)
    tokenizer.backend_tokenizer.normalizer = None
    assert not has_nfc_normalizer(tokenizer)
    tokenizer.backend_tokenizer.normalizer = step
    assert has_nfc_normalizer(tokenizer)
    assert tokenizer_fields(tokenizer, len(tokenizer)).pre == "qwen2"


def test_a_killed_export_leaves_no_folder(place: Path, tmp_path: Path) -> None:
    words = ("export", str(place / "run"), str(tmp_path / "out"), "--gguf", "f32")
    with full_disk((place / "model/model.safetensors").stat().st_size + 1000):
        check_error(command_error(*words), "file-not-writable")
    assert list(tmp_path.iterdir()) == []


def test_push_uploads_the_folder_and_a_dry_run_does_not(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def create(self: HfApi, repo_id: str, **settings: Any) -> None:
        calls.append((repo_id, settings))

    def upload(self: HfApi, repo_id: str, folder_path: Path, **settings: Any) -> str:
        files = sorted(path.name for path in folder_path.iterdir())
        calls.append((repo_id, {"files": files, "ignored": settings["ignore_patterns"]}))
        return "https://example.org"

    def upload_one(self: HfApi, path_or_fileobj: bytes, path_in_repo: str, **_: Any) -> None:
        texts[path_in_repo] = path_or_fileobj.decode()

    texts: dict[str, str] = {}
    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_file", upload_one)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    run = str(place / "run")
    words = ("export", run, str(tmp_path / "dry"), "--push", "me/model")
    assert command(*words, "--dry-run") == 0
    assert calls == []
    assert "model.safetensors" in capsys.readouterr().out
    assert command("export", run, str(tmp_path / "out"), "--push", "me/model") == 0
    (name, settings), (uploaded, content) = calls
    assert name == uploaded == "me/model"
    assert settings["private"] is True
    assert {"model.safetensors", "README.md", artifacts.REPORT} <= set(content["files"])
    assert texts == {}
    words = ("export", run, str(tmp_path / "adapter"), "--adapter", "--push", "me/adapter")
    assert command(*words) == 0
    assert json.loads(texts["adapter_config.json"])["base_model_name_or_path"] == "model"
    assert calls[-1][1]["ignored"] == ["adapter_config.json"]


def test_a_failed_upload_keeps_the_folder(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(self: HfApi, repo_id: str, **settings: Any) -> None:
        raise OSError("no connection")

    monkeypatch.setattr(HfApi, "create_repo", create)
    words = ("export", str(place / "run"), str(tmp_path / "out"), "--push", "me/model")
    check_error(command_error(*words, "--no-verify"), "upload-failed", where="--push")
    assert (tmp_path / "out/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("kill -9 $$", "llama-cpp-broken"),
        ("echo 'Error: ENOSPC: no space left on device, write' >&2; exit 1", "llama-cpp-broken"),
        ("echo 'Error: invalid magic' >&2; exit 1", "llama-cpp-failed"),
        ("kill -11 $$", "llama-cpp-failed"),
    ],
)
def test_a_lack_of_memory_or_disk_space_is_no_fault_of_the_file(
    script: str, code: str, tmp_path: Path
) -> None:
    node = tmp_path / "node"
    node.write_text(f"#!/bin/sh\necho 0\n{script}\n")
    node.chmod(0o755)
    llama = llama_cpp.LlamaCpp(str(node), tmp_path / "a/b/c/d/index.js")
    probe, expected, _ = _results({})
    with raises_error(code):
        llama_cpp.run_llama_cpp(
            llama, tmp_path / "x.gguf", [probe], [expected], variables={}, end_ids=[2]
        )


def test_two_exports_do_not_write_one_folder(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("export", str(place / "run"), str(tmp_path / "out"), "--no-verify")
    with lock_file(tmp_path / ".out.lock") as is_locked:
        assert is_locked
        check_error(command_error(*words), "output-locked", where=str(tmp_path / "out"))
    (tmp_path / ".out.lock").touch()  # of a killed export
    assert command(*words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class Killed(BaseException):
    """Ends an export like kill -9."""


@pytest.fixture
def killed_export(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that an export published before it was killed, with the lock that it left."""
    out, lock = tmp_path / "out", tmp_path / ".out.lock"
    left = bytearray()

    load = AutoModelForCausalLM.from_pretrained

    def kill(path: Any, *options: Any, **settings: Any) -> Any:
        if path != out:
            return load(path, *options, **settings)
        left.extend(lock.read_bytes())
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", kill)
        with pytest.raises(Killed):
            command("export", str(place / "run"), str(out))
    lock.write_bytes(left)
    return out


def test_an_export_that_was_killed_after_it_wrote_the_folder_is_finished_by_the_same_command(
    killed_export: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = killed_export / "model.safetensors"
    written_at = weights.stat().st_mtime_ns
    (file,) = export_files(capsys, str(place / "run"), str(killed_export)).values()
    assert file["status"] == "verified"
    assert weights.stat().st_mtime_ns == written_at
    assert (killed_export / artifacts.REPORT).is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_a_killed_export_with_other_settings_is_refused(
    killed_export: Path, place: Path, tmp_path: Path
) -> None:
    words = ("export", str(place / "run"), str(killed_export), "--adapter")
    check_error(command_error(*words), "path-exists", where=str(killed_export))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_changed_weights_in_the_folder_of_a_killed_export_are_found(
    killed_export: Path, place: Path
) -> None:
    path = killed_export / "model.safetensors"
    weights = load_file(path)
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + 1}, path, metadata={"format": "pt"})
    assert command("export", str(place / "run"), str(killed_export)) == export_command.DIFFERS


# --- comparison


def _results(changes: dict[str, Any]) -> tuple[Probe, ProbeResult, ProbeResult]:
    probe = Probe("question", None, "text", (1, 5, 6))
    logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]], np.float32)
    expected = ProbeResult(None, "text", (1, 5, 6), (0, 1), "stop", logits)
    values = {f: getattr(expected, f) for f in expected.__dataclass_fields__} | changes
    return probe, expected, ProbeResult(**values)


def _compare(**changes: Any) -> Any:
    from valence.apps.export.probes import ArtifactResult

    stops = changes.pop("stops", (True,))
    probe, expected, result = _results(changes)
    artifact = ArtifactResult("program 1", stops, (result,))
    return compare("f", "f16", [probe], [expected], artifact, end_names=["</s>"], bos=1)


def test_equal_results_are_verified() -> None:
    result = _compare()
    assert (result.status, result.differences) == ("verified", ())
    assert (result.agreement, result.kl_mean, result.kl_max) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"ids": (1, 1, 5, 6)}, "double-bos"),
        ({"ids": (5, 6)}, "missing-bos"),
        ({"ids": (1, 5, 7)}, "tokens-differ"),
        ({"text": "test", "ids": (1, 9, 6)}, "template-differs"),
        ({"error": "no filter", "text": None, "ids": ()}, "template-failed"),
        ({"stops": (False,)}, "stop-token-missing"),
        ({"completion": (0, 1, 2), "stop": "length"}, "runs-on"),
        ({"logits": np.zeros((2, 3), np.float32)}, "logits-differ"),
        ({"logits": np.full((2, 3), np.nan, np.float32)}, "logits-differ"),
        ({"logits": np.zeros((0, 3), np.float32)}, "logits-differ"),
    ],
)
def test_each_difference_has_its_cause(changes: dict[str, Any], code: str) -> None:
    result = _compare(**changes)
    assert result.status == "differs"
    assert [difference.code for difference in result.differences] == [code]
    json.dumps(result.as_dict(), allow_nan=False)


def test_one_token_that_differs_is_not_hidden_by_the_mean() -> None:
    from valence.apps.export.probes import ArtifactResult

    logits = np.zeros((300, 3), np.float32)
    other = logits.copy()
    other[7] = [5.0, 0.0, 0.0]
    probe, expected, result = _results({})
    expected, result = replace(expected, logits=logits), replace(result, logits=other)
    artifact = ArtifactResult("program 1", (True,), (result,))
    for kind, status in {"f16": "differs", "model": "differs", "q8_0": "verified"}.items():
        verified = compare("f", kind, [probe], [expected], artifact, end_names=["</s>"], bos=1)
        assert verified.kl_mean < 0.01
        assert verified.status == status
    rounded = compare(
        "f", "f16", [probe], [expected], artifact, end_names=["</s>"], bos=1, rounded_base=True
    )
    assert rounded.status == "verified"


def test_the_model_of_a_4_bit_run_is_verified_only_if_it_answers_as_the_run() -> None:
    from valence.apps.export.probes import ArtifactResult

    logits = np.tile(np.array([0.1, 0.0, -1.0], np.float32), (100, 1))
    for same, status in {100: "verified", 95: "verified", 51: "not verified"}.items():
        other = logits.copy()
        other[same:] = [0.0, 0.1, -1.0]  # other top tokens, at nearly the same probabilities
        probe, expected, result = _results({})
        expected, result = replace(expected, logits=logits), replace(result, logits=other)
        artifact = ArtifactResult("program 1", (True,), (result,))
        verified = compare(
            *("f", "model", [probe], [expected], artifact),
            end_names=["</s>"],
            bos=1,
            rounded_base=True,
        )
        assert verified.kl_mean < 0.01
        assert verified.agreement == same / 100
        assert (verified.status, bool(verified.reason)) == (status, status != "verified")


def test_the_divergence_is_that_of_the_formula() -> None:
    logits = np.array([[1.0, 0.0, 1.0], [0.0, 3.0, 1.0]], np.float32)
    result = _compare(logits=logits)
    p = np.exp([2.0, 0.0, 1.0]) / np.exp([2.0, 0.0, 1.0]).sum()
    q = np.exp([1.0, 0.0, 1.0]) / np.exp([1.0, 0.0, 1.0]).sum()
    expected = float((p * np.log(p / q)).sum())
    assert result.kl_max == pytest.approx(expected)
    assert result.kl_mean == pytest.approx(expected / 2)


# --- Ollama

CONVERSATION: tuple[Message, ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
)


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("kind", ["chatml", "gemma", "bos"])
def test_turns_render_as_the_chat_template(kind: str, system: bool) -> None:
    tokenizer: Any = {
        "chatml": lambda: tiny_tokenizer(CHATML),
        "bos": lambda: tiny_tokenizer(BOS),
        "gemma": sentencepiece,
    }[kind]()
    template = ChatTemplate(tokenizer)
    texts = turn_texts(template, "")
    assert texts is not None
    messages = CONVERSATION if system else CONVERSATION[1:]
    assert texts.render(messages) == template.render(messages, ask=True)
    for literal in (texts.before_user, texts.after_user, texts.before_assistant, texts.ask):
        assert literal in texts.go_template()


def test_a_bos_that_ollama_adds_is_left_out() -> None:
    template = ChatTemplate(tiny_tokenizer(BOS))
    without, with_bos = turn_texts(template, "<s>"), turn_texts(template, "")
    assert without is not None
    assert with_bos is not None
    assert "<s>" not in without.go_template()
    assert "<s>" in with_bos.go_template()


def test_templates_that_turns_do_not_describe_have_no_go_template() -> None:
    last = (
        "{% for m in messages %}{{ m['role'] }}:{% if loop.last %}!{% endif %}{{ m['content'] }}"
        "<|im_end|>{% endfor %}"
    )
    assert turn_texts(ChatTemplate(tiny_tokenizer(last)), "") is None


@pytest.mark.parametrize("source", [INST, NO_END])
def test_templates_without_system_turns_or_end_tokens_are_derived(source: str) -> None:
    template = ChatTemplate(tiny_tokenizer(source))
    texts = turn_texts(template, "")
    assert texts is not None
    messages = CONVERSATION[1:]
    assert texts.render(messages) == template.render(messages, ask=True)
