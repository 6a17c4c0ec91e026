"""Every setting of a recipe: type, default, meaning, and the checks within its section.

A leaf: it imports types, errors and the table of conversions, and no torch, so that any module may
import it. Checks that need several sections, the method or files are in ``rules.py``.

The ``loss`` section is not here: its settings are the keyword-only parameters of the method's loss,
which are passed to the loader (see ``load.py``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from valence.data.convert import CONVERSIONS
from valence.data.split import PromptSplit
from valence.user_code.plugins import is_plugin, plugin_paths


def _fraction_or_steps(value: float) -> float:
    if value >= 1 and value != int(value):
        raise PydanticCustomError(
            "unsupported",
            "is neither a fraction below 1 nor a whole number of steps",
            {"fix": f"write a whole number, such as {round(value)}, or a fraction such as 0.1"},
        )
    return value


CLOCK = re.compile(r"(?:(\d+):)?(\d+):([0-5]\d):([0-5]\d)")


def _clock(value: Any) -> Any:
    if value is not None and (not isinstance(value, str) or seconds_of(value) <= 0):
        raise PydanticCustomError(
            "unsupported",
            "is not a time above 0",
            {
                "fix": "write hours, minutes and seconds, such as 01:30:00, or also days, such as "
                "2:03:45:00"
            },
        )
    return value


def seconds_of(time: str) -> int:
    """Seconds of HH:MM:SS or D:HH:MM:SS; 0 for any other text."""
    match = CLOCK.fullmatch(time)
    if match is None:
        return 0
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _dtype(value: Any) -> Any:
    """The standard name of a type that may be written shorter. Raises for float16."""
    if not isinstance(value, str):
        return value
    name = value.lower().removeprefix("torch.")
    if name in ("fp16", "float16", "half", "f16"):
        raise PydanticCustomError(
            "unsupported",
            "is not supported: small gradients become 0 in float16, and there is no loss scaling",
            {
                "fix": "write auto, which chooses bfloat16 if the hardware supports it and float32 "
                "otherwise"
            },
        )
    return {
        "bf16": "bfloat16",
        "fp32": "float32",
        "float": "float32",
        "fp64": "float64",
        "double": "float64",
    }.get(name, name)


OPTIMIZERS = ("adamw", "adamw_8bit")
"""Optimizers with a short name; any other is an import path."""
_IN_TORCH = {
    name.lower(): f"torch.optim.{name}"
    for name in ("Adafactor", "Adam", "Muon", "NAdam", "RAdam", "RMSprop", "SGD")
}


def _optimizer_name(value: str) -> str:
    if value in OPTIMIZERS or re.fullmatch(r"\w+([.:]\w+)+", value):
        return value
    near = get_close_matches(value.lower(), [*OPTIMIZERS, *_IN_TORCH], 1)
    meant = f"did you mean {_IN_TORCH.get(near[0], near[0])}? otherwise " if near else ""
    raise PydanticCustomError(
        "unsupported",
        "is neither adamw nor adamw_8bit nor an import path",
        {"fix": f"{meant}write the import path of a class, such as torch.optim.SGD"},
    )


def _as_count(value: Any) -> Any:
    """1 for true, 0 for false."""
    return int(value) if isinstance(value, bool) else value


def _share(value: Any) -> Any:
    """Refuse a number that is not a share of the rows."""
    if isinstance(value, int | float) and not 0 < value < 1:
        is_percentage = 1 < value < 100
        raise PydanticCustomError(
            "unsupported",
            "is not a share between 0 and 1",
            {
                "fix": f"write {value / 100:g} for {value:g} % of the rows"
                if is_percentage
                else "write a number such as 0.1, or the files to evaluate on"
            },
        )
    return value


Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float64"], BeforeValidator(_dtype)]
Text = Annotated[str, Field(min_length=1)]
RowCount = Annotated[int, Field(gt=0, le=10**9)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
WholeFromOne = AfterValidator(_fraction_or_steps)
Clock = Annotated[str | None, BeforeValidator(_clock)]


@dataclass(frozen=True, slots=True)
class Issue:
    """A mistake that only several settings together show.

    settings: dotted names of settings or sections. Those whose value is their default are not
    reported as having no effect.
    """

    settings: tuple[str, ...]
    message: str
    fix: str
    code: Literal["setting-no-effect", "setting-conflict", "setting-duplicate"]


def no_effect(*settings: str, why: str, fix: str | None = None) -> Issue:
    """Settings that change nothing. fix: how to give them an effect; None if nothing does."""
    message = f"the setting has no effect: {why}"
    remedy = f"remove it, or {fix}" if fix else "remove it"
    return Issue(settings, message, remedy, "setting-no-effect")


def conflict(setting: str, message: str, fix: str) -> Issue:
    """A setting that another one rules out or makes necessary."""
    return Issue((setting,), message, fix, "setting-conflict")


class Section(BaseModel):
    """A mapping in the recipe.

    Unknown names are errors; values are not coerced between types, and are finite.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def issues(self) -> Iterator[Issue]:
        """Mistakes that the settings of this section show together."""
        yield from ()


def _lora_initialization(value: Any) -> Any:
    """Refuse initializations that need data, or that change the model that training starts from."""
    if isinstance(value, str) and (reason := LORA_INITIALIZATIONS_REFUSED.get(value.lower())):
        why, fix = reason
        raise PydanticCustomError(
            "unsupported", "is not supported: {why}", {"why": why, "fix": fix}
        )
    return value


LORA_INITIALIZATIONS_REFUSED = {
    "eva": ("it needs a pass over the data before training", "set it to gaussian or pissa"),
    "corda": ("it needs a pass over the data before training", "set it to pissa"),
    "lora_ga": ("it needs gradients of the data before training", "set it to pissa"),
    "loftq": (
        "it replaces the model's weights by a quantized approximation, so that training would not "
        "start from the model",
        "remove it, and set model.quantize: nf4",
    ),
}
"""Values of ``init_lora_weights`` that PEFT has and a recipe cannot use: why, and what to do."""

LORA_FIELDS_REFUSED: dict[str, tuple[str, str]] = {
    name: (why, fix)
    for names, why, fix in (
        (
            "eva_config corda_config lora_ga_config",
            "it configures an initialization that needs a pass over the data before training",
            "remove it, and set init_lora_weights: gaussian or pissa",
        ),
        (
            "loftq_config",
            "training would not start from the model of model.name",
            "remove it, and set model.quantize: nf4 to quantize the base model",
        ),
        (
            "kasa_config layer_replication",
            "training would not start from the model of model.name",
            "remove it",
        ),
        (
            "velora_config monteclora_config",
            "its gradients are not exact, or depend on the micro-batches",
            "remove it; to save memory, set train.checkpointing: full",
        ),
        (
            "alora_invocation_tokens use_bdlora arrow_config",
            "such an adapter cannot be merged into the model",
            "remove it",
        ),
        (
            "use_qalora qalora_group_size",
            "QA-LoRA needs a GPTQ model, which Valence does not train",
            "remove it, and set model.quantize: nf4 to quantize the base model",
        ),
    )
    for name in names.split()
}
"""Fields of PEFT's ``LoraConfig`` that a recipe cannot set: why, and what to do."""
LORA_FIELDS_SET = frozenset([
    "r", "lora_alpha", "lora_dropout", "target_modules", "task_type", "peft_type", "auto_mapping",
    "peft_version", "base_model_name_or_path", "revision", "inference_mode",
])  # fmt: skip
"""Fields of ``LoraConfig`` that follow from other settings."""


def peft_fields() -> frozenset[str]:
    """The fields of PEFT's ``LoraConfig`` that ``model.lora`` passes to it under the same name."""
    from peft import LoraConfig

    names = {field.name for field in dataclasses.fields(LoraConfig)}
    return frozenset(names - LORA_FIELDS_SET - LORA_FIELDS_REFUSED.keys())


def _peft_field(name: str) -> str:
    """Refuse a name that is no field of PEFT's ``LoraConfig``."""
    if name not in peft_fields():
        raise PydanticCustomError("extra_forbidden", "no such setting")
    return name


def _names_or_pattern(value: Any) -> Any:
    """Refuse a text that is a single name: as a regular expression it would match no full name."""
    if not isinstance(value, str) or value == "all-linear":
        return value
    if re.fullmatch(r"[\w.-]*", value):
        is_typo = get_close_matches(value.lower(), ["all-linear"], cutoff=0.8)
        raise PydanticCustomError(
            "unsupported",
            "is neither a list of names nor a regular expression",
            {"fix": "did you mean all-linear?" if is_typo else f"write [{value}]"},
        )
    try:
        re.compile(value)
    except re.error as error:
        raise PydanticCustomError(
            "unsupported",
            "is not a regular expression: {why}",
            {"why": str(error), "fix": "correct it, or write a list of names, such as [q_proj]"},
        ) from None
    return value


NamesOrPattern = Annotated[list[Text] | Text, BeforeValidator(_names_or_pattern)]
LoraInitialization = Annotated[
    bool
    | Literal["gaussian", "orthogonal", "pissa", "olora", "mica"]
    | Annotated[str, Field(pattern="^pissa_niter_[0-9]+$")],
    BeforeValidator(_lora_initialization),
]


class LoraSettings(Section):
    """Settings of a low-rank adapter. Any other field of PEFT's ``LoraConfig`` can be set, too."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[Annotated[str, AfterValidator(_peft_field)], Any] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    rank: Annotated[int, Field(gt=0, le=65536)] = 16
    """Rank of the update."""
    alpha: PositiveFloat | None = None
    """Scale: the update is multiplied by alpha/rank. Default: twice the rank."""
    dropout: BelowOne = 0.0
    """Dropout on the adapter's input.

    Above 0, the result depends on how a step is split into micro-batches.
    """
    targets: NamesOrPattern = "all-linear"
    """Linear layers with an adapter: names, or a regular expression for full names. all-linear: all
    but the head.
    """
    exclude_modules: NamesOrPattern | None = None
    """Layers of `targets` without an adapter, written like `targets`."""
    use_rslora: bool = False
    """Multiply by alpha/sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""
    use_dora: bool = False
    """Also train the norm of each output's weights (DoRA, arXiv 2402.09353). Slower."""
    init_lora_weights: LoraInitialization = True
    """Initial values. true: the update starts at zero. false: random.

    gaussian, orthogonal and mica (arXiv 2604.01694, trains only the adapter's first matrix) also
    start at zero. pissa (arXiv 2404.02948), pissa_niter_N (the same by a faster approximation) and
    olora (arXiv 2406.01775) move a part of the model's weights into the adapter; the policy still
    starts from the model.
    """
    rank_pattern: dict[Text, PositiveInt] = Field(default_factory=dict[str, int])
    """Ranks of single layers: {name or regular expression: rank}."""
    alpha_pattern: dict[Text, PositiveFloat] = Field(default_factory=dict[str, float])
    """alpha of single layers, written like `rank_pattern`."""
    layers_to_transform: list[NonNegativeInt] | NonNegativeInt | None = None
    """Decoder layers with an adapter, from 0. Default: all."""
    layers_pattern: list[Text] | Text | None = None
    """Name of the model's list of layers, if PEFT does not find it."""
    target_parameters: list[Text] | None = None
    """Other parameters with an adapter, such as the experts of a mixture of experts."""
    modules_to_save: list[Text] | None = None
    """Modules to train in full, such as `lm_head`."""
    trainable_token_indices: list[NonNegativeInt] | dict[Text, list[NonNegativeInt]] | None = None
    """Tokens whose embeddings also train, or {name of an embedding: tokens}."""
    ensure_weight_tying: bool = False
    """Keep embedding and head tied if `modules_to_save` trains them."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases of the model that also train; lora_only: those of layers with an adapter."""
    lora_bias: bool = False
    """Give the adapter's second matrix a bias; the layers of `targets` need one, too."""

    @field_validator("init_lora_weights", "layers_to_transform", "layers_pattern", "lora_bias")
    @classmethod
    def _check_combination(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what PEFT does not combine with settings that are declared before it."""
        before = info.data
        targets = before.get("targets", "all-linear")
        initial = before.get("init_lora_weights")
        match info.field_name:
            case "init_lora_weights" if value == "orthogonal" and before.get("rank", 0) % 2:
                message, fix = "needs an even rank", "set model.lora.rank to an even number"
            case "layers_to_transform" if (
                value is not None and isinstance(targets, str) and targets != "all-linear"
            ):
                message = "cannot be combined with a regular expression in model.lora.targets"
                fix = "list the names of the layers in model.lora.targets"
            case "layers_pattern" if (
                value is not None and before.get("layers_to_transform") is None
            ):
                message = "has no effect without layers_to_transform"
                fix = "set model.lora.layers_to_transform, or remove model.lora.layers_pattern"
            case "lora_bias" if value and (before.get("use_dora") or isinstance(initial, str)):
                message = (
                    "cannot be combined with use_dora, or with an init_lora_weights other than "
                    "true or false"
                )
                fix = "remove model.lora.lora_bias, or use_dora and init_lora_weights"
            case _:
                return value
        raise PydanticCustomError("unsupported", "{message}", {"message": message, "fix": fix})


class Model(Section):
    name: Text
    """Folder or hub id of the model."""
    dtype: Dtype = "auto"
    """Compute dtype. auto: bfloat16 if the hardware supports it, else float32.

    bfloat16 needs CUDA devices of capability 8.0 or more, or CPUs with AVX512-BF16. Trainable
    weights are always kept in float32 (float64 with float64). A resumed run keeps its dtype. The
    environment variable VALENCE_DTYPE replaces the automatic choice.
    """
    lora: LoraSettings | None = None
    """Train a low-rank adapter instead of all weights. Also takes other fields of PEFT's
    `LoraConfig`.
    """
    adapter: Text | None = None
    """Folder of an adapter to continue training."""
    quantize: Literal["nf4"] | None = None
    """Store the frozen weights below an adapter in 4 bits (QLoRA, arXiv 2305.14314; extra
    `eightbit`).

    Quantizes linear layers, but not the embedding, the head or norms. Applies to reference.model
    too.
    """
    tokenizer: Text | None = None
    """Folder or hub id of the tokenizer. Default: that of the model."""
    gguf_file: Text | None = None
    """GGUF file in the model folder to read the weights from."""
    attributes: list[Text] | None = None
    """Attributes that a reward model scores. Default: those of the training rows.

    For a single number, the default is `reward`.
    """
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    def issues(self) -> Iterator[Issue]:
        trains_adapter = self.lora is not None or self.adapter is not None
        if self.lora is not None and self.adapter is not None:
            yield conflict(
                "lora",
                "model.adapter already determines the rank and the layers",
                "remove model.lora, or model.adapter to start a new adapter",
            )
        if self.quantize is None:
            return
        if not trains_adapter:
            yield conflict(
                "quantize",
                "4-bit weights cannot be trained, only an adapter on them",
                "set model.lora, or remove model.quantize",
            )
        if self.gguf_file is not None:
            yield conflict(
                "quantize",
                "the weights of a GGUF file cannot be quantized again",
                "remove model.gguf_file or model.quantize",
            )
        if self.dtype == "float64":
            yield conflict(
                "quantize",
                "4-bit weights cannot be multiplied in float64",
                "set model.dtype: bfloat16 or float32",
            )


class ReferenceSettings(Section):
    model: Text | None = None
    """Folder or hub id. Default: the policy before training."""
    cache: Text = "auto"
    """Folder that caches the reference log-probabilities, also for other runs. auto: in the run's
    folder. off: no cache.

    With sync_every, auto is off. Without a cache, they are computed whenever they are needed.
    """
    sync_every: PositiveInt | None = None
    """Update the reference from the policy every N steps (TR-DPO, arXiv 2404.09656). null: never.

    The paper of `loss.humanline` uses 1. After an update with sync_mix 1, policy and reference are
    equal and all rewards are 0; read `logps/*` instead.
    """
    sync_mix: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the policy in an update. 1: copy the policy.

    1 is a hard update. Below 1, policy and reference are averaged (soft update).
    """

    def issues(self) -> Iterator[Issue]:
        if self.sync_every is None:
            yield no_effect(
                "sync_mix", why="the reference is never updated", fix="set reference.sync_every"
            )
            return
        if self.cache not in ("auto", "off"):
            yield conflict(
                "cache",
                "the log-probabilities of a reference that is updated (reference.sync_every) "
                "cannot be cached",
                "remove reference.cache, or reference.sync_every",
            )
        if self.model is not None:
            yield conflict(
                "model",
                "a reference that is updated (reference.sync_every) is a copy of the policy",
                "remove reference.model, or reference.sync_every",
            )


SELF = "self"
"""The teacher that is the policy itself."""


class Teacher(Section):
    model: Text = SELF
    """self: the model itself (hindsight). Or another model with the same tokens (distill): folder,
    hub id or address of a vLLM server.

    A teacher from a folder or the hub is quantized like the policy.
    """
    weights: Literal["initial", "ema", "live"] = "initial"
    """Weights of the teacher self. initial: those before training. ema: a moving average during
    training. live: the current ones.

    With live, the teacher may drift together with the policy.
    """
    rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.05
    """With ema: share of the policy's weights in each step's average."""
    context: Literal["feedback", "demonstration", "either"] = "feedback"
    """What the teacher reads after the prompt. feedback: the column `feedback`; with a reward, the
    text that it returns. demonstration: a good completion in that column; with a reward, the best
    completion of the prompt, for the others. either (with a reward): its text, else such a
    completion.

    With context feedback, that column has what the user wrote about the completion.
    """
    template: Text | None = None
    """The text after the prompt, with `{feedback}`. Default: neutral sentences.

    These say who wrote the feedback, and how the user rated the completion if the row has a label.
    """

    @property
    def is_served(self) -> bool:
        """Whether it runs on a server."""
        return self.model.startswith(("http://", "https://"))

    @property
    def has_average(self) -> bool:
        """Whether its weights are a moving average of the policy's."""
        return self.model == SELF and self.weights == "ema"

    def issues(self) -> Iterator[Issue]:
        if self.model != SELF:
            yield no_effect("weights", why="the teacher is another model")
        if self.model != SELF or self.weights != "ema":
            yield no_effect("rate", why="the teacher is no average", fix="set teacher.weights: ema")
        if self.template is not None and "{feedback}" not in self.template:
            yield conflict("template", "it does not contain {feedback}", "add {feedback} to it")


class SourceSettings(Section):
    path: Text
    """A .jsonl, .json, .csv, .tsv or .parquet file (also .gz), or a hub data set id."""
    split: Text | None = None
    """Split of a hub data set."""
    subset: Text | None = None
    """Subset (configuration) of a hub data set."""
    format: Text | None = None
    """Row format, feedback tool, or import path of a function that reads either. Default: detected.

    The row format is detected from the first rows. A feedback tool is the one that exported the
    file.
    """
    keys: dict[Text, Text] = Field(default_factory=dict[str, str])
    """Columns: {the format's name: the file's name}. Dots lead to nested fields."""
    weight: PositiveFloat = 1.0
    """Multiplies the weight of every row of this file."""
    limit: RowCount | None = None
    """Use only the first N rows."""


if TYPE_CHECKING:
    Convert = str
else:
    Convert = Literal[*CONVERSIONS]

READ_THRESHOLD = sorted(name for name, c in CONVERSIONS.items() if "threshold" in c.settings)
"""Conversions that read ``data.threshold``."""


ListName = Literal["train", "eval", "test"]


class Data(Section):
    train: list[SourceSettings] = Field(default_factory=list[SourceSettings])
    """Files to train on."""
    eval: Annotated[
        list[SourceSettings] | Annotated[float, Field(gt=0.0, lt=1.0)], BeforeValidator(_share)
    ] = Field(default_factory=list[SourceSettings])
    """Files to evaluate on during training, or a share of the prompts of data.train to hold out.

    With a share such as 0.1, a hash of data.eval_seed and of the prompt up to its first user
    message decides, so that all rows of a prompt are on the same side, and stay there when rows are
    added. The share is therefore approximate.
    """
    eval_seed: NonNegativeInt = 0
    """Another number holds out other prompts for a share."""
    test: list[SourceSettings] = Field(default_factory=list[SourceSettings])
    """Files to evaluate on once, after training."""
    max_length: Annotated[int, Field(ge=8)] = 1024
    """Maximum tokens of a prompt with its completion."""
    long_rows: Literal["drop", "cut_completion", "cut_prompt"] = "drop"
    """Leave out rows above max_length, or cut the end of the completion or the start of the prompt.

    cut_completion adds no end-of-turn token. cut_prompt cuts the oldest turns first, and never the
    last user turn.
    """
    limit: RowCount | None = None
    """Use only the first N rows of each of train, eval and test.

    With data.eval as a share, it is held out from the first N rows of train.
    """
    train_on: Literal["completion", "assistant"] = "completion"
    """Train on the last assistant turn of a demonstration (completion), or on all (assistant)."""
    as_chat: Literal["auto"] | bool = "auto"
    """Whether a text prompt becomes a user message, and a transcript its turns. auto: if the
    tokenizer has a chat template.

    Its completion becomes the assistant message. false: text is not wrapped, which is right for
    base models and for rows that are rendered with the template already. Evaluation, sampling and
    scoring do the same.
    """
    chat_template: Text | None = None
    """`chatml`, or the path of a Jinja file. Default: that of the tokenizer.

    ChatML prints tools, tool calls and their results as Qwen2.5 does. The template is saved with
    the tokenizer.
    """
    chat_template_kwargs: dict[Text, Any] = Field(default_factory=dict[str, Any])
    """Variables of the chat template, such as `{enable_thinking: false}`."""
    convert: Annotated[
        Convert | None,
        Field(
            description="Convert rows of another kind into rows that the method reads.\n\n"
            + "; ".join(f"{name}: {c.description}" for name, c in CONVERSIONS.items())
            + "."
        ),
    ] = None
    threshold: float | None = None
    """Smallest score, or difference of scores, that a conversion uses.

    For scores_to_judgements: the smallest score that counts as thumbs up. For scores_to_pairs and
    scores_to_all_pairs: the smallest difference of scores that makes a pair. For
    best_to_demonstrations: completions with a smaller score are never imitated.
    """
    top_n: PositiveInt = 1
    """For best_to_demonstrations: completions per prompt."""
    mask_truncated: bool = True
    """For best_to_demonstrations: leave out truncated completions (`"stop": "length"`).

    These are the completions that `valence sample` stopped at the maximum number of tokens.
    """
    on_bad_row: Literal["stop", "skip"] = "stop"
    """Stop at the first row that cannot be used, or skip, count and list such rows."""
    stratify: bool = False
    """Give every step the data set's share of thumbs up."""

    @property
    def split(self) -> PromptSplit | None:
        """The rows of ``train`` to hold out; None if ``eval`` has files or nothing."""
        if isinstance(self.eval, list):
            return None
        return PromptSplit(self.eval, self.eval_seed)

    def files(self, name: ListName) -> list[SourceSettings]:
        """The files of a list; none for a share."""
        files = {"train": self.train, "eval": self.eval, "test": self.test}[name]
        return files if isinstance(files, list) else []

    def issues(self) -> Iterator[Issue]:
        if isinstance(self.eval, list):
            yield no_effect(
                "eval_seed",
                why="data.eval is no share of the rows",
                fix="set data.eval to a share such as 0.1",
            )
        conversion = None if self.convert is None else CONVERSIONS[self.convert]
        if conversion is None or "threshold" not in conversion.settings:
            yield no_effect(
                "threshold",
                why=f"only data.convert: {', '.join(READ_THRESHOLD[:-1])} and {READ_THRESHOLD[-1]} "
                "read it",
                fix="set data.convert to one of them",
            )
        elif "threshold" in conversion.required and self.threshold is None:
            yield conflict(
                "threshold",
                f"{self.convert} needs the smallest score with thumbs up",
                "set data.threshold to the lowest score of a good answer",
            )


class RewardSettings(Section):
    """One reward of a completion. Several are added, each multiplied by its weight."""

    reward: Text
    """A function (`package.module:function`), a rule, the folder or hub id of a reward model, or
    the address of a server (`http://host:port/get_reward`).

    Separate several addresses with commas: if one server fails, the next one is called.
    """
    judge: Text | None = None
    """Instead of `reward`: address of an OpenAI-compatible server (`http://host:port/v1`) whose
    language model scores completions by a rubric.

    `settings` has its model and criteria.
    """
    name: Text | None = None
    """Name in the metrics. Default: a short form of `reward`."""
    weight: float = 1.0
    """Weight in the sum of rewards."""
    clip: tuple[float, float] | None = None
    """Smallest and largest value; others are clipped."""
    gate: float | None = None
    """Below this value, the completion's other rewards count as 0."""
    settings: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of a rule or a function; settings of a reward model, a server or a judge."""
    deterministic: bool = False
    """The same completion always gets the same score: cache scores for the run.

    Rules and reward models are always deterministic.
    """
    timeout: PositiveFloat = 60.0
    """Seconds per call. Not for reward models."""
    retries: NonNegativeInt = 3
    """How often a failed call is repeated.

    There are increasing random pauses between the calls. A call that timed out is repeated only
    within 2 x `timeout` seconds of the first call.
    """
    concurrency: PositiveInt = 8
    """Concurrent calls to a server or an async function.

    Other rewards are called one at a time.
    """
    batch_size: PositiveInt = 64
    """Completions per call."""
    token_env: Text | None = None
    """Environment variable with a server's bearer token."""

    def issues(self) -> Iterator[Issue]:
        if self.judge is not None and self.reward != self.judge:
            yield conflict(
                "judge",
                "the entry has both a reward and a judge",
                "remove one of them, or write them as two entries of the list `reward`",
            )

    @property
    def log_name(self) -> str:
        """The name that must differ between the rewards of a run."""
        return self.name or self.reward


ENGINES = ("hf", "vllm", "openai")
"""The sampling engines of Valence."""


class Rollout(Section):
    """How the policy is sampled, and how its completions are used."""

    num_rollouts: PositiveInt = 8
    """Completions per prompt."""
    top_n: PositiveInt = 1
    """For `rejection`: completions per prompt to train on."""
    min_reward: float | None = None
    """For `rejection`: smallest reward to train on. Default: above the lowest of the group."""
    mask_truncated: bool | None = None
    """Do not train on completions truncated at max_new_tokens (overlong filtering, arXiv
    2503.14476). Default: true for `rejection`, else false.

    `rejection` does not imitate them, `hindsight` leaves them out, and policy gradient methods
    leave their tokens out of the loss. Their rewards still count in the statistics of the group.
    """
    epochs: PositiveInt | None = None
    """Passes over the completions of a round. Default: 4 for `ppo`, else 1."""
    steps: PositiveInt = 1
    """Optimizer steps per pass, which share the prompts of the round."""
    max_new_tokens: Annotated[int, Field(gt=0, le=2**20)] = 512
    """Maximum tokens per completion, with the results of tools."""
    temperature: PositiveFloat = 1.0
    """Divides the logits, also in training for methods with a ratio of probabilities."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens with this total probability. Must be 1 for methods
    with a ratio of probabilities.

    These are grpo, ppo, rloo and others.
    """
    at_once: PositiveInt | None = None
    """Completions per batch of engine hf. Default: 64; on a GPU up to 512.

    On a GPU, their keys and values need at most a quarter of its memory.
    """
    overlong_buffer: NonNegativeInt = 0
    """In the last N tokens before max_new_tokens, the reward falls linearly by up to 1 (arXiv
    2503.14476).
    """
    on_failure: Literal["drop", "drop_group", "stop"] = "drop"
    """When a reward fails, leave out the completion, leave out its prompt's completions, or stop.
    """
    max_failed: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Stop when a larger share of a round's completions has no score."""
    replace_tied: bool | None = None
    """Sample further prompts in place of those whose completions have equal rewards (dynamic
    sampling, arXiv 2503.14476). Default: true for `dapo`, else false.
    """
    max_resample: PositiveInt = 10
    """How often per round prompts without a gradient are replaced, at most."""
    measure_kl: bool | Literal["auto"] = "auto"
    """Log the KL divergence from the reference (`kl`). auto: if that needs no second model.

    auto logs it if the reference needs no second model in memory (a new adapter can be disabled),
    if the loss reads it anyway, or if reference.model is set. true: always, with a copy of the
    model in memory if needed.
    """
    tools: list[Text] | Text | None = None
    """Functions that the policy may call (`package.module:function`), with type hints and a
    docstring. Completions may then have several turns (`valence docs tools`).
    """
    environment: Text | None = None
    """A class whose public methods are tools (`package.module:Class`). Each completion has its own
    object of it.

    `reset` gets the columns of the row, and may return a text to append to the prompt. `get_reward`
    and `get_turn_reward` are optional; the reward is then `environment`, if no other is set.
    """
    max_turns: PositiveInt = 8
    """With tools: most turns of the policy in a completion. The calls of the last one are not made.
    """
    tool_timeout: PositiveFloat = 30.0
    """With tools: seconds per call."""
    tool_output: PositiveInt = 10_000
    """With tools: most characters of a result; the rest is cut."""
    engine: Text = "hf"
    """hf (this process), vllm (a server that receives the weights), openai (a server with OpenAI's
    completions API and fixed weights), or a plugin: a name or import path.
    """
    url: list[Text] | Text | None = None
    """Address of the server, or of several that share the prompts."""
    start: bool = False
    """Start a vLLM server for the run, and stop it at the end."""
    python: Text | None = None
    """With start: Python of an environment with vLLM. Default: VALENCE_VLLM_PYTHON, or this Python.
    """
    devices: Annotated[list[NonNegativeInt], Field(min_length=1)] | None = None
    """With start: GPUs of the server, by their index in this process. Default: the first without a
    training process.

    The index is that of `cuda:0`. If all GPUs have a training process, the default is the GPU of
    the first process.
    """
    memory_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """With start: the server's share of each GPU's memory. Default: vLLM's, or what a training
    process leaves free.

    On a GPU with a training process, the default follows from the memory estimate.
    """
    sleep: bool | Literal["auto"] = "auto"
    """Whether the server frees its GPU memory during training steps. auto: with start, on a GPU
    that also trains.
    """
    transport: Literal["auto", "disk", "gloo", "nccl", "ipc", "lora"] = "auto"
    """How weights reach a vLLM server. auto: lora with an adapter, else ipc on a shared CUDA
    device, else nccl between CUDA devices, else disk.

    disk: through a shared folder. gloo: by a broadcast in host memory. nccl: by a broadcast between
    CUDA devices. ipc: through memory of a CUDA device that both use. lora: only the adapter,
    through a shared folder.
    """
    folder: Text | None = None
    """Folder of the weights for disk and lora. Default: in the run's folder."""
    timeout: PositiveFloat = 600.0
    """Seconds per request to a server."""
    ahead: Annotated[NonNegativeInt, BeforeValidator(_as_count)] = 0
    """For servers: rounds that are sampled and scored ahead of training. 0: training waits for each
    round.

    The completions come from weights that are up to this many rounds old. `true` means 1.
    """
    check_prompts: NonNegativeInt = 4
    """Prompts whose log-probabilities are compared with the server's after each update of its
    weights.
    """
    max_mismatch: PositiveFloat | None = None
    """Stop when the log-probabilities of check_prompts differ by more nats per token, on average.
    Default: 0.005 in float32, else 0.1.

    The default is 0.005 if both sides compute in float32.
    """

    @property
    def num_epochs(self) -> int:
        """Passes over a round. A loaded recipe has the default of its method filled in."""
        return self.epochs or 1

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps of a whole round."""
        return self.num_epochs * self.steps

    @property
    def functions(self) -> list[str]:
        """The functions that are tools."""
        return [self.tools] if isinstance(self.tools, str) else self.tools or []

    @property
    def has_tools(self) -> bool:
        return bool(self.functions) or self.environment is not None

    @property
    def uses_server(self) -> bool:
        """Whether it needs the address of a server."""
        return self.engine in ("vllm", "openai")

    @property
    def uses_plugin(self) -> bool:
        return self.engine not in ENGINES

    @property
    def urls(self) -> list[str]:
        """The addresses of servers that are running already."""
        return [self.url] if isinstance(self.url, str) else self.url or []

    def issues(self) -> Iterator[Issue]:
        of_start = "python", "devices", "memory_share"
        of_vllm = (
            "start", *of_start, "sleep", "transport", "folder", "ahead", "check_prompts",
            "max_mismatch",
        )  # fmt: skip
        if self.engine == "hf":
            yield no_effect(
                "url",
                "timeout",
                *of_vllm,
                why="with rollout.engine: hf no server is used",
                fix="set rollout.engine: vllm",
            )
        if self.engine == "vllm":
            yield no_effect(
                "at_once", why="the server decides its batch size", fix="set rollout.engine: hf"
            )
        if self.engine == "openai":
            yield no_effect(
                *of_vllm,
                why="with rollout.engine: openai the server keeps its own weights",
                fix="set rollout.engine: vllm",
            )
        if self.uses_plugin and not is_plugin("engines", self.engine):
            names = ", ".join([*ENGINES, *plugin_paths("engines")])
            yield conflict(
                "engine", f"there is no engine {self.engine!r}", f"set it to one of {names}"
            )
        elif self.uses_plugin:
            yield no_effect(
                *of_vllm, why="only vLLM servers have it", fix="set rollout.engine: vllm"
            )
        if not self.start:
            yield no_effect(*of_start, why="no server is started", fix="set rollout.start: true")
        elif self.url is not None:
            yield conflict(
                "start",
                "a server that Valence starts has an address that Valence chooses",
                "remove rollout.url, or rollout.start to use the server at that address",
            )
        if self.transport == "ipc" and len(self.urls) > 1:
            yield conflict(
                "transport",
                "ipc sends weights to one server, on the GPU of the process that sends them",
                "set rollout.transport: auto, or a single rollout.url",
            )
        if self.sleep is True and self.ahead:
            yield conflict(
                "sleep",
                "with rollout.ahead the server samples while the policy is trained, so it "
                "cannot free its memory",
                "remove rollout.sleep, or rollout.ahead",
            )


class Value(Section):
    """The value head of ppo."""

    trunk: Literal["separate", "shared"] = "separate"
    """separate: a second model for values (or a second adapter). shared: a head on the policy."""
    learning_rate: PositiveFloat | None = None
    """Of the value model or head. Default: train.learning_rate."""


class Mix(Section):
    """The loss of another method on other rows, added to that of every step."""

    method: Text
    """Name of a method."""
    train: list[SourceSettings]
    """Files to train on."""
    weight: PositiveFloat = 1.0
    """Factor of this loss, averaged over its rows."""
    batch_size: PositiveInt | None = None
    """Examples per step. Default: train.batch_size."""
    convert: Convert | None = None
    """Like data.convert."""
    threshold: float | None = None
    """Like data.threshold."""
    loss: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Settings of its loss."""


class Train(Section):
    batch_size: PositiveInt = 16
    """Examples (judgements, pairs, demonstrations) per optimizer step, over all processes; with a
    reward, prompts per round.
    """
    micro_batch_tokens: PositiveInt | Literal["auto"] = "auto"
    """Tokens per micro-batch, for memory and speed; the result is the same. auto: as many as fit
    into memory and make steps faster.

    With adapter dropout or train.router_aux_loss, the result changes too. A resumed run keeps the
    number.
    """
    epochs: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Passes over the training data, unless train.max_steps is set."""
    max_steps: PositiveInt | None = None
    """Train for exactly N optimizer steps, repeating or leaving out rows."""
    optimizer: Annotated[Text, AfterValidator(_optimizer_name)] = "adamw"
    """adamw; adamw_8bit, with its moments in 8 bits; or the import path of a class, such as
    `torch.optim.Muon`.

    adamw_8bit needs a quarter of the memory for its moments, is slow on a CPU, and needs the extra
    `eightbit`. Other classes are `schedulefree.AdamWScheduleFree` or `my_module.MyOptimizer`.
    """
    optimizer_settings: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments of the optimizer class.

    learning_rate, weight_decay and betas are passed to every class.
    """
    learning_rate: PositiveFloat | Literal["auto"] = "auto"
    """Peak learning rate. auto: the method's (see the table of default learning rates in
    docs/settings.md).

    There is one default for all weights and one for an adapter. A resumed run keeps its rate.
    """
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Decay of the learning rate to 0 after the warm-up. constant: none."""
    warmup: Annotated[NonNegativeFloat, WholeFromOne] = 0.03
    """Steps in which the learning rate rises from 0. Below 1: a fraction of all."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices; biases and norms have none."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay rates of the first and second moment.

    They are those of AdamW, and of other optimizers with betas.
    """
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the gradient; null: no clipping."""
    drop_last: bool = False
    """Leave out an epoch's last step if it has fewer than batch_size examples."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the order of examples and of every random draw."""
    checkpointing: Literal["auto", "off", "selective", "selective_op", "full", "offloaded"] = "off"
    """Activation checkpointing: less memory, more time, same result. auto: off if the estimated
    memory fits, else selective_op, else full.

    Layers are computed again in the backward pass instead of storing their activations. selective:
    every second layer. selective_op: every layer, except its matrix multiplications with weights
    and its attention, whose results are stored; its layers cannot be compiled. full: every layer.
    offloaded: every layer, with its input moved to host memory. auto estimates micro-batches of
    micro_batch_tokens (4,096 if that is auto), and chooses selective_op only if train.compile is
    off.
    """
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the model's layers: faster steps after a slow start. auto: in long runs, if there is
    a compiler.

    On a CPU, the compiler is `g++`. on also compiles sharded weights, auto does not.
    """
    router_aux_loss: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of a mixture of experts; 0.01 in its paper (arXiv
    2101.03961).

    The paper is Switch Transformers. Most configurations of transformers have 0.001. The loss is
    added to that of every step. It covers all tokens, prompts included, of the sequences that are
    trained on, and those of `mix`. Above 0, the result depends on how a step is split into
    micro-batches: the loss is a product of means over a micro-batch, and the step takes the mean of
    its micro-batches, weighted by their tokens. Evaluation leaves it out. It cannot be combined
    with sharded weights or with compiled layers.
    """
    max_skipped: PositiveInt = 5
    """Stop after N consecutive steps with a loss or gradient that was not finite."""
    max_zero_gradient_steps: PositiveInt | None = 20
    """With a reward: end the run after N consecutive steps without a gradient. null: never.

    There is no gradient if the completions of every group have the same reward. The run is saved
    and finished as if this were its last step. With train.router_aux_loss above 0 every step has a
    gradient.
    """
    stop_on_collapse: bool = True
    """End a run in which the policy is its own teacher (hindsight) when it has collapsed.

    It has collapsed if held-out completions are far less likely than the signal asked for, if the
    entropy is half of that at the start, or if sampled completions repeat themselves. The run is
    saved and finished. `run.keep_best` keeps the checkpoint of the best evaluation before.
    """

    @property
    def length_setting(self) -> str:
        """The setting that decides the number of steps."""
        return "train.epochs" if self.max_steps is None else "train.max_steps"

    def issues(self) -> Iterator[Issue]:
        if self.router_aux_loss > 0 and self.compile == "on":
            yield conflict(
                "compile",
                "compiled layers do not return the router logits that train.router_aux_loss needs",
                "remove train.compile, or train.router_aux_loss",
            )
        if self.checkpointing == "selective_op" and self.compile == "on":
            yield conflict(
                "compile",
                "inside a compiled layer the compiler decides which results are stored",
                "remove train.compile, or set train.checkpointing: selective",
            )


class Parallel(Section):
    """Changes memory and speed, never a result."""

    shard: Literal["auto", "off", "full"] = "auto"
    """off: each process holds the whole model. full: weights, gradients and optimizer state are
    sharded (FSDP2). auto: full if one process could not hold all.

    A resumed run keeps the choice.
    """
    tensor: PositiveInt = 1
    """Processes on one host that share the matrix multiplications of each layer (tensor
    parallelism).

    The N consecutive processes of a group process the same rows, each group other rows.
    """
    context: PositiveInt = 1
    """Processes on one host that share the tokens of each micro-batch, for long sequences (context
    parallelism).

    Each of the N consecutive processes of a group stores about 1/N of the activations. Each group
    processes other rows.
    """
    shard_size: Annotated[int, Field(gt=1, le=65536)] | None = None
    """With shard full: processes that share one copy of the model, such as those of a host (HSDP).
    Default: all.

    Each such group of consecutive processes has a replica, and the replicas add up their gradients
    once per step (hybrid sharding). With tensor N, a group has N times as many processes.
    """
    reshard: bool = True
    """With shard full: free a layer's gathered weights between its forward and backward pass."""
    sync: Literal["auto", "step", "micro_batch"] = "auto"
    """With shard full: reduce gradients once per step, or after each micro-batch. auto: step with
    an adapter, else micro_batch.

    step needs memory for a complete gradient.
    """
    offload: bool = False
    """With shard full: keep shards and optimizer state in host memory (CUDA only)."""

    @property
    def shards_weights(self) -> bool:
        """Whether weights are sharded, without the automatic choice."""
        return self.shard == "full" or self.tensor > 1

    @property
    def neighbours(self) -> tuple[int, Literal["tensor", "context"]]:
        """How many consecutive processes have the same rows, and the setting with this number."""
        return (self.context, "context") if self.context > 1 else (self.tensor, "tensor")

    def issues(self) -> Iterator[Issue]:
        if self.context > 1 and self.tensor > 1:
            yield conflict(
                "context",
                "processes can share the tokens of a micro-batch (parallel.context) or the matrix "
                "multiplications of a layer (parallel.tensor), but not both",
                "remove parallel.context, or parallel.tensor",
            )
        if self.context > 1 and self.shard_size is not None:
            yield conflict(
                "shard_size",
                "with parallel.context, one copy of the model is sharded over all processes",
                "remove parallel.shard_size, or parallel.context",
            )
        if self.shard == "off":
            yield no_effect(
                "shard_size",
                "reshard",
                "sync",
                "offload",
                why="with parallel.shard: off every process holds all weights",
                fix="set parallel.shard: full",
            )


class Eval(Section):
    every: Annotated[PositiveFloat, WholeFromOne] = 50.0
    """Steps between evaluations. Below 1: a fraction of an epoch."""
    at_start: bool = True
    """Also evaluate before the first step."""
    max_examples: PositiveInt | None = None
    """Use only the first N examples of data.eval.

    data.test is always evaluated in full.
    """
    train_examples: NonNegativeInt = 200
    """After training, also evaluate N rows of data.train, to find mislabelled ones. Not for online
    methods.

    The report shows those that the model contradicts most.
    """
    other_text: Text = "auto"
    """Texts that measure forgetting: shipped (40 short texts), a file, or off. auto: shipped for
    methods with a teacher, else off.

    Methods with a teacher are hindsight, distill and online_distill. The report shows how much
    worse the trained model predicts the texts than the model before training. A file has rows of
    any format, or plain text (.txt) with blank lines between the texts.
    """


class Samples(Section):
    prompts: NonNegativeInt = 0
    """For the report: generate completions of N evaluation prompts before and after training."""
    max_new_tokens: Annotated[int, Field(gt=0, le=2**20)] = 128
    """Maximum tokens per completion."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the most likely token.

    The report labels sampled completions as such, and does not begin with them.
    """

    def issues(self) -> Iterator[Issue]:
        if self.prompts == 0:
            yield no_effect(
                "max_new_tokens",
                "temperature",
                why="no completions are sampled",
                fix="set run.samples.prompts",
            )


class Best(Section):
    metric: Text = "eval/loss"
    """Evaluation metric in the log."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger values are better."""

    def issues(self) -> Iterator[Issue]:
        if not self.metric.startswith("eval/"):
            yield conflict(
                "metric",
                f"{self.metric} is not an evaluation metric, whose names begin with eval/",
                f"set it to eval/{self.metric}",
            )


class EarlyStop(Best):
    patience: PositiveInt = 3
    """Stop after N consecutive evaluations that were not better than the best."""
    min_delta: NonNegativeFloat = 0.0
    """Smallest improvement that counts."""


TRACKERS = {
    "tensorboard": ("folder",),
    "wandb": ("folder", "mode", "name", "project", "tags"),
    "trackio": ("folder", "name", "project"),
    "mlflow": ("folder", "name", "project", "tags", "uri"),
}
"""The settings that each tracker of Valence reads."""


class SinkSettings(Section):
    kind: Text
    """tensorboard, wandb, trackio, mlflow, or a plugin by its name or import path.

    The first four need the extra with the same name: `pip install "valence-align[wandb]"`.
    """
    project: Text | None = None
    """Project, in mlflow experiment. Default: `valence`.

    tensorboard has none.
    """
    name: Text | None = None
    """Name of the run. Default: that of its folder.

    tensorboard has none.
    """
    folder: Text | None = None
    """Folder of the tracker's files. Default: in the run's folder; for trackio, TRACKIO_DIR if set.

    The folder in the run's folder has the name of the tracker.
    """
    uri: Text | None = None
    """Server or database of mlflow. Default: MLFLOW_TRACKING_URI, or files in the run's folder."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """Whether wandb uploads. auto: WANDB_MODE, else online with a key and offline without."""
    tags: list[Text] = Field(default_factory=list[Text])
    """Tags of the run in wandb and mlflow."""

    def issues(self) -> Iterator[Issue]:
        settings = TRACKERS.get(self.kind)
        if settings is None:
            if not is_plugin("trackers", self.kind):
                names = ", ".join([*TRACKERS, *plugin_paths("trackers")])
                yield conflict(
                    "kind", f"there is no tracker {self.kind!r}", f"set it to one of {names}"
                )
            return
        unread = [name for name in type(self).model_fields if name not in ("kind", *settings)]
        yield no_effect(
            *unread,
            why=f"{self.kind} does not read it",
            fix=f"use a setting that it reads: {', '.join(settings)}",
        )


class RunSection(Section):
    dir: Text = "runs/latest"
    """Folder of the run."""
    sinks: list[SinkSettings] = Field(default_factory=list[SinkSettings])
    """Trackers that also get the log: names, such as `[tensorboard, wandb]`, or sections."""
    log_every: PositiveInt = 1
    """Write metrics every N optimizer steps."""
    save_every: PositiveInt = 50
    """Save a checkpoint every N optimizer steps, and at the end."""
    keep: PositiveInt | None = 3
    """Newest checkpoints to keep; null: all."""
    keep_best: Best | None = None
    """Also keep the checkpoint with the best evaluation (`--step best` reads it)."""
    save_state: bool = True
    """Save all that resuming needs, such as trained weights and optimizer state."""
    save_hf: bool = False
    """Also write a Hugging Face folder (`model`) into each checkpoint, while training waits."""
    async_save: bool = True
    """Write checkpoints in the background, from a copy of the state in host memory.

    Training waits only while the state is copied into host memory. false: training waits for the
    whole save.
    """
    max_failed_saves: PositiveInt = 3
    """Stop after N consecutive failed saves, as on a full disk.

    Until then, training continues.
    """
    max_time: Clock = None
    """Time limit, "HH:MM:SS" or "D:HH:MM:SS", in quotes. Training then saves its state and exits
    with status 124; rerun the command to resume.

    Training finishes its step first. The limit includes loading the model; leave time for one step
    and one save.
    """
    early_stop: EarlyStop | None = None
    """Stop when evaluations no longer improve.

    The evaluation before the first step is not counted.
    """
    samples: Samples = Samples()
    """Answers sampled before and after training."""
    export: Literal["auto", "merged", "adapter"] = "auto"
    """model/ after training with an adapter: merged weights (auto), or the adapter alone.

    With model.quantize the adapter is merged into the unquantized weights of model.name, which are
    loaded in model.dtype into host memory.
    """

    def issues(self) -> Iterator[Issue]:
        kinds = [sink.kind for sink in self.sinks]
        for index, kind in enumerate(kinds):
            if kind in kinds[:index]:
                yield Issue(
                    (f"sinks.{index}",),
                    f"the tracker {kind} is listed twice",
                    "remove one of the two",
                    "setting-duplicate",
                )
        if not self.save_state and not self.save_hf:
            yield conflict(
                "save_state",
                "with run.save_state: false and run.save_hf: false, checkpoints would be empty",
                "set run.save_hf: true, or remove run.save_state",
            )


class Recipe(Section):
    """A whole run."""

    method: Text
    """Name of a method or of a loss."""
    model: Model
    """The model to train, called the policy: a section, or the name of the model, such as `model:
    owner/model`.
    """
    reference: ReferenceSettings = ReferenceSettings()
    """The model that the policy is compared with."""
    teacher: Teacher = Teacher()
    """The teacher of hindsight, distill and online_distill."""
    data: Data = Data()
    """Rows for training and evaluation."""
    loss: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Settings of the loss; see `valence docs NAME`."""
    mix: list[Mix] = Field(default_factory=list[Mix])
    """Other methods that every step also trains with, on other rows."""
    train: Train = Train()
    """The optimizer and its steps."""
    eval: Eval = Eval()
    """Evaluation during training."""
    reward: list[RewardSettings] = Field(default_factory=list[RewardSettings])
    """Rewards of the policy's completions: one section, or a list. The rows of data.train are then
    prompts.
    """
    rollout: Rollout = Rollout()
    """How the policy is sampled."""
    value: Value = Value()
    """The value head of ppo."""
    parallel: Parallel = Parallel()
    """How several processes share a model (`--nproc`, torchrun)."""
    run: RunSection = RunSection()
    """Output of the run."""

    @property
    def trains_adapter(self) -> bool:
        return self.model.lora is not None or self.model.adapter is not None

    @property
    def is_unrewarded(self) -> bool:
        """Whether completions are sampled, and no reward says anything about them."""
        return [spec.reward for spec in self.reward] == ["zero"]

    @property
    def measures_kl(self) -> bool:
        """Whether the KL divergence from the reference is logged although the loss does not read
        the reference. rollout.measure_kl: auto logs it if that needs no second model, or if a
        reference model is set.
        """
        if self.rollout.measure_kl != "auto":
            return self.rollout.measure_kl
        if self.rollout.engine == "openai":  # the server samples another model
            return False
        if self.teacher.model != SELF:  # which takes the place of the reference
            return False
        is_new_adapter = self.model.lora is not None and self.model.adapter is None
        can_disable_adapter = is_new_adapter and self.reference.sync_every is None
        return can_disable_adapter or self.reference.model is not None

    @property
    def reference_model(self) -> tuple[str, str | None]:
        """The setting that names the model besides the policy, and its folder or hub id. None: the
        policy before training, or a model on a server. A teacher that is another model takes the
        place of the reference.
        """
        if self.teacher.model != SELF:
            return "teacher.model", None if self.teacher.is_served else self.teacher.model
        return "reference.model", self.reference.model

    def issues(self) -> Iterator[Issue]:
        names = [reward.log_name for reward in self.reward]
        if len(set(names)) < len(names):
            yield conflict(
                "reward",
                "two rewards have the same name in the log",
                "set a different `name` on each of them",
            )
