"""Loading a causal or a reward model and its tokenizer, putting an adapter on it, and saying which
weights train.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
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
from valence.models.loading import LOADING_ERRORS, cannot_load, must_exist
from valence.models.policy_model import PolicyModel
from valence.models.quantized import compute_alike, how, packed
from valence.models.reference import (
    AdapterDisabledReference,
    FrozenReference,
    Reference,
    SyncedReference,
    copied,
    frozen_weights,
)
from valence.models.scores import Scorer, is_reward_model, widen_head

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
BARS = sys.stderr.isatty()  # transformers' own bars are noise in a log
# names of numbers that make a training forward random, and nothing else
NOISE = re.compile("drop|^(input_)?jitter_noise$")


def load_tokenizer(
    name: str, *, gguf_file: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id. Raises UserError when there is none."""
    must_exist(name, "model.tokenizer or model.name")
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **extra)
    except LOADING_ERRORS as error:
        raise cannot_load("tokenizer", name, error) from error


def generation_stops(
    name: str, *, gguf_file: str | None = None, trust_remote_code: bool = False
) -> tuple[int, ...]:
    """Tokens at which a model stops by its generation config, or else by its configuration; empty
    if neither names any.
    """
    try:
        return stops_of(GenerationConfig.from_pretrained(name))
    except (OSError, ValueError, TypeError):  # it has none
        pass
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **extra)
    except LOADING_ERRORS:  # what is wrong with the model is said when it is loaded
        return ()
    return stops_of(config.get_text_config())


def stops_of(config: Any) -> tuple[int, ...]:
    """``eos_token_id`` of a configuration, which may be one token, several or none."""
    named: Any = getattr(config, "eos_token_id", None)
    several = named if isinstance(named, list | tuple) else [named]
    return tuple(dict.fromkeys(int(i) for i in several if i is not None))


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    attributes: Sequence[str] | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    quantize: bool = False,
) -> nn.Module:
    """A causal language model with its weights in ``dtype``; or with ``attributes`` a reward model,
    which scores each of them.

    A reward model's head is the one that was saved with it; on a language model it is fresh, and
    zero: all answers score 0.
    quantize: linear layers, but no head, keep 4 bits of each weight, and their products are in
    ``dtype``; such a model is loaded onto the CUDA device if there is one. Raises UserError when
    the model cannot be loaded, is quantized already, or was trained on other attributes.
    """
    config = read_config(
        name, attributes=attributes, gguf_file=gguf_file, trust_remote_code=trust_remote_code
    )
    if not BARS:
        disable_progress_bar()
    extra: dict[str, Any] = {
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "config": config,
    }
    if gguf_file:
        from transformers import GgufConfig

        extra |= {"gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    if quantize:
        if getattr(config, "quantization_config", None) is not None:
            what = "the model is already quantized"
            raise UserError(
                what,
                code="model-quantized-already",
                where=f"model.name: {name}",
                fix="use the model that it was quantized from, or remove model.quantize",
            )
        extra["quantization_config"] = how(dtype)
    try:
        if attributes is None:
            return AutoModelForCausalLM.from_pretrained(name, **extra)
        with quiet():
            model, report = AutoModelForSequenceClassification.from_pretrained(
                name, output_loading_info=True, **extra
            )
    except LOADING_ERRORS as error:
        raise cannot_load("model", name, error) from error
    absent = sorted(key for key in report["missing_keys"] if key != "score.weight")
    if not is_reward_model(model):
        why, code = f"{type(model).__name__} has no linear head `score`", "reward-head-unsupported"
    elif absent:
        why, code = f"the folder lacks weights, such as {absent[0]}", "model-incomplete"
    else:
        if "score.weight" in report["missing_keys"]:
            nn.init.zeros_(model.score.weight)
        return model
    raise UserError(
        why,
        code=code,
        where=f"model.name: {name}",
        fix="use a causal language model, or a reward model",
    )


def read_config(
    name: str,
    *,
    attributes: Sequence[str] | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The configuration of a model; with ``attributes`` that of a reward model which scores each of
    them.

    Raises UserError when it cannot be read, or is of a model for others.
    """
    must_exist(name, "model.name")
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **extra)
    except LOADING_ERRORS as error:
        raise cannot_load("model", name, error) from error
    if attributes is not None:
        _name_attributes(config, attributes, name)
    return config


@contextmanager
def quiet() -> Iterator[None]:
    """transformers tells at length that a head is new, and that the one over the vocabulary is not
    used.
    """
    before = get_verbosity()
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(before)


def _name_attributes(config: Any, attributes: Sequence[str], name: str) -> None:
    """Gives the head its size and names.

    Raises UserError when the model has a head for others, or can have none.
    """
    if config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES and not getattr(
        config, "auto_map", None
    ):
        raise UserError(
            f"transformers has no {config.model_type} with a head for scores, so "
            f"a saved model could not be loaded",
            code="reward-head-unsupported",
            where=f"model.name: {name}",
            fix="use another decoder, such as Llama, Qwen, Gemma, Mistral or GPT-2",
        )
    saved = list(config.id2label.values())
    given = any("SequenceClassification" in kind for kind in config.architectures or [])
    unnamed = len(saved) == 1 or all(label.startswith("LABEL_") for label in saved)
    if given and saved != list(attributes) and not (unnamed and len(saved) == len(attributes)):
        raise UserError(
            f"the reward model scores {', '.join(saved)}, the data {', '.join(attributes)}",
            code="reward-attributes-differ",
            where=f"model.name: {name}",
            fix="use data with the same attributes, or start from a language model",
        )
    config.id2label = dict(enumerate(attributes))
    config.label2id = {attribute: i for i, attribute in enumerate(attributes)}


def without_dropout(model: nn.Module) -> nn.Module:
    """Sets every dropout (and multiplicative jitter) to 0, but not an adapter's own: with it, the
    loss of a step would depend on how the step is cut into micro-batches.
    """
    for name, module in model.named_modules():
        if "lora_" in name:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        # Many models keep no dropout module but a number, by which they call the function.
        module.__dict__.update(
            {
                key: 0.0
                for key, value in vars(module).items()
                if isinstance(value, float) and NOISE.search(key)
            }
        )
    return model


def position_limit(model: nn.Module) -> tuple[int, bool] | None:
    """The number of positions that a model was made for (None: its configuration says nothing), and
    whether it is a table of positions that ends there, beyond which the forward pass fails (not so
    with rotary positions).
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
    # Some tables have two rows more, for padding.
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
) -> None:
    """Raise UserError when a learned table of positions has fewer than ``length``.

    A model whose positions go on beyond those that it was made for is warned of, with ``warn``.

    subject: what is that long. fix: may name ``{limit}``.
    """
    limit, learned = position_limit(model) or (length, False)
    if length <= limit or not (learned or warn):
        return
    what = f"{subject} {length} tokens, but the model was trained for {limit}"
    fix = fix.format(limit=limit)
    if learned:
        raise UserError(what, code=code, where=where, fix=fix)
    warnings.warn(f"{where}: {what}; to avoid it, {fix}", stacklevel=3)


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
    """Makes a loaded model trainable, without dropout of its own: whole, with a fresh adapter, or
    with a continued one.

    A reward model becomes a ``Scorer``; its head trains under an adapter too. levels: of its
    thresholds (None: it has none).
    lora: rank, alpha, dropout, targets. dtype: of the computation. Weights that train are float32
    masters, whatever the type that the model comes in (float64 stays, and comes with float64);
    those under an adapter are cast to ``dtype``. checkpointing: as for ``recompute_layers``. check:
    whether its layout is chosen here (``check_layout``), which runs the model. Raises
    UserError when the model is not causal, the adapter does not fit, or layers cannot be recomputed
    as asked.
    """
    model, scores = without_dropout(model), is_reward_model(model)
    full = lora is None and adapter is None
    if full:
        wide = torch.float64 in (dtype, next(model.parameters()).dtype) and dtype != torch.bfloat16
        _cast(model, torch.float64 if wide else torch.float32)
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
    compute_alike(model)
    if check:
        check_layout(engine.eval())  # dropout of an adapter would make any two passes differ
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
    """Return the reference: a model of its own, or the policy as it starts.

    fresh_adapter: whether the policy with its adapter disabled is the policy as it starts
    (``starts_at_base``). Otherwise the reference is a copy, which shares the weights that do not
    train. follows: a copy that can be moved. check: as for ``build_policy``.

    A model of its own is computed as the policy is, in the types of the policy's weights and
    products and at its temperature: the same weights have a reward of exactly zero. Raises
    UserError when it is not causal.
    """
    if model is not None:
        _cast(model, policy.causal.get_input_embeddings().weight.dtype)
        engine = PolicyModel(compute_alike(without_dropout(model)), compute=policy.compute)
        engine.temperature = policy.temperature
        if check:
            check_layout(engine)
        return FrozenReference(engine, name)
    if follows:
        return SyncedReference(policy)
    if fresh_adapter:
        return AdapterDisabledReference(policy)
    return FrozenReference(copied(policy, frozen_weights(policy)))


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives the weights a type, but not those of 4 bits.

    Buffers keep theirs: rotary frequencies in bfloat16 would turn positions.
    """
    bytes_only = packed(model)
    for weight in model.parameters():
        if weight.is_floating_point() and id(weight) not in bytes_only:
            weight.data = weight.data.to(dtype)


def best_device() -> torch.device:
    """Return the first accelerator that is available, else the CPU."""
    for name in ("cuda", "mps"):
        if getattr(torch, name).is_available():
            return torch.device(name)
    return torch.device("cpu")


def vocabulary_size(model: nn.Module) -> int:
    """Number of tokens that the model has an embedding for."""
    return int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]


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
