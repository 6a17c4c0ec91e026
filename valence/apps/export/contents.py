"""Compare the contents of an exported file with the run: fields, and every tensor.

A sample of probabilities shows little of a wrong end token or a scaled tensor. Here everything that
the file states is compared: exactly what is stored exactly, and rounded tensors within the error
that their type can have.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig

from valence.apps.export.gguf_file import (
    ARCHITECTURES,
    Weights,
    as_stored,
    read_arrays,
    rope_factors,
    rope_of,
    tensor_names,
)
from valence.apps.export.gguf_tokenizer import TokenizerFields, tokenizer_fields
from valence.apps.export.verify import MAX_SHOWN, ExportDifference, extra_stop
from valence.storage import read_json

BOUNDS: dict[str, tuple[float, float]] = {
    "Q8_0": (0.005, 0.002),
    "Q6_K": (0.035, 0.005),
    "Q5_K": (0.09, 0.01),
    "Q5_1": (0.035, 0.005),
    "Q5_0": (0.064, 0.01),
    "Q4_K": (0.18, 0.015),
    "Q4_1": (0.07, 0.01),
    "Q4_0": (0.127, 0.02),
    "IQ4_NL": (0.2, 0.015),
    "IQ4_XS": (0.2, 0.015),
    "Q3_K": (0.4, 0.03),
    "Q2_K": (0.8, 0.05),
}
"""For each rounded type: the largest error of a value, relative to the largest value of its block;
and how far the best common factor of a tensor may be from 1. llama.cpp's rounding of normal,
uniform, Laplace, Student and sparse values stays within two thirds of them, or within the step of
types without a search.
"""
SMALLEST = {32: 4e-6, 256: 1.3e-4}
"""The error by block size that a scale below the normal range of float16 can add."""
MAX_REMERGE = 1e-5
"""Error of a value, relative to the largest of its tensor, that merging an adapter again on other
hardware can add.
"""
MAX_VALUES = 2**24
"""Values of a tensor that are compared at once."""
EPSILON = {"F16": 2.0**-10, "BF16": 2.0**-7, "F32": 2.0**-23}
"""Distance of a value from the next one, relative to the value, in types that are not rounded
further.
"""
NEUTRAL = {"transformers_version", "_name_or_path", "name_or_path"}
"""Settings that do not change what a folder computes."""
FOLDER_FILES = (
    *("*config*.json", "*token*.json", "params.json", "tekken.json", "*.model", "*.py"),
    *("vocab.*", "merges.txt", "chat_template*", "additional_chat_templates/*"),
)
"""Patterns of the files besides weights that programs read to load a folder."""
INDEX = "*.safetensors.index.json"
OTHER_FIELDS = ("tokenizer.", "general.sampling.", "general.type", "split.", "adapter.")
"""Starts of the names of fields, besides those of the architecture, that programs read."""
ROLES = ("bos", "eos", "unknown", "padding", "eot", "eom")
"""Roles of tokens that exported files name."""
MAY_BE_ABSENT = {"rope.freq_base": 10000.0}
"""Fields that llama.cpp assumes if they are absent."""


def gguf_differences(
    source: Path, path: Path, tokenizer: Any, end_ids: Collection[int]
) -> tuple[list[ExportDifference], float | None]:
    """Where the fields and tensors of a GGUF file are not those of a run.

    source: a folder with the run's merged weights. Also returns the largest relative error of a
    tensor. Use it for models that ``is_compared`` accepts.
    """
    config: Any = AutoConfig.from_pretrained(source)
    weights = Weights(source)
    fields = read_arrays(path)
    num_rows = weights.shape("model.embed_tokens.weight")[0]
    expected = tokenizer_fields(tokenizer, num_rows, end_ids)
    problems = _field_problems(_expected_fields(config, num_rows, expected), fields)
    if expected.scores is not None and not _same_order(
        expected.scores, fields.get("tokenizer.ggml.scores") or ()
    ):
        problems.append("tokenizer.ggml.scores")
    tensors, error = _tensor_problems(config, weights, path)
    return [
        *_end_differences(tokenizer, end_ids, fields),
        *_differences("metadata-differs", "the fields of the file differ from the run's", problems),
        *_differences("tensors-differ", "tensors of the file differ from the run's", tensors),
    ], error


def is_compared(source: Path) -> bool:
    """Whether the GGUF files of a model can be compared with it."""
    return AutoConfig.from_pretrained(source).model_type in ARCHITECTURES


def _differences(code: str, summary: str, problems: list[str]) -> list[ExportDifference]:
    if not problems:
        return []
    more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
    message = f"{summary}: {'; '.join(problems[:MAX_SHOWN])}{more}"
    return [ExportDifference(code, "error", message, "export the run again")]


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, int | float):
        return bool(np.float32(a) == np.float32(b))
    return a == b


def _field_problem(name: str, expected: Any, actual: Any) -> str | None:
    if _is_same(expected, actual):
        return None
    if isinstance(expected, str | list):
        return name
    return f"{name} is {actual} instead of {expected}"


def _field_problems(expected: Mapping[str, Any], fields: Mapping[str, Any]) -> list[str]:
    """Fields with other values than expected, and fields that a program reads and that are not
    expected.
    """
    architecture = expected["general.architecture"]
    if fields.get("general.architecture") != architecture:
        return [f"general.architecture is {fields.get('general.architecture')}"]
    problems = (
        _field_problem(name, value, fields.get(name, MAY_BE_ABSENT.get(name.partition(".")[2])))
        for name, value in expected.items()
    )
    others = (
        f"{name} is not one of the run's"
        for name in fields
        if name.startswith((f"{architecture}.", *OTHER_FIELDS))
        and name not in expected
        and name != "tokenizer.ggml.scores"
    )
    return [*(problem for problem in problems if problem), *others]


def _expected_fields(config: Any, num_rows: int, tokenizer: TokenizerFields) -> dict[str, Any]:
    """What llama.cpp must read, by name, besides scores; None for what must be absent."""
    architecture = ARCHITECTURES[config.model_type].name
    hyperparameters = {"vocab_size": num_rows, **_hyperparameters(config)}
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{name}": value for name, value in hyperparameters.items()},
        **{f"tokenizer.ggml.{name}": value for name, value in _tokenizer_values(tokenizer).items()},
        "tokenizer.chat_template": tokenizer.chat_template or None,
    }


def _hyperparameters(config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    length = config.max_position_embeddings
    rope = rope_of(config)
    is_linear = rope.get("rope_type") == "linear"
    return {
        "context_length": min(length, window or length)
        if config.model_type == "mistral"
        else length,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.sliding_window": window if config.model_type.startswith("gemma") else None,
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.scaling.type": "linear" if is_linear else None,
        "rope.scaling.factor": float(rope["factor"]) if is_linear else None,
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
    }


def _tokenizer_values(expected: TokenizerFields) -> dict[str, Any]:
    return {
        "model": expected.model,
        "pre": expected.pre,
        "tokens": list(expected.tokens),
        "token_type": list(expected.types),
        "merges": list(expected.merges) if expected.scores is None else None,
        **{f"{role}_token_id": expected.special.get(role) for role in ROLES},
        "add_bos_token": expected.adds_bos,
        "add_eos_token": False,
        "add_space_prefix": expected.adds_space,
    }


def _same_order(expected: Any, actual: Any) -> bool:
    """Whether the tokens that merges make are merged in the same order."""
    ours, theirs = np.asarray(expected), np.asarray(actual)
    if ours.shape != theirs.shape:
        return False
    merged = np.flatnonzero(ours > ours.min()) if len(ours) else np.empty(0, int)
    in_order = theirs[merged[np.argsort(-ours[merged], kind="stable")]]
    return bool((np.diff(in_order) < 0).all())


def _end_differences(
    tokenizer: Any, end_ids: Collection[int], fields: Mapping[str, Any]
) -> list[ExportDifference]:
    """Tokens that end answers in the file and not in the run, or only in the run."""
    stored = {
        int(value)
        for name in ("eos", "eot", "eom")
        if (value := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None
    }
    extra = [str(tokenizer.convert_ids_to_tokens(i)) for i in sorted(stored - set(end_ids))]
    return [] if not extra else [extra_stop(extra)]


def _tensor_problems(config: Any, weights: Weights, path: Path) -> tuple[list[str], float]:
    import gguf

    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    architecture = ARCHITECTURES[config.model_type]
    problems, largest = list[str](), 0.0
    for name, gguf_name in tensor_names(config, weights).items():
        expected = as_stored(weights.tensor(name), name, config, architecture)
        problem, error = _tensor_problem(expected, stored.pop(gguf_name, None))
        largest = max(largest, error)
        if problem:
            problems.append(f"{gguf_name} {problem}")
    factors = rope_factors(config)
    if factors is not None:
        problem, _ = _tensor_problem(factors, stored.pop("rope_freqs.weight", None))
        if problem:
            problems.append(f"rope_freqs.weight {problem}")
    if config.tie_word_embeddings and "output.weight" in stored:
        expected = weights.tensor("model.embed_tokens.weight").float().numpy()
        problem, _ = _tensor_problem(expected, stored.pop("output.weight"))
        if problem:
            problems.append(f"output.weight {problem}")
    return [*problems, *(f"{name} is not one of the run's" for name in stored)], largest


def _tensor_problem(expected: np.ndarray[Any, Any], tensor: Any) -> tuple[str | None, float]:
    """Why a stored tensor cannot be this one, or None; and its relative error."""
    import gguf

    if tensor is None:
        return "is missing", math.inf
    kind = tensor.tensor_type.name
    if tuple(int(n) for n in reversed(tensor.shape)) != expected.shape:
        return "has another shape", math.inf
    if kind not in BOUNDS and kind not in EPSILON:
        return f"has the type {kind}, which cannot be compared", math.inf
    size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][0]
    step = max(1, MAX_VALUES // expected[0].size)
    squares = products = errors = 0.0
    is_within, top = True, np.abs(expected).max(initial=0)
    for start in range(0, len(expected), step):
        rows = expected[start : start + step]
        values = gguf.quants.dequantize(tensor.data[start : start + step], tensor.tensor_type)
        x, y = rows.astype(np.float64), values.reshape(rows.shape).astype(np.float64)
        error = np.abs(y - x)
        squares, products = squares + float(np.vdot(x, x)), products + float(np.vdot(x, y))
        errors += float(np.vdot(error, error))
        if kind in BOUNDS:
            blocks = np.abs(x).reshape(-1, size).max(axis=1)
            limit = BOUNDS[kind][0] * blocks + SMALLEST[size]
            is_within &= bool((error.reshape(-1, size).max(axis=1) <= limit).all())
        else:
            rounded = gguf.quants.quantize(rows, tensor.tensor_type)
            y0 = gguf.quants.dequantize(rounded, tensor.tensor_type).reshape(rows.shape)
            limit = EPSILON[kind] * np.abs(x) + MAX_REMERGE * top
            is_within &= bool((np.abs(y - y0) <= limit).all())
    relative = math.sqrt(errors / squares) if squares else errors
    if not math.isfinite(relative):
        return "has values that are not finite", math.inf
    factor = products / squares if squares else 1.0
    if not abs(factor - 1) <= (BOUNDS[kind][1] if kind in BOUNDS else _max_factor(kind)):
        return f"is scaled by {factor:.5g}", relative
    if not is_within:
        return f"differs by more than rounding to {kind} (relative error {relative:.2g})", relative
    return None, relative


def _is_close(a: Tensor, b: Tensor, kind: str) -> bool:
    """Whether two tensors are equal, or differ as if an adapter was merged on other hardware.

    Such merges differ in the last bit of some values, by chance upwards or downwards.
    """
    if torch.equal(a, b):
        return True
    x, y = a.double(), b.double()
    error = (x - y).abs()
    top = float(y.abs().max())
    if not bool((error <= EPSILON[kind] * y.abs() + MAX_REMERGE * top).all()):
        return False
    factor = float((x * y).sum() / (y * y).sum())
    return abs(factor - 1) <= _max_factor(kind)


def _max_factor(kind: str) -> float:
    """How far the best common factor of a tensor that is not rounded further may be from 1."""
    return max(MAX_REMERGE, EPSILON[kind] / 16)


def folder_differences(source: Path, folder: Path) -> list[ExportDifference]:
    """Where the settings and tensors of a folder are not those of another export of its run."""
    names = {
        path.relative_to(root).as_posix()
        for root in (source, folder)
        for pattern in FOLDER_FILES
        for path in root.glob(pattern)
    }
    settings = [name for name in sorted(names) if not _same_file(source / name, folder / name)]
    return [
        *_differences("settings-differ", "these files differ from the run's", settings),
        *_differences(
            "tensors-differ", "tensors differ from the run's", _weight_problems(source, folder)
        ),
    ]


def _same_file(expected: Path, actual: Path) -> bool:
    if not expected.is_file() or not actual.is_file():
        return expected.is_file() == actual.is_file()
    if expected.suffix != ".json":
        return expected.read_bytes() == actual.read_bytes()
    try:
        values = [read_json(path) for path in (expected, actual)]
    except ValueError:
        return False
    ours, theirs = (
        {key: item for key, item in value.items() if key not in NEUTRAL}
        if isinstance(value, dict)
        else value
        for value in values
    )
    return ours == theirs


KINDS = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}


def _index_problem(folder: Path, weights: Weights) -> str | None:
    """Why programs may load other tensors of a folder than those that are compared."""
    if weights.duplicates:
        return f"{weights.duplicates[0]} is in several files"
    for path in folder.glob(INDEX):
        try:
            files = read_json(path)["weight_map"]
        except (ValueError, KeyError, TypeError):
            files = None
        if files != weights.files:
            return f"{path.name} lists other tensors than the files have"
    return None


def _weight_problems(source: Path, folder: Path) -> list[str]:
    try:
        expected, actual = Weights(source), Weights(folder)
        if problem := _index_problem(folder, actual):
            return [problem]
        problems = [f"{name} is missing" for name in expected.names if name not in actual.names]
        problems += [
            f"{name} is not one of the run's" for name in actual.names if name not in expected.names
        ]
        for name in expected.names:
            if name in actual.names:
                a, b = actual.tensor(name), expected.tensor(name)
                is_same = a.dtype == b.dtype and a.shape == b.shape
                if not is_same or not _is_close(a, b, KINDS.get(a.dtype, "F32")):
                    problems.append(name)
    except SafetensorError as error:
        return [f"they cannot be read ({error})"]
    return problems
