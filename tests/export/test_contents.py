"""Exported files whose contents were changed: what a sample of probabilities hardly shows."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file

from tests.command import command
from tests.export.kit import (
    byte_level,
    export_files,
    llama_cpp_folder,
    needs_llama_cpp,
    sentencepiece,
    train_place,
)
from tests.tiny import BOS
from valence.apps.export.contents import gguf_differences
from valence.apps.export.llama_cpp import PACKAGE, LlamaCpp, quantize

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("no_llama_cpp")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "llama": ("llama", lambda: byte_level("qwen2", BOS, adds_bos=True), {}),
    "llama-tied": ("llama-tied", lambda: byte_level("gpt-2"), {"rows": 768}),
    "llama-3": ("llama", lambda: byte_level("llama-3"), {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": (
        "llama",
        lambda: byte_level("gpt-2"),
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": ("mistral", lambda: byte_level("gpt-2"), {}),
    "qwen2": ("qwen2", lambda: byte_level("qwen2"), {"rows": 768}),
    "qwen3": ("qwen3", lambda: byte_level("qwen2"), {}),
    "gemma2": ("gemma2", sentencepiece, {"tie_word_embeddings": True}),
    "gemma3": ("gemma3", sentencepiece, {"tie_word_embeddings": True}),
}


def _codes(file: dict[str, Any]) -> set[str]:
    return {f["code"] for f in file["differences"] if f["severity"] == "error"}


FAST = ("llama-tied", "qwen3", "gemma3")


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n not in FAST)]
)
def test_files_of_each_architecture_contain_the_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, make, changes = MODELS[name]
    train_place(tmp_path, kind, make(), **changes)
    types = ("f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
    words = [word for file_type in types for word in ("--gguf", file_type)]
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    for files in (
        export_files(capsys, run, out, *words),
        export_files(capsys, run, out, "--verify-only"),
    ):
        assert set(files) == {"model", *types}
        assert {kind: _codes(file) for kind, file in files.items()} == {
            kind: set() for kind in files
        }
        assert files["model"]["status"] == "verified"


# --- GGUF


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a Qwen3 on a long RoPE base, and its GGUF files."""
    folder = tmp_path_factory.mktemp("contents")
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}
    train_place(folder, "qwen3", byte_level("qwen2"), **rope)
    words = [word for kind in ("f32", "f16", "q8_0", "q4_0") for word in ("--gguf", kind)]
    assert command("export", str(folder / "run"), str(folder / "out"), "--no-verify", *words) == 0
    return folder


Edit = Callable[[Any], None]


def _edit(path: Path, edit: Edit) -> None:
    edit(gguf.GGUFReader(path, "r+"))


def _field(name: str, value: Any) -> Edit:
    def edit(reader: Any) -> None:
        field = reader.fields[name]
        field.parts[field.data[0]][0] = value

    return edit


def _tensor(name: str, factor: float) -> Edit:
    """Multiply a tensor: its values, or the scales of its blocks."""

    def edit(reader: Any) -> None:
        (tensor,) = (t for t in reader.tensors if t.name == name)
        if tensor.tensor_type.name in ("Q8_0", "Q4_0"):
            scales = tensor.data[:, :].reshape(-1, tensor.data.shape[-1])
            size = 34 if tensor.tensor_type.name == "Q8_0" else 18
            for start in range(0, scales.shape[1], size):
                block = scales[:, start : start + 2]
                block[:] = (block.copy().view("float16") * factor).astype("float16").view("uint8")
        else:
            tensor.data[:] = tensor.data * factor

    return edit


def _letter(folder: Path) -> int:
    tokens = json.loads((folder / "out/tokenizer.json").read_text())["model"]["vocab"]
    return tokens["."]


TAMPERED: dict[str, tuple[str, Edit, str]] = {
    "RoPE base": ("q4_0", _field("qwen3.rope.freq_base", 30000.0), "metadata-differs"),
    "epsilon": (
        "f16",
        _field("qwen3.attention.layer_norm_rms_epsilon", 1.1e-6),
        "metadata-differs",
    ),
    "context": ("f16", _field("qwen3.context_length", 256), "metadata-differs"),
    "BOS": ("f16", _field("tokenizer.ggml.add_bos_token", 1), "metadata-differs"),
    "kind of a token": ("f16", _field("tokenizer.ggml.token_type", 1), "metadata-differs"),
    "norm": ("q4_0", _tensor("blk.1.attn_norm.weight", 1.3), "tensors-differ"),
    "norm of queries": ("f16", _tensor("blk.0.attn_q_norm.weight", 1.001), "tensors-differ"),
    "float16": ("f16", _tensor("blk.1.attn_v.weight", 1.3), "tensors-differ"),
    "float16, slightly": ("f16", _tensor("blk.1.attn_v.weight", 1.002), "tensors-differ"),
    "float32": ("f32", _tensor("blk.1.attn_v.weight", 1.0001), "tensors-differ"),
    "8 bits": ("q8_0", _tensor("blk.1.attn_v.weight", 1.05), "tensors-differ"),
    "4 bits": ("q4_0", _tensor("blk.1.attn_v.weight", 1.1), "tensors-differ"),
    "embedding": ("q4_0", _tensor("token_embd.weight", 1.1), "tensors-differ"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_changed_gguf_file_differs(
    name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, edit, code = TAMPERED[name]
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(place / f"out/out-{kind}.gguf", out)
    words = (str(place / "run"), str(out), "--verify-only")
    assert _codes(export_files(capsys, *words)[kind]) == set()
    _edit(out / f"out-{kind}.gguf", edit)
    file = export_files(capsys, *words)[kind]
    assert file["status"] == "differs"
    assert _codes(file) == {code}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _rewrite(path: Path, fields: dict[str, Any]) -> None:
    """Write a GGUF file again, with further fields."""
    reader = gguf.GGUFReader(path)
    names = ("GGUF.", "general.architecture")
    writer = gguf.GGUFWriter(
        path.with_suffix(".new"), reader.fields["general.architecture"].contents()
    )
    for field in reader.fields.values():
        if not field.name.startswith(names):
            is_list = field.types[0] == gguf.GGUFValueType.ARRAY
            inner = field.types[-1] if is_list else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for name, value in fields.items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        shape, kind = tensor.data.shape, tensor.tensor_type
        writer.add_tensor(tensor.name, tensor.data.copy(), raw_shape=shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


ADDED: dict[str, dict[str, Any]] = {
    "factor of RoPE": {"qwen3.rope.scaling.attn_factor": 2.0},
    "RoPE by its old name": {"qwen3.rope.scale_linear": 2.0},
    "scale of attention": {"qwen3.attention.scale": 2.0},
    "attention to later tokens": {"qwen3.attention.causal": False},
    "scale of logits": {"qwen3.logit_scale": 2.0},
    "further end token": {"tokenizer.ggml.fim_pad_token_id": 30},
    "separator": {"tokenizer.ggml.add_sep_token": True},
    "spaces": {"tokenizer.ggml.remove_extra_whitespaces": True},
    "template for tools": {"tokenizer.chat_template.tool_use": "{{ 1 }}"},
    "sampling": {"general.sampling.temp": 0.1},
    "parts": {"split.count": 2},
    "kind of the file": {"general.type": "adapter"},
}


@pytest.mark.parametrize("name", ["nothing", *ADDED])
def test_a_gguf_file_with_a_further_field_differs(name: str, place: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = tmp_path / "x.gguf"
    shutil.copy(place / "out/out-f16.gguf", path)
    _rewrite(path, ADDED.get(name, {}))
    tokenizer: Any = AutoTokenizer.from_pretrained(place / "out")
    differences = gguf_differences(place / "out", path, tokenizer, [tokenizer.eos_token_id])[0]
    expected = [] if name == "nothing" else ["metadata-differs"]
    assert [difference.code for difference in differences] == expected
    assert all(field in differences[0].message for field in ADDED.get(name, {}))


def test_an_end_token_that_the_run_lacks_is_found(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(place / "out/out-f16.gguf", out)
    _edit(out / "out-f16.gguf", _field("tokenizer.ggml.eos_token_id", _letter(place)))
    file = export_files(capsys, str(place / "run"), str(out), "--verify-only")["f16"]
    assert file["status"] == "differs"
    assert "stop-token-added" in _codes(file)
    added = next(f for f in file["differences"] if f["code"] == "stop-token-added")
    assert "'.'" in added["message"]


@needs_llama_cpp
@pytest.mark.parametrize("kind", ["q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k"])
def test_quantized_files_of_llama_cpp_contain_the_run_until_they_are_changed(
    kind: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    node = shutil.which("node")
    assert node is not None
    path = tmp_path / "x.gguf"
    quantize(place / "out/out-f32.gguf", path, kind, LlamaCpp(node, llama_cpp_folder() / PACKAGE))
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(place / "out")
    arguments = (place / "out", path, tokenizer, [tokenizer.eos_token_id])
    assert gguf_differences(*arguments)[0] == []
    for edit, code in (
        (_field("qwen3.rope.freq_base", 30000.0), "metadata-differs"),
        (_tensor("output_norm.weight", 1.3), "tensors-differ"),
    ):
        content = path.read_bytes()
        _edit(path, edit)
        assert [d.code for d in gguf_differences(*arguments)[0]] == [code]
        path.write_bytes(content)


# --- folders


def _change(folder: Path, file: str, **settings: Any) -> None:
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(values | settings))


def _scale(name: str, factor: float, file: str = "model.safetensors") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        weights = load_file(folder / file)
        (key,) = (key for key in weights if name in key)
        weights[key] *= factor
        save_file(weights, folder / file, metadata={"format": "pt"})

    return change


def _comment(folder: Path) -> None:
    with (folder / "chat_template.jinja").open("a") as file:
        file.write("{# changed #}")


def _hide(folder: Path) -> None:
    """Scale a tensor of the file that is loaded, next to a copy of the right one."""
    shutil.copy(folder / "model.safetensors", folder / "z.safetensors")
    _scale("layers.1.self_attn.v_proj", 1.001)(folder)


def _add(name: str, content: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))

    return change


ENDS = [4, *range(100, 170)]
FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "70 more end tokens": (
        lambda folder: _change(folder, "generation_config.json", eos_token_id=ENDS),
        "stop-token-added",
    ),
    "repetition penalty": (
        lambda folder: _change(folder, "generation_config.json", repetition_penalty=1.5),
        "settings-differ",
    ),
    "context": (
        lambda folder: _change(folder, "config.json", max_position_embeddings=256),
        "settings-differ",
    ),
    "template": (_comment, "settings-differ"),
    "a tensor": (_scale("layers.1.self_attn.v_proj", 1.001), "tensors-differ"),
    "a tensor twice": (_hide, "tensors-differ"),
    "index": (
        _add("model.safetensors.index.json", {"weight_map": {"model.norm.weight": "z"}}),
        "tensors-differ",
    ),
    "damaged index": (_add("model.safetensors.index.json", []), "tensors-differ"),
    **{
        f"added {name}": (_add(name, content), "settings-differ")
        for name, content in {
            "added_tokens.json": {"<new>": 699},
            "tokenizer.model": "",
            "vocab.json": {},
            "chat_template.json": {"chat_template": "{{ 1 }}"},
            "additional_chat_templates/tool_use.jinja": "",
            "hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}},
            "params.json": {},
            "modeling_qwen3.py": "",
        }.items()
    },
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_changed_folder_differs(
    name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, code = FOLDERS[name]
    out = tmp_path / "out"
    shutil.copytree(place / "out", out, ignore=shutil.ignore_patterns("*.gguf"))
    change(out)
    file = export_files(capsys, str(place / "run"), str(out), "--verify-only")["model"]
    assert file["status"] == "differs"
    assert code in _codes(file)


# --- adapters


@pytest.mark.parametrize("base", ["absolute", "relative"])
def test_an_adapter_loads_as_documented_from_any_directory(
    base: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "model" if base == "relative" else str(tmp_path / "model")
    words = ("model.lora.rank=2", f"model.name={json.dumps(name)}")
    train_place(tmp_path, "llama", byte_level("gpt-2"), *words)
    file = export_files(capsys, "run", "out", "--adapter")["adapter"]
    assert file["status"] == "verified"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    for path in (tmp_path / "out").iterdir():
        if path.suffix in (".md", ".json") and path.name != "adapter_config.json":
            assert str(tmp_path) not in path.read_text(), path.name


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    train_place(folder, "llama", byte_level("gpt-2"), "model.lora.rank=2")
    words = ("export", str(folder / "run"), str(folder / "out"), "--adapter", "--no-verify")
    assert command(*words) == 0
    return folder


@pytest.mark.parametrize("name", ["base", "relative base", "scale", "tensor"])
def test_a_changed_adapter_differs(
    name: str,
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    shutil.copytree(adapter / "out", out)
    monkeypatch.chdir(adapter)
    words = (str(adapter / "run"), str(out), "--verify-only")
    assert export_files(capsys, *words)["adapter"]["status"] == "verified"
    changes: dict[str, Callable[[Path], None]] = {
        "base": lambda folder: _change(
            folder, "adapter_config.json", base_model_name_or_path="absent"
        ),
        "relative base": lambda folder: _change(
            folder, "adapter_config.json", base_model_name_or_path=os.path.relpath("model")
        ),
        "scale": lambda folder: _change(folder, "adapter_config.json", lora_alpha=3),
        "tensor": _scale("layers.1.self_attn.v_proj.lora_A", 1.001, "adapter_model.safetensors"),
    }
    changes[name](out)
    file = export_files(capsys, *words)["adapter"]
    assert file["status"] == "differs"
