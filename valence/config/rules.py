"""Rules about several settings: those without effect in a run, and those that contradict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from valence.config.learning_rates import LearningRates
from valence.config.schema import Recipe
from valence.data.convert import CONVERSIONS
from valence.types import Kind, plural


class MethodFacts(Protocol):
    """What a recipe is checked against: a method, the rows it reads, and its loss's settings.

    ``settings`` is a pydantic model (the class) that forbids unknown names; it is declared as Any
    so that a cached property may provide it.
    """

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def needs_reference(self) -> bool: ...
    @property
    def is_reward_model(self) -> bool:
        """Whether it trains a reward model."""
        ...

    @property
    def online(self) -> bool:
        """Whether it learns from the policy's own answers."""
        ...

    @property
    def is_on_policy(self) -> bool:
        """Whether it compares with the policy that answered, token by token."""
        ...

    @property
    def least_rollouts(self) -> int:
        """Answers to a prompt below which there is nothing to learn."""
        ...

    @property
    def rollout_defaults(self) -> Mapping[str, Any]:
        """Defaults of rollout settings, by name, that differ from method to method."""
        ...

    @property
    def learning_rates(self) -> LearningRates:
        """Default learning rates."""
        ...

    @property
    def settings(self) -> Any: ...
    def loss_reads_reference(self, settings: Mapping[str, Any]) -> bool:
        """Whether it needs the reference for more than the log, with these settings of the loss."""
        ...

    def without_effect(self, settings: Mapping[str, Any]) -> Mapping[str, str]:
        """Settings of the loss without effect under the others -> what would turn each on."""
        ...

    def contradictions(self, settings: Mapping[str, Any]) -> Mapping[str, str]:
        """Settings of the loss that another one rules out, and that one."""
        ...


READ_THRESHOLD = tuple(sorted(name for name, c in CONVERSIONS.items() if c.threshold != "none"))
"""Conversions that read ``data.threshold``."""

SINKS_READ = {
    "tensorboard": {"folder"},
    "wandb": {"project", "name", "folder", "mode", "tags"},
    "trackio": {"project", "name", "folder"},
    "mlflow": {"project", "name", "uri", "folder", "tags"},
}
"""Settings that each kind of ``run.sinks`` reads."""


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
    """What a rule looks at.

    ``rows``: which of train, eval and test there are, in files or in memory; ``mixed``: the methods
    of `mix`.
    """

    recipe: Recipe
    method: MethodFacts
    rows: Set[str]
    mixed: Sequence[MethodFacts] = ()

    @property
    def needs_reference(self) -> bool:
        return any(method.needs_reference for method in (self.method, *self.mixed))

    @property
    def measures_nothing(self) -> bool:
        """Is there no reference in a run of the policy's own completions?"""
        if not self.method.online or any(method.needs_reference for method in self.mixed):
            return False
        return not (self.recipe.measures_kl or self.method.loss_reads_reference(self.recipe.loss))

    @property
    def served(self) -> bool:
        """Does a server sample?"""
        return self.recipe.rollout.engine != "hf"

    @property
    def adapts(self) -> bool:
        """Does an adapter train?"""
        return self.recipe.model.lora is not None or self.recipe.model.adapter is not None

    @property
    def splits(self) -> bool:
        """Are weights split over processes, for sure?"""
        return self.recipe.parallel.shard == "full" or self.recipe.parallel.tensor > 1

    @property
    def quantizes(self) -> bool:
        """Are frozen weights kept in 4 bits?"""
        return self.recipe.model.quantize is not None

    @property
    def initializes_without_weights(self) -> bool:
        """Is a new adapter's start independent of the model's weights?"""
        lora = self.recipe.model.lora
        return lora is None or lora.init_lora_weights in (True, False, "gaussian", "orthogonal")

    @property
    def serves_adapter(self) -> bool:
        """Does a vLLM server load the adapter that is trained?"""
        return self.recipe.model.lora is not None and self.recipe.rollout.engine == "vllm"

    @property
    def words(self) -> dict[str, str | None]:
        """What a rule's ``why`` may name."""
        return {
            "method": self.method.name,
            "kinds": plural(self.method.kind),
            "convert": self.recipe.data.convert,
        }

    @property
    def converts_astray(self) -> bool:
        """Does ``data.convert`` make what the method does not read?"""
        convert = self.recipe.data.convert
        return convert is not None and not CONVERSIONS[convert].serves(self.method.kind)


@dataclass(frozen=True, slots=True)
class Rule:
    """A mistake about ``setting`` (a pattern of dotted names) where ``broken`` is true.

    ``why`` may name ``{method}``, ``{kinds}`` and ``{convert}``.
    """

    setting: str
    broken: Callable[[Case], bool]
    why: str
    fix: str


def _differs_where_served(case: Case, *, name: str, default: object) -> bool:
    return case.serves_adapter and getattr(case.recipe.model.lora, name) != default


NO_EVAL = "nothing is evaluated during training, as data.eval is empty"
WHOLE = "with parallel.shard: off each process holds all weights"
STORED = "{method} learns from stored answers, and the policy gives none of its own"
IN_PROCESS = "with rollout.engine: hf this process samples"
NO_EFFECT = (
    Rule("rollout.*", lambda c: not c.method.online, STORED, "set reward"),
    Rule(
        "value.*",
        lambda c: not (c.method.online and c.method.name == "ppo"),
        "{method} has no value head",
        "choose ppo",
    ),
    *(
        Rule(
            f"rollout.{name}",
            lambda c: c.method.name != "rejection",
            "only rejection reads it",
            "choose rejection",
        )
        for name in ("top_n", "min_reward")
    ),
    Rule(
        "rollout.mask_truncated",
        lambda c: c.method.online and c.method.name != "rejection" and not c.method.is_on_policy,
        "only rejection and policy gradient methods read it",
        "choose one of them",
    ),
    Rule(
        "train.max_zero_gradient_steps",
        lambda c: not c.method.online,
        "{method} learns from stored answers, of which each step has others",
        "set reward",
    ),
    Rule(
        "reference.cache",
        lambda c: c.method.online,
        "the policy's own answers are new in each round, and nothing that the reference said of "
        "them is asked again",
        "train on stored answers",
    ),
    *(
        Rule(
            f"rollout.{name}",
            lambda c: c.method.online and not c.served,
            IN_PROCESS,
            "set rollout.engine: vllm",
        )
        for name in (
            "url",
            "start",
            "python",
            "transport",
            "folder",
            "timeout",
            "ahead",
            "check_prompts",
            "max_mismatch",
        )
    ),
    Rule(
        "train.drop_last",
        lambda c: c.method.online,
        "a round that reaches the end of the prompts goes on",
        "remove it",
    ),
    Rule(
        "rollout.at_once",
        lambda c: c.recipe.rollout.engine == "vllm",
        "a server decides what it samples at once",
        "set rollout.engine: hf",
    ),
    *(
        Rule(
            f"rollout.{name}",
            lambda c: c.recipe.rollout.engine == "openai",
            "such a server keeps its weights",
            "choose vllm",
        )
        for name in (
            "start",
            "python",
            "transport",
            "folder",
            "ahead",
            "check_prompts",
            "max_mismatch",
        )
    ),
    Rule(
        "rollout.python",
        lambda c: not c.recipe.rollout.start,
        "no server is started",
        "set rollout.start: true",
    ),
    *(
        Rule(setting, lambda c: "eval" not in c.rows, NO_EVAL, "give data.eval")
        for setting in (
            "eval.every",
            "eval.at_start",
            "eval.max_examples",
            "run.keep_best*",
            "run.early_stop*",
        )
    ),
    Rule(
        "eval.train_examples",
        lambda c: c.method.online,
        "the training rows are prompts",
        "leave it out",
    ),
    Rule(
        "reference.*",
        lambda c: not c.needs_reference,
        "{method} reads no reference",
        "choose a method that reads one",
    ),
    Rule(
        "reference.*",
        lambda c: c.measures_nothing,
        "the loss does not read the reference, and rollout.measure_kl does not load a second model",
        "set rollout.measure_kl: true",
    ),
    Rule(
        "reference.sync_mix",
        lambda c: c.recipe.reference.sync_every is None,
        "the reference does not move",
        "set reference.sync_every",
    ),
    Rule(
        "model.attributes",
        lambda c: not c.method.is_reward_model,
        "{method} trains no reward model",
        "choose pointwise",
    ),
    Rule(
        "data.threshold",
        lambda c: c.recipe.data.convert not in READ_THRESHOLD,
        f"only data.convert: {', '.join(READ_THRESHOLD[:-1])} and {READ_THRESHOLD[-1]} read it",
        "set data.convert",
    ),
    *(
        Rule(
            f"data.{name}",
            lambda c: (
                "best_to_demonstrations"
                not in (c.recipe.data.convert, *(part.convert for part in c.recipe.mix))
            ),
            "only data.convert: best_to_demonstrations reads it",
            "set data.convert",
        )
        for name in ("top_n", "mask_truncated")
    ),
    Rule(
        "data.train_on",
        lambda c: all(method.kind != "demonstration" for method in (c.method, *c.mixed)),
        "{method} reads {kinds}, and only demonstrations have other turns to train on",
        "choose a method like sft",
    ),
    Rule(
        "data.stratify",
        lambda c: c.method.kind not in ("judgement", "scored"),
        "{method} reads {kinds}, and only rated answers are thumbs up or down",
        "choose a method like kto",
    ),
    Rule(
        "run.export",
        lambda c: not c.adapts,
        "there is no adapter to merge or to keep apart",
        "set model.lora",
    ),
    *(
        Rule(
            f"parallel.{name}",
            lambda c: c.recipe.parallel.shard == "off",
            WHOLE,
            "set parallel.shard: full",
        )
        for name in ("reshard", "sync", "offload")
    ),
    Rule(
        "run.samples.prompts",
        lambda c: not c.rows & {"eval", "test"},
        "the prompts are those of data.eval or data.test, which are both empty",
        "give data.eval",
    ),
    *(
        Rule(
            f"run.samples.{name}",
            lambda c: c.recipe.run.samples.prompts == 0,
            "no answers are sampled",
            "set run.samples.prompts",
        )
        for name in ("max_new_tokens", "temperature")
    ),
)
"""Settings without effect. Only a setting that differs from its default can break one of these."""

CONTRADICTIONS = (
    Rule(
        "rollout.num_rollouts",
        lambda c: (
            c.method.online
            and c.recipe.rollout.num_rollouts < c.method.least_rollouts
            and (c.method.name != "rejection" or c.recipe.rollout.min_reward is None)
        ),
        "{method} compares answers to the same prompt, and one has nothing to be compared with",
        "set it to 2 or more",
    ),
    Rule(
        "rollout.top_n",
        lambda c: (
            c.method.name == "rejection" and c.recipe.rollout.top_n > c.recipe.rollout.num_rollouts
        ),
        "there are not as many answers to choose from",
        "set it to rollout.num_rollouts at most",
    ),
    Rule(
        "rollout.url",
        lambda c: (
            c.method.online and c.served and not c.recipe.rollout.url and not c.recipe.rollout.start
        ),
        "there is no server to ask",
        "name its address, or set rollout.start: true",
    ),
    Rule(
        "loss.value",
        lambda c: c.method.online is not bool(c.recipe.loss.get("value", c.method.online)),
        "values are learned with the policy's own answers, and ppo cannot do without them there",
        "remove it",
    ),
    Rule(
        "run.keep_best",
        lambda c: (
            c.method.online
            and c.recipe.run.keep_best is not None
            and c.recipe.run.keep_best.metric == "eval/loss"
        ),
        "held-out prompts have no loss",
        "set run.keep_best: {metric: eval/reward/mean, mode: max}",
    ),
    Rule(
        "run.early_stop",
        lambda c: (
            c.method.online
            and c.recipe.run.early_stop is not None
            and c.recipe.run.early_stop.metric == "eval/loss"
        ),
        "held-out prompts have no loss",
        "set its metric to eval/reward/mean, and its mode to max",
    ),
    Rule(
        "rollout.start",
        lambda c: c.recipe.rollout.start and c.recipe.rollout.url is not None,
        "a server that is started has an address of its own",
        "remove rollout.url",
    ),
    Rule(
        "rollout.transport",
        lambda c: (
            c.method.online and c.recipe.rollout.transport not in ("auto", "lora") and c.adapts
        ),
        "under an adapter it is the adapter that a server is sent",
        "set it to auto or lora",
    ),
    Rule(
        "rollout.transport",
        lambda c: c.recipe.rollout.transport == "lora" and not c.adapts,
        "there is no adapter that could be sent",
        "set model.lora, or another transport",
    ),
    Rule(
        "rollout.engine",
        lambda c: c.method.online and c.served and c.splits,
        "weights that are split over processes are not sent to a server",
        "set it to hf, or parallel.shard: off and parallel.tensor: 1",
    ),
    Rule(
        "rollout.engine",
        lambda c: c.recipe.rollout.engine == "openai" and c.method.is_on_policy,
        "{method} compares with the policy that answered, and such a server has weights of its own",
        "set it to vllm or hf, or choose rejection or a method like online_dpo",
    ),
    Rule(
        "rollout.top_p",
        lambda c: c.method.is_on_policy and c.recipe.rollout.top_p < 1,
        "the loss of {method} has a ratio of probabilities over the whole vocabulary, and "
        "rollout.top_p"
        " below 1 samples from a part of it",
        "set rollout.top_p: 1, or choose rejection, online_dpo or online_kto",
    ),
    Rule(
        "reward",
        lambda c: (
            c.method.online
            and len({each.name or each.reward for each in c.recipe.reward}) < len(c.recipe.reward)
        ),
        "two of them have the same name in the log",
        "give one of them another `name`",
    ),
    Rule(
        "run.save_state",
        lambda c: not c.recipe.run.save_state and not c.recipe.run.save_hf,
        "neither state nor a model would be in a checkpoint",
        "set run.save_hf: true, or remove run.save_state",
    ),
    Rule(
        "run.early_stop.metric",
        lambda c: any(
            each is not None and not each.metric.startswith("eval/")
            for each in (c.recipe.run.early_stop, c.recipe.run.keep_best)
        ),
        "only numbers of an evaluation are looked at: their names begin with eval/",
        "put eval/ before it",
    ),
    Rule(
        "reference.cache",
        lambda c: (
            c.recipe.reference.sync_every is not None
            and c.recipe.reference.cache not in ("auto", "off")
        ),
        "a reference that moves with the policy (reference.sync_every) has no values that could "
        "be kept",
        "remove reference.cache, or reference.sync_every",
    ),
    Rule(
        "reference.model",
        lambda c: (
            c.recipe.reference.sync_every is not None and c.recipe.reference.model is not None
        ),
        "a reference that moves with the policy (reference.sync_every) is a copy of it",
        "remove reference.model, or reference.sync_every",
    ),
    Rule(
        "data.convert",
        lambda c: c.converts_astray,
        "{convert} does not make what {method} reads: {kinds}",
        "choose another data.convert or another method",
    ),
    Rule(
        "data.threshold",
        lambda c: (
            c.recipe.data.convert == "scores_to_judgements" and c.recipe.data.threshold is None
        ),
        "{convert} needs the score from which an answer is thumbs up",
        "set data.threshold",
    ),
    Rule(
        "run.export",
        lambda c: c.method.is_reward_model and c.recipe.run.export == "adapter",
        "an adapter does not say what a reward model's scores are of",
        "set run.export: merged",
    ),
    Rule(
        "run.samples.prompts",
        lambda c: c.method.is_reward_model and c.recipe.run.samples.prompts > 0,
        "a reward model ({method}) scores answers and gives none",
        "remove run.samples",
    ),
    Rule(
        "mix",
        lambda c: bool(c.mixed) and any(method.is_reward_model for method in (c.method, *c.mixed)),
        "a reward model is trained by one method alone",
        "remove it, or choose a method that trains a policy",
    ),
    Rule(
        "train.optimizer",
        lambda c: c.recipe.train.optimizer == "adamw_8bit" and c.splits,
        "moments of 8 bits cannot be split over processes",
        "set train.optimizer: adamw, or parallel.shard: off and parallel.tensor: 1",
    ),
    Rule(
        "train.compile",
        lambda c: c.recipe.train.compile == "on" and c.splits,
        "layers that are split over processes are not compiled",
        "remove it, or set parallel.shard: off and parallel.tensor: 1",
    ),
    Rule(
        "train.router_aux_loss",
        lambda c: c.recipe.train.router_aux_loss > 0 and c.splits,
        "the load-balancing loss is not computed where weights are split over processes",
        "remove it, or set parallel.shard: off and parallel.tensor: 1",
    ),
    Rule(
        "train.compile",
        lambda c: c.recipe.train.router_aux_loss > 0 and c.recipe.train.compile == "on",
        "compiled layers do not return the router logits that train.router_aux_loss needs",
        "remove train.compile, or train.router_aux_loss",
    ),
    Rule(
        "model.quantize",
        lambda c: c.quantizes and not c.adapts,
        "weights of 4 bits do not train: an adapter on them does",
        "set model.lora, or remove model.quantize",
    ),
    Rule(
        "loss.class_weights",
        lambda c: c.method.online and c.recipe.loss.get("class_weights") == "auto",
        "how many own answers are good is not known before they are judged, and differs from "
        "round to round",
        "give loss.desirable_weight and loss.undesirable_weight",
    ),
    Rule(
        "loss.kl_target",
        lambda c: c.recipe.loss.get("kl_target") is not None and c.recipe.loss.get("kl_beta") == 0,
        "loss.kl_beta is steered by factors, and 0 stays 0",
        "begin with a small loss.kl_beta, or remove loss.kl_target",
    ),
    Rule(
        "rollout.start",
        lambda c: c.recipe.rollout.start and c.recipe.model.gguf_file is not None,
        "a server is started with a folder of safetensors, not with a GGUF file",
        "start a server of the same weights yourself, and name it in rollout.url",
    ),
    Rule(
        "model.quantize",
        lambda c: c.quantizes and c.recipe.model.gguf_file is not None,
        "the weights of a GGUF file are not quantized once more",
        "remove model.gguf_file or model.quantize",
    ),
    Rule(
        "model.quantize",
        lambda c: c.quantizes and c.recipe.model.dtype == "float64",
        "weights of 4 bits have no products in float64",
        "set model.dtype: bfloat16 or float32",
    ),
    Rule(
        "model.quantize",
        lambda c: c.quantizes and (c.recipe.parallel.tensor > 1 or c.recipe.parallel.offload),
        "weights of 4 bits are split over processes by parallel.shard alone",
        "remove parallel.tensor and parallel.offload, or model.quantize",
    ),
    Rule(
        "model.lora.init_lora_weights",
        lambda c: c.quantizes and not c.initializes_without_weights,
        "PEFT computes it from the model's weights, which model.quantize rounds to 4 bits",
        "set it to true or gaussian, or remove model.quantize",
    ),
    *(
        Rule(
            f"model.lora.{name}",
            partial(_differs_where_served, name=name, default=default),
            "a vLLM server cannot load an adapter with this setting",
            "remove it, or set rollout.engine: hf",
        )
        for name, default in SERVED_LORA_DEFAULTS.items()
    ),
    Rule(
        "train.compile",
        lambda c: c.quantizes and c.recipe.train.compile == "on",
        "layers with weights of 4 bits (model.quantize) are not compiled",
        "remove train.compile, or model.quantize",
    ),
    Rule(
        "model.lora",
        lambda c: c.recipe.model.lora is not None and c.recipe.model.adapter is not None,
        "model.adapter already says the rank and the layers",
        "remove model.lora, or model.adapter to start a new one",
    ),
)
"""Settings that cannot hold together, or that another one makes necessary."""
