"""Files of models, adapters, recipes and runs that are valid JSON or YAML, but wrong: each is an
error of the user with its place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import command, command_error, place

__all__ = ["place"]

DEEP = "[" * 100_000
NOT_LOADABLE = "model-not-loadable"

CONFIGS: list[dict[str, Any]] = [
    {"hidden_size": "big"},
    {"hidden_size": 0},
    {"num_attention_heads": 0},
    {"num_attention_heads": [4]},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": 1.5},
    {"vocab_size": -1},
    {"head_dim": 0},
    {"head_dim": 5},
    {"dtype": "float33"},
    {"dtype": 5},
    {"hidden_act": "unknown"},
    {"hidden_act": None},
    {"rms_norm_eps": "small"},
    {"rope_parameters": "text"},
    {"rope_parameters": {"rope_type": "unknown", "rope_theta": 1e4}},
    {"model_type": 5},
    {"max_position_embeddings": "long"},
    {"pad_token_id": 10**9},
    {"eos_token_id": "text"},
    {"tie_word_embeddings": "perhaps"},
    {"quantization_config": [1]},
    {"sliding_window": "wide"},
]


@pytest.mark.parametrize("change", CONFIGS, ids=str)
def test_a_wrong_value_in_the_configuration_of_a_model(place: Path, change: dict[str, Any]) -> None:
    path = place / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert command_error("check", "recipe.yaml").code == NOT_LOADABLE
    if change != {"dtype": 5}:  # which is not read without training
        words = ("sample", "model", "--prompt", "a", "--max-new-tokens", "2")
        assert command_error(*words).code == NOT_LOADABLE


@pytest.mark.parametrize("content", ["", "null", "5", "[]", "{}", DEEP], ids=repr)
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_another_content_in_a_file_of_a_model(place: Path, name: str, content: str) -> None:
    (place / "model" / name).write_text(content)
    for words in (("check", "recipe.yaml"), ("sample", "model", "--prompt", "a")):
        assert command(*words, *(["--max-new-tokens", "2"] if words[0] == "sample" else [])) in (
            0,
            2,
        )


@pytest.mark.parametrize(
    "content",
    [
        *("", "null", "5", "[]", "{}", DEEP, '{"peft_type": "UNKNOWN"}'),
        '{"peft_type": "LORA", "r": "x", "base_model_name_or_path": "model"}',
        '{"peft_type": "LORA", "r": 2, "base_model_name_or_path": 5}',
        '{"peft_type": "LORA", "r": 2, "base_model_name_or_path": "model", "target_modules": 5}',
    ],
    ids=lambda content: content[:40],
)
def test_another_content_in_the_configuration_of_an_adapter(place: Path, content: str) -> None:
    (place / "adapter").mkdir()
    (place / "adapter/adapter_config.json").write_text(content)
    command_error("check", "recipe.yaml", "model.adapter=adapter", "model.lora=null")
    command_error("sample", "adapter", "--prompt", "a")


@pytest.mark.parametrize("value", ['!!int ""', '!!float ""', '!!bool ""', '!!int "x"'])
def test_a_tag_on_a_value_of_another_type(place: Path, value: str) -> None:
    recipe = place / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("batch_size: 5", f"batch_size: {value}"))
    error = command_error("check", "recipe.yaml")
    assert (error.code, error.where) == ("yaml-tag", "recipe.yaml:4 (train.batch_size)")


@pytest.mark.parametrize("content", ["", "null", "5", "[]", "{}", DEEP, '{"a": ' * 5000], ids=repr)
@pytest.mark.parametrize("name", ["run.json", "config.yaml", "metrics.jsonl", "audit.json"])
def test_another_content_in_the_folder_of_a_run(place: Path, name: str, content: str) -> None:
    folder = place / "runs/other"
    folder.mkdir(parents=True)
    (folder / name).write_text(content)
    for words in (("report",), ("report", "runs/other"), ("export", "runs/other", "exported")):
        assert command(*words) in (0, 2)


@pytest.mark.parametrize(
    "words",
    [
        *(("report", "/proc"), ("report", "--list", "/"), ("split", "/"), ("init", "/")),
        *(("audit", "/"), ("inspect", "/"), ("export", "/", "x"), ("train", "/")),
        ("import", "open-webui", "/", "--out", "rows.jsonl"),
        ("score", "/", "--data", "/", "--out", "/"),
        ("select", "/", "--rated", "/", "--model", "/", "--out", "/"),
    ],
    ids=" ".join,
)
def test_the_root_folder_in_place_of_a_file(place: Path, words: tuple[str, ...]) -> None:
    assert command(*words) in (0, 2)
