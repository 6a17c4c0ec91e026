"""Load a causal or a reward model and its tokenizer, add an adapter, and build the policy and the
reference.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
from transformers.utils.logging import (
    disable_progress_bar,
    get_verbosity,
    set_verbosity,
    set_verbosity_error,
)

from valence.errors import UserError
from valence.models.adapters import disable_adapter_dropout, with_adapter
from valence.models.check import check_layout
from valence.models.checkpointing import Checkpointing, recompute_layers
from valence.models.loading import load_config, loading, must_exist, read_generation_config
from valence.models.policy_model import PolicyModel
from valence.models.quantized import (
    disable_cpu_repacking,
    packed_weights,
    quantization_config,
)
from valence.models.reference import (
    AdapterDisabledReference,
    FrozenReference,
    Reference,
    SyncedReference,
    copy_policy,
    frozen_weights,
)
from valence.models.scores import Scorer, has_score_head, is_reward_model, widen_head
from valence.models.weights import (
    check_complete,
    check_loaded_weights,
    check_stored_weights,
    weight_files,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
SHOWS_PROGRESS = sys.stderr.isatty()  # progress bars of transformers do not belong in a log
# attributes with a number that only makes the forward pass of training random
NOISE = re.compile("drop|^(input_)?jitter_noise$")


def load_tokenizer(
    name: str,
    *,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    setting: str = "model.tokenizer or model.name",
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub id. Raises UserError when it cannot be loaded.

    setting: the setting that contains the name, for messages.
    """
    must_exist(name, setting)
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    if (Path(name) / "config.json").is_file():  # which the tokenizer reads too
        load_config(name, trust_remote_code=trust_remote_code)
    with loading("tokenizer", name):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **extra)


def generation_stops(
    name: str, *, gguf_file: str | None = None, trust_remote_code: bool = False
) -> tuple[int, ...]:
    """Return the stop tokens of a model's generation config, or of its configuration if there is no
    generation config; empty if there are none.
    """
    try:
        config = (
            read_generation_config(name)
            or load_config(
                name, trust_remote_code=trust_remote_code, gguf_file=gguf_file
            ).get_text_config()
        )
    except UserError:  # load_model reports the error
        return ()
    with loading("model", name):
        return stops_of(config)


def stops_of(config: Any) -> tuple[int, ...]:
    """Return ``eos_token_id`` of a configuration, which may be one token, several or none."""
    value: Any = getattr(config, "eos_token_id", None)
    tokens = value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(int(token) for token in tokens if token is not None))


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    attributes: Sequence[str] | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    quantize: bool = False,
    device: str | None = None,
    setting: str = "model.name",
) -> nn.Module:
    """Load a causal language model with its weights in ``dtype``; with ``attributes`` a reward
    model with one score per attribute.

    The head of a saved reward model is loaded. A reward model that starts from a language model has
    a new head of zeros: all completions score 0.

    quantize: store the weights of linear layers, except the head, in 4 bits, and compute their
    products in ``dtype``. A quantized model is loaded onto the CUDA device if there is one.

    device: "meta" checks the stored weights, one at a time, without keeping them. setting: the
    setting that contains the name, for messages.

    Raises UserError when the model cannot be loaded, lacks weights, has weights that are integers,
    NaN or infinite, is already quantized, or was trained on other attributes.
    """
    config = read_config(
        name, attributes=attributes, gguf_file=gguf_file, trust_remote_code=trust_remote_code
    )
    if not SHOWS_PROGRESS:
        disable_progress_bar()
    extra: dict[str, Any] = {
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "config": config,
    }
    if gguf_file:
        from transformers import GgufConfig

        extra |= {"gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    is_quantized = getattr(config, "quantization_config", None) is not None
    if quantize:
        if is_quantized:
            raise UserError(
                "the model is already quantized",
                code="model-quantized-already",
                where=f"model.name: {name}",
                fix="use the model that it was quantized from, or remove model.quantize",
            )
        extra["quantization_config"] = quantization_config(dtype)
    is_reward = attributes is not None
    kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
    if device is not None:
        extra["device_map"] = device
    with loading("model", name), silence_transformers():
        model, report = cast(Any, kind).from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **extra
        )
        files = [] if gguf_file else weight_files(name)
    if is_reward and not is_reward_model(model):
        raise UserError(
            f"{type(model).__name__} has no linear head `score`",
            code="reward-head-unsupported",
            where=f"{setting}: {name}",
            fix="use a causal language model, or a reward model with a linear head `score`",
        )
    new = {"score.weight"} if is_reward and not has_score_head(config) else set[str]()
    check_complete(report, name, where=setting, is_reward_model=is_reward, new=new)
    if new & report["missing_keys"] and device is None:
        nn.init.zeros_(model.score.weight)
    in_memory = device is None and not quantize  # 4-bit values do not show NaN
    check_stored_weights(
        files,
        model,
        name,
        where=setting,
        dtype=None if in_memory else dtype,
        is_quantized=is_quantized,
    )
    if in_memory:
        check_loaded_weights(model, name, where=setting)
    return model


def read_config(
    name: str,
    *,
    attributes: Sequence[str] | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Return the configuration of a model; with ``attributes`` of a reward model with one score per
    attribute.

    Raises UserError when it cannot be read, or belongs to a reward model with other attributes.
    """
    config = load_config(name, trust_remote_code=trust_remote_code, gguf_file=gguf_file)
    if attributes is not None:
        _set_attributes(config, attributes, name)
    return config


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence long messages of transformers: the head for scores is new, and the language model's
    head is not used.
    """
    before = get_verbosity()
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(before)


def _set_attributes(config: Any, attributes: Sequence[str], name: str) -> None:
    """Set the size of the head for scores and the names of its outputs.

    Raises UserError when the model has a head for other attributes, or does not support a head.
    """
    if config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES and not getattr(
        config, "auto_map", None
    ):
        raise UserError(
            f"transformers has no class for {config.model_type} models with a score head, so it "
            "could not load the reward model after training",
            code="reward-head-unsupported",
            where=f"model.name: {name}",
            fix="use another decoder, such as Llama, Qwen, Gemma, Mistral or GPT-2",
        )
    saved = list(config.id2label.values())
    unnamed = len(saved) == 1 or all(label.startswith("LABEL_") for label in saved)
    if (
        has_score_head(config)
        and saved != list(attributes)
        and not (unnamed and len(saved) == len(attributes))
    ):
        raise UserError(
            f"the reward model scores {', '.join(saved)}, but the data has scores for "
            f"{', '.join(attributes)}",
            code="reward-attributes-differ",
            where=f"model.name: {name}",
            fix="use data with the same attributes, or start from a language model",
        )
    config.id2label = dict(enumerate(attributes))
    config.label2id = {attribute: i for i, attribute in enumerate(attributes)}


def stock_model(model: nn.Module | None, argument: str) -> nn.Module | None:
    """Return the model of transformers or PEFT that was passed as an argument, without the wrapper
    of ``torch.compile``: a run compiles layers itself (train.compile).

    Raises UserError for another object, such as a module around a model.
    """
    model = getattr(model, "_orig_mod", model)
    is_stock = isinstance(model, PreTrainedModel) or isinstance(
        getattr(getattr(model, "base_model", None), "model", None), PreTrainedModel
    )
    if model is None or is_stock:
        return model
    raise UserError(
        f"a {type(model).__name__} is not a model of transformers",
        code="model-kind",
        where=argument,
        fix="pass the model that it contains, a subclass of transformers.PreTrainedModel or a "
        "PeftModel",
    )


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout and multiplicative jitter of a model to 0, except an adapter's dropout.

    With dropout, the loss of a step would depend on its division into micro-batches.
    """
    for name, module in model.named_modules():
        if "lora_" in name:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        # Many models have no dropout module, but call the function with the value of an attribute.
        module.__dict__.update(
            {
                key: 0.0
                for key, value in vars(module).items()
                if isinstance(value, float) and NOISE.search(key)
            }
        )
    return model


def position_limit(model: nn.Module) -> tuple[int, bool] | None:
    """Return the number of positions that a model supports, and whether its positions are a learned
    table. The forward pass fails beyond the end of a table, unlike with rotary positions.

    None if the configuration has no limit.
    """
    config: Any = model.config
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not limit:
        return None
    tables = [
        (name, p)
        for name, p in (*model.named_parameters(), *model.named_buffers())
        if re.search(r"pos|wpe", name)
    ]
    # Some tables have two additional rows, for padding.
    return limit, any(
        table.ndim == 2 and limit <= table.shape[0] <= limit + 2 for _, table in tables
    )


def check_positions(
    model: nn.Module,
    length: int,
    subject: str,
    *,
    code: str,
    where: str,
    fix: str,
    warn: bool = True,
    name: str = "the model",
) -> None:
    """Raise UserError when a learned table of positions has fewer than ``length`` positions.

    With ``warn``, warn when ``length`` exceeds the limit of other kinds of positions.

    subject: start of the message, up to the length. fix: may contain ``{limit}``. name: of the
    model, for messages.
    """
    limit, learned = position_limit(model) or (length, False)
    if length <= limit or not (learned or warn):
        return
    problem = f"{subject} {length} tokens, but {name} was trained on at most {limit}"
    fix = fix.format(limit=limit)
    if learned:
        raise UserError(problem, code=code, where=where, fix=fix)
    warnings.warn(f"{where}: {problem}, so its output may be poor; to fix it, {fix}", stacklevel=3)


def build_policy(
    model: nn.Module,
    *,
    dtype: torch.dtype,
    lora: Any = None,
    adapter: str | None = None,
    checkpointing: Checkpointing = "off",
    levels: int | None = None,
    check: bool = True,
) -> PolicyModel:
    """Make a loaded model trainable, without its dropout: all weights, a new adapter, or the
    adapter of a folder.

    A reward model becomes a ``Scorer``, and its head trains together with an adapter.

    dtype: of the computation. Trained weights are float32 masters whatever the dtype of the model;
    they are float64 if the model or ``dtype`` is, unless ``dtype`` is bfloat16. The frozen weights
    under an adapter are cast to ``dtype``. lora: rank, alpha, dropout, targets. checkpointing: as
    for ``recompute_layers``. levels: number of levels of an ordinal reward model; None without
    thresholds. check: whether to choose the layout (``check_layout``), which runs the model.

    Raises UserError when the model is not causal, the adapter does not fit, or the layers do not
    support the checkpointing mode.
    """
    model, scores = without_dropout(model), is_reward_model(model)
    if lora is None and adapter is None:
        dtypes = dtype, next(model.parameters()).dtype
        is_float64 = torch.float64 in dtypes and dtype != torch.bfloat16
        _cast(model, torch.float64 if is_float64 else torch.float32)
    else:
        _cast(model, dtype)
        if scores:
            widen_head(model)
        model = with_adapter(model, lora, adapter)
        if adapter is not None:
            disable_adapter_dropout(model, adapter)
    recompute_layers(model, checkpointing, next(model.parameters()).device)
    compute = torch.bfloat16 if dtype == torch.bfloat16 else None
    engine = (
        Scorer(model, compute=compute, levels=levels)
        if scores
        else PolicyModel(model, compute=compute)
    )
    engine.checkpointing = checkpointing
    disable_cpu_repacking(model)
    if check:
        check_layout(engine.eval())  # dropout of an adapter would make two forward passes differ
    return engine.train()


def build_reference(
    policy: PolicyModel,
    *,
    fresh_adapter: bool,
    model: nn.Module | None = None,
    name: str = "",
    follows: bool = False,
    check: bool = True,
) -> Reference:
    """Return the reference: a separate model, or the policy at the start of training.

    fresh_adapter: whether the policy with its adapter disabled is the policy at the start
    (``starts_at_base``). Otherwise the reference is a copy, which shares the frozen weights.
    follows: whether the copy is updated during training. check: as for ``build_policy``.

    A separate model has the dtypes of the policy's weights and products, and the policy's
    temperature: equal weights have an implicit reward of exactly zero. Raises UserError when the
    model is not causal.
    """
    if model is not None:
        _cast(model, policy.causal.get_input_embeddings().weight.dtype)
        engine = PolicyModel(disable_cpu_repacking(without_dropout(model)), compute=policy.compute)
        engine.temperature = policy.temperature
        if check:
            check_layout(engine, "reference.model")
        return FrozenReference(engine, name)
    if follows:
        return SyncedReference(policy)
    if fresh_adapter:
        return AdapterDisabledReference(policy)
    return FrozenReference(copy_policy(policy, frozen_weights(policy)))


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights, except 4-bit weights.

    Buffers are not cast: rotary frequencies in bfloat16 would be wrong.
    """
    packed = packed_weights(model)
    for weight in model.parameters():
        if weight.is_floating_point() and id(weight) not in packed:
            weight.data = weight.data.to(dtype)


def best_device() -> torch.device:
    """Return the first accelerator that is available, else the CPU."""
    for name in ("cuda", "mps"):
        if getattr(torch, name).is_available():
            return torch.device(name)
    return torch.device("cpu")


def vocabulary_size(model: nn.Module) -> int:
    """Return the number of tokens that the model has an embedding for."""
    return int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]


def shared_vocabulary(
    ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, name: str, imitate: str
) -> int:
    """Return the number of token ids, from 0, that mean the same in both tokenizers.

    The others may only be added tokens. Raises UserError otherwise. name: of the other model.
    imitate: the command that trains on completions of that model, which the error suggests.
    """
    vocabularies = [
        {i: text for text, i in tokenizer.get_vocab().items()} for tokenizer in (ours, theirs)
    ]
    end = max(max(vocabulary, default=-1) for vocabulary in vocabularies) + 1
    first, second = vocabularies
    shared = next((i for i in range(end) if first.get(i) != second.get(i)), end)
    for tokenizer, vocabulary in zip((ours, theirs), vocabularies, strict=True):
        added = tokenizer.added_tokens_decoder
        other = next((i for i in sorted(vocabulary) if i >= shared and i not in added), None)
        if other is not None:
            raise UserError(
                f"the tokenizers of the model and of {name} differ: token {shared} is "
                f"{first.get(shared)!r} and {second.get(shared)!r}",
                code="vocabulary-mismatch",
                where="teacher.model",
                fix=f"use a teacher with the same tokenizer, or imitate answers that it writes: "
                f"`{imitate}`",
            )
    return shared


def check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError when the tokenizer has tokens for which the model has no embedding."""
    if len(tokenizer) > vocabulary_size(model):
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model only "
            f"{vocabulary_size(model)}",
            code="tokenizer-mismatch",
            where="model.tokenizer",
            fix="use the tokenizer that belongs to the model",
        )
