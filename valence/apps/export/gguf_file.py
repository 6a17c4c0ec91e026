"""Convert a model folder of transformers to one GGUF file, the format of llama.cpp and Ollama.

Tensor names and the layout of the file come from the package ``gguf``. Each supported architecture
is checked for settings that llama.cpp computes differently; these are refused, because a converted
file would load and answer wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from valence.apps.export.gguf_tokenizer import TokenizerFields, tokenizer_fields
from valence.errors import UserError, install_command

CONVERTER = (
    "convert the exported folder with convert_hf_to_gguf.py from the llama.cpp repository, which "
    "supports more architectures"
)

DIRECT_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""Types that the package ``gguf`` computes."""
TOOL_TYPES = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
"""Types that only llama.cpp computes."""
GGUF_TYPES = (*DIRECT_TYPES, *TOOL_TYPES)
BLOCK_SIZE = 32
"""Values that share a scale in the quantized types that the package ``gguf`` computes."""


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp computes a model type of transformers.

    name: in GGUF. permuted_rope: query and key rows are stored in llama.cpp's original order of
    rotary pairs. norm_offset: added to the weights of norms. activation: of the feed-forward
    layers. check: returns the reason why llama.cpp would compute a model differently, or None.
    """

    name: str
    permuted_rope: bool = False
    norm_offset: float = 0.0
    activation: str = "silu"
    check: Callable[[Any], str | None] = lambda config: None


def _check_biases(config: Any) -> str | None:
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "its layers have biases"
    return None


def _check_windows(config: Any) -> str | None:
    if getattr(config, "use_sliding_window", False):
        return "some of its layers use sliding-window attention"
    return _check_biases(config)


def _check_gemma(config: Any) -> str | None:
    is_27b = config.num_hidden_layers in (46, 62)
    scale = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    if config.query_pre_attn_scalar != scale:
        return f"query_pre_attn_scalar is {config.query_pre_attn_scalar}, not {scale}"
    if config.model_type == "gemma2":
        if config.attn_logit_softcapping is None or config.final_logit_softcapping is None:
            return "its attention or its logits have no soft-capping"
        if not config.tie_word_embeddings:
            return "its output layer is not tied to the embedding"
    elif config.final_logit_softcapping is not None:
        return "its logits have soft-capping"
    period = 2 if config.model_type == "gemma2" else 6
    expected = [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention"
        for i in range(config.num_hidden_layers)
    ]
    if list(config.layer_types) != expected:
        return (
            "its layers have another pattern of attention: llama.cpp expects full attention in "
            f"one of {period} layers, and a sliding window in the others"
        )
    if config.model_type == "gemma3_text":
        local = config.rope_parameters["sliding_attention"]
        if local.get("rope_type", "default") != "default" or local["rope_theta"] != 10000:
            return "its sliding-window layers do not use a RoPE base of 10000"
        if config.attn_logit_softcapping or config.use_bidirectional_attention:
            return "its attention has soft-capping, or is bidirectional"
    return _check_biases(config)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", permuted_rope=True, check=_check_biases),
    "mistral": Architecture("llama", permuted_rope=True, check=_check_biases),
    "qwen2": Architecture("qwen2", check=_check_windows),
    "qwen3": Architecture("qwen3", check=_check_windows),
    "gemma2": Architecture(
        "gemma2", norm_offset=1.0, activation="gelu_pytorch_tanh", check=_check_gemma
    ),
    "gemma3_text": Architecture(
        "gemma3", norm_offset=1.0, activation="gelu_pytorch_tanh", check=_check_gemma
    ),
}
"""Model types of transformers that are converted here."""


def check_type(file_type: str) -> None:
    """Raise UserError for an unknown GGUF type, or if the package ``gguf`` is missing."""
    if file_type not in GGUF_TYPES:
        raise UserError(
            f"{file_type} is not a GGUF type",
            code="gguf-type-unknown",
            where="--gguf",
            fix=f"use one of {', '.join(GGUF_TYPES)}",
        )
    if find_spec("gguf") is None:
        raise UserError(
            "the package gguf is not installed",
            code="library-missing",
            where="--gguf",
            fix=install_command("gguf"),
        )


def architecture_of(config: Any) -> Architecture:
    """The architecture of a model with this configuration.

    Raises UserError for a model that llama.cpp would compute differently.
    """
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise _unsupported(
            f"Valence cannot convert models of type {config.model_type} to GGUF (supported: "
            f"{', '.join(ARCHITECTURES)})"
        )
    rope_type = rope_of(config).get("rope_type", "default")
    reason = architecture.check(config)
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation != architecture.activation:
        reason = f"its activation function is {activation}, not {architecture.activation}"
    if rope_type not in ("default", "linear", "llama3"):
        reason = f"its RoPE scaling is {rope_type}"
    if reason:
        raise _unsupported(
            f"Valence cannot write this {config.model_type} model as GGUF, because llama.cpp would "
            f"compute the file differently: {reason}"
        )
    return architecture


def _unsupported(reason: str) -> UserError:
    return UserError(
        reason, code="gguf-architecture-unsupported", where="config.json", fix=CONVERTER
    )


def write_gguf(
    folder: Path,
    target: Path,
    file_type: str,
    *,
    end_ids: Collection[int] = (),
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the model of a folder to a GGUF file, one tensor at a time.

    file_type: one of DIRECT_TYPES. end_ids: tokens at which the model stops. on_tensor: called with
    the number of tensors written and their total.

    Raises UserError for a model that cannot be converted.
    """
    import gguf

    config: Any = AutoConfig.from_pretrained(folder)
    architecture = architecture_of(config)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    weights = Weights(folder)
    num_rows = weights.shape("model.embed_tokens.weight")[0]
    writer = gguf.GGUFWriter(str(target), architecture.name)
    kind_of_file = "ALL_F32" if file_type == "f32" else f"MOSTLY_{file_type.upper()}"
    writer.add_file_type(gguf.LlamaFileType[kind_of_file])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_hyperparameters(writer, config, num_rows)
    _add_tokenizer(writer, tokenizer_fields(tokenizer, num_rows, end_ids))

    plans: list[tuple[str, str | None, Any]] = []
    for name, gguf_name in tensor_names(config, weights).items():
        shape = weights.shape(name)
        kind = _tensor_type(gguf_name, shape, file_type)
        byte_shape = (
            gguf.quant_shape_to_byte_shape(shape, kind) if kind.name not in _PLAIN else shape
        )
        dtype = _PLAIN.get(kind.name, np.uint8)
        size = math.prod(byte_shape) * np.dtype(dtype).itemsize
        writer.add_tensor_info(gguf_name, byte_shape, np.dtype(dtype), size, raw_dtype=kind)
        plans.append((gguf_name, name, kind))
    if (factors := rope_factors(config)) is not None:
        writer.add_tensor_info(
            "rope_freqs.weight", factors.shape, np.dtype(np.float32), factors.nbytes
        )
        plans.append(("rope_freqs.weight", None, gguf.GGMLQuantizationType.F32))

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for i, (_, name, kind) in enumerate(plans):
        if name is None:
            assert factors is not None
            writer.write_tensor_data(factors)
        else:
            values = as_stored(weights.tensor(name), name, config, architecture)
            writer.write_tensor_data(_encode(values, kind, name))
        on_tensor(i + 1, len(plans))
    writer.close()


def tensor_names(config: Any, weights: Weights) -> dict[str, str]:
    """The name in GGUF of each tensor that is stored. Raises UserError if llama.cpp has none."""
    import gguf

    architecture = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(_model_arch(architecture), config.num_hidden_layers)
    result: dict[str, str] = {}
    for name in weights.names:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise _unsupported(f"llama.cpp's {architecture.name} models have no tensor {name}")
        result[name] = gguf_name
    return result


_PLAIN: dict[str, Any] = {"F32": np.float32, "F16": np.float16}


def _model_arch(architecture: Architecture) -> Any:
    import gguf

    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)


def _tensor_type(name: str, shape: tuple[int, ...], file_type: str) -> Any:
    """The type that a tensor is stored in.

    Vectors stay in float32. Embeddings and the output layer of 4- and 5-bit files are 8-bit,
    because their errors affect every token.
    """
    import gguf

    types = gguf.GGMLQuantizationType
    if len(shape) < 2 or file_type == "f32":
        return types.F32
    if file_type in ("f16", "bf16"):
        return types[file_type.upper()]
    if shape[-1] % BLOCK_SIZE:
        return types.F16
    if name in ("token_embd.weight", "output.weight"):
        return types.Q8_0
    return types[file_type.upper()]


def as_stored(
    weight: Tensor, name: str, config: Any, architecture: Architecture
) -> np.ndarray[Any, Any]:
    """A weight in float32, in the layout of llama.cpp."""
    values = weight.float()
    if architecture.permuted_rope and name.endswith(("q_proj.weight", "k_proj.weight")):
        is_query = name.endswith("q_proj.weight")
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        # transformers pairs dimension i of a head with i + head_dim/2, llama.cpp 2i with 2i + 1
        values = values.view(heads, 2, -1, values.shape[-1]).transpose(1, 2).reshape(values.shape)
    if architecture.norm_offset and name.endswith("norm.weight"):
        values = values + architecture.norm_offset
    return values.contiguous().numpy()


def _encode(values: np.ndarray[Any, Any], kind: Any, name: str) -> np.ndarray[Any, Any]:
    import gguf

    if kind.name == "F16" and np.abs(values).max(initial=0) > np.finfo(np.float16).max:
        raise UserError(
            f"{name} has values beyond the range of float16",
            code="gguf-type-overflow",
            where="--gguf",
            fix="use bf16, f32 or q8_0",
        )
    return gguf.quants.quantize(values, kind)


class Weights:
    """The tensors of the safetensors files of a folder, read one at a time.

    duplicates: names that are in several files.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        self.duplicates: list[str] = []
        for path in sorted(folder.glob("*.safetensors")):
            names = [*_names_in(path)]
            self.duplicates += [name for name in names if name in self._files]
            self._files |= dict.fromkeys(names, path)
        if not self._files:
            raise UserError(
                "the folder has no weights (*.safetensors)",
                code="weights-missing",
                where=str(folder),
                fix="pass a folder that `valence export` wrote without --adapter",
            )

    @property
    def names(self) -> list[str]:
        return list(self._files)

    @property
    def files(self) -> dict[str, str]:
        """The file name of each tensor."""
        return {name: path.name for name, path in self._files.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self._files[name], "pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        with safe_open(self._files[name], "pt") as file:
            return file.get_tensor(name)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor("model.norm.weight").dtype


def _names_in(path: Path) -> Iterator[str]:
    with safe_open(path, "pt") as file:
        yield from file.keys()


def lossless_type(folder: Path) -> str:
    """The GGUF type that stores the weights of a folder without rounding."""
    return {torch.bfloat16: "bf16", torch.float16: "f16"}.get(Weights(folder).dtype, "f32")


def _add_hyperparameters(writer: Any, config: Any, num_rows: int) -> None:
    """The sizes and constants of the model, under llama.cpp's names."""
    import gguf

    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    is_gemma = config.model_type in ("gemma2", "gemma3_text")
    context = config.max_position_embeddings
    if config.model_type == "mistral" and window:
        # llama.cpp computes full attention for this architecture, which is the same up to here
        context = min(context, window)
    writer.add_vocab_size(num_rows)
    writer.add_context_length(context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    if is_gemma:
        writer.add_sliding_window(window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    rope = rope_of(config)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


def rope_of(config: Any) -> Mapping[str, Any]:
    """The RoPE settings of the layers with full attention."""
    rope = config.rope_parameters
    return rope.get("full_attention", rope)


def rope_factors(config: Any) -> np.ndarray[Any, Any] | None:
    """Divisors of the rotary frequencies of Llama 3's scaling; None without it."""
    rope = rope_of(config)
    if rope.get("rope_type") != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return (1.0 / float(rope["rope_theta"]) ** exponents / scaled).numpy().astype(np.float32)


def _add_tokenizer(writer: Any, fields: TokenizerFields) -> None:
    writer.add_tokenizer_model(fields.model)
    writer.add_tokenizer_pre(fields.pre)
    writer.add_token_list(fields.tokens)
    writer.add_token_types(fields.types)
    if fields.scores is not None:
        writer.add_token_scores(fields.scores)
    else:
        writer.add_token_merges(fields.merges)
    for name, token in fields.special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_add_bos_token(fields.adds_bos)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(fields.adds_space)
    if fields.chat_template:
        writer.add_chat_template(fields.chat_template)


def file_type_of(path: Path) -> str | None:
    """The type of a GGUF file, such as ``q8_0``; None if the file does not say or is damaged."""
    import gguf

    try:
        number = read_metadata(path).get("general.file_type")
        name = gguf.LlamaFileType(number).name
    except (ValueError, IndexError, KeyError):
        return None
    return name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()


def read_metadata(path: Path) -> dict[str, Any]:
    """The scalar fields of a GGUF file by name; arrays by their length."""
    return {
        name: len(value) if isinstance(value, list) else value
        for name, value in read_arrays(path).items()
    }


def read_arrays(path: Path) -> dict[str, Any]:
    """The fields of a GGUF file by name; arrays as lists."""
    import gguf

    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
