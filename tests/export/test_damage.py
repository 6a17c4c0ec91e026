"""Detection of files that would answer differently from the run, with the cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command import command
from tests.export.kit import (
    byte_level,
    export_files,
    llama_cpp,
    needs_llama_cpp,
    train_place,
)
from tests.tiny import BOS, CHATML
from valence.apps.export.gguf_file import write_gguf
from valence.apps.export.llama_cpp import PACKAGE, SETTING

__all__ = ["llama_cpp"]
pytestmark = [pytest.mark.slow, needs_llama_cpp, pytest.mark.usefixtures("llama_cpp")]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a Llama that trains with BOS, and its export."""
    folder = tmp_path_factory.mktemp("damage")
    train_place(folder, "llama", byte_level("qwen2", BOS, adds_bos=True))
    assert command("export", str(folder / "run"), str(folder / "out"), "--no-verify") == 0
    return folder


def _replace_template(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _change(folder: Path, file: str, **settings: Any) -> None:
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(values | settings))


def _rename_pre_tokenizer(folder: Path) -> None:
    text = json.loads((folder / "tokenizer.json").read_text())
    text["pre_tokenizer"]["pretokenizers"] = [
        text["pre_tokenizer"]["pretokenizers"][1] | {"use_regex": True}
    ]
    (folder / "tokenizer.json").write_text(json.dumps(text))


def _add_no_bos(folder: Path) -> None:
    text = json.loads((folder / "tokenizer.json").read_text())
    text["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(text))
    _replace_template(folder, CHATML)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "another template": (
        lambda folder: _replace_template(folder, BOS.replace("'<|im_end|>'", "'<|im_end|> '")),
        "template-differs",
    ),
    "doubled BOS": (
        lambda folder: _replace_template(folder, "{{ bos_token }}" + BOS),
        "double-bos",
    ),
    "no BOS": (_add_no_bos, "missing-bos"),
    "invalid template": (
        lambda folder: _replace_template(folder, "{{ raise_exception('no') }}"),
        "template-failed",
    ),
    "another pre-tokenizer": (_rename_pre_tokenizer, "tokens-differ"),
    "another RoPE base": (
        lambda folder: _change(
            folder, "config.json", rope_parameters={"rope_type": "default", "rope_theta": 100.0}
        ),
        "metadata-differs",
    ),
    "another norm epsilon": (
        lambda folder: _change(folder, "config.json", rms_norm_eps=10.0),
        "metadata-differs",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_found_with_its_cause(
    name: str, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, code = DAMAGE[name]
    shutil.copytree(exported / "out", tmp_path / "damaged")
    damage(tmp_path / "damaged")
    (tmp_path / "out").mkdir()
    write_gguf(tmp_path / "damaged", tmp_path / "out/x-f16.gguf", "f16", end_ids=[4])
    words = (str(exported / "run"), str(tmp_path / "out"), "--verify-only")
    file = export_files(capsys, *words)["f16"]
    assert file["status"] == "differs"
    assert code in [f["code"] for f in file["differences"] if f["severity"] == "error"]
    assert json.loads((tmp_path / "out/verification.json").read_text())["files"] == [file]


def test_a_missing_end_token_is_found(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # llama.cpp knows <|im_end|> by its name: rename it, as a tokenizer with other markers
    out = tmp_path / "out"
    out.mkdir()
    shutil.copytree(exported / "out", tmp_path / "copy")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        path = tmp_path / "copy" / file
        path.write_text(path.read_text().replace("<|im_end|>", "<|im_stop|>"))
    _change(tmp_path / "copy", "tokenizer_config.json", eos_token="</s>")
    write_gguf(tmp_path / "copy", out / "x-f16.gguf", "f16")
    file = export_files(capsys, str(exported / "run"), str(out), "--verify-only")["f16"]
    codes = {f["code"]: f["severity"] for f in file["differences"]}
    assert codes["stop-token-missing"] == "error"
    assert file["stops"] < file["num_ends"]


def test_a_llama_cpp_that_does_not_start_verifies_nothing(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    module = tmp_path / "broken" / PACKAGE
    module.parent.mkdir(parents=True)
    module.write_text("export async function getLlama() { throw new Error('no binary'); }")
    monkeypatch.setenv(SETTING, str(tmp_path / "broken"))
    (tmp_path / "out").mkdir()
    write_gguf(exported / "out", tmp_path / "out/x-f16.gguf", "f16")
    words = (str(exported / "run"), str(tmp_path / "out"), "--verify-only")
    file = export_files(capsys, *words)["f16"]
    assert (file["status"], file["differences"]) == ("not verified", [])
    assert "no binary" in file["reason"]


def test_a_file_that_llama_cpp_cannot_load_differs(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_gguf(exported / "out", out / "x-f16.gguf", "f16")
    content = (out / "x-f16.gguf").read_bytes()
    (out / "x-f16.gguf").write_bytes(content[: len(content) // 2])
    file = export_files(capsys, str(exported / "run"), str(out), "--verify-only")["f16"]
    assert (file["status"], file["prompts"]) == ("differs", 0)
    assert [f["code"] for f in file["differences"]] == ["llama-cpp-failed"]
