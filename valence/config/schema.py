"""Every setting of a recipe, with its type, default and meaning. Imports no torch.

The ``loss`` section is not here: its settings are the keyword-only parameters of the loss that the
method names, and are handed to the loader (see ``load.py``).
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated, Any, Literal

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


def _fraction_or_steps(value: float) -> float:
    if value >= 1 and value != int(value):
        raise ValueError("neither a fraction below 1 nor a whole number of steps")
    return value


CLOCK = re.compile(r"(?:(\d+):)?(\d+):([0-5]\d):([0-5]\d)")


def _clock(value: Any) -> Any:
    if value is not None and (not isinstance(value, str) or seconds_of(value) <= 0):
        raise ValueError(
            "not a time such as 01:30:00 (hours, minutes, seconds) or 0:03:45:00 (days before them)"
        )
    return value


def seconds_of(time: str) -> int:
    """Seconds of HH:MM:SS or D:HH:MM:SS; 0 of anything else."""
    found = CLOCK.fullmatch(time)
    days, hours, minutes, seconds = (
        (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    )
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _dtype(value: Any) -> Any:
    """A type by its usual short name. Raises for float16."""
    if not isinstance(value, str):
        return value
    name = value.lower().removeprefix("torch.")
    if name in ("fp16", "float16", "half", "f16"):
        raise PydanticCustomError(
            "unsupported",
            "is not supported: small gradients become 0 in float16, and there is no loss scaling",
            {
                "fix": "write bfloat16, or float32 where the hardware does not multiply bfloat16 "
                "(auto chooses)"
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


Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float64"], BeforeValidator(_dtype)]
Text = Annotated[str, Field(min_length=1)]
RowCount = Annotated[int, Field(gt=0, le=10**9)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
WholeFromOne = AfterValidator(_fraction_or_steps)
Clock = Annotated[str | None, BeforeValidator(_clock)]


class Section(BaseModel):
    """A mapping in the recipe.

    Unknown names are errors; values are not coerced between types, and are finite.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def _lora_initialization(value: Any) -> Any:
    """Refuse initializations that need data, or that change the model that training starts from."""
    if isinstance(value, str) and (reason := LORA_INITIALIZATIONS_REFUSED.get(value.lower())):
        why, fix = reason
        raise PydanticCustomError(
            "unsupported", "is not supported: {why}", {"why": why, "fix": fix}
        )
    return value


LORA_INITIALIZATIONS_REFUSED = {
    "eva": ("it needs a pass over the data before training", "use gaussian, or pissa"),
    "corda": ("it needs a pass over the data before training", "use pissa"),
    "lora_ga": ("it needs gradients of the data before training", "use pissa"),
    "loftq": (
        "it replaces the model's weights by a quantized approximation, so that training would not "
        "start from the model",
        "set model.quantize: nf4 instead",
    ),
}
"""Values of ``init_lora_weights`` that PEFT has and a recipe cannot use: why, and what to do."""

_NO_DATA = "it configures an initialization that needs a pass over the data before training"
_AS_NF4 = "set model.quantize: nf4 for a quantized base model"
LORA_FIELDS_REFUSED = {
    "fan_in_fan_out": ("PEFT detects it for each layer", "remove it"),
    "megatron_config": ("Valence does not load Megatron models", "remove it"),
    "megatron_core": ("Valence does not load Megatron models", "remove it"),
    "loftq_config": LORA_INITIALIZATIONS_REFUSED["loftq"],
    "eva_config": (_NO_DATA, "remove it, and set init_lora_weights: gaussian or pissa"),
    "corda_config": (_NO_DATA, "remove it, and set init_lora_weights: pissa"),
    "lora_ga_config": (_NO_DATA, "remove it, and set init_lora_weights: pissa"),
    "velora_config": (
        "VeLoRA approximates gradients, and Valence guarantees exact ones",
        "set train.checkpointing: full to save memory",
    ),
    "alora_invocation_tokens": (
        "an activated LoRA changes only the tokens after its invocation, so it can be neither "
        "merged nor packed",
        "remove it",
    ),
    "use_qalora": ("QA-LoRA needs a GPTQ model, which Valence does not train", _AS_NF4),
    "qalora_group_size": ("QA-LoRA needs a GPTQ model, which Valence does not train", _AS_NF4),
    "monteclora_config": (
        "it samples weights in every forward pass, so the loss would depend on the micro-batches",
        "remove it",
    ),
    "layer_replication": (
        "the policy would have other layers than model.name",
        "build the larger model first, and name its folder in model.name",
    ),
    "runtime_config": ("it only moves the initialization of DoRA to another device", "remove it"),
    "use_bdlora": (
        "block-diagonal adapters are for inference engines with tensor parallelism",
        "remove it",
    ),
    "arrow_config": (
        "Arrow routes between finished adapters and trains none",
        "merge the adapters before training, or continue one of them with model.adapter",
    ),
    "kasa_config": (
        "KaSA deletes singular values of the model's weights, so that training would not start "
        "from the model",
        "set init_lora_weights: pissa for an initialization by singular vectors",
    ),
}
"""Fields of PEFT's ``LoraConfig`` that a recipe cannot set: why, and what to do."""


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
            {"why": str(error), "fix": "list the names instead"},
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
    rank: Annotated[int, Field(gt=0, le=65536)] = 16
    """Rank of the update."""
    alpha: PositiveFloat | None = None
    """Scale of the update, which is multiplied by alpha/rank. Default: twice the rank."""
    dropout: BelowOne = 0.0
    """Dropout on the adapter's input.

    Above 0 the result depends on how a step is cut into micro-batches.
    """
    targets: NamesOrPattern = "all-linear"
    """Names of the linear layers that get an adapter, or a regular expression that matches full
    names. all-linear: all linear layers except the head.
    """
    exclude_modules: NamesOrPattern | None = None
    """Names of layers, or a regular expression, that get no adapter although `targets` includes
    them.
    """
    use_rslora: bool = False
    """Multiply the update by alpha/sqrt(rank) instead of alpha/rank (rsLoRA, arXiv 2312.03732)."""
    use_dora: bool = False
    """Also train the norm of each output of a layer (DoRA, arXiv 2402.09353). Slower than LoRA."""
    init_lora_weights: LoraInitialization = True
    """Initial values of the adapter. true: the update starts at zero, as with gaussian, orthogonal
    and mica (arXiv 2604.01694, trains only A). pissa (arXiv 2404.02948), pissa_niter_N (the same by
    a faster approximation) and olora (arXiv 2406.01775) move a part of the model's weights into the
    adapter; the policy still starts from the model. false: random.
    """
    rank_pattern: dict[Text, PositiveInt] = Field(default_factory=dict[str, int])
    """Ranks of single layers, as {name or regular expression: rank}."""
    alpha_pattern: dict[Text, PositiveFloat] = Field(default_factory=dict[str, float])
    """alpha of single layers, as {name or regular expression: alpha}."""
    layers_to_transform: list[NonNegativeInt] | NonNegativeInt | None = None
    """Numbers of the decoder's layers, from 0, that get an adapter. Default: all."""
    layers_pattern: list[Text] | Text | None = None
    """Name of the model's list of layers, if it has an unusual one."""
    target_parameters: list[Text] | None = None
    """Names of parameters that get an adapter although they belong to no linear layer, such as the
    experts of a mixture-of-experts model.
    """
    modules_to_save: list[Text] | None = None
    """Names of modules that train in full next to the adapter, such as `lm_head`."""
    trainable_token_indices: list[NonNegativeInt] | dict[Text, list[NonNegativeInt]] | None = None
    """Tokens whose embeddings train next to the adapter; or {name of an embedding: tokens}."""
    ensure_weight_tying: bool = False
    """Keep the embedding and the head tied where `modules_to_save` trains them."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases of the model also train: none, all, or those of layers with an adapter."""
    lora_bias: bool = False
    """Give the adapter's second matrix a bias. The layers of `targets` need one, too."""

    @field_validator("init_lora_weights", "layers_to_transform", "layers_pattern", "lora_bias")
    @classmethod
    def _check_combination(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what PEFT does not combine with settings that are declared before it."""
        before = info.data
        targets = before.get("targets", "all-linear")
        initial = before.get("init_lora_weights")
        match info.field_name:
            case "init_lora_weights" if value == "orthogonal" and before.get("rank", 0) % 2:
                what, fix = "needs an even rank", "set model.lora.rank to an even number"
            case "layers_to_transform" if (
                value is not None and isinstance(targets, str) and targets != "all-linear"
            ):
                what = "cannot be combined with targets that are a regular expression"
                fix = "list the names of the layers in model.lora.targets"
            case "layers_pattern" if (
                value is not None and before.get("layers_to_transform") is None
            ):
                what = "has no effect without layers_to_transform"
                fix = "set model.lora.layers_to_transform, or remove it"
            case "lora_bias" if value and (before.get("use_dora") or isinstance(initial, str)):
                what = "cannot be combined with use_dora or a named init_lora_weights"
                fix = "remove lora_bias, or use_dora and init_lora_weights"
            case _:
                return value
        raise PydanticCustomError("unsupported", "{what}", {"what": what, "fix": fix})


class Model(Section):
    name: Text
    """A folder or a hub id."""
    dtype: Dtype = "auto"
    """Type of the computation.

    Trained weights are float32 masters (float64 with float64). auto: bfloat16 where the hardware
    multiplies it (CUDA devices of capability 8.0 or more, CPUs with AVX512-BF16), else float32; a
    resumed run keeps its type. The environment variable VALENCE_DTYPE replaces what auto chooses.
    """
    lora: LoraSettings | None = None
    """Train a low-rank adapter instead of all weights."""
    adapter: Text | None = None
    """Folder of an adapter to continue training."""
    quantize: Literal["nf4"] | None = None
    """Keep the weights below an adapter in 4 bits (QLoRA, arXiv 2305.14314): those of linear
    layers, not the embedding, the head or norms; also those of reference.model. Needs the extra
    `eightbit`.
    """
    tokenizer: Text | None = None
    """Folder or hub id of the tokenizer. Default: the model's own."""
    gguf_file: Text | None = None
    """Name of a GGUF file inside the model folder to read the weights from."""
    attributes: list[Text] | None = None
    """For a reward model: names of what it scores.

    Default: those of the training rows, or `reward` for a single number.
    """
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class ReferenceSettings(Section):
    model: Text | None = None
    """A folder or hub id. Default: the policy as it starts."""
    cache: Text = "auto"
    """A folder that keeps the reference's log-probs for this and other runs. auto: one inside the
    run's folder, or none with sync_every; off: none, they are computed whenever they are needed.
    """
    sync_every: PositiveInt | None = None
    """Move the reference to the policy every so many optimizer steps (TR-DPO, arXiv 2404.09656;
    with `loss.humanline` 1 was published). null: it stays where it started. After a move both
    agree: rewards are 0 then, and `logps/*` tell more.
    """
    sync_mix: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """How far it moves, as a share of the way from its weights to the policy's: 1 copies them, less
    is a soft update.
    """


class SourceSettings(Section):
    path: Text
    """A .jsonl, .json, .csv, .tsv or .parquet file (also .gz), or a hub data set id."""
    split: Text | None = None
    """Split of a hub data set."""
    subset: Text | None = None
    """Subset (configuration) of a hub data set that has several."""
    format: Text | None = None
    """Name of the row format, or of the feedback tool that exported the file. Default: the row
    format is detected from the first rows.
    """
    keys: dict[Text, Text] = Field(default_factory=dict[str, str])
    """Names of columns, as {the format's name: the file's name}.

    A dotted name is a place inside a column.
    """
    weight: PositiveFloat = 1.0
    """Multiplies the weight of every row of this file."""
    limit: RowCount | None = None
    """Use only the first so many rows."""


Convert = Literal[
    "pairs_to_judgements",
    "pairs_to_rankings",
    "judgements_to_pairs",
    "scores_to_judgements",
    "scores_to_pairs",
    "scores_to_all_pairs",
    "scores_to_rankings",
    "rankings_to_scored",
    "chosen_to_demonstrations",
    "best_to_demonstrations",
]


class Data(Section):
    train: list[SourceSettings] = Field(default_factory=list[SourceSettings])
    """Files to train on."""
    eval: list[SourceSettings] = Field(default_factory=list[SourceSettings])
    """Files to evaluate on during training."""
    test: list[SourceSettings] = Field(default_factory=list[SourceSettings])
    """Files to evaluate on once, after training."""
    max_length: Annotated[int, Field(ge=8)] = 1024
    """Longest prompt with its completion, in tokens."""
    long_rows: Literal["drop", "cut_completion", "cut_prompt"] = "drop"
    """What happens to longer rows: left out; the end of the answer cut off (no end-of-turn added);
    or the start of the prompt cut off (oldest turns first, never the last user turn).
    """
    limit: RowCount | None = None
    """Use only the first so many rows of each list."""
    train_on: Literal["completion", "assistant"] = "completion"
    """Tokens a demonstration trains on: the last answer, or every assistant turn."""
    as_chat: Literal["auto"] | bool = "auto"
    """Whether a prompt that is plain text becomes one user message of the chat template, and its
    completion the assistant's answer. auto: exactly when the tokenizer has a chat template. false:
    text is trained on as it stands, which is right for base models and for rows that are rendered
    with the template already. Evaluation, sampling and scoring do the same.
    """
    chat_template: Text | None = None
    """The chat template: `chatml`, or the path of a Jinja file. null: the tokenizer's own.

    It is saved with the tokenizer.
    """
    chat_template_kwargs: dict[Text, Any] = Field(default_factory=dict[str, Any])
    """Variables of the chat template for every rendering, such as `{enable_thinking: false}`."""
    convert: Convert | None = None
    """Turn the rows into what the method needs, when they are something else. scores_to_pairs: the
    best against the worst answer of each prompt; scores_to_all_pairs: every two that differ in
    score; scores_to_rankings: all judged answers of a prompt, by score or by label (up 1, down -1);
    pairs_to_rankings: chosen 1, rejected -1; rankings_to_scored: every answer with its score;
    best_to_demonstrations: the best answers of each prompt, as many as `top_n` says.
    """
    threshold: float | None = None
    """For scores_to_judgements: thumbs up at this score or above.

    For scores_to_pairs and scores_to_all_pairs: smallest difference that makes a pair. For
    best_to_demonstrations: completions with a smaller score are never imitated.
    """
    top_n: PositiveInt = 1
    """For best_to_demonstrations: how many completions of each prompt."""
    mask_truncated: bool = True
    """For best_to_demonstrations: leave out completions that were truncated when they were sampled
    (`"stop": "length"` in rows of `valence sample`).
    """
    on_bad_row: Literal["stop", "skip"] = "stop"
    """Stop at the first row that cannot be used, or skip such rows, count them and list them."""
    stratify: bool = False
    """Give every step the same share of thumbs up and down as the whole data set."""


class RewardSettings(Section):
    """What judges the answers of a policy. Several are added up, each times its weight."""

    reward: Text
    """A function (`package.module:function`), the name of a rule (see `valence rewards`), the
    folder or hub id of a reward model, or the address of a server (`http://host:port/get_reward`;
    several with a comma between them take over from each other).
    """
    name: Text | None = None
    """Of its numbers in the log. Default: what `reward` names, made short."""
    weight: float = 1.0
    """Multiplies it in the sum."""
    clip: tuple[float, float] | None = None
    """Smallest and largest number that it may give; what is beyond counts as these."""
    gate: float | None = None
    """An answer that it gives less than this has no other reward than its own: the rest of the sum
    counts 0.
    """
    settings: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keyword arguments of a rule or a function."""
    deterministic: bool = False
    """The same answer always has the same score, which is then kept for the run.

    Rules and reward models are in any case.
    """
    timeout: PositiveFloat = 60.0
    """Seconds that one call may take.

    It does not hold for reward models, which this process runs itself.
    """
    retries: NonNegativeInt = 3
    """How often a call that failed is made again, after a pause that grows and is drawn at random;
    after a time-out only while less than twice `timeout` has passed since the first call.
    """
    concurrency: PositiveInt = 8
    """Calls of a server or of an async function under way at a time.

    Others are called one after the other.
    """
    batch_size: PositiveInt = 64
    """Answers of one call."""
    token_env: Text | None = None
    """Environment variable that holds the bearer token of a server."""


class Rollout(Section):
    """How the policy is sampled, and what is done with its answers."""

    num_rollouts: PositiveInt = 8
    """Answers to each prompt."""
    top_n: PositiveInt = 1
    """Of rejection: how many of them are trained on, the best ones."""
    min_reward: float | None = None
    """For `rejection`: completions with a smaller reward are never imitated. null: those that share
    the lowest reward of their group are not."""
    mask_truncated: bool | None = None
    """Completions that were truncated at max_new_tokens get no gradient: `rejection` does not
    imitate them, and policy gradient methods leave their tokens out of the loss (overlong
    filtering, arXiv 2503.14476). Their rewards still count in the statistics of the group. null:
    the default of the method, which is true for `rejection` and false for the others.
    """
    epochs: PositiveInt | None = None
    """Passes over the completions of a round. null: the default of the method, which is 4 for `ppo`
    and 1 for the others."""
    steps: PositiveInt = 1
    """Optimizer steps of one pass, which divide its prompts among them."""
    max_new_tokens: Annotated[int, Field(gt=0, le=2**20)] = 512
    """Longest completion, in tokens."""
    temperature: PositiveFloat = 1.0
    """Divides the logits.

    Methods that compare with the policy that answered train with the same temperature.
    """
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Draw only from the smallest set of most likely tokens whose probability reaches this. Must be
    1 for methods whose loss has a ratio of probabilities (grpo, ppo, rloo and the like)."""
    at_once: PositiveInt = 64
    """Answers that are sampled at once, with engine hf."""
    overlong_buffer: NonNegativeInt = 0
    """Inside the last so many tokens before max_new_tokens the reward falls linearly, by up to 1
    (arXiv 2503.14476).
    """
    on_failure: Literal["drop", "drop_group", "stop"] = "drop"
    """When a reward fails: leave the answer out, leave out all answers to its prompt, or stop the
    run.
    """
    max_failed: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Stop when more than this share of a round's answers has no score."""
    max_resample: PositiveInt = 10
    """How often prompts are replaced by others in a round whose completions have nothing to
    teach.
    """
    measure_kl: bool | Literal["auto"] = "auto"
    """Log the divergence from the reference (`kl`). auto: where the reference needs no second model
    in memory (a new adapter is switched off for it), where the loss reads it anyway, or where
    reference.model names one. true loads a copy of the model otherwise."""
    engine: Literal["hf", "vllm", "openai"] = "hf"
    """What samples: this process; a vLLM server, whose weights are kept up to date; or any server
    with the completions wire of OpenAI, which has weights of its own.
    """
    url: Text | None = None
    """Address of the server."""
    start: bool = False
    """Start a vLLM server for the run, and stop it in the end."""
    python: Text | None = None
    """With start: the Python of an environment that has vLLM.

    Default: VALENCE_VLLM_PYTHON, or that of this program.
    """
    transport: Literal["auto", "disk", "gloo", "nccl", "lora"] = "auto"
    """How weights get to a vLLM server: a folder that both see, a broadcast between hosts' memories
    or between CUDA devices, or an adapter's folder. auto: lora under an adapter, else nccl between
    CUDA devices, else disk.
    """
    folder: Text | None = None
    """Where weights for a server are put, by transports that need a folder.

    Default: in the run's folder.
    """
    timeout: PositiveFloat = 600.0
    """Seconds that a server may take for one request."""
    ahead: bool = False
    """Sample the next round while this one is trained on, with weights that are one round old.

    For servers.
    """
    check_prompts: NonNegativeInt = 4
    """Prompts whose log-probabilities are compared with a server's after each new version of the
    weights.
    """
    max_mismatch: PositiveFloat | None = None
    """Stop when they differ by more on average (nats per token). null: 0.005 where both sides
    compute in float32, else 0.1.
    """

    @property
    def num_epochs(self) -> int:
        """Passes over a round. A loaded recipe has the default of its method filled in."""
        return self.epochs or 1

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps of a whole round."""
        return self.num_epochs * self.steps


class Value(Section):
    """The value head of ppo."""

    trunk: Literal["separate", "shared"] = "separate"
    """A model of its own for values (under an adapter: another adapter), or a head on the
    policy.
    """
    learning_rate: PositiveFloat | None = None
    """Of the value model or head. Default: train.learning_rate."""


class Mix(Section):
    """Another method's loss on rows of its own, added to that of every step."""

    method: Text
    """Name of a method."""
    train: list[SourceSettings]
    """Files to train on."""
    weight: PositiveFloat = 1.0
    """Multiplies its loss, which is averaged over its own rows."""
    batch_size: PositiveInt | None = None
    """Its examples per optimizer step. Default: train.batch_size."""
    convert: Convert | None = None
    """As data.convert."""
    threshold: float | None = None
    """As data.threshold."""
    loss: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Settings of its loss."""


class Train(Section):
    batch_size: PositiveInt = 16
    """Examples (judgements, pairs, demonstrations) per optimizer step, over all processes; with a
    reward, prompts per round.
    """
    micro_batch_tokens: PositiveInt | Literal["auto"] = "auto"
    """Tokens that run through the model at once.

    Changes only memory and speed, not the result (except with adapter dropout or
    train.router_aux_loss). auto: as many as fit the device's free memory and make a step faster; a
    run that is taken up keeps the number.
    """
    epochs: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Passes over the training data."""
    max_steps: PositiveInt | None = None
    """Stop after so many optimizer steps."""
    optimizer: Annotated[Text, AfterValidator(_optimizer_name)] = "adamw"
    """adamw; adamw_8bit, which keeps its moments in 8 bits (a quarter of their memory, slow on a
    CPU, needs the extra `eightbit`); or the import path of an optimizer class, such as
    `torch.optim.Muon`, `schedulefree.AdamWScheduleFree` or `my_module.MyOptimizer`.
    """
    optimizer_settings: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of the optimizer class besides learning_rate, weight_decay and betas."""
    learning_rate: PositiveFloat | Literal["auto"] = "auto"
    """Peak learning rate. auto: the method's default for all weights or for an adapter (the end of
    docs/settings.md has a table); a resumed run keeps its rate.
    """
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls to 0 after the warm-up (constant: it does not)."""
    warmup: Annotated[NonNegativeFloat, WholeFromOne] = 0.03
    """Optimizer steps over which the learning rate rises from 0: below 1 a fraction of all steps,
    else a number.
    """
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices; biases and norms have none."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay rates of the first and second moment of AdamW, and of any other optimizer with betas.
    """
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the gradient over all weights; null: no clipping."""
    drop_last: bool = False
    """Leave out the last step of an epoch when it has fewer than batch_size examples."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes the order of the examples and every random draw."""
    checkpointing: Literal["off", "selective", "full", "offloaded"] = "off"
    """Compute layers again in the backward pass instead of keeping their activations, for less
    memory and more time, without changing the result: every second layer, every layer, or every
    layer with its input moved to the host's memory.
    """
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the model's layers: faster steps after a slow start. auto: in runs that are long
    enough for it to pay, where there is a compiler (on a CPU `g++`).
    """
    router_aux_loss: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of a mixture-of-experts model (Switch Transformers, arXiv
    2101.03961), which is added to the loss of every step; 0: it is not computed. Switch
    Transformers uses 0.01, most configurations of transformers 0.001. It covers all tokens of the
    sequences that train, prompts included, and those of `mix`. Above 0 the result depends on how a
    step is cut into micro-batches: the loss is a product of means over a micro-batch, and the step
    takes the mean of its micro-batches, weighted by their tokens. Evaluation leaves it out. It
    cannot be combined with weights that are split over processes or with compiled layers.
    """
    max_skipped: PositiveInt = 5
    """Stop after so many steps in a row whose loss or gradient was not finite."""
    max_zero_gradient_steps: PositiveInt | None = 20
    """With a reward: end the run after so many steps in a row without a gradient, as when the
    completions of every group have the same reward. The run is saved and finished as after its last
    step. null: go on. With train.router_aux_loss above 0 every step has a gradient."""


class Parallel(Section):
    """Nothing here changes a result, only memory and speed."""

    shard: Literal["auto", "off", "full"] = "auto"
    """What several processes hold of a model: all of it each (off), or weights, gradients and
    moments split over them (full: FSDP2). auto: full where one could not hold it all; a run that is
    taken up keeps the choice.
    """
    tensor: PositiveInt = 1
    """Processes that share the products of each layer (tensor parallel), neighbours on one host.

    The others have other rows.
    """
    reshard: bool = True
    """With shard full: give a layer's weights back after its forward pass, and gather them again
    for the backward pass.
    """
    sync: Literal["auto", "step", "micro_batch"] = "auto"
    """With shard full: when gradients are summed over the processes: once a step, which needs room
    for a whole gradient, or after each micro-batch. auto: once a step under an adapter, else after
    each micro-batch.
    """
    offload: bool = False
    """With shard full: keep shards and moments in the host's memory (CUDA only)."""


class Eval(Section):
    every: Annotated[PositiveFloat, WholeFromOne] = 50.0
    """Evaluate every so many optimizer steps; below 1, every such fraction of an epoch."""
    at_start: bool = True
    """Also evaluate before the first step."""
    max_examples: PositiveInt | None = None
    """Evaluate on only the first so many examples of data.eval. data.test is always measured
    whole.
    """
    train_examples: NonNegativeInt = 200
    """After training, also measure so many rows of data.train for the report: those that the model
    contradicts most may be mislabelled. Not where the model learns from its own answers.
    """


class Samples(Section):
    prompts: NonNegativeInt = 0
    """Answer so many evaluation prompts before and after training, for the report."""
    max_new_tokens: Annotated[int, Field(gt=0, le=2**20)] = 128
    """Longest answer, in tokens."""
    temperature: NonNegativeFloat = 0.7
    """Sampling temperature; 0 takes the most likely token."""


class Best(Section):
    metric: Text = "eval/loss"
    """A number of an evaluation, by its name in the log."""
    mode: Literal["min", "max"] = "min"
    """Whether less of it is better, or more."""


class EarlyStop(Best):
    patience: PositiveInt = 3
    """Stop after so many evaluations in a row that were no better than the best one."""
    min_delta: NonNegativeFloat = 0.0
    """By how much it has to be better to count."""


class SinkSettings(Section):
    kind: Literal["tensorboard", "wandb", "trackio", "mlflow"]
    """The tracker. Each needs the extra of its name: `pip install "valence-align[wandb]"`."""
    project: Text | None = None
    """Project (of mlflow the experiment) that the run is put into.

    Default: `valence`. tensorboard has none.
    """
    name: Text | None = None
    """Name of the run there. Default: that of the run's folder. tensorboard has none."""
    folder: Text | None = None
    """Where its files go.

    Default: a folder with the tracker's name in the run's own folder; trackio takes TRACKIO_DIR
    first.
    """
    uri: Text | None = None
    """Of mlflow: its server or database.

    Default: MLFLOW_TRACKING_URI, or files in the run's own folder.
    """
    mode: Literal["auto", "online", "offline"] = "auto"
    """Of wandb: whether it sends. auto: as WANDB_MODE says, else online where there is a key and
    offline where there is none.
    """
    tags: list[Text] = Field(default_factory=list[Text])
    """Words to find the run by, of wandb and mlflow."""


class RunSection(Section):
    dir: Text = "runs/latest"
    """Folder of the run."""
    sinks: list[SinkSettings] = Field(default_factory=list[SinkSettings])
    """Trackers that also get the log: their names, such as `[tensorboard, wandb]`, or sections with
    settings.
    """
    log_every: PositiveInt = 1
    """Write a line of metrics every so many optimizer steps."""
    save_every: PositiveInt = 50
    """Save a checkpoint every so many optimizer steps, and at the end."""
    keep: PositiveInt | None = 3
    """How many of the newest checkpoints stay; null: all."""
    keep_best: Best | None = None
    """Also save and keep the checkpoint of the step whose evaluation was the best (`--step best`
    reads it).
    """
    save_state: bool = True
    """Save what a run is continued from: trained weights, optimizer and all else that has state."""
    save_hf: bool = False
    """Also write the model as a Hugging Face folder (`model`) into each checkpoint.

    Training waits for it.
    """
    max_failed_saves: PositiveInt = 3
    """Stop after so many saves in a row that failed, as on a full disk; until then training goes
    on.
    """
    max_time: Clock = None
    """Longest time of one start of the program, as "HH:MM:SS" or "D:HH:MM:SS": then the step is
    finished, the state saved, and the exit status is 124. Started again, it goes on. Leave room for
    a step and a save.
    """
    early_stop: EarlyStop | None = None
    """End the run when its evaluations, from that after the first steps on, no longer get
    better.
    """
    samples: Samples = Samples()
    """Answers sampled before and after training."""
    export: Literal["auto", "merged", "adapter"] = "auto"
    """What model/ holds after training with an adapter: merged weights, or the adapter alone. auto:
    merged. With model.quantize it is merged into the weights as they are in model.name, which are
    loaded in model.dtype into the host's memory for it.
    """


class Recipe(Section):
    """A whole run."""

    method: Text
    """Name of a method or of a loss."""
    model: Model
    """The model to train, called the policy: a section, or its name alone, such as `model:
    owner/model`.
    """
    reference: ReferenceSettings = ReferenceSettings()
    """What the policy is compared with."""
    data: Data = Data()
    """Rows to learn from and to measure on."""
    loss: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Settings of the loss; see `valence losses NAME`."""
    mix: list[Mix] = Field(default_factory=list[Mix])
    """Other methods that every step also trains with, each on rows of its own."""
    train: Train = Train()
    """The optimizer and its steps."""
    eval: Eval = Eval()
    """Evaluation during training."""
    reward: list[RewardSettings] = Field(default_factory=list[RewardSettings])
    """What judges the policy's own answers to the prompts of the data, where it is to learn from
    them: one, or a list.
    """
    rollout: Rollout = Rollout()
    """How the policy answers."""
    value: Value = Value()
    """The value head of ppo."""
    parallel: Parallel = Parallel()
    """How several processes share a model (`--nproc`, torchrun)."""
    run: RunSection = RunSection()
    """Output."""

    @property
    def measures_kl(self) -> bool:
        """Whether the divergence from the reference is logged where the loss does not read it. With
        rollout.measure_kl: auto, where that costs no second model, or where one is named."""
        if self.rollout.measure_kl != "auto":
            return self.rollout.measure_kl
        if self.rollout.engine == "openai":  # another model samples, so there is nothing to measure
            return False
        is_new_adapter = self.model.lora is not None and self.model.adapter is None
        is_switched_off = is_new_adapter and self.reference.sync_every is None
        return is_switched_off or self.reference.model is not None
