"""Tiny models with the tokenizers and templates of real ones, and a folder to export them in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.arch.source import ROOT
from tests.command import command
from tests.tiny import CHATML, CORPUS
from tests.tiny_models import tiny
from valence.apps.export.gguf_tokenizer import LLAMA3, QWEN2
from valence.apps.export.llama_cpp import PACKAGE, SETTING
from valence.apps.export.probes import TEXTS
from valence.rollouts.servers import PYTHON

INSTALL_HINT = "no llama.cpp: run `make llama-cpp`"
ADAPTER = ("model.lora.rank=4", "run.export=adapter")
"""Settings of a recipe that trains an adapter."""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set first = messages[0]['content'] + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else "
    "m['role']) + '\n' + (first if loop.first else '') + (m['content'] | trim) + "
    "'<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""Gemma's template: BOS, and system messages inside the first user turn."""


def llama_cpp_folder() -> Path:
    """The folder in which node-llama-cpp is installed for the tests."""
    return Path(os.environ.get(SETTING) or ROOT / ".peers/llama_cpp")


needs_llama_cpp = pytest.mark.skipif(
    not (llama_cpp_folder() / PACKAGE).is_file(), reason=INSTALL_HINT
)


@pytest.fixture
def llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp is found by the commands of the test."""
    monkeypatch.setenv(SETTING, str(llama_cpp_folder()))


PRE_TOKENIZERS: dict[str, Any] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "qwen2": lambda: _split(QWEN2),
    "llama-3": lambda: _split(LLAMA3),
}


def _split(expression: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_level(
    kind: str, template: str | None = CHATML, *, adds_bos: bool = False
) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with the pre-tokenizer of a real model family.

    It is trained on the texts of the verification, to have merges that another pre-tokenizer would
    prevent.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama-3"))
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind]()
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS, *TEXTS.values()] * 2, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    wrapped.chat_template = template
    return wrapped


def sentencepiece(
    template: str | None = GEMMA, *, adds_space: bool = False, space_at_start: bool = False
) -> PreTrainedTokenizerBase:
    """A SentencePiece BPE tokenizer as Gemma's, or with a space before texts as Llama 2's.

    space_at_start: a space only before texts at the start of a prompt, as Mistral's.
    """
    replace = normalizers.Replace(" ", "▁")
    normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if adds_space else replace
    )
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    trained = Tokenizer(models.BPE())
    trained.normalizer = replace
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, min_frequency=2)
    latin = [text for text in (*CORPUS, *TEXTS.values()) if text.isascii()]
    trained.train_from_iterator(latin * 2, trainer)
    pieces = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    vocabulary = {text: i for i, text in enumerate([*special, *byte_tokens, *dict(pieces)])}
    merges = [
        (text[:i], text[i:])
        for text, _ in pieces
        for i in range(1, len(text))
        if text[:i] in vocabulary and text[i:] in vocabulary
    ]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if space_at_start:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    wrapped.chat_template = template
    return wrapped


def sizes(name: str) -> dict[str, Any]:
    """Settings of a tiny model with sizes that suit all quantized types."""
    window = {"sliding_window": 16, "query_pre_attn_scalar": 64}
    return {
        "hidden_size": 256,
        "intermediate_size": 256,
        "head_dim": 64,
        "max_position_embeddings": 512,
        **(window if name.startswith("gemma") else {}),
    }


def write_model(
    folder: Path, name: str, tokenizer: PreTrainedTokenizerBase, **changes: Any
) -> None:
    """Write a tiny model whose most likely tokens are far likelier than others."""
    layers = 6 if name.startswith("gemma") else 2
    rows = changes.pop("rows", len(tokenizer))
    settings = {**sizes(name), "vocab_size": rows, "eos_token_id": tokenizer.eos_token_id}
    model: Any = tiny(name, dtype=torch.float32, layers=layers, **(settings | changes))
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim == 1:  # norms, which start at 0 or 1
                weights.add_(torch.randn_like(weights) * 0.1)
        model.get_output_embeddings().weight.mul_(0.3 if name.startswith("gemma") else 1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_place(
    folder: Path, name: str, tokenizer: PreTrainedTokenizerBase, *settings: str, **changes: Any
) -> None:
    """Write a model into a folder, and train it for one step: ``run`` is the run.

    settings: further settings of the recipe. changes: to the configuration of the model.
    """
    write_model(folder / "model", name, tokenizer, **changes)
    train_one_step(folder, folder / "model", *settings)


def train_one_step(folder: Path, model: Path, *settings: str) -> None:
    """Write rows and a recipe into a folder, and train a model for one step: ``run`` is the run."""
    rows = [{"prompt": f"What is {i} + 1?", "completion": f"It is {i + 1}."} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "method": "sft",
        "model": {"name": str(model), "dtype": "float32"},
        "data": {"train": str(folder / "rows.jsonl")},
        "train": {"batch_size": 4, "epochs": 1, "learning_rate": 1e-4},
        "run": {"dir": str(folder / "run"), "samples": {"prompts": 0}},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    assert command("train", str(folder / "recipe.yaml"), "--quiet", *settings) == 0


def export_files(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    """Run ``valence export ... --json``, and return the verification of each file by kind."""
    capsys.readouterr()
    status = command("export", *words, "--json")
    files = json.loads(capsys.readouterr().out)["files"]
    differs = any(file["status"] == "differs" for file in files)
    assert status == (3 if differs else 0), files
    return {file["kind"]: file for file in files}


@pytest.fixture
def real_vllm(forking_vllm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is found by the commands of the test.

    One that loads its libraries when it is started is in tests/training/online/test_vllm_run.py.
    """
    monkeypatch.setenv(PYTHON, forking_vllm)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def check_equal(file: dict[str, Any]) -> None:
    assert file["status"] == "verified", file
    assert file["runtime"].startswith("vLLM 0")
    assert file["same_text"] == file["same_tokens"] == file["prompts"] == 14
    assert file["stops"] == file["num_ends"] > 0
