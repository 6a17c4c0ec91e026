"""Rules about a recipe that one section alone cannot check, in the order of the recipe.

They need several sections, the method, or files. Rules within a section are in its ``issues``
method (``schema.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from valence.config.describe import as_yaml
from valence.config.needs import caches_reference, has_fixed_teacher, has_teacher, other_text
from valence.config.schema import SELF, Issue, ListName, Recipe, conflict, no_effect
from valence.data.convert import CONVERSIONS
from valence.data.sources import is_hub_dataset
from valence.methods import WITHOUT_REWARD, Method
from valence.types import plural

LISTS: tuple[ListName, ...] = ("train", "eval", "test")
"""Lists of files in the section ``data``."""


SERVED_LORA_DEFAULTS: dict[str, Any] = {
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_parameters": None,
    "modules_to_save": None,
    "trainable_token_indices": None,
    "bias": "none",
    "lora_bias": False,
}
"""Settings of ``model.lora`` that vLLM refuses or ignores, with their defaults."""


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe and its context.

    ``rows``: which of train, eval and test have rows, in files or in memory; ``mixed``: the methods
    of `mix`.
    """

    recipe: Recipe
    method: Method
    rows: Set[str]
    mixed: Sequence[Method] = ()

    @property
    def methods(self) -> tuple[Method, ...]:
        return (self.method, *self.mixed)

    @property
    def losses(self) -> Iterator[tuple[str, Method, Mapping[str, Any]]]:
        """Name, method and settings of the recipe's loss and of those of `mix`."""
        yield "loss", self.method, self.recipe.loss
        for i, (method, part) in enumerate(zip(self.mixed, self.recipe.mix, strict=True)):
            yield f"mix.{i}.loss", method, part.loss

    @property
    def has_teacher(self) -> bool:
        return has_teacher(self.methods)

    @property
    def has_fixed_teacher(self) -> bool:
        return has_fixed_teacher(self.recipe, self.methods)

    @property
    def reads_no_reference(self) -> bool:
        """Whether an online run needs no reference, neither for the loss nor for the log."""
        is_online = self.method.online
        if not is_online or self.has_fixed_teacher or any(m.needs_reference for m in self.mixed):
            return False
        return not (self.recipe.measures_kl or self.method.loss_reads_reference(self.recipe.loss))


def issues(case: Case) -> Iterator[Issue]:
    """Everything that several sections, the method or files show to be wrong."""
    sections = (
        _model,
        _reference,
        _teacher,
        _data,
        _losses,
        _train,
        _eval,
        _rollout,
        _tools,
        _server,
        _run,
    )
    for check in sections:
        yield from check(case)


def _model(c: Case) -> Iterator[Issue]:
    model, parallel = c.recipe.model, c.recipe.parallel
    if not c.method.is_reward_model:
        yield no_effect(
            "model.attributes",
            why=f"{c.method.name} trains no reward model",
            fix="set method: pointwise",
        )
    if model.quantize and (parallel.tensor > 1 or parallel.offload):
        yield conflict(
            "model.quantize",
            "4-bit weights do not support parallel.tensor and parallel.offload",
            "remove parallel.tensor and parallel.offload, or model.quantize",
        )
    lora = model.lora
    if lora is None:
        return
    starts_without_weights = lora.init_lora_weights in (True, False, "gaussian", "orthogonal")
    if model.quantize and not starts_without_weights:
        yield conflict(
            "model.lora.init_lora_weights",
            "PEFT computes it from the model's weights, which model.quantize rounds to 4 bits",
            "set it to true or gaussian, or remove model.quantize",
        )
    if c.recipe.rollout.engine == "vllm":
        for name, default in SERVED_LORA_DEFAULTS.items():
            if getattr(lora, name) != default:
                yield conflict(
                    f"model.lora.{name}",
                    "a vLLM server cannot load an adapter with this setting",
                    "remove it, or set rollout.engine: hf",
                )


def _reference(c: Case) -> Iterator[Issue]:
    if not (c.has_fixed_teacher or any(method.needs_reference for method in c.methods)):
        yield no_effect(
            "reference",
            why=f"{c.method.name} does not use a reference",
            fix="use a method with a reference, such as dpo or kto",
        )
    elif c.reads_no_reference:
        yield no_effect(
            "reference",
            why="the loss does not read the reference, and rollout.measure_kl does not load a "
            "second model",
            fix="set rollout.measure_kl: true",
        )
    elif not c.method.online and not caches_reference(c.recipe):
        yield no_effect(
            "reference.cache",
            why="no loss reads log-probabilities of stored completions",
            fix="set loss.target: token",
        )
    if c.method.online:
        yield no_effect(
            "reference.cache",
            why="every round has new completions, so no log-probability is reused",
        )


def _other_teacher(c: Case) -> Iterator[Issue]:
    """Of a teacher that is another model."""
    yield no_effect(
        "reference.model",
        "reference.sync_every",
        "reference.sync_mix",
        why="the teacher takes the place of the reference",
    )
    yield no_effect("train.stop_on_collapse", why="the teacher is not the policy itself")
    if c.recipe.rollout.measure_kl is True:
        yield conflict(
            "rollout.measure_kl",
            "a run has one model besides the policy, and the teacher is that model",
            "remove it",
        )
    for method in c.methods:
        if method.needs_reference and not method.loss.needs_teacher:
            yield conflict(
                "teacher.model",
                f"{method.name} compares the model with itself before training, and a run has "
                "only one model besides the policy",
                "use a method without a reference, such as sft, or teacher.model: self",
            )
    if c.recipe.teacher.is_served and c.method.online and c.recipe.rollout.temperature != 1:
        yield conflict(
            "rollout.temperature",
            "a teacher on a server computes its probabilities at temperature 1",
            "set it to 1",
        )


def _teacher(c: Case) -> Iterator[Issue]:
    if not c.has_teacher:
        yield no_effect(
            "teacher",
            why=f"{c.method.name} has no teacher",
            fix="set method: hindsight, distill or online_distill",
        )
        yield no_effect(
            "train.stop_on_collapse",
            why=f"{c.method.name} has no teacher",
            fix="set method: hindsight",
        )
        return
    if c.recipe.teacher.model != SELF:
        yield from _other_teacher(c)
    taught = [method for method in c.methods if method.loss.needs_teacher]
    uses_context = any(method.loss.data == "feedback" for method in taught)
    if c.recipe.teacher.model == SELF and not uses_context:
        yield conflict(
            "teacher.model",
            f"{taught[0].name} needs another model as its teacher",
            "set it to the folder or hub id of a larger model with the same tokenizer",
        )
    if not uses_context:
        for name in ("context", "template"):
            yield no_effect(
                f"teacher.{name}",
                why=f"the teacher of {taught[0].name} reads only the prompt",
                fix="set method: hindsight",
            )
        return
    compares = c.recipe.teacher.context != "feedback"
    is_online = c.method.online and c.method.loss.data == "feedback"
    if c.recipe.teacher.context == "either" and not is_online:
        yield conflict(
            "teacher.context",
            "the teacher of stored rows reads their column `feedback`, which is either feedback or "
            "a demonstration",
            "set it to one of these, or train with a reward",
        )
    if is_online and compares and c.recipe.rollout.num_rollouts < 2:
        yield conflict(
            "rollout.num_rollouts",
            f"with teacher.context: {c.recipe.teacher.context}, the teacher reads another "
            "completion of the same prompt, and there is only one",
            "set it to 2 or more, or set teacher.context: feedback",
        )
    if c.recipe.teacher.has_average and c.recipe.parallel.shards_weights:
        yield conflict(
            "teacher.weights",
            "a moving average of weights that are split over processes is not supported",
            "set teacher.weights: initial, or parallel.shard: off and parallel.tensor: 1",
        )


def _data(c: Case) -> Iterator[Issue]:
    data, kind = c.recipe.data, c.method.kind
    if data.convert is not None and not CONVERSIONS[data.convert].serves(kind):
        yield conflict(
            "data.convert",
            f"{data.convert} does not give {plural(kind)}, which {c.method.name} reads",
            "remove data.convert, or set it to one of "
            + ", ".join(name for name, value in CONVERSIONS.items() if value.serves(kind)),
        )
    conversions = [CONVERSIONS[name] for name in (data.convert, *_mixed_conversions(c)) if name]
    for name in ("top_n", "mask_truncated"):
        if not any(name in conversion.settings for conversion in conversions):
            readers = [key for key, value in CONVERSIONS.items() if name in value.settings]
            yield no_effect(
                f"data.{name}",
                why=f"only data.convert: {' and '.join(readers)} reads it",
                fix=f"set data.convert: {readers[0]}",
            )
    if all(method.kind != "demonstration" for method in c.methods):
        yield no_effect(
            "data.train_on",
            why=f"{c.method.name} reads {plural(kind)}, and it applies only to demonstrations",
            fix="set method: sft",
        )
    if kind not in ("judgement", "scored"):
        yield no_effect(
            "data.stratify",
            why=f"{c.method.name} reads {plural(kind)}, and only rated answers have thumbs",
            fix="use a method for rated answers, such as kto",
        )
    for name in LISTS:
        for i, source in enumerate(data.files(name)):
            if not is_hub_dataset(source.path):
                yield no_effect(
                    f"data.{name}.{i}.split",
                    f"data.{name}.{i}.subset",
                    why="files have no splits and subsets, only data sets of the hub",
                    fix="set path to a data set of the hub",
                )


def _mixed_conversions(c: Case) -> list[str | None]:
    return [part.convert for part in c.recipe.mix]


def _losses(c: Case) -> Iterator[Issue]:
    loss = c.recipe.loss
    parallel = c.recipe.parallel
    for section, method, settings in c.losses:
        divergence = method.loss.divergence(settings)
        if c.recipe.teacher.is_served and divergence is not None and divergence[1] is None:
            yield conflict(
                f"{section}.top_k",
                "a teacher on a server returns only its most likely tokens",
                "set it to 20, or set target: token",
            )
        if parallel.tensor > 1 and divergence is not None:
            yield conflict(
                f"{section}.target",
                "processes that share matrices cannot compare distributions over the vocabulary",
                f"set {section}.target: token, or parallel.tensor: 1",
            )
        for name, other in method.without_effect(settings).items():
            if settings[name] != method.settings.model_fields[name].get_default():
                key = other.partition(":")[0]
                yield no_effect(
                    f"{section}.{name}",
                    why=f"with {section}.{key}: {as_yaml(settings[key])}, the loss does not read "
                    "it",
                    fix=f"set {section}.{other}",
                )
        for name, other in method.contradictions(settings).items():
            yield conflict(
                f"{section}.{name}",
                f"it weights the tokens of a sum over the answer, but with {section}.{other}, "
                f"{method.name} uses the mean over the tokens",
                f"remove one of {section}.{name} and {section}.{other}",
            )
    if c.method.online is not bool(loss.get("value", c.method.online)):
        yield conflict(
            "loss.value",
            "a value head is trained in online training, and ppo always has one there",
            "remove it",
        )
    if c.method.online and loss.get("class_weights") == "auto":
        yield conflict(
            "loss.class_weights",
            "the share of good completions is unknown before they are scored, and differs from "
            "round to round",
            "set loss.desirable_weight and loss.undesirable_weight",
        )
    if loss.get("kl_target") is not None and loss.get("kl_beta") == 0:
        yield conflict(
            "loss.kl_target",
            "it adjusts loss.kl_beta by factors, and loss.kl_beta is 0",
            "set loss.kl_beta to a small start value such as 0.01, or remove loss.kl_target",
        )
    if c.mixed and any(method.is_reward_model for method in c.methods):
        yield conflict(
            "mix",
            "a reward model cannot be trained by several methods",
            "remove mix, or use only methods that train a policy",
        )


def _train(c: Case) -> Iterator[Issue]:
    train, model = c.recipe.train, c.recipe.model
    if c.method.online:
        yield no_effect(
            "train.drop_last",
            why="in online training no step is incomplete: after the last prompt follows the first",
        )
    else:
        yield no_effect(
            "train.max_zero_gradient_steps",
            why=f"it applies to online training, and {c.method.name} trains on stored completions",
            fix=_to_sample(c.method),
        )
    if c.recipe.parallel.shards_weights:
        fix = "set parallel.shard: off and parallel.tensor: 1"
        if train.optimizer == "adamw_8bit":
            yield conflict(
                "train.optimizer",
                "8-bit optimizer state cannot be sharded",
                f"set train.optimizer: adamw; or {fix}",
            )
        if train.compile == "on" and c.recipe.parallel.tensor > 1:
            yield conflict(
                "train.compile",
                "layers whose products are split over processes are not compiled",
                "remove it; or set parallel.tensor: 1",
            )
        if train.router_aux_loss > 0:
            yield conflict(
                "train.router_aux_loss",
                "the load-balancing loss does not support sharded weights",
                f"remove it; or {fix}",
            )
    if c.recipe.parallel.context > 1:
        fix = "remove it, or remove parallel.context"
        if train.compile == "on":
            yield conflict(
                "train.compile",
                "compiled layers do not support processes that share the tokens of a row "
                "(parallel.context)",
                fix,
            )
        if train.router_aux_loss > 0:
            yield conflict(
                "train.router_aux_loss",
                "the load-balancing loss does not support processes that share the tokens of a row "
                "(parallel.context)",
                fix,
            )
        if model.lora is not None and model.lora.dropout > 0:
            yield conflict(
                "model.lora.dropout",
                "processes that share the tokens of a row (parallel.context) would draw the same "
                "dropout for different tokens",
                fix,
            )
        if c.method.online and c.recipe.loss.get("value"):
            yield conflict(
                "parallel.context",
                "the value head does not support rows whose tokens are shared by processes",
                "remove it, or use a method without a value head, such as rloo",
            )
    if train.compile == "on" and model.quantize is not None:
        yield conflict(
            "train.compile",
            "layers with 4-bit weights (model.quantize) cannot be compiled",
            "remove train.compile, or model.quantize",
        )


def _eval(c: Case) -> Iterator[Issue]:
    if "eval" not in c.rows:
        yield no_effect(
            "eval.every",
            "eval.at_start",
            "eval.max_examples",
            "run.keep_best",
            "run.early_stop",
            why="there is no evaluation during training, because data.eval is empty",
            fix="set data.eval to files or to a share such as 0.1",
        )
    if c.method.online:
        yield no_effect("eval.train_examples", why="the training rows are prompts")
    if c.method.is_reward_model and other_text(c.recipe) is not None:
        yield conflict(
            "eval.other_text",
            f"a reward model ({c.method.name}) does not predict text",
            "remove it",
        )


def _to_sample(method: Method) -> str:
    """How to train on sampled completions instead of stored ones."""
    name = f"online_{method.name}"
    return f"set method: {name}" if name in WITHOUT_REWARD else "set reward"


def _rollout(c: Case) -> Iterator[Issue]:
    rollout, method = c.recipe.rollout, c.method
    if not (method.online and method.name == "ppo"):
        yield no_effect(
            "value",
            why="without reward, ppo has no value head"
            if method.name == "ppo"
            else f"{method.name} has no value head",
            fix="set reward" if method.name == "ppo" else "set method: ppo, and reward",
        )
    if not method.online:
        yield no_effect(
            "rollout",
            why=f"{method.name} trains on stored completions, so the policy is not sampled",
            fix=_to_sample(method),
        )
        return
    if not method.selects_best:
        yield no_effect(
            "rollout.top_n",
            "rollout.min_reward",
            why="only the method rejection reads it",
            fix="set method: rejection",
        )
        if not method.is_on_policy:
            yield no_effect(
                "rollout.mask_truncated",
                why="only rejection and policy gradient methods read it",
                fix="use such a method, for example grpo",
            )
    elif rollout.top_n > rollout.num_rollouts:
        yield conflict(
            "rollout.top_n",
            f"it is above the number of completions per prompt, rollout.num_rollouts: "
            f"{rollout.num_rollouts}",
            "lower it, or raise rollout.num_rollouts",
        )
    if method.min_rollouts == 1:
        yield no_effect(
            "rollout.replace_tied",
            why=f"{method.name} also learns from prompts whose completions have equal rewards",
            fix="use a method that compares them, for example grpo",
        )
    is_comparing = (
        not method.selects_best or rollout.min_reward is None or bool(rollout.replace_tied)
    )
    if is_comparing and rollout.num_rollouts < method.min_rollouts:
        yield conflict(
            "rollout.num_rollouts",
            f"{method.name} compares completions of the same prompt, and there is only one",
            "set it to 2 or more",
        )
    if method.is_on_policy and rollout.top_p < 1:
        yield conflict(
            "rollout.top_p",
            f"the loss of {method.name} has a ratio of probabilities over the whole vocabulary, "
            "but rollout.top_p below 1 samples from a part of it",
            "set rollout.top_p: 1, or use the method rejection, online_dpo or online_kto",
        )


SPLIT_WEIGHTS = (
    "with weights that are split over processes, hf samples in all of them together, and each "
    "would call the tools",
    "set it to vllm, or let each process hold the whole model (parallel.shard: off)",
)
"""Why tools need a server, and the fix."""


def _tools(c: Case) -> Iterator[Issue]:
    """The tools of an online run."""
    rollout = c.recipe.rollout
    if not c.method.online:
        return
    if not rollout.has_tools:
        yield no_effect(
            "rollout.max_turns",
            "rollout.tool_timeout",
            "rollout.tool_output",
            why="there are no tools",
            fix="set rollout.tools or rollout.environment",
        )
        return
    if rollout.engine not in ("hf", "vllm"):
        yield conflict(
            "rollout.engine",
            f"{rollout.engine} samples one turn, and tools need several",
            "set it to hf or vllm, or remove rollout.tools and rollout.environment",
        )
    parallel = c.recipe.parallel
    if rollout.engine == "hf" and (parallel.shard == "full" or parallel.tensor > 1):
        yield conflict("rollout.engine", *SPLIT_WEIGHTS)


def _server(c: Case) -> Iterator[Issue]:
    """The sampling server of an online run."""
    rollout, trains_adapter = c.recipe.rollout, c.recipe.trains_adapter
    if rollout.start and c.recipe.model.gguf_file is not None:
        yield conflict(
            "rollout.start",
            "Valence cannot start a server with a GGUF file (model.gguf_file), only with a folder "
            "of safetensors",
            "start a server with the same weights yourself, set rollout.url to its address, and "
            "remove rollout.start",
        )
    if rollout.transport == "lora" and not trains_adapter:
        yield conflict(
            "rollout.transport",
            "there is no adapter to send",
            "set rollout.transport: auto, or set model.lora",
        )
    if not c.method.online:
        return
    if rollout.transport not in ("auto", "lora") and trains_adapter:
        yield conflict(
            "rollout.transport",
            "with an adapter, only the adapter is sent to a server, by the transport lora",
            "set it to auto or lora",
        )
    if rollout.uses_server and not rollout.url and not rollout.start:
        yield conflict(
            "rollout.url",
            f"rollout.engine: {rollout.engine} needs the address of a server",
            "set it to the address, such as http://localhost:8000"
            + (", or set rollout.start: true" if rollout.engine == "vllm" else ""),
        )
    if rollout.engine == "openai" and c.method.is_on_policy:
        yield conflict(
            "rollout.engine",
            f"the loss of {c.method.name} has a ratio of probabilities to the policy that sampled, "
            "but a server with rollout.engine: openai samples from another model",
            "set it to vllm or hf, or use the method rejection or online_dpo",
        )


def _run(c: Case) -> Iterator[Issue]:
    run = c.recipe.run
    if not c.recipe.trains_adapter:
        yield no_effect("run.export", why="there is no adapter to export", fix="set model.lora")
    elif c.method.is_reward_model and run.export == "adapter":
        yield conflict(
            "run.export",
            "an adapter does not store which attributes a reward model scores",
            "set run.export: merged",
        )
    if not c.rows & {"eval", "test"}:
        yield no_effect(
            "run.samples.prompts",
            why="its prompts come from data.eval or data.test, and both are empty",
            fix="set data.eval",
        )
    if c.method.is_reward_model and run.samples.prompts > 0:
        yield conflict(
            "run.samples.prompts",
            f"a reward model ({c.method.name}) cannot generate text",
            "remove run.samples",
        )
    for name in ("keep_best", "early_stop"):
        best = getattr(run, name)
        if c.method.online and best is not None and best.metric == "eval/loss":
            yield conflict(
                f"run.{name}",
                "its metric is eval/loss, but online training has no loss on held-out prompts",
                f"set run.{name}: {{metric: eval/reward/mean, mode: max}}",
            )
